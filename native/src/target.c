/*
 * target.c - one conversation over a model: its KV cache, and the rows forwarded into it.
 *
 * Every call takes the model's lock for as long as it works: targets of one model take turns at its
 * threads, and two threads at one target wait for each other.
 */
#include "target.h"

#include <string.h>

#include "drafter.h"
#include "error.h"
#include "tree.h"

/* ---- life -------------------------------------------------------------------------------- */

es_status es_target_params_default(es_target_params *out)
{
    *out = (es_target_params){.context = 4096, .kv = ES_KV_F16};
    return ES_OK;
}

static es_status check_params(const es_model *model, const es_target_params *params)
{
    const es_shape *shape = &model->network.shape;
    if (params->context < 1 || params->context > shape->max_position) {
        return es_fail(ES_ERR_ARGUMENT, "context: expected 1 to the model's %d, got %d",
                       (int)shape->max_position, (int)params->context);
    }
    if (params->kv != ES_KV_F16 && params->kv != ES_KV_INT8) {
        return es_fail(ES_ERR_ARGUMENT, "kv: expected 0 or 1, got %d", (int)params->kv);
    }
    if (params->window < 0 || params->sinks < 0 || (params->window == 0 && params->sinks > 0)) {
        return es_fail(ES_ERR_ARGUMENT, "window: expected 0 or more, and sinks beside one only, "
                       "got a window of %d and %d sinks", (int)params->window, (int)params->sinks);
    }
    if (params->window > 0 && shape->window > 0) {
        return es_fail(ES_ERR_UNSUPPORTED, "window: the model's layers have a window of %d "
                       "already, expected none, got %d", (int)shape->window, (int)params->window);
    }
    if ((int64_t)params->window + params->sinks > shape->max_position) {
        return es_fail(ES_ERR_ARGUMENT, "window: expected window and sinks of at most the model's "
                       "%d positions, got %d and %d", (int)shape->max_position,
                       (int)params->window, (int)params->sinks);
    }
    return ES_OK;
}

/* windowed (layers) is filled and pointed at. */
static es_kv_shape kv_shape(const es_model *model, const es_target_params *params,
                            uint8_t *windowed)
{
    const es_shape *shape = &model->network.shape;
    for (int32_t i = 0; i < shape->layers; i++) {
        windowed[i] = params->window > 0 || es_shape_is_windowed(shape, i);
    }
    return (es_kv_shape){
        .layers = shape->layers,
        .kv_heads = shape->kv_heads,
        .head_dim = shape->head_dim,
        .windowed = params->window > 0 || shape->window > 0 ? windowed : NULL,
        .context = params->context,
        .window = params->window > 0 ? params->window : shape->window,
        .sinks = params->sinks,
        .batch = ES_MAX_ROWS,
        .format = params->kv == ES_KV_F16 ? ES_KV_FORMAT_F16 : ES_KV_FORMAT_INT8,
    };
}

/* Floats between the scratch of two threads: a cache line apart at least. */
static size_t scratch_stride(const es_model *model, const es_kv_shape *kv)
{
    return (es_kv_scratch(kv, model->network.shape.heads) + 31) / 16 * 16;
}

es_status es_target_memory(const es_model *model, const es_target_params *params, size_t *bytes)
{
    es_status status = check_params(model, params);
    if (status != ES_OK) {
        return status;
    }
    uint8_t *windowed = es_calloc((size_t)model->network.shape.layers, 1);
    if (windowed == NULL) {
        return es_fail(ES_ERR_MEMORY, "target: no memory");
    }
    es_kv_shape shape = kv_shape(model, params, windowed);
    *bytes = es_kv_bytes(&shape) + sizeof(es_target) +
             (size_t)es_pool_size(model->network.pool) * scratch_stride(model, &shape) *
                 sizeof(float);
    es_free(windowed);
    return ES_OK;
}

static es_status make(es_model *model, const es_target_params *params, uint8_t *windowed,
                      es_target *t)
{
    es_kv_shape shape = kv_shape(model, params, windowed);
    es_status status = es_kv_new(&shape, &t->kv);
    if (status != ES_OK) {
        return status;
    }
    t->scratch_stride = scratch_stride(model, &shape);
    t->scratch = es_calloc((size_t)es_pool_size(model->network.pool) * t->scratch_stride,
                           sizeof(float));
    if (t->scratch == NULL) {
        return es_fail(ES_ERR_MEMORY, "target: no memory for the scores of %d positions",
                       (int)params->context);
    }
    return ES_OK;
}

es_status es_target_new(es_model *model, const es_target_params *params, es_target **out)
{
    if (!es_model_is_loaded(model)) {
        return es_fail(ES_ERR_STATE, "target: the model is not loaded yet");
    }
    es_status status = check_params(model, params);
    if (status != ES_OK) {
        return status;
    }
    es_target *t = es_calloc(1, sizeof(*t));
    uint8_t *windowed = es_calloc((size_t)model->network.shape.layers, 1);
    if (t == NULL || windowed == NULL) {
        status = es_fail(ES_ERR_MEMORY, "target: no memory");
    } else {
        t->model = model;
        t->params = *params;
        status = make(model, params, windowed, t);
    }
    es_free(windowed);
    if (status != ES_OK) {
        es_target_free(t);
        return status;
    }
    *out = t;
    return ES_OK;
}

void es_target_free(es_target *target)
{
    if (target != NULL) {
        es_kv_free(target->kv);
        es_free(target->scratch);
        es_free(target->logits);
        es_free(target->taps);
        es_free(target->tapped);
        es_free(target->kept);
        es_free(target);
    }
}

static void enter(const es_target *t)
{
    pthread_mutex_lock(&t->model->lock);
}

static es_status leave(const es_target *t, es_status status)
{
    pthread_mutex_unlock(&t->model->lock);
    return status;
}

int64_t es_target_length(const es_target *target)
{
    enter(target);
    int64_t length = es_kv_length(target->kv);
    leave(target, ES_OK);
    return length;
}

/* ---- checks ------------------------------------------------------------------------------ */

static es_status check_tokens(const es_target *t, const int32_t *token, size_t n)
{
    int32_t vocab = t->model->network.shape.vocab;
    for (size_t i = 0; i < n; i++) {
        if (token[i] < 0 || token[i] >= vocab) {
            return es_fail(ES_ERR_ARGUMENT, "target: expected tokens in [0, %d), got %d at %zu",
                           (int)vocab, (int)token[i], i);
        }
    }
    return ES_OK;
}

/* n rows behind the committed ones, the deepest at `depth`. */
static es_status check_room(const es_target *t, int64_t n, int64_t depth)
{
    int64_t length = es_kv_length(t->kv);
    int32_t max_position = t->model->network.shape.max_position;
    if (t->params.window == 0 && length + n > t->params.context) {
        return es_fail(ES_ERR_CONTEXT, "target: %lld rows behind %lld do not fit a context of %d",
                       (long long)n, (long long)length, (int)t->params.context);
    }
    if (t->params.window > 0 && length + depth >= max_position) {
        return es_fail(ES_ERR_CONTEXT, "target: position %lld is behind the model's %d",
                       (long long)(length + depth), (int)max_position);
    }
    return ES_OK;
}

static es_status check_rows(const es_tree *tree, const int32_t *rows, int32_t n_rows)
{
    if (rows == NULL) {
        return ES_OK;
    }
    if (n_rows < 0 || n_rows > tree->n) {
        return es_fail(ES_ERR_ARGUMENT, "target: expected logits of 0 to %d rows, got %d",
                       (int)tree->n, (int)n_rows);
    }
    for (int32_t i = 0; i < n_rows; i++) {
        int32_t least = i == 0 ? 0 : rows[i - 1] + 1;
        if (rows[i] < least || rows[i] >= tree->n) {
            return es_fail(ES_ERR_ARGUMENT, "target: rows[%d]: expected %d to %d, got %d", (int)i,
                           (int)least, (int)tree->n - 1, (int)rows[i]);
        }
    }
    return ES_OK;
}

/* ---- forwarding -------------------------------------------------------------------------- */

static es_segment segment_of(const es_target *t, const int32_t *token, const int32_t *depth,
                             int32_t n)
{
    return (es_segment){.kv = t->kv, .token = token, .depth = depth, .n = n,
                        .position = es_kv_length(t->kv), .scratch = t->scratch,
                        .scratch_stride = t->scratch_stride, .taps = t->taps,
                        .n_taps = t->n_taps, .tapped = t->tapped};
}

/* The checked tree as one that says depth and mask. */
static es_status prepare(const es_target *t, const es_tree *tree, es_tree *out)
{
    *out = *tree;
    es_status status = es_tree_derive(out);
    if (status == ES_OK) {
        status = check_tokens(t, out->token, (size_t)out->n);
    }
    return status != ES_OK ? status : check_room(t, out->n, es_tree_depth(out));
}

static const int32_t all_rows[ES_MAX_ROWS] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63,
};

/* What was forwarded last, whose hidden states are in tapped. */
static void note_rows(es_target *t, const int32_t *token, int32_t n)
{
    memcpy(t->token, token, (size_t)n * sizeof(*token));
    t->tapped_rows = n;
}

static es_status forward(es_target *t, const es_tree *given, const int32_t *rows, int32_t n_rows,
                         float *logits)
{
    es_tree tree;
    es_status status = prepare(t, given, &tree);
    if (status == ES_OK) {
        status = check_rows(&tree, rows, n_rows);
    }
    if (status == ES_OK) {
        status = es_kv_append(t->kv, tree.depth, tree.mask, tree.n);
    }
    if (status != ES_OK) {
        return status;
    }
    es_segment segment = segment_of(t, tree.token, tree.depth, tree.n);
    es_batch batch = {.segment = &segment, .n_segments = 1, .rows = rows == NULL ? all_rows : rows,
                      .n_rows = rows == NULL ? tree.n : n_rows, .logits = logits};
    es_forward(&t->model->network, t->model->work, &batch);
    note_rows(t, tree.token, tree.n);
    return ES_OK;
}

es_status es_target_forward(es_target *target, const es_tree *tree, const int32_t *rows,
                            int32_t n_rows, float *logits)
{
    enter(target);
    return leave(target, forward(target, tree, rows, n_rows, logits));
}

static es_status check_targets(es_target *const *target, int32_t n)
{
    if (n < 1 || n > ES_MAX_ROWS) {
        return es_fail(ES_ERR_ARGUMENT, "target: expected 1 to %d targets, got %d", ES_MAX_ROWS,
                       (int)n);
    }
    for (int32_t i = 0; i < n; i++) {
        if (target[i]->model != target[0]->model) {
            return es_fail(ES_ERR_ARGUMENT, "target: %d and 0 have different models", (int)i);
        }
        for (int32_t j = 0; j < i; j++) {
            if (target[i] == target[j]) {
                return es_fail(ES_ERR_ARGUMENT, "target: %d and %d are the same", (int)j, (int)i);
            }
        }
    }
    return ES_OK;
}

static es_status forward_many(es_target *const *target, const es_tree *const *given,
                              int32_t n_targets, float *logits)
{
    int32_t token[ES_MAX_ROWS], depth[ES_MAX_ROWS], n = 0;
    es_segment segment[ES_MAX_ROWS];
    es_tree tree;
    for (int32_t i = 0; i < n_targets; i++) {
        es_status status = prepare(target[i], given[i], &tree);
        if (status != ES_OK) {
            return status;
        }
        if (tree.n > ES_MAX_ROWS - n) {
            return es_fail(ES_ERR_ARGUMENT, "target: expected at most %d rows in all, got more at "
                           "tree %d", ES_MAX_ROWS, (int)i);
        }
        memcpy(token + n, tree.token, (size_t)tree.n * sizeof(*token));
        memcpy(depth + n, tree.depth, (size_t)tree.n * sizeof(*depth));
        segment[i] = segment_of(target[i], token + n, depth + n, tree.n);
        n += tree.n;
    }
    for (int32_t i = 0; i < n_targets; i++) {
        es_status status = prepare(target[i], given[i], &tree);
        if (status == ES_OK) {
            status = es_kv_append(target[i]->kv, tree.depth, tree.mask, tree.n);
        }
        if (status != ES_OK) {
            return status; /* rows of the others stay open: their next forward drops them */
        }
    }
    es_batch batch = {.segment = segment, .n_segments = n_targets, .rows = all_rows, .n_rows = n,
                      .logits = logits};
    es_model *model = target[0]->model;
    es_forward(&model->network, model->work, &batch);
    for (int32_t i = 0; i < n_targets; i++) {
        note_rows(target[i], segment[i].token, segment[i].n);
    }
    return ES_OK;
}

es_status es_target_forward_many(es_target *const *target, const es_tree *const *tree,
                                 int32_t n_targets, float *logits)
{
    es_status status = check_targets(target, n_targets);
    if (status != ES_OK) {
        return status;
    }
    enter(target[0]);
    return leave(target[0], forward_many(target, tree, n_targets, logits));
}

/* Commits rows of the last forward, and tells the drafter of them. */
static es_status commit(es_target *t, const int32_t *rows, int32_t n)
{
    es_status status = es_kv_commit(t->kv, rows, n);
    if (status != ES_OK || t->drafter == NULL) {
        return status;
    }
    int32_t token[ES_MAX_ROWS];
    size_t width = (size_t)t->n_taps * (size_t)t->model->network.shape.hidden;
    for (int32_t i = 0; i < n; i++) {
        token[i] = t->token[rows[i]];
        if (width > 0) {
            memcpy(t->kept + (size_t)i * width, t->tapped + (size_t)rows[i] * width,
                   width * sizeof(*t->kept));
        }
    }
    return es_drafter_append(t->drafter, token, t->kept, (size_t)n);
}

static es_status prefill(es_target *t, const int32_t *tokens, size_t n, float *logits)
{
    if (n < 1 || n > INT32_MAX) {
        return es_fail(ES_ERR_ARGUMENT, "prefill: expected 1 token or more, got %zu", n);
    }
    es_status status = check_tokens(t, tokens, n);
    if (status == ES_OK) {
        status = check_room(t, (int64_t)n, (int64_t)n - 1);
    }
    while (n > 0 && status == ES_OK) {
        int32_t rows = n < ES_MAX_ROWS ? (int32_t)n : ES_MAX_ROWS;
        bool is_last = (size_t)rows == n && logits != NULL;
        int32_t last = rows - 1;
        status = es_kv_append(t->kv, NULL, NULL, rows);
        if (status == ES_OK) {
            es_segment segment = segment_of(t, tokens, NULL, rows);
            es_batch batch = {.segment = &segment, .n_segments = 1, .rows = &last,
                              .n_rows = is_last ? 1 : 0, .logits = logits};
            es_forward(&t->model->network, t->model->work, &batch);
            note_rows(t, tokens, rows);
            status = commit(t, all_rows, rows);
        }
        tokens += rows;
        n -= (size_t)rows;
    }
    return status;
}

es_status es_target_prefill(es_target *target, const int32_t *tokens, size_t n, float *logits)
{
    enter(target);
    return leave(target, prefill(target, tokens, n, logits));
}

es_status es_target_commit(es_target *target, const int32_t *rows, int32_t n_rows)
{
    enter(target);
    return leave(target, commit(target, rows, n_rows));
}

static es_status truncate(es_target *t, int64_t length)
{
    es_status status = es_kv_truncate(t->kv, length);
    return status != ES_OK || t->drafter == NULL ? status
                                                 : es_drafter_truncate(t->drafter, length);
}

es_status es_target_truncate(es_target *target, int64_t length)
{
    enter(target);
    return leave(target, truncate(target, length));
}

/* ---- taps -------------------------------------------------------------------------------- */

static es_status set_taps(es_target *t, const int32_t *ids, int32_t n)
{
    const es_shape *shape = &t->model->network.shape;
    if (n < 0 || n > shape->layers + 1) {
        return es_fail(ES_ERR_ARGUMENT, "taps: expected 0 to %d of them, got %d",
                       (int)shape->layers + 1, (int)n);
    }
    for (int32_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] > shape->layers) {
            return es_fail(ES_ERR_ARGUMENT, "taps: expected hidden states 0 to %d, got %d",
                           (int)shape->layers, (int)ids[i]);
        }
    }
    size_t floats = (size_t)ES_MAX_ROWS * (size_t)n * (size_t)shape->hidden;
    int32_t *taps = n == 0 ? NULL : es_calloc((size_t)n, sizeof(*taps));
    float *tapped = n == 0 ? NULL : es_calloc(floats, sizeof(*tapped));
    if (n > 0 && (taps == NULL || tapped == NULL)) {
        es_free(taps);
        es_free(tapped);
        return es_fail(ES_ERR_MEMORY, "taps: no memory for %d hidden states", (int)n);
    }
    if (n > 0) {
        memcpy(taps, ids, (size_t)n * sizeof(*taps));
    }
    es_free(t->taps);
    es_free(t->tapped);
    t->taps = taps;
    t->tapped = tapped;
    t->n_taps = n;
    t->tapped_rows = 0;
    return ES_OK;
}

es_status es_target_set_taps(es_target *target, const int32_t *ids, int32_t n_ids)
{
    enter(target);
    return leave(target, target->drafter == NULL
                             ? set_taps(target, ids, n_ids)
                             : es_fail(ES_ERR_STATE, "taps: the attached drafter chose them"));
}

static es_status read_taps(const es_target *t, int32_t n_rows, float *out)
{
    if (t->n_taps == 0 || t->tapped_rows == 0) {
        return es_fail(ES_ERR_STATE, "taps: %s", t->n_taps == 0 ? "none are set" :
                       "nothing was forwarded since they were set");
    }
    if (n_rows != t->tapped_rows) {
        return es_fail(ES_ERR_ARGUMENT, "taps: expected the %d rows of the last forward, got %d",
                       (int)t->tapped_rows, (int)n_rows);
    }
    size_t width = (size_t)t->n_taps * (size_t)t->model->network.shape.hidden;
    memcpy(out, t->tapped, (size_t)t->tapped_rows * width * sizeof(*out));
    return ES_OK;
}

es_status es_target_read_taps(const es_target *target, int32_t n_rows, float *out)
{
    enter(target);
    return leave(target, read_taps(target, n_rows, out));
}

/* ---- the draft head ---------------------------------------------------------------------- */

static es_status check_drafter(const es_target *t, const es_drafter *drafter)
{
    if (drafter->head->target != t->model) {
        return es_fail(ES_ERR_ARGUMENT, "attach: the drafter's head was opened for another model "
                       "than the target's");
    }
    int64_t told = es_drafter_length(drafter), length = es_kv_length(t->kv);
    if (told != length) {
        return es_fail(ES_ERR_STATE, "attach: expected a drafter that was told of the target's "
                       "%lld positions, got %lld", (long long)length, (long long)told);
    }
    return ES_OK;
}

static es_status attach(es_target *t, es_drafter *drafter)
{
    es_head_info info = {0};
    float *kept = NULL;
    if (drafter != NULL) {
        es_status status = check_drafter(t, drafter);
        if (status != ES_OK) {
            return status;
        }
        info = drafter->head->info;
        size_t width = (size_t)info.n_taps * (size_t)t->model->network.shape.hidden;
        kept = es_calloc((size_t)ES_MAX_ROWS * width + 1, sizeof(*kept)); /* never of size 0 */
        if (kept == NULL) {
            return es_fail(ES_ERR_MEMORY, "attach: no memory for %d hidden states",
                           (int)info.n_taps);
        }
    }
    es_status status = set_taps(t, info.taps, info.n_taps);
    if (status != ES_OK) {
        es_free(kept);
        return status;
    }
    es_free(t->kept);
    t->kept = kept;
    t->drafter = drafter;
    return ES_OK;
}

es_status es_target_attach(es_target *target, es_drafter *drafter)
{
    enter(target);
    return leave(target, attach(target, drafter));
}
