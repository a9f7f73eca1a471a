/* draft_grow.c - see draft_grow.h. */
#include "draft_grow.h"

#include <math.h>
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "fmath.h"
#include "tree.h"

/*
 * A node is a token the head proposes behind another node. Its chance of being accepted once its
 * parent is, is what the head says, corrected by a logistic regression the session goes on fitting:
 *
 *     p = sigmoid(shift[depth] + slope[depth] * x),   x = logit of the head's word u
 *
 * At temperature 0, u is the softmax of its logits. Above, verification draws y by Gumbel-max with
 * noise that is known beforehand: y maximises log p(t) + noise(t). So children are ranked by
 * log q(t) + noise(t) with the very same noise, and u is the softmax of these values times SHARP: a
 * wider spread of log p around log q than its own noise has leaves less certain who wins.
 */
enum {
    KIDS = 12,         /* children kept per node, at most */
    CONTENDERS = 32,   /* most probable tokens that noise is computed for */
    MAX_NODES = 1 + ES_MAX_ROWS * KIDS,
    N_DEPTHS = 8,      /* depths told apart, the last for all deeper */
    BLOCK = 64,        /* logits a maximum is kept of */
    LANES = 16,
};

static const float SHARP = 0.7f;              /* measured with an EAGLE-3 head, as are ... */
static const double NO_LUCK = -1.0;           /* noise that is seldom less */
static const float SLOPE = 1.0f, SHIFT = 0.0f;
static const float HIT = 0.5f;                /* chance of the best child, before any was seen */
static const float RATE_SHIFT = 0.05f, RATE_SLOPE = 0.005f, RATE_HIT = 0.05f;
static const float MAX_SHIFT = 3.0f, MIN_SLOPE = 0.2f, MAX_SLOPE = 2.0f;
static const float MIN_WORD = 1e-5f, MAX_WORD = 0.9999f; /* of u */
static const float DOUBTED = 0.02f;                      /* not drafted, so not learned from */
static const float MAX_CHANCE = 0.995f;                  /* so that scores fall along a path */

typedef struct node {
    int32_t token;     /* -1: a row of the shape left out */
    int32_t parent;    /* node, before it */
    int32_t rank;
    int32_t depth;
    int32_t row;       /* of the work tree once expanded */
    float x;
    float chance;
    float score;
} node;

typedef struct choice {
    float value;       /* of the ranking */
    int32_t id;        /* of the draft vocabulary */
} choice;

typedef struct calibration {
    float shift[N_DEPTHS];
    float slope[N_DEPTHS];
    float hit[N_DEPTHS]; /* how often the best child was right */
} calibration;

struct es_grow {
    const es_draft_net *net;
    calibration learned[2];    /* greedy, sampled */
    int32_t mode;              /* of the last tree */
    int32_t passes;
    es_tree work;              /* expanded nodes, as the net sees them */
    node node[MAX_NODES];      /* the root first */
    int32_t n_nodes;           /* to be judged; 0: none */
    int32_t n_ids;             /* draft tokens the target can say */
    float *biased;             /* (vocab) */
    float *maxima;             /* (vocab / BLOCK + 1) */
};

es_status es_grow_new(const es_draft_net *net, es_grow **out)
{
    if (net->vocab < 1 || net->width < 1 || net->width > ES_DRAFT_WIDTH) {
        return es_fail(ES_ERR_ARGUMENT, "draft: expected a vocabulary and 1 to %d rows at once, "
                       "got %d tokens and %d rows", (int)ES_DRAFT_WIDTH, (int)net->vocab,
                       (int)net->width);
    }
    es_grow *g = es_calloc(1, sizeof(*g));
    size_t vocab = (size_t)net->vocab;
    float *biased = es_malloc(vocab * sizeof(*biased));
    float *maxima = es_malloc((vocab / BLOCK + 1) * sizeof(*maxima));
    if (g == NULL || biased == NULL || maxima == NULL) {
        es_free(g);
        es_free(biased);
        es_free(maxima);
        return es_fail(ES_ERR_MEMORY, "draft: no memory to choose among %d tokens",
                       (int)net->vocab);
    }
    g->net = net;
    g->biased = biased;
    g->maxima = maxima;
    for (int32_t mode = 0; mode < 2; mode++) {
        calibration *c = &g->learned[mode];
        for (int32_t d = 0; d < N_DEPTHS; d++) {
            c->shift[d] = SHIFT;
            c->slope[d] = SLOPE;
            c->hit[d] = HIT;
        }
    }
    *out = g;
    return ES_OK;
}

void es_grow_free(es_grow *grow)
{
    if (grow != NULL) {
        es_free(grow->biased);
        es_free(grow->maxima);
        es_free(grow);
    }
}

/* ---- a row of logits --------------------------------------------------------------------- */

static float largest(const float *x, int32_t n)
{
    float max[LANES];
    for (int32_t j = 0; j < LANES; j++) {
        max[j] = -INFINITY;
    }
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int32_t j = 0; j < LANES; j++) {
            max[j] = x[i + j] > max[j] ? x[i + j] : max[j];
        }
    }
    for (; i < n; i++) {
        max[0] = x[i] > max[0] ? x[i] : max[0];
    }
    for (int32_t j = 1; j < LANES; j++) {
        max[0] = max[j] > max[0] ? max[j] : max[0];
    }
    return max[0];
}

static inline bool is_before(choice a, choice b)
{
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

/* Puts c among the best (*n of at most `most`), best first. */
static void insert(choice *best, int32_t *n, int32_t most, choice c)
{
    int32_t i = *n < most ? (*n)++ : most;
    while (i > 0 && is_before(c, best[i - 1])) {
        if (i < most) {
            best[i] = best[i - 1];
        }
        i--;
    }
    if (i < most) {
        best[i] = c;
    }
}

/* The `most` largest of x (n), lower ids first among equals; never one that is -inf or NaN. */
static int32_t select_top(es_grow *g, const float *x, int32_t n, int32_t most, choice *best)
{
    int32_t n_best = 0, n_blocks = (n + BLOCK - 1) / BLOCK;
    for (int32_t b = 0; b < n_blocks; b++) {
        int32_t first = b * BLOCK;
        g->maxima[b] = largest(x + first, n - first < BLOCK ? n - first : BLOCK);
        if (n_best < most || g->maxima[b] > best[most - 1].value) {
            insert(best, &n_best, most, (choice){g->maxima[b], b});
        }
    }
    /* as many maxima are at least this large, so nothing smaller is among the best */
    float least = n_best < most ? -INFINITY : best[most - 1].value;
    n_best = 0;
    for (int32_t b = 0; b < n_blocks; b++) {
        if (!(g->maxima[b] >= least)) {
            continue;
        }
        int32_t end = b * BLOCK + BLOCK < n ? b * BLOCK + BLOCK : n;
        for (int32_t i = b * BLOCK; i < end; i++) {
            if (x[i] >= least && x[i] > -INFINITY) {
                insert(best, &n_best, most, (choice){x[i], i});
            }
        }
    }
    return n_best;
}

/* e^x by way of the float's exponent, a straight line between powers of two: within 6 %, 0 on
   average. x <= 0. */
static inline float rough_exp(float x)
{
    float bits = x * 12102203.0f + 1064866816.0f; /* 2^23 / ln 2; 127 * 2^23 less 486400 */
    int32_t whole = (int32_t)(bits > 0.0f ? bits : 0.0f);
    float power;
    memcpy(&power, &whole, sizeof(power));
    return power;
}

/* Sum of exp((x - max) * scale) over x (n), roughly, in an order that depends on n only. */
static float rough_mass(const float *x, int32_t n, float max, float scale)
{
    float sum[LANES] = {0};
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        /* Two loops, because compilers vectorise the first only alone. */
        float mass[LANES];
        for (int32_t j = 0; j < LANES; j++) {
            mass[j] = rough_exp((x[i + j] - max) * scale);
        }
        for (int32_t j = 0; j < LANES; j++) {
            sum[j] += mass[j];
        }
    }
    for (; i < n; i++) {
        sum[0] += rough_exp((x[i] - max) * scale);
    }
    for (int32_t j = 1; j < LANES; j++) {
        sum[0] += sum[j];
    }
    return sum[0];
}

/* The draft's id of a token of the target, -1 if it has none. */
static int32_t draft_id(const es_grow *g, int32_t token)
{
    const int32_t *ids = g->net->ids;
    if (ids == NULL) {
        return token < g->n_ids ? token : -1;
    }
    int32_t low = 0, high = g->n_ids;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (ids[middle] < token) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < g->n_ids && ids[low] == token ? low : -1;
}

/* What the target's logit bias leaves of a row: it will be added there too. */
static const float *add_bias(es_grow *g, const es_sampling *sampling, const float *logits)
{
    if (sampling->n_bias == 0) {
        return logits;
    }
    memcpy(g->biased, logits, (size_t)g->n_ids * sizeof(*logits));
    for (size_t i = 0; i < sampling->n_bias; i++) {
        int32_t id = draft_id(g, sampling->bias_token[i]);
        if (id >= 0) {
            g->biased[id] += sampling->bias_value[i];
        }
    }
    return g->biased;
}

static int32_t token_of(const es_grow *g, int32_t id)
{
    return g->net->ids == NULL ? id : g->net->ids[id];
}

/* How many of the contenders, log q less that of the best, best first, the target's filters would
   leave if they were applied to q; sum: the mass of all tokens. */
static int32_t filtered(const es_sampling *sampling, const choice *best, int32_t n, float sum)
{
    int32_t kept = sampling->top_k > 0 && sampling->top_k < n ? sampling->top_k : n;
    float mass = 0.0f, least = sampling->min_p;
    for (int32_t i = 0; i < kept; i++) {
        float weight = (float)es_exp((double)best[i].value);
        if (mass >= sampling->top_p * sum || weight < least) {
            return i;
        }
        mass += weight;
    }
    return kept;
}

/* Replaces the values of the contenders, log q less a constant, by (log q + noise) * SHARP, best
   first, keeps `most`, and returns the sum of exp(value - the best value) over all tokens; those
   that do not contend, `rest` in mass, as one of median luck. The target's filters see p, not q, so
   what they would cut of q, from n_left on, has a chance still, if no luck. */
static float add_noise(const es_grow *g, const es_grow_request *r, int32_t depth, choice *best,
                       int32_t *n, int32_t n_left, int32_t most, float rest)
{
    choice noisy[ES_MAX_ROWS];
    uint64_t index = r->index + (uint64_t)depth;
    for (int32_t i = 0; i < *n; i++) {
        double noise = i < n_left ? es_noise(r->sampling->seed, index, token_of(g, best[i].id))
                                  : NO_LUCK;
        noisy[i] = (choice){(best[i].value + (float)noise) * SHARP, best[i].id};
    }
    int32_t n_all = *n, kept = 0;
    for (int32_t i = 0; i < n_all; i++) {
        insert(best, &kept, most, noisy[i]);
    }
    *n = kept;
    float sum = 0.0f, top = best[0].value;
    for (int32_t i = 0; i < n_all; i++) {
        sum += (float)es_exp((double)(noisy[i].value - top));
    }
    if (rest > 0.0f) {
        double luck = 0.3665; /* -log(log 2) */
        double value = (es_log((double)rest) + luck) * (double)SHARP - (double)top;
        sum += (float)es_exp(value < 0.0 ? value : 0.0);
    }
    return sum;
}

static float logit_of(float u)
{
    u = u < MIN_WORD ? MIN_WORD : u > MAX_WORD ? MAX_WORD : u;
    return (float)es_log((double)(u / (1.0f - u)));
}

static float sigmoid(float x)
{
    double e = es_exp(x < 0.0f ? (double)x : -(double)x);
    return (float)(x < 0.0f ? e / (1.0 + e) : 1.0 / (1.0 + e));
}

/* The best `most` children of a node of that depth: best (ES_MAX_ROWS) receives ids, best first,
   and the logit of the head's word as value. */
static int32_t rank_children(es_grow *g, const es_grow_request *r, const float *logits,
                             int32_t depth, int32_t most, choice *best)
{
    bool is_noisy = r->sampling->temperature > 0.0f && !r->is_blind;
    float scale = r->sampling->temperature > 0.0f ? 1.0f / r->sampling->temperature : 1.0f;
    const float *x = add_bias(g, r->sampling, logits);
    int32_t contenders = is_noisy && most < CONTENDERS ? CONTENDERS : most;
    int32_t n = select_top(g, x, g->n_ids, contenders, best);
    if (n == 0 || !(best[0].value < INFINITY)) {
        return 0;
    }
    /* The best are weighed exactly, the crowd behind them roughly. */
    float max = best[0].value, sum = 0.0f;
    float rest = rough_mass(x, g->n_ids, max, scale);
    for (int32_t i = 0; i < n; i++) {
        float value = (best[i].value - max) * scale;
        rest -= rough_exp(value);
        best[i].value = value > -80.0f ? value : -80.0f;
        sum += (float)es_exp((double)best[i].value);
    }
    rest = rest > 1e-6f ? rest : 0.0f;
    sum += rest;
    if (is_noisy) {
        int32_t n_left = filtered(r->sampling, best, n, sum);
        sum = add_noise(g, r, depth, best, &n, n_left, most, n_left < n ? 0.0f : rest);
    }
    float top = is_noisy ? best[0].value : 0.0f;
    for (int32_t i = 0; i < n; i++) {
        best[i].value = logit_of((float)es_exp((double)(best[i].value - top)) / sum);
    }
    return n;
}

/* ---- nodes ------------------------------------------------------------------------------- */

static int32_t bucket(int32_t depth)
{
    return depth <= N_DEPTHS ? depth - 1 : N_DEPTHS - 1;
}

static void fill_node(es_grow *g, int32_t i, int32_t parent, int32_t rank, choice c)
{
    node *child = &g->node[i];
    const calibration *k = &g->learned[g->mode];
    child->token = token_of(g, c.id);
    child->parent = parent;
    child->rank = rank;
    child->depth = g->node[parent].depth + 1;
    child->x = c.value;
    int32_t d = bucket(child->depth);
    float chance = sigmoid(k->shift[d] + k->slope[d] * c.value);
    child->chance = chance < MAX_CHANCE ? chance : MAX_CHANCE;
    child->score = g->node[parent].score * child->chance;
}

static void start(es_grow *g, const es_grow_request *r)
{
    g->mode = r->sampling->temperature > 0.0f;
    g->passes = 0;
    g->n_nodes = 1;
    g->node[0] = (node){.token = r->root, .parent = -1, .score = 1.0f, .chance = 1.0f};
    es_tree_root(&g->work, r->root);
    g->n_ids = g->net->vocab;
    if (g->net->ids == NULL) {
        g->n_ids = r->vocab < g->n_ids ? r->vocab : g->n_ids;
    } else {
        while (g->n_ids > 0 && g->net->ids[g->n_ids - 1] >= r->vocab) {
            g->n_ids--;
        }
    }
}

static int32_t most_levels(const es_grow *g, const es_grow_request *r)
{
    int32_t most = r->depth < ES_MAX_ROWS - 1 ? r->depth : ES_MAX_ROWS - 1;
    return g->net->depth > 0 && g->net->depth < most ? g->net->depth : most;
}

/* Takes up to the net's width of the nodes front (n), the best, and leaves them in order. */
static int32_t narrow(const es_grow *g, int32_t *front, int32_t n)
{
    choice best[ES_DRAFT_WIDTH];
    int32_t n_best = 0, n_kept = 0;
    for (int32_t i = 0; i < n; i++) {
        insert(best, &n_best, g->net->width, (choice){g->node[front[i]].score, front[i]});
    }
    for (int32_t i = 0; i < n; i++) {
        choice c = {g->node[front[i]].score, front[i]};
        if (!is_before(best[n_best - 1], c)) {
            front[n_kept++] = front[i];
        }
    }
    return n_kept;
}

/* Forwards nodes front (n) of one depth: logits (n, vocab) of their children. */
static es_status expand(es_grow *g, const int32_t *front, int32_t n, const float **logits)
{
    int32_t rows[ES_DRAFT_WIDTH];
    es_tree *work = &g->work;
    for (int32_t i = 0; i < n; i++) {
        node *at = &g->node[front[i]];
        int32_t row = work->n++, parent = g->node[at->parent].row;
        at->row = rows[i] = row;
        work->token[row] = at->token;
        work->parent[row] = parent;
        work->rank[row] = at->rank;
        work->depth[row] = at->depth;
        work->mask[row] = work->mask[parent] | UINT64_C(1) << row;
        work->score[row] = at->score;
    }
    g->passes++;
    return g->net->expand(g->net->self, work, rows, n, logits);
}

/* ---- the best rows ----------------------------------------------------------------------- */

static void add_children(es_grow *g, const es_grow_request *r, int32_t parent, const float *logits)
{
    choice best[ES_MAX_ROWS];
    int32_t n = rank_children(g, r, logits, g->node[parent].depth, KIDS, best);
    for (int32_t i = 0; i < n; i++) {
        fill_node(g, g->n_nodes++, parent, i, best[i]);
    }
}

/* The best nodes, at most `most`, none under the floor: score and number, best first. */
static int32_t best_nodes(const es_grow *g, float floor, int32_t most, choice *best)
{
    int32_t n = 0;
    for (int32_t i = 1; i < g->n_nodes; i++) {
        float score = g->node[i].score;
        if (score >= floor && (n < most || score > best[most - 1].value)) {
            insert(best, &n, most, (choice){score, i});
        }
    }
    return n;
}

/* The nodes from `first` on that are worth another pass, in order; 0 where the pass is not. */
static int32_t frontier(const es_grow *g, const es_grow_request *r, int32_t first, int32_t *front)
{
    choice best[ES_MAX_ROWS];
    int32_t rows = r->rows - 1, n = 0;
    int32_t n_best = best_nodes(g, r->floor, rows, best);
    float bar = n_best < rows ? r->floor : best[n_best - 1].value; /* a child has to beat it */
    for (int32_t i = first; i < g->n_nodes; i++) {
        if (g->node[i].score > bar) {
            front[n++] = i;
        }
    }
    if (n == 0) {
        return 0;
    }
    n = narrow(g, front, n);
    int32_t room = ES_MAX_ROWS - g->work.n;
    n = n < room ? n : room;
    float hit = g->learned[g->mode].hit[bucket(g->node[first].depth + 1)];
    double gain = 0.0;
    for (int32_t i = 0; i < n; i++) {
        float score = g->node[front[i]].score * hit;
        gain += score > bar ? (double)(score - bar) : 0.0;
    }
    return gain >= r->price ? n : 0;
}

static void put_best(const es_grow *g, float floor, es_tree *tree)
{
    choice best[ES_MAX_ROWS];
    int32_t row_of[MAX_NODES] = {0};
    int32_t n = best_nodes(g, floor, ES_MAX_ROWS - 1, best);
    for (int32_t i = 0; i < n; i++) {
        const node *from = &g->node[best[i].id];
        int32_t row = tree->n++, parent = row_of[from->parent];
        row_of[best[i].id] = row;
        tree->token[row] = from->token;
        tree->parent[row] = parent;
        tree->rank[row] = from->rank;
        tree->depth[row] = from->depth;
        tree->mask[row] = tree->mask[parent] | UINT64_C(1) << row;
        tree->score[row] = from->score;
    }
}

es_status es_grow_best(es_grow *g, const es_grow_request *r, es_tree *tree)
{
    start(g, r);
    es_tree_root(tree, r->root);
    int32_t most = most_levels(g, r);
    if (r->rows < 2 || most < 1) {
        return ES_OK;
    }
    const float *logits = NULL;
    bool is_ready = false;
    es_status status = g->net->begin(g->net->self, r->root, &logits, &is_ready);
    if (status == ES_OK && is_ready) {
        g->passes = 1;
        add_children(g, r, 0, logits);
    }
    int32_t first = 1; /* node of the deepest level */
    for (int32_t level = 1; status == ES_OK && level < most; level++) {
        int32_t front[ES_DRAFT_WIDTH * KIDS], end = g->n_nodes;
        int32_t n = frontier(g, r, first, front);
        if (n == 0) {
            break;
        }
        status = expand(g, front, n, &logits);
        for (int32_t i = 0; status == ES_OK && i < n; i++) {
            add_children(g, r, front[i], logits + (size_t)i * (size_t)g->net->vocab);
        }
        first = end;
    }
    g->net->end(g->net->self);
    if (status != ES_OK) {
        g->n_nodes = 0;
        return status;
    }
    put_best(g, r->floor, tree);
    return ES_OK;
}

/* ---- a static shape ---------------------------------------------------------------------- */

/* Ranks that rows below `parent` ask for: 0 if there are none. */
static int32_t wanted(const es_tree *shape, int32_t parent)
{
    int32_t most = 0;
    for (int32_t i = parent + 1; i < shape->n; i++) {
        if (shape->parent[i] == parent && shape->rank[i] >= most) {
            most = shape->rank[i] + 1;
        }
    }
    return most;
}

static void fill_children(es_grow *g, const es_grow_request *r, const es_tree *shape,
                          int32_t parent, const float *logits)
{
    choice best[ES_MAX_ROWS];
    int32_t n = rank_children(g, r, logits, g->node[parent].depth, wanted(shape, parent), best);
    for (int32_t i = parent + 1; i < shape->n; i++) {
        if (shape->parent[i] == parent && shape->rank[i] < n) {
            fill_node(g, i, parent, shape->rank[i], best[shape->rank[i]]);
        }
    }
}

static void put_shape(const es_grow *g, es_tree *tree)
{
    int32_t row_of[ES_MAX_ROWS] = {0};
    for (int32_t i = 1; i < g->n_nodes; i++) {
        const node *from = &g->node[i];
        if (from->token < 0) {
            continue; /* nor has it descendants */
        }
        int32_t row = tree->n++, parent = row_of[from->parent];
        row_of[i] = row;
        tree->token[row] = from->token;
        tree->parent[row] = parent;
        tree->rank[row] = from->rank;
        tree->depth[row] = from->depth;
        tree->mask[row] = tree->mask[parent] | UINT64_C(1) << row;
        tree->score[row] = from->score;
    }
}

es_status es_grow_shape(es_grow *g, const es_grow_request *r, const es_tree *shape, es_tree *tree)
{
    start(g, r);
    es_tree_root(tree, r->root);
    int32_t most = most_levels(g, r);
    if (shape->n < 2 || most < 1) {
        return ES_OK;
    }
    g->n_nodes = shape->n; /* nodes are the shape's rows */
    for (int32_t i = 1; i < shape->n; i++) {
        g->node[i] = (node){.token = -1, .parent = shape->parent[i]};
    }
    const float *logits = NULL;
    bool is_ready = false;
    es_status status = g->net->begin(g->net->self, r->root, &logits, &is_ready);
    if (status == ES_OK && is_ready) {
        g->passes = 1;
        fill_children(g, r, shape, 0, logits);
    }
    for (int32_t level = 1; status == ES_OK && level < most; level++) {
        int32_t front[ES_MAX_ROWS], n = 0;
        for (int32_t i = 1; i < shape->n; i++) {
            if (g->node[i].token >= 0 && g->node[i].depth == level && wanted(shape, i) > 0) {
                front[n++] = i;
            }
        }
        if (n == 0) {
            break;
        }
        for (int32_t at = 0; status == ES_OK && at < n; at += g->net->width) {
            int32_t some = n - at < g->net->width ? n - at : g->net->width;
            status = expand(g, front + at, some, &logits);
            for (int32_t i = 0; status == ES_OK && i < some; i++) {
                fill_children(g, r, shape, front[at + i],
                              logits + (size_t)i * (size_t)g->net->vocab);
            }
        }
    }
    g->net->end(g->net->self);
    if (status != ES_OK) {
        g->n_nodes = 0;
        return status;
    }
    put_shape(g, tree);
    return ES_OK;
}

/* ---- judgement --------------------------------------------------------------------------- */

int32_t es_grow_passes(const es_grow *grow)
{
    return grow->passes;
}

static float within(float value, float low, float high)
{
    return value < low ? low : value > high ? high : value;
}

void es_grow_learn(es_grow *g, const int32_t *tokens, int32_t n)
{
    calibration *k = &g->learned[g->mode];
    bool is_true[MAX_NODES] = {true}; /* the node is on the path that came true */
    for (int32_t i = 1; i < g->n_nodes; i++) {
        const node *at = &g->node[i];
        if (at->token < 0 || !is_true[at->parent] || at->depth > n) {
            continue;
        }
        is_true[i] = at->token == tokens[at->depth - 1];
        if (at->rank > 0 && at->chance < DOUBTED) {
            continue;
        }
        float come = is_true[i] ? 1.0f : 0.0f, miss = come - at->chance;
        int32_t d = bucket(at->depth);
        k->shift[d] = within(k->shift[d] + RATE_SHIFT * miss, -MAX_SHIFT, MAX_SHIFT);
        k->slope[d] = within(k->slope[d] + RATE_SLOPE * miss * at->x, MIN_SLOPE, MAX_SLOPE);
        if (at->rank == 0) {
            k->hit[d] += RATE_HIT * (come - k->hit[d]);
        }
    }
    g->n_nodes = 0;
}

void es_grow_forget(es_grow *grow)
{
    grow->n_nodes = 0;
}
