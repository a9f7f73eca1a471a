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

#include "draft_merge.h"
#include "error.h"
#include "session.h"
#include "tree.h"

/* ---- first half: draft ------------------------------------------------------------------- */

/* What the round has room for. */
typedef struct bounds {
    int32_t rows;   /* root included */
    int32_t depth;  /* levels below it */
} bounds;

static es_grow_request request(const es_session *s, bounds most, float floor, double price)
{
    return (es_grow_request){
        .root = s->tokens[s->length - 1],
        .rows = most.rows,
        .depth = most.depth,
        .floor = floor,
        .price = price,
        .vocab = s->vocab,
        .sampling = &s->sampling,
        .index = s->length + s->evicted,
        .is_blind = s->is_blind,
    };
}

/* Tokens a drafted tree is expected to bring. */
static float promise(const es_tree *tree)
{
    float sum = 0.0f;
    for (int32_t i = 1; i < tree->n; i++) {
        sum += tree->score[i];
    }
    return sum;
}

/* The static shape, filled by n-grams or by the head: by what promises more. */
static es_status draft_shape(es_session *s, bounds most, es_tree *tree)
{
    if (s->ngram != NULL) {
        es_ngram_fill(s->ngram, &s->shape, tree);
        es_tree_clip(tree, most.rows, most.depth);
    }
    if (s->grow != NULL) {
        es_tree grown, shape = s->shape;
        es_tree_clip(&shape, most.rows, most.depth);
        es_grow_request r = request(s, most, 0.0f, 0.0);
        es_status status = es_grow_shape(s->grow, &r, &shape, &grown);
        if (status != ES_OK) {
            return status;
        }
        es_plan_head_ran(&s->plan, es_grow_passes(s->grow));
        if (promise(&grown) > promise(tree)) {
            *tree = grown;
        }
    }
    return ES_OK;
}

/* What a level of the head has to promise where nothing is planned, in expected tokens: less than
   its pass costs on any machine. */
static const double LEAST_GAIN = 0.04;

/* The best of what n-grams and the head say together. */
static es_status draft_best(es_session *s, bounds most, es_tree *tree)
{
    bool is_planned = s->mode == ES_TREE_AUTO;
    float floor = is_planned ? es_plan_floor(&s->plan) : 0.0f;
    if (s->ngram != NULL) {
        es_ngram_propose(s->ngram, most.rows, floor, tree);
        es_tree_clip(tree, most.rows, most.depth);
    }
    if (s->grow != NULL && (!is_planned || es_plan_wants_head(&s->plan, tree))) {
        es_tree grown;
        double price = is_planned ? es_plan_level_price(&s->plan) : LEAST_GAIN;
        es_grow_request r = request(s, most, floor, price);
        es_status status = es_grow_best(s->grow, &r, &grown);
        if (status != ES_OK) {
            return status;
        }
        es_plan_head_ran(&s->plan, es_grow_passes(s->grow));
        es_tree found = *tree;
        es_merge(&found, &grown, most.rows, floor, tree);
    }
    if (is_planned) {
        tree->n = es_plan_choose(&s->plan, tree);
    }
    return ES_OK;
}

/* The drafter has to have been told of all that is committed: the sequence less its last token. */
static es_status check_drafter(const es_session *s)
{
    int64_t told = s->drafter == NULL ? 0 : es_drafter_length(s->drafter);
    if (s->drafter != NULL && told != (int64_t)s->length - 1) {
        return es_fail(ES_ERR_STATE, "round: expected a drafter that was told of %lld positions, "
                       "the sequence less its last token, got %lld", (long long)s->length - 1,
                       (long long)told);
    }
    return ES_OK;
}

/* The session's own tree. */
static es_status draft(es_session *s, bounds most, es_tree *tree)
{
    es_status status = check_drafter(s);
    if (status != ES_OK) {
        return status;
    }
    if (s->mode == ES_TREE_SHAPE) {
        return draft_shape(s, most, tree);
    }
    most.rows = s->rows < most.rows ? s->rows : most.rows;
    return draft_best(s, most, tree);
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
    bounds most = {.rows = (int32_t)((size_t)s->context - s->length + 1)};
    if (s->kv_block > 0) {
        int32_t in_block = s->kv_block - (int32_t)((s->length - 1) % (size_t)s->kv_block);
        most.rows = in_block < most.rows ? in_block : most.rows;
    }
    most.depth = s->left <= ES_MAX_ROWS ? (int32_t)s->left - 1 : ES_MAX_ROWS;
    s->is_proposed = false;
    es_plan_head_ran(&s->plan, 0);
    es_tree_root(&s->tree, root);
    if (kind == ES_ROUND_DRAFT && most.rows > 1 && most.depth > 0) {
        if (s->has_proposal) {
            s->tree = s->proposal;
            s->tree.token[0] = root;
            es_tree_clip(&s->tree, most.rows, most.depth);
            s->is_proposed = true;
        } else if (s->ngram != NULL || s->grow != NULL) {
            es_status status = draft(s, most, &s->tree);
            if (status != ES_OK) {
                return status;
            }
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
    if (s->grow != NULL) {
        es_grow_learn(s->grow, round->token, round->n);
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
    if (s->grow != NULL) {
        es_grow_forget(s->grow);
    }
    return ES_OK;
}
