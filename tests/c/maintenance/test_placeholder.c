/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_placeholder.c - the file of an empty group that has the highest number.
 */
#include "engine/maintenance/placeholder.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/c/support/check.h"
#include "tests/c/support/owned_fixture.h"

#define GROUP_2 "groups/00000002"
#define HEADER_SIZE 512

static uint64_t
disk_bytes(const owned_fixture *t, const char *name)
{
    struct stat st;
    CHECK_INT(fstatat(t->x.root, name, &st, 0), 0);
    return (uint64_t)st.st_blocks * 512;
}

static uint64_t
leave(owned_fixture *t)
{
    uint64_t bytes;
    CHECK_INT(gd_placeholder_leave(t->owned, &bytes, &t->x.err),
              GD_OK);
    return bytes;
}

/* Enters group 2, half of whose slots are published, and frees these. */
static void
enter_empty(owned_fixture *t)
{
    owned_setup(t);
    CHECK_INT(owned_enter(t, 2), GD_OK);
    require_freed(t, 0, SLOTS / 2);
}

TEST(test_it_takes_the_place_of_an_empty_group)
{
    owned_fixture t;
    uint8_t before[HEADER_SIZE], after[HEADER_SIZE];
    enter_empty(&t);
    scratch_read(&t.x, GROUP_2, before, sizeof before, 0);
    uint64_t disk = disk_bytes(&t, GROUP_2);
    gd_published old = t.owned->leased->published;
    uint64_t bytes = leave(&t);
    CHECK_INT(disk - disk_bytes(&t, GROUP_2), bytes);
    CHECK(bytes > 0);
    /* There is a page of header and records: the rest is a hole. */
    CHECK(disk_bytes(&t, GROUP_2) <= 4096);
    CHECK_INT(scratch_size(&t.x, GROUP_2), gd_fptable_data_start(SLOTS));
    scratch_read(&t.x, GROUP_2, after, sizeof after, 0);
    CHECK(memcmp(before, after, sizeof before) == 0);
    CHECK_INT(t.owned->leased->published.count, 0);
    CHECK(t.owned->leased->published.sequence > old.sequence);
    CHECK(t.owned->leased->published.generation != old.generation);
    CHECK_INT(scratch_count(&t.x, "spool", "G", NULL), 0);
    CHECK_INT(leave(&t), 0); /* once is enough */
    gd_owned_group_close(t.owned);
    owned_teardown(&t);
}

/* It is a group like any other: code that reads groups needs no exception. */
TEST(test_it_reads_as_a_group_without_blocks)
{
    owned_fixture t;
    gd_published record;
    gd_entry entries[SLOTS];
    enter_empty(&t);
    CHECK(leave(&t) > 0);
    gd_owned_group_close(t.owned);
    CHECK_INT(owned_enter(&t, 2), GD_OK);
    CHECK_INT(gd_group_read_published(t.owned->leased->group, &record,
                                      &t.x.err), GD_OK);
    CHECK_INT(record.count, 0);
    CHECK_INT(record.end, gd_fptable_data_start(SLOTS));
    CHECK((record.flags & GD_GROUP_POISONED) != 0);
    CHECK_INT(gd_group_read_entries(t.owned->leased->group, 0, SLOTS, entries,
                                    &t.x.err), GD_OK);
    for (unsigned i = 0; i < SLOTS; i++) {
        CHECK_INT(entries[i].state, GD_ENTRY_EMPTY);
    }
    CHECK_INT(leave(&t), 0);
    gd_owned_group_close(t.owned);
    owned_teardown(&t);
}

/* New numbers are counted from it, and no writer appends to it. */
TEST(test_the_next_group_has_the_next_number)
{
    owned_fixture t;
    bool removed;
    enter_empty(&t);
    CHECK(leave(&t) > 0);
    CHECK_INT(gd_owned_group_unlink(t.owned, &removed, &t.x.err), GD_OK);
    CHECK(!removed);
    gd_owned_group_close(t.owned);
    CHECK_INT(put_image(t.repo, "again", t.two, LENGTH / 2, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK(scratch_exists(&t.x, "groups/00000003"));
    CHECK(is_image(&t, "again", t.two, LENGTH / 2));
    CHECK(disk_bytes(&t, GROUP_2) <= 4096);
    CHECK_INT(owned_enter(&t, 2), GD_OK); /* now it may be removed */
    CHECK_INT(gd_owned_group_unlink(t.owned, &removed, &t.x.err), GD_OK);
    CHECK(removed);
    gd_owned_group_close(t.owned);
    owned_teardown(&t);
}

TEST(test_a_group_with_blocks_stays)
{
    owned_fixture t;
    gd_quarantine_name *names;
    size_t count;
    static const uint32_t slot = 5;
    owned_setup(&t);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    require_freed(&t, 0, 5);
    require_freed(&t, 6, SLOTS - 7);
    CHECK_INT(leave(&t), 0); /* two live */
    CHECK_INT(gd_owned_group_mark_damaged(t.owned, &slot, 1, &names, &count,
                                          &t.x.err), GD_OK);
    t.x.env->release(t.x.env, names);
    CHECK_INT(leave(&t), 0);
    require_freed(&t, 5, 1);
    gd_owned_group_close(t.owned);
    /* N7.3: a crash took the record back; a recipe may name the last slot. */
    set_record(&t, SLOTS - 1, segment_offset(4));
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    CHECK_INT(leave(&t), 0);
    require_freed(&t, SLOTS - 1, 1);
    gd_owned_group_close(t.owned);
    scratch_flip(&t.x, GROUP_1, gd_entry_offset(9) + 3, 1);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    CHECK_INT(leave(&t), 0); /* its block is unknown */
    gd_owned_group_close(t.owned);
    CHECK(scratch_size(&t.x, GROUP_1) > (int64_t)gd_fptable_data_start(SLOTS));
    owned_teardown(&t);
}

/* A group that was poisoned before its first sync point has all of its
 * fingerprint table. */
TEST(test_a_group_that_never_had_a_block)
{
    owned_fixture t;
    gd_group *group;
    gd_published record = {.sequence = 9, .flags = GD_GROUP_POISONED};
    size_t length = gd_fptable_data_start(SLOTS) - HEADER_SIZE;
    uint8_t *zeros = calloc(1, length);
    owned_setup(&t);
    /* Its entries have not reached the disk. */
    scratch_write(&t.x, GROUP_2, zeros, length, HEADER_SIZE);
    CHECK_INT(gd_group_open(t.x.env, t.x.root, &t.x.params, 2, O_RDWR, &group,
                            &t.x.err), GD_OK);
    CHECK_INT(gd_group_write_published(group, &record, &t.x.err), GD_OK);
    gd_group_close(group);
    CHECK_INT(owned_enter(&t, 2), GD_OK);
    CHECK(leave(&t) > 0);
    CHECK(disk_bytes(&t, GROUP_2) <= 4096);
    CHECK_INT(leave(&t), 0);
    gd_owned_group_close(t.owned);
    free(zeros);
    owned_teardown(&t);
}

/* I4: the rename may come late, when a writer has leased the old file. So the
 * mark is durable before it; and the new file is whole before it. */
TEST(test_order)
{
    owned_fixture t;
    uint64_t bytes;
    gd_published record;
    enter_empty(&t);
    fault_env_fail(&t.x.f, FAULT_RENAMEAT, 1, EIO, false);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(gd_placeholder_leave(t.owned, &bytes, &t.x.err),
              GD_IO);
    scratch_check_trace(&t.x, "pwritev ftruncate fsync fdatasync pwritev "
                              "fdatasync unlinkat");
    CHECK_INT(gd_group_read_published(t.owned->leased->group, &record,
                                      &t.x.err), GD_OK);
    CHECK((record.flags & GD_GROUP_POISONED) != 0);
    CHECK_INT(record.count, SLOTS / 2);
    CHECK_INT(scratch_count(&t.x, "spool", "G", NULL), 0);
    gd_owned_group_close(t.owned);
    CHECK_INT(owned_enter(&t, 2), GD_OK);
    fault_env_start_trace(&t.x.f);
    CHECK(leave(&t) > 0); /* a second time, without a second mark */
    scratch_check_trace(&t.x, "pwritev ftruncate fsync renameat fsync");
    gd_owned_group_close(t.owned);
    owned_teardown(&t);
}

/* Until groups/ is synced a crash may bring the old file back: because of the
 * mark, it is synced before any change in the group. */
TEST(test_it_is_unsettled)
{
    owned_fixture t;
    uint64_t bytes;
    enter_empty(&t);
    gd_owned_group_close(t.owned);
    CHECK_INT(owned_enter(&t, 2), GD_OK);
    /* The syncs are the new file's, and the old one's two if it needs the
     * mark. */
    fault_env_fail(&t.x.f, FAULT_FSYNC, 2, EIO, false);
    CHECK_INT(gd_placeholder_leave(t.owned, &bytes, &t.x.err),
              GD_IO);
    gd_owned_group_close(t.owned);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(owned_enter(&t, 2), GD_OK);
    CHECK_INT(t.owned->leased->published.count, 0);
    gd_owned_group_close(t.owned);
    scratch_check_trace(&t.x, "fsync");
    owned_teardown(&t);
}

static bool
fail_one(fault_call call, uint64_t n)
{
    owned_fixture t;
    uint64_t bytes;
    enter_empty(&t);
    fault_env_fail(&t.x.f, call, n, EIO, false);
    gd_status s = gd_placeholder_leave(t.owned, &bytes,
                                       &t.x.err);
    bool hit = fault_env_faults(&t.x.f) > 0;
    fault_env_heal(&t.x.f);
    gd_owned_group_close(t.owned);
    /* Whatever failed, the other group is unchanged, and storing works. */
    CHECK(is_image(&t, "one", t.one, LENGTH));
    CHECK_INT(owned_enter(&t, 2), GD_OK);
    (void)leave(&t);
    CHECK(disk_bytes(&t, GROUP_2) <= 4096);
    gd_owned_group_close(t.owned);
    CHECK_INT(put_image(t.repo, "again", t.two, LENGTH / 2, LENGTH,
                        NULL, &t.x.err), GD_OK);
    CHECK(is_image(&t, "again", t.two, LENGTH / 2));
    owned_teardown(&t);
    CHECK(hit || s == GD_OK);
    return hit;
}

TEST(test_faults)
{
    sweep_faults(fail_one, SWEEP_STRIDE);
}
