/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Interned strings of the memory graph: each distinct name is stored once.
 *
 *      chars     a t e n . m m \0 L i n e a r \0
 *      strings   [0, 8]                             offset of each, in order of first use
 *
 * A step has a hundred thousand operations but a hundred names. Indices depend on the order of first use
 * and therefore never appear in the canonical text, which spells every name out. Room is made in all
 * three places before anything changes.
 */
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "graph/graph_internal.h"

#define FNV_OFFSET_32 2166136261u /* FNV-1a, 32 bit */
#define FNV_PRIME_32 16777619u

static msc_status check_string(const char *string, size_t bytes, msc_error *err)
{
    size_t i;

    if (bytes > MSC__GRAPH_MOST_STRING_BYTES)
        return msc__fail(err, MSC_EINVAL, "a name of more than %u bytes", MSC__GRAPH_MOST_STRING_BYTES);
    for (i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)string[i];
        if (c < 0x20 || c == 0x7f)
            return msc__fail(err, MSC_EINVAL, "a name with control character %u", c);
    }
    return MSC_OK;
}

static uint32_t hash_string(const char *string, size_t bytes)
{
    uint32_t hash = FNV_OFFSET_32;
    size_t i;

    for (i = 0; i < bytes; i++)
        hash = (hash ^ (unsigned char)string[i]) * FNV_PRIME_32;
    return hash;
}

static uint32_t find_string(const msc_graph *graph, uint32_t hash, const char *string, size_t bytes)
{
    uint32_t probe = hash;
    uint32_t found;

    while ((found = msc__hash_index_next(&graph->string_table, hash, &probe)) != MSC_NONE) {
        const char *known = msc_graph_string(graph, found);
        if (strlen(known) == bytes && memcmp(known, string, bytes) == 0)
            break;
    }
    MSC__ASSERT(found == MSC_NONE || found < graph->strings.count);
    return found;
}

msc_status msc__graph_intern(msc_graph *graph, const char *string, size_t bytes, uint32_t *out,
                             msc_error *err)
{
    uint32_t offset = graph->chars.count;
    uint32_t hash;
    msc_status status = check_string(string, bytes, err);

    if (status != MSC_OK)
        return status;
    hash = hash_string(string, bytes);
    *out = find_string(graph, hash, string, bytes);
    if (*out != MSC_NONE)
        return MSC_OK;
    status = msc__array_reserve(graph->ctx, &graph->chars, 1, (uint32_t)bytes + 1, err);
    if (status == MSC_OK)
        status = msc__array_reserve(graph->ctx, &graph->strings, sizeof offset, 1, err);
    if (status == MSC_OK)
        status = msc__hash_index_reserve(graph->ctx, &graph->string_table, "names", err);
    if (status != MSC_OK)
        return status;
    *out = graph->strings.count;
    MSC__ASSERT(graph->chars.capacity - offset > bytes && graph->strings.count < graph->strings.capacity);
    memcpy((char *)graph->chars.items + offset, string, bytes);
    ((char *)graph->chars.items)[offset + bytes] = '\0';
    graph->chars.count += (uint32_t)bytes + 1;
    msc__hash_index_insert(&graph->string_table, hash, graph->strings.count);
    return msc__array_push(graph->ctx, &graph->strings, sizeof offset, &offset, err);
}
