/* Arguments no binding lets through: they are refused before anything is computed from them. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "edgespec.h"

static void test_compact_paths(void)
{
    char rows[64] = {0};
    const int32_t falling[] = {INT32_MAX, 5};
    CHECK(es_kv_compact(rows, 1, sizeof(rows), 8, 0, falling, 2) == ES_ERR_ARGUMENT);
    CHECK(strstr(es_error_message(), "path[1]") != NULL);
    const int32_t far[] = {INT32_MAX};
    CHECK(es_kv_compact(rows, 2, sizeof(rows), 8, SIZE_MAX - 3, far, 1) == ES_ERR_ARGUMENT);
    CHECK(es_kv_compact(rows, 2, sizeof(rows), 8, SIZE_MAX, far, 0) == ES_OK);
}

static void test_verified_trees(void)
{
    es_sampling sampling;
    CHECK(es_sampling_default(&sampling) == ES_OK);
    const float row[2] = {0.5f, 0.5f};
    const int32_t history[] = {0};
    float scratch[4];
    es_verdict out;
    const int32_t sizes[] = {INT32_MIN, 0, ES_MAX_ROWS + 1, INT32_MAX};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        es_tree tree = {.n = sizes[i], .parent = {-1}};
        CHECK(es_verify_coupled(&tree, row, 2, 2, &sampling, history, 1, 0, NULL, scratch, &out) ==
              ES_ERR_ARGUMENT);
        CHECK(strstr(es_error_message(), "expected 1 to 64 rows") != NULL);
        CHECK(es_verify_rejection(&tree, row, row, 2, ES_REJECT_WITH_REPLACEMENT, 0, 0, scratch,
                                  &out) == ES_ERR_ARGUMENT);
    }
}

static void test_seconds(void)
{
    es_session_params params;
    CHECK(es_session_params_default(&params) == ES_OK);
    params.vocab = 2;
    params.context = 8;
    es_session *session;
    CHECK(es_session_new(&params, &session) == ES_OK);
    const int32_t prompt[] = {1};
    es_sampling sampling;
    CHECK(es_sampling_default(&sampling) == ES_OK);
    CHECK(es_session_append(session, prompt, 1) == ES_OK);
    CHECK(es_generation_begin(session, &sampling, 4) == ES_OK);
    es_tree tree;
    CHECK(es_round_begin(session, ES_ROUND_PLAIN, &tree) == ES_OK);
    const float row[2] = {0.0f, 1.0f};
    const double wrong[] = {-1.0, NAN, INFINITY};
    es_round round;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        CHECK(es_round_finish(session, row, 2, NULL, wrong[i], &round) == ES_ERR_ARGUMENT);
        CHECK(strstr(es_error_message(), "seconds") != NULL);
    }
    CHECK(es_round_finish(session, row, 2, NULL, 1.0, &round) == ES_OK);
    es_session_free(session);
}

int main(void)
{
    test_compact_paths();
    test_verified_trees();
    test_seconds();
    return 0;
}
