/* SPDX-License-Identifier: Apache-2.0 */
/* libcudart: streams, events, functions of the host, and computations. */
#include "cudart.h"

#include "card.h"
#include "streams.h"

cudaError_t cudaStreamCreateWithPriority(stream *out, unsigned flags, int priority)
{
    (void)priority;
    *out = (stream)card_stream_create((flags & cudaStreamNonBlocking) == 0);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(stream *out, unsigned flags)
{
    return cudaStreamCreateWithPriority(out, flags, 0);
}

cudaError_t cudaStreamCreate(stream *out)
{
    return cudaStreamCreateWithPriority(out, 0, 0);
}

cudaError_t cudaStreamGetPriority(stream s, int *priority)
{
    (void)s;
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -1;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(stream s, enum cudaStreamCaptureStatus *status)
{
    (void)s;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(stream s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     void *graph, void *dependencies, void *edges, size_t *count)
{
    (void)graph;
    (void)dependencies;
    (void)edges;
    if (id != NULL) {
        *id = 0;
    }
    if (count != NULL) {
        *count = 0;
    }
    return cudaStreamIsCapturing(s, status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    (void)mode;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    (void)flags;
    *out = (cudaEvent_t)card_event_create();
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    return cudaEventCreateWithFlags(out, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    card_event_destroy((card_event *)event);
    return cudaSuccess;
}

static cudaError_t handled(bool well)
{
    return well ? cudaSuccess : note(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventRecord(cudaEvent_t event, stream s)
{
    return handled(card_event_record((card_event *)event, (card_stream *)s));
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, stream s, unsigned flags)
{
    (void)flags;
    return cudaEventRecord(event, s);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    return card_event_query((card_event *)event) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    card_settle();
    return handled(card_event_finish((card_event *)event));
}

cudaError_t cudaStreamWaitEvent(stream s, cudaEvent_t event, unsigned flags)
{
    (void)flags;
    return handled(card_stream_wait((card_stream *)s, (card_event *)event));
}

cudaError_t cudaDeviceSynchronize(void)
{
    card_settle();
    card_finish();
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(stream s)
{
    card_settle();
    card_stream_finish((card_stream *)s);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(stream s)
{
    return card_stream_query((card_stream *)s) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaLaunchHostFunc(stream s, void (*function)(void *), void *argument)
{
    card_submit_call((card_stream *)s, function, argument, 0);
    return cudaSuccess;
}

typedef struct callback {
    void (*function)(stream, cudaError_t, void *);
    stream s;
    void *argument;
} callback;

static void call_back(void *argument)
{
    const callback *what = argument;

    what->function(what->s, cudaSuccess, what->argument);
}

cudaError_t cudaStreamAddCallback(stream s, void (*function)(stream, cudaError_t, void *), void *argument,
                                  unsigned flags)
{
    callback what = {function, s, argument};

    (void)flags;
    card_submit_call((card_stream *)s, call_back, &what, sizeof what);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    (void)from;
    (void)to;
    *ms = 1.0F;
    return cudaSuccess;
}

/* ---- computations (values/standin_values) ---------------------------------------------------------- */

/* Called by values/standin_values before it computes: what is submitted before on this stream has happened. */
void standin_begin_compute(stream s)
{
    card_begin_compute((card_stream *)s);
}

/* The same, for what it touches: `count` accesses of an address, a size, and whether it is written. The index of the
 * first that is not ordered, or -1. */
int standin_accesses(stream s, const char *what, const uint64_t *accesses, int count)
{
    for (int i = 0; i < count; i++) {
        const uint64_t *one = &accesses[3 * i];

        if (!card_submit_access((card_stream *)s, what, (const void *)(uintptr_t)one[0], one[1],
                                one[2] != 0)) {
            return i;
        }
    }
    return -1;
}
