/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal.h - one file of a volume's journal: the bytes written to the volume,
 * in order (volumes.rst, V2 to V5).
 *
 * Not thread-safe, except that gd_journal_read and gd_journal_sync may run
 * beside all others.
 */
#ifndef GD_JOURNAL_H
#define GD_JOURNAL_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/names.h"
#include "engine/format/volumehead.h"
#include "engine/format/volumerecord.h"
#include "engine/volume/overlay.h"

typedef struct gd_journal {
    const gd_env *env;
    int root;
    int fd;
    char name[GD_NAME_SIZE];
    char new_name[GD_NAME_SIZE]; /* of the file before it has that name */
    uint32_t number;
    uint64_t seed;
    uint64_t size;     /* of the volume, when the journal was begun */
    uint64_t start;    /* of the records */
    uint64_t end;      /* where the next record goes */
    uint64_t reached;  /* up to where an append may have written */
    uint64_t ahead;    /* up to where the file has bytes to be overwritten:
                        * zeros, or what it held before it was recycled */
    uint64_t sequence; /* of the last record */
    uint64_t durable;  /* up to where it was synced; after a scan: up to where
                        * its records prove that it was */
    uint64_t records;  /* of bytes and zeros */
    bool made;         /* by this owner, who may write to it */
    unsigned users;    /* for the volume, which guards it */
} gd_journal;

/* Begins a journal with this head and marks, which has no name yet; records may
 * be appended.  spare: a journal that gd_journal_retire was called for, whose
 * file is written over (V10), and which is closed; or NULL. */
gd_status gd_journal_begin(const gd_env *env, int root, const char *volume,
                           gd_volume_head *head, const gd_volume_mark *marks,
                           gd_journal *spare, gd_journal **out, gd_error *err);
/* Makes all of a new journal durable, then gives it its name (V2).  *named:
 * whether it may have it; after an error with *named, nobody can know which
 * journal the next owner will find.  GD_BUSY if another owner has made a journal
 * with this number.  Closes the journal if it fails. */
gd_status gd_journal_publish(gd_journal *journal, const char *volume,
                             bool *named, gd_error *err);
/* Removes and closes a journal that has no name yet, or was retired. */
void gd_journal_abandon(gd_journal *journal);
/* The same for one that this owner made, and nobody needs any more (V8).
 * REQUIRES: nobody reads it. */
void gd_journal_remove(gd_journal *journal);
/* The first two in one. */
gd_status gd_journal_create(const gd_env *env, int root, const char *volume,
                            gd_volume_head *head, const gd_volume_mark *marks,
                            gd_journal *spare, gd_journal **out, bool *named,
                            gd_error *err);
/* Opens a journal for reading.  *marks has head->marks marks; the caller
 * releases it.  GD_CORRUPT unless head and marks are valid, and of this
 * repository. */
gd_status gd_journal_open(const gd_env *env, int root, const char *volume,
                          uint32_t number,
                          const uint8_t repository_id[GD_ID_SIZE],
                          gd_journal **out, gd_volume_head *head,
                          gd_volume_mark **marks, gd_error *err);
void gd_journal_close(gd_journal *journal);

/* ---- recycling (V10) ---- */

enum { GD_JOURNAL_MAX_SPARE = 64 << 20 }; /* bytes of a file that is kept */

/* Takes the journal's name from its file, so that another journal can be
 * written over it.  False if that cannot be; the journal then has the name that
 * it had, or none.
 * REQUIRES: this owner made the journal, all that it has is stored, durably,
 * and nobody reads it. */
bool gd_journal_retire(gd_journal *journal, const char *volume);
/* Gives back what the file has behind the records.  It need not succeed. */
void gd_journal_trim(gd_journal *journal);

/* ---- appending ---- */

enum { GD_JOURNAL_BATCH = 16 }; /* records appended at once, at most */

/* A record that is to be appended. */
typedef struct gd_append {
    gd_record record; /* kind, offset, length and checksum are the caller's */
    const uint8_t *data;
    uint64_t at; /* where in the journal it is then */
} gd_append;

/* Writes records behind the last one, without counting them: they are valid
 * only after gd_journal_accept of each, in order.  What was not accepted is cut
 * off before the next is written: behind it, a record of the failed append could
 * be found, and would cover newer bytes.
 * REQUIRES: count <= GD_JOURNAL_BATCH. */
gd_status gd_journal_append(gd_journal *journal, gd_append *appends,
                            size_t count, gd_error *err);
void gd_journal_accept(gd_journal *journal, const gd_append *append);
/* Writes zeros behind the last record, for later ones to overwrite: a file
 * system that has to make a longer file durable commits its metadata each time,
 * and one whose file stays as long does not.  Does nothing while the file has
 * bytes there, and need not succeed. */
void gd_journal_write_ahead(gd_journal *journal);
/* Returns how many bytes it would write now; 0: the file has some yet, or so
 * much is to be synced that the zeros would not last for another sync. */
uint64_t gd_journal_wants_ahead(const gd_journal *journal);
/* Makes the file durable.  Does not change journal->durable. */
gd_status gd_journal_sync(const gd_journal *journal, gd_error *err);

/* Reads all records in order, up to the first that is not valid, or up to
 * `before` if that is not 0.  visit gets each record and its place.  Then the
 * journal's fields have its end.  GD_CORRUPT if bytes are lost that were durable
 * (V5): those up to `durable` were. */
typedef gd_status gd_journal_visitor(void *arg, const gd_record *record,
                                     uint64_t at, gd_error *err);
gd_status gd_journal_scan(gd_journal *journal, uint64_t before,
                          uint64_t durable, gd_journal_visitor *visit,
                          void *arg, gd_error *err);
/* Returns GD_CORRUPT: the end that a scan found is a loss (V5). */
gd_status gd_journal_lost(const gd_journal *journal, gd_error *err);
/* Has the journal have no records any more: nothing in the file changes. */
void gd_journal_forget(gd_journal *journal);

/* What a record at `at`, of bytes or zeros, has of the volume. */
gd_piece gd_journal_piece(gd_journal *journal, const gd_record *record,
                          uint64_t at);
/* Copies a part of a piece's bytes to out, verified (I7).  room has
 * GD_RECORD_HEAD + GD_RECORD_DATA bytes.
 * REQUIRES: the range lies within the piece, which has a journal. */
gd_status gd_journal_read(const gd_piece *piece, uint64_t offset,
                          size_t length, uint8_t *out, uint8_t *room,
                          gd_error *err);

#endif
