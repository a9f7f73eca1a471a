/*
 * model.c - from a GGUF file to packed weights. Opening checks every key, name, shape and type;
 * loading then packs a chunk at a time, dropping the pages of the file it has done with, so that
 * there is never much more than one copy in memory and the host stays in charge.
 */
#if defined(__linux__)
#define _GNU_SOURCE /* mlock */
#endif
#include "clock.h"

#include "model.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "blocks.h"
#include "error.h"
#include "kernels/kernels.h"
#include "pack.h"
#include "packed_file.h"

enum { MOST_THREADS = 1024, CHUNK_BYTES = 4 << 20, LINE = 64 };
static const double CHUNK_SECONDS = 0.06; /* of one es_model_load */

es_status es_model_params_default(es_model_params *out)
{
    *out = (es_model_params){.threads = 1, .use_mmap = 1};
    return ES_OK;
}

/* ---- opening ----------------------------------------------------------------------------- */

static const char *type_text(int32_t type, char *out, size_t size)
{
    const char *name = es_ggml_type_name(type);
    if (name != NULL) {
        return name;
    }
    snprintf(out, size, "type %d", (int)type);
    return out;
}

static es_status fail_type(const es_model *m, const es_placed *p)
{
    char text[32];
    return es_fail(ES_ERR_UNSUPPORTED, "%s: tensor %s at byte %llu: rows of %d values of %s cannot "
                   "be read", es_gguf_name(m->gguf), p->slot.name,
                   (unsigned long long)p->source->offset, (int)p->slot.cols,
                   type_text(p->source->type, text, sizeof(text)));
}

static es_status place_matrix(const es_model *m, es_placed *p)
{
    es_status status = es_packed_tensor(m->gguf, p->slot.name, &p->tensor, &p->is_in_file);
    if (status != ES_OK) {
        return status;
    }
    if (!p->is_in_file) {
        p->tensor = (es_tensor){.type = p->source->type, .rows = p->slot.rows,
                                .cols = p->slot.cols,
                                .tile_bytes = es_pack_tile_bytes(p->source->type, p->slot.cols)};
    }
    p->n_bytes = (size_t)es_tiles(p->slot.rows) * p->tensor.tile_bytes;
    return p->n_bytes == 0 ? fail_type(m, p) : ES_OK;
}

static es_status place_vector(const es_model *m, es_placed *p)
{
    int32_t values, bytes;
    if (!es_block_shape(p->source->type, &values, &bytes) || p->slot.cols % values != 0) {
        return fail_type(m, p);
    }
    p->n_bytes = ((size_t)p->slot.cols * sizeof(float) + LINE - 1) / LINE * LINE;
    return ES_OK;
}

static es_status place_weights(es_model *m)
{
    const es_shape *shape = &m->network.shape;
    m->n_placed = es_slot_count(shape);
    m->placed = es_calloc((size_t)m->n_placed, sizeof(*m->placed));
    m->network.layer = es_calloc((size_t)shape->layers, sizeof(*m->network.layer));
    if (m->placed == NULL || m->network.layer == NULL) {
        return es_fail(ES_ERR_MEMORY, "%s: no memory for a list of %d tensors",
                       es_gguf_name(m->gguf), (int)m->n_placed);
    }
    for (int32_t i = 0; i < m->n_placed; i++) {
        es_placed *p = &m->placed[i];
        es_slot_at(shape, i, &p->slot);
        p->source = es_gguf_find(m->gguf, p->slot.name);
        p->offset = m->page_bytes;
        es_status status = p->slot.is_matrix ? place_matrix(m, p) : place_vector(m, p);
        if (status != ES_OK) {
            return status;
        }
        if (p->n_bytes > SIZE_MAX / 2 - m->weight_bytes) {
            return es_fail(ES_ERR_MEMORY, "%s: weights larger than this system addresses",
                           es_gguf_name(m->gguf));
        }
        m->weight_bytes += p->n_bytes;
        m->page_bytes += p->is_in_file ? 0 : p->n_bytes;
    }
    return ES_OK;
}

static es_status open_all(es_model *m, const char *path, const es_model_params *params)
{
    es_network *net = &m->network;
    es_status status;
    if ((status = es_kernels_choose(params->cpu, &net->kernels)) != ES_OK ||
        (status = es_gguf_open(path, params->use_mmap != 0, &m->gguf)) != ES_OK ||
        (status = es_packed_check(m->gguf, &m->is_packed)) != ES_OK ||
        (status = es_shape_read(m->gguf, &net->shape)) != ES_OK ||
        (status = es_slots_check(m->gguf, &net->shape)) != ES_OK ||
        (status = place_weights(m)) != ES_OK ||
        (status = es_workspace_new(&net->shape, params->threads, &m->work)) != ES_OK) {
        return status;
    }
    return es_pool_new(params->threads, &net->pool);
}

es_status es_model_open(const char *path, const es_model_params *params, es_model **out)
{
    if (params->threads < 1 || params->threads > MOST_THREADS) {
        return es_fail(ES_ERR_ARGUMENT, "threads: expected 1 to %d, got %d", MOST_THREADS,
                       (int)params->threads);
    }
    es_model *m = es_calloc(1, sizeof(*m));
    if (m == NULL || pthread_mutex_init(&m->lock, NULL) != 0) {
        es_free(m);
        return es_fail(ES_ERR_MEMORY, "model: no memory");
    }
    m->use_mmap = params->use_mmap != 0;
    m->wants_lock = params->lock != 0;
    es_status status = open_all(m, path, params);
    if (status != ES_OK) {
        es_model_free(m);
        return status;
    }
    *out = m;
    return ES_OK;
}

void es_model_free(es_model *model)
{
    if (model == NULL) {
        return;
    }
    es_pool_free(model->network.pool);
    es_workspace_free(model->work);
    es_pages_free(&model->pages);
    es_shape_clear(&model->network.shape);
    es_free(model->network.layer);
    es_free(model->placed);
    es_gguf_free(model->gguf);
    pthread_mutex_destroy(&model->lock);
    es_free(model);
}

/* ---- loading ----------------------------------------------------------------------------- */

static es_status lock_bytes(const es_model *m, const void *data, size_t n_bytes)
{
    if (mlock(data, n_bytes) != 0) {
        return es_fail(ES_ERR_MEMORY, "%s: the system does not lock %zu bytes into memory: %s; "
                       "raise the limit (ulimit -l) or do not lock", es_gguf_name(m->gguf),
                       m->weight_bytes, strerror(errno));
    }
    return ES_OK;
}

static es_status begin_loading(es_model *m)
{
    if (!es_pages_new(m->page_bytes, &m->pages)) {
        return es_fail(ES_ERR_MEMORY, "%s: no memory for %zu bytes of weights",
                       es_gguf_name(m->gguf), m->page_bytes);
    }
    es_status status = ES_OK;
    if (m->wants_lock) {
        status = lock_bytes(m, m->pages.data, m->page_bytes);
        for (int32_t i = 0; i < m->n_placed && status == ES_OK; i++) {
            if (m->placed[i].is_in_file) {
                status = lock_bytes(m, m->placed[i].tensor.data, m->placed[i].n_bytes);
            }
        }
    }
    if (status != ES_OK) {
        es_pages_free(&m->pages);
    }
    return status;
}

typedef struct packing {
    const es_model *model;
    const es_placed *placed;
    int32_t t0, t1;
} packing;

static void pack_share(void *arg, int32_t member, int32_t n)
{
    const packing *job = arg;
    const es_placed *p = job->placed;
    int32_t begin, end;
    es_share(job->t1 - job->t0, member, n, &begin, &end);
    size_t tile_bytes = p->tensor.tile_bytes;
    if (begin < end) {
        es_pack_tiles(p->source->type, es_gguf_data(job->model->gguf, p->source),
                      p->source->n_bytes / (size_t)p->slot.rows, p->slot.rows, p->slot.cols,
                      job->t0 + begin, job->t0 + end,
                      job->model->pages.data + p->offset + (size_t)(job->t0 + begin) * tile_bytes);
    }
}

/* Packs up to CHUNK_BYTES of a matrix. */
static void pack_chunk(es_model *m, es_placed *p)
{
    int32_t tiles = es_tiles(p->slot.rows);
    size_t step = CHUNK_BYTES / p->tensor.tile_bytes + (size_t)es_pool_size(m->network.pool);
    size_t left = (size_t)(tiles - m->next_tile);
    int32_t count = (int32_t)(step < left ? step : left);
    packing job = {m, p, m->next_tile, m->next_tile + count};
    es_pool_run(m->network.pool, pack_share, &job);
    m->next_tile += count;
    m->done += (size_t)count * p->tensor.tile_bytes;
    bool is_packed = m->next_tile == tiles;
    if (is_packed || m->use_mmap) { /* a mapped file has its pages again when they are touched */
        es_gguf_drop(m->gguf, p->source);
    }
    if (is_packed) {
        p->tensor.data = m->pages.data + p->offset;
        m->next_tile = 0;
        m->next++;
    }
}

static void load_some(es_model *m)
{
    es_placed *p = &m->placed[m->next];
    if (p->slot.is_matrix && !p->is_in_file) {
        pack_chunk(m, p);
        return;
    }
    if (!p->slot.is_matrix) {
        es_block_floats(p->source->type, es_gguf_data(m->gguf, p->source), (size_t)p->slot.cols,
                        (float *)(void *)(m->pages.data + p->offset));
    }
    m->done += p->n_bytes;
    m->next++;
}

/* Weights become what the forward reads. */
static void publish(es_model *m)
{
    es_top *top = &m->network.top;
    for (int32_t i = 0; i < m->n_placed; i++) {
        const es_placed *p = &m->placed[i];
        char *base = p->slot.layer < 0 ? (char *)top : (char *)&m->network.layer[p->slot.layer];
        if (p->slot.is_matrix) {
            *(es_tensor *)(void *)(base + p->slot.place) = p->tensor;
        } else {
            *(const float **)(void *)(base + p->slot.place) =
                (const float *)(const void *)(m->pages.data + p->offset);
        }
    }
    if (m->network.shape.is_tied) {
        top->output = top->embedding;
    }
}

static es_status load(es_model *m)
{
    if (es_model_is_loaded(m)) {
        return ES_OK;
    }
    es_status status = m->pages.data == NULL ? begin_loading(m) : ES_OK;
    if (status != ES_OK) {
        return status;
    }
    double start = es_now();
    while (!es_model_is_loaded(m) && es_now() - start < CHUNK_SECONDS) {
        load_some(m);
    }
    if (es_model_is_loaded(m)) {
        publish(m);
    }
    return ES_OK;
}

es_status es_model_load(es_model *model, size_t *done, size_t *total)
{
    pthread_mutex_lock(&model->lock);
    es_status status = load(model);
    *done = model->done;
    *total = model->weight_bytes;
    pthread_mutex_unlock(&model->lock);
    return status;
}

/* ---- describing -------------------------------------------------------------------------- */

es_status es_model_describe(const es_model *model, es_model_info *out)
{
    const es_shape *s = &model->network.shape;
    es_model_info info = {
        .vocab = s->vocab, .layers = s->layers, .hidden = s->hidden, .heads = s->heads,
        .kv_heads = s->kv_heads, .head_dim = s->head_dim, .ffn = s->ffn,
        .max_position = s->max_position, .is_packed = model->is_packed, .window = s->window,
        .threads = es_pool_size(model->network.pool), .file_bytes = es_gguf_size(model->gguf),
        .weight_bytes = model->weight_bytes, .token_bytes = model->weight_bytes,
    };
    snprintf(info.architecture, sizeof(info.architecture), "%s", es_shape_name(s));
    snprintf(info.cpu, sizeof(info.cpu), "%s", model->network.kernels->name);
    for (int32_t i = 0; i < s->layers; i++) {
        info.windowed_layers += es_shape_is_windowed(s, i);
    }
    if (!s->is_tied) {
        info.token_bytes -= model->placed[0].n_bytes; /* the embedding, of which a row is read */
    }
    *out = info;
    return ES_OK;
}

/* ---- saving ------------------------------------------------------------------------------ */

static es_status save(const es_model *m, const char *path)
{
    es_packed_matrix *matrices = es_calloc((size_t)m->n_placed, sizeof(*matrices));
    if (matrices == NULL) {
        return es_fail(ES_ERR_MEMORY, "%s: no memory for a list of %d tensors", path,
                       (int)m->n_placed);
    }
    size_t n = 0;
    for (int32_t i = 0; i < m->n_placed; i++) {
        if (m->placed[i].slot.is_matrix) {
            matrices[n++] = (es_packed_matrix){m->placed[i].source->name, m->placed[i].tensor};
        }
    }
    es_status status = es_packed_save(m->gguf, matrices, n, path);
    es_free(matrices);
    return status;
}

es_status es_model_save(es_model *model, const char *path)
{
    pthread_mutex_lock(&model->lock);
    es_status status = es_model_is_loaded(model)
                           ? save(model, path)
                           : es_fail(ES_ERR_STATE, "save: the model is not loaded yet");
    pthread_mutex_unlock(&model->lock);
    return status;
}
