/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_open.c - volumes whose owner is killed, whose machine crashes, and
 * whose disk fails or is full: flushed data is there, no file is left over,
 * and the volume can be used and deleted (volumes.rst, V1 to V10).
 */
#include "engine/volume/volume.h"

#include "engine/volume/volumenames.h"
#include "tests/c/support/check.h"
#include "tests/c/support/sector_model.h"

enum { P = MODEL_PART_SECTORS };

/* One of so many cases is tried; with GLANCE_DEDUP_FAULTS=all, every one. */
static uint64_t stride = SWEEP_STRIDE == 1 ? 30 : 270;

#define FAULTS (&the_scratch.f)

#define CHECK_OK(call)                                                        \
    do {                                                                      \
        if (!CHECK_INT((call), GD_OK)) {                                      \
            fprintf(stderr, "%s\n", model_words());                           \
        }                                                                     \
    } while (0)

/* ---- a volume with all kinds of state ---- */

/* Makes editions of some parts, with flushed and unflushed records over
 * them. */
static void
begin(bool clone)
{
    model_setup(clone ? 2 * P + 100 : 0);
    model_start_shadow();
    CHECK_OK(clone ? model_clone(4 * P + 3) : model_create(4 * P + 3));
    CHECK_OK(model_open());
    CHECK_OK(model_write(0, 200));
    CHECK_OK(model_write(3 * P, 10));
    CHECK_OK(model_checkpoint());
    CHECK_OK(model_write(100, 60));
    CHECK_OK(model_zero(P + 5, 20));
    CHECK_OK(model_flush());
    CHECK_OK(model_write(4 * P, 3));
    CHECK_OK(model_write(110, 5));
}

/* Makes all requests that a user may make to a good volume. */
static void
use(void)
{
    uint64_t most = model_sectors();
    model_compare();
    CHECK_OK(model_write(most / 4, most / 2));
    CHECK_OK(model_zero(most / 8, most / 8));
    CHECK_OK(model_flush());
    CHECK_OK(model_write(0, 1));
    model_compare();
    CHECK_OK(model_checkpoint());
    model_compare();
}

static void
finish(void)
{
    model_close();
    CHECK_OK(model_open());
    if (the_volume != NULL) {
        use();
        model_close();
        CHECK_OK(model_open());
        model_compare();
        CHECK_OK(model_checkpoint());
        model_check_nothing_left();
    }
    model_delete();
    model_teardown();
}

/* ---- tasks, each under every fault ---- */

static gd_status
work_write(void)
{
    return model_write(90, 2 * P); /* more than one record */
}

static gd_status
work_zero(void)
{
    return model_zero(P - 10, 90);
}

static gd_status
work_checkpoint(void)
{
    return model_checkpoint();
}

/* The volume is recovered with a checkpoint, and without. */
static gd_status
work_settle(void)
{
    gd_status s = gd_volume_final_checkpoint(the_volume, model_err);
    s = s == GD_OK ? model_flush() : s; /* counted */
    return s == GD_OK ? gd_volume_final_checkpoint(the_volume, model_err) : s;
}

static gd_status
work_snapshot(void)
{
    return model_snapshot("snapshot");
}

static gd_status
work_grow(void)
{
    return model_resize(6 * P);
}

static gd_status
work_shrink(void)
{
    return model_resize(P + 30);
}

static gd_status
work_shrink_and_grow(void)
{
    gd_status s = model_resize(P + 30);
    s = s == GD_OK ? model_resize(5 * P) : s;
    s = s == GD_OK ? model_write(4 * P - 20, 2) : s;
    return s == GD_OK ? model_checkpoint() : s;
}

static gd_status
work_open(void)
{
    model_close();
    return model_open();
}

static gd_status
work_recover(void)
{
    gd_status s = work_open();
    s = s == GD_OK ? model_write(7, 1) : s;
    return s == GD_OK ? model_flush() : s;
}

typedef struct work {
    const char *name;
    gd_status (*run)(void);
} work;

static const work works[] = {
    {"write", work_write},
    {"zero", work_zero},
    {"flush", model_flush},
    {"checkpoint", work_checkpoint},
    {"settle", work_settle},
    {"snapshot", work_snapshot},
    {"grow", work_grow},
    {"shrink", work_shrink},
    {"shrink and grow", work_shrink_and_grow},
    {"open", work_open},
    {"recover", work_recover},
};

/* The event after the fault. */
typedef enum outcome {
    GO_ON,     /* the owner continues, when the fault is over */
    KILL,      /* it dies */
    CRASH,     /* the machine crashes */
    OUTCOMES,
} outcome;

typedef struct fault {
    fault_call call;
    int sys_errno;
    bool forever;
} fault;

static const fault faults[] = {
    {FAULT_ANY, EIO, false},
    {FAULT_ANY, ENOSPC, true},
    {FAULT_PWRITEV, ENOSPC, true},
    {FAULT_FDATASYNC, EIO, false},
    {FAULT_FSYNC, EIO, true},
    {FAULT_UNLINKAT, EIO, true},
    {FAULT_LINKAT, EIO, false},
    {FAULT_ALLOC, ENOMEM, false},
    {FAULT_ALLOC, ENOMEM, true},
};

/* The same owner continues. If the journal could not be synced, it reports
 * that, and its next owner continues. If there was no room for its first one,
 * there is now. */
static void
go_on(bool checkpoint_first)
{
    gd_volume_info info;
    if (the_volume == NULL) {
        return;
    }
    gd_volume_get_info(the_volume, &info);
    model_compare();
    if (info.broken[0] != '\0' && !info.is_read_only) {
        CHECK(model_write(1, 1) != GD_OK);
        CHECK_CONTAINS(model_words(), "takes no more writes");
        CHECK(model_zero(1, 1) != GD_OK);
        CHECK(model_flush() != GD_OK);
        CHECK_CONTAINS(model_words(), info.broken);
    } else {
        if (checkpoint_first || info.is_read_only) {
            CHECK_OK(model_checkpoint()); /* continues */
            model_compare();
        }
        use();
    }
    model_close();
}

/* Returns false if there were fewer than nth such calls.  Some callers want no
 * words. */
static bool
run_case(const work *w, const fault *f, uint64_t nth, outcome what,
         bool clone)
{
    static unsigned cases;
    unsigned failures = check_failures;
    begin(clone);
    fault_env_fail(FAULTS, f->call, nth, f->sys_errno, f->forever);
    model_err = cases++ % 4 == 3 ? NULL : &the_scratch.err;
    gd_status s = w->run();
    bool met = fault_env_faults(FAULTS) > 0;
    CHECK(met || s == GD_OK);
    CHECK(s == GD_OK || model_err == NULL ||
          the_scratch.err.text[0] != '\0');
    model_err = &the_scratch.err;
    if (what == GO_ON) {
        fault_env_heal(FAULTS);
        go_on(nth % 2 == 0);
    } else if (what == KILL) {
        model_close();
        fault_env_heal(FAULTS);
        model_kill();
    } else {
        fault_env_heal(FAULTS);
        model_crash();
    }
    finish();
    if (check_failures > failures) {
        fprintf(stderr, "%s, %s number %" PRIu64 "%s, errno %d, outcome %d, "
                "%s\n", w->name, fault_call_name(f->call), nth,
                f->forever ? " and on" : "", f->sys_errno, (int)what,
                clone ? "clone" : "new");
    }
    return met && check_failures < 20;
}

static void
sweep(const work *w)
{
    static unsigned turn; /* another part of the cases for each fault */
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        for (int what = 0; what < OUTCOMES; what++) {
            uint64_t nth = 1 + 7 * turn++ % stride;
            while (run_case(w, &faults[i], nth, (outcome)what,
                            turn % 3 == 0)) {
                nth += stride;
            }
        }
    }
}

TEST(test_faults_in_requests)
{
    for (size_t i = 0; i < 3; i++) {
        sweep(&works[i]);
    }
}

TEST(test_faults_in_checkpoint)
{
    sweep(&works[3]);
    sweep(&works[4]);
}

TEST(test_faults_in_snapshot)
{
    sweep(&works[5]);
}

TEST(test_faults_in_resize)
{
    for (size_t i = 6; i < 9; i++) {
        sweep(&works[i]);
    }
}

TEST(test_faults_in_recovery)
{
    for (size_t i = 9; i < sizeof works / sizeof *works; i++) {
        sweep(&works[i]);
    }
}

/* ---- making and deleting (V9) ---- */

/* If it is interrupted at any call, the next call completes it. */
static void
interrupt_making(const fault *f, uint64_t nth, bool clone, bool *met)
{
    model_setup(P + 100);
    fault_env_fail(FAULTS, f->call, nth, f->sys_errno, f->forever);
    gd_status s = clone ? model_clone(2 * P) : model_create(2 * P);
    *met = fault_env_faults(FAULTS) > 0;
    fault_env_heal(FAULTS);
    CHECK(*met || s == GD_OK);
    if (s != GD_OK) {
        s = clone ? model_clone(2 * P) : model_create(2 * P);
        /* The last step may have happened though it was reported to have
         * failed. */
        CHECK(s == GD_OK || s == GD_EXISTS);
    }
    finish();
}

static void
interrupt_deleting(const fault *f, uint64_t nth, bool clone, bool *met)
{
    gd_volume_head head;
    begin(clone);
    model_close();
    fault_env_fail(FAULTS, f->call, nth, f->sys_errno, f->forever);
    gd_status s = gd_volume_delete(the_repo, "disk", &the_scratch.err);
    *met = fault_env_faults(FAULTS) > 0;
    fault_env_heal(FAULTS);
    CHECK(*met || s == GD_OK);
    if (s != GD_OK &&
        gd_volume_read_head(the_repo, "disk", &head, &the_scratch.err) ==
        GD_OK &&
        head.state == GD_VOLUME_READY) {
        finish(); /* it was not begun: no data is lost */
        return;
    }
    if (s != GD_OK) {
        CHECK_INT(gd_volume_open(the_repo, "disk", true, &the_volume,
                                 &the_scratch.err), GD_NOTFOUND);
        the_volume = NULL;
        s = nth % 2 == 0 ? gd_volume_delete(the_repo, "disk",
                                            &the_scratch.err)
                         : GD_NOTFOUND;
        CHECK(s == GD_OK || s == GD_NOTFOUND);
    }
    CHECK_OK(clone ? model_clone(4 * P) : model_create(4 * P));
    finish();
}

static void
sweep_names(void (*interrupt)(const fault *f, uint64_t nth, bool clone,
                              bool *met))
{
    static unsigned turn;
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        for (int clone = 0; clone < 2; clone++) {
            bool met = true;
            for (uint64_t nth = 1 + 7 * turn++ % stride;
                 met && check_failures < 20; nth += stride) {
                unsigned failures = check_failures;
                interrupt(&faults[i], nth, clone == 1, &met);
                if (check_failures > failures) {
                    fprintf(stderr, "%s number %" PRIu64 "%s, errno %d, %s\n",
                            fault_call_name(faults[i].call), nth,
                            faults[i].forever ? " and on" : "",
                            faults[i].sys_errno, clone ? "clone" : "new");
                }
            }
        }
    }
}

TEST(test_making_is_interrupted)
{
    sweep_names(interrupt_making);
}

TEST(test_deleting_is_interrupted)
{
    sweep_names(interrupt_deleting);
}

/* V9: no recipe is deleted before the directory has the state durably, even if
 * an attempt before could not sync it. */
TEST(test_deleting_is_durable_first)
{
    char done[4096];
    begin(false);
    model_close();
    fault_env_fail(FAULTS, FAULT_FSYNC, 1, EIO, false);
    CHECK_INT(gd_volume_delete(the_repo, "disk", &the_scratch.err), GD_IO);
    fault_env_heal(FAULTS);
    fault_env_start_trace(FAULTS);
    CHECK_OK(gd_volume_delete(the_repo, "disk", &the_scratch.err));
    fault_env_trace(FAULTS, done, sizeof done);
    if (!CHECK(strncmp(done, "fsync ", 6) == 0)) {
        fprintf(stderr, "%s\n", done);
    }
    model_teardown();
}

/* ---- particular cases ---- */

/* V3, V4: a sync fails; the next owner finds the page cache's content, and its
 * first flush makes it durable. */
TEST(test_failed_sync)
{
    begin(false);
    CHECK_OK(model_write(20, 30));
    CHECK_OK(model_flush());
    CHECK_OK(model_write(25, 40));
    fault_env_fail(FAULTS, FAULT_FDATASYNC, 1, EIO, false);
    CHECK(model_flush() != GD_OK);
    CHECK_CONTAINS(model_words(), "fdatasync");
    fault_env_heal(FAULTS);
    CHECK(model_flush() != GD_OK);
    CHECK(model_write(1, 1) != GD_OK);
    CHECK_CONTAINS(model_words(), "disk takes no more writes");
    CHECK(model_checkpoint() != GD_OK);
    model_compare();
    model_kill();
    CHECK_OK(model_open());
    model_compare();
    CHECK_OK(model_write(60, 10));
    CHECK_OK(model_flush());
    model_crash();
    CHECK_OK(model_open());
    model_compare();
    model_delete();
    model_teardown();
}

/* The machine crashes before the next owner has flushed: it had not
 * acknowledged any write, and the volume opens. */
TEST(test_crash_after_recovery)
{
    for (int failed = 0; failed < 2; failed++) {
        for (int more = 0; more < 2; more++) {
            begin(false);
            CHECK_OK(model_write(20, 30));
            CHECK_OK(model_flush());
            CHECK_OK(model_write(25, 40));
            if (failed) {
                fault_env_fail(FAULTS, FAULT_FDATASYNC, 1, EIO, false);
                CHECK(model_flush() != GD_OK);
                fault_env_heal(FAULTS);
            }
            model_kill();
            CHECK_OK(model_open());
            model_compare();
            if (more) {
                CHECK_OK(model_write(28, 2));
                model_kill();
                CHECK_OK(model_open());
                model_compare();
            }
            model_crash();
            finish();
        }
    }
}

/* Parts that a volume loses and gets back begin again, even for a process with
 * their recipes open. */
TEST(test_part_comes_back)
{
    model_setup(0);
    CHECK_OK(model_create(4 * P));
    CHECK_OK(model_open());
    CHECK_OK(model_write(3 * P, 50));
    CHECK_OK(model_checkpoint());
    model_compare(); /* opens edition 1 */
    CHECK_OK(model_resize(P));
    CHECK_OK(model_resize(4 * P));
    model_compare();
    CHECK_OK(model_write(3 * P + 7, 3));
    CHECK_OK(model_checkpoint()); /* edition 1 once more */
    model_compare();
    finish();
}

/* A checkpoint fails behind its first part, and the next one continues
 * there. */
TEST(test_checkpoint_goes_on)
{
    for (uint64_t nth = 1; nth <= 3; nth++) {
        begin(false);
        fault_env_fail(FAULTS, FAULT_LINKAT, nth, EIO, true);
        CHECK_INT(model_checkpoint(), GD_IO);
        fault_env_heal(FAULTS);
        model_compare();
        CHECK_OK(model_checkpoint());
        model_compare();
        finish();
    }
}

/* If it is unknown which journal the next owner finds, no more records are
 * written to the old one. */
TEST(test_journal_that_may_be_there)
{
    begin(false);
    fault_env_fail(FAULTS, FAULT_FSYNC, 1, EIO, false);
    CHECK_INT(model_checkpoint(), GD_IO);
    fault_env_heal(FAULTS);
    CHECK(model_write(0, 9) != GD_OK);
    CHECK_CONTAINS(model_words(), "takes no more writes");
    CHECK(model_flush() != GD_OK);
    model_kill();
    finish();
}

/* A record that has changed on the disk is not read (I7). */
TEST(test_damaged_record_is_not_read)
{
    char name[GD_NAME_SIZE];
    uint8_t data[512];
    gd_volume_info info;
    begin(false);
    gd_volume_get_info(the_volume, &info);
    gd_volume_journal_name("disk", info.head.journal, name);
    CHECK_OK(gd_volume_read(the_volume, data, 512, 114 * 512,
                            &the_scratch.err));
    scratch_flip(&the_scratch, name, info.journal_bytes - 1, 1);
    CHECK_INT(gd_volume_read(the_volume, data, 512, 110 * 512,
                             &the_scratch.err), GD_CORRUPT);
    CHECK_CONTAINS(model_words(), name);
    CHECK(model_checkpoint() == GD_CORRUPT); /* nor is it stored */
    CHECK_OK(gd_volume_read(the_volume, data, 512, 4 * P * 512,
                            &the_scratch.err));
    model_delete();
    model_teardown();
}

static int (*real_fdatasync)(const gd_env *env, int fd);

/* Another thread writes when the sync is over. */
static int
write_behind_sync(const gd_env *env, int fd)
{
    the_scratch.f.env.fdatasync = real_fdatasync;
    int rc = real_fdatasync(env, fd);
    CHECK_OK(model_write(77, 5));
    return rc;
}

/* V3: a sync makes durable the records from before it began. */
TEST(test_write_during_sync)
{
    begin(false);
    real_fdatasync = the_scratch.f.env.fdatasync;
    the_scratch.f.env.fdatasync = write_behind_sync;
    CHECK_OK(gd_volume_flush(the_volume, &the_scratch.err));
    CHECK_OK(model_flush());
    model_crash();
    finish();
}

static int64_t
journal_size(void)
{
    char name[GD_NAME_SIZE];
    gd_volume_info info;
    gd_volume_get_info(the_volume, &info);
    gd_volume_journal_name("disk", info.head.journal, name);
    return scratch_size(&the_scratch, name);
}

/* A guest flushes each write: the file seldom gets longer, since zeros are
 * written ahead. No zeros overwrite a record. */
TEST(test_many_flushes)
{
    unsigned grown = 0;
    model_setup(0);
    model_start_shadow();
    CHECK_OK(model_create(6 * P));
    CHECK_OK(model_open());
    int64_t before = journal_size();
    for (unsigned i = 0; i < 300; i++) {
        CHECK_OK(model_write(i * 7 % (5 * P), 8));
        CHECK_OK(model_flush());
        grown += journal_size() > before;
        before = journal_size();
    }
    CHECK(grown > 1 && grown < 10);
    model_crash();
    finish();
}

/* A hundredth of the total is the reserve, so that there is room for little
 * more. */
static int
little_room(const gd_env *env, int fd, gd_space *space)
{
    (void)env;
    (void)fd;
    *space = (gd_space){.total = 1000 << 20, .free = (10 << 20) + 16384};
    return 0;
}

/* Zeros are no reason to use the reserve. */
TEST(test_flushes_without_zeros)
{
    gd_volume_info info;
    begin(false);
    CHECK_OK(model_write(0, 4 * P));
    int (*real)(const gd_env *, int, gd_space *) = FAULTS->env.free_space;
    FAULTS->env.free_space = little_room;
    the_repo->params.reserve = 64 << 20;
    for (unsigned i = 0; i < 5; i++) {
        CHECK_OK(model_write(i, 1));
        CHECK_OK(model_flush());
        gd_volume_get_info(the_volume, &info);
        CHECK_INT(journal_size(), info.journal_bytes);
    }
    FAULTS->env.free_space = real;
    CHECK_OK(model_write(9, 1));
    CHECK_OK(model_flush());
    CHECK(journal_size() > (int64_t)info.journal_bytes + 65536);
    finish();
}

/* ---- copies of what was found (V4) ---- */

static uint64_t
checkpoints(void)
{
    gd_volume_info info;
    gd_volume_get_info(the_volume, &info);
    return info.head.counters.checkpoints;
}

static unsigned
count_journals(void)
{
    return (unsigned)scratch_count(&the_scratch, "volumes/disk", "journal-",
                                   NULL);
}

/* Records that are proven durable stay where they are; the rest are copied. */
TEST(test_only_the_tail_is_copied)
{
    begin(false);
    CHECK_OK(model_write(0, 4 * P));
    CHECK_OK(model_flush());
    CHECK_OK(model_write(7, 9));
    CHECK_OK(model_zero(P, 3));
    model_kill();
    uint64_t before = fault_env_count(FAULTS, FAULT_FDATASYNC);
    CHECK_OK(model_open());
    CHECK_INT(fault_env_count(FAULTS, FAULT_FDATASYNC), before + 1);
    CHECK_INT(journal_size(), 8192 + 56 + 9 * 512 + 56);
    CHECK_INT(count_journals(), 2);
    model_compare();
    CHECK(gd_volume_needs_checkpoint(the_volume));
    uint64_t made = checkpoints();
    CHECK_OK(model_write(8, 1));
    CHECK_OK(model_flush());
    CHECK_INT(checkpoints(), made);
    model_crash();
    CHECK_OK(model_open());
    model_compare();
    CHECK_OK(model_checkpoint());
    CHECK(!gd_volume_needs_checkpoint(the_volume));
    finish();
}

/* Nothing was proven: all is copied, and the journal before is not needed. */
TEST(test_all_is_copied)
{
    for (int crash = 0; crash < 2; crash++) {
        model_setup(0);
        model_start_shadow();
        CHECK_OK(model_create(4 * P));
        CHECK_OK(model_open());
        for (uint64_t i = 0; i < 40; i++) {
            CHECK_OK(model_write(i, 3 * P)); /* more than a window */
        }
        CHECK_OK(model_zero(5, 2));
        CHECK_OK(model_flush());
        model_kill();
        CHECK_OK(model_open());
        CHECK_INT(count_journals(), 1);
        CHECK(!gd_volume_needs_checkpoint(the_volume));
        model_compare();
        if (crash) {
            model_crash();
        } else {
            model_kill();
        }
        CHECK_OK(model_open());
        CHECK_INT(count_journals(), 1);
        model_compare();
        finish();
    }
}

/* An earlier owner has named no end of the journal before its own: then no
 * earlier one is needed. */
TEST(test_chain_without_ends)
{
    for (int named = 0; named < 2; named++) {
        char name[GD_NAME_SIZE];
        gd_volume_head head;
        uint8_t raw[GD_VOLUME_HEAD];
        begin(false);
        CHECK_OK(model_flush());
        CHECK_OK(model_write(2, 7));
        model_kill();
        CHECK_OK(model_open());
        CHECK_OK(model_write(5, 7));
        CHECK_OK(model_flush());
        CHECK_OK(model_write(9, 7));
        model_kill();
        CHECK_OK(gd_volume_read_head(the_repo, "disk", &head,
                                     &the_scratch.err));
        CHECK_INT(head.needed, head.journal - 1);
        CHECK(head.before > 0);
        gd_volume_journal_name("disk", head.journal, name);
        head.before = named ? head.before : 0;
        head.before_durable = head.before;
        scratch_read(&the_scratch, name, raw, sizeof raw, 0);
        gd_volume_head_encode(&head, raw);
        scratch_write(&the_scratch, name, raw, sizeof raw, 0);
        CHECK_OK(model_open());
        CHECK_INT(count_journals(), named ? 3 : 1);
        model_compare();
        CHECK_OK(model_flush());
        model_kill();
        finish();
    }
}

/* Without room for the copies, the volume can be read. */
TEST(test_no_room_for_copies)
{
    gd_volume_info info;
    begin(false);
    CHECK_OK(model_write(0, 4 * P));
    CHECK_OK(model_flush());
    model_kill();
    int (*real)(const gd_env *, int, gd_space *) = FAULTS->env.free_space;
    FAULTS->env.free_space = little_room;
    uint64_t reserve = the_repo->params.reserve;
    the_repo->params.reserve = 64 << 20;
    CHECK_OK(model_open());
    gd_volume_get_info(the_volume, &info);
    CHECK(info.is_read_only);
    model_compare();
    CHECK_INT(model_flush(), GD_NOSPACE);
    FAULTS->env.free_space = real;
    the_repo->params.reserve = reserve;
    CHECK_OK(model_flush());
    gd_volume_get_info(the_volume, &info);
    CHECK(!info.is_read_only);
    finish();
}

static int (*real_space)(const gd_env *env, int fd, gd_space *space);
static uint64_t real_reserve;

/* From now on, so few bytes are free beside the reserve. */
static void
fill_disk(int (*space)(const gd_env *env, int fd, gd_space *space))
{
    real_space = FAULTS->env.free_space;
    real_reserve = the_repo->params.reserve;
    FAULTS->env.free_space = space;
    the_repo->params.reserve = 64 << 20;
}

static void
empty_disk(void)
{
    FAULTS->env.free_space = real_space;
    the_repo->params.reserve = real_reserve;
}

static int
room_for_a_part(const gd_env *env, int fd, gd_space *space)
{
    (void)env;
    (void)fd;
    *space = (gd_space){.total = 1000 << 20, .free = (10 << 20) + (256 << 10)};
    return 0;
}

static int
no_room(const gd_env *env, int fd, gd_space *space)
{
    (void)env;
    (void)fd;
    *space = (gd_space){.total = 1000 << 20, .free = 10 << 20};
    return 0;
}

/* There is no room for the copies, but for the editions: opening makes a
 * checkpoint, and the volume can be written to. */
TEST(test_checkpoint_instead_of_copies)
{
    for (int outcome = 0; outcome < 3; outcome++) {
        gd_volume_info info;
        begin(outcome == 1);
        for (int i = 0; i < 8; i++) {
            CHECK_OK(model_write(0, P));
        }
        CHECK_OK(model_zero(4 * P, 1));
        CHECK_OK(model_flush());
        model_kill();
        fill_disk(room_for_a_part);
        CHECK_OK(model_open());
        gd_volume_get_info(the_volume, &info);
        CHECK(!info.is_read_only);
        CHECK_INT(checkpoints(), 1);
        CHECK_INT(info.head.needed, info.head.journal);
        model_compare();
        model_check_nothing_left();
        CHECK_OK(model_write(3, 3));
        CHECK_OK(model_flush());
        empty_disk();
        if (outcome == 2) {
            model_crash();
            CHECK_OK(model_open());
        }
        finish();
    }
}

static int (*real_linkat)(const gd_env *env, int dir, const char *from,
                          const char *to);

static int
link_all_but_part_1(const gd_env *env, int dir, const char *from,
                    const char *to)
{
    return strstr(to, "_1_2") != NULL ? -EIO : real_linkat(env, dir, from, to);
}

/* The checkpoint stops behind its first part, and then there is room for the
 * copies: the edition has no mark, and is made again. */
TEST(test_copies_behind_a_part)
{
    begin(false);
    for (int i = 0; i < 8; i++) {
        CHECK_OK(model_write(0, 2 * P));
    }
    CHECK_OK(model_flush());
    model_kill();
    fill_disk(room_for_a_part);
    real_linkat = FAULTS->env.linkat;
    FAULTS->env.linkat = link_all_but_part_1;
    CHECK_OK(model_open());
    CHECK_INT(model_write(0, 1), GD_NOSPACE);
    CHECK_INT(model_checkpoint(), GD_IO);
    FAULTS->env.linkat = real_linkat;
    empty_disk();
    model_compare();
    CHECK_OK(model_checkpoint());
    model_compare();
    finish();
}

static void
kill_behind_many_writes(void)
{
    begin(false);
    for (int i = 0; i < 8; i++) {
        CHECK_OK(model_write(0, 2 * P));
    }
    CHECK_OK(model_flush());
    model_kill();
}

/* The owner waits for space, and the disk has room for the editions of what it
 * found, not for the copies. */
static void
begin_with_room_for_editions(void)
{
    kill_behind_many_writes();
    fill_disk(no_room);
    CHECK_OK(model_open());
    CHECK_INT(model_write(0, 1), GD_NOSPACE);
    FAULTS->env.free_space = room_for_a_part;
}

/* A resizing makes it writable, too. */
TEST(test_resize_instead_of_copies)
{
    begin_with_room_for_editions();
    CHECK_OK(model_resize(5 * P));
    model_compare();
    empty_disk();
    finish();
}

static const char *unlinkable; /* part of names that get no link */
static unsigned links_left;    /* of these */

static int
link_some(const gd_env *env, int dir, const char *from, const char *to)
{
    return strstr(to, unlinkable) != NULL && links_left-- == 0
               ? -ENOSPC
               : real_linkat(env, dir, from, to);
}

static void
refuse_link(const char *name, unsigned after)
{
    unlinkable = name;
    links_left = after;
    real_linkat = FAULTS->env.linkat;
    FAULTS->env.linkat = link_some;
}

/* There is little room, so not even the first try is of several parts, whose
 * blocks a second one would store again. */
TEST(test_no_copies_one_part_at_a_time)
{
    kill_behind_many_writes();
    fill_disk(room_for_a_part);
    refuse_link("images/v_", 2);
    CHECK_OK(model_open());
    CHECK_INT(model_write(0, 1), GD_NOSPACE);
    FAULTS->env.linkat = real_linkat;
    model_compare();
    CHECK_OK(model_checkpoint());
    empty_disk();
    finish();
}

/* The editions are there, and the head that has their marks is not. */
TEST(test_no_head_behind_the_editions)
{
    for (int outcome = 0; outcome < 3; outcome++) {
        begin_with_room_for_editions();
        refuse_link("journal-", 0);
        CHECK_INT(model_checkpoint(), GD_NOSPACE);
        FAULTS->env.linkat = real_linkat;
        model_compare();
        CHECK_INT(checkpoints(), 0);
        if (outcome == 0) {
            CHECK_OK(model_checkpoint());
            CHECK_INT(checkpoints(), 1);
            model_compare();
        } else if (outcome == 1) {
            model_kill();
        } else {
            model_crash();
        }
        empty_disk();
        finish();
    }
}

static int
link_without_sync(const gd_env *env, int dir, const char *from, const char *to)
{
    int rc = real_linkat(env, dir, from, to);
    if (strstr(to, "journal-") != NULL) {
        fault_env_fail(FAULTS, FAULT_FSYNC, 1, EIO, false);
    }
    return rc;
}

/* The head is there, and may be lost: this owner writes no more, and the next
 * one finds either. */
TEST(test_unsynced_head_behind_the_editions)
{
    for (int crash = 0; crash < 2; crash++) {
        gd_volume_info info;
        begin_with_room_for_editions();
        real_linkat = FAULTS->env.linkat;
        FAULTS->env.linkat = link_without_sync;
        CHECK_INT(model_checkpoint(), GD_IO);
        FAULTS->env.linkat = real_linkat;
        fault_env_heal(FAULTS);
        gd_volume_get_info(the_volume, &info);
        CHECK(info.is_read_only);
        CHECK_INT(model_flush(), GD_IO);
        CHECK_INT(model_checkpoint(), GD_IO);
        model_compare();
        empty_disk();
        if (crash) {
            model_crash();
        } else {
            model_kill();
        }
        finish();
    }
}

static int (*real_lock)(const gd_env *env, int fd, uint64_t byte, short type);
static gd_status written_in_lock;

static int
write_in_lock(const gd_env *env, int fd, uint64_t byte, short type)
{
    if (type != F_WRLCK) {
        return real_lock(env, fd, byte, type);
    }
    FAULTS->env.lock = real_lock;
    written_in_lock = model_write(0, 1);
    return -EAGAIN; /* another process has it */
}

/* While it waited for space, the owner has lost its locks: it accepts no write
 * before it knows that it has them (V1). */
TEST(test_owner_before_writes)
{
    begin(false);
    CHECK_OK(model_write(0, 4 * P));
    CHECK_OK(model_flush());
    model_kill();
    fill_disk(little_room);
    CHECK_OK(model_open());
    empty_disk();
    real_lock = FAULTS->env.lock;
    FAULTS->env.lock = write_in_lock;
    gd_volume_info info;
    alarm(60); /* if the write waits for the lock's caller */
    CHECK_INT(model_flush(), GD_BUSY);
    alarm(0);
    CHECK_INT(written_in_lock, GD_NOSPACE);
    gd_volume_get_info(the_volume, &info);
    CHECK(info.is_read_only); /* no client is to write */
    FAULTS->env.lock = real_lock;
    CHECK_INT(model_write(0, 1), GD_BUSY);
    CHECK_CONTAINS(model_words(), "disk takes no more writes");
    model_compare();
    model_kill();
    finish();
}

static uint64_t locks_left; /* until another process has the volume */
static unsigned cut_off; /* owners that found out */

static int
lose_at_lock(const gd_env *env, int fd, uint64_t byte, short type)
{
    if (type != F_WRLCK || (locks_left > 0 && --locks_left > 0)) {
        return real_lock(env, fd, byte, type);
    }
    scratch_write(&the_scratch, "volumes/disk/journal-ffffffff", "", 1, 0);
    return -EAGAIN;
}

/* Returns what a checkpoint comes to if the owner is cut off at its nth lock. */
static gd_status
lose_in_checkpoint(uint64_t nth, gd_error *err, bool *met)
{
    gd_volume_info info;
    begin(false);
    real_lock = FAULTS->env.lock;
    FAULTS->env.lock = lose_at_lock;
    locks_left = nth;
    gd_status s = gd_volume_checkpoint(the_volume, err);
    FAULTS->env.lock = real_lock;
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

static ssize_t (*real_pread)(const gd_env *env, int fd, void *buf, size_t len,
                             uint64_t offset);
static int other_lock;

/* Meanwhile the server drops the locks, and another owner begins a journal. */
static ssize_t
other_in_read(const gd_env *env, int fd, void *buf, size_t len,
              uint64_t offset)
{
    FAULTS->env.pread = real_pread;
    scratch_drop_locks();
    other_lock = openat(the_scratch.root, "volumes/disk/lock",
                        O_RDWR | O_CLOEXEC);
    CHECK_INT(real_lock(env, other_lock, 0, F_WRLCK), 0);
    scratch_write(&the_scratch, "volumes/disk/journal.new-other", "", 1, 0);
    return real_pread(env, fd, buf, len, offset);
}

/* An owner that was cut off while it read the journals removes no file of the
 * next owner (V2). */
TEST(test_file_of_the_next_owner)
{
    begin(false);
    model_kill();
    real_pread = FAULTS->env.pread;
    real_lock = gd_env_posix()->lock;
    FAULTS->env.pread = other_in_read;
    CHECK_INT(model_open(), GD_BUSY);
    CHECK(scratch_exists(&the_scratch, "volumes/disk/journal.new-other"));
    close(other_lock);
    finish();
}

/* ---- owners that were cut off (V1) ---- */

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
    fault_env_fail(FAULTS, FAULT_UNLINKAT, 1, EIO, true);
    fault_env_fail(FAULTS, FAULT_FTRUNCATE, 1, EIO, true);
    model_close();
    fault_env_heal(FAULTS);
    gd_repo_close(the_repo);
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
    fill_disk(no_room);
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
    finish();
}

/* The disk has room for editions then. */
TEST(test_successor_of_an_owner_that_waits)
{
    begin_to_wait();
    replace_owner(2 * P);
    FAULTS->env.free_space = room_for_a_part;
    CHECK_INT(gd_volume_checkpoint(former, &the_scratch.err), GD_BUSY);
    CHECK_INT(gd_volume_final_checkpoint(former, &the_scratch.err), GD_BUSY);
    CHECK_INT(gd_volume_write(former, (const uint8_t *)"", 1, 0,
                              &the_scratch.err), GD_BUSY);
    CHECK_CONTAINS(model_words(), "takes no more writes");
    FAULTS->env.free_space = real_space;
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
    return real_lock(env, fd, byte, type);
}

/* It is cut off while it opens the volume: the opening fails, so nobody goes on
 * with the volume, as a roll-back would. */
TEST(test_successor_of_an_owner_that_opens)
{
    begin(false);
    model_kill();
    fill_disk(no_room);
    real_lock = FAULTS->env.lock;
    FAULTS->env.lock = lose_lock;
    held = 2; /* the lock itself, and before it removes new files */
    CHECK_INT(model_open(), GD_BUSY);
    FAULTS->env.lock = real_lock;
    empty_disk();
    finish();
}

/* It knows already that it was cut off. */
TEST(test_successor_of_an_owner_that_knows)
{
    begin_to_wait();
    empty_disk();
    real_lock = FAULTS->env.lock;
    FAULTS->env.lock = write_in_lock;
    CHECK_INT(model_flush(), GD_BUSY);
    FAULTS->env.lock = real_lock;
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
    begin(false);
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

static int (*real_list)(const gd_env *env, int dir, const char *path,
                        void (*visit)(void *arg, const char *name), void *arg);
static unsigned lists; /* of the journals, until the owner is replaced */

static int
replace_in_list(const gd_env *env, int dir, const char *path,
                void (*visit)(void *arg, const char *name), void *arg)
{
    int rc = real_list(env, dir, path, visit, arg);
    if (strcmp(path, "volumes/disk") == 0 && --lists == 0) {
        FAULTS->env.list = real_list;
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
        real_list = FAULTS->env.list;
        FAULTS->env.list = replace_in_list;
        gd_status s = model_checkpoint();
        FAULTS->env.list = real_list;
        if (lists > 0) {
            CHECK_OK(s);
            finish();
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

/* ---- recycled journals (V10) ---- */

static unsigned
spares(void)
{
    return (unsigned)scratch_count(&the_scratch, "volumes/disk",
                                   "journal.new", NULL);
}

/* The inode of the active journal's file. */
static ino_t
active_inode(void)
{
    char name[GD_NAME_SIZE];
    gd_volume_info info;
    struct stat st = {0};
    gd_volume_get_info(the_volume, &info);
    gd_volume_journal_name("disk", info.head.journal, name);
    CHECK(fstatat(the_scratch.root, name, &st, 0) == 0);
    return st.st_ino;
}

/* Two files take turns as journals. */
TEST(test_journals_are_recycled)
{
    ino_t inodes[6];
    begin(false);
    for (int i = 0; i < 6; i++) {
        inodes[i] = active_inode();
        CHECK_OK(model_write(0, P));
        CHECK_OK(model_flush());
        CHECK_OK(model_write(0, 1));
        CHECK_OK(model_checkpoint());
        CHECK_INT(spares(), 1);
        CHECK_INT(scratch_count(&the_scratch, "volumes/disk", "journal-",
                                NULL), 1);
        CHECK(i < 2 || inodes[i] == inodes[i - 2]);
        model_compare();
    }
    CHECK(inodes[0] != inodes[1]);
    CHECK_OK(model_write(0, 1));
    CHECK_OK(model_flush());
    gd_volume_info info;
    gd_volume_get_info(the_volume, &info);
    CHECK(journal_size() > (int64_t)info.journal_bytes + P * 512);
    gd_volume_give_up_space(the_volume);
    CHECK_INT(journal_size(), info.journal_bytes);
    CHECK_INT(spares(), 0);
    finish();
}

/* An owner that is closed leaves no spare, and one that dies leaves one to be
 * removed by the next. */
TEST(test_spare_of_a_former_owner)
{
    for (int dies = 0; dies < 2; dies++) {
        begin(false);
        CHECK_OK(model_checkpoint());
        CHECK_OK(model_write(5, 9));
        if (dies) {
            model_kill();
        } else {
            model_close();
        }
        CHECK_INT(spares(), dies);
        CHECK_OK(model_open());
        CHECK_INT(spares(), 0);
        model_compare();
        finish();
    }
}

/* The owner dies with old records behind its own, of the same lengths. */
TEST(test_old_records_behind_the_end)
{
    for (int crash = 0; crash < 2; crash++) {
        for (uint64_t rounds = 2; rounds < 5; rounds++) {
            begin(false);
            for (uint64_t i = 0; i < rounds; i++) {
                for (uint64_t k = 0; k < 9 - i; k++) {
                    CHECK_OK(model_write(10 * k, 3));
                    CHECK_OK(model_flush());
                }
                CHECK_OK(i + 1 < rounds ? model_checkpoint() : GD_OK);
            }
            if (crash) {
                model_crash();
            } else {
                model_kill();
            }
            CHECK_OK(model_open());
            model_compare();
            finish();
        }
    }
}

static unsigned overwrites;

/* The file of the journal that is read is to be written over meanwhile. */
static ssize_t
overwrite_in_read(const gd_env *env, int fd, void *buf, size_t len,
                  uint64_t offset)
{
    the_scratch.f.env.pread = real_pread;
    for (unsigned i = 0; i < overwrites; i++) {
        CHECK_OK(model_write(0, 8));
        CHECK_OK(model_checkpoint());
    }
    CHECK_OK(model_write(0, 8));
    return real_pread(env, fd, buf, len, offset);
}

/* A journal that somebody reads is not recycled. */
TEST(test_read_journal_is_not_recycled)
{
    for (overwrites = 1; overwrites <= 3; overwrites++) {
        uint8_t before[8 * 512], got[8 * 512];
        begin(false);
        CHECK_OK(model_checkpoint());
        CHECK_OK(model_write(0, 8));
        CHECK_OK(gd_volume_read(the_volume, before, sizeof before, 0,
                                &the_scratch.err));
        real_pread = FAULTS->env.pread;
        FAULTS->env.pread = overwrite_in_read;
        CHECK_OK(gd_volume_read(the_volume, got, sizeof got, 0,
                                &the_scratch.err));
        FAULTS->env.pread = real_pread;
        CHECK(memcmp(before, got, sizeof got) == 0);
        finish();
    }
}

/* Nobody holds the journals of which another process reads the head. */
TEST(test_head_is_read_beside_recycling)
{
    for (overwrites = 1; overwrites <= 3; overwrites++) {
        gd_volume_head head;
        gd_volume_info before, after;
        begin(false);
        CHECK_OK(model_checkpoint());
        CHECK_OK(model_write(0, 8));
        gd_volume_get_info(the_volume, &before);
        real_pread = FAULTS->env.pread;
        FAULTS->env.pread = overwrite_in_read;
        CHECK_OK(gd_volume_read_head(the_repo, "disk", &head,
                                     &the_scratch.err));
        FAULTS->env.pread = real_pread;
        gd_volume_get_info(the_volume, &after);
        CHECK(head.journal >= before.head.journal &&
              head.journal <= after.head.journal);
        CHECK_INT(head.size, after.head.size);
        CHECK(memcmp(head.volume_id, after.head.volume_id, GD_ID_SIZE) == 0);
        finish();
    }
}

/* A spare does not keep a write from its room, nor is one kept without room. */
TEST(test_spare_on_a_full_disk)
{
    begin(false);
    CHECK_OK(model_checkpoint());
    CHECK_INT(spares(), 1);
    int (*real)(const gd_env *, int, gd_space *) = FAULTS->env.free_space;
    FAULTS->env.free_space = little_room;
    the_repo->params.reserve = 64 << 20;
    CHECK_OK(model_write(0, 1));
    CHECK_INT(spares(), 1);
    CHECK_INT(model_write(0, 4 * P), GD_NOSPACE);
    CHECK_INT(spares(), 0);
    FAULTS->env.free_space = real;
    the_repo->params.reserve = 0;
    CHECK_OK(model_checkpoint());
    CHECK_INT(spares(), 1);
    finish();
}

static int
link_when_trimmed(const gd_env *env, int dir, const char *from, const char *to)
{
    return strstr(to, "images/v_") != NULL && journal_size() > 8192
               ? -ENOSPC
               : real_linkat(env, dir, from, to);
}

/* Nor does the space of the active journal keep a checkpoint from its room. */
TEST(test_kept_space_or_a_checkpoint)
{
    begin(false);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(model_write(0, 2 * P));
        CHECK_OK(model_checkpoint());
    }
    CHECK_OK(model_write(0, 1));
    real_linkat = FAULTS->env.linkat;
    FAULTS->env.linkat = link_when_trimmed;
    CHECK_OK(model_checkpoint());
    FAULTS->env.linkat = real_linkat;
    model_compare();
    finish();
}

/* A journal that is stored, and not recycled, gives its blocks back at once. */
TEST(test_stored_journal_is_cut)
{
    char name[GD_NAME_SIZE];
    gd_volume_info info;
    struct stat st = {.st_size = -1};
    begin(false);
    gd_volume_get_info(the_volume, &info);
    gd_volume_journal_name("disk", info.head.journal, name);
    int fd = openat(the_scratch.root, name, O_RDONLY | O_CLOEXEC);
    fill_disk(room_for_a_part);
    CHECK_OK(model_checkpoint());
    empty_disk();
    CHECK(fstat(fd, &st) == 0 && st.st_size == 0 && st.st_nlink == 0);
    close(fd);
    finish();
}

/* Nor does a spare keep its room from others. */
TEST(test_spare_or_an_upload)
{
    for (int reserve = 0; reserve < 2; reserve++) {
        begin(false);
        CHECK_OK(model_checkpoint());
        gd_volume_renew(the_volume);
        CHECK_INT(spares(), 1);
        fill_disk(little_room);
        the_repo->params.reserve *= (uint64_t)reserve;
        gd_volume_renew(the_volume);
        CHECK_INT(spares(), 0);
        CHECK_OK(model_checkpoint());
        CHECK_INT(spares(), 0);
        empty_disk();
        finish();
    }
}

/* The zeros that a shrinking volume needs come before a spare, too. */
TEST(test_spare_or_a_shrink)
{
    begin(false);
    CHECK_OK(model_checkpoint());
    CHECK_INT(spares(), 1);
    fault_env_fail(FAULTS, FAULT_PWRITEV, 1, ENOSPC, false);
    CHECK_OK(model_resize(P + 30));
    fault_env_heal(FAULTS);
    model_compare();
    finish();
}

/* A forked child that closes the volume takes nothing from its owner. */
TEST(test_close_in_a_child)
{
    int status = 0;
    begin(false);
    CHECK_OK(model_write(0, P));
    CHECK_OK(model_checkpoint());
    CHECK_OK(model_write(0, 1));
    CHECK_OK(model_flush());
    int64_t size = journal_size();
    CHECK_INT(spares(), 1);
    pid_t child = fork();
    if (child == 0) {
        gd_volume_close(the_volume);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK_INT(spares(), 1);
    CHECK_INT(journal_size(), size);
    CHECK_OK(model_checkpoint());
    model_compare();
    finish();
}

/* The reserve is no matter for a write over bytes that the file has.  If the file
 * system has no room for another one, the spare goes first. */
TEST(test_spare_or_a_write)
{
    begin(false);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(model_write(0, P));
        CHECK_OK(model_checkpoint());
    }
    CHECK_INT(spares(), 1);
    int (*real)(const gd_env *, int, gd_space *) = FAULTS->env.free_space;
    FAULTS->env.free_space = little_room;
    the_repo->params.reserve = 64 << 20;
    CHECK_OK(model_write(0, P / 2)); /* more than the room */
    CHECK_INT(spares(), 1);
    FAULTS->env.free_space = real;
    the_repo->params.reserve = 0;
    fault_env_fail(FAULTS, FAULT_PWRITEV, 1, ENOSPC, false);
    CHECK_OK(model_write(7, P));
    fault_env_heal(FAULTS);
    CHECK_INT(spares(), 0);
    model_compare();
    finish();
}

static int
list_no_images(const gd_env *env, int dir, const char *path,
               void (*visit)(void *arg, const char *name), void *arg)
{
    return strcmp(path, "images") == 0
               ? -EIO
               : real_list(env, dir, path, visit, arg);
}

/* Files of an earlier owner may stay: the volume is opened. */
TEST(test_garbage_that_stays)
{
    begin(false);
    model_kill();
    real_list = FAULTS->env.list;
    FAULTS->env.list = list_no_images;
    CHECK_OK(model_open());
    FAULTS->env.list = real_list;
    model_compare();
    finish();
}

/* Several parts at once fail, so they are stored one at a time. */
TEST(test_parts_one_at_a_time)
{
    uint64_t made;
    begin(false);
    CHECK_OK(model_checkpoint());
    made = checkpoints();
    for (uint64_t i = 0; i < 4; i++) {
        CHECK_OK(model_write(i * P, 2));
    }
    /* The first is that of the journal's name. */
    fault_env_fail(FAULTS, FAULT_LINKAT, 4, ENOSPC, false);
    CHECK_OK(model_checkpoint());
    fault_env_heal(FAULTS);
    CHECK_INT(checkpoints(), made + 1);
    model_compare();
    finish();
}

static uint64_t
syncs_of_checkpoint(gd_status wanted)
{
    uint64_t before = fault_env_count(FAULTS, FAULT_FSYNC) +
                      fault_env_count(FAULTS, FAULT_FDATASYNC);
    CHECK_INT(model_checkpoint(), wanted);
    return fault_env_count(FAULTS, FAULT_FSYNC) +
           fault_env_count(FAULTS, FAULT_FDATASYNC) - before;
}

static void
write_to_parts(void)
{
    for (uint64_t i = 0; i < 4; i++) {
        CHECK_OK(model_write(i * P, 2));
    }
}

/* After a checkpoint without room, the next one does not begin with several
 * parts, which would take the room that one needs. */
TEST(test_one_part_after_no_room)
{
    begin(false);
    CHECK_OK(model_checkpoint());
    write_to_parts();
    uint64_t together = syncs_of_checkpoint(GD_OK);
    write_to_parts();
    fault_env_fail(FAULTS, FAULT_LINKAT, 4, ENOSPC, true);
    (void)syncs_of_checkpoint(GD_NOSPACE);
    fault_env_heal(FAULTS);
    uint64_t singly = syncs_of_checkpoint(GD_OK);
    CHECK(singly > together);
    write_to_parts();
    CHECK_INT(syncs_of_checkpoint(GD_OK), together);
    finish();
}

/* A checkpoint that failed is tried again, however little it has to store. */
TEST(test_failed_checkpoint_is_made_again)
{
    begin(false);
    CHECK_OK(model_checkpoint());
    CHECK_OK(model_write(0, 1));
    CHECK(!gd_volume_is_worth_checkpoint(the_volume));
    CHECK(!gd_volume_needs_checkpoint(the_volume));
    fault_env_fail(FAULTS, FAULT_LINKAT, 2, EIO, true);
    CHECK(model_checkpoint() != GD_OK);
    fault_env_heal(FAULTS);
    CHECK(gd_volume_needs_checkpoint(the_volume));
    CHECK_OK(model_checkpoint());
    CHECK(!gd_volume_needs_checkpoint(the_volume));
    finish();
}

static ssize_t (*real_pwritev)(const gd_env *env, int fd,
                               const struct iovec *iov, int count,
                               uint64_t offset);
static unsigned reads_meanwhile;

static ssize_t
read_in_write(const gd_env *env, int fd, const struct iovec *iov, int count,
              uint64_t offset)
{
    uint8_t got[512];
    FAULTS->env.pwritev = real_pwritev;
    CHECK_OK(gd_volume_read(the_volume, got, sizeof got, 0,
                            &the_scratch.err));
    if (++reads_meanwhile < 2) { /* one of the head, and one of the copies */
        FAULTS->env.pwritev = read_in_write;
    }
    return real_pwritev(env, fd, iov, count, offset);
}

/* The volume can be read while the tail is copied. */
TEST(test_reads_beside_the_copies)
{
    begin(false);
    CHECK_OK(model_write(0, 4 * P));
    CHECK_OK(model_flush());
    model_kill();
    int (*real)(const gd_env *, int, gd_space *) = FAULTS->env.free_space;
    FAULTS->env.free_space = little_room;
    uint64_t reserve = the_repo->params.reserve;
    the_repo->params.reserve = 64 << 20;
    CHECK_OK(model_open());
    FAULTS->env.free_space = real;
    the_repo->params.reserve = reserve;
    real_pwritev = FAULTS->env.pwritev;
    FAULTS->env.pwritev = read_in_write;
    reads_meanwhile = 0;
    alarm(120); /* if the read waits for the copies */
    gd_status s = gd_volume_checkpoint(the_volume, &the_scratch.err);
    alarm(0);
    FAULTS->env.pwritev = real_pwritev;
    CHECK_OK(s);
    CHECK_INT(reads_meanwhile, 2);
    model_compare();
    finish();
}

static uint64_t read_bytes;

static ssize_t
count_pread(const gd_env *env, int fd, void *buf, size_t len, uint64_t offset)
{
    read_bytes += len;
    return real_pread(env, fd, buf, len, offset);
}

/* An opening reads each journal once, even if a checkpoint was not ended. */
TEST(test_journals_are_read_once)
{
    begin(false);
    CHECK_OK(model_write(0, 4 * P));
    fault_env_fail(FAULTS, FAULT_LINKAT, 1, EIO, false);
    CHECK(model_checkpoint() != GD_OK);
    fault_env_heal(FAULTS);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(model_write(i, 4 * P));
    }
    CHECK_OK(model_flush());
    CHECK_OK(model_write(0, 1)); /* it proves what is durable */
    gd_volume_info info;
    gd_volume_get_info(the_volume, &info);
    CHECK(info.head.needed < info.head.journal);
    model_kill();
    real_pread = FAULTS->env.pread;
    FAULTS->env.pread = count_pread;
    read_bytes = 0;
    CHECK_OK(model_open());
    FAULTS->env.pread = real_pread;
    CHECK(read_bytes < info.journal_bytes + 150000);
    finish();
}

/* Old records do not come back over newer ones when a write failed between. */
TEST(test_failed_write_is_overwritten)
{
    begin(false);
    fault_env_shorten(FAULTS, 65536 + 56);
    fault_env_fail(FAULTS, FAULT_PWRITEV, 3, ENOSPC, true);
    CHECK_INT(model_write(0, 4 * P), GD_NOSPACE);
    fault_env_heal(FAULTS);
    CHECK_OK(model_write(P, P)); /* as long as their first record */
    CHECK_OK(model_flush());
    model_kill();
    finish();
}

/* A marked recipe is missing: no other bytes are read in its place (V7). */
TEST(test_missing_recipe)
{
    char name[GD_NAME_SIZE];
    uint8_t byte[512];
    begin(true);
    CHECK_OK(model_checkpoint());
    model_close();
    CHECK_INT(scratch_count(&the_scratch, "images", "v_", NULL), 5);
    gd_volume_head head;
    CHECK_OK(gd_volume_read_head(the_repo, "disk", &head, &the_scratch.err));
    strcpy(name, "images/");
    gd_volume_edition_id(head.volume_id, 0, 2, name + strlen(name));
    CHECK(unlinkat(the_scratch.root, name, 0) == 0);
    CHECK_OK(model_open());
    CHECK_INT(gd_volume_read(the_volume, byte, 512, 0, &the_scratch.err),
              GD_CORRUPT);
    CHECK_CONTAINS(model_words(), name);
    CHECK_OK(gd_volume_read(the_volume, byte, 512, 3 * P * 512,
                            &the_scratch.err));
    model_delete();
    model_teardown();
}

/* Damages a journal that is needed, but not the newest; returns the words of
 * the resulting error. */
static const char *
spoil(int how, const char *name, uint64_t end)
{
    uint8_t raw[GD_VOLUME_HEAD];
    gd_volume_head head;
    switch (how) {
    case 0:
        CHECK(unlinkat(the_scratch.root, name, 0) == 0);
        return "is missing; what was written to it is lost";
    case 1:
        scratch_truncate(&the_scratch, name, end - 8);
        return "is lost, though it was acknowledged";
    case 2:
        scratch_flip(&the_scratch, name, end - 8, 1);
        return "is lost, though it was acknowledged";
    default:
        scratch_read(&the_scratch, name, raw, sizeof raw, 0);
        CHECK_OK(gd_volume_head_decode(raw, name, &head, &the_scratch.err));
        head.volume_id[0] ^= 1;
        gd_volume_head_encode(&head, raw);
        scratch_write(&the_scratch, name, raw, sizeof raw, 0);
        return "is of another volume";
    }
}

/* A needed journal is missing, ends early, is damaged, or is another
 * volume's. */
TEST(test_spoiled_chain)
{
    for (int how = 0; how < 4; how++) {
        char first[GD_NAME_SIZE];
        begin(false);
        model_kill();
        CHECK_OK(model_open()); /* a second journal, which needs the first */
        CHECK_OK(model_write(3, 3));
        CHECK_OK(model_checkpoint()); /* stored: the first is no longer needed */
        CHECK_OK(model_write(9, 3));
        /* A checkpoint that fails leaves a frozen journal. The first link is
         * the next journal's. */
        fault_env_fail(FAULTS, FAULT_LINKAT, 2, EIO, true);
        CHECK(model_checkpoint() != GD_OK);
        fault_env_heal(FAULTS);
        CHECK_OK(model_write(12, 3));
        CHECK_OK(model_flush());
        CHECK_OK(model_write(12, 1)); /* it proves what is durable */
        model_close();
        CHECK_INT(scratch_count(&the_scratch, "volumes/disk", "journal-",
                                NULL), 2);
        gd_volume_head head;
        CHECK_OK(gd_volume_read_head(the_repo, "disk", &head,
                                     &the_scratch.err));
        CHECK_INT(head.needed, head.journal - 1);
        gd_volume_journal_name("disk", head.needed, first);
        const char *words = spoil(how, first, head.before);
        CHECK_INT(model_open(), GD_CORRUPT);
        CHECK_CONTAINS(model_words(), words);
        the_volume = NULL;
        model_delete();
        model_teardown();
    }
}

/* Journals of owners that were killed cannot be stored for want of space: the
 * volume can be opened, read and written all the same. */
TEST(test_opened_on_a_full_disk)
{
    begin(false);
    for (unsigned i = 0; i < 8; i++) {
        model_kill();
        /* The first link is the journal's. */
        fault_env_fail(FAULTS, FAULT_LINKAT, 2, ENOSPC, true);
        CHECK_OK(model_open());
        CHECK_OK(model_write(3 * i, 3));
        CHECK_INT(model_checkpoint(), GD_NOSPACE);
        fault_env_heal(FAULTS);
    }
    finish();
}

/* There is no room for the owner's own journal: everything can be read, and
 * nothing written. When there is room, a checkpoint makes it writable. */
TEST(test_opened_without_room_for_a_journal)
{
    static const fault_call calls[] = {FAULT_PWRITEV, FAULT_LINKAT};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (int settled = 0; settled < 2; settled++) {
            gd_volume_info info;
            begin(false);
            if (settled) {
                CHECK_OK(model_checkpoint());
                model_close();
            } else {
                model_kill();
            }
            fault_env_fail(FAULTS, calls[i], 1, ENOSPC, true);
            CHECK_OK(model_open());
            gd_volume_get_info(the_volume, &info);
            CHECK(info.is_read_only);
            CHECK_CONTAINS(info.broken, "until the disk has room");
            model_compare();
            CHECK_INT(model_write(3, 3), GD_NOSPACE);
            CHECK_INT(model_checkpoint(), GD_NOSPACE);
            CHECK_INT(model_resize(2 * P), GD_NOSPACE);
            CHECK(gd_volume_needs_checkpoint(the_volume));
            fault_env_heal(FAULTS);
            CHECK_OK(model_checkpoint());
            gd_volume_get_info(the_volume, &info);
            CHECK(!info.is_read_only && info.broken[0] == '\0');
            use();
            finish();
        }
    }
}

/* A head claims that billions of journals are needed: no memory is allocated
 * for them. */
TEST(test_long_chain)
{
    char name[GD_NAME_SIZE];
    gd_volume_head head;
    uint8_t raw[GD_VOLUME_HEAD];
    model_setup(0);
    CHECK_OK(model_create(P));
    CHECK_OK(gd_volume_read_head(the_repo, "disk", &head, &the_scratch.err));
    head.journal = UINT32_MAX;
    gd_volume_head_encode(&head, raw);
    gd_volume_journal_name("disk", UINT32_MAX, name);
    scratch_write(&the_scratch, name, raw, sizeof raw, 0);
    CHECK_INT(model_open(), GD_CORRUPT);
    CHECK_CONTAINS(model_words(), "journal 2 of volume disk is missing");
    model_teardown();
}

/* V8: journals that are no longer needed are ignored when a crash brings them
 * back. */
TEST(test_old_journal_comes_back)
{
    static uint8_t old[1 << 20];
    char name[GD_NAME_SIZE];
    begin(false);
    gd_volume_head head;
    CHECK_OK(gd_volume_read_head(the_repo, "disk", &head, &the_scratch.err));
    gd_volume_journal_name("disk", head.journal, name);
    int64_t length = scratch_size(&the_scratch, name);
    CHECK(length > 0 && length <= (int64_t)sizeof old);
    scratch_read(&the_scratch, name, old, (size_t)length, 0);
    CHECK_OK(model_checkpoint());
    CHECK_OK(model_write(100, 60));
    CHECK_OK(model_flush());
    CHECK(!scratch_exists(&the_scratch, name));
    scratch_write(&the_scratch, name, old, (size_t)length, 0);
    model_kill();
    finish();
}

/* Random operations run, with kills and crashes between them. */
static void
run_random(uint64_t seed)
{
    begin(seed % 2 == 0);
    for (int i = 0; i < 150 / SWEEP_STRIDE && check_failures == 0; i++) {
        uint64_t first = next_random(&seed) % model_sectors();
        uint64_t count = 1 + next_random(&seed) % 40;
        count = minimum(count, model_sectors() - first);
        switch (next_random(&seed) % 20) {
        case 0:
            model_kill();
            CHECK_OK(model_open());
            model_compare();
            break;
        case 1:
            model_crash();
            CHECK_OK(model_open());
            if (the_volume != NULL) {
                model_compare();
            }
            break;
        case 2:
        case 3:
            CHECK_OK(model_checkpoint());
            break;
        case 4:
        case 5:
        case 6:
            CHECK_OK(model_flush());
            break;
        case 7:
            CHECK_OK(model_zero(first, count));
            break;
        case 8:
            CHECK_OK(i % 4 == 0 ? model_resize(1 + next_random(&seed) %
                                                       MODEL_SECTORS)
                                : model_flush());
            break;
        case 9: /* a sync fails, and the next owner continues */
            fault_env_fail(FAULTS, FAULT_FDATASYNC, 1, EIO, false);
            (void)model_flush();
            fault_env_heal(FAULTS);
            model_kill();
            CHECK_OK(model_open());
            model_compare();
            break;
        default:
            CHECK_OK(model_write(first, count));
        }
        if (the_volume == NULL) {
            break;
        }
    }
    model_close();
    finish();
}

TEST(test_random)
{
    for (uint64_t seed = 1; seed <= 40 / SWEEP_STRIDE; seed++) {
        run_random(seed);
        if (check_failures > 0) {
            fprintf(stderr, "seed %" PRIu64 "\n", seed);
            return;
        }
    }
}

int
main(int argc, char **argv)
{
    const char *wanted = getenv("GLANCE_DEDUP_FAULTS");
    stride = wanted != NULL && strcmp(wanted, "all") == 0 ? 1 : stride;
    return check_main(argc, argv);
}
