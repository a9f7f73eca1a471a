/* dots_neon.h - integer dot products of NEON, four outputs of a tile in a register; dots_avx512.h
   says what each name means. With i8mm two rows are multiplied at a time. */
#ifndef ES_DOTS_NEON_H
#define ES_DOTS_NEON_H

#include "inlining.h"
#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { DOT_LANES = 4, DOT_ROWS = 8, DOT_FLOAT_ROWS = 6 };
#define DOT_SIGNED_BYTES 1

typedef int32x4_t dint;
typedef float32x4_t dflt;

ES_INLINE dint dot_load(const uint8_t *p)
{
    return vreinterpretq_s32_u8(vld1q_u8(p));
}

ES_INLINE dint dot_set1_u8(int32_t value)
{
    return vreinterpretq_s32_u8(vdupq_n_u8((uint8_t)value));
}

ES_INLINE dint dot_and(dint a, dint b)
{
    return vandq_s32(a, b);
}

ES_INLINE dint dot_or(dint a, dint b)
{
    return vorrq_s32(a, b);
}

ES_INLINE dint dot_xor(dint a, dint b)
{
    return veorq_s32(a, b);
}

/* Shifts as operators: the _n_ intrinsics want a literal, these fold to the same instruction. */
ES_INLINE dint dot_shl(dint a, int32_t n)
{
    return vreinterpretq_s32_u16(vreinterpretq_u16_s32(a) << vdupq_n_u16((uint16_t)n));
}

ES_INLINE dint dot_shr(dint a, int32_t n)
{
    return vreinterpretq_s32_u16(vreinterpretq_u16_s32(a) >> vdupq_n_u16((uint16_t)n));
}

ES_INLINE dint dot_lookup(const int8_t *table, dint levels)
{
    return vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s32(levels)));
}

/* sum + level * q of one row over dwords [d0, d1). */
ES_INLINE dint dot_row(const dint *levels, int32_t d0, int32_t d1, const int8_t *q)
{
    dint sum = vdupq_n_s32(0);
#define STEP(d)                                                                                   \
    if (d0 <= (d) && (d) < d1) {                                                                  \
        sum = vdotq_laneq_s32(sum, vreinterpretq_s8_s32(levels[d]), vld1q_s8(q + 16 * ((d) / 4)), \
                              (d) % 4);                                                           \
    }
    STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
#undef STEP
    return sum;
}

ES_INLINE void dot_rows(const dint *levels, int32_t d0, int32_t d1, int32_t largest,
                         const int8_t *q, size_t stride, int32_t m, dint *sum)
{
    (void)largest;
    int32_t r = 0;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    /* Eight inputs of an output side by side, then four products at once: outputs o, o + 1 of
       rows r, r + 1. */
    if (m >= 2) {
        int8x16_t low[4], high[4];
#pragma GCC unroll 4
        for (int32_t d = d0; d < d1; d += 2) {
            low[d / 2] = vreinterpretq_s8_s32(vzip1q_s32(levels[d], levels[d + 1]));
            high[d / 2] = vreinterpretq_s8_s32(vzip2q_s32(levels[d], levels[d + 1]));
        }
#pragma GCC unroll 4
        for (; r + 2 <= m; r += 2) {
            const int8_t *first = q + (size_t)r * stride;
            dint a = vdupq_n_s32(0), b = a;
#pragma GCC unroll 4
            for (int32_t d = d0; d < d1; d += 2) {
                int8x16_t two = vcombine_s8(vld1_s8(first + 4 * d), vld1_s8(first + stride + 4 * d));
                a = vmmlaq_s32(a, low[d / 2], two);
                b = vmmlaq_s32(b, high[d / 2], two);
            }
            sum[r] = vuzp1q_s32(a, b);
            sum[r + 1] = vuzp2q_s32(a, b);
        }
    }
#endif
#pragma GCC unroll 8
    for (; r < m; r++) {
        sum[r] = dot_row(levels, d0, d1, q + (size_t)r * stride);
    }
}

ES_INLINE dint dot_less(dint sum, const int32_t *count, int32_t shift)
{
    return vsubq_s32(sum, vdupq_n_s32(*count * (1 << shift)));
}

ES_INLINE dflt dot_to_float(dint a)
{
    return vcvtq_f32_s32(a);
}

ES_INLINE dflt dot_half(const uint8_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}

/* Four bytes in the low half of a register. */
ES_INLINE uint8x8_t dot_four(const uint8_t *p)
{
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vcreate_u8(four);
}

ES_INLINE uint32x4_t dot_wide(uint8x8_t bytes)
{
    return vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
}

ES_INLINE dflt dot_u8(const uint8_t *p)
{
    return vcvtq_f32_u32(dot_wide(dot_four(p)));
}

ES_INLINE dflt dot_u8_low(const uint8_t *p)
{
    return vcvtq_f32_u32(dot_wide(vand_u8(dot_four(p), vdup_n_u8(15))));
}

ES_INLINE dflt dot_u8_high(const uint8_t *p)
{
    return vcvtq_f32_u32(dot_wide(vshr_n_u8(dot_four(p), 4)));
}

ES_INLINE dflt dot_i8(const uint8_t *p)
{
    int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(dot_four(p)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}

/* e = 0 and 1 are denormal: 2^-128 is bits 0x00200000. */
ES_INLINE dflt dot_power(const uint8_t *p)
{
    uint32x4_t e = dot_wide(dot_four(p));
    uint32x4_t normal = vshlq_n_u32(vqsubq_u32(e, vdupq_n_u32(1)), 23);
    uint32x4_t small = vdupq_n_u32(0x00200000) << vminq_u32(e, vdupq_n_u32(1));
    return vreinterpretq_f32_u32(vmaxq_u32(normal, small));
}

ES_INLINE dflt dot_float(const uint8_t *p)
{
    return vreinterpretq_f32_u8(vld1q_u8(p));
}

ES_INLINE dflt dot_bfloat(const uint8_t *p)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}

ES_INLINE dflt dot_set1(float x)
{
    return vdupq_n_f32(x);
}

ES_INLINE dflt dot_add(dflt a, dflt b)
{
    return vaddq_f32(a, b);
}

ES_INLINE dflt dot_mul(dflt a, dflt b)
{
    return vmulq_f32(a, b);
}

ES_INLINE dflt dot_fma(dflt a, dflt b, dflt c)
{
    return vfmaq_f32(c, a, b);
}

ES_INLINE dflt dot_neg(dflt a)
{
    return vnegq_f32(a);
}

ES_INLINE void dot_store(float *p, dflt a)
{
    vst1q_f32(p, a);
}

#endif
