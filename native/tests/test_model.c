/* Tiny models of every family: rows are what they are alone, however they come; failures are clean. */
#include <stdlib.h>
#include <unistd.h>

#include "alloc.h"
#include "check.h"
#include "edgespec.h"
#include "toy_gguf.h"

static const char *const families[] = {"llama", "qwen2", "qwen3", "gemma3"};
enum { N_FAMILIES = 4, N = 48 };
static const uint64_t known_bits[N_FAMILIES] = {
    UINT64_C(0xed86b074b527d79d), UINT64_C(0xd28c69bca2c75ffd), UINT64_C(0x368ffd89e2a2d90c),
    UINT64_C(0x85bd2a84d86e99fe),
};

static char path[64];
static int32_t prompt[N];

/* Packs to the end: one call may not get there on a busy machine. */
static es_status pack(es_model *model)
{
    es_status status;
    size_t done, total;
    do {
        status = es_model_load(model, &done, &total);
    } while (status == ES_OK && done < total);
    return status;
}

static es_model *load(const char *family, int32_t type, int32_t threads)
{
    es_model_params params;
    es_model *model;
    toy_write(path, family, type);
    CHECK(es_model_params_default(&params) == ES_OK);
    params.threads = threads;
    CHECK(es_model_open(path, &params, &model) == ES_OK);
    CHECK(pack(model) == ES_OK);
    return model;
}

static es_target *start(es_model *model)
{
    es_target_params params;
    es_target *target;
    CHECK(es_target_params_default(&params) == ES_OK);
    params.context = TOY_CONTEXT;
    CHECK(es_target_new(model, &params, &target) == ES_OK);
    return target;
}

/* Logits of every token of the prompt, decoded one by one. */
static void decode(es_target *target, const int32_t *token, int32_t n, float *logits)
{
    for (int32_t i = 0; i < n; i++) {
        CHECK(es_target_prefill(target, token + i, 1, logits + (size_t)i * TOY_VOCAB) == ES_OK);
        CHECK(es_target_length(target) == i + 1);
    }
}

static bool equal(const float *a, const float *b, int32_t rows)
{
    return memcmp(a, b, (size_t)rows * TOY_VOCAB * sizeof(float)) == 0;
}

static void test_chunks_and_threads(const char *family, int32_t type)
{
    static float expected[N * TOY_VOCAB], got[TOY_VOCAB];
    es_model *model = load(family, type, 1);
    es_target *target = start(model);
    decode(target, prompt, N, expected);
    CHECK(memcmp(expected, expected + TOY_VOCAB, sizeof(got)) != 0);
    es_target_free(target);
    es_model_free(model);
    for (int32_t threads = 1; threads <= 3; threads++) {
        model = load(family, type, threads);
        target = start(model);
        for (int32_t chunk = 1; chunk <= N; chunk += 1 + chunk / 2) {
            CHECK(es_target_truncate(target, 0) == ES_OK);
            for (int32_t i = 0; i < N; i += chunk) {
                int32_t n = i + chunk < N ? chunk : N - i;
                CHECK(es_target_prefill(target, prompt + i, (size_t)n, got) == ES_OK);
                CHECK(equal(got, expected + (size_t)(i + n - 1) * TOY_VOCAB, 1));
            }
        }
        es_target_free(target);
        es_model_free(model);
    }
}

/* FNV-1a of a prompt's logits: one number for every processor there is. */
static void test_bits(const char *family)
{
    static float logits[N * TOY_VOCAB];
    es_model *model = load(family, ES_GGML_Q8_0, 2);
    es_target *target = start(model);
    decode(target, prompt, N, logits);
    uint64_t hash = UINT64_C(14695981039346656037);
    for (int32_t i = 0; i < N * TOY_VOCAB; i++) {
        uint32_t bits;
        memcpy(&bits, &logits[i], 4);
        hash = (hash ^ bits) * UINT64_C(1099511628211);
    }
    for (int32_t i = 0; i < N_FAMILIES; i++) {
        if (strcmp(family, families[i]) == 0 && hash != known_bits[i]) {
            fprintf(stderr, "%s: logits have the bits %llx\n", family, (unsigned long long)hash);
            CHECK(hash == known_bits[i]);
        }
    }
    es_target_free(target);
    es_model_free(model);
}

/* A bushy tree: the children of row i are rows 2i + 1 and 2i + 2. */
static void bush(es_tree *tree, int32_t n)
{
    *tree = (es_tree){.n = n};
    for (int32_t i = 0; i < n; i++) {
        tree->token[i] = (7 * i + 3) % TOY_VOCAB;
        tree->parent[i] = i == 0 ? -1 : (i - 1) / 2;
        tree->rank[i] = i == 0 ? 0 : (i - 1) % 2;
    }
    CHECK(es_tree_derive(tree) == ES_OK);
}

/* Rows of a tree, several trees in one pass, rows left out: each is what its path gives alone. */
static void test_trees(const char *family, int32_t type)
{
    enum { ROWS = 21, TREES = 3 };
    static float got[TREES * ROWS * TOY_VOCAB], alone[TOY_VOCAB];
    es_model *model = load(family, type, 2);
    es_target *target[TREES], *single = start(model);
    es_tree tree[TREES];
    const es_tree *trees[TREES] = {&tree[0], &tree[1], &tree[2]};
    for (int32_t i = 0; i < TREES; i++) {
        target[i] = start(model);
        bush(&tree[i], ROWS);
        CHECK(es_target_prefill(target[i], prompt, (size_t)(4 * i + 5), NULL) == ES_OK);
    }
    CHECK(es_target_forward_many(target, trees, TREES, got) == ES_OK);
    for (int32_t i = 0; i < TREES; i++) {
        CHECK(es_target_truncate(single, 0) == ES_OK);
        CHECK(es_target_prefill(single, prompt, (size_t)(4 * i + 5), NULL) == ES_OK);
        for (int32_t row = 0; row < ROWS; row++) {
            CHECK(es_target_truncate(single, 4 * i + 5) == ES_OK);
            for (int32_t r = 0; r <= row; r++) {
                if (tree[i].mask[row] >> r & 1) {
                    CHECK(es_target_prefill(single, &tree[i].token[r], 1, alone) == ES_OK);
                }
            }
            CHECK(equal(alone, got + (size_t)(i * ROWS + row) * TOY_VOCAB, 1));
        }
    }
    const int32_t some[] = {0, 4, 5, 20};
    static float few[4 * TOY_VOCAB];
    CHECK(es_target_forward(target[1], &tree[1], some, 4, few) == ES_OK);
    for (int32_t i = 0; i < 4; i++) {
        CHECK(equal(few + (size_t)i * TOY_VOCAB, got + (size_t)(ROWS + some[i]) * TOY_VOCAB, 1));
    }
    /* after a commit the accepted path is like any other */
    const int32_t path_rows[] = {0, 2, 5};
    CHECK(es_target_commit(target[1], path_rows, 3) == ES_OK);
    CHECK(es_target_length(target[1]) == 12);
    CHECK(es_target_prefill(target[1], prompt, 1, few) == ES_OK);
    CHECK(es_target_truncate(single, 0) == ES_OK);
    CHECK(es_target_prefill(single, prompt, 9, NULL) == ES_OK);
    for (int32_t i = 0; i < 3; i++) {
        CHECK(es_target_prefill(single, &tree[1].token[path_rows[i]], 1, NULL) == ES_OK);
    }
    CHECK(es_target_prefill(single, prompt, 1, alone) == ES_OK);
    CHECK(equal(alone, few, 1));
    for (int32_t i = 0; i < TREES; i++) {
        es_target_free(target[i]);
    }
    es_target_free(single);
    es_model_free(model);
}

static es_session *talk(const int32_t *token, int32_t n)
{
    es_session_params params;
    es_sampling sampling;
    es_session *session;
    CHECK(es_session_params_default(&params) == ES_OK && es_sampling_default(&sampling) == ES_OK);
    sampling.temperature = 1.0f;
    params.vocab = TOY_VOCAB;
    params.context = TOY_CONTEXT;
    CHECK(es_session_new(&params, &session) == ES_OK);
    CHECK(es_session_append(session, token, (size_t)n) == ES_OK);
    CHECK(es_generation_begin(session, &sampling, 24) == ES_OK);
    return session;
}

/* Replies of rounds run in C: plain, and with trees that are right, wrong or anything. */
static void test_rounds(const char *family)
{
    es_model *model = load(family, ES_GGML_Q8_0, 2);
    es_target *target = start(model);
    int32_t plain[32] = {0};
    for (int32_t drafter = 0; drafter < 4; drafter++) {
        es_session *session = talk(prompt, 9);
        es_round round;
        es_tree tree;
        int32_t n = 0, forwards = 0;
        CHECK(es_target_truncate(target, 0) == ES_OK);
        CHECK(es_round_run(session, target, ES_ROUND_PREFILL, NULL, NULL, &round) == ES_ERR_STATE);
        CHECK(strstr(es_error_message(), "expected a target of 8 positions") != NULL);
        CHECK(es_target_prefill(target, prompt, 8, NULL) == ES_OK);
        es_round_kind kind = ES_ROUND_PREFILL;
        do {
            if (drafter > 0 && n > 0) {
                bush(&tree, 7);
                for (int32_t i = 1; i < 7; i++) {
                    int32_t right = n + tree.depth[i] - 1 < 24 ? plain[n + tree.depth[i] - 1] : 0;
                    int32_t wrong = (right + 1) % TOY_VOCAB;
                    tree.token[i] = drafter == 1   ? (tree.rank[i] == 1 ? right : wrong)
                                    : drafter == 2 ? wrong
                                                   : tree.token[i];
                }
                CHECK(es_round_propose(session, &tree) == ES_OK);
            }
            CHECK(es_round_run(session, target, kind, &tree, NULL, &round) == ES_OK);
            CHECK(tree.n == 1 || drafter > 0);
            for (int32_t i = 0; i < round.n; i++, n++) {
                CHECK(drafter == 0 || plain[n] == round.token[i]);
                plain[n] = round.token[i];
            }
            CHECK(es_target_length(target) + 1 == (int64_t)es_session_length(session));
            kind = ES_ROUND_DRAFT;
            forwards++;
        } while (round.finish == ES_FINISH_NONE);
        CHECK(n == 24);
        CHECK(drafter == 1 ? forwards < 11 : drafter == 2 || drafter == 0 ? forwards == 24 : 1);
        es_session_free(session);
    }
    es_target_free(target);
    es_model_free(model);
}

static void test_packed(void)
{
    static float expected[N * TOY_VOCAB], got[N * TOY_VOCAB];
    char packed[80];
    snprintf(packed, sizeof(packed), "%s.packed", path);
    es_model *model = load("gemma3", ES_GGML_Q8_0, 2);
    es_target *target = start(model);
    decode(target, prompt, N, expected);
    es_target_free(target);
    CHECK(es_model_save(model, packed) == ES_OK);
    CHECK(es_model_save(model, "/nowhere/at/all") == ES_ERR_IO);
    es_model_info before, after;
    CHECK(es_model_describe(model, &before) == ES_OK && before.is_packed == 0);
    es_model_free(model);
    for (int32_t use_mmap = 0; use_mmap < 2; use_mmap++) {
        es_model_params params;
        CHECK(es_model_params_default(&params) == ES_OK);
        params.use_mmap = use_mmap;
        CHECK(es_model_open(packed, &params, &model) == ES_OK);
        size_t done, total;
        CHECK(es_model_load(model, &done, &total) == ES_OK && done == total);
        CHECK(es_model_describe(model, &after) == ES_OK && after.is_packed == 1);
        CHECK(after.weight_bytes == before.weight_bytes && after.windowed_layers == 1);
        target = start(model);
        decode(target, prompt, N, got);
        CHECK(equal(expected, got, N));
        es_target_free(target);
        es_model_free(model);
    }
    CHECK(unlink(packed) == 0);
}

static void test_misuse(void)
{
    es_model_params params;
    es_model *model;
    toy_write(path, "llama", ES_GGML_F32);
    CHECK(es_model_params_default(&params) == ES_OK);
    params.threads = 0;
    CHECK(es_model_open(path, &params, &model) == ES_ERR_ARGUMENT);
    params.threads = 1;
    params.cpu = "abacus";
    CHECK(es_model_open(path, &params, &model) == ES_ERR_ARGUMENT);
    params.cpu = "generic";
    CHECK(es_model_open("/nowhere/at/all", &params, &model) == ES_ERR_IO);
    CHECK(es_model_open(path, &params, &model) == ES_OK);
    es_target_params sizes;
    es_target *target;
    CHECK(es_target_params_default(&sizes) == ES_OK);
    sizes.context = TOY_CONTEXT;
    CHECK(es_target_new(model, &sizes, &target) == ES_ERR_STATE);
    CHECK(es_model_save(model, path) == ES_ERR_STATE);
    size_t done, total;
    CHECK(pack(model) == ES_OK);
    CHECK(es_model_load(model, &done, &total) == ES_OK && done == total);
    const es_target_params wrong[] = {
        {.context = 0}, {.context = TOY_CONTEXT + 1}, {.context = 8, .kv = (es_kv_type)2},
        {.context = 8, .window = -1}, {.context = 8, .sinks = 1},
        {.context = 8, .window = TOY_CONTEXT, .sinks = 1},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        size_t bytes;
        CHECK(es_target_new(model, &wrong[i], &target) == ES_ERR_ARGUMENT);
        CHECK(es_target_memory(model, &wrong[i], &bytes) == ES_ERR_ARGUMENT);
    }
    target = start(model);
    es_target *other = start(model), *both[] = {target, other}, *same[] = {target, target};
    static float logits[ES_MAX_ROWS * TOY_VOCAB];
    es_tree tree, big;
    bush(&tree, 4);
    bush(&big, 40);
    const es_tree *trees[] = {&big, &big};
    CHECK(es_target_forward_many(same, trees, 2, logits) == ES_ERR_ARGUMENT);
    CHECK(es_target_forward_many(both, trees, 2, logits) == ES_ERR_ARGUMENT);
    CHECK(es_target_forward_many(both, trees, 0, logits) == ES_ERR_ARGUMENT);
    const int32_t rows[] = {2, 1, 4};
    CHECK(es_target_forward(target, &tree, rows, 2, logits) == ES_ERR_ARGUMENT);
    CHECK(es_target_forward(target, &tree, rows + 2, 1, logits) == ES_ERR_ARGUMENT);
    CHECK(es_target_forward(target, &tree, rows, 5, logits) == ES_ERR_ARGUMENT);
    tree.token[3] = TOY_VOCAB;
    CHECK(es_target_forward(target, &tree, NULL, 0, logits) == ES_ERR_ARGUMENT);
    tree.token[3] = 0;
    tree.parent[2] = 3;
    CHECK(es_target_forward(target, &tree, NULL, 0, logits) == ES_ERR_ARGUMENT);
    CHECK(es_target_prefill(target, prompt, 0, logits) == ES_ERR_ARGUMENT);
    CHECK(es_target_commit(target, rows, 1) != ES_OK);
    CHECK(es_target_truncate(target, 1) == ES_ERR_ARGUMENT);
    CHECK(es_target_truncate(target, -1) == ES_ERR_ARGUMENT);
    CHECK(es_target_prefill(target, prompt, N, NULL) == ES_OK);
    CHECK(es_target_prefill(target, prompt, N, NULL) == ES_OK);
    CHECK(es_target_prefill(target, prompt, 1, NULL) == ES_ERR_CONTEXT);
    CHECK(es_target_length(target) == TOY_CONTEXT);
    es_target_free(target);
    es_target_free(other);
    es_target_free(NULL);
    es_model_free(model);
    es_model_free(NULL);
}

/* A weight that is NaN ends the round with an error, and leaves session and target as they were. */
static void test_numbers_that_are_none(void)
{
    es_model_params params;
    es_model *model;
    toy_write(path, "llama", ES_GGML_F32);
    FILE *file = fopen(path, "r+b");
    const float nan = NAN;
    CHECK(file != NULL && fseek(file, -4, SEEK_END) == 0); /* the last of output_norm */
    CHECK(fwrite(&nan, sizeof(nan), 1, file) == 1 && fclose(file) == 0);
    CHECK(es_model_params_default(&params) == ES_OK);
    CHECK(es_model_open(path, &params, &model) == ES_OK);
    size_t done, total;
    CHECK(es_model_load(model, &done, &total) == ES_OK && done == total);
    es_target *target = start(model);
    es_session *session = talk(prompt, 9);
    es_round round;
    es_tree tree;
    CHECK(es_target_prefill(target, prompt, 8, NULL) == ES_OK);
    for (int32_t i = 0; i < 2; i++) {
        CHECK(es_round_run(session, target, ES_ROUND_PREFILL, NULL, NULL, &round) ==
              ES_ERR_NUMERIC);
        CHECK(es_target_length(target) == 8 && es_session_length(session) == 9);
    }
    CHECK(es_round_begin(session, ES_ROUND_PREFILL, &tree) == ES_OK);
    es_session_free(session);
    es_target_free(target);
    es_model_free(model);
}

/* Everything one reply allocates; any of it may fail. */
static es_status reply(void)
{
    es_model_params params;
    es_target_params sizes;
    es_model *model = NULL;
    es_target *target = NULL;
    es_session *session = NULL;
    es_session_params talk_params;
    es_sampling sampling;
    es_round round;
    size_t bytes;
    es_status status;
    CHECK(es_model_params_default(&params) == ES_OK && es_target_params_default(&sizes) == ES_OK);
    CHECK(es_session_params_default(&talk_params) == ES_OK);
    CHECK(es_sampling_default(&sampling) == ES_OK);
    params.threads = 2;
    sizes.context = TOY_CONTEXT;
    talk_params.vocab = TOY_VOCAB;
    talk_params.context = TOY_CONTEXT;
    if ((status = es_model_open(path, &params, &model)) == ES_OK &&
        (status = pack(model)) == ES_OK &&
        (status = es_target_memory(model, &sizes, &bytes)) == ES_OK &&
        (status = es_target_new(model, &sizes, &target)) == ES_OK &&
        (status = es_session_new(&talk_params, &session)) == ES_OK &&
        (status = es_session_append(session, prompt, 9)) == ES_OK &&
        (status = es_generation_begin(session, &sampling, 4)) == ES_OK &&
        (status = es_target_prefill(target, prompt, 8, NULL)) == ES_OK) {
        status = es_round_run(session, target, ES_ROUND_PREFILL, NULL, NULL, &round);
        CHECK(es_target_length(target) == (status == ES_OK ? 9 : 8));
    }
    es_session_free(session);
    es_target_free(target);
    es_model_free(model);
    return status;
}

static void test_allocations(void)
{
    toy_write(path, "gemma3", ES_GGML_Q8_0);
    int32_t failures = 0;
    es_status status;
    do {
        es_test_alloc_left = failures++;
        status = reply();
        CHECK(status == ES_OK || status == ES_ERR_MEMORY);
        CHECK(failures < 1000);
    } while (status != ES_OK);
    CHECK(failures > 15);
    es_test_alloc_left = -1;
}

int main(void)
{
    const char *directory = getenv("TMPDIR");
    snprintf(path, sizeof(path), "%s/toy-%ld.gguf", directory != NULL ? directory : "/tmp",
             (long)getpid());
    for (int32_t i = 0; i < N; i++) {
        prompt[i] = (11 * i + i * i / 3 + 1) % TOY_VOCAB;
    }
    test_chunks_and_threads("llama", ES_GGML_F32);
    test_trees("llama", ES_GGML_F32);
    for (int32_t i = 0; i < N_FAMILIES; i++) {
        test_chunks_and_threads(families[i], ES_GGML_Q8_0);
        test_trees(families[i], ES_GGML_Q8_0);
        test_rounds(families[i]);
        test_bits(families[i]);
    }
    test_packed();
    test_misuse();
    test_numbers_that_are_none();
    test_allocations();
    CHECK(unlink(path) == 0);
    return 0;
}
