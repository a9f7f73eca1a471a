/* sample.h - what verification needs of sampling beyond the public calls. */
#ifndef ES_SAMPLE_H
#define ES_SAMPLE_H

#include "edgespec.h"

/* Every field in its range, every biased token inside the vocabulary. */
es_status es_sampling_check(const es_sampling *sampling, size_t vocab);

/* es_sample_process without es_sampling_check, for a sequence in two pieces: history (n_history),
   then path (n_path). */
es_status es_sample_row(const es_sampling *sampling, const int32_t *history, size_t n_history,
                        const int32_t *path, size_t n_path, const uint8_t *allowed, float *logits,
                        size_t vocab);

#endif
