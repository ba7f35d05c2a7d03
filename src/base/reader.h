/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file reader.h
 * Reading line-oriented text made of words separated by one space.
 *
 * The reader never looks past `text + text_bytes`, needs no terminator and allocates nothing. It stops at
 * the first error; every later call fails with the same error, so a caller may check once per line.
 */
#ifndef MSC_BASE_READER_H
#define MSC_BASE_READER_H

#include <stdbool.h>

#include "memscale/base.h"

typedef struct msc__reader {
    const char *at;
    const char *end;
    const char *what; /**< names the format in messages, e.g. "graph" */
    uint32_t line;    /**< 1-based */
    bool space;       /**< a space was taken, so that something must follow it */
    msc_status status;
    msc_error *err; /**< may be NULL */
} msc__reader;

void msc__reader_init(msc__reader *reader, const char *what, const char *text, size_t text_bytes,
                      msc_error *err);
/** True when nothing is left. */
bool msc__reader_at_end(const msc__reader *reader);
/** Reads a word: at least one byte, up to a space or a line end. False on error. */
bool msc__reader_word(msc__reader *reader, const char **word, size_t *word_bytes);
/** Reads a word that must be `expected`. */
bool msc__reader_expect(msc__reader *reader, const char *expected);
/** Reads a decimal number of at most `max`: digits only, no leading zero. */
bool msc__reader_u64(msc__reader *reader, uint64_t max, uint64_t *value);
/** Reads exactly 16 lower-case hexadecimal digits. */
bool msc__reader_hex64(msc__reader *reader, uint64_t *value);
/** Reads the rest of the line, which may be empty and may hold spaces. */
bool msc__reader_rest(msc__reader *reader, const char **text, size_t *text_bytes);
/** Reads a line end. */
bool msc__reader_line_end(msc__reader *reader);
/** Records a format error at the present line. Returns false. */
bool msc__reader_fail(msc__reader *reader, msc_status status, const char *problem);

#endif /* MSC_BASE_READER_H */
