/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `msc snapshot`: what a memory snapshot of PyTorch holds, and whether the simulator agrees with it.
 *
 * Per device: sums, peaks, the events by action, and the lines of the program that held most at the end and
 * at the peak. With --replay the trace is played; one that differs, or cannot be replayed, is printed, and is
 * no failure of the command.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cmd.h"

#define SITES 10u
#define MOST_SITE_BYTES 512

/* One device, read. */
typedef struct device_facts {
    msc_snapshot_totals totals;
    msc_snapshot_site at_end[SITES];
    msc_snapshot_site at_peak[SITES];
    uint32_t end_count; /* of sites in at_end */
    uint32_t peak_count;
    msc_snapshot_replay_result replay;
    msc_error replay_error;
    bool replayed;
} device_facts;

static msc_status collect(const msc_snapshot *snapshot, uint32_t device, bool replay, device_facts *facts,
                          msc_error *err)
{
    msc_status status = msc_snapshot_get_totals(snapshot, device, &facts->totals, err);

    if (status == MSC_OK)
        status = msc_snapshot_sites(snapshot, device, MSC_SNAPSHOT_MOMENT_END, facts->at_end, SITES,
                                    &facts->end_count, err);
    if (status == MSC_OK)
        status = msc_snapshot_sites(snapshot, device, MSC_SNAPSHOT_MOMENT_PEAK, facts->at_peak, SITES,
                                    &facts->peak_count, err);
    if (status != MSC_OK)
        return status;
    facts->end_count = facts->end_count < SITES ? facts->end_count : SITES;
    facts->peak_count = facts->peak_count < SITES ? facts->peak_count : SITES;
    if (!replay)
        return MSC_OK;
    status = msc_snapshot_replay(snapshot, device, NULL, NULL, &facts->replay, &facts->replay_error);
    facts->replayed = status == MSC_OK;
    if (status != MSC_ENOMEM)
        return MSC_OK;
    *err = facts->replay_error;
    return status;
}

static const char *site_text(const msc_snapshot *snapshot, const msc_snapshot_site *site, char *text)
{
    msc_snapshot_frame frame;

    if (site->frame == MSC_NONE) {
        (void)snprintf(text, MOST_SITE_BYTES, "(no stack)");
        return text;
    }
    frame = msc_snapshot_frame_at(snapshot, site->frame);
    (void)snprintf(text, MOST_SITE_BYTES, "%s:%" PRIu32 " %s", msc_snapshot_string(snapshot, frame.file),
                   frame.line, msc_snapshot_string(snapshot, frame.function));
    return text;
}

static const char *difference_text(uint8_t difference)
{
    static const char *const texts[MSC_SNAPSHOT_DIFFERENCE_COUNT] = {"none", "segment", "request", "map"};

    return difference < MSC_SNAPSHOT_DIFFERENCE_COUNT ? texts[difference] : "unknown";
}

/* ---- text --------------------------------------------------------------------------------------- */

static void print_sites(const msc_snapshot *snapshot, const char *title, const msc_snapshot_site *sites,
                        uint32_t count)
{
    char quantity[CLI_QUANTITY_BYTES];
    char text[MOST_SITE_BYTES];
    uint32_t i;

    if (count > 0)
        printf("  %s\n", title);
    for (i = 0; i < count; i++)
        printf("    %12s in %6" PRIu64 "  %s\n", cli_bytes(sites[i].requested_bytes, quantity),
               sites[i].allocation_count, site_text(snapshot, &sites[i], text));
}

static void print_finding(const char *label, const msc_snapshot_finding *finding, uint8_t difference)
{
    const char *what = difference == MSC_SNAPSHOT_DIFFERENCE_MAP
                           ? msc_snapshot_state_name((msc_snapshot_state)finding->action)
                           : msc_snapshot_action_name((msc_snapshot_action)finding->action);

    if (finding->is_there)
        printf("    %-10s %s of %" PRIu64 " bytes at 0x%" PRIx64 "\n", label, what, finding->size_bytes,
               finding->address);
    else
        printf("    %-10s nothing\n", label);
}

static void print_replay(const device_facts *facts)
{
    const msc_snapshot_replay_result *replay = &facts->replay;

    if (!facts->replayed) {
        printf("  replay             not possible: %s\n", facts->replay_error.message);
        return;
    }
    printf("  replay             %s: %" PRIu32 " requests and frees, %" PRIu32 " segment events, %" PRIu32
           " blocks compared\n",
           replay->difference_count == 0 ? "exact" : "differs", replay->replayed_count, replay->segment_count,
           replay->map_block_count);
    cli_print_bytes("simulated reserved", replay->reserved_peak_bytes);
    cli_print_bytes("simulated alloc.", replay->allocated_peak_bytes);
    if (replay->first_event > 0)
        printf("    events before %" PRIu32 " were not replayed: events are missing there\n",
               replay->first_event);
    if (replay->difference_count == 0)
        return;
    printf("    %" PRIu32 " differences, the first (%s) at event %" PRIu32 "\n", replay->difference_count,
           difference_text(replay->difference), replay->difference_event);
    print_finding("recorded", &replay->expected, replay->difference);
    print_finding("simulated", &replay->got, replay->difference);
}

static void print_device(const msc_snapshot *snapshot, uint32_t device, const device_facts *facts,
                         bool replay)
{
    const msc_snapshot_totals *totals = &facts->totals;
    unsigned i;

    printf("Device %" PRIu32 ": %" PRIu64 " segments, %" PRIu64 " blocks, %" PRIu64 " events\n", device,
           totals->segment_count, totals->block_count, totals->event_count);
    cli_print_bytes("reserved", totals->reserved_bytes);
    cli_print_bytes("allocated", totals->allocated_bytes);
    cli_print_bytes("active", totals->active_bytes);
    cli_print_bytes("requested", totals->requested_bytes);
    cli_print_bytes("reserved peak", totals->reserved_peak_bytes);
    cli_print_bytes("requested peak", totals->requested_peak_bytes);
    for (i = 0; i < MSC_SNAPSHOT_ACTION_COUNT; i++) {
        if (totals->action_count[i] > 0)
            printf("    %-18s %10" PRIu64 "\n", msc_snapshot_action_name((msc_snapshot_action)i),
                   totals->action_count[i]);
    }
    print_sites(snapshot, "held at the end", facts->at_end, facts->end_count);
    print_sites(snapshot, "held at the peak", facts->at_peak, facts->peak_count);
    if (replay)
        print_replay(facts);
}

static void print_head(const msc_snapshot *snapshot, const char *path)
{
    msc_snapshot_settings settings = msc_snapshot_get_settings(snapshot);

    printf("Snapshot %s\n  stacks %" PRIu32 ", frames %" PRIu32 ", settings %s\n", path,
           msc_snapshot_stack_count(snapshot), msc_snapshot_frame_count(snapshot),
           !settings.is_recorded ? "not recorded"
           : msc_snapshot_string(snapshot, settings.conf)[0] == '\0'
               ? "default"
               : msc_snapshot_string(snapshot, settings.conf));
}

/* ---- JSON --------------------------------------------------------------------------------------- */

static json_t *json_sites(const msc_snapshot *snapshot, const msc_snapshot_site *sites, uint32_t count)
{
    json_t *root = json_array();
    char text[MOST_SITE_BYTES];
    uint32_t i;

    for (i = 0; i < count; i++)
        json_array_append_new(root, json_pack("{s:o, s:o, s:o}", "site",
                                              cli_json_text(site_text(snapshot, &sites[i], text)),
                                              "requested_bytes", cli_json_u64(sites[i].requested_bytes),
                                              "allocations", cli_json_u64(sites[i].allocation_count)));
    return root;
}

static json_t *json_actions(const msc_snapshot_totals *totals)
{
    json_t *root = json_object();
    unsigned i;

    for (i = 0; i < MSC_SNAPSHOT_ACTION_COUNT; i++)
        json_object_set_new(root, msc_snapshot_action_name((msc_snapshot_action)i),
                            cli_json_u64(totals->action_count[i]));
    return root;
}

static json_t *json_replay(const device_facts *facts)
{
    const msc_snapshot_replay_result *replay = &facts->replay;

    if (!facts->replayed)
        return json_pack("{s:b, s:o}", "possible", 0, "reason", cli_json_text(facts->replay_error.message));
    return json_pack(
        "{s:b, s:b, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:I, s:o, s:o, s:o, s:o}", "possible", 1, "exact",
        replay->difference_count == 0, "first_event", (json_int_t)replay->first_event, "replayed",
        (json_int_t)replay->replayed_count, "segment_events", (json_int_t)replay->segment_count, "blocks",
        (json_int_t)replay->map_block_count, "differences", (json_int_t)replay->difference_count,
        "difference", difference_text(replay->difference), "difference_event",
        (json_int_t)replay->difference_event, "releases_followed", (json_int_t)replay->release_count,
        "reserved_peak_bytes", cli_json_u64(replay->reserved_peak_bytes), "recorded_reserved_peak_bytes",
        cli_json_u64(replay->recorded_reserved_peak_bytes), "allocated_peak_bytes",
        cli_json_u64(replay->allocated_peak_bytes), "active_peak_bytes",
        cli_json_u64(replay->active_peak_bytes));
}

static json_t *json_device(const msc_snapshot *snapshot, const device_facts *facts, bool replay)
{
    const msc_snapshot_totals *totals = &facts->totals;
    json_t *root =
        json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "segments",
                  cli_json_u64(totals->segment_count), "blocks", cli_json_u64(totals->block_count),
                  "reserved_bytes", cli_json_u64(totals->reserved_bytes), "allocated_bytes",
                  cli_json_u64(totals->allocated_bytes), "active_bytes", cli_json_u64(totals->active_bytes),
                  "requested_bytes", cli_json_u64(totals->requested_bytes), "reserved_peak_bytes",
                  cli_json_u64(totals->reserved_peak_bytes), "requested_peak_bytes",
                  cli_json_u64(totals->requested_peak_bytes), "actions", json_actions(totals), "at_end",
                  json_sites(snapshot, facts->at_end, facts->end_count), "at_peak",
                  json_sites(snapshot, facts->at_peak, facts->peak_count));

    if (replay)
        json_object_set_new(root, "replay", json_replay(facts));
    return root;
}

/* ---- command ------------------------------------------------------------------------------------ */

static cli_exit print_devices(const msc_snapshot *snapshot, const cli_args *args)
{
    json_t *devices = json_array();
    uint32_t device;
    msc_error err;

    if (!args->json)
        print_head(snapshot, args->graph_path);
    for (device = 0; device < msc_snapshot_device_count(snapshot); device++) {
        device_facts facts;
        memset(&facts, 0, sizeof facts);
        if (collect(snapshot, device, args->replay, &facts, &err) != MSC_OK) {
            json_decref(devices);
            return cli_fail(args->graph_path, &err);
        }
        if (args->json)
            json_array_append_new(devices, json_device(snapshot, &facts, args->replay));
        else if (facts.totals.segment_count + facts.totals.event_count > 0)
            print_device(snapshot, device, &facts, args->replay);
    }
    if (args->json)
        return cli_print_json(json_pack("{s:o}", "devices", devices));
    json_decref(devices);
    return CLI_EXIT_OK;
}

cli_exit cmd_snapshot(const cli_args *args)
{
    msc_context *ctx = NULL;
    msc_snapshot *snapshot = NULL;
    msc_error err;
    cli_exit result;

    if (msc_context_create(NULL, &ctx, &err) != MSC_OK ||
        msc_snapshot_load(ctx, args->graph_path, &snapshot, &err) != MSC_OK)
        result = cli_fail(args->graph_path, &err);
    else
        result = print_devices(snapshot, args);
    msc_snapshot_destroy(snapshot);
    msc_context_destroy(ctx);
    return result;
}
