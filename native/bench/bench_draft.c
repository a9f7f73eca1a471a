/*
 * bench_draft.c - what a draft costs beside one plain token of its target.
 *
 *     bench_draft TARGET.gguf HEAD.gguf [--threads T] [--rounds R] [--cpu NAME] [--cached C]
 *
 * Every draft comes behind a forward of five rows, which leaves the caches as a round does: n pairs
 * are fed, then two levels of k rows expanded. Prints the best and the middle of all rounds, and a
 * round's draft (3 pairs, levels of 2 and 1 rows) over c(1). Tokens and hidden states are arbitrary.
 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "draft_net.h"
#include "edgespec.h"

enum { MAX_ROUNDS = 1000, MOST = ES_DRAFT_WIDTH, ROWS = 5, ROOT = 17 };

typedef struct series {
    double seconds[MAX_ROUNDS];
    int32_t n;
} series;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void check(es_status status)
{
    if (status != ES_OK) {
        fprintf(stderr, "bench_draft: %s: %s\n", es_status_name(status), es_error_message());
        exit(1);
    }
}

static void *room(size_t n_bytes)
{
    void *memory = calloc(1, n_bytes);
    if (memory == NULL) {
        fprintf(stderr, "bench_draft: no memory\n");
        exit(1);
    }
    return memory;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void note(series *s, double seconds)
{
    s->seconds[s->n++] = seconds;
}

static void show(const char *what, int32_t n, series *s, double one)
{
    qsort(s->seconds, (size_t)s->n, sizeof s->seconds[0], ascending);
    double best = s->seconds[0], middle = s->seconds[s->n / 2];
    printf("    %-8s %2d   best %7.3f ms   middle %7.3f ms   of c(1) %.3f\n", what, (int)n,
           1e3 * best, 1e3 * middle, middle / one);
}

/* Three levels: `width` children of the root, a child of each, a child of the first. */
static es_tree tree_of(int32_t width, int32_t vocab)
{
    es_tree tree = {.n = 1 + 2 * width};
    tree.parent[0] = -1;
    for (int32_t i = 0; i < tree.n; i++) {
        tree.token[i] = (i * 7919 + 17) % vocab;
        tree.parent[i] = i <= width ? (i == 0 ? -1 : 0) : i - width;
        tree.rank[i] = i <= width && i > 0 ? i - 1 : 0;
    }
    check(es_tree_derive(&tree));
    return tree;
}

/* One draft behind a forward: n pairs, two levels of `first` and `second` rows. */
static void draft(const es_draft_net *net, int32_t vocab, int32_t first, int32_t second,
                  double seconds[3])
{
    const float *logits;
    bool is_ready;
    es_tree tree = tree_of(first, vocab);
    int32_t rows[2 * MOST];
    for (int32_t i = 0; i < 2 * MOST; i++) {
        rows[i] = 1 + i;
    }
    double start = now();
    check(net->begin(net->self, ROOT, &logits, &is_ready));
    double fed = now();
    check(net->expand(net->self, &tree, rows, first, &logits));
    double once = now();
    if (net->depth == 0 || net->depth > 2) {
        check(net->expand(net->self, &tree, rows + first, second, &logits));
    }
    double twice = now();
    net->end(net->self);
    seconds[0] = fed - start;
    seconds[1] = once - fed;
    seconds[2] = twice - once;
}

static void measure(es_target *target, es_drafter *drafter, const es_head_info *head,
                    const es_model_info *info, int32_t cached, int32_t rounds)
{
    static series one, append, feed[MOST + 1], level[MOST + 1], round_draft;
    const es_draft_net *net = es_drafter_net(drafter);
    size_t width = (size_t)head->n_taps * (size_t)info->hidden;
    float *taps = room((size_t)cached * width * sizeof *taps);
    int32_t *tokens = room((size_t)cached * sizeof *tokens);
    float *logits = room((size_t)ES_MAX_ROWS * (size_t)info->vocab * sizeof *logits);
    for (size_t i = 0; i < (size_t)cached * width; i++) {
        taps[i] = (float)((i * 2654435761u >> 7) % 2001) / 1000.0f - 1.0f;
    }
    for (int32_t i = 0; i < cached; i++) {
        tokens[i] = (i * 104729 + ROOT) % info->vocab; /* the first is the root drafted from */
    }
    check(es_target_prefill(target, tokens, (size_t)cached, NULL));
    double start = now();
    check(es_drafter_append(drafter, tokens, taps, (size_t)cached));
    double told = now();
    double seconds[3];
    draft(net, info->vocab, 1, 1, seconds);
    printf("%d positions: %.3f ms to be told of, %.3f ms to feed\n", (int)cached,
           1e3 * (told - start), 1e3 * seconds[0]);
    es_tree five = tree_of(ROWS / 2, info->vocab), root = {.n = 1, .parent = {-1}};
    check(es_tree_derive(&root));
    for (int32_t r = 0; r < rounds; r++) {
        check(es_target_forward(target, &five, NULL, 0, logits));
        start = now();
        check(es_target_forward(target, &root, NULL, 0, logits));
        note(&one, now() - start);
        for (int32_t i = 0; i <= MOST; i++) {
            int32_t n = i == 0 ? 3 : i;
            check(es_target_forward(target, &five, NULL, 0, logits));
            start = now();
            check(es_drafter_append(drafter, tokens, taps, (size_t)n));
            note(&append, (now() - start) / n);
            draft(net, info->vocab, i == 0 ? 2 : i, i == 0 ? 1 : i, seconds);
            if (i == 0) {
                note(&round_draft, seconds[0] + seconds[1] + seconds[2]);
            } else {
                note(&feed[i], seconds[0]);
                note(&level[i], seconds[1]);
            }
        }
    }
    qsort(one.seconds, (size_t)one.n, sizeof one.seconds[0], ascending);
    double middle = one.seconds[one.n / 2];
    show("c(1)", 1, &one, middle);
    for (int32_t i = 1; i <= MOST; i++) {
        show("feed", i, &feed[i], middle);
    }
    for (int32_t i = 1; i <= MOST; i++) {
        show("expand", i, &level[i], middle);
    }
    show("append", 1, &append, middle);
    show("a round", ROWS, &round_draft, middle);
    free(taps);
    free(tokens);
    free(logits);
}

static int usage(void)
{
    fprintf(stderr, "usage: bench_draft TARGET.gguf HEAD.gguf [--threads T] [--rounds R] "
                    "[--cpu NAME] [--cached C]\n");
    return 2;
}

int main(int argc, char **argv)
{
    const char *paths[2] = {NULL, NULL};
    int32_t rounds = 50, cached = 256, n_paths = 0;
    es_model_params params;
    check(es_model_params_default(&params));
    params.threads = 2;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (argv[i][0] != '-' && n_paths < 2) {
            paths[n_paths++] = argv[i];
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
        } else if (strcmp(argv[i], "--cached") == 0) {
            cached = atoi(value);
        } else {
            return usage();
        }
        i++;
    }
    if (n_paths < 2 || rounds < 1 || rounds > MAX_ROUNDS / (MOST + 1) || cached < MOST) {
        return usage();
    }
    es_model *model = NULL;
    es_head *head = NULL;
    es_target *target = NULL;
    es_drafter *drafter = NULL;
    es_model_info info;
    es_head_info about;
    es_target_params target_params;
    es_drafter_params drafter_params;
    size_t done = 0, total = 1, bytes;
    check(es_model_open(paths[0], &params, &model));
    while (done < total) {
        check(es_model_load(model, &done, &total));
    }
    check(es_model_describe(model, &info));
    double start = now();
    check(es_head_open(model, paths[1], &head));
    double loaded = now() - start;
    check(es_head_describe(head, &about));
    check(es_target_params_default(&target_params));
    target_params.context = cached + ES_MAX_ROWS;
    check(es_target_new(model, &target_params, &target));
    check(es_drafter_params_default(&drafter_params));
    check(es_drafter_memory(head, &drafter_params, &bytes));
    check(es_drafter_new(head, &drafter_params, &drafter));
    printf("%s, %s, %d threads: loaded in %.1f ms, %d draft tokens, weights %.1f MB, a drafter "
           "%.1f MB\n", paths[1], info.cpu, (int)info.threads, 1e3 * loaded,
           (int)about.draft_vocab, (double)about.weight_bytes / 1e6, (double)bytes / 1e6);
    measure(target, drafter, &about, &info, cached, rounds);
    es_drafter_free(drafter);
    es_head_free(head);
    es_target_free(target);
    es_model_free(model);
    return 0;
}
