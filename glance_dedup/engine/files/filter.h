/* SPDX-License-Identifier: Apache-2.0 */
/*
 * filter.h - the fingerprint filter: a host's shared-memory index from
 * fingerprint bits to addresses.
 *
 * Its entries are only hints.  A wrong hint costs a compare; a lost one, a
 * duplicate stored twice until merging finds it.  So nothing here is ever
 * fsynced, and the file lies on tmpfs, never in the repository.
 *
 * Layout: four pages of header, then buckets of eight 64-bit words (a cache
 * line).  A hint is one word: 4 bits for the number of zero bits at the end of
 * its fingerprint's sampling part (at most 15), 20 bits of tag, 25 bits of
 * group, 15 bits of slot.  Group 0 is never used, so a hint is never 0, and 0
 * is a free place.
 *
 * The sampling level L is the number of zero bits that a fingerprint must have
 * to be kept: at level L, 1 of 2^L fingerprints has a hint.  A word below the
 * level counts as a free place, so one atomic store that raises the level
 * halves the filter.  A hint lies in one of its two candidate buckets.  All
 * words are read and changed with atomics, across processes.
 *
 * The file is fully allocated before it is mapped, so that no store into it
 * can fault (I10).
 */
#ifndef GD_FILTER_H
#define GD_FILTER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/files/self_published.h"
#include "engine/format/address.h"
#include "engine/format/fingerprint.h"
#include "engine/format/position.h"

enum {
    GD_FILTER_MIN_BYTES = 65536,
    GD_FILTER_MAX_LEVEL = 15,
    GD_FILTER_CANDIDATES = 16, /* two buckets of eight words */
};

typedef struct gd_filter gd_filter;

/* The last scan of the groups.  Moments are those of env's monotonic_ns; 0 if
 * there was none since the host was started. */
typedef struct gd_look {
    int64_t ended_ns;  /* that found nothing more to read */
    int64_t listed_ns; /* that listed all groups */
    uint32_t behind;   /* groups that were left to read */
} gd_look;

typedef struct gd_filter_stats {
    uint64_t bytes;    /* of the file */
    uint64_t places;   /* words in it */
    uint64_t hints;    /* words at or above the level (counted, may lag) */
    uint64_t dropped;  /* hints lost because both buckets were full */
    unsigned level;
    uint32_t rebuilt;  /* the newest group that was read */
    bool complete;     /* the newest group was reached once */
    gd_look look;
} gd_filter_stats;

/* Opens the filter file at path, or creates it with budget bytes, rounded down
 * to whole buckets and the header page.  GD_INVALID below GD_FILTER_MIN_BYTES.
 * An existing filter of this repository keeps its size.  A new file replaces
 * one that has another version, belongs to another repository (repository_id,
 * 16 bytes), has a damaged header or is not private to this user (see
 * sharedfile.h).  GD_NOSPACE when the file system is full.  After any failure
 * the caller can go on without a filter. */
gd_status gd_filter_open(const gd_env *env, const char *path,
                         const uint8_t repository_id[16], uint64_t budget,
                         gd_filter **filter, gd_error *err);
/* Unmaps and closes; the file stays.  Safe in a child after fork too: the child
 * has its own mapping and descriptor. */
void gd_filter_close(const gd_env *env, gd_filter *filter);

/* Returns whether nobody uses the filter that is open as fd.  With unfinished,
 * whether nobody is creating it.  After true, nobody can begin to until fd is
 * closed.  False also if the file cannot be locked. */
bool gd_filter_take_unused(const gd_env *env, int fd, bool unfinished);

/* Prefetches the memory that a look-up or an insertion of this fingerprint
 * needs: two cache lines that are hardly ever in the cache. */
void gd_filter_prefetch(const gd_filter *filter, const gd_fingerprint *fp);
/* Finds up to GD_FILTER_CANDIDATES addresses whose tag agrees, and returns
 * their number.  Returns 0 at once for a fingerprint below the sampling
 * level. */
size_t gd_filter_lookup(const gd_filter *filter, const gd_fingerprint *fp,
                        gd_address out[GD_FILTER_CANDIDATES]);
/* Adds a hint if the level keeps it; the same hint is not kept twice.  When the
 * filter is more than 7/8 full, raises the level by one. */
void gd_filter_insert(gd_filter *filter, const gd_fingerprint *fp,
                      gd_address address);
/* Removes a hint that was found to mismatch, if it is still this one
 * (compare-and-swap). */
void gd_filter_remove(gd_filter *filter, const gd_fingerprint *fp,
                      gd_address address);

/* Following the groups: one process per host at a time holds the lock, an OFD
 * lock on the file's byte 0; false if another process has it. */
bool gd_filter_rebuild_lock(gd_filter *filter);
void gd_filter_rebuild_unlock(gd_filter *filter);
/* The position survives the process.  One that is damaged, for example since
 * its writer was killed, is read as zeros: all groups are read again.
 * REQUIRES: the rebuild lock, for all of them. */
void gd_filter_load(gd_filter *filter, gd_position *position);
void gd_filter_save(gd_filter *filter, const gd_position *position,
                    const gd_look *look);
/* Makes look-ups faster.  It takes some seconds for a GiB, so it is for the
 * process that rebuilt the filter. */
void gd_filter_settle(gd_filter *filter);
/* Empties the filter: level 0, a position of zeros.  Others may use the filter
 * meanwhile. */
void gd_filter_clear(gd_filter *filter);
/* Returns the groups that the host's processes have published themselves
 * (self_published.h). */
gd_self_published *gd_filter_own(gd_filter *filter);

void gd_filter_get_stats(const gd_filter *filter, gd_filter_stats *stats);

#endif
