/* SPDX-License-Identifier: Apache-2.0 */
/** @file api_internal.h  What the files of `api` share: a call, its input, its errors. */
#ifndef MSC_SERVER_API_INTERNAL_H
#define MSC_SERVER_API_INTERNAL_H

#include <jansson.h>
#include <stdatomic.h>

#include "api/api.h"
#include "api/json_out.h"
#include "base/thread.h"

#define API_BODY_BYTES ((uint64_t)16 << 10)
#define API_TELEMETRY_BYTES ((uint64_t)4 << 10)
#define API_BATCH_BYTES ((uint64_t)1 << 20)
#define API_DEPTH 32u
#define API_EXACT INT64_C(9007199254740992) /* 2^53: integers that a double holds */

/* Status classes that requests are counted in, by route: 2xx … 5xx. */
#define API_CLASSES 4u
#define API_MOST_ROUTES 112u

struct api {
    api_parts parts;
    msc_context *ctx;
    _Atomic uint64_t answered[API_MOST_ROUTES + 1][API_CLASSES]; /* the last: what has no route */
    _Atomic uint64_t answer_ns;
    _Atomic uint64_t telemetry_minute; /* its number, and the messages in it */
    msc__mutex documents;              /* held while one is read, changed and written */
    int64_t telemetry_day;             /* on which what is too old was removed; the tick's own */
};

typedef struct api_call api_call;

typedef struct api_route {
    const char *method;
    const char *path;       /* "{…}" stands for one segment */
    uint32_t needs;         /* a scope; 0: nothing */
    uint64_t body_bytes;    /* 0: there is no body */
    const char *parameters; /* of the query, with commas around each; NULL: none */
    void (*answer)(api_call *call);
} api_route;

struct api_call {
    api *it;
    http_request *request;
    http_reply *reply;
    const api_route *route;
    const char *path_values[2]; /* what stood for "{…}" */
    accounts_caller caller;     /* if the route needs one, or one came */
    bool is_known;
    int64_t now_ms;
    int64_t begin_ns;
    json_t *body;
    const void *input; /* the handler's own, for what is called back */
};

/* ---- answers (api_answer.c) ------------------------------------------------------------------ */

json_out api_json(api_call *call);
/** Sends what was written; 503 if there was no memory. */
void api_send(api_call *call, unsigned status, json_out *out);
/** Ends the list within an object that was written, and sends it, or what the store has refused. */
void api_send_list(api_call *call, store_result result, json_out *out);
void api_send_nothing(api_call *call); /**< 204 */

typedef struct api_fault {
    unsigned status;
    const char *code;
    const char *message;
    const char *field; /* these may be NULL */
    const char *value;
    const char *allowed;
    unsigned retry_after_s;
} api_fault;
void api_refuse(api_call *call, const api_fault *fault);
/** 400 for a field or parameter. Returns false, so that it ends a check. */
bool api_invalid(api_call *call, const char *field, const char *value, const char *allowed);
void api_not_found(api_call *call);
void api_refuse_store(api_call *call, store_result result);
void api_refuse_accounts(api_call *call, accounts_answer answer);

/* ---- who it is (api_auth.c) ------------------------------------------------------------------ */

/** Fills the caller, if one came. False: refused. */
bool api_authenticate(api_call *call);
/** Whether a browser that sends this means it. False: refused. */
bool api_is_same_origin(api_call *call);
/** The value of a session's cookie, or false. `secret`: ACCOUNTS_SECRET_BYTES. */
bool api_find_cookie(const char *header, const char *name, char *secret);
bool api_session_secret(const api_call *call, char *secret);
void api_set_cookie(api_call *call, const char *secret); /**< NULL: ends it */
uint32_t api_scope(const char *name);                    /**< 0: none of that name */
void api_write_scopes(json_out *out, uint32_t scopes);
void api_write_account(json_out *out, const char *key, const store_account *account);
/** Whether who began a stream would still be let in, as the same account. */
bool api_is_still_known(const api_call *call);
/** Begins a session, never one that came, and answers with its cookie. */
void api_log_in(api_call *call, unsigned status, const store_account *account);

/* ---- input (api_input.c) --------------------------------------------------------------------- */

/** Whether a text's brackets nest no deeper than API_DEPTH. Strings are skipped; it need not be JSON. */
bool api_is_shallow(const char *text, size_t bytes);
/** Has jansson's allocations watched, once for the process, before any. */
void api_watch_memory(void);
/** Reads the body into `call->body`. False: refused. */
bool api_read_body(api_call *call);

typedef struct api_field {
    const char *name;
    json_type type; /* JSON_TRUE: a boolean */
    bool required;
} api_field;
/**
 * Takes an object's fields, in the order of `fields`; absent ones and null are NULL. Others, and other types,
 * are refused.
 */
bool api_fields(api_call *call, json_t *object, const char *where, const api_field *fields, size_t count,
                json_t **out);
#define API_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/** A text of `least` to `most` bytes without control characters. */
bool api_is_name(const char *text, size_t least, size_t most);
bool api_check_name(api_call *call, const char *field, const json_t *value, size_t least, size_t most);
/** Characters of a set, `least` to `most`; the first may be of fewer. */
bool api_is_word(const char *text, size_t least, size_t most, const char *also);
bool api_is_run_id(const char *text);
bool api_is_kind(const char *text);
/** A decimal number within bounds; all of the text. */
bool api_parse_integer(const char *text, int64_t least, int64_t most, int64_t *out);
/** A parameter of the query; `*out` stays if it is not there. */
bool api_parameter(api_call *call, const char *name, int64_t least, int64_t most, int64_t *out);
bool api_parameter_boolean(api_call *call, const char *name, bool *out);
/** "<key>.<rest>": where a page begins. */
bool api_parse_cursor(const char *text, int64_t *key, const char **rest);

void api_write_time(json_out *out, const char *key, int64_t ms); /**< STORE_NO_TIME: null */
bool api_check_account_name(api_call *call, const json_t *name);
bool api_check_password(api_call *call, const char *field, const json_t *password);

/* ---- people ---------------------------------------------------------------------------------- */

store_who api_who(const api_call *call);
store_act api_act(const api_call *call);
/** Whether the account is an admin of the server; or answers. */
bool api_is_server_admin(api_call *call);
/** A number of the path; what is none is not found. */
bool api_path_id(api_call *call, uint32_t place, int64_t *id);
/** 204, or what the store has refused. */
void api_send_done(api_call *call, store_result result);
const char *api_role_name(store_role role);

/** There is something for `api_keep`. */
void api_wake_keeper(const api_call *call);

/* ---- runs ------------------------------------------------------------------------------------ */

store_run_ref api_ref(const api_call *call);
/** Fills a run of the caller's, or answers. */
bool api_find_run(api_call *call, store_run *run);
void api_write_run(json_out *out, const store_run *run, bool closed);
/** A change that was committed, to those who watch. */
void api_say_run(void *call, const store_run *run);
void api_say_gone(void *call, const store_run *run);

/** Keeps a batch and tells who watches the run. */
store_result api_keep_batch(api_call *call, store_run_ref ref, const store_batch *batch,
                            store_ingested *done);
/** A number, or one of the strings that stand for what JSON has no numbers for. */
bool api_read_double(const json_t *value, double *out);

/* ---- MLflow's API (api_mlflow.h) ------------------------------------------------------------- */

bool api_is_mlflow(const api_call *call);
/** `api_refuse` in the form that MLflow's clients read. */
void api_refuse_mlflow(api_call *call, const api_fault *fault);

/* ---- handlers -------------------------------------------------------------------------------- */

void api_setup_state(api_call *call);
void api_setup(api_call *call);
void api_login(api_call *call);
void api_logout(api_call *call);
void api_me(api_call *call);
void api_change_password(api_call *call);
void api_accounts(api_call *call);
void api_create_account(api_call *call);
void api_tokens(api_call *call);
void api_create_token(api_call *call);
void api_revoke_token(api_call *call);
void api_projects(api_call *call);
void api_create_project(api_call *call);
void api_runs(api_call *call);
void api_create_run(api_call *call);
void api_run(api_call *call);
void api_change_run(api_call *call);
void api_delete_run(api_call *call);
void api_ingest(api_call *call);
void api_heartbeat(api_call *call);
void api_finish(api_call *call);
void api_series(api_call *call);
void api_points(api_call *call);
void api_events(api_call *call);
void api_document(api_call *call);
void api_live(api_call *call);
void api_export(api_call *call);
void api_take_telemetry(api_call *call);
void api_telemetry(api_call *call);
/** Removes what is too old, once a day. */
void api_telemetry_tick(api *it);
void api_healthz(api_call *call);
void api_readyz(api_call *call);
void api_metrics(api_call *call);

void api_change_account(api_call *call);
void api_make_reset(api_call *call);
void api_reset(api_call *call);
void api_sessions(api_call *call);
void api_end_session(api_call *call);
void api_audit(api_call *call);
void api_teams(api_call *call);
void api_create_team(api_call *call);
void api_team(api_call *call);
void api_rename_team(api_call *call);
void api_delete_team(api_call *call);
void api_members(api_call *call);
void api_change_member(api_call *call);
void api_remove_member(api_call *call);
void api_team_audit(api_call *call);
void api_invitations(api_call *call);
void api_create_invitation(api_call *call);
void api_revoke_invitation(api_call *call);
void api_look_at_invitation(api_call *call);
void api_accept_invitation(api_call *call);
void api_project(api_call *call);
void api_change_project(api_call *call);
void api_delete_project(api_call *call);
void api_chosen(api_call *call);
void api_choose(api_call *call);
void api_unchoose(api_call *call);
void api_retention(api_call *call);
void api_purge_project(api_call *call);

/** The table; its length; a route's place in it. */
extern const api_route api_routes[];
extern const size_t api_route_count;
void api_live_stream(http_request *request, http_stream *stream);

#endif /* MSC_SERVER_API_INTERNAL_H */
