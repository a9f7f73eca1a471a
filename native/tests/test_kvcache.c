/* The KV cache against one row at a time: whatever was appended, rejected, moved, wrapped or cut
   before, and however rows and heads are asked for, a row's attention has the bits it has over the
   list of what it sees, laid out plainly. */
#include "kvcache.h"

#include <math.h>
#include <string.h>

#include "alloc.h"
#include "check.h"
#include "kernels/generic.h"

enum { MOST_DIM = 256, MOST_HEADS = 6, MOST_LENGTH = 9000, LAYERS = 3 };

static uint64_t random_state = 88172645463325252u;

static int32_t random_below(int32_t n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((random_state >> 33) % (uint64_t)n);
}

/* Roughly normal, a function of its arguments. */
static float number(uint32_t a, uint32_t b, uint32_t c)
{
    uint64_t x = a * UINT64_C(0x9E3779B97F4A7C15) + b * UINT64_C(0xC2B2AE3D27D4EB4F) + c;
    float sum = 0.0f;
    for (int i = 0; i < 3; i++) {
        x ^= x >> 29;
        x *= UINT64_C(0xBF58476D1CE4E5B9);
        sum += (float)(int32_t)(x >> 32 & 0xFFFF) - 32767.5f;
    }
    return sum * 0x1p-15f;
}

/* Key, value or query of a token at a position; head counts layers too. */
enum { KEY = 1, VALUE = 2, QUERY = 3 };

static void vector_of(int what, int32_t token, int64_t position, int32_t layer, int32_t head,
                      int32_t dim, float *out)
{
    uint32_t seed = (uint32_t)(token * 64 + layer * 16 + head) * 4 + (uint32_t)what;
    for (int32_t i = 0; i < dim; i++) {
        out[i] = number(seed, (uint32_t)position, (uint32_t)i);
        if (what == QUERY) {
            out[i] *= 0.3f;
        }
    }
}

/* A cache, and the tokens it must behave like. */
typedef struct world {
    es_kv_shape shape;
    es_kv *kv;
    es_attention attention;
    float *scratch;
    int32_t truth[MOST_LENGTH];
    int32_t length;
    int32_t n_open, token[1024], depth[1024];
    uint64_t mask[ES_MAX_ROWS];
    bool has_mask;
    int32_t next_token;
} world;

static const uint8_t middle_windowed[LAYERS] = {0, 1, 0};
static const uint8_t all_windowed[LAYERS] = {1, 1, 1};
static const float sink_logits[MOST_HEADS] = {0.5f, -2.0f, 1.5f, 0.0f, 4.0f, -1.0f};

static void open_world(world *w, es_kv_shape shape, const es_kernels *kernels, int32_t heads)
{
    *w = (world){.shape = shape};
    w->attention = (es_attention){.kernels = kernels, .heads = heads};
    CHECK(es_kv_new(&shape, &w->kv) == ES_OK);
    CHECK(es_kv_bytes(&shape) > 0);
    /* Exactly what is asked for, so that a sanitizer sees the first float too many. */
    w->scratch = malloc(es_kv_scratch(&shape, heads) * sizeof(float));
    CHECK(w->scratch != NULL);
}

static void close_world(world *w)
{
    es_kv_free(w->kv);
    free(w->scratch);
}

static void store_rows(world *w)
{
    float key[MOST_DIM], value[MOST_DIM];
    for (int32_t layer = 0; layer < w->shape.layers; layer++) {
        for (int32_t head = 0; head < w->shape.kv_heads; head++) {
            for (int32_t r = 0; r < w->n_open; r++) {
                int64_t position = w->length + w->depth[r];
                vector_of(KEY, w->token[r], position, layer, head, w->shape.head_dim, key);
                vector_of(VALUE, w->token[r], position, layer, head, w->shape.head_dim, value);
                es_kv_store(w->kv, w->attention.kernels, layer, head, r, key, value);
            }
        }
    }
}

/* n rows: parent[i] < i, or NULL for a chain without a mask. */
static es_status append_rows(world *w, const int32_t *parent, int32_t n)
{
    w->has_mask = parent != NULL;
    for (int32_t i = 0; i < n; i++) {
        w->token[i] = w->next_token++;
        if (parent == NULL) {
            w->depth[i] = i;
        } else {
            w->depth[i] = i == 0 ? 0 : w->depth[parent[i]] + 1;
            w->mask[i] = (i == 0 ? 0 : w->mask[parent[i]]) | UINT64_C(1) << i;
        }
    }
    es_status status = es_kv_append(w->kv, w->depth, w->has_mask ? w->mask : NULL, n);
    w->n_open = status == ES_OK ? n : 0;
    if (status == ES_OK) {
        store_rows(w);
    }
    return status;
}

/* n rows more behind the open ones. */
static es_status extend_rows(world *w, const int32_t *parent, int32_t n)
{
    es_status status = es_kv_extend(w->kv, parent, n);
    for (int32_t i = 0; i < w->n_open && status == ES_OK && !w->has_mask; i++) {
        w->mask[i] = UINT64_MAX >> (63 - i);
    }
    for (int32_t i = 0; i < n && status == ES_OK; i++) {
        int32_t row = w->n_open++;
        w->has_mask = true;
        w->token[row] = w->next_token++;
        w->depth[row] = parent[i] < 0 ? 0 : w->depth[parent[i]] + 1;
        w->mask[row] = (parent[i] < 0 ? 0 : w->mask[parent[i]]) | UINT64_C(1) << row;
    }
    if (status == ES_OK) {
        store_rows(w);
    }
    return status;
}

static bool is_ancestor(const world *w, int32_t row, int32_t of)
{
    return w->has_mask ? (w->mask[of] >> row & 1) != 0 : row <= of;
}

/* Attention of one row and head over what it sees by definition: slot i holds the i-th of these. */
static void expected(const world *w, int32_t layer, int32_t head, int32_t row, float *out)
{
    const es_kv_shape *s = &w->shape;
    int32_t dim = s->head_dim, kv_head = head / (w->attention.heads / s->kv_heads);
    bool is_windowed = s->windowed != NULL && s->windowed[layer];
    size_t slots = ((size_t)w->length + 64 + (size_t)row) / 16 * 16;
    uint16_t *keys = calloc(slots * (size_t)dim, sizeof *keys);
    uint16_t *values = calloc(slots * (size_t)dim, sizeof *values);
    float *scales = calloc(2 * slots, sizeof *scales);
    float *scores = calloc(slots, sizeof *scores);
    CHECK(keys != NULL && values != NULL && scales != NULL && scores != NULL);
    int64_t position = w->length + w->depth[row];
    int32_t n = 0;
    for (int32_t i = 0; i < w->length + w->n_open; i++) {
        bool is_open = i >= w->length;
        int32_t r = i - w->length;
        int64_t at = is_open ? w->length + w->depth[r] : i;
        if ((is_open && !is_ancestor(w, r, row)) ||
            (is_windowed && at >= s->sinks && at <= position - s->window)) {
            continue;
        }
        float x[MOST_DIM];
        int32_t token = is_open ? w->token[r] : w->truth[i];
        vector_of(KEY, token, at, layer, kv_head, dim, x);
        es_generic_kv_store_key(s->format, keys, scales, dim, n, x);
        vector_of(VALUE, token, at, layer, kv_head, dim, x);
        es_generic_kv_store_value(s->format, values, scales + slots, dim, n, x);
        n++;
    }
    float q[MOST_DIM];
    const float *one = q;
    vector_of(QUERY, w->token[row], position, layer, 8 + head, dim, q);
    es_generic_attn_scores(s->format, keys, scales, dim, 0, n, &one, 1, scores, slots);
    const float *sinks = w->attention.sinks;
    float sum = es_generic_attn_softmax(scores, n, w->attention.softcap, sinks != NULL,
                                        sinks != NULL ? sinks[head] : 0.0f);
    memset(out, 0, (size_t)dim * sizeof *out);
    es_generic_attn_mix(s->format, values, scales + slots, dim, 0, n, scores, slots, 1, &out);
    es_generic_scale(out, out, 1.0f / sum, dim);
    free(keys);
    free(values);
    free(scales);
    free(scores);
}

/* Asks for rows [row0, row0 + n) of heads [head, head + n_heads), checks every `step`-th row. */
static void check_rows(world *w, int32_t layer, int32_t head, int32_t n_heads, int32_t row0,
                       int32_t n, int32_t step)
{
    static float q[1024 * MOST_HEADS * MOST_DIM], out[1024 * MOST_HEADS * MOST_DIM];
    int32_t dim = w->shape.head_dim;
    size_t q_stride = (size_t)(n_heads * dim) + 5, out_stride = (size_t)(n_heads * dim) + 3;
    for (int32_t r = 0; r < n; r++) {
        for (int32_t h = 0; h < n_heads; h++) {
            vector_of(QUERY, w->token[row0 + r], w->length + w->depth[row0 + r], layer,
                      8 + head + h, dim, q + (size_t)r * q_stride + (size_t)(h * dim));
        }
        for (size_t i = 0; i < out_stride; i++) {
            out[(size_t)r * out_stride + i] = -7.0f;
        }
    }
    es_kv_attend(w->kv, &w->attention, layer, head, n_heads, row0, n, q, q_stride, out, out_stride,
                 w->scratch);
    for (int32_t r = 0; r < n; r++) {
        const float *row = out + (size_t)r * out_stride;
        for (int i = 0; i < 3; i++) {
            CHECK(row[n_heads * dim + i] == -7.0f);
        }
        if (r % step != 0) {
            continue;
        }
        for (int32_t h = 0; h < n_heads; h++) {
            float right[MOST_DIM];
            expected(w, layer, head + h, row0 + r, right);
            CHECK(memcmp(right, row + h * dim, (size_t)dim * sizeof *right) == 0);
        }
    }
}

/* Every layer; rows and heads cut at random. */
static void check_world(world *w, int32_t step)
{
    int32_t group = w->attention.heads / w->shape.kv_heads;
    for (int32_t layer = 0; layer < w->shape.layers; layer++) {
        for (int32_t head = 0, n_heads; head < w->attention.heads; head += n_heads) {
            n_heads = 1 + random_below(group - head % group);
            for (int32_t row = 0, n; row < w->n_open; row += n) {
                n = 1 + random_below(random_below(3) == 0 ? 3 : w->n_open - row);
                n = n < w->n_open - row ? n : w->n_open - row;
                check_rows(w, layer, head, n_heads, row, n, step);
            }
        }
    }
}

static void commit_rows(world *w, const int32_t *path, int32_t n)
{
    CHECK(es_kv_commit(w->kv, path, n) == ES_OK);
    for (int32_t i = 0; i < n; i++) {
        w->truth[w->length++] = w->token[path[i]];
    }
    w->n_open = 0;
    CHECK(es_kv_length(w->kv) == w->length);
}

static void commit_chain(world *w, int32_t n)
{
    int32_t path[1024];
    for (int32_t i = 0; i < n; i++) {
        path[i] = i;
    }
    commit_rows(w, path, n);
}

/* Parents of a random tree: chains, bushes and what lies between. */
static void random_parents(int32_t n, int32_t *parent)
{
    int32_t reach = 1 + random_below(n < 8 ? n : 8);
    parent[0] = -1;
    for (int32_t i = 1; i < n; i++) {
        parent[i] = i - 1 - random_below(reach < i ? reach : i);
    }
}

/* Path from the root down to a random row. */
static int32_t random_path(const world *w, int32_t *path)
{
    int32_t last = random_below(w->n_open), n = 0;
    for (int32_t i = 0; i <= last; i++) {
        if (is_ancestor(w, i, last)) {
            path[n++] = i;
        }
    }
    return n;
}

/* ---- tests ------------------------------------------------------------------------------- */

static es_kv_shape shape_of(int32_t dim, const uint8_t *windowed, es_kv_format format)
{
    return (es_kv_shape){.layers = LAYERS, .kv_heads = 2, .head_dim = dim, .windowed = windowed,
                         .context = 230, .window = 19, .sinks = 3, .batch = 80, .format = format};
}

/* Random rounds of everything, on every variant. */
static void random_rounds(world *w, int32_t rounds, int32_t most_length, int32_t step)
{
    int32_t parent[ES_MAX_ROWS], path[1024];
    for (int32_t i = 0; i < rounds; i++) {
        int32_t kind = random_below(8);
        if (kind == 0 && w->length > 0) {
            int32_t length = w->length - random_below(w->length < 40 ? w->length + 1 : 40);
            es_status status = es_kv_truncate(w->kv, length);
            CHECK(status == ES_OK || (status == ES_ERR_CONTEXT && w->shape.windowed != NULL));
            w->length = status == ES_OK ? length : w->length;
            w->n_open = 0;
            CHECK(es_kv_length(w->kv) == w->length);
            continue;
        }
        bool is_prefill = kind == 1;
        int32_t n = 1 + random_below(is_prefill ? w->shape.batch : ES_MAX_ROWS);
        if (kind > 4) {
            n = 1 + random_below(6);
        }
        if (w->length + n > most_length) {
            CHECK(es_kv_truncate(w->kv, 0) == ES_OK);
            w->length = 0;
        }
        random_parents(is_prefill ? 1 : n, parent);
        CHECK(append_rows(w, is_prefill ? NULL : parent, n) == ES_OK);
        check_world(w, 1 + n / step);
        if (kind == 2) {
            es_kv_rollback(w->kv);
            es_kv_rollback(w->kv);
            w->n_open = 0;
        } else if (kind != 3) { /* 3: the next append drops the open rows */
            commit_rows(w, path, random_path(w, path));
        }
        CHECK(es_kv_length(w->kv) == w->length);
    }
}

static void test_random_rounds(void)
{
    static const struct {
        int32_t dim, heads;
        const uint8_t *windowed;
        float softcap;
        bool has_sinks;
    } cases[] = {
        {32, 2, NULL, 0.0f, false},           {64, 6, middle_windowed, 0.0f, false},
        {64, 4, all_windowed, 0.0f, true},    {80, 6, middle_windowed, 20.0f, false},
        {96, 2, middle_windowed, 0.0f, true}, {256, 4, all_windowed, 50.0f, true},
        {40, 6, NULL, 30.0f, true},           {128, 6, middle_windowed, 0.0f, false},
    };
    for (int32_t v = 0; es_kernels_at(v) != NULL; v++) {
        const es_kernels *kernels;
        if (es_kernels_choose(es_kernels_at(v)->name, &kernels) != ES_OK) {
            continue; /* not of this processor */
        }
        for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
            for (int format = 0; format < 2; format++) {
                world w;
                open_world(&w, shape_of(cases[c].dim, cases[c].windowed, (es_kv_format)format),
                           kernels, cases[c].heads);
                w.attention.softcap = cases[c].softcap;
                w.attention.sinks = cases[c].has_sinks ? sink_logits : NULL;
                random_rounds(&w, 12, cases[c].windowed == all_windowed ? 600 : 230, 3);
                close_world(&w);
            }
        }
    }
}

static const es_kernels *best(void)
{
    const es_kernels *kernels;
    CHECK(es_kernels_choose(NULL, &kernels) == ES_OK);
    return kernels;
}

static es_kv_shape small_shape(int32_t window, int32_t sinks)
{
    return (es_kv_shape){.layers = 1, .kv_heads = 1, .head_dim = 16, .windowed = all_windowed,
                         .context = 4096, .window = window, .sinks = sinks, .batch = 64};
}

/* A tree of every size at every offset of the ring, over several wraps; then all of it rejected,
   half of it kept, and the next row sees only what was. */
static void test_c02_every_offset_and_size(void)
{
    static const int32_t sizes[] = {1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 32, 33, 48, 63, 64};
    int32_t parent[ES_MAX_ROWS], path[ES_MAX_ROWS];
    for (int32_t window = 1; window <= 17; window += 8) {
        for (int32_t sinks = 0; sinks <= 5; sinks += 5) {
            world w;
            open_world(&w, small_shape(window, sinks), best(), 1);
            /* 96 steps of one position pass all slots of the ring at least once. */
            for (int32_t offset = 0; offset < 96; offset++) {
                int32_t n = sizes[offset % 18];
                random_parents(n, parent);
                CHECK(append_rows(&w, parent, n) == ES_OK);
                check_rows(&w, 0, 0, 1, 0, n, 1 + n / 5);
                if (offset % 3 == 0) {
                    es_kv_rollback(w.kv);
                } else {
                    int32_t kept = random_path(&w, path);
                    commit_rows(&w, path, offset % 3 == 1 ? kept : (kept + 1) / 2);
                }
                CHECK(append_rows(&w, NULL, 1) == ES_OK);
                check_rows(&w, 0, 0, 1, 0, 1, 1);
                commit_chain(&w, 1);
            }
            CHECK(w.length > 2 * (window + sinks + 64));
            close_world(&w);
        }
    }
}

/* Nodes 0, 2, 5, 9 of 16 are kept: their keys and their values, each for itself. */
static void test_c05_scattered_path(void)
{
    static const int32_t parent[16] = {-1, 0, 0, 0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 9, 9};
    static const int32_t path[4] = {0, 2, 5, 9};
    for (int format = 0; format < 2; format++) {
        world w;
        open_world(&w, shape_of(32, middle_windowed, (es_kv_format)format), best(), 2);
        CHECK(append_rows(&w, NULL, 13) == ES_OK);
        commit_chain(&w, 13);
        CHECK(append_rows(&w, parent, 16) == ES_OK);
        commit_rows(&w, path, 4);
        CHECK(append_rows(&w, NULL, 1) == ES_OK);
        check_world(&w, 1); /* keys and values */
        /* A query of zeros weighs all positions alike: the mean of the values. */
        float zero[64] = {0.0f}, mean[64];
        for (int32_t layer = 0; layer < LAYERS; layer += 2) {
            es_kv_attend(w.kv, &w.attention, layer, 0, 1, 0, 1, zero, 64, mean, 64, w.scratch);
            for (int32_t i = 0; i < 32; i++) {
                double sum = 0.0;
                for (int32_t p = 0; p <= w.length; p++) {
                    float value[MOST_DIM];
                    vector_of(VALUE, p < w.length ? w.truth[p] : w.token[0], p, layer, 0, 32,
                              value);
                    sum += (double)value[i];
                }
                CHECK(fabs(sum / (w.length + 1) - (double)mean[i]) < 0.02);
            }
        }
        close_world(&w);
    }
}

/* Levels behind committed rows, behind chains and behind trees; then a commit, or none of it. */
static void test_levels(void)
{
    static const uint8_t *const windowed[3] = {NULL, middle_windowed, all_windowed};
    int32_t parent[ES_MAX_ROWS], path[ES_MAX_ROWS];
    for (int32_t c = 0; c < 6; c++) {
        world w;
        open_world(&w, shape_of(c < 3 ? 32 : 80, windowed[c % 3], (es_kv_format)(c % 2)), best(), 4);
        for (int32_t round = 0; round < 6; round++) {
            if (w.length > 90) {
                CHECK(es_kv_truncate(w.kv, 0) == ES_OK);
                w.length = 0;
            }
            CHECK(append_rows(&w, NULL, 1 + random_below(40)) == ES_OK);
            commit_chain(&w, w.n_open);
            if (round % 3 > 0) {
                random_parents(5, parent);
                CHECK(append_rows(&w, round % 3 == 1 ? NULL : parent, 5) == ES_OK);
            }
            while (w.n_open < ES_MAX_ROWS - 8) {
                int32_t n = 1 + random_below(8);
                for (int32_t i = 0; i < n; i++) {
                    parent[i] = random_below(w.n_open + i + 1) - 1;
                }
                if (random_below(3) == 0) { /* one more of a chain */
                    n = 1;
                    parent[0] = w.n_open - 1;
                }
                CHECK(extend_rows(&w, parent, n) == ES_OK);
                check_world(&w, 5);
            }
            parent[0] = w.n_open;
            CHECK(es_kv_extend(w.kv, parent, 1) == ES_ERR_ARGUMENT);
            parent[0] = -2;
            CHECK(es_kv_extend(w.kv, parent, 1) == ES_ERR_ARGUMENT);
            CHECK(es_kv_extend(w.kv, path, ES_MAX_ROWS - w.n_open + 1) == ES_ERR_ARGUMENT);
            CHECK(es_kv_extend(w.kv, path, 0) == ES_ERR_ARGUMENT);
            check_world(&w, 9);
            if (round % 2 == 0) {
                commit_rows(&w, path, random_path(&w, path));
            } else {
                es_kv_rollback(w.kv);
                w.n_open = 0;
            }
        }
        close_world(&w);
    }
    /* No slot is left: nothing changes. */
    world w;
    open_world(&w, shape_of(32, NULL, ES_KV_FORMAT_F16), best(), 2);
    for (int32_t i = 0; i < 3; i++) {
        CHECK(append_rows(&w, NULL, 76) == ES_OK);
        commit_chain(&w, 76);
    }
    static const int32_t roots[3] = {-1, -1, -1};
    CHECK(extend_rows(&w, roots, 3) == ES_ERR_CONTEXT);
    CHECK(extend_rows(&w, roots, 2) == ES_OK);
    check_world(&w, 1);
    CHECK(extend_rows(&w, roots, 1) == ES_ERR_CONTEXT);
    check_world(&w, 1);
    close_world(&w);
}

/* Trees of every size that the kernels carry differently. */
static void test_batch_sizes(void)
{
    static const int32_t sizes[] = {1,  2,  3,  4,  5,  6,  7,  8,  9, 10,
                                    11, 12, 13, 14, 15, 16, 24, 32, 64};
    int32_t parent[ES_MAX_ROWS];
    world w;
    open_world(&w, shape_of(64, middle_windowed, ES_KV_FORMAT_F16), best(), 6);
    CHECK(append_rows(&w, NULL, 77) == ES_OK);
    commit_chain(&w, 77);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        random_parents(sizes[i], parent);
        CHECK(append_rows(&w, parent, sizes[i]) == ES_OK);
        for (int32_t layer = 0; layer < 2; layer++) {
            check_rows(&w, layer, 0, 3, 0, sizes[i], 1);
            check_rows(&w, layer, 4, 1, 0, sizes[i], 3);
        }
    }
    close_world(&w);
}

/* Prefill in chunks of every size, a window shorter than some of them. */
static void test_chunks_of_every_size(void)
{
    enum { N = 150 };
    for (int32_t chunk = 1; chunk <= 80; chunk += chunk < 20 ? 1 : 7) {
        world w;
        es_kv_shape shape = shape_of(32, chunk % 2 ? middle_windowed : all_windowed,
                                     ES_KV_FORMAT_F16);
        open_world(&w, shape, best(), 2);
        for (int32_t done = 0, n; done < N; done += n) {
            n = N - done < chunk ? N - done : chunk;
            CHECK(append_rows(&w, NULL, n) == ES_OK);
            check_rows(&w, 1, 1, 1, 0, n, 5);
            check_rows(&w, 0, 0, 1, 0, n, 17);
            commit_chain(&w, n);
        }
        close_world(&w);
    }
}

/* Long rows of scores, where fewer vectors pass together, and more heads than pass together. */
static void test_many_columns_and_heads(void)
{
    world w;
    es_kv_shape shape = {.layers = 1, .kv_heads = 1, .head_dim = 16, .context = 9000,
                         .batch = 512};
    open_world(&w, shape, best(), 1);
    for (int32_t i = 0; i < 17; i++) {
        CHECK(append_rows(&w, NULL, 512) == ES_OK);
        commit_chain(&w, 512);
    }
    CHECK(append_rows(&w, NULL, 290) == ES_OK);
    check_rows(&w, 0, 0, 1, 0, 290, 59);
    close_world(&w);

    enum { HEADS = 40, DIM = 32 };
    static float q[9][HEADS * DIM], out[9][HEADS * DIM], one[9][DIM];
    shape.head_dim = DIM;
    shape.format = ES_KV_FORMAT_INT8;
    open_world(&w, shape, best(), HEADS);
    CHECK(append_rows(&w, NULL, 9) == ES_OK);
    for (int32_t r = 0; r < 9; r++) {
        for (int32_t h = 0; h < HEADS; h++) {
            vector_of(QUERY, w.token[r], r, 0, h, DIM, &q[r][h * DIM]);
        }
    }
    es_kv_attend(w.kv, &w.attention, 0, 0, HEADS, 0, 9, q[0], HEADS * DIM, out[0], HEADS * DIM,
                 w.scratch);
    for (int32_t h = 0; h < HEADS; h++) {
        es_kv_attend(w.kv, &w.attention, 0, h, 1, 0, 9, &q[0][h * DIM], HEADS * DIM, one[0], DIM,
                     w.scratch);
        for (int32_t r = 0; r < 9; r++) {
            CHECK(memcmp(one[r], &out[r][h * DIM], sizeof one[r]) == 0);
        }
    }
    close_world(&w);
}

/* Nothing of one conversation is left in another. */
static void test_two_caches_alternate(void)
{
    world a, b;
    open_world(&a, shape_of(32, all_windowed, ES_KV_FORMAT_F16), best(), 2);
    open_world(&b, shape_of(32, all_windowed, ES_KV_FORMAT_F16), best(), 2);
    b.next_token = 100000;
    for (int32_t i = 0; i < 4; i++) {
        random_rounds(&a, 5, 600, 3);
        random_rounds(&b, 5, 600, 3);
    }
    close_world(&a);
    close_world(&b);
}

/* A NaN in a row that is not seen stays unseen; in one that is seen it is not hidden. */
static void test_nan(void)
{
    static const int32_t parent[3] = {-1, 0, 0};
    world w;
    float bad[32], out[2][32];
    open_world(&w, shape_of(32, NULL, ES_KV_FORMAT_INT8), best(), 2);
    CHECK(append_rows(&w, parent, 3) == ES_OK);
    for (int32_t i = 0; i < 32; i++) {
        bad[i] = NAN;
    }
    es_kv_store(w.kv, w.attention.kernels, 0, 0, 1, bad, bad);
    check_rows(&w, 0, 0, 1, 2, 1, 1);
    float q[32] = {1.0f};
    es_kv_attend(w.kv, &w.attention, 0, 0, 1, 1, 1, q, 32, out[0], 32, w.scratch);
    for (int32_t i = 0; i < 32; i++) {
        CHECK(isnan(out[0][i]));
    }
    close_world(&w);
}

static void test_bad_arguments(void)
{
    es_kv *kv = NULL;
    es_kv_shape good = shape_of(32, middle_windowed, ES_KV_FORMAT_F16);
    es_kv_shape bad[10];
    for (int i = 0; i < 10; i++) {
        bad[i] = good;
    }
    bad[0].layers = 0;
    bad[1].kv_heads = 0;
    bad[2].head_dim = 1 << 20;
    bad[3].context = 0;
    bad[4].batch = 0;
    bad[5].window = 0;
    bad[6].sinks = -1;
    bad[7].format = (es_kv_format)7;
    bad[8].context = INT32_MAX;
    bad[9].batch = INT32_MAX;
    for (int i = 0; i < 10; i++) {
        CHECK(es_kv_new(&bad[i], &kv) == ES_ERR_ARGUMENT && kv == NULL);
    }
    /* Sizes that no number holds are no memory, not little memory. */
    es_kv_shape huge = {.layers = 1 << 16, .kv_heads = 1 << 16, .head_dim = 1 << 16,
                        .context = 1 << 30, .batch = 64};
    CHECK(es_kv_bytes(&huge) == SIZE_MAX);
    CHECK(es_kv_new(&huge, &kv) == ES_ERR_MEMORY && kv == NULL);
    es_kv_free(NULL);

    world w;
    open_world(&w, good, best(), 2);
    int32_t depth[3] = {0, 1, 1}, path[3] = {0, 1, 2};
    uint64_t mask[3] = {1, 3, 5};
    CHECK(es_kv_append(w.kv, NULL, NULL, 0) == ES_ERR_ARGUMENT);
    CHECK(es_kv_append(w.kv, NULL, NULL, 81) == ES_ERR_ARGUMENT);
    CHECK(es_kv_append(w.kv, depth, mask, 65) == ES_ERR_ARGUMENT);
    uint64_t no_self[3] = {1, 1, 5}, no_root[3] = {1, 3, 4}, later[3] = {1, 7, 5};
    CHECK(es_kv_append(w.kv, depth, no_self, 3) == ES_ERR_ARGUMENT);
    CHECK(es_kv_append(w.kv, depth, no_root, 3) == ES_ERR_ARGUMENT);
    CHECK(es_kv_append(w.kv, depth, later, 3) == ES_ERR_ARGUMENT);
    int32_t deep[3] = {0, 1, 2};
    CHECK(es_kv_append(w.kv, deep, mask, 3) == ES_ERR_ARGUMENT);
    CHECK(es_kv_commit(w.kv, path, 1) == ES_ERR_STATE);
    CHECK(es_kv_append(w.kv, depth, mask, 3) == ES_OK);
    CHECK(es_kv_commit(w.kv, path, 3) == ES_ERR_ARGUMENT); /* two of one depth */
    CHECK(es_kv_commit(w.kv, path, 4) == ES_ERR_ARGUMENT);
    CHECK(es_kv_commit(w.kv, path, -1) == ES_ERR_ARGUMENT);
    CHECK(es_kv_commit(w.kv, NULL, 0) == ES_OK && es_kv_length(w.kv) == 0);
    CHECK(es_kv_truncate(w.kv, 1) == ES_ERR_ARGUMENT);
    CHECK(es_kv_truncate(w.kv, -1) == ES_ERR_ARGUMENT);
    random_rounds(&w, 6, 230, 3); /* still of use */
    close_world(&w);
}

static void test_full_context(void)
{
    world w;
    open_world(&w, shape_of(32, middle_windowed, ES_KV_FORMAT_F16), best(), 2);
    for (int32_t i = 0; i < 2; i++) {
        CHECK(append_rows(&w, NULL, 80) == ES_OK);
        commit_chain(&w, 80);
    }
    CHECK(append_rows(&w, NULL, 71) == ES_ERR_CONTEXT);
    CHECK(es_kv_commit(w.kv, NULL, 0) == ES_ERR_STATE && es_kv_length(w.kv) == 160);
    CHECK(append_rows(&w, NULL, 70) == ES_OK);
    check_world(&w, 23);
    commit_chain(&w, 70);
    CHECK(append_rows(&w, NULL, 1) == ES_ERR_CONTEXT);
    /* The windowed layers keep 19 + 80 positions behind the sinks; the full ones lose nothing. */
    CHECK(es_kv_truncate(w.kv, 100) == ES_ERR_CONTEXT && es_kv_length(w.kv) == 230);
    CHECK(es_kv_truncate(w.kv, 229) == ES_OK);
    w.length = 229;
    CHECK(append_rows(&w, NULL, 1) == ES_OK);
    check_world(&w, 1);
    CHECK(es_kv_truncate(w.kv, 0) == ES_OK);
    close_world(&w);
}

/* A window that does not fit the context any better than everything: everything is kept. */
static void test_window_beyond_context(void)
{
    world w;
    es_kv_shape shape = shape_of(32, middle_windowed, ES_KV_FORMAT_F16);
    shape.window = 150;
    shape.sinks = 10;
    open_world(&w, shape, best(), 2);
    for (int32_t i = 0; i < 3; i++) {
        CHECK(append_rows(&w, NULL, 76) == ES_OK);
        check_world(&w, 31);
        commit_chain(&w, 76);
    }
    CHECK(es_kv_truncate(w.kv, 40) == ES_OK);
    w.length = 40;
    random_rounds(&w, 6, 230, 3);
    close_world(&w);

    es_kv_shape full = shape;
    full.windowed = NULL;
    CHECK(es_kv_bytes(&shape) == es_kv_bytes(&full));
    shape.window = 19;
    CHECK(es_kv_bytes(&shape) < es_kv_bytes(&full));
    full.format = ES_KV_FORMAT_INT8;
    CHECK(es_kv_bytes(&full) < es_kv_bytes(&shape));
}

static void test_no_memory(void)
{
    es_kv_shape shape = shape_of(32, middle_windowed, ES_KV_FORMAT_INT8);
    es_kv *kv = NULL;
    long left = 0;
    es_status status;
    do {
        es_test_alloc_left = left++;
        status = es_kv_new(&shape, &kv);
        CHECK(status == ES_OK || (status == ES_ERR_MEMORY && kv == NULL));
    } while (status != ES_OK);
    es_test_alloc_left = -1;
    CHECK(left > 8); /* the cache, four arrays, its pages, two rings of two */
    es_kv_free(kv);
}

int main(void)
{
    test_c02_every_offset_and_size();
    test_c05_scattered_path();
    test_levels();
    test_batch_sizes();
    test_chunks_of_every_size();
    test_many_columns_and_heads();
    test_two_caches_alternate();
    test_nan();
    test_bad_arguments();
    test_full_context();
    test_window_beyond_context();
    test_no_memory();
    test_random_rounds();
    return 0;
}
