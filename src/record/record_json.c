/* SPDX-License-Identifier: Apache-2.0 */
/* JSON text into memory of a context. */
#include "record/record_json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

#define FIRST_BYTES 4096u
#define MOST_WHOLE 9007199254740992.0 /* 2^53: whole numbers up to here are exact */

void msc__json_fini(msc__json *json)
{
    msc__free(json->ctx, json->text, json->capacity);
    json->text = NULL;
    json->length = json->capacity = 0;
}

void msc__json_put(msc__json *json, const char *text, size_t bytes)
{
    if (json->status != MSC_OK || bytes == 0)
        return;
    if (json->capacity - json->length < bytes) {
        size_t capacity = json->capacity == 0 ? FIRST_BYTES : json->capacity * 2;
        char *grown;

        while (capacity - json->length < bytes)
            capacity *= 2;
        grown = msc__resize(json->ctx, json->text, json->capacity, capacity);
        if (grown == NULL) {
            json->status = MSC_ENOMEM;
            return;
        }
        json->text = grown;
        json->capacity = capacity;
    }
    memcpy(json->text + json->length, text, bytes);
    json->length += bytes;
}

void msc__json_word(msc__json *json, const char *text)
{
    msc__json_put(json, text, strlen(text));
}

void msc__json_string(msc__json *json, const char *text, size_t bytes)
{
    size_t i;

    msc__json_put(json, "\"", 1);
    for (i = 0; i < bytes; i++) {
        if (text[i] == '"' || text[i] == '\\')
            msc__json_put(json, "\\", 1);
        msc__json_put(json, text + i, 1);
    }
    msc__json_put(json, "\"", 1);
}

void msc__json_i64(msc__json *json, int64_t value)
{
    char digits[24];
    int count = snprintf(digits, sizeof digits, "%lld", (long long)value);

    msc__json_put(json, digits, (size_t)count);
}

void msc__json_double(msc__json *json, double value)
{
    char digits[64];
    int count;
    int i;

    if (isnan(value)) {
        msc__json_word(json, "\"NaN\"");
        return;
    }
    if (isinf(value)) {
        msc__json_word(json, value > 0 ? "\"Infinity\"" : "\"-Infinity\"");
        return;
    }
    if (value >= -MOST_WHOLE && value <= MOST_WHOLE && value == floor(value) && !signbit(value)) {
        msc__json_i64(json, (int64_t)value);
        return;
    }
    count = snprintf(digits, sizeof digits, "%.15g", value);
    if (strtod(digits, NULL) != value) /* few need all of them */
        count = snprintf(digits, sizeof digits, "%.17g", value);
    for (i = 0; i < count; i++) { /* the locale's decimal point, of one byte or several */
        int from = i;

        while (i < count && strchr("0123456789+-e", digits[i]) == NULL)
            i++;
        if (i > from)
            msc__json_put(json, ".", 1);
        if (i < count)
            msc__json_put(json, digits + i, 1);
    }
}
