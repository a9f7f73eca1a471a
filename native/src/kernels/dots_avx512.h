/* dots_avx512.h - integer dot products and the few float operations gemm.inc is written over. Every
   dots_<isa>.h has these names with these meanings; a vector carries DOT_LANES of the 16 outputs
   of a tile, in order, each with four bytes (one dword of a level vector) or one number.

     DOT_ROWS, DOT_FLOAT_ROWS   most rows taken through a tile at once: integer, float tensors
     DOT_SIGNED_BYTES           1: 8-bit levels are multiplied as int8 (their stored byte xor 0x80),
                                0: as uint8, and the zero point comes off the sum
     load, and, or, xor         bytes
     shl, shr                   by a constant, in 16-bit units: mask the bits that crossed a byte
     lookup                     table[level] for levels 0..15 in every byte; 16 bytes of table
     rows                       sum[r] = level * q over dwords [d0, d1) of a group, for m rows
                                `stride` apart; levels are at most `largest` (255: 8-bit)
     less                       sum - (*count << shift)
     to_float                   int32 -> float
     half, u8, i8, power        scales from memory: fp16, uint8 (u8_low, u8_high: its nibbles),
                                int8, MXFP4's exponent 2^(e - 128)
     float, bfloat              weights from memory: fp32, bf16
     set1 add mul fma neg       floats; store */
#ifndef ES_DOTS_AVX512_H
#define ES_DOTS_AVX512_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "inlining.h"

enum { DOT_LANES = 16, DOT_ROWS = 8, DOT_FLOAT_ROWS = 6 };
#define DOT_SIGNED_BYTES 0

typedef __m512i dint;
typedef __m512 dflt;

ES_INLINE dint dot_load(const uint8_t *p)
{
    return _mm512_load_si512((const void *)p);
}

ES_INLINE dint dot_set1_u8(int32_t value)
{
    return _mm512_set1_epi8((char)value);
}

ES_INLINE dint dot_and(dint a, dint b)
{
    return _mm512_and_si512(a, b);
}

ES_INLINE dint dot_or(dint a, dint b)
{
    return _mm512_or_si512(a, b);
}

ES_INLINE dint dot_xor(dint a, dint b)
{
    return _mm512_xor_si512(a, b);
}

ES_INLINE dint dot_shl(dint a, int32_t n)
{
    return _mm512_slli_epi16(a, (unsigned)n);
}

ES_INLINE dint dot_shr(dint a, int32_t n)
{
    return _mm512_srli_epi16(a, (unsigned)n);
}

ES_INLINE dint dot_lookup(const int8_t *table, dint levels)
{
    __m128i codes = _mm_loadu_si128((const __m128i *)table);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(codes), levels);
}

/* The rows go side by side: eight chains hide the latency of one. */
ES_INLINE void dot_rows(const dint *levels, int32_t d0, int32_t d1, int32_t largest,
                         const int8_t *q, size_t stride, int32_t m, dint *sum)
{
    (void)largest;
#pragma GCC unroll 8
    for (int32_t r = 0; r < m; r++) {
        sum[r] = _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int32_t d = d0; d < d1; d++) {
#pragma GCC unroll 8
        for (int32_t r = 0; r < m; r++) {
            int32_t four;
            memcpy(&four, q + (size_t)r * stride + 4 * d, sizeof four);
            sum[r] = _mm512_dpbusd_epi32(sum[r], levels[d], _mm512_set1_epi32(four));
        }
    }
}

ES_INLINE dint dot_less(dint sum, const int32_t *count, int32_t shift)
{
    return _mm512_sub_epi32(sum, _mm512_slli_epi32(_mm512_set1_epi32(*count), (unsigned)shift));
}

ES_INLINE dflt dot_to_float(dint a)
{
    return _mm512_cvtepi32_ps(a);
}

ES_INLINE dflt dot_half(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

ES_INLINE dflt dot_u8(const uint8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* The low and the high nibbles of uint8. */
ES_INLINE dflt dot_u8_low(const uint8_t *p)
{
    __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15)));
}

ES_INLINE dflt dot_u8_high(const uint8_t *p)
{
    __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4));
}

ES_INLINE dflt dot_i8(const uint8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* e = 0 and 1 are denormal: 2^-128 is bits 0x00200000. */
ES_INLINE dflt dot_power(const uint8_t *p)
{
    __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000),
                                      _mm512_min_epi32(e, _mm512_set1_epi32(1)));
    return _mm512_castsi512_ps(_mm512_max_epi32(normal, small));
}

/* Float weights: fp32, fp16, bf16. */
ES_INLINE dflt dot_float(const uint8_t *p)
{
    return _mm512_load_ps((const void *)p);
}

ES_INLINE dflt dot_bfloat(const uint8_t *p)
{
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

ES_INLINE dflt dot_set1(float x)
{
    return _mm512_set1_ps(x);
}

ES_INLINE dflt dot_add(dflt a, dflt b)
{
    return _mm512_add_ps(a, b);
}

ES_INLINE dflt dot_mul(dflt a, dflt b)
{
    return _mm512_mul_ps(a, b);
}

ES_INLINE dflt dot_fma(dflt a, dflt b, dflt c)
{
    return _mm512_fmadd_ps(a, b, c);
}

ES_INLINE dflt dot_neg(dflt a)
{
    return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f));
}

ES_INLINE void dot_store(float *p, dflt a)
{
    _mm512_storeu_ps(p, a);
}

#endif
