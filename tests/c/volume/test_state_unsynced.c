/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_state_unsynced.c - journals that are frozen without a sync: they never
 * reach the disk if they are stored first, and if the machine crashes before,
 * the last writes are lost in their order (volumes.rst, V11).
 */
#include "engine/volume/volume.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "engine/format/volumerecord.h"
#include "tests/c/support/volume_fixture.h"

enum {
    SIZE = 6 * P,
    LITTLE = 1 << 20, /* bytes that are synced rather than avoided */
    MANY = 1 + LITTLE / (P * 512), /* writes of a part, with more */
};

/* ---- a volume ---- */

static void
begin(void)
{
    model_setup(0);
    model_start_shadow();
    CHECK_OK(model_create(SIZE));
    CHECK_OK(model_open());
    CHECK_OK(model_write(0, 9));
    CHECK_OK(model_checkpoint());
}

static void
finish(void)
{
    model_close();
    CHECK_OK(model_open());
    model_compare();
    CHECK_OK(model_write(3, 2 * P));
    CHECK_OK(model_checkpoint());
    model_close();
    CHECK_OK(model_open());
    model_compare();
    CHECK_OK(model_checkpoint());
    model_check_nothing_left();
    model_delete();
    model_teardown();
}

static void
read_sectors(uint64_t first, uint64_t count, uint8_t *out)
{
    CHECK_OK(gd_volume_read(the_volume, out, count * 512, first * 512,
                            &the_scratch.err));
}

static bool
is_zero(uint64_t first, uint64_t count)
{
    static uint8_t got[SIZE * 512];
    bool zero = true;
    read_sectors(first, count, got);
    for (uint64_t i = 0; i < count * 512; i++) {
        zero = zero && got[i] == 0;
    }
    return zero;
}

/* Writes more than is synced rather than avoided. */
static void
write_much(uint64_t first)
{
    for (unsigned i = 0; i < MANY; i++) {
        CHECK_OK(model_write(first, P));
    }
}

/* ---- syncs of one file ---- */

static struct {
    ino_t inode;
    unsigned count;
    ino_t last; /* of all files */
} watched;

static int
watching_fdatasync(const gd_env *env, int fd)
{
    struct stat st;
    watched.count += fstat(fd, &st) == 0 && st.st_ino == watched.inode;
    watched.last = st.st_ino;
    return fault_table.fdatasync(env, fd);
}

/* Counts the syncs of the active journal's file from now on. */
static void
watch_active(void)
{
    watched.inode = journal_inode();
    watched.count = 0;
    FAULTS->env.fdatasync = watching_fdatasync;
}

/* ---- what happens during a checkpoint ---- */

static void (*amid)(void);

static int
linkat_amid(const gd_env *env, int dir, const char *from, const char *to)
{
    if (amid != NULL && strncmp(to, "images/", 7) == 0) {
        void (*work)(void) = amid;
        amid = NULL;
        work();
    }
    return fault_table.linkat(env, dir, from, to);
}

/* A checkpoint, and work when its editions are about to get their names. */
static void
checkpoint_with(void (*work)(void))
{
    FAULTS->env.linkat = linkat_amid;
    amid = work;
    CHECK_OK(model_checkpoint());
    CHECK(amid == NULL);
    FAULTS->env.linkat = fault_table.linkat;
}

/* A checkpoint that fails leaves a frozen journal.  The first link is the next
 * journal's. */
static void
fail_checkpoint(void)
{
    fault_env_fail(FAULTS, FAULT_LINKAT, 2, EIO, true);
    CHECK(model_checkpoint() != GD_OK);
    fault_env_heal(FAULTS);
    CHECK_INT(count_journals(), 2);
}

/* ---- syncs ---- */

static void
write_a_little(void)
{
    CHECK_OK(model_write(5 * P, 7));
}

static void
write_and_flush(void)
{
    CHECK_OK(model_write(5 * P, 7));
    CHECK_OK(model_flush());
}

static void
write_amid(void)
{
    write_much(5 * P);
}

/* A journal that is stored before anyone flushes is never synced.  One flush
 * syncs it, and a second one need not. */
TEST(test_frozen_journal_is_not_synced)
{
    void (*const works[])(void) = {write_a_little, write_and_flush, write_amid};
    for (unsigned i = 0; i < 3; i++) {
        begin();
        write_much(P);
        watch_active();
        checkpoint_with(works[i]);
        CHECK_INT(watched.count, i == 1);
        CHECK_INT(count_spares(), i == 1); /* V10 */
        model_compare();
        finish();
    }
    begin();
    CHECK_OK(model_write(P, P));
    watch_active();
    fail_checkpoint();
    CHECK_OK(model_write(P, 9));
    CHECK_OK(model_flush());
    CHECK(watched.last != watched.inode); /* but the active one's */
    CHECK_OK(model_write(P, 9));
    CHECK_OK(model_flush());
    CHECK_INT(watched.count, 1);
    CHECK_OK(model_checkpoint());
    finish();
}

/* Writes during a checkpoint are not synced for its marks, if they are many:
 * the next checkpoint begins with them. */
TEST(test_marks_in_the_next_head)
{
    gd_volume_head head;
    static uint8_t before[P * 512], after[P * 512];
    for (unsigned crash = 0; crash < 3; crash++) {
        begin();
        CHECK_OK(model_write(P, P));
        read_sectors(P, P, before);
        fail_checkpoint();
        write_much(3 * P);
        watch_active();
        CHECK_OK(model_checkpoint()); /* stores both */
        CHECK_INT(watched.count, 0);
        CHECK_INT(count_journals(), 1);
        CHECK(!gd_volume_needs_checkpoint(the_volume));
        CHECK_OK(model_write(P, P));
        read_sectors(P, P, before);
        checkpoint_with(write_amid);
        CHECK_INT(count_journals(), 2);
        CHECK(gd_volume_needs_checkpoint(the_volume));
        CHECK_OK(gd_volume_read_head(the_repo, "disk", &head,
                                     &the_scratch.err));
        CHECK_INT(head.needed, head.journal - 1);
        CHECK_INT(head.before_durable, 4096 + 4096);
        CHECK(head.before > LITTLE);
        CHECK_INT(head.marks, 3);
        model_compare();
        if (crash == 1) {
            model_crash();
            CHECK_OK(model_open());
            CHECK_INT(count_journals(), 1);
        } else if (crash == 2) {
            CHECK_OK(model_flush());
            model_crash();
            CHECK_OK(model_open());
        }
        read_sectors(P, P, after);
        CHECK(memcmp(before, after, sizeof after) == 0);
        finish();
    }
}

static void
fill_disk_amid(void)
{
    write_much(5 * P);
    watch_active();
    fault_env_fail(FAULTS, FAULT_LINKAT, 2, ENOSPC, false); /* the journal's */
}

/* Without room for another journal, the active one gets the marks, as it does
 * after a little. */
TEST(test_marks_on_a_full_disk)
{
    begin();
    write_much(P);
    checkpoint_with(fill_disk_amid);
    CHECK_INT(fault_env_faults(FAULTS), 1);
    CHECK_INT(count_journals(), 1);
    CHECK_INT(watched.count, 1);
    model_compare();
    model_crash();
    CHECK_OK(model_open());
    CHECK(!is_zero(5 * P, P));
    finish();
}

static void
snapshot_amid(void)
{
    write_much(5 * P);
    write_much(2 * P);
}

/* A checkpoint stores what was written before it began, and a snapshot has it,
 * also while others write much. */
TEST(test_snapshot_of_a_busy_volume)
{
    begin();
    write_much(P);
    checkpoint_with(snapshot_amid);
    CHECK_OK(model_snapshot("first"));
    CHECK_OK(model_write(4 * P, 8));
    CHECK_OK(model_snapshot("second"));
    CHECK_INT(count_journals(), 1);
    finish();
}

/* Much that is not durable is stored soon, unless it is scattered: what is not,
 * the next flush has to sync. */
TEST(test_much_that_is_not_durable)
{
    for (int flushed = 0; flushed < 2; flushed++) {
        unsigned writes = 0;
        begin();
        while (!gd_volume_needs_checkpoint(the_volume) && writes < 500) {
            CHECK_OK(model_write(writes++ % 5 * P, P));
            CHECK_OK(flushed && writes == 100 ? model_flush() : GD_OK);
        }
        CHECK_INT(writes, (flushed ? 100 : 0) + 256);
        finish();
    }
}

/* ---- crashes ---- */

typedef struct saved {
    char name[GD_NAME_SIZE];
    uint8_t *data;
    size_t length;
} saved;

static saved
save_active(void)
{
    saved s = {.data = NULL};
    journal_name(0, s.name);
    s.length = (size_t)scratch_size(&the_scratch, s.name);
    s.data = malloc(s.length);
    scratch_read(&the_scratch, s.name, s.data, s.length, 0);
    return s;
}

/* The kernel had written this file by itself. */
static void
put_back(saved *s)
{
    scratch_truncate(&the_scratch, s->name, s->length);
    scratch_write(&the_scratch, s->name, s->data, s->length, 0);
    free(s->data);
}

static ssize_t
refuse_stored(const gd_env *env, int fd, const struct iovec *iov, int count,
              uint64_t offset)
{
    static const uint8_t stored[8] = {'G', 'D', 'V', 'R', GD_RECORD_STORED};
    bool refused = iov[0].iov_len == GD_RECORD_HEAD &&
                   memcmp(iov[0].iov_base, stored, sizeof stored) == 0;
    return refused ? -EIO : fault_table.pwritev(env, fd, iov, count, offset);
}

/* A checkpoint appends its marks, and not the record behind them. */
static void
refuse_record_of_end(void)
{
    gd_volume_info before, after;
    gd_volume_get_info(the_volume, &before);
    FAULTS->env.pwritev = refuse_stored;
    CHECK_INT(model_checkpoint(), GD_IO);
    FAULTS->env.pwritev = fault_table.pwritev;
    gd_volume_get_info(the_volume, &after);
    CHECK_INT(after.journal_bytes, before.journal_bytes + 3 * GD_RECORD_HEAD);
}

/* The frozen journal is torn, and the active one, with its marks, is not: the
 * volume is as it was at one moment. */
TEST(test_torn_frozen_journal)
{
    for (int how = 0; how < 3; how++) {
        begin();
        CHECK_OK(model_write(P, 9));
        CHECK_OK(model_flush());
        CHECK_OK(model_write(2 * P, 9)); /* proves the first */
        CHECK_OK(model_write(3 * P, 9));
        fail_checkpoint();
        CHECK_OK(model_write(4 * P, 9));
        if (how == 1) {
            CHECK_OK(model_write(P, P)); /* over what was flushed */
        } else if (how == 2) {
            refuse_record_of_end();
        }
        saved active = save_active();
        model_crash();
        put_back(&active);
        CHECK_OK(model_open());
        CHECK_INT(count_journals(), 1);
        CHECK(!is_zero(P, 9));
        CHECK(is_zero(P + 9, P - 9));
        CHECK(is_zero(2 * P, 4 * P));
        model_compare();
        model_crash();
        CHECK_OK(model_open());
        CHECK(is_zero(2 * P, 4 * P));
        finish();
    }
}

/* The same, while there is no room for this owner's journal (V4). */
TEST(test_torn_frozen_journal_on_a_full_disk)
{
    gd_volume_info info;
    begin();
    CHECK_OK(model_write(P, 9));
    fail_checkpoint();
    CHECK_OK(model_write(2 * P, 9));
    saved active = save_active();
    model_crash();
    put_back(&active);
    fill_disk(0);
    fault_env_fail(FAULTS, FAULT_PWRITEV, 1, ENOSPC, true);
    CHECK_OK(model_open());
    gd_volume_get_info(the_volume, &info);
    CHECK(info.is_read_only);
    CHECK(is_zero(P, 5 * P));
    model_compare();
    fault_env_heal(FAULTS);
    empty_disk();
    CHECK_OK(model_checkpoint());
    CHECK(is_zero(P, 5 * P));
    finish();
}

/* The record that the frozen journal is stored makes it superfluous, torn or
 * not. */
TEST(test_stored_frozen_journal)
{
    begin();
    CHECK_OK(model_write(P, 9));
    fault_env_fail(FAULTS, FAULT_FDATASYNC, 3, EIO, true);
    CHECK(model_checkpoint() != GD_OK);
    fault_env_heal(FAULTS);
    saved active = save_active();
    model_crash();
    put_back(&active);
    CHECK_OK(model_open());
    CHECK(!is_zero(P, 9));
    finish();
}

/* All that was flushed is there, whatever was frozen then. */
TEST(test_flush_beside_a_frozen_journal)
{
    begin();
    CHECK_OK(model_write(P, 9));
    fail_checkpoint();
    CHECK_OK(model_flush());
    model_crash();
    CHECK_OK(model_open());
    CHECK(!is_zero(P, 9));
    model_compare();
    CHECK_OK(model_write(2 * P, 9));
    fail_checkpoint();
    CHECK_OK(model_write(3 * P, 9));
    CHECK_OK(model_flush());
    CHECK_OK(model_write(4 * P, 9));
    model_crash();
    CHECK_OK(model_open());
    CHECK(!is_zero(2 * P, 9));
    CHECK(!is_zero(3 * P, 9));
    model_compare();
    finish();
}

/* ---- a flush that waits for a whole checkpoint ---- */

static struct {
    int to_stop[2];  /* pipes: nothing is written while a thread is to wait */
    int to_sync[2];
    bool holds_syncs;
    atomic_bool stopped, syncing, stored, returned, early;
    atomic_int result;
} slow;

static void
wait_at(const int pipe[2])
{
    char byte;
    while (read(pipe[0], &byte, 1) < 0 && errno == EINTR) {
    }
}

static void
let_go(const int pipe[2])
{
    CHECK_INT(write(pipe[1], "", 1), 1);
}

static bool
comes_true(const atomic_bool *flag, unsigned ms)
{
    while (!atomic_load(flag) && ms > 0) {
        usleep(1000);
        ms--;
    }
    return atomic_load(flag);
}

static void
stop_here(int signal)
{
    (void)signal;
    atomic_store(&slow.stopped, true);
    wait_at(slow.to_stop);
}

static void *
flush_slowly(void *arg)
{
    gd_error err;
    (void)arg;
    atomic_store(&slow.result, (int)gd_volume_flush(the_volume, &err));
    atomic_store(&slow.returned, true);
    return NULL;
}

static void *
flush_at_once(void *arg)
{
    gd_error err;
    (void)arg;
    CHECK_INT(gd_volume_flush(the_volume, &err), GD_OK);
    return NULL;
}

static ssize_t
note_stored(const gd_env *env, int fd, const struct iovec *iov, int count,
            uint64_t offset)
{
    static const uint8_t stored[8] = {'G', 'D', 'V', 'R', GD_RECORD_STORED};
    if (iov[0].iov_len == GD_RECORD_HEAD &&
        memcmp(iov[0].iov_base, stored, sizeof stored) == 0) {
        atomic_store(&slow.stored, true);
    }
    return fault_table.pwritev(env, fd, iov, count, offset);
}

/* Waits in the first sync.  In that of the record of the end it lets the slow flush
 * go on, and looks whether it returns. */
static int
slow_fdatasync(const gd_env *env, int fd)
{
    if (slow.holds_syncs) {
        slow.holds_syncs = false;
        atomic_store(&slow.syncing, true);
        wait_at(slow.to_sync);
    } else if (atomic_exchange(&slow.stored, false)) {
        let_go(slow.to_stop);
        atomic_store(&slow.early, comes_true(&slow.returned, 300));
    }
    return fault_table.fdatasync(env, fd);
}

/* Waits until so many flushes have begun.  Those wait, or have ended. */
static bool
comes_to(uint64_t flushes)
{
    gd_volume_info info = {.head = {.counters = {.flushes = 0}}};
    for (unsigned ms = 0; info.head.counters.flushes < flushes && ms < 60000;
         ms++) {
        usleep(1000);
        gd_volume_get_info(the_volume, &info);
    }
    return info.head.counters.flushes >= flushes;
}

static void
begin_slow(void)
{
    struct sigaction stop = {.sa_handler = stop_here};
    memset(&slow, 0, sizeof slow);
    CHECK(pipe(slow.to_stop) == 0 && pipe(slow.to_sync) == 0);
    CHECK(sigaction(SIGUSR1, &stop, NULL) == 0);
    FAULTS->env.pwritev = note_stored;
    FAULTS->env.fdatasync = slow_fdatasync;
    slow.holds_syncs = true;
}

static void
end_slow(void)
{
    FAULTS->env.pwritev = fault_table.pwritev;
    FAULTS->env.fdatasync = fault_table.fdatasync;
    for (int i = 0; i < 2; i++) {
        close(slow.to_stop[i]);
        close(slow.to_sync[i]);
    }
}

/* A flush returns only when what it waits for is durable or durably stored.  This
 * one is not scheduled from the sync before it until the checkpoint's last one. */
TEST(test_flush_waits_for_the_record_of_the_end)
{
    pthread_t first, second;
    model_setup(0);
    CHECK_OK(model_create(SIZE));
    CHECK_OK(model_open());
    CHECK_OK(model_write(0, 9));
    begin_slow();
    CHECK(pthread_create(&first, NULL, flush_at_once, NULL) == 0);
    CHECK(comes_true(&slow.syncing, 60000));
    CHECK_OK(model_write(P, 9)); /* not in that sync */
    CHECK(pthread_create(&second, NULL, flush_slowly, NULL) == 0);
    CHECK(comes_to(2)); /* and waits for the sync */
    CHECK(pthread_kill(second, SIGUSR1) == 0);
    CHECK(comes_true(&slow.stopped, 60000));
    let_go(slow.to_sync);
    pthread_join(first, NULL);
    CHECK_OK(model_checkpoint());
    let_go(slow.to_stop); /* in case that sync never came */
    pthread_join(second, NULL);
    CHECK(!slow.early);
    CHECK_INT(slow.result, GD_OK);
    end_slow();
    finish();
}

/* The sync of the frozen journal fails: no flush succeeds (V3). */
TEST(test_sync_of_the_frozen_journal_fails)
{
    begin();
    CHECK_OK(model_write(P, 9));
    fail_checkpoint();
    CHECK_OK(model_write(2 * P, 9));
    fault_env_fail(FAULTS, FAULT_FDATASYNC, 1, EIO, false);
    CHECK_INT(model_flush(), GD_IO);
    fault_env_heal(FAULTS);
    CHECK(model_flush() != GD_OK);
    CHECK_CONTAINS(model_words(), "takes no more writes");
    model_kill();
    CHECK_OK(model_open());
    model_compare();
    CHECK_OK(model_flush());
    model_crash();
    finish();
}

/* Owners that are killed lose nothing, and each makes all durable. */
TEST(test_killed_beside_a_frozen_journal)
{
    begin();
    CHECK_OK(model_write(P, 9));
    fail_checkpoint();
    CHECK_OK(model_write(2 * P, 9));
    model_kill();
    CHECK_OK(model_open());
    CHECK_INT(count_journals(), 1);
    model_crash();
    CHECK_OK(model_open());
    CHECK(!is_zero(P, 9));
    CHECK(!is_zero(2 * P, 9));
    finish();
}

/* V5: a loss is noticed if anything proves that it was durable. */
TEST(test_loss_in_a_frozen_journal)
{
    for (int proof = 0; proof < 3; proof++) {
        char name[GD_NAME_SIZE];
        begin();
        CHECK_OK(model_write(P, 9));
        CHECK_OK(proof == 1 ? model_flush() : GD_OK);
        fail_checkpoint();
        journal_name(1, name);
        CHECK_OK(model_write(2 * P, 9));
        if (proof == 2) {
            CHECK_OK(model_flush());
            CHECK_OK(model_write(3 * P, 9));
        }
        model_close();
        scratch_flip(&the_scratch, name, 4208 + 100, 1);
        if (proof == 0) {
            CHECK_OK(model_open());
            CHECK(is_zero(P, 5 * P));
        } else {
            CHECK_INT(model_open(), GD_CORRUPT);
            CHECK_CONTAINS(model_words(), "the record at offset 4208 is "
                           "damaged; what was written from there on is lost");
        }
        model_delete();
        model_teardown();
    }
}

/* The new size does not come before the writes before it. */
TEST(test_grow_behind_writes)
{
    model_setup(0);
    model_start_shadow();
    CHECK_OK(model_create(4 * P));
    CHECK_OK(model_open());
    CHECK_OK(model_write(P, 9));
    CHECK_OK(model_resize(SIZE));
    model_crash();
    CHECK_OK(model_open());
    CHECK_INT(model_sectors(), SIZE);
    CHECK(!is_zero(P, 9));
    finish();
}
