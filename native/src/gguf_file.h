/* gguf_file.h - an open GGUF file as gguf.c reads it and gguf_values.c looks things up in it. */
#ifndef ES_GGUF_FILE_H
#define ES_GGUF_FILE_H

#include "gguf.h"
#include "mapping.h"

/* Types of metadata values. */
enum {
    U8 = 0, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64, N_KINDS
};

enum { MARK_EVERY = 64 };        /* strings of an array between two remembered places */

typedef struct entry {
    es_gguf_string name;
    es_gguf_string bytes;        /* name, type and value as they stand in the file */
    uint32_t kind;               /* of the value; of the items of an array */
    bool is_array;
    uint64_t count;              /* items of an array, else 1 */
    const uint8_t *value;        /* first item */
    const uint8_t **mark;        /* arrays of strings: items 0, MARK_EVERY, ... */
} entry;

/* A name and where it belongs, for sorting. */
typedef struct label {
    es_gguf_string name;
    size_t index;
} label;

struct es_gguf {
    char *path;
    es_mapping bytes;
    size_t n_entries, n_tensors;
    entry *entries;              /* (n_entries) in file order */
    label *keys;                 /* (n_entries) sorted */
    es_gguf_tensor *tensors;     /* (n_tensors) in file order */
    label *names;                /* (n_tensors) sorted */
    char *pool;                  /* the tensors' names, each with its NUL */
    es_gguf **parts;             /* (n_parts) files after the first of a split model */
    size_t n_parts;
};

/* A type's name and bytes; kind < N_KINDS. */
typedef struct es_gguf_kind {
    const char *name;
    uint8_t n_bytes; /* 0: variable */
} es_gguf_kind;

extern const es_gguf_kind es_gguf_kinds[N_KINDS];

uint64_t es_little_endian(const uint8_t *p, size_t n_bytes);

/* The end of a long path tells more than its beginning. */
const char *es_shown_path(const char *path);

/* By binary search; NULL when no label has this name. */
const label *es_gguf_find_label(const label *labels, size_t n, const char *name);

#endif
