/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file base.h
 * Ground rules of libmemscale: visibility, context, allocator.
 *
 * Every object of the library is created from an `msc_context`. The context owns the allocator, and
 * nothing in the library obtains memory in any other way. There is no global state: two contexts never
 * share anything, and a context can be used from one thread at a time.
 *
 * Conventions that hold in every header:
 *
 *  - A fallible call returns `msc_status` and takes, last, an optional `msc_error` that the caller owns.
 *  - `_create` writes its result to a pointer and leaves NULL there on failure; `_destroy` accepts NULL.
 *  - Sizes are `uint64_t` bytes, counts and ids `uint32_t`, times `int64_t` nanoseconds. The unit is the
 *    last word of the name.
 *  - Option structs start with `struct_bytes`, which `_default` and `_init` fill in. A newer library accepts an older
 *    caller's shorter struct: what that does not have is the default. An older library accepts a newer caller's longer
 *    one where what it does not know is zero, as `_init` leaves it, and refuses it otherwise (EINVAL). New fields come
 *    at the end, none into padding. A result that may grow is filled by a call that takes its size, and what is beyond the
 *    library's own is zero. Elements of arrays and structs inside of others never grow.
 *  - A call that can fail is MSC_NODISCARD.
 *  - The library never prints, exits, aborts or reads the environment.
 */
#ifndef MEMSCALE_BASE_H
#define MEMSCALE_BASE_H

#include <stddef.h>
#include <stdint.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Version of the library and of its headers, semantic versioning. */
#define MSC_VERSION_MAJOR 0
#define MSC_VERSION_MINOR 1
#define MSC_VERSION_PATCH 0
#define MSC_VERSION_TEXT "0.1.0"

/** "No such id", for every id type of the library. */
#define MSC_NONE UINT32_MAX

/**
 * Source of all memory.
 *
 * One function serves allocation (`old` NULL), growth, shrinking and release (`new_bytes` 0, result
 * ignored). It returns NULL when memory cannot be had, and then leaves `old` as it was. The result is
 * aligned for any fundamental type. `old_bytes` is the size last asked for, so an allocator needs no
 * headers of its own.
 */
typedef struct msc_allocator {
    void *user; /**< handed back unchanged */
    void *(*resize)(void *user, void *old, size_t old_bytes, size_t new_bytes);
} msc_allocator;

/** Options of a context. */
typedef struct msc_context_options {
    size_t struct_bytes;         /**< sizeof(msc_context_options) */
    msc_allocator allocator;     /**< all zero: the C library's realloc and free */
    uint64_t memory_limit_bytes; /**< most that the context may hold at once; 0: no limit */
} msc_context_options;

typedef struct msc_context msc_context;

/** Fills a struct of `struct_bytes` with every default, and its first field. */
MSC_API void msc_context_options_init(msc_context_options *options, size_t struct_bytes);

/** The same for the struct of this header. */
static inline msc_context_options msc_context_options_default(void)
{
    msc_context_options options;

    msc_context_options_init(&options, sizeof options);
    return options;
}

/**
 * Creates a context.
 *
 * @param options NULL for the defaults.
 * @param out     the caller owns the result and ends it with `msc_context_destroy`, after every object
 *                made from it.
 * Errors: EINVAL (struct_bytes unknown), ENOMEM.
 * Threads: distinct contexts are independent.
 */
MSC_API MSC_NODISCARD msc_status msc_context_create(const msc_context_options *options, msc_context **out,
                                                    msc_error *err);

/** Ends a context. Objects made from it must be gone. NULL is accepted. */
MSC_API void msc_context_destroy(msc_context *ctx);

/** Bytes that the context's objects hold now, as asked from the allocator. */
MSC_API uint64_t msc_context_held_bytes(const msc_context *ctx);

/** Largest value that `msc_context_held_bytes` has had. */
MSC_API uint64_t msc_context_peak_bytes(const msc_context *ctx);

/** `MSC_VERSION_TEXT` of the library that runs, which may be newer than the header compiled against. */
MSC_API const char *msc_version(void);

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_BASE_H */
