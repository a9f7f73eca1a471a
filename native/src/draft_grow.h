/*
 * draft_grow.h - trees grown level by level out of what a head says: which tokens to draft behind
 * which, how likely the target is to agree, and when another level is not worth its pass.
 *
 *     es_grow_new(es_drafter_net(drafter), &grow);
 *     es_grow_best(grow, &request, &tree);        or es_grow_shape
 *     ... the tree, or a part of it, is verified; r = es_round ...
 *     es_grow_learn(grow, r.token, r.n);          plain rounds too, as with n-grams
 *
 * The tree is a function of the head's logits, the request and what was learned before.
 */
#ifndef ES_DRAFT_GROW_H
#define ES_DRAFT_GROW_H

#include <stdbool.h>

#include "draft_net.h"
#include "edgespec.h"

typedef struct es_grow es_grow;

typedef struct es_grow_request {
    int32_t root;                /* the last token of the sequence */
    int32_t rows;                /* that will be forwarded, root included: growth beyond is idle */
    int32_t depth;               /* most levels below the root */
    float floor;                 /* no row with a lower score */
    double price;                /* of a level in expected tokens: what it must promise; 0: free */
    int32_t vocab;               /* tokens the target can say: only ids below are drafted */
    const es_sampling *sampling; /* how the target's rows will be drawn from ... */
    uint64_t index;              /* ... and the index of the noise for the root's children */
    bool is_blind;               /* rank by probability alone, whatever the noise */
} es_grow_request;

/* net is the drafter's and outlives it. */
es_status es_grow_new(const es_draft_net *net, es_grow **out);
void es_grow_free(es_grow *grow);                               /* NULL is a no-op */

/* The best rows, best score first (so the first k rows are the k best and closed under ancestors):
   request->rows of them, and as many more as were met on the way. score is the estimated chance
   that the target accepts the row. n is 1 where the head has nothing to say. */
es_status es_grow_best(es_grow *grow, const es_grow_request *request, es_tree *tree);

/* Fills the derived tree `shape`: the child of rank r is its parent's r-th best. Only rows with
   children in the shape are expanded. Rows the head has no token for - too deep, a rank beyond its
   vocabulary - are left out with their descendants; what stays keeps order and rank. rows and floor
   are not looked at. */
es_status es_grow_shape(es_grow *grow, const es_grow_request *request, const es_tree *shape,
                        es_tree *tree);

/* Passes of the head the last tree took: 0 when it was not ready. */
int32_t es_grow_passes(const es_grow *grow);

/* The sequence is about to go on with tokens (n) the target generated: adjusts the estimates by how
   the last tree compares, whether or not its rows were forwarded. */
void es_grow_learn(es_grow *grow, const int32_t *tokens, int32_t n);

/* The sequence went on otherwise, or was cut: the last tree is not to be judged. */
void es_grow_forget(es_grow *grow);

#endif
