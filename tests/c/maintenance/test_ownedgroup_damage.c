/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ownedgroup_damage.c - the bytes that rewriting a group would keep, and
 * blocks that are marked as damaged.
 */
#include "engine/maintenance/ownedgroup.h"

#include "tests/c/support/check.h"
#include "tests/c/support/owned_fixture.h"

/* ---- bytes that rewriting would keep ---- */

static void
check_live_bytes(owned_fixture *t, uint64_t bytes, uint64_t kept)
{
    uint64_t got_bytes, got_kept;
    CHECK_INT(gd_owned_group_live_bytes(t->owned, &got_bytes, &got_kept,
                                        &t->x.err), GD_OK);
    CHECK_INT(got_bytes, bytes);
    CHECK_INT(got_kept, kept);
}

TEST(test_live_bytes)
{
    owned_fixture t;
    owned_setup(&t);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    check_live_bytes(&t, 4 * WHOLE, 4 * WHOLE);
    require_freed(&t, 16, 4); /* at a segment's start, */
    check_live_bytes(&t, 4 * WHOLE, 4 * WHOLE - 4 * BLOCK);
    require_freed(&t, 24, 1); /* within, */
    check_live_bytes(&t, 4 * WHOLE, 4 * WHOLE - 5 * BLOCK);
    require_freed(&t, 10, 6); /* at its end, next to the other one */
    check_live_bytes(&t, 4 * WHOLE, 4 * WHOLE - 11 * BLOCK);
    require_freed(&t, 32, 16);
    check_live_bytes(&t, 3 * WHOLE, 3 * WHOLE - 11 * BLOCK);
    require_freed(&t, 49, 15);
    check_live_bytes(&t, 3 * WHOLE, 3 * WHOLE - 26 * BLOCK);
    require_freed(&t, 48, 1);
    require_freed(&t, 0, 10);
    require_freed(&t, 20, 4);
    require_freed(&t, 25, 7);
    check_live_bytes(&t, 0, 0);
    gd_owned_group_close(t.owned);
    owned_teardown(&t);
}

/* ---- damage ---- */

TEST(test_mark_damaged)
{
    static const uint32_t slots[] = {17, 3, 20, 4};
    owned_fixture t;
    gd_quarantine_name *names;
    size_t count;
    uint8_t *saved = malloc(WHOLE);
    owned_setup(&t);
    gd_published old = record_of(&t);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    require_freed(&t, 4, 1);
    fault_env_start_trace(&t.x.f);
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FSYNC);
    CHECK_INT(gd_owned_group_mark_damaged(t.owned, slots, 4, &names, &count,
                                          &t.x.err), GD_OK);
    scratch_check_trace(&t.x, "pwritev fsync pwritev fsync " FREE_ORDER);
    /* The syncs are of each file, and of their directory. */
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FSYNC) - syncs, 3);
    REQUIRE(count == 2);
    for (uint32_t i = 0; i < 2; i++) {
        char wanted[64];
        uint64_t offset = segment_offset(1 - i);
        snprintf(wanted, sizeof wanted, "quarantine/00000001-%u-",
                 (unsigned)offset);
        CHECK(strncmp(names[i], wanted, strlen(wanted)) == 0);
        CHECK_INT(scratch_size(&t.x, names[i]), WHOLE);
        scratch_read(&t.x, names[i], saved, WHOLE, 0);
        CHECK(memcmp(saved, t.before + offset, WHOLE) == 0);
    }
    t.x.env->release(t.x.env, names);
    gd_published record;
    gd_entry entries[SLOTS];
    read_group(&t, &record, entries);
    CHECK(record.generation != old.generation);
    CHECK_INT(count_state(&t, GD_ENTRY_DAMAGED), 3);
    CHECK_INT(entries[4].state, GD_ENTRY_FREED);
    CHECK_INT(entries[3].segment, segment_offset(0)); /* keeps its fields */
    CHECK_INT(entries[3].plain_length, BLOCK);
    /* The second call has no work. */
    fault_env_start_trace(&t.x.f);
    CHECK_INT(gd_owned_group_mark_damaged(t.owned, slots, 4, &names, &count,
                                          &t.x.err), GD_OK);
    CHECK_INT(count, 0);
    t.x.env->release(t.x.env, names);
    scratch_check_trace(&t.x, "");
    /* Its bytes stay, as long as it is damaged. */
    require_freed(&t, 0, 3);
    require_freed(&t, 5, 11);
    (void)owned_punch(&t);
    CHECK(is_untouched(&t, segment_offset(0), segment_offset(4)));
    require_freed(&t, 3, 1);
    CHECK(owned_punch(&t) > 0);
    CHECK(is_untouched(&t, segment_offset(1), segment_offset(4)));
    static const uint32_t far[] = {SLOTS};
    CHECK_INT(gd_owned_group_mark_damaged(t.owned, far, 1, &names, &count,
                                          &t.x.err), GD_INVALID);
    t.x.env->release(t.x.env, names);
    gd_owned_group_close(t.owned);
    /* No look-up returns them. */
    CHECK_INT(put_image(t.repo, "again", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK(is_image(&t, "again", t.one, LENGTH));
    free(saved);
    owned_teardown(&t);
}

/* No block is marked before the copies and their directory are durable. */
TEST(test_marking_without_a_copy)
{
    static const uint32_t slots[] = {17, 3};
    for (uint64_t n = 1; n <= 3; n++) {
        owned_fixture t;
        gd_quarantine_name *names = NULL;
        size_t count;
        owned_setup(&t);
        CHECK_INT(owned_enter(&t, 1), GD_OK);
        fault_env_fail(&t.x.f, FAULT_FSYNC, n, EIO, false);
        CHECK_INT(gd_owned_group_mark_damaged(t.owned, slots, 2, &names, &count,
                                       &t.x.err), GD_IO);
        CHECK_CONTAINS(t.x.err.text, "quarantine");
        CHECK_INT(count_state(&t, GD_ENTRY_DAMAGED), 0);
        t.x.env->release(t.x.env, names);
        gd_owned_group_close(t.owned);
        owned_teardown(&t);
    }
}

/* Unreadable bytes are zeros in the quarantine; the others are there. */
TEST(test_salvage)
{
    static const uint32_t slot = 50;
    owned_fixture t;
    gd_quarantine_name *names;
    size_t count;
    uint8_t *saved = malloc(WHOLE);
    owned_setup(&t);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    scratch_truncate(&t.x, GROUP_1, segment_offset(3) + 5000);
    CHECK_INT(gd_owned_group_mark_damaged(t.owned, &slot, 1, &names, &count,
                                          &t.x.err), GD_OK);
    REQUIRE(count == 1 && scratch_size(&t.x, names[0]) == WHOLE);
    scratch_read(&t.x, names[0], saved, WHOLE, 0);
    CHECK(memcmp(saved, t.before + segment_offset(3), 4608) == 0);
    for (size_t i = 5000; i < WHOLE; i++) {
        if (!CHECK_INT(saved[i], 0)) {
            break;
        }
    }
    t.x.env->release(t.x.env, names);
    gd_owned_group_close(t.owned);
    free(saved);
    owned_teardown(&t);
}
