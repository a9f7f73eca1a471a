/* draft_merge.h - one tree out of two drafts' trees: paths both propose are one path. */
#ifndef ES_DRAFT_MERGE_H
#define ES_DRAFT_MERGE_H

#include "edgespec.h"

/* The best `rows` rows (1..ES_MAX_ROWS, root included) of both, best score first (so the first k
   rows are the k best and closed under ancestors); no score under floor. a and b have one root, and
   no two children of a row have one token. What a row's score owes to its parent's is combined: a
   child only one draft proposes keeps its chance, one that both propose has a better one than
   either gave it, and siblings' chances add up to 1 at most. */
void es_merge(const es_tree *a, const es_tree *b, int32_t rows, float floor, es_tree *tree);

#endif
