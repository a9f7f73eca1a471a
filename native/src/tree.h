/* tree.h - small helpers on token trees shared inside the core. */
#ifndef ES_TREE_H
#define ES_TREE_H

#include "edgespec.h"

/* A tree of one row. */
void es_tree_root(es_tree *tree, int32_t token);

/* Drops rows deeper than max_depth (>= 0), then rows from the end until at most max_rows (>= 1)
   are left. The tree must be derived; it stays so. */
void es_tree_clip(es_tree *tree, int32_t max_rows, int32_t max_depth);

/* The largest depth of a derived tree. */
int32_t es_tree_depth(const es_tree *tree);

/* The child of `row` with `token`, the best ranked among duplicates; -1 if there is none. */
int32_t es_tree_child(const es_tree *tree, int32_t row, int32_t token);

#endif
