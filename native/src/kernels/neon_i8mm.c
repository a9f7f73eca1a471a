/* neon_i8mm.c - Arm v8.6 with SMMLA: two outputs of two rows at a time. */
#include "dots_neon.h"

#include "gemm.inc"
#include "lanes_neon.h"

#include "vector.inc"

const es_kernels es_kernels_neon_i8mm = {
    .name = "neon_i8mm",
    .gemm = gemm,
    .quantize = vec_quantize,
    ES_VECTOR_KERNELS,
};
