/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keeps the files of a spool within their cap.
 *
 *     level   0 0 0 0 | writing          the oldest of the lowest level loses every second row of each series
 *             1 0 0 0 | writing          until one more file fits
 *             1 1 1 1 | writing          … so in the end all are equally thin
 *
 * A file is replaced by a rename, so who reads it has the one or the other. Batches keep their numbers, and
 * where one was sent already, the server knows it by its number.
 */
#include "record/record_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/error.h"

#define MOST_LEVEL 16u
#define SERIES 256u
#define MOST_FILE_BYTES (UINT64_C(1) << 30)

void msc__writer_name(const msc__writer *writer, uint32_t segment, const char *suffix,
                      char name[MSC__SPOOL_NAME_BYTES])
{
    (void)snprintf(name, MSC__SPOOL_NAME_BYTES, "%s-%08u.%s", writer->client, segment, suffix);
}

/* Size of a file; false: it is not there. */
static bool size_of(const msc__writer *writer, uint32_t segment, uint64_t *out)
{
    char name[MSC__SPOOL_NAME_BYTES];
    struct stat found;

    msc__writer_name(writer, segment, "spool", name);
    if (fstatat(writer->folder, name, &found, 0) != 0 || found.st_size < 0)
        return false;
    *out = (uint64_t)found.st_size;
    return true;
}

static bool read_all(int fd, uint8_t *bytes, uint64_t count)
{
    uint64_t done = 0;

    while (done < count) {
        ssize_t got = pread(fd, bytes + done, count - done, (off_t)done);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        done += (uint64_t)got;
    }
    return true;
}

static bool write_all(int fd, const uint8_t *bytes, uint64_t count)
{
    uint64_t done = 0;

    while (done < count) {
        ssize_t wrote = write(fd, bytes + done, count - done);

        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0)
            return false;
        done += (uint64_t)wrote;
    }
    return fsync(fd) == 0;
}

/* The level of a file; MOST_LEVEL: it cannot be thinned. */
static uint32_t level_of(const msc__writer *writer, uint32_t segment)
{
    char name[MSC__SPOOL_NAME_BYTES];
    uint8_t header[MSC__SPOOL_HEADER_BYTES];
    uint32_t level = MOST_LEVEL;
    int fd;

    msc__writer_name(writer, segment, "spool", name);
    fd = openat(writer->folder, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return MOST_LEVEL;
    if (!read_all(fd, header, sizeof header) ||
        msc__spool_get_header(header, sizeof header, &level, NULL) != MSC_OK)
        level = MOST_LEVEL;
    (void)close(fd);
    return level;
}

/* Which of the rows of a series go: every second, by the first name in the row. */
static bool goes(const msc__spool_record *record, bool odd[SERIES])
{
    msc__spool_row row;
    msc__spool_value first;
    uint32_t at;

    if (record->kind != MSC__SPOOL_ROW)
        return false;
    if (!msc__spool_row_begin(record->payload, record->payload_bytes, &row) ||
        !msc__spool_row_next(&row, &first))
        return true;
    at = msc__crc32c(0, first.name, first.name_bytes) % SERIES;
    odd[at] = !odd[at];
    return !odd[at];
}

/* Moves what stays to the front. Its bytes; `*removed` rows are counted. */
static uint64_t thin(uint8_t *bytes, uint64_t count, uint64_t *removed)
{
    bool odd[SERIES] = {false};
    uint64_t from = MSC__SPOOL_HEADER_BYTES;
    uint64_t to = from;

    while (from < count) {
        msc__spool_record record;
        uint32_t size = msc__spool_get(bytes + from, count - from, &record);

        if (size == 0) { /* damaged: the next one that is sound */
            from += 8;
            continue;
        }
        if (goes(&record, odd)) {
            (*removed)++;
        } else {
            memmove(bytes + to, bytes + from, size);
            to += size;
        }
        from += size;
    }
    return to;
}

/* Puts a file's new bytes in its place. */
static bool replace(const msc__writer *writer, uint32_t segment, const uint8_t *bytes, uint64_t count)
{
    char name[MSC__SPOOL_NAME_BYTES];
    char fresh[MSC__SPOOL_NAME_BYTES];
    bool ok;
    int fd;

    msc__writer_name(writer, segment, "spool", name);
    msc__writer_name(writer, segment, "fresh", fresh);
    fd = openat(writer->folder, fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return false;
    ok = write_all(fd, bytes, count);
    (void)close(fd);
    ok = ok && renameat(writer->folder, fresh, writer->folder, name) == 0;
    if (!ok)
        (void)unlinkat(writer->folder, fresh, 0);
    return ok;
}

/* Removes rows of a file. One that has none is not looked at again. False: it could not be done. */
static bool thin_file(msc__writer *writer, uint32_t segment, uint64_t size, uint32_t level, uint64_t *saved)
{
    char name[MSC__SPOOL_NAME_BYTES];
    uint64_t removed = 0;
    uint8_t *bytes;
    bool ok = false;
    int fd;

    *saved = 0;
    bytes = size > MOST_FILE_BYTES ? NULL : msc__alloc(writer->ctx, size);
    if (bytes == NULL)
        return false;
    msc__writer_name(writer, segment, "spool", name);
    fd = openat(writer->folder, name, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && read_all(fd, bytes, size)) {
        uint64_t left = thin(bytes, size, &removed);

        msc__spool_put_header(bytes, removed > 0 ? level + 1 : MOST_LEVEL, segment);
        ok = replace(writer, segment, bytes, left);
        if (ok) {
            *saved = size - left;
            writer->dropped_rows += removed;
        }
    }
    if (fd >= 0)
        (void)close(fd);
    msc__free(writer->ctx, bytes, size);
    return ok;
}

/* The oldest complete file of the lowest level; false: there is none that could lose a row. */
static bool find_lowest(const msc__writer *writer, uint32_t *segment, uint32_t *level, uint64_t *size)
{
    uint32_t number;

    *level = MOST_LEVEL;
    for (number = writer->first; number < writer->segment; number++) {
        uint64_t bytes;
        uint32_t here;

        if (!size_of(writer, number, &bytes) || bytes < MSC__SPOOL_HEADER_BYTES)
            continue;
        here = level_of(writer, number);
        if (here >= *level)
            continue;
        *segment = number;
        *level = here;
        *size = bytes;
    }
    return *level < MOST_LEVEL;
}

static uint64_t look(msc__writer *writer)
{
    uint64_t total = 0;
    uint64_t size;
    uint32_t number;
    bool is_first = true;

    for (number = writer->first; number <= writer->segment; number++) {
        if (!size_of(writer, number, &size)) {
            writer->first += is_first && number < writer->segment;
            continue;
        }
        is_first = false;
        total += size;
    }
    writer->held_bytes = total;
    return total;
}

void msc__writer_trim(msc__writer *writer)
{
    uint64_t room = writer->cap_bytes - writer->segment_bytes;
    uint64_t total = look(writer);
    uint64_t size = 0;
    uint64_t saved;
    uint32_t segment = 0;
    uint32_t level;

    while (total > room && find_lowest(writer, &segment, &level, &size) &&
           thin_file(writer, segment, size, level, &saved))
        total -= saved;
    writer->held_bytes = total;
    writer->is_full = total > room;
    writer->is_overfull = total > writer->cap_bytes;
}
