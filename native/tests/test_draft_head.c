/* Tiny EAGLE and Medusa heads beside a tiny target: memory that runs out and files that are damaged
   end in errors; drafts have the same bits however they come about. Numbers: tests/ in Python. */
#include <stdlib.h>
#include <unistd.h>

#include "alloc.h"
#include "check.h"
#include "draft_net.h"
#include "edgespec.h"
#include "toy_gguf.h"

enum { N_KINDS = 3, TAPS = 2, DRAFTED = 24, HEADS = 2, N = 90, ROWS = 6 };
static const char *const kinds[N_KINDS] = {"eagle3", "edgespec-eagle", "edgespec-medusa"};

static char target_path[64], head_path[64];

/* ---- a head's file ----------------------------------------------------------------------- */

static void add_eagle(toy *t, int32_t type, bool is_third)
{
    int64_t q = TOY_HEADS * TOY_HEAD_DIM, kv = TOY_KV_HEADS * TOY_HEAD_DIM, hidden = TOY_HIDDEN;
    int64_t inputs = is_third ? 2 * hidden : hidden;
    toy_add(t, type, (is_third ? TAPS : 2) * hidden, hidden, "fc.weight");
    toy_add(t, type, inputs, q, "blk.0.attn_q.weight");
    toy_add(t, type, inputs, kv, "blk.0.attn_k.weight");
    toy_add(t, type, inputs, kv, "blk.0.attn_v.weight");
    toy_add(t, type, q, hidden, "blk.0.attn_output.weight");
    toy_add(t, type, hidden, 0, "blk.0.ffn_norm.weight");
    toy_add(t, type, hidden, TOY_FFN, "blk.0.ffn_gate.weight");
    toy_add(t, type, hidden, TOY_FFN, "blk.0.ffn_up.weight");
    toy_add(t, type, TOY_FFN, hidden, "blk.0.ffn_down.weight");
    if (is_third) {
        toy_add(t, type, hidden, 0, "blk.0.attn_norm.weight");
        toy_add(t, type, hidden, 0, "blk.0.attn_norm_2.weight");
        toy_add(t, type, TOY_HEAD_DIM, 0, "blk.0.attn_q_norm.weight");
        toy_add(t, type, TOY_HEAD_DIM, 0, "blk.0.attn_k_norm.weight");
        toy_add(t, type, hidden, 0, "output_norm.weight");
        toy_add(t, type, hidden, 0, "fc_norm.0.weight");
        toy_add(t, type, hidden, 0, "fc_norm.1.weight");
        toy_add(t, type, hidden, TOY_VOCAB, "output.weight");
    } else {
        toy_add(t, type, hidden, 0, "fc.bias");
    }
}

/* With projections of its own as F32, else on the first rows of the target's. */
static void add_medusa(toy *t, int32_t type)
{
    char name[64];
    for (int32_t h = 0; h < HEADS; h++) {
        snprintf(name, sizeof(name), "medusa.%d.0.weight", (int)h);
        toy_add(t, type, TOY_HIDDEN, TOY_HIDDEN, name);
        snprintf(name, sizeof(name), "medusa.%d.0.bias", (int)h);
        toy_add(t, type, TOY_HIDDEN, 0, name);
        if (type == ES_GGML_F32) {
            snprintf(name, sizeof(name), "medusa.%d.output.weight", (int)h);
            toy_add(t, type, TOY_HIDDEN, DRAFTED, name);
        }
    }
}

static void write_keys(toy *t, const char *arch)
{
    toy_text(t, "general.architecture");
    toy_number(t, 8, 4);
    toy_text(t, arch);
    toy_u32(t, arch, "embedding_length", TOY_HIDDEN);
    toy_u32(t, arch, "vocab_size", TOY_VOCAB);
    if (strcmp(arch, "edgespec-medusa") == 0) {
        toy_u32(t, arch, "block_count", 1);
        toy_u32(t, arch, "head_count", HEADS);
        toy_u32(t, arch, "output_rows", DRAFTED);
        return;
    }
    toy_u32(t, arch, "block_count", 1);
    toy_u32(t, arch, "context_length", TOY_CONTEXT);
    toy_u32(t, arch, "feed_forward_length", TOY_FFN);
    toy_u32(t, arch, "attention.head_count", TOY_HEADS);
    toy_u32(t, arch, "attention.head_count_kv", TOY_KV_HEADS);
    toy_u32(t, arch, "attention.key_length", TOY_HEAD_DIM);
    toy_f32(t, arch, "attention.layer_norm_rms_epsilon", 1e-5f);
    toy_u32(t, arch, "target_hidden_size", TOY_HIDDEN);
    toy_text(t, "edgespec.head.taps");
    toy_number(t, 9, 4);
    toy_number(t, 4, 4);
    toy_number(t, TAPS, 8);
    for (int32_t i = 0; i < TAPS; i++) {
        toy_number(t, (uint64_t)i, 4);
    }
}

static void write_head(const char *arch, int32_t type)
{
    static toy made;
    toy *t = &made;
    bool is_medusa = strcmp(arch, "edgespec-medusa") == 0;
    *t = (toy){.file = fopen(head_path, "wb"), .state = 11};
    CHECK(t->file != NULL);
    if (is_medusa) {
        add_medusa(t, type);
    } else {
        add_eagle(t, type, strcmp(arch, "eagle3") == 0);
    }
    toy_number(t, 0x46554747, 4); /* GGUF */
    toy_number(t, 3, 4);
    toy_number(t, (uint64_t)t->n_tensors, 8);
    toy_number(t, is_medusa ? 6 : 12, 8);
    write_keys(t, arch);
    uint64_t offset = 0;
    for (int32_t i = 0; i < t->n_tensors; i++) {
        const toy_tensor *x = &t->tensor[i];
        toy_text(t, x->name);
        toy_number(t, x->rows > 0 ? 2 : 1, 4);
        toy_number(t, (uint64_t)x->cols, 8);
        if (x->rows > 0) {
            toy_number(t, (uint64_t)x->rows, 8);
        }
        toy_number(t, (uint64_t)x->type, 4);
        toy_number(t, offset, 8);
        offset += (toy_bytes(x) + 31) / 32 * 32;
    }
    for (int32_t i = 0; i < t->n_tensors; i++) {
        while (ftell(t->file) % 32 != 0) {
            toy_number(t, 0, 1);
        }
        toy_values(t, &t->tensor[i]);
    }
    CHECK(fclose(t->file) == 0);
}

/* ---- drafting ---------------------------------------------------------------------------- */

static es_model *load(int32_t threads)
{
    es_model_params params;
    es_model *model;
    size_t done, total;
    CHECK(es_model_params_default(&params) == ES_OK);
    params.threads = threads;
    CHECK(es_model_open(target_path, &params, &model) == ES_OK);
    do {
        CHECK(es_model_load(model, &done, &total) == ES_OK);
    } while (done < total);
    return model;
}

/* Root, two children and one each of theirs, then one more: logits (ROWS, vocab), Medusa's two
   levels being all there is. */
static void draft(es_drafter *drafter, int32_t root, float *out)
{
    static const int32_t parent[ROWS] = {-1, 0, 0, 1, 2, 3};
    const es_draft_net *net = es_drafter_net(drafter);
    size_t vocab = (size_t)net->vocab;
    const float *logits;
    bool is_ready;
    es_tree tree = {.n = ROWS};
    for (int32_t i = 0; i < ROWS; i++) {
        tree.token[i] = (5 * i + root) % TOY_VOCAB;
        tree.parent[i] = parent[i];
        tree.rank[i] = i == 2;
    }
    CHECK(es_tree_derive(&tree) == ES_OK);
    memset(out, 0, ROWS * vocab * sizeof(*out));
    CHECK(net->begin(net->self, root, &logits, &is_ready) == ES_OK && is_ready);
    memcpy(out, logits, vocab * sizeof(*out));
    for (int32_t row = 1, n; row < ROWS; row += n) {
        n = row < 5 ? 2 : 1;
        int32_t rows[2] = {row, row + 1};
        if (net->depth > 0 && tree.depth[row] >= net->depth) {
            break;
        }
        CHECK(net->expand(net->self, &tree, rows, n, &logits) == ES_OK);
        memcpy(out + (size_t)row * vocab, logits, (size_t)n * vocab * sizeof(*out));
    }
    net->end(net->self);
}

static void tell(es_drafter *drafter, const es_head_info *info, int32_t first, int32_t n)
{
    static float taps[N * TAPS * TOY_HIDDEN];
    int32_t tokens[N], width = info->n_taps * TOY_HIDDEN;
    for (int32_t i = 0; i < n; i++) {
        tokens[i] = (13 * (first + i) + 5) % TOY_VOCAB;
        for (int32_t k = 0; k < width; k++) {
            taps[i * width + k] = (float)((7919 * (first + i) + 31 * k) % 2003) / 700.0f - 1.4f;
        }
    }
    CHECK(es_drafter_append(drafter, tokens, taps, (size_t)n) == ES_OK);
}

static es_drafter *drafter_of(es_head *head, int32_t window)
{
    es_drafter_params params;
    es_drafter *drafter;
    size_t bytes = 0;
    CHECK(es_drafter_params_default(&params) == ES_OK);
    params.window = window;
    CHECK(es_drafter_memory(head, &params, &bytes) == ES_OK && bytes > 1000);
    CHECK(es_drafter_new(head, &params, &drafter) == ES_OK);
    return drafter;
}

/* Threads, chunks, drafts in between and what was cut again leave no trace. */
static void test_bits(const char *arch, int32_t type)
{
    static float expected[ROWS * TOY_VOCAB], got[ROWS * TOY_VOCAB];
    write_head(arch, type);
    for (int32_t threads = 1; threads <= 3; threads++) {
        es_model *model = load(threads);
        es_head *head;
        es_head_info info;
        CHECK(es_head_open(model, head_path, &head) == ES_OK);
        CHECK(es_head_describe(head, &info) == ES_OK && info.hidden == TOY_HIDDEN);
        for (int32_t chunk = 1; chunk <= N; chunk += 1 + 2 * chunk) {
            es_drafter *drafter = drafter_of(head, 0);
            size_t bytes = ROWS * (size_t)es_drafter_net(drafter)->vocab * sizeof(float);
            for (int32_t at = 0; at < N; at += chunk) {
                tell(drafter, &info, at, at + chunk < N ? chunk : N - at);
                if (at % 3 == 0) {
                    draft(drafter, at % TOY_VOCAB, got);
                }
            }
            tell(drafter, &info, N, 5);
            draft(drafter, 2, got);
            CHECK(es_drafter_truncate(drafter, N - 1) == ES_OK);
            tell(drafter, &info, N - 1, 1);
            draft(drafter, 1, got);
            if (threads == 1 && chunk == 1) {
                memcpy(expected, got, sizeof(got));
            }
            CHECK(memcmp(expected, got, bytes) == 0);
            es_drafter_free(drafter);
        }
        es_head_free(head);
        es_model_free(model);
    }
}

static void test_no_memory(const char *arch)
{
    write_head(arch, ES_GGML_Q8_0);
    es_model *model = load(1);
    es_head *head = NULL;
    es_status status;
    long left = 0;
    do {
        es_test_alloc_left = left++;
        status = es_head_open(model, head_path, &head);
        CHECK(status == ES_OK || status == ES_ERR_MEMORY);
    } while (status != ES_OK);
    es_drafter_params params = {.window = 8};
    es_drafter *drafter = NULL;
    left = 0;
    do {
        es_test_alloc_left = left++;
        status = es_drafter_new(head, &params, &drafter);
        CHECK(status == ES_OK || status == ES_ERR_MEMORY);
    } while (status != ES_OK);
    CHECK(left > 5);
    es_head_info info;
    float logits[ROWS * TOY_VOCAB];
    CHECK(es_head_describe(head, &info) == ES_OK);
    es_test_alloc_left = 0; /* a draft asks for none */
    tell(drafter, &info, 0, 30);
    draft(drafter, 3, logits);
    es_test_alloc_left = -1;
    es_drafter_free(drafter);
    es_head_free(head);
    es_model_free(model);
    es_drafter_free(NULL);
    es_head_free(NULL);
}

/* Every byte in front of the weights, wrong in turn, and files that end too soon. */
static void test_damaged(const char *arch)
{
    write_head(arch, ES_GGML_F32);
    FILE *file = fopen(head_path, "rb");
    static uint8_t whole[1 << 18];
    CHECK(file != NULL);
    size_t n = fread(whole, 1, sizeof(whole), file);
    CHECK(n > 2000 && n < sizeof(whole) && fclose(file) == 0);
    es_model *model = load(1);
    for (size_t i = 0; i < 2600; i++) {
        bool is_cut = i % 13 == 12;
        size_t size = is_cut ? i * (n - 1) / 2600 : n;
        uint8_t kept = whole[i];
        whole[i] ^= is_cut ? 0 : (uint8_t)(1 << i % 8);
        unlink(head_path); /* a file that is written over waits for the disk */
        file = fopen(head_path, "wb");
        CHECK(file != NULL && fwrite(whole, 1, size, file) == size && fclose(file) == 0);
        whole[i] = kept;
        es_head *head = NULL;
        es_status status = es_head_open(model, head_path, &head);
        CHECK(status == ES_OK || (es_error_message()[0] != '\0' && head == NULL));
        CHECK(!is_cut || status != ES_OK);
        if (status == ES_OK) {
            es_drafter *drafter = NULL;
            es_drafter_params params = {.window = 8};
            if (es_drafter_new(head, &params, &drafter) == ES_OK) {
                float logits[ROWS * TOY_VOCAB];
                es_head_info info;
                CHECK(es_head_describe(head, &info) == ES_OK);
                tell(drafter, &info, 0, 20);
                draft(drafter, 3, logits);
                es_drafter_free(drafter);
            }
            es_head_free(head);
        }
    }
    es_model_free(model);
}

int main(void)
{
    const char *directory = getenv("TMPDIR") == NULL ? "/tmp" : getenv("TMPDIR");
    int32_t id = (int32_t)getpid();
    snprintf(target_path, sizeof(target_path), "%.30s/es_headed_%d.gguf", directory, (int)id);
    snprintf(head_path, sizeof(head_path), "%.30s/es_head_%d.gguf", directory, (int)id);
    toy_write(target_path, "llama", ES_GGML_Q8_0);
    for (int32_t k = 0; k < N_KINDS; k++) {
        test_bits(kinds[k], ES_GGML_F32);
        test_bits(kinds[k], ES_GGML_Q8_0);
        test_no_memory(kinds[k]);
        test_damaged(kinds[k]);
    }
    unlink(target_path);
    unlink(head_path);
    return 0;
}
