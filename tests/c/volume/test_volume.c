/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_volume.c - volumes against an array of bytes: whatever is written,
 * stored, opened again, cloned and resized, the bytes are right, and no file
 * is left over.
 */
#include "engine/volume/volume.h"

#include "engine/files/image_delete.h"
#include "engine/volume/volumenames.h"
#include "tests/c/support/transaction_fixture.h"

enum {
    PART = 65536,
    SIZE = 5 * PART + 3 * 512,
    MAX_SIZE = 8 * PART,
};

static uint8_t model[MAX_SIZE];
static uint64_t size;
static gd_volume *volume;

/* ---- setting up ---- */

static void
setup(void)
{
    transaction_setup();
    memset(model, 0, sizeof model);
    volume = NULL;
}

static void
teardown(void)
{
    if (volume != NULL) {
        gd_volume_close(volume);
        volume = NULL;
    }
    transaction_teardown();
}

static gd_status
create(const char *name, uint64_t bytes, gd_image *base)
{
    uint64_t stored;
    const gd_volume_plan plan = {.size = bytes,
                                 .part_size = PART,
                                 .project = "some project",
                                 .base = base};
    return gd_volume_create(the_repo, name, &plan, &stored,
                            &the_scratch.err);
}

static void
open_it(void)
{
    gd_status s = gd_volume_open(the_repo, "disk", true, &volume,
                                 &the_scratch.err);
    CHECK_OK(s);
    volume = s == GD_OK ? volume : NULL;
}

static void
open_again(void)
{
    gd_volume_close(volume);
    volume = NULL;
    open_it();
}

static void
setup_volume(uint64_t bytes)
{
    setup();
    CHECK_OK(create("disk", bytes, NULL));
    size = bytes;
    open_it();
}

/* ---- operations on volume and model ---- */

static void
put(uint64_t offset, uint64_t length, uint64_t seed)
{
    fill_random(model + offset, length, seed);
    CHECK_OK(gd_volume_write(volume, model + offset, length, offset,
                             &the_scratch.err));
}

static void
zero(uint64_t offset, uint64_t length)
{
    memset(model + offset, 0, length);
    CHECK_OK(gd_volume_zero(volume, length, offset, &the_scratch.err));
}

static void
compare(uint64_t offset, uint64_t length)
{
    static uint8_t got[MAX_SIZE];
    memset(got, 0x5a, length);
    CHECK_OK(gd_volume_read(volume, got, length, offset, &the_scratch.err));
    if (!CHECK(memcmp(got, model + offset, length) == 0)) {
        uint64_t at = 0;
        while (got[at] == model[offset + at]) {
            at++;
        }
        fprintf(stderr, "byte %" PRIu64 " is %02x, not %02x\n", offset + at,
                got[at], model[offset + at]);
    }
}

static void
checkpoint(void)
{
    CHECK_OK(gd_volume_checkpoint(volume, &the_scratch.err));
}

static void
resize(uint64_t to)
{
    CHECK_OK(gd_volume_resize(volume, to, &the_scratch.err));
    if (to < size) {
        memset(model + to, 0, MAX_SIZE - to);
    }
    size = to;
}

static void
snapshot(const char *image_id)
{
    gd_recipe_header header;
    CHECK_OK(gd_volume_snapshot(volume, image_id, "", &header,
                                &the_scratch.err));
    CHECK_INT(header.size, size);
    check_stored_image(image_id, model, size);
}

typedef struct extent_check {
    uint64_t at;
    uint64_t zeros;
    bool good;
} extent_check;

static bool
visit(void *arg, uint64_t offset, uint64_t length, bool zeros)
{
    extent_check *c = arg;
    c->good = c->good && offset == c->at && length > 0;
    for (uint64_t i = 0; zeros && i < length; i++) {
        c->good = c->good && model[offset + i] == 0;
    }
    c->zeros += zeros ? length : 0;
    c->at += length;
    return true;
}

/* Checks that reported zeros are zeros; returns the number of such bytes. */
static uint64_t
check_extents(uint64_t offset, uint64_t length)
{
    extent_check c = {.at = offset, .good = true};
    CHECK_OK(gd_volume_extents(volume, length, offset, visit, &c,
                               &the_scratch.err));
    CHECK(c.good);
    CHECK_INT(c.at, offset + length);
    return c.zeros;
}

/* ---- tests ---- */

static uint64_t
count_syncs(void)
{
    return fault_env_count(&the_scratch.f, FAULT_FSYNC) +
           fault_env_count(&the_scratch.f, FAULT_FDATASYNC);
}

/* A checkpoint syncs each new recipe, and a few things more, however many parts
 * it has: 64 are committed together. */
TEST_WITH(test_syncs_of_a_checkpoint, setup(), teardown())
{
    enum { PARTS = 64, MORE = 10 };
    uint8_t data[512];
    gd_repo_close(the_repo);
    the_scratch.params.group_slots = 1024; /* one group has all */
    the_repo = scratch_repo(&the_scratch);
    CHECK_OK(create("disk", PARTS * PART, NULL));
    open_it();
    for (uint64_t parts = 1; parts <= PARTS; parts *= 8) {
        for (uint64_t round = 0; round < 2; round++) {
            for (uint64_t part = 0; part < parts; part++) {
                fill_random(data, sizeof data, 1000 * parts + 2 * part + round);
                CHECK_OK(gd_volume_write(volume, data, sizeof data,
                                         part * PART + 512, &the_scratch.err));
            }
            uint64_t before = count_syncs();
            checkpoint();
            CHECK(count_syncs() - before <= parts + MORE);
        }
    }
}

/* While nobody writes, a checkpoint waits for so many bytes for each part that it
 * would rewrite: for parts of this size, 64 KiB. */
TEST_WITH(test_worth_of_a_checkpoint, setup_volume(SIZE), teardown())
{
    CHECK(!gd_volume_is_worth_checkpoint(volume));
    put(2 * PART, PART / 2, 1);
    CHECK(!gd_volume_is_worth_checkpoint(volume));
    put(2 * PART, PART / 2, 2);
    CHECK(gd_volume_is_worth_checkpoint(volume));
    put(3 * PART - 1, 2, 3); /* another part */
    CHECK(!gd_volume_is_worth_checkpoint(volume));
    zero(0, SIZE); /* all six */
    CHECK(!gd_volume_is_worth_checkpoint(volume));
    for (uint64_t i = 0; i < 5; i++) {
        CHECK(!gd_volume_is_worth_checkpoint(volume));
        put(3 * PART, PART, i);
    }
    CHECK(gd_volume_is_worth_checkpoint(volume));
    checkpoint();
    CHECK(!gd_volume_is_worth_checkpoint(volume));
    compare(0, SIZE);
}

TEST_WITH(test_new_volume_is_zeros, setup_volume(SIZE), teardown())
{
    gd_volume_info info;
    compare(0, SIZE);
    CHECK_INT(check_extents(0, SIZE), SIZE);
    gd_volume_get_info(volume, &info);
    CHECK_INT(info.head.size, SIZE);
    CHECK_INT(info.journal_records, 0);
    CHECK(strcmp(info.head.project, "some project") == 0);
    CHECK_INT(scratch_count(&the_scratch, "images", "", NULL), 0);
}

TEST_WITH(test_written_bytes_are_read, setup_volume(SIZE), teardown())
{
    put(0, 1, 1);
    put(4095, 2, 2);
    put(100, SIZE - 100, 3);
    zero(5000, 70000);
    compare(0, SIZE);
    CHECK_INT(check_extents(0, SIZE), 70000 + 99);
    checkpoint();
    compare(0, SIZE);
    open_again();
    compare(0, SIZE);
}

/* Any operations run in any order. */
static void
run_random(uint64_t seed)
{
    setup_volume(SIZE);
    for (int i = 0; i < 400 / SWEEP_STRIDE && check_failures == 0; i++) {
        uint64_t offset = next_random(&seed) % size;
        uint64_t longest = next_random(&seed) % 3 == 0 ? SIZE : 10000;
        uint64_t length = next_random(&seed) % longest;
        char id[32];
        length = minimum(length, size - offset);
        switch (next_random(&seed) % 16) {
        case 0:
            zero(offset, length);
            break;
        case 1:
            checkpoint();
            break;
        case 2:
            open_again();
            break;
        case 3:
            CHECK_OK(gd_volume_flush(volume, &the_scratch.err));
            break;
        case 4:
            (void)check_extents(offset, length);
            break;
        case 5:
            if (i % 8 == 0) {
                resize((1 + next_random(&seed) % (MAX_SIZE / 512)) * 512);
            }
            break;
        case 6:
            if (i % 8 == 0) {
                snprintf(id, sizeof id, "snapshot-%d", i);
                snapshot(id);
            }
            break;
        default:
            put(offset, length, next_random(&seed));
        }
        if (i % 4 == 0) {
            offset = next_random(&seed) % size;
            compare(offset, minimum(20000, size - offset));
        }
    }
    compare(0, size);
    open_again();
    compare(0, size);
    gd_volume_close(volume);
    volume = NULL;
    CHECK_OK(gd_volume_delete(the_repo, "disk", &the_scratch.err));
    CHECK_INT(scratch_count(&the_scratch, "images", "v_", NULL), 0);
    CHECK_INT(scratch_count(&the_scratch, "volumes", "", NULL), 0);
    teardown();
}

TEST(test_random)
{
    for (uint64_t seed = 1; seed <= 12 / SWEEP_STRIDE; seed++) {
        run_random(seed);
    }
}

/* A clone has the image's bytes, even when the image is deleted. */
TEST_WITH(test_clone, setup(), teardown())
{
    static uint8_t data[3 * PART + 700];
    fill_image(data, sizeof data, 4096, 100, 5);
    store_in_one("image", data, sizeof data, 70000, NULL);
    gd_image *base = require_image(the_repo, "image");
    uint64_t stored = 1;
    const gd_volume_plan plan = {
        .part_size = PART, .project = "", .base = base};
    CHECK_OK(gd_volume_create(the_repo, "disk", &plan, &stored,
                              &the_scratch.err));
    CHECK_INT(stored, 0);
    gd_image_close(base);
    CHECK_OK(gd_image_delete(the_scratch.env, the_scratch.root,
                             &the_scratch.params, "image", NULL,
                             &the_scratch.err));
    memcpy(model, data, sizeof data);
    size = (sizeof data + 511) / 512 * 512;
    open_it();
    compare(0, size);
    put(PART - 10, 20, 1);
    checkpoint();
    compare(0, size);
    resize(PART + 512); /* only parts with editions are left */
    compare(0, size);
    resize(4 * PART);
    compare(0, size);
    open_again();
    compare(0, size);
    CHECK_INT(scratch_count(&the_scratch, "images", "v_", NULL), 2);
}

/* Trimming a large empty volume is cheap. */
TEST_WITH(test_zeros_over_nothing, setup(), teardown())
{
    CHECK_OK(create("disk", UINT64_C(1) << 30, NULL));
    size = UINT64_C(1) << 30;
    open_it();
    CHECK_OK(gd_volume_zero(volume, size, 0, &the_scratch.err));
    checkpoint();
    CHECK_INT(scratch_count(&the_scratch, "images", "", NULL), 0);
    CHECK_INT(scratch_count(&the_scratch, "volumes/disk", "journal-", NULL),
              1);
}

TEST(test_ranges_are_checked)
{
    uint8_t byte = 0;
    setup_volume(SIZE);
    CHECK_INT(gd_volume_write(volume, &byte, 1, SIZE, &the_scratch.err),
              GD_INVALID);
    CHECK_INT(gd_volume_read(volume, &byte, 1, UINT64_MAX, &the_scratch.err),
              GD_INVALID);
    CHECK_INT(gd_volume_zero(volume, UINT64_MAX, 1, &the_scratch.err),
              GD_INVALID);
    CHECK_INT(gd_volume_zero(volume, 0, SIZE, &the_scratch.err), GD_OK);
    CHECK_INT(gd_volume_write(volume, &byte, 0, SIZE, &the_scratch.err),
              GD_OK);
    teardown();
}

TEST(test_bad_sizes_and_names)
{
    static const uint64_t sizes[] = {0, 1, 513, (UINT64_C(1) << 46) + 512,
                                     UINT64_C(1) << 63, UINT64_MAX};
    static const char *const names[] = {
        "", ".", "..", "a/b", "a b",
        "12345678901234567890123456789012345678901234567890123456789012345"};
    setup();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CHECK_INT(create("disk", sizes[i], NULL), GD_INVALID);
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        CHECK_INT(create(names[i], 512, NULL), GD_INVALID);
        CHECK_INT(gd_volume_open(the_repo, names[i], true, &volume,
                                 &the_scratch.err), GD_INVALID);
        CHECK_INT(gd_volume_delete(the_repo, names[i], &the_scratch.err),
                  GD_INVALID);
    }
    CHECK_INT(scratch_count(&the_scratch, "volumes", "", NULL), 0);
    CHECK_INT(gd_volume_open(the_repo, "disk", true, &volume, &the_scratch.err),
              GD_NOTFOUND);
    CHECK_INT(gd_volume_delete(the_repo, "disk", &the_scratch.err),
              GD_NOTFOUND);
    volume = NULL;
    teardown();
}

TEST_WITH(test_ids_of_recipes, setup_volume(SIZE), teardown())
{
    static const char *const ids[] = {
        "v_0123456789abcdef0123456789abcdef_base_0",
        "v_0123456789abcdef0123456789abcdef_3_1"};
    gd_recipe_header header;
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        CHECK_INT(gd_volume_snapshot(volume, ids[i], "", &header,
                                     &the_scratch.err), GD_INVALID);
    }
    snapshot("v_0123456789abcdef0123456789abcdeg_3_1");
}

/* Puts an image of one byte in the place of part 0's first edition. */
static void
replace_edition(const gd_scope *scope, uint64_t length)
{
    char id[GD_IMAGE_ID_MAX + 1];
    gd_volume_head head;
    gd_transaction *transaction;
    gd_recipe_header header;
    bool linked;
    CHECK_OK(gd_volume_read_head(the_repo, "disk", &head, &the_scratch.err));
    gd_volume_edition_id(head.volume_id, 0, 1, id);
    CHECK_OK(gd_image_delete(the_scratch.env, the_scratch.root,
                             &the_scratch.params, id, NULL,
                             &the_scratch.err));
    CHECK_OK(gd_transaction_begin(the_repo, id, "", scope, &transaction,
                                  &the_scratch.err));
    CHECK_OK(gd_transaction_add_zeros(transaction, length, &the_scratch.err));
    CHECK_OK(gd_transaction_commit(transaction, &header, &linked,
                                   &the_scratch.err));
    gd_transaction_end(transaction);
}

static void
check_strange_edition(const gd_scope *scope, uint64_t length, gd_status wanted)
{
    uint8_t byte;
    setup_volume(SIZE);
    put(0, 100, 1);
    checkpoint();
    gd_volume_close(volume);
    replace_edition(scope, length);
    open_it();
    CHECK_INT(gd_volume_read(volume, &byte, 1, 0, &the_scratch.err), wanted);
    CHECK_INT(gd_volume_read(volume, &byte, 1, PART, &the_scratch.err),
              GD_OK);
    teardown();
}

/* A recipe is not accepted only for its right name. */
TEST(test_strange_editions)
{
    const gd_scope same = {{0}}, other = {{1}};
    check_strange_edition(&same, PART, GD_OK);
    check_strange_edition(&other, PART, GD_CORRUPT);
    check_strange_edition(&same, PART + 1, GD_CORRUPT);
}

/* N15.1: only making a volume sets the feature, and no file is there
 * before. */
TEST_WITH(test_the_feature, setup(), teardown())
{
    gd_volume_head head;
    CHECK_INT(gd_volume_open(the_repo, "disk", true, &volume, &the_scratch.err),
              GD_NOTFOUND);
    CHECK_INT(gd_volume_read_head(the_repo, "disk", &head, &the_scratch.err),
              GD_NOTFOUND);
    CHECK_INT(gd_volume_delete(the_repo, "disk", &the_scratch.err),
              GD_NOTFOUND);
    CHECK_INT(create("a/b", SIZE, NULL), GD_INVALID);
    CHECK_INT(scratch_count(&the_scratch, "features", "", NULL), 0);
    CHECK_INT(renameat(the_scratch.root, "features", the_scratch.root,
                       "away"), 0);
    CHECK_INT(create("disk", SIZE, NULL), GD_CORRUPT);
    CHECK_CONTAINS(the_scratch.err.text, "features");
    CHECK_INT(scratch_count(&the_scratch, "volumes", "", NULL), 0);
    CHECK_INT(renameat(the_scratch.root, "away", the_scratch.root,
                       "features"), 0);
    CHECK_OK(create("disk", SIZE, NULL));
    CHECK(scratch_exists(&the_scratch, "features/volumes"));
    CHECK_INT(scratch_count(&the_scratch, "features", "", NULL), 1);
    volume = NULL;
}

TEST_WITH(test_one_owner, setup_volume(SIZE), teardown())
{
    gd_volume *other;
    gd_volume_head head;
    CHECK_INT(gd_volume_open(the_repo, "disk", true, &other, &the_scratch.err),
              GD_BUSY);
    CHECK_INT(gd_volume_delete(the_repo, "disk", &the_scratch.err), GD_BUSY);
    CHECK_INT(create("disk", SIZE, NULL), GD_EXISTS);
    CHECK_OK(gd_volume_read_head(the_repo, "disk", &head, &the_scratch.err));
    CHECK_INT(head.size, SIZE);
    gd_volume_close(volume);
    volume = NULL;
    CHECK_INT(create("disk", SIZE, NULL), GD_EXISTS);
}
