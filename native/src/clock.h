/* clock.h - a clock that only goes forward. Include first: it asks for POSIX. */
#ifndef ES_CLOCK_H
#define ES_CLOCK_H

#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif

#include <time.h>

static inline double es_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
