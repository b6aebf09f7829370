/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.h - a block group's file: header, published records, entries,
 * segments (format.rst, "Block groups").
 *
 * A gd_group is an open file whose fixed header was verified.  Reading is
 * thread-safe.  A writer must hold the group's lease (I4).
 */
#ifndef GD_GROUP_H
#define GD_GROUP_H

#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/lru.h"
#include "engine/base/status.h"
#include "engine/files/locks.h"
#include "engine/files/slices.h"
#include "engine/format/grouphead.h"
#include "engine/format/params.h"
#include "engine/format/segment.h"

typedef struct gd_group {
    gd_lru_item item; /* the cache's own (fpcache.h) */
    const gd_env *env;
    int fd;      /* has the locks; written to */
    int content; /* read from: fd, or, on a shared file system, an open file
                  * beside the page cache (N13.2) */
    uint32_t number;
    char name[GD_NAME_SIZE];
    uint64_t inode; /* differs between a rewritten group's file and the one
                     * before */
    bool is_cold;   /* its segments are in an object (cold.rst) */
    gd_object object; /* of a cold group */
    const struct gd_slices *slices; /* params->slices */
    gd_scope scope; /* the scope of all its fingerprints */
    gd_entry_bounds bounds;
} gd_group;

/* Returns where an entry's segment ends in the file. */
static inline uint64_t
gd_group_segment_end(const gd_entry *entry)
{
    return (uint64_t)entry->segment + GD_SEGMENT_HEADER + entry->stored_length;
}

/* Way in which a group's blocks are packed again. */
typedef struct gd_packing {
    gd_codec codec;
    int level;
    bool similar; /* similar blocks next to each other; else by slot */
} gd_packing;

/* flags: O_RDONLY or O_RDWR.  GD_NOTFOUND, GD_VERSION and GD_CORRUPT (also for
 * a file of spare copies) name the file. */
gd_status gd_group_open(const gd_env *env, int root, const gd_params *params,
                        uint32_t number, int flags, gd_group **group,
                        gd_error *err);
/* N14.3.  REQUIRES: the group's lease. */
gd_status gd_group_settle(const gd_env *env, int root, const gd_params *params,
                          uint32_t number, gd_error *err);
/* As gd_group_open for reading through the page cache, which may be out of date on a
 * shared file system: whatever does not verify is to be read through a group of
 * gd_group_open before anybody judges it (N13.3). */
gd_status gd_group_open_cached(const gd_env *env, int root,
                               const gd_params *params, uint32_t number,
                               gd_group **group, gd_error *err);
/* The same for a file with another name: a new one, or spare copies. */
gd_status gd_group_open_as(const gd_env *env, int root,
                           const gd_params *params, uint32_t number,
                           const char *name, int flags, gd_group **group,
                           gd_error *err);
void gd_group_close(gd_group *group);
/* The numbers of all groups, sorted.  The caller releases them. */
gd_status gd_group_numbers(const gd_env *env, int root, uint32_t **numbers,
                           size_t *count, gd_error *err);
gd_status gd_group_stat(const gd_group *group, struct stat *st, gd_error *err);
/* I4: GD_BUSY, with a message, if the name leads to another file.  Call this
 * after locking. */
gd_status gd_group_revalidate_name(const gd_group *group, int root,
                                   gd_error *err);

/* Takes the lessee's byte of the group's own file, shared, until the group is
 * closed.  It keeps nobody out: the lease does that.  But a file system that
 * reports lost locks to a host does so by errors on the open file that had
 * them.  So a process that changes a group's file locks it, and cannot change
 * it any more when its lease is gone, too (hosts.rst, "A host that lost its
 * locks").  The caller confirms its other locks afterwards, and reads what it
 * goes by after that: they may have fallen before this one was taken.
 * REQUIRES: opened O_RDWR. */
gd_status gd_group_hold(const gd_group *group, gd_error *err);

/* Opens the group's file once more, for direct I/O.  access: O_RDONLY or O_RDWR.
 * -1 if that is not possible, or another file has taken the name. */
int gd_group_open_direct(const gd_group *group, int root, int access);

/* Creates the next group, for blocks of this scope, and takes its lease.  The
 * group is durable under its name before the call returns, so that no block in
 * it can count as durable while its directory entry is not. */
gd_status gd_group_create(const gd_env *env, int root, const gd_params *params,
                          const gd_scope *scope, gd_locks *locks,
                          uint32_t *number, gd_error *err);

/* Writes the start of a group with params->group_slots slots into fd, called
 * name: the header and room for the fingerprint store.  Then fsyncs it. */
gd_status gd_group_write_new(const gd_env *env, int fd, const char *name,
                             const gd_params *params, const gd_scope *scope,
                             uint32_t number, gd_error *err);

/* Writes the header of a group whose segments are on the disk into target, the
 * file that is to take old's place.  lists: its segments may have lists, which
 * they keep if old has them.  An older program may refuse target, and the seed
 * of all that follows in it may be another one (format.rst, "Block groups"). */
gd_status gd_group_write_hot(const gd_group *old, gd_group *target, bool lists,
                             gd_error *err);
/* The same for a cold group, with this object, which has target's whole file.
 * As long as target is written, it is not marked as cold. */
gd_status gd_group_write_cold(const gd_group *old, gd_group *target,
                              const uint8_t object[GD_ID_SIZE], gd_error *err);

/* The valid record with the highest sequence; all zeros if none is valid. */
gd_status gd_group_read_published(const gd_group *group, gd_published *record,
                                  gd_error *err);
/* REQUIRES: the lease. */
gd_status gd_group_write_published(const gd_group *group,
                                   const gd_published *record, gd_error *err);

/* Call this right after reading the record under the lease, before anything in
 * the group changes.  If the file's name may not be durable, it makes it
 * durable (I1) and clears the flag in *record; the next write of the record
 * stores that.  An earlier fsync that failed does not matter: see design.rst,
 * "What a failed sync means". */
gd_status gd_group_sync_rename(const gd_group *group, int root,
                               gd_published *record, gd_error *err);
/* Draws *record's next generation: before published entries change, and
 * whenever more are published.  A counter would not do.  A record may be read
 * and cached, and then lost by a crash or a failed fdatasync; the next record
 * would have the same number (N7.2). */
gd_status gd_group_next_generation(const gd_env *env, gd_published *record,
                                   gd_error *err);

/* Decodes entries [first, first + count) without judging them: each has its
 * state.  GD_CORRUPT if entries lie behind the end of the file. */
gd_status gd_group_read_entries(const gd_group *group, uint32_t first,
                                uint32_t count, gd_entry *entries,
                                gd_error *err);
/* REQUIRES: the lease, and first + count <= slots. */
gd_status gd_group_write_entries(const gd_group *group, uint32_t first,
                                 uint32_t count, const gd_entry *entries,
                                 gd_error *err);
/* The same, but leaves out the entries in one state. */
gd_status gd_group_write_except(const gd_group *group, uint32_t first,
                                uint32_t count, const gd_entry *entries,
                                gd_entry_state left_out, gd_error *err);

/* Loads the fingerprints below record->count (LiveDFS: prefetching of a whole
 * fingerprint store). */
gd_status gd_group_load_table(const gd_group *group,
                              const gd_published *record,
                              gd_fptable **store, gd_error *err);
/* Returns whether the store was loaded from this file, with this record.  The
 * group's number is not enough: the group may have been lost and its number
 * reused.  Nor is the inode's number, which is also reused.  Nor is the
 * identity alone, since a restored copy has the same one. */
bool gd_group_is_table(const gd_group *group, const gd_published *record,
                       const gd_fptable *store);

/* Reads bytes of the group's file, whatever they are. */
gd_status gd_group_read_file(const gd_group *group, void *out, size_t length,
                             uint64_t offset, gd_error *err);
/* Reads bytes of segments: those of the file, or, if the group is cold, of its
 * object.  GD_UNAVAILABLE if the object store does not give them now. */
gd_status gd_group_read_data(const gd_group *group, void *out, size_t length,
                             uint64_t offset, gd_error *err);
/* Advice: these bytes of segments will be read soon. */
void gd_group_expect_data(const gd_group *group, uint64_t offset,
                          uint64_t length);

/* Of a cold group: these bytes may be wrong on this host.  Whoever reads them
 * next has them fetched again. */
void gd_group_forget_data(const gd_group *group, uint64_t offset,
                          uint64_t length);

/* Reads the segment that entry names, without decoding it: header and stored
 * bytes go into in (room for both).  Verifies that the header agrees with the
 * entry.  patience_ms is for each fetch of a cold group's slices (slices.h). */
gd_status gd_group_read_stored(const gd_group *group, uint32_t patience_ms,
                               const gd_entry *entry, uint32_t slot,
                               uint8_t *in,
                               gd_segment_header *header, gd_error *err);

/* Reads the segment that entry names.  Header and stored bytes go into in (room
 * for GD_SEGMENT_HEADER + GD_SEGMENT_MAX), plain bytes into plain (room for
 * GD_SEGMENT_MAX).  Verifies that the header agrees with the entry. */
gd_status gd_group_read_segment(const gd_group *group, const gd_entry *entry,
                                uint32_t slot, gd_coder *coder, uint8_t *in,
                                uint8_t *plain, gd_segment_header *header,
                                gd_error *err);
/* Verifies that header belongs to the segment that entry names, and that the
 * segment contains slot. */
gd_status gd_group_match_segment(const gd_group *group, const gd_entry *entry,
                                 uint32_t slot, const gd_segment_header *header,
                                 gd_error *err);

#endif
