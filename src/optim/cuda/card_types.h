/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file card_types.h
 * What the kernels of a card are given: one argument each, copied by the driver when a kernel is submitted. An argument
 * has at most 4096 bytes, which is how long its list can be.
 *
 * Read by the library, which fills them, and by what compiles the kernels.
 */
#ifndef MSC_OPTIM_CARD_TYPES_H
#define MSC_OPTIM_CARD_TYPES_H

#include "device/cuda/card_group.h"
#include "memscale/optim.h"
#include "optim/adamw_core.h"
#include "optim/sums_core.h"

/**
 * Elements of a thread. A warp has a block of elements, and thread i of it the elements i, i + 32, …, so that what a warp
 * reads at a time lies together, whatever its type and alignment. A group has a strip.
 */
#define MSC__CARD_EACH (MSC_OPTIM_BLOCK / MSC__CARD_WARP)
#define MSC__CARD_STRIP (MSC__CARD_THREADS * MSC__CARD_EACH)

/* ---- a step -------------------------------------------------------------------------------------------------- */

typedef enum msc__card_update {
    MSC__UPDATE_ADAM,
    MSC__UPDATE_ADAM_CODES,
    MSC__UPDATE_SGD,
    MSC__UPDATE_MOMENTUM,
    MSC__UPDATE_NESTEROV,
    MSC__UPDATE_LION
} msc__card_update;

/** A tensor of a step, or part of one. */
typedef struct msc__card_tensor {
    const void *gradient;
    void *weight;
    void *master;
    void *moment1;
    void *moment2;
    uint8_t *scale1;
    uint8_t *scale2;
    uint64_t count;
    uint32_t random; /* number of element 0, see `msc__random` */
    uint32_t after;  /* strips of the list up to this tensor's last one */
} msc__card_tensor;

#define MSC__CARD_TENSORS 54u

/** Tensors whose step has the same number. */
typedef struct msc__card_step {
    msc__optim_numbers numbers;
    uint8_t update;   /* msc__card_update */
    uint8_t gradient; /* msc_optim_float */
    uint8_t weights;  /* msc_optim_weights */
    uint8_t moments;  /* msc_optim_moments */
    uint32_t tensor_count;
    msc__card_tensor tensors[MSC__CARD_TENSORS];
} msc__card_step;

/* ---- sums ---------------------------------------------------------------------------------------------------- */

/** What the card has of a norm: a sum and a count for each segment. */
typedef struct msc__card_sums {
    double sums[MSC__SEGMENTS];
    uint64_t bad[MSC__SEGMENTS];
} msc__card_sums;

typedef struct msc__card_array {
    const void *values;
    uint64_t count;
    uint64_t after; /* strips of all arrays up to this one's last */
    uint64_t type;  /* msc_optim_float */
} msc__card_array;

#define MSC__CARD_ARRAYS 124u

/** Some of the arrays of a norm, which follow each other. */
typedef struct msc__card_norm {
    msc__card_sums *sums;
    uint64_t first;  /* strips of all arrays before these */
    uint64_t strips; /* of all arrays of the norm */
    float scale;
    uint32_t array_count;
    msc__card_array arrays[MSC__CARD_ARRAYS];
} msc__card_norm;

/* ---- conversions ----------------------------------------------------------------------------------------------- */

typedef enum msc__card_change {
    MSC__CHANGE_TYPE,         /* numbers ──► numbers of another type */
    MSC__CHANGE_ADD,          /* numbers ──► added to floats */
    MSC__CHANGE_SPLIT,        /* floats ──► weights, masters */
    MSC__CHANGE_JOIN,         /* weights, masters ──► floats */
    MSC__CHANGE_NEAREST,      /* floats ──► BF16 moments */
    MSC__CHANGE_READ_SIGNED,  /* codes, scales ──► floats */
    MSC__CHANGE_READ_ADAM,    /* codes, scales of both moments ──► floats of both */
    MSC__CHANGE_WRITE_SIGNED, /* floats ──► codes, scales */
    MSC__CHANGE_WRITE_ADAM    /* floats of both moments ──► codes, scales of both */
} msc__card_change;

/** Arrays in the order that the change names them in. */
typedef struct msc__card_arrays {
    const void *from[4];
    void *to[4];
    uint64_t count;
    uint8_t change; /* msc__card_change */
    uint8_t type;   /* msc_optim_float, of what is read */
    uint8_t to_type;
    uint8_t form; /* msc_optim_weights */
} msc__card_arrays;

#endif /* MSC_OPTIM_CARD_TYPES_H */
