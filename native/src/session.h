/* session.h - the state of one conversation: session.c is its life, round.c its work. */
#ifndef ES_SESSION_H
#define ES_SESSION_H

#include <stdbool.h>

#include "draft_grow.h"
#include "draft_ngram.h"
#include "edgespec.h"
#include "plan.h"

struct es_session {
    /* fixed at birth */
    int32_t vocab;
    int32_t context;
    int32_t rows;
    int32_t kv_block;    /* 0, or KV rows a tree must not straddle a multiple of */
    es_draft_kind draft;
    es_tree_mode mode;
    bool is_blind;       /* a head's children are ranked without looking at the noise */
    es_tree shape;       /* valid in ES_TREE_SHAPE */
    int32_t *eos;        /* (n_eos), owned */
    int32_t n_eos;

    /* the sequence */
    int32_t *tokens;     /* (context + 1), owned */
    size_t length;
    uint64_t evicted;    /* tokens dropped in front: offset of the noise index */
    es_ngram *ngram;     /* owned; NULL without ES_DRAFT_NGRAM */
    es_drafter *drafter; /* attached, the host's; NULL: none */
    es_grow *grow;       /* owned; what is known of the drafter's guesses */
    es_plan plan;

    /* the reply in progress */
    bool is_generating;
    es_sampling sampling;
    int32_t *bias_token; /* (n_bias), owned; sampling points here */
    float *bias_value;
    int64_t left;        /* tokens it may still emit */
    es_stats stats;

    /* the round in progress */
    bool is_open;
    es_round_kind kind;
    es_tree tree;        /* as handed out */
    double draft_seconds;
    bool has_proposal;   /* the host's tree waits for the next draft round */
    bool is_proposed;    /* the open round forwards one */
    es_tree proposal;
    float *scratch;      /* (vocab), owned */
};

#endif
