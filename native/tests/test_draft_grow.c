/* Growing, merging and learning on random heads: under sanitizers, nothing is out of range. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "check.h"
#include "draft_grow.h"
#include "draft_merge.h"
#include "edgespec.h"

#define VOCAB 300

static uint64_t state = 88172645463325252u;

static int32_t below(int32_t n)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (int32_t)(state % (uint64_t)n);
}

/* A head that says anything. The buffer ends where its logits do. */
typedef struct head {
    es_draft_net net;
    float *logits;
} head;

static void say(head *h, int32_t n)
{
    static const float odd[] = {NAN, INFINITY, -INFINITY, 1e38f, -1e38f, 0.0f};
    free(h->logits);
    size_t count = (size_t)n * (size_t)h->net.vocab;
    h->logits = malloc(count * sizeof(*h->logits));
    CHECK(h->logits != NULL);
    int32_t spread = 1 + below(2000);
    int32_t oddity = below(20) == 0 ? 1 + below(40) : 0;
    for (size_t i = 0; i < count; i++) {
        h->logits[i] = (float)below(spread) / 50.0f;
        if (oddity > 0 && below(oddity) == 0) {
            h->logits[i] = odd[below(6)];
        }
    }
}

static es_status begin(void *self, int32_t root, const float **logits, bool *is_ready)
{
    head *h = self;
    (void)root;
    *is_ready = below(10) > 0;
    if (*is_ready) {
        say(h, 1);
        *logits = h->logits;
    }
    return ES_OK;
}

static es_status expand(void *self, const es_tree *tree, const int32_t *rows, int32_t n,
                        const float **logits)
{
    head *h = self;
    CHECK(n >= 1 && n <= h->net.width && rows[n - 1] < tree->n);
    say(h, n);
    *logits = h->logits;
    return below(50) == 0 ? ES_ERR_MEMORY : ES_OK;
}

static void end(void *self)
{
    (void)self;
}

static void check(const es_tree *tree)
{
    es_tree again = *tree;
    CHECK(es_tree_derive(&again) == ES_OK);
    CHECK(memcmp(again.mask, tree->mask, (size_t)tree->n * sizeof(*tree->mask)) == 0);
    for (int32_t i = 1; i < tree->n; i++) {
        CHECK(tree->depth[i] == again.depth[i]);
        CHECK(tree->token[i] >= 0 && tree->token[i] < VOCAB);
        CHECK(tree->score[i] >= 0.0f && tree->score[i] <= tree->score[tree->parent[i]]);
        for (int32_t j = 1; j < i; j++) {
            CHECK(tree->parent[i] != tree->parent[j] || tree->token[i] != tree->token[j]);
        }
    }
}

static void random_shape(es_tree *shape)
{
    shape->n = 1 + below(ES_MAX_ROWS);
    shape->parent[0] = -1;
    shape->rank[0] = 0;
    for (int32_t i = 1; i < shape->n; i++) {
        bool is_taken = true;
        while (is_taken) {
            shape->parent[i] = below(i);
            shape->rank[i] = below(ES_MAX_ROWS);
            is_taken = false;
            for (int32_t j = 1; j < i; j++) {
                is_taken |= shape->parent[j] == shape->parent[i] &&
                            shape->rank[j] == shape->rank[i];
            }
        }
    }
    CHECK(es_tree_derive(shape) == ES_OK);
}

static void use(es_grow *grow, const int32_t *bias, const float *value)
{
    es_sampling sampling;
    CHECK(es_sampling_default(&sampling) == ES_OK);
    static const float temperatures[] = {0.0f, 0.8f, 1e-30f, 1e30f};
    static const float shares[] = {1.0f, 0.9f, 1e-6f};
    es_tree last = {.n = 1, .parent = {-1}, .mask = {1}, .score = {1.0f}};
    for (int32_t i = 0; i < 60; i++) {
        sampling.temperature = temperatures[below(4)];
        sampling.top_k = below(3) == 0 ? 1 + below(20) : 0;
        sampling.top_p = shares[below(3)];
        sampling.min_p = below(3) == 0 ? 0.3f : 0.0f;
        sampling.seed = state;
        sampling.bias_token = bias;
        sampling.bias_value = value;
        sampling.n_bias = below(2) == 0 ? 0 : 3;
        es_grow_request r = {.root = 0, .rows = 1 + below(ES_MAX_ROWS), .depth = below(70),
                             .floor = (float)below(3) * 0.02f, .price = below(2) * 0.05,
                             .vocab = VOCAB, .sampling = &sampling, .index = state,
                             .is_blind = below(2) == 0};
        es_tree tree, shape, merged;
        random_shape(&shape);
        es_status status = below(2) == 0 ? es_grow_best(grow, &r, &tree)
                                         : es_grow_shape(grow, &r, &shape, &tree);
        int32_t tokens[8], n = below(9);
        for (int32_t j = 0; j < n; j++) {
            tokens[j] = below(VOCAB);
        }
        if (status == ES_OK) {
            check(&tree);
            es_merge(&tree, &last, r.rows, r.floor, &merged);
            check(&merged);
            CHECK(merged.n <= r.rows);
            last = tree;
        }
        es_grow_learn(grow, tokens, n);
    }
}

int main(void)
{
    int32_t ids[VOCAB];
    const int32_t bias[] = {0, 7, VOCAB - 1};
    const float value[] = {-INFINITY, 4.0f, -2.0f};
    for (int32_t i = 0; i < VOCAB; i++) {
        ids[i] = i;
    }
    for (int32_t i = 0; i < 60; i++) {
        head h = {.net = {.vocab = 1 + below(i % 2 == 0 ? 8 : VOCAB), .depth = below(6),
                          .width = 1 + below(ES_DRAFT_WIDTH), .begin = begin, .expand = expand,
                          .end = end}};
        h.net.self = &h;
        h.net.ids = below(2) == 0 ? NULL : ids;
        es_grow *grow = NULL;
        for (long left = 0; left < 3; left++) {
            es_test_alloc_left = left;
            CHECK(es_grow_new(&h.net, &grow) == ES_ERR_MEMORY);
        }
        es_test_alloc_left = -1;
        CHECK(es_grow_new(&h.net, &grow) == ES_OK);
        use(grow, bias, value);
        es_grow_free(grow);
        free(h.logits);
    }
    es_grow_free(NULL);
    return 0;
}
