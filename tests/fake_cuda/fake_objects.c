/* SPDX-License-Identifier: Apache-2.0 */
/* The fake driver's books: settings, the table of objects, the context stacks, and who is to blame. */
#include "fake_cuda/fake_objects.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/cuda_types.h"
#include "fake_cuda/fake_cuda.h"

#define STACK_MOST 16
#define NAME_BYTES 64

fake_card fake_cards[FAKE_CARDS_MOST];
int fake_card_count;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;       /* over everything in this file */
static pthread_mutex_t maker_mutex = PTHREAD_MUTEX_INITIALIZER; /* fake_lock */
static fake_object *objects;
static size_t object_count;
static size_t object_capacity;
static fake_cuda_report report;
static uint64_t card_bytes;
static uint64_t pin_limit_bytes;
static int capability;
static long process; /* 0: cuInit was not called */
static struct {
    char name[NAME_BYTES];
    unsigned left; /* calls until it fails; 0: never */
    int result;
} failing;

static _Thread_local int stack[STACK_MOST];
static _Thread_local int stack_depth;

void fake_lock(void)
{
    pthread_mutex_lock(&maker_mutex);
}

void fake_unlock(void)
{
    pthread_mutex_unlock(&maker_mutex);
}

/* ---- settings --------------------------------------------------------------------------------------- */

static uint64_t setting(const char *name, uint64_t usual)
{
    const char *text = getenv(name);

    return text != NULL ? strtoull(text, NULL, 10) : usual;
}

static void read_failing(void)
{
    const char *text = getenv("FAKE_CUDA_FAIL");
    char name[NAME_BYTES];
    unsigned nth;
    int result;

    if (text != NULL && sscanf(text, "%63[^:]:%u:%d", name, &nth, &result) == 3)
        fake_cuda_fail(name, nth, result);
}

static msc_context *open_context(void)
{
    msc_context *ctx = NULL;

    if (msc_context_create(NULL, &ctx, NULL) != MSC_OK)
        abort();
    return ctx;
}

int fake_start(void)
{
    msc_device_options options = msc_device_options_default();
    int count;
    int i;

    if (process != 0)
        return fake_card_count > 0 ? MSC__CU_SUCCESS : MSC__CU_NO_DEVICE;
    options.faults.seed = setting("FAKE_CUDA_SEED", 0);
    options.faults.delay_most_ns = (int64_t)setting("FAKE_CUDA_DELAY_MOST_NS", 0);
    options.faults.bytes_per_second = setting("FAKE_CUDA_BYTES_PER_SECOND", 0);
    options.faults.split_ppm = (uint32_t)setting("FAKE_CUDA_SPLIT_PPM", 0);
    card_bytes = setting("FAKE_CUDA_BYTES", UINT64_C(1) << 30);
    pin_limit_bytes = setting("FAKE_CUDA_PIN_LIMIT_BYTES", 0);
    capability = (int)setting("FAKE_CUDA_CAPABILITY", 90);
    count = (int)setting("FAKE_CUDA_CARDS", 2);
    fake_card_count = count < FAKE_CARDS_MOST ? count : FAKE_CARDS_MOST;
    read_failing();
    for (i = 0; i < fake_card_count; i++) {
        fake_cards[i].context = fake_add(FAKE_CONTEXT, i, NULL, 0);
        if (msc_device_create(open_context(), &options, &fake_cards[i].device, NULL) != MSC_OK)
            abort();
        options.faults.seed++;
    }
    process = (long)getpid();
    return fake_card_count > 0 ? MSC__CU_SUCCESS : MSC__CU_NO_DEVICE;
}

uint64_t fake_card_bytes(void)
{
    return card_bytes;
}

int fake_capability(void)
{
    return capability;
}

uint64_t fake_pin_limit_bytes(void)
{
    return pin_limit_bytes;
}

/* ---- calls ------------------------------------------------------------------------------------------ */

int fake_blame(const char *function, const char *why, int result)
{
    pthread_mutex_lock(&mutex);
    if (report.violation_count++ == 0)
        (void)snprintf(report.first_violation, sizeof report.first_violation, "%s: %s", function, why);
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Counts the call; true if it is the one that shall fail. */
static bool fails(const char *function, int *result)
{
    bool hit = false;

    pthread_mutex_lock(&mutex);
    if (failing.left > 0 && strcmp(failing.name, function) == 0) {
        hit = --failing.left == 0;
        *result = failing.result;
    }
    pthread_mutex_unlock(&mutex);
    return hit;
}

int fake_begin(const char *function, bool needs_context, int *card)
{
    int result;

    if (process == 0)
        return fake_blame(function, "cuInit was not called", MSC__CU_NOT_INITIALIZED);
    if (process != (long)getpid())
        return fake_blame(function, "called in a forked child", MSC__CU_NOT_INITIALIZED);
    if (needs_context) {
        if (stack_depth == 0)
            return fake_blame(function, "no context is current", MSC__CU_INVALID_CONTEXT);
        *card = stack[stack_depth - 1];
        if (fake_cards[*card].retained == 0)
            return fake_blame(function, "the current context is gone", MSC__CU_INVALID_CONTEXT);
    }
    return fails(function, &result) ? result : MSC__CU_SUCCESS;
}

bool fake_push(int card)
{
    if (stack_depth == STACK_MOST)
        return false;
    stack[stack_depth++] = card;
    return true;
}

int fake_pop(void)
{
    return stack_depth > 0 ? stack[--stack_depth] : -1;
}

/* ---- objects ---------------------------------------------------------------------------------------- */

static void *add(fake_object object)
{
    size_t row;

    pthread_mutex_lock(&mutex);
    if (object_count == object_capacity) {
        object_capacity = 2 * object_capacity + 64;
        objects = realloc(objects, object_capacity * sizeof *objects);
        if (objects == NULL)
            abort();
    }
    row = object_count++;
    objects[row] = object;
    pthread_mutex_unlock(&mutex);
    return (void *)(uintptr_t)(row + 1);
}

void *fake_add(fake_kind kind, int card, void *host, uint64_t bytes)
{
    return add((fake_object){.kind = kind, .alive = true, .card = card, .host = host, .bytes = bytes});
}

void *fake_add_function(int card, void *module, const void *kernel)
{
    return add(
        (fake_object){.kind = FAKE_FUNCTION, .alive = true, .card = card, .host = module, .kernel = kernel});
}

static fake_object *look_up(const void *handle, fake_kind kind, int card)
{
    uintptr_t row = (uintptr_t)handle;
    fake_object *object = row >= 1 && row <= object_count ? &objects[row - 1] : NULL;

    if (object == NULL || object->kind != kind || !object->alive)
        return NULL;
    return card < 0 || object->card == card ? object : NULL;
}

static bool find(const void *handle, fake_kind kind, int card, fake_object *out, bool keep)
{
    fake_object *object;

    pthread_mutex_lock(&mutex);
    object = look_up(handle, kind, card);
    if (object != NULL) {
        *out = *object;
        object->alive = keep;
    }
    pthread_mutex_unlock(&mutex);
    return object != NULL;
}

bool fake_find(const void *handle, fake_kind kind, int card, fake_object *out)
{
    return find(handle, kind, card, out, true);
}

bool fake_take(const void *handle, fake_kind kind, int card, fake_object *out)
{
    return find(handle, kind, card, out, false);
}

/* A living object that holds the bytes from `first` to `last`, both included, as far as `whole` says. */
static void *at_bytes(fake_kind kind, const void *at, uint64_t bytes, bool whole)
{
    uintptr_t first = (uintptr_t)at;
    uintptr_t last = first + (uintptr_t)bytes - 1;
    void *found = NULL;
    size_t row;

    pthread_mutex_lock(&mutex);
    for (row = 0; row < object_count && found == NULL; row++) {
        const fake_object *object = &objects[row];
        uintptr_t start = (uintptr_t)object->host;
        uintptr_t end = start + (uintptr_t)object->bytes - 1;

        if (!object->alive || object->kind != kind)
            continue;
        if (whole ? start <= first && last <= end : start <= last && first <= end)
            found = (void *)(uintptr_t)(row + 1);
    }
    pthread_mutex_unlock(&mutex);
    return found;
}

void *fake_holder(fake_kind kind, const void *at, uint64_t bytes)
{
    return at_bytes(kind, at, bytes, true);
}

void *fake_toucher(fake_kind kind, const void *at, uint64_t bytes)
{
    return at_bytes(kind, at, bytes, false);
}

static bool is_the_callers(fake_kind kind)
{
    return kind != FAKE_CONTEXT && kind != FAKE_DESTROYED_STREAM && kind != FAKE_FUNCTION;
}

static uint64_t sum(fake_kind kind, int card)
{
    uint64_t bytes = 0;
    size_t row;

    for (row = 0; row < object_count; row++)
        if (objects[row].alive && objects[row].kind == kind && (card < 0 || objects[row].card == card))
            bytes += objects[row].bytes;
    return bytes;
}

uint64_t fake_sum(fake_kind kind, int card)
{
    uint64_t bytes;

    pthread_mutex_lock(&mutex);
    bytes = sum(kind, card);
    pthread_mutex_unlock(&mutex);
    return bytes;
}

void fake_each(fake_kind kind, int card, void (*visit)(fake_object object))
{
    size_t row;

    for (row = 0;; row++) {
        fake_object object;
        bool found;

        pthread_mutex_lock(&mutex);
        if (row >= object_count) {
            pthread_mutex_unlock(&mutex);
            return;
        }
        object = objects[row];
        found = object.alive && object.kind == kind && object.card == card;
        pthread_mutex_unlock(&mutex);
        if (found)
            visit(object);
    }
}

void fake_give_up(int card)
{
    size_t row;

    pthread_mutex_lock(&mutex);
    for (row = 0; row < object_count; row++) {
        if (!objects[row].alive || objects[row].card != card || objects[row].kind == FAKE_CONTEXT)
            continue;
        objects[row].alive = false;
        report.left_count += is_the_callers(objects[row].kind);
    }
    pthread_mutex_unlock(&mutex);
}

/* ---- for the test ----------------------------------------------------------------------------------- */

void fake_count_copy(bool pageable)
{
    pthread_mutex_lock(&mutex);
    report.copy_count++;
    report.pageable_copy_count += pageable;
    pthread_mutex_unlock(&mutex);
}

void fake_count_launch(void)
{
    pthread_mutex_lock(&mutex);
    report.launch_count++;
    pthread_mutex_unlock(&mutex);
}

__attribute__((visibility("default"))) void fake_cuda_tell(fake_cuda_report *out)
{
    size_t row;
    int i;

    pthread_mutex_lock(&mutex);
    *out = report;
    for (i = 0; i < fake_card_count; i++)
        out->context_count += fake_cards[i].retained;
    for (row = 0; row < object_count; row++)
        out->object_count += objects[row].alive && is_the_callers(objects[row].kind);
    out->memory_bytes = sum(FAKE_BLOCK, -1);
    out->pinned_bytes = sum(FAKE_PINNED, -1);
    pthread_mutex_unlock(&mutex);
}

__attribute__((visibility("default"))) void fake_cuda_fail(const char *name, unsigned nth, int result)
{
    pthread_mutex_lock(&mutex);
    (void)snprintf(failing.name, sizeof failing.name, "%s", name);
    failing.left = nth;
    failing.result = result;
    pthread_mutex_unlock(&mutex);
}
