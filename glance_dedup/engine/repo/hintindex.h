/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hintindex.h - where look-ups get their hints: the filter, or a key-value
 * store.
 *
 * One table of functions, with two makers.  The filter (filter.h) is shared by
 * the host's processes, in memory, and gives several hints for a fingerprint.
 * A store (kv.h) lies on a disk of the host, knows every fingerprint, and gives
 * the address that was added last.
 *
 * No call can fail: a hint that is not added or not found is a missed duplicate
 * (design.rst, "Truth and hints").  Thread-safe.
 */
#ifndef GD_HINTINDEX_H
#define GD_HINTINDEX_H

#include "engine/files/filter.h"
#include "engine/files/group.h"
#include "engine/kv/kv.h"

typedef struct gd_hintindex gd_hintindex;

/* Published entries (I1): those of the group from slot `first` on. */
typedef struct gd_entry_range {
    uint32_t group, first, count;
    const gd_entry *entries;
} gd_entry_range;

/* Gets a hint for the fingerprint number i of a search.  It may call reject,
 * and nothing else of the index. */
typedef void gd_hint_taker(void *arg, size_t i, gd_address hint);

struct gd_hintindex {
    /* REQUIRES: nobody uses it. */
    void (*close)(gd_hintindex *index);
    /* Calls take with every hint for the fingerprints, in their order. */
    void (*find)(gd_hintindex *index, const gd_fingerprint *const *fps,
                 size_t count, gd_hint_taker *take, void *arg);
    /* A hint was found to mismatch. */
    void (*reject)(gd_hintindex *index, const gd_fingerprint *fp,
                   gd_address hint);
    /* Adds hints to the live ones of the entries. */
    void (*add)(gd_hintindex *index, const gd_entry_range *range);
    /* The same for the process that has published them, and notes that. */
    void (*add_own)(gd_hintindex *index, const gd_entry_range *range);
    /* Sets [first, end) to slots of the group that were added so. */
    void (*find_own)(gd_hintindex *index, uint32_t group, uint32_t *first,
                     uint32_t *end);
    /* Following the groups, as filter.h has it: lock, position, and a fresh
     * start. */
    bool (*rebuild_lock)(gd_hintindex *index);
    void (*rebuild_unlock)(gd_hintindex *index);
    void (*load)(gd_hintindex *index, gd_position *position);
    /* last: added first, as by add; a store commits both in one step. */
    void (*save)(gd_hintindex *index, const gd_entry_range *last,
                 const gd_position *position, const gd_look *look);
    void (*clear)(gd_hintindex *index);
    /* A store has no level, and does not know how many hints it has: both are
     * 0, and its bytes are those of its memory. */
    void (*get_stats)(gd_hintindex *index, gd_filter_stats *stats);
    bool exact; /* a hint is mostly true */
};

/* The filter stays the caller's, and must outlive the index. */
gd_status gd_hintindex_of_filter(const gd_env *env, gd_filter *filter,
                                 gd_hintindex **index, gd_error *err);
/* Opens a store (gd_kv_open) at path, and a file path.users.  GD_BUSY
 * where another process has it: all but LMDB serve one process; or where one
 * removes it. */
gd_status gd_hintindex_of_store(const gd_env *env, gd_kv_backend backend,
                                const char *path, const gd_kv_options *options,
                                gd_hintindex **index, gd_error *err);

#endif
