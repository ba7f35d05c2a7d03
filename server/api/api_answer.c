/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Answers, and the one shape of errors: what is wrong, where, what came, what may come.
 */
#include <string.h>

#include "api/api_internal.h"

#define SHOWN_BYTES 64u

json_out api_json(api_call *call)
{
    return (json_out){.memory = &call->request->memory};
}

void api_send(api_call *call, unsigned status, json_out *out)
{
    out_raw(out, "\n");
    if (out->failed) {
        http_refuse(call->request, (http_refusal){503, "later", "the server is short of memory"},
                    call->reply);
        call->reply->retry_after_s = 1;
        return;
    }
    call->reply->status = status;
    call->reply->type = "application/json";
    call->reply->body = out->text;
    call->reply->body_bytes = out->bytes;
}

void api_send_list(api_call *call, store_result result, json_out *out)
{
    out_close(out, ']');
    out_close(out, '}');
    if (result == STORE_OK)
        api_send(call, 200, out);
    else
        api_refuse_store(call, result);
}

void api_send_nothing(api_call *call)
{
    call->reply->status = 204;
}

/* What came, cut to a length at a whole character. */
static void write_value(json_out *out, const char *value)
{
    char shown[SHOWN_BYTES + 1];
    size_t bytes = strlen(value);

    if (bytes > SHOWN_BYTES)
        for (bytes = SHOWN_BYTES; bytes > 0 && ((unsigned char)value[bytes] & 0xc0) == 0x80; bytes--)
            ;
    memcpy(shown, value, bytes);
    shown[bytes] = '\0';
    if (http_is_utf8(shown)) /* headers may be anything */
        out_text(out, "value", shown);
}

void api_refuse(api_call *call, const api_fault *fault)
{
    json_out out = api_json(call);

    if (api_is_mlflow(call)) {
        api_refuse_mlflow(call, fault);
        return;
    }
    out_open(&out, NULL, '{');
    out_open(&out, "error", '{');
    out_text(&out, "code", fault->code);
    out_text(&out, "message", fault->message);
    if (fault->field != NULL)
        out_text(&out, "field", fault->field);
    if (fault->value != NULL)
        write_value(&out, fault->value);
    if (fault->allowed != NULL)
        out_text(&out, "allowed", fault->allowed);
    out_close(&out, '}');
    out_close(&out, '}');
    api_send(call, fault->status, &out);
    if (fault->retry_after_s > 0)
        call->reply->retry_after_s = fault->retry_after_s;
}

bool api_invalid(api_call *call, const char *field, const char *value, const char *allowed)
{
    const api_fault fault = {.status = 400,
                             .code = "invalid",
                             .message = "a field or parameter is not what it may be",
                             .field = field,
                             .value = value,
                             .allowed = allowed};

    api_refuse(call, &fault);
    return false;
}

void api_not_found(api_call *call)
{
    api_refuse(call, &(const api_fault){
                         .status = 404, .code = "not_found", .message = "there is no such thing of yours"});
}

void api_refuse_store(api_call *call, store_result result)
{
    static const api_fault faults[] = {
        [STORE_CONFLICT] = {.status = 409, .code = "conflict", .message = "the name or id is taken"},
        [STORE_TOO_MANY] = {.status = 409,
                            .code = "conflict",
                            .message = "there are as many as there may be",
                            .allowed = "4096 series and 32 documents of a run, 200 invitations of a team"},
        [STORE_FULL] = {.status = 507,
                        .code = "full",
                        .message = "the server's disk is full; nothing was changed",
                        .retry_after_s = 30},
        [STORE_LATE] = {.status = 503,
                        .code = "later",
                        .message = "reading this takes too long just now",
                        .retry_after_s = 5},
        [STORE_NO_MEMORY] = {.status = 503,
                             .code = "later",
                             .message = "the server is short of memory",
                             .retry_after_s = 1},
        [STORE_STOPPED] = {.status = 503,
                           .code = "later",
                           .message = "the server is short of memory",
                           .retry_after_s = 1},
        [STORE_FORBIDDEN] = {.status = 403,
                             .code = "forbidden",
                             .message = "your role in the team does not allow this",
                             .allowed = "a greater role, which an admin or owner of the team can give"},
        [STORE_LAST_OWNER] = {.status = 409,
                              .code = "conflict",
                              .message = "a team would be left without an owner who can log in",
                              .allowed = "make somebody else an owner first"},
        [STORE_LAST_ADMIN] = {.status = 409,
                              .code = "conflict",
                              .message = "the server would be left without an admin who can log in",
                              .allowed = "make somebody else an admin first"},
        [STORE_FAILED] = {.status = 500,
                          .code = "failed",
                          .message = "the server cannot use its disk; its log says more"},
    };

    if (result == STORE_NOT_FOUND)
        api_not_found(call);
    else
        api_refuse(call, &faults[result]);
}

void api_refuse_accounts(api_call *call, accounts_answer answer)
{
    api_fault fault = {
        .status = 401, .code = "unauthenticated", .message = "the name or the password is wrong"};

    if (answer.result == ACCOUNTS_FAILED) {
        api_refuse_store(call, answer.store);
        return;
    }
    if (answer.result == ACCOUNTS_TAKEN)
        fault = (api_fault){.status = 409, .code = "conflict", .message = "there is such an account already"};
    if (answer.result == ACCOUNTS_LATER)
        fault =
            (api_fault){.status = answer.throttled ? 429 : 503,
                        .code = "later",
                        .message = answer.throttled ? "too many attempts" : "too many log in at this moment",
                        .retry_after_s = answer.retry_after_s};
    api_refuse(call, &fault);
}
