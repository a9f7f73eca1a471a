/* The functions of fmath.h against libm in double: units in the last place, ends, NaN. */
#include "fmath.h"

#include "check.h"

static double ulp_of(double truth)
{
    int exponent;
    frexp(truth, &exponent);
    return ldexp(1.0, exponent - 24);
}

static void near(float got, double truth, double ulps)
{
    CHECK(fabs((double)got - truth) <= ulps * ulp_of(truth));
}

/* The 97th float behind x > 0. */
static float next_magnitude(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits += 97;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void test_exp(void)
{
    for (float a = 1e-10f; a <= 88.0f; a = next_magnitude(a)) {
        near(es_expf(a), exp((double)a), 1.0);
        if (a <= 87.0f) {
            near(es_expf(-a), exp(-(double)a), 1.0);
        }
    }
    CHECK(es_expf(0.0f) == 1.0f && es_expf(-0.0f) == 1.0f);
    CHECK(es_expf(-INFINITY) == es_expf(-87.0f) && es_expf(-1e30f) > 0.0f);
    CHECK(es_expf(INFINITY) == es_expf(88.0f) && isfinite(es_expf(1e30f)));
    CHECK(isnan(es_expf(NAN)) && isnan(es_expf(-NAN)));
}

static void test_tanh(void)
{
    for (float a = 1e-10f; a <= 20.0f; a = next_magnitude(a)) {
        near(es_tanhf(a), tanh((double)a), 2.0);
        CHECK(es_tanhf(-a) == -es_tanhf(a));
    }
    CHECK(es_tanhf(1e30f) == 1.0f && es_tanhf(-INFINITY) == -1.0f);
    CHECK(es_tanhf(0.0f) == 0.0f && signbit(es_tanhf(-0.0f)));
    CHECK(isnan(es_tanhf(NAN)));
}

static void test_silu_and_gelu(void)
{
    for (float a = 1e-10f; a <= 1e4f; a = next_magnitude(a)) {
        for (int sign = -1; sign <= 1; sign += 2) {
            float x = (float)sign * a;
            double u = 0.7978845608028654 * ((double)x + 0.044715 * pow((double)x, 3.0));
            if (x >= -80.0f) {
                near(es_siluf(x), (double)x / (1.0 + exp(-(double)x)), 3.0);
            } else {
                CHECK(es_siluf(x) <= 0.0f && es_siluf(x) > -2e-33f);
            }
            /* The exponent's own rounding is multiplied by its size. */
            double e = exp(-2.0 * u);
            double gelu = (double)x / (1.0 + e);
            if (u >= -40.0) {
                double ulps = 4.0 + 5.0 * fabs(u) * (e / (1.0 + e));
                near(es_geluf(x), gelu, ulps);
            } else {
                CHECK(es_geluf(x) <= 0.0f && es_geluf(x) > -1e-31f);
            }
        }
    }
    CHECK(es_siluf(0.0f) == 0.0f && es_geluf(0.0f) == 0.0f);
    CHECK(es_siluf(1e30f) == 1e30f && es_geluf(1e30f) == 1e30f);
    CHECK(es_geluf(-1e30f) <= 0.0f && es_geluf(-1e30f) > -1e-6f);
    CHECK(isnan(es_siluf(NAN)) && isnan(es_geluf(NAN)));
}

static void test_sincos(void)
{
    double s, c;
    for (int64_t i = 0; i < 2000000; i++) {
        double x = (double)i * 0.5369 + (double)(i % 1000) * 1e-7;
        es_sincos(x, &s, &c);
        CHECK(fabs(s - sin(x)) < 4e-16 && fabs(c - cos(x)) < 4e-16);
    }
    for (double x = 1e-12; x < 1e9; x *= 1.00037) {
        es_sincos(x, &s, &c);
        CHECK(fabs(s - sin(x)) < 4e-16 && fabs(c - cos(x)) < 4e-16);
    }
    es_sincos(0.0, &s, &c);
    CHECK(s == 0.0 && c == 1.0);
}

int main(void)
{
    test_exp();
    test_tanh();
    test_silu_and_gelu();
    test_sincos();
    return 0;
}
