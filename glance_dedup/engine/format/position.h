/* SPDX-License-Identifier: Apache-2.0 */
/*
 * position.h - how far an index of hints knows the groups (hints.rst,
 * "Following").
 *
 * Groups above `newest` were never looked at.  Of those up to it, the ones in
 * `open` may grow: `published` of their entries were read.  The list has the
 * groups with the highest numbers among those that may grow.  If there are more
 * than it has room for, the lowest leave it, and `lost` is the highest that
 * did.  All others in (lost, newest] are sealed and read, as are all up to
 * `sealed`.  Those in (sealed, lost] are read again in turn, downwards; `turn`
 * is the next one.  sealed <= turn <= lost <= newest.
 *
 * As words, with bit 63 always 0:
 *
 *     0  newest; bit 32: complete, the newest group was once reached
 *     1  sealed; turn in the upper half
 *     2  lost; the length of the list in the upper half
 *     3  checksum of words 0 to 2 and of the list
 *     4  the list, sorted: 25 bits of group, 16 of published, 22 of identity
 *
 * A reader believes them if the checksum is right and all the conditions above
 * hold.  Otherwise it begins with a position of zeros.
 */
#ifndef GD_POSITION_H
#define GD_POSITION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    GD_OPEN_GROUPS = 1024,
    GD_POSITION_HEAD = 4, /* words before the list */
    GD_POSITION_WORDS = GD_POSITION_HEAD + GD_OPEN_GROUPS,
};

typedef struct gd_open_group {
    uint32_t group;
    uint32_t published; /* entries read */
    /* Bits of the group's seed: another one is another group (design.rst,
     * "Groups"). */
    uint32_t identity;
} gd_open_group;

typedef struct gd_position {
    uint32_t newest, sealed, turn, lost;
    bool complete;
    uint32_t count;
    gd_open_group open[GD_OPEN_GROUPS]; /* sorted by group */
} gd_position;

/* The identity of a group with this seed. */
uint32_t gd_position_identity(uint64_t seed);
/* Appends a group above all in the list; the list may lose its lowest. */
void gd_position_append(gd_position *position, gd_open_group group);
/* Inserts group `lost` in front of the list, if there is room. */
bool gd_position_prepend(gd_position *position, gd_open_group group);
void gd_position_remove(gd_position *position, uint32_t at);
/* Forgets all groups above `newest`. */
void gd_position_cut(gd_position *position, uint32_t newest);

/* Returns how many of the words are used. */
size_t gd_position_encode(const gd_position *position,
                          uint64_t words[GD_POSITION_WORDS]);
/* Returns how many words are used, by the first GD_POSITION_HEAD of them; at
 * most GD_POSITION_WORDS. */
size_t gd_position_length(const uint64_t words[GD_POSITION_HEAD]);
/* False: the words are no position, and *position is all zeros. */
bool gd_position_decode(const uint64_t words[GD_POSITION_WORDS],
                        gd_position *position);

#endif
