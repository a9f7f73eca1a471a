/* draft_ngram.c - see draft_ngram.h. */
#include "draft_ngram.h"

#include <stdbool.h>
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "fmath.h"

/*
 * The log keeps the last `size` tokens by position. For every context length in ORDER each position
 * is linked to the previous one with the same hash of the tokens up to and including it; a position
 * is linked in when the token behind it arrives, so whatever is found has a continuation. Tokens
 * are compared on reading: a collision costs a step of a walk, never a wrong match.
 */
enum {
    N_ORDERS = 4,
    WALK = 24,          /* steps per chain: what bounds the price of one row */
    MAX_MATCH = 24,     /* tokens compared backwards */
    N_LEVELS = 10,      /* match lengths told apart */
    MAX_CHILDREN = 16,  /* continuations kept per row */
    COUNTED = 16,       /* occurrences counted */
    BREAK = -1          /* in the log between texts that do not follow each other */
};
static const int32_t ORDER[N_ORDERS + 1] = {1, 2, 4, 8, INT32_MAX};
static const int32_t LEVEL[N_LEVELS] = {1, 2, 3, 4, 5, 6, 8, 11, 16, 24};

/*
 * A token's probability is first blended from the shortest context to the longest,
 *     P_m = (c_m(token) + BACKOFF_m * P_(m-1)) / (c_m + BACKOFF_m),    P_0 = 0
 * with c_m the occurrences whose match is at least LEVEL[m] long, each worth AGING times the one
 * met before; then corrected by a logistic regression. Constants fitted on a small model's greedy
 * replies to training prompts.
 */
#ifndef ES_NGRAM_TUNE
#define TUNABLE static const
#else
#define TUNABLE
#endif
TUNABLE float BACKOFF[N_LEVELS] = {0.68f, 0.58f, 1.29f, 1.25f, 2.41f,
                                    2.78f, 1.65f, 0.76f, 0.58f, 0.43f};
TUNABLE float AGING = 0.8f;
/* The regression's features and where their weights start; every session then learns its own. */
enum { BIAS, BLENDED, FREQUENT, OWN, LENGTH, CHOICES, N_FEATURES };
TUNABLE float WEIGHT[N_FEATURES] = {
    -1.93f, /* 1 */
    0.59f,  /* logit of P */
    0.54f,  /* log(1 + occurrences of the token anywhere, up to COUNTED) */
    0.34f,  /* 1 if the occurrence is in generated text, not in what was fed */
    0.33f,  /* log of the longest match any continuation has */
    -0.20f  /* log of the number of continuations */
};
TUNABLE float RATE = 0.1f;        /* step of the online correction by kind of match */
TUNABLE float RATE_ALL = 0.005f;  /* step of the weights */
static const float MAX_SHIFT = 3.0f; /* how far either may wander */

typedef struct child {
    int32_t token;
    int32_t kind;       /* level of its longest match: where the online correction is kept */
    float p;
    float x[N_FEATURES];
} child;

typedef struct open_child { /* a candidate row waiting in the heap */
    float score;
    int32_t order;          /* of insertion: ties go to the earlier */
    int32_t parent;
    child c;
} open_child;

struct es_ngram {
    size_t size;                 /* power of two >= capacity */
    size_t capacity;
    size_t n_heads;              /* power of two */
    uint32_t total;              /* positions handed out, modulo 2^32 */
    size_t held;                 /* of these, still in the log */
    size_t run;                  /* tokens since the last break */
    size_t n_own;                /* tokens of the next add that were generated */
    int32_t *log;                /* (size) */
    uint8_t *is_own;             /* (size) */
    uint32_t *prev;              /* (N_ORDERS, size) position + 1, 0 = none */
    uint32_t *head;              /* (N_ORDERS, n_heads) position + 1, 0 = none */
    float shift[N_LEVELS];       /* online correction, in logits */
    float weight[N_FEATURES];    /* of this session */
    int32_t n_rows;              /* rows of the proposal awaiting judgement, 0 = none */
    int32_t row_parent[ES_MAX_ROWS];
    child row[ES_MAX_ROWS];
    open_child heap[ES_MAX_ROWS * MAX_CHILDREN];
    int32_t n_heap;
    child children[ES_MAX_ROWS][MAX_CHILDREN]; /* of the rows of a static tree */
    int32_t n_children[ES_MAX_ROWS];
};

static size_t power_of_two(size_t at_least)
{
    size_t size = 1;
    while (size < at_least) {
        size *= 2;
    }
    return size;
}

es_status es_ngram_new(size_t capacity, es_ngram **out)
{
    *out = NULL;
    if (capacity < 1 || capacity > ES_NGRAM_MAX_CAPACITY) {
        return es_fail(ES_ERR_ARGUMENT, "n-gram capacity: expected 1..%zu tokens, got %zu",
                       ES_NGRAM_MAX_CAPACITY, capacity);
    }
    es_ngram *ngram = es_calloc(1, sizeof *ngram);
    if (ngram == NULL) {
        return es_fail(ES_ERR_MEMORY, "n-gram index: no memory for its state");
    }
    ngram->capacity = capacity;
    ngram->size = power_of_two(capacity);
    ngram->n_heads = ngram->size;
    memcpy(ngram->weight, WEIGHT, sizeof ngram->weight);
    ngram->log = es_calloc(ngram->size, sizeof *ngram->log);
    ngram->is_own = es_calloc(ngram->size, sizeof *ngram->is_own);
    ngram->prev = es_calloc(ngram->size * N_ORDERS, sizeof *ngram->prev);
    ngram->head = es_calloc(ngram->n_heads * N_ORDERS, sizeof *ngram->head);
    if (ngram->log == NULL || ngram->is_own == NULL || ngram->prev == NULL ||
        ngram->head == NULL) {
        es_ngram_free(ngram);
        return es_fail(ES_ERR_MEMORY, "n-gram index: no memory for %zu tokens", capacity);
    }
    *out = ngram;
    return ES_OK;
}

void es_ngram_free(es_ngram *ngram)
{
    if (ngram != NULL) {
        es_free(ngram->log);
        es_free(ngram->is_own);
        es_free(ngram->prev);
        es_free(ngram->head);
        es_free(ngram);
    }
}

/* ---- index ------------------------------------------------------------------------------- */

static int32_t at(const es_ngram *ngram, uint32_t position)
{
    return ngram->log[position & (ngram->size - 1)];
}

/* Hash of the m tokens that end with end[0], read backwards through a contiguous array. */
static uint32_t hash_of(const int32_t *end, int32_t m)
{
    uint64_t h = (uint64_t)m;
    for (int32_t i = 0; i < m; i++) {
        h = (h ^ (uint32_t)end[-i]) * UINT64_C(0x9E3779B97F4A7C15);
        h ^= h >> 29;
    }
    return (uint32_t)(h >> 32);
}

/* Copies the last tokens since the break, at most MAX_MATCH, to the end of context (MAX_MATCH). */
static int32_t copy_tail(const es_ngram *ngram, int32_t *context)
{
    size_t n = ngram->run < ngram->held ? ngram->run : ngram->held;
    n = n < MAX_MATCH ? n : MAX_MATCH;
    for (size_t i = 0; i < n; i++) {
        context[MAX_MATCH - 1 - i] = at(ngram, ngram->total - 1 - (uint32_t)i);
    }
    return (int32_t)n;
}

static void push(es_ngram *ngram, int32_t token, bool is_own)
{
    ngram->is_own[ngram->total & (ngram->size - 1)] = is_own;
    ngram->log[ngram->total & (ngram->size - 1)] = token;
    ngram->total++;
    ngram->held += ngram->held < ngram->capacity;
}

/* Links the last position, whose continuation is about to be pushed, if there is one since the
   last break. */
static void link_last(es_ngram *ngram)
{
    int32_t context[MAX_MATCH];
    int32_t n = copy_tail(ngram, context);
    uint32_t last = ngram->total - 1;
    for (int32_t o = 0; o < N_ORDERS && ORDER[o] <= n; o++) {
        uint32_t h = hash_of(context + MAX_MATCH - 1, ORDER[o]) & (uint32_t)(ngram->n_heads - 1);
        uint32_t *head = ngram->head + (size_t)o * ngram->n_heads + h;
        ngram->prev[(size_t)o * ngram->size + (last & (ngram->size - 1))] = *head;
        *head = last + 1;
    }
}

void es_ngram_add(es_ngram *ngram, const int32_t *tokens, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        link_last(ngram);
        push(ngram, tokens[i], i < ngram->n_own);
        ngram->run++;
    }
    if (n > 0) {
        ngram->n_rows = 0;
        ngram->n_own = 0;
    }
}

void es_ngram_break(es_ngram *ngram, const int32_t *tail, size_t n_tail)
{
    size_t n = n_tail < MAX_MATCH ? n_tail : MAX_MATCH;
    /* the tail is repeated for context; only its last token gets linked, by what comes next */
    push(ngram, BREAK, false);
    ngram->run = 0;
    for (size_t i = n_tail - n; i < n_tail; i++) {
        push(ngram, tail[i], false);
        ngram->run++;
    }
    ngram->n_rows = 0;
    ngram->n_own = 0;
}

/* ---- estimates --------------------------------------------------------------------------- */

typedef struct evidence {
    int32_t n;
    int32_t token[MAX_CHILDREN];
    bool is_own[MAX_CHILDREN];               /* of the first occurrence met */
    int32_t top[MAX_CHILDREN];               /* level of the longest match */
    float count[MAX_CHILDREN][N_LEVELS];     /* by level of the match */
    float total[N_LEVELS];
} evidence;

static void note(evidence *found, int32_t token, bool is_own, int32_t level, float weight)
{
    int32_t i = 0;
    while (i < found->n && found->token[i] != token) {
        i++;
    }
    found->total[level] += weight;
    if (i == found->n) {
        if (i == MAX_CHILDREN) {
            return; /* longest and latest matches come first: what is left out is the weakest */
        }
        found->n++;
        found->token[i] = token;
        found->is_own[i] = is_own;
        found->top[i] = level;
        memset(found->count[i], 0, sizeof found->count[i]);
    }
    found->top[i] = level > found->top[i] ? level : found->top[i];
    found->count[i][level] += weight;
}

/* Tokens in which the context that ends at end[0] (n) agrees with the log up to position. */
static int32_t match_length(const es_ngram *ngram, const int32_t *end, int32_t n, uint32_t position)
{
    uint32_t age = ngram->total - position; /* 1 = newest */
    size_t left = ngram->held - age + 1;
    int32_t most = left < (size_t)n ? (int32_t)left : n;
    int32_t m = 0;
    while (m < most && at(ngram, position - (uint32_t)m) == end[-m]) {
        m++;
    }
    return m;
}

/* Each chain answers for the matches from its own order up to the next: the longer ones were met
   in the chains before. */
static void search(const es_ngram *ngram, const int32_t *end, int32_t n, evidence *found)
{
    memset(found->total, 0, sizeof found->total);
    found->n = 0;
    float weight = 1.0f;
    for (int32_t o = N_ORDERS - 1; o >= 0; o--) {
        if (ORDER[o] > n) {
            continue;
        }
        uint32_t h = hash_of(end, ORDER[o]) & (uint32_t)(ngram->n_heads - 1);
        uint32_t link = ngram->head[(size_t)o * ngram->n_heads + h];
        uint32_t age = 1; /* continuations exist from age 2 on, and ages only grow */
        for (int32_t step = 0; step < WALK && link != 0; step++) {
            uint32_t position = link - 1;
            uint32_t its_age = ngram->total - position;
            if (its_age <= age || its_age > ngram->held) {
                break;
            }
            age = its_age;
            int32_t m = match_length(ngram, end, n, position);
            if (m >= ORDER[o] && m < ORDER[o + 1]) {
                int32_t level = N_LEVELS - 1;
                while (LEVEL[level] > m) {
                    level--;
                }
                bool is_own = ngram->is_own[(position + 1) & (ngram->size - 1)];
                note(found, at(ngram, position + 1), is_own, level, weight);
                weight *= AGING;
            }
            link = ngram->prev[(size_t)o * ngram->size + (position & (ngram->size - 1))];
        }
    }
}

/* Occurrences of a token with something behind them, up to COUNTED. */
static int32_t occurrences(const es_ngram *ngram, int32_t token)
{
    uint32_t link = ngram->head[hash_of(&token, 1) & (uint32_t)(ngram->n_heads - 1)];
    uint32_t age = 1;
    int32_t n = 0;
    for (int32_t step = 0; step < 2 * COUNTED && n < COUNTED && link != 0; step++) {
        uint32_t position = link - 1, its_age = ngram->total - position;
        if (its_age <= age || its_age > ngram->held) {
            break;
        }
        age = its_age;
        n += at(ngram, position) == token;
        link = ngram->prev[position & (ngram->size - 1)];
    }
    return n;
}

static float blended(const evidence *found, int32_t i)
{
    float count[N_LEVELS], total[N_LEVELS], c = 0.0f, all = 0.0f, p = 0.0f;
    for (int32_t m = N_LEVELS - 1; m >= 0; m--) {
        count[m] = c += found->count[i][m];
        total[m] = all += found->total[m];
    }
    for (int32_t m = 0; m < N_LEVELS && total[m] > 0.0f; m++) {
        p = (count[m] + BACKOFF[m] * p) / (total[m] + BACKOFF[m]);
    }
    return p < 1e-4f ? 1e-4f : p > 0.999f ? 0.999f : p;
}

static float log_of(float x)
{
    return (float)es_log((double)x);
}

static float sigmoid(float x)
{
    double e = es_exp(x < 0.0f ? (double)x : -(double)x);
    return (float)(x < 0.0f ? e / (1.0 + e) : 1.0 / (1.0 + e));
}

/* Continuations of the context, most probable first; ties keep longest and latest first. */
static int32_t continuations(const es_ngram *ngram, const int32_t *end, int32_t n, child *out)
{
    evidence found;
    search(ngram, end, n, &found);
    int32_t longest = 0;
    for (int32_t i = 0; i < found.n; i++) {
        longest = found.top[i] > longest ? found.top[i] : longest;
    }
    for (int32_t i = 0; i < found.n; i++) {
        float p = blended(&found, i);
        child c = {.token = found.token[i], .kind = found.top[i]};
        c.x[BIAS] = 1.0f;
        c.x[BLENDED] = log_of(p / (1.0f - p));
        c.x[FREQUENT] = log_of(1.0f + (float)occurrences(ngram, c.token));
        c.x[OWN] = found.is_own[i];
        c.x[LENGTH] = log_of((float)LEVEL[longest]);
        c.x[CHOICES] = log_of((float)found.n);
        float logit = ngram->shift[c.kind];
        for (int32_t f = 0; f < N_FEATURES; f++) {
            logit += ngram->weight[f] * c.x[f];
        }
        c.p = sigmoid(logit);
        int32_t j = i;
        while (j > 0 && out[j - 1].p < c.p) {
            out[j] = out[j - 1];
            j--;
        }
        out[j] = c;
    }
    return found.n;
}

/* ---- trees ------------------------------------------------------------------------------- */

static bool before(const open_child *a, const open_child *b)
{
    return a->score > b->score || (a->score == b->score && a->order < b->order);
}

static void heap_push(es_ngram *ngram, open_child c)
{
    int32_t i = ngram->n_heap++;
    while (i > 0 && before(&c, &ngram->heap[(i - 1) / 2])) {
        ngram->heap[i] = ngram->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    ngram->heap[i] = c;
}

static open_child heap_pop(es_ngram *ngram)
{
    open_child top = ngram->heap[0], last = ngram->heap[--ngram->n_heap];
    int32_t i = 0;
    for (;;) {
        int32_t j = 2 * i + 1;
        if (j >= ngram->n_heap) {
            break;
        }
        j += j + 1 < ngram->n_heap && before(&ngram->heap[j + 1], &ngram->heap[j]);
        if (!before(&ngram->heap[j], &last)) {
            break;
        }
        ngram->heap[i] = ngram->heap[j];
        i = j;
    }
    ngram->heap[i] = last;
    return top;
}

static void put_row(es_tree *tree, int32_t token, int32_t parent, int32_t rank, float score)
{
    int32_t i = tree->n++;
    tree->token[i] = token;
    tree->parent[i] = parent;
    tree->rank[i] = rank;
    tree->depth[i] = parent < 0 ? 0 : tree->depth[parent] + 1;
    tree->mask[i] = (parent < 0 ? 0 : tree->mask[parent]) | UINT64_C(1) << i;
    tree->score[i] = score;
}

/* The context of a row: the tail, then the path to it. Returns its length; end points at its last
   token. buffer (MAX_MATCH + ES_MAX_ROWS) holds the tail in front. */
static int32_t context_of(const es_tree *tree, int32_t row, int32_t n_tail, int32_t *buffer,
                          const int32_t **end)
{
    int32_t depth = tree->depth[row];
    *end = buffer + MAX_MATCH - 1 + depth;
    for (int32_t i = row; i > 0; i = tree->parent[i]) {
        buffer[MAX_MATCH - 1 + tree->depth[i]] = tree->token[i];
    }
    return n_tail + depth < MAX_MATCH ? n_tail + depth : MAX_MATCH;
}

static int32_t start_tree(const es_ngram *ngram, int32_t *buffer, es_tree *tree)
{
    int32_t n_tail = copy_tail(ngram, buffer);
    tree->n = 0;
    put_row(tree, n_tail > 0 ? buffer[MAX_MATCH - 1] : 0, -1, 0, 1.0f);
    return n_tail;
}

void es_ngram_propose(es_ngram *ngram, int32_t rows, float floor, es_tree *tree)
{
    int32_t buffer[MAX_MATCH + ES_MAX_ROWS];
    int32_t n_tail = start_tree(ngram, buffer, tree);
    int32_t n_pushed = 0;
    int32_t n_kept[ES_MAX_ROWS] = {0};
    ngram->n_heap = 0;
    for (int32_t row = 0; n_tail > 0 && tree->n < rows; row++) {
        child kids[MAX_CHILDREN];
        const int32_t *end;
        int32_t n = context_of(tree, row, n_tail, buffer, &end);
        int32_t n_kids = continuations(ngram, end, n, kids);
        for (int32_t k = 0; k < n_kids; k++) {
            float score = tree->score[row] * kids[k].p;
            if (score >= floor) {
                heap_push(ngram, (open_child){score, n_pushed++, row, kids[k]});
            }
        }
        if (ngram->n_heap == 0) {
            break;
        }
        open_child best = heap_pop(ngram);
        ngram->row[tree->n] = best.c;
        ngram->row_parent[tree->n] = best.parent;
        put_row(tree, best.c.token, best.parent, n_kept[best.parent]++, best.score);
    }
    ngram->n_rows = tree->n;
}

void es_ngram_fill(es_ngram *ngram, const es_tree *shape, es_tree *tree)
{
    int32_t buffer[MAX_MATCH + ES_MAX_ROWS];
    int32_t n_tail = start_tree(ngram, buffer, tree);
    int32_t kept[ES_MAX_ROWS] = {0}; /* row of the tree a row of the shape became, or -1 */
    for (int32_t i = 0; i < ES_MAX_ROWS; i++) {
        ngram->n_children[i] = -1;
    }
    for (int32_t i = 1; i < shape->n; i++) {
        int32_t parent = kept[shape->parent[i]];
        kept[i] = -1;
        if (parent < 0 || n_tail == 0) {
            continue;
        }
        if (ngram->n_children[parent] < 0) {
            const int32_t *end;
            int32_t n = context_of(tree, parent, n_tail, buffer, &end);
            ngram->n_children[parent] = continuations(ngram, end, n, ngram->children[parent]);
        }
        if (shape->rank[i] < ngram->n_children[parent]) {
            child c = ngram->children[parent][shape->rank[i]];
            kept[i] = tree->n;
            ngram->row[tree->n] = c;
            ngram->row_parent[tree->n] = parent;
            put_row(tree, c.token, parent, shape->rank[i], tree->score[parent] * c.p);
        }
    }
    ngram->n_rows = tree->n;
}

static float near(float value, float start)
{
    float low = start - MAX_SHIFT, high = start + MAX_SHIFT;
    return value < low ? low : value > high ? high : value;
}

void es_ngram_learn(es_ngram *ngram, const int32_t *tokens, int32_t n)
{
    int32_t depth[ES_MAX_ROWS] = {0}; /* of a row on the path that came true, else -1 */
    for (int32_t i = 1; i < ngram->n_rows; i++) {
        int32_t d = depth[ngram->row_parent[i]];
        depth[i] = -1;
        if (d < 0 || d >= n) {
            continue;
        }
        child *c = &ngram->row[i];
        bool is_hit = c->token == tokens[d];
        float miss = (is_hit ? 1.0f : 0.0f) - c->p;
        ngram->shift[c->kind] = near(ngram->shift[c->kind] + RATE * miss, 0.0f);
        for (int32_t f = 0; f < N_FEATURES; f++) {
            ngram->weight[f] = near(ngram->weight[f] + RATE_ALL * miss * c->x[f], WEIGHT[f]);
        }
        depth[i] = is_hit ? d + 1 : -1;
    }
    ngram->n_rows = 0;
    ngram->n_own = n > 0 ? (size_t)n : 0;
}
