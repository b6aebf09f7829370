/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group_stats.c - see group_stats.h.
 */
#include "engine/maintenance/group_stats.h"

#include <stdlib.h>

#include "engine/base/coding.h"
#include "engine/format/index.h"

/* ---- live bytes ---- */

/* Facts about one segment, from the entries. */
typedef struct survey {
    uint64_t live;  /* plain bytes of live blocks */
    uint64_t plain; /* plain bytes in all, as far as known */
    uint32_t last;  /* slot of its last live block */
} survey;

/* Plain bytes of a full segment that begins with a slot. */
static uint64_t
full_segment(const gd_leased_group *leased, uint32_t first)
{
    uint32_t size = leased->repo->params.segment_size;
    return first >= leased->published.covered ? size : gd_segment_joined(size);
}

static void
add_segment(uint64_t stored, const survey *found, uint64_t *bytes,
            uint64_t *kept)
{
    *bytes += GD_SEGMENT_HEADER + stored;
    *kept += GD_SEGMENT_HEADER + (found->live < found->plain
                                      ? stored * found->live / found->plain
                                      : stored);
}

/* ---- consecutive slots ---- */

/* Freed blocks between other blocks of a segment show in the offsets.  Those
 * behind its last live block are counted as its own, less what the next segment
 * must have had, and up to a full segment. */
static void
survey_segment(const gd_leased_group *leased, uint32_t first, survey *found)
{
    const gd_entry *entries = leased->entries;
    uint32_t slots = leased->group->bounds.slots;
    uint64_t most = full_segment(leased, first);
    uint64_t behind = 0;
    *found = (survey){.last = first};
    for (uint32_t i = first; i < slots; i++) {
        const gd_entry *entry = &entries[i];
        if (entry->state != GD_ENTRY_LIVE) {
            behind += leased->group->bounds.max_block;
            continue;
        }
        if (entry->segment != entries[first].segment) {
            behind -= behind < entry->plain_offset ? behind
                                                   : entry->plain_offset;
            break;
        }
        uint64_t end = (uint64_t)entry->plain_offset + entry->plain_length;
        found->live += entry->plain_length;
        found->plain = end > found->plain ? end : found->plain;
        found->last = i;
        behind = 0;
    }
    uint64_t room = found->plain < most ? most - found->plain : 0;
    found->plain += behind < room ? behind : room;
}

static void
survey_consecutive(const gd_leased_group *leased, uint64_t *bytes,
                   uint64_t *kept)
{
    for (uint32_t i = 0; i < leased->group->bounds.slots; i++) {
        const gd_entry *entry = &leased->entries[i];
        if (entry->state == GD_ENTRY_LIVE) {
            survey found;
            survey_segment(leased, i, &found);
            add_segment(entry->stored_length, &found, bytes, kept);
            i = found.last;
        }
    }
}

/* ---- slots from anywhere ---- */

static int
by_place(const void *a, const void *b)
{
    const gd_entry *x = *(const gd_entry *const *)a;
    const gd_entry *y = *(const gd_entry *const *)b;
    if (x->segment != y->segment) {
        return x->segment < y->segment ? -1 : 1;
    }
    return x->plain_offset < y->plain_offset ? -1
                                             : x->plain_offset > y->plain_offset;
}

/* Sorts the live entries.  *freed: bytes that the others had, at most. */
static uint32_t
sort_live(const gd_leased_group *leased, const gd_entry **live,
          uint64_t *freed)
{
    uint32_t count = 0;
    *freed = 0;
    for (uint32_t i = 0; i < leased->group->bounds.slots; i++) {
        const gd_entry *entry = &leased->entries[i];
        if (entry->state == GD_ENTRY_LIVE) {
            live[count++] = entry;
        } else if (entry->state != GD_ENTRY_EMPTY) {
            *freed += leased->group->bounds.max_block;
        }
    }
    qsort(live, count, sizeof *live, by_place);
    return count;
}

/* Nearly all segments were full.  So one that ends early has lost blocks, as
 * long as there were so many. */
static void
survey_listed(const gd_leased_group *leased, const gd_entry **live,
              uint64_t *bytes, uint64_t *kept)
{
    uint64_t freed;
    uint32_t count = sort_live(leased, live, &freed);
    for (uint32_t i = 0, n; i < count; i += n) {
        survey found = {0};
        for (n = 0; i + n < count && live[i + n]->segment == live[i]->segment;
             n++) {
            found.live += live[i + n]->plain_length;
            found.plain = live[i + n]->plain_offset +
                          (uint64_t)live[i + n]->plain_length;
        }
        uint32_t slot = (uint32_t)(live[i] - leased->entries);
        uint64_t most = full_segment(leased, slot);
        uint64_t room = found.plain < most ? most - found.plain : 0;
        room = room < freed ? room : freed;
        found.plain += room;
        freed -= room;
        add_segment(live[i]->stored_length, &found, bytes, kept);
    }
}

gd_status
gd_group_stats_live_bytes(const gd_leased_group *leased, uint64_t *bytes,
                          uint64_t *kept, gd_error *err)
{
    const gd_env *env = leased->repo->env;
    *bytes = *kept = 0;
    if (!leased->group->bounds.has_lists) {
        survey_consecutive(leased, bytes, kept);
        return GD_OK;
    }
    const gd_entry **live = gd_calloc(env, leased->group->bounds.slots,
                                      sizeof(gd_entry *), err);
    if (live == NULL) {
        return GD_NOMEM;
    }
    survey_listed(leased, live, bytes, kept);
    env->release(env, live);
    return GD_OK;
}

/* ---- the use of a group's bytes ---- */

static int
by_segment(const void *a, const void *b)
{
    const gd_entry *x = a, *y = b;
    return x->segment < y->segment ? -1 : x->segment > y->segment;
}

/* Leaves only the entries that have blocks; returns how many. */
static uint32_t
keep_blocks(gd_entry *entries, uint32_t count)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; i++) {
        if ((entries[i].state == GD_ENTRY_LIVE ||
             entries[i].state == GD_ENTRY_DAMAGED) &&
            entries[i].codec < GD_CODECS) {
            entries[kept++] = entries[i];
        }
    }
    return kept;
}

/* The slots of a segment may be anywhere. */
static void
add_entries(gd_entry *entries, uint32_t count, gd_usage *used)
{
    uint32_t kept = keep_blocks(entries, count);
    qsort(entries, kept, sizeof *entries, by_segment);
    for (uint32_t i = 0; i < kept; i++) {
        const gd_entry *entry = &entries[i];
        used->plain[entry->codec] += entry->plain_length;
        if (i == 0 || entry->segment != entries[i - 1].segment) {
            used->stored[entry->codec] += entry->stored_length;
            used->segments++;
        }
    }
}

gd_status
gd_group_stats_add_usage(const gd_group *group, gd_usage *used, gd_error *err)
{
    uint32_t slots = group->bounds.slots;
    gd_entry *entries = gd_calloc(group->env, slots, sizeof *entries, err);
    if (entries == NULL) {
        return GD_NOMEM;
    }
    gd_status s = gd_group_read_entries(group, 0, slots, entries, err);
    if (s == GD_OK) {
        add_entries(entries, slots, used);
    }
    group->env->release(group->env, entries);
    return s;
}

/* ---- the use of a group's slots ---- */

static bool
is_in_use(uint8_t state)
{
    return state == GD_ENTRY_LIVE || state == GD_ENTRY_DAMAGED ||
           state == GD_ENTRY_INVALID;
}

void
gd_group_stats_judge_slots(const uint8_t *entries, const uint8_t *counts,
                           size_t count, size_t published, gd_slot_use *use,
                           uint8_t *unused)
{
    *use = (gd_slot_use){.is_lost = false};
    for (size_t slot = 0; slot < count; slot++) {
        const uint8_t *entry = entries + slot * GD_LISTED_ENTRY;
        uint8_t state = entry[GD_LISTED_STATE];
        bool counted = gd_get32(counts + slot * 4) > 0;
        bool in_use = is_in_use(state);
        use->in_use += in_use;
        use->freed += state == GD_ENTRY_FREED;
        if (counted && !in_use && !use->is_lost) {
            use->is_lost = true;
            use->lost = (uint32_t)slot;
        }
        if (!counted && in_use && slot < published) {
            gd_put32(unused + 4 * use->unused++, (uint32_t)slot);
            use->unused_bytes += state == GD_ENTRY_INVALID
                                     ? 0 /* the length may be any number */
                                     : gd_get32(entry + GD_LISTED_LENGTH);
        }
    }
}
