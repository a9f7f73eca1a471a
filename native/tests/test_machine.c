/* What the processor can do: every kernel agrees, bad arguments are refused. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "edgespec.h"

static void test_kernels_agree(void)
{
    int32_t n = 0;
    int32_t first = 0;
    for (; es_int8_kernel(n) != NULL; n++) {
        double rate = 0.0;
        int32_t checksum = 0;
        CHECK(es_measure_int8(n, 0.002, &rate, &checksum) == ES_OK);
        CHECK(rate > 0.0);
        if (n == 0) {
            first = checksum;
        }
        CHECK(checksum == first);
    }
    CHECK(n >= 1);
    CHECK(strcmp(es_int8_kernel(n - 1), "portable") == 0);
    CHECK(es_int8_kernel(-1) == NULL);
    double rate;
    int32_t checksum;
    CHECK(es_measure_int8(n, 0.002, &rate, &checksum) == ES_ERR_ARGUMENT);
    CHECK(es_measure_int8(-1, 0.002, &rate, &checksum) == ES_ERR_ARGUMENT);
    CHECK(es_measure_int8(0, 0.0, &rate, &checksum) == ES_ERR_ARGUMENT);
    CHECK(es_measure_int8(0, (double)NAN, &rate, &checksum) == ES_ERR_ARGUMENT);
    CHECK(es_measure_int8(0, 0.002, NULL, &checksum) == ES_ERR_ARGUMENT);
    CHECK(es_measure_int8(0, 0.002, &rate, NULL) == ES_ERR_ARGUMENT);
}

static void test_read_visits_every_word(void)
{
    uint64_t words[101];
    uint64_t expected = 0;
    for (size_t n = 1; n <= 101; n++) {
        words[n - 1] = n * 0x9E3779B97F4A7C15u;
        expected ^= words[n - 1];
        double rate = 0.0;
        uint64_t checksum = 0;
        CHECK(es_measure_read(words, n * 8, 1e-6, &rate, &checksum) == ES_OK);
        CHECK(checksum == expected);
        /* What is left below 8 bytes is not touched. */
        CHECK(es_measure_read(words, n * 8 + (n < 101 ? 7 : 0), 1e-6, &rate, &checksum) == ES_OK);
        CHECK(checksum == expected);
    }
    double rate;
    uint64_t checksum;
    CHECK(es_measure_read(NULL, 8, 1e-6, &rate, &checksum) == ES_ERR_ARGUMENT);
    CHECK(es_measure_read(words, 7, 1e-6, &rate, &checksum) == ES_ERR_ARGUMENT);
    CHECK(es_measure_read((char *)words + 1, 64, 1e-6, &rate, &checksum) == ES_ERR_ARGUMENT);
    CHECK(es_measure_read(words, 64, 61.0, &rate, &checksum) == ES_ERR_ARGUMENT);
}

static void test_feature_names(void)
{
    char names[256];
    CHECK(es_cpu_features(names, sizeof names) == ES_OK);
    size_t length = strlen(names);
    CHECK(strstr(names, "  ") == NULL);
    char exact[256];
    CHECK(es_cpu_features(exact, length + 1) == ES_OK);
    CHECK(strcmp(exact, names) == 0);
    CHECK(es_cpu_features(exact, length) == ES_ERR_ARGUMENT);
    CHECK(es_cpu_features(exact, 0) == ES_ERR_ARGUMENT);
    CHECK(es_cpu_features(NULL, 256) == ES_ERR_ARGUMENT);
}

int main(void)
{
    test_kernels_agree();
    test_read_visits_every_word();
    test_feature_names();
    return 0;
}
