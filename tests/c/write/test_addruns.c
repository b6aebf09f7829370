/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_addruns.c - images that are put together from parts of others: the
 * bytes are right, only necessary bytes are moved, and the blocks stay.
 */
#include "engine/write/addruns.h"

#include "engine/files/image_delete.h"
#include "engine/write/transaction.h"
#include "tests/c/support/check.h"
#include "tests/c/support/simple_maintainer.h"
#include "tests/c/support/transaction_fixture.h"

enum { BLOCK = 4096, BLOCKS = 300, LENGTH = BLOCKS * BLOCK + 1234 };

static uint8_t source_data[LENGTH];
static gd_image *source;

static void
setup_source(void)
{
    transaction_setup();
    fill_image(source_data, LENGTH, BLOCK, 1000, 7);
    store_in_one("source", source_data, LENGTH, 70000, NULL);
    source = require_image(the_repo, "source");
}

static void
teardown_source(void)
{
    if (source != NULL) {
        gd_image_close(source);
        source = NULL;
    }
    transaction_teardown();
}

/* Adds a part; returns the number of bytes that had to be stored. */
static uint64_t
add(gd_transaction *transaction, uint64_t from, uint64_t to)
{
    uint64_t stored;
    CHECK_OK(gd_transaction_add_runs(transaction, source, from, to, &stored,
                                     &the_scratch.err));
    return stored;
}

static void
commit(gd_transaction *transaction, gd_recipe_header *header)
{
    bool linked;
    CHECK_OK(gd_transaction_commit(transaction, header, &linked,
                                   &the_scratch.err));
    gd_transaction_end(transaction);
}

static void
check_same_extents(const char *a, const char *b)
{
    gd_image *one = require_image(the_repo, a),
    *other = require_image(the_repo, b);
    gd_recipe_page x, y;
    CHECK_INT(gd_image_pages(one), gd_image_pages(other));
    for (uint64_t n = 1; n <= gd_image_pages(one); n++) {
        CHECK_INT(gd_image_extents(one, n, &x, &the_scratch.err), GD_OK);
        CHECK_INT(gd_image_extents(other, n, &y, &the_scratch.err), GD_OK);
        REQUIRE(x.count == y.count);
        CHECK(memcmp(x.extents, y.extents, x.count * sizeof x.extents[0]) ==
              0);
    }
    CHECK_INT(gd_image_header(one)->fragments,
              gd_image_header(other)->fragments);
    CHECK_INT(gd_image_header(one)->zero_bytes,
              gd_image_header(other)->zero_bytes);
    gd_image_close(one);
    gd_image_close(other);
}

TEST(test_whole_image)
{
    gd_recipe_header header;
    setup_source();
    gd_transaction *transaction = begin_image("copy");
    uint64_t reads = the_scratch.f.calls[FAULT_PREAD];
    uint64_t writes = the_scratch.f.calls[FAULT_PWRITEV];
    CHECK_INT(add(transaction, 0, LENGTH), 0);
    /* The reads are of the recipe's pages, and not of any group. */
    CHECK(the_scratch.f.calls[FAULT_PREAD] - reads <=
          4 * gd_image_pages(source));
    CHECK_INT(the_scratch.f.calls[FAULT_PWRITEV], writes);
    commit(transaction, &header);
    CHECK_INT(header.size, LENGTH);
    CHECK_INT(header.new_bytes, 0);
    CHECK_INT(header.stored_bytes, 0);
    check_same_extents("source", "copy");
    check_stored_image("copy", source_data, LENGTH);
    teardown_source();
}

/* Random parts are added, between written bytes and zeros. */
static void
run_parts(uint64_t seed)
{
    static uint8_t want[4 * LENGTH];
    static const uint8_t zeros[3 * BLOCK];
    uint8_t own[2 * BLOCK];
    size_t length = 0;
    gd_recipe_header header;
    setup_source();
    gd_transaction *transaction = begin_image("parts");
    for (int i = 0; i < 20; i++) {
        uint64_t from = next_random(&seed) % (LENGTH + 1);
        uint64_t to = from + next_random(&seed) % (LENGTH / 5);
        to = minimum(to, LENGTH);
        if (i % 3 == 0) {
            from = from / BLOCK * BLOCK;
            to = to / BLOCK * BLOCK;
        }
        uint64_t stored = add(transaction, from, to);
        /* These are only the blocks at the ends. */
        CHECK(stored <= (i % 3 == 0 ? 0 : 2 * BLOCK));
        memcpy(want + length, source_data + from, to - from);
        length += to - from;
        if (i % 4 == 1) {
            fill_random(own, sizeof own, next_random(&seed));
            write_all(transaction, own, sizeof own);
            memcpy(want + length, own, sizeof own);
            length += sizeof own;
        } else if (i % 4 == 2) {
            CHECK_INT(gd_transaction_add_zeros(transaction, sizeof zeros,
                                               &the_scratch.err), GD_OK);
            memset(want + length, 0, sizeof zeros);
            length += sizeof zeros;
        }
    }
    commit(transaction, &header);
    CHECK_INT(header.size, length);
    check_stored_image("parts", want, length);
    teardown_source();
}

TEST(test_parts)
{
    for (uint64_t seed = 0; seed < 40; seed += SWEEP_STRIDE) {
        run_parts(seed);
    }
}

/* Blocks of another scope may not be named: they are stored in this one. */
TEST(test_another_scope)
{
    static const gd_scope scope = {{1, 2, 3}};
    gd_transaction *transaction;
    gd_recipe_header header;
    setup_source();
    REQUIRE(gd_transaction_begin(the_repo, "copy", "other", &scope,
                                 &transaction, &the_scratch.err) == GD_OK);
    uint64_t stored = add(transaction, 0, LENGTH);
    commit(transaction, &header);
    CHECK_INT(stored, LENGTH - gd_image_header(source)->zero_bytes);
    CHECK(header.new_bytes > 0);
    CHECK(gd_scope_equal(&header.scope, &scope));
    check_stored_image("copy", source_data, LENGTH);
    teardown_source();
}

/* Returns the group of the source's first block, and the number of bytes in
 * it. */
static uint32_t
first_group(uint64_t *bytes)
{
    gd_recipe_page page;
    uint32_t group = 0;
    *bytes = 0;
    for (uint64_t n = 1; n <= gd_image_pages(source); n++) {
        CHECK_INT(gd_image_extents(source, n, &page, &the_scratch.err), GD_OK);
        for (uint32_t i = 0; i < page.count; i++) {
            group = group == 0 ? page.extents[i].group : group;
            if (group != 0 && page.extents[i].group == group) {
                *bytes += page.extents[i].length;
            }
        }
    }
    return group;
}

/* The collector works in a group: its blocks are stored elsewhere. */
TEST(test_a_lock_is_refused)
{
    gd_recipe_header header;
    setup_source();
    gd_repo *other = scratch_repo(&the_scratch);
    uint64_t bytes;
    uint32_t group = first_group(&bytes);
    CHECK_INT(gd_locks_lock_exclusive(other->locks, group, &the_scratch.err),
              GD_OK);
    gd_transaction *transaction = begin_image("copy");
    CHECK_INT(add(transaction, 0, LENGTH), bytes);
    commit(transaction, &header);
    gd_locks_unlock_exclusive(other->locks, group);
    gd_repo_close(other);
    check_stored_image("copy", source_data, LENGTH);
    teardown_source();
}

/* I14: blocks that are stored again keep their marks, and get no others,
 * whatever the transaction does with its own blocks. */
static void
check_marks(gd_dedup dedup)
{
    static bool before[BLOCKS], after[BLOCKS + 1];
    static uint32_t lengths[BLOCKS];
    static gd_address addresses[BLOCKS];
    transaction_setup();
    fill_random(source_data, LENGTH, 3);
    gd_transaction *transaction = begin_image("source");
    for (size_t i = 0; i < BLOCKS;) {
        size_t n = i % 7 + 1 < BLOCKS - i ? i % 7 + 1 : BLOCKS - i;
        for (size_t k = 0; k < n; k++) {
            lengths[k] = BLOCK;
        }
        gd_transaction_set_lookup_mode(transaction, i % 2 == 0
                                                        ? GD_DEDUP_OFF
                                                        : GD_DEDUP_ALL);
        CHECK_INT(gd_transaction_write_blocks(transaction,
                                              source_data + i * BLOCK, lengths,
                                              NULL, n, addresses, &the_scratch.err),
                  GD_OK);
        i += n;
    }
    commit(transaction, &(gd_recipe_header){.size = 0});
    size_t marked = 0;
    CHECK_INT(list_marks("source", before), BLOCKS);
    for (size_t i = 0; i < BLOCKS; i++) {
        marked += before[i];
    }
    CHECK(marked > 0 && marked < BLOCKS);
    source = require_image(the_repo, "source");
    gd_repo *other = scratch_repo(&the_scratch);
    uint64_t bytes;
    uint32_t group = first_group(&bytes);
    CHECK_INT(gd_locks_lock_exclusive(other->locks, group, &the_scratch.err),
              GD_OK);
    transaction = begin_image("copy");
    gd_transaction_set_lookup_mode(transaction, dedup);
    CHECK_INT(add(transaction, 0, BLOCKS * BLOCK), bytes);
    write_all(transaction, source_data, BLOCK);
    commit(transaction, &(gd_recipe_header){.size = 0});
    gd_locks_unlock_exclusive(other->locks, group);
    gd_repo_close(other);
    CHECK_INT(list_marks("copy", after), BLOCKS + 1);
    CHECK(memcmp(before, after, BLOCKS * sizeof *before) == 0);
    CHECK_INT(after[BLOCKS], dedup == GD_DEDUP_OFF);
    teardown_source();
}

TEST(test_marks)
{
    check_marks(GD_DEDUP_ALL);
    check_marks(GD_DEDUP_PROBE);
    check_marks(GD_DEDUP_OFF);
}

/* I6: the blocks stay from the call on, until the recipe counts. */
TEST(test_the_blocks_stay)
{
    size_t spooled;
    setup_source();
    gd_transaction *transaction = begin_image("copy");
    CHECK_INT(add(transaction, 0, LENGTH), 0);
    gd_image_close(source);
    source = NULL;
    CHECK_INT(gd_image_delete(the_scratch.env, the_scratch.root,
                              &the_scratch.params, "source", NULL,
                              &the_scratch.err), GD_OK);
    gd_repo *other = scratch_repo(&the_scratch);
    CHECK_INT(maintainer_collect(other, MAINTAINER_UNLINK, GD_CODEC_NONE,
                                 &spooled, &the_scratch.err), GD_OK);
    commit(transaction, &(gd_recipe_header){.size = 0});
    CHECK_INT(maintainer_collect(other, MAINTAINER_UNLINK, GD_CODEC_NONE,
                                 &spooled, &the_scratch.err), GD_OK);
    gd_repo_close(other);
    check_stored_image("copy", source_data, LENGTH);
    teardown_source();
}

static void
check_refused(gd_transaction *transaction, gd_image *image, uint64_t from,
              uint64_t to, const char *words)
{
    uint64_t stored;
    CHECK_INT(gd_transaction_add_runs(transaction, image, from, to, &stored,
                                      &the_scratch.err), GD_INVALID);
    if (!CHECK(strstr(the_scratch.err.text, words) != NULL)) {
        fprintf(stderr, "%s\n", the_scratch.err.text);
    }
}

TEST(test_what_is_refused)
{
    gd_recipe_header header;
    setup_source();
    gd_transaction *transaction = begin_image("copy");
    check_refused(transaction, source, 0, LENGTH + 1, "not within image source");
    check_refused(transaction, source, 5, 4, "not within");
    check_refused(transaction, source, UINT64_MAX, UINT64_MAX, "not within");
    gd_repo *other = scratch_repo(&the_scratch);
    gd_image *others = require_image(other, "source");
    check_refused(transaction, others, 0, 1, "another handle");
    gd_image_close(others);
    gd_repo_close(other);
    CHECK_INT(gd_transaction_add_zeros(transaction, INT64_MAX - 10,
                                       &the_scratch.err), GD_OK);
    check_refused(transaction, source, 0, 11, "longer than any file");
    gd_transaction_end(transaction);

    transaction = begin_image("copy");
    CHECK_INT(add(transaction, LENGTH, LENGTH), 0);
    write_all(transaction, source_data, BLOCK + 1);
    check_refused(transaction, source, 0, BLOCK, "ends within a block");
    write_all(transaction, source_data + BLOCK + 1, BLOCK - 1);
    CHECK_INT(add(transaction, 2 * BLOCK, LENGTH), 0);
    commit(transaction, &header);
    check_stored_image("copy", source_data, LENGTH);
    teardown_source();
}

/* I7: a split extent is refused if its entries are not those it was committed
 * with. */
TEST(test_damaged_entries)
{
    uint64_t stored;
    char name[GD_NAME_SIZE];
    setup_source();
    gd_image_close(source);
    gd_recipe_page page;
    source = require_image(the_repo, "source");
    CHECK_INT(gd_image_extents(source, 1, &page, &the_scratch.err), GD_OK);
    uint32_t i = 0;
    while (page.extents[i].blocks < 3) {
        i++;
    }
    const gd_extent *e = &page.extents[i];
    gd_names_group(e->group, name);
    scratch_flip(&the_scratch, name, gd_entry_offset(e->slot + 1), 0x40);
    gd_transaction *transaction = begin_image("copy");
    CHECK_INT(gd_transaction_add_runs(transaction, source, e->offset,
                                      e->offset + e->length - 1, &stored,
                                      &the_scratch.err), GD_CORRUPT);
    CHECK(strstr(the_scratch.err.text, name) != NULL);
    /* The transaction has failed. */
    CHECK_INT(gd_transaction_add_runs(transaction, source, 0, 1, &stored,
                                      &the_scratch.err), GD_CLOSED);
    gd_transaction_end(transaction);
    teardown_source();
}

/* Pages of the recipe that reads have kept hide no damage of its file. */
TEST(test_a_damaged_recipe)
{
    static uint8_t out[LENGTH];
    size_t done;
    uint64_t stored;
    setup_source();
    CHECK_INT(gd_image_read(source, out, LENGTH, 0, &done, &the_scratch.err),
              GD_OK);
    scratch_flip(&the_scratch, "images/source", GD_RECIPE_PAGE + 20, 1);
    gd_transaction *transaction = begin_image("copy");
    CHECK_INT(gd_transaction_add_runs(transaction, source, 0, LENGTH, &stored,
                                      &the_scratch.err), GD_CORRUPT);
    CHECK(strstr(the_scratch.err.text, "images/source") != NULL);
    gd_transaction_end(transaction);
    teardown_source();
}
