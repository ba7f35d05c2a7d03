/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of blocks: pages of records that never move, so a lane may hold a pointer to one without the mutex.
 *
 * A ticket is the record's generation and index. The generation is odd while the record is in use and moves on
 * when it is given back, so an old ticket finds nothing. Records are reused before new ones are made; their
 * events stay with them, since making one costs microseconds on a card. A record that has used up its
 * generations, after 2^31 blocks, is not used again, so that no ticket ever is.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "offload/offload_engine.h"

static msc__block *block_at(const msc_offload *engine, uint32_t index)
{
    msc__block **pages = engine->pages.items;

    return &pages[index / MSC__OFFLOAD_BLOCKS_PER_PAGE][index % MSC__OFFLOAD_BLOCKS_PER_PAGE];
}

static msc_status add_page(msc_offload *engine, msc_error *err)
{
    size_t bytes = MSC__OFFLOAD_BLOCKS_PER_PAGE * sizeof(msc__block);
    uint32_t first = engine->pages.count * MSC__OFFLOAD_BLOCKS_PER_PAGE;
    msc__block *page = msc__alloc(engine->ctx, bytes);
    msc_status status;
    uint32_t i;

    if (page == NULL)
        return msc__fail_memory(err, "records of blocks", bytes);
    status = msc__array_push(engine->ctx, &engine->pages, sizeof(void *), &page, err);
    if (status != MSC_OK) {
        msc__free(engine->ctx, page, bytes);
        return status;
    }
    for (i = MSC__OFFLOAD_BLOCKS_PER_PAGE; i-- > 0;) {
        page[i].index = first + i;
        page[i].next_free = engine->free_block;
        engine->free_block = first + i;
    }
    return MSC_OK;
}

static msc_status make_events(msc_offload *engine, msc__block *block, msc_error *err)
{
    const msc_device_ops *ops = engine->device->ops;
    msc_status status = MSC_OK;
    int i;

    for (i = 0; i < 4 && status == MSC_OK; i++)
        if (block->events[i] == NULL)
            status = ops->event_create(engine->device, &block->events[i], err);
    return status;
}

msc__block *msc__block_take(msc_offload *engine, msc_error *err)
{
    msc__block *block;

    if (engine->free_block == MSC_NONE && add_page(engine, err) != MSC_OK)
        return NULL;
    block = block_at(engine, engine->free_block);
    if (block->events[3] == NULL && make_events(engine, block, err) != MSC_OK)
        return NULL;
    engine->free_block = block->next_free;
    block->generation++;
    MSC__ASSERT((block->generation & 1) != 0 && !block->out_busy && !block->in_busy);
    MSC__ASSERT(block->leaving.pieces_left == 0 && block->returning.pieces_left == 0);
    block->out = MSC__OUT_QUEUED;
    block->in = MSC__IN_NONE;
    block->settled = block->arrived = block->dropped = false;
    block->ahead_place = MSC_NONE;
    engine->counters.block_count++;
    return block;
}

void msc__block_give(msc_offload *engine, msc__block *block)
{
    MSC__ASSERT((block->generation & 1) != 0 && !block->out_busy && !block->in_busy);
    MSC__ASSERT(block->ahead_place == MSC_NONE && engine->counters.block_count > 0);
    msc__place_give(engine, &block->place, block->bytes);
    engine->counters.block_count--;
    if (++block->generation == 0)
        return;
    block->next_free = engine->free_block;
    engine->free_block = block->index;
}

msc__block *msc__block_find(msc_offload *engine, msc_ticket ticket)
{
    uint32_t index = (uint32_t)ticket;
    uint32_t generation = (uint32_t)(ticket >> 32);
    msc__block *block;

    if ((generation & 1) == 0 || index / MSC__OFFLOAD_BLOCKS_PER_PAGE >= engine->pages.count)
        return NULL;
    block = block_at(engine, index);
    MSC__ASSERT(block->index == index);
    return block->generation == generation ? block : NULL;
}

msc_ticket msc__block_ticket(const msc__block *block)
{
    return (uint64_t)block->generation << 32 | block->index;
}

void msc__block_settle_drop(msc_offload *engine, msc__block *block)
{
    int64_t now_ns;

    if (!block->dropped || block->out_busy || block->in_busy)
        return;
    now_ns = msc__trace_now(engine);
    msc__trace_add(engine, MSC_OFFLOAD_DROP, block, now_ns, now_ns);
    msc__block_give(engine, block);
}

void msc__blocks_fini(msc_offload *engine)
{
    msc__block **pages = engine->pages.items;
    uint32_t page;
    uint32_t i;
    int event;

    for (page = 0; page < engine->pages.count; page++) {
        for (i = 0; i < MSC__OFFLOAD_BLOCKS_PER_PAGE; i++)
            for (event = 0; event < 4; event++)
                if (pages[page][i].events[event] != NULL)
                    engine->device->ops->event_destroy(engine->device, pages[page][i].events[event]);
        msc__free(engine->ctx, pages[page], MSC__OFFLOAD_BLOCKS_PER_PAGE * sizeof(msc__block));
    }
    msc__array_fini(engine->ctx, &engine->pages, sizeof(void *));
}
