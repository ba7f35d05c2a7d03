/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What comes in: bodies, fields, parameters.
 *
 * jansson reads JSON; before it, one pass sees that nothing nests deeper than we need. Then each object is
 * held against the fields that it may have, so handlers see only what exists, in its type.
 */
#include <pthread.h>
#include <string.h>

#include "api/api_internal.h"

#define WHERE_BYTES 160u

bool api_is_shallow(const char *text, size_t bytes)
{
    bool in_string = false;
    size_t depth = 0;
    size_t i;

    for (i = 0; i < bytes; i++) {
        char c = text[i];

        if (in_string && c == '\\')
            i++;
        else if (c == '"')
            in_string = !in_string;
        else if (!in_string && (c == '[' || c == '{') && ++depth > API_DEPTH)
            return false;
        else if (!in_string && (c == ']' || c == '}') && depth > 0)
            depth--;
    }
    return true;
}

/* ---- jansson's memory: a body that could not be read for want of it is not a wrong one ---- */

static pthread_once_t watched = PTHREAD_ONCE_INIT;
static json_malloc_t malloc_beneath;
static json_free_t free_beneath;
static _Thread_local bool was_refused;

static void *watch_malloc(size_t bytes)
{
    void *block = malloc_beneath(bytes);

    was_refused = was_refused || block == NULL;
    return block;
}

static void watch(void)
{
    json_get_alloc_funcs(&malloc_beneath, &free_beneath);
    json_set_alloc_funcs(watch_malloc, free_beneath);
}

void api_watch_memory(void)
{
    (void)pthread_once(&watched, watch);
}

bool api_read_body(api_call *call)
{
    const http_request *request = call->request;
    const char *type = http_field_find(request->fields, request->field_count, "content-type");
    const char *text = request->body == NULL ? "" : (const char *)request->body;
    json_error_t error;

    if (type == NULL || strncmp(type, "application/json", strlen("application/json")) != 0)
        return api_invalid(call, "Content-Type", type, "application/json");
    if (!api_is_shallow(text, request->body_bytes))
        return api_invalid(call, "body", NULL, "JSON that nests at most 32 deep");
    was_refused = false;
    call->body = json_loadb(text, request->body_bytes, JSON_REJECT_DUPLICATES, &error);
    if (call->body == NULL && was_refused) {
        api_refuse_store(call, STORE_NO_MEMORY);
        return false;
    }
    if (!json_is_object(call->body)) {
        api_refuse(call,
                   &(const api_fault){.status = 400,
                                      .code = "invalid",
                                      .message = call->body == NULL ? error.text : "the body is no object",
                                      .field = "body",
                                      .allowed = "a JSON object with each key once"});
        return false;
    }
    return true;
}

static const char *type_name(json_type type)
{
    switch (type) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    default:
        return "true or false";
    }
}

static bool is_type(const json_t *value, json_type type)
{
    return type == JSON_TRUE ? json_is_boolean(value) : json_typeof(value) == type;
}

static void join(char *into, const char *where, const char *name)
{
    (void)snprintf(into, WHERE_BYTES, "%s%s%s", where, *where == '\0' ? "" : ".", name);
}

/* The names of fields, for who used another. */
static void list_fields(const api_field *fields, size_t count, char *into, size_t room)
{
    size_t length = 0;

    into[0] = '\0';
    for (size_t i = 0; i < count && length < room; i++)
        length += (size_t)snprintf(into + length, room - length, "%s%s", i == 0 ? "" : ", ", fields[i].name);
}

static bool refuse_unknown(api_call *call, json_t *object, const char *where, const api_field *fields,
                           size_t count)
{
    void *at = json_object_iter(object);

    for (; at != NULL; at = json_object_iter_next(object, at)) {
        const char *key = json_object_iter_key(at);
        bool known = false;

        for (size_t i = 0; i < count && !known; i++)
            known = strcmp(fields[i].name, key) == 0;
        if (!known) {
            char allowed[WHERE_BYTES];
            char name[WHERE_BYTES];

            list_fields(fields, count, allowed, sizeof allowed);
            join(name, where, "*");
            return api_invalid(call, name, key, allowed);
        }
    }
    return true;
}

bool api_fields(api_call *call, json_t *object, const char *where, const api_field *fields, size_t count,
                json_t **out)
{
    if (!json_is_object(object))
        return api_invalid(call, where, NULL, "an object");
    for (size_t i = 0; i < count; i++) {
        char name[WHERE_BYTES];

        join(name, where, fields[i].name);
        out[i] = json_object_get(object, fields[i].name);
        if (json_is_null(out[i]))
            out[i] = NULL;
        if (out[i] == NULL && fields[i].required)
            return api_invalid(call, name, NULL, type_name(fields[i].type));
        if (out[i] != NULL && !is_type(out[i], fields[i].type))
            return api_invalid(call, name, json_is_string(out[i]) ? json_string_value(out[i]) : NULL,
                               type_name(fields[i].type));
    }
    return refuse_unknown(call, object, where, fields, count);
}

bool api_is_name(const char *text, size_t least, size_t most)
{
    size_t bytes = 0;

    for (; text[bytes] != '\0'; bytes++)
        if ((unsigned char)text[bytes] < 0x20 || text[bytes] == 0x7f)
            return false;
    return bytes >= least && bytes <= most;
}

bool api_check_name(api_call *call, const char *field, const json_t *value, size_t least, size_t most)
{
    char allowed[WHERE_BYTES];

    if (api_is_name(json_string_value(value), least, most))
        return true;
    (void)snprintf(allowed, sizeof allowed, "UTF-8 of %zu to %zu bytes without control characters", least,
                   most);
    return api_invalid(call, field, json_string_value(value), allowed);
}

bool api_is_word(const char *text, size_t least, size_t most, const char *also)
{
    size_t bytes = 0;

    for (; text[bytes] != '\0'; bytes++) {
        char c = text[bytes];

        if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || strchr(also, c) != NULL))
            return false;
    }
    return bytes >= least && bytes <= most;
}

bool api_is_run_id(const char *text)
{
    return api_is_word(text, 8, STORE_ID_BYTES, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_-");
}

bool api_is_kind(const char *text)
{
    return api_is_word(text, 1, STORE_KIND_BYTES, "_") && *text >= 'a' && *text <= 'z';
}

bool api_parse_integer(const char *text, int64_t least, int64_t most, int64_t *out)
{
    bool negative = *text == '-';
    uint64_t number = 0;
    int digits = 0;

    for (text += negative; *text >= '0' && *text <= '9' && digits < 19; text++, digits++)
        number = number * 10 + (uint64_t)(*text - '0');
    if (digits == 0 || *text != '\0' || number > INT64_MAX)
        return false;
    *out = negative ? -(int64_t)number : (int64_t)number;
    return *out >= least && *out <= most;
}

bool api_parameter(api_call *call, const char *name, int64_t least, int64_t most, int64_t *out)
{
    const char *text = http_target_find(&call->request->target, name);
    char allowed[WHERE_BYTES];

    if (text == NULL || api_parse_integer(text, least, most, out))
        return true;
    (void)snprintf(allowed, sizeof allowed, "an integer from %lld to %lld", (long long)least,
                   (long long)most);
    return api_invalid(call, name, text, allowed);
}

bool api_parameter_boolean(api_call *call, const char *name, bool *out)
{
    const char *text = http_target_find(&call->request->target, name);

    if (text != NULL && strcmp(text, "true") != 0 && strcmp(text, "false") != 0)
        return api_invalid(call, name, text, "true or false");
    *out = text != NULL && *text == 't';
    return true;
}

bool api_parse_cursor(const char *text, int64_t *key, const char **rest)
{
    const char *dot = strchr(text, '.');
    char number[24] = "";

    if (dot == NULL || (size_t)(dot - text) >= sizeof number)
        return false;
    memcpy(number, text, (size_t)(dot - text));
    *rest = dot + 1;
    return api_parse_integer(number, 0, INT64_MAX, key);
}
