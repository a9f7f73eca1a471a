/*
 * draft_eagle.c - see draft_eagle.h.
 */
#include "draft_eagle.h"

#include <string.h>

#include "alloc.h"
#include "carver.h"
#include "draft_net.h"
#include "error.h"
#include "kvcache.h"

struct es_eagle {
    const es_head *head;
    es_kv *kv;
    int64_t base;              /* position of the cache's first row */
    int32_t root;              /* token of the pair fed last */
    int32_t n_open;            /* rows of the draft in progress */
    int32_t row[ES_MAX_ROWS];  /* open row of a row of the tree; -1: it was not expanded */
    float *scratch;            /* (threads, scratch_stride) of attention */
    size_t scratch_stride;
    float *taken;              /* (ES_MAX_ROWS, taps_width) pairs' features from the target */
    float *feature;            /* (1 + ES_MAX_ROWS, hidden) made by the root's pair and open rows */
    float *given;              /* (ES_DRAFT_WIDTH, hidden) of a level's parents */
    float *logits;             /* (ES_DRAFT_WIDTH, draft_vocab) */
    void *memory;
};

static const int32_t all_rows[ES_MAX_ROWS] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63,
};

/* ---- life -------------------------------------------------------------------------------- */

static es_kv_shape kv_shape(const es_head *head, int32_t window)
{
    static const uint8_t windowed = 1;
    const es_shape *shape = &head->network.shape;
    return (es_kv_shape){.layers = 1, .kv_heads = shape->kv_heads, .head_dim = shape->head_dim,
                         .windowed = &windowed, .context = window, .window = window,
                         .batch = ES_MAX_ROWS, .format = ES_KV_FORMAT_F16};
}

static size_t carve_all(const es_head *head, const es_kv_shape *kv, char *memory, es_eagle *e)
{
    es_carver c = {memory, 0};
    size_t hidden = (size_t)head->info.hidden, vocab = (size_t)head->info.draft_vocab;
    size_t threads = (size_t)es_pool_size(head->network.pool);
    e->scratch_stride = (es_kv_scratch(kv, head->network.shape.heads) + 31) / 16 * 16;
    e->scratch = es_carve(&c, threads * e->scratch_stride, sizeof(float));
    e->taken = es_carve(&c, (size_t)ES_MAX_ROWS * (size_t)head->taps_width, sizeof(float));
    e->feature = es_carve(&c, (1 + (size_t)ES_MAX_ROWS) * hidden, sizeof(float));
    e->given = es_carve(&c, (size_t)ES_DRAFT_WIDTH * hidden, sizeof(float));
    e->logits = es_carve(&c, (size_t)ES_DRAFT_WIDTH * vocab, sizeof(float));
    return c.used + 64;
}

size_t es_eagle_bytes(const es_head *head, int32_t window)
{
    es_eagle unused;
    es_kv_shape kv = kv_shape(head, window);
    return sizeof(es_eagle) + es_kv_bytes(&kv) + carve_all(head, &kv, NULL, &unused);
}

es_status es_eagle_new(const es_head *head, int32_t window, es_eagle **out)
{
    es_kv_shape kv = kv_shape(head, window);
    es_eagle *e = es_calloc(1, sizeof(*e));
    size_t bytes = e == NULL ? 0 : carve_all(head, &kv, NULL, e);
    if (e != NULL) {
        e->head = head;
        e->memory = es_calloc(1, bytes);
    }
    if (e == NULL || e->memory == NULL) {
        es_eagle_free(e);
        return es_fail(ES_ERR_MEMORY, "drafter: no memory for %zu bytes", bytes);
    }
    carve_all(head, &kv, (char *)e->memory + (64 - (uintptr_t)e->memory % 64) % 64, e);
    es_status status = es_kv_new(&kv, &e->kv);
    if (status != ES_OK) {
        es_eagle_free(e);
        return status;
    }
    *out = e;
    return ES_OK;
}

void es_eagle_free(es_eagle *eagle)
{
    if (eagle != NULL) {
        es_kv_free(eagle->kv);
        es_free(eagle->memory);
        es_free(eagle);
    }
}

/* ---- pairs that stay --------------------------------------------------------------------- */

/* The first position whose pair is not in the cache. */
static int64_t fed(const es_eagle *e)
{
    return e->base + es_kv_length(e->kv);
}

/* Begins again with what the history has. */
static void restart(es_eagle *e, const es_history *history)
{
    es_kv_truncate(e->kv, 0);
    e->base = history->held;
}

/* Forgets the pairs from `position` on; everything, when the rows before have been overwritten. */
static void forget_from(es_eagle *e, const es_history *history, int64_t position)
{
    if (position < e->base ||
        (position < fed(e) && es_kv_truncate(e->kv, position - e->base) != ES_OK)) {
        restart(e, history);
    }
}

void es_eagle_continue(es_eagle *eagle, const es_history *history, int32_t token)
{
    if (fed(eagle) == history->length && token != eagle->root) {
        forget_from(eagle, history, history->length - 1);
    }
}

void es_eagle_truncate(es_eagle *eagle, const es_history *history)
{
    forget_from(eagle, history, history->length - 1);
}

static es_segment segment_of(const es_eagle *e, const int32_t *token, int32_t n)
{
    return (es_segment){.kv = e->kv, .token = token, .n = n, .position = fed(e),
                        .scratch = e->scratch, .scratch_stride = e->scratch_stride};
}

/* The next n pairs, the root's among them when they are the last. */
static es_status feed(es_eagle *e, const es_history *history, int32_t root, int32_t n)
{
    int32_t token[ES_MAX_ROWS], last = n - 1;
    int64_t first = fed(e);
    bool is_last = first + n == history->length;
    for (int32_t i = 0; i < n; i++) {
        int64_t next = first + i + 1;
        token[i] = next < history->length ? es_history_token(history, next) : root;
        es_history_taps(history, first + i, e->taken + (size_t)i * (size_t)history->width);
    }
    es_status status = es_kv_append(e->kv, NULL, NULL, n);
    if (status != ES_OK) {
        return status;
    }
    es_segment segment = segment_of(e, token, n);
    segment.feature = e->taken;
    segment.is_from_target = true;
    es_batch batch = {.segment = &segment, .n_segments = 1, .rows = &last, .n_rows = is_last,
                      .logits = e->logits, .handed = e->feature};
    es_forward(&e->head->network, e->head->work, &batch);
    return es_kv_commit(e->kv, all_rows, n);
}

es_status es_eagle_begin(es_eagle *e, const es_history *history, int32_t root,
                         const float **logits)
{
    es_eagle_end(e);
    forget_from(e, history, history->length - 1);
    if (fed(e) < history->held) {
        restart(e, history);
    }
    for (int64_t left = history->length - fed(e); left > 0; left = history->length - fed(e)) {
        int32_t n = left < ES_MAX_ROWS ? (int32_t)left : ES_MAX_ROWS;
        es_status status = feed(e, history, root, n);
        if (status != ES_OK) {
            return status;
        }
    }
    for (int32_t i = 0; i < ES_MAX_ROWS; i++) {
        e->row[i] = -1;
    }
    e->root = root;
    *logits = e->logits;
    return ES_OK;
}

/* ---- levels ------------------------------------------------------------------------------ */

es_status es_eagle_expand(es_eagle *e, const es_tree *tree, const int32_t *rows, int32_t n,
                          const float **logits)
{
    int32_t token[ES_DRAFT_WIDTH], depth[ES_DRAFT_WIDTH], parent[ES_DRAFT_WIDTH];
    size_t hidden = (size_t)e->head->info.hidden;
    for (int32_t i = 0; i < n; i++) {
        int32_t above = tree->parent[rows[i]];
        parent[i] = above == 0 ? -1 : e->row[above];
        if (above != 0 && parent[i] < 0) {
            return es_fail(ES_ERR_STATE, "draft: row %d comes before its parent %d", (int)rows[i],
                           (int)above);
        }
        token[i] = tree->token[rows[i]];
        depth[i] = tree->depth[rows[i]] - 1;
        memcpy(e->given + (size_t)i * hidden, e->feature + (size_t)(1 + parent[i]) * hidden,
               hidden * sizeof(float));
    }
    es_status status = es_kv_extend(e->kv, parent, n);
    if (status != ES_OK) {
        return status;
    }
    es_segment segment = segment_of(e, token, n);
    segment.first = e->n_open;
    segment.depth = depth;
    segment.feature = e->given;
    es_batch batch = {.segment = &segment, .n_segments = 1, .rows = all_rows, .n_rows = n,
                      .logits = e->logits,
                      .handed = e->feature + (size_t)(1 + e->n_open) * hidden};
    es_forward(&e->head->network, e->head->work, &batch);
    for (int32_t i = 0; i < n; i++) {
        e->row[rows[i]] = e->n_open + i;
    }
    e->n_open += n;
    *logits = e->logits;
    return ES_OK;
}

void es_eagle_end(es_eagle *eagle)
{
    es_kv_rollback(eagle->kv);
    eagle->n_open = 0;
}
