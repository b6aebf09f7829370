/* SPDX-License-Identifier: Apache-2.0 */
/*
 * groupchoice.c - see groupchoice.h.
 */
#include "engine/write/groupchoice.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/coding.h"

/* A handle never forgets what it learns here.  If the number of a lost group is
 * used again, the handle only leaves the new group to others. */
static void
remember(gd_repo *repo, gd_groupmap *map, uint32_t number, uint32_t what)
{
    pthread_mutex_lock(&repo->mutex);
    uint32_t *item = gd_groupmap_at(map, number, NULL);
    if (item != NULL) {
        *item = what; /* else the group will be looked at again */
    }
    pthread_mutex_unlock(&repo->mutex);
}

void
gd_groupchoice_remember_full(gd_repo *repo, uint32_t number)
{
    remember(repo, &repo->full, number, 1);
}

/* Distinguishes most scopes; not 0.  If two share a tag, their groups are only
 * looked at more often. */
static uint32_t
scope_tag(const gd_scope *scope)
{
    uint32_t tag = gd_get32(scope->id);
    return tag == 0 ? 1 : tag;
}

typedef struct choice {
    uint32_t number;
    uint32_t count; /* published slots */
} choice;

typedef struct choices {
    gd_repo *repo;
    const gd_scope *scope;
    const gd_groupmap *avoided;
    size_t used;
    choice newest[GD_GROUPCHOICE_MAX]; /* sorted by number, highest first */
} choices;

static bool
may_be_ours(const choices *list, uint32_t number)
{
    uint32_t tag = gd_groupmap_get(&list->repo->scopes, number);
    return tag == 0 || tag == scope_tag(list->scope);
}

static void
note_choice(void *arg, const char *name)
{
    choices *list = arg;
    uint32_t number;
    if (!gd_names_parse_group(name, &number) ||
        gd_groupmap_get(&list->repo->full, number) != 0 ||
        !may_be_ours(list, number) ||
        (list->avoided != NULL &&
         gd_groupmap_get(list->avoided, number) != 0)) {
        return;
    }
    size_t at = list->used;
    while (at > 0 && list->newest[at - 1].number < number) {
        at--;
    }
    if (at == GD_GROUPCHOICE_MAX) {
        return;
    }
    size_t moved = list->used - at - (list->used == GD_GROUPCHOICE_MAX);
    memmove(&list->newest[at + 1], &list->newest[at],
            moved * sizeof list->newest[0]);
    list->newest[at] = (choice){.number = number};
    list->used += list->used < GD_GROUPCHOICE_MAX;
}

static int
fullest_first(const void *a, const void *b)
{
    const choice *x = a, *y = b;
    return x->count < y->count ? 1 : x->count > y->count ? -1 : 0;
}

/* Returns how full the group is.  False if it cannot be leased, which is
 * remembered. */
static bool
weigh_choice(choices *list, choice *one)
{
    gd_repo *repo = list->repo;
    gd_group *group;
    gd_published record;
    /* This may be out of date: the lessee checks the group again. */
    if (gd_fpcache_group(repo->cache, one->number, false, &group, NULL) !=
        GD_OK) {
        return false;
    }
    remember(repo, &repo->scopes, one->number, scope_tag(&group->scope));
    bool good = gd_scope_equal(&group->scope, list->scope) &&
                gd_group_read_published(group, &record, NULL) == GD_OK;
    if (good && (record.count == group->bounds.slots ||
                 (record.flags & GD_GROUP_POISONED) != 0)) {
        gd_groupchoice_remember_full(repo, one->number);
        good = false;
    }
    gd_fpcache_return_group(repo->cache, group);
    if (good) {
        one->count = record.count;
    }
    return good;
}

/* Leaves the groups that can be leased, fullest first. */
static void
weigh_choices(choices *list)
{
    size_t kept = 0;
    for (size_t i = 0; i < list->used; i++) {
        choice one = list->newest[i];
        if (weigh_choice(list, &one)) {
            list->newest[kept++] = one;
        }
    }
    list->used = kept;
    qsort(list->newest, list->used, sizeof list->newest[0], fullest_first);
}

gd_status
gd_groupchoice_list(gd_repo *repo, const gd_scope *scope,
                    const gd_groupmap *avoided,
                    uint32_t numbers[GD_GROUPCHOICE_MAX], size_t *count,
                    gd_error *err)
{
    choices *list = gd_calloc(repo->env, 1, sizeof *list, err);
    *count = 0;
    if (list == NULL) {
        return GD_NOMEM;
    }
    list->repo = repo;
    list->scope = scope;
    list->avoided = avoided;
    pthread_mutex_lock(&repo->mutex);
    int rc = repo->env->list(repo->env, repo->root, GD_DIR_GROUPS, note_choice,
                             list);
    pthread_mutex_unlock(&repo->mutex);
    gd_status s = rc < 0 ? gd_fail_errno(err, -rc, "cannot list %s",
                                         GD_DIR_GROUPS)
                         : GD_OK;
    if (s == GD_OK) {
        weigh_choices(list);
        *count = list->used;
    }
    for (size_t i = 0; i < *count; i++) {
        numbers[i] = list->newest[i].number;
    }
    repo->env->release(repo->env, list);
    return s;
}
