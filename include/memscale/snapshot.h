/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file snapshot.h
 * Memory snapshots of PyTorch: read safely, summed up, replayed through the allocator simulator.
 *
 * `torch.cuda.memory._dump_snapshot` writes a pickle: every segment and block that the CUDA caching
 * allocator holds, and the events that led there. This module reads such a file without executing
 * anything: a pickle that asks for an object to be built is refused. docs/formats/snapshot.md tells what
 * is read and what is not.
 *
 *     file ──► msc_snapshot ──► segments, blocks, events, frames     what was recorded
 *                    ├────────► msc_snapshot_sites                   whose memory it is
 *                    └────────► msc_snapshot_replay ◄── msc_sim      would the simulator have done the same?
 *
 * Frames, stacks and strings are stored once each and named by number. Stack 0 is empty and string
 * MSC_NONE is none. A snapshot never changes after it has been read; the queries that work something out
 * (totals, sites, replay) take memory from its context meanwhile, so they are for one thread at a time.
 */
#ifndef MEMSCALE_SNAPSHOT_H
#define MEMSCALE_SNAPSHOT_H

#include "base.h"
#include "sim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- records ------------------------------------------------------------------------------------ */

/** What the allocator did; names as in the file, see `msc_snapshot_action_name`. */
typedef enum msc_snapshot_action {
    MSC_SNAPSHOT_ACTION_ALLOC,
    MSC_SNAPSHOT_ACTION_FREE_REQUESTED, /**< the program gave it up; other streams may still use it */
    MSC_SNAPSHOT_ACTION_FREE_COMPLETED, /**< it can be used again */
    MSC_SNAPSHOT_ACTION_SEGMENT_ALLOC,
    MSC_SNAPSHOT_ACTION_SEGMENT_FREE,
    MSC_SNAPSHOT_ACTION_SEGMENT_MAP,   /**< an expandable segment grew */
    MSC_SNAPSHOT_ACTION_SEGMENT_UNMAP, /**< an expandable segment shrank */
    MSC_SNAPSHOT_ACTION_SNAPSHOT,      /**< a snapshot was taken */
    MSC_SNAPSHOT_ACTION_OOM,           /**< a request failed */
    MSC_SNAPSHOT_ACTION_WORKSPACE,     /**< a snapshot of a library's workspace */
    MSC_SNAPSHOT_ACTION_OTHER,         /**< a name that this version does not know */
    MSC_SNAPSHOT_ACTION_COUNT
} msc_snapshot_action;

typedef enum msc_snapshot_state {
    MSC_SNAPSHOT_STATE_INACTIVE,  /**< cached, free for reuse */
    MSC_SNAPSHOT_STATE_ALLOCATED, /**< in use by the program */
    MSC_SNAPSHOT_STATE_PENDING,   /**< given up, another stream still uses it */
    MSC_SNAPSHOT_STATE_COUNT
} msc_snapshot_state;

/** One entry of a trace: 48 bytes. */
typedef struct msc_snapshot_event {
    uint64_t address;    /**< OOM: bytes that the device had free */
    uint64_t size_bytes; /**< ALLOC, FREE_…: as requested; SEGMENT_…: of the range */
    uint64_t stream;     /**< handle of the stream; 0: the default one */
    int64_t time_us;
    uint32_t stack;           /**< 0: not recorded */
    uint32_t compile_context; /**< string, or MSC_NONE */
    uint32_t user_metadata;   /**< string, or MSC_NONE */
    uint8_t action;           /**< msc_snapshot_action */
    uint8_t pad[3];           /**< zero */
} msc_snapshot_event;

/** A piece of a segment: 32 bytes. */
typedef struct msc_snapshot_block {
    uint64_t address;
    uint64_t size_bytes;
    uint64_t requested_bytes;
    uint32_t stack; /**< where it was allocated */
    uint8_t state;  /**< msc_snapshot_state */
    uint8_t pad[3]; /**< zero */
} msc_snapshot_block;

/** Memory that the allocator has from the device. Of an expandable segment: one contiguous mapped range. */
typedef struct msc_snapshot_segment {
    uint64_t address;
    uint64_t total_bytes;
    uint64_t allocated_bytes;
    uint64_t active_bytes; /**< allocated, and given up but still in use */
    uint64_t requested_bytes;
    uint64_t stream;
    uint64_t pool[2];     /**< id of a private pool; 0, 0: the default one */
    uint32_t first_block; /**< index into `msc_snapshot_blocks` */
    uint32_t block_count;
    uint32_t stack;
    uint32_t device;
    uint8_t is_large;
    uint8_t is_expandable;
    uint8_t pad[6]; /**< zero */
} msc_snapshot_segment;

/** One line of a stack. */
typedef struct msc_snapshot_frame {
    uint32_t file;     /**< string */
    uint32_t function; /**< string */
    uint32_t line;
} msc_snapshot_frame;

/** A range marked by `record_function`. */
typedef struct msc_snapshot_annotation {
    int64_t time_us;
    uint32_t name;  /**< string, or MSC_NONE */
    uint32_t stage; /**< string such as "START", or MSC_NONE */
    uint32_t device;
    uint32_t pad; /**< zero */
} msc_snapshot_annotation;

/** Number of intervals of `roundup_power2_divisions`: sizes from 2^20 bytes on, doubling. */
#define MSC_SNAPSHOT_DIVISION_COUNT 16u

/** The allocator's settings when the snapshot was taken. What the file does not say has its default. */
typedef struct msc_snapshot_settings {
    uint64_t max_split_bytes;                        /**< UINT64_MAX: unlimited */
    uint32_t conf;                                   /**< PYTORCH_CUDA_ALLOC_CONF: string, or MSC_NONE */
    uint32_t garbage_collection_ppm;                 /**< threshold, in millionths; 0: off */
    uint32_t divisions[MSC_SNAPSHOT_DIVISION_COUNT]; /**< roundup_power2_divisions per interval; 0: off */
    uint8_t is_recorded;                             /**< 1: the file has settings */
    uint8_t has_numbers; /**< 1: the file has them as numbers too, which count where the text differs */
    uint8_t expandable_segments;
    uint8_t pad[5]; /**< zero */
} msc_snapshot_settings;

/** A device in sums. The peaks are those of the trace, from the state at its beginning on. */
typedef struct msc_snapshot_totals {
    uint64_t reserved_bytes;
    uint64_t allocated_bytes;
    uint64_t active_bytes;
    uint64_t requested_bytes;
    uint64_t reserved_peak_bytes;
    uint64_t requested_peak_bytes; /**< of what was allocated, not given up */
    uint64_t segment_count;
    uint64_t block_count;
    uint64_t event_count;
    uint64_t requested_peak_event; /**< event count: the peak is at the beginning */
    uint64_t action_count[MSC_SNAPSHOT_ACTION_COUNT];
} msc_snapshot_totals;

typedef struct msc_snapshot msc_snapshot;

/* ---- reading ------------------------------------------------------------------------------------ */

/**
 * Reads a snapshot from memory.
 *
 * Errors: EFORMAT (not such a pickle, or one that would execute something; the message names the offset),
 * ENOMEM, EOVERFLOW (2^31 records of a kind), EINVAL.
 * Cost: memory a small multiple of `size_bytes` at worst; usually less than the file.
 */
MSC_API MSC_NODISCARD msc_status msc_snapshot_parse(msc_context *ctx, const void *bytes, size_t size_bytes,
                                                    msc_snapshot **out, msc_error *err);

/** The same from a file, which is never held in memory as a whole. Errors: also EIO. */
MSC_API MSC_NODISCARD msc_status msc_snapshot_load(msc_context *ctx, const char *path, msc_snapshot **out,
                                                   msc_error *err);

MSC_API void msc_snapshot_destroy(msc_snapshot *snapshot);

/* ---- what was recorded -------------------------------------------------------------------------- */

/** One more than the highest device that has a segment or a trace. */
MSC_API uint32_t msc_snapshot_device_count(const msc_snapshot *snapshot);

/** Segments of a device by address; NULL and 0 for a device that has none. */
MSC_API const msc_snapshot_segment *msc_snapshot_segments(const msc_snapshot *snapshot, uint32_t device,
                                                          uint32_t *count);

/** Every block; a segment names its own by `first_block` and `block_count`. */
MSC_API const msc_snapshot_block *msc_snapshot_blocks(const msc_snapshot *snapshot, uint32_t *count);

/** Trace of a device, oldest first. */
MSC_API const msc_snapshot_event *msc_snapshot_events(const msc_snapshot *snapshot, uint32_t device,
                                                      uint32_t *count);

MSC_API const msc_snapshot_annotation *msc_snapshot_annotations(const msc_snapshot *snapshot,
                                                                uint32_t *count);

/** Frames of a stack, as ids, innermost first. */
MSC_API const uint32_t *msc_snapshot_stack(const msc_snapshot *snapshot, uint32_t stack, uint32_t *count);
MSC_API uint32_t msc_snapshot_stack_count(const msc_snapshot *snapshot);

/** A frame; `frame` must be below the count. */
MSC_API msc_snapshot_frame msc_snapshot_frame_at(const msc_snapshot *snapshot, uint32_t frame);
MSC_API uint32_t msc_snapshot_frame_count(const msc_snapshot *snapshot);

/** UTF-8 as in the file, with a terminator; "" for MSC_NONE. */
MSC_API const char *msc_snapshot_string(const msc_snapshot *snapshot, uint32_t string);

/** Settings that were in force, for a struct of `out_bytes`. */
MSC_API void msc_snapshot_settings_read(const msc_snapshot *snapshot, msc_snapshot_settings *out,
                                        size_t out_bytes);

/** The same for the struct of this header. */
static inline msc_snapshot_settings msc_snapshot_get_settings(const msc_snapshot *snapshot)
{
    msc_snapshot_settings settings;

    msc_snapshot_settings_read(snapshot, &settings, sizeof settings);
    return settings;
}

/** "alloc", "free_requested" … as in the file; "other" for MSC_SNAPSHOT_ACTION_OTHER. */
MSC_API const char *msc_snapshot_action_name(msc_snapshot_action action);

/** "inactive", "active_allocated" or "active_pending_free". */
MSC_API const char *msc_snapshot_state_name(msc_snapshot_state state);

/** Sums of a device, for a struct of `out_bytes`; zeros for one that there is not. Errors: ENOMEM, EINVAL (no such
    device). */
MSC_API MSC_NODISCARD msc_status msc_snapshot_totals_read(const msc_snapshot *snapshot, uint32_t device,
                                                          msc_snapshot_totals *out, size_t out_bytes,
                                                          msc_error *err);

/** The same for the struct of this header. */
MSC_NODISCARD static inline msc_status msc_snapshot_get_totals(const msc_snapshot *snapshot, uint32_t device,
                                                               msc_snapshot_totals *out, msc_error *err)
{
    return msc_snapshot_totals_read(snapshot, device, out, sizeof *out, err);
}

/* ---- whose memory it is ------------------------------------------------------------------------- */

typedef enum msc_snapshot_moment {
    MSC_SNAPSHOT_MOMENT_END, /**< when the snapshot was taken */
    MSC_SNAPSHOT_MOMENT_PEAK /**< when most bytes were requested, within the trace */
} msc_snapshot_moment;

/** Live memory that was allocated at one place of the program. */
typedef struct msc_snapshot_site {
    uint64_t requested_bytes;
    uint64_t allocation_count;
    uint32_t frame; /**< MSC_NONE: allocated before the trace began, or without a stack */
    uint32_t pad;   /**< zero */
} msc_snapshot_site;

/**
 * Live bytes of a device by the innermost frame of Python code; of a stack without any, by its first
 * frame that is not the recorder's or the allocator's.
 *
 * Sites come largest first, ties by frame.
 * @param sites at most `site_count` are written.
 * @param found optional: how many there are.
 * Errors: EINVAL (no such device), ENOMEM.
 */
MSC_API MSC_NODISCARD msc_status msc_snapshot_sites(const msc_snapshot *snapshot, uint32_t device,
                                                    msc_snapshot_moment moment, msc_snapshot_site *sites,
                                                    uint32_t site_count, uint32_t *found, msc_error *err);

/* ---- would the simulator have done the same? ---------------------------------------------------- */

/** What a snapshot does not say about the device. */
typedef struct msc_snapshot_replay_options {
    size_t struct_bytes;
    uint64_t device_total_bytes; /**< all memory of the device; UINT64_MAX: not known */
    uint64_t capacity_bytes;     /**< most that the driver gave; UINT64_MAX: not known */
    uint64_t allowed_bytes;      /**< the memory fraction in bytes; UINT64_MAX: none was set, or not known */
} msc_snapshot_replay_options;

/** What differed. */
typedef enum msc_snapshot_difference {
    MSC_SNAPSHOT_DIFFERENCE_NONE,
    MSC_SNAPSHOT_DIFFERENCE_SEGMENT, /**< a segment event */
    MSC_SNAPSHOT_DIFFERENCE_REQUEST, /**< a request failed here and not there, or the other way round */
    MSC_SNAPSHOT_DIFFERENCE_MAP,     /**< a segment or block at the end */
    MSC_SNAPSHOT_DIFFERENCE_COUNT
} msc_snapshot_difference;

/** One side of a difference. */
typedef struct msc_snapshot_finding {
    uint64_t address;
    uint64_t size_bytes;
    uint8_t is_there; /**< 0: this side has nothing here */
    uint8_t action;   /**< SEGMENT, REQUEST: msc_snapshot_action; MAP: msc_snapshot_state */
    uint8_t pad[6];   /**< zero */
} msc_snapshot_finding;

/**
 * Outcome of a replay. `difference` NONE means: every segment event, each in its place and with its
 * address, both peaks and, where `map_compared`, the whole map at the end are those recorded.
 */
typedef struct msc_snapshot_replay_result {
    uint32_t first_event;    /**< events before it were not replayed: others are missing in between,
                                     or the trace begins inside a request */
    uint32_t replayed_count; /**< allocations and frees that were played */
    uint32_t segment_count;  /**< recorded segment events that were compared */
    uint32_t difference_count;
    uint32_t release_count;        /**< releases of the cache that were taken from the trace, not predicted */
    uint32_t retry_count;          /**< requests that the simulator served after a release */
    uint32_t oom_count;            /**< requests that failed, in the trace */
    uint32_t start_block_count;    /**< blocks that were in use before the first event */
    uint32_t map_block_count;      /**< blocks of the snapshot that were compared */
    uint32_t difference_event;     /**< of the first difference: event count: at the end */
    msc_snapshot_finding expected; /**< recorded */
    msc_snapshot_finding got;      /**< simulated */
    uint64_t reserved_peak_bytes;
    uint64_t recorded_reserved_peak_bytes;
    uint64_t requested_peak_bytes; /**< of active blocks */
    uint64_t recorded_requested_peak_bytes;
    uint64_t allocated_peak_bytes; /**< simulated; a trace does not tell the sizes of blocks */
    uint64_t active_peak_bytes;    /**< simulated */
    uint8_t difference;            /**< msc_snapshot_difference: the first */
    uint8_t map_compared;          /**< 0: recording stopped before the snapshot was taken */
    uint8_t pad[6];                /**< zero */
} msc_snapshot_replay_result;

/** Nothing is known. */
MSC_API void msc_snapshot_replay_options_init(msc_snapshot_replay_options *options, size_t struct_bytes);

/** The same for the struct of this header. */
static inline msc_snapshot_replay_options msc_snapshot_replay_options_default(void)
{
    msc_snapshot_replay_options options;

    msc_snapshot_replay_options_init(&options, sizeof options);
    return options;
}

/**
 * Plays the trace of a device into a simulator with the snapshot's own settings and compares.
 *
 * What the trace does not begin with is put in place first: the segments and blocks that were there, walked
 * back from those at the end. A release of the cache is predicted where a limit is known (retries, garbage
 * collection); otherwise it is taken from the trace, which does not tell an `empty_cache` from a retry.
 *
 * @param options NULL for the defaults.
 * @param sim_options optional: receives the options of the simulator, as many bytes as its `struct_bytes` says.
 * @param out a struct of `out_bytes`.
 * Errors: EINVAL (no such device; a setting that the simulator does not know), EUNSUPPORTED (the state at
 * the beginning cannot be derived; the message says why), ENOMEM, EOVERFLOW. A difference is no error.
 */
MSC_API MSC_NODISCARD msc_status msc_snapshot_replay_into(const msc_snapshot *snapshot, uint32_t device,
                                                          const msc_snapshot_replay_options *options,
                                                          msc_sim_options *sim_options,
                                                          msc_snapshot_replay_result *out, size_t out_bytes,
                                                          msc_error *err);

/** The same for the structs of these headers; `sim_options` need not be initialised. */
MSC_NODISCARD static inline msc_status msc_snapshot_replay(const msc_snapshot *snapshot, uint32_t device,
                                                           const msc_snapshot_replay_options *options,
                                                           msc_sim_options *sim_options,
                                                           msc_snapshot_replay_result *out, msc_error *err)
{
    if (sim_options != NULL)
        sim_options->struct_bytes = sizeof *sim_options;
    return msc_snapshot_replay_into(snapshot, device, options, sim_options, out, sizeof *out, err);
}

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_SNAPSHOT_H */
