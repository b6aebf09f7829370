/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_readahead.c - readahead requests before reads: for all the data, once,
 * in its order on the disk, and counted.
 */
#include "engine/read/readahead.h"

#include <pthread.h>
#include <stdlib.h>

#include "engine/read/image.h"
#include "engine/repo/segcache.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define GROUP_1 "groups/00000001"

enum {
    BLOCK = 4096,
    SEGMENT = 65536,
    STORED = SEGMENT + GD_SEGMENT_HEADER, /* codec none */
    MIB = 1 << 20,
    ASKED = 4096,
    MAX_AT_ONCE = 512 << 10,
};

static scratch x;
static gd_repo *repo;

/* The readahead requests. */
static struct asked {
    ino_t inode;
    uint64_t offset, length;
} asked[ASKED];
static size_t asked_count;

static void
note_readahead(const gd_env *env, int fd, uint64_t offset, uint64_t length)
{
    struct stat st;
    (void)env;
    REQUIRE(asked_count < ASKED && fstat(fd, &st) == 0);
    asked[asked_count++] = (struct asked){st.st_ino, offset, length};
}

static void
setup(uint32_t slots)
{
    scratch_init(&x);
    x.params.block_size = BLOCK;
    x.params.group_slots = slots;
    x.params.segment_size = SEGMENT;
    x.params.codec = GD_CODEC_NONE;
    x.f.env.start_readahead = note_readahead;
    repo = scratch_repo_filter(&x);
}

static void
teardown(void)
{
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

static void
put(const char *image_id, const uint8_t *data, size_t length)
{
    REQUIRE(put_image(repo, image_id, data, length, MIB, NULL, &x.err) ==
            GD_OK);
}

static gd_image *
open_image(const char *image_id)
{
    gd_image *image = require_image(repo, image_id);
    asked_count = 0;
    return image;
}

static void
read_range(gd_image *image, const uint8_t *data, uint64_t offset,
           size_t length)
{
    static uint8_t out[4 * MIB];
    size_t done;
    CHECK_INT(gd_image_read(image, out, length, offset, &done, &x.err), GD_OK);
    CHECK_INT(done, length);
    CHECK(memcmp(out, data + offset, length) == 0);
}

static ino_t
inode_of(const char *name)
{
    struct stat st = {0};
    CHECK_INT(fstatat(x.root, name, &st, 0), 0);
    return st.st_ino;
}

/* Returns the number of requests for a byte of a file. */
static unsigned
times_asked(ino_t inode, uint64_t offset)
{
    unsigned times = 0;
    for (size_t i = 0; i < asked_count; i++) {
        times += asked[i].inode == inode && offset >= asked[i].offset &&
                 offset < asked[i].offset + asked[i].length;
    }
    return times;
}

/* Counts the requests for the group's data, and their bytes. */
static size_t
data_requests(ino_t group, uint64_t start, uint64_t *bytes)
{
    size_t count = 0;
    *bytes = 0;
    for (size_t i = 0; i < asked_count; i++) {
        if (asked[i].inode == group && asked[i].offset >= start) {
            count++;
            *bytes += asked[i].length;
        }
    }
    return count;
}

/* ---- single ranges ---- */

/* The recipe, the entries and the segment are three seeks, once. */
TEST_WITH(test_one_range, setup(32768), teardown())
{
    static uint8_t data[4 * MIB];
    fill_random(data, sizeof data, 1);
    memset(data + MIB, 0, MIB);
    put("a", data, sizeof data);
    gd_image *image = open_image("a");
    gd_seeks *seeks = &repo->counters.image;
    ino_t group = inode_of(GROUP_1);
    uint64_t start = gd_fptable_data_start(32768);
    read_range(image, data, 20 * BLOCK, 2 * BLOCK);
    REQUIRE(asked_count == 3);
    CHECK_INT(asked[0].inode, inode_of("images/a"));
    CHECK_INT(asked[0].offset, 0);
    CHECK_INT(asked[1].offset, gd_entry_offset(20));
    CHECK_INT(asked[1].length, 2 * GD_ENTRY_SIZE);
    CHECK_INT(asked[2].inode, group);
    CHECK_INT(asked[2].offset, start + STORED);
    CHECK_INT(asked[2].length, STORED);
    CHECK_INT(atomic_load(&seeks->reads), 3);
    CHECK_INT(atomic_load(&seeks->seeks), 3);
    CHECK_INT(atomic_load(&seeks->bytes),
              asked[0].length + asked[1].length + STORED);
    /* The second range of the group requests its whole table, since more will
     * follow. */
    asked_count = 0;
    read_range(image, data, 3 * MIB, BLOCK);
    REQUIRE(asked_count == 5);
    CHECK_INT(asked[0].offset, GD_STORE_START);
    CHECK_INT(asked[3].offset + asked[3].length, gd_entry_offset(32768));
    CHECK_INT(times_asked(group, start + 32 * STORED), 1);
    CHECK_INT(atomic_load(&seeks->reads), 5);
    /* From now on only data is requested.  For a block whose entry is cached,
     * and for zeros, none is. */
    asked_count = 0;
    read_range(image, data, 2 * SEGMENT, SEGMENT + BLOCK);
    CHECK_INT(asked_count, 1);
    CHECK_INT(asked[0].offset, start + 2 * STORED);
    CHECK_INT(asked[0].length, 2 * STORED);
    asked_count = 0;
    uint64_t reads = atomic_load(&seeks->reads);
    read_range(image, data, 5 * SEGMENT, SEGMENT);
    CHECK_INT(asked_count, 0);
    CHECK_INT(atomic_load(&seeks->reads), reads + 1);
    read_range(image, data, 0, BLOCK);
    CHECK_INT(asked_count, 0);
    CHECK_INT(atomic_load(&seeks->reads), reads + 2);
    asked_count = 0;
    read_range(image, data, MIB + 3 * BLOCK, SEGMENT);
    CHECK_INT(asked_count, 0);
    gd_image_close(image);
}

/* The read itself detects damage. */
TEST_WITH(test_damage, setup(64), teardown())
{
    static uint8_t data[16 * BLOCK];
    uint8_t byte;
    size_t done;
    fill_random(data, sizeof data, 1);
    put("a", data, sizeof data);
    scratch_flip(&x, GROUP_1, gd_entry_offset(3), 1);
    gd_image *image = open_image("a");
    CHECK_INT(gd_image_read(image, &byte, 1, 0, &done, &x.err), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "slot 3");
    gd_image_close(image);
    scratch_flip(&x, GROUP_1, gd_entry_offset(3), 1);
    scratch_flip(&x, "images/a", GD_RECIPE_PAGE + 20, 1);
    image = open_image("a");
    CHECK_INT(gd_image_read(image, &byte, 1, 0, &done, &x.err), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "images/a");
    gd_image_close(image);
    scratch_flip(&x, "images/a", GD_RECIPE_PAGE + 20, 1);
    REQUIRE(unlinkat(x.root, GROUP_1, 0) == 0);
    gd_repo_close(repo);
    repo = scratch_repo(&x);
    image = open_image("a");
    CHECK_INT(gd_image_read(image, &byte, 1, 0, &done, &x.err), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "which is missing");
    gd_image_close(image);
}

/* ---- sequential reads ---- */

/* Each necessary byte is requested once, before it is read, and never too far
 * ahead, whatever the pieces. */
TEST_SINGLE(test_reading_on)
{
    enum { SIZE = 90 * MIB, SLOTS = 4096 };
    static const size_t pieces[] = {4 * MIB, MIB + BLOCK, 100000};
    uint8_t *data = malloc(SIZE);
    setup(SLOTS);
    fill_random(data, SIZE, 1);
    memset(data + 50 * MIB, 0, 5 * MIB);
    put("a", data, SIZE);
    for (int p = 0; p < 3; p++) {
        gd_image *image = open_image("a");
        uint64_t ahead_most = 0;
        for (uint64_t at = 0; at < SIZE;) {
            size_t here = SIZE - at < pieces[p] ? (size_t)(SIZE - at)
                                                : pieces[p];
            read_range(image, data, at, here);
            at += here;
            CHECK(image->ahead.end >= at);
            if (image->ahead.end - at > ahead_most) {
                ahead_most = image->ahead.end - at;
            }
        }
        /* 5 MiB of zeros do not count. */
        CHECK(ahead_most > 20 * MIB && ahead_most <= (32 + 16 + 5) * MIB);
        for (uint32_t group = 1; group <= 6; group++) {
            char name[GD_NAME_SIZE];
            gd_names_group(group, name);
            ino_t inode = inode_of(name);
            uint64_t end = (uint64_t)scratch_size(&x, name);
            for (uint64_t at = gd_fptable_data_start(SLOTS); at < end;
                 at += STORED) {
                unsigned times = times_asked(inode, at + 100);
                /* A step may end within a segment. */
                CHECK(times == 1 || (times == 2 && pieces[p] != 4 * MIB));
            }
            CHECK_INT(times_asked(inode, gd_entry_offset(SLOTS - 1)), 1);
        }
        gd_image_close(image);
    }
    for (size_t i = 0; i < asked_count; i++) {
        CHECK(asked[i].length <= MAX_AT_ONCE);
    }
    free(data);
    teardown();
}

/* The limit holds for images of any length. */
TEST_SINGLE(test_farthest)
{
    enum { SIZE = 25 * MIB, TIMES = 8 };
    uint8_t *data = malloc((size_t)SIZE * TIMES);
    setup(32768);
    fill_random(data, SIZE, 1);
    for (int i = 1; i < TIMES; i++) {
        memcpy(data + (size_t)i * SIZE, data, SIZE);
    }
    put("a", data, (size_t)SIZE * TIMES);
    gd_image *image = open_image("a");
    for (uint64_t at = 0; at < (uint64_t)SIZE * TIMES; at += MIB) {
        read_range(image, data, at, MIB);
        CHECK(image->ahead.end <= at + (32 + 16 + 1) * (uint64_t)MIB);
    }
    gd_image_close(image);
    free(data);
    teardown();
}

/* Data in many places is requested farther ahead, so that more of it is
 * adjacent. */
TEST_SINGLE(test_scattered)
{
    enum { BASE = 4 * MIB, PLACES = 4, TIMES = 1040 };
    size_t size = (size_t)TIMES * PLACES * SEGMENT, used = 0;
    uint64_t most = 0;
    uint8_t *base = malloc(BASE), *data = malloc(size);
    setup(32768);
    fill_random(base, BASE, 1);
    put("base", base, BASE);
    for (size_t i = 0; used < size; i++, used += SEGMENT) {
        memcpy(data + used, base + i % PLACES * (BASE / PLACES), SEGMENT);
    }
    put("a", data, size);
    gd_image *image = open_image("a");
    for (uint64_t at = 0; at < size; at += MIB) {
        read_range(image, data, at, MIB);
        most = image->ahead.end - at > most ? image->ahead.end - at : most;
        CHECK(image->ahead.span <= 128 * MIB);
    }
    CHECK(most > 128 * MIB && most <= (128 + 64 + 1) * (uint64_t)MIB);
    gd_image_close(image);
    free(base);
    free(data);
    teardown();
}

/* For a reader that jumps, no data is requested ahead.  The first read in each
 * extent has its entries cached; then nothing is requested for small ranges. */
TEST_SINGLE(test_jumps)
{
    enum { SIZE = 24 * MIB };
    uint64_t bytes;
    uint8_t *data = malloc(SIZE);
    setup(32768);
    fill_random(data, SIZE, 1);
    put("a", data, SIZE);
    gd_image *image = open_image("a");
    for (int i = 0; i < 20; i++) {
        read_range(image, data, (uint64_t)(i * 7 % 20) * MIB, SEGMENT);
    }
    CHECK_INT(data_requests(inode_of(GROUP_1), gd_fptable_data_start(32768),
                            &bytes),
              5);
    CHECK_INT(bytes, 5 * STORED);
    gd_image_close(image);
    free(data);
    teardown();
}

/* The reads of another thread while one is requesting. */
static struct meanwhile {
    gd_image *image;
    const uint8_t *data;
    size_t requests;
} meanwhile;

static void
read_meanwhile(const gd_env *env, int fd, uint64_t offset, uint64_t length)
{
    (void)env;
    (void)fd;
    (void)offset;
    (void)length;
    meanwhile.requests++;
    if (meanwhile.image != NULL) {
        gd_image *image = meanwhile.image;
        meanwhile.image = NULL;
        meanwhile.requests = 0;
        read_range(image, meanwhile.data, MIB, BLOCK);
        /* One read brings its segment; the requesting thread has the rest. */
        CHECK_INT(meanwhile.requests, 0);
    }
}

/* No thread waits for another's requests, or makes them at the same time. */
TEST_WITH(test_asking_at_once, setup(1024), teardown())
{
    static uint8_t data[4 * MIB];
    x.f.env.start_readahead = read_meanwhile;
    fill_random(data, sizeof data, 1);
    put("a", data, sizeof data);
    gd_image *image = open_image("a");
    meanwhile = (struct meanwhile){.image = image, .data = data};
    read_range(image, data, 0, 2 * MIB);
    CHECK(meanwhile.image == NULL && meanwhile.requests > 1);
    gd_image_close(image);
}

/* Threads read the pieces of one image, as in dedupd. */
typedef struct crew {
    gd_image *image;
    const uint8_t *data;
    uint64_t size;
    atomic_ullong next, wrong;
} crew;

static void *
read_pieces(void *arg)
{
    enum { PIECE = 100000 };
    crew *c = arg;
    gd_error err;
    size_t done;
    uint64_t at;
    uint8_t *out = malloc(PIECE);
    while ((at = atomic_fetch_add(&c->next, PIECE)) < c->size) {
        gd_status s = gd_image_read(c->image, out, PIECE, at, &done, &err);
        if (s != GD_OK || memcmp(out, c->data + at, done) != 0) {
            atomic_fetch_add(&c->wrong, 1);
        }
    }
    free(out);
    return NULL;
}

TEST(test_threads)
{
    enum { SIZE = 40 * MIB, THREADS = 4 };
    uint8_t *data = malloc(SIZE);
    pthread_t threads[THREADS];
    setup(1024);
    x.f.env.start_readahead = gd_env_posix()->start_readahead;
    fill_random(data, SIZE, 1);
    put("a", data, SIZE);
    crew c = {.image = open_image("a"), .data = data, .size = SIZE};
    for (int i = 0; i < THREADS; i++) {
        REQUIRE(pthread_create(&threads[i], NULL, read_pieces, &c) == 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_INT(atomic_load(&c.wrong), 0);
    gd_image_close(c.image);
    free(data);
    teardown();
}

/* ---- the order of the disk ---- */

/* The image's blocks are in reverse order: its groups, and their segments, are
 * requested forwards. */
TEST(test_order)
{
    enum { SIZE = 4 * MIB };
    static uint8_t data[SIZE], turned[SIZE];
    setup(512); /* two groups */
    fill_random(data, SIZE, 1);
    put("a", data, SIZE);
    for (size_t at = 0; at < SIZE; at += BLOCK) {
        memcpy(turned + at, data + SIZE - BLOCK - at, BLOCK);
    }
    put("turned", turned, SIZE);
    CHECK(!scratch_exists(&x, "groups/00000003"));
    gd_image *image = open_image("turned");
    gd_seeks *seeks = &repo->counters.image;
    unsigned before = (unsigned)atomic_load(&seeks->seeks);
    read_range(image, turned, 0, SIZE);
    /* These are the recipe, and each group's entries and data: 1024
     * extents. */
    CHECK_INT(atomic_load(&seeks->seeks) - before, 5);
    ino_t group = asked[1].inode;
    CHECK_INT(group, inode_of(GROUP_1));
    for (size_t i = 2; i < asked_count; i++) {
        if (asked[i].inode != asked[i - 1].inode) {
            CHECK_INT(asked[i].inode, inode_of("groups/00000002"));
        } else {
            CHECK(asked[i].offset >= asked[i - 1].offset +
                                         asked[i - 1].length);
        }
    }
    gd_image_close(image);
    teardown();
}

/* A rewritten group may have its segments in any order. */
TEST(test_order_in_a_group)
{
    static uint8_t data[2 * SEGMENT], bytes[2 * STORED];
    uint64_t start = gd_fptable_data_start(64);
    gd_group *group;
    gd_entry entries[32];
    setup(64);
    fill_random(data, sizeof data, 1);
    put("a", data, sizeof data);
    scratch_read(&x, GROUP_1, bytes, sizeof bytes, start);
    scratch_write(&x, GROUP_1, bytes + STORED, STORED, start);
    scratch_write(&x, GROUP_1, bytes, STORED, start + STORED);
    REQUIRE(gd_group_open(x.env, x.root, &x.params, 1, O_RDWR, &group, NULL) ==
            GD_OK);
    CHECK_INT(gd_group_read_entries(group, 0, 32, entries, NULL), GD_OK);
    for (int i = 0; i < 32; i++) {
        entries[i].segment = (uint32_t)(i < 16 ? start + STORED : start);
    }
    CHECK_INT(gd_group_write_entries(group, 0, 32, entries, NULL), GD_OK);
    gd_group_close(group);
    gd_image *image = open_image("a");
    read_range(image, data, 0, sizeof data);
    CHECK_INT(asked[2].offset, start);
    CHECK_INT(asked[2].length, 2 * STORED);
    gd_image_close(image);
    teardown();
}

/* Reads segments of a group, one of `every` so many. */
static size_t
requests_for_every(const uint8_t *data, unsigned every, uint64_t *bytes)
{
    static uint8_t some[4 * MIB];
    size_t length = 0;
    char name[16];
    for (unsigned i = 0; i < 64; i += every) {
        memcpy(some + length, data + (size_t)i * SEGMENT, SEGMENT);
        length += SEGMENT;
    }
    snprintf(name, sizeof name, "every-%u", every);
    put(name, some, length);
    gd_image *image = open_image(name);
    read_range(image, some, 0, length);
    gd_image_close(image);
    return data_requests(inode_of(GROUP_1), gd_fptable_data_start(32768),
                         bytes);
}

/* Gaps are read, too, but within the limit for wasted bytes. */
TEST_WITH(test_gaps, setup(32768), teardown())
{
    static uint8_t data[4 * MIB];
    uint64_t bytes;
    fill_random(data, sizeof data, 1);
    put("a", data, sizeof data);
    /* One range comes in requests of 512 KiB. */
    CHECK_INT(requests_for_every(data, 1, &bytes), 9);
    CHECK_INT(bytes, 64 * STORED);
    CHECK_INT(requests_for_every(data, 2, &bytes), 8);
    CHECK_INT(bytes, 63 * STORED);
    CHECK_INT(requests_for_every(data, 3, &bytes), 11); /* two in each */
    CHECK_INT(bytes, 2 * 22 * STORED);
    CHECK_INT(requests_for_every(data, 16, &bytes), 4);
    CHECK_INT(bytes, 4 * STORED);
}

/* ---- the segment cache ---- */

TEST(test_cached_segments)
{
    static uint8_t data[2 * MIB];
    uint64_t bytes, start = gd_fptable_data_start(32768);
    setup(32768);
    fill_random(data, sizeof data, 1);
    put("a", data, sizeof data);
    gd_segcache_set_budget(repo->segcache, MIB);
    gd_image *image = open_image("a");
    read_range(image, data, 3 * SEGMENT, BLOCK);
    gd_image_close(image);
    image = open_image("a");
    read_range(image, data, 0, 8 * SEGMENT);
    CHECK_INT(times_asked(inode_of(GROUP_1), start + 2 * STORED), 1);
    CHECK_INT(times_asked(inode_of(GROUP_1), start + 4 * STORED), 1);
    gd_image_close(image);
    image = open_image("a");
    read_range(image, data, 0, 8 * SEGMENT);
    CHECK_INT(data_requests(inode_of(GROUP_1), start, &bytes), 0);
    gd_image_close(image);
    teardown();
}
