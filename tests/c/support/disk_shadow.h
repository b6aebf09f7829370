/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disk_shadow.h - separates the bytes of a repository's files that are on the
 * disk from those only in the page cache: so that a test can let the machine
 * crash.
 *
 * Sectors of 512 bytes that were written since a file's last sync are dirty. A
 * sync that succeeds makes them durable. A sync that fails makes them clean,
 * and they are not on the disk: as on Linux, where the pages that could not be
 * written are not dirty any more. So a later sync that succeeds does not store
 * them, unless they were written once more. After a crash each file has only
 * its durable bytes.
 *
 * A file is tracked from when it is first opened for writing; its content then
 * counts as durable. A hole is durable at once: that is the worst case for
 * code that needs the bytes. Names are not modelled: all stay. Files whose
 * path is absolute are left out; these are not the repository's.
 *
 * Not thread-safe: fault_env calls it under its mutex.
 */
#ifndef DISK_SHADOW_H
#define DISK_SHADOW_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { SHADOW_FILES = 512 };

typedef struct shadow_file {
    dev_t device;
    ino_t inode;
    int fd; /* our own, so that the inode's number is not used again */
    uint8_t *data;
    uint64_t length;
    uint8_t *dirty; /* one byte per sector */
    uint64_t sectors;
} shadow_file;

typedef struct shadow {
    shadow_file files[SHADOW_FILES];
    unsigned count;
} shadow;

/* A structure of zeros is an empty shadow. */
void shadow_free(shadow *s);

void shadow_opened(shadow *s, int fd, const char *path, int flags);
void shadow_written(shadow *s, int fd, uint64_t offset, uint64_t length);
void shadow_punched(shadow *s, int fd, uint64_t offset, uint64_t length);
void shadow_synced(shadow *s, int fd, bool good);
/* Gives every file the content that the disk has, and starts again. */
void shadow_crash(shadow *s);

#endif
