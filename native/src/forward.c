/*
 * forward.c - the pass. Every member of the pool runs all of it and does its share of each step;
 * a barrier stands where a step needs what the others have made:
 *
 *     norm, q k v | attention | output + residual | norm, gate up | down + residual |
 *
 * A draft's rows are pairs of token and feature, joined in front of the first norm.
 *
 * A share is always whole outputs (or whole heads, or whole rows), never a part of a sum, so the
 * number of members changes nothing. Few rows are normed by every member for itself, which costs
 * less than waiting for each other.
 */
#include "forward.h"

#include <string.h>

#include "alloc.h"
#include "carver.h"
#include "error.h"
#include "gguf.h"

enum {
    OWN_ROWS = 8,           /* up to so many rows every member norms all of them */
    BLOCK_FLOATS = 8192,    /* outputs that one call of gemm leaves in the cache */
    N_BLOCKS = 2            /* gate and up */
};

/* ---- memory ------------------------------------------------------------------------------ */

typedef struct own {        /* one member's */
    es_rows normed;         /* (OWN_ROWS, hidden) */
    es_rows joined;         /* (OWN_ROWS, 2 * hidden) of pairs */
    float *block[N_BLOCKS]; /* (block_floats) */
} own;

struct es_workspace {
    float *x;               /* (ES_MAX_ROWS, hidden) the residual stream */
    float *delta;           /* (ES_MAX_ROWS, hidden) what post norms norm; NULL without them */
    float *q;               /* (ES_MAX_ROWS, q_stride) */
    size_t q_stride;
    es_rows normed;         /* (ES_MAX_ROWS, hidden) */
    es_rows mixed;          /* (ES_MAX_ROWS, heads * head_dim) */
    es_rows gated;          /* (ES_MAX_ROWS, ffn) */
    es_rows joined;         /* (ES_MAX_ROWS, 2 * hidden) of pairs: embedding, feature */
    es_rows taps;           /* (ES_MAX_ROWS, pair.taps) of pairs */
    float *cosine[2];       /* (ES_MAX_ROWS, head_dim / 2) of whole and of windowed layers */
    float *sine[2];
    own *own;               /* (threads) */
    void *memory;
};

static int32_t padded(int32_t n)
{
    return es_tiles(n) * ES_TILE;
}

static int32_t gcd(int32_t a, int32_t b)
{
    return b == 0 ? a : gcd(b, a % b);
}

/* Heads that end where a tile ends: the unit of q, k and v. */
static int32_t heads_per_unit(const es_shape *shape)
{
    return ES_TILE / gcd(ES_TILE, shape->head_dim);
}

static size_t block_floats(const es_shape *shape)
{
    size_t unit = (size_t)ES_MAX_ROWS * (size_t)(heads_per_unit(shape) * shape->head_dim);
    return unit > BLOCK_FLOATS ? unit : BLOCK_FLOATS;
}

static size_t carve_all(const es_network *net, int32_t threads, char *memory, es_workspace *w)
{
    const es_shape *s = &net->shape;
    bool is_pair = net->pair.taps > 0;
    es_carver c = {memory, 0};
    size_t rows = ES_MAX_ROWS, hidden = (size_t)s->hidden, half = (size_t)s->head_dim / 2;
    w->q_stride = (size_t)padded(s->heads * s->head_dim);
    w->own = es_carve(&c, (size_t)threads, sizeof(own));
    w->x = es_carve(&c, rows * hidden, sizeof(float));
    w->delta = s->has_post_norms ? es_carve(&c, rows * hidden, sizeof(float)) : NULL;
    w->q = es_carve(&c, rows * w->q_stride, sizeof(float));
    es_carve_rows(&c, ES_MAX_ROWS, s->hidden, &w->normed);
    es_carve_rows(&c, ES_MAX_ROWS, s->heads * s->head_dim, &w->mixed);
    es_carve_rows(&c, ES_MAX_ROWS, s->ffn, &w->gated);
    es_carve_rows(&c, is_pair ? ES_MAX_ROWS : 0, 2 * s->hidden, &w->joined);
    es_carve_rows(&c, is_pair ? ES_MAX_ROWS : 0, net->pair.taps, &w->taps);
    for (int32_t i = 0; i < 2; i++) {
        w->cosine[i] = es_carve(&c, rows * half, sizeof(float));
        w->sine[i] = es_carve(&c, rows * half, sizeof(float));
    }
    for (int32_t m = 0; m < threads; m++) {
        own member = {0};
        es_carve_rows(&c, OWN_ROWS, s->hidden, &member.normed);
        es_carve_rows(&c, is_pair ? OWN_ROWS : 0, 2 * s->hidden, &member.joined);
        for (int32_t i = 0; i < N_BLOCKS; i++) {
            member.block[i] = es_carve(&c, block_floats(s), sizeof(float));
        }
        if (memory != NULL) {
            w->own[m] = member;
        }
    }
    return c.used + 64;
}

es_status es_workspace_new(const es_network *network, int32_t threads, es_workspace **out)
{
    es_workspace *w = es_calloc(1, sizeof(*w));
    size_t bytes = w == NULL ? 0 : carve_all(network, threads, NULL, w);
    void *memory = es_calloc(1, bytes);
    if (w == NULL || memory == NULL) {
        es_free(w);
        es_free(memory);
        return es_fail(ES_ERR_MEMORY, "model: no memory for %zu bytes of work space", bytes);
    }
    w->memory = memory;
    carve_all(network, threads, (char *)memory + (64 - (uintptr_t)memory % 64) % 64, w);
    *out = w;
    return ES_OK;
}

void es_workspace_free(es_workspace *workspace)
{
    if (workspace != NULL) {
        es_free(workspace->memory);
        es_free(workspace);
    }
}

/* ---- what a member knows ----------------------------------------------------------------- */

typedef struct pass {
    const es_network *net;
    es_workspace *work;
    const es_batch *batch;
    int32_t n;              /* rows of the batch */
} pass;

typedef struct member {
    const pass *pass;
    const es_network *net;
    const es_shape *shape;
    const es_kernels *k;
    es_workspace *work;
    own *own;
    int32_t n;              /* rows of the batch */
    int32_t from;           /* rows before it have given their K and V and are done with */
    int32_t index, of;      /* this member of so many */
} member;

static void meet(const member *m)
{
    es_pool_barrier(m->net->pool, m->index);
}

static void share(const member *m, int32_t count, int32_t *begin, int32_t *end)
{
    es_share(count, m->index, m->of, begin, end);
}

/* Of the rows that are not done with. */
static void share_rows(const member *m, int32_t *begin, int32_t *end)
{
    share(m, m->n - m->from, begin, end);
    *begin += m->from;
    *end += m->from;
}

static bool is_float(const es_tensor *t)
{
    return t->type == ES_GGML_F32 || t->type == ES_GGML_F16 || t->type == ES_GGML_BF16;
}

/* Tiles whose outputs of n rows fit a block, an even number. */
static int32_t block_tiles(int32_t n)
{
    int32_t tiles = BLOCK_FLOATS / (n * ES_TILE) / 2 * 2;
    return tiles > 2 ? tiles : 2;
}

static int32_t smaller(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* Units of heads of q, k and v that fall to a member. */
typedef struct head_share {
    int32_t q_begin, q_end, kv_begin, kv_end;
} head_share;

/* How many of `heads` units that lie `each` apart begin before `at`. */
static int32_t units_before(int32_t at, int32_t each, int32_t heads)
{
    return at > 0 ? smaller((at + each - 1) / each, heads) : 0;
}

/* Counted in halves of a unit of q: one of K and V has twice the outputs, and both to store.
   has_q false: K and V alone. */
static head_share share_heads(const member *m, bool has_q)
{
    enum { Q = 2, KV = 5 };
    int32_t unit = heads_per_unit(m->shape), begin, end;
    int32_t n_q = has_q ? (m->shape->heads + unit - 1) / unit : 0;
    int32_t n_kv = (m->shape->kv_heads + unit - 1) / unit;
    share(m, Q * n_q + KV * n_kv, &begin, &end);
    return (head_share){units_before(begin, Q, n_q), units_before(end, Q, n_q),
                        units_before(begin - Q * n_q, KV, n_kv),
                        units_before(end - Q * n_q, KV, n_kv)};
}

/* Pairs of tiles of gate and up: the outputs of two are a group of the next layer's input. */
static void share_pairs(const member *m, const es_tensor *w, int32_t *begin, int32_t *end)
{
    int32_t tiles = es_tiles(w->rows);
    share(m, (tiles + 1) / 2, begin, end);
    *begin *= 2;
    *end = smaller(2 * *end, tiles);
}

/* ---- fetching: weights a member will need behind the barrier it comes to ----------------- */

static void fetch_share(const member *m, const es_tensor *w)
{
    int32_t begin, end;
    share(m, es_tiles(w->rows), &begin, &end);
    es_fetch_tiles(w, begin, end);
}

static void fetch_gate(const member *m, const es_layer *layer)
{
    int32_t begin, end;
    share_pairs(m, &layer->gate, &begin, &end);
    es_fetch_tiles(&layer->gate, begin, end);
}

static void fetch_heads(const member *m, const es_layer *layer)
{
    int32_t tiles = heads_per_unit(m->shape) * m->shape->head_dim / ES_TILE;
    head_share part = share_heads(m, true);
    if (part.q_begin < part.q_end) {
        es_fetch_tiles(&layer->q, part.q_begin * tiles,
                       smaller(part.q_end * tiles, es_tiles(layer->q.rows)));
    } else {
        es_fetch_tiles(&layer->k, part.kv_begin * tiles,
                       smaller(part.kv_end * tiles, es_tiles(layer->k.rows)));
    }
}

/* ---- norms ------------------------------------------------------------------------------- */

/* Without a weight the row stays as it is. */
static void norm_row(const member *m, const float *x, const float *weight, bool quantize,
                     const es_rows *out, int32_t row)
{
    float *to = out->x + (size_t)row * out->k;
    if (weight == NULL) {
        memcpy(to, x, (size_t)m->shape->hidden * sizeof(*to));
    } else {
        m->k->rms_norm(x, weight, m->shape->hidden, m->shape->eps, to);
    }
    if (quantize) {
        m->k->quantize(out, row, 0, out->k / ES_GROUP);
    }
}

/* n rows, normed by `weight`: the member's own copy, or one they made together. */
static const es_rows *norm(const member *m, const float *weight, bool quantize,
                           const int32_t *rows, int32_t n)
{
    bool is_own = n <= OWN_ROWS;
    const es_rows *out = is_own ? &m->own->normed : &m->work->normed;
    int32_t begin = 0, end = n;
    if (!is_own) {
        share(m, n, &begin, &end);
    }
    for (int32_t i = begin; i < end; i++) {
        int32_t row = rows == NULL ? m->from + i : rows[i];
        norm_row(m, m->work->x + (size_t)row * m->shape->hidden, weight, quantize, out, i);
    }
    if (!is_own) {
        meet(m);
    }
    return out;
}

/* Adds what a sub-layer left in delta, normed first, to the residual. */
static void post_norm(const member *m, const float *weight)
{
    size_t hidden = (size_t)m->shape->hidden;
    int32_t begin, end;
    meet(m);
    share_rows(m, &begin, &end);
    for (int32_t r = begin; r < end; r++) {
        float *delta = m->work->delta + (size_t)r * hidden;
        m->k->rms_norm(delta, weight, m->shape->hidden, m->shape->eps, delta);
        m->k->add(m->work->x + (size_t)r * hidden, delta, m->shape->hidden);
    }
}

/* ---- linear layers ----------------------------------------------------------------------- */

/* Rows times `w` (hidden outputs): to the residual, or through the post norm to it. The others
   may not be done when it returns. */
static void project(const member *m, const es_tensor *w, const es_rows *in, const float *post)
{
    size_t hidden = (size_t)m->shape->hidden;
    float *block = m->own->block[0];
    int32_t n = m->n - m->from, begin, end;
    share(m, es_tiles(w->rows), &begin, &end);
    for (int32_t t = begin, next; t < end; t = next) {
        next = smaller(t + block_tiles(n), end);
        int32_t first = t * ES_TILE, width = smaller(next * ES_TILE, w->rows) - first;
        size_t ld = (size_t)(next - t) * ES_TILE;
        m->k->gemm(w, t, next, in, m->from, n, block, ld);
        for (int32_t r = 0; r < n; r++) {
            size_t at = (size_t)(m->from + r) * hidden + (size_t)first;
            if (post == NULL) {
                m->k->add(m->work->x + at, block + r * ld, width);
            } else {
                memcpy(m->work->delta + at, block + r * ld, (size_t)width * sizeof(float));
            }
        }
    }
    if (post != NULL) {
        post_norm(m, post);
    }
}

static void gate_and_up(const member *m, const es_layer *layer, const es_rows *in)
{
    void (*activate)(const float *, const float *, int32_t, float *) =
        m->shape->activation == ES_SILU ? m->k->swiglu : m->k->geglu;
    const es_rows *out = &m->work->gated;
    bool quantize = !is_float(&layer->down);
    int32_t n = m->n - m->from, begin, end;
    share_pairs(m, &layer->gate, &begin, &end);
    for (int32_t t = begin, next; t < end; t = next) {
        next = smaller(t + block_tiles(n), end);
        int32_t first = t * ES_TILE, width = smaller(next * ES_TILE, out->k) - first;
        size_t ld = (size_t)(next - t) * ES_TILE;
        es_fetch_tiles(&layer->up, t, next);
        m->k->gemm(&layer->gate, t, next, in, 0, n, m->own->block[0], ld);
        m->k->gemm(&layer->up, t, next, in, 0, n, m->own->block[1], ld);
        for (int32_t r = 0; r < n; r++) {
            activate(m->own->block[0] + r * ld, m->own->block[1] + r * ld, width,
                     out->x + (size_t)(m->from + r) * out->k + first);
            if (quantize) {
                m->k->quantize(out, m->from + r, first / ES_GROUP, (first + width) / ES_GROUP);
            }
        }
    }
    fetch_share(m, &layer->down);
    meet(m);
}

/* ---- attention --------------------------------------------------------------------------- */

/* Bias, norm and RoPE of one head of one row. */
static void finish_head(const member *m, int32_t layer, int32_t row, int32_t head,
                        const float *bias, const float *weight, bool rotate, float *x)
{
    int32_t dim = m->shape->head_dim;
    if (bias != NULL) {
        m->k->add(x, bias + (size_t)head * dim, dim);
    }
    if (weight != NULL) {
        m->k->rms_norm(x, weight, dim, m->shape->eps, x);
    }
    if (rotate) {
        int32_t table = es_shape_is_windowed(m->shape, layer);
        size_t at = (size_t)row * (size_t)(dim / 2);
        m->k->rope(x, m->work->cosine[table] + at, m->work->sine[table] + at, dim,
                   m->shape->is_interleaved);
    }
}

static void queries(const member *m, int32_t index, const es_rows *in, int32_t begin, int32_t end)
{
    const es_layer *layer = &m->net->layer[index];
    int32_t dim = m->shape->head_dim, unit = heads_per_unit(m->shape);
    int32_t t0 = begin * (unit * dim / ES_TILE);
    int32_t t1 = smaller(end * (unit * dim / ES_TILE), es_tiles(layer->q.rows));
    m->k->gemm(&layer->q, t0, t1, in, m->from, m->n - m->from,
               m->work->q + (size_t)m->from * m->work->q_stride + (size_t)t0 * ES_TILE,
               m->work->q_stride);
    int32_t last = smaller(end * unit, m->shape->heads);
    for (int32_t r = m->from; r < m->n; r++) {
        for (int32_t h = begin * unit; h < last; h++) {
            float *q = m->work->q + (size_t)r * m->work->q_stride + (size_t)h * dim;
            finish_head(m, index, r, h, layer->q_bias, layer->q_norm, true, q);
            m->k->scale(q, q, m->shape->attention_scale, dim);
        }
    }
}

/* Stores K and V of heads [head, last) whose outputs, from `head` on, are in the blocks. */
static void store_heads(const member *m, int32_t index, int32_t head, int32_t last, size_t ld)
{
    const es_layer *layer = &m->net->layer[index];
    int32_t dim = m->shape->head_dim, row = 0;
    for (int32_t s = 0; s < m->pass->batch->n_segments; s++) {
        const es_segment *segment = &m->pass->batch->segment[s];
        for (int32_t r = 0; r < segment->n; r++, row++) {
            for (int32_t h = head; h < last; h++) {
                size_t at = (size_t)row * ld + (size_t)(h - head) * (size_t)dim;
                float *key = m->own->block[0] + at, *value = m->own->block[1] + at;
                finish_head(m, index, row, h, layer->k_bias, layer->k_norm, true, key);
                finish_head(m, index, row, h, layer->v_bias, NULL, false, value);
                es_kv_store(segment->kv, m->k, index, h, segment->first + r, key, value);
            }
        }
    }
}

static void keys_and_values(const member *m, int32_t index, const es_rows *in, int32_t begin,
                            int32_t end)
{
    const es_layer *layer = &m->net->layer[index];
    int32_t unit = heads_per_unit(m->shape), tiles = unit * m->shape->head_dim / ES_TILE;
    int32_t step = block_tiles(m->n) / tiles > 1 ? block_tiles(m->n) / tiles : 1;
    for (int32_t u = begin, next; u < end; u = next) {
        next = smaller(u + step, end);
        int32_t t0 = u * tiles, t1 = smaller(next * tiles, es_tiles(layer->k.rows));
        size_t ld = (size_t)(t1 - t0) * ES_TILE;
        es_fetch_tiles(&layer->v, t0, t1);
        m->k->gemm(&layer->k, t0, t1, in, 0, m->n, m->own->block[0], ld);
        m->k->gemm(&layer->v, t0, t1, in, 0, m->n, m->own->block[1], ld);
        store_heads(m, index, u * unit, smaller(next * unit, m->shape->kv_heads), ld);
    }
}

static void project_heads(const member *m, int32_t index, const es_rows *in, bool has_q)
{
    head_share part = share_heads(m, has_q);
    if (part.q_begin < part.q_end) {
        queries(m, index, in, part.q_begin, part.q_end);
    }
    if (part.kv_begin < part.kv_end) {
        keys_and_values(m, index, in, part.kv_begin, part.kv_end);
    }
    meet(m);
}

/* Heads [head, head + n_heads) of rows [row0, row0 + n) of a segment that begins at row `first`. */
static void attend(const member *m, int32_t index, const es_segment *segment, int32_t first,
                   int32_t head, int32_t n_heads, int32_t row0, int32_t n)
{
    const es_rows *out = &m->work->mixed;
    es_attention attention = {.kernels = m->k, .heads = m->shape->heads};
    int32_t dim = m->shape->head_dim;
    size_t row = (size_t)(first + row0), at = (size_t)head * dim;
    es_kv_attend(segment->kv, &attention, index, head, n_heads, segment->first + row0, n,
                 m->work->q + row * m->work->q_stride + at, m->work->q_stride,
                 out->x + row * out->k + at, (size_t)out->k,
                 segment->scratch + (size_t)m->index * segment->scratch_stride);
    if (dim % ES_GROUP == 0 && !is_float(&m->net->layer[index].o)) {
        for (int32_t r = 0; r < n; r++) {
            m->k->quantize(out, (int32_t)row + r, head * dim / ES_GROUP,
                           (head + n_heads) * dim / ES_GROUP);
        }
    }
}

/* Units [begin, end) of a segment's (kv head, row from `row0` on, head of the group). */
static void attend_units(const member *m, int32_t index, const es_segment *segment, int32_t first,
                         int32_t row0, int32_t begin, int32_t end)
{
    int32_t group = m->shape->heads / m->shape->kv_heads, per_head = (segment->n - row0) * group;
    for (int32_t u = begin; u < end;) {
        int32_t kv_head = u / per_head, left = u % per_head;
        int32_t row = row0 + left / group, within = left % group;
        if (within == 0 && end - u >= group) {
            int32_t rows = smaller(segment->n - row, (end - u) / group);
            attend(m, index, segment, first, kv_head * group, group, row, rows);
            u += rows * group;
        } else {
            int32_t heads = smaller(group - within, end - u);
            attend(m, index, segment, first, kv_head * group + within, heads, row, 1);
            u += heads;
        }
    }
}

static void mix(const member *m, int32_t index)
{
    int32_t heads = m->shape->heads, begin, end;
    share(m, (m->n - m->from) * heads, &begin, &end);
    int32_t first = 0, unit = 0; /* row of the batch and unit where the segment begins */
    for (int32_t s = 0; s < m->pass->batch->n_segments; s++) {
        const es_segment *segment = &m->pass->batch->segment[s];
        int32_t row0 = m->from > first ? smaller(m->from - first, segment->n) : 0;
        int32_t units = (segment->n - row0) * heads;
        int32_t from = begin > unit ? begin - unit : 0;
        int32_t to = smaller(end - unit, units);
        if (from < to) {
            attend_units(m, index, segment, first, row0, from, to);
        }
        first += segment->n;
        unit += units;
    }
    fetch_share(m, &m->net->layer[index].o);
    meet(m);
    const es_rows *mixed = &m->work->mixed;
    if (m->shape->head_dim % ES_GROUP != 0 && !is_float(&m->net->layer[index].o)) {
        share_rows(m, &begin, &end);
        for (int32_t r = begin; r < end; r++) {
            m->k->quantize(mixed, r, 0, mixed->k / ES_GROUP);
        }
        meet(m);
    }
}

/* ---- the pass ---------------------------------------------------------------------------- */

/* Cosines and sines of a row of the batch. */
static void turn(const member *m, int32_t row, int64_t position)
{
    size_t at = (size_t)row * (size_t)(m->shape->head_dim / 2);
    es_rope_table(&m->shape->rope, &position, 1, m->work->cosine[0] + at, m->work->sine[0] + at);
    if (m->shape->window > 0) {
        es_rope_table(&m->shape->local_rope, &position, 1, m->work->cosine[1] + at,
                      m->work->sine[1] + at);
    }
}

static void embed_token(const member *m, int32_t token, float *x)
{
    es_pack_row(&m->net->top.embedding, token, x);
    if (m->shape->embedding_scale != 1.0f) {
        m->k->scale(x, x, m->shape->embedding_scale, m->shape->hidden);
    }
}

/* A row of the target's hidden states, as fc takes them. */
static void take_taps(const member *m, int32_t row, const float *feature)
{
    const es_pair *pair = &m->net->pair;
    const es_rows *taps = &m->work->taps;
    float *x = taps->x + (size_t)row * taps->k;
    memcpy(x, feature, (size_t)taps->k * sizeof(*x));
    for (int32_t i = 0; i < pair->n_norms; i++) {
        int32_t n = taps->k / pair->n_norms;
        m->k->rms_norm(x + i * n, pair->taps_norm[i], n, m->shape->eps, x + i * n);
    }
    if (!is_float(&pair->fc)) {
        m->k->quantize(taps, row, 0, taps->k / ES_GROUP);
    }
}

/* Row i of a segment, row `row` of the batch: what fc reads, and x ready for what it adds. */
static void embed_pair(const member *m, const es_segment *segment, int32_t i, int32_t row)
{
    const es_pair *pair = &m->net->pair;
    const es_rows *joined = &m->work->joined;
    size_t hidden = (size_t)m->shape->hidden;
    size_t width = segment->is_from_target ? (size_t)pair->taps : hidden;
    const float *feature = segment->feature + (size_t)i * width;
    float *x = m->work->x + (size_t)row * hidden, *both = joined->x + (size_t)row * joined->k;
    embed_token(m, segment->token[i], both);
    if (pair->feature_norm == NULL) {
        memcpy(both + hidden, feature, hidden * sizeof(*both));
        if (!is_float(&pair->fc)) {
            m->k->quantize(joined, row, 0, joined->k / ES_GROUP);
        }
    } else {
        m->k->rms_norm(both, m->net->layer[0].attn_norm, m->shape->hidden, m->shape->eps, both);
        if (segment->is_from_target) {
            take_taps(m, row, feature);
        } else {
            memcpy(x, feature, hidden * sizeof(*x));
            return;
        }
    }
    if (pair->fc_bias != NULL) {
        memcpy(x, pair->fc_bias, hidden * sizeof(*x));
    } else {
        memset(x, 0, hidden * sizeof(*x));
    }
}

static void embed(const member *m)
{
    int32_t begin, end, row = 0;
    share(m, m->n, &begin, &end);
    for (int32_t s = 0; s < m->pass->batch->n_segments; s++) {
        const es_segment *segment = &m->pass->batch->segment[s];
        for (int32_t i = 0; i < segment->n; i++, row++) {
            if (row < begin || row >= end) {
                continue;
            }
            if (m->net->pair.taps > 0) {
                embed_pair(m, segment, i, row);
            } else {
                embed_token(m, segment->token[i], m->work->x + (size_t)row * m->shape->hidden);
            }
            turn(m, row, segment->position + (segment->depth == NULL ? i : segment->depth[i]));
        }
    }
    meet(m);
}

/* ---- pairs ------------------------------------------------------------------------------- */

/* fc, where this batch has something for it: all its segments are alike. */
static void fuse(const member *m)
{
    const es_pair *pair = &m->net->pair;
    if (pair->feature_norm == NULL || m->pass->batch->segment[0].is_from_target) {
        project(m, &pair->fc, pair->feature_norm == NULL ? &m->work->joined : &m->work->taps,
                NULL);
        fetch_heads(m, &m->net->layer[0]);
        meet(m);
    }
}

/* Embedding and feature, both normed, side by side: the member's own copy, or one they made. */
static const es_rows *join(const member *m, bool quantize)
{
    bool is_own = m->n <= OWN_ROWS;
    const es_rows *from = &m->work->joined, *out = is_own ? &m->own->joined : from;
    int32_t hidden = m->shape->hidden, begin = 0, end = m->n;
    if (!is_own) {
        share(m, m->n, &begin, &end);
    }
    for (int32_t r = begin; r < end; r++) {
        float *both = out->x + (size_t)r * out->k;
        if (is_own) {
            memcpy(both, from->x + (size_t)r * out->k, (size_t)hidden * sizeof(*both));
        }
        m->k->rms_norm(m->work->x + (size_t)r * hidden, m->net->pair.feature_norm, hidden,
                       m->shape->eps, both + hidden);
        if (quantize) {
            m->k->quantize(out, r, 0, out->k / ES_GROUP);
        }
    }
    if (!is_own) {
        meet(m);
    }
    return out;
}

/* What attention of layer `index` reads. */
static const es_rows *attention_input(const member *m, int32_t index)
{
    const es_layer *layer = &m->net->layer[index];
    bool quantize = !is_float(&layer->q) || !is_float(&layer->k) || !is_float(&layer->v);
    if (m->net->pair.feature_norm != NULL) {
        return join(m, quantize);
    }
    return norm(m, layer->attn_norm, quantize, NULL, m->n);
}

/* The normed feature becomes the residual, between two barriers when nobody reads x. */
static void replace_residual(const member *m, const es_rows *joined)
{
    int32_t begin, end, hidden = m->shape->hidden;
    share_rows(m, &begin, &end);
    for (int32_t r = begin; r < end; r++) {
        memcpy(m->work->x + (size_t)r * hidden, joined->x + (size_t)r * joined->k + hidden,
               (size_t)hidden * sizeof(float));
    }
}

/* Features for the rows behind those whose logits are wanted. x stands still. */
static void hand_on(const member *m)
{
    const es_batch *batch = m->pass->batch;
    size_t hidden = (size_t)m->shape->hidden;
    int32_t begin, end;
    share(m, batch->n_rows, &begin, &end);
    for (int32_t i = begin; i < end; i++) {
        const float *x = m->work->x + (size_t)batch->rows[i] * hidden;
        float *out = batch->handed + (size_t)i * hidden;
        if (m->net->pair.hands_normed) {
            m->k->rms_norm(x, m->net->top.output_norm, m->shape->hidden, m->shape->eps, out);
        } else {
            memcpy(out, x, hidden * sizeof(*out));
        }
    }
}

/* ---- taps and logits --------------------------------------------------------------------- */

/* Keeps the residual stream as it enters `layer`, for the segments that tap it there; behind the
   last layer what the final norm makes of it. Rows of x stand still until the next barrier. */
static void tap(const member *m, int32_t layer)
{
    size_t hidden = (size_t)m->shape->hidden;
    int32_t begin, end, first = 0;
    share(m, m->n, &begin, &end);
    for (int32_t s = 0; s < m->pass->batch->n_segments; s++) {
        const es_segment *segment = &m->pass->batch->segment[s];
        for (int32_t t = 0; t < segment->n_taps; t++) {
            for (int32_t r = 0; r < segment->n && segment->taps[t] == layer; r++) {
                int32_t row = first + r;
                if (row < begin || row >= end) {
                    continue;
                }
                const float *x = m->work->x + (size_t)row * hidden;
                float *out = segment->tapped + (size_t)(r * segment->n_taps + t) * hidden;
                if (layer < m->shape->layers) {
                    memcpy(out, x, hidden * sizeof(*out));
                } else {
                    m->k->rms_norm(x, m->net->top.output_norm, m->shape->hidden, m->shape->eps,
                                   out);
                }
            }
        }
        first += segment->n;
    }
}

static bool is_tapped(const es_batch *batch, int32_t layer)
{
    for (int32_t s = 0; s < batch->n_segments; s++) {
        for (int32_t t = 0; t < batch->segment[s].n_taps; t++) {
            if (batch->segment[s].taps[t] == layer) {
                return true;
            }
        }
    }
    return false;
}

static void head(const member *m)
{
    const es_batch *batch = m->pass->batch;
    const es_tensor *w = &m->net->top.output;
    const es_rows *in = norm(m, m->net->top.output_norm, !is_float(w), batch->rows, batch->n_rows);
    int32_t vocab = w->rows, whole = vocab / ES_TILE, begin, end;
    share(m, es_tiles(vocab), &begin, &end);
    int32_t direct = smaller(end, whole);
    if (begin < direct) {
        m->k->gemm(w, begin, direct, in, 0, batch->n_rows,
                   batch->logits + (size_t)begin * ES_TILE, (size_t)vocab);
    }
    if (end > whole && begin < end) { /* a tile that ends behind the row */
        m->k->gemm(w, whole, end, in, 0, batch->n_rows, m->own->block[0], ES_TILE);
        for (int32_t r = 0; r < batch->n_rows; r++) {
            memcpy(batch->logits + (size_t)r * vocab + (size_t)whole * ES_TILE,
                   m->own->block[0] + (size_t)r * ES_TILE,
                   (size_t)(vocab % ES_TILE) * sizeof(float));
        }
    }
}

/* The first row that anybody reads behind the last layer. */
static int32_t first_wanted(const member *m)
{
    const es_batch *batch = m->pass->batch;
    return is_tapped(batch, m->shape->layers) ? 0 : batch->rows[0];
}

static void run(void *arg, int32_t index, int32_t of)
{
    const pass *p = arg;
    uint64_t mode = es_fp_enter();
    member self = {.pass = p, .net = p->net, .shape = &p->net->shape, .k = p->net->kernels,
                   .work = p->work, .own = &p->work->own[index], .n = p->n, .index = index,
                   .of = of};
    const member *m = &self;
    bool is_pair = m->net->pair.taps > 0;
    embed(m);
    if (is_pair) {
        fuse(m);
    }
    bool is_whole = p->batch->n_rows > 0 || is_tapped(p->batch, m->shape->layers);
    for (int32_t i = 0; i < m->shape->layers; i++) {
        const es_layer *layer = &m->net->layer[i];
        tap(m, i);
        const es_rows *in = attention_input(m, i);
        bool goes_on = i + 1 < m->shape->layers || is_whole;
        if (i + 1 == m->shape->layers && is_whole) {
            self.from = first_wanted(m);
        }
        project_heads(m, i, in, goes_on);
        if (!goes_on) {
            break; /* nobody reads what is behind the last layer's K and V */
        }
        if (m->net->pair.adds_normed) {
            replace_residual(m, in);
        }
        mix(m, i);
        project(m, &layer->o, &m->work->mixed, layer->post_attn_norm);
        fetch_gate(m, layer);
        meet(m);
        bool quantize = !is_float(&layer->gate) || !is_float(&layer->up);
        gate_and_up(m, layer, norm(m, layer->ffn_norm, quantize, NULL, m->n - m->from));
        project(m, &layer->down, &m->work->gated, layer->post_ffn_norm);
        if (i + 1 < m->shape->layers) {
            fetch_heads(m, layer + 1);
        } else {
            fetch_share(m, &m->net->top.output);
        }
        meet(m);
    }
    if (is_whole) {
        tap(m, m->shape->layers);
    }
    if (p->batch->n_rows > 0) {
        if (is_pair) {
            hand_on(m);
        }
        head(m);
    }
    es_fp_leave(mode);
}

void es_forward(const es_network *network, es_workspace *workspace, const es_batch *batch)
{
    pass p = {.net = network, .work = workspace, .batch = batch};
    for (int32_t s = 0; s < batch->n_segments; s++) {
        p.n += batch->segment[s].n;
    }
    es_pool_run(network->pool, run, &p);
}
