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

#include "error.h"
#include "kernels/kernels.h"
#include "pack.h"
#include "packed_file.h"

enum { MOST_THREADS = 1024, CHUNK_BYTES = 4 << 20 };
static const double CHUNK_SECONDS = 0.06; /* of one es_model_load */

es_status es_model_params_default(es_model_params *out)
{
    *out = (es_model_params){.threads = 1, .use_mmap = 1};
    return ES_OK;
}

/* ---- opening ----------------------------------------------------------------------------- */

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
        es_status status = es_placed_measure(m->gguf, p);
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

/* NULL, and a message, where there is no memory. */
static es_model *new_model(bool use_mmap)
{
    es_model *m = es_calloc(1, sizeof(*m));
    if (m == NULL || pthread_mutex_init(&m->lock, NULL) != 0) {
        es_free(m);
        es_fail(ES_ERR_MEMORY, "model: no memory");
        return NULL;
    }
    m->use_mmap = use_mmap;
    return m;
}

static es_status read_file(es_model *m, const char *path, int32_t threads)
{
    es_network *net = &m->network;
    es_status status;
    if ((status = es_gguf_open(path, m->use_mmap, &m->gguf)) != ES_OK ||
        (status = es_packed_check(m->gguf, &m->is_packed)) != ES_OK ||
        (status = es_shape_read(m->gguf, &net->shape)) != ES_OK ||
        (status = es_slots_check(m->gguf, &net->shape)) != ES_OK ||
        (status = place_weights(m)) != ES_OK) {
        return status;
    }
    return es_workspace_new(net, threads, &m->work);
}

static es_status open_all(es_model *m, const char *path, const es_model_params *params)
{
    es_network *net = &m->network;
    es_status status;
    if ((status = es_kernels_choose(params->cpu, &net->kernels)) != ES_OK ||
        (status = read_file(m, path, params->threads)) != ES_OK) {
        return status;
    }
    if (net->shape.is_guest) {
        return es_fail(ES_ERR_UNSUPPORTED, "%s: a draft that uses its target's embedding, expected "
                       "a model of its own; it goes beside that target", es_gguf_name(m->gguf));
    }
    return es_pool_new(params->threads, &net->pool);
}

es_status es_model_open(const char *path, const es_model_params *params, es_model **out)
{
    if (params->threads < 1 || params->threads > MOST_THREADS) {
        return es_fail(ES_ERR_ARGUMENT, "threads: expected 1 to %d, got %d", MOST_THREADS,
                       (int)params->threads);
    }
    es_model *m = new_model(params->use_mmap != 0);
    if (m == NULL) {
        return ES_ERR_MEMORY;
    }
    m->wants_lock = params->lock != 0;
    es_status status = open_all(m, path, params);
    if (status != ES_OK) {
        es_model_free(m);
        return status;
    }
    *out = m;
    return ES_OK;
}

es_status es_model_open_beside(const es_model *host, const char *path, es_model **out)
{
    es_model *m = new_model(host->use_mmap);
    if (m == NULL) {
        return ES_ERR_MEMORY;
    }
    m->is_beside = true;
    m->network.kernels = host->network.kernels;
    m->network.pool = host->network.pool;
    es_status status = read_file(m, path, es_pool_size(host->network.pool));
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
    if (!model->is_beside) {
        es_pool_free(model->network.pool);
    }
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

/* Packs up to CHUNK_BYTES of a matrix. */
static void pack_chunk(es_model *m, es_placed *p)
{
    int32_t tiles = es_tiles(p->slot.rows);
    size_t step = CHUNK_BYTES / p->tensor.tile_bytes + (size_t)es_pool_size(m->network.pool);
    size_t left = (size_t)(tiles - m->next_tile);
    int32_t count = (int32_t)(step < left ? step : left);
    es_placed_pack(m->gguf, p, m->network.pool, m->next_tile, count, m->pages.data);
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
        es_placed_floats(m->gguf, p, m->pages.data);
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
        void *owner = p->slot.layer < 0 ? (void *)top : (void *)&m->network.layer[p->slot.layer];
        es_placed_publish(p, m->pages.data, owner);
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
