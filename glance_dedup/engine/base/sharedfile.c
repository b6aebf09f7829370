/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sharedfile.c - opening or making a file of shared memory.
 *
 * One creator at a time works on PATH.new, holding its creation lock.  That is
 * an OFD lock, which dies with the process: the next creator takes over the
 * file of a dead one.  The creator checks again whether PATH is good by now,
 * and if not, renames PATH.new to it.  So if many processes start at once, one
 * makes the file and the others open it.  A crash leaves at most one extra
 * file, which the next creator uses.
 */
#include "engine/base/sharedfile.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

enum {
    /* The wait for another process that makes the file: 5 seconds. */
    OPEN_TRIES = 500,
    OPEN_WAIT_MS = 10,
};

/* The state of one gd_sharedfile_open. */
typedef struct opening {
    const gd_env *env;
    const char *path;
    char *temporary; /* path with ".new" after it */
    const uint8_t *head;
    size_t head_len;
    uint64_t size;
} opening;

/* Nobody else may write to a mapped file: by truncating it they could kill us.
 * The file must not have a second name either, since it could serve another
 * purpose. */
static bool
is_private(const gd_env *env, const struct stat *st)
{
    return S_ISREG(st->st_mode) && st->st_nlink <= 1 &&
           st->st_uid == env->geteuid(env) &&
           (st->st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

/* Finds out whether the open file can be used. */
static gd_status
examine(const opening *o, int fd, bool *good, gd_error *err)
{
    struct stat st;
    uint8_t head[GD_SHAREDFILE_HEAD];
    *good = false;
    int rc = o->env->fstat(o->env, fd, &st);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot stat %s", o->path);
    }
    bool full = (uint64_t)st.st_size == o->size &&
                (uint64_t)st.st_blocks * 512 >= o->size;
    if (!is_private(o->env, &st) || !full) {
        return GD_OK;
    }
    gd_status s =
        gd_read_full(o->env, fd, head, o->head_len, 0, o->path, err);
    if (s != GD_OK) {
        return s == GD_CORRUPT ? GD_OK : s; /* it was truncated just now */
    }
    *good = memcmp(head, o->head, o->head_len) == 0;
    return GD_OK;
}

static bool
may_be_replaced(const gd_error *why)
{
    return why->status == GD_NOTFOUND || why->status == GD_DENIED ||
           why->sys_errno == ELOOP || why->sys_errno == ENXIO;
}

/* *fd is -1 if there is no file, or none that can be used. */
static gd_status
open_existing(const opening *o, int *fd, gd_error *err)
{
    gd_error why;
    bool good;
    gd_status s = gd_open(o->env, AT_FDCWD, o->path, O_RDWR, 0, fd, &why);
    if (s != GD_OK) {
        if (may_be_replaced(&why)) {
            return GD_OK;
        }
        return gd_fail_errno(err, why.sys_errno, "cannot open %s", o->path);
    }
    s = examine(o, *fd, &good, err);
    if (s != GD_OK || !good) {
        o->env->close(o->env, *fd);
        *fd = -1;
    }
    return s;
}

/* Allocates in pieces.  On a signal tmpfs gives up and undoes the call, so with
 * a timer running one large call might never end. */
static gd_status
allocate(const opening *o, int fd, gd_error *err)
{
    enum { PIECE = 8 << 20 };
    for (uint64_t offset = 0; offset < o->size;) {
        uint64_t left = o->size - offset;
        uint64_t length = left < PIECE ? left : PIECE;
        int rc = o->env->fallocate(o->env, fd, offset, length);
        if (rc == -EINTR) {
            continue;
        }
        if (rc < 0) {
            return gd_fail_errno(err, -rc,
                                 "cannot allocate %llu bytes for %s",
                                 (unsigned long long)o->size, o->path);
        }
        offset += length;
    }
    return GD_OK;
}

/* REQUIRES: the creation lock of the temporary file, open as fd.  The file may
 * contain anything: a creator may have died while making it. */
static gd_status
fill_and_rename(const opening *o, int fd, gd_error *err)
{
    int rc = o->env->ftruncate(o->env, fd, 0);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot truncate %s", o->temporary);
    }
    GD_TRY(allocate(o, fd, err));
    GD_TRY(gd_write_full(o->env, fd, o->head, o->head_len, 0, o->temporary,
                         err));
    rc = o->env->renameat(o->env, AT_FDCWD, o->temporary, o->path);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot rename %s to %s", o->temporary,
                             o->path);
    }
    return GD_OK;
}

/* Removes something in the temporary file's place that is not ours. */
static gd_status
clear_temporary(const opening *o, gd_error *err)
{
    int rc = o->env->unlinkat(o->env, AT_FDCWD, o->temporary);
    if (rc < 0 && rc != -ENOENT) {
        return gd_fail_errno(err, -rc, "cannot remove %s", o->temporary);
    }
    return GD_OK;
}

/* *fd is -1 if another creator has the lock, or something had to be cleared
 * away first: then try again. */
static gd_status
lock_temporary(const opening *o, int *fd, gd_error *err)
{
    gd_error why;
    struct stat st;
    gd_status s = gd_open(o->env, AT_FDCWD, o->temporary,
                          O_RDWR | O_CREAT, 0600, fd, &why);
    if (s != GD_OK) {
        if (why.sys_errno == ELOOP) {
            return clear_temporary(o, err);
        }
        return gd_fail_errno(err, why.sys_errno, "cannot make %s",
                             o->temporary);
    }
    bool ours = o->env->fstat(o->env, *fd, &st) == 0 &&
                is_private(o->env, &st);
    if (ours &&
        o->env->lock(o->env, *fd, GD_SHAREDFILE_CREATION_LOCK, F_WRLCK) == 0 &&
        gd_same_file(o->env, *fd, AT_FDCWD, o->temporary)) {
        return GD_OK;
    }
    o->env->close(o->env, *fd);
    *fd = -1;
    return ours ? GD_OK : clear_temporary(o, err);
}

/* REQUIRES: the creation lock of the temporary file, open as *fd.  On return
 * *fd is the file to use instead, or -1 after a failure. */
static gd_status
create_locked(const opening *o, int *fd, gd_error *err)
{
    int existing;
    gd_status s = open_existing(o, &existing, err);
    if (s == GD_OK && existing < 0) {
        s = fill_and_rename(o, *fd, err);
        if (s == GD_OK) {
            /* Closing would not release it: a child forked meanwhile has a copy
             * of the descriptor. */
            o->env->lock(o->env, *fd, GD_SHAREDFILE_CREATION_LOCK, F_UNLCK);
            return GD_OK;
        }
    }
    /* Unlink before unlocking: until then, no other creator's file can have the
     * name. */
    o->env->unlinkat(o->env, AT_FDCWD, o->temporary);
    o->env->lock(o->env, *fd, GD_SHAREDFILE_CREATION_LOCK, F_UNLCK);
    o->env->close(o->env, *fd);
    *fd = existing;
    return s;
}

static gd_status
open_or_create(const opening *o, int *fd, gd_error *err)
{
    for (unsigned i = 0; i < OPEN_TRIES; i++) {
        gd_status s = open_existing(o, fd, err);
        if (s != GD_OK || *fd >= 0) {
            return s;
        }
        s = lock_temporary(o, fd, err);
        if (s != GD_OK) {
            return s;
        }
        if (*fd >= 0) {
            return create_locked(o, fd, err);
        }
        o->env->sleep_ms(o->env, OPEN_WAIT_MS);
    }
    return gd_fail(err, GD_BUSY,
                   "another process has been making %s for %d seconds",
                   o->path, OPEN_TRIES * OPEN_WAIT_MS / 1000);
}

gd_status
gd_sharedfile_open(const gd_env *env, const char *path, const uint8_t *head,
                   size_t head_len, uint64_t size, int *fd, gd_error *err)
{
    *fd = -1;
    size_t room = strlen(path) + sizeof ".new";
    opening o = {
        .env = env,
        .path = path,
        .temporary = gd_calloc(env, room, 1, err),
        .head = head,
        .head_len = head_len,
        .size = size,
    };
    if (o.temporary == NULL) {
        return GD_NOMEM;
    }
    snprintf(o.temporary, room, "%s.new", path);
    gd_status s = open_or_create(&o, fd, err);
    env->release(env, o.temporary);
    return s;
}
