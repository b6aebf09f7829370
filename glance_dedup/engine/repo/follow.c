/* SPDX-License-Identifier: Apache-2.0 */
/*
 * follow.c - see follow.h.  position.h describes the knowledge of the groups
 * between two scans.
 *
 * Entries are added before the position moves.  After a kill in between, they
 * are read again.  Hints that are added twice do no harm.  The last ones
 * are added with the position: a store then commits once, not twice, for each
 * group that is filled in.
 */
#include "engine/repo/follow.h"

#include <errno.h>

#include <string.h>

#include "engine/files/group.h"
#include "engine/format/names.h"

enum {
    LIST_MS = 60 * 1000, /* all groups are listed after so long, at the latest */
    LOST_AT_ONCE = 16,   /* groups in turn that are read again in one scan */
};

typedef struct look {
    gd_repo *repo;
    gd_hintindex *index;
    gd_position position;
    gd_look shown;        /* the last scan, as the index shows it */
    gd_group_list groups; /* without numbers: they were not listed */
    unsigned left;        /* groups that may still be read */
    uint64_t entries;
    gd_entry_range last; /* read, and not added yet */
    uint32_t hole;       /* of one group: its first slot that was read empty */
} look;

static bool
is_older(const gd_repo *repo, int64_t moment, unsigned ms)
{
    int64_t now = repo->env->monotonic_ns(repo->env);
    /* A moment to come is one from before a restart of the host. */
    return moment == 0 || moment > now ||
           now - moment >= (int64_t)ms * 1000000;
}

bool
gd_follow_is_due(const gd_repo *repo, unsigned ms)
{
    gd_filter_stats stats;
    gd_hintindex *index = repo->index;
    if (index == NULL) {
        return false;
    }
    index->get_stats(index, &stats);
    return !stats.complete || is_older(repo, stats.look.ended_ns, ms);
}

/* ---- one group ---- */

/* A published entry is never empty (I1).  But a file system may show former
 * bytes: JuiceFS reads ahead, and an open file shows the bytes that were read
 * then.  From the hole on, a later scan reads the entries again. */
static void
find_hole(look *l, uint32_t first, uint32_t count, const gd_entry *entries)
{
    for (uint32_t i = 0; i < count && first + i < l->hole; i++) {
        if (entries[i].state == GD_ENTRY_EMPTY) {
            l->hole = first + i;
        }
    }
}

static void
release_last(look *l)
{
    l->repo->env->release(l->repo->env, (void *)l->last.entries);
    l->last = (gd_entry_range){0};
}

/* Adds the hints of slots [first, end).  False: they cannot be read. */
static bool
add_range(look *l, const gd_group *group, uint32_t first, uint32_t end)
{
    const gd_env *env = l->repo->env;
    if (first >= end) {
        return true;
    }
    gd_entry *entries =
        gd_alloc(env, (end - first) * sizeof *entries, NULL);
    bool good = entries != NULL &&
                gd_group_read_entries(group, first, end - first, entries,
                                      NULL) == GD_OK;
    if (good) {
        find_hole(l, first, end - first, entries);
        l->index->add(l->index, &l->last);
        release_last(l);
        l->last = (gd_entry_range){group->number, first, end - first,
                                   entries};
        l->entries += end - first;
    } else {
        env->release(env, entries);
    }
    return good;
}

/* Adds slots [first, end), but those that this host has added itself.  (After
 * the loss of a group others may use its number again.  If this host had just
 * written to the lost one, it misses their first blocks.) */
static bool
add_foreign(look *l, const gd_group *group, uint32_t first, uint32_t end)
{
    uint32_t own, own_end;
    l->index->find_own(l->index, group->number, &own, &own_end);
    if (own >= end || own_end <= first) {
        return add_range(l, group, first, end);
    }
    return add_range(l, group, first, own) &&
           add_range(l, group, own_end, end);
}

/* Returns whether the slot still reads as empty where an earlier scan stopped.
 * Then the rest is left to the next scan, and takes no other group's turn: the
 * slot of a group that is damaged stays empty until a scrub. */
static bool
is_hole(const gd_group *group, uint32_t slot)
{
    gd_entry entry;
    return gd_group_read_entries(group, slot, 1, &entry, NULL) == GD_OK &&
           entry.state == GD_ENTRY_EMPTY;
}

/* Moves *known to the published entries (I1) that could be read.  Returns
 * whether there may be more. */
static bool
learn_from(look *l, const gd_group *group, gd_open_group *known)
{
    gd_published record;
    uint32_t identity = gd_position_identity(group->bounds.seed);
    l->hole = group->bounds.slots;
    if (gd_group_read_published(group, &record, NULL) != GD_OK) {
        return true;
    }
    /* The count goes back if a crash of the server lost the record.  Whatever
     * was in the slots behind it may be different now. */
    bool changed = known->published > record.count ||
                   (known->published > 0 && identity != known->identity);
    if (known->identity == identity && known->published < record.count &&
        is_hole(group, known->published)) {
        return true;
    }
    if (changed || known->published < record.count) {
        l->left -= l->left > 0;
        bool added = changed
                         ? add_range(l, group, 0, record.count)
                         : add_foreign(l, group, known->published,
                                       record.count);
        if (!added) {
            return true;
        }
    }
    known->published = record.count < l->hole ? record.count : l->hole;
    known->identity = identity;
    return known->published < record.count ||
           (record.count < group->bounds.slots &&
            (record.flags & GD_GROUP_POISONED) == 0);
}

/* The same.  One that is gone leaves the list when the groups are listed. */
static bool
learn(look *l, gd_open_group *known)
{
    gd_group *group;
    if (gd_group_open(l->repo->env, l->repo->root, &l->repo->params,
                      known->group, O_RDONLY, &group, NULL) != GD_OK) {
        return true;
    }
    bool may_grow = learn_from(l, group, known);
    gd_group_close(group);
    return may_grow;
}

/* ---- all groups ---- */

/* Those that may have grown.  False: there may be more to read. */
static bool
look_at_open(look *l)
{
    gd_position *p = &l->position;
    for (uint32_t i = 0; i < p->count;) {
        if (l->left == 0) {
            return false;
        }
        if (learn(l, &p->open[i])) {
            i++;
        } else {
            gd_position_remove(p, i);
        }
    }
    return true;
}

/* Those that are new. */
static bool
look_at_new(look *l)
{
    gd_position *p = &l->position;
    for (size_t i = 0; i < l->groups.count; i++) {
        gd_open_group new = {.group = l->groups.numbers[i]};
        if (new.group <= p->newest) {
            continue;
        }
        if (l->left == 0) {
            return false;
        }
        unsigned left = l->left - 1;
        if (learn(l, &new)) {
            gd_position_append(p, new);
        }
        l->left = left;
        p->newest = new.group;
    }
    return true;
}

/* The group to be read in turn; 0: there is none above those that are
 * sealed. */
static uint32_t
find_turn(const look *l)
{
    const gd_position *p = &l->position;
    const gd_group_list *all = &l->groups;
    uint32_t found = 0;
    for (size_t i = 0; i < all->count && all->numbers[i] <= p->turn; i++) {
        found = all->numbers[i] > p->sealed ? all->numbers[i] : 0;
    }
    return found;
}

/* Takes one of the groups for which the list had no room, from the highest
 * down.  Their position is not known, so they are read whole.  Those above it
 * that are known again need no more turns. */
static void
take_turn(look *l)
{
    gd_position *p = &l->position;
    bool highest = p->turn == p->lost;
    gd_open_group group = {.group = find_turn(l)};
    if (group.group == 0) {
        p->lost = highest ? p->sealed : p->lost;
        p->turn = p->lost;
        return;
    }
    bool known =
        !learn(l, &group) || (highest && gd_position_prepend(p, group));
    p->turn = group.group - 1;
    if (highest && known) {
        p->lost = p->turn;
    }
}

static void
look_at_lost(look *l)
{
    for (int i = 0; i < LOST_AT_ONCE && l->position.lost > l->position.sealed;
         i++) {
        l->left = 1;
        take_turn(l);
    }
}

/* ---- finding groups ---- */

/* Returns whether there is a group behind the newest.  New groups get the next
 * number (gd_group_create).  An error counts as yes: listing reports it. */
static bool
has_next(const look *l)
{
    const gd_env *env = l->repo->env;
    char name[GD_NAME_SIZE];
    struct stat st;
    if (l->position.newest >= GD_MAX_GROUP) {
        return false;
    }
    gd_names_group(l->position.newest + 1, name);
    /* Another host may have made it just now. */
    int rc = env->renew(env, l->repo->root, name);
    return rc < 0 || env->fstatat(env, l->repo->root, name, &st) != -ENOENT;
}

static void
forget_removed(look *l)
{
    gd_position *p = &l->position;
    const gd_group_list *all = &l->groups;
    size_t at = 0;
    /* Groups that were lost: their numbers are used again. */
    gd_position_cut(p, all->count == 0 ? 0 : all->numbers[all->count - 1]);
    for (uint32_t i = 0; i < p->count;) {
        while (all->numbers[at] < p->open[i].group) {
            at++; /* ends: the cut left none above the last */
        }
        if (all->numbers[at] == p->open[i].group) {
            i++;
        } else {
            gd_position_remove(p, i);
        }
    }
}

/* Listing 100,000 groups takes longer than all else of a scan that finds
 * nothing.  So it is left out if the next number is free.  That misses a group,
 * until the next list, only if groups were made and removed since the last
 * scan. */
static gd_status
list_groups(look *l, gd_error *err)
{
    gd_position *p = &l->position;
    bool needed = !p->complete || p->lost > p->sealed ||
                  is_older(l->repo, l->shown.listed_ns, LIST_MS);
    if (!needed && !has_next(l)) {
        return GD_OK;
    }
    int64_t now = l->repo->env->monotonic_ns(l->repo->env);
    gd_status s =
        gd_group_numbers(l->repo->env, l->repo->root, &l->groups.numbers,
                         &l->groups.count, err);
    if (s == GD_OK) {
        l->groups.listed_ns = l->shown.listed_ns = now;
        forget_removed(l);
    }
    return s;
}

static void
drop_list(gd_repo *repo, gd_group_list *list)
{
    repo->env->release(repo->env, list->numbers);
    *list = (gd_group_list){0};
}

/* Goes on with the list that the last scan did not finish.  Without it, filling
 * an index would list all groups once for each few that it reads. */
static bool
resume_list(look *l)
{
    gd_group_list *unfinished = &l->repo->unfinished;
    if (is_older(l->repo, unfinished->listed_ns, LIST_MS)) {
        drop_list(l->repo, unfinished);
    }
    l->groups = *unfinished;
    *unfinished = (gd_group_list){0};
    return l->groups.numbers != NULL;
}

static uint32_t
count_known(const look *l)
{
    const gd_group_list *all = &l->groups;
    uint32_t known = 0;
    while (known < all->count && all->numbers[known] <= l->position.newest) {
        known++;
    }
    return known;
}

/* REQUIRES: the lock of the rebuild. */
static gd_status
look_at_groups(look *l, gd_followed *followed, gd_error *err)
{
    gd_filter_stats stats;
    l->index->load(l->index, &l->position);
    l->index->get_stats(l->index, &stats);
    l->shown = stats.look;
    int64_t now = l->repo->env->monotonic_ns(l->repo->env);
    bool resumed = resume_list(l);
    gd_status s = resumed ? GD_OK : list_groups(l, err);
    if (s != GD_OK) {
        return s;
    }
    followed->more = !look_at_open(l) || !look_at_new(l);
    if (!followed->more && resumed) {
        /* Groups may have been made since they were listed. */
        drop_list(l->repo, &l->groups);
        s = list_groups(l, err);
        if (s != GD_OK) {
            return s;
        }
        followed->more = !look_at_new(l);
    }
    if (!followed->more) {
        look_at_lost(l);
        l->position.complete = true;
        l->shown.ended_ns = now;
    }
    followed->total = (uint32_t)l->groups.count;
    followed->done = count_known(l);
    followed->entries = l->entries;
    l->shown.behind = followed->total - followed->done;
    if (followed->more && l->shown.behind == 0) {
        l->shown.behind = 1; /* at least */
    }
    l->index->save(l->index, &l->last, &l->position, &l->shown);
    if (followed->more) {
        l->repo->unfinished = l->groups;
        l->groups = (gd_group_list){0};
    }
    return GD_OK;
}

gd_status
gd_follow(gd_repo *repo, unsigned groups, gd_followed *followed, gd_error *err)
{
    *followed = (gd_followed){.more = false};
    gd_status s = gd_repo_require_owner(repo, err);
    gd_hintindex *index = repo->index;
    if (s != GD_OK || index == NULL || !index->rebuild_lock(index)) {
        return s;
    }
    look *l = gd_calloc(repo->env, 1, sizeof *l, err);
    s = l == NULL ? GD_NOMEM : GD_OK;
    if (l != NULL) {
        l->repo = repo;
        l->index = index;
        l->left = groups > 0 ? groups : 1;
        s = look_at_groups(l, followed, err);
        release_last(l);
        drop_list(repo, &l->groups);
        repo->env->release(repo->env, l);
    }
    index->rebuild_unlock(index);
    return s;
}
