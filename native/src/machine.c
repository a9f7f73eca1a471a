/*
 * machine.c - what this processor can do at best: read bandwidth, int8 rate.
 *
 * The two rates bound any decoder: weights pass through memory once per forward, and every row
 * costs one multiply-accumulate per weight. Kernels here do nothing useful, only as fast as they
 * can; each runs on the calling thread, so a host starts one call per core and adds the rates.
 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */

#include "edgespec.h"

#include <time.h>

#include "cpu.h"
#include "error.h" /* es_fail */

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define ES_X86 1
#include <immintrin.h>
#define TARGET(features) __attribute__((target(features)))
#if (defined(__clang__) && __clang_major__ >= 14) || (!defined(__clang__) && __GNUC__ >= 12)
#define ES_AVX_VNNI 1 /* older compilers do not know the feature's name */
#endif
#elif defined(__aarch64__) && defined(__GNUC__)
#define ES_ARM64 1
#include <arm_neon.h>
#endif

static double now_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- reading ----------------------------------------------------------------------------- */

/* Sums kept at a time, 8 bytes each: four AVX-512 registers, enough loads in flight. */
#define LANES 32

/* Every 64-bit word once. Inlined into one function per ISA, vectorised there by the compiler. */
static inline __attribute__((always_inline)) uint64_t read_words(const uint64_t *words,
                                                                 size_t n_words)
{
    uint64_t lane[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= n_words; i += LANES) {
        for (size_t j = 0; j < LANES; j++) {
            lane[j] ^= words[i + j];
        }
    }
    uint64_t sum = 0;
    for (size_t j = 0; j < LANES; j++) {
        sum ^= lane[j];
    }
    for (; i < n_words; i++) {
        sum ^= words[i];
    }
    return sum;
}

typedef uint64_t (*read_fn)(const uint64_t *words, size_t n_words);

static uint64_t read_portable(const uint64_t *words, size_t n_words)
{
    return read_words(words, n_words);
}

#if defined(ES_X86)
TARGET("avx2") static uint64_t read_avx2(const uint64_t *words, size_t n_words)
{
    return read_words(words, n_words);
}

/* Written out: without prefer-vector-width flags compilers use half the register here. */
TARGET("avx512f") static uint64_t read_avx512(const uint64_t *words, size_t n_words)
{
    __m512i a = _mm512_setzero_si512();
    __m512i b = a, c = a, d = a;
    size_t i = 0;
    for (; i + 32 <= n_words; i += 32) {
        a = _mm512_xor_si512(a, _mm512_loadu_si512(words + i));
        b = _mm512_xor_si512(b, _mm512_loadu_si512(words + i + 8));
        c = _mm512_xor_si512(c, _mm512_loadu_si512(words + i + 16));
        d = _mm512_xor_si512(d, _mm512_loadu_si512(words + i + 24));
    }
    uint64_t lane[8];
    _mm512_storeu_si512(lane, _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d)));
    uint64_t sum = 0;
    for (size_t j = 0; j < 8; j++) {
        sum ^= lane[j];
    }
    for (; i < n_words; i++) {
        sum ^= words[i];
    }
    return sum;
}
#endif

static read_fn choose_read(void)
{
#if defined(ES_X86)
    if (es_cpu_has("avx512f")) {
        return read_avx512;
    }
    if (es_cpu_has("avx2")) {
        return read_avx2;
    }
#endif
    return read_portable;
}

es_status es_measure_read(const void *data, size_t n_bytes, double seconds,
                          double *bytes_per_second, uint64_t *checksum)
{
    if (data == NULL || bytes_per_second == NULL || checksum == NULL) {
        return es_fail(ES_ERR_ARGUMENT, "es_measure_read: a pointer is NULL");
    }
    if (n_bytes < 8 || (uintptr_t)data % 8 != 0) {
        return es_fail(ES_ERR_ARGUMENT,
                       "es_measure_read: expected at least 8 bytes aligned to 8, got %zu bytes",
                       n_bytes);
    }
    if (!(seconds > 0.0 && seconds <= 60.0)) {
        return es_fail(ES_ERR_ARGUMENT, "es_measure_read: seconds: expected 0 < s <= 60, got %g",
                       seconds);
    }
    read_fn read = choose_read();
    size_t n_words = n_bytes / 8;
    double start = now_seconds();
    double elapsed = 0.0;
    double total = 0.0;
    uint64_t sum = 0;
    do {
        sum = read(data, n_words);
        total += (double)(n_words * 8);
        elapsed = now_seconds() - start;
    } while (elapsed < seconds);
    *checksum = sum;
    *bytes_per_second = total / (elapsed > 0.0 ? elapsed : 1e-9);
    return ES_OK;
}

/* ---- int8 multiply-accumulate ------------------------------------------------------------ */

#define INT8_BYTES 512 /* one operand; both stay in L1 */

/* repeat times sum(a[i] * b[i]) over INT8_BYTES; a unsigned, b signed, as the kernels do it. */
typedef int32_t (*int8_fn)(const uint8_t *a, const int8_t *b, size_t repeat);

typedef struct int8_kernel {
    const char *name;
    int8_fn run;
} int8_kernel;

static int32_t int8_portable(const uint8_t *a, const int8_t *b, size_t repeat)
{
    uint32_t sum = 0;
    for (size_t r = 0; r < repeat; r++) {
        int32_t dot = 0;
        for (size_t i = 0; i < INT8_BYTES; i++) {
            dot += (int32_t)a[i] * b[i];
        }
        sum += (uint32_t)dot;
#if defined(__GNUC__)
        __asm__ volatile("" : : : "memory"); /* or the loop over r becomes one multiplication */
#endif
    }
    return (int32_t)sum;
}

#if defined(ES_X86)
/* Products pairwise in int16, which saturates above 2 * 127 * 127: a stays below 128. */
TARGET("avx2") static int32_t int8_avx2(const uint8_t *a, const int8_t *b, size_t repeat)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i acc[4];
    for (int j = 0; j < 4; j++) {
        acc[j] = _mm256_setzero_si256();
    }
    for (size_t r = 0; r < repeat; r++) {
        for (size_t i = 0; i < INT8_BYTES; i += 128) {
            for (size_t j = 0; j < 4; j++) {
                __m256i x = _mm256_loadu_si256((const __m256i *)(a + i + 32 * j));
                __m256i y = _mm256_loadu_si256((const __m256i *)(b + i + 32 * j));
                __m256i pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), ones);
                acc[j] = _mm256_add_epi32(acc[j], pairs);
            }
        }
        __asm__ volatile("" : : : "memory"); /* or the products are computed once */
    }
    uint32_t lane[8];
    __m256i all = _mm256_add_epi32(_mm256_add_epi32(acc[0], acc[1]),
                                   _mm256_add_epi32(acc[2], acc[3]));
    _mm256_storeu_si256((__m256i *)lane, all);
    uint32_t sum = 0;
    for (int j = 0; j < 8; j++) {
        sum += lane[j];
    }
    return (int32_t)sum;
}

/* One operand in registers, the other in memory, eight sums to cover the latency. */
#if defined(ES_AVX_VNNI)
TARGET("avx2,avxvnni")
static int32_t int8_avx_vnni(const uint8_t *a, const int8_t *b, size_t repeat)
{
    __m256i acc[8], x[8];
    for (int j = 0; j < 8; j++) {
        acc[j] = _mm256_setzero_si256();
    }
    for (size_t i = 0; i < INT8_BYTES; i += 256) {
        for (size_t j = 0; j < 8; j++) {
            x[j] = _mm256_loadu_si256((const __m256i *)(a + i + 32 * j));
        }
        for (size_t r = 0; r < repeat; r++) {
            for (size_t j = 0; j < 8; j++) {
                __m256i y = _mm256_loadu_si256((const __m256i *)(b + i + 32 * j));
                acc[j] = _mm256_dpbusd_avx_epi32(acc[j], x[j], y);
            }
        }
    }
    __m256i all = acc[0];
    for (int j = 1; j < 8; j++) {
        all = _mm256_add_epi32(all, acc[j]);
    }
    uint32_t lane[8];
    _mm256_storeu_si256((__m256i *)lane, all);
    uint32_t sum = 0;
    for (int j = 0; j < 8; j++) {
        sum += lane[j];
    }
    return (int32_t)sum;
}
#endif

TARGET("avx512f,avx512bw,avx512vnni")
static int32_t int8_avx512_vnni(const uint8_t *a, const int8_t *b, size_t repeat)
{
    __m512i acc[8], x[8];
    for (int j = 0; j < 8; j++) {
        acc[j] = _mm512_setzero_si512();
        x[j] = _mm512_loadu_si512(a + 64 * j);
    }
    for (size_t r = 0; r < repeat; r++) {
        for (int j = 0; j < 8; j++) {
            acc[j] = _mm512_dpbusd_epi32(acc[j], x[j], _mm512_loadu_si512(b + 64 * j));
        }
    }
    __m512i all = acc[0];
    for (int j = 1; j < 8; j++) {
        all = _mm512_add_epi32(all, acc[j]);
    }
    uint32_t lane[16];
    _mm512_storeu_si512(lane, all);
    uint32_t sum = 0;
    for (int j = 0; j < 16; j++) {
        sum += lane[j];
    }
    return (int32_t)sum;
}
#endif

#if defined(ES_ARM64) && defined(__ARM_FEATURE_DOTPROD)
/* Signed by signed: a stays below 128, so the sums agree with the other kernels. */
static int32_t int8_neon_dotprod(const uint8_t *a, const int8_t *b, size_t repeat)
{
    int32x4_t acc[8];
    for (int j = 0; j < 8; j++) {
        acc[j] = vdupq_n_s32(0);
    }
    for (size_t r = 0; r < repeat; r++) {
        for (size_t i = 0; i < INT8_BYTES; i += 128) {
            for (size_t j = 0; j < 8; j++) {
                int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(a + i + 16 * j));
                acc[j] = vdotq_s32(acc[j], x, vld1q_s8(b + i + 16 * j));
            }
        }
        __asm__ volatile("" : : : "memory");
    }
    uint32_t sum = 0;
    for (int j = 0; j < 8; j++) {
        sum += (uint32_t)vaddvq_s32(acc[j]);
    }
    return (int32_t)sum;
}
#endif

#define MAX_KERNELS 4

/* The kernels this processor runs, best first, the portable one last. */
static size_t list_kernels(int8_kernel *out)
{
    size_t n = 0;
#if defined(ES_X86)
    if (es_cpu_has("avx512_vnni") && es_cpu_has("avx512bw")) {
        out[n++] = (int8_kernel){"avx512_vnni", int8_avx512_vnni};
    }
#if defined(ES_AVX_VNNI)
    if (es_cpu_has("avx_vnni")) {
        out[n++] = (int8_kernel){"avx_vnni", int8_avx_vnni};
    }
#endif
    if (es_cpu_has("avx2")) {
        out[n++] = (int8_kernel){"avx2", int8_avx2};
    }
#elif defined(ES_ARM64) && defined(__ARM_FEATURE_DOTPROD)
    if (es_cpu_has("dotprod")) {
        out[n++] = (int8_kernel){"neon_dotprod", int8_neon_dotprod};
    }
#endif
    out[n++] = (int8_kernel){"portable", int8_portable};
    return n;
}

const char *es_int8_kernel(int32_t index)
{
    int8_kernel kernels[MAX_KERNELS];
    size_t n = list_kernels(kernels);
    return index >= 0 && (size_t)index < n ? kernels[index].name : NULL;
}

es_status es_measure_int8(int32_t index, double seconds, double *macs_per_second,
                          int32_t *checksum)
{
    int8_kernel kernels[MAX_KERNELS];
    size_t n = list_kernels(kernels);
    if (macs_per_second == NULL || checksum == NULL) {
        return es_fail(ES_ERR_ARGUMENT, "es_measure_int8: a pointer is NULL");
    }
    if (index < 0 || (size_t)index >= n) {
        return es_fail(ES_ERR_ARGUMENT,
                       "es_measure_int8: kernel: expected 0..%zu on this processor, got %d", n - 1,
                       (int)index);
    }
    if (!(seconds > 0.0 && seconds <= 60.0)) {
        return es_fail(ES_ERR_ARGUMENT, "es_measure_int8: seconds: expected 0 < s <= 60, got %g",
                       seconds);
    }
    uint8_t a[INT8_BYTES];
    int8_t b[INT8_BYTES];
    for (int i = 0; i < INT8_BYTES; i++) {
        a[i] = (uint8_t)(i * 7 % 128);
        b[i] = (int8_t)(i * 5 % 255 - 127);
    }
    const size_t repeat = 2048;
    double start = now_seconds();
    double elapsed = 0.0;
    double total = 0.0;
    int32_t sum = 0;
    do {
        sum = kernels[index].run(a, b, repeat);
        total += (double)(repeat * INT8_BYTES);
        elapsed = now_seconds() - start;
    } while (elapsed < seconds);
    *checksum = sum;
    *macs_per_second = total / (elapsed > 0.0 ? elapsed : 1e-9);
    return ES_OK;
}
