/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The writer of JSON. It knows from the last character whether a comma is due, so callers list what there is
 * and no more.
 *
 * Characters that a browser might take for markup are written as codes: what is JSON here stays JSON wherever
 * it is put.
 */
#include "api/json_out.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_BYTES 512u
#define EXACT 9007199254740992.0 /* 2^53 */

void out_raw_bytes(json_out *out, const char *text, size_t bytes)
{
    size_t room = out->room == 0 ? FIRST_BYTES : out->room;

    while (room < out->bytes + bytes + 1)
        room *= 2;
    if (!out->failed && room > out->room) {
        char *grown = http_memory_grow(out->memory, out->text, room);

        out->failed = grown == NULL;
        if (grown != NULL) {
            out->text = grown;
            out->room = room;
        }
    }
    if (out->failed)
        return;
    memcpy(out->text + out->bytes, text, bytes);
    out->bytes += bytes;
    out->text[out->bytes] = '\0';
}

void out_raw(json_out *out, const char *text)
{
    out_raw_bytes(out, text, strlen(text));
}

static void put_escaped(json_out *out, const char *value)
{
    const char *plain = value;

    out_raw(out, "\"");
    for (; *value != '\0'; value++) {
        unsigned char c = (unsigned char)*value;
        char code[8];

        if (c >= 0x20 && c != '"' && c != '\\' && c != '<' && c != '>' && c != '&' && c != 0x7f)
            continue;
        out_raw_bytes(out, plain, (size_t)(value - plain));
        (void)snprintf(code, sizeof code, "\\u%04x", c);
        out_raw(out, code);
        plain = value + 1;
    }
    out_raw_bytes(out, plain, (size_t)(value - plain));
    out_raw(out, "\"");
}

void out_begin(json_out *out, const char *key)
{
    char last = out->bytes == 0 || out->failed ? '[' : out->text[out->bytes - 1];

    if (last != '[' && last != '{' && last != ' ' && last != '\n')
        out_raw(out, ", ");
    if (key != NULL) {
        put_escaped(out, key);
        out_raw(out, ": ");
    }
}

void out_open(json_out *out, const char *key, char bracket)
{
    out_begin(out, key);
    out_raw_bytes(out, &bracket, 1);
}

void out_close(json_out *out, char bracket)
{
    out_raw_bytes(out, &bracket, 1);
}

void out_text(json_out *out, const char *key, const char *value)
{
    out_begin(out, key);
    if (value == NULL)
        out_raw(out, "null");
    else
        put_escaped(out, value);
}

void out_integer(json_out *out, const char *key, int64_t value)
{
    char text[32];

    out_begin(out, key);
    (void)snprintf(text, sizeof text, "%lld", (long long)value);
    out_raw(out, text);
}

void out_boolean(json_out *out, const char *key, bool value)
{
    out_begin(out, key);
    out_raw(out, value ? "true" : "false");
}

void out_null(json_out *out, const char *key)
{
    out_begin(out, key);
    out_raw(out, "null");
}

/* The fewest digits that give a finite number back. */
static void put_finite(json_out *out, double value)
{
    char text[40];

    if (fabs(value) < EXACT && value == (double)(int64_t)value &&
        !signbit(value)) { /* most are, and this is quicker */
        (void)snprintf(text, sizeof text, "%lld", (long long)value);
        out_raw(out, text);
        return;
    }
    (void)snprintf(text, sizeof text, "%.15g", value);
    if (strtod(text, NULL) != value)
        (void)snprintf(text, sizeof text, "%.17g", value);
    out_raw(out, text);
}

static const char *name_of(double value)
{
    return isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
}

void out_number(json_out *out, const char *key, double value)
{
    if (!isfinite(value)) {
        out_text(out, key, name_of(value));
        return;
    }
    out_begin(out, key);
    put_finite(out, value);
}

void out_csv_text(json_out *out, const char *value)
{
    out_raw(out, "\"");
    for (; *value != '\0'; value++)
        out_raw_bytes(out, *value == '"' ? "\"\"" : value, *value == '"' ? 2 : 1);
    out_raw(out, "\"");
}

void out_csv_integer(json_out *out, int64_t value)
{
    char text[32];

    (void)snprintf(text, sizeof text, ",%lld", (long long)value);
    out_raw(out, text);
}

void out_csv_number(json_out *out, double value)
{
    out_raw(out, ",");
    if (isfinite(value))
        put_finite(out, value);
    else
        out_raw(out, name_of(value));
}
