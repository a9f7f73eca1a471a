/*
 * draft_medusa.c - see draft_medusa.h. Heads with one projection are computed together, so that its
 * weights are read once; others when their level is asked for.
 */
#include "draft_medusa.h"

#include <string.h>

#include "alloc.h"
#include "carver.h"
#include "draft_net.h"
#include "error.h"

struct es_medusa {
    const es_head *head;
    int32_t n_heads;
    int32_t n_done;            /* heads whose logits are there */
    float *feature;            /* (hidden) */
    es_rows x;                 /* (n_heads, hidden) the residual stream of each head */
    float *inner;              /* (n_heads, inner_stride) */
    size_t inner_stride;
    float *ones;               /* (hidden) */
    float *logits;             /* (n_heads, draft_vocab) */
    float *copies;             /* (ES_DRAFT_WIDTH, draft_vocab) */
    float *edge;               /* (n_heads, ES_TILE) a tile that ends behind the row */
    void *memory;
};

/* ---- life -------------------------------------------------------------------------------- */

static size_t carve_all(const es_head *head, char *memory, es_medusa *m)
{
    es_carver c = {memory, 0};
    size_t heads = (size_t)head->info.depth, hidden = (size_t)head->info.hidden;
    size_t vocab = (size_t)head->info.draft_vocab;
    m->inner_stride = (size_t)es_tiles(head->info.hidden) * ES_TILE;
    es_carve_rows(&c, head->info.depth, head->info.hidden, &m->x);
    m->feature = es_carve(&c, hidden, sizeof(float));
    m->inner = es_carve(&c, heads * m->inner_stride, sizeof(float));
    m->ones = es_carve(&c, hidden, sizeof(float));
    m->logits = es_carve(&c, heads * vocab, sizeof(float));
    m->copies = es_carve(&c, ES_DRAFT_WIDTH * vocab, sizeof(float));
    m->edge = es_carve(&c, heads * ES_TILE, sizeof(float));
    return c.used + 64;
}

size_t es_medusa_bytes(const es_head *head)
{
    es_medusa unused;
    return sizeof(es_medusa) + carve_all(head, NULL, &unused);
}

es_status es_medusa_new(const es_head *head, es_medusa **out)
{
    es_medusa *m = es_calloc(1, sizeof(*m));
    size_t bytes = m == NULL ? 0 : carve_all(head, NULL, m);
    if (m != NULL) {
        m->head = head;
        m->n_heads = head->info.depth;
        m->memory = es_calloc(1, bytes);
    }
    if (m == NULL || m->memory == NULL) {
        es_medusa_free(m);
        return es_fail(ES_ERR_MEMORY, "drafter: no memory for %zu bytes", bytes);
    }
    carve_all(head, (char *)m->memory + (64 - (uintptr_t)m->memory % 64) % 64, m);
    for (int32_t i = 0; i < head->info.hidden; i++) {
        m->ones[i] = 1.0f;
    }
    *out = m;
    return ES_OK;
}

void es_medusa_free(es_medusa *medusa)
{
    if (medusa != NULL) {
        es_free(medusa->memory);
        es_free(medusa);
    }
}

/* ---- the pass ---------------------------------------------------------------------------- */

/* Heads [first, first + n) on all members. */
typedef struct pass {
    es_medusa *medusa;
    int32_t first, n;
} pass;

typedef struct member {
    const pass *pass;
    es_medusa *medusa;
    const es_network *net;
    const es_kernels *k;
    int32_t index, of;
} member;

static void quantize(const member *m, int32_t head)
{
    const es_rows *x = &m->medusa->x;
    if (x->k % ES_GROUP == 0) { /* else no matrix wants it */
        m->k->quantize(x, head, 0, x->k / ES_GROUP);
    }
}

/* The heads' rows that fall to the member start as the target's hidden state. */
static void start(const member *m)
{
    int32_t begin, end;
    es_share(m->pass->n, m->index, m->of, &begin, &end);
    for (int32_t h = m->pass->first + begin; h < m->pass->first + end; h++) {
        const es_rows *x = &m->medusa->x;
        memcpy(x->x + (size_t)h * x->k, m->medusa->feature, (size_t)x->k * sizeof(float));
        quantize(m, h);
    }
    es_pool_barrier(m->net->pool, m->index);
}

static void block(const member *m, int32_t index)
{
    es_medusa *medusa = m->medusa;
    const es_head *head = medusa->head;
    const es_rows *x = &medusa->x;
    int32_t tiles = es_tiles(x->k), begin, end;
    es_share(m->pass->n * tiles, m->index, m->of, &begin, &end);
    for (int32_t unit = begin, next; unit < end; unit = next) {
        int32_t h = m->pass->first + unit / tiles, t0 = unit % tiles;
        int32_t left = end - unit < tiles - t0 ? end - unit : tiles - t0;
        next = unit + left;
        m->k->gemm(&head->block[h * head->n_blocks + index].weight, t0, t0 + left, x, h, 1,
                   medusa->inner + (size_t)h * medusa->inner_stride + (size_t)t0 * ES_TILE,
                   medusa->inner_stride);
    }
    es_pool_barrier(m->net->pool, m->index);
    es_share(m->pass->n, m->index, m->of, &begin, &end);
    for (int32_t h = m->pass->first + begin; h < m->pass->first + end; h++) {
        float *inner = medusa->inner + (size_t)h * medusa->inner_stride;
        m->k->add(inner, head->block[h * head->n_blocks + index].bias, x->k);
        m->k->swiglu(inner, medusa->ones, x->k, inner);
        m->k->add(x->x + (size_t)h * x->k, inner, x->k);
        quantize(m, h);
    }
    es_pool_barrier(m->net->pool, m->index);
}

/* Logits of heads [first, first + n) by one matrix. */
static void project(const member *m, int32_t first, int32_t n)
{
    es_medusa *medusa = m->medusa;
    const es_tensor *w = &medusa->head->output[first];
    int32_t whole = w->rows / ES_TILE, begin, end;
    size_t vocab = (size_t)w->rows;
    float *logits = medusa->logits + (size_t)first * vocab;
    es_share(es_tiles(w->rows), m->index, m->of, &begin, &end);
    int32_t direct = end < whole ? end : whole;
    if (begin < direct) {
        m->k->gemm(w, begin, direct, &medusa->x, first, n, logits + (size_t)begin * ES_TILE, vocab);
    }
    if (end > whole && begin < end) {
        m->k->gemm(w, whole, end, &medusa->x, first, n, medusa->edge, ES_TILE);
        for (int32_t h = 0; h < n; h++) {
            memcpy(logits + (size_t)h * vocab + (size_t)whole * ES_TILE,
                   medusa->edge + (size_t)h * ES_TILE, (vocab % ES_TILE) * sizeof(float));
        }
    }
}

static void run(void *arg, int32_t index, int32_t of)
{
    const pass *p = arg;
    const es_network *net = &p->medusa->head->network;
    uint64_t mode = es_fp_enter();
    member m = {p, p->medusa, net, net->kernels, index, of};
    start(&m);
    for (int32_t b = 0; b < p->medusa->head->n_blocks; b++) {
        block(&m, b);
    }
    if (p->medusa->head->is_output_shared) {
        project(&m, p->first, p->n);
    } else {
        for (int32_t h = p->first; h < p->first + p->n; h++) {
            project(&m, h, 1);
        }
    }
    es_fp_leave(mode);
}

static void compute(es_medusa *m, int32_t n)
{
    if (n > m->n_done) {
        n = m->head->is_output_shared ? m->n_heads : n;
        pass p = {m, m->n_done, n - m->n_done};
        es_pool_run(m->head->network.pool, run, &p);
        m->n_done = n;
    }
}

/* ---- drafting ---------------------------------------------------------------------------- */

es_status es_medusa_begin(es_medusa *m, const es_history *history, const float **logits)
{
    es_history_taps(history, history->length - 1, m->feature);
    m->n_done = 0;
    compute(m, 1);
    *logits = m->logits;
    return ES_OK;
}

es_status es_medusa_expand(es_medusa *m, const es_tree *tree, const int32_t *rows, int32_t n,
                           const float **logits)
{
    int32_t level = tree->depth[rows[0]];
    size_t vocab = (size_t)m->head->info.draft_vocab;
    if (level >= m->n_heads) {
        return es_fail(ES_ERR_ARGUMENT, "draft: expected rows above depth %d, got depth %d",
                       (int)m->n_heads, (int)level);
    }
    compute(m, level + 1);
    const float *of_level = m->logits + (size_t)level * vocab;
    for (int32_t i = 0; i < n && n > 1; i++) {
        memcpy(m->copies + (size_t)i * vocab, of_level, vocab * sizeof(float));
    }
    *logits = n > 1 ? m->copies : of_level;
    return ES_OK;
}
