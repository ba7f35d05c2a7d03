/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Status codes as text, and the filling of an error record: truncation, absence, and the rule that each
 * failure rewrites the whole record.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "base/error.h"
#include "memscale/base.h"

static void test_names(void **state)
{
    (void)state;
    assert_string_equal(msc_status_name(MSC_OK), "OK");
    assert_string_equal(msc_status_name(MSC_ENOMEM), "ENOMEM");
    assert_string_equal(msc_status_name(MSC_EDEVMEM), "EDEVMEM");
    assert_string_equal(msc_status_name(MSC_EINTERNAL), "EINTERNAL");
    assert_string_equal(msc_status_text(MSC_OK), "success");
    assert_string_equal(msc_status_text(MSC_EDEVMEM), "out of device memory");
}

/* Bindings and file formats store the numbers. */
static void test_values_are_stable(void **state)
{
    (void)state;
    assert_int_equal(MSC_OK, 0);
    assert_int_equal(MSC_EINVAL, 1);
    assert_int_equal(MSC_ENOMEM, 2);
    assert_int_equal(MSC_EDEVMEM, 3);
    assert_int_equal(MSC_EFORMAT, 10);
    assert_int_equal(MSC_EINTERNAL, 15);
    assert_true(MSC_STATUS_COUNT >= 16);
}

static void test_every_code_has_its_own_text(void **state)
{
    int i;
    int j;

    (void)state;
    for (i = 0; i < MSC_STATUS_COUNT; i++) {
        assert_true(strlen(msc_status_name((msc_status)i)) > 0);
        for (j = 0; j < i; j++) {
            assert_string_not_equal(msc_status_name((msc_status)i), msc_status_name((msc_status)j));
            assert_string_not_equal(msc_status_text((msc_status)i), msc_status_text((msc_status)j));
        }
    }
}

static void test_unknown_code(void **state)
{
    (void)state;
    assert_string_equal(msc_status_name(MSC_STATUS_COUNT), "UNKNOWN");
    assert_string_equal(msc_status_name((msc_status)-1), "UNKNOWN");
    assert_string_equal(msc_status_text(MSC_STATUS_COUNT), "unknown status");
}

static void test_fail_fills_record(void **state)
{
    msc_error err;

    (void)state;
    memset(&err, 0x7f, sizeof err);
    assert_int_equal(msc__fail(&err, MSC_EIO, "cannot read %s at byte %d", "a.graph", 12), MSC_EIO);
    assert_int_equal(err.status, MSC_EIO);
    assert_int_equal(err.driver_code, 0);
    assert_string_equal(err.message, "cannot read a.graph at byte 12");
}

static void test_fail_without_record(void **state)
{
    (void)state;
    assert_int_equal(msc__fail(NULL, MSC_ESTATE, "%s", "unseen"), MSC_ESTATE);
    assert_int_equal(msc__fail_memory(NULL, "unseen", 1), MSC_ENOMEM);
}

static void test_fail_truncates(void **state)
{
    char text[MSC_ERROR_MESSAGE_BYTES * 2];
    msc_error err;

    (void)state;
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    memset(&err, 0x7f, sizeof err);
    (void)msc__fail(&err, MSC_EINVAL, "%s", text);
    assert_int_equal(strlen(err.message), MSC_ERROR_MESSAGE_BYTES - 1);
}

static void test_fail_memory_names_request(void **state)
{
    msc_error err;

    (void)state;
    assert_int_equal(msc__fail_memory(&err, "operations", UINT64_MAX), MSC_ENOMEM);
    assert_int_equal(err.status, MSC_ENOMEM);
    assert_string_equal(err.message, "cannot get 18446744073709551615 bytes of host memory for operations");
}

static void test_version(void **state)
{
    const char *dot = strchr(msc_version(), '.');

    (void)state;
    assert_string_equal(msc_version(), MSC_VERSION_TEXT);
    assert_int_equal(msc_version()[0] - '0', MSC_VERSION_MAJOR);
    assert_non_null(dot);
    assert_int_equal(dot[1] - '0', MSC_VERSION_MINOR);
    assert_string_equal(msc_version(), MSC_EXPECTED_VERSION);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"code/names", test_names, NULL, NULL, NULL},
        {"code/values-are-stable", test_values_are_stable, NULL, NULL, NULL},
        {"code/own-text", test_every_code_has_its_own_text, NULL, NULL, NULL},
        {"code/unknown", test_unknown_code, NULL, NULL, NULL},
        {"fail/fills-record", test_fail_fills_record, NULL, NULL, NULL},
        {"fail/without-record", test_fail_without_record, NULL, NULL, NULL},
        {"fail/truncates", test_fail_truncates, NULL, NULL, NULL},
        {"fail/memory-names-request", test_fail_memory_names_request, NULL, NULL, NULL},
        {"version/agrees", test_version, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests_name("base/status", tests, NULL, NULL);
}
