/* SPDX-License-Identifier: Apache-2.0 */
/*
 * remake.c - see remake.h.  The offsets are those of format.rst.
 */
#include "tests/fuzz/remake.h"

#include "engine/base/coding.h"
#include "engine/format/fptable.h"
#include "engine/format/params.h"
#include "engine/format/recipe.h"
#include "engine/format/segment.h"

enum { CHECKED = 504, CHECKED_PAGE = 4088 };

static void
remake_sector(uint8_t *sector, uint64_t seed)
{
    gd_put64(sector + CHECKED, gd_checksum(sector, CHECKED, seed));
}

/* Corrects the list of slots, if the segment has one. */
static void
remake_list(uint8_t *at, uint64_t stored, uint64_t seed)
{
    uint64_t list = GD_LISTED_SLOT * (uint64_t)gd_get16(at + 6);
    if (at[5] != 1 || list > stored) {
        return;
    }
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_64bits_reset_withSeed(&state, seed);
    XXH3_64bits_update(&state, at, 20);
    XXH3_64bits_update(&state, at + GD_SEGMENT_HEADER, list);
    gd_put32(at + 20, (uint32_t)XXH3_64bits_digest(&state));
}

/* Corrects the segment at offset, if it is within the file. */
static void
remake_segment(uint8_t *data, size_t length, uint64_t offset, uint64_t seed)
{
    if (offset + GD_SEGMENT_HEADER > length) {
        return;
    }
    uint8_t *at = data + offset;
    uint64_t stored = gd_get32(at + 16);
    if (stored > length - offset - GD_SEGMENT_HEADER) {
        return;
    }
    if (gd_get16(data + 8) >= GD_GROUP_LISTS) {
        remake_list(at, stored, seed);
    }
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_64bits_reset_withSeed(&state, seed);
    XXH3_64bits_update(&state, at, 24);
    XXH3_64bits_update(&state, at + GD_SEGMENT_HEADER, stored);
    gd_put64(at + 24, XXH3_64bits_digest(&state));
}

void
remake_group(uint8_t *data, size_t length)
{
    static const uint8_t empty[GD_ENTRY_SIZE];
    if (length < 3 * GD_SECTOR) {
        return;
    }
    remake_sector(data, 0);
    uint64_t seed = gd_get64(data + CHECKED);
    uint32_t slots = gd_get32(data + 48);
    remake_sector(data + GD_SECTOR, seed);
    remake_sector(data + 2 * GD_SECTOR, seed);
    for (uint32_t i = 0; i < slots && i < GD_MAX_SLOTS; i++) {
        uint64_t offset = gd_entry_offset(i);
        if (offset + GD_ENTRY_SIZE > length) {
            break;
        }
        uint8_t *entry = data + offset;
        if (memcmp(entry, empty, GD_ENTRY_SIZE) != 0) {
            gd_put32(entry + GD_ENTRY_SIZE - 4,
                     (uint32_t)gd_checksum(entry, GD_ENTRY_SIZE - 4,
                                           seed + i));
            remake_segment(data, length, gd_get32(entry + 40), seed);
        }
    }
}

void
remake_recipe(uint8_t *data, size_t length)
{
    if (length < GD_RECIPE_PAGE) {
        return;
    }
    gd_put64(data + CHECKED_PAGE, gd_checksum(data, CHECKED_PAGE, 0));
    uint64_t seed = gd_get64(data + 48);
    for (size_t i = 1; (i + 1) * GD_RECIPE_PAGE <= length; i++) {
        uint8_t *page = data + i * GD_RECIPE_PAGE;
        gd_put32(page, (uint32_t)i);
        gd_put64(page + CHECKED_PAGE, gd_checksum(page, CHECKED_PAGE, seed));
    }
}

void
remake_fence(uint8_t *data, size_t length)
{
    for (size_t at = 0; at + GD_SECTOR <= length && at < 2 * GD_SECTOR;
         at += GD_SECTOR) {
        remake_sector(data + at, 0);
    }
}

void
remake_filter(uint8_t *data, size_t length)
{
    if (length >= 64) {
        gd_put64(data + 56, gd_checksum(data, 56, 0));
    }
}

void
remake_any(uint8_t *data, size_t length)
{
    static const struct {
        const char *magic;
        void (*remake)(uint8_t *data, size_t length);
    } kinds[] = {
        {"GDGROUP", remake_group},
        {"GDRECIPE", remake_recipe},
        {"GDFENCE", remake_fence},
        {"GDFILTER", remake_filter},
    };
    for (size_t i = 0; length >= 8 && i < sizeof kinds / sizeof kinds[0];
         i++) {
        if (memcmp(data, kinds[i].magic, strlen(kinds[i].magic)) == 0) {
            kinds[i].remake(data, length);
        }
    }
}
