/*
 * threads.c - a fixed pool of threads which work side by side through one job.
 *
 * Everybody who waits, waits at a gate: a number that somebody else will raise. He looks for a
 * while without giving up the processor (the others are microseconds away while a forward runs),
 * then lets others run in between, then sleeps. So a forward pays no system calls, an idle chat no
 * processor time. Who waits for somebody on his own processor does not look but makes way at once,
 * and so do all where there are more members than processors.
 */
#if defined(__linux__)
#define _GNU_SOURCE /* sched_getaffinity, sched_getcpu */
#endif
#include "clock.h"

#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

#include "alloc.h"
#include "error.h"

void es_share(int32_t count, int32_t member, int32_t n, int32_t *begin, int32_t *end)
{
    *begin = (int32_t)((int64_t)count * member / n);
    *end = (int32_t)((int64_t)count * (member + 1) / n);
}

enum { CACHE_LINE = 64, LOOKS = 32 };
/* How long a waiting member keeps its processor, and how long it then only lets others run. A
   gate that opens within a layer does so in the first of these. */
static const double SPIN_SECONDS = 40e-6;
static const double YIELD_SECONDS = 60e-6;

typedef struct gate {
    char apart[CACHE_LINE]; /* its neighbours are written by others */
    atomic_uint value;
    atomic_int sleepers;
    pthread_mutex_t mutex;
    pthread_cond_t raised;
} gate;

/* Where a member was when it last passed a gate. */
typedef struct seat {
    char apart[CACHE_LINE];
    atomic_int processor;
} seat;

enum { NOWHERE = -1 };

typedef struct worker {
    es_pool *pool;
    int32_t member;
    pthread_t thread;
} worker;

struct es_pool {
    gate start;             /* number of jobs begun */
    gate phase;             /* number of barriers passed */
    char apart[CACHE_LINE];
    atomic_int arrived;     /* members that wait at the next barrier */
    char apart_too[CACHE_LINE];
    es_job job;             /* NULL: go home */
    void *arg;
    int32_t n;
    double spin_seconds;
    seat *seat;             /* (n) */
    int32_t n_started;      /* workers whose threads run */
    worker *worker;         /* (n - 1) */
};

static inline void pause_processor(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* yield is a no-op on most; this waits about as long as x86's pause */
#endif
}

static int gate_init(gate *g)
{
    atomic_init(&g->value, 0);
    atomic_init(&g->sleepers, 0);
    if (pthread_mutex_init(&g->mutex, NULL) != 0) {
        return 0;
    }
    if (pthread_cond_init(&g->raised, NULL) != 0) {
        pthread_mutex_destroy(&g->mutex);
        return 0;
    }
    return 1;
}

static void gate_destroy(gate *g)
{
    pthread_cond_destroy(&g->raised);
    pthread_mutex_destroy(&g->mutex);
}

static int is_raised(gate *g, unsigned seen)
{
    return atomic_load_explicit(&g->value, memory_order_acquire) != seen;
}

/* Processors this process may use; INT32_MAX where the system does not say. */
static int32_t processors(void)
{
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        return CPU_COUNT(&set);
    }
#endif
    return INT32_MAX;
}

/* The processor this thread runs on; NOWHERE where the system does not say. */
static int32_t here(void)
{
#if defined(__linux__)
    return sched_getcpu();
#else
    return NOWHERE;
#endif
}

static void sit(es_pool *pool, int32_t member)
{
    atomic_store_explicit(&pool->seat[member].processor, here(), memory_order_relaxed);
}

/* Whether another member sits where this one waits: he cannot go on before it makes way. */
static int is_in_the_way(es_pool *pool, int32_t member)
{
    int32_t mine = here();
    for (int32_t i = 0; i < pool->n && mine != NOWHERE; i++) {
        if (i != member &&
            atomic_load_explicit(&pool->seat[i].processor, memory_order_relaxed) == mine) {
            return 1;
        }
    }
    return 0;
}

static void gate_wait(es_pool *pool, int32_t member, gate *g, unsigned seen)
{
    for (int32_t i = 0; i < LOOKS; i++) {
        if (is_raised(g, seen)) {
            return;
        }
        pause_processor();
    }
    double start = es_now();
    double waited = 0.0;
    while (waited < pool->spin_seconds + YIELD_SECONDS) {
        if (waited >= pool->spin_seconds || is_in_the_way(pool, member)) {
            sched_yield();
        }
        for (int32_t i = 0; i < LOOKS; i++) {
            if (is_raised(g, seen)) {
                return;
            }
            pause_processor();
        }
        waited = es_now() - start;
    }
    pthread_mutex_lock(&g->mutex);
    atomic_fetch_add(&g->sleepers, 1);
    while (atomic_load(&g->value) == seen) {
        pthread_cond_wait(&g->raised, &g->mutex);
    }
    atomic_fetch_sub(&g->sleepers, 1);
    pthread_mutex_unlock(&g->mutex);
}

/* The raise and the look at the sleepers, like a sleeper's count and its look at the value, are in
   one order for all: one of the two sees the other. */
static void gate_raise(gate *g)
{
    atomic_fetch_add(&g->value, 1);
    if (atomic_load(&g->sleepers) > 0) {
        pthread_mutex_lock(&g->mutex);
        pthread_cond_broadcast(&g->raised);
        pthread_mutex_unlock(&g->mutex);
    }
}

/* Returns whether this member was the last to come. */
static int arrive(es_pool *pool)
{
    int32_t before = atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel);
    if (before + 1 < pool->n) {
        return 0;
    }
    atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
    gate_raise(&pool->phase);
    return 1;
}

void es_pool_barrier(es_pool *pool, int32_t member)
{
    if (pool->n > 1) {
        unsigned phase = atomic_load_explicit(&pool->phase.value, memory_order_relaxed);
        if (!arrive(pool)) {
            gate_wait(pool, member, &pool->phase, phase);
        }
        sit(pool, member);
    }
}

static void *work(void *arg)
{
    worker *self = arg;
    es_pool *pool = self->pool;
    for (unsigned seen = 0;; seen++) {
        gate_wait(pool, self->member, &pool->start, seen);
        if (pool->job == NULL) {
            return NULL;
        }
        sit(pool, self->member);
        pool->job(pool->arg, self->member, pool->n);
        arrive(pool); /* the caller alone waits for the end */
    }
}

/* Workers never see the host's signals: Ctrl-C is for the thread that can do something about it. */
static es_status start_workers(es_pool *pool)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    es_status status = ES_OK;
    for (int32_t i = 0; i < pool->n - 1 && status == ES_OK; i++) {
        pool->worker[i].pool = pool;
        pool->worker[i].member = i + 1;
        if (pthread_create(&pool->worker[i].thread, NULL, work, &pool->worker[i]) != 0) {
            status = es_fail(ES_ERR_MEMORY, "threads: the system started %d of %d",
                             (int)(i + 1), (int)pool->n);
        } else {
            pool->n_started++;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}

es_status es_pool_new(int32_t n, es_pool **out)
{
    if (n < 1) {
        return es_fail(ES_ERR_ARGUMENT, "threads: expected 1 or more, got %d", (int)n);
    }
    es_pool *pool = es_calloc(1, sizeof(*pool));
    worker *workers = es_calloc((size_t)n, sizeof(*workers));
    seat *seats = es_calloc((size_t)n, sizeof(*seats));
    if (pool == NULL || workers == NULL || seats == NULL) {
        es_free(pool);
        es_free(workers);
        es_free(seats);
        return es_fail(ES_ERR_MEMORY, "threads: no memory for %d", (int)n);
    }
    pool->n = n;
    pool->worker = workers;
    pool->seat = seats;
    for (int32_t i = 0; i < n; i++) {
        atomic_init(&seats[i].processor, NOWHERE);
    }
    pool->spin_seconds = n <= processors() ? SPIN_SECONDS : 0.0;
    atomic_init(&pool->arrived, 0);
    int has_start = gate_init(&pool->start);
    if (!has_start || !gate_init(&pool->phase)) {
        if (has_start) {
            gate_destroy(&pool->start);
        }
        es_free(seats);
        es_free(workers);
        es_free(pool);
        return es_fail(ES_ERR_MEMORY, "threads: the system has no more locks");
    }
    es_status status = start_workers(pool);
    if (status != ES_OK) {
        es_pool_free(pool);
        return status;
    }
    *out = pool;
    return ES_OK;
}

void es_pool_free(es_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    pool->job = NULL;
    gate_raise(&pool->start);
    for (int32_t i = 0; i < pool->n_started; i++) {
        pthread_join(pool->worker[i].thread, NULL);
    }
    gate_destroy(&pool->start);
    gate_destroy(&pool->phase);
    es_free(pool->seat);
    es_free(pool->worker);
    es_free(pool);
}

void es_pool_run(es_pool *pool, es_job job, void *arg)
{
    pool->job = job;
    pool->arg = arg;
    if (pool->n > 1) {
        gate_raise(&pool->start);
    }
    job(arg, 0, pool->n);
    es_pool_barrier(pool, 0);
}

int32_t es_pool_size(const es_pool *pool)
{
    return pool->n;
}
