/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Canonical text back into a graph.
 *
 * The text may come from anyone. Three habits keep that harmless:
 *
 *  1. The counts line is a promise to be checked, never a size to be reserved. Records are appended as
 *     their lines are read, so memory is proportional to the text.
 *  2. A line is read by its kind alone: ranges that fit the fields. Whether the numbers make sense
 *     together is the business of graph_validate.c, which sees the whole.
 *  3. Only canonical text is accepted: what is read can be written again byte for byte. Otherwise two
 *     texts could stand for one graph, and the digest of a file would not be that of its graph.
 *
 * Since the layout is fixed, the line of any record follows from its index, so that a problem found at
 * the end can still name its line.
 */
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "base/reader.h"
#include "graph/graph_internal.h"

#define HEADER_LINES 2u /* version, counts */

typedef struct parser {
    msc__reader reader;
    msc_graph *graph;
    msc__graph_record kinds; /* that the version has: the first so many */
    bool notes;              /* the version has them */
    bool work;               /* operations have a class */
    uint32_t counts[MSC__GRAPH_RECORD_COUNT];
} parser;

/* ---- fields -------------------------------------------------------------------------------------- */

static bool read_u32(msc__reader *reader, uint32_t *value)
{
    uint64_t wide = 0;
    bool ok = msc__reader_u64(reader, MSC_NONE - 1, &wide);

    *value = (uint32_t)wide;
    return ok;
}

static bool read_u8(msc__reader *reader, uint8_t *value)
{
    uint64_t wide = 0;
    bool ok = msc__reader_u64(reader, UINT8_MAX, &wide);

    *value = (uint8_t)wide;
    return ok;
}

static bool read_id(msc__reader *reader, uint32_t *value)
{
    if (msc__reader_at_end(reader) || *reader->at != '-')
        return read_u32(reader, value);
    *value = MSC_NONE;
    return msc__reader_expect(reader, "-");
}

/* The reader takes a space after each word; at the end of a line there must be none. */
static bool read_line_end(msc__reader *reader)
{
    if (reader->status == MSC_OK && reader->at[-1] == ' ')
        return msc__reader_fail(reader, MSC_EFORMAT, "a space at the end of the line");
    return msc__reader_line_end(reader);
}

/* A name takes the rest of its line, after one space. */
static bool read_name(parser *p, uint32_t *string)
{
    const char *name;
    size_t bytes;
    msc_error problem;
    msc_status status;

    if (p->reader.status == MSC_OK && p->reader.at[-1] != ' ')
        return msc__reader_fail(&p->reader, MSC_EFORMAT, "a name is missing");
    if (!msc__reader_rest(&p->reader, &name, &bytes))
        return false;
    status = msc__graph_intern(p->graph, name, bytes, string, &problem);
    if (status != MSC_OK)
        return msc__reader_fail(&p->reader, status == MSC_EINVAL ? MSC_EFORMAT : status, problem.message);
    return msc__reader_line_end(&p->reader);
}

/* Appends a record whose line was read; the reader carries a lack of memory like any other failure. */
static bool append(parser *p, msc__array *array, size_t item_bytes, const void *item)
{
    msc_error problem;
    msc_status status;

    if (p->reader.status != MSC_OK)
        return false;
    MSC__ASSERT(item_bytes > 0 && !p->graph->finished);
    status = msc__array_push(p->graph->ctx, array, item_bytes, item, &problem);
    return status == MSC_OK || msc__reader_fail(&p->reader, status, problem.message);
}

/* ---- lines --------------------------------------------------------------------------------------- */

static bool read_module(parser *p)
{
    msc__reader *reader = &p->reader;
    msc_module module = {0};

    return read_id(reader, &module.parent) && read_u32(reader, &module.flags) &&
           msc__reader_hex64(reader, &module.structure) &&
           msc__reader_u64(reader, UINT64_MAX, &module.state_bytes) && read_name(p, &module.path) &&
           msc__reader_expect(reader, "type") && read_name(p, &module.type) &&
           append(p, &p->graph->modules, sizeof module, &module);
}

static bool read_call(parser *p)
{
    msc__reader *reader = &p->reader;
    msc_call call = {0};

    return read_u32(reader, &call.module) && read_id(reader, &call.parent) && read_u32(reader, &call.begin) &&
           read_u32(reader, &call.end) && read_line_end(reader) &&
           append(p, &p->graph->calls, sizeof call, &call);
}

static bool read_op(parser *p)
{
    msc__reader *reader = &p->reader;
    msc_op op = {0};

    return read_id(reader, &op.call) && read_u8(reader, &op.phase) && read_u8(reader, &op.flags) &&
           (!p->work || read_u8(reader, &op.work)) && msc__reader_u64(reader, UINT64_MAX, &op.flops) &&
           msc__reader_u64(reader, UINT64_MAX, &op.moved_bytes) &&
           msc__reader_u64(reader, UINT64_MAX, &op.scratch_bytes) && read_name(p, &op.name) &&
           append(p, &p->graph->ops, sizeof op, &op);
}

static bool read_buffer(parser *p)
{
    msc__reader *reader = &p->reader;
    msc_buffer buffer = {0};

    return msc__reader_u64(reader, UINT64_MAX, &buffer.size_bytes) && read_u8(reader, &buffer.category) &&
           read_u8(reader, &buffer.resident) && read_u32(reader, &buffer.begin) &&
           read_u32(reader, &buffer.end) && read_line_end(reader) &&
           append(p, &p->graph->buffers, sizeof buffer, &buffer);
}

static bool read_save(parser *p)
{
    msc__reader *reader = &p->reader;
    msc_save save = {0};

    return read_u32(reader, &save.buffer) && read_id(reader, &save.call) && read_u32(reader, &save.pack) &&
           read_u32(reader, &save.unpack) && read_u32(reader, &save.release) && read_line_end(reader) &&
           append(p, &p->graph->saves, sizeof save, &save);
}

static bool read_input(parser *p)
{
    msc__reader *reader = &p->reader;
    msc_input input = {0};
    bool added = true;
    msc_error problem;
    msc_status status;

    if (!read_u32(reader, &input.call) || !read_u32(reader, &input.buffer))
        return false;
    status = msc__graph_push_input(p->graph, input, &added, &problem);
    if (status != MSC_OK)
        return msc__reader_fail(reader, status, problem.message);
    if (!added)
        return msc__reader_fail(reader, MSC_EFORMAT, "the same input twice");
    return read_line_end(reader);
}

static bool read_write(parser *p)
{
    msc__reader *reader = &p->reader;
    msc_write write = {0};

    return read_u32(reader, &write.op) && read_u32(reader, &write.buffer) && read_line_end(reader) &&
           append(p, &p->graph->writes, sizeof write, &write);
}

static bool read_note(parser *p, msc__array *notes)
{
    msc_note note = {0};

    return read_u32(&p->reader, &note.item) && read_id(&p->reader, &note.module) &&
           read_name(p, &note.text) && append(p, notes, sizeof note, &note);
}

static bool read_op_note(parser *p)
{
    return read_note(p, &p->graph->op_notes);
}

static bool read_buffer_note(parser *p)
{
    return read_note(p, &p->graph->buffer_notes);
}

/* ---- the whole ----------------------------------------------------------------------------------- */

static bool read_header(parser *p)
{
    msc__reader *reader = &p->reader;
    uint64_t version = 0;
    size_t i;

    if (!msc__reader_expect(reader, "memscale-graph") || !msc__reader_u64(reader, UINT64_MAX, &version))
        return false;
    if (version == 0 || version > MSC__GRAPH_LAST_VERSION)
        return msc__reader_fail(reader, MSC_EVERSION, "a version other than 1 to 4");
    p->notes = version % 2 == 0;
    p->work = version > 2;
    p->kinds = p->notes ? MSC__GRAPH_RECORD_COUNT : MSC__GRAPH_RECORD_COUNT_BARE;
    if (!read_line_end(reader) || !msc__reader_expect(reader, "counts"))
        return false;
    for (i = 0; i < (size_t)p->kinds; i++) {
        if (!read_u32(reader, &p->counts[i]))
            return false;
    }
    if (p->notes && p->counts[MSC__GRAPH_OP_NOTE] == 0 && p->counts[MSC__GRAPH_BUFFER_NOTE] == 0)
        return msc__reader_fail(reader, MSC_EFORMAT, "a version with notes, without notes");
    return read_line_end(reader);
}

static bool read_records(parser *p)
{
    static bool (*const read[])(parser *) = {read_module, read_call,    read_op,
                                             read_buffer, read_save,    read_input,
                                             read_write,  read_op_note, read_buffer_note};
    msc__graph_record record;
    uint32_t i;

    for (record = 0; record < p->kinds; record++) {
        MSC__ASSERT(msc__graph_record_count(p->graph, record) == 0);
        for (i = 0; i < p->counts[record]; i++) {
            if (!msc__reader_expect(&p->reader, msc__graph_record_word(record)) || !read[record](p))
                return false;
        }
        MSC__ASSERT(msc__graph_record_count(p->graph, record) == p->counts[record]);
    }
    return true;
}

static bool read_end(parser *p)
{
    if (!msc__reader_expect(&p->reader, "end") || !read_line_end(&p->reader))
        return false;
    if (!msc__reader_at_end(&p->reader))
        return msc__reader_fail(&p->reader, MSC_EFORMAT, "text after the end");
    if (p->work && !msc__graph_has_work(p->graph))
        return msc__reader_fail(&p->reader, MSC_EFORMAT, "a version with classes of work, without any");
    return true;
}

/* The line of a record: every record before it has one line, except modules, which have two. */
static uint32_t line_of(const msc_graph *graph, msc__graph_record record, uint32_t index)
{
    uint32_t line = HEADER_LINES + 1;
    msc__graph_record before;

    MSC__ASSERT(index < msc__graph_record_count(graph, record));
    if (record == MSC__GRAPH_MODULE)
        return line + 2 * index;
    line += graph->modules.count;
    for (before = 0; before < record; before++)
        line += msc__graph_record_count(graph, before);
    return line + index;
}

static msc_status check(const msc_graph *graph, msc_error *err)
{
    msc__graph_problem found = msc__graph_validate(graph);

    if (found.status == MSC_OK)
        return MSC_OK;
    return msc__fail(err, found.status, "graph, line %u: %s %u: %s",
                     line_of(graph, found.record, found.index), msc__graph_record_word(found.record),
                     found.index, found.text);
}

static void sum_buffers(msc_graph *graph)
{
    const msc_buffer *buffers = graph->buffers.items;
    uint32_t i;

    for (i = 0; i < graph->buffers.count; i++)
        graph->buffer_bytes += buffers[i].size_bytes;
}

msc_status msc_graph_parse(msc_context *ctx, const char *text, size_t text_bytes, msc_graph **out,
                           msc_error *err)
{
    parser p = {.graph = NULL};
    msc_status status;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot parse a graph: out is NULL");
    *out = NULL;
    if (text == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot parse a graph: text is NULL");
    status = msc_graph_create(ctx, &p.graph, err);
    if (status != MSC_OK)
        return status;
    msc__reader_init(&p.reader, "graph", text, text_bytes, err);
    (void)(read_header(&p) && read_records(&p) && read_end(&p));
    status = p.reader.status;
    if (status == MSC_OK)
        status = check(p.graph, err);
    if (status != MSC_OK) {
        msc_graph_destroy(p.graph);
        return status;
    }
    sum_buffers(p.graph);
    msc__graph_freeze(p.graph);
    *out = p.graph;
    return MSC_OK;
}
