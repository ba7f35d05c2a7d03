/* SPDX-License-Identifier: Apache-2.0 */
/** @file optim_fixture.h  Tensors with all their arrays, random numbers, and runs of steps, for tests of the optimizer. */
#ifndef MSC_TEST_OPTIM_FIXTURE_H
#define MSC_TEST_OPTIM_FIXTURE_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after those above */
#include <setjmp.h>

#include <cmocka.h>

#include "memscale/optim.h"

/** Arrays of one tensor, each a heap block of its own, so that address checks see one byte too many. */
typedef struct fixture {
    msc_optim_rule rule;
    msc_optim_sizes sizes;
    msc_optim_tensor tensor;
    size_t shift; /* bytes by which each array is out of line */
} fixture;

uint32_t fixture_random(uint64_t *state);

/** In (-1, 1), with exponents that differ by up to 2^-8. */
float fixture_float(uint64_t *state);

uint32_t fixture_bits(float x);
float fixture_from_bits(uint32_t bits);

/** An optimizer of a context of its own. */
msc_optim *fixture_optim(msc_optim_isa isa, uint32_t threads);
void fixture_optim_end(msc_optim *by);

/** The optimizer of a group of tests: of the widest instruction set, or the plain one; one thread. */
extern msc_optim *optim;
int fixture_begin(void **state);
int fixture_begin_scalar(void **state);
int fixture_finish(void **state);

/** A rule with settings that no default has. `momentum` and `nesterov` count for SGD. */
msc_optim_rule fixture_rule(msc_optim_kind kind, msc_optim_float gradient, msc_optim_weights weights,
                            msc_optim_moments moments);

/** Runs `each` with every rule: AdamW, Adam, SGD without and with momentum and with nesterov, Lion; types all combined. */
void fixture_every_rule(void (*each)(const msc_optim_rule *rule, const char *name));

/** State of zeros but for the weights, which follow from `seed`. */
fixture fixture_make(msc_optim *by, const msc_optim_rule *rule, uint64_t count, size_t shift, uint64_t seed);
void fixture_end(fixture *one);

/** Gradients that follow from seed and step. */
void fixture_gradient(fixture *one, msc_optim *by, uint64_t seed, uint64_t step);

/** Steps from..to, both included, with `fixture_gradient`. */
void fixture_run(fixture *one, msc_optim *by, uint64_t from, uint64_t to, uint64_t seed);

/** Weights, masters, moments and scales are the same, byte for byte. */
void fixture_same(const fixture *a, const fixture *b, const char *what);

/** Masters as FP32, in a new block. */
float *fixture_masters(const fixture *one, msc_optim *by);

#endif /* MSC_TEST_OPTIM_FIXTURE_H */
