/*
 * round.c - the decode loop, in two halves with the target's forward between them.
 *
 * Begin drafts a tree that fits; finish keeps the path the target agrees with. Whatever is drafted,
 * the tokens are those plain decoding would have emitted: a draft only decides how many come at
 * once.
 */
#include "clock.h"

#include <math.h>
#include <string.h>

#include "error.h"
#include "session.h"
#include "tree.h"

/* ---- first half: draft ------------------------------------------------------------------- */

/* The session's own tree, of at most max_rows rows and max_depth levels below the root. */
static void draft(es_session *s, int32_t max_rows, int32_t max_depth, es_tree *tree)
{
    int32_t rows = s->rows < max_rows ? s->rows : max_rows;
    switch (s->mode) {
    case ES_TREE_SHAPE:
        es_ngram_fill(s->ngram, &s->shape, tree);
        break;
    case ES_TREE_BEST:
        es_ngram_propose(s->ngram, rows, 0.0f, tree);
        break;
    case ES_TREE_AUTO:
        es_ngram_propose(s->ngram, rows, es_plan_floor(&s->plan), tree);
        es_tree_clip(tree, max_rows, max_depth);
        tree->n = es_plan_choose(&s->plan, tree);
        break;
    }
    es_tree_clip(tree, max_rows, max_depth);
}

es_status es_round_begin(es_session *s, es_round_kind kind, es_tree *tree)
{
    if (kind != ES_ROUND_PREFILL && kind != ES_ROUND_PLAIN && kind != ES_ROUND_DRAFT) {
        return es_fail(ES_ERR_ARGUMENT, "round: expected a kind of 0 to 2, got %d", (int)kind);
    }
    if (s->is_open || !s->is_generating || s->length == 0) {
        return es_fail(ES_ERR_STATE, "round: %s",
                       s->is_open          ? "the last one is still open"
                       : !s->is_generating ? "no reply is in progress"
                                           : "the sequence is empty");
    }
    /* The root is in the sequence but not in KV. */
    if (s->length > (size_t)s->context) {
        return es_fail(ES_ERR_CONTEXT, "round: no room behind %zu tokens in a context of %d",
                       s->length - 1, (int)s->context);
    }
    double start = es_now();
    int32_t root = s->tokens[s->length - 1];
    int32_t max_rows = (int32_t)((size_t)s->context - s->length + 1);
    if (s->kv_block > 0) {
        int32_t in_block = s->kv_block - (int32_t)((s->length - 1) % (size_t)s->kv_block);
        max_rows = in_block < max_rows ? in_block : max_rows;
    }
    int32_t max_depth = s->left <= ES_MAX_ROWS ? (int32_t)s->left - 1 : ES_MAX_ROWS;
    s->is_proposed = false;
    es_tree_root(&s->tree, root);
    if (kind == ES_ROUND_DRAFT && max_rows > 1 && max_depth > 0) {
        if (s->has_proposal) {
            s->tree = s->proposal;
            s->tree.token[0] = root;
            es_tree_clip(&s->tree, max_rows, max_depth);
            s->is_proposed = true;
        } else if (s->ngram != NULL) {
            draft(s, max_rows, max_depth, &s->tree);
        }
    }
    if (kind == ES_ROUND_DRAFT) {
        s->has_proposal = false;
    }
    s->kind = kind;
    s->is_open = true;
    s->draft_seconds = es_now() - start;
    *tree = s->tree;
    return ES_OK;
}

es_status es_round_propose(es_session *s, const es_tree *tree)
{
    if (s->is_open) {
        return es_fail(ES_ERR_STATE, "propose: a round is open; finish or abandon it first");
    }
    es_tree proposal = *tree;
    es_status status = es_tree_derive(&proposal);
    if (status != ES_OK) {
        return status;
    }
    for (int32_t i = 1; i < proposal.n; i++) {
        if (proposal.token[i] < 0 || proposal.token[i] >= s->vocab) {
            return es_fail(ES_ERR_ARGUMENT, "propose: row %d: expected a token in [0, %d), got %d",
                           (int)i, (int)s->vocab, (int)proposal.token[i]);
        }
    }
    s->proposal = proposal;
    s->has_proposal = true;
    return ES_OK;
}

/* ---- second half: verify ----------------------------------------------------------------- */

static bool is_eos(const es_session *s, int32_t token)
{
    for (int32_t i = 0; i < s->n_eos; i++) {
        if (s->eos[i] == token) {
            return true;
        }
    }
    return false;
}

/* What is emitted of a verdict, and whether the reply ends with it. */
static void emit(const es_session *s, const es_verdict *verdict, es_round *out)
{
    *out = (es_round){.finish = ES_FINISH_NONE};
    while (out->n < verdict->n && out->finish == ES_FINISH_NONE) {
        out->token[out->n] = verdict->token[out->n];
        out->row[out->n] = verdict->row[out->n];
        out->n++;
        if (is_eos(s, out->token[out->n - 1])) {
            out->finish = ES_FINISH_STOP;
        } else if (out->n == s->left) {
            out->finish = ES_FINISH_LENGTH;
        } else if (s->length + (size_t)out->n > (size_t)s->context) {
            out->finish = ES_FINISH_CONTEXT;
        }
    }
}

static bool has_child(const es_tree *tree, int32_t row)
{
    for (int32_t i = row + 1; i < tree->n; i++) {
        if (tree->parent[i] == row) {
            return true;
        }
    }
    return false;
}

static void count(es_session *s, const es_verdict *verdict, const es_round *round, double seconds)
{
    es_stats *stats = &s->stats;
    int32_t accepted = verdict->n - 1; /* the last token is the target's own */
    stats->rounds++;
    stats->plain_rounds += s->tree.n == 1;
    stats->tokens += round->n;
    stats->drafted += s->tree.n - 1;
    stats->accepted += accepted < round->n ? accepted : round->n;
    stats->depth += es_tree_depth(&s->tree);
    stats->forward_seconds += seconds;
    stats->draft_seconds += s->draft_seconds;
    for (int32_t level = 0; level < round->n && level < ES_STATS_LEVELS; level++) {
        stats->tried[level] += has_child(&s->tree, verdict->row[level]);
        stats->held[level] += level < accepted;
    }
}

/* The planner and the draft learn from what the target said. */
static void learn(es_session *s, const es_round *round, double seconds)
{
    if (s->kind != ES_ROUND_PREFILL) {
        int32_t n_tokens = round->n;
        if (s->is_proposed) {
            /* Only its time says something about the session's own drafts. */
            memset(s->tree.score, 0, sizeof(s->tree.score));
            n_tokens = 1;
        }
        es_plan_learn(&s->plan, &s->tree, n_tokens, seconds, s->draft_seconds);
    }
    if (s->ngram != NULL) {
        es_ngram_learn(s->ngram, round->token, round->n);
        es_ngram_add(s->ngram, round->token, (size_t)round->n);
    }
}

es_status es_round_finish(es_session *s, const float *logits, size_t stride,
                          const uint8_t *allowed, double seconds, es_round *out)
{
    if (!s->is_open) {
        return es_fail(ES_ERR_STATE, "finish: no round is open");
    }
    if (!(seconds >= 0.0) || isinf(seconds)) {
        return es_fail(ES_ERR_ARGUMENT, "seconds: expected 0 (unknown) or more, got %g", seconds);
    }
    es_verdict verdict;
    es_status status = es_verify_coupled(&s->tree, logits, stride, (size_t)s->vocab, &s->sampling,
                                         s->tokens, s->length, s->length + s->evicted, allowed,
                                         s->scratch, &verdict);
    if (status != ES_OK) {
        return status;
    }
    emit(s, &verdict, out);
    if (s->kind != ES_ROUND_PREFILL) {
        count(s, &verdict, out, seconds);
    }
    learn(s, out, seconds);
    memcpy(s->tokens + s->length, out->token, (size_t)out->n * sizeof(*s->tokens));
    s->length += (size_t)out->n;
    s->left -= out->n;
    s->is_generating = out->finish == ES_FINISH_NONE;
    s->is_open = false;
    return ES_OK;
}

es_status es_round_abandon(es_session *s)
{
    s->is_open = false;
    return ES_OK;
}
