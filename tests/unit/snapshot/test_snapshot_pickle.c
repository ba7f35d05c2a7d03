/* SPDX-License-Identifier: Apache-2.0 */
/* The pickle machine: every opcode of plain data, every refusal, every bound. */
#include "snapshot_text.h"

#include "oom/failing_alloc.h"

/* A snapshot without anything, in which `value` stands under a key that nobody knows. */
#define AROUND(value) "\x80\x05}(X\x08\0\0\0segments]X\x05\0\0\0other" value "u."
#define ACCEPT(value) accept(AROUND(value), sizeof(AROUND(value)) - 1)

static void accept(const char *bytes, size_t size_bytes)
{
    msc_snapshot *snapshot = NULL;
    msc_error err = {0};

    if (read_bytes(bytes, size_bytes, &snapshot, &err) != MSC_OK)
        fail_msg("%s", err.message);
    msc_snapshot_destroy(snapshot);
}

static void test_scalars(void **state)
{
    (void)state;
    ACCEPT("N");
    ACCEPT("\x88");
    ACCEPT("\x89");
    ACCEPT("K\x07");
    ACCEPT("M\x07\x08");
    ACCEPT("J\xff\xff\xff\xff");
    ACCEPT("\x8a\0");
    ACCEPT("\x8b\x02\0\0\0\x01\x02");
    ACCEPT("G\x3f\xf0\0\0\0\0\0\0");
    ACCEPT("\x8c\x01x");
    ACCEPT("\x8d\x01\0\0\0\0\0\0\0x");
    ACCEPT("C\x01x");
    ACCEPT("B\x01\0\0\0x");
    ACCEPT("\x8e\x01\0\0\0\0\0\0\0x");
    ACCEPT("\x96\x01\0\0\0\0\0\0\0x");
    ACCEPT("U\x01x");
    ACCEPT("T\x01\0\0\0x");
    ACCEPT("F1.5e-3\n");
    ACCEPT("F-0.25\n");
    ACCEPT("L123L\n");
    ACCEPT("I-5\n");
    ACCEPT("Va\\u00e9\\U0001f600\xe9\n");
}

static void test_containers(void **state)
{
    (void)state;
    ACCEPT(")");
    ACCEPT("K\x01\x85");
    ACCEPT("K\x01K\x02\x86");
    ACCEPT("K\x01K\x02K\x03\x87");
    ACCEPT("(K\x01t");
    ACCEPT("(K\x01l");
    ACCEPT("(K\x01K\x02"
           "d");
    ACCEPT("\x8f(K\x01\x90");
    ACCEPT("(K\x01\x91");
    ACCEPT("]K\x01"
           "a");
    ACCEPT("}K\x01K\x02s");
    ACCEPT("}(K\x01K\x02u");
}

static void test_memo_and_stack(void **state)
{
    (void)state;
    ACCEPT("K\x01q\x02"
           "0h\x02");
    ACCEPT("K\x01r\x03\0\0\0000j\x03\0\0\0");
    ACCEPT("K\x01p5\n0g5\n");
    ACCEPT("K\x01\x94"
           "0h\0");
    ACCEPT("K\x01"
           "20");
    ACCEPT("(K\x01"
           "1N");
    ACCEPT("(0N"); /* POP takes a MARK */
    ACCEPT("\x95\x02\0\0\0\0\0\0\0N");
}

static void test_nothing_is_executed(void **state)
{
    (void)state;
    REFUSE("\x80\x04"
           "cos\nsystem\n.",
           "GLOBAL is refused");
    REFUSE("\x80\x04\x8c\x02os\x8c\x06system\x93.", "STACK_GLOBAL is refused");
    REFUSE("NR.", "REDUCE is refused");
    REFUSE("Nb.", "BUILD is refused");
    REFUSE("(ios\nsystem\n.", "INST is refused");
    REFUSE("(No.", "OBJ is refused");
    REFUSE("N)\x81.", "NEWOBJ is refused");
    REFUSE("N)N\x92.", "NEWOBJ_EX is refused");
    REFUSE("\x82\x01.", "EXT1 is refused");
    REFUSE("\x83\x01\0.", "EXT2 is refused");
    REFUSE("\x84\x01\0\0\0.", "EXT4 is refused");
    REFUSE("Pid\n.", "PERSID is refused");
    REFUSE("NQ.", "BINPERSID is refused");
    REFUSE("\x97.", "NEXT_BUFFER is refused");
    REFUSE("N\x98.", "READONLY_BUFFER is refused");
    REFUSE("S'x'\n.", "STRING is refused");
    REFUSE("\xff", "no such opcode");
    REFUSE("}}}\x93.", "at offset 3, opcode 0x93");
}

static void test_truncated_and_huge(void **state)
{
    (void)state;
    REFUSE("", "the file has left");
    REFUSE("\x80", "the file has left");
    REFUSE("K", "the file has left");
    REFUSE("X\xff\xff\xff\xff", "the file has left");
    REFUSE("\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "the file has left");
    REFUSE("\x8b\xff\xff\xff\x7f"
           "1",
           "the file has left");
    REFUSE("\x95\xff\xff\xff\xff\xff\xff\xff\x7f", "a frame within the file");
    REFUSE("I12", "the file ends here");
    REFUSE("Nr\xff\xff\xff\xff.", "a smaller number of the memo");
    REFUSE("Np99999999999\n.", "a smaller number of the memo");
    REFUSE("h\x01.", "in the memo is expected");
    REFUSE("Nq\x01"
           "0h\0.",
           "in the memo is expected");
    REFUSE("\x80\x06N.", "a protocol from 0 to 5");
}

static void test_malformed(void **state)
{
    (void)state;
    REFUSE(".", "more values are expected");
    REFUSE("0.", "more values are expected");
    REFUSE("(2.", "more values are expected");
    REFUSE("a.", "more values are expected");
    REFUSE("t.", "a MARK is expected");
    REFUSE("(Ka.", "");
    REFUSE("(e.", "a container is expected");
    REFUSE("N(Ne.", "a container is expected");
    REFUSE("}(Ne.", "a container of another kind");
    REFUSE("](NNu.", "a container of another kind");
    REFUSE("}(Nu.", "a value for every key");
    REFUSE("(Nd.", "a value for every key");
    REFUSE("N.", "a memory snapshot");
    REFUSE("}.", "a memory snapshot");
    REFUSE("]q\0h\0a(h\0h\0e.", "holds itself");
    REFUSE("I1x\n.", "a decimal integer");
    REFUSE("I\n.", "a decimal integer");
    REFUSE("L18446744073709551616L\n.", "at most 64 bits");
    REFUSE("L-9223372036854775809L\n.", "at most 64 bits");
    REFUSE("\x8a\x09\0\0\0\0\0\0\0\0\x01.", "at most 64 bits");
    REFUSE("\x8a\x08\0\0\0\0\0\0\0\x80\x8a\x09\xff\xff\xff\xff\xff\xff\xff\x7f\xff.", "at most 64 bits");
    REFUSE("F1.2.3\n.", "a decimal fraction");
    REFUSE("V\\x41\n.", "hexadecimal digits");
    REFUSE("V\\u00g0\n.", "hexadecimal digits");
    REFUSE("V\\U00110000\n.", "hexadecimal digits");
}

/* Integers arrive as they were written, whatever opcode wrote them. */
static void check_address(const char *value, size_t value_bytes, uint64_t wanted)
{
    static const char head[] = "}(\x8c\x08segments]\x8c\x0d"
                               "device_traces](]}(\x8c\x06"
                               "action\x8c\x08segments\x8c\x04size";
    static const char tail[] = "uaeu.";
    char bytes[256];
    size_t at = sizeof head - 1;
    msc_snapshot *snapshot = NULL;
    const msc_snapshot_event *events;
    uint32_t count;

    memcpy(bytes, head, at);
    memcpy(bytes + at, value, value_bytes);
    memcpy(bytes + at + value_bytes, tail, sizeof tail - 1);
    assert_int_equal(read_bytes(bytes, at + value_bytes + sizeof tail - 1, &snapshot, NULL), MSC_OK);
    events = msc_snapshot_events(snapshot, 0, &count);
    assert_int_equal(count, 1);
    assert_int_equal(events[0].action, MSC_SNAPSHOT_ACTION_OTHER);
    assert_true(events[0].size_bytes == wanted);
    msc_snapshot_destroy(snapshot);
}

#define CHECK_NUMBER(value, wanted) check_address(value, sizeof(value) - 1, wanted)

static void test_numbers_keep_their_value(void **state)
{
    (void)state;
    CHECK_NUMBER("K\xff", 255);
    CHECK_NUMBER("M\xff\xff", 65535);
    CHECK_NUMBER("J\xff\xff\xff\x7f", 0x7fffffff);
    CHECK_NUMBER("\x8a\x06\0\0\x10\x6f\x12\x7f", UINT64_C(0x7f126f100000));
    CHECK_NUMBER("\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x0f", (UINT64_C(1) << 60) - 1);
    CHECK_NUMBER("\x8a\x08\0\0\0\0\0\0\0\x10", UINT64_C(1) << 60);
    CHECK_NUMBER("\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\0", UINT64_MAX);
    CHECK_NUMBER("\x8b\x02\0\0\0\x34\x12", 0x1234);
    CHECK_NUMBER("I18446744073709551615\n", UINT64_MAX);
    CHECK_NUMBER("L0007L\r\n", 7);
    CHECK_NUMBER("\x88", 1);
}

/* A deep nest costs memory in proportion, not the stack of the process. */
static void test_depth(void **state)
{
    enum { DEPTH = 200000 };
    static const char head[] = "}(U\x08segments]U\x01x";
    static char bytes[2 * DEPTH + 64];
    size_t at = 0;
    msc_snapshot *snapshot = NULL;
    size_t i;

    (void)state;
    memcpy(bytes, head, sizeof head - 1);
    at = sizeof head - 1;
    for (i = 0; i < DEPTH; i++)
        bytes[at++] = ']';
    for (i = 1; i < DEPTH; i++)
        bytes[at++] = 'a';
    memcpy(bytes + at, "u.", 2);
    assert_int_equal(read_bytes(bytes, at + 2, &snapshot, NULL), MSC_OK);
    assert_true(msc_context_peak_bytes(test_context) < 64 * (uint64_t)sizeof bytes);
    msc_snapshot_destroy(snapshot);
}

static void test_memory_limit(void **state)
{
    msc_context_options options = msc_context_options_default();
    msc_context *ctx = NULL;
    msc_snapshot *snapshot = NULL;
    msc_error err = {0};
    static const char text[] = SNAPSHOT_BEGIN SEGMENT_BEGIN ONE_BLOCK SEGMENT_END TRACES SNAPSHOT_END;

    (void)state;
    options.memory_limit_bytes = 4096;
    assert_int_equal(msc_context_create(&options, &ctx, NULL), MSC_OK);
    assert_int_equal(msc_snapshot_parse(ctx, text, sizeof text - 1, &snapshot, &err), MSC_ENOMEM);
    assert_null(snapshot);
    assert_true(err.status == MSC_ENOMEM && err.message[0] != '\0');
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
}

/* One life of a snapshot on a heap that refuses one request. */
static msc_status live(msc_context *ctx, const char *text, size_t text_bytes)
{
    msc_snapshot *snapshot = NULL;
    msc_snapshot_replay_result result;
    msc_snapshot_totals totals;
    msc_error err = {0};
    msc_status status = msc_snapshot_parse(ctx, text, text_bytes, &snapshot, &err);

    assert_true((status == MSC_OK) == (snapshot != NULL));
    if (status == MSC_OK)
        status = msc_snapshot_get_totals(snapshot, 0, &totals, &err);
    if (status == MSC_OK)
        status = msc_snapshot_sites(snapshot, 0, MSC_SNAPSHOT_MOMENT_PEAK, NULL, 0, NULL, &err);
    if (status == MSC_OK)
        status = msc_snapshot_replay(snapshot, 0, NULL, NULL, &result, &err);
    assert_true(status == MSC_OK || (err.status == status && err.message[0] != '\0'));
    msc_snapshot_destroy(snapshot);
    return status;
}

static void test_every_allocation_may_fail(void **state)
{
    static const char text[] =
        SNAPSHOT_BEGIN SEGMENT_BEGIN ONE_BLOCK SEGMENT_END TRACES EVENT("free_requested", "2098176", "512")
            EVENT("free_completed", "2098176", "512") EVENT("alloc", "2098176", "600")
                EVENT("free_requested", "2098176", "600") EVENT("free_completed", "2098176", "600")
                    SNAPSHOT_END;
    static failing_alloc heap;
    uint64_t n;

    (void)state;
    for (n = 0; n < 10000; n++) {
        msc_context *ctx;
        msc_status status;
        failing_alloc_init(&heap, n);
        ctx = failing_alloc_context(&heap);
        if (ctx == NULL)
            continue;
        status = live(ctx, text, sizeof text - 1);
        assert_true(status == MSC_OK || status == MSC_ENOMEM);
        assert_int_equal(msc_context_held_bytes(ctx), 0);
        msc_context_destroy(ctx);
        assert_true(failing_alloc_is_clean(&heap));
        if (heap.failed_count == 0) {
            assert_int_equal(status, MSC_OK);
            break;
        }
    }
    assert_true(n > 40 && n < 10000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE("opcodes/scalars", test_scalars),
        CASE("opcodes/containers", test_containers),
        CASE("opcodes/memo-and-stack", test_memo_and_stack),
        CASE("opcodes/numbers-keep-their-value", test_numbers_keep_their_value),
        CASE("refused/nothing-is-executed", test_nothing_is_executed),
        CASE("refused/truncated-and-huge", test_truncated_and_huge),
        CASE("refused/malformed", test_malformed),
        CASE("bounds/depth", test_depth),
        CASE("bounds/memory-limit", test_memory_limit),
        CASE("bounds/every-allocation-may-fail", test_every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
