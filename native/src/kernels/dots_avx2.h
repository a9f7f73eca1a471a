/* dots_avx2.h - the vocabulary of dots_avx512.h in halves of a tile, for AVX2 with and without VNNI.
   Without it products of bytes add up in int16, which is exact as long as levels are small or the
   larger factor is signed away first. */
#ifndef ES_DOTS_AVX2_H
#define ES_DOTS_AVX2_H

#include "inlining.h"
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { DOT_LANES = 8, DOT_ROWS = 8, DOT_FLOAT_ROWS = 2 };
#if defined(__AVXVNNI__)
#define DOT_SIGNED_BYTES 0
#else
#define DOT_SIGNED_BYTES 1
#endif

typedef __m256i dint;
typedef __m256 dflt;

ES_INLINE dint dot_load(const uint8_t *p)
{
    return _mm256_load_si256((const __m256i *)p);
}

ES_INLINE dint dot_set1_u8(int32_t value)
{
    return _mm256_set1_epi8((char)value);
}

ES_INLINE dint dot_and(dint a, dint b)
{
    return _mm256_and_si256(a, b);
}

ES_INLINE dint dot_or(dint a, dint b)
{
    return _mm256_or_si256(a, b);
}

ES_INLINE dint dot_xor(dint a, dint b)
{
    return _mm256_xor_si256(a, b);
}

ES_INLINE dint dot_shl(dint a, int32_t n)
{
    return _mm256_slli_epi16(a, n);
}

ES_INLINE dint dot_shr(dint a, int32_t n)
{
    return _mm256_srli_epi16(a, n);
}

ES_INLINE dint dot_lookup(const int8_t *table, dint levels)
{
    __m128i codes = _mm_loadu_si128((const __m128i *)table);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(codes), levels);
}

ES_INLINE __m256i dot_four(const int8_t *q)
{
    int32_t four;
    memcpy(&four, q, sizeof four);
    return _mm256_set1_epi32(four);
}

#if defined(__AVXVNNI__)

ES_INLINE dint dot_row(const dint *levels, int32_t d0, int32_t d1, int32_t largest, const int8_t *q)
{
    (void)largest;
    __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int32_t d = d0; d < d1; d++) {
        sum = _mm256_dpbusd_avx_epi32(sum, levels[d], dot_four(q + 4 * d));
    }
    return sum;
}

#else

ES_INLINE dint dot_row(const dint *levels, int32_t d0, int32_t d1, int32_t largest, const int8_t *q)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum = _mm256_setzero_si256();
    if (largest == 255) {
        /* |w| <= 128 as uint8, q in [-127, 127] with the sign of w: two products fit int16. */
#pragma GCC unroll 8
        for (int32_t d = d0; d < d1; d++) {
            __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(levels[d]),
                                                 _mm256_sign_epi8(dot_four(q + 4 * d), levels[d]));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
        return sum;
    }
    /* So many dwords fit int16: 32767 / (2 * 127 * largest), as a power of two. */
    const int32_t fit = largest <= 15 ? 8 : largest <= 31 ? 4 : 2;
    __m256i pairs = sum;
#pragma GCC unroll 8
    for (int32_t d = d0; d < d1; d++) {
        __m256i product = _mm256_maddubs_epi16(levels[d], dot_four(q + 4 * d));
        pairs = (d - d0) % fit == 0 ? product : _mm256_add_epi16(pairs, product);
        if ((d - d0) % fit == fit - 1 || d == d1 - 1) {
            __m256i wide = _mm256_madd_epi16(pairs, ones);
            sum = d - d0 < fit ? wide : _mm256_add_epi32(sum, wide);
        }
    }
    return sum;
}

#endif

ES_INLINE void dot_rows(const dint *levels, int32_t d0, int32_t d1, int32_t largest,
                         const int8_t *q, size_t stride, int32_t m, dint *sum)
{
#pragma GCC unroll 8
    for (int32_t r = 0; r < m; r++) {
        sum[r] = dot_row(levels, d0, d1, largest, q + (size_t)r * stride);
    }
}

ES_INLINE dint dot_less(dint sum, const int32_t *count, int32_t shift)
{
    return _mm256_sub_epi32(sum, _mm256_slli_epi32(_mm256_set1_epi32(*count), shift));
}

ES_INLINE dflt dot_to_float(dint a)
{
    return _mm256_cvtepi32_ps(a);
}

ES_INLINE dflt dot_half(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

ES_INLINE __m256i dot_bytes(const uint8_t *p)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}

ES_INLINE dflt dot_u8(const uint8_t *p)
{
    return _mm256_cvtepi32_ps(dot_bytes(p));
}

ES_INLINE dflt dot_u8_low(const uint8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_and_si256(dot_bytes(p), _mm256_set1_epi32(15)));
}

ES_INLINE dflt dot_u8_high(const uint8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(dot_bytes(p), 4));
}

ES_INLINE dflt dot_i8(const uint8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

ES_INLINE dflt dot_power(const uint8_t *p)
{
    __m256i e = dot_bytes(p);
    __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000),
                                      _mm256_min_epi32(e, _mm256_set1_epi32(1)));
    return _mm256_castsi256_ps(_mm256_max_epi32(normal, small));
}

ES_INLINE dflt dot_float(const uint8_t *p)
{
    return _mm256_load_ps((const void *)p);
}

ES_INLINE dflt dot_bfloat(const uint8_t *p)
{
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

ES_INLINE dflt dot_set1(float x)
{
    return _mm256_set1_ps(x);
}

ES_INLINE dflt dot_add(dflt a, dflt b)
{
    return _mm256_add_ps(a, b);
}

ES_INLINE dflt dot_mul(dflt a, dflt b)
{
    return _mm256_mul_ps(a, b);
}

ES_INLINE dflt dot_fma(dflt a, dflt b, dflt c)
{
    return _mm256_fmadd_ps(a, b, c);
}

ES_INLINE dflt dot_neg(dflt a)
{
    return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f));
}

ES_INLINE void dot_store(float *p, dflt a)
{
    _mm256_storeu_ps(p, a);
}

#endif
