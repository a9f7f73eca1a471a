/* The n-gram draft and the planner through long random histories, under the sanitizers. */
#include <string.h>

#include "alloc.h"
#include "check.h"
#include "draft_ngram.h"
#include "plan.h"

static uint32_t state = 1;

static int32_t below(int32_t n)
{
    state = state * 1664525u + 1013904223u;
    return (int32_t)((state >> 8) % (uint32_t)n);
}

static void check_tree(es_tree *tree, int32_t rows)
{
    CHECK(tree->n >= 1 && tree->n <= rows);
    es_tree again = *tree;
    CHECK(es_tree_derive(&again) == ES_OK);
    size_t n = (size_t)tree->n;
    CHECK(memcmp(again.depth, tree->depth, n * sizeof *tree->depth) == 0);
    CHECK(memcmp(again.mask, tree->mask, n * sizeof *tree->mask) == 0);
    for (int32_t i = 1; i < tree->n; i++) {
        CHECK(tree->score[i] > 0.0f && tree->score[i] < tree->score[tree->parent[i]]);
    }
}

static void test_any_history_gives_trees(void)
{
    static const size_t capacities[] = {1, 2, 3, 7, 64, 1000};
    for (size_t k = 0; k < sizeof capacities / sizeof *capacities; k++) {
        es_ngram *ngram;
        es_plan plan;
        es_tree tree, shape = {.n = ES_MAX_ROWS};
        for (int32_t i = 0; i < ES_MAX_ROWS; i++) {
            shape.parent[i] = i == 0 ? -1 : (i - 1) / 3;
            shape.rank[i] = i == 0 ? 0 : (i - 1) % 3;
        }
        CHECK(es_ngram_new(capacities[k], &ngram) == ES_OK);
        es_plan_init(&plan, NULL, 0.05);
        int32_t text[200];
        for (int32_t step = 0; step < 2000; step++) {
            int32_t n = below(below(10) == 0 ? 200 : 4);
            for (int32_t i = 0; i < n; i++) {
                text[i] = below(5);
            }
            int32_t rows = 1 + below(ES_MAX_ROWS);
            switch (below(8)) {
            case 0:
                es_ngram_break(ngram, text, (size_t)n);
                break;
            case 1:
                es_ngram_add(ngram, text, (size_t)n);
                break;
            case 2:
                es_ngram_fill(ngram, &shape, &tree);
                check_tree(&tree, ES_MAX_ROWS);
                break;
            default:
                es_ngram_propose(ngram, rows, es_plan_floor(&plan), &tree);
                check_tree(&tree, rows);
                tree.n = es_plan_choose(&plan, &tree);
                check_tree(&tree, rows);
                es_plan_learn(&plan, &tree, 1 + below(tree.n), 0.01 * (1 + below(3)), 1e-5);
                es_ngram_learn(ngram, text, n);
                es_ngram_add(ngram, text, (size_t)n);
            }
        }
        for (int32_t n = 2; n <= ES_MAX_ROWS; n++) {
            CHECK(es_plan_cost(&plan, n) >= es_plan_cost(&plan, n - 1));
        }
        es_ngram_free(ngram);
    }
}

static void test_positions_may_wrap_around_the_table_many_times(void)
{
    es_ngram *ngram;
    es_tree tree;
    CHECK(es_ngram_new(100, &ngram) == ES_OK);
    for (int32_t i = 0; i < 100000; i++) {
        int32_t token = i % 90;
        es_ngram_add(ngram, &token, 1);
    }
    es_ngram_propose(ngram, 10, 0.0f, &tree);
    CHECK(tree.n == 10);
    for (int32_t i = 1; i < tree.n; i++) {
        CHECK(tree.token[i] == (tree.token[i - 1] + 1) % 90);
    }
    es_ngram_free(ngram);
}

static void test_failed_allocations_leave_nothing(void)
{
    for (long left = 0; left < 5; left++) {
        es_ngram *ngram = NULL;
        es_test_alloc_left = left;
        CHECK(es_ngram_new(64, &ngram) == ES_ERR_MEMORY && ngram == NULL);
        es_test_alloc_left = -1;
    }
    es_ngram_free(NULL);
}

int main(void)
{
    test_any_history_gives_trees();
    test_positions_may_wrap_around_the_table_many_times();
    test_failed_allocations_leave_nothing();
    return 0;
}
