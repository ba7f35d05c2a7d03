/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file store_people.h Teams, their members, invitations; what becomes of accounts; the audit log. A part of
 * the door store.h, which brings it.
 *
 * An account that is not in a team learns nothing of it: NOT_FOUND. One that is, with too small a role:
 * FORBIDDEN. A token that is bound to a project reaches no team.
 */
#ifndef MSC_SERVER_STORE_PEOPLE_H
#define MSC_SERVER_STORE_PEOPLE_H

#define STORE_DETAIL_BYTES 192u     /**< most of a line of the audit log's `detail` */
#define STORE_OPEN_INVITATIONS 200u /**< most of a team */

/* ---- teams ----------------------------------------------------------------------------------- */

typedef struct store_team {
    int64_t id;
    char name[STORE_NAME_BYTES + 1]; /**< need not be the only one of that name */
    int64_t created_ms;
    int64_t members;
    int64_t projects;
    store_role role; /**< of who asks */
} store_team;

/** Who makes it is its owner. */
store_result store_team_add(store *it, store_act act, const char *name, store_team *out);
typedef bool store_team_each(void *user, const store_team *team);
/** Those of an account, by name. */
store_result store_teams(store *it, store_who who, store_team_each *each, void *user);
store_result store_team_find(store *it, store_who who, int64_t team, store_team *out);
/** For owners. */
store_result store_team_rename(store *it, store_act act, int64_t team, const char *name, store_team *out);
/** For owners. CONFLICT: it has projects. */
store_result store_team_delete(store *it, store_act act, int64_t team);

typedef struct store_member {
    char name[STORE_ID_BYTES + 1];
    store_role role;
    int64_t joined_ms;
    bool disabled;
} store_member;
typedef bool store_member_each(void *user, const store_member *member);
/** By name. */
store_result store_members(store *it, store_who who, int64_t team, store_member_each *each, void *user);
/** For admins and owners, up to their own role, before and after. */
store_result store_member_set(store *it, store_act act, int64_t team, const char *name, store_role role);
/** The same, or the member leaves. Projects stay; being chosen for some, and invitations made, end. */
store_result store_member_remove(store *it, store_act act, int64_t team, const char *name);

/* ---- invitations ----------------------------------------------------------------------------- */

typedef struct store_invitation {
    char id[STORE_ID_BYTES + 1];
    uint8_t hash[STORE_HASH_BYTES]; /**< of its secret; not read for lists */
    int64_t team;
    char team_name[STORE_NAME_BYTES + 1];
    store_role role;
    char by[STORE_ID_BYTES + 1];
    int64_t created_ms;
    int64_t expires_ms;
} store_invitation;

/**
 * Of `invitation` id, hash, team, role and expires_ms count. For admins and owners, up to their own role.
 * Those that have expired are removed. TOO_MANY.
 */
store_result store_invitation_add(store *it, store_act act, const store_invitation *invitation);
typedef bool store_invitation_each(void *user, const store_invitation *invitation);
/** For admins and owners; the newest first. */
store_result store_invitations(store *it, store_who who, int64_t team, store_invitation_each *each,
                               void *user);
store_result store_invitation_revoke(store *it, store_act act, int64_t team, const char *id);
/** For who holds it; expired or not. */
store_result store_invitation_find(store *it, const char *id, store_invitation *out);
/**
 * Joins a team, and uses the invitation up. `account->id` 0: makes the account of its name, password and
 * created_ms; CONFLICT: the name is taken, or the account is in the team. NOT_FOUND: it is used, revoked or
 * expired.
 */
store_result store_invitation_accept(store *it, const char *id, const uint8_t *hash, store_account *account,
                                     int64_t now_ms);

/* ---- accounts, as an admin of the server has them -------------------------------------------- */

typedef struct store_account_change {
    int admin;    /**< 0, 1; -1: stays. Who is none any more: their reset links end. */
    int disabled; /**< 0, 1; -1: stays. Ends sessions, reset links and invitations; tokens are refused. */
} store_account_change;
store_result store_account_alter(store *it, store_act act, const char *name,
                                 const store_account_change *change, store_account *out);
/** A link with which its holder sets a new password; it replaces the one before. */
store_result store_reset_add(store *it, store_act act, const char *name, const uint8_t *hash,
                             int64_t expires_ms);
/** Whose it is. NOT_FOUND: used, replaced, expired, or the account is disabled. */
store_result store_reset_find(store *it, const uint8_t *hash, int64_t now_ms, store_account *out);
/** Sets the password as `store_password_set`, and uses the link up. NOT_FOUND as above. */
store_result store_reset_use(store *it, const uint8_t *hash, const char *password, int64_t now_ms,
                             store_account *out);

typedef bool store_session_each(void *user, const store_session *session);
/** Of an account, begun after `oldest_ms` and used after `idle_ms`; the one used last first. */
store_result store_sessions(store *it, int64_t account, int64_t oldest_ms, int64_t idle_ms,
                            store_session_each *each, void *user);
/** One of the account's own, by its hash. */
store_result store_session_revoke(store *it, store_act act, const uint8_t *hash);

/* ---- the audit log --------------------------------------------------------------------------- */

/**
 * Who did what to which thing, when: written with the change itself, never changed, without secrets. Sending
 * runs is not in it, nor what is refused.
 */
typedef struct store_entry {
    int64_t id; /**< grows */
    int64_t time_ms;
    char by[STORE_ID_BYTES + 1];     /**< an account; empty: the server, by a rule of the project */
    char action[STORE_ID_BYTES + 1]; /**< "member.role" */
    char thing[STORE_NAME_BYTES + 1];
    char detail[STORE_DETAIL_BYTES + 1];
} store_entry;
typedef bool store_entry_each(void *user, const store_entry *entry);
/** Of a team, for its admins and owners; the newest first, ids below `before`. */
store_result store_team_entries(store *it, store_who who, int64_t team, int64_t before, uint32_t limit,
                                store_entry_each *each, void *user);
/** Of accounts, sessions, tokens and teams being made: what belongs to no team. */
store_result store_server_entries(store *it, int64_t before, uint32_t limit, store_entry_each *each,
                                  void *user);

#endif /* MSC_SERVER_STORE_PEOPLE_H */
