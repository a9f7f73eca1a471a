/* Small models as drafts: every row of a draft is what the model alone makes of its path, whatever
   was told before; files of other targets are refused. */
#include <stdlib.h>
#include <unistd.h>

#include "alloc.h"
#include "check.h"
#include "draft_net.h"
#include "edgespec.h"
#include "pack.h"
#include "toy_gguf.h"

enum { N = 40, ROWS = 22, LEVELS = 4, SINKS = 4 };
static const char *const no_words = "cbf29ce484222325"; /* the hash of a vocabulary of none */
static const char *const families[] = {"llama", "qwen2", "qwen3", "gemma3"};
static char target_path[64], draft_path[64], whole_path[64];
static int32_t prompt[2 * TOY_CONTEXT];

static es_model *load(const char *path, int32_t threads)
{
    es_model_params params;
    es_model *model;
    size_t done, total;
    CHECK(es_model_params_default(&params) == ES_OK);
    params.threads = threads;
    CHECK(es_model_open(path, &params, &model) == ES_OK);
    do {
        CHECK(es_model_load(model, &done, &total) == ES_OK);
    } while (done < total);
    return model;
}

/* window 0: none */
static es_target *start(es_model *model, int32_t window)
{
    es_target_params params;
    es_target *target;
    CHECK(es_target_params_default(&params) == ES_OK);
    params.context = TOY_CONTEXT;
    params.window = window;
    params.sinks = window > 0 ? SINKS : 0;
    CHECK(es_target_new(model, &params, &target) == ES_OK);
    return target;
}

static es_drafter *drafter_of(es_head *head, int32_t window)
{
    es_drafter_params params;
    es_drafter *drafter;
    CHECK(es_drafter_params_default(&params) == ES_OK);
    params.window = window;
    CHECK(es_drafter_new(head, &params, &drafter) == ES_OK);
    return drafter;
}

/* A target of three layers; a draft of its first two, without and with what is the target's. */
static void write_all(const char *family, int32_t type, bool has_output, const uint8_t *drafted)
{
    toy_write_as(target_path, family, type,
                 &(toy_options){.seed = 3, .layers = 3, .has_output = has_output});
    toy_write_as(draft_path, family, type,
                 &(toy_options){.seed = 3, .vocabulary = no_words, .drafted = drafted});
    toy_write_as(whole_path, family, type,
                 &(toy_options){.seed = 3, .has_output = has_output, .drafted = drafted});
}

static int32_t target_id(const es_draft_net *net, int32_t id)
{
    return net->ids == NULL ? id : net->ids[id];
}

/* Draft logits against those (TOY_VOCAB) of the model alone, for the tokens it drafts. */
static bool agree(const es_draft_net *net, const float *got, const float *expected)
{
    for (int32_t i = 0; i < net->vocab; i++) {
        if (memcmp(&got[i], &expected[target_id(net, i)], sizeof(float)) != 0) {
            return false;
        }
    }
    return true;
}

/* LEVELS levels behind the root: the children of row r are the best two of what stands there. */
static void grow(const es_draft_net *net, const float *first, es_tree *tree, float *logits)
{
    int32_t level[ROWS], n_level = 1;
    level[0] = 0;
    memcpy(logits, first, (size_t)net->vocab * sizeof(float));
    for (int32_t depth = 1; depth <= LEVELS; depth++) {
        int32_t made[ROWS], n_made = 0;
        for (int32_t i = 0; i < n_level && n_made + 2 <= net->width; i++) {
            const float *at = logits + (size_t)level[i] * TOY_VOCAB;
            int32_t best = 0, other = 1;
            for (int32_t t = 0; t < net->vocab; t++) {
                best = at[t] > at[best] ? t : best;
            }
            other = (best + 1 + i) % net->vocab;
            for (int32_t r = 0; r < 2 && tree->n < ROWS; r++) {
                int32_t row = tree->n++;
                tree->token[row] = target_id(net, r == 0 ? best : other);
                tree->parent[row] = level[i];
                tree->rank[row] = r;
                tree->depth[row] = depth;
                made[n_made++] = row;
            }
        }
        if (n_made == 0) {
            return;
        }
        const float *got;
        CHECK(net->expand(net->self, tree, made, n_made, &got) == ES_OK);
        for (int32_t i = 0; i < n_made; i++) {
            memcpy(logits + (size_t)made[i] * TOY_VOCAB, got + (size_t)i * (size_t)net->vocab,
                   (size_t)net->vocab * sizeof(float));
        }
        memcpy(level, made, sizeof(made));
        n_level = n_made;
    }
}

/* A draft behind `committed` tokens and the root, all rows against the model alone. */
static void check_draft(es_drafter *drafter, es_target *alone, int32_t first, int32_t committed,
                        int32_t root)
{
    static float got[ROWS * TOY_VOCAB], expected[ROWS * TOY_VOCAB];
    const es_draft_net *net = es_drafter_net(drafter);
    const float *logits;
    bool is_ready;
    es_tree tree = {.n = 1};
    tree.token[0] = root;
    tree.parent[0] = -1;
    CHECK(es_drafter_length(drafter) == committed);
    CHECK(net->begin(net->self, root, &logits, &is_ready) == ES_OK && is_ready);
    grow(net, logits, &tree, got);
    net->end(net->self);
    CHECK(tree.n > 8);
    CHECK(es_target_truncate(alone, 0) == ES_OK);
    CHECK(es_target_prefill(alone, prompt + first, (size_t)(committed - first), NULL) == ES_OK);
    CHECK(es_target_forward(alone, &tree, NULL, 0, expected) == ES_OK);
    for (int32_t r = 0; r < tree.n; r++) {
        CHECK(agree(net, got + (size_t)r * TOY_VOCAB, expected + (size_t)r * TOY_VOCAB));
    }
}

static void test_rows(const char *family, int32_t type, bool has_output, const uint8_t *drafted,
                      bool is_whole)
{
    write_all(family, type, has_output, drafted);
    es_model *target = load(target_path, 2), *model = load(whole_path, 1);
    es_target *alone = start(model, 0);
    es_head *head;
    es_head_info info;
    CHECK(es_head_open(target, is_whole ? whole_path : draft_path, &head) == ES_OK);
    CHECK(es_head_describe(head, &info) == ES_OK);
    CHECK(info.kind == ES_HEAD_MODEL && info.n_taps == 0 && info.depth == 0);
    CHECK(info.hidden == TOY_HIDDEN && info.max_position == TOY_CONTEXT);
    es_drafter *drafter = drafter_of(head, 0);
    CHECK(es_drafter_net(drafter)->vocab == info.draft_vocab);
    CHECK(es_drafter_append(drafter, prompt, NULL, 9) == ES_OK);
    check_draft(drafter, alone, 0, 9, prompt[9]);
    check_draft(drafter, alone, 0, 9, prompt[9]);
    check_draft(drafter, alone, 0, 9, prompt[2]);                        /* another root */
    CHECK(es_drafter_append(drafter, prompt + 9, NULL, 1) == ES_OK);     /* than was fed */
    check_draft(drafter, alone, 0, 10, prompt[10]);
    CHECK(es_drafter_append(drafter, prompt + 10, NULL, 4) == ES_OK);    /* as was fed */
    check_draft(drafter, alone, 0, 14, prompt[14]);
    CHECK(es_drafter_truncate(drafter, 11) == ES_OK);
    check_draft(drafter, alone, 0, 11, prompt[11]);
    CHECK(es_drafter_truncate(drafter, 3) == ES_OK);
    CHECK(es_drafter_append(drafter, prompt + 3, NULL, 30) == ES_OK);
    check_draft(drafter, alone, 0, 33, prompt[33]);
    es_drafter_free(drafter);
    es_head_free(head);
    es_target_free(alone);
    es_model_free(model);
    es_model_free(target);
}

/* Beyond the positions the draft knows: it begins again and says what it says of the last tokens. */
static void test_long(const char *family)
{
    enum { FAR = TOY_CONTEXT + 60 };
    write_all(family, ES_GGML_Q8_0, false, NULL);
    es_model *target = load(target_path, 1), *model = load(whole_path, 1);
    bool has_windows = strcmp(family, "gemma3") == 0;
    es_target *alone = start(model, has_windows ? 0 : TOY_CONTEXT / 2);
    es_head *head;
    CHECK(es_head_open(target, draft_path, &head) == ES_OK);
    es_drafter *drafter = drafter_of(head, 0);
    /* all at once: what is kept is half of the positions, and of those with windows a quarter */
    int32_t kept = has_windows ? TOY_CONTEXT / 4 : TOY_CONTEXT / 2;
    CHECK(es_drafter_append(drafter, prompt, NULL, FAR) == ES_OK);
    check_draft(drafter, alone, FAR - kept, FAR, 7);
    CHECK(es_drafter_truncate(drafter, 0) == ES_OK);
    /* one by one: no position of the cache is behind the last there is, and nothing fails */
    const es_draft_net *net = es_drafter_net(drafter);
    for (int32_t i = 0; i < FAR; i++) {
        static float rows[ROWS * TOY_VOCAB];
        const float *logits;
        bool is_ready;
        es_tree tree = {.n = 1, .token = {prompt[i + 1]}, .parent = {-1}};
        CHECK(es_drafter_append(drafter, prompt + i, NULL, 1) == ES_OK);
        CHECK(net->begin(net->self, prompt[i + 1], &logits, &is_ready) == ES_OK && is_ready);
        grow(net, logits, &tree, rows);
        net->end(net->self);
    }
    /* cut to before what it still has: it draws on what is left, which is nothing */
    const float *logits;
    bool is_ready;
    CHECK(es_drafter_truncate(drafter, 20) == ES_OK);
    CHECK(net->begin(net->self, 1, &logits, &is_ready) == ES_OK && !is_ready);
    CHECK(es_drafter_append(drafter, prompt + 20, NULL, 12) == ES_OK);
    check_draft(drafter, alone, 20, 32, 5);
    es_drafter_free(drafter);
    es_head_free(head);
    es_target_free(alone);
    es_model_free(model);
    es_model_free(target);
}

/* Rows keep the first positions and the last `window` in sight. */
static void test_window(void)
{
    enum { WINDOW = 12 };
    write_all("llama", ES_GGML_F32, false, NULL);
    es_model *target = load(target_path, 1), *model = load(whole_path, 1);
    es_target *alone = start(model, WINDOW);
    es_head *head;
    CHECK(es_head_open(target, draft_path, &head) == ES_OK);
    es_drafter *drafter = drafter_of(head, WINDOW);
    for (int32_t n = 0; n < N;) {
        CHECK(es_drafter_append(drafter, prompt + n, NULL, 5) == ES_OK);
        n += 5;
        check_draft(drafter, alone, 0, n, prompt[n]);
    }
    es_drafter_free(drafter);
    es_head_free(head);
    es_target_free(alone);
    es_model_free(model);
    es_model_free(target);
}

/* ---- files that do not fit --------------------------------------------------------------- */

static void refused(es_model *target, const toy_options *options, es_status status,
                    const char *words)
{
    es_head *head = NULL;
    toy_write_as(draft_path, "llama", ES_GGML_Q8_0, options);
    CHECK(es_head_open(target, draft_path, &head) == status);
    if (strstr(es_error_message(), words) == NULL) {
        fprintf(stderr, "'%s' is not in '%s'\n", words, es_error_message());
        CHECK(false);
    }
    CHECK(head == NULL);
}

static void test_wrong_files(void)
{
    static const char *const tensors[] = {
        "output_norm.weight", "blk.0.attn_norm.weight", "blk.1.attn_q.weight",
        "blk.0.attn_k.weight", "blk.1.attn_v.weight", "blk.0.attn_output.weight",
        "blk.1.ffn_norm.weight", "blk.0.ffn_gate.weight", "blk.1.ffn_up.weight",
        "blk.0.ffn_down.weight",
    };
    static const uint8_t some[TOY_VOCAB / 8 + 1] = {1, 2, 3}, none[TOY_VOCAB / 8] = {0};
    write_all("llama", ES_GGML_Q8_0, false, NULL);
    es_model *target = load(target_path, 1);
    for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); i++) {
        toy_options options = {.seed = 3, .vocabulary = no_words, .without = tensors[i]};
        refused(target, &options, ES_ERR_FORMAT, tensors[i]);
        options.without = NULL;
        options.taller = tensors[i];
        refused(target, &options, ES_ERR_FORMAT, tensors[i]);
    }
    refused(target, &(toy_options){.vocabulary = "0123456789abcdef"}, ES_ERR_FORMAT,
            "made for vocabulary '0123456789abcdef', the target has 'cbf29ce484222325'");
    refused(target, &(toy_options){.vocabulary = no_words, .has_output = true}, ES_ERR_FORMAT,
            "tensor output.weight: not one llama has");
    refused(target, &(toy_options){.vocabulary = no_words, .drafted = none}, ES_ERR_FORMAT,
            "expected some tokens, got none");
    refused(target, &(toy_options){.vocabulary = no_words, .drafted = some, .n_drafted = 6},
            ES_ERR_FORMAT, "expected 5 bytes, a bit for each of 40 tokens, got 6");
    refused(target, &(toy_options){.taller = "token_embd.weight"}, ES_ERR_FORMAT, "vocab_size");
    /* a draft is no target */
    es_model_params params;
    es_model *model;
    toy_write_as(draft_path, "llama", ES_GGML_Q8_0, &(toy_options){.vocabulary = no_words});
    CHECK(es_model_params_default(&params) == ES_OK);
    CHECK(es_model_open(draft_path, &params, &model) == ES_ERR_UNSUPPORTED);
    CHECK(strstr(es_error_message(), "uses its target's embedding") != NULL);
    /* cut short anywhere */
    FILE *file = fopen(draft_path, "rb");
    static char bytes[1 << 16];
    CHECK(file != NULL);
    size_t n = fread(bytes, 1, sizeof(bytes), file);
    CHECK(fclose(file) == 0 && n > 1000 && n < sizeof(bytes));
    for (size_t cut = 0; cut < n; cut += cut < 600 ? 7 : 997) {
        es_head *head;
        file = fopen(draft_path, "wb");
        CHECK(file != NULL && fwrite(bytes, 1, cut, file) == cut && fclose(file) == 0);
        CHECK(es_head_open(target, draft_path, &head) != ES_OK);
    }
    es_model_free(target);
}

static void test_memory(void)
{
    static const uint8_t drafted[TOY_VOCAB / 8] = {3, 0, 129, 0, 1};
    write_all("llama", ES_GGML_Q8_0, false, drafted);
    es_model *target = load(target_path, 2);
    es_head *head = NULL;
    es_drafter *drafter = NULL;
    es_drafter_params params;
    es_status status = ES_ERR_MEMORY;
    CHECK(es_drafter_params_default(&params) == ES_OK);
    for (long left = 0; status != ES_OK; left++) {
        es_test_alloc_left = left;
        status = es_head_open(target, draft_path, &head);
        es_test_alloc_left = -1;
        CHECK(status == ES_OK || status == ES_ERR_MEMORY);
    }
    status = ES_ERR_MEMORY;
    for (long left = 0; status != ES_OK; left++) {
        es_test_alloc_left = left;
        status = es_drafter_new(head, &params, &drafter);
        es_test_alloc_left = -1;
        CHECK(status == ES_OK || status == ES_ERR_MEMORY);
    }
    size_t bytes, wide;
    CHECK(es_drafter_memory(head, &params, &bytes) == ES_OK);
    params.window = 8;
    CHECK(es_drafter_memory(head, &params, &wide) == ES_OK);
    CHECK(wide < bytes && bytes < 1 << 20);
    es_drafter_free(drafter);
    es_head_free(head);
    es_model_free(target);
}

/* ---- picking rows ------------------------------------------------------------------------ */

static void test_pick(void)
{
    enum { K = 512, FROM = 50, TO = 21 };
    static const int32_t types[] = {
        ES_GGML_F32, ES_GGML_F16, ES_GGML_BF16, ES_GGML_Q4_0, ES_GGML_Q4_1, ES_GGML_Q5_0,
        ES_GGML_Q5_1, ES_GGML_Q8_0, ES_GGML_Q2_K, ES_GGML_Q3_K, ES_GGML_Q4_K, ES_GGML_Q5_K,
        ES_GGML_Q6_K, ES_GGML_IQ4_NL, ES_GGML_MXFP4,
    };
    static const int32_t row_bytes[] = {2048, 1024, 1024, 288, 320, 352, 384, 544, 168, 220, 288,
                                        352, 420, 288, 272};
    static uint8_t blocks[FROM * 2048], picked[TO * 2048], tiles[4 * 16 * 2048];
    static uint8_t got[2 * 16 * 2048], expected[2 * 16 * 2048];
    uint64_t state = 1;
    for (size_t i = 0; i < sizeof(blocks); i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        blocks[i] = (uint8_t)(state >> 56);
    }
    int32_t rows[TO];
    for (int32_t i = 0; i < TO; i++) {
        rows[i] = (7 * i + 3) % FROM;
    }
    for (size_t t = 0; t < sizeof(types) / sizeof(types[0]); t++) {
        size_t bytes = (size_t)row_bytes[t], tile_bytes = es_pack_tile_bytes(types[t], K);
        es_tensor from = {types[t], FROM, K, tile_bytes, tiles};
        CHECK(tile_bytes > 0 && tile_bytes <= 16 * 2048);
        for (int32_t i = 0; i < TO; i++) {
            memcpy(picked + (size_t)i * bytes, blocks + (size_t)rows[i] * bytes, bytes);
        }
        es_pack_tiles(types[t], blocks, bytes, FROM, K, 0, es_tiles(FROM), tiles);
        es_pack_tiles(types[t], picked, bytes, TO, K, 0, es_tiles(TO), expected);
        es_pack_pick(&from, rows, TO, got);
        CHECK(memcmp(got, expected, (size_t)es_tiles(TO) * tile_bytes) == 0);
    }
}

int main(void)
{
    static const uint8_t drafted[TOY_VOCAB / 8] = {0xFA, 0x3D, 0x80, 0xFF, 0x11};
    static const uint8_t first[TOY_VOCAB / 8] = {0xFF, 0xFF, 0x0F};
    const char *directory = getenv("TMPDIR") == NULL ? "/tmp" : getenv("TMPDIR");
    snprintf(target_path, sizeof(target_path), "%.30s/es_target_%d.gguf", directory, (int)getpid());
    snprintf(draft_path, sizeof(draft_path), "%.30s/es_draft_%d.gguf", directory, (int)getpid());
    snprintf(whole_path, sizeof(whole_path), "%.30s/es_whole_%d.gguf", directory, (int)getpid());
    for (int32_t i = 0; i < 2 * TOY_CONTEXT; i++) {
        prompt[i] = (13 * i + i * i / 3) % TOY_VOCAB;
    }
    for (size_t i = 0; i < sizeof(families) / sizeof(families[0]); i++) {
        test_rows(families[i], ES_GGML_Q8_0, i % 2 == 0, NULL, false);
        test_rows(families[i], ES_GGML_F32, i % 2 == 1, drafted, false);
        test_rows(families[i], ES_GGML_Q8_0, i % 2 == 1, first, i % 2 == 0);
        test_rows(families[i], ES_GGML_F32, i % 2 == 0, drafted, true);
        test_long(families[i]);
    }
    test_window();
    test_wrong_files();
    test_memory();
    test_pick();
    remove(target_path);
    remove(draft_path);
    remove(whole_path);
    return 0;
}
