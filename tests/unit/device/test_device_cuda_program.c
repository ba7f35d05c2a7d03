/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernels of the CUDA device: a compiler that is missing or says no, a driver that does, and what is kept. On the
 * stand-ins, whose paths are the arguments, with the compute capability of their cards.
 */
#include "device_fixture.h"
#include "oom/failing_alloc.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device/cuda_types.h"
#include "fake_cuda/fake_cuda.h"
#include "optim/optim_cuda.h"

#define THREADS MSC__CARD_THREADS

static const msc_program_text text = {"the text", msc__optim_cuda_text};

static msc_device_options options;
static int capability;
static fake_cuda_tell_function *tell;
static fake_cuda_fail_function *fail_call;
static fake_nvrtc_live_function *live;

static void *control(const char *library, const char *name)
{
    void *opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    void *found = opened != NULL ? dlsym(opened, name) : NULL;

    assert_non_null(found);
    return found;
}

static fake_cuda_report books(void)
{
    fake_cuda_report report;

    tell(&report);
    return report;
}

static int open_libraries(void **state)
{
    void *found;

    (void)state;
    found = control(options.library, "fake_cuda_tell");
    memcpy(&tell, &found, sizeof tell);
    found = control(options.library, "fake_cuda_fail");
    memcpy(&fail_call, &found, sizeof fail_call);
    found = control(options.compiler, "fake_nvrtc_live");
    memcpy(&live, &found, sizeof live);
    return 0;
}

/* Only one of the three cards is too old to go on with. */
static void needs_a_known_card(void)
{
    if (capability < 70)
        skip();
}

static void refused(fixture *fix, const msc_program_text *which, msc_status status, const char *words)
{
    void *program = fix;

    memset(&fix->err, 0, sizeof fix->err);
    assert_int_equal(fix->ops->program_create(fix->device, which, &program, &fix->err), status);
    assert_null(program);
    assert_int_equal(fix->err.status, status);
    if (strstr(fix->err.message, words) == NULL)
        fail_msg("'%s' does not say '%s'", fix->err.message, words);
    assert_int_equal(live(), 0);
}

static void no_compiler(void **state)
{
    static const char *const libraries[] = {"/nowhere/libnvrtc.so", "libc.so.6"};
    msc_device_options wrong = options;
    char name[64];
    fixture fix;
    size_t i;

    (void)state;
    for (i = 0; i < 2; i++) {
        (void)strcpy(name, libraries[i]);
        wrong.compiler = name;
        fixture_open(&fix, &wrong);
        memset(name, 'x', 20); /* the device has a name of its own */
        refused(&fix, &text, MSC_EUNSUPPORTED, libraries[i]);
        refused(&fix, &text, MSC_EUNSUPPORTED, "pip install nvidia-cuda-nvrtc-cu12");
        fixture_close(&fix);
    }
}

static void host_has_none(void **state)
{
    msc_device_options wrong = msc_device_options_default();
    msc_device *device = NULL;
    msc_context *ctx;
    msc_error err;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    wrong.compiler = "libnvrtc.so";
    assert_int_equal(msc_device_create(ctx, &wrong, &device, &err), MSC_EINVAL);
    assert_null(device);
    assert_non_null(strstr(err.message, "compiler is 'libnvrtc.so'"));
    msc_context_destroy(ctx);
}

/* Each wrong: the text, the card, a call of the driver. Then all is well. */
static void refused_programs(void **state)
{
    const msc_program_text other = {"another text", "text"};
    fixture fix;
    void *program;

    (void)state;
    fixture_open(&fix, &options);
    if (capability < 70) {
        refused(&fix, &text, MSC_EUNSUPPORTED, "compute capability 7.0, and this one has 6.1");
        fixture_close(&fix);
        return;
    }
    refused(&fix, &other, MSC_EDRIVER,
            "cannot compile another text: NVRTC_ERROR_COMPILATION: error: this text");
    fail_call("cuDeviceGetAttribute", 1, MSC__CU_INVALID_VALUE);
    refused(&fix, &text, MSC_EDRIVER, "its compute capability");
    fail_call("cuDeviceGetAttribute", 2, MSC__CU_INVALID_VALUE);
    refused(&fix, &text, MSC_EDRIVER, "its compute capability");
    fail_call("cuDriverGetVersion", 1, MSC__CU_INVALID_VALUE);
    refused(&fix, &text, MSC_EDRIVER, "its version");
    fail_call("cuCtxPushCurrent_v2", 1, MSC__CU_INVALID_CONTEXT);
    refused(&fix, &text, MSC_EDRIVER, "make the context of");
    fail_call("cuModuleLoadData", 1, MSC__CU_OUT_OF_MEMORY);
    refused(&fix, &text, MSC_EDEVMEM, "load the text");
    OK(&fix, fix.ops->program_create(fix.device, &text, &program, &fix.err));
    fixture_close(&fix);
}

/* The same text is compiled once; kernels have names; a launch may be refused. */
static void kept(void **state)
{
    msc__card_arrays arrays;
    msc_launch launch = {NULL, 1, THREADS, &arrays};
    void *program, *again, *kernel, *event;
    unsigned char *memory;
    float numbers[2] = {1.5f, 0.0f};
    fixture fix;

    (void)state;
    needs_a_known_card();
    fixture_open(&fix, &options);
    OK(&fix, fix.ops->program_create(fix.device, &text, &program, &fix.err));
    fail_call("cuModuleLoadData", 1, MSC__CU_OUT_OF_MEMORY);
    OK(&fix, fix.ops->program_create(fix.device, &text, &again, &fix.err));
    fail_call("cuModuleLoadData", 0, 0);
    assert_ptr_equal(program, again);
    kernel = program;
    assert_int_equal(fix.ops->kernel_find(fix.device, program, "nothing", &kernel, &fix.err), MSC_EDRIVER);
    assert_null(kernel);
    assert_non_null(strstr(fix.err.message, "find the kernel nothing: CUDA_ERROR_NOT_FOUND"));
    OK(&fix, fix.ops->kernel_find(fix.device, program, "msc_card_change", &launch.kernel, &fix.err));
    memory = fixture_memory(&fix, sizeof numbers);
    event = fixture_event(&fix);
    fixture_copy(&fix, memory, numbers, sizeof numbers, MSC_COPY_IN, 0);
    memset(&arrays, 0, sizeof arrays);
    arrays.from[0] = memory;
    arrays.to[0] = memory + sizeof(float);
    arrays.count = 1;
    fail_call("cuLaunchKernel", 1, 719);
    assert_int_equal(fix.ops->launch(fix.device, &launch, fix.streams[0], &fix.err), MSC_EDRIVER);
    assert_non_null(strstr(fix.err.message, "a kernel of 1 groups of 128 threads"));
    OK(&fix, fix.ops->launch(fix.device, &launch, fix.streams[0], &fix.err));
    memset(&arrays, 0, sizeof arrays); /* the driver has a copy */
    fixture_copy(&fix, numbers, memory, sizeof numbers, MSC_COPY_OUT, 0);
    fixture_record(&fix, event, 0);
    fixture_await(&fix, event);
    assert_true(numbers[1] == 1.5f);
    fix.ops->event_destroy(fix.device, event);
    fix.ops->memory_destroy(fix.device, memory, sizeof numbers);
    fixture_close(&fix);
}

/* An optimizer of a device, with allocation 0, 1, 2 … failing: of the device, its program, the optimizer. */
static void no_memory(void **state)
{
    static failing_alloc heap;
    uint64_t at;

    (void)state;
    needs_a_known_card();
    for (at = 0;; at++) {
        msc_optim_options optim_options = msc_optim_options_default();
        msc_context *ctx = NULL;
        msc_device *device = NULL;
        msc_optim *optim = NULL;
        msc_status status;
        msc_error err;

        failing_alloc_init(&heap, at);
        ctx = failing_alloc_context(&heap);
        status = ctx == NULL ? MSC_ENOMEM : msc_device_create(ctx, &options, &device, &err);
        optim_options.device = device;
        if (status == MSC_OK)
            status = msc_optim_create(ctx, &optim_options, &optim, &err);
        assert_int_equal(status, heap.failed_count > 0 ? MSC_ENOMEM : MSC_OK);
        assert_true((optim == NULL) == (heap.failed_count > 0));
        msc_optim_destroy(optim);
        msc_device_destroy(device);
        msc_context_destroy(ctx);
        assert_true(failing_alloc_is_clean(&heap));
        assert_int_equal(books().object_count, 0);
        assert_int_equal(live(), 0);
        if (heap.failed_count == 0)
            break;
    }
    assert_true(at >= 6); /* context, device, name, program, image, optimizer, card */
}

/* The same with each call of the driver that an optimizer makes: when it is created, and for its first norm. */
static void no_driver(void **state)
{
    static const char *const calls[] = {"cuMemAlloc_v2", "cuStreamCreate", "cuEventCreate"};
    const msc_optim_array array = {(const void *)(uintptr_t)0x1000, 4, MSC_OPTIM_FLOAT_FP32};
    msc_optim_options optim_options = msc_optim_options_default();
    msc_optim *optim = (msc_optim *)(uintptr_t)8;
    msc_optim_norm_result norm;
    fixture fix;
    size_t i;

    (void)state;
    needs_a_known_card();
    fixture_open(&fix, &options);
    optim_options.device = fix.device;
    fail_call("cuModuleGetFunction", 1, 719);
    assert_int_equal(msc_optim_create(fix.ctx, &optim_options, &optim, &fix.err), MSC_EDRIVER);
    assert_null(optim);
    assert_int_equal(msc_optim_create(fix.ctx, &optim_options, &optim, &fix.err), MSC_OK);
    assert_int_equal(books().object_count,
                     FIXTURE_STREAMS + 1); /* the program, and nothing of the optimizer's */
    for (i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        fail_call(calls[i], 1, 719);
        assert_int_equal(msc_optim_norm(optim, &array, 1, 1.0f, &norm, &fix.err), MSC_EDRIVER);
        assert_int_equal(books().object_count, FIXTURE_STREAMS + 1 + i); /* what came before it stays */
    }
    msc_optim_destroy(optim);
    assert_int_equal(books().object_count, FIXTURE_STREAMS + 1);
    fixture_close(&fix);
}

/* In a child: nothing reaches the driver, and memory of the process comes back. */
static void forked(void **state)
{
    void *program, *kernel;
    fixture fix;
    int status;
    pid_t child;

    (void)state;
    needs_a_known_card();
    fixture_open(&fix, &options);
    OK(&fix, fix.ops->program_create(fix.device, &text, &program, &fix.err));
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        const msc_launch launch = {program, 1, THREADS, &fix};
        uint64_t violations = books().violation_count;
        int wrong = fix.ops->program_create(fix.device, &text, &program, NULL) != MSC_ESTATE;

        wrong += fix.ops->kernel_find(fix.device, program, "msc_card_step", &kernel, NULL) != MSC_ESTATE;
        wrong += fix.ops->launch(fix.device, &launch, NULL, NULL) != MSC_ESTATE;
        msc_device_destroy(fix.device);
        wrong += msc_context_held_bytes(fix.ctx) != 0;
        _exit(wrong + (books().violation_count != violations));
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
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
        {"device_cuda_program/no-compiler", no_compiler, NULL, NULL, NULL},
        {"device_cuda_program/host-has-none", host_has_none, NULL, NULL, NULL},
        {"device_cuda_program/refused-programs", refused_programs, NULL, NULL, NULL},
        {"device_cuda_program/kept", kept, NULL, NULL, NULL},
        {"device_cuda_program/no-memory", no_memory, NULL, NULL, NULL},
        {"device_cuda_program/no-driver", no_driver, NULL, NULL, NULL},
        {"device_cuda_program/forked", forked, NULL, NULL, NULL},
        {"device_cuda_program/clean-books", clean_books, NULL, NULL, NULL},
    };

    if (argc != 4 || setenv("FAKE_CUDA_CAPABILITY", argv[3], 1) != 0)
        return 1;
    capability = atoi(argv[3]);
    options = msc_device_options_default();
    options.kind = MSC_DEVICE_CUDA;
    options.library = argv[1];
    options.compiler = argv[2];
    return cmocka_run_group_tests(tests, open_libraries, NULL);
}
