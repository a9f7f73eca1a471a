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

/* n_bytes from the system and `slack` more; data is not yet moved into the slack. */
static int map(size_t n_bytes, size_t slack, es_pages *out)
{
    if (n_bytes == 0 || n_bytes > SIZE_MAX / 2 || fails_now()) {
        return 0;
    }
    void *base = mmap(NULL, n_bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                      -1, 0);
    if (base == MAP_FAILED) {
        return 0;
    }
    *out = (es_pages){base, n_bytes, base, n_bytes + slack};
    return 1;
}

int es_pages_new(size_t n_bytes, es_pages *out)
{
    enum { HUGE = 2 << 20 };
    /* Huge pages begin at multiples of their size, which small memory has no use for. */
    size_t slack = n_bytes >= HUGE ? HUGE : 0;
    if (!map(n_bytes, slack, out)) {
        return 0;
    }
    if (slack > 0) {
        out->data += (HUGE - (uintptr_t)out->base % HUGE) % HUGE;
#if defined(MADV_HUGEPAGE)
        madvise(out->data, n_bytes, MADV_HUGEPAGE); /* a wish */
#endif
    }
    return 1;
}

int es_pages_sparse(size_t n_bytes, es_pages *out)
{
    if (!map(n_bytes, 0, out)) {
        return 0;
    }
#if defined(MADV_NOHUGEPAGE)
    madvise(out->data, n_bytes, MADV_NOHUGEPAGE);
#endif
    return 1;
}

void es_pages_free(es_pages *pages)
{
    if (pages->data != NULL) {
        munmap(pages->base, pages->base_bytes);
    }
    *pages = (es_pages){0};
}
