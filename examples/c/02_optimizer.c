/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Optimizer steps from C alone: AdamW with 5 bytes per parameter, beside AdamW in FP32.
 *     cc 02_optimizer.c $(pkg-config --cflags --libs memscale) && ./a.out
 * Both minimise the squared distance to a target. The small one has BF16 weights with 8 more bits each, which make
 * masters of 24 bits, and moments of 8 bits. The gradient's norm is clipped at 1, as training loops do.
 */
#include <memscale/memscale.h>
#include <stdio.h>
#include <stdlib.h>

#define COUNT 100000u
#define STEPS 200u

static msc_error err;
static float target[COUNT], values[COUNT];

/* Ends the program with the library's own sentence when a call fails. */
static void check(msc_status status)
{
    if (status != MSC_OK) {
        fprintf(stderr, "%s: %s\n", msc_status_name(status), err.message);
        exit(EXIT_FAILURE);
    }
}

/* The weights as FP32 into `values`: themselves, or their masters. */
static void read_weights(msc_optim *optim, const msc_optim_rule *rule, const msc_optim_tensor *tensor)
{
    const msc_optim_array weight = {tensor->weight, COUNT, MSC_OPTIM_FLOAT_FP32};

    if (rule->weights == MSC_OPTIM_WEIGHTS_FP32)
        check(msc_optim_convert(optim, values, MSC_OPTIM_FLOAT_FP32, &weight, &err));
    else
        check(msc_optim_join(optim, rule->weights, tensor->weight, tensor->master, COUNT, values, &err));
}

/* One step towards the target; returns the mean squared distance before it. */
static double train(msc_optim *optim, msc_optim_rule *rule, msc_optim_tensor *tensor)
{
    const msc_optim_array gradient = {values, COUNT, MSC_OPTIM_FLOAT_FP32};
    msc_optim_norm_result norm;
    double sum = 0;
    uint32_t i;

    read_weights(optim, rule, tensor);
    for (i = 0; i < COUNT; i++) {
        values[i] -= target[i]; /* half the gradient of the squared distance */
        sum += (double)values[i] * values[i];
    }
    check(msc_optim_norm(optim, &gradient, 1, 1.0f, &norm, &err));
    if (norm.nonfinite_count > 0) /* a step that is not to be done is not called */
        return sum / COUNT;
    rule->gradient_scale = msc_optim_clip_factor(norm.sum_of_squares, 1.0);
    tensor->gradient = values;
    tensor->step++;
    check(msc_optim_step(optim, rule, tensor, 1, &err));
    return sum / COUNT;
}

/* Trains with a rule from weights of zero, and says what it took and how near it came. */
static double run(msc_optim *optim, const char *name, msc_optim_rule rule)
{
    msc_optim_tensor tensor = {.count = COUNT};
    msc_optim_sizes sizes;
    uint64_t bytes;
    char *state;
    double distance = 0;
    uint32_t i;

    check(msc_optim_tensor_sizes(&rule, COUNT, &sizes, &err));
    bytes = sizes.weight_bytes + sizes.master_bytes + sizes.moment1_bytes + sizes.moment2_bytes +
            sizes.scale1_bytes + sizes.scale2_bytes;
    state = calloc(1, (size_t)bytes); /* all state begins as zero bytes */
    if (state == NULL)
        exit(EXIT_FAILURE);
    tensor.weight = state;
    tensor.master = state + sizes.weight_bytes;
    tensor.moment1 = (char *)tensor.master + sizes.master_bytes;
    tensor.moment2 = (char *)tensor.moment1 + sizes.moment1_bytes;
    tensor.scale1 = (uint8_t *)tensor.moment2 + sizes.moment2_bytes;
    tensor.scale2 = tensor.scale1 + sizes.scale1_bytes;
    for (i = 0; i <= STEPS; i++)
        distance = train(optim, &rule, &tensor);
    printf("%-6s %5.2f bytes per parameter, squared distance %.1e after %u steps\n", name,
           (double)bytes / COUNT, distance, STEPS);
    free(state);
    return distance;
}

int main(void)
{
    msc_optim_options options = msc_optim_options_default();
    msc_optim_rule rule = msc_optim_rule_default(MSC_OPTIM_KIND_ADAMW);
    msc_context *ctx;
    msc_optim *optim;
    double wide, small;
    uint32_t i;

    for (i = 0; i < COUNT; i++)
        target[i] = (float)((i * 2654435761u) >> 8) / 16777216.0f - 0.5f;
    options.thread_count = 2;
    check(msc_context_create(NULL, &ctx, &err));
    check(msc_optim_create(ctx, &options, &optim, &err));
    rule.learning_rate = 0.01;
    rule.weight_decay = 0;
    wide = run(optim, "FP32", rule);
    rule.weights = MSC_OPTIM_WEIGHTS_MASTER_REST8;
    rule.moments = MSC_OPTIM_MOMENTS_CODE8;
    small = run(optim, "small", rule);
    msc_optim_destroy(optim);
    msc_context_destroy(ctx);
    return small < 1e-3 && wide < 1e-3 ? EXIT_SUCCESS : EXIT_FAILURE;
}
