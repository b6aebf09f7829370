/* SPDX-License-Identifier: Apache-2.0 */
/*
 * daemon.h - a request to dedupd, by HTTP on its Unix socket.
 *
 * Each request has a connection of its own, which the daemon closes behind its
 * answer.  The daemon is not trusted: an answer has a bounded length, and must
 * come in time.  Thread-safe.
 */
#ifndef GD_NBDKIT_DAEMON_H
#define GD_NBDKIT_DAEMON_H

#include <stdbool.h>

#include "engine/base/status.h"

enum { GD_NBDKIT_REASON = 512 };

typedef struct gd_nbdkit_reply {
    int code;      /* of HTTP */
    bool is_own;   /* it names the daemon's repository: the daemon has looked
                    * at the request, and does not only lack connections */
    char reason[GD_NBDKIT_REASON]; /* the sentence of an error; or "" */
} gd_nbdkit_reply;

/* Posts JSON to a path.  GD_UNAVAILABLE, with the reason, if no answer comes in
 * time. */
gd_status gd_nbdkit_daemon_post(const char *socket, const char *path,
                                const char *json, unsigned timeout_ms,
                                gd_nbdkit_reply *reply, gd_error *err);

#endif
