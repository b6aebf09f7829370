/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.c - see plan.h.
 */
#include "engine/read/plan.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/array.h"
#include "engine/base/coding.h"
#include "engine/repo/metacache.h"

void
gd_plan_open(gd_plan *plan, gd_repo *repo, const gd_recipe *recipe)
{
    *plan = (gd_plan){.repo = repo,
                      .recipe = recipe,
                      .most = UINT64_MAX,
                      .most_wants = SIZE_MAX};
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

static gd_status
lend_group_of(gd_plan *plan, const gd_extent *extent, gd_group **group,
              gd_error *err)
{
    GD_TRY(lend_group(plan, extent->group, group, err));
    return gd_recipe_require_scope(plan->recipe, &(*group)->scope,
                                   (*group)->name, err);
}

/* Reads the entries into plan->entries. */
static gd_status
read_entries(gd_plan *plan, const gd_extent *extent, const gd_group *group,
             gd_error *err)
{
    if (plan->entries == NULL) {
        plan->entries = gd_alloc(plan->repo->env,
                                 GD_EXTENT_BLOCKS * sizeof *plan->entries, err);
        if (plan->entries == NULL) {
            return GD_NOMEM;
        }
    }
    gd_plan_count(plan, group, gd_entry_offset(extent->slot),
                  gd_entry_offset(extent->slot + extent->blocks));
    return gd_group_read_entries(group, extent->slot, extent->blocks,
                                 plan->entries, err);
}

/* Verifies that the recipe was committed with plan->entries. */
static gd_status
verify_entries(const gd_plan *plan, const gd_extent *extent,
               const gd_group *group, gd_error *err)
{
    const char *recipe = plan->recipe->name;
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

gd_status
gd_plan_extent(gd_plan *plan, const gd_extent *extent, gd_group **group,
               gd_error *err)
{
    GD_TRY(lend_group_of(plan, extent, group, err));
    GD_TRY(read_entries(plan, extent, *group, err));
    return verify_entries(plan, extent, *group, err);
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

/* The wanted part of an extent. */
typedef struct stretch {
    gd_group *group;
    const gd_extent *extent;
    uint64_t from, to; /* in the extent */
    gd_cached_extent *cached; /* lent; NULL: plan->entries has the extent */
} stretch;

static gd_status
add_blocks(gd_plan *plan, const stretch *part, gd_error *err)
{
    gd_status s = GD_OK;
    const gd_extent *extent = part->extent;
    const gd_cached_extent *cached = part->cached;
    uint32_t i = cached == NULL ? 0 : gd_cached_extent_find(cached, part->from);
    uint64_t start = i == 0 ? 0 : cached->blocks[i - 1].end; /* of the block */
    for (; s == GD_OK && !plan->full && i < extent->blocks && start < part->to;
         i++) {
        gd_want want = {.group = part->group,
                        .entry = cached == NULL
                                     ? plan->entries[i]
                                     : gd_cached_extent_entry(cached, i),
                        .slot = extent->slot + i};
        uint64_t end = start + want.entry.plain_length;
        if (end > part->from) {
            uint64_t a = part->from > start ? part->from : start;
            uint64_t b = part->to < end ? part->to : end;
            if (plan->whole && (a != start || b != end)) {
                return refuse_boundary(plan, extent->offset + part->from, err);
            }
            want.from = (uint32_t)(a - start);
            want.length = (uint32_t)(b - a);
            want.offset = extent->offset + a;
            s = add_want(plan, &want, err);
        }
        start = end;
    }
    return s;
}

/* Gets what is known of the entries from the cache.  Otherwise reads and
 * verifies them, for the next read too.  Metadata of a fresh plan is not taken
 * from the cache, nor put there, since a read that used the cache has failed.
 * What it used is dropped. */
static gd_status
load_extent(gd_plan *plan, stretch *part, gd_error *err)
{
    gd_metacache *cache = plan->repo->metacache;
    const gd_extent *extent = part->extent;
    bool ends = plan->passing && part->to == extent->length;
    GD_TRY(lend_group_of(plan, extent, &part->group, err));
    if (!plan->fresh) {
        part->cached = gd_metacache_get(cache, part->group, extent);
    }
    if (plan->fresh || (part->cached != NULL && ends)) {
        gd_metacache_drop(cache, part->group, extent);
    }
    if (part->cached != NULL) {
        return GD_OK;
    }
    GD_TRY(read_entries(plan, extent, part->group, err));
    GD_TRY(verify_entries(plan, extent, part->group, err));
    if (!plan->fresh && !ends) {
        gd_metacache_keep(cache, part->group, extent, plan->entries);
    }
    return GD_OK;
}

static gd_status
add_part(gd_plan *plan, const gd_extent_part *of, gd_error *err)
{
    stretch part = {.extent = of->extent,
                    .from = of->from,
                    .to = of->from + of->length};
    GD_TRY(load_extent(plan, &part, err));
    gd_status s = add_blocks(plan, &part, err);
    if (part.cached != NULL) {
        gd_metacache_return(plan->repo->metacache, part.cached);
    }
    return s;
}

gd_status
gd_plan_add(gd_plan *plan, gd_range range, gd_error *err)
{
    gd_extent_cursor cursor;
    gd_status s = GD_OK;
    gd_extent_cursor_open(&cursor, plan->recipe, range.offset, range.length);
    cursor.fresh = plan->fresh;
    while (s == GD_OK && !plan->full && cursor.offset < cursor.end) {
        gd_extent_part part;
        uint64_t offset = cursor.offset;
        s = gd_extent_cursor_next(&cursor, &part, err);
        if (s != GD_OK) {
            break;
        }
        if (part.extent->kind == GD_EXTENT_BLOCKS_KIND) {
            s = add_part(plan, &part, err);
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
        size_t n = gd_plan_neighbours(wants + i, count - i, &end);
        i += n;
        if (group->is_cold || (!asked && n < count)) {
            gd_group_expect_data(group, start, end - start);
        }
    }
}
