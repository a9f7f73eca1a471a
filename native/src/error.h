/* error.h - how the core reports failure: a status to the caller, a message to the thread. */
#ifndef ES_ERROR_H
#define ES_ERROR_H

#include "edgespec.h"

#if defined(__GNUC__)
#define ES_PRINTF(at, first) __attribute__((format(printf, at, first)))
#else
#define ES_PRINTF(at, first)
#endif

/* Stores the message of this thread and returns status, so that `return es_fail(...)` reads. */
es_status es_fail(es_status status, const char *format, ...) ES_PRINTF(2, 3);

#endif
