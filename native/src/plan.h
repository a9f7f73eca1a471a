/*
 * plan.h - how many rows a round should forward: the cost c(n) of n rows, learned or given, against
 * the tokens a tree is expected to yield. One per session, by value.
 *
 *     es_plan_init(&plan, params.cost, params.cost_slope);
 *     ... draft the best rows with scores of at least es_plan_floor(&plan) ...
 *     tree.n = es_plan_choose(&plan, &tree);
 *     ... forward, verify ...
 *     es_plan_learn(&plan, &tree, n_tokens, forward_seconds, draft_seconds);
 *
 * Where a head can draft as well, at a price that matters, it is asked only when it pays:
 *
 *     if (es_plan_wants_head(&plan, &tree)) {         tree: what there is without it
 *         ... grow, with es_plan_level_price(&plan) for a level ...
 *         es_plan_head_ran(&plan, passes);
 *     }
 *
 * Rounds that were not planned (plain on request, ES_TREE_BEST, ES_TREE_SHAPE) may be passed to
 * es_plan_learn too: their times are as good as any.
 */
#ifndef EDGESPEC_PLAN_H
#define EDGESPEC_PLAN_H

#include <stdbool.h>

#include "edgespec.h"

enum { ES_PLAN_RECENT = 3 };

typedef struct es_plan {
    bool is_fixed;                        /* costs were given: times are not looked at */
    double slope;                         /* prior: c(n) / c(1) = 1 + slope * (n - 1) */
    double cost[ES_MAX_ROWS + 1];         /* c(n) measured or given, 0 = unknown */
    int32_t seen[ES_MAX_ROWS + 1];        /* measurements behind cost[n], halved as they age */
    double recent[ES_MAX_ROWS + 1][ES_PLAN_RECENT]; /* the last times, for a median */
    double smooth[ES_MAX_ROWS + 1];       /* c(n) for every n, never falling */
    double hopeful[ES_MAX_ROWS + 1];      /* the same without thinly measured points */
    int32_t widest;                       /* most rows measured so far */
    double draft;                         /* mean seconds a draft takes without a head */
    double got, want;                     /* drafted rows accepted, their score sum; both fading */
    int64_t round;                        /* rounds learned from */
    int64_t plain_at;                     /* first round that may be plain just to measure c(1) */
    int64_t probe_at;                     /* first round that may try what seems not to pay */
    int64_t probe_gap;                    /* rounds between such tries, doubled by failures */
    bool is_probe;                        /* the open round is one */

    /* the head: times in plain tokens, c(1) = 1 */
    int32_t passes;                       /* of the head in the open round; 0: it was not asked */
    double pass;                          /* what one costs, 0 = unmeasured */
    double pass_recent[ES_PLAN_RECENT];
    double head_tokens, head_time;        /* of rounds with it; both fading */
    int64_t head_at;                      /* first round that may ask it against all odds */
    int64_t head_gap;                     /* rounds between such tries, doubled by failures */
    int32_t head_tries;                   /* left of the try begun last */
} es_plan;

/* cost NULL, or (ES_MAX_ROWS + 1) with 0 = unknown; slope >= 0. */
void es_plan_init(es_plan *plan, const double *cost, double slope);

/* Lowest score a row can have and still pay for itself: what a draft need not go below. */
float es_plan_floor(const es_plan *plan);

/* Rows of a tree in descending score order that are worth a forward: 1..tree->n, 1 = plain. */
int32_t es_plan_choose(es_plan *plan, const es_tree *tree);

/* Whether the head should draft too, given the n-grams' tree (n 1: they have none). */
bool es_plan_wants_head(es_plan *plan, const es_tree *without);

/* What a further pass of the head has to promise, in expected tokens. */
double es_plan_level_price(const es_plan *plan);

/* The open round's draft took this many passes of the head, planned or not. */
void es_plan_head_ran(es_plan *plan, int32_t passes);

/* Closes a round: tree as forwarded, n_tokens emitted by it, times in seconds (0 = unknown). */
void es_plan_learn(es_plan *plan, const es_tree *tree, int32_t n_tokens, double forward_seconds,
                   double draft_seconds);

/* c(n) as choices see it, in the unit of what was given or measured (c(1) = 1 while nothing was);
   n 1..ES_MAX_ROWS. */
double es_plan_cost(const es_plan *plan, int32_t n);

/* c (ES_MAX_ROWS + 1): measured or given costs, 0 where there are none. */
void es_plan_measured(const es_plan *plan, double *c);

#endif
