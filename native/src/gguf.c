/*
 * gguf.c - reads GGUF version 2 and 3, little-endian (the specification is docs/gguf.md of ggml).
 *
 * A file is hostile until shown otherwise: every length is compared with what is left of the file
 * before it is believed, memory grows with the bytes that are there and never with a number some
 * header claims, and names are sorted, not hashed, so that no choice of names makes look-ups slow.
 */
#include "gguf_file.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "blocks.h"
#include "error.h"

enum {
    DEFAULT_ALIGNMENT = 32,
    MAX_KEY = 65535,      /* bytes, by the specification */
    MAX_NAME = 64,        /* of a tensor, likewise */
    MAX_DIMS = 4,
    LEAST_KEY = 13,       /* bytes of the shortest entry: length, type, a name and a value */
    LEAST_TENSOR = 33,
    MAX_PARTS = 99999     /* five digits */
};

const es_gguf_kind es_gguf_kinds[N_KINDS] = {
    [U8] = {"uint8", 1},     [I8] = {"int8", 1},   [U16] = {"uint16", 2}, [I16] = {"int16", 2},
    [U32] = {"uint32", 4},   [I32] = {"int32", 4}, [F32] = {"float32", 4}, [BOOL] = {"bool", 1},
    [STRING] = {"string", 0}, [ARRAY] = {"array", 0}, [U64] = {"uint64", 8},
    [I64] = {"int64", 8},    [F64] = {"float64", 8},
};

/* ---- messages ----------------------------------------------------------------------------- */

const char *es_shown_path(const char *path)
{
    size_t n = strlen(path), most = 200;
    return n > most ? path + (n - most) : path;
}

/* A name from the file as printable ASCII. */
static const char *shown(es_gguf_string name, char out[MAX_NAME + 4])
{
    size_t n = name.n < MAX_NAME ? name.n : MAX_NAME;
    for (size_t i = 0; i < n; i++) {
        out[i] = name.data[i] >= 0x20 && name.data[i] < 0x7f ? name.data[i] : '?';
    }
    strcpy(out + n, n < name.n ? "..." : "");
    return out;
}

/* What is being read, for messages; the place moves on as it is read. */
typedef struct reader {
    const es_gguf *gguf;
    size_t at;
    const char *subject;         /* "header", "key", "tensor" */
    es_gguf_string name;         /* n == 0: not known yet */
    size_t index;
} reader;

static es_status spoiled(const reader *r, size_t at, const char *format, ...) ES_PRINTF(3, 4);

static es_status spoiled(const reader *r, size_t at, const char *format, ...)
{
    char detail[192], name[MAX_NAME + 4], subject[128];
    va_list args;
    va_start(args, format);
    vsnprintf(detail, sizeof(detail), format, args);
    va_end(args);
    if (r->name.n > 0) {
        snprintf(subject, sizeof(subject), "%s '%s'", r->subject, shown(r->name, name));
    } else if (strcmp(r->subject, "header") == 0) {
        snprintf(subject, sizeof(subject), "header");
    } else {
        snprintf(subject, sizeof(subject), "%s number %zu", r->subject, r->index);
    }
    return es_fail(ES_ERR_FORMAT, "%s: %s, at byte %zu: %s", es_shown_path(r->gguf->path),
                   subject, at, detail);
}

/* ---- primitive reads ---------------------------------------------------------------------- */

uint64_t es_little_endian(const uint8_t *p, size_t n_bytes)
{
    uint64_t value = 0;
    for (size_t i = 0; i < n_bytes; i++) {
        value |= (uint64_t)p[i] << (8 * i);
    }
    return value;
}

static size_t left(const reader *r)
{
    return r->gguf->bytes.n_bytes - r->at;
}

static es_status take(reader *r, size_t n_bytes, const char *what, uint64_t *out)
{
    *out = 0;
    if (left(r) < n_bytes) {
        return spoiled(r, r->at, "the file ends inside its %s", what);
    }
    *out = es_little_endian(r->gguf->bytes.data + r->at, n_bytes);
    r->at += n_bytes;
    return ES_OK;
}

static es_status take_string(reader *r, const char *what, es_gguf_string *out)
{
    uint64_t n;
    size_t start = r->at;
    es_status status = take(r, 8, what, &n);
    if (status != ES_OK) {
        return status;
    }
    if (n > left(r)) {
        return spoiled(r, start, "%s of %" PRIu64 " bytes, but only %zu are left in the file",
                       what, n, left(r));
    }
    *out = (es_gguf_string){(const char *)r->gguf->bytes.data + r->at, (size_t)n};
    r->at += (size_t)n;
    return ES_OK;
}

/* A name is looked up as a C string: not empty, no NUL inside. */
static es_status take_name(reader *r, size_t most, es_gguf_string *out)
{
    size_t start = r->at;
    es_status status = take_string(r, "name", out);
    if (status != ES_OK) {
        return status;
    }
    if (out->n == 0 || out->n > most) {
        return spoiled(r, start, "name of %zu bytes, expected 1 to %zu", out->n, most);
    }
    if (memchr(out->data, 0, out->n) != NULL) {
        return spoiled(r, start, "its name has a NUL in it");
    }
    r->name = *out;
    return ES_OK;
}

/* ---- names -------------------------------------------------------------------------------- */

static int compare_names(es_gguf_string a, es_gguf_string b)
{
    int order = memcmp(a.data, b.data, a.n < b.n ? a.n : b.n);
    return order != 0 ? order : (a.n > b.n) - (a.n < b.n);
}

static int compare_labels(const void *a, const void *b)
{
    const label *left_label = a, *right_label = b;
    int order = compare_names(left_label->name, right_label->name);
    return order != 0 ? order
                      : (left_label->index > right_label->index) -
                            (left_label->index < right_label->index);
}

/* Sorts; returns the later one of two equal names, or NULL. */
static const label *sort_labels(label *labels, size_t n)
{
    if (n > 0) {
        qsort(labels, n, sizeof(*labels), compare_labels);
    }
    for (size_t i = 1; i < n; i++) {
        if (compare_names(labels[i - 1].name, labels[i].name) == 0) {
            return &labels[i];
        }
    }
    return NULL;
}

const label *es_gguf_find_label(const label *labels, size_t n, const char *name)
{
    es_gguf_string wanted = {name, strlen(name)};
    size_t low = 0, high = n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = compare_names(labels[middle].name, wanted);
        if (order == 0) {
            return &labels[middle];
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return NULL;
}

/* ---- metadata ----------------------------------------------------------------------------- */

static es_status check_bools(const reader *r, const uint8_t *value, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        if (value[i] > 1) {
            return spoiled(r, (size_t)(value + i - r->gguf->bytes.data),
                           "a bool is %d, expected 0 or 1", value[i]);
        }
    }
    return ES_OK;
}

static es_status read_strings(reader *r, entry *e)
{
    es_gguf_string item;
    if (e->count > left(r) / 8) {
        return spoiled(r, r->at, "%" PRIu64 " strings, but only %zu bytes are left in the file",
                       e->count, left(r));
    }
    if (e->is_array && e->count > 0) {
        e->mark = es_malloc((size_t)((e->count - 1) / MARK_EVERY + 1) * sizeof(*e->mark));
        if (e->mark == NULL) {
            return es_fail(ES_ERR_MEMORY, "out of memory: metadata of %s", r->gguf->path);
        }
    }
    for (uint64_t i = 0; i < e->count; i++) {
        if (e->mark != NULL && i % MARK_EVERY == 0) {
            e->mark[i / MARK_EVERY] = r->gguf->bytes.data + r->at;
        }
        es_status status = take_string(r, "string", &item);
        if (status != ES_OK) {
            return status;
        }
    }
    return ES_OK;
}

static es_status read_kind(reader *r, const char *what, uint32_t *out)
{
    uint64_t kind;
    size_t start = r->at;
    es_status status = take(r, 4, what, &kind);
    if (status != ES_OK) {
        return status;
    }
    if (kind >= N_KINDS) {
        return spoiled(r, start, "%s %" PRIu64 ", expected 0 to %d", what, kind, N_KINDS - 1);
    }
    *out = (uint32_t)kind;
    return ES_OK;
}

static es_status read_entry(reader *r, entry *e)
{
    size_t start = r->at;
    es_status status = take_name(r, MAX_KEY, &e->name);
    if (status == ES_OK) {
        status = read_kind(r, "value type", &e->kind);
    }
    e->count = 1;
    if (status == ES_OK && e->kind == ARRAY) {
        e->is_array = true;
        size_t at = r->at;
        status = read_kind(r, "item type", &e->kind);
        if (status == ES_OK && e->kind == ARRAY) {
            return spoiled(r, at, "arrays of arrays are not supported");
        }
        if (status == ES_OK) {
            status = take(r, 8, "array length", &e->count);
        }
    }
    if (status != ES_OK) {
        return status;
    }
    e->value = r->gguf->bytes.data + r->at;
    if (e->kind == STRING) {
        status = read_strings(r, e);
    } else {
        size_t n_bytes = es_gguf_kinds[e->kind].n_bytes;
        if (e->count > left(r) / n_bytes) {
            return spoiled(r, r->at, "%" PRIu64 " values of %zu bytes, but only %zu bytes are left "
                           "in the file", e->count, n_bytes, left(r));
        }
        r->at += (size_t)e->count * n_bytes;
        if (e->kind == BOOL) {
            status = check_bools(r, e->value, e->count);
        }
    }
    e->bytes = (es_gguf_string){(const char *)r->gguf->bytes.data + start, r->at - start};
    return status;
}

static es_status read_entries(es_gguf *gguf, reader *r)
{
    gguf->entries = es_calloc(gguf->n_entries + 1, sizeof(*gguf->entries));
    gguf->keys = es_malloc((gguf->n_entries + 1) * sizeof(*gguf->keys));
    if (gguf->entries == NULL || gguf->keys == NULL) {
        return es_fail(ES_ERR_MEMORY, "out of memory: metadata of %s", gguf->path);
    }
    r->subject = "key";
    for (size_t i = 0; i < gguf->n_entries; i++) {
        r->index = i;
        r->name.n = 0;
        es_status status = read_entry(r, &gguf->entries[i]);
        if (status != ES_OK) {
            return status;
        }
        gguf->keys[i] = (label){gguf->entries[i].name, i};
    }
    const label *twice = sort_labels(gguf->keys, gguf->n_entries);
    if (twice != NULL) {
        const entry *e = &gguf->entries[twice->index];
        r->name = e->name;
        return spoiled(r, (size_t)(e->bytes.data - (const char *)gguf->bytes.data),
                       "the key is there twice");
    }
    return ES_OK;
}

/* ---- tensors ------------------------------------------------------------------------------ */

static es_status tensor_bytes(const reader *r, size_t at, es_gguf_tensor *t)
{
    int32_t n_values, n_bytes;
    uint64_t count = 1;
    for (int32_t i = 0; i < t->n_dims; i++) {
        if ((uint64_t)t->dim[i] > INT64_MAX / count) {
            return spoiled(r, at, "its dimensions multiply to more than 2^63 values");
        }
        count *= (uint64_t)t->dim[i];
    }
    if (!es_ggml_type_shape(t->type, &n_values, &n_bytes)) {
        t->n_bytes = 0;
        return ES_OK;
    }
    if (t->dim[0] % n_values != 0) {
        return spoiled(r, at, "rows of %" PRId64 " values, expected a multiple of %d for %s",
                       t->dim[0], n_values, es_ggml_type_name(t->type));
    }
    count /= (uint64_t)n_values;
    if (count > SIZE_MAX / (size_t)n_bytes) {
        return spoiled(r, at, "its size overflows");
    }
    t->n_bytes = (size_t)count * (size_t)n_bytes;
    return ES_OK;
}

static es_status read_tensor(reader *r, es_gguf_tensor *t, es_gguf_string *name)
{
    uint64_t value;
    es_status status = take_name(r, MAX_NAME, name);
    if (status != ES_OK) {
        return status;
    }
    size_t at = r->at;
    status = take(r, 4, "number of dimensions", &value);
    if (status != ES_OK) {
        return status;
    }
    if (value < 1 || value > MAX_DIMS) {
        return spoiled(r, at, "%" PRIu64 " dimensions, expected 1 to %d", value, MAX_DIMS);
    }
    t->n_dims = (int32_t)value;
    at = r->at;
    for (int32_t i = 0; i < MAX_DIMS; i++) {
        t->dim[i] = 1;
        if (i >= t->n_dims) {
            continue;
        }
        status = take(r, 8, "dimensions", &value);
        if (status != ES_OK) {
            return status;
        }
        if (value < 1 || value > INT64_MAX) {
            return spoiled(r, r->at - 8, "dimension %d is %" PRIu64 ", expected 1 or more", i,
                           value);
        }
        t->dim[i] = (int64_t)value;
    }
    status = take(r, 4, "type", &value);
    if (status != ES_OK) {
        return status;
    }
    if (value > INT32_MAX) {
        return spoiled(r, r->at - 4, "type %" PRIu64 " does not exist", value);
    }
    t->type = (int32_t)value;
    status = tensor_bytes(r, at, t);
    return status == ES_OK ? take(r, 8, "offset", &t->offset) : status;
}

/* Where a tensor was described, for messages about it once all are read. */
static es_status spoiled_tensor(const reader *r, const es_gguf_tensor *t, const char *what)
{
    reader about = *r;
    about.name = (es_gguf_string){t->name, strlen(t->name)};
    return spoiled(&about, (size_t)t->offset, "%s", what);
}

static es_status place_tensors(es_gguf *gguf, const reader *r, uint32_t alignment)
{
    size_t start = (r->at + (size_t)alignment - 1) / alignment * alignment;
    for (size_t i = 0; i < gguf->n_tensors; i++) {
        es_gguf_tensor *t = &gguf->tensors[i];
        reader about = *r;
        about.name = (es_gguf_string){t->name, strlen(t->name)};
        if (t->offset % alignment != 0) {
            return spoiled(&about, r->at, "offset %" PRIu64 " is not a multiple of the alignment "
                           "%" PRIu32, t->offset, alignment);
        }
        size_t n_bytes = gguf->bytes.n_bytes;
        if (start > n_bytes || t->offset > n_bytes - start ||
            t->n_bytes > n_bytes - start - (size_t)t->offset) {
            return spoiled(&about, start, "%zu bytes at offset %" PRIu64 " of the data that begin "
                           "here reach past the end of the file (%zu bytes): it is cut short or "
                           "damaged", t->n_bytes, t->offset, n_bytes);
        }
        t->offset += start;
    }
    return ES_OK;
}

typedef struct extent {
    uint64_t begin, end;
    size_t index;
} extent;

static int compare_extents(const void *a, const void *b)
{
    const extent *left_extent = a, *right_extent = b;
    return (left_extent->begin > right_extent->begin) - (left_extent->begin < right_extent->begin);
}

/* Else a small file could name the same bytes a million times and ask for all the memory. */
static es_status check_overlap(const es_gguf *gguf, const reader *r)
{
    extent *extents = es_malloc((gguf->n_tensors + 1) * sizeof(*extents));
    es_status status = ES_OK;
    size_t n = 0;
    if (extents == NULL) {
        return es_fail(ES_ERR_MEMORY, "out of memory: tensors of %s", gguf->path);
    }
    for (size_t i = 0; i < gguf->n_tensors; i++) {
        const es_gguf_tensor *t = &gguf->tensors[i];
        if (t->n_bytes > 0) {
            extents[n++] = (extent){t->offset, t->offset + t->n_bytes, i};
        }
    }
    if (n > 0) {
        qsort(extents, n, sizeof(*extents), compare_extents);
    }
    for (size_t i = 1; i < n && status == ES_OK; i++) {
        if (extents[i].begin < extents[i - 1].end) {
            status = spoiled_tensor(r, &gguf->tensors[extents[i].index],
                                    "begins inside another tensor");
        }
    }
    es_free(extents);
    return status;
}

static es_status read_tensors(es_gguf *gguf, reader *r)
{
    size_t n = gguf->n_tensors, used = 0, n_chars = 0;
    uint32_t alignment = DEFAULT_ALIGNMENT;
    gguf->tensors = es_calloc(n + 1, sizeof(*gguf->tensors));
    gguf->names = es_malloc((n + 1) * sizeof(*gguf->names));
    if (gguf->tensors == NULL || gguf->names == NULL) {
        return es_fail(ES_ERR_MEMORY, "out of memory: tensors of %s", gguf->path);
    }
    r->subject = "tensor";
    for (size_t i = 0; i < n; i++) {
        r->index = i;
        r->name.n = 0;
        gguf->names[i].index = i;
        es_status status = read_tensor(r, &gguf->tensors[i], &gguf->names[i].name);
        if (status != ES_OK) {
            return status;
        }
        n_chars += gguf->names[i].name.n + 1;
    }
    gguf->pool = es_malloc(n_chars + 1);
    if (gguf->pool == NULL) {
        return es_fail(ES_ERR_MEMORY, "out of memory: tensors of %s", gguf->path);
    }
    for (size_t i = 0; i < n; i++) {
        es_gguf_string *name = &gguf->names[i].name;
        memcpy(gguf->pool + used, name->data, name->n);
        gguf->pool[used + name->n] = 0;
        name->data = gguf->tensors[i].name = gguf->pool + used;
        used += name->n + 1;
    }
    const label *twice = sort_labels(gguf->names, n);
    if (twice != NULL) {
        return spoiled_tensor(r, &gguf->tensors[twice->index], "the tensor is there twice");
    }
    es_status status = es_gguf_u32(gguf, "general.alignment", &alignment, &(bool){false});
    if (status != ES_OK) {
        return status;
    }
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        return es_fail(ES_ERR_FORMAT, "%s: key 'general.alignment' is %" PRIu32
                       ", expected a power of two", es_shown_path(gguf->path), alignment);
    }
    status = place_tensors(gguf, r, alignment);
    return status == ES_OK ? check_overlap(gguf, r) : status;
}

/* ---- one file ----------------------------------------------------------------------------- */

static es_status read_count(reader *r, const char *what, size_t least, size_t *out)
{
    uint64_t count;
    size_t start = r->at;
    es_status status = take(r, 8, what, &count);
    if (status != ES_OK) {
        return status;
    }
    if (count > r->gguf->bytes.n_bytes / least) {
        return spoiled(r, start, "%s is %" PRIu64 ", more than %zu bytes hold", what, count,
                       r->gguf->bytes.n_bytes);
    }
    *out = (size_t)count;
    return ES_OK;
}

static es_status read_file(es_gguf *gguf)
{
    reader r = {.gguf = gguf, .subject = "header"};
    uint64_t version;
    if (gguf->bytes.n_bytes < 4 || memcmp(gguf->bytes.data, "GGUF", 4) != 0) {
        char name[MAX_NAME + 4];
        es_gguf_string start = {(const char *)gguf->bytes.data,
                                gguf->bytes.n_bytes < 16 ? gguf->bytes.n_bytes : 16};
        return es_fail(ES_ERR_FORMAT, "%s: is not a GGUF file: it begins with '%s' (%zu bytes)",
                       es_shown_path(gguf->path), shown(start, name), gguf->bytes.n_bytes);
    }
    r.at = 4;
    es_status status = take(&r, 4, "version", &version);
    if (status == ES_OK && (version & 0xffff) == 0) {
        return spoiled(&r, 4, "a big-endian file, expected little-endian");
    }
    if (status == ES_OK && version != 2 && version != 3) {
        return spoiled(&r, 4, "GGUF version %" PRIu64 ", expected 2 or 3", version);
    }
    if (status == ES_OK) {
        status = read_count(&r, "number of tensors", LEAST_TENSOR, &gguf->n_tensors);
    }
    if (status == ES_OK) {
        status = read_count(&r, "number of keys", LEAST_KEY, &gguf->n_entries);
    }
    if (status == ES_OK) {
        status = read_entries(gguf, &r);
    }
    return status == ES_OK ? read_tensors(gguf, &r) : status;
}

static char *copy_text(const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = es_malloc(n);
    if (copy != NULL) {
        memcpy(copy, text, n);
    }
    return copy;
}

/* Takes the mapping over, also when it fails. */
static es_status open_mapping(es_mapping mapping, const char *path, es_gguf **out)
{
    es_status status = ES_OK;
    es_gguf *gguf = es_calloc(1, sizeof(*gguf));
    char *copy = copy_text(path);
    if (gguf == NULL || copy == NULL) {
        es_free(gguf);
        es_free(copy);
        es_mapping_close(&mapping);
        return es_fail(ES_ERR_MEMORY, "out of memory: opening %s", path);
    }
    gguf->path = copy;
    gguf->bytes = mapping;
    status = read_file(gguf);
    if (status != ES_OK) {
        es_gguf_free(gguf);
        return status;
    }
    *out = gguf;
    return ES_OK;
}

es_status es_gguf_parse(const void *data, size_t n_bytes, const char *name, es_gguf **out)
{
    /* Borrowed memory is never written to. */
    es_mapping mapping = {(uint8_t *)(uintptr_t)data, n_bytes, ES_MAPPING_BORROWED};
    return open_mapping(mapping, name, out);
}

void es_gguf_free(es_gguf *gguf)
{
    if (gguf == NULL) {
        return;
    }
    for (size_t i = 0; i < gguf->n_parts; i++) {
        es_gguf_free(gguf->parts[i]);
    }
    if (gguf->entries != NULL) {
        for (size_t i = 0; i < gguf->n_entries; i++) {
            es_free(gguf->entries[i].mark);
        }
    }
    es_free(gguf->parts);
    es_free(gguf->entries);
    es_free(gguf->keys);
    es_free(gguf->tensors);
    es_free(gguf->names);
    es_free(gguf->pool);
    es_free(gguf->path);
    es_mapping_close(&gguf->bytes);
    es_free(gguf);
}

/* ---- split models ------------------------------------------------------------------------- */

/* Tensors of all parts as one list, sorted anew. */
static es_status merge_parts(es_gguf *gguf)
{
    size_t n = gguf->n_tensors, at = gguf->n_tensors;
    for (size_t i = 0; i < gguf->n_parts; i++) {
        n += gguf->parts[i]->n_tensors;
    }
    es_gguf_tensor *tensors = es_malloc((n + 1) * sizeof(*tensors));
    label *names = es_malloc((n + 1) * sizeof(*names));
    if (tensors == NULL || names == NULL) {
        es_free(tensors);
        es_free(names);
        return es_fail(ES_ERR_MEMORY, "out of memory: tensors of %s", gguf->path);
    }
    memcpy(tensors, gguf->tensors, gguf->n_tensors * sizeof(*tensors));
    for (size_t i = 0; i < gguf->n_parts; i++) {
        const es_gguf *part = gguf->parts[i];
        for (size_t j = 0; j < part->n_tensors; j++) {
            tensors[at] = part->tensors[j];
            tensors[at++].part = (int32_t)i + 1;
        }
    }
    for (size_t i = 0; i < n; i++) {
        names[i] = (label){{tensors[i].name, strlen(tensors[i].name)}, i};
    }
    es_free(gguf->tensors);
    es_free(gguf->names);
    gguf->tensors = tensors;
    gguf->names = names;
    gguf->n_tensors = n;
    const label *twice = sort_labels(names, n);
    if (twice != NULL) {
        return es_fail(ES_ERR_FORMAT, "%s: tensor '%s' is in two of the files of this model",
                       es_shown_path(gguf->path), tensors[twice->index].name);
    }
    return ES_OK;
}

static es_status check_split(const es_gguf *part, uint32_t number, uint32_t count)
{
    uint32_t got_number = 0, got_count = 0;
    es_status status = es_gguf_u32(part, "split.no", &got_number, NULL);
    if (status == ES_OK) {
        status = es_gguf_u32(part, "split.count", &got_count, NULL);
    }
    if (status == ES_OK && (got_number != number || got_count != count)) {
        return es_fail(ES_ERR_FORMAT, "%s: calls itself file %" PRIu64 " of %" PRIu32
                       ", expected file %" PRIu32 " of %" PRIu32, es_shown_path(part->path),
                       (uint64_t)got_number + 1, got_count, number + 1, count);
    }
    return status;
}

/* "-00001-of-00003.gguf" */
enum { SPLIT_TAIL = 20 };

static void split_tail(uint32_t number, uint32_t count, char out[SPLIT_TAIL + 16])
{
    snprintf(out, SPLIT_TAIL + 16, "-%05" PRIu32 "-of-%05" PRIu32 ".gguf", number, count);
}

static es_status open_parts(es_gguf *gguf, uint32_t count, bool use_mmap)
{
    char tail[SPLIT_TAIL + 16];
    size_t n = strlen(gguf->path);
    split_tail(1, count, tail);
    if (count > MAX_PARTS || n < SPLIT_TAIL || strcmp(gguf->path + n - SPLIT_TAIL, tail) != 0) {
        return es_fail(ES_ERR_FORMAT, "%s: one of %" PRIu32 " files of a split model: open the "
                       "first, whose name ends in -00001-of-%05" PRIu32 ".gguf, with the others "
                       "beside it", es_shown_path(gguf->path), count, count);
    }
    es_status status = check_split(gguf, 0, count);
    if (status != ES_OK) {
        return status;
    }
    char *path = copy_text(gguf->path);
    gguf->parts = es_calloc(count, sizeof(*gguf->parts));
    if (path == NULL || gguf->parts == NULL) {
        es_free(path);
        return es_fail(ES_ERR_MEMORY, "out of memory: opening %s", gguf->path);
    }
    for (uint32_t i = 1; i < count && status == ES_OK; i++) {
        es_mapping mapping;
        split_tail(i + 1, count, tail);
        memcpy(path + n - SPLIT_TAIL, tail, SPLIT_TAIL);
        status = es_mapping_open(path, use_mmap, &mapping);
        if (status == ES_OK) {
            status = open_mapping(mapping, path, &gguf->parts[gguf->n_parts]);
        }
        if (status == ES_OK) {
            status = check_split(gguf->parts[gguf->n_parts++], i, count);
        }
    }
    es_free(path);
    return status == ES_OK ? merge_parts(gguf) : status;
}

static es_status check_split_tensors(const es_gguf *gguf)
{
    uint32_t n = 0;
    bool found;
    es_status status = es_gguf_u32(gguf, "split.tensors.count", &n, &found);
    if (status == ES_OK && found && n != gguf->n_tensors) {
        return es_fail(ES_ERR_FORMAT, "%s: key 'split.tensors.count' is %" PRIu32
                       ", the files have %zu tensors", es_shown_path(gguf->path), n,
                       gguf->n_tensors);
    }
    return status;
}

es_status es_gguf_open(const char *path, bool use_mmap, es_gguf **out)
{
    es_mapping mapping;
    es_gguf *gguf = NULL;
    uint32_t count = 1;
    es_status status = es_mapping_open(path, use_mmap, &mapping);
    if (status == ES_OK) {
        status = open_mapping(mapping, path, &gguf);
    }
    if (status == ES_OK) {
        status = es_gguf_u32(gguf, "split.count", &count, &(bool){false});
    }
    if (status == ES_OK && count > 1) {
        status = open_parts(gguf, count, use_mmap);
    }
    if (status == ES_OK && count > 1) {
        status = check_split_tensors(gguf);
    }
    if (status != ES_OK) {
        es_gguf_free(gguf);
        return status;
    }
    *out = gguf;
    return ES_OK;
}

/* ---- tensors, for readers ------------------------------------------------------------------ */

const char *es_gguf_name(const es_gguf *gguf)
{
    return gguf->path;
}

size_t es_gguf_size(const es_gguf *gguf)
{
    size_t n = gguf->bytes.n_bytes;
    for (size_t i = 0; i < gguf->n_parts; i++) {
        n += gguf->parts[i]->bytes.n_bytes;
    }
    return n;
}

size_t es_gguf_tensor_count(const es_gguf *gguf)
{
    return gguf->n_tensors;
}

const es_gguf_tensor *es_gguf_tensor_at(const es_gguf *gguf, size_t index)
{
    return &gguf->tensors[index];
}

const es_gguf_tensor *es_gguf_find(const es_gguf *gguf, const char *name)
{
    const label *found = es_gguf_find_label(gguf->names, gguf->n_tensors, name);
    return found == NULL ? NULL : &gguf->tensors[found->index];
}

static const es_mapping *mapping_of(const es_gguf *gguf, const es_gguf_tensor *tensor)
{
    return tensor->part == 0 ? &gguf->bytes : &gguf->parts[tensor->part - 1]->bytes;
}

const uint8_t *es_gguf_data(const es_gguf *gguf, const es_gguf_tensor *tensor)
{
    return mapping_of(gguf, tensor)->data + tensor->offset;
}

void es_gguf_drop(const es_gguf *gguf, const es_gguf_tensor *tensor)
{
    es_mapping_drop(mapping_of(gguf, tensor), (size_t)tensor->offset, tensor->n_bytes);
}
