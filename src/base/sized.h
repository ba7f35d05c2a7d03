/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sized.h
 * Structs whose size the caller tells: options that it fills, results that it allocates. Either may be of an older
 * version of the headers, and shorter, or of a newer one.
 */
#ifndef MSC_BASE_SIZED_H
#define MSC_BASE_SIZED_H

#include <stddef.h>

#include "memscale/status.h"

/** Bytes of a struct up to a field, with it. */
#define MSC__THROUGH(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))

/** Copies what both have; the rest of `to` is zero. */
void msc__sized_copy(void *to, size_t to_bytes, const void *from, size_t from_bytes);

/** As `msc__sized_copy` of the defaults into options, whose first field then says `to_bytes`. */
void msc__sized_init(void *to, size_t to_bytes, const void *defaults, size_t bytes);

/** What a call knows of the options that it is given. */
typedef struct msc__sized_options {
    const char *name; /* of the struct, in messages: "" or "rates." */
    size_t
        first_bytes; /* of the shortest that it accepts: through the last field that it cannot do without */
    size_t bytes;    /* of its own */
} msc__sized_options;

/**
 * Reads what a caller has given over what is in `out`, the defaults.
 *
 * Errors: EINVAL: shorter than the shortest, or longer than ours with something there that is not zero.
 */
msc_status msc__sized_read(const msc__sized_options *what, const void *given, void *out, msc_error *err);

/** `msc__sized_read` of `given`, a struct like `out`, that has all up to `field`. */
#define MSC__READ_OPTIONS(prefix, type, field, given, out, err)                                              \
    msc__sized_read(&(msc__sized_options){(prefix), MSC__THROUGH(type, field), sizeof(type)}, (given),       \
                    (out), (err))

#endif /* MSC_BASE_SIZED_H */
