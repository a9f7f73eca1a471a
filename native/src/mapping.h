/* mapping.h - the bytes of a file: mapped read-only, read into memory, or the caller's own. */
#ifndef ES_MAPPING_H
#define ES_MAPPING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "edgespec.h"

typedef enum es_mapping_kind {
    ES_MAPPING_BORROWED = 0, /* the caller's memory */
    ES_MAPPING_MAPPED = 1,   /* pages of the file; dropped ones come back when touched */
    ES_MAPPING_READ = 2      /* memory of its own; dropped pages are gone and read as zero */
} es_mapping_kind;

typedef struct es_mapping {
    uint8_t *data;           /* page-aligned unless borrowed; NULL when n_bytes is 0 */
    size_t n_bytes;
    es_mapping_kind kind;
} es_mapping;

/* ES_ERR_IO, path and reason: cannot be opened or read, or is no regular file. ES_ERR_MEMORY. */
es_status es_mapping_open(const char *path, bool use_mmap, es_mapping *out);
void es_mapping_close(es_mapping *mapping);

/* Gives back the pages of [offset, offset + n_bytes): a hint. Of pages shared with neighbours a
   mapped file gives back all, a read one none. Nothing happens to borrowed memory. */
void es_mapping_drop(const es_mapping *mapping, size_t offset, size_t n_bytes);

#endif
