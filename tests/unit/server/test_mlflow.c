/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MLflow's API without a socket: the language of filters, what is kept of a log, what comes twice.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "api/mlflow/api_mlflow.h"
#include "samples.h"

#define MLFLOW "/api/2.0/mlflow"
#define RUN "run-00000001"

static unsigned ask(const char *method, const char *target, const char *body)
{
    sample_end(&sample_last);
    return sample_ask(&sample_one, sample_one.token, method, target, body, NULL, &sample_last);
}

static bool says(const char *part)
{
    return strstr(sample_last.text, part) != NULL;
}

static void begin_run(void)
{
    assert_int_equal(
        ask("POST", "/api/v1/runs", "{\"id\": \"" RUN "\", \"project\": \"p\", \"name\": \"n\"}"), 201);
}

/* ---- filters --------------------------------------------------------------------------------- */

static void test_filters_that_are_read(void **state)
{
    static mlflow_filter filter;
    mlflow_name name;
    bool descending;

    (void)state;
    assert_null(mlflow_filter_read("  ", &filter));
    assert_int_equal(filter.count, 0);
    assert_null(mlflow_filter_read(
        "metrics.loss<=-1.5e3 and params.`a b`!='it\"s' AND tag.\"x\" ilike '%a_c%'", &filter));
    assert_int_equal(filter.count, 3);
    assert_int_equal(filter.at[0].name.kind, MLFLOW_METRIC);
    assert_int_equal(filter.at[0].compare, MLFLOW_AT_MOST);
    assert_true(filter.at[0].number == -1500.0);
    assert_string_equal(filter.at[1].name.key, "a b");
    assert_string_equal(filter.at[1].text, "it\"s");
    assert_true(mlflow_holds_text(&filter.at[2], "xxABCxx"));
    assert_true(mlflow_holds_text(&filter.at[2], "abc"));
    assert_false(mlflow_holds_text(&filter.at[2], "ab"));
    assert_true(mlflow_holds_number(&filter.at[0], -1500.0));
    assert_false(mlflow_holds_number(&filter.at[0], (double)NAN));
    assert_null(mlflow_filter_read("status = 'RUNNING'", &filter));
    assert_int_equal(filter.at[0].name.kind, MLFLOW_ATTRIBUTE);
    assert_null(mlflow_order_read(" metrics.a/b desc ", &name, &descending));
    assert_true(descending);
    assert_string_equal(name.key, "a/b");
    assert_null(mlflow_order_read("start_time", &name, &descending));
    assert_false(descending);
}

static void test_filters_that_are_refused(void **state)
{
    static const char *const refused[] = {"x",
                                          "metrics.a",
                                          "metrics.a >",
                                          "metrics.a > 'x'",
                                          "metrics.a > nan",
                                          "metrics.a > 0x10",
                                          "metrics.a > 1e999",
                                          "metrics.a LIKE 1",
                                          "params.a > '1'",
                                          "params.a = 1",
                                          "params.a = 'x",
                                          "params.`a = 'x'",
                                          "params.a = 'x' OR params.a = 'y'",
                                          "params.a = 'x' AND",
                                          "params.a = 'x' params.b = 'y'",
                                          "attributes.secret = 'x'",
                                          "attributes.start_time = 'x'",
                                          "metrics.a > 1and",
                                          ".a = 'x'"};
    static mlflow_filter filter;
    char many[1024] = "metrics.a > 1";
    mlflow_name name;
    bool descending;

    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        if (mlflow_filter_read(refused[i], &filter) == NULL)
            fail_msg("taken: %s", refused[i]);
    for (int i = 0; i < 15; i++)
        (void)snprintf(many + strlen(many), sizeof many - strlen(many), " AND metrics.a > 1");
    assert_null(mlflow_filter_read(many, &filter));
    (void)snprintf(many + strlen(many), sizeof many - strlen(many), " AND metrics.a > 1");
    assert_non_null(mlflow_filter_read(many, &filter));
    assert_non_null(mlflow_order_read("metrics.a UP", &name, &descending));
    assert_non_null(mlflow_order_read("", &name, &descending));
    assert_non_null(mlflow_order_read("attributes.x", &name, &descending));
}

/* ---- logging --------------------------------------------------------------------------------- */

static void test_points_that_come_twice_count_once(void **state)
{
    static const char points[] =
        "{\"run_id\": \"" RUN "\", \"metrics\": ["
        "{\"key\": \"a\", \"value\": 1, \"timestamp\": 5, \"step\": 1},"
        "{\"key\": \"b\", \"value\": \"NaN\", \"timestamp\": \"6\", \"step\": \"2\"},"
        "{\"key\": \"a\", \"value\": 2.5, \"timestamp\": 7, \"step\": 2}]}";

    (void)state;
    begin_run();
    assert_int_equal(ask("POST", MLFLOW "/runs/log-batch", points), 200);
    assert_string_equal(sample_last.text, "{}\n");
    assert_int_equal(ask("POST", MLFLOW "/runs/log-batch", points), 200);
    assert_int_equal(ask("GET", MLFLOW "/metrics/get-history?run_id=" RUN "&metric_key=a&more=1", NULL), 200);
    assert_string_equal(sample_last.text,
                        "{\"metrics\": [{\"key\": \"a\", \"value\": 1, \"timestamp\": 5, \"step\": 1}, "
                        "{\"key\": \"a\", \"value\": 2.5, \"timestamp\": 7, \"step\": 2}]}\n");
    assert_int_equal(
        ask("GET", MLFLOW "/metrics/get-history?run_id=" RUN "&metric_key=a&max_results=1", NULL), 200);
    assert_true(says("\"next_page_token\": \"1\""));
    assert_int_equal(ask("GET", MLFLOW "/metrics/get-history?run_id=" RUN "&metric_key=b", NULL), 200);
    assert_true(says("\"value\": \"NaN\", \"timestamp\": 6, \"step\": 2"));
    assert_int_equal(ask("GET", MLFLOW "/metrics/get-history?run_id=" RUN "&metric_key=a&page_token=x", NULL),
                     400);
}

static void test_params_stay_and_tags_do_not(void **state)
{
    (void)state;
    begin_run();
    assert_int_equal(ask("POST", "/api/v1/runs/" RUN "/batches",
                         "{\"client\": \"c\", \"sequence\": 1, \"documents\": {\"params\": {\"n\": 4}}}"),
                     200);
    assert_int_equal(ask("POST", MLFLOW "/runs/log-parameter",
                         "{\"run_id\": \"" RUN "\", \"key\": \"lr\", \"value\": \"1\"}"),
                     200);
    assert_int_equal(ask("POST", MLFLOW "/runs/log-parameter",
                         "{\"run_id\": \"" RUN "\", \"key\": \"lr\", \"value\": \"1\"}"),
                     200);
    assert_int_equal(ask("POST", MLFLOW "/runs/log-parameter",
                         "{\"run_id\": \"" RUN "\", \"key\": \"lr\", \"value\": \"2\"}"),
                     400);
    assert_true(says("params do not change"));
    for (int i = 0; i < 3; i++) /* the first once more, which a hash of the request would pass over */
        assert_int_equal(ask("POST", MLFLOW "/runs/set-tag",
                             i == 1 ? "{\"run_uuid\": \"" RUN "\", \"key\": \"t\", \"value\": \"two\"}"
                                    : "{\"run_uuid\": \"" RUN "\", \"key\": \"t\", \"value\": \"one\"}"),
                         200);
    assert_int_equal(ask("POST", MLFLOW "/runs/set-tag",
                         "{\"run_id\": \"" RUN "\", \"key\": \"mlflow.runName\", \"value\": \"renamed\"}"),
                     200);
    assert_int_equal(ask("GET", MLFLOW "/runs/get?run_id=" RUN, NULL), 200);
    assert_true(says("\"run_name\": \"renamed\""));
    assert_true(says("{\"key\": \"n\", \"value\": \"4\"}"));
    assert_true(says("{\"key\": \"t\", \"value\": \"one\"}"));
    assert_int_equal(ask("POST", MLFLOW "/runs/delete-tag", "{\"run_id\": \"" RUN "\", \"key\": \"t\"}"),
                     200);
    assert_int_equal(ask("POST", MLFLOW "/runs/delete-tag", "{\"run_id\": \"" RUN "\", \"key\": \"t\"}"),
                     404);
}

static void test_states(void **state)
{
    (void)state;
    begin_run();
    assert_int_equal(ask("POST", MLFLOW "/runs/update",
                         "{\"run_id\": \"" RUN
                         "\", \"status\": \"KILLED\", \"end_time\": 77, \"run_name\": \"x\"}"),
                     200);
    assert_true(says("\"status\": \"FAILED\""));
    assert_true(says("\"end_time\": 77"));
    assert_int_equal(ask("POST", MLFLOW "/runs/update", "{\"run_id\": \"" RUN "\", \"status\": 1}"), 200);
    assert_true(says("\"status\": \"RUNNING\""));
    assert_false(says("end_time"));
    assert_int_equal(ask("POST", MLFLOW "/runs/update", "{\"run_id\": \"" RUN "\", \"status\": \"x\"}"), 400);
    sample_now_ms += 2 * STORE_LOST_MS;
    assert_int_equal(ask("GET", MLFLOW "/runs/get?run_id=" RUN, NULL), 200);
    assert_true(says("\"status\": \"RUNNING\"")); /* lost, to us */
    assert_int_equal(ask("POST", MLFLOW "/runs/create", "{\"experiment_id\": \"0\", \"start_time\": 5}"),
                     200);
    assert_true(says("\"start_time\": 5"));
    assert_int_equal(ask("POST", MLFLOW "/runs/create", "{\"experiment_id\": \"x\"}"), 400);
    assert_int_equal(ask("POST", MLFLOW "/runs/create", "{\"experiment_id\": 99}"), 404);
    assert_int_equal(ask("GET", MLFLOW "/experiments/get?experiment_id=0", NULL), 200);
    assert_true(says("\"name\": \"Default\""));
    assert_int_equal(ask("PUT", "/api/2.0/mlflow-artifacts/artifacts/1/x/a.txt", NULL), 501);
    assert_true(says("NOT_IMPLEMENTED"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_filters_that_are_read),
        cmocka_unit_test(test_filters_that_are_refused),
        cmocka_unit_test_setup_teardown(test_points_that_come_twice_count_once, sample_set_up,
                                        sample_tear_down),
        cmocka_unit_test_setup_teardown(test_params_stay_and_tags_do_not, sample_set_up, sample_tear_down),
        cmocka_unit_test_setup_teardown(test_states, sample_set_up, sample_tear_down),
    };

    return cmocka_run_group_tests_name("server/mlflow", tests, NULL, NULL);
}
