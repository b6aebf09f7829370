/* SPDX-License-Identifier: Apache-2.0 */
/*
 * position.c - see position.h.
 */
#include "engine/format/position.h"

#include <string.h>

#include "engine/base/coding.h"
#include "engine/format/address.h"

enum {
    CHECKSUM = 3, /* the word that has it */
    IDENTITY_BITS = 22,
    PUBLISHED_BITS = 16,
    GROUP_SHIFT = IDENTITY_BITS + PUBLISHED_BITS,
};

#define COMPLETE (UINT64_C(1) << 32)

uint32_t
gd_position_identity(uint64_t seed)
{
    return (uint32_t)(seed >> (64 - IDENTITY_BITS));
}

/* ---- the list ---- */

void
gd_position_remove(gd_position *position, uint32_t at)
{
    position->count--;
    memmove(position->open + at, position->open + at + 1,
            (position->count - at) * sizeof *position->open);
}

void
gd_position_append(gd_position *position, gd_open_group group)
{
    if (position->count == GD_OPEN_GROUPS) {
        uint32_t lowest = position->open[0].group;
        if (position->sealed == position->lost) {
            position->sealed = lowest - 1; /* all below are sealed and read */
            position->turn = lowest;
        }
        position->lost = lowest;
        gd_position_remove(position, 0);
    }
    position->open[position->count++] = group;
}

bool
gd_position_prepend(gd_position *position, gd_open_group group)
{
    if (position->count == GD_OPEN_GROUPS) {
        return false;
    }
    memmove(position->open + 1, position->open,
            position->count * sizeof *position->open);
    position->open[0] = group;
    position->count++;
    return true;
}

static void
lower(uint32_t *number, uint32_t limit)
{
    *number = *number < limit ? *number : limit;
}

void
gd_position_cut(gd_position *position, uint32_t newest)
{
    lower(&position->newest, newest);
    lower(&position->lost, newest);
    lower(&position->turn, newest);
    lower(&position->sealed, newest);
    while (position->count > 0 &&
           position->open[position->count - 1].group > newest) {
        position->count--;
    }
}

/* ---- words ---- */

static uint64_t
checksum_of(const uint64_t *words, size_t length)
{
    uint8_t raw[8 * GD_POSITION_WORDS];
    size_t at = 0;
    for (size_t i = 0; i < length; i++) {
        if (i != CHECKSUM) {
            gd_put64(raw + at, words[i]);
            at += 8;
        }
    }
    return gd_checksum(raw, at, 0) >> 1;
}

size_t
gd_position_encode(const gd_position *position,
                   uint64_t words[GD_POSITION_WORDS])
{
    size_t length = GD_POSITION_HEAD + position->count;
    words[0] = position->newest | (position->complete ? COMPLETE : 0);
    words[1] = position->sealed | (uint64_t)position->turn << 32;
    words[2] = position->lost | (uint64_t)position->count << 32;
    for (uint32_t i = 0; i < position->count; i++) {
        const gd_open_group *g = &position->open[i];
        words[GD_POSITION_HEAD + i] = (uint64_t)g->group << GROUP_SHIFT |
                                      (uint64_t)g->published << IDENTITY_BITS |
                                      g->identity;
    }
    words[CHECKSUM] = checksum_of(words, length);
    return length;
}

size_t
gd_position_length(const uint64_t words[GD_POSITION_HEAD])
{
    uint64_t count = words[2] >> 32;
    return GD_POSITION_HEAD +
           (size_t)(count < GD_OPEN_GROUPS ? count : GD_OPEN_GROUPS);
}

static gd_open_group
decode_group(uint64_t word)
{
    return (gd_open_group){
        .group = (uint32_t)(word >> GROUP_SHIFT),
        .published =
            (uint32_t)(word >> IDENTITY_BITS) & ((1u << PUBLISHED_BITS) - 1),
        .identity = (uint32_t)word & ((1u << IDENTITY_BITS) - 1),
    };
}

static bool
is_list(const gd_position *position)
{
    uint32_t before = position->lost;
    for (uint32_t i = 0; i < position->count; i++) {
        const gd_open_group *g = &position->open[i];
        if (g->group <= before || g->published > GD_MAX_SLOTS) {
            return false;
        }
        before = g->group;
    }
    return before <= position->newest && position->newest <= GD_MAX_GROUP;
}

bool
gd_position_decode(const uint64_t words[GD_POSITION_WORDS],
                   gd_position *position)
{
    size_t length = gd_position_length(words);
    *position = (gd_position){
        .newest = (uint32_t)words[0],
        .sealed = (uint32_t)words[1],
        .turn = (uint32_t)(words[1] >> 32),
        .lost = (uint32_t)words[2],
        .complete = (words[0] & COMPLETE) != 0,
        .count = (uint32_t)(length - GD_POSITION_HEAD),
    };
    for (uint32_t i = 0; i < position->count; i++) {
        position->open[i] = decode_group(words[GD_POSITION_HEAD + i]);
    }
    bool good = words[CHECKSUM] == checksum_of(words, length) &&
                words[0] >> 33 == 0 &&
                words[2] >> 32 == position->count &&
                position->sealed <= position->turn &&
                position->turn <= position->lost && is_list(position);
    if (!good) {
        memset(position, 0, sizeof *position);
    }
    return good;
}
