/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log.c - see log.h.
 */
#include "nbdkit/log.h"

#include <nbdkit-plugin.h>

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/status.h"
#include "nbdkit/monotonic.h"

enum {
    WINDOW_MS = 60 * 1000,
    IN_WINDOW = 20,         /* sentences */
    AGAIN_MS = 3600 * 1000, /* then the same sentence is news again */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char last[2 * GD_ERROR_TEXT];
static uint64_t last_ms, window_ms;
static unsigned in_window;

void
gd_nbdkit_log(const char *format, ...)
{
    char text[sizeof last];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    pthread_mutex_lock(&mutex);
    uint64_t now = gd_nbdkit_now_ms();
    if (strcmp(text, last) != 0 || now - last_ms > AGAIN_MS) {
        if (now - window_ms > WINDOW_MS) {
            window_ms = now;
            in_window = 0;
        }
        strcpy(last, text);
        last_ms = now;
        if (++in_window <= IN_WINDOW) {
            nbdkit_error("%s", text);
        } else if (in_window == IN_WINDOW + 1) {
            nbdkit_error("there are more errors than this; they are not "
                         "logged for up to a minute");
        }
    }
    pthread_mutex_unlock(&mutex);
}
