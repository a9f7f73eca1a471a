/* verify.c - which path of a tree is kept, so that tokens have the target's own distribution. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "edgespec.h"
#include "error.h"
#include "philox.h"
#include "sample.h"
#include "tree.h"

static es_status check_rows(const es_tree *tree)
{
    if (tree->n < 1 || tree->n > ES_MAX_ROWS) {
        return es_fail(ES_ERR_ARGUMENT, "tree: expected 1 to %d rows, got %d", ES_MAX_ROWS,
                       (int)tree->n);
    }
    return ES_OK;
}

/* ---- coupled ----------------------------------------------------------------------------- */

es_status es_verify_coupled(const es_tree *tree, const float *logits, size_t stride, size_t vocab,
                            const es_sampling *sampling, const int32_t *history, size_t n_history,
                            uint64_t index, const uint8_t *allowed, float *scratch, es_verdict *out)
{
    es_status status = check_rows(tree);
    if (status == ES_OK) {
        status = es_sampling_check(sampling, vocab);
    }
    if (status != ES_OK) {
        return status;
    }
    if (stride < vocab) {
        return es_fail(ES_ERR_ARGUMENT, "logits: expected a stride of %zu or more, got %zu", vocab,
                       stride);
    }
    es_verdict verdict = {0};
    for (int32_t row = 0; row >= 0;) {
        int32_t n = verdict.n; /* also the depth of row: the path so far is verdict.token */
        memcpy(scratch, logits + (size_t)row * stride, vocab * sizeof(*scratch));
        const uint8_t *bits =
            allowed == NULL ? NULL : allowed + (size_t)row * ((vocab + 7) / 8);
        status = es_sample_row(sampling, history, n_history, verdict.token, (size_t)n, bits,
                               scratch, vocab);
        if (status != ES_OK) {
            return status;
        }
        status = es_sample_draw(sampling, scratch, vocab, index + (uint64_t)n, &verdict.token[n]);
        if (status != ES_OK) {
            return status;
        }
        verdict.row[n] = row;
        verdict.n = n + 1;
        row = es_tree_child(tree, row, verdict.token[n]);
    }
    *out = verdict;
    return ES_OK;
}

/* ---- rejection --------------------------------------------------------------------------- */

/* Makes x (n) sum to 1; false, x unchanged, when it has no mass. */
static bool normalise(float *x, size_t n)
{
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) {
        sum += (double)x[i];
    }
    if (!(sum > 0.0)) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        x[i] = (float)((double)x[i] / sum);
    }
    return true;
}

/* target <- norm((target - draft)+). Where the two agree up to rounding nothing is left of it: then
   the refused token alone is taken out. */
static void take_residual(float *target, const float *draft, size_t vocab, int32_t refused)
{
    double left = 0.0;
    for (size_t t = 0; t < vocab; t++) {
        left += target[t] > draft[t] ? (double)(target[t] - draft[t]) : 0.0;
    }
    if (left > 0.0) {
        for (size_t t = 0; t < vocab; t++) {
            target[t] = target[t] > draft[t] ? target[t] - draft[t] : 0.0f;
        }
        normalise(target, vocab);
        return;
    }
    float kept = target[refused];
    target[refused] = 0.0f;
    if (!normalise(target, vocab)) {
        target[refused] = kept;
    }
}

/* The draft after `refused` (n) were drawn from it without replacement: zeroed and normalised; once
   its support is used up, uniform over what was not refused. */
static void draw_out(float *draft, size_t vocab, const int32_t *refused, int32_t n)
{
    draft[refused[n - 1]] = 0.0f;
    if (normalise(draft, vocab)) {
        return;
    }
    for (size_t t = 0; t < vocab; t++) {
        draft[t] = 1.0f;
    }
    for (int32_t i = 0; i < n; i++) {
        draft[refused[i]] = 0.0f;
    }
    normalise(draft, vocab);
}

static int32_t draw_from(const float *weights, size_t vocab, double uniform)
{
    double sum = 0.0;
    for (size_t t = 0; t < vocab; t++) {
        sum += (double)weights[t];
    }
    double left = uniform * sum;
    int32_t last = 0; /* of the tokens with any weight: rounding cannot step outside them */
    for (size_t t = 0; t < vocab; t++) {
        if (weights[t] > 0.0f) {
            last = (int32_t)t;
            left -= (double)weights[t];
            if (left < 0.0) {
                break;
            }
        }
    }
    return last;
}

/* The child of row with the smallest rank above `rank`; -1 past the last. */
static int32_t next_child(const es_tree *tree, int32_t row, int32_t rank)
{
    int32_t best = -1;
    for (int32_t i = row + 1; i < tree->n; i++) {
        if (tree->parent[i] == row && tree->rank[i] > rank &&
            (best < 0 || tree->rank[i] < tree->rank[best])) {
            best = i;
        }
    }
    return best;
}

/* Copies one row of probabilities and checks it. */
static es_status load(float *out, const float *row, size_t vocab, const char *what, int32_t at)
{
    memcpy(out, row, vocab * sizeof(*out));
    for (size_t t = 0; t < vocab; t++) {
        if (!(out[t] >= 0.0f) || isinf(out[t])) {
            return es_fail(ES_ERR_NUMERIC,
                           "%s row %d: expected probabilities, got %g for token %zu", what,
                           (int)at, (double)out[t], t);
        }
    }
    if (!normalise(out, vocab)) {
        return es_fail(ES_ERR_NUMERIC, "%s row %d: every token has probability 0", what, (int)at);
    }
    return ES_OK;
}

/* One position: tries the children of row; *token is what was emitted, *child its row or -1. */
static es_status reject_at(const es_tree *tree, int32_t row, const float *p, const float *q,
                           size_t vocab, es_rejection rule, uint64_t seed, uint64_t index,
                           float *scratch, int32_t *token, int32_t *child)
{
    float *target = scratch;
    float *draft = scratch + vocab;
    es_status status = load(target, p + (size_t)row * vocab, vocab, "p", row);
    if (status != ES_OK) {
        return status;
    }
    int32_t refused[ES_MAX_ROWS];
    int32_t n_refused = 0;
    uint32_t draw = 0;
    for (*child = next_child(tree, row, -1); *child >= 0;
         *child = next_child(tree, row, tree->rank[*child])) {
        *token = tree->token[*child];
        if (*token < 0 || (size_t)*token >= vocab) {
            return es_fail(ES_ERR_ARGUMENT, "tree row %d: expected a token in [0, %zu), got %d",
                           (int)*child, vocab, (int)*token);
        }
        if (n_refused == 0) {
            status = load(draft, q + (size_t)row * vocab, vocab, "q", row);
            if (status != ES_OK) {
                return status;
            }
        }
        if (!(draft[*token] > 0.0f)) {
            return es_fail(ES_ERR_ARGUMENT,
                           "tree row %d: token %d cannot have been drawn from q of row %d",
                           (int)*child, (int)*token, (int)row);
        }
        double u = es_uniform(seed, index, draw++, ES_STREAM_REJECTION);
        if (u * (double)draft[*token] < (double)target[*token]) {
            return ES_OK;
        }
        take_residual(target, draft, vocab, *token);
        refused[n_refused++] = *token;
        if (rule == ES_REJECT_WITHOUT_REPLACEMENT) {
            draw_out(draft, vocab, refused, n_refused);
        }
    }
    *token = draw_from(target, vocab, es_uniform(seed, index, draw, ES_STREAM_REJECTION));
    return ES_OK;
}

es_status es_verify_rejection(const es_tree *tree, const float *p, const float *q, size_t vocab,
                              es_rejection rule, uint64_t seed, uint64_t index, float *scratch,
                              es_verdict *out)
{
    if (rule != ES_REJECT_WITHOUT_REPLACEMENT && rule != ES_REJECT_WITH_REPLACEMENT) {
        return es_fail(ES_ERR_ARGUMENT, "rejection rule: expected 0 or 1, got %d", (int)rule);
    }
    if (vocab < 1 || vocab > INT32_MAX) {
        return es_fail(ES_ERR_ARGUMENT, "vocab: expected 1 to 2^31 - 1, got %zu", vocab);
    }
    es_status status = check_rows(tree);
    if (status != ES_OK) {
        return status;
    }
    es_verdict verdict = {0};
    for (int32_t row = 0; row >= 0;) {
        int32_t n = verdict.n;
        int32_t child;
        status = reject_at(tree, row, p, q, vocab, rule, seed, index + (uint64_t)n,
                                     scratch, &verdict.token[n], &child);
        if (status != ES_OK) {
            return status;
        }
        verdict.row[n] = row;
        verdict.n = n + 1;
        row = child;
    }
    *out = verdict;
    return ES_OK;
}
