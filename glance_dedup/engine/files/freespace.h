/* SPDX-License-Identifier: Apache-2.0 */
/*
 * freespace.h - room on the disk: storing stops before the disk is full, so
 * that deleting, accounting and collecting always have some.
 */
#ifndef GD_FREESPACE_H
#define GD_FREESPACE_H

#include <stdint.h>

#include "engine/base/env.h"

/* What storing leaves free of a file system of so many bytes: `reserve`, but
 * never more than a hundredth of it, so that a small one can be used. */
uint64_t gd_freespace_kept(uint64_t reserve, uint64_t total);

/* GD_NOSPACE if storing `bytes` more would leave less than what is kept of the
 * file system that the file or directory fd is on.  Where the system does not
 * say what is free, there is room.
 *
 * Who asks at the same time gets the same answer: with n writers it may be
 * n - 1 of their writes less. */
gd_status gd_freespace_check(const gd_env *env, int fd, uint64_t reserve,
                             uint64_t bytes, gd_error *err);

#endif
