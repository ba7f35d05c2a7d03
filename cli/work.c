/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading what a command works on: a graph, and a plan that must have been made for that graph. A plan for
 * another graph is refused, since its module ids would silently mean other modules.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cmd.h"

#define READ_BYTES 65536u

cli_exit cli_work_open(cli_work *work, const char *graph_path)
{
    msc_error err;

    memset(work, 0, sizeof *work);
    if (msc_context_create(NULL, &work->ctx, &err) != MSC_OK)
        return cli_fail(NULL, &err);
    if (msc_graph_load_file(work->ctx, graph_path, &work->graph, &err) != MSC_OK)
        return cli_fail(graph_path, &err);
    return CLI_EXIT_OK;
}

void cli_work_close(cli_work *work)
{
    msc_plan_destroy(work->plan);
    msc_graph_destroy(work->graph);
    msc_context_destroy(work->ctx);
}

/* The whole of an open file in memory that the caller frees; NULL after a message. */
static char *read_all(FILE *file, const char *path, size_t *length)
{
    char *text = NULL;
    size_t room = 0;

    *length = 0;
    do {
        char *grown = realloc(text, room + READ_BYTES);
        if (grown == NULL) {
            free(text);
            cli_error(path, "cannot get %zu bytes of memory", room + READ_BYTES);
            return NULL;
        }
        text = grown;
        room += READ_BYTES;
        *length += fread(text + *length, 1, room - *length, file);
    } while (*length == room);
    if (ferror(file)) {
        cli_error(path, "cannot read it: %s", strerror(errno));
        free(text);
        return NULL;
    }
    return text;
}

cli_exit cli_work_read_plan(cli_work *work, const char *plan_path, const char *graph_path)
{
    FILE *file = fopen(plan_path, "rb");
    char *text;
    size_t length;
    msc_status status;
    msc_error err;

    if (file == NULL) {
        cli_error(plan_path, "cannot open it: %s", strerror(errno));
        return CLI_EXIT_INTERNAL;
    }
    text = read_all(file, plan_path, &length);
    (void)fclose(file);
    if (text == NULL)
        return CLI_EXIT_INTERNAL;
    status = msc_plan_parse(work->ctx, text, length, &work->plan, &err);
    free(text);
    if (status != MSC_OK)
        return cli_fail(plan_path, &err);
    if (msc_plan_get_summary(work->plan)->graph_digest != msc_graph_digest(work->graph)) {
        cli_error(plan_path, "was not made for %s: the digests of the graphs differ", graph_path);
        return CLI_EXIT_INPUT;
    }
    return CLI_EXIT_OK;
}
