/* SPDX-License-Identifier: Apache-2.0 */
/*
 * control.h - the Unix socket by which commands reach a served volume.
 *
 * The socket is volumes/<name>/control in the repository.  Only the owner of
 * the volume makes it (V1), so a socket that is there already is the remainder
 * of an owner that was killed, and is replaced.
 *
 * A connection has one request: a line of at most 511 bytes of UTF-8, without
 * control characters, that ends with a line feed.  Its words are separated by
 * one space:
 *
 *     status
 *     snapshot IMAGE [PROJECT]    PROJECT may hold spaces
 *     resize BYTES                in decimal (clients.h)
 *     checkpoint
 *     disconnect                  all clients of NBD
 *
 * The answer is lines of text.  The first is "ok", or "error STATUS TEXT" with
 * the status's name (gd_status_name) and a sentence.  After "ok" there may be
 * lines "KEY VALUE"; a client ignores keys that it does not know.  An empty
 * line ends the answer, and the server closes the connection.
 *
 * Peers are the user of this process, root, and, if the group of the
 * repository's directory may write there, the members of that group.  Others
 * are disconnected without an answer.  A peer has five seconds to send its
 * request, and five to take the answer.  Sixteen are served at a time, each by
 * a thread; the next ones wait.
 */
#ifndef GD_NBDKIT_CONTROL_H
#define GD_NBDKIT_CONTROL_H

#include "nbdkit/request.h"

typedef struct gd_nbdkit_control gd_nbdkit_control;

/* Listens in the directory of the volume.  The path may have any length.  What
 * is served is borrowed until the stop. */
gd_status gd_nbdkit_control_start(const gd_nbdkit_served *served,
                                  gd_nbdkit_control **control, gd_error *err);
/* Removes the socket, and waits for the requests that have been received. */
void gd_nbdkit_control_stop(gd_nbdkit_control *control);

#endif
