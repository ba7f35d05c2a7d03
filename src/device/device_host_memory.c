/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of the machine, from the system's own files.
 *
 * What is free is what can be had without swapping (MemAvailable), not what nobody uses (MemFree). A container
 * has less: a control group ends the process that goes over its limit, however much the machine has left. Every
 * group from the process's own up to the root may have a limit, and the lowest counts. File pages that a group
 * would drop before it reaches its limit (inactive_file) are not in use.
 *
 *      /proc/meminfo          MemTotal:  24589012 kB
 *      /proc/self/cgroup      0::/user.slice/job             the line of version 2
 *      /sys/fs/cgroup/user.slice/job/memory.max              8589934592, or max
 *                                   /memory.current          bytes
 *                                   /memory.stat             inactive_file 123, among others
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"
#include "device/device_host.h"

#define PATH_BYTES 1024
#define LINE_BYTES 512
#define KIB 1024u
#define UNKNOWN UINT64_MAX

/* The number that follows `key` at the start of a line; an empty key: the file's first word. UNKNOWN: no such
   file, no such line, no number. */
static uint64_t read_number(const char *path, const char *key)
{
    FILE *file = fopen(path, "re");
    size_t key_bytes = strlen(key);
    uint64_t number = UNKNOWN;
    char line[LINE_BYTES];

    if (file == NULL)
        return UNKNOWN;
    while (number == UNKNOWN && fgets(line, sizeof line, file) != NULL) {
        const char *digits = line + key_bytes;
        char *end;

        if (strncmp(line, key, key_bytes) != 0)
            continue;
        digits += strspn(digits, " \t");
        if (*digits >= '0' && *digits <= '9')
            number = strtoull(digits, &end, 10);
    }
    (void)fclose(file);
    return number;
}

/* The group of this process in the one hierarchy of version 2, such as "/job"; false: there is none. */
static bool read_group(const char *root, char *out, size_t out_bytes)
{
    char path[PATH_BYTES];
    char line[PATH_BYTES];
    bool found = false;
    FILE *file;

    (void)snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    file = fopen(path, "re");
    if (file == NULL)
        return false;
    while (!found && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, "0::/", 4) != 0)
            continue;
        line[strcspn(line, "\n")] = '\0';
        (void)snprintf(out, out_bytes, "%s", line + 3);
        found = true;
    }
    (void)fclose(file);
    return found;
}

/* Lowers `memory` to what one group leaves. */
static void limit_to_group(const char *root, const char *group, msc_device_memory *memory)
{
    char path[2 * PATH_BYTES];
    uint64_t limit;
    uint64_t used;
    uint64_t cache;
    int end = snprintf(path, sizeof path, "%s/sys/fs/cgroup%s/", root, group);
    size_t rest;

    if (end < 0 || (size_t)end >= sizeof path)
        return;
    rest = sizeof path - (size_t)end;
    MSC__ASSERT(rest > 0);
    (void)snprintf(path + end, rest, "memory.max");
    limit = read_number(path, "");
    if (limit == UNKNOWN)
        return; /* "max", or the root, which has no such file */
    (void)snprintf(path + end, rest, "memory.current");
    used = read_number(path, "");
    (void)snprintf(path + end, rest, "memory.stat");
    cache = read_number(path, "inactive_file ");
    used = used == UNKNOWN ? 0 : msc__sat_sub_u64(used, cache == UNKNOWN ? 0 : cache);
    if (limit < memory->total_bytes)
        memory->total_bytes = limit;
    if (msc__sat_sub_u64(limit, used) < memory->free_bytes)
        memory->free_bytes = msc__sat_sub_u64(limit, used);
}

msc_status msc__host_memory_read(const char *root, msc_device_memory *out, msc_error *err)
{
    char path[PATH_BYTES];
    char group[PATH_BYTES];
    uint64_t total_kib;
    uint64_t available_kib;

    (void)snprintf(path, sizeof path, "%s/proc/meminfo", root);
    total_kib = read_number(path, "MemTotal:");
    available_kib = read_number(path, "MemAvailable:");
    if (total_kib > UINT64_MAX / KIB || available_kib > UINT64_MAX / KIB)
        return msc__fail(err, MSC_EIO, "cannot read MemTotal and MemAvailable from %s", path);
    out->total_bytes = total_kib * KIB;
    out->free_bytes = available_kib * KIB;
    if (!read_group(root, group, sizeof group))
        return MSC_OK;
    for (;;) {
        char *last = strrchr(group, '/');

        limit_to_group(root, group, out);
        if (last == NULL)
            return MSC_OK; /* that was the root: "" */
        *last = '\0';
    }
}
