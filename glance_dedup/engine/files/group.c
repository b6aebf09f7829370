/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.c - see group.h.
 */
#include "engine/files/group.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/coding.h"
#include "engine/base/listing.h"
#include "engine/base/zero.h"
#include "engine/files/file.h"
#include "engine/files/secondname.h"
#include "engine/files/spool.h"
#include "engine/format/address.h"

/* Of an object: a segment begins below 2^32. */
#define MAX_LENGTH ((1ULL << 32) + GD_SEGMENT_HEADER + GD_SEGMENT_MAX)

enum { MAKING_TRIES = 1000 };

static uint64_t
record_offset(uint64_t sequence)
{
    return GD_GROUP_HEAD + (sequence & 1) * GD_PUBLISHED_RECORD;
}

/* Fills in the fields of the group's header. */
static gd_status
read_header(gd_group *group, const gd_params *params, gd_error *err)
{
    uint8_t raw[GD_GROUP_HEAD];
    gd_group_head head;
    GD_TRY(gd_group_read_file(group, raw, sizeof raw, 0, err));
    GD_TRY(gd_group_head_decode(raw, params, group->number, group->name,
                                &head, err));
    group->scope = head.scope;
    group->bounds = head.bounds;
    group->is_cold = head.major == GD_GROUP_COLD;
    group->object.group = group->number;
    memcpy(group->object.id, head.object_id, GD_ID_SIZE);
    return GD_OK;
}

/* Nothing is appended to a cold group, so the record has the object's length as
 * long as the group has this file. */
static gd_status
find_length(gd_group *group, gd_error *err)
{
    gd_published record;
    gd_status s = gd_group_read_published(group, &record, err);
    group->object.length = record.end;
    if (s == GD_OK && (record.count != group->bounds.slots ||
                       record.end <
                           gd_fptable_data_start(group->bounds.slots) ||
                       record.end > MAX_LENGTH)) {
        s = gd_fail(err, GD_CORRUPT, "%s is cold, and no record (offset %d) "
                    "tells its object's length", group->name, GD_GROUP_HEAD);
    }
    return s;
}

/* Opens a file that is written to once more, to read it beside the page
 * cache. */
static gd_status
open_content(gd_group *group, int root, gd_error *err)
{
    const gd_env *env = group->env;
    struct stat st;
    GD_TRY(gd_file_open(env, root, group->name, O_RDONLY | O_DIRECT,
                        &group->content, err));
    int rc = env->fstat(env, group->content, &st);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot stat %s", group->name);
    }
    return st.st_ino == group->inode
               ? GD_OK
               : gd_fail(err, GD_BUSY, "%s was replaced while it was opened",
                         group->name);
}

/* flags: O_RDONLY, perhaps with O_DIRECT, or O_RDWR */
static gd_status
open_file(gd_group *group, int root, const gd_params *params, int flags,
          gd_error *err)
{
    char name[GD_NAME_SIZE];
    struct stat st;
    snprintf(name, sizeof name, "%s", group->name);
    gd_status s = gd_second_name_open_any(group->env, root, params, name,
                                          flags, group->name, &group->fd, err);
    group->content = group->fd;
    if (s == GD_OK) {
        s = gd_group_stat(group, &st, err);
    }
    if (s != GD_OK) {
        return s;
    }
    group->inode = st.st_ino;
    return params->shared && (flags & O_ACCMODE) != O_RDONLY
               ? open_content(group, root, err) /* N13.1 */
               : GD_OK;
}

static gd_status
open_group(const gd_env *env, int root, const gd_params *params,
           uint32_t number, const char *name, int flags, gd_group **out,
           gd_error *err)
{
    gd_group *group = gd_calloc(env, 1, sizeof *group, err);
    if (group == NULL) {
        return GD_NOMEM;
    }
    group->env = env;
    group->number = number;
    snprintf(group->name, sizeof group->name, "%s", name);
    gd_status s = open_file(group, root, params, flags, err);
    if (s == GD_OK) {
        s = read_header(group, params, err);
    }
    group->slices = params->slices;
    if (s == GD_OK && group->is_cold) {
        s = find_length(group, err);
    }
    if (s != GD_OK) {
        gd_group_close(group);
        return s;
    }
    *out = group;
    return GD_OK;
}

/* Of a file that is only read, beside the page cache if others may write. */
static int
fresh_flags(const gd_params *params, int flags)
{
    return params->shared && flags == O_RDONLY ? O_RDONLY | O_DIRECT : flags;
}

gd_status
gd_group_open_as(const gd_env *env, int root, const gd_params *params,
                 uint32_t number, const char *name, int flags, gd_group **group,
                 gd_error *err)
{
    return open_group(env, root, params, number, name,
                      fresh_flags(params, flags), group, err);
}

static gd_status
open_numbered(const gd_env *env, int root, const gd_params *params,
              uint32_t number, int flags, gd_group **group, gd_error *err)
{
    char name[GD_NAME_SIZE];
    gd_names_group(number, name);
    gd_group *opened;
    gd_status s =
        open_group(env, root, params, number, name, flags, &opened, err);
    if (s != GD_OK) {
        return s;
    }
    if (gd_scope_equal(&opened->scope, &gd_spares_scope)) {
        gd_group_close(opened);
        return gd_fail(err, GD_CORRUPT, "%s has spare copies (offset 32): it "
                       "was put under a group's name", name);
    }
    *group = opened;
    return GD_OK;
}

gd_status
gd_group_open(const gd_env *env, int root, const gd_params *params,
              uint32_t number, int flags, gd_group **group, gd_error *err)
{
    return open_numbered(env, root, params, number, fresh_flags(params, flags),
                         group, err);
}

gd_status
gd_group_settle(const gd_env *env, int root, const gd_params *params,
                uint32_t number, gd_error *err)
{
    char name[GD_NAME_SIZE];
    gd_names_group(number, name);
    return gd_second_name_finish(env, root, params, name, err);
}

gd_status
gd_group_open_cached(const gd_env *env, int root, const gd_params *params,
                     uint32_t number, gd_group **group, gd_error *err)
{
    return open_numbered(env, root, params, number, O_RDONLY, group, err);
}

void
gd_group_close(gd_group *group)
{
    if (group != NULL) {
        const gd_env *env = group->env;
        if (group->content >= 0 && group->content != group->fd) {
            env->close(env, group->content);
        }
        if (group->fd >= 0) {
            env->close(env, group->fd);
        }
        env->release(env, group);
    }
}

gd_status
gd_group_stat(const gd_group *group, struct stat *st, gd_error *err)
{
    int rc = group->env->fstat(group->env, group->fd, st);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot stat %s", group->name)
                  : GD_OK;
}

gd_status
gd_group_revalidate_name(const gd_group *group, int root, gd_error *err)
{
    bool same;
    gd_status s = gd_find_same(group->env, group->fd, root, group->name, &same,
                               err);
    return s != GD_OK || same ? s
                              : gd_fail(err, GD_BUSY, "%s was replaced while "
                                        "it was open", group->name);
}

gd_status
gd_group_hold(const gd_group *group, gd_error *err)
{
    int rc = group->env->lock(group->env, group->fd, GD_BYTE_LESSEE, F_RDLCK);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot lock %s", group->name)
                  : GD_OK;
}

int
gd_group_open_direct(const gd_group *group, int root, int access)
{
    const gd_env *env = group->env;
    struct stat st;
    int fd;
    if (group->is_cold) {
        return -1;
    }
    if (gd_open(env, root, group->name, access | O_DIRECT, 0, &fd, NULL) !=
        GD_OK) {
        return -1;
    }
    if (env->fstat(env, fd, &st) < 0 || !S_ISREG(st.st_mode) ||
        st.st_ino != group->inode) {
        env->close(env, fd);
        return -1;
    }
    return fd;
}

/* ---- all groups ---- */

static bool
parse_number(const char *name, void *number)
{
    return gd_names_parse_any_group(name, number);
}

static int
ascending(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

gd_status
gd_group_numbers(const gd_env *env, int root, uint32_t **numbers,
                 size_t *count, gd_error *err)
{
    static const gd_listing groups = {sizeof **numbers, "the list of groups",
                                      parse_number, ascending};
    void *items;
    gd_status s = gd_list(env, root, GD_DIR_GROUPS, &groups, &items, count,
                          err);
    *numbers = items;
    /* A group that is being replaced has two names. */
    size_t kept = 0;
    for (size_t i = 0; i < *count; i++) {
        if (kept == 0 || (*numbers)[kept - 1] != (*numbers)[i]) {
            (*numbers)[kept++] = (*numbers)[i];
        }
    }
    *count = kept;
    return s;
}

/* ---- creation ---- */

static void
note_highest(void *arg, const char *name)
{
    uint32_t *highest = arg, number;
    if (gd_names_parse_any_group(name, &number) && number > *highest) {
        *highest = number;
    }
}

gd_status
gd_group_write_new(const gd_env *env, int fd, const char *name,
                   const gd_params *params, const gd_scope *scope,
                   uint32_t number, gd_error *err)
{
    uint8_t raw[GD_GROUP_HEAD] = {0};
    gd_group_head head = {.major = GD_FORMAT_MAJOR,
                          .number = number,
                          .scope = *scope,
                          .bounds = {.slots = params->group_slots,
                                     .max_block = params->block_size}};
    memcpy(head.repository_id, params->repository_id, GD_ID_SIZE);
    memcpy(head.digest, params->digest, GD_DIGEST_NAME);
    /* The identity makes the seed unique to this group, since the number of a
     * lost group is used again. */
    GD_TRY(gd_random(env, head.identity, GD_ID_SIZE, err));
    gd_group_head_encode(&head, raw);
    GD_TRY(gd_write_full(env, fd, raw, sizeof raw, 0, name, err));
    /* Allocated now, so that no later write of an entry lacks space. */
    int rc;
    do {
        rc =
        env->fallocate(env, fd, 0, gd_fptable_data_start(params->group_slots));
    } while (rc == -EINTR);
    if (rc >= 0) {
        rc = env->fsync(env, fd);
    }
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot make group %08x as %s",
                                  (unsigned)number, name)
                  : GD_OK;
}

static gd_status
find_highest(const gd_env *env, int root, uint32_t *highest, gd_error *err)
{
    *highest = 0;
    int rc = env->list(env, root, GD_DIR_GROUPS, note_highest, highest);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot list %s", GD_DIR_GROUPS)
                  : GD_OK;
}

/* Gives the file its number's name.  GD_EXISTS if another process was
 * faster. */
static gd_status
name_new_group(const gd_env *env, int root, const char *spool_name,
               uint32_t number, gd_error *err)
{
    char name[GD_NAME_SIZE];
    gd_names_group(number, name);
    int rc = env->linkat(env, root, spool_name, name);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot link %s to %s", spool_name,
                             name);
    }
    return gd_sync_dir(env, root, GD_DIR_GROUPS, err);
}

static gd_status
create_under_lease(const gd_env *env, int root, const gd_params *params,
                   const gd_scope *scope, uint32_t number, gd_error *err)
{
    gd_spool_writer file;
    GD_TRY(gd_spool_create(env, root, GD_SPOOL_GROUP, &file, err));
    gd_status s = gd_group_write_new(env, file.fd, file.name, params, scope,
                                     number, err);
    if (s == GD_OK) {
        s = name_new_group(env, root, file.name, number, err);
    }
    gd_spool_discard(env, root, &file);
    return s;
}

gd_status
gd_group_create(const gd_env *env, int root, const gd_params *params,
                const gd_scope *scope, gd_locks *locks, uint32_t *number,
                gd_error *err)
{
    uint32_t highest;
    gd_status s = find_highest(env, root, &highest, err);
    if (s != GD_OK) {
        return s;
    }
    uint32_t tries = 0; /* without a limit, a lock server that always refuses
                         * would make us try every number */
    /* Take the lease first, so that nobody else takes the group between its
     * naming and our first block. */
    for (uint32_t n = highest + 1; n <= GD_MAX_GROUP; n++) {
        if (++tries > MAKING_TRIES) {
            return gd_fail(err, GD_BUSY, "no new group could be had in %d "
                           "tries", MAKING_TRIES);
        }
        s = gd_locks_lease(locks, n, err);
        if (s == GD_BUSY) {
            continue;
        }
        if (s != GD_OK) {
            return s;
        }
        /* Before we had the lease, others may have made this group and a higher
         * one, and removed this one again.  A number above all others now was
         * never used, since the highest-numbered group is not removed. */
        s = find_highest(env, root, &highest, err);
        if (s == GD_OK && highest >= n) {
            gd_locks_unlease(locks, n);
            n = highest;
            continue;
        }
        if (s == GD_OK) {
            s = create_under_lease(env, root, params, scope, n, err);
        }
        if (s == GD_OK) {
            *number = n;
            return GD_OK;
        }
        gd_locks_unlease(locks, n);
        if (s != GD_EXISTS) {
            return s;
        }
    }
    return gd_fail(err, GD_NOSPACE, "all %d group numbers are used",
                   GD_MAX_GROUP);
}

/* ---- headers of files that take another's place ---- */

/* Copies the header of old.  A major version of 0 leaves it as it is. */
static gd_status
write_header(const gd_group *old, gd_group *target, uint16_t major,
             const uint8_t object[GD_ID_SIZE], gd_error *err)
{
    uint8_t raw[GD_GROUP_HEAD];
    gd_group_head head;
    GD_TRY(gd_group_read_file(old, raw, sizeof raw, 0, err));
    gd_group_head_change(raw, major, object, &head);
    target->bounds.seed = head.bounds.seed;
    target->bounds.has_lists = head.bounds.has_lists;
    target->is_cold = false;
    memcpy(target->object.id, head.object_id, GD_ID_SIZE);
    return gd_write_full(target->env, target->fd, raw, sizeof raw, 0,
                         target->name, err);
}

gd_status
gd_group_write_hot(const gd_group *old, gd_group *target, bool lists,
                   gd_error *err)
{
    static const uint8_t none[GD_ID_SIZE] = {0};
    bool changes = old->is_cold || (lists && !old->bounds.has_lists);
    return write_header(old, target, changes ? GD_GROUP_LISTS : 0, none, err);
}

gd_status
gd_group_write_cold(const gd_group *old, gd_group *target,
                    const uint8_t object[GD_ID_SIZE], gd_error *err)
{
    return write_header(old, target, GD_GROUP_COLD, object, err);
}

/* ---- published records ---- */

gd_status
gd_group_read_published(const gd_group *group, gd_published *record,
                        gd_error *err)
{
    uint8_t raw[2 * GD_PUBLISHED_RECORD];
    gd_status s =
        gd_group_read_file(group, raw, sizeof raw, GD_GROUP_HEAD, err);
    if (s != GD_OK) {
        return s;
    }
    memset(record, 0, sizeof *record);
    for (int i = 0; i < 2; i++) {
        gd_published one;
        if (gd_published_decode(raw + i * GD_PUBLISHED_RECORD, &group->bounds,
                                &one) &&
            one.sequence >= record->sequence) {
            *record = one;
        }
    }
    return GD_OK;
}

gd_status
gd_group_write_published(const gd_group *group, const gd_published *record,
                         gd_error *err)
{
    uint8_t raw[GD_PUBLISHED_RECORD];
    gd_published_encode(record, &group->bounds, raw);
    return gd_write_full(group->env, group->fd, raw, sizeof raw,
                         record_offset(record->sequence), group->name, err);
}

gd_status
gd_group_sync_rename(const gd_group *group, int root, gd_published *record,
                     gd_error *err)
{
    /* There was no sync point: the group's maker may have died, or failed,
     * before the name was durable. */
    if (record->sequence != 0 && (record->flags & GD_GROUP_UNSETTLED) == 0) {
        return GD_OK;
    }
    record->flags &= ~(uint32_t)GD_GROUP_UNSETTLED;
    return gd_sync_dir(group->env, root, GD_DIR_GROUPS, err);
}

gd_status
gd_group_next_generation(const gd_env *env, gd_published *record,
                         gd_error *err)
{
    uint8_t bytes[8];
    GD_TRY(gd_random(env, bytes, sizeof bytes, err));
    record->generation = gd_get64(bytes);
    return GD_OK;
}

/* ---- entries ---- */

/* Bytes from the start of the first entry to the end of the last. */
static size_t
entries_span(uint32_t first, uint32_t count)
{
    return (size_t)(gd_entry_offset(first + count - 1) + GD_ENTRY_SIZE -
                    gd_entry_offset(first));
}

gd_status
gd_group_read_entries(const gd_group *group, uint32_t first, uint32_t count,
                      gd_entry *entries, gd_error *err)
{
    const gd_env *env = group->env;
    if (first > group->bounds.slots || count > group->bounds.slots - first) {
        return gd_fail(err, GD_CORRUPT,
                       "%s has %u slots; slots %u to %u were asked for",
                       group->name, group->bounds.slots, first,
                       first + count - 1);
    }
    if (count == 0) {
        return GD_OK;
    }
    size_t span = entries_span(first, count);
    uint8_t *raw = gd_alloc(env, span, err);
    if (raw == NULL) {
        return GD_NOMEM;
    }
    uint64_t start = gd_entry_offset(first);
    gd_status s = gd_group_read_file(group, raw, span, start, err);
    if (s == GD_OK && gd_is_zero(raw, span)) {
        memset(entries, 0, count * sizeof *entries); /* most of a new group */
        count = 0;
    }
    for (uint32_t i = 0; s == GD_OK && i < count; i++) {
        gd_entry_decode(raw + gd_entry_offset(first + i) - start,
                        &group->bounds, first + i, &entries[i]);
    }
    env->release(env, raw);
    return s;
}

gd_status
gd_group_write_entries(const gd_group *group, uint32_t first, uint32_t count,
                       const gd_entry *entries, gd_error *err)
{
    const gd_env *env = group->env;
    size_t span = entries_span(first, count);
    uint8_t *raw = gd_calloc(env, span, 1, err);
    if (raw == NULL) {
        return GD_NOMEM;
    }
    uint64_t start = gd_entry_offset(first);
    for (uint32_t i = 0; i < count; i++) {
        gd_entry_encode(&entries[i], group->bounds.seed, first + i,
                        raw + gd_entry_offset(first + i) - start);
    }
    gd_status s = gd_write_full(env, group->fd, raw, span, start, group->name,
                                err);
    env->release(env, raw);
    return s;
}

gd_status
gd_group_write_except(const gd_group *group, uint32_t first, uint32_t count,
                      const gd_entry *entries, gd_entry_state left_out,
                      gd_error *err)
{
    gd_status s = GD_OK;
    for (uint32_t i = 0, n; s == GD_OK && i < count; i += n + 1) {
        n = 0;
        while (i + n < count && entries[i + n].state != left_out) {
            n++;
        }
        if (n > 0) {
            s = gd_group_write_entries(group, first + i, n, entries + i, err);
        }
    }
    return s;
}

gd_status
gd_group_load_table(const gd_group *group, const gd_published *record,
                    gd_fptable **store, gd_error *err)
{
    const gd_env *env = group->env;
    size_t span = record->count == 0 ? 0 : entries_span(0, record->count);
    uint8_t *raw = gd_alloc(env, span, err);
    if (raw == NULL) {
        return GD_NOMEM;
    }
    gd_status s = gd_group_read_file(group, raw, span, GD_STORE_START, err);
    if (s == GD_OK) {
        s = gd_fptable_build(env, raw, group->number, record->count,
                             &group->bounds, store, err);
    }
    env->release(env, raw);
    if (s == GD_OK) {
        (*store)->seed = group->bounds.seed;
        (*store)->inode = group->inode;
        (*store)->sequence = record->sequence;
        (*store)->generation = record->generation;
    }
    return s;
}

bool
gd_group_is_table(const gd_group *group, const gd_published *record,
                  const gd_fptable *store)
{
    return store->group == group->number && store->inode == group->inode &&
           store->seed == group->bounds.seed &&
           store->sequence == record->sequence &&
           store->generation == record->generation &&
           store->count == record->count;
}

/* ---- segments ---- */

gd_status
gd_group_read_file(const gd_group *group, void *out, size_t length,
                   uint64_t offset, gd_error *err)
{
    return gd_read_full(group->env, group->content, out, length, offset,
                        group->name, err);
}

static gd_status
read_data(const gd_group *group, const gd_object *object, void *out,
          size_t length, uint64_t offset, gd_error *err)
{
    if (!group->is_cold) {
        return gd_group_read_file(group, out, length, offset, err);
    }
    if (group->slices == NULL) {
        return gd_fail(err, GD_UNAVAILABLE, "%s is cold, and this program was "
                       "not configured for the object store", group->name);
    }
    return gd_slices_read(group->slices, object, out, length, offset,
                          group->name, err);
}

gd_status
gd_group_read_data(const gd_group *group, void *out, size_t length,
                   uint64_t offset, gd_error *err)
{
    return read_data(group, &group->object, out, length, offset, err);
}

void
gd_group_expect_data(const gd_group *group, uint64_t offset, uint64_t length)
{
    if (!group->is_cold) {
        group->env->start_readahead(group->env, group->content, offset,
                                    length);
    } else if (group->slices != NULL) {
        gd_slices_expect(group->slices, &group->object, offset, length);
    }
}

gd_status
gd_group_match_segment(const gd_group *group, const gd_entry *entry,
                       uint32_t slot, const gd_segment_header *header,
                       gd_error *err)
{
    if (header->codec != entry->codec ||
        header->stored_length != entry->stored_length ||
        !gd_segment_has_slot(header, slot) ||
        entry->plain_offset + entry->plain_length > header->plain_length) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: the segment at offset %u is not the one that slot "
                       "%u names", group->name, entry->segment, slot);
    }
    return GD_OK;
}

void
gd_group_forget_data(const gd_group *group, uint64_t offset, uint64_t length)
{
    if (group->is_cold && group->slices != NULL) {
        gd_slices_forget(group->slices, &group->object, offset, length);
    }
}

static gd_status
read_stored(const gd_group *group, const gd_object *object,
            const gd_entry *entry, uint32_t slot, uint8_t *in,
            gd_segment_header *header, gd_error *err)
{
    size_t length = GD_SEGMENT_HEADER + (size_t)entry->stored_length;
    GD_TRY(read_data(group, object, in, length, entry->segment, err));
    GD_TRY(gd_segment_header_decode(in, length, &group->bounds, header,
                                    group->name, entry->segment, err));
    return gd_group_match_segment(group, entry, slot, header, err);
}

/* A cold group's slices may be wrong on this host only.  So a segment that is
 * not intact is fetched once more before anybody judges its blocks. */
gd_status
gd_group_read_stored(const gd_group *group, uint32_t patience_ms,
                     const gd_entry *entry, uint32_t slot, uint8_t *in,
                     gd_segment_header *header, gd_error *err)
{
    gd_object object = group->object;
    object.patience_ms = patience_ms;
    gd_status s = read_stored(group, &object, entry, slot, in, header, err);
    if (!group->is_cold ||
        (s == GD_OK &&
         gd_segment_intact(in, header, group->bounds.seed)) ||
        (s != GD_OK && s != GD_CORRUPT)) {
        return s;
    }
    gd_group_forget_data(group, entry->segment,
                         gd_group_segment_end(entry) - entry->segment);
    return read_stored(group, &object, entry, slot, in, header, err);
}

gd_status
gd_group_read_segment(const gd_group *group, const gd_entry *entry,
                      uint32_t slot, gd_coder *coder, uint8_t *in,
                      uint8_t *plain, gd_segment_header *header, gd_error *err)
{
    GD_TRY(gd_group_read_stored(group, 0, entry, slot, in, header, err));
    return gd_segment_decode(coder, header, in + GD_SEGMENT_HEADER, plain,
                             group->name, entry->segment, err);
}
