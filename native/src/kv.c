/* kv.c - accepted rows move forward in linear KV buffers. */
#include <string.h>

#include "edgespec.h"
#include "error.h"

es_status es_kv_compact(void *base, size_t n_blocks, size_t block_stride, size_t row_bytes,
                        size_t first, const int32_t *path, int32_t n_path)
{
    if (base == NULL || n_path < 0 || (path == NULL && n_path > 0)) {
        return es_fail(ES_ERR_ARGUMENT, "kv_compact: expected a buffer and a path, got %s",
                       base == NULL ? "no buffer" : n_path < 0 ? "a negative length" : "no path");
    }
    for (int32_t i = 0; i < n_path; i++) {
        int32_t before = i == 0 ? -1 : path[i - 1];
        if (path[i] <= before) {
            return es_fail(ES_ERR_ARGUMENT,
                           "kv_compact: path[%d]: expected more than %d (rows ascend), got %d",
                           (int)i, (int)before, (int)path[i]);
        }
    }
    if (n_path == 0) {
        return ES_OK;
    }
    size_t end = first + (size_t)path[n_path - 1] + 1;
    if (end < first || (row_bytes > 0 && end > SIZE_MAX / row_bytes) ||
        (n_blocks > 1 && end * row_bytes > block_stride)) {
        return es_fail(ES_ERR_ARGUMENT,
                       "kv_compact: row %zu of %zu bytes is outside a block of %zu bytes", end - 1,
                       row_bytes, block_stride);
    }
    for (size_t block = 0; block < n_blocks; block++) {
        char *rows = (char *)base + block * block_stride + first * row_bytes;
        for (int32_t i = 0; i < n_path; i++) {
            if (path[i] != i) {
                memcpy(rows + (size_t)i * row_bytes, rows + (size_t)path[i] * row_bytes, row_bytes);
            }
        }
    }
    return ES_OK;
}
