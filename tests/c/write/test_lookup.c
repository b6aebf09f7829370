/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_lookup.c - duplicates: found by hints and beside hints, only under the
 * group's lock, only among published entries, and only if they are equal.
 */
#include "engine/write/lookup.h"

#include "engine/files/group.h"
#include "engine/repo/follow.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { BLOCK = 512, MAX_COUNT = 600, POOL_THREADS = 2 };

typedef struct fixture {
    scratch x;
    gd_repo *repo;
    gd_hasher *hasher;
    gd_lookup *lookup;
    uint8_t data[MAX_COUNT * BLOCK];
    gd_block blocks[MAX_COUNT];
} fixture;

static fixture t;

static void
open_handle(void)
{
    t.repo = scratch_repo_filter(&t.x);
    CHECK_INT(gd_hasher_open(t.x.env, t.repo->digest, &t.hasher, NULL), GD_OK);
    CHECK_INT(gd_lookup_open(t.repo, &gd_global_scope, &t.lookup, &t.x.err),
              GD_OK);
}

static void
close_handle(void)
{
    gd_lookup_close(t.lookup);
    gd_hasher_close(t.x.env, t.hasher);
    gd_repo_close(t.repo);
}

static void
another_handle(void)
{
    close_handle();
    open_handle();
}

static void
setup(const char *digest, bool by_value)
{
    memset(&t, 0, sizeof t);
    scratch_init(&t.x);
    t.x.params.block_size = BLOCK;
    t.x.params.segment_size = 4096;
    t.x.params.by_value = by_value;
    t.x.params.threads = POOL_THREADS;
    strcpy(t.x.params.digest, digest);
    fill_random(t.data, sizeof t.data, 1);
    open_handle();
}

static void
teardown(void)
{
    close_handle();
    CHECK_INT(scratch_destroy(&t.x), 0);
}

/* Stores the blocks [first, end) of data as an image. */
static void
store(const char *image_id, size_t first, size_t end)
{
    if (!CHECK_INT(put_image(t.repo, image_id, t.data + first * BLOCK,
                             (end - first) * BLOCK, 100000, NULL, &t.x.err),
                   GD_OK)) {
        fprintf(stderr, "%s\n", t.x.err.text);
    }
}

/* Takes the blocks [first, end) of data. */
static void
take_blocks(size_t first, size_t end)
{
    for (size_t i = first; i < end; i++) {
        gd_block *block = &t.blocks[i];
        *block = (gd_block){.data = t.data + i * BLOCK,
                            .length = BLOCK};
        CHECK_INT(gd_hasher_compute(t.hasher, &gd_global_scope, block->data,
                                    BLOCK, &block->fingerprint, NULL), GD_OK);
    }
}

/* Looks up the blocks [first, end) of data; returns the number found. */
static size_t
look_up(size_t first, size_t end)
{
    size_t found = 0;
    take_blocks(first, end);
    for (size_t i = first; t.x.params.by_value && i < end; i++) {
        t.blocks[i].address = (gd_address){0, 0};
    }
    gd_lookup_batch(t.lookup, t.blocks + first, end - first, GD_COLD_LOADS);
    for (size_t i = first; i < end; i++) {
        found += t.blocks[i].address.group != 0;
    }
    return found;
}

/* Checks the addresses: blocks were stored in order, 64 to a group, from group
 * 1 on. */
static void
check_addresses(size_t first, size_t end)
{
    for (size_t i = first; i < end; i++) {
        CHECK_INT(t.blocks[i].address.group, 1 + i / 64);
        CHECK_INT(t.blocks[i].address.slot, i % 64);
    }
}

static bool
is_locked(uint32_t group)
{
    const gd_env *env = gd_env_posix();
    int fd = openat(t.x.root, GD_FILE_GROUP_LOCKS, O_RDWR | O_CLOEXEC);
    bool locked = env->lock(env, fd, (UINT64_C(1) << 32) + group, F_WRLCK) ==
                  -EAGAIN;
    close(fd);
    return locked;
}

static void
empty_filter(void)
{
    CHECK(gd_filter_rebuild_lock(t.repo->filter));
    gd_filter_clear(t.repo->filter);
    gd_filter_rebuild_unlock(t.repo->filter);
}

#define COUNTER(name) ((int64_t)atomic_load(&t.repo->counters.name))

/* ---- hits ---- */

TEST_WITH(test_stored_blocks_are_found, setup("sha256", false), teardown())
{
    CHECK_INT(look_up(0, 100), 0);
    store("a", 0, 100);
    another_handle();
    CHECK(!is_locked(1) && !is_locked(2));
    CHECK_INT(look_up(0, 150), 100);
    check_addresses(0, 100);
    CHECK_INT(COUNTER(cold_loads), 2);
    CHECK_INT(COUNTER(candidates), 100);
    CHECK(is_locked(1) && is_locked(2)); /* I6 */
    CHECK_INT(look_up(50, 150), 50);
    check_addresses(50, 100);
    CHECK_INT(COUNTER(cold_loads), 2);
    gd_lookup_close(t.lookup);
    CHECK(!is_locked(1) && !is_locked(2));
    CHECK_INT(gd_lookup_open(t.repo, &gd_global_scope, &t.lookup, &t.x.err),
              GD_OK);
    CHECK_INT(look_up(0, 100), 100);
    CHECK_INT(COUNTER(cold_loads), 2); /* the handle's cache has them */
}

TEST_WITH(test_without_a_filter, setup("sha256", false), teardown())
{
    store("a", 0, 100);
    close_handle();
    t.repo = scratch_repo(&t.x);
    CHECK_INT(gd_hasher_open(t.x.env, t.repo->digest, &t.hasher, NULL), GD_OK);
    CHECK_INT(gd_lookup_open(t.repo, &gd_global_scope, &t.lookup, &t.x.err),
              GD_OK);
    CHECK_INT(look_up(0, 100), 0);
    CHECK(!is_locked(1));
}

/* One hint is sufficient for a whole group. */
TEST_WITH(test_neighbours_of_a_hit, setup("sha256", false), teardown())
{
    store("a", 0, 100);
    another_handle();
    CHECK_INT(look_up(70, 71), 1);
    another_handle();
    empty_filter();
    gd_filter_insert(t.repo->filter, &t.blocks[70].fingerprint,
                     (gd_address){2, 6});
    CHECK_INT(look_up(0, 100), 36);
    check_addresses(64, 100);
    CHECK_INT(COUNTER(candidates), 1);
    CHECK_INT(look_up(80, 100), 20); /* without any hint */
    CHECK_INT(COUNTER(candidates), 1);
    CHECK(!is_locked(1));
}

/* A group has blocks twice: those behind the last hit are used, so that a
 * contiguous part of the image is contiguous in the group. */
TEST_WITH(test_runs_stay_together, setup("sha256", false), teardown())
{
    store("a", 1, 4);
    another_handle();
    empty_filter();
    store("b", 0, 4);
    another_handle();
    for (int at_hand = 0; at_hand < 2; at_hand++) {
        CHECK_INT(look_up(0, 4), 4);
        CHECK_INT(COUNTER(cold_loads), 1);
        for (size_t i = 0; i < 4; i++) {
            CHECK_INT(t.blocks[i].address.group, 1);
            CHECK_INT(t.blocks[i].address.slot, 3 + i);
        }
    }
}

/* Fills groups 1 to 7, and a batch in which group n has n blocks; returns its
 * length. */
static size_t
store_stairs(void)
{
    size_t count = 0;
    store("a", 0, 7 * 64);
    another_handle();
    for (size_t group = 1; group <= 7; group++) {
        for (size_t i = 0; i < group; i++, count++) {
            memcpy(t.data + (500 + count) * BLOCK,
                   t.data + ((group - 1) * 64 + i) * BLOCK, BLOCK);
        }
    }
    return count;
}

/* A batch loads four cold tables, those with most hints first. */
TEST_WITH(test_cold_loads_are_few, setup("sha256", false), teardown())
{
    size_t count = store_stairs();
    CHECK_INT(look_up(500, 500 + count), 7 + 6 + 5 + 4);
    CHECK_INT(COUNTER(cold_loads), 4);
    CHECK_INT(COUNTER(capped_loads), 3);
    for (uint32_t group = 1; group <= 7; group++) {
        CHECK_INT(is_locked(group), group >= 4);
    }
    CHECK_INT(look_up(500, 500 + count), count);
    CHECK_INT(COUNTER(cold_loads), 7);
    CHECK_INT(COUNTER(capped_loads), 3);
}

/* An upload that was killed leaves hints to blocks that a collection
 * removes. */
TEST_WITH(test_removed_groups_cost_no_load, setup("sha256", false), teardown())
{
    size_t count = store_stairs();
    for (int group = 4; group <= 7; group++) {
        char path[32];
        snprintf(path, sizeof path, "groups/%08x", group);
        CHECK_INT(unlinkat(t.x.root, path, 0), 0);
    }
    CHECK_INT(look_up(500, 500 + count), 3 + 2 + 1);
    CHECK_INT(COUNTER(cold_loads), 3);
    CHECK_INT(COUNTER(capped_loads), 0);
}

/* The requests to the disk, in order: 'r' for the read-ahead of a group, 's'
 * for its table. */
static struct {
    char what[64];
    uint32_t group[64];
    size_t count;
    ssize_t (*pread)(const gd_env *, int, void *, size_t, uint64_t);
} asked;

static void
note_asked(int fd, char what)
{
    char link[64], path[512];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    const char *name = strstr((path[n < 0 ? 0 : n] = '\0', path), "groups/");
    if (name != NULL && asked.count < sizeof asked.what) {
        asked.what[asked.count] = what;
        asked.group[asked.count++] =
            (uint32_t)strtoul(name + strlen("groups/"), NULL, 16);
    }
}

static void
asked_readahead(const gd_env *env, int fd, uint64_t offset, uint64_t length)
{
    (void)env;
    CHECK_INT(offset, 0);
    CHECK_INT(length, gd_fptable_data_start(64));
    note_asked(fd, 'r');
}

static ssize_t
asked_pread(const gd_env *env, int fd, void *buffer, size_t length,
            uint64_t offset)
{
    if (offset == GD_STORE_START) {
        note_asked(fd, 's');
    }
    return asked.pread(env, fd, buffer, length, offset);
}

static void
note_what_is_asked(void)
{
    memset(&asked, 0, sizeof asked);
    asked.pread = t.x.f.env.pread;
    t.x.f.env.pread = asked_pread;
    t.x.f.env.start_readahead = asked_readahead;
}

/* Hints decide which tables are loaded, their places on the disk in which
 * order. */
TEST_WITH(test_loads_in_disk_order, setup("sha256", false), teardown())
{
    static const uint32_t order[] = {2, 3, 5, 6};
    store("a", 0, 6 * 64);
    another_handle();
    note_what_is_asked();
    size_t count = 0;
    for (size_t group = 6; group >= 1; group--) {
        size_t blocks = group == 1 || group == 4 ? 1 : group;
        for (size_t i = 0; i < blocks; i++, count++) {
            memcpy(t.data + (500 + count) * BLOCK,
                   t.data + ((group - 1) * 64 + i) * BLOCK, BLOCK);
        }
    }
    CHECK_INT(look_up(500, 500 + count), count - 2);
    CHECK_INT(asked.count, 8);
    for (size_t i = 0; i < 4; i++) {
        CHECK_INT(asked.what[i], 'r');
        CHECK_INT(asked.group[i], order[i]);
        CHECK_INT(asked.what[4 + i], 's');
        CHECK_INT(asked.group[4 + i], order[i]);
    }
    CHECK_INT(COUNTER(store.reads), 4);
    CHECK_INT(COUNTER(store.seeks), 4);
    CHECK_INT(COUNTER(store.bytes), 4 * (4096 + 8 * 512));
    /* Cached tables are not requested again. */
    gd_lookup_close(t.lookup);
    CHECK_INT(gd_lookup_open(t.repo, &gd_global_scope, &t.lookup, &t.x.err),
              GD_OK);
    CHECK_INT(look_up(500, 500 + count), count - 2);
    CHECK_INT(asked.count, 8);
    CHECK_INT(COUNTER(store.reads), 4);
}

/* Stores 64 blocks twice, in groups 1 and 2, and hints for both. */
static void
store_twice(void)
{
    store("a", 0, 64);
    another_handle();
    empty_filter();
    store("b", 0, 64);
    another_handle();
    CHECK_INT(look_up(0, 64), 64);
    for (uint32_t i = 0; i < 64; i++) {
        CHECK_INT(t.blocks[i].address.group, 2);
        gd_filter_insert(t.repo->filter, &t.blocks[i].fingerprint,
                         (gd_address){1, i});
    }
    another_handle();
}

/* Of two groups that have the same blocks one is sufficient; the other one is
 * used if the first cannot be read. */
TEST_WITH(test_copies_are_not_loaded, setup("sha256", false), teardown())
{
    store_twice();
    CHECK_INT(look_up(0, 64), 64);
    CHECK_INT(COUNTER(cold_loads), 1);
    CHECK_INT(COUNTER(capped_loads), 0);
    CHECK_INT(is_locked(1) + is_locked(2), 1);
    uint32_t first = t.blocks[0].address.group;
    another_handle();
    const gd_env *env = gd_env_posix();
    int fd = openat(t.x.root, GD_FILE_GROUP_LOCKS, O_RDWR | O_CLOEXEC);
    CHECK_INT(env->lock(env, fd, (UINT64_C(1) << 32) + first, F_WRLCK), 0);
    CHECK_INT(look_up(0, 64), 64);
    CHECK_INT(t.blocks[0].address.group, 3 - first);
    CHECK_INT(COUNTER(cold_loads), 1);
    CHECK_INT(COUNTER(lock_refusals), 1);
    close(fd);
}

/* A table was chosen, but the one before it had all its blocks. */
TEST_WITH(test_chosen_in_vain, setup("sha256", false), teardown())
{
    store_twice();
    empty_filter();
    for (uint32_t i = 0; i < 64; i++) {
        gd_filter_insert(t.repo->filter, &t.blocks[i].fingerprint,
                         (gd_address){1 + i % 2, i});
    }
    CHECK_INT(look_up(0, 64), 64);
    check_addresses(0, 64);
    CHECK_INT(COUNTER(cold_loads), 1);
}

/* There are more groups, one after the other, than tables are cached. */
TEST_WITH(test_many_groups, setup("sha256", false), teardown())
{
    store("a", 0, 9 * 64);
    another_handle();
    for (int round = 0; round < 3; round++) {
        for (size_t group = 0; group < 9; group++) {
            CHECK_INT(look_up(group * 64, group * 64 + 64), 64);
            check_addresses(group * 64, group * 64 + 64);
        }
    }
    for (uint32_t group = 1; group <= 9; group++) {
        CHECK(is_locked(group)); /* once named, locked to the end */
    }
}

static int settled;

static void
note_settled(const gd_env *env, void *address, size_t length)
{
    (void)env;
    (void)address;
    CHECK_INT(length, GD_FILTER_MIN_BYTES);
    settled++;
}

/* The filter is complete once, when the last group is in it. */
TEST(test_rebuilt_filters_are_settled)
{
    gd_followed followed = {.more = true};
    setup("sha256", false);
    store("a", 0, 3 * 64);
    another_handle();
    empty_filter();
    settled = 0;
    t.x.f.env.use_large_pages = note_settled;
    for (uint32_t calls = 1; followed.more; calls++) {
        CHECK_INT(settled, 0);
        CHECK_INT(gd_follow(t.repo, 1, &followed, &t.x.err), GD_OK);
        CHECK_INT(followed.done, calls);
    }
    CHECK_INT(settled, 1);
    CHECK_INT(gd_follow(t.repo, 1, &followed, &t.x.err), GD_OK);
    CHECK_INT(settled, 1);
    CHECK_INT(look_up(0, 3 * 64), 3 * 64);
    teardown();
}

/* ---- misses ---- */

TEST_WITH(test_the_collector_is_in_it, setup("sha256", false), teardown())
{
    store("a", 0, 100);
    another_handle();
    const gd_env *env = gd_env_posix();
    int fd = openat(t.x.root, GD_FILE_GROUP_LOCKS, O_RDWR | O_CLOEXEC);
    CHECK_INT(env->lock(env, fd, (UINT64_C(1) << 32) + 2, F_WRLCK), 0);
    CHECK_INT(look_up(0, 100), 64);
    check_addresses(0, 64);
    CHECK_INT(COUNTER(lock_refusals), 1);
    close(fd);
    CHECK_INT(look_up(0, 100), 100);
}

TEST_WITH(test_hints_that_lead_nowhere, setup("sha256", false), teardown())
{
    static const gd_address wrong[] = {{1, 30}, {1, 63}, {9, 1}};
    store("a", 0, 40);
    another_handle();
    CHECK_INT(look_up(50, 53), 0); /* for the fingerprints */
    gd_fingerprint fps[3];
    for (int i = 0; i < 3; i++) {
        fps[i] = t.blocks[50 + i].fingerprint;
        gd_filter_insert(t.repo->filter, &fps[i], wrong[i]);
    }
    for (int round = 0; round < 3; round++) {
        CHECK_INT(look_up(50, 53), 0);
    }
    gd_address hints[GD_FILTER_CANDIDATES];
    CHECK_INT(gd_filter_lookup(t.repo->filter, &fps[0], hints), 0);
    CHECK_INT(COUNTER(false_candidates), 1);
    /* The entry is not published yet, or its group cannot be read now: the
     * hints stay. */
    CHECK_INT(gd_filter_lookup(t.repo->filter, &fps[1], hints), 1);
    CHECK_INT(gd_filter_lookup(t.repo->filter, &fps[2], hints), 1);
    CHECK_INT(look_up(0, 40), 40);
}

/* Slots were published after their table was loaded. */
TEST_WITH(test_published_since, setup("sha256", false), teardown())
{
    store("a", 0, 30);
    another_handle();
    CHECK_INT(look_up(0, 60), 30);
    store("b", 30, 60);
    CHECK_INT(look_up(0, 60), 60);
    check_addresses(0, 60);
    CHECK_INT(COUNTER(false_candidates), 0);
}

static void
write_entry(uint32_t slot, gd_entry_state state)
{
    gd_group *group;
    gd_entry entry;
    gd_published record;
    REQUIRE(gd_group_open(t.x.env, t.x.root, &t.x.params, 1, O_RDWR, &group,
                          NULL) == GD_OK);
    CHECK_INT(gd_group_read_entries(group, slot, 1, &entry, NULL), GD_OK);
    if (state != GD_ENTRY_DAMAGED) {
        memset(&entry, 0, sizeof entry);
    }
    entry.state = (uint8_t)state;
    CHECK_INT(gd_group_write_entries(group, slot, 1, &entry, NULL), GD_OK);
    CHECK_INT(gd_group_read_published(group, &record, NULL), GD_OK);
    record.sequence++;
    record.generation++;
    CHECK_INT(gd_group_write_published(group, &record, NULL), GD_OK);
    gd_group_close(group);
}

/* The handle's cached table still has them as live. */
TEST_WITH(test_freed_meanwhile, setup("sha256", false), teardown())
{
    store("a", 0, 40);
    CHECK_INT(look_up(0, 40), 40);
    gd_lookup_close(t.lookup);
    write_entry(7, GD_ENTRY_FREED);
    write_entry(8, GD_ENTRY_VOID);
    write_entry(9, GD_ENTRY_DAMAGED);
    scratch_flip(&t.x, "groups/00000001", gd_entry_offset(10), 1);
    CHECK_INT(gd_lookup_open(t.repo, &gd_global_scope, &t.lookup, &t.x.err),
              GD_OK);
    CHECK_INT(look_up(0, 40), 36);
    for (size_t i = 0; i < 40; i++) {
        CHECK_INT(t.blocks[i].address.group, i < 7 || i > 10);
    }
}

/* Group 1 is lost, and another upload makes one with its number: this
 * process's cached hints find no block. */
TEST_WITH(test_group_lost, setup("sha256", false), teardown())
{
    bool equal;
    store("a", 0, 64);
    CHECK_INT(look_up(0, 64), 64);
    gd_lookup_close(t.lookup);
    CHECK_INT(unlinkat(t.x.root, "groups/00000001", 0), 0);
    gd_repo *other = scratch_repo_filter(&t.x);
    CHECK_INT(put_image(other, "b", t.data + 64 * BLOCK, 64 * BLOCK, 100000,
                        NULL, &t.x.err), GD_OK);
    CHECK(scratch_exists(&t.x, "groups/00000001"));
    gd_repo_close(other);
    store("c", 0, 64);
    CHECK_INT(get_image(t.repo, "c", t.data, 64 * BLOCK, &equal, &t.x.err),
              GD_OK);
    CHECK(equal);
    CHECK_INT(gd_lookup_open(t.repo, &gd_global_scope, &t.lookup, &t.x.err),
              GD_OK);
}

/* ---- by value ---- */

/* With a digest of 8 bits most blocks have equal fingerprints; no block is
 * confused with another. */
TEST_WITH(test_namesakes, setup("weak-8", true), teardown())
{
    store("a", 0, 60);
    another_handle();
    look_up(0, MAX_COUNT);
    for (size_t i = 0; i < MAX_COUNT; i++) {
        const gd_address *at = &t.blocks[i].address;
        if (i < 60) {
            CHECK_INT(at->group, 1);
            CHECK_INT(at->slot, i);
        } else {
            CHECK_INT(at->group, 0);
        }
    }
    CHECK(COUNTER(compares) > 60);
}

/* Compares as the threads of the pool do, each its part. */
static void
compare_ahead(size_t first, size_t end)
{
    take_blocks(first, end);
    for (unsigned worker = 0; worker <= POOL_THREADS; worker++) {
        size_t next = first + (end - first) / (POOL_THREADS + 1 - worker);
        gd_lookup_compare(t.lookup, t.blocks + first, next - first, worker);
        first = next;
    }
}

TEST_WITH(test_compared_ahead, setup("sha256", true), teardown())
{
    store("a", 0, 100);
    another_handle();
    compare_ahead(0, 150); /* no store is at hand */
    CHECK_INT(COUNTER(compares), 0);
    CHECK_INT(look_up(0, 100), 100);
    CHECK_INT(COUNTER(compares), 100);
    compare_ahead(0, 150);
    CHECK_INT(COUNTER(compares), 200);
    check_addresses(0, 100);
    for (size_t i = 100; i < 150; i++) {
        CHECK_INT(t.blocks[i].address.group, 0);
    }
    gd_lookup_batch(t.lookup, t.blocks, 150, GD_COLD_LOADS);
    CHECK_INT(COUNTER(compares), 200); /* each once */
    check_addresses(0, 100);
}

/* A block is looked up even if only another one with its fingerprint was
 * compared. */
TEST_WITH(test_namesakes_compared_ahead, setup("weak-8", true), teardown())
{
    store("a", 0, 60);
    another_handle();
    look_up(0, 60);
    take_blocks(0, MAX_COUNT);
    size_t ahead = 0;
    for (size_t i = 0; i < MAX_COUNT; i++) {
        /* They are compared one by one, so that none is tried behind the one
         * before. */
        gd_lookup_compare(t.lookup, &t.blocks[i], 1, 0);
        const gd_address *at = &t.blocks[i].address;
        CHECK(at->group == 0 || (i < 60 && at->group == 1 && at->slot == i));
        ahead += at->group != 0;
    }
    CHECK(ahead > 0 && ahead < 60);
    gd_lookup_batch(t.lookup, t.blocks, MAX_COUNT, GD_COLD_LOADS);
    for (size_t i = 0; i < MAX_COUNT; i++) {
        CHECK_INT(t.blocks[i].address.group, i < 60 ? 1 : 0);
        CHECK_INT(t.blocks[i].address.slot, i < 60 ? i : 0);
    }
}

/* The result of comparing ahead does not hold for another slot of the
 * group. */
TEST_WITH(test_compared_ahead_in_another_slot, setup("weak-8", true),
          teardown())
{
    take_blocks(0, MAX_COUNT);
    size_t namesake = 1;
    while (namesake < MAX_COUNT &&
           !gd_fingerprint_equal(&t.blocks[namesake].fingerprint,
                                 &t.blocks[0].fingerprint)) {
        namesake++;
    }
    REQUIRE(namesake < MAX_COUNT);
    memmove(t.data + BLOCK, t.data + namesake * BLOCK, BLOCK);
    store("a", 0, 2);
    another_handle();
    CHECK_INT(look_up(0, 2), 2);
    CHECK_INT(t.blocks[1].address.slot, 1);
    memcpy(t.data + BLOCK, t.data, BLOCK); /* the namesake's slot comes next */
    take_blocks(0, 2);
    gd_lookup_compare(t.lookup, &t.blocks[0], 1, 0);
    gd_lookup_compare(t.lookup, &t.blocks[1], 1, 0);
    gd_lookup_batch(t.lookup, t.blocks, 2, GD_COLD_LOADS);
    for (size_t i = 0; i < 2; i++) {
        CHECK_INT(t.blocks[i].address.group, 1);
        CHECK_INT(t.blocks[i].address.slot, 0);
    }
}

TEST_WITH(test_damaged_blocks_are_not_equal, setup("sha256", true), teardown())
{
    store("a", 0, 40);
    another_handle();
    CHECK_INT(look_up(0, 40), 40);
    CHECK_INT(COUNTER(compares), 40);
    /* Noise is stored plain: segments of 8 blocks. */
    const uint64_t segment = 32 + 8 * BLOCK;
    scratch_flip(&t.x, "groups/00000001", 8192 + 32 + 3 * BLOCK + 5, 1);
    scratch_flip(&t.x, "groups/00000001", 8192 + segment, 1); /* its magic */
    another_handle();
    CHECK_INT(look_up(0, 40), 40 - 1 - 8);
    CHECK_INT(t.blocks[3].address.group, 0);
    scratch_truncate(&t.x, "groups/00000001", 8192 + 3 * segment);
    another_handle();
    CHECK_INT(look_up(0, 40), 24 - 1 - 8);
}

/* ---- failures ---- */

/* Any failure in a look-up counts as a miss, once. */
TEST_WITH(test_failures_are_misses, setup("sha256", true), teardown())
{
    store("a", 0, 100);
    for (int kind = 0; kind < 2; kind++) {
        bool struck = true;
        for (uint64_t n = 1; struck; n++) {
            another_handle();
            uint64_t faults = fault_env_faults(&t.x.f);
            fault_env_fail(&t.x.f, kind == 0 ? FAULT_ANY : FAULT_ALLOC, n,
                           kind == 0 ? EIO : ENOMEM, false);
            size_t found = look_up(0, 100);
            struck = fault_env_faults(&t.x.f) > faults;
            fault_env_heal(&t.x.f);
            CHECK(found == 100 || struck);
            for (size_t i = 0; i < 100; i++) {
                CHECK(t.blocks[i].address.group == 0 ||
                      (t.blocks[i].address.group == 1 + i / 64 &&
                       t.blocks[i].address.slot == i % 64));
            }
            CHECK_INT(look_up(0, 100), 100);
        }
    }
}

TEST_WITH(test_open_without_memory, setup("sha256", true), teardown())
{
    gd_lookup_close(t.lookup);
    gd_status s = GD_NOMEM;
    uint64_t n;
    for (n = 1; s != GD_OK; n++) {
        fault_env_fail(&t.x.f, FAULT_ALLOC, n, ENOMEM, false);
        s = gd_lookup_open(t.repo, &gd_global_scope, &t.lookup, &t.x.err);
        CHECK(s == GD_OK || s == GD_NOMEM);
    }
    CHECK(n > 4);
    fault_env_heal(&t.x.f);
}
