/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_grouprewrite.c - a group's rewriting: the same blocks at the same
 * addresses, less space, and the old file until the new one is durable.
 */
#include "engine/maintenance/grouprewrite.h"

#include "engine/base/coding.h"
#include "engine/files/image_delete.h"
#include "engine/read/image.h"
#include "tests/c/support/check.h"
#include "tests/c/support/rewrite_fixture.h"

static rewrite_fixture t;

/* ---- the new file ---- */

TEST_WITH(test_all_live, rewrite_setup(&t, true), rewrite_teardown(&t))
{
    gd_published old, record;
    gd_entry before[SLOTS], after[SLOTS];
    struct stat first, second;
    uint64_t bytes;
    CHECK_INT(check_group_file(&t, 1, &old, before), SLOTS);
    CHECK_INT(fstatat(t.x.root, GROUP_1, &first, 0), 0);
    size_t size = (size_t)first.st_size;
    uint8_t *was = malloc(size), *is = malloc(size);
    scratch_read(&t.x, GROUP_1, was, size, 0);
    own_group(&t, 1);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(rewrite_group(&t, &bytes), GD_OK);
    scratch_check_trace(&t.x, ORDER);
    gd_owned_group_close(t.owned);
    CHECK_INT(bytes, 0);
    CHECK_INT(fstatat(t.x.root, GROUP_1, &second, 0), 0);
    CHECK(first.st_ino != second.st_ino);
    CHECK_INT(second.st_mode & 0777, 0600);
    /* Whole segments are copied unchanged. */
    REQUIRE((size_t)second.st_size == size);
    scratch_read(&t.x, GROUP_1, is, size, 0);
    CHECK(memcmp(was, is, 512) == 0);
    CHECK(memcmp(was + 4096, is + 4096, size - 4096) == 0);
    CHECK_INT(check_group_file(&t, 1, &record, after), SLOTS);
    CHECK_INT(record.sequence, old.sequence + 2);
    CHECK(record.generation != old.generation);
    CHECK(record.count == old.count && record.end == old.end);
    /* The flag stays until the next holder writes a record: this one writes no
     * more. */
    CHECK_INT(record.flags, old.flags | GD_GROUP_UNSETTLED);
    CHECK(is_spool_clean(&t));
    CHECK(rewrite_is_image(&t, "one", t.one, LENGTH));
    /* Either published record is sufficient. */
    scratch_flip(&t.x, GROUP_1, 512 + 512 * (record.sequence % 2), 1);
    uint64_t generation = record.generation;
    CHECK_INT(check_group_file(&t, 1, &record, after), SLOTS);
    CHECK_INT(record.sequence, old.sequence + 1);
    CHECK_INT(record.flags, GD_GROUP_UNSETTLED);
    CHECK(record.count == old.count && record.end == old.end &&
          record.generation == generation);
    free(was);
    free(is);
}

/* Slots are dead at a segment's start, within it, at its end, or all of it. */
TEST_WITH(test_partly_dead, rewrite_setup(&t, false), rewrite_teardown(&t))
{
    gd_published record;
    gd_entry entries[SLOTS];
    uint64_t bytes;
    CHECK_INT(rewrite_put(&t, "a", t.one + 3 * BLOCK, 5 * BLOCK), GD_OK);
    CHECK_INT(rewrite_put(&t, "b", t.one + 9 * BLOCK, 14 * BLOCK), GD_OK);
    CHECK_INT(rewrite_put(&t, "c", t.one + 50 * BLOCK, 14 * BLOCK), GD_OK);
    own_group(&t, 1);
    free_group_slots(&t, 0, 3);
    free_group_slots(&t, 8, 1);
    free_group_slots(&t, 23, 27);
    CHECK_INT(rewrite_group(&t, &bytes), GD_OK);
    CHECK(bytes > 27 * BLOCK);
    CHECK_INT(check_group_file(&t, 1, &record, entries), 33);
    for (uint32_t i = 0; i < SLOTS; i++) {
        bool live = (i >= 3 && i < 8) || (i >= 9 && i < 23) || i >= 50;
        CHECK_INT(entries[i].state, live ? GD_ENTRY_LIVE : GD_ENTRY_FREED);
    }
    /* 3-7, 9-15, 16-22, 50-63 */
    CHECK_INT(record.end,
              gd_fptable_data_start(SLOTS) + 4 * GD_SEGMENT_HEADER +
                              33 * BLOCK);
    CHECK_INT(scratch_size(&t.x, GROUP_1), record.end);
    CHECK(rewrite_is_image(&t, "a", t.one + 3 * BLOCK, 5 * BLOCK));
    CHECK(rewrite_is_image(&t, "b", t.one + 9 * BLOCK, 14 * BLOCK));
    CHECK(rewrite_is_image(&t, "c", t.one + 50 * BLOCK, 14 * BLOCK));
    /* The new file can be changed again. */
    free_group_slots(&t, 3, 1);
    CHECK_INT(rewrite_group(&t, &bytes), GD_OK);
    CHECK_INT(check_group_file(&t, 1, &record, entries), 32);
    gd_owned_group_close(t.owned);
    CHECK(rewrite_is_image(&t, "b", t.one + 9 * BLOCK, 14 * BLOCK));
}

TEST_WITH(test_states_stay, rewrite_setup(&t, true), rewrite_teardown(&t))
{
    static const uint32_t slot = 5;
    gd_quarantine_name *names;
    size_t count;
    gd_published old, record;
    gd_entry before[SLOTS], after[SLOTS];
    static const gd_entry void_entry = {.state = GD_ENTRY_VOID};
    own_group(&t, 1);
    CHECK_INT(gd_owned_group_mark_damaged(t.owned, &slot, 1, &names, &count,
                                          &t.x.err), GD_OK);
    t.x.env->release(t.x.env, names);
    free_group_slots(&t, 40, 2);
    CHECK_INT(gd_group_write_entries(t.owned->leased->group, 10, 1, &void_entry,
                                     &t.x.err), GD_OK);
    gd_owned_group_close(t.owned);
    /* Only the old file has the bytes that may be readable after all. */
    own_group(&t, 1);
    uint64_t bytes;
    CHECK_INT(rewrite_group(&t, &bytes), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, "the block of slot 5");
    free_group_slots(&t, 5, 1);
    gd_owned_group_close(t.owned);
    (void)check_group_file(&t, 1, &old, before);
    own_group(&t, 1);
    require_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK_INT(check_group_file(&t, 1, &record, after), 60);
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK_INT(after[i].state, before[i].state);
        CHECK(gd_fingerprint_equal(&after[i].fingerprint,
                                   &before[i].fingerprint));
    }
    CHECK_INT(after[5].state, GD_ENTRY_FREED);
    CHECK_INT(after[10].state, GD_ENTRY_VOID);
    /* A group without live blocks becomes only a fingerprint table. */
    own_group(&t, 2);
    free_group_slots(&t, 0, 32);
    require_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK_INT(scratch_size(&t.x, "groups/00000002"),
              gd_fptable_data_start(SLOTS));
    CHECK_INT(rewrite_put(&t, "more", t.two, LENGTH), GD_OK);
    CHECK(rewrite_is_image(&t, "more", t.two, LENGTH));
}

/* A lost entry is no end: entries behind it stay. */
TEST_WITH(test_hole_among_the_entries, rewrite_setup(&t, false),
          rewrite_teardown(&t))
{
    enum { HOLE = 20 };
    static const uint8_t zeros[GD_ENTRY_SIZE];
    gd_published record;
    gd_entry entries[SLOTS];
    scratch_write(&t.x, GROUP_1, zeros, sizeof zeros, gd_entry_offset(HOLE));
    own_group(&t, 1);
    require_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK_INT(check_group_file(&t, 1, &record, entries), SLOTS - 1);
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK_INT(entries[i].state,
                  i == HOLE ? GD_ENTRY_EMPTY : GD_ENTRY_LIVE);
    }
}

TEST_WITH(test_codecs, rewrite_setup(&t, true), rewrite_teardown(&t))
{
    static const gd_codec codecs[] = {GD_CODEC_ZSTD, GD_CODEC_NONE,
                                      GD_CODEC_LZ4, GD_CODEC_ZSTD};
    gd_published record;
    gd_entry entries[SLOTS];
    uint64_t bytes, sizes[4];
    own_group(&t, 1);
    for (int i = 0; i < 4; i++) {
        gd_packing packing = {.codec = codecs[i]};
        packing.level = codecs[i] == GD_CODEC_ZSTD ? 19 : 0;
        CHECK_INT(gd_group_rewrite_owned(t.owned, &packing, &bytes, &t.x.err),
                  GD_OK);
        CHECK_INT(check_group_file(&t, 1, &record, entries), SLOTS);
        CHECK_INT(entries[0].codec, codecs[i]);
        CHECK(rewrite_is_image(&t, "one", t.one, LENGTH));
        sizes[i] = record.end;
    }
    CHECK(sizes[0] < sizes[2] && sizes[2] < sizes[1] && sizes[3] == sizes[0]);
    /* Without a codec a live segment is copied, not packed again at the
     * recorded level. */
    const gd_packing noted = {.codec = GD_CODEC_ZSTD, .level = 1};
    CHECK_INT(gd_leased_group_note_codec(t.owned->leased, &noted, &t.x.err),
              GD_OK);
    require_rewritten(&t);
    (void)check_group_file(&t, 1, &record, entries);
    CHECK_INT(record.end, sizes[3]);
    /* A segment that is packed again keeps its codec. */
    free_group_slots(&t, 0, 1);
    require_rewritten(&t);
    (void)check_group_file(&t, 1, &record, entries);
    CHECK_INT(entries[1].codec, GD_CODEC_ZSTD);
    gd_owned_group_close(t.owned);
}

/* ---- refusals ---- */

static void
check_refused(rewrite_fixture *t, gd_status wanted, const char *words)
{
    struct stat before, after;
    uint64_t bytes;
    CHECK_INT(fstatat(t->x.root, GROUP_1, &before, 0), 0);
    own_group(t, 1);
    CHECK_INT(rewrite_group(t, &bytes), wanted);
    gd_owned_group_close(t->owned);
    CHECK_CONTAINS(t->x.err.text, words);
    CHECK_INT(fstatat(t->x.root, GROUP_1, &after, 0), 0);
    CHECK(before.st_ino == after.st_ino && before.st_size == after.st_size);
    CHECK(is_spool_clean(t));
}

/* A segment has more blocks than are verified at once. */
TEST(test_many_blocks_in_a_segment)
{
    enum { MANY = 200, SMALL = 512 };
    static uint8_t data[MANY * SMALL];
    rewrite_fixture t = {.owned = NULL};
    scratch_init(&t.x);
    t.x.params.block_size = SMALL;
    t.x.params.segment_size = 256 * SMALL;
    t.x.params.group_slots = 256;
    t.x.params.codec = GD_CODEC_NONE;
    t.repo = scratch_repo_filter(&t.x);
    fill_random(data, sizeof data, 3);
    CHECK_INT(rewrite_put(&t, "one", data, sizeof data), GD_OK);
    own_group(&t, 1);
    require_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK(rewrite_is_image(&t, "one", data, sizeof data));
    uint64_t start = gd_fptable_data_start(256) + GD_SEGMENT_HEADER;
    for (uint64_t slot = 5; slot < MANY; slot += 64) {
        scratch_flip(&t.x, GROUP_1, start + slot * SMALL, 1);
        check_refused(&t, GD_CORRUPT, "is damaged");
        scratch_flip(&t.x, GROUP_1, start + slot * SMALL, 1);
    }
    gd_repo_close(t.repo);
    CHECK_INT(scratch_destroy(&t.x), 0);
}

TEST_WITH(test_damage, rewrite_setup(&t, false), rewrite_teardown(&t))
{
    gd_published record;
    gd_entry entries[SLOTS];
    uint64_t block_20 = gd_fptable_data_start(SLOTS) + WHOLE +
                        GD_SEGMENT_HEADER + 4 * BLOCK + 77;
    scratch_flip(&t.x, GROUP_1, block_20, 1);
    check_refused(&t, GD_CORRUPT, "slot 20");
    own_group(&t, 1);
    free_group_slots(&t, 20, 1); /* no image's any more */
    require_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK_INT(check_group_file(&t, 1, &record, entries), 63);
    /* If a segment's blocks are good, its checksum is corrected. */
    scratch_flip(&t.x, GROUP_1, gd_fptable_data_start(SLOTS) + 20, 1);
    own_group(&t, 1);
    require_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK_INT(check_group_file(&t, 1, &record, entries), 63);
    /* The fingerprint is wrong; a wrong checksum comes from the data,
     * above. */
    gd_entry wrong = entries[30];
    wrong.fingerprint.bytes[0] ^= 1;
    own_group(&t, 1);
    CHECK_INT(gd_group_write_entries(t.owned->leased->group, 30, 1, &wrong,
                                     &t.x.err), GD_OK);
    gd_owned_group_close(t.owned);
    check_refused(&t, GD_CORRUPT, "slot 30");
    own_group(&t, 1);
    CHECK_INT(gd_group_write_entries(t.owned->leased->group, 30, 1,
                                     &entries[30], &t.x.err), GD_OK);
    gd_owned_group_close(t.owned);
    scratch_flip(&t.x, GROUP_1, gd_entry_offset(33) + 3, 1);
    check_refused(&t, GD_CORRUPT, "entry of slot 33");
    scratch_flip(&t.x, GROUP_1, gd_entry_offset(33) + 3, 1);
    scratch_truncate(&t.x, GROUP_1, record.end - 10);
    check_refused(&t, GD_CORRUPT, "ends at offset");
}

TEST_WITH(test_not_published, rewrite_setup(&t, false), rewrite_teardown(&t))
{
    gd_group *group;
    CHECK_INT(gd_group_open(t.x.env, t.x.root, &t.x.params, 1, O_RDWR, &group,
                            &t.x.err), GD_OK);
    gd_published record = {
        .sequence = 9, .count = 48,
        .end = gd_fptable_data_start(SLOTS) + 3 * WHOLE};
    CHECK_INT(gd_group_write_published(group, &record, &t.x.err), GD_OK);
    /* Entering the group publishes them first (N7.3). */
    own_group(&t, 1);
    require_rewritten(&t);
    gd_owned_group_close(t.owned);
    gd_entry entries[SLOTS];
    CHECK_INT(check_group_file(&t, 1, &record, entries), SLOTS);
    CHECK_INT(record.count, SLOTS);
    CHECK(rewrite_is_image(&t, "one", t.one, LENGTH));
    /* A poisoned group may be rewritten; it stays poisoned. */
    gd_group_close(group);
    CHECK_INT(gd_group_open(t.x.env, t.x.root, &t.x.params, 1, O_RDWR, &group,
                            &t.x.err), GD_OK);
    record.sequence++;
    record.flags |= GD_GROUP_POISONED;
    CHECK_INT(gd_group_write_published(group, &record, &t.x.err), GD_OK);
    gd_group_close(group);
    own_group(&t, 1);
    require_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK_INT(check_group_file(&t, 1, &record, entries), SLOTS);
    CHECK_INT(record.flags, GD_GROUP_POISONED | GD_GROUP_UNSETTLED);
}

/* ---- other handles with the old file ---- */

/* Another handle's reader has the old file open, its writer the old table. */
TEST(test_other_handles)
{
    rewrite_fixture t;
    gd_image *image;
    gd_fptable *store;
    bool cold, equal;
    size_t done;
    uint8_t *out = malloc(LENGTH);
    rewrite_setup(&t, false);
    uint8_t extra[8 * BLOCK]; /* comes and goes */
    fill_random(extra, sizeof extra, 3);
    CHECK_INT(rewrite_put(&t, "extra", extra, sizeof extra), GD_OK);
    CHECK_INT(gd_image_delete(t.x.env, t.x.root, &t.x.params, "extra", NULL,
                              &t.x.err), GD_OK);
    gd_repo *other = scratch_repo_filter(&t.x);
    CHECK_INT(gd_image_open(other, "two", NULL, &image, &t.x.err), GD_OK);
    CHECK_INT(gd_image_read(image, out, LENGTH / 4, 0, &done, &t.x.err),
              GD_OK);
    CHECK_INT(gd_fpcache_store(other->cache, 2, &store, &cold, &t.x.err),
              GD_OK);
    gd_fpcache_return_store(other->cache, store);
    own_group(&t, 2);
    free_group_slots(&t, 32, 8);
    require_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK_INT(gd_image_read(image, out, LENGTH / 4, LENGTH / 4, &done,
                            &t.x.err), GD_OK);
    CHECK(memcmp(out, t.two + LENGTH / 4, LENGTH / 4) == 0);
    gd_image_close(image);
    CHECK_INT(gd_fpcache_store(other->cache, 2, &store, &cold, &t.x.err),
              GD_OK);
    CHECK(cold);
    gd_fpcache_return_store(other->cache, store);
    /* Blocks appended to the new file are found by a handle that had the old
     * one. */
    CHECK_INT(rewrite_put(&t, "more", t.two, LENGTH), GD_OK);
    CHECK_INT(get_image(other, "more", t.two, LENGTH, &equal, &t.x.err),
              GD_OK);
    CHECK(equal);
    CHECK_INT(put_image(other, "again", t.two, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK(rewrite_is_image(&t, "again", t.two, LENGTH));
    gd_repo_close(other);
    free(out);
    rewrite_teardown(&t);
}

/* The old file's space comes back only when no process has it open. */
TEST_WITH(test_old_file_is_closed, rewrite_setup(&t, false),
          rewrite_teardown(&t))
{
    CHECK(rewrite_is_image(&t, "one", t.one, LENGTH));
    int64_t open = t.x.f.descriptors;
    own_group(&t, 1);
    require_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK_INT(t.x.f.descriptors, open - 1);
    CHECK(rewrite_is_image(&t, "one", t.one, LENGTH));
}

/* ---- failures ---- */

TEST_WITH(test_no_space, rewrite_setup(&t, false), rewrite_teardown(&t))
{
    fault_env_fail(&t.x.f, FAULT_FALLOCATE, 1, ENOSPC, false);
    check_refused(&t, GD_NOSPACE, "cannot rewrite " GROUP_1);
    fault_env_fail(&t.x.f, FAULT_PWRITEV, 4, ENOSPC, false);
    check_refused(&t, GD_NOSPACE, "spool/G-");
}

/* Rewrites the group but for the last fsync, that of groups/. */
static void
rewrite_without_name(rewrite_fixture *t, uint32_t number)
{
    gd_published record;
    gd_entry entries[SLOTS];
    uint64_t bytes;
    own_group(t, number);
    fault_env_fail(&t->x.f, FAULT_FSYNC, 3, EIO, false);
    CHECK_INT(rewrite_group(t, &bytes), GD_IO);
    CHECK_INT(gd_owned_group_require_usable(t->owned, &t->x.err), GD_CLOSED);
    gd_owned_group_close(t->owned);
    (void)check_group_file(t, number, &record, entries);
    CHECK_INT(record.flags, GD_GROUP_UNSETTLED);
}

/* The directory's fsync failed: a crash may bring the old file back, so no
 * writer may append to the new one before the directory is synced. */
TEST_WITH(test_name_not_durable, rewrite_setup(&t, false),
          rewrite_teardown(&t))
{
    gd_published record;
    gd_entry entries[SLOTS];
    uint8_t *three = malloc(LENGTH);
    fill_random(three, LENGTH, 3);
    gd_repo *other = scratch_repo_filter(&t.x);
    rewrite_without_name(&t, 2);
    fault_env_fail(&t.x.f, FAULT_FSYNC, 1, EIO, false);
    CHECK_INT(rewrite_put(&t, "more", t.two, LENGTH), GD_OK);
    CHECK_INT(check_group_file(&t, 2, &record, entries), SLOTS / 2);
    CHECK_INT(record.count, SLOTS / 2);
    CHECK(rewrite_is_image(&t, "more", t.two, LENGTH));
    /* Group 3 has as many blocks.  Another process takes either. */
    for (int i = 0; i < 2; i++) {
        fault_env_start_trace(&t.x.f);
        CHECK_INT(put_image(other, i == 0 ? "a" : "b",
                            three + i * (LENGTH / 2), LENGTH / 2, LENGTH, NULL,
                            &t.x.err), GD_OK);
        (void)check_group_file(&t, 2, &record, entries);
        if (record.count > SLOTS / 2) {
            char trace[2048];
            fault_env_trace(&t.x.f, trace, sizeof trace);
            CHECK(strncmp(trace, "fsync pwritev", 13) == 0);
            CHECK_INT(record.flags, 0);
        }
    }
    CHECK_INT(record.count, SLOTS);
    gd_repo_close(other);
    free(three);
}

/* No process frees in it, either: the old file would come back with the blocks
 * alive. */
TEST_WITH(test_freeing_settles_the_name, rewrite_setup(&t, false),
          rewrite_teardown(&t))
{
    gd_published record;
    gd_entry entries[SLOTS];
    rewrite_without_name(&t, 1);
    fault_env_fail(&t.x.f, FAULT_FSYNC, 1, EIO, false);
    CHECK_INT(gd_owned_group_open(t.repo, 1, &t.owned, &t.x.err), GD_IO);
    CHECK_CONTAINS(t.x.err.text, "groups");
    fault_env_start_trace(&t.x.f);
    own_group(&t, 1);
    scratch_check_trace(&t.x, "fsync");
    free_group_slots(&t, 0, 16);
    gd_owned_group_close(t.owned);
    CHECK_INT(check_group_file(&t, 1, &record, entries), 48);
    CHECK_INT(record.flags, 0);
}

/* The new file was seen, and a crash removed it: the old file, after more
 * slots were freed, must not look to another host like its cached new one. */
TEST_WITH(test_old_file_comes_back, rewrite_setup(&t, false),
          rewrite_teardown(&t))
{
    gd_fptable *store;
    bool cold;
    gd_repo *other = scratch_repo_filter(&t.x);
    CHECK_INT(linkat(t.x.root, GROUP_1, t.x.root, "old", 0), 0);
    rewrite_without_name(&t, 1);
    CHECK_INT(gd_fpcache_store(other->cache, 1, &store, &cold, &t.x.err),
              GD_OK);
    gd_fpcache_return_store(other->cache, store);
    CHECK_INT(renameat(t.x.root, "old", t.x.root, GROUP_1), 0);
    own_group(&t, 1);
    free_group_slots(&t, 0, 16);
    gd_owned_group_close(t.owned);
    CHECK_INT(gd_fpcache_store(other->cache, 1, &store, &cold, &t.x.err),
              GD_OK);
    CHECK(cold);
    gd_fpcache_return_store(other->cache, store);
    CHECK_INT(put_image(other, "again", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK(rewrite_is_image(&t, "again", t.one, LENGTH));
    gd_repo_close(other);
}

/* A rename that reports an error may have happened all the same. */
TEST_WITH(test_rename_done_after_all, rewrite_setup(&t, false),
          rewrite_teardown(&t))
{
    gd_published record;
    gd_entry entries[SLOTS];
    t.x.f.env.renameat = fault_lying_renameat;
    own_group(&t, 1);
    free_group_slots(&t, 0, 16);
    require_rewritten(&t);
    free_group_slots(&t, 16, 1);
    gd_owned_group_close(t.owned);
    CHECK_INT(check_group_file(&t, 1, &record, entries), 47);
}

static bool
fail_one(fault_call call, uint64_t n)
{
    rewrite_fixture t;
    uint64_t bytes;
    gd_published record;
    gd_entry entries[SLOTS];
    rewrite_setup(&t, call == FAULT_ALLOC);
    const uint8_t *half = t.one + LENGTH / 2 - 3 * BLOCK;
    CHECK_INT(rewrite_put(&t, "half", half, LENGTH / 2), GD_OK);
    own_group(&t, 1);
    free_group_slots(&t, 0, SLOTS / 2 - 3);
    uint64_t faults = fault_env_faults(&t.x.f);
    fault_env_fail(&t.x.f, call, n, EIO, false);
    gd_status s = rewrite_group(&t, &bytes);
    bool hit = fault_env_faults(&t.x.f) > faults;
    fault_env_heal(&t.x.f);
    gd_owned_group_close(t.owned);
    CHECK(rewrite_is_image(&t, "half", half, LENGTH / 2));
    CHECK_INT(check_group_file(&t, 1, &record, entries), SLOTS / 2 + 3);
    CHECK(s == GD_OK || is_spool_clean(&t) || call == FAULT_ANY);
    own_group(&t, 1);
    require_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK(rewrite_is_image(&t, "half", half, LENGTH / 2));
    CHECK_INT(rewrite_put(&t, "again", t.one, LENGTH), GD_OK);
    CHECK(rewrite_is_image(&t, "again", t.one, LENGTH));
    rewrite_teardown(&t);
    CHECK(hit || s == GD_OK);
    return hit;
}

TEST(test_faults)
{
    sweep_faults(fail_one, SWEEP_STRIDE);
}
