/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file graph_internal.h
 * The graph's own structure, shared by the files of this folder and by nobody else.
 *
 * graph.c           lifecycle and queries
 * graph_strings.c   interned strings
 * graph_build.c     streaming builders
 * graph_notes.c     notes on operations and buffers
 * graph_validate.c  what must hold in a finished graph
 * graph_liveness.c  when buffers of the plain step end
 * graph_io.c        canonical text, digest, files
 * graph_parse.c     canonical text back into a graph
 */
#ifndef MSC_GRAPH_INTERNAL_H
#define MSC_GRAPH_INTERNAL_H

#include <stdbool.h>

#include "base/array.h"
#include "base/hash_index.h"
#include "memscale/graph.h"

#define MSC__GRAPH_MOST_STRING_BYTES 4096u
#define MSC__GRAPH_MOST_BUFFER_BYTES ((uint64_t)1 << 62) /* of all buffers together */
#define MSC__GRAPH_OP_FLAGS ((uint32_t)(MSC_OP_RANDOM | MSC_OP_HALF))
#define MSC__GRAPH_MODULE_FLAGS                                                                              \
    ((uint32_t)(MSC_MODULE_ROOT | MSC_MODULE_PYTHON_STATE | MSC_MODULE_NO_FORWARD | MSC_MODULE_NOT_TENSORS | \
                MSC_MODULE_EXCLUDED | MSC_MODULE_HOOKED | MSC_MODULE_CHAIN | MSC_MODULE_NO_ROOM |            \
                MSC_MODULE_INPUT_CHANGED | MSC_MODULE_LEFT_OUT | MSC_MODULE_DIFFERED | MSC_MODULE_SCRIPTED))

struct msc_graph {
    msc_context *ctx;
    msc__array modules;      /**< msc_module */
    msc__array calls;        /**< msc_call, in order of entry */
    msc__array ops;          /**< msc_op */
    msc__array buffers;      /**< msc_buffer; while building, `end` is MSC_NONE until it is known */
    msc__array saves;        /**< msc_save; while building, `unpack` and `release` likewise */
    msc__array inputs;       /**< msc_input; sorted by call once finished */
    msc__array writes;       /**< msc_write */
    msc__array op_notes;     /**< msc_note */
    msc__array buffer_notes; /**< msc_note; sorted once finished */
    msc__array chars;        /**< char: all strings, each terminated */
    msc__array strings;      /**< uint32_t: offset of each string in `chars` */
    msc__hash_index string_table;
    msc__hash_index input_table; /**< only while building */
    uint64_t buffer_bytes;       /**< sum over `buffers` */
    uint64_t digest;             /**< of the canonical text, once finished */
    uint32_t open_call;          /**< innermost, while building */
    uint8_t phase;               /**< msc_phase of the operations to come */
    uint8_t finished;
};

/** Kinds of records, in the order of the text format, with the words that name them there. */
#define MSC__GRAPH_RECORD_LIST(X)                                                                            \
    X(MODULE, "module")                                                                                      \
    X(CALL, "call")                                                                                          \
    X(OP, "op")                                                                                              \
    X(BUFFER, "buffer")                                                                                      \
    X(SAVE, "save")                                                                                          \
    X(INPUT, "input")                                                                                        \
    X(WRITE, "write")                                                                                        \
    X(OP_NOTE, "op-note")                                                                                    \
    X(BUFFER_NOTE, "buffer-note")

/** Kinds of records that a text without notes has. */
#define MSC__GRAPH_RECORD_COUNT_BARE MSC__GRAPH_OP_NOTE

/** Version of a text: 1, one more with notes, two more with classes of work. */
#define MSC__GRAPH_VERSION(notes, work) (1u + ((notes) ? 1u : 0u) + ((work) ? 2u : 0u))
#define MSC__GRAPH_LAST_VERSION MSC__GRAPH_VERSION(1, 1)

typedef enum msc__graph_record {
#define MSC__GRAPH_RECORD_ENUM(name, word) MSC__GRAPH_##name,
    MSC__GRAPH_RECORD_LIST(MSC__GRAPH_RECORD_ENUM)
#undef MSC__GRAPH_RECORD_ENUM
        MSC__GRAPH_RECORD_COUNT
} msc__graph_record;

/** The first inconsistency of a graph. */
typedef struct msc__graph_problem {
    msc_status status; /**< MSC_OK: there is none */
    msc__graph_record record;
    uint32_t index;
    const char *text; /**< a clause such as "begins after its end" */
} msc__graph_problem;

/* graph.c */

/** The word of a record kind. */
const char *msc__graph_record_word(msc__graph_record record);
/** Number of records of a kind. */
uint32_t msc__graph_record_count(const msc_graph *graph, msc__graph_record record);

/* graph_strings.c */

/** Interns `bytes` bytes at `string`. Errors: EINVAL (too long, control character), ENOMEM, EOVERFLOW. */
msc_status msc__graph_intern(msc_graph *graph, const char *string, size_t bytes, uint32_t *out,
                             msc_error *err);
/* graph_build.c */

/** Appends an input unless it is there already; `*added` says which. Errors: ENOMEM, EOVERFLOW. */
msc_status msc__graph_push_input(msc_graph *graph, msc_input input, bool *added, msc_error *err);
/** Freezes a consistent graph: computes the digest and drops what only building needs. */
void msc__graph_freeze(msc_graph *graph);

/* graph_notes.c */

/** Brings the notes on buffers in order, the last of each buffer. Errors: ENOMEM. */
msc_status msc__graph_sort_notes(msc_graph *graph, msc_error *err);
/** Whether a text of this graph has notes. */
bool msc__graph_has_notes(const msc_graph *graph);

/* graph_validate.c */

/** Checks every rule. Needs no memory. */
msc__graph_problem msc__graph_validate(const msc_graph *graph);

/* graph_io.c */

/** Whether an operation of this graph has a class of work, so that its text has a field for it. */
bool msc__graph_has_work(const msc_graph *graph);
/** Digest of the canonical text without notes. */
uint64_t msc__graph_text_digest(const msc_graph *graph);

#endif /* MSC_GRAPH_INTERNAL_H */
