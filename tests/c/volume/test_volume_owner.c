/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_volume_owner.c - owners that were cut off, because the server dropped
 * their locks: they take no more writes, and change nothing of the next owner
 * (volumes.rst, V1).
 */
#include "engine/volume/volume.h"

#include "tests/c/support/volume_fixture.h"

static gd_status written_in_lock;

static int
write_in_lock(const gd_env *env, int fd, uint64_t byte, short type)
{
    if (type != F_WRLCK) {
        return fault_table.lock(env, fd, byte, type);
    }
    FAULTS->env.lock = fault_table.lock;
    written_in_lock = model_write(0, 1);
    return -EAGAIN; /* another process has it */
}

/* While it waited for space, the owner has lost its locks: it accepts no write
 * before it knows that it has them (V1). */
TEST(test_owner_before_writes)
{
    begin_on_full_disk();
    empty_disk();
    FAULTS->env.lock = write_in_lock;
    gd_volume_info info;
    alarm(60); /* if the write waits for the lock's caller */
    CHECK_INT(model_flush(), GD_BUSY);
    alarm(0);
    CHECK_INT(written_in_lock, GD_NOSPACE);
    gd_volume_get_info(the_volume, &info);
    CHECK(info.is_read_only); /* no client is to write */
    FAULTS->env.lock = fault_table.lock;
    CHECK_INT(model_write(0, 1), GD_BUSY);
    CHECK_CONTAINS(model_words(), "disk takes no more writes");
    model_compare();
    model_kill();
    finish_volume();
}

static uint64_t locks_left; /* until another process has the volume */
static unsigned cut_off; /* owners that found out */

static int
lose_at_lock(const gd_env *env, int fd, uint64_t byte, short type)
{
    if (type != F_WRLCK || (locks_left > 0 && --locks_left > 0)) {
        return fault_table.lock(env, fd, byte, type);
    }
    scratch_write(&the_scratch, "volumes/disk/journal-ffffffff", "", 1, 0);
    return -EAGAIN;
}

/* Returns the result of a checkpoint in which the owner is cut off at its nth
 * lock. */
static gd_status
lose_in_checkpoint(uint64_t nth, gd_error *err, bool *met)
{
    gd_volume_info info;
    begin_volume(false);
    FAULTS->env.lock = lose_at_lock;
    locks_left = nth;
    gd_status s = gd_volume_checkpoint(the_volume, err);
    FAULTS->env.lock = fault_table.lock;
    gd_volume_get_info(the_volume, &info);
    cut_off += strstr(info.broken, "cut off") != NULL;
    *met = locks_left == 0;
    model_kill();
    (void)unlinkat(the_scratch.root, "volumes/disk/journal-ffffffff", 0);
    model_teardown();
    return s;
}

/* An owner that was cut off takes no more writes, and says why, also if its
 * checkpoint was for a caller that wants no words (V1). */
TEST(test_cut_off_in_a_checkpoint)
{
    bool met = true;
    cut_off = 0;
    for (uint64_t nth = 1; met; nth++) {
        gd_status s = lose_in_checkpoint(nth, &the_scratch.err, &met);
        CHECK_INT(lose_in_checkpoint(nth, NULL, &met), s);
    }
    /* At the new journal, before anything is stored, before the commit, and
     * behind the marks. */
    CHECK_INT(cut_off, 2 * 4);
}

static int other_lock;

/* Meanwhile the server drops the locks, and another owner begins a journal. */
static ssize_t
other_in_read(const gd_env *env, int fd, void *buf, size_t len,
              uint64_t offset)
{
    FAULTS->env.pread = fault_table.pread;
    scratch_drop_locks();
    other_lock = openat(the_scratch.root, "volumes/disk/lock",
                        O_RDWR | O_CLOEXEC);
    CHECK_INT(fault_table.lock(env, other_lock, 0, F_WRLCK), 0);
    scratch_write(&the_scratch, "volumes/disk/journal.new-other", "", 1, 0);
    return fault_table.pread(env, fd, buf, len, offset);
}

/* An owner that was cut off while it read the journals removes no file of the
 * next owner (V2). */
TEST(test_file_of_the_next_owner)
{
    begin_volume(false);
    model_kill();
    FAULTS->env.pread = other_in_read;
    CHECK_INT(model_open(), GD_BUSY);
    CHECK(scratch_exists(&the_scratch, "volumes/disk/journal.new-other"));
    close(other_lock);
    finish_volume();
}

/* ---- the next owner has begun ---- */

/* The former owner, and its repository. The model has the next one. */
static gd_volume *former;
static gd_repo *former_repo;

/* The server drops the locks of the owner, and another one begins. It stores
 * what it has flushed, and goes on. */
static void
replace_owner(uint64_t written)
{
    former = the_volume;
    former_repo = the_repo;
    scratch_drop_locks();
    the_repo = scratch_repo_filter(&the_scratch);
    CHECK_OK(model_open());
    model_compare();
    if (written > 0) {
        CHECK_OK(model_write(0, written));
        CHECK_OK(model_flush());
    }
    CHECK_OK(model_checkpoint());
    CHECK_OK(model_write(P, 9));
    CHECK_OK(model_flush());
}

/* The former owner has ended. */
static void
end_former(void)
{
    gd_repo *repo = the_repo;
    gd_volume *volume = the_volume;
    the_volume = former;
    the_repo = former_repo;
    model_end();
    the_volume = volume;
    the_repo = repo;
}

/* An owner waits for space. No record that it found is proven durable, so its
 * successor copies all, and has new ones in its first editions. */
static void
begin_to_wait(void)
{
    model_setup(0);
    model_start_shadow();
    CHECK_OK(model_create(4 * P + 3));
    CHECK_OK(model_open());
    CHECK_OK(model_write(0, 2 * P));
    CHECK_OK(model_checkpoint());
    for (int i = 0; i < 8; i++) {
        CHECK_OK(model_write(0, P));
    }
    CHECK_OK(model_write(P, 9));
    model_kill();
    fill_disk(0);
    CHECK_OK(model_open());
    CHECK_INT(scratch_count(&the_scratch, "images", "v_", NULL), 2);
    model_compare(); /* opens its recipes */
}

static void
end_both(void)
{
    gd_volume_renew(the_volume);
    model_compare();
    end_former();
    finish_volume();
}

/* The disk has room for editions then. */
TEST(test_successor_of_an_owner_that_waits)
{
    begin_to_wait();
    replace_owner(2 * P);
    disk_room = ROOM_FOR_A_PART;
    CHECK_INT(gd_volume_checkpoint(former, &the_scratch.err), GD_BUSY);
    CHECK_INT(gd_volume_final_checkpoint(former, &the_scratch.err), GD_BUSY);
    CHECK_INT(gd_volume_write(former, (const uint8_t *)"", 1, 0,
                              &the_scratch.err), GD_BUSY);
    CHECK_CONTAINS(model_words(), "takes no more writes");
    empty_disk();
    end_both();
}

static unsigned held; /* locks that the owner gets before another one has it */

static int
lose_lock(const gd_env *env, int fd, uint64_t byte, short type)
{
    if (type == F_WRLCK && byte == 0 && held-- == 0) {
        held = 0;
        return -EAGAIN; /* another process has it */
    }
    return fault_table.lock(env, fd, byte, type);
}

/* It is cut off while it opens the volume: the opening fails, so nobody goes on
 * with the volume, as a roll-back would. */
TEST(test_successor_of_an_owner_that_opens)
{
    begin_volume(false);
    model_kill();
    fill_disk(0);
    FAULTS->env.lock = lose_lock;
    held = 2; /* the lock itself, and before it removes new files */
    CHECK_INT(model_open(), GD_BUSY);
    FAULTS->env.lock = fault_table.lock;
    empty_disk();
    finish_volume();
}

/* It knows already that it was cut off. */
TEST(test_successor_of_an_owner_that_knows)
{
    begin_to_wait();
    empty_disk();
    FAULTS->env.lock = write_in_lock;
    CHECK_INT(model_flush(), GD_BUSY);
    FAULTS->env.lock = fault_table.lock;
    uint64_t opens = fault_env_count(FAULTS, FAULT_OPENAT);
    CHECK_INT(model_checkpoint(), GD_BUSY);
    CHECK_INT(fault_env_count(FAULTS, FAULT_OPENAT), opens);
    replace_owner(2 * P);
    CHECK_INT(gd_volume_checkpoint(former, &the_scratch.err), GD_BUSY);
    CHECK_INT(gd_volume_final_checkpoint(former, &the_scratch.err), GD_BUSY);
    end_both();
}

/* A checkpoint fails after some editions; what is written then is in the first
 * editions of the successor. */
static void
fail_checkpoint(uint64_t nth)
{
    begin_volume(false);
    fault_env_fail(FAULTS, FAULT_LINKAT, nth, EIO, true);
    CHECK_INT(model_checkpoint(), GD_IO);
    fault_env_heal(FAULTS);
    CHECK_OK(model_write(0, P + 50));
    CHECK_OK(model_flush());
    CHECK_OK(model_write(4 * P, 1));
    model_compare(); /* opens its recipes */
}

/* The checkpoint is tried again. */
TEST(test_successor_after_a_failed_checkpoint)
{
    for (uint64_t nth = 2; nth <= 4; nth++) {
        fail_checkpoint(nth);
        replace_owner(0);
        CHECK_INT(gd_volume_checkpoint(former, &the_scratch.err), GD_BUSY);
        end_both();
    }
}

static unsigned lists; /* of the journals, until the owner is replaced */

static int
replace_in_list(const gd_env *env, int dir, const char *path,
                void (*visit)(void *arg, const char *name), void *arg)
{
    int rc = fault_table.list(env, dir, path, visit, arg);
    if (strcmp(path, "volumes/disk") == 0 && --lists == 0) {
        FAULTS->env.list = fault_table.list;
        replace_owner(0);
    }
    return rc;
}

/* Whenever it has just found out that it is the owner still, it is replaced. It
 * puts no edition in the place of its successor's. If it has deleted one, that
 * is noticed (V7), as is that it wrote to a group that is no longer its own. */
TEST(test_successor_amid_a_checkpoint)
{
    unsigned missing = 0, replaced = 0;
    for (lists = 0; lists == 0; replaced++) {
        static uint8_t got[MODEL_SECTORS * 512];
        fail_checkpoint(4);
        lists = replaced + 1;
        FAULTS->env.list = replace_in_list;
        gd_status s = model_checkpoint();
        FAULTS->env.list = fault_table.list;
        if (lists > 0) {
            CHECK_OK(s);
            finish_volume();
            continue;
        }
        gd_volume_close(the_volume);
        CHECK_OK(gd_volume_open(the_repo, "disk", true, &the_volume,
                                &the_scratch.err));
        if (gd_volume_read(the_volume, got, model_sectors() * 512, 0,
                           &the_scratch.err) == GD_CORRUPT) {
            missing++;
            end_former();
            model_delete();
            model_teardown();
        } else {
            end_both();
        }
    }
    CHECK(missing < replaced / 2);
}
