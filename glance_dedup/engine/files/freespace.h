/* SPDX-License-Identifier: Apache-2.0 */
/*
 * freespace.h - room on the disk: storing stops before the disk is full, so
 * that deleting, accounting and collecting always have some.
 */
#ifndef GD_FREESPACE_H
#define GD_FREESPACE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/env.h"

/* Space that is not to be used up. */
typedef struct gd_freespace {
    uint64_t reserve; /* for what frees space; 0: nothing is kept at all */
    uint64_t moving;  /* for a group's new file, while it becomes cold */
} gd_freespace;

/* The bytes that storing leaves free on a file system of this size: `reserve`,
 * but at most a hundredth of the size, and `moving`, but at most a tenth.  So a
 * small file system can be used. */
uint64_t gd_freespace_kept(gd_freespace keep, uint64_t total);

/* GD_NOSPACE if storing `bytes` more would leave too little free on the file
 * system of the file or directory fd.  If the system does not report its free
 * space, there is room.  Callers at the same time get the same answer: with n
 * writers, up to n - 1 more of their writes may go below the limit. */
gd_status gd_freespace_check(const gd_env *env, int fd, gd_freespace keep,
                             uint64_t bytes, gd_error *err);

/* Gives up one of the files that are reserved for the catalog, when there is no
 * room for what frees space.  *next counts them, from 0.  False: there is none
 * left. */
bool gd_freespace_give_up(const gd_env *env, int root, unsigned *next);

#endif
