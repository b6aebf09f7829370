/* SPDX-License-Identifier: Apache-2.0 */
/*
 * delete.c - deletes volumes (volumes.rst, V9).
 */
#include "engine/files/file.h"
#include "engine/files/freespace.h"
#include "engine/volume/directory.h"
#include "engine/volume/state.h"

/* Marks the volume as being deleted, in its head, durably. */
static gd_status
begin_deleting(gd_repo *repo, const char *name, gd_volume_head *head,
               gd_error *err)
{
    char directory[GD_NAME_SIZE];
    unsigned given = 0;
    if (head->state != GD_VOLUME_READY) {
        /* It is unfinished already, but perhaps not durably. */
        gd_volume_directory(name, directory);
        return gd_sync_dir(repo->env, repo->root, directory, err);
    }
    head->journal++;
    head->needed = head->journal;
    head->before = head->before_durable = 0;
    head->base_size = 0;
    head->marks = 0;
    head->state = GD_VOLUME_DELETING;
    gd_status s = gd_volume_write_head(repo, name, head, NULL, err);
    while (s == GD_NOSPACE &&
           gd_freespace_give_up(repo->env, repo->root, &given)) {
        s = gd_volume_write_head(repo, name, head, NULL, err);
    }
    return s;
}

gd_status
gd_volume_delete_owned(gd_repo *repo, const char *name, gd_error *err)
{
    gd_volume_head head;
    gd_volume_mark *marks;
    gd_journal *journal;
    gd_status s = gd_volume_open_newest(repo, name, &journal, &head, &marks,
                                        err);
    if (s == GD_OK) {
        repo->env->release(repo->env, marks);
        gd_journal_close(journal);
        s = begin_deleting(repo, name, &head, err);
        if (s == GD_OK) {
            head.base_size = 0;
            s = gd_volume_delete_recipes(repo, &head, NULL, 0, err);
        }
    } else if (s == GD_NOTFOUND) {
        s = GD_OK; /* it never had a journal, so no recipes, or has none
                    * any more */
    }
    return s == GD_OK ? gd_volume_remove(repo->env, repo->root, name, err) : s;
}

/* REQUIRES: the owner's lock. */
static gd_status
delete_damaged_owned(gd_repo *repo, const char *name, gd_error *err)
{
    gd_status s = gd_volume_delete_owned(repo, name, err);
    return s == GD_CORRUPT ? gd_volume_remove(repo->env, repo->root, name, err)
                           : s;
}

/* REQUIRES: the owner's lock. */
static gd_status
reap_owned(gd_repo *repo, const char *name, gd_error *err)
{
    gd_volume_head head;
    gd_status s = gd_volume_read_head(repo, name, &head, err);
    if (s == GD_OK && head.state == GD_VOLUME_READY) {
        return gd_fail(err, GD_EXISTS, "volume %s is whole", name);
    }
    return s == GD_OK || s == GD_NOTFOUND
               ? gd_volume_delete_owned(repo, name, err)
               : s;
}

static gd_status
lock_and(gd_status (*work)(gd_repo *, const char *, gd_error *), gd_repo *repo,
         const char *name, gd_error *err)
{
    int lock;
    gd_status s = gd_volume_require_call(repo, name, err);
    if (s == GD_OK) {
        s = gd_volume_lock(repo->env, repo->root, name, false, &lock, err);
    }
    if (s == GD_OK) {
        s = work(repo, name, err);
        repo->env->close(repo->env, lock);
    }
    return s;
}

gd_status
gd_volume_delete(gd_repo *repo, const char *name, gd_error *err)
{
    return lock_and(gd_volume_delete_owned, repo, name, err);
}

gd_status
gd_volume_delete_damaged(gd_repo *repo, const char *name, gd_error *err)
{
    return lock_and(delete_damaged_owned, repo, name, err);
}

gd_status
gd_volume_reap(gd_repo *repo, const char *name, gd_error *err)
{
    gd_status s = lock_and(reap_owned, repo, name, err);
    /* The maker or remover of the volume died while it had no lock: its
     * directory is empty. */
    return s == GD_NOTFOUND &&
                   gd_volume_remove_empty(repo->env, repo->root, name)
               ? GD_OK
               : s;
}
