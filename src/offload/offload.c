/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Creates and destroys an engine.
 *
 * Everything is zero at first, so `destroy` works on what `create` left half done. Threads start last and end
 * first: while they run, all else exists.
 */
#include "memscale/offload.h"

#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/sized.h"
#include "offload/offload_engine.h"

#define CHUNK_ALIGNMENT MSC__FILE_PAGE
#define MOST_CHUNK_BYTES (1ull << 30)
#define MOST_STAGING 64u

void msc_offload_options_init(msc_offload_options *out, size_t struct_bytes)
{
    msc_offload_options options;

    memset(&options, 0, sizeof options);
    options.chunk_bytes = 2ull << 20;
    options.staging_count = 4;
    options.prefetch_count = 8;
    options.prefetch_bytes = 256ull << 20;
    msc__sized_init(out, struct_bytes, &options, sizeof options);
}

static msc_status check_options(const msc_offload_options *options, msc_error *err)
{
    const uint64_t *limit = options->limit_bytes;

    if (limit[MSC_TIER_PINNED] == 0 && limit[MSC_TIER_HOST] == 0 && limit[MSC_TIER_FILE] == 0)
        return msc__fail(err, MSC_EINVAL, "limit_bytes are all 0: at least one tier must have room");
    if (options->chunk_bytes == 0 || options->chunk_bytes % CHUNK_ALIGNMENT != 0 ||
        options->chunk_bytes > MOST_CHUNK_BYTES)
        return msc__fail(err, MSC_EINVAL, "chunk_bytes is %llu, allowed are multiples of %u up to %llu",
                         (unsigned long long)options->chunk_bytes, CHUNK_ALIGNMENT, MOST_CHUNK_BYTES);
    if (options->staging_count < 2 || options->staging_count > MOST_STAGING)
        return msc__fail(err, MSC_EINVAL, "staging_count is %u, allowed are 2 to %u", options->staging_count,
                         MOST_STAGING);
    if (options->prefetch_count > MSC__OFFLOAD_AHEAD_MOST)
        return msc__fail(err, MSC_EINVAL, "prefetch_count is %u, allowed are 0 to %u",
                         options->prefetch_count, MSC__OFFLOAD_AHEAD_MOST);
    return MSC_OK;
}

static msc_status copy_directory(msc_offload *engine, msc_error *err)
{
    const char *directory = engine->options.directory != NULL ? engine->options.directory : "/tmp";
    size_t bytes = strlen(directory) + 1;

    engine->directory = msc__alloc(engine->ctx, bytes);
    if (engine->directory == NULL)
        return msc__fail_memory(err, "the name of a directory", bytes);
    memcpy(engine->directory, directory, bytes);
    engine->options.directory = NULL;
    return MSC_OK;
}

static msc_status init_parts(msc_offload *engine, msc_error *err)
{
    size_t trace_bytes = engine->options.trace_count * sizeof *engine->trace;
    msc_status status = copy_directory(engine, err);

    if (status == MSC_OK)
        status = msc__places_init(engine, err);
    if (status == MSC_OK && trace_bytes > 0) {
        engine->trace = msc__alloc(engine->ctx, trace_bytes);
        if (engine->trace == NULL)
            status = msc__fail_memory(err, "events", trace_bytes);
    }
    if (status == MSC_OK)
        status = msc__lane_init(engine, &engine->out, err);
    if (status == MSC_OK)
        status = msc__lane_init(engine, &engine->in, err);
    engine->out.file = engine->file;
    if (status == MSC_OK && engine->file != NULL)
        status = msc__file_share(engine->file, &engine->in.file, err);
    return status;
}

static msc_status start(msc_offload *engine, msc_error *err)
{
    msc_status status = msc__lane_start(&engine->out, &msc__direction_out, "memscale-out", err);

    return status == MSC_OK ? msc__lane_start(&engine->in, &msc__direction_in, "memscale-in", err) : status;
}

msc_status msc_offload_create(msc_context *ctx, msc_device *device, const msc_offload_options *options,
                              msc_offload **out, msc_error *err)
{
    msc_offload_options used = msc_offload_options_default();
    msc_offload *engine;
    msc_status status;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "out is NULL");
    *out = NULL;
    if (ctx == NULL || device == NULL || options == NULL)
        return msc__fail(err, MSC_EINVAL, "ctx, device or options is NULL");
    status = MSC__READ_OPTIONS("", msc_offload_options, limit_bytes, options, &used, err);
    if (status == MSC_OK)
        status = check_options(&used, err);
    if (status != MSC_OK)
        return status;
    engine = msc__alloc(ctx, sizeof *engine);
    if (engine == NULL)
        return msc__fail_memory(err, "an engine", sizeof *engine);
    engine->ctx = ctx;
    engine->device = device;
    engine->options = used;
    engine->process = msc__fork_count();
    engine->born_ns = msc__clock_ns();
    engine->free_block = MSC_NONE;
    engine->window = 1;
    status = msc__mutex_init(&engine->mutex, err);
    if (status != MSC_OK) {
        msc__free(ctx, engine, sizeof *engine);
        return status;
    }
    status = msc__cond_init(&engine->changed, err);
    if (status != MSC_OK) {
        msc__mutex_fini(&engine->mutex);
        msc__free(ctx, engine, sizeof *engine);
        return status;
    }
    status = init_parts(engine, err);
    if (status == MSC_OK)
        status = start(engine, err);
    if (status != MSC_OK) {
        msc_offload_destroy(engine);
        return status;
    }
    *out = engine;
    return MSC_OK;
}

static void stop(msc_offload *engine)
{
    msc__mutex_lock(&engine->mutex);
    atomic_store(&engine->ending, true);
    if (engine->out.ready)
        msc__cond_signal(&engine->out.awake);
    if (engine->in.ready)
        msc__cond_signal(&engine->in.awake);
    msc__cond_broadcast(&engine->changed);
    msc__mutex_unlock(&engine->mutex);
    msc__thread_join(&engine->out.thread);
    msc__thread_join(&engine->in.thread);
}

void msc_offload_destroy(msc_offload *engine)
{
    if (engine == NULL)
        return;
    if (engine->process != msc__fork_count()) {
        if (engine->file != NULL)
            msc__file_abandon(engine->file);
        return;
    }
    stop(engine);
    msc__lane_fini(&engine->in);
    msc__lane_fini(&engine->out);
    msc__blocks_fini(engine);
    msc__file_destroy(engine->in.file);
    msc__places_fini(engine);
    msc__schedule_fini(engine->ctx, &engine->schedule);
    msc__array_fini(engine->ctx, &engine->step_puts, sizeof(msc__put));
    msc__free(engine->ctx, engine->trace, engine->options.trace_count * sizeof *engine->trace);
    if (engine->directory != NULL)
        msc__free(engine->ctx, engine->directory, strlen(engine->directory) + 1);
    msc__cond_fini(&engine->changed);
    msc__mutex_fini(&engine->mutex);
    msc__free(engine->ctx, engine, sizeof *engine);
}

/* A note is written once. Its reader sees what does not change any more. */
const char *msc_offload_note(msc_offload *engine, msc_tier tier)
{
    const char *note;

    if (msc__offload_enter(engine, 0, NULL, NULL) != MSC_OK)
        return "";
    note = engine->notes[tier][0] != '\0' ? engine->notes[tier] : "";
    msc__mutex_unlock(&engine->mutex);
    return note;
}
