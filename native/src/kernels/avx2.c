/* avx2.c - AVX2 without VNNI: products of bytes through int16. */
#include "generic.h"

#include "dots_avx2.h"

#include "gemm.inc"

const es_kernels es_kernels_avx2 = {
    .name = "avx2",
    .gemm = gemm,
    .quantize = es_generic_quantize,
    .rms_norm = es_generic_rms_norm,
    .rope = es_generic_rope,
    .swiglu = es_generic_swiglu,
    .geglu = es_generic_geglu,
    .add = es_generic_add,
    .scale = es_generic_scale,
    .attn_scores = es_generic_attn_scores,
    .attn_softmax = es_generic_attn_softmax,
    .attn_mix = es_generic_attn_mix,
    .kv_store_key = es_generic_kv_store_key,
    .kv_store_value = es_generic_kv_store_value,
};
