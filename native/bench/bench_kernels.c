/*
 * bench_kernels.c - what linear layers cost for n rows, beside what this machine can do at best.
 *
 *     bench_kernels [--threads T] [--rounds R] [--cpu NAME] [--model smollm2|1b] [TYPE ...]
 *
 * Every round measures the two limits and then one pass over all matrices of the model for each n.
 * Threads are timed by themselves and matrix by matrix, in slices so short that neighbours rarely
 * interrupt them; the best of all rounds counts, for limits and kernels alike, and a matrix takes
 * as long as its slowest thread. Waiting at barriers is not in it. Weights are random. TYPE is a
 * tensor type (Q4_1 ...); none: all of them. The lm_head stays Q8_0.
 */
#define _DEFAULT_SOURCE /* madvise, clock_gettime */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "gguf.h"
#include "kernels/kernels.h"
#include "threads.h"

enum { MAX_SHAPES = 5, MAX_COPIES = 30, MAX_THREADS = 16, N_COUNTS = 7, MAX_ROWS = 32 };
enum { LIMIT_BYTES = 128 << 20, LIMIT_SLICE = 8 << 20 };

static const int32_t counts[N_COUNTS] = {1, 2, 3, 4, 8, 16, 32};

typedef struct shape {
    const char *name; /* NULL ends the list */
    int32_t rows, cols, copies;
} shape;

typedef struct model {
    const char *name;
    shape shapes[MAX_SHAPES + 1];
} model;

/* The last one of a list is the lm_head. */
static const model models[] = {
    {"smollm2",
     {{"qkv", 960, 576, 30}, {"o", 576, 576, 30}, {"gate up", 3072, 576, 30},
      {"down", 576, 1536, 30}, {"lm_head", 49152, 576, 1}}},
    {"1b",
     {{"qkv", 3072, 2048, 16}, {"o", 2048, 2048, 16}, {"gate up", 11264, 2048, 16},
      {"down", 2048, 5632, 16}, {"lm_head", 32000, 2048, 1}}},
};

static const struct {
    int32_t type;
    const char *name;
} types[] = {
    {ES_GGML_Q4_0, "Q4_0"}, {ES_GGML_Q4_1, "Q4_1"}, {ES_GGML_Q5_0, "Q5_0"},
    {ES_GGML_Q5_1, "Q5_1"}, {ES_GGML_Q8_0, "Q8_0"}, {ES_GGML_Q2_K, "Q2_K"},
    {ES_GGML_Q3_K, "Q3_K"}, {ES_GGML_Q4_K, "Q4_K"}, {ES_GGML_Q5_K, "Q5_K"},
    {ES_GGML_Q6_K, "Q6_K"}, {ES_GGML_IQ4_NL, "IQ4_NL"}, {ES_GGML_MXFP4, "MXFP4"},
    {ES_GGML_F16, "F16"}, {ES_GGML_BF16, "BF16"}, {ES_GGML_F32, "F32"},
};

enum { N_TYPES = (int)(sizeof types / sizeof types[0]) };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *pages(size_t n_bytes)
{
    size_t huge = (size_t)2 << 20;
    void *p = aligned_alloc(huge, (n_bytes + huge - 1) / huge * huge);
    if (p == NULL) {
        fprintf(stderr, "bench_kernels: no memory for %zu bytes\n", n_bytes);
        exit(1);
    }
    madvise(p, n_bytes, MADV_HUGEPAGE);
    return p;
}

/* ---- the machine's limits ------------------------------------------------------------ */

typedef struct limits {
    const uint8_t *memory; /* LIMIT_BYTES for every member */
    double read[MAX_THREADS], int8[MAX_THREADS]; /* the best so far */
} limits;

static void measure_member(void *arg, int32_t member, int32_t n)
{
    limits *l = arg;
    const uint8_t *mine = l->memory + (size_t)member * LIMIT_BYTES;
    (void)n;
    for (size_t at = 0; at < LIMIT_BYTES; at += LIMIT_SLICE) {
        double read = 0.0, int8 = 0.0;
        uint64_t read_sum;
        int32_t int8_sum;
        es_measure_read(mine + at, LIMIT_SLICE, 1e-6, &read, &read_sum);
        es_measure_int8(0, 1e-4, &int8, &int8_sum);
        l->read[member] = read > l->read[member] ? read : l->read[member];
        l->int8[member] = int8 > l->int8[member] ? int8 : l->int8[member];
    }
}

static double sum_of(const double *value, int32_t n)
{
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++) {
        sum += value[i];
    }
    return sum;
}

/* ---- one pass ------------------------------------------------------------------------ */

typedef struct pass {
    const es_kernels *kernels;
    es_pool *pool;
    const model *model;
    int32_t type;
    es_tensor tensor[MAX_SHAPES];         /* the first copy; others follow it */
    size_t stride[MAX_SHAPES];            /* bytes of a copy */
    es_rows rows;                         /* as wide as the widest; k is set for each shape */
    float *y;
    int32_t count;                        /* index of n in counts */
    /* Least seconds of one member in one matrix; 0: not yet run. */
    double seconds[N_COUNTS][MAX_SHAPES][MAX_COPIES][MAX_THREADS];
} pass;

static uint64_t state = 88172645463325252u;

static uint32_t draw(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

/* Small bytes: no fp16 scale or float weight made of them is infinite, and no exponent of MXFP4
   denormal, which would be slow. */
static void fill(int32_t type, uint8_t *p, size_t n)
{
    uint32_t above = type == ES_GGML_MXFP4 ? 0x40404040u : 0;
    for (size_t i = 0; i + 4 <= n; i += 4) {
        uint32_t bits = (draw() & 0x3F3F3F3Fu) | above;
        memcpy(p + i, &bits, sizeof bits);
    }
}

static int32_t n_shapes(const model *m)
{
    int32_t n = 0;
    while (n < MAX_SHAPES && m->shapes[n].name != NULL) {
        n++;
    }
    return n;
}

static size_t pass_bytes(const pass *p, int32_t s)
{
    return p->stride[s] * (size_t)p->model->shapes[s].copies;
}

static void pass_open(pass *p, const model *m, int32_t type)
{
    p->model = m;
    p->type = type;
    memset(p->seconds, 0, sizeof p->seconds);
    int32_t widest = 0, tallest = 0, n = n_shapes(m);
    for (int32_t s = 0; s < n; s++) {
        const shape *of = &m->shapes[s];
        es_tensor *t = &p->tensor[s];
        t->type = s == n - 1 ? ES_GGML_Q8_0 : type;
        t->rows = of->rows;
        /* Two-level types need a multiple of 256. */
        int32_t is_whole = es_pack_tile_bytes(t->type, of->cols) > 0;
        t->cols = is_whole ? of->cols : (of->cols + 255) / 256 * 256;
        t->tile_bytes = es_pack_tile_bytes(t->type, t->cols);
        p->stride[s] = t->tile_bytes * (size_t)es_tiles(t->rows);
        uint8_t *data = pages(pass_bytes(p, s));
        fill(t->type, data, pass_bytes(p, s));
        t->data = data;
        widest = t->cols > widest ? t->cols : widest;
        tallest = t->rows > tallest ? t->rows : tallest;
    }
    size_t values = (size_t)MAX_ROWS * (size_t)widest, groups = values / ES_GROUP;
    p->rows = (es_rows){MAX_ROWS, widest, pages(4 * values), pages(values), pages(4 * groups),
                        pages(8 * groups), pages(4 * groups), pages(8 * groups), pages(4 * groups)};
    for (size_t i = 0; i < values; i++) {
        p->rows.x[i] = (float)(int32_t)draw() * 0x1p-31f;
    }
    for (int32_t r = 0; r < MAX_ROWS; r++) {
        p->kernels->quantize(&p->rows, r, 0, widest / ES_GROUP);
    }
    p->y = pages(4 * (size_t)MAX_ROWS * (size_t)(tallest + ES_TILE));
}

static void pass_close(pass *p)
{
    for (int32_t s = 0; s < n_shapes(p->model); s++) {
        free((void *)p->tensor[s].data);
    }
    void *parts[] = {p->rows.x,     p->rows.q,    p->rows.scale,  p->rows.sum,
                     p->rows.sum32, p->rows.isum, p->rows.isum32, p->y};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        free(parts[i]);
    }
}

/* What follows shape s of a layer, as a forward knows it too. */
static void fetch_next(const pass *p, int32_t layer, int32_t s, int32_t member, int32_t n)
{
    int32_t head = n_shapes(p->model) - 1, layers = p->model->shapes[0].copies;
    int32_t next = s + 1 < head ? s + 1 : layer + 1 < layers ? 0 : head;
    if (s == head) {
        return;
    }
    es_tensor t = p->tensor[next];
    int32_t t0, t1;
    t.data += p->stride[next] * (size_t)(next == head ? 0 : layer + (next == 0));
    es_share(es_tiles(t.rows), member, n, &t0, &t1);
    es_fetch_tiles(&t, t0, t1);
}

/* Layer by layer, a barrier after each matrix, as a forward would. */
static void pass_member(void *arg, int32_t member, int32_t n)
{
    pass *p = arg;
    int32_t shapes = n_shapes(p->model), layers = p->model->shapes[0].copies;
    for (int32_t layer = 0; layer <= layers; layer++) {
        int32_t is_last = layer == layers;
        for (int32_t s = is_last ? shapes - 1 : 0; s < shapes - !is_last; s++) {
            es_tensor t = p->tensor[s];
            es_rows rows = p->rows;
            int32_t t0, t1;
            rows.k = t.cols;
            t.data += p->stride[s] * (size_t)(is_last ? 0 : layer);
            es_share(es_tiles(t.rows), member, n, &t0, &t1);
            double *least = &p->seconds[p->count][s][is_last ? 0 : layer][member];
            double start = now();
            p->kernels->gemm(&t, t0, t1, &rows, 0, counts[p->count], p->y + ES_TILE * (size_t)t0,
                             (size_t)es_tiles(t.rows) * ES_TILE);
            double seconds = now() - start;
            *least = *least == 0.0 || seconds < *least ? seconds : *least;
            fetch_next(p, layer, s, member, n);
            es_pool_barrier(p->pool, member);
        }
    }
}

/* ---- report -------------------------------------------------------------------------- */

/* What shape s takes with all its copies. */
static double shape_seconds(const pass *p, int32_t count, int32_t s)
{
    double sum = 0.0;
    for (int32_t c = 0; c < p->model->shapes[s].copies; c++) {
        double slowest = 0.0;
        for (int32_t i = 0; i < es_pool_size(p->pool); i++) {
            double seconds = p->seconds[count][s][c][i];
            slowest = seconds > slowest ? seconds : slowest;
        }
        sum += slowest;
    }
    return sum;
}

static void print_line(const char *name, double bytes, double weights, const double *seconds,
                       double read, double int8)
{
    printf("  %-8s %7.1f MB ", name, bytes / 1e6);
    for (int32_t c = 0; c < N_COUNTS; c++) {
        printf(" %8.3f", seconds[c] * 1e3);
    }
    printf("   %5.1f GB/s = %3.0f %%", bytes / seconds[0] / 1e9,
           100.0 * bytes / seconds[0] / read);
    for (int32_t c = 4; c < 6; c++) {
        double rate = weights * counts[c] / seconds[c];
        printf("   %4.0f GMAC/s = %2.0f %%", rate / 1e9, 100.0 * rate / int8);
    }
    printf("  ");
    for (int32_t c = 3; c < 6; c++) {
        printf("  c(%d) %.2f", (int)counts[c], seconds[c] / seconds[0]);
    }
    printf("\n");
}

static void print_result(const pass *p, const char *type, const limits *l)
{
    int32_t n = n_shapes(p->model);
    double read = sum_of(l->read, es_pool_size(p->pool));
    double int8 = sum_of(l->int8, es_pool_size(p->pool));
    double bytes = 0.0, weights = 0.0, total[N_COUNTS] = {0.0};
    printf("%s %s, %s, %d threads: at best %.1f GB/s, %.0f GMAC/s\n", p->model->name, type,
           p->kernels->name, (int)es_pool_size(p->pool), read / 1e9, int8 / 1e9);
    printf("  milliseconds for n =");
    for (int32_t c = 0; c < N_COUNTS; c++) {
        printf(" %8d", (int)counts[c]);
    }
    printf("   n = 1                n = 8                n = 16\n");
    for (int32_t s = 0; s < n; s++) {
        const shape *of = &p->model->shapes[s];
        double seconds[N_COUNTS];
        for (int32_t c = 0; c < N_COUNTS; c++) {
            seconds[c] = shape_seconds(p, c, s);
            total[c] += seconds[c];
        }
        double here = (double)p->tensor[s].rows * p->tensor[s].cols * of->copies;
        print_line(of->name, (double)pass_bytes(p, s), here, seconds, read, int8);
        bytes += (double)pass_bytes(p, s);
        weights += here;
    }
    print_line("all", bytes, weights, total, read, int8);
    fflush(stdout);
}

static int usage(void)
{
    fprintf(stderr, "usage: bench_kernels [--threads T] [--rounds R] [--cpu NAME] "
                    "[--model smollm2|1b] [TYPE ...]\n");
    return 2;
}

int main(int argc, char **argv)
{
    int32_t threads = 2, rounds = 15, n_named = 0;
    const char *cpu = NULL, *only = NULL, *named[N_TYPES];
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (argv[i][0] != '-' && n_named < N_TYPES) {
            named[n_named++] = argv[i];
            continue;
        }
        if (value == NULL) {
            return usage();
        }
        if (strcmp(argv[i], "--threads") == 0) {
            threads = atoi(value);
        } else if (strcmp(argv[i], "--rounds") == 0) {
            rounds = atoi(value);
        } else if (strcmp(argv[i], "--cpu") == 0) {
            cpu = value;
        } else if (strcmp(argv[i], "--model") == 0) {
            only = value;
        } else {
            return usage();
        }
        i++;
    }
    if (threads < 1 || threads > MAX_THREADS || rounds < 1) {
        return usage();
    }
    static pass p;
    if (es_kernels_choose(cpu, &p.kernels) != ES_OK || es_pool_new(threads, &p.pool) != ES_OK) {
        fprintf(stderr, "bench_kernels: %s\n", es_error_message());
        return 1;
    }
    limits l = {.memory = NULL};
    uint8_t *memory = pages((size_t)threads * LIMIT_BYTES);
    memset(memory, 1, (size_t)threads * LIMIT_BYTES);
    l.memory = memory;
    for (size_t m = 0; m < sizeof models / sizeof models[0]; m++) {
        for (int32_t t = 0; t < N_TYPES; t++) {
            int is_wanted = n_named == 0;
            for (int32_t i = 0; i < n_named; i++) {
                is_wanted |= strcmp(named[i], types[t].name) == 0;
            }
            if (!is_wanted || (only != NULL && strcmp(only, models[m].name) != 0)) {
                continue;
            }
            pass_open(&p, &models[m], types[t].type);
            for (int32_t round = 0; round < rounds; round++) {
                es_pool_run(p.pool, measure_member, &l);
                for (p.count = 0; p.count < N_COUNTS; p.count++) {
                    es_pool_run(p.pool, pass_member, &p);
                }
            }
            print_result(&p, types[t].name, &l);
            pass_close(&p);
        }
    }
    free(memory);
    es_pool_free(p.pool);
    return 0;
}
