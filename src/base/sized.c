/* SPDX-License-Identifier: Apache-2.0 */
#include "base/sized.h"

#include <stdbool.h>
#include <string.h>

#include "base/error.h"

void msc__sized_copy(void *to, size_t to_bytes, const void *from, size_t from_bytes)
{
    size_t both = to_bytes < from_bytes ? to_bytes : from_bytes;

    if (both > 0)
        memcpy(to, from, both);
    memset((char *)to + both, 0, to_bytes - both);
}

void msc__sized_init(void *to, size_t to_bytes, const void *defaults, size_t bytes)
{
    msc__sized_copy(to, to_bytes, defaults, bytes);
    if (to_bytes >= sizeof to_bytes)
        memcpy(to, &to_bytes, sizeof to_bytes);
}

static bool is_zero(const void *bytes, size_t from, size_t to)
{
    const unsigned char *at = bytes;

    while (from < to && at[from] == 0)
        from++;
    return from == to;
}

msc_status msc__sized_read(const msc__sized_options *what, const void *given, void *out, msc_error *err)
{
    size_t bytes;

    memcpy(&bytes, given, sizeof bytes);
    if (bytes < what->first_bytes)
        return msc__fail(err, MSC_EINVAL, "%sstruct_bytes is %zu, this library knows %zu to %zu", what->name,
                         bytes, what->first_bytes, what->bytes);
    if (bytes > what->bytes && !is_zero(given, what->bytes, bytes))
        return msc__fail(
            err, MSC_EINVAL,
            "%sstruct_bytes is %zu, this library knows %zu, and what follows is not zero: it sets "
            "something that only a newer one has",
            what->name, bytes, what->bytes);
    memcpy(out, given, bytes < what->bytes ? bytes : what->bytes);
    memcpy(out, &what->bytes, sizeof what->bytes);
    return MSC_OK;
}
