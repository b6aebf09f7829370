/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_rollback.c - a volume that gets an image's bytes, or another name: when
 * any call fails, the process dies or the machine crashes, the volume has its
 * old or its new state, no file is left over, and it can be used and deleted.
 */
#include "engine/volume/volume.h"

#include "tests/c/support/volume_fixture.h"

enum {
    SECTOR = 512,
    IMAGE = 2 * P + 100, /* sectors */
    MAX_SIZE = MODEL_SECTORS * SECTOR,
};

typedef struct content {
    uint64_t size;
    uint8_t bytes[MAX_SIZE];
} content;

static content image, before, now;
static unsigned recipes_before;

/* ---- the volume's state ---- */

static void
read_volume(const char *name, content *out)
{
    gd_volume *volume;
    gd_volume_info info;
    memset(out, 0, sizeof *out);
    gd_status s = gd_volume_open(the_repo, name, true, &volume,
                                 &the_scratch.err);
    CHECK_OK(s);
    if (s == GD_OK) {
        gd_volume_get_info(volume, &info);
        out->size = info.head.size;
        CHECK_OK(gd_volume_read(volume, out->bytes, (size_t)out->size, 0,
                                &the_scratch.err));
        gd_volume_close(volume);
    }
}

static bool
same(const content *a, const content *b)
{
    return a->size == b->size && memcmp(a->bytes, b->bytes, MAX_SIZE) == 0;
}

/* Makes editions of some parts, the base of another, and records over both.
 * clone: of the image whose bytes the volume gets. */
static void
begin(bool clone)
{
    model_setup(IMAGE);
    model_start_shadow();
    CHECK_OK(clone ? model_clone(4 * P + 3) : model_create(P + 3));
    read_volume("disk", &now);
    CHECK_OK(model_open());
    CHECK_OK(model_write(0, 20));
    CHECK_OK(model_checkpoint());
    CHECK_OK(model_write(P - 10, 12));
    CHECK_OK(model_flush());
    model_close();
    read_volume("disk", &before);
    recipes_before = scratch_count(&the_scratch, "images", "v_", NULL);
}

static void
learn_image(void)
{
    size_t done;
    gd_image *opened;
    memset(&image, 0, sizeof image);
    CHECK_OK(gd_image_open(the_repo, "image", NULL, &opened,
                           &the_scratch.err));
    CHECK_OK(gd_image_read(opened, image.bytes, MAX_SIZE, 0, &done,
                           &the_scratch.err));
    image.size = done;
    gd_image_close(opened);
}

static gd_status
roll_back(void)
{
    uint64_t stored;
    gd_image *opened = NULL;
    gd_status s = gd_image_open(the_repo, "image", NULL, &opened,
                                &the_scratch.err);
    if (s == GD_OK) {
        s = gd_volume_roll_back(the_repo, "disk", opened, &stored,
                                &the_scratch.err);
        gd_image_close(opened);
    }
    CHECK(s != GD_OK || stored <= image.size);
    return s;
}

/* Deletes the volume; no file of it is left. */
static void
delete(const char *name)
{
    CHECK_OK(gd_volume_delete(the_repo, name, &the_scratch.err));
    CHECK_INT(scratch_count(&the_scratch, "images", "v_", NULL), 0);
    CHECK_INT(scratch_count(&the_scratch, "volumes", "", NULL), 0);
}

/* ---- rolling back ---- */

TEST(test_roll_back)
{
    for (int clone = 0; clone < 2; clone++) {
        gd_volume_head head;
        begin(clone == 1);
        learn_image();
        CHECK(!same(&before, &image));
        CHECK_OK(roll_back());
        /* There are the three parts of the image, and no recipe from
         * before. */
        CHECK_INT(scratch_count(&the_scratch, "images", "v_", NULL), 3);
        CHECK_INT(scratch_count(&the_scratch, "images", "_base_", NULL), 0);
        CHECK_INT(scratch_count(&the_scratch, "volumes/disk", "journal",
                                NULL), 1);
        read_volume("disk", &now);
        CHECK(same(&now, &image));
        CHECK_OK(gd_volume_read_head(the_repo, "disk", &head,
                                     &the_scratch.err));
        CHECK(strcmp(head.source, "image") == 0);
        CHECK_INT(head.counters.written, 20 * SECTOR);
        CHECK_OK(roll_back()); /* again, over itself */
        read_volume("disk", &now);
        CHECK(same(&now, &image));
        delete("disk");
        model_teardown();
    }
}

/* Parts that are zeros in the image get no recipe. */
TEST(test_roll_back_to_zeros)
{
    gd_recipe_header header;
    begin(true);
    CHECK_OK(model_open());
    CHECK_OK(model_zero(P, P));
    CHECK_OK(model_zero(3 * P, P));
    CHECK_OK(gd_volume_snapshot(the_volume, "moment", "project", &header,
                                &the_scratch.err));
    CHECK_OK(model_write(P + 4, 2 * P));
    model_close();
    gd_image *opened;
    uint64_t stored;
    CHECK_OK(gd_image_open(the_repo, "moment", NULL, &opened,
                           &the_scratch.err));
    CHECK_OK(gd_volume_roll_back(the_repo, "disk", opened, &stored,
                                 &the_scratch.err));
    CHECK_INT(stored, 0);
    gd_image_close(opened);
    CHECK_INT(scratch_count(&the_scratch, "images", "v_", NULL), 2);
    read_volume("disk", &now);
    CHECK_INT(now.size, (4 * P + 3) * SECTOR);
    for (size_t i = P * SECTOR; i < 2 * P * SECTOR; i++) {
        REQUIRE(now.bytes[i] == 0);
    }
    CHECK(memcmp(now.bytes, before.bytes, P * SECTOR) == 0);
    delete("disk");
    model_teardown();
}

TEST(test_refused)
{
    begin(false);
    learn_image();
    CHECK_OK(model_open());
    CHECK_INT(roll_back(), GD_BUSY);
    CHECK_INT(gd_volume_rename(the_repo, "disk", "other", &the_scratch.err),
              GD_BUSY);
    model_close();
    gd_image *opened;
    uint64_t stored;
    store_in_one("empty", NULL, 0, 1, NULL);
    CHECK_OK(gd_image_open(the_repo, "empty", NULL, &opened,
                           &the_scratch.err));
    CHECK_INT(gd_volume_roll_back(the_repo, "disk", opened, &stored,
                                  &the_scratch.err), GD_INVALID);
    CHECK_CONTAINS(the_scratch.err.text, "disk");
    CHECK_INT(gd_volume_roll_back(the_repo, "none", opened, &stored,
                                  &the_scratch.err), GD_NOTFOUND);
    gd_image_close(opened);
    CHECK_INT(gd_volume_rename(the_repo, "none", "other", &the_scratch.err),
              GD_NOTFOUND);
    CHECK_INT(gd_volume_rename(the_repo, "disk", "a/b", &the_scratch.err),
              GD_INVALID);
    CHECK_INT(gd_volume_rename(the_repo, "disk", "disk", &the_scratch.err),
              GD_EXISTS);
    read_volume("disk", &now);
    CHECK(same(&now, &before));
    delete("disk");
    model_teardown();
}

/* ---- renaming ---- */

TEST(test_rename)
{
    gd_volume_plan plan = {.size = SECTOR, .project = ""};
    gd_volume *volume;
    uint64_t stored;
    begin(true);
    CHECK_OK(gd_volume_create(the_repo, "taken", &plan, &stored,
                              &the_scratch.err));
    CHECK_INT(gd_volume_rename(the_repo, "disk", "taken", &the_scratch.err),
              GD_EXISTS);
    CHECK_OK(gd_volume_open(the_repo, "taken", true, &volume,
                            &the_scratch.err));
    CHECK_INT(gd_volume_rename(the_repo, "disk", "taken", &the_scratch.err),
              GD_EXISTS);
    gd_volume_close(volume);
    CHECK_OK(gd_volume_delete(the_repo, "taken", &the_scratch.err));
    /* Another process has just begun to make a volume of this name. */
    CHECK(mkdirat(the_scratch.root, "volumes/other", 0700) == 0);
    CHECK_OK(gd_volume_rename(the_repo, "disk", "other", &the_scratch.err));
    CHECK_INT(gd_volume_open(the_repo, "disk", true, &volume, &the_scratch.err),
              GD_NOTFOUND);
    read_volume("other", &now);
    CHECK(same(&now, &before));
    CHECK_OK(gd_volume_create(the_repo, "disk", &plan, &stored,
                              &the_scratch.err));
    CHECK_OK(gd_volume_delete(the_repo, "disk", &the_scratch.err));
    delete("other");
    model_teardown();
}

/* ---- faults at every call ---- */

static void
end_at(fault_call call, uint64_t nth, bool crash, bool *met,
       gd_status (*work)(void), gd_status *s)
{
    fault_env_fail(FAULTS, call, nth, EIO, true);
    *s = work();
    *met = fault_env_faults(FAULTS) > 0;
    fault_env_heal(FAULTS);
    if (crash) {
        model_crash();
    } else {
        model_kill();
    }
}

TEST(test_roll_back_is_interrupted)
{
    bool met = true;
    for (uint64_t nth = 1; met && check_failures < 20;
         nth += SWEEP_STRIDE) {
        for (int crash = 0; crash < 2; crash++) {
            gd_status s;
            begin(nth % 2 == 0);
            learn_image();
            end_at(FAULT_ANY, nth, crash == 1, &met, roll_back, &s);
            CHECK(met || s == GD_OK);
            read_volume("disk", &now);
            CHECK(same(&now, &image) || (s != GD_OK && same(&now, &before)));
            CHECK_INT(scratch_count(&the_scratch, "images", "v_", NULL),
                      same(&now, &image) ? 3 : recipes_before);
            CHECK_OK(roll_back()); /* the next attempt */
            read_volume("disk", &now);
            CHECK(same(&now, &image));
            delete("disk");
            model_teardown();
        }
    }
}

static gd_status
rename_disk(void)
{
    return gd_volume_rename(the_repo, "disk", "other", &the_scratch.err);
}

TEST(test_rename_is_interrupted)
{
    bool met = true;
    for (uint64_t nth = 1; met && check_failures < 20; nth++) {
        gd_volume_head head;
        gd_status s;
        begin(nth % 2 == 0);
        end_at(FAULT_ANY, nth, nth % 3 == 0, &met, rename_disk, &s);
        CHECK(met || s == GD_OK);
        bool old = gd_volume_read_head(the_repo, "disk", &head, NULL) == GD_OK;
        bool new = gd_volume_read_head(the_repo, "other", &head, NULL) ==
                   GD_OK;
        CHECK(old != new && (s != GD_OK || new));
        read_volume(new ? "other" : "disk", &now);
        CHECK(same(&now, &before));
        delete(new ? "other" : "disk");
        model_teardown();
    }
}
