/* SPDX-License-Identifier: Apache-2.0 */
/** @file json_out.h  JSON that is written as it is known, into memory of a request. Of `api` alone. */
#ifndef MSC_SERVER_JSON_OUT_H
#define MSC_SERVER_JSON_OUT_H

#include "http/http_memory.h"

/**
 * Text that grows. With `failed`, which stays, there was no memory and the rest is not written. Zeroed but
 * for `memory` it is empty.
 */
typedef struct json_out {
    http_memory *memory;
    char *text;
    size_t bytes;
    size_t room;
    bool failed;
} json_out;

void out_raw(json_out *out, const char *text); /**< as it is */
void out_raw_bytes(json_out *out, const char *text, size_t bytes);
/** The comma that a value needs, if something stands before it, and `"key": ` where `key` is not NULL. */
void out_begin(json_out *out, const char *key);
void out_open(json_out *out, const char *key, char bracket);      /**< '{' or '[' */
void out_close(json_out *out, char bracket);                      /**< '}' or ']' */
void out_text(json_out *out, const char *key, const char *value); /**< NULL: null */
void out_integer(json_out *out, const char *key, int64_t value);
void out_boolean(json_out *out, const char *key, bool value);
void out_null(json_out *out, const char *key);
/**
 * NaN and infinities as the strings that they are called; other numbers in the fewest digits that give them
 * back.
 */
void out_number(json_out *out, const char *key, double value);
/** Fields of CSV: a quoted text, and, with a comma before them, an integer and a number. */
void out_csv_text(json_out *out, const char *value);
void out_csv_integer(json_out *out, int64_t value);
void out_csv_number(json_out *out, double value);

#endif /* MSC_SERVER_JSON_OUT_H */
