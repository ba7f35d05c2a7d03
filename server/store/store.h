/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file store.h What the server keeps: accounts, sessions, tokens, projects, runs and what runs send. The
 * door of `server/store`.
 *
 * The interface is one of operations and knows no SQL, so another engine can stand behind it. What is written
 * is on disk when a call returns STORE_OK; otherwise nothing of it was kept. Any thread may call anything but
 * open and close; a call may wait for the disk, never for a client. Times are milliseconds since 1970 and are
 * given by the caller. Texts are UTF-8 that the caller has checked, at most STORE_..._BYTES long; structs
 * that are filled hold copies.
 *
 * Everything is reached through a team: what the asking account may not see is STORE_NOT_FOUND, what it may
 * see but not change is STORE_FORBIDDEN. store_people.h and store_keep.h, at the end, belong to this door.
 */
#ifndef MSC_SERVER_STORE_H
#define MSC_SERVER_STORE_H

#include <stdbool.h>

#include "memscale/base.h"
#include "store/block.h"

#define STORE_NAME_BYTES 128u
#define STORE_ID_BYTES 64u
#define STORE_UNIT_BYTES 16u
#define STORE_KIND_BYTES 32u
#define STORE_PASSWORD_BYTES 128u
#define STORE_HASH_BYTES 32u
#define STORE_SERIES 4096u      /**< most of a run */
#define STORE_DOCUMENTS 32u     /**< most of a run */
#define STORE_LOST_MS 60000     /**< silence after which a running run is lost */
#define STORE_NO_TIME INT64_MIN /**< of a time or step that there is not */

typedef struct store store;

typedef enum store_result {
    STORE_OK,
    STORE_NOT_FOUND,
    STORE_CONFLICT, /**< something of that name is there already */
    STORE_TOO_MANY, /**< a limit above */
    STORE_FULL,     /**< no room on the disk, or in what the server may take of it */
    STORE_LATE,     /**< a read took longer than its deadline */
    STORE_NO_MEMORY,
    STORE_FAILED,     /**< the disk or the file is at fault */
    STORE_STOPPED,    /**< by the caller's function */
    STORE_FORBIDDEN,  /**< the account's role in the team is too small */
    STORE_LAST_OWNER, /**< a team would be left without an owner who can log in */
    STORE_LAST_ADMIN  /**< the server would be left without an admin who can log in */
} store_result;

/** Who asks: an account and, of a token that is bound, the one team or project that it reaches. */
typedef struct store_who {
    int64_t account;
    int64_t team;    /**< 0: every team of the account */
    int64_t project; /**< 0: every project */
} store_who;

/** Who does something, and when: what changes a thing writes it into the audit log, or is not done. */
typedef struct store_act {
    store_who who;
    int64_t now_ms;
} store_act;

/** Of an account in a team; each brings what the smaller ones may. docs/guide/server.md has the table. */
typedef enum store_role {
    STORE_NO_ROLE,
    STORE_VIEWER, /**< reads */
    STORE_MEMBER, /**< makes projects, sends runs, changes and deletes them */
    STORE_ADMIN,  /**< sees private projects; invites, changes and removes members; reads the audit log */
    STORE_OWNER   /**< makes owners; renames and deletes the team */
} store_role;

/* ---- life ------------------------------------------------------------------------------------ */

typedef struct store_options {
    const char *folder;      /**< is made if it is not there */
    msc_allocator allocator; /**< all zero: the C library's; must bear several threads */
    uint32_t readers;        /**< how many may read at once, at least 1 */
    uint64_t most_bytes;     /**< most that the file may take; 0: no limit */
} store_options;

/**
 * Opens a folder for this process alone. Errors: ENOMEM; EIO with what to do about it; EVERSION: of a newer
 * server.
 */
MSC_NODISCARD msc_status store_open(const store_options *options, store **out, msc_error *err);
/** No call may be under way. NULL is accepted. */
void store_close(store *it);
/** Whether a read works, and the last write did or one would now. */
bool store_is_ready(store *it);

typedef struct store_figures {
    uint64_t commits;
    uint64_t commit_ns; /**< spent in them */
    uint64_t jobs;
    uint64_t points;
    uint64_t batches;
} store_figures;
store_figures store_count(store *it);

/* ---- accounts -------------------------------------------------------------------------------- */

typedef struct store_account {
    int64_t id;
    char name[STORE_ID_BYTES + 1];
    char password[STORE_PASSWORD_BYTES + 1]; /**< its hash, as text */
    bool admin;                              /**< of the server: makes and disables accounts, makes teams */
    int64_t created_ms;
    int64_t disabled_ms; /**< or STORE_NO_TIME */
} store_account;

/**
 * `account->id` is filled. `by` 0: the first account, an admin and owner of the first team; CONFLICT if there
 * is any.
 */
store_result store_account_add(store *it, store_account *account, int64_t by);
store_result store_account_find(store *it, const char *name, store_account *out);
store_result store_account_count(store *it, int64_t *count);
typedef bool store_account_each(void *user, const store_account *account);
/** By name. */
store_result store_accounts(store *it, store_account_each *each, void *user);
/** Ends all its sessions, and a reset link of it. */
store_result store_password_set(store *it, store_act act, const char *password);

typedef struct store_session {
    uint8_t hash[STORE_HASH_BYTES];
    int64_t created_ms;
    int64_t used_ms;
    store_account account;
} store_session;

/** Of `session` hash, times and account.id count. Sessions begun before `oldest_ms` are removed. */
store_result store_session_add(store *it, const store_session *session, int64_t oldest_ms);
store_result store_session_find(store *it, const uint8_t *hash, store_session *out);
store_result store_session_used(store *it, const uint8_t *hash, int64_t now_ms);
store_result store_session_end(store *it, const uint8_t *hash);

typedef struct store_token {
    char id[STORE_ID_BYTES + 1];
    uint8_t hash[STORE_HASH_BYTES];
    char name[STORE_NAME_BYTES + 1];
    uint32_t scopes; /**< bits; the store does not read them */
    int64_t created_ms;
    int64_t expires_ms; /**< or STORE_NO_TIME */
    int64_t used_ms;    /**< or STORE_NO_TIME */
    int64_t revoked_ms; /**< or STORE_NO_TIME */
    int64_t team;       /**< that it is bound to, or 0 */
    int64_t project;    /**< that it is bound to, or 0 */
    store_account account;
} store_token;

/** NOT_FOUND: the team or project is not one of its account's. */
store_result store_token_add(store *it, const store_token *token);
store_result store_token_find(store *it, const char *id, store_token *out);
store_result store_token_used(store *it, const char *id, int64_t now_ms);
/** It stays on the list of those revoked. NOT_FOUND: not the account's, or revoked before. */
store_result store_token_revoke(store *it, store_act act, const char *id);
typedef bool store_token_each(void *user, const store_token *token);
/** The newest first; those that count, or those that were revoked. */
store_result store_tokens(store *it, int64_t account, bool revoked, store_token_each *each, void *user);

/* ---- projects and runs ----------------------------------------------------------------------- */

typedef struct store_project {
    int64_t id;
    char name[STORE_NAME_BYTES + 1];
    int64_t created_ms;
    int64_t runs; /**< not archived */
    int64_t team;
    char owner[STORE_ID_BYTES + 1]; /**< the account that made it */
    bool owned;                     /**< by who asks */
    bool is_private;                /**< seen by its owner, chosen members, and admins of the team */
    store_role role;                /**< of who asks, in its team */
    int64_t archive_days;           /**< without a sign of life, after which runs are archived; 0: never */
    int64_t delete_days;            /**< after which runs are deleted; 0: never */
} store_project;

/**
 * Finds a project by its name, or makes it. Of several with a name it is the account's own, then the one that
 * all of the team see. `team` 0: the one that the token is bound to; else the first that the account joined,
 * of those that it may make projects in. `*made` false: it was there. NOT_FOUND: no such team of the account.
 */
store_result store_project_add(store *it, store_act act, int64_t team, const char *name, store_project *out,
                               bool *made);
typedef bool store_project_each(void *user, const store_project *project);
/** By name; `team` 0: of all teams. */
store_result store_projects(store *it, store_who who, int64_t team, store_project_each *each, void *user);
store_result store_project_find(store *it, store_who who, int64_t id, store_project *out);

/** The owner of a project, and admins of its team, change, delete and purge it. */
typedef struct store_project_change {
    const char *name;     /**< NULL: stays */
    int is_private;       /**< 0, 1; -1: stays */
    int64_t archive_days; /**< -1: stays */
    int64_t delete_days;  /**< -1: stays */
} store_project_change;
/** CONFLICT: of that name there is one that the team sees, or another of its owner's. */
store_result store_project_alter(store *it, store_act act, int64_t id, const store_project_change *change,
                                 store_project *out);
/** It is gone at once, its runs step by step: `store_keep_step`. */
store_result store_project_delete(store *it, store_act act, int64_t id);
/** Runs that are archived now, and not pinned, are deleted step by step. */
store_result store_project_purge(store *it, store_act act, int64_t id);

typedef bool store_name_each(void *user, const char *name);
/** Who was chosen to see it while it is private, by name. */
store_result store_project_chosen(store *it, store_who who, int64_t id, store_name_each *each, void *user);
/** NOT_FOUND, too: the team has no such member; or, `chosen` false, it was not chosen. */
store_result store_project_choose(store *it, store_act act, int64_t id, const char *account, bool chosen);

typedef enum store_state {
    STORE_RUNNING,
    STORE_FINISHED,
    STORE_ENDED_BADLY,
    STORE_LOST,
    STORE_ANY
} store_state;

typedef struct store_run {
    int64_t key; /**< the store's own, for calls that read more of it */
    char id[STORE_ID_BYTES + 1];
    int64_t project;
    char name[STORE_NAME_BYTES + 1];
    store_state state;
    bool archived;
    int64_t created_ms;
    int64_t seen_ms;
    int64_t ended_ms; /**< or STORE_NO_TIME */
    int64_t version;
    bool pinned; /**< retention and purge leave it alone */
} store_run;

/** What is done to a run; all calls that change or find one begin with it. */
typedef struct store_run_ref {
    int64_t account;
    const char *id;
    int64_t now_ms;  /**< for its state */
    int64_t team;    /**< as in `store_who` */
    int64_t project; /**< as in `store_who` */
} store_run_ref;

/** Called by the writer after the commit of a change, in the order of versions, before the call returns. */
typedef void store_changed(void *user, const store_run *run);

typedef struct store_new_run {
    const char *project;
    const char *name;
    int64_t created_ms;
    int64_t team; /**< of the project; 0: as `store_project_add` */
} store_new_run;

/**
 * Makes the project, too. `*made` false: it was there. CONFLICT: the id is another project's.
 */
store_result store_run_add(store *it, store_run_ref ref, const store_new_run *run, store_run *out,
                           bool *made);
store_result store_run_find(store *it, store_run_ref ref, store_run *out);
store_result store_run_alive(store *it, store_run_ref ref);

typedef struct store_run_change {
    const char *name;     /**< NULL: stays */
    int archived;         /**< 0, 1; -1: stays */
    int pin;              /**< 1: pins; -1: unpins; 0: stays */
    store_state state;    /**< RUNNING, again, FINISHED or ENDED_BADLY; ANY: stays */
    store_changed *after; /**< may be NULL */
    void *user;
} store_run_change;
store_result store_run_alter(store *it, store_run_ref ref, const store_run_change *change, store_run *out);
/** Its points are removed step by step afterwards. */
store_result store_run_delete(store *it, store_run_ref ref, store_changed *after, void *user);

typedef enum store_sort { STORE_BY_CREATED, STORE_BY_NAME, STORE_BY_SEEN } store_sort;

typedef struct store_runs_query {
    store_who who;
    int64_t project;
    int64_t now_ms;
    store_state state;  /**< or STORE_ANY */
    const char *search; /**< NULL: any name */
    bool archived;
    store_sort sort;
    bool descending;
    uint32_t limit;
    bool resumes;           /**< goes on after the two below */
    int64_t after_key;      /**< of the last run */
    int64_t after_ms;       /**< its created_ms or seen_ms */
    const char *after_name; /**< its name */
} store_runs_query;
typedef bool store_run_each(void *user, const store_run *run);
store_result store_runs(store *it, const store_runs_query *query, store_run_each *each, void *user);

/* ---- what runs send -------------------------------------------------------------------------- */

typedef struct store_new_points {
    const char *series;
    const char *unit;
    const block_point *points;
    uint32_t count;
} store_new_points;

typedef struct store_event {
    int64_t id; /**< grows; not read where one is added */
    const char *kind;
    int64_t step; /**< or STORE_NO_TIME */
    int64_t time_ms;
    const char *text;
    const char *data; /**< JSON, or NULL */
} store_event;

typedef struct store_document {
    const char *name;
    const char *text;
    size_t bytes;
} store_document;

typedef struct store_batch {
    const char *client;
    int64_t sequence;
    const store_new_points *series;
    uint32_t series_count;
    const store_event *events;
    uint32_t event_count;
    const store_document *documents;
    uint32_t document_count;
    store_changed *after; /**< not called for a duplicate; may be NULL */
    void *user;
} store_batch;

typedef struct store_ingested {
    bool duplicate;
    int64_t version;
} store_ingested;

/** All of a batch, or none. */
store_result store_ingest(store *it, store_run_ref ref, const store_batch *batch, store_ingested *out);

/* ---- reading: by the key of a run that was found --------------------------------------------- */

typedef struct store_series {
    int64_t key;
    char name[STORE_NAME_BYTES + 1];
    char unit[STORE_UNIT_BYTES + 1];
    int64_t blocks;
    block_summary summary; /**< of all its points */
} store_series;
typedef bool store_series_each(void *user, const store_series *series);
/** By name. */
store_result store_series_list(store *it, int64_t run, store_series_each *each, void *user);
store_result store_series_find(store *it, int64_t run, const char *name, store_series *out);

/** Buckets of `width` steps from `from` on; those that nothing fell into have count 0. */
typedef struct store_buckets {
    int64_t from;
    int64_t to;     /**< the last step that counts */
    uint64_t width; /**< at least 1; count * width reaches beyond `to` */
    uint32_t count;
    block_summary *at; /**< `count`, empty */
} store_buckets;
store_result store_read_buckets(store *it, int64_t series, const store_buckets *buckets);

/** Points of block number `block`, of BLOCK_POINTS at most; NOT_FOUND beyond the last. */
store_result store_read_block(store *it, int64_t series, int64_t block, block_point *points, uint32_t *count);

typedef bool store_event_each(void *user, const store_event *event);
/** Those with an id above `after`; `kind` NULL: any. */
store_result store_events(store *it, int64_t run, const char *kind, int64_t after, uint32_t limit,
                          store_event_each *each, void *user);

typedef bool store_document_each(void *user, const store_document *document, int64_t updated_ms);
/** `name` NULL: all, by name. Texts only with a name. */
store_result store_documents(store *it, int64_t run, const char *name, store_document_each *each, void *user);

/* ---- telemetry: counts of what strangers said ------------------------------------------------- */

#define STORE_TELEMETRY_BYTES 1024u /**< of a row's values */
#define STORE_TELEMETRY_ROWS 10000  /**< most that are kept */

/** Counts a row of values, JSON, on a day of the form "2026-12-31". TOO_MANY: of rows. */
store_result store_telemetry_add(store *it, const char *day, const char *values);
/** Removes what came before a day. */
store_result store_telemetry_forget(store *it, const char *day);
typedef bool store_telemetry_each(void *user, const char *day, const char *values, int64_t count);
/** From one day to another, both of them too. */
store_result store_telemetry(store *it, const char *from, const char *to, store_telemetry_each *each,
                             void *user);

#include "store/store_keep.h"
#include "store/store_people.h"

#endif /* MSC_SERVER_STORE_H */
