/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_image_warm.c - reading with metadata that is kept from earlier reads: it
 * is not read again, it hides no damage of blocks (I7), and whatever is wrong
 * with it is read again from the files.
 */
#include "engine/read/image.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine/files/group.h"
#include "engine/files/image_delete.h"
#include "engine/repo/metacache.h"
#include "engine/repo/segcache.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define GROUP_1 "groups/00000001"

enum {
    BLOCK = 512,
    SEGMENT = 4096,
    STORED = SEGMENT + GD_SEGMENT_HEADER, /* codec none */
    SLOTS = 64,
    SIZE = 40 * BLOCK,
};

static scratch x;
static gd_repo *repo;
static uint8_t data[SIZE];

static void
setup(void)
{
    scratch_init(&x);
    x.params.block_size = BLOCK;
    x.params.group_slots = SLOTS;
    x.params.segment_size = SEGMENT;
    x.params.codec = GD_CODEC_NONE;
    repo = scratch_repo_filter(&x);
    fill_random(data, SIZE, 1);
    CHECK_INT(put_image(repo, "a", data, SIZE, SIZE, NULL, &x.err), GD_OK);
}

static void
teardown(void)
{
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

/* Reads blocks.  GD_OK only with the right bytes. */
static gd_status
read_blocks(gd_image *image, const uint8_t *wanted, uint32_t first,
            uint32_t count)
{
    uint8_t out[SIZE];
    size_t done, length = (size_t)count * BLOCK;
    gd_status s = gd_image_read(image, out, length, (uint64_t)first * BLOCK,
                                &done, &x.err);
    CHECK(s != GD_OK ||
          (done == length &&
           memcmp(out, wanted + (size_t)first * BLOCK, length) == 0));
    return s;
}

static gd_status
read_block(gd_image *image, uint32_t block)
{
    return read_blocks(image, data, block, 1);
}

/* Opens it and reads a block, so that its metadata is kept. */
static gd_image *
open_warm(const char *image_id)
{
    gd_image *image = require_image(repo, image_id);
    CHECK_INT(read_block(image, 0), GD_OK);
    return image;
}

static uint64_t
preads(void)
{
    return fault_env_count(&x.f, FAULT_PREAD);
}

static uint64_t
kept_bytes(void)
{
    gd_lru_stats stats;
    gd_metacache_get_stats(repo->metacache, &stats);
    return stats.weight;
}

/* Calls use(extent) with what is kept of the image's first extent; NULL if
 * nothing is. */
static void
with_kept(gd_image *image, void (*use)(gd_cached_extent *extent))
{
    gd_recipe_page page;
    gd_group *group;
    REQUIRE(gd_image_extents(image, 1, &page, &x.err) == GD_OK);
    REQUIRE(gd_fpcache_group(repo->cache, page.extents[0].group, false, &group,
                             &x.err) == GD_OK);
    gd_cached_extent *extent =
        gd_metacache_get(repo->metacache, group, &page.extents[0]);
    use(extent);
    if (extent != NULL) {
        gd_metacache_return(repo->metacache, extent);
    }
    gd_fpcache_return_group(repo->cache, group);
}

static void
is_kept(gd_cached_extent *extent)
{
    CHECK(extent != NULL);
}

static void
is_not_kept(gd_cached_extent *extent)
{
    CHECK(extent == NULL);
}

static gd_entry
read_entry(uint32_t slot)
{
    gd_group *group;
    gd_entry entry = {0};
    CHECK_INT(gd_group_open(x.env, x.root, &x.params, 1, O_RDONLY, &group,
                            NULL),
              GD_OK);
    CHECK_INT(gd_group_read_entries(group, slot, 1, &entry, NULL), GD_OK);
    gd_group_close(group);
    return entry;
}

static void
write_entry(uint32_t slot, const gd_entry *entry)
{
    gd_group *group;
    REQUIRE(gd_group_open(x.env, x.root, &x.params, 1, O_RDWR, &group, NULL) ==
            GD_OK);
    CHECK_INT(gd_group_write_entries(group, slot, 1, entry, NULL), GD_OK);
    gd_group_close(group);
}

/* Returns the place of a block in the group's file. */
static uint64_t
place_of(uint32_t block)
{
    return gd_fptable_data_start(SLOTS) + (uint64_t)block / 8 * STORED +
           GD_SEGMENT_HEADER + block % 8 * BLOCK;
}

/* ---- what is not read again ---- */

static size_t advised;

static void
count_advice(GD_UNUSED const gd_env *env, GD_UNUSED int fd,
             GD_UNUSED uint64_t offset, GD_UNUSED uint64_t length)
{
    advised++;
}

TEST_WITH(test_one_read_for_a_block, setup(), teardown())
{
    gd_image *image = open_warm("a");
    x.f.env.start_readahead = count_advice;
    uint64_t before = preads(), opened = fault_env_count(&x.f, FAULT_OPENAT);
    uint64_t stats = fault_env_count(&x.f, FAULT_FSTAT);
    advised = 0;
    CHECK_INT(read_block(image, 20), GD_OK);
    CHECK_INT(read_block(image, 11), GD_OK);
    CHECK_INT(preads() - before, 2); /* two segments */
    CHECK_INT(fault_env_count(&x.f, FAULT_OPENAT), opened);
    CHECK_INT(fault_env_count(&x.f, FAULT_FSTAT), stats);
    CHECK_INT(advised, 0);
    /* None at all with segments that are kept, too. */
    gd_segcache_set_budget(repo->segcache, 1 << 20);
    CHECK_INT(read_block(image, 20), GD_OK);
    before = preads();
    CHECK_INT(read_block(image, 17), GD_OK);
    CHECK_INT(preads(), before);
    /* Another open image of the same recipe, and another recipe of the same
     * blocks. */
    gd_segcache_set_budget(repo->segcache, 0);
    CHECK_INT(put_image(repo, "b", data, SIZE, SIZE, NULL, &x.err), GD_OK);
    gd_image *again = require_image(repo, "a"), *b = require_image(repo, "b");
    before = preads();
    CHECK_INT(read_block(again, 30), GD_OK);
    CHECK_INT(preads() - before, 1);
    before = preads();
    CHECK_INT(read_block(b, 3), GD_OK);
    CHECK_INT(preads() - before, 2); /* its page, and the segment */
    gd_image_close(again);
    gd_image_close(b);
    gd_image_close(image);
}

/* A sequential reader keeps no more than it is about to use. */
TEST_SINGLE(test_reading_on)
{
    enum { LARGE = 8 << 20, PIECE = 64 << 10 };
    uint8_t *large = malloc(LARGE), *out = malloc(PIECE);
    size_t done;
    scratch_init(&x);
    x.params.group_slots = 32768;
    repo = scratch_repo_filter(&x);
    fill_random(large, LARGE, 2);
    CHECK_INT(put_image(repo, "a", large, LARGE, LARGE, NULL, &x.err), GD_OK);
    gd_image *image = require_image(repo, "a");
    uint64_t most = 0;
    for (uint64_t at = 0; at < LARGE; at += PIECE) {
        CHECK_INT(gd_image_read(image, out, PIECE, at, &done, &x.err), GD_OK);
        CHECK(memcmp(out, large + at, PIECE) == 0);
        most = kept_bytes() > most ? kept_bytes() : most;
    }
    CHECK(most > 24 * 1024 && most < 2 * 24 * 1024);
    CHECK(kept_bytes() < 4096 + 1000); /* the page */
    /* A reader of ranges keeps both. */
    for (uint64_t at = LARGE; at > 0; at -= LARGE / 4) {
        CHECK_INT(gd_image_read(image, out, 10, at - 100, &done, &x.err),
                  GD_OK);
    }
    CHECK(kept_bytes() > 2 * 24 * 1024);
    gd_image_close(image);
    free(large);
    free(out);
    teardown();
}

/* ---- damage ---- */

/* The bytes of a block are verified however its entry was found. */
TEST_WITH(test_damaged_block, setup(), teardown())
{
    gd_image *image = open_warm("a");
    with_kept(image, is_kept);
    scratch_flip(&x, GROUP_1, place_of(9) + 100, 1);
    CHECK_INT(read_block(image, 9), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "slot 9");
    with_kept(image, is_not_kept);
    CHECK_INT(read_block(image, 8), GD_OK);
    with_kept(image, is_kept);
    scratch_flip(&x, GROUP_1, place_of(9) + 100, 1);
    CHECK_INT(read_blocks(image, data, 0, 40), GD_OK);
    gd_image_close(image);
}

/* Entries and pages that were verified are known, whatever becomes of them on
 * the disk.  A new handle does not know them. */
TEST_WITH(test_damaged_metadata, setup(), teardown())
{
    gd_image *image = open_warm("a");
    scratch_flip(&x, GROUP_1, gd_entry_offset(9) + 3, 1);
    scratch_flip(&x, "images/a", GD_RECIPE_PAGE + 20, 1);
    CHECK_INT(read_blocks(image, data, 0, 40), GD_OK);
    gd_metacache_set_budget(repo->metacache, 0);
    CHECK_INT(read_block(image, 1), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "images/a");
    scratch_flip(&x, "images/a", GD_RECIPE_PAGE + 20, 1);
    CHECK_INT(read_block(image, 1), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "slot 9");
    gd_image_close(image);
}

static void
spoil_checksum(gd_cached_extent *extent)
{
    REQUIRE(extent != NULL);
    extent->blocks[9].checksum ^= 1;
}

static void
spoil_place(gd_cached_extent *extent)
{
    REQUIRE(extent != NULL);
    extent->blocks[9].segment += STORED;
}

static void
spoil_far(gd_cached_extent *extent)
{
    REQUIRE(extent != NULL);
    extent->blocks[9].segment = UINT32_MAX;
    extent->blocks[9].stored_length = GD_SEGMENT_MAX;
}

/* Memory that goes bad, or an extent of another file of the group. */
TEST_WITH(test_wrong_in_the_cache, setup(), teardown())
{
    static void (*const spoil[])(gd_cached_extent *) = {
        spoil_checksum, spoil_place, spoil_far};
    for (int i = 0; i < 3; i++) {
        gd_image *image = open_warm("a");
        with_kept(image, spoil[i]);
        CHECK_INT(read_block(image, 8), GD_OK);
        CHECK_INT(read_block(image, 9), GD_OK);
        with_kept(image, is_not_kept);
        CHECK_INT(read_block(image, 9), GD_OK);
        with_kept(image, is_kept);
        uint64_t before = preads();
        CHECK_INT(read_block(image, 9), GD_OK);
        CHECK_INT(preads() - before, 1);
        gd_image_close(image);
    }
}

/* The scrub marks a block as damaged while its entry is kept as a live one. */
TEST_WITH(test_marked_as_damaged, setup(), teardown())
{
    gd_image *image = open_warm("a");
    gd_entry entry = read_entry(9);
    entry.state = GD_ENTRY_DAMAGED;
    write_entry(9, &entry);
    CHECK_INT(read_block(image, 9), GD_OK); /* its bytes are right */
    scratch_flip(&x, GROUP_1, place_of(9), 1);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(read_block(image, 9), GD_CORRUPT);
        CHECK_CONTAINS(x.err.text, "slot 9 is known to be damaged");
        with_kept(image, is_not_kept);
        CHECK_INT(read_block(image, 10), GD_OK);
        with_kept(image, is_not_kept); /* an extent with a damaged block */
    }
    gd_image_close(image);
}

/* ---- other files of the same names and numbers ---- */

/* File systems give inode numbers out again. */
static int
stat_alike(GD_UNUSED const gd_env *env, int fd, struct stat *st)
{
    int rc = fstat(fd, st);
    st->st_ino = 77;
    return rc < 0 ? -errno : 0;
}

static int
stat_name_alike(GD_UNUSED const gd_env *env, int dir, const char *path,
                struct stat *st)
{
    int rc = fstatat(dir, path, st, AT_SYMLINK_NOFOLLOW);
    st->st_ino = 77;
    return rc < 0 ? -errno : 0;
}

/* The group's first two segments change places in a new file. */
static void
rewrite_group(void)
{
    uint8_t bytes[32768];
    size_t size = (size_t)scratch_size(&x, GROUP_1);
    uint64_t start = gd_fptable_data_start(SLOTS);
    REQUIRE(size <= sizeof bytes && size > start + 2 * STORED);
    scratch_read(&x, GROUP_1, bytes, size, 0);
    scratch_write(&x, "spool/new", bytes, size, 0);
    scratch_write(&x, "spool/new", bytes + start, STORED, start + STORED);
    scratch_write(&x, "spool/new", bytes + start + STORED, STORED, start);
    CHECK_INT(renameat(x.root, "spool/new", x.root, GROUP_1), 0);
    for (uint32_t slot = 0; slot < 16; slot++) {
        gd_entry entry = read_entry(slot);
        entry.segment = (uint32_t)(slot < 8 ? start + STORED : start);
        write_entry(slot, &entry);
    }
}

/* A process that reads one image for long does not keep the space of files that
 * were replaced or removed. */
TEST(test_files_that_are_gone_are_closed)
{
    static uint8_t other[SIZE];
    setup();
    fill_random(other, SIZE, 2);
    CHECK_INT(put_image(repo, "b", other, SIZE, SIZE, NULL, &x.err), GD_OK);
    gd_repo_close(repo);
    x.f.monotonic_ns = 1;
    repo = scratch_repo_filter(&x);
    gd_image *b = require_image(repo, "b");
    CHECK_INT(read_blocks(b, other, 0, SIZE / BLOCK), GD_OK);
    gd_image_close(b);
    gd_image *a = open_warm("a");
    int64_t before = x.f.descriptors;
    CHECK_INT(unlinkat(x.root, "groups/00000002", 0), 0);
    CHECK_INT(read_block(a, 1), GD_OK);
    CHECK_INT(x.f.descriptors, before);
    x.f.monotonic_ns += INT64_C(10) << 30;
    CHECK_INT(read_block(a, 2), GD_OK);
    CHECK_INT(x.f.descriptors, before - 1);
    gd_image_close(a);
    teardown();
}

/* A rewritten group has the addresses of the old one, and its blocks in other
 * places.  Its file has another inode, or one whose number is used again. */
TEST(test_rewritten_group)
{
    for (int alike = 0; alike < 2; alike++) {
        setup();
        if (alike) {
            x.f.env.fstat = stat_alike;
            x.f.env.fstatat = stat_name_alike;
        }
        gd_image *image = open_warm("a");
        rewrite_group();
        CHECK_INT(read_block(image, 3), GD_OK); /* of the old, open file */
        gd_group *group;
        REQUIRE(gd_fpcache_group(repo->cache, 1, true, &group, NULL) == GD_OK);
        gd_fpcache_return_group(repo->cache, group);
        uint64_t before = preads();
        CHECK_INT(read_block(image, 3), GD_OK);
        CHECK(preads() - before > 1);
        CHECK_INT(read_blocks(image, data, 0, 40), GD_OK);
        CHECK_INT(read_block(image, 3), GD_OK);
        before = preads();
        CHECK_INT(read_block(image, 12), GD_OK);
        CHECK_INT(preads() - before, 1);
        gd_image_close(image);
        teardown();
    }
}

/* Another image under the name of one that was deleted, in a group of the same
 * number whose slots have other blocks. */
TEST(test_group_and_image_replaced)
{
    static uint8_t others[SIZE];
    fill_random(others, SIZE, 9);
    for (int alike = 0; alike < 2; alike++) {
        setup();
        if (alike) {
            x.f.env.fstat = stat_alike;
            x.f.env.fstatat = stat_name_alike;
        }
        gd_image_close(open_warm("a"));
        CHECK_INT(gd_image_delete(x.env, x.root, &x.params, "a", NULL, &x.err),
                  GD_OK);
        CHECK_INT(unlinkat(x.root, GROUP_1, 0), 0);
        gd_repo *other;
        CHECK_INT(unlinkat(x.root, "filter", 0), 0);
        other = scratch_repo_filter(&x);
        CHECK_INT(put_image(other, "a", others, SIZE, SIZE, NULL, &x.err),
                  GD_OK);
        gd_repo_close(other);
        gd_image *image = require_image(repo, "a");
        CHECK_INT(read_blocks(image, others, 5, 2), GD_OK);
        CHECK_INT(read_blocks(image, others, 0, 40), GD_OK);
        gd_image_close(image);
        teardown();
    }
}

/* ---- shared file systems ---- */

/* N13.3: what was verified before is right, whatever an old page shows now.
 * What an old page shows is not kept, nor what was read beside the page cache
 * since a read had failed. */
TEST_WITH(test_n13_3_old_pages, setup(), teardown())
{
    gd_repo_close(repo);
    x.f.shared = true;
    repo = scratch_repo_filter(&x);
    gd_image *image = require_image(repo, "a");
    x.f.stale_from = 1536; /* entries and blocks */
    CHECK_INT(read_block(image, 0), GD_OK);
    with_kept(image, is_not_kept);
    x.f.stale_from = gd_fptable_data_start(SLOTS); /* blocks alone */
    CHECK_INT(read_block(image, 0), GD_OK);
    with_kept(image, is_not_kept);
    x.f.stale_from = 0;
    CHECK_INT(read_block(image, 0), GD_OK);
    with_kept(image, is_kept);
    x.f.stale_from = 1536;
    CHECK_INT(read_block(image, 9), GD_OK);
    with_kept(image, is_not_kept);
    gd_image_close(image);
}

/* ---- failures ---- */

TEST_WITH(test_out_of_memory, setup(), teardown())
{
    bool struck = true;
    for (uint64_t n = 1; struck; n++) {
        gd_metacache_set_budget(repo->metacache, 0);
        gd_metacache_set_budget(repo->metacache, GD_METACACHE_BUDGET);
        gd_image *image = require_image(repo, "a");
        uint64_t faults = fault_env_faults(&x.f);
        fault_env_fail(&x.f, FAULT_ALLOC, n, ENOMEM, false);
        gd_status cold = read_block(image, 3), warm = read_block(image, 30);
        CHECK(cold == GD_OK || cold == GD_NOMEM);
        CHECK(warm == GD_OK || warm == GD_NOMEM);
        struck = fault_env_faults(&x.f) > faults;
        fault_env_heal(&x.f);
        CHECK_INT(read_block(image, 9), GD_OK);
        gd_image_close(image);
    }
}

/* A disk that fails for a while. */
TEST_WITH(test_failing_disk, setup(), teardown())
{
    gd_image *image = open_warm("a");
    fault_env_fail(&x.f, FAULT_PREAD, 1, EIO, true);
    CHECK_INT(read_block(image, 9), GD_IO);
    fault_env_heal(&x.f);
    CHECK_INT(read_block(image, 9), GD_OK);
    gd_image_close(image);
}

/* ---- threads ---- */

typedef struct reader {
    gd_image *image;
    uint64_t seed;
    unsigned wrong;
} reader;

static void *
read_ranges(void *arg)
{
    reader *r = arg;
    uint8_t out[4 * BLOCK];
    for (int i = 0; i < 2000 / SWEEP_STRIDE; i++) {
        size_t done, length = 1 + next_random(&r->seed) % sizeof out;
        uint64_t from = next_random(&r->seed) % (SIZE - length);
        gd_status s =
            gd_image_read(r->image, out, length, from, &done, NULL);
        r->wrong += s != GD_OK || done != length ||
                    memcmp(out, data + from, length) != 0;
        if (next_random(&r->seed) % 50 == 0) {
            gd_metacache_set_budget(repo->metacache,
                                    next_random(&r->seed) % 3 * 1000);
        }
    }
    return NULL;
}

TEST_WITH(test_threads, setup(), teardown())
{
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    reader readers[THREADS];
    gd_image *image = require_image(repo, "a");
    for (int i = 0; i < THREADS; i++) {
        readers[i] = (reader){.image = image, .seed = (uint64_t)i};
        CHECK_INT(pthread_create(&threads[i], NULL, read_ranges, &readers[i]),
                  0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK_INT(readers[i].wrong, 0);
    }
    gd_image_close(image);
}
