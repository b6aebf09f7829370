/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volume_fixture.h - the volume of sector_model.h with all kinds of state, its
 * files, and a full disk.
 */
#ifndef VOLUME_FIXTURE_H
#define VOLUME_FIXTURE_H

#include "tests/c/support/sector_model.h"

enum {
    P = MODEL_PART_SECTORS,
    /* Bytes that fill_disk leaves free. */
    LITTLE_ROOM = 16384,
    ROOM_FOR_A_PART = 256 << 10, /* but not for the records of many writes */
};

/* Makes editions of some parts, with flushed and unflushed records over
 * them. */
void begin_volume(bool clone);
/* Makes all requests that a user may make to a good volume. */
void use_volume(void);
/* Opens the volume again, uses and deletes it; no file of it may be left. */
void finish_volume(void);

/* Fills in the name of the active journal, or of one before it. */
void journal_name(uint32_t back, char name[GD_NAME_SIZE]);
/* Return the size and the inode of the active journal's file. */
int64_t journal_size(void);
ino_t journal_inode(void);
unsigned count_journals(void);
/* Returns the number of files without a journal's name. */
unsigned count_spares(void);
/* Returns the number of checkpoints that were made. */
uint64_t count_checkpoints(void);

/* From now on the disk has so many free bytes besides the reserve, until it is
 * emptied. Handles that are opened later have no reserve. */
extern uint64_t disk_room;
void fill_disk(uint64_t room);
void empty_disk(void);
/* Makes a volume with flushed records of a killed owner, and opens it with
 * LITTLE_ROOM, so that the records cannot be copied. */
void begin_on_full_disk(void);

#endif
