/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journaltail.h - the last records of a journal, which may be in the page cache
 * only: they are copied into the next owner's journal (volumes.rst, V4).
 */
#ifndef GD_JOURNALTAIL_H
#define GD_JOURNALTAIL_H

#include "engine/volume/journal.h"

typedef struct gd_journal_tail {
    const gd_journal *journal; /* that was scanned */
    uint64_t from;             /* where its first record begins */
} gd_journal_tail;

/* Returns the bytes of the records. */
uint64_t gd_journal_tail_length(const gd_journal_tail *tail);

/* Appends the records of bytes and zeros to another journal of the volume, in
 * order, as far as that one's size goes.  visit gets each one that was appended.
 * GD_CORRUPT if the records have changed since the scan, or none begins at
 * `from`.
 * REQUIRES: nobody else uses `to`. */
typedef gd_status gd_journal_tail_visitor(void *arg, gd_journal *to,
                                          const gd_append *append,
                                          gd_error *err);
gd_status gd_journal_tail_copy(const gd_journal_tail *tail, gd_journal *to,
                               gd_journal_tail_visitor *visit, void *arg,
                               gd_error *err);

#endif
