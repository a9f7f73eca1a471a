/* carver.h - many buffers from one block of memory. */
#ifndef ES_CARVER_H
#define ES_CARVER_H

#include <stddef.h>

#include "kernels/kernels.h"

/* memory NULL: it only counts. */
typedef struct es_carver {
    char *memory;                /* at a multiple of 64 */
    size_t used;
} es_carver;

static inline void *es_carve(es_carver *c, size_t count, size_t size)
{
    void *at = c->memory == NULL ? NULL : c->memory + c->used;
    c->used += (count * size + 63) / 64 * 64 + 64; /* a line apart: members write side by side */
    return at;
}

/* n rows of k inputs. */
static inline void es_carve_rows(es_carver *c, int32_t n, int32_t k, es_rows *out)
{
    size_t rows = (size_t)n, values = rows * (size_t)k;
    size_t groups = rows * ((size_t)k / ES_GROUP);
    *out = (es_rows){.n = n, .k = k};
    out->x = es_carve(c, values, sizeof(float));
    out->q = es_carve(c, values, sizeof(int8_t));
    out->scale = es_carve(c, groups, sizeof(float));
    out->sum = es_carve(c, 2 * groups, sizeof(float));
    out->sum32 = es_carve(c, groups, sizeof(float));
    out->isum = es_carve(c, 2 * groups, sizeof(int32_t));
    out->isum32 = es_carve(c, groups, sizeof(int32_t));
}

#endif
