/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel's text through NVIDIA's own compiler, where it is installed (MEMSCALE_NVRTC may name the library); exit status
 * 77 where it is not. No card is needed.
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
#include "fingerprint/fingerprint_table.h"

#define NEWEST_DRIVER 13
#define SKIPPED 77

static msc__rtc rtc;
static msc_context *ctx;
static msc_error err;

static const msc_program_text kernels = {"kernels", msc__fingerprint_cuda_text};

/* A card that the compiler does not know gets PTX of the one before it. */
static void adds_64_bits_at_once(void **state)
{
    msc__rtc_image ptx;

    (void)state;
    if (msc__rtc_compile(&rtc, ctx, &kernels, 999, &ptx, &err) != MSC_OK)
        fail_msg("%s", err.message);
    assert_non_null(strstr(ptx.bytes, ".entry msc_card_fingerprint"));
    assert_non_null(strstr(ptx.bytes, ".add.u64"));
    assert_non_null(strstr(ptx.bytes, "membar.gl"));
    assert_null(strstr(ptx.bytes, ".local")); /* a lane's words are registers */
    msc__rtc_image_end(ctx, &ptx);
}

static void machine_code(void **state)
{
    static const int capabilities[] = {80, 90};
    size_t i;

    (void)state;
    for (i = 0; i < sizeof capabilities / sizeof capabilities[0]; i++) {
        msc__rtc_image cubin;

        if (msc__rtc_compile(&rtc, ctx, &kernels, capabilities[i], &cubin, &err) != MSC_OK)
            fail_msg("%d: %s", capabilities[i], err.message);
        assert_memory_equal(cubin.bytes, "\177ELF", 4);
        msc__rtc_image_end(ctx, &cubin);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adds_64_bits_at_once),
        cmocka_unit_test(machine_code),
    };

    if (msc_context_create(NULL, &ctx, NULL) != MSC_OK)
        return 1;
    if (msc__rtc_open(&rtc, getenv("MEMSCALE_NVRTC"), NEWEST_DRIVER, &err) != MSC_OK) {
        (void)fprintf(stderr, "%s\n", err.message);
        msc_context_destroy(ctx);
        return SKIPPED;
    }
    return cmocka_run_group_tests_name("fingerprint_nvrtc", tests, NULL, NULL);
}
