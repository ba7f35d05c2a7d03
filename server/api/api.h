/* SPDX-License-Identifier: Apache-2.0 */
/** @file api.h  The routes of server/openapi.yaml, as a handler for `http`. The door of `server/api`. */
#ifndef MSC_SERVER_API_H
#define MSC_SERVER_API_H

#include "accounts/accounts.h"
#include "http/http.h"
#include "live/live.h"

typedef struct api api;

/** What the API stands on; all outlive it. */
typedef struct api_parts {
    store *store;
    accounts *accounts;
    live *live;
    const http_page *page;   /**< NULL: there is none */
    bool behind_https;       /**< cookies are for HTTPS alone */
    uint32_t telemetry_days; /**< how long telemetry is kept; 0: it is not taken */
    msc_allocator allocator;
    int64_t (*now_ms)(void);  /**< NULL: the system's clock */
    void (*wake)(void *user); /**< there is something for `api_keep`; NULL: it is called often enough */
    void *user;
} api_parts;

MSC_NODISCARD msc_status api_create(const api_parts *parts, api **out, msc_error *err);
/** NULL is accepted. */
void api_destroy(api *it);
http_handler api_handler(api *it);

/**
 * Archives and deletes what projects' rules and people have asked for, in small steps, and tells who watches.
 * `stops` is asked between two. False: it could not be done, or was stopped; try later.
 */
bool api_keep(api *it, bool (*stops)(void *user), void *user);

/**
 * Writes "METHOD /path" of every route, a line each, for the test that compares them with the description.
 */
void api_list_routes(void (*write)(void *user, const char *method, const char *path), void *user);

#endif /* MSC_SERVER_API_H */
