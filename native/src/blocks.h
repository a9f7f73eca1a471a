/* blocks.h - ggml's block formats in plain C: sizes, and values as floats. The truth the tile
   formats are checked against. */
#ifndef ES_BLOCKS_H
#define ES_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

#include "edgespec.h"

/* Inputs per block and bytes per block; false for a type that holds no weights we read. */
int es_block_shape(int32_t ggml_type, int32_t *n_values, int32_t *n_bytes);
/* The same for all types ggml defines, integers and weights we do not read included. */
int es_ggml_type_shape(int32_t ggml_type, int32_t *n_values, int32_t *n_bytes);
const char *es_ggml_type_name(int32_t ggml_type);      /* "Q4_1"; NULL for a number ggml lacks */

/* n values (a multiple of the block) of one row, exactly as ggml defines them, to f32. */
void es_block_floats(int32_t ggml_type, const uint8_t *blocks, size_t n, float *out);

/* Scale of an MXFP4 block: 2^(e - 128), as its code book is doubled. */
float es_mxfp4_scale(uint8_t e);

#endif
