/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory nodes, as Linux describes them.
 *
 *      /sys/devices/system/node/online               0-1
 *                              /node0/cpulist        0-15,32-47
 *      move_pages, without nodes to move to          where pages are
 *
 * Containers often forbid move_pages; then all memory is taken to be where nothing is known.
 *
 * Which cores a thread may run on is not asked: OpenMP often binds the one that asks to a single core, and the others
 * elsewhere. A node that nobody runs on leaves its share to the others.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_getcpu */
#endif

#include "optim/optim_nodes.h"

#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/invariant.h"

#define PATH_BYTES 512
#define LIST_BYTES 4096
#define SYSTEM_NODES 1024u /* Linux has no more */

static int this_core(void)
{
    return sched_getcpu();
}

static long places_of(unsigned long count, void *const *addresses, int *numbers)
{
    return syscall(SYS_move_pages, 0, count, addresses, NULL, numbers, 0);
}

typedef struct range {
    unsigned long first;
    unsigned long last;
} range;

/* The next range of a list such as "0-3,8"; false: there is none. */
static bool next_range(const char **list, range *out)
{
    const char *at = *list + strspn(*list, ",");
    char *end;

    if (*at < '0' || *at > '9')
        return false;
    out->first = strtoul(at, &end, 10);
    out->last = *end == '-' ? strtoul(end + 1, &end, 10) : out->first;
    *list = end;
    return true;
}

/* The text of a file in `folder`, "" if there is none. */
static void read_list(const char *folder, const char *name, char *list)
{
    char path[PATH_BYTES];
    FILE *file;

    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    file = fopen(path, "re");
    if (file == NULL || fgets(list, LIST_BYTES, file) == NULL)
        list[0] = '\0';
    if (file != NULL)
        (void)fclose(file);
}

/* The cores in `list` become those of node `index`. How many. */
static uint32_t take_cores(msc__nodes *nodes, const char *list, uint32_t index)
{
    uint32_t taken = 0;
    range cores;

    while (next_range(&list, &cores))
        for (; cores.first <= cores.last && cores.first < MSC__CORES_MOST; cores.first++) {
            nodes->of_core[cores.first] = (uint8_t)index;
            taken++;
        }
    return taken;
}

/* False: there are more nodes than can be distinguished. */
static bool take_node(msc__nodes *nodes, const char *folder, unsigned long number)
{
    char name[64];
    char list[LIST_BYTES];

    if (nodes->count == MSC__NODES_MOST)
        return false;
    MSC__ASSERT(nodes->count < MSC__NODES_MOST);
    (void)snprintf(name, sizeof name, "node%lu/cpulist", number);
    read_list(folder, name, list);
    nodes->number[nodes->count] = (int)number;
    if (take_cores(nodes, list, nodes->count) > 0)
        nodes->count++;
    return true;
}

static bool take_nodes(msc__nodes *nodes, const char *folder)
{
    char list[LIST_BYTES];
    const char *at = list;
    range numbers;

    read_list(folder, "online", list);
    while (next_range(&at, &numbers))
        for (; numbers.first <= numbers.last && numbers.first < SYSTEM_NODES; numbers.first++)
            if (!take_node(nodes, folder, numbers.first))
                return false;
    return nodes->count > 0;
}

void msc__nodes_read(msc__nodes *nodes, const char *folder)
{
    memset(nodes, 0, sizeof *nodes);
    nodes->core = this_core;
    nodes->places = places_of;
    if (!take_nodes(nodes, folder)) {
        memset(nodes->of_core, 0, sizeof nodes->of_core);
        nodes->count = 1;
    }
}

uint32_t msc__nodes_here(const msc__nodes *nodes)
{
    int core = nodes->count > 1 ? nodes->core() : 0;

    MSC__ASSERT(nodes->count >= 1 && nodes->count <= MSC__NODES_MOST);
    return core >= 0 && core < (int)MSC__CORES_MOST ? nodes->of_core[core] : 0;
}

/* Index of the node that the system calls `number`; `otherwise`, if none is called so. */
static uint32_t index_of(const msc__nodes *nodes, int number, uint32_t otherwise)
{
    uint32_t i;

    MSC__ASSERT(otherwise < nodes->count);
    for (i = 0; i < nodes->count; i++)
        if (nodes->number[i] == number)
            return i;
    return otherwise;
}

void msc__nodes_of(const msc__nodes *nodes, void *const *addresses, uint32_t count, uint8_t *out)
{
    int numbers[MSC__PLACES_MOST];
    bool told = nodes->count > 1 && nodes->places(count, addresses, numbers) == 0;
    uint32_t i;

    MSC__ASSERT(count <= MSC__PLACES_MOST);
    for (i = 0; i < count; i++)
        out[i] = (uint8_t)index_of(nodes, told ? numbers[i] : -1, i * nodes->count / count);
}
