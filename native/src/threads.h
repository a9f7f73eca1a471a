/* threads.h - a fixed pool: the caller is member 0, the others spin briefly and then sleep. */
#ifndef ES_THREADS_H
#define ES_THREADS_H

#include <stdint.h>

#include "edgespec.h"

typedef struct es_pool es_pool;

/* n >= 1 members, n - 1 of them started here. */
es_status es_pool_new(int32_t n, es_pool **out);
void es_pool_free(es_pool *pool);                       /* NULL is a no-op */
int32_t es_pool_size(const es_pool *pool);

/* Runs job(arg, member, n) on every member and returns when all are done. Not reentrant; one
   caller at a time. */
typedef void (*es_job)(void *arg, int32_t member, int32_t n);
void es_pool_run(es_pool *pool, es_job job, void *arg);

/* Inside a job: no member passes before all have come. */
void es_pool_barrier(es_pool *pool, int32_t member);

/* Part [*begin, *end) of `count` units that falls to `member`: contiguous, sizes differ by <= 1. */
void es_share(int32_t count, int32_t member, int32_t n, int32_t *begin, int32_t *end);

#endif
