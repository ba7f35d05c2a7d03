/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file context_fixture.h
 * A context for each test of a group, as its state. Whatever a test leaves in it fails that test.
 */
#ifndef MSC_TEST_CONTEXT_FIXTURE_H
#define MSC_TEST_CONTEXT_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "memscale/base.h"

static inline int context_setup(void **state)
{
    return msc_context_create(NULL, (msc_context **)state, NULL) == MSC_OK ? 0 : -1;
}

static inline int context_teardown(void **state)
{
    assert_int_equal(msc_context_held_bytes(*state), 0);
    msc_context_destroy(*state);
    return 0;
}

/** A test that is given a context. */
#define context_test(test) cmocka_unit_test_setup_teardown(test, context_setup, context_teardown)

#endif /* MSC_TEST_CONTEXT_FIXTURE_H */
