/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels' text through NVIDIA's own compiler, where it is installed (MEMSCALE_NVRTC may name the library); exit
 * status 77 where it is not. No card is needed to look at what it makes: that no product is fused with a sum, and that
 * quotients and roots are rounded correctly, which is what bits equal to the host's stand on.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda_rtc.h"
#include "optim/optim_cuda.h"

#define NEWEST_DRIVER 13
#define SKIPPED 77

static msc__rtc rtc;
static msc_context *ctx;
static msc_error err;

static const msc_program_text kernels = {"kernels", msc__optim_cuda_text};

static msc__rtc_image compile(int capability)
{
    msc__rtc_image image;

    if (msc__rtc_compile(&rtc, ctx, &kernels, capability, &image, &err) != MSC_OK)
        fail_msg("%d: %s", capability, err.message);
    return image;
}

/* Fails if `word` stands in the text; or, with `ending`, if it does and that does not follow. */
static void none_without(const char *text, const char *word, const char *ending)
{
    const char *at;

    for (at = strstr(text, word); at != NULL; at = strstr(at + 1, word))
        if (ending == NULL || strncmp(at + strlen(word), ending, strlen(ending)) != 0)
            fail_msg("%.60s", at);
}

/* A card that the compiler does not know gets PTX of the one before it; 7.1 was never made, nor was 99.9. */
static void rounded_one_by_one(void **state)
{
    static const int capabilities[] = {71, 999};
    size_t i;

    (void)state;
    for (i = 0; i < sizeof capabilities / sizeof capabilities[0]; i++) {
        msc__rtc_image ptx;
        msc_status status = msc__rtc_compile(&rtc, ctx, &kernels, capabilities[i], &ptx, &err);

        if (status == MSC_EUNSUPPORTED) /* a compiler that has left such cards behind */
            continue;
        if (status != MSC_OK)
            fail_msg("%s", err.message);
        assert_non_null(strstr(ptx.bytes, ".entry msc_card_step"));
        assert_non_null(strstr(ptx.bytes, "mul.rn.f32"));
        assert_non_null(strstr(ptx.bytes, "div.rn.f32"));
        assert_non_null(strstr(ptx.bytes, "sqrt.rn.f32"));
        none_without(ptx.bytes, "fma.", NULL);
        none_without(ptx.bytes, "mad.f", NULL);
        none_without(ptx.bytes, "mad.rn.f", NULL);
        none_without(ptx.bytes, ".approx", NULL);
        none_without(ptx.bytes, ".full", NULL);
        none_without(ptx.bytes, ".ftz", NULL);
        none_without(ptx.bytes, "\tmul.f", NULL); /* what names no rounding may be fused later */
        none_without(ptx.bytes, "\tadd.f", NULL);
        none_without(ptx.bytes, "\tsub.f", NULL);
        none_without(ptx.bytes, "\tdiv.", "rn.f32");
        none_without(ptx.bytes, "\tsqrt.", "rn.f32");
        msc__rtc_image_end(ctx, &ptx);
    }
}

/* What a driver gets for a card that the compiler knows. */
static void machine_code(void **state)
{
    static const int capabilities[] = {80, 90};
    size_t i;

    (void)state;
    for (i = 0; i < sizeof capabilities / sizeof capabilities[0]; i++) {
        msc__rtc_image cubin = compile(capabilities[i]);

        assert_memory_equal(cubin.bytes, "\177ELF", 4);
        msc__rtc_image_end(ctx, &cubin);
    }
}

static void messages(void **state)
{
    const msc_program_text wrong = {"a wrong text", "__global__ void kernel(int x) { y = x; }"};
    msc__rtc_image image;

    (void)state;
    assert_int_equal(msc__rtc_compile(&rtc, ctx, &wrong, 90, &image, &err), MSC_EDRIVER);
    assert_non_null(strstr(err.message, "cannot compile a wrong text"));
    assert_non_null(strstr(err.message, "\"y\" is undefined"));
    assert_int_equal(msc__rtc_compile(&rtc, ctx, &kernels, 10, &image, &err), MSC_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "and this one has 1.0"));
    assert_int_equal(msc_context_held_bytes(ctx), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rounded_one_by_one),
        cmocka_unit_test(machine_code),
        cmocka_unit_test(messages),
    };

    if (msc_context_create(NULL, &ctx, NULL) != MSC_OK)
        return 1;
    if (msc__rtc_open(&rtc, getenv("MEMSCALE_NVRTC"), NEWEST_DRIVER, &err) != MSC_OK) {
        (void)fprintf(stderr, "%s\n", err.message);
        msc_context_destroy(ctx);
        return SKIPPED;
    }
    return cmocka_run_group_tests_name("optim_nvrtc", tests, NULL, NULL);
}
