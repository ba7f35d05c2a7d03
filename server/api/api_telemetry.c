/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Telemetry that people have switched on (docs/design/telemetry.md): messages of strangers in, counts out.
 *
 * A message is held against the table below, and what is kept is made of the table alone: no text of a sender
 * reaches the disk, nor does anything else of a request. Messages of a day with equal values are one row.
 */
#include <string.h>
#include <time.h>

#include "api/api_internal.h"

#define SCHEMA 2
#define DAY_BYTES 11u
#define DAY_MS INT64_C(86400000)
#define A_MINUTE 600u /* most messages, of all senders together */
#define MOST_TECHNIQUES 32u
#define OTHER "other"

static const char *const events[] = {"plan", NULL};
static const char *const architectures[] = {"albert",
                                            "bart",
                                            "bert",
                                            "bloom",
                                            "clip",
                                            "convnext",
                                            "deberta",
                                            "deepseek",
                                            "densenet",
                                            "detr",
                                            "diffusion_transformer",
                                            "dino",
                                            "distilbert",
                                            "efficientnet",
                                            "electra",
                                            "falcon",
                                            "gemma",
                                            "glm",
                                            "gpt2",
                                            "gpt_neox",
                                            "gpt_oss",
                                            "granite",
                                            "hubert",
                                            "llama",
                                            "llava",
                                            "mamba",
                                            "mistral",
                                            "mixtral",
                                            "mobilenet",
                                            "modernbert",
                                            "olmo",
                                            "opt",
                                            "phi",
                                            "qwen",
                                            "qwen_vl",
                                            "resnet",
                                            "roberta",
                                            "segformer",
                                            "siglip",
                                            "swin",
                                            "t5",
                                            "unet",
                                            "vgg",
                                            "vit",
                                            "wav2vec2",
                                            "whisper",
                                            OTHER,
                                            NULL};
static const char *const sizes[] = {"<1M",    "1M-10M",   "10M-100M", "100M-1B",
                                    "1B-10B", "10B-100B", "100B+",    NULL};
static const char *const techniques[] = {
    "attention_tile",  "autocast",         "bf16_weights",     "boundary_offload", "checkpoint",
    "eight_bit_state", "gradient_offload", "loss_tile",        "mlp_tile",         "offload",
    "selective",       "state_offload",    "step_in_backward", "weight_offload",   NULL};
static const char *const devices[] = {"cpu", "cuda", OTHER, NULL};
static const char *const systems[] = {"linux", "wsl", "macos", "windows", OTHER, NULL};

/* The keys of a message, in its order. */
enum {
    SCHEMA_AT,
    EVENT_AT,
    ARCHITECTURE_AT,
    PARAMETERS_AT,
    TECHNIQUES_AT,
    DEVICE_AT,
    FITS_AT,
    OS_AT,
    PYTHON_AT,
    TORCH_AT,
    MEMSCALE_AT,
    KEYS
};

static const api_field fields[KEYS] = {
    {"schema", JSON_INTEGER, true},    {"event", JSON_STRING, true},     {"architecture", JSON_STRING, true},
    {"parameters", JSON_STRING, true}, {"techniques", JSON_ARRAY, true}, {"device", JSON_STRING, true},
    {"fits", JSON_TRUE, true},         {"os", JSON_STRING, true},        {"python", JSON_STRING, true},
    {"torch", JSON_STRING, true},      {"memscale", JSON_STRING, true}};

typedef struct key_values {
    const char *const *known; /* NULL: a version */
    unsigned numbers;         /* of a version */
    bool has_other;           /* what is not known counts as it */
} key_values;

static const key_values values_of[KEYS] = {
    [EVENT_AT] = {events, 0, false},     [ARCHITECTURE_AT] = {architectures, 0, true},
    [PARAMETERS_AT] = {sizes, 0, false}, [TECHNIQUES_AT] = {techniques, 0, false},
    [DEVICE_AT] = {devices, 0, true},    [OS_AT] = {systems, 0, true},
    [PYTHON_AT] = {NULL, 2, false},      [TORCH_AT] = {NULL, 2, false},
    [MEMSCALE_AT] = {NULL, 3, false}};

/* ---- a message ------------------------------------------------------------------------------- */

static const char *find(const char *const *known, const char *text)
{
    for (; *known != NULL; known++)
        if (strcmp(*known, text) == 0)
            return *known;
    return NULL;
}

static bool is_version(const char *text, unsigned numbers)
{
    for (unsigned i = 0; i < numbers; i++) {
        size_t digits = strspn(text, "0123456789");

        if (digits < 1 || digits > 2 || text[digits] != (i + 1 < numbers ? '.' : '\0'))
            return false;
        text += digits + (i + 1 < numbers);
    }
    return true;
}

/* What may be the name of a family or a technique that this server does not know yet. */
static bool is_later_name(const char *text)
{
    return api_is_word(text, 1, 32, "_");
}

/* The value as it is kept; NULL: refused. */
static const char *admit(api_call *call, int key, const char *text)
{
    const key_values *values = &values_of[key];
    const char *found = values->known == NULL ? NULL : find(values->known, text);

    if (values->known == NULL && (is_version(text, values->numbers) || strcmp(text, OTHER) == 0))
        return text; /* digits and dots */
    if (found == NULL && values->has_other && is_later_name(text))
        return OTHER;
    if (found == NULL)
        (void)api_invalid(call, fields[key].name, text,
                          values->known == NULL ? "two or three numbers with dots, or other"
                          : values->has_other   ? "1 to 32 of a-z, 0-9 and underscore"
                                                : "a value of docs/design/telemetry.md");
    return found;
}

static bool write_techniques(api_call *call, const json_t *list, json_out *out)
{
    size_t count = json_array_size(list);
    bool used[API_COUNT(techniques)] = {false};

    if (count > MOST_TECHNIQUES)
        return api_invalid(call, "techniques", NULL, "at most 32 names");
    for (size_t i = 0; i < count; i++) {
        const char *name = json_string_value(json_array_get(list, i));

        if (name == NULL || !is_later_name(name))
            return api_invalid(call, "techniques", name, "names of 1 to 32 of a-z, 0-9 and underscore");
        for (size_t k = 0; k < i; k++)
            if (json_equal(json_array_get(list, i), json_array_get(list, k)))
                return api_invalid(call, "techniques", name, "each name once");
        for (size_t k = 0; techniques[k] != NULL; k++)
            used[k] = used[k] || strcmp(techniques[k], name) == 0;
    }
    out_open(out, fields[TECHNIQUES_AT].name, '[');
    for (size_t k = 0; techniques[k] != NULL; k++) /* in the table's order, whatever that of the sender */
        if (used[k])
            out_text(out, NULL, techniques[k]);
    out_close(out, ']');
    return true;
}

static bool write_values(api_call *call, json_t *const *given, json_out *out)
{
    if (json_integer_value(given[SCHEMA_AT]) != SCHEMA)
        return api_invalid(call, "schema", NULL, "2");
    out_open(out, NULL, '{');
    for (int key = EVENT_AT; key < KEYS; key++) {
        const char *value;

        if (key == FITS_AT) {
            out_boolean(out, fields[key].name, json_is_true(given[key]));
        } else if (key == TECHNIQUES_AT) {
            if (!write_techniques(call, given[key], out))
                return false;
        } else {
            value = admit(call, key, json_string_value(given[key]));
            if (value == NULL)
                return false;
            out_text(out, fields[key].name, value);
        }
    }
    out_close(out, '}');
    return true;
}

/* A minute's number and its messages share a word. */
static bool is_within_rate(api *it, int64_t now_ms)
{
    uint64_t minute = (uint64_t)(now_ms / 60000) << 32;
    uint64_t was = atomic_load(&it->telemetry_minute);
    uint64_t is;

    do {
        is = (was >> 32 << 32) == minute ? was + 1 : minute + 1;
        if ((is & UINT32_MAX) > A_MINUTE)
            return false;
    } while (!atomic_compare_exchange_weak(&it->telemetry_minute, &was, is));
    return true;
}

static void write_day(int64_t ms, char day[DAY_BYTES])
{
    time_t seconds = (time_t)(ms / 1000);
    struct tm parts;

    if (gmtime_r(&seconds, &parts) == NULL || strftime(day, DAY_BYTES, "%Y-%m-%d", &parts) != DAY_BYTES - 1)
        memcpy(day, "0000-00-00", DAY_BYTES);
}

/* The first day that is still kept. */
static void write_oldest(const api *it, int64_t now_ms, char day[DAY_BYTES])
{
    write_day(now_ms - ((int64_t)it->parts.telemetry_days - 1) * DAY_MS, day);
}

static bool is_on(api_call *call)
{
    if (call->it->parts.telemetry_days > 0)
        return true;
    api_refuse(call, &(const api_fault){.status = 404,
                                        .code = "not_found",
                                        .message = "this server takes no telemetry",
                                        .allowed = "a server that was started with --telemetry DAYS"});
    return false;
}

static const api_fault busy = {.status = 429,
                               .code = "later",
                               .message = "too many messages of telemetry; nothing was kept",
                               .retry_after_s = 60};

void api_take_telemetry(api_call *call)
{
    json_t *given[KEYS];
    json_out out = api_json(call);
    store_result result;
    char day[DAY_BYTES];

    if (!is_on(call) || !api_fields(call, call->body, "", fields, KEYS, given) ||
        !write_values(call, given, &out))
        return;
    if (!is_within_rate(call->it, call->now_ms)) {
        api_refuse(call, &busy);
        return;
    }
    write_day(call->now_ms, day);
    result = out.failed ? STORE_NO_MEMORY : store_telemetry_add(call->it->parts.store, day, out.text);
    if (result == STORE_OK)
        api_send_nothing(call);
    else if (result == STORE_TOO_MANY)
        api_refuse(call, &busy);
    else
        api_refuse_store(call, result);
}

void api_telemetry_tick(api *it)
{
    int64_t now_ms = it->parts.now_ms();
    char day[DAY_BYTES];

    if (it->parts.telemetry_days == 0 || it->telemetry_day == now_ms / DAY_MS)
        return;
    write_oldest(it, now_ms, day);
    if (store_telemetry_forget(it->parts.store, day) == STORE_OK)
        it->telemetry_day = now_ms / DAY_MS;
}

/* ---- counts ---------------------------------------------------------------------------------- */

typedef struct telemetry_sums {
    json_t *days;   /* day → messages */
    json_t *fields; /* key → value → messages */
    int64_t messages;
    bool failed;
} telemetry_sums;

static void add_to(telemetry_sums *sums, json_t *object, const char *name, int64_t count)
{
    json_t *number = json_object_get(object, name);

    if (number != NULL)
        sums->failed |= json_integer_set(number, json_integer_value(number) + count) != 0;
    else
        sums->failed |= json_object_set_new(object, name, json_integer(count)) != 0;
}

static void add_values(telemetry_sums *sums, const char *key, const json_t *value, int64_t count)
{
    json_t *object = json_object_get(sums->fields, key);

    if (json_is_array(value)) {
        for (size_t i = 0; i < json_array_size(value); i++)
            add_to(sums, object, json_string_value(json_array_get(value, i)), count);
    } else {
        add_to(sums, object,
               json_is_string(value) ? json_string_value(value) : (json_is_true(value) ? "true" : "false"),
               count);
    }
}

static bool add_row(void *user, const char *day, const char *values, int64_t count)
{
    telemetry_sums *sums = user;
    json_t *row = json_loads(values, 0, NULL);

    for (int key = EVENT_AT; key < KEYS && row != NULL; key++) {
        const json_t *value = json_object_get(row, fields[key].name);

        if (value != NULL)
            add_values(sums, fields[key].name, value, count);
    }
    add_to(sums, sums->days, day, count);
    sums->messages += count;
    sums->failed |= row == NULL; /* what we wrote is JSON, so there was no memory */
    json_decref(row);
    return !sums->failed;
}

static bool read_day(api_call *call, const char *name, char day[DAY_BYTES])
{
    const char *text = http_target_find(&call->request->target, name);

    if (text == NULL)
        return true;
    for (size_t i = 0; i < DAY_BYTES - 1; i++)
        if (i == 4 || i == 7 ? text[i] != '-' : text[i] < '0' || text[i] > '9')
            return api_invalid(call, name, text, "a day of UTC, as 2026-12-31");
    if (text[DAY_BYTES - 1] != '\0')
        return api_invalid(call, name, text, "a day of UTC, as 2026-12-31");
    memcpy(day, text, DAY_BYTES);
    return true;
}

static void write_sums(json_out *out, const char *name, json_t *object)
{
    const char *key;
    json_t *value;

    out_open(out, name, '{');
    json_object_foreach(object, key, value)
    {
        if (json_is_integer(value))
            out_integer(out, key, json_integer_value(value));
        else
            write_sums(out, key, value); /* two levels */
    }
    out_close(out, '}');
}

static void send_sums(api_call *call, const char *from, const char *to, telemetry_sums *sums)
{
    json_out out = api_json(call);
    store_result result =
        sums->failed ? STORE_NO_MEMORY : store_telemetry(call->it->parts.store, from, to, add_row, sums);

    if (sums->failed)
        result = STORE_NO_MEMORY;
    if (result != STORE_OK) {
        api_refuse_store(call, result);
        return;
    }
    out_open(&out, NULL, '{');
    out_text(&out, "from", from);
    out_text(&out, "to", to);
    out_integer(&out, "kept_days", call->it->parts.telemetry_days);
    out_integer(&out, "messages", sums->messages);
    write_sums(&out, "days", sums->days);
    write_sums(&out, "fields", sums->fields);
    out_close(&out, '}');
    api_send(call, 200, &out);
}

void api_telemetry(api_call *call)
{
    telemetry_sums sums = {.messages = 0};
    char from[DAY_BYTES];
    char to[DAY_BYTES];

    if (!is_on(call))
        return;
    if (!call->caller.account.admin) {
        api_refuse(call, &(const api_fault){
                             .status = 403, .code = "forbidden", .message = "only an admin may do this"});
        return;
    }
    write_oldest(call->it, call->now_ms, from);
    write_day(call->now_ms, to);
    if (!read_day(call, "from", from) || !read_day(call, "to", to))
        return;
    sums.days = json_object();
    sums.fields = json_object();
    sums.failed = sums.days == NULL || sums.fields == NULL;
    for (int key = EVENT_AT; key < KEYS && !sums.failed; key++)
        sums.failed = json_object_set_new(sums.fields, fields[key].name, json_object()) != 0;
    send_sums(call, from, to, &sums);
    json_decref(sums.days);
    json_decref(sums.fields);
}
