/* avxvnni.c - AVX2 with VNNI: half a tile at a time. */
#include "dots_avx2.h"
#include "lanes_avx2.h"

#include "gemm.inc"
#include "vector.inc"

const es_kernels es_kernels_avxvnni = {
    .name = "avxvnni",
    .gemm = gemm,
    .quantize = vec_quantize,
    ES_VECTOR_KERNELS,
};
