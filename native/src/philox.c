/* philox.c - Philox4x32-10 and the Gumbel noise made of it. */
#include "philox.h"

#include <string.h>

#include "edgespec.h"
#include "fmath.h"

#define ROUNDS 10
#define MULTIPLIER_0 UINT32_C(0xD2511F53)
#define MULTIPLIER_1 UINT32_C(0xCD9E8D57)
#define WEYL_0 UINT32_C(0x9E3779B9)
#define WEYL_1 UINT32_C(0xBB67AE85)

void es_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t a = (uint64_t)MULTIPLIER_0 * c0;
        uint64_t b = (uint64_t)MULTIPLIER_1 * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += WEYL_0;
        k1 += WEYL_1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

double es_uniform(uint64_t seed, uint64_t index, uint32_t lane, uint32_t stream)
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)index, (uint32_t)(index >> 32), lane, stream};
    uint32_t out[4];
    es_philox(counter, key, out);
    uint64_t bits = ((uint64_t)out[0] << 32 | out[1]) >> 11;
    return (bits == 0 ? 0.5 : (double)bits) * 0x1p-53;
}

void es_uniform_high(uint64_t seed, uint64_t index, const uint32_t *lane, uint32_t n,
                     uint32_t stream, uint32_t *high)
{
    /* The same rounds as es_philox, lanes innermost so that they vectorise. */
    uint32_t c0[ES_HIGH_LANES], c1[ES_HIGH_LANES], c2[ES_HIGH_LANES], c3[ES_HIGH_LANES];
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (uint32_t i = 0; i < ES_HIGH_LANES; i++) {
        c0[i] = (uint32_t)index;
        c1[i] = (uint32_t)(index >> 32);
        c2[i] = i < n ? lane[i] : 0;
        c3[i] = stream;
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < ES_HIGH_LANES; i++) {
            uint64_t a = (uint64_t)MULTIPLIER_0 * c0[i];
            uint64_t b = (uint64_t)MULTIPLIER_1 * c2[i];
            c0[i] = (uint32_t)(b >> 32) ^ c1[i] ^ k0;
            c1[i] = (uint32_t)b;
            c2[i] = (uint32_t)(a >> 32) ^ c3[i] ^ k1;
            c3[i] = (uint32_t)a;
        }
        k0 += WEYL_0;
        k1 += WEYL_1;
    }
    memcpy(high, c0, n * sizeof(*high));
}

double es_gumbel(double uniform)
{
    return -es_log(-es_log(uniform));
}

double es_noise(uint64_t seed, uint64_t index, int32_t token)
{
    return es_gumbel(es_uniform(seed, index, (uint32_t)token, ES_STREAM_NOISE));
}
