/*
 * bench_forward.c - what one forward over n rows costs, with how much cached, chain or tree.
 *
 *     bench_forward FILE.gguf [--threads T] [--rounds R] [--cpu NAME] [--kv f16|int8] [--cached C]
 *
 * Prints the best and the middle of all rounds, interleaved over n, c(n) = seconds of n rows over
 * seconds of one, and what reading the weights alone would take at the best rate of the machine.
 * Tokens are arbitrary: no kernel looks at values. Without --cached: at 256 and 2048 rows.
 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "edgespec.h"
#include "threads.h"

enum { N_COUNTS = 10, MAX_ROUNDS = 1000, MAX_THREADS = 64, PROMPT = 512 };
enum { LIMIT_BYTES = 128 << 20, LIMIT_SLICE = 8 << 20 };

static const int32_t counts[N_COUNTS] = {1, 2, 3, 4, 5, 6, 8, 16, 32, 64};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void check(es_status status)
{
    if (status != ES_OK) {
        fprintf(stderr, "bench_forward: %s: %s\n", es_status_name(status), es_error_message());
        exit(1);
    }
}

/* ---- the machine's limit ------------------------------------------------------------- */

typedef struct limit {
    const uint8_t *memory; /* LIMIT_BYTES for every member */
    double best[MAX_THREADS];
} limit;

static void read_member(void *arg, int32_t member, int32_t n)
{
    limit *l = arg;
    (void)n;
    for (size_t at = 0; at < LIMIT_BYTES; at += LIMIT_SLICE) {
        double rate = 0.0;
        uint64_t sum;
        es_measure_read(l->memory + (size_t)member * LIMIT_BYTES + at, LIMIT_SLICE, 1e-6, &rate,
                        &sum);
        l->best[member] = rate > l->best[member] ? rate : l->best[member];
    }
}

/* Bytes per second of `threads` threads at once. */
static double read_rate(int32_t threads)
{
    limit l = {.memory = NULL};
    es_pool *pool = NULL;
    uint8_t *memory = aligned_alloc(64, (size_t)threads * LIMIT_BYTES);
    double sum = 0.0;
    if (memory == NULL) {
        fprintf(stderr, "bench_forward: no memory\n");
        exit(1);
    }
    memset(memory, 1, (size_t)threads * LIMIT_BYTES);
    l.memory = memory;
    check(es_pool_new(threads, &pool));
    for (int32_t i = 0; i < 5; i++) {
        es_pool_run(pool, read_member, &l);
    }
    es_pool_free(pool);
    free(memory);
    for (int32_t i = 0; i < threads; i++) {
        sum += l.best[i];
    }
    return sum;
}

/* ---- trees --------------------------------------------------------------------------- */

/* n rows: a chain, or a tree whose rows have up to three children. */
static es_tree tree_of(int32_t n, int is_chain, int32_t vocab)
{
    es_tree tree = {.n = n};
    for (int32_t i = 0; i < n; i++) {
        tree.token[i] = (i * 7919 + 17) % vocab;
        tree.parent[i] = is_chain ? i - 1 : (i + 2) / 3 - 1;
        tree.rank[i] = i == 0 || is_chain ? 0 : (i - 1) % 3;
        tree.score[i] = 1.0f;
    }
    check(es_tree_derive(&tree));
    return tree;
}

/* ---- measuring ----------------------------------------------------------------------- */

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

typedef struct series {
    double seconds[MAX_ROUNDS];
    double best, middle;
} series;

static void settle(series *s, int32_t n)
{
    qsort(s->seconds, (size_t)n, sizeof s->seconds[0], ascending);
    s->best = s->seconds[0];
    s->middle = s->seconds[n / 2];
}

static void fill_cache(es_target *target, int32_t n, int32_t vocab)
{
    int32_t *tokens = malloc((size_t)n * sizeof *tokens);
    if (tokens == NULL) {
        fprintf(stderr, "bench_forward: no memory\n");
        exit(1);
    }
    for (int32_t i = 0; i < n; i++) {
        tokens[i] = (i * 104729 + 3) % vocab;
    }
    check(es_target_prefill(target, tokens, (size_t)n, NULL));
    free(tokens);
}

static void measure(es_model *model, const es_model_info *info, es_kv_type kv, int32_t cached,
                    int32_t rounds, double rate)
{
    static const int32_t strides[4] = {1, 3, 7, 9}; /* no n always follows the same one */
    static series cost[2][N_COUNTS];
    es_target_params params;
    es_target *target = NULL;
    float *logits = malloc(sizeof(float) * (size_t)ES_MAX_ROWS * (size_t)info->vocab);
    if (logits == NULL) {
        fprintf(stderr, "bench_forward: no memory\n");
        exit(1);
    }
    check(es_target_params_default(&params));
    params.context = cached + ES_MAX_ROWS;
    params.kv = kv;
    check(es_target_new(model, &params, &target));
    fill_cache(target, cached, info->vocab);
    for (int32_t round = 0; round < rounds; round++) {
        for (int32_t i = 0; i < N_COUNTS; i++) {
            int32_t c = i * strides[round % 4] % N_COUNTS;
            for (int is_chain = 0; is_chain < 2; is_chain++) {
                es_tree tree = tree_of(counts[c], is_chain, info->vocab);
                /* The first of two finds the caches as another n has left them. */
                check(es_target_forward(target, &tree, NULL, 0, logits));
                double start = now();
                check(es_target_forward(target, &tree, NULL, 0, logits));
                cost[is_chain][c].seconds[round] = now() - start;
            }
        }
    }
    double floor = (double)info->token_bytes / rate;
    printf("%d rows cached; weights alone %.3f ms\n", (int)cached, 1e3 * floor);
    printf("     n   chain ms: best  middle   tree ms: best  middle   c(n) best  middle"
           "   tree/chain\n");
    for (int32_t c = 0; c < N_COUNTS; c++) {
        settle(&cost[0][c], rounds);
        settle(&cost[1][c], rounds);
        printf("    %2d        %8.3f %8.3f       %8.3f %8.3f      %6.2f  %6.2f       %6.3f\n",
               (int)counts[c], 1e3 * cost[1][c].best, 1e3 * cost[1][c].middle,
               1e3 * cost[0][c].best, 1e3 * cost[0][c].middle, cost[0][c].best / cost[0][0].best,
               cost[0][c].middle / cost[0][0].middle, cost[0][c].best / cost[1][c].best);
    }
    double best = cost[0][0].best < cost[1][0].best ? cost[0][0].best : cost[1][0].best;
    printf("    one row: %.0f tokens/s, %.1f of %.1f GB/s\n", 1.0 / best,
           (double)info->token_bytes / best / 1e9, rate / 1e9);
    es_target_free(target);
    free(logits);
}

static void measure_prefill(es_model *model, const es_model_info *info, es_kv_type kv,
                            int32_t rounds)
{
    static series cost;
    es_target_params params;
    es_target *target = NULL;
    check(es_target_params_default(&params));
    params.context = PROMPT;
    params.kv = kv;
    check(es_target_new(model, &params, &target));
    for (int32_t round = 0; round < rounds; round++) {
        double start = now();
        fill_cache(target, PROMPT, info->vocab);
        cost.seconds[round] = now() - start;
        check(es_target_truncate(target, 0));
    }
    settle(&cost, rounds);
    printf("prefill of %d: best %.1f ms = %.0f tokens/s, middle %.1f ms = %.0f tokens/s\n",
           (int)PROMPT, 1e3 * cost.best, PROMPT / cost.best, 1e3 * cost.middle,
           PROMPT / cost.middle);
    es_target_free(target);
}

static int usage(void)
{
    fprintf(stderr, "usage: bench_forward FILE.gguf [--threads T] [--rounds R] [--cpu NAME] "
                    "[--kv f16|int8] [--cached C]\n");
    return 2;
}

int main(int argc, char **argv)
{
    const char *path = NULL;
    int32_t rounds = 30, cached = 0;
    es_kv_type kv = ES_KV_F16;
    es_model_params params;
    check(es_model_params_default(&params));
    params.threads = 2;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (argv[i][0] != '-' && path == NULL) {
            path = argv[i];
            continue;
        }
        if (value == NULL) {
            return usage();
        }
        if (strcmp(argv[i], "--threads") == 0) {
            params.threads = atoi(value);
        } else if (strcmp(argv[i], "--rounds") == 0) {
            rounds = atoi(value);
        } else if (strcmp(argv[i], "--cpu") == 0) {
            params.cpu = value;
        } else if (strcmp(argv[i], "--kv") == 0) {
            kv = strcmp(value, "int8") == 0 ? ES_KV_INT8 : ES_KV_F16;
        } else if (strcmp(argv[i], "--cached") == 0) {
            cached = atoi(value);
        } else {
            return usage();
        }
        i++;
    }
    if (path == NULL || params.threads < 1 || params.threads > MAX_THREADS || rounds < 1 ||
        rounds > MAX_ROUNDS) {
        return usage();
    }
    es_model *model = NULL;
    es_model_info info;
    size_t done = 0, total = 1;
    double start = now();
    check(es_model_open(path, &params, &model));
    while (done < total) {
        check(es_model_load(model, &done, &total));
    }
    double loaded = now() - start;
    check(es_model_describe(model, &info));
    double rate = read_rate(info.threads);
    printf("%s, %s, %s, %d threads: loaded in %.2f s, %.1f MB a token\n", path, info.architecture,
           info.cpu, (int)info.threads, loaded, (double)info.token_bytes / 1e6);
    const int32_t depths[2] = {cached > 0 ? cached : 256, cached > 0 ? 0 : 2048};
    for (int32_t i = 0; i < 2; i++) {
        if (depths[i] > 0 && depths[i] + ES_MAX_ROWS <= info.max_position) {
            measure(model, &info, kv, depths[i], rounds, rate);
        }
    }
    measure_prefill(model, &info, kv, rounds < 10 ? rounds : 10);
    es_model_free(model);
    return 0;
}
