/* head.h - the weights of a draft beside its target's. */
#ifndef ES_HEAD_H
#define ES_HEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "alloc.h"
#include "edgespec.h"
#include "forward.h"
#include "gguf.h"
#include "model.h"

/* A residual block of Medusa: x + silu(weight x + bias). */
typedef struct es_block {
    es_tensor weight;              /* (hidden, hidden) */
    const float *bias;             /* (hidden) */
} es_block;

struct es_head {
    es_head_info info;
    es_model *target;
    es_gguf *gguf;
    es_pages pages;                /* its own weights */
    int32_t *ids;                  /* (draft_vocab) ascending ids of the target; NULL: the same */
    int32_t taps_width;            /* values of a row of the hidden states it reads */

    /* EAGLE: a network of one layer. top.output_norm is NULL in EAGLE-1/2. */
    es_network network;
    es_layer layer;
    es_workspace *work;
    int32_t window;                /* positions a row sees at most, itself included */

    /* Medusa */
    int32_t n_blocks;              /* of each head */
    es_block *block;               /* (heads, n_blocks) */
    es_tensor *output;             /* (heads) projections */
    bool is_output_shared;         /* they are one and the same */

    /* A small model; network, work and gguf are its own. */
    es_model *model;
    uint8_t *windowed;             /* (layers) 1: rows of this layer look back over a window */
};

#endif
