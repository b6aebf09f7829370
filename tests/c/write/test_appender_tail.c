/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_appender_tail.c - the recovery of a dead writer's tail when another
 * writer leases the group (N7.3).
 */
#include "engine/write/appender.h"

#include "tests/c/support/appender_fixture.h"
#include "tests/c/support/check.h"

/* ---- tails ---- */

/* Makes a group whose first 10 slots are published, and behind them a tail of
 * 20, in four segments: the record of their sync point is lost. */
static void
make_tail(appender_fixture *t)
{
    uint8_t lost[512] = {0};
    CHECK_INT(store_segments(t, 2), 1);
    CHECK_INT(store_segments(t, 4), 1);
    scratch_write(&t->x, GROUP_1, lost, sizeof lost, 512); /* sequence 2 */
    CHECK_INT(read_group_contents(t, 1).published.count, 10);
    CHECK_INT(unlinkat(t->x.root, "filter", 0), 0); /* another host */
    appender_other_handle(t);
}

/* Returns the offset of the tail's segment i: each has 5 blocks, as those
 * before it. */
static uint64_t
tail_segment(uint32_t i)
{
    return APPENDER_START + (2 + (uint64_t)i) * (32 + 5 * APPENDER_BLOCK);
}

/* Checks the next writer; its blocks come behind the tail. */
static void
check_next_writer(appender_fixture *t)
{
    gd_appender *appender = open_appender(t);
    CHECK_INT(appender_number(appender), 1);
    CHECK_INT(gd_appender_room(appender), 64 - 30);
    CHECK_INT(read_group_contents(t, 1).published.count, 30);
    CHECK_INT(append_segment(t, appender, 5), GD_OK);
    CHECK_INT(gd_appender_entry(appender, 30)->state, GD_ENTRY_LIVE);
    CHECK_INT(sync_appender(t, appender), GD_OK);
    close_appender(t, appender);
    check_live_slots(t, 1, 0, 10);
    check_live_slots(t, 1, 30, 35);
    CHECK_INT(read_group_contents(t, 1).published.count, 35);
}

static appender_fixture t;

TEST_WITH(test_whole_tail_is_renewed, appender_setup(&t),
          appender_teardown(&t))
{
    make_tail(&t);
    group_contents before = read_group_contents(&t, 1);
    uint64_t writes = fault_env_count(&t.x.f, FAULT_PWRITEV);
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FDATASYNC);
    gd_appender *appender = open_appender(&t);
    /* The writes are of its four segments, their entries, and the record. */
    CHECK_INT(fault_env_count(&t.x.f, FAULT_PWRITEV), writes + 6);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FDATASYNC), syncs + 1);
    close_appender(&t, appender);
    group_contents after = read_group_contents(&t, 1);
    CHECK_INT(after.published.count, 30);
    CHECK(memcmp(before.entries, after.entries, sizeof before.entries) == 0);
    check_live_slots(&t, 1, 0, 30);
    CHECK_INT(hints_for(&t, 1, 10) + hints_for(&t, 1, 29), 2);
    check_next_writer(&t);
    check_live_slots(&t, 1, 0, 35);
}

/* Both records are lost: everything is a tail. */
TEST(test_no_record_at_all)
{
    appender_fixture t;
    uint8_t lost[512] = {0};
    appender_setup(&t);
    make_tail(&t);
    scratch_write(&t.x, GROUP_1, lost, sizeof lost, 1024);
    CHECK_INT(read_group_contents(&t, 1).published.sequence, 0);
    check_next_writer(&t);
    check_live_slots(&t, 1, 0, 35);
    appender_teardown(&t);
}

/* Only blocks that do not verify are lost: one block, or all if the header is
 * torn, or none, if it is the segment's own checksum. */
TEST(test_torn_segment)
{
    static const struct {
        uint64_t place;
        uint32_t first, end;
    } torn[] = {{0, 15, 20},  {4, 15, 20},  {8, 16, 20},   {16, 15, 20},
                {24, 15, 15}, {32, 15, 16}, {1100, 17, 18}, {2591, 19, 20}};
    for (size_t i = 0; i < sizeof torn / sizeof torn[0]; i++) {
        appender_fixture t;
        appender_setup(&t);
        make_tail(&t);
        group_contents c = read_group_contents(&t, 1);
        scratch_flip(&t.x, GROUP_1, tail_segment(1) + torn[i].place, 4);
        check_next_writer(&t);
        check_live_slots(&t, 1, 10, torn[i].first);
        check_slot_states(&t, 1, torn[i].first, torn[i].end, GD_ENTRY_DAMAGED);
        check_live_slots(&t, 1, torn[i].end, 30);
        if (torn[i].first < torn[i].end) {
            CHECK_INT(hints_for(&t, 1, torn[i].first), 0);
            /* The entry still has its block's fingerprint, and its offset. */
            group_contents now = read_group_contents(&t, 1);
            CHECK_INT(now.entries[torn[i].first].segment,
                      c.entries[torn[i].first].segment);
        }
        appender_teardown(&t);
    }
}

/* The file ends in the last segment, or behind the published part. */
TEST(test_data_that_is_missing)
{
    appender_fixture t;
    appender_setup(&t);
    make_tail(&t);
    scratch_truncate(&t.x, GROUP_1, tail_segment(3) + 100);
    check_next_writer(&t);
    check_live_slots(&t, 1, 10, 25);
    check_slot_states(&t, 1, 25, 30, GD_ENTRY_DAMAGED);
    appender_teardown(&t);
    appender_setup(&t);
    make_tail(&t);
    scratch_truncate(&t.x, GROUP_1, tail_segment(0));
    check_next_writer(&t);
    check_slot_states(&t, 1, 10, 30, GD_ENTRY_DAMAGED);
    appender_teardown(&t);
}

/* Gaps become void; torn entries stay unchanged, and so do the others. */
TEST(test_torn_entries)
{
    appender_fixture t;
    uint8_t zeros[GD_ENTRY_SIZE] = {0};
    appender_setup(&t);
    make_tail(&t);
    scratch_flip(&t.x, GROUP_1, gd_entry_offset(12) + 35, 1);
    scratch_write(&t.x, GROUP_1, zeros, sizeof zeros, gd_entry_offset(20));
    scratch_write(&t.x, GROUP_1, zeros, 30, gd_entry_offset(24));
    scratch_flip(&t.x, GROUP_1, gd_entry_offset(29) + 55, 1);
    check_next_writer(&t);
    static const uint32_t torn[] = {12, 20, 24, 29, 30};
    for (uint32_t slot = 10, i = 0; slot < 30; slot++) {
        if (slot == torn[i]) {
            check_slot_states(&t, 1, slot, slot + 1,
                              slot == 20 ? GD_ENTRY_VOID : GD_ENTRY_INVALID);
            i++;
        } else {
            check_live_slots(&t, 1, slot, slot + 1);
        }
    }
    appender_teardown(&t);
}

static void
write_entry(appender_fixture *t, uint32_t slot, const gd_entry *entry)
{
    gd_group *group;
    REQUIRE(gd_group_open(gd_env_posix(), t->x.root, &t->x.params, 1, O_RDWR,
                          &group, NULL) == GD_OK);
    CHECK_INT(gd_group_write_entries(group, slot, 1, entry, NULL), GD_OK);
    gd_group_close(group);
}

/* These entries are whole but name wrong bytes. */
TEST_WITH(test_entries_that_lie, appender_setup(&t), appender_teardown(&t))
{
    make_tail(&t);
    group_contents c = read_group_contents(&t, 1);
    gd_entry lie = c.entries[11];
    lie.fingerprint.bytes[31] ^= 1; /* not of this content */
    write_entry(&t, 11, &lie);
    lie = c.entries[16];
    lie.checksum ^= 1;
    write_entry(&t, 16, &lie);
    write_entry(&t, 22, &c.entries[10]); /* of another slot's segment */
    lie = c.entries[27];
    lie.plain_offset += APPENDER_BLOCK; /* its neighbour's bytes */
    write_entry(&t, 27, &lie);
    check_next_writer(&t);
    static const uint32_t lies[] = {11, 16, 22, 27, 30};
    for (uint32_t slot = 10, i = 0; slot < 30; slot++) {
        if (slot == lies[i]) {
            check_slot_states(&t, 1, slot, slot + 1, GD_ENTRY_DAMAGED);
            i++;
        } else {
            check_live_slots(&t, 1, slot, slot + 1);
        }
    }
}

/* Entries that were void, freed or damaged in the tail stay so. */
TEST_WITH(test_other_states_are_kept, appender_setup(&t),
          appender_teardown(&t))
{
    make_tail(&t);
    group_contents c = read_group_contents(&t, 1);
    gd_entry entry = {.state = GD_ENTRY_VOID};
    write_entry(&t, 10, &entry);
    entry.state = GD_ENTRY_FREED;
    write_entry(&t, 11, &entry);
    entry = c.entries[12];
    entry.state = GD_ENTRY_DAMAGED;
    write_entry(&t, 12, &entry);
    check_next_writer(&t);
    check_slot_states(&t, 1, 10, 11, GD_ENTRY_VOID);
    check_slot_states(&t, 1, 11, 12, GD_ENTRY_FREED);
    check_slot_states(&t, 1, 12, 13, GD_ENTRY_DAMAGED);
    CHECK(read_group_contents(&t, 1).entries[12].checksum ==
          c.entries[12].checksum);
    check_live_slots(&t, 1, 13, 30);
}

/* However thin the tail is, and however far behind the record: a slot that was
 * used once is used up, and so are all before it. */
TEST(test_tail_of_a_large_group)
{
    static const uint32_t slots[] = {0, 1023, 1024, 2500, 4094};
    const gd_entry freed = {.state = GD_ENTRY_FREED};
    for (size_t i = 0; i < sizeof slots / sizeof slots[0]; i++) {
        appender_fixture t;
        gd_entry entries[2];
        uint32_t slot = slots[i], before = slot - (slot > 0);
        appender_setup(&t);
        t.x.params.group_slots = 4096;
        appender_other_handle(&t);
        close_appender(&t, open_appender(&t)); /* makes the group */
        write_entry(&t, 0, &freed);
        write_entry(&t, slot, &freed);
        gd_appender *appender = open_appender(&t);
        const gd_group *group = gd_appender_group(appender);
        CHECK_INT(group->number, 1);
        CHECK_INT(gd_appender_room(appender), 4096 - slot - 1);
        CHECK_INT(gd_group_read_entries(group, before, 2, entries, NULL),
                  GD_OK);
        CHECK_INT(entries[slot - before].state, GD_ENTRY_FREED);
        CHECK(slot == 0 || entries[0].state == GD_ENTRY_VOID);
        close_appender(&t, appender);
        appender_teardown(&t);
    }
}

/* A tail up to the last slot leaves no room, but it is made durable. */
TEST(test_tail_that_fills_the_group)
{
    appender_fixture t;
    uint8_t lost[512] = {0};
    appender_setup(&t);
    CHECK_INT(store_segments(&t, 12), 1);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(append_segment(&t, appender, 4), GD_OK);
    CHECK_INT(sync_appender(&t, appender), GD_OK);
    close_appender(&t, appender);
    scratch_write(&t.x, GROUP_1, lost, sizeof lost, 512);
    appender_other_handle(&t);
    CHECK_INT(store_segments(&t, 1), 2);
    CHECK_INT(read_group_contents(&t, 1).published.count, 64);
    check_live_slots(&t, 1, 0, 64);
    appender_teardown(&t);
}

/* Whatever call fails once during the recovery of the tail, no block of it is
 * given up: committed recipes may name them. */
TEST(test_tail_survives_any_failure)
{
    static const int errors[] = {EIO, ENOSPC, ENOMEM};
    for (int kind = 0; kind < 3; kind++) {
        fault_call call = errors[kind] == ENOMEM ? FAULT_ALLOC : FAULT_ANY;
        bool struck = true;
        for (uint64_t n = 1; struck; n++) {
            appender_fixture t;
            gd_appender *appender;
            appender_setup(&t);
            make_tail(&t);
            uint64_t faults = fault_env_faults(&t.x.f);
            fault_env_fail(&t.x.f, call, n, errors[kind], false);
            gd_status s = gd_appender_open(t.repo, &gd_global_scope, NULL,
                                           &appender, &t.x.err);
            struck = fault_env_faults(&t.x.f) > faults;
            fault_env_heal(&t.x.f);
            if (s == GD_OK) {
                close_appender(&t, appender);
            }
            check_live_slots(&t, 1, 0, 30);
            appender_other_handle(&t);
            uint32_t number = store_segments(&t, 1);
            group_contents c = read_group_contents(&t, 1);
            bool poisoned = (c.published.flags & GD_GROUP_POISONED) != 0;
            CHECK(poisoned ? number > 1 && c.published.count == 10
                           : c.published.count >= 30 || number > 1);
            check_live_slots(&t, 1, 0, 30);
            if (check_failures > 0) {
                fprintf(stderr, "call %u, error %d\n", (unsigned)n,
                        errors[kind]);
                struck = false;
            }
            appender_teardown(&t);
        }
    }
}

TEST_WITH(test_failed_fdatasync_of_a_tail, appender_setup(&t),
          appender_teardown(&t))
{
    make_tail(&t);
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FDATASYNC);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 1, EIO, false);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(appender_number(appender), 2); /* another one is used */
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FDATASYNC), syncs + 1);
    close_appender(&t, appender);
    check_poisoned(&t, 10);
    CHECK_INT(hints_for(&t, 1, 10), 0);
    check_left_alone(&t);
    check_live_slots(&t, 1, 0, 30); /* a recipe may name them */
}
