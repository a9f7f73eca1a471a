/* Every variant this processor runs returns the bits of plain C: all operations, odd sizes, extreme
   inputs. Prints a hash of what plain C returned, the same on every kind of processor. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "gguf.h"
#include "kernels/generic.h"

static const es_kernels *fast[8]; /* variants of this processor but "generic" */
static int n_fast;

/* ---- inputs ------------------------------------------------------------------------------ */

static uint64_t random_state = 0x9E3779B97F4A7C15u;

static uint32_t random_u32(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static int32_t random_below(int32_t n)
{
    return (int32_t)(random_u32() % (uint32_t)n);
}

/* Roughly normal, from integers: no libm, so the same on every machine. */
static float random_float(void)
{
    int32_t sum = 0;
    for (int i = 0; i < 4; i++) {
        sum += (int32_t)(random_u32() >> 16) - 32768;
    }
    return (float)sum * 0x1p-15f;
}

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Exactly n bytes, so that a sanitizer sees the first one too many. */
static void *allocate(size_t n)
{
    void *memory = NULL;
    CHECK(posix_memalign(&memory, 64, n > 0 ? n : 1) == 0);
    memset(memory, 0xA5, n);
    return memory;
}

static float *floats(size_t n)
{
    return allocate(n * sizeof(float));
}

static float *copy_floats(const float *x, size_t n)
{
    float *out = floats(n);
    memcpy(out, x, n * sizeof(float));
    return out;
}

/* Values of one kind, so that a NaN does not hide everything else. */
enum { PLAIN, ZEROS, DENORMALS, TINY, HUGE_ONES, EXTREMES, WITH_NAN, WITH_INFINITY, N_KINDS };

static void fill(float *x, int32_t n, int kind)
{
    for (int32_t i = 0; i < n; i++) {
        float v = random_float();
        switch (kind) {
        case ZEROS:
            v = v < 0.0f ? -0.0f : 0.0f;
            break;
        case DENORMALS:
            v *= 0x1p-130f;
            break;
        case TINY:
            v *= 0x1p-119f; /* both sides of where quantisation gives up */
            break;
        case HUGE_ONES:
            v *= 0x1p125f;
            break;
        case EXTREMES:
            v = v < 0.0f ? -3.0f : 3.0f; /* every q is 127 or -127 */
            break;
        default:
            break;
        }
        x[i] = v;
    }
    if (kind == WITH_NAN) {
        x[random_below(n)] = NAN;
    } else if (kind == WITH_INFINITY) {
        x[random_below(n)] = random_u32() & 1 ? INFINITY : -INFINITY;
    }
}

/* ---- comparison -------------------------------------------------------------------------- */

static uint64_t hash = 14695981039346656037u;

static void hash_word(uint32_t word)
{
    hash = (hash ^ word) * 1099511628211u;
}

static uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value != value ? 0x7FC00000u : bits; /* a NaN is a NaN */
}

static void hash_floats(const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        hash_word(float_bits(x[i]));
    }
}

static void fail(const es_kernels *k, const char *what, size_t i, double expected, double got)
{
    fprintf(stderr, "%s: %s: at %zu: expected %.9g, got %.9g\n", k->name, what, i, expected, got);
    exit(1);
}

static void same_floats(const es_kernels *k, const char *what, const float *expected,
                        const float *got, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (float_bits(expected[i]) != float_bits(got[i])) {
            fail(k, what, i, (double)expected[i], (double)got[i]);
        }
    }
}

static void same_bytes(const es_kernels *k, const char *what, const void *expected,
                       const void *got, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const int8_t *a = expected;
        const int8_t *b = got;
        if (a[i] != b[i]) {
            fail(k, what, i, a[i], b[i]);
        }
    }
}

static void same_halves(const es_kernels *k, const char *what, const uint16_t *expected,
                        const uint16_t *got, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float a = es_half_to_float(expected[i]);
        float b = es_half_to_float(got[i]);
        if (float_bits(a) != float_bits(b)) {
            fail(k, what, i, (double)a, (double)b);
        }
    }
}

/* ---- linear layers ----------------------------------------------------------------------- */

typedef struct weight_type {
    int32_t type;
    const char *name;
    int32_t level_bytes; /* per group; of floats: per value */
    int32_t scale_bytes; /* per scale_every inputs; of floats: 0 */
    int32_t scale_every;
} weight_type;

static const weight_type weight_types[] = {
    {ES_GGML_Q4_0, "Q4_0", 256, 32, 32},      {ES_GGML_Q4_1, "Q4_1", 256, 64, 32},
    {ES_GGML_Q5_0, "Q5_0", 320, 32, 32},      {ES_GGML_Q5_1, "Q5_1", 320, 64, 32},
    {ES_GGML_Q8_0, "Q8_0", 512, 32, 32},      {ES_GGML_Q2_K, "Q2_K", 128, 320, 256},
    {ES_GGML_Q3_K, "Q3_K", 192, 288, 256},    {ES_GGML_Q4_K, "Q4_K", 256, 320, 256},
    {ES_GGML_Q5_K, "Q5_K", 320, 320, 256},    {ES_GGML_Q6_K, "Q6_K", 384, 288, 256},
    {ES_GGML_IQ4_NL, "IQ4_NL", 256, 32, 32},  {ES_GGML_MXFP4, "MXFP4", 256, 16, 32},
    {ES_GGML_F32, "F32", 4, 0, 1},            {ES_GGML_F16, "F16", 2, 0, 1},
    {ES_GGML_BF16, "BF16", 2, 0, 1},
};

enum { N_TYPES = (int)(sizeof weight_types / sizeof weight_types[0]) };

static int is_float(const weight_type *type)
{
    return type->scale_bytes == 0;
}

static size_t tile_bytes(const weight_type *type, int32_t cols)
{
    size_t n = is_float(type) ? (size_t)(16 * type->level_bytes * cols)
                              : (size_t)(type->level_bytes * (cols / 32)) +
                                    (size_t)(type->scale_bytes * (cols / type->scale_every));
    return (n + 63) / 64 * 64;
}

/* A scale as fp16: of ordinary size, now and then zero, denormal or the largest. */
static uint16_t random_half_scale(void)
{
    static const float odd[] = {0.0f, -0.0f, 0x1p-24f, -0x1.8p-17f, 65504.0f};
    return es_float_to_half(random_below(24) == 0 ? odd[random_below(5)] : random_float() * 0.1f);
}

enum { LEVELS_RANDOM, LEVELS_LOWEST, LEVELS_HIGHEST, N_LEVELS };

/* Tiles of random weights; random bytes are valid levels and sub-scales. */
static es_tensor random_tensor(const weight_type *type, int32_t rows, int32_t cols, int levels)
{
    es_tensor w = {.type = type->type, .rows = rows, .cols = cols};
    w.tile_bytes = tile_bytes(type, cols);
    size_t total = w.tile_bytes * (size_t)es_tiles(rows);
    uint8_t *data = allocate(total);
    w.data = data;
    if (is_float(type)) {
        for (size_t i = 0; i < total / (size_t)type->level_bytes; i++) {
            float v = levels == LEVELS_RANDOM ? random_float() : random_float() * 0x1p-133f;
            uint16_t half = es_float_to_half(v);
            if (type->type == ES_GGML_BF16) {
                half = (uint16_t)(float_bits(v) >> 16);
            }
            memcpy(data + i * (size_t)type->level_bytes,
                   type->type == ES_GGML_F32 ? (void *)&v : (void *)&half,
                   (size_t)type->level_bytes);
        }
        return w;
    }
    for (int32_t t = 0; t < es_tiles(rows); t++) {
        uint8_t *tile = data + w.tile_bytes * (size_t)t;
        size_t at = (size_t)(type->level_bytes * (cols / 32));
        for (size_t i = 0; i < at; i++) {
            tile[i] = levels == LEVELS_RANDOM   ? (uint8_t)random_u32()
                      : levels == LEVELS_LOWEST ? 0
                                                : 255;
        }
        for (int32_t s = 0; s < cols / type->scale_every; s++) {
            uint8_t *scales = tile + at + (size_t)(s * type->scale_bytes);
            for (int32_t i = 0; i < type->scale_bytes; i++) {
                scales[i] = (uint8_t)random_u32();
            }
            if (type->type == ES_GGML_MXFP4) {
                for (int32_t i = 0; i < 16; i++) {
                    scales[i] = scales[i] < 250 ? (uint8_t)(120 + scales[i] % 16) : scales[i] * 3;
                }
                continue;
            }
            int32_t halves = type->scale_bytes % 64 == 0 ? 32 : 16; /* with offsets, without */
            for (int32_t i = 0; i < halves; i++) {
                uint16_t half = random_half_scale();
                memcpy(scales + 2 * i, &half, sizeof half);
            }
        }
    }
    return w;
}

static es_rows new_rows(int32_t n, int32_t k)
{
    size_t values = (size_t)n * (size_t)k;
    size_t groups = (size_t)n * (size_t)(k / 32);
    es_rows rows = {.n = n, .k = k};
    rows.x = floats(values);
    rows.q = allocate(values);
    rows.scale = floats(groups);
    rows.sum = floats(2 * groups);
    rows.sum32 = floats(groups);
    rows.isum = allocate(2 * groups * sizeof(int32_t));
    rows.isum32 = allocate(groups * sizeof(int32_t));
    return rows;
}

static void free_rows(es_rows *rows)
{
    free(rows->x);
    free(rows->q);
    free(rows->scale);
    free(rows->sum);
    free(rows->sum32);
    free(rows->isum);
    free(rows->isum32);
}

/* Rows of every kind, groups of one row alike but for the last quarter, which is plain. */
static es_rows random_rows(int32_t n, int32_t k)
{
    es_rows rows = new_rows(n, k);
    for (int32_t r = 0; r < n; r++) {
        int kind = r % 2 == 0 ? PLAIN : (r / 2) % N_KINDS;
        float *x = rows.x + (size_t)r * (size_t)k;
        for (int32_t i = 0; i < k; i += 32) {
            int32_t count = k - i < 32 ? k - i : 32;
            fill(x + i, count, i >= k - k / 4 ? PLAIN : kind);
        }
    }
    return rows;
}

static void test_quantize(void)
{
    static const int32_t widths[] = {32, 64, 96, 160, 576, 2048};
    for (size_t c = 0; c < sizeof widths / sizeof widths[0]; c++) {
        int32_t k = widths[c];
        int32_t groups = k / 32;
        es_rows expected = random_rows(32, k);
        for (int32_t r = 0; r < 32; r++) {
            es_generic_quantize(&expected, r, 0, groups);
        }
        size_t all = (size_t)(32 * groups);
        hash_floats(expected.scale, all);
        hash_floats(expected.sum, 2 * all);
        hash_floats(expected.sum32, all);
        for (size_t i = 0; i < 32 * all; i++) {
            hash_word((uint32_t)expected.q[i]);
        }
        for (int f = 0; f < n_fast; f++) {
            es_rows got = new_rows(32, k);
            memcpy(got.x, expected.x, 32 * all * sizeof(float));
            for (int32_t r = 0; r < 32; r++) {
                int32_t middle = 7 * r % (groups + 1); /* in two calls */
                fast[f]->quantize(&got, r, middle, groups);
                fast[f]->quantize(&got, r, 0, middle);
            }
            same_bytes(fast[f], "quantize q", expected.q, got.q, 32 * all);
            same_bytes(fast[f], "quantize isum", expected.isum, got.isum, 2 * all * 4);
            same_bytes(fast[f], "quantize isum32", expected.isum32, got.isum32, all * 4);
            same_floats(fast[f], "quantize scale", expected.scale, got.scale, all);
            same_floats(fast[f], "quantize sum", expected.sum, got.sum, 2 * all);
            same_floats(fast[f], "quantize sum32", expected.sum32, got.sum32, all);
            free_rows(&got);
        }
        free_rows(&expected);
    }
}

/* A call's results against those plain C gave the same rows among 64 others: so a row is also
   shown not to depend on its company. */
static void check_gemm(const es_kernels *k, const weight_type *type, const es_tensor *w,
                       const es_rows *x, const float *expected, int32_t t0, int32_t t1, int32_t r0,
                       int32_t n)
{
    size_t width = (size_t)(t1 - t0) * 16;
    size_t ld = width + 5;
    size_t full = (size_t)es_tiles(w->rows) * 16;
    float *y = floats((size_t)n * ld - 5); /* the last row has nothing behind it */
    const float untouched = y[0];
    k->gemm(w, t0, t1, x, r0, n, y, ld);
    char what[96];
    snprintf(what, sizeof what, "gemm %s rows %d cols %d tiles [%d, %d) r0 %d n %d", type->name,
             (int)w->rows, (int)w->cols, (int)t0, (int)t1, (int)r0, (int)n);
    for (size_t r = 0; r < (size_t)n; r++) {
        same_floats(k, what, expected + ((size_t)r0 + r) * full + (size_t)t0 * 16, y + r * ld,
                    width);
        for (size_t i = width; i < ld && r + 1 < (size_t)n; i++) {
            CHECK(float_bits(y[r * ld + i]) == float_bits(untouched));
        }
    }
    free(y);
}

static void test_gemm_of(const weight_type *type, int32_t rows, int32_t cols, int levels)
{
    static const int32_t batches[] = {1,  2,  3,  4,  5,  6,  7,  8,  9, 10,
                                      11, 12, 13, 14, 15, 16, 24, 32, 64};
    const int32_t most = 64;
    es_tensor w = random_tensor(type, rows, cols, levels);
    es_rows x = random_rows(most, cols);
    if (!is_float(type)) {
        for (int32_t r = 0; r < most; r++) {
            es_generic_quantize(&x, r, 0, cols / 32);
        }
    }
    int32_t tiles = es_tiles(rows);
    size_t full = (size_t)tiles * 16;
    float *expected = floats((size_t)most * full);
    es_generic_gemm(&w, 0, tiles, &x, 0, most, expected, full);
    hash_floats(expected, (size_t)most * full);
    for (int f = 0; f < n_fast; f++) {
        for (size_t b = 0; b < sizeof batches / sizeof batches[0]; b++) {
            int32_t n = batches[b];
            int32_t r0 = 11 * n % (most - n + 1);
            check_gemm(fast[f], type, &w, &x, expected, 0, tiles, r0, n);
        }
        check_gemm(fast[f], type, &w, &x, expected, tiles - 1, tiles, 1, 9);
        check_gemm(fast[f], type, &w, &x, expected, tiles / 2, tiles, 63, 1);
        check_gemm(fast[f], type, &w, &x, expected, 0, (tiles + 1) / 2, 17, 5);
    }
    free((void *)w.data);
    free_rows(&x);
    free(expected);
}

static void test_gemm(void)
{
    static const struct {
        int32_t rows, cols;
    } shapes[] = {{40, 32},  {7, 64},   {17, 96},    {1, 160},  {33, 256},
                  {17, 576}, {40, 768}, {16, 1536}, {17, 2048}};
    for (int t = 0; t < N_TYPES; t++) {
        const weight_type *type = &weight_types[t];
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
            if (shapes[s].cols % type->scale_every == 0) {
                test_gemm_of(type, shapes[s].rows, shapes[s].cols, LEVELS_RANDOM);
            }
        }
        for (int levels = LEVELS_RANDOM + 1; levels < N_LEVELS; levels++) {
            test_gemm_of(type, 16, 256, levels);
        }
        if (is_float(type)) { /* no groups, so any width */
            test_gemm_of(type, 18, 1, LEVELS_RANDOM);
            test_gemm_of(type, 5, 37, LEVELS_RANDOM);
        }
    }
}

/* ---- rows of floats ---------------------------------------------------------------------- */

static const int32_t lengths[] = {1,  2,  5,  15, 16,  17,  24,  31,  32,
                                  33, 63, 64, 65, 100, 128, 576, 1000, 2048};

enum { N_LENGTHS = (int)(sizeof lengths / sizeof lengths[0]) };

static void test_rms_norm(void)
{
    for (int l = 0; l < N_LENGTHS; l++) {
        for (int kind = 0; kind < N_KINDS; kind++) {
            int32_t n = lengths[l];
            float *x = floats((size_t)n), *w = floats((size_t)n), *expected = floats((size_t)n);
            fill(x, n, kind);
            fill(w, n, PLAIN);
            float eps = kind % 2 ? 1e-5f : 1e-6f;
            es_generic_rms_norm(x, w, n, eps, expected);
            hash_floats(expected, (size_t)n);
            for (int f = 0; f < n_fast; f++) {
                float *got = floats((size_t)n);
                fast[f]->rms_norm(x, w, n, eps, got);
                same_floats(fast[f], "rms_norm", expected, got, (size_t)n);
                memcpy(got, x, (size_t)n * sizeof(float));
                fast[f]->rms_norm(got, w, n, eps, got);
                same_floats(fast[f], "rms_norm in place", expected, got, (size_t)n);
                free(got);
            }
            free(x);
            free(w);
            free(expected);
        }
    }
}

static void test_rope(void)
{
    static const int32_t dims[] = {2, 10, 16, 20, 24, 32, 40, 64, 80, 96, 128, 256};
    for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++) {
        for (int kind = 0; kind < 2 * N_KINDS; kind++) {
            int32_t n = dims[d];
            int32_t interleaved = kind % 2;
            size_t size = (size_t)n + 3; /* values that are not rotated */
            float *x = floats(size), *cosine = floats((size_t)n / 2), *sine = floats((size_t)n / 2);
            fill(x, n + 3, kind / 2);
            fill(cosine, n / 2, PLAIN);
            fill(sine, n / 2, PLAIN);
            float *expected = copy_floats(x, size);
            es_generic_rope(expected, cosine, sine, n, interleaved);
            hash_floats(expected, size);
            for (int f = 0; f < n_fast; f++) {
                float *got = copy_floats(x, size);
                fast[f]->rope(got, cosine, sine, n, interleaved);
                same_floats(fast[f], interleaved ? "rope interleaved" : "rope", expected, got,
                            size);
                free(got);
            }
            free(x);
            free(cosine);
            free(sine);
            free(expected);
        }
    }
}

typedef void (*gated)(const float *gate, const float *up, int32_t n, float *out);

static void check_gated(const char *what, gated truth, int which, const float *gate,
                        const float *up, int32_t n)
{
    float *expected = floats((size_t)n), *got = floats((size_t)n);
    truth(gate, up, n, expected);
    hash_floats(expected, (size_t)n);
    for (int f = 0; f < n_fast; f++) {
        gated tested = which == 0 ? fast[f]->swiglu : fast[f]->geglu;
        tested(gate, up, n, got);
        same_floats(fast[f], what, expected, got, (size_t)n);
        memcpy(got, gate, (size_t)n * sizeof(float));
        tested(got, up, n, got);
        same_floats(fast[f], what, expected, got, (size_t)n);
    }
    memcpy(got, gate, (size_t)n * sizeof(float));
    truth(got, up, n, got);
    same_floats(&es_kernels_generic, what, expected, got, (size_t)n);
    free(expected);
    free(got);
}

static void test_gates(void)
{
    /* The last length sweeps the floats: every exponent, both signs, infinities and NaNs. */
    for (int l = 0; l <= N_LENGTHS; l++) {
        int is_sweep = l == N_LENGTHS;
        int32_t n = is_sweep ? 1 << 16 : lengths[l];
        float *gate = floats((size_t)n), *up = floats((size_t)n);
        fill(up, n, PLAIN);
        for (int32_t i = 0; i < n; i++) {
            gate[i] = is_sweep ? from_bits((uint32_t)i << 16 | random_u32() >> 16)
                               : 4.0f * random_float();
        }
        check_gated("swiglu", es_generic_swiglu, 0, gate, up, n);
        check_gated("geglu", es_generic_geglu, 1, gate, up, n);
        free(gate);
        free(up);
    }
}

static void test_add_and_scale(void)
{
    for (int l = 0; l < N_LENGTHS; l++) {
        for (int kind = 0; kind < N_KINDS; kind++) {
            int32_t n = lengths[l];
            size_t size = (size_t)n;
            float *x = floats(size), *y = floats(size), *scaled = floats(size);
            fill(x, n, kind);
            fill(y, n, PLAIN);
            float s = random_float();
            float *sum = copy_floats(y, size);
            es_generic_add(sum, x, n);
            es_generic_scale(scaled, x, s, n);
            hash_floats(sum, size);
            hash_floats(scaled, size);
            for (int f = 0; f < n_fast; f++) {
                float *got = copy_floats(y, size);
                fast[f]->add(got, x, n);
                same_floats(fast[f], "add", sum, got, size);
                fast[f]->scale(got, x, s, n);
                same_floats(fast[f], "scale", scaled, got, size);
                memcpy(got, x, size * sizeof(float));
                fast[f]->scale(got, got, s, n);
                same_floats(fast[f], "scale in place", scaled, got, size);
                free(got);
            }
            free(x);
            free(y);
            free(scaled);
            free(sum);
        }
    }
}

/* ---- attention --------------------------------------------------------------------------- */

static const int32_t head_dims[] = {24, 32, 40, 64, 80, 96, 128, 256};

enum { N_HEAD_DIMS = (int)(sizeof head_dims / sizeof head_dims[0]), SLOTS = 64 };

typedef struct kv_memory {
    es_kv_format format;
    int32_t head_dim;
    void *keys, *values;
    float *key_scale, *value_scale;
} kv_memory;

static size_t kv_size(const kv_memory *kv)
{
    return (size_t)SLOTS * (size_t)kv->head_dim * (kv->format == ES_KV_FORMAT_F16 ? 2 : 1);
}

static kv_memory new_kv(es_kv_format format, int32_t head_dim)
{
    kv_memory kv = {.format = format, .head_dim = head_dim};
    kv.keys = allocate(kv_size(&kv));
    kv.values = allocate(kv_size(&kv));
    if (format == ES_KV_FORMAT_INT8) { /* there are no scales of fp16 */
        kv.key_scale = floats(SLOTS);
        kv.value_scale = floats(SLOTS);
    }
    return kv;
}

static void free_kv(kv_memory *kv)
{
    free(kv->keys);
    free(kv->values);
    free(kv->key_scale);
    free(kv->value_scale);
}

/* The same rows in the same order by one variant. Slots with NaN and infinity only when asked. */
static void store_rows(const es_kernels *k, kv_memory *kv, int extremes)
{
    uint64_t saved = random_state;
    float *x = floats((size_t)kv->head_dim);
    for (int32_t slot = SLOTS - 1; slot >= 0; slot--) {
        int kind = extremes && slot % 3 == 0 ? (slot / 3) % N_KINDS : PLAIN;
        fill(x, kv->head_dim, kind);
        k->kv_store_key(kv->format, kv->keys, kv->key_scale, kv->head_dim, slot, x);
        fill(x, kv->head_dim, kind);
        k->kv_store_value(kv->format, kv->values, kv->value_scale, kv->head_dim, slot, x);
    }
    free(x);
    random_state = saved;
}

static void same_kv(const es_kernels *k, const kv_memory *a, const kv_memory *b)
{
    if (a->format == ES_KV_FORMAT_F16) {
        same_halves(k, "kv_store_key fp16", a->keys, b->keys, kv_size(a) / 2);
        same_halves(k, "kv_store_value fp16", a->values, b->values, kv_size(a) / 2);
        return;
    }
    same_bytes(k, "kv_store_key int8", a->keys, b->keys, kv_size(a));
    same_bytes(k, "kv_store_value int8", a->values, b->values, kv_size(a));
    same_floats(k, "kv_store_key scale", a->key_scale, b->key_scale, SLOTS);
    same_floats(k, "kv_store_value scale", a->value_scale, b->value_scale, SLOTS);
}

static void test_kv_store(void)
{
    for (int d = 0; d < N_HEAD_DIMS; d++) {
        for (int format = 0; format < 2; format++) {
            kv_memory expected = new_kv((es_kv_format)format, head_dims[d]);
            store_rows(&es_kernels_generic, &expected, 1);
            const uint16_t *words = expected.keys;
            for (size_t i = 0; i < kv_size(&expected) / 2; i++) {
                hash_word(format == ES_KV_FORMAT_F16 ? float_bits(es_half_to_float(words[i]))
                                                     : words[i]);
            }
            for (int f = 0; f < n_fast; f++) {
                kv_memory got = new_kv((es_kv_format)format, head_dims[d]);
                store_rows(fast[f], &got, 1);
                same_kv(fast[f], &expected, &got);
                free_kv(&got);
            }
            free_kv(&expected);
        }
    }
}

static const struct {
    int32_t slot, count;
} ranges[] = {{0, 1},   {0, 16}, {3, 5},  {15, 2}, {16, 16}, {17, 30},
              {7, 40}, {0, 64}, {63, 1}, {1, 63}, {48, 16}, {20, 0}};

enum { N_RANGES = (int)(sizeof ranges / sizeof ranges[0]), MOST_VECTORS = 16 };

static void test_attn_scores(const kv_memory *kv)
{
    int32_t dim = kv->head_dim;
    float *q[MOST_VECTORS];
    for (int32_t j = 0; j < MOST_VECTORS; j++) {
        q[j] = floats((size_t)dim);
        fill(q[j], dim, j == 5 ? HUGE_ONES : j == 7 ? WITH_NAN : PLAIN);
    }
    for (int r = 0; r < N_RANGES; r++) {
        for (int32_t m = 1; m <= MOST_VECTORS; m += m < 9 ? 1 : 7) {
            int32_t slot = ranges[r].slot, count = ranges[r].count;
            size_t ld = (size_t)count + 3;
            size_t size = (size_t)(m - 1) * ld + (size_t)count;
            float *expected = floats(size);
            es_generic_attn_scores(kv->format, kv->keys, kv->key_scale, dim, slot, count,
                                   (const float *const *)q, m, expected, ld);
            hash_floats(expected, size);
            for (int f = 0; f < n_fast; f++) {
                float *got = floats(size);
                fast[f]->attn_scores(kv->format, kv->keys, kv->key_scale, dim, slot, count,
                                     (const float *const *)q, m, got, ld);
                same_floats(fast[f], "attn_scores", expected, got, size);
                free(got);
            }
            free(expected);
        }
    }
    for (int32_t j = 0; j < MOST_VECTORS; j++) {
        free(q[j]);
    }
}

static void test_attn_mix(const kv_memory *kv)
{
    int32_t dim = kv->head_dim;
    for (int r = 0; r < N_RANGES; r++) {
        for (int32_t m = 1; m <= MOST_VECTORS; m += m < 9 ? 1 : 7) {
            int32_t slot = ranges[r].slot, count = ranges[r].count;
            size_t ld = (size_t)count + 2;
            size_t size = (size_t)(m - 1) * ld + (size_t)count;
            float *weight = floats(size);
            fill(weight, (int32_t)size, PLAIN);
            float *start[MOST_VECTORS], *expected[MOST_VECTORS];
            for (int32_t j = 0; j < m; j++) {
                start[j] = floats((size_t)dim);
                fill(start[j], dim, j == 3 ? WITH_INFINITY : PLAIN);
                expected[j] = copy_floats(start[j], (size_t)dim);
            }
            es_generic_attn_mix(kv->format, kv->values, kv->value_scale, dim, slot, count, weight,
                                ld, m, expected);
            for (int f = 0; f < n_fast; f++) {
                float *got[MOST_VECTORS];
                for (int32_t j = 0; j < m; j++) {
                    got[j] = copy_floats(start[j], (size_t)dim);
                }
                fast[f]->attn_mix(kv->format, kv->values, kv->value_scale, dim, slot, count,
                                  weight, ld, m, got);
                for (int32_t j = 0; j < m; j++) {
                    same_floats(fast[f], "attn_mix", expected[j], got[j], (size_t)dim);
                    free(got[j]);
                }
            }
            for (int32_t j = 0; j < m; j++) {
                hash_floats(expected[j], (size_t)dim);
                free(start[j]);
                free(expected[j]);
            }
            free(weight);
        }
    }
}

static void test_attention(void)
{
    for (int d = 0; d < N_HEAD_DIMS; d++) {
        for (int format = 0; format < 2; format++) {
            for (int extremes = 0; extremes < 2; extremes++) {
                kv_memory kv = new_kv((es_kv_format)format, head_dims[d]);
                store_rows(&es_kernels_generic, &kv, extremes);
                test_attn_scores(&kv);
                test_attn_mix(&kv);
                free_kv(&kv);
            }
        }
    }
}

static void check_softmax(const float *score, int32_t count, float softcap, int32_t has_sink,
                          float sink)
{
    float *expected = copy_floats(score, (size_t)count);
    float sum = es_generic_attn_softmax(expected, count, softcap, has_sink, sink);
    int is_nan = sum != sum;
    hash_floats(&sum, 1);
    if (!is_nan) {
        hash_floats(expected, (size_t)count);
    }
    for (int f = 0; f < n_fast; f++) {
        float *got = copy_floats(score, (size_t)count);
        float got_sum = fast[f]->attn_softmax(got, count, softcap, has_sink, sink);
        same_floats(fast[f], "attn_softmax sum", &sum, &got_sum, 1);
        if (!is_nan) { /* the weights of a NaN sum are anything */
            same_floats(fast[f], "attn_softmax weights", expected, got, (size_t)count);
        }
        free(got);
    }
    free(expected);
}

static void test_attn_softmax(void)
{
    float score[300];
    for (int32_t count = 0; count <= 300; count += count < 70 ? 1 : 46) {
        for (int kind = 0; kind < N_KINDS; kind++) {
            for (int mode = 0; mode < 4; mode++) {
                if (count > 0) {
                    fill(score, count, kind);
                }
                for (int32_t c = 0; kind == PLAIN && c < count; c++) {
                    score[c] *= 40.0f; /* weights that reach the clamp of exp */
                }
                float softcap = mode & 1 ? 30.0f : 0.0f;
                check_softmax(score, count, softcap, mode >> 1, random_float() * 20.0f);
            }
        }
    }
    score[0] = NAN; /* alone, first and last */
    check_softmax(score, 1, 0.0f, 0, 0.0f);
    check_softmax(score, 40, 50.0f, 1, 1.0f);
    score[0] = -INFINITY;
    check_softmax(score, 40, 0.0f, 1, 1.0f);
    score[39] = NAN;
    check_softmax(score, 40, 0.0f, 0, 0.0f);
    check_softmax(score, 39, 0.0f, 1, INFINITY);
}

int main(void)
{
    for (int32_t i = 0; es_cpu_variant(i) != NULL; i++) {
        const es_kernels *k = NULL;
        CHECK(es_kernels_choose(es_cpu_variant(i), &k) == ES_OK);
        CHECK(strcmp(k->name, es_cpu_variant(i)) == 0);
        if (k != &es_kernels_generic) {
            fast[n_fast++] = k;
        }
    }
    test_quantize();
    test_gemm();
    test_rms_norm();
    test_rope();
    test_gates();
    test_add_and_scale();
    test_kv_store();
    test_attention();
    test_attn_softmax();
    for (int f = 0; f < n_fast; f++) {
        printf("%s ", fast[f]->name);
    }
    printf("generic: %016" PRIx64 "\n", hash);
    return 0;
}
