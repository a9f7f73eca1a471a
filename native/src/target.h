/* target.h - what a target is made of: target.c is its life and work, round_run.c drives it. */
#ifndef ES_TARGET_H
#define ES_TARGET_H

#include <stddef.h>
#include <stdint.h>

#include "edgespec.h"
#include "kvcache.h"
#include "model.h"

struct es_target {
    es_model *model;
    es_target_params params;
    es_kv *kv;
    float *scratch;              /* (threads, scratch_stride) of attention */
    size_t scratch_stride;
    float *logits;               /* (logits_rows, vocab) of rounds whose host wants none */
    int32_t logits_rows;
    int32_t *taps;               /* (n_taps) hidden states kept of every forward */
    int32_t n_taps;
    int32_t tapped_rows;         /* of the last forward; 0: there was none since the taps were set */
    float *tapped;               /* (ES_MAX_ROWS, n_taps, hidden) */
    es_drafter *drafter;         /* kept in step, the host's; NULL: none */
    int32_t token[ES_MAX_ROWS];  /* of the rows forwarded last, for the drafter */
    float *kept;                 /* (ES_MAX_ROWS, n_taps, hidden) rows on their way to it */
};

#endif
