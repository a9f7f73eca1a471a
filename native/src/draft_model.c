/*
 * draft_model.c - see draft_model.h.
 */
#include "draft_model.h"

#include "alloc.h"
#include "carver.h"
#include "draft_net.h"
#include "error.h"
#include "kvcache.h"

enum { SINKS = 4 };            /* first rows that stay in sight, of a model without windows */

struct es_small {
    const es_head *head;
    es_kv *kv;
    int64_t base;              /* position of the cache's first row */
    int32_t limit;             /* committed rows at which it begins again, with half as many */
    int32_t root;              /* token fed last, when it is not committed yet */
    int32_t n_open;            /* rows of the draft in progress */
    bool is_drafting;
    int32_t row[ES_MAX_ROWS];  /* open row of a row of the tree; -1: it was not expanded */
    float *scratch;            /* (threads, scratch_stride) of attention */
    size_t scratch_stride;
    float *logits;             /* (ES_DRAFT_WIDTH, draft_vocab) */
    void *memory;
};

static const int32_t all_rows[ES_MAX_ROWS] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63,
};

static const es_shape *shape_of(const es_head *head)
{
    return &head->model->network.shape;
}

/* ---- life -------------------------------------------------------------------------------- */

static es_kv_shape kv_shape(const es_head *head, int32_t window)
{
    const es_shape *shape = shape_of(head);
    return (es_kv_shape){.layers = shape->layers, .kv_heads = shape->kv_heads,
                         .head_dim = shape->head_dim, .windowed = head->windowed,
                         .context = window + ES_MAX_ROWS + 1,
                         .window = shape->window > 0 ? shape->window : window,
                         .sinks = shape->window > 0 ? 0 : SINKS, .batch = ES_MAX_ROWS,
                         .format = ES_KV_FORMAT_F16};
}

static size_t carve_all(const es_head *head, const es_kv_shape *kv, char *memory, es_small *s)
{
    es_carver c = {memory, 0};
    size_t vocab = (size_t)head->info.draft_vocab;
    size_t threads = (size_t)es_pool_size(head->target->network.pool);
    s->scratch_stride = (es_kv_scratch(kv, shape_of(head)->heads) + 31) / 16 * 16;
    s->scratch = es_carve(&c, threads * s->scratch_stride, sizeof(float));
    s->logits = es_carve(&c, (size_t)ES_DRAFT_WIDTH * vocab, sizeof(float));
    return c.used + 64;
}

size_t es_small_bytes(const es_head *head, int32_t window)
{
    es_small unused;
    es_kv_shape kv = kv_shape(head, window);
    return sizeof(es_small) + es_kv_bytes(&kv) + carve_all(head, &kv, NULL, &unused);
}

es_status es_small_new(const es_head *head, int32_t window, es_small **out)
{
    es_kv_shape kv = kv_shape(head, window);
    es_small *s = es_calloc(1, sizeof(*s));
    size_t bytes = s == NULL ? 0 : carve_all(head, &kv, NULL, s);
    if (s != NULL) {
        s->head = head;
        s->limit = shape_of(head)->window > 0 ? window : shape_of(head)->max_position;
        s->memory = es_calloc(1, bytes);
    }
    if (s == NULL || s->memory == NULL) {
        es_small_free(s);
        return es_fail(ES_ERR_MEMORY, "drafter: no memory for %zu bytes", bytes);
    }
    carve_all(head, &kv, (char *)s->memory + (64 - (uintptr_t)s->memory % 64) % 64, s);
    es_status status = es_kv_new(&kv, &s->kv);
    if (status != ES_OK) {
        es_small_free(s);
        return status;
    }
    *out = s;
    return ES_OK;
}

void es_small_free(es_small *small)
{
    if (small != NULL) {
        es_kv_free(small->kv);
        es_free(small->memory);
        es_free(small);
    }
}

/* ---- tokens that stay -------------------------------------------------------------------- */

/* The first position whose token is not in the cache. */
static int64_t fed(const es_small *s)
{
    return s->base + es_kv_length(s->kv);
}

/* Begins again with what the history has, but so that there is room to go on. */
static void restart(es_small *s, const es_history *history)
{
    int64_t least = history->length - s->limit / 2;
    es_kv_truncate(s->kv, 0);
    s->base = history->held > least ? history->held : least;
}

/* Forgets the tokens from `position` on; everything, when rows before were overwritten. */
static void forget_from(es_small *s, const es_history *history, int64_t position)
{
    if (position < s->base ||
        (position < fed(s) && es_kv_truncate(s->kv, position - s->base) != ES_OK)) {
        restart(s, history);
    }
}

void es_small_continue(es_small *small, const es_history *history, int32_t token)
{
    if (fed(small) > history->length && token != small->root) {
        forget_from(small, history, history->length);
    }
}

void es_small_truncate(es_small *small, const es_history *history)
{
    forget_from(small, history, history->length);
}

static es_segment segment_of(const es_small *s, const int32_t *token, int32_t n)
{
    return (es_segment){.kv = s->kv, .token = token, .n = n, .position = es_kv_length(s->kv),
                        .scratch = s->scratch, .scratch_stride = s->scratch_stride};
}

/* The next n tokens, the root among them when they are the last. */
static es_status feed(es_small *s, const es_history *history, int32_t root, int32_t n)
{
    const es_model *model = s->head->model;
    int32_t token[ES_MAX_ROWS], last = n - 1;
    int64_t first = fed(s);
    for (int32_t i = 0; i < n; i++) {
        token[i] = first + i < history->length ? es_history_token(history, first + i) : root;
    }
    es_status status = es_kv_append(s->kv, NULL, NULL, n);
    if (status != ES_OK) {
        return status;
    }
    es_segment segment = segment_of(s, token, n);
    es_batch batch = {.segment = &segment, .n_segments = 1, .rows = &last,
                      .n_rows = first + n > history->length, .logits = s->logits};
    es_forward(&model->network, model->work, &batch);
    return es_kv_commit(s->kv, all_rows, n);
}

es_status es_small_begin(es_small *s, const es_history *history, int32_t root,
                         const float **logits)
{
    es_small_end(s);
    forget_from(s, history, history->length);
    if (fed(s) < history->held || history->length - s->base >= s->limit) {
        restart(s, history);
    }
    for (int64_t left; (left = history->length + 1 - fed(s)) > 0;) {
        int32_t n = left < ES_MAX_ROWS ? (int32_t)left : ES_MAX_ROWS;
        /* Of a long chain all but the last row need keys and values only. */
        n = n == left && n > ES_DRAFT_WIDTH ? n - 1 : n;
        es_status status = feed(s, history, root, n);
        if (status != ES_OK) {
            return status;
        }
    }
    for (int32_t i = 0; i < ES_MAX_ROWS; i++) {
        s->row[i] = -1;
    }
    s->root = root;
    s->is_drafting = true;
    *logits = s->logits;
    return ES_OK;
}

/* ---- levels ------------------------------------------------------------------------------ */

es_status es_small_expand(es_small *s, const es_tree *tree, const int32_t *rows, int32_t n,
                          const float **logits)
{
    const es_model *model = s->head->model;
    int32_t token[ES_DRAFT_WIDTH], depth[ES_DRAFT_WIDTH], parent[ES_DRAFT_WIDTH];
    if (!s->is_drafting) {
        return es_fail(ES_ERR_STATE, "draft: a level before the root's");
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t above = tree->parent[rows[i]];
        parent[i] = above == 0 ? -1 : s->row[above];
        if (above != 0 && parent[i] < 0) {
            return es_fail(ES_ERR_STATE, "draft: row %d comes before its parent %d", (int)rows[i],
                           (int)above);
        }
        token[i] = tree->token[rows[i]];
        depth[i] = tree->depth[rows[i]] - 1;
    }
    es_status status = es_kv_extend(s->kv, parent, n);
    if (status != ES_OK) {
        return status;
    }
    es_segment segment = segment_of(s, token, n);
    segment.first = s->n_open;
    segment.depth = depth;
    es_batch batch = {.segment = &segment, .n_segments = 1, .rows = all_rows, .n_rows = n,
                      .logits = s->logits};
    es_forward(&model->network, model->work, &batch);
    for (int32_t i = 0; i < n; i++) {
        s->row[rows[i]] = s->n_open + i;
    }
    s->n_open += n;
    *logits = s->logits;
    return ES_OK;
}

void es_small_end(es_small *small)
{
    es_kv_rollback(small->kv);
    small->n_open = 0;
    small->is_drafting = false;
}
