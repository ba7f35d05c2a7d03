/* SPDX-License-Identifier: Apache-2.0 */
/* More of the list for store_statements.h: teams, projects, invitations, the audit log, retention. `a` is
   `reach`: who sees which project. A limit of 0 is none. */
STORE_SQL(TEAM_ADD, "INSERT INTO team(name, created_ms) VALUES(?, ?)")
#define STORE_TEAM_COLUMNS                                                                                   \
    "t.id, t.name, t.created_ms, (SELECT count(*) FROM member WHERE team = t.id),"                           \
    " (SELECT count(*) FROM reach r WHERE r.account = m.account AND r.team = t.id), m.role"
STORE_SQL(TEAM_FIND, "SELECT " STORE_TEAM_COLUMNS
                     " FROM member m JOIN team t ON t.id = m.team WHERE m.account = ? AND m.team = ?")
STORE_SQL(TEAMS, "SELECT " STORE_TEAM_COLUMNS " FROM member m JOIN team t ON t.id = m.team"
                 " WHERE m.account = ?1 AND (?2 = 0 OR t.id = ?2) ORDER BY t.name, t.id")
STORE_SQL(TEAM_RENAME, "UPDATE team SET name = ? WHERE id = ?")
STORE_SQL(TEAM_FIRST, "UPDATE team SET created_ms = ? WHERE id = 1")
STORE_SQL(TEAM_HOLDS, "SELECT 1 FROM project WHERE team = ?")
STORE_SQL(TEAM_INVITATIONS_END, "DELETE FROM invitation WHERE team = ?")
STORE_SQL(TEAM_MEMBERS_END, "DELETE FROM member WHERE team = ?")
STORE_SQL(TEAM_DELETE, "DELETE FROM team WHERE id = ?")

STORE_SQL(MEMBER_ADD, "INSERT INTO member(team, account, role, joined_ms) VALUES(?, ?, ?, ?)")
STORE_SQL(MEMBER_ROLE, "SELECT role FROM member WHERE team = ? AND account = ?")
STORE_SQL(MEMBER_NAMED, "SELECT m.role, m.account FROM member m JOIN account c ON c.id = m.account"
                        " WHERE m.team = ? AND c.name = ?")
STORE_SQL(MEMBERS, "SELECT c.name, m.role, m.joined_ms, c.disabled_ms FROM member m"
                   " JOIN account c ON c.id = m.account WHERE m.team = ? ORDER BY c.name")
STORE_SQL(MEMBER_SET, "UPDATE member SET role = ? WHERE team = ? AND account = ?")
STORE_SQL(MEMBER_REMOVE, "DELETE FROM member WHERE team = ? AND account = ?")
STORE_SQL(MEMBER_CHOSEN_END, "DELETE FROM chosen WHERE account = ?"
                             " AND project IN (SELECT id FROM project WHERE team = ?)")
/* Owners who can log in, beside one. */
STORE_SQL(OWNERS_BESIDE, "SELECT 1 FROM member m JOIN account c ON c.id = m.account WHERE m.team = ?"
                         " AND m.role = 4 AND m.account <> ? AND c.disabled_ms IS NULL LIMIT 1")
STORE_SQL(OWNS_ALONE, "SELECT 1 FROM member m WHERE m.account = ?1 AND m.role = 4 AND NOT EXISTS("
                      "SELECT 1 FROM member o JOIN account c ON c.id = o.account WHERE o.team = m.team"
                      " AND o.role = 4 AND o.account <> ?1 AND c.disabled_ms IS NULL) LIMIT 1")
/* The team that an account means where it names none. */
STORE_SQL(MEMBER_HOME, "SELECT team, role FROM member WHERE account = ?1 AND (?2 = 0 OR team = ?2)"
                       " ORDER BY role < 2, joined_ms, team LIMIT 1")

#define STORE_PROJECT_COLUMNS                                                                                \
    "p.id, p.name, p.created_ms, (SELECT count(*) FROM run r WHERE r.project = p.id AND r.archived = 0),"    \
    " p.team, o.name, p.account = a.account, p.private, a.role, p.archive_days, p.delete_days"
STORE_SQL(PROJECT_FIND, "SELECT " STORE_PROJECT_COLUMNS
                        " FROM reach a JOIN project p ON p.id = a.project JOIN account o ON o.id = p.account"
                        " WHERE a.account = ?1 AND a.project = ?2 AND (?3 = 0 OR a.team = ?3)"
                        " AND (?4 = 0 OR a.project = ?4)")
STORE_SQL(PROJECTS, "SELECT " STORE_PROJECT_COLUMNS
                    " FROM reach a JOIN project p ON p.id = a.project JOIN account o ON o.id = p.account"
                    " WHERE a.account = ?1 AND (?2 = 0 OR a.team = ?2) AND (?3 = 0 OR a.project = ?3)"
                    " AND (?4 = 0 OR a.team = ?4) ORDER BY p.name, p.id")
STORE_SQL(PROJECT_NAMED, "SELECT p.id, a.role FROM reach a JOIN project p ON p.id = a.project"
                         " WHERE a.account = ?1 AND p.team = ?2 AND p.name = ?3 AND (?4 = 0 OR p.id = ?4)"
                         " ORDER BY p.account <> ?1, p.private, p.id LIMIT 1")
STORE_SQL(PROJECT_ADD, "INSERT INTO project(team, account, name, private, created_ms) VALUES(?, ?, ?, 0, ?)")
STORE_SQL(PROJECT_IS, "SELECT 1 FROM reach WHERE project = ?1 AND account = ?2 AND (?3 = 0 OR team = ?3)"
                      " AND (?4 = 0 OR project = ?4)")
STORE_SQL(PROJECT_ALTER,
          "UPDATE project SET name = ?, private = ?, archive_days = ?, delete_days = ? WHERE id = ?")
STORE_SQL(PROJECT_DELETE, "UPDATE project SET deleted_ms = ? WHERE id = ?")
STORE_SQL(PROJECT_PURGE, "UPDATE project SET purge_ms = ? WHERE id = ?")
STORE_SQL(CHOSEN, "SELECT c.name FROM chosen x JOIN account c ON c.id = x.account WHERE x.project = ?"
                  " ORDER BY c.name")
STORE_SQL(CHOSEN_ADD, "INSERT INTO chosen(project, account) VALUES(?, ?) ON CONFLICT DO NOTHING")
STORE_SQL(CHOSEN_END, "DELETE FROM chosen WHERE project = ? AND account = ?")

STORE_SQL(
    INVITATION_ADD,
    "INSERT INTO invitation(id, team, hash, role, account, created_ms, expires_ms) VALUES(?, ?, ?, ?, ?, "
    "?, ?)")
STORE_SQL(INVITATIONS_OLD, "DELETE FROM invitation WHERE expires_ms <= ?")
STORE_SQL(INVITATIONS_COUNT, "SELECT count(*) FROM invitation WHERE team = ?")
#define STORE_INVITATION_COLUMNS                                                                             \
    "i.id, i.hash, i.team, t.name, i.role, c.name, i.created_ms, i.expires_ms FROM invitation i"             \
    " JOIN team t ON t.id = i.team JOIN account c ON c.id = i.account"
STORE_SQL(INVITATION_FIND, "SELECT " STORE_INVITATION_COLUMNS " WHERE i.id = ?")
STORE_SQL(INVITATIONS,
          "SELECT " STORE_INVITATION_COLUMNS " WHERE i.team = ? ORDER BY i.created_ms DESC, i.id")
STORE_SQL(INVITATION_END, "DELETE FROM invitation WHERE id = ? AND team = ?")
STORE_SQL(INVITATIONS_BY_END, "DELETE FROM invitation WHERE account = ?1 AND (?2 = 0 OR team = ?2)")

STORE_SQL(ACCOUNT_GET, "SELECT " STORE_ACCOUNT_COLUMNS " FROM account a WHERE a.id = ?")
STORE_SQL(ACCOUNT_ALTER, "UPDATE account SET admin = ?, disabled_ms = ? WHERE id = ?")
STORE_SQL(ADMINS_BESIDE, "SELECT 1 FROM account WHERE admin = 1 AND disabled_ms IS NULL AND id <> ? LIMIT 1")
STORE_SQL(RESET_ADD, "INSERT OR REPLACE INTO reset(account, hash, expires_ms, made_by) VALUES(?, ?, ?, ?)")
STORE_SQL(RESETS_BY_END, "DELETE FROM reset WHERE made_by = ?")
STORE_SQL(RESET_FIND, "SELECT " STORE_ACCOUNT_COLUMNS " FROM reset x JOIN account a ON a.id = x.account"
                      " WHERE x.hash = ? AND x.expires_ms > ? AND a.disabled_ms IS NULL")
STORE_SQL(RESET_END, "DELETE FROM reset WHERE account = ?")

STORE_SQL(AUDIT_ADD,
          "INSERT INTO audit(time_ms, team, account, action, thing, detail) VALUES(?, ?, ?, ?, ?, ?)")
#define STORE_ENTRY_COLUMNS                                                                                  \
    "l.id, l.time_ms, c.name, l.action, l.thing, l.detail FROM audit l LEFT JOIN account c ON c.id = "       \
    "l.account"
STORE_SQL(TEAM_ENTRIES,
          "SELECT " STORE_ENTRY_COLUMNS " WHERE l.team = ? AND l.id < ? ORDER BY l.id DESC LIMIT ?")
STORE_SQL(SERVER_ENTRIES,
          "SELECT " STORE_ENTRY_COLUMNS " WHERE l.team IS NULL AND l.id < ? ORDER BY l.id DESC LIMIT ?")

/* Runs of one project that have been silent since before a time. */
STORE_SQL(OLD_RUNS, "SELECT " STORE_RUN_COLUMNS " FROM run r WHERE r.project = ? AND r.archived = ?"
                    " AND r.seen_ms < ? AND r.pinned = 0 ORDER BY r.seen_ms, r.id LIMIT ?")
STORE_SQL(OLD_RUNS_COUNT, "SELECT count(*) FILTER (WHERE pinned = 0), count(*) FILTER (WHERE pinned = 1)"
                          " FROM run WHERE project = ? AND archived = ? AND seen_ms < ?")
STORE_SQL(PURGED_RUNS, "SELECT " STORE_RUN_COLUMNS " FROM run r WHERE r.project = ? AND r.archived = 1"
                       " AND coalesce(r.archived_ms, 0) <= ? AND r.pinned = 0 LIMIT ?")
STORE_SQL(ALL_RUNS, "SELECT " STORE_RUN_COLUMNS " FROM run r WHERE r.project = ? LIMIT ?")
/* The next project after one that has something to do. */
STORE_SQL(KEPT_PROJECT,
          "SELECT id, team, archive_days, delete_days, purge_ms, deleted_ms FROM project WHERE id > ?"
          " AND (archive_days > 0 OR delete_days > 0 OR purge_ms IS NOT NULL OR deleted_ms IS NOT NULL)"
          " ORDER BY id LIMIT 1")
STORE_SQL(PURGE_DONE, "UPDATE project SET purge_ms = NULL WHERE id = ?")
STORE_SQL(RUN_ARCHIVE, "UPDATE run SET archived = 1, archived_ms = ?, version = version + 1 WHERE id = ?")
STORE_SQL(CHOSEN_OF_END, "DELETE FROM chosen WHERE project = ?")
STORE_SQL(PROJECT_END, "DELETE FROM project WHERE id = ?")
