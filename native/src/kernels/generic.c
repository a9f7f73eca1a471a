/*
 * generic.c - the arithmetic of kernels.h read out loud: plain loops, one output at a time.
 *
 * Slow and right. It shares no code with the fast variants but the functions of fmath.h.
 */
#include "generic.h"

#include <math.h>
#include <string.h>

#include "fmath.h"
#include "gguf.h"

/* ---- tiles ------------------------------------------------------------------------------- */

/* Bits of a level by plane: where pack.h puts them, in the order of pack.h. */
typedef struct level_layout {
    int nibbles, pairs, plane2, plane1, bytes; /* 1: the type has this part */
} level_layout;

static level_layout layout_of(int32_t type)
{
    switch (type) {
    case ES_GGML_Q5_0:
    case ES_GGML_Q5_1:
    case ES_GGML_Q5_K:
        return (level_layout){.nibbles = 1, .plane1 = 1};
    case ES_GGML_Q6_K:
        return (level_layout){.nibbles = 1, .plane2 = 1};
    case ES_GGML_Q2_K:
        return (level_layout){.pairs = 1};
    case ES_GGML_Q3_K:
        return (level_layout){.pairs = 1, .plane1 = 1};
    case ES_GGML_Q8_0:
        return (level_layout){.bytes = 1};
    default: /* Q4_0 Q4_1 Q4_K IQ4_NL MXFP4 */
        return (level_layout){.nibbles = 1};
    }
}

static size_t level_bytes(level_layout has)
{
    return (size_t)(256 * has.nibbles + 128 * has.pairs + 128 * has.plane2 + 64 * has.plane1 +
                    512 * has.bytes);
}

/* Two bits of byte b of a section laid out like pairs. */
static int32_t pair_at(const uint8_t *section, int32_t d, int32_t b)
{
    return section[64 * (d / 4) + b] >> 2 * (d % 4) & 3;
}

/* The level of output o, input k of the group at `group`. */
static int32_t level_at(level_layout has, const uint8_t *group, int32_t o, int32_t k)
{
    int32_t d = k / 4;
    int32_t b = 4 * o + k % 4;
    if (has.bytes) {
        return group[64 * d + b];
    }
    int32_t level = 0;
    int32_t bits = 0;
    if (has.nibbles) {
        level = group[64 * (d / 2) + b] >> 4 * (d % 2) & 15;
        bits = 4;
        group += 256;
    } else {
        level = pair_at(group, d, b);
        bits = 2;
        group += 128;
    }
    if (has.plane2) {
        level |= pair_at(group, d, b) << bits;
    }
    if (has.plane1) {
        level |= (group[b] >> d & 1) << bits;
    }
    return level;
}

static const int8_t code_iq4nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
static const int8_t code_mxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* What a level stands for: level - zero, or its code. */
static int32_t weight_of(int32_t type, int32_t level)
{
    switch (type) {
    case ES_GGML_Q3_K:
        return level - 4;
    case ES_GGML_Q4_0:
        return level - 8;
    case ES_GGML_Q5_0:
        return level - 16;
    case ES_GGML_Q6_K:
        return level - 32;
    case ES_GGML_Q8_0:
        return level - 128;
    case ES_GGML_IQ4_NL:
        return code_iq4nl[level];
    case ES_GGML_MXFP4:
        return code_mxfp4[level];
    default:
        return level;
    }
}

static float half_at(const uint8_t *halves, int32_t index)
{
    uint16_t half;
    memcpy(&half, halves + 2 * index, sizeof half);
    return es_half_to_float(half);
}

/* Scales of output o in group g; `scales` is the tile's second part. */
typedef struct group_scale {
    float d[2]; /* of the halves of the group, equal where the group has one scale */
    float m[2]; /* added (Q4_1 Q5_1) or subtracted (Q2_K Q4_K Q5_K); 0: none */
} group_scale;

static group_scale scale_of(int32_t type, const uint8_t *scales, int32_t g, int32_t o)
{
    group_scale s = {{0.0f, 0.0f}, {0.0f, 0.0f}};
    const uint8_t *super; /* two-level: superblock g / 8 */
    switch (type) {
    case ES_GGML_MXFP4:
        s.d[0] = s.d[1] = ldexpf(1.0f, scales[16 * g + o] - 128);
        break;
    case ES_GGML_Q4_1:
    case ES_GGML_Q5_1:
        s.d[0] = s.d[1] = half_at(scales + 64 * g, o);
        s.m[0] = s.m[1] = half_at(scales + 64 * g + 32, o);
        break;
    case ES_GGML_Q4_K:
    case ES_GGML_Q5_K:
        super = scales + 320 * (g / 8);
        s.d[0] = s.d[1] = half_at(super, o) * (float)super[64 + 32 * (g % 8) + o];
        s.m[0] = s.m[1] = half_at(super + 32, o) * (float)super[64 + 32 * (g % 8) + 16 + o];
        break;
    case ES_GGML_Q3_K:
    case ES_GGML_Q6_K:
        super = scales + 288 * (g / 8);
        for (int h = 0; h < 2; h++) {
            s.d[h] = half_at(super, o) * (float)(int8_t)super[32 + 32 * (g % 8) + 16 * h + o];
        }
        break;
    case ES_GGML_Q2_K:
        super = scales + 320 * (g / 8);
        for (int h = 0; h < 2; h++) {
            uint8_t both = super[64 + 32 * (g % 8) + 16 * h + o];
            s.d[h] = half_at(super, o) * (float)(both & 15);
            s.m[h] = half_at(super + 32, o) * (float)(both >> 4);
        }
        break;
    default: /* Q4_0 Q5_0 Q8_0 IQ4_NL */
        s.d[0] = s.d[1] = half_at(scales + 32 * g, o);
        break;
    }
    return s;
}

/* ---- linear layers ------------------------------------------------------------------------ */

static int32_t dot(const int32_t *weight, const int8_t *q, int32_t n)
{
    int32_t sum = 0;
    for (int32_t i = 0; i < n; i++) {
        sum += weight[i] * q[i];
    }
    return sum;
}

/* One output, one row, one group: y after the group. */
static float add_group(int32_t type, const int32_t *weight, group_scale s, const es_rows *x,
                       int32_t r, int32_t g, float y)
{
    size_t group = (size_t)r * (size_t)(x->k / ES_GROUP) + (size_t)g;
    const int8_t *q = x->q + ES_GROUP * group;
    float scale = x->scale[group];
    switch (type) {
    case ES_GGML_Q4_1:
    case ES_GGML_Q5_1:
        y = fmaf((float)dot(weight, q, 32), s.d[0] * scale, y);
        return fmaf(s.m[0], x->sum32[group], y);
    case ES_GGML_Q4_K:
    case ES_GGML_Q5_K:
        y = fmaf((float)dot(weight, q, 32), s.d[0] * scale, y);
        return fmaf(-s.m[0], x->sum32[group], y);
    case ES_GGML_Q3_K:
    case ES_GGML_Q6_K:
        y = fmaf((float)dot(weight, q, 16), s.d[0] * scale, y);
        return fmaf((float)dot(weight + 16, q + 16, 16), s.d[1] * scale, y);
    case ES_GGML_Q2_K:
        for (int h = 0; h < 2; h++) {
            y = fmaf((float)dot(weight + 16 * h, q + 16 * h, 16), s.d[h] * scale, y);
            y = fmaf(-s.m[h], x->sum[2 * group + (size_t)h], y);
        }
        return y;
    default: /* Q4_0 Q5_0 Q8_0 IQ4_NL MXFP4 */
        return fmaf((float)dot(weight, q, 32), s.d[0] * scale, y);
    }
}

static void tile_integers(const es_tensor *w, const uint8_t *tile, const es_rows *x, int32_t r0,
                          int32_t n, float *y, size_t ld)
{
    int32_t groups = w->cols / ES_GROUP;
    level_layout has = layout_of(w->type);
    const uint8_t *scales = tile + level_bytes(has) * (size_t)groups;
    for (int32_t o = 0; o < ES_TILE; o++) {
        for (int32_t r = 0; r < n; r++) {
            y[(size_t)r * ld + (size_t)o] = 0.0f;
        }
        for (int32_t g = 0; g < groups; g++) {
            int32_t weight[ES_GROUP];
            for (int32_t k = 0; k < ES_GROUP; k++) {
                int32_t level = level_at(has, tile + level_bytes(has) * (size_t)g, o, k);
                weight[k] = weight_of(w->type, level);
            }
            group_scale s = scale_of(w->type, scales, g, o);
            for (int32_t r = 0; r < n; r++) {
                float *out = &y[(size_t)r * ld + (size_t)o];
                *out = add_group(w->type, weight, s, x, r0 + r, g, *out);
            }
        }
    }
}

static float float_at(int32_t type, const uint8_t *tile, size_t index)
{
    if (type == ES_GGML_F32) {
        float value;
        memcpy(&value, tile + 4 * index, sizeof value);
        return value;
    }
    uint16_t half;
    memcpy(&half, tile + 2 * index, sizeof half);
    if (type == ES_GGML_F16) {
        return es_half_to_float(half);
    }
    uint32_t bits = (uint32_t)half << 16; /* BF16 */
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void tile_floats(const es_tensor *w, const uint8_t *tile, const es_rows *x, int32_t r0,
                        int32_t n, float *y, size_t ld)
{
    size_t cols = (size_t)w->cols;
    for (size_t r = 0; r < (size_t)n; r++) {
        const float *row = x->x + ((size_t)r0 + r) * cols;
        for (size_t o = 0; o < ES_TILE; o++) {
            float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (size_t k = 0; k < cols; k++) {
                acc[k % 4] = fmaf(float_at(w->type, tile, ES_TILE * k + o), row[k], acc[k % 4]);
            }
            y[r * ld + o] = (acc[0] + acc[1]) + (acc[2] + acc[3]);
        }
    }
}

void es_generic_gemm(const es_tensor *w, int32_t t0, int32_t t1, const es_rows *x, int32_t r0,
                     int32_t n, float *y, size_t ld)
{
    int is_float = w->type == ES_GGML_F32 || w->type == ES_GGML_F16 || w->type == ES_GGML_BF16;
    for (int32_t t = t0; t < t1; t++) {
        const uint8_t *tile = w->data + (size_t)t * w->tile_bytes;
        float *out = y + (size_t)(t - t0) * ES_TILE;
        (is_float ? tile_floats : tile_integers)(w, tile, x, r0, n, out, ld);
    }
}

/* ---- quantisation -------------------------------------------------------------------------- */

/* n values to int8, q[i * stride] each; returns the scale. */
static float quantize_values(const float *x, size_t n, int8_t *q, size_t stride)
{
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits &= 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    float a;
    memcpy(&a, &largest, sizeof a);
    int is_finite = largest < 0x7F800000u;
    float r = is_finite && a > 0x1p-120f ? 127.0f / a : 0.0f;
    for (size_t i = 0; i < n; i++) {
        q[i * stride] = is_finite ? (int8_t)rintf(x[i] * r) : 0;
    }
    return is_finite ? a / 127.0f : NAN;
}

void es_generic_quantize(const es_rows *rows, int32_t r, int32_t g0, int32_t g1)
{
    for (int32_t g = g0; g < g1; g++) {
        size_t group = (size_t)r * (size_t)(rows->k / ES_GROUP) + (size_t)g;
        int8_t *q = rows->q + ES_GROUP * group;
        float scale = quantize_values(rows->x + ES_GROUP * group, ES_GROUP, q, 1);
        int32_t *isum = rows->isum + 2 * group;
        isum[0] = isum[1] = 0;
        for (int32_t i = 0; i < ES_GROUP; i++) {
            isum[i / 16] += q[i];
        }
        rows->scale[group] = scale;
        rows->sum[2 * group] = scale * (float)isum[0];
        rows->sum[2 * group + 1] = scale * (float)isum[1];
        rows->isum32[group] = isum[0] + isum[1];
        rows->sum32[group] = scale * (float)rows->isum32[group];
    }
}

/* ---- rows of floats ------------------------------------------------------------------------ */

static float reduce(float lane[16])
{
    for (int32_t step = 8; step > 0; step /= 2) {
        for (int32_t l = 0; l < step; l++) {
            lane[l] += lane[l + step];
        }
    }
    return lane[0];
}

void es_generic_rms_norm(const float *x, const float *w, int32_t n, float eps, float *out)
{
    float lane[16] = {0.0f};
    for (int32_t i = 0; i < n; i++) {
        lane[i % 16] = fmaf(x[i], x[i], lane[i % 16]);
    }
    float s = 1.0f / sqrtf(reduce(lane) / (float)n + eps);
    for (int32_t i = 0; i < n; i++) {
        out[i] = (x[i] * s) * w[i];
    }
}

void es_generic_rope(float *x, const float *cos, const float *sin, int32_t n, int32_t interleaved)
{
    for (int32_t p = 0; p < n / 2; p++) {
        float *first = interleaved ? &x[2 * p] : &x[p];
        float *second = interleaved ? &x[2 * p + 1] : &x[p + n / 2];
        float x0 = *first;
        float x1 = *second;
        *first = fmaf(-x1, sin[p], x0 * cos[p]);
        *second = fmaf(x0, sin[p], x1 * cos[p]);
    }
}

void es_generic_swiglu(const float *gate, const float *up, int32_t n, float *out)
{
    for (int32_t i = 0; i < n; i++) {
        out[i] = es_siluf(gate[i]) * up[i];
    }
}

void es_generic_geglu(const float *gate, const float *up, int32_t n, float *out)
{
    for (int32_t i = 0; i < n; i++) {
        out[i] = es_geluf(gate[i]) * up[i];
    }
}

void es_generic_add(float *y, const float *x, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        y[i] += x[i];
    }
}

void es_generic_scale(float *y, const float *x, float s, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        y[i] = x[i] * s;
    }
}

/* ---- attention ----------------------------------------------------------------------------- */

/* Where component i of the key in a slot lives. */
static size_t key_index(int32_t head_dim, int32_t slot, int32_t i)
{
    return ((size_t)(slot / 16) * (size_t)head_dim + (size_t)i) * 16 + (size_t)(slot % 16);
}

static float kept_at(es_kv_format format, const void *memory, size_t index)
{
    return format == ES_KV_FORMAT_INT8 ? (float)((const int8_t *)memory)[index]
                                       : es_half_to_float(((const uint16_t *)memory)[index]);
}

void es_generic_attn_scores(es_kv_format format, const void *keys, const float *key_scale,
                            int32_t head_dim, int32_t slot, int32_t count, const float *const *q,
                            int32_t m, float *score, size_t ld)
{
    for (int32_t j = 0; j < m; j++) {
        for (int32_t c = 0; c < count; c++) {
            float s = 0.0f;
            for (int32_t i = 0; i < head_dim; i++) {
                s = fmaf(q[j][i], kept_at(format, keys, key_index(head_dim, slot + c, i)), s);
            }
            if (format == ES_KV_FORMAT_INT8) {
                s *= key_scale[slot + c];
            }
            score[(size_t)j * ld + (size_t)c] = s;
        }
    }
}

float es_generic_attn_softmax(float *score, int32_t count, float softcap, int32_t has_sink,
                              float sink)
{
    float m = has_sink ? sink : -INFINITY;
    for (int32_t c = 0; c < count; c++) {
        if (softcap > 0.0f) {
            score[c] = softcap * es_tanhf(score[c] / softcap);
        }
        m = score[c] > m ? score[c] : m;
    }
    float lane[16] = {0.0f};
    for (int32_t c = 0; c < count; c++) {
        score[c] = es_expf(score[c] - m);
        lane[c % 16] += score[c];
    }
    float sum = reduce(lane);
    return has_sink ? sum + es_expf(sink - m) : sum;
}

void es_generic_attn_mix(es_kv_format format, const void *values, const float *value_scale,
                         int32_t head_dim, int32_t slot, int32_t count, const float *weight,
                         size_t ld, int32_t m, float *const *out)
{
    for (int32_t j = 0; j < m; j++) {
        for (int32_t c = 0; c < count; c++) {
            float factor = weight[(size_t)j * ld + (size_t)c];
            if (format == ES_KV_FORMAT_INT8) {
                factor *= value_scale[slot + c];
            }
            for (int32_t i = 0; i < head_dim; i++) {
                size_t index = (size_t)(slot + c) * (size_t)head_dim + (size_t)i;
                out[j][i] = fmaf(factor, kept_at(format, values, index), out[j][i]);
            }
        }
    }
}

/* n values to memory[first], memory[first + stride], ... of one slot. */
static void store(es_kv_format format, void *memory, float *scale, size_t first, size_t stride,
                  size_t n, const float *x)
{
    if (format == ES_KV_FORMAT_INT8) {
        *scale = quantize_values(x, n, (int8_t *)memory + first, stride);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        ((uint16_t *)memory)[first + i * stride] = es_float_to_half(x[i]);
    }
}

void es_generic_kv_store_key(es_kv_format format, void *keys, float *key_scale, int32_t head_dim,
                             int32_t slot, const float *x)
{
    float *scale = format == ES_KV_FORMAT_INT8 ? &key_scale[slot] : NULL;
    store(format, keys, scale, key_index(head_dim, slot, 0), 16, (size_t)head_dim, x);
}

void es_generic_kv_store_value(es_kv_format format, void *values, float *value_scale,
                               int32_t head_dim, int32_t slot, const float *x)
{
    float *scale = format == ES_KV_FORMAT_INT8 ? &value_scale[slot] : NULL;
    store(format, values, scale, (size_t)slot * (size_t)head_dim, 1, (size_t)head_dim, x);
}

const es_kernels es_kernels_generic = {
    .name = "generic",
    .gemm = es_generic_gemm,
    .quantize = es_generic_quantize,
    .rms_norm = es_generic_rms_norm,
    .rope = es_generic_rope,
    .swiglu = es_generic_swiglu,
    .geglu = es_generic_geglu,
    .add = es_generic_add,
    .scale = es_generic_scale,
    .attn_scores = es_generic_attn_scores,
    .attn_softmax = es_generic_attn_softmax,
    .attn_mix = es_generic_attn_mix,
    .kv_store_key = es_generic_kv_store_key,
    .kv_store_value = es_generic_kv_store_value,
};
