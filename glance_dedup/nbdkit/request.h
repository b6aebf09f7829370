/* SPDX-License-Identifier: Apache-2.0 */
/*
 * request.h - requests, each a line on the control socket, and their answers
 * (control.h has the protocol).
 */
#ifndef GD_NBDKIT_REQUEST_H
#define GD_NBDKIT_REQUEST_H

#include "engine/volume/volume.h"
#include "nbdkit/clients.h"
#include "nbdkit/latency.h"
#include "nbdkit/settings.h"

/* Objects that requests use.  All of them are borrowed. */
typedef struct gd_nbdkit_served {
    gd_repo *repo;
    gd_volume *volume;
    gd_nbdkit_clients *clients;
    const gd_nbdkit_settings *settings;
    gd_nbdkit_latencies *latencies;
    /* Disconnects all clients of NBD, and returns how many connections ended.
     * Later requests of theirs that nbdkit had received have no effect: a
     * client repeats them, and a late one could overwrite a newer one. */
    gd_status (*disconnect)(uint64_t *count, gd_error *err);
} gd_nbdkit_served;

enum {
    GD_NBDKIT_LINE = 512, /* bytes of a request, with its line feed */
    GD_NBDKIT_ANSWER = 8192,
};

typedef struct gd_nbdkit_answer {
    char text[GD_NBDKIT_ANSWER];
    size_t length;
} gd_nbdkit_answer;

/* Serves the request in the line; length counts its bytes without the line
 * feed. */
void gd_nbdkit_request_run(const gd_nbdkit_served *served, const char *line,
                           size_t length, gd_nbdkit_answer *answer);
/* The answer to a line that is not a request. */
void gd_nbdkit_request_refuse(const char *why, gd_nbdkit_answer *answer);

#endif
