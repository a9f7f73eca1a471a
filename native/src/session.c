/* session.c - the life of a session: its parameters, its sequence, the start of a reply. */
#include "session.h"

#include <math.h>
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "sample.h"

static es_status check_tokens(const int32_t *tokens, size_t n, int32_t vocab, const char *what)
{
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || tokens[i] >= vocab) {
            return es_fail(ES_ERR_ARGUMENT, "%s: expected tokens in [0, %d), got %d at %zu", what,
                           (int)vocab, (int)tokens[i], i);
        }
    }
    return ES_OK;
}

static es_status check_closed(const es_session *session, const char *what)
{
    if (session->is_open) {
        return es_fail(ES_ERR_STATE, "%s: a round is open; finish or abandon it first", what);
    }
    return ES_OK;
}

/* ---- birth and death --------------------------------------------------------------------- */

es_status es_session_params_default(es_session_params *out)
{
    *out = (es_session_params){
        .draft = ES_DRAFT_NONE,
        .tree = ES_TREE_AUTO,
        .rows = 16,
        .ngram_capacity = (size_t)1 << 16,
        .cost_slope = 0.2,
    };
    return ES_OK;
}

static es_status check_costs(const es_session_params *params)
{
    if (params->kv_block < 0) {
        return es_fail(ES_ERR_ARGUMENT, "kv_block: expected 0 (none) or more, got %d",
                       (int)params->kv_block);
    }
    if (!(params->cost_slope >= 0.0) || isinf(params->cost_slope)) {
        return es_fail(ES_ERR_ARGUMENT, "cost_slope: expected 0 or more, got %g",
                       params->cost_slope);
    }
    for (int32_t n = 1; params->cost != NULL && n <= ES_MAX_ROWS; n++) {
        if (!(params->cost[n] >= 0.0) || isinf(params->cost[n])) {
            return es_fail(ES_ERR_ARGUMENT, "cost[%d]: expected 0 (unknown) or more, got %g",
                           (int)n, params->cost[n]);
        }
    }
    return ES_OK;
}

static es_status check_params(const es_session_params *params)
{
    if (params->vocab < 1) {
        return es_fail(ES_ERR_ARGUMENT, "vocab: expected 1 or more, got %d", (int)params->vocab);
    }
    if (params->context < 1) {
        return es_fail(ES_ERR_ARGUMENT, "context: expected 1 or more, got %d",
                       (int)params->context);
    }
    if (params->rows < 1 || params->rows > ES_MAX_ROWS) {
        return es_fail(ES_ERR_ARGUMENT, "rows: expected 1 to %d, got %d", ES_MAX_ROWS,
                       (int)params->rows);
    }
    if (params->draft != ES_DRAFT_NONE && params->draft != ES_DRAFT_NGRAM) {
        return es_fail(ES_ERR_ARGUMENT, "draft: expected 0 or 1, got %d", (int)params->draft);
    }
    if (params->tree != ES_TREE_AUTO && params->tree != ES_TREE_BEST &&
        params->tree != ES_TREE_SHAPE) {
        return es_fail(ES_ERR_ARGUMENT, "tree: expected 0 to 2, got %d", (int)params->tree);
    }
    if (params->tree == ES_TREE_SHAPE && params->shape == NULL) {
        return es_fail(ES_ERR_ARGUMENT, "shape: a static tree was asked for but none is given");
    }
    if (params->n_eos < 0) {
        return es_fail(ES_ERR_ARGUMENT, "n_eos: expected 0 or more, got %d", (int)params->n_eos);
    }
    es_status status =
        check_tokens(params->eos, (size_t)params->n_eos, params->vocab, "eos");
    return status != ES_OK ? status : check_costs(params);
}

es_status es_session_new(const es_session_params *params, es_session **out)
{
    es_status status = check_params(params);
    if (status != ES_OK) {
        return status;
    }
    es_session *s = es_calloc(1, sizeof(*s));
    if (s == NULL) {
        return es_fail(ES_ERR_MEMORY, "session: no memory");
    }
    s->vocab = params->vocab;
    s->context = params->context;
    s->rows = params->rows;
    s->kv_block = params->kv_block;
    s->draft = params->draft;
    s->mode = params->tree;
    s->is_blind = params->blind_ranks != 0;
    s->n_eos = params->n_eos;
    if (s->mode == ES_TREE_SHAPE) {
        s->shape = *params->shape;
        status = es_tree_derive(&s->shape);
    }
    /* A token of slack, so that no size is 0. */
    s->eos = es_malloc(((size_t)s->n_eos + 1) * sizeof(*s->eos));
    s->tokens = es_malloc(((size_t)s->context + 1) * sizeof(*s->tokens));
    s->scratch = es_malloc((size_t)s->vocab * sizeof(*s->scratch));
    if (status == ES_OK && (s->eos == NULL || s->tokens == NULL || s->scratch == NULL)) {
        status = es_fail(ES_ERR_MEMORY, "session: no memory for a context of %d and %d tokens",
                         (int)s->context, (int)s->vocab);
    }
    if (status == ES_OK && s->draft == ES_DRAFT_NGRAM) {
        status = es_ngram_new(params->ngram_capacity, &s->ngram);
    }
    if (status != ES_OK) {
        es_session_free(s);
        return status;
    }
    if (s->n_eos > 0) {
        memcpy(s->eos, params->eos, (size_t)s->n_eos * sizeof(*s->eos));
    }
    es_plan_init(&s->plan, params->cost, params->cost_slope);
    *out = s;
    return ES_OK;
}

void es_session_free(es_session *session)
{
    if (session == NULL) {
        return;
    }
    es_ngram_free(session->ngram);
    es_grow_free(session->grow);
    es_free(session->eos);
    es_free(session->tokens);
    es_free(session->scratch);
    es_free(session->bias_token);
    es_free(session->bias_value);
    es_free(session);
}

/* ---- the draft head ---------------------------------------------------------------------- */

es_status es_session_attach(es_session *session, es_drafter *drafter)
{
    es_status status = check_closed(session, "attach");
    if (status != ES_OK || drafter == session->drafter) {
        return status;
    }
    es_grow *grow = NULL;
    if (drafter != NULL) {
        status = es_grow_new(es_drafter_net(drafter), &grow);
        if (status != ES_OK) {
            return status;
        }
    }
    es_grow_free(session->grow);
    session->grow = grow;
    session->drafter = drafter;
    return ES_OK;
}

/* ---- the sequence ------------------------------------------------------------------------ */

es_status es_session_append(es_session *session, const int32_t *tokens, size_t n)
{
    es_status status = check_closed(session, "append");
    if (status == ES_OK) {
        status = check_tokens(tokens, n, session->vocab, "append");
    }
    if (status != ES_OK) {
        return status;
    }
    size_t context = (size_t)session->context;
    if (session->length > context || n > context - session->length) {
        return es_fail(ES_ERR_CONTEXT, "append: %zu tokens do not fit behind %zu in a context of "
                       "%zu", n, session->length, context);
    }
    if (n == 0) {
        return ES_OK;
    }
    memcpy(session->tokens + session->length, tokens, n * sizeof(*tokens));
    session->length += n;
    if (session->ngram != NULL) {
        es_ngram_add(session->ngram, tokens, n);
    }
    if (session->grow != NULL) {
        es_grow_forget(session->grow);
    }
    return ES_OK;
}

es_status es_session_truncate(es_session *session, size_t length)
{
    es_status status = check_closed(session, "truncate");
    if (status != ES_OK) {
        return status;
    }
    if (length > session->length) {
        return es_fail(ES_ERR_ARGUMENT, "truncate: expected a length up to %zu, got %zu",
                       session->length, length);
    }
    if (length < session->length) {
        session->length = length;
        if (session->ngram != NULL) {
            es_ngram_break(session->ngram, session->tokens, length);
        }
        if (session->grow != NULL) {
            es_grow_forget(session->grow);
        }
    }
    return ES_OK;
}

size_t es_session_length(const es_session *session)
{
    return session->length;
}

const int32_t *es_session_tokens(const es_session *session)
{
    return session->tokens;
}

es_status es_session_evicted(es_session *session, uint64_t n)
{
    es_status status = check_closed(session, "evicted");
    if (status == ES_OK) {
        session->evicted += n;
    }
    return status;
}

/* ---- a reply ----------------------------------------------------------------------------- */

/* Makes the session's own copy of the sampling; on failure the old one stays. */
static es_status copy_sampling(es_session *session, const es_sampling *sampling)
{
    size_t n = sampling->n_bias;
    int32_t *token = NULL;
    float *value = NULL;
    if (n > 0) {
        token = es_calloc(n, sizeof(*token));
        value = es_calloc(n, sizeof(*value));
        if (token == NULL || value == NULL) {
            es_free(token);
            es_free(value);
            return es_fail(ES_ERR_MEMORY, "logit bias: no memory for %zu tokens", n);
        }
        memcpy(token, sampling->bias_token, n * sizeof(*token));
        memcpy(value, sampling->bias_value, n * sizeof(*value));
    }
    es_free(session->bias_token);
    es_free(session->bias_value);
    session->bias_token = token;
    session->bias_value = value;
    session->sampling = *sampling;
    session->sampling.bias_token = token;
    session->sampling.bias_value = value;
    return ES_OK;
}

es_status es_generation_begin(es_session *session, const es_sampling *sampling, int64_t max_new)
{
    es_status status = check_closed(session, "generation");
    if (status == ES_OK) {
        status = es_sampling_check(sampling, (size_t)session->vocab);
    }
    if (status != ES_OK) {
        return status;
    }
    if (max_new < 1) {
        return es_fail(ES_ERR_ARGUMENT, "max_new: expected 1 or more, got %lld",
                       (long long)max_new);
    }
    if (session->length == 0) {
        return es_fail(ES_ERR_STATE, "generation: the sequence is empty");
    }
    if (session->length > (size_t)session->context) {
        return es_fail(ES_ERR_CONTEXT, "generation: %zu tokens fill a context of %d",
                       session->length, (int)session->context);
    }
    status = copy_sampling(session, sampling);
    if (status != ES_OK) {
        return status;
    }
    session->left = max_new;
    session->stats = (es_stats){0};
    session->has_proposal = false;
    session->is_generating = true;
    return ES_OK;
}

es_status es_session_stats(const es_session *session, es_stats *out)
{
    *out = session->stats;
    return ES_OK;
}

es_status es_session_cost(const es_session *session, double *c)
{
    es_plan_measured(&session->plan, c);
    return ES_OK;
}
