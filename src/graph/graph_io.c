/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Canonical text of the memory graph, its digest, and graphs in files.
 *
 *      memscale-graph 1                     one more with notes, two more with classes of work
 *      counts <one number per kind of record>
 *      module ...          one line per record, kinds in fixed order (a module has two lines)
 *      ...
 *      end
 *
 * docs/formats/graph.md describes the fields; graph_parse.c reads them back. One graph has exactly one
 * text: names are spelled out instead of referring to the string pool, whose order is an accident of
 * building. The digest is that of the text without notes, so it does not depend on how the structs are laid
 * out, nor on where in a source file an operation stands.
 *
 * A file is written beside its final place and renamed, so a reader sees the old text or the new one and
 * nothing else. The temporary name is opened exclusively: several ranks of one job may save to the same
 * path at the same time.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/text.h"
#include "graph/graph_internal.h"

#define FIRST_READ_BYTES 65536u
#define TEMPORARY_NAMES 100u
#define SUFFIX_BYTES 8u /* ".tmpNN" and its terminator */

/* ---- text ---------------------------------------------------------------------------------------- */

static void put_field(msc__text *text, uint64_t value)
{
    msc__text_put_char(text, ' ');
    msc__text_put_u64(text, value);
}

static void put_id(msc__text *text, uint32_t id)
{
    if (id == MSC_NONE)
        msc__text_put(text, " -");
    else
        put_field(text, id);
}

static void put_name(msc__text *text, const msc_graph *graph, uint32_t string)
{
    msc__text_put_char(text, ' ');
    msc__text_put(text, msc_graph_string(graph, string));
    msc__text_put_char(text, '\n');
}

static void put_module(msc__text *text, const msc_graph *graph, const msc_module *module)
{
    msc__text_put(text, "module");
    put_id(text, module->parent);
    put_field(text, module->flags);
    msc__text_put_char(text, ' ');
    msc__text_put_hex64(text, module->structure);
    put_field(text, module->state_bytes);
    put_name(text, graph, module->path);
    msc__text_put(text, "type");
    put_name(text, graph, module->type);
}

static void put_call(msc__text *text, const msc_call *call)
{
    MSC__ASSERT(call->begin <= call->end && call->end != MSC_NONE);
    msc__text_put(text, "call");
    put_field(text, call->module);
    put_id(text, call->parent);
    put_field(text, call->begin);
    put_field(text, call->end);
    msc__text_put_char(text, '\n');
}

static void put_op(msc__text *text, const msc_graph *graph, const msc_op *op, bool work)
{
    msc__text_put(text, "op");
    put_id(text, op->call);
    put_field(text, op->phase);
    put_field(text, op->flags);
    if (work)
        put_field(text, op->work);
    put_field(text, op->flops);
    put_field(text, op->moved_bytes);
    put_field(text, op->scratch_bytes);
    put_name(text, graph, op->name);
}

static void put_buffer(msc__text *text, const msc_buffer *buffer)
{
    MSC__ASSERT(buffer->begin <= buffer->end && buffer->end != MSC_NONE);
    msc__text_put(text, "buffer");
    put_field(text, buffer->size_bytes);
    put_field(text, buffer->category);
    put_field(text, buffer->resident);
    put_field(text, buffer->begin);
    put_field(text, buffer->end);
    msc__text_put_char(text, '\n');
}

static void put_save(msc__text *text, const msc_save *save)
{
    MSC__ASSERT(save->pack <= save->unpack && save->unpack <= save->release && save->release != MSC_NONE);
    msc__text_put(text, "save");
    put_field(text, save->buffer);
    put_id(text, save->call);
    put_field(text, save->pack);
    put_field(text, save->unpack);
    put_field(text, save->release);
    msc__text_put_char(text, '\n');
}

static void put_pair(msc__text *text, const char *word, uint32_t first, uint32_t second)
{
    msc__text_put(text, word);
    put_field(text, first);
    put_field(text, second);
    msc__text_put_char(text, '\n');
}

static void put_note(msc__text *text, const msc_graph *graph, const char *word, const msc_note *note)
{
    msc__text_put(text, word);
    put_field(text, note->item);
    put_id(text, note->module);
    put_name(text, graph, note->text);
}

static void put_notes(msc__text *text, const msc_graph *graph)
{
    uint32_t i;

    for (i = 0; i < graph->op_notes.count; i++)
        put_note(text, graph, "op-note", (const msc_note *)graph->op_notes.items + i);
    for (i = 0; i < graph->buffer_notes.count; i++)
        put_note(text, graph, "buffer-note", (const msc_note *)graph->buffer_notes.items + i);
}

static void put_header(msc__text *text, const msc_graph *graph, bool notes, bool work)
{
    msc__graph_record count = notes ? MSC__GRAPH_RECORD_COUNT : MSC__GRAPH_RECORD_COUNT_BARE;
    msc__graph_record record;

    msc__text_put(text, "memscale-graph");
    put_field(text, MSC__GRAPH_VERSION(notes, work));
    msc__text_put(text, "\ncounts");
    for (record = 0; record < count; record++)
        put_field(text, msc__graph_record_count(graph, record));
    msc__text_put_char(text, '\n');
}

static void put_graph(msc__text *text, const msc_graph *graph, bool notes)
{
    const msc_input *inputs = graph->inputs.items;
    const msc_write *writes = graph->writes.items;
    bool work = msc__graph_has_work(graph);
    uint32_t i;

    put_header(text, graph, notes, work);
    for (i = 0; i < graph->modules.count; i++)
        put_module(text, graph, (const msc_module *)graph->modules.items + i);
    for (i = 0; i < graph->calls.count; i++)
        put_call(text, (const msc_call *)graph->calls.items + i);
    for (i = 0; i < graph->ops.count; i++)
        put_op(text, graph, (const msc_op *)graph->ops.items + i, work);
    for (i = 0; i < graph->buffers.count; i++)
        put_buffer(text, (const msc_buffer *)graph->buffers.items + i);
    for (i = 0; i < graph->saves.count; i++)
        put_save(text, (const msc_save *)graph->saves.items + i);
    for (i = 0; i < graph->inputs.count; i++)
        put_pair(text, "input", inputs[i].call, inputs[i].buffer);
    for (i = 0; i < graph->writes.count; i++)
        put_pair(text, "write", writes[i].op, writes[i].buffer);
    if (notes)
        put_notes(text, graph);
    msc__text_put(text, "end\n");
    msc__text_end(text);
}

bool msc__graph_has_work(const msc_graph *graph)
{
    const msc_op *ops = graph->ops.items;
    uint32_t i;

    for (i = 0; i < graph->ops.count; i++)
        if (ops[i].work != MSC_WORK_OTHER)
            return true;
    return false;
}

uint64_t msc__graph_text_digest(const msc_graph *graph)
{
    msc__text text;

    msc__text_init(&text, NULL, 0);
    put_graph(&text, graph, false);
    return text.digest;
}

msc_status msc_graph_format(const msc_graph *graph, char *buffer, size_t buffer_bytes, size_t *needed_bytes,
                            msc_error *err)
{
    msc__text text;

    if (!graph->finished)
        return msc__fail(err, MSC_ESTATE, "cannot format the graph: it is not finished");
    if (buffer == NULL && buffer_bytes > 0)
        return msc__fail(err, MSC_EINVAL, "cannot format the graph: buffer is NULL, its size %zu",
                         buffer_bytes);
    msc__text_init(&text, buffer, buffer_bytes);
    put_graph(&text, graph, msc__graph_has_notes(graph));
    if (needed_bytes != NULL)
        *needed_bytes = text.length;
    return MSC_OK;
}

/* ---- files --------------------------------------------------------------------------------------- */

/* Reports the present errno, which the next library call may overwrite. */
static msc_status fail_io(msc_error *err, const char *action, const char *path)
{
    int number = errno;
    char reason[128];
    msc_status status;

    if (strerror_r(number, reason, sizeof reason) != 0)
        reason[0] = '\0';
    status = msc__fail(err, MSC_EIO, "cannot %s %s: %s (error %d)", action, path, reason, number);
    if (err != NULL)
        err->driver_code = number;
    return status;
}

/* Creates the first of `name`.tmp00 ... .tmp99 that does not exist. `suffix` is the end of `name`. */
static FILE *create_temporary(const char *name, char *suffix)
{
    FILE *file = NULL;
    unsigned i;

    memcpy(suffix, ".tmp00", sizeof ".tmp00");
    for (i = 0; file == NULL && i < TEMPORARY_NAMES; i++) {
        suffix[4] = (char)('0' + i / 10);
        suffix[5] = (char)('0' + i % 10);
        errno = 0;
        file = fopen(name, "wbx");
        if (file == NULL && errno != EEXIST)
            break;
    }
    return file;
}

static msc_status write_and_rename(const char *text, size_t text_bytes, char *name, const char *path,
                                   msc_error *err)
{
    FILE *file = create_temporary(name, name + strlen(path));
    bool written;

    if (file == NULL)
        return fail_io(err, "create", name);
    written = fwrite(text, 1, text_bytes, file) == text_bytes;
    written = fflush(file) == 0 && written;
    if (!written) {
        msc_status status = fail_io(err, "write", name);
        (void)fclose(file);
        (void)remove(name);
        return status;
    }
    if (fclose(file) != 0 || rename(name, path) != 0) {
        msc_status status = fail_io(err, "replace", path);
        (void)remove(name);
        return status;
    }
    return MSC_OK;
}

msc_status msc_graph_save_file(const msc_graph *graph, const char *path, msc_error *err)
{
    char *text = NULL;
    char *name = NULL;
    size_t text_bytes = 0;
    size_t name_bytes;
    msc_status status;

    if (path == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot save the graph: path is NULL");
    status = msc_graph_format(graph, NULL, 0, &text_bytes, err);
    if (status != MSC_OK)
        return status;
    name_bytes = strlen(path) + SUFFIX_BYTES;
    text = msc__alloc(graph->ctx, text_bytes + 1);
    name = msc__alloc(graph->ctx, name_bytes);
    if (text == NULL || name == NULL) {
        status = msc__fail_memory(err, "the text of a graph", text_bytes);
        goto cleanup;
    }
    memcpy(name, path, strlen(path));
    status = msc_graph_format(graph, text, text_bytes + 1, NULL, err);
    if (status == MSC_OK)
        status = write_and_rename(text, text_bytes, name, path, err);

cleanup:
    msc__free(graph->ctx, text, text_bytes + 1);
    msc__free(graph->ctx, name, name_bytes);
    return status;
}

/* Appends the rest of the file to `text`, which doubles as it fills. */
static msc_status read_all(msc_context *ctx, FILE *file, const char *path, msc__array *text, msc_error *err)
{
    for (;;) {
        size_t room;
        size_t got;
        msc_status status = MSC_OK;
        if (text->count == text->capacity)
            status = msc__array_reserve(ctx, text, 1, FIRST_READ_BYTES, err);
        if (status != MSC_OK)
            return status;
        room = text->capacity - text->count;
        got = fread((char *)text->items + text->count, 1, room, file);
        MSC__ASSERT(got <= room && text->count <= text->capacity);
        text->count += (uint32_t)got;
        if (got < room)
            return ferror(file) ? fail_io(err, "read", path) : MSC_OK;
    }
}

msc_status msc_graph_load_file(msc_context *ctx, const char *path, msc_graph **out, msc_error *err)
{
    msc__array text = {0};
    FILE *file;
    msc_status status;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot load a graph: out is NULL");
    *out = NULL;
    if (ctx == NULL || path == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot load a graph: context or path is NULL");
    file = fopen(path, "rb");
    if (file == NULL)
        return fail_io(err, "open", path);
    status = read_all(ctx, file, path, &text, err);
    (void)fclose(file);
    if (status == MSC_OK)
        status = msc_graph_parse(ctx, text.items, text.count, out, err);
    msc__array_fini(ctx, &text, 1);
    return status;
}
