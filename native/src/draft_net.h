/* draft_net.h - what a drafter can say about the tokens behind a row of the tree being grown. */
#ifndef ES_DRAFT_NET_H
#define ES_DRAFT_NET_H

#include <stdbool.h>
#include <stdint.h>

#include "edgespec.h"

enum { ES_DRAFT_WIDTH = 8 };  /* most rows of one expand */

/* One draft is begin, then expand level by level, then end; end also after an error. */
typedef struct es_draft_net {
    void *self;
    int32_t vocab;         /* draft tokens */
    const int32_t *ids;    /* (vocab) ascending ids of the target; NULL: the same */
    int32_t depth;         /* most levels, the root's children being the first; 0: any */
    int32_t width;         /* most rows of one expand, at most ES_DRAFT_WIDTH */
    /* Feeds what is pending. logits (vocab) of the children of `root`, the token behind the
       committed ones; valid until the next call. is_ready false: there is nothing to draft from
       yet, and logits are not set. */
    es_status (*begin)(void *self, int32_t root, const float **logits, bool *is_ready);
    /* Logits (n, vocab) of the children of rows[0..n) of `tree`, valid until the next call. The
       rows ascend and have one depth, that of the call before or one more (the first call: 1);
       their tokens, depths and parents are set; each parent but the root has been expanded. Row
       numbers stay as they are until the end; at most ES_MAX_ROWS rows are expanded in all. */
    es_status (*expand)(void *self, const es_tree *tree, const int32_t *rows, int32_t n,
                        const float **logits);
    void (*end)(void *self); /* drops the levels */
} es_draft_net;

/* The drafter's own, as long as it lives. */
const es_draft_net *es_drafter_net(es_drafter *drafter);

#endif
