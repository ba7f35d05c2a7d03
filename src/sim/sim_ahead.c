/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What comes back early, in a replay.
 *
 *      backward     | use of R      |  …       | use of Q
 *      early        |==========================|               of Q: as many moves as R's `ahead_bytes` has room for
 *
 * Q's copies then hide behind R's backward, instead of being waited for with Q's first use. sim_look_ahead.c says how much
 * that may be.
 */
#include "sim/sim_ahead.h"

#include "base/bytes.h"
#include "base/invariant.h"

/* ---- what follows what ----------------------------------------------------------------------------- */

static bool brings_back(const msc__plan_regions *plan, const msc__region *region, msc__follow *out)
{
    uint32_t i;

    *out = (msc__follow){.next = MSC_NONE, .first_use = MSC_NONE};
    MSC__ASSERT(region->first_move + region->move_count <= plan->move_count);
    for (i = region->first_move; i < region->first_move + region->move_count; i++) {
        if (plan->moves[i].use < out->first_use)
            out->first_use = plan->moves[i].use;
        if (plan->moves[i].use != MSC_NONE && plan->moves[i].use > out->next_use)
            out->next_use = plan->moves[i].use;
    }
    return out->first_use != MSC_NONE;
}

/*
 * Entry i follows entry i + 1 if backward uses them in the opposite order of forward, without overlap: all uses of
 * later regions are over with the first one of i + 1, and its own with the first one of i, which comes before all
 * of earlier regions. Here `next_use` is the last use still.
 */
static void link_follows(msc__follow *follows, uint32_t count)
{
    uint32_t least = MSC_NONE; /* first use of all entries before i */
    uint32_t most = 0;         /* last use of all entries behind i + 1 */
    uint32_t i;

    for (i = 0; i + 1 < count; i++) {
        MSC__ASSERT(follows[i].region < follows[i + 1].region);
        follows[i + 1].uncertain |=
            least < follows[i].first_use || follows[i + 1].next_use > follows[i].first_use;
        least = follows[i].first_use < least ? follows[i].first_use : least;
    }
    for (i = count; i-- > 1;) {
        uint32_t last_use = follows[i].next_use;
        follows[i].uncertain |= most > follows[i].first_use;
        most = last_use > most ? last_use : most;
        follows[i].next = follows[i - 1].region;
        follows[i].next_use = follows[i - 1].first_use;
    }
}

uint32_t msc__follows_of_plan(const msc__plan_regions *plan, msc__follow *out)
{
    uint32_t count = 0;
    uint8_t uncertain = 0;
    uint32_t r;

    for (r = 0; r < plan->count; r++) {
        if (!brings_back(plan, &plan->regions[r], &out[count])) {
            uncertain |= plan->regions[r].move_count > 0;
            continue;
        }
        out[count].region = r;
        out[count++].uncertain = uncertain;
        uncertain = 0;
    }
    link_follows(out, count);
    return count;
}

/* ---- the rule of replays --------------------------------------------------------------------------- */

uint32_t msc__count_early(const msc__moved *moves, uint32_t count, uint64_t most_bytes,
                          uint64_t granule_bytes)
{
    uint64_t taken = 0;
    uint32_t i;

    for (i = 0; i < count && moves[i].back == moves[0].use; i++) {
        MSC__ASSERT(i == 0 || moves[i].use >= moves[i - 1].use);
        taken += msc__round_up_u64(moves[i].size_bytes, granule_bytes);
        if (taken > most_bytes)
            break;
    }
    return i;
}

void msc__moves_bring_early(const msc_graph *graph, const msc_plan *plan, msc__plan_regions *regions,
                            msc__follow *follows)
{
    const msc_call *calls = msc_graph_calls(graph);
    uint32_t count = msc__follows_of_plan(regions, follows);
    uint32_t i;

    for (i = 0; i < count; i++) {
        const msc__region *region = &regions->regions[follows[i].region];
        const msc__region *next = &regions->regions[follows[i].next == MSC_NONE ? 0 : follows[i].next];
        msc__moved *moves = regions->moves + next->first_move;
        uint32_t choice = msc_plan_find(plan, calls[region->first_call].module);
        uint32_t early;
        if (follows[i].next == MSC_NONE || follows[i].uncertain ||
            msc_plan_choices(plan)[choice].ahead_bytes == 0)
            continue;
        MSC__ASSERT(choice < msc_plan_choice_count(plan) && next < region);
        msc__moves_by_use(moves, next->move_count);
        early = msc__count_early(moves, next->move_count, msc_plan_choices(plan)[choice].ahead_bytes, 1);
        while (early-- > 0)
            moves[early].back = follows[i].first_use;
        msc__moves_by_order(moves, next->move_count);
    }
}
