/* toy_gguf.h - writes a tiny random model as a GGUF file, for tests. */
#ifndef ES_TESTS_TOY_GGUF_H
#define ES_TESTS_TOY_GGUF_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "gguf.h"

enum {
    TOY_LAYERS = 2, TOY_HIDDEN = 32, TOY_HEADS = 4, TOY_KV_HEADS = 2, TOY_HEAD_DIM = 8,
    TOY_FFN = 64, TOY_VOCAB = 40, TOY_CONTEXT = 96, TOY_MAX_TENSORS = 64
};

typedef struct toy_tensor {
    char name[64];
    int32_t type;       /* ES_GGML_F32 or ES_GGML_Q8_0 */
    int64_t cols, rows; /* rows 0: a vector */
} toy_tensor;

/* What is not as usual. */
typedef struct toy_options {
    uint64_t seed;              /* not 0: a tensor's values depend on it and the tensor's name */
    int32_t layers;             /* 0: TOY_LAYERS */
    bool has_output;            /* a matrix of its own */
    const char *vocabulary;     /* not NULL: of a draft without embedding and output matrix */
    const uint8_t *drafted;     /* (TOY_VOCAB / 8) bits of the tokens it drafts; NULL: all */
    int32_t n_drafted;          /* bytes of these; 0: TOY_VOCAB / 8 */
    const char *without;        /* a tensor that is left out */
    const char *taller;         /* one with another row, or value */
} toy_options;

typedef struct toy {
    FILE *file;
    uint64_t state;
    uint64_t seed;
    toy_tensor tensor[TOY_MAX_TENSORS];
    int32_t n_tensors;
} toy;

static inline double toy_random(toy *t) /* in [-1, 1) */
{
    t->state = t->state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (double)(t->state >> 40) / (double)(1 << 23) - 1.0;
}

static inline void toy_number(toy *t, uint64_t value, size_t n)
{
    CHECK(fwrite(&value, 1, n, t->file) == n); /* little-endian, like everything we run on */
}

static inline void toy_text(toy *t, const char *text)
{
    toy_number(t, strlen(text), 8);
    CHECK(fwrite(text, 1, strlen(text), t->file) == strlen(text));
}

static inline void toy_u32(toy *t, const char *family, const char *key, uint32_t value)
{
    char name[96];
    snprintf(name, sizeof(name), "%s.%s", family, key);
    toy_text(t, name);
    toy_number(t, 4, 4);
    toy_number(t, value, 4);
}

static inline void toy_f32(toy *t, const char *family, const char *key, float value)
{
    char name[96];
    uint32_t bits;
    memcpy(&bits, &value, 4);
    snprintf(name, sizeof(name), "%s.%s", family, key);
    toy_text(t, name);
    toy_number(t, 6, 4);
    toy_number(t, bits, 4);
}

static inline void toy_add(toy *t, int32_t type, int64_t cols, int64_t rows, const char *name)
{
    CHECK(t->n_tensors < TOY_MAX_TENSORS);
    toy_tensor *made = &t->tensor[t->n_tensors++];
    *made = (toy_tensor){.type = rows == 0 ? ES_GGML_F32 : type, .cols = cols, .rows = rows};
    snprintf(made->name, sizeof(made->name), "%s", name);
}

static inline size_t toy_bytes(const toy_tensor *x)
{
    size_t values = (size_t)(x->cols * (x->rows > 0 ? x->rows : 1));
    return x->type == ES_GGML_F32 ? 4 * values : values / 32 * 34;
}

static inline void toy_values(toy *t, const toy_tensor *x)
{
    if (t->seed != 0) {
        t->state = t->seed;
        for (const char *c = x->name; *c != '\0'; c++) {
            t->state = (t->state ^ (uint8_t)*c) * UINT64_C(1099511628211);
        }
    }
    size_t values = (size_t)(x->cols * (x->rows > 0 ? x->rows : 1));
    double size = x->rows == 0 ? 0.2 : 1.5 / sqrt((double)x->cols);
    for (size_t i = 0; i < values; i++) {
        if (x->type == ES_GGML_F32) {
            float value = (float)(size * toy_random(t) + (x->rows == 0));
            CHECK(fwrite(&value, 4, 1, t->file) == 1);
        } else {
            if (i % 32 == 0) {
                toy_number(t, 0x2200 + (uint64_t)(100 * (toy_random(t) + 1)), 2); /* about 0.012 */
            }
            toy_number(t, (uint64_t)(int64_t)(127 * toy_random(t)) & 255, 1);
        }
    }
}

static inline void toy_layer(toy *t, const char *family, int32_t type, int32_t layer)
{
    bool is_gemma = strcmp(family, "gemma3") == 0;
    const int64_t q = TOY_HEADS * TOY_HEAD_DIM, kv = TOY_KV_HEADS * TOY_HEAD_DIM;
    const struct {
        const char *name;
        int64_t cols, rows;
        bool has;
    } all[] = {
        {"attn_norm.weight", TOY_HIDDEN, 0, true},
        {"attn_q.weight", TOY_HIDDEN, q, true},
        {"attn_k.weight", TOY_HIDDEN, kv, true},
        {"attn_v.weight", TOY_HIDDEN, kv, true},
        {"attn_q.bias", q, 0, strcmp(family, "qwen2") == 0},
        {"attn_k.bias", kv, 0, strcmp(family, "qwen2") == 0},
        {"attn_v.bias", kv, 0, strcmp(family, "qwen2") == 0},
        {"attn_q_norm.weight", TOY_HEAD_DIM, 0, is_gemma || strcmp(family, "qwen3") == 0},
        {"attn_k_norm.weight", TOY_HEAD_DIM, 0, is_gemma || strcmp(family, "qwen3") == 0},
        {"attn_output.weight", q, TOY_HIDDEN, true},
        {"post_attention_norm.weight", TOY_HIDDEN, 0, is_gemma},
        {"ffn_norm.weight", TOY_HIDDEN, 0, true},
        {"ffn_gate.weight", TOY_HIDDEN, TOY_FFN, true},
        {"ffn_up.weight", TOY_HIDDEN, TOY_FFN, true},
        {"ffn_down.weight", TOY_FFN, TOY_HIDDEN, true},
        {"post_ffw_norm.weight", TOY_HIDDEN, 0, is_gemma},
    };
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        if (all[i].has) {
            char name[64];
            snprintf(name, sizeof(name), "blk.%d.%s", (int)layer, all[i].name);
            toy_add(t, type, all[i].cols, all[i].rows, name);
        }
    }
}

/* The tensors of a model, before they are written. */
static inline void toy_add_all(toy *t, const char *family, int32_t type, const toy_options *options)
{
    int32_t layers = options->layers > 0 ? options->layers : TOY_LAYERS, n = 0;
    if (options->vocabulary == NULL) {
        toy_add(t, type, TOY_HIDDEN, TOY_VOCAB, "token_embd.weight");
    }
    for (int32_t i = 0; i < layers; i++) {
        toy_layer(t, family, type, i);
    }
    toy_add(t, type, TOY_HIDDEN, 0, "output_norm.weight");
    if (options->has_output) {
        toy_add(t, type, TOY_HIDDEN, TOY_VOCAB, "output.weight");
    }
    for (int32_t i = 0; i < t->n_tensors; i++) {
        toy_tensor *x = &t->tensor[i];
        if (options->taller != NULL && strcmp(x->name, options->taller) == 0) {
            *(x->rows > 0 ? &x->rows : &x->cols) += 1;
        }
        if (options->without == NULL || strcmp(x->name, options->without) != 0) {
            t->tensor[n++] = *x;
        }
    }
    t->n_tensors = n;
}

/* A model whose matrices are of `type`; gemma3 has a window of 5 in every other layer. */
static inline void toy_write_as(const char *path, const char *family, int32_t type,
                                const toy_options *options)
{
    static toy made;
    toy *t = &made;
    *t = (toy){.file = fopen(path, "wb"), .state = 7, .seed = options->seed};
    CHECK(t->file != NULL);
    toy_add_all(t, family, type, options);
    int32_t layers = options->layers > 0 ? options->layers : TOY_LAYERS;
    toy_number(t, 0x46554747, 4); /* GGUF */
    toy_number(t, 3, 4);
    toy_number(t, (uint64_t)t->n_tensors, 8);
    bool has_window = strcmp(family, "gemma3") == 0;
    bool is_guest = options->vocabulary != NULL;
    toy_number(t, (uint64_t)(11 + is_guest + (is_guest && has_window) + (options->drafted != NULL)),
               8);
    toy_text(t, "general.architecture");
    toy_number(t, 8, 4);
    toy_text(t, family);
    toy_u32(t, family, "block_count", (uint32_t)layers);
    toy_u32(t, family, "context_length", TOY_CONTEXT);
    toy_u32(t, family, "embedding_length", TOY_HIDDEN);
    toy_u32(t, family, "feed_forward_length", TOY_FFN);
    toy_u32(t, family, "attention.head_count", TOY_HEADS);
    toy_u32(t, family, "attention.head_count_kv", TOY_KV_HEADS);
    toy_u32(t, family, "attention.key_length", TOY_HEAD_DIM);
    toy_f32(t, family, "attention.layer_norm_rms_epsilon", 1e-5f);
    toy_u32(t, family, "attention.sliding_window", has_window ? 5 : 0);
    toy_u32(t, family, has_window ? "attention.sliding_window_pattern" : "vocab_size",
            has_window ? 2 : TOY_VOCAB);
    if (is_guest) {
        if (has_window) {
            toy_u32(t, family, "vocab_size", TOY_VOCAB);
        }
        toy_text(t, "edgespec.draft.vocabulary");
        toy_number(t, 8, 4);
        toy_text(t, options->vocabulary);
    }
    if (options->drafted != NULL) {
        size_t n = options->n_drafted > 0 ? (size_t)options->n_drafted : TOY_VOCAB / 8;
        toy_text(t, "edgespec.draft.tokens");
        toy_number(t, 9, 4); /* an array of bytes */
        toy_number(t, 0, 4);
        toy_number(t, n, 8);
        CHECK(fwrite(options->drafted, 1, n, t->file) == n);
    }
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

static inline void toy_write(const char *path, const char *family, int32_t type)
{
    toy_write_as(path, family, type, &(toy_options){0});
}

#endif
