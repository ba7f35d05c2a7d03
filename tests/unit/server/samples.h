/* SPDX-License-Identifier: Apache-2.0 */
/** @file samples.h  What the server's tests share: folders, a store with an account, requests without a socket. */
#ifndef MSC_TEST_SERVER_SAMPLES_H
#define MSC_TEST_SERVER_SAMPLES_H

#include "api/api.h"

#define SAMPLE_NOW_MS INT64_C(1700000000000)
#define SAMPLE_PATH 64

/** A new folder; `sample_remove` removes it with its files. */
void sample_folder(char path[SAMPLE_PATH]);
void sample_remove(const char *path);

store *sample_store(const char *folder);
/** An account without a usable password, with a team of its own. */
int64_t sample_account(store *it, const char *name);

/** Numbers that are the same in every run. */
uint64_t sample_random(uint64_t *state);

/** A server without sockets: requests go straight to the handler. */
typedef struct sample_server {
    char folder[SAMPLE_PATH];
    msc_allocator allocator;
    store *store;
    accounts *accounts;
    live *live;
    api *api;
    char token[ACCOUNTS_TOKEN_BYTES]; /**< of "ann", an admin, with all scopes */
    int64_t account;
} sample_server;

/** Time of all servers; tests set it. */
extern int64_t sample_now_ms;

/** False: an allocation failed; what was made is destroyed. */
bool sample_server_start(sample_server *it, const msc_allocator *allocator);
void sample_server_stop(sample_server *it);

/** One for each test of a file, as cmocka's fixtures. */
extern sample_server sample_one;
int sample_set_up(void **state);
int sample_tear_down(void **state);

/** A request and its reply. `headers`: "Name: value" texts, NULL-terminated; the token of `it` is sent unless it is NULL. */
typedef struct sample_exchange {
    http_request request;
    http_reply reply;
    http_field fields[16];
    char target[2048];
    char room[2048];
    char authorization[128];
    char text[4096]; /**< the body of the reply, cut, terminated */
} sample_exchange;

unsigned sample_ask(sample_server *it, const char *token, const char *method, const char *target,
                    const char *body, const char *const *headers, sample_exchange *out);
/** Ends what `sample_ask` began. */
void sample_end(sample_exchange *exchange);

/** The latest of `sample_one`: ended by the next, and by `sample_tear_down`. */
extern sample_exchange sample_last;

#endif /* MSC_TEST_SERVER_SAMPLES_H */
