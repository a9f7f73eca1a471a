/* lanes_neon.h - sixteen float lanes in four registers; lanes_avx512.h says what each name means. */
#ifndef ES_LANES_NEON_H
#define ES_LANES_NEON_H

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

typedef struct v16 {
    float32x4_t part[4];
} v16;

#define V16_VECTORS 5
#define V16_BESIDE(m) ((m) < 3 ? 4 - (m) : 1)

/* One operation on every part, `i` its number. */
#define V16_EACH(expression)            \
    v16 each;                           \
    for (int i = 0; i < 4; i++) {       \
        each.part[i] = (expression);    \
    }                                   \
    return each

static inline v16 v16_load(const float *p)
{
    V16_EACH(vld1q_f32(p + 4 * i));
}

static inline void v16_store(float *p, v16 x)
{
    vst1q_f32(p, x.part[0]);
    vst1q_f32(p + 4, x.part[1]);
    vst1q_f32(p + 8, x.part[2]);
    vst1q_f32(p + 12, x.part[3]);
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
    V16_EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}

static inline v16 v16_from_half_n(const uint16_t *p, int32_t n)
{
    uint16_t all[16] = {0};
    memcpy(all, p, (size_t)n * sizeof *p);
    return v16_from_half(all);
}

static inline void v16_to_half(uint16_t *p, v16 x)
{
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x.part[0])));
    vst1_u16(p + 4, vreinterpret_u16_f16(vcvt_f16_f32(x.part[1])));
    vst1_u16(p + 8, vreinterpret_u16_f16(vcvt_f16_f32(x.part[2])));
    vst1_u16(p + 12, vreinterpret_u16_f16(vcvt_f16_f32(x.part[3])));
}

static inline void v16_to_half_n(uint16_t *p, v16 x, int32_t n)
{
    uint16_t all[16];
    v16_to_half(all, x);
    memcpy(p, all, (size_t)n * sizeof *p);
}

static inline v16 v16_from_i8(const int8_t *p)
{
    int8x16_t bytes = vld1q_s8(p);
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return (v16){{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
                  vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                  vcvtq_f32_s32(vmovl_high_s16(high))}};
}

static inline v16 v16_from_i8_n(const int8_t *p, int32_t n)
{
    int8_t all[16] = {0};
    memcpy(all, p, (size_t)n);
    return v16_from_i8(all);
}

static inline int32_t v16_to_i8(int8_t *p, v16 x)
{
    int32x4_t a = vcvtnq_s32_f32(x.part[0]), b = vcvtnq_s32_f32(x.part[1]);
    int32x4_t c = vcvtnq_s32_f32(x.part[2]), d = vcvtnq_s32_f32(x.part[3]);
    int16x8_t low = vmovn_high_s32(vmovn_s32(a), b), high = vmovn_high_s32(vmovn_s32(c), d);
    vst1q_s8(p, vmovn_high_s16(vmovn_s16(low), high));
    return vaddvq_s32(vaddq_s32(vaddq_s32(a, b), vaddq_s32(c, d)));
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

static inline void v16_load_pairs(const float *p, v16 *x, v16 *y)
{
    for (int i = 0; i < 4; i++) {
        float32x4x2_t pair = vld2q_f32(p + 8 * i);
        x->part[i] = pair.val[0];
        y->part[i] = pair.val[1];
    }
}

static inline void v16_store_pairs(float *p, v16 x, v16 y)
{
    for (int i = 0; i < 4; i++) {
        vst2q_f32(p + 8 * i, (float32x4x2_t){{x.part[i], y.part[i]}});
    }
}

static inline v16 v16_set1(float x)
{
    V16_EACH(vdupq_n_f32(x));
}

static inline v16 v16_add(v16 a, v16 b)
{
    V16_EACH(vaddq_f32(a.part[i], b.part[i]));
}

static inline v16 v16_sub(v16 a, v16 b)
{
    V16_EACH(vsubq_f32(a.part[i], b.part[i]));
}

static inline v16 v16_mul(v16 a, v16 b)
{
    V16_EACH(vmulq_f32(a.part[i], b.part[i]));
}

static inline v16 v16_div(v16 a, v16 b)
{
    V16_EACH(vdivq_f32(a.part[i], b.part[i]));
}

static inline v16 v16_fma(v16 a, v16 b, v16 c)
{
    V16_EACH(vfmaq_f32(c.part[i], a.part[i], b.part[i]));
}

static inline v16 v16_fnma(v16 a, v16 b, v16 c)
{
    V16_EACH(vfmsq_f32(c.part[i], a.part[i], b.part[i]));
}

/* FMIN and FMAX return the NaN: so a comparison and a selection. */
static inline v16 v16_less(v16 a, v16 b, v16 yes, v16 no)
{
    V16_EACH(vbslq_f32(vcltq_f32(a.part[i], b.part[i]), yes.part[i], no.part[i]));
}

static inline v16 v16_min(v16 a, v16 b)
{
    return v16_less(a, b, a, b);
}

static inline v16 v16_max(v16 a, v16 b)
{
    return v16_less(b, a, a, b);
}

static inline v16 v16_neg(v16 x)
{
    V16_EACH(vnegq_f32(x.part[i]));
}

static inline v16 v16_abs(v16 x)
{
    V16_EACH(vabsq_f32(x.part[i]));
}

static inline v16 v16_copysign(v16 magnitude, v16 sign)
{
    V16_EACH(vbslq_f32(vdupq_n_u32(0x80000000u), sign.part[i], magnitude.part[i]));
}

static inline float32x4_t v16_pow2_4(float32x4_t x)
{
    uint32x4_t bits = vaddq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(127));
    return vreinterpretq_f32_u32(vshlq_n_u32(bits, 23));
}

static inline v16 v16_pow2(v16 x)
{
    V16_EACH(v16_pow2_4(x.part[i]));
}

static inline float v16_sum(v16 x)
{
    float32x4_t four = vaddq_f32(vaddq_f32(x.part[0], x.part[2]), vaddq_f32(x.part[1], x.part[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

static inline float v16_largest(v16 x)
{
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.part[0], x.part[1]), vmaxq_f32(x.part[2], x.part[3])));
}

/* As integers the bits of |x| are in the order of |x|, infinity and NaN last. */
static inline uint32x4_t v16_magnitude_4(float32x4_t x)
{
    return vreinterpretq_u32_f32(vabsq_f32(x));
}

static inline v16 v16_max_bits(v16 a, v16 b)
{
    V16_EACH(vreinterpretq_f32_u32(
        vmaxq_u32(v16_magnitude_4(a.part[i]), v16_magnitude_4(b.part[i]))));
}

static inline uint32_t v16_largest_bits(v16 x)
{
    uint32x4_t a = vmaxq_u32(v16_magnitude_4(x.part[0]), v16_magnitude_4(x.part[1]));
    uint32x4_t b = vmaxq_u32(v16_magnitude_4(x.part[2]), v16_magnitude_4(x.part[3]));
    return vmaxvq_u32(vmaxq_u32(a, b));
}

#endif
