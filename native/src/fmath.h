/*
 * fmath.h - exp and log of the core's own, so that a token does not depend on whose libm runs.
 *
 * Plain arithmetic in a fixed order, inline so that loops over rows vectorise. Errors are a few
 * units in the last place (tested against libm).
 */
#ifndef ES_FMATH_H
#define ES_FMATH_H

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

#endif
