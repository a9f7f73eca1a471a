/* quantize_avx512.h - activations to int8, two groups at a time: the largest values of both, their
   scales, the bytes and all their sums without leaving the vector registers. Comes behind
   vector.inc, whose vec_quantize does what is left. */
#ifndef ES_QUANTIZE_AVX512_H
#define ES_QUANTIZE_AVX512_H

#include <immintrin.h>
#include <stdint.h>

#include "kernels.h"

/* Largest of 16 non-negative int32 in every lane of a 128-bit result. */
static inline __m128i largest_lane(__m512i x)
{
    __m256i eight = _mm256_max_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
}

static inline __m512i scaled(__m512 x, __m128 inverse, int32_t lane)
{
    __m128 one = lane == 0 ? inverse : _mm_movehdup_ps(inverse);
    return _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_broadcastss_ps(one)));
}

static void quantize(const es_rows *rows, int32_t r, int32_t g0, int32_t g1)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    const __m512i in_order =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i quarters = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128 most = _mm_set1_ps(127.0f);
    size_t first = (size_t)r * (size_t)(rows->k / ES_GROUP);
    int32_t g = g0;
    for (; g + 2 <= g1; g += 2) {
        size_t group = first + (size_t)g;
        const float *x = rows->x + ES_GROUP * group;
        __m512 v[4];
        __m512i bits[4];
        for (int32_t i = 0; i < 4; i++) {
            v[i] = _mm512_loadu_ps(x + 16 * i);
            bits[i] = _mm512_and_si512(_mm512_castps_si512(v[i]), magnitude);
        }
        __m128i a = _mm_unpacklo_epi32(largest_lane(_mm512_max_epi32(bits[0], bits[1])),
                                       largest_lane(_mm512_max_epi32(bits[2], bits[3])));
        if (_mm_movemask_ps(_mm_castsi128_ps(_mm_cmpgt_epi32(a, _mm_set1_epi32(0x7F7FFFFF))))) {
            vec_quantize(rows, r, g, g + 2); /* NaN or infinity */
            continue;
        }
        __m128 largest = _mm_castsi128_ps(a);
        __m128 scale = _mm_div_ps(largest, most);
        __m128 inverse = _mm_and_ps(_mm_div_ps(most, largest),
                                    _mm_cmpgt_ps(largest, _mm_set1_ps(0x1p-120f)));
        __m512i low = _mm512_packs_epi32(scaled(v[0], inverse, 0), scaled(v[1], inverse, 0));
        __m512i high = _mm512_packs_epi32(scaled(v[2], inverse, 1), scaled(v[3], inverse, 1));
        __m512i q = _mm512_permutexvar_epi32(in_order, _mm512_packs_epi16(low, high));
        _mm512_storeu_si512(rows->q + ES_GROUP * group, q);

        /* Four bytes, then sixteen: one sum for each half of a group. */
        __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), q);
        sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, (_MM_PERM_ENUM)0xB1));
        sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, (_MM_PERM_ENUM)0x4E));
        __m128i isum = _mm512_castsi512_si128(_mm512_permutexvar_epi32(quarters, sums));
        __m128i isum32 = _mm_hadd_epi32(isum, isum);
        _mm_storel_pi((__m64 *)(rows->scale + group), scale);
        _mm_storeu_si128((__m128i *)(rows->isum + 2 * group), isum);
        _mm_storeu_ps(rows->sum + 2 * group,
                      _mm_mul_ps(_mm_unpacklo_ps(scale, scale), _mm_cvtepi32_ps(isum)));
        _mm_storel_epi64((__m128i *)(rows->isum32 + group), isum32);
        _mm_storel_pi((__m64 *)(rows->sum32 + group), _mm_mul_ps(scale, _mm_cvtepi32_ps(isum32)));
    }
    if (g < g1) {
        vec_quantize(rows, r, g, g1);
    }
}

#endif
