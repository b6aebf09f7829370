/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_transaction_fingerprints.c - an image from blocks given by their
 * fingerprints: stored ones are found, missing ones are added.
 */
#include "engine/write/transaction.h"

#include "engine/files/group.h"
#include "engine/files/spool.h"
#include "engine/read/image.h"
#include "tests/c/support/check.h"
#include "tests/c/support/transaction_fixture.h"

enum { PULL_BLOCK = 512 };

typedef struct pulled {
    gd_fingerprint fps[400];
    uint32_t lengths[400];
    gd_address addresses[400];
    size_t count;
} pulled;

static void
setup_pull(bool by_value)
{
    scratch_init(&the_scratch);
    the_scratch.params.block_size = PULL_BLOCK;
    the_scratch.params.segment_size = 4096;
    the_scratch.params.by_value = by_value;
    the_repo = scratch_repo_filter(&the_scratch);
}

/* Computes the fingerprints of all blocks of some bytes. */
static void
describe(pulled *p, const uint8_t *data, size_t length)
{
    gd_hasher *hasher;
    p->count = 0;
    REQUIRE(gd_hasher_open(the_repo->env, the_repo->digest, &hasher, NULL) ==
            GD_OK);
    for (size_t at = 0; at < length; at += PULL_BLOCK) {
        p->lengths[p->count] = (uint32_t)minimum(PULL_BLOCK, length - at);
        CHECK_INT(gd_hasher_compute(hasher, &gd_global_scope, data + at,
                                    p->lengths[p->count], &p->fps[p->count],
                                    NULL), GD_OK);
        p->count++;
    }
    gd_hasher_close(the_repo->env, hasher);
}

static void
find_blocks(gd_transaction *transaction, pulled *p)
{
    CHECK_OK(gd_transaction_find(transaction, p->fps, p->lengths, p->count,
                                 p->addresses, &the_scratch.err));
}

static size_t
count_addresses(const pulled *p)
{
    size_t found = 0;
    for (size_t i = 0; i < p->count; i++) {
        found += p->addresses[i].group != 0;
    }
    return found;
}

static gd_status
add_blocks(gd_transaction *transaction, const pulled *p, size_t first,
           size_t count)
{
    return gd_transaction_add(transaction, p->fps + first, p->lengths + first,
                              p->addresses + first, count, &the_scratch.err);
}

static void
commit(gd_transaction *transaction, gd_recipe_header *header)
{
    bool linked;
    CHECK_OK(gd_transaction_commit(transaction, header, &linked,
                                   &the_scratch.err));
    gd_transaction_end(transaction);
}

/* There are more at once than one look-up takes. */
TEST_WITH(test_find_and_add_many, setup_pull(false), transaction_teardown())
{
    enum { BLOCKS = 200, MANY = 9001 };
    static uint8_t data[BLOCKS * PULL_BLOCK];
    static pulled p;
    gd_recipe_header header;
    fill_random(data, sizeof data, 1);
    store_in_one("a", data, sizeof data, sizeof data, NULL);
    gd_transaction *transaction = begin_image("b");
    describe(&p, data, sizeof data);
    find_blocks(transaction, &p);
    /* They have their own size, so that the sanitizer detects accesses
     * beyond. */
    gd_fingerprint *fps = malloc(MANY * sizeof *fps);
    uint32_t *lengths = malloc(MANY * sizeof *lengths);
    gd_address *found = malloc(MANY * sizeof *found);
    for (size_t i = 0; i < MANY; i++) {
        fps[i] = p.fps[i % BLOCKS];
        lengths[i] = p.lengths[i % BLOCKS];
    }
    CHECK_INT(gd_transaction_find(transaction, fps, lengths, MANY, found,
                                  &the_scratch.err), GD_OK);
    for (size_t i = 0; i < MANY; i++) {
        const gd_address *wanted = &p.addresses[i % BLOCKS];
        REQUIRE(found[i].group == wanted->group &&
                found[i].slot == wanted->slot);
    }
    uint64_t blocks = atomic_load(&the_repo->counters.blocks);
    uint64_t hits = atomic_load(&the_repo->counters.hits);
    CHECK_INT(gd_transaction_add(transaction, fps, lengths, found, MANY,
                                 &the_scratch.err), GD_OK);
    CHECK_INT(atomic_load(&the_repo->counters.blocks) - blocks, MANY);
    CHECK_INT(atomic_load(&the_repo->counters.hits) - hits, MANY);
    commit(transaction, &header);
    CHECK_INT(header.size, (uint64_t)MANY * PULL_BLOCK);
    free(fps);
    free(lengths);
    free(found);
}

static void
find_at(gd_transaction *transaction, pulled *p)
{
    CHECK_INT(gd_transaction_find_at(transaction, p->fps, p->lengths, p->count,
                                     p->addresses, &the_scratch.err), GD_OK);
}

/* Addresses from others are accepted only for blocks that are there. */
TEST_WITH(test_find_at, setup_pull(false), transaction_teardown())
{
    enum { BLOCKS = 100 };
    static uint8_t data[BLOCKS * PULL_BLOCK];
    static pulled p, told;
    gd_recipe_header header;
    fill_random(data, sizeof data, 1);
    store_in_one("a", data, sizeof data, sizeof data, NULL);
    gd_transaction *transaction = begin_image("look");
    describe(&p, data, sizeof data);
    find_blocks(transaction, &p);
    gd_transaction_end(transaction);
    transaction_other_handle(); /* it has read no group yet */
    transaction = begin_image("b");
    told = p;
    told.addresses[3] = p.addresses[4];
    told.lengths[5]++;
    told.fps[6].bytes[31] ^= 1;
    told.addresses[7].group += 1000;
    told.addresses[8].slot += 50000;
    told.addresses[9] = (gd_address){0, 0};
    /* No honest rank sends such addresses. */
    for (size_t i = 10; i < 40; i++) {
        told.addresses[i] = (gd_address){GD_MAX_GROUP, (uint32_t)i * 7919};
    }
    find_at(transaction, &told);
    for (size_t i = 0; i < BLOCKS; i++) {
        bool honest = i < 3 || i == 4 || i >= 40;
        CHECK_INT(told.addresses[i].group, honest ? p.addresses[i].group : 0);
    }
    CHECK_INT(add_blocks(transaction, &told, 9, 1), GD_INVALID);
    find_at(transaction, &p);
    CHECK_INT(count_addresses(&p), BLOCKS);
    CHECK_INT(add_blocks(transaction, &p, 0, BLOCKS), GD_OK);
    commit(transaction, &header);
    CHECK_INT(header.new_bytes, 0);
    check_stored_image("b", data, sizeof data);
}

/* Bytes that one transaction stores for the image of another count as the
 * image's, once. */
TEST_WITH(test_credit, setup_pull(false), transaction_teardown())
{
    enum { BLOCKS = 30 };
    static uint8_t data[BLOCKS * PULL_BLOCK];
    static pulled p;
    uint64_t new_bytes, stored_bytes, again, rest;
    gd_recipe_header header;
    fill_random(data, sizeof data, 1);
    describe(&p, data, sizeof data);
    gd_transaction *transaction = begin_image("a");
    CHECK_INT(gd_transaction_write_blocks(transaction, data, p.lengths,
                                          NULL, BLOCKS - 1, p.addresses,
                                          &the_scratch.err), GD_OK);
    CHECK_INT(gd_transaction_sync(transaction, &the_scratch.err), GD_OK);
    gd_transaction_count(transaction, &new_bytes, &stored_bytes);
    CHECK_INT(new_bytes, (BLOCKS - 1) * PULL_BLOCK);
    CHECK(stored_bytes >= new_bytes); /* noise does not compress */
    CHECK_INT(gd_transaction_sync(transaction, &the_scratch.err), GD_OK);
    gd_transaction_count(transaction, &again, &rest);
    CHECK(again == new_bytes && rest == stored_bytes);
    gd_transaction_end(transaction);
    transaction = begin_image("a");
    find_blocks(transaction, &p);
    CHECK_INT(add_blocks(transaction, &p, 0, BLOCKS - 1), GD_OK);
    gd_transaction_credit(transaction, new_bytes - 1, stored_bytes);
    gd_transaction_credit(transaction, 1, 0);
    write_all(transaction, data + (BLOCKS - 1) * PULL_BLOCK, PULL_BLOCK);
    commit(transaction, &header);
    CHECK_INT(header.new_bytes, sizeof data);
    CHECK(header.stored_bytes >= stored_bytes + PULL_BLOCK);
    check_stored_image("a", data, sizeof data);
}

/* The transaction does not wait for a group that a collector has, and its
 * blocks are not found. */
TEST_WITH(test_find_at_without_the_lock, setup_pull(false),
          transaction_teardown())
{
    enum { BLOCKS = 20 };
    static uint8_t data[BLOCKS * PULL_BLOCK];
    static pulled p;
    fill_random(data, sizeof data, 1);
    store_in_one("a", data, sizeof data, sizeof data, NULL);
    gd_transaction *transaction = begin_image("look");
    describe(&p, data, sizeof data);
    find_blocks(transaction, &p);
    gd_transaction_end(transaction);
    CHECK_INT(gd_locks_announce(the_repo->locks, p.addresses[0].group,
                                &the_scratch.err), GD_OK);
    transaction = begin_image("b");
    find_at(transaction, &p);
    CHECK_INT(count_addresses(&p), 0);
    gd_transaction_end(transaction);
    gd_locks_withdraw_all(the_repo->locks);
}

/* If a group becomes unreadable, that is an error, also for a caller that wants
 * no words. */
TEST_WITH(test_find_at_in_an_unreadable_group, setup_pull(false),
          transaction_teardown())
{
    enum { BLOCKS = 20, READS = 8 };
    static uint8_t data[BLOCKS * PULL_BLOCK];
    static pulled p, told;
    gd_error *const words[] = {&the_scratch.err, NULL};
    gd_status s[READS][2];
    int errors = 0;
    fill_random(data, sizeof data, 1);
    store_in_one("a", data, sizeof data, sizeof data, NULL);
    gd_transaction *transaction = begin_image("look");
    describe(&p, data, sizeof data);
    find_blocks(transaction, &p);
    gd_transaction_end(transaction);
    for (int n = 0; n < READS; n++) {
        for (int i = 0; i < 2; i++) {
            transaction_other_handle(); /* it has read no group yet */
            transaction = begin_image("b");
            told = p;
            fault_env_fail(&the_scratch.f, FAULT_PREAD, (uint64_t)n + 1, EIO,
                           true);
            s[n][i] = gd_transaction_find_at(transaction, told.fps,
                                             told.lengths, told.count,
                                             told.addresses, words[i]);
            fault_env_heal(&the_scratch.f);
            gd_transaction_end(transaction);
        }
        CHECK_INT(s[n][1], s[n][0]);
        errors += s[n][0] != GD_OK;
    }
    CHECK(errors > 0 && errors < READS);
}

/* Blocks of several groups, each separately and in random order, are added
 * between written ones and zeros. */
TEST(test_find_and_add)
{
    enum { BLOCKS = 200, NEW = 6 * PULL_BLOCK };
    static uint8_t data[BLOCKS * PULL_BLOCK + 99], own[NEW], want[300000];
    static pulled p;
    gd_recipe_header header;
    size_t length = 0;
    setup_pull(false);
    fill_random(data, sizeof data, 1);
    fill_random(own, sizeof own, 2);
    store_in_one("a", data, sizeof data, sizeof data, NULL);
    gd_transaction *transaction = begin_image("b");
    describe(&p, data, sizeof data);
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), BLOCKS + 1);
    /* The last block is first: it is a short one. */
    CHECK_INT(add_blocks(transaction, &p, BLOCKS, 1), GD_OK);
    memcpy(want, data + BLOCKS * PULL_BLOCK, 99);
    length = 99;
    for (size_t i = BLOCKS; i-- > 100;) {
        CHECK_INT(add_blocks(transaction, &p, i, 1), GD_OK);
        memcpy(want + length, data + i * PULL_BLOCK, PULL_BLOCK);
        length += PULL_BLOCK;
    }
    for (int i = 0; i < 3; i++) {
        size_t here = 2 * PULL_BLOCK;
        write_all(transaction, own + i * here, here / 2);
        write_all(transaction, own + i * here + here / 2, here / 2);
        memcpy(want + length, own + i * here, here);
        length += here;
        CHECK_INT(add_blocks(transaction, &p, (size_t)i * 30, 30), GD_OK);
        memcpy(want + length, data + i * 30 * PULL_BLOCK, 30 * PULL_BLOCK);
        length += 30 * PULL_BLOCK;
        CHECK_INT(gd_transaction_add_zeros(transaction, 1000,
                                           &the_scratch.err), GD_OK);
        length += 1000;
    }
    write_all(transaction, own, 77);
    memcpy(want + length, own, 77);
    length += 77;
    commit(transaction, &header);
    CHECK_INT(header.size, length);
    CHECK_INT(header.zero_bytes, 3000);
    CHECK_INT(header.new_bytes, 6 * PULL_BLOCK + 77);
    check_stored_image("b", want, length);
    transaction_other_handle();
    check_stored_image("b", want, length);
    transaction_teardown();
}

TEST_WITH(test_find_what_is_not_there, setup_pull(false),
          transaction_teardown())
{
    static uint8_t data[20 * PULL_BLOCK];
    static pulled p;
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin_image("b");
    describe(&p, data, sizeof data);
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), 0);
    gd_transaction_end(transaction);
    store_in_one("a", data, sizeof data, sizeof data, NULL);
    transaction = begin_image("b");
    p.lengths[3] = 511; /* not its length */
    p.lengths[4] = 0;
    p.fps[5].bytes[31] ^= 1;
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), 17);
    CHECK(p.addresses[3].group == 0 && p.addresses[4].group == 0 &&
          p.addresses[5].group == 0);
    p.count = 0;
    find_blocks(transaction, &p);
    CHECK_INT(add_blocks(transaction, &p, 0, 0), GD_OK);
    gd_transaction_end(transaction);
}

/* The transaction's own blocks are found: not synced yet, synced, and in a
 * group that is full. */
TEST_WITH(test_find_own_blocks, setup_pull(false), transaction_teardown())
{
    enum { BLOCKS = 100 };
    static uint8_t data[BLOCKS * PULL_BLOCK], want[4 * sizeof data];
    static pulled p;
    gd_recipe_header header;
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin_image("a");
    describe(&p, data, sizeof data);
    write_all(transaction, data, 10 * PULL_BLOCK);
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), 10);
    CHECK_INT(add_blocks(transaction, &p, 0, 10), GD_OK);
    CHECK_INT(add_blocks(transaction, &p, 9, 2), GD_INVALID);
    p.addresses[2].slot++; /* the neighbour's */
    CHECK_INT(add_blocks(transaction, &p, 2, 1), GD_INVALID);
    p.lengths[3]--;
    CHECK_INT(add_blocks(transaction, &p, 3, 1), GD_INVALID);
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), 9);
    p.lengths[3]++;
    write_all(transaction, data, sizeof data); /* of 64 slots: a second group */
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), BLOCKS);
    CHECK_INT(gd_transaction_sync(transaction, &the_scratch.err), GD_OK);
    CHECK_INT(add_blocks(transaction, &p, 0, BLOCKS), GD_OK);
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), BLOCKS);
    CHECK_INT(add_blocks(transaction, &p, 50, 50), GD_OK);
    p.lengths[0] = p.lengths[BLOCKS - 1] = 100;
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), BLOCKS - 2);
    commit(transaction, &header);
    CHECK_INT(header.new_bytes, sizeof data);
    memcpy(want, data, 10 * PULL_BLOCK);
    memcpy(want + 10 * PULL_BLOCK, data, 10 * PULL_BLOCK);
    memcpy(want + 20 * PULL_BLOCK, data, sizeof data);
    memcpy(want + 120 * PULL_BLOCK, data, sizeof data);
    memcpy(want + 220 * PULL_BLOCK, data + 50 * PULL_BLOCK, 50 * PULL_BLOCK);
    check_stored_image("a", want, 270 * PULL_BLOCK);
}

/* Written bytes are counted without a sync point, and removed by an abort. */
TEST_WITH(test_measure, setup_pull(false), transaction_teardown())
{
    static uint8_t data[100 * PULL_BLOCK];
    uint64_t stored, found;
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin_image("a");
    uint64_t syncs = fault_env_count(&the_scratch.f, FAULT_FDATASYNC);
    write_all(transaction, data, 20 * PULL_BLOCK);
    write_all(transaction, data, 10 * PULL_BLOCK);
    CHECK_INT(gd_transaction_add_zeros(transaction, 5 * PULL_BLOCK,
                                       &the_scratch.err), GD_OK);
    CHECK_INT(gd_transaction_measure(transaction, &stored, &found,
                                     &the_scratch.err), GD_OK);
    CHECK(stored > 20 * PULL_BLOCK && stored < 22 * PULL_BLOCK);
    CHECK_INT(found, 10 * PULL_BLOCK);
    CHECK_INT(fault_env_count(&the_scratch.f, FAULT_FDATASYNC), syncs);
    CHECK_INT(gd_transaction_kept_bytes(transaction), 0);
    CHECK_INT(gd_transaction_sync(transaction, &the_scratch.err), GD_OK);
    CHECK_INT(gd_transaction_kept_bytes(transaction), stored);
    write_all(transaction, data + 20 * PULL_BLOCK, 10 * PULL_BLOCK);
    CHECK_INT(gd_transaction_kept_bytes(transaction), stored);
    /* A sync that fails may have published them, too. */
    fault_env_fail(&the_scratch.f, FAULT_FDATASYNC, 1, EIO, false);
    CHECK_INT(gd_transaction_sync(transaction, &the_scratch.err), GD_IO);
    CHECK(gd_transaction_kept_bytes(transaction) > stored);
    CHECK(gd_transaction_measure(transaction, &stored, &found,
                                 &the_scratch.err) != GD_OK);
    gd_transaction_end(transaction);
}

/* Each address that find did not return is refused, whatever its source. */
TEST_WITH(test_add_takes_nothing_on_trust, setup_pull(false),
          transaction_teardown())
{
    enum { BLOCKS = 130 };
    static uint8_t data[BLOCKS * PULL_BLOCK];
    static pulled p, all, bad;
    fill_random(data, sizeof data, 1);
    store_in_one("a", data, sizeof data, sizeof data, NULL);
    gd_transaction *transaction = begin_image("probe");
    describe(&all, data, sizeof data);
    find_blocks(transaction, &all);
    CHECK_INT(count_addresses(&all), BLOCKS);
    gd_transaction_end(transaction);
    /* This one finds blocks of the third group only. */
    transaction = begin_image("b");
    p = all;
    p.count = 2;
    p.fps[0] = all.fps[BLOCKS - 1];
    p.fps[1] = all.fps[BLOCKS - 2];
    find_blocks(transaction, &p);
    CHECK_INT(p.addresses[0].group, 3);
    CHECK_INT(add_blocks(transaction, &p, 0, 2), GD_OK);

    /* It is there, but its group's lock is not held for us. */
    CHECK_INT(add_blocks(transaction, &all, 0, 1), GD_INVALID);
    CHECK_CONTAINS(the_scratch.err.text, "slot 0 of group 00000001");
    /* The entry is not published: its block may not be durable. */
    gd_group *group;
    gd_entry entry;
    REQUIRE(gd_group_open(the_scratch.env, the_scratch.root,
                          &the_scratch.params, 3, O_RDWR, &group, NULL) ==
            GD_OK);
    CHECK_INT(gd_group_read_entries(group, p.addresses[0].slot, 1, &entry,
                                    NULL),
              GD_OK);
    CHECK_INT(gd_group_write_entries(group, 40, 1, &entry, NULL), GD_OK);
    bad = p;
    bad.addresses[0].slot = 40;
    CHECK_INT(add_blocks(transaction, &bad, 0, 1), GD_INVALID);
    static const gd_address wrong[] = {
        {0, 0}, {2, 0}, {3, 63}, {3, 64}, {3, UINT32_MAX}, {99, 0},
        {UINT32_MAX, 1}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        bad = p;
        bad.addresses[0] = wrong[i];
        CHECK_INT(add_blocks(transaction, &bad, 0, 2), GD_INVALID);
        bad = p; /* even behind a good one */
        bad.addresses[1] = wrong[i];
        CHECK_INT(add_blocks(transaction, &bad, 0, 2), GD_INVALID);
    }
    bad = p;
    bad.fps[1] = p.fps[0];
    CHECK_INT(add_blocks(transaction, &bad, 0, 2), GD_INVALID);
    bad = p;
    bad.lengths[1] = 1;
    CHECK_INT(add_blocks(transaction, &bad, 0, 2), GD_INVALID);
    /* It was freed (which the lock would have prevented), or is damaged. */
    gd_entry gone[] = {{.state = GD_ENTRY_FREED}, entry};
    gone[1].state = GD_ENTRY_DAMAGED;
    for (int i = 0; i < 2; i++) {
        CHECK_INT(gd_group_write_entries(group, p.addresses[0].slot, 1,
                                         &gone[i], NULL),
                  GD_OK);
        CHECK_INT(add_blocks(transaction, &p, 0, 1), GD_INVALID);
    }
    CHECK_INT(gd_group_write_entries(group, p.addresses[0].slot, 1, &entry,
                                     NULL),
              GD_OK);
    gd_group_close(group);
    /* No byte was appended meanwhile, and the transaction continues. */
    CHECK_INT(add_blocks(transaction, &p, 0, 2), GD_OK);
    gd_recipe_header header;
    commit(transaction, &header);
    CHECK_INT(header.size, 4 * PULL_BLOCK);
}

/* I6 */
TEST(test_find_holds_the_lock)
{
    static uint8_t data[10 * PULL_BLOCK];
    static pulled p;
    const uint64_t byte = (UINT64_C(1) << 32) + 1;
    setup_pull(false);
    fill_random(data, sizeof data, 1);
    store_in_one("a", data, sizeof data, sizeof data, NULL);
    int fd = openat(the_scratch.root, "locks/groups", O_RDWR);
    REQUIRE(fd >= 0);
    const gd_env *real = gd_env_posix();
    gd_transaction *transaction = begin_image("b");
    CHECK_INT(real->lock(real, fd, byte, F_WRLCK), 0);
    describe(&p, data, sizeof data);
    find_blocks(transaction, &p); /* refused: not found */
    CHECK_INT(count_addresses(&p), 0);
    CHECK_INT(real->lock(real, fd, byte, F_UNLCK), 0);
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), 10);
    CHECK_INT(real->lock(real, fd, byte, F_WRLCK), -EAGAIN);
    CHECK_INT(add_blocks(transaction, &p, 0, 10), GD_OK);
    CHECK_INT(real->lock(real, fd, byte, F_WRLCK), -EAGAIN);
    gd_transaction_end(transaction);
    CHECK_INT(real->lock(real, fd, byte, F_WRLCK), 0);
    close(fd);
    transaction_teardown();
}

TEST_WITH(test_add_within_a_block, setup_pull(false), transaction_teardown())
{
    static uint8_t data[4 * PULL_BLOCK], want[8 * PULL_BLOCK];
    static pulled p;
    fill_random(data, sizeof data, 1);
    store_in_one("a", data, sizeof data, sizeof data, NULL);
    gd_transaction *transaction = begin_image("b");
    describe(&p, data, sizeof data);
    write_all(transaction, data, 600);
    find_blocks(transaction, &p); /* may be called at any time */
    CHECK_INT(count_addresses(&p), 4);
    CHECK_INT(add_blocks(transaction, &p, 0, 1), GD_INVALID);
    CHECK_CONTAINS(the_scratch.err.text, "within a block");
    CHECK_INT(gd_transaction_add_zeros(transaction, 512, &the_scratch.err),
              GD_INVALID);
    CHECK_INT(gd_transaction_sync(transaction, &the_scratch.err), GD_OK);
    write_all(transaction, data + 600, 1024 - 600);
    CHECK_INT(gd_transaction_add_zeros(transaction, 512, &the_scratch.err),
              GD_OK);
    CHECK_INT(add_blocks(transaction, &p, 0, 4), GD_OK);
    CHECK_INT(gd_transaction_add_zeros(transaction, 100, &the_scratch.err),
              GD_OK);
    CHECK_INT(gd_transaction_add_zeros(transaction, INT64_MAX - 100,
                                       &the_scratch.err), GD_INVALID);
    CHECK_INT(gd_transaction_add_zeros(transaction, UINT64_MAX,
                                       &the_scratch.err), GD_INVALID);
    CHECK_INT(gd_transaction_add_zeros(transaction, 0, &the_scratch.err),
              GD_OK);
    commit(transaction, &(gd_recipe_header){0});
    memcpy(want, data, 1024);
    memcpy(want + 1536, data, sizeof data);
    check_stored_image("b", want, 1536 + sizeof data + 100);
}

/* I5: there are no bytes to compare. */
TEST_WITH(test_find_by_value, setup_pull(true), transaction_teardown())
{
    static uint8_t data[10 * PULL_BLOCK];
    static pulled p;
    fill_random(data, sizeof data, 1);
    store_in_one("a", data, sizeof data, sizeof data, NULL);
    gd_transaction *transaction = begin_image("b");
    describe(&p, data, sizeof data);
    write_all(transaction, data, sizeof data);
    memset(p.addresses, 0xff, sizeof p.addresses);
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), 0);
    for (uint32_t i = 0; i < 10; i++) {
        p.addresses[i] = (gd_address){1, i};
    }
    CHECK_INT(add_blocks(transaction, &p, 0, 10), GD_INVALID);
    commit(transaction, &(gd_recipe_header){0});
    check_stored_image("b", data, sizeof data);
}

/* The next transaction finds synced blocks; others are cut off. */
TEST_WITH(test_keep, setup_pull(false), transaction_teardown())
{
    static uint8_t data[100 * PULL_BLOCK];
    static pulled p;
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin_image("a");
    CHECK_INT(gd_transaction_sync(transaction, &the_scratch.err), GD_OK);
    write_all(transaction, data, 30 * PULL_BLOCK + 10);
    CHECK_INT(gd_transaction_sync(transaction, &the_scratch.err), GD_OK);
    write_all(transaction, data + 30 * PULL_BLOCK + 10, 5 * PULL_BLOCK);
    gd_transaction_end(transaction);
    for (int handle = 0; handle < 2; handle++) {
        transaction = begin_image("a");
        describe(&p, data, sizeof data);
        find_blocks(transaction, &p);
        CHECK_INT(count_addresses(&p), 30);
        gd_transaction_end(transaction);
        transaction_other_handle();
    }
    transaction = begin_image("a");
    find_blocks(transaction, &p);
    CHECK_INT(add_blocks(transaction, &p, 0, 30), GD_OK);
    write_all(transaction, data + 30 * PULL_BLOCK, 70 * PULL_BLOCK);
    gd_recipe_header header;
    commit(transaction, &header);
    CHECK_INT(header.new_bytes, 70 * PULL_BLOCK);
    check_stored_image("a", data, sizeof data);
}

static gd_status
pull_once(const uint8_t *data, pulled *p)
{
    bool linked = false;
    gd_recipe_header header;
    gd_transaction *transaction;
    gd_status s =
        gd_transaction_begin(the_repo, "b", "project", &gd_global_scope,
                             &transaction, &the_scratch.err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_transaction_write(transaction, data, 20 * PULL_BLOCK,
                             &the_scratch.err);
    if (s == GD_OK) {
        s = gd_transaction_find(transaction, p->fps, p->lengths, p->count,
                                p->addresses, &the_scratch.err);
    }
    for (size_t i = 20; s == GD_OK && i < p->count; i++) {
        if (p->addresses[i].group != 0) {
            s = add_blocks(transaction, p, i, 1);
            if (s == GD_INVALID) {
                /* An address that cannot be read cannot be confirmed. */
                s = gd_fail(&the_scratch.err, GD_IO, "%s",
                            "a group cannot be read");
            }
        } else {
            s = gd_transaction_write(transaction, data + i * PULL_BLOCK,
                                     p->lengths[i], &the_scratch.err);
        }
    }
    if (s == GD_OK) {
        s = gd_transaction_sync(transaction, &the_scratch.err);
    }
    if (s == GD_OK) {
        s = gd_transaction_commit(transaction, &header, &linked,
                                  &the_scratch.err);
    }
    gd_transaction_end(transaction);
    return s;
}

TEST(test_failures_while_pulling)
{
    static const int errors[] = {EIO, ENOMEM};
    static uint8_t data[100 * PULL_BLOCK];
    static pulled p;
    fill_random(data, sizeof data, 1);
    for (int kind = 0; kind < 2; kind++) {
        bool struck = true;
        unsigned failed = 0;
        for (uint64_t n = 1; struck; n += SWEEP_STRIDE) {
            setup_pull(false);
            store_in_one("a", data + 30 * PULL_BLOCK, 70 * PULL_BLOCK, 4096,
                         NULL);
            transaction_other_handle();
            describe(&p, data, sizeof data);
            uint64_t faults = fault_env_faults(&the_scratch.f);
            fault_env_fail(&the_scratch.f, kind == 0 ? FAULT_ANY : FAULT_ALLOC,
                           n, errors[kind], false);
            gd_status s = pull_once(data, &p);
            struck = fault_env_faults(&the_scratch.f) > faults;
            fault_env_heal(&the_scratch.f);
            failed += s != GD_OK;
            if (s != GD_OK && !CHECK(struck)) {
                fprintf(stderr, "%s\n", the_scratch.err.text);
            }
            if (!scratch_exists(&the_scratch, "images/b")) {
                CHECK(s != GD_OK);
                CHECK_INT(pull_once(data, &p), GD_OK);
            }
            check_stored_image("b", data, sizeof data);
            transaction_teardown();
        }
        CHECK(failed > 15 / SWEEP_STRIDE);
    }
}
