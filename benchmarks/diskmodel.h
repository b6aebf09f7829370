/* SPDX-License-Identifier: Apache-2.0 */
/*
 * diskmodel.h - requests to a disk with a head, caused by a program's reads and
 * writes, which a quick disk, or a virtual one, hides.
 *
 * The model has a page cache, empty at first and without bounds, so that what
 * was read or written once is not read again, and what is written waits until it
 * is flushed.  Each run of neighbouring pages that must be read or written then
 * is a request; one that does not begin where the last ended is a seek: a near
 * one, if it stays within the same file and a group's length, else a far one.  A
 * file lies in one piece, at a place of its own.
 *
 * A sync writes the file's dirty pages, and then the file system's journal,
 * which is a file like others.  Thread-safe: all threads have the one head.
 */
#ifndef GD_BENCH_DISKMODEL_H
#define GD_BENCH_DISKMODEL_H

#include <stdint.h>

enum {
    DM_PAGE = 4096,
    DM_NEAR = 256 << 20, /* bytes: the longest group, and its store */
};

typedef struct dm_counts {
    uint64_t requests, near_seeks, far_seeks, bytes;
} dm_counts;

typedef struct dm_disk dm_disk;

/* Ends the program where there is no memory, as all of these do. */
dm_disk *dm_open(void);
void dm_close(dm_disk *disk);

/* file: a number that distinguishes files; 0 is the journal. */
void dm_read(dm_disk *disk, uint64_t file, uint64_t offset, uint64_t length);
void dm_write(dm_disk *disk, uint64_t file, uint64_t offset, uint64_t length);
/* Writes the dirty pages of the range. */
void dm_flush(dm_disk *disk, uint64_t file, uint64_t offset, uint64_t length);
void dm_sync(dm_disk *disk, uint64_t file);
/* Forgets what lies behind the file's new end. */
void dm_cut(dm_disk *disk, uint64_t file, uint64_t length);

dm_counts dm_get_counts(dm_disk *disk);

#endif
