/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the offload engine decides places and order with: ranges of a space, slabs of memory, the recorded order. Each
 * against a plain model of what its header says, compared after every step.
 *
 * Input: a byte that chooses one of the three, two bytes of options, then steps of three bytes each:
 *
 *     step     verb | a | b          sizes are a * 2^(b mod 48) plus b / 48
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "offload/offload_ranges.h"
#include "offload/offload_schedule.h"
#include "offload/offload_slabs.h"

#define OUT_MOST 128u
#define STEPS_MOST 400u
#define MIB (UINT64_C(1) << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int condition)
{
    if (!condition)
        abort();
}

static uint64_t size_of(const uint8_t *step)
{
    return ((uint64_t)step[1] << step[2] % 48) + step[2] / 48;
}

/* ---- ranges ------------------------------------------------------------------------------------- */

/* What is out, by place. */
typedef struct taken {
    uint64_t start;
    uint64_t bytes; /* rounded up */
    uint32_t range;
} taken;

typedef struct space {
    msc__ranges *ranges;
    uint64_t alignment;
    uint64_t capacity;
    taken out[OUT_MOST];
    uint32_t count;
} space;

/* The largest gap between what is out. */
static uint64_t largest_gap(const space *s)
{
    uint64_t end = 0;
    uint64_t largest = 0;
    uint32_t i;

    for (i = 0; i < s->count; i++) {
        if (s->out[i].start - end > largest)
            largest = s->out[i].start - end;
        end = s->out[i].start + s->out[i].bytes;
    }
    return s->capacity - end > largest ? s->capacity - end : largest;
}

static void note_taken(space *s, taken one)
{
    uint32_t i = s->count++;

    for (; i > 0 && s->out[i - 1].start > one.start; i--)
        s->out[i] = s->out[i - 1];
    s->out[i] = one;
    require(i == 0 || s->out[i - 1].start + s->out[i - 1].bytes <= one.start);
    require(one.bytes <= s->capacity && one.start <= s->capacity - one.bytes);
    require(i + 1 == s->count || one.start + one.bytes <= s->out[i + 1].start);
}

static void take(space *s, uint64_t bytes)
{
    uint64_t mask = s->alignment - 1;
    uint64_t rounded = bytes > UINT64_MAX - mask ? UINT64_MAX : (bytes + mask) & ~mask;
    uint64_t gap = largest_gap(s);
    taken one = {.bytes = rounded};
    msc_status status;

    if (s->count == OUT_MOST)
        return;
    status = msc__ranges_take(s->ranges, bytes, &one.start, &one.range, NULL);
    if (status != MSC_OK) {
        require(status == (bytes == 0 ? MSC_EINVAL : MSC_EAGAIN) && (bytes == 0 || rounded > gap));
        return;
    }
    require(rounded <= gap && (one.start & mask) == 0 &&
            msc__ranges_size_of(s->ranges, one.range) == rounded);
    note_taken(s, one);
}

static void give(space *s, uint32_t i)
{
    if (s->count == 0)
        return;
    i %= s->count;
    msc__ranges_give(s->ranges, s->out[i].range);
    s->count--;
    memmove(&s->out[i], &s->out[i + 1], (s->count - i) * sizeof s->out[0]);
}

static void grow(space *s, uint64_t more)
{
    uint64_t free_bytes = UINT64_MAX - s->capacity;
    msc_status status = msc__ranges_grow(s->ranges, more, NULL);

    if (status == MSC_OK)
        s->capacity += more;
    else
        require(status == ((more & (s->alignment - 1)) != 0 ? MSC_EINVAL : MSC_EOVERFLOW) &&
                ((more & (s->alignment - 1)) != 0 || more > free_bytes));
}

static void check_space(const space *s)
{
    msc__ranges_use use = msc__ranges_in_use(s->ranges);
    uint64_t bytes = 0;
    uint32_t i;

    for (i = 0; i < s->count; i++)
        bytes += s->out[i].bytes;
    require(msc__ranges_valid(s->ranges));
    require(use.capacity == s->capacity && use.taken == bytes && use.count == s->count);
    require(use.largest == largest_gap(s));
}

static void play_ranges(msc_context *ctx, const uint8_t *options, const uint8_t *steps, uint32_t count)
{
    static space s;
    uint32_t i;

    memset(&s, 0, sizeof s);
    s.alignment = UINT64_C(1) << options[0] % 13;
    s.capacity = options[1] * s.alignment;
    require(msc__ranges_create(ctx, s.capacity, s.alignment, &s.ranges, NULL) == MSC_OK);
    for (i = 0; i < count; i++, steps += 3) {
        if (steps[0] < 128)
            take(&s, size_of(steps));
        else if (steps[0] < 232)
            give(&s, steps[1]);
        else
            grow(&s, size_of(steps));
        check_space(&s);
    }
    while (s.count > 0)
        give(&s, s.count - 1);
    check_space(&s);
    msc__ranges_destroy(s.ranges);
}

/* ---- slabs -------------------------------------------------------------------------------------- */

typedef struct block {
    msc__slab_block at;
    uint64_t bytes;
    uint8_t mark;
} block;

/* Written at both ends: blocks that overlap show when they are given back. */
static void mark(block *one, uint8_t value)
{
    unsigned char *memory = one->at.memory;

    one->mark = value;
    memory[0] = memory[one->bytes - 1] = value;
}

static void give_block(msc__slabs *slabs, const block *one)
{
    const unsigned char *memory = one->at.memory;

    require(memory[0] == one->mark && memory[one->bytes - 1] == one->mark);
    msc__slabs_give(slabs, one->at);
}

static void play_slab(msc__slabs *slabs, block *out, uint32_t *count, const uint8_t *step)
{
    uint64_t bytes = size_of(step) % (24 * MIB);
    msc_status status;

    if (step[0] == 249) {
        msc__slabs_stop(slabs);
    } else if (step[0] >= 128 && *count > 0) {
        uint32_t i = step[1] % *count;
        give_block(slabs, &out[i]);
        out[i] = out[--*count];
    } else if (step[0] < 128 && *count < OUT_MOST) {
        block *one = &out[*count];
        status =
            step[2] % 8 == 0 && bytes > 0 ? msc__slabs_take_now(slabs, bytes, &one->at, NULL) : MSC_ETIMEDOUT;
        if (status == MSC_ETIMEDOUT)
            status = msc__slabs_take(slabs, bytes, &one->at, NULL);
        require(status == MSC_OK || status == (bytes == 0 ? MSC_EINVAL : status));
        require(status == MSC_OK || status == MSC_EINVAL || status == MSC_EAGAIN || status == MSC_ENOMEM);
        require((uintptr_t)one->at.memory % MSC__SLAB_ALIGNMENT == 0 &&
                (one->at.memory != NULL) == (status == MSC_OK));
        one->bytes = bytes;
        *count += status == MSC_OK;
        if (status == MSC_OK)
            mark(one, step[2]);
    }
}

static void play_slabs(msc_context *ctx, const uint8_t *options, const uint8_t *steps, uint32_t count)
{
    msc_device_options device_options = msc_device_options_default();
    uint64_t limit = options[0] * MIB / 2 + options[1] * 512u;
    static block out[OUT_MOST];
    msc_device *device = NULL;
    msc__slabs *slabs;
    uint32_t out_count = 0;
    uint32_t i;

    if (options[1] % 2) {
        device_options.faults.pin_limit_bytes = options[1] * MIB;
        require(msc_device_create(ctx, &device_options, &device, NULL) == MSC_OK);
    }
    require(msc__slabs_create(ctx, device, limit, &slabs, NULL) == MSC_OK);
    for (i = 0; i < count; i++, steps += 3) {
        msc__slabs_use use;

        play_slab(slabs, out, &out_count, steps);
        use = msc__slabs_in_use(slabs);
        require(use.mapped_bytes <= limit && use.taken_bytes <= use.mapped_bytes);
        require(use.block_count == out_count && use.mapped_bytes <= use.mapped_peak_bytes);
    }
    while (out_count > 0)
        give_block(slabs, &out[--out_count]);
    require(msc__slabs_in_use(slabs).taken_bytes == 0);
    msc__slabs_destroy(slabs);
    msc_device_destroy(device);
}

/* ---- the order ---------------------------------------------------------------------------------- */

/* One step of a run: what was put and what was used. */
typedef struct record {
    uint64_t sizes[STEPS_MOST];
    uint32_t put_count;
    uint32_t put_first; /* before the first use */
    uint32_t uses[STEPS_MOST];
    uint32_t use_count;
} record;

typedef struct history {
    record now, before;
    uint32_t position; /* in the uses of `before`, as far as they were followed */
    int surprised;
} history;

static int is_known(const history *h)
{
    uint32_t first = h->now.use_count > 0 ? h->now.put_first : h->now.put_count;

    return h->before.use_count > 0 && first == h->before.put_first &&
           h->now.put_count <= h->before.put_count &&
           memcmp(h->now.sizes, h->before.sizes, h->now.put_count * sizeof h->now.sizes[0]) == 0;
}

static uint32_t expected(const history *h, uint32_t ahead)
{
    uint32_t next = h->now.put_count;

    if (is_known(h))
        return h->position + ahead < h->before.use_count ? h->before.uses[h->position + ahead] : MSC_NONE;
    if (h->now.use_count > 0)
        next = h->now.uses[h->now.use_count - 1];
    return ahead < next ? next - 1 - ahead : MSC_NONE;
}

static void note_use(history *h, uint32_t ordinal)
{
    uint32_t i = 0;

    if (is_known(h) && expected(h, 0) == ordinal) {
        h->position++;
    } else if (is_known(h)) {
        h->surprised = 1;
        while (i < h->before.use_count && h->before.uses[i] != ordinal)
            i++;
        if (i < h->before.use_count)
            h->position = i + 1;
    }
    if (h->now.use_count == 0)
        h->now.put_first = h->now.put_count;
    h->now.uses[h->now.use_count++] = ordinal;
}

static void begin_step(history *h)
{
    h->now.put_count = h->now.use_count = 0;
    h->position = 0;
    h->surprised = 0;
}

static void play_order(msc_context *ctx, const uint8_t *steps, uint32_t count)
{
    static history h;
    msc__schedule schedule;
    msc__schedule_walk walk;
    uint32_t i, ahead, ordinal;

    memset(&h, 0, sizeof h);
    memset(&schedule, 0, sizeof schedule);
    for (i = 0; i < count; i++, steps += 3) {
        if (steps[0] < 100) {
            h.now.sizes[h.now.put_count] = steps[1] % 4u;
            require(msc__schedule_put(ctx, &schedule, steps[1] % 4u, &ordinal, NULL) == MSC_OK);
            require(ordinal == h.now.put_count++);
        } else if (steps[0] < 230 && h.now.put_count > 0) {
            /* Mostly what is expected, so that steps repeat. */
            ordinal = steps[1] < 200 ? expected(&h, 0) : steps[2] % h.now.put_count;
            if (ordinal >= h.now.put_count) /* nothing, or what is not put yet */
                ordinal = steps[2] % h.now.put_count;
            msc__schedule_use(ctx, &schedule, ordinal);
            note_use(&h, ordinal);
        } else if (steps[0] < 240) {
            msc__schedule_forget(&schedule);
            begin_step(&h);
        } else {
            require(msc__schedule_step(ctx, &schedule) ==
                    (is_known(&h) && h.now.put_count == h.before.put_count && !h.surprised));
            h.before = h.now;
            begin_step(&h);
        }
        walk = msc__schedule_ahead(&schedule);
        for (ahead = 0; ahead < 8; ahead++)
            require(msc__schedule_next(&walk) == expected(&h, ahead));
    }
    msc__schedule_fini(ctx, &schedule);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    msc_context *ctx = NULL;
    uint32_t count;

    if (size < 3)
        return 0;
    count = size / 3 - 1 < STEPS_MOST ? (uint32_t)(size / 3 - 1) : STEPS_MOST;
    require(msc_context_create(NULL, &ctx, NULL) == MSC_OK);
    if (data[0] % 3 == 0)
        play_ranges(ctx, data + 1, data + 3, count);
    else if (data[0] % 3 == 1)
        play_slabs(ctx, data + 1, data + 3, count);
    else
        play_order(ctx, data + 3, count);
    require(msc_context_held_bytes(ctx) == 0);
    msc_context_destroy(ctx);
    return 0;
}
