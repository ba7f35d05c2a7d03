/* SPDX-License-Identifier: Apache-2.0 */
/* From sizes and strides to bytes: every layout has the fingerprint of its elements packed in the order of memory. */
#include "fingerprint_fixture.h"

#include "fingerprint/fingerprint_layout.h"

#define ROOM (1u << 17)

static unsigned char memory[ROOM];
static unsigned char packed[ROOM];
static msc_error err;

static msc_fingerprint_tensor tensor_of(uint64_t item, uint32_t dims, const int64_t *sizes,
                                        const int64_t *strides)
{
    return (msc_fingerprint_tensor){memory + 1, item, dims, sizes, strides};
}

static uint64_t of_tensor(msc_fingerprint_tensor tensor, uint32_t one_in)
{
    uint64_t value = 0;

    if (msc_fingerprint(&tensor, one_in, 1, &value, &err) != MSC_OK)
        fail_msg("%s", err.message);
    return value;
}

/* The elements one by one. `order`: dimensions, the outermost in memory first. */
static uint64_t pack(const msc_fingerprint_tensor *tensor, const uint32_t *order)
{
    int64_t index[8] = {0};
    uint64_t bytes = 0;
    uint32_t d = 0;

    while (d < 8) {
        int64_t at = 0;
        uint32_t i;

        for (i = 0; i < tensor->dim_count; i++)
            at += index[i] * tensor->strides[i];
        memcpy(packed + bytes, (const unsigned char *)tensor->data + at * (int64_t)tensor->item_bytes,
               tensor->item_bytes);
        bytes += tensor->item_bytes;
        for (d = tensor->dim_count; d-- > 0;) {
            if (++index[order[d]] < tensor->sizes[order[d]])
                break;
            index[order[d]] = 0;
        }
    } /* d wraps below 0 when all indices have */
    return bytes;
}

/* Both as a whole and as pieces that begin and end anywhere. */
static void same_as_packed(msc_fingerprint_tensor tensor, const uint32_t *order)
{
    uint64_t bytes = pack(&tensor, order);
    static unsigned char piece[ROOM];
    msc__fp_layout layout;
    uint64_t seed = bytes;
    int i;

    assert_int_equal(of_tensor(tensor, 1), msc_fingerprint_bytes(packed, bytes));
    assert_int_equal(msc__fp_layout_of(&tensor, &layout, &err), MSC_OK);
    assert_int_equal(layout.bytes, bytes);
    for (i = 0; i < 50; i++) {
        uint64_t begin = fixture_random(&seed) % bytes;
        uint64_t count = fixture_random(&seed) % (bytes - begin) + 1;

        msc__fp_gather(&layout, begin, count, piece);
        assert_memory_equal(piece, packed + begin, count);
    }
}

static const uint64_t items[] = {1, 2, 3, 4, 8, 16};
#define ITEMS (sizeof items / sizeof items[0])

static void contiguous(void **state)
{
    static const int64_t sizes[] = {5, 1, 7, 11}, strides[] = {77, 999, 11, 1};
    static const uint32_t order[] = {0, 1, 2, 3};
    size_t i;

    (void)state;
    for (i = 0; i < ITEMS; i++) {
        msc_fingerprint_tensor tensor = tensor_of(items[i], 4, sizes, strides);

        same_as_packed(tensor, order);
        assert_int_equal(of_tensor(tensor, 1), msc_fingerprint_bytes(tensor.data, 5 * 7 * 11 * items[i]));
        tensor.strides = NULL;
        assert_int_equal(of_tensor(tensor, 1), msc_fingerprint_bytes(tensor.data, 5 * 7 * 11 * items[i]));
    }
}

/* Transposed and channels-last tensors are one range. */
static void dense_in_another_order(void **state)
{
    static const int64_t sizes[] = {2, 3, 4, 5}, strides[] = {60, 1, 15, 3};
    static const uint32_t order[] = {0, 2, 3, 1};
    msc__fp_layout layout;
    size_t i;

    (void)state;
    for (i = 0; i < ITEMS; i++) {
        msc_fingerprint_tensor tensor = tensor_of(items[i], 4, sizes, strides);

        same_as_packed(tensor, order);
        assert_int_equal(of_tensor(tensor, 1), msc_fingerprint_bytes(tensor.data, 120 * items[i]));
        assert_int_equal(msc__fp_layout_of(&tensor, &layout, &err), MSC_OK);
        assert_int_equal(layout.dim_count, 0);
    }
}

/* Slices of rows, columns and both, single columns, and more than a segment of 4 KiB. */
static void gaps(void **state)
{
    static const struct {
        int64_t sizes[3], strides[3];
        uint32_t order[3];
    } cases[] = {
        {{7, 3, 5}, {100, 20, 1}, {0, 1, 2}},    {{7, 3, 5}, {100, 20, 2}, {0, 1, 2}},
        {{5, 7, 3}, {1, 100, 20}, {1, 2, 0}},    {{40, 1, 33}, {66, 7, 1}, {0, 1, 2}},
        {{40, 1, 1}, {66, 7, 1}, {0, 1, 2}},     {{9, 20, 30}, {700, 30, 1}, {0, 1, 2}},
        {{4, 6, 1}, {6, 1, 0}, {0, 1, 2}},       {{2, 2, 2}, {4, 2, 1}, {0, 1, 2}},
        {{2, 60, 33}, {3500, 50, 1}, {0, 1, 2}}, {{3, 1, 2300}, {2500, 1, 1}, {0, 1, 2}},
        {{5, 1, 1024}, {1100, 1, 1}, {0, 1, 2}},
    };
    size_t i, k;

    (void)state;
    for (i = 0; i < ITEMS; i++)
        for (k = 0; k < sizeof cases / sizeof cases[0]; k++)
            same_as_packed(tensor_of(items[i], 3, cases[k].sizes, cases[k].strides), cases[k].order);
}

static void gaps_do_not_count(void **state)
{
    static const int64_t sizes[] = {100, 60}, strides[] = {64, 1};
    msc_fingerprint_tensor tensor = tensor_of(4, 2, sizes, strides);
    uint64_t before = of_tensor(tensor, 1);
    uint64_t sampled = of_tensor(tensor, 3);
    size_t i;

    (void)state;
    for (i = 0; i < ROOM; i++)
        if (i == 0 || (i - 1) % 256 >= 240)
            memory[i] ^= 0x5A;
    assert_int_equal(of_tensor(tensor, 1), before);
    assert_int_equal(of_tensor(tensor, 3), sampled);
    memory[1 + 99 * 256 + 239] ^= 1; /* the last element */
    assert_int_not_equal(of_tensor(tensor, 1), before);
    assert_int_not_equal(of_tensor(tensor, 3), sampled);
}

/* Dimensions of stride 0 repeat elements, which count once. */
static void expanded(void **state)
{
    static const int64_t sizes[] = {4, 50, 6, 9}, strides[] = {0, 6, 1, 0};
    static const int64_t all[] = {9, 9}, none[] = {0, 0};

    (void)state;
    assert_int_equal(of_tensor(tensor_of(4, 4, sizes, strides), 1), msc_fingerprint_bytes(memory + 1, 1200));
    assert_int_equal(of_tensor(tensor_of(4, 2, all, none), 1), msc_fingerprint_bytes(memory + 1, 4));
    assert_int_equal(of_tensor(tensor_of(4, 0, NULL, NULL), 1), msc_fingerprint_bytes(memory + 1, 4));
}

/* Windows that overlap have each element as often as it is in one. */
static void overlapping(void **state)
{
    static const int64_t sizes[] = {30, 8}, strides[] = {2, 1};
    static const uint32_t order[] = {0, 1};
    size_t i;

    (void)state;
    for (i = 0; i < ITEMS; i++)
        same_as_packed(tensor_of(items[i], 2, sizes, strides), order);
}

static void empty(void **state)
{
    static const int64_t sizes[] = {3, 0, 5}, huge[] = {INT64_MAX, 0, INT64_MAX};
    msc_fingerprint_tensor tensor = {NULL, 4, 3, sizes, NULL};

    (void)state;
    assert_int_equal(of_tensor(tensor, 1), msc_fingerprint_bytes(NULL, 0));
    assert_int_equal(of_tensor(tensor, 16), msc_fingerprint_bytes(NULL, 0));
    tensor.sizes = huge;
    assert_int_equal(of_tensor(tensor, 1), msc_fingerprint_bytes(NULL, 0));
}

static void most_dimensions(void **state)
{
    int64_t sizes[MSC_FINGERPRINT_DIMS], strides[MSC_FINGERPRINT_DIMS];
    uint32_t i;

    (void)state;
    for (i = 0; i < MSC_FINGERPRINT_DIMS; i++) { /* ten of size 2, from the innermost outwards, with a gap */
        sizes[i] = i % 6 == 0 && i < 60 ? 2 : 1;
        strides[i] = sizes[i] == 2 ? (INT64_C(1) << i / 6) * 3 : 1;
    }
    for (i = 0; i < 1024; i++)
        memcpy(packed + (size_t)i * 4, memory + 1 + (size_t)i * 12, 4);
    assert_int_equal(of_tensor(tensor_of(4, MSC_FINGERPRINT_DIMS, sizes, strides), 1),
                     msc_fingerprint_bytes(packed, 4096));
}

static void refused(msc_fingerprint_tensor tensor, uint32_t one_in, msc_status wanted, const char *word)
{
    uint64_t value = 77;

    assert_int_equal(msc_fingerprint(&tensor, one_in, 1, &value, &err), wanted);
    assert_int_equal(msc_fingerprint(&tensor, one_in, 1, &value, NULL), wanted);
    assert_non_null(strstr(err.message, word));
    assert_int_equal(value, 77);
}

static void errors(void **state)
{
    static const int64_t fine[] = {2, 3}, negative[] = {2, -3}, huge[] = {INT64_MAX, 3};
    static const int64_t wide[] = {INT64_MAX, 1};
    uint64_t value;
    msc_fingerprint_tensor tensor = tensor_of(4, 2, fine, NULL);

    (void)state;
    assert_int_equal(msc_fingerprint(NULL, 1, 1, &value, &err), MSC_EINVAL);
    assert_int_equal(msc_fingerprint(&tensor, 1, 1, NULL, &err), MSC_EINVAL);
    refused(tensor, 0, MSC_EINVAL, "one_in is 0");
    refused(tensor_of(0, 2, fine, NULL), 1, MSC_EINVAL, "item_bytes is 0");
    refused(tensor_of(4, 65, fine, NULL), 1, MSC_EINVAL, "dim_count is 65");
    refused(tensor_of(4, 2, NULL, NULL), 1, MSC_EINVAL, "sizes");
    refused(tensor_of(4, 2, negative, NULL), 1, MSC_EINVAL, "size 1 is -3");
    refused(tensor_of(4, 2, fine, negative), 1, MSC_EINVAL, "stride 1 is -3");
    refused(tensor_of(4, 2, huge, NULL), 1, MSC_EOVERFLOW, "more bytes");
    refused(tensor_of(4, 2, fine, wide), 1, MSC_EOVERFLOW, "more bytes");
    tensor.data = NULL;
    refused(tensor, 1, MSC_EINVAL, "data is NULL");
}

static int begin(void **state)
{
    (void)state;
    fixture_fill(memory, sizeof memory, 4);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(contiguous), cmocka_unit_test(dense_in_another_order),
        cmocka_unit_test(gaps),       cmocka_unit_test(gaps_do_not_count),
        cmocka_unit_test(expanded),   cmocka_unit_test(overlapping),
        cmocka_unit_test(empty),      cmocka_unit_test(most_dimensions),
        cmocka_unit_test(errors),
    };

    return cmocka_run_group_tests_name("fingerprint_layout", tests, begin, NULL);
}
