/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Optimizer steps against the machine's memory: bench_optim [--csv] [MiB] [threads] [instruction set]
 *
 *   copy, triad  b = a and a = b + 3 c over arrays of MiB (256) in all: what the memory gives to that many threads. Bytes
 *                are counted as read and written, without what a cache reads to write
 *   step         every kind of optimizer and storage: million parameters a second, and bytes a second as a share of triad's
 *   cached       the same on 32,768 parameters again and again: what the arithmetic alone takes
 *   norm, accumulate, convert
 *                the other passes over gradients
 *
 * For 1 thread and for `threads` (2). Cases take turns in each of RUNS rounds, so a machine that slows down slows all;
 * the median counts. Moments are those of a run of steps, not zeros: denormal numbers would take other paths.
 *
 * With --csv one row per case, to be appended to a results file: bench, case, kind, then threads, million parameters per
 * second, bytes per parameter moved, GB per second, percent of triad.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_measure.h"
#include "memscale/optim.h"

#define RUNS 7
#define CACHED 32768u
#define CASES_MOST 24u

typedef struct bench_case {
    const char *name;
    msc_optim_rule rule;
    msc_optim_sizes sizes;
    msc_optim_tensor tensor;
    double seconds[RUNS];
    double cached_seconds[RUNS];
} bench_case;

static int csv;
static double triad_bytes_per_second;

static void row(const char *name, const char *kind, uint32_t threads, double each, double bytes)
{
    double rate = bytes / each;
    double share = triad_bytes_per_second > 0.0 ? 100.0 * rate / triad_bytes_per_second : 0.0;

    if (csv)
        printf("optim,%s,%s,%u,%.1f,%.2f,%.2f,%.1f\n", name, kind, threads, 1e-6 / each, bytes, 1e-9 * rate,
               share);
    else
        printf("%-30s %-8s %u threads %8.1f M/s %6.2f B %7.2f GB/s %6.1f %%\n", name, kind, threads,
               1e-6 / each, bytes, 1e-9 * rate, share);
}

/* On cache lines, as tensors are: where vectors lie across lines, every case takes longer, copy and triad too. */
static void *zeros(uint64_t bytes)
{
    void *memory = bytes > 0 ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;

    require(bytes == 0 || memory != NULL, "no memory");
    if (memory != NULL)
        memset(memory, 0, bytes);
    return memory;
}

/* ---- memory --------------------------------------------------------------------------------------------- */

typedef struct stream_part {
    float *restrict a;
    const float *restrict b;
    const float *restrict c;
    uint64_t count;
} stream_part;

static void *copy_part(void *argument)
{
    const stream_part *part = argument;

    memcpy(part->a, part->b, part->count * sizeof *part->a);
    return NULL;
}

static void *triad_part(void *argument)
{
    stream_part part = *(const stream_part *)argument;
    uint64_t i;

    for (i = 0; i < part.count; i++)
        part.a[i] = part.b[i] + 3.0f * part.c[i];
    return NULL;
}

static double run_stream(void *(*work)(void *), float *const arrays[3], uint64_t count, uint32_t threads)
{
    pthread_t others[256];
    stream_part parts[256];
    double start = seconds();
    uint32_t i;

    for (i = 0; i < threads; i++) {
        uint64_t from = count * i / threads;

        parts[i].a = arrays[0] + from;
        parts[i].b = arrays[1] + from;
        parts[i].c = arrays[2] + from;
        parts[i].count = count * (i + 1) / threads - from;
        if (i > 0)
            require(pthread_create(&others[i], NULL, work, &parts[i]) == 0, "no thread");
    }
    (void)work(&parts[0]);
    for (i = 1; i < threads; i++)
        (void)pthread_join(others[i], NULL);
    return seconds() - start;
}

static void bench_memory(uint64_t bytes, uint32_t threads)
{
    uint64_t count = bytes / 3 / sizeof(float);
    float *arrays[3];
    double copies[RUNS], triads[RUNS];
    uint64_t i;
    int k;

    for (k = 0; k < 3; k++) {
        arrays[k] = zeros(count * sizeof(float));
        for (i = 0; i < count; i++)
            arrays[k][i] = (float)k;
    }
    for (k = 0; k < RUNS; k++) {
        copies[k] = run_stream(copy_part, arrays, count, threads) / (double)count;
        triads[k] = run_stream(triad_part, arrays, count, threads) / (double)count;
    }
    triad_bytes_per_second = 12.0 / median(triads, RUNS);
    row("copy", "memory", threads, median(copies, RUNS), 8.0);
    row("triad", "memory", threads, median(triads, RUNS), 12.0);
    for (k = 0; k < 3; k++)
        free(arrays[k]);
}

/* ---- steps ---------------------------------------------------------------------------------------------- */

static uint64_t random_state = 88172645463325252u;

static float next_gradient(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (float)((int64_t)(random_state >> 32) - 2147483648ll) * 1e-12f;
}

static void make_case(bench_case *one, msc_optim *optim, const float *gradients, uint64_t count)
{
    msc_optim_array from = {gradients, count, MSC_OPTIM_FLOAT_FP32};
    msc_optim_tensor *tensor = &one->tensor;
    void *gradient;

    require(msc_optim_tensor_sizes(&one->rule, count, &one->sizes, NULL) == MSC_OK, "sizes");
    gradient = zeros(one->sizes.gradient_bytes);
    require(msc_optim_convert(optim, gradient, one->rule.gradient, &from, NULL) == MSC_OK, "convert");
    tensor->count = count;
    tensor->gradient = gradient;
    tensor->weight = zeros(one->sizes.weight_bytes);
    tensor->master = zeros(one->sizes.master_bytes);
    tensor->moment1 = zeros(one->sizes.moment1_bytes);
    tensor->moment2 = zeros(one->sizes.moment2_bytes);
    tensor->scale1 = zeros(one->sizes.scale1_bytes);
    tensor->scale2 = zeros(one->sizes.scale2_bytes);
    for (tensor->step = 1; tensor->step < 4; tensor->step++)
        require(msc_optim_step(optim, &one->rule, tensor, 1, NULL) == MSC_OK, "step");
}

static void free_case(bench_case *one)
{
    free((void *)(uintptr_t)one->tensor.gradient);
    free(one->tensor.weight);
    free(one->tensor.master);
    free(one->tensor.moment1);
    free(one->tensor.moment2);
    free(one->tensor.scale1);
    free(one->tensor.scale2);
}

/* Bytes per parameter that a step reads and writes: gradients are read, the rest both; a full master is read instead of
   its weight. */
static double moved(const bench_case *one)
{
    const msc_optim_sizes *sizes = &one->sizes;
    double state = 2.0 * (double)(sizes->weight_bytes + sizes->master_bytes + sizes->moment1_bytes +
                                  sizes->moment2_bytes + sizes->scale1_bytes + sizes->scale2_bytes);

    if (one->rule.weights == MSC_OPTIM_WEIGHTS_MASTER_FP32)
        state -= (double)sizes->weight_bytes;
    return (state + (double)sizes->gradient_bytes) / (double)one->tensor.count;
}

static uint32_t fill_cases(bench_case *cases)
{
    static const struct {
        const char *name;
        msc_optim_kind kind;
        msc_optim_float gradient;
        msc_optim_weights weights;
        msc_optim_moments moments;
    } list[] = {
        {"adamw fp32", MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
         MSC_OPTIM_MOMENTS_FP32},
        {"adamw bf16 master32", MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_BF16, MSC_OPTIM_WEIGHTS_MASTER_FP32,
         MSC_OPTIM_MOMENTS_FP32},
        {"adamw fp16 master32", MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_FP16, MSC_OPTIM_WEIGHTS_MASTER_FP32,
         MSC_OPTIM_MOMENTS_FP32},
        {"adamw bf16 rest16", MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_BF16, MSC_OPTIM_WEIGHTS_MASTER_REST16,
         MSC_OPTIM_MOMENTS_FP32},
        {"adamw bf16 rest16 bf16", MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_BF16,
         MSC_OPTIM_WEIGHTS_MASTER_REST16, MSC_OPTIM_MOMENTS_BF16},
        {"adamw fp32 code8", MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
         MSC_OPTIM_MOMENTS_CODE8},
        {"adamw bf16 rest8 code8", MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_BF16, MSC_OPTIM_WEIGHTS_MASTER_REST8,
         MSC_OPTIM_MOMENTS_CODE8},
        {"sgd fp32", MSC_OPTIM_KIND_SGD, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
         MSC_OPTIM_MOMENTS_FP32},
        {"sgd bf16 rest8 code8", MSC_OPTIM_KIND_SGD, MSC_OPTIM_FLOAT_BF16, MSC_OPTIM_WEIGHTS_MASTER_REST8,
         MSC_OPTIM_MOMENTS_CODE8},
        {"lion fp32", MSC_OPTIM_KIND_LION, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
         MSC_OPTIM_MOMENTS_FP32},
        {"lion bf16 rest8 code8", MSC_OPTIM_KIND_LION, MSC_OPTIM_FLOAT_BF16, MSC_OPTIM_WEIGHTS_MASTER_REST8,
         MSC_OPTIM_MOMENTS_CODE8},
    };
    uint32_t i;

    memset(cases, 0, sizeof *cases * CASES_MOST);
    for (i = 0; i < sizeof list / sizeof list[0]; i++) {
        cases[i].name = list[i].name;
        cases[i].rule = msc_optim_rule_default(list[i].kind);
        cases[i].rule.gradient = list[i].gradient;
        cases[i].rule.weights = list[i].weights;
        cases[i].rule.moments = list[i].moments;
        cases[i].rule.momentum = list[i].kind == MSC_OPTIM_KIND_SGD ? 0.9 : 0.0;
    }
    return i;
}

static double time_step(msc_optim *optim, bench_case *one, uint64_t count, uint32_t repeats)
{
    msc_optim_tensor tensor = one->tensor;
    double start;
    uint32_t i;

    tensor.count = count;
    start = seconds();
    for (i = 0; i < repeats; i++) {
        require(msc_optim_step(optim, &one->rule, &tensor, 1, NULL) == MSC_OK, "step");
        tensor.step++;
    }
    one->tensor.step = tensor.step;
    return (seconds() - start) / (double)count / repeats;
}

static void bench_steps(msc_optim *optim, const float *gradients, uint64_t count, uint32_t threads)
{
    bench_case cases[CASES_MOST];
    uint32_t case_count = fill_cases(cases);
    uint32_t i;
    int run;

    for (i = 0; i < case_count; i++)
        make_case(&cases[i], optim, gradients, count);
    for (run = 0; run < RUNS; run++)
        for (i = 0; i < case_count; i++) {
            cases[i].seconds[run] = time_step(optim, &cases[i], count, 1);
            cases[i].cached_seconds[run] = time_step(optim, &cases[i], CACHED, 100);
        }
    for (i = 0; i < case_count; i++) {
        row(cases[i].name, "step", threads, median(cases[i].seconds, RUNS), moved(&cases[i]));
        row(cases[i].name, "cached", threads, median(cases[i].cached_seconds, RUNS), moved(&cases[i]));
        free_case(&cases[i]);
    }
}

/* ---- other passes ------------------------------------------------------------------------------------------ */

static void bench_passes(msc_optim *optim, const float *gradients, uint64_t count, uint32_t threads)
{
    uint16_t *halves = zeros(count * sizeof *halves);
    float *sums = zeros(count * sizeof *sums);
    msc_optim_array full = {gradients, count, MSC_OPTIM_FLOAT_FP32};
    msc_optim_array half = {halves, count, MSC_OPTIM_FLOAT_BF16};
    msc_optim_norm_result norm;
    double taken[4][RUNS];
    double start;
    int run;

    for (run = 0; run < RUNS; run++) {
        start = seconds();
        require(msc_optim_convert(optim, halves, MSC_OPTIM_FLOAT_BF16, &full, NULL) == MSC_OK, "convert");
        taken[0][run] = (seconds() - start) / (double)count;
        start = seconds();
        require(msc_optim_norm(optim, &full, 1, 1.0f, &norm, NULL) == MSC_OK, "norm");
        taken[1][run] = (seconds() - start) / (double)count;
        start = seconds();
        require(msc_optim_norm(optim, &half, 1, 1.0f, &norm, NULL) == MSC_OK, "norm");
        taken[2][run] = (seconds() - start) / (double)count;
        start = seconds();
        require(msc_optim_accumulate(optim, sums, &half, NULL) == MSC_OK, "accumulate");
        taken[3][run] = (seconds() - start) / (double)count;
    }
    row("convert", "to bf16", threads, median(taken[0], RUNS), 6.0);
    row("norm", "fp32", threads, median(taken[1], RUNS), 4.0);
    row("norm", "bf16", threads, median(taken[2], RUNS), 2.0);
    row("accumulate", "bf16", threads, median(taken[3], RUNS), 10.0);
    free(halves);
    free(sums);
}

static msc_optim_isa isa_named(const char *name)
{
    uint32_t isa;

    for (isa = 0; isa < MSC_OPTIM_ISA_COUNT; isa++)
        if (strcmp(name, msc_optim_isa_name((msc_optim_isa)isa)) == 0)
            return (msc_optim_isa)isa;
    require(0, "no such instruction set");
    return MSC_OPTIM_ISA_ANY;
}

static void bench_all(uint64_t bytes, uint32_t threads, msc_optim_isa isa)
{
    msc_optim_options options = msc_optim_options_default();
    uint64_t count = bytes / 16; /* weight, gradient and two moments in FP32 */
    float *gradients = zeros(count * sizeof *gradients);
    msc_context *ctx;
    msc_optim *optim;
    uint64_t i;

    for (i = 0; i < count; i++)
        gradients[i] = next_gradient();
    options.thread_count = threads;
    options.isa = isa;
    require(msc_context_create(NULL, &ctx, NULL) == MSC_OK, "no context");
    require(msc_optim_create(ctx, &options, &optim, NULL) == MSC_OK, "no optimizer");
    if (!csv)
        printf("-- %s, %u threads, %llu parameters\n", msc_optim_isa_name(msc_optim_isa_used(optim)), threads,
               (unsigned long long)count);
    bench_memory(bytes, threads);
    bench_steps(optim, gradients, count, threads);
    bench_passes(optim, gradients, count, threads);
    msc_optim_destroy(optim);
    msc_context_destroy(ctx);
    free(gradients);
}

int main(int argc, char **argv)
{
    uint64_t bytes;
    uint32_t threads;
    msc_optim_isa isa;

    if (argc > 1 && strcmp(argv[1], "--csv") == 0) {
        csv = 1;
        argc--;
        argv++;
    }
    bytes = (argc > 1 ? strtoull(argv[1], NULL, 10) : 256u) << 20;
    threads = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 2u;
    isa = argc > 3 ? isa_named(argv[3]) : MSC_OPTIM_ISA_ANY;
    require(bytes >= 16u * CACHED && bytes < (UINT64_C(1) << 44), "MiB must be 1 to 16777215");
    require(threads >= 1 && threads <= 256, "threads must be 1 to 256");
    bench_all(bytes, 1, isa);
    if (threads > 1)
        bench_all(bytes, threads, isa);
    return 0;
}
