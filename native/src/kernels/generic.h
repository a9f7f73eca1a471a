/* generic.h - the kernels in plain C: what every other variant must return, bit for bit. A variant
   that has nothing faster for an operation puts one of these into its table. */
#ifndef ES_GENERIC_H
#define ES_GENERIC_H

#include "kernels.h"

void es_generic_gemm(const es_tensor *w, int32_t t0, int32_t t1, const es_rows *x, int32_t r0,
                     int32_t n, float *y, size_t ld);
void es_generic_quantize(const es_rows *rows, int32_t r, int32_t g0, int32_t g1);
void es_generic_rms_norm(const float *x, const float *w, int32_t n, float eps, float *out);
void es_generic_rope(float *x, const float *cos, const float *sin, int32_t n, int32_t interleaved);
void es_generic_swiglu(const float *gate, const float *up, int32_t n, float *out);
void es_generic_geglu(const float *gate, const float *up, int32_t n, float *out);
void es_generic_add(float *y, const float *x, int32_t n);
void es_generic_scale(float *y, const float *x, float s, int32_t n);
void es_generic_attn_scores(es_kv_format format, const void *keys, const float *key_scale,
                            int32_t head_dim, int32_t slot, int32_t count, const float *const *q,
                            int32_t m, float *score, size_t ld);
float es_generic_attn_softmax(float *score, int32_t count, float softcap, int32_t has_sink,
                              float sink);
void es_generic_attn_mix(es_kv_format format, const void *values, const float *value_scale,
                         int32_t head_dim, int32_t slot, int32_t count, const float *weight,
                         size_t ld, int32_t m, float *const *out);
void es_generic_kv_store_key(es_kv_format format, void *keys, float *key_scale, int32_t head_dim,
                             int32_t slot, const float *x);
void es_generic_kv_store_value(es_kv_format format, void *values, float *value_scale,
                               int32_t head_dim, int32_t slot, const float *x);

extern const es_kernels es_kernels_generic;

#endif
