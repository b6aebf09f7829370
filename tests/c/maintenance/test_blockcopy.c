/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_blockcopy.c - blocks stored again: the copies are equal, durable,
 * published and held, and in no group of an original block.
 */
#include "engine/maintenance/blockcopy.h"

#include "engine/base/coding.h"
#include "engine/format/runs.h"
#include "engine/read/address_reader.h"
#include "engine/read/image.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { BLOCK = 512, BLOCKS = 100, LENGTH = BLOCKS * BLOCK, PAIR = 16 };

static scratch x;
static gd_repo *repo;
static uint8_t data[LENGTH];
static uint8_t addresses[8 * BLOCKS]; /* of the image's blocks, in order */

static uint64_t
address(size_t block)
{
    return gd_get64(addresses + 8 * block);
}

/* Stores one image, in group 1, which is full then, and a part of group 2. */
static void
setup(void)
{
    gd_image *image;
    gd_recipe_page page;
    size_t count = 0;
    scratch_init(&x);
    x.params.block_size = BLOCK;
    x.params.segment_size = 4096;
    fill_random(data, LENGTH, 1);
    repo = scratch_repo(&x);
    CHECK_INT(put_image(repo, "image", data, LENGTH, LENGTH, NULL, &x.err),
              GD_OK);
    CHECK_INT(gd_image_open(repo, "image", NULL, &image, &x.err), GD_OK);
    CHECK_INT(gd_image_extents(image, 1, &page, &x.err), GD_OK);
    for (uint32_t i = 0; i < page.count; i++) {
        const gd_extent *e = &page.extents[i];
        for (uint32_t k = 0; k < e->blocks && count < BLOCKS; k++) {
            gd_put64(addresses + 8 * count++,
                     (uint64_t)e->group << GD_SLOT_BITS | (e->slot + k));
        }
    }
    CHECK_INT(count, BLOCKS);
    gd_image_close(image);
}

static void
teardown(void)
{
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

static gd_address
address_of(uint64_t number)
{
    return (gd_address){(uint32_t)(number >> GD_SLOT_BITS),
                        (uint32_t)number & (GD_MAX_SLOTS - 1)};
}

/* Returns true if the block of this address is the image's. */
static bool
is_block(uint64_t number, size_t block)
{
    gd_address_reader *reader;
    gd_entry entry;
    const uint8_t *bytes;
    if (!CHECK_INT(gd_address_reader_open(repo, &reader, &x.err), GD_OK)) {
        return false;
    }
    gd_status s = gd_address_reader_read(reader, address_of(number), &entry,
                                         &bytes, &x.err);
    bool equal = s == GD_OK && entry.plain_length == BLOCK &&
                 memcmp(bytes, data + block * BLOCK, BLOCK) == 0;
    gd_address_reader_close(reader);
    return equal;
}

static gd_group *
open_entry(gd_address a, gd_entry *entry)
{
    gd_group *group;
    CHECK_INT(gd_group_open(x.env, x.root, &x.params, a.group, O_RDWR, &group,
                            &x.err),
              GD_OK);
    CHECK_INT(gd_group_read_entries(group, a.slot, 1, entry, &x.err), GD_OK);
    return group;
}

static void
write_entry(gd_group *group, gd_address a, const gd_entry *entry)
{
    CHECK_INT(gd_group_write_entries(group, a.slot, 1, entry, &x.err), GD_OK);
    gd_group_close(group);
}

/* Changes an entry's state, and a byte of its fingerprint. */
static void
change_entry(uint64_t number, uint8_t state, uint8_t flip)
{
    gd_entry entry;
    gd_address a = address_of(number);
    gd_group *group = open_entry(a, &entry);
    entry.state = state;
    entry.fingerprint.bytes[31] ^= flip;
    write_entry(group, a, &entry);
}

static void
set_state(uint64_t number, uint8_t state)
{
    change_entry(number, state, 0);
}

static gd_block_copy *
open_copy(void)
{
    gd_block_copy *copy = NULL;
    if (!CHECK_INT(gd_block_copy_open(repo, &copy, &x.err), GD_OK)) {
        exit(1);
    }
    return copy;
}

TEST_WITH(test_all_blocks, setup(), teardown())
{
    const uint8_t *pairs;
    size_t count;
    gd_block_copy *copy = open_copy();
    /* Group 2 has room, and is the fullest of such groups; but blocks of it
     * are being moved. */
    CHECK_INT(gd_block_copy_add(copy, addresses, BLOCKS, &x.err), GD_OK);
    CHECK_INT(gd_block_copy_finish(copy, &pairs, &count, &x.err), GD_OK);
    REQUIRE(count == BLOCKS);
    for (size_t i = 0; i < count; i++) {
        uint64_t old = gd_get64(pairs + PAIR * i);
        uint64_t new = gd_get64(pairs + PAIR * i + 8);
        CHECK_INT(old, address(i));
        CHECK(new >> GD_SLOT_BITS >= 3);
        CHECK(is_block(new, i));
    }
    /* The copies are published and held. */
    gd_group *group;
    gd_published record;
    gd_repo *collector = scratch_repo(&x);
    for (uint32_t number = 3; number <= 4; number++) {
        REQUIRE(gd_group_open(x.env, x.root, &x.params, number, O_RDONLY,
                              &group, &x.err) == GD_OK);
        CHECK_INT(gd_group_read_published(group, &record, &x.err), GD_OK);
        CHECK_INT(record.count, number == 3 ? 64 : BLOCKS - 64);
        gd_group_close(group);
        CHECK_INT(gd_locks_lock_exclusive(collector->locks, number, NULL),
                  GD_BUSY);
    }
    gd_block_copy_close(copy);
    CHECK_INT(gd_locks_lock_exclusive(collector->locks, 3, NULL), GD_OK);
    gd_locks_unlock_exclusive(collector->locks, 3);
    gd_repo_close(collector);
}

static void
set_nodedup(uint64_t number)
{
    gd_entry entry;
    gd_address a = address_of(number);
    gd_group *group = open_entry(a, &entry);
    entry.nodedup = true;
    write_entry(group, a, &entry);
}

/* I14: the copy of a block with the mark has it, too; its neighbours do not. */
TEST_WITH(test_marks_stay, setup(), teardown())
{
    const uint8_t *pairs;
    size_t count;
    gd_block_copy *copy = open_copy();
    set_nodedup(address(1));
    CHECK_INT(gd_block_copy_add(copy, addresses, 3, &x.err), GD_OK);
    CHECK_INT(gd_block_copy_finish(copy, &pairs, &count, &x.err), GD_OK);
    REQUIRE(count == 3);
    for (size_t i = 0; i < count; i++) {
        gd_group *group;
        gd_entry entry;
        gd_address to = address_of(gd_get64(pairs + PAIR * i + 8));
        REQUIRE(gd_group_open(x.env, x.root, &x.params, to.group, O_RDONLY,
                              &group, &x.err) == GD_OK);
        CHECK_INT(gd_group_read_entries(group, to.slot, 1, &entry, &x.err),
                  GD_OK);
        CHECK_INT(entry.nodedup, i == 1);
        CHECK(is_block(gd_get64(pairs + PAIR * i + 8), i));
        gd_group_close(group);
    }
    gd_block_copy_close(copy);
}

/* A group with copies may be the next to be cleared. */
TEST_WITH(test_group_that_copies_are_in, setup(), teardown())
{
    const uint8_t *pairs;
    size_t count;
    gd_block_copy *copy = open_copy();
    CHECK_INT(gd_block_copy_add(copy, addresses, 1, &x.err), GD_OK);
    CHECK_INT(gd_block_copy_finish(copy, &pairs, &count, &x.err), GD_OK);
    REQUIRE(count == 1);
    uint64_t first = gd_get64(pairs + 8);
    CHECK_INT(first >> GD_SLOT_BITS, 2);
    uint8_t again[16];
    gd_put64(again, first);
    gd_put64(again + 8, first); /* twice: one copy */
    CHECK_INT(gd_block_copy_add(copy, again, 2, &x.err), GD_OK);
    /* Nor is any other block copied into it from now on. */
    CHECK_INT(gd_block_copy_add(copy, addresses + 8, 1, &x.err), GD_OK);
    CHECK_INT(gd_block_copy_finish(copy, &pairs, &count, &x.err), GD_OK);
    REQUIRE(count == 3);
    for (size_t i = 1; i < 3; i++) {
        uint64_t new = gd_get64(pairs + PAIR * i + 8);
        CHECK_INT(new >> GD_SLOT_BITS, 3);
        CHECK(is_block(new, i == 1 ? 1 : 0));
    }
    CHECK_INT(gd_get64(pairs + 2 * PAIR), first);
    gd_block_copy_close(copy);
}

TEST_WITH(test_blocks_that_do_not_verify, setup(), teardown())
{
    const uint8_t *pairs;
    size_t count;
    uint8_t given[8 * 6];
    gd_group *group;
    gd_entry entry;
    set_state(address(0), GD_ENTRY_FREED);
    set_state(address(1), GD_ENTRY_DAMAGED);
    change_entry(address(2), GD_ENTRY_LIVE, 1); /* another block's name */
    REQUIRE(gd_group_open(x.env, x.root, &x.params, 1, O_RDWR, &group,
                          &x.err) == GD_OK);
    CHECK_INT(gd_group_read_entries(group, 20, 1, &entry, &x.err), GD_OK);
    gd_group_close(group);
    scratch_flip(&x, "groups/00000001",
                 entry.segment + GD_SEGMENT_HEADER + entry.plain_offset, 1);
    gd_put64(given, address(20));
    gd_put64(given + 8, UINT64_C(77) << GD_SLOT_BITS); /* no such group */
    gd_put64(given + 16, address(1));
    gd_put64(given + 24, address(30));
    gd_put64(given + 32, address(0));
    gd_put64(given + 40, address(2));
    gd_block_copy *copy = open_copy();
    CHECK_INT(gd_block_copy_add(copy, given, 6, &x.err), GD_OK);
    CHECK_INT(gd_block_copy_finish(copy, &pairs, &count, &x.err), GD_OK);
    /* A marked block is copied if its bytes are good after all. */
    REQUIRE(count == 2);
    CHECK_INT(gd_get64(pairs), address(1));
    CHECK(is_block(gd_get64(pairs + 8), 1));
    CHECK_INT(gd_get64(pairs + 16), address(30));
    CHECK(is_block(gd_get64(pairs + 24), 30));
    gd_put64(given, 5);
    CHECK_INT(gd_block_copy_add(copy, given, 1, &x.err), GD_INVALID);
    gd_block_copy_close(copy);
}

TEST_WITH(test_nothing, setup(), teardown())
{
    const uint8_t *pairs;
    size_t count;
    gd_block_copy *copy = open_copy();
    CHECK_INT(gd_block_copy_add(copy, NULL, 0, &x.err), GD_OK);
    CHECK_INT(gd_block_copy_finish(copy, &pairs, &count, &x.err), GD_OK);
    CHECK_INT(count, 0);
    gd_block_copy_close(copy);
    CHECK_INT(scratch_count(&x, "groups", "", NULL), 2);
}

/* A fault loses no block, and returns no address of a missing one. */
static bool
copy_with_fault(fault_call call, uint64_t nth, int sys_errno)
{
    const uint8_t *pairs = NULL;
    size_t count = 0;
    gd_block_copy *copy = NULL;
    bool equal;
    setup();
    fault_env_fail(&x.f, call, nth, sys_errno, false);
    gd_status s = gd_block_copy_open(repo, &copy, &x.err);
    if (s == GD_OK) {
        s = gd_block_copy_add(copy, addresses, BLOCKS, &x.err);
        if (s == GD_OK) {
            s = gd_block_copy_finish(copy, &pairs, &count, &x.err);
        }
    }
    bool fault = fault_env_faults(&x.f) > 0;
    fault_env_heal(&x.f);
    CHECK(s == GD_OK || fault);
    CHECK(count == BLOCKS || fault);
    for (size_t i = 0; i < count; i++) {
        uint64_t old = gd_get64(pairs + PAIR * i);
        size_t block = (size_t)(old - address(0)) < 64
                           ? (size_t)(old - address(0))
                           : 64 + (size_t)(old - address(64));
        CHECK(is_block(gd_get64(pairs + PAIR * i + 8), block));
    }
    if (copy != NULL) {
        gd_block_copy_close(copy);
    }
    CHECK_INT(get_image(repo, "image", data, LENGTH, &equal, &x.err), GD_OK);
    CHECK(equal);
    teardown();
    return !fault;
}

TEST(test_faults)
{
    static const struct {
        fault_call call;
        int sys_errno;
    } kinds[] = {{FAULT_ANY, EIO}, {FAULT_ANY, ENOSPC}, {FAULT_ALLOC, ENOMEM}};
    for (size_t k = 0; k < 3; k++) {
        bool finished = false;
        for (uint64_t nth = 1; !finished && nth < 20000;
             nth += SWEEP_STRIDE) {
            finished = copy_with_fault(kinds[k].call, nth,
                                       kinds[k].sys_errno);
        }
        CHECK(finished);
    }
}
