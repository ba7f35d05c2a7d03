/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hash: the same for every instruction set, length and address, for ever; and what it promises about differences.
 */
#include "fingerprint_fixture.h"

#include "fingerprint/fingerprint_core.h"
#include "fingerprint/fingerprint_kernels.h"

#define BLOCK MSC__FP_BLOCK_BYTES

/* ---- the same value ------------------------------------------------------------------------------------------ */

/* Of the first so many bytes, byte i being i * 37 + 11. A value that changes here breaks who kept one. */
static void golden_values(void **state)
{
    static const struct {
        uint64_t bytes, wanted;
    } golden[] = {
        {0, UINT64_C(0x45388E6EB6E2BE4D)},    {1, UINT64_C(0x05434EFD85CB46AF)},
        {4, UINT64_C(0xB6CC8D047406624D)},    {8, UINT64_C(0x9D48E6488AEF9E32)},
        {127, UINT64_C(0x0158ACAAC7991A94)},  {128, UINT64_C(0xE472B6A9469E9E65)},
        {1023, UINT64_C(0xF0A8A07FACAA6CC2)}, {1024, UINT64_C(0x8F940ECFBD781DB6)},
        {1025, UINT64_C(0x13C46AD9D119E4A9)}, {4096, UINT64_C(0x2C5C398A2DE14A69)},
        {5000, UINT64_C(0x1B63FAF42C682B8B)},
    };
    unsigned char data[5000];
    size_t i;

    (void)state;
    for (i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)(i * 37 + 11);
    for (i = 0; i < sizeof golden / sizeof golden[0]; i++)
        assert_int_equal(msc_fingerprint_bytes(data, golden[i].bytes), golden[i].wanted);
}

static void definition_at_every_length(void **state)
{
    static unsigned char data[3 * BLOCK + 64];
    uint64_t bytes;

    (void)state;
    fixture_fill(data, sizeof data, 1);
    for (bytes = 0; bytes <= 2 * BLOCK + 130; bytes++)
        assert_int_equal(msc_fingerprint_bytes(data + bytes % 61, bytes),
                         fixture_fingerprint(data + bytes % 61, bytes));
    assert_int_equal(msc_fingerprint_bytes(NULL, 0), msc_fingerprint_bytes(data, 0));
}

/* Blocks from several numbers on, at every address modulo a cache line. */
static void instruction_sets_agree(void **state)
{
    static const uint64_t firsts[] = {0, 1, 77, UINT64_C(1) << 33};
    static unsigned char data[5 * BLOCK + 64];
    uint64_t offset, count;
    unsigned isa, found = 0;
    size_t i;

    (void)state;
    fixture_fill(data, sizeof data, 2);
    for (isa = 0; isa < MSC__FP_ISAS; isa++) {
        msc__fp_kernel kernel = msc__fp_kernel_of((msc__fp_isa)isa);

        if (kernel == NULL)
            continue;
        found++;
        for (i = 0; i < sizeof firsts / sizeof firsts[0]; i++)
            for (offset = 0; offset < 64; offset++)
                for (count = 0; count <= 5; count++) {
                    uint64_t wanted = 0;
                    uint64_t b;

                    for (b = 0; b < count; b++)
                        wanted += fixture_block(data + offset, 5 * BLOCK, b * BLOCK, firsts[i] + b);
                    assert_int_equal(kernel(data + offset, firsts[i], count, NULL), wanted);
                    assert_int_equal(kernel(data + offset, firsts[i], count, data), wanted);
                }
    }
    assert_true(found > 0);
    assert_non_null(msc__fp_kernel_here());
    assert_null(msc__fp_kernel_of(MSC__FP_ISAS));
}

/* ---- another value ------------------------------------------------------------------------------------------- */

/* Fingerprints that must all differ. */
typedef struct seen {
    uint64_t *all;
    size_t count, most;
} seen;

static void see(seen *to, const unsigned char *data, uint64_t bytes)
{
    if (to->count == to->most) {
        to->most = 2 * to->most + 1024;
        to->all = realloc(to->all, to->most * sizeof *to->all);
        assert_non_null(to->all);
    }
    to->all[to->count++] = msc_fingerprint_bytes(data, bytes);
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static void all_differ(seen *of)
{
    size_t i;

    qsort(of->all, of->count, sizeof *of->all, by_value);
    for (i = 1; i < of->count; i++)
        assert_int_not_equal(of->all[i - 1], of->all[i]);
    free(of->all);
    *of = (seen){NULL, 0, 0};
}

/* Every bit of three blocks and a rest, of random data, of zeros and of ones. */
static void every_bit_counts(void **state)
{
    enum { BYTES = 3 * BLOCK + 77 };
    static unsigned char data[BYTES];
    seen here = {NULL, 0, 0};
    size_t bit;
    int kind;

    (void)state;
    for (kind = 0; kind < 3; kind++) {
        memset(data, kind == 1 ? 0 : 0xFF, BYTES);
        if (kind == 0)
            fixture_fill(data, BYTES, 3);
        see(&here, data, BYTES);
        for (bit = 0; bit < 8 * BYTES; bit++) {
            data[bit / 8] ^= (unsigned char)(1u << bit % 8);
            see(&here, data, BYTES);
            data[bit / 8] ^= (unsigned char)(1u << bit % 8);
        }
    }
    all_differ(&here);
}

/* One word, whatever it was and becomes: each step is a bijection. */
static void a_word_counts_for_certain(void **state)
{
    static const uint64_t words[] = {0,
                                     1,
                                     UINT64_C(1) << 63,
                                     UINT64_C(0x8000000080000000),
                                     UINT64_MAX,
                                     UINT64_C(0x3F8000003F800000),
                                     UINT64_C(0xBF800000BF800000)};
    static unsigned char data[BLOCK];
    uint64_t seed = 5;
    size_t at, i;

    (void)state;
    for (at = 0; at < BLOCK; at += 8) {
        seen here = {NULL, 0, 0};

        fixture_fill(data, BLOCK, at);
        for (i = 0; i < 200; i++) {
            uint64_t word = i < sizeof words / sizeof words[0] ? words[i] : fixture_random(&seed);

            memcpy(data + at, &word, sizeof word);
            see(&here, data, BLOCK);
        }
        all_differ(&here);
    }
}

/* Signs of two floats, of every pair of 96 near each other and far: the changes that a sum of words would lose. */
static void pairs_of_signs(void **state)
{
    enum { FLOATS = 4096 };
    static float data[FLOATS];
    static size_t places[96];
    uint64_t seed = 6;
    seen here = {NULL, 0, 0};
    size_t i, k;

    (void)state;
    for (i = 0; i < FLOATS; i++)
        data[i] = (float)(int64_t)(fixture_random(&seed) >> 40) / 8388608.0f - 1.0f;
    for (i = 0; i < 96; i++)
        places[i] =
            i < 64 ? i / 4 * 32 + i % 4 : (i - 63) * 121; /* in four columns of 16 rows, and elsewhere */
    for (i = 0; i < 96; i++)
        for (k = i; k < 96; k++) {
            data[places[i]] = -data[places[i]];
            data[places[k]] = k > i ? -data[places[k]] : data[places[k]];
            see(&here, (const unsigned char *)data, sizeof data);
            data[places[i]] = -data[places[i]];
            data[places[k]] = k > i ? -data[places[k]] : data[places[k]];
        }
    all_differ(&here);
}

/* Every set of signs of a 4 x 4 corner of lanes' halves and rows: sets of up to 16, which a weak step would let pass. */
static void sets_of_signs(void **state)
{
    static float data[512];
    seen here = {NULL, 0, 0};
    uint32_t set, i;

    (void)state;
    for (i = 0; i < 512; i++)
        data[i] = 1.0f;
    for (set = 0; set < 1u << 16; set++) {
        for (i = 0; i < 16; i++)
            data[i / 4 * 32 + i % 4] = (set >> i & 1u) != 0 ? -1.0f : 1.0f;
        see(&here, (const unsigned char *)data, sizeof data);
    }
    all_differ(&here);
}

/* Rows of 8 bytes to 4 KiB, each exchanged with the one at a distance of a power of two. */
static void exchanged_rows(void **state)
{
    enum { BYTES = 1 << 16 };
    static unsigned char data[BYTES], swapped[BYTES];
    seen here = {NULL, 0, 0};
    size_t row, distance;

    (void)state;
    fixture_fill(data, BYTES, 7);
    see(&here, data, BYTES);
    for (row = 8; row <= 4096; row *= 2)
        for (distance = row; distance < BYTES; distance *= 2) {
            memcpy(swapped, data, BYTES);
            memcpy(swapped, data + distance, row);
            memcpy(swapped + distance, data, row);
            see(&here, swapped, BYTES);
        }
    all_differ(&here);
}

static void zeros_of_every_length(void **state)
{
    static const unsigned char zeros[3 * BLOCK];
    seen here = {NULL, 0, 0};
    uint64_t bytes;

    (void)state;
    for (bytes = 0; bytes <= sizeof zeros; bytes++)
        see(&here, zeros, bytes);
    all_differ(&here);
}

/* Parts of the value are as good as a value of their size: pairs of 16-bit parts agree about as often as chance says. */
static void every_part_is_random(void **state)
{
    enum { TRIES = 1 << 12 };
    static unsigned char data[2 * BLOCK];
    static unsigned counts[4][1 << 16];
    size_t bit;
    unsigned part, i;

    (void)state;
    for (bit = 0; bit < TRIES; bit++) {
        uint64_t value;

        data[bit / 8] ^= (unsigned char)(1u << bit % 8);
        value = msc_fingerprint_bytes(data, sizeof data);
        data[bit / 8] ^= (unsigned char)(1u << bit % 8);
        for (part = 0; part < 4; part++)
            counts[part][value >> 16 * part & 0xFFFF]++;
    }
    for (part = 0; part < 4; part++) {
        unsigned pairs = 0;

        for (i = 0; i < 1 << 16; i++)
            pairs += counts[part][i] * (counts[part][i] - 1) / 2;
        assert_in_range(pairs, 64, 192); /* 128 expected, with a deviation of 11 */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_values),
        cmocka_unit_test(definition_at_every_length),
        cmocka_unit_test(instruction_sets_agree),
        cmocka_unit_test(every_bit_counts),
        cmocka_unit_test(a_word_counts_for_certain),
        cmocka_unit_test(pairs_of_signs),
        cmocka_unit_test(sets_of_signs),
        cmocka_unit_test(exchanged_rows),
        cmocka_unit_test(zeros_of_every_length),
        cmocka_unit_test(every_part_is_random),
    };

    return cmocka_run_group_tests_name("fingerprint_kernels", tests, NULL, NULL);
}
