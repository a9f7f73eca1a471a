/* forward.h - one pass of the model over up to 64 rows, which may belong to several caches. */
#ifndef ES_FORWARD_H
#define ES_FORWARD_H

#include <stddef.h>
#include <stdint.h>

#include "arch.h"
#include "edgespec.h"
#include "kernels/kernels.h"
#include "kvcache.h"
#include "threads.h"

/* What the arithmetic needs of a model: nothing in here changes once it is loaded. */
typedef struct es_network {
    es_shape shape;
    es_top top;
    es_layer *layer;             /* (layers) */
    const es_kernels *kernels;
    es_pool *pool;
} es_network;

/* Memory of one pass, for any batch. */
typedef struct es_workspace es_workspace;

es_status es_workspace_new(const es_shape *shape, int32_t threads, es_workspace **out);
void es_workspace_free(es_workspace *workspace);             /* NULL is a no-op */
size_t es_workspace_bytes(const es_shape *shape, int32_t threads);

/* The rows of one cache. They are open in it: es_kv_append came before. */
typedef struct es_segment {
    es_kv *kv;
    const int32_t *token;        /* (n) */
    const int32_t *depth;        /* (n) behind `position`; NULL: 0, 1, 2, ... */
    int64_t position;            /* committed positions of the cache */
    int32_t n;
    float *scratch;              /* (threads, es_kv_scratch) */
    size_t scratch_stride;
    const int32_t *taps;         /* (n_taps) hidden states to keep: 0 embedded rows, i what layer
                                    i - 1 adds up to, but after the final norm behind the last */
    int32_t n_taps;
    float *tapped;               /* (n, n_taps, hidden) */
} es_segment;

typedef struct es_batch {
    const es_segment *segment;
    int32_t n_segments;          /* with at most ES_MAX_ROWS rows in all */
    const int32_t *rows;         /* (n_rows) ascending rows of the batch whose logits are wanted */
    int32_t n_rows;
    float *logits;               /* (n_rows, vocab) */
} es_batch;

/* K and V of every row are in the caches afterwards. */
void es_forward(const es_network *network, es_workspace *workspace, const es_batch *batch);

#endif
