/* SPDX-License-Identifier: Apache-2.0 */
/*
 * clients.c - see clients.h.
 */
#include "nbdkit/clients.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "engine/volume/volumenames.h"

bool
gd_nbdkit_clients_enter(gd_nbdkit_clients *clients)
{
    pthread_mutex_lock(&clients->mutex);
    bool room = clients->connected < GD_NBDKIT_MAX_CLIENTS;
    clients->connected += room;
    pthread_mutex_unlock(&clients->mutex);
    return room;
}

void
gd_nbdkit_clients_leave(gd_nbdkit_clients *clients)
{
    pthread_mutex_lock(&clients->mutex);
    clients->connected--;
    pthread_mutex_unlock(&clients->mutex);
}

gd_status
gd_nbdkit_clients_resize(gd_nbdkit_clients *clients, gd_volume *volume,
                         uint64_t size, gd_error *err)
{
    gd_volume_info info;
    pthread_mutex_lock(&clients->mutex);
    gd_volume_get_info(volume, &info);
    /* gd_volume_resize refuses a size that no volume can have. */
    gd_status s =
        gd_volume_head_size_allowed(size) && size < info.head.size &&
                clients->connected > 0
            ? gd_fail(err, GD_BUSY,
                      "the volume cannot become smaller while clients are "
                      "connected (%" PRIu64 "): they would still ask for what "
                      "is behind its new end. Shut down the guests that use "
                      "it, and try again", clients->connected)
            : gd_volume_resize(volume, size, err);
    pthread_mutex_unlock(&clients->mutex);
    return s;
}

/* Returns whether a descriptor is the connection of a client of NBD.  All other
 * connections of the process are of Unix sockets: those that it has begun,
 * which have no name, and those of the control socket. */
static bool
is_client(int fd)
{
    static const char begin[] = "/proc/self/fd/"; /* see control.c */
    static const char end[] = "/" GD_VOLUME_CONTROL;
    struct sockaddr_storage peer;
    struct sockaddr_un own = {0};
    socklen_t peer_bytes = sizeof peer, own_bytes = sizeof own - 1;
    if (getpeername(fd, (struct sockaddr *)&peer, &peer_bytes) < 0) {
        return false;
    }
    if (peer.ss_family == AF_INET || peer.ss_family == AF_INET6) {
        return true;
    }
    if (peer.ss_family != AF_UNIX ||
        getsockname(fd, (struct sockaddr *)&own, &own_bytes) < 0 ||
        own.sun_path[0] == '\0') {
        return false;
    }
    size_t length = strlen(own.sun_path);
    return strncmp(own.sun_path, begin, sizeof begin - 1) != 0 ||
           length < sizeof end ||
           strcmp(own.sun_path + length + 1 - sizeof end, end) != 0;
}

/* Adds a duplicate of a descriptor if it is that of a client.  Another thread
 * may close the number, and a third one reuse it, so only duplicates are looked
 * at. */
static gd_status
add_client(gd_nbdkit_sockets *sockets, int number, gd_error *err)
{
    int fd = fcntl(number, F_DUPFD_CLOEXEC, 0);
    if (fd < 0 && errno == EBADF) {
        return GD_OK;
    }
    if (fd < 0) {
        return gd_fail_errno(err, errno, "cannot disconnect clients");
    }
    if (!is_client(fd)) {
        close(fd);
        return GD_OK;
    }
    if (sockets->count == GD_NBDKIT_MAX_SOCKETS) {
        close(fd);
        return gd_fail(err, GD_BUSY, "too many clients are connecting");
    }
    sockets->fds[sockets->count++] = fd;
    return GD_OK;
}

gd_status
gd_nbdkit_clients_find(gd_nbdkit_sockets *sockets, gd_error *err)
{
    sockets->count = 0;
    DIR *directory = opendir("/proc/self/fd");
    if (directory == NULL) {
        return gd_fail_errno(err, errno, "cannot list the connections");
    }
    gd_status s = GD_OK;
    struct dirent *entry;
    while (s == GD_OK && (entry = readdir(directory)) != NULL) {
        char *end;
        long number = strtol(entry->d_name, &end, 10);
        /* The duplicates are listed, too, if their numbers are higher. */
        bool is_new = end != entry->d_name && *end == '\0';
        for (unsigned i = 0; i < sockets->count; i++) {
            is_new = is_new && sockets->fds[i] != number;
        }
        if (is_new) {
            s = add_client(sockets, (int)number, err);
        }
    }
    closedir(directory);
    return s;
}

void
gd_nbdkit_clients_release(gd_nbdkit_sockets *sockets, bool disconnect)
{
    for (unsigned i = 0; i < sockets->count; i++) {
        if (disconnect) {
            shutdown(sockets->fds[i], SHUT_RDWR);
        }
        close(sockets->fds[i]);
    }
}
