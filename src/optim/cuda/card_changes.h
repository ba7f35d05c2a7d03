/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file card_changes.h
 * Conversions on a card, of a thread's elements: one by one, or codes, which need the largest of their block.
 * Part of card_template.h.
 */

MSC__CORE void msc__card_narrow(void *to, uint32_t type, uint64_t at, float x)
{
    if (type == MSC_OPTIM_FLOAT_FP32)
        ((float *)to)[at] = x;
    else if (type == MSC_OPTIM_FLOAT_BF16)
        ((uint16_t *)to)[at] = msc__narrow_bf16(x);
    else
        ((uint16_t *)to)[at] = msc__narrow_fp16(x);
}

MSC__CORE void msc__card_read_adam(const msc__card_arrays *by, uint64_t at)
{
    uint64_t block = at / MSC_OPTIM_BLOCK;
    float root = msc__card_root(by->from[2], (const uint8_t *)by->from[3], at, block);

    ((float *)by->to[0])[at] = msc__card_signed(by->from[0], (const uint8_t *)by->from[1], at, block) * root;
    ((float *)by->to[1])[at] = root * root;
}

MSC__CORE void msc__card_change_one(const msc__card_arrays *by, uint64_t at)
{
    const float *floats = (const float *)by->from[0];
    float *sums = (float *)by->to[0];

    switch (by->change) {
    case MSC__CHANGE_TYPE:
        msc__card_narrow(by->to[0], by->to_type, at, msc__card_number(by->from[0], by->type, at));
        return;
    case MSC__CHANGE_ADD:
        sums[at] = sums[at] + msc__card_number(by->from[0], by->type, at);
        return;
    case MSC__CHANGE_SPLIT:
        msc__card_split(by->to[0], by->to[1], by->form, at, floats[at], MSC__NEAREST_MASTER);
        return;
    case MSC__CHANGE_JOIN:
        sums[at] = msc__card_master(by->from[0], by->from[1], by->form, at);
        return;
    case MSC__CHANGE_NEAREST:
        ((uint16_t *)by->to[0])[at] = msc__narrow_bf16_random(floats[at], MSC__NEAREST_BF16 & 0xFFFFu);
        return;
    case MSC__CHANGE_READ_SIGNED:
        sums[at] = msc__card_signed(by->from[0], (const uint8_t *)by->from[1], at, at / MSC_OPTIM_BLOCK);
        return;
    default:
        msc__card_read_adam(by, at);
    }
}

/** First element of a thread. */
MSC__CORE uint64_t msc__card_at(uint32_t strip, uint32_t thread)
{
    uint64_t warp = (uint64_t)strip * (MSC__CARD_THREADS / MSC__CARD_WARP) + thread / MSC__CARD_WARP;

    return warp * MSC_OPTIM_BLOCK + thread % MSC__CARD_WARP;
}

MSC__CORE void msc__card_change_each(const msc__card_arrays *by, uint64_t at)
{
    uint32_t i;

    MSC__UNROLL
    for (i = 0; i < MSC__CARD_EACH; i++, at += MSC__CARD_WARP)
        if (at < by->count)
            msc__card_change_one(by, at);
}

/* ---- codes ------------------------------------------------------------------------------------------------------ */

/**
 * Rounded to nearest, in the smallest scale that holds a block; but in the next larger one, if that holds all of it exactly
 * and the smallest does not (optim_template_codes.h).
 */
typedef struct msc__card_codes {
    float moment1[MSC__CARD_EACH]; /* Adam's become ratios */
    float moment2[MSC__CARD_EACH]; /* roots */
    uint32_t most;                 /* largest pattern of the block */
    uint32_t differ;               /* not 0: the smallest scale changes an element */
    uint32_t differ_next;          /* not 0: so does the next */
} msc__card_codes;

MSC__CORE float msc__card_through_signed(float x, uint32_t scale)
{
    uint32_t code = msc__encode_signed(x, msc__scale_inverse(scale), MSC__NEAREST_CODES);

    return msc__decode_signed(msc__signed_byte((uint8_t)code), msc__scale_value(scale));
}

MSC__CORE float msc__card_through_root(float x, uint32_t scale)
{
    uint32_t code = msc__encode_root(x, msc__scale_inverse(scale), MSC__NEAREST_CODES) & 0xFFu;

    return msc__decode_root(code, msc__scale_value(scale));
}

MSC__CORE void msc__card_codes_load(const msc__card_arrays *by, uint64_t at, msc__card_codes *to)
{
    uint32_t i;

    to->most = 0;
    MSC__UNROLL
    for (i = 0; i < MSC__CARD_EACH; i++, at += MSC__CARD_WARP) {
        to->moment1[i] = 0.0f;
        to->moment2[i] = 0.0f;
        if (at >= by->count)
            continue;
        to->moment1[i] = ((const float *)by->from[0])[at];
        if (by->change == MSC__CHANGE_WRITE_ADAM)
            to->moment2[i] = msc__at_most(msc__sqrt(((const float *)by->from[1])[at]), MSC__ROOT_LIMIT);
        to->most = msc__larger(to->most, msc__bits(to->moment2[i]) & ~MSC__SIGN);
    }
}

MSC__CORE void msc__card_try_roots(msc__card_codes *of)
{
    uint32_t scale = msc__scale_of(of->most, MSC__ROOT_FRACTION);
    uint32_t i;

    of->differ = 0;
    of->differ_next = 0;
    MSC__UNROLL
    for (i = 0; i < MSC__CARD_EACH; i++) {
        float x = of->moment2[i];

        of->differ |= msc__bits(msc__card_through_root(x, scale)) ^ msc__bits(x);
        of->differ_next |= msc__bits(msc__card_through_root(x, scale + 1)) ^ msc__bits(x);
    }
}

MSC__CORE void msc__card_try_signed(msc__card_codes *of)
{
    uint32_t scale = msc__scale_of(of->most, MSC__SIGNED_FRACTION);
    uint32_t i;

    of->differ = 0;
    of->differ_next = 0;
    MSC__UNROLL
    for (i = 0; i < MSC__CARD_EACH; i++) {
        float x = of->moment1[i];

        of->differ |= msc__bits(msc__card_through_signed(x, scale)) ^ msc__bits(x);
        of->differ_next |= msc__bits(msc__card_through_signed(x, scale + 1)) ^ msc__bits(x);
    }
}

MSC__CORE uint32_t msc__card_chosen(const msc__card_codes *of, uint32_t fraction)
{
    return msc__scale_of(of->most, fraction) + (of->differ != 0 && of->differ_next == 0);
}

/** Roots are stored; m becomes m over the root that is then there. */
MSC__CORE void msc__card_write_roots(const msc__card_arrays *by, uint64_t at, msc__card_codes *of)
{
    uint32_t scale = msc__card_chosen(of, MSC__ROOT_FRACTION);
    uint32_t most = 0;
    uint32_t i;

    MSC__UNROLL
    for (i = 0; i < MSC__CARD_EACH; i++, at += MSC__CARD_WARP) {
        float root = msc__card_through_root(of->moment2[i], scale);

        if (at >= by->count)
            continue;
        ((uint8_t *)by->to[2])[at] =
            (uint8_t)msc__encode_root(of->moment2[i], msc__scale_inverse(scale), MSC__NEAREST_CODES);
        if (at % MSC_OPTIM_BLOCK == 0)
            ((uint8_t *)by->to[3])[at / MSC_OPTIM_BLOCK] = (uint8_t)scale;
        of->moment1[i] = msc__ratio(of->moment1[i], root);
        most = msc__larger(most, msc__bits(of->moment1[i]) & ~MSC__SIGN);
    }
    of->most = most;
}

MSC__CORE void msc__card_most_signed(msc__card_codes *of)
{
    uint32_t i;

    of->most = 0;
    MSC__UNROLL
    for (i = 0; i < MSC__CARD_EACH; i++)
        of->most = msc__larger(of->most, msc__bits(of->moment1[i]) & ~MSC__SIGN);
}

MSC__CORE void msc__card_write_signed(const msc__card_arrays *by, uint64_t at, const msc__card_codes *of)
{
    uint32_t scale = msc__card_chosen(of, MSC__SIGNED_FRACTION);
    uint32_t i;

    MSC__UNROLL
    for (i = 0; i < MSC__CARD_EACH; i++, at += MSC__CARD_WARP) {
        if (at >= by->count)
            continue;
        ((uint8_t *)by->to[0])[at] =
            (uint8_t)msc__encode_signed(of->moment1[i], msc__scale_inverse(scale), MSC__NEAREST_CODES);
        if (at % MSC_OPTIM_BLOCK == 0)
            ((uint8_t *)by->to[1])[at / MSC_OPTIM_BLOCK] = (uint8_t)scale;
    }
}
