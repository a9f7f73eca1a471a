/* Which kernels are chosen: by the processor, by name, by EDGESPEC_CPU; and the float mode. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "cpu.h"
#include "kernels/kernels.h"

static const char *const known[] = {"avx512vnni", "avxvnni",      "avx2",
                                    "neon_i8mm",  "neon_dotprod", "generic"};

static int runs_here(const char *name)
{
    for (int32_t i = 0; es_cpu_variant(i) != NULL; i++) {
        if (strcmp(es_cpu_variant(i), name) == 0) {
            return 1;
        }
    }
    return 0;
}

static int is_built(const char *name)
{
    for (int32_t i = 0; es_kernels_at(i) != NULL; i++) {
        if (strcmp(es_kernels_at(i)->name, name) == 0) {
            return 1;
        }
    }
    return 0;
}

static void test_tables_are_complete(void)
{
    int32_t n = 0;
    for (; es_kernels_at(n) != NULL; n++) {
        const es_kernels *k = es_kernels_at(n);
        CHECK(k->name != NULL);
        CHECK(k->gemm && k->quantize && k->rms_norm && k->rope && k->swiglu && k->geglu);
        CHECK(k->add && k->scale && k->attn_scores && k->attn_softmax && k->attn_mix);
        CHECK(k->kv_store_key && k->kv_store_value);
    }
    CHECK(n >= 1);
    CHECK(strcmp(es_kernels_at(n - 1)->name, "generic") == 0);
    CHECK(es_kernels_at(-1) == NULL && es_kernels_at(n + 1) == NULL);
}

static void test_variants_are_tables_in_order(void)
{
    int32_t at = 0;
    int32_t n = 0;
    for (; es_cpu_variant(n) != NULL; n++) {
        while (strcmp(es_kernels_at(at)->name, es_cpu_variant(n)) != 0) {
            at++;
        }
    }
    CHECK(n >= 1);
    CHECK(strcmp(es_cpu_variant(n - 1), "generic") == 0);
    CHECK(es_cpu_variant(-1) == NULL);
}

static void test_features_decide(void)
{
    int avx2 = es_cpu_has("avx2") && es_cpu_has("fma") && es_cpu_has("f16c");
    CHECK(runs_here("avx2") == (is_built("avx2") && avx2));
    CHECK(runs_here("avxvnni") == (is_built("avxvnni") && avx2 && es_cpu_has("avx_vnni")));
    int avx512 = es_cpu_has("avx512bw") && es_cpu_has("avx512dq") && es_cpu_has("avx512vl");
    CHECK(runs_here("avx512vnni") ==
          (is_built("avx512vnni") && avx2 && avx512 && es_cpu_has("avx512_vnni")));
    int dotprod = es_cpu_has("fp16") && es_cpu_has("dotprod");
    CHECK(runs_here("neon_dotprod") == (is_built("neon_dotprod") && dotprod));
    CHECK(runs_here("neon_i8mm") == (is_built("neon_i8mm") && dotprod && es_cpu_has("i8mm")));
    CHECK(es_cpu_has("no_such_feature") == 0);
}

static void test_choice(void)
{
    const es_kernels *chosen = NULL;
    unsetenv("EDGESPEC_CPU");
    CHECK(es_kernels_choose(NULL, &chosen) == ES_OK);
    CHECK(strcmp(chosen->name, es_cpu_variant(0)) == 0);
    CHECK(es_kernels_choose("", &chosen) == ES_OK);
    CHECK(strcmp(chosen->name, es_cpu_variant(0)) == 0);
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        chosen = NULL;
        es_status status = es_kernels_choose(known[i], &chosen);
        if (runs_here(known[i])) {
            CHECK(status == ES_OK);
            CHECK(strcmp(chosen->name, known[i]) == 0);
        } else {
            CHECK(status == ES_ERR_ARGUMENT);
            CHECK(chosen == NULL);
            CHECK(strstr(es_error_message(), known[i]) != NULL);
            CHECK(strstr(es_error_message(), "generic") != NULL);
        }
    }
    CHECK(es_kernels_choose("sse9", &chosen) == ES_ERR_ARGUMENT);
    CHECK(strstr(es_error_message(), "'sse9'") != NULL);
    for (int32_t i = 0; es_cpu_variant(i) != NULL; i++) {
        CHECK(strstr(es_error_message(), es_cpu_variant(i)) != NULL);
    }
}

static void test_environment(void)
{
    const es_kernels *chosen = NULL;
    CHECK(setenv("EDGESPEC_CPU", "generic", 1) == 0);
    CHECK(es_kernels_choose(NULL, &chosen) == ES_OK);
    CHECK(strcmp(chosen->name, "generic") == 0);
    CHECK(es_kernels_choose(es_cpu_variant(0), &chosen) == ES_OK); /* a name goes first */
    CHECK(strcmp(chosen->name, es_cpu_variant(0)) == 0);
    CHECK(setenv("EDGESPEC_CPU", "fast", 1) == 0);
    CHECK(es_kernels_choose(NULL, &chosen) == ES_ERR_ARGUMENT);
    CHECK(strstr(es_error_message(), "EDGESPEC_CPU") != NULL);
    CHECK(setenv("EDGESPEC_CPU", "", 1) == 0);
    CHECK(es_kernels_choose(NULL, &chosen) == ES_OK);
    CHECK(strcmp(chosen->name, es_cpu_variant(0)) == 0);
    unsetenv("EDGESPEC_CPU");
}

/* 1 when the smallest normal float divided by two is not flushed to zero. */
static int keeps_denormals(void)
{
    volatile float smallest = 0x1p-126f;
    volatile float half = smallest * 0.5f;
    return half != 0.0f;
}

#if defined(__x86_64__)
#include <xmmintrin.h>
static void flush_denormals(void)
{
    _mm_setcsr(_mm_getcsr() | 0x8040);
}
#elif defined(__aarch64__)
static void flush_denormals(void)
{
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)1 << 24));
}
#else
static void flush_denormals(void)
{
}
#endif

static void test_float_mode(void)
{
    uint64_t at_start = es_fp_enter();
    flush_denormals();
    int flushed = !keeps_denormals();
    uint64_t saved = es_fp_enter();
    CHECK(keeps_denormals());
    es_fp_leave(saved);
    CHECK(keeps_denormals() == !flushed);
    es_fp_leave(at_start);
    CHECK(keeps_denormals());
#if defined(__x86_64__) || defined(__aarch64__)
    CHECK(flushed);
#endif
}

static void test_halves(void)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float value = es_half_to_float((uint16_t)h);
        uint16_t back = es_float_to_half(value);
        int is_nan = (h & 0x7C00) == 0x7C00 && (h & 0x3FF) != 0;
        CHECK(is_nan == (value != value));
        CHECK(back == (is_nan ? h | 0x200 : h));
        if (is_nan || (h & 0x7FFF) >= 0x7BFF) {
            continue;
        }
        /* Between two neighbours the nearer one, at the middle the even one. */
        float next = es_half_to_float((uint16_t)(h + 1));
        float middle = value * 0.5f + next * 0.5f;
        CHECK(es_float_to_half(middle) == (h & 1 ? h + 1 : h));
        CHECK(es_float_to_half(nextafterf(middle, value)) == h);
        CHECK(es_float_to_half(nextafterf(middle, next)) == h + 1);
    }
    CHECK(es_float_to_half(65519.0f) == 0x7BFF);
    CHECK(es_float_to_half(65520.0f) == 0x7C00);
    CHECK(es_float_to_half(-1e30f) == 0xFC00);
}

int main(void)
{
    test_tables_are_complete();
    test_variants_are_tables_in_order();
    test_features_decide();
    test_choice();
    test_environment();
    test_float_mode();
    test_halves();
    return 0;
}
