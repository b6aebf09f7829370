/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_compare.c - blocks compared by their bytes: only equal ones are equal,
 * even with damaged groups, and few calls are made for it.
 */
#include "engine/read/compare.h"

#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { BLOCK = 512, BLOCKS = 150, SLOTS = 64, IN_SEGMENT = 8 };

typedef struct fixture {
    scratch x;
    gd_repo *repo;
    gd_compare *compare;
    uint8_t data[BLOCKS * BLOCK];
    gd_fingerprint fingerprints[BLOCKS];
} fixture;

static fixture t;

static void
open_handle(void)
{
    t.repo = scratch_repo(&t.x);
    REQUIRE(gd_compare_open(t.repo, &t.compare, &t.x.err) == GD_OK);
}

static void
close_handle(void)
{
    gd_compare_close(t.compare);
    gd_repo_close(t.repo);
}

static void
another_handle(void)
{
    close_handle();
    open_handle();
}

/* Half of every block is noise, so that segments can be made smaller. */
static void
setup(gd_codec codec, const char *digest)
{
    memset(&t, 0, sizeof t);
    scratch_init(&t.x);
    t.x.params.block_size = BLOCK;
    t.x.params.segment_size = IN_SEGMENT * BLOCK;
    t.x.params.codec = codec;
    t.x.params.by_value = true;
    strcpy(t.x.params.digest, digest);
    for (int i = 0; i < BLOCKS; i++) {
        fill_random(t.data + i * BLOCK, BLOCK / 2, 1 + (uint64_t)i);
    }
    open_handle();
    gd_hasher *hasher;
    REQUIRE(gd_hasher_open(t.x.env, t.repo->digest, &hasher, NULL) == GD_OK);
    for (int i = 0; i < BLOCKS; i++) {
        CHECK_INT(gd_hasher_compute(hasher, &gd_global_scope,
                                    t.data + i * BLOCK, BLOCK,
                                    &t.fingerprints[i], NULL), GD_OK);
    }
    gd_hasher_close(t.x.env, hasher);
    CHECK_INT(put_image(t.repo, "a", t.data, sizeof t.data, 100000, NULL,
                        &t.x.err), GD_OK);
    another_handle();
}

static void
teardown(void)
{
    close_handle();
    CHECK_INT(scratch_destroy(&t.x), 0);
}

/* Blocks were stored in order, from the first slot of group 1 on. */
static gd_address
address_of(int i)
{
    return (gd_address){1 + (uint32_t)i / SLOTS, (uint32_t)i % SLOTS};
}

/* Returns true if the stored block i is found to be equal to block k. */
static bool
is_equal(int i, int k)
{
    return gd_compare_block(t.compare, address_of(i), &t.fingerprints[k],
                            t.data + k * BLOCK, BLOCK);
}

static int
count_equal(int first, int end)
{
    int equal = 0;
    for (int i = first; i < end; i++) {
        equal += is_equal(i, i);
    }
    return equal;
}

/* ---- verdicts ---- */

TEST(test_every_codec)
{
    for (gd_codec codec = GD_CODEC_NONE; codec <= GD_CODEC_ZSTD; codec++) {
        setup(codec, "xxh3-128");
        CHECK_INT(count_equal(0, BLOCKS), BLOCKS);
        for (int i = BLOCKS - 1; i >= 0; i--) {
            CHECK(is_equal(i, i));
            CHECK(is_equal(i * 37 % BLOCKS, i * 37 % BLOCKS));
            CHECK(!is_equal(i, (i + 1) % BLOCKS));
        }
        teardown();
    }
}

TEST_WITH(test_every_byte_counts, setup(GD_CODEC_LZ4, "xxh3-128"), teardown())
{
    for (int at = 0; at < BLOCK; at++) {
        t.data[20 * BLOCK + at] ^= 0x10;
        CHECK(!is_equal(20, 20));
        t.data[20 * BLOCK + at] ^= 0x10;
    }
    CHECK(is_equal(20, 20));
}

/* The fingerprints are equal, and the bytes differ. */
TEST_WITH(test_false_friends, setup(GD_CODEC_NONE, "weak-8"), teardown())
{
    int friends = 0;
    for (int i = 0; i < BLOCKS; i++) {
        for (int k = 0; k < BLOCKS; k++) {
            friends += i != k && gd_fingerprint_equal(&t.fingerprints[i],
                                                      &t.fingerprints[k]);
            CHECK(is_equal(i, k) == (i == k));
        }
    }
    CHECK(friends > 10);
}

TEST_WITH(test_other_lengths_and_places, setup(GD_CODEC_NONE, "xxh3-128"),
          teardown())
{
    CHECK(is_equal(3, 3));
    const uint8_t *data = t.data + 3 * BLOCK;
    const gd_fingerprint *fp = &t.fingerprints[3];
    const gd_address at = {1, 3};
    CHECK(!gd_compare_block(t.compare, at, fp, data, BLOCK - 1));
    CHECK(!gd_compare_block(t.compare, at, fp, data, BLOCK + 1));
    CHECK(!gd_compare_block(t.compare, at, &t.fingerprints[4], data, BLOCK));
    const gd_address nowhere[] = {
        {1, SLOTS}, {1, UINT32_MAX}, {3, 30}, {9, 3}, {2, 3}};
    for (int i = 0; i < 5; i++) {
        CHECK(!gd_compare_block(t.compare, nowhere[i], fp, data, BLOCK));
        CHECK(is_equal(3, 3));
    }
}

/* ---- damaged groups ---- */

TEST(test_damage)
{
    const uint64_t start = gd_fptable_data_start(SLOTS);
    const uint64_t segment = GD_SEGMENT_HEADER + IN_SEGMENT * BLOCK;
    setup(GD_CODEC_NONE, "xxh3-128");
    scratch_flip(&t.x, "groups/00000001", start + 32 + 3 * BLOCK + 5, 1);
    scratch_flip(&t.x, "groups/00000001", start + segment, 1); /* its magic */
    scratch_flip(&t.x, "groups/00000001", gd_entry_offset(20), 1);
    scratch_truncate(&t.x, "groups/00000001", start + 6 * segment + 99);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < SLOTS; i++) {
            CHECK(is_equal(i, i) ==
                  (i != 3 && i / IN_SEGMENT != 1 && i != 20 && i < 48));
        }
    }
    teardown();
    /* An unreadable segment replaces the one read before in memory. */
    setup(GD_CODEC_NONE, "xxh3-128");
    scratch_flip(&t.x, "groups/00000001", start + segment, 1);
    CHECK(is_equal(0, 0) && !is_equal(IN_SEGMENT, IN_SEGMENT));
    CHECK(is_equal(0, 0));
    teardown();
    setup(GD_CODEC_LZ4, "xxh3-128");
    scratch_flip(&t.x, "groups/00000001", start + GD_SEGMENT_HEADER + 1, 9);
    CHECK(count_equal(0, IN_SEGMENT) < IN_SEGMENT);
    CHECK_INT(count_equal(IN_SEGMENT, SLOTS), SLOTS - IN_SEGMENT);
    teardown();
}

static void
write_entries(uint32_t slot, uint32_t count, const gd_entry *entries)
{
    gd_group *group;
    REQUIRE(gd_group_open(t.x.env, t.x.root, &t.x.params, 1, O_RDWR, &group,
                          NULL) == GD_OK);
    CHECK_INT(gd_group_write_entries(group, slot, count, entries, NULL),
              GD_OK);
    gd_group_close(group);
}

static void
read_entries(uint32_t slot, uint32_t count, gd_entry *entries)
{
    gd_group *group;
    REQUIRE(gd_group_open(t.x.env, t.x.root, &t.x.params, 1, O_RDONLY, &group,
                          NULL) == GD_OK);
    CHECK_INT(gd_group_read_entries(group, slot, count, entries, NULL), GD_OK);
    gd_group_close(group);
}

TEST_WITH(test_only_live_blocks, setup(GD_CODEC_NONE, "xxh3-128"), teardown())
{
    static const uint8_t states[] = {GD_ENTRY_FREED, GD_ENTRY_VOID,
                                     GD_ENTRY_DAMAGED};
    gd_entry entries[3];
    read_entries(7, 3, entries);
    for (int i = 0; i < 3; i++) {
        entries[i].state = states[i];
    }
    write_entries(7, 3, entries);
    for (int i = 0; i < SLOTS; i++) {
        CHECK(is_equal(i, i) == (i < 7 || i > 9));
    }
}

/* Entries that were read along with others, before they were published, are
 * read again. */
TEST_WITH(test_published_since, setup(GD_CODEC_NONE, "xxh3-128"), teardown())
{
    static const gd_entry empty[20];
    gd_entry entries[20];
    read_entries(30, 20, entries);
    write_entries(30, 20, empty);
    CHECK_INT(count_equal(0, SLOTS), SLOTS - 20);
    write_entries(30, 20, entries);
    CHECK_INT(count_equal(0, SLOTS), SLOTS);
}

/* An entry leads into another segment than its own. */
TEST_WITH(test_entry_of_another_segment, setup(GD_CODEC_NONE, "weak-8"),
          teardown())
{
    gd_entry entries[2];
    read_entries(8, 1, &entries[0]);
    read_entries(16, 1, &entries[1]);
    entries[0].segment = entries[1].segment;
    entries[0].fingerprint = entries[1].fingerprint;
    write_entries(8, 1, entries);
    CHECK(!is_equal(8, 16));
    CHECK(is_equal(16, 16));
    CHECK(!is_equal(8, 16));
}

/* Entries of one group are not used for another group. */
TEST_WITH(test_namesakes_in_two_groups, setup(GD_CODEC_NONE, "xxh3-128"),
          teardown())
{
    gd_entry entry;
    read_entries(5, 1, &entry);
    entry.fingerprint = t.fingerprints[SLOTS + 5];
    entry.plain_offset += BLOCK;
    write_entries(5, 1, &entry);
    CHECK(!is_equal(5, SLOTS + 5));
    CHECK(is_equal(SLOTS + 5, SLOTS + 5));
    CHECK(!is_equal(5, SLOTS + 5));
}

static unsigned
users_of(uint32_t number)
{
    gd_group *group;
    if (!CHECK_INT(gd_fpcache_group(t.repo->cache, number, false, &group,
                                    NULL), GD_OK)) {
        return 0;
    }
    unsigned users = group->item.users - 1;
    gd_fpcache_return_group(t.repo->cache, group);
    return users;
}

TEST_WITH(test_groups_are_given_back, setup(GD_CODEC_NONE, "xxh3-128"),
          teardown())
{
    CHECK(is_equal(0, 0));
    CHECK_INT(users_of(1), 1);
    CHECK(is_equal(SLOTS, SLOTS));
    CHECK_INT(users_of(1), 0);
    CHECK_INT(users_of(2), 1);
    CHECK(!gd_compare_block(t.compare, (gd_address){9, 0}, &t.fingerprints[0],
                            t.data, BLOCK));
    CHECK_INT(users_of(2), 0);
    CHECK(is_equal(SLOTS, SLOTS));
    gd_compare_close(t.compare);
    CHECK_INT(users_of(2), 0);
    CHECK_INT(gd_compare_open(t.repo, &t.compare, &t.x.err), GD_OK);
}

/* ---- calls ---- */

/* There is one for the entries, one for each segment, and two for opening a
 * group. */
TEST_WITH(test_neighbours_cost_few_calls, setup(GD_CODEC_NONE, "xxh3-128"),
          teardown())
{
    CHECK(is_equal(SLOTS, SLOTS));
    uint64_t before = fault_env_count(&t.x.f, FAULT_PREAD);
    CHECK_INT(count_equal(SLOTS, 2 * SLOTS), SLOTS);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_PREAD) - before,
              SLOTS / IN_SEGMENT - 1);
    CHECK_INT((int64_t)atomic_load(&t.repo->counters.compares), SLOTS + 1);
    CHECK_INT(count_equal(0, BLOCKS), BLOCKS);
    uint64_t calls = fault_env_count(&t.x.f, FAULT_ANY);
    CHECK_INT(count_equal(BLOCKS - BLOCKS % IN_SEGMENT, BLOCKS),
              BLOCKS % IN_SEGMENT);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_ANY) - calls, 0);
}

/* A block that cannot be read once is unequal once. */
TEST_WITH(test_failures, setup(GD_CODEC_LZ4, "xxh3-128"), teardown())
{
    for (int kind = 0; kind < 2; kind++) {
        bool struck = true;
        for (uint64_t n = 1; struck; n++) {
            another_handle();
            uint64_t faults = fault_env_faults(&t.x.f);
            fault_env_fail(&t.x.f, kind == 0 ? FAULT_ANY : FAULT_ALLOC, n,
                           kind == 0 ? EIO : ENOMEM, false);
            int equal = count_equal(0, BLOCKS);
            struck = fault_env_faults(&t.x.f) > faults;
            fault_env_heal(&t.x.f);
            CHECK(equal == BLOCKS || struck);
            CHECK(equal >= BLOCKS - 1);
            CHECK_INT(count_equal(0, BLOCKS), BLOCKS);
        }
    }
}

TEST_WITH(test_open_without_memory, setup(GD_CODEC_NONE, "xxh3-128"),
          teardown())
{
    gd_compare_close(t.compare);
    gd_compare_close(NULL);
    gd_status s = GD_NOMEM;
    uint64_t n;
    for (n = 1; s != GD_OK; n++) {
        fault_env_fail(&t.x.f, FAULT_ALLOC, n, ENOMEM, false);
        s = gd_compare_open(t.repo, &t.compare, &t.x.err);
        CHECK(s == GD_OK || s == GD_NOMEM);
    }
    CHECK(n > 4);
    fault_env_heal(&t.x.f);
}
