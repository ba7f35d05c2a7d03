/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Telemetry: what the table has is counted by day, all else is refused, and nothing else is kept.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "samples.h"

#define PATH "/api/v1/telemetry"
#define MESSAGE(architecture, more)                                                                          \
    "{\"schema\": 2, \"event\": \"plan\", \"architecture\": \"" architecture "\", \"parameters\": \"<1M\","  \
    " \"techniques\": [\"offload\", \"checkpoint\"], \"device\": \"cpu\", \"fits\": true, \"os\": "          \
    "\"linux\","                                                                                             \
    " \"python\": \"3.11\", \"torch\": \"2.13\"" more "}"
#define GOOD MESSAGE("gpt2", ", \"memscale\": \"0.1.0\"")

static unsigned ask(const char *token, const char *method, const char *target, const char *body)
{
    sample_end(&sample_last);
    return sample_ask(&sample_one, token, method, target, body, NULL, &sample_last);
}

static unsigned send(const char *body)
{
    return ask(NULL, "POST", PATH, body);
}

static unsigned count(const char *query)
{
    char target[128];

    (void)snprintf(target, sizeof target, PATH "%s", query);
    return ask(sample_one.token, "GET", target, NULL);
}

static bool says(const char *part)
{
    return strstr(sample_last.text, part) != NULL;
}

static void test_messages_are_counted_by_day(void **state)
{
    (void)state;
    assert_int_equal(send(GOOD), 204);
    assert_int_equal(sample_last.reply.body_bytes, 0);
    assert_int_equal(send(GOOD), 204);
    sample_now_ms += INT64_C(86400000);
    assert_int_equal(send(MESSAGE("llama", ", \"memscale\": \"other\"")), 204);
    assert_int_equal(count(""), 200);
    assert_true(says("\"kept_days\": 30, \"messages\": 3"));
    assert_true(says("\"architecture\": {\"gpt2\": 2, \"llama\": 1}"));
    assert_true(says("\"parameters\": {\"\\u003c1M\": 3}"));
    assert_true(says("\"techniques\": {\"checkpoint\": 3, \"offload\": 3}"));
    assert_true(says("\"fits\": {\"true\": 3}"));
    assert_true(says("\"memscale\": {\"0.1.0\": 2, \"other\": 1}"));
    assert_false(says("10.0.0.1")); /* the sender's address */
    assert_int_equal(count("?from=2000-01-01&to=2000-12-31"), 200);
    assert_true(says("\"messages\": 0"));
    assert_int_equal(count("?from=2000-1-1"), 400);
    assert_int_equal(count("?to=2000-01-011"), 400);
    assert_int_equal(ask(NULL, "GET", PATH, NULL), 401);
}

static void test_what_is_not_in_the_table(void **state)
{
    static const char *const refused[] = {
        MESSAGE("gpt2", ", \"memscale\": \"0.1.0\", \"user\": \"x\""),
        MESSAGE("gpt2", ""),
        MESSAGE("gpt2", ", \"memscale\": 1"),
        MESSAGE("gpt2", ", \"memscale\": \"0.1\""),
        MESSAGE("gpt2", ", \"memscale\": \"0.1.0.1\""),
        MESSAGE("gpt2", ", \"memscale\": \"0.123.1\""),
        MESSAGE("A Name", ", \"memscale\": \"0.1.0\""),
        MESSAGE("a_name_of_more_than_32_characters_", ", \"memscale\": \"0.1.0\""),
        "{\"schema\": 1}",
        "[]",
        "{\"schema\": 2, \"event\": \"plan\", \"architecture\": \"gpt2\", \"parameters\": \"2M\", "
        "\"techniques\": [], \"device\": \"cpu\", \"fits\": true, \"os\": \"linux\", \"python\": \"3.11\", "
        "\"torch\": \"2.13\", \"memscale\": \"0.1.0\"}",
        "{\"schema\": 2, \"event\": \"plan\", \"architecture\": \"gpt2\", \"parameters\": \"<1M\", "
        "\"techniques\": [\"offload\", \"offload\"], \"device\": \"cpu\", \"fits\": true, \"os\": \"linux\", "
        "\"python\": \"3.11\", \"torch\": \"2.13\", \"memscale\": \"0.1.0\"}",
    };

    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        if (send(refused[i]) != 400)
            fail_msg("%s: %u", refused[i], sample_last.reply.status);
    assert_int_equal(send(MESSAGE("a_later_family", ", \"memscale\": \"0.1.0\"")), 204);
    assert_int_equal(count(""), 200);
    assert_true(says("\"architecture\": {\"other\": 1}"));
    assert_true(says("\"messages\": 1"));
}

static void test_rate_and_age(void **state)
{
    http_handler handler = api_handler(sample_one.api);

    (void)state;
    for (int i = 0; i < 600; i++)
        assert_int_equal(send(GOOD), 204);
    assert_int_equal(send(GOOD), 429);
    assert_int_equal(sample_last.reply.retry_after_s, 60);
    sample_now_ms += 60000;
    assert_int_equal(send(GOOD), 204);
    sample_now_ms += INT64_C(86400000) * 29;
    handler.tick(handler.user);
    assert_int_equal(count("?from=0000-00-00"), 200);
    assert_true(says("\"messages\": 601"));
    sample_now_ms += INT64_C(86400000);
    handler.tick(handler.user);
    assert_int_equal(count("?from=0000-00-00"), 200);
    assert_true(says("\"messages\": 0"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_messages_are_counted_by_day, sample_set_up, sample_tear_down),
        cmocka_unit_test_setup_teardown(test_what_is_not_in_the_table, sample_set_up, sample_tear_down),
        cmocka_unit_test_setup_teardown(test_rate_and_age, sample_set_up, sample_tear_down),
    };

    return cmocka_run_group_tests_name("server/telemetry", tests, NULL, NULL);
}
