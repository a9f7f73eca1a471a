/* half.c - fp16 in integer arithmetic: the bits F16C and FCVT return. */
#include <string.h>

#include "kernels.h"

float es_half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = half >> 10 & 0x1Fu;
    uint32_t mantissa = half & 0x3FFu;
    uint32_t bits;
    if (exponent == 0x1F) {
        uint32_t quiet = mantissa != 0 ? 0x400000u : 0;
        bits = sign | 0x7F800000u | quiet | mantissa << 13;
    } else if (exponent != 0) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {
        /* A multiple of 2^-24, or zero: exact in a float. */
        float value = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &value, sizeof bits);
        bits |= sign;
    }
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

uint16_t es_float_to_half(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000u;
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) {
        return (uint16_t)(sign | 0x7E00u | (magnitude >> 13 & 0x3FFu));
    }
    if (magnitude >= 0x47800000u) { /* 65536 and more; what rounds up to it carries there below */
        return (uint16_t)(sign | 0x7C00u);
    }
    uint32_t kept, lost, half_way;
    if (magnitude >= 0x38800000u) { /* 2^-14: a normal fp16 */
        uint32_t rebased = magnitude - (112u << 23);
        kept = rebased >> 13;
        lost = rebased & 0x1FFFu;
        half_way = 0x1000u;
    } else if (magnitude >= 0x33000000u) { /* 2^-25: half the smallest fp16 */
        uint32_t shift = 126 - (magnitude >> 23);
        uint32_t mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
        kept = mantissa >> shift;
        lost = mantissa & ((1u << shift) - 1);
        half_way = 1u << (shift - 1);
    } else {
        return (uint16_t)sign;
    }
    uint32_t up = lost > half_way || (lost == half_way && (kept & 1) != 0);
    return (uint16_t)(sign | (kept + up));
}
