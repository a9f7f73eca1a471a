/* draft_merge.c - see draft_merge.h. */
#include "draft_merge.h"

#include "tree.h"

/* Of what the less sure draft could add to the surer one, this share is taken: two drafts that read
   the same text are often wrong together. */
static const float AGREEMENT = 0.5f;
static const float MAX_CHANCE = 0.995f;

enum { MAX_OPEN = 2 * ES_MAX_ROWS };

typedef struct open_row { /* a path waiting for its turn */
    int32_t token;
    int32_t parent;       /* row of the merged tree */
    int32_t in[2];        /* its row in either tree, -1 where it is not */
    float chance;         /* once its parent is accepted */
    float score;
} open_row;

static float chance_in(const es_tree *tree, int32_t row)
{
    float above = tree->score[tree->parent[row]];
    float chance = above > 0.0f ? tree->score[row] / above : 0.0f;
    return chance < MAX_CHANCE ? chance : MAX_CHANCE;
}

static float both(float a, float b)
{
    float high = a > b ? a : b, low = a > b ? b : a;
    float chance = high + AGREEMENT * (1.0f - high) * low;
    return chance < MAX_CHANCE ? chance : MAX_CHANCE;
}

/* Adds the children that row in[0] of a and row in[1] of b have together. */
static int32_t gather(const es_tree *const tree[2], const int32_t *in, open_row *out)
{
    int32_t n = 0;
    for (int32_t t = 0; t < 2; t++) {
        for (int32_t i = in[t] + 1; in[t] >= 0 && i < tree[t]->n; i++) {
            if (tree[t]->parent[i] != in[t]) {
                continue;
            }
            int32_t at = 0;
            while (at < n && out[at].token != tree[t]->token[i]) {
                at++;
            }
            float chance = chance_in(tree[t], i);
            if (at == n) {
                out[n++] = (open_row){.token = tree[t]->token[i], .in = {-1, -1},
                                      .chance = chance};
            } else {
                out[at].chance = both(out[at].chance, chance);
            }
            out[at].in[t] = i;
        }
    }
    return n;
}

static void open_children(const es_tree *const tree[2], const int32_t *in, int32_t parent,
                          float score, open_row *open, int32_t *n_open)
{
    open_row *first = open + *n_open;
    int32_t n = gather(tree, in, first);
    float sum = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        sum += first[i].chance;
    }
    for (int32_t i = 0; i < n; i++) {
        first[i].parent = parent;
        first[i].score = score * (sum > 1.0f ? first[i].chance / sum : first[i].chance);
    }
    *n_open += n;
}

void es_merge(const es_tree *a, const es_tree *b, int32_t rows, float floor, es_tree *tree)
{
    const es_tree *const trees[2] = {a, b};
    open_row open[MAX_OPEN];
    int32_t n_open = 0, n_kept[ES_MAX_ROWS] = {0};
    const int32_t roots[2] = {0, 0};
    es_tree_root(tree, a->token[0]);
    open_children(trees, roots, 0, 1.0f, open, &n_open);
    while (tree->n < rows && n_open > 0) {
        int32_t best = 0;
        for (int32_t i = 1; i < n_open; i++) {
            best = open[i].score > open[best].score ? i : best;
        }
        open_row next = open[best];
        if (next.score < floor) {
            break;
        }
        for (int32_t i = best + 1; i < n_open; i++) {
            open[i - 1] = open[i]; /* those that came first stay first */
        }
        n_open--;
        int32_t row = tree->n++;
        tree->token[row] = next.token;
        tree->parent[row] = next.parent;
        tree->rank[row] = n_kept[next.parent]++;
        tree->depth[row] = tree->depth[next.parent] + 1;
        tree->mask[row] = tree->mask[next.parent] | UINT64_C(1) << row;
        tree->score[row] = next.score;
        open_children(trees, next.in, row, next.score, open, &n_open);
    }
}
