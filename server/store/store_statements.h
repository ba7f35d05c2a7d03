/* SPDX-License-Identifier: Apache-2.0 */
/* The statements, as a list for store_sql.h: no guard, since it is included twice. Parameters in the order
   of their `?`. */
STORE_SQL(BEGIN, "BEGIN IMMEDIATE")
STORE_SQL(COMMIT, "COMMIT")
STORE_SQL(ROLLBACK, "ROLLBACK")
STORE_SQL(SAVE, "SAVEPOINT job")
STORE_SQL(SAVE_BACK, "ROLLBACK TO job")
STORE_SQL(SAVE_END, "RELEASE job")
STORE_SQL(META_SET,
          "INSERT INTO meta(name, value) VALUES(?, ?) ON CONFLICT(name) DO UPDATE SET value = excluded.value")
STORE_SQL(META_GET, "SELECT value FROM meta WHERE name = ?")

STORE_SQL(ACCOUNT_ADD, "INSERT INTO account(name, password, admin, created_ms) VALUES(?, ?, ?, ?)")
STORE_SQL(ACCOUNT_FIND,
          "SELECT id, name, password, admin, created_ms, disabled_ms FROM account WHERE name = ?")
STORE_SQL(ACCOUNT_COUNT, "SELECT count(*) FROM account")
STORE_SQL(ACCOUNTS, "SELECT id, name, password, admin, created_ms, disabled_ms FROM account ORDER BY name")
STORE_SQL(PASSWORD_SET, "UPDATE account SET password = ? WHERE id = ?")
STORE_SQL(SESSION_ADD, "INSERT INTO session(hash, account, created_ms, used_ms) VALUES(?, ?, ?, ?)")
#define STORE_ACCOUNT_COLUMNS "a.id, a.name, a.password, a.admin, a.created_ms, a.disabled_ms"
STORE_SQL(SESSION_FIND, "SELECT " STORE_ACCOUNT_COLUMNS ", s.hash, s.created_ms, s.used_ms"
                        " FROM session s JOIN account a ON a.id = s.account WHERE s.hash = ?")
STORE_SQL(SESSIONS, "SELECT " STORE_ACCOUNT_COLUMNS ", s.hash, s.created_ms, s.used_ms"
                    " FROM session s JOIN account a ON a.id = s.account"
                    " WHERE s.account = ? AND s.created_ms > ? AND s.used_ms > ? ORDER BY s.used_ms DESC")
STORE_SQL(SESSION_REVOKE, "DELETE FROM session WHERE hash = ? AND account = ?")
STORE_SQL(SESSION_USED, "UPDATE session SET used_ms = ? WHERE hash = ?")
STORE_SQL(SESSION_END, "DELETE FROM session WHERE hash = ?")
STORE_SQL(SESSIONS_END, "DELETE FROM session WHERE account = ?")
STORE_SQL(SESSIONS_OLD, "DELETE FROM session WHERE created_ms < ?")
STORE_SQL(TOKEN_ADD,
          "INSERT INTO token(id, account, hash, name, scopes, created_ms, expires_ms, team, project)"
          " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)")
#define STORE_TOKEN_COLUMNS                                                                                  \
    STORE_ACCOUNT_COLUMNS                                                                                    \
    ", t.id, t.hash, t.name, t.scopes, t.created_ms, t.expires_ms, t.used_ms, t.revoked_ms, t.team, "        \
    "t.project"
STORE_SQL(TOKEN_FIND,
          "SELECT " STORE_TOKEN_COLUMNS " FROM token t JOIN account a ON a.id = t.account WHERE t.id = ?")
STORE_SQL(TOKENS, "SELECT " STORE_TOKEN_COLUMNS " FROM token t JOIN account a ON a.id = t.account"
                  " WHERE t.account = ? AND (t.revoked_ms IS NOT NULL) = ? ORDER BY t.created_ms DESC, t.id")
STORE_SQL(TOKEN_USED, "UPDATE token SET used_ms = ? WHERE id = ?")
STORE_SQL(TOKEN_REVOKE, "UPDATE token SET revoked_ms = ? WHERE id = ? AND account = ? AND revoked_ms IS NULL")

STORE_SQL(RUN_ADD, "INSERT INTO run(uid, project, name, state, archived, created_ms, seen_ms, version)"
                   " VALUES(?, ?, ?, 0, 0, ?, ?, 0) ON CONFLICT(uid) DO NOTHING")
#define STORE_RUN_COLUMNS                                                                                    \
    "r.id, r.uid, r.project, r.name, r.state, r.archived, r.created_ms, r.seen_ms, r.ended_ms, r.version, "  \
    "r.pinned"
STORE_SQL(RUN_FIND, "SELECT " STORE_RUN_COLUMNS
                    ", a.role, a.team FROM run r JOIN reach a ON a.project = r.project WHERE r.uid = ?1"
                    " AND a.account = ?2 AND (?3 = 0 OR a.team = ?3) AND (?4 = 0 OR a.project = ?4)")
STORE_SQL(RUN_ALIVE, "UPDATE run SET seen_ms = max(seen_ms, ?) WHERE id = ?")
STORE_SQL(RUN_CHANGED, "UPDATE run SET seen_ms = max(seen_ms, ?), version = ? WHERE id = ?")
STORE_SQL(RUN_ALTER,
          "UPDATE run SET name = ?1, archived = ?2, archived_ms = iif(?2, coalesce(archived_ms, ?3), NULL),"
          " pinned = ?4, state = ?5, ended_ms = ?6, version = ?7 WHERE id = ?8")
STORE_SQL(RUN_DELETE, "DELETE FROM run WHERE id = ?")

STORE_SQL(BATCH_ADD, "INSERT INTO batch(run, client, sequence) VALUES(?, ?, ?) ON CONFLICT DO NOTHING")
#define STORE_SERIES_COLUMNS                                                                                 \
    "id, name, unit, blocks, count, nans, first_step, last_step, last_time_ms, min, max, sum, last"
STORE_SQL(SERIES_FIND, "SELECT " STORE_SERIES_COLUMNS " FROM series WHERE run = ? AND name = ?")
STORE_SQL(SERIES_LIST, "SELECT " STORE_SERIES_COLUMNS " FROM series WHERE run = ? ORDER BY name")
STORE_SQL(SERIES_COUNT, "SELECT count(*) FROM series WHERE run = ?")
STORE_SQL(SERIES_ADD,
          "INSERT INTO series(run, name, unit, blocks, count, nans, first_step, last_step, last_time_ms)"
          " VALUES(?, ?, ?, 0, 0, 0, 0, 0, 0)")
STORE_SQL(
    SERIES_SET,
    "UPDATE series SET blocks = ?, count = ?, nans = ?, first_step = ?, last_step = ?, last_time_ms = ?,"
    " min = ?, max = ?, sum = ?, last = ? WHERE id = ?")
#define STORE_BLOCK_COLUMNS "count, nans, first_step, last_step, last_time_ms, min, max, sum, last"
STORE_SQL(BLOCK_SET,
          "INSERT INTO block(series, number, " STORE_BLOCK_COLUMNS ")"
          " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT(series, number) DO UPDATE SET"
          " count = excluded.count, nans = excluded.nans, first_step = excluded.first_step,"
          " last_step = excluded.last_step, last_time_ms = excluded.last_time_ms, min = excluded.min,"
          " max = excluded.max, sum = excluded.sum, last = excluded.last")
STORE_SQL(PACKED_SET, "INSERT INTO packed(id, points) VALUES(?, ?)"
                      " ON CONFLICT(id) DO UPDATE SET points = excluded.points")
STORE_SQL(BLOCK_POINTS,
          "SELECT b.count, p.points FROM block b JOIN packed p ON p.id = b.series * 16777216 + b.number"
          " WHERE b.series = ? AND b.number = ?")
STORE_SQL(BLOCKS, "SELECT " STORE_BLOCK_COLUMNS ", number FROM block"
                  " WHERE series = ? AND last_step >= ? AND first_step <= ? ORDER BY number")
STORE_SQL(EVENT_ADD, "INSERT INTO event(run, kind, step, time_ms, text, data) VALUES(?, ?, ?, ?, ?, ?)")
STORE_SQL(
    EVENTS,
    "SELECT id, kind, step, time_ms, text, data FROM event WHERE run = ? AND id > ? ORDER BY id LIMIT ?")
STORE_SQL(EVENTS_KIND,
          "SELECT id, kind, step, time_ms, text, data FROM event WHERE run = ? AND kind = ? AND id > ?"
          " ORDER BY id LIMIT ?")
STORE_SQL(DOCUMENT_SET,
          "INSERT INTO document(run, name, text, updated_ms) VALUES(?, ?, ?, ?)"
          " ON CONFLICT(run, name) DO UPDATE SET text = excluded.text, updated_ms = excluded.updated_ms")
STORE_SQL(DOCUMENT_COUNT, "SELECT count(*) FROM document WHERE run = ?")
STORE_SQL(
    DOCUMENTS,
    "SELECT name, NULL, length(CAST(text AS BLOB)), updated_ms FROM document WHERE run = ? ORDER BY name")
STORE_SQL(DOCUMENT, "SELECT name, text, 0, updated_ms FROM document WHERE run = ? AND name = ?")

STORE_SQL(TELEMETRY_AGAIN, "UPDATE meta SET value = value + 1 WHERE name = ?")
STORE_SQL(TELEMETRY_COUNT, "SELECT count(*) FROM meta WHERE name >= 'telemetry/' AND name < 'telemetry0'")
STORE_SQL(TELEMETRY_OLD, "DELETE FROM meta WHERE name >= 'telemetry/' AND name < ?")
STORE_SQL(TELEMETRY, "SELECT name, value FROM meta WHERE name >= ? AND name < ? ORDER BY name")

STORE_SQL(PURGE_ADD, "INSERT INTO purge(run) VALUES(?)")
STORE_SQL(PURGE_NEXT, "SELECT run FROM purge LIMIT 1")
STORE_SQL(PURGE_PACKED,
          "DELETE FROM packed WHERE id IN (SELECT p.id FROM series s JOIN packed p"
          " ON p.id >= s.id * 16777216 AND p.id < (s.id + 1) * 16777216 WHERE s.run = ? LIMIT 500)")
STORE_SQL(PURGE_BLOCKS, "DELETE FROM block WHERE (series, number) IN (SELECT b.series, b.number FROM series s"
                        " JOIN block b ON b.series = s.id WHERE s.run = ? LIMIT 500)")
STORE_SQL(PURGE_SERIES, "DELETE FROM series WHERE id IN (SELECT id FROM series WHERE run = ? LIMIT 500)")
STORE_SQL(PURGE_EVENTS, "DELETE FROM event WHERE id IN (SELECT id FROM event WHERE run = ? LIMIT 500)")
STORE_SQL(PURGE_DOCUMENTS, "DELETE FROM document WHERE run = ?")
STORE_SQL(PURGE_BATCHES, "DELETE FROM batch WHERE (client, sequence) IN"
                         " (SELECT client, sequence FROM batch WHERE run = ?1 LIMIT 500) AND run = ?1")
STORE_SQL(FREE_PAGES, "PRAGMA freelist_count")
STORE_SQL(PURGE_END, "DELETE FROM purge WHERE run = ?")

#include "store/store_statements_people.h"
