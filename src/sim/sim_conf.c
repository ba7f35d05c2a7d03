/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The text of PYTORCH_ALLOC_CONF.
 *
 *     "max_split_size_mb:512,roundup_power2_divisions:[256:1,512:2,>:8],expandable_segments:True"
 *
 *     text ──► tokens: names and numbers, and each of , : [ ] alone; spaces count for nothing
 *     pair = name ":" value, pairs separated by ",", a last "," is allowed
 *
 * A table names every key, those that change nothing on the device too: a typing error must not pass as
 * one of them. Values are read into a copy of the options. What depends on two keys (nothing large may be
 * below a large segment; a fraction needs the device's memory) is settled at the end, so the order of keys
 * does not matter, as in PyTorch.
 *
 * We are stricter than PyTorch in one point: it reads "40x" as 40.
 */
#include "sim/sim_options.h"

#include <inttypes.h>
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "base/sized.h"

/* ---- tokens ------------------------------------------------------------------------------------- */

#define TOKEN_BYTES 48 /* room for the longest key and any number, terminator included */
#define UNNAMED UINT64_MAX

/* Reading in progress. */
typedef struct conf {
    const char *at;
    char key[TOKEN_BYTES];
    char token[TOKEN_BYTES]; /* read last; empty at the end */
    msc_sim_options options;
    double fraction;         /* per_process_memory_fraction; negative: unnamed */
    uint64_t rounding_bytes; /* max_non_split_rounding_mb, or UNNAMED */
    bool rejects;            /* throw_on_cudamalloc_oom */
    msc_error *err;
} conf;

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static bool is_mark(char c)
{
    return c == ',' || c == ':' || c == '[' || c == ']';
}

/* Reads the next token. A name that does not fit is cut, and then no key and no number. */
static void next_token(conf *c)
{
    size_t length = 0;

    while (is_space(*c->at))
        c->at++;
    if (is_mark(*c->at)) {
        c->token[length++] = *c->at++;
    } else {
        for (; *c->at != '\0' && !is_mark(*c->at); c->at++)
            if (!is_space(*c->at) && length < TOKEN_BYTES - 1)
                c->token[length++] = *c->at;
    }
    MSC__ASSERT(length < TOKEN_BYTES);
    c->token[length] = '\0';
}

static bool token_is(const conf *c, const char *expected)
{
    return strcmp(c->token, expected) == 0;
}

static msc_status refuse(const conf *c, const char *allowed)
{
    return msc__fail(c->err, MSC_EINVAL, "PYTORCH_ALLOC_CONF: %s is \"%s\", must be %s", c->key, c->token,
                     allowed);
}

static msc_status expect(conf *c, const char *mark)
{
    next_token(c);
    if (token_is(c, mark))
        return MSC_OK;
    return msc__fail(c->err, MSC_EINVAL, "PYTORCH_ALLOC_CONF: after %s, \"%s\" is expected, not \"%s\"",
                     c->key, mark, c->token);
}

/* The present token as a whole number. */
static bool token_u64(const conf *c, uint64_t *out)
{
    const char *at = c->token;
    uint64_t value = 0;

    if (*at == '\0')
        return false;
    for (; *at != '\0'; at++) {
        if (*at < '0' || *at > '9' || !msc__mul_u64(value, 10, &value) ||
            !msc__add_u64(value, (uint64_t)(*at - '0'), &value))
            return false;
    }
    *out = value;
    return true;
}

/*
 * The present token as a decimal fraction of at most 15 digits, such as 0.8. Digits and power of ten are
 * then exact in a double, and one division rounds correctly, in any locale.
 */
static bool token_fraction(const conf *c, double *out)
{
    const char *at = c->token;
    uint64_t digits = 0;
    double scale = 1;
    uint32_t count = 0;
    bool point = false;

    for (; *at != '\0'; at++) {
        if (*at == '.' && !point) {
            point = true;
            continue;
        }
        if (*at < '0' || *at > '9' || ++count > 15)
            return false;
        digits = digits * 10 + (uint64_t)(*at - '0');
        scale = point ? scale * 10 : scale;
    }
    *out = (double)digits / scale;
    return count > 0;
}

/* ---- values ------------------------------------------------------------------------------------- */

/* A number of MiB as bytes; what does not fit is as good as the most that does. */
static bool read_mib(conf *c, uint64_t *bytes)
{
    uint64_t mib;

    next_token(c);
    if (!token_u64(c, &mib))
        return false;
    *bytes = (mib < UINT64_MAX / MSC__SIM_MIB ? mib : UINT64_MAX / MSC__SIM_MIB) * MSC__SIM_MIB;
    return true;
}

static msc_status read_large_segment(conf *c)
{
    uint64_t bytes;

    if (!read_mib(c, &bytes) || bytes <= MSC__SIM_OWN_SEGMENT_BYTES || bytes > MSC__SIM_MOST_PAGE_BYTES)
        return refuse(c, "a whole number from 11 to 1048576");
    c->options.large_segment_bytes = bytes;
    return MSC_OK;
}

static msc_status read_max_split(conf *c)
{
    if (!read_mib(c, &c->options.max_split_bytes))
        return refuse(c, "a whole number of at least large_segment_size_mb (20 by default)");
    return MSC_OK;
}

static msc_status read_rounding(conf *c)
{
    if (!read_mib(c, &c->rounding_bytes))
        return refuse(c, "a whole number of at least large_segment_size_mb (20 by default)");
    return MSC_OK;
}

static msc_status read_threshold(conf *c)
{
    double value;

    next_token(c);
    if (!token_fraction(c, &value) || !(value > 0 && value < 1))
        return refuse(c, "a decimal fraction above 0 and below 1, of at most 15 digits");
    c->options.garbage_collection_threshold = value;
    return MSC_OK;
}

static msc_status read_fraction(conf *c)
{
    next_token(c);
    if (token_fraction(c, &c->fraction) && c->fraction <= 1)
        return MSC_OK;
    return refuse(c, "a decimal fraction from 0 to 1, of at most 15 digits");
}

static msc_status read_flag(conf *c, bool *flag)
{
    next_token(c);
    if (!token_is(c, "True") && !token_is(c, "False"))
        return refuse(c, "True or False");
    *flag = token_is(c, "True");
    return MSC_OK;
}

static msc_status read_expandable(conf *c)
{
    bool flag = false;
    msc_status status = read_flag(c, &flag);

    if (status == MSC_OK)
        c->options.expandable_segments = flag;
    return status;
}

static msc_status read_rejects(conf *c)
{
    return read_flag(c, &c->rejects);
}

static bool is_power(uint64_t value)
{
    return value != 0 && (value & (value - 1)) == 0;
}

/* Sets the intervals begin … end - 1. */
static void fill_divisions(conf *c, uint32_t begin, uint32_t end, uint32_t divisions)
{
    MSC__ASSERT(end <= MSC_SIM_ROUNDUP_INTERVALS);
    for (; begin < end; begin++)
        c->options.roundup_power2_divisions[begin] = divisions;
}

static msc_status refuse_list(const conf *c)
{
    return refuse(c, "a list of size:divisions, each a power of two (divisions: or 0), the last size >, such "
                     "as [256:1,512:2,1024:4,>:8]");
}

/*
 * Reads `boundary:divisions` of a list, whose boundary is the present token. The first boundary also sets
 * the intervals below it, and `>` those above the boundary before; intervals between two stay off.
 */
static msc_status read_interval(conf *c, bool *first, uint32_t *last)
{
    bool rest = token_is(c, ">");
    uint64_t boundary = 1;
    uint64_t divisions;
    uint32_t index;
    msc_status status;

    if (!rest && (!token_u64(c, &boundary) || !is_power(boundary)))
        return refuse_list(c);
    status = expect(c, ":");
    if (status != MSC_OK)
        return status;
    next_token(c);
    if (!token_u64(c, &divisions) || (divisions != 0 && !is_power(divisions)) || divisions > UINT32_MAX)
        return refuse_list(c);
    if (rest) {
        fill_divisions(c, *last + 1, MSC_SIM_ROUNDUP_INTERVALS, (uint32_t)divisions);
        return MSC_OK;
    }
    index = 63u - (uint32_t)__builtin_clzll(boundary);
    if (index >= MSC_SIM_ROUNDUP_INTERVALS)
        index = MSC_SIM_ROUNDUP_INTERVALS - 1;
    fill_divisions(c, *first ? 0 : index, index + 1, (uint32_t)divisions);
    *first = false;
    *last = index;
    return MSC_OK;
}

static msc_status read_divisions(conf *c)
{
    bool first = true;
    uint32_t last = 0;
    uint64_t divisions;
    msc_status status = MSC_OK;

    fill_divisions(c, 0, MSC_SIM_ROUNDUP_INTERVALS, 0);
    next_token(c);
    if (!token_is(c, "[")) {
        if (!token_u64(c, &divisions) || !is_power(divisions) || divisions > UINT32_MAX)
            return refuse(c, "a power of two, or a list such as [256:1,512:2,1024:4,>:8]");
        fill_divisions(c, 0, MSC_SIM_ROUNDUP_INTERVALS, (uint32_t)divisions);
        return MSC_OK;
    }
    for (next_token(c); status == MSC_OK && !token_is(c, "]"); next_token(c)) {
        status = read_interval(c, &first, &last);
        if (status != MSC_OK)
            return status;
        next_token(c);
        if (token_is(c, "]"))
            break;
        if (!token_is(c, ","))
            return refuse_list(c);
    }
    return MSC_OK;
}

static msc_status read_backend(conf *c)
{
    next_token(c);
    if (token_is(c, "native"))
        return MSC_OK;
    if (token_is(c, "cudaMallocAsync") || token_is(c, "hipMallocAsync"))
        return msc__fail(c->err, MSC_EUNSUPPORTED,
                         "PYTORCH_ALLOC_CONF: backend:%s is the driver's own allocator, whose rules are not "
                         "known; only backend:native can be simulated",
                         c->token);
    return refuse(c, "native or cudaMallocAsync");
}

static msc_status refuse_reserve(conf *c)
{
    return msc__fail(c->err, MSC_EUNSUPPORTED,
                     "PYTORCH_ALLOC_CONF: %s is not simulated; the address space of an expandable segment is "
                     "9/8 of the device's memory",
                     c->key);
}

/* ---- keys that change nothing on the device ------------------------------------------------------ */

static msc_status check_flag(conf *c)
{
    bool flag;

    return read_flag(c, &flag);
}

static msc_status check_number(conf *c)
{
    uint64_t number;

    next_token(c);
    return token_u64(c, &number) ? MSC_OK : refuse(c, "a whole number");
}

static msc_status check_positive(conf *c)
{
    uint64_t number;

    next_token(c);
    return token_u64(c, &number) && number > 0 ? MSC_OK : refuse(c, "a whole number above 0");
}

static msc_status check_threads(conf *c)
{
    uint64_t number;

    next_token(c);
    return token_u64(c, &number) && is_power(number) && number <= 128
               ? MSC_OK
               : refuse(c, "a power of two of at most 128");
}

/* ---- the text ----------------------------------------------------------------------------------- */

static const struct {
    const char *key;
    msc_status (*read)(conf *c);
} keys[] = {
    {"max_split_size_mb", read_max_split},
    {"max_non_split_rounding_mb", read_rounding},
    {"large_segment_size_mb", read_large_segment},
    {"roundup_power2_divisions", read_divisions},
    {"garbage_collection_threshold", read_threshold},
    {"expandable_segments", read_expandable},
    {"per_process_memory_fraction", read_fraction},
    {"backend", read_backend},
    {"throw_on_cudamalloc_oom", read_rejects},
    {"expandable_segments_reserve", refuse_reserve},
    {"expandable_segments_reserve_by_class", refuse_reserve},
    {"graph_capture_record_stream_reuse", check_flag},
    {"release_lock_on_cudamalloc", check_flag},
    {"release_lock_on_hipmalloc", check_flag},
    {"pinned_use_cuda_host_register", check_flag},
    {"pinned_use_hip_host_register", check_flag},
    {"pinned_use_background_threads", check_flag},
    {"pinned_free_catch_all", check_flag},
    {"pinned_num_register_threads", check_threads},
    {"pinned_reserve_segment_size_mb", check_positive},
    {"pinned_max_round_threshold_mb", check_number},
    {"pinned_max_cached_size_mb", check_number},
};

/* Reads one pair, whose key is the present token. */
static msc_status read_pair(conf *c)
{
    msc_status status;
    size_t i;

    memcpy(c->key, c->token, sizeof c->key);
    for (i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        if (strcmp(c->key, keys[i].key) != 0)
            continue;
        status = expect(c, ":");
        return status == MSC_OK ? keys[i].read(c) : status;
    }
    return msc__fail(
        c->err, MSC_EINVAL,
        "PYTORCH_ALLOC_CONF: unknown key \"%s\"; those that change memory are max_split_size_mb, "
        "max_non_split_rounding_mb, large_segment_size_mb, roundup_power2_divisions, "
        "garbage_collection_threshold, expandable_segments and per_process_memory_fraction",
        c->key);
}

/* Settles what depends on two keys. */
static msc_status settle(conf *c)
{
    msc_sim_options *options = &c->options;
    uint64_t segment = options->large_segment_bytes;

    if (options->max_split_bytes < segment)
        return msc__fail(c->err, MSC_EINVAL,
                         "PYTORCH_ALLOC_CONF: max_split_size_mb is %" PRIu64
                         ", must be at least large_segment_size_mb, %" PRIu64,
                         options->max_split_bytes / MSC__SIM_MIB, segment / MSC__SIM_MIB);
    if (c->rounding_bytes < segment)
        return msc__fail(c->err, MSC_EINVAL,
                         "PYTORCH_ALLOC_CONF: max_non_split_rounding_mb is %" PRIu64
                         ", must be at least large_segment_size_mb, %" PRIu64,
                         c->rounding_bytes / MSC__SIM_MIB, segment / MSC__SIM_MIB);
    if (c->rounding_bytes != UNNAMED)
        options->max_non_split_rounding_bytes = c->rounding_bytes;
    if (c->fraction >= 1) {
        options->allowed_bytes = UINT64_MAX;
    } else if (c->fraction >= 0) {
        if (options->device_total_bytes == UINT64_MAX)
            return msc__fail(
                c->err, MSC_EINVAL,
                "PYTORCH_ALLOC_CONF: per_process_memory_fraction needs the memory of the device");
        options->allowed_bytes = (uint64_t)(c->fraction * (double)options->device_total_bytes);
    }
    if (c->rejects && options->allowed_bytes != UINT64_MAX)
        return msc__fail(c->err, MSC_EUNSUPPORTED,
                         "PYTORCH_ALLOC_CONF: throw_on_cudamalloc_oom:True with a memory fraction is not "
                         "simulated");
    return MSC_OK;
}

msc_status msc_sim_options_parse(const char *text, uint64_t device_total_bytes, msc_sim_options *options,
                                 msc_error *err)
{
    conf c = {.at = text, .fraction = -1, .rounding_bytes = UNNAMED, .err = err};
    msc_status status;

    if (text == NULL || options == NULL)
        return msc__fail(err, MSC_EINVAL, "%s is NULL", text == NULL ? "text" : "options");
    status = msc__sim_options_read("", options, &c.options, err);
    if (status != MSC_OK)
        return status;
    if (c.options.kind != MSC_SIM_CUDA)
        return msc__fail(err, MSC_EINVAL, "PYTORCH_ALLOC_CONF is for kind CUDA");
    c.options.device_total_bytes = device_total_bytes;
    for (next_token(&c); c.token[0] != '\0'; next_token(&c)) {
        uint64_t segment = c.options.large_segment_bytes;
        status = read_pair(&c);
        if (status != MSC_OK)
            return status;
        if (c.options.large_segment_bytes != segment)
            c.options.max_non_split_rounding_bytes = c.options.large_segment_bytes;
        next_token(&c);
        if (c.token[0] == '\0')
            break;
        if (!token_is(&c, ","))
            return msc__fail(err, MSC_EINVAL,
                             "PYTORCH_ALLOC_CONF: after the value of %s, \",\" is expected, not \"%s\"",
                             c.key, c.token);
    }
    status = settle(&c);
    if (status == MSC_OK)
        msc__sized_init(options, options->struct_bytes, &c.options, sizeof c.options);
    return status;
}
