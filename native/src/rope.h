/* rope.h - rotary frequencies of a model and the cosines and sines of rows, in double. */
#ifndef ES_ROPE_H
#define ES_ROPE_H

#include <stddef.h>
#include <stdint.h>

#include "edgespec.h"
#include "gguf.h"

typedef struct es_rope {
    int32_t dim;              /* rotated values of a head; dim / 2 pairs */
    double attention_factor;  /* cosines and sines are multiplied by it (yarn) */
    double *inv_freq;         /* (dim / 2) */
} es_rope;

/* The rope llama.cpp would use: ARCH.rope.* and, where there is one, the tensor rope_freqs.weight
   (llama3 files carry it). dim: the head's; max_position: the model's. A scaling or a key whose
   effect is not known here is ES_ERR_UNSUPPORTED and named. */
es_status es_rope_from_gguf(const es_gguf *gguf, const char *arch, int32_t dim,
                            int32_t max_position, es_rope *out);
/* The second rope of models whose windowed layers have a base of their own (gemma3):
   ARCH.rope.freq_base_swa, else 10000, and no scaling. */
es_status es_rope_local_from_gguf(const es_gguf *gguf, const char *arch, int32_t dim,
                                  es_rope *out);
void es_rope_clear(es_rope *rope);   /* frees inv_freq; a cleared or zeroed one is a no-op */

/* cos and sin (n, dim / 2) of rows at these positions, what kernel `rope` takes. */
void es_rope_table(const es_rope *rope, const int64_t *position, int32_t n, float *cos,
                   float *sin);

#endif
