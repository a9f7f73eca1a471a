/* The ring and the compaction of KV rows: every size and offset, under the sanitizers. */
#include <string.h>

#include "alloc.h"
#include "check.h"
#include "edgespec.h"

enum { SLOTS = 24 };

/* Row ids in slots, and the ids a cache without limits would hold. */
typedef struct caches {
    es_ring *ring;
    int32_t memory[SLOTS];
    int32_t truth[1024];
    int32_t length;
    int32_t next_id;
} caches;

static void check_visible(const caches *c, int32_t sinks, int32_t window)
{
    int32_t slot[SLOTS], n;
    CHECK(es_ring_visible(c->ring, c->length, slot, &n) == ES_OK);
    int32_t i = 0;
    for (int32_t p = 0; p < c->length; p++) {
        if (p < sinks || window == 0 || p > c->length - window) {
            CHECK(i < n && c->memory[slot[i]] == c->truth[p]);
            i++;
        }
    }
    CHECK(i == n);
}

/* A chain of n rows of which the first n_kept stay. */
static void round_of(caches *c, int32_t n, int32_t n_kept)
{
    int32_t depth[SLOTS] = {0}, slot[SLOTS], from[SLOTS], to[SLOTS], n_moves;
    for (int32_t i = 0; i < n; i++) {
        depth[i] = i;
    }
    CHECK(es_ring_append(c->ring, depth, n, slot) == ES_OK);
    for (int32_t i = 0; i < n; i++) {
        c->memory[slot[i]] = c->next_id + i;
    }
    CHECK(es_ring_commit(c->ring, depth, n_kept, from, to, &n_moves) == ES_OK);
    CHECK(n_moves == 0);
    for (int32_t i = 0; i < n_kept; i++) {
        c->truth[c->length++] = c->next_id + i;
    }
    c->next_id += n;
    CHECK(es_ring_length(c->ring) == c->length);
}

static void test_c02_every_offset_and_size(void)
{
    const int32_t sinks = 3, window = 8, most = SLOTS - 3 - 8 + 1;
    for (int32_t offset = 0; offset < 3 * SLOTS; offset++) {
        for (int32_t n = 1; n <= most; n++) {
            caches c = {0};
            CHECK(es_ring_new(SLOTS, sinks, window, &c.ring) == ES_OK);
            for (int32_t i = 0; i < offset; i++) {
                round_of(&c, 1, 1);
            }
            round_of(&c, n, n / 2);
            check_visible(&c, sinks, window);
            round_of(&c, most, most);
            check_visible(&c, sinks, window);
            es_ring_free(c.ring);
        }
    }
}

static void test_c05_scattered_path(void)
{
    static const int32_t depth[16] = {0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4};
    static const int32_t path[4] = {0, 2, 5, 9};
    int32_t slot[16], from[4], to[4], n_moves, memory[SLOTS];
    es_ring *ring;
    CHECK(es_ring_new(SLOTS, 0, 0, &ring) == ES_OK);
    CHECK(es_ring_append(ring, depth, 16, slot) == ES_OK);
    for (int32_t i = 0; i < 16; i++) {
        memory[slot[i]] = i;
    }
    CHECK(es_ring_commit(ring, path, 4, from, to, &n_moves) == ES_OK);
    for (int32_t i = 0; i < n_moves; i++) {
        memory[to[i]] = memory[from[i]];
    }
    int32_t n;
    CHECK(es_ring_visible(ring, 4, slot, &n) == ES_OK && n == 4);
    for (int32_t i = 0; i < 4; i++) {
        CHECK(memory[slot[i]] == path[i]);
    }
    es_ring_free(ring);

    float rows[2][20][3]; /* two heads, the tree behind row 4 */
    for (int32_t i = 0; i < 2 * 20 * 3; i++) {
        (&rows[0][0][0])[i] = (float)i;
    }
    CHECK(es_kv_compact(rows, 2, sizeof rows[0], sizeof rows[0][0], 4, path, 4) == ES_OK);
    for (int32_t head = 0; head < 2; head++) {
        for (int32_t i = 0; i < 4; i++) {
            CHECK(rows[head][4 + i][1] == (float)((head * 20 + 4 + path[i]) * 3 + 1));
        }
    }
    static const int32_t behind[2] = {0, 16};
    CHECK(es_kv_compact(rows, 2, sizeof rows[0], sizeof rows[0][0], 4, behind, 2) ==
          ES_ERR_ARGUMENT);
    CHECK(es_kv_compact(rows, 2, sizeof rows[0], SIZE_MAX / 2, 4, path, 4) == ES_ERR_ARGUMENT);
}

static void test_failures_leave_the_ring_usable(void)
{
    es_ring *ring;
    for (long left = 0; left < 2; left++) {
        es_test_alloc_left = left;
        CHECK(es_ring_new(SLOTS, 0, 0, &ring) == ES_ERR_MEMORY && ring == NULL);
        es_test_alloc_left = -1;
    }
    CHECK(es_ring_new(4, 1, 3, &ring) == ES_OK);
    int32_t depth[3] = {0, 1, 2}, slot[3], to[3], n;
    for (int32_t i = 0; i < 7; i++) {
        CHECK(es_ring_append(ring, depth, 1, slot) == ES_OK);
        CHECK(es_ring_append(ring, depth, 1, slot) == ES_ERR_STATE);
        CHECK(es_ring_commit(ring, depth, 1, slot, to, &n) == ES_OK);
    }
    CHECK(es_ring_append(ring, depth, 2, slot) == ES_ERR_CONTEXT);
    CHECK(es_ring_rollback(ring) == ES_ERR_STATE);
    CHECK(es_ring_truncate(ring, 5) == ES_ERR_CONTEXT && es_ring_length(ring) == 7);
    CHECK(es_ring_truncate(ring, 1) == ES_OK && es_ring_length(ring) == 1);
    CHECK(es_ring_append(ring, depth, 3, slot) == ES_OK);
    es_ring_free(ring);
    es_ring_free(NULL);
}

int main(void)
{
    test_c02_every_offset_and_size();
    test_c05_scattered_path();
    test_failures_leave_the_ring_usable();
    return 0;
}
