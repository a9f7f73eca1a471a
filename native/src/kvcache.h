/* kvcache.h - the K and V rows of one conversation, all layers, and attention over them.

   Layers fall into at most two classes, each with a ring (ring.c) that names the slots: FULL layers
   and WINDOWED ones. Memory per layer and KV head, S = slots of the layer's ring rounded up to 16:
     keys    [S / 16][head_dim][16]   fp16 or int8: 16 slots side by side, so that 16 scores grow
                                      together and no sum crosses lanes
     values  [S][head_dim]            fp16 or int8
     key_scale, value_scale [S]       float, int8 only
   A row reads its own K and V back after rounding, like every other row.

   Logical order: a row sees its visible committed positions ascending (sinks and window where there
   are any), then its ancestors among the open rows by depth, itself last. Scores are laid out in
   that order before the softmax; values are added in that order; in the end the sums are multiplied
   by 1 / sum of the weights. So a row's result is the one it would have alone, decoded one by
   one. */
#ifndef ES_KVCACHE_H
#define ES_KVCACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "edgespec.h"
#include "kernels/kernels.h"

typedef struct es_kv es_kv;

typedef struct es_kv_shape {
    int32_t layers, kv_heads, head_dim;
    const uint8_t *windowed;   /* (layers) 1: the layer belongs to the windowed class; NULL: none */
    int32_t context;           /* positions full layers must hold */
    int32_t window;            /* of windowed layers: position p sees (p - window, p] */
    int32_t sinks;             /* positions [0, sinks) stay visible in windowed layers */
    int32_t batch;             /* most rows of one append */
    es_kv_format format;
} es_kv_shape;

es_status es_kv_new(const es_kv_shape *shape, es_kv **out);
void es_kv_free(es_kv *kv);                                  /* NULL is a no-op */
size_t es_kv_bytes(const es_kv_shape *shape);                /* what es_kv_new would allocate */

int64_t es_kv_length(const es_kv *kv);                       /* committed positions */
/* Opens n <= batch rows behind the committed ones. depth (n) and mask (n) as in es_tree for
   n <= 64; mask NULL: a chain of any n <= batch (prefill), depth ignored. Drops rows still open. */
es_status es_kv_append(es_kv *kv, const int32_t *depth, const uint64_t *mask, int32_t n);
/* Opens n rows more behind the open ones, if there are any; at most ES_MAX_ROWS in all. parent (n):
   an open row with a lower number, or -1. A row sees the committed ones, its ancestors and itself.
   After an error the rows that were open still are. */
es_status es_kv_extend(es_kv *kv, const int32_t *parent, int32_t n);
/* K or V of an open row (head_dim floats), RoPE applied, for one KV head. Different (row, head)
   pairs may be stored by different threads; int8 and fp16 alike. */
void es_kv_store(es_kv *kv, const es_kernels *kernels, int32_t layer, int32_t kv_head, int32_t row,
                 const float *key, const float *value);
es_status es_kv_commit(es_kv *kv, const int32_t *path, int32_t n_path);  /* moves rows, closes */
void es_kv_rollback(es_kv *kv);                                          /* drops open rows */
es_status es_kv_truncate(es_kv *kv, int64_t length);

/* What attention over one layer needs besides K and V. */
typedef struct es_attention {
    const es_kernels *kernels;
    int32_t heads;             /* query heads; heads % kv_heads == 0 */
    float softcap;             /* 0: none */
    const float *sinks;        /* (heads) learned sink logits, or NULL */
} es_attention;

/* Floats of scratch one thread needs for es_kv_attend. */
size_t es_kv_scratch(const es_kv_shape *shape, int32_t heads);
/* Attention of query head `head` for open rows [row0, row0 + n): q + r * q_stride holds row r's
   head_dim floats (RoPE and the scale applied), out + r * out_stride receives head_dim floats.
   r counts from row0. Heads of one KV group, and neighbouring rows, share the key loads when asked
   together: heads [head, head + n_heads), n_heads within one group, q and out of head h at
   + (h - head) * head_dim. */
void es_kv_attend(const es_kv *kv, const es_attention *attention, int32_t layer, int32_t head,
                  int32_t n_heads, int32_t row0, int32_t n, const float *q, size_t q_stride,
                  float *out, size_t out_stride, float *scratch);

#endif
