/*
 * fmath.h - exp, log, sin and tanh of the core's own, so that a token does not depend on whose
 * libm runs.
 *
 * Plain arithmetic in a fixed order, inline so that loops over rows vectorise. Errors are a few
 * units in the last place (tested against libm). The float functions spell out every fused
 * multiply-add: vector.inc repeats them lane by lane and must arrive at the same bits.
 */
#ifndef ES_FMATH_H
#define ES_FMATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ES_LN2_HIGH 0x1.62e42feep-1          /* 32 bits of ln 2: times a small integer is exact */
#define ES_LN2_LOW 0x1.a39ef35793c76p-33     /* the rest */

static inline double es_from_bits(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint64_t es_to_bits(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* e^x for x in [-700, 0]; smaller x count as -700 (1e-304, nothing beside a term of 1). */
static inline double es_exp(double x)
{
    x = x > -700.0 ? x : -700.0;
    /* Adding 1.5 * 2^52 leaves round(x / ln 2) in the low bits: no conversion instruction. */
    double shifted = x * 0x1.71547652b82fep0 + 0x1.8p52;
    double k = shifted - 0x1.8p52;
    double r = (x - k * ES_LN2_HIGH) - k * ES_LN2_LOW; /* |r| <= ln 2 / 2 */
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return p * es_from_bits((es_to_bits(shifted) + 1023) << 52);
}

/* Natural logarithm of a positive normal number. */
static inline double es_log(double x)
{
    uint64_t bits = es_to_bits(x);
    /* m in [sqrt(1/2), sqrt(2)), x = m * 2^k */
    uint64_t from_half_root = bits - UINT64_C(0x3FE6A09E667F3BCD);
    int64_t k = (int64_t)from_half_root >> 52;
    double m = es_from_bits(bits - ((uint64_t)k << 52));
    double s = (m - 1.0) / (m + 1.0); /* log m = 2 atanh s, |s| <= 0.1716 */
    double z = s * s;
    double p = 2.0 / 23.0;
    p = p * z + 2.0 / 21.0;
    p = p * z + 2.0 / 19.0;
    p = p * z + 2.0 / 17.0;
    p = p * z + 2.0 / 15.0;
    p = p * z + 2.0 / 13.0;
    p = p * z + 2.0 / 11.0;
    p = p * z + 2.0 / 9.0;
    p = p * z + 2.0 / 7.0;
    p = p * z + 2.0 / 5.0;
    p = p * z + 2.0 / 3.0;
    return (double)k * ES_LN2_HIGH + (2.0 * s + (s * z * p + (double)k * ES_LN2_LOW));
}

/* Sine and cosine of 0 <= x < 2^50. */
static inline void es_sincos(double x, double *sin_x, double *cos_x)
{
    double k = (x * 0x1.45f306dc9c883p-1 + 0x1.8p52) - 0x1.8p52; /* quarter turns */
    double r = fma(-k, 0x1.1a62633145c07p-54, fma(-k, 0x1.921fb54442d18p0, x));
    double z = r * r; /* |r| <= pi / 4 */
    double s = 1.0 / 355687428096000.0;
    s = s * z - 1.0 / 1307674368000.0;
    s = s * z + 1.0 / 6227020800.0;
    s = s * z - 1.0 / 39916800.0;
    s = s * z + 1.0 / 362880.0;
    s = s * z - 1.0 / 5040.0;
    s = s * z + 1.0 / 120.0;
    s = s * z - 1.0 / 6.0;
    s = r + r * z * s;
    double c = 1.0 / 20922789888000.0;
    c = c * z - 1.0 / 87178291200.0;
    c = c * z + 1.0 / 479001600.0;
    c = c * z - 1.0 / 3628800.0;
    c = c * z + 1.0 / 40320.0;
    c = c * z - 1.0 / 720.0;
    c = c * z + 1.0 / 24.0;
    c = c * z - 0.5;
    c = c * z + 1.0;
    int32_t quarter = (int32_t)((int64_t)k & 3);
    *sin_x = quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c;
    *cos_x = quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s;
}

/* ---- floats ------------------------------------------------------------------------------ */

/* Coefficients: minimax fits of (e^r - 1 - r) / r^2 on |r| <= ln 2 / 2, and of
   (tanh x / x - 1) / x^2 in x^2 on |x| <= 0.625. Highest power first. */
#define ES_EXPF_MIN -87.0f
#define ES_EXPF_MAX 88.0f
#define ES_EXPF_LOG2E 0x1.715476p0f
#define ES_EXPF_ROUND 0x1.8p23f             /* leaves round(x / ln 2) in the low bits */
#define ES_EXPF_LN2_HIGH 0x1.62e400p-1f     /* 15 bits of ln 2 */
#define ES_EXPF_LN2_LOW 0x1.7f7d1cp-20f     /* the rest */
#define ES_EXPF_C6 0x1.6a1a74p-10f
#define ES_EXPF_C5 0x1.123fc6p-7f
#define ES_EXPF_C4 0x1.555916p-5f
#define ES_EXPF_C3 0x1.55548ap-3f
#define ES_EXPF_C2 0x1.fffffcp-2f
#define ES_TANHF_SMALL 0.625f
#define ES_TANHF_C11 -0x1.76b3cep-8f
#define ES_TANHF_C9 0x1.5258cap-6f
#define ES_TANHF_C7 -0x1.b844a2p-5f
#define ES_TANHF_C5 0x1.11076cp-3f
#define ES_TANHF_C3 -0x1.555534p-2f
#define ES_GELUF_1 -0x1.988454p0f           /* -2 sqrt(2 / pi) */
#define ES_GELUF_3 -0x1.2444f2p-4f          /* 0.044715 times that */

/* e^x; x outside [-87, 88] counts as the nearer end, NaN stays NaN. */
static inline float es_expf(float x)
{
    x = ES_EXPF_MIN > x ? ES_EXPF_MIN : x;
    x = ES_EXPF_MAX < x ? ES_EXPF_MAX : x;
    float shifted = fmaf(x, ES_EXPF_LOG2E, ES_EXPF_ROUND);
    float k = shifted - ES_EXPF_ROUND;
    float r = fmaf(-k, ES_EXPF_LN2_HIGH, x);
    r = fmaf(-k, ES_EXPF_LN2_LOW, r);
    float p = ES_EXPF_C6;
    p = fmaf(p, r, ES_EXPF_C5);
    p = fmaf(p, r, ES_EXPF_C4);
    p = fmaf(p, r, ES_EXPF_C3);
    p = fmaf(p, r, ES_EXPF_C2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23; /* 2^k */
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline float es_tanhf(float x)
{
    float a = fabsf(x);
    float z = a * a;
    float p = ES_TANHF_C11;
    p = fmaf(p, z, ES_TANHF_C9);
    p = fmaf(p, z, ES_TANHF_C7);
    p = fmaf(p, z, ES_TANHF_C5);
    p = fmaf(p, z, ES_TANHF_C3);
    float small = fmaf(p * z, a, a);
    float large = 1.0f - 2.0f / (es_expf(a + a) + 1.0f);
    return copysignf(a < ES_TANHF_SMALL ? small : large, x);
}

/* x / (1 + e^-x) */
static inline float es_siluf(float x)
{
    return x / (1.0f + es_expf(-x));
}

/* The tanh form of GELU: x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3). */
static inline float es_geluf(float x)
{
    float u = x * fmaf(x * x, ES_GELUF_3, ES_GELUF_1);
    return x / (1.0f + es_expf(u));
}

#endif
