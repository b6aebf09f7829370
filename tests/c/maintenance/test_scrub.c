/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_scrub.c - every flipped byte of a group is detected for the block that
 * it damages and for no other; changes between two readings are no damage; and
 * no fault of the system counts as damage.
 */
#include "engine/maintenance/scrub.h"

#include "engine/base/coding.h"
#include "engine/files/group.h"
#include "engine/format/names.h"
#include "engine/maintenance/diskwindow.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define GROUP_1 "groups/00000001"

enum { BLOCK = 512, BLOCKS = 12, SIZE = BLOCK * BLOCKS };

static scratch x;
static gd_repo *repo;
static uint8_t data[SIZE];
static gd_entry entries[BLOCKS];
static uint64_t seed; /* the group's */

static void
setup(gd_codec codec)
{
    scratch_init(&x);
    x.params.block_size = BLOCK;
    x.params.segment_size = 4 * BLOCK;
    x.params.codec = codec;
    repo = scratch_repo(&x);
    /* Each block differs from all others, and compresses. */
    for (size_t i = 0; i < SIZE; i++) {
        data[i] = (uint8_t)(i % 7 + 16 * (i / BLOCK));
    }
    if (codec == GD_CODEC_NONE) {
        fill_random(data, SIZE, 1);
    }
    CHECK_INT(put_image(repo, "one", data, SIZE, SIZE, NULL, &x.err), GD_OK);
    gd_group *group;
    CHECK_INT(gd_group_open(x.env, x.root, &x.params, 1, O_RDONLY, &group,
                            &x.err),
              GD_OK);
    CHECK_INT(gd_group_read_entries(group, 0, BLOCKS, entries, &x.err), GD_OK);
    seed = group->bounds.seed;
    gd_group_close(group);
}

static void
teardown(void)
{
    fault_env_heal(&x.f);
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

/* Returns the verdicts of all slots of the image, one digit each. */
static const char *
verdicts(void)
{
    static char text[BLOCKS + 1];
    gd_scrub_result found;
    if (!CHECK_INT(gd_scrub(repo, 1, 0, BLOCKS, true, GD_SCRUB_ALL, &found,
                            &x.err),
                   GD_OK)) {
        fprintf(stderr, "%s\n", x.err.text);
        return "";
    }
    for (int i = 0; i < BLOCKS; i++) {
        text[i] = (char)('0' + found.verdicts[i]);
    }
    repo->env->release(repo->env, found.verdicts);
    return text;
}

static void
write_entry(uint32_t slot, const gd_entry *entry)
{
    uint8_t raw[GD_ENTRY_SIZE];
    gd_entry_encode(entry, seed, slot, raw);
    scratch_write(&x, GROUP_1, raw, sizeof raw, gd_entry_offset(slot));
}

static uint64_t
segment_end(uint32_t slot)
{
    return (uint64_t)entries[slot].segment + GD_SEGMENT_HEADER +
           entries[slot].stored_length;
}

/* ---- groups without damage ---- */

TEST(test_good)
{
    for (int codec = GD_CODEC_NONE; codec <= GD_CODEC_ZSTD; codec++) {
        setup((gd_codec)codec);
        gd_scrub_result found;
        CHECK_INT(gd_scrub(repo, 1, 0, 64, true, GD_SCRUB_ALL, &found,
                           &x.err), GD_OK);
        uint64_t stored = 0;
        for (int i = 0; i < BLOCKS; i += 4) {
            stored += GD_SEGMENT_HEADER + entries[i].stored_length;
        }
        CHECK_INT(found.bytes, stored); /* each segment once */
        for (int i = 0; i < 64; i++) {
            CHECK_INT(found.verdicts[i],
                      i < BLOCKS ? GD_VERDICT_GOOD : GD_VERDICT_NONE);
        }
        x.env->release(x.env, found.verdicts);
        teardown();
    }
}

/* There are more of them than are verified at once. */
TEST(test_many_blocks_in_a_segment)
{
    enum { MANY = 200 };
    static const int damaged[] = {3, 63, 64, 130, 199, -1};
    static uint8_t many[MANY * BLOCK];
    gd_scrub_result found;
    scratch_init(&x);
    x.params.block_size = BLOCK;
    x.params.segment_size = 256 * BLOCK;
    x.params.group_slots = 256;
    x.params.codec = GD_CODEC_NONE;
    repo = scratch_repo(&x);
    fill_random(many, sizeof many, 2);
    CHECK_INT(put_image(repo, "one", many, sizeof many, sizeof many, NULL,
                        &x.err), GD_OK);
    for (int i = 0; damaged[i] >= 0; i++) {
        scratch_flip(&x, GROUP_1,
                     gd_fptable_data_start(256) + GD_SEGMENT_HEADER +
                                      (uint64_t)damaged[i] * BLOCK + 9, 1);
    }
    REQUIRE(gd_scrub(repo, 1, 0, MANY, true, GD_SCRUB_ALL, &found,
                     &x.err) == GD_OK);
    for (int i = 0, k = 0; i < MANY; i++) {
        CHECK_INT(found.verdicts[i],
                  i == damaged[k] ? GD_VERDICT_DAMAGED : GD_VERDICT_WORN);
        k += i == damaged[k];
    }
    x.env->release(x.env, found.verdicts);
    teardown();
}

TEST_WITH(test_part_of_a_group, setup(GD_CODEC_LZ4), teardown())
{
    gd_scrub_result found;
    CHECK_INT(gd_scrub(repo, 1, 5, 2, true, GD_SCRUB_ALL, &found, &x.err),
                       GD_OK);
    CHECK_INT(found.bytes, GD_SEGMENT_HEADER + entries[5].stored_length);
    CHECK(found.verdicts[0] == GD_VERDICT_GOOD &&
          found.verdicts[1] == GD_VERDICT_GOOD);
    x.env->release(x.env, found.verdicts);
    CHECK_INT(gd_scrub(repo, 1, 0, 0, true, GD_SCRUB_ALL, &found, &x.err),
                       GD_OK);
    x.env->release(x.env, found.verdicts);
    CHECK_INT(gd_scrub(repo, 1, 60, 5, true, GD_SCRUB_ALL, &found, &x.err),
                       GD_CORRUPT);
    CHECK_INT(gd_scrub(repo, 1, UINT32_MAX, 2, true, GD_SCRUB_ALL, &found,
                       &x.err), GD_CORRUPT);
    CHECK_INT(gd_scrub(repo, 1, 0, UINT32_MAX, true, GD_SCRUB_ALL, &found,
                       &x.err), GD_INVALID);
    CHECK_INT(gd_scrub(repo, 2, 0, 1, true, GD_SCRUB_ALL, &found, &x.err),
                       GD_NOTFOUND);
}

TEST_WITH(test_states_that_are_not_live, setup(GD_CODEC_LZ4), teardown())
{
    static const gd_entry freed = {.state = GD_ENTRY_FREED};
    gd_entry damaged = entries[6];
    damaged.state = GD_ENTRY_DAMAGED;
    write_entry(5, &freed);
    write_entry(6, &damaged);
    CHECK_CONTAINS(verdicts(), "111110011111");
}

/* ---- damaged groups ---- */

TEST(test_every_byte_of_a_segment)
{
    for (int codec = GD_CODEC_NONE; codec <= GD_CODEC_ZSTD; codec++) {
        setup((gd_codec)codec);
        uint64_t start = entries[4].segment, end = segment_end(4);
        for (uint64_t at = start; at < end; at++) {
            scratch_flip(&x, GROUP_1, at, (uint8_t)(1 << at % 8));
            const char *text = verdicts();
            /* The neighbours have good verdicts; and this block has a bad
             * one. */
            CHECK(memcmp(text, "1111", 4) == 0 &&
                  memcmp(text + 8, "1111", 4) == 0);
            CHECK(memcmp(text + 4, "1111", 4) != 0);
            if (codec == GD_CODEC_NONE && at >= start + GD_SEGMENT_HEADER) {
                /* Only one block is damaged; the others are only worn. */
                uint64_t hit = (at - start - GD_SEGMENT_HEADER) / BLOCK;
                for (unsigned i = 0; i < 4; i++) {
                    CHECK_INT(text[4 + i], i == hit ? '3' : '2');
                }
            }
            scratch_flip(&x, GROUP_1, at, (uint8_t)(1 << at % 8));
        }
        CHECK_CONTAINS(verdicts(), "111111111111");
        teardown();
    }
}

TEST_WITH(test_every_byte_of_an_entry, setup(GD_CODEC_LZ4), teardown())
{
    for (int at = 0; at < GD_ENTRY_SIZE; at++) {
        scratch_flip(&x, GROUP_1, gd_entry_offset(5) + at, 0x10);
        CHECK_CONTAINS(verdicts(), "111114111111");
        scratch_flip(&x, GROUP_1, gd_entry_offset(5) + at, 0x10);
    }
    static const uint8_t zeros[GD_ENTRY_SIZE];
    scratch_write(&x, GROUP_1, zeros, sizeof zeros, gd_entry_offset(11));
    CHECK_CONTAINS(verdicts(), "111111111114");
}

TEST_WITH(test_wrong_fingerprint, setup(GD_CODEC_LZ4), teardown())
{
    gd_entry entry = entries[2];
    entry.fingerprint.bytes[31] ^= 1;
    write_entry(2, &entry);
    CHECK_CONTAINS(verdicts(), "113111111111");
    /* A scrub that compares only checksums does not detect it. */
    gd_scrub_result found;
    REQUIRE(gd_scrub(repo, 1, 0, BLOCKS, false, GD_SCRUB_ALL, &found,
                     &x.err) == GD_OK);
    CHECK_INT(found.verdicts[2], GD_VERDICT_GOOD);
    x.env->release(x.env, found.verdicts);
    scratch_flip(&x, GROUP_1, entries[8].segment + 40, 1);
    REQUIRE(gd_scrub(repo, 1, 0, BLOCKS, false, GD_SCRUB_ALL, &found,
                     &x.err) == GD_OK);
    CHECK(found.verdicts[8] >= GD_VERDICT_WORN);
    x.env->release(x.env, found.verdicts);
}

/* Entries contradict one another about their segment. */
TEST_WITH(test_entries_that_disagree, setup(GD_CODEC_LZ4), teardown())
{
    gd_entry entry = entries[4];
    entry.stored_length--;
    write_entry(4, &entry);
    CHECK_CONTAINS(verdicts(), "111131111111");
    entry = entries[4];
    entry.codec = GD_CODEC_ZSTD;
    write_entry(4, &entry);
    CHECK_CONTAINS(verdicts(), "111131111111");
    entry = entries[4];
    entry.plain_offset = 4 * BLOCK;
    write_entry(4, &entry);
    CHECK_CONTAINS(verdicts(), "111131111111");
    entry = entries[4];
    entry.segment += 1000000;
    write_entry(4, &entry);
    CHECK_CONTAINS(verdicts(), "111131111111");
}

TEST_WITH(test_truncated, setup(GD_CODEC_NONE), teardown())
{
    scratch_truncate(&x, GROUP_1, segment_end(11) - 1);
    CHECK_CONTAINS(verdicts(), "111111113333");
    scratch_truncate(&x, GROUP_1, gd_entry_offset(9));
    CHECK_CONTAINS(verdicts(), "333333333444");
    scratch_truncate(&x, GROUP_1, 100);
    gd_scrub_result found;
    CHECK_INT(gd_scrub(repo, 1, 0, BLOCKS, true, GD_SCRUB_ALL, &found,
                       &x.err), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, GROUP_1);
}

/* ---- two readings ---- */

enum { OPENINGS = 2 }; /* of each reading: one for direct reads */

/* A table of system calls that runs a function between the first and the
 * second reading of a group. */
typedef struct turn {
    gd_env env; /* first */
    const gd_env *real;
    int opened;
    void (*act)(void);
} turn;

static int
turn_openat(const gd_env *env, int dir, const char *path, int flags,
            mode_t mode)
{
    turn *t = (turn *)(uintptr_t)env;
    if (strcmp(path, GROUP_1) == 0 && ++t->opened == OPENINGS + 1 &&
        t->act != NULL) {
        t->act();
    }
    return t->real->openat(t->real, dir, path, flags, mode);
}

static const char *
verdicts_around(void (*act)(void), int *opened)
{
    turn t = {.env = *gd_env_posix(), .real = gd_env_posix(), .act = act};
    t.env.openat = turn_openat;
    const gd_env *before = repo->env;
    repo->env = &t.env;
    static char text[BLOCKS + 1];
    gd_scrub_result found = {0};
    CHECK_INT(gd_scrub(repo, 1, 0, BLOCKS, true, GD_SCRUB_ALL, &found,
                       &x.err), GD_OK);
    for (int i = 0; found.verdicts != NULL && i < BLOCKS; i++) {
        text[i] = (char)('0' + found.verdicts[i]);
    }
    t.real->release(t.real, found.verdicts);
    repo->env = before;
    *opened = t.opened;
    return text;
}

static void
free_slots(void)
{
    static const gd_entry freed = {.state = GD_ENTRY_FREED};
    for (uint32_t slot = 4; slot < 8; slot++) {
        write_entry(slot, &freed);
    }
}

static void
put_back(void)
{
    scratch_flip(&x, GROUP_1, entries[4].segment + 40, 1);
}

/* Replaces the file as rewriting does: segments have other offsets. */
static void
replace_file(void)
{
    enum { ROOM = 65536 };
    static uint8_t raw[ROOM];
    uint64_t size = (uint64_t)scratch_size(&x, GROUP_1);
    scratch_read(&x, GROUP_1, raw, size, 0);
    raw[entries[4].segment + 40] ^= 1;
    scratch_write(&x, "spool/new", raw, size, 0);
    x.env->renameat(x.env, x.root, "spool/new", GROUP_1);
}

static void
remove_group(void)
{
    x.env->unlinkat(x.env, x.root, GROUP_1);
}

TEST(test_what_changes_meanwhile_is_no_damage)
{
    static const struct {
        void (*act)(void);
        const char *wanted;
    } cases[] = {
        {NULL, "111132221111"},
        {free_slots, "111100001111"},
        {put_back, "111111111111"},
        {replace_file, "111111111111"},
    };
    for (int i = 0; i < 4; i++) {
        setup(GD_CODEC_NONE);
        int opened;
        CHECK_CONTAINS(verdicts_around(cases[i].act, &opened),
                       "111111111111");
        CHECK_INT(opened, OPENINGS); /* nothing is read twice */
        scratch_flip(&x, GROUP_1, entries[4].segment + 40, 1);
        CHECK_CONTAINS(verdicts_around(cases[i].act, &opened),
                       cases[i].wanted);
        CHECK_INT(opened, 2 * OPENINGS);
        teardown();
    }
}

TEST_WITH(test_group_removed_meanwhile, setup(GD_CODEC_NONE), teardown())
{
    scratch_flip(&x, GROUP_1, entries[4].segment + 40, 1);
    turn t = {.env = *gd_env_posix(), .real = gd_env_posix(),
              .act = remove_group};
    t.env.openat = turn_openat;
    const gd_env *before = repo->env;
    repo->env = &t.env;
    gd_scrub_result found;
    CHECK_INT(gd_scrub(repo, 1, 0, BLOCKS, true, GD_SCRUB_ALL, &found,
                       &x.err), GD_NOTFOUND);
    CHECK(found.verdicts == NULL);
    repo->env = before;
}

/* ---- the page cache ---- */

typedef struct forgetful {
    gd_env env; /* first */
    const gd_env *real;
    int refused; /* flags of openat */
    int direct;  /* the file that was opened for direct reads */
    uint64_t dropped_from, dropped_to; /* so far, in one piece */
    bool read_direct, unasked;
} forgetful;

static int
note_open(const gd_env *env, int dir, const char *path, int flags,
          mode_t mode)
{
    forgetful *t = (forgetful *)(uintptr_t)env;
    if ((flags & t->refused) != 0) {
        return -EINVAL;
    }
    int fd = t->real->openat(t->real, dir, path, flags, mode);
    t->direct = (flags & O_DIRECT) != 0 ? fd : t->direct;
    return fd;
}

static void
note_drop(const gd_env *env, int fd, uint64_t offset, uint64_t length)
{
    (void)fd;
    forgetful *t = (forgetful *)(uintptr_t)env;
    t->dropped_from = offset;
    t->dropped_to = offset + length;
}

static ssize_t
note_read(const gd_env *env, int fd, void *buf, size_t len, uint64_t offset)
{
    forgetful *t = (forgetful *)(uintptr_t)env;
    if (fd == t->direct) {
        t->read_direct = true;
    } else if (offset >= entries[0].segment &&
               (offset < t->dropped_from || offset + len > t->dropped_to)) {
        t->unasked = true;
    }
    return t->real->pread(t->real, fd, buf, len, offset);
}

static void
scrub_past_cache(forgetful *t, int refused)
{
    *t = (forgetful){.env = *gd_env_posix(), .real = gd_env_posix(),
                     .refused = refused, .direct = -1};
    t->env.openat = note_open;
    t->env.drop_cache = note_drop;
    t->env.pread = note_read;
    const gd_env *before = repo->env;
    repo->env = &t->env;
    CHECK_CONTAINS(verdicts(), "111111111111");
    CHECK(!t->unasked);
    repo->env = before;
}

TEST_WITH(test_disk_is_read_and_not_the_cache, setup(GD_CODEC_NONE),
          teardown())
{
    forgetful t;
    scrub_past_cache(&t, 0);
    CHECK(t.direct < 0 || t.read_direct);
    scrub_past_cache(&t, O_DIRECT);
    CHECK(t.dropped_to > t.dropped_from);
    CHECK_INT(t.dropped_from % 4096, 0); /* only whole pages are dropped */
    CHECK_INT(t.dropped_to % 4096, 0);
}

/* A rewritten group must not be judged by the entries of the old one. */
TEST(test_direct_reads_are_of_the_file_with_the_entries)
{
    setup(GD_CODEC_NONE);
    turn t = {.env = *gd_env_posix(), .real = gd_env_posix(),
              .opened = OPENINGS - 1, .act = replace_file};
    t.env.openat = turn_openat;
    const gd_env *before = repo->env;
    repo->env = &t.env;
    /* The new file has other bytes. */
    CHECK_CONTAINS(verdicts(), "111111111111");
    CHECK_INT(t.opened, OPENINGS - 1 + OPENINGS);
    repo->env = before;
    CHECK_CONTAINS(verdicts(), "111132221111");
    teardown();
}

/* ---- threads ---- */

/* More than two windows are judged by any number of threads. */
TEST(test_threads_judge_alike)
{
    enum { SEGMENT = 65536, SLOTS = 8 * GD_WINDOW / SEGMENT };
    static uint8_t large[SLOTS * SEGMENT];
    fill_random(large, sizeof large, 3);
    for (unsigned threads = 0; threads < 4; threads += 3) {
        gd_scrub_result found;
        scratch_init(&x);
        x.params.block_size = x.params.segment_size = SEGMENT;
        x.params.group_slots = SLOTS;
        x.params.codec = GD_CODEC_NONE;
        x.params.threads = threads;
        repo = scratch_repo(&x);
        CHECK_INT(put_image(repo, "one", large, sizeof large, sizeof large,
                            NULL, &x.err), GD_OK);
        const uint64_t size = GD_SEGMENT_HEADER + SEGMENT;
        for (uint64_t slot = 7; slot < SLOTS; slot += 50) {
            scratch_flip(&x, GROUP_1,
                         gd_fptable_data_start(SLOTS) + slot * size + 99, 1);
        }
        REQUIRE(gd_scrub(repo, 1, 0, SLOTS, true, GD_SCRUB_ALL, &found,
                         &x.err) == GD_OK);
        uint64_t bad = 0;
        for (unsigned slot = 0; slot < SLOTS; slot++) {
            bool flipped = slot % 50 == 7;
            bad += flipped;
            CHECK_INT(found.verdicts[slot],
                      flipped ? GD_VERDICT_DAMAGED : GD_VERDICT_GOOD);
        }
        CHECK_INT(found.bytes, (SLOTS + bad) * size); /* twice read */
        x.env->release(x.env, found.verdicts);
        teardown();
    }
}

/* ---- faults ---- */

/* A table under which a range of the file cannot be read. */
typedef struct bad_disk {
    gd_env env; /* first */
    const gd_env *real;
    uint64_t from, to;
    int number;
    int left; /* failures */
} bad_disk;

static ssize_t
bad_pread(const gd_env *env, int fd, void *buf, size_t len, uint64_t offset)
{
    bad_disk *t = (bad_disk *)(uintptr_t)env;
    if (offset < t->to && offset + len > t->from && t->left > 0) {
        t->left--;
        return -t->number;
    }
    return t->real->pread(t->real, fd, buf, len, offset);
}

static const char *
verdicts_with(uint64_t from, uint64_t to, int number, int failures)
{
    bad_disk t = {.env = *gd_env_posix(), .real = gd_env_posix(),
                  .from = from, .to = to, .number = number, .left = failures};
    t.env.pread = bad_pread;
    const gd_env *before = repo->env;
    static char text[BLOCKS + 1];
    gd_scrub_result found;
    repo->env = &t.env;
    gd_status s = gd_scrub(repo, 1, 0, BLOCKS, true, GD_SCRUB_ALL, &found,
                           &x.err);
    for (int i = 0; i < BLOCKS; i++) {
        text[i] = s == GD_OK ? (char)('0' + found.verdicts[i]) : '-';
    }
    t.real->release(t.real, s == GD_OK ? found.verdicts : NULL);
    repo->env = before;
    return text;
}

/* An error of the disk is damage, of exactly the unreadable blocks. */
TEST_WITH(test_unreadable_place, setup(GD_CODEC_NONE), teardown())
{
    uint64_t from = entries[8].segment, to = segment_end(8);
    CHECK_CONTAINS(verdicts_with(from, to, EIO, 99), "111111113333");
    CHECK_CONTAINS(verdicts_with(from, to, EBADMSG, 99), "111111113333");
    CHECK_CONTAINS(verdicts_with(from, to, EBADF, 99), "------------");
    CHECK_CONTAINS(verdicts_with(from, to, EIO, 1), "111111111111");
    from = gd_entry_offset(9);
    CHECK_CONTAINS(verdicts_with(from, from + 512, EIO, 99), "111111111444");
    CHECK_CONTAINS(verdicts_with(0, 512, EIO, 99), "------------");
    CHECK_INT(x.err.sys_errno, EIO);
}

/* A caller that wants no words gets the same status. */
TEST_WITH(test_no_words, setup(GD_CODEC_NONE), teardown())
{
    gd_error *const words[] = {&x.err, NULL};
    uint64_t faults = 1;
    for (uint64_t n = 1; faults > 0; n++) {
        gd_status s[2];
        for (int i = 0; i < 2; i++) {
            gd_scrub_result found;
            faults = fault_env_faults(&x.f);
            fault_env_fail(&x.f, FAULT_PREAD, n, EIO, true);
            s[i] = gd_scrub(repo, 1, 0, BLOCKS, true, GD_SCRUB_ALL, &found,
                            words[i]);
            faults = fault_env_faults(&x.f) - faults;
            fault_env_heal(&x.f);
            x.env->release(x.env, found.verdicts);
        }
        CHECK_INT(s[1], s[0]);
    }
}

TEST_WITH(test_no_fault_is_taken_for_damage, setup(GD_CODEC_NONE), teardown())
{
    static const fault_call kinds[] = {FAULT_ANY, FAULT_ALLOC};
    static const int numbers[] = {EMFILE, ENOMEM};
    for (int kind = 0; kind < 2; kind++) {
        uint64_t calls = fault_env_count(&x.f, kinds[kind]);
        CHECK_CONTAINS(verdicts(), "111111111111");
        calls = fault_env_count(&x.f, kinds[kind]) - calls;
        CHECK(calls > 3);
        for (uint64_t n = 1; n <= calls; n++) {
            gd_scrub_result found;
            fault_env_fail(&x.f, kinds[kind], n, numbers[kind], false);
            gd_status s = gd_scrub(repo, 1, 0, BLOCKS, true, GD_SCRUB_ALL,
                                   &found, &x.err);
            for (int i = 0; s == GD_OK && i < BLOCKS; i++) {
                CHECK_INT(found.verdicts[i], GD_VERDICT_GOOD);
            }
            if (s != GD_OK) {
                CHECK(s == GD_IO || s == GD_NOMEM);
                CHECK(found.verdicts == NULL);
            } else {
                x.env->release(x.env, found.verdicts);
            }
            fault_env_heal(&x.f);
        }
    }
}
