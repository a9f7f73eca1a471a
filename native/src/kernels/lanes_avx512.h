/* lanes_avx512.h - sixteen float lanes in one register: the whole vocabulary of vector.inc. Every
   lanes_<isa>.h has exactly these names with exactly these meanings:

     v16                       16 floats
     V16_VECTORS               query vectors that share a load of keys or values (at most 8), and
     V16_BESIDE(m)             how many such loads m vectors take side by side (at most 4), so that
                               m * V16_BESIDE(m) sums and what they read stay in registers
     load, store               unaligned. _n: the first n (0..16) only; the rest of memory is
                               neither read nor written, and loads as 0
     from_half, to_half        16 fp16 <-> lanes, to nearest even; from_half_n, to_half_n
     from_i8, from_i8_n        16 int8 -> lanes
     to_i8                     rounds to nearest even (values in [-127, 127]), stores 16 int8 and
                               returns their sum; to_i8_n the first n
     load_pairs, store_pairs   32 floats x0 y0 x1 y1 ... <-> lanes x and lanes y
     set1, first               all lanes; lanes from n on become 0
     add sub mul div, fma      fma(a, b, c) = a * b + c and fnma(a, b, c) = c - a * b, one rounding
     min, max                  a < b ? a : b and a > b ? a : b: b where they are not ordered
     less                      a < b ? yes : no
     neg abs copysign          on the sign bit
     pow2                      bits (bits of x + 127) << 23: the end of es_expf
     sum                       lane l += lane l + 8, + 4, + 2, + 1
     largest                   of lanes without NaN
     max_bits, largest_bits    |x| compared as bit patterns, so that infinity and NaN win */
#ifndef ES_LANES_AVX512_H
#define ES_LANES_AVX512_H

#include <immintrin.h>
#include <stdint.h>

typedef __m512 v16;

#define V16_VECTORS 8
#define V16_BESIDE(m) (24 / (m) < 4 ? 24 / (m) : 4)

static inline __mmask16 v16_mask(int32_t n)
{
    return (__mmask16)((1u << n) - 1u);
}

static inline v16 v16_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

static inline v16 v16_load_n(const float *p, int32_t n)
{
    return _mm512_maskz_loadu_ps(v16_mask(n), p);
}

static inline void v16_store(float *p, v16 x)
{
    _mm512_storeu_ps(p, x);
}

static inline void v16_store_n(float *p, v16 x, int32_t n)
{
    _mm512_mask_storeu_ps(p, v16_mask(n), x);
}

static inline v16 v16_from_half(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

static inline v16 v16_from_half_n(const uint16_t *p, int32_t n)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(v16_mask(n), p));
}

static inline __m256i v16_halves(v16 x)
{
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline void v16_to_half(uint16_t *p, v16 x)
{
    _mm256_storeu_si256((__m256i *)p, v16_halves(x));
}

static inline void v16_to_half_n(uint16_t *p, v16 x, int32_t n)
{
    _mm256_mask_storeu_epi16(p, v16_mask(n), v16_halves(x));
}

static inline v16 v16_from_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

static inline v16 v16_from_i8_n(const int8_t *p, int32_t n)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(v16_mask(n), p)));
}

/* Sum of 16 int8: unsigned ones, 128 more each, are what there is an instruction for. */
static inline int32_t v16_sum_i8(__m128i q)
{
    __m128i biased = _mm_xor_si128(q, _mm_set1_epi8(-128));
    __m128i two = _mm_sad_epu8(biased, _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_unpackhi_epi64(two, two))) - 16 * 128;
}

static inline int32_t v16_to_i8(int8_t *p, v16 x)
{
    __m128i q = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x));
    _mm_storeu_si128((__m128i *)p, q);
    return v16_sum_i8(q);
}

static inline int32_t v16_to_i8_n(int8_t *p, v16 x, int32_t n)
{
    __m128i q = _mm512_cvtepi32_epi8(_mm512_maskz_cvtps_epi32(v16_mask(n), x));
    _mm_mask_storeu_epi8(p, v16_mask(n), q);
    return v16_sum_i8(q);
}

static inline void v16_load_pairs(const float *p, v16 *x, v16 *y)
{
    __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    v16 low = v16_load(p), high = v16_load(p + 16);
    *x = _mm512_permutex2var_ps(low, even, high);
    *y = _mm512_permutex2var_ps(low, odd, high);
}

static inline void v16_store_pairs(float *p, v16 x, v16 y)
{
    __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    v16_store(p, _mm512_permutex2var_ps(x, low, y));
    v16_store(p + 16, _mm512_permutex2var_ps(x, high, y));
}

static inline v16 v16_set1(float x)
{
    return _mm512_set1_ps(x);
}

static inline v16 v16_first(v16 x, int32_t n)
{
    return _mm512_maskz_mov_ps(v16_mask(n), x);
}

static inline v16 v16_add(v16 a, v16 b)
{
    return _mm512_add_ps(a, b);
}

static inline v16 v16_sub(v16 a, v16 b)
{
    return _mm512_sub_ps(a, b);
}

static inline v16 v16_mul(v16 a, v16 b)
{
    return _mm512_mul_ps(a, b);
}

static inline v16 v16_div(v16 a, v16 b)
{
    return _mm512_div_ps(a, b);
}

static inline v16 v16_fma(v16 a, v16 b, v16 c)
{
    return _mm512_fmadd_ps(a, b, c);
}

static inline v16 v16_fnma(v16 a, v16 b, v16 c)
{
    return _mm512_fnmadd_ps(a, b, c);
}

static inline v16 v16_min(v16 a, v16 b)
{
    return _mm512_min_ps(a, b);
}

static inline v16 v16_max(v16 a, v16 b)
{
    return _mm512_max_ps(a, b);
}

static inline v16 v16_less(v16 a, v16 b, v16 yes, v16 no)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}

static inline v16 v16_neg(v16 x)
{
    return _mm512_xor_ps(x, _mm512_set1_ps(-0.0f));
}

static inline v16 v16_abs(v16 x)
{
    return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x);
}

static inline v16 v16_copysign(v16 magnitude, v16 sign)
{
    return _mm512_or_ps(v16_abs(magnitude), _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}

static inline v16 v16_pow2(v16 x)
{
    __m512i bits = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}

static inline float v16_sum(v16 x)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline float v16_largest(v16 x)
{
    return _mm512_reduce_max_ps(x);
}

static inline v16 v16_max_bits(v16 a, v16 b)
{
    __m512i x = _mm512_castps_si512(v16_abs(a)), y = _mm512_castps_si512(v16_abs(b));
    return _mm512_castsi512_ps(_mm512_max_epi32(x, y));
}

static inline uint32_t v16_largest_bits(v16 x)
{
    return (uint32_t)_mm512_reduce_max_epi32(_mm512_castps_si512(v16_abs(x)));
}

#endif
