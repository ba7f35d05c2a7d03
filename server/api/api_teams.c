/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Teams, members, invitations. Who may do what is decided in the store, with what it then does.
 */
#include <stdio.h>
#include <string.h>

#include "api/api_internal.h"

#define DAY_MS (INT64_C(24) * 3600 * 1000)
#define INVITATION_DAYS 7
#define MOST_INVITATION_DAYS 90

const char *api_role_name(store_role role)
{
    static const char *const names[] = {"none", "viewer", "member", "admin", "owner"};

    return names[role];
}

static bool read_role(api_call *call, const json_t *given, store_role *role)
{
    const char *name = json_string_value(given);

    for (store_role i = STORE_VIEWER; i <= STORE_OWNER; i++) {
        if (strcmp(api_role_name(i), name) == 0) {
            *role = i;
            return true;
        }
    }
    return api_invalid(call, "role", name, "viewer, member, admin, owner");
}

/* ---- teams ----------------------------------------------------------------------------------- */

static bool write_team(void *user, const store_team *team)
{
    json_out *out = user;

    out_open(out, NULL, '{');
    out_integer(out, "id", team->id);
    out_text(out, "name", team->name);
    out_integer(out, "created_ms", team->created_ms);
    out_integer(out, "members", team->members);
    out_integer(out, "projects", team->projects);
    out_text(out, "role", api_role_name(team->role));
    out_close(out, '}');
    return !out->failed;
}

static void send_team(api_call *call, unsigned status, store_result result, const store_team *team)
{
    json_out out = api_json(call);

    if (result != STORE_OK) {
        api_refuse_store(call, result);
        return;
    }
    (void)write_team(&out, team);
    api_send(call, status, &out);
}

void api_teams(api_call *call)
{
    json_out out = api_json(call);
    store_result result;

    out_open(&out, NULL, '{');
    out_open(&out, "teams", '[');
    result = store_teams(call->it->parts.store, api_who(call), write_team, &out);
    api_send_list(call, result, &out);
}

static const char *read_name(api_call *call)
{
    static const api_field fields[] = {{"name", JSON_STRING, true}};
    json_t *given[API_COUNT(fields)];

    if (!api_fields(call, call->body, "", fields, API_COUNT(fields), given) ||
        !api_check_name(call, "name", given[0], 1, STORE_NAME_BYTES))
        return NULL;
    return json_string_value(given[0]);
}

void api_create_team(api_call *call)
{
    const char *name;
    store_team team;

    if (!api_is_server_admin(call) || (name = read_name(call)) == NULL)
        return;
    send_team(call, 201, store_team_add(call->it->parts.store, api_act(call), name, &team), &team);
}

void api_team(api_call *call)
{
    store_team team;
    int64_t id;

    if (api_path_id(call, 0, &id))
        send_team(call, 200, store_team_find(call->it->parts.store, api_who(call), id, &team), &team);
}

void api_rename_team(api_call *call)
{
    const char *name;
    store_team team;
    int64_t id;

    if (!api_path_id(call, 0, &id) || (name = read_name(call)) == NULL)
        return;
    send_team(call, 200, store_team_rename(call->it->parts.store, api_act(call), id, name, &team), &team);
}

void api_delete_team(api_call *call)
{
    store_result result;
    int64_t id;

    if (!api_path_id(call, 0, &id))
        return;
    result = store_team_delete(call->it->parts.store, api_act(call), id);
    if (result == STORE_CONFLICT)
        api_refuse(call,
                   &(const api_fault){.status = 409,
                                      .code = "conflict",
                                      .message = "the team has projects",
                                      .allowed = "a team whose projects were deleted, with their runs"});
    else
        api_send_done(call, result);
}

/* ---- members --------------------------------------------------------------------------------- */

static bool write_member(void *user, const store_member *member)
{
    json_out *out = user;

    out_open(out, NULL, '{');
    out_text(out, "name", member->name);
    out_text(out, "role", api_role_name(member->role));
    out_integer(out, "joined_ms", member->joined_ms);
    out_boolean(out, "disabled", member->disabled);
    out_close(out, '}');
    return !out->failed;
}

void api_members(api_call *call)
{
    json_out out = api_json(call);
    store_result result;
    int64_t team;

    if (!api_path_id(call, 0, &team))
        return;
    out_open(&out, NULL, '{');
    out_open(&out, "members", '[');
    result = store_members(call->it->parts.store, api_who(call), team, write_member, &out);
    api_send_list(call, result, &out);
}

void api_change_member(api_call *call)
{
    static const api_field fields[] = {{"role", JSON_STRING, true}};
    json_t *given[API_COUNT(fields)];
    store_role role;
    int64_t team;

    if (!api_path_id(call, 0, &team) || !api_fields(call, call->body, "", fields, API_COUNT(fields), given) ||
        !read_role(call, given[0], &role))
        return;
    api_send_done(call,
                  store_member_set(call->it->parts.store, api_act(call), team, call->path_values[1], role));
}

void api_remove_member(api_call *call)
{
    int64_t team;

    if (api_path_id(call, 0, &team))
        api_send_done(call,
                      store_member_remove(call->it->parts.store, api_act(call), team, call->path_values[1]));
}

/* ---- invitations ----------------------------------------------------------------------------- */

static void write_invitation(json_out *out, const store_invitation *invitation, const char *token)
{
    out_open(out, NULL, '{');
    out_text(out, "id", invitation->id);
    out_text(out, "role", api_role_name(invitation->role));
    out_text(out, "by", invitation->by);
    out_integer(out, "created_ms", invitation->created_ms);
    out_integer(out, "expires_ms", invitation->expires_ms);
    if (token != NULL)
        out_text(out, "token", token);
    out_close(out, '}');
}

static bool write_known_invitation(void *user, const store_invitation *invitation)
{
    json_out *out = user;

    write_invitation(out, invitation, NULL);
    return !out->failed;
}

void api_invitations(api_call *call)
{
    json_out out = api_json(call);
    store_result result;
    int64_t team;

    if (!api_path_id(call, 0, &team))
        return;
    out_open(&out, NULL, '{');
    out_open(&out, "invitations", '[');
    result = store_invitations(call->it->parts.store, api_who(call), team, write_known_invitation, &out);
    api_send_list(call, result, &out);
}

void api_create_invitation(api_call *call)
{
    static const api_field fields[] = {{"role", JSON_STRING, true}, {"days", JSON_INTEGER, false}};
    json_t *given[API_COUNT(fields)];
    char text[ACCOUNTS_INVITATION_BYTES];
    json_out out = api_json(call);
    store_invitation invitation = {0};
    store_result result;
    int64_t days = INVITATION_DAYS;

    if (!api_path_id(call, 0, &invitation.team) ||
        !api_fields(call, call->body, "", fields, API_COUNT(fields), given) ||
        !read_role(call, given[0], &invitation.role))
        return;
    if (given[1] != NULL)
        days = json_integer_value(given[1]);
    if (days < 1 || days > MOST_INVITATION_DAYS) {
        (void)api_invalid(call, "days", NULL, "1 to 90");
        return;
    }
    invitation.expires_ms = call->now_ms + days * DAY_MS;
    (void)snprintf(invitation.by, sizeof invitation.by, "%s", call->caller.account.name);
    result = accounts_invite(call->it->parts.accounts, api_act(call), &invitation, text);
    if (result != STORE_OK) {
        api_refuse_store(call, result);
        return;
    }
    write_invitation(&out, &invitation, text);
    api_send(call, 201, &out);
}

void api_revoke_invitation(api_call *call)
{
    int64_t team;

    if (api_path_id(call, 0, &team))
        api_send_done(
            call, store_invitation_revoke(call->it->parts.store, api_act(call), team, call->path_values[1]));
}

/* ---- who holds the link ---------------------------------------------------------------------- */

static void refuse_link(api_call *call, accounts_answer answer)
{
    if (answer.result == ACCOUNTS_WRONG)
        api_refuse(call, &(const api_fault){.status = 403,
                                            .code = "forbidden",
                                            .message = "the link is not valid (any more); ask for another",
                                            .field = "token"});
    else if (answer.result == ACCOUNTS_TAKEN)
        api_refuse(call, &(const api_fault){.status = 409,
                                            .code = "conflict",
                                            .message = "the name is taken, or is in the team already",
                                            .allowed = "another name; or log in, and open the link again"});
    else
        api_refuse_accounts(call, answer);
}

void api_look_at_invitation(api_call *call)
{
    static const api_field fields[] = {{"token", JSON_STRING, true}};
    json_t *given[API_COUNT(fields)];
    json_out out = api_json(call);
    store_invitation invitation;
    accounts_answer found;

    if (!api_fields(call, call->body, "", fields, API_COUNT(fields), given))
        return;
    found =
        accounts_invitation(call->it->parts.accounts, json_string_value(given[0]), call->now_ms, &invitation);
    if (found.result != ACCOUNTS_OK) {
        refuse_link(call, found);
        return;
    }
    out_open(&out, NULL, '{');
    out_text(&out, "team", invitation.team_name);
    out_text(&out, "role", api_role_name(invitation.role));
    out_text(&out, "by", invitation.by);
    out_integer(&out, "expires_ms", invitation.expires_ms);
    out_close(&out, '}');
    api_send(call, 200, &out);
}

/* Who is logged in joins; anybody else makes an account. */
static bool read_accepting(api_call *call, json_t *const *given, store_account *account)
{
    if (given[1] == NULL && given[2] == NULL && call->is_known && call->caller.by_session) {
        *account = call->caller.account;
        return true;
    }
    if (given[1] == NULL || given[2] == NULL)
        return api_invalid(call, given[1] == NULL ? "name" : "password", NULL,
                           "a name and a password for a new account; or neither, with a session");
    if (!api_check_account_name(call, given[1]) || !api_check_password(call, "password", given[2]))
        return false;
    (void)snprintf(account->name, sizeof account->name, "%s", json_string_value(given[1]));
    return true;
}

void api_accept_invitation(api_call *call)
{
    static const api_field fields[] = {
        {"token", JSON_STRING, true}, {"name", JSON_STRING, false}, {"password", JSON_STRING, false}};
    json_t *given[API_COUNT(fields)];
    store_account account = {0};
    accounts_answer joined;

    if (!api_fields(call, call->body, "", fields, API_COUNT(fields), given) ||
        !read_accepting(call, given, &account))
        return;
    joined = accounts_join(call->it->parts.accounts, json_string_value(given[0]), &account,
                           json_string_value(given[2]), call->now_ms);
    if (joined.result == ACCOUNTS_OK)
        api_log_in(call, given[1] == NULL ? 200 : 201, &account);
    else
        refuse_link(call, joined);
}
