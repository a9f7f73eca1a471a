/* draft_history.h - what a target committed of late: tokens, and hidden states as halves. */
#ifndef ES_DRAFT_HISTORY_H
#define ES_DRAFT_HISTORY_H

#include <stddef.h>
#include <stdint.h>

#include "edgespec.h"
#include "kernels/kernels.h"

/* A ring over the last rows positions. A row's hidden states are kept as halves of values times a
   power of two, 1 unless they are too large for halves. */
typedef struct es_history {
    const es_kernels *kernels;
    int32_t rows, width;         /* width 0: of drafts that read no hidden states */
    int64_t length;              /* positions committed */
    int64_t held;                /* rows [held, length) are there */
    int32_t *token;              /* (rows) */
    float *unit;                 /* (rows) what the halves are multiplied by */
    uint16_t *taps;              /* (rows, width) */
    float *scaled;               /* (width) scratch */
} es_history;

size_t es_history_bytes(int32_t rows, int32_t width);
es_status es_history_init(es_history *history, const es_kernels *kernels, int32_t rows,
                          int32_t width);
void es_history_clear(es_history *history);              /* a zeroed one is a no-op */

/* tokens (n), taps (n, width) */
void es_history_append(es_history *history, const int32_t *tokens, const float *taps, size_t n);
void es_history_truncate(es_history *history, int64_t length);

/* Of a position in [held, length). */
int32_t es_history_token(const es_history *history, int64_t position);
void es_history_taps(const es_history *history, int64_t position, float *out);

#endif
