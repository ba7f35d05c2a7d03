/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a process has allocated at once, by who asked: a library to be preloaded in front of the C library's allocator.
 *
 *   cc -O2 -shared -fPIC -o watch_malloc.so bench/c/watch_malloc.c -ldl -lpthread
 *   LD_PRELOAD=$PWD/watch_malloc.so python program.py
 *
 * The library that called malloc decides:
 *
 *   tensors    aligned blocks of libc10: PyTorch's CPU allocator, the one whose events the profiler shows
 *   libraries  libtorch_cpu (MKL and oneDNN are part of it), libgomp, libmkl*, libdnnl*: packing buffers, workspaces
 *   code       anonymous maps of the same: oneDNN reserves 256 KiB for each kernel that it generates
 *   objects    operator new, called by any of PyTorch's libraries, and what is left of libc10: nodes of autograd, lists
 *   own        MemScale's core: staging buffers, tables
 *
 * Everything else (the interpreter, NumPy, the C library) passes unseen. `bench/python/library_memory.py` builds this
 * and reads it with ctypes. Linux with glibc only.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dladdr, mmap64 */
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define BLOCKS (UINT64_C(1) << 22)  /* slots for blocks that are alive; at most half of them are used */
#define CALLERS (UINT64_C(1) << 18) /* slots for return addresses that were looked up */
#define PROBES 64u
#define PAGE UINT64_C(4096)
#define PAGES_AT_ONCE 512u

enum owner { TENSORS, LIBRARIES, CODE, OBJECTS, OWN, OWNERS, NOBODY = OWNERS };

struct block {
    uint64_t address; /* 0: the slot is free */
    uint64_t bytes;
    enum owner owner;
};

struct caller {
    uintptr_t address;
    enum owner owner;
};

/* What `watch_read` gives, all in bytes. */
struct watched {
    int64_t live[OWNERS];
    int64_t peak[OWNERS];
    int64_t peak_with_libraries; /* of tensors, libraries and code together */
};

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *block, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *block);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;
static struct caller callers[CALLERS];
static struct watched totals;
static uint64_t used;

static uint64_t hashed(uint64_t value, unsigned bits)
{
    return (value * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - bits);
}

static enum owner owner_of_file(const char *path)
{
    static const struct {
        const char *prefix;
        enum owner owner;
    } known[] = {
        {"libc10", TENSORS},        {"libtorch_cpu", LIBRARIES},
        {"libtorch.so", LIBRARIES}, {"libgomp", LIBRARIES},
        {"libmkl", LIBRARIES},      {"libdnnl", LIBRARIES},
        {"libtorch", OBJECTS},      {"_core", OWN},
    };
    const char *slash = strrchr(path, '/'), *file = slash != NULL ? slash + 1 : path;
    size_t i;

    for (i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strncmp(file, known[i].prefix, strlen(known[i].prefix)) == 0)
            return known[i].owner;
    return NOBODY;
}

/* Looking an address up takes long, and there are few: remembered. */
static enum owner owner_of(uintptr_t address)
{
    uint64_t first = hashed(address, 18);
    Dl_info found;
    unsigned i;

    for (i = 0; i < PROBES; i++) {
        struct caller *known = &callers[(first + i) & (CALLERS - 1)];

        if (known->address == address)
            return known->owner;
        if (known->address != 0)
            continue;
        known->owner = NOBODY;
        if (dladdr((const void *)address, &found) != 0 && found.dli_fname != NULL)
            known->owner = owner_of_file(found.dli_fname);
        known->address = address;
        return known->owner;
    }
    return NOBODY;
}

static uint64_t slot_of(uint64_t address)
{
    return hashed(address >> 4, 22);
}

static void count(enum owner owner, int64_t bytes)
{
    int64_t together;

    totals.live[owner] += bytes;
    if (totals.live[owner] > totals.peak[owner])
        totals.peak[owner] = totals.live[owner];
    together = totals.live[TENSORS] + totals.live[LIBRARIES] + totals.live[CODE];
    if (together > totals.peak_with_libraries)
        totals.peak_with_libraries = together;
}

/* What kind of call it was may say more than who made it. */
enum call { PLAIN, ALIGNED, NEW, MAP };

static void note(void *address, size_t bytes, uintptr_t from, enum call call)
{
    enum owner owner;
    uint64_t i;

    if (address == NULL)
        return;
    pthread_mutex_lock(&lock);
    if (blocks == NULL) {
        long made = syscall(SYS_mmap, NULL, BLOCKS * sizeof *blocks, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0L);

        blocks = made == -1 ? NULL : (struct block *)made;
    }
    owner = owner_of(from);
    if (call == NEW && (owner == TENSORS || owner == LIBRARIES))
        owner = OBJECTS;
    if (call == PLAIN && owner == TENSORS) /* its lists; the allocator asks for aligned blocks */
        owner = OBJECTS;
    if (call == MAP && owner == LIBRARIES)
        owner = CODE;
    if (owner != NOBODY && blocks != NULL && used < BLOCKS / 2) {
        for (i = slot_of((uint64_t)address); blocks[i].address != 0; i = (i + 1) & (BLOCKS - 1))
            ;
        blocks[i] = (struct block){(uint64_t)address, bytes, owner};
        used++;
        count(owner, (int64_t)bytes);
    }
    pthread_mutex_unlock(&lock);
}

/* Frees a slot, and moves up those behind it that were put there because it was full. */
static void vacate(uint64_t hole)
{
    uint64_t i = hole;

    used--;
    blocks[hole].address = 0;
    for (i = (i + 1) & (BLOCKS - 1); blocks[i].address != 0; i = (i + 1) & (BLOCKS - 1)) {
        uint64_t wanted = slot_of(blocks[i].address);

        if (((i - wanted) & (BLOCKS - 1)) < ((i - hole) & (BLOCKS - 1)))
            continue;
        blocks[hole] = blocks[i];
        blocks[i].address = 0;
        hole = i;
    }
}

static void forget(void *address)
{
    uint64_t i;

    if (address == NULL)
        return;
    pthread_mutex_lock(&lock);
    if (blocks != NULL) {
        for (i = slot_of((uint64_t)address); blocks[i].address != 0; i = (i + 1) & (BLOCKS - 1)) {
            if (blocks[i].address != (uint64_t)address)
                continue;
            count(blocks[i].owner, -(int64_t)blocks[i].bytes);
            vacate(i);
            break;
        }
    }
    pthread_mutex_unlock(&lock);
}

/* ---- in front of the C library --------------------------------------------------------------------------------- */

#define FROM ((uintptr_t)__builtin_return_address(0))
#define FRONT __attribute__((visibility("default")))

FRONT void *malloc(size_t bytes)
{
    void *made = __libc_malloc(bytes);

    note(made, bytes, FROM, PLAIN);
    return made;
}

FRONT void *calloc(size_t many, size_t bytes)
{
    void *made = __libc_calloc(many, bytes);

    note(made, many * bytes, FROM, PLAIN);
    return made;
}

FRONT void free(void *block)
{
    forget(block);
    __libc_free(block);
}

FRONT void *realloc(void *block, size_t bytes)
{
    void *made;

    forget(block);
    made = __libc_realloc(block, bytes);
    note(made, bytes, FROM, PLAIN);
    return made;
}

FRONT int posix_memalign(void **out, size_t alignment, size_t bytes)
{
    void *made = __libc_memalign(alignment, bytes);

    if (made == NULL)
        return ENOMEM;
    note(made, bytes, FROM, ALIGNED);
    *out = made;
    return 0;
}

FRONT void *memalign(size_t alignment, size_t bytes)
{
    void *made = __libc_memalign(alignment, bytes);

    note(made, bytes, FROM, ALIGNED);
    return made;
}

FRONT void *aligned_alloc(size_t alignment, size_t bytes)
{
    void *made = __libc_memalign(alignment, bytes);

    note(made, bytes, FROM, ALIGNED);
    return made;
}

FRONT void *mmap(void *hint, size_t bytes, int protection, int flags, int file, off_t offset)
{
    void *made = (void *)syscall(SYS_mmap, hint, bytes, protection, flags, file, offset);

    if (made != MAP_FAILED && (flags & MAP_ANONYMOUS) != 0)
        note(made, bytes, FROM, MAP);
    return made;
}

FRONT void *mmap64(void *hint, size_t bytes, int protection, int flags, int file, off_t offset)
    __attribute__((alias("mmap")));

FRONT int munmap(void *address, size_t bytes)
{
    forget(address);
    return (int)syscall(SYS_munmap, address, bytes);
}

/* C++'s operators new, plain and aligned; delete ends in free. */
FRONT void *_Znwm(size_t bytes)
{
    void *made = __libc_malloc(bytes != 0 ? bytes : 1);

    note(made, bytes, FROM, NEW);
    return made;
}

FRONT void *_Znam(size_t bytes)
{
    void *made = __libc_malloc(bytes != 0 ? bytes : 1);

    note(made, bytes, FROM, NEW);
    return made;
}

FRONT void *_ZnwmSt11align_val_t(size_t bytes, size_t alignment)
{
    void *made = __libc_memalign(alignment, bytes);

    note(made, bytes, FROM, NEW);
    return made;
}

/* ---- what is read by ctypes ------------------------------------------------------------------------------------ */

/* Peaks begin again with what is alive now. */
FRONT void watch_reset(void)
{
    pthread_mutex_lock(&lock);
    memcpy(totals.peak, totals.live, sizeof totals.peak);
    totals.peak_with_libraries = totals.live[TENSORS] + totals.live[LIBRARIES] + totals.live[CODE];
    pthread_mutex_unlock(&lock);
}

FRONT void watch_read(struct watched *out)
{
    pthread_mutex_lock(&lock);
    *out = totals;
    pthread_mutex_unlock(&lock);
}

static uint64_t present(int pagemap, const struct block *block)
{
    uint64_t page = block->address / PAGE, end = (block->address + block->bytes + PAGE - 1) / PAGE, found = 0;
    uint64_t entries[PAGES_AT_ONCE];

    if (block->bytes < 4 * PAGE)
        return block->bytes;
    while (page < end) {
        size_t many = end - page < PAGES_AT_ONCE ? (size_t)(end - page) : PAGES_AT_ONCE, i;
        ssize_t wanted = (ssize_t)(many * sizeof entries[0]);

        if (pread(pagemap, entries, (size_t)wanted, (off_t)(page * sizeof entries[0])) != wanted)
            break;
        for (i = 0; i < many; i++)
            found += entries[i] >> 63 != 0 ? PAGE : 0;
        page += many;
    }
    return found;
}

/* Bytes of an owner's live blocks that lie in memory: pages that were written. Small blocks count whole. */
FRONT uint64_t watch_touched(int owner)
{
    int pagemap = open("/proc/self/pagemap", O_RDONLY);
    uint64_t found = 0, i;

    if (pagemap < 0)
        return 0;
    pthread_mutex_lock(&lock);
    for (i = 0; blocks != NULL && i < BLOCKS; i++)
        if (blocks[i].address != 0 && (int)blocks[i].owner == owner)
            found += present(pagemap, &blocks[i]);
    pthread_mutex_unlock(&lock);
    (void)close(pagemap);
    return found;
}
