/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spareindex.c - see spareindex.h.
 */
#include "engine/repo/spareindex.h"

#include <pthread.h>
#include <string.h>

#include "engine/base/listing.h"
#include "engine/files/group.h"

typedef struct spare_file {
    uint32_t number;
    uint64_t inode, size;
    struct timespec changed;
    gd_fptable *store; /* NULL: it could not be read */
} spare_file;

struct gd_spare_index {
    const gd_env *env;
    int root;
    const gd_params *params;
    pthread_mutex_t mutex; /* held during a search: only damage needs one */
    spare_file *files;
    size_t count;
    bool listed;
    int64_t listed_at; /* seconds: see gd_spare_index_find */
};

gd_status
gd_spare_index_open(const gd_env *env, int root, const gd_params *params,
                    gd_spare_index **out, gd_error *err)
{
    gd_spare_index *index = gd_calloc(env, 1, sizeof *index, err);
    if (index == NULL) {
        return GD_NOMEM;
    }
    index->env = env;
    index->root = root;
    index->params = params;
    pthread_mutex_init(&index->mutex, NULL);
    *out = index;
    return GD_OK;
}

static void
free_files(const gd_env *env, spare_file *files, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (files[i].store != NULL) {
            gd_fptable_free(env, files[i].store);
        }
    }
    env->release(env, files);
}

void
gd_spare_index_close(gd_spare_index *index)
{
    free_files(index->env, index->files, index->count);
    pthread_mutex_destroy(&index->mutex);
    index->env->release(index->env, index);
}

static bool
parse_file(const char *name, void *item)
{
    return gd_names_parse_group(name, &((spare_file *)item)->number);
}

static const gd_listing spares = {sizeof(spare_file), "the list of copies",
                                  parse_file, NULL};

/* A file that cannot be read counts as having no copies, which loses
 * nothing. */
static gd_fptable *
load_store(const gd_spare_index *index, uint32_t number)
{
    char name[GD_NAME_SIZE];
    gd_group *group;
    gd_published record;
    gd_fptable *store = NULL;
    gd_names_spares(number, name);
    if (gd_group_open_as(index->env, index->root, index->params, number, name,
                         O_RDONLY, &group, NULL) != GD_OK) {
        return NULL;
    }
    if (gd_group_read_published(group, &record, NULL) != GD_OK ||
        gd_group_load_table(group, &record, &store, NULL) != GD_OK) {
        store = NULL;
    }
    gd_group_close(group);
    return store;
}

/* Fills in a file that was listed.  If it is still the same file, takes over
 * the known facts. */
static void
learn_file(gd_spare_index *index, spare_file *file)
{
    char name[GD_NAME_SIZE];
    struct stat st;
    gd_names_spares(file->number, name);
    if (index->env->fstatat(index->env, index->root, name, &st) < 0) {
        return;
    }
    file->inode = st.st_ino;
    file->size = (uint64_t)st.st_size;
    file->changed = st.st_mtim;
    for (size_t i = 0; i < index->count; i++) {
        spare_file *known = &index->files[i];
        /* A file that could not be read is tried again. */
        if (known->store != NULL && known->number == file->number &&
            known->inode == file->inode && known->size == file->size &&
            known->changed.tv_sec == file->changed.tv_sec &&
            known->changed.tv_nsec == file->changed.tv_nsec) {
            file->store = known->store;
            known->store = NULL;
            return;
        }
    }
    file->store = load_store(index, file->number);
}

/* REQUIRES: the mutex. */
static void
list_again(gd_spare_index *index, int64_t now)
{
    void *items;
    size_t count;
    gd_status s = gd_list(index->env, index->root, GD_DIR_SPARES, &spares,
                          &items, &count, NULL);
    if (s != GD_OK && s != GD_NOTFOUND) {
        return; /* keep what is known */
    }
    spare_file *files = items;
    for (size_t i = 0; i < count; i++) {
        learn_file(index, &files[i]);
    }
    free_files(index->env, index->files, index->count);
    index->files = files;
    index->count = count;
    index->listed = true;
    index->listed_at = now;
}

/* ---- finding ---- */

/* Only a lack of memory is an error: a copy that cannot be read does not
 * count. */
static gd_status
search(const gd_spare_index *index, const gd_fingerprint *fp,
       gd_spare_try try, void *arg, bool *found, gd_error *err)
{
    for (size_t i = 0; i < index->count; i++) {
        const spare_file *file = &index->files[i];
        uint32_t probe = 0, slot;
        while (file->store != NULL &&
               gd_fptable_find(file->store, fp, &probe, &slot)) {
            gd_status s = try(arg, file->number, slot, found, err);
            if (*found || s == GD_NOMEM) {
                return s;
            }
        }
    }
    return GD_OK;
}

gd_status
gd_spare_index_find(gd_spare_index *index, const gd_fingerprint *fp,
                    gd_spare_try try, void *arg, bool *found, gd_error *err)
{
    gd_status s = GD_OK;
    *found = false;
    pthread_mutex_lock(&index->mutex);
    if (index->listed) {
        s = search(index, fp, try, arg, found, err);
    }
    /* The maintainer may have written new copies.  But a disk full of
     * damage must not make every damaged block list the directory. */
    int64_t now = index->env->now(index->env);
    if (s == GD_OK && !*found && (!index->listed || index->listed_at != now)) {
        list_again(index, now);
        s = search(index, fp, try, arg, found, err);
    }
    pthread_mutex_unlock(&index->mutex);
    return s;
}
