/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target for what the server reads that strangers wrote: targets, headers, cookies, invitations, cursors, nested JSON,
 * filters, packed blocks.
 *
 * The first byte chooses the parser, the rest is its input. Properties, for any bytes whatever:
 *
 *  - a target that is taken has non-empty UTF-8 segments without dots, and is the same if it is encoded and read once more
 *  - a request that the guard lets in has one Host, and at most one length, of digits
 *  - a cookie that is found is 64 hexadecimal digits; an invitation has an id of 16
 *  - a filter that is taken holds of the texts that it names
 *  - a block that unpacks and is packed again unpacks to the same points
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "api/mlflow/api_mlflow.h"
#include "http/http_guard.h"
#include "http/http_target.h"
#include "store/block.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int truth)
{
    if (!truth)
        abort();
}

static char *put_encoded(char *at, const char *text)
{
    for (; *text != '\0'; text++)
        at += sprintf(at, "%%%02X", (unsigned)(unsigned char)*text);
    return at;
}

static void require_same(const http_target *target, size_t bytes)
{
    char *again = malloc(4 * bytes + 16);
    char *room = malloc(4 * bytes + 16);
    char *at = again;
    http_target copy;

    require(again != NULL && room != NULL);
    for (uint32_t i = 0; i < target->segment_count; i++) {
        *at++ = '/';
        at = put_encoded(at, target->segments[i]);
    }
    if (target->segment_count == 0)
        *at++ = '/';
    for (uint32_t i = 0; i < target->parameter_count; i++) {
        *at++ = i == 0 ? '?' : '&';
        at = put_encoded(at, target->parameters[i].name);
        *at++ = '=';
        at = put_encoded(at, target->parameters[i].value);
    }
    *at = '\0';
    if (strlen(again) <= HTTP_TARGET_BYTES) {
        require(http_target_parse(again, room, &copy) == NULL);
        require(copy.segment_count == target->segment_count &&
                copy.parameter_count == target->parameter_count);
        for (uint32_t i = 0; i < copy.segment_count; i++)
            require(strcmp(copy.segments[i], target->segments[i]) == 0);
        for (uint32_t i = 0; i < copy.parameter_count; i++)
            require(strcmp(copy.parameters[i].value, target->parameters[i].value) == 0);
    }
    free(again);
    free(room);
}

static void fuzz_target(const char *text)
{
    size_t bytes = strlen(text);
    char *room = malloc(bytes + 1); /* exactly what it may use */
    http_target target;

    require(room != NULL);
    if (http_target_parse(text, room, &target) == NULL) {
        for (uint32_t i = 0; i < target.segment_count; i++)
            require(target.segments[i][0] != '\0' && strcmp(target.segments[i], "..") != 0 &&
                    http_is_utf8(target.segments[i]));
        require_same(&target, bytes);
    }
    free(room);
}

/* Lines of the text are fields; the first colon ends a name. */
static void fuzz_guard(const char *text)
{
    static const char *const hosts[] = {"localhost", "[::1]", NULL};
    http_field fields[HTTP_FIELDS] = {{0}};
    uint32_t count = 0;
    uint32_t host_count = 0;
    http_guarded got;

    while (*text != '\0' && count < HTTP_FIELDS) {
        size_t bytes = strcspn(text, "\n");
        const char *colon = memchr(text, ':', bytes);
        size_t name_bytes = colon == NULL ? bytes : (size_t)(colon - text);
        size_t skip = colon == NULL ? 0 : 1;

        fields[count++] = (http_field){text, name_bytes, text + name_bytes + skip, bytes - name_bytes - skip};
        text += bytes + (text[bytes] == '\n');
    }
    if (http_guard("HTTP/1.1", fields, count, hosts, &got).status != 0)
        return;
    for (uint32_t i = 0; i < count; i++)
        host_count += fields[i].name_bytes == 4 && strncasecmp(fields[i].name, "host", 4) == 0;
    require(host_count == 1 && got.host != NULL);
    require(http_field_find(fields, count, "transfer-encoding") == NULL);
}

static void fuzz_small(const char *text)
{
    char secret[ACCOUNTS_SECRET_BYTES];
    char id[ACCOUNTS_INVITATION_ID];
    const char *rest;
    int64_t number;

    if (api_find_cookie(text, "memscale", secret))
        require(strlen(secret) == ACCOUNTS_SECRET_BYTES - 1 &&
                strspn(secret, "0123456789abcdef") == strlen(secret));
    if (api_parse_cursor(text, &number, &rest))
        require(number >= 0 && rest > text && rest <= text + strlen(text));
    if (accounts_invitation_id(text, id))
        require(strlen(id) == sizeof id - 1 && strlen(text) == ACCOUNTS_INVITATION_BYTES - 1 &&
                strncmp(id, text, sizeof id - 1) == 0 && strspn(id, "0123456789abcdef") == strlen(id));
    if (api_parse_integer(text, -5, 5, &number))
        require(number >= -5 && number <= 5);
    (void)api_is_run_id(text);
    (void)api_is_kind(text);
}

static void fuzz_block(const uint8_t *data, size_t size)
{
    uint32_t count = size == 0 ? 0 : data[0] * 2u;
    block_point *points = calloc(BLOCK_POINTS, sizeof *points);
    block_point *again = calloc(BLOCK_POINTS, sizeof *again);
    uint8_t *packed = malloc(BLOCK_BYTES);

    require(points != NULL && again != NULL && packed != NULL);
    if (size > 0 && block_unpack(data + 1, size - 1, count, points)) {
        size_t bytes = block_pack(points, count, packed);

        require(bytes <= BLOCK_BYTES && block_unpack(packed, bytes, count, again));
        require(memcmp(points, again, count * sizeof *points) == 0);
    }
    free(points);
    free(again);
    free(packed);
}

static bool is_text(const char *text)
{
    return strlen(text) <= MLFLOW_KEY_BYTES;
}

/* A filter that is taken has clauses whose parts are whole; matching any text by it ends. */
static void fuzz_filter(const char *text)
{
    static mlflow_filter filter;
    mlflow_name name;
    bool descending;

    if (mlflow_filter_read(text, &filter) == NULL) {
        require(filter.count <= MLFLOW_CLAUSES);
        for (uint32_t i = 0; i < filter.count; i++) {
            const mlflow_clause *clause = &filter.at[i];

            require(is_text(clause->name.key) && (clause->is_number || is_text(clause->text)));
            if (clause->is_number)
                (void)mlflow_holds_number(clause, 0.5);
            else if (clause->compare == MLFLOW_EQUAL)
                require(mlflow_holds_text(clause, clause->text));
            else
                (void)mlflow_holds_text(clause, text);
        }
    }
    if (mlflow_order_read(text, &name, &descending) == NULL)
        require(is_text(name.key));
}

/* jansson's answer must not depend on ours, but what we let through must be as shallow as we say. */
static void fuzz_depth(const char *text, size_t size)
{
    if (api_is_shallow(text, size))
        json_decref(json_loadb(text, size, JSON_REJECT_DUPLICATES, NULL));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text;

    if (size == 0)
        return 0;
    text = malloc(size);
    require(text != NULL);
    memcpy(text, data + 1, size - 1);
    text[size - 1] = '\0';
    if (data[0] >= 0xf0) /* what the corpus has was made for five parsers */
        fuzz_filter(text);
    else if (data[0] % 5 == 0)
        fuzz_target(text);
    else if (data[0] % 5 == 1)
        fuzz_guard(text);
    else if (data[0] % 5 == 2)
        fuzz_small(text);
    else if (data[0] % 5 == 3)
        fuzz_block(data + 1, size - 1);
    else
        fuzz_depth(text, size - 1);
    free(text);
    return 0;
}
