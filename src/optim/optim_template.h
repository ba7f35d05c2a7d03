/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file optim_template.h
 * The kernels themselves. Included once by optim_scalar.c, optim_avx2.c and optim_avx512.c, which define MSC__TABLE, the
 * name of the table, and MSC__DOUBLES, how many of them a vector holds, and are compiled with the flags of their
 * instruction set.
 *
 * Plain loops that compilers turn into vectors at -O3; the sums alone say which sixteen lanes they have, because the
 * order of additions shows in the result. Only static inline functions are called: an ordinary one would be shared
 * between the libraries, and the linker would keep that of any instruction set.
 */
#include "optim/lanes.h"
#include "optim/optim_kernels.h"

#define MSC__BLOCK MSC_OPTIM_BLOCK
#define MSC__INLINE static inline __attribute__((always_inline))

/* ---- types --------------------------------------------------------------------------------------------- */

static void widen_fp32(msc__f32 *restrict to, const void *from, uint32_t count)
{
    memcpy(to, from, count * sizeof *to);
}

static void widen_bf16(msc__f32 *restrict to, const void *from, uint32_t count)
{
    const msc__u16 *restrict half = from;
    uint32_t i;

    for (i = 0; i < count; i++)
        to[i] = msc__widen_bf16(half[i]);
}

static void widen_fp16(msc__f32 *restrict to, const void *from, uint32_t count)
{
    const msc__u16 *restrict half = from;
    uint32_t i;

    for (i = 0; i < count; i++)
        to[i] = msc__widen_fp16(half[i]);
}

static void narrow_fp32(void *to, const msc__f32 *restrict from, uint32_t count)
{
    memcpy(to, from, count * sizeof *from);
}

static void narrow_bf16(void *to, const msc__f32 *restrict from, uint32_t count)
{
    msc__u16 *restrict half = to;
    uint32_t i;

    for (i = 0; i < count; i++)
        half[i] = msc__narrow_bf16(from[i]);
}

static void narrow_fp16(void *to, const msc__f32 *restrict from, uint32_t count)
{
    msc__u16 *restrict half = to;
    uint32_t i;

    for (i = 0; i < count; i++)
        half[i] = msc__narrow_fp16(from[i]);
}

static void narrow_bf16_random(void *to, const msc__f32 *restrict from, uint32_t count,
                               const uint32_t *restrict random, uint32_t shift)
{
    msc__u16 *restrict half = to;
    uint32_t i;

    for (i = 0; i < count; i++)
        half[i] = msc__narrow_bf16_random(from[i], random[i] >> shift & 0xFFFFu);
}

static void fill_random(uint32_t *restrict to, uint32_t first, uint32_t count)
{
    uint32_t i;

    for (i = 0; i < count; i++)
        to[i] = msc__random(first + i * MSC__RANDOM_STEP);
}

/* ---- masters with a rest ------------------------------------------------------------------------------- */

static void join_rest16(msc__f32 *restrict to, const void *weight, const void *rest, uint32_t count)
{
    const msc__u16 *restrict upper = weight;
    const msc__u16 *restrict lower = rest;
    uint32_t i;

    for (i = 0; i < count; i++)
        to[i] = msc__join_rest16(upper[i], lower[i]);
}

/* AVX2 compares signed numbers in one instruction, numbers without a sign in two. */
typedef int32_t signed_lanes __attribute__((vector_size(4 * MSC__LANES)));

MSC__INLINE msc__lanes join_rest8_lanes(const msc__u16 *upper, const uint8_t *lower)
{
    msc__ulanes weight = msc__load_halves(upper) << 16;
    msc__ulanes bits = weight + (msc__load_signed_bytes(lower) << 8);
    signed_lanes size = (signed_lanes)(bits & ~MSC__SIGN);
    msc__ulanes is_under_zero = (msc__ulanes)(size >= (int32_t)MSC__UNDER_ZERO); /* msc__joined */

    return msc__lane_floats((weight & is_under_zero) | (bits & ~is_under_zero));
}

static void join_rest8(msc__f32 *restrict to, const void *weight, const void *rest, uint32_t count)
{
    const msc__u16 *restrict upper = weight;
    const uint8_t *restrict lower = rest;
    uint32_t i;

    for (i = 0; i + MSC__LANES <= count; i += MSC__LANES) {
        msc__store(to + i, join_rest8_lanes(upper + i, lower + i));
    }
    for (; i < count; i++)
        to[i] = msc__join_rest8(upper[i], lower[i]);
}

static void split_rest16(void *weight, void *rest, const msc__f32 *restrict from, uint32_t count)
{
    msc__u16 *restrict upper = weight;
    msc__u16 *restrict lower = rest;
    uint32_t i;

    for (i = 0; i < count; i++) {
        uint32_t master = msc__master_bits(from[i]);

        upper[i] = msc__master_weight(master);
        lower[i] = (uint16_t)(master & 0xFFFFu);
    }
}

/* What rounding could turn into infinity, infinity and NaN: patterns from here on, without their sign. */
#define SPLIT_SPECIAL 0x7F7FFF01u

MSC__INLINE void split_rest8_plain(msc__u16 *restrict upper, uint8_t *restrict lower,
                                   const msc__f32 *restrict from, const uint32_t *restrict random,
                                   uint32_t count)
{
    uint32_t i;

    for (i = 0; i < count; i++) {
        uint32_t master = msc__master24_bits(from[i], random[i] & 0xFFu);

        upper[i] = msc__master_weight(master);
        lower[i] = (uint8_t)(master >> 8 & 0xFFu);
    }
}

/* Without anything special among them; gives the largest of the patterns, which tells. */
MSC__INLINE msc__ulanes split_rest8_group(msc__u16 *upper, uint8_t *lower, const msc__f32 *from,
                                          const msc__ulanes random[MSC__FOUR], msc__ulanes most)
{
    msc__ulanes master[MSC__FOUR];
    uint32_t k;

    for (k = 0; k < MSC__FOUR; k++) {
        msc__ulanes bits = msc__load_bits(from + k * MSC__LANES);

        most = msc__larger(most, bits & ~MSC__SIGN);
        master[k] = bits + (random[k] & 0xFFu);
    }
    for (k = 0; k < MSC__FOUR; k += 2)
        msc__store_halves(upper + k * MSC__LANES, master[k] + 0x8000u, master[k + 1] + 0x8000u);
    msc__store_second_bytes(lower, master);
    return most;
}

static void split_rest8(void *weight, void *rest, const msc__f32 *restrict from, uint32_t count,
                        const uint32_t *restrict random)
{
    msc__ulanes most = {0};
    uint32_t i, k;

    for (i = 0; i + MSC__GROUP <= count; i += MSC__GROUP) {
        msc__ulanes numbers[MSC__FOUR];

        for (k = 0; k < MSC__FOUR; k++)
            numbers[k] = msc__load_bits(random + i + k * MSC__LANES);
        most = split_rest8_group((msc__u16 *)weight + i, (uint8_t *)rest + i, from + i, numbers, most);
    }
    if (msc__largest(most) >= SPLIT_SPECIAL)
        i = 0;
    split_rest8_plain((msc__u16 *)weight + i, (uint8_t *)rest + i, from + i, random + i, count - i);
}

#include "optim/optim_template_codes.h"
/* after it */
#include "optim/optim_template_adam.h"

/* ---- updates ------------------------------------------------------------------------------------------- */

/* Floats of a cache line, and how far ahead lines are asked for. Four arrays at a time are more than the processor's own
   prefetching follows over the ends of pages; what lies behind an array is asked for in vain, and does no harm. */
#define LINE 16u
#define AHEAD (20u * LINE * sizeof(float))

MSC__INLINE void ask_for(const msc__f32 *here)
{
    __builtin_prefetch((const char *)here + AHEAD);
}

MSC__INLINE void adam_line(const msc__optim_numbers *by, int l2, msc__f32 *restrict w,
                           const msc__f32 *restrict g, msc__f32 *restrict m, msc__f32 *restrict v,
                           uint32_t count)
{
    uint32_t i;

    for (i = 0; i < count; i++) {
        float weight = w[i];
        float first = m[i];
        float second = v[i];

        msc__adam(by, l2, g[i], &weight, &first, &second);
        w[i] = weight;
        m[i] = first;
        v[i] = second;
    }
}

MSC__INLINE void adam_strip(const msc__optim_numbers *by, int l2, msc__f32 *restrict w,
                            const msc__f32 *restrict g, msc__moments moments, uint32_t count)
{
    msc__optim_numbers numbers = *by;
    msc__f32 *restrict m = moments.of1;
    msc__f32 *restrict v = moments.of2;
    uint32_t i;

    for (i = 0; i + LINE <= count; i += LINE) {
        ask_for(w + i);
        ask_for(g + i);
        ask_for(m + i);
        ask_for(v + i);
        adam_line(&numbers, l2, w + i, g + i, m + i, v + i, LINE);
    }
    adam_line(&numbers, l2, w + i, g + i, m + i, v + i, count - i);
}

static void adam(const msc__optim_numbers *by, msc__f32 *w, const msc__f32 *g, msc__moments moments,
                 uint32_t count)
{
    if (by->l2 != 0.0f)
        adam_strip(by, 1, w, g, moments, count);
    else
        adam_strip(by, 0, w, g, moments, count);
}

static void sgd_plain(const msc__optim_numbers *by, msc__f32 *restrict w, const msc__f32 *restrict g,
                      msc__f32 *restrict m, uint32_t count)
{
    msc__optim_numbers numbers = *by;
    uint32_t i;

    (void)m;
    for (i = 0; i < count; i++) {
        float weight = w[i];

        msc__sgd(&numbers, g[i], &weight);
        w[i] = weight;
    }
}

MSC__INLINE void sgd_strip(const msc__optim_numbers *by, int nesterov, msc__f32 *restrict w,
                           const msc__f32 *restrict g, msc__f32 *restrict m, uint32_t count)
{
    msc__optim_numbers numbers = *by;
    uint32_t i;

    for (i = 0; i < count; i++) {
        float weight = w[i];
        float moment = m[i];

        msc__sgd_momentum(&numbers, nesterov, g[i], &weight, &moment);
        w[i] = weight;
        m[i] = moment;
    }
}

static void sgd_momentum(const msc__optim_numbers *by, msc__f32 *w, const msc__f32 *g, msc__f32 *m,
                         uint32_t count)
{
    sgd_strip(by, 0, w, g, m, count);
}

static void sgd_nesterov(const msc__optim_numbers *by, msc__f32 *w, const msc__f32 *g, msc__f32 *m,
                         uint32_t count)
{
    sgd_strip(by, 1, w, g, m, count);
}

static void lion(const msc__optim_numbers *by, msc__f32 *restrict w, const msc__f32 *restrict g,
                 msc__f32 *restrict m, uint32_t count)
{
    msc__optim_numbers numbers = *by;
    uint32_t i;

    for (i = 0; i < count; i++) {
        float weight = w[i];
        float moment = m[i];

        msc__lion(&numbers, g[i], &weight, &moment);
        w[i] = weight;
        m[i] = moment;
    }
}

/* ---- sums ---------------------------------------------------------------------------------------------- */

static void add(msc__f32 *restrict sums, const msc__f32 *restrict g, uint32_t count)
{
    uint32_t i;

    for (i = 0; i < count; i++)
        sums[i] = sums[i] + g[i];
}

#define LANES 16u
#define WIDTH MSC__DOUBLES
#define GROUPS (LANES / WIDTH)

typedef float group_f32 __attribute__((vector_size(WIDTH * sizeof(float))));
typedef int32_t group_i32 __attribute__((vector_size(WIDTH * sizeof(int32_t))));
typedef double group_f64 __attribute__((vector_size(WIDTH * sizeof(double))));

/* Adds as many squares; lanes that are not finite are left out and not counted. */
MSC__INLINE void add_squares(const msc__f32 *values, float scale, group_f64 *sum, group_i32 *finite_count)
{
    group_f32 x;
    group_i32 bits, finite;
    group_f64 wide;

    memcpy(&x, values, sizeof x);
    x = x * scale;
    memcpy(&bits, &x, sizeof bits);
    finite = (bits & 0x7FFFFFFF) < (int32_t)MSC__EXPONENT;
    bits = bits & finite;
    memcpy(&x, &bits, sizeof x);
    wide = __builtin_convertvector(x, group_f64);
    *sum = *sum + wide * wide;
    *finite_count = *finite_count - finite;
}

static uint32_t squares(const msc__f32 *g, uint32_t count, float scale, double *sum)
{
    float rest[LANES] = {0.0f};
    group_f64 sums[GROUPS] = {{0.0}};
    group_i32 finite[GROUPS] = {{0}};
    double lanes[LANES];
    uint32_t finite_count = 0;
    uint32_t at, i, width;

    for (at = 0; at + LANES <= count; at += LANES)
        for (i = 0; i < GROUPS; i++)
            add_squares(g + at + WIDTH * i, scale, &sums[i], &finite[i]);
    for (i = 0; at + i < count; i++)
        rest[i] = g[at + i];
    for (i = 0; i < GROUPS; i++)
        add_squares(rest + WIDTH * i, scale, &sums[i], &finite[i]);
    for (i = 0; i < LANES; i++) {
        lanes[i] = sums[i / WIDTH][i % WIDTH];
        finite_count += (uint32_t)finite[i / WIDTH][i % WIDTH];
    }
    for (width = LANES / 2; width > 0; width /= 2)
        for (i = 0; i < width; i++)
            lanes[i] = lanes[i] + lanes[i + width];
    *sum = lanes[0];
    return at + LANES - finite_count; /* the zeros behind the last one were counted, too */
}

const msc__optim_kernels MSC__TABLE = {
    .random = fill_random,
    .widen = {widen_fp32, widen_bf16, widen_fp16},
    .narrow = {narrow_fp32, narrow_bf16, narrow_fp16},
    .narrow_bf16_random = narrow_bf16_random,
    .join_rest16 = join_rest16,
    .join_rest8 = join_rest8,
    .split_rest16 = split_rest16,
    .split_rest8 = split_rest8,
    .decode_signed = decode_signed,
    .encode_signed = encode_signed,
    .decode_adam = decode_adam,
    .write_signed = write_signed,
    .write_adam = write_adam,
    .adam_codes = adam_codes,
    .adam = adam,
    .sgd = {sgd_plain, sgd_momentum, sgd_nesterov},
    .lion = lion,
    .add = add,
    .squares = squares,
};
