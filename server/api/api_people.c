/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Accounts as an admin of the server changes them, reset links, sessions, and both audit logs.
 */
#include <stdio.h>
#include <string.h>

#include "api/api_internal.h"

#define SESSION_ID_BYTES 8u /* of its hash: enough to tell an account's own apart, too few to be it */
#define ENTRIES 50
#define MOST_ENTRIES 200

store_who api_who(const api_call *call)
{
    return (store_who){call->caller.account.id, call->caller.team, call->caller.project};
}

store_act api_act(const api_call *call)
{
    return (store_act){api_who(call), call->now_ms};
}

bool api_path_id(api_call *call, uint32_t place, int64_t *id)
{
    if (api_parse_integer(call->path_values[place], 1, INT64_MAX, id))
        return true;
    api_not_found(call);
    return false;
}

void api_send_done(api_call *call, store_result result)
{
    if (result == STORE_OK)
        api_send_nothing(call);
    else
        api_refuse_store(call, result);
}

/* ---- accounts -------------------------------------------------------------------------------- */

void api_change_account(api_call *call)
{
    static const api_field fields[] = {{"admin", JSON_TRUE, false}, {"disabled", JSON_TRUE, false}};
    store_account_change change = {.admin = -1, .disabled = -1};
    json_t *given[API_COUNT(fields)];
    json_out out = api_json(call);
    store_account account;
    store_result result;

    if (!api_is_server_admin(call) || !api_fields(call, call->body, "", fields, API_COUNT(fields), given))
        return;
    if (given[0] == NULL && given[1] == NULL) {
        (void)api_invalid(call, "body", "{}", "admin, disabled");
        return;
    }
    if (given[0] != NULL)
        change.admin = json_is_true(given[0]);
    if (given[1] != NULL)
        change.disabled = json_is_true(given[1]);
    result =
        store_account_alter(call->it->parts.store, api_act(call), call->path_values[0], &change, &account);
    if (result != STORE_OK) {
        api_refuse_store(call, result);
        return;
    }
    api_write_account(&out, NULL, &account);
    api_send(call, 200, &out);
}

void api_make_reset(api_call *call)
{
    char secret[ACCOUNTS_SECRET_BYTES];
    json_out out = api_json(call);
    store_result result;

    if (!api_is_server_admin(call))
        return;
    result = accounts_reset_make(call->it->parts.accounts, api_act(call), call->path_values[0], secret);
    if (result != STORE_OK) {
        api_refuse_store(call, result);
        return;
    }
    out_open(&out, NULL, '{');
    out_text(&out, "token", secret);
    out_integer(&out, "expires_ms", call->now_ms + ACCOUNTS_RESET_MS);
    out_close(&out, '}');
    api_send(call, 201, &out);
}

void api_reset(api_call *call)
{
    static const api_field fields[] = {{"token", JSON_STRING, true}, {"password", JSON_STRING, true}};
    json_t *given[API_COUNT(fields)];
    store_account account;
    accounts_answer done;

    if (!api_fields(call, call->body, "", fields, API_COUNT(fields), given) ||
        !api_check_password(call, "password", given[1]))
        return;
    done = accounts_reset(call->it->parts.accounts, json_string_value(given[0]), json_string_value(given[1]),
                          call->now_ms, &account);
    if (done.result == ACCOUNTS_OK)
        api_log_in(call, 200, &account);
    else if (done.result == ACCOUNTS_WRONG)
        api_refuse(call, &(const api_fault){.status = 403,
                                            .code = "forbidden",
                                            .message = "the link is not valid (any more); ask for another",
                                            .field = "token"});
    else
        api_refuse_accounts(call, done);
}

/* ---- sessions -------------------------------------------------------------------------------- */

typedef struct session_list {
    api_call *call;
    json_out out;
    uint8_t current[STORE_HASH_BYTES];
    bool by_session;
    const char *wanted; /* an id that is looked for, or NULL */
    uint8_t found[STORE_HASH_BYTES];
    bool has_found;
} session_list;

static void name_session(const uint8_t *hash, char id[2 * SESSION_ID_BYTES + 1])
{
    for (uint32_t i = 0; i < SESSION_ID_BYTES; i++)
        (void)snprintf(id + (size_t)2 * i, 3, "%02x", hash[i]);
}

static bool write_session(void *user, const store_session *session)
{
    session_list *list = user;
    json_out *out = &list->out;
    char id[2 * SESSION_ID_BYTES + 1];

    name_session(session->hash, id);
    if (list->wanted != NULL) {
        if (strcmp(list->wanted, id) == 0) {
            list->has_found = true;
            memcpy(list->found, session->hash, sizeof list->found);
        }
        return true;
    }
    out_open(out, NULL, '{');
    out_text(out, "id", id);
    out_integer(out, "created_ms", session->created_ms);
    out_integer(out, "used_ms", session->used_ms);
    out_boolean(out, "current",
                list->by_session && memcmp(session->hash, list->current, STORE_HASH_BYTES) == 0);
    out_close(out, '}');
    return !out->failed;
}

static store_result read_sessions(api_call *call, session_list *list)
{
    char secret[ACCOUNTS_SECRET_BYTES];

    list->by_session = call->caller.by_session && api_session_secret(call, secret);
    if (list->by_session)
        accounts_session_hash(secret, list->current);
    return store_sessions(call->it->parts.store, call->caller.account.id, call->now_ms - ACCOUNTS_SESSION_MS,
                          call->now_ms - ACCOUNTS_SESSION_IDLE_MS, write_session, list);
}

void api_sessions(api_call *call)
{
    session_list list = {.call = call, .out = api_json(call)};
    store_result result;

    out_open(&list.out, NULL, '{');
    out_open(&list.out, "sessions", '[');
    result = read_sessions(call, &list);
    api_send_list(call, result, &list.out);
}

void api_end_session(api_call *call)
{
    session_list list = {.call = call, .out = api_json(call), .wanted = call->path_values[0]};
    store_result result = read_sessions(call, &list);

    if (result == STORE_OK && !list.has_found)
        result = STORE_NOT_FOUND;
    if (result == STORE_OK)
        result = store_session_revoke(call->it->parts.store, api_act(call), list.found);
    api_send_done(call, result);
}

/* ---- the audit log --------------------------------------------------------------------------- */

typedef struct entries_page {
    json_out out;
    int64_t limit;
    int64_t before;
    int64_t count;
    int64_t last;
} entries_page;

static bool write_entry(void *user, const store_entry *entry)
{
    entries_page *page = user;
    json_out *out = &page->out;

    page->count++;
    if (page->count > page->limit)
        return true; /* one more than the page has: there is a next one */
    page->last = entry->id;
    out_open(out, NULL, '{');
    out_integer(out, "id", entry->id);
    out_integer(out, "time_ms", entry->time_ms);
    out_text(out, "by", *entry->by == '\0' ? NULL : entry->by);
    out_text(out, "action", entry->action);
    out_text(out, "thing", entry->thing);
    out_text(out, "detail", entry->detail);
    out_close(out, '}');
    return !out->failed;
}

static bool begin_entries(api_call *call, entries_page *page)
{
    *page = (entries_page){.out = api_json(call), .limit = ENTRIES, .before = INT64_MAX};
    if (!api_parameter(call, "limit", 1, MOST_ENTRIES, &page->limit) ||
        !api_parameter(call, "before", 1, INT64_MAX, &page->before))
        return false;
    out_open(&page->out, NULL, '{');
    out_open(&page->out, "entries", '[');
    return true;
}

static void send_entries(api_call *call, entries_page *page, store_result result)
{
    out_close(&page->out, ']');
    if (page->count > page->limit)
        out_integer(&page->out, "next", page->last);
    else
        out_null(&page->out, "next");
    out_close(&page->out, '}');
    if (result == STORE_OK)
        api_send(call, 200, &page->out);
    else
        api_refuse_store(call, result);
}

void api_audit(api_call *call)
{
    entries_page page;

    if (!api_is_server_admin(call) || !begin_entries(call, &page))
        return;
    send_entries(call, &page,
                 store_server_entries(call->it->parts.store, page.before, (uint32_t)page.limit + 1,
                                      write_entry, &page));
}

void api_team_audit(api_call *call)
{
    entries_page page;
    int64_t team;

    if (!api_path_id(call, 0, &team) || !begin_entries(call, &page))
        return;
    send_entries(call, &page,
                 store_team_entries(call->it->parts.store, api_who(call), team, page.before,
                                    (uint32_t)page.limit + 1, write_entry, &page));
}
