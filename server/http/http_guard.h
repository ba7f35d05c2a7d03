/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file http_guard.h Which requests are refused before anything looks at them. Knows no library; of `http`
 * and its tests.
 */
#ifndef MSC_SERVER_HTTP_GUARD_H
#define MSC_SERVER_HTTP_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HTTP_FIELDS 64u /**< most header fields of a request */

typedef struct http_field {
    const char *name;
    size_t name_bytes;
    const char *value; /**< may be NULL where `value_bytes` is 0 */
    size_t value_bytes;
} http_field;

/** What a request is let in as. */
typedef struct http_guarded {
    const char *host; /**< as it was sent, port and all */
    bool has_length;
    uint64_t length; /**< of the body */
} http_guarded;

/** Why not. */
typedef struct http_refusal {
    unsigned status; /**< 0: it is let in */
    const char *code;
    const char *message; /**< of ours alone: it repeats nothing of the request */
} http_refusal;

/**
 * @param hosts NULL-terminated names that the server answers to, without port, lower case; an IPv6 address in
 * brackets. Refuses: other versions than HTTP/1.1, names that are not tokens, control characters in values,
 * Transfer-Encoding, Content-Length that is not digits or comes twice, Host that does not come once or is not
 * listed.
 */
http_refusal http_guard(const char *version, const http_field *fields, uint32_t count,
                        const char *const *hosts, http_guarded *out);

/** The one field of a name, or NULL; the first, if there are more. */
const char *http_field_find(const http_field *fields, uint32_t count, const char *name);

#endif /* MSC_SERVER_HTTP_GUARD_H */
