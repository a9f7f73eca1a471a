/*
 * sample.c - from raw logits to one token: penalties, filters, the draw.
 *
 * Nothing is sorted. A filter needs one boundary value of the row - the k-th largest logit, or the
 * logit at which the nucleus is full - and finds it digit by digit of the float's bits, in three
 * passes over the tokens in question. The draw computes Gumbel noise only for tokens that can
 * still win.
 */
#include "sample.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "fmath.h"
#include "philox.h"

#define LANES 16
#define LN2_UP 0.69314718056 /* ln 2 rounded up */

/* ---- parameters -------------------------------------------------------------------------- */

es_status es_sampling_default(es_sampling *out)
{
    *out = (es_sampling){
        .temperature = 1.0f,
        .top_p = 1.0f,
        .repetition_penalty = 1.0f,
        .penalty_window = 64,
    };
    return ES_OK;
}

es_status es_sampling_check(const es_sampling *s, size_t vocab)
{
    if (vocab < 1 || vocab > INT32_MAX) {
        return es_fail(ES_ERR_ARGUMENT, "vocab: expected 1 to 2^31 - 1, got %zu", vocab);
    }
    /* Written so that a NaN fails every test. */
    if (!(s->temperature >= 0.0f) || isinf(s->temperature)) {
        return es_fail(ES_ERR_ARGUMENT, "temperature: expected 0 (greedy) or more, got %g",
                       (double)s->temperature);
    }
    if (s->top_k < 0) {
        return es_fail(ES_ERR_ARGUMENT, "top_k: expected 0 (off) or more, got %d", (int)s->top_k);
    }
    if (!(s->top_p > 0.0f && s->top_p <= 1.0f)) {
        return es_fail(ES_ERR_ARGUMENT, "top_p: expected above 0, at most 1 (off), got %g",
                       (double)s->top_p);
    }
    if (!(s->min_p >= 0.0f && s->min_p < 1.0f)) {
        return es_fail(ES_ERR_ARGUMENT, "min_p: expected 0 (off) or more, below 1, got %g",
                       (double)s->min_p);
    }
    if (!(s->repetition_penalty > 0.0f) || isinf(s->repetition_penalty)) {
        return es_fail(ES_ERR_ARGUMENT, "repetition_penalty: expected above 0 (1 is off), got %g",
                       (double)s->repetition_penalty);
    }
    if (!isfinite(s->frequency_penalty) || !isfinite(s->presence_penalty)) {
        return es_fail(ES_ERR_ARGUMENT,
                       "frequency_penalty, presence_penalty: expected finite numbers, got %g, %g",
                       (double)s->frequency_penalty, (double)s->presence_penalty);
    }
    if (s->penalty_window < -1) {
        return es_fail(ES_ERR_ARGUMENT, "penalty_window: expected -1 (all) or more, got %d",
                       (int)s->penalty_window);
    }
    for (size_t i = 0; i < s->n_bias; i++) {
        if (s->bias_token[i] < 0 || (size_t)s->bias_token[i] >= vocab) {
            return es_fail(ES_ERR_ARGUMENT, "logit bias: expected a token in [0, %zu), got %d",
                           vocab, (int)s->bias_token[i]);
        }
        if (!(s->bias_value[i] < INFINITY)) {
            return es_fail(ES_ERR_ARGUMENT, "logit bias of token %d: expected a number below "
                           "infinity, got %g", (int)s->bias_token[i], (double)s->bias_value[i]);
        }
    }
    return ES_OK;
}

/* ---- scans ------------------------------------------------------------------------------- */

/* Largest value of a row; false if there is a NaN. */
static bool find_max(const float *row, size_t n, float *out)
{
    float max[LANES];
    int32_t has_nan[LANES] = {0};
    for (size_t j = 0; j < LANES; j++) {
        max[j] = -INFINITY;
    }
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (size_t j = 0; j < LANES; j++) {
            float x = row[i + j];
            max[j] = x > max[j] ? x : max[j];
            has_nan[j] |= x != x;
        }
    }
    for (; i < n; i++) {
        max[0] = row[i] > max[0] ? row[i] : max[0];
        has_nan[0] |= row[i] != row[i];
    }
    int32_t any = 0;
    for (size_t j = 0; j < LANES; j++) {
        max[0] = max[j] > max[0] ? max[j] : max[0];
        any |= has_nan[j];
    }
    *out = max[0];
    return any == 0;
}

static es_status check_max(const float *row, size_t n, float *max)
{
    if (!find_max(row, n, max)) {
        return es_fail(ES_ERR_NUMERIC, "logits: a value is NaN");
    }
    if (*max == -INFINITY) {
        return es_fail(ES_ERR_NUMERIC, "logits: every token has been removed");
    }
    if (*max == INFINITY) {
        return es_fail(ES_ERR_NUMERIC, "logits: a value is infinite (overflow in the model, or a "
                       "temperature or penalty too close to 0)");
    }
    return ES_OK;
}

/* ---- penalties --------------------------------------------------------------------------- */

/* Occurrences of tokens, open addressing; a slot with count 0 is free. */
typedef struct counter {
    int32_t *token;
    int32_t *count;
    size_t mask; /* slots - 1, a power of two less one */
} counter;

#define SMALL_SLOTS 512

static void count_tokens(counter *c, const int32_t *tokens, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        size_t slot = ((uint32_t)tokens[i] * UINT32_C(2654435769) >> 8) & c->mask;
        while (c->count[slot] != 0 && c->token[slot] != tokens[i]) {
            slot = (slot + 1) & c->mask;
        }
        c->token[slot] = tokens[i];
        c->count[slot]++;
    }
}

static void apply_penalties(const es_sampling *s, const counter *c, float *logits)
{
    for (size_t slot = 0; slot <= c->mask; slot++) {
        if (c->count[slot] == 0) {
            continue;
        }
        float *x = &logits[c->token[slot]];
        if (s->repetition_penalty != 1.0f) {
            *x = *x < 0.0f ? *x * s->repetition_penalty : *x / s->repetition_penalty;
        }
        if (s->frequency_penalty != 0.0f) {
            *x -= s->frequency_penalty * (float)c->count[slot];
        }
        if (s->presence_penalty != 0.0f) {
            *x -= s->presence_penalty;
        }
    }
}

static es_status check_tokens(const int32_t *tokens, size_t n, size_t vocab)
{
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || (size_t)tokens[i] >= vocab) {
            return es_fail(ES_ERR_ARGUMENT, "history: expected tokens in [0, %zu), got %d", vocab,
                           (int)tokens[i]);
        }
    }
    return ES_OK;
}

static es_status penalise(const es_sampling *s, const int32_t *history, size_t n_history,
                          const int32_t *path, size_t n_path, float *logits, size_t vocab)
{
    bool is_off = s->repetition_penalty == 1.0f && s->frequency_penalty == 0.0f &&
                  s->presence_penalty == 0.0f;
    if (is_off || s->penalty_window == 0) {
        return ES_OK;
    }
    size_t window = s->penalty_window < 0 ? SIZE_MAX : (size_t)s->penalty_window;
    size_t from_path = n_path < window ? n_path : window;
    size_t from_history = n_history < window - from_path ? n_history : window - from_path;
    path += n_path - from_path;
    history += n_history - from_history;
    es_status status = check_tokens(history, from_history, vocab);
    if (status == ES_OK) {
        status = check_tokens(path, from_path, vocab);
    }
    if (status != ES_OK) {
        return status;
    }

    size_t slots = SMALL_SLOTS;
    while (slots < 2 * (from_path + from_history)) {
        slots *= 2;
    }
    int32_t small[2 * SMALL_SLOTS] = {0};
    int32_t *memory = small;
    if (slots > SMALL_SLOTS) {
        memory = es_calloc(slots, 2 * sizeof(*memory));
        if (memory == NULL) {
            return es_fail(ES_ERR_MEMORY, "penalties: no memory to count %zu tokens",
                           from_path + from_history);
        }
    }
    counter c = {memory, memory + slots, slots - 1};
    count_tokens(&c, history, from_history);
    count_tokens(&c, path, from_path);
    apply_penalties(s, &c, logits);
    if (memory != small) {
        es_free(memory);
    }
    return ES_OK;
}

/* ---- filters ----------------------------------------------------------------------------- */

/* Unsigned integers in the order of the floats; both zeros are one. */
static inline uint32_t key_of(float x)
{
    float y = x + 0.0f;
    uint32_t bits;
    memcpy(&bits, &y, sizeof(bits));
    return bits & UINT32_C(0x80000000) ? ~bits : bits | UINT32_C(0x80000000);
}

static inline float value_of(uint32_t key)
{
    uint32_t bits = key & UINT32_C(0x80000000) ? key & UINT32_C(0x7FFFFFFF) : ~key;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* The key at which the tokens, best first, have collected their share. */
typedef struct boundary {
    uint32_t key;
    double before; /* weight of all larger keys, below target */
    double target;
} boundary;

/* What a token weighs towards its share: its probability over that of the best, or just 1. */
typedef struct weighing {
    bool is_mass;
    float max;
    double target;
    float floor; /* finite; tokens below it cannot be reached, and need not be looked at */
} weighing;

#define DIGITS 3
#define BINS 2048

static boundary find_boundary(const float *logits, size_t vocab, const weighing *w)
{
    static const int shifts[DIGITS] = {21, 10, 0};
    static const uint32_t masks[DIGITS] = {2047, 2047, 1023};
    boundary b = {0, 0.0, w->target};
    double bins[BINS];
    uint64_t prefix = 0; /* the digits found so far */
    for (int digit = 0; digit < DIGITS; digit++) {
        int prefix_shift = digit == 0 ? 32 : shifts[digit - 1];
        memset(bins, 0, sizeof(bins));
        for (size_t t = 0; t < vocab; t++) {
            if (logits[t] < w->floor) {
                continue;
            }
            uint32_t key = key_of(logits[t]);
            if ((uint64_t)key >> prefix_shift == prefix) {
                bins[key >> shifts[digit] & masks[digit]] +=
                    w->is_mass ? es_exp((double)logits[t] - (double)w->max) : 1.0;
            }
        }
        uint32_t chosen = 0;
        double before = b.before;
        for (int32_t i = (int32_t)masks[digit]; i >= 0; i--) {
            if (bins[i] == 0.0) {
                continue;
            }
            chosen = (uint32_t)i;
            b.before = before;
            before += bins[i];
            if (before >= w->target) {
                break;
            }
        }
        prefix = prefix << (prefix_shift - shifts[digit]) | chosen;
    }
    b.key = (uint32_t)prefix;
    return b;
}

#define MAX_GATHERED 8192

/* find_boundary, over a copy of the tokens that reach the floor where they are few. */
static boundary find_boundary_above(const float *logits, size_t vocab, const weighing *w)
{
    float above[MAX_GATHERED];
    size_t n = 0;
    for (size_t t = 0; t < vocab; t++) {
        if (n == MAX_GATHERED) {
            return find_boundary(logits, vocab, w);
        }
        above[n] = logits[t]; /* written over unless it counts: no branch to mispredict */
        n += logits[t] >= w->floor;
    }
    return find_boundary(above, n, w);
}

#define MAX_BLOCKS 1024

/* A value the k-th largest is not below: the k-th largest of the maxima of blocks. */
static float top_k_floor(const float *logits, size_t vocab, float max, size_t k)
{
    float maxima[MAX_BLOCKS];
    size_t block = (vocab + MAX_BLOCKS - 1) / MAX_BLOCKS;
    size_t n = 0;
    for (size_t first = 0; first < vocab; first += block) {
        size_t end = first + block < vocab ? first + block : vocab;
        float top = -INFINITY;
        for (size_t t = first; t < end; t++) {
            top = logits[t] > top ? logits[t] : top;
        }
        maxima[n] = top;
        n += top != -INFINITY;
    }
    if (n < k) {
        return -FLT_MAX;
    }
    weighing w = {false, max, (double)k, -FLT_MAX};
    return value_of(find_boundary(maxima, n, &w).key);
}

static void keep_top_k(float *logits, size_t vocab, float max, size_t k)
{
    size_t n_left = 0;
    for (size_t t = 0; t < vocab; t++) {
        n_left += logits[t] != -INFINITY;
    }
    if (k >= n_left) {
        return;
    }
    weighing w = {false, max, (double)k, top_k_floor(logits, vocab, max, k)};
    float kth = value_of(find_boundary_above(logits, vocab, &w).key);
    for (size_t t = 0; t < vocab; t++) {
        logits[t] = logits[t] < kth ? -INFINITY : logits[t];
    }
}

#define BLOCK 128

/* Sum of exp(logit - max), in an order that depends on the row's length only. */
static double total_mass(const float *logits, size_t vocab, float max)
{
    double sum[LANES] = {0};
    for (size_t first = 0; first < vocab; first += BLOCK) {
        /* Two loops, because compilers vectorise the first only alone. */
        double mass[BLOCK] = {0};
        size_t n = vocab - first < BLOCK ? vocab - first : BLOCK;
        for (size_t i = 0; i < n; i++) {
            mass[i] = es_exp((double)logits[first + i] - (double)max);
        }
        for (size_t i = 0; i < BLOCK; i += LANES) {
            for (size_t j = 0; j < LANES; j++) {
                sum[j] += mass[i + j];
            }
        }
    }
    for (size_t j = 1; j < LANES; j++) {
        sum[0] += sum[j];
    }
    return sum[0];
}

/* The smallest set, best first and lowest id first among equals, that reaches top_p. */
static void keep_top_p(float *logits, size_t vocab, float max, float top_p)
{
    double total = total_mass(logits, vocab, max);
    /* All tokens lighter than an equal share of what may be cut are cut: together they weigh less
       than that. Half of it leaves room for rounding. */
    double light = 0.5 * (1.0 - (double)top_p) * total / (double)vocab;
    double floor = (double)max + es_log(light);
    weighing w = {true, max, (double)top_p * total, floor > -FLT_MAX ? (float)floor : -FLT_MAX};
    boundary b = find_boundary_above(logits, vocab, &w);
    double before = b.before;
    for (size_t t = 0; t < vocab; t++) {
        uint32_t key = key_of(logits[t]);
        bool is_kept = key > b.key;
        if (key == b.key && before < b.target) {
            is_kept = true;
            before += es_exp((double)logits[t] - (double)max);
        }
        logits[t] = is_kept ? logits[t] : -INFINITY;
    }
}

static void keep_min_p(float *logits, size_t vocab, float max, float min_p)
{
    double least = es_log((double)min_p);
    for (size_t t = 0; t < vocab; t++) {
        logits[t] = (double)logits[t] - (double)max >= least ? logits[t] : -INFINITY;
    }
}

/* ---- one row ----------------------------------------------------------------------------- */

es_status es_sample_row(const es_sampling *s, const int32_t *history, size_t n_history,
                        const int32_t *path, size_t n_path, const uint8_t *allowed, float *logits,
                        size_t vocab)
{
    float max;
    if (!find_max(logits, vocab, &max)) {
        return es_fail(ES_ERR_NUMERIC, "logits: a value is NaN: the weights are damaged, or too "
                       "large for the model's arithmetic");
    }
    if (allowed != NULL) {
        for (size_t t = 0; t < vocab; t++) {
            if (!(allowed[t / 8] >> (t % 8) & 1)) {
                logits[t] = -INFINITY;
            }
        }
    }
    for (size_t i = 0; i < s->n_bias; i++) {
        logits[s->bias_token[i]] += s->bias_value[i];
    }
    es_status status = penalise(s, history, n_history, path, n_path, logits, vocab);
    if (status != ES_OK) {
        return status;
    }
    if (s->temperature != 0.0f && s->temperature != 1.0f) {
        for (size_t t = 0; t < vocab; t++) {
            logits[t] /= s->temperature;
        }
    }
    status = check_max(logits, vocab, &max);
    if (status != ES_OK || s->temperature == 0.0f) {
        return status; /* greedy: no filter can remove the best token */
    }
    if (s->top_k > 0 && (size_t)s->top_k < vocab) {
        keep_top_k(logits, vocab, max, (size_t)s->top_k);
    }
    if (s->top_p < 1.0f) {
        keep_top_p(logits, vocab, max, s->top_p);
    }
    if (s->min_p > 0.0f) {
        keep_min_p(logits, vocab, max, s->min_p);
    }
    return ES_OK;
}

es_status es_sample_process(const es_sampling *sampling, const int32_t *history, size_t n_history,
                            const uint8_t *allowed, float *logits, size_t vocab)
{
    es_status status = es_sampling_check(sampling, vocab);
    if (status != ES_OK) {
        return status;
    }
    return es_sample_row(sampling, history, n_history, history, 0, allowed, logits, vocab);
}

/* ---- the draw ---------------------------------------------------------------------------- */

/* An upper bound of the Gumbel noise of u in [high, high + 1] / 2^32. With w = 1 - u, -log u >= w,
   so the noise is at most -log w, and w is at least a power of two read off the exponent. */
static inline double noise_bound(uint32_t high)
{
    uint32_t w = ~high;
    if (w == 0) {
        return ES_NOISE_MAX;
    }
    int32_t exponent = (int32_t)(es_to_bits((double)w) >> 52) - 1023; /* w >= 2^exponent */
    return (double)(32 - exponent) * LN2_UP;
}

typedef struct winner {
    size_t token;
    double score;
} winner;

static void contend(const es_sampling *s, const float *row, uint64_t index, size_t token,
                    winner *best)
{
    double score = (double)row[token] + es_noise(s->seed, index, (int32_t)token);
    if (score > best->score || (score == best->score && token < best->token)) {
        *best = (winner){token, score};
    }
}

static void contend_all(const es_sampling *s, const float *row, uint64_t index,
                        const uint32_t *tokens, uint32_t n, winner *best)
{
    uint32_t high[ES_HIGH_LANES];
    es_uniform_high(s->seed, index, tokens, n, ES_STREAM_NOISE, high);
    for (uint32_t i = 0; i < n; i++) {
        if ((double)row[tokens[i]] + noise_bound(high[i]) >= best->score) {
            contend(s, row, index, tokens[i], best);
        }
    }
}

es_status es_sample_draw(const es_sampling *sampling, const float *processed, size_t vocab,
                         uint64_t index, int32_t *token)
{
    if (vocab < 1 || vocab > INT32_MAX) {
        return es_fail(ES_ERR_ARGUMENT, "vocab: expected 1 to 2^31 - 1, got %zu", vocab);
    }
    float max;
    es_status status = check_max(processed, vocab, &max);
    if (status != ES_OK) {
        return status;
    }
    size_t top = 0;
    while (processed[top] != max) {
        top++;
    }
    winner best = {top, (double)max};
    if (sampling->temperature != 0.0f) {
        best.score = (double)max + es_noise(sampling->seed, index, (int32_t)top);
        uint32_t tokens[ES_HIGH_LANES];
        uint32_t n = 0;
        for (size_t t = 0; t < vocab; t++) {
            tokens[n] = (uint32_t)t;
            n += (double)processed[t] + ES_NOISE_MAX >= best.score;
            if (n == ES_HIGH_LANES) {
                contend_all(sampling, processed, index, tokens, n, &best);
                n = 0;
            }
        }
        contend_all(sampling, processed, index, tokens, n, &best);
    }
    *token = (int32_t)best.token;
    return ES_OK;
}
