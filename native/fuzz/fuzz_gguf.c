#define _POSIX_C_SOURCE 200809L /* posix_memalign */
/* fuzz_gguf.c - any bytes as a GGUF: parsed, every key and tensor touched, packed weights and the
   sizes of the model read.

   A run of its own, from the project's directory (new inputs go to the first corpus; -merge=1 then
   keeps the smallest set):

     clang -std=c11 -g -O1 -ffp-contract=off -fsanitize=fuzzer,address,undefined \
         -fno-sanitize-recover=all -Inative/include -Inative/src -o build/fuzz_gguf \
         native/fuzz/fuzz_gguf.c native/src/{gguf,gguf_values,mapping,blocks}.c \
         native/src/{pack,packed_file,error,arch,rope}.c native/src/kernels/half.c -lm
     mkdir -p build/corpus
     build/fuzz_gguf -max_total_time=300 -max_len=16384 -timeout=10 -rss_limit_mb=1024 \
         -dict=native/fuzz/gguf.dict build/corpus native/fuzz/corpus/gguf
     build/fuzz_gguf -merge=1 native/fuzz/corpus/gguf build/corpus

   The tests replay native/fuzz/corpus with replay.c, compiled by any compiler. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "arch.h"
#include "blocks.h"
#include "gguf.h"
#include "pack.h"
#include "packed_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { ITEMS = 200 }; /* of an array looked at from either end */

static volatile uint8_t sink;

static void touch(const void *data, size_t n)
{
    if (n > 0) {
        sink = (uint8_t)(sink + ((const uint8_t *)data)[0] + ((const uint8_t *)data)[n - 1]);
    }
}

static void touch_array(const es_gguf *gguf, const char *key, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        int64_t integer;
        float real;
        es_gguf_string string;
        if (i == ITEMS && count > 2 * ITEMS) {
            i = count - ITEMS;
        }
        (void)es_gguf_array_i64(gguf, key, i, &integer);
        (void)es_gguf_array_f32(gguf, key, i, &real);
        if (es_gguf_array_str(gguf, key, i, &string) == ES_OK) {
            touch(string.data, string.n);
        }
    }
    int64_t past;
    if (es_gguf_array_i64(gguf, key, count, &past) == ES_OK) {
        abort();
    }
}

static void touch_key(const es_gguf *gguf, size_t index)
{
    es_gguf_string name, entry, string;
    es_gguf_key_at(gguf, index, &name, &entry);
    touch(entry.data, entry.n);
    char *key = malloc(name.n + 1);
    if (key == NULL) {
        return;
    }
    memcpy(key, name.data, name.n);
    key[name.n] = 0;
    uint32_t integer;
    float real;
    bool truth, found = false;
    size_t count;
    (void)es_gguf_u32(gguf, key, &integer, NULL);
    (void)es_gguf_f32(gguf, key, &real, &found);
    if (!found) { /* every key of the file is found under its name */
        abort();
    }
    (void)es_gguf_bool(gguf, key, &truth, &found);
    if (es_gguf_str(gguf, key, &string, NULL) == ES_OK) {
        touch(string.data, string.n);
    }
    if (es_gguf_array(gguf, key, &count, NULL) == ES_OK) {
        touch_array(gguf, key, count);
    }
    free(key);
}

static void touch_packed(const es_tensor *tiles)
{
    float *row = malloc((size_t)tiles->cols * sizeof(*row));
    if (row != NULL) {
        es_pack_row(tiles, 0, row);
        es_pack_row(tiles, tiles->rows - 1, row);
        touch(row, (size_t)tiles->cols * sizeof(*row));
    }
    free(row);
}

/* Packs a matrix as a loader would. */
static void pack_matrix(const es_gguf *gguf, const es_gguf_tensor *t)
{
    int32_t n_values, n_bytes;
    if (t->n_dims != 2 || t->dim[0] > INT32_MAX || t->dim[1] > INT32_MAX - ES_TILE ||
        !es_block_shape(t->type, &n_values, &n_bytes)) {
        return;
    }
    es_tensor tiles = {t->type, (int32_t)t->dim[1], (int32_t)t->dim[0],
                       es_pack_tile_bytes(t->type, (int32_t)t->dim[0]), NULL};
    uint8_t *memory = tiles.tile_bytes == 0
                          ? NULL
                          : malloc((size_t)es_tiles(tiles.rows) * tiles.tile_bytes);
    if (memory != NULL) {
        es_pack_tiles(t->type, es_gguf_data(gguf, t),
                      (size_t)(t->dim[0] / n_values) * (size_t)n_bytes, tiles.rows, tiles.cols, 0,
                      es_tiles(tiles.rows), memory);
        tiles.data = memory;
        touch_packed(&tiles);
    }
    free(memory);
}

static void touch_tensor(const es_gguf *gguf, const es_gguf_tensor *t, bool is_packed)
{
    es_tensor tiles;
    bool found;
    if (es_gguf_find(gguf, t->name) != t) {
        abort();
    }
    touch(es_gguf_data(gguf, t), t->n_bytes);
    es_gguf_drop(gguf, t);
    es_status status = es_packed_tensor(gguf, t->name, &tiles, &found);
    if (is_packed && status != ES_OK) { /* the check found nothing wrong with it */
        abort();
    }
    if (status == ES_OK && found) {
        touch_packed(&tiles);
    }
    pack_matrix(gguf, t);
}

/* What the engine asks of a file before it packs anything. */
static void touch_shape(const es_gguf *gguf)
{
    es_shape shape;
    memset(&shape, 0, sizeof(shape));
    if (es_shape_read(gguf, &shape) == ES_OK) {
        int32_t n = es_slot_count(&shape), last = n - 1;
        for (int32_t i = 0; i < n; i = i < ITEMS || i == last ? i + 1 : last) {
            es_slot slot;
            es_slot_at(&shape, i, &slot);
            touch(&slot, sizeof(slot));
        }
        (void)es_slots_check(gguf, &shape);
        touch(es_shape_name(&shape), 1);
    }
    es_shape_clear(&shape);
}

static void touch_all(const es_gguf *gguf)
{
    bool is_packed = false;
    if (es_packed_check(gguf, &is_packed) != ES_OK) {
        is_packed = false;
    }
    for (size_t i = 0; i < es_gguf_key_count(gguf); i++) {
        touch_key(gguf, i);
    }
    for (size_t i = 0; i < es_gguf_tensor_count(gguf); i++) {
        touch_tensor(gguf, es_gguf_tensor_at(gguf, i), is_packed);
    }
    touch_shape(gguf);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    es_gguf *gguf = NULL;
    /* Ends where the input ends, begins where a mapping could. */
    void *memory = NULL;
    if (posix_memalign(&memory, 64, size > 0 ? size : 1) != 0) {
        return 0;
    }
    if (size > 0) {
        memcpy(memory, data, size);
    }
    if (es_gguf_parse(memory, size, "fuzz.gguf", &gguf) == ES_OK) {
        touch_all(gguf);
    } else if (es_error_message()[0] == 0) {
        abort();
    }
    es_gguf_free(gguf);
    free(memory);
    return 0;
}
