/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who it is: a token in `Authorization`, or a session's cookie.
 *
 * A browser sends cookies with whatever another site makes it send, so what changes something by cookie must
 * come from a page of ours: `Origin` names us, or `Sec-Fetch-Site` says so. `SameSite` of the cookie stands
 * behind that. Tokens are never sent by themselves.
 */
#include <string.h>
#include <strings.h>

#include "api/api_internal.h"

#define COOKIE "memscale"
#define SECURE_COOKIE "__Host-memscale"

static const struct {
    const char *name;
    uint32_t bit;
} scopes[] = {{"ingest", ACCOUNTS_INGEST}, {"read", ACCOUNTS_READ}, {"admin", ACCOUNTS_ADMIN}};

uint32_t api_scope(const char *name)
{
    for (size_t i = 0; i < API_COUNT(scopes); i++)
        if (strcmp(scopes[i].name, name) == 0)
            return scopes[i].bit;
    return 0;
}

void api_write_scopes(json_out *out, uint32_t held)
{
    out_open(out, "scopes", '[');
    for (size_t i = 0; i < API_COUNT(scopes); i++)
        if (held & scopes[i].bit)
            out_text(out, NULL, scopes[i].name);
    out_close(out, ']');
}

void api_write_account(json_out *out, const char *key, const store_account *account)
{
    out_open(out, key, '{');
    out_text(out, "name", account->name);
    out_boolean(out, "admin", account->admin);
    out_integer(out, "created_ms", account->created_ms);
    api_write_time(out, "disabled_ms", account->disabled_ms);
    out_close(out, '}');
}

static const char *field_of(const api_call *call, const char *name)
{
    return http_field_find(call->request->fields, call->request->field_count, name);
}

/* ---- cookies --------------------------------------------------------------------------------- */

static bool is_secret(const char *text, size_t bytes)
{
    return bytes == ACCOUNTS_SECRET_BYTES - 1 && strspn(text, "0123456789abcdef") >= bytes;
}

bool api_find_cookie(const char *header, const char *name, char *secret)
{
    size_t name_bytes = strlen(name);

    while (*header != '\0') {
        size_t bytes = strcspn(header, ";");

        if (bytes > name_bytes && header[name_bytes] == '=' && strncmp(header, name, name_bytes) == 0 &&
            is_secret(header + name_bytes + 1, bytes - name_bytes - 1)) {
            memcpy(secret, header + name_bytes + 1, bytes - name_bytes - 1);
            secret[bytes - name_bytes - 1] = '\0';
            return true;
        }
        header += bytes;
        header += strspn(header, "; ");
    }
    return false;
}

bool api_session_secret(const api_call *call, char *secret)
{
    const char *header = field_of(call, "cookie");

    return header != NULL &&
           api_find_cookie(header, call->it->parts.behind_https ? SECURE_COOKIE : COOKIE, secret);
}

void api_set_cookie(api_call *call, const char *secret)
{
    bool secure = call->it->parts.behind_https;

    (void)snprintf(call->reply->cookie, sizeof call->reply->cookie,
                   "%s=%s; Path=/; HttpOnly; SameSite=Lax; Max-Age=%lld%s", secure ? SECURE_COOKIE : COOKIE,
                   secret == NULL ? "" : secret,
                   secret == NULL ? 0LL : (long long)(ACCOUNTS_SESSION_MS / 1000), secure ? "; Secure" : "");
}

/* ---- callers --------------------------------------------------------------------------------- */

static bool is_unsafe(const api_call *call)
{
    return strcmp(call->request->method, "GET") != 0 && strcmp(call->request->method, "HEAD") != 0;
}

/* Behind TLS, a page that came without it is not ours. */
static bool names_us(const char *origin, const char *host, bool behind_https)
{
    static const char *const schemes[] = {"https://", "http://"};

    for (size_t i = 0; i < (behind_https ? 1 : API_COUNT(schemes)); i++) {
        size_t bytes = strlen(schemes[i]);

        if (strncmp(origin, schemes[i], bytes) == 0 && strcasecmp(origin + bytes, host) == 0)
            return true;
    }
    return false;
}

bool api_is_same_origin(api_call *call)
{
    const char *site = field_of(call, "sec-fetch-site");
    const char *origin = field_of(call, "origin");
    bool same =
        origin != NULL || site != NULL || !call->is_known; /* what is no browser logs in without both */

    if (!is_unsafe(call) || (call->is_known && !call->caller.by_session))
        return true;
    if (origin != NULL && !names_us(origin, call->request->host, call->it->parts.behind_https))
        same = false;
    if (site != NULL && strcmp(site, "same-origin") != 0)
        same = false;
    if (!same)
        api_refuse(call, &(const api_fault){.status = 403,
                                            .code = "forbidden",
                                            .message = "this came from another site's page",
                                            .field = "Origin",
                                            .value = origin,
                                            .allowed = "an Origin or Sec-Fetch-Site of this server"});
    return same;
}

static void refuse_unknown(api_call *call)
{
    api_refuse(call, &(const api_fault){.status = 401,
                                        .code = "unauthenticated",
                                        .message = "log in, or send a token that is valid",
                                        .field = "Authorization",
                                        .allowed = "Bearer ms_<id>_<secret>"});
}

/* `*came` false: nobody says who they are. */
static accounts_answer identify(const api_call *call, int64_t now_ms, accounts_caller *caller, bool *came)
{
    static const char bearer[] = "Bearer ";
    const char *header = field_of(call, "authorization");
    accounts_answer answer = {.result = ACCOUNTS_WRONG};
    char secret[ACCOUNTS_SECRET_BYTES];

    *came = true;
    if (header != NULL) {
        if (strncasecmp(header, bearer, sizeof bearer - 1) == 0)
            answer = accounts_by_token(call->it->parts.accounts, header + sizeof bearer - 1, now_ms, caller);
    } else if (api_session_secret(call, secret)) {
        answer = accounts_by_session(call->it->parts.accounts, secret, now_ms, caller);
    } else {
        *came = false;
    }
    return answer;
}

bool api_is_still_known(const api_call *call)
{
    accounts_caller caller;
    bool came;

    return identify(call, call->it->parts.now_ms(), &caller, &came).result == ACCOUNTS_OK &&
           caller.account.id == call->caller.account.id;
}

static const char *scopes_allowed(uint32_t needs)
{
    switch (needs) {
    case ACCOUNTS_INGEST:
        return "ingest, admin";
    case ACCOUNTS_READ:
        return "read, admin";
    case ACCOUNTS_ADMIN:
        return "admin";
    default:
        return "admin, of a token that is bound to no team or project";
    }
}

bool api_authenticate(api_call *call)
{
    bool came;
    accounts_answer answer = identify(call, call->now_ms, &call->caller, &came);

    call->is_known = answer.result == ACCOUNTS_OK;
    if (answer.result == ACCOUNTS_FAILED) {
        api_refuse_accounts(call, answer);
        return false;
    }
    if (call->route->needs == 0)
        return true; /* a cookie that has ended does not keep anybody from logging in */
    if (!came || !call->is_known) {
        refuse_unknown(call);
        return false;
    }
    if ((call->caller.scopes & call->route->needs) == 0) {
        api_refuse(call, &(const api_fault){.status = 403,
                                            .code = "forbidden",
                                            .message = "the token does not have the scope that this needs",
                                            .allowed = scopes_allowed(call->route->needs)});
        return false;
    }
    return true;
}
