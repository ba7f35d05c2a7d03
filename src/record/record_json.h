/* SPDX-License-Identifier: Apache-2.0 */
/** @file record_json.h  JSON text into memory of a context: whatever the locale says, numbers have points. */
#ifndef MSC_RECORD_JSON_H
#define MSC_RECORD_JSON_H

#include "memscale/base.h"

/** Text that grows. A zeroed one with a context is empty. After a failure it stays as it is. */
typedef struct msc__json {
    msc_context *ctx;
    char *text;
    size_t length, capacity;
    msc_status status; /* MSC_ENOMEM once something did not fit */
} msc__json;

void msc__json_fini(msc__json *json);
void msc__json_put(msc__json *json, const char *text, size_t bytes);
void msc__json_word(msc__json *json, const char *text);                 /**< with a terminator */
void msc__json_string(msc__json *json, const char *text, size_t bytes); /**< in quotes */
void msc__json_i64(msc__json *json, int64_t value);
/** Digits that give the same double back; NaN and infinities as strings. */
void msc__json_double(msc__json *json, double value);

#endif /* MSC_RECORD_JSON_H */
