/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spareindex.h - what a handle knows of the files of spares/: which
 * fingerprints each has, so that they need not be read again for each damaged
 * block.
 *
 * A file is identified by its inode and time.  The directory is listed at most
 * once a second.  Thread-safe; one search at a time, since only damage needs
 * it.
 */
#ifndef GD_SPAREINDEX_H
#define GD_SPAREINDEX_H

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/fingerprint.h"
#include "engine/format/params.h"

typedef struct gd_spare_index gd_spare_index;

gd_status gd_spare_index_open(const gd_env *env, int root,
                              const gd_params *params, gd_spare_index **index,
                              gd_error *err);
void gd_spare_index_close(gd_spare_index *index);

/* Takes the block in this slot of spares/<number> if it is the right one. */
typedef gd_status (*gd_spare_try)(void *arg, uint32_t number, uint32_t slot,
                                  bool *found, gd_error *err);
/* Tries all copies with this fingerprint until one is *found. */
gd_status gd_spare_index_find(gd_spare_index *index, const gd_fingerprint *fp,
                              gd_spare_try try, void *arg, bool *found,
                              gd_error *err);

#endif
