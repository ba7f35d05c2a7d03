/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file card_sums.h
 * Sums of squares on a card, in the order of optim_sums.c: a group of threads has a segment, and adds up its strips as many
 * at a time as it has sixteens of threads, each one of a strip's sixteen lanes. Part of card_template.h.
 */

#define MSC__CARD_LANES 16u
#define MSC__CARD_AT_A_TIME (MSC__CARD_THREADS / MSC__CARD_LANES)

/** Of a thread: its lane of a strip; then, in each first lane, the strip. */
typedef struct msc__card_lane {
    double sum;
    uint32_t bad;
} msc__card_lane;

/** What the threads of a group show each other. */
typedef struct msc__card_shown {
    double sum[MSC__CARD_AT_A_TIME];
    uint32_t bad[MSC__CARD_AT_A_TIME];
} msc__card_shown;

MSC__CORE uint32_t msc__card_find_array(const msc__card_norm *by, uint64_t strip)
{
    uint32_t low = 0;
    uint32_t high = by->array_count - 1;

    while (low < high) {
        uint32_t middle = (low + high) / 2;

        if (strip < by->arrays[middle].after)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/** Squares in double, where no float's overflows. Numbers that are not finite are counted and left out. */
MSC__CORE void msc__card_squares(const msc__card_norm *by, uint64_t strip, uint64_t end, uint32_t thread,
                                 msc__card_lane *to)
{
    const msc__card_array *of;
    uint32_t number;
    uint64_t at, left;
    uint32_t i;

    to->sum = 0.0;
    to->bad = 0;
    strip += thread / MSC__CARD_LANES;
    if (strip >= end)
        return;
    number = msc__card_find_array(by, strip);
    of = &by->arrays[number];
    at = (strip - (number > 0 ? by->arrays[number - 1].after : by->first)) * MSC__CARD_STRIP;
    left = of->count - at < MSC__CARD_STRIP ? of->count - at : MSC__CARD_STRIP;
    for (i = thread % MSC__CARD_LANES; i < left; i += MSC__CARD_LANES) {
        float x = msc__card_number(of->values, (uint32_t)of->type, at + i) * by->scale;
        double wide = (double)x;

        if ((msc__bits(x) & ~MSC__SIGN) < MSC__EXPONENT)
            to->sum = to->sum + wide * wide;
        else
            to->bad++;
    }
}

MSC__CORE void msc__card_show(uint32_t thread, const msc__card_lane *lane, msc__card_shown *shown)
{
    if (thread % MSC__CARD_LANES != 0)
        return;
    shown->sum[thread / MSC__CARD_LANES] = lane->sum;
    shown->bad[thread / MSC__CARD_LANES] = lane->bad;
}

MSC__CORE void msc__card_begin(const msc__card_norm *by, uint32_t segment, uint32_t thread)
{
    if (thread != 0)
        return;
    by->sums->sums[segment] = 0.0;
    by->sums->bad[segment] = 0;
}

/** One thread adds what has been shown, in order. */
MSC__CORE void msc__card_total(const msc__card_norm *by, uint32_t segment, uint64_t strips, uint32_t thread,
                               const msc__card_shown *shown)
{
    double sum;
    uint64_t bad;
    uint32_t i;

    if (thread != 0)
        return;
    sum = by->sums->sums[segment];
    bad = by->sums->bad[segment];
    for (i = 0; i < MSC__CARD_AT_A_TIME && i < strips; i++) {
        sum = sum + shown->sum[i];
        bad += shown->bad[i];
    }
    by->sums->sums[segment] = sum;
    by->sums->bad[segment] = bad;
}
