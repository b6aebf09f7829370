/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_volumehints.c - hints of a volume: whatever they are, its bytes are
 * right, and the counters show their effects.
 */
#include "engine/volume/volumehints.h"

#include "engine/base/coding.h"
#include "engine/read/image.h"
#include "engine/volume/volumenames.h"
#include "tests/c/support/check.h"
#include "tests/c/support/ext_fixture.h"
#include "tests/c/support/transaction_fixture.h"

enum {
    PART = 1 << 20,
    SIZE = 4 * PART,
    BLOCK = 4096,
};

static uint8_t model[SIZE];
static gd_volume *volume;
static bool dedup; /* of the next opening */

static void
open_it(bool filter)
{
    if (volume != NULL) {
        gd_volume_close(volume);
    }
    gd_repo_close(the_repo);
    the_repo = filter ? scratch_repo_filter(&the_scratch)
                      : scratch_repo(&the_scratch);
    REQUIRE(gd_volume_open(the_repo, "disk", dedup, &volume,
                           &the_scratch.err) == GD_OK);
}

static void
setup(void)
{
    const gd_volume_plan plan = {
        .size = SIZE, .part_size = PART, .project = ""};
    uint64_t stored;
    transaction_setup();
    gd_repo_close(the_repo);
    the_scratch.params.group_slots = 512;
    the_repo = scratch_repo_filter(&the_scratch);
    REQUIRE(gd_volume_create(the_repo, "disk", &plan, &stored,
                             &the_scratch.err) == GD_OK);
    memset(model, 0, SIZE);
    volume = NULL;
    dedup = true;
    open_it(true);
}

static void
teardown(void)
{
    gd_volume_close(volume);
    transaction_teardown();
}

static void
store(uint64_t offset, uint64_t length)
{
    CHECK_INT(gd_volume_write(volume, model + offset, length, offset,
                              &the_scratch.err), GD_OK);
}

/* Makes a checkpoint, compares all bytes, and returns the counters. */
static gd_volume_counters
checkpoint(void)
{
    static uint8_t got[SIZE];
    gd_volume_info info;
    CHECK_INT(gd_volume_checkpoint(volume, &the_scratch.err), GD_OK);
    gd_volume_get_info(volume, &info);
    CHECK_INT(gd_volume_read(volume, got, SIZE, 0, &the_scratch.err), GD_OK);
    CHECK(memcmp(got, model, SIZE) == 0);
    return info.head.counters;
}

/* Counts the blocks with the mark nodedup in the first groups. */
static unsigned
count_marked(void)
{
    static gd_entry entries[512];
    unsigned marked = 0;
    for (uint32_t number = 1; number <= 4; number++) {
        gd_group *group;
        if (gd_fpcache_group(the_repo->cache, number, true, &group, NULL) !=
            GD_OK) {
            break;
        }
        CHECK_INT(gd_group_read_entries(group, 0, 512, entries,
                                        &the_scratch.err), GD_OK);
        gd_fpcache_return_group(the_repo->cache, group);
        for (size_t i = 0; i < 512; i++) {
            marked += entries[i].nodedup;
        }
    }
    return marked;
}

/* ---- explicit hints ---- */

TEST_WITH(test_no_dedup, setup(), teardown())
{
    gd_volume_set_dedup(volume, false);
    fill_random(model, PART, 1);
    memset(model + BLOCK, 0, BLOCK);
    store(0, PART);
    checkpoint();
    memcpy(model + 2 * PART, model, PART);
    store(2 * PART, PART);
    gd_volume_counters c = checkpoint();
    CHECK_INT(c.skipped, 2 * (PART - BLOCK));
    CHECK_INT(count_marked(), c.skipped / BLOCK);
    CHECK_INT(c.zero, 2 * BLOCK);
    CHECK_INT(c.unique, c.skipped);
    CHECK_INT(c.duplicate, 0);
    CHECK_INT(c.read, SIZE); /* by the first checkpoint's comparison alone */
    gd_volume_set_dedup(volume, true);
    memcpy(model + 3 * PART, model, PART);
    store(3 * PART, PART);
    CHECK_INT(checkpoint().skipped, c.skipped); /* it was looked up */
}

/* Opening the volume may store what is found: it has the hint, too. */
TEST_WITH(test_no_dedup_of_what_is_found, setup(), teardown())
{
    gd_volume_info info;
    fill_random(model, PART, 1);
    dedup = false;
    for (int i = 0; i < 4; i++) { /* so many journals are stored at once */
        store(0, PART);
        CHECK_INT(gd_volume_flush(volume, &the_scratch.err), GD_OK);
        store(0, BLOCK);
        CHECK_INT(count_marked(), 0);
        open_it(true);
    }
    gd_volume_get_info(volume, &info);
    CHECK_INT(info.head.counters.skipped, PART + BLOCK);
    CHECK_INT(count_marked(), PART / BLOCK + 1);
}

/* ---- the edition before ---- */

/* Writes the bytes that are there again, with some changed blocks among them,
 * and a run that is not aligned.  No index knows them. */
TEST_WITH(test_equal_bytes_again, setup(), teardown())
{
    open_it(false);
    fill_random(model, 2 * PART, 1);
    store(0, 2 * PART);
    gd_volume_counters first = checkpoint();
    CHECK_INT(first.unique, 2 * PART);
    for (uint64_t at = 0; at < PART; at += 16 * BLOCK) {
        model[at + 5 * BLOCK + 1]++;
    }
    memset(model + 9 * BLOCK, 0, BLOCK);
    store(100, PART + BLOCK);
    gd_volume_counters c = checkpoint();
    CHECK_INT(c.unique - first.unique, 16 * BLOCK);
    CHECK_INT(c.zero, BLOCK);
    CHECK_INT(c.duplicate, PART + 2 * BLOCK - 17 * BLOCK);
}

/* The blocks before are in another order, so each address is wrong. */
TEST_WITH(test_other_bytes_in_place, setup(), teardown())
{
    open_it(false);
    fill_random(model, PART, 1);
    store(0, PART);
    checkpoint();
    memcpy(model + PART, model, BLOCK);
    memmove(model, model + BLOCK, PART);
    memset(model + PART, 0, BLOCK);
    store(0, PART);
    gd_volume_counters c = checkpoint();
    CHECK_INT(c.unique, 2 * PART);
    CHECK_INT(c.duplicate, 0);
}

/* The rest is not compared if most blocks are new. */
TEST_WITH(test_mostly_other_bytes, setup(), teardown())
{
    open_it(false);
    fill_random(model, 2 * PART, 1);
    store(0, 2 * PART);
    checkpoint();
    fill_random(model, PART, 2);
    store(0, 2 * PART);
    CHECK_INT(checkpoint().unique, 4 * PART);
    store(PART, PART);
    CHECK_INT(checkpoint().duplicate, PART);
}

/* I14: blocks with the mark are stored again, and others are not found for one
 * that is to have it. */
TEST_WITH(test_marks_of_the_edition_before, setup(), teardown())
{
    open_it(false);
    fill_random(model, PART, 1);
    store(0, PART);
    checkpoint();
    gd_volume_set_dedup(volume, false);
    store(0, PART);
    CHECK_INT(checkpoint().unique, 2 * PART);
    CHECK_INT(count_marked(), PART / BLOCK);
    gd_volume_set_dedup(volume, true);
    store(0, PART);
    CHECK_INT(checkpoint().unique, 3 * PART);
}

/* ---- the mark nodedup ---- */

/* Stores the model's first two parts, runs of blocks with and without the
 * mark in turns. */
static void
store_template(void)
{
    enum { BLOCKS = 2 * PART / BLOCK };
    static uint32_t lengths[BLOCKS];
    static gd_address addresses[BLOCKS];
    gd_recipe_header header;
    bool linked;
    gd_transaction *transaction = begin_image("template");
    for (size_t i = 0, n; i < BLOCKS; i += n) {
        n = minimum(i % 7 + 1, BLOCKS - i);
        for (size_t k = 0; k < n; k++) {
            lengths[k] = BLOCK;
        }
        gd_transaction_set_lookup_mode(transaction, i % 2 == 0
                                                        ? GD_DEDUP_OFF
                                                        : GD_DEDUP_ALL);
        CHECK_INT(gd_transaction_write_blocks(transaction, model + i * BLOCK,
                                              lengths, NULL, n, addresses,
                                              &the_scratch.err), GD_OK);
    }
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked,
                                    &the_scratch.err), GD_OK);
    gd_transaction_end(transaction);
}

/* I14: a volume of another scope stores an image's blocks again, with their
 * marks, when it is made of the image and when it is rolled back to it. */
TEST_WITH(test_marks_in_another_scope, setup(), teardown())
{
    static bool wanted[2 * PART / BLOCK], got[2 * PART / BLOCK];
    const size_t blocks = 2 * PART / BLOCK, half = blocks / 2;
    char id[GD_IMAGE_ID_MAX + 1];
    gd_volume_head head;
    uint64_t stored;
    fill_random(model, 2 * PART, 1);
    store_template();
    CHECK_INT(list_marks("template", wanted), blocks);
    CHECK(memchr(wanted, true, blocks) && memchr(wanted, false, blocks));
    gd_image *image = require_image(the_repo, "template");
    const gd_volume_plan plan = {.part_size = PART, .project = "",
                                 .scope = {{1}}, .base = image};
    CHECK_INT(gd_volume_create(the_repo, "other", &plan, &stored,
                               &the_scratch.err), GD_OK);
    CHECK_INT(stored, 2 * PART);
    CHECK_INT(gd_volume_read_head(the_repo, "other", &head,
                                  &the_scratch.err), GD_OK);
    gd_volume_base_id(head.volume_id, id);
    CHECK_INT(list_marks(id, got), blocks);
    CHECK(memcmp(got, wanted, sizeof got) == 0);
    CHECK_INT(gd_volume_roll_back(the_repo, "other", image, &stored,
                                  &the_scratch.err), GD_OK);
    CHECK_INT(stored, 2 * PART);
    gd_image_close(image);
    for (uint64_t part = 0; part < 2; part++) {
        gd_volume_edition_id(head.volume_id, part, 1, id);
        CHECK_INT(list_marks(id, got), half);
        CHECK(memcmp(got, wanted + part * half, half * sizeof *got) == 0);
    }
}

/* ---- inferred hints ---- */

/* Makes a file system whose journal has the blocks 16 to 31 of 4096 bytes, in
 * two extents, and whose only inode table has those from 32 to 39. */
static void
make_ext(uint8_t *out)
{
    uint8_t *sb = ext_make(out, &(ext_fields){.blocks = PART / BLOCK,
                                              .log_block_size = 2,
                                              .blocks_per_group = 32768,
                                              .inodes_per_group = 128,
                                              .inode_size = 256,
                                              .incompat = 0x40});
    ext_add_journal(sb, 2);
    ext_put_extent(sb + EXT_JOURNAL_EXTENTS, 0, 10, 16);
    ext_put_extent(sb + EXT_JOURNAL_EXTENTS, 1, 32768 + 6, 26);
    gd_put32(out + BLOCK + 8, 32);
}

/* The superblock is in the journal at its first reading. */
TEST_WITH(test_metadata, setup(), teardown())
{
    memcpy(model + PART, "some bytes", 10);
    fill_random(model + PART + 16 * BLOCK, PART - 16 * BLOCK, 1);
    store(PART, PART);
    checkpoint();
    memcpy(model, model + PART, PART);
    memset(model, 0, 16 * BLOCK);
    make_ext(model);
    store(0, PART);
    gd_volume_counters c = checkpoint();
    /* These are the superblock, the descriptors, the journal, and the inode
     * table. */
    CHECK_INT(c.skipped, (2 + 16 + 8) * BLOCK);
    CHECK_INT(c.duplicate, PART - 40 * BLOCK);
    CHECK_INT(c.read, SIZE);
    /* Only copies in case of damage stay copies: the first two. */
    CHECK_INT(count_marked(), 2);
}

/* Blocks that are partly in a range are not looked up: the file system has blocks
 * of 1024, so that its superblock and its descriptors begin in the middle of one
 * of ours; its inode table begins and ends in the middle of one, and its journal
 * begins with the next. */
TEST_WITH(test_parts_of_blocks, setup(), teardown())
{
    fill_random(model, PART, 1);
    memset(model, 0, BLOCK);
    memset(model + BLOCK, 1, BLOCK);
    uint8_t *sb = ext_make(model, &(ext_fields){.blocks = PART / 1024,
                                                .blocks_per_group = 8192,
                                                .inodes_per_group = 128,
                                                .inode_size = 256,
                                                .incompat = 0x40});
    ext_add_journal(sb, 1);
    ext_put_extent(sb + EXT_JOURNAL_EXTENTS, 0, 8, 164);
    gd_put32(model + 2048 + 8, 130); /* to 161 */
    store(0, PART);
    CHECK_INT(checkpoint().skipped, (1 + 9 + 2) * BLOCK);
    CHECK_INT(count_marked(), 1);
}

/* ---- prefetching ---- */

/* A copy is found without any filter, since its groups were named; the next
 * copy, which was not announced, is not. */
TEST_WITH(test_prefetch, setup(), teardown())
{
    fill_random(model, PART, 1);
    store(0, PART);
    checkpoint();
    open_it(false);
    gd_volume_prefetch(volume, 0, 0);
    gd_volume_prefetch(volume, SIZE, 0);
    gd_volume_prefetch(volume, PART, 0); /* again: no effect */
    memcpy(model + PART, model, PART);
    store(PART, PART);
    gd_volume_counters c = checkpoint();
    CHECK_INT(c.prefetches, 1);
    CHECK_INT(c.prefetched, PART);
    CHECK_INT(c.duplicate, PART);
    memcpy(model + 2 * PART, model, PART);
    store(2 * PART, PART);
    c = checkpoint();
    CHECK_INT(c.prefetched, PART);
    CHECK_INT(c.duplicate, PART);
}

/* If there are more groups than are cached, the last ones are. */
TEST_WITH(test_many_groups, setup(), teardown())
{
    the_scratch.params.group_slots = 64;
    open_it(true);
    fill_random(model, 2 * PART, 1);
    store(0, 2 * PART); /* at least 8 groups */
    checkpoint();
    open_it(false);
    gd_volume_prefetch(volume, 2 * PART, 0);
    gd_volume_prefetch(volume, PART / 2, PART);
    memcpy(model + 2 * PART, model, 2 * PART);
    store(2 * PART, 2 * PART);
    gd_volume_counters c = checkpoint();
    CHECK(c.prefetched >= PART);
    CHECK_INT(c.duplicate, c.prefetched);
}
