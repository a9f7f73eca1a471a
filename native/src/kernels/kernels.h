/* kernels.h - the contract of the arithmetic. One table per instruction set; every variant returns
   the SAME BITS as plain C (generic.c): integer sums are exact, and each float operation below is
   written out with its order and its fused multiply-adds. So a row's result is a function of its
   own inputs alone: not of the rows beside it, the number of threads, or the processor.

   fma(a, b, c) is one rounding everywhere. "16 lanes" means: partial results l = index % 16, each
   accumulated in ascending index, then reduced lane l += lane l + 8, + 4, + 2, + 1 (a tree).
   Denormals are kept (default MXCSR / FPCR) on every thread: es_fp_enter / es_fp_leave. A NaN is a
   NaN: its sign and payload are nobody's business. */
#ifndef ES_KERNELS_H
#define ES_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "edgespec.h"
#include "pack.h"

/* Inputs of one linear layer, n rows of k values. x is read by float tensors, the rest by integer
   ones (k % 32 == 0, G = k / 32). Quantisation of group g of a row:
     a = max |x| over the group as bit patterns, so that NaN and infinity win
     a not finite: scale = NaN, q = 0
     scale = a / 127;  r = a > 2^-120 ? 127 / a : 0 (so that r is finite);
     q = round to nearest even of x * r, in [-127, 127]
     isum[h] = sum of q over inputs 16h .. 16h + 15;  sum[h] = scale * (float)isum[h]
     isum32 = isum[0] + isum[1];  sum32 = scale * (float)isum32 */
typedef struct es_rows {
    int32_t n, k;
    float *x;          /* (n, k) */
    int8_t *q;         /* (n, k) */
    float *scale;      /* (n, G) */
    float *sum;        /* (n, G, 2) */
    float *sum32;      /* (n, G) */
    int32_t *isum;     /* (n, G, 2) */
    int32_t *isum32;   /* (n, G) */
} es_rows;

/* How K and V rows are kept: kvcache.h says where. */
typedef enum es_kv_format { ES_KV_FORMAT_F16 = 0, ES_KV_FORMAT_INT8 = 1 } es_kv_format;

typedef struct es_kernels {
    const char *name;   /* "generic", "avx2", "avxvnni", "avx512vnni", "neon_dotprod", "neon_i8mm" */

    /* y[(r - r0) * ld + (o - 16 * t0)] for rows r0 <= r < r0 + n of x and outputs o of tiles
       [t0, t1): all 16 outputs of each tile are written, the padding ones too.
       Integer tensors, per output, y = 0 then for g = 0 .. G - 1 (p = exact int32 products' sum over
       the group, over half h where the scale has one per 16):
         one-level, zero     y = fma((float)sum((level - zero) * q), d * scale, y)
         Q4_1 Q5_1           y = fma((float)sum(level * q), d * scale, y); y = fma(m, sum32, y)
         IQ4_NL MXFP4        y = fma((float)sum(code * q), d * scale, y)
         Q4_K Q5_K           y = fma((float)sum(level * q), (d * sc) * scale, y);
                             y = fma(-(dmin * m), sum32, y)
         Q6_K Q3_K           h = 0, 1: y = fma((float)sum_h((level - zero) * q), (d * sc_h) * scale, y)
         Q2_K                h = 0, 1: y = fma((float)sum_h(level * q), (d * sc_h) * scale, y);
                             y = fma(-(dmin * m_h), sum[h], y)
       Float tensors: acc[j] over k = j (mod 4), acc[j] = fma(w, x, acc[j]), k ascending;
         y = (acc[0] + acc[1]) + (acc[2] + acc[3]). */
    void (*gemm)(const es_tensor *w, int32_t t0, int32_t t1, const es_rows *x, int32_t r0,
                 int32_t n, float *y, size_t ld);

    /* Groups [g0, g1) of row r of rows->x to q, scale, sum, sum32, isum, isum32. */
    void (*quantize)(const es_rows *rows, int32_t r, int32_t g0, int32_t g1);

    /* out[i] = (x[i] * s) * w[i], s = 1 / sqrtf(ss / n + eps), ss = 16 lanes of fma(x, x, lane).
       out may be x. */
    void (*rms_norm)(const float *x, const float *w, int32_t n, float eps, float *out);

    /* Pairs (p, p + n/2), or (2p, 2p + 1) when interleaved, p < n / 2:
       y0 = fma(-x1, sin[p], x0 * cos[p]); y1 = fma(x0, sin[p], x1 * cos[p]). In place. Values past
       the n rotated ones stay. */
    void (*rope)(float *x, const float *cos, const float *sin, int32_t n, int32_t interleaved);

    /* out[i] = silu(gate[i]) * up[i], silu(g) = g / (1 + es_expf(-g)). out may be gate. */
    void (*swiglu)(const float *gate, const float *up, int32_t n, float *out);
    /* out[i] = gelu(gate[i]) * up[i]; gelu(g) = g / (1 + es_expf(-2 u)), the tanh form:
       u = 0.7978845608 * (g + 0.044715 * g * g * g), written out as es_geluf in fmath.h. */
    void (*geglu)(const float *gate, const float *up, int32_t n, float *out);

    /* y[i] += x[i]; y[i] = x[i] * s. */
    void (*add)(float *y, const float *x, int32_t n);
    void (*scale)(float *y, const float *x, float s, int32_t n);

    /* ---- attention, one KV head of one layer; kvcache.h has the memory --------------------- */

    /* Scores of m query vectors against `count` consecutive slots from `slot` on.
       score[j * ld + c] = s with s = 0, then s = fma(q[j][i], key[slot + c][i], s), i ascending;
       int8 keys: s over (float)key int8, then s * key_scale[slot + c]. */
    void (*attn_scores)(es_kv_format format, const void *keys, const float *key_scale,
                        int32_t head_dim, int32_t slot, int32_t count, const float *const *q,
                        int32_t m, float *score, size_t ld);

    /* In place over count scores in logical position order; returns the sum of the weights.
       softcap > 0: s = softcap * es_tanhf(s / softcap) first. m = max(all s, sink where has_sink);
       s = es_expf(s - m); sum = 16 lanes; with a sink, sum + es_expf(sink - m) last.
       A NaN among the scores makes the sum NaN; the weights are then anything. */
    float (*attn_softmax)(float *score, int32_t count, float softcap, int32_t has_sink, float sink);

    /* out[j][i] = fma(weight[j * ld + c], value[slot + c][i], out[j][i]), c ascending, for m
       vectors; int8 values: weight * value_scale[slot + c] is the factor. */
    void (*attn_mix)(es_kv_format format, const void *values, const float *value_scale,
                     int32_t head_dim, int32_t slot, int32_t count, const float *weight, size_t ld,
                     int32_t m, float *const *out);

    /* One row's K or V of one head into its slot, rounded to nearest even (fp16), or
       int8: scale and q as in quantize, over the head_dim values; scale array entry `slot` is set. */
    void (*kv_store_key)(es_kv_format format, void *keys, float *key_scale, int32_t head_dim,
                         int32_t slot, const float *x);
    void (*kv_store_value)(es_kv_format format, void *values, float *value_scale,
                           int32_t head_dim, int32_t slot, const float *x);
} es_kernels;

/* Tables compiled into this library; NULL past the end. Not all run on this processor. */
const es_kernels *es_kernels_at(int32_t index);
/* name NULL or "": EDGESPEC_CPU, else the best this processor runs. ES_ERR_ARGUMENT for a name
   that is unknown or that this processor lacks; the message lists what there is. */
es_status es_kernels_choose(const char *name, const es_kernels **out);

/* The calling thread's float mode: default rounding, denormals kept. leave restores. */
uint64_t es_fp_enter(void);
void es_fp_leave(uint64_t saved);

/* fp16 <-> fp32 in plain C, round to nearest even; NaN stays NaN. */
float es_half_to_float(uint16_t half);
uint16_t es_float_to_half(float value);

#endif
