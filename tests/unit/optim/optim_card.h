/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file optim_card.h
 * A card to test, with memory on it that has an image here: arrays are placed in the image, sent there as a whole, and
 * brought back as a whole. Between arrays lie bytes that nothing may change.
 *
 * An array begins at a multiple of its numbers' size and, from one to the next, of nothing larger.
 */
#ifndef MSC_TEST_OPTIM_CARD_H
#define MSC_TEST_OPTIM_CARD_H

#include "optim_fixture.h"

#include "device/device_internal.h"

#define CARD_BYTES ((size_t)8 << 20)
#define CARD_SKIPPED 77

/** The optimizer on the card, with one stream for all that a test does there. */
extern msc_optim *card_optim;
extern msc_device *card_device;
extern void *card_stream;

/**
 * Opens the card: on the stand-in libraries, or on a real one where they are NULL. `compiler` may be named for a real one.
 * Returns 0, or CARD_SKIPPED where there is no card or no compiler, and says why.
 */
int card_open(const char *library, const char *compiler);

/** Nothing may be left. */
void card_close(void);

/** Forgets all arrays. */
void card_clear(void);

/** Room for an array of `count` numbers of `each` bytes, with what is at `from`, or zeros. Returns its image. */
void *card_place(const void *from, uint64_t count, uint32_t each);

/** Where an array of the image is on the card; NULL for NULL. */
void *card_address(const void *image);

/** The image to the card, and back; back, the bytes between arrays are as they were. */
void card_send(void);
void card_fetch(void);

/** As tensor and arrays of a fixture, in the image. `on_card` gives the tensor with addresses of the card. */
fixture card_mirror(const fixture *of);
msc_optim_tensor card_tensor(const fixture *mirror);

#endif /* MSC_TEST_OPTIM_CARD_H */
