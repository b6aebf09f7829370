/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shards.c - see shards.h.
 *
 * The shards are a tree: the root has all fingerprints, and a shard with bits
 * b has those of the two below it, with b + 1 bits.
 */
#include "engine/files/shards.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/coding.h"
#include "engine/base/listing.h"
#include "engine/files/file.h"
#include "engine/files/freespace.h"
#include "engine/files/group.h"
#include "engine/format/address.h"
#include "engine/format/index.h"

enum {
    RUNS_BYTE = 0, /* the others are of shards (duplicate_search.c) */
    LOOKS = 16,    /* at what others change meanwhile */
};

/* Only the last file that was set aside stays. */
#define SET_ASIDE GD_DIR_QUARANTINE "/index"

struct gd_shards {
    const gd_env *env;
    int root, lock_fd; /* lock_fd: -1: the lock is not held */
    uint64_t reserve;
    uint8_t catalog_id[GD_ID_SIZE];
};

/* ---- the handle, and locks ---- */

/* The number of the highest cursors; 0: there are none. */
static uint64_t
newest_cursors(const gd_index_list *list)
{
    uint64_t newest = 0;
    for (size_t i = 0; i < list->count; i++) {
        const gd_index_id *id = &list->files[i];
        if (id->kind == GD_INDEX_CURSORS && id->number > newest) {
            newest = id->number;
        }
    }
    return newest;
}

/* Takes the catalog's id from the highest cursors. */
static gd_status
adopt_catalog(gd_shards *shards, gd_error *err)
{
    gd_index_list list;
    gd_index_reader *reader = NULL;
    gd_status s = GD_NOTFOUND;
    /* Others may replace the cursors between the listing and the opening. */
    for (int i = 0; s == GD_NOTFOUND && i < LOOKS; i++) {
        s = gd_shards_list(shards, &list, err);
        if (s != GD_OK) {
            return s;
        }
        const gd_index_id id = {GD_INDEX_CURSORS, 0, 0, newest_cursors(&list)};
        shards->env->release(shards->env, list.files);
        if (id.number == 0) {
            return gd_fail(err, GD_NOTFOUND, "no catalog has an index in %s",
                           GD_DIR_INDEX);
        }
        s = gd_index_reader_open(shards->env, shards->root, &id, NULL, &reader,
                                 err);
    }
    if (s == GD_OK) {
        memcpy(shards->catalog_id, gd_index_reader_head(reader)->catalog_id,
               GD_ID_SIZE);
        gd_index_reader_close(reader);
    }
    return s;
}

gd_status
gd_shards_open(const gd_env *env, int root, uint64_t reserve,
               const uint8_t *catalog_id, gd_shards **shards, gd_error *err)
{
    *shards = NULL;
    gd_shards *made = gd_calloc(env, 1, sizeof *made, err);
    if (made == NULL) {
        return GD_NOMEM;
    }
    *made = (gd_shards){
        .env = env, .root = root, .lock_fd = -1, .reserve = reserve};
    gd_status s;
    if (catalog_id == NULL) {
        s = adopt_catalog(made, err);
    } else {
        memcpy(made->catalog_id, catalog_id, GD_ID_SIZE);
        s = gd_file_create_directory(env, root, GD_DIR_INDEX, err);
    }
    if (s != GD_OK) {
        env->release(env, made);
        return s;
    }
    *shards = made;
    return GD_OK;
}

void
gd_shards_close(gd_shards *shards)
{
    if (shards != NULL) {
        gd_shards_unlock(shards);
        shards->env->release(shards->env, shards);
    }
}

const gd_env *
gd_shards_env(const gd_shards *shards)
{
    return shards->env;
}

gd_status
gd_shards_take_byte(gd_shards *shards, uint64_t byte, int *fd, gd_error *err)
{
    const gd_env *env = shards->env;
    GD_TRY(gd_file_open_or_create(env, shards->root,
                                  GD_FILE_INDEX_LOCKS, fd, err));
    int rc = env->lock(env, *fd, byte, F_WRLCK);
    if (rc == 0) {
        return GD_OK;
    }
    env->close(env, *fd);
    *fd = -1;
    return rc == -EAGAIN ? GD_BUSY
                         : gd_fail_errno(err, -rc, "cannot lock %s",
                                         GD_FILE_INDEX_LOCKS);
}

gd_status
gd_shards_lock(gd_shards *shards, gd_error *err)
{
    return shards->lock_fd >= 0
               ? GD_OK
               : gd_shards_take_byte(shards, RUNS_BYTE, &shards->lock_fd, err);
}

void
gd_shards_unlock(gd_shards *shards)
{
    if (shards->lock_fd >= 0) {
        shards->env->close(shards->env, shards->lock_fd);
        shards->lock_fd = -1;
    }
}

/* ---- the tree ---- */

/* The first and the last of the smallest shards that lie in this one. */
static uint32_t
first_in(uint32_t bits, uint32_t shard)
{
    return shard << (GD_SHARD_BITS_MAX - bits);
}

static uint32_t
last_in(uint32_t bits, uint32_t shard)
{
    return first_in(bits, shard) +
           ((UINT32_C(1) << (GD_SHARD_BITS_MAX - bits)) - 1);
}

static int
compare_ids(const void *a, const void *b)
{
    const gd_index_id *x = a, *y = b;
    if (x->kind != y->kind) {
        return x->kind < y->kind ? -1 : 1;
    }
    uint32_t i = first_in(x->bits, x->shard), j = first_in(y->bits, y->shard);
    if (i != j) {
        return i < j ? -1 : 1;
    }
    if (x->bits != y->bits) {
        return x->bits < y->bits ? -1 : 1;
    }
    return x->number < y->number ? -1 : x->number > y->number;
}

static bool
parse_id(const char *name, void *id)
{
    return gd_names_parse_index(name, id);
}

static gd_status
list_once(gd_shards *shards, gd_index_list *list, gd_error *err)
{
    static const gd_listing listing = {sizeof(gd_index_id),
                                       "the index's listing", parse_id,
                                       compare_ids};
    const gd_env *env = shards->env;
    void *items;
    *list = (gd_index_list){NULL, 0};
    int rc = env->renew(env, shards->root, GD_DIR_INDEX "/.");
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot look at %s", GD_DIR_INDEX);
    }
    gd_status s = gd_list(env, shards->root, GD_DIR_INDEX, &listing, &items,
                          &list->count, err);
    list->files = items;
    return s;
}

static bool
is_shard(const gd_index_list *list, size_t at)
{
    return at < list->count && list->files[at].kind == GD_INDEX_SHARD;
}

/* Returns whether two lists have the same shards, which come first in each. */
static bool
have_same_shards(const gd_index_list *a, const gd_index_list *b)
{
    size_t i = 0;
    while (is_shard(a, i) && is_shard(b, i) &&
           compare_ids(&a->files[i], &b->files[i]) == 0) {
        i++;
    }
    return !is_shard(a, i) && !is_shard(b, i);
}

/* While another process gives a shard its new generation, and removes the old
 * one, a listing may have neither of the two.  The next listing has the new
 * one; a merge takes longer than a listing.  So two equal ones are right. */
gd_status
gd_shards_list(gd_shards *shards, gd_index_list *list, gd_error *err)
{
    gd_status s = list_once(shards, list, err);
    for (int i = 0; s == GD_OK && i < LOOKS; i++) {
        gd_index_list before = *list;
        s = list_once(shards, list, err);
        bool same = s == GD_OK && have_same_shards(&before, list);
        shards->env->release(shards->env, before.files);
        if (same) {
            return GD_OK;
        }
    }
    shards->env->release(shards->env, list->files);
    *list = (gd_index_list){NULL, 0};
    return s == GD_OK ? gd_fail(err, GD_BUSY, "the shards in %s change all "
                                "the time", GD_DIR_INDEX)
                      : s;
}

/* The place of the first file that is not before this one. */
static size_t
lower_bound(const gd_index_list *list, const gd_index_id *id)
{
    size_t low = 0, high = list->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (compare_ids(&list->files[middle], id) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* The highest generation of this very shard; 0: there is none. */
static uint64_t
generation_of(const gd_index_list *list, uint32_t bits, uint32_t shard)
{
    const gd_index_id behind = {GD_INDEX_SHARD, bits, shard, UINT64_MAX};
    size_t at = lower_bound(list, &behind);
    if (at == 0) {
        return 0;
    }
    const gd_index_id *id = &list->files[at - 1];
    return is_shard(list, at - 1) && id->bits == bits && id->shard == shard
               ? id->number
               : 0;
}

/* The place of the first shard that is this one or below it; from there on,
 * is_below finds their end. */
static size_t
first_below(const gd_index_list *list, uint32_t bits, uint32_t shard)
{
    const gd_index_id first = {GD_INDEX_SHARD, bits, shard, 0};
    return lower_bound(list, &first);
}

static bool
is_below(const gd_index_list *list, size_t at, uint32_t bits, uint32_t shard)
{
    return is_shard(list, at) && first_in(list->files[at].bits,
                                          list->files[at].shard) <=
                                     last_in(bits, shard);
}

/* Returns whether there is a shard that is this one or below it. */
static bool
has_shards(const gd_index_list *list, uint32_t bits, uint32_t shard)
{
    return is_below(list, first_below(list, bits, shard), bits, shard);
}

/* Returns whether shards of at least this generation, of which it is enough
 * that one is there, have all fingerprints of this one. */
static bool
is_covered(const gd_index_list *list, uint32_t bits, uint32_t shard,
           uint64_t least)
{
    uint64_t own = generation_of(list, bits, shard);
    if (own > 0 && own >= least) {
        return true;
    }
    return bits < GD_SHARD_BITS_MAX && has_shards(list, bits, shard) &&
           is_covered(list, bits + 1, 2 * shard, least) &&
           is_covered(list, bits + 1, 2 * shard + 1, least);
}

/* The shards that count, below one, as they are found. */
typedef struct finding {
    gd_shards *shards;
    const gd_index_list *list;
    /* Of each shard that counts, or, with holes, of each place without one. */
    gd_status (*visit)(struct finding *f, const gd_index_id *id);
    gd_index_id *found;
    size_t count;
    bool holes;
    gd_error *err;
} finding;

static gd_status
visit_current(finding *f, uint32_t bits, uint32_t shard)
{
    const gd_index_list *list = f->list;
    uint64_t own = generation_of(list, bits, shard);
    bool split = bits < GD_SHARD_BITS_MAX && has_shards(list, bits, shard) &&
                 (own == 0 ||
                  (is_covered(list, bits + 1, 2 * shard, own) &&
                   is_covered(list, bits + 1, 2 * shard + 1, own)));
    if (split) {
        gd_status s = visit_current(f, bits + 1, 2 * shard);
        return s == GD_OK ? visit_current(f, bits + 1, 2 * shard + 1) : s;
    }
    const gd_index_id id = {GD_INDEX_SHARD, bits, shard, own};
    return (own == 0) == f->holes ? f->visit(f, &id) : GD_OK;
}

static gd_status
note_current(finding *f, const gd_index_id *id)
{
    f->found[f->count++] = *id;
    return GD_OK;
}

/* The sum of the sizes, in the smallest shards. */
static bool
covers_all(const gd_index_id *ids, size_t count)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        sum += UINT32_C(1) << (GD_SHARD_BITS_MAX - ids[i].bits);
    }
    return sum == UINT32_C(1) << GD_SHARD_BITS_MAX;
}

gd_status
gd_shards_current(gd_shards *shards, const gd_index_list *list,
                  gd_index_id **current, size_t *count, bool *complete,
                  gd_error *err)
{
    finding f = {.shards = shards, .list = list, .visit = note_current,
                 .err = err};
    *current = NULL;
    *count = 0;
    *complete = false;
    if (list->count == 0) {
        return GD_OK;
    }
    /* No more shards count than there are files. */
    f.found = gd_calloc(shards->env, list->count, sizeof *f.found, err);
    if (f.found == NULL) {
        return GD_NOMEM;
    }
    (void)visit_current(&f, 0, 0);
    *current = f.found;
    *count = f.count;
    *complete = covers_all(f.found, f.count);
    return GD_OK;
}

static bool
is_current(const gd_index_id *current, size_t count, const gd_index_id *id)
{
    return count > 0 &&
           bsearch(id, current, count, sizeof *id, compare_ids) != NULL;
}

gd_status
gd_shards_rescan(gd_shards *shards, gd_index_id **current, size_t *count,
                 bool *complete, gd_error *err)
{
    gd_index_list list;
    *current = NULL;
    *count = 0;
    gd_status s = gd_shards_list(shards, &list, err);
    if (s == GD_OK) {
        s = gd_shards_current(shards, &list, current, count, complete, err);
        shards->env->release(shards->env, list.files);
    }
    return s;
}

gd_status
gd_shards_counts(gd_shards *shards, const gd_index_id *id, bool *counts,
                 gd_error *err)
{
    gd_index_id *current;
    size_t count;
    bool complete;
    gd_status s = gd_shards_rescan(shards, &current, &count, &complete, err);
    *counts = s == GD_OK && is_current(current, count, id);
    shards->env->release(shards->env, current);
    return s;
}

gd_status
gd_shards_next(const gd_index_list *list, uint32_t bits, uint32_t shard,
               uint64_t *generation, gd_error *err)
{
    uint64_t highest = 0;
    for (size_t at = first_below(list, bits, shard);
         is_below(list, at, bits, shard); at++) {
        uint64_t number = list->files[at].number;
        highest = number > highest ? number : highest;
    }
    /* The names of pairs have room for 32 bits. */
    if (highest >= UINT32_MAX) {
        return gd_fail(err, GD_CORRUPT, "a shard of the index has the "
                       "generation %llu", (unsigned long long)highest);
    }
    *generation = highest + 1;
    return GD_OK;
}

/* ---- files ---- */

gd_status
gd_shards_sync(gd_shards *shards, gd_error *err)
{
    return gd_sync_dir(shards->env, shards->root, GD_DIR_INDEX, err);
}

gd_status
gd_shards_create(gd_shards *shards, const gd_index_id *id,
                 gd_index_writer **writer, gd_error *err)
{
    return gd_index_writer_create(shards->env, shards->root, id,
                                  shards->catalog_id,
                                  writer, err);
}

gd_status
gd_shards_require_room(gd_shards *shards, uint64_t bytes, gd_error *err)
{
    return gd_freespace_check(shards->env, shards->root,
                              (gd_freespace){.reserve = shards->reserve},
                              bytes, err);
}

/* Without the sync of the directory. */
static gd_status
write_file(gd_shards *shards, const gd_index_id *id, const uint8_t *items,
           size_t count, gd_error *err)
{
    gd_index_writer *writer;
    GD_TRY(gd_shards_require_room(shards,
                                  count * gd_index_head_item_size(id->kind),
                                  err));
    GD_TRY(gd_shards_create(shards, id, &writer, err));
    gd_status s = gd_index_writer_append(writer, items, count, err);
    if (s == GD_OK) {
        s = gd_index_writer_seal(writer, 0, err);
    }
    if (s == GD_OK) {
        s = gd_index_writer_publish(writer, err);
    }
    gd_index_writer_discard(writer);
    return s;
}

gd_status
gd_shards_write(gd_shards *shards, const gd_index_id *id, const uint8_t *items,
                size_t count, gd_error *err)
{
    GD_TRY(write_file(shards, id, items, count, err));
    return gd_shards_sync(shards, err);
}

gd_status
gd_shards_remove(gd_shards *shards, const gd_index_id *id, gd_error *err)
{
    char name[GD_NAME_SIZE];
    gd_names_index(id, name);
    int rc = shards->env->unlinkat(shards->env, shards->root, name);
    return rc == 0 || rc == -ENOENT
               ? GD_OK
               : gd_fail_errno(err, -rc, "cannot remove %s", name);
}

gd_status
gd_shards_set_aside(gd_shards *shards, const gd_index_id *id, gd_error *err)
{
    char name[GD_NAME_SIZE];
    gd_names_index(id, name);
    int rc = shards->env->renameat(shards->env, shards->root, name, SET_ASIDE);
    return rc == 0 || rc == -ENOENT
               ? GD_OK
               : gd_fail_errno(err, -rc, "cannot move %s to %s", name,
                               SET_ASIDE);
}

gd_status
gd_shards_verify(gd_shards *shards, const gd_index_id *id, gd_error *err)
{
    return gd_indexfile_verify(shards->env, shards->root, id,
                               shards->catalog_id, err);
}

gd_status
gd_shards_read(gd_shards *shards, const gd_index_id *id,
               gd_index_reader **reader, gd_error *err)
{
    return gd_index_reader_open(shards->env, shards->root, id,
                                shards->catalog_id,
                                reader, err);
}

/* ---- what the holder of the lock of the runs does ---- */

static gd_status
list_locked(gd_shards *shards, gd_index_list *list, gd_error *err)
{
    return shards->lock_fd >= 0
               ? gd_shards_list(shards, list, err)
               : gd_fail(err, GD_INVALID, "the lock of the index's runs was "
                         "not taken");
}

/* Returns how many of the sorted records are of this shard; they are the
 * first. */
static size_t
count_in(const gd_index_id *shard, const uint8_t *records, size_t count)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        uint64_t key = gd_index_key(records + middle * GD_INDEX_RECORD);
        if (gd_index_shard(key, shard->bits) > shard->shard) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

static gd_status
add_to(gd_shards *shards, const gd_index_id *current, size_t shard_count,
       gd_index_kind kind, const uint8_t *records, size_t count,
       gd_error *err)
{
    gd_status s = GD_OK;
    for (size_t i = 0; s == GD_OK && count > 0 && i < shard_count; i++) {
        size_t here = count_in(&current[i], records, count);
        gd_index_id id = {kind, current[i].bits, current[i].shard, 0};
        if (here > 0) {
            s = gd_random(shards->env, &id.number, sizeof id.number, err);
        }
        if (s == GD_OK && here > 0) {
            s = write_file(shards, &id, records, here, err);
        }
        records += here * GD_INDEX_RECORD;
        count -= here;
    }
    return s == GD_OK ? gd_shards_sync(shards, err) : s;
}

gd_status
gd_shards_add(gd_shards *shards, gd_index_kind kind, const uint8_t *records,
              size_t count, gd_error *err)
{
    gd_index_list list;
    gd_index_id *current = NULL;
    size_t shard_count;
    bool complete;
    GD_TRY(list_locked(shards, &list, err));
    gd_status s = gd_shards_current(shards, &list, &current, &shard_count,
                                    &complete, err);
    if (s == GD_OK && !complete) {
        s = gd_fail(err, GD_CORRUPT, "the shards in %s do not cover all "
                    "fingerprints", GD_DIR_INDEX);
    }
    if (s == GD_OK) {
        s = add_to(shards, current, shard_count, kind, records, count, err);
    }
    shards->env->release(shards->env, current);
    shards->env->release(shards->env, list.files);
    return s;
}

static gd_status
fill_hole(finding *f, const gd_index_id *hole)
{
    gd_index_id id = *hole;
    GD_TRY(gd_shards_next(f->list, id.bits, id.shard, &id.number,
                          f->err));
    return write_file(f->shards, &id, NULL, 0, f->err);
}

gd_status
gd_shards_fill(gd_shards *shards, gd_error *err)
{
    gd_index_list list;
    finding f = {.shards = shards, .list = &list, .visit = fill_hole,
                 .holes = true, .err = err};
    GD_TRY(list_locked(shards, &list, err));
    gd_status s = visit_current(&f, 0, 0);
    if (s == GD_OK) {
        s = gd_shards_sync(shards, err);
    }
    shards->env->release(shards->env, list.files);
    return s;
}

static gd_status
tidy_files(gd_shards *shards, const gd_index_list *list,
           const gd_index_id *current, size_t count, gd_error *err)
{
    uint64_t newest = newest_cursors(list);
    gd_status s = GD_OK;
    for (size_t i = 0; s == GD_OK && i < list->count; i++) {
        const gd_index_id *id = &list->files[i];
        if (id->kind == GD_INDEX_NEW) {
            s = gd_indexfile_remove_dead(shards->env, shards->root, id, err);
        } else if ((id->kind == GD_INDEX_CURSORS && id->number < newest) ||
                   (id->kind == GD_INDEX_SHARD &&
                    !is_current(current, count, id))) {
            s = gd_shards_remove(shards, id, err);
        }
    }
    return s;
}

gd_status
gd_shards_tidy(gd_shards *shards, gd_error *err)
{
    gd_index_list list;
    gd_index_id *current = NULL;
    size_t count;
    bool complete;
    GD_TRY(list_locked(shards, &list, err));
    /* First: the names for which others are removed may not be durable. */
    gd_status s = gd_shards_sync(shards, err);
    if (s == GD_OK) {
        s = gd_shards_current(shards, &list, &current, &count, &complete, err);
    }
    if (s == GD_OK) {
        s = tidy_files(shards, &list, current, count, err);
    }
    shards->env->release(shards->env, current);
    shards->env->release(shards->env, list.files);
    return s;
}

/* ---- groups ---- */

gd_status
gd_shards_groups(gd_shards *shards, uint8_t **groups, uint32_t *highest,
                 gd_error *err)
{
    const gd_env *env = shards->env;
    uint32_t *numbers;
    size_t count;
    *groups = NULL;
    *highest = 0;
    int rc = env->renew(env, shards->root, GD_DIR_GROUPS "/.");
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot look at %s", GD_DIR_GROUPS);
    }
    GD_TRY(gd_group_numbers(env, shards->root, &numbers, &count, err));
    *highest = count > 0 ? numbers[count - 1] : 0;
    *groups = gd_calloc(env, *highest / 8 + 1, 1, err);
    for (size_t i = 0; *groups != NULL && i < count; i++) {
        (*groups)[numbers[i] / 8] |= (uint8_t)(1 << numbers[i] % 8);
    }
    env->release(env, numbers);
    return *groups == NULL ? GD_NOMEM : GD_OK;
}

/* ---- looking for a fingerprint ---- */

/* The address in a frame; 0: none. */
static uint64_t
find_in_frame(const uint8_t *items, size_t count, uint64_t key)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (gd_index_key(items + middle * GD_INDEX_RECORD) < key) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    const uint8_t *record = items + low * GD_INDEX_RECORD;
    return low < count && gd_index_key(record) == key
               ? gd_index_address(record)
               : 0;
}

static gd_status
find_in(gd_index_reader *reader, uint64_t key, uint64_t *address,
        gd_error *err)
{
    uint64_t low = 0,
    high = gd_index_head_frames(gd_index_reader_head(reader));
    const uint8_t *items;
    size_t count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        GD_TRY(gd_index_reader_frame(reader, middle, &items, &count, err));
        if (key < gd_index_key(items)) {
            high = middle;
        } else if (key >
                   gd_index_key(items + (count - 1) * GD_INDEX_RECORD)) {
            low = middle + 1;
        } else {
            *address = find_in_frame(items, count, key);
            return GD_OK;
        }
    }
    return GD_OK;
}

gd_status
gd_shards_find(gd_shards *shards, uint64_t key, uint64_t *address,
               gd_error *err)
{
    gd_index_id *current;
    gd_index_reader *reader = NULL;
    size_t count;
    bool complete;
    *address = 0;
    gd_status s = gd_shards_rescan(shards, &current, &count, &complete, err);
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        if (gd_index_shard(key, current[i].bits) == current[i].shard) {
            s = gd_shards_read(shards, &current[i], &reader, err);
            if (s == GD_OK) {
                s = find_in(reader, key, address, err);
            }
            break;
        }
    }
    gd_index_reader_close(reader);
    shards->env->release(shards->env, current);
    return s;
}
