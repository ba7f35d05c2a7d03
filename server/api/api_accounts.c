/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Setup, login, accounts. A session that begins is always a new one: what cookie came with the login
 * is ended, if it was one of ours, and never goes on.
 */
#include <string.h>

#include "api/api_internal.h"

#define LEAST_PASSWORD 10u
#define MOST_PASSWORD 256u

bool api_check_account_name(api_call *call, const json_t *name)
{
    const char *text = json_string_value(name);

    if (api_is_word(text, 1, STORE_ID_BYTES, "._-") && strchr("._-", *text) == NULL)
        return true;
    return api_invalid(call, "name", text,
                       "1 to 64 of a-z, 0-9, dot, underscore and hyphen; a letter or digit first");
}

bool api_check_password(api_call *call, const char *field, const json_t *password)
{
    size_t bytes = json_string_length(password);

    if (bytes >= LEAST_PASSWORD && bytes <= MOST_PASSWORD)
        return true;
    return api_invalid(call, field, NULL, "10 to 256 bytes");
}

void api_log_in(api_call *call, unsigned status, const store_account *account)
{
    char secret[ACCOUNTS_SECRET_BYTES];
    json_out out = api_json(call);
    accounts_answer begun;

    if (api_session_secret(call, secret))
        (void)accounts_session_end(call->it->parts.accounts, secret);
    begun = accounts_session_begin(call->it->parts.accounts, account->id, call->now_ms, secret);
    if (begun.result != ACCOUNTS_OK) {
        api_refuse_accounts(call, begun);
        return;
    }
    out_open(&out, NULL, '{');
    api_write_account(&out, "account", account);
    out_close(&out, '}');
    api_send(call, status, &out);
    api_set_cookie(call, secret);
}

void api_setup_state(api_call *call)
{
    json_out out = api_json(call);
    int64_t count = 0;
    store_result result = store_account_count(call->it->parts.store, &count);

    if (result != STORE_OK) {
        api_refuse_store(call, result);
        return;
    }
    out_open(&out, NULL, '{');
    out_boolean(&out, "needed", count == 0);
    out_close(&out, '}');
    api_send(call, 200, &out);
}

void api_setup(api_call *call)
{
    static const api_field fields[] = {
        {"token", JSON_STRING, true}, {"name", JSON_STRING, true}, {"password", JSON_STRING, true}};
    json_t *given[API_COUNT(fields)];
    store_account account;
    accounts_answer made;

    if (!api_fields(call, call->body, "", fields, API_COUNT(fields), given) ||
        !api_check_account_name(call, given[1]) || !api_check_password(call, "password", given[2]))
        return;
    made = accounts_setup(call->it->parts.accounts, json_string_value(given[0]), json_string_value(given[1]),
                          json_string_value(given[2]), call->now_ms, &account);
    if (made.result == ACCOUNTS_OK)
        api_log_in(call, 201, &account);
    else if (made.result == ACCOUNTS_WRONG)
        api_refuse(call,
                   &(const api_fault){
                       .status = 403,
                       .code = "forbidden",
                       .message = "the setup link is not valid (any more); restart the server for another",
                       .field = "token"});
    else
        api_refuse_accounts(call, made);
}

void api_login(api_call *call)
{
    static const api_field fields[] = {{"name", JSON_STRING, true}, {"password", JSON_STRING, true}};
    json_t *given[API_COUNT(fields)];
    store_account account;
    accounts_answer found;

    if (!api_fields(call, call->body, "", fields, API_COUNT(fields), given) ||
        !api_check_name(call, "name", given[0], 1, STORE_ID_BYTES))
        return;
    if (json_string_length(given[1]) > MOST_PASSWORD) {
        (void)api_invalid(call, "password", NULL, "at most 256 bytes");
        return;
    }
    found = accounts_check(call->it->parts.accounts, json_string_value(given[0]), json_string_value(given[1]),
                           call->request->address, call->now_ms, &account);
    if (found.result == ACCOUNTS_OK)
        api_log_in(call, 200, &account);
    else
        api_refuse_accounts(call, found);
}

void api_logout(api_call *call)
{
    char secret[ACCOUNTS_SECRET_BYTES];
    accounts_answer ended = {.result = ACCOUNTS_OK};

    if (call->caller.by_session && api_session_secret(call, secret))
        ended = accounts_session_end(call->it->parts.accounts, secret);
    if (ended.result != ACCOUNTS_OK) {
        api_refuse_accounts(call, ended);
        return;
    }
    api_send_nothing(call);
    api_set_cookie(call, NULL);
}

void api_me(api_call *call)
{
    json_out out = api_json(call);

    out_open(&out, NULL, '{');
    api_write_account(&out, "account", &call->caller.account);
    out_text(&out, "via", call->caller.by_session ? "session" : "token");
    api_write_scopes(&out, call->caller.scopes);
    out_close(&out, '}');
    api_send(call, 200, &out);
}

void api_change_password(api_call *call)
{
    static const api_field fields[] = {{"current", JSON_STRING, true}, {"new", JSON_STRING, true}};
    json_t *given[API_COUNT(fields)];
    store_account account;
    accounts_answer answer;

    if (!api_fields(call, call->body, "", fields, API_COUNT(fields), given) ||
        !api_check_password(call, "new", given[1]))
        return;
    answer = accounts_check(call->it->parts.accounts, call->caller.account.name, json_string_value(given[0]),
                            call->request->address, call->now_ms, &account);
    if (answer.result == ACCOUNTS_OK)
        answer = accounts_set_password(call->it->parts.accounts, api_act(call), json_string_value(given[1]));
    if (answer.result == ACCOUNTS_OK)
        api_log_in(call, 200, &account);
    else
        api_refuse_accounts(call, answer);
}

/* ---- accounts -------------------------------------------------------------------------------- */

bool api_is_server_admin(api_call *call)
{
    if (call->caller.account.admin)
        return true;
    api_refuse(call, &(const api_fault){.status = 403,
                                        .code = "forbidden",
                                        .message = "only an admin of the server may do this"});
    return false;
}

static bool write_account(void *user, const store_account *account)
{
    json_out *out = user;

    api_write_account(out, NULL, account);
    return !out->failed;
}

void api_accounts(api_call *call)
{
    json_out out = api_json(call);
    store_result result;

    if (!api_is_server_admin(call))
        return;
    out_open(&out, NULL, '{');
    out_open(&out, "accounts", '[');
    result = store_accounts(call->it->parts.store, write_account, &out);
    api_send_list(call, result, &out);
}

void api_create_account(api_call *call)
{
    static const api_field fields[] = {
        {"name", JSON_STRING, true}, {"password", JSON_STRING, true}, {"admin", JSON_TRUE, false}};
    json_t *given[API_COUNT(fields)];
    json_out out = api_json(call);
    store_account account;
    accounts_answer made;

    if (!api_is_server_admin(call) || !api_fields(call, call->body, "", fields, API_COUNT(fields), given) ||
        !api_check_account_name(call, given[0]) || !api_check_password(call, "password", given[1]))
        return;
    made = accounts_add(call->it->parts.accounts, call->caller.account.id, json_string_value(given[0]),
                        json_string_value(given[1]), json_is_true(given[2]), call->now_ms, &account);
    if (made.result != ACCOUNTS_OK) {
        api_refuse_accounts(call, made);
        return;
    }
    api_write_account(&out, NULL, &account);
    api_send(call, 201, &out);
}
