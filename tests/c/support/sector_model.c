/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sector_model.c - see sector_model.h.
 */
#include "tests/c/support/sector_model.h"

#include <dirent.h>
#include <fcntl.h>

#include "tests/c/support/check.h"

enum { SECTOR = 512, CONTENTS = 48 };

/* Contents are numbered; 0 is zeros. */
typedef struct sector_state {
    uint64_t contents[CONTENTS]; /* possible after a crash */
    unsigned count;
    unsigned sure; /* the last ones, possible without a crash */
} sector_state;

gd_volume *the_volume;
gd_error *model_err = &the_scratch.err;
static sector_state states[MODEL_SECTORS];
static uint64_t sectors, last_content, image_sectors;
static uint64_t maybe_sectors; /* a resizing that failed; 0: none */
static bool crashed;

static void
set(uint64_t sector, uint64_t content)
{
    states[sector] =
        (sector_state){.contents = {content}, .count = 1, .sure = 1};
}

static void
add(uint64_t sector, uint64_t content, bool good)
{
    sector_state *state = &states[sector];
    if (state->count == CONTENTS) {
        memmove(state->contents, state->contents + 1,
                (CONTENTS - 1) * sizeof state->contents[0]);
        state->count--;
        state->sure -= state->sure > state->count;
    }
    state->contents[state->count++] = content;
    state->sure = good ? 1 : state->sure + 1;
}

static void
fill_sector(uint8_t out[SECTOR], uint64_t sector, uint64_t content)
{
    memset(out, 0, SECTOR);
    if (content != 0) {
        fill_random(out, SECTOR, content << 16 | sector);
    }
}

/* ---- setting up ---- */

void
model_setup(uint64_t image)
{
    static uint8_t data[MODEL_SECTORS * SECTOR];
    transaction_setup();
    the_volume = NULL;
    last_content = 0;
    maybe_sectors = 0;
    crashed = false;
    image_sectors = image;
    if (image > 0) {
        last_content++;
        for (uint64_t i = 0; i < image; i++) {
            fill_sector(data + i * SECTOR, i, 1);
        }
        store_in_one("image", data, image * SECTOR, 70000, NULL);
    }
}

void
model_teardown(void)
{
    model_close();
    transaction_teardown();
}

static gd_status
create(uint64_t size, gd_image *base)
{
    uint64_t stored;
    const gd_volume_plan plan = {.size = size * SECTOR,
                                 .part_size = MODEL_PART,
                                 .project = "project",
                                 .base = base};
    for (uint64_t i = 0; i < MODEL_SECTORS; i++) {
        set(i, base != NULL && i < image_sectors ? 1 : 0);
    }
    sectors = size;
    return gd_volume_create(the_repo, "disk", &plan, &stored,
                            model_err);
}

gd_status
model_create(uint64_t size)
{
    return create(size, NULL);
}

gd_status
model_clone(uint64_t size)
{
    gd_image *image = NULL;
    gd_status s = gd_image_open(the_repo, "image", NULL, &image,
                                model_err);
    if (s == GD_OK) {
        s = create(size, image);
        gd_image_close(image);
    }
    return s;
}

gd_status
model_open(void)
{
    gd_volume_info info;
    gd_status s = gd_volume_open(the_repo, "disk", true, &the_volume,
                                 model_err);
    if (s != GD_OK) {
        the_volume = NULL;
        return s;
    }
    gd_volume_get_info(the_volume, &info);
    uint64_t size = info.head.size / SECTOR;
    CHECK(size == sectors || size == maybe_sectors);
    for (uint64_t i = size; i < MODEL_SECTORS; i++) {
        set(i, 0);
    }
    sectors = size;
    maybe_sectors = 0;
    return s;
}

void
model_close(void)
{
    if (the_volume != NULL) {
        gd_volume_close(the_volume);
        the_volume = NULL;
    }
}

void
model_end(void)
{
    fault_env_fail(FAULTS, FAULT_UNLINKAT, 1, EIO, true);
    fault_env_fail(FAULTS, FAULT_FTRUNCATE, 1, EIO, true);
    model_close();
    fault_env_heal(FAULTS);
    gd_repo_close(the_repo);
}

void
model_kill(void)
{
    model_end();
    the_repo = scratch_repo_filter(&the_scratch);
}

void
model_start_shadow(void)
{
    fault_env_start_shadow(FAULTS);
}

void
model_crash(void)
{
    model_end();
    fault_env_crash(FAULTS);
    the_repo = scratch_repo_filter(&the_scratch);
    crashed = true;
}

/* ---- requests ---- */

gd_status
model_write(uint64_t first, uint64_t count)
{
    static uint8_t data[MODEL_SECTORS * SECTOR];
    last_content++;
    for (uint64_t i = 0; i < count; i++) {
        fill_sector(data + i * SECTOR, first + i, last_content);
    }
    gd_status s = gd_volume_write(the_volume, data, count * SECTOR,
                                  first * SECTOR, model_err);
    for (uint64_t i = first; i < first + count; i++) {
        add(i, last_content, s == GD_OK);
    }
    return s;
}

gd_status
model_zero(uint64_t first, uint64_t count)
{
    gd_status s = gd_volume_zero(the_volume, count * SECTOR, first * SECTOR,
                                 model_err);
    for (uint64_t i = first; i < first + count; i++) {
        add(i, 0, s == GD_OK);
    }
    return s;
}

gd_status
model_flush(void)
{
    gd_status s = gd_volume_flush(the_volume, model_err);
    for (uint64_t i = 0; s == GD_OK && i < sectors; i++) {
        sector_state *state = &states[i];
        memmove(state->contents,
                state->contents + (state->count - state->sure),
                state->sure * sizeof state->contents[0]);
        state->count = state->sure;
    }
    return s;
}

gd_status
model_checkpoint(void)
{
    return gd_volume_checkpoint(the_volume, model_err);
}

static void
compare_image(const char *image_id)
{
    static uint8_t wanted[MODEL_SECTORS * SECTOR];
    for (uint64_t i = 0; i < sectors; i++) {
        if (states[i].sure != 1) {
            return;
        }
        fill_sector(wanted + i * SECTOR, i,
                    states[i].contents[states[i].count - 1]);
    }
    check_stored_image(image_id, wanted, sectors * SECTOR);
}

gd_status
model_snapshot(const char *image_id)
{
    gd_recipe_header header;
    gd_status s = gd_volume_snapshot(the_volume, image_id, "", &header,
                                     model_err);
    if (s == GD_OK) {
        fault_env_heal(FAULTS);
        compare_image(image_id);
    }
    return s;
}

gd_status
model_resize(uint64_t size)
{
    gd_status s = gd_volume_resize(the_volume, size * SECTOR,
                                   model_err);
    if (s != GD_OK) {
        /* Any of the sectors to be cut off may be zeros. */
        for (uint64_t i = size; i < sectors; i++) {
            add(i, 0, false);
        }
        maybe_sectors = size;
        gd_volume_info info;
        gd_volume_get_info(the_volume, &info);
        if (info.head.size == size * SECTOR) {
            maybe_sectors = sectors;
            sectors = size;
        }
        return s;
    }
    for (uint64_t i = size; i < MODEL_SECTORS; i++) {
        set(i, 0);
    }
    sectors = size;
    maybe_sectors = 0;
    return s;
}

uint64_t
model_sectors(void)
{
    return sectors;
}

/* ---- checks ---- */

static bool
matches(const uint8_t *got, uint64_t sector)
{
    uint8_t wanted[SECTOR];
    sector_state *state = &states[sector];
    unsigned most = crashed ? state->count : state->sure;
    for (unsigned i = 1; i <= most; i++) {
        uint64_t content = state->contents[state->count - i];
        fill_sector(wanted, sector, content);
        if (memcmp(got, wanted, SECTOR) == 0) {
            if (crashed) {
                set(sector, content);
            }
            return true;
        }
    }
    return false;
}

void
model_compare(void)
{
    static uint8_t got[MODEL_SECTORS * SECTOR];
    unsigned bad = 0;
    if (!CHECK_INT(gd_volume_read(the_volume, got, sectors * SECTOR, 0,
                                  model_err), GD_OK)) {
        fprintf(stderr, "%s\n", the_scratch.err.text);
        return;
    }
    for (uint64_t i = 0; i < sectors; i++) {
        if (!matches(got + i * SECTOR, i) && bad++ == 0) {
            fprintf(stderr, "sector %" PRIu64 " has none of the contents that "
                    "it may have, the last of them %" PRIu64 "\n", i,
                    states[i].contents[states[i].count - 1]);
        }
    }
    CHECK_INT(bad, 0);
    crashed = false;
}

void
model_check_nothing_left(void)
{
    unsigned editions[MODEL_SECTORS / MODEL_PART_SECTORS] = {0}, bases = 0;
    int fd = openat(the_scratch.root, "images", O_RDONLY | O_DIRECTORY);
    DIR *images = fdopendir(fd);
    for (const struct dirent *d; (d = readdir(images)) != NULL;) {
        unsigned long part;
        if (strncmp(d->d_name, "v_", 2) != 0) {
            continue;
        }
        if (strstr(d->d_name, "_base_0") != NULL) {
            bases++;
        } else if (CHECK_INT(sscanf(d->d_name + 34, "_%lu_", &part), 1) &&
                   CHECK(part < sizeof editions / sizeof *editions)) {
            CHECK(part * MODEL_PART_SECTORS < sectors);
            editions[part]++;
        }
    }
    closedir(images);
    for (size_t i = 0; i < sizeof editions / sizeof *editions; i++) {
        CHECK(editions[i] <= 1);
    }
    CHECK(bases <= (image_sectors > 0));
    CHECK_INT(scratch_count(&the_scratch, "volumes/disk", "journal", NULL),
              1);
}

void
model_delete(void)
{
    model_close();
    CHECK_OK(gd_volume_delete(the_repo, "disk", model_err));
    CHECK_INT(scratch_count(&the_scratch, "images", "v_", NULL), 0);
    CHECK_INT(scratch_count(&the_scratch, "volumes", "", NULL), 0);
}

const char *
model_words(void)
{
    return the_scratch.err.text;
}
