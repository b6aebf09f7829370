/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.h - reads stored blocks and judges them, before anybody needs them.
 *
 * A block is damaged if two readings fail to verify it, by its checksum and, if
 * wanted, by its fingerprint.  The second reading opens the group's file and reads the
 * entry again, since the group may have been rewritten, or the block freed, in
 * the meantime.  Takes no lock, and changes nothing.
 *
 * Segments are read as the disk has them (diskwindow.h), and judged by all of
 * the handle's threads.
 */
#ifndef GD_SCRUB_H
#define GD_SCRUB_H

#include "engine/repo/repo.h"

typedef struct gd_scrub_result {
    uint64_t bytes;    /* read */
    uint8_t *verdicts; /* of each slot; the caller releases it */
} gd_scrub_result;

typedef enum gd_verdict {
    GD_VERDICT_NONE = 0, /* no live entry, so nothing to judge */
    GD_VERDICT_GOOD = 1,
    GD_VERDICT_WORN = 2, /* good, but some other bytes of its segment are not */
    GD_VERDICT_DAMAGED = 3,
    GD_VERDICT_INVALID = 4, /* its entry does not verify */
} gd_verdict;

/* Choice of the blocks that are read.  Of the others only the entries are
 * judged. */
typedef struct gd_scrub_extent {
    uint64_t begin, end; /* their segments begin there */
} gd_scrub_extent;

#define GD_SCRUB_ALL ((gd_scrub_extent){0, UINT64_MAX})

/* Judges slots [first, first + count), each segment once and in disk order.
 * GD_NOTFOUND if there is no such group; GD_CORRUPT if its header does not
 * verify or it has fewer slots; GD_UNAVAILABLE if the object store does not give
 * a cold group's blocks: then none is judged.  If not hashed, only checksums are
 * compared, as readers do (I7).  Needs memory for the entries, two windows, and one segment
 * for each thread. */
gd_status gd_scrub(gd_repo *repo, uint32_t number, uint32_t first,
                   uint32_t count, bool hashed, gd_scrub_extent extent,
                   gd_scrub_result *result, gd_error *err);

#endif
