/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in for the driver refuses and notes what no driver forgives: each wrong call is tried here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda_syms.h"
#include "device/cuda_types.h"
#include "fake_cuda/fake_cuda.h"
#include "optim/cuda/card_types.h"

#define BYTES 4096u

#define DECLARE(member, symbol, parameters) msc__cu_result symbol parameters;
MSC__CUDA_SYMBOLS(DECLARE)
#undef DECLARE

static uint64_t violations(void)
{
    fake_cuda_report report;

    fake_cuda_tell(&report);
    return report.violation_count;
}

#define GOOD(call) assert_int_equal(call, MSC__CU_SUCCESS)

/* The call is refused with this result, and noted as a mistake of the caller. */
#define WRONG(call, result)                                                                                  \
    do {                                                                                                     \
        uint64_t before_call = violations();                                                                 \
        assert_int_equal(call, result);                                                                      \
        assert_int_equal(violations(), before_call + 1);                                                     \
    } while (0)

static void before_init(void **state)
{
    msc__cu_context context;
    fake_cuda_report report;
    int count;

    (void)state;
    WRONG(cuDeviceGetCount(&count), MSC__CU_NOT_INITIALIZED);
    WRONG(cuDevicePrimaryCtxRetain(&context, 0), MSC__CU_NOT_INITIALIZED);
    fake_cuda_tell(&report);
    assert_string_equal(report.first_violation, "cuDeviceGetCount: cuInit was not called");
    WRONG(cuInit(1), MSC__CU_INVALID_VALUE);
    GOOD(cuInit(0));
    GOOD(cuDeviceGetCount(&count));
    assert_int_equal(count, 2);
}

static void contexts(void **state)
{
    msc__cu_context context;
    msc__cu_context popped;
    msc__cu_event event;

    (void)state;
    WRONG(cuEventCreate(&event, MSC__CU_EVENT_DISABLE_TIMING), MSC__CU_INVALID_CONTEXT);
    WRONG(cuCtxPopCurrent_v2(&popped), MSC__CU_INVALID_CONTEXT);
    WRONG(cuDevicePrimaryCtxRetain(&context, 7), MSC__CU_INVALID_DEVICE);
    WRONG(cuDevicePrimaryCtxRelease_v2(0), MSC__CU_INVALID_CONTEXT);
    WRONG(cuCtxPushCurrent_v2(NULL), MSC__CU_INVALID_CONTEXT);
    GOOD(cuDevicePrimaryCtxRetain(&context, 0));
    GOOD(cuCtxPushCurrent_v2(context));
    GOOD(cuDevicePrimaryCtxRelease_v2(0));
    WRONG(cuEventCreate(&event, MSC__CU_EVENT_DISABLE_TIMING), MSC__CU_INVALID_CONTEXT);
    GOOD(cuCtxPopCurrent_v2(&popped));
    assert_ptr_equal(popped, context);
}

/* Makes the context of card 0 current, with a stream, an event, a block and a pinned buffer. */
typedef struct set {
    msc__cu_context contexts[2];
    msc__cu_stream stream;
    msc__cu_event event;
    msc__cu_pointer block;
    unsigned char *here;
} set;

static void set_open(set *it)
{
    GOOD(cuDevicePrimaryCtxRetain(&it->contexts[0], 0));
    GOOD(cuDevicePrimaryCtxRetain(&it->contexts[1], 1));
    GOOD(cuCtxPushCurrent_v2(it->contexts[0]));
    GOOD(cuStreamCreate(&it->stream, MSC__CU_STREAM_NON_BLOCKING));
    GOOD(cuEventCreate(&it->event, MSC__CU_EVENT_DISABLE_TIMING));
    GOOD(cuMemAlloc_v2(&it->block, BYTES));
    it->here = calloc(2, BYTES);
    assert_non_null(it->here);
    GOOD(cuMemHostRegister_v2(it->here, BYTES, 0));
}

static void set_close(set *it)
{
    msc__cu_context popped;

    GOOD(cuMemHostUnregister(it->here));
    GOOD(cuMemFree_v2(it->block));
    GOOD(cuEventDestroy_v2(it->event));
    GOOD(cuStreamDestroy_v2(it->stream));
    GOOD(cuCtxPopCurrent_v2(&popped));
    GOOD(cuDevicePrimaryCtxRelease_v2(0));
    GOOD(cuDevicePrimaryCtxRelease_v2(1));
    free(it->here);
}

static void handles(void **state)
{
    msc__cu_stream stream;
    msc__cu_event event;
    set it;

    (void)state;
    set_open(&it);
    WRONG(cuStreamCreate(&stream, 0), MSC__CU_INVALID_VALUE);
    WRONG(cuEventCreate(&event, 0), MSC__CU_INVALID_VALUE);
    GOOD(cuStreamCreate(&stream, MSC__CU_STREAM_NON_BLOCKING));
    GOOD(cuEventCreate(&event, MSC__CU_EVENT_DISABLE_TIMING));
    GOOD(cuEventRecord(event, stream));
    GOOD(cuStreamDestroy_v2(stream));
    GOOD(cuEventSynchronize(event)); /* the stream's work goes on */
    GOOD(cuEventDestroy_v2(event));
    WRONG(cuStreamDestroy_v2(stream), MSC__CU_INVALID_HANDLE);
    WRONG(cuStreamDestroy_v2(NULL), MSC__CU_INVALID_HANDLE);
    WRONG(cuStreamSynchronize(stream), MSC__CU_INVALID_HANDLE);
    WRONG(cuEventDestroy_v2(event), MSC__CU_INVALID_HANDLE);
    WRONG(cuEventQuery(event), MSC__CU_INVALID_HANDLE);
    WRONG(cuEventSynchronize(event), MSC__CU_INVALID_HANDLE);
    WRONG(cuEventRecord(event, it.stream), MSC__CU_INVALID_HANDLE);
    WRONG(cuEventRecord(it.event, stream), MSC__CU_INVALID_HANDLE);
    WRONG(cuStreamWaitEvent(stream, it.event, 0), MSC__CU_INVALID_HANDLE);
    WRONG(cuStreamWaitEvent(it.stream, event, 0), MSC__CU_INVALID_HANDLE);
    WRONG(cuEventQuery((msc__cu_event)it.stream), MSC__CU_INVALID_HANDLE);
    WRONG(cuEventQuery((msc__cu_event)(uintptr_t)it.here), MSC__CU_INVALID_HANDLE);
    set_close(&it);
}

/* What was made on one card is nothing to another. */
static void other_cards(void **state)
{
    msc__cu_context popped;
    set it;

    (void)state;
    set_open(&it);
    GOOD(cuCtxPushCurrent_v2(it.contexts[1]));
    WRONG(cuEventRecord(it.event, NULL), MSC__CU_INVALID_HANDLE);
    WRONG(cuStreamSynchronize(it.stream), MSC__CU_INVALID_HANDLE);
    WRONG(cuMemFree_v2(it.block), MSC__CU_INVALID_VALUE);
    WRONG(cuMemcpyHtoDAsync_v2(it.block, it.here, 8, NULL), MSC__CU_INVALID_VALUE);
    GOOD(cuCtxPopCurrent_v2(&popped));
    set_close(&it);
}

static void memory(void **state)
{
    msc__cu_pointer block;
    size_t free_bytes;
    size_t total_bytes;
    set it;

    (void)state;
    set_open(&it);
    assert_int_equal(cuMemAlloc_v2(&block, (size_t)1 << 40), MSC__CU_OUT_OF_MEMORY);
    WRONG(cuMemFree_v2(it.block + 8), MSC__CU_INVALID_VALUE);
    WRONG(cuMemFree_v2((uintptr_t)it.here), MSC__CU_INVALID_VALUE);
    GOOD(cuMemAlloc_v2(&block, 100));
    GOOD(cuMemFree_v2(block));
    WRONG(cuMemFree_v2(block), MSC__CU_INVALID_VALUE);
    GOOD(cuMemGetInfo_v2(&free_bytes, &total_bytes));
    assert_int_equal(free_bytes, total_bytes - BYTES);
    set_close(&it);
}

static void pinning(void **state)
{
    set it;

    (void)state;
    set_open(&it);
    assert_int_equal(cuMemHostRegister_v2(it.here, BYTES, 0), MSC__CU_ALREADY_REGISTERED);
    assert_int_equal(cuMemHostRegister_v2(it.here + BYTES - 1, 2, 0), MSC__CU_ALREADY_REGISTERED);
    WRONG(cuMemHostRegister_v2(it.here + BYTES, BYTES, 64), MSC__CU_INVALID_VALUE);
    WRONG(cuMemHostUnregister(it.here + BYTES), MSC__CU_NOT_REGISTERED);
    WRONG(cuMemHostUnregister(it.here + 1), MSC__CU_NOT_REGISTERED);
    GOOD(cuMemHostUnregister(it.here));
    WRONG(cuMemHostUnregister(it.here), MSC__CU_NOT_REGISTERED);
    GOOD(cuMemHostRegister_v2(it.here, BYTES, MSC__CU_HOST_REGISTER_PORTABLE));
    set_close(&it);
}

static uint64_t pageable_copies(void)
{
    fake_cuda_report report;

    fake_cuda_tell(&report);
    return report.pageable_copy_count;
}

static void copies(void **state)
{
    uint64_t before;
    set it;

    (void)state;
    set_open(&it);
    before = pageable_copies();
    GOOD(cuMemcpyHtoDAsync_v2(it.block, it.here, BYTES, it.stream));
    assert_int_equal(pageable_copies(), before);
    GOOD(cuMemcpyHtoDAsync_v2(it.block, it.here + 1, BYTES, it.stream)); /* one byte of it is not pinned */
    assert_int_equal(pageable_copies(), before + 1);
    WRONG(cuMemcpyHtoDAsync_v2(it.block, it.here, 0, it.stream), MSC__CU_INVALID_VALUE);
    WRONG(cuMemcpyHtoDAsync_v2(it.block + 1, it.here, BYTES, it.stream), MSC__CU_INVALID_VALUE);
    WRONG(cuMemcpyDtoHAsync_v2(it.here, it.block + 1, BYTES, it.stream), MSC__CU_INVALID_VALUE);
    WRONG(cuMemcpyDtoHAsync_v2(it.here, (uintptr_t)it.here, 8, it.stream), MSC__CU_INVALID_VALUE);
    WRONG(cuMemcpyDtoHAsync_v2((void *)(uintptr_t)it.block, it.block, 8, it.stream), MSC__CU_INVALID_VALUE);
    WRONG(cuMemcpyDtoHAsync_v2(it.here, it.block, 8, (msc__cu_stream)it.event), MSC__CU_INVALID_HANDLE);
    set_close(&it);
}

/* An argument of a kernel that copies a number. */
static msc__card_arrays copying(const set *it)
{
    msc__card_arrays arrays;

    memset(&arrays, 0, sizeof arrays);
    arrays.from[0] = (const void *)(uintptr_t)it->block;
    arrays.to[0] = (void *)(uintptr_t)(it->block + 4);
    arrays.count = 1;
    return arrays;
}

#define LAUNCH(kernel, groups, threads, stream)                                                              \
    cuLaunchKernel(kernel, groups, 1, 1, threads, 1, 1, 0, stream, argument, NULL)

static void programs(void **state)
{
    void *argument[1];
    msc__card_arrays arrays;
    msc__cu_module module;
    msc__cu_function kernel;
    msc__cu_context popped;
    int value;
    set it;

    (void)state;
    set_open(&it);
    WRONG(cuDeviceGetAttribute(&value, 1, 0), MSC__CU_INVALID_VALUE);
    WRONG(cuDeviceGetAttribute(&value, MSC__CU_CAPABILITY_MAJOR, 2), MSC__CU_INVALID_DEVICE);
    GOOD(cuDeviceGetAttribute(&value, MSC__CU_CAPABILITY_MAJOR, 1));
    assert_int_equal(value, 9);
    WRONG(cuModuleLoadData(&module, "ELF"), MSC__CU_INVALID_IMAGE);
    WRONG(cuModuleLoadData(&module, "fake cubin 80"), MSC__CU_NO_BINARY);
    WRONG(cuModuleLoadData(&module, "fake ptx 100"), MSC__CU_NO_BINARY);
    GOOD(cuModuleLoadData(&module, "fake ptx 80"));
    GOOD(cuModuleUnload(module));
    WRONG(cuModuleUnload(module), MSC__CU_INVALID_HANDLE);
    WRONG(cuModuleGetFunction(&kernel, module, "msc_card_change"), MSC__CU_INVALID_HANDLE);
    GOOD(cuModuleLoadData(&module, "fake cubin 90"));
    assert_int_equal(cuModuleGetFunction(&kernel, module, "main"), MSC__CU_NOT_FOUND);
    GOOD(cuModuleGetFunction(&kernel, module, "msc_card_change"));

    arrays = copying(&it);
    argument[0] = &arrays;
    WRONG(LAUNCH(kernel, 0, MSC__CARD_THREADS, it.stream), MSC__CU_INVALID_VALUE);
    WRONG(LAUNCH(kernel, 1, 64, it.stream), MSC__CU_INVALID_VALUE);
    WRONG(LAUNCH(kernel, 1, MSC__CARD_THREADS, (msc__cu_stream)it.event), MSC__CU_INVALID_HANDLE);
    WRONG(LAUNCH((msc__cu_function)module, 1, MSC__CARD_THREADS, it.stream), MSC__CU_INVALID_HANDLE);
    arrays.to[0] = it.here; /* the host's */
    WRONG(LAUNCH(kernel, 1, MSC__CARD_THREADS, it.stream), MSC__CU_INVALID_VALUE);
    arrays.to[0] = (void *)(uintptr_t)(it.block + 2);
    WRONG(LAUNCH(kernel, 1, MSC__CARD_THREADS, it.stream), MSC__CU_INVALID_VALUE);
    arrays = copying(&it);
    arrays.count = BYTES / 4; /* the last one is behind the block */
    WRONG(LAUNCH(kernel, 2, MSC__CARD_THREADS, it.stream), MSC__CU_INVALID_VALUE);
    GOOD(cuModuleUnload(module));
    arrays = copying(&it);
    WRONG(LAUNCH(kernel, 1, MSC__CARD_THREADS, it.stream), MSC__CU_INVALID_HANDLE);
    GOOD(cuCtxPushCurrent_v2(it.contexts[1]));
    GOOD(cuModuleLoadData(&module, "fake cubin 90"));
    GOOD(cuModuleGetFunction(&kernel, module, "msc_card_change"));
    WRONG(LAUNCH(kernel, 1, MSC__CARD_THREADS, NULL), MSC__CU_INVALID_VALUE); /* another card's memory */
    GOOD(cuModuleUnload(module));
    GOOD(cuCtxPopCurrent_v2(&popped));
    set_close(&it);
}

/* A kernel is as late as its stream allows: nobody has waited, so what looks does not see it. */
static void late_launches(void **state)
{
    void *argument[1];
    msc__card_arrays arrays;
    msc__cu_module module;
    msc__cu_function kernel;
    msc__cu_stream other;
    float two[2] = {1.5f, 0.0f};
    set it;

    (void)state;
    set_open(&it);
    GOOD(cuStreamCreate(&other, MSC__CU_STREAM_NON_BLOCKING));
    GOOD(cuModuleLoadData(&module, "fake cubin 90"));
    GOOD(cuModuleGetFunction(&kernel, module, "msc_card_change"));
    GOOD(cuMemcpyHtoDAsync_v2(it.block, two, sizeof two, it.stream));
    arrays = copying(&it);
    argument[0] = &arrays;
    GOOD(LAUNCH(kernel, 1, MSC__CARD_THREADS, it.stream));
    GOOD(cuEventRecord(it.event, it.stream));
    GOOD(cuMemcpyDtoHAsync_v2(two, it.block, sizeof two, other));
    assert_true(two[1] == 0.0f);
    GOOD(cuStreamWaitEvent(other, it.event, 0));
    GOOD(cuMemcpyDtoHAsync_v2(two, it.block, sizeof two, other));
    assert_true(two[1] == 1.5f);
    GOOD(cuStreamDestroy_v2(other));
    GOOD(cuModuleUnload(module));
    set_close(&it);
}

/* Objects that outlive the last user of their context are counted, and gone. */
static void left_behind(void **state)
{
    fake_cuda_report before;
    fake_cuda_report after;
    msc__cu_context popped;
    msc__cu_event event;
    set it;

    (void)state;
    set_open(&it);
    GOOD(cuEventCreate(&event, MSC__CU_EVENT_DISABLE_TIMING));
    fake_cuda_tell(&before);
    assert_int_equal(before.object_count, 5);
    assert_int_equal(before.context_count, 2);
    set_close(&it);
    fake_cuda_tell(&after);
    assert_int_equal(after.left_count, before.left_count + 1);
    assert_int_equal(after.object_count, 0);
    GOOD(cuDevicePrimaryCtxRetain(&it.contexts[0], 0));
    GOOD(cuCtxPushCurrent_v2(it.contexts[0]));
    WRONG(cuEventQuery(event), MSC__CU_INVALID_HANDLE);
    GOOD(cuCtxPopCurrent_v2(&popped));
    GOOD(cuDevicePrimaryCtxRelease_v2(0));
}

/* A call that shall fail does so once, and does nothing. */
static void failing_calls(void **state)
{
    set it;

    (void)state;
    set_open(&it);
    fake_cuda_fail("cuEventQuery", 2, 719);
    GOOD(cuEventQuery(it.event));
    assert_int_equal(cuEventQuery(it.event), 719);
    GOOD(cuEventQuery(it.event));
    set_close(&it);
}

/* As the environment has it: see main. */
static void failing_by_environment(void **state)
{
    int count;

    (void)state;
    assert_int_equal(cuDeviceGetCount(&count), 999);
    GOOD(cuDeviceGetCount(&count));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"fake_cuda/before-init", before_init, NULL, NULL, NULL},
        {"fake_cuda/failing-by-environment", failing_by_environment, NULL, NULL, NULL},
        {"fake_cuda/contexts", contexts, NULL, NULL, NULL},
        {"fake_cuda/handles", handles, NULL, NULL, NULL},
        {"fake_cuda/other-cards", other_cards, NULL, NULL, NULL},
        {"fake_cuda/memory", memory, NULL, NULL, NULL},
        {"fake_cuda/pinning", pinning, NULL, NULL, NULL},
        {"fake_cuda/copies", copies, NULL, NULL, NULL},
        {"fake_cuda/programs", programs, NULL, NULL, NULL},
        {"fake_cuda/late-launches", late_launches, NULL, NULL, NULL},
        {"fake_cuda/left-behind", left_behind, NULL, NULL, NULL},
        {"fake_cuda/failing-calls", failing_calls, NULL, NULL, NULL},
    };

    /* The second count of cards fails: the first is the one of before-init. */
    if (setenv("FAKE_CUDA_FAIL", "cuDeviceGetCount:2:999", 1) != 0)
        return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
