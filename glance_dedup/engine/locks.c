/*
 * locks.c - see locks.h; which byte means what is in format.rst, "Locks".
 */
#include "locks.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "coding.h"
#include "groupmap.h"
#include "names.h"

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

struct gd_locks {
    const gd_env *env;
    int fd;
    pthread_mutex_t mutex; /* guards the maps, and lock calls with them */
    gd_groupmap shared;    /* users of the shared lock in this process */
    gd_groupmap leased;    /* 1: a transaction of this process has it */
};

gd_status
gd_locks_open(const gd_env *env, int root, gd_locks **out, gd_error *err)
{
    gd_locks *locks = gd_calloc(env, 1, sizeof *locks, err);
    if (locks == NULL) {
        return GD_NOMEM;
    }
    locks->env = env;
    gd_status s = gd_open(env, root, GD_FILE_GROUP_LOCKS, O_RDWR, 0,
                          &locks->fd, err);
    if (s != GD_OK) {
        env->release(env, locks);
        return s;
    }
    pthread_mutex_init(&locks->mutex, NULL);
    gd_groupmap_init(&locks->shared, env);
    gd_groupmap_init(&locks->leased, env);
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
    env->release(env, locks);
}

/* GD_BUSY stays without words: it is an ordinary answer. */
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

/* GD_BUSY if the collector waits for the group.  Asked also where this process
 * has the shared lock already: else the transactions of one busy process, each
 * begun before the last has ended, would keep the collector out for ever. */
static gd_status
look_for_intent(gd_locks *locks, uint32_t group, gd_error *err)
{
    gd_status s = try_byte(locks, intent_byte(group), F_RDLCK, err);
    if (s == GD_OK) {
        drop_byte(locks, intent_byte(group));
    }
    return s;
}

gd_status
gd_locks_share(gd_locks *locks, uint32_t group, gd_error *err)
{
    gd_status s = GD_OK;
    pthread_mutex_lock(&locks->mutex);
    uint32_t *users = gd_groupmap_at(&locks->shared, group, err);
    if (users == NULL) {
        s = GD_NOMEM;
    } else {
        s = look_for_intent(locks, group, err);
    }
    if (s == GD_OK && *users == 0) {
        s = try_byte(locks, share_byte(group), F_RDLCK, err);
    }
    if (s == GD_OK) {
        ++*users;
    }
    pthread_mutex_unlock(&locks->mutex);
    return s;
}

void
gd_locks_unshare(gd_locks *locks, uint32_t group)
{
    pthread_mutex_lock(&locks->mutex);
    /* The group is in the map since it was shared: nothing is allocated. */
    uint32_t *users = gd_groupmap_at(&locks->shared, group, NULL);
    if (users != NULL && *users > 0 && --*users == 0) {
        drop_byte(locks, share_byte(group));
    }
    pthread_mutex_unlock(&locks->mutex);
}

gd_status
gd_locks_lease(gd_locks *locks, uint32_t group, gd_error *err)
{
    gd_status s;
    pthread_mutex_lock(&locks->mutex);
    uint32_t *taken = gd_groupmap_at(&locks->leased, group, err);
    if (taken == NULL) {
        s = GD_NOMEM;
    } else if (*taken != 0) {
        s = GD_BUSY;
    } else {
        s = try_byte(locks, lease_byte(group), F_WRLCK, err);
        *taken = s == GD_OK;
    }
    pthread_mutex_unlock(&locks->mutex);
    return s;
}

void
gd_locks_unlease(gd_locks *locks, uint32_t group)
{
    pthread_mutex_lock(&locks->mutex);
    uint32_t *taken = gd_groupmap_at(&locks->leased, group, NULL);
    if (taken != NULL && *taken != 0) {
        *taken = 0;
        drop_byte(locks, lease_byte(group));
    }
    pthread_mutex_unlock(&locks->mutex);
}

/* Each caller opens the file anew: so the lock keeps the threads of one
 * process apart as it does processes. */
gd_status
gd_image_lock(const gd_env *env, int root, const char *image_id,
              unsigned timeout_ms, int *fd, gd_error *err)
{
    enum { STEP_MS = 5 };
    uint64_t byte = gd_checksum(image_id, strlen(image_id), 0) >> 2;
    gd_status s = gd_open(env, root, GD_FILE_IMAGE_LOCKS, O_RDWR, 0, fd, err);
    if (s != GD_OK) {
        return s;
    }
    for (unsigned waited = 0;; waited += STEP_MS) {
        int rc = env->lock(env, *fd, byte, F_WRLCK);
        if (rc >= 0) {
            return GD_OK;
        }
        if (rc != -EAGAIN && rc != -EINTR) {
            s = gd_fail_errno(err, -rc, "cannot lock image %s", image_id);
            break;
        }
        if (waited >= timeout_ms) {
            s = gd_fail(err, GD_BUSY,
                        "image %s is being deleted or merged by another "
                        "process for more than %u ms; try again",
                        image_id, timeout_ms);
            break;
        }
        env->sleep_ms(env, STEP_MS);
    }
    env->close(env, *fd);
    *fd = -1;
    return s;
}

void
gd_image_unlock(const gd_env *env, int fd)
{
    env->close(env, fd);
}
