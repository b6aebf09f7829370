/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grouphead.h - the fixed header of a block group's file, and the two published
 * records behind it (format.rst, "Block groups").
 */
#ifndef GD_GROUPHEAD_H
#define GD_GROUPHEAD_H

#include "engine/format/fingerprint.h"
#include "engine/format/fptable.h"
#include "engine/format/params.h"

enum {
    GD_GROUP_HEAD = 512,      /* bytes; the first record follows */
    GD_PUBLISHED_RECORD = 512,
    GD_GROUP_POISONED = 1, /* flags of a record */
    /* A rename put this file in another's place, and may not be durable: a
     * crash may bring the other back.  Both have the same blocks at the same
     * addresses.  So nothing is appended, freed or marked until groups/ was
     * fsynced (gd_group_sync_rename). */
    GD_GROUP_UNSETTLED = 2,
};

typedef struct gd_group_head {
    uint16_t major, minor;
    uint32_t number;
    uint8_t repository_id[GD_ID_SIZE];
    gd_scope scope; /* of all its fingerprints */
    gd_entry_bounds bounds;
    char digest[GD_DIGEST_NAME];
    uint8_t identity[GD_ID_SIZE];  /* random */
    uint8_t object_id[GD_ID_SIZE]; /* of a cold group's object */
} gd_group_head;

/* The record of the part of the group that others can see. */
typedef struct gd_published {
    uint64_t sequence;
    uint64_t generation; /* random: no two states of the entries share one */
    uint32_t count; /* entries below it are durable */
    uint32_t flags;
    uint64_t end; /* end of the last segment at the sync point; more may
                   * follow */
    uint8_t codec, level; /* of the last recompression, done or found to gain
                           * nothing; zeros: as stored */
    bool similar; /* this was in the order of similarity */
    uint32_t covered; /* the slots below it were recompressed like this; later
                       * ones are as stored */
} gd_published;

/* Writes all but the reserved bytes, and then the checksum, which is the seed
 * of the next one: *value gets it, too. */
void gd_group_head_encode(gd_group_head *value, uint8_t out[GD_GROUP_HEAD]);
/* GD_VERSION and GD_CORRUPT, which call the file name, unless it is the header
 * of the group of this number. */
gd_status gd_group_head_decode(const uint8_t in[GD_GROUP_HEAD],
                               const gd_params *params, uint32_t number,
                               const char *name, gd_group_head *value,
                               gd_error *err);
/* Changes version and object of a header that was verified, and nothing else.
 * A major version of 0 leaves them as they are. */
void gd_group_head_change(uint8_t raw[GD_GROUP_HEAD], uint16_t major,
                          const uint8_t object_id[GD_ID_SIZE],
                          gd_group_head *value);

void gd_published_encode(const gd_published *value,
                         const gd_entry_bounds *bounds,
                         uint8_t out[GD_PUBLISHED_RECORD]);
/* False unless it is a record of the group with these bounds. */
bool gd_published_decode(const uint8_t in[GD_PUBLISHED_RECORD],
                         const gd_entry_bounds *bounds, gd_published *value);

#endif
