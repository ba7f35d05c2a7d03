/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tables of fingerprints on a card.
 *
 *     keep       tensor ──► kernel ──► slot          ┐ each on the caller's stream, and behind the call before it:
 *     compare    tensor ──► kernel ──► state         ┘ behind every launch an event, which another stream waits for
 *     read       event ──► copy on a stream of ours ──► the host
 *
 * One launch after the other is what all rests on: a launch has the state's sum to itself, the first difference is the first
 * one submitted, and a slot that was given back may be written at once, for who reads it comes before.
 */
#include "fingerprint/fingerprint_table.h"

#include <stdbool.h>
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/sized.h"
#include "base/thread.h"
#include "device/device_internal.h"
#include "fingerprint/cuda/card_types.h"

#define DEFAULT_SLOTS 65536u

/* In the list of free slots: its end, and what stands for a slot that is taken. */
#define LAST 0xFFFFFFFFu
#define TAKEN 0xFFFFFFFEu

_Static_assert(sizeof(msc__fp_state) <= MSC_FINGERPRINT_TABLE_BYTES, "slots lie behind the state");
_Static_assert(sizeof(uint64_t) == MSC_FINGERPRINT_SLOT_BYTES, "a slot has a value");
_Static_assert(sizeof(msc__fp_launch) <= 4096, "what a driver copies with a kernel");

static const msc_program_text kernels = {"the kernel of fingerprints", msc__fingerprint_cuda_text};

struct msc_fingerprint_table {
    msc_context *ctx;
    msc_device *device;
    void *kernel;
    void *memory;   /* on the card: the state, then the slots */
    void *back;     /* a stream of ours, for what comes back */
    void *event;    /* behind the last launch */
    void *came;     /* behind a copy */
    uint32_t *next; /* of each slot: the free one after it, or TAKEN */
    uint32_t slot_count;
    uint32_t first_free;
    void *stream;    /* of the last launch, if there was one */
    bool launched;   /* so `event` has been recorded */
    bool compared;   /* since the last read */
    bool locks;      /* the mutex exists */
    msc__mutex call; /* one call at a time */
};

static uint64_t memory_bytes(const msc_fingerprint_table *table)
{
    return MSC_FINGERPRINT_TABLE_BYTES + (uint64_t)table->slot_count * MSC_FINGERPRINT_SLOT_BYTES;
}

static uint64_t *slot_at(const msc_fingerprint_table *table, uint32_t slot)
{
    MSC__ASSERT(slot < table->slot_count);
    return (uint64_t *)(void *)((unsigned char *)table->memory + MSC_FINGERPRINT_TABLE_BYTES) + slot;
}

/* ---- create and destroy ----------------------------------------------------------------------------------------- */

void msc_fingerprint_table_options_init(msc_fingerprint_table_options *out, size_t struct_bytes)
{
    msc_fingerprint_table_options options;

    memset(&options, 0, sizeof options);
    options.slot_count = DEFAULT_SLOTS;
    msc__sized_init(out, struct_bytes, &options, sizeof options);
}

static msc_status check_options(const msc_fingerprint_table_options *options, msc_error *err)
{
    if (options->device == NULL)
        return msc__fail(err, MSC_EINVAL, "device is NULL: a table lies on a card");
    if (options->slot_count == 0 || options->slot_count > MSC_FINGERPRINT_MOST_SLOTS)
        return msc__fail(err, MSC_EINVAL, "slot_count is %u, allowed are 1 to %u", options->slot_count,
                         MSC_FINGERPRINT_MOST_SLOTS);
    if (options->device->ops->program_create == NULL)
        return msc__fail(err, MSC_EUNSUPPORTED,
                         "device '%s' runs no kernels: msc_fingerprint is for host memory",
                         options->device->name);
    return msc__device_check_process(options->device, err);
}

static msc_status list_slots(msc_fingerprint_table *table, msc_error *err)
{
    size_t bytes = (size_t)table->slot_count * sizeof *table->next;
    uint32_t i;

    table->next = msc__alloc(table->ctx, bytes);
    if (table->next == NULL)
        return msc__fail_memory(err, "a table's slots", bytes);
    for (i = 0; i < table->slot_count; i++)
        table->next[i] = i + 1 < table->slot_count ? i + 1 : LAST;
    return MSC_OK;
}

/* Both places must stay until the card is done, so the host waits. `copy` is on our stream, behind all launches. */
static msc_status copy_now(msc_fingerprint_table *table, void *to, const void *from, uint64_t bytes,
                           msc_copy_kind kind, msc_error *err)
{
    const msc_device_ops *ops = table->device->ops;
    msc_status status = MSC_OK;

    MSC__ASSERT(table->back != NULL && table->came != NULL && bytes > 0);
    if (table->launched)
        status = ops->stream_wait(table->device, table->back, table->event, err);
    if (status == MSC_OK)
        status = ops->copy(table->device, to, from, bytes, kind, table->back, err);
    if (status != MSC_OK)
        return status;
    status = ops->event_record(table->device, table->came, table->back, err);
    if (status == MSC_OK)
        status = ops->event_wait(table->device, table->came, err);
    if (status != MSC_OK)
        ops->stream_finish(table->device, table->back);
    return status;
}

static msc_status clear_state(msc_fingerprint_table *table, msc_error *err)
{
    const msc__fp_state clear = {0};

    return copy_now(table, table->memory, &clear, sizeof clear, MSC_COPY_IN, err);
}

static msc_status fill(msc_fingerprint_table *table, msc_error *err)
{
    const msc_device_ops *ops = table->device->ops;
    void *program = NULL;
    msc_status status = ops->program_create(table->device, &kernels, &program, err);

    if (status == MSC_OK)
        status = ops->kernel_find(table->device, program, "msc_card_fingerprint", &table->kernel, err);
    if (status == MSC_OK)
        status = list_slots(table, err);
    if (status == MSC_OK)
        status = ops->memory_create(table->device, memory_bytes(table), &table->memory, err);
    if (status == MSC_OK)
        status = ops->stream_create(table->device, &table->back, err);
    if (status == MSC_OK)
        status = ops->event_create(table->device, &table->event, err);
    if (status == MSC_OK)
        status = ops->event_create(table->device, &table->came, err);
    if (status == MSC_OK)
        status = clear_state(table, err);
    if (status == MSC_OK)
        status = msc__mutex_init(&table->call, err);
    MSC__ASSERT(status != MSC_OK || table->first_free == 0);
    table->locks = status == MSC_OK;
    return status;
}

msc_status msc_fingerprint_table_create(msc_context *ctx, const msc_fingerprint_table_options *options,
                                        msc_fingerprint_table **out, msc_error *err)
{
    msc_fingerprint_table_options used = msc_fingerprint_table_options_default();
    msc_fingerprint_table *table;
    msc_status status;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "out is NULL");
    *out = NULL;
    if (ctx == NULL || options == NULL)
        return msc__fail(err, MSC_EINVAL, "ctx or options is NULL");
    /* The first version ends behind a pointer. NOLINTNEXTLINE(bugprone-sizeof-expression) */
    status = MSC__READ_OPTIONS("", msc_fingerprint_table_options, device, options, &used, err);
    if (status == MSC_OK)
        status = check_options(&used, err);
    if (status != MSC_OK)
        return status;
    table = msc__alloc(ctx, sizeof *table);
    if (table == NULL)
        return msc__fail_memory(err, "a table of fingerprints", sizeof *table);
    table->ctx = ctx;
    table->device = used.device;
    table->slot_count = used.slot_count;
    status = fill(table, err);
    if (status != MSC_OK) {
        msc_fingerprint_table_destroy(table);
        return status;
    }
    *out = table;
    return MSC_OK;
}

void msc_fingerprint_table_destroy(msc_fingerprint_table *table)
{
    const msc_device_ops *ops;

    if (table == NULL)
        return;
    ops = table->device->ops;
    if (table->launched) /* its memory must outlive its kernels */
        (void)ops->event_wait(table->device, table->event, NULL);
    if (table->locks)
        msc__mutex_fini(&table->call);
    ops->event_destroy(table->device, table->came);
    ops->event_destroy(table->device, table->event);
    ops->stream_destroy(table->device, table->back);
    ops->memory_destroy(table->device, table->memory, memory_bytes(table));
    msc__free(table->ctx, table->next, table->slot_count * sizeof *table->next);
    msc__free(table->ctx, table, sizeof *table);
}

/* ---- launches ----------------------------------------------------------------------------------------------------- */

static uint32_t grain_of(const msc__fp_launch *launch)
{
    uint64_t all = (uint64_t)(uintptr_t)launch->data | 8;
    uint32_t i;

    for (i = 0; i < launch->dim_count; i++)
        all |= launch->dims[i].stride_bytes;
    if (launch->dim_count > 0)
        all |= launch->run_bytes;
    MSC__ASSERT((all & 15) != 0);
    return (uint32_t)(all & (~all + 1)); /* the lowest bit of any */
}

static uint32_t groups_of(const msc__fp_launch *launch)
{
    uint64_t blocks = launch->samples.windows * (MSC_FINGERPRINT_SEGMENT / MSC__FP_BLOCK_BYTES);
    uint64_t most = msc__fp_divide_up(launch->bytes, MSC__FP_BLOCK_BYTES);
    uint64_t groups = msc__fp_divide_up(blocks < most ? blocks : most, MSC__FP_AT_A_TIME);

    if (groups == 0)
        return 1; /* no bytes have a fingerprint, too */
    return groups < MSC__FP_MOST_GROUPS ? (uint32_t)groups : MSC__FP_MOST_GROUPS;
}

static msc_status prepare(const msc_fingerprint_tensor *tensor, uint32_t one_in, msc__fp_launch *launch,
                          msc_error *err)
{
    msc__fp_layout layout;
    msc_status status;

    if (tensor == NULL)
        return msc__fail(err, MSC_EINVAL, "tensor is NULL");
    if (one_in == 0)
        return msc__fail(err, MSC_EINVAL, "one_in is 0, allowed are 1 and above");
    status = msc__fp_layout_of(tensor, &layout, err);
    if (status != MSC_OK)
        return status;
    memset(launch, 0, sizeof *launch);
    launch->data = layout.data;
    launch->bytes = layout.bytes;
    launch->run_bytes = layout.run_bytes;
    launch->dim_count = layout.dim_count;
    memcpy(launch->dims, layout.dims, layout.dim_count * sizeof *layout.dims);
    launch->samples = msc__fp_samples_of(layout.bytes, MSC_FINGERPRINT_SEGMENT, one_in);
    launch->grain = grain_of(launch);
    launch->groups = groups_of(launch);
    MSC__ASSERT(launch->groups > 0 && launch->groups <= MSC__FP_MOST_GROUPS);
    return MSC_OK;
}

/* With the lock. Whatever the streams, behind the launch before it. */
static msc_status run(msc_fingerprint_table *table, uint32_t slot, msc__fp_launch *launch, void *stream,
                      msc_error *err)
{
    const msc_device_ops *ops = table->device->ops;
    const msc_launch what = {table->kernel, launch->groups, MSC__CARD_THREADS, launch};
    msc_status status = MSC_OK;

    MSC__ASSERT(table->kernel != NULL && table->memory != NULL);
    launch->state = table->memory;
    launch->slot = slot_at(table, slot);
    if (table->launched && table->stream != stream)
        status = ops->stream_wait(table->device, stream, table->event, err);
    if (status == MSC_OK)
        status = ops->launch(table->device, &what, stream, err);
    if (status != MSC_OK)
        return status;
    status = ops->event_record(table->device, table->event, stream, err);
    if (status != MSC_OK) {
        ops->stream_finish(table->device, stream);
        return status;
    }
    table->launched = true;
    table->stream = stream;
    return MSC_OK;
}

msc_status msc_fingerprint_keep(msc_fingerprint_table *table, const msc_fingerprint_tensor *tensor,
                                uint32_t one_in, void *stream, uint32_t *slot, msc_error *err)
{
    msc__fp_launch launch;
    msc_status status;
    uint32_t taken;

    if (table == NULL || slot == NULL)
        return msc__fail(err, MSC_EINVAL, "table or slot is NULL");
    status = prepare(tensor, one_in, &launch, err);
    if (status == MSC_OK)
        status = msc__device_check_process(table->device, err); /* a parent's lock may be taken for ever */
    if (status != MSC_OK)
        return status;
    msc__mutex_lock(&table->call);
    taken = table->first_free;
    if (taken == LAST)
        status = msc__fail(err, MSC_EAGAIN, "all %u slots of the table are taken: release some",
                           table->slot_count);
    if (status == MSC_OK)
        status = run(table, taken, &launch, stream, err);
    if (status == MSC_OK) {
        MSC__ASSERT(taken < table->slot_count && table->next[taken] != TAKEN);
        table->first_free = table->next[taken];
        table->next[taken] = TAKEN;
        *slot = taken;
    }
    msc__mutex_unlock(&table->call);
    return status;
}

/* With the lock. */
static msc_status check_slot(const msc_fingerprint_table *table, uint32_t slot, msc_error *err)
{
    if (slot >= table->slot_count || table->next[slot] != TAKEN)
        return msc__fail(err, MSC_EINVAL, "slot %u has no fingerprint", slot);
    return MSC_OK;
}

msc_status msc_fingerprint_compare(msc_fingerprint_table *table, uint32_t slot,
                                   const msc_fingerprint_tensor *tensor, uint32_t one_in, uint64_t tag,
                                   void *stream, msc_error *err)
{
    msc__fp_launch launch;
    msc_status status;

    if (table == NULL)
        return msc__fail(err, MSC_EINVAL, "table is NULL");
    status = prepare(tensor, one_in, &launch, err);
    if (status == MSC_OK)
        status = msc__device_check_process(table->device, err);
    if (status != MSC_OK)
        return status;
    launch.compares = 1;
    launch.tag = tag;
    msc__mutex_lock(&table->call);
    status = check_slot(table, slot, err);
    if (status == MSC_OK)
        status = run(table, slot, &launch, stream, err);
    if (status == MSC_OK)
        table->compared = true;
    msc__mutex_unlock(&table->call);
    return status;
}

void msc_fingerprint_release(msc_fingerprint_table *table, uint32_t slot)
{
    if (table == NULL || msc__device_check_process(table->device, NULL) != MSC_OK)
        return;
    msc__mutex_lock(&table->call);
    if (check_slot(table, slot, NULL) == MSC_OK) {
        MSC__ASSERT(table->first_free == LAST || table->first_free < table->slot_count);
        table->next[slot] = table->first_free;
        table->first_free = slot;
    }
    msc__mutex_unlock(&table->call);
}

/* ---- results ------------------------------------------------------------------------------------------------------ */

/* With the lock. The card's notes are cleared before they count as read. */
static msc_status read_state(msc_fingerprint_table *table, msc_fingerprint_differences *out, msc_error *err)
{
    msc__fp_state state;
    msc_status status = copy_now(table, &state, table->memory, sizeof state, MSC_COPY_OUT, err);

    if (status == MSC_OK && state.differences > 0)
        status = clear_state(table, err);
    if (status != MSC_OK)
        return status;
    MSC__ASSERT(table->compared);
    table->compared = false;
    *out = (msc_fingerprint_differences){state.differences, state.tag, state.kept, state.found};
    return MSC_OK;
}

msc_status msc_fingerprint_read(msc_fingerprint_table *table, msc_fingerprint_differences *out,
                                msc_error *err)
{
    msc_status status;

    if (table == NULL || out == NULL)
        return msc__fail(err, MSC_EINVAL, "table or out is NULL");
    *out = (msc_fingerprint_differences){0};
    status = msc__device_check_process(table->device, err);
    if (status != MSC_OK)
        return status;
    msc__mutex_lock(&table->call);
    if (table->compared)
        status = read_state(table, out, err);
    msc__mutex_unlock(&table->call);
    return status;
}

msc_status msc_fingerprint_value(msc_fingerprint_table *table, uint32_t slot, uint64_t *out, msc_error *err)
{
    msc_status status;

    if (table == NULL || out == NULL)
        return msc__fail(err, MSC_EINVAL, "table or out is NULL");
    status = msc__device_check_process(table->device, err);
    if (status != MSC_OK)
        return status;
    msc__mutex_lock(&table->call);
    status = check_slot(table, slot, err);
    if (status == MSC_OK)
        status = copy_now(table, out, slot_at(table, slot), sizeof *out, MSC_COPY_OUT, err);
    msc__mutex_unlock(&table->call);
    return status;
}
