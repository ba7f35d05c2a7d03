/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Teams in the store: what each role may do, that files of before teams keep what was private so, that retention goes in
 * bounded steps, that a copy is the whole.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "samples.h"
#include "store/store_internal.h"

#define DAY_MS (INT64_C(24) * 3600 * 1000)

typedef struct world {
    char folder[SAMPLE_PATH];
    store *it;
    int64_t team;
    int64_t people[STORE_OWNER + 1]; /* by role; of none: somebody of another team */
} world;

static store_act act_of(int64_t account)
{
    return (store_act){{.account = account}, SAMPLE_NOW_MS};
}

static bool note_team(void *user, const store_team *team)
{
    *(int64_t *)user = team->id;
    return true;
}

static int64_t only_team(store *it, int64_t account)
{
    int64_t team = 0;

    assert_int_equal(store_teams(it, (store_who){.account = account}, note_team, &team), STORE_OK);
    return team;
}

static void join(world *w, int64_t account, store_role role)
{
    store_invitation invitation = {.role = role, .team = w->team, .expires_ms = SAMPLE_NOW_MS + 1};
    store_account joining = {.id = account};

    (void)snprintf(invitation.id, sizeof invitation.id, "i%lld", (long long)account);
    assert_int_equal(store_invitation_add(w->it, act_of(w->people[STORE_OWNER]), &invitation), STORE_OK);
    assert_int_equal(store_invitation_accept(w->it, invitation.id, invitation.hash, &joining, SAMPLE_NOW_MS),
                     STORE_OK);
}

static int set_up(void **state)
{
    static const char *const names[] = {"stranger", "viewer", "member", "admin", "owner"};
    world *w = calloc(1, sizeof *w);

    assert_non_null(w);
    sample_folder(w->folder);
    w->it = sample_store(w->folder);
    for (int role = STORE_OWNER; role >= STORE_NO_ROLE; role--)
        w->people[role] = sample_account(w->it, names[role]);
    w->team = only_team(w->it, w->people[STORE_OWNER]);
    for (store_role role = STORE_VIEWER; role < STORE_OWNER; role++)
        join(w, w->people[role], role);
    *state = w;
    return 0;
}

static int tear_down(void **state)
{
    world *w = *state;

    store_close(w->it);
    sample_remove(w->folder);
    free(w);
    return 0;
}

/* ---- roles ----------------------------------------------------------------------------------- */

/* NOT_FOUND from outside, FORBIDDEN below `least`, else `done`. */
static store_result expected(store_role role, store_role least, store_result done)
{
    return role == STORE_NO_ROLE ? STORE_NOT_FOUND : role < least ? STORE_FORBIDDEN : done;
}

static void test_what_each_role_may(void **state)
{
    const store_run_change change = {.name = "x", .archived = -1, .state = STORE_ANY};
    const store_new_run fresh = {.project = "p", .name = "n", .created_ms = 5};
    const store_batch batch = {.client = "c", .sequence = 1};
    const store_project_change rule = {.is_private = -1, .archive_days = 3, .delete_days = -1};
    world *w = *state;
    store_run_ref ref = {.account = w->people[STORE_MEMBER], .id = "run-00000001", .now_ms = SAMPLE_NOW_MS};
    store_new_run theirs = fresh;
    store_project project;
    store_ingested done;
    store_team team;
    store_run run;
    int64_t id;
    bool made;

    theirs.team = w->team;
    assert_int_equal(
        store_run_add(
            w->it, (store_run_ref){.account = w->people[STORE_OWNER], .id = ref.id, .now_ms = SAMPLE_NOW_MS},
            &theirs, &run, &made),
        STORE_OK);
    id = run.project;
    for (store_role role = STORE_NO_ROLE; role <= STORE_OWNER; role++) {
        store_act act = act_of(w->people[role]);

        ref.account = w->people[role];
        assert_int_equal(store_run_find(w->it, ref, &run), expected(role, STORE_VIEWER, STORE_OK));
        assert_int_equal(store_run_add(w->it, ref, &theirs, &run, &made),
                         expected(role, STORE_MEMBER, STORE_OK));
        assert_int_equal(store_run_alter(w->it, ref, &change, &run), expected(role, STORE_MEMBER, STORE_OK));
        assert_int_equal(store_run_alive(w->it, ref), expected(role, STORE_MEMBER, STORE_OK));
        assert_int_equal(store_ingest(w->it, ref, &batch, &done), expected(role, STORE_MEMBER, STORE_OK));
        assert_int_equal(store_project_alter(w->it, act, id, &rule, &project),
                         expected(role, STORE_ADMIN, STORE_OK));
        assert_int_equal(store_project_choose(w->it, act, id, "viewer", true),
                         expected(role, STORE_ADMIN, STORE_OK));
        assert_int_equal(store_member_set(w->it, act, w->team, "viewer", STORE_VIEWER),
                         expected(role, STORE_ADMIN, STORE_OK));
        assert_int_equal(store_member_set(w->it, act, w->team, "owner", STORE_OWNER),
                         expected(role, STORE_OWNER, STORE_OK));
        assert_int_equal(store_member_set(w->it, act, w->team, "owner", STORE_VIEWER),
                         expected(role, STORE_OWNER, STORE_LAST_OWNER));
        assert_int_equal(store_team_rename(w->it, act, w->team, "t", &team),
                         expected(role, STORE_OWNER, STORE_OK));
        assert_int_equal(store_team_delete(w->it, act, w->team), expected(role, STORE_OWNER, STORE_CONFLICT));
        assert_int_equal(store_member_remove(w->it, act, w->team, "owner"),
                         expected(role, STORE_OWNER, STORE_LAST_OWNER));
    }
}

static bool count_entry(void *user, const store_entry *entry)
{
    (void)entry;
    ++*(unsigned *)user;
    return true;
}

static void test_what_is_refused_is_not_in_the_log(void **state)
{
    world *w = *state;
    store_who owner = {.account = w->people[STORE_OWNER]};
    unsigned before = 0;
    unsigned after = 0;

    assert_int_equal(store_team_entries(w->it, owner, w->team, INT64_MAX, 1000, count_entry, &before),
                     STORE_OK);
    assert_int_equal(before, 6); /* three invitations, made and accepted */
    assert_int_equal(store_member_remove(w->it, act_of(w->people[STORE_VIEWER]), w->team, "owner"),
                     STORE_FORBIDDEN);
    assert_int_equal(store_member_set(w->it, act_of(w->people[STORE_ADMIN]), w->team, "viewer", STORE_OWNER),
                     STORE_FORBIDDEN);
    assert_int_equal(store_team_entries(w->it, owner, w->team, INT64_MAX, 1000, count_entry, &after),
                     STORE_OK);
    assert_int_equal(after, before);
    assert_int_equal(store_team_entries(w->it, (store_who){.account = w->people[STORE_MEMBER]}, w->team,
                                        INT64_MAX, 1000, count_entry, &after),
                     STORE_FORBIDDEN);
    assert_int_equal(store_team_entries(w->it, (store_who){.account = w->people[STORE_NO_ROLE]}, w->team,
                                        INT64_MAX, 1000, count_entry, &after),
                     STORE_NOT_FOUND);
}

/* ---- files of before ------------------------------------------------------------------------- */

static bool count_project(void *user, const store_project *project)
{
    assert_string_equal(project->name, "p");
    assert_true(project->is_private);
    assert_int_equal(project->team, 1);
    ++*(unsigned *)user;
    return true;
}

static unsigned projects_of(store *it, int64_t account)
{
    unsigned count = 0;

    assert_int_equal(store_projects(it, (store_who){.account = account}, 0, count_project, &count), STORE_OK);
    return count;
}

static void test_what_was_private_stays_so(void **state)
{
    static const char *const filled =
        "INSERT INTO account(id, name, password, admin, created_ms) VALUES(1, 'ann', 'x', 1, 5), (2, 'bob', "
        "'x', 0, 6), (3, 'eve', 'x', 0, 7);"
        "INSERT INTO project(account, name, created_ms) VALUES(2, 'p', 5), (3, 'p', 6);"
        "INSERT INTO run(uid, project, name, state, archived, created_ms, seen_ms, version)"
        " VALUES('run-of-bob', 1, 'b', 1, 0, 5, 5, 1), ('run-of-eve', 2, 'e', 1, 1, 5, 5, 1);";
    char folder[SAMPLE_PATH];
    char path[256];
    store_run_ref ref = {.account = 2, .id = "run-of-bob", .now_ms = SAMPLE_NOW_MS};
    store_new_run fresh = {.project = "p", .name = "n", .created_ms = 5};
    store_team team;
    store_run run;
    store_db db;
    store *it;
    bool made;

    (void)state;
    sample_folder(folder);
    (void)snprintf(path, sizeof path, "%s/memscale.db", folder);
    assert_int_equal(store_db_open(&db, path, false, NULL), MSC_OK);
    assert_int_equal(store_migrate_to(&db, 2, NULL), MSC_OK);
    assert_int_equal(sqlite3_exec(db.it, filled, NULL, NULL, NULL), SQLITE_OK);
    store_db_close(&db);
    it = sample_store(folder);
    assert_int_equal(store_team_find(it, (store_who){.account = 2}, 1, &team), STORE_OK);
    assert_true(team.members == 3 && team.role == STORE_MEMBER && team.projects == 1);
    assert_int_equal(projects_of(it, 2), 1);
    assert_int_equal(projects_of(it, 3), 1);
    assert_int_equal(projects_of(it, 1), 2); /* an owner of the team */
    assert_int_equal(store_run_find(it, ref, &run), STORE_OK);
    ref.account = 3;
    assert_int_equal(store_run_find(it, ref, &run), STORE_NOT_FOUND);
    ref.id = "run-new-of-eve";
    assert_int_equal(store_run_add(it, ref, &fresh, &run, &made), STORE_OK);
    assert_int_equal(run.project, 2); /* her clients go on where they were */
    store_close(it);
    sample_remove(folder);
}

/* ---- retention ------------------------------------------------------------------------------- */

static void add_old_runs(world *w, unsigned count)
{
    store_new_run fresh = {.project = "old", .name = "n", .created_ms = 5, .team = w->team};
    store_run run;
    bool made;

    for (unsigned i = 0; i < count; i++) {
        char id[32];
        store_run_ref ref = {.account = w->people[STORE_OWNER], .id = id, .now_ms = 1000 + i};

        (void)snprintf(id, sizeof id, "run-%08u", i);
        assert_int_equal(store_run_add(w->it, ref, &fresh, &run, &made), STORE_OK);
    }
}

static void count_told(void *user, const store_run *run)
{
    assert_true(run->version == 1);
    ++*(unsigned *)user;
}

static void test_retention_goes_in_steps(void **state)
{
    store_project_change rule = {.is_private = -1, .archive_days = 1, .delete_days = -1};
    world *w = *state;
    store_act act = act_of(w->people[STORE_OWNER]);
    store_rule asked = {.archive_days = 1, .delete_days = -1};
    store_retention would;
    store_project project;
    unsigned told = 0;
    unsigned steps = 0;
    bool made;
    bool more = true;

    add_old_runs(w, 250);
    act.now_ms = 2 * DAY_MS;
    assert_int_equal(store_project_add(w->it, act, w->team, "old", &project, &made), STORE_OK);
    assert_false(made);
    asked.project = project.id;
    assert_int_equal(store_retention_preview(w->it, act, &asked, &would), STORE_OK);
    assert_true(would.archives == 250 && would.deletes == 0 && would.pinned == 0);
    assert_int_equal(store_project_alter(w->it, act, project.id, &rule, &project), STORE_OK);
    for (; more; steps++) {
        unsigned before = told;

        assert_int_equal(store_keep_step(w->it, act.now_ms, count_told, NULL, &told, &more), STORE_OK);
        assert_true(told - before <= 100);
    }
    assert_int_equal(told, 250);
    assert_true(steps >= 3 && steps <= 4);
    assert_int_equal(store_project_find(w->it, act.who, project.id, &project), STORE_OK);
    assert_int_equal(project.runs, 0);
    assert_int_equal(store_keep_step(w->it, act.now_ms, count_told, NULL, &told, &more), STORE_OK);
    assert_true(told == 250 && !more); /* once is enough */
}

/* ---- copies ---------------------------------------------------------------------------------- */

static void test_a_copy_is_the_whole(void **state)
{
    world *w = *state;
    char folder[SAMPLE_PATH];
    char file[SAMPLE_PATH + 8];
    store_run_ref ref = {.account = w->people[STORE_OWNER], .id = "run-00000001", .now_ms = 5};
    msc_error err = {0};
    store_run run;
    store *it;

    add_old_runs(w, 2);
    sample_folder(folder);
    (void)snprintf(file, sizeof file, "%s/copy", w->folder);
    assert_int_equal(store_backup(w->folder, file, &err), MSC_OK);
    assert_int_equal(store_backup(w->folder, file, &err), MSC_EIO); /* it is there */
    assert_int_equal(store_run_delete(w->it, ref, NULL, NULL), STORE_OK);
    assert_int_equal(store_restore(folder, file, &err), MSC_OK);
    assert_int_equal(store_restore(folder, file, &err), MSC_EIO);
    it = sample_store(folder);
    assert_int_equal(store_run_find(it, ref, &run), STORE_OK);
    store_close(it);
    assert_int_equal(unlink(file), 0);
    sample_remove(folder);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        CASE(test_what_each_role_may),        CASE(test_what_is_refused_is_not_in_the_log),
        CASE(test_what_was_private_stays_so), CASE(test_retention_goes_in_steps),
        CASE(test_a_copy_is_the_whole),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
