/* blocks.c - ggml's block formats, one value after the other. Written for reading: packing and the
   kernels are checked against it. Every product and sum rounds on its own, as in ggml. */
#include "blocks.h"

#include <string.h>

#include "gguf.h"
#include "kernels/kernels.h" /* es_half_to_float */
#include "pack.h"            /* the code books */

static const struct {
    const char *name;
    int16_t n_values, n_bytes;
    int16_t is_read;          /* es_block_floats knows it */
} types[] = {
    [ES_GGML_F32] = {"F32", 1, 4, 1},
    [ES_GGML_F16] = {"F16", 1, 2, 1},
    [ES_GGML_Q4_0] = {"Q4_0", 32, 18, 1},
    [ES_GGML_Q4_1] = {"Q4_1", 32, 20, 1},
    [ES_GGML_Q5_0] = {"Q5_0", 32, 22, 1},
    [ES_GGML_Q5_1] = {"Q5_1", 32, 24, 1},
    [ES_GGML_Q8_0] = {"Q8_0", 32, 34, 1},
    [9] = {"Q8_1", 32, 40, 0},
    [ES_GGML_Q2_K] = {"Q2_K", 256, 84, 1},
    [ES_GGML_Q3_K] = {"Q3_K", 256, 110, 1},
    [ES_GGML_Q4_K] = {"Q4_K", 256, 144, 1},
    [ES_GGML_Q5_K] = {"Q5_K", 256, 176, 1},
    [ES_GGML_Q6_K] = {"Q6_K", 256, 210, 1},
    [15] = {"Q8_K", 256, 292, 0},
    [16] = {"IQ2_XXS", 256, 66, 0},
    [17] = {"IQ2_XS", 256, 74, 0},
    [18] = {"IQ3_XXS", 256, 98, 0},
    [19] = {"IQ1_S", 256, 50, 0},
    [ES_GGML_IQ4_NL] = {"IQ4_NL", 32, 18, 1},
    [21] = {"IQ3_S", 256, 110, 0},
    [22] = {"IQ2_S", 256, 82, 0},
    [23] = {"IQ4_XS", 256, 136, 0},
    [ES_GGML_I8] = {"I8", 1, 1, 0},
    [25] = {"I16", 1, 2, 0},
    [ES_GGML_I32] = {"I32", 1, 4, 0},
    [ES_GGML_I64] = {"I64", 1, 8, 0},
    [28] = {"F64", 1, 8, 0},
    [29] = {"IQ1_M", 256, 56, 0},
    [ES_GGML_BF16] = {"BF16", 1, 2, 1},
    [34] = {"TQ1_0", 256, 54, 0},
    [35] = {"TQ2_0", 256, 66, 0},
    [ES_GGML_MXFP4] = {"MXFP4", 32, 17, 1},
    [40] = {"NVFP4", 64, 36, 0},
    [41] = {"Q1_0", 128, 18, 0},
};

enum { N_TYPES = (int)(sizeof(types) / sizeof(types[0])) };

const int8_t es_code_iq4nl[16] = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
};
const int8_t es_code_mxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

int es_ggml_type_shape(int32_t ggml_type, int32_t *n_values, int32_t *n_bytes)
{
    if (es_ggml_type_name(ggml_type) == NULL) {
        return 0;
    }
    *n_values = types[ggml_type].n_values;
    *n_bytes = types[ggml_type].n_bytes;
    return 1;
}

int es_block_shape(int32_t ggml_type, int32_t *n_values, int32_t *n_bytes)
{
    return es_ggml_type_shape(ggml_type, n_values, n_bytes) && types[ggml_type].is_read;
}

const char *es_ggml_type_name(int32_t ggml_type)
{
    return ggml_type >= 0 && ggml_type < N_TYPES ? types[ggml_type].name : NULL;
}

/* ---- scales ------------------------------------------------------------------------------- */

static uint16_t bits_at(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static float half_at(const uint8_t *p)
{
    return es_half_to_float(bits_at(p));
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

float es_mxfp4_scale(uint8_t e)
{
    /* The two smallest are denormal. */
    return float_of(e < 2 ? UINT32_C(0x00200000) << e : (uint32_t)(e - 1) << 23);
}

/* Scale and offset j = 0..7 of Q4_K and Q5_K: six bits each in 12 bytes. */
static void scale_min_k4(const uint8_t *s, int32_t j, int32_t *scale, int32_t *min)
{
    if (j < 4) {
        *scale = s[j] & 63;
        *min = s[j + 4] & 63;
    } else {
        *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        *min = s[j + 4] >> 4 | (s[j] >> 6) << 4;
    }
}

/* Scale j = 0..15 of Q3_K: four low bits in the first 8 bytes, two high ones in the last 4. */
static int32_t scale_k3(const uint8_t *s, int32_t j)
{
    int32_t low = s[j & 7] >> (j < 8 ? 0 : 4) & 15;
    return (low | (s[8 + (j & 3)] >> 2 * (j >> 2) & 3) << 4) - 32;
}

/* ---- blocks of 32 ------------------------------------------------------------------------- */

/* Input k of 32: the first half in low nibbles, the second in high ones. */
static int32_t nibble(const uint8_t *p, int32_t k)
{
    return k < 16 ? p[k] & 15 : p[k - 16] >> 4;
}

static void block_32(int32_t type, const uint8_t *b, float *out)
{
    float d = type == ES_GGML_MXFP4 ? es_mxfp4_scale(b[0]) : half_at(b);
    for (int32_t k = 0; k < 32; k++) {
        switch (type) {
        case ES_GGML_Q4_0:
            out[k] = d * (float)(nibble(b + 2, k) - 8);
            break;
        case ES_GGML_Q4_1:
            out[k] = d * (float)nibble(b + 4, k) + half_at(b + 2);
            break;
        case ES_GGML_Q5_0:
            out[k] = d * (float)((nibble(b + 6, k) | (b[2 + k / 8] >> k % 8 & 1) << 4) - 16);
            break;
        case ES_GGML_Q5_1:
            out[k] = d * (float)(nibble(b + 8, k) | (b[4 + k / 8] >> k % 8 & 1) << 4) +
                     half_at(b + 2);
            break;
        case ES_GGML_Q8_0:
            out[k] = d * (float)(int8_t)b[2 + k];
            break;
        case ES_GGML_IQ4_NL:
            out[k] = d * (float)es_code_iq4nl[nibble(b + 2, k)];
            break;
        default:
            out[k] = d * (float)es_code_mxfp4[nibble(b + 1, k)];
        }
    }
}

/* ---- blocks of 256 ------------------------------------------------------------------------ */

static void block_q2_k(const uint8_t *b, float *out)
{
    const uint8_t *scales = b, *q = b + 16;
    float d = half_at(b + 80), dmin = half_at(b + 82);
    for (int32_t k = 0; k < 256; k++) {
        int32_t level = q[k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3;
        float scale = d * (float)(scales[k / 16] & 15), min = dmin * (float)(scales[k / 16] >> 4);
        out[k] = scale * (float)level - min;
    }
}

static void block_q3_k(const uint8_t *b, float *out)
{
    const uint8_t *high = b, *q = b + 32, *scales = b + 96;
    float d = half_at(b + 108);
    for (int32_t k = 0; k < 256; k++) {
        int32_t level = q[k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3;
        level |= (high[k % 32] >> k / 32 & 1) << 2;
        out[k] = d * (float)scale_k3(scales, k / 16) * (float)(level - 4);
    }
}

static void block_q4_k(const uint8_t *b, const uint8_t *high, const uint8_t *q, float *out)
{
    float d = half_at(b), dmin = half_at(b + 2);
    for (int32_t k = 0; k < 256; k++) {
        int32_t scale, min, j = k / 32;
        scale_min_k4(b + 4, j, &scale, &min);
        int32_t level = q[k / 64 * 32 + k % 32] >> 4 * (j & 1) & 15;
        if (high != NULL) {
            level |= (high[k % 32] >> j & 1) << 4;
        }
        out[k] = d * (float)scale * (float)level - dmin * (float)min;
    }
}

static void block_q6_k(const uint8_t *b, float *out)
{
    const uint8_t *low = b, *high = b + 128, *scales = b + 192;
    float d = half_at(b + 208);
    for (int32_t k = 0; k < 256; k++) {
        int32_t half = k / 128, j = k % 128;
        int32_t level = low[half * 64 + j % 64] >> j / 64 * 4 & 15;
        level |= (high[half * 32 + j % 32] >> j / 32 * 2 & 3) << 4;
        out[k] = d * (float)(int8_t)scales[k / 16] * (float)(level - 32);
    }
}

/* ------------------------------------------------------------------------------------------- */

static void block_floats(int32_t type, const uint8_t *b, float *out)
{
    switch (type) {
    case ES_GGML_F32:
        *out = float_of((uint32_t)bits_at(b) | (uint32_t)bits_at(b + 2) << 16);
        break;
    case ES_GGML_F16:
        *out = half_at(b);
        break;
    case ES_GGML_BF16:
        *out = float_of((uint32_t)bits_at(b) << 16);
        break;
    case ES_GGML_Q2_K:
        block_q2_k(b, out);
        break;
    case ES_GGML_Q3_K:
        block_q3_k(b, out);
        break;
    case ES_GGML_Q4_K:
        block_q4_k(b, NULL, b + 16, out);
        break;
    case ES_GGML_Q5_K:
        block_q4_k(b, b + 16, b + 48, out);
        break;
    case ES_GGML_Q6_K:
        block_q6_k(b, out);
        break;
    default:
        block_32(type, b, out);
    }
}

void es_block_floats(int32_t ggml_type, const uint8_t *blocks, size_t n, float *out)
{
    int32_t n_values, n_bytes;
    if (!es_block_shape(ggml_type, &n_values, &n_bytes)) {
        return;
    }
    for (size_t i = 0; i < n / (size_t)n_values; i++) {
        block_floats(ggml_type, blocks + i * (size_t)n_bytes, out + i * (size_t)n_values);
    }
}
