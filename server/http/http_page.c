/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The page's files, all in memory.
 *
 * They are read once, when the server starts, so a request never touches the file system: a path is a name
 * that is in the list or is not. Links are not followed, hidden files are left out.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/array.h"
#include "base/error.h"
#include "base/invariant.h"
#include "http/http.h"

#define MOST_BYTES ((size_t)16 << 20)
#define MOST_DEPTH 4
#define MOST_PATH 512

typedef struct page_file {
    char path[MOST_PATH]; /* below the folder, without a slash in front */
    const char *type;
    uint8_t *bytes;
    size_t count;
} page_file;

struct http_page {
    msc_context *ctx;
    msc__array files; /* page_file */
    size_t bytes;
};

static const char *type_of(const char *path)
{
    static const struct {
        const char *end;
        const char *type;
    } types[] = {
        {".html", "text/html; charset=utf-8"},
        {".js", "text/javascript; charset=utf-8"},
        {".mjs", "text/javascript; charset=utf-8"},
        {".css", "text/css; charset=utf-8"},
        {".json", "application/json"},
        {".svg", "image/svg+xml"},
        {".png", "image/png"},
        {".ico", "image/vnd.microsoft.icon"},
        {".woff2", "font/woff2"},
        {".webmanifest", "application/manifest+json"},
        {".txt", "text/plain; charset=utf-8"},
        {".yaml", "application/yaml"},
    };
    size_t length = strlen(path);
    size_t i;

    for (i = 0; i < sizeof types / sizeof types[0]; i++) {
        size_t bytes = strlen(types[i].end);

        if (length > bytes && strcmp(path + length - bytes, types[i].end) == 0)
            return types[i].type;
    }
    return "application/octet-stream";
}

static msc_status fail_io(const char *path, msc_error *err)
{
    return msc__fail(err, MSC_EIO, "cannot read the page's %s: %s", path, strerror(errno));
}

static msc_status read_all(int fd, page_file *file, msc_error *err)
{
    size_t done = 0;

    while (done < file->count) {
        ssize_t got = read(fd, file->bytes + done, file->count - done);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return fail_io(file->path, err);
        done += (size_t)got;
    }
    return MSC_OK;
}

static msc_status add_file(http_page *page, int fd, size_t bytes, const char *path, msc_error *err)
{
    page_file file = {.type = type_of(path), .count = bytes};
    msc_status status;

    (void)snprintf(file.path, sizeof file.path, "%s", path);
    if (bytes > MOST_BYTES - page->bytes)
        return msc__fail(err, MSC_EOVERFLOW, "the page's files are larger than %zu bytes", MOST_BYTES);
    if (bytes > 0 && (file.bytes = msc__alloc(page->ctx, bytes)) == NULL)
        return msc__fail_memory(err, "the page", bytes);
    status = read_all(fd, &file, err);
    if (status == MSC_OK)
        status = msc__array_push(page->ctx, &page->files, sizeof file, &file, err);
    if (status == MSC_OK)
        page->bytes += bytes;
    else
        msc__free(page->ctx, file.bytes, bytes);
    return status;
}

static msc_status add_folder(http_page *page, int fd, const char *path, int depth, msc_error *err);

static msc_status add_entry(http_page *page, int folder, const char *path, const char *name, int depth,
                            msc_error *err)
{
    char inner[MOST_PATH];
    struct stat info;
    msc_status status = MSC_OK;
    int fd;

    if (name[0] == '.')
        return MSC_OK;
    if (snprintf(inner, sizeof inner, "%s%s%s", path, *path == '\0' ? "" : "/", name) >= MOST_PATH ||
        depth > MOST_DEPTH)
        return msc__fail(err, MSC_EOVERFLOW, "the page's folders are too deep at %s", path);
    fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return errno == ELOOP ? MSC_OK : fail_io(inner, err);
    if (fstat(fd, &info) != 0)
        status = fail_io(inner, err);
    else if (S_ISDIR(info.st_mode))
        return add_folder(page, fd, inner, depth, err);
    else if (S_ISREG(info.st_mode))
        status = add_file(page, fd, (size_t)info.st_size, inner, err);
    (void)close(fd);
    return status;
}

/* Takes `fd` over. */
static msc_status add_folder(http_page *page, int fd, const char *path, int depth, msc_error *err)
{
    DIR *folder = fdopendir(fd);
    msc_status status = MSC_OK;
    const struct dirent *entry;

    if (folder == NULL) {
        (void)close(fd);
        return fail_io(path, err);
    }
    while (status == MSC_OK && (entry = readdir(folder)) != NULL)
        status = add_entry(page, dirfd(folder), path, entry->d_name, depth + 1, err);
    (void)closedir(folder);
    return status;
}

msc_status http_page_load(const msc_allocator *allocator, const char *folder, http_page **out, msc_error *err)
{
    msc_context_options options = msc_context_options_default();
    msc_context *ctx = NULL;
    http_page *page;
    msc_status status;
    int fd;

    *out = NULL;
    options.allocator = *allocator;
    status = msc_context_create(&options, &ctx, err);
    if (status != MSC_OK)
        return status;
    page = msc__alloc(ctx, sizeof *page);
    if (page == NULL) {
        msc_context_destroy(ctx);
        return msc__fail_memory(err, "the page", sizeof *page);
    }
    page->ctx = ctx;
    fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    status = fd < 0 ? fail_io(folder, err) : add_folder(page, fd, "", 0, err);
    if (status == MSC_OK)
        *out = page;
    else
        http_page_free(page);
    return status;
}

void http_page_free(http_page *page)
{
    msc_context *ctx;
    page_file *files;

    if (page == NULL)
        return;
    ctx = page->ctx;
    files = page->files.items;
    for (uint32_t i = 0; i < page->files.count; i++)
        msc__free(ctx, files[i].bytes, files[i].count);
    msc__array_fini(ctx, &page->files, sizeof *files);
    msc__free(ctx, page, sizeof *page);
    MSC__ASSERT(msc_context_held_bytes(ctx) == 0);
    msc_context_destroy(ctx);
}

static bool give(const http_page *page, const char *path, http_reply *reply)
{
    const page_file *files = page == NULL ? NULL : page->files.items;
    uint32_t count = page == NULL ? 0 : page->files.count;

    for (uint32_t i = 0; i < count; i++) {
        if (strcmp(files[i].path, path) == 0) {
            reply->status = 200;
            reply->type = files[i].type;
            reply->body = files[i].bytes;
            reply->body_bytes = files[i].count;
            reply->may_be_kept = true;
            return true;
        }
    }
    return false;
}

bool http_page_find(const http_page *page, const http_target *target, http_reply *reply)
{
    char path[MOST_PATH] = "";
    size_t length = 0;

    for (uint32_t i = 0; i < target->segment_count; i++) {
        int more =
            snprintf(path + length, sizeof path - length, "%s%s", i == 0 ? "" : "/", target->segments[i]);

        if (more < 0 || (size_t)more >= sizeof path - length)
            return false;
        length += (size_t)more;
    }
    return give(page, path, reply);
}

bool http_page_index(const http_page *page, http_reply *reply)
{
    return give(page, "index.html", reply);
}
