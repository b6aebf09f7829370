/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_freespace.c - storing stops before the disk is full, and deleting does
 * not; a failed query does not count as a full disk.
 */
#include "engine/files/freespace.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/coding.h"
#include "engine/files/image_delete.h"
#include "engine/format/runs.h"
#include "engine/maintenance/blockcopy.h"
#include "engine/maintenance/grouprewrite.h"
#include "engine/maintenance/merge.h"
#include "engine/read/spare.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { BLOCK = 4096, KIB = 1 << 10, MIB = 1 << 20 };

static scratch x;
static gd_space told;

static int
tell(const gd_env *env, int fd, gd_space *space)
{
    (void)fd;
    int rc = x.f.real->free_space(env, x.root, space); /* counts no call */
    *space = told;
    return rc;
}

/* A file system of 1 GiB with so much free. */
static void
setup(uint64_t reserve, uint64_t free)
{
    scratch_init(&x);
    x.params.reserve = reserve;
    x.params.codec = GD_CODEC_NONE;
    x.f.env.free_space = tell;
    told = (gd_space){.free = free, .total = 1 << 30};
}

static gd_status
ask(uint64_t reserve, uint64_t bytes)
{
    return gd_freespace_check(x.env, x.root,
                              (gd_freespace){.reserve = reserve}, bytes,
                              &x.err);
}

TEST(test_check)
{
    setup(0, 0);
    CHECK_INT(ask(0, 0), GD_OK); /* there is no reserve */
    told.free = 8 * MIB;
    CHECK_INT(ask(8 * MIB, 0), GD_OK);
    CHECK_INT(ask(8 * MIB, 1), GD_NOSPACE);
    CHECK(strstr(x.err.text, "8388608 bytes free, and 8388608 are kept for "
                 "deleting and collecting") != NULL);
    CHECK_INT(x.err.sys_errno, ENOSPC);
    told.free--;
    CHECK_INT(ask(8 * MIB, 0), GD_NOSPACE);
    told.free = 9 * MIB;
    CHECK_INT(ask(8 * MIB, MIB), GD_OK);
    CHECK_INT(ask(8 * MIB, UINT64_MAX), GD_NOSPACE);
    /* The limit is a hundredth of it at most. */
    told = (gd_space){.free = 20 * KIB, .total = 1000 * KIB};
    CHECK_INT(ask(64 * MIB, 10 * KIB), GD_OK);
    CHECK_INT(ask(64 * MIB, 10 * KIB + 1), GD_NOSPACE);
    /* Inodes count on file systems that report them. */
    told = (gd_space){.free = 1 << 30, .total = 1 << 30, .total_files = 9999,
                      .free_files = 33};
    CHECK_INT(ask(1, 1), GD_OK);
    told.free_files = 32;
    CHECK_INT(ask(1, 1), GD_NOSPACE);
    CHECK(strstr(x.err.text, "room for 32 more files") != NULL);
    told.free_files = told.total_files = 0;
    CHECK_INT(ask(1, 1), GD_OK);
    CHECK_INT(scratch_destroy(&x), 0);
}

/* The room is a tenth of the file system at most; none without a reserve. */
TEST(test_room_to_move)
{
    gd_freespace keep = {.reserve = 8 * MIB, .moving = 100 * MIB};
    CHECK_INT(gd_freespace_kept(keep, 2000 * MIB), 108 * MIB);
    CHECK_INT(gd_freespace_kept(keep, 500 * MIB), 55 * MIB);
    keep.reserve = 0;
    CHECK_INT(gd_freespace_kept(keep, 2000 * MIB), 0);
}

/* An unknown amount is no reason to refuse a request. */
TEST(test_unknown)
{
    scratch_init(&x);
    fault_env_fail(&x.f, FAULT_FREE_SPACE, 1, EIO, true);
    CHECK_INT(ask(UINT64_MAX, UINT64_MAX), GD_OK);
    CHECK(fault_env_faults(&x.f) > 0);
    CHECK_INT(scratch_destroy(&x), 0);
}

static gd_status
store(gd_repo *repo, const char *id, unsigned seed, size_t blocks)
{
    gd_transaction *transaction;
    gd_recipe_header header;
    bool linked;
    static uint8_t data[256 * BLOCK];
    for (size_t i = 0; i < blocks * BLOCK; i++) {
        seed = seed * 1103515245 + 12345;
        data[i] = (uint8_t)(seed >> 16);
    }
    gd_status s = gd_transaction_begin(repo, id, "", &gd_global_scope,
                                       &transaction, &x.err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_transaction_write(transaction, data, blocks * BLOCK, &x.err);
    if (s == GD_OK) {
        s = gd_transaction_commit(transaction, &header, &linked, &x.err);
    }
    gd_transaction_end(transaction);
    return s;
}

TEST(test_storing)
{
    setup(8 * MIB, 16 * MIB);
    gd_repo *repo = scratch_repo(&x);
    CHECK_INT(store(repo, "a", 1, 16), GD_OK);
    /* No file is made when the limit is reached already. */
    told.free = 8 * MIB;
    uint64_t made = fault_env_count(&x.f, FAULT_OPENAT);
    CHECK_INT(store(repo, "b", 2, 1), GD_NOSPACE);
    CHECK_INT(fault_env_count(&x.f, FAULT_OPENAT), made);
    /* The limit is reached in the middle: there is room for the recipe, and
     * not for the blocks. */
    told.free = 8 * MIB + 256 * KIB;
    CHECK_INT(store(repo, "b", 2, 256), GD_NOSPACE);
    CHECK_INT(scratch_count(&x, GD_DIR_SPOOL, "T-", NULL), 1);
    CHECK(!scratch_exists(&x, "images/b"));
    /* Known blocks only need a recipe. */
    CHECK_INT(store(repo, "b", 1, 16), GD_OK);
    /* For that, too, there must be room when it is written. */
    gd_transaction *transaction;
    gd_recipe_header header;
    bool linked;
    uint8_t zeros[BLOCK] = {0};
    REQUIRE(gd_transaction_begin(repo, "c", "", &gd_global_scope, &transaction,
                                 &x.err) == GD_OK);
    told.free = 8 * MIB;
    CHECK_INT(gd_transaction_write(transaction, zeros, BLOCK, &x.err), GD_OK);
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked, &x.err),
              GD_NOSPACE);
    gd_transaction_end(transaction);
    /* The limit does not apply to deletes. */
    told.free = 0;
    CHECK_INT(gd_image_delete(x.env, x.root, &x.params, "a", NULL, &x.err),
              GD_OK);
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

/* A fingerprint table is 1.8 MiB. */
TEST(test_a_group_is_not_made)
{
    setup(8 * MIB, 9 * MIB);
    x.params.group_slots = 32768;
    gd_repo *repo = scratch_repo(&x);
    CHECK_INT(store(repo, "a", 1, 1), GD_NOSPACE);
    CHECK_INT(scratch_count(&x, GD_DIR_GROUPS, "", NULL), 0);
    CHECK_INT(fault_env_count(&x.f, FAULT_FALLOCATE), 0);
    told.free = 11 * MIB;
    CHECK_INT(store(repo, "a", 1, 1), GD_OK);
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

/* There is one query for a bundle of segments, and for the batch's recipe: not
 * one for each block. */
TEST(test_is_asked_seldom)
{
    scratch_init(&x);
    x.params.reserve = 1;
    gd_repo *repo = scratch_repo(&x);
    CHECK_INT(store(repo, "a", 1, 256), GD_OK);
    CHECK(fault_env_count(&x.f, FAULT_FREE_SPACE) > 2);
    CHECK(fault_env_count(&x.f, FAULT_FREE_SPACE) < 20);
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

/* These tasks store, too, and can wait. */
TEST(test_maintenance_that_stores)
{
    uint64_t bytes;
    setup(8 * MIB, 16 * MIB);
    gd_repo *repo = scratch_repo(&x);
    CHECK_INT(store(repo, "a", 1, 16), GD_OK);
    for (int pass = 0; pass < 2; pass++) {
        const gd_status wanted = pass == 0 ? GD_NOSPACE : GD_OK;
        told.free = pass == 0 ? 8 * MIB : 16 * MIB;
        gd_address address = {1, 0};
        CHECK_INT(gd_spare_write(repo, 1, &address, 1, &bytes, &x.err),
                  wanted);
        uint8_t packed[8], to[16];
        gd_put64(packed, (uint64_t)1 << GD_SLOT_BITS);
        gd_block_copy *copy;
        const uint8_t *pairs;
        size_t count;
        REQUIRE(gd_block_copy_open(repo, &copy, &x.err) == GD_OK);
        gd_status s = gd_block_copy_add(copy, packed, 1, &x.err);
        if (s == GD_OK) {
            s = gd_block_copy_finish(copy, &pairs, &count, &x.err);
        }
        CHECK_INT(s, wanted);
        gd_block_copy_close(copy);
        gd_put64(to, (uint64_t)1 << GD_SLOT_BITS);
        gd_put64(to + 8, ((uint64_t)1 << GD_SLOT_BITS) + 1);
        gd_merge *merge;
        s = gd_merge_open(repo, "a", (gd_mapping){to, 1}, &merge, &x.err);
        if (pass == 0) {
            CHECK_INT(s, GD_NOSPACE);
        } else {
            CHECK(s != GD_NOSPACE); /* the blocks are not equal */
        }
        if (s == GD_OK) {
            gd_merge_close(merge);
        }
        gd_owned_group *owned;
        REQUIRE(gd_owned_group_open(repo, 1, &owned, &x.err) == GD_OK);
        uint64_t made = fault_env_count(&x.f, FAULT_FALLOCATE);
        CHECK_INT(gd_group_rewrite_owned(owned, NULL, &bytes, &x.err),
                  wanted);
        CHECK_INT(fault_env_count(&x.f, FAULT_FALLOCATE), made + (pass > 0));
        gd_owned_group_close(owned);
        CHECK_INT(scratch_count(&x, GD_DIR_SPOOL, "G-", NULL), 0);
    }
    /* The limit is reached in the middle. */
    told.free = 8 * MIB + gd_fptable_data_start(x.params.group_slots);
    gd_owned_group *owned;
    REQUIRE(gd_owned_group_open(repo, 1, &owned, &x.err) == GD_OK);
    CHECK_INT(gd_group_rewrite_owned(owned, NULL, &bytes, &x.err),
              GD_NOSPACE);
    gd_owned_group_close(owned);
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

/* On a full disk a delete still needs a name in the spool. */
TEST(test_delete_takes_the_reserve)
{
    static const int errors[] = {ENOSPC, EDQUOT};
    for (size_t i = 0; i < 2; i++) {
        setup(0, 0);
        gd_repo *repo = scratch_repo(&x);
        CHECK_INT(store(repo, "a", 1, 1), GD_OK);
        CHECK_INT(store(repo, "b", 1, 1), GD_OK);
        scratch_write(&x, "catalog-reserve", "x", 1, 0);
        scratch_write(&x, "catalog-reserve-8", "x", 1, 0);
        fault_env_fail(&x.f, FAULT_LINKAT, 1, errors[i], false);
        CHECK_INT(gd_image_delete(x.env, x.root, &x.params, "a", NULL,
                                  &x.err), GD_OK);
        CHECK(!scratch_exists(&x, "catalog-reserve"));
        CHECK(scratch_exists(&x, "catalog-reserve-8"));
        /* If that is not enough either, the image stays. */
        fault_env_fail(&x.f, FAULT_LINKAT, 1, errors[i], true);
        CHECK_INT(gd_image_delete(x.env, x.root, &x.params, "b", NULL,
                                  &x.err), GD_NOSPACE);
        CHECK(!scratch_exists(&x, "catalog-reserve-8"));
        CHECK(scratch_exists(&x, "images/b"));
        fault_env_heal(&x.f);
        /* For another error no reserve is given up. */
        scratch_write(&x, "catalog-reserve", "x", 1, 0);
        fault_env_fail(&x.f, FAULT_LINKAT, 1, EIO, false);
        CHECK_INT(gd_image_delete(x.env, x.root, &x.params, "b", NULL,
                                  &x.err), GD_IO);
        CHECK(scratch_exists(&x, "catalog-reserve"));
        gd_repo_close(repo);
        CHECK_INT(scratch_destroy(&x), 0);
    }
}
