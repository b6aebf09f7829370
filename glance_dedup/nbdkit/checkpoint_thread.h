/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checkpoint_thread.h - the thread that does what a served volume needs now
 * and then.
 *
 * It makes a checkpoint when the journal is large.  When nothing was written for
 * five seconds, it makes one that is worth its cost, or of records that are five
 * minutes old.  It opens recipes again that a merge has replaced.  It
 * opens and fills the index for look-ups, and has it follow the blocks that
 * others store.  It ends handshakes that take too long.  After a failed
 * checkpoint it tries again, with growing pauses.  A failure that lasts is
 * logged once.
 */
#ifndef GD_NBDKIT_CHECKPOINT_THREAD_H
#define GD_NBDKIT_CHECKPOINT_THREAD_H

#include "engine/volume/volume.h"
#include "nbdkit/handshakes.h"
#include "nbdkit/settings.h"

typedef struct gd_nbdkit_checkpointer gd_nbdkit_checkpointer;

/* Starts the thread.  It borrows all parameters until the stop. */
gd_status gd_nbdkit_checkpointer_start(gd_repo *repo, gd_volume *volume,
                                       const gd_nbdkit_settings *settings,
                                       gd_nbdkit_handshakes *handshakes,
                                       gd_nbdkit_checkpointer **keeper,
                                       gd_error *err);
/* Notes a write that begins, whose records are not idle from their first moment
 * on.  Thread-safe, and does not wait. */
void gd_nbdkit_checkpointer_writes(gd_nbdkit_checkpointer *keeper);
/* Notifies the thread of a write that has ended.  Thread-safe, and does not
 * wait. */
void gd_nbdkit_checkpointer_wrote(gd_nbdkit_checkpointer *keeper);
/* Ends the thread, makes the last checkpoint, and has a head keep the
 * counters. */
void gd_nbdkit_checkpointer_stop(gd_nbdkit_checkpointer *keeper);

#endif
