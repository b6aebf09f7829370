/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_volume_faults.c - requests of volumes under every fault, after which
 * the owner goes on, is killed, or its machine crashes: flushed data is there,
 * no file is left over, and the volume can be used and deleted (volumes.rst,
 * V1 to V10).
 */
#include "engine/volume/volume.h"

#include "tests/c/support/volume_fixture.h"

/* One of so many cases is tried; with GLANCE_DEDUP_FAULTS=all, every one. */
static uint64_t stride = SWEEP_STRIDE == 1 ? 30 : 270;

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
    {"checkpoint", model_checkpoint},
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
        use_volume();
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
    begin_volume(clone);
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
    finish_volume();
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
    finish_volume();
}

static void
interrupt_deleting(const fault *f, uint64_t nth, bool clone, bool *met)
{
    gd_volume_head head;
    begin_volume(clone);
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
        finish_volume(); /* it was not begun: no data is lost */
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
    finish_volume();
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
    begin_volume(false);
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

/* ---- random operations, with kills and crashes between them ---- */

/* Random operations run, with kills and crashes between them. */
static void
run_random(uint64_t seed)
{
    begin_volume(seed % 2 == 0);
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
    finish_volume();
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
