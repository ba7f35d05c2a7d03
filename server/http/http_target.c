/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A target: /path/segments?name=value&name=value
 *
 * It is split first and decoded afterwards, so that an encoded slash or ampersand is part of a name and never
 * of the structure. There is one reading of each target, or none: what is not needed (fragments, empty
 * segments, dots, absolute form, half a percent code) is refused instead of mended.
 */
#include "http/http_target.h"

#include <string.h>

#include "base/invariant.h"

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Bytes that a lead byte says follow, or -1. */
static int bytes_after(unsigned char lead)
{
    if (lead < 0x80)
        return 0;
    if (lead >= 0xc2 && lead <= 0xdf)
        return 1;
    if (lead >= 0xe0 && lead <= 0xef)
        return 2;
    return lead >= 0xf0 && lead <= 0xf4 ? 3 : -1;
}

bool http_is_utf8(const char *text)
{
    const unsigned char *at = (const unsigned char *)text;

    while (*at != 0) {
        unsigned char lead = *at++;
        int after = bytes_after(lead);
        int i;

        if (after < 0)
            return false;
        for (i = 0; i < after; i++) /* the terminator is none that continues */
            if ((at[i] & 0xc0) != 0x80)
                return false;
        if ((lead == 0xe0 && at[0] < 0xa0) || (lead == 0xed && at[0] > 0x9f) ||
            (lead == 0xf0 && at[0] < 0x90) || (lead == 0xf4 && at[0] > 0x8f))
            return false;
        at += after;
    }
    return true;
}

/* Decodes [from, end) to *room, with a terminator, and moves *room on. NULL: a bad code, NUL or not UTF-8. */
static const char *decode(const char *from, const char *end, bool plus_is_space, char **room)
{
    char *text = *room;
    char *to = text;

    while (from < end) {
        char c = *from++;

        if (c == '%') {
            int high = end - from < 2 ? -1 : hex_digit(from[0]);
            int low = end - from < 2 ? -1 : hex_digit(from[1]);

            if (high < 0 || low < 0 || (high == 0 && low == 0))
                return NULL;
            c = (char)(high * 16 + low);
            from += 2;
        } else if (c == '+' && plus_is_space) {
            c = ' ';
        }
        *to++ = c;
    }
    *to++ = '\0';
    *room = to;
    return http_is_utf8(text) ? text : NULL;
}

static const char *parse_path(const char *from, const char *end, char **room, http_target *out)
{
    MSC__ASSERT(*from == '/');
    if (end - from == 1)
        return NULL;
    while (from < end) {
        const char *begin = from + 1;
        const char *slash = memchr(begin, '/', (size_t)(end - begin));
        const char *stop = slash == NULL ? end : slash;
        const char *text;

        if (out->segment_count == HTTP_SEGMENTS)
            return "the path has too many parts";
        text = decode(begin, stop, false, room);
        if (text == NULL)
            return "the path has a percent code that is none, or is not UTF-8";
        if (*text == '\0' || strcmp(text, ".") == 0 || strcmp(text, "..") == 0)
            return "the path has an empty part or dots";
        out->segments[out->segment_count++] = text;
        from = stop;
    }
    return NULL;
}

static const char *parse_query(const char *from, const char *end, char **room, http_target *out)
{
    while (from < end) {
        const char *mark = memchr(from, '&', (size_t)(end - from));
        const char *stop = mark == NULL ? end : mark;
        const char *equals = memchr(from, '=', (size_t)(stop - from));
        http_parameter *parameter = &out->parameters[out->parameter_count];

        if (out->parameter_count == HTTP_PARAMETERS)
            return "the query has too many parameters";
        parameter->name = decode(from, equals == NULL ? stop : equals, true, room);
        parameter->value = equals == NULL ? "" : decode(equals + 1, stop, true, room);
        if (parameter->name == NULL || parameter->value == NULL)
            return "the query has a percent code that is none, or is not UTF-8";
        out->parameter_count++;
        from = stop + 1;
    }
    return NULL;
}

/* A decoded text and its terminator take no more room than the text and the mark that ended it, but for
 * the last one and for a parameter without "=", which shares one empty text. */
const char *http_target_parse(const char *raw, char *room, http_target *out)
{
    size_t bytes = strlen(raw);
    const char *end = raw + bytes;
    const char *query = memchr(raw, '?', bytes);
    char *at = room;
    const char *wrong;
    size_t i;

    memset(out, 0, sizeof *out);
    if (*raw != '/')
        return "the target does not begin with a slash";
    if (bytes > HTTP_TARGET_BYTES)
        return "the target is longer than 8192 bytes";
    for (i = 0; i < bytes; i++)
        if (raw[i] <= ' ' || raw[i] == 0x7f || raw[i] == '#')
            return "the target has a character that is to be percent coded";
    wrong = parse_path(raw, query == NULL ? end : query, &at, out);
    if (wrong == NULL && query != NULL)
        wrong = parse_query(query + 1, end, &at, out);
    MSC__ASSERT(at <= room + bytes + 1);
    return wrong;
}

const char *http_target_find(const http_target *target, const char *name)
{
    uint32_t i;

    for (i = 0; i < target->parameter_count; i++)
        if (strcmp(target->parameters[i].name, name) == 0)
            return target->parameters[i].value;
    return NULL;
}
