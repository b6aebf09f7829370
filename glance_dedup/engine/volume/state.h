/* SPDX-License-Identifier: Apache-2.0 */
/*
 * state.h - declarations that the files of an open volume share.
 *
 * state.c changes the journal and syncs it, newest.c reads and writes the head
 * of a volume that is not open, volume.c serves reads, recovery.c begins with
 * the journals that the last owner left, checkpoint.c brings them into recipes,
 * write.c serves writes, resize.c changes the size, open.c opens and closes a
 * volume, delete.c deletes it, create.c creates it, rollback.c replaces its bytes
 * by an image's, rename.c its name.  Each calls only files named before it.
 */
#ifndef GD_VOLUME_STATE_H
#define GD_VOLUME_STATE_H

#include <pthread.h>

#include "engine/volume/journal.h"
#include "engine/volume/overlay.h"
#include "engine/volume/parts.h"
#include "engine/volume/volume.h"
#include "engine/volume/volumenames.h"

struct gd_volume {
    gd_repo *repo;
    char name[GD_VOLUME_NAME_MAX + 1];
    int lock;
    gd_parts parts;

    /* One checkpoint, snapshot or resizing at a time.  Taken before the mutex.
     * Its holder alone changes size and base in the head, the frozen journals,
     * and what they have in memory. */
    pthread_mutex_t checkpointing;
    gd_volume_mark *made; /* editions of the frozen records, without a mark
                           * yet */
    size_t made_count, made_room;
    bool singly; /* parts are committed one at a time: there was no room */

    pthread_mutex_t mutex; /* guards all below */
    pthread_cond_t changed;
    gd_volume_head head; /* of the active journal, with counters of now */
    gd_journal *active;
    gd_overlay fresh;    /* of the active journal */
    gd_journal **frozen; /* oldest first */
    size_t frozen_count, frozen_room;
    gd_overlay stale;    /* of the frozen ones */
    gd_journal *unsynced; /* the frozen one that is to be synced before the
                           * active one (V11); NULL: none */
    gd_journal *spare;   /* for the next journal (V10); NULL: there is none */
    bool copies_all;     /* one that an owner before left is not known to be
                          * durable, so this owner's first one copies all
                          * (V4) */
    bool held;           /* writes wait (resizing) */
    bool syncing;
    bool no_dedup; /* hints (volumes.rst): look up no blocks; */
    uint32_t wanted[GD_CACHED_STORES]; /* groups to be looked into first, */
    size_t wanted_count;               /* the last one wanted last */
    gd_error broken;     /* GD_OK: it takes writes */
    bool waiting; /* for room for this owner's first journal: active is the
                   * newest of the frozen ones */
};

/* ---- state.c ---- */

enum {
    GD_VOLUME_LITTLE = 1 << 20, /* bytes of a journal that are rather synced
                                 * than avoided to be (V6, V10) */
};

/* The fields that a new journal's head gets from the caller. */
typedef struct gd_volume_change {
    uint64_t size;
    uint64_t base_size;
    gd_volume_state state;
} gd_volume_change;

/* The head as it is. */
void gd_volume_copy_head(gd_volume *volume, gd_volume_head *head);
/* The fate of the present journals when a new one begins. */
typedef enum gd_volume_fate {
    GD_FREEZE,  /* nothing is frozen; the active one is if it has records */
    GD_REPLACE, /* likewise, and the frozen ones are in the parts' editions */
    GD_DISCARD, /* nothing is frozen, and the active one is not needed */
} gd_volume_fate;

/* Begins a new journal.
 * REQUIRES: checkpointing. */
gd_status gd_volume_rotate(gd_volume *volume, const gd_volume_change *change,
                           gd_volume_fate fate, gd_error *err);

/* GD_BUSY if another process is the owner, or was it meanwhile: the server
 * dropped this one's locks (V1).  journal: the newest that this owner made.  If
 * the locks fall after the call, the journal's does, too. */
gd_status gd_volume_revalidate(const gd_volume *volume,
                               const gd_journal *journal, gd_error *err);

/* The same for an open volume, which takes no more writes if so: nor is anything
 * removed that its next owner may need.  After any other failure of its journal,
 * that one's error. */
gd_status gd_volume_confirm_owner(gd_volume *volume, gd_error *err);

/* The size of the base, or 0 if no part reads from it any more.
 * REQUIRES: checkpointing, or that nobody else has the volume yet. */
uint64_t gd_volume_base_needed(gd_volume *volume);

/* All of these REQUIRE the mutex. */
gd_status gd_volume_require_intact(const gd_volume *volume, gd_error *err);
/* The volume takes no more writes, nor does it wait for space. */
void gd_volume_set_broken(gd_volume *volume, const gd_error *err);
/* Closes the journal with its last user. */
void gd_volume_release_journal(gd_journal *journal);
/* Gives up the spare, if there is one. */
void gd_volume_drop_spare(gd_volume *volume);
/* Releases all frozen journals. */
void gd_volume_release_frozen(gd_volume *volume);
/* Removes all frozen journals, which are in editions now, durably (V6). */
void gd_volume_drop_frozen(gd_volume *volume);
/* Returns how many bytes of a journal are not durable. */
uint64_t gd_volume_unsynced_bytes(const gd_journal *journal);
/* Waits until all records up to the active journal's present end are durable, or
 * stored.  Lets go of the mutex meanwhile. */
gd_status gd_volume_sync(gd_volume *volume, gd_error *err);
/* The same for the active journal alone, which has the record that the frozen ones
 * are stored.  They need no sync once it is durable, and not before.
 * REQUIRES: checkpointing. */
gd_status gd_volume_sync_stored(gd_volume *volume, gd_error *err);
/* Appends records to the active journal.  If the file system has no room, the
 * spare is given up (V10). */
gd_status gd_volume_append(gd_volume *volume, gd_append *appends,
                           size_t count, gd_error *err);
/* Inserts an appended record into the overlay; reads see it from now on. */
gd_status gd_volume_enter(gd_volume *volume, const gd_append *append,
                          gd_error *err);

/* ---- newest.c ---- */

/* Checks with which each call on a named volume begins. */
gd_status gd_volume_require_call(const gd_repo *repo, const char *name,
                                 gd_error *err);
/* Opens the newest journal.  GD_NOTFOUND if there is none. */
gd_status gd_volume_open_newest(gd_repo *repo, const char *name,
                                gd_journal **journal, gd_volume_head *head,
                                gd_volume_mark **marks, gd_error *err);
/* Writes a journal that has nothing but a head, and marks; NULL: none.
 * REQUIRES: the owner's lock; nobody writes to another journal. */
gd_status gd_volume_write_head(gd_repo *repo, const char *name,
                               gd_volume_head *head,
                               const gd_volume_mark *marks, gd_error *err);

/* ---- volume.c ---- */

/* Refuses a request before anything of it is done, and counts it. */
gd_status gd_volume_begin_request(gd_volume *volume, uint64_t offset,
                                  uint64_t length, uint64_t *counter,
                                  gd_error *err);
/* GD_INVALID unless the range lies within the volume.  REQUIRES: the mutex. */
gd_status gd_volume_require_range(const gd_volume *volume, uint64_t offset,
                                  uint64_t length, gd_error *err);
/* A read that is not counted. */
gd_status gd_volume_read_uncounted(gd_volume *volume, uint8_t *out,
                                   size_t length,
                                   uint64_t offset, gd_error *err);

/* ---- recovery.c ---- */

/* Reads the journals, of which the newest is the active one, and begins the
 * owner's own journal, if there is room for it. */
gd_status gd_volume_recover(gd_volume *volume, gd_error *err);
/* Makes the owner's first journal if there was no room for it before.  stored:
 * volume->made has all that was found, so nothing is copied.
 * GD_NOSPACE: there is none yet.
 * REQUIRES: checkpointing. */
gd_status gd_volume_take_up(gd_volume *volume, bool stored, gd_error *err);

/* ---- resize.c ---- */

/* GD_INVALID, with the volume's name, unless a volume may have this size. */
gd_status gd_volume_require_size(const char *name, uint64_t size,
                                 gd_error *err);

/* ---- delete.c ---- */

/* Deletes a volume, or finishes a deletion.  REQUIRES: the owner's lock. */
gd_status gd_volume_delete_owned(gd_repo *repo, const char *name,
                                 gd_error *err);

/* ---- checkpoint.c; these REQUIRE checkpointing ---- */

/* Makes the owner's first journal if there was no room for it before.  If there
 * is none for the copies, there may be for editions: the new head then has their
 * marks, and nothing is copied. */
gd_status gd_volume_make_writable(gd_volume *volume, gd_error *err);
/* Brings the frozen journals into editions.  go_on: if the active journal has
 * many bytes that are not durable, it is frozen then, rather than synced (V6). */
gd_status gd_volume_store_frozen(gd_volume *volume, bool go_on, gd_error *err);
/* Brings all that was written before the call into editions. */
gd_status gd_volume_store_all(gd_volume *volume, gd_error *err);

#endif
