/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shutdown.h - ends the server though clients stay connected.
 *
 * After SIGTERM nbdkit waits until its last client has gone.  A hypervisor
 * stays connected as long as its guest runs, so the server would not end before
 * it is killed.  Meanwhile nbdkit answers requests with ESHUTDOWN, which a
 * hypervisor gives to its guest as an I/O error.  So here the signals are kept
 * from nbdkit.  A thread waits for them, and ends the process itself.
 */
#ifndef GD_NBDKIT_SHUTDOWN_H
#define GD_NBDKIT_SHUTDOWN_H

#include "engine/base/status.h"

/* From now on, when the process gets SIGTERM, SIGINT, SIGQUIT or SIGHUP, a thread
 * calls end and then ends the process, with status 0.  Requests and clients come
 * until then.  Once in a process. */
gd_status gd_nbdkit_shutdown_watch(void (*end)(void), gd_error *err);
/* Ends the thread.  Does not return if the thread is already at it. */
void gd_nbdkit_shutdown_stop(void);

#endif
