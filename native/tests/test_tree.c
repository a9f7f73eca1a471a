/* Trees, error messages, struct sizes. */
#include <string.h>

#include "check.h"
#include "edgespec.h"
#include "error.h"
#include "tree.h"

static es_tree tree_of(int32_t n, const int32_t *parent, const int32_t *rank)
{
    es_tree tree = {.n = n};
    for (int32_t i = 0; i < n && i < ES_MAX_ROWS; i++) {
        tree.token[i] = 100 + i;
        tree.parent[i] = parent[i];
        tree.rank[i] = rank[i];
        tree.score[i] = 1.0f / (float)(i + 1);
    }
    return tree;
}

static void test_derive(void)
{
    const int32_t parent[] = {-1, 0, 0, 1, 3, 2};
    const int32_t rank[] = {0, 1, 0, 0, 0, 5};
    es_tree tree = tree_of(6, parent, rank);
    CHECK(es_tree_derive(&tree) == ES_OK);
    const int32_t depth[] = {0, 1, 1, 2, 3, 2};
    const uint64_t mask[] = {1, 3, 5, 11, 27, 37};
    for (int32_t i = 0; i < 6; i++) {
        CHECK(tree.depth[i] == depth[i]);
        CHECK(tree.mask[i] == mask[i]);
    }
    CHECK(es_tree_depth(&tree) == 3);
}

static void test_derive_full(void)
{
    es_tree tree = {.n = ES_MAX_ROWS};
    tree.parent[0] = -1;
    for (int32_t i = 1; i < ES_MAX_ROWS; i++) {
        tree.parent[i] = i - 1;
    }
    CHECK(es_tree_derive(&tree) == ES_OK);
    CHECK(tree.mask[ES_MAX_ROWS - 1] == UINT64_MAX);
    for (int32_t i = 1; i < ES_MAX_ROWS; i++) {
        tree.parent[i] = 0;
        tree.rank[i] = ES_MAX_ROWS - i;
    }
    CHECK(es_tree_derive(&tree) == ES_OK);
    CHECK(tree.mask[ES_MAX_ROWS - 1] == (UINT64_C(1) << 63 | 1));
}

static void expect_refusal(int32_t n, const int32_t *parent, const int32_t *rank, const char *part)
{
    es_tree tree = tree_of(n, parent, rank);
    CHECK(es_tree_derive(&tree) == ES_ERR_ARGUMENT);
    CHECK(strstr(es_error_message(), part) != NULL);
}

static void test_refusals(void)
{
    static const int32_t zeros[ES_MAX_ROWS + 1] = {0};
    expect_refusal(0, zeros, zeros, "rows, got 0");
    expect_refusal(ES_MAX_ROWS + 1, zeros, zeros, "rows, got 65");
    expect_refusal(1, zeros, zeros, "row 0 is the root");
    expect_refusal(2, (int32_t[]){-1, 1}, zeros, "row 1: expected a parent in [0, 1), got 1");
    expect_refusal(2, (int32_t[]){-1, -1}, zeros, "row 1");
    expect_refusal(3, (int32_t[]){-1, 0, 0}, zeros, "row 2: rank 0 is taken");
    expect_refusal(2, (int32_t[]){-1, 0}, (int32_t[]){0, ES_MAX_ROWS}, "row 1: expected a rank");
    expect_refusal(2, (int32_t[]){-1, 0}, (int32_t[]){0, -1}, "row 1: expected a rank");
}

/* After a clip the tree is what derive makes of its record, and rows keep token and score. */
static void test_clip(void)
{
    const int32_t parent[] = {-1, 0, 1, 0, 2, 3, 0, 5};
    const int32_t rank[] = {0, 0, 0, 1, 0, 0, 2, 0};
    for (int32_t max_rows = 1; max_rows <= 9; max_rows++) {
        for (int32_t max_depth = 0; max_depth <= 4; max_depth++) {
            es_tree tree = tree_of(8, parent, rank);
            CHECK(es_tree_derive(&tree) == ES_OK);
            const es_tree whole = tree;
            es_tree_clip(&tree, max_rows, max_depth);
            CHECK(tree.n >= 1 && tree.n <= max_rows && es_tree_depth(&tree) <= max_depth);
            es_tree again = tree;
            CHECK(es_tree_derive(&again) == ES_OK);
            for (int32_t i = 0; i < tree.n; i++) {
                int32_t old = tree.token[i] - 100;
                CHECK(again.depth[i] == tree.depth[i] && again.mask[i] == tree.mask[i]);
                CHECK(whole.depth[old] == tree.depth[i] && whole.score[old] == tree.score[i]);
                CHECK(i == 0 || whole.parent[old] == tree.token[tree.parent[i]] - 100);
            }
            if (max_rows >= 8 && max_depth >= 3) {
                CHECK(tree.n == 8);
            }
        }
    }
}

static void test_child(void)
{
    const int32_t parent[] = {-1, 0, 0, 0, 1};
    const int32_t rank[] = {0, 2, 0, 1, 0};
    es_tree tree = tree_of(5, parent, rank);
    tree.token[1] = tree.token[3] = tree.token[4] = 7;
    CHECK(es_tree_child(&tree, 0, 7) == 3); /* lowest rank among equals */
    CHECK(es_tree_child(&tree, 1, 7) == 4);
    CHECK(es_tree_child(&tree, 0, 8) == -1);
    CHECK(es_tree_child(&tree, 4, 7) == -1);
}

static void test_names(void)
{
    CHECK(es_abi() == ES_ABI);
    CHECK(strcmp(es_version(), ES_VERSION) == 0);
    CHECK(strcmp(es_status_name(ES_ERR_CONTEXT), "context") == 0);
    CHECK(strcmp(es_status_name((es_status)99), "unknown") == 0);
    CHECK(es_struct_size("es_tree") == sizeof(es_tree));
    CHECK(es_struct_size("es_bush") == 0);
    char longer[2000];
    memset(longer, 'x', sizeof(longer) - 1);
    longer[sizeof(longer) - 1] = '\0';
    CHECK(es_fail(ES_ERR_STATE, "%s", longer) == ES_ERR_STATE);
    CHECK(strlen(es_error_message()) > 100);
}

int main(void)
{
    test_derive();
    test_derive_full();
    test_refusals();
    test_clip();
    test_child();
    test_names();
    return 0;
}
