/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Accounts: what is right is let in until it ends, what is wrong is not, and secrets are not what is kept.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "samples.h"

static sample_server server;

static int set_up(void **state)
{
    const msc_allocator allocator = {0};

    (void)state;
    return sample_server_start(&server, &allocator) ? 0 : 1;
}

static int tear_down(void **state)
{
    (void)state;
    sample_server_stop(&server);
    return 0;
}

static void test_passwords(void **state)
{
    store_account account;
    store_account kept;

    (void)state;
    assert_int_equal(
        accounts_add(server.accounts, server.account, "bob", "a long password", false, 5, &account).result,
        ACCOUNTS_OK);
    assert_int_equal(
        accounts_add(server.accounts, server.account, "bob", "a long password", false, 5, &account).result,
        ACCOUNTS_TAKEN);
    assert_int_equal(store_account_find(server.store, "bob", &kept), STORE_OK);
    assert_true(strncmp(kept.password, "$argon2id$v=19$m=19456,t=2,p=1$", 31) == 0);
    assert_int_equal(
        accounts_check(server.accounts, "bob", "a long password", "10.0.0.1", 5, &account).result,
        ACCOUNTS_OK);
    assert_int_equal(
        accounts_check(server.accounts, "bob", "a long passwore", "10.0.0.1", 5, &account).result,
        ACCOUNTS_WRONG);
    assert_int_equal(
        accounts_check(server.accounts, "nobody", "a long password", "10.0.0.1", 5, &account).result,
        ACCOUNTS_WRONG);
}

static void test_attempts_are_throttled(void **state)
{
    accounts_answer answer = {0};
    store_account account;

    (void)state;
    for (int i = 0; i < 5; i++)
        assert_int_equal(accounts_check(server.accounts, "ann", "wrong", "10.0.0.1", 5, &account).result,
                         ACCOUNTS_WRONG);
    answer = accounts_check(server.accounts, "ann", "wrong", "10.0.0.1", 5, &account);
    assert_true(answer.result == ACCOUNTS_LATER && answer.throttled && answer.retry_after_s == 1);
    assert_int_equal(accounts_check(server.accounts, "ann", "wrong", "10.0.0.2", 5, &account).result,
                     ACCOUNTS_WRONG);
    assert_int_equal(accounts_check(server.accounts, "ann", "wrong", "10.0.0.1", 1006, &account).result,
                     ACCOUNTS_WRONG);
}

static void test_sessions_end(void **state)
{
    char secret[ACCOUNTS_SECRET_BYTES];
    accounts_caller caller;
    int64_t now = 1000000;

    (void)state;
    assert_int_equal(accounts_session_begin(server.accounts, server.account, now, secret).result,
                     ACCOUNTS_OK);
    assert_int_equal(accounts_by_session(server.accounts, secret, now, &caller).result, ACCOUNTS_OK);
    assert_true(caller.by_session && caller.account.id == server.account);
    secret[3] = secret[3] == 'a' ? 'b' : 'a';
    assert_int_equal(accounts_by_session(server.accounts, secret, now, &caller).result, ACCOUNTS_WRONG);
    assert_int_equal(accounts_session_begin(server.accounts, server.account, now, secret).result,
                     ACCOUNTS_OK);
    assert_int_equal(
        accounts_by_session(server.accounts, secret, now + ACCOUNTS_SESSION_IDLE_MS, &caller).result,
        ACCOUNTS_WRONG);
    for (int64_t at = now; at < now + ACCOUNTS_SESSION_MS; at += ACCOUNTS_SESSION_IDLE_MS / 2)
        assert_int_equal(accounts_by_session(server.accounts, secret, at, &caller).result, ACCOUNTS_OK);
    assert_int_equal(accounts_by_session(server.accounts, secret, now + ACCOUNTS_SESSION_MS, &caller).result,
                     ACCOUNTS_WRONG);
    assert_int_equal(accounts_session_begin(server.accounts, server.account, now, secret).result,
                     ACCOUNTS_OK);
    assert_int_equal(accounts_session_end(server.accounts, secret).result, ACCOUNTS_OK);
    assert_int_equal(accounts_by_session(server.accounts, secret, now, &caller).result, ACCOUNTS_WRONG);
}

static void test_a_new_password_ends_sessions(void **state)
{
    char secret[ACCOUNTS_SECRET_BYTES];
    accounts_caller caller;

    (void)state;
    assert_int_equal(accounts_session_begin(server.accounts, server.account, 5, secret).result, ACCOUNTS_OK);
    assert_int_equal(
        accounts_set_password(server.accounts, (store_act){{server.account, 0, 0}, 5}, "another password")
            .result,
        ACCOUNTS_OK);
    assert_int_equal(accounts_by_session(server.accounts, secret, 5, &caller).result, ACCOUNTS_WRONG);
}

static void test_tokens(void **state)
{
    store_token token = {.scopes = ACCOUNTS_INGEST, .expires_ms = 1000};
    char text[ACCOUNTS_TOKEN_BYTES];
    char changed[ACCOUNTS_TOKEN_BYTES];
    accounts_caller caller;

    (void)state;
    token.account.id = server.account;
    assert_int_equal(accounts_token_make(server.accounts, &token, 5, text).result, ACCOUNTS_OK);
    assert_int_equal(strlen(text), ACCOUNTS_TOKEN_BYTES - 1);
    assert_int_equal(accounts_by_token(server.accounts, text, 999, &caller).result, ACCOUNTS_OK);
    assert_true(!caller.by_session && caller.scopes == ACCOUNTS_INGEST);
    assert_int_equal(accounts_by_token(server.accounts, text, 1000, &caller).result, ACCOUNTS_WRONG);
    for (size_t i = 0; i < ACCOUNTS_TOKEN_BYTES - 1;
         i += 7) { /* any other character makes it another token */
        memcpy(changed, text, sizeof changed);
        changed[i] = changed[i] == '0' ? '1' : '0';
        assert_int_equal(accounts_by_token(server.accounts, changed, 5, &caller).result, ACCOUNTS_WRONG);
    }
    assert_int_equal(accounts_by_token(server.accounts, "", 5, &caller).result, ACCOUNTS_WRONG);
    assert_int_equal(store_token_revoke(server.store, (store_act){{server.account + 1, 0, 0}, 5}, token.id),
                     STORE_NOT_FOUND);
    assert_int_equal(store_token_revoke(server.store, (store_act){{server.account, 0, 0}, 5}, token.id),
                     STORE_OK);
    assert_int_equal(accounts_by_token(server.accounts, text, 5, &caller).result, ACCOUNTS_WRONG);
}

static void test_setup_link(void **state)
{
    const msc_allocator allocator = {0};
    char folder[SAMPLE_PATH];
    char secret[ACCOUNTS_SECRET_BYTES];
    store_account account;
    accounts *it = NULL;
    store *kept;
    bool needed;

    (void)state;
    assert_int_equal(accounts_setup_offer(server.accounts, 5, secret, &needed), STORE_OK);
    assert_false(needed); /* "ann" is there */
    sample_folder(folder);
    kept = sample_store(folder);
    assert_int_equal(accounts_create(&allocator, kept, &it, NULL), MSC_OK);
    assert_int_equal(accounts_setup(it, "", "ann", "a long password", 5, &account).result, ACCOUNTS_WRONG);
    assert_int_equal(accounts_setup_offer(it, 5, secret, &needed), STORE_OK);
    assert_true(needed);
    assert_int_equal(accounts_setup(it, "x", "ann", "a long password", 5, &account).result, ACCOUNTS_WRONG);
    assert_int_equal(
        accounts_setup(it, secret, "ann", "a long password", 5 + ACCOUNTS_SETUP_MS, &account).result,
        ACCOUNTS_WRONG);
    assert_int_equal(accounts_setup(it, secret, "ann", "a long password", 6, &account).result, ACCOUNTS_OK);
    assert_true(account.admin);
    assert_int_equal(accounts_setup(it, secret, "eve", "a long password", 7, &account).result,
                     ACCOUNTS_WRONG);
    accounts_destroy(it);
    store_close(kept);
    sample_remove(folder);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        CASE(test_passwords),    CASE(test_attempts_are_throttled),
        CASE(test_sessions_end), CASE(test_a_new_password_ends_sessions),
        CASE(test_tokens),       CASE(test_setup_link),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
