/* The session's life: failing allocations, many replies on one handle, clipping, endings. */
#include <math.h>
#include <string.h>

#include "alloc.h"
#include "check.h"
#include "edgespec.h"

enum { VOCAB = 32, EOS = 31 };

/* A toy target: after token t comes t + 1, round 0..29. */
static void forward(const es_tree *tree, float *logits)
{
    memset(logits, 0, (size_t)tree->n * VOCAB * sizeof(*logits));
    for (int32_t row = 0; row < tree->n; row++) {
        logits[row * VOCAB + (tree->token[row] + 1) % 30] = 3.0f;
    }
}

static es_session_params params_of(int32_t context)
{
    static const int32_t eos[] = {EOS};
    es_session_params params;
    CHECK(es_session_params_default(&params) == ES_OK);
    params.vocab = VOCAB;
    params.context = context;
    params.eos = eos;
    params.n_eos = 1;
    params.draft = ES_DRAFT_NGRAM;
    params.tree = ES_TREE_BEST;
    params.ngram_capacity = 1000;
    return params;
}

static es_sampling greedy(void)
{
    es_sampling s;
    CHECK(es_sampling_default(&s) == ES_OK);
    s.temperature = 0.0f;
    return s;
}

/* Runs a reply to its end; returns the tokens emitted. */
static int64_t generate(es_session *s, const es_sampling *sampling, int64_t max_new,
                        es_finish expected)
{
    static float logits[ES_MAX_ROWS * VOCAB];
    CHECK(es_generation_begin(s, sampling, max_new) == ES_OK);
    es_round round = {.finish = ES_FINISH_NONE};
    es_round_kind kind = ES_ROUND_PREFILL;
    int64_t n = 0;
    while (round.finish == ES_FINISH_NONE) {
        es_tree tree;
        size_t before = es_session_length(s);
        CHECK(es_round_begin(s, kind, &tree) == ES_OK);
        forward(&tree, logits);
        CHECK(es_round_finish(s, logits, VOCAB, NULL, 1e-3, &round) == ES_OK);
        CHECK(es_session_length(s) == before + (size_t)round.n);
        const int32_t *tokens = es_session_tokens(s);
        for (size_t i = before; i < es_session_length(s); i++) {
            CHECK(tokens[i] == (tokens[i - 1] + 1) % 30);
        }
        n += round.n;
        kind = ES_ROUND_DRAFT;
    }
    CHECK(round.finish == expected);
    return n;
}

static void test_c33_ten_replies_on_one_handle(void)
{
    es_session_params params = params_of(400);
    es_session *s;
    CHECK(es_session_new(&params, &s) == ES_OK);
    int32_t prompt[200];
    for (int32_t i = 0; i < 200; i++) {
        prompt[i] = i % 30;
    }
    es_sampling sampling = greedy();
    for (int32_t i = 0; i < 10; i++) {
        CHECK(es_session_truncate(s, 0) == ES_OK);
        CHECK(es_generation_begin(s, &sampling, 64) == ES_ERR_STATE);
        CHECK(es_session_append(s, prompt, 200) == ES_OK);
        CHECK(es_generation_begin(s, &sampling, 0) == ES_ERR_ARGUMENT);
        CHECK(generate(s, &sampling, 64, ES_FINISH_LENGTH) == 64);
    }
    es_stats stats;
    CHECK(es_session_stats(s, &stats) == ES_OK);
    CHECK(stats.tokens == 63 && stats.rounds < 32);
    es_session_free(s);
    es_session_free(NULL);
}

static void test_c27_every_room(void)
{
    for (int32_t length = 1; length <= 40; length++) {
        es_session_params params = params_of(40);
        es_session *s;
        CHECK(es_session_new(&params, &s) == ES_OK);
        int32_t prompt[41];
        for (int32_t i = 0; i < 41; i++) {
            prompt[i] = i % 3; /* repeats, so that there are drafts */
        }
        prompt[length - 1] = 29;
        CHECK(es_session_append(s, prompt, 41) == ES_ERR_CONTEXT);
        CHECK(es_session_append(s, prompt, (size_t)length) == ES_OK);
        es_sampling sampling = greedy();
        CHECK(generate(s, &sampling, 1000, ES_FINISH_CONTEXT) == 41 - length);
        CHECK(es_session_length(s) == 41);
        CHECK(es_generation_begin(s, &sampling, 1) == ES_ERR_CONTEXT);
        es_session_free(s);
    }
}

/* Every allocation of a session's life fails once; the call says so, and the session, if there is
   one, goes on. Leaks would be reported at exit. */
static void test_failing_allocations(void)
{
    static const int32_t bias_token[] = {1, 2};
    static const float bias_value[] = {0.5f, -0.5f};
    es_session_params params = params_of(600);
    es_sampling sampling = greedy();
    sampling.bias_token = bias_token;
    sampling.bias_value = bias_value;
    sampling.n_bias = 2;
    sampling.presence_penalty = 0.001f;
    sampling.penalty_window = -1;
    int32_t prompt[500];
    for (int32_t i = 0; i < 500; i++) {
        prompt[i] = i % 30;
    }
    int32_t n_failed = 0;
    for (long left = 0;; left++) {
        es_session *s = NULL;
        es_test_alloc_left = left;
        es_status status = es_session_new(&params, &s);
        if (status != ES_OK) {
            es_test_alloc_left = -1;
            CHECK(status == ES_ERR_MEMORY && s == NULL);
            n_failed++;
            continue;
        }
        CHECK(es_session_append(s, prompt, 500) == ES_OK);
        status = es_generation_begin(s, &sampling, 20);
        if (status == ES_ERR_MEMORY) {
            n_failed++;
            es_test_alloc_left = -1;
            CHECK(es_generation_begin(s, &sampling, 20) == ES_OK);
        }
        static float logits[ES_MAX_ROWS * VOCAB];
        es_tree tree;
        es_round round;
        CHECK(es_round_begin(s, ES_ROUND_PREFILL, &tree) == ES_OK);
        forward(&tree, logits);
        status = es_round_finish(s, logits, VOCAB, NULL, 0.0, &round);
        if (status == ES_ERR_MEMORY) {
            n_failed++;
            es_test_alloc_left = -1;
            CHECK(es_session_length(s) == 500);
            CHECK(es_round_finish(s, logits, VOCAB, NULL, 0.0, &round) == ES_OK);
        }
        CHECK(round.n == 1 && round.token[0] == prompt[500 % 30]);
        es_session_free(s);
        if (es_test_alloc_left > 0) {
            break; /* nothing failed any more */
        }
    }
    es_test_alloc_left = -1;
    CHECK(n_failed >= 7);
}

static void test_proposal_is_checked_and_clipped(void)
{
    es_session_params params = params_of(40);
    es_session *s;
    CHECK(es_session_new(&params, &s) == ES_OK);
    const int32_t prompt[] = {1, 2, 3};
    CHECK(es_session_append(s, prompt, 3) == ES_OK);
    es_sampling sampling = greedy();
    CHECK(es_generation_begin(s, &sampling, 3) == ES_OK);
    es_tree tree = {.n = 5, .token = {-7, 4, 5, 6, 7}, .parent = {-1, 0, 1, 2, 3}};
    tree.parent[4] = 4;
    CHECK(es_round_propose(s, &tree) == ES_ERR_ARGUMENT);
    tree.parent[4] = 3;
    tree.token[4] = VOCAB;
    CHECK(es_round_propose(s, &tree) == ES_ERR_ARGUMENT);
    tree.token[4] = 7;
    CHECK(es_round_propose(s, &tree) == ES_OK);
    es_tree out;
    CHECK(es_round_begin(s, ES_ROUND_DRAFT, &out) == ES_OK);
    CHECK(out.n == 3 && out.token[0] == 3 && out.token[2] == 5); /* two levels: max_new is 3 */
    static float logits[ES_MAX_ROWS * VOCAB];
    forward(&out, logits);
    logits[0] = NAN;
    es_round round;
    CHECK(es_round_finish(s, logits, VOCAB, NULL, 0.0, &round) == ES_ERR_NUMERIC);
    CHECK(es_round_finish(s, logits, VOCAB - 1, NULL, 0.0, &round) == ES_ERR_ARGUMENT);
    forward(&out, logits);
    CHECK(es_round_finish(s, logits, VOCAB, NULL, 0.0, &round) == ES_OK);
    CHECK(round.n == 3 && round.finish == ES_FINISH_LENGTH);
    CHECK(round.row[0] == 0 && round.row[1] == 1 && round.row[2] == 2);
    es_session_free(s);
}

/* A proposal made for a reply that never drafted does not reach the next one. */
static void test_proposals_end_with_their_reply(void)
{
    es_session_params params = params_of(40);
    params.draft = ES_DRAFT_NONE;
    es_session *s;
    CHECK(es_session_new(&params, &s) == ES_OK);
    const int32_t prompt[] = {1, 2, 3};
    CHECK(es_session_append(s, prompt, 3) == ES_OK);
    es_sampling sampling = greedy();
    CHECK(es_generation_begin(s, &sampling, 9) == ES_OK);
    es_tree tree = {.n = 2, .token = {3, 4}, .parent = {-1, 0}};
    CHECK(es_round_propose(s, &tree) == ES_OK);
    CHECK(es_generation_begin(s, &sampling, 9) == ES_OK);
    es_tree out;
    CHECK(es_round_begin(s, ES_ROUND_DRAFT, &out) == ES_OK);
    CHECK(out.n == 1);
    es_session_free(s);
}

int main(void)
{
    test_c33_ten_replies_on_one_handle();
    test_c27_every_room();
    test_failing_allocations();
    test_proposal_is_checked_and_clipped();
    test_proposals_end_with_their_reply();
    return 0;
}
