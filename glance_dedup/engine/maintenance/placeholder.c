/* SPDX-License-Identifier: Apache-2.0 */
/*
 * placeholder.c - see placeholder.h.
 */
#include "engine/maintenance/placeholder.h"

#include <string.h>

#include "engine/files/spool.h"
#include "engine/maintenance/groupexchange.h"

enum { SECTOR = 512 };

/* A group that was poisoned before its first sync point has no end yet, and
 * still has its fingerprint store. */
static bool
is_placeholder(const gd_leased_group *leased)
{
    return leased->published.count == 0 && leased->published.end != 0 &&
           (leased->published.flags & GD_GROUP_POISONED) != 0;
}

/* The record, in both places, so that a torn write of the next one leaves
 * one. */
static gd_status
write_records(const gd_group *target, gd_published *record, gd_error *err)
{
    GD_TRY(gd_group_next_generation(target->env, record, err));
    for (int i = 0; i < 2; i++) {
        record->sequence++;
        GD_TRY(gd_group_write_published(target, record, err));
    }
    return GD_OK;
}

static gd_status
write_file(const gd_group *old, gd_group *target, gd_published *record,
           gd_error *err)
{
    const gd_env *env = old->env;
    GD_TRY(gd_group_write_hot(old, target, false, err));
    GD_TRY(write_records(target, record, err));
    int rc = env->ftruncate(env, target->fd, record->end);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot give %s its length",
                                  target->name)
                  : gd_fsync(env, target->fd, target->name, err);
}

static gd_status
exchange(gd_owned_group *owned, gd_spool_writer *file, gd_error *err)
{
    const gd_leased_group *leased = owned->leased;
    const gd_group *group = leased->group;
    gd_group target = *group;
    gd_published record = {
        .sequence = leased->published.sequence,
        .flags = GD_GROUP_POISONED | GD_GROUP_UNSETTLED,
        .end = gd_fptable_data_start(group->bounds.slots),
    };
    target.fd = target.content = file->fd;
    memcpy(target.name, file->name, sizeof target.name);
    gd_entry *entries = gd_calloc(group->env, group->bounds.slots,
                                  sizeof *entries, err);
    gd_status s = entries == NULL ? GD_NOMEM
                                  : write_file(group, &target, &record, err);
    if (s == GD_OK) {
        s = gd_group_exchange(owned, file, &target, &entries, &record,
                              err);
    }
    group->env->release(group->env, entries);
    return s;
}

static uint64_t
allocated(const struct stat *st)
{
    return (uint64_t)st->st_blocks * SECTOR;
}

gd_status
gd_placeholder_leave(gd_owned_group *owned, uint64_t *bytes,
                     gd_error *err)
{
    gd_repo *repo = owned->leased->repo;
    gd_spool_writer file;
    struct stat before, after;
    *bytes = 0;
    gd_status s = gd_owned_group_require_usable(owned, err);
    if (s != GD_OK || !gd_owned_group_is_empty(owned) ||
        is_placeholder(owned->leased)) {
        return s;
    }
    s = gd_group_stat(owned->leased->group, &before, err);
    if (s == GD_OK) {
        s = gd_spool_create(repo->env, repo->root, GD_SPOOL_GROUP, &file, err);
    }
    if (s != GD_OK) {
        return s;
    }
    s = exchange(owned, &file, err);
    gd_spool_discard(repo->env, repo->root, &file); /* if it still exists */
    if (s == GD_OK) {
        s = gd_group_stat(owned->leased->group, &after, err);
    }
    if (s == GD_OK && allocated(&before) > allocated(&after)) {
        *bytes = allocated(&before) - allocated(&after);
    }
    return s;
}
