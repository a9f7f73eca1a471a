/* gguf.h - a GGUF file, opened and checked: metadata by key, tensors by name. */
#ifndef ES_GGUF_H
#define ES_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "edgespec.h"

/* ggml's numbers (gguf specification, ggml.h). */
typedef enum es_ggml_type {
    ES_GGML_F32 = 0,
    ES_GGML_F16 = 1,
    ES_GGML_Q4_0 = 2,
    ES_GGML_Q4_1 = 3,
    ES_GGML_Q5_0 = 6,
    ES_GGML_Q5_1 = 7,
    ES_GGML_Q8_0 = 8,
    ES_GGML_Q2_K = 10,
    ES_GGML_Q3_K = 11,
    ES_GGML_Q4_K = 12,
    ES_GGML_Q5_K = 13,
    ES_GGML_Q6_K = 14,
    ES_GGML_IQ4_NL = 20,
    ES_GGML_I8 = 24,
    ES_GGML_I32 = 26,
    ES_GGML_I64 = 27,
    ES_GGML_BF16 = 30,
    ES_GGML_MXFP4 = 39
} es_ggml_type;

typedef struct es_gguf es_gguf;

typedef struct es_gguf_tensor {
    const char *name;      /* NUL-terminated, owned by the file */
    int32_t type;          /* es_ggml_type, or a number this library cannot read */
    int32_t n_dims;        /* 1..4 */
    int64_t dim[4];        /* dim[0] contiguous: a matrix is [cols, rows]; unused ones are 1 */
    uint64_t offset;       /* from the start of its file; offset + n_bytes lies inside it */
    size_t n_bytes;        /* 0 for a type ggml did not know when this was written */
    int32_t part;          /* of a split model: the file it lies in, 0 the first */
} es_gguf_tensor;

/* A string of the file: not NUL-terminated, no NUL guaranteed absent. */
typedef struct es_gguf_string {
    const char *data;
    size_t n;
} es_gguf_string;

/* Maps (use_mmap) or reads the file and checks every count, offset, type and string before use.
   ES_ERR_FORMAT names the key, the tensor and the offset; ES_ERR_IO the path and the reason.
   NAME-00001-of-0000N.gguf, the first file of a split model, opens them all as one. Tensors do not
   overlap, so that their bytes together are never more than the files'. */
es_status es_gguf_open(const char *path, bool use_mmap, es_gguf **out);
/* The same over memory the caller keeps alive (fuzzing, tests). name appears in errors. */
es_status es_gguf_parse(const void *data, size_t n_bytes, const char *name, es_gguf **out);
void es_gguf_free(es_gguf *gguf);                                    /* NULL is a no-op */

const char *es_gguf_name(const es_gguf *gguf);                       /* path, for messages */
size_t es_gguf_size(const es_gguf *gguf);                            /* bytes of all its files */

/* Gives the pages of this tensor back to the system. A mapped file has them again when they are
   touched; of a file that was read they are gone, and its bytes must not be used any more. */
void es_gguf_drop(const es_gguf *gguf, const es_gguf_tensor *tensor);

size_t es_gguf_tensor_count(const es_gguf *gguf);
const es_gguf_tensor *es_gguf_tensor_at(const es_gguf *gguf, size_t index);  /* one array */
const es_gguf_tensor *es_gguf_find(const es_gguf *gguf, const char *name);   /* NULL: none */
const uint8_t *es_gguf_data(const es_gguf *gguf, const es_gguf_tensor *tensor);

/* Metadata. `found` (may be NULL) tells an absent key, which leaves *out alone and is ES_OK; with
   found == NULL an absent key is ES_ERR_FORMAT. A value of another kind, or one that does not fit,
   is ES_ERR_FORMAT naming the key. Integers of any width convert when they fit. */
es_status es_gguf_u32(const es_gguf *gguf, const char *key, uint32_t *out, bool *found);
es_status es_gguf_f32(const es_gguf *gguf, const char *key, float *out, bool *found);
es_status es_gguf_bool(const es_gguf *gguf, const char *key, bool *out, bool *found);
es_status es_gguf_str(const es_gguf *gguf, const char *key, es_gguf_string *out, bool *found);
/* Arrays: their count, then single elements (index < count). */
es_status es_gguf_array(const es_gguf *gguf, const char *key, size_t *count, bool *found);
es_status es_gguf_array_i64(const es_gguf *gguf, const char *key, size_t index, int64_t *out);
es_status es_gguf_array_f32(const es_gguf *gguf, const char *key, size_t index, float *out);
es_status es_gguf_array_str(const es_gguf *gguf, const char *key, size_t index,
                            es_gguf_string *out);

/* Every key in file order, raw: what a writer copies. bytes is the whole entry: name, type, value. */
size_t es_gguf_key_count(const es_gguf *gguf);
void es_gguf_key_at(const es_gguf *gguf, size_t index, es_gguf_string *name,
                    es_gguf_string *bytes);

#endif
