/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_hints.c - the groups that are chosen for a batch: few, with most blocks
 * first, and in the order of their numbers.
 */
#include "engine/write/hints.h"

#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"

enum { BLOCKS = 20000 };

static fault_env f;
static gd_hints *hints;
static gd_address blocks[BLOCKS]; /* group 0: not found */

static void
setup(void)
{
    fault_env_init(&f);
    memset(blocks, 0, sizeof blocks);
    REQUIRE(gd_hints_open(&f.env, &hints, NULL) == GD_OK);
    gd_hints_clear(hints);
}

static void
teardown(void)
{
    gd_hints_close(&f.env, hints);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

/* Adds hints of the blocks [first, end) to up to two groups. */
static void
add(size_t first, size_t end, uint32_t group, uint32_t other)
{
    for (size_t i = first; i < end; i++) {
        gd_hints_add(hints, &blocks[i], group);
        if (other != 0) {
            gd_hints_add(hints, &blocks[i], other);
        }
    }
}

static void
find(size_t first, size_t end)
{
    for (size_t i = first; i < end; i++) {
        blocks[i].group = 1;
    }
}

TEST_WITH(test_most_first, setup(), teardown())
{
    uint32_t groups[16];
    CHECK_INT(gd_hints_choose(hints, 16, groups), 0);
    add(0, 2, 3, 0);
    add(2, 10, 9, 0);
    add(10, 15, 4, 0);
    add(15, 16, 1, 0);
    CHECK_INT(gd_hints_choose(hints, 2, groups), 2);
    CHECK_INT(groups[0], 4);
    CHECK_INT(groups[1], 9);
    CHECK_INT(gd_hints_left(hints), 2);
    CHECK_INT(gd_hints_choose(hints, 0, groups), 0);
    CHECK_INT(gd_hints_choose(hints, 16, groups), 2);
    CHECK_INT(groups[0], 1);
    CHECK_INT(groups[1], 3);
    CHECK_INT(gd_hints_left(hints), 0);
    CHECK_INT(gd_hints_choose(hints, 16, groups), 0);
}

/* Blocks that are also in another chosen group are no reason to choose one, as
 * long as they may be found there. */
TEST_WITH(test_copies, setup(), teardown())
{
    uint32_t groups[16];
    add(0, 8, 7, 5);
    add(8, 10, 5, 6);
    add(10, 11, 6, 0);
    CHECK_INT(gd_hints_choose(hints, 16, groups), 2);
    CHECK_INT(groups[0], 5); /* ten, and all but one, which 6 has */
    CHECK_INT(groups[1], 6);
}

TEST_WITH(test_copies_of_all, setup(), teardown())
{
    uint32_t groups[16];
    add(0, 8, 7, 5);
    add(8, 9, 7, 0);
    CHECK_INT(gd_hints_choose(hints, 16, groups), 1);
    CHECK_INT(groups[0], 7);
    /* All blocks are found but one that only this group has. */
    find(0, 8);
    CHECK(gd_hints_want(hints, 7));
    CHECK(!gd_hints_want(hints, 5));
    CHECK(!gd_hints_want(hints, 8));
    CHECK_INT(gd_hints_choose(hints, 16, groups), 0);
    find(8, 9);
    CHECK(!gd_hints_want(hints, 7));
}

/* The chosen group had none of them: the copies are worth a try. */
TEST_WITH(test_second_choice, setup(), teardown())
{
    uint32_t groups[16];
    add(0, 8, 7, 5);
    add(8, 9, 7, 0);
    CHECK_INT(gd_hints_choose(hints, 16, groups), 1);
    find(0, 2);
    CHECK_INT(gd_hints_left(hints), 1);
    CHECK_INT(gd_hints_choose(hints, 16, groups), 1);
    CHECK_INT(groups[0], 5);
    CHECK_INT(gd_hints_left(hints), 0);
}

/* There are more hints than fit: some are dropped, and no more happens. */
TEST_WITH(test_too_many, setup(), teardown())
{
    static uint32_t groups[BLOCKS];
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < 1000; i++) {
            add(i, i + 1, 1000 - i, 0);
        }
        size_t n = gd_hints_choose(hints, BLOCKS, groups);
        CHECK(n >= 100 && n < 1000);
        for (size_t i = 0; i < n; i++) {
            CHECK_INT(groups[i], 1000 - n + 1 + i); /* the first ones */
        }
        gd_hints_clear(hints);
        CHECK_INT(gd_hints_left(hints), 0);
        add(0, BLOCKS, 2, 1);
        CHECK_INT(gd_hints_choose(hints, BLOCKS, groups), 1);
        CHECK_INT(groups[0], 2);
        gd_hints_clear(hints);
    }
}

TEST_WITH(test_without_memory, setup(), teardown())
{
    gd_hints *other;
    gd_error err;
    fault_env_fail(&f, FAULT_ALLOC, 1, ENOMEM, false);
    CHECK_INT(gd_hints_open(&f.env, &other, &err), GD_NOMEM);
    gd_hints_close(&f.env, other);
}
