/* arch.h - what tells one model family from another, in one table, and the sizes of one model. */
#ifndef ES_ARCH_H
#define ES_ARCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "edgespec.h"
#include "gguf.h"
#include "pack.h"
#include "rope.h"

/* ---- weights ----------------------------------------------------------------------------- */

/* Vectors are NULL and matrices have no rows where the family, or the file, has none. */
typedef struct es_layer {
    const float *attn_norm;                  /* (hidden) */
    es_tensor q;                             /* (heads * head_dim, hidden) */
    es_tensor k, v;                          /* (kv_heads * head_dim, hidden) */
    const float *q_bias;                     /* (heads * head_dim) */
    const float *k_bias, *v_bias;            /* (kv_heads * head_dim) */
    const float *q_norm, *k_norm;            /* (head_dim), of every head before RoPE */
    es_tensor o;                             /* (hidden, heads * head_dim) */
    const float *post_attn_norm;             /* (hidden), before the sum with the residual */
    const float *ffn_norm;                   /* (hidden) */
    es_tensor gate, up;                      /* (ffn, hidden) */
    es_tensor down;                          /* (hidden, ffn) */
    const float *post_ffn_norm;              /* (hidden), before the sum with the residual */
} es_layer;

typedef struct es_top {
    es_tensor embedding;                     /* (vocab, hidden) */
    const float *output_norm;                /* (hidden) */
    es_tensor output;                        /* (vocab, hidden); the embedding's tiles when tied */
} es_top;

/* ---- one model's sizes ------------------------------------------------------------------- */

typedef enum es_activation { ES_SILU = 0, ES_GELU = 1 } es_activation;

typedef struct es_family es_family;

typedef struct es_shape {
    const es_family *family;
    int32_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab;
    int32_t max_position;
    float eps;                 /* of every RMS norm */
    float attention_scale;     /* queries are multiplied by it after RoPE */
    float embedding_scale;     /* embedded rows are multiplied by it; 1: not at all */
    es_activation activation;
    bool is_interleaved;       /* RoPE pairs neighbours instead of halves */
    bool has_post_norms;       /* sub-layers' results are normed before they join the residual */
    bool is_tied;              /* the output matrix is the embedding */
    bool is_guest;             /* a draft without either: both are its target's; is_tied too */
    int32_t window;            /* of windowed layers; 0: there are none */
    int32_t window_period;     /* every so many-th layer has no window */
    es_rope rope;
    es_rope local_rope;        /* of windowed layers */
} es_shape;

/* Of a draft in whose file neither embedding nor output matrix are: which vocabulary it is for. */
#define ES_KEY_DRAFT_VOCABULARY "edgespec.draft.vocabulary"

/* Sizes of the model in a GGUF file, every key checked: bounds, divisibility, and that nothing in
   it asks for arithmetic this library does not do (ES_ERR_UNSUPPORTED naming the key). */
es_status es_shape_read(const es_gguf *gguf, es_shape *out);
void es_shape_clear(es_shape *shape);                      /* what a zeroed one holds is a no-op */
bool es_family_is_known(es_gguf_string name);              /* a general.architecture */
const char *es_shape_name(const es_shape *shape);          /* general.architecture */
bool es_shape_is_windowed(const es_shape *shape, int32_t layer);

/* Key "ARCH.KEY", a whole number in [1, most]; absent is `otherwise`, or an error where that is 0. */
es_status es_key_size(const es_gguf *gguf, const char *arch, const char *key, int32_t otherwise,
                      int32_t most, int32_t *out);

/* ---- where the weights are --------------------------------------------------------------- */

/* One weight of the family: its name in the file and its place in es_layer or es_top. */
typedef struct es_slot {
    char name[64];             /* "blk.3.attn_q.weight" */
    int32_t rows, cols;        /* of a vector: 1, n */
    bool is_matrix;            /* an es_tensor lives at `place`; else a const float * */
    int32_t layer;             /* -1: in es_top */
    size_t place;              /* offset in es_layer or es_top */
} es_slot;

int32_t es_slot_count(const es_shape *shape);
void es_slot_at(const es_shape *shape, int32_t index, es_slot *out);

/* Rows and columns of a matrix, tiles or not. */
es_status es_matrix_size(const es_gguf *gguf, const es_gguf_tensor *tensor, int64_t *rows,
                         int64_t *cols);
/* ES_ERR_FORMAT unless the tensor has the slot's shape. */
es_status es_slot_check(const es_gguf *gguf, const es_gguf_tensor *tensor, const es_slot *slot);
/* ES_ERR_FORMAT unless the file has exactly these tensors, in these shapes. Types are not looked
   at. */
es_status es_slots_check(const es_gguf *gguf, const es_shape *shape);

#endif
