/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file accounts.h Who is it, and what may they do: passwords, sessions, API tokens, the one-time links of
 * setup, invitations and new passwords. The door of `server/accounts`.
 *
 * Secrets are 256 random bits and are kept as BLAKE2b hashes; passwords as argon2id (19 MiB, 2 passes). Any
 * thread may call. A password is checked by at most two threads at once, two more may wait: memory and
 * processors are bounded, however many log in.
 */
#ifndef MSC_SERVER_ACCOUNTS_H
#define MSC_SERVER_ACCOUNTS_H

#include "store/store.h"

#define ACCOUNTS_SECRET_BYTES 65u     /**< hexadecimal, with its terminator */
#define ACCOUNTS_TOKEN_BYTES 85u      /**< "ms_<16>_<64>" with its terminator */
#define ACCOUNTS_INVITATION_BYTES 82u /**< "<16>_<64>" with its terminator */
#define ACCOUNTS_RESET_MS (INT64_C(24) * 3600 * 1000)
#define ACCOUNTS_SETUP_MS (INT64_C(15) * 60 * 1000)
#define ACCOUNTS_SESSION_IDLE_MS (INT64_C(7) * 24 * 3600 * 1000)
#define ACCOUNTS_SESSION_MS (INT64_C(30) * 24 * 3600 * 1000)

/** Scopes: bits. SELF is no scope of a token's own: a session has it, and an admin token bound to nothing. */
enum { ACCOUNTS_INGEST = 1, ACCOUNTS_READ = 2, ACCOUNTS_ADMIN = 4, ACCOUNTS_SELF = 8 };

typedef struct accounts accounts;

typedef enum accounts_result {
    ACCOUNTS_OK,
    ACCOUNTS_WRONG, /**< name, password, token: which is not said */
    ACCOUNTS_TAKEN, /**< there is such an account; of setup: any */
    ACCOUNTS_LATER, /**< too many attempts, or too many at once */
    ACCOUNTS_FAILED /**< `store` says how */
} accounts_result;

typedef struct accounts_answer {
    accounts_result result;
    unsigned retry_after_s; /**< of LATER */
    bool throttled;         /**< of LATER: it is this caller who tried too often */
    store_result store;     /**< of FAILED */
} accounts_answer;

typedef struct accounts_caller {
    store_account account;
    uint32_t scopes; /**< ADMIN brings the others */
    bool by_session;
    int64_t team;    /**< that its token is bound to, or 0 */
    int64_t project; /**< that its token is bound to, or 0 */
} accounts_caller;

/** `kept` must outlive it. Errors: ENOMEM; EINTERNAL: there is no randomness. */
MSC_NODISCARD msc_status accounts_create(const msc_allocator *allocator, store *kept, accounts **out,
                                         msc_error *err);
void accounts_destroy(accounts *it);

/** If there is no account: a secret for the setup link, good for 15 minutes and one account. */
store_result accounts_setup_offer(accounts *it, int64_t now_ms, char *secret, bool *needed);
/** WRONG: not this secret, or too late. TAKEN: there is an account. */
accounts_answer accounts_setup(accounts *it, const char *secret, const char *name, const char *password,
                               int64_t now_ms, store_account *out);
/** `by`: the account that makes it. */
accounts_answer accounts_add(accounts *it, int64_t by, const char *name, const char *password, bool admin,
                             int64_t now_ms, store_account *out);

/** A login: takes as long for a name that is not there. */
accounts_answer accounts_check(accounts *it, const char *name, const char *password, const char *address,
                               int64_t now_ms, store_account *out);
/** All sessions of the account that acts end. */
accounts_answer accounts_set_password(accounts *it, store_act act, const char *password);

/** Begins a session; `secret` is for the cookie. */
accounts_answer accounts_session_begin(accounts *it, int64_t account, int64_t now_ms, char *secret);
accounts_answer accounts_session_end(accounts *it, const char *secret);
/** The hash that the store knows it by: STORE_HASH_BYTES. */
void accounts_session_hash(const char *secret, uint8_t *hash);

/** Who comes with a cookie, or a token. WRONG: unknown, revoked or expired. */
accounts_answer accounts_by_session(accounts *it, const char *secret, int64_t now_ms, accounts_caller *out);
accounts_answer accounts_by_token(accounts *it, const char *token, int64_t now_ms, accounts_caller *out);

/**
 * Makes a token: name, scopes, expires_ms, team, project and account.id of `token` count, the rest is filled.
 * `text` is the whole of it. WRONG: the team or project is not the account's.
 */
accounts_answer accounts_token_make(accounts *it, store_token *token, int64_t now_ms, char *text);

/* ---- one-time links -------------------------------------------------------------------------- */

/**
 * Makes an invitation: team, role and expires_ms of `invitation` count, the rest is filled. `text`:
 * ACCOUNTS_INVITATION_BYTES.
 */
store_result accounts_invite(accounts *it, store_act act, store_invitation *invitation, char *text);
/** The id in the text of an invitation: ACCOUNTS_INVITATION_ID with its terminator. False: it is no such text. */
#define ACCOUNTS_INVITATION_ID 17u
bool accounts_invitation_id(const char *text, char *id);
/** What it is an invitation to. WRONG: used, revoked, expired, or none. */
accounts_answer accounts_invitation(accounts *it, const char *text, int64_t now_ms, store_invitation *out);
/**
 * Uses it up. `account->id` 0: makes the account of `account->name`, and fills it. WRONG as above; TAKEN: the
 * name is, or the account is in the team already.
 */
accounts_answer accounts_join(accounts *it, const char *text, store_account *account, const char *password,
                              int64_t now_ms);
/** A link for whom an account belongs to; `secret`: ACCOUNTS_SECRET_BYTES. It works for a day, once. */
store_result accounts_reset_make(accounts *it, store_act act, const char *name, char *secret);
/** Sets the password; all sessions end. WRONG: used, replaced, expired, or none. */
accounts_answer accounts_reset(accounts *it, const char *secret, const char *password, int64_t now_ms,
                               store_account *out);

#endif /* MSC_SERVER_ACCOUNTS_H */
