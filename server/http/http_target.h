/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file http_target.h The target of a request, taken apart. Knows no library; of `http`, its tests and its
 * fuzz target.
 */
#ifndef MSC_SERVER_HTTP_TARGET_H
#define MSC_SERVER_HTTP_TARGET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HTTP_TARGET_BYTES 8192u /**< longest */
#define HTTP_SEGMENTS 12u
#define HTTP_PARAMETERS 64u

typedef struct http_parameter {
    const char *name;
    const char *value;
} http_parameter;

/** Texts are decoded UTF-8 without NUL, within the room that the caller gave. */
typedef struct http_target {
    const char *segments[HTTP_SEGMENTS]; /**< of the path: none is empty, "." or ".." */
    uint32_t segment_count;
    http_parameter parameters[HTTP_PARAMETERS]; /**< of the query, in order */
    uint32_t parameter_count;
} http_target;

/**
 * Takes a target in origin form apart.
 *
 * @param room strlen(raw) + 1 bytes; what `out` names lies there.
 * Returns NULL, or what is wrong as a sentence.
 */
const char *http_target_parse(const char *raw, char *room, http_target *out);

/** The value of a parameter, or NULL. */
const char *http_target_find(const http_target *target, const char *name);

/** Whether a text is UTF-8 in its shortest form, without surrogates. */
bool http_is_utf8(const char *text);

#endif /* MSC_SERVER_HTTP_TARGET_H */
