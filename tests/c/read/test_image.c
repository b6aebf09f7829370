/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_image.c - reading: any range is exact, and damaged, exchanged or
 * missing data is an error that names it, never wrong bytes (I7).
 */
#include "engine/read/image.h"

#include "engine/base/coding.h"
#include "engine/files/group.h"
#include "engine/files/image_delete.h"
#include "engine/read/plan.h"
#include "engine/repo/metacache.h"
#include "engine/repo/segcache.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define GROUP_1 "groups/00000001"

static scratch x;
static gd_repo *repo;

static void
setup(uint32_t block, uint32_t slots, uint32_t segment, gd_codec codec)
{
    scratch_init(&x);
    x.params.block_size = block;
    x.params.group_slots = slots;
    x.params.segment_size = segment;
    x.params.codec = codec;
    repo = scratch_repo_filter(&x);
}

/* Nothing that was verified is kept, so each read finds what the files have
 * become.  test_image_warm.c has the rest. */
static void
setup_without_cache(uint32_t block, uint32_t slots, uint32_t segment,
                    gd_codec codec)
{
    setup(block, slots, segment, codec);
    gd_metacache_set_budget(repo->metacache, 0);
}

static void
teardown(void)
{
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

static void
another_handle(void)
{
    gd_repo_close(repo);
    repo = scratch_repo_filter(&x);
}

static void
put(const char *image_id, const uint8_t *data, size_t length)
{
    if (!CHECK_INT(put_image(repo, image_id, data, length, 1 << 20, NULL,
                             &x.err),
                   GD_OK)) {
        fprintf(stderr, "%s\n", x.err.text);
    }
}

/* Returns GD_OK only if the bytes are exactly these. */
static gd_status
get(const char *image_id, const uint8_t *data, size_t length)
{
    bool equal;
    gd_status s = get_image(repo, image_id, data, length, &equal, &x.err);
    CHECK(s != GD_OK || equal);
    return s;
}

/* ---- shared file systems ---- */

/* On a shared file system, data that does not verify is read again beside the
 * page cache before it counts as damaged. */
TEST(test_n13_3_old_pages_are_read_again)
{
    enum { SIZE = 200 * 512 + 77, HEADER = 1536 };
    static uint8_t data[SIZE];
    for (int shared = 0; shared < 2; shared++) {
        setup(512, 64, 4096, GD_CODEC_LZ4);
        fill_image(data, SIZE, 512, 60, 1);
        put("a", data, SIZE);
        x.f.shared = shared != 0;
        another_handle();
        /* The old data is entries and blocks; then only blocks. */
        x.f.stale_from = HEADER;
        CHECK_INT(get("a", data, SIZE), shared ? GD_OK : GD_CORRUPT);
        x.f.stale_from = gd_fptable_data_start(64);
        CHECK_INT(get("a", data, SIZE), shared ? GD_OK : GD_CORRUPT);
        x.f.stale_from = 0;
        CHECK_INT(get("a", data, SIZE), GD_OK);
        teardown();
    }
}

/* Blocks appended there are read back, and found by another handle. */
TEST(test_written_and_read_beside_the_page_cache)
{
    enum { SIZE = 150 * 512 };
    static uint8_t data[SIZE];
    scratch_init(&x);
    x.f.shared = true;
    x.params.block_size = 512;
    x.params.segment_size = 4096;
    repo = scratch_repo_filter(&x);
    fill_image(data, SIZE, 512, 60, 1);
    put("a", data, SIZE);
    another_handle();
    put("b", data, SIZE);
    CHECK_INT(get("a", data, SIZE), GD_OK);
    CHECK_INT(get("b", data, SIZE), GD_OK);
    teardown();
}

/* ---- ranges ---- */

static void
check_range(gd_image *image, const uint8_t *data, size_t size, uint64_t from,
            size_t length)
{
    static uint8_t out[(9 << 20) + 200];
    size_t done = 99;
    size_t wanted = from >= size ? 0 : size - from < length ? size - from
                                                            : length;
    memset(out, 0xee, wanted + 8);
    CHECK_INT(gd_image_read(image, out, length, from, &done, &x.err), GD_OK);
    if (!CHECK_INT(done, wanted) ||
        !CHECK(wanted == 0 || memcmp(out, data + from, wanted) == 0) ||
        !CHECK(out[wanted] == 0xee)) {
        fprintf(stderr, "%zu from %u\n", length, (unsigned)from);
    }
}

TEST(test_ranges)
{
    enum { SIZE = 300 * 512 + 77 };
    static uint8_t data[SIZE];
    uint64_t seed = 3;
    for (int codec = GD_CODEC_NONE; codec <= GD_CODEC_ZSTD; codec++) {
        setup(512, 64, 4096, (gd_codec)codec);
        fill_image(data, SIZE, 512, 60, 1);
        put("a", data, SIZE);
        gd_image *image = require_image(repo, "a");
        for (int i = 0; i < 1500; i++) {
            uint64_t from = next_random(&seed) % (SIZE + 100);
            size_t length = i % 3 == 0 ? next_random(&seed) % SIZE
                                       : next_random(&seed) % 1600;
            check_range(image, data, SIZE, from, length);
        }
        for (uint64_t at = 0; at <= SIZE; at += 512) {
            check_range(image, data, SIZE, at, 512);
            check_range(image, data, SIZE, at, 1);
            check_range(image, data, SIZE, at == 0 ? 0 : at - 1, 2);
        }
        check_range(image, data, SIZE, SIZE - 1, 1);
        check_range(image, data, SIZE, SIZE, 1);
        check_range(image, data, SIZE, UINT64_MAX, 100);
        check_range(image, data, SIZE, UINT64_MAX - 50, 100);
        check_range(image, data, SIZE, 0, 0);
        gd_image_close(image);
        teardown();
    }
}

/* Reads cross windows of 4 MiB and big segments, and join neighbours. */
TEST(test_windows)
{
    enum { SIZE = (9 << 20) + 99 };
    static uint8_t data[SIZE];
    static const uint32_t sizes[][2] = {{4096, 65536}, {65536, 1 << 20}};
    uint64_t seed = 3;
    for (int i = 0; i < 2; i++) {
        setup(sizes[i][0], 1024, sizes[i][1], GD_CODEC_LZ4);
        fill_image(data, SIZE, sizes[i][0], 3000, 1);
        put("a", data, SIZE);
        gd_image *image = require_image(repo, "a");
        check_range(image, data, SIZE, 0, SIZE);
        check_range(image, data, SIZE, (4 << 20) - 1, 2);
        check_range(image, data, SIZE, 1, 4 << 20);
        check_range(image, data, SIZE, 12345, (8 << 20) + 1);
        for (int k = 0; k < 30; k++) {
            check_range(image, data, SIZE, next_random(&seed) % SIZE,
                        next_random(&seed) % SIZE);
        }
        gd_image_close(image);
        teardown();
    }
}

/* The extents are on many pages, each of one block, in random order in the
 * group. */
TEST(test_many_extents)
{
    enum { BLOCKS = 2000 };
    static uint8_t data[BLOCKS * 512];
    gd_recipe_page page;
    uint64_t seed = 6, extents = 0;
    setup(512, 32768, 4096, GD_CODEC_LZ4);
    fill_random(data, sizeof data, 1);
    put("sorted", data, sizeof data);
    for (size_t i = BLOCKS - 1; i > 0; i--) {
        size_t k = next_random(&seed) % (i + 1);
        uint8_t kept[512];
        memcpy(kept, data + i * 512, 512);
        memcpy(data + i * 512, data + k * 512, 512);
        memcpy(data + k * 512, kept, 512);
    }
    put("mixed", data, sizeof data);
    gd_image *image = require_image(repo, "mixed");
    CHECK(gd_image_header(image)->extents > 19 * 102);
    CHECK(gd_image_pages(image) >= 20);
    for (uint64_t n = 1; n <= gd_image_pages(image); n++) {
        CHECK_INT(gd_image_extents(image, n, &page, &x.err), GD_OK);
        extents += page.count;
    }
    CHECK_INT(extents, gd_image_header(image)->extents);
    CHECK_INT(gd_image_extents(image, 0, &page, &x.err), GD_CORRUPT);
    CHECK_INT(gd_image_extents(image, gd_image_pages(image) + 1, &page,
                               &x.err),
              GD_CORRUPT);
    check_range(image, data, sizeof data, 0, sizeof data);
    for (int i = 0; i < 300; i++) {
        check_range(image, data, sizeof data,
                    next_random(&seed) % sizeof data,
                    next_random(&seed) % 5000);
    }
    gd_image_close(image);
    teardown();
}

/* ---- opening ---- */

TEST_WITH(test_open, setup(4096, 64, 65536, GD_CODEC_LZ4), teardown())
{
    uint8_t data[5000], upload_id[GD_ID_SIZE];
    gd_image *image;
    fill_random(data, sizeof data, 1);
    put("a", data, sizeof data);
    CHECK_INT(gd_image_open(repo, "b", NULL, &image, &x.err), GD_NOTFOUND);
    CHECK_INT(gd_image_open(repo, "../a", NULL, &image, &x.err), GD_INVALID);
    image = require_image(repo, "a");
    memcpy(upload_id, gd_image_header(image)->upload_id, GD_ID_SIZE);
    CHECK(strcmp(gd_image_header(image)->project, "project") == 0);
    gd_image_close(image);
    CHECK_INT(gd_image_open(repo, "a", upload_id, &image, &x.err), GD_OK);
    gd_image_close(image);
    upload_id[0] ^= 1;
    CHECK_INT(gd_image_open(repo, "a", upload_id, &image, &x.err),
              GD_NOTFOUND);
    CHECK_CONTAINS(x.err.text, "another upload");
    /* The recipe has another image's name. */
    CHECK_INT(linkat(x.root, "images/a", x.root, "images/c", 0), 0);
    CHECK_INT(gd_image_open(repo, "c", NULL, &image, &x.err), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "images/c");
}

/* I12 */
TEST_WITH(test_deleted_while_open, setup(512, 64, 4096, GD_CODEC_LZ4),
          teardown())
{
    static uint8_t data[100 * 512];
    fill_image(data, sizeof data, 512, 60, 1);
    put("a", data, sizeof data);
    gd_image *image = require_image(repo, "a");
    CHECK_INT(gd_image_delete(x.env, x.root, &x.params, "a", NULL, &x.err),
              GD_OK);
    check_range(image, data, sizeof data, 0, sizeof data);
    gd_image_close(image);
    CHECK_INT(get("a", data, sizeof data), GD_NOTFOUND);
}

/* ---- damage ---- */

/* Every byte of the file is changed, one after the other: the result is an
 * error that names the file, or the right bytes; and with the original byte
 * all is well. */
static void
check_every_byte(const char *name, const uint8_t *data, size_t length,
                 unsigned step)
{
    int64_t size = scratch_size(&x, name);
    unsigned refused = 0, opened = 0;
    for (int64_t at = 0; at < size; at += step) {
        scratch_flip(&x, name, (uint64_t)at, (uint8_t)(1 << at % 8));
        gd_status s = get("a", data, length);
        if (s == GD_OK) {
            opened++;
        } else {
            CHECK(s == GD_CORRUPT || (s == GD_VERSION && at < 16));
            CHECK_CONTAINS(x.err.text, name);
            refused++;
        }
        scratch_flip(&x, name, (uint64_t)at, (uint8_t)(1 << at % 8));
    }
    CHECK_INT(get("a", data, length), GD_OK);
    CHECK(refused > 0);
    /* All of a recipe has checksums. */
    CHECK(opened > 0 || strncmp(name, "images/", 7) == 0);
    CHECK(opened == 0 || strncmp(name, "groups/", 7) == 0);
}

TEST(test_every_byte)
{
    static uint8_t data[30 * 512 + 11];
    for (int codec = GD_CODEC_NONE; codec <= GD_CODEC_ZSTD; codec++) {
        setup_without_cache(512, 64, 4096, (gd_codec)codec);
        fill_image(data, sizeof data, 512, 60, 2);
        put("a", data, sizeof data);
        check_every_byte(GROUP_1, data, sizeof data, SWEEP_STRIDE);
        check_every_byte("images/a", data, sizeof data, 3 * SWEEP_STRIDE);
        teardown();
    }
}

/* A change of any byte of a block or entry is refused; unread bytes are
 * ignored. */
TEST_WITH(test_every_stored_byte_counts,
          setup_without_cache(512, 64, 4096, GD_CODEC_NONE), teardown())
{
    static uint8_t data[20 * 512];
    fill_random(data, sizeof data, 2);
    put("a", data, sizeof data);
    for (uint32_t slot = 0; slot < 20; slot++) {
        uint64_t block = 8192 + slot * 512 + (1 + slot / 8) * 32;
        for (unsigned i = 0; i < 512; i += 7 * SWEEP_STRIDE) {
            scratch_flip(&x, GROUP_1, block + i, 0x40);
            CHECK_INT(get("a", data, sizeof data), GD_CORRUPT);
            CHECK_CONTAINS(x.err.text, "images/a needs it");
            scratch_flip(&x, GROUP_1, block + i, 0x40);
        }
        for (unsigned i = 0; i < GD_ENTRY_SIZE; i += SWEEP_STRIDE) {
            scratch_flip(&x, GROUP_1, gd_entry_offset(slot) + i, 0x40);
            CHECK_INT(get("a", data, sizeof data), GD_CORRUPT);
            scratch_flip(&x, GROUP_1, gd_entry_offset(slot) + i, 0x40);
        }
    }
    CHECK_INT(get("a", data, sizeof data), GD_OK);
}

TEST_WITH(test_cut_off_files, setup(512, 64, 4096, GD_CODEC_LZ4), teardown())
{
    static uint8_t data[30 * 512];
    fill_random(data, sizeof data, 2);
    put("a", data, sizeof data);
    int64_t size = scratch_size(&x, GROUP_1);
    uint8_t *kept = malloc((size_t)size);
    scratch_read(&x, GROUP_1, kept, (size_t)size, 0);
    for (int64_t length = size - 1; length >= 0; length -= 211) {
        scratch_truncate(&x, GROUP_1, (uint64_t)length);
        CHECK_INT(get("a", data, sizeof data), GD_CORRUPT);
        CHECK_CONTAINS(x.err.text, GROUP_1);
    }
    scratch_write(&x, GROUP_1, kept, (size_t)size, 0);
    CHECK_INT(get("a", data, sizeof data), GD_OK);
    CHECK_INT(unlinkat(x.root, GROUP_1, 0), 0);
    another_handle();
    CHECK_INT(get("a", data, sizeof data), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, GROUP_1 ", which is missing");
    free(kept);
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

/* The entries are valid, but not those that the image was committed with, or
 * not those of the segments. */
TEST_WITH(test_entries_that_lie,
          setup_without_cache(512, 64, 4096, GD_CODEC_NONE), teardown())
{
    static uint8_t data[20 * 512];
    fill_random(data, sizeof data, 2);
    put("a", data, sizeof data);
    const gd_entry good = read_entry(3), other = read_entry(4),
                   far = read_entry(12);
    enum { LIES = 12 };
    gd_entry lies[LIES];
    for (int i = 0; i < LIES; i++) {
        lies[i] = good;
    }
    lies[0].fingerprint.bytes[5] ^= 1; /* another content's */
    lies[1].checksum ^= 1;
    lies[2].segment = far.segment;
    lies[3].segment += 4;
    lies[4].segment = 1 << 30;
    lies[5].plain_offset = other.plain_offset;
    lies[6].plain_offset = (1 << 20) - 512;
    lies[7].plain_length = 511;
    lies[8].stored_length--;
    lies[9].stored_length = 1 << 20;
    lies[10].codec = GD_CODEC_LZ4;
    lies[11] = other; /* the neighbour twice */
    for (int i = 0; i < LIES; i++) {
        write_entry(3, &lies[i]);
        if (!CHECK_INT(get("a", data, sizeof data), GD_CORRUPT)) {
            fprintf(stderr, "lie %d\n", i);
        }
        CHECK_CONTAINS(x.err.text, GROUP_1);
    }
    static const struct {
        gd_entry_state state;
        const char *words;
    } states[] = {{GD_ENTRY_VOID, "holds no block"},
                  {GD_ENTRY_FREED, "holds no block"}};
    for (int i = 0; i < 2; i++) {
        gd_entry entry = good;
        entry.state = (uint8_t)states[i].state;
        write_entry(3, &entry);
        CHECK_INT(get("a", data, sizeof data), GD_CORRUPT);
        CHECK_CONTAINS(x.err.text, states[i].words);
        CHECK_CONTAINS(x.err.text, "slot 3");
        CHECK_CONTAINS(x.err.text, "images/a");
    }
    /* A block that is known to be damaged is read all the same: the cause may
     * have passed. */
    gd_entry damaged = good;
    damaged.state = GD_ENTRY_DAMAGED;
    write_entry(3, &damaged);
    CHECK_INT(get("a", data, sizeof data), GD_OK);
    damaged.checksum ^= 1;
    write_entry(3, &damaged);
    CHECK_INT(get("a", data, sizeof data), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "slot 3 is known to be damaged");
    CHECK_CONTAINS(x.err.text, "images/a");
    damaged = good;
    damaged.state = GD_ENTRY_DAMAGED;
    damaged.plain_offset = 0xfffff; /* beyond all segments */
    write_entry(3, &damaged);
    CHECK_INT(get("a", data, sizeof data), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "does not verify");
    write_entry(3, &good);
    CHECK_INT(get("a", data, sizeof data), GD_OK);
}

/* The segment has any compressed bytes, and a right header. */
TEST(test_hostile_segments)
{
    static uint8_t data[8 * 512], kept[8192];
    for (int codec = GD_CODEC_LZ4; codec <= GD_CODEC_ZSTD; codec++) {
        setup(512, 64, 4096, (gd_codec)codec);
        memset(data, 'a', sizeof data);
        for (size_t i = 0; i < 8; i++) {
            data[i * 512] = (uint8_t)i;
        }
        put("a", data, sizeof data);
        size_t stored = (size_t)scratch_size(&x, GROUP_1) - 8192 - 32;
        REQUIRE(stored < sizeof kept);
        scratch_read(&x, GROUP_1, kept, stored, 8192 + 32);
        for (uint64_t seed = 0; seed < 300; seed++) {
            uint8_t noise[8192];
            memcpy(noise, kept, stored);
            fill_random(noise + seed % stored, stored - seed % stored, seed);
            scratch_write(&x, GROUP_1, noise, stored, 8192 + 32);
            CHECK_INT(get("a", data, sizeof data), GD_CORRUPT);
        }
        scratch_write(&x, GROUP_1, kept, stored, 8192 + 32);
        CHECK_INT(get("a", data, sizeof data), GD_OK);
        teardown();
    }
}

/* I7: a group is replaced by an older copy, whose slots other blocks have used
 * since. */
TEST_WITH(test_older_copy_of_a_group, setup(512, 64, 4096, GD_CODEC_NONE),
          teardown())
{
    static uint8_t data[20 * 512], others[20 * 512];
    uint8_t *first;
    fill_random(data, sizeof data, 1);
    fill_random(others, sizeof others, 2);
    put("probe", data, 512);
    size_t size = (size_t)scratch_size(&x, GROUP_1);
    first = malloc(size);
    scratch_read(&x, GROUP_1, first, size, 0);
    put("a", data, sizeof data);
    CHECK_INT(get("a", data, sizeof data), GD_OK);
    /* The machine's disk goes back in time, and new images are stored. */
    scratch_truncate(&x, GROUP_1, size);
    scratch_write(&x, GROUP_1, first, size, 0);
    another_handle();
    CHECK_INT(get("a", data, sizeof data), GD_CORRUPT);
    CHECK_INT(unlinkat(x.root, "filter", 0), 0);
    another_handle();
    put("b", others, sizeof others);
    CHECK_INT(get("b", others, sizeof others), GD_OK);
    CHECK_INT(get("a", data, sizeof data), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "do not hold the blocks");
    CHECK_INT(get("probe", data, 512), GD_OK);
    free(first);
}

/* The collector rewrote the group, and blocks were appended, while this handle
 * had the old file open: apparent damage is checked in the file that now has
 * the name. */
TEST_WITH(test_rewritten_group, setup(512, 64, 4096, GD_CODEC_NONE),
          teardown())
{
    static uint8_t data[40 * 512];
    fill_random(data, sizeof data, 1);
    put("a", data, 20 * 512);
    CHECK_INT(get("a", data, 20 * 512), GD_OK); /* the file is cached */
    uint8_t bytes[30000];
    size_t size = (size_t)scratch_size(&x, GROUP_1);
    REQUIRE(size < sizeof bytes);
    scratch_read(&x, GROUP_1, bytes, size, 0);
    scratch_write(&x, "spool/new", bytes, size, 0);
    CHECK_INT(renameat(x.root, "spool/new", x.root, GROUP_1), 0);
    gd_repo *other = scratch_repo_filter(&x);
    CHECK_INT(put_image(other, "b", data, sizeof data, 4096, NULL, &x.err),
              GD_OK);
    gd_repo_close(other);
    CHECK_INT(get("b", data, sizeof data), GD_OK);
    CHECK_INT(get("a", data, 20 * 512), GD_OK);
}

/* ---- failures ---- */

/* Each call fails once: the result is an error of its kind, or all bytes. */
TEST_WITH(test_failures, setup(512, 64, 4096, GD_CODEC_ZSTD), teardown())
{
    static const int errors[] = {EIO, ENOMEM};
    static uint8_t data[100 * 512];
    fill_image(data, sizeof data, 512, 60, 1);
    put("a", data, sizeof data);
    for (int kind = 0; kind < 2; kind++) {
        bool struck = true;
        unsigned failed = 0;
        for (uint64_t n = 1; struck; n++) {
            another_handle();
            uint64_t faults = fault_env_faults(&x.f);
            fault_env_fail(&x.f, kind == 0 ? FAULT_ANY : FAULT_ALLOC, n,
                           errors[kind], false);
            gd_status s = get("a", data, sizeof data);
            struck = fault_env_faults(&x.f) > faults;
            fault_env_heal(&x.f);
            if (s != GD_OK) {
                CHECK_INT(s, kind == 0 ? GD_IO : GD_NOMEM);
                CHECK(struck && x.err.text[0] != '\0');
                failed++;
            }
            CHECK_INT(get("a", data, sizeof data), GD_OK);
        }
        /* A read that fails once is repeated once. */
        CHECK(failed > 3);
    }
    fault_env_shorten(&x.f, 77);
    fault_env_interrupt(&x.f, 2);
    another_handle();
    CHECK_INT(get("a", data, sizeof data), GD_OK);
}

/* Repeated failures of the disk are not damage. */
TEST_WITH(test_failing_disk, setup(512, 64, 4096, GD_CODEC_LZ4), teardown())
{
    static uint8_t data[100 * 512];
    fill_image(data, sizeof data, 512, 60, 1);
    put("a", data, sizeof data);
    gd_image *image = require_image(repo, "a");
    uint8_t out[512];
    size_t done;
    CHECK_INT(gd_image_read(image, out, 512, 0, &done, &x.err), GD_OK);
    fault_env_fail(&x.f, FAULT_PREAD, 1, EIO, true);
    CHECK_INT(gd_image_read(image, out, 512, 0, &done, &x.err), GD_IO);
    CHECK_INT(x.err.sys_errno, EIO);
    fault_env_heal(&x.f);
    CHECK_INT(gd_image_read(image, out, 512, 0, &done, &x.err), GD_OK);
    gd_image_close(image);
}

/* ---- the segment cache ---- */

static gd_segcache_stats
cache_stats(void)
{
    gd_segcache_stats stats;
    gd_segcache_get_stats(repo->segcache, &stats);
    return stats;
}

/* Reads are exact with any budget, and from memory when all segments fit. */
TEST(test_cached_ranges)
{
    enum { SIZE = 900 * 512 + 77 };
    static uint8_t data[SIZE];
    static const uint64_t budgets[] = {0, 5000, 40000, 4 << 20};
    uint64_t seed = 3;
    for (int codec = GD_CODEC_NONE; codec <= GD_CODEC_ZSTD; codec++) {
        setup(512, 64, 4096, (gd_codec)codec);
        fill_image(data, SIZE, 512, 2000, 1);
        put("a", data, SIZE);
        gd_image *image = require_image(repo, "a");
        for (int b = 0; b < 4; b++) {
            gd_segcache_set_budget(repo->segcache, budgets[b]);
            for (int i = 0; i < 500; i++) {
                uint64_t from = next_random(&seed) % SIZE;
                check_range(image, data, SIZE, from,
                            next_random(&seed) % 6000);
            }
            CHECK(cache_stats().bytes <= budgets[b]);
        }
        check_range(image, data, SIZE, 0, SIZE);
        uint64_t hits = cache_stats().hits, misses = cache_stats().misses;
        uint64_t preads = fault_env_count(&x.f, FAULT_PREAD);
        check_range(image, data, SIZE, 0, SIZE);
        CHECK_INT(cache_stats().misses, misses);
        CHECK(cache_stats().hits >= hits + 80);
        uint64_t warm = fault_env_count(&x.f, FAULT_PREAD) - preads;
        gd_segcache_set_budget(repo->segcache, 0);
        preads = fault_env_count(&x.f, FAULT_PREAD);
        check_range(image, data, SIZE, 0, SIZE);
        CHECK(fault_env_count(&x.f, FAULT_PREAD) - preads > warm);
        gd_image_close(image);
        teardown();
    }
}

/* A read of a single byte also caches the whole segment, for all images. */
TEST_WITH(test_cache_is_shared, setup(512, 64, 4096, GD_CODEC_LZ4), teardown())
{
    static uint8_t data[32 * 512];
    gd_segcache_set_budget(repo->segcache, 1 << 20);
    fill_random(data, sizeof data, 1);
    put("a", data, sizeof data);
    put("b", data + 3 * 512, 4 * 512);
    gd_image *a = require_image(repo, "a"), *b = require_image(repo, "b");
    check_range(a, data, sizeof data, 5, 1);
    CHECK_INT(cache_stats().misses, 1);
    CHECK(cache_stats().bytes >= 4096 && cache_stats().bytes < 5000);
    check_range(b, data + 3 * 512, 4 * 512, 0, 4 * 512);
    CHECK_INT(cache_stats().misses, 1);
    CHECK_INT(cache_stats().hits, 1);
    gd_image_close(a);
    gd_image_close(b);
}

/* Cached segments are verified, too (I7), and one that does not verify is read
 * from the disk, and cached again. */
TEST_WITH(test_damaged_cache, setup(512, 64, 4096, GD_CODEC_LZ4), teardown())
{
    static uint8_t data[8 * 512];
    gd_segcache_set_budget(repo->segcache, 1 << 20);
    fill_random(data, sizeof data, 1);
    put("a", data, sizeof data);
    CHECK_INT(get("a", data, sizeof data), GD_OK);
    gd_group *group;
    REQUIRE(gd_fpcache_group(repo->cache, 1, false, &group, NULL) == GD_OK);
    gd_cached_segment *segment = gd_segcache_get(repo->segcache, group, 8192);
    REQUIRE(segment != NULL);
    segment->plain[1000] ^= 1;
    gd_segcache_return(repo->segcache, segment);
    CHECK_INT(get("a", data, sizeof data), GD_OK);
    segment = gd_segcache_get(repo->segcache, group, 8192);
    REQUIRE(segment != NULL);
    CHECK(memcmp(segment->plain, data, sizeof data) == 0);
    gd_segcache_return(repo->segcache, segment);
    gd_fpcache_return_group(repo->cache, group);
    CHECK_INT(get("a", data, sizeof data), GD_OK);
}

/* The rewritten file has another segment in the same place: the cache does not
 * confuse it with the old one. */
TEST(test_cache_of_a_rewritten_group)
{
    static uint8_t data[16 * 512], bytes[8192 + 2 * (4096 + 32)];
    setup(512, 64, 4096, GD_CODEC_NONE);
    gd_segcache_set_budget(repo->segcache, 1 << 20);
    fill_random(data, sizeof data, 1);
    put("a", data, sizeof data);
    CHECK_INT(get("a", data, sizeof data), GD_OK);
    CHECK_INT(cache_stats().misses, 2);
    /* The two segments change places. */
    REQUIRE(scratch_size(&x, GROUP_1) == (int64_t)sizeof bytes);
    scratch_read(&x, GROUP_1, bytes, sizeof bytes, 0);
    scratch_write(&x, "spool/new", bytes, 8192, 0);
    scratch_write(&x, "spool/new", bytes + 8192, 4128, 8192 + 4128);
    scratch_write(&x, "spool/new", bytes + 8192 + 4128, 4128, 8192);
    CHECK_INT(renameat(x.root, "spool/new", x.root, GROUP_1), 0);
    for (uint32_t slot = 0; slot < 16; slot++) {
        gd_entry entry = read_entry(slot);
        entry.segment = slot < 8 ? 8192 + 4128 : 8192;
        write_entry(slot, &entry);
    }
    gd_group *group;
    REQUIRE(gd_fpcache_group(repo->cache, 1, true, &group, NULL) == GD_OK);
    gd_fpcache_return_group(repo->cache, group);
    CHECK_INT(get("a", data, sizeof data), GD_OK);
    CHECK_INT(cache_stats().hits, 0);
    CHECK_INT(cache_stats().misses, 4);
    CHECK_INT(get("a", data, sizeof data), GD_OK);
    CHECK_INT(cache_stats().hits, 2);
    teardown();
}
