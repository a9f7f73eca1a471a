/* philox.h - counter-based random numbers: pure functions of seed, index and a 32-bit lane. */
#ifndef ES_PHILOX_H
#define ES_PHILOX_H

#include <stdint.h>

/* Streams keep users of one (seed, index) apart. */
#define ES_STREAM_NOISE 0     /* lane = token id */
#define ES_STREAM_REJECTION 1 /* lane = number of the draw at this index */

/* The largest value es_noise can take, rounded up. */
#define ES_NOISE_MAX 36.75

/* Philox4x32-10 (Salmon et al., SC 2011): counter and key to four random words. */
void es_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* Uniform in (0, 1): a multiple of 2^-53, or 2^-54 in place of 0. */
double es_uniform(uint64_t seed, uint64_t index, uint32_t lane, uint32_t stream);

#define ES_HIGH_LANES 64

/* high[i]: the top 32 of the 53 random bits of es_uniform in lane[i], n <= ES_HIGH_LANES at once;
   so that uniform lies in [high, high + 1] / 2^32. */
void es_uniform_high(uint64_t seed, uint64_t index, const uint32_t *lane, uint32_t n,
                     uint32_t stream, uint32_t *high);

/* Gumbel noise of a uniform: -log(-log u). */
double es_gumbel(double uniform);

#endif
