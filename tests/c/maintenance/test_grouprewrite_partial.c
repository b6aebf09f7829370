/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_grouprewrite_partial.c - a group that is partly filled is rewritten:
 * its tail is recovered first (N7.3), and no writer that appends to it, before
 * or after, loses a block (I4).
 */
#include "engine/maintenance/grouprewrite.h"

#include <errno.h>

#include "engine/read/image.h"
#include "tests/c/support/check.h"
#include "tests/c/support/rewrite_fixture.h"

#define GROUP_2 "groups/00000002"

static const gd_packing stored = {.codec = GD_CODEC_ZSTD, .level = 3};
static const gd_packing similar = {
    .codec = GD_CODEC_ZSTD, .level = 3, .similar = true};

static gd_status
write_all(rewrite_fixture *t, const gd_packing *packing,
          gd_group_rewrite **r)
{
    bool done = false;
    uint64_t cost;
    t->owned = NULL;
    gd_status s = gd_leased_group_open_partial(t->repo, 2, &t->leased,
                                               &t->x.err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_group_rewrite_open(t->leased, packing, false, r, &t->x.err);
    if (s != GD_OK) {
        gd_leased_group_close(t->leased);
        return s;
    }
    while (s == GD_OK && !done) {
        s = gd_group_rewrite_step(*r, &done, &cost, &t->x.err);
    }
    if (s != GD_OK) {
        gd_group_rewrite_close(*r);
        gd_leased_group_close(t->leased);
    }
    return s;
}

/* Closes everything. */
static gd_status
exchange(rewrite_fixture *t, gd_group_rewrite *r)
{
    gd_status s = gd_owned_group_lock(t->leased, &t->owned, &t->x.err);
    if (s == GD_OK) {
        s = gd_group_rewrite_exchange(r, t->owned, &t->x.err);
    }
    gd_group_rewrite_close(r);
    if (t->owned != NULL) {
        gd_owned_group_close(t->owned);
    } else {
        gd_leased_group_close(t->leased);
    }
    return s;
}

static void
recompress(rewrite_fixture *t, const gd_packing *packing)
{
    gd_group_rewrite *r;
    REQUIRE(write_all(t, packing, &r) == GD_OK);
    CHECK_INT(exchange(t, r), GD_OK);
    CHECK(is_spool_clean(t));
}

static rewrite_fixture t;

/* The record has the number of slots that the codec covers, whatever is
 * appended. */
TEST_WITH(test_appended_later, rewrite_setup(&t, false), rewrite_teardown(&t))
{
    gd_published old, record;
    gd_entry before[SLOTS], after[SLOTS];
    gd_group_rewrite *r;
    (void)check_group_file(&t, 2, &old, before);
    REQUIRE(write_all(&t, &stored, &r) == GD_OK);
    fault_env_start_trace(&t.x.f);
    REQUIRE(gd_owned_group_lock(t.leased, &t.owned, &t.x.err) == GD_OK);
    CHECK_INT(gd_group_rewrite_exchange(r, t.owned, &t.x.err), GD_OK);
    /* Writers are kept out of the old file, durably, before it loses its
     * name. */
    scratch_check_trace(&t.x, "fdatasync pwritev fdatasync renameat fsync");
    gd_group_rewrite_close(r);
    gd_owned_group_close(t.owned);
    CHECK_INT(check_group_file(&t, 2, &record, after), SLOTS / 2);
    CHECK_INT(record.flags, GD_GROUP_UNSETTLED);
    CHECK(record.codec == GD_CODEC_ZSTD && record.level == 3);
    CHECK(record.count == SLOTS / 2 && record.covered == SLOTS / 2);
    CHECK(record.generation != old.generation);
    CHECK_INT(rewrite_put(&t, "more", t.two + LENGTH / 2, LENGTH / 4), GD_OK);
    CHECK_INT(check_group_file(&t, 2, &record, after), SLOTS * 3 / 4);
    CHECK(record.codec == GD_CODEC_ZSTD && record.covered == SLOTS / 2);
    CHECK_INT(record.count, SLOTS * 3 / 4);
    recompress(&t, &stored);
    CHECK_INT(check_group_file(&t, 2, &record, after), SLOTS * 3 / 4);
    CHECK_INT(record.covered, SLOTS * 3 / 4);
    CHECK(rewrite_is_image(&t, "two", t.two, LENGTH / 2));
    CHECK(rewrite_is_image(&t, "more", t.two + LENGTH / 2, LENGTH / 4));
}

/* Segments are appended behind segments with lists, and packed with them
 * later. */
TEST_WITH(test_appended_to_lists, rewrite_setup(&t, false),
          rewrite_teardown(&t))
{
    gd_published record;
    gd_entry entries[SLOTS];
    gd_group *group;
    uint8_t *alike = malloc(LENGTH / 2);
    for (uint32_t i = 0; i < SLOTS / 2; i++) {
        fill_random(alike + (size_t)i * BLOCK, BLOCK, 100 + i % 4);
        fill_random(alike + (size_t)i * BLOCK + 50, 20, 1000 + i);
    }
    CHECK_INT(rewrite_put(&t, "alike", alike, LENGTH / 4), GD_OK);
    recompress(&t, &similar);
    CHECK_INT(check_group_file(&t, 2, &record, entries), SLOTS * 3 / 4);
    CHECK(record.similar && record.covered == SLOTS * 3 / 4);
    CHECK_INT(gd_group_open(t.x.env, t.x.root, &t.x.params, 2, O_RDONLY,
                            &group, &t.x.err), GD_OK);
    CHECK(group->bounds.has_lists);
    gd_group_close(group);
    CHECK_INT(rewrite_put(&t, "more", alike + LENGTH / 4, LENGTH / 8), GD_OK);
    CHECK_INT(check_group_file(&t, 2, &record, entries), SLOTS * 7 / 8);
    CHECK(record.similar && record.covered == SLOTS * 3 / 4);
    for (int times = 0; times < 2; times++) {
        CHECK(rewrite_is_image(&t, "two", t.two, LENGTH / 2));
        CHECK(rewrite_is_image(&t, "alike", alike, LENGTH / 4));
        CHECK(rewrite_is_image(&t, "more", alike + LENGTH / 4, LENGTH / 8));
        recompress(&t, times == 0 ? &similar : &stored);
    }
    CHECK_INT(check_group_file(&t, 2, &record, entries), SLOTS * 7 / 8);
    CHECK(!record.similar && record.covered == SLOTS * 7 / 8);
    CHECK(rewrite_is_image(&t, "more", alike + LENGTH / 4, LENGTH / 8));
    free(alike);
}

/* A crash took a record back: committed recipes name blocks behind it. */
TEST_WITH(test_tail_is_settled, rewrite_setup(&t, false), rewrite_teardown(&t))
{
    gd_published record;
    gd_entry entries[SLOTS];
    gd_group *group;
    (void)check_group_file(&t, 2, &record, entries);
    CHECK_INT(gd_group_open(t.x.env, t.x.root, &t.x.params, 2, O_RDWR, &group,
                            &t.x.err), GD_OK);
    record.sequence++;
    record.count = PER_SEGMENT;
    record.end = gd_fptable_data_start(SLOTS) + WHOLE;
    CHECK_INT(gd_group_write_published(group, &record, &t.x.err), GD_OK);
    gd_group_close(group);
    recompress(&t, &stored);
    CHECK_INT(check_group_file(&t, 2, &record, entries), SLOTS / 2);
    CHECK(record.count == SLOTS / 2 && record.covered == SLOTS / 2);
    CHECK(rewrite_is_image(&t, "two", t.two, LENGTH / 2));
}

TEST_WITH(test_lease_is_refused, rewrite_setup(&t, false),
          rewrite_teardown(&t))
{
    CHECK_INT(gd_locks_lease(t.repo->locks, 2, &t.x.err), GD_OK);
    CHECK_INT(gd_leased_group_open_partial(t.repo, 2, &t.leased, &t.x.err),
              GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, "is being appended to");
    gd_locks_unlease(t.repo->locks, 2);
    CHECK_INT(gd_leased_group_open_partial(t.repo, 3, &t.leased, &t.x.err),
              GD_NOTFOUND);
    recompress(&t, &stored);
}

TEST_WITH(test_note_codec, rewrite_setup(&t, false), rewrite_teardown(&t))
{
    gd_published record;
    gd_entry entries[SLOTS];
    REQUIRE(gd_leased_group_open_partial(t.repo, 2, &t.leased, &t.x.err) ==
            GD_OK);
    const gd_packing noted = {.codec = GD_CODEC_ZSTD, .level = 5,
                              .similar = true};
    CHECK_INT(gd_leased_group_note_codec(t.leased, &noted, &t.x.err), GD_OK);
    gd_leased_group_close(t.leased);
    (void)check_group_file(&t, 2, &record, entries);
    CHECK(record.codec == GD_CODEC_ZSTD && record.level == 5 &&
          record.similar && record.covered == SLOTS / 2);
}

/* ---- a late rename ---- */

static rewrite_fixture *cut_off; /* its locks fall in the next rename */
static gd_repo *writer;

static int
rename_late(const gd_env *env, int dir, const char *from, const char *to)
{
    (void)env;
    if (cut_off != NULL) {
        rewrite_fixture *t = cut_off;
        cut_off = NULL;
        gd_locks_unlease(t->repo->locks, 2);
        gd_locks_unlock_exclusive(t->repo->locks, 2);
        CHECK_INT(put_image(writer, "late", t->two + LENGTH / 2, LENGTH / 4,
                            LENGTH / 4, NULL, &t->x.err), GD_OK);
    }
    return renameat(dir, from, dir, to) < 0 ? -errno : 0;
}

/* The locks of the maintainer, or of the collector, fall between its last
 * check and the rename, and a writer on another host stores an image. */
TEST(test_locks_are_lost)
{
    for (int collector = 0; collector < 2; collector++) {
        rewrite_fixture t;
        gd_group_rewrite *r;
        uint64_t bytes;
        rewrite_setup(&t, false);
        writer = scratch_repo_filter(&t.x);
        if (collector) {
            own_group(&t, 2);
        } else {
            REQUIRE(write_all(&t, &stored, &r) == GD_OK);
        }
        cut_off = &t;
        t.x.f.env.renameat = rename_late;
        if (collector) {
            CHECK_INT(gd_group_rewrite_owned(t.owned, NULL, &bytes,
                                             &t.x.err), GD_OK);
            gd_owned_group_close(t.owned);
        } else {
            CHECK_INT(exchange(&t, r), GD_OK);
        }
        CHECK(cut_off == NULL);
        CHECK(rewrite_is_image(&t, "late", t.two + LENGTH / 2, LENGTH / 4));
        CHECK(rewrite_is_image(&t, "two", t.two, LENGTH / 2));
        gd_repo_close(writer);
        rewrite_teardown(&t);
    }
}

/* ---- faults ---- */

static bool
fail_one(fault_call call, uint64_t n)
{
    rewrite_fixture t;
    gd_published record;
    gd_entry entries[SLOTS];
    gd_group_rewrite *r;
    rewrite_setup(&t, false);
    uint64_t faults = fault_env_faults(&t.x.f);
    fault_env_fail(&t.x.f, call, n, EIO, false);
    gd_status s = write_all(&t, &stored, &r);
    if (s == GD_OK) {
        s = exchange(&t, r);
    }
    bool hit = fault_env_faults(&t.x.f) > faults;
    fault_env_heal(&t.x.f);
    CHECK_INT(check_group_file(&t, 2, &record, entries), SLOTS / 2);
    CHECK(rewrite_is_image(&t, "two", t.two, LENGTH / 2));
    /* Uploads continue, in this group or another. */
    CHECK_INT(rewrite_put(&t, "more", t.two + LENGTH / 2, LENGTH / 4),
              GD_OK);
    CHECK(rewrite_is_image(&t, "more", t.two + LENGTH / 2,
                           LENGTH / 4));
    rewrite_teardown(&t);
    CHECK(hit || s == GD_OK);
    return hit;
}

TEST(test_faults)
{
    sweep_faults(fail_one, 1);
}
