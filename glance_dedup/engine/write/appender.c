/* SPDX-License-Identifier: Apache-2.0 */
/*
 * appender.c - see appender.h.
 */
#include "engine/write/appender.h"

#include <string.h>

#include "engine/write/directio.h"
#include "engine/write/groupchoice.h"
#include "engine/write/io_mode.h"
#include "engine/write/tailrecovery.h"

struct gd_appender {
    gd_repo *repo;
    gd_group *group;
    gd_published published;
    uint32_t next_slot;
    uint64_t synced_end; /* end of the file at the last sync point */
    uint64_t end;        /* where the next segment goes */
    gd_directio *direct; /* NULL: all is written through the page cache */
    gd_stretch stretch;  /* since the last sync point */
    bool longer; /* direct may have written zeros behind end */
    gd_entry *entries;   /* from slot published.count on */
    bool cannot_cut; /* entries may be on the disk, or a write failed in an
                      * unclear way */
};

/* ---- treating what a dead writer left (N7.3) ---- */

/* Entries behind the last non-empty one are unused slots. */
static uint32_t
used_entries(const gd_entry *entries, uint32_t count)
{
    while (count > 0 && entries[count - 1].state == GD_ENTRY_EMPTY) {
        count--;
    }
    return count;
}

static gd_status publish(gd_appender *appender, uint32_t count, gd_error *err);

/* For entries that are already published. */
static void
insert_hints(gd_appender *appender, uint32_t base, uint32_t count,
             const gd_entry *entries)
{
    gd_hintindex *index = appender->repo->index;
    if (index != NULL) {
        index->add_own(index,
                       &(gd_entry_range){appender->group->number, base, count,
                                         entries});
    }
}

/* Counts the slots behind the published count that were ever used.  Mostly none
 * of thousands were, so they are read in pieces that fit in the processor's
 * cache. */
static gd_status
count_tail(const gd_appender *appender, uint32_t *count, gd_error *err)
{
    enum { PIECE = 1024 };
    const gd_group *group = appender->group;
    uint32_t base = appender->published.count;
    uint32_t rest = group->bounds.slots - base;
    gd_entry *entries = gd_alloc(group->env, PIECE * sizeof *entries, err);
    gd_status s = entries == NULL ? GD_NOMEM : GD_OK;
    *count = 0;
    for (uint32_t i = 0; s == GD_OK && i < rest; i += PIECE) {
        uint32_t n = rest - i < PIECE ? rest - i : PIECE;
        s = gd_group_read_entries(group, base + i, n, entries, err);
        uint32_t used = s == GD_OK ? used_entries(entries, n) : 0;
        if (used > 0) {
            *count = i + used;
        }
    }
    group->env->release(group->env, entries);
    return s;
}

/* Recovers entries beyond the published count.  They belong to a writer that
 * died before it published them, or to one whose published record was undone by
 * a crash of the machine.  In the second case committed recipes may name them.
 * So no block that verifies is given up, and no slot is used twice. */
static gd_status
treat_tail(gd_appender *appender, gd_error *err)
{
    const gd_env *env = appender->repo->env;
    uint32_t base = appender->published.count, count;
    gd_status s = count_tail(appender, &count, err);
    appender->next_slot = base + count;
    if (s != GD_OK || count == 0) {
        return s;
    }
    gd_entry *entries = gd_calloc(env, count, sizeof *entries, err);
    if (entries == NULL) {
        return GD_NOMEM;
    }
    s = gd_group_read_entries(appender->group, base, count, entries, err);
    if (s == GD_OK) {
        s = gd_tailrecovery_run(appender->repo, appender->group, base, entries,
                                count, err);
    }
    if (s == GD_OK) {
        s = publish(appender, base + count, err);
    }
    if (s == GD_OK) {
        insert_hints(appender, base, count, entries);
    }
    env->release(env, entries);
    return s;
}

gd_status
gd_appender_recover_tail(gd_repo *repo, gd_group *group,
                         gd_published *published, gd_error *err)
{
    gd_appender appender = {
        .repo = repo, .group = group, .published = *published};
    struct stat st;
    GD_TRY(gd_group_stat(group, &st, err));
    appender.end = (uint64_t)st.st_size;
    gd_status s = treat_tail(&appender, err);
    *published = appender.published;
    return s;
}

/* ---- leasing ---- */

/* Reads the group's state.
 * REQUIRES: the lease and the shared lock. */
static gd_status
settle_in(gd_appender *appender, gd_error *err)
{
    gd_group *group = appender->group;
    struct stat st;
    GD_TRY(gd_group_read_published(group, &appender->published, err));
    GD_TRY(gd_group_stat(group, &st, err));
    if ((uint64_t)st.st_size < appender->published.end) {
        return gd_fail(err, GD_CORRUPT, "%s has %llu bytes; %llu were "
                       "published", group->name,
                       (unsigned long long)st.st_size,
                       (unsigned long long)appender->published.end);
    }
    GD_TRY(gd_group_sync_rename(group, appender->repo->root,
                                &appender->published, err));
    uint64_t start = gd_fptable_data_start(group->bounds.slots);
    appender->end = (uint64_t)st.st_size < start ? start
                                                 : (uint64_t)st.st_size;
    appender->synced_end = appender->end;
    if ((appender->published.flags & GD_GROUP_POISONED) != 0) {
        appender->next_slot = group->bounds.slots;
        return GD_OK;
    }
    return treat_tail(appender, err);
}

/* A group's segments must be addressable by 32 bits. */
static bool
has_space(const gd_appender *appender)
{
    uint64_t most = (uint64_t)gd_appender_room(appender) *
                    (appender->repo->params.block_size + GD_SEGMENT_HEADER);
    return gd_appender_room(appender) > 0 &&
           appender->end + most <= UINT32_MAX;
}

/* Takes a lock of each open file through which the group is written to.  If the
 * server drops this host's locks before the lease is confirmed, that file
 * is useless; if it does so afterwards, all are (gd_group_hold).
 * REQUIRES: the lease. */
static gd_status
hold_group(gd_appender *appender, gd_error *err)
{
    gd_repo *repo = appender->repo;
    GD_TRY(gd_group_hold(appender->group, err));
    if (repo->params.direct_io != GD_DIRECT_OFF) {
        appender->direct =
            gd_directio_open(repo->env, repo->root, appender->group);
        if (appender->direct == NULL) {
            gd_io_mode_refuse(repo);
        }
    }
    return gd_locks_revalidate(repo->locks, appender->group->number, err);
}

/* Returns whether this process may choose the way to write. */
static bool
may_choose(const gd_appender *appender)
{
    return appender->repo->params.direct_io == GD_DIRECT_AUTO &&
           appender->direct != NULL;
}

static void
begin_stretch(gd_appender *appender)
{
    gd_stretch *stretch = &appender->stretch;
    *stretch = (gd_stretch){
        .way = appender->direct != NULL ? GD_IO_MODE_BESIDE
                                        : GD_IO_MODE_THROUGH,
        .most = GD_IO_MODE_LONG,
    };
    if (may_choose(appender)) {
        gd_io_mode_next(appender->repo, stretch);
    }
}

/* Returns GD_BUSY if the collector works in the group, or the group is full.
 * REQUIRES: the lease, which is given back unless the group can be used. */
static gd_status
enter_group(gd_repo *repo, const gd_scope *scope, uint32_t number,
            gd_appender **out, gd_error *err)
{
    gd_appender *appender = gd_calloc(repo->env, 1, sizeof *appender, err);
    if (appender == NULL) {
        gd_locks_unlease(repo->locks, number);
        return GD_NOMEM;
    }
    appender->repo = repo;
    gd_status s = gd_locks_lock_shared(repo->locks, number, err);
    bool shared = s == GD_OK;
    if (s == GD_OK) {
        s = gd_group_settle(repo->env, repo->root, &repo->params, number, err);
    }
    if (s == GD_OK) {
        s = gd_group_open(repo->env, repo->root, &repo->params, number, O_RDWR,
                          &appender->group, err);
    }
    /* Check the file that will be written to, not the one looked at before. */
    if (s == GD_OK && !gd_scope_equal(&appender->group->scope, scope)) {
        s = gd_fail(err, GD_CORRUPT, "%s has become another scope's",
                    appender->group->name);
    }
    if (s == GD_OK) {
        s = hold_group(appender, err);
    }
    /* I4: check that the name still leads to this file.  It was opened after
     * locking, so only a rewriting before the lock could have replaced it.
     * Then we have the new file, unless this host remembers what the name led
     * to before.  If the group was unlinked meanwhile, this is GD_NOTFOUND. */
    if (s == GD_OK) {
        s = gd_group_revalidate_name(appender->group, repo->root, err);
    }
    if (s == GD_OK) {
        s = settle_in(appender, err);
    }
    if (s == GD_OK && has_space(appender)) {
        begin_stretch(appender);
        *out = appender;
        return GD_OK;
    }
    if (s != GD_BUSY && s != GD_NOMEM) {
        /* It is full or cannot be trusted. */
        gd_groupchoice_remember_full(repo, number);
    }
    gd_directio_close(appender->direct);
    gd_group_close(appender->group);
    if (shared) {
        gd_locks_unlock_shared(repo->locks, number);
    }
    gd_locks_unlease(repo->locks, number);
    repo->env->release(repo->env, appender);
    return s == GD_OK ? GD_BUSY : s;
}

static gd_status
lease_existing(gd_repo *repo, const gd_scope *scope,
               const gd_groupmap *avoided, gd_appender **appender,
               gd_error *err)
{
    uint32_t numbers[GD_GROUPCHOICE_MAX];
    size_t count;
    GD_TRY(gd_groupchoice_list(repo, scope, avoided, numbers, &count,
                               err));
    gd_status s = GD_BUSY;
    for (size_t i = 0; s == GD_BUSY && i < count; i++) {
        s = gd_locks_lease(repo->locks, numbers[i], err);
        if (s == GD_OK) {
            s = enter_group(repo, scope, numbers[i], appender, err);
        }
        if (s != GD_OK && s != GD_NOMEM) {
            s = GD_BUSY; /* whatever is wrong with this group: take another */
        }
    }
    return s;
}

gd_status
gd_appender_open(gd_repo *repo, const gd_scope *scope,
                 const gd_groupmap *avoided, gd_appender **appender,
                 gd_error *err)
{
    enum { NEW_GROUPS = 10 };
    gd_status s = lease_existing(repo, scope, avoided, appender, err);
    for (int i = 0; s == GD_BUSY && i < NEW_GROUPS; i++) {
        uint32_t number;
        s = gd_repo_require_room(repo, gd_fptable_data_start(
            repo->params.group_slots),
                                 err);
        if (s != GD_OK) {
            return s;
        }
        s = gd_group_create(repo->env, repo->root, &repo->params, scope,
                            repo->locks, &number, err);
        if (s == GD_OK) {
            s = enter_group(repo, scope, number, appender, err);
        }
    }
    if (s == GD_BUSY) {
        gd_fail(err, GD_BUSY, "no group could be had to append to");
    }
    return s;
}

void
gd_appender_close(gd_appender *appender)
{
    gd_repo *repo = appender->repo;
    const gd_env *env = repo->env;
    gd_group *group = appender->group;
    gd_directio_close(appender->direct);
    if ((appender->end > appender->synced_end || appender->longer) &&
        !appender->cannot_cut) {
        /* No entry names these bytes, and nobody else knows the slots. */
        (void)env->ftruncate(env, group->fd, appender->synced_end);
    }
    uint32_t number = group->number;
    bool full = appender->published.count == group->bounds.slots;
    gd_group_close(group);
    gd_locks_unlease(repo->locks, number);
    if (full) {
        gd_groupchoice_remember_full(repo, number);
    }
    env->release(env, appender->entries);
    env->release(env, appender);
}

const gd_group *
gd_appender_group(const gd_appender *appender)
{
    return appender->group;
}

uint32_t
gd_appender_room(const gd_appender *appender)
{
    return appender->group->bounds.slots - appender->next_slot;
}

bool
gd_appender_is_due(const gd_appender *appender)
{
    return appender->end - appender->synced_end >= appender->stretch.most;
}

/* ---- appending ---- */

/* Allocates entries once for all slots, so that they stay in place while
 * another thread packs their segment.  Untouched pages take no memory. */
static gd_status
reserve_entries(gd_appender *appender, gd_error *err)
{
    if (appender->entries == NULL) {
        appender->entries = gd_calloc(
            appender->repo->env,
            appender->group->bounds.slots - appender->published.count,
            sizeof *appender->entries, err);
    }
    return appender->entries == NULL ? GD_NOMEM : GD_OK;
}

gd_status
gd_appender_take_slot(gd_appender *appender, const gd_fingerprint *fp,
                      uint64_t checksum, uint32_t length,
                      uint32_t plain_offset, uint32_t *slot, gd_error *err)
{
    GD_TRY(reserve_entries(appender, err));
    *slot = appender->next_slot++;
    appender->entries[*slot - appender->published.count] = (gd_entry){
        .fingerprint = *fp,
        .checksum = checksum,
        .plain_length = length,
        .plain_offset = plain_offset,
        .state = GD_ENTRY_LIVE,
    };
    return GD_OK;
}

gd_entry *
gd_appender_entry(gd_appender *appender, uint32_t slot)
{
    uint32_t base = appender->published.count;
    return slot >= base && slot < appender->next_slot
               ? &appender->entries[slot - base]
               : NULL;
}

/* Fills in the segment's place in its entries. */
static void
place_segment(gd_appender *appender, const gd_segment_header *header,
              uint64_t offset)
{
    uint32_t first = header->first_slot - appender->published.count;
    for (uint32_t i = 0; i < header->blocks; i++) {
        gd_entry *entry = &appender->entries[first + i];
        entry->segment = (uint32_t)offset;
        entry->stored_length = header->stored_length;
        entry->codec = (uint8_t)header->codec;
    }
}

/* Writes at the end; length is that of all pieces.  If a direct write fails,
 * the same bytes are written to the same place through the page cache. */
static gd_status
write_pieces(gd_appender *appender, struct iovec *pieces, size_t count,
             uint64_t length, gd_error *err)
{
    const gd_env *env = appender->repo->env;
    const gd_group *group = appender->group;
    if (appender->direct != NULL &&
        appender->stretch.way == GD_IO_MODE_BESIDE) {
        appender->longer = true;
        if (gd_directio_write(appender->direct, pieces, count, appender->end)) {
            return GD_OK;
        }
        gd_directio_close(appender->direct);
        appender->direct = NULL;
        gd_io_mode_refuse(appender->repo);
    }
    GD_TRY(gd_writev_full(env, group->fd, pieces, (int)count,
                          appender->end, group->name, err));
    env->start_writeback(env, group->fd, appender->end, length);
    return GD_OK;
}

/* The same, and measures it if that helps to choose the way. */
static gd_status
write_measured(gd_appender *appender, struct iovec *pieces, size_t count,
               uint64_t length, gd_error *err)
{
    const gd_env *env = appender->repo->env;
    gd_stretch *stretch = &appender->stretch;
    if (!may_choose(appender)) {
        return write_pieces(appender, pieces, count, length, err);
    }
    int64_t began = env->monotonic_ns(env), worked = env->thread_ns(env);
    gd_status s = write_pieces(appender, pieces, count, length, err);
    uint64_t took = (uint64_t)(env->monotonic_ns(env) - began);
    stretch->worked += env->thread_ns(env) - worked;
    stretch->writes++;
    stretch->fast += took <= length * GD_IO_MODE_FAST_NS;
    return s;
}

gd_status
gd_appender_append(gd_appender *appender, gd_new_segment *segments,
                   size_t count, uint64_t *written, gd_error *err)
{
    const gd_env *env = appender->repo->env;
    size_t pieces = count;
    for (size_t i = 0; i < count; i++) {
        pieces += (size_t)segments[i].piece_count;
    }
    struct iovec *iov = gd_calloc(env, pieces, sizeof *iov, err);
    gd_status s = iov == NULL ? GD_NOMEM : GD_OK;
    uint64_t offset = appender->end;
    size_t n = 0;
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        gd_new_segment *segment = &segments[i];
        place_segment(appender, &segment->header, offset);
        iov[n++] = (struct iovec){segment->encoded, GD_SEGMENT_HEADER};
        memcpy(&iov[n], segment->pieces,
               (size_t)segment->piece_count * sizeof *iov);
        n += (size_t)segment->piece_count;
        offset += GD_SEGMENT_HEADER + segment->header.stored_length;
    }
    if (s == GD_OK) {
        s = gd_repo_require_room(appender->repo, offset - appender->end, err);
    }
    if (s == GD_OK) {
        s = write_measured(appender, iov, n, offset - appender->end, err);
    }
    *written = offset - appender->end;
    appender->end = offset; /* after an error too, so that it is cut off */
    env->release(env, iov);
    return s;
}

/* ---- the sync point ---- */

/* Nobody may append here again (I1).  If the mark itself does not reach the
 * disk, the next lessee finds an unpublished tail and renews it. */
static void
poison(gd_appender *appender)
{
    appender->published.sequence++;
    appender->published.flags |= GD_GROUP_POISONED;
    appender->cannot_cut = true;
    (void)gd_group_write_published(appender->group, &appender->published,
                                   NULL);
    gd_groupchoice_remember_full(appender->repo, appender->group->number);
}

static gd_status
sync_group(gd_appender *appender, gd_error *err)
{
    gd_group *group = appender->group;
    gd_status s = gd_fdatasync(group->env, group->fd, group->name, err);
    if (s != GD_OK) {
        poison(appender);
    }
    return s;
}

/* N7.4: our own fdatasync, then the record by which others see the entries. */
static gd_status
publish(gd_appender *appender, uint32_t count, gd_error *err)
{
    gd_group *group = appender->group;
    GD_TRY(sync_group(appender, err));
    gd_published record = appender->published;
    record.sequence++;
    record.count = count;
    record.end = appender->end;
    gd_status s = gd_group_next_generation(group->env, &record, err);
    if (s == GD_OK) {
        s = gd_group_write_published(group, &record, err);
    }
    if (s == GD_OK) {
        appender->published = record;
        appender->synced_end = appender->end;
        atomic_fetch_add(&appender->repo->counters.sync_points, 1);
    }
    /* For a full group the record is made durable, too.  Otherwise, after a
     * crash of the machine, the next writer would read and renew every group
     * that was filled shortly before (I8). */
    return s == GD_OK && count == group->bounds.slots
               ? sync_group(appender, err)
               : s;
}

gd_status
gd_appender_sync(gd_appender *appender, gd_error *err)
{
    const gd_env *env = appender->repo->env;
    bool measured = may_choose(appender);
    int64_t worked = measured ? env->thread_ns(env) : 0;
    uint64_t bytes = appender->end - appender->synced_end;
    uint32_t base = appender->published.count;
    uint32_t count = appender->next_slot - base;
    if (count == 0) {
        return GD_OK;
    }
    /* Once entries may be on the disk, the slots are used up, whatever
     * happens.  The next lessee renews or voids them. */
    appender->cannot_cut = true;
    GD_TRY(gd_group_write_entries(appender->group, base, count,
                                  appender->entries, err));
    GD_TRY(publish(appender, base + count, err));
    if (measured) {
        appender->stretch.worked += env->thread_ns(env) - worked;
        gd_io_mode_note(appender->repo, &appender->stretch, bytes);
    }
    begin_stretch(appender);
    appender->cannot_cut = false;
    insert_hints(appender, base, count, appender->entries);
    return GD_OK;
}
