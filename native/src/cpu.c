/* cpu.c - which vector features there are: CPUID and XCR0 on x86, the kernel's word on Arm. */
#include "cpu.h"

#include <string.h>

#include "edgespec.h"
#include "error.h"

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define ES_X86 1
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

typedef struct feature {
    const char *name;
    int is_present;
} feature;

#define MAX_FEATURES 16

#if defined(ES_X86)

typedef struct cpuid_words {
    unsigned a, b, c, d;
} cpuid_words;

/* Zeros where the processor has no such leaf. */
static cpuid_words cpuid(unsigned leaf, unsigned subleaf)
{
    cpuid_words r = {0, 0, 0, 0};
    if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) {
        r = (cpuid_words){0, 0, 0, 0};
    }
    return r;
}

/* Register states the operating system saves: bits of XCR0. */
static unsigned saved_states(unsigned leaf1_c)
{
    if ((leaf1_c >> 27 & 1) == 0) { /* OSXSAVE */
        return 0;
    }
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    (void)high;
    return low;
}

static size_t list_features(feature *out)
{
    cpuid_words one = cpuid(1, 0);
    cpuid_words seven = cpuid(7, 0);
    cpuid_words seven_one = seven.a >= 1 ? cpuid(7, 1) : (cpuid_words){0, 0, 0, 0};
    unsigned saved = saved_states(one.c);
    int ymm = (saved & 0x06) == 0x06;        /* XMM, upper YMM */
    int zmm = ymm && (saved & 0xE0) == 0xE0; /* masks, upper ZMM, ZMM 16 to 31 */
    size_t n = 0;
#define ADD(label, word, bit, state) \
    out[n++] = (feature){label, ((word) >> (bit) & 1) != 0 && (state)}
    ADD("sse4_1", one.c, 19, 1);
    ADD("avx", one.c, 28, ymm);
    ADD("avx2", seven.b, 5, ymm);
    ADD("fma", one.c, 12, ymm);
    ADD("f16c", one.c, 29, ymm);
    ADD("avx_vnni", seven_one.a, 4, ymm);
    ADD("avx512f", seven.b, 16, zmm);
    ADD("avx512bw", seven.b, 30, zmm);
    ADD("avx512dq", seven.b, 17, zmm);
    ADD("avx512vl", seven.b, 31, zmm);
    ADD("avx512_vnni", seven.c, 11, zmm);
    ADD("avx512_vbmi", seven.c, 1, zmm);
#undef ADD
    return n;
}

#elif defined(__aarch64__)

static size_t list_features(feature *out)
{
    size_t n = 0;
    out[n++] = (feature){"neon", 1};
#if defined(__linux__)
    unsigned long caps = getauxval(AT_HWCAP);
    unsigned long caps2 = getauxval(AT_HWCAP2);
    out[n++] = (feature){"fp16", (caps >> 10 & 1) != 0};    /* HWCAP_ASIMDHP */
    out[n++] = (feature){"dotprod", (caps >> 20 & 1) != 0}; /* HWCAP_ASIMDDP */
    out[n++] = (feature){"sve", (caps >> 22 & 1) != 0};     /* HWCAP_SVE */
    out[n++] = (feature){"i8mm", (caps2 >> 13 & 1) != 0};   /* HWCAP2_I8MM */
#else
    /* What the compiler was told every processor of this system has. */
#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
    out[n++] = (feature){"fp16", 1};
#endif
#if defined(__ARM_FEATURE_DOTPROD)
    out[n++] = (feature){"dotprod", 1};
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
    out[n++] = (feature){"i8mm", 1};
#endif
#endif
    return n;
}

#else

static size_t list_features(feature *out)
{
    (void)out;
    return 0;
}

#endif

int es_cpu_has(const char *name)
{
    feature features[MAX_FEATURES];
    size_t n = list_features(features);
    for (size_t i = 0; i < n; i++) {
        if (strcmp(features[i].name, name) == 0) {
            return features[i].is_present;
        }
    }
    return 0;
}

es_status es_cpu_features(char *out, size_t size)
{
    if (out == NULL) {
        return es_fail(ES_ERR_ARGUMENT, "es_cpu_features: out is NULL");
    }
    feature features[MAX_FEATURES];
    size_t n = list_features(features);
    size_t used = 0;
    for (size_t i = 0; i < n; i++) {
        if (!features[i].is_present) {
            continue;
        }
        size_t separator = used > 0;
        size_t length = strlen(features[i].name);
        if (used + separator + length >= size) {
            return es_fail(ES_ERR_ARGUMENT, "es_cpu_features: %zu bytes are too few, give 256",
                           size);
        }
        if (separator) {
            out[used++] = ' ';
        }
        memcpy(out + used, features[i].name, length);
        used += length;
    }
    if (size == 0) {
        return es_fail(ES_ERR_ARGUMENT, "es_cpu_features: 0 bytes are too few, give 256");
    }
    out[used] = '\0';
    return ES_OK;
}
