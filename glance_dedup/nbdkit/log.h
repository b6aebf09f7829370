/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log.h - errors, in nbdkit's log.
 *
 * A guest may repeat a request that fails a thousand times a second, so a
 * sentence is logged once, and no more than a few sentences a minute.
 */
#ifndef GD_NBDKIT_LOG_H
#define GD_NBDKIT_LOG_H

/* Logs a sentence, unless it is the last one again, or there were too many.
 * Thread-safe. */
void gd_nbdkit_log(const char *format, ...)
    __attribute__((format(printf, 1, 2)));

#endif
