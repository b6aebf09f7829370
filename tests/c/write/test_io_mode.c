/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_io_mode.c - the choice to write new blocks beside the page cache: both
 * ways are tried, the cheaper one is used, and never one that a slow disk or a
 * failure excludes.
 */
#include "engine/write/io_mode.h"

#include "tests/c/support/check.h"

enum { MIB = 1 << 20 };

static gd_repo repo;

static void
start(void)
{
    memset(&repo, 0, sizeof repo);
    pthread_mutex_init(&repo.mutex, NULL);
}

/* Makes the next interval, of so many bytes, at most as many as allowed. A
 * MiB takes `through` ns of a processor, or `beside`; the writes are fast,
 * or not. */
static gd_stretch
go(uint64_t bytes, int64_t through, int64_t beside, bool fast)
{
    gd_stretch stretch;
    gd_io_mode_next(&repo, &stretch);
    gd_stretch given = stretch;
    uint64_t length = bytes < stretch.most ? bytes : stretch.most;
    int64_t mib = (int64_t)(length / MIB);
    stretch.worked = mib *
    (stretch.way == GD_IO_MODE_BESIDE ? beside : through);
    stretch.writes = (unsigned)(length / (4 * MIB));
    stretch.fast = fast ? stretch.writes : 0;
    gd_io_mode_note(&repo, &stretch, length);
    return given;
}

/* Both ways are tried for a short time, the page cache first. */
static void
expect_trials(int64_t through, int64_t beside, bool fast)
{
    gd_stretch stretch = go(GD_IO_MODE_LONG, through, beside, fast);
    CHECK_INT(stretch.way, GD_IO_MODE_THROUGH);
    CHECK_INT(stretch.most, GD_IO_MODE_TRIAL);
    stretch = go(GD_IO_MODE_LONG, through, beside, fast);
    CHECK_INT(stretch.way, GD_IO_MODE_BESIDE);
    CHECK_INT(stretch.most, GD_IO_MODE_TRIAL);
}

/* So many bytes go the better way before the other is tried again. */
static void
expect_best(gd_io_mode best, int64_t through, int64_t beside, bool fast)
{
    for (uint64_t done = 0; done < GD_IO_MODE_AGAIN - GD_IO_MODE_LONG;) {
        gd_stretch stretch = go(GD_IO_MODE_LONG, through, beside, fast);
        CHECK_INT(stretch.way, best);
        CHECK_INT(stretch.most, GD_IO_MODE_LONG);
        done += stretch.most;
    }
    unsigned others = 0;
    for (int i = 0; i < 3; i++) {
        others += go(GD_IO_MODE_LONG, through, beside, fast).way != best;
    }
    CHECK_INT(others, 1);
}

TEST(test_the_cheaper_way)
{
    start();
    expect_trials(1000, 300, true);
    expect_best(GD_IO_MODE_BESIDE, 1000, 300, true);
    start();
    expect_trials(300, 1000, true);
    expect_best(GD_IO_MODE_THROUGH, 300, 1000, true);
}

TEST(test_a_slow_disk)
{
    start();
    expect_trials(1000, 300, false);
    expect_best(GD_IO_MODE_THROUGH, 1000, 300, false);
    /* Most writes may have waited for a processor, but not all. */
    for (unsigned fast = 1; fast <= 2; fast++) {
        gd_stretch stretch;
        start();
        expect_trials(1000, 300, true);
        gd_io_mode_next(&repo, &stretch);
        CHECK_INT(stretch.way, GD_IO_MODE_BESIDE);
        stretch.worked = 128 * 300;
        stretch.writes = 2 * GD_IO_MODE_FEW;
        stretch.fast = fast;
        gd_io_mode_note(&repo, &stretch, 128 * MIB);
        gd_io_mode_next(&repo, &stretch);
        CHECK_INT(stretch.way,
                  fast == 1 ? GD_IO_MODE_THROUGH : GD_IO_MODE_BESIDE);
    }
}

/* A way that got more expensive is left; one interval decides little. */
TEST(test_costs_change)
{
    start();
    expect_trials(400, 300, true);
    CHECK_INT(go(GD_IO_MODE_LONG, 400, 500, true).way, GD_IO_MODE_BESIDE);
    CHECK_INT(go(GD_IO_MODE_LONG, 400, 500, true).way, GD_IO_MODE_BESIDE);
    CHECK_INT(go(GD_IO_MODE_LONG, 400, 900, true).way, GD_IO_MODE_BESIDE);
    CHECK_INT(go(GD_IO_MODE_LONG, 400, 900, true).way, GD_IO_MODE_THROUGH);
}

/* Small uploads are not measured; of many, few go the unknown way. */
TEST(test_small_uploads)
{
    start();
    for (int i = 0; i < 1000; i++) {
        CHECK_INT(go(MIB, 1000, 300, true).way, GD_IO_MODE_THROUGH);
    }
    go(GD_IO_MODE_MIN, 1000, 300, true);
    unsigned beside = 0;
    for (int i = 0; i < 1000; i++) {
        beside += go(MIB, 1000, 300, true).way == GD_IO_MODE_BESIDE;
    }
    CHECK(beside > 0 && beside <= 1 + 1000 * (unsigned)MIB / GD_IO_MODE_TRIAL);
}

TEST(test_refused)
{
    start();
    expect_trials(1000, 300, true);
    gd_io_mode_refuse(&repo);
    uint64_t done = 0;
    while (go(GD_IO_MODE_LONG, 1000, 300, true).way == GD_IO_MODE_THROUGH &&
           done < 2 * GD_IO_MODE_AGAIN) {
        done += GD_IO_MODE_LONG;
    }
    /* The way was tried again just now, and worked. */
    CHECK_INT(done, GD_IO_MODE_AGAIN);
    CHECK_INT(go(GD_IO_MODE_LONG, 1000, 300, true).way, GD_IO_MODE_BESIDE);
}
