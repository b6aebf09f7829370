/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_chunker_gear.c - content-defined cuts: against their reference, and
 * their purpose.
 */
#include "engine/format/chunker.h"

#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { SIZE = 300000, MINIMUM = 256, AVERAGE = 1024, MAXIMUM = 4096 };

static gd_chunker c;

static void
setup(void)
{
    gd_error err;
    REQUIRE(gd_chunker_gear(&c, MINIMUM, AVERAGE, MAXIMUM, &err) == GD_OK);
}

TEST(test_limits)
{
    static const size_t good[][3] = {{64, 128, 512},
                                     {100, 128, 512},
                                     {511, 512, 1024},
                                     {1024, 4096, 16384},
                                     {32767, 32768, 65536}};
    static const struct {
        size_t limits[3];
        const char *word;
    } bad[] = {
        {{0, 4096, 16384}, "the minimum is 0 bytes"},
        {{63, 4096, 16384}, "at least 64"},
        {{4096, 4096, 16384}, "the minimum, 4096 bytes, is not below"},
        {{8192, 4096, 16384}, "the minimum, 8192 bytes, is not below"},
        {{1024, 16384, 16384}, "the average, 16384 bytes, is not below"},
        {{1024, 32768, 16384}, "the average, 32768 bytes, is not below"},
        {{1024, 4095, 16384}, "the average is 4095 bytes"},
        {{1024, 4096, 16383}, "block size is 16383"},
        {{1024, 4096, 131072}, "block size is 131072"},
        {{64, 128, 256}, "block size is 256"},
    };
    gd_chunker chunker;
    gd_error err;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        CHECK_INT(gd_chunker_gear(&chunker, good[i][0], good[i][1],
                                  good[i][2], &err),
                  GD_OK);
        CHECK_INT(chunker.max_length, good[i][2]);
        CHECK_INT(chunker.average, good[i][1]);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const size_t *n = bad[i].limits;
        CHECK_INT(gd_chunker_gear(&chunker, n[0], n[1], n[2], &err),
                  GD_INVALID);
        CHECK_CONTAINS(err.text, bad[i].word);
    }
}

/* Random bytes, bytes of few kinds, and zeros, in stretches of any length. */
static void
fill_mixed(uint8_t *out, size_t length, uint64_t seed)
{
    fill_random(out, length, seed);
    for (size_t at = 0, turn = 0; at < length; turn++) {
        size_t here = 1 + (out[at] * 37 + seed * 11) % (turn % 5 == 0 ? 9000
                                                                     : 700);
        here = here < length - at ? here : length - at;
        for (size_t i = at; i < at + here && turn % 3 != 0; i++) {
            out[i] = turn % 3 == 1 ? 0 : out[i] & 3;
        }
        at += here;
    }
}

/* ---- against the reference ---- */

/* The bytes have a block of malloc to themselves, so that the address
 * sanitizer sees a read beyond them. */
static size_t
ask(const uint8_t *data, size_t len, size_t known, bool last)
{
    uint8_t *copy = malloc(len + 1);
    if (!CHECK(copy != NULL)) {
        return 0;
    }
    memcpy(copy + 1, data, len);
    size_t cut = c.next(&c, copy + 1, len, known, last);
    free(copy);
    return cut;
}

TEST(test_reference)
{
    static uint8_t data[SIZE];
    for (uint64_t seed = 1; seed < 6; seed++) {
        fill_mixed(data, SIZE, seed);
        for (size_t at = 0; at < SIZE;) {
            size_t left = SIZE - at;
            size_t cut = c.next(&c, data + at, left, 0, true);
            CHECK_INT(cut, gd_chunker_next_scalar(&c, data + at, left, true));
            REQUIRE(cut > 0 && cut <= MAXIMUM);
            at += cut;
        }
    }
}

/* The cuts do not depend on how many bytes are at hand, or were before. */
TEST(test_what_is_at_hand)
{
    static uint8_t data[3 * MAXIMUM];
    for (uint64_t seed = 1; seed < 40; seed++) {
        fill_mixed(data, sizeof data, seed);
        memset(data, 0, seed % 4 == 0 ? seed * 50 : 0);
        size_t cut = gd_chunker_next_scalar(&c, data, sizeof data, false);
        size_t few = 0; /* too few bytes for a cut */
        REQUIRE(cut > 0);
        for (size_t len = 0; len < cut + 200; len += 1 + len % 13) {
            size_t found = ask(data, len, 0, false);
            CHECK_INT(found, gd_chunker_next_scalar(&c, data, len, false));
            CHECK(found == 0 || found == cut);
            CHECK_INT(ask(data, len, few, false), found);
            CHECK_INT(ask(data, len, few, true),
                      found == 0 ? len : found);
            few = found == 0 ? len : few;
        }
        CHECK(few + 13 >= cut); /* it needs no more bytes than necessary */
    }
}

/* ---- the purpose ---- */

/* Marks the ends of blocks in data[0..len). */
static size_t
mark_ends(const uint8_t *data, size_t len, uint8_t *marks)
{
    size_t blocks = 0;
    memset(marks, 0, len + 1);
    for (size_t at = 0; at < len; blocks++) {
        at += c.next(&c, data + at, len - at, 0, true);
        marks[at] = 1;
    }
    return blocks;
}

/* Behind inserted or removed bytes, the cuts are soon the same again. */
TEST(test_resynchronises)
{
    static uint8_t data[SIZE], moved[SIZE + 6000];
    static uint8_t ends[SIZE + 1], moved_ends[SIZE + 6001];
    size_t furthest = 0;
    for (size_t shift = 1; shift < 6000; shift = shift * 3 + 1) {
        fill_random(data, SIZE, shift);
        fill_random(moved, shift, shift + 1);
        memcpy(moved + shift, data, SIZE);
        mark_ends(data, SIZE, ends);
        mark_ends(moved, SIZE + shift, moved_ends);
        size_t first = 1;
        while (first < SIZE && !(ends[first] && moved_ends[shift + first])) {
            first++;
        }
        CHECK(memcmp(ends + first, moved_ends + shift + first,
                     SIZE - first) == 0);
        furthest = first > furthest ? first : furthest;
    }
    CHECK(furthest < 20 * AVERAGE);
}

TEST(test_lengths)
{
    static uint8_t data[SIZE];
    size_t blocks = 0, close = 0, at = 0;
    fill_random(data, SIZE, 7);
    while (at < SIZE) {
        size_t cut = c.next(&c, data + at, SIZE - at, 0, true);
        CHECK(cut <= MAXIMUM);
        CHECK(cut >= MINIMUM || at + cut == SIZE);
        close += cut > AVERAGE / 2 && cut <= 2 * AVERAGE;
        at += cut;
        blocks++;
    }
    /* Most blocks are near the average. */
    CHECK(blocks > SIZE / AVERAGE * 3 / 4 && blocks < SIZE / AVERAGE * 5 / 4);
    CHECK(close > blocks * 3 / 4);
}

/* A block begins where zeros end, wherever they are. */
TEST(test_zeros)
{
    static uint8_t data[8 * MAXIMUM];
    static uint8_t ends[sizeof data + 1];
    for (size_t zeros = 2 * MINIMUM + GD_GEAR_WINDOW; zeros < 3 * MAXIMUM;
         zeros += 501) {
        for (size_t from = 0; from < 2 * MAXIMUM; from += 777) {
            fill_random(data, sizeof data, zeros + from);
            memset(data + from, 0, zeros);
            mark_ends(data, sizeof data, ends);
            CHECK(ends[from + zeros] || data[from + zeros] == 0);
        }
    }
    memset(data, 0, sizeof data);
    CHECK_INT(c.next(&c, data, sizeof data, 0, false), MAXIMUM);
    CHECK_INT(c.next(&c, data, MAXIMUM - 1, 0, false), 0);
    data[MINIMUM] = 1;
    CHECK_INT(c.next(&c, data, sizeof data, 0, false), MINIMUM);
    data[MINIMUM - 1] = 1;
    CHECK(c.next(&c, data, sizeof data, 0, false) != MINIMUM - 1);
}

/* The repository's cuts must never change. (tests/support/gear_reference.py,
 * which was written from the format alone, has the same.) */
TEST(test_golden)
{
    static const size_t expected[] = {1062, 1286, 2291, 1191, 1376, 1063, 366,
                                      1103, 1414, 1749, 1197, 663,  1105, 518};
    static uint8_t data[16384];
    size_t at = 0;
    for (size_t i = 0; i < sizeof data; i++) {
        data[i] = (uint8_t)((uint32_t)i * 2654435761u >> 24);
    }
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        size_t cut = c.next(&c, data + at, sizeof data - at, 0, true);
        CHECK_INT(cut, expected[i]);
        at += cut;
    }
    CHECK_INT(at, sizeof data);
}

int
main(int argc, char **argv)
{
    setup();
    return check_main(argc, argv);
}
