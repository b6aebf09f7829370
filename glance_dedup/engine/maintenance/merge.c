/* SPDX-License-Identifier: Apache-2.0 */
/*
 * merge.c - see merge.h.
 */
#include "engine/maintenance/merge.h"

#include <string.h>

#include "engine/base/array.h"
#include "engine/base/coding.h"
#include "engine/files/spool.h"
#include "engine/format/pairs.h"
#include "engine/maintenance/recipeexchange.h"
#include "engine/read/address_reader.h"
#include "engine/write/disktable.h"

struct gd_merge {
    gd_repo *repo;
    gd_mapping mapping;     /* the caller's, while the merge is being opened */
    bool touched;           /* the image names an old address of the mapping */
    gd_recipe old;          /* open with its users' lock byte held; fd -1: not
                             * open */
    gd_spool_writer m;      /* fd -1: there is none */
    gd_recipe merged;
    gd_recipe_writer *writer;
    gd_groupmap shared;     /* 1: we hold the group's shared lock (I6) */
    gd_merge_facts facts;
    size_t collision_room; /* in facts.collisions */
    /* Entries of the current extent, and of slots near new addresses. */
    gd_entry *entries;
    gd_group *new_group; /* borrowed; NULL: none */
    uint32_t new_published;
    uint32_t new_first, new_count;
    gd_entry *new_entries;
    /* For comparing by value. */
    gd_address_reader *old_reader, *new_reader;
};

/* ---- the mapping ---- */

static uint64_t
old_of(gd_mapping mapping, size_t at)
{
    return gd_get64(mapping.pairs + at * GD_PAIR_SIZE);
}

static uint64_t
new_of(gd_mapping mapping, size_t at)
{
    return gd_get64(mapping.pairs + at * GD_PAIR_SIZE + 8);
}

static gd_status
require_mapping(gd_mapping mapping, gd_error *err)
{
    for (size_t i = 0; i < mapping.count; i++) {
        uint64_t old = old_of(mapping, i), new = new_of(mapping, i);
        if (!gd_address_is_valid(old) || !gd_address_is_valid(new) ||
            old == new ||
            (i > 0 && old_of(mapping, i - 1) >= old)) {
            return gd_fail(err, GD_INVALID,
                           "pair %zu of the mapping is no address, maps to "
                           "itself, or is out of order", i);
        }
    }
    return GD_OK;
}

/* The first pair whose old address is not less than the number. */
static size_t
first_pair(gd_mapping mapping, uint64_t number)
{
    return gd_lower_bound(mapping.pairs, GD_PAIR_SIZE, mapping.count, number);
}

static uint64_t
start_of(const gd_extent *extent)
{
    return gd_address_number((gd_address){extent->group, extent->slot});
}

/* Returns whether the pair's old address lies in the extent; if so, at which
 * block. */
static bool
pair_in(const gd_merge *merge, size_t pair, const gd_extent *extent,
        uint32_t *block)
{
    if (pair == merge->mapping.count) {
        return false;
    }
    uint64_t after = old_of(merge->mapping, pair) - start_of(extent);
    *block = (uint32_t)after;
    return after < extent->blocks;
}

/* ---- going through the old recipe ---- */

typedef gd_status visit_extent(gd_merge *merge, const gd_extent *extent,
                               gd_error *err);

/* Visits all extents in order, and checks that they make up the whole image. */
static gd_status
each_extent(gd_merge *merge, visit_extent *visit, gd_error *err)
{
    const gd_recipe *old = &merge->old;
    uint64_t offset = 0, left = old->header.extents;
    gd_recipe_page page;
    page.number = 0;
    while (left > 0) {
        gd_status s = gd_recipe_next_page(old, offset, &page, err);
        for (uint32_t i = 0; s == GD_OK && i < page.count; i++) {
            s = visit(merge, &page.extents[i], err);
        }
        if (s != GD_OK) {
            return s;
        }
        offset = page.extents[page.count - 1].offset +
                 page.extents[page.count - 1].length;
        left -= page.count;
    }
    if (offset != old->header.disk.plain_size) {
        return gd_fail(err, GD_CORRUPT, "%s: its extents end at %llu; the "
                       "image has %llu bytes", old->name,
                       (unsigned long long)offset,
                       (unsigned long long)old->header.disk.plain_size);
    }
    return GD_OK;
}

/* ---- locks ---- */

/* N10.1, I6: take the lock before reading the entry. */
static gd_status
hold_group(gd_merge *merge, uint32_t group, gd_error *err)
{
    gd_status s = gd_locks_lock_shared_once(merge->repo->locks, &merge->shared,
                                            group, err);
    if (s == GD_BUSY) {
        return gd_fail(err, GD_BUSY,
                       "%s cannot be merged now: the collector is at work, or "
                       "about to be, in group %08x", merge->old.name,
                       (unsigned)group);
    }
    return s;
}

/* Locks the groups of all addresses that the extent's blocks will have. */
static gd_status
hold_groups_of(gd_merge *merge, const gd_extent *extent, gd_error *err)
{
    size_t pair = first_pair(merge->mapping, start_of(extent));
    uint32_t block, moved = 0;
    gd_status s = GD_OK;
    for (; s == GD_OK && pair_in(merge, pair, extent, &block); pair++) {
        s = hold_group(merge, gd_address_of(new_of(merge->mapping, pair)).group,
                       err);
        moved++;
    }
    if (s == GD_OK && moved < extent->blocks) {
        s = hold_group(merge, extent->group, err);
    }
    return s;
}

/* ---- entries ---- */

/* Reads the extent's old entries, and verifies that the image was committed
 * with these blocks (I7).  A damaged entry, or one of which only the rest does
 * not verify, still identifies its block by the fingerprint. */
static gd_status
read_old_entries(gd_merge *merge, const gd_extent *extent, gd_error *err)
{
    gd_group *group;
    gd_fpcache *cache = merge->repo->cache;
    gd_status s = gd_fpcache_group(cache, extent->group, true, &group, err);
    if (s == GD_NOTFOUND) {
        return gd_fail(err, GD_CORRUPT, "%s names groups/%08x, which is "
                       "missing", merge->old.name, (unsigned)extent->group);
    }
    if (s != GD_OK) {
        return s;
    }
    s = gd_recipe_require_scope(&merge->old, &group->scope, group->name, err);
    if (s == GD_OK) {
        s = gd_group_read_entries(group, extent->slot, extent->blocks,
                                  merge->entries, err);
    }
    gd_fpcache_return_group(cache, group);
    if (s != GD_OK) {
        return s;
    }
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    uint64_t length = 0;
    for (uint32_t i = 0; i < extent->blocks; i++) {
        XXH3_64bits_update(&state, merge->entries[i].fingerprint.bytes,
                           GD_FINGERPRINT_SIZE);
        length += merge->entries[i].plain_length;
    }
    if (XXH3_64bits_digest(&state) != extent->digest ||
        length != extent->length) {
        return gd_fail(err, GD_CORRUPT,
                       "groups/%08x: slots %u to %u do not hold the blocks "
                       "that %s was committed with", (unsigned)extent->group,
                       extent->slot, extent->slot + extent->blocks - 1,
                       merge->old.name);
    }
    return GD_OK;
}

static void
return_new_group(gd_merge *merge)
{
    if (merge->new_group != NULL) {
        gd_fpcache_return_group(merge->repo->cache, merge->new_group);
        merge->new_group = NULL;
    }
    merge->new_count = 0;
}

static gd_status
ensure_new_group(gd_merge *merge, uint32_t number, gd_error *err)
{
    gd_published record;
    if (merge->new_group != NULL && merge->new_group->number == number) {
        return GD_OK;
    }
    return_new_group(merge);
    GD_TRY(gd_fpcache_group(merge->repo->cache, number, true,
                            &merge->new_group, err));
    gd_status s =
    gd_recipe_require_scope(&merge->old, &merge->new_group->scope,
                            merge->new_group->name, err);
    if (s == GD_OK) {
        s = gd_group_read_published(merge->new_group, &record, err);
    }
    if (s != GD_OK) {
        return_new_group(merge);
        return s;
    }
    merge->new_published = record.count;
    return GD_OK;
}

/* Reads the entry of a new address, which must be live and published (I1).
 * REQUIRES: the group's shared lock. */
static gd_status
read_new_entry(gd_merge *merge, gd_address address, const gd_entry **entry,
               gd_error *err)
{
    gd_status s = ensure_new_group(merge, address.group, err);
    if (s != GD_OK) {
        return s;
    }
    uint32_t published = merge->new_published;
    if (address.slot < published &&
        address.slot - merge->new_first >= merge->new_count) {
        uint32_t rest = published - address.slot;
        uint32_t count = rest < GD_EXTENT_BLOCKS ? rest : GD_EXTENT_BLOCKS;
        merge->new_count = 0;
        s = gd_group_read_entries(merge->new_group, address.slot, count,
                                  merge->new_entries, err);
        if (s != GD_OK) {
            return s;
        }
        merge->new_first = address.slot;
        merge->new_count = count;
    }
    if (address.slot >= published ||
        merge->new_entries[address.slot - merge->new_first].state !=
            GD_ENTRY_LIVE) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: slot %u holds no live block that %s could be "
                       "merged to", merge->new_group->name, address.slot,
                       merge->old.name);
    }
    *entry = &merge->new_entries[address.slot - merge->new_first];
    return GD_OK;
}

/* ---- replacing a block ---- */

/* Compares the bytes of both.  If a block is marked as damaged and cannot be
 * read, only its fingerprint is left.  That identifies the block only where
 * nobody can make another block with it (I5). */
static gd_status
compare_values(gd_merge *merge, gd_address old, const gd_entry *old_entry,
               gd_address new, bool *equal, gd_error *err)
{
    const uint8_t *old_data, *new_data;
    gd_entry now;
    gd_status s = gd_address_reader_read(merge->old_reader, old, &now,
                                         &old_data, err);
    bool lost = (s == GD_CORRUPT || s == GD_IO) &&
                old_entry->state != GD_ENTRY_LIVE;
    *equal = lost && gd_digest_is_cryptographic(merge->repo->digest);
    if (lost && !*equal) {
        return GD_OK;
    }
    if (s == GD_OK || lost) {
        s = gd_address_reader_read(merge->new_reader, new, &now, &new_data,
                                   err);
    }
    if (s == GD_OK) {
        atomic_fetch_add(&merge->repo->counters.compares, 1);
        *equal = lost || memcmp(old_data, new_data, now.plain_length) == 0;
    }
    return s;
}

static gd_status
note_collision(gd_merge *merge, gd_address address, gd_error *err)
{
    size_t used = merge->facts.collision_count;
    uint64_t *collisions =
        gd_array_reserve(merge->repo->env, merge->facts.collisions,
                         &merge->collision_room, used + 1, sizeof *collisions,
                         err);
    if (collisions == NULL) {
        return GD_NOMEM;
    }
    collisions[merge->facts.collision_count++] = gd_address_number(address);
    merge->facts.collisions = collisions;
    return GD_OK;
}

/* Changes *address to the new one if the blocks are equal (I5). */
static gd_status
replace_block(gd_merge *merge, gd_address *address, const gd_entry *old,
              gd_address to, gd_error *err)
{
    const gd_entry *new = NULL;
    bool equal = true;
    gd_status s = read_new_entry(merge, to, &new, err);
    if (s != GD_OK) {
        return s;
    }
    if (!gd_fingerprint_equal(&old->fingerprint, &new->fingerprint) ||
        old->plain_length != new->plain_length) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: slot %u of groups/%08x is not equal to slot %u of "
                       "groups/%08x", merge->old.name, address->slot,
                       (unsigned)address->group, to.slot, (unsigned)to.group);
    }
    if (merge->repo->params.by_value) {
        s = compare_values(merge, *address, old, to, &equal, err);
    }
    if (s != GD_OK) {
        return s;
    }
    if (!equal) {
        s = note_collision(merge, *address, err);
        return s == GD_OK ? hold_group(merge, address->group, err) : s;
    }
    *address = to;
    merge->facts.replaced++;
    merge->facts.replaced_bytes += old->plain_length;
    return GD_OK;
}

static gd_status
merge_extent(gd_merge *merge, const gd_extent *extent, gd_error *err)
{
    if (extent->kind == GD_EXTENT_ZEROS) {
        return gd_recipe_add_zeros(merge->writer, extent->length, err);
    }
    size_t pair = first_pair(merge->mapping, start_of(extent));
    gd_status s = hold_groups_of(merge, extent, err);
    if (s == GD_OK) {
        s = read_old_entries(merge, extent, err);
    }
    for (uint32_t i = 0; s == GD_OK && i < extent->blocks; i++) {
        const gd_entry *entry = &merge->entries[i];
        gd_address address = {extent->group, extent->slot + i};
        uint32_t block;
        if (pair_in(merge, pair, extent, &block) && block == i) {
            s = replace_block(merge, &address, entry,
                              gd_address_of(new_of(merge->mapping, pair)), err);
            pair++;
        }
        if (s == GD_OK) {
            s = gd_recipe_add_block(merge->writer, address,
                                    &entry->fingerprint, entry->plain_length,
                                    err);
        }
    }
    return s;
}

/* ---- opening ---- */

static gd_status
find_pair(gd_merge *merge, const gd_extent *extent, GD_UNUSED gd_error *err)
{
    uint32_t block;
    if (extent->kind == GD_EXTENT_BLOCKS_KIND &&
        pair_in(merge, first_pair(merge->mapping, start_of(extent)), extent,
                &block)) {
        merge->touched = true;
    }
    return GD_OK;
}

static gd_status
open_writing(gd_merge *merge, gd_error *err)
{
    gd_repo *repo = merge->repo;
    merge->entries = gd_calloc(repo->env, GD_EXTENT_BLOCKS,
                               sizeof *merge->entries, err);
    merge->new_entries = gd_calloc(repo->env, GD_EXTENT_BLOCKS,
                                   sizeof *merge->new_entries, err);
    if (merge->entries == NULL || merge->new_entries == NULL) {
        return GD_NOMEM;
    }
    gd_status s = GD_OK;
    if (repo->params.by_value) {
        s = gd_address_reader_open(repo, &merge->old_reader, err);
        if (s == GD_OK) {
            s = gd_address_reader_open(repo, &merge->new_reader, err);
        }
    }
    if (s == GD_OK) {
        s = gd_repo_require_room(
            repo,
            gd_recipe_bytes(merge->old.header.extents) +
                gd_recipe_bytes(merge->old.header.disk.derived), err);
    }
    if (s == GD_OK) {
        s = gd_spool_create(repo->env, repo->root, GD_SPOOL_MERGED, &merge->m,
                            err);
    }
    if (s == GD_OK) {
        s = gd_recipe_writer_open(repo->env, merge->m.fd, merge->m.name,
                                  merge->m.id, &merge->writer, err);
    }
    return s;
}

static void
close_writing(gd_merge *merge)
{
    const gd_env *env = merge->repo->env;
    return_new_group(merge);
    gd_recipe_writer_close(merge->writer);
    gd_address_reader_close(merge->old_reader);
    gd_address_reader_close(merge->new_reader);
    env->release(env, merge->entries);
    env->release(env, merge->new_entries);
    merge->writer = NULL;
    merge->old_reader = merge->new_reader = NULL;
    merge->entries = merge->new_entries = NULL;
}

/* F2: the new recipe gets the table as it is. */
static gd_status
copy_table(gd_merge *merge, gd_error *err)
{
    gd_disk_table table;
    const gd_recipe *old = &merge->old;
    if (!gd_recipe_has_disk(&old->header)) {
        return GD_OK;
    }
    GD_TRY(gd_disk_table_begin(&table, merge->writer, &old->header.disk,
                               old->header.size, err));
    GD_TRY(gd_disk_table_copy(&table, old, err));
    return gd_disk_table_require_whole(&table, err);
}

/* The header keeps its fields of the upload; the transaction id is M's. */
static gd_status
finish_recipe(gd_merge *merge, gd_error *err)
{
    gd_repo *repo = merge->repo;
    gd_recipe_header header = merge->old.header;
    GD_TRY(copy_table(merge, err));
    memcpy(header.transaction_id, merge->m.id, GD_ID_SIZE);
    GD_TRY(gd_recipe_finish(merge->writer, &repo->params, &header, err));
    GD_TRY(gd_fsync(repo->env, merge->m.fd, merge->m.name, err)); /* N10.2 */
    GD_TRY(gd_sync_dir(repo->env, repo->root, GD_DIR_SPOOL, err)); /* N10.2 */
    return gd_recipe_open(repo->env, merge->m.fd, merge->m.name,
                          &repo->params, header.image_id, &merge->merged,
                          err);
}

static gd_status
write_merged(gd_merge *merge, gd_error *err)
{
    gd_status s = open_writing(merge, err);
    if (s == GD_OK) {
        s = each_extent(merge, merge_extent, err);
    }
    if (s == GD_OK && merge->facts.replaced > 0) {
        s = finish_recipe(merge, err);
    }
    if (s != GD_OK || merge->facts.replaced == 0) {
        /* This comes before the locks are released (N8.5). */
        gd_spool_discard(merge->repo->env, merge->repo->root, &merge->m);
    }
    close_writing(merge);
    return s;
}

gd_status
gd_merge_open(gd_repo *repo, const char *image_id, gd_mapping mapping,
              gd_merge **out, gd_error *err)
{
    GD_TRY(gd_repo_require_owner(repo, err));
    GD_TRY(require_mapping(mapping, err));
    gd_merge *merge = gd_calloc(repo->env, 1, sizeof *merge, err);
    if (merge == NULL) {
        return GD_NOMEM;
    }
    merge->repo = repo;
    merge->mapping = mapping;
    merge->old.fd = merge->m.fd = -1;
    gd_groupmap_init(&merge->shared, repo->env);
    gd_status s = gd_spool_open_recipe(repo->env, repo->root, &repo->params,
                                       image_id, NULL, &merge->old, err);
    if (s == GD_OK) {
        s = each_extent(merge, find_pair, err);
    }
    if (s == GD_OK && merge->touched) {
        s = write_merged(merge, err);
    }
    merge->mapping = (gd_mapping){NULL, 0}; /* the caller owns it again */
    if (s != GD_OK) {
        gd_merge_close(merge);
        return s;
    }
    *out = merge;
    return GD_OK;
}

void
gd_merge_close(gd_merge *merge)
{
    gd_repo *repo = merge->repo;
    const gd_env *env = repo->env;
    gd_spool_close(env, &merge->m);
    if (merge->old.fd >= 0) {
        env->close(env, merge->old.fd);
    }
    gd_locks_unlock_all_shared(repo->locks, &merge->shared);
    env->release(env, merge->facts.collisions);
    env->release(env, merge);
}

const gd_merge_facts *
gd_merge_facts_of(const gd_merge *merge)
{
    return &merge->facts;
}

const gd_recipe *
gd_merge_recipe(const gd_merge *merge)
{
    return merge->m.fd < 0 ? NULL : &merge->merged;
}

gd_status
gd_merge_exchange(gd_merge *merge, bool *done, gd_error *err)
{
    *done = false;
    if (merge->m.fd < 0) {
        return gd_fail(err, GD_INVALID, "%s was not changed by the merge",
                       merge->old.name);
    }
    return gd_recipe_exchange(merge->repo, &merge->old, &merge->m, done, err);
}
