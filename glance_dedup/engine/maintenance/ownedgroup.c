/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ownedgroup.c - see ownedgroup.h.
 */
#include "engine/maintenance/ownedgroup.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/coding.h"
#include "engine/files/file.h"
#include "engine/maintenance/group_stats.h"
#include "engine/write/appender.h"

/* ---- entering and leaving ---- */

/* REQUIRES: the lease (N6.1). */
static gd_status
exclude_others(const gd_leased_group *leased, gd_error *err)
{
    gd_status s = gd_locks_lock_exclusive(leased->repo->locks, leased->number,
                                          err);
    return s == GD_BUSY ? gd_fail(err, s, "a transaction names blocks of "
                                  "group %08x", (unsigned)leased->number)
                        : s;
}

static bool
has_state(const gd_leased_group *leased, gd_entry_state state)
{
    for (uint32_t i = 0; i < leased->group->bounds.slots; i++) {
        if (leased->entries[i].state == state) {
            return true;
        }
    }
    return false;
}

/* The only place that makes an owned group.
 * REQUIRES: the exclusive lock, and that everything was checked since it was
 * taken. */
static gd_status
make_owned(gd_leased_group *leased, gd_owned_group **out, gd_error *err)
{
    gd_owned_group *owned = gd_calloc(leased->repo->env, 1, sizeof *owned,
                                      err);
    if (owned == NULL) {
        return GD_NOMEM;
    }
    owned->leased = leased;
    /* Entries that an earlier collector freed may not be durable. */
    owned->settled = !has_state(leased, GD_ENTRY_FREED);
    *out = owned;
    return GD_OK;
}

/* Opens the file after locking: nobody can replace it any more.
 * REQUIRES: both locks. */
static gd_status
enter_group(gd_leased_group *leased, gd_owned_group **owned, gd_error *err)
{
    GD_TRY(gd_leased_group_find(leased, err));
    GD_TRY(gd_appender_recover_tail(leased->repo, leased->group,
                                    &leased->published, err));
    GD_TRY(gd_leased_group_read_entries(leased, err));
    return make_owned(leased, owned, err);
}

gd_status
gd_owned_group_open(gd_repo *repo, uint32_t number, gd_owned_group **owned,
                    gd_error *err)
{
    gd_leased_group *leased;
    GD_TRY(gd_leased_group_take(repo, number, &leased, err));
    gd_status s = exclude_others(leased, err);
    if (s == GD_OK) {
        s = enter_group(leased, owned, err);
        if (s != GD_OK) {
            gd_locks_unlock_exclusive(leased->repo->locks, leased->number);
        }
    }
    if (s != GD_OK) {
        gd_leased_group_close(leased);
    }
    return s;
}

gd_status
gd_owned_group_lock(gd_leased_group *leased, gd_owned_group **owned,
                    gd_error *err)
{
    GD_TRY(exclude_others(leased, err));
    gd_status s = gd_leased_group_require_unchanged(leased, err);
    if (s == GD_OK) {
        s = make_owned(leased, owned, err);
    }
    if (s != GD_OK) {
        gd_locks_unlock_exclusive(leased->repo->locks, leased->number);
    }
    return s;
}

void
gd_owned_group_close(gd_owned_group *owned)
{
    gd_leased_group *leased = owned->leased;
    leased->repo->env->release(leased->repo->env, owned);
    gd_locks_unlock_exclusive(leased->repo->locks, leased->number);
    gd_leased_group_close(leased);
}

gd_status
gd_owned_group_require_usable(const gd_owned_group *owned, gd_error *err)
{
    if (owned->failed) {
        return gd_fail(err, GD_CLOSED,
                       "%s was removed, or something failed in it: enter it "
                       "again", owned->leased->group->name);
    }
    return GD_OK;
}

/* ---- changing published entries ---- */

static gd_status
sync_group(const gd_group *group, gd_error *err)
{
    return gd_fdatasync(group->env, group->fd, group->name, err);
}

static gd_status
next_generation(gd_owned_group *owned, gd_error *err)
{
    gd_published record = owned->leased->published;
    record.sequence++;
    GD_TRY(gd_group_next_generation(owned->leased->repo->env, &record,
                                    err));
    GD_TRY(sync_group(owned->leased->group, err));
    GD_TRY(gd_group_write_published(owned->leased->group, &record, err));
    GD_TRY(sync_group(owned->leased->group, err));
    owned->leased->published = record;
    return GD_OK;
}

/* Writes the entries that differ from those in the file, and all freed ones.
 * If an fdatasync failed under an earlier collector, pages seem written but are
 * not, so freed entries must be written again. */
static gd_status
write_changes(const gd_owned_group *owned, const gd_entry *entries,
              gd_error *err)
{
    gd_status s = GD_OK;
    uint32_t slots = owned->leased->group->bounds.slots;
    for (uint32_t i = 0; s == GD_OK && i < slots;) {
        uint32_t n = 0;
        while (i + n < slots &&
               (entries[i + n].state == GD_ENTRY_FREED ||
                entries[i + n].state != owned->leased->entries[i + n].state)) {
            n++;
        }
        if (n > 0) {
            s = gd_group_write_entries(owned->leased->group, i, n, entries + i,
                                       err);
        }
        i += n + 1;
    }
    return s;
}

/* The only way to change published entries; see ownedgroup.h for the order.
 * entries are those of all slots; on success they become the group's. */
static gd_status
change_entries(gd_owned_group *owned, gd_entry *entries, gd_error *err)
{
    gd_status s = next_generation(owned, err);
    if (s == GD_OK) {
        s = write_changes(owned, entries, err);
    }
    if (s == GD_OK) {
        s = sync_group(owned->leased->group, err);
    }
    if (s != GD_OK) {
        owned->failed = true;
        return s;
    }
    owned->leased->repo->env->release(owned->leased->repo->env,
                                      owned->leased->entries);
    owned->leased->entries = entries;
    owned->settled = true;
    return GD_OK;
}

static gd_status
copy_entries(const gd_leased_group *leased, gd_entry **copy, gd_error *err)
{
    uint32_t slots = leased->group->bounds.slots;
    *copy = gd_calloc(leased->repo->env, slots, sizeof **copy, err);
    if (*copy == NULL) {
        return GD_NOMEM;
    }
    memcpy(*copy, leased->entries, slots * sizeof **copy);
    return GD_OK;
}

static gd_status
require_slots(const gd_leased_group *leased, const uint32_t *slots,
              size_t count,
              gd_error *err)
{
    for (size_t i = 0; i < count; i++) {
        if (slots[i] >= leased->published.count) {
            return gd_fail(err, GD_INVALID,
                           "slot %u of %s is not published: only %u are",
                           slots[i], leased->group->name,
                           leased->published.count);
        }
    }
    return GD_OK;
}

gd_status
gd_owned_group_free(gd_owned_group *owned, const uint32_t *slots, size_t count,
                    uint32_t *freed, gd_error *err)
{
    gd_entry *entries;
    *freed = 0;
    GD_TRY(gd_owned_group_require_usable(owned, err));
    GD_TRY(require_slots(owned->leased, slots, count, err));
    GD_TRY(copy_entries(owned->leased, &entries, err));
    uint32_t changed = 0;
    for (size_t i = 0; i < count; i++) {
        gd_entry *entry = &entries[slots[i]];
        if (entry->state == GD_ENTRY_LIVE ||
            entry->state == GD_ENTRY_DAMAGED ||
            entry->state == GD_ENTRY_INVALID) {
            *entry = (gd_entry){.state = GD_ENTRY_FREED};
            changed++;
        }
    }
    gd_status s = changed == 0 ? GD_OK : change_entries(owned, entries, err);
    if (s != GD_OK || changed == 0) {
        owned->leased->repo->env->release(owned->leased->repo->env, entries);
        return s;
    }
    *freed = changed;
    return GD_OK;
}

/* ---- giving space back ---- */

/* Bytes of the file: from start up to, but not including, end. */
typedef struct range {
    uint64_t from, to;
} range;

static int
by_start(const void *a, const void *b)
{
    const range *x = a, *y = b;
    return x->from < y->from ? -1 : x->from > y->from;
}

/* Lists the segments that live and damaged entries name, published or not,
 * sorted. */
static gd_status
needed_ranges(const gd_leased_group *leased, range **out, size_t *count,
              gd_error *err)
{
    uint32_t slots = leased->group->bounds.slots;
    range *ranges = gd_calloc(leased->repo->env, slots, sizeof *ranges, err);
    if (ranges == NULL) {
        return GD_NOMEM;
    }
    size_t n = 0;
    for (uint32_t i = 0; i < slots; i++) {
        const gd_entry *entry = &leased->entries[i];
        uint64_t from = entry->segment, to = gd_group_segment_end(entry);
        if ((entry->state == GD_ENTRY_LIVE ||
             entry->state == GD_ENTRY_DAMAGED) &&
            (n == 0 || ranges[n - 1].from != from ||
             ranges[n - 1].to != to)) {
            ranges[n++] = (range){from, to};
        }
    }
    if (n > 0) {
        qsort(ranges, n, sizeof *ranges, by_start);
    }
    *out = ranges;
    *count = n;
    return GD_OK;
}

/* Gives back the whole file-system blocks within [from, to).  Returns false on
 * an error, or if the file system cannot do it (*rc is the reason).  Then the
 * space comes back when the group is rewritten. */
static bool
punch_within(const gd_group *group, uint64_t block, uint64_t from, uint64_t to,
             int *rc)
{
    from = (from + block - 1) / block * block;
    to = to / block * block;
    *rc = 0;
    if (from < to) {
        do {
            *rc = group->env->punch(group->env, group->fd, from, to - from);
        } while (*rc == -EINTR);
    }
    return *rc >= 0;
}

static int
punch_between(const gd_leased_group *leased, const range *needed, size_t count,
              const struct stat *st)
{
    enum { BLOCK_MIN = 512, BLOCK_MAX = 1 << 20, BLOCK_USUAL = 4096 };
    uint64_t block = (uint64_t)st->st_blksize;
    if (block < BLOCK_MIN || block > BLOCK_MAX) {
        block = BLOCK_USUAL;
    }
    uint64_t at = gd_fptable_data_start(leased->group->bounds.slots);
    uint64_t end = leased->published.end; /* cut_off() gives back the rest */
    if (end > (uint64_t)st->st_size) {
        end = (uint64_t)st->st_size;
    }
    int rc = 0;
    for (size_t i = 0; i < count && needed[i].from < end; i++) {
        if (needed[i].from > at &&
            !punch_within(leased->group, block, at, needed[i].from, &rc)) {
            return rc;
        }
        if (needed[i].to > at) {
            at = needed[i].to;
        }
    }
    if (at < end) {
        (void)punch_within(leased->group, block, at, end, &rc);
    }
    return rc;
}

/* Cuts off what a dead writer left behind the published end: its entries were
 * recovered when the group was entered (N7.3), and no entry names the rest. */
static gd_status
cut_off(const gd_leased_group *leased, const range *needed, size_t count,
        const struct stat *st, gd_error *err)
{
    const gd_group *group = leased->group;
    uint64_t end = gd_fptable_data_start(group->bounds.slots);
    if (leased->published.end > end) {
        end = leased->published.end;
    }
    for (size_t i = 0; i < count; i++) {
        end = needed[i].to > end ? needed[i].to : end;
    }
    if ((uint64_t)st->st_size <= end) {
        return GD_OK;
    }
    int rc = group->env->ftruncate(group->env, group->fd, end);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot cut the end of %s off",
                                  group->name)
                  : GD_OK;
}

/* N6.4: an entry must be freed on the disk before its bytes go.  If it were
 * live again after a crash, an upload could name it, since a hit is compared by
 * its fingerprint. */
static gd_status
settle(gd_owned_group *owned, gd_error *err)
{
    if (owned->settled) {
        return GD_OK;
    }
    gd_status s = write_changes(owned, owned->leased->entries, err);
    if (s == GD_OK) {
        s = sync_group(owned->leased->group, err);
    }
    owned->settled = s == GD_OK;
    owned->failed = s != GD_OK;
    return s;
}

gd_status
gd_owned_group_punch(gd_owned_group *owned, uint64_t *bytes, gd_error *err)
{
    range *needed = NULL;
    size_t count;
    struct stat before, after;
    *bytes = 0;
    gd_status s = gd_owned_group_require_usable(owned, err);
    if (s != GD_OK || has_state(owned->leased, GD_ENTRY_INVALID)) {
        return s;
    }
    s = settle(owned, err);
    if (s == GD_OK) {
        s = gd_group_stat(owned->leased->group, &before, err);
    }
    if (s == GD_OK) {
        s = needed_ranges(owned->leased, &needed, &count, err);
    }
    if (s != GD_OK) {
        return s;
    }
    int rc = punch_between(owned->leased, needed, count, &before);
    s = cut_off(owned->leased, needed, count, &before, err);
    owned->leased->repo->env->release(owned->leased->repo->env, needed);
    if (rc < 0 && rc != -EOPNOTSUPP && rc != -ENOSYS) {
        return gd_fail_errno(err, -rc, "cannot give space of %s back",
                             owned->leased->group->name);
    }
    if (s == GD_OK) {
        s = gd_group_stat(owned->leased->group, &after, err);
    }
    if (s == GD_OK && after.st_blocks < before.st_blocks) {
        *bytes = (uint64_t)(before.st_blocks - after.st_blocks) * 512;
    }
    return s;
}

gd_status
gd_owned_group_live_bytes(const gd_owned_group *owned, uint64_t *bytes,
                          uint64_t *kept, gd_error *err)
{
    *bytes = *kept = 0;
    GD_TRY(gd_owned_group_require_usable(owned, err));
    return gd_group_stats_live_bytes(owned->leased, bytes, kept, err);
}

/* ---- damage ---- */

/* Reads the segment's bytes as far as possible; the others are zeros.  An error
 * does not mean that they are damaged. */
static gd_status
salvage(const gd_group *group, uint64_t offset, uint8_t *out, size_t length,
        gd_error *err)
{
    enum { STEP = 512 }; /* small, so that a bad sector loses little else */
    gd_status s = gd_group_read_data(group, out, length, offset, err);
    if (s == GD_OK || (group->is_cold && s != GD_CORRUPT)) {
        return s;
    }
    memset(out, 0, length);
    for (size_t at = 0; !group->is_cold && at < length; at += STEP) {
        size_t here = length - at < STEP ? length - at : STEP;
        if (gd_group_read_file(group, out + at, here, offset + at, NULL) !=
            GD_OK) {
            memset(out + at, 0, here);
        }
    }
    return GD_OK;
}

static gd_status
write_quarantine(const gd_leased_group *leased, const char *name,
                 const uint8_t *data, size_t length, gd_error *err)
{
    const gd_env *env = leased->repo->env;
    int fd;
    GD_TRY(gd_file_create(env, leased->repo->root, name, O_WRONLY, &fd,
                          err));
    gd_status s = gd_write_full(env, fd, data, length, 0, name, err);
    if (s == GD_OK) {
        s = gd_fsync(env, fd, name, err);
    }
    env->close(env, fd);
    if (s != GD_OK) {
        (void)env->unlinkat(env, leased->repo->root, name);
    }
    return s;
}

static gd_status
quarantine_segment(const gd_leased_group *leased, const gd_entry *entry,
                   gd_quarantine_name name, gd_error *err)
{
    const gd_env *env = leased->repo->env;
    size_t length = GD_SEGMENT_HEADER + (size_t)entry->stored_length;
    uint8_t digits[8];
    GD_TRY(gd_random(env, digits, sizeof digits, err));
    snprintf(name, GD_NAME_SIZE, GD_DIR_QUARANTINE "/%08x-%u-%016llx",
             (unsigned)leased->group->number, entry->segment,
             (unsigned long long)gd_get64(digits));
    uint8_t *data = gd_calloc(env, length, 1, err);
    if (data == NULL) {
        return GD_NOMEM;
    }
    gd_status s = salvage(leased->group, entry->segment, data, length, err);
    if (s == GD_OK) {
        s = write_quarantine(leased, name, data, length, err);
    }
    env->release(env, data);
    return s;
}

/* Returns whether an earlier one of the slots belongs to the same segment. */
static bool
is_repeated(const gd_leased_group *leased, const uint32_t *slots, size_t at)
{
    for (size_t i = 0; i < at; i++) {
        const gd_entry *entry = &leased->entries[slots[i]];
        if (entry->state == GD_ENTRY_LIVE &&
            entry->segment == leased->entries[slots[at]].segment) {
            return true;
        }
    }
    return false;
}

static gd_status
quarantine_segments(const gd_leased_group *leased, const uint32_t *slots,
                    size_t count, gd_quarantine_name *names,
                    size_t *name_count, gd_error *err)
{
    gd_status s = GD_OK;
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        const gd_entry *entry = &leased->entries[slots[i]];
        if (entry->state == GD_ENTRY_LIVE && !is_repeated(leased, slots, i)) {
            s = quarantine_segment(leased, entry, names[*name_count], err);
            *name_count += s == GD_OK;
        }
    }
    if (s == GD_OK && *name_count > 0) {
        s = gd_sync_dir(leased->repo->env, leased->repo->root,
                        GD_DIR_QUARANTINE, err);
    }
    return s;
}

gd_status
gd_owned_group_mark_damaged(gd_owned_group *owned, const uint32_t *slots,
                            size_t count, gd_quarantine_name **names,
                            size_t *name_count, gd_error *err)
{
    const gd_env *env = owned->leased->repo->env;
    gd_entry *entries;
    *names = NULL;
    *name_count = 0;
    gd_status s = gd_owned_group_require_usable(owned, err);
    if (s == GD_OK) {
        s = require_slots(owned->leased, slots, count, err);
    }
    if (s == GD_OK) {
        *names = gd_calloc(env, count, sizeof **names, err);
        s = *names == NULL ? GD_NOMEM : GD_OK;
    }
    if (s == GD_OK) {
        s = quarantine_segments(owned->leased, slots, count, *names,
                                name_count, err);
    }
    if (s == GD_OK && *name_count > 0) {
        s = copy_entries(owned->leased, &entries, err);
    }
    if (s != GD_OK || *name_count == 0) {
        return s;
    }
    for (size_t i = 0; i < count; i++) {
        if (entries[slots[i]].state == GD_ENTRY_LIVE) {
            entries[slots[i]].state = GD_ENTRY_DAMAGED;
        }
    }
    s = change_entries(owned, entries, err);
    if (s != GD_OK) {
        env->release(env, entries);
    }
    return s;
}

/* ---- taking the name away ---- */

/* Nothing can stop a late rename or unlink of a name.  So first it is noted in
 * the file, which takes no writes of a process that lost its locks, that nobody
 * appends any more.  A full group takes no blocks anyway. */
gd_status
gd_owned_group_keep_writers_out(gd_owned_group *owned, gd_error *err)
{
    gd_leased_group *leased = owned->leased;
    gd_published record = leased->published;
    if (record.count == leased->group->bounds.slots ||
        (record.flags & GD_GROUP_POISONED) != 0) {
        return GD_OK;
    }
    record.sequence++;
    record.flags |= GD_GROUP_POISONED;
    gd_status s = sync_group(leased->group, err);
    if (s == GD_OK) {
        s = gd_group_write_published(leased->group, &record, err);
    }
    if (s == GD_OK) {
        s = sync_group(leased->group, err);
    }
    if (s == GD_OK) {
        leased->published = record;
    }
    owned->failed = s != GD_OK;
    return s;
}

/* Returns whether a slot's entry forbids removal.  A published entry that is
 * void or freed does not. */
static bool
is_in_the_way(const gd_leased_group *leased, uint32_t slot)
{
    uint8_t state = leased->entries[slot].state;
    bool used = state != GD_ENTRY_EMPTY;
    return slot < leased->published.count
               ? used && state != GD_ENTRY_VOID && state != GD_ENTRY_FREED
               : used;
}

bool
gd_owned_group_is_empty(const gd_owned_group *owned)
{
    for (uint32_t i = 0; i < owned->leased->group->bounds.slots; i++) {
        if (is_in_the_way(owned->leased, i)) {
            return false;
        }
    }
    return true;
}

gd_status
gd_owned_group_unlink(gd_owned_group *owned, bool *removed, gd_error *err)
{
    gd_repo *repo = owned->leased->repo;
    const gd_group *group = owned->leased->group;
    uint32_t *numbers;
    size_t count;
    *removed = false;
    GD_TRY(gd_owned_group_require_usable(owned, err));
    if (!gd_owned_group_is_empty(owned)) {
        return GD_OK;
    }
    GD_TRY(gd_group_numbers(repo->env, repo->root, &numbers, &count, err));
    bool highest = count == 0 || numbers[count - 1] <= group->number;
    repo->env->release(repo->env, numbers);
    if (highest) {
        return GD_OK; /* else its number would be given out again */
    }
    GD_TRY(gd_owned_group_keep_writers_out(owned, err));
    int rc = repo->env->unlinkat(repo->env, repo->root, group->name);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot remove %s", group->name);
    }
    owned->failed = true; /* the group is gone */
    *removed = true;
    gd_status s = gd_sync_dir(repo->env, repo->root, GD_DIR_GROUPS, err);
    gd_fpcache_drop_removed(repo->cache);
    if (s == GD_OK) {
        /* Other processes may have the file open, for an unknown time. */
        uint64_t start = gd_fptable_data_start(group->bounds.slots);
        (void)repo->env->punch(repo->env, group->fd, start,
                               UINT32_MAX - start);
    }
    return s;
}
