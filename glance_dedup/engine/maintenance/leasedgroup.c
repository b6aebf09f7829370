/* SPDX-License-Identifier: Apache-2.0 */
/*
 * leasedgroup.c - see leasedgroup.h.
 */
#include "engine/maintenance/leasedgroup.h"

#include "engine/base/coding.h"
#include "engine/write/appender.h"

/* ---- entering and leaving ---- */

gd_status
gd_leased_group_take(gd_repo *repo, uint32_t number, gd_leased_group **out,
                     gd_error *err)
{
    gd_leased_group *leased = gd_calloc(repo->env, 1, sizeof *leased, err);
    if (leased == NULL) {
        return GD_NOMEM;
    }
    leased->repo = repo;
    leased->number = number;
    gd_status s = gd_repo_require_owner(repo, err);
    if (s == GD_OK) {
        s = gd_locks_lease(repo->locks, number, err);
        if (s == GD_BUSY) {
            gd_fail(err, s, "group %08x is being appended to",
                    (unsigned)number);
        }
    }
    if (s != GD_OK) {
        repo->env->release(repo->env, leased);
        return s;
    }
    *out = leased;
    return GD_OK;
}

static gd_status
confirm_locks(const gd_leased_group *leased, gd_error *err)
{
    gd_status s =
        gd_locks_revalidate(leased->repo->locks, leased->number, err);
    return s == GD_BUSY
               ? gd_fail(err, s, "another process has %s: this one was cut "
                         "off, and lost its locks", leased->group->name)
               : s;
}

gd_status
gd_leased_group_find(gd_leased_group *leased, gd_error *err)
{
    gd_repo *repo = leased->repo;
    GD_TRY(gd_group_settle(repo->env, repo->root, &repo->params,
                           leased->number, err));
    GD_TRY(gd_group_open(repo->env, repo->root, &repo->params,
                         leased->number, O_RDWR, &leased->group, err));
    GD_TRY(gd_group_hold(leased->group, err));
    GD_TRY(confirm_locks(leased, err));
    GD_TRY(gd_group_revalidate_name(leased->group, repo->root, err));
    GD_TRY(gd_group_read_published(leased->group, &leased->published, err));
    return gd_group_sync_rename(leased->group, repo->root,
                                &leased->published, err);
}

gd_status
gd_leased_group_read_entries(gd_leased_group *leased, gd_error *err)
{
    uint32_t slots = leased->group->bounds.slots;
    leased->entries = gd_calloc(leased->repo->env, slots,
                                sizeof *leased->entries, err);
    return leased->entries == NULL
               ? GD_NOMEM
               : gd_group_read_entries(leased->group, 0, slots,
                                       leased->entries, err);
}

static gd_status
require_sealed(gd_leased_group *leased, gd_error *err)
{
    const gd_published *published = &leased->published;
    bool sealed = published->count == leased->group->bounds.slots &&
                  (published->flags & GD_GROUP_POISONED) == 0;
    return sealed ? GD_OK
                  : gd_fail(err, GD_BUSY, "%s is not sealed: a writer may "
                            "come to it", leased->group->name);
}

/* A checksum of what others could change if they ignored locks, or if this
 * process lost its own. */
static gd_status
see_group(const gd_group *group, uint64_t *checksum, gd_error *err)
{
    size_t length = (size_t)gd_fptable_data_start(group->bounds.slots);
    uint8_t *start = gd_alloc(group->env, length, err);
    if (start == NULL) {
        return GD_NOMEM;
    }
    gd_status s = gd_group_read_file(group, start, length, 0, err);
    *checksum = s == GD_OK ? gd_checksum(start, length, 0) : 0;
    group->env->release(group->env, start);
    return s;
}

static gd_status
settle_tail(gd_leased_group *leased, gd_error *err)
{
    return gd_appender_recover_tail(leased->repo, leased->group,
                                    &leased->published, err);
}

/* accept judges the group before it is looked at, or makes it ready. */
static gd_status
open_leased(gd_repo *repo, uint32_t number,
            gd_status (*accept)(gd_leased_group *, gd_error *),
            gd_leased_group **out, gd_error *err)
{
    gd_leased_group *leased;
    GD_TRY(gd_leased_group_take(repo, number, &leased, err));
    gd_status s = gd_leased_group_find(leased, err);
    if (s == GD_OK) {
        s = accept(leased, err);
    }
    if (s == GD_OK) {
        s = see_group(leased->group, &leased->seen, err);
    }
    if (s == GD_OK) {
        s = gd_leased_group_read_entries(leased, err);
    }
    if (s != GD_OK) {
        gd_leased_group_close(leased);
        return s;
    }
    *out = leased;
    return GD_OK;
}

gd_status
gd_leased_group_open(gd_repo *repo, uint32_t number, gd_leased_group **out,
                     gd_error *err)
{
    return open_leased(repo, number, require_sealed, out, err);
}

gd_status
gd_leased_group_open_partial(gd_repo *repo, uint32_t number,
                             gd_leased_group **out, gd_error *err)
{
    return open_leased(repo, number, settle_tail, out, err);
}

void
gd_leased_group_close(gd_leased_group *leased)
{
    gd_repo *repo = leased->repo;
    uint32_t number = leased->number;
    gd_group_close(leased->group);
    repo->env->release(repo->env, leased->entries);
    repo->env->release(repo->env, leased);
    gd_locks_unlease(repo->locks, number);
}

/* The same, seen through a newly opened file: through one that was open before,
 * some file systems show its former content (env.h, `renew`).  If the name
 * leads to a rewritten file since it was asked for, the checksum is another,
 * since the generation is. */
static gd_status
see_group_again(const gd_leased_group *leased, uint64_t *checksum, gd_error *err)
{
    gd_repo *repo = leased->repo;
    gd_group *group;
    gd_status s = gd_group_open(repo->env, repo->root, &repo->params,
                                leased->number, O_RDONLY, &group, err);
    if (s == GD_OK) {
        s = see_group(group, checksum, err);
        gd_group_close(group);
    }
    return s;
}

gd_status
gd_leased_group_require_unchanged(const gd_leased_group *leased, gd_error *err)
{
    uint64_t now = 0;
    gd_status s = confirm_locks(leased, err);
    if (s == GD_OK) {
        s = gd_group_revalidate_name(leased->group, leased->repo->root, err);
    }
    if (s == GD_OK) {
        s = see_group_again(leased, &now, err);
    }
    return s == GD_OK && now != leased->seen
               ? gd_fail(err, GD_CORRUPT, "%s was changed by somebody who had "
                         "not its lease", leased->group->name)
               : s;
}

/* ---- what it was compressed with ---- */

gd_status
gd_leased_group_note_codec(gd_leased_group *leased, const gd_packing *packing,
                           gd_error *err)
{
    const gd_group *group = leased->group;
    gd_published record = leased->published;
    record.sequence++;
    record.codec = (uint8_t)packing->codec;
    record.level =
        (uint8_t)gd_codec_real_level(packing->codec, packing->level);
    record.similar = packing->similar;
    record.covered = packing->codec == GD_CODEC_NONE ? 0 : record.count;
    /* If this write is torn, the record before it is used. */
    GD_TRY(gd_fdatasync(group->env, group->fd, group->name, err));
    GD_TRY(gd_group_write_published(group, &record, err));
    leased->published = record;
    return see_group(group, &leased->seen, err);
}
