/*
 * ring.c - which slot each KV row lives in.
 *
 * Index x (a committed position, or length + i for row i of an open batch) lives in slot x while x
 * is a sink, else in sinks + (x - sinks) mod room. Nothing else is ever remembered about a slot: a
 * write of index x is what forgets index x - room, and `held` is the first position behind the
 * sinks that no write has forgotten.
 */
#include "ring.h"

#include <stdbool.h>
#include <string.h>

#include "alloc.h"
#include "error.h"

struct es_ring {
    int32_t n_slots;
    int32_t sinks;
    int32_t window;
    int64_t room;        /* slots that are reused: n_slots - sinks */
    int64_t length;      /* committed positions */
    int64_t held;        /* first position >= sinks whose row is still there */
    int32_t n_open;      /* rows of the open batch; -1 = none is open */
    int32_t *depth;      /* (n_slots) of these rows */
};

es_status es_ring_new(int32_t n_slots, int32_t sinks, int32_t window, es_ring **out)
{
    if (out == NULL) {
        return es_fail(ES_ERR_ARGUMENT, "ring: no place for the handle");
    }
    *out = NULL;
    if (sinks < 0 || window < 0 || n_slots < 1) {
        return es_fail(ES_ERR_ARGUMENT, "ring: expected slots >= 1, sinks and window >= 0, got "
                       "%d, %d, %d", (int)n_slots, (int)sinks, (int)window);
    }
    int64_t least = (int64_t)sinks + (window > 0 ? window : 1);
    if (n_slots < least) {
        return es_fail(ES_ERR_ARGUMENT, "ring: %d sinks and a window of %d take %lld slots, got %d",
                       (int)sinks, (int)window, (long long)least, (int)n_slots);
    }
    es_ring *ring = es_calloc(1, sizeof *ring);
    int32_t *depth = es_calloc((size_t)n_slots, sizeof *depth);
    if (ring == NULL || depth == NULL) {
        es_free(ring);
        es_free(depth);
        return es_fail(ES_ERR_MEMORY, "ring: no memory for %d slots", (int)n_slots);
    }
    *ring = (es_ring){.n_slots = n_slots, .sinks = sinks, .window = window,
                      .room = n_slots - sinks, .held = sinks, .n_open = -1, .depth = depth};
    *out = ring;
    return ES_OK;
}

void es_ring_free(es_ring *ring)
{
    if (ring != NULL) {
        es_free(ring->depth);
        es_free(ring);
    }
}

int64_t es_ring_length(const es_ring *ring)
{
    return ring->length;
}

int32_t es_ring_slot(const es_ring *ring, int64_t index)
{
    int64_t sinks = ring->sinks;
    return (int32_t)(index < sinks ? index : sinks + (index - sinks) % ring->room);
}

/* First position behind the sinks that the row at `position` sees. */
static int64_t seen_from(const es_ring *ring, int64_t position)
{
    int64_t first = ring->window > 0 ? position - ring->window + 1 : 0;
    return first > ring->sinks ? first : ring->sinks;
}

static es_status forgotten(const es_ring *ring, int64_t position, int64_t first)
{
    return es_fail(ES_ERR_CONTEXT, "ring: the row at %lld sees positions from %lld, those before "
                   "%lld have been overwritten", (long long)position, (long long)first,
                   (long long)ring->held);
}

/* Opens rows behind `open` others. Depths of a tree with one root, or with any number. */
static es_status place(es_ring *ring, const int32_t *depth, int32_t open, int32_t n, bool is_tree)
{
    /* the last row forgets index last - room, which the lowest row must not see */
    int64_t last = ring->length + open + n - 1;
    int64_t lost = last - ring->room;
    if (n > ring->n_slots - open ||
        (lost >= ring->sinks && lost >= seen_from(ring, ring->length))) {
        return es_fail(ES_ERR_CONTEXT, "ring: %d rows behind %lld do not fit %d slots with %d "
                       "sinks and a window of %d", (int)n, (long long)ring->length + open,
                       (int)ring->n_slots, (int)ring->sinks, (int)ring->window);
    }
    int32_t deepest = -1;
    for (int32_t i = 0; i < open; i++) {
        deepest = ring->depth[i] > deepest ? ring->depth[i] : deepest;
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t least = is_tree && open + i > 0;
        if (depth[i] < least || depth[i] > deepest + 1) {
            return es_fail(ES_ERR_ARGUMENT, "ring: depth[%d]: expected %d..%d, got %d", (int)i,
                           (int)least, (int)deepest + 1, (int)depth[i]);
        }
        deepest = depth[i] > deepest ? depth[i] : deepest;
    }
    memcpy(ring->depth + open, depth, (size_t)n * sizeof *depth);
    ring->n_open = open + n;
    ring->held = lost + 1 > ring->held ? lost + 1 : ring->held;
    return ES_OK;
}

es_status es_ring_append(es_ring *ring, const int32_t *depth, int32_t n, int32_t *slot)
{
    if (ring->n_open >= 0) {
        return es_fail(ES_ERR_STATE, "ring: append before the last one was committed or rolled "
                       "back");
    }
    if (n < 1 || depth == NULL || slot == NULL) {
        return es_fail(ES_ERR_ARGUMENT, "ring: expected at least one row to append, got %d",
                       (int)n);
    }
    es_status status = place(ring, depth, 0, n, true);
    for (int32_t i = 0; i < n && status == ES_OK; i++) {
        slot[i] = es_ring_slot(ring, ring->length + i);
    }
    return status;
}

es_status es_ring_extend(es_ring *ring, const int32_t *depth, int32_t n)
{
    return place(ring, depth, ring->n_open > 0 ? ring->n_open : 0, n, false);
}

es_status es_ring_commit(es_ring *ring, const int32_t *path, int32_t n_path, int32_t *from,
                         int32_t *to, int32_t *n_moves)
{
    if (ring->n_open < 0) {
        return es_fail(ES_ERR_STATE, "ring: commit without an append");
    }
    if (n_path < 0 || n_moves == NULL ||
        (n_path > 0 && (path == NULL || from == NULL || to == NULL))) {
        return es_fail(ES_ERR_ARGUMENT, "ring: expected a path and room for its moves, got %d rows",
                       (int)n_path);
    }
    for (int32_t i = 0; i < n_path; i++) {
        int32_t least = i == 0 ? 0 : path[i - 1] + 1;
        if (path[i] < least || path[i] >= ring->n_open) {
            return es_fail(ES_ERR_ARGUMENT, "ring: path[%d]: expected %d..%d, got %d", (int)i,
                           (int)least, (int)ring->n_open - 1, (int)path[i]);
        }
        if (ring->depth[path[i]] != i) {
            return es_fail(ES_ERR_ARGUMENT, "ring: path[%d]: expected a row of depth %d, got row "
                           "%d of depth %d", (int)i, (int)i, (int)path[i],
                           (int)ring->depth[path[i]]);
        }
    }
    *n_moves = 0;
    for (int32_t i = 0; i < n_path; i++) {
        if (path[i] != i) {
            from[*n_moves] = es_ring_slot(ring, ring->length + path[i]);
            to[*n_moves] = es_ring_slot(ring, ring->length + i);
            ++*n_moves;
        }
    }
    ring->length += n_path;
    ring->n_open = -1;
    return ES_OK;
}

es_status es_ring_rollback(es_ring *ring)
{
    if (ring->n_open < 0) {
        return es_fail(ES_ERR_STATE, "ring: rollback without an append");
    }
    ring->n_open = -1;
    return ES_OK;
}

es_status es_ring_truncate(es_ring *ring, int64_t length)
{
    if (ring->n_open >= 0) {
        return es_fail(ES_ERR_STATE, "ring: truncate before the last append was committed or "
                       "rolled back");
    }
    if (length < 0 || length > ring->length) {
        return es_fail(ES_ERR_ARGUMENT, "ring: length: expected 0..%lld, got %lld",
                       (long long)ring->length, (long long)length);
    }
    int64_t first = seen_from(ring, length);
    if (first < length && first < ring->held) {
        return forgotten(ring, length, first);
    }
    /* what was forgotten behind the new end does not matter: it will be written again */
    int64_t end = length > ring->sinks ? length : ring->sinks;
    ring->held = ring->held < end ? ring->held : end;
    ring->length = length;
    return ES_OK;
}

es_status es_ring_visible(const es_ring *ring, int64_t position, int32_t *slot, int32_t *n)
{
    if (position < 0 || slot == NULL || n == NULL) {
        return es_fail(ES_ERR_ARGUMENT, "ring: position: expected 0 or more, got %lld",
                       (long long)position);
    }
    int64_t end = position < ring->length ? position + 1 : ring->length;
    int64_t first = seen_from(ring, position);
    if (first < end && first < ring->held) {
        return forgotten(ring, position, first);
    }
    *n = 0;
    for (int64_t p = 0; p < end && p < ring->sinks; p++) {
        slot[(*n)++] = es_ring_slot(ring, p);
    }
    for (int64_t p = first; p < end; p++) {
        slot[(*n)++] = es_ring_slot(ring, p);
    }
    return ES_OK;
}
