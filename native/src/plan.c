/* plan.c - see plan.h. */
#include "plan.h"

#include <string.h>

static const double EWMA = 0.2;          /* weight of a new median in c(n) */
static const double DRAFT_EWMA = 0.1;
static const int32_t THIN = 3;           /* fewer measurements than this are not held against n */
static const int32_t SEEN_MAX = 16;
static const int64_t AGE_ROUNDS = 256;   /* every so many rounds `seen` is halved */
static const double FADE = 0.95;         /* of got and want, per drafted round */
static const double PRIOR_ROWS = 2.0;    /* accepted as expected before any round */
static const double TRUST_MAX = 1.5;
static const int64_t PLAIN_GAP = 4;     /* rounds between plain ones while c(1) is thin */
static const int32_t FIRST_ROWS = 4;     /* most rows before anything was measured */
static const double PROBE_SHARE = 0.05;  /* of the time since the last probe, what one may cost */
static const int64_t GAP_FIRST = 4, GAP_MAX = 512;
static const double PASS = 0.06;         /* of a head in plain tokens, before it was measured */
static const double HEAD_FADE = 0.95;    /* of head_tokens and head_time, per round with it */
static const double HEAD_PRIOR = 4.0;    /* rounds HEAD_RATE counts for at first */
static const double HEAD_RATE = 1.2;
static const double HEAD_OLD = 3.0;      /* plain tokens' time old evidence weighs in a new try */
static const int32_t HEAD_TRIES = 3;     /* further rounds of one */
static const int64_t HEAD_GAP = 16;

/* Fills c for every n from the points that are known (weight > 0), pooled where they fall, joined
   by lines, and continued by the prior's slope or the observed one, whichever is steeper. */
static void fill_costs(const double *cost, const int32_t *weight, double slope, double *c)
{
    int32_t at[ES_MAX_ROWS], n_points = 0, first[ES_MAX_ROWS], n_pools = 0;
    double value[ES_MAX_ROWS], mass[ES_MAX_ROWS];
    for (int32_t n = 1; n <= ES_MAX_ROWS; n++) {
        if (weight[n] <= 0 || cost[n] <= 0.0) {
            continue;
        }
        at[n_points] = n;
        first[n_pools] = n_points++;
        value[n_pools] = cost[n];
        mass[n_pools++] = weight[n];
        while (n_pools > 1 && value[n_pools - 2] > value[n_pools - 1]) {
            int32_t i = n_pools - 2;
            value[i] = (value[i] * mass[i] + value[i + 1] * mass[i + 1]) / (mass[i] + mass[i + 1]);
            mass[i] += mass[i + 1];
            n_pools--;
        }
    }
    if (n_points == 0) {
        for (int32_t n = 1; n <= ES_MAX_ROWS; n++) {
            c[n] = 1.0 + slope * (n - 1);
        }
        return;
    }
    int32_t pool = 0, last = 0;
    for (int32_t i = 0; i < n_points; i++) {
        pool += pool + 1 < n_pools && first[pool + 1] <= i;
        int32_t n = at[i];
        c[n] = value[pool];
        if (last == 0) {
            double one = c[n] / (1.0 + slope * (n - 1));
            for (int32_t m = 1; m < n; m++) {
                c[m] = one * (1.0 + slope * (m - 1));
            }
        }
        for (int32_t m = last + 1; last > 0 && m < n; m++) {
            c[m] = c[last] + (c[n] - c[last]) * (m - last) / (n - last);
        }
        last = n;
    }
    double per_row = slope * c[1];
    if (last > 1 && (c[last] - c[1]) / (last - 1) > per_row) {
        per_row = (c[last] - c[1]) / (last - 1);
    }
    for (int32_t n = last + 1; n <= ES_MAX_ROWS; n++) {
        c[n] = c[last] + per_row * (n - last);
    }
}

static void refresh(es_plan *plan)
{
    int32_t firm[ES_MAX_ROWS + 1];
    for (int32_t n = 0; n <= ES_MAX_ROWS; n++) {
        firm[n] = n == 1 || plan->seen[n] >= THIN ? plan->seen[n] : 0;
    }
    fill_costs(plan->cost, plan->seen, plan->slope, plan->smooth);
    fill_costs(plan->cost, firm, plan->slope, plan->hopeful);
}

void es_plan_init(es_plan *plan, const double *cost, double slope)
{
    memset(plan, 0, sizeof *plan);
    plan->slope = slope;
    plan->is_fixed = cost != NULL;
    for (int32_t n = 1; cost != NULL && n <= ES_MAX_ROWS; n++) {
        plan->cost[n] = cost[n] > 0.0 ? cost[n] : 0.0;
        plan->seen[n] = cost[n] > 0.0 ? SEEN_MAX : 0;
    }
    plan->probe_gap = GAP_FIRST;
    plan->probe_at = GAP_FIRST;
    plan->head_tokens = HEAD_PRIOR * HEAD_RATE;
    plan->head_time = HEAD_PRIOR;
    plan->head_gap = HEAD_GAP;
    refresh(plan);
}

static double trust(const es_plan *plan)
{
    double ratio = (plan->got + PRIOR_ROWS) / (plan->want + PRIOR_ROWS);
    return ratio < TRUST_MAX ? ratio : TRUST_MAX;
}

static double at_least(double value, double least)
{
    return value > least ? value : least;
}

float es_plan_floor(const es_plan *plan)
{
    double least = 1.0;
    for (int32_t n = 2; n <= ES_MAX_ROWS; n++) {
        double per_row = (plan->hopeful[n] / plan->hopeful[1] - 1.0) / (n - 1);
        least = per_row < least ? per_row : least;
    }
    /* half: rows that a step of c(n) makes nearly free may follow those that paid for the step */
    return (float)at_least(0.5 * least / at_least(trust(plan), 1.0), 1e-3);
}

static double pass_cost(const es_plan *plan)
{
    return plan->pass > 0.0 ? plan->pass : PASS;
}

/* argmax over n of tokens per second, plain among the choices; ties go to fewer rows. *rate: that
   of the choice. A head's time is spent already, whatever is forwarded. */
static int32_t best_rows(const es_plan *plan, const es_tree *tree, int32_t most, const double *c,
                         double scale, double *rate)
{
    double spent = plan->passes * pass_cost(plan) * c[1];
    double draft = plan->passes > 0 ? spent : plan->draft;
    double tokens = 1.0;
    int32_t n_best = 1;
    *rate = 1.0 / (spent + c[1]);
    for (int32_t n = 2; n <= tree->n && n <= most; n++) {
        tokens += scale * tree->score[n - 1];
        double its = tokens / (draft + c[n]);
        if (its > *rate) {
            *rate = its;
            n_best = n;
        }
    }
    return n_best;
}

/* The unknown is entered by doubling, so that no single round can cost many plain ones. */
static int32_t most_rows(const es_plan *plan)
{
    bool is_timeless = plan->is_fixed || (plan->round > 0 && plan->widest == 0);
    int32_t most = 2 * plan->widest;
    return is_timeless ? ES_MAX_ROWS : most > FIRST_ROWS ? most : FIRST_ROWS;
}

/* All that is compared is compared with c(1): where every round drafts it must be looked up. */
static bool needs_plain(const es_plan *plan)
{
    return !plan->is_fixed && plan->widest > 0 && plan->seen[1] < THIN &&
           plan->round >= plan->plain_at;
}

int32_t es_plan_choose(es_plan *plan, const es_tree *tree)
{
    double scale = trust(plan);
    int32_t most = most_rows(plan);
    double rate;
    int32_t n = best_rows(plan, tree, most, plan->smooth, scale, &rate);
    plan->is_probe = false;
    if (n > 1 && plan->passes == 0 && needs_plain(plan)) {
        plan->plain_at = plan->round + PLAIN_GAP;
        return 1;
    }
    if (plan->round >= plan->probe_at) {
        int32_t hoped = best_rows(plan, tree, most, plan->hopeful, at_least(scale, 1.0), &rate);
        int64_t since = plan->round - (plan->probe_at - plan->probe_gap);
        double budget = plan->smooth[1] * (1.0 + PROBE_SHARE * (double)since);
        while (hoped > 2 && plan->smooth[hoped] > budget) {
            hoped--;
        }
        if (hoped > n) {
            plan->is_probe = true;
            return hoped;
        }
    }
    return n;
}

/* ---- the head ---------------------------------------------------------------------------- */

bool es_plan_wants_head(es_plan *plan, const es_tree *without)
{
    if (needs_plain(plan)) {
        return false;
    }
    double rate;
    best_rows(plan, without, most_rows(plan), plan->smooth, trust(plan), &rate);
    rate *= plan->smooth[1];
    double its = plan->head_tokens / plan->head_time;
    if (its > at_least(rate, 1.0)) {
        plan->head_gap = HEAD_GAP;
        plan->head_tries = 0;
        plan->head_at = plan->round + HEAD_GAP;
        return true;
    }
    if (its > 1.0 || rate > 1.0) {
        return false; /* n-grams are surer just now; what follows is for heads that lose to plain */
    }
    if (plan->head_tries > 0) {
        plan->head_tries--;
        return true;
    }
    if (plan->round < plan->head_at) {
        return false;
    }
    if (plan->head_time > HEAD_OLD) { /* texts change: the try is to decide */
        plan->head_tokens *= HEAD_OLD / plan->head_time;
        plan->head_time = HEAD_OLD;
    }
    plan->head_tries = HEAD_TRIES;
    plan->head_gap = plan->head_gap < GAP_MAX ? 2 * plan->head_gap : GAP_MAX;
    plan->head_at = plan->round + plan->head_gap;
    return true;
}

double es_plan_level_price(const es_plan *plan)
{
    return pass_cost(plan) * at_least(plan->head_tokens / plan->head_time, 1.0);
}

void es_plan_head_ran(es_plan *plan, int32_t passes)
{
    plan->passes = passes;
}

/* ---- learning ---------------------------------------------------------------------------- */

static double median(const double *recent, int32_t n)
{
    if (n < ES_PLAN_RECENT) {
        double least = recent[0]; /* of two, the one less disturbed */
        for (int32_t i = 1; i < n; i++) {
            least = recent[i] < least ? recent[i] : least;
        }
        return least;
    }
    double a = recent[0], b = recent[1], c = recent[2];
    double low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

static void measure(es_plan *plan, int32_t n, double seconds)
{
    double *recent = plan->recent[n];
    memmove(recent + 1, recent, (ES_PLAN_RECENT - 1) * sizeof *recent);
    recent[0] = seconds;
    int32_t n_recent = 0;
    while (n_recent < ES_PLAN_RECENT && recent[n_recent] > 0.0) {
        n_recent++;
    }
    double middle = median(recent, n_recent);
    bool is_new = n_recent < ES_PLAN_RECENT || plan->seen[n] < THIN;
    plan->cost[n] = is_new ? middle : plan->cost[n] + EWMA * (middle - plan->cost[n]);
    plan->seen[n] += plan->seen[n] < SEEN_MAX;
    plan->widest = n > plan->widest ? n : plan->widest;
    refresh(plan);
}

static void learn_head(es_plan *plan, int32_t n, int32_t n_tokens, double draft_seconds)
{
    double one = plan->smooth[1];
    if (!plan->is_fixed && draft_seconds > 0.0 && plan->seen[1] > 0) {
        double *recent = plan->pass_recent;
        memmove(recent + 1, recent, (ES_PLAN_RECENT - 1) * sizeof *recent);
        recent[0] = draft_seconds / plan->passes / one;
        if (recent[ES_PLAN_RECENT - 1] > 0.0) { /* the first reads the prompt: no fair sample */
            double middle = median(recent, ES_PLAN_RECENT);
            plan->pass += (plan->pass > 0.0 ? EWMA : 1.0) * (middle - plan->pass);
        }
    }
    plan->head_tokens = HEAD_FADE * plan->head_tokens + n_tokens;
    plan->head_time = HEAD_FADE * plan->head_time + plan->passes * pass_cost(plan) +
                      plan->smooth[n] / one;
}

void es_plan_learn(es_plan *plan, const es_tree *tree, int32_t n_tokens, double forward_seconds,
                   double draft_seconds)
{
    int32_t n = tree->n;
    plan->round++;
    if (!plan->is_fixed && plan->round % AGE_ROUNDS == 0) {
        for (int32_t i = 1; i <= ES_MAX_ROWS; i++) {
            plan->seen[i] -= plan->seen[i] / 2;
        }
    }
    if (!plan->is_fixed && forward_seconds > 0.0) {
        measure(plan, n, forward_seconds);
    }
    if (plan->passes > 0) {
        learn_head(plan, n, n_tokens, draft_seconds);
    } else if (!plan->is_fixed && draft_seconds > 0.0) {
        plan->draft += DRAFT_EWMA * (draft_seconds - plan->draft);
    }
    if (n > 1) {
        double sum = 0.0;
        for (int32_t i = 1; i < n; i++) {
            sum += tree->score[i];
        }
        plan->got = FADE * plan->got + (n_tokens - 1);
        plan->want = FADE * plan->want + sum;
    }
    if (plan->is_probe) {
        bool is_paying = n_tokens * plan->smooth[1] > plan->draft + plan->smooth[n];
        plan->probe_gap = is_paying ? 1 : plan->probe_gap < GAP_FIRST ? GAP_FIRST
                          : plan->probe_gap < GAP_MAX                 ? plan->probe_gap * 2
                                                                      : GAP_MAX;
        plan->probe_at = plan->round + plan->probe_gap;
        plan->is_probe = false;
    }
    plan->passes = 0;
}

double es_plan_cost(const es_plan *plan, int32_t n)
{
    return plan->smooth[n];
}

void es_plan_measured(const es_plan *plan, double *c)
{
    memcpy(c, plan->cost, sizeof plan->cost);
}
