/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file adamw_core.h
 * The update of one element, for every optimizer: the one place where the formulas stand.
 *
 * Compiled for each instruction set with contraction off: each operation below is rounded once, in the order written.
 * The order is that of torch's single-tensor optimizers (torch/optim/adam.py, sgd.py); Lion's that of its paper
 * (Chen et al. 2023, arXiv 2302.06675).
 */
#ifndef MSC_OPTIM_ADAMW_CORE_H
#define MSC_OPTIM_ADAMW_CORE_H

#include "optim/convert_core.h"

/** Rounded correctly. */
#ifndef MSC__SQRT
#define MSC__SQRT(x) __builtin_sqrtf(x)
#endif

/** What follows from a rule and a step's number, computed in double and rounded once. */
typedef struct msc__optim_numbers {
    float factor; /* gradient_scale, negative to maximize */
    float limit;  /* gradients are limited to ± this; infinity: not at all */
    float l2;     /* weight decay that goes into the gradient */
    float keep;   /* 1 - learning rate × weight decay, for decay of the weight; or 1 */
    float rate; /* minus step size: Adam's has the first bias correction, the others' is the learning rate */
    float average1;  /* weight of the old moment; Lion: in the sign */
    float add1;      /* weight of the gradient beside it */
    float average2;  /* the same for v; Lion: for the moment that is kept */
    float add2;      /* */
    float root2;     /* Adam: root of the second bias correction */
    float inverse2;  /* 1 over it */
    float epsilon;   /* */
    float lookahead; /* SGD with nesterov: momentum */
} msc__optim_numbers;

/** Scaled and limited; a NaN passes. */
MSC__CORE float msc__gradient(const msc__optim_numbers *by, float g)
{
    g = g * by->factor;
    g = g > by->limit ? by->limit : g;
    return g < -by->limit ? -by->limit : g;
}

/** `l2`: whether decay goes into the gradient, known when this is compiled. */
MSC__CORE void msc__adam(const msc__optim_numbers *by, int l2, float g, float *w, float *m, float *v)
{
    float weight = *w;

    g = msc__gradient(by, g);
    if (l2)
        g = g + by->l2 * weight;
    else
        weight = weight * by->keep;
    *m = *m + by->add1 * (g - *m);
    *v = *v * by->average2 + by->add2 * g * g;
    *w = weight + by->rate * *m / (MSC__SQRT(*v) / by->root2 + by->epsilon);
}

MSC__CORE void msc__sgd(const msc__optim_numbers *by, float g, float *w)
{
    g = msc__gradient(by, g) + by->l2 * *w;
    *w = *w + by->rate * g;
}

/** The first step's numbers say average1 0 and add1 1: the moment becomes the gradient, as torch's does. */
MSC__CORE void msc__sgd_momentum(const msc__optim_numbers *by, int nesterov, float g, float *w, float *m)
{
    g = msc__gradient(by, g) + by->l2 * *w;
    *m = by->average1 * *m + by->add1 * g;
    *w = *w + by->rate * (nesterov ? g + by->lookahead * *m : *m);
}

MSC__CORE void msc__lion(const msc__optim_numbers *by, float g, float *w, float *m)
{
    float mix;
    float sign;

    g = msc__gradient(by, g);
    mix = by->average1 * *m + by->add1 * g;
    sign = mix > 0.0f ? 1.0f : 0.0f;
    sign = mix < 0.0f ? -1.0f : sign;
    sign = mix == mix ? sign : mix;
    *w = *w * by->keep + by->rate * sign;
    *m = by->average2 * *m + by->add2 * g;
}

#endif /* MSC_OPTIM_ADAMW_CORE_H */
