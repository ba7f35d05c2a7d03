/* SPDX-License-Identifier: Apache-2.0 */
/* Counters, events, checksums. */
#include <string.h>

#include "base/invariant.h"
#include "base/sized.h"
#include "offload/offload_engine.h"

int64_t msc__trace_now(const msc_offload *engine)
{
    return engine->options.trace_count > 0 ? msc__clock_ns() : 0;
}

void msc__trace_add(msc_offload *engine, msc_offload_event_kind kind, const msc__block *block,
                    int64_t begin_ns, int64_t end_ns)
{
    uint32_t count = engine->options.trace_count;
    msc_offload_event *event;

    if (count == 0)
        return;
    MSC__ASSERT(begin_ns <= end_ns);
    event = &engine->trace[engine->traced++ % count];
    event->begin_ns = begin_ns - engine->born_ns;
    event->end_ns = end_ns - engine->born_ns;
    event->bytes = block->bytes;
    event->ticket = msc__block_ticket(block);
    event->kind = kind;
    event->tier = block->place.tier;
}

uint32_t msc_offload_trace(msc_offload *engine, msc_offload_event *out, uint32_t most)
{
    uint64_t kept;
    uint64_t i;

    if (msc__offload_enter(engine, 0, NULL, NULL) != MSC_OK)
        return 0;
    kept = engine->traced < engine->options.trace_count ? engine->traced : engine->options.trace_count;
    if (kept > most)
        kept = most;
    for (i = 0; i < kept; i++)
        out[i] = engine->trace[(engine->traced - kept + i) % engine->options.trace_count];
    msc__mutex_unlock(&engine->mutex);
    return (uint32_t)kept;
}

void msc_offload_counters_read(msc_offload *engine, msc_offload_counters *out, size_t out_bytes)
{
    msc_offload_counters counters;
    msc_tier tier;

    msc__sized_copy(out, out_bytes, NULL, 0);
    if (msc__offload_enter(engine, 0, NULL, NULL) != MSC_OK)
        return;
    msc__lane_wake(&engine->out);
    msc__lane_wake(&engine->in);
    counters = engine->counters;
    for (tier = 0; tier < MSC_TIER_COUNT; tier++)
        counters.taken_bytes[tier] = msc__place_taken_bytes(engine, tier);
    counters.staging_bytes = msc__place_staging_bytes(engine);
    counters.table_bytes = msc_context_held_bytes(engine->ctx);
    msc__mutex_unlock(&engine->mutex);
    msc__sized_copy(out, out_bytes, &counters, sizeof counters);
}

/* Multiply and rotate, eight bytes at a time: to notice bytes that changed, not to withstand an adversary. */
uint64_t msc__checksum(uint64_t sum, const void *memory, uint64_t bytes)
{
    const unsigned char *at = memory;
    uint64_t word;

    for (; bytes >= sizeof word; bytes -= sizeof word, at += sizeof word) {
        memcpy(&word, at, sizeof word);
        sum = ((sum ^ word) << 23 | (sum ^ word) >> 41) * 0x9E3779B97F4A7C15ull;
    }
    for (; bytes > 0; bytes--, at++)
        sum = (sum ^ *at) * 0x100000001B3ull;
    return sum;
}
