/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handshakes.c - see handshakes.h.
 */
#include "nbdkit/handshakes.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { IPV6_NETWORK_BYTES = 8 };

/* Returns a socket's number that the kernel gives to no other; 0: it is none. */
static uint64_t
cookie_of(int fd)
{
    uint64_t cookie = 0;
    socklen_t length = sizeof cookie;
    return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &length) == 0
               ? cookie
               : 0;
}

static bool
has_peer(int fd, const struct sockaddr *peer, socklen_t length)
{
    struct sockaddr_storage found;
    socklen_t size = sizeof found;
    return getpeername(fd, (struct sockaddr *)&found, &size) == 0 &&
           size == length && memcmp(&found, peer, length) == 0;
}

/* Returns this process's descriptor that is connected to a peer, or -1.  nbdkit
 * gives plugins the peer only. */
static int
find_peer(const struct sockaddr *peer, socklen_t length)
{
    int fd = -1;
    DIR *directory = opendir("/proc/self/fd");
    if (directory == NULL) {
        return -1;
    }
    for (struct dirent *entry; fd < 0 && (entry = readdir(directory));) {
        char *end;
        long number = strtol(entry->d_name, &end, 10);
        if (end != entry->d_name && *end == '\0' &&
            has_peer((int)number, peer, length)) {
            fd = (int)number;
        }
    }
    closedir(directory);
    errno = ENOTCONN;
    return fd;
}

static void
drop(gd_nbdkit_handshakes *handshakes, unsigned i, bool cut)
{
    gd_nbdkit_handshake *handshake = &handshakes->waiting[i];
    if (cut) {
        shutdown(handshake->fd, SHUT_RDWR);
    }
    close(handshake->fd);
    handshakes->count--;
    memmove(handshake, handshake + 1,
            (handshakes->count - i) * sizeof *handshake);
}

/* With IPv6 a host may have all addresses of a network of 64 bits. */
static bool
is_same_host(const struct sockaddr_storage *a, const struct sockaddr_storage *b)
{
    if (a->ss_family != b->ss_family) {
        return false;
    }
    if (a->ss_family == AF_INET) {
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    }
    return a->ss_family == AF_INET6 &&
           memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr,
                  &((const struct sockaddr_in6 *)b)->sin6_addr,
                  IPV6_NETWORK_BYTES) == 0;
}

/* The caller holds the mutex of these four. */

/* Returns the oldest handshake of the host that has the most. */
static unsigned
find_victim(const gd_nbdkit_handshakes *handshakes)
{
    unsigned victim = 0, most = 0;
    for (unsigned i = 0; i < handshakes->count; i++) {
        unsigned same = 0;
        for (unsigned j = i; j < handshakes->count; j++) {
            same += is_same_host(&handshakes->waiting[i].peer,
                                 &handshakes->waiting[j].peer);
        }
        if (same > most) {
            victim = i;
            most = same;
        }
    }
    return victim;
}

static void
drop_own(gd_nbdkit_handshakes *handshakes)
{
    for (unsigned i = 0; i < handshakes->count; i++) {
        if (pthread_equal(handshakes->waiting[i].thread, pthread_self())) {
            drop(handshakes, i, false);
            return;
        }
    }
}

static void
drop_ended(gd_nbdkit_handshakes *handshakes, uint64_t now_ms)
{
    for (unsigned i = handshakes->count; i-- > 0;) {
        gd_nbdkit_handshake *handshake = &handshakes->waiting[i];
        bool late = now_ms - handshake->began_ms >= GD_NBDKIT_HANDSHAKE_MS;
        if (late || cookie_of(handshake->number) != handshake->cookie) {
            drop(handshakes, i, late);
        }
    }
}

static int
add(gd_nbdkit_handshakes *handshakes, const struct sockaddr *peer,
    socklen_t length, uint64_t now_ms)
{
    gd_nbdkit_handshake new = {.thread = pthread_self(), .began_ms = now_ms};
    new.number = find_peer(peer, length);
    if (new.number < 0) {
        return -1;
    }
    new.fd = fcntl(new.number, F_DUPFD_CLOEXEC, 0);
    if (new.fd < 0) {
        return -1;
    }
    new.cookie = cookie_of(new.fd);
    memcpy(&new.peer, peer, length);
    if (handshakes->count == GD_NBDKIT_MAX_HANDSHAKES) {
        drop(handshakes, find_victim(handshakes), true);
    }
    handshakes->waiting[handshakes->count++] = new;
    return 0;
}

int
gd_nbdkit_handshakes_begin(gd_nbdkit_handshakes *handshakes,
                           const struct sockaddr *peer, socklen_t length,
                           uint64_t now_ms)
{
    pthread_mutex_lock(&handshakes->mutex);
    drop_own(handshakes); /* of an earlier thread with the same id */
    drop_ended(handshakes, now_ms);
    int rc = add(handshakes, peer, length, now_ms);
    pthread_mutex_unlock(&handshakes->mutex);
    return rc;
}

void
gd_nbdkit_handshakes_end(gd_nbdkit_handshakes *handshakes)
{
    pthread_mutex_lock(&handshakes->mutex);
    drop_own(handshakes);
    pthread_mutex_unlock(&handshakes->mutex);
}

void
gd_nbdkit_handshakes_sweep(gd_nbdkit_handshakes *handshakes, uint64_t now_ms)
{
    pthread_mutex_lock(&handshakes->mutex);
    drop_ended(handshakes, now_ms);
    pthread_mutex_unlock(&handshakes->mutex);
}
