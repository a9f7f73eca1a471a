/*
 * Field case C11: whatever the draft's probabilities are, tokens are distributed as the target's.
 *
 * 200k samples of three tokens per method on a vocabulary of 8; chi-square of the first token and
 * of the three jointly, at p = 0.001. Seeds are fixed, so the outcome is too.
 */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "check.h"
#include "edgespec.h"
#include "philox.h"

enum { VOCAB = 8, LENGTH = 3, JOINT = VOCAB * VOCAB * VOCAB, SAMPLES = 200000, MAX_CHILDREN = 3 };

#define STREAM_TABLE 10
#define STREAM_DRAFT 11

typedef float (*draft_of)[VOCAB]; /* by the last token */

static float target[VOCAB][VOCAB]; /* p of the next token by the last one */
static float logits[VOCAB][VOCAB]; /* its logarithm */

static void fill(float (*table)[VOCAB], uint64_t seed, float least, bool has_zeros)
{
    for (uint32_t last = 0; last < VOCAB; last++) {
        float sum = 0.0f;
        for (uint32_t t = 0; t < VOCAB; t++) {
            double u = es_uniform(seed, last, t, STREAM_TABLE);
            table[last][t] = has_zeros && (t + last) % 3 == 0 ? 0.0f : least + (float)(u * u);
            sum += table[last][t];
        }
        for (uint32_t t = 0; t < VOCAB; t++) {
            table[last][t] /= sum;
        }
    }
}

static int32_t pick(const float *weights, double uniform)
{
    double sum = 0.0;
    for (int32_t t = 0; t < VOCAB; t++) {
        sum += (double)weights[t];
    }
    double left = uniform * sum;
    int32_t last = 0;
    for (int32_t t = 0; t < VOCAB; t++) {
        if (weights[t] > 0.0f) {
            last = t;
            left -= (double)weights[t];
            if (left < 0.0) {
                break;
            }
        }
    }
    return last;
}

/* Draws n children from q; without replacement, uniform over the others once q is used up. */
static void draw_children(const float *q, int32_t n, bool with_replacement, uint64_t seed,
                          uint32_t *lane, int32_t *out)
{
    float rest[VOCAB];
    memcpy(rest, q, sizeof(rest));
    for (int32_t i = 0; i < n; i++) {
        float sum = 0.0f;
        for (int32_t t = 0; t < VOCAB; t++) {
            sum += rest[t];
        }
        for (int32_t t = 0; t < VOCAB && sum == 0.0f; t++) {
            rest[t] = 1.0f;
            for (int32_t j = 0; j < i; j++) {
                rest[t] = out[j] == t ? 0.0f : rest[t];
            }
        }
        out[i] = pick(rest, es_uniform(seed, 0, (*lane)++, STREAM_DRAFT));
        if (!with_replacement) {
            rest[out[i]] = 0.0f;
        }
    }
}

/* A tree of `width` children per row, two levels deep. */
static void grow(es_tree *tree, int32_t root, const draft_of draft, int32_t width,
                 bool with_replacement, uint64_t seed)
{
    uint32_t lane = 0;
    tree->n = 1;
    tree->token[0] = root;
    tree->parent[0] = -1;
    tree->rank[0] = 0;
    int32_t level_end = 1 + width; /* rows before it get children */
    for (int32_t row = 0; row < level_end; row++) {
        int32_t children[MAX_CHILDREN];
        draw_children(draft[tree->token[row]], width, with_replacement, seed, &lane, children);
        for (int32_t i = 0; i < width; i++) {
            tree->token[tree->n] = children[i];
            tree->parent[tree->n] = row;
            tree->rank[tree->n] = i;
            tree->n++;
        }
    }
    CHECK(es_tree_derive(tree) == ES_OK);
}

/* Critical value at p = 0.001 (Wilson-Hilferty; within 0.2 % from 7 degrees of freedom on). */
static double critical(int32_t freedom)
{
    double a = 2.0 / (9.0 * freedom);
    return freedom * pow(1.0 - a + 3.0902 * sqrt(a), 3.0);
}

static void check_law(const int64_t *seen, const double *expected, int32_t n, bool must_fail)
{
    double chi = 0.0;
    int32_t freedom = -1;
    for (int32_t i = 0; i < n; i++) {
        double mean = expected[i] * SAMPLES;
        if (mean == 0.0) {
            CHECK(seen[i] == 0);
            continue;
        }
        chi += ((double)seen[i] - mean) * ((double)seen[i] - mean) / mean;
        freedom++;
    }
    CHECK(must_fail ? chi > critical(freedom) : chi < critical(freedom));
}

typedef enum method { PLAIN, REJECTION, COUPLED, NAIVE } method;

/* One sample of three tokens: verified rounds until there are enough. */
static void sample(method how, const draft_of draft, int32_t width, bool with_replacement,
                   uint64_t seed, int32_t *out)
{
    float p[ES_MAX_ROWS * VOCAB], q[ES_MAX_ROWS * VOCAB], scratch[2 * VOCAB];
    int32_t history[LENGTH + ES_MAX_ROWS + 2] = {0};
    es_sampling sampling;
    es_sampling_default(&sampling);
    sampling.seed = seed;
    for (int32_t n = 0; n < LENGTH;) {
        es_tree tree;
        grow(&tree, history[n], draft, width, with_replacement, seed * 4 + (uint64_t)n);
        for (int32_t row = 0; row < tree.n; row++) {
            int32_t last = tree.token[row];
            bool is_raw = how == COUPLED || how == PLAIN;
            memcpy(q + row * VOCAB, draft[last], sizeof(draft[last]));
            memcpy(p + row * VOCAB, (is_raw ? logits : target)[last], sizeof(target[last]));
        }
        es_verdict verdict;
        if (how == PLAIN) {
            tree.n = 1;
        }
        if (how == COUPLED || how == PLAIN) {
            CHECK(es_verify_coupled(&tree, p, VOCAB, VOCAB, &sampling, history, (size_t)n + 1,
                                    (uint64_t)n, NULL, scratch, &verdict) == ES_OK);
        } else {
            CHECK(es_verify_rejection(&tree, p, q, VOCAB,
                                      with_replacement ? ES_REJECT_WITH_REPLACEMENT
                                                       : ES_REJECT_WITHOUT_REPLACEMENT,
                                      seed, (uint64_t)n, scratch, &verdict) == ES_OK);
        }
        if (how == NAIVE) { /* the first child whatever the target says: the test must see it */
            verdict.n = 1;
            verdict.token[0] = tree.token[1];
        }
        memcpy(history + n + 1, verdict.token, (size_t)verdict.n * sizeof(int32_t));
        n += verdict.n;
    }
    memcpy(out, history + 1, LENGTH * sizeof(*out));
}

static void run(method how, const draft_of draft, int32_t width, bool with_replacement,
                uint64_t seed)
{
    int64_t first[VOCAB] = {0};
    static int64_t joint[JOINT];
    static double joint_law[JOINT];
    double first_law[VOCAB];
    for (int32_t i = 0; i < VOCAB * VOCAB; i++) {
        logits[i / VOCAB][i % VOCAB] = logf(target[i / VOCAB][i % VOCAB]);
    }
    memset(joint, 0, sizeof(joint));
    for (uint64_t i = 0; i < SAMPLES; i++) {
        int32_t tokens[LENGTH];
        sample(how, draft, width, with_replacement, seed * SAMPLES + i, tokens);
        first[tokens[0]]++;
        joint[(tokens[0] * VOCAB + tokens[1]) * VOCAB + tokens[2]]++;
    }
    for (int32_t i = 0; i < JOINT; i++) {
        int32_t a = i / (VOCAB * VOCAB), b = i / VOCAB % VOCAB, c = i % VOCAB;
        first_law[a] = (double)target[0][a];
        joint_law[i] = (double)target[0][a] * (double)target[a][b] * (double)target[b][c];
    }
    check_law(first, first_law, VOCAB, how == NAIVE);
    check_law(joint, joint_law, JOINT, how == NAIVE);
}

int main(void)
{
    static float other[VOCAB][VOCAB], with_zeros[VOCAB][VOCAB], one_hot[VOCAB][VOCAB];
    fill(target, 1, 0.15f, false);
    fill(other, 2, 0.02f, false);
    fill(with_zeros, 3, 0.05f, true);
    for (int32_t last = 0; last < VOCAB; last++) {
        one_hot[last][(last * 3 + 1) % VOCAB] = 1.0f;
    }
    const draft_of drafts[] = {other, with_zeros, one_hot};

    run(PLAIN, other, 1, false, 1);
    run(NAIVE, other, 1, false, 2);
    for (uint64_t d = 0; d < 3; d++) {
        run(REJECTION, drafts[d], 1, false, 3 + d); /* chain */
        run(REJECTION, drafts[d], d == 1 ? 3 : 2, false, 6 + d); /* tree without replacement */
        run(REJECTION, drafts[d], 2, true, 9 + d); /* tree with replacement */
    }
    run(REJECTION, target, 2, false, 12);            /* a perfect draft */
    run(COUPLED, one_hot, 1, false, 13);             /* children are a function of the context */
    /* A target with zeros: a token of probability 0 must never appear. */
    fill(target, 4, 0.1f, true);
    run(REJECTION, other, 2, false, 14);
    run(COUPLED, one_hot, 1, false, 15);
    return 0;
}
