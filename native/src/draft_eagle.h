/* draft_eagle.h - an EAGLE head at work.

   KV row p - base of position p is the pair of token p + 1 and the target's feature of position p.
   Pairs whose token is known are fed once, in chains, and stay; the last of them has the root of
   the draft. Behind them the levels of a draft are open rows, dropped at its end, whose features
   are what the head made of the rows before. */
#ifndef ES_DRAFT_EAGLE_H
#define ES_DRAFT_EAGLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "draft_history.h"
#include "edgespec.h"
#include "head.h"

typedef struct es_eagle es_eagle;

/* window: positions a row sees, itself included. */
size_t es_eagle_bytes(const es_head *head, int32_t window);
es_status es_eagle_new(const es_head *head, int32_t window, es_eagle **out);
void es_eagle_free(es_eagle *eagle);                     /* NULL is a no-op */

/* The history is about to be appended to, `token` first. */
void es_eagle_continue(es_eagle *eagle, const es_history *history, int32_t token);
/* The history was cut. */
void es_eagle_truncate(es_eagle *eagle, const es_history *history);

/* As in es_draft_net, with the model's lock held. The history holds its last position. */
es_status es_eagle_begin(es_eagle *eagle, const es_history *history, int32_t root,
                         const float **logits);
es_status es_eagle_expand(es_eagle *eagle, const es_tree *tree, const int32_t *rows, int32_t n,
                          const float **logits);
void es_eagle_end(es_eagle *eagle);

#endif
