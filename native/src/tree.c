/* tree.c - token trees: parents and ranks are the record, depth and mask derive from them. */
#include "tree.h"

#include "error.h"

es_status es_tree_derive(es_tree *tree)
{
    if (tree->n < 1 || tree->n > ES_MAX_ROWS) {
        return es_fail(ES_ERR_ARGUMENT, "tree: expected 1 to %d rows, got %d", ES_MAX_ROWS,
                       (int)tree->n);
    }
    if (tree->parent[0] != -1) {
        return es_fail(ES_ERR_ARGUMENT, "tree: row 0 is the root, expected parent -1, got %d",
                       (int)tree->parent[0]);
    }
    uint64_t seen[ES_MAX_ROWS] = {0}; /* by row: the ranks its children have taken */
    for (int32_t i = 1; i < tree->n; i++) {
        int32_t parent = tree->parent[i];
        int32_t rank = tree->rank[i];
        if (parent < 0 || parent >= i) {
            return es_fail(ES_ERR_ARGUMENT, "tree: row %d: expected a parent in [0, %d), got %d",
                           (int)i, (int)i, (int)parent);
        }
        if (rank < 0 || rank >= ES_MAX_ROWS) {
            return es_fail(ES_ERR_ARGUMENT, "tree: row %d: expected a rank in [0, %d), got %d",
                           (int)i, ES_MAX_ROWS, (int)rank);
        }
        if (seen[parent] >> rank & 1) {
            return es_fail(ES_ERR_ARGUMENT, "tree: row %d: rank %d is taken by a sibling", (int)i,
                           (int)rank);
        }
        seen[parent] |= UINT64_C(1) << rank;
    }
    tree->depth[0] = 0;
    tree->mask[0] = 1;
    for (int32_t i = 1; i < tree->n; i++) {
        tree->depth[i] = tree->depth[tree->parent[i]] + 1;
        tree->mask[i] = tree->mask[tree->parent[i]] | UINT64_C(1) << i;
    }
    return ES_OK;
}

void es_tree_root(es_tree *tree, int32_t token)
{
    tree->n = 1;
    tree->token[0] = token;
    tree->parent[0] = -1;
    tree->rank[0] = 0;
    tree->depth[0] = 0;
    tree->mask[0] = 1;
    tree->score[0] = 1.0f;
}

void es_tree_clip(es_tree *tree, int32_t max_rows, int32_t max_depth)
{
    int32_t moved[ES_MAX_ROWS]; /* by old row: its new row */
    int32_t n = 0;
    for (int32_t i = 0; i < tree->n && n < max_rows; i++) {
        if (tree->depth[i] > max_depth) {
            continue; /* so are its descendants */
        }
        int32_t parent = i == 0 ? -1 : moved[tree->parent[i]];
        moved[i] = n;
        tree->token[n] = tree->token[i];
        tree->parent[n] = parent;
        tree->rank[n] = tree->rank[i];
        tree->depth[n] = tree->depth[i];
        tree->score[n] = tree->score[i];
        tree->mask[n] = (i == 0 ? 0 : tree->mask[parent]) | UINT64_C(1) << n;
        n++;
    }
    tree->n = n;
}

int32_t es_tree_depth(const es_tree *tree)
{
    int32_t depth = 0;
    for (int32_t i = 1; i < tree->n; i++) {
        depth = tree->depth[i] > depth ? tree->depth[i] : depth;
    }
    return depth;
}

int32_t es_tree_child(const es_tree *tree, int32_t row, int32_t token)
{
    int32_t best = -1;
    for (int32_t i = row + 1; i < tree->n; i++) {
        if (tree->parent[i] == row && tree->token[i] == token &&
            (best < 0 || tree->rank[i] < tree->rank[best])) {
            best = i;
        }
    }
    return best;
}
