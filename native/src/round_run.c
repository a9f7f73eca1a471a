/* round_run.c - a whole round in one call, for a target of the core's own. */
#include "clock.h"

#include "alloc.h"
#include "error.h"
#include "session.h"
#include "target.h"

/* Room for the logits of n rows. It only grows, so that rounds do not allocate. */
static es_status reserve(es_target *t, int32_t n)
{
    if (n <= t->logits_rows) {
        return ES_OK;
    }
    es_free(t->logits);
    t->logits_rows = 0;
    size_t vocab = (size_t)t->model->network.shape.vocab;
    t->logits = es_calloc((size_t)n * vocab, sizeof(float));
    if (t->logits == NULL) {
        return es_fail(ES_ERR_MEMORY, "round: no memory for the logits of %d rows", (int)n);
    }
    t->logits_rows = n;
    return ES_OK;
}

static es_status check(const es_session *session, const es_target *target)
{
    int32_t vocab = target->model->network.shape.vocab;
    if (session->vocab > vocab) {
        return es_fail(ES_ERR_ARGUMENT, "round: expected a session of at most the model's %d "
                       "tokens, got %d", (int)vocab, (int)session->vocab);
    }
    int64_t length = es_target_length(target);
    if (length + 1 != (int64_t)session->length) {
        return es_fail(ES_ERR_STATE, "round: expected a target of %lld positions, the sequence "
                       "less its last token, got %lld", (long long)session->length - 1,
                       (long long)length);
    }
    return ES_OK;
}

es_status es_round_run(es_session *session, es_target *target, es_round_kind kind, es_tree *tree,
                       float *logits, es_round *out)
{
    es_status status = check(session, target);
    if (status != ES_OK) {
        return status;
    }
    es_tree made;
    es_tree *t = tree == NULL ? &made : tree;
    status = es_round_begin(session, kind, t);
    if (status != ES_OK) {
        return status;
    }
    if (logits == NULL) {
        status = reserve(target, t->n);
        logits = target->logits;
    }
    if (status == ES_OK) {
        double start = es_now();
        status = es_target_forward(target, t, NULL, 0, logits);
        double seconds = es_now() - start;
        if (status == ES_OK) {
            size_t stride = (size_t)target->model->network.shape.vocab;
            status = es_round_finish(session, logits, stride, NULL, seconds, out);
        }
    }
    if (status != ES_OK) {
        es_round_abandon(session);
        return status;
    }
    return es_target_commit(target, out->row, out->n);
}
