/*
 * placed.c - see placed.h.
 */
#include "placed.h"

#include <stdio.h>

#include "blocks.h"
#include "error.h"
#include "packed_file.h"

enum { LINE = 64 };

static es_status fail_type(const es_gguf *gguf, const es_placed *p)
{
    char text[32];
    const char *name = es_ggml_type_name(p->source->type);
    if (name == NULL) {
        snprintf(text, sizeof(text), "type %d", (int)p->source->type);
        name = text;
    }
    return es_fail(ES_ERR_UNSUPPORTED, "%s: tensor %s at byte %llu: rows of %d values of %s cannot "
                   "be read", es_gguf_name(gguf), p->slot.name,
                   (unsigned long long)p->source->offset, (int)p->slot.cols, name);
}

static es_status measure_matrix(const es_gguf *gguf, es_placed *p)
{
    es_status status = es_packed_tensor(gguf, p->slot.name, &p->tensor, &p->is_in_file);
    if (status != ES_OK) {
        return status;
    }
    if (!p->is_in_file) {
        p->tensor = (es_tensor){.type = p->source->type, .rows = p->slot.rows,
                                .cols = p->slot.cols,
                                .tile_bytes = es_pack_tile_bytes(p->source->type, p->slot.cols)};
    }
    p->n_bytes = (size_t)es_tiles(p->slot.rows) * p->tensor.tile_bytes;
    return p->n_bytes == 0 ? fail_type(gguf, p) : ES_OK;
}

es_status es_placed_measure(const es_gguf *gguf, es_placed *p)
{
    int32_t values, bytes;
    if (p->slot.is_matrix) {
        return measure_matrix(gguf, p);
    }
    if (!es_block_shape(p->source->type, &values, &bytes) || p->slot.cols % values != 0) {
        return fail_type(gguf, p);
    }
    p->n_bytes = ((size_t)p->slot.cols * sizeof(float) + LINE - 1) / LINE * LINE;
    return ES_OK;
}

typedef struct packing {
    const es_gguf *gguf;
    const es_placed *placed;
    int32_t t0, t1;
    uint8_t *out;              /* of tile 0 */
} packing;

static void pack_share(void *arg, int32_t member, int32_t n)
{
    const packing *job = arg;
    const es_placed *p = job->placed;
    int32_t begin, end;
    es_share(job->t1 - job->t0, member, n, &begin, &end);
    if (begin < end) {
        es_pack_tiles(p->source->type, es_gguf_data(job->gguf, p->source),
                      p->source->n_bytes / (size_t)p->slot.rows, p->slot.rows, p->slot.cols,
                      job->t0 + begin, job->t0 + end,
                      job->out + (size_t)(job->t0 + begin) * p->tensor.tile_bytes);
    }
}

void es_placed_pack(const es_gguf *gguf, const es_placed *placed, es_pool *pool, int32_t first,
                    int32_t n, uint8_t *pages)
{
    packing job = {gguf, placed, first, first + n, pages + placed->offset};
    es_pool_run(pool, pack_share, &job);
}

void es_placed_floats(const es_gguf *gguf, const es_placed *placed, uint8_t *pages)
{
    es_block_floats(placed->source->type, es_gguf_data(gguf, placed->source),
                    (size_t)placed->slot.cols, (float *)(void *)(pages + placed->offset));
}

void es_placed_publish(const es_placed *placed, const uint8_t *pages, void *owner)
{
    void *place = (char *)owner + placed->slot.place;
    if (placed->slot.is_matrix) {
        *(es_tensor *)place = placed->tensor;
    } else {
        *(const float **)place = (const float *)(const void *)(pages + placed->offset);
    }
}
