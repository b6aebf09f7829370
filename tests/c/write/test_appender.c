/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_appender.c - a writer's place in a group: no entry counts before the
 * writer's own fdatasync, nor after a failed one (N7.4, I1).
 */
#include "engine/write/appender.h"

#include "tests/c/support/appender_fixture.h"
#include "tests/c/support/check.h"

static appender_fixture t;

/* ---- appending ---- */

TEST_WITH(test_append_and_sync, appender_setup(&t), appender_teardown(&t))
{
    gd_appender *appender = open_appender(&t);
    CHECK_INT(appender_number(appender), 1);
    CHECK_INT(gd_appender_room(appender), 64);
    CHECK(!gd_appender_is_due(appender));
    CHECK(gd_appender_entry(appender, 0) == NULL);
    CHECK_INT(append_segment(&t, appender, 5), GD_OK);
    CHECK_INT(append_segment(&t, appender, 3), GD_OK);
    CHECK_INT(gd_appender_room(appender), 56);
    CHECK(!gd_appender_is_due(appender));
    CHECK_INT(scratch_size(&t.x, GROUP_1),
              APPENDER_START + 2 * 32 + 8 * APPENDER_BLOCK);
    CHECK_INT(gd_appender_entry(appender, 0)->segment, APPENDER_START);
    CHECK_INT(gd_appender_entry(appender, 7)->segment,
              APPENDER_START + 32 + 5 * APPENDER_BLOCK);
    CHECK(gd_appender_entry(appender, 8) == NULL);
    /* Only the data is on the disk. */
    check_slot_states(&t, 1, 0, 64, GD_ENTRY_EMPTY);
    CHECK_INT(read_group_contents(&t, 1).published.sequence, 0);
    CHECK_INT(hints_for(&t, 1, 0), 0);
    CHECK_INT(sync_appender(&t, appender), GD_OK);
    check_live_slots(&t, 1, 0, 8);
    check_slot_states(&t, 1, 8, 64, GD_ENTRY_EMPTY);
    group_contents c = read_group_contents(&t, 1);
    CHECK_INT(c.published.sequence, 1);
    CHECK_INT(c.published.count, 8);
    CHECK_INT(c.published.end, APPENDER_START + 2 * 32 + 8 * APPENDER_BLOCK);
    CHECK_INT(c.published.flags, 0);
    CHECK_INT(hints_for(&t, 1, 0) + hints_for(&t, 1, 7), 2);
    CHECK(!gd_appender_is_due(appender));
    CHECK(gd_appender_entry(appender, 7) == NULL);
    /* Without new entries there is no sync. */
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FDATASYNC);
    CHECK_INT(sync_appender(&t, appender), GD_OK);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FDATASYNC), syncs);
    CHECK_INT(append_segment(&t, appender, 1), GD_OK);
    CHECK_INT(sync_appender(&t, appender), GD_OK);
    check_live_slots(&t, 1, 0, 9);
    CHECK_INT(read_group_contents(&t, 1).published.sequence, 2);
    close_appender(&t, appender);
}

/* The order is entries, fdatasync, record: an entry never precedes its data,
 * the record never precedes its entries' fdatasync. */
TEST_WITH(test_order_of_a_sync_point, appender_setup(&t),
          appender_teardown(&t))
{
    gd_appender *appender = open_appender(&t);
    CHECK_INT(append_segment(&t, appender, 5), GD_OK);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 1, EIO, false);
    CHECK_INT(sync_appender(&t, appender), GD_IO);
    check_live_slots(&t, 1, 0, 5);
    CHECK_INT(read_group_contents(&t, 1).published.count, 0);
    close_appender(&t, appender);
    appender = open_appender(&t);
    CHECK_INT(append_segment(&t, appender, 5), GD_OK);
    fault_env_fail(&t.x.f, FAULT_PWRITEV, 1, EIO, false);
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FDATASYNC);
    CHECK_INT(sync_appender(&t, appender), GD_IO);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FDATASYNC), syncs);
    check_slot_states(&t, 2, 0, 5, GD_ENTRY_EMPTY);
    close_appender(&t, appender);
}

TEST_WITH(test_lease_and_share, appender_setup(&t), appender_teardown(&t))
{
    gd_locks *other;
    CHECK_INT(gd_locks_open(t.x.env, t.x.root, &other, &t.x.err), GD_OK);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(gd_locks_lease(other, 1, NULL), GD_BUSY);
    const gd_env *env = gd_env_posix();
    int raw = openat(t.x.root, GD_FILE_GROUP_LOCKS, O_RDWR | O_CLOEXEC);
    const uint64_t share = (UINT64_C(1) << 32) + 1;
    CHECK_INT(env->lock(env, raw, share, F_WRLCK), -EAGAIN);
    gd_appender_close(appender);
    CHECK_INT(gd_locks_lease(other, 1, NULL), GD_OK);
    CHECK_INT(env->lock(env, raw, share, F_WRLCK), -EAGAIN); /* I6 */
    gd_locks_unlock_shared(t.repo->locks, 1);
    CHECK_INT(env->lock(env, raw, share, F_WRLCK), 0);
    close(raw);
    gd_locks_close(other);
}

static int
lock_no_file(const gd_env *env, int fd, uint64_t byte, short type)
{
    (void)env;
    return byte == GD_BYTE_LESSEE && type == F_RDLCK
               ? -EIO
               : gd_env_posix()->lock(gd_env_posix(), fd, byte, type);
}

/* By this lock a file system can report lost locks as errors (I4). */
TEST_WITH(test_holds_a_lock_on_the_file, appender_setup(&t),
          appender_teardown(&t))
{
    t.repo->params.direct_io = GD_DIRECT_ON;
    gd_appender *appender = open_appender(&t);
    const gd_env *env = gd_env_posix();
    int raw = openat(t.x.root, GROUP_1, O_RDWR | O_CLOEXEC);
    CHECK_INT(env->is_locked(env, raw, GD_BYTE_LESSEE), 1);
    /* Only the lease keeps others out. */
    CHECK_INT(env->lock(env, raw, GD_BYTE_LESSEE, F_RDLCK), 0);
    close_appender(&t, appender);
    CHECK_INT(env->lock(env, raw, GD_BYTE_LESSEE, F_WRLCK), 0);
    CHECK_INT(env->lock(env, raw, GD_BYTE_LESSEE, F_UNLCK), 0);
    /* Without the lock the group is not written to. */
    t.x.f.env.lock = lock_no_file;
    CHECK_INT(gd_appender_open(t.repo, &gd_global_scope, NULL, &appender,
                               &t.x.err), GD_IO);
    CHECK_INT(env->lock(env, raw, GD_BYTE_LESSEE, F_WRLCK), 0);
    close(raw);
}

static gd_locks *successor;

/* The server drops the lease before the file is locked, and grants it
 * again. */
static int
lock_too_late(const gd_env *env, int fd, uint64_t byte, short type)
{
    (void)env;
    if (byte == GD_BYTE_LESSEE && type == F_RDLCK && successor != NULL) {
        gd_locks *locks = successor;
        successor = NULL;
        scratch_drop_locks();
        CHECK_INT(gd_locks_lease(locks, 1, NULL), GD_OK);
    }
    return gd_env_posix()->lock(gd_env_posix(), fd, byte, type);
}

TEST(test_lease_is_lost_before_the_file_is_locked)
{
    for (int direct = 0; direct < 2; direct++) {
        appender_fixture t;
        gd_locks *other;
        appender_setup(&t);
        t.repo->params.direct_io = direct ? GD_DIRECT_ON : GD_DIRECT_OFF;
        close_appender(&t, open_appender(&t));
        CHECK_INT(gd_locks_open(t.x.env, t.x.root, &other, &t.x.err), GD_OK);
        successor = other;
        t.x.f.env.lock = lock_too_late;
        gd_appender *appender = open_appender(&t);
        CHECK(successor == NULL);
        CHECK_INT(gd_appender_group(appender)->number, 2);
        close_appender(&t, appender);
        gd_locks_close(other);
        appender_teardown(&t);
    }
}

TEST_WITH(test_close_cuts_what_is_not_synced, appender_setup(&t),
          appender_teardown(&t))
{
    CHECK_INT(store_segments(&t, 2), 1);
    int64_t size = scratch_size(&t.x, GROUP_1);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(append_segment(&t, appender, 8), GD_OK);
    CHECK(scratch_size(&t.x, GROUP_1) > size);
    close_appender(&t, appender);
    CHECK_INT(scratch_size(&t.x, GROUP_1), size);
    /* Slots that were never published are used again. */
    CHECK_INT(store_segments(&t, 1), 1);
    check_live_slots(&t, 1, 0, 15);
    /* This also holds after an append that failed, even if it wrote some
     * bytes. */
    appender = open_appender(&t);
    size = scratch_size(&t.x, GROUP_1);
    fault_env_shorten(&t.x.f, 700);
    fault_env_fail(&t.x.f, FAULT_PWRITEV, 2, ENOSPC, true);
    CHECK_INT(append_segment(&t, appender, 8), GD_NOSPACE);
    CHECK(scratch_size(&t.x, GROUP_1) > size);
    fault_env_heal(&t.x.f);
    close_appender(&t, appender);
    CHECK_INT(scratch_size(&t.x, GROUP_1), size);
    CHECK_INT(store_segments(&t, 1), 1);
    check_live_slots(&t, 1, 0, 20);
}

/* ---- failed sync points ---- */

TEST_WITH(test_failed_fdatasync_poisons, appender_setup(&t),
          appender_teardown(&t))
{
    bool cold;
    gd_fptable *store_now;
    CHECK_INT(store_segments(&t, 1), 1);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(append_segment(&t, appender, 5), GD_OK);
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FDATASYNC);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 1, EIO, false);
    CHECK_INT(sync_appender(&t, appender), GD_IO);
    CHECK_CONTAINS(t.x.err.text, "fdatasync " GROUP_1);
    close_appender(&t, appender);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FDATASYNC), syncs + 1);
    check_poisoned(&t, 5);
    /* No look-up finds its blocks, here or elsewhere; earlier blocks are
     * found. */
    for (int handle = 0; handle < 2; handle++) {
        CHECK_INT(hints_for(&t, 1, 4), 1);
        CHECK_INT(hints_for(&t, 1, 5), 0);
        CHECK_INT(gd_locks_lock_shared(t.repo->locks, 1, NULL), GD_OK);
        REQUIRE(gd_fpcache_store(t.repo->cache, 1, &store_now, &cold,
                                 &t.x.err) == GD_OK);
        CHECK_INT(store_now->count, 5);
        gd_fpcache_return_store(t.repo->cache, store_now);
        gd_locks_unlock_shared(t.repo->locks, 1);
        appender_other_handle(&t);
    }
    check_left_alone(&t);
    check_poisoned(&t, 5);
}

static gd_status
fill(appender_fixture *t, gd_appender *appender, int failing_sync,
     uint64_t *syncs)
{
    while (gd_appender_room(appender) > 0) {
        CHECK_INT(append_segment(t, appender, 8), GD_OK);
    }
    *syncs = fault_env_count(&t->x.f, FAULT_FDATASYNC);
    if (failing_sync > 0) {
        fault_env_fail(&t->x.f, FAULT_FDATASYNC, (uint64_t)failing_sync, EIO,
                       false);
    }
    gd_status s = sync_appender(t, appender);
    *syncs = fault_env_count(&t->x.f, FAULT_FDATASYNC) - *syncs;
    return s;
}

/* Otherwise a crash of the machine leaves as many tails to be renewed as
 * groups were filled before it (I8). */
TEST_WITH(test_record_of_a_full_group_is_synced, appender_setup(&t),
          appender_teardown(&t))
{
    uint64_t syncs;
    gd_appender *appender = open_appender(&t);
    CHECK_INT(fill(&t, appender, 0, &syncs), GD_OK);
    CHECK_INT(syncs, 2);
    CHECK_INT(read_group_contents(&t, 1).published.count, 64);
    close_appender(&t, appender);
    /* An error of this sync fails the sync point, though all data is there. */
    appender = open_appender(&t);
    CHECK_INT(appender_number(appender), 2);
    CHECK_INT(fill(&t, appender, 2, &syncs), GD_IO);
    CHECK_INT(syncs, 2);
    group_contents c = read_group_contents(&t, 2);
    CHECK_INT(c.published.flags, GD_GROUP_POISONED);
    CHECK_INT(c.published.count, 64);
    close_appender(&t, appender);
}

/* The mark could not be written either: then there is a tail like others. */
TEST_WITH(test_poison_that_is_lost, appender_setup(&t), appender_teardown(&t))
{
    CHECK_INT(store_segments(&t, 1), 1);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(append_segment(&t, appender, 5), GD_OK);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 1, EIO, false);
    fault_env_fail(&t.x.f, FAULT_PWRITEV, 2, EIO, false);
    CHECK_INT(sync_appender(&t, appender), GD_IO);
    close_appender(&t, appender);
    CHECK_INT(read_group_contents(&t, 1).published.flags, 0);
    CHECK_INT(store_segments(&t, 1), 2); /* this handle knows it */
    appender_other_handle(&t);
    uint64_t writes = fault_env_count(&t.x.f, FAULT_PWRITEV);
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FDATASYNC);
    appender = open_appender(&t);
    CHECK(appender_number(appender) <= 2); /* both have 5 slots */
    if (appender_number(appender) == 1) {
        CHECK_INT(fault_env_count(&t.x.f, FAULT_PWRITEV), writes + 3);
        CHECK_INT(fault_env_count(&t.x.f, FAULT_FDATASYNC), syncs + 1);
        CHECK_INT(read_group_contents(&t, 1).published.count, 10);
    }
    check_live_slots(&t, 1, 0, 10);
    close_appender(&t, appender);
}

/* The entries could be written in part only, or the record not: the slots of
 * entries that are on the disk are used up. */
TEST(test_other_failures_of_a_sync_point)
{
    for (uint64_t n = 1; n <= 4; n++) {
        appender_fixture t;
        appender_setup(&t);
        CHECK_INT(store_segments(&t, 1), 1);
        gd_appender *appender = open_appender(&t);
        CHECK_INT(append_segment(&t, appender, 8), GD_OK);
        CHECK_INT(append_segment(&t, appender, 8), GD_OK);
        fault_env_shorten(&t.x.f, 300);
        fault_env_fail(&t.x.f, FAULT_PWRITEV, n, EIO, true);
        CHECK_INT(sync_appender(&t, appender), GD_IO);
        fault_env_heal(&t.x.f);
        close_appender(&t, appender);
        CHECK_INT(read_group_contents(&t, 1).published.count, 5);
        group_contents before = read_group_contents(&t, 1);
        appender_other_handle(&t);
        CHECK_INT(store_segments(&t, 1), 1);
        group_contents after = read_group_contents(&t, 1);
        uint32_t used = 0;
        for (uint32_t slot = 0; slot < 64; slot++) {
            const gd_entry *entry = &before.entries[slot];
            if (entry->state == GD_ENTRY_LIVE) {
                CHECK(memcmp(entry, &after.entries[slot], sizeof *entry) == 0);
            }
            used += entry->state != GD_ENTRY_EMPTY;
        }
        CHECK_INT(after.published.count, used + 5);
        CHECK(n == 1 ? used == 5 : used > 5);
        appender_teardown(&t);
    }
}
