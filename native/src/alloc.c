/* alloc.c - the failing allocator of the tests; nothing in a release build. */
#include "alloc.h"

#ifdef ES_TEST_ALLOC

long es_test_alloc_left = -1;

static int fails_now(void)
{
    if (es_test_alloc_left < 0) {
        return 0;
    }
    return es_test_alloc_left-- == 0;
}

void *es_malloc(size_t size)
{
    return fails_now() ? NULL : malloc(size);
}

void *es_calloc(size_t count, size_t size)
{
    return fails_now() ? NULL : calloc(count, size);
}

#else

typedef int es_alloc_is_plain; /* ISO C wants something in every file */

#endif
