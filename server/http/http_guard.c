/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The guard: what libmicrohttpd lets through and we do not.
 *
 * Request smuggling lives on two readings of one request. So whatever another server in front might read in
 * another way is refused, and the connection closed: two lengths, a transfer coding of any kind (clients of
 * this server know the length of what they send), names with spaces. A Host that is not ours is a browser
 * that a foreign name was rebound for.
 */
#include "http/http_guard.h"

#include <string.h>
#include <strings.h>

#include "base/invariant.h"

static const http_refusal let_in = {0, NULL, NULL};

static http_refusal bad(const char *message)
{
    return (http_refusal){400, "invalid", message};
}

static bool is_token(const http_field *field)
{
    static const char marks[] = "!#$%&'*+-.^_`|~";
    size_t i;

    for (i = 0; i < field->name_bytes; i++) {
        char c = field->name[i];
        bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');

        if (!is_letter && (c == '\0' || strchr(marks, c) == NULL))
            return false;
    }
    return field->name_bytes > 0;
}

static bool is_clean(const http_field *field)
{
    size_t i;

    for (i = 0; i < field->value_bytes; i++) {
        unsigned char c = (unsigned char)field->value[i];

        if ((c < 0x20 && c != '\t') || c == 0x7f)
            return false;
    }
    return true;
}

static bool is_named(const http_field *field, const char *name)
{
    return field->name_bytes == strlen(name) && strncasecmp(field->name, name, field->name_bytes) == 0;
}

static bool read_length(const http_field *field, uint64_t *length)
{
    size_t i;

    *length = 0;
    for (i = 0; i < field->value_bytes; i++) {
        if (field->value[i] < '0' || field->value[i] > '9' || *length > UINT64_MAX / 100)
            return false;
        *length = *length * 10 + (uint64_t)(field->value[i] - '0');
    }
    return field->value_bytes > 0;
}

/* Bytes of a Host without its port, or 0: it is no host. */
static size_t name_bytes(const http_field *field)
{
    const char *end = field->value + field->value_bytes;
    const char *from = field->value;
    const char *colon;
    const char *digit;

    if (field->value_bytes == 0)
        return 0;
    if (*from == '[') {
        from = memchr(from, ']', field->value_bytes);
        if (from == NULL)
            return 0;
        from++;
    }
    colon = memchr(from, ':', (size_t)(end - from));
    if (colon == NULL)
        return *field->value == '[' && from != end ? 0 : field->value_bytes;
    if (*field->value == '[' && colon != from)
        return 0;
    for (digit = colon + 1; digit < end; digit++)
        if (*digit < '0' || *digit > '9')
            return 0;
    return end - colon > 6 ? 0 : (size_t)(colon - field->value);
}

static bool is_listed(const http_field *field, const char *const *hosts)
{
    size_t bytes = name_bytes(field);

    for (; *hosts != NULL && bytes > 0; hosts++)
        if (strlen(*hosts) == bytes && strncasecmp(*hosts, field->value, bytes) == 0)
            return true;
    return false;
}

static http_refusal check_field(const http_field *field, const char *const *hosts, http_guarded *out)
{
    if (!is_token(field))
        return bad("a header's name is not a token");
    if (!is_clean(field))
        return bad("a header's value has control characters");
    if (is_named(field, "transfer-encoding"))
        return bad("requests need a Content-Length; Transfer-Encoding is not read");
    if (is_named(field, "content-length")) {
        if (out->has_length)
            return bad("Content-Length comes twice");
        out->has_length = true;
        if (!read_length(field, &out->length))
            return bad("Content-Length is not a number");
    }
    if (is_named(field, "host")) {
        if (out->host != NULL)
            return bad("Host comes twice");
        if (!is_listed(field, hosts))
            return (http_refusal){
                421, "misdirected",
                "the Host is none of this server's; start it with --host NAME if it should be"};
        out->host = field->value;
    }
    return let_in;
}

http_refusal http_guard(const char *version, const http_field *fields, uint32_t count,
                        const char *const *hosts, http_guarded *out)
{
    uint32_t i;

    MSC__ASSERT(count <= HTTP_FIELDS);
    memset(out, 0, sizeof *out);
    if (strcmp(version, "HTTP/1.1") != 0)
        return (http_refusal){505, "invalid", "this server speaks HTTP/1.1"};
    for (i = 0; i < count; i++) {
        http_refusal refusal = check_field(&fields[i], hosts, out);

        if (refusal.status != 0)
            return refusal;
    }
    return out->host == NULL ? bad("there is no Host") : let_in;
}

const char *http_field_find(const http_field *fields, uint32_t count, const char *name)
{
    uint32_t i;

    for (i = 0; i < count; i++)
        if (is_named(&fields[i], name))
            return fields[i].value;
    return NULL;
}
