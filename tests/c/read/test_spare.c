/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_spare.c - spare copies: whole or not there, verified by fingerprint,
 * and read only for a block that is damaged.
 */
#include "engine/read/spare.h"

#include <sys/stat.h>

#include "engine/base/coding.h"
#include "engine/exchange/wire.h"
#include "engine/files/group.h"
#include "engine/read/image.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define GROUP_1 "groups/00000001"
#define SPARES_1 "spares/00000001"

enum { BLOCK = 512, BLOCKS = 30, SIZE = BLOCKS * BLOCK };

static scratch x;
static gd_repo *repo;
static uint8_t data[SIZE];
static gd_address addresses[BLOCKS];
static int64_t clock_now;
static const char *digest = "sha256";

static int64_t
stopped_clock(const gd_env *env)
{
    (void)env;
    return clock_now;
}

static gd_status
get(void)
{
    bool equal;
    gd_status s = get_image(repo, "a", data, SIZE, &equal, &x.err);
    CHECK(s != GD_OK || equal);
    return s;
}

static void
another_handle(void)
{
    gd_repo_close(repo);
    repo = scratch_repo_filter(&x);
}

/* Makes an image of which every block is in group 1, slot by slot. */
static void
setup(gd_codec codec)
{
    scratch_init(&x);
    x.params.block_size = BLOCK;
    x.params.segment_size = 4096;
    x.params.codec = codec;
    strcpy(x.params.digest, digest);
    x.params.by_value = strcmp(digest, "sha256") != 0;
    x.f.env.now = stopped_clock;
    clock_now = 1000;
    memset(data, 'c', SIZE);
    for (size_t i = 0; i < BLOCKS; i++) {
        fill_random(data + i * BLOCK, i % 2 == 0 ? BLOCK : 100, i + 1);
        addresses[i] = (gd_address){1, (uint32_t)i};
    }
    repo = scratch_repo_filter(&x);
    CHECK_INT(put_image(repo, "a", data, SIZE, SIZE, NULL, &x.err), GD_OK);
}

static void
teardown(void)
{
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

static gd_status
write_spares(const gd_address *from, size_t count)
{
    uint64_t bytes = 99;
    gd_status s = gd_spare_write(repo, 1, from, count, &bytes, &x.err);
    CHECK(s != GD_OK || count == 0 ||
          (int64_t)bytes == scratch_size(&x, SPARES_1));
    CHECK(s == GD_OK ? count > 0 || bytes == 0 : bytes == 0);
    if (s == GD_OK) {
        CHECK_INT(scratch_count(&x, "spool", "G-", NULL), 0);
    }
    return s;
}

static gd_entry
entry_of(const char *name, uint32_t slot)
{
    gd_group *group;
    gd_entry entry = {0};
    CHECK_INT(gd_group_open_as(x.env, x.root, &x.params, 1, name, O_RDONLY,
                               &group, &x.err),
              GD_OK);
    CHECK_INT(gd_group_read_entries(group, slot, 1, &entry, NULL), GD_OK);
    gd_group_close(group);
    return entry;
}

static void
write_entry(const char *name, uint32_t slot, const gd_entry *entry)
{
    gd_group *group;
    REQUIRE(gd_group_open_as(x.env, x.root, &x.params, 1, name, O_RDWR, &group,
                             NULL) == GD_OK);
    CHECK_INT(gd_group_write_entries(group, slot, 1, entry, NULL), GD_OK);
    gd_group_close(group);
}

static bool
spare_is(uint32_t slot)
{
    gd_entry entry = entry_of(GROUP_1, slot);
    uint8_t out[BLOCK];
    bool found = false;
    CHECK_INT(gd_spare_read(repo, &gd_global_scope, &entry.fingerprint,
                            entry.plain_length, entry.checksum, out, &found,
                            &x.err), GD_OK);
    CHECK(!found || memcmp(out, data + slot * BLOCK, BLOCK) == 0);
    return found;
}

/* Spoils the block in its group. */
static void
spoil(uint32_t slot)
{
    gd_entry entry = entry_of(GROUP_1, slot);
    scratch_flip(&x, GROUP_1,
                 entry.segment + GD_SEGMENT_HEADER +
                     (entry.codec == GD_CODEC_NONE ? entry.plain_offset + 9
                                                   : entry.stored_length / 2),
                 0x20);
}

static void
mark_damaged(uint32_t slot)
{
    gd_entry entry = entry_of(GROUP_1, slot);
    entry.state = GD_ENTRY_DAMAGED;
    write_entry(GROUP_1, slot, &entry);
}

static uint64_t
spare_reads(void)
{
    return atomic_load(&repo->counters.spare_reads);
}

/* ---- writing and finding ---- */

TEST(test_write_and_read)
{
    for (int codec = GD_CODEC_NONE; codec <= GD_CODEC_ZSTD; codec++) {
        setup((gd_codec)codec);
        CHECK(!spare_is(3));
        CHECK_INT(write_spares(addresses, 20), GD_OK);
        clock_now++;
        for (uint32_t i = 0; i < BLOCKS; i++) {
            CHECK_INT(spare_is(i), i < 20);
        }
        struct stat st;
        CHECK_INT(fstatat(x.root, "spares", &st, 0), 0);
        CHECK_INT(st.st_mode & 0777, 0700);
        CHECK_INT(fstatat(x.root, SPARES_1, &st, 0), 0);
        CHECK_INT(st.st_mode & 0777, 0600);
        uint8_t scope[GD_ID_SIZE], wanted[GD_ID_SIZE];
        scratch_read(&x, SPARES_1, scope, sizeof scope, 32);
        memset(wanted, 0xff, sizeof wanted);
        CHECK(memcmp(scope, wanted, sizeof scope) == 0);
        /* The copies are written again with others, and without any. */
        CHECK_INT(write_spares(addresses + 25, 5), GD_OK);
        clock_now++;
        CHECK(!spare_is(0) && spare_is(25) && spare_is(29));
        CHECK_INT(write_spares(NULL, 0), GD_OK);
        CHECK(!scratch_exists(&x, SPARES_1));
        CHECK_INT(write_spares(NULL, 0), GD_OK);
        clock_now++;
        CHECK(!spare_is(25));
        CHECK_INT(get(), GD_OK);
        CHECK_INT(spare_reads(), 0);
        teardown();
    }
}

/* A copy is found only by all facts about its block. */
TEST_WITH(test_only_that_block, setup(GD_CODEC_LZ4), teardown())
{
    uint8_t out[BLOCK];
    bool found;
    CHECK_INT(write_spares(addresses, BLOCKS), GD_OK);
    gd_entry a = entry_of(GROUP_1, 4), b = entry_of(GROUP_1, 5);
    CHECK_INT(gd_spare_read(repo, &gd_global_scope, &a.fingerprint, BLOCK,
                            b.checksum, out, &found, &x.err), GD_OK);
    CHECK(!found);
    CHECK_INT(gd_spare_read(repo, &gd_global_scope, &a.fingerprint, BLOCK - 1,
                            a.checksum, out, &found, &x.err), GD_OK);
    CHECK(!found);
    /* This copy has a's fingerprint, with b's bytes and their right
     * checksum. */
    gd_entry lie = entry_of(SPARES_1, 5);
    lie.fingerprint = a.fingerprint;
    write_entry(SPARES_1, 5, &lie);
    another_handle();
    CHECK_INT(gd_spare_read(repo, &gd_global_scope, &a.fingerprint, BLOCK,
                            b.checksum, out, &found, &x.err), GD_OK);
    CHECK(!found);
    CHECK(spare_is(4)); /* another copy with its name does no harm */
}

/* Other processes' files are found, but the directory is not listed for every
 * missing block. */
TEST_WITH(test_listing, setup(GD_CODEC_LZ4), teardown())
{
    gd_repo *other = scratch_repo_filter(&x);
    uint64_t bytes, lists;
    CHECK(!spare_is(1));
    CHECK_INT(gd_spare_write(other, 1, addresses, 5, &bytes, &x.err), GD_OK);
    lists = fault_env_count(&x.f, FAULT_LIST);
    for (int i = 0; i < 10; i++) {
        CHECK(!spare_is(1));
    }
    CHECK_INT(fault_env_count(&x.f, FAULT_LIST), lists);
    clock_now++;
    CHECK(spare_is(1));
    CHECK(spare_is(2));
    CHECK_INT(fault_env_count(&x.f, FAULT_LIST), lists + 1);
    CHECK_INT(gd_spare_write(other, 1, addresses + 5, 5, &bytes, &x.err),
              GD_OK);
    clock_now++;
    CHECK(!spare_is(1));
    CHECK(spare_is(7));
    gd_repo_close(other);
}

TEST_WITH(test_what_is_refused, setup(GD_CODEC_LZ4), teardown())
{
    uint64_t bytes;
    CHECK_INT(gd_spare_write(repo, 0, addresses, 1, &bytes, &x.err),
              GD_INVALID);
    CHECK_INT(gd_spare_write(repo, 1, addresses, 32769, &bytes, &x.err),
              GD_INVALID);
    const gd_address missing[] = {{1, 3}, {1, 63}};
    CHECK_INT(write_spares(missing, 2), GD_CORRUPT);
    CHECK(!scratch_exists(&x, SPARES_1));
    const gd_address nowhere = {77, 0};
    CHECK(write_spares(&nowhere, 1) != GD_OK);
    CHECK_INT(scratch_count(&x, "spool", "G-", NULL), 0);
}

/* A block that is damaged now keeps its copy. */
TEST_WITH(test_written_anew_from_itself, setup(GD_CODEC_NONE), teardown())
{
    CHECK_INT(write_spares(addresses, 10), GD_OK);
    spoil(3);
    mark_damaged(4);
    CHECK_INT(write_spares(addresses, 20), GD_OK);
    clock_now++;
    for (uint32_t i = 0; i < 20; i++) {
        CHECK(spare_is(i));
    }
    /* If a block has no copy, the old file stays unchanged. */
    spoil(25);
    CHECK_INT(write_spares(addresses, BLOCKS), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "slot 25");
    clock_now++;
    CHECK(spare_is(3) && spare_is(19) && !spare_is(26));
}

/* ---- reads of damaged blocks ---- */

TEST(test_read_of_damaged_blocks)
{
    for (int codec = GD_CODEC_NONE; codec <= GD_CODEC_ZSTD; codec++) {
        setup((gd_codec)codec);
        CHECK_INT(write_spares(addresses, BLOCKS), GD_OK);
        spoil(3);
        CHECK_INT(get(), GD_OK);
        CHECK(spare_reads() >= 1);
        uint64_t before = spare_reads();
        mark_damaged(20);
        CHECK_INT(get(), GD_OK);
        CHECK(spare_reads() > before);
        /* Frames contain copies, too, even if some were made before the damage
         * is found. */
        spoil(3); /* restores the byte */
        spoil(27);
        gd_image *image;
        gd_frames frames;
        const gd_range all = {0, SIZE};
        CHECK_INT(gd_image_open(repo, "a", NULL, &image, &x.err), GD_OK);
        uint64_t end;
        CHECK_INT(gd_wire_frames(image, &all, 1, &frames, &end, &x.err),
                  GD_OK);
        CHECK(memmem(frames.bytes, frames.length, data + 26 * BLOCK, BLOCK) !=
              NULL);
        CHECK(memmem(frames.bytes, frames.length, data + 20 * BLOCK, BLOCK) !=
              NULL);
        uint64_t plain = 0; /* each block once, though some came twice */
        for (size_t i = 0; i < frames.count; i++) {
            plain += gd_get32(frames.bytes + 8 +
                              (i == 0 ? 0 : frames.ends[i - 1]));
        }
        CHECK_INT(plain, SIZE);
        gd_frames_free(&frames);
        gd_image_close(image);
        /* Without the copies it is damage. */
        CHECK_INT(write_spares(NULL, 0), GD_OK);
        clock_now++;
        CHECK_INT(get(), GD_CORRUPT);
        CHECK_CONTAINS(x.err.text, "groups/00000001");
        CHECK_CONTAINS(x.err.text, "images/a");
        teardown();
    }
}

/* The data part of the group is lost altogether. */
TEST_WITH(test_lost_segments, setup(GD_CODEC_LZ4), teardown())
{
    CHECK_INT(write_spares(addresses, BLOCKS), GD_OK);
    scratch_truncate(&x, GROUP_1, 8192 + 100);
    CHECK_INT(get(), GD_OK);
    CHECK_INT(spare_reads(), BLOCKS);
    /* But without its entry, a block's contents are unknown. */
    const gd_entry freed = {.state = GD_ENTRY_FREED};
    write_entry(GROUP_1, 3, &freed);
    CHECK_INT(get(), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "holds no block");
}

/* The disk refuses to read the group's file, which has that inode. */
static ino_t bad_inode;

static ssize_t
pread_or_not(const gd_env *env, int fd, void *buf, size_t len, uint64_t offset)
{
    struct stat st;
    bool bad = fstat(fd, &st) == 0 && st.st_ino == bad_inode;
    return bad && offset >= 8192 ? -EIO
                                 : fault_table.pread(env, fd, buf, len, offset);
}

TEST_WITH(test_unreadable_segments, setup(GD_CODEC_LZ4), teardown())
{
    struct stat st;
    CHECK_INT(write_spares(addresses, BLOCKS - 1), GD_OK);
    REQUIRE(fstatat(repo->root, GROUP_1, &st, 0) == 0);
    bad_inode = st.st_ino;
    x.f.env.pread = pread_or_not;
    CHECK_INT(get(), GD_IO);
    CHECK_CONTAINS(x.err.text, GROUP_1);
    x.f.env.pread = fault_table.pread;
    CHECK_INT(write_spares(addresses, BLOCKS), GD_OK);
    x.f.env.pread = pread_or_not;
    clock_now++;
    CHECK_INT(get(), GD_OK);
    x.f.env.pread = fault_table.pread;
}

/* Every byte of the copies is changed, while they are needed: reads never
 * return wrong data. */
TEST(test_every_byte_of_a_spare)
{
    unsigned refused = 0;
    setup(GD_CODEC_NONE);
    CHECK_INT(write_spares(addresses, 3), GD_OK);
    spoil(0);
    mark_damaged(2);
    CHECK_INT(get(), GD_OK);
    int64_t size = scratch_size(&x, SPARES_1);
    for (int64_t at = 0; at < size; at += SWEEP_STRIDE) {
        if (at > 5000 && at < 8000) {
            continue; /* an unused area */
        }
        scratch_flip(&x, SPARES_1, (uint64_t)at, (uint8_t)(1 << at % 8));
        another_handle();
        gd_status s = get();
        CHECK(s == GD_OK || s == GD_CORRUPT);
        refused += s != GD_OK;
        scratch_flip(&x, SPARES_1, (uint64_t)at, (uint8_t)(1 << at % 8));
    }
    CHECK(refused > 1000 / SWEEP_STRIDE);
    another_handle();
    CHECK_INT(get(), GD_OK);
    /* The file has noise, or no bytes. */
    uint8_t noise[9000];
    fill_random(noise, sizeof noise, 1);
    scratch_write(&x, SPARES_1, noise, sizeof noise, 0);
    scratch_write(&x, "spares/strange", noise, 9, 0);
    scratch_write(&x, "spares/00000002", noise, 0, 0);
    another_handle();
    CHECK_INT(get(), GD_CORRUPT);
    teardown();
}

/* ---- failures ---- */

TEST(test_failures)
{
    static const int errors[] = {EIO, ENOSPC, ENOMEM};
    static const gd_status statuses[] = {GD_IO, GD_NOSPACE, GD_NOMEM};
    for (int kind = 0; kind < 3; kind++) {
        bool struck = true;
        unsigned failed = 0;
        for (uint64_t n = 1; struck; n += SWEEP_STRIDE) {
            setup(GD_CODEC_LZ4);
            if (n % 2 == 0) {
                CHECK_INT(write_spares(addresses, 10), GD_OK);
            }
            uint64_t faults = fault_env_faults(&x.f), bytes;
            fault_env_fail(&x.f, kind < 2 ? FAULT_ANY : FAULT_ALLOC, n,
                           errors[kind], false);
            gd_status s = gd_spare_write(repo, 1, addresses, 20, &bytes,
                                         &x.err);
            struck = fault_env_faults(&x.f) > faults;
            fault_env_heal(&x.f);
            CHECK(s == GD_OK || s == statuses[kind]);
            failed += s != GD_OK;
            clock_now++;
            another_handle();
            bool old = n % 2 == 0, new = spare_is(15);
            CHECK(new || s != GD_OK);
            CHECK_INT(spare_is(5), old || new);
            CHECK_INT(scratch_exists(&x, SPARES_1), old || new);
            CHECK(scratch_count(&x, "spool", "G-", NULL) <= 1);
            CHECK_INT(gd_spare_write(repo, 1, addresses, BLOCKS, &bytes,
                                     &x.err),
                      GD_OK);
            clock_now++;
            spoil(15);
            CHECK_INT(get(), GD_OK);
            teardown();
        }
        CHECK(failed > 5);
    }
}

/* The file is durable before it has its name. */
TEST(test_nothing_unsynced_gets_the_name)
{
    for (uint64_t n = 1; n <= 6; n++) {
        uint64_t bytes;
        setup(GD_CODEC_LZ4);
        CHECK_INT(write_spares(addresses, 10), GD_OK);
        fault_env_fail(&x.f, FAULT_FSYNC, n, EIO, true);
        gd_status s = gd_spare_write(repo, 1, addresses, 20, &bytes, &x.err);
        fault_env_heal(&x.f);
        clock_now++;
        CHECK(n > 3 || s == GD_IO);
        /* The syncs are of the header, of the file; then of spares/. */
        CHECK_INT(spare_is(15), n > 2);
        CHECK(spare_is(5));
        teardown();
    }
}

/* If another block may have the fingerprint, no copy is made (I5). A file of
 * an earlier version is removed all the same. */
TEST(test_weak_fingerprints)
{
    static const char *const weak[] = {"xxh3-128", "sha1"};
    for (size_t i = 0; i < 2; i++) {
        digest = weak[i];
        setup(GD_CODEC_NONE);
        CHECK_INT(write_spares(addresses, 20), GD_INVALID);
        CHECK_CONTAINS(x.err.text, weak[i]);
        CHECK_INT(scratch_count(&x, "spool", "G-", NULL), 0);
        CHECK(!scratch_exists(&x, SPARES_1));
        mkdirat(x.root, "spares", 0700);
        scratch_write(&x, SPARES_1, data, SIZE, 0);
        CHECK_INT(write_spares(addresses, 0), GD_OK);
        CHECK(!scratch_exists(&x, SPARES_1));
        teardown();
    }
    digest = "sha256";
}
