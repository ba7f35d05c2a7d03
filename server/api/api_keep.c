/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Retention at work: steps of the store, and what is said of each run to those who watch it.
 */
#include "api/api_internal.h"
#include "base/alloc.h"

#define TOLD_BYTES ((size_t)64 << 10) /* memory for what is said of one run */

void api_wake_keeper(const api_call *call)
{
    const api_parts *parts = &call->it->parts;

    if (parts->wake != NULL)
        parts->wake(parts->user);
}

static void tell_altered(void *user, const store_run *run)
{
    msc_context_options options = msc_context_options_default();
    const api *it = user;
    http_memory memory = {0};
    json_out out = {.memory = &memory};

    options.allocator = it->parts.allocator;
    options.memory_limit_bytes = TOLD_BYTES;
    if (msc_context_create(&options, &memory.ctx, NULL) != MSC_OK) {
        live_say(it->parts.live, run->id, run->version, "run", "{}");
        return;
    }
    api_write_run(&out, run, true);
    live_say(it->parts.live, run->id, run->version, "run", out.failed ? "{}" : out.text);
    http_memory_end(&memory);
    msc_context_destroy(memory.ctx);
}

static void tell_gone(void *user, const store_run *run)
{
    const api *it = user;

    live_say(it->parts.live, run->id, run->version, "gone", "{}");
}

bool api_keep(api *it, bool (*stops)(void *user), void *user)
{
    store_result result = STORE_OK;
    bool more = true;

    while (more && result == STORE_OK && !stops(user))
        result = store_keep_step(it->parts.store, it->parts.now_ms(), tell_altered, tell_gone, it, &more);
    return result == STORE_OK && !more;
}
