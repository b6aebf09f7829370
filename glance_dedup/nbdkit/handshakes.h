/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handshakes.h - connections over TCP that have not finished their handshake.
 *
 * Every host that reaches the port can connect and send nothing.  nbdkit waits
 * for such a connection without a limit, with a thread and a descriptor, until
 * it has no more of them for clients with certificates.  So a connection has
 * ten seconds for its handshake, and at most 64 of them wait: a new one takes
 * the place of the oldest of the host that has the most.
 */
#ifndef GD_NBDKIT_HANDSHAKES_H
#define GD_NBDKIT_HANDSHAKES_H

#include <pthread.h>
#include <stdint.h>
#include <sys/socket.h>

enum {
    GD_NBDKIT_MAX_HANDSHAKES = 64,
    GD_NBDKIT_HANDSHAKE_MS = 10 * 1000,
};

typedef struct gd_nbdkit_handshake {
    pthread_t thread; /* runs the handshake */
    int number;       /* nbdkit's descriptor */
    int fd;           /* a duplicate, so that no other socket is shut down */
    uint64_t cookie;  /* the socket's */
    struct sockaddr_storage peer;
    uint64_t began_ms;
} gd_nbdkit_handshake;

typedef struct gd_nbdkit_handshakes {
    pthread_mutex_t mutex;
    gd_nbdkit_handshake waiting[GD_NBDKIT_MAX_HANDSHAKES]; /* by age */
    unsigned count;
} gd_nbdkit_handshakes;

/* Begins the handshake of the connection that has this peer.  The calling
 * thread must run it.  Shuts down another if there are too many.  Returns -1
 * with errno if the connection is gone, or there are no descriptors. */
int gd_nbdkit_handshakes_begin(gd_nbdkit_handshakes *handshakes,
                               const struct sockaddr *peer, socklen_t length,
                               uint64_t now_ms);
/* Ends the calling thread's handshake well. */
void gd_nbdkit_handshakes_end(gd_nbdkit_handshakes *handshakes);
/* Shuts down the connections whose time is over.  To be called every second or
 * so: until then, nbdkit's end of a failed handshake does not reach its peer. */
void gd_nbdkit_handshakes_sweep(gd_nbdkit_handshakes *handshakes,
                                uint64_t now_ms);

#endif
