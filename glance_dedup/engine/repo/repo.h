/* SPDX-License-Identifier: Apache-2.0 */
/*
 * repo.h - a process's handle on a repository: what all its transactions and
 * readers share.
 *
 * A handle is thread-safe and belongs to the process that opened it.  After
 * fork the child must not use it (every entry point checks: GD_CLOSED).  The
 * child must not close it either, since that would release the parent's locks.
 * Instead it closes the inherited descriptors by their numbers, leaves the
 * memory as it is (another thread may have been changing it), and opens its own
 * handle.
 */
#ifndef GD_REPO_H
#define GD_REPO_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/groupmap.h"
#include "engine/base/pool.h"
#include "engine/base/seeks.h"
#include "engine/base/status.h"
#include "engine/files/features.h"
#include "engine/files/filter.h"
#include "engine/files/freespace.h"
#include "engine/files/locks.h"
#include "engine/format/chunker.h"
#include "engine/format/fingerprint.h"
#include "engine/format/params.h"
#include "engine/repo/fpcache.h"
#include "engine/repo/hintindex.h"
#include "engine/repo/scratch.h"

/* Counts since the handle was opened. */
typedef struct gd_counters {
    atomic_ullong blocks;        /* non-zero blocks written to transactions */
    atomic_ullong zero_blocks;   /* all-zero blocks */
    atomic_ullong hits;          /* blocks found to be stored already */
    atomic_ullong misses;        /* blocks stored as new */
    atomic_ullong skipped;       /* not looked up, because of a hint */
    atomic_ullong unmarked;      /* without the mark nodedup that they were to
                                  * get: an older program was open (I14) */
    atomic_ullong candidates;    /* hints that the filter gave */
    atomic_ullong false_candidates; /* hints among them that mismatched */
    atomic_ullong cold_loads;    /* fingerprint stores read from their file */
    atomic_ullong capped_loads;  /* loads skipped because of the cap */
    atomic_ullong compares;      /* blocks compared by their bytes */
    atomic_ullong lock_refusals; /* group locks refused; counted as misses */
    atomic_ullong sync_points;
    atomic_ullong bytes_read;    /* plain bytes handed out */
    atomic_ullong spare_reads;   /* damaged blocks read from a spare copy */
    atomic_ullong yielded_segments; /* stored uncompressed to save time */
    atomic_ullong phase_samples; /* blocks looked up at other phases */
    atomic_ullong phase_changes; /* batches cut again at another phase */
    gd_seeks store;              /* reads of fingerprint stores for look-ups */
    gd_seeks image;              /* reading images */
} gd_counters;

typedef struct gd_repo gd_repo;

/* All groups, as a scan of follow.c listed them. */
typedef struct gd_group_list {
    uint32_t *numbers; /* sorted; NULL: there is none */
    size_t count;
    int64_t listed_ns; /* before it was listed, by the monotonic clock */
} gd_group_list;

/* The ways by which new blocks reach their file, and what each has cost lately
 * (io_mode.h). */
typedef enum gd_io_mode {
    GD_IO_MODE_THROUGH, /* the page cache */
    GD_IO_MODE_BESIDE,
} gd_io_mode;

typedef struct gd_ways {
    uint64_t cost[2]; /* 0: not known */
    uint64_t since; /* bytes since the dearer way was last tried */
} gd_ways;

struct gd_repo {
    const gd_env *env;
    pid_t owner;
    int root;
    gd_params params;
    gd_chunker chunker;
    gd_digest *digest;
    gd_pool *pool;
    gd_locks *locks;
    gd_fpcache *cache;
    struct gd_segcache *segcache; /* decompressed segments, for readers */
    struct gd_metacache *metacache; /* verified metadata, likewise */
    gd_scratch_list scratch; /* buffers of readers */
    struct gd_spare_index *spares;
    /* NULL: none could be opened, or not yet; duplicates are missed.  Once set
     * it stays, so a thread that saw it may go on using it. */
    gd_hintindex *_Atomic index;
    gd_filter *filter; /* NULL where a store is the index */
    /* Result of the last scan, if it found more than it might read.  Guarded by
     * the index's lock of the rebuild. */
    gd_group_list unfinished;
    gd_counters counters;
    pthread_mutex_t mutex;
    gd_groupmap full; /* groups never to be appended to; guarded by mutex */
    gd_groupmap scopes; /* scopes of groups: tags of appender.c; likewise */
    gd_ways ways;       /* likewise */
    pthread_mutex_t features_mutex; /* held while a feature is set */
    atomic_uint used_features; /* bits; this handle made them durable */
};

/* Files that a cache may keep open when nobody uses them. */
enum {
    GD_KEPT_OPEN_MIN = 64,
    GD_KEPT_OPEN_MAX = 2048,
    /* Shares of the process's descriptors: for the groups of a handle, and for
     * the parts of each volume. */
    GD_GROUPS_SHARE = 8,
    GD_PARTS_SHARE = 16,
};

/* Opens the repository in the directory path.  It has no index yet: only
 * storing needs one.  params are copied.
 *
 * Until it is closed, the handle keeps features from being set that this engine
 * does not know (N15.2).  GD_VERSION: one is set already. */
gd_status gd_repo_open(const gd_env *env, const char *path,
                       const gd_params *params, bool allow_weak_digest,
                       gd_repo **repo, gd_error *err);
/* Opens the host's filter for this repository, or creates it (gd_filter_open).
 * Transactions may be running; they use the filter as soon as it is there.
 * After a failure images can still be stored, but duplicates are missed.
 * REQUIRES: no index yet. */
gd_status gd_repo_attach_filter(gd_repo *repo, const char *path,
                                uint64_t budget, gd_error *err);
/* The same for a key-value store of this host that serves instead of the filter
 * (gd_hintindex_of_store). */
gd_status gd_repo_attach_store(gd_repo *repo, gd_kv_backend backend,
                               const char *path, const gd_kv_options *options,
                               gd_error *err);
/* REQUIRES: no transaction or image is open on it. */
void gd_repo_close(gd_repo *repo);
/* GD_CLOSED in a process that did not open the handle. */
gd_status gd_repo_require_owner(const gd_repo *repo, gd_error *err);

/* The number of files that a cache with this share may keep open. */
uint64_t gd_repo_kept_open(const gd_repo *repo, unsigned share);

/* Called before the first byte that only programs with the feature understand:
 * sets it durably (N15.1).  Costs nothing once this handle has done so. */
gd_status gd_repo_use_feature(gd_repo *repo, gd_feature feature,
                              gd_error *err);
/* The same, but returns GD_BUSY if an older program has the repository open for
 * so long. */
gd_status gd_repo_try_feature(gd_repo *repo, gd_feature feature,
                              unsigned timeout_ms, gd_error *err);

/* Called before `bytes` are stored: GD_NOSPACE if too little would be left free
 * (freespace.h).  Deleting, accounting and collecting do not call it. */
gd_status gd_repo_require_room(const gd_repo *repo, uint64_t bytes,
                               gd_error *err);
/* The same for bytes that can be done without.  Without a reserve, the file
 * system must have them free. */
gd_status gd_repo_require_room_to_spare(const gd_repo *repo, uint64_t bytes,
                                        gd_error *err);
/* The same for the new file of a group that becomes cold, which may use what
 * others leave for it: else no group could move from a disk that uploads have
 * filled. */
gd_status gd_repo_require_room_to_move(const gd_repo *repo, uint64_t bytes,
                                       gd_error *err);
/* Space that storing leaves free. */
gd_freespace gd_repo_keeps(const gd_repo *repo);

#endif
