/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file graph.h
 * The memory graph: one training step as operations, buffers and saved tensors.
 *
 * This is the one structure that profiler, simulator, decision and report share. It records what a
 * *plain* step does. Every other step (with some modules checkpointed, say) is derived from it.
 *
 * Time is counted in operations. Position `t` is the gap right before operation `t`; a graph of n
 * operations has positions 0 … n. A buffer with `[begin, end)` is alive while operations `begin … end-1`
 * run. Four kinds of records hang on that axis:
 *
 *      position   0     1     2     3     4     5     6
 *      operation  | op0 | op1 | op2 | op3 | op4 | op5 |
 *      buffer A         [-----------)                        begin 1, end 3: no reference is left at 3
 *      save of A              P- - - - - -U- - -R            pack 2, unpack 4, release 5
 *      A is alive       [-----------------------)            until max(end, release)
 *
 *  - A **buffer** is one storage. Its `end` is the *natural* end: the position at which the last
 *    reference other than autograd's saved tensors was dropped. That is what makes derivation possible:
 *    a technique that does not keep a saved tensor gets the natural end. A recompute makes again what the
 *    first one made, but for buffers of MSC_CATEGORY_PARAMETER: weights that come for a while, which it finds.
 *  - A **save** is one saved tensor of the autograd graph: packed in forward, unpacked when backward
 *    needs it, released when its node has run. Several saves may share a buffer.
 *  - A **module** is an `nn.Module` by path; a **call** is one execution of its forward, an interval of
 *    operations. Calls nest. A module called twice has two calls, and a technique applies to both.
 *  - A **write** is an in-place change of a buffer. Re-running an interval that writes to memory from
 *    outside is not allowed, so writes decide what can be checkpointed.
 *
 * A graph is built by streaming these records in program order, then `msc_graph_finish` validates it
 * and freezes it. A frozen graph is immutable and can be read from several threads.
 */
#ifndef MEMSCALE_GRAPH_H
#define MEMSCALE_GRAPH_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct msc_graph msc_graph;

/** Phase of a step. */
typedef enum msc_phase {
    MSC_PHASE_FORWARD,
    MSC_PHASE_BACKWARD,
    MSC_PHASE_OPTIMIZER,
    MSC_PHASE_COUNT
} msc_phase;

/** What a buffer is for. */
typedef enum msc_category {
    MSC_CATEGORY_PARAMETER,
    MSC_CATEGORY_BUFFER, /**< a module's registered buffer */
    MSC_CATEGORY_GRADIENT,
    MSC_CATEGORY_OPTIMIZER_STATE,
    MSC_CATEGORY_INPUT,
    MSC_CATEGORY_ACTIVATION, /**< made in forward and saved, or alive when forward ends */
    MSC_CATEGORY_TEMPORARY,
    MSC_CATEGORY_WORKSPACE, /**< kept by a library between operations, such as cuBLAS's */
    MSC_CATEGORY_COUNT
} msc_category;

/** Flags of an operation. */
enum {
    MSC_OP_RANDOM = 1u << 0, /**< draws random numbers */
    MSC_OP_HALF = 1u << 1    /**< works on half precision: BF16, FP16 or less */
};

/**
 * What limits an operation: its class. Operations of one class on one machine move, or compute, at about the
 * same rate; between classes the rates differ by up to two orders of magnitude.
 */
typedef enum msc_work {
    MSC_WORK_OTHER,            /**< none of the others, or unknown */
    MSC_WORK_MOVE,             /**< element by element, waits for memory: copies, sums, ReLU */
    MSC_WORK_MATH,             /**< element by element, with a function in it: exp, GELU, sigmoid */
    MSC_WORK_SLOW_MATH,        /**< the same, with one that takes longer: tanh, power */
    MSC_WORK_REDUCE,           /**< over the innermost dimension: softmax, layer norm, sums */
    MSC_WORK_CHANNEL,          /**< statistics of channels: batch norm, variance */
    MSC_WORK_SELECT,           /**< by a mask, or in another order: where, copies that transpose */
    MSC_WORK_WINDOW,           /**< pooling, interpolation */
    MSC_WORK_RANDOM,           /**< draws a random number per element */
    MSC_WORK_GATHER,           /**< rows by index: embedding, scatter */
    MSC_WORK_MATRIX,           /**< matrix products */
    MSC_WORK_BATCH,            /**< many small matrix products at once */
    MSC_WORK_ATTENTION,        /**< scaled dot-product attention in one kernel */
    MSC_WORK_CONVOLUTION,      /**< dense convolutions */
    MSC_WORK_GROUPED,          /**< convolutions of each channel, or few, by itself */
    MSC_WORK_GROUPED_GRADIENT, /**< gradients of such */
    MSC_WORK_RECURRENT,        /**< recurrent layers in one kernel */
    MSC_WORK_COUNT
} msc_work;

/** Flags of a module: reasons, found while tracing or given by the caller, why its calls must not be executed a second
 *  time; and one which is none. */
enum {
    MSC_MODULE_ROOT = 1u << 0,         /**< the whole model */
    MSC_MODULE_PYTHON_STATE = 1u << 1, /**< forward changed an attribute that is not a buffer */
    MSC_MODULE_NO_FORWARD = 1u << 2,   /**< not called through its own forward in a usual way */
    MSC_MODULE_NOT_TENSORS = 1u << 3,  /**< fills an object that is not a tensor, e.g. a cache */
    MSC_MODULE_EXCLUDED = 1u << 4,     /**< the caller forbids it, and calls around its calls with it */
    MSC_MODULE_HOOKED = 1u << 5,       /**< a module below has forward hooks, which would fire twice */
    MSC_MODULE_CHAIN = 1u << 6,        /**< no reason: its forward calls its children one after another, each
                                            on the result of the one before, and does nothing else */
    MSC_MODULE_NO_ROOM = 1u << 7,      /**< a recompute needs more streamed weights than there is room for */
    /** A buffer that it reads, and does not change itself, is changed after it ran. What `msc_graph_add_input` names is
        seen without this. */
    MSC_MODULE_INPUT_CHANGED = 1u << 8,
    MSC_MODULE_LEFT_OUT = 1u << 9,  /**< the caller forbids it alone, and not calls around its calls */
    MSC_MODULE_DIFFERED = 1u << 10, /**< a recompute of it was seen to differ from its forward */
    MSC_MODULE_SCRIPTED = 1u << 11  /**< calls TorchScript, which compiles after so many calls */
};

/** One operation. */
typedef struct msc_op {
    uint32_t name;          /**< index into the graph's strings */
    uint32_t call;          /**< innermost call, or MSC_NONE */
    uint8_t phase;          /**< msc_phase */
    uint8_t flags;          /**< MSC_OP_… */
    uint8_t work;           /**< msc_work */
    uint8_t pad;            /**< zero */
    uint32_t pad2;          /**< zero */
    uint64_t flops;         /**< floating-point operations */
    uint64_t moved_bytes;   /**< bytes read plus bytes written */
    uint64_t scratch_bytes; /**< allocated and freed inside the kernel, beyond its outputs */
} msc_op;

/** One storage. */
typedef struct msc_buffer {
    uint64_t size_bytes;
    uint32_t begin;   /**< operation that made it; with `resident` set: that it appears with in the first
                           step of a run, 0: there from the start */
    uint32_t end;     /**< natural end; op count + 1: outlives the step */
    uint8_t category; /**< msc_category */
    uint8_t resident; /**< 1: alive before the first operation */
    uint16_t pad;     /**< zero */
    uint32_t pad2;    /**< zero */
} msc_buffer;

/** One saved tensor. `pack <= unpack <= release`; a save that is never unpacked has unpack == release. */
typedef struct msc_save {
    uint32_t buffer;
    uint32_t call; /**< innermost call at pack, or MSC_NONE */
    uint32_t pack;
    uint32_t unpack;
    uint32_t release;
} msc_save;

/** One module. */
typedef struct msc_module {
    uint32_t path;        /**< string: qualified name, "" for the root */
    uint32_t type;        /**< string: class name */
    uint32_t parent;      /**< nearest enclosing module in the graph, or MSC_NONE */
    uint32_t flags;       /**< MSC_MODULE_… */
    uint64_t structure;   /**< equal for modules of equal structure; 0: unknown, equal to nothing */
    uint64_t state_bytes; /**< what a second execution needs beside inputs: RNG state, buffer copies; twice
                               while it runs */
} msc_module;

/** One execution of a module's forward: operations `begin … end-1`. */
typedef struct msc_call {
    uint32_t module;
    uint32_t parent; /**< enclosing call, or MSC_NONE */
    uint32_t begin;
    uint32_t end;
} msc_call;

/** A tensor that enters a call from outside as an argument. */
typedef struct msc_input {
    uint32_t call;
    uint32_t buffer;
} msc_input;

/** An in-place change of a buffer by operation `op`. */
typedef struct msc_write {
    uint32_t op;
    uint32_t buffer;
} msc_write;

/**
 * A remark on an operation or a buffer, for those who read a report: no rule, cost or digest depends on it.
 *
 * Of an operation: the module it works for, where that is not the one of its call (backward), and the line of
 * the program that runs it. Of a buffer: the module it belongs to, where that is not the one of the operation
 * that made it (parameters), and what it holds, such as "float32[4, 512, 768] h.0.ln_1.weight".
 */
typedef struct msc_note {
    uint32_t item;   /**< operation or buffer */
    uint32_t module; /**< or MSC_NONE */
    uint32_t text;   /**< index into the graph's strings */
} msc_note;

/* ---- lifecycle --------------------------------------------------------------------------------- */

/** Creates an empty graph, open for building. Errors: ENOMEM. */
MSC_API MSC_NODISCARD msc_status msc_graph_create(msc_context *ctx, msc_graph **out, msc_error *err);

/** Ends a graph. NULL is accepted. */
MSC_API void msc_graph_destroy(msc_graph *graph);

/* ---- building, in program order ---------------------------------------------------------------- */

/**
 * Adds a module. The parent must have been added before.
 * @param path,type copied; at most 4096 bytes each, no control characters.
 * @param desc      `path` and `type` in it are ignored.
 * @param out       the new id; ids count from 0. May be NULL.
 * Errors: EINVAL, ENOMEM, ESTATE (graph is finished). The graph is unchanged on error.
 */
MSC_API MSC_NODISCARD msc_status msc_graph_add_module(msc_graph *graph, const char *path, const char *type,
                                                      const msc_module *desc, uint32_t *out, msc_error *err);

/** Adds flags and state bytes to a module that was added before. Errors: EINVAL, ESTATE. */
MSC_API MSC_NODISCARD msc_status msc_graph_mark_module(msc_graph *graph, uint32_t module, uint32_t flags,
                                                       uint64_t state_bytes, msc_error *err);

/** Sets the phase of the operations to come. Phases never go back. Errors: EINVAL, ESTATE. */
MSC_API MSC_NODISCARD msc_status msc_graph_set_phase(msc_graph *graph, msc_phase phase, msc_error *err);

/** Enters a call of `module` at the present position. Errors: EINVAL, ENOMEM, ESTATE. */
MSC_API MSC_NODISCARD msc_status msc_graph_begin_call(msc_graph *graph, uint32_t module, uint32_t *out,
                                                      msc_error *err);

/** Leaves the innermost open call, which must be `call`. Errors: EINVAL, ESTATE. */
MSC_API MSC_NODISCARD msc_status msc_graph_end_call(msc_graph *graph, uint32_t call, msc_error *err);

/** `buffer` is an argument of the open call; duplicates are ignored. Errors: EINVAL, ENOMEM, ESTATE. */
MSC_API MSC_NODISCARD msc_status msc_graph_add_input(msc_graph *graph, uint32_t call, uint32_t buffer,
                                                     msc_error *err);

/**
 * Adds an operation inside the innermost open call and in the present phase.
 *
 * @param name copied and interned; at most 4096 bytes, no control characters.
 * @param desc `name`, `call` and `phase` in it are ignored.
 * Errors: EINVAL, ENOMEM, ESTATE, EOVERFLOW (more than 2^31 operations).
 */
MSC_API MSC_NODISCARD msc_status msc_graph_add_op(msc_graph *graph, const char *name, const msc_op *desc,
                                                  uint32_t *out, msc_error *err);

/**
 * Adds a buffer: made by the operation added last, or, before the first operation, resident.
 * It is open-ended until `msc_graph_end_buffer`.
 * Errors: EINVAL (category), ENOMEM, ESTATE, EOVERFLOW (sum of all buffers above 2^62 bytes).
 */
MSC_API MSC_NODISCARD msc_status msc_graph_add_buffer(msc_graph *graph, uint64_t size_bytes,
                                                      msc_category category, uint32_t *out, msc_error *err);

/** Adds a resident buffer at any time: alive from position 0. Otherwise as `msc_graph_add_buffer`. */
MSC_API MSC_NODISCARD msc_status msc_graph_add_resident(msc_graph *graph, uint64_t size_bytes,
                                                        msc_category category, uint32_t *out, msc_error *err);

/**
 * Adds a resident buffer that only later steps of a run find: in the first one it appears with the operation
 * added last, after its results, and stays (a library's workspace, say). Otherwise as
 * `msc_graph_add_resident`. Errors: also ESTATE (no operation yet).
 */
MSC_API MSC_NODISCARD msc_status msc_graph_add_late(msc_graph *graph, uint64_t size_bytes,
                                                    msc_category category, uint32_t *out, msc_error *err);

/**
 * Says that a resident buffer appears with the operation to come, before its results, when a run starts:
 * state that an optimizer makes when it steps for the first time. State that is there from the start is not
 * late. Errors: EINVAL (no such buffer, or not resident), ESTATE.
 */
MSC_API MSC_NODISCARD msc_status msc_graph_make_late(msc_graph *graph, uint32_t buffer, msc_error *err);

/** Sets the category of a buffer, e.g. once it is known to be a gradient. Errors: EINVAL, ESTATE. */
MSC_API MSC_NODISCARD msc_status msc_graph_set_category(msc_graph *graph, uint32_t buffer,
                                                        msc_category category, msc_error *err);

/**
 * Sets the size of a buffer that is known later: of memory for this and what comes next, say.
 * Errors: EINVAL (no such buffer), ESTATE, EOVERFLOW (sum of all buffers above 2^62 bytes).
 */
MSC_API MSC_NODISCARD msc_status msc_graph_set_size(msc_graph *graph, uint32_t buffer, uint64_t size_bytes,
                                                    msc_error *err);

/** Natural end of a buffer at the present position. Errors: EINVAL (unknown, or ended before), ESTATE. */
MSC_API MSC_NODISCARD msc_status msc_graph_end_buffer(msc_graph *graph, uint32_t buffer, msc_error *err);

/** Notes an in-place change of `buffer` by the operation added last. Errors: EINVAL, ENOMEM, ESTATE. */
MSC_API MSC_NODISCARD msc_status msc_graph_add_write(msc_graph *graph, uint32_t buffer, msc_error *err);

/** Packs a saved tensor at the present position. Errors: EINVAL, ENOMEM, ESTATE. */
MSC_API MSC_NODISCARD msc_status msc_graph_add_save(msc_graph *graph, uint32_t buffer, uint32_t *out,
                                                    msc_error *err);

/** First use of a save in backward. Later uses change nothing. Errors: EINVAL, ESTATE. */
MSC_API MSC_NODISCARD msc_status msc_graph_unpack(msc_graph *graph, uint32_t save, msc_error *err);

/** Release of a save. Errors: EINVAL (unknown, or released before), ESTATE. */
MSC_API MSC_NODISCARD msc_status msc_graph_release(msc_graph *graph, uint32_t save, msc_error *err);

/**
 * Puts a note on the operation added last.
 * @param module or MSC_NONE.
 * @param source such as "package/file.py:123"; at most 4096 bytes, no control characters, may be empty.
 * Errors: EINVAL (no operation yet, or it has a note), ENOMEM, ESTATE. The graph is unchanged on error.
 */
MSC_API MSC_NODISCARD msc_status msc_graph_note_op(msc_graph *graph, uint32_t module, const char *source,
                                                   msc_error *err);

/** Puts a note on a buffer; it replaces an earlier one. Otherwise as `msc_graph_note_op`. */
MSC_API MSC_NODISCARD msc_status msc_graph_note_buffer(msc_graph *graph, uint32_t buffer, uint32_t module,
                                                       const char *what, msc_error *err);

/**
 * Closes open calls, ends what is open, validates the whole and freezes the graph.
 * Buffers without an end outlive the step; saves without a release are released at the last position.
 * Errors: ENOMEM, ESTATE (finished before), EFORMAT (inconsistent; the message names the record).
 */
MSC_API MSC_NODISCARD msc_status msc_graph_finish(msc_graph *graph, msc_error *err);

/* ---- reading; counts are always valid, the arrays until the graph changes or ends --------------- */

MSC_API uint32_t msc_graph_op_count(const msc_graph *graph);
MSC_API uint32_t msc_graph_buffer_count(const msc_graph *graph);
MSC_API uint32_t msc_graph_save_count(const msc_graph *graph);
MSC_API uint32_t msc_graph_module_count(const msc_graph *graph);
MSC_API uint32_t msc_graph_call_count(const msc_graph *graph);
MSC_API uint32_t msc_graph_input_count(const msc_graph *graph);
MSC_API uint32_t msc_graph_write_count(const msc_graph *graph);
MSC_API const msc_op *msc_graph_ops(const msc_graph *graph);
MSC_API const msc_buffer *msc_graph_buffers(const msc_graph *graph);
MSC_API const msc_save *msc_graph_saves(const msc_graph *graph);
MSC_API const msc_module *msc_graph_modules(const msc_graph *graph);
MSC_API const msc_call *msc_graph_calls(const msc_graph *graph);
MSC_API const msc_input *
msc_graph_inputs(const msc_graph *graph); /**< sorted by call, then order of addition */
MSC_API const msc_write *msc_graph_writes(const msc_graph *graph); /**< in program order */

/** Notes of a finished graph, sorted by item, each item at most once. */
MSC_API uint32_t msc_graph_op_note_count(const msc_graph *graph);
MSC_API uint32_t msc_graph_buffer_note_count(const msc_graph *graph);
MSC_API const msc_note *msc_graph_op_notes(const msc_graph *graph);
MSC_API const msc_note *msc_graph_buffer_notes(const msc_graph *graph);

/** The note on an operation or buffer of a finished graph, or NULL. Cost: a binary search. */
MSC_API const msc_note *msc_graph_op_note(const msc_graph *graph, uint32_t op);
MSC_API const msc_note *msc_graph_buffer_note(const msc_graph *graph, uint32_t buffer);

/** The module that a buffer of a finished graph belongs to, by its note, the note on the operation that made
 *  it, or that operation's call, in this order; MSC_NONE if none says. */
MSC_API uint32_t msc_graph_module_of_buffer(const msc_graph *graph, uint32_t buffer);

/** The same for an operation: its note, else its call. */
MSC_API uint32_t msc_graph_module_of_op(const msc_graph *graph, uint32_t op);

/** An interned string, or "" for an unknown index. */
MSC_API const char *msc_graph_string(const msc_graph *graph, uint32_t index);

/** 1 when the graph is finished. */
MSC_API int msc_graph_is_finished(const msc_graph *graph);

/** Digest of a finished graph's canonical text without its notes; 0 for an open one. Steps that are equal
 *  but for notes have equal digests. */
MSC_API uint64_t msc_graph_digest(const msc_graph *graph);

/** Position at which each buffer of the *plain* step really ends: max(end, its saves' releases).
 *  @param out array of `msc_graph_buffer_count` positions. Errors: ESTATE (not finished). */
MSC_API MSC_NODISCARD msc_status msc_graph_plain_ends(const msc_graph *graph, uint32_t *out, msc_error *err);

/* ---- text format, docs/formats/graph.md ---------------------------------------------------------- */

/**
 * Writes the canonical text of a finished graph to `path`, through a temporary file beside it, so that a
 * failure leaves what was there before.
 * Errors: ESTATE, EIO, ENOMEM.
 */
MSC_API MSC_NODISCARD msc_status msc_graph_save_file(const msc_graph *graph, const char *path,
                                                     msc_error *err);

/** Reads a graph from a file. The result is finished. Errors: EIO, EFORMAT, EVERSION, ENOMEM, EOVERFLOW. */
MSC_API MSC_NODISCARD msc_status msc_graph_load_file(msc_context *ctx, const char *path, msc_graph **out,
                                                     msc_error *err);

/**
 * Reads a graph from text in memory. Memory used is proportional to the text's length, never to a number
 * that the text claims. The message names the line.
 * Errors: EFORMAT, EVERSION, ENOMEM, EOVERFLOW.
 */
MSC_API MSC_NODISCARD msc_status msc_graph_parse(msc_context *ctx, const char *text, size_t text_bytes,
                                                 msc_graph **out, msc_error *err);

/**
 * Writes the canonical text of a finished graph into `buffer`, as `snprintf` does: at most `buffer_bytes`
 * bytes with a terminator, and `*needed_bytes` is the full length without it.
 * Errors: ESTATE, EINVAL.
 */
MSC_API MSC_NODISCARD msc_status msc_graph_format(const msc_graph *graph, char *buffer, size_t buffer_bytes,
                                                  size_t *needed_bytes, msc_error *err);

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_GRAPH_H */
