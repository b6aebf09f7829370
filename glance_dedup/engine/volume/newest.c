/* SPDX-License-Identifier: Apache-2.0 */
/*
 * newest.c - reads and writes the newest head of a volume, owned or not.
 */
#include "engine/volume/directory.h"
#include "engine/volume/state.h"

enum { LOOK_TRIES = 10 }; /* while the owner changes the journal */

gd_status
gd_volume_require_call(const gd_repo *repo, const char *name, gd_error *err)
{
    GD_TRY(gd_repo_require_owner(repo, err));
    return gd_volume_require_name(name, err);
}

gd_status
gd_volume_open_newest(gd_repo *repo, const char *name, gd_journal **journal,
                      gd_volume_head *head, gd_volume_mark **marks,
                      gd_error *err)
{
    uint32_t *numbers;
    size_t count;
    gd_status s = gd_volume_list_journals(repo->env, repo->root, name,
                                          &numbers, &count, err);
    if (s != GD_OK) {
        return s;
    }
    s = count == 0 ? gd_fail(err, GD_NOTFOUND, "there is no volume %s", name)
                   : gd_journal_open(repo->env, repo->root, name,
                                     numbers[count - 1],
                                     repo->params.repository_id, journal,
                                     head, marks, err);
    repo->env->release(repo->env, numbers);
    return s;
}

gd_status
gd_volume_read_head(gd_repo *repo, const char *name, gd_volume_head *head,
                    gd_error *err)
{
    gd_status s = gd_volume_require_call(repo, name, err);
    if (s != GD_OK) {
        return s;
    }
    /* Since it was listed, the owner may have unlinked the newest journal, or
     * written the next one over its file (V10). */
    for (int i = 0; i < LOOK_TRIES; i++) {
        gd_journal *journal;
        gd_volume_mark *marks;
        s = gd_volume_open_newest(repo, name, &journal, head, &marks, err);
        if (s == GD_OK) {
            repo->env->release(repo->env, marks);
            gd_journal_close(journal);
        }
        if (s != GD_NOTFOUND && s != GD_CORRUPT) {
            return s;
        }
    }
    return s == GD_CORRUPT
               ? s
               : gd_fail(err, GD_NOTFOUND, "there is no volume %s", name);
}

gd_status
gd_volume_write_head(gd_repo *repo, const char *name, gd_volume_head *head,
                     const gd_volume_mark *marks, gd_error *err)
{
    gd_journal *journal;
    bool named;
    GD_TRY(gd_journal_create(repo->env, repo->root, name, head, marks, NULL,
                             &journal, &named, err));
    gd_journal_close(journal);
    return GD_OK;
}
