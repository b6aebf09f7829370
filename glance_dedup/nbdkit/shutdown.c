/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shutdown.c - see shutdown.h.
 */
#include "nbdkit/shutdown.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { SIGNALS = 4 };

static const int signals[SIGNALS] = {SIGTERM, SIGINT, SIGQUIT, SIGHUP};
/* An eventfd; its counter has STOP, or one for each signal. */
static const uint64_t STOP = UINT64_C(1) << 32;
static int event = -1;
static struct sigaction before[SIGNALS]; /* nbdkit's handlers */
static pthread_t thread;
static void (*end_server)(void);

static void
tell(uint64_t what)
{
    int saved = errno;
    /* There is room for four thousand million signals. */
    (void)!write(event, &what, sizeof what);
    errno = saved;
}

static void
on_signal(int number)
{
    (void)number;
    tell(1);
}

static void *
wait_for_signal(void *unused)
{
    (void)unused;
    uint64_t told = 0;
    while (read(event, &told, sizeof told) < 0 && errno == EINTR) {
    }
    if (told % STOP != 0) {
        end_server();
        _exit(0);
    }
    return NULL;
}

static void
restore_signals(void)
{
    for (int i = 0; i < SIGNALS; i++) {
        sigaction(signals[i], &before[i], NULL);
    }
}

gd_status
gd_nbdkit_shutdown_watch(void (*end)(void), gd_error *err)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    end_server = end;
    event = eventfd(0, EFD_CLOEXEC);
    if (event < 0) {
        return gd_fail_errno(err, errno, "cannot wait for signals");
    }
    for (int i = 0; i < SIGNALS; i++) {
        sigaction(signals[i], NULL, &before[i]);
    }
    for (int i = 0; i < SIGNALS; i++) {
        sigaction(signals[i], &action, NULL);
    }
    int rc = pthread_create(&thread, NULL, wait_for_signal, NULL);
    if (rc != 0) {
        restore_signals();
        close(event);
        event = -1;
        return gd_fail_errno(err, rc, "cannot start a thread");
    }
    return GD_OK;
}

void
gd_nbdkit_shutdown_stop(void)
{
    if (event >= 0) {
        restore_signals();
        tell(STOP);
        pthread_join(thread, NULL);
        close(event);
        event = -1;
    }
}
