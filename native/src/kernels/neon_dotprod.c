/* neon_dotprod.c - Arm v8.2 with SDOT: four outputs of a row at a time. */
#include "dots_neon.h"

#include "gemm.inc"
#include "lanes_neon.h"

#include "vector.inc"

const es_kernels es_kernels_neon_dotprod = {
    .name = "neon_dotprod",
    .gemm = gemm,
    .quantize = vec_quantize,
    ES_VECTOR_KERNELS,
};
