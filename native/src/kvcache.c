/*
 * kvcache.c - K and V rows by slot, and attention over them in logical order.
 */
#include "kvcache.h"

#include <string.h>

#include "alloc.h"
#include "error.h"
#include "ring.h"

enum {
    SLACK = 64,             /* slots of a windowed ring beside its window: rows of one append */
    MOST_VECTORS = 24,      /* query vectors that pass over the keys together ... */
    LEAST_VECTORS = 8,      /* ... and those that do so however many columns they have */
    SCORES = 1 << 16,       /* floats of their scores that still lie in a near cache */
    MOST = 1 << 16          /* of layers, heads and values of a head */
};

/* Layers of one kind: where their rows are. */
typedef struct layer_class {
    es_ring *ring;
    int32_t n_slots;
    int32_t window, sinks;  /* window 0: everything is visible, and there are no sinks */
    bool wraps;             /* slots are used again; else there is one for each position */
    size_t keys_bytes, scale_bytes, head_bytes; /* of one head; K and V take the same */
} layer_class;

enum { FULL = 0, WINDOWED = 1 };

struct es_kv {
    es_kv_shape shape;      /* windowed points to our copy, or is NULL */
    layer_class classes[2];
    es_pages pages;
    size_t *layer_at;       /* (layers) into pages */
    uint8_t *windowed;      /* (layers) */
    int32_t *depth;         /* (batch) of the open rows */
    int32_t *slot;          /* (batch), and both more (batch) for what a ring tells us */
    uint64_t mask[ES_MAX_ROWS]; /* of the open rows, unless they are a chain */
    int32_t n_open;
    bool is_chain;
};

/* ---- sizes ------------------------------------------------------------------------------- */

static int32_t least(int64_t a, int64_t b)
{
    return (int32_t)(a < b ? a : b);
}

static size_t times(size_t a, size_t b)
{
    return b != 0 && a > SIZE_MAX / b ? SIZE_MAX : a * b;
}

static size_t plus(size_t a, size_t b)
{
    return a > SIZE_MAX - b ? SIZE_MAX : a + b;
}

static int32_t count_windowed(const es_kv_shape *shape)
{
    int32_t n = 0;
    for (int32_t i = 0; shape->windowed != NULL && i < shape->layers; i++) {
        n += shape->windowed[i] != 0;
    }
    return n;
}

static size_t value_bytes(const es_kv_shape *shape)
{
    return shape->format == ES_KV_FORMAT_INT8 ? sizeof(int8_t) : sizeof(uint16_t);
}

/* Everything of a class but its ring. A window that would need more slots than the context has
   positions keeps them all. */
static layer_class class_of(const es_kv_shape *shape, int is_windowed)
{
    layer_class c = {.n_slots = shape->context};
    if (is_windowed) {
        int64_t batch = shape->batch > SLACK ? shape->batch : SLACK;
        int64_t wanted = (int64_t)shape->sinks + shape->window + batch;
        bool is_bounded = count_windowed(shape) < shape->layers;
        if (!is_bounded || wanted < shape->context) {
            c.n_slots = wanted < INT32_MAX - 16 ? (int32_t)wanted : INT32_MAX - 16;
            c.wraps = true;
        }
        c.window = shape->window;
        c.sinks = shape->sinks;
    }
    size_t slots = ((size_t)c.n_slots + 15) / 16 * 16;
    c.keys_bytes = times(times(slots, (size_t)shape->head_dim), value_bytes(shape));
    c.scale_bytes = shape->format == ES_KV_FORMAT_INT8 ? slots * sizeof(float) : 0;
    c.head_bytes = plus(times(2, c.keys_bytes), 2 * c.scale_bytes);
    if (c.head_bytes < SIZE_MAX - 64) {
        c.head_bytes = (c.head_bytes + 63) / 64 * 64;
    }
    return c;
}

static size_t page_bytes(const es_kv_shape *shape)
{
    size_t windowed = (size_t)count_windowed(shape);
    size_t full = (size_t)shape->layers - windowed;
    size_t heads = plus(times(full, class_of(shape, 0).head_bytes),
                        times(windowed, class_of(shape, 1).head_bytes));
    return times(heads, (size_t)shape->kv_heads);
}

size_t es_kv_bytes(const es_kv_shape *shape)
{
    size_t books = sizeof(es_kv) + (size_t)shape->layers * (sizeof(size_t) + 1) +
                   4 * (size_t)shape->batch * sizeof(int32_t);
    return plus(page_bytes(shape), books);
}

/* ---- life -------------------------------------------------------------------------------- */

static es_status check_shape(const es_kv_shape *s)
{
    if (s->layers < 1 || s->layers > MOST || s->kv_heads < 1 || s->kv_heads > MOST ||
        s->head_dim < 1 || s->head_dim > MOST) {
        return es_fail(ES_ERR_ARGUMENT,
                       "KV cache: expected 1..%d layers, heads and values of a head, got %d, %d "
                       "and %d", (int)MOST, (int)s->layers, (int)s->kv_heads, (int)s->head_dim);
    }
    if (s->context < 1 || s->context > INT32_MAX - 16 || s->batch < 1 ||
        s->batch > INT32_MAX - 16) {
        return es_fail(ES_ERR_ARGUMENT,
                       "KV cache: expected room for a position and a row, got %d and %d",
                       (int)s->context, (int)s->batch);
    }
    if (count_windowed(s) > 0 && (s->window < 1 || s->sinks < 0)) {
        return es_fail(ES_ERR_ARGUMENT,
                       "KV cache: expected a window of at least 1 and sinks of at least 0, got %d "
                       "and %d", (int)s->window, (int)s->sinks);
    }
    if (s->format != ES_KV_FORMAT_F16 && s->format != ES_KV_FORMAT_INT8) {
        return es_fail(ES_ERR_ARGUMENT, "KV cache: expected format 0 or 1, got %d", (int)s->format);
    }
    return ES_OK;
}

es_status es_kv_new(const es_kv_shape *shape, es_kv **out)
{
    *out = NULL;
    es_status status = check_shape(shape);
    if (status != ES_OK) {
        return status;
    }
    size_t layers = (size_t)shape->layers, batch = (size_t)shape->batch;
    es_kv *kv = es_calloc(1, sizeof *kv);
    if (kv == NULL) {
        return es_fail(ES_ERR_MEMORY, "KV cache: no memory");
    }
    kv->shape = *shape;
    kv->layer_at = es_calloc(layers, sizeof *kv->layer_at);
    kv->windowed = es_calloc(layers, sizeof *kv->windowed);
    kv->depth = es_calloc(batch, sizeof *kv->depth);
    kv->slot = es_calloc(3 * batch, sizeof *kv->slot);
    size_t n_bytes = page_bytes(shape);
    if (kv->layer_at == NULL || kv->windowed == NULL || kv->depth == NULL || kv->slot == NULL ||
        !es_pages_sparse(n_bytes, &kv->pages)) {
        es_kv_free(kv);
        return es_fail(ES_ERR_MEMORY, "KV cache: no memory for %zu bytes", n_bytes);
    }
    int32_t n[2] = {0, 0};
    size_t at = 0;
    for (size_t i = 0; i < layers; i++) {
        kv->windowed[i] = shape->windowed != NULL && shape->windowed[i] != 0;
        kv->layer_at[i] = at;
        at += class_of(shape, kv->windowed[i]).head_bytes * (size_t)shape->kv_heads;
        n[kv->windowed[i]]++;
    }
    kv->shape.windowed = kv->windowed;
    for (int i = 0; i < 2 && status == ES_OK; i++) {
        if (n[i] > 0) {
            layer_class *c = &kv->classes[i];
            *c = class_of(shape, i);
            status = es_ring_new(c->n_slots, c->wraps ? c->sinks : 0, c->wraps ? c->window : 0,
                                 &c->ring);
        }
    }
    if (status != ES_OK) {
        es_kv_free(kv);
        return status;
    }
    *out = kv;
    return ES_OK;
}

void es_kv_free(es_kv *kv)
{
    if (kv == NULL) {
        return;
    }
    es_ring_free(kv->classes[FULL].ring);
    es_ring_free(kv->classes[WINDOWED].ring);
    es_pages_free(&kv->pages);
    es_free(kv->layer_at);
    es_free(kv->windowed);
    es_free(kv->depth);
    es_free(kv->slot);
    es_free(kv);
}

/* ---- rows -------------------------------------------------------------------------------- */

int64_t es_kv_length(const es_kv *kv)
{
    const es_ring *full = kv->classes[FULL].ring;
    return es_ring_length(full != NULL ? full : kv->classes[WINDOWED].ring);
}

void es_kv_rollback(es_kv *kv)
{
    for (int i = 0; i < 2 && kv->n_open > 0; i++) {
        if (kv->classes[i].ring != NULL) {
            es_ring_rollback(kv->classes[i].ring);
        }
    }
    kv->n_open = 0;
}

/* Rows in topological order, each seeing itself and what its parent sees. */
static es_status check_tree(const int32_t *depth, const uint64_t *mask, int32_t n)
{
    if (n > ES_MAX_ROWS) {
        return es_fail(ES_ERR_ARGUMENT, "KV cache: a tree has at most %d rows, got %d",
                       (int)ES_MAX_ROWS, (int)n);
    }
    for (int32_t i = 0; i < n; i++) {
        uint64_t self = UINT64_C(1) << i;
        uint64_t above = mask[i] ^ self;
        int32_t parent = -1;
        for (int32_t j = 0; j < i; j++) {
            parent = above >> j & 1 ? j : parent;
        }
        bool is_root = parent < 0 && above == 0 && depth[i] == 0;
        bool is_child = parent >= 0 && above == mask[parent] && depth[i] == depth[parent] + 1;
        if (!is_root && !is_child) {
            return es_fail(ES_ERR_ARGUMENT,
                           "KV cache: row %d of depth %d has mask %llx, not that of a parent and "
                           "itself", (int)i, (int)depth[i], (unsigned long long)mask[i]);
        }
    }
    return ES_OK;
}

static bool is_chain(const uint64_t *mask, int32_t n)
{
    return mask == NULL || mask[n - 1] == UINT64_MAX >> (ES_MAX_ROWS - n);
}

es_status es_kv_append(es_kv *kv, const int32_t *depth, const uint64_t *mask, int32_t n)
{
    es_kv_rollback(kv);
    if (n < 1 || n > kv->shape.batch) {
        return es_fail(ES_ERR_ARGUMENT, "KV cache: expected 1..%d rows to append, got %d",
                       (int)kv->shape.batch, (int)n);
    }
    if (mask != NULL) {
        es_status status = check_tree(depth, mask, n);
        if (status != ES_OK) {
            return status;
        }
        memcpy(kv->mask, mask, (size_t)n * sizeof *mask);
    }
    kv->is_chain = is_chain(mask, n);
    for (int32_t i = 0; i < n; i++) {
        kv->depth[i] = mask != NULL ? depth[i] : i;
    }
    /* Only a full ring can be too small for a batch, and it is asked first. */
    for (int i = 0; i < 2; i++) {
        es_ring *ring = kv->classes[i].ring;
        es_status status = ring != NULL ? es_ring_append(ring, kv->depth, n, kv->slot) : ES_OK;
        if (status != ES_OK) {
            return status;
        }
    }
    kv->n_open = n;
    return ES_OK;
}

es_status es_kv_extend(es_kv *kv, const int32_t *parent, int32_t n)
{
    int32_t open = kv->n_open;
    int32_t most = least(kv->shape.batch, ES_MAX_ROWS);
    if (n < 1 || n > most - open) {
        return es_fail(ES_ERR_ARGUMENT, "KV cache: expected 1..%d rows behind %d open ones, got %d",
                       (int)most - open, (int)open, (int)n);
    }
    for (int32_t i = 0; i < open && kv->is_chain; i++) {
        kv->mask[i] = UINT64_MAX >> (ES_MAX_ROWS - 1 - i); /* a chain may have come without */
    }
    for (int32_t i = open; i < open + n; i++) {
        int32_t above = parent[i - open];
        if (above < -1 || above >= i) {
            return es_fail(ES_ERR_ARGUMENT, "KV cache: parent[%d]: expected -1..%d, got %d",
                           (int)(i - open), (int)i - 1, (int)above);
        }
        kv->mask[i] = (above < 0 ? 0 : kv->mask[above]) | UINT64_C(1) << i;
        kv->depth[i] = above < 0 ? 0 : kv->depth[above] + 1;
    }
    es_ring *const ring[2] = {kv->classes[FULL].ring, kv->classes[WINDOWED].ring};
    for (int i = 0; i < 2; i++) {
        es_status status = ring[i] != NULL ? es_ring_extend(ring[i], kv->depth + open, n) : ES_OK;
        if (status != ES_OK) {
            return status; /* as in es_kv_append, only the first asked can refuse */
        }
    }
    kv->n_open = open + n;
    kv->is_chain = is_chain(kv->mask, kv->n_open);
    return ES_OK;
}

/* Memory of one KV head of one layer. */
typedef struct head_memory {
    uint8_t *keys, *values;
    float *key_scale, *value_scale; /* NULL for fp16 */
} head_memory;

static head_memory memory_of(const es_kv *kv, int32_t layer, int32_t kv_head)
{
    const layer_class *c = &kv->classes[kv->windowed[layer]];
    uint8_t *at = kv->pages.data + kv->layer_at[layer] + (size_t)kv_head * c->head_bytes;
    head_memory m = {at, at + c->keys_bytes, NULL, NULL};
    if (c->scale_bytes > 0) {
        m.key_scale = (float *)(void *)(at + 2 * c->keys_bytes);
        m.value_scale = (float *)(void *)(at + 2 * c->keys_bytes + c->scale_bytes);
    }
    return m;
}

void es_kv_store(es_kv *kv, const es_kernels *kernels, int32_t layer, int32_t kv_head, int32_t row,
                 const float *key, const float *value)
{
    const es_ring *ring = kv->classes[kv->windowed[layer]].ring;
    int32_t slot = es_ring_slot(ring, es_ring_length(ring) + row);
    head_memory m = memory_of(kv, layer, kv_head);
    es_kv_format format = kv->shape.format;
    int32_t dim = kv->shape.head_dim;
    kernels->kv_store_key(format, m.keys, m.key_scale, dim, slot, key);
    kernels->kv_store_value(format, m.values, m.value_scale, dim, slot, value);
}

static void move_row(const head_memory *m, size_t dim, size_t bytes, size_t from, size_t to)
{
    memcpy(m->values + to * dim * bytes, m->values + from * dim * bytes, dim * bytes);
    const uint8_t *source = m->keys + (from / 16 * dim * 16 + from % 16) * bytes;
    uint8_t *target = m->keys + (to / 16 * dim * 16 + to % 16) * bytes;
    for (size_t i = 0; i < dim; i++, source += 16 * bytes, target += 16 * bytes) {
        target[0] = source[0];
        if (bytes == 2) {
            target[1] = source[1];
        }
    }
    if (m->key_scale != NULL) {
        m->key_scale[to] = m->key_scale[from];
        m->value_scale[to] = m->value_scale[from];
    }
}

static void move_rows(es_kv *kv, int is_windowed, const int32_t *from, const int32_t *to, int32_t n)
{
    for (int32_t layer = 0; layer < kv->shape.layers && n > 0; layer++) {
        if (kv->windowed[layer] != is_windowed) {
            continue;
        }
        for (int32_t head = 0; head < kv->shape.kv_heads; head++) {
            head_memory m = memory_of(kv, layer, head);
            for (int32_t i = 0; i < n; i++) {
                move_row(&m, (size_t)kv->shape.head_dim, value_bytes(&kv->shape), (size_t)from[i],
                         (size_t)to[i]);
            }
        }
    }
}

es_status es_kv_commit(es_kv *kv, const int32_t *path, int32_t n_path)
{
    if (kv->n_open == 0) {
        return es_fail(ES_ERR_STATE, "KV cache: commit without open rows");
    }
    if (n_path > kv->n_open) {
        return es_fail(ES_ERR_ARGUMENT, "KV cache: %d rows are open, got a path of %d",
                       (int)kv->n_open, (int)n_path);
    }
    int32_t *from = kv->slot + kv->shape.batch, *to = from + kv->shape.batch;
    for (int i = 0; i < 2; i++) {
        if (kv->classes[i].ring != NULL) {
            int32_t n;
            es_status status = es_ring_commit(kv->classes[i].ring, path, n_path, from, to, &n);
            if (status != ES_OK) {
                return status;
            }
            move_rows(kv, i, from, to, n);
        }
    }
    kv->n_open = 0;
    return ES_OK;
}

es_status es_kv_truncate(es_kv *kv, int64_t length)
{
    es_kv_rollback(kv);
    /* Only a windowed ring can refuse, so it is asked first. */
    for (int i = WINDOWED; i >= FULL; i--) {
        if (kv->classes[i].ring != NULL) {
            es_status status = es_ring_truncate(kv->classes[i].ring, length);
            if (status != ES_OK) {
                return status;
            }
        }
    }
    return ES_OK;
}

/* ---- attention --------------------------------------------------------------------------- */

/* Vectors that pass together when each has this many columns. */
static int32_t vectors_for(int64_t columns)
{
    int64_t n = SCORES / columns;
    n = n > LEAST_VECTORS ? n : LEAST_VECTORS;
    return least(n, MOST_VECTORS);
}

/* Columns of a row of scores, rounded up so that rows begin alike. */
static int64_t columns_for(int64_t n)
{
    return (n + 15) / 16 * 16;
}

size_t es_kv_scratch(const es_kv_shape *shape, int32_t heads)
{
    int32_t windowed = count_windowed(shape);
    int64_t full = windowed < shape->layers ? class_of(shape, 0).n_slots : 0;
    int64_t ring = windowed > 0 ? class_of(shape, 1).n_slots : 0;
    int64_t group = least(heads / shape->kv_heads, MOST_VECTORS);
    int64_t most = columns_for(full > ring ? full : ring) *
                   (group > LEAST_VECTORS ? group : LEAST_VECTORS);
    return (size_t)(most > SCORES ? most : SCORES);
}

/* Some rows and heads on their way over one head's keys and values. Columns of the scores: the
   sinks, then the committed positions that any of the rows sees, then open rows. */
typedef struct pass {
    const es_kv *kv;
    const es_attention *attention;
    const layer_class *class;
    head_memory memory;
    int32_t n_heads, n_vectors;           /* vector of row r, head h: r * n_heads + h */
    const float *q[MOST_VECTORS];
    float *out[MOST_VECTORS];
    float *score;
    size_t ld;
    int32_t sinks;                        /* of which the scores begin with columns [0, sinks) */
    int64_t first, end;                   /* positions [first, end) are the columns behind them */
    int32_t n_open;                       /* open rows behind these; row i at index end + i */
} pass;

/* What one row of a pass sees. */
typedef struct sight {
    int64_t from;      /* positions [from, end), besides the sinks */
    uint64_t open;     /* bit i: open row i of the pass */
} sight;

/* Slots that follow each other from the one of `index` on, at most `count`. */
static int32_t run_of(const layer_class *c, int64_t index, int64_t count, int32_t *slot)
{
    *slot = es_ring_slot(c->ring, index);
    return least(count, c->n_slots - *slot);
}

/* Scores of all vectors at indices [from, to) into columns from `column` on. */
static void score(const pass *p, int64_t from, int64_t to, int64_t column)
{
    for (int32_t n, slot; from < to; from += n, column += n) {
        n = run_of(p->class, from, to - from, &slot);
        p->attention->kernels->attn_scores(p->kv->shape.format, p->memory.keys, p->memory.key_scale,
                                           p->kv->shape.head_dim, slot, n, p->q, p->n_vectors,
                                           p->score + column, p->ld);
    }
}

/* Adds the values at indices [from, to), weights from `column` on, to m vectors from `vector`. */
static void mix(const pass *p, int64_t from, int64_t to, int64_t column, int32_t vector, int32_t m)
{
    const float *weight = p->score + (size_t)vector * p->ld;
    for (int32_t n, slot; from < to; from += n, column += n) {
        n = run_of(p->class, from, to - from, &slot);
        p->attention->kernels->attn_mix(p->kv->shape.format, p->memory.values,
                                        p->memory.value_scale, p->kv->shape.head_dim, slot, n,
                                        weight + column, p->ld, m, p->out + vector);
    }
}

/* Brings the scores of one vector into logical order without gaps, in place: the sinks move up to
   the first position seen, the open rows that are seen close ranks. Returns how many there are. */
static int32_t compress(const pass *p, const sight *s, float *row)
{
    int64_t gap = s->from - p->first;
    if (gap > 0) {
        memmove(row + gap, row, (size_t)p->sinks * sizeof *row);
    }
    float *open = row + p->sinks + (p->end - p->first);
    int32_t n = 0;
    for (uint64_t left = s->open; left != 0; left &= left - 1) {
        open[n++] = open[__builtin_ctzll(left)];
    }
    return (int32_t)(p->sinks + (p->end - s->from) + n);
}

/* Values of the open rows that vectors [vector, vector + n_heads) see, run by run. */
static void mix_open(const pass *p, const sight *s, int32_t vector)
{
    int64_t column = p->sinks + (p->end - p->first);
    for (uint64_t left = s->open; left != 0;) {
        uint64_t lowest = left & -left;
        uint64_t behind = left + lowest; /* the run carries into the bit behind it */
        int32_t begin = __builtin_ctzll(left);
        int32_t end = behind != 0 ? __builtin_ctzll(behind) : 64;
        mix(p, p->end + begin, p->end + end, column, vector, p->n_heads);
        column += end - begin;
        left &= behind;
    }
}

static void run_pass(const pass *p, const sight *sights, int32_t rows, int32_t head)
{
    const es_kernels *k = p->attention->kernels;
    const float *sink = p->attention->sinks;
    int64_t behind = p->sinks + (p->end - p->first);
    score(p, 0, p->sinks, 0);
    score(p, p->first, p->end, p->sinks);
    score(p, p->end, p->end + p->n_open, behind);

    float total[MOST_VECTORS];
    int64_t common = p->first; /* from here on every row sees the committed positions */
    for (int32_t r = 0; r < rows; r++) {
        const sight *s = &sights[r];
        common = s->from > common ? s->from : common;
        for (int32_t h = 0; h < p->n_heads; h++) {
            int32_t v = r * p->n_heads + h;
            float *row = p->score + (size_t)v * p->ld;
            int32_t n = compress(p, s, row);
            total[v] = k->attn_softmax(row + (s->from - p->first), n, p->attention->softcap,
                                       sink != NULL, sink != NULL ? sink[head + h] : 0.0f);
            memset(p->out[v], 0, (size_t)p->kv->shape.head_dim * sizeof *p->out[v]);
        }
    }
    for (int32_t r = 0; r < rows && (common > p->first || r == 0); r++) {
        bool is_shared = common == p->first;
        int32_t m = is_shared ? p->n_vectors : p->n_heads;
        int64_t gap = sights[r].from - p->first;
        mix(p, 0, p->sinks, gap, r * p->n_heads, m);
        mix(p, sights[r].from, common, p->sinks + gap, r * p->n_heads, m);
    }
    mix(p, common, p->end, p->sinks + (common - p->first), 0, p->n_vectors);
    for (int32_t r = 0; r < rows; r++) {
        mix_open(p, &sights[r], r * p->n_heads);
    }
    for (int32_t v = 0; v < p->n_vectors; v++) {
        k->scale(p->out[v], p->out[v], 1.0f / total[v], p->kv->shape.head_dim);
    }
}

/* What open row `row` sees when positions below `end` count as committed and open rows from `base`
   on follow. */
static sight sight_of(const es_kv *kv, const layer_class *c, int32_t row, int32_t base, int64_t end)
{
    int64_t length = es_kv_length(kv);
    int64_t position = length + kv->depth[row];
    sight s = {0, kv->is_chain ? (UINT64_C(2) << (row - base)) - 1 : kv->mask[row]};
    if (c->window > 0) {
        int64_t from = position - c->window + 1;
        for (int32_t i = 0; base + i <= row; i++) {
            int64_t at = length + kv->depth[base + i];
            if (at < from && at >= c->sinks) {
                s.open &= ~(UINT64_C(1) << i);
            }
        }
        from = from > c->sinks ? from : c->sinks;
        s.from = from < end ? from : end;
    }
    return s;
}

void es_kv_attend(const es_kv *kv, const es_attention *attention, int32_t layer, int32_t head,
                  int32_t n_heads, int32_t row0, int32_t n, const float *q, size_t q_stride,
                  float *out, size_t out_stride, float *scratch)
{
    const layer_class *c = &kv->classes[kv->windowed[layer]];
    size_t dim = (size_t)kv->shape.head_dim;
    int32_t kv_head = head / (attention->heads / kv->shape.kv_heads);
    int64_t length = es_kv_length(kv);
    pass p = {.kv = kv, .attention = attention, .class = c,
              .memory = memory_of(kv, layer, kv_head), .score = scratch};
    for (int32_t h0 = 0; h0 < n_heads; h0 += p.n_heads) {
        p.n_heads = least(n_heads - h0, MOST_VECTORS);
        for (int32_t r0 = 0, rows; r0 < n; r0 += rows) {
            /* No pass has more columns than the class has slots, nor than there are rows. */
            int64_t columns = columns_for(least(c->n_slots, length + row0 + n));
            rows = least(n - r0, vectors_for(columns) / p.n_heads);
            rows = rows > 0 ? rows : 1;
            /* In a chain the open rows before ours are as visible as committed ones. */
            int32_t base = kv->is_chain ? row0 + r0 : 0;
            sight sights[MOST_VECTORS];
            p.end = length + base;
            p.n_open = row0 + r0 + rows - base;
            p.first = p.end;
            for (int32_t r = 0; r < rows; r++) {
                sights[r] = sight_of(kv, c, row0 + r0 + r, base, p.end);
                p.first = sights[r].from < p.first ? sights[r].from : p.first;
            }
            p.sinks = least(c->sinks, p.end);
            p.ld = (size_t)columns;
            p.n_vectors = rows * p.n_heads;
            for (int32_t v = 0; v < p.n_vectors; v++) {
                size_t r = (size_t)(r0 + v / p.n_heads), h = (size_t)(h0 + v % p.n_heads);
                p.q[v] = q + r * q_stride + h * dim;
                p.out[v] = out + r * out_stride + h * dim;
            }
            run_pass(&p, sights, rows, head + h0);
        }
    }
}
