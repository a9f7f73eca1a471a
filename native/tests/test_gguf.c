/* Hostile GGUF files: cut at every byte, every byte and field changed, memory running out. What may
   be read afterwards is read, so that the sanitizers see it. */
#include "../fuzz/fuzz_gguf.c" /* LLVMFuzzerTestOneInput: parses and touches everything */

#include <stdio.h>

#include "alloc.h"
#include "check.h"

enum { MOST = 4096 };

typedef struct file {
    _Alignas(64) uint8_t data[MOST];
    size_t n;
} file;

static void put(file *f, const void *data, size_t n)
{
    CHECK(f->n + n <= MOST);
    memcpy(f->data + f->n, data, n);
    f->n += n;
}

static void put_number(file *f, uint64_t value, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++) {
        put(f, &(uint8_t){(uint8_t)(value >> 8 * i)}, 1);
    }
}

static void put_text(file *f, const char *text)
{
    put_number(f, strlen(text), 8);
    put(f, text, strlen(text));
}

static void put_key(file *f, const char *key, uint32_t kind, uint64_t value, size_t n_bytes)
{
    put_text(f, key);
    put_number(f, kind, 4);
    put_number(f, value, n_bytes);
}

static void put_array(file *f, const char *key, uint32_t kind, uint64_t n)
{
    put_key(f, key, 9, kind, 4);
    put_number(f, n, 8);
}

static void put_tensor(file *f, const char *name, int32_t type, uint64_t cols, uint64_t rows,
                       uint64_t offset)
{
    put_text(f, name);
    put_number(f, rows == 0 ? 1 : 2, 4);
    put_number(f, cols, 8);
    if (rows > 0) {
        put_number(f, rows, 8);
    }
    put_number(f, (uint32_t)type, 4);
    put_number(f, offset, 8);
}

static void begin(file *f, uint64_t n_tensors, uint64_t n_keys)
{
    f->n = 0;
    put(f, "GGUF", 4);
    put_number(f, 3, 4);
    put_number(f, n_tensors, 8);
    put_number(f, n_keys, 8);
}

static void end(file *f, size_t alignment, size_t n_data)
{
    while (f->n % alignment != 0) {
        put_number(f, 0, 1);
    }
    for (size_t i = 0; i < n_data; i++) {
        put_number(f, 37 * i, 1);
    }
}

/* Two matrices, a vector, every kind of value. */
static void plain_file(file *f)
{
    begin(f, 3, 7);
    put_key(f, "general.architecture", 8, 5, 8);
    put(f, "llama", 5);
    put_key(f, "a.bool", 7, 1, 1);
    put_key(f, "a.u64", 10, UINT64_MAX, 8);
    put_key(f, "a.f64", 12, UINT64_C(0x7fe0000000000000), 8);
    put_array(f, "a.strings", 8, 3);
    put_text(f, "one");
    put_text(f, "");
    put_text(f, "three");
    put_array(f, "a.i16", 3, 2);
    put_number(f, 0xfffe0007, 4);
    put_array(f, "a.nothing", 8, 0);
    put_tensor(f, "norm", ES_GGML_F32, 3, 0, 0);
    put_tensor(f, "q4_0", ES_GGML_Q4_0, 64, 2, 32);
    put_tensor(f, "q6_k", ES_GGML_Q6_K, 256, 1, 128);
    end(f, 32, 128 + 210);
}

/* One packed matrix and a vector. */
static void packed_file(file *f)
{
    begin(f, 2, 6);
    put_key(f, "general.alignment", 4, 64, 4);
    put_key(f, "edgespec.packed.version", 4, ES_PACKED_VERSION, 4);
    put_array(f, "edgespec.packed.names", 8, 2);
    put_text(f, "norm");
    put_text(f, "q4_0");
    put_array(f, "edgespec.packed.types", 5, 2);
    put_number(f, (uint32_t)-1, 4);
    put_number(f, ES_GGML_Q4_0, 4);
    put_array(f, "edgespec.packed.rows", 5, 2);
    put_number(f, 0, 4);
    put_number(f, 17, 4);
    put_array(f, "edgespec.packed.cols", 5, 2);
    put_number(f, 0, 4);
    put_number(f, 32, 4);
    put_tensor(f, "norm", ES_GGML_F32, 3, 0, 0);
    put_tensor(f, "q4_0", ES_GGML_I8, 640, 0, 64); /* 2 tiles of 288 bytes, rounded to 320 */
    end(f, 64, 64 + 640);
}

static es_status parse(const file *f)
{
    es_gguf *gguf = NULL;
    es_status status = es_gguf_parse(f->data, f->n, "test.gguf", &gguf);
    es_gguf_free(gguf);
    return status;
}

static void test_the_packed_file_is_one(const file *packed)
{
    es_gguf *gguf;
    es_tensor tiles;
    bool is_packed, found;
    CHECK(es_gguf_parse(packed->data, packed->n, "test.gguf", &gguf) == ES_OK);
    CHECK(es_packed_check(gguf, &is_packed) == ES_OK && is_packed);
    CHECK(es_packed_tensor(gguf, "q4_0", &tiles, &found) == ES_OK && found);
    CHECK(tiles.rows == 17 && tiles.cols == 32 && tiles.tile_bytes == 320);
    CHECK(es_packed_tensor(gguf, "norm", &tiles, &found) == ES_OK && !found);
    es_gguf_free(gguf);
}

static void test_c37_cut_at_every_byte(const file *whole)
{
    static file cut;
    CHECK(parse(whole) == ES_OK);
    for (size_t n = 0; n < whole->n; n++) {
        memcpy(cut.data, whole->data, n);
        cut.n = n;
        CHECK(parse(&cut) == ES_ERR_FORMAT);
        CHECK(strstr(es_error_message(), "test.gguf") != NULL);
        CHECK(LLVMFuzzerTestOneInput(cut.data, cut.n) == 0);
    }
}

/* Every byte set to values that turn lengths, counts and types into something else. */
static void test_every_byte_changed(const file *whole)
{
    static file changed;
    for (size_t at = 0; at < whole->n; at++) {
        for (int bit = 0; bit < 11; bit++) {
            changed = *whole;
            changed.data[at] = bit < 8 ? (uint8_t)(whole->data[at] ^ 1 << bit)
                                       : (uint8_t)(bit == 8 ? 0 : bit == 9 ? 0xff : 0x7f);
            CHECK(LLVMFuzzerTestOneInput(changed.data, changed.n) == 0);
        }
    }
}

/* Every place overwritten as if a count, offset, dimension or length stood there. */
static void test_c37_every_field_is_huge(const file *whole)
{
    static const uint64_t huge[] = {
        UINT64_C(1) << 62, UINT64_C(1) << 63, UINT64_MAX, INT64_MAX, UINT64_MAX - 31,
        UINT64_C(1) << 32, UINT32_MAX,        INT32_MAX,  0,         UINT64_C(1) << 58,
    };
    static file changed;
    for (size_t at = 4; at + 8 <= whole->n; at++) {
        for (size_t i = 0; i < sizeof(huge) / sizeof(huge[0]); i++) {
            changed = *whole;
            for (int j = 0; j < 8; j++) {
                changed.data[at + (size_t)j] = (uint8_t)(huge[i] >> 8 * j);
            }
            CHECK(LLVMFuzzerTestOneInput(changed.data, changed.n) == 0);
        }
    }
}

static void check_message(const file *f, const char *first, const char *second)
{
    CHECK(parse(f) == ES_ERR_FORMAT);
    if (strstr(es_error_message(), first) == NULL || strstr(es_error_message(), second) == NULL) {
        fprintf(stderr, "%s\n", es_error_message());
        CHECK(!"the message names what is wrong");
    }
}

static void test_messages_name_key_tensor_and_place(void)
{
    static file f;
    begin(&f, 0, 1);
    put_key(&f, "", 4, 1, 4); /* the 37 bytes that aborted another reader */
    put_number(&f, 0, 1);
    CHECK(f.n == 24 + 8 + 4 + 4 + 1);
    check_message(&f, "key number 0, at byte 24", "name of 0 bytes");

    begin(&f, 0, 2);
    put_key(&f, "twice", 4, 1, 4);
    put_key(&f, "twice", 5, 1, 4);
    check_message(&f, "key 'twice', at byte 45", "twice");

    begin(&f, 0, 1);
    put_key(&f, "bool", 7, 2, 1);
    check_message(&f, "key 'bool', at byte 40", "expected 0 or 1");

    begin(&f, 0, 1);
    put_array(&f, "nested", 9, 1);
    put_number(&f, 0, 8);
    put_number(&f, 0, 8);
    check_message(&f, "key 'nested'", "arrays of arrays");

    begin(&f, 0, 1);
    put_array(&f, "long", 8, UINT64_C(1) << 62);
    check_message(&f, "key 'long'", "4611686018427387904 strings");

    begin(&f, 0, 1);
    put_key(&f, "kind", 13, 0, 8);
    check_message(&f, "key 'kind'", "value type 13");

    begin(&f, 0, 1);
    put_key(&f, "general.alignment", 4, 48, 4);
    check_message(&f, "general.alignment", "power of two");

    begin(&f, 1, 0);
    put_tensor(&f, "wide", ES_GGML_F32, UINT64_C(1) << 40, UINT64_C(1) << 40, 0);
    check_message(&f, "tensor 'wide', at byte 40", "2^63");

    begin(&f, 1, 0);
    put_tensor(&f, "odd", ES_GGML_Q4_0, 33, 1, 0);
    end(&f, 32, 64);
    check_message(&f, "tensor 'odd'", "multiple of 32 for Q4_0");

    begin(&f, 1, 0);
    put_tensor(&f, "askew", ES_GGML_F32, 4, 1, 4);
    end(&f, 32, 64);
    check_message(&f, "tensor 'askew'", "offset 4 is not a multiple");

    begin(&f, 2, 0);
    put_tensor(&f, "same", ES_GGML_F32, 4, 1, 0);
    put_tensor(&f, "same", ES_GGML_F32, 4, 1, 32);
    end(&f, 32, 64);
    check_message(&f, "tensor 'same'", "twice");

    begin(&f, 2, 0);
    put_tensor(&f, "under", ES_GGML_F32, 16, 1, 0);
    put_tensor(&f, "over", ES_GGML_F32, 8, 1, 32);
    end(&f, 32, 64);
    check_message(&f, "tensor 'over'", "inside another");

    begin(&f, 1, 0);
    put_tensor(&f, "far", ES_GGML_F32, 8, 1, UINT64_MAX - 31);
    end(&f, 32, 64);
    check_message(&f, "tensor 'far'", "past the end");

    begin(&f, UINT64_C(1) << 62, 0);
    check_message(&f, "header, at byte 8", "number of tensors is 4611686018427387904");
}

static void test_hostile_names_are_printed_harmlessly(void)
{
    static file f;
    begin(&f, 1, 0);
    put_tensor(&f, "\033[2J\n%s%n\xff", ES_GGML_F32, 0, 1, 0);
    check_message(&f, "tensor '?[2J?%s%n?'", "dimension 0 is 0");
}

static void test_a_type_ggml_lacks_is_left_to_the_reader(void)
{
    static file f;
    es_gguf *gguf;
    begin(&f, 1, 0);
    put_tensor(&f, "new", 1000, 7, 3, 0);
    end(&f, 32, 0);
    CHECK(es_gguf_parse(f.data, f.n, "test.gguf", &gguf) == ES_OK);
    CHECK(es_gguf_find(gguf, "new")->type == 1000);
    CHECK(es_gguf_find(gguf, "new")->n_bytes == 0);
    CHECK(es_packed_save(gguf, NULL, 0, "never-written.gguf") == ES_ERR_UNSUPPORTED);
    CHECK(strstr(es_error_message(), "'new'") != NULL);
    es_gguf_free(gguf);
}

static void test_memory_runs_out(const file *whole)
{
    es_status status = ES_ERR_MEMORY;
    int failures = 0;
    for (long left = 0; status != ES_OK; left++) {
        es_test_alloc_left = left;
        status = parse(whole);
        es_test_alloc_left = -1;
        CHECK(status == ES_OK || status == ES_ERR_MEMORY);
        failures += status != ES_OK;
    }
    CHECK(failures >= 7);
}

static void write_file(const char *path, const file *f)
{
    FILE *out = fopen(path, "wb");
    CHECK(out != NULL && fwrite(f->data, 1, f->n, out) == f->n);
    CHECK(fclose(out) == 0);
}

#define FIRST "test_gguf-00001-of-00002.gguf" /* in the directory the test runs in */
#define SECOND "test_gguf-00002-of-00002.gguf"
#define TARGET "test_gguf.packed.gguf"

static void write_split(uint32_t number, const char *tensor, const char *path)
{
    static file f;
    begin(&f, 1, 3);
    put_key(&f, "split.no", 2, number, 2);
    put_key(&f, "split.count", 2, 2, 2);
    put_key(&f, "split.tensors.count", 5, 2, 4);
    put_tensor(&f, tensor, ES_GGML_F32, 4, 1, 0);
    end(&f, 32, 16);
    write_file(path, &f);
}

/* Opens the split model and writes it as one file. */
static es_status repack(void)
{
    es_gguf *gguf = NULL;
    es_status status = es_gguf_open(FIRST, true, &gguf);
    if (status == ES_OK) {
        status = es_packed_save(gguf, NULL, 0, TARGET);
    }
    es_gguf_free(gguf);
    return status;
}

static void test_memory_runs_out_over_a_split_model(void)
{
    es_status status = ES_ERR_MEMORY;
    int failures = 0;
    write_split(0, "one", FIRST);
    write_split(1, "two", SECOND);
    for (long left = 0; status != ES_OK; left++) {
        es_test_alloc_left = left;
        status = repack();
        es_test_alloc_left = -1;
        CHECK(status == ES_OK || status == ES_ERR_MEMORY);
        failures += status != ES_OK;
        CHECK((remove(TARGET) == 0) == (status == ES_OK));
    }
    CHECK(failures >= 16);
    CHECK(remove(FIRST) == 0 && remove(SECOND) == 0);
}

static void test_files_that_cannot_be_opened(void)
{
    es_gguf *gguf = NULL;
    for (int use_mmap = 0; use_mmap < 2; use_mmap++) {
        CHECK(es_gguf_open("/no/such/file.gguf", use_mmap, &gguf) == ES_ERR_IO);
        CHECK(strstr(es_error_message(), "/no/such/file.gguf") != NULL);
        CHECK(es_gguf_open("/", use_mmap, &gguf) == ES_ERR_IO);
        CHECK(es_gguf_open("/dev/null", use_mmap, &gguf) == ES_ERR_IO);
        CHECK(gguf == NULL);
    }
}

int main(void)
{
    static file plain, packed;
    plain_file(&plain);
    packed_file(&packed);
    test_the_packed_file_is_one(&packed);
    test_c37_cut_at_every_byte(&plain);
    test_c37_cut_at_every_byte(&packed);
    test_every_byte_changed(&plain);
    test_every_byte_changed(&packed);
    test_c37_every_field_is_huge(&plain);
    test_c37_every_field_is_huge(&packed);
    test_messages_name_key_tensor_and_place();
    test_hostile_names_are_printed_harmlessly();
    test_a_type_ggml_lacks_is_left_to_the_reader();
    test_memory_runs_out(&plain);
    test_memory_runs_out_over_a_split_model();
    test_files_that_cannot_be_opened();
    puts("ok");
    return 0;
}
