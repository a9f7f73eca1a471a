/* placed.h - one weight on its way from a file to the struct that the forward reads. */
#ifndef ES_PLACED_H
#define ES_PLACED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "arch.h"
#include "edgespec.h"
#include "gguf.h"
#include "pack.h"
#include "threads.h"

typedef struct es_placed {
    es_slot slot;
    const es_gguf_tensor *source;
    es_tensor tensor;              /* of a matrix; data is NULL until it is packed */
    size_t n_bytes;                /* packed */
    size_t offset;                 /* in the owner's pages; unless it is packed in the file */
    bool is_in_file;
} es_placed;

/* Fills tensor, n_bytes and is_in_file from slot and source, whose shape is the slot's.
   ES_ERR_UNSUPPORTED naming tensor and type when its values cannot be read. */
es_status es_placed_measure(const es_gguf *gguf, es_placed *placed);

/* Packs tiles [first, first + n) of a matrix on all members of the pool. */
void es_placed_pack(const es_gguf *gguf, const es_placed *placed, es_pool *pool, int32_t first,
                    int32_t n, uint8_t *pages);
/* The values of a vector. */
void es_placed_floats(const es_gguf *gguf, const es_placed *placed, uint8_t *pages);
/* Puts the finished weight to its place in `owner`. */
void es_placed_publish(const es_placed *placed, const uint8_t *pages, void *owner);

#endif
