/*
 * rope.c - the formulas of transformers' modeling_rope_utils and of ggml's rope, where both agree.
 */
#include "rope.h"

#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "fmath.h"

#define TWO_PI 6.283185307179586

static const float LEAST = 1e-30f, MOST = 1e30f; /* of any number here */

enum { MAX_DIM = 1 << 16, KEY_BYTES = 128 };

/* ARCH.rope.* of one file. */
typedef struct source {
    const es_gguf *gguf;
    const char *arch;
} source;

static const char *key_of(const source *s, const char *key, char buffer[KEY_BYTES])
{
    snprintf(buffer, KEY_BYTES, "%s.rope.%s", s->arch, key);
    return buffer;
}

/* A positive number; absent or 0 is what stands in *out. */
static es_status number(const source *s, const char *key, double *out)
{
    char name[KEY_BYTES];
    float value = 0.0f;
    bool found;
    es_status status = es_gguf_f32(s->gguf, key_of(s, key, name), &value, &found);
    if (status != ES_OK || !found || value == 0.0f) {
        return status;
    }
    if (!(value > LEAST && value < MOST)) {
        return es_fail(ES_ERR_FORMAT, "%s: %s: expected a positive number, got %g",
                       es_gguf_name(s->gguf), name, (double)value);
    }
    *out = (double)value;
    return ES_OK;
}

/* A key that llama.cpp knows and we do not: only the values that change nothing. */
static es_status neutral(const source *s, const char *key, float one, float other)
{
    char name[KEY_BYTES];
    float value = one;
    bool found;
    es_status status = es_gguf_f32(s->gguf, key_of(s, key, name), &value, &found);
    if (status == ES_OK && found && value != one && value != other) {
        return es_fail(ES_ERR_UNSUPPORTED, "%s: %s = %g is not supported", es_gguf_name(s->gguf),
                       name, (double)value);
    }
    return status;
}

typedef enum kind { KIND_NONE, KIND_LINEAR, KIND_YARN } kind;

static es_status read_kind(const source *s, kind *out)
{
    char name[KEY_BYTES];
    es_gguf_string text = {NULL, 0};
    bool found;
    es_status status = es_gguf_str(s->gguf, key_of(s, "scaling.type", name), &text, &found);
    if (status != ES_OK || !found) {
        *out = KIND_LINEAR;
        return status;
    }
    static const char *const known[] = {"none", "linear", "yarn"};
    for (int i = 0; i < 3; i++) {
        if (text.n == strlen(known[i]) && memcmp(text.data, known[i], text.n) == 0) {
            *out = (kind)i;
            return ES_OK;
        }
    }
    int shown = text.n < 40 ? (int)text.n : 40;
    return es_fail(ES_ERR_UNSUPPORTED,
                   "%s: %s: RoPE scaling '%.*s' is not supported; known: none, linear, yarn",
                   es_gguf_name(s->gguf), name, shown, text.data);
}

/* Unscaled frequencies theta^(-2i / dim). */
static es_status base_frequencies(const source *s, double theta, int32_t dim, es_rope *out)
{
    if (dim < 2 || dim % 2 != 0 || dim > MAX_DIM || theta <= 1.0) {
        return es_fail(ES_ERR_FORMAT,
                       "%s: RoPE needs an even dimension of at most %d and a base above 1, got %d "
                       "and %g", es_gguf_name(s->gguf), (int)MAX_DIM, (int)dim, theta);
    }
    double *inv_freq = es_malloc((size_t)dim / 2 * sizeof *inv_freq);
    if (inv_freq == NULL) {
        return es_fail(ES_ERR_MEMORY, "%s: no memory for %d rotary frequencies",
                       es_gguf_name(s->gguf), (int)dim / 2);
    }
    for (int32_t i = 0; i < dim / 2; i++) {
        inv_freq[i] = es_exp(-(2.0 * i / dim) * es_log(theta));
    }
    *out = (es_rope){.dim = dim, .attention_factor = 1.0, .inv_freq = inv_freq};
    return ES_OK;
}

/* Divides by the factors of llama3, which the file lists. */
static es_status divide(const source *s, const es_gguf_tensor *factors, es_rope *rope)
{
    if (factors->type != ES_GGML_F32 || factors->n_dims != 1 || factors->dim[0] != rope->dim / 2) {
        return es_fail(ES_ERR_FORMAT, "%s: tensor '%s': expected %d values of F32",
                       es_gguf_name(s->gguf), factors->name, (int)rope->dim / 2);
    }
    const uint8_t *data = es_gguf_data(s->gguf, factors);
    for (int32_t i = 0; i < rope->dim / 2; i++) {
        float factor;
        memcpy(&factor, data + (size_t)i * sizeof factor, sizeof factor);
        if (!(factor > LEAST && factor < MOST)) {
            return es_fail(ES_ERR_FORMAT, "%s: tensor '%s'[%d]: expected a positive number, got %g",
                           es_gguf_name(s->gguf), factors->name, (int)i, (double)factor);
        }
        rope->inv_freq[i] /= (double)factor;
    }
    return ES_OK;
}

static double clip(double x)
{
    return x < 0.0 ? 0.0 : x > 1.0 ? 1.0 : x;
}

/* The pair that makes this many turns over the original context. */
static double pair_of(double dim, double theta, double context, double turns)
{
    return dim * es_log(context / (turns * TWO_PI)) / (2.0 * es_log(theta));
}

/* Interpolates the pairs that turn slowly, keeps those that turn fast, blends between. */
static es_status stretch(const source *s, double theta, double factor, int32_t max_position,
                         double attention, es_rope *rope)
{
    char name[KEY_BYTES];
    uint32_t context = (uint32_t)max_position;
    double fast = 32.0, slow = 1.0;
    bool found;
    es_status status = es_gguf_u32(s->gguf, key_of(s, "scaling.original_context_length", name),
                                   &context, &found);
    if (status == ES_OK && context == 0) {
        status = es_fail(ES_ERR_FORMAT, "%s: %s: expected a positive number, got 0",
                         es_gguf_name(s->gguf), name);
    }
    if (status == ES_OK) {
        status = number(s, "scaling.yarn_beta_fast", &fast);
    }
    if (status == ES_OK) {
        status = number(s, "scaling.yarn_beta_slow", &slow);
    }
    if (status != ES_OK) {
        return status;
    }
    double low = floor(pair_of(rope->dim, theta, context, fast));
    double high = ceil(pair_of(rope->dim, theta, context, slow));
    low = low > 0.0 ? low : 0.0;
    high = high < rope->dim - 1 ? high : rope->dim - 1;
    double width = high != low ? high - low : 0.001;
    for (int32_t i = 0; i < rope->dim / 2; i++) {
        double ramp = clip((i - low) / width);
        double base = rope->inv_freq[i];
        rope->inv_freq[i] = base / factor * ramp + base * (1.0 - ramp);
    }
    rope->attention_factor = attention * (factor > 1.0 ? 0.1 * es_log(factor) + 1.0 : 1.0);
    return ES_OK;
}

static es_status scaled(const source *s, int32_t dim, int32_t max_position, es_rope *out)
{
    kind scaling = KIND_NONE;
    double theta = 10000.0, factor = 1.0, attention = 1.0;
    es_status status = number(s, "freq_base", &theta);
    if (status == ES_OK) {
        status = number(s, "scale_linear", &factor);
    }
    if (status == ES_OK) {
        status = number(s, "scaling.factor", &factor);
    }
    if (status == ES_OK) {
        status = number(s, "scaling.attn_factor", &attention);
    }
    if (status == ES_OK) {
        status = read_kind(s, &scaling);
    }
    if (status == ES_OK) {
        status = base_frequencies(s, theta, dim, out);
    }
    if (status != ES_OK) {
        return status;
    }
    const es_gguf_tensor *factors = es_gguf_find(s->gguf, "rope_freqs.weight");
    out->attention_factor = attention;
    if (scaling == KIND_LINEAR && factor == 1.0) {
        scaling = KIND_NONE;
    }
    if (factors != NULL && scaling != KIND_NONE) {
        return es_fail(ES_ERR_UNSUPPORTED, "%s: tensor '%s' together with RoPE scaling '%s'",
                       es_gguf_name(s->gguf), factors->name,
                       scaling == KIND_YARN ? "yarn" : "linear");
    }
    if (factors != NULL) {
        return divide(s, factors, out);
    }
    if (scaling == KIND_YARN) {
        return stretch(s, theta, factor, max_position, attention, out);
    }
    for (int32_t i = 0; scaling == KIND_LINEAR && i < dim / 2; i++) {
        out->inv_freq[i] /= factor;
    }
    return ES_OK;
}

static es_status check_keys(const source *s)
{
    static const char *const tensors[] = {"rope_factors_long.weight", "rope_factors_short.weight"};
    for (int i = 0; i < 2; i++) {
        if (es_gguf_find(s->gguf, tensors[i]) != NULL) {
            return es_fail(ES_ERR_UNSUPPORTED,
                           "%s: tensor '%s': RoPE scaling 'longrope' is not supported",
                           es_gguf_name(s->gguf), tensors[i]);
        }
    }
    es_status status = neutral(s, "scaling.yarn_ext_factor", -1.0f, 1.0f);
    if (status == ES_OK) {
        status = neutral(s, "scaling.yarn_attn_factor", -1.0f, 1.0f);
    }
    if (status == ES_OK) {
        status = neutral(s, "scaling.yarn_log_multiplier", 0.0f, 0.0f);
    }
    if (status == ES_OK) {
        status = neutral(s, "scaling.alpha", 0.0f, 0.0f);
    }
    return status;
}

es_status es_rope_from_gguf(const es_gguf *gguf, const char *arch, int32_t dim,
                            int32_t max_position, es_rope *out)
{
    source s = {gguf, arch};
    *out = (es_rope){0};
    es_status status = check_keys(&s);
    if (status == ES_OK) {
        status = scaled(&s, dim, max_position, out);
    }
    if (status != ES_OK) {
        es_rope_clear(out);
    }
    return status;
}

es_status es_rope_local_from_gguf(const es_gguf *gguf, const char *arch, int32_t dim, es_rope *out)
{
    source s = {gguf, arch};
    double theta = 10000.0;
    *out = (es_rope){0};
    es_status status = number(&s, "freq_base_swa", &theta);
    return status == ES_OK ? base_frequencies(&s, theta, dim, out) : status;
}

void es_rope_clear(es_rope *rope)
{
    es_free(rope->inv_freq);
    *rope = (es_rope){0};
}

void es_rope_table(const es_rope *rope, const int64_t *position, int32_t n, float *cos, float *sin)
{
    size_t pairs = (size_t)rope->dim / 2;
    for (size_t r = 0; r < (size_t)n; r++) {
        for (size_t p = 0; p < pairs; p++) {
            double s, c;
            es_sincos((double)position[r] * rope->inv_freq[p], &s, &c);
            cos[r * pairs + p] = (float)(c * rope->attention_factor);
            sin[r * pairs + p] = (float)(s * rope->attention_factor);
        }
    }
}
