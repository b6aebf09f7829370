/* SPDX-License-Identifier: Apache-2.0 */
/*
 * clients.h - how many clients are connected to the volume.
 *
 * NBD sends a client the size when it connects, and never again.  A client that
 * believes in a larger size requests bytes behind the end.  QEMU 7.2 aborts
 * when that happens to it after it has connected again.  So a volume becomes
 * smaller only while nobody is connected, and a client that connects meanwhile
 * waits.
 */
#ifndef GD_NBDKIT_CLIENTS_H
#define GD_NBDKIT_CLIENTS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/volume/volume.h"

/* Each takes the threads and descriptors of a connection. */
enum {
    GD_NBDKIT_MAX_CLIENTS = 256,
    GD_NBDKIT_MAX_SOCKETS = 2 * GD_NBDKIT_MAX_CLIENTS, /* with handshakes */
};

typedef struct gd_nbdkit_clients {
    pthread_mutex_t mutex; /* held while the size changes */
    uint64_t connected;    /* guarded by it */
} gd_nbdkit_clients;

/* Duplicates of the descriptors of connections. */
typedef struct gd_nbdkit_sockets {
    unsigned count;
    int fds[GD_NBDKIT_MAX_SOCKETS];
} gd_nbdkit_sockets;

/* A client has connected, and does not know the size yet.  Waits while the size
 * changes.  Returns false if there are too many. */
bool gd_nbdkit_clients_enter(gd_nbdkit_clients *clients);
void gd_nbdkit_clients_leave(gd_nbdkit_clients *clients);
/* Changes the volume's size.  GD_BUSY if it would become smaller and a client is
 * connected.  Thread-safe; one call at a time does its work. */
gd_status gd_nbdkit_clients_resize(gd_nbdkit_clients *clients,
                                   gd_volume *volume, uint64_t size,
                                   gd_error *err);
/* Finds the connections of all clients, for gd_nbdkit_clients_release, also if
 * it fails. */
gd_status gd_nbdkit_clients_find(gd_nbdkit_sockets *sockets, gd_error *err);
/* Closes the duplicates, and, if so requested, ends the connections. */
void gd_nbdkit_clients_release(gd_nbdkit_sockets *sockets, bool disconnect);

#endif
