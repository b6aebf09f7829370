/*
 * test_faults.c - every system call and every allocation of a small day's work
 * fails once: what fails says so, with the right kind of error; what was
 * acknowledged is intact; the same handle goes on as if nothing had been; and
 * nothing leaks.
 */
#include "check.h"
#include "reader.h"
#include "scratch.h"
#include "spool.h"

enum { BLOCK = 512, LENGTH = 90 * BLOCK + 33 };

static scratch x;
static gd_repo *repo;
static uint8_t kept[LENGTH], old[LENGTH], new[LENGTH];

/* Two images; the third, to come, has a third of its blocks in common with
 * each of them. */
static void
setup(bool by_value)
{
    scratch_init(&x);
    x.params.block_size = BLOCK;
    x.params.segment_size = 4096;
    x.params.by_value = by_value;
    x.params.codec = by_value ? GD_CODEC_ZSTD : GD_CODEC_LZ4;
    fill_image(kept, LENGTH, BLOCK, 1000, 1);
    fill_image(old, LENGTH, BLOCK, 1000, 2);
    fill_image(new, LENGTH, BLOCK, 1000, 3);
    memcpy(new, kept, LENGTH / 3);
    memcpy(new + 60 * BLOCK, old, 30 * BLOCK);
    repo = scratch_repo_filter(&x);
    CHECK_INT(put_image(repo, "kept", kept, LENGTH, LENGTH, NULL, &x.err),
              GD_OK);
    CHECK_INT(put_image(repo, "old", old, LENGTH, LENGTH, NULL, &x.err),
              GD_OK);
    gd_repo_close(repo);
    repo = NULL;
}

static void
teardown(void)
{
    CHECK_INT(scratch_destroy(&x), 0);
}

/* Never success with wrong data. */
static gd_status
get(const char *image_id, const uint8_t *data)
{
    bool equal;
    gd_status s = get_image(repo, image_id, data, LENGTH, &equal, &x.err);
    CHECK(s != GD_OK || equal);
    return s;
}

static gd_status
put_new(void)
{
    return put_image(repo, "new", new, LENGTH, 3333, NULL, &x.err);
}

static gd_status
delete_old(void)
{
    return gd_spool_delete(x.env, x.root, &x.params, "old", NULL, &x.err);
}

enum { OPEN, PUT, GET_NEW, GET_KEPT, DELETE, STEPS };

/* The work; what each step came to.  The handle stays open. */
static void
work(gd_status results[STEPS])
{
    static const char *const names[] = {"open", "put", "get new", "get kept",
                                        "delete"};
    for (int i = 0; i < STEPS; i++) {
        gd_status s = GD_OK;
        x.err = (gd_error){0};
        switch (i) {
        case OPEN:
            s = scratch_try_repo(&x, true, &repo);
            break;
        case PUT:
            s = put_new();
            break;
        case GET_NEW:
            s = get("new", new);
            break;
        case GET_KEPT:
            s = get("kept", kept);
            break;
        case DELETE:
            s = delete_old();
            break;
        }
        results[i] = s;
        /* An error has words, and its own status in them. */
        if (s != GD_OK && (!CHECK_INT(x.err.status, s) ||
                           !CHECK(strlen(x.err.text) > 10))) {
            fprintf(stderr, "%s: %s\n", names[i], x.err.text);
        }
        if (i == OPEN && s != GD_OK) {
            while (++i < STEPS) {
                results[i] = GD_CLOSED;
            }
        }
    }
}

/* With everything in order again: the rest of the work can be done, by the
 * same handle and by another. */
static void
check_after(const gd_status results[STEPS])
{
    if (results[OPEN] != GD_OK) {
        repo = scratch_repo_filter(&x);
    }
    for (int handle = 0; handle < 2; handle++) {
        CHECK_INT(get("kept", kept), GD_OK);
        gd_status s = get("new", new);
        if (results[PUT] == GD_OK || handle == 1) {
            CHECK_INT(s, GD_OK);
        } else if (s != GD_OK) {
            CHECK_INT(s, GD_NOTFOUND);
            if (!CHECK_INT(put_new(), GD_OK)) {
                fprintf(stderr, "second attempt: %s\n", x.err.text);
            }
            CHECK_INT(get("new", new), GD_OK);
        }
        s = get("old", old);
        if (results[DELETE] == GD_OK || handle == 1) {
            CHECK_INT(s, GD_NOTFOUND);
        } else if (s != GD_NOTFOUND) {
            CHECK_INT(s, GD_OK);
            CHECK_INT(delete_old(), GD_OK);
        }
        gd_repo_close(repo);
        repo = handle == 0 ? scratch_repo_filter(&x) : NULL;
    }
    /* At most the entry of the upload that failed is left over. */
    CHECK(scratch_count(&x, "spool", "T-", NULL) <= 4);
    CHECK(scratch_count(&x, "spool", "D-", NULL) <= 2);
    CHECK(scratch_count(&x, "spool", "G-", NULL) <= 1);
}

static bool
was_interrupted(int sys_errno, gd_status s)
{
    return sys_errno == EINTR && s == GD_IO;
}

/* One failure each time; forever: from that call on. */
static void
sweep(bool by_value, fault_call call, int sys_errno, gd_status wanted,
      bool forever)
{
    bool struck = true;
    unsigned failed = 0;
    for (uint64_t n = 1; struck; n += SWEEP_STRIDE) {
        gd_status results[STEPS];
        setup(by_value);
        unsigned before = check_all.failures;
        uint64_t faults = fault_env_faults(&x.f);
        fault_env_fail(&x.f, call, n, sys_errno, forever);
        work(results);
        struck = fault_env_faults(&x.f) > faults;
        fault_env_heal(&x.f);
        for (int i = 0; i < STEPS; i++) {
            gd_status s = results[i];
            bool follows = (i == GET_NEW && results[PUT] != GD_OK &&
                            s == GD_NOTFOUND) ||
                           (results[OPEN] != GD_OK && i > OPEN);
            bool right = s == GD_OK || s == wanted || follows ||
                         was_interrupted(sys_errno, s) ||
                         (forever && s == GD_BUSY);
            if (!CHECK(right)) {
                fprintf(stderr, "step %d: %s\n", i, gd_status_name(s));
            }
            failed += s != GD_OK;
        }
        check_after(results);
        if (check_all.failures > before) {
            fprintf(stderr, "at %s %u, error %d%s%s\n", fault_call_name(call),
                    (unsigned)n, sys_errno, forever ? ", forever" : "",
                    by_value ? ", by value" : "");
            struck = false;
        }
        teardown();
    }
    CHECK(failed > 0 || sys_errno == EINTR);
}

static void
test_each_call_fails_with_eio(void)
{
    sweep(false, FAULT_ANY, EIO, GD_IO, false);
    sweep(true, FAULT_ANY, EIO, GD_IO, false);
}

static void
test_each_call_fails_with_enospc(void)
{
    sweep(false, FAULT_ANY, ENOSPC, GD_NOSPACE, false);
    sweep(false, FAULT_PWRITEV, ENOSPC, GD_NOSPACE, true);
    sweep(false, FAULT_FALLOCATE, ENOSPC, GD_NOSPACE, true);
}

static void
test_each_call_is_interrupted(void)
{
    sweep(false, FAULT_ANY, EINTR, GD_OK, false);
}

static void
test_each_allocation_fails(void)
{
    sweep(false, FAULT_ALLOC, ENOMEM, GD_NOMEM, false);
    sweep(true, FAULT_ALLOC, ENOMEM, GD_NOMEM, false);
    sweep(false, FAULT_ALLOC, ENOMEM, GD_NOMEM, true);
}

static void
test_syncs_fail_from_then_on(void)
{
    sweep(false, FAULT_FDATASYNC, EIO, GD_IO, true);
    sweep(false, FAULT_FSYNC, EIO, GD_IO, true);
}

static void
test_reads_fail_from_then_on(void)
{
    sweep(true, FAULT_PREAD, EIO, GD_IO, true);
    sweep(false, FAULT_OPENAT, EMFILE, GD_IO, true);
}

/* ---- what is no failure at all ---- */

static void
test_signals_and_short_counts(void)
{
    for (unsigned i = 0; i < 4; i++) {
        gd_status results[STEPS];
        setup(i % 2 != 0);
        fault_env_shorten(&x.f, i == 0 ? 0 : 1000 / (i * i));
        fault_env_interrupt(&x.f, 2 + i % 2);
        work(results);
        for (int step = 0; step < STEPS; step++) {
            CHECK_INT(results[step], GD_OK);
        }
        check_after(results);
        teardown();
    }
}

int
main(int argc, char **argv)
{
    BEGIN(argc, argv);
    RUN(test_each_call_fails_with_eio);
    RUN(test_each_call_fails_with_enospc);
    RUN(test_each_call_is_interrupted);
    RUN(test_each_allocation_fails);
    RUN(test_syncs_fail_from_then_on);
    RUN(test_reads_fail_from_then_on);
    RUN(test_signals_and_short_counts);
    return REPORT();
}
