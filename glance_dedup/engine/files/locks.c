/* SPDX-License-Identifier: Apache-2.0 */
/*
 * locks.c - see locks.h.  The meaning of each byte is in format.rst, "Locks".
 */
#include "engine/files/locks.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "engine/base/coding.h"
#include "engine/files/file.h"
#include "engine/format/names.h"

static uint64_t
lease_byte(uint32_t group)
{
    return group;
}

static uint64_t
share_byte(uint32_t group)
{
    return (UINT64_C(1) << 32) + group;
}

static uint64_t
intent_byte(uint32_t group)
{
    return (UINT64_C(1) << 33) + group;
}

static uint64_t
feature_byte(uint32_t known)
{
    return (UINT64_C(1) << 35) + known;
}

struct gd_locks {
    const gd_env *env;
    int fd;
    pthread_mutex_t mutex; /* guards the maps, and the lock calls that go with
                            * them */
    gd_groupmap shared;    /* users of the shared lock in this process */
    gd_groupmap leased;    /* 1: someone in this process has it */
    gd_groupmap excluded;  /* 1: this process's collector is working in it */
    gd_groupmap announced; /* 1: it means to be */
};

/* A file of locks, which exists as long as its repository.  That it is missing
 * must not read as GD_NOTFOUND: to callers this means that an image is. */
static gd_status
open_lock_file(const gd_env *env, int root, const char *name, int *fd,
               gd_error *err)
{
    gd_status s = gd_file_open(env, root, name, O_RDWR, fd, err);
    if (s != GD_NOTFOUND) {
        return s;
    }
    return gd_fail(err, GD_IO, "%s is missing: stop every program that uses "
                   "the repository, and restore the file from a backup or "
                   "make an empty one", name);
}

gd_status
gd_locks_open(const gd_env *env, int root, gd_locks **out, gd_error *err)
{
    gd_locks *locks = gd_calloc(env, 1, sizeof *locks, err);
    if (locks == NULL) {
        return GD_NOMEM;
    }
    locks->env = env;
    gd_status s = open_lock_file(env, root, GD_FILE_GROUP_LOCKS, &locks->fd,
                                 err);
    if (s != GD_OK) {
        env->release(env, locks);
        return s;
    }
    pthread_mutex_init(&locks->mutex, NULL);
    gd_groupmap_init(&locks->shared, env);
    gd_groupmap_init(&locks->leased, env);
    gd_groupmap_init(&locks->excluded, env);
    gd_groupmap_init(&locks->announced, env);
    *out = locks;
    return GD_OK;
}

void
gd_locks_close(gd_locks *locks)
{
    const gd_env *env = locks->env;
    env->close(env, locks->fd);
    pthread_mutex_destroy(&locks->mutex);
    gd_groupmap_free(&locks->shared);
    gd_groupmap_free(&locks->leased);
    gd_groupmap_free(&locks->excluded);
    gd_groupmap_free(&locks->announced);
    env->release(env, locks);
}

/* GD_BUSY has no words: it is an ordinary answer. */
static gd_status
try_byte(gd_locks *locks, uint64_t byte, short type, gd_error *err)
{
    int rc = locks->env->lock(locks->env, locks->fd, byte, type);
    if (rc == -EAGAIN) {
        return GD_BUSY;
    }
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot lock byte %llu of %s",
                             (unsigned long long)byte, GD_FILE_GROUP_LOCKS);
    }
    return GD_OK;
}

static void
drop_byte(gd_locks *locks, uint64_t byte)
{
    (void)locks->env->lock(locks->env, locks->fd, byte, F_UNLCK);
}

/* GD_BUSY if the collector waits for the group.  Checked even if this process
 * has the shared lock already.  Otherwise the transactions of one busy process,
 * each begun before the last has ended, would keep the collector out for
 * ever. */
static gd_status
look_for_intent(gd_locks *locks, uint32_t group, gd_error *err)
{
    if (gd_groupmap_get(&locks->announced, group) != 0) {
        return GD_BUSY; /* asking the kernel would turn our own lock into a
                         * shared one, and then drop it */
    }
    GD_TRY(try_byte(locks, intent_byte(group), F_RDLCK, err));
    drop_byte(locks, intent_byte(group));
    return GD_OK;
}

gd_status
gd_locks_lock_shared(gd_locks *locks, uint32_t group, gd_error *err)
{
    gd_status s = GD_OK;
    pthread_mutex_lock(&locks->mutex);
    uint32_t *users = gd_groupmap_at(&locks->shared, group, err);
    if (users == NULL) {
        s = GD_NOMEM;
    } else if (gd_groupmap_get(&locks->excluded, group) != 0) {
        s = GD_BUSY; /* the kernel would let us in, and then others, too */
    } else {
        s = look_for_intent(locks, group, err);
    }
    /* Also if another transaction of this process has it: the server may have
     * dropped the lock since, and then this transaction would have none. */
    if (s == GD_OK) {
        s = try_byte(locks, share_byte(group), F_RDLCK, err);
    }
    if (s == GD_OK) {
        ++*users;
    }
    pthread_mutex_unlock(&locks->mutex);
    return s;
}

void
gd_locks_unlock_shared(gd_locks *locks, uint32_t group)
{
    pthread_mutex_lock(&locks->mutex);
    /* The group has been in the map since it was shared, so this allocates
     * nothing. */
    uint32_t *users = gd_groupmap_at(&locks->shared, group, NULL);
    if (users != NULL && *users > 0 && --*users == 0) {
        drop_byte(locks, share_byte(group));
    }
    pthread_mutex_unlock(&locks->mutex);
}

gd_status
gd_locks_lock_shared_once(gd_locks *locks, gd_groupmap *held, uint32_t group,
                          gd_error *err)
{
    uint32_t *count = gd_groupmap_at(held, group, err);
    if (count == NULL) {
        return GD_NOMEM;
    }
    if (*count == 0) {
        GD_TRY(gd_locks_lock_shared(locks, group, err));
    }
    *count = 1;
    return GD_OK;
}

void
gd_locks_unlock_all_shared(gd_locks *locks, gd_groupmap *held)
{
    for (size_t i = 0; i < held->places; i++) {
        for (uint32_t n = 0; n < held->items[i].count; n++) {
            gd_locks_unlock_shared(locks, held->items[i].group);
        }
    }
    gd_groupmap_free(held);
}

/* Takes an exclusive lock, and records it in the map. */
static gd_status
take_exclusive(gd_locks *locks, gd_groupmap *map, uint32_t group,
               uint64_t byte, gd_error *err)
{
    gd_status s = GD_BUSY;
    pthread_mutex_lock(&locks->mutex);
    uint32_t *taken = gd_groupmap_at(map, group, err);
    /* The shared lock belongs to this same open file.  The kernel would turn it
     * into an exclusive one, in spite of the transactions that rely on it. */
    bool used = byte == share_byte(group) &&
                gd_groupmap_get(&locks->shared, group) != 0;
    if (taken == NULL) {
        s = GD_NOMEM;
    } else if (*taken == 0 && !used) {
        s = try_byte(locks, byte, F_WRLCK, err);
        *taken = s == GD_OK;
    }
    pthread_mutex_unlock(&locks->mutex);
    return s;
}

static void
drop_exclusive(gd_locks *locks, gd_groupmap *map, uint32_t group,
               uint64_t byte)
{
    pthread_mutex_lock(&locks->mutex);
    if (gd_groupmap_get(map, group) != 0) {
        *gd_groupmap_at(map, group, NULL) = 0; /* it is there */
        drop_byte(locks, byte);
    }
    pthread_mutex_unlock(&locks->mutex);
}

gd_status
gd_locks_lock_exclusive(gd_locks *locks, uint32_t group, gd_error *err)
{
    return take_exclusive(locks, &locks->excluded, group, share_byte(group),
                          err);
}

void
gd_locks_unlock_exclusive(gd_locks *locks, uint32_t group)
{
    drop_exclusive(locks, &locks->excluded, group, share_byte(group));
}

gd_status
gd_locks_announce(gd_locks *locks, uint32_t group, gd_error *err)
{
    return take_exclusive(locks, &locks->announced, group, intent_byte(group),
                          err);
}

void
gd_locks_withdraw(gd_locks *locks, uint32_t group)
{
    drop_exclusive(locks, &locks->announced, group, intent_byte(group));
}

gd_status
gd_locks_require_no_intent(gd_locks *locks, uint32_t group, gd_error *err)
{
    pthread_mutex_lock(&locks->mutex);
    gd_status s = gd_groupmap_get(&locks->excluded, group) != 0
                      ? GD_OK
                      : look_for_intent(locks, group, err);
    pthread_mutex_unlock(&locks->mutex);
    return s;
}

void
gd_locks_withdraw_all(gd_locks *locks)
{
    pthread_mutex_lock(&locks->mutex);
    for (size_t i = 0; i < locks->announced.places; i++) {
        gd_groupmap_item *item = &locks->announced.items[i];
        if (item->count != 0) {
            item->count = 0;
            drop_byte(locks, intent_byte(item->group));
        }
    }
    pthread_mutex_unlock(&locks->mutex);
}

gd_status
gd_locks_lease(gd_locks *locks, uint32_t group, gd_error *err)
{
    return take_exclusive(locks, &locks->leased, group, lease_byte(group),
                          err);
}

void
gd_locks_unlease(gd_locks *locks, uint32_t group)
{
    drop_exclusive(locks, &locks->leased, group, lease_byte(group));
}

gd_status
gd_locks_revalidate(gd_locks *locks, uint32_t group, gd_error *err)
{
    /* To a kernel that knows that this open file has the locks, the calls
     * change nothing. */
    pthread_mutex_lock(&locks->mutex);
    gd_status s = try_byte(locks, lease_byte(group), F_WRLCK, err);
    if (s == GD_OK && gd_groupmap_get(&locks->excluded, group) != 0) {
        s = try_byte(locks, share_byte(group), F_WRLCK, err);
    }
    pthread_mutex_unlock(&locks->mutex);
    return s;
}

gd_status
gd_locks_lock_features_shared(gd_locks *locks, uint32_t known, gd_error *err)
{
    return try_byte(locks, feature_byte(known), F_RDLCK, err);
}

gd_status
gd_locks_lock_features_exclusive(gd_locks *locks, uint32_t feature,
                                 gd_error *err)
{
    for (uint32_t known = 0; known <= feature; known++) {
        gd_status s = try_byte(locks, feature_byte(known), F_WRLCK, err);
        if (s != GD_OK) {
            while (known > 0) {
                drop_byte(locks, feature_byte(--known));
            }
            return s;
        }
    }
    return GD_OK;
}

void
gd_locks_unlock_features_exclusive(gd_locks *locks, uint32_t feature)
{
    for (uint32_t known = 0; known <= feature; known++) {
        drop_byte(locks, feature_byte(known));
    }
}

/* Each caller opens the file itself, so the lock separates the threads of one
 * process as it separates processes. */
/* Waits for a byte of locks/images alone.  Returns a negative errno, and no
 * descriptor: -EAGAIN if others had it for so long. */
static int
wait_for_byte(const gd_env *env, uint64_t byte, unsigned timeout_ms, int *fd)
{
    enum { STEP_MS = 5 };
    int rc = env->lock(env, *fd, byte, F_WRLCK);
    for (unsigned waited = 0;
         (rc == -EAGAIN || rc == -EINTR) && waited < timeout_ms;
         waited += STEP_MS) {
        env->sleep_ms(env, STEP_MS);
        rc = env->lock(env, *fd, byte, F_WRLCK);
    }
    if (rc < 0) {
        env->close(env, *fd);
        *fd = -1;
    }
    return rc == -EINTR ? -EAGAIN : rc;
}

gd_status
gd_locks_lock_image(const gd_env *env, int root, const char *image_id,
                    unsigned timeout_ms, int *fd, gd_error *err)
{
    uint64_t byte = gd_checksum(image_id, strlen(image_id), 0) >> 2;
    GD_TRY(open_lock_file(env, root, GD_FILE_IMAGE_LOCKS, fd, err));
    int rc = wait_for_byte(env, byte, timeout_ms, fd);
    if (rc == -EAGAIN) {
        return gd_fail(err, GD_BUSY,
                       "image %s is being deleted or merged by another "
                       "process for more than %u ms; try again",
                       image_id, timeout_ms);
    }
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot lock image %s", image_id)
                  : GD_OK;
}

void
gd_locks_unlock_image(const gd_env *env, int fd)
{
    env->close(env, fd);
}

gd_status
gd_locks_lock_names(const gd_env *env, int root, unsigned timeout_ms, int *fd,
                    gd_error *err)
{
    const uint64_t names_byte = UINT64_C(1) << 62; /* images' are below it */
    GD_TRY(open_lock_file(env, root, GD_FILE_IMAGE_LOCKS, fd, err));
    int rc = wait_for_byte(env, names_byte, timeout_ms, fd);
    if (rc == -EAGAIN) {
        return gd_fail(err, GD_BUSY,
                       "other processes rename volumes, or look for one by its "
                       "id, for more than %u ms; try again", timeout_ms);
    }
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot lock the volumes' names")
                  : GD_OK;
}

enum { MAINTAINER_BYTE = 0 };

gd_status
gd_locks_revalidate_maintainer(const gd_env *env, int fd, gd_error *err)
{
    int rc = env->lock(env, fd, MAINTAINER_BYTE, F_WRLCK);
    return rc == -EAGAIN ? GD_BUSY
           : rc < 0      ? gd_fail_errno(err, -rc, "cannot lock %s",
                                         GD_FILE_MAINTAINER_LOCK)
                         : GD_OK;
}

gd_status
gd_locks_lock_maintainer(const gd_env *env, int root, int *fd, gd_error *err)
{
    GD_TRY(gd_file_open_or_create(env, root, GD_FILE_MAINTAINER_LOCK,
                                  fd, err));
    bool same = false;
    gd_status s = gd_locks_revalidate_maintainer(env, *fd, err);
    if (s == GD_OK) {
        s = gd_find_same(env, *fd, root, GD_FILE_MAINTAINER_LOCK, &same, err);
    }
    /* I4: if the file was replaced, there may be a second maintainer. */
    if (s == GD_OK && !same) {
        s = GD_BUSY;
    }
    if (s != GD_OK) {
        env->close(env, *fd);
        *fd = -1;
    }
    return s;
}
