/* alloc.c - pages from the system, and the failing allocator of the tests. */
#if defined(__linux__)
#define _GNU_SOURCE /* madvise, MAP_ANONYMOUS */
#endif

#include "alloc.h"

#include <sys/mman.h>

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

static int fails_now(void)
{
    return 0;
}

#endif

int es_pages_new(size_t n_bytes, es_pages *out)
{
    enum { HUGE = 2 << 20 };
    if (n_bytes == 0 || n_bytes > SIZE_MAX / 2 || fails_now()) {
        return 0;
    }
    /* Huge pages begin at multiples of their size, which small memory has no use for. */
    size_t slack = n_bytes >= HUGE ? HUGE : 0;
    void *base = mmap(NULL, n_bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                      -1, 0);
    if (base == MAP_FAILED) {
        return 0;
    }
    uint8_t *data = base;
    if (slack > 0) {
        data += (HUGE - (uintptr_t)base % HUGE) % HUGE;
#if defined(MADV_HUGEPAGE)
        madvise(data, n_bytes, MADV_HUGEPAGE); /* a wish */
#endif
    }
    *out = (es_pages){data, n_bytes, base, n_bytes + slack};
    return 1;
}

void es_pages_free(es_pages *pages)
{
    if (pages->data != NULL) {
        munmap(pages->base, pages->base_bytes);
    }
    *pages = (es_pages){0};
}
