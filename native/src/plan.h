/*
 * plan.h - how many rows a round should forward: the cost c(n) of n rows, learned or given, against
 * the tokens a tree is expected to yield. One per session, by value.
 *
 *     es_plan_init(&plan, params.cost, params.cost_slope);
 *     ... draft up to es_plan_ask(&plan, most) rows; 1 = do not draft, forward the root alone ...
 *     tree.n = es_plan_choose(&plan, &tree);
 *     ... forward, verify ...
 *     es_plan_learn(&plan, &tree, n_tokens, forward_seconds, draft_seconds);
 */
#ifndef EDGESPEC_PLAN_H
#define EDGESPEC_PLAN_H

#include <stdbool.h>

#include "edgespec.h"

typedef struct es_plan {
    bool is_fixed;                        /* cost was given: nothing is learned about it */
    double slope;                         /* prior: c(n) / c(1) = 1 + slope * (n - 1) */
    double cost[ES_MAX_ROWS + 1];         /* c(n), 0 = unknown */
    int32_t seen[ES_MAX_ROWS + 1];        /* measurements behind cost[n] */
    double smooth[ES_MAX_ROWS + 1];       /* monotone c(n) for every n, what choices are made by */
    double recent[ES_MAX_ROWS + 1][3];    /* last raw times per n, for a median */
    double draft;                         /* mean seconds one draft takes */
    double trust;                         /* accepted / expected, learned: scales the scores */
    double expected;                      /* score sum of the rows chosen this round */
    int64_t round;                        /* rounds planned */
    int64_t probe_at;                     /* round of the next probe while drafting is off */
    int64_t probe_gap;                    /* rounds between probes, grows while they fail */
    bool is_probe;                        /* this round is one */
} es_plan;

/* cost NULL, or (ES_MAX_ROWS + 1) with 0 = unknown; slope >= 0. */
void es_plan_init(es_plan *plan, const double *cost, double slope);

/* A new reply begins: what was learned stays, back-off starts afresh. */
void es_plan_begin(es_plan *plan);

/* Rows, root included, worth asking the draft for: 1..most. */
int32_t es_plan_ask(const es_plan *plan, int32_t most);

/* Rows of a tree in descending score order that are worth a forward: 1..tree->n, 1 = plain. */
int32_t es_plan_choose(es_plan *plan, const es_tree *tree);

/* Closes the round choose opened: tree as forwarded, n_tokens emitted by it, times in seconds (0 =
   unknown). */
void es_plan_learn(es_plan *plan, const es_tree *tree, int32_t n_tokens, double forward_seconds,
                   double draft_seconds);

/* c(n) as choices see it, in the unit of what was given or measured; n 1..ES_MAX_ROWS. */
double es_plan_cost(const es_plan *plan, int32_t n);

/* c (ES_MAX_ROWS + 1): measured or given costs, 0 where there are none. */
void es_plan_measured(const es_plan *plan, double *c);

#endif
