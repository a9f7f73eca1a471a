/* draft_medusa.h - a Medusa head at work: all levels of a draft are guessed from the target's last
   hidden state alone. Level i, from 0, is head i's, the same behind every row. */
#ifndef ES_DRAFT_MEDUSA_H
#define ES_DRAFT_MEDUSA_H

#include <stddef.h>
#include <stdint.h>

#include "draft_history.h"
#include "edgespec.h"
#include "head.h"

typedef struct es_medusa es_medusa;

size_t es_medusa_bytes(const es_head *head);
es_status es_medusa_new(const es_head *head, es_medusa **out);
void es_medusa_free(es_medusa *medusa);                  /* NULL is a no-op */

/* As in es_draft_net, with the model's lock held. The history holds its last position. */
es_status es_medusa_begin(es_medusa *medusa, const es_history *history, const float **logits);
es_status es_medusa_expand(es_medusa *medusa, const es_tree *tree, const int32_t *rows, int32_t n,
                           const float **logits);

#endif
