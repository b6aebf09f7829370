/* SPDX-License-Identifier: Apache-2.0 */
/*
 * simple_maintainer.c - see simple_maintainer.h.
 */
#include "tests/c/support/simple_maintainer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/coding.h"
#include "engine/files/group.h"
#include "engine/files/spoolfile.h"
#include "engine/format/runs.h"
#include "engine/maintenance/blockcopy.h"
#include "engine/maintenance/grouprewrite.h"
#include "engine/maintenance/merge.h"
#include "engine/maintenance/ownedgroup.h"
#include "engine/maintenance/placeholder.h"
#include "engine/maintenance/scrub.h"
#include "engine/read/spare.h"

enum { MAX_IMAGES = 64, PAIR = 16 };

/* ---- counting ---- */

/* The number of references to each slot of one group. */
typedef struct counts {
    uint32_t group;
    uint32_t named[GD_MAX_SLOTS];
} counts;

static gd_status
count_recipe(const gd_spool_file *entry, counts *c, gd_error *err)
{
    gd_run *runs;
    size_t count;
    gd_status s = gd_spool_file_runs(
        entry, 0, gd_recipe_pages(entry->recipe.header.extents), &runs,
        &count, err);
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        for (uint32_t k = 0; k < runs[i].blocks; k++) {
            c->named[runs[i].slot + k] += runs[i].group == c->group;
        }
    }
    if (s == GD_OK) {
        entry->env->release(entry->env, runs);
    }
    return s;
}

/* N4.6: returns true if a process is deleting the image of a live spool file,
 * and would find the file missing. */
static bool
is_being_deleted(const gd_spool_file *entry)
{
    int fd;
    gd_error err;
    if (entry->kind != GD_SPOOL_DELETED) {
        return false;
    }
    gd_status s = gd_locks_lock_image(entry->env, entry->root,
                                      entry->recipe.header.image_id, 0, &fd,
                                      &err);
    if (s == GD_OK) {
        gd_locks_unlock_image(entry->env, fd);
    }
    return s != GD_OK;
}

/* *settled: it is complete, and only its name is to be removed. */
static gd_status
judge(gd_spool_file *entry, bool *settled, gd_error *err)
{
    bool live;
    *settled = true;
    gd_status s = gd_spool_file_live(entry, &live, err); /* N4.1 */
    if (s == GD_OK && live && is_being_deleted(entry)) {
        *settled = false;
        return GD_OK;
    }
    if (s != GD_OK || live || entry->kind == GD_SPOOL_EXCHANGE) {
        return s;
    }
    s = gd_spool_file_lock(entry, GD_BYTE_WRITER, err); /* N4.2 */
    if (s == GD_OK) {
        s = gd_spool_file_live(entry, &live, err); /* N4.3 */
    }
    if (s == GD_OK && !live && entry->kind != GD_SPOOL_GROUP) {
        s = gd_spool_file_lock(entry, GD_BYTE_USERS, err); /* N4.4 */
    }
    *settled = s == GD_OK;
    return s == GD_BUSY ? GD_OK : s;
}

/* N6.3. An incomplete spool file has a writer, which shares the group's lock
 * if it names the group: then we would not have the lock. */
static gd_status
pin(const gd_spool_file *entry, counts *c, gd_error *err)
{
    bool in_writing = entry->kind == GD_SPOOL_STORE ||
                      entry->kind == GD_SPOOL_MERGED ||
                      entry->kind == GD_SPOOL_GROUP;
    if (entry->complete) {
        return count_recipe(entry, c, err);
    }
    return in_writing ? GD_OK
                      : gd_fail(err, GD_CORRUPT, "%s: who knows what it names",
                                entry->name);
}

static gd_status
settle_entry(gd_repo *repo, const char *base, counts *c, size_t *left,
             gd_error *err)
{
    gd_spool_file entry;
    bool settled;
    gd_status s = gd_spool_file_open(repo->env, repo->root, &repo->params,
                                     base, &entry, err);
    if (s != GD_OK) {
        return s == GD_NOTFOUND ? GD_OK : s;
    }
    s = judge(&entry, &settled, err);
    if (s == GD_OK && settled) {
        s = gd_sync_dir(repo->env, repo->root, GD_DIR_IMAGES, err); /* N5.1 */
        if (s == GD_OK) {
            s = gd_spool_file_unlink(&entry, err);
            s = s == GD_NOTFOUND ? GD_OK : s; /* its writer was quicker */
        }
    } else if (s == GD_OK) {
        ++*left;
        s = pin(&entry, c, err);
    }
    gd_spool_file_close(&entry);
    return s;
}

static gd_status
settle_spool(gd_repo *repo, counts *c, size_t *left, gd_error *err)
{
    gd_spool_base *entries;
    size_t count;
    *left = 0;
    gd_status s =
        gd_spool_file_list(repo->env, repo->root, &entries, &count, err);
    if (s != GD_OK) {
        return s;
    }
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        s = settle_entry(repo, entries[i].name, c, left, err);
    }
    repo->env->release(repo->env, entries);
    return s;
}

typedef struct image_list {
    char ids[MAX_IMAGES][GD_IMAGE_ID_MAX + 1];
    size_t count;
} image_list;

static void
note_image(void *arg, const char *name)
{
    image_list *list = arg;
    if (list->count < MAX_IMAGES) {
        snprintf(list->ids[list->count], GD_IMAGE_ID_MAX + 1, "%s", name);
    }
    list->count++;
}

static gd_status
list_images(gd_repo *repo, image_list *list, gd_error *err)
{
    list->count = 0;
    int rc = repo->env->list(repo->env, repo->root, GD_DIR_IMAGES, note_image,
                             list);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot list %s", GD_DIR_IMAGES);
    }
    return list->count <= MAX_IMAGES
               ? GD_OK
               : gd_fail(err, GD_INVALID, "more than %d images", MAX_IMAGES);
}

static gd_status
count_images(gd_repo *repo, counts *c, gd_error *err)
{
    image_list list;
    gd_spool_file entry;
    gd_status s = list_images(repo, &list, err);
    for (size_t i = 0; s == GD_OK && i < list.count; i++) {
        s = gd_spool_file_open_image(repo->env, repo->root, &repo->params,
                                     list.ids[i], &entry, err);
        if (s == GD_OK) {
            s = count_recipe(&entry, c, err);
            gd_spool_file_close(&entry);
        } else if (s == GD_NOTFOUND) {
            s = GD_OK; /* deleted just now: the spool has it */
        }
    }
    return s;
}

/* ---- collecting ---- */

static gd_status
free_unnamed(gd_owned_group *owned, const counts *c, gd_error *err)
{
    static uint32_t slots[GD_MAX_SLOTS];
    size_t count = 0;
    uint32_t freed;
    uint64_t bytes;
    for (uint32_t i = 0; i < owned->leased->published.count; i++) {
        if (c->named[i] == 0) {
            slots[count++] = i;
        } else if (owned->leased->entries[i].state != GD_ENTRY_LIVE) {
            return gd_fail(err, GD_CORRUPT, "slot %u of group %08x is named, "
                           "but not live (I1)", i,
                           (unsigned)owned->leased->group->number);
        }
    }
    gd_status s = gd_owned_group_free(owned, slots, count, &freed, err);
    return s == GD_OK ? gd_owned_group_punch(owned, &bytes, err) : s;
}

/* Returns GD_BUSY if a tail waits for the next upload. */
static gd_status
rewrite(gd_owned_group *owned, unsigned options, gd_codec codec,
        gd_error *err)
{
    const gd_packing packing = {
        .codec = codec, .similar = (options & MAINTAINER_SIMILAR) != 0};
    uint64_t bytes;
    gd_status s = gd_group_rewrite_owned(owned, codec == GD_CODEC_NONE ? NULL
                                         : &packing, &bytes, err);
    return s == GD_BUSY ? GD_OK : s;
}

static gd_status
collect_held(gd_repo *repo, gd_owned_group *owned, unsigned options,
             gd_codec codec, size_t *spooled, gd_error *err)
{
    static counts c;
    bool removed = false;
    uint64_t bytes;
    memset(&c, 0, sizeof c);
    c.group = owned->leased->group->number;
    /* Images first: an image that is deleted in between is counted, one that
     * was deleted before has its spool file. A commit in between does not name
     * this group. */
    gd_status s = count_images(repo, &c, err);
    if (s == GD_OK) {
        s = settle_spool(repo, &c, spooled, err); /* N6.2 */
    }
    if (s == GD_OK) {
        s = free_unnamed(owned, &c, err);
    }
    if (s == GD_OK && (options & MAINTAINER_UNLINK) != 0) {
        s = gd_owned_group_unlink(owned, &removed, err);
    }
    if (s == GD_OK && !removed && (options & MAINTAINER_UNLINK) != 0) {
        s = gd_placeholder_leave(owned, &bytes, err);
    }
    if (s == GD_OK && !removed && (options & MAINTAINER_REWRITE) != 0) {
        s = rewrite(owned, options, codec, err);
    }
    return s;
}

static gd_status
collect_group(gd_repo *repo, uint32_t group, unsigned options, gd_codec codec,
              size_t *spooled, gd_error *err)
{
    gd_owned_group *owned;
    gd_status s = gd_owned_group_open(repo, group, &owned, err); /* N6.1 */
    if (s == GD_BUSY) {
        bool announce = (options & MAINTAINER_ANNOUNCE) != 0;
        s = announce ? gd_locks_announce(repo->locks, group, err) : GD_OK;
        return s == GD_BUSY ? GD_OK : s;
    }
    if (s == GD_OK) {
        s = collect_held(repo, owned, options, codec, spooled, err);
        gd_owned_group_close(owned);
    }
    return s;
}

gd_status
maintainer_collect(gd_repo *repo, unsigned options, gd_codec codec,
                   size_t *spooled, gd_error *err)
{
    uint32_t *numbers;
    size_t count;
    *spooled = 0;
    gd_status s = gd_group_numbers(repo->env, repo->root, &numbers, &count,
                                   err);
    if (s != GD_OK) {
        return s;
    }
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        s = collect_group(repo, numbers[i], options, codec, spooled, err);
    }
    repo->env->release(repo->env, numbers);
    gd_locks_withdraw_all(repo->locks);
    return s;
}

/* ---- merging ---- */

/* The published live blocks of all groups. */
typedef struct block_list {
    uint64_t *numbers; /* addresses, ascending */
    gd_fingerprint *fingerprints;
    uint32_t *lengths;
    gd_scope *scopes;
    size_t count, room;
} block_list;

static void
add_block(block_list *list, uint64_t number, const gd_entry *entry,
          const gd_scope *scope)
{
    if (list->count == list->room) {
        list->room = list->room == 0 ? 64 : list->room * 2;
        list->numbers = realloc(list->numbers, list->room * 8);
        list->fingerprints = realloc(list->fingerprints, list->room *
                                     sizeof *list->fingerprints);
        list->lengths = realloc(list->lengths, list->room * 4);
        list->scopes =
            realloc(list->scopes, list->room * sizeof *list->scopes);
    }
    list->numbers[list->count] = number;
    list->fingerprints[list->count] = entry->fingerprint;
    list->scopes[list->count] = *scope;
    list->lengths[list->count++] = entry->plain_length;
}

static void
free_blocks(block_list *list)
{
    free(list->numbers);
    free(list->fingerprints);
    free(list->lengths);
    free(list->scopes);
}

static gd_status
list_group(gd_repo *repo, uint32_t number, block_list *list, gd_error *err)
{
    gd_group *group;
    gd_published record;
    gd_entry *entries = NULL;
    gd_status s = gd_group_open(repo->env, repo->root, &repo->params, number,
                                O_RDONLY, &group, err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_group_read_published(group, &record, err);
    if (s == GD_OK && record.count > 0) {
        entries = calloc(record.count, sizeof *entries);
        s = gd_group_read_entries(group, 0, record.count, entries, err);
    }
    for (uint32_t i = 0; s == GD_OK && i < record.count; i++) {
        if (entries[i].state == GD_ENTRY_LIVE) {
            add_block(list, (uint64_t)number << GD_SLOT_BITS | i,
                      &entries[i], &group->scope);
        }
    }
    free(entries);
    gd_group_close(group);
    return s;
}

static gd_status
list_blocks(gd_repo *repo, block_list *list, gd_error *err)
{
    uint32_t *numbers;
    size_t count;
    gd_status s = gd_group_numbers(repo->env, repo->root, &numbers, &count,
                                   err);
    if (s != GD_OK) {
        return s;
    }
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        s = list_group(repo, numbers[i], list, err);
    }
    repo->env->release(repo->env, numbers);
    return s;
}

static bool
look_equal(const block_list *list, size_t a, size_t b)
{
    return gd_fingerprint_equal(&list->fingerprints[a],
                                &list->fingerprints[b]) &&
           list->lengths[a] == list->lengths[b] &&
           gd_scope_equal(&list->scopes[a], &list->scopes[b]);
}

/* Pairs each block that has an equal one before it with the first of these. */
static size_t
find_pairs(const block_list *list, uint8_t *pairs)
{
    size_t count = 0;
    for (size_t i = 0; i < list->count; i++) {
        size_t k = 0;
        while (!look_equal(list, k, i)) {
            k++;
        }
        if (k < i) {
            gd_put64(pairs + count * PAIR, list->numbers[i]);
            gd_put64(pairs + count * PAIR + 8, list->numbers[k]);
            count++;
        }
    }
    return count;
}

static gd_status
merge_to(gd_repo *repo, const char *image_id,
         gd_mapping mapping, gd_error *err)
{
    gd_merge *merge;
    bool done;
    gd_status s = gd_merge_open(repo, image_id, mapping, &merge, err);
    if (s != GD_OK) {
        return s;
    }
    if (gd_merge_recipe(merge) != NULL) {
        s = gd_merge_exchange(merge, &done, err);
    }
    gd_merge_close(merge);
    return s;
}

gd_status
maintainer_merge(gd_repo *repo, const char *image_id, gd_error *err)
{
    block_list list = {0};
    gd_status s = list_blocks(repo, &list, err);
    if (s == GD_OK) {
        uint8_t *pairs = malloc(list.count * PAIR + 1);
        size_t count = find_pairs(&list, pairs);
        s = merge_to(repo, image_id, (gd_mapping){pairs, count}, err);
        free(pairs);
    }
    free_blocks(&list);
    return s;
}

static gd_status
merge_all(gd_repo *repo, const uint8_t *pairs, size_t count, gd_error *err)
{
    image_list list;
    gd_status s = list_images(repo, &list, err);
    for (size_t i = 0; s == GD_OK && i < list.count; i++) {
        s = merge_to(repo, list.ids[i], (gd_mapping){pairs, count}, err);
        s = s == GD_BUSY || s == GD_NOTFOUND ? GD_OK : s;
    }
    return s;
}

gd_status
maintainer_evacuate(gd_repo *repo, uint32_t group, gd_error *err)
{
    block_list list = {0};
    gd_block_copy *copy;
    const uint8_t *pairs;
    size_t count;
    gd_status s = list_group(repo, group, &list, err);
    if (s == GD_OK) {
        s = gd_block_copy_open(repo, &copy, err);
    }
    if (s != GD_OK) {
        free_blocks(&list);
        return s == GD_NOTFOUND ? GD_OK : s;
    }
    uint8_t *addresses = malloc(list.count * 8 + 1);
    for (size_t i = 0; i < list.count; i++) {
        gd_put64(addresses + i * 8, list.numbers[i]);
    }
    s = gd_block_copy_add(copy, addresses, list.count, err);
    if (s == GD_OK) {
        s = gd_block_copy_finish(copy, &pairs, &count, err);
    }
    if (s == GD_OK) {
        s = merge_all(repo, pairs, count, err);
    }
    gd_block_copy_close(copy);
    free(addresses);
    free_blocks(&list);
    return s;
}

/* ---- spare copies and scrub ---- */

gd_status
maintainer_spare(gd_repo *repo, uint32_t group, uint32_t slots, gd_error *err)
{
    block_list list = {0};
    uint64_t bytes;
    gd_status s = list_group(repo, group, &list, err);
    if (s == GD_OK) {
        size_t count = list.count < slots ? list.count : slots;
        gd_address *addresses = malloc((count + 1) * sizeof *addresses);
        for (size_t i = 0; i < count; i++) {
            addresses[i] = (gd_address){
                group, (uint32_t)list.numbers[i] & (GD_MAX_SLOTS - 1)};
        }
        s = gd_spare_write(repo, group, addresses, count, &bytes, err);
        free(addresses);
    }
    free_blocks(&list);
    return s == GD_NOTFOUND ? GD_OK : s;
}

static gd_status
scrub_group(gd_repo *repo, uint32_t number, gd_error *err)
{
    gd_group *group;
    gd_published record;
    gd_scrub_result result;
    gd_status s = gd_group_open(repo->env, repo->root, &repo->params, number,
                                O_RDONLY, &group, err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_group_read_published(group, &record, err);
    gd_group_close(group);
    if (s == GD_OK) {
        s = gd_scrub(repo, number, 0, record.count, true, GD_SCRUB_ALL,
                     &result, err);
    }
    if (s == GD_OK) {
        for (uint32_t i = 0; s == GD_OK && i < record.count; i++) {
            if (result.verdicts[i] != GD_VERDICT_NONE &&
                result.verdicts[i] != GD_VERDICT_GOOD) {
                s = gd_fail(err, GD_CORRUPT, "slot %u of group %08x: verdict "
                            "%u", i, (unsigned)number, result.verdicts[i]);
            }
        }
        repo->env->release(repo->env, result.verdicts);
    }
    return s;
}

gd_status
maintainer_scrub(gd_repo *repo, gd_error *err)
{
    uint32_t *numbers;
    size_t count;
    gd_status s = gd_group_numbers(repo->env, repo->root, &numbers, &count,
                                   err);
    if (s != GD_OK) {
        return s;
    }
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        s = scrub_group(repo, numbers[i], err);
    }
    repo->env->release(repo->env, numbers);
    return s;
}
