/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slotuse.c - see slotuse.h.
 */
#include "engine/format/slotuse.h"

#include "engine/base/coding.h"
#include "engine/format/fptable.h"
#include "engine/format/index.h"

static bool
is_in_use(uint8_t state)
{
    return state == GD_ENTRY_LIVE || state == GD_ENTRY_DAMAGED ||
           state == GD_ENTRY_INVALID;
}

void
gd_slot_use_judge(const uint8_t *entries, const uint8_t *counts, size_t count,
                  size_t published, gd_slot_use *use, uint8_t *unused)
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
            use->unused_bytes += gd_get32(entry + GD_LISTED_LENGTH);
        }
    }
}
