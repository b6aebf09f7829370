/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_self_published.c - entries published here are known until the index is
 * emptied, and entries added meanwhile are not.
 */
#include "engine/files/self_published.h"

#include "engine/format/address.h"
#include "tests/c/support/check.h"

static gd_self_published own;

static void
note(uint32_t group, uint32_t first, uint32_t end)
{
    gd_self_published_add(&own, gd_self_published_epoch(&own), group, first,
                          end);
}

static bool
is_known(uint32_t group, uint32_t first, uint32_t end)
{
    uint32_t a, b;
    gd_self_published_find(&own, group, &a, &b);
    return a == first && b == end;
}

TEST(test_ranges)
{
    memset(&own, 0, sizeof own);
    note(7, 0, 10); /* before the first epoch */
    CHECK(is_known(7, 0, 0));
    gd_self_published_begin_epoch(&own);
    CHECK(is_known(7, 0, 0) && is_known(0, 0, 0));
    note(7, 3, 10);
    note(7, 10, 12); /* joined */
    CHECK(is_known(7, 3, 12));
    note(7, 20, 30); /* apart: others published between */
    CHECK(is_known(7, 20, 30));
    note(7, 30, 30);
    CHECK(is_known(7, 20, 30));
    note(7 + GD_SELF_PUBLISHED_GROUPS, 0, 5); /* replaces the other group */
    CHECK(is_known(7, 0, 0));
    note(GD_MAX_GROUP, 0, GD_MAX_SLOTS);
    CHECK(is_known(GD_MAX_GROUP, 0, GD_MAX_SLOTS));
}

TEST(test_epochs)
{
    memset(&own, 0, sizeof own);
    gd_self_published_begin_epoch(&own);
    for (unsigned i = 0; i < 300; i++) {
        uint64_t before = gd_self_published_epoch(&own);
        note(i, 0, 5);
        gd_self_published_end_epoch(&own);
        CHECK(is_known(i, 0, 0));
        note(i, 0, 5); /* in no epoch */
        gd_self_published_end_epoch(&own); /* of a dead process, and again */
        gd_self_published_begin_epoch(&own);
        gd_self_published_begin_epoch(&own);
        CHECK(is_known(i, 0, 0));
        gd_self_published_add(&own, before, i, 0, 5); /* begun before */
        CHECK(is_known(i, 0, 0));
        note(i, 5, 9); /* not joined to that */
        CHECK(is_known(i, 5, 9));
    }
}

/* The memory may have any bytes. */
TEST(test_garbage)
{
    for (unsigned byte = 0; byte < 256; byte++) {
        memset(&own, (int)byte, sizeof own);
        for (uint32_t group = 0; group < 1000; group++) {
            uint32_t first, end;
            gd_self_published_find(&own, group, &first, &end);
            CHECK(first <= end && end <= GD_MAX_SLOTS);
        }
    }
}
