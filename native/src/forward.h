/* forward.h - one pass of the model over up to 64 rows, which may belong to several caches. */
#ifndef ES_FORWARD_H
#define ES_FORWARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "arch.h"
#include "edgespec.h"
#include "kernels/kernels.h"
#include "kvcache.h"
#include "threads.h"

/* In front of a draft's layer: every row is the pair of a token and a feature, which is what the
   target, or the draft itself, made of the row before.
     inputs of attention  EAGLE-3    norm(embedding), norm(feature)
                          EAGLE-1/2  fc(embedding, feature) + bias, as it is
     residual             the latter; EAGLE-3: the feature, or what its norm made of it
   A feature of EAGLE-3 that comes from the target is fc(its taps, which may be normed). */
typedef struct es_pair {
    int32_t taps;                /* values of a row of the target's; 0: the network is no draft */
    es_tensor fc;                /* (hidden, taps) or (hidden, 2 * hidden) */
    const float *fc_bias;        /* (hidden), or NULL */
    int32_t n_norms;             /* taps are normed in so many equal parts, each by ... */
    const float *taps_norm[ES_MAX_TAPS]; /* ... (taps / n_norms) */
    const float *feature_norm;   /* (hidden); NULL: EAGLE-1/2 */
    bool adds_normed;            /* the residual is the normed feature */
    bool hands_normed;           /* the final norm's result is the next row's feature, not its input */
} es_pair;

/* What the arithmetic needs of a model: nothing in here changes once it is loaded. */
typedef struct es_network {
    es_shape shape;
    es_top top;
    es_pair pair;
    es_layer *layer;             /* (layers) */
    const es_kernels *kernels;
    es_pool *pool;
} es_network;

/* Memory of one pass, for any batch. */
typedef struct es_workspace es_workspace;

/* For networks of this one's sizes. */
es_status es_workspace_new(const es_network *network, int32_t threads, es_workspace **out);
void es_workspace_free(es_workspace *workspace);             /* NULL is a no-op */

/* The rows of one cache. They are open in it: es_kv_append or es_kv_extend came before. */
typedef struct es_segment {
    es_kv *kv;
    int32_t first;               /* open row that is the segment's first */
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
    const float *feature;        /* of pairs: (n, hidden), or (n, pair.taps) of the target's */
    bool is_from_target;
} es_segment;

typedef struct es_batch {
    const es_segment *segment;
    int32_t n_segments;          /* with at most ES_MAX_ROWS rows in all */
    const int32_t *rows;         /* (n_rows) ascending rows of the batch whose logits are wanted */
    int32_t n_rows;
    float *logits;               /* (n_rows, vocab) */
    float *handed;               /* of pairs: (n_rows, hidden) features for the rows behind these */
} es_batch;

/* K and V of every row are in the caches afterwards. */
void es_forward(const es_network *network, es_workspace *workspace, const es_batch *batch);

#endif
