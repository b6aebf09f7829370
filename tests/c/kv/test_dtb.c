/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_dtb.c - the backend's own file: damaged, hostile, cut and torn; and
 * system calls and allocations that fail.
 */
#include "engine/kv/dtbpage.h"

#include <sys/stat.h>

#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"

enum {
    KEYS = 2000,
    CACHE = 8 * 4096,
    SIZE = 64 << 10, /* at least the file's */
    FLIPS = 300,
};

typedef struct fixture {
    fault_env f;
    char *dir;
    char path[256];
    gd_kv_options options;
    gd_kv *kv;
    uint8_t bytes[SIZE]; /* of the file */
    size_t length;
    gd_error err;
} fixture;

static uint64_t
key_of(uint64_t n)
{
    return gd_checksum(&n, 8, 3);
}

static gd_status
open_store(fixture *x)
{
    return gd_kv_open(&x->f.env, GD_KV_DTB, x->path, &x->options, &x->kv,
                      &x->err);
}

static void
close_store(fixture *x)
{
    gd_kv_close(x->kv);
    x->kv = NULL;
}

static gd_status
put_all(fixture *x)
{
    gd_kv_pair pairs[KEYS];
    for (uint64_t n = 0; n < KEYS; n++) {
        pairs[n] = (gd_kv_pair){key_of(n), n + 1};
    }
    return gd_kv_put_batch(x->kv, pairs, KEYS, &x->err);
}

/* Returns the number of keys that are there; none may have another's value.
 * -1: an error. */
static int
count_keys(fixture *x)
{
    int found = 0;
    for (uint64_t n = 0; n < KEYS; n++) {
        uint64_t key = key_of(n), value;
        if (gd_kv_get_batch(x->kv, &key, &value, 1, &x->err) != GD_OK) {
            CHECK(x->err.text[0] != '\0');
            return -1;
        }
        CHECK(value == 0 || value == n + 1);
        found += value != 0;
    }
    return found;
}

static void
file_io(fixture *x, const char *mode)
{
    FILE *file = fopen(x->path, mode);
    if (!CHECK(file != NULL)) {
        exit(1);
    }
    if (mode[0] == 'r') {
        x->length = fread(x->bytes, 1, SIZE, file);
    } else {
        CHECK_INT(fwrite(x->bytes, 1, x->length, file), x->length);
    }
    fclose(file);
}

/* Makes a store with all keys, closes it, and reads its file into bytes. */
static void
setup(fixture *x)
{
    memset(x, 0, sizeof *x);
    fault_env_init(&x->f);
    x->dir = check_mkdir_shm();
    snprintf(x->path, sizeof x->path, "%s/store", x->dir);
    x->options = (gd_kv_options){KEYS, CACHE};
    CHECK_INT(open_store(x), GD_OK);
    CHECK_INT(put_all(x), GD_OK);
    CHECK_INT(gd_kv_commit(x->kv, &x->err), GD_OK);
    CHECK_INT(count_keys(x), KEYS);
    close_store(x);
    file_io(x, "rb");
    CHECK(x->length > 4 * GD_DTB_PAGE && x->length < SIZE);
}

static void
teardown(fixture *x)
{
    close_store(x);
    CHECK_INT(fault_env_leaks(&x->f), 0);
    fault_env_destroy(&x->f);
    check_rmdir(x->dir);
}

static fixture x;

/* ---- damage ---- */

TEST_WITH(test_flips, setup(&x), teardown(&x))
{
    for (unsigned i = 0; i < FLIPS; i++) {
        size_t at = gd_checksum(&i, sizeof i, 9) % x.length;
        uint8_t was = x.bytes[at];
        x.bytes[at] ^= (uint8_t)(1 << i % 8);
        file_io(&x, "wb");
        CHECK_INT(open_store(&x), GD_OK);
        int found = count_keys(&x);
        CHECK(found < KEYS); /* a checksum covers all of the file */
        CHECK(found >= 0);
        CHECK((found == 0) == (at < GD_DTB_PAGE));
        CHECK_INT(put_all(&x), GD_OK); /* it can be filled again */
        CHECK_INT(count_keys(&x), KEYS);
        close_store(&x);
        x.bytes[at] = was;
    }
}

/* These pages have right checksums, and wrong contents. */
TEST_WITH(test_hostile_pages, setup(&x), teardown(&x))
{
    uint64_t seed = gd_get64(x.bytes + 24);
    for (unsigned count = 0; count <= UINT16_MAX; count += 257) {
        for (size_t page = 1; page < x.length / GD_DTB_PAGE; page++) {
            uint8_t *bytes = x.bytes + page * GD_DTB_PAGE;
            gd_put16(bytes + 8, (uint16_t)count);
            gd_put16(bytes + 10, UINT16_MAX); /* search on and on */
            gd_dtbpage_seal(bytes, page, seed);
        }
        file_io(&x, "wb");
        CHECK_INT(open_store(&x), GD_OK);
        CHECK(count_keys(&x) >= 0);
        CHECK_INT(put_all(&x), GD_OK);
        CHECK_INT(gd_kv_commit(x.kv, &x.err), GD_OK);
        close_store(&x);
    }
}

TEST_WITH(test_swapped_pages, setup(&x), teardown(&x))
{
    uint8_t page[GD_DTB_PAGE];
    memcpy(page, x.bytes + GD_DTB_PAGE, GD_DTB_PAGE);
    memcpy(x.bytes + GD_DTB_PAGE, x.bytes + 2 * GD_DTB_PAGE, GD_DTB_PAGE);
    memcpy(x.bytes + 2 * GD_DTB_PAGE, page, GD_DTB_PAGE);
    file_io(&x, "wb");
    CHECK_INT(open_store(&x), GD_OK);
    int found = count_keys(&x);
    CHECK(found > 0 && found < KEYS);
    gd_kv_stats stats;
    gd_kv_get_stats(x.kv, &stats);
    CHECK(stats.damaged >= 2);
}

/* After a write that lost power, half of each page is old, that is, zeros. */
TEST_WITH(test_torn_pages, setup(&x), teardown(&x))
{
    for (size_t at = GD_DTB_PAGE; at < x.length; at += GD_DTB_PAGE) {
        memset(x.bytes + at + 2048, 0, 2048);
    }
    file_io(&x, "wb");
    CHECK_INT(open_store(&x), GD_OK);
    CHECK_INT(count_keys(&x), 0);
    CHECK_INT(put_all(&x), GD_OK);
    CHECK_INT(count_keys(&x), KEYS);
}

TEST_WITH(test_cut_while_open, setup(&x), teardown(&x))
{
    CHECK_INT(open_store(&x), GD_OK);
    CHECK_INT(truncate(x.path, 0), 0);
    CHECK_INT(count_keys(&x), 0);
    (void)put_all(&x);
    (void)gd_kv_commit(x.kv, &x.err);
}

/* With other options, only the contents are lost. */
TEST_WITH(test_other_options, setup(&x), teardown(&x))
{
    CHECK_INT(open_store(&x), GD_OK);
    CHECK_INT(count_keys(&x), KEYS);
    close_store(&x);
    x.options.capacity++;
    CHECK_INT(open_store(&x), GD_OK);
    CHECK_INT(count_keys(&x), 0);
}

/* ---- faults ---- */

static gd_status
use(fixture *x)
{
    gd_status s = open_store(x);
    if (s == GD_OK) {
        s = put_all(x);
    }
    if (s == GD_OK) {
        s = gd_kv_commit(x->kv, &x->err);
    }
    if (s == GD_OK && count_keys(x) < 0) {
        s = x->err.status;
    }
    close_store(x);
    return s;
}

static void
run_faults(fixture *x, fault_call call, int sys_errno, bool forever)
{
    /* These are all of the first calls, and some of thousands after them. */
    for (uint64_t n = 1;; n += 1 + n / 16) {
        uint64_t before = fault_env_faults(&x->f);
        x->err.text[0] = '\0';
        fault_env_fail(&x->f, call, n, sys_errno, forever);
        gd_status s = use(x);
        bool failed = fault_env_faults(&x->f) > before;
        fault_env_heal(&x->f);
        /* Closing may fail, too. */
        CHECK(s == GD_OK || (failed && x->err.text[0] != '\0'));
        if (failed && call == FAULT_PWRITEV) {
            CHECK_INT(s, GD_NOSPACE);
        }
        CHECK_INT(open_store(x), GD_OK);
        CHECK(count_keys(x) >= 0);
        close_store(x);
        if (!failed) {
            CHECK_INT(s, GD_OK);
            break;
        }
    }
}

TEST_WITH(test_faults, setup(&x), teardown(&x))
{
    run_faults(&x, FAULT_ANY, EIO, false);
    run_faults(&x, FAULT_ANY, EIO, true);
    run_faults(&x, FAULT_PWRITEV, ENOSPC, true);
    run_faults(&x, FAULT_ALLOC, ENOMEM, false);
}

TEST_WITH(test_failed_sync, setup(&x), teardown(&x))
{
    CHECK_INT(open_store(&x), GD_OK);
    CHECK_INT(put_all(&x), GD_OK);
    fault_env_fail(&x.f, FAULT_FDATASYNC, 1, EIO, false);
    CHECK_INT(gd_kv_commit(x.kv, &x.err), GD_IO);
    CHECK_INT(gd_kv_commit(x.kv, &x.err), GD_IO);
    CHECK_CONTAINS(x.err.text, "open it again");
    CHECK_INT(put_all(&x), GD_IO);
    CHECK_INT(count_keys(&x), KEYS); /* its keys can be read */
    close_store(&x);
    CHECK_INT(open_store(&x), GD_OK);
    CHECK_INT(gd_kv_commit(x.kv, &x.err), GD_OK);
}

TEST_WITH(test_no_direct_io, setup(&x), teardown(&x))
{
    fault_env_fail(&x.f, FAULT_OPENAT, 1, EINVAL, false);
    fault_env_interrupt(&x.f, 2);
    CHECK_INT(open_store(&x), GD_OK);
    CHECK_INT(count_keys(&x), KEYS);
    fault_env_shorten(&x.f, 1000);
    CHECK_INT(put_all(&x), GD_OK);
    CHECK_INT(gd_kv_commit(x.kv, &x.err), GD_OK);
    CHECK_INT(count_keys(&x), KEYS);
}
