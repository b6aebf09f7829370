/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ownedgroup.c - a group that the maintainer locks for itself: processes
 * that are kept out, removal, and each call that fails once.
 */
#include "engine/maintenance/ownedgroup.h"

#include "tests/c/support/check.h"
#include "tests/c/support/owned_fixture.h"

static owned_fixture t;

/* ---- entering ---- */

TEST_WITH(test_entering, owned_setup(&t), owned_teardown(&t))
{
    gd_locks *other;
    CHECK_INT(gd_locks_open(t.x.env, t.x.root, &other, &t.x.err), GD_OK);
    CHECK_INT(gd_locks_lease(other, 1, NULL), GD_OK);
    CHECK_INT(owned_enter(&t, 1), GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, "00000001 is being appended to");
    gd_locks_unlease(other, 1);
    CHECK_INT(gd_locks_lock_shared(other, 1, NULL), GD_OK);
    CHECK_INT(owned_enter(&t, 1), GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, "names blocks of group 00000001");
    CHECK_INT(gd_locks_lease(other, 1, NULL), GD_OK); /* it was released */
    gd_locks_unlease(other, 1);
    gd_locks_unlock_shared(other, 1);
    CHECK_INT(gd_locks_lock_shared(t.repo->locks, 1, NULL), GD_OK);
    CHECK_INT(owned_enter(&t, 1), GD_BUSY); /* a transaction of our own */
    gd_locks_unlock_shared(t.repo->locks, 1);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    CHECK_INT(gd_locks_lease(other, 1, NULL), GD_BUSY);
    CHECK_INT(gd_locks_lock_shared(other, 1, NULL), GD_BUSY);
    CHECK_INT(gd_locks_lock_shared(t.repo->locks, 1, NULL), GD_BUSY);
    const gd_env *env = gd_env_posix();
    int raw = openat(t.x.root, GROUP_1, O_RDWR | O_CLOEXEC);
    CHECK_INT(env->is_locked(env, raw, GD_BYTE_LESSEE), 1);
    CHECK(is_image(&t, "one", t.one, LENGTH)); /* readers can read on */
    gd_owned_group_close(t.owned);
    CHECK_INT(env->is_locked(env, raw, GD_BYTE_LESSEE), 0);
    close(raw);
    CHECK_INT(gd_locks_lock_shared(other, 1, NULL), GD_OK);
    CHECK_INT(gd_locks_lease(other, 1, NULL), GD_OK);
    CHECK_INT(owned_enter(&t, 77), GD_NOTFOUND);
    CHECK_INT(gd_locks_lease(other, 77, NULL), GD_OK);
    CHECK_INT(gd_locks_lock_exclusive(other, 77, NULL), GD_OK);
    gd_locks_close(other);
}

/* A group that was just made may still be open in a process that found it in
 * the spool, and has its writer's byte. */
TEST_WITH(test_who_looks_through_the_spool_keeps_nobody_out, owned_setup(&t),
          owned_teardown(&t))
{
    const gd_env *env = gd_env_posix();
    int raw = openat(t.x.root, GROUP_1, O_RDWR | O_CLOEXEC);
    CHECK_INT(env->lock(env, raw, GD_BYTE_WRITER, F_WRLCK), 0);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    gd_owned_group_close(t.owned);
    close(raw);
}

static int replaced_root; /* of the group that is to be replaced; -1: none */

static int
replace_and_lock(const gd_env *env, int fd, uint64_t byte, short type)
{
    (void)env;
    if (replaced_root >= 0 && type == F_WRLCK && byte > UINT32_MAX) {
        CHECK_INT(renameat(replaced_root, "spool/copy", replaced_root, GROUP_1),
                  0);
        replaced_root = -1;
    }
    return gd_env_posix()->lock(gd_env_posix(), fd, byte, type);
}

static uint64_t unlocked[2];
static size_t unlocks;

static int
note_unlock(const gd_env *env, int fd, uint64_t byte, short type)
{
    if (type == F_UNLCK && unlocks < 2) {
        unlocked[unlocks++] = byte;
    }
    return fault_table.lock(env, fd, byte, type);
}

/* The lease is released last: its next holder may take the exclusive lock at
 * once, and in one process both would be the same lock. */
TEST_WITH(test_leaving, owned_setup(&t), owned_teardown(&t))
{
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    t.x.f.env.lock = note_unlock;
    unlocks = 0;
    gd_owned_group_close(t.owned);
    t.x.f.env.lock = fault_table.lock;
    CHECK_INT(unlocks, 2);
    CHECK_INT(unlocked[0], (UINT64_C(1) << 32) + 1);
    CHECK_INT(unlocked[1], 1);
}

/* Data that was read before the locks were held may be of a replaced file, and
 * later published entries would be lost (I4). */
TEST_WITH(test_replaced_before_the_lock, owned_setup(&t), owned_teardown(&t))
{
    struct stat st;
    int fd = openat(t.x.root, "spool/copy", O_WRONLY | O_CREAT, 0600);
    REQUIRE(fd >= 0 &&
            pwrite(fd, t.before, t.size, 0) == (ssize_t)t.size);
    close(fd);
    replaced_root = t.x.root;
    t.x.f.env.lock = replace_and_lock;
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    CHECK_INT(replaced_root, -1);
    CHECK_INT(fstatat(t.x.root, GROUP_1, &st, 0), 0);
    CHECK_INT(t.owned->leased->group->inode, st.st_ino);
    gd_owned_group_close(t.owned);
}

/* Every call of it fails once: no lock and no file stays open. */
TEST_WITH(test_entering_fails, owned_setup(&t), owned_teardown(&t))
{
    for (int kind = 0; kind < 2; kind++) {
        fault_call call = kind == 0 ? FAULT_ANY : FAULT_ALLOC;
        for (uint64_t n = 1;; n++) {
            uint64_t faults = fault_env_faults(&t.x.f);
            fault_env_fail(&t.x.f, call, n, EIO, false);
            gd_status s = owned_enter(&t, 1);
            bool hit = fault_env_faults(&t.x.f) > faults;
            fault_env_heal(&t.x.f);
            if (s == GD_OK) {
                gd_owned_group_close(t.owned);
            }
            CHECK_INT(owned_enter(&t, 1), GD_OK);
            gd_owned_group_close(t.owned);
            if (!hit) {
                CHECK_INT(s, GD_OK);
                break;
            }
        }
    }
}

/* ---- removal ---- */

static bool
unlink_group(owned_fixture *t)
{
    bool removed;
    CHECK_INT(gd_owned_group_unlink(t->owned, &removed, &t->x.err), GD_OK);
    return removed;
}

TEST_WITH(test_unlink, owned_setup(&t), owned_teardown(&t))
{
    static const uint32_t slot = 0;
    gd_quarantine_name *names;
    size_t count;
    uint64_t bytes;
    CHECK(is_image(&t, "one", t.one, LENGTH));
    int64_t open = t.x.f.descriptors;
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    CHECK(!unlink_group(&t));
    require_freed(&t, 1, 63);
    CHECK(!unlink_group(&t)); /* one slot is live */
    CHECK_INT(gd_owned_group_mark_damaged(t.owned, &slot, 1, &names, &count,
                                          &t.x.err), GD_OK);
    t.x.env->release(t.x.env, names);
    CHECK(!unlink_group(&t)); /* damaged */
    require_freed(&t, 0, 1);
    fault_env_start_trace(&t.x.f);
    CHECK(unlink_group(&t));
    /* Other processes may have it open: so its space is given back besides. */
    scratch_check_trace(&t.x, "unlinkat fsync punch");
    CHECK(!scratch_exists(&t.x, GROUP_1));
    CHECK_INT(gd_owned_group_punch(t.owned, &bytes, &t.x.err), GD_CLOSED);
    gd_owned_group_close(t.owned);
    CHECK_INT(t.x.f.descriptors, open - 1); /* this handle's, too */
    CHECK_INT(owned_enter(&t, 1), GD_NOTFOUND);
    /* The group with the highest number stays, even if it is empty. */
    CHECK_INT(owned_enter(&t, 2), GD_OK);
    require_freed(&t, 0, 32);
    CHECK(!unlink_group(&t));
    gd_owned_group_close(t.owned);
    CHECK(scratch_exists(&t.x, "groups/00000002"));
    /* Storing works, though this handle had the group open, and full. */
    CHECK_INT(put_image(t.repo, "again", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK(is_image(&t, "again", t.one, LENGTH));
    CHECK(!scratch_exists(&t.x, GROUP_1));
}

/* The name may be removed late, when a writer has leased the group (I4). */
TEST_WITH(test_unlink_keeps_writers_out, owned_setup(&t), owned_teardown(&t))
{
    gd_published record;
    bool removed;
    set_record(&t, 63, segment_offset(4));
    static const uint8_t empty[GD_ENTRY_SIZE];
    scratch_write(&t.x, GROUP_1, empty, sizeof empty, gd_entry_offset(63));
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    require_freed(&t, 0, 63);
    fault_env_fail(&t.x.f, FAULT_UNLINKAT, 1, EIO, false);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(gd_owned_group_unlink(t.owned, &removed, &t.x.err), GD_IO);
    scratch_check_trace(&t.x, "fdatasync pwritev fdatasync");
    CHECK_INT(gd_group_read_published(t.owned->leased->group, &record,
                                      &t.x.err), GD_OK);
    CHECK((record.flags & GD_GROUP_POISONED) != 0);
    CHECK(unlink_group(&t)); /* there is no second mark */
    gd_owned_group_close(t.owned);
}

TEST_WITH(test_unlink_is_refused, owned_setup(&t), owned_teardown(&t))
{
    bool removed;
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    require_freed(&t, 0, 63);
    gd_owned_group_close(t.owned);
    set_record(&t, 63, segment_offset(4)); /* a crash took the last one back */
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    CHECK(!unlink_group(&t));
    require_freed(&t, 63, 1);
    gd_owned_group_close(t.owned);
    scratch_flip(&t.x, GROUP_1, gd_entry_offset(9) + 3, 1);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    CHECK(!unlink_group(&t)); /* its block is unknown */
    require_freed(&t, 9, 1);
    fault_env_fail(&t.x.f, FAULT_UNLINKAT, 1, EIO, false);
    CHECK_INT(gd_owned_group_unlink(t.owned, &removed, &t.x.err), GD_IO);
    CHECK(!removed && scratch_exists(&t.x, GROUP_1));
    fault_env_fail(&t.x.f, FAULT_FSYNC, 1, EIO, false);
    CHECK_INT(gd_owned_group_unlink(t.owned, &removed, &t.x.err), GD_IO);
    CHECK(removed);
    gd_owned_group_close(t.owned);
}

static scratch *racing;

/* After the listing others make three groups, and remove all but the last. */
static int
list_and_overtake(const gd_env *env, int dir, const char *path,
                  void (*visit)(void *, const char *), void *arg)
{
    int rc = fault_table.list(env, dir, path, visit, arg);
    if (racing != NULL) {
        scratch_write(racing, "groups/00000005", "x", 1, 0);
        racing = NULL;
    }
    return rc;
}

/* A number is never used again, even by a process that was slow to take it. */
TEST_WITH(test_numbers_are_not_used_again, owned_setup(&t), owned_teardown(&t))
{
    uint32_t number;
    t.x.f.env.list = list_and_overtake;
    racing = &t.x;
    CHECK_INT(gd_group_create(t.x.env, t.x.root, &t.x.params, &gd_global_scope,
                              t.repo->locks, &number, &t.x.err), GD_OK);
    CHECK_INT(number, 6);
    CHECK(!scratch_exists(&t.x, "groups/00000003"));
    gd_locks *other;
    CHECK_INT(gd_locks_open(t.x.env, t.x.root, &other, &t.x.err), GD_OK);
    CHECK_INT(gd_locks_lease(other, 3, NULL), GD_OK);
    CHECK_INT(gd_locks_lease(other, 6, NULL), GD_BUSY);
    gd_locks_close(other);
    gd_locks_unlease(t.repo->locks, 6);
}

/* ---- every call fails once ---- */

/* Collects group 1 while half of its image is still named. */
static gd_status
collect(owned_fixture *t)
{
    uint32_t freed;
    uint64_t bytes;
    bool removed;
    gd_status s = owned_enter(t, 1);
    if (s != GD_OK) {
        return s;
    }
    s = free_slots(t, 0, SLOTS / 2, &freed);
    if (s == GD_OK) {
        s = gd_owned_group_punch(t->owned, &bytes, &t->x.err);
    }
    if (s == GD_OK) {
        s = gd_owned_group_unlink(t->owned, &removed, &t->x.err);
    }
    gd_owned_group_close(t->owned);
    return s;
}

static bool
fail_one(fault_call call, uint64_t n)
{
    owned_fixture t;
    owned_setup(&t);
    const uint8_t *half = t.one + LENGTH / 2;
    CHECK_INT(put_image(t.repo, "half", half, LENGTH / 2, LENGTH,
                        NULL, &t.x.err), GD_OK);
    uint64_t faults = fault_env_faults(&t.x.f);
    fault_env_fail(&t.x.f, call, n, EIO, false);
    gd_status s = collect(&t);
    bool hit = fault_env_faults(&t.x.f) > faults;
    fault_env_heal(&t.x.f);
    CHECK(is_image(&t, "half", half, LENGTH / 2));
    CHECK_INT(collect(&t), GD_OK);
    CHECK_INT(count_state(&t, GD_ENTRY_FREED), SLOTS / 2);
    CHECK(is_image(&t, "half", half, LENGTH / 2));
    CHECK_INT(put_image(t.repo, "again", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK(is_image(&t, "again", t.one, LENGTH));
    owned_teardown(&t);
    CHECK(hit || s == GD_OK);
    return hit;
}

TEST(test_faults)
{
    sweep_faults(fail_one, SWEEP_STRIDE);
}
