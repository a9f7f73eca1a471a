/*
 * draft_history.c - see draft_history.h.
 */
#include "draft_history.h"

#include <string.h>

#include "alloc.h"
#include "error.h"

static const float LARGEST = 32768.0f; /* of the values kept: well inside what halves hold */

size_t es_history_bytes(int32_t rows, int32_t width)
{
    size_t row = (size_t)width * sizeof(uint16_t) + sizeof(int32_t) + sizeof(float);
    return (size_t)rows * row + (size_t)width * sizeof(float);
}

es_status es_history_init(es_history *history, const es_kernels *kernels, int32_t rows,
                          int32_t width)
{
    *history = (es_history){.kernels = kernels, .rows = rows, .width = width};
    history->token = es_calloc((size_t)rows, sizeof(*history->token));
    history->unit = es_calloc((size_t)rows, sizeof(*history->unit));
    if (width > 0) {
        history->taps = es_calloc((size_t)rows * (size_t)width, sizeof(*history->taps));
        history->scaled = es_calloc((size_t)width, sizeof(*history->scaled));
    }
    if (history->token == NULL || history->unit == NULL ||
        (width > 0 && (history->taps == NULL || history->scaled == NULL))) {
        es_history_clear(history);
        return es_fail(ES_ERR_MEMORY, "drafter: no memory for %d hidden states of %d values",
                       (int)rows, (int)width);
    }
    return ES_OK;
}

void es_history_clear(es_history *history)
{
    es_free(history->token);
    es_free(history->unit);
    es_free(history->taps);
    es_free(history->scaled);
    *history = (es_history){0};
}

/* The power of two that brings x (n) into the range of halves; of NaN and infinity anything. */
static float unit_of(const float *x, int32_t n)
{
    uint32_t most = 0;
    for (int32_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof(bits));
        bits &= 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    float largest, unit = 1.0f;
    memcpy(&largest, &most, sizeof(largest));
    while (largest > LARGEST && unit < 0x1p120f) {
        largest *= 0.5f;
        unit *= 2.0f;
    }
    return unit;
}

static void keep_taps(es_history *h, size_t slot, const float *taps)
{
    float unit = unit_of(taps, h->width);
    if (unit != 1.0f) {
        h->kernels->scale(h->scaled, taps, 1.0f / unit, h->width);
        taps = h->scaled;
    }
    h->kernels->kv_store_value(ES_KV_FORMAT_F16, h->taps + slot * (size_t)h->width, NULL, h->width,
                               0, taps);
    h->unit[slot] = unit;
}

static void keep(es_history *h, int32_t token, const float *taps)
{
    size_t slot = (size_t)(h->length % h->rows);
    if (h->width > 0) {
        keep_taps(h, slot, taps);
    }
    h->token[slot] = token;
    h->length++;
    h->held = h->length - h->rows > h->held ? h->length - h->rows : h->held;
}

void es_history_append(es_history *history, const int32_t *tokens, const float *taps, size_t n)
{
    size_t skipped = n > (size_t)history->rows ? n - (size_t)history->rows : 0;
    if (skipped > 0) {
        history->length += (int64_t)skipped;
        history->held = history->length;
    }
    uint64_t mode = es_fp_enter();
    for (size_t i = skipped; i < n; i++) {
        keep(history, tokens[i],
             history->width == 0 ? NULL : taps + i * (size_t)history->width);
    }
    es_fp_leave(mode);
}

void es_history_truncate(es_history *history, int64_t length)
{
    history->length = length;
    history->held = length < history->held ? length : history->held;
}

int32_t es_history_token(const es_history *history, int64_t position)
{
    return history->token[position % history->rows];
}

void es_history_taps(const es_history *history, int64_t position, float *out)
{
    size_t slot = (size_t)(position % history->rows);
    memset(out, 0, (size_t)history->width * sizeof(*out));
    history->kernels->attn_mix(ES_KV_FORMAT_F16, history->taps + slot * (size_t)history->width,
                               NULL, history->width, 0, 1, history->unit + slot, 1, 1, &out);
}
