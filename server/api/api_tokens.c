/* SPDX-License-Identifier: Apache-2.0 */
/*
 * API tokens: of an account, for all that it sees or for one team or project of it.
 */
#include <string.h>

#include "api/api_internal.h"

void api_write_time(json_out *out, const char *key, int64_t ms)
{
    if (ms == STORE_NO_TIME)
        out_null(out, key);
    else
        out_integer(out, key, ms);
}

static void write_id(json_out *out, const char *key, int64_t id)
{
    if (id == 0)
        out_null(out, key);
    else
        out_integer(out, key, id);
}

static void write_token(json_out *out, const store_token *token, const char *text)
{
    out_open(out, NULL, '{');
    out_text(out, "id", token->id);
    out_text(out, "name", token->name);
    api_write_scopes(out, token->scopes);
    out_integer(out, "created_ms", token->created_ms);
    api_write_time(out, "expires_ms", token->expires_ms);
    api_write_time(out, "used_ms", token->used_ms);
    api_write_time(out, "revoked_ms", token->revoked_ms);
    write_id(out, "team", token->team);
    write_id(out, "project", token->project);
    if (text != NULL)
        out_text(out, "token", text);
    out_close(out, '}');
}

static bool write_known_token(void *user, const store_token *token)
{
    json_out *out = user;

    write_token(out, token, NULL);
    return !out->failed;
}

void api_tokens(api_call *call)
{
    json_out out = api_json(call);
    store_result result;
    bool revoked;

    if (!api_parameter_boolean(call, "revoked", &revoked))
        return;
    out_open(&out, NULL, '{');
    out_open(&out, "tokens", '[');
    result = store_tokens(call->it->parts.store, call->caller.account.id, revoked, write_known_token, &out);
    api_send_list(call, result, &out);
}

static bool read_scopes(api_call *call, const json_t *list, uint32_t *scopes)
{
    const char *allowed = "ingest, read and admin, each once";
    size_t i;

    *scopes = 0;
    for (i = 0; i < json_array_size(list); i++) {
        const char *name = json_string_value(json_array_get(list, i));
        uint32_t scope = name == NULL ? 0 : api_scope(name);

        if (scope == 0 || (*scopes & scope) != 0)
            return api_invalid(call, "scopes", name, allowed);
        *scopes |= scope;
    }
    return *scopes != 0 || api_invalid(call, "scopes", "[]", allowed);
}

/* One team or one project; the store sees whether they are the account's. */
static bool read_bound(api_call *call, const json_t *team, const json_t *project, store_token *token)
{
    token->team = team == NULL ? 0 : json_integer_value(team);
    token->project = project == NULL ? 0 : json_integer_value(project);
    if (team != NULL && project != NULL)
        return api_invalid(call, "project", NULL, "a team or a project, not both: a project is in its team");
    if ((team != NULL && token->team <= 0) || (project != NULL && token->project <= 0))
        return api_invalid(call, team != NULL ? "team" : "project", NULL, "an id");
    return true;
}

void api_create_token(api_call *call)
{
    static const api_field fields[] = {
        {"name", JSON_STRING, true},   {"scopes", JSON_ARRAY, true},     {"expires_ms", JSON_INTEGER, false},
        {"team", JSON_INTEGER, false}, {"project", JSON_INTEGER, false},
    };
    json_t *given[API_COUNT(fields)];
    char text[ACCOUNTS_TOKEN_BYTES];
    json_out out = api_json(call);
    store_token token = {.expires_ms = STORE_NO_TIME, .revoked_ms = STORE_NO_TIME};
    accounts_answer made;

    if (!api_fields(call, call->body, "", fields, API_COUNT(fields), given) ||
        !api_check_name(call, "name", given[0], 1, STORE_NAME_BYTES) ||
        !read_scopes(call, given[1], &token.scopes) || !read_bound(call, given[3], given[4], &token))
        return;
    if (given[2] != NULL)
        token.expires_ms = json_integer_value(given[2]);
    if (given[2] != NULL && (token.expires_ms <= call->now_ms || token.expires_ms > API_EXACT)) {
        (void)api_invalid(call, "expires_ms", NULL, "a time to come, in milliseconds since 1970");
        return;
    }
    (void)snprintf(token.name, sizeof token.name, "%s", json_string_value(given[0]));
    token.account.id = call->caller.account.id;
    made = accounts_token_make(call->it->parts.accounts, &token, call->now_ms, text);
    if (made.result == ACCOUNTS_WRONG)
        api_not_found(call); /* what it was to be bound to */
    if (made.result != ACCOUNTS_OK && made.result != ACCOUNTS_WRONG)
        api_refuse_accounts(call, made);
    if (made.result != ACCOUNTS_OK)
        return;
    write_token(&out, &token, text);
    api_send(call, 201, &out);
}

void api_revoke_token(api_call *call)
{
    api_send_done(call, store_token_revoke(call->it->parts.store, api_act(call), call->path_values[0]));
}
