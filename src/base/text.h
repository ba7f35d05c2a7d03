/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file text.h
 * Canonical text: one writer that fills a buffer, counts, or digests, so that all three always agree.
 */
#ifndef MSC_BASE_TEXT_H
#define MSC_BASE_TEXT_H

#include "memscale/base.h"

/** Where text goes. The digest (FNV-1a, 64 bit) and the length cover all of it, whatever fits. */
typedef struct msc__text {
    char *buffer;        /**< may be NULL */
    size_t buffer_bytes; /**< room, terminator included */
    size_t length;       /**< of the whole text */
    uint64_t digest;
} msc__text;

void msc__text_init(msc__text *text, char *buffer, size_t buffer_bytes);
void msc__text_put(msc__text *text, const char *string);
void msc__text_put_char(msc__text *text, char c);
void msc__text_put_u64(msc__text *text, uint64_t value);
void msc__text_put_hex64(msc__text *text, uint64_t value); /**< 16 lower-case digits */
/** Terminates the buffer, if there is one. Call once, last. */
void msc__text_end(msc__text *text);

#endif /* MSC_BASE_TEXT_H */
