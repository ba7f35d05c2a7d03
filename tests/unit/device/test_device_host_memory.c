/* SPDX-License-Identifier: Apache-2.0 */
/* The machine's memory, read from stand-ins for /proc and /sys that say what a test wants. */
#include "device_fixture.h"

#include <stdio.h>
#include <sys/stat.h>

#include "device/device_host.h"

#define GIB (UINT64_C(1) << 30)

/* A folder that is empty at the start of each test. */
static char root[64];

static int open_root(void **state)
{
    (void)state;
    (void)snprintf(root, sizeof root, "/tmp/msc_test_memory_XXXXXX");
    return mkdtemp(root) == NULL;
}

static int close_root(void **state)
{
    char command[128];

    (void)state;
    (void)snprintf(command, sizeof command, "rm -r '%s'", root);
    return system(command);
}

/* Writes a file below the root, and makes the folders on the way. */
static void put(const char *path, const char *text)
{
    char whole[256];
    char *slash;
    FILE *file;

    (void)snprintf(whole, sizeof whole, "%s/%s", root, path);
    for (slash = strchr(whole + strlen(root) + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(whole, 0700);
        *slash = '/';
    }
    file = fopen(whole, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static void put_meminfo(void)
{
    put("proc/meminfo",
        "MemTotal:       16777216 kB\nMemFree:          100000 kB\nMemAvailable:    8388608 kB\n");
}

static void expect(uint64_t free_bytes, uint64_t total_bytes)
{
    msc_device_memory memory;
    msc_error err;

    memset(&err, 0, sizeof err);
    if (msc__host_memory_read(root, &memory, &err) != MSC_OK)
        fail_msg("%s", err.message);
    assert_int_equal(memory.total_bytes, total_bytes);
    assert_int_equal(memory.free_bytes, free_bytes);
}

static void machine(void **state)
{
    (void)state;
    put_meminfo();
    expect(8 * GIB, 16 * GIB);
    put("proc/self/cgroup", "12:memory:/old\n1:name=systemd:/x\n");
    expect(8 * GIB, 16 * GIB);
}

static void group_limit(void **state)
{
    (void)state;
    put_meminfo();
    put("proc/self/cgroup", "1:name=systemd:/x\n0::/slice/job\n");
    expect(8 * GIB, 16 * GIB);
    put("sys/fs/cgroup/slice/job/memory.max", "max\n");
    expect(8 * GIB, 16 * GIB);
    put("sys/fs/cgroup/slice/job/memory.max", "6442450944\n");
    put("sys/fs/cgroup/slice/job/memory.current", "2147483648\n");
    expect(4 * GIB, 6 * GIB);
    put("sys/fs/cgroup/slice/job/memory.stat", "anon 77\nfile 5\ninactive_file 1073741824\nactive_file 9\n");
    expect(5 * GIB, 6 * GIB);
    put("sys/fs/cgroup/slice/job/memory.current", "8589934592\n");
    put("sys/fs/cgroup/slice/job/memory.stat", "");
    expect(0, 6 * GIB);
}

/* A group above has less, and the machine may have less than any group. */
static void lowest_limit(void **state)
{
    (void)state;
    put_meminfo();
    put("proc/self/cgroup", "0::/slice/job\n");
    put("sys/fs/cgroup/slice/job/memory.max", "6442450944\n");
    put("sys/fs/cgroup/slice/memory.max", "3221225472\n");
    expect(3 * GIB, 3 * GIB);
    put("sys/fs/cgroup/memory.max", "2147483648\n"); /* a container sees its own group as the root */
    expect(2 * GIB, 2 * GIB);
    put("sys/fs/cgroup/memory.max", "68719476736\n");
    put("sys/fs/cgroup/slice/memory.max", "68719476736\n");
    put("sys/fs/cgroup/slice/job/memory.max", "68719476736\n");
    expect(8 * GIB, 16 * GIB);
}

static void unreadable(void **state)
{
    msc_device_memory memory;
    msc_error err;

    (void)state;
    assert_int_equal(msc__host_memory_read(root, &memory, &err), MSC_EIO);
    put("proc/meminfo", "MemTotal:       16777216 kB\n");
    assert_int_equal(msc__host_memory_read(root, &memory, &err), MSC_EIO);
    put("proc/meminfo", "MemTotal:       lots\nMemAvailable:    8388608 kB\n");
    assert_int_equal(msc__host_memory_read(root, &memory, &err), MSC_EIO);
    put("proc/meminfo", "MemTotal:       99999999999999999999 kB\nMemAvailable:    8388608 kB\n");
    assert_int_equal(msc__host_memory_read(root, &memory, &err), MSC_EIO);
    assert_non_null(strstr(err.message, "/proc/meminfo"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"device_host_memory/machine", machine, open_root, close_root, NULL},
        {"device_host_memory/group-limit", group_limit, open_root, close_root, NULL},
        {"device_host_memory/lowest-limit", lowest_limit, open_root, close_root, NULL},
        {"device_host_memory/unreadable", unreadable, open_root, close_root, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
