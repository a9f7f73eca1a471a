/* avx512vnni.c - AVX-512 with VNNI: sixteen outputs and eight rows at a time. */
#include "dots_avx512.h"
#include "lanes_avx512.h"

#include "gemm.inc"
#include "vector.inc"

#include "quantize_avx512.h"

const es_kernels es_kernels_avx512vnni = {
    .name = "avx512vnni",
    .gemm = gemm,
    .quantize = quantize,
    ES_VECTOR_KERNELS,
};
