/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sharedfile.h - a file that processes of one user map as shared memory.
 *
 * Such a file is used if and only if
 * (1) it is a regular file (no symbolic link) of the effective user, and
 *     nobody else may write to it: by truncating it they could kill us;
 * (2) it has exactly the size asked for, and no holes, so that no store into
 *     the mapping can fault for want of space (I10);
 * (3) it begins with exactly the bytes asked for.
 * Any other file of that name is replaced, and its contents are lost.  A
 * process that has the old file mapped keeps its mapping.
 */
#ifndef GD_SHAREDFILE_H
#define GD_SHAREDFILE_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"

enum {
    GD_SHAREDFILE_HEAD = 256,
    /* The byte of PATH.new that carries the creation lock.  Byte 0 is left to
     * the users of the file, since the rename does not change which file it
     * is. */
    GD_SHAREDFILE_CREATION_LOCK = 1,
};

/* Opens the file, or creates it: head, then zeros.  head_len is at most
 * GD_SHAREDFILE_HEAD and size.  The head must not change while the file is in
 * use.  GD_NOSPACE when there is no space for it; then nothing is left behind,
 * not even a temporary file.  GD_BUSY when another process has been creating it
 * for seconds.  GD_DENIED when the file belongs to somebody else and may not be
 * replaced. */
gd_status gd_sharedfile_open(const gd_env *env, const char *path,
                             const uint8_t *head, size_t head_len,
                             uint64_t size, int *fd, gd_error *err);

#endif
