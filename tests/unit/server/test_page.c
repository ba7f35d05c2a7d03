/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The page: files of one folder and nothing else, with the type that they have.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "http/http.h"
#include "samples.h"

static void write_file(const char *folder, const char *name, const char *text)
{
    char path[256];
    FILE *file;

    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    file = fopen(path, "w");
    assert_non_null(file);
    (void)fputs(text, file);
    (void)fclose(file);
}

static bool find(const http_page *page, const char *raw, http_reply *reply)
{
    http_target target;
    char room[256];

    memset(reply, 0, sizeof *reply);
    return http_target_parse(raw, room, &target) == NULL && http_page_find(page, &target, reply);
}

static void test_files(void **state)
{
    const msc_allocator allocator = {0};
    char folder[SAMPLE_PATH];
    char inner[SAMPLE_PATH + 16];
    char link[SAMPLE_PATH + 16];
    http_page *page = NULL;
    http_reply reply;

    (void)state;
    sample_folder(folder);
    (void)snprintf(inner, sizeof inner, "%s/assets", folder);
    (void)snprintf(link, sizeof link, "%s/passwd", folder);
    assert_int_equal(mkdir(inner, 0700), 0);
    assert_int_equal(symlink("/etc/passwd", link), 0);
    write_file(folder, "index.html", "<p>");
    write_file(folder, ".secret", "no");
    write_file(inner, "a.js", "1;");
    write_file(inner, "empty.css", "");
    assert_int_equal(http_page_load(&allocator, folder, &page, NULL), MSC_OK);
    assert_true(find(page, "/assets/a.js", &reply));
    assert_string_equal(reply.type, "text/javascript; charset=utf-8");
    assert_true(reply.body_bytes == 2 && memcmp(reply.body, "1;", 2) == 0 && reply.may_be_kept);
    assert_true(find(page, "/assets/empty.css", &reply) && reply.body_bytes == 0);
    assert_true(http_page_index(page, &reply));
    assert_false(find(page, "/passwd", &reply));
    assert_false(find(page, "/.secret", &reply));
    assert_false(find(page, "/assets", &reply));
    assert_false(find(page, "/assets/%2e%2e/index.html", &reply));
    assert_false(find(page, "/..%2f..%2fetc%2fpasswd", &reply));
    assert_false(find(NULL, "/index.html", &reply));
    http_page_free(page);
    sample_remove(inner);
    sample_remove(folder);
    assert_int_equal(http_page_load(&allocator, folder, &page, NULL), MSC_EIO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_files)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
