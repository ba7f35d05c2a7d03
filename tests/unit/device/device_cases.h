/* SPDX-License-Identifier: Apache-2.0 */
/** @file device_cases.h  The cases of test_device, which is made of several files. */
#ifndef MSC_TEST_DEVICE_CASES_H
#define MSC_TEST_DEVICE_CASES_H

#include "device_fixture.h"

#define FAST_BYTES 4096u

/** The device that is tested. */
extern msc_device_options tested_options;

/** A copy of so many bytes takes milliseconds, and they arrive at the end of that time. */
extern size_t tested_slow_bytes;

/* test_device_order.c: each would see wrong bytes, or wait for ever, if its promise did not hold. */
void order_within_a_stream(void **state);
void order_event_waits_for_work(void **state);
void order_stream_waits_for_event(void **state);
void order_overwriting_waits_for_reading(void **state);
void order_many_waiters(void **state);
void order_rerecord_releases_nobody(void **state);
void order_rerecord_holds_nobody(void **state);
void order_rerecord_is_what_counts(void **state);
void order_never_recorded(void **state);
void order_default_stream(void **state);
void order_stream_ends_its_work(void **state);
void order_event_goes_early(void **state);
void order_long_queue(void **state);

/* test_device_many.c: many copies and several threads at once. */
void many_random_copies(void **state);
void many_several_threads(void **state);
void many_waiting_threads(void **state);

#endif /* MSC_TEST_DEVICE_CASES_H */
