/* The pool: every member runs, barriers hold back, an idle pool sleeps, crowds make progress. */
#include "clock.h"

#include <stdatomic.h>
#include <string.h>

#include "alloc.h"
#include "check.h"
#include "threads.h"

enum { MOST = 16, STEPS = 40 };

typedef struct race {
    es_pool *pool;
    int32_t value[STEPS + 1][MOST]; /* by step and member; plain memory, so that TSan watches */
    atomic_int runs;
} race;

/* A member's value of a step needs everybody's of the step before. */
static void sum_all(void *arg, int32_t member, int32_t n)
{
    race *r = arg;
    atomic_fetch_add(&r->runs, 1);
    r->value[0][member] = member + 1;
    for (int32_t s = 1; s <= STEPS; s++) {
        es_pool_barrier(r->pool, member);
        int32_t sum = 0;
        for (int32_t m = 0; m < n; m++) {
            sum = (sum + r->value[s - 1][m]) % 9973;
        }
        r->value[s][member] = sum + member;
    }
}

static void test_barriers(int32_t n, int32_t runs)
{
    static race r, expected;
    memset(&expected, 0, sizeof(expected));
    for (int32_t m = 0; m < n; m++) {
        expected.value[0][m] = m + 1;
    }
    for (int32_t s = 1; s <= STEPS; s++) {
        int32_t sum = 0;
        for (int32_t m = 0; m < n; m++) {
            sum = (sum + expected.value[s - 1][m]) % 9973;
        }
        for (int32_t m = 0; m < n; m++) {
            expected.value[s][m] = sum + m;
        }
    }
    CHECK(es_pool_new(n, &r.pool) == ES_OK);
    CHECK(es_pool_size(r.pool) == n);
    for (int32_t i = 0; i < runs; i++) {
        memset(r.value, 0, sizeof(r.value));
        atomic_store(&r.runs, 0);
        es_pool_run(r.pool, sum_all, &r);
        CHECK(atomic_load(&r.runs) == n);
        CHECK(memcmp(r.value, expected.value, sizeof(r.value)) == 0);
    }
    es_pool_free(r.pool);
}

static void count(void *arg, int32_t member, int32_t n)
{
    (void)member;
    (void)n;
    atomic_fetch_add((atomic_int *)arg, 1);
}

static void rest(double seconds)
{
    struct timespec time = {.tv_nsec = (long)(1e9 * seconds)};
    nanosleep(&time, NULL);
}

/* Workers that slept are woken, and while they sleep they use no processor. */
static void test_idle(void)
{
    es_pool *pool;
    atomic_int runs = 0;
    CHECK(es_pool_new(4, &pool) == ES_OK);
    for (int32_t i = 1; i <= 3; i++) {
        es_pool_run(pool, count, &runs);
        CHECK(atomic_load(&runs) == 4 * i);
        rest(5e-3);
    }
    clock_t before = clock();
    rest(0.2);
    CHECK((double)(clock() - before) / CLOCKS_PER_SEC < 0.1); /* three that spun: 0.4 or more */
    es_pool_free(pool);
}

static void test_births_and_deaths(void)
{
    es_pool *pool;
    for (int32_t i = 0; i < 200; i++) {
        CHECK(es_pool_new(1 + i % 5, &pool) == ES_OK);
        atomic_int runs = 0;
        if (i % 2 == 0) {
            es_pool_run(pool, count, &runs);
            CHECK(atomic_load(&runs) == 1 + i % 5);
        }
        es_pool_free(pool);
    }
    es_pool_free(NULL);
    CHECK(es_pool_new(0, &pool) == ES_ERR_ARGUMENT);
    for (long left = 0; left < 3; left++) {
        es_test_alloc_left = left;
        CHECK(es_pool_new(3, &pool) == ES_ERR_MEMORY);
    }
    es_test_alloc_left = -1;
}

static void test_shares(void)
{
    for (int32_t n = 1; n <= 9; n++) {
        for (int32_t count = 0; count < 40; count++) {
            int32_t next = 0, begin, end;
            for (int32_t m = 0; m < n; m++) {
                es_share(count, m, n, &begin, &end);
                CHECK(begin == next && end - begin >= count / n);
                CHECK(end - begin <= (count + n - 1) / n);
                next = end;
            }
            CHECK(next == count);
        }
    }
    int32_t begin, end;
    es_share(INT32_MAX, 1023, 1024, &begin, &end);
    CHECK(begin > INT32_MAX - INT32_MAX / 1000 && end == INT32_MAX);
}

int main(void)
{
    test_shares();
    test_barriers(1, 20);
    test_barriers(2, 500);
    test_barriers(3, 100);
    test_barriers(8, 20);
    test_barriers(MOST, 5);
    test_idle();
    test_births_and_deaths();
    return 0;
}
