/*
 * scripted_drafter.c - a drafter whose words a test makes up: the sources of the core that draft,
 * less those of real heads, link with it. It refuses calls that break the contract of draft_net.h.
 */
#include <stdlib.h>
#include <string.h>

#include "draft_net.h"
#include "error.h"

/* Fills logits (vocab) for the tokens behind path (n), the root first. */
typedef void (*es_say)(const int32_t *path, int32_t n, float *logits);
typedef int64_t (*es_told)(void);

struct es_drafter {
    es_draft_net net;
    es_say say;
    es_told told;
    int32_t is_ready;
    int32_t fails_at;          /* number of the pass that fails; 0: none does */
    int32_t passes;            /* of the draft in progress or last ended */
    int32_t rows;              /* expanded in it */
    int32_t is_drafting;
    int32_t depth;             /* of the rows expanded last */
    uint64_t expanded;         /* rows of the tree */
    float *logits;             /* (width, vocab) */
};

static es_status fail_at(es_drafter *d)
{
    d->passes++;
    return d->passes == d->fails_at ? es_fail(ES_ERR_MEMORY, "scripted: no memory") : ES_OK;
}

static es_status begin(void *self, int32_t root, const float **logits, bool *is_ready)
{
    es_drafter *d = self;
    if (d->is_drafting) {
        return es_fail(ES_ERR_STATE, "scripted: begin before end");
    }
    *is_ready = d->is_ready != 0;
    d->passes = d->depth = d->rows = 0;
    d->expanded = 1;
    d->is_drafting = 1;
    if (!*is_ready) {
        return ES_OK;
    }
    es_status status = fail_at(d);
    if (status == ES_OK) {
        d->say(&root, 1, d->logits);
        *logits = d->logits;
    }
    return status;
}

static es_status expand(void *self, const es_tree *tree, const int32_t *rows, int32_t n,
                        const float **logits)
{
    es_drafter *d = self;
    d->depth += n < 1 || tree->depth[rows[0]] > d->depth;
    d->rows += n;
    if (!d->is_drafting || d->passes == 0 || n < 1 || n > d->net.width || d->rows > ES_MAX_ROWS ||
        (d->net.depth > 0 && d->depth >= d->net.depth)) {
        return es_fail(ES_ERR_STATE, "scripted: expand of %d rows at depth %d", (int)n,
                       (int)d->depth);
    }
    es_status status = fail_at(d);
    for (int32_t i = 0; status == ES_OK && i < n; i++) {
        int32_t row = rows[i], path[ES_MAX_ROWS];
        if (row >= tree->n || (i > 0 && row <= rows[i - 1]) || tree->depth[row] != d->depth ||
            !(d->expanded >> tree->parent[row] & 1) || d->expanded >> row & 1) {
            return es_fail(ES_ERR_STATE, "scripted: expand of row %d", (int)row);
        }
        for (int32_t at = row; at >= 0; at = tree->parent[at]) {
            path[tree->depth[at]] = tree->token[at];
        }
        d->say(path, d->depth + 1, d->logits + (size_t)i * (size_t)d->net.vocab);
    }
    for (int32_t i = 0; i < n; i++) {
        d->expanded |= UINT64_C(1) << rows[i];
    }
    *logits = d->logits;
    return status;
}

static void end(void *self)
{
    ((es_drafter *)self)->is_drafting = 0;
}

es_drafter *scripted_new(int32_t vocab, const int32_t *ids, int32_t depth, int32_t width,
                         es_say say, es_told told)
{
    es_drafter *d = calloc(1, sizeof(*d));
    d->net = (es_draft_net){.self = d, .vocab = vocab, .ids = ids, .depth = depth, .width = width,
                            .begin = begin, .expand = expand, .end = end};
    d->say = say;
    d->told = told;
    d->is_ready = 1;
    d->logits = calloc((size_t)width * (size_t)vocab, sizeof(*d->logits));
    return d;
}

void scripted_free(es_drafter *d)
{
    free(d->logits);
    free(d);
}

void scripted_set(es_drafter *d, int32_t is_ready, int32_t fails_at)
{
    d->is_ready = is_ready;
    d->fails_at = fails_at;
}

int32_t scripted_passes(const es_drafter *d)
{
    return d->is_drafting ? -1 : d->passes;
}

const es_draft_net *es_drafter_net(es_drafter *drafter)
{
    return &drafter->net;
}

int64_t es_drafter_length(const es_drafter *drafter)
{
    return drafter->told();
}
