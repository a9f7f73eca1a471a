/* gguf_values.c - metadata of an open GGUF file by key, in the types the caller wants. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "error.h"
#include "gguf_file.h"

size_t es_gguf_key_count(const es_gguf *gguf)
{
    return gguf->n_entries;
}

void es_gguf_key_at(const es_gguf *gguf, size_t index, es_gguf_string *name, es_gguf_string *bytes)
{
    *name = gguf->entries[index].name;
    *bytes = gguf->entries[index].bytes;
}

static es_status wrong_kind(const es_gguf *gguf, const char *key, const entry *e,
                            const char *expected)
{
    return es_fail(ES_ERR_FORMAT, "%s: key '%s' is %s%s, expected %s", es_shown_path(gguf->path),
                   key, e->is_array ? "an array of " : "", es_gguf_kinds[e->kind].name, expected);
}

/* The entry of a key, NULL when absent and that is allowed. */
static es_status find_entry(const es_gguf *gguf, const char *key, bool *found, const entry **out)
{
    const label *place = es_gguf_find_label(gguf->keys, gguf->n_entries, key);
    *out = place == NULL ? NULL : &gguf->entries[place->index];
    if (found != NULL) {
        *found = place != NULL;
    } else if (place == NULL) {
        return es_fail(ES_ERR_FORMAT, "%s: key '%s' is missing", es_shown_path(gguf->path), key);
    }
    return ES_OK;
}

static es_status find_scalar(const es_gguf *gguf, const char *key, const char *expected,
                             bool *found, const entry **out)
{
    es_status status = find_entry(gguf, key, found, out);
    if (status == ES_OK && *out != NULL && (*out)->is_array) {
        status = wrong_kind(gguf, key, *out, expected);
    }
    return status;
}

static es_status find_item(const es_gguf *gguf, const char *key, const char *expected, size_t index,
                           const entry **out)
{
    es_status status = find_entry(gguf, key, NULL, out);
    if (status != ES_OK) {
        return status;
    }
    if (!(*out)->is_array) {
        return wrong_kind(gguf, key, *out, expected);
    }
    if (index >= (*out)->count) {
        return es_fail(ES_ERR_ARGUMENT, "%s: key '%s' has %" PRIu64 " items, asked for number %zu",
                       es_shown_path(gguf->path), key, (*out)->count, index);
    }
    return ES_OK;
}

static es_status as_i64(const es_gguf *gguf, const char *key, const entry *e, size_t index,
                        int64_t *out)
{
    size_t n_bytes = es_gguf_kinds[e->kind].n_bytes;
    uint64_t raw = n_bytes == 0 ? 0 : es_little_endian(e->value + index * n_bytes, n_bytes);
    switch (e->kind) {
    case U8:
    case U16:
    case U32:
        *out = (int64_t)raw;
        return ES_OK;
    case U64:
        if (raw > INT64_MAX) {
            return es_fail(ES_ERR_FORMAT, "%s: key '%s' has %" PRIu64 ", expected less than 2^63",
                           es_shown_path(gguf->path), key, raw);
        }
        *out = (int64_t)raw;
        return ES_OK;
    case I8:
        *out = (int8_t)raw;
        return ES_OK;
    case I16:
        *out = (int16_t)raw;
        return ES_OK;
    case I32:
        *out = (int32_t)raw;
        return ES_OK;
    case I64:
        *out = (int64_t)raw;
        return ES_OK;
    default:
        return wrong_kind(gguf, key, e, e->is_array ? "integers" : "an integer");
    }
}

static es_status as_f32(const es_gguf *gguf, const char *key, const entry *e, size_t index,
                        float *out)
{
    if (e->kind == F32) {
        uint32_t bits = (uint32_t)es_little_endian(e->value + 4 * index, 4);
        memcpy(out, &bits, sizeof(*out));
        return ES_OK;
    }
    if (e->kind == F64) {
        uint64_t bits = es_little_endian(e->value + 8 * index, 8);
        double value;
        memcpy(&value, &bits, sizeof(value));
        *out = (float)value;
        if (isinf(*out) && !isinf(value)) {
            return es_fail(ES_ERR_FORMAT, "%s: key '%s' has %g, more than a float32 holds",
                           es_shown_path(gguf->path), key, value);
        }
        return ES_OK;
    }
    return wrong_kind(gguf, key, e, e->is_array ? "floats" : "a float");
}

static es_gguf_string string_at(const uint8_t *p)
{
    return (es_gguf_string){(const char *)p + 8, (size_t)es_little_endian(p, 8)};
}

es_status es_gguf_u32(const es_gguf *gguf, const char *key, uint32_t *out, bool *found)
{
    const entry *e;
    int64_t value = 0;
    es_status status = find_scalar(gguf, key, "an integer", found, &e);
    if (status != ES_OK || e == NULL) {
        return status;
    }
    status = as_i64(gguf, key, e, 0, &value);
    if (status == ES_OK && (value < 0 || value > UINT32_MAX)) {
        return es_fail(ES_ERR_FORMAT, "%s: key '%s' is %" PRId64 ", expected 0 to 2^32 - 1",
                       es_shown_path(gguf->path), key, value);
    }
    if (status == ES_OK) {
        *out = (uint32_t)value;
    }
    return status;
}

es_status es_gguf_f32(const es_gguf *gguf, const char *key, float *out, bool *found)
{
    const entry *e;
    es_status status = find_scalar(gguf, key, "a float", found, &e);
    return status == ES_OK && e != NULL ? as_f32(gguf, key, e, 0, out) : status;
}

es_status es_gguf_bool(const es_gguf *gguf, const char *key, bool *out, bool *found)
{
    const entry *e;
    es_status status = find_scalar(gguf, key, "a bool", found, &e);
    if (status != ES_OK || e == NULL) {
        return status;
    }
    if (e->kind != BOOL) {
        return wrong_kind(gguf, key, e, "a bool");
    }
    *out = e->value[0] != 0;
    return ES_OK;
}

es_status es_gguf_str(const es_gguf *gguf, const char *key, es_gguf_string *out, bool *found)
{
    const entry *e;
    es_status status = find_scalar(gguf, key, "a string", found, &e);
    if (status != ES_OK || e == NULL) {
        return status;
    }
    if (e->kind != STRING) {
        return wrong_kind(gguf, key, e, "a string");
    }
    *out = string_at(e->value);
    return ES_OK;
}

es_status es_gguf_array(const es_gguf *gguf, const char *key, size_t *count, bool *found)
{
    const entry *e;
    es_status status = find_entry(gguf, key, found, &e);
    if (status != ES_OK || e == NULL) {
        return status;
    }
    if (!e->is_array) {
        return wrong_kind(gguf, key, e, "an array");
    }
    *count = (size_t)e->count;
    return ES_OK;
}

es_status es_gguf_array_i64(const es_gguf *gguf, const char *key, size_t index, int64_t *out)
{
    const entry *e;
    es_status status = find_item(gguf, key, "an array of integers", index, &e);
    return status == ES_OK ? as_i64(gguf, key, e, index, out) : status;
}

es_status es_gguf_array_f32(const es_gguf *gguf, const char *key, size_t index, float *out)
{
    const entry *e;
    es_status status = find_item(gguf, key, "an array of floats", index, &e);
    return status == ES_OK ? as_f32(gguf, key, e, index, out) : status;
}

es_status es_gguf_array_str(const es_gguf *gguf, const char *key, size_t index,
                            es_gguf_string *out)
{
    const entry *e;
    es_status status = find_item(gguf, key, "an array of strings", index, &e);
    if (status != ES_OK) {
        return status;
    }
    if (e->kind != STRING) {
        return wrong_kind(gguf, key, e, "strings");
    }
    *out = string_at(e->mark[index / MARK_EVERY]);
    for (size_t i = index / MARK_EVERY * MARK_EVERY; i < index; i++) {
        *out = string_at((const uint8_t *)out->data + out->n);
    }
    return ES_OK;
}
