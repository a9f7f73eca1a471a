/* avx512vnni.c - AVX-512 with VNNI: sixteen outputs and eight rows at a time. */
#include "dots_avx512.h"
#include "lanes_avx512.h"

#include "gemm.inc"
#include "vector.inc"

const es_kernels es_kernels_avx512vnni = {
    .name = "avx512vnni",
    .gemm = gemm,
    ES_VECTOR_KERNELS,
};
