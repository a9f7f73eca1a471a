/* avx2.c - AVX2 without VNNI: products of bytes through int16. */
#include "dots_avx2.h"
#include "lanes_avx2.h"

#include "gemm.inc"
#include "vector.inc"

const es_kernels es_kernels_avx2 = {
    .name = "avx2",
    .gemm = gemm,
    .quantize = vec_quantize,
    ES_VECTOR_KERNELS,
};
