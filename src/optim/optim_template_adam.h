/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file optim_template_adam.h
 * The part of optim_template.h for Adam with 8-bit codes: decodes, steps and encodes a strip. Included by it alone.
 *
 *      first time    gradient, weight, codes ──► weight after decay, root, m
 *                    weight, root, m ──► weight, ratio, largest of each group
 *      blocks        largest ──► scales
 *      second time   weight, root, ratio, random numbers ──► weight and rest, codes
 *
 * Between the times, everything is in the first-level cache. Groups are as many elements as are stored as bytes at a time;
 * a loop over them without blocks around it keeps what is the same for all in registers.
 */
/* What is known when a kernel is compiled. */
typedef struct adam_variant {
    int l2;   /* decay goes into the gradient */
    int bf16; /* gradients are */
    int rest; /* weights are BF16 with 8 bits of rest */
} adam_variant;

#define GROUPS_EACH (MSC__BLOCK / MSC__GROUP)
#define GROUPS_MOST (BLOCKS * GROUPS_EACH)

/* What lies between the first and the second time. */
typedef struct adam_between {
    _Alignas(64) float weight[MSC__STRIP];
    _Alignas(64) float root[MSC__STRIP];
    _Alignas(64) float ratio[MSC__STRIP]; /* m, at first */
    msc__ulanes most_ratio[GROUPS_MOST];  /* largest patterns in each lane */
    msc__ulanes most_root[GROUPS_MOST];
    float inverse1[BLOCKS];
    float inverse2[BLOCKS];
} adam_between;

MSC__INLINE msc__lanes adam_gradient(const msc__adam_work *work, int bf16, uint32_t i)
{
    if (bf16)
        return msc__lane_floats(msc__load_halves((const msc__u16 *)work->gradient + i) << 16);
    return msc__load((const msc__f32 *)work->gradient + i);
}

MSC__INLINE msc__lanes adam_weight(const msc__adam_work *work, int rest, uint32_t i)
{
    if (rest)
        return join_rest8_lanes((const msc__u16 *)work->weight + i, (const uint8_t *)work->rest + i);
    return msc__load((const msc__f32 *)work->weight + i);
}

/* The first time, its first half: up to the root. */
MSC__INLINE void moments_group(const msc__optim_numbers *by, adam_variant variant, const msc__adam_work *work,
                               uint32_t group, adam_between *between)
{
    float value1 = msc__scale_value(work->codes.scale1[group / GROUPS_EACH]);
    float value2 = msc__scale_value(work->codes.scale2[group / GROUPS_EACH]);
    msc__f32 *to = variant.rest ? between->weight : work->weight;
    uint32_t k;

    for (k = 0; k < MSC__FOUR; k++) {
        uint32_t i = group * MSC__GROUP + k * MSC__LANES;
        msc__lanes weight = adam_weight(work, variant.rest, i);
        msc__rooted of = {msc__decode_root(msc__load_bytes(work->codes.code2 + i), value2),
                          msc__decode_signed(msc__load_signed_bytes(work->codes.code1 + i), value1)};

        msc__adam_rooted_moments(by, variant.l2, adam_gradient(work, variant.bf16, i), &weight, &of);
        msc__store(to + i, weight);
        msc__store(between->root + i, of.root);
        msc__store(between->ratio + i, of.ratio);
    }
}

/* Its second half: the weight, and what is to be encoded. */
MSC__INLINE void weight_group(const msc__optim_numbers *by, adam_variant variant, const msc__adam_work *work,
                              uint32_t group, adam_between *between)
{
    msc__f32 *to = variant.rest ? between->weight : work->weight;
    msc__ulanes most1 = {0};
    msc__ulanes most2 = {0};
    uint32_t k;

    for (k = 0; k < MSC__FOUR; k++) {
        uint32_t i = group * MSC__GROUP + k * MSC__LANES;
        msc__lanes weight = msc__load(to + i);
        msc__rooted of = {msc__load(between->root + i), msc__load(between->ratio + i)};

        msc__adam_rooted_weight(by, &weight, &of);
        msc__store(to + i, weight);
        msc__store(between->ratio + i, of.ratio);
        most1 = msc__larger(most1, msc__lane_bits(of.ratio) & ~MSC__SIGN);
        most2 = msc__larger(most2, msc__lane_bits(of.root));
    }
    between->most_ratio[group] = most1;
    between->most_root[group] = most2;
}

/* Scales of a block, and what to encode with. */
MSC__INLINE void scale_block(const msc__adam_work *work, uint32_t block, adam_between *between)
{
    const msc__ulanes *most1 = between->most_ratio + block * GROUPS_EACH;
    const msc__ulanes *most2 = between->most_root + block * GROUPS_EACH;
    msc__ulanes most_ratio = most1[0];
    msc__ulanes most_root = most2[0];
    uint32_t scale1, scale2, i;

    for (i = 1; i < GROUPS_EACH; i++) {
        most_ratio = msc__larger(most_ratio, most1[i]);
        most_root = msc__larger(most_root, most2[i]);
    }
    scale1 = msc__scale_of(msc__largest(most_ratio), MSC__SIGNED_FRACTION);
    scale2 = msc__scale_of(msc__largest(most_root), MSC__ROOT_FRACTION);
    work->codes.scale1[block] = (uint8_t)scale1;
    work->codes.scale2[block] = (uint8_t)scale2;
    between->inverse1[block] = msc__scale_inverse(scale1);
    between->inverse2[block] = msc__scale_inverse(scale2);
}

/* The second time. */
MSC__INLINE msc__ulanes encode_group(adam_variant variant, const msc__adam_work *work, uint32_t group,
                                     const adam_between *between, msc__ulanes *numbers, msc__ulanes most)
{
    msc__ulanes random[MSC__FOUR], codes1[MSC__FOUR], codes2[MSC__FOUR];
    float inverse1 = between->inverse1[group / GROUPS_EACH];
    float inverse2 = between->inverse2[group / GROUPS_EACH];
    uint32_t i = group * MSC__GROUP;
    uint32_t k;

    for (k = 0; k < MSC__FOUR; k++) {
        uint32_t at = i + k * MSC__LANES;

        random[k] = msc__lane_random(*numbers);
        *numbers = *numbers + MSC__RANDOM_STEP * MSC__LANES;
        codes1[k] = msc__encode_signed(msc__load(between->ratio + at), inverse1, random[k]);
        codes2[k] = msc__encode_root(msc__load(between->root + at), inverse2, random[k]);
    }
    msc__store_bytes(work->codes.code1 + i, codes1);
    msc__store_bytes(work->codes.code2 + i, codes2);
    if (variant.rest)
        most = split_rest8_group((msc__u16 *)work->weight + i, (uint8_t *)work->rest + i, between->weight + i,
                                 random, most);
    return most;
}

MSC__INLINE void adam_codes_variant(const msc__optim_numbers *by, adam_variant variant,
                                    const msc__adam_work *work)
{
    msc__optim_numbers numbers = *by;
    msc__adam_work here = *work;
    msc__ulanes rising = msc__rising(MSC__RANDOM_STEP) + here.first;
    msc__ulanes most = {0};
    adam_between between;
    uint32_t i;

    for (i = 0; i < here.blocks * GROUPS_EACH; i++)
        moments_group(&numbers, variant, &here, i, &between);
    for (i = 0; i < here.blocks * GROUPS_EACH; i++)
        weight_group(&numbers, variant, &here, i, &between);
    for (i = 0; i < here.blocks; i++)
        scale_block(&here, i, &between);
    for (i = 0; i < here.blocks * GROUPS_EACH; i++)
        most = encode_group(variant, &here, i, &between, &rising, most);
    if (variant.rest && msc__largest(most) >= SPLIT_SPECIAL) {
        uint32_t random[MSC__STRIP];

        fill_random(random, here.first, here.blocks * MSC__BLOCK);
        split_rest8_plain(here.weight, here.rest, between.weight, random, here.blocks * MSC__BLOCK);
    }
}

static void adam_codes(const msc__optim_numbers *by, const msc__adam_work *work)
{
    int variant = (by->l2 != 0.0f) << 2 | (work->type == MSC_OPTIM_FLOAT_BF16) << 1 | (work->rest != NULL);

    switch (variant) {
    case 0:
        adam_codes_variant(by, (adam_variant){0, 0, 0}, work);
        return;
    case 1:
        adam_codes_variant(by, (adam_variant){0, 0, 1}, work);
        return;
    case 2:
        adam_codes_variant(by, (adam_variant){0, 1, 0}, work);
        return;
    case 3:
        adam_codes_variant(by, (adam_variant){0, 1, 1}, work);
        return;
    case 4:
        adam_codes_variant(by, (adam_variant){1, 0, 0}, work);
        return;
    case 5:
        adam_codes_variant(by, (adam_variant){1, 0, 1}, work);
        return;
    case 6:
        adam_codes_variant(by, (adam_variant){1, 1, 0}, work);
        return;
    default:
        adam_codes_variant(by, (adam_variant){1, 1, 1}, work);
    }
}
