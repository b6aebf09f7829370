/* SPDX-License-Identifier: Apache-2.0 */
/*
 * create.c - creates volumes (volumes.rst, V9).
 */
#include <stdio.h>
#include <string.h>

#include "engine/volume/directory.h"
#include "engine/volume/edition.h"
#include "engine/volume/state.h"

static gd_status
require_plan(const char *name, const gd_volume_plan *plan, gd_error *err)
{
    uint64_t base = plan->base == NULL ? 0 : gd_image_header(plan->base)->size;
    if (plan->base != NULL) {
        GD_TRY(gd_image_require_no_disk(plan->base, err));
    }
    GD_TRY(gd_volume_require_size(name, plan->size, err));
    if (!gd_volume_head_part_size_allowed(plan->part_size)) {
        return gd_fail(err, GD_INVALID, "volume %s: %llu is no size of parts",
                       name, (unsigned long long)plan->part_size);
    }
    if (strnlen(plan->project, GD_PROJECT_MAX + 1) > GD_PROJECT_MAX) {
        return gd_fail(err, GD_INVALID, "a project's name has at most %d "
                       "bytes", GD_PROJECT_MAX);
    }
    return base <= plan->size
               ? GD_OK
               : gd_fail(err, GD_INVALID, "volume %s: %llu bytes are less "
                         "than the image's %llu", name,
                         (unsigned long long)plan->size,
                         (unsigned long long)base);
}

static gd_status
first_head(gd_repo *repo, const gd_volume_plan *plan, gd_volume_head *head,
           gd_error *err)
{
    *head = (gd_volume_head){
        .journal = 1,
        .needed = 1,
        .scope = plan->scope,
        .size = plan->size,
        .part_size = plan->part_size,
        .state = plan->base == NULL ? GD_VOLUME_READY : GD_VOLUME_MAKING,
        .created = (uint64_t)repo->env->now(repo->env)};
    memcpy(head->repository_id, repo->params.repository_id, GD_ID_SIZE);
    snprintf(head->project, sizeof head->project, "%s", plan->project);
    if (plan->base != NULL) {
        snprintf(head->source, sizeof head->source, "%s",
                 gd_image_header(plan->base)->image_id);
    }
    int rc = repo->env->random(repo->env, head->volume_id, GD_ID_SIZE);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot draw a random number")
                  : GD_OK;
}

static gd_status
make_base(gd_repo *repo, const char *name, const gd_volume_plan *plan,
          gd_volume_head *head, uint64_t *stored, gd_error *err)
{
    GD_TRY(gd_edition_base(repo, head, plan->base, stored, err));
    head->journal++;
    head->needed = head->journal;
    head->base_size = gd_image_header(plan->base)->size;
    head->state = GD_VOLUME_READY;
    GD_TRY(gd_volume_write_head(repo, name, head, NULL, err));
    return gd_volume_unlink_journal(repo->env, repo->root, name,
                                    head->journal - 1, err);
}

/* An unfinished volume of this name is removed first.
 * REQUIRES: the owner's lock. */
static gd_status
clear_name(gd_repo *repo, const char *name, bool *removed, gd_error *err)
{
    gd_volume_head head;
    uint32_t *numbers;
    size_t count;
    *removed = false;
    GD_TRY(gd_volume_list_journals(repo->env, repo->root, name,
                                   &numbers, &count, err));
    repo->env->release(repo->env, numbers);
    if (count == 0) {
        return GD_OK;
    }
    gd_status s = gd_volume_read_head(repo, name, &head, err);
    if (s == GD_OK && head.state == GD_VOLUME_READY) {
        return gd_fail(err, GD_EXISTS, "volume %s exists already", name);
    }
    *removed = s == GD_OK;
    return s == GD_OK ? gd_volume_delete_owned(repo, name, err) : s;
}

static gd_status
make_volume(gd_repo *repo, const char *name, const gd_volume_plan *plan,
            uint64_t *stored, gd_error *err)
{
    gd_volume_head head;
    gd_status s = first_head(repo, plan, &head, err);
    if (s == GD_OK) {
        s = gd_volume_write_head(repo, name, &head, NULL, err);
    }
    if (s == GD_OK && plan->base != NULL) {
        s = make_base(repo, name, plan, &head, stored, err);
    }
    if (s != GD_OK) {
        (void)gd_volume_delete_owned(repo, name, NULL);
    }
    return s;
}

gd_status
gd_volume_create(gd_repo *repo, const char *name, const gd_volume_plan *plan,
                 uint64_t *stored, gd_error *err)
{
    gd_volume_plan full = *plan;
    bool again = true;
    *stored = 0;
    gd_status s = gd_volume_require_call(repo, name, err);
    if (full.part_size == 0) {
        full.part_size = GD_VOLUME_PART;
    }
    if (full.size == 0 && full.base != NULL) {
        uint64_t size = gd_image_header(full.base)->size;
        full.size = (size + GD_VOLUME_SECTOR - 1) / GD_VOLUME_SECTOR *
                    GD_VOLUME_SECTOR;
    }
    if (s == GD_OK) {
        s = require_plan(name, &full, err);
    }
    if (s == GD_OK) {
        s = gd_repo_use_feature(repo, GD_FEATURE_VOLUMES, err);
    }
    while (s == GD_OK && again) {
        int lock;
        s = gd_volume_lock(repo->env, repo->root, name, true, &lock, err);
        if (s != GD_OK) {
            return s == GD_BUSY ? gd_fail(err, GD_EXISTS,
                                          "volume %s exists already", name)
                                : s;
        }
        s = clear_name(repo, name, &again, err);
        if (s == GD_OK && !again) {
            s = make_volume(repo, name, &full, stored, err);
        }
        repo->env->close(repo->env, lock);
    }
    return s;
}
