/*
 * pack.c - ggml blocks to tiles, and a row of tiles back to floats.
 *
 * Levels travel as dwords: dword d of a group holds the levels of inputs 4d .. 4d + 3, one per
 * byte, so that four of them move with one operation on any machine. Hosts are little-endian.
 */
#include "pack.h"

#include <stdbool.h>
#include <string.h>

#include "blocks.h"          /* es_mxfp4_scale */
#include "gguf.h"
#include "kernels/kernels.h" /* es_half_to_float */

enum {
    DWORDS = ES_GROUP / 4,
    SUPER = 256,                 /* inputs of a two-level superblock */
    VECTOR = 4 * ES_TILE,        /* bytes: one dword per output */
    HALVES = 2 * ES_TILE         /* bytes of one fp16 per output */
};

/* How one type lies in a tile. */
typedef struct format {
    uint8_t bits;                /* of a level; 0: no tile format; 16, 32: floats */
    uint8_t block_bytes;         /* in the file */
    uint8_t is_two_level;
    uint16_t scale_bytes;        /* of a group, two-level: of a superblock */
} format;

static const format formats[] = {
    [ES_GGML_F32] = {32, 4, 0, 0},
    [ES_GGML_F16] = {16, 2, 0, 0},
    [ES_GGML_BF16] = {16, 2, 0, 0},
    [ES_GGML_Q4_0] = {4, 18, 0, HALVES},
    [ES_GGML_Q4_1] = {4, 20, 0, 2 * HALVES},
    [ES_GGML_Q5_0] = {5, 22, 0, HALVES},
    [ES_GGML_Q5_1] = {5, 24, 0, 2 * HALVES},
    [ES_GGML_Q8_0] = {8, 34, 0, HALVES},
    [ES_GGML_IQ4_NL] = {4, 18, 0, HALVES},
    [ES_GGML_MXFP4] = {4, 17, 0, ES_TILE},
    [ES_GGML_Q2_K] = {2, 84, 1, 2 * HALVES + 8 * 2 * ES_TILE},
    [ES_GGML_Q3_K] = {3, 110, 1, HALVES + 8 * 2 * ES_TILE},
    [ES_GGML_Q4_K] = {4, 144, 1, 2 * HALVES + 8 * 2 * ES_TILE},
    [ES_GGML_Q5_K] = {5, 176, 1, 2 * HALVES + 8 * 2 * ES_TILE},
    [ES_GGML_Q6_K] = {6, 210, 1, HALVES + 8 * 2 * ES_TILE},
};

/* Bytes of the levels of one group: 16 outputs x 32 inputs x bits / 8. */
static size_t level_bytes(const format *f)
{
    return (size_t)f->bits * VECTOR;
}

static bool is_float(const format *f)
{
    return f->bits >= 16;
}

size_t es_pack_tile_bytes(int32_t ggml_type, int32_t cols)
{
    if (ggml_type < 0 || (size_t)ggml_type >= sizeof(formats) / sizeof(formats[0]) || cols <= 0) {
        return 0;
    }
    const format *f = &formats[ggml_type];
    uint64_t k = (uint64_t)cols, n;
    if (f->bits == 0 || (!is_float(f) && k % (f->is_two_level ? SUPER : ES_GROUP) != 0)) {
        return 0;
    }
    if (is_float(f)) {
        n = k * ES_TILE * (f->bits / 8);
    } else {
        n = k / ES_GROUP * level_bytes(f) + k / (f->is_two_level ? SUPER : ES_GROUP) * f->scale_bytes;
    }
    n = (n + 63) / 64 * 64;
    return n > SIZE_MAX ? 0 : (size_t)n;
}

/* ---- levels of a block ------------------------------------------------------------------- */

static uint32_t load(const uint8_t *p)
{
    uint32_t value;
    memcpy(&value, p, sizeof(value));
    return value;
}

static void store(uint8_t *p, uint32_t value)
{
    memcpy(p, &value, sizeof(value));
}

/* The same bits of each byte of a dword. */
static uint32_t each(uint32_t dword, int32_t shift, uint32_t mask)
{
    return dword >> shift & mask * 0x01010101u;
}

/* Bit i to the lowest bit of byte i, i = 0..3. */
static uint32_t spread(uint32_t bits)
{
    return bits * 0x00204081u & 0x01010101u;
}

static void halves(const uint8_t *q, uint32_t level[DWORDS])
{
    for (int32_t d = 0; d < 4; d++) {
        level[d] = each(load(q + 4 * d), 0, 15);
        level[d + 4] = each(load(q + 4 * d), 4, 15);
    }
}

static void fifth_bits(uint32_t bits, uint32_t level[DWORDS])
{
    for (int32_t d = 0; d < DWORDS; d++) {
        level[d] |= spread(bits >> 4 * d & 15) << 4;
    }
}

/* Dwords of 32 bytes, `shift` taken off; bits of `high` (NULL: none) from `high_shift` on put at
   `place`. */
static void fields(const uint8_t *low, int32_t shift, uint32_t mask, const uint8_t *high,
                   int32_t high_shift, uint32_t high_mask, int32_t place, uint32_t level[DWORDS])
{
    for (int32_t d = 0; d < DWORDS; d++) {
        level[d] = each(load(low + 4 * d), shift, mask);
        if (high != NULL) {
            level[d] |= each(load(high + 4 * d), high_shift, high_mask) << place;
        }
    }
}

/* Group g of a block (0 where a block is a group). Formats: blocks.c. */
static void read_levels(int32_t type, const uint8_t *b, int32_t g, uint32_t level[DWORDS])
{
    switch (type) {
    case ES_GGML_Q4_0:
    case ES_GGML_IQ4_NL:
        halves(b + 2, level);
        break;
    case ES_GGML_Q4_1:
        halves(b + 4, level);
        break;
    case ES_GGML_MXFP4:
        halves(b + 1, level);
        break;
    case ES_GGML_Q5_0:
        halves(b + 6, level);
        fifth_bits(load(b + 2), level);
        break;
    case ES_GGML_Q5_1:
        halves(b + 8, level);
        fifth_bits(load(b + 4), level);
        break;
    case ES_GGML_Q8_0:
        for (int32_t d = 0; d < DWORDS; d++) {
            level[d] = load(b + 2 + 4 * d) ^ 0x80808080u;
        }
        break;
    case ES_GGML_Q2_K:
        fields(b + 16 + g / 4 * 32, g % 4 * 2, 3, NULL, 0, 0, 0, level);
        break;
    case ES_GGML_Q3_K:
        fields(b + 32 + g / 4 * 32, g % 4 * 2, 3, b, g, 1, 2, level);
        break;
    case ES_GGML_Q4_K:
        fields(b + 16 + g / 2 * 32, g % 2 * 4, 15, NULL, 0, 0, 0, level);
        break;
    case ES_GGML_Q5_K:
        fields(b + 48 + g / 2 * 32, g % 2 * 4, 15, b + 16, g, 1, 4, level);
        break;
    default: /* Q6_K */
        fields(b + g / 4 * 64 + g % 2 * 32, g % 4 / 2 * 4, 15, b + 128 + g / 4 * 32, g % 4 * 2, 3,
               4, level);
    }
}

/* ---- levels in a tile -------------------------------------------------------------------- */

/* Two bits of every level from `shift` on, of output o. */
static void write_pairs(const uint32_t level[DWORDS], int32_t shift, int32_t o, uint8_t *out)
{
    for (int32_t p = 0; p < 2; p++) {
        const uint32_t *l = level + 4 * p;
        store(out + p * VECTOR + 4 * o,
              each(l[0], shift, 3) | each(l[1], shift, 3) << 2 | each(l[2], shift, 3) << 4 |
                  each(l[3], shift, 3) << 6);
    }
}

static void write_plane(const uint32_t level[DWORDS], int32_t shift, int32_t o, uint8_t *out)
{
    uint32_t bits = 0;
    for (int32_t d = 0; d < DWORDS; d++) {
        bits |= each(level[d], shift, 1) << d;
    }
    store(out + 4 * o, bits);
}

static void write_levels(int32_t bits, const uint32_t level[DWORDS], int32_t o, uint8_t *out)
{
    if (bits == 8) {
        for (int32_t d = 0; d < DWORDS; d++) {
            store(out + d * VECTOR + 4 * o, level[d]);
        }
        return;
    }
    if (bits < 4) {
        write_pairs(level, 0, o, out);
        if (bits == 3) {
            write_plane(level, 2, o, out + 2 * VECTOR);
        }
        return;
    }
    for (int32_t j = 0; j < 4; j++) {
        store(out + j * VECTOR + 4 * o,
              each(level[2 * j], 0, 15) | each(level[2 * j + 1], 0, 15) << 4);
    }
    if (bits == 5) {
        write_plane(level, 4, o, out + 4 * VECTOR);
    } else if (bits == 6) {
        write_pairs(level, 4, o, out + 4 * VECTOR);
    }
}

/* Level of input k of output o: the inverse of write_levels. */
static int32_t level_at(int32_t bits, const uint8_t *in, int32_t o, int32_t k)
{
    int32_t d = k / 4, byte = 4 * o + k % 4;
    if (bits == 8) {
        return in[d * VECTOR + byte];
    }
    int32_t pair_shift = d % 4 * 2, pair_byte = d / 4 * VECTOR + byte;
    if (bits < 4) {
        int32_t level = in[pair_byte] >> pair_shift & 3;
        return bits == 2 ? level : level | (in[2 * VECTOR + byte] >> d & 1) << 2;
    }
    int32_t level = in[d / 2 * VECTOR + byte] >> 4 * (d & 1) & 15;
    if (bits == 5) {
        level |= (in[4 * VECTOR + byte] >> d & 1) << 4;
    } else if (bits == 6) {
        level |= (in[4 * VECTOR + pair_byte] >> pair_shift & 3) << 4;
    }
    return level;
}

/* ---- scales in a tile -------------------------------------------------------------------- */

static void copy_half(uint8_t *out, int32_t o, const uint8_t *half)
{
    memcpy(out + 2 * o, half, 2);
}

/* Scale and offset j = 0..7 of Q4_K and Q5_K, 6 bits each in 12 bytes, to out[0] and out[ES_TILE].
   All four dwords at once: the low four groups, then the high four. */
static void write_scales_k4(const uint8_t *s, int32_t o, uint8_t *out)
{
    uint32_t a = load(s), b = load(s + 4), c = load(s + 8);
    uint32_t scale[2] = {each(a, 0, 63), each(c, 0, 15) | each(a, 6, 3) << 4};
    uint32_t min[2] = {each(b, 0, 63), each(c, 4, 15) | each(b, 6, 3) << 4};
    for (int32_t g = 0; g < 8; g++) {
        out[g * 2 * ES_TILE + o] = (uint8_t)(scale[g / 4] >> g % 4 * 8);
        out[g * 2 * ES_TILE + ES_TILE + o] = (uint8_t)(min[g / 4] >> g % 4 * 8);
    }
}

/* Scales 0..15 of Q3_K: four low bits in the first 8 bytes, two high ones in the last 4. */
static void write_scales_k3(const uint8_t *s, int32_t o, uint8_t *out)
{
    uint32_t high = load(s + 8);
    for (int32_t j = 0; j < 4; j++) {
        uint32_t low = each(load(s + j % 2 * 4), j / 2 * 4, 15);
        uint32_t scale = low | each(high, 2 * j, 3) << 4;
        for (int32_t i = 0; i < 4; i++) {
            out[(4 * j + i) * ES_TILE + o] = (uint8_t)((scale >> 8 * i & 63) - 32);
        }
    }
}

/* Scales of one block of output o: a group's, or a superblock's. */
static void write_scales(int32_t type, const uint8_t *b, int32_t o, uint8_t *out)
{
    switch (type) {
    case ES_GGML_MXFP4:
        out[o] = b[0];
        break;
    case ES_GGML_Q4_1:
    case ES_GGML_Q5_1:
        copy_half(out, o, b);
        copy_half(out + HALVES, o, b + 2);
        break;
    case ES_GGML_Q4_K:
    case ES_GGML_Q5_K:
        copy_half(out, o, b);
        copy_half(out + HALVES, o, b + 2);
        write_scales_k4(b + 4, o, out + 2 * HALVES);
        break;
    case ES_GGML_Q2_K:
        copy_half(out, o, b + 80);
        copy_half(out + HALVES, o, b + 82);
        for (int32_t j = 0; j < 16; j++) {
            out[2 * HALVES + j * ES_TILE + o] = b[j];
        }
        break;
    case ES_GGML_Q3_K:
        copy_half(out, o, b + 108);
        write_scales_k3(b + 96, o, out + HALVES);
        break;
    case ES_GGML_Q6_K:
        copy_half(out, o, b + 208);
        for (int32_t j = 0; j < 16; j++) {
            out[HALVES + j * ES_TILE + o] = b[192 + j];
        }
        break;
    default: /* Q4_0, Q5_0, Q8_0, IQ4_NL */
        copy_half(out, o, b);
    }
}

/* ---- tiles ------------------------------------------------------------------------------- */

static void pack_floats(size_t n_bytes, const uint8_t *rows, size_t row_bytes, int32_t n_rows,
                        int32_t cols, uint8_t *out)
{
    for (int32_t k = 0; k < cols; k++) {
        for (int32_t o = 0; o < n_rows; o++) {
            const uint8_t *from = rows + (size_t)o * row_bytes + (size_t)k * n_bytes;
            uint8_t *to = out + ((size_t)k * ES_TILE + (size_t)o) * n_bytes;
            if (n_bytes == 2) {
                memcpy(to, from, 2);
            } else {
                memcpy(to, from, 4);
            }
        }
    }
}

static void pack_tile(int32_t type, const uint8_t *rows, size_t row_bytes, int32_t n_rows,
                      int32_t cols, uint8_t *out)
{
    const format *f = &formats[type];
    if (is_float(f)) {
        pack_floats(f->bits / 8, rows, row_bytes, n_rows, cols, out);
        return;
    }
    int32_t groups = f->is_two_level ? SUPER / ES_GROUP : 1, n_blocks = cols / ES_GROUP / groups;
    uint8_t *scales = out + (size_t)(n_blocks * groups) * level_bytes(f);
    for (int32_t i = 0; i < n_blocks; i++) {
        const uint8_t *block = rows + (size_t)i * f->block_bytes;
        uint8_t *levels = out + (size_t)(i * groups) * level_bytes(f);
        for (int32_t o = 0; o < n_rows; o++, block += row_bytes) {
            for (int32_t g = 0; g < groups; g++) {
                uint32_t level[DWORDS];
                read_levels(type, block, g, level);
                write_levels(f->bits, level, o, levels + (size_t)g * level_bytes(f));
            }
            write_scales(type, block, o, scales + (size_t)i * f->scale_bytes);
        }
    }
}

void es_pack_tiles(int32_t ggml_type, const uint8_t *blocks, size_t row_bytes, int32_t rows,
                   int32_t cols, int32_t t0, int32_t t1, uint8_t *out)
{
    size_t tile_bytes = es_pack_tile_bytes(ggml_type, cols);
    if (tile_bytes == 0) {
        return;
    }
    for (int32_t t = t0; t < t1; t++, out += tile_bytes) {
        int32_t n_rows = rows - t * ES_TILE < ES_TILE ? rows - t * ES_TILE : ES_TILE;
        if (n_rows < ES_TILE) {
            memset(out, 0, tile_bytes);
        } else {
            memset(out + tile_bytes - 63, 0, 63); /* whatever of it is padding */
        }
        pack_tile(ggml_type, blocks + (size_t)t * ES_TILE * row_bytes, row_bytes, n_rows, cols,
                  out);
    }
}

/* ---- rows back --------------------------------------------------------------------------- */

static float half_of(const uint8_t *in, int32_t o)
{
    return es_half_to_float((uint16_t)(in[2 * o] | in[2 * o + 1] << 8));
}

/* Group g of the unit (superblock or group) whose scales begin at s, output o. */
static void group_floats(int32_t type, const uint8_t *levels, const uint8_t *s, int32_t g,
                         int32_t o, float *out)
{
    int32_t bits = formats[type].bits;
    float d = type == ES_GGML_MXFP4 ? es_mxfp4_scale(s[o]) : half_of(s, o);
    for (int32_t k = 0; k < ES_GROUP; k++) {
        int32_t level = level_at(bits, levels, o, k), part = (2 * g + k / 16) * ES_TILE + o;
        int32_t first = 2 * g * ES_TILE + o;
        switch (type) {
        case ES_GGML_Q4_0:
            out[k] = d * (float)(level - 8);
            break;
        case ES_GGML_Q5_0:
            out[k] = d * (float)(level - 16);
            break;
        case ES_GGML_Q8_0:
            out[k] = d * (float)(level - 128);
            break;
        case ES_GGML_Q4_1:
        case ES_GGML_Q5_1:
            out[k] = d * (float)level + half_of(s + HALVES, o);
            break;
        case ES_GGML_IQ4_NL:
            out[k] = d * (float)es_code_iq4nl[level];
            break;
        case ES_GGML_MXFP4:
            out[k] = d * (float)es_code_mxfp4[level];
            break;
        case ES_GGML_Q6_K:
            out[k] = d * (float)(int8_t)s[HALVES + part] * (float)(level - 32);
            break;
        case ES_GGML_Q3_K:
            out[k] = d * (float)(int8_t)s[HALVES + part] * (float)(level - 4);
            break;
        case ES_GGML_Q2_K:
            out[k] = d * (float)(s[2 * HALVES + part] & 15) * (float)level -
                     half_of(s + HALVES, o) * (float)(s[2 * HALVES + part] >> 4);
            break;
        default: /* Q4_K, Q5_K */
            out[k] = d * (float)s[2 * HALVES + first] * (float)level -
                     half_of(s + HALVES, o) * (float)s[2 * HALVES + first + ES_TILE];
        }
    }
}

static float one_float(int32_t type, const uint8_t *in)
{
    uint32_t bits;
    float value;
    if (type == ES_GGML_F16) {
        return half_of(in, 0);
    }
    bits = type == ES_GGML_F32 ? load(in) : (uint32_t)(in[0] | in[1] << 8) << 16;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

void es_pack_row(const es_tensor *tensor, int32_t row, float *out)
{
    const format *f = &formats[tensor->type];
    const uint8_t *tile = tensor->data + (size_t)(row / ES_TILE) * tensor->tile_bytes;
    int32_t o = row % ES_TILE;
    if (is_float(f)) {
        size_t n_bytes = f->bits / 8;
        for (int32_t k = 0; k < tensor->cols; k++) {
            out[k] = one_float(tensor->type, tile + ((size_t)k * ES_TILE + (size_t)o) * n_bytes);
        }
        return;
    }
    int32_t n_groups = tensor->cols / ES_GROUP, groups = f->is_two_level ? SUPER / ES_GROUP : 1;
    const uint8_t *scales = tile + (size_t)n_groups * level_bytes(f);
    for (int32_t g = 0; g < n_groups; g++) {
        group_floats(tensor->type, tile + (size_t)g * level_bytes(f),
                     scales + (size_t)(g / groups) * f->scale_bytes, g % groups, o,
                     out + (size_t)g * ES_GROUP);
    }
}

/* ---- rows to other tiles ----------------------------------------------------------------- */

/* Value `from` of each of `count` vectors, one per output, to value `to` of others. */
static void move_values(const uint8_t *in, size_t count, size_t n_bytes, int32_t from, int32_t to,
                        uint8_t *out)
{
    size_t stride = n_bytes * ES_TILE;
    in += (size_t)from * n_bytes;
    out += (size_t)to * n_bytes;
    for (size_t i = 0; i < count; i++) {
        memcpy(out + i * stride, in + i * stride, n_bytes);
    }
}

static void move_row(const es_tensor *t, const uint8_t *in, int32_t from, int32_t to, uint8_t *out)
{
    const format *f = &formats[t->type];
    if (is_float(f)) {
        move_values(in, (size_t)t->cols, f->bits / 8, from, to, out);
        return;
    }
    size_t groups = (size_t)t->cols / ES_GROUP, at = groups * level_bytes(f);
    size_t units = f->is_two_level ? groups * ES_GROUP / SUPER : groups;
    size_t halves = f->scale_bytes % (16 * ES_TILE) / HALVES; /* the rest: bytes */
    size_t bytes = (f->scale_bytes - halves * HALVES) / ES_TILE;
    move_values(in, groups * f->bits, 4, from, to, out);
    for (size_t i = 0; i < units; i++, at += f->scale_bytes) {
        move_values(in + at, halves, 2, from, to, out + at);
        move_values(in + at + halves * HALVES, bytes, 1, from, to, out + at + halves * HALVES);
    }
}

void es_pack_pick(const es_tensor *from, const int32_t *rows, int32_t n, uint8_t *out)
{
    memset(out, 0, (size_t)es_tiles(n) * from->tile_bytes);
    for (int32_t i = 0; i < n; i++) {
        move_row(from, from->data + (size_t)(rows[i] / ES_TILE) * from->tile_bytes,
                 rows[i] % ES_TILE, i % ES_TILE,
                 out + (size_t)(i / ES_TILE) * from->tile_bytes);
    }
}
