/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Accounts.
 *
 * A password that is checked costs 19 MiB and tens of milliseconds by design, so checks pass a gate: two at
 * work, two waiting, the next are asked to come later. Before the gate stands the throttle, by name and
 * address, and for addresses other than this machine's by address alone. Nobody is locked out: an attempt
 * waits a minute at most.
 *
 * A name that is not there is checked against a hash of its own, so that the time of an answer says nothing.
 */
#include "accounts/accounts.h"

#include <sodium.h>
#include <stdio.h>
#include <string.h>

#include "accounts/throttle.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/thread.h"

#define PASSES 2u
#define PASSWORD_MEMORY ((size_t)19 << 20)
#define AT_WORK 2u
#define WAITING 2u
#define FREE_BY_NAME 5u
#define FREE_BY_ADDRESS 50u
#define SECRET_BYTES 32u
#define TOKEN_ID_BYTES 8u
#define TOKEN_PREFIX "ms_"
#define EVERYTHING ((uint32_t)(ACCOUNTS_INGEST | ACCOUNTS_READ | ACCOUNTS_ADMIN | ACCOUNTS_SELF))
#define NOTE_SESSION_MS (INT64_C(5) * 60 * 1000)
#define NOTE_TOKEN_MS (INT64_C(60) * 1000)

_Static_assert(crypto_pwhash_STRBYTES <= STORE_PASSWORD_BYTES + 1,
               "the store has too little room for a hash");

struct accounts {
    msc_context *ctx;
    store *store;
    msc__mutex mutex; /* of all below */
    msc__cond gate;
    unsigned at_work;
    unsigned waiting;
    throttle throttle;
    uint8_t throttle_key[crypto_shorthash_KEYBYTES];
    char nobody[STORE_PASSWORD_BYTES + 1]; /* hash of a password that nobody has */
    uint8_t setup_hash[STORE_HASH_BYTES];
    int64_t setup_until_ms; /* 0: there is no offer */
};

static accounts_answer say(accounts_result result)
{
    return (accounts_answer){.result = result};
}

static accounts_answer say_store(store_result result)
{
    return (accounts_answer){.result = result == STORE_OK          ? ACCOUNTS_OK
                                       : result == STORE_NOT_FOUND ? ACCOUNTS_WRONG
                                       : result == STORE_CONFLICT  ? ACCOUNTS_TAKEN
                                                                   : ACCOUNTS_FAILED,
                             .store = result};
}

static void make_secret(char *hex)
{
    uint8_t bytes[SECRET_BYTES];

    randombytes_buf(bytes, sizeof bytes);
    (void)sodium_bin2hex(hex, ACCOUNTS_SECRET_BYTES, bytes, sizeof bytes);
    sodium_memzero(bytes, sizeof bytes);
}

static void hash_secret(const char *secret, uint8_t *hash)
{
    (void)crypto_generichash(hash, STORE_HASH_BYTES, (const uint8_t *)secret, strlen(secret), NULL, 0);
}

/* ---- life ------------------------------------------------------------------------------------ */

static msc_status make_nobody(accounts *it, msc_error *err)
{
    char secret[ACCOUNTS_SECRET_BYTES];

    make_secret(secret);
    if (crypto_pwhash_str_alg(it->nobody, secret, strlen(secret), PASSES, PASSWORD_MEMORY,
                              crypto_pwhash_ALG_ARGON2ID13) != 0)
        return msc__fail_memory(err, "a password", PASSWORD_MEMORY);
    return MSC_OK;
}

msc_status accounts_create(const msc_allocator *allocator, store *kept, accounts **out, msc_error *err)
{
    msc_context_options options = msc_context_options_default();
    msc_context *ctx = NULL;
    msc_status status;
    accounts *it;

    *out = NULL;
    if (sodium_init() < 0)
        return msc__fail(err, MSC_EINTERNAL, "the system gives no random numbers");
    options.allocator = *allocator;
    status = msc_context_create(&options, &ctx, err);
    if (status != MSC_OK)
        return status;
    it = msc__alloc(ctx, sizeof *it);
    if (it == NULL) {
        msc_context_destroy(ctx);
        return msc__fail_memory(err, "accounts", sizeof *it);
    }
    it->ctx = ctx;
    it->store = kept;
    randombytes_buf(it->throttle_key, sizeof it->throttle_key);
    status = msc__mutex_init(&it->mutex, err);
    if (status == MSC_OK)
        status = msc__cond_init(&it->gate, err);
    if (status == MSC_OK)
        status = make_nobody(it, err);
    if (status == MSC_OK)
        *out = it;
    else
        accounts_destroy(it);
    return status;
}

void accounts_destroy(accounts *it)
{
    msc_context *ctx;

    if (it == NULL)
        return;
    ctx = it->ctx;
    msc__cond_fini(&it->gate);
    msc__mutex_fini(&it->mutex);
    sodium_memzero(it, sizeof *it);
    msc__free(ctx, it, sizeof *it);
    MSC__ASSERT(msc_context_held_bytes(ctx) == 0);
    msc_context_destroy(ctx);
}

/* ---- passwords ------------------------------------------------------------------------------- */

static bool enter_gate(accounts *it)
{
    bool enters;

    msc__mutex_lock(&it->mutex);
    enters = it->at_work < AT_WORK || it->waiting < WAITING;
    if (enters) {
        it->waiting++;
        while (it->at_work == AT_WORK)
            msc__cond_wait(&it->gate, &it->mutex);
        it->waiting--;
        it->at_work++;
    }
    msc__mutex_unlock(&it->mutex);
    return enters;
}

static void leave_gate(accounts *it)
{
    msc__mutex_lock(&it->mutex);
    MSC__ASSERT(it->at_work > 0);
    it->at_work--;
    msc__cond_signal(&it->gate);
    msc__mutex_unlock(&it->mutex);
}

static const accounts_answer busy = {.result = ACCOUNTS_LATER, .retry_after_s = 1};

static accounts_answer hash_password(accounts *it, const char *password, char *hash)
{
    int failed;

    if (!enter_gate(it))
        return busy;
    failed = crypto_pwhash_str_alg(hash, password, strlen(password), PASSES, PASSWORD_MEMORY,
                                   crypto_pwhash_ALG_ARGON2ID13);
    leave_gate(it);
    return failed ? (accounts_answer){.result = ACCOUNTS_FAILED, .store = STORE_NO_MEMORY} : say(ACCOUNTS_OK);
}

static uint64_t throttle_key(const accounts *it, const char *name, const char *address)
{
    uint8_t hash[crypto_shorthash_BYTES];
    char text[256];
    uint64_t key;

    (void)snprintf(text, sizeof text, "%s\n%s", address, name);
    (void)crypto_shorthash(hash, (const uint8_t *)text, strlen(text), it->throttle_key);
    memcpy(&key, hash, sizeof key);
    return key | 1;
}

static bool is_this_machine(const char *address)
{
    return strncmp(address, "127.", 4) == 0 || strcmp(address, "::1") == 0;
}

/* Whether an attempt may begin, in milliseconds to wait. */
static int64_t begin_attempt(accounts *it, const char *name, const char *address, int64_t now_ms)
{
    int64_t wait_ms = 0;

    msc__mutex_lock(&it->mutex);
    if (!is_this_machine(address)) /* it is a proxy, behind which are all */
        wait_ms = throttle_begin(&it->throttle, throttle_key(it, "", address), FREE_BY_ADDRESS, now_ms);
    if (wait_ms == 0)
        wait_ms = throttle_begin(&it->throttle, throttle_key(it, name, address), FREE_BY_NAME, now_ms);
    msc__mutex_unlock(&it->mutex);
    return wait_ms;
}

static void end_attempt(accounts *it, const char *name, const char *address)
{
    msc__mutex_lock(&it->mutex);
    throttle_succeeded(&it->throttle, throttle_key(it, name, address), 1);
    throttle_succeeded(&it->throttle, throttle_key(it, "", address), 0);
    msc__mutex_unlock(&it->mutex);
}

accounts_answer accounts_check(accounts *it, const char *name, const char *password, const char *address,
                               int64_t now_ms, store_account *out)
{
    int64_t wait_ms = begin_attempt(it, name, address, now_ms);
    store_result found;
    bool right;

    if (wait_ms > 0)
        return (accounts_answer){
            .result = ACCOUNTS_LATER, .throttled = true, .retry_after_s = (unsigned)((wait_ms + 999) / 1000)};
    found = store_account_find(it->store, name, out);
    if (found != STORE_OK && found != STORE_NOT_FOUND)
        return say_store(found);
    if (!enter_gate(it))
        return busy;
    right = crypto_pwhash_str_verify(found == STORE_OK ? out->password : it->nobody, password,
                                     strlen(password)) == 0;
    leave_gate(it);
    if (found != STORE_OK || !right || out->disabled_ms != STORE_NO_TIME)
        return say(ACCOUNTS_WRONG);
    end_attempt(it, name, address);
    return say(ACCOUNTS_OK);
}

accounts_answer accounts_set_password(accounts *it, store_act act, const char *password)
{
    char hash[STORE_PASSWORD_BYTES + 1];
    accounts_answer answer = hash_password(it, password, hash);

    return answer.result == ACCOUNTS_OK ? say_store(store_password_set(it->store, act, hash)) : answer;
}

/* ---- accounts -------------------------------------------------------------------------------- */

static accounts_answer add(accounts *it, store_account *account, const char *password, int64_t by)
{
    accounts_answer answer = hash_password(it, password, account->password);

    return answer.result == ACCOUNTS_OK ? say_store(store_account_add(it->store, account, by)) : answer;
}

accounts_answer accounts_add(accounts *it, int64_t by, const char *name, const char *password, bool admin,
                             int64_t now_ms, store_account *out)
{
    MSC__ASSERT(by != 0);
    memset(out, 0, sizeof *out);
    (void)snprintf(out->name, sizeof out->name, "%s", name);
    out->admin = admin;
    out->created_ms = now_ms;
    return add(it, out, password, by);
}

store_result accounts_setup_offer(accounts *it, int64_t now_ms, char *secret, bool *needed)
{
    int64_t count = 0;
    store_result result = store_account_count(it->store, &count);

    *needed = result == STORE_OK && count == 0;
    if (*needed) {
        make_secret(secret);
        msc__mutex_lock(&it->mutex);
        hash_secret(secret, it->setup_hash);
        it->setup_until_ms = now_ms + ACCOUNTS_SETUP_MS;
        msc__mutex_unlock(&it->mutex);
    }
    return result;
}

accounts_answer accounts_setup(accounts *it, const char *secret, const char *name, const char *password,
                               int64_t now_ms, store_account *out)
{
    uint8_t hash[STORE_HASH_BYTES];
    accounts_answer answer;
    bool right;

    hash_secret(secret, hash);
    msc__mutex_lock(&it->mutex);
    right = now_ms < it->setup_until_ms && sodium_memcmp(hash, it->setup_hash, sizeof hash) == 0;
    msc__mutex_unlock(&it->mutex);
    if (!right)
        return say(ACCOUNTS_WRONG);
    memset(out, 0, sizeof *out);
    (void)snprintf(out->name, sizeof out->name, "%s", name);
    out->admin = true;
    out->created_ms = now_ms;
    answer = add(it, out, password, 0);
    if (answer.result == ACCOUNTS_OK || answer.result == ACCOUNTS_TAKEN) {
        msc__mutex_lock(&it->mutex);
        it->setup_until_ms = 0;
        msc__mutex_unlock(&it->mutex);
    }
    return answer;
}

/* ---- sessions -------------------------------------------------------------------------------- */

accounts_answer accounts_session_begin(accounts *it, int64_t account, int64_t now_ms, char *secret)
{
    store_session session = {.created_ms = now_ms, .used_ms = now_ms};

    make_secret(secret);
    hash_secret(secret, session.hash);
    session.account.id = account;
    return say_store(store_session_add(it->store, &session, now_ms - ACCOUNTS_SESSION_MS));
}

accounts_answer accounts_session_end(accounts *it, const char *secret)
{
    uint8_t hash[STORE_HASH_BYTES];

    hash_secret(secret, hash);
    return say_store(store_session_end(it->store, hash));
}

void accounts_session_hash(const char *secret, uint8_t *hash)
{
    hash_secret(secret, hash);
}

accounts_answer accounts_by_session(accounts *it, const char *secret, int64_t now_ms, accounts_caller *out)
{
    store_session session;
    store_result result;
    uint8_t hash[STORE_HASH_BYTES];

    hash_secret(secret, hash);
    result = store_session_find(it->store, hash, &session);
    if (result != STORE_OK)
        return say_store(result);
    if (session.created_ms + ACCOUNTS_SESSION_MS <= now_ms ||
        session.used_ms + ACCOUNTS_SESSION_IDLE_MS <= now_ms || session.account.disabled_ms != STORE_NO_TIME)
        return say(ACCOUNTS_WRONG);
    if (session.used_ms + NOTE_SESSION_MS <= now_ms) /* that it is noted late does no harm */
        (void)store_session_used(it->store, hash, now_ms);
    *out = (accounts_caller){.account = session.account, .scopes = EVERYTHING, .by_session = true};
    return say(ACCOUNTS_OK);
}

/* ---- tokens ---------------------------------------------------------------------------------- */

accounts_answer accounts_token_make(accounts *it, store_token *token, int64_t now_ms, char *text)
{
    char secret[ACCOUNTS_SECRET_BYTES];
    uint8_t id[TOKEN_ID_BYTES];

    randombytes_buf(id, sizeof id);
    (void)sodium_bin2hex(token->id, sizeof token->id, id, sizeof id);
    make_secret(secret);
    hash_secret(secret, token->hash);
    token->created_ms = now_ms;
    token->used_ms = STORE_NO_TIME;
    (void)snprintf(text, ACCOUNTS_TOKEN_BYTES, TOKEN_PREFIX "%.16s_%.64s", token->id, secret);
    sodium_memzero(secret, sizeof secret);
    return say_store(store_token_add(it->store, token));
}

/* "ms_<id>_<secret>" into its parts; false: it is none. */
static bool split_token(const char *text, char *id, const char **secret)
{
    size_t prefix = sizeof TOKEN_PREFIX - 1;

    if (strlen(text) != ACCOUNTS_TOKEN_BYTES - 1 || strncmp(text, TOKEN_PREFIX, prefix) != 0 ||
        text[prefix + 2u * TOKEN_ID_BYTES] != '_')
        return false;
    memcpy(id, text + prefix, (size_t)2 * TOKEN_ID_BYTES);
    id[2u * TOKEN_ID_BYTES] = '\0';
    *secret = text + prefix + 2u * TOKEN_ID_BYTES + 1;
    return true;
}

accounts_answer accounts_by_token(accounts *it, const char *text, int64_t now_ms, accounts_caller *out)
{
    char id[2u * TOKEN_ID_BYTES + 1];
    uint8_t hash[STORE_HASH_BYTES];
    const char *secret;
    store_token token;
    store_result result;

    if (!split_token(text, id, &secret))
        return say(ACCOUNTS_WRONG);
    result = store_token_find(it->store, id, &token);
    if (result != STORE_OK)
        return say_store(result);
    hash_secret(secret, hash);
    if (sodium_memcmp(hash, token.hash, sizeof hash) != 0)
        return say(ACCOUNTS_WRONG);
    if (token.expires_ms != STORE_NO_TIME && token.expires_ms <= now_ms)
        return say(ACCOUNTS_WRONG);
    if (token.revoked_ms != STORE_NO_TIME || token.account.disabled_ms != STORE_NO_TIME)
        return say(ACCOUNTS_WRONG);
    if (token.used_ms == STORE_NO_TIME || token.used_ms + NOTE_TOKEN_MS <= now_ms)
        (void)store_token_used(it->store, id, now_ms);
    *out = (accounts_caller){.account = token.account,
                             .scopes = token.scopes & ACCOUNTS_ADMIN ? EVERYTHING : token.scopes,
                             .team = token.team,
                             .project = token.project};
    if (token.team != 0 || token.project != 0)
        out->scopes &= ~(uint32_t)ACCOUNTS_SELF;
    return say(ACCOUNTS_OK);
}

/* ---- one-time links -------------------------------------------------------------------------- */

store_result accounts_invite(accounts *it, store_act act, store_invitation *invitation, char *text)
{
    char secret[ACCOUNTS_SECRET_BYTES];
    uint8_t id[TOKEN_ID_BYTES];

    randombytes_buf(id, sizeof id);
    (void)sodium_bin2hex(invitation->id, sizeof invitation->id, id, sizeof id);
    make_secret(secret);
    hash_secret(secret, invitation->hash);
    invitation->created_ms = act.now_ms;
    (void)snprintf(text, ACCOUNTS_INVITATION_BYTES, "%.16s_%.64s", invitation->id, secret);
    sodium_memzero(secret, sizeof secret);
    return store_invitation_add(it->store, act, invitation);
}

_Static_assert(ACCOUNTS_INVITATION_ID == 2 * TOKEN_ID_BYTES + 1, "an id is written in hexadecimal");

/* "<id>_<secret>", both hexadecimal. */
bool accounts_invitation_id(const char *text, char *id)
{
    static const char hex[] = "0123456789abcdef";
    size_t id_bytes = ACCOUNTS_INVITATION_ID - 1;

    if (strspn(text, hex) != id_bytes || text[id_bytes] != '_' ||
        strspn(text + id_bytes + 1, hex) != ACCOUNTS_SECRET_BYTES - 1 ||
        text[ACCOUNTS_INVITATION_BYTES - 1] != '\0')
        return false;
    memcpy(id, text, id_bytes);
    id[id_bytes] = '\0';
    return true;
}

/* Its id, and the hash of its secret; false: it is none. */
static bool split_invitation(const char *text, char *id, uint8_t *hash)
{
    if (!accounts_invitation_id(text, id))
        return false;
    hash_secret(text + ACCOUNTS_INVITATION_ID, hash);
    return true;
}

accounts_answer accounts_invitation(accounts *it, const char *text, int64_t now_ms, store_invitation *out)
{
    char id[ACCOUNTS_INVITATION_ID];
    uint8_t hash[STORE_HASH_BYTES];
    store_result result;

    if (!split_invitation(text, id, hash))
        return say(ACCOUNTS_WRONG);
    result = store_invitation_find(it->store, id, out);
    if (result == STORE_OK && (sodium_memcmp(hash, out->hash, sizeof hash) != 0 || out->expires_ms <= now_ms))
        result = STORE_NOT_FOUND;
    return say_store(result);
}

accounts_answer accounts_join(accounts *it, const char *text, store_account *account, const char *password,
                              int64_t now_ms)
{
    char id[ACCOUNTS_INVITATION_ID];
    uint8_t hash[STORE_HASH_BYTES];
    store_invitation invitation;
    accounts_answer answer = accounts_invitation(it, text, now_ms, &invitation);

    if (answer.result != ACCOUNTS_OK || !split_invitation(text, id, hash))
        return answer;
    if (account->id == 0) {
        account->created_ms = now_ms;
        answer = hash_password(it, password, account->password);
    }
    return answer.result == ACCOUNTS_OK
               ? say_store(store_invitation_accept(it->store, id, hash, account, now_ms))
               : answer;
}

store_result accounts_reset_make(accounts *it, store_act act, const char *name, char *secret)
{
    uint8_t hash[STORE_HASH_BYTES];

    make_secret(secret);
    hash_secret(secret, hash);
    return store_reset_add(it->store, act, name, hash, act.now_ms + ACCOUNTS_RESET_MS);
}

accounts_answer accounts_reset(accounts *it, const char *secret, const char *password, int64_t now_ms,
                               store_account *out)
{
    char password_hash[STORE_PASSWORD_BYTES + 1];
    uint8_t hash[STORE_HASH_BYTES];
    accounts_answer answer;

    hash_secret(secret, hash);
    answer = say_store(store_reset_find(it->store, hash, now_ms, out)); /* before what costs memory */
    if (answer.result == ACCOUNTS_OK)
        answer = hash_password(it, password, password_hash);
    return answer.result == ACCOUNTS_OK
               ? say_store(store_reset_use(it->store, hash, password_hash, now_ms, out))
               : answer;
}
