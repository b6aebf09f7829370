/* SPDX-License-Identifier: Apache-2.0 */
/*
 * clients.c - see clients.h.
 */
#include "nbdkit/clients.h"

#include <inttypes.h>

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
