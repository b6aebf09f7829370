/* SPDX-License-Identifier: Apache-2.0 */
/*
 * usage.c - see usage.h.
 */
#include "engine/maintain/usage.h"

static void
add_entries(const gd_entry *entries, uint32_t count, gd_usage *used)
{
    uint32_t segment = 0; /* no segment begins there */
    for (uint32_t i = 0; i < count; i++) {
        const gd_entry *entry = &entries[i];
        if ((entry->state != GD_ENTRY_LIVE &&
             entry->state != GD_ENTRY_DAMAGED) ||
            entry->codec >= GD_CODECS) {
            continue;
        }
        used->plain[entry->codec] += entry->plain_length;
        /* A segment's blocks lie in consecutive slots. */
        if (entry->segment != segment) {
            segment = entry->segment;
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
