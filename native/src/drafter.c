/*
 * drafter.c - keeps a drafter in step with its target and hands its head's logits out.
 *
 * Being told of tokens costs a copy: the head reads them when a draft is wanted. Nothing it is told
 * can fail; what it no longer has, it drafts without.
 */
#include "drafter.h"

#include "error.h"

enum { WINDOW = 1024 };

/* ---- the net ----------------------------------------------------------------------------- */

static es_status begin(void *self, int32_t root, const float **logits, bool *is_ready)
{
    es_drafter *d = self;
    const es_history *history = &d->history;
    int32_t vocab = d->head->target->network.shape.vocab;
    *is_ready = history->held < history->length;
    if (root < 0 || root >= vocab) {
        return es_fail(ES_ERR_ARGUMENT, "draft: root: expected a token from 0 to %d, got %d",
                       (int)vocab - 1, (int)root);
    }
    if (!*is_ready) {
        return ES_OK;
    }
    pthread_mutex_lock(&d->head->target->lock);
    es_status status = d->eagle != NULL   ? es_eagle_begin(d->eagle, history, root, logits)
                       : d->small != NULL ? es_small_begin(d->small, history, root, logits)
                                          : es_medusa_begin(d->medusa, history, logits);
    pthread_mutex_unlock(&d->head->target->lock);
    d->is_drafting = *is_ready = status == ES_OK;
    return status;
}

static es_status expand(void *self, const es_tree *tree, const int32_t *rows, int32_t n,
                        const float **logits)
{
    es_drafter *d = self;
    if (!d->is_drafting) {
        return es_fail(ES_ERR_STATE, "draft: a level before the root's");
    }
    if (n < 1 || n > d->net.width) {
        return es_fail(ES_ERR_ARGUMENT, "draft: expected 1 to %d rows to expand, got %d",
                       (int)d->net.width, (int)n);
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t least = i == 0 ? 1 : rows[i - 1] + 1;
        if (rows[i] < least || rows[i] >= tree->n || tree->depth[rows[i]] != tree->depth[rows[0]]) {
            return es_fail(ES_ERR_ARGUMENT, "draft: rows[%d]: expected %d to %d of depth %d, got "
                           "%d", (int)i, (int)least, (int)tree->n - 1,
                           (int)tree->depth[rows[0]], (int)rows[i]);
        }
    }
    pthread_mutex_lock(&d->head->target->lock);
    es_status status = d->eagle != NULL   ? es_eagle_expand(d->eagle, tree, rows, n, logits)
                       : d->small != NULL ? es_small_expand(d->small, tree, rows, n, logits)
                                          : es_medusa_expand(d->medusa, tree, rows, n, logits);
    pthread_mutex_unlock(&d->head->target->lock);
    return status;
}

static void end(void *self)
{
    es_drafter *d = self;
    d->is_drafting = false;
    if (d->eagle != NULL) {
        es_eagle_end(d->eagle);
    } else if (d->small != NULL) {
        es_small_end(d->small);
    }
}

const es_draft_net *es_drafter_net(es_drafter *drafter)
{
    return &drafter->net;
}

/* ---- life -------------------------------------------------------------------------------- */

es_status es_drafter_params_default(es_drafter_params *out)
{
    *out = (es_drafter_params){.window = 0};
    return ES_OK;
}

/* Positions that are kept: Medusa looks at the last one only. */
static es_status window_of(const es_head *head, const es_drafter_params *params, int32_t *out)
{
    if (params->window < 0) {
        return es_fail(ES_ERR_ARGUMENT, "drafter: window: expected 0 or more, got %d",
                       (int)params->window);
    }
    int32_t window = params->window > 0 ? params->window : WINDOW;
    *out = head->info.kind == ES_HEAD_MEDUSA ? 1 : window < head->window ? window : head->window;
    return ES_OK;
}

es_status es_drafter_memory(const es_head *head, const es_drafter_params *params, size_t *bytes)
{
    int32_t window = 1;
    es_status status = window_of(head, params, &window);
    if (status == ES_OK) {
        *bytes = sizeof(es_drafter) + es_history_bytes(window, head->taps_width) +
                 (head->info.kind == ES_HEAD_MEDUSA  ? es_medusa_bytes(head)
                  : head->info.kind == ES_HEAD_MODEL ? es_small_bytes(head, window)
                                                     : es_eagle_bytes(head, window));
    }
    return status;
}

es_status es_drafter_new(es_head *head, const es_drafter_params *params, es_drafter **out)
{
    int32_t window = 1;
    es_status status = window_of(head, params, &window);
    if (status != ES_OK) {
        return status;
    }
    es_drafter *d = es_calloc(1, sizeof(*d));
    if (d == NULL) {
        return es_fail(ES_ERR_MEMORY, "drafter: no memory");
    }
    d->head = head;
    d->net = (es_draft_net){.self = d, .vocab = head->info.draft_vocab, .ids = head->ids,
                            .depth = head->info.depth, .width = ES_DRAFT_WIDTH, .begin = begin,
                            .expand = expand, .end = end};
    status = es_history_init(&d->history, head->target->network.kernels, window, head->taps_width);
    if (status == ES_OK) {
        status = head->info.kind == ES_HEAD_MEDUSA  ? es_medusa_new(head, &d->medusa)
                 : head->info.kind == ES_HEAD_MODEL ? es_small_new(head, window, &d->small)
                                                    : es_eagle_new(head, window, &d->eagle);
    }
    if (status != ES_OK) {
        es_drafter_free(d);
        return status;
    }
    *out = d;
    return ES_OK;
}

void es_drafter_free(es_drafter *drafter)
{
    if (drafter != NULL) {
        es_history_clear(&drafter->history);
        es_eagle_free(drafter->eagle);
        es_medusa_free(drafter->medusa);
        es_small_free(drafter->small);
        es_free(drafter);
    }
}

/* ---- keeping step ------------------------------------------------------------------------ */

int64_t es_drafter_length(const es_drafter *drafter)
{
    return drafter->history.length;
}

es_status es_drafter_append(es_drafter *drafter, const int32_t *tokens, const float *taps, size_t n)
{
    int32_t vocab = drafter->head->target->network.shape.vocab;
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || tokens[i] >= vocab) {
            return es_fail(ES_ERR_ARGUMENT, "drafter: tokens[%zu]: expected 0 to %d, got %d", i,
                           (int)vocab - 1, (int)tokens[i]);
        }
    }
    end(drafter);
    if (n > 0 && drafter->eagle != NULL) {
        es_eagle_continue(drafter->eagle, &drafter->history, tokens[0]);
    } else if (n > 0 && drafter->small != NULL) {
        es_small_continue(drafter->small, &drafter->history, tokens[0]);
    }
    es_history_append(&drafter->history, tokens, taps, n);
    return ES_OK;
}

es_status es_drafter_truncate(es_drafter *drafter, int64_t length)
{
    if (length < 0 || length > drafter->history.length) {
        return es_fail(ES_ERR_ARGUMENT, "drafter: length: expected 0 to %lld, got %lld",
                       (long long)drafter->history.length, (long long)length);
    }
    end(drafter);
    es_history_truncate(&drafter->history, length);
    if (drafter->eagle != NULL) {
        es_eagle_truncate(drafter->eagle, &drafter->history);
    } else if (drafter->small != NULL) {
        es_small_truncate(drafter->small, &drafter->history);
    }
    return ES_OK;
}
