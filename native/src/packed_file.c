/* packed_file.c - reads and writes the container of packed weights. */
#if defined(__linux__)
#define _GNU_SOURCE /* fsync, fileno, O_CLOEXEC */
#endif

#include "packed_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "alloc.h"
#include "error.h"

#define PREFIX "edgespec.packed."
#define VERSION_KEY PREFIX "version"
#define NAMES_KEY PREFIX "names"
#define TYPES_KEY PREFIX "types"
#define ROWS_KEY PREFIX "rows"
#define COLS_KEY PREFIX "cols"
#define ALIGNMENT_KEY "general.alignment"

enum {
    ALIGNMENT = 64,
    NO_TILES = -1,
    GGUF_VERSION = 3,
    KIND_U32 = 4,   /* metadata types of GGUF */
    KIND_I32 = 5,
    KIND_STRING = 8,
    KIND_ARRAY = 9
};

/* ---- reading ------------------------------------------------------------------------------ */

static es_status read_version(const es_gguf *gguf, bool *is_packed)
{
    uint32_t version = 0;
    es_status status = es_gguf_u32(gguf, VERSION_KEY, &version, is_packed);
    if (status == ES_OK && *is_packed && version != ES_PACKED_VERSION) {
        return es_fail(ES_ERR_FORMAT, "%s: packed weights of version %" PRIu32 ", this library "
                       "reads version %d: make the file again from its source",
                       es_gguf_name(gguf), version, ES_PACKED_VERSION);
    }
    return status;
}

static es_status read_number(const es_gguf *gguf, const char *key, size_t index, int64_t least,
                             int32_t *out)
{
    int64_t value;
    es_status status = es_gguf_array_i64(gguf, key, index, &value);
    if (status == ES_OK && (value < least || value > INT32_MAX)) {
        return es_fail(ES_ERR_FORMAT, "%s: key '%s' has %" PRId64 " for tensor '%s', expected "
                       "%" PRId64 " to 2^31 - 1", es_gguf_name(gguf), key, value,
                       es_gguf_tensor_at(gguf, index)->name, least);
    }
    if (status == ES_OK) {
        *out = (int32_t)value;
    }
    return status;
}

static es_status check_tiles(const es_gguf *gguf, const es_gguf_tensor *t, const es_tensor *tiles)
{
    const char *path = es_gguf_name(gguf);
    if (tiles->tile_bytes == 0) {
        return es_fail(ES_ERR_FORMAT, "%s: tensor '%s': type %" PRId32 " with %" PRId32 " inputs "
                       "has no tiles", path, t->name, tiles->type, tiles->cols);
    }
    size_t n_tiles = (size_t)(tiles->rows - 1) / ES_TILE + 1;
    if (t->type != ES_GGML_I8 || t->n_dims != 1 || t->n_bytes / tiles->tile_bytes != n_tiles ||
        t->n_bytes % tiles->tile_bytes != 0) {
        return es_fail(ES_ERR_FORMAT, "%s: tensor '%s' at byte %" PRIu64 ": %zu bytes, expected "
                       "%zu tiles of %zu for %" PRId32 " x %" PRId32, path, t->name, t->offset,
                       t->n_bytes, n_tiles, tiles->tile_bytes, tiles->rows, tiles->cols);
    }
    if ((uintptr_t)tiles->data % ALIGNMENT != 0) {
        return es_fail(ES_ERR_FORMAT, "%s: tensor '%s' at byte %" PRIu64 ": expected a multiple "
                       "of %d", path, t->name, t->offset, ALIGNMENT);
    }
    return ES_OK;
}

/* Tensor number `index` of a file whose version is right. */
static es_status read_tiles(const es_gguf *gguf, size_t index, es_tensor *out, bool *found)
{
    const es_gguf_tensor *t = es_gguf_tensor_at(gguf, index);
    es_tensor tiles = {.data = es_gguf_data(gguf, t)};
    es_gguf_string name;
    *found = false;
    es_status status = es_gguf_array_str(gguf, NAMES_KEY, index, &name);
    if (status == ES_OK && (name.n != strlen(t->name) || memcmp(name.data, t->name, name.n) != 0)) {
        return es_fail(ES_ERR_FORMAT, "%s: key '" NAMES_KEY "' has another name for tensor '%s', "
                       "number %zu", es_gguf_name(gguf), t->name, index);
    }
    if (status == ES_OK) {
        status = read_number(gguf, TYPES_KEY, index, NO_TILES, &tiles.type);
    }
    if (status != ES_OK || tiles.type == NO_TILES) {
        return status;
    }
    status = read_number(gguf, ROWS_KEY, index, 1, &tiles.rows);
    if (status == ES_OK) {
        status = read_number(gguf, COLS_KEY, index, 1, &tiles.cols);
    }
    if (status == ES_OK) {
        tiles.tile_bytes = es_pack_tile_bytes(tiles.type, tiles.cols);
        status = check_tiles(gguf, t, &tiles);
    }
    if (status == ES_OK) {
        *out = tiles;
        *found = true;
    }
    return status;
}

es_status es_packed_check(const es_gguf *gguf, bool *is_packed)
{
    static const char *const arrays[] = {NAMES_KEY, TYPES_KEY, ROWS_KEY, COLS_KEY};
    size_t n = es_gguf_tensor_count(gguf), count = 0;
    es_status status = read_version(gguf, is_packed);
    if (status != ES_OK || !*is_packed) {
        return status;
    }
    for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
        status = es_gguf_array(gguf, arrays[i], &count, NULL);
        if (status == ES_OK && count != n) {
            return es_fail(ES_ERR_FORMAT, "%s: key '%s' has %zu items, expected one for each of "
                           "%zu tensors", es_gguf_name(gguf), arrays[i], count, n);
        }
        if (status != ES_OK) {
            return status;
        }
    }
    for (size_t i = 0; i < n && status == ES_OK; i++) {
        es_tensor tiles;
        bool found;
        status = read_tiles(gguf, i, &tiles, &found);
    }
    return status;
}

es_status es_packed_tensor(const es_gguf *gguf, const char *name, es_tensor *out, bool *found)
{
    bool is_packed;
    const es_gguf_tensor *t = es_gguf_find(gguf, name);
    es_status status = read_version(gguf, &is_packed);
    *found = false;
    if (status != ES_OK || !is_packed || t == NULL) {
        return status;
    }
    return read_tiles(gguf, (size_t)(t - es_gguf_tensor_at(gguf, 0)), out, found);
}

/* ---- writing ------------------------------------------------------------------------------ */

/* What is being written. The first failure stays in error; everything after it does nothing. */
typedef struct writer {
    FILE *file;
    uint64_t n_bytes;
    int error;
} writer;

static void put(writer *w, const void *data, size_t n_bytes)
{
    if (w->error == 0 && n_bytes > 0 && fwrite(data, 1, n_bytes, w->file) != n_bytes) {
        w->error = errno != 0 ? errno : EIO;
    }
    w->n_bytes += n_bytes;
}

static void put_number(writer *w, uint64_t value, size_t n_bytes)
{
    uint8_t bytes[8];
    for (size_t i = 0; i < n_bytes; i++) {
        bytes[i] = (uint8_t)(value >> 8 * i);
    }
    put(w, bytes, n_bytes);
}

static void put_text(writer *w, const char *text)
{
    put_number(w, strlen(text), 8);
    put(w, text, strlen(text));
}

static void pad(writer *w)
{
    static const uint8_t zeros[ALIGNMENT];
    put(w, zeros, (ALIGNMENT - w->n_bytes % ALIGNMENT) % ALIGNMENT);
}

static void put_u32(writer *w, const char *key, uint32_t value)
{
    put_text(w, key);
    put_number(w, KIND_U32, 4);
    put_number(w, value, 4);
}

static void put_array(writer *w, const char *key, uint32_t kind, size_t n)
{
    put_text(w, key);
    put_number(w, KIND_ARRAY, 4);
    put_number(w, kind, 4);
    put_number(w, n, 8);
}

/* Keys the packed file has in a form of its own, or has no use for: it is one file. */
static bool is_replaced(es_gguf_string name)
{
    static const char *const prefixes[] = {PREFIX, "split."};
    if (name.n == strlen(ALIGNMENT_KEY) && memcmp(name.data, ALIGNMENT_KEY, name.n) == 0) {
        return true;
    }
    for (size_t i = 0; i < sizeof(prefixes) / sizeof(prefixes[0]); i++) {
        size_t n = strlen(prefixes[i]);
        if (name.n >= n && memcmp(name.data, prefixes[i], n) == 0) {
            return true;
        }
    }
    return false;
}

static void put_metadata(writer *w, const es_gguf *source, const es_tensor *tiles)
{
    size_t n = es_gguf_tensor_count(source), n_keys = 0;
    es_gguf_string name, bytes;
    for (size_t i = 0; i < es_gguf_key_count(source); i++) {
        es_gguf_key_at(source, i, &name, &bytes);
        n_keys += !is_replaced(name);
    }
    put(w, "GGUF", 4);
    put_number(w, GGUF_VERSION, 4);
    put_number(w, n, 8);
    put_number(w, n_keys + 6, 8);
    for (size_t i = 0; i < es_gguf_key_count(source); i++) {
        es_gguf_key_at(source, i, &name, &bytes);
        if (!is_replaced(name)) {
            put(w, bytes.data, bytes.n);
        }
    }
    put_u32(w, ALIGNMENT_KEY, ALIGNMENT);
    put_u32(w, VERSION_KEY, ES_PACKED_VERSION);
    put_array(w, NAMES_KEY, KIND_STRING, n);
    for (size_t i = 0; i < n; i++) {
        put_text(w, es_gguf_tensor_at(source, i)->name);
    }
    put_array(w, TYPES_KEY, KIND_I32, n);
    for (size_t i = 0; i < n; i++) {
        put_number(w, (uint32_t)tiles[i].type, 4);
    }
    put_array(w, ROWS_KEY, KIND_I32, n);
    for (size_t i = 0; i < n; i++) {
        put_number(w, (uint32_t)tiles[i].rows, 4);
    }
    put_array(w, COLS_KEY, KIND_I32, n);
    for (size_t i = 0; i < n; i++) {
        put_number(w, (uint32_t)tiles[i].cols, 4);
    }
}

static size_t tensor_bytes(const es_gguf_tensor *t, const es_tensor *tiles)
{
    return tiles->type == NO_TILES ? t->n_bytes
                                   : (size_t)es_tiles(tiles->rows) * tiles->tile_bytes;
}

static void put_tensors(writer *w, const es_gguf *source, const es_tensor *tiles)
{
    size_t n = es_gguf_tensor_count(source);
    uint64_t offset = 0;
    for (size_t i = 0; i < n; i++) {
        const es_gguf_tensor *t = es_gguf_tensor_at(source, i);
        size_t n_bytes = tensor_bytes(t, &tiles[i]);
        bool is_flat = tiles[i].type != NO_TILES;
        put_text(w, t->name);
        put_number(w, is_flat ? 1 : (uint64_t)t->n_dims, 4);
        for (int32_t j = 0; j < (is_flat ? 1 : t->n_dims); j++) {
            put_number(w, is_flat ? (uint64_t)n_bytes : (uint64_t)t->dim[j], 8);
        }
        put_number(w, is_flat ? ES_GGML_I8 : (uint64_t)t->type, 4);
        put_number(w, offset, 8);
        offset += ((uint64_t)n_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    pad(w);
    for (size_t i = 0; i < n; i++) {
        const es_gguf_tensor *t = es_gguf_tensor_at(source, i);
        const uint8_t *data = tiles[i].type == NO_TILES ? es_gguf_data(source, t) : tiles[i].data;
        put(w, data, tensor_bytes(t, &tiles[i]));
        pad(w);
    }
}

/* Per tensor of the source its tiles, type NO_TILES where it is copied. */
static es_status list_tiles(const es_gguf *source, const es_packed_matrix *matrices, size_t n,
                            es_tensor *tiles)
{
    const es_gguf_tensor *first = es_gguf_tensor_at(source, 0);
    for (size_t i = 0; i < es_gguf_tensor_count(source); i++) {
        bool found = false;
        es_status status = es_packed_tensor(source, first[i].name, &tiles[i], &found);
        if (status != ES_OK) {
            return status;
        }
        if (!found) {
            tiles[i] = (es_tensor){.type = NO_TILES};
        }
    }
    for (size_t i = 0; i < n; i++) {
        const es_gguf_tensor *t = es_gguf_find(source, matrices[i].name);
        if (t == NULL) {
            return es_fail(ES_ERR_ARGUMENT, "%s: there is no tensor '%s' to store as tiles",
                           es_gguf_name(source), matrices[i].name);
        }
        tiles[t - first] = matrices[i].tensor;
    }
    for (size_t i = 0; i < es_gguf_tensor_count(source); i++) {
        if (tiles[i].type == NO_TILES && first[i].n_bytes == 0) {
            return es_fail(ES_ERR_UNSUPPORTED, "%s: tensor '%s' is of type %" PRId32 ", whose size "
                           "is not known", es_gguf_name(source), first[i].name, first[i].type);
        }
    }
    return ES_OK;
}

static es_status fail_write(const char *path, int error)
{
    return es_fail(ES_ERR_IO, "%s: cannot be written: %s", path, strerror(error));
}

/* Opens a file of a new name in the directory of `path`, hidden, as .NAME.PID.I.part. */
static int create_beside(const char *path, char *part, size_t size)
{
    const char *slash = strrchr(path, '/'), *name = slash == NULL ? path : slash + 1;
    for (int i = 0; i < 100; i++) {
        snprintf(part, size, "%.*s.%s.%ld.%d.part", (int)(name - path), path, name, (long)getpid(),
                 i);
        int fd = open(part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd >= 0 || errno != EEXIST) {
            return fd;
        }
    }
    return -1;
}

/* After a crash the directory must know the new name too; a file system that cannot promise it is
   no reason to fail. */
static void sync_directory(const char *path, char *part, size_t size)
{
    const char *slash = strrchr(path, '/');
    snprintf(part, size, "%.*s", slash == NULL ? 1 : (int)(slash - path) + 1,
             slash == NULL ? "." : path);
    int fd = open(part, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        (void)fsync(fd);
        close(fd);
    }
}

static es_status write_part(const es_gguf *source, const es_tensor *tiles, const char *path,
                            char *part, size_t size)
{
    int fd = create_beside(path, part, size);
    if (fd < 0) {
        return fail_write(path, errno);
    }
    writer w = {.file = fdopen(fd, "wb")};
    if (w.file == NULL) {
        w.error = errno;
        close(fd);
    } else {
        put_metadata(&w, source, tiles);
        put_tensors(&w, source, tiles);
        if (w.error == 0 && (fflush(w.file) != 0 || fsync(fd) != 0)) {
            w.error = errno;
        }
        if (fclose(w.file) != 0 && w.error == 0) {
            w.error = errno;
        }
    }
    if (w.error == 0 && rename(part, path) != 0) {
        w.error = errno;
    }
    if (w.error != 0) {
        unlink(part);
        return fail_write(path, w.error);
    }
    sync_directory(path, part, size);
    return ES_OK;
}

es_status es_packed_save(const es_gguf *source, const es_packed_matrix *matrices, size_t n,
                         const char *path)
{
    size_t size = strlen(path) + 64;
    es_tensor *tiles = es_malloc((es_gguf_tensor_count(source) + 1) * sizeof(*tiles));
    char *part = es_malloc(size);
    es_status status;
    if (tiles == NULL || part == NULL) {
        status = es_fail(ES_ERR_MEMORY, "out of memory: writing %s", path);
    } else {
        status = list_tiles(source, matrices, n, tiles);
        if (status == ES_OK) {
            status = write_part(source, tiles, path, part, size);
        }
    }
    es_free(tiles);
    es_free(part);
    return status;
}
