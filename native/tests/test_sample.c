/* Random numbers, our exp and log, processing and drawing at the edges. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "alloc.h"
#include "check.h"
#include "edgespec.h"
#include "fmath.h"
#include "philox.h"

/* Known answers published with the generator. */
static void test_philox(void)
{
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        uint32_t out[4];
        es_philox(known[i].counter, known[i].key, out);
        CHECK(memcmp(out, known[i].out, sizeof(out)) == 0);
    }
}

static void test_uniforms(void)
{
    uint32_t lane[ES_HIGH_LANES] = {0}, high[ES_HIGH_LANES];
    for (uint32_t n = 1; n <= ES_HIGH_LANES; n += 7) {
        for (uint32_t i = 0; i < n; i++) {
            lane[i] = i * 2654435761u;
        }
        es_uniform_high(42, UINT64_C(1) << 40, lane, n, ES_STREAM_NOISE, high);
        for (uint32_t i = 0; i < n; i++) {
            double u = es_uniform(42, UINT64_C(1) << 40, lane[i], ES_STREAM_NOISE);
            CHECK(u > 0.0 && u < 1.0);
            CHECK(u >= high[i] * 0x1p-32 && u <= (high[i] + 1.0) * 0x1p-32);
        }
    }
    CHECK(es_uniform(1, 2, 3, ES_STREAM_NOISE) != es_uniform(1, 2, 3, ES_STREAM_REJECTION));
    /* The extremes of what es_uniform can return. */
    CHECK(es_gumbel(1.0 - 0x1p-53) < ES_NOISE_MAX);
    CHECK(es_gumbel(1.0 - 0x1p-53) > 36.7);
    CHECK(isfinite(es_gumbel(0x1p-54)));
}

static double error_in_units(double ours, double exact)
{
    return fabs(ours - exact) / (fabs(exact) * DBL_EPSILON + DBL_MIN);
}

static void test_exp_log(void)
{
    double worst = 0.0;
    for (int32_t i = 0; i <= 200000; i++) {
        double x = -700.0 * i / 200000.0;
        worst = fmax(worst, error_in_units(es_exp(x), exp(x)));
    }
    CHECK(worst < 4.0);
    CHECK(es_exp(0.0) == 1.0);
    CHECK(es_exp(-1e300) > 0.0 && es_exp(-INFINITY) < 1e-300);
    worst = 0.0;
    for (uint32_t i = 0; i < 200000; i++) {
        double u = es_uniform(9, i, 0, 0);
        worst = fmax(worst, error_in_units(es_log(u), log(u)));
        worst = fmax(worst, error_in_units(es_log(40.0 * u), log(40.0 * u)));
    }
    worst = fmax(worst, error_in_units(es_log(0x1p-53), log(0x1p-53)));
    worst = fmax(worst, error_in_units(es_log(1.0 - 0x1p-53), log(1.0 - 0x1p-53)));
    CHECK(worst < 4.0);
    CHECK(es_log(1.0) == 0.0);
}

/* The draw against noise computed for every token, rows narrow to wide. */
static void test_lazy_draw(void)
{
    enum { VOCAB = 3001 };
    static float row[VOCAB];
    es_sampling s;
    es_sampling_default(&s);
    for (uint64_t trial = 0; trial < 200; trial++) {
        s.seed = trial * UINT64_C(0x9E3779B97F4A7C15);
        float spread = (float)(trial % 10) * 4.0f;
        for (uint32_t t = 0; t < VOCAB; t++) {
            double u = es_uniform(7, trial, t, 5);
            row[t] = t % 11 == 3 ? -INFINITY : spread * (float)u;
        }
        size_t best = 0;
        double score = -INFINITY;
        for (size_t t = 0; t < VOCAB; t++) {
            double here = (double)row[t] + es_noise(s.seed, trial, (int32_t)t);
            if (here > score) {
                score = here;
                best = t;
            }
        }
        int32_t token;
        CHECK(es_sample_draw(&s, row, VOCAB, trial, &token) == ES_OK);
        CHECK((size_t)token == best);
    }
}

/* Equal logits: top-k keeps all that equal the k-th, top-p the lowest ids, greedy the first. */
static void test_ties(void)
{
    float row[7] = {1.0f, 2.0f, -0.0f, 2.0f, 0.0f, 2.0f, 2.0f};
    float work[7];
    int32_t token;
    es_sampling s;
    es_sampling_default(&s);
    s.top_k = 2;
    memcpy(work, row, sizeof(row));
    CHECK(es_sample_process(&s, NULL, 0, NULL, work, 7) == ES_OK);
    CHECK(work[1] == 2.0f && work[3] == 2.0f && work[5] == 2.0f && work[6] == 2.0f);
    CHECK(isinf(work[0]) && isinf(work[2]) && isinf(work[4]));
    s.top_k = 0;
    s.top_p = 0.4f;
    memcpy(work, row, sizeof(row));
    CHECK(es_sample_process(&s, NULL, 0, NULL, work, 7) == ES_OK);
    CHECK(work[1] == 2.0f && work[3] == 2.0f && isinf(work[5]) && isinf(work[6]));
    s.top_p = 1.0f;
    s.top_k = 6; /* both zeros are the sixth largest */
    memcpy(work, row, sizeof(row));
    CHECK(es_sample_process(&s, NULL, 0, NULL, work, 7) == ES_OK);
    CHECK(work[2] == 0.0f && work[4] == 0.0f);
    s.temperature = 0.0f;
    CHECK(es_sample_draw(&s, row, 7, 0, &token) == ES_OK && token == 1);
}

static void test_one_token(void)
{
    es_sampling s;
    es_sampling_default(&s);
    s.top_k = 1;
    s.top_p = FLT_MIN;
    s.min_p = 0.99f;
    float row[1] = {-3.0f};
    int32_t token = -1;
    CHECK(es_sample_process(&s, NULL, 0, NULL, row, 1) == ES_OK);
    CHECK(row[0] == -3.0f);
    CHECK(es_sample_draw(&s, row, 1, 0, &token) == ES_OK && token == 0);
    CHECK(es_sample_process(&s, NULL, 0, NULL, row, 0) == ES_ERR_ARGUMENT);
    CHECK(es_sample_draw(&s, row, 0, 0, &token) == ES_ERR_ARGUMENT);
}

static void test_extreme_logits(void)
{
    es_sampling s;
    es_sampling_default(&s);
    s.top_p = 0.5f;
    s.top_k = 2;
    s.min_p = 0.1f;
    float wide[3] = {FLT_MAX, -FLT_MAX, 0.0f};
    CHECK(es_sample_process(&s, NULL, 0, NULL, wide, 3) == ES_OK);
    CHECK(wide[0] == FLT_MAX && isinf(wide[1]) && isinf(wide[2]));
    float low[2] = {-FLT_MAX, -INFINITY};
    s.top_k = 1;
    CHECK(es_sample_process(&s, NULL, 0, NULL, low, 2) == ES_OK);
    CHECK(low[0] == -FLT_MAX);
    s.temperature = 1e-30f;
    float hot[2] = {1e20f, 0.0f};
    CHECK(es_sample_process(&s, NULL, 0, NULL, hot, 2) == ES_ERR_NUMERIC);
    CHECK(strstr(es_error_message(), "temperature") != NULL);
}

/* A long history is counted on the heap; when that fails the call says so and nothing leaks. */
static void test_penalty_memory(void)
{
    enum { VOCAB = 1000, HISTORY = 5000 };
    static int32_t history[HISTORY];
    static float row[VOCAB];
    for (int32_t i = 0; i < HISTORY; i++) {
        history[i] = i % 500;
    }
    es_sampling s;
    es_sampling_default(&s);
    s.penalty_window = -1;
    s.frequency_penalty = 0.5f;
    es_test_alloc_left = 0;
    CHECK(es_sample_process(&s, history, HISTORY, NULL, row, VOCAB) == ES_ERR_MEMORY);
    es_test_alloc_left = -1;
    memset(row, 0, sizeof(row));
    CHECK(es_sample_process(&s, history, HISTORY, NULL, row, VOCAB) == ES_OK);
    CHECK(row[499] == -5.0f && row[500] == 0.0f);
    s.penalty_window = 64;
    memset(row, 0, sizeof(row));
    es_test_alloc_left = 0; /* a short window needs no memory */
    CHECK(es_sample_process(&s, history, HISTORY, NULL, row, VOCAB) == ES_OK);
    es_test_alloc_left = -1;
    CHECK(row[499] == -0.5f && row[500 - 64] == -0.5f && row[500 - 65] == 0.0f);
}

int main(void)
{
    test_philox();
    test_uniforms();
    test_exp_log();
    test_lazy_draw();
    test_ties();
    test_one_token();
    test_extreme_logits();
    test_penalty_memory();
    return 0;
}
