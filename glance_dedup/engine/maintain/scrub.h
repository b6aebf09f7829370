/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.h - reads what is stored and judges it, before anybody asks for it.
 *
 * A block is damaged if it cannot be had verified, by its checksum and by its
 * fingerprint, on two readings: the second opens the group's file anew and reads
 * the entry again, since the group may have been rewritten, or the block freed,
 * in the meantime.  Takes no lock, and changes nothing.
 *
 * The page cache hides what has become of the disk below it; so it is asked to
 * forget each segment first.  It keeps what is dirty, or mapped by somebody.
 */
#ifndef GD_SCRUB_H
#define GD_SCRUB_H

#include "engine/handle/repo.h"

typedef struct gd_scrub_result {
    uint64_t bytes;    /* read */
    uint8_t *verdicts; /* of each slot; the caller releases it */
} gd_scrub_result;

typedef enum gd_verdict {
    GD_VERDICT_NONE = 0, /* no live entry: there is nothing to judge */
    GD_VERDICT_GOOD = 1,
    GD_VERDICT_WORN = 2, /* good, but not all of its segment's bytes are */
    GD_VERDICT_DAMAGED = 3,
    GD_VERDICT_INVALID = 4, /* its entry does not verify */
} gd_verdict;

/* Judges slots [first, first + count), each segment once and in the order of
 * the disk.  GD_NOTFOUND if there is no such group; GD_CORRUPT if its header
 * does not verify, or it has not so many slots.  Memory: that of the entries,
 * and of one segment. */
gd_status gd_scrub(gd_repo *repo, uint32_t number, uint32_t first,
                   uint32_t count, gd_scrub_result *result, gd_error *err);

#endif
