/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_position.c - a position keeps its rules after any call, is the same
 * after encoding and decoding, and no other bytes are decoded.
 */
#include "engine/format/position.h"

#include "engine/format/address.h"
#include "tests/c/support/check.h"

static gd_position p;
static uint64_t words[GD_POSITION_WORDS];

static bool
is_sound(const gd_position *q)
{
    uint32_t before = q->lost;
    for (uint32_t i = 0; i < q->count; i++) {
        if (q->open[i].group <= before) {
            return false;
        }
        before = q->open[i].group;
    }
    return q->sealed <= q->turn && q->turn <= q->lost && before <= q->newest;
}

static void
append(uint32_t group)
{
    p.newest = group;
    gd_position_append(&p, (gd_open_group){group, group % 7, group * 3});
}

static void
check_round_trip(void)
{
    static gd_position again;
    CHECK(is_sound(&p));
    size_t length = gd_position_encode(&p, words);
    CHECK_INT(length, GD_POSITION_HEAD + p.count);
    CHECK_INT(gd_position_length(words), length);
    for (size_t i = 0; i < length; i++) {
        CHECK(words[i] >> 63 == 0);
    }
    CHECK(gd_position_decode(words, &again));
    CHECK(again.newest == p.newest && again.sealed == p.sealed &&
          again.turn == p.turn && again.lost == p.lost &&
          again.complete == p.complete && again.count == p.count);
    CHECK(memcmp(again.open, p.open, p.count * sizeof *p.open) == 0);
}

TEST(test_list)
{
    memset(&p, 0, sizeof p);
    check_round_trip();
    for (uint32_t group = 10; p.count < GD_OPEN_GROUPS; group += 2) {
        append(group);
    }
    p.complete = true;
    check_round_trip();
    CHECK_INT(p.lost, 0);
    CHECK(!gd_position_prepend(&p, (gd_open_group){5, 0, 0}));
    uint32_t last = p.newest;
    append(last + 1); /* all up to 9 are sealed and read; 10 is lost */
    CHECK(p.sealed == 9 && p.turn == 10 && p.lost == 10);
    append(last + 2);
    CHECK(p.sealed == 9 && p.turn == 10 && p.lost == 12);
    check_round_trip();
    gd_position_remove(&p, 3);
    CHECK_INT(p.open[3].group, 22);
    p.lost = p.turn = 11;
    CHECK(gd_position_prepend(&p, (gd_open_group){12, 1, 1}));
    CHECK_INT(p.open[0].group, 12);
    check_round_trip();
    gd_position_cut(&p, 40);
    CHECK(p.newest == 40 && p.open[p.count - 1].group == 40);
    check_round_trip();
    gd_position_cut(&p, 10);
    CHECK(p.count == 0 && p.lost == 10 && p.sealed == 9);
    gd_position_cut(&p, 0);
    check_round_trip();
}

TEST(test_limits)
{
    memset(&p, 0, sizeof p);
    p.newest = GD_MAX_GROUP;
    gd_position_append(&p, (gd_open_group){GD_MAX_GROUP, GD_MAX_SLOTS,
                                           gd_position_identity(UINT64_MAX)});
    check_round_trip();
}

/* The checksum is right, as an attacker who writes to the file can make it. */
static bool
is_taken(void)
{
    static gd_position found, zeros;
    gd_position_encode(&p, words);
    bool taken = gd_position_decode(words, &found);
    CHECK(taken || memcmp(&found, &zeros, sizeof found) == 0);
    return taken;
}

TEST(test_what_is_no_position)
{
    static gd_position good, found;
    memset(&p, 0, sizeof p);
    memset(words, 0, sizeof words);
    CHECK(!gd_position_decode(words, &found));
    append(5);
    append(9);
    good = p;
    CHECK(is_taken());
    size_t length = gd_position_encode(&p, words);
    for (size_t bit = 0; bit < 64 * length; bit++) {
        words[bit / 64] ^= UINT64_C(1) << bit % 64;
        CHECK(!gd_position_decode(words, &found));
        words[bit / 64] ^= UINT64_C(1) << bit % 64;
    }
    CHECK(gd_position_decode(words, &found));
    p.newest = 8; /* below the list's last */
    CHECK(!is_taken());
    p = good;
    p.newest = GD_MAX_GROUP + 1;
    CHECK(!is_taken());
    p = good;
    p.lost = 5; /* not below the list's first */
    CHECK(!is_taken());
    p = good;
    p.sealed = 1; /* above turn */
    CHECK(!is_taken());
    p = good;
    p.turn = 1; /* above lost */
    CHECK(!is_taken());
    p = good;
    p.open[1].group = 5;
    CHECK(!is_taken());
    p = good;
    p.open[1].published = GD_MAX_SLOTS + 1;
    CHECK(!is_taken());
    gd_position_encode(&good, words);
    words[2] |= UINT64_C(2000) << 32; /* more than there is room for */
    CHECK_INT(gd_position_length(words), GD_POSITION_WORDS);
    CHECK(!gd_position_decode(words, &found));
}
