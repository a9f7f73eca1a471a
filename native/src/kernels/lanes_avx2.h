/* lanes_avx2.h - sixteen float lanes in two registers; lanes_avx512.h says what each name means. */
#ifndef ES_LANES_AVX2_H
#define ES_LANES_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef struct v16 {
    __m256 lo, hi;
} v16;

#define V16_VECTORS 6
#define V16_BESIDE(m) ((m) < 3 ? 4 - (m) : 1)

/* One operation on both halves. */
#define V16_BOTH(lo_half, hi_half) ((v16){(lo_half), (hi_half)})

static inline v16 v16_load(const float *p)
{
    return V16_BOTH(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8));
}

static inline void v16_store(float *p, v16 x)
{
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}

static inline v16 v16_load_n(const float *p, int32_t n)
{
    float all[16] = {0.0f};
    memcpy(all, p, (size_t)n * sizeof *p);
    return v16_load(all);
}

static inline void v16_store_n(float *p, v16 x, int32_t n)
{
    float all[16];
    v16_store(all, x);
    memcpy(p, all, (size_t)n * sizeof *p);
}

static inline v16 v16_from_half(const uint16_t *p)
{
    return V16_BOTH(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                    _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}

static inline v16 v16_from_half_n(const uint16_t *p, int32_t n)
{
    uint16_t all[16] = {0};
    memcpy(all, p, (size_t)n * sizeof *p);
    return v16_from_half(all);
}

static inline void v16_to_half(uint16_t *p, v16 x)
{
    enum { nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.lo, nearest));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.hi, nearest));
}

static inline void v16_to_half_n(uint16_t *p, v16 x, int32_t n)
{
    uint16_t all[16];
    v16_to_half(all, x);
    memcpy(p, all, (size_t)n * sizeof *p);
}

static inline v16 v16_from_i8(const int8_t *p)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    __m256i lo = _mm256_cvtepi8_epi32(bytes);
    __m256i hi = _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes));
    return V16_BOTH(_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi));
}

static inline v16 v16_from_i8_n(const int8_t *p, int32_t n)
{
    int8_t all[16] = {0};
    memcpy(all, p, (size_t)n);
    return v16_from_i8(all);
}

static inline int32_t v16_to_i8(int8_t *p, v16 x)
{
    __m256i lo = _mm256_cvtps_epi32(x.lo), hi = _mm256_cvtps_epi32(x.hi);
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xD8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words),
                                    _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)p, bytes);
    /* 128 more each: unsigned bytes are what there is an instruction for. */
    __m128i biased = _mm_xor_si128(bytes, _mm_set1_epi8(-128));
    __m128i two = _mm_sad_epu8(biased, _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_unpackhi_epi64(two, two))) - 16 * 128;
}

static inline v16 v16_first(v16 x, int32_t n)
{
    float all[16];
    v16_store(all, x);
    return v16_load_n(all, n);
}

static inline int32_t v16_to_i8_n(int8_t *p, v16 x, int32_t n)
{
    int8_t all[16];
    int32_t sum = v16_to_i8(all, v16_first(x, n));
    memcpy(p, all, (size_t)n);
    return sum;
}

/* Two registers x0 y0 .. x7 y7 to x and y, and back. */
static inline void v16_load_pairs_8(const float *p, __m256 *x, __m256 *y)
{
    __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8);
    __m256 low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
    *x = _mm256_shuffle_ps(low, high, 0x88);
    *y = _mm256_shuffle_ps(low, high, 0xDD);
}

static inline void v16_store_pairs_8(float *p, __m256 x, __m256 y)
{
    __m256 a = _mm256_unpacklo_ps(x, y), b = _mm256_unpackhi_ps(x, y);
    _mm256_storeu_ps(p, _mm256_permute2f128_ps(a, b, 0x20));
    _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(a, b, 0x31));
}

static inline void v16_load_pairs(const float *p, v16 *x, v16 *y)
{
    v16_load_pairs_8(p, &x->lo, &y->lo);
    v16_load_pairs_8(p + 16, &x->hi, &y->hi);
}

static inline void v16_store_pairs(float *p, v16 x, v16 y)
{
    v16_store_pairs_8(p, x.lo, y.lo);
    v16_store_pairs_8(p + 16, x.hi, y.hi);
}

static inline v16 v16_set1(float x)
{
    return V16_BOTH(_mm256_set1_ps(x), _mm256_set1_ps(x));
}

static inline v16 v16_add(v16 a, v16 b)
{
    return V16_BOTH(_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi));
}

static inline v16 v16_sub(v16 a, v16 b)
{
    return V16_BOTH(_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi));
}

static inline v16 v16_mul(v16 a, v16 b)
{
    return V16_BOTH(_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi));
}

static inline v16 v16_div(v16 a, v16 b)
{
    return V16_BOTH(_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi));
}

static inline v16 v16_fma(v16 a, v16 b, v16 c)
{
    return V16_BOTH(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}

static inline v16 v16_fnma(v16 a, v16 b, v16 c)
{
    return V16_BOTH(_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi));
}

static inline v16 v16_min(v16 a, v16 b)
{
    return V16_BOTH(_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi));
}

static inline v16 v16_max(v16 a, v16 b)
{
    return V16_BOTH(_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi));
}

static inline v16 v16_less(v16 a, v16 b, v16 yes, v16 no)
{
    return V16_BOTH(_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
                    _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)));
}

static inline v16 v16_neg(v16 x)
{
    __m256 sign = _mm256_set1_ps(-0.0f);
    return V16_BOTH(_mm256_xor_ps(x.lo, sign), _mm256_xor_ps(x.hi, sign));
}

static inline v16 v16_abs(v16 x)
{
    __m256 sign = _mm256_set1_ps(-0.0f);
    return V16_BOTH(_mm256_andnot_ps(sign, x.lo), _mm256_andnot_ps(sign, x.hi));
}

static inline v16 v16_copysign(v16 magnitude, v16 sign)
{
    __m256 mask = _mm256_set1_ps(-0.0f);
    v16 a = v16_abs(magnitude);
    return V16_BOTH(_mm256_or_ps(a.lo, _mm256_and_ps(sign.lo, mask)),
                    _mm256_or_ps(a.hi, _mm256_and_ps(sign.hi, mask)));
}

static inline __m256 v16_pow2_8(__m256 x)
{
    __m256i bits = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}

static inline v16 v16_pow2(v16 x)
{
    return V16_BOTH(v16_pow2_8(x.lo), v16_pow2_8(x.hi));
}

static inline float v16_sum(v16 x)
{
    __m256 eight = _mm256_add_ps(x.lo, x.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline float v16_largest(v16 x)
{
    __m256 eight = _mm256_max_ps(x.lo, x.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

static inline __m256i v16_magnitude_8(__m256 x)
{
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
}

static inline v16 v16_max_bits(v16 a, v16 b)
{
    __m256i lo = _mm256_max_epi32(v16_magnitude_8(a.lo), v16_magnitude_8(b.lo));
    __m256i hi = _mm256_max_epi32(v16_magnitude_8(a.hi), v16_magnitude_8(b.hi));
    return V16_BOTH(_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi));
}

static inline uint32_t v16_largest_bits(v16 x)
{
    __m256i eight = _mm256_max_epi32(v16_magnitude_8(x.lo), v16_magnitude_8(x.hi));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight),
                                 _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}

#endif
