/* SPDX-License-Identifier: Apache-2.0 */
/*
 * locks.h - the kernel locks by which processes and hosts coordinate.
 *
 * All are OFD byte locks.  They belong to the open file, so they vanish with
 * their process, and closing another descriptor never drops them.  A lock
 * belongs to the whole process's handle, so it is counted here: two
 * transactions of one process share the group lock of a group, and the last one
 * to leave releases it.
 *
 * Nothing here waits except gd_locks_lock_image (N9.1) and
 * gd_locks_lock_names.  All functions are thread-safe.
 */
#ifndef GD_LOCKS_H
#define GD_LOCKS_H

#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/groupmap.h"
#include "engine/base/status.h"

/* Lock bytes on a recipe's inode (N3), and on a group's (gd_group_hold).  A new
 * group is a file of the spool, where others try its byte 0. */
enum {
    GD_BYTE_WRITER = 0,
    GD_BYTE_USERS = 1,
    GD_BYTE_LESSEE = 2,
};

typedef struct gd_locks gd_locks;

gd_status gd_locks_open(const gd_env *env, int root, gd_locks **locks,
                        gd_error *err);
/* Closes the lock file, which releases everything. */
void gd_locks_close(gd_locks *locks);

/* The shared group lock (I6): the transaction's recipe will name blocks of this
 * group.  Returns GD_BUSY and leaves `*err` untouched if the collector is
 * working in the group or has announced its intent; the caller counts that as a
 * miss. */
gd_status gd_locks_lock_shared(gd_locks *locks, uint32_t group, gd_error *err);
void gd_locks_unlock_shared(gd_locks *locks, uint32_t group);
/* The same for a caller that shares many groups, each once.  The groups are
 * those whose count in the map is not 0. */
gd_status gd_locks_lock_shared_once(gd_locks *locks, gd_groupmap *held,
                                    uint32_t group, gd_error *err);
/* Gives up each group's lock as often as the map counts, and frees the map. */
void gd_locks_unlock_all_shared(gd_locks *locks, gd_groupmap *held);

/* The exclusive group lock, for the collector only (N6.1).  Returns GD_BUSY and
 * leaves `*err` untouched if anyone shares the group, in this process too.
 * While it is held, sharing is GD_BUSY.  gd_locks_unlock_exclusive releases
 * it. */
gd_status gd_locks_lock_exclusive(gd_locks *locks, uint32_t group,
                                  gd_error *err);
void gd_locks_unlock_exclusive(gd_locks *locks, uint32_t group);

/* The collector's intent: while it is announced, nobody gets a new shared lock
 * of the group.  Returns GD_BUSY and leaves `*err` untouched if another
 * collector has announced its intent, or a process is checking for one at this
 * moment. */
gd_status gd_locks_announce(gd_locks *locks, uint32_t group, gd_error *err);
void gd_locks_withdraw(gd_locks *locks, uint32_t group);
void gd_locks_withdraw_all(gd_locks *locks);
/* Returns GD_BUSY and leaves `*err` untouched if a collector of any process has
 * announced its intent: a rewrite of the group makes way.  Returns GD_OK while
 * this process's collector is at work in the group. */
gd_status gd_locks_require_no_intent(gd_locks *locks, uint32_t group,
                                     gd_error *err);

/* The lease (I4): only its holder appends.  Returns GD_BUSY and leaves `*err`
 * untouched if any process has it, including this one. */
gd_status gd_locks_lease(gd_locks *locks, uint32_t group, gd_error *err);
void gd_locks_unlease(gd_locks *locks, uint32_t group);
/* Asks for a lease again that this process took, and for the exclusive lock if
 * it has that, too.  Returns GD_BUSY and leaves `*err` untouched if another
 * process has a lock now that keeps us out: then the server dropped this one's.
 * Otherwise they are held after the call, but they may have been lost
 * before. */
gd_status gd_locks_revalidate(gd_locks *locks, uint32_t group, gd_error *err);

/* The feature bytes (N15.2).  A handle shares the byte of how many features of
 * the format its program knows.
 *
 * Shares that byte until the handle is closed.  GD_BUSY, with `*err` untouched:
 * a feature is being set that the program does not know. */
gd_status gd_locks_lock_features_shared(gd_locks *locks, uint32_t known,
                                        gd_error *err);
/* Takes the bytes of all programs that do not know a feature exclusively, until
 * gd_locks_unlock_features_exclusive.  Returns GD_BUSY, with `*err` untouched,
 * and nothing is held, if such a program has the repository open, or a process
 * sets a feature. */
gd_status gd_locks_lock_features_exclusive(gd_locks *locks, uint32_t feature,
                                           gd_error *err);
void gd_locks_unlock_features_exclusive(gd_locks *locks, uint32_t feature);

/* The image lock, for deletes and merges only.  Waits up to timeout_ms, then
 * returns GD_BUSY with a message.  *fd is the lock: gd_locks_unlock_image
 * closes it. */
gd_status gd_locks_lock_image(const gd_env *env, int root,
                              const char *image_id,
                              unsigned timeout_ms, int *fd, gd_error *err);
void gd_locks_unlock_image(const gd_env *env, int fd);

/* Guards volume names: exclusive to rename, shared to look up by id
 * (repository/volumes.py).  Waits up to timeout_ms, then returns GD_BUSY with a
 * message.  *fd is the lock: closing it releases it. */
gd_status gd_locks_lock_names(const gd_env *env, int root, unsigned timeout_ms,
                              int *fd, gd_error *err);

/* Makes the caller the one maintainer.  *fd is the lock: closing it releases
 * it.  The lock file is created if missing.  Returns GD_BUSY and leaves `*err`
 * untouched if there is a maintainer already. */
gd_status gd_locks_lock_maintainer(const gd_env *env, int root, int *fd,
                                   gd_error *err);
/* Asks for that lock again, as gd_locks_revalidate does. */
gd_status gd_locks_revalidate_maintainer(const gd_env *env, int fd,
                                         gd_error *err);

#endif
