/* dispatch.c - which table of kernels runs: what is compiled in, what the processor has, what the
   user asks for. Nothing else knows more than one variant. */
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "error.h"
#include "generic.h"

#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

extern const es_kernels es_kernels_avx2;
extern const es_kernels es_kernels_avxvnni;
extern const es_kernels es_kernels_avx512vnni;
extern const es_kernels es_kernels_neon_dotprod;
extern const es_kernels es_kernels_neon_i8mm;

/* The build defines ES_HAVE_<variant> for every variant it compiles. */
#if defined(ES_HAVE_avx2)
#define AVX2 &es_kernels_avx2
#else
#define AVX2 NULL
#endif
#if defined(ES_HAVE_avxvnni)
#define AVXVNNI &es_kernels_avxvnni
#else
#define AVXVNNI NULL
#endif
#if defined(ES_HAVE_avx512vnni)
#define AVX512VNNI &es_kernels_avx512vnni
#else
#define AVX512VNNI NULL
#endif
#if defined(ES_HAVE_neon_dotprod)
#define NEON_DOTPROD &es_kernels_neon_dotprod
#else
#define NEON_DOTPROD NULL
#endif
#if defined(ES_HAVE_neon_i8mm)
#define NEON_I8MM &es_kernels_neon_i8mm
#else
#define NEON_I8MM NULL
#endif

enum { MAX_NEEDS = 8 };

typedef struct variant {
    const char *name;
    const es_kernels *table;      /* NULL: not in this build */
    const char *needs[MAX_NEEDS]; /* features, the rest NULL */
} variant;

/* Best first; the last one needs nothing. */
static const variant variants[] = {
    {"avx512vnni", AVX512VNNI,
     {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}},
    {"avxvnni", AVXVNNI, {"avx2", "fma", "f16c", "avx_vnni"}},
    {"avx2", AVX2, {"avx2", "fma", "f16c"}},
    {"neon_i8mm", NEON_I8MM, {"fp16", "dotprod", "i8mm"}},
    {"neon_dotprod", NEON_DOTPROD, {"fp16", "dotprod"}},
    {"generic", &es_kernels_generic, {NULL}},
};

enum { N_VARIANTS = (int)(sizeof variants / sizeof variants[0]) };

static int runs_here(const variant *v)
{
    if (v->table == NULL) {
        return 0;
    }
    for (int i = 0; i < MAX_NEEDS && v->needs[i] != NULL; i++) {
        if (!es_cpu_has(v->needs[i])) {
            return 0;
        }
    }
    return 1;
}

const es_kernels *es_kernels_at(int32_t index)
{
    for (int i = 0; i < N_VARIANTS; i++) {
        if (variants[i].table != NULL && index-- == 0) {
            return variants[i].table;
        }
    }
    return NULL;
}

static const variant *runnable_at(int32_t index)
{
    for (int i = 0; i < N_VARIANTS; i++) {
        if (runs_here(&variants[i]) && index-- == 0) {
            return &variants[i];
        }
    }
    return NULL;
}

const char *es_cpu_variant(int32_t index)
{
    const variant *v = index >= 0 ? runnable_at(index) : NULL;
    return v != NULL ? v->name : NULL;
}

/* "avx512vnni, avx2, generic" */
static void list_runnable(char *out, size_t size)
{
    size_t used = 0;
    out[0] = '\0';
    for (int32_t i = 0; es_cpu_variant(i) != NULL; i++) {
        const char *parts[] = {i > 0 ? ", " : "", es_cpu_variant(i)};
        for (int p = 0; p < 2; p++) {
            size_t n = strlen(parts[p]);
            if (used + n < size) {
                memcpy(out + used, parts[p], n + 1);
                used += n;
            }
        }
    }
}

es_status es_kernels_choose(const char *name, const es_kernels **out)
{
    const char *source = "kernel variant";
    if (name == NULL || name[0] == '\0') {
        name = getenv("EDGESPEC_CPU");
        source = "EDGESPEC_CPU";
    }
    if (name == NULL || name[0] == '\0') {
        *out = runnable_at(0)->table;
        return ES_OK;
    }
    char here[128];
    list_runnable(here, sizeof here);
    for (int i = 0; i < N_VARIANTS; i++) {
        if (strcmp(variants[i].name, name) != 0) {
            continue;
        }
        if (runs_here(&variants[i])) {
            *out = variants[i].table;
            return ES_OK;
        }
        return es_fail(ES_ERR_ARGUMENT, "%s: %s: expected one of %s; %s lacks it", source, name,
                       here, variants[i].table != NULL ? "this processor" : "this build");
    }
    return es_fail(ES_ERR_ARGUMENT, "%s: expected one of %s, got '%s'", source, here, name);
}

/* ---- float mode ------------------------------------------------------------------------------ */

uint64_t es_fp_enter(void)
{
#if defined(__SSE__) || defined(_M_X64)
    uint64_t saved = _mm_getcsr();
    _mm_setcsr(0x1F80); /* exceptions masked, nearest, no flush to zero, no denormals as zero */
    return saved;
#elif defined(__aarch64__) && defined(__GNUC__)
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
    return saved;
#else
    return 0;
#endif
}

void es_fp_leave(uint64_t saved)
{
#if defined(__SSE__) || defined(_M_X64)
    _mm_setcsr((unsigned)saved);
#elif defined(__aarch64__) && defined(__GNUC__)
    __asm__ volatile("msr fpcr, %0" : : "r"(saved) : "memory");
#else
    (void)saved;
#endif
}
