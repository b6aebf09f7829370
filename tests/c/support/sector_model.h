/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sector_model.h - a volume of the_repo, and the possible contents of each of
 * its sectors.
 *
 * All requests are of whole sectors of 512 bytes. Each writes contents that no
 * other has. A sector has the content that was last written. After a crash of
 * the machine it may have any content that was written since the last flush,
 * or the one before; after a failed request, the new one or its old one.
 */
#ifndef SECTOR_MODEL_H
#define SECTOR_MODEL_H

#include "engine/volume/volume.h"
#include "tests/c/support/transaction_fixture.h"

enum {
    MODEL_PART = 65536,
    MODEL_PART_SECTORS = MODEL_PART / 512,
    MODEL_SECTORS = 6 * MODEL_PART_SECTORS, /* of the largest volume */
};

extern gd_volume *the_volume; /* NULL: closed */
extern gd_error *model_err; /* of all requests; may be NULL */

/* Makes a repository without a volume, and with an image "image" of so many
 * sectors that have contents, unless 0. */
void model_setup(uint64_t image_sectors);
void model_teardown(void);

/* Creates "disk", of a size, or as a clone of the image. */
gd_status model_create(uint64_t sectors);
gd_status model_clone(uint64_t sectors);
gd_status model_open(void);
void model_close(void);
/* Ends the owner, which tidies nothing up: only its locks are lost. The_repo is
 * another handle then; or closed. */
void model_kill(void);
void model_end(void);
/* Lets the machine crash. REQUIRES: model_start_shadow before. */
void model_start_shadow(void);
void model_crash(void);

/* Make requests. The model records their outcomes. */
gd_status model_write(uint64_t first, uint64_t count);
gd_status model_zero(uint64_t first, uint64_t count);
gd_status model_flush(void);
gd_status model_checkpoint(void);
gd_status model_snapshot(const char *image_id);
gd_status model_resize(uint64_t sectors);
uint64_t model_sectors(void);

/* Checks that every sector has a possible content; from then on no other is
 * possible. */
void model_compare(void);
/* Checks, after a checkpoint by an owner, that there is only one journal, and
 * no recipe that the volume does not need. */
void model_check_nothing_left(void);
/* Deletes the volume; no file of it may be left. */
void model_delete(void);
/* Returns the first line of the last error, for messages. */
const char *model_words(void);

#endif
