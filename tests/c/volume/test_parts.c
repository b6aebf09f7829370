/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_parts.c - the open recipes of a volume's parts: no more than are to be
 * kept, opened again when they were replaced, and closed when they are garbage.
 */
#include "engine/volume/parts.h"

#include "engine/volume/state.h"
#include "engine/volume/volumenames.h"
#include "tests/c/support/transaction_fixture.h"

enum {
    PART = 65536,
    PARTS = GD_KEPT_OPEN_MIN + 16,
};

static gd_volume *volume;

/* Then the least number of files stays open. */
static uint64_t
unknown_limit(GD_UNUSED const gd_env *env)
{
    return 0;
}

static void
write_part(uint64_t part, uint64_t seed)
{
    uint8_t bytes[512];
    fill_random(bytes, sizeof bytes, seed);
    CHECK_OK(gd_volume_write(volume, bytes, sizeof bytes, part * PART,
                             &the_scratch.err));
}

/* A volume of which each part has a recipe, and no recipe is open. */
static void
setup(void)
{
    uint64_t stored;
    const gd_volume_plan plan = {.size = (uint64_t)PARTS * PART,
                                 .part_size = PART, .project = ""};
    transaction_setup();
    the_scratch.f.env.descriptor_limit = unknown_limit;
    CHECK_OK(gd_volume_create(the_repo, "disk", &plan, &stored,
                              &the_scratch.err));
    CHECK_OK(gd_volume_open(the_repo, "disk", true, &volume,
                            &the_scratch.err));
    for (uint64_t part = 0; part < PARTS; part++) {
        write_part(part, part);
    }
    CHECK_OK(gd_volume_checkpoint(volume, &the_scratch.err));
    gd_volume_close(volume);
    CHECK_OK(gd_volume_open(the_repo, "disk", true, &volume,
                            &the_scratch.err));
}

static void
teardown(void)
{
    gd_volume_close(volume);
    transaction_teardown();
}

/* Reads some of a part that was written with this seed; returns how many files
 * that opened. */
static uint64_t
read_part(uint64_t part, uint64_t seed)
{
    uint8_t bytes[512], wanted[512];
    uint64_t before = fault_env_count(&the_scratch.f, FAULT_OPENAT);
    fill_random(wanted, sizeof wanted, seed);
    CHECK_OK(gd_volume_read(volume, bytes, sizeof bytes, part * PART,
                            &the_scratch.err));
    CHECK(memcmp(bytes, wanted, sizeof bytes) == 0);
    return fault_env_count(&the_scratch.f, FAULT_OPENAT) - before;
}

TEST_WITH(test_kept_open, setup(), teardown())
{
    for (uint64_t part = 0; part < PARTS; part++) {
        read_part(part, part);
    }
    int64_t open = the_scratch.f.descriptors;
    CHECK_INT(read_part(PARTS - 1, PARTS - 1), 0);
    CHECK_INT(read_part(PARTS - GD_KEPT_OPEN_MIN, PARTS - GD_KEPT_OPEN_MIN),
              0);
    CHECK(read_part(0, 0) > 0);
    CHECK_INT(the_scratch.f.descriptors, open);
    /* All at once: more than are kept, and none is closed in use. */
    gd_part_source sources[PARTS];
    for (uint64_t part = 0; part < PARTS; part++) {
        CHECK_OK(gd_parts_acquire(&volume->parts, part, &sources[part],
                                  &the_scratch.err));
    }
    CHECK_INT(the_scratch.f.descriptors, open + PARTS - GD_KEPT_OPEN_MIN);
    for (uint64_t part = 0; part < PARTS; part++) {
        CHECK_INT(sources[part].length, PART);
        gd_parts_release(&volume->parts, &sources[part]);
    }
    CHECK_INT(the_scratch.f.descriptors, open);
}

/* Gives a part's recipe another file, as a merge does. */
static void
replace_recipe(uint64_t part)
{
    static uint8_t bytes[65536];
    gd_volume_head head;
    char id[GD_IMAGE_ID_MAX + 1], name[GD_NAME_SIZE];
    gd_volume_copy_head(volume, &head);
    gd_volume_edition_id(head.volume_id, part,
                         gd_parts_edition(&volume->parts, part), id);
    REQUIRE(gd_names_image(id, name, &the_scratch.err) == GD_OK);
    size_t size = (size_t)scratch_size(&the_scratch, name);
    REQUIRE(size <= sizeof bytes);
    scratch_read(&the_scratch, name, bytes, size, 0);
    scratch_write(&the_scratch, "spool/new", bytes, size, 0);
    CHECK_INT(renameat(the_scratch.root, "spool/new", the_scratch.root, name),
              0);
}

TEST_WITH(test_replaced, setup(), teardown())
{
    read_part(3, 3);
    read_part(4, 4);
    int64_t open = the_scratch.f.descriptors;
    gd_part_source source;
    CHECK_OK(gd_parts_acquire(&volume->parts, 3, &source, &the_scratch.err));
    replace_recipe(3);
    CHECK_INT(read_part(3, 3), 0);
    gd_volume_renew(volume);
    CHECK_INT(the_scratch.f.descriptors, open);
    CHECK(read_part(3, 3) > 0);
    CHECK_INT(the_scratch.f.descriptors, open + 1);
    gd_parts_release(&volume->parts, &source); /* the old one's last user */
    CHECK_INT(the_scratch.f.descriptors, open);
    CHECK_INT(read_part(4, 4), 0);
}

/* An edition that is garbage is not kept open: it would pin its blocks. */
TEST_WITH(test_garbage, setup(), teardown())
{
    read_part(0, 0); /* the first checkpoint reads the partition table there */
    read_part(3, 3);
    CHECK_INT(gd_lru_count(&volume->parts.images), 2);
    write_part(3, 100);
    CHECK_OK(gd_volume_checkpoint(volume, &the_scratch.err));
    CHECK_INT(gd_lru_count(&volume->parts.images), 1);
    read_part(3, 100);
    CHECK_INT(gd_lru_count(&volume->parts.images), 2);
    CHECK_OK(gd_volume_resize(volume, 2 * PART, &the_scratch.err));
    CHECK_INT(gd_lru_count(&volume->parts.images), 1);
    CHECK_INT(read_part(0, 0), 0);
}
