/* model.h - a loaded model: what its targets share. */
#ifndef ES_MODEL_H
#define ES_MODEL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "alloc.h"
#include "arch.h"
#include "edgespec.h"
#include "forward.h"
#include "gguf.h"
#include "placed.h"

struct es_model {
    es_network network;
    es_workspace *work;
    pthread_mutex_t lock;          /* of everything that computes */
    es_gguf *gguf;
    es_placed *placed;             /* (n_placed), the embedding first */
    int32_t n_placed;
    es_pages pages;                /* weights packed here; none before loading began */
    size_t page_bytes;             /* what they will take */
    size_t weight_bytes;           /* of all weights, packed */
    bool is_packed;                /* the file holds tiles */
    bool use_mmap, wants_lock;

    /* how far loading came */
    int32_t next;                  /* placed weight */
    int32_t next_tile;
    size_t done;                   /* bytes */
};

static inline bool es_model_is_loaded(const es_model *model)
{
    return model->next == model->n_placed;
}

#endif
