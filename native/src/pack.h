/* pack.h - weights in tiles of 16 outputs x 32 inputs, the layout every kernel reads. The values
   are exactly those of the file; only their order in memory changes. Little-endian, the same for
   every instruction set, so that a packed file maps on any device.

   One TENSOR: rows = outputs N, cols = inputs K. Tiles t = 0 .. ceil(N / 16) - 1, one behind the
   other, es_pack_tile_bytes() each (a multiple of 64); outputs past N are zero weights. A tile is

       levels  of group 0, group 1, ... group G - 1        (G = K / 32; K % 32 == 0)
       scales  of group 0, group 1, ... (one-level), or of superblock 0, 1, ... (two-level, 256
               inputs = 8 groups; K % 256 == 0)
       padding to 64 bytes

   With o = 0..15 the output in the tile and k = 4 * d + i (d = 0..7, i = 0..3) the input in the
   group, byte b = 4 * o + i of a 64-byte vector:

   levels, in this order
     nibbles (4, 5 and 6 bit)  256 B: vector j = 0..3 holds d = 2j in the low and d = 2j + 1 in the
                               high nibble of byte b
     pairs   (2 and 3 bit)     128 B: vector p = 0..1 holds d = 4p + e in bits 2e, 2e + 1 of byte b
     plane2  (6 bit)           128 B: bits 4, 5 of the level, laid out like pairs
     plane1  (3 and 5 bit)      64 B: bit d of byte b is the level's highest bit (2 or 4)
     bytes   (8 bit)           512 B: vector d = 0..7, byte b = level + 128 (Q8_0: the int8 xor 0x80)

   scales (d, m, dmin: fp16 bits; [16] = one per output)
     Q4_0 Q5_0 Q8_0 IQ4_NL     d[16]                                   32 B per group
     Q4_1 Q5_1                 d[16] m[16]                             64 B per group
     MXFP4                     e[16] (uint8)                           16 B per group
     Q4_K Q5_K                 d[16] dmin[16], then per group sc[16] m[16] (uint8)    320 B per 256
     Q6_K                      d[16], then per group sc[2][16] (int8)                 288 B per 256
     Q3_K                      d[16], then per group sc[2][16] (int8, 32 taken off)   288 B per 256
     Q2_K                      d[16] dmin[16], then per group sm[2][16] (uint8: sc | m << 4) 320 B

   A weight's value is  d * (level - zero)            zero: Q4_0 8, Q5_0 16, Q8_0 128 as stored
                        d * level + m                 Q4_1 Q5_1
                        d * code[level]               IQ4_NL; MXFP4 with d = 2^(e - 128), code doubled
                        (d * sc) * (level - zero)     Q6_K 32, Q3_K 4
                        (d * sc) * level - (dmin * m) Q4_K Q5_K Q2_K

   FLOATS (F32, F16, BF16; any K): the tile is [K][16] values of the type, output fastest. */
#ifndef ES_PACK_H
#define ES_PACK_H

#include <stddef.h>
#include <stdint.h>

#include "edgespec.h"

enum { ES_TILE = 16, ES_GROUP = 32 };

typedef struct es_tensor {
    int32_t type;          /* es_ggml_type the values come from */
    int32_t rows, cols;    /* N outputs, K inputs */
    size_t tile_bytes;     /* es_pack_tile_bytes(type, cols) */
    const uint8_t *data;   /* tiles, 64-byte aligned; tile t at data + t * tile_bytes */
} es_tensor;

static inline int32_t es_tiles(int32_t rows)
{
    return (rows + ES_TILE - 1) / ES_TILE;
}

/* How many tiles ahead gemm fetches: far enough for memory to answer, near enough to stay in the
   first cache until then. */
static inline int32_t es_tiles_ahead(const es_tensor *tensor)
{
    return tensor->tile_bytes < 8192 ? 2 : 1;
}

/* Starts fetching the first tiles of [t0, t1), for the member who computes them after a barrier. */
static inline void es_fetch_tiles(const es_tensor *tensor, int32_t t0, int32_t t1)
{
#if defined(__GNUC__)
    int32_t n = t1 - t0 < es_tiles_ahead(tensor) ? t1 - t0 : es_tiles_ahead(tensor);
    const uint8_t *tile = tensor->data + (size_t)t0 * tensor->tile_bytes;
    size_t n_bytes = n > 0 ? (size_t)n * tensor->tile_bytes : 0;
    for (size_t at = 0; at < n_bytes && at < 16384; at += 64) {
        __builtin_prefetch(tile + at);
    }
#else
    (void)tensor, (void)t0, (void)t1;
#endif
}

/* 0 for a type or a width that has no tile format. */
size_t es_pack_tile_bytes(int32_t ggml_type, int32_t cols);
/* Packs tiles [t0, t1) of a matrix of ggml rows (row_bytes apart) to out (tile t0 at out[0]). */
void es_pack_tiles(int32_t ggml_type, const uint8_t *blocks, size_t row_bytes, int32_t rows,
                   int32_t cols, int32_t t0, int32_t t1, uint8_t *out);
/* One row as floats (cols), exactly es_block_floats of the same row: embedding lookup. */
void es_pack_row(const es_tensor *tensor, int32_t row, float *out);

/* Tiles of rows[0..n) of a matrix, in this order: what es_pack_tiles makes of these rows alone. */
void es_pack_pick(const es_tensor *from, const int32_t *rows, int32_t n, uint8_t *out);

extern const int8_t es_code_iq4nl[16];
extern const int8_t es_code_mxfp4[16];   /* doubled: 0 1 2 3 4 6 8 12 and their negatives */

#endif
