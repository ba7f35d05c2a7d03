/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Migrations: numbered, forward only, each in a transaction with the number that says it was done.
 *
 * A migration that was released is never changed; what comes later is a new one at the end. `user_version` of
 * the file is the number of those it has had.
 */
#include "base/error.h"
#include "store/store_internal.h"

static const char *const migrations[] = {
    /* 1: accounts */
    "CREATE TABLE meta(name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;"
    "CREATE TABLE account(id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, password TEXT NOT "
    "NULL,"
    " admin INTEGER NOT NULL, created_ms INTEGER NOT NULL) STRICT;"
    "CREATE TABLE session(hash BLOB PRIMARY KEY, account INTEGER NOT NULL REFERENCES account, created_ms "
    "INTEGER NOT NULL,"
    " used_ms INTEGER NOT NULL) STRICT, WITHOUT ROWID;"
    "CREATE INDEX session_account ON session(account);"
    "CREATE TABLE token(id TEXT PRIMARY KEY, account INTEGER NOT NULL REFERENCES account, hash BLOB NOT NULL,"
    " name TEXT NOT NULL, scopes INTEGER NOT NULL, created_ms INTEGER NOT NULL, expires_ms INTEGER, used_ms "
    "INTEGER)"
    " STRICT, WITHOUT ROWID;"
    "CREATE INDEX token_account ON token(account, created_ms);",

    /* 2: runs. Keys of runs and series are never used twice, since the rows of a deleted run outlive it
       for a while. */
    "CREATE TABLE project(id INTEGER PRIMARY KEY AUTOINCREMENT, account INTEGER NOT NULL REFERENCES account,"
    " name TEXT NOT NULL, created_ms INTEGER NOT NULL, UNIQUE(account, name)) STRICT;"
    "CREATE TABLE run(id INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT NOT NULL UNIQUE,"
    " project INTEGER NOT NULL REFERENCES project, name TEXT NOT NULL, state INTEGER NOT NULL, archived "
    "INTEGER NOT NULL,"
    " created_ms INTEGER NOT NULL, seen_ms INTEGER NOT NULL, ended_ms INTEGER, version INTEGER NOT NULL) "
    "STRICT;"
    "CREATE INDEX run_created ON run(project, archived, created_ms, id, state, name);"
    "CREATE INDEX run_name ON run(project, archived, name, id, state);"
    "CREATE INDEX run_seen ON run(project, archived, seen_ms, id, state, name);"
    "CREATE TABLE batch(run INTEGER NOT NULL, client TEXT NOT NULL, sequence INTEGER NOT NULL,"
    " PRIMARY KEY(run, client, sequence)) STRICT, WITHOUT ROWID;"
    "CREATE TABLE series(id INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER NOT NULL, name TEXT NOT NULL, "
    "unit TEXT NOT NULL,"
    " blocks INTEGER NOT NULL, count INTEGER NOT NULL, nans INTEGER NOT NULL, first_step INTEGER NOT NULL,"
    " last_step INTEGER NOT NULL, last_time_ms INTEGER NOT NULL, min REAL, max REAL, sum REAL, last REAL,"
    " UNIQUE(run, name)) STRICT;"
    "CREATE TABLE block(series INTEGER NOT NULL, number INTEGER NOT NULL, count INTEGER NOT NULL, nans "
    "INTEGER NOT NULL,"
    " first_step INTEGER NOT NULL, last_step INTEGER NOT NULL, last_time_ms INTEGER NOT NULL, min REAL, max "
    "REAL, sum REAL,"
    " last REAL, PRIMARY KEY(series, number)) STRICT, WITHOUT ROWID;"
    "CREATE TABLE packed(id INTEGER PRIMARY KEY, points BLOB NOT NULL) STRICT;"
    "CREATE TABLE event(id INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER NOT NULL, kind TEXT NOT NULL, step "
    "INTEGER,"
    " time_ms INTEGER NOT NULL, text TEXT NOT NULL, data TEXT) STRICT;"
    "CREATE INDEX event_run ON event(run, id);"
    "CREATE TABLE document(run INTEGER NOT NULL, name TEXT NOT NULL, text TEXT NOT NULL, updated_ms INTEGER "
    "NOT NULL,"
    " PRIMARY KEY(run, name)) STRICT;"
    "CREATE TABLE purge(run INTEGER PRIMARY KEY) STRICT;",

    /* 3: teams. Everybody is in the first; what was theirs alone stays so: their projects are private. Roles are
       store_role. A name is the only one among the projects that a team sees, and among those of an account.
       `reach` is the one place that says who sees which project. */
    "CREATE TABLE team(id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, created_ms INTEGER NOT "
    "NULL) "
    "STRICT;"
    "INSERT INTO team(name, created_ms) SELECT 'default', coalesce(min(created_ms), 0) FROM account;"
    "CREATE TABLE member(team INTEGER NOT NULL REFERENCES team, account INTEGER NOT NULL REFERENCES account,"
    " role INTEGER NOT NULL, joined_ms INTEGER NOT NULL, PRIMARY KEY(team, account)) STRICT, WITHOUT ROWID;"
    "CREATE INDEX member_account ON member(account, joined_ms, team, role);"
    "INSERT INTO member(team, account, role, joined_ms)"
    " SELECT 1, id, iif(admin, 4, 2), created_ms FROM account;"
    "UPDATE member SET role = 4 WHERE account = (SELECT min(account) FROM member)"
    " AND NOT EXISTS(SELECT 1 FROM member WHERE role = 4);"
    "ALTER TABLE account ADD COLUMN disabled_ms INTEGER;"
    "ALTER TABLE token ADD COLUMN team INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE token ADD COLUMN project INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE token ADD COLUMN revoked_ms INTEGER;"
    "CREATE TABLE project_new(id INTEGER PRIMARY KEY AUTOINCREMENT, team INTEGER NOT NULL REFERENCES team,"
    " account INTEGER NOT NULL REFERENCES account, name TEXT NOT NULL, private INTEGER NOT NULL,"
    " created_ms INTEGER NOT NULL, archive_days INTEGER NOT NULL DEFAULT 0, delete_days INTEGER NOT NULL "
    "DEFAULT 0,"
    " purge_ms INTEGER, deleted_ms INTEGER) STRICT;"
    "INSERT INTO project_new(id, team, account, name, private, created_ms)"
    " SELECT id, 1, account, name, 1, created_ms FROM project;"
    "DROP TABLE project;"
    "ALTER TABLE project_new RENAME TO project;"
    "CREATE UNIQUE INDEX project_seen ON project(team, name) WHERE private = 0 AND deleted_ms IS NULL;"
    "CREATE UNIQUE INDEX project_own ON project(team, account, name) WHERE deleted_ms IS NULL;"
    "CREATE INDEX project_name ON project(team, name);"
    "CREATE TABLE chosen(project INTEGER NOT NULL REFERENCES project, account INTEGER NOT NULL REFERENCES "
    "account,"
    " PRIMARY KEY(project, account)) STRICT, WITHOUT ROWID;"
    "CREATE VIEW reach(account, project, team, role) AS"
    " SELECT m.account, p.id, p.team, m.role FROM project p JOIN member m ON m.team = p.team"
    " JOIN account o ON o.id = m.account WHERE o.disabled_ms IS NULL AND p.deleted_ms IS NULL AND (p.private "
    "= 0 OR m.role >= 3 OR p.account = m.account"
    " OR EXISTS(SELECT 1 FROM chosen c WHERE c.project = p.id AND c.account = m.account));"
    "ALTER TABLE run ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE run ADD COLUMN archived_ms INTEGER;"
    "CREATE TABLE invitation(id TEXT PRIMARY KEY, team INTEGER NOT NULL REFERENCES team, hash BLOB NOT NULL,"
    " role INTEGER NOT NULL, account INTEGER NOT NULL REFERENCES account, created_ms INTEGER NOT NULL,"
    " expires_ms INTEGER NOT NULL) STRICT, WITHOUT ROWID;"
    "CREATE INDEX invitation_team ON invitation(team, created_ms);"
    "CREATE TABLE reset(account INTEGER PRIMARY KEY REFERENCES account, hash BLOB NOT NULL UNIQUE,"
    " expires_ms INTEGER NOT NULL, made_by INTEGER NOT NULL REFERENCES account) STRICT;"
    "CREATE TABLE audit(id INTEGER PRIMARY KEY AUTOINCREMENT, time_ms INTEGER NOT NULL, team INTEGER,"
    " account INTEGER, action TEXT NOT NULL, thing TEXT NOT NULL, detail TEXT NOT NULL) STRICT;"
    "CREATE INDEX audit_team ON audit(team, id);"
    "CREATE TRIGGER audit_stays BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, 'the log is append-only'); "
    "END;"
    "CREATE TRIGGER audit_is_said BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'the log is append-only');"
    " END;",
};

#define COUNT ((uint32_t)(sizeof migrations / sizeof migrations[0]))

uint32_t store_migration_count(void)
{
    return COUNT;
}

static msc_status failed(store_db *db, uint32_t number, msc_error *err)
{
    msc_status status = store_db_failed(db) == STORE_NO_MEMORY ? MSC_ENOMEM : MSC_EIO;

    msc__ignore(msc__fail(err, status, "migration %u: %s", (unsigned)number, sqlite3_errmsg(db->it)));
    (void)sqlite3_exec(db->it, "ROLLBACK", NULL, NULL, NULL);
    return status;
}

static int64_t version_of(store_db *db)
{
    sqlite3_stmt *statement = NULL;
    int64_t version = -1;

    if (sqlite3_prepare_v2(db->it, "PRAGMA user_version", -1, &statement, NULL) == SQLITE_OK &&
        store_row(statement))
        version = sqlite3_column_int64(statement, 0);
    (void)sqlite3_finalize(statement);
    return version;
}

static bool execute(store_db *db, const char *text)
{
    return sqlite3_exec(db->it, text, NULL, NULL, NULL) == SQLITE_OK;
}

/* A table that others point at is made anew with the checks off, so all are checked before the commit. */
static bool keys_are_whole(store_db *db)
{
    sqlite3_stmt *statement = NULL;
    bool whole = sqlite3_prepare_v2(db->it, "PRAGMA foreign_key_check", -1, &statement, NULL) == SQLITE_OK &&
                 sqlite3_step(statement) == SQLITE_DONE;

    (void)sqlite3_finalize(statement);
    return whole;
}

msc_status store_migrate_to(store_db *db, uint32_t wanted, msc_error *err)
{
    int64_t version = version_of(db);
    uint32_t i;

    if (version < 0)
        return failed(db, 0, err);
    if (version > COUNT)
        return msc__fail(err, MSC_EVERSION,
                         "the data is of form %lld, this server knows forms up to %u: run a newer server",
                         (long long)version, (unsigned)COUNT);
    for (i = (uint32_t)version; i < wanted; i++) {
        char number[64];

        (void)sqlite3_snprintf(sizeof number, number, "PRAGMA user_version = %u", i + 1);
        if (!execute(db, "PRAGMA foreign_keys = OFF") || !execute(db, "BEGIN IMMEDIATE") ||
            !execute(db, migrations[i]) || !keys_are_whole(db) || !execute(db, number) ||
            !execute(db, "COMMIT") || !execute(db, "PRAGMA foreign_keys = ON"))
            return failed(db, i + 1, err);
    }
    return MSC_OK;
}

msc_status store_migrate(store_db *db, msc_error *err)
{
    return store_migrate_to(db, COUNT, err);
}
