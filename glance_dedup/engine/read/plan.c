/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.c - see plan.h.
 */
#include "engine/read/plan.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/array.h"
#include "engine/base/coding.h"


gd_status
gd_plan_open(gd_plan *plan, gd_repo *repo, const gd_recipe *recipe,
             gd_error *err)
{
    *plan = (gd_plan){.repo = repo,
                      .recipe = recipe,
                      .most = UINT64_MAX,
                      .most_wants = SIZE_MAX};
    plan->entries =
        gd_calloc(repo->env, GD_EXTENT_BLOCKS, sizeof *plan->entries, err);
    return plan->entries == NULL ? GD_NOMEM : GD_OK;
}

void
gd_plan_clear(gd_plan *plan)
{
    for (size_t i = 0; i < plan->group_count; i++) {
        gd_fpcache_return_group(plan->repo->cache, plan->groups[i]);
    }
    plan->group_count = 0;
    plan->count = 0;
    plan->bytes = 0;
}

void
gd_plan_close(gd_plan *plan)
{
    const gd_env *env = plan->repo->env;
    gd_plan_clear(plan);
    env->release(env, plan->wants);
    env->release(env, plan->groups);
    env->release(env, plan->entries);
}

void
gd_plan_count(const gd_plan *plan, const gd_group *group, uint64_t start,
              uint64_t end)
{
    if (!plan->asked) {
        gd_seeks_note(&plan->repo->counters.image, group->inode, start,
                      end - start);
    }
}

/* ---- entries ---- */

static gd_status
lend_group(gd_plan *plan, uint32_t number, gd_group **group, gd_error *err)
{
    gd_repo *repo = plan->repo;
    /* Borrow each group once.  If the cache has no place for a group, each
     * borrowing would take a descriptor. */
    for (size_t i = plan->group_count; i > 0; i--) {
        if (plan->groups[i - 1]->number == number) {
            *group = plan->groups[i - 1];
            return GD_OK;
        }
    }
    gd_group **groups =
        gd_array_reserve(repo->env, plan->groups, &plan->group_room,
                         plan->group_count + 1, sizeof *groups, err);
    if (groups == NULL) {
        return GD_NOMEM;
    }
    plan->groups = groups;
    gd_status s =
        gd_fpcache_group(repo->cache, number, plan->fresh, group, err);
    if (s == GD_NOTFOUND) {
        s = gd_fail(err, GD_CORRUPT, "%s names groups/%08x, which is missing",
                    plan->recipe->name, (unsigned)number);
    }
    if (s == GD_OK) {
        plan->groups[plan->group_count++] = *group;
    }
    return s;
}

/* A damaged entry still describes its block. */
static bool
names_a_block(const gd_entry *entry)
{
    return entry->state == GD_ENTRY_LIVE || entry->state == GD_ENTRY_DAMAGED;
}

gd_status
gd_plan_extent(gd_plan *plan, const gd_extent *extent, gd_group **out,
               gd_error *err)
{
    const char *recipe = plan->recipe->name;
    GD_TRY(lend_group(plan, extent->group, out, err));
    GD_TRY(gd_recipe_require_scope(plan->recipe, &(*out)->scope, (*out)->name,
                                   err));
    gd_plan_count(plan, *out, gd_entry_offset(extent->slot),
                  gd_entry_offset(extent->slot + extent->blocks));
    GD_TRY(gd_group_read_entries(*out, extent->slot, extent->blocks,
                                 plan->entries, err));
    const gd_group *group = *out;
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    uint64_t length = 0;
    for (uint32_t i = 0; i < extent->blocks; i++) {
        const gd_entry *entry = &plan->entries[i];
        if (!names_a_block(entry)) {
            return gd_fail(
                err, GD_CORRUPT,
                "%s: the entry of slot %u at offset %llu %s, and %s needs it",
                group->name, extent->slot + i,
                (unsigned long long)gd_entry_offset(extent->slot + i),
                entry->state == GD_ENTRY_INVALID ? "does not verify"
                                                 : "holds no block",
                recipe);
        }
        XXH3_64bits_update(&state, entry->fingerprint.bytes,
                           GD_FINGERPRINT_SIZE);
        length += entry->plain_length;
    }
    if (XXH3_64bits_digest(&state) != extent->digest ||
        length != extent->length) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: slots %u to %u (offset %llu) do not hold the "
                       "blocks that %s was committed with", group->name,
                       extent->slot, extent->slot + extent->blocks - 1,
                       (unsigned long long)gd_entry_offset(extent->slot),
                       recipe);
    }
    return GD_OK;
}

/* ---- ranges ---- */

static gd_status
refuse_boundary(const gd_plan *plan, uint64_t offset, gd_error *err)
{
    return gd_fail(err, GD_INVALID,
                   "%s: the range at offset %llu begins, or ends, within a "
                   "block", plan->recipe->name, (unsigned long long)offset);
}

static gd_status
add_want(gd_plan *plan, const gd_want *want, gd_error *err)
{
    if (want->length > plan->most - plan->bytes ||
        plan->count == plan->most_wants) {
        plan->full = true;
        plan->left = want->offset;
        return GD_OK;
    }
    gd_want *wants =
        gd_array_reserve(plan->repo->env, plan->wants, &plan->room,
                         plan->count + 1, sizeof *wants, err);
    if (wants == NULL) {
        return GD_NOMEM;
    }
    plan->wants = wants;
    plan->wants[plan->count++] = *want;
    plan->bytes += want->length;
    return GD_OK;
}

/* Adds the blocks needed for [from, to) of the extent. */
static gd_status
add_blocks(gd_plan *plan, const gd_extent *extent, uint64_t from, uint64_t to,
           gd_error *err)
{
    gd_group *group;
    gd_status s = gd_plan_extent(plan, extent, &group, err);
    uint64_t start = 0; /* of the block, in the extent */
    for (uint32_t i = 0;
         s == GD_OK && !plan->full && i < extent->blocks && start < to; i++) {
        const gd_entry *entry = &plan->entries[i];
        uint64_t end = start + entry->plain_length;
        if (end > from) {
            uint64_t a = from > start ? from : start;
            uint64_t b = to < end ? to : end;
            if (plan->whole && (a != start || b != end)) {
                return refuse_boundary(plan, extent->offset + from, err);
            }
            gd_want want = {
                .group = group,
                .entry = *entry,
                .slot = extent->slot + i,
                .from = (uint32_t)(a - start),
                .length = (uint32_t)(b - a),
                .offset = extent->offset + a,
            };
            s = add_want(plan, &want, err);
        }
        start = end;
    }
    return s;
}

gd_status
gd_plan_add(gd_plan *plan, gd_range range, gd_error *err)
{
    gd_extent_cursor cursor;
    gd_status s = GD_OK;
    gd_extent_cursor_open(&cursor, plan->recipe, range.offset, range.length);
    while (s == GD_OK && !plan->full && cursor.offset < cursor.end) {
        gd_extent_part part;
        uint64_t offset = cursor.offset;
        s = gd_extent_cursor_next(&cursor, &part, err);
        if (s != GD_OK) {
            break;
        }
        if (part.extent->kind == GD_EXTENT_BLOCKS_KIND) {
            s = add_blocks(plan, part.extent, part.from,
                           part.from + part.length, err);
        } else if (plan->zeros != NULL) {
            plan->zeros(plan->arg, offset, part.length);
        }
    }
    return s;
}

/* ---- disk order ---- */

static int
disk_order(const void *a, const void *b)
{
    const gd_want *x = a, *y = b;
    if (x->group->number != y->group->number) {
        return x->group->number < y->group->number ? -1 : 1;
    }
    if (x->entry.segment != y->entry.segment) {
        return x->entry.segment < y->entry.segment ? -1 : 1;
    }
    if (x->slot != y->slot) {
        return x->slot < y->slot ? -1 : 1;
    }
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

void
gd_plan_sort(gd_plan *plan)
{
    /* An image mostly lies on the disk in the order in which it was stored. */
    size_t sorted = 1;
    while (sorted < plan->count &&
           disk_order(&plan->wants[sorted - 1], &plan->wants[sorted]) <= 0) {
        sorted++;
    }
    if (sorted < plan->count) {
        qsort(plan->wants, plan->count, sizeof *plan->wants, disk_order);
    }
}

size_t
gd_plan_segment(const gd_want *wants, size_t count)
{
    size_t n = 1;
    while (n < count && wants[n].group == wants->group &&
           wants[n].entry.segment == wants->entry.segment) {
        n++;
    }
    return n;
}

size_t
gd_plan_neighbours(const gd_want *wants, size_t count, uint64_t *out)
{
    size_t n = 1;
    uint64_t end = gd_group_segment_end(&wants->entry);
    while (n < count && wants[n].group == wants->group) {
        uint64_t next_end = gd_group_segment_end(&wants[n].entry);
        if (wants[n].entry.segment > end + GD_READ_GAP ||
            next_end - wants->entry.segment > GD_READ_ONCE) {
            break;
        }
        end = next_end > end ? next_end : end;
        n++;
    }
    *out = end;
    return n;
}

void
gd_plan_read_ahead(const gd_want *wants, size_t count, bool asked)
{
    for (size_t i = 0; i < count;) {
        uint64_t end, start = wants[i].entry.segment;
        const gd_group *group = wants[i].group;
        i += gd_plan_neighbours(wants + i, count - i, &end);
        if (group->is_cold || !asked) {
            gd_group_expect_data(group, start, end - start);
        }
    }
}
