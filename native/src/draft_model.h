/* draft_model.h - a small language model at work as a draft.

   KV row p - base is the token of position p. Committed tokens and the root of the draft are fed
   once, in chains, and stay. Behind the root the levels of a draft are open rows, dropped at its
   end. Positions count from base: how long the conversation is does not matter.

   Rows see the last `window` of them and the first few, which models lean on, until the cache is as
   long as the model's positions reach; then it begins again with the last. A model with windows of
   its own keeps these, and its other layers see all there is: so it begins again whenever `window`
   rows are there. */
#ifndef ES_DRAFT_MODEL_H
#define ES_DRAFT_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "draft_history.h"
#include "edgespec.h"
#include "head.h"

typedef struct es_small es_small;

/* window: positions a row sees, itself included. */
size_t es_small_bytes(const es_head *head, int32_t window);
es_status es_small_new(const es_head *head, int32_t window, es_small **out);
void es_small_free(es_small *small);                     /* NULL is a no-op */

/* The history is about to be appended to, `token` first. */
void es_small_continue(es_small *small, const es_history *history, int32_t token);
/* The history was cut. */
void es_small_truncate(es_small *small, const es_history *history);

/* As in es_draft_net, with the target's lock held. The history holds its last position. */
es_status es_small_begin(es_small *small, const es_history *history, int32_t root,
                         const float **logits);
es_status es_small_expand(es_small *small, const es_tree *tree, const int32_t *rows, int32_t n,
                          const float **logits);
void es_small_end(es_small *small);

#endif
