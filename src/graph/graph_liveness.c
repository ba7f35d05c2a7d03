/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When buffers of the plain step end.
 *
 * The graph keeps two facts apart: the natural end of a buffer, at which the program let go of it, and
 * the releases of the saves that refer to it, at which autograd did. The plain step frees the buffer at
 * the later of the two:
 *
 *      buffer  [=========)                 natural end
 *      saves        P- - - -R              released later
 *                      P- - - - -R         released last: this is the end
 *
 * One pass over the saves gives all ends. A buffer that outlives the step has the end op count + 1, which
 * lies beyond every release, and therefore stays what it is.
 */
#include "base/error.h"
#include "base/invariant.h"
#include "graph/graph_internal.h"

msc_status msc_graph_plain_ends(const msc_graph *graph, uint32_t *out, msc_error *err)
{
    const msc_buffer *buffers = graph->buffers.items;
    const msc_save *saves = graph->saves.items;
    uint32_t i;

    if (!graph->finished)
        return msc__fail(err, MSC_ESTATE, "cannot compute ends: the graph is not finished");
    if (graph->buffers.count == 0)
        return MSC_OK;
    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot compute %u ends: out is NULL", graph->buffers.count);
    for (i = 0; i < graph->buffers.count; i++)
        out[i] = buffers[i].end;
    for (i = 0; i < graph->saves.count; i++) {
        MSC__ASSERT(saves[i].buffer < graph->buffers.count && saves[i].release <= graph->ops.count);
        if (out[saves[i].buffer] < saves[i].release)
            out[saves[i].buffer] = saves[i].release;
    }
    return MSC_OK;
}
