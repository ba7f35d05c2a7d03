/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What only the CUDA device has: a library that is opened, a context that is put back, and a driver that says
 * no. On the stand-in (tests/fake_cuda), whose path is the argument; its books must be clean at the end.
 */
#include "device_fixture.h"
#include "fork_probe.h"
#include "oom/failing_alloc.h"

#include <dlfcn.h>

#include "device/cuda_dl.h"
#include "fake_cuda/fake_cuda.h"

#define CARD_BYTES (UINT64_C(64) << 20)
#define UNKNOWN_RESULT 12345

static msc_device_options options;
static msc__cuda_driver driver; /* the stand-in as the program sees it */
static fake_cuda_tell_function *tell;
static fake_cuda_fail_function *fail_call;

static fake_cuda_report books(void)
{
    fake_cuda_report report;

    tell(&report);
    return report;
}

static void *control(void *library, const char *name)
{
    void *found = dlsym(library, name);

    assert_non_null(found);
    return found;
}

static int open_library(void **state)
{
    void *library = dlopen(options.library, RTLD_NOW | RTLD_LOCAL);
    void *found;

    (void)state;
    assert_non_null(library);
    found = control(library, "fake_cuda_tell");
    memcpy(&tell, &found, sizeof tell);
    found = control(library, "fake_cuda_fail");
    memcpy(&fail_call, &found, sizeof fail_call);
    assert_int_equal(msc__cuda_open(&driver, options.library, NULL), MSC_OK);
    return 0;
}

/* ---- opening ------------------------------------------------------------------------------------------ */

static void refuses(msc_context *ctx, const msc_device_options *wrong, msc_status status, const char *named)
{
    msc_device *device = (msc_device *)(uintptr_t)8;
    msc_error err;

    memset(&err, 0, sizeof err);
    assert_int_equal(msc_device_create(ctx, wrong, &device, &err), status);
    assert_null(device);
    assert_int_equal(err.status, status);
    if (strstr(err.message, named) == NULL)
        fail_msg("'%s' does not name %s", err.message, named);
}

static void absent(void **state)
{
    msc_device_options wrong = options;
    msc_context *ctx;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    wrong.library = "/nowhere/libcuda.so";
    refuses(ctx, &wrong, MSC_ENODEV, "/nowhere/libcuda.so");
    wrong.library = "libc.so.6";
    refuses(ctx, &wrong, MSC_ENODEV, "cuInit");
    wrong = options;
    wrong.ordinal = 2;
    refuses(ctx, &wrong, MSC_ENODEV, "card 2");
    wrong.ordinal = UINT32_MAX;
    refuses(ctx, &wrong, MSC_ENODEV, "card 4294967295");
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
}

/* Each call on the way to a device may fail; nothing is left then. */
static void refused_opening(void **state)
{
    static const struct {
        const char *call;
        int result;
        msc_status status;
        const char *named;
    } cases[] = {
        {"cuInit", MSC__CU_NO_DEVICE, MSC_ENODEV, "CUDA_ERROR_NO_DEVICE"},
        {"cuInit", MSC__CU_NOT_INITIALIZED, MSC_EDRIVER, "spawn"},
        {"cuInit", UNKNOWN_RESULT, MSC_EDRIVER, "an unknown error"},
        {"cuDeviceGetCount", MSC__CU_NOT_SUPPORTED, MSC_EDRIVER, "count the cards"},
        {"cuDeviceGet", MSC__CU_INVALID_DEVICE, MSC_ENODEV, "card 0"},
        {"cuDeviceGetName", MSC__CU_INVALID_VALUE, MSC_EDRIVER, "name"},
        {"cuDevicePrimaryCtxRetain", MSC__CU_OUT_OF_MEMORY, MSC_EDEVMEM, "context of fake card 0"},
    };
    msc_context *ctx;
    size_t i;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fail_call(cases[i].call, 1, cases[i].result);
        refuses(ctx, &options, cases[i].status, cases[i].named);
        assert_int_equal(msc_context_held_bytes(ctx), 0);
        assert_int_equal(books().context_count, 0);
    }
    msc_context_destroy(ctx);
}

/* Two cards: names, memory, and nothing of one is the other's. */
static void two_cards(void **state)
{
    msc_device_options second = options;
    msc_device_memory memory;
    fixture first;
    fixture other;
    void *block;

    (void)state;
    second.ordinal = 1;
    fixture_open(&first, &options);
    fixture_open(&other, &second);
    assert_string_equal(msc_device_name(first.device), "fake card 0");
    assert_string_equal(msc_device_name(other.device), "fake card 1");
    assert_int_equal(msc_device_kind_of(other.device), MSC_DEVICE_CUDA);
    block = fixture_memory(&first, 1 << 20);
    OK(&first, msc_device_memory_now(first.device, &memory, &first.err));
    assert_int_equal(memory.total_bytes, CARD_BYTES);
    assert_int_equal(memory.free_bytes, CARD_BYTES - (1 << 20));
    OK(&other, msc_device_memory_now(other.device, &memory, &other.err));
    assert_int_equal(memory.free_bytes, CARD_BYTES);
    first.ops->memory_destroy(first.device, block, 1 << 20);
    assert_int_equal(books().memory_bytes, 0);
    fixture_close(&first);
    fixture_close(&other);
}

/* Two devices of one card share the primary context, which stays until the last of them goes. */
static void shared_context(void **state)
{
    fixture first;
    fixture other;

    (void)state;
    fixture_open(&first, &options);
    fixture_open(&other, &options);
    assert_int_equal(books().context_count, 2);
    fixture_close(&first);
    assert_int_equal(books().context_count, 1);
    other.ops->event_destroy(other.device, fixture_event(&other));
    fixture_close(&other);
    assert_int_equal(books().context_count, 0);
}

/* What was current before a call is current after it. */
static void context_put_back(void **state)
{
    msc__cu_context current = NULL;
    msc__cu_context mine = NULL;
    unsigned char *here;
    fixture fix;
    void *event;
    void *there;

    (void)state;
    assert_int_equal(driver.context_retain(&mine, 1), MSC__CU_SUCCESS);
    assert_int_equal(driver.context_push(mine), MSC__CU_SUCCESS);
    fixture_open(&fix, &options);
    here = fixture_host(&fix, 64);
    there = fixture_memory(&fix, 64);
    event = fixture_event(&fix);
    memset(here, 1, 64);
    fixture_copy(&fix, there, here, 64, MSC_COPY_IN, 0);
    fixture_record(&fix, event, 0);
    fixture_wait(&fix, 1, event);
    fixture_await(&fix, event);
    fail_call("cuMemAlloc_v2", 1, MSC__CU_OUT_OF_MEMORY);
    assert_int_equal(fix.ops->memory_create(fix.device, 64, &(void *){NULL}, &fix.err), MSC_EDEVMEM);
    fix.ops->event_destroy(fix.device, event);
    fix.ops->memory_destroy(fix.device, there, 64);
    fixture_host_end(&fix, here, 64);
    fixture_close(&fix);
    assert_int_equal(driver.context_pop(&current), MSC__CU_SUCCESS);
    assert_ptr_equal(current, mine);
    assert_int_equal(driver.context_release(1), MSC__CU_SUCCESS);
}

/* ---- a driver that says no ---------------------------------------------------------------------------- */

/* Status of each slot that has one, with the driver function behind it failing. */
static void refused_slots(void **state)
{
    msc_device_memory memory;
    unsigned char *here;
    fixture fix;
    void *event;
    void *there;
    void *made;

    (void)state;
    fixture_open(&fix, &options);
    here = fixture_host(&fix, 64);
    memset(here, 1, 64);
    there = fixture_memory(&fix, 64);
    event = fixture_event(&fix);

#define REFUSED(function, result, expected, words, slot, ...)                                                \
    do {                                                                                                     \
        fail_call(function, 1, result);                                                                      \
        made = here;                                                                                         \
        assert_int_equal(fix.ops->slot(fix.device, __VA_ARGS__, &fix.err), expected);                        \
        assert_int_equal(fix.err.status, expected);                                                          \
        assert_int_equal(fix.err.driver_code, result);                                                       \
        if (strstr(fix.err.message, words) == NULL)                                                          \
            fail_msg("'%s' does not say '%s'", fix.err.message, words);                                      \
    } while (0)

    REFUSED("cuCtxPushCurrent_v2", 201, MSC_EDRIVER, "CUDA_ERROR_INVALID_CONTEXT", event_query, event);
    REFUSED("cuMemGetInfo_v2", 719, MSC_EDRIVER, "CUDA_ERROR_LAUNCH_FAILED", memory_now, &memory);
    REFUSED("cuMemAlloc_v2", 2, MSC_EDEVMEM, "64 bytes of memory of fake card 0", memory_create, 64, &made);
    assert_null(made);
    REFUSED("cuMemHostRegister_v2", 2, MSC_ENOMEM, "ulimit -l", pin, here, 64);
    REFUSED("cuMemHostRegister_v2", 304, MSC_ENOMEM, "CUDA_ERROR_OPERATING_SYSTEM", pin, here, 64);
    REFUSED("cuMemHostRegister_v2", 712, MSC_EDRIVER, "ALREADY_REGISTERED", pin, here, 64);
    REFUSED("cuStreamCreate", 2, MSC_EDEVMEM, "create a stream", stream_create, &made);
    assert_null(made);
    REFUSED("cuStreamWaitEvent", 400, MSC_EDRIVER, "wait for event", stream_wait, fix.streams[0], event);
    REFUSED("cuEventCreate", 2, MSC_EDEVMEM, "create an event", event_create, &made);
    assert_null(made);
    REFUSED("cuEventRecord", 400, MSC_EDRIVER, "record event", event_record, event, fix.streams[0]);
    REFUSED("cuEventQuery", 719, MSC_EDRIVER, "unspecified launch failure", event_query, event);
    REFUSED("cuEventSynchronize", 719, MSC_EDRIVER, "CUDA_ERROR_LAUNCH_FAILED", event_wait, event);
    REFUSED("cuMemcpyDtoHAsync_v2", 1, MSC_EDRIVER, "64 bytes out of", copy, here, there, 64, MSC_COPY_OUT,
            fix.streams[0]);
    REFUSED("cuMemcpyHtoDAsync_v2", 1, MSC_EDRIVER, "64 bytes into", copy, there, here, 64, MSC_COPY_IN,
            fix.streams[0]);
#undef REFUSED

    fixture_copy(&fix, there, here, 64, MSC_COPY_IN, 0); /* and all is well again */
    fixture_record(&fix, event, 0);
    fixture_await(&fix, event);
    fix.ops->event_destroy(fix.device, event);
    fix.ops->memory_destroy(fix.device, there, 64);
    fixture_host_end(&fix, here, 64);
    fixture_close(&fix);
}

/* More than the system lets go: the message has the number, the limit, and what to do. */
static void pin_limit(void **state)
{
    const size_t most = 4u << 20; /* what main sets */
    unsigned char *memory = aligned_alloc(FIXTURE_PAGE_BYTES, 2 * most);
    fixture fix;

    (void)state;
    assert_non_null(memory);
    fixture_open(&fix, &options);
    OK(&fix, fix.ops->pin(fix.device, memory, most, &fix.err));
    assert_int_equal(fix.ops->pin(fix.device, memory + most, most, &fix.err), MSC_ENOMEM);
    assert_non_null(
        strstr(fix.err.message, "cannot pin 4194304 bytes: CUDA_ERROR_OUT_OF_MEMORY; ulimit -l is "));
    fix.ops->unpin(fix.device, memory, most);
    OK(&fix, fix.ops->pin(fix.device, memory + most, most, &fix.err));
    fix.ops->unpin(fix.device, memory + most, most);
    fixture_close(&fix);
    free(memory);
}

/* Memory that is not pinned is copied all the same. */
static void pageable(void **state)
{
    uint64_t before = books().pageable_copy_count;
    unsigned char here[300];
    unsigned char back[300];
    fixture fix;
    void *there;
    void *event;

    (void)state;
    fixture_open(&fix, &options);
    there = fixture_memory(&fix, sizeof here);
    event = fixture_event(&fix);
    fixture_fill(here, sizeof here, 4);
    fixture_copy(&fix, there, here, sizeof here, MSC_COPY_IN, 0);
    fixture_copy(&fix, back, there, sizeof here, MSC_COPY_OUT, 0);
    fixture_record(&fix, event, 0);
    fixture_await(&fix, event);
    assert_memory_equal(here, back, sizeof here);
    assert_int_equal(books().pageable_copy_count, before + 2);
    fix.ops->event_destroy(fix.device, event);
    fix.ops->memory_destroy(fix.device, there, sizeof here);
    fixture_close(&fix);
}

/* ---- memory and processes ----------------------------------------------------------------------------- */

static void no_memory(void **state)
{
    static failing_alloc heap;
    msc_context *ctx;

    (void)state;
    failing_alloc_init(&heap, 1);
    ctx = failing_alloc_context(&heap);
    refuses(ctx, &options, MSC_ENOMEM, "a device");
    msc_context_destroy(ctx);
    assert_true(failing_alloc_is_clean(&heap));
}

/* In the child: nothing reached the driver, which would have noted it. */
static int ask_books(void)
{
    return (int)books().violation_count;
}

static void forked(void **state)
{
    fixture fix;
    void *event;
    void *there;

    (void)state;
    fixture_open(&fix, &options);
    event = fixture_event(&fix);
    there = fixture_memory(&fix, 64);
    assert_int_equal(fork_probe(&fix, event, there, ask_books), 0);
    fixture_record(&fix, event, 0);
    fixture_await(&fix, event);
    fix.ops->event_destroy(fix.device, event);
    fix.ops->memory_destroy(fix.device, there, 64);
    fixture_close(&fix);
}

static void clean_books(void **state)
{
    fake_cuda_report report = books();

    (void)state;
    if (report.violation_count > 0)
        fail_msg("%s", report.first_violation);
    assert_int_equal(report.left_count, 0);
    assert_int_equal(report.context_count, 0);
    assert_int_equal(report.object_count, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        {"device_cuda/absent", absent, NULL, NULL, NULL},
        {"device_cuda/refused-opening", refused_opening, NULL, NULL, NULL},
        {"device_cuda/two-cards", two_cards, NULL, NULL, NULL},
        {"device_cuda/shared-context", shared_context, NULL, NULL, NULL},
        {"device_cuda/context-put-back", context_put_back, NULL, NULL, NULL},
        {"device_cuda/refused-slots", refused_slots, NULL, NULL, NULL},
        {"device_cuda/pin-limit", pin_limit, NULL, NULL, NULL},
        {"device_cuda/pageable", pageable, NULL, NULL, NULL},
        {"device_cuda/no-memory", no_memory, NULL, NULL, NULL},
        {"device_cuda/forked", forked, NULL, NULL, NULL},
        {"device_cuda/clean-books", clean_books, NULL, NULL, NULL},
    };

    if (argc != 2 || setenv("FAKE_CUDA_BYTES", "67108864", 1) != 0 ||
        setenv("FAKE_CUDA_PIN_LIMIT_BYTES", "4194304", 1) != 0)
        return 1;
    options = msc_device_options_default();
    options.kind = MSC_DEVICE_CUDA;
    options.library = argv[1];
    return cmocka_run_group_tests(tests, open_library, NULL);
}
