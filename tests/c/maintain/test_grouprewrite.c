/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_grouprewrite.c - a group's rewriting: the same blocks at the same
 * addresses, less space, and the old file until the new one is durable.
 */
#include "engine/maintain/grouprewrite.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/coding.h"
#include "engine/files/spool.h"
#include "engine/read/reader.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum {
    BLOCK = 4096,
    SLOTS = 64,
    PER_SEGMENT = 16,
    LENGTH = SLOTS * BLOCK,
    WHOLE = GD_SEGMENT_HEADER + PER_SEGMENT * BLOCK,
};

#define GROUP_1 "groups/00000001"
/* The last one clears the mark. */
#define ORDER "fsync pwritev fallocate pwritev fsync renameat fsync pwritev"

typedef struct fixture {
    scratch x;
    gd_repo *repo;
    uint8_t *one, *two; /* images: group 1, full; group 2, half full */
    gd_leased_group *leased;
    gd_owned_group *owned; /* it alone is to be closed, once there is one */
} fixture;

static gd_status
put(fixture *t, const char *image_id, const uint8_t *data, size_t length)
{
    return put_image(t->repo, image_id, data, length, length, NULL,
                     &t->x.err);
}

static bool
is_image(fixture *t, const char *image_id, const uint8_t *data, size_t length)
{
    bool equal;
    gd_status s =
        get_image(t->repo, image_id, data, length, &equal, &t->x.err);
    if (s != GD_OK) {
        fprintf(stderr, "%s\n", t->x.err.text);
    }
    return s == GD_OK && equal;
}

/* texts: blocks that compress. */
static void
setup(fixture *t, bool texts)
{
    scratch_init(&t->x);
    t->repo = scratch_repo_filter(&t->x);
    t->one = malloc(LENGTH);
    t->two = malloc(LENGTH);
    t->owned = NULL;
    fill_random(t->one, LENGTH, 1);
    fill_random(t->two, LENGTH, 2);
    for (size_t at = 0; texts && at < LENGTH; at++) {
        t->one[at] = at % BLOCK < 600 ? t->one[at] : (uint8_t)('a' + at % 7);
    }
    CHECK_INT(put(t, "one", t->one, LENGTH), GD_OK);
    CHECK_INT(put(t, "two", t->two, LENGTH / 2), GD_OK);
}

static void
teardown(fixture *t)
{
    gd_repo_close(t->repo);
    free(t->one);
    free(t->two);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

static void
enter(fixture *t, uint32_t number)
{
    CHECK_INT(gd_owned_group_open(t->repo, number, &t->owned, &t->x.err),
              GD_OK);
}

static void
free_slots(fixture *t, uint32_t first, uint32_t count)
{
    uint32_t slots[SLOTS], freed;
    for (uint32_t i = 0; i < count; i++) {
        slots[i] = first + i;
    }
    CHECK_INT(gd_owned_group_free(t->owned, slots, count, &freed, &t->x.err),
              GD_OK);
    CHECK_INT(freed, count);
}

static gd_status
rewrite(fixture *t, uint64_t *bytes)
{
    return gd_owned_group_rewrite(t->owned, NULL, 0, bytes, &t->x.err);
}

static void
need_rewritten(fixture *t)
{
    uint64_t bytes;
    if (!CHECK_INT(rewrite(t, &bytes), GD_OK)) {
        fprintf(stderr, "%s\n", t->x.err.text);
    }
}

/* What is on the disk, judged from outside; how many blocks live. */
static unsigned
check_group(fixture *t, uint32_t number, gd_published *record,
            gd_entry entries[SLOTS])
{
    gd_group *group;
    gd_coder *coder;
    unsigned live = 0;
    uint8_t *in = malloc(GD_SEGMENT_HEADER + GD_SEGMENT_MAX);
    uint8_t *plain = malloc(GD_SEGMENT_MAX);
    CHECK_INT(gd_group_open(t->x.env, t->x.root, &t->x.params, number,
                            O_RDONLY, &group, &t->x.err), GD_OK);
    CHECK_INT(gd_coder_open(t->x.env, &coder, &t->x.err), GD_OK);
    CHECK_INT(gd_group_read_published(group, record, &t->x.err), GD_OK);
    CHECK_INT(gd_group_read_entries(group, 0, SLOTS, entries, &t->x.err),
              GD_OK);
    for (uint32_t i = 0; i < SLOTS; i++) {
        const gd_entry *e = &entries[i];
        gd_segment_header header;
        if (e->state != GD_ENTRY_LIVE) {
            continue;
        }
        live++;
        CHECK_INT(gd_group_read_segment(group, e, i, coder, in, plain,
                                        &header, &t->x.err), GD_OK);
        CHECK(gd_segment_intact(in, &header, group->bounds.seed));
        CHECK(gd_checksum(plain + e->plain_offset, e->plain_length, 0) ==
              e->checksum);
        CHECK((uint64_t)e->segment + GD_SEGMENT_HEADER +
                  header.stored_length <= record->end);
        /* Blocks in consecutive slots: each of them lives, and is this
         * segment's. */
        for (uint32_t k = 0; k < header.blocks; k++) {
            CHECK(entries[header.first_slot + k].segment == e->segment ||
                  entries[header.first_slot + k].state != GD_ENTRY_LIVE);
        }
    }
    gd_coder_close(t->x.env, coder);
    gd_group_close(group);
    free(in);
    free(plain);
    return live;
}

static void
check_trace(fixture *t, const char *wanted)
{
    char trace[512];
    fault_env_trace(&t->x.f, trace, sizeof trace);
    if (!CHECK(strcmp(trace, wanted) == 0)) {
        fprintf(stderr, "it was: %s\n", trace);
    }
}

static bool
is_clean(fixture *t)
{
    return scratch_count(&t->x, "spool", "G-", NULL) == 0;
}

/* ---- what it makes ---- */

static void
test_all_live(void)
{
    fixture t;
    gd_published old, record;
    gd_entry before[SLOTS], after[SLOTS];
    struct stat first, second;
    uint64_t bytes;
    setup(&t, true);
    CHECK_INT(check_group(&t, 1, &old, before), SLOTS);
    CHECK_INT(fstatat(t.x.root, GROUP_1, &first, 0), 0);
    size_t size = (size_t)first.st_size;
    uint8_t *was = malloc(size), *is = malloc(size);
    scratch_read(&t.x, GROUP_1, was, size, 0);
    enter(&t, 1);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(rewrite(&t, &bytes), GD_OK);
    check_trace(&t, ORDER);
    gd_owned_group_close(t.owned);
    CHECK_INT(bytes, 0);
    CHECK_INT(fstatat(t.x.root, GROUP_1, &second, 0), 0);
    CHECK(first.st_ino != second.st_ino);
    CHECK_INT(second.st_mode & 0777, 0600);
    /* Segments that are whole come over as they are. */
    REQUIRE((size_t)second.st_size == size);
    scratch_read(&t.x, GROUP_1, is, size, 0);
    CHECK(memcmp(was, is, 512) == 0);
    CHECK(memcmp(was + 4096, is + 4096, size - 4096) == 0);
    CHECK_INT(check_group(&t, 1, &record, after), SLOTS);
    CHECK_INT(record.sequence, old.sequence + 3);
    CHECK(record.generation != old.generation);
    CHECK(record.count == old.count && record.end == old.end &&
          record.flags == old.flags);
    CHECK(is_clean(&t));
    CHECK(is_image(&t, "one", t.one, LENGTH));
    /* Either published record will do. */
    scratch_flip(&t.x, GROUP_1, 512 + 512 * (record.sequence % 2), 1);
    uint64_t generation = record.generation;
    CHECK_INT(check_group(&t, 1, &record, after), SLOTS);
    CHECK_INT(record.sequence, old.sequence + 2);
    CHECK_INT(record.flags, GD_GROUP_UNSETTLED);
    CHECK(record.count == old.count && record.end == old.end &&
          record.generation == generation);
    free(was);
    free(is);
    teardown(&t);
}

/* Dead slots at a segment's start, within it, at its end, and all of it. */
static void
test_partly_dead(void)
{
    fixture t;
    gd_published record;
    gd_entry entries[SLOTS];
    uint64_t bytes;
    setup(&t, false);
    CHECK_INT(put(&t, "a", t.one + 3 * BLOCK, 5 * BLOCK), GD_OK);
    CHECK_INT(put(&t, "b", t.one + 9 * BLOCK, 14 * BLOCK), GD_OK);
    CHECK_INT(put(&t, "c", t.one + 50 * BLOCK, 14 * BLOCK), GD_OK);
    enter(&t, 1);
    free_slots(&t, 0, 3);
    free_slots(&t, 8, 1);
    free_slots(&t, 23, 27);
    CHECK_INT(rewrite(&t, &bytes), GD_OK);
    CHECK(bytes > 27 * BLOCK);
    CHECK_INT(check_group(&t, 1, &record, entries), 33);
    for (uint32_t i = 0; i < SLOTS; i++) {
        bool live = (i >= 3 && i < 8) || (i >= 9 && i < 23) || i >= 50;
        CHECK_INT(entries[i].state, live ? GD_ENTRY_LIVE : GD_ENTRY_FREED);
    }
    /* 3-7, 9-15, 16-22, 50-63 */
    CHECK_INT(record.end, gd_data_start(SLOTS) + 4 * GD_SEGMENT_HEADER +
                              33 * BLOCK);
    CHECK_INT(scratch_size(&t.x, GROUP_1), record.end);
    CHECK(is_image(&t, "a", t.one + 3 * BLOCK, 5 * BLOCK));
    CHECK(is_image(&t, "b", t.one + 9 * BLOCK, 14 * BLOCK));
    CHECK(is_image(&t, "c", t.one + 50 * BLOCK, 14 * BLOCK));
    /* It goes on in the new file. */
    free_slots(&t, 3, 1);
    CHECK_INT(rewrite(&t, &bytes), GD_OK);
    CHECK_INT(check_group(&t, 1, &record, entries), 32);
    gd_owned_group_close(t.owned);
    CHECK(is_image(&t, "b", t.one + 9 * BLOCK, 14 * BLOCK));
    teardown(&t);
}

static void
test_states_stay(void)
{
    static const uint32_t slot = 5;
    fixture t;
    gd_quarantine_name *names;
    size_t count;
    gd_published old, record;
    gd_entry before[SLOTS], after[SLOTS];
    static const gd_entry void_entry = {.state = GD_ENTRY_VOID};
    setup(&t, true);
    enter(&t, 1);
    CHECK_INT(gd_owned_group_mark_damaged(t.owned, &slot, 1, &names, &count,
                                          &t.x.err), GD_OK);
    t.x.env->release(t.x.env, names);
    free_slots(&t, 40, 2);
    CHECK_INT(gd_group_write_entries(t.owned->leased->group, 10, 1, &void_entry,
                                     &t.x.err), GD_OK);
    gd_owned_group_close(t.owned);
    /* Only the old file has what may be read after all. */
    enter(&t, 1);
    uint64_t bytes;
    CHECK_INT(rewrite(&t, &bytes), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, "the block of slot 5");
    free_slots(&t, 5, 1);
    gd_owned_group_close(t.owned);
    (void)check_group(&t, 1, &old, before);
    enter(&t, 1);
    need_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK_INT(check_group(&t, 1, &record, after), 60);
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK_INT(after[i].state, before[i].state);
        CHECK(gd_fingerprint_equal(&after[i].fingerprint,
                                   &before[i].fingerprint));
    }
    CHECK_INT(after[5].state, GD_ENTRY_FREED);
    CHECK_INT(after[10].state, GD_ENTRY_VOID);
    /* A group that nothing is left in becomes a fingerprint store. */
    enter(&t, 2);
    free_slots(&t, 0, 32);
    need_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK_INT(scratch_size(&t.x, "groups/00000002"), gd_data_start(SLOTS));
    CHECK_INT(put(&t, "more", t.two, LENGTH), GD_OK);
    CHECK(is_image(&t, "more", t.two, LENGTH));
    teardown(&t);
}

static void
test_codecs(void)
{
    static const gd_codec codecs[] = {GD_CODEC_ZSTD, GD_CODEC_NONE,
                                      GD_CODEC_LZ4, GD_CODEC_ZSTD};
    fixture t;
    gd_published record;
    gd_entry entries[SLOTS];
    uint64_t bytes, sizes[4];
    setup(&t, true);
    enter(&t, 1);
    for (int i = 0; i < 4; i++) {
        CHECK_INT(gd_owned_group_rewrite(t.owned, &codecs[i], codecs[i] ==
                                         GD_CODEC_ZSTD ? 19 : 0, &bytes,
                                         &t.x.err), GD_OK);
        CHECK_INT(check_group(&t, 1, &record, entries), SLOTS);
        CHECK_INT(entries[0].codec, codecs[i]);
        CHECK(is_image(&t, "one", t.one, LENGTH));
        sizes[i] = record.end;
    }
    CHECK(sizes[0] < sizes[2] && sizes[2] < sizes[1] && sizes[3] == sizes[0]);
    /* Without a codec a segment keeps its own, also when it is packed anew. */
    free_slots(&t, 0, 1);
    need_rewritten(&t);
    (void)check_group(&t, 1, &record, entries);
    CHECK_INT(entries[1].codec, GD_CODEC_ZSTD);
    gd_owned_group_close(t.owned);
    teardown(&t);
}

/* ---- what it refuses ---- */

static void
check_refused(fixture *t, gd_status wanted, const char *words)
{
    struct stat before, after;
    uint64_t bytes;
    CHECK_INT(fstatat(t->x.root, GROUP_1, &before, 0), 0);
    enter(t, 1);
    CHECK_INT(rewrite(t, &bytes), wanted);
    gd_owned_group_close(t->owned);
    CHECK_CONTAINS(t->x.err.text, words);
    CHECK_INT(fstatat(t->x.root, GROUP_1, &after, 0), 0);
    CHECK(before.st_ino == after.st_ino && before.st_size == after.st_size);
    CHECK(is_clean(t));
}

/* More of them than are verified in one go. */
static void
test_many_blocks_in_a_segment(void)
{
    enum { MANY = 200, SMALL = 512 };
    static uint8_t data[MANY * SMALL];
    fixture t = {.owned = NULL};
    scratch_init(&t.x);
    t.x.params.block_size = SMALL;
    t.x.params.segment_size = 256 * SMALL;
    t.x.params.group_slots = 256;
    t.x.params.codec = GD_CODEC_NONE;
    t.repo = scratch_repo_filter(&t.x);
    fill_random(data, sizeof data, 3);
    CHECK_INT(put(&t, "one", data, sizeof data), GD_OK);
    enter(&t, 1);
    need_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK(is_image(&t, "one", data, sizeof data));
    uint64_t start = gd_data_start(256) + GD_SEGMENT_HEADER;
    for (uint64_t slot = 5; slot < MANY; slot += 64) {
        scratch_flip(&t.x, GROUP_1, start + slot * SMALL, 1);
        check_refused(&t, GD_CORRUPT, "is damaged");
        scratch_flip(&t.x, GROUP_1, start + slot * SMALL, 1);
    }
    gd_repo_close(t.repo);
    CHECK_INT(scratch_destroy(&t.x), 0);
}

static void
test_damage(void)
{
    fixture t;
    gd_published record;
    gd_entry entries[SLOTS];
    setup(&t, false);
    uint64_t block_20 = gd_data_start(SLOTS) + WHOLE + GD_SEGMENT_HEADER +
                        4 * BLOCK + 77;
    scratch_flip(&t.x, GROUP_1, block_20, 1);
    check_refused(&t, GD_CORRUPT, "slot 20");
    enter(&t, 1);
    free_slots(&t, 20, 1); /* nobody's any more */
    need_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK_INT(check_group(&t, 1, &record, entries), 63);
    /* Of a segment whose blocks are good the checksum is made right. */
    scratch_flip(&t.x, GROUP_1, gd_data_start(SLOTS) + 20, 1);
    enter(&t, 1);
    need_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK_INT(check_group(&t, 1, &record, entries), 63);
    /* A wrong fingerprint; a wrong checksum comes from the data, above. */
    gd_entry wrong = entries[30];
    wrong.fingerprint.bytes[0] ^= 1;
    enter(&t, 1);
    CHECK_INT(gd_group_write_entries(t.owned->leased->group, 30, 1, &wrong,
                                     &t.x.err), GD_OK);
    gd_owned_group_close(t.owned);
    check_refused(&t, GD_CORRUPT, "slot 30");
    enter(&t, 1);
    CHECK_INT(gd_group_write_entries(t.owned->leased->group, 30, 1,
                                     &entries[30], &t.x.err), GD_OK);
    gd_owned_group_close(t.owned);
    scratch_flip(&t.x, GROUP_1, gd_entry_offset(33) + 3, 1);
    check_refused(&t, GD_CORRUPT, "entry of slot 33");
    scratch_flip(&t.x, GROUP_1, gd_entry_offset(33) + 3, 1);
    scratch_truncate(&t.x, GROUP_1, record.end - 10);
    check_refused(&t, GD_CORRUPT, "ends at offset");
    teardown(&t);
}

static void
test_not_published(void)
{
    fixture t;
    gd_group *group;
    setup(&t, false);
    CHECK_INT(gd_group_open(t.x.env, t.x.root, &t.x.params, 1, O_RDWR, &group,
                            &t.x.err), GD_OK);
    gd_published record = {
        .sequence = 9, .count = 48, .end = gd_data_start(SLOTS) + 3 * WHOLE};
    CHECK_INT(gd_group_write_published(group, &record, &t.x.err), GD_OK);
    check_refused(&t, GD_BUSY, "not published, from slot 48 on");
    CHECK(is_image(&t, "one", t.one, LENGTH));
    /* A poisoned one may be rewritten; it stays poisoned. */
    record.sequence++;
    record.count = SLOTS;
    record.end += WHOLE;
    record.flags = GD_GROUP_POISONED;
    CHECK_INT(gd_group_write_published(group, &record, &t.x.err), GD_OK);
    gd_group_close(group);
    enter(&t, 1);
    need_rewritten(&t);
    gd_owned_group_close(t.owned);
    gd_entry entries[SLOTS];
    CHECK_INT(check_group(&t, 1, &record, entries), SLOTS);
    CHECK_INT(record.flags, GD_GROUP_POISONED);
    teardown(&t);
}

/* ---- others who have the old file ---- */

/* Another handle's reader has the old file open, its writer the old store. */
static void
test_other_handles(void)
{
    fixture t;
    gd_image *image;
    gd_fpstore *store;
    bool cold, equal;
    size_t done;
    uint8_t *out = malloc(LENGTH);
    setup(&t, false);
    uint8_t extra[8 * BLOCK]; /* comes and goes */
    fill_random(extra, sizeof extra, 3);
    CHECK_INT(put(&t, "extra", extra, sizeof extra), GD_OK);
    CHECK_INT(gd_spool_delete(t.x.env, t.x.root, &t.x.params, "extra", NULL,
                              &t.x.err), GD_OK);
    gd_repo *other = scratch_repo_filter(&t.x);
    CHECK_INT(gd_image_open(other, "two", NULL, &image, &t.x.err), GD_OK);
    CHECK_INT(gd_image_read(image, out, LENGTH / 4, 0, &done, &t.x.err),
              GD_OK);
    CHECK_INT(gd_fpcache_store(other->cache, 2, &store, &cold, &t.x.err),
              GD_OK);
    gd_fpcache_return_store(other->cache, store);
    enter(&t, 2);
    free_slots(&t, 32, 8);
    need_rewritten(&t);
    gd_owned_group_close(t.owned);
    CHECK_INT(gd_image_read(image, out, LENGTH / 4, LENGTH / 4, &done,
                            &t.x.err), GD_OK);
    CHECK(memcmp(out, t.two + LENGTH / 4, LENGTH / 4) == 0);
    gd_image_close(image);
    CHECK_INT(gd_fpcache_store(other->cache, 2, &store, &cold, &t.x.err),
              GD_OK);
    CHECK(cold);
    gd_fpcache_return_store(other->cache, store);
    /* What is appended to the new file is found by who had the old one. */
    CHECK_INT(put(&t, "more", t.two, LENGTH), GD_OK);
    CHECK_INT(get_image(other, "more", t.two, LENGTH, &equal, &t.x.err),
              GD_OK);
    CHECK(equal);
    CHECK_INT(put_image(other, "again", t.two, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK(is_image(&t, "again", t.two, LENGTH));
    gd_repo_close(other);
    free(out);
    teardown(&t);
}

/* ---- failures ---- */

static void
test_no_space(void)
{
    fixture t;
    setup(&t, false);
    fault_env_fail(&t.x.f, FAULT_FALLOCATE, 1, ENOSPC, false);
    check_refused(&t, GD_NOSPACE, "cannot write " GROUP_1);
    fault_env_fail(&t.x.f, FAULT_PWRITEV, 4, ENOSPC, false);
    check_refused(&t, GD_NOSPACE, "spool/G-");
    teardown(&t);
}

/* Rewrites the group but for the last fsync, that of groups/. */
static void
rewrite_without_name(fixture *t, uint32_t number)
{
    gd_published record;
    gd_entry entries[SLOTS];
    uint64_t bytes;
    enter(t, number);
    fault_env_fail(&t->x.f, FAULT_FSYNC, 3, EIO, false);
    CHECK_INT(rewrite(t, &bytes), GD_IO);
    CHECK_INT(gd_owned_group_check(t->owned, &t->x.err), GD_CLOSED);
    gd_owned_group_close(t->owned);
    (void)check_group(t, number, &record, entries);
    CHECK_INT(record.flags, GD_GROUP_UNSETTLED);
}

/* The directory's fsync failed: a crash may bring the old file back, so nobody
 * may append to the new one before the directory is synced. */
static void
test_name_not_durable(void)
{
    fixture t;
    gd_published record;
    gd_entry entries[SLOTS];
    setup(&t, false);
    uint8_t *three = malloc(LENGTH);
    fill_random(three, LENGTH, 3);
    gd_repo *other = scratch_repo_filter(&t.x);
    rewrite_without_name(&t, 2);
    fault_env_fail(&t.x.f, FAULT_FSYNC, 1, EIO, false);
    CHECK_INT(put(&t, "more", t.two, LENGTH), GD_OK);
    CHECK_INT(check_group(&t, 2, &record, entries), SLOTS / 2);
    CHECK_INT(record.count, SLOTS / 2);
    CHECK(is_image(&t, "more", t.two, LENGTH));
    /* Group 3 has as many blocks.  Another process takes either. */
    for (int i = 0; i < 2; i++) {
        fault_env_start_trace(&t.x.f);
        CHECK_INT(put_image(other, i == 0 ? "a" : "b",
                            three + i * (LENGTH / 2), LENGTH / 2, LENGTH, NULL,
                            &t.x.err), GD_OK);
        (void)check_group(&t, 2, &record, entries);
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
    teardown(&t);
}

/* And nobody frees in it: the old file would come back with the blocks alive. */
static void
test_freeing_settles_the_name(void)
{
    fixture t;
    gd_published record;
    gd_entry entries[SLOTS];
    setup(&t, false);
    rewrite_without_name(&t, 1);
    fault_env_fail(&t.x.f, FAULT_FSYNC, 1, EIO, false);
    CHECK_INT(gd_owned_group_open(t.repo, 1, &t.owned, &t.x.err), GD_IO);
    CHECK_CONTAINS(t.x.err.text, "groups");
    fault_env_start_trace(&t.x.f);
    enter(&t, 1);
    check_trace(&t, "fsync");
    free_slots(&t, 0, 16);
    gd_owned_group_close(t.owned);
    CHECK_INT(check_group(&t, 1, &record, entries), 48);
    CHECK_INT(record.flags, 0);
    teardown(&t);
}

/* The new file was seen, and a crash took it away: what is freed in the old one
 * must not look to another host like what it has cached of the new one. */
static void
test_old_file_comes_back(void)
{
    fixture t;
    gd_fpstore *store;
    bool cold;
    setup(&t, false);
    gd_repo *other = scratch_repo_filter(&t.x);
    CHECK_INT(linkat(t.x.root, GROUP_1, t.x.root, "old", 0), 0);
    rewrite_without_name(&t, 1);
    CHECK_INT(gd_fpcache_store(other->cache, 1, &store, &cold, &t.x.err),
              GD_OK);
    gd_fpcache_return_store(other->cache, store);
    CHECK_INT(renameat(t.x.root, "old", t.x.root, GROUP_1), 0);
    enter(&t, 1);
    free_slots(&t, 0, 16);
    gd_owned_group_close(t.owned);
    CHECK_INT(gd_fpcache_store(other->cache, 1, &store, &cold, &t.x.err),
              GD_OK);
    CHECK(cold);
    gd_fpcache_return_store(other->cache, store);
    CHECK_INT(put_image(other, "again", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK(is_image(&t, "again", t.one, LENGTH));
    gd_repo_close(other);
    teardown(&t);
}

/* A rename that reports an error may have happened all the same. */
static int
rename_and_fail(const gd_env *env, int dir, const char *from, const char *to)
{
    (void)env;
    return renameat(dir, from, dir, to) == 0 ? -EIO : -errno;
}

static void
test_rename_done_after_all(void)
{
    fixture t;
    gd_published record;
    gd_entry entries[SLOTS];
    setup(&t, false);
    t.x.f.env.renameat = rename_and_fail;
    enter(&t, 1);
    free_slots(&t, 0, 16);
    need_rewritten(&t);
    free_slots(&t, 16, 1);
    gd_owned_group_close(t.owned);
    CHECK_INT(check_group(&t, 1, &record, entries), 47);
    teardown(&t);
}

static void
test_faults(void)
{
    for (int kind = 0; kind < 2; kind++) {
        fault_call call = kind == 0 ? FAULT_ANY : FAULT_ALLOC;
        for (uint64_t n = 1;; n += SWEEP_STRIDE) {
            fixture t;
            uint64_t bytes;
            gd_published record;
            gd_entry entries[SLOTS];
            setup(&t, kind == 1);
            const uint8_t *half = t.one + LENGTH / 2 - 3 * BLOCK;
            CHECK_INT(put(&t, "half", half, LENGTH / 2), GD_OK);
            enter(&t, 1);
            free_slots(&t, 0, SLOTS / 2 - 3);
            uint64_t faults = fault_env_faults(&t.x.f);
            fault_env_fail(&t.x.f, call, n, EIO, false);
            gd_status s = rewrite(&t, &bytes);
            bool hit = fault_env_faults(&t.x.f) > faults;
            fault_env_heal(&t.x.f);
            gd_owned_group_close(t.owned);
            CHECK(is_image(&t, "half", half, LENGTH / 2));
            CHECK_INT(check_group(&t, 1, &record, entries), SLOTS / 2 + 3);
            CHECK(s == GD_OK || is_clean(&t) || kind == 0);
            enter(&t, 1);
            need_rewritten(&t);
            gd_owned_group_close(t.owned);
            CHECK(is_image(&t, "half", half, LENGTH / 2));
            CHECK_INT(put(&t, "again", t.one, LENGTH), GD_OK);
            CHECK(is_image(&t, "again", t.one, LENGTH));
            teardown(&t);
            if (!hit) {
                CHECK_INT(s, GD_OK);
                break;
            }
        }
    }
}

/* ---- in two stages ---- */

static gd_group_rewrite *
begin(fixture *t, uint32_t number, int level)
{
    static const gd_codec codec = GD_CODEC_ZSTD;
    gd_group_rewrite *r = NULL;
    t->owned = NULL;
    CHECK_INT(gd_leased_group_open(t->repo, number, &t->leased, &t->x.err),
              GD_OK);
    CHECK_INT(gd_group_rewrite_open(t->leased, &codec, level, &r, &t->x.err),
              GD_OK);
    return r;
}

static gd_status
exchange(fixture *t, gd_group_rewrite *r)
{
    gd_status s = t->owned != NULL
                      ? GD_OK
                      : gd_leased_group_exclude(t->leased, &t->owned,
                                                &t->x.err);
    return s == GD_OK ? gd_group_rewrite_exchange(r, t->owned, &t->x.err) : s;
}

static void
close_group(fixture *t)
{
    if (t->owned != NULL) {
        gd_owned_group_close(t->owned);
    } else {
        gd_leased_group_close(t->leased);
    }
}

static void
go_through(fixture *t, gd_group_rewrite *r)
{
    bool done = false;
    uint64_t cost, sum = 0;
    while (!done) {
        REQUIRE(gd_group_rewrite_step(r, &done, &cost, &t->x.err) == GD_OK);
        sum += cost;
    }
    CHECK(sum > 0);
    CHECK_INT(gd_group_rewrite_slots(r), SLOTS);
}

static void
end(fixture *t, gd_group_rewrite *r)
{
    gd_group_rewrite_close(r);
    close_group(t);
    CHECK(is_clean(t));
}

/* Uploads find the group's duplicates meanwhile, and put off the exchange as
 * long as they name them. */
static void
test_two_stages(void)
{
    fixture t;
    gd_published old, record;
    gd_entry before[SLOTS], after[SLOTS];
    uint64_t sizes[2];
    setup(&t, true);
    (void)check_group(&t, 1, &old, before);
    gd_repo *other = scratch_repo_filter(&t.x);
    gd_group_rewrite *r = begin(&t, 1, 19);
    CHECK_INT(put_image(other, "again", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK_INT(atomic_load(&other->counters.hits), SLOTS);
    go_through(&t, r);
    CHECK_INT(gd_locks_share(other->locks, 1, &t.x.err), GD_OK);
    CHECK_INT(exchange(&t, r), GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, "a transaction names blocks of group");
    (void)check_group(&t, 1, &record, after);
    CHECK_INT(record.sequence, old.sequence);
    gd_locks_unshare(other->locks, 1);
    CHECK_INT(gd_group_rewrite_sizes(r, &sizes[0], &sizes[1], &t.x.err), GD_OK);
    CHECK(sizes[1] <= sizes[0]);
    CHECK_INT(sizes[1] % 4096, 0);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(exchange(&t, r), GD_OK);
    check_trace(&t, "renameat fsync pwritev");
    CHECK_INT(gd_locks_share(other->locks, 1, &t.x.err), GD_BUSY);
    end(&t, r);
    CHECK_INT(check_group(&t, 1, &record, after), SLOTS);
    CHECK(record.generation != old.generation);
    CHECK_INT(record.flags, 0);
    CHECK(record.codec == GD_CODEC_ZSTD && record.level == 19);
    CHECK(is_image(&t, "again", t.one, LENGTH));
    CHECK_INT(put_image(other, "more", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK_INT(atomic_load(&other->counters.hits), 2 * SLOTS);
    gd_repo_close(other);
    /* What others change keeps it. */
    enter(&t, 1);
    free_slots(&t, 3, 1);
    need_rewritten(&t);
    gd_owned_group_close(t.owned);
    (void)check_group(&t, 1, &record, after);
    CHECK(record.codec == GD_CODEC_ZSTD && record.level == 19);
    teardown(&t);
}

static void
test_segments_are_joined(void)
{
    fixture t;
    gd_published record;
    gd_entry entries[SLOTS];
    setup(&t, true);
    CHECK_INT(put(&t, "rest", t.two + LENGTH / 2, LENGTH / 2), GD_OK);
    gd_group_rewrite *r = begin(&t, 1, 0);
    go_through(&t, r);
    CHECK_INT(exchange(&t, r), GD_OK);
    end(&t, r);
    CHECK_INT(check_group(&t, 1, &record, entries), SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK_INT(entries[i].segment, entries[0].segment);
        CHECK_INT(entries[i].plain_offset, i * BLOCK);
    }
    CHECK(record.codec == GD_CODEC_ZSTD && record.level == 3);
    /* What cannot be made smaller, too. */
    r = begin(&t, 2, 19);
    go_through(&t, r);
    uint64_t sizes[2];
    CHECK_INT(gd_group_rewrite_sizes(r, &sizes[0], &sizes[1], &t.x.err), GD_OK);
    CHECK_INT(sizes[0], sizes[1]);
    CHECK_INT(exchange(&t, r), GD_OK);
    end(&t, r);
    CHECK_INT(check_group(&t, 2, &record, entries), SLOTS);
    CHECK_INT(entries[0].codec, GD_CODEC_NONE);
    CHECK_INT(entries[SLOTS - 1].segment, entries[0].segment);
    teardown(&t);
}

/* What no codec made smaller is joined with its like only. */
static void
test_raw_segments_stay_apart(void)
{
    fixture t;
    gd_published record;
    gd_entry entries[SLOTS];
    setup(&t, false);
    for (size_t at = LENGTH / 2; at < LENGTH; at++) {
        t.one[at] = (uint8_t)('a' + at % (7 + at / BLOCK));
    }
    memset(t.two, 7, LENGTH / 2); /* fills up the second group */
    CHECK_INT(put(&t, "fill", t.two + LENGTH / 2, LENGTH / 2), GD_OK);
    CHECK_INT(put(&t, "mixed", t.one, LENGTH), GD_OK);
    CHECK_INT(put(&t, "mixed-2", t.one + LENGTH / 2, LENGTH / 2), GD_OK);
    uint8_t *rest = malloc(LENGTH);
    fill_random(rest, LENGTH, 9);
    CHECK_INT(put(&t, "rest", rest, LENGTH), GD_OK);
    gd_group_rewrite *r = begin(&t, 3, 0);
    go_through(&t, r);
    CHECK_INT(exchange(&t, r), GD_OK);
    end(&t, r);
    CHECK_INT(check_group(&t, 3, &record, entries), SLOTS);
    CHECK_INT(entries[0].codec, GD_CODEC_ZSTD);
    CHECK_INT(entries[SLOTS / 2 - 1].segment, entries[0].segment);
    CHECK_INT(entries[SLOTS / 2].codec, GD_CODEC_NONE);
    CHECK_INT(entries[SLOTS - 1].segment, entries[SLOTS / 2].segment);
    CHECK(is_image(&t, "mixed", t.one, LENGTH));
    CHECK(is_image(&t, "rest", rest, LENGTH));
    free(rest);
    teardown(&t);
}

static void
test_only_what_is_sealed(void)
{
    fixture t;
    gd_published record;
    gd_entry entries[SLOTS];
    setup(&t, false);
    CHECK_INT(gd_leased_group_open(t.repo, 2, &t.leased, &t.x.err), GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, "groups/00000002 is not sealed");
    CHECK_INT(gd_leased_group_open(t.repo, 3, &t.leased, &t.x.err),
              GD_NOTFOUND);
    CHECK_INT(gd_locks_lease(t.repo->locks, 1, &t.x.err), GD_OK);
    CHECK_INT(gd_leased_group_open(t.repo, 1, &t.leased, &t.x.err), GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, "is being appended to");
    gd_locks_unlease(t.repo->locks, 1);
    (void)check_group(&t, 1, &record, entries);
    enter(&t, 1);
    record.sequence++;
    record.flags = GD_GROUP_POISONED;
    CHECK_INT(gd_group_write_published(t.owned->leased->group, &record,
                                       &t.x.err), GD_OK);
    gd_owned_group_close(t.owned);
    CHECK_INT(gd_leased_group_open(t.repo, 1, &t.leased, &t.x.err), GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, "is not sealed");
    /* Nothing of it is locked any more. */
    enter(&t, 1);
    gd_owned_group_close(t.owned);
    teardown(&t);
}

/* By somebody who did not take the lease: kind 0 frees a slot, 1 writes a
 * record, 2 puts another file in its place. */
static void
change_behind(fixture *t, int kind)
{
    static const gd_entry freed = {.state = GD_ENTRY_FREED};
    gd_published record;
    gd_entry entries[SLOTS];
    gd_group *group;
    (void)check_group(t, 1, &record, entries);
    CHECK_INT(gd_group_open(t->x.env, t->x.root, &t->x.params, 1, O_RDWR,
                            &group, &t->x.err), GD_OK);
    if (kind == 0) {
        CHECK_INT(gd_group_write_entries(group, 7, 1, &freed, &t->x.err),
                  GD_OK);
    } else if (kind == 1) {
        record.sequence++;
        CHECK_INT(gd_group_write_published(group, &record, &t->x.err), GD_OK);
    } else {
        size_t size = (size_t)scratch_size(&t->x, GROUP_1);
        uint8_t *all = malloc(size);
        scratch_read(&t->x, GROUP_1, all, size, 0);
        CHECK_INT(unlinkat(t->x.root, GROUP_1, 0), 0);
        int fd = openat(t->x.root, GROUP_1, O_CREAT | O_WRONLY, 0600);
        CHECK_INT(pwrite(fd, all, size, 0), size);
        close(fd);
        free(all);
    }
    gd_group_close(group);
}

static void
test_changed_meanwhile(void)
{
    for (int kind = 0; kind < 3; kind++) {
        fixture t;
        struct stat before, after;
        setup(&t, true);
        gd_group_rewrite *r = begin(&t, 1, 1);
        go_through(&t, r);
        change_behind(&t, kind);
        CHECK_INT(fstatat(t.x.root, GROUP_1, &before, 0), 0);
        CHECK_INT(exchange(&t, r), kind == 2 ? GD_BUSY : GD_CORRUPT);
        CHECK_CONTAINS(t.x.err.text, kind == 2 ? "was replaced"
                                               : "had not its lease");
        /* The task tries again: what was refused once stays refused, and what
         * was locked for the attempt is not locked any more. */
        CHECK_INT(gd_locks_share(t.repo->locks, 1, &t.x.err), GD_OK);
        gd_locks_unshare(t.repo->locks, 1);
        CHECK_INT(exchange(&t, r), kind == 2 ? GD_BUSY : GD_CORRUPT);
        end(&t, r);
        CHECK_INT(fstatat(t.x.root, GROUP_1, &after, 0), 0);
        CHECK(before.st_ino == after.st_ino);
        teardown(&t);
    }
}

/* What can be read of the new file is not what was verified. */
static ssize_t
read_wrongly(const gd_env *env, int fd, void *buf, size_t len, uint64_t offset)
{
    (void)env;
    struct stat st;
    ssize_t n = pread(fd, buf, len, (off_t)offset);
    char path[64], name[256] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    (void)!readlink(path, name, sizeof name - 1);
    if (n > 0 && fstat(fd, &st) == 0 && strstr(name, "/spool/G-") != NULL &&
        offset == gd_data_start(SLOTS)) {
        ((uint8_t *)buf)[n - 1] ^= 1;
    }
    return n;
}

static void
test_read_back(void)
{
    for (int texts = 0; texts < 2; texts++) {
        fixture t;
        bool done;
        uint64_t cost;
        setup(&t, texts);
        t.x.f.env.pread = read_wrongly;
        gd_group_rewrite *r = begin(&t, 1, 1);
        CHECK_INT(gd_group_rewrite_step(r, &done, &cost, &t.x.err), GD_CORRUPT);
        CHECK_CONTAINS(t.x.err.text, "spool/G-");
        end(&t, r);
        CHECK(is_image(&t, "one", t.one, LENGTH));
        teardown(&t);
    }
}

static void
test_note_codec(void)
{
    fixture t;
    gd_published old, record;
    gd_entry before[SLOTS], after[SLOTS];
    setup(&t, false);
    (void)check_group(&t, 1, &old, before);
    gd_group_rewrite *r = begin(&t, 1, 0);
    go_through(&t, r);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(gd_leased_group_note_codec(t.leased, GD_CODEC_ZSTD, 0,
                                         &t.x.err), GD_OK);
    /* So that a torn write falls back to the record before. */
    check_trace(&t, "fdatasync pwritev");
    end(&t, r);
    CHECK_INT(check_group(&t, 1, &record, after), SLOTS);
    CHECK_INT(record.sequence, old.sequence + 1);
    CHECK(record.codec == GD_CODEC_ZSTD && record.level == 3);
    CHECK(record.generation == old.generation && record.end == old.end);
    teardown(&t);
}

static void
test_stages_with_faults(void)
{
    for (int kind = 0; kind < 2; kind++) {
        fault_call call = kind == 0 ? FAULT_ANY : FAULT_ALLOC;
        for (uint64_t n = 1;; n += SWEEP_STRIDE) {
            static const gd_codec codec = GD_CODEC_ZSTD;
            fixture t;
            gd_published record;
            gd_entry entries[SLOTS];
            gd_group_rewrite *r;
            bool done = false;
            uint64_t cost;
            setup(&t, kind == 1);
            uint64_t faults = fault_env_faults(&t.x.f);
            fault_env_fail(&t.x.f, call, n, EIO, false);
            gd_status s =
                gd_leased_group_open(t.repo, 1, &t.leased, &t.x.err);
            if (s == GD_OK) {
                s = gd_group_rewrite_open(t.leased, &codec, 1, &r, &t.x.err);
                while (s == GD_OK && !done) {
                    s = gd_group_rewrite_step(r, &done, &cost, &t.x.err);
                    if (s != GD_OK) {
                        gd_group_rewrite_close(r);
                    }
                }
                if (s == GD_OK) {
                    s = exchange(&t, r);
                    gd_group_rewrite_close(r);
                }
                close_group(&t);
            }
            bool hit = fault_env_faults(&t.x.f) > faults;
            fault_env_heal(&t.x.f);
            CHECK_INT(check_group(&t, 1, &record, entries), SLOTS);
            CHECK(s == GD_OK || is_clean(&t) || kind == 0);
            CHECK(is_image(&t, "one", t.one, LENGTH));
            enter(&t, 1);
            gd_owned_group_close(t.owned);
            teardown(&t);
            if (!hit) {
                CHECK_INT(s, GD_OK);
                break;
            }
        }
    }
}

int
main(int argc, char **argv)
{
    BEGIN(argc, argv);
    RUN(test_all_live);
    RUN(test_partly_dead);
    RUN(test_states_stay);
    RUN(test_codecs);
    RUN(test_many_blocks_in_a_segment);
    RUN(test_damage);
    RUN(test_not_published);
    RUN(test_other_handles);
    RUN(test_no_space);
    RUN(test_name_not_durable);
    RUN(test_freeing_settles_the_name);
    RUN(test_old_file_comes_back);
    RUN(test_rename_done_after_all);
    RUN(test_faults);
    RUN(test_two_stages);
    RUN(test_segments_are_joined);
    RUN(test_raw_segments_stay_apart);
    RUN(test_only_what_is_sealed);
    RUN(test_changed_meanwhile);
    RUN(test_read_back);
    RUN(test_note_codec);
    RUN(test_stages_with_faults);
    return REPORT();
}
