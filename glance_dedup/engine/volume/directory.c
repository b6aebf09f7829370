/* SPDX-License-Identifier: Apache-2.0 */
/*
 * directory.c - see directory.h.
 */
#include "engine/volume/directory.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/array.h"
#include "engine/files/file.h"
#include "engine/files/image_delete.h"
#include "engine/volume/volumenames.h"

enum { LOCK_TRIES = 10 }; /* while others make and remove the directory */

/* ---- the lock ---- */

static gd_status
make_directory(const gd_env *env, int root, const char *volume, gd_error *err)
{
    char name[GD_NAME_SIZE];
    gd_volume_directory(volume, name);
    GD_TRY(gd_file_create_directory(env, root, name, err));
    return gd_sync_dir(env, root, GD_DIR_VOLUMES, err);
}

/* The lock's name is durable before any other: without it, nobody could own
 * the volume. */
static gd_status
make_lock(const gd_env *env, int root, const char *volume, const char *name,
          int *fd, gd_error *err)
{
    char directory[GD_NAME_SIZE];
    gd_volume_directory(volume, directory);
    GD_TRY(gd_file_open_or_create(env, root, name, fd, err));
    return gd_sync_dir(env, root, directory, err);
}

static gd_status
lock_file(const gd_env *env, int root, const char *volume, const char *name,
          int fd, gd_error *err)
{
    int rc = env->lock(env, fd, 0, F_WRLCK);
    if (rc == -EAGAIN || rc == -EACCES) {
        return gd_fail(err, GD_BUSY, "volume %s is in use by another process",
                       volume);
    }
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot lock %s", name);
    }
    bool same;
    gd_status s = gd_find_same(env, fd, root, name, &same, err);
    return s != GD_OK ? s
           : same     ? GD_OK
                      : gd_fail(err, GD_NOTFOUND, "volume %s was just deleted",
                                volume);
}

static gd_status
try_lock(const gd_env *env, int root, const char *volume, bool make, int *fd,
         gd_error *err)
{
    char name[GD_NAME_SIZE];
    gd_status s = make ? make_directory(env, root, volume, err) : GD_OK;
    gd_volume_file_name(volume, GD_VOLUME_LOCK, name);
    if (s == GD_OK) {
        s = make ? make_lock(env, root, volume, name, fd, err)
                 : gd_file_open(env, root, name, O_RDWR, fd, err);
    }
    if (s == GD_OK) {
        s = lock_file(env, root, volume, name, *fd, err);
    }
    if (s != GD_OK && *fd >= 0) {
        env->close(env, *fd);
        *fd = -1;
    }
    return s;
}

gd_status
gd_volume_lock(const gd_env *env, int root, const char *volume, bool make,
               int *fd, gd_error *err)
{
    gd_status s = GD_NOTFOUND;
    *fd = -1;
    for (int i = 0; s == GD_NOTFOUND && i < (make ? LOCK_TRIES : 1); i++) {
        s = try_lock(env, root, volume, make, fd, err);
    }
    return s == GD_NOTFOUND && !make
               ? gd_fail(err, s, "there is no volume %s", volume)
               : s;
}

/* ---- journals ---- */

typedef struct number_list {
    const gd_env *env;
    uint32_t *numbers;
    size_t count, room;
    gd_status status;
    gd_error *err;
} number_list;

static void
note_number(void *arg, const char *base)
{
    number_list *list = arg;
    uint32_t number;
    if (list->status != GD_OK || !gd_volume_journal_parse(base, &number)) {
        return;
    }
    uint32_t *numbers =
        gd_array_reserve(list->env, list->numbers, &list->room,
                         list->count + 1, sizeof *numbers, list->err);
    if (numbers == NULL) {
        list->status = GD_NOMEM;
        return;
    }
    list->numbers = numbers;
    list->numbers[list->count++] = number;
}

static int
compare_numbers(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

gd_status
gd_volume_list_journals(const gd_env *env, int root, const char *volume,
                        uint32_t **numbers, size_t *count, gd_error *err)
{
    char name[GD_NAME_SIZE];
    number_list list = {.env = env, .status = GD_OK, .err = err};
    gd_volume_directory(volume, name);
    int rc = env->list(env, root, name, note_number, &list);
    if (rc < 0) {
        list.status = gd_fail_errno(err, -rc, "cannot list %s", name);
    }
    if (list.status != GD_OK) {
        env->release(env, list.numbers);
        return list.status;
    }
    if (list.count > 0) {
        qsort(list.numbers, list.count, sizeof *list.numbers,
              compare_numbers);
    }
    *numbers = list.numbers;
    *count = list.count;
    return GD_OK;
}

static gd_status
unlink_file(const gd_env *env, int root, const char *name, gd_error *err)
{
    int rc = env->unlinkat(env, root, name);
    return rc < 0 && rc != -ENOENT
               ? gd_fail_errno(err, -rc, "cannot remove %s", name)
               : GD_OK;
}

gd_status
gd_volume_unlink_journal(const gd_env *env, int root, const char *volume,
                         uint32_t number, gd_error *err)
{
    char name[GD_NAME_SIZE];
    gd_volume_journal_name(volume, number, name);
    return unlink_file(env, root, name, err);
}

/* ---- recipes ---- */

/* The names in a directory that begin with a prefix. */
typedef struct id_list {
    const gd_env *env;
    const char *prefix;
    char (*ids)[GD_IMAGE_ID_MAX + 1];
    size_t count, room;
    gd_status status;
    gd_error *err;
} id_list;

static void
note_id(void *arg, const char *base)
{
    id_list *list = arg;
    if (list->status != GD_OK || strlen(base) > GD_IMAGE_ID_MAX ||
        strncmp(base, list->prefix, strlen(list->prefix)) != 0) {
        return;
    }
    char(*ids)[GD_IMAGE_ID_MAX + 1] =
        gd_array_reserve(list->env, list->ids, &list->room, list->count + 1,
                         sizeof *ids, list->err);
    if (ids == NULL) {
        list->status = GD_NOMEM;
        return;
    }
    list->ids = ids;
    snprintf(list->ids[list->count++], sizeof list->ids[0], "%s", base);
}

/* The caller releases list->ids, also after an error. */
static gd_status
list_ids(const gd_env *env, int root, const char *directory,
         const char *prefix, id_list *list, gd_error *err)
{
    *list = (id_list){
        .env = env, .prefix = prefix, .status = GD_OK, .err = err};
    int rc = env->list(env, root, directory, note_id, list);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot list %s", directory)
                  : list->status;
}

static bool
is_marked(const gd_volume_head *head, const gd_volume_mark *marks,
          size_t count, const char *id)
{
    char wanted[GD_IMAGE_ID_MAX + 1];
    size_t low = 0, high = count;
    gd_volume_base_id(head->volume_id, wanted);
    if (strcmp(id, wanted) == 0) {
        return head->base_size > 0;
    }
    gd_volume_id_prefix(head->volume_id, wanted);
    uint64_t part = strtoull(id + strlen(wanted), NULL, 10);
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (marks[middle].part < part) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low == count || marks[low].part != part) {
        return false;
    }
    gd_volume_edition_id(head->volume_id, part, marks[low].edition, wanted);
    return strcmp(id, wanted) == 0;
}

gd_status
gd_volume_delete_recipes(gd_repo *repo, const gd_volume_head *head,
                         const gd_volume_mark *marks, size_t count,
                         gd_error *err)
{
    const gd_env *env = repo->env;
    char prefix[GD_IMAGE_ID_MAX + 1];
    id_list list;
    gd_volume_id_prefix(head->volume_id, prefix);
    gd_status s = list_ids(env, repo->root, GD_DIR_IMAGES, prefix, &list, err);
    for (size_t i = 0; s == GD_OK && i < list.count; i++) {
        if (is_marked(head, marks, count, list.ids[i])) {
            continue;
        }
        s = gd_image_delete(env, repo->root, &repo->params, list.ids[i], NULL,
                            err);
        s = s == GD_NOTFOUND ? GD_OK : s;
    }
    env->release(env, list.ids);
    return s;
}

/* ---- the end ---- */

gd_status
gd_volume_remove_new(const gd_env *env, int root, const char *volume,
                     gd_status (*confirm)(void *arg, gd_error *err),
                     void *arg, gd_error *err)
{
    char directory[GD_NAME_SIZE], name[GD_NAME_SIZE];
    id_list list;
    gd_volume_directory(volume, directory);
    gd_status s = list_ids(env, root, directory, GD_VOLUME_NEW, &list, err);
    if (s == GD_OK && confirm != NULL) {
        s = confirm(arg, err);
    }
    for (size_t i = 0; s == GD_OK && i < list.count; i++) {
        gd_volume_file_name(volume, list.ids[i], name);
        s = unlink_file(env, root, name, err);
    }
    env->release(env, list.ids);
    return s;
}

static gd_status
remove_directory(const gd_env *env, int root, const char *volume,
                 gd_error *err)
{
    char name[GD_NAME_SIZE];
    gd_volume_directory(volume, name);
    int rc = env->rmdirat(env, root, name);
    if (rc < 0 && rc != -ENOENT) {
        return gd_fail_errno(err, -rc, "cannot remove %s", name);
    }
    return gd_sync_dir(env, root, GD_DIR_VOLUMES, err);
}

bool
gd_volume_remove_empty(const gd_env *env, int root, const char *volume)
{
    char name[GD_NAME_SIZE];
    gd_volume_directory(volume, name);
    return env->rmdirat(env, root, name) == 0;
}

/* The newest journal marks the volume as being deleted: it is removed when the
 * others cannot come back any more. */
static gd_status
remove_journals(const gd_env *env, int root, const char *volume,
                const char *directory, gd_error *err)
{
    uint32_t *numbers = NULL;
    size_t count = 0;
    gd_status s =
        gd_volume_list_journals(env, root, volume, &numbers, &count, err);
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        if (i + 1 == count) {
            s = gd_sync_dir(env, root, directory, err);
        }
        if (s == GD_OK) {
            s = gd_volume_unlink_journal(env, root, volume, numbers[i], err);
        }
    }
    env->release(env, numbers);
    return s;
}

gd_status
gd_volume_remove(const gd_env *env, int root, const char *volume,
                 gd_error *err)
{
    static const char *const files[] = {GD_VOLUME_CONTROL, GD_VOLUME_LOCK};
    char directory[GD_NAME_SIZE];
    char name[GD_NAME_SIZE];
    gd_volume_directory(volume, directory);
    gd_status s = remove_journals(env, root, volume, directory, err);
    if (s == GD_OK) {
        s = gd_volume_remove_new(env, root, volume, NULL, NULL, err);
    }
    for (size_t i = 0; s == GD_OK && i < sizeof files / sizeof *files; i++) {
        /* The lock goes when nothing else can come back. */
        if (i + 1 == sizeof files / sizeof *files) {
            s = gd_sync_dir(env, root, directory, err);
        }
        gd_volume_file_name(volume, files[i], name);
        s = s == GD_OK ? unlink_file(env, root, name, err) : s;
    }
    return s == GD_OK ? remove_directory(env, root, volume, err) : s;
}
