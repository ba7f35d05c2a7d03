/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks of a context in a list, so that none can be forgotten:
 *
 *      [next | link | bytes | pad][ what the caller sees ... ]
 */
#include "http/http_memory.h"

#include <stdalign.h>
#include <string.h>

#include "base/alloc.h"
#include "base/invariant.h"

struct http_block {
    alignas(max_align_t) http_block *next;
    http_block **link;
    size_t bytes; /* of what follows */
};

static void hook(http_memory *memory, http_block *block)
{
    block->next = memory->first;
    block->link = &memory->first;
    if (block->next != NULL)
        block->next->link = &block->next;
    memory->first = block;
}

static void unhook(http_block *block)
{
    *block->link = block->next;
    if (block->next != NULL)
        block->next->link = block->link;
}

void *http_memory_get(http_memory *memory, size_t bytes)
{
    size_t wanted = bytes == 0 ? 1 : bytes;
    http_block *block;

    if (wanted > SIZE_MAX - sizeof *block)
        return NULL;
    block = msc__alloc(memory->ctx, sizeof *block + wanted);
    if (block == NULL)
        return NULL;
    block->bytes = wanted;
    hook(memory, block);
    return block + 1;
}

void *http_memory_grow(http_memory *memory, void *old, size_t bytes)
{
    http_block *block = old == NULL ? NULL : (http_block *)old - 1;
    http_block *grown;

    if (block == NULL)
        return http_memory_get(memory, bytes);
    MSC__ASSERT(bytes > block->bytes && bytes <= SIZE_MAX - sizeof *block);
    unhook(block);
    grown = msc__resize(memory->ctx, block, sizeof *block + block->bytes, sizeof *block + bytes);
    if (grown == NULL) {
        hook(memory, block);
        return NULL;
    }
    grown->bytes = bytes;
    hook(memory, grown);
    return grown + 1;
}

void http_memory_drop(http_memory *memory, void *old)
{
    if (old != NULL) {
        http_block *block = (http_block *)old - 1;

        unhook(block);
        msc__free(memory->ctx, block, sizeof *block + block->bytes);
    }
}

void http_memory_end(http_memory *memory)
{
    while (memory->first != NULL)
        http_memory_drop(memory, memory->first + 1);
}
