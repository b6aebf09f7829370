/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rollback.c - gives a volume the bytes of an image (volumes.rst,
 * "Operations").
 *
 * New editions of all parts are committed, without marks.  One new head then has
 * their marks, the image's size, no base, and needs no earlier journal.  Before
 * it, the new editions are garbage (V7); after it, all that was before is.
 */
#include <stdio.h>
#include <string.h>

#include "engine/volume/edition.h"
#include "engine/volume/state.h"

static gd_status
commit_parts(gd_volume *volume, gd_volume_head *head, gd_image *image,
             gd_volume_mark *marks, uint64_t *stored, gd_error *err)
{
    const gd_edition_owner owner = {volume, gd_volume_confirm_owner};
    uint64_t size = gd_image_header(image)->size;
    head->marks = 0;
    for (uint64_t part = 0; part * head->part_size < size; part++) {
        bool made;
        gd_volume_mark edition = {
            part, gd_parts_edition(&volume->parts, part) + 1};
        GD_TRY(gd_edition_of_image(volume->repo, &owner, head, image, edition,
                                   &made, stored, err));
        if (made) {
            marks[head->marks++] = edition;
        }
    }
    return GD_OK;
}

/* REQUIRES: nobody else uses the volume, which is closed then. */
static gd_status
roll_back(gd_volume *volume, gd_image *image, uint64_t *stored, gd_error *err)
{
    const gd_env *env = volume->repo->env;
    const gd_recipe_header *source = gd_image_header(image);
    gd_volume_head head = volume->head;
    head.size = (source->size + GD_VOLUME_SECTOR - 1) / GD_VOLUME_SECTOR *
                GD_VOLUME_SECTOR;
    head.base_size = 0;
    head.journal++;
    head.needed = head.journal;
    head.before = head.before_durable = 0;
    snprintf(head.source, sizeof head.source, "%s", source->image_id);
    gd_status s = gd_image_require_no_disk(image, err);
    if (s == GD_OK) {
        s = gd_volume_require_size(volume->name, head.size, err);
    }
    if (s != GD_OK) {
        return s;
    }
    gd_volume_mark *marks = gd_calloc(env, (size_t)gd_volume_head_parts(&head),
                                      sizeof *marks, err);
    s = marks == NULL
            ? GD_NOMEM
            : commit_parts(volume, &head, image, marks, stored, err);
    if (s == GD_OK) {
        s = gd_volume_write_head(volume->repo, volume->name, &head, marks,
                                 err);
    }
    env->release(env, marks);
    return s;
}

gd_status
gd_volume_roll_back(gd_repo *repo, const char *name, gd_image *image,
                    uint64_t *stored, gd_error *err)
{
    gd_volume *volume;
    *stored = 0;
    GD_TRY(gd_volume_open(repo, name, true, &volume, err));
    gd_status s = roll_back(volume, image, stored, err);
    gd_volume_close(volume);
    /* An owner removes the recipes that are garbage now.  If this one cannot,
     * the next one does. */
    if (s == GD_OK &&
        gd_volume_open(repo, name, true, &volume, NULL) == GD_OK) {
        gd_volume_close(volume);
    }
    return s;
}
