/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file card_step.h
 * A step on a card: what a thread does with its elements. Part of card_template.h.
 *
 *      load     gradient, weight, moments ──► weight and moments after the step, in registers; largest of them
 *      (warp)   largest of the block ──► scales
 *      store    weight and master, moments, scales
 */

/** Elements of a thread between load and store; those that are not there are 0. */
typedef struct msc__card_piece {
    float weight[MSC__CARD_EACH];
    float moment1[MSC__CARD_EACH]; /* Adam with codes: the ratio */
    float moment2[MSC__CARD_EACH]; /* and the root */
    uint32_t most1;                /* largest patterns */
    uint32_t most2;
} msc__card_piece;

/** Where a thread works. */
typedef struct msc__card_place {
    uint32_t tensor;
    uint64_t at;    /* its first element; the others follow MSC__CARD_WARP apart */
    uint64_t block; /* of them */
} msc__card_place;

MSC__CORE msc__card_place msc__card_find(const msc__card_step *by, uint32_t strip, uint32_t thread)
{
    msc__card_place here;
    uint32_t low = 0;
    uint32_t high = by->tensor_count - 1;
    uint64_t warp;

    while (low < high) {
        uint32_t middle = (low + high) / 2;

        if (strip < by->tensors[middle].after)
            high = middle;
        else
            low = middle + 1;
    }
    if (low > 0)
        strip -= by->tensors[low - 1].after;
    warp = (uint64_t)strip * (MSC__CARD_THREADS / MSC__CARD_WARP) + thread / MSC__CARD_WARP;
    here.tensor = low;
    here.at = warp * MSC_OPTIM_BLOCK + thread % MSC__CARD_WARP;
    here.block = warp;
    return here;
}

MSC__CORE float msc__card_number(const void *from, uint32_t type, uint64_t at)
{
    if (type == MSC_OPTIM_FLOAT_FP32)
        return ((const float *)from)[at];
    if (type == MSC_OPTIM_FLOAT_BF16)
        return msc__widen_bf16(((const uint16_t *)from)[at]);
    return msc__widen_fp16(((const uint16_t *)from)[at]);
}

MSC__CORE float msc__card_master(const void *weight, const void *master, uint32_t form, uint64_t at)
{
    if (form == MSC_OPTIM_WEIGHTS_FP32)
        return ((const float *)weight)[at];
    if (form == MSC_OPTIM_WEIGHTS_MASTER_FP32)
        return ((const float *)master)[at];
    if (form == MSC_OPTIM_WEIGHTS_MASTER_REST16)
        return msc__join_rest16(((const uint16_t *)weight)[at], ((const uint16_t *)master)[at]);
    return msc__join_rest8(((const uint16_t *)weight)[at], ((const uint8_t *)master)[at]);
}

/** `random`: its lower 8 bits round a 24-bit master. */
MSC__CORE void msc__card_split(void *weight, void *master, uint32_t form, uint64_t at, float x,
                               uint32_t random)
{
    uint32_t bits;

    if (form == MSC_OPTIM_WEIGHTS_FP32) {
        ((float *)weight)[at] = x;
    } else if (form == MSC_OPTIM_WEIGHTS_MASTER_FP32) {
        ((uint16_t *)weight)[at] = msc__narrow_bf16(x);
        ((float *)master)[at] = x;
    } else if (form == MSC_OPTIM_WEIGHTS_MASTER_REST16) {
        bits = msc__master_bits(x);
        ((uint16_t *)weight)[at] = msc__master_weight(bits);
        ((uint16_t *)master)[at] = (uint16_t)(bits & 0xFFFFu);
    } else {
        bits = msc__master24_bits(x, random & 0xFFu);
        ((uint16_t *)weight)[at] = msc__master_weight(bits);
        ((uint8_t *)master)[at] = (uint8_t)(bits >> 8 & 0xFFu);
    }
}

MSC__CORE float msc__card_signed(const void *codes, const uint8_t *scales, uint64_t at, uint64_t block)
{
    return msc__decode_signed(msc__signed_byte(((const uint8_t *)codes)[at]),
                              msc__scale_value(scales[block]));
}

MSC__CORE float msc__card_root(const void *codes, const uint8_t *scales, uint64_t at, uint64_t block)
{
    return msc__decode_root(((const uint8_t *)codes)[at], msc__scale_value(scales[block]));
}

MSC__CORE float msc__card_moment1(const msc__card_step *by, const msc__card_tensor *of, uint64_t at,
                                  uint64_t block)
{
    if (by->update == MSC__UPDATE_SGD)
        return 0.0f;
    if (by->moments == MSC_OPTIM_MOMENTS_FP32)
        return ((const float *)of->moment1)[at];
    if (by->moments == MSC_OPTIM_MOMENTS_BF16)
        return msc__widen_bf16(((const uint16_t *)of->moment1)[at]);
    return msc__card_signed(of->moment1, of->scale1, at, block);
}

MSC__CORE float msc__card_moment2(const msc__card_step *by, const msc__card_tensor *of, uint64_t at,
                                  uint64_t block)
{
    if (by->update > MSC__UPDATE_ADAM_CODES)
        return 0.0f;
    if (by->moments == MSC_OPTIM_MOMENTS_FP32)
        return ((const float *)of->moment2)[at];
    if (by->moments == MSC_OPTIM_MOMENTS_BF16)
        return msc__widen_bf16(((const uint16_t *)of->moment2)[at]);
    return msc__card_root(of->moment2, of->scale2, at, block);
}

MSC__CORE void msc__card_apply(const msc__card_step *by, float g, float *w, float *m, float *v)
{
    msc__rooted of;

    switch (by->update) {
    case MSC__UPDATE_ADAM:
        msc__adam(&by->numbers, by->numbers.l2 != 0.0f, g, w, m, v);
        return;
    case MSC__UPDATE_ADAM_CODES:
        of.ratio = *m;
        of.root = *v;
        msc__adam_rooted_moments(&by->numbers, by->numbers.l2 != 0.0f, g, w, &of);
        msc__adam_rooted_weight(&by->numbers, w, &of);
        *m = of.ratio;
        *v = of.root;
        return;
    case MSC__UPDATE_SGD:
        msc__sgd(&by->numbers, g, w);
        return;
    case MSC__UPDATE_LION:
        msc__lion(&by->numbers, g, w, m);
        return;
    default:
        msc__sgd_momentum(&by->numbers, by->update == MSC__UPDATE_NESTEROV, g, w, m);
    }
}

MSC__CORE void msc__card_load(const msc__card_step *by, msc__card_place here, msc__card_piece *to)
{
    const msc__card_tensor *of = &by->tensors[here.tensor];
    uint32_t i;

    to->most1 = 0;
    to->most2 = 0;
    MSC__UNROLL
    for (i = 0; i < MSC__CARD_EACH; i++) {
        uint64_t at = here.at + i * MSC__CARD_WARP;
        float weight = 0.0f;
        float moment1 = 0.0f;
        float moment2 = 0.0f;

        if (at < of->count) {
            weight = msc__card_master(of->weight, of->master, by->weights, at);
            moment1 = msc__card_moment1(by, of, at, here.block);
            moment2 = msc__card_moment2(by, of, at, here.block);
            msc__card_apply(by, msc__card_number(of->gradient, by->gradient, at), &weight, &moment1,
                            &moment2);
        }
        to->weight[i] = weight;
        to->moment1[i] = moment1;
        to->moment2[i] = moment2;
        to->most1 = msc__larger(to->most1, msc__bits(moment1) & ~MSC__SIGN);
        to->most2 = msc__larger(to->most2, msc__bits(moment2));
    }
}

MSC__CORE void msc__card_store_codes(const msc__card_step *by, const msc__card_tensor *of, uint64_t at,
                                     const msc__card_piece *from, uint32_t i, uint32_t random)
{
    float inverse1 = msc__scale_inverse(msc__scale_of(from->most1, MSC__SIGNED_FRACTION));
    float inverse2 = msc__scale_inverse(msc__scale_of(from->most2, MSC__ROOT_FRACTION));

    ((uint8_t *)of->moment1)[at] = (uint8_t)msc__encode_signed(from->moment1[i], inverse1, random);
    if (by->update == MSC__UPDATE_ADAM_CODES)
        ((uint8_t *)of->moment2)[at] = (uint8_t)msc__encode_root(from->moment2[i], inverse2, random);
}

MSC__CORE void msc__card_store_moments(const msc__card_step *by, const msc__card_tensor *of, uint64_t at,
                                       const msc__card_piece *from, uint32_t i, uint32_t random)
{
    if (by->update == MSC__UPDATE_SGD)
        return;
    if (by->moments == MSC_OPTIM_MOMENTS_FP32) {
        ((float *)of->moment1)[at] = from->moment1[i];
        if (by->update == MSC__UPDATE_ADAM)
            ((float *)of->moment2)[at] = from->moment2[i];
    } else if (by->moments == MSC_OPTIM_MOMENTS_BF16) {
        ((uint16_t *)of->moment1)[at] = msc__narrow_bf16_random(from->moment1[i], random >> 16);
        if (by->update == MSC__UPDATE_ADAM)
            ((uint16_t *)of->moment2)[at] = msc__narrow_bf16_random(from->moment2[i], random & 0xFFFFu);
    } else {
        msc__card_store_codes(by, of, at, from, i, random);
    }
}

/** `from`: its largest patterns are those of the block. */
MSC__CORE void msc__card_store(const msc__card_step *by, msc__card_place here, const msc__card_piece *from)
{
    const msc__card_tensor *of = &by->tensors[here.tensor];
    uint32_t i;

    MSC__UNROLL
    for (i = 0; i < MSC__CARD_EACH; i++) {
        uint64_t at = here.at + i * MSC__CARD_WARP;
        uint32_t random = msc__random(of->random + (uint32_t)at * MSC__RANDOM_STEP);

        if (at >= of->count)
            return;
        msc__card_store_moments(by, of, at, from, i, random);
        msc__card_split(of->weight, of->master, by->weights, at, from->weight[i], random);
    }
}

/** The scales of a block, by one thread that has an element of it. */
MSC__CORE void msc__card_store_scales(const msc__card_step *by, msc__card_place here,
                                      const msc__card_piece *from)
{
    const msc__card_tensor *of = &by->tensors[here.tensor];

    if (by->moments != MSC_OPTIM_MOMENTS_CODE8 || by->update == MSC__UPDATE_SGD ||
        here.at != here.block * MSC_OPTIM_BLOCK || here.at >= of->count)
        return;
    of->scale1[here.block] = (uint8_t)msc__scale_of(from->most1, MSC__SIGNED_FRACTION);
    if (by->update == MSC__UPDATE_ADAM_CODES)
        of->scale2[here.block] = (uint8_t)msc__scale_of(from->most2, MSC__ROOT_FRACTION);
}
