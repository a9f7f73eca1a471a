/* alloc.h - every allocation of the core goes through here, so that tests can make any one fail. */
#ifndef ES_ALLOC_H
#define ES_ALLOC_H

#include <stdlib.h>

#ifdef ES_TEST_ALLOC
/* Allocations left before one fails; negative: none ever does. */
extern long es_test_alloc_left;
void *es_malloc(size_t size);
void *es_calloc(size_t count, size_t size);
#else
#define es_malloc malloc
#define es_calloc calloc
#endif
#define es_free free

#endif
