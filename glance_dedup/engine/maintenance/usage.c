/* SPDX-License-Identifier: Apache-2.0 */
/*
 * usage.c - see usage.h.
 */
#include "engine/maintenance/usage.h"

#include <stdlib.h>

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
gd_usage_add_group(const gd_group *group, gd_usage *used, gd_error *err)
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
