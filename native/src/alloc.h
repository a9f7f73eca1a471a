/* alloc.h - every allocation of the core goes through here, so that tests can make any one fail. */
#ifndef ES_ALLOC_H
#define ES_ALLOC_H

#include <stddef.h>
#include <stdint.h>
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

/* Large memory of its own pages, zeroed, in huge ones where the system gives them on advice. */
typedef struct es_pages {
    uint8_t *data;       /* (n_bytes), at a multiple of 64; NULL: none */
    size_t n_bytes;
    void *base;          /* what the system gave */
    size_t base_bytes;
} es_pages;

/* 1, or 0 where there is no memory. */
int es_pages_new(size_t n_bytes, es_pages *out);
/* The same in small pages, so that memory never touched costs nothing. */
int es_pages_sparse(size_t n_bytes, es_pages *out);
void es_pages_free(es_pages *pages);                  /* zeroes it; a zeroed one is a no-op */

#endif
