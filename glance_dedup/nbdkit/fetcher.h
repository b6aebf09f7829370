/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fetcher.h - brings slices of cold groups, by asking dedupd (cold.rst,
 * "Reading").
 *
 * The plugin gets no credentials for the object store, so it has no other way.
 * A guest may give up its disk after an error.  So while no daemon answers, a
 * read waits for as long as a restart of the daemon takes, and only then fails;
 * from then on reads fail at once, until one answers again.
 */
#ifndef GD_NBDKIT_FETCHER_H
#define GD_NBDKIT_FETCHER_H

#include "engine/files/slices.h"

typedef struct gd_nbdkit_fetcher gd_nbdkit_fetcher;

/* Starts the thread that announces slices.  socket is the daemon's, and is
 * borrowed until the stop. */
gd_status gd_nbdkit_fetcher_start(const char *socket,
                                  const uint8_t repository_id[GD_ID_SIZE],
                                  gd_nbdkit_fetcher **fetcher, gd_error *err);
/* REQUIRES: nobody reads through the source any more. */
void gd_nbdkit_fetcher_stop(gd_nbdkit_fetcher *fetcher);
/* It is valid until the stop. */
gd_slice_source gd_nbdkit_fetcher_source(gd_nbdkit_fetcher *fetcher);

#endif
