/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fetcher.c - see fetcher.h.
 */
#include "nbdkit/fetcher.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nbdkit/daemon.h"
#include "nbdkit/monotonic.h"

enum {
    MAX_COUNT = 64,               /* slices in a request */
    WAIT_S = 5,              /* for which the daemon is asked to wait */
    ANSWER_MS = 5000,        /* further time for its answer */
    PATIENCE_MS = 20 * 1000, /* while no daemon answers */
    PAUSE_MS = 250,          /* until it is asked again */
    WAITING = 64,            /* announcements that are not sent yet */
    TOLD = 16, /* slices that were announced last, and not once more: a slice
                * has several segments that are read one after the other */
    OK = 200,
    ON_THEIR_WAY = 202,
};

typedef struct span {
    gd_object object;
    uint32_t first, count;
} span;

struct gd_nbdkit_fetcher {
    const char *socket;
    char repository_id[2 * GD_ID_SIZE + 1];
    atomic_ullong missing_ms; /* since when no daemon answers; 0: one does */
    pthread_t thread;         /* announces */
    pthread_mutex_t mutex;    /* guards all that follows */
    pthread_cond_t more;
    bool stopping;
    span waiting[WAITING];
    size_t first, count; /* of the spans that wait */
    span told[TOLD];     /* of one slice each, a ring */
    size_t next_told;
};

static void
write_id(const uint8_t id[GD_ID_SIZE], char text[2 * GD_ID_SIZE + 1])
{
    for (size_t i = 0; i < GD_ID_SIZE; i++) {
        snprintf(text + 2 * i, 3, "%02x", (unsigned)id[i]);
    }
}

static gd_status
ask(const gd_nbdkit_fetcher *fetcher, const span *wanted, unsigned wait_s,
    gd_nbdkit_reply *reply, gd_error *err)
{
    char json[512], object[2 * GD_ID_SIZE + 1];
    write_id(wanted->object.id, object);
    snprintf(json, sizeof json,
             "{\"repository\": \"%s\", \"group\": %" PRIu32 ", \"object\": "
             "\"%s\", \"first\": %" PRIu32 ", \"count\": %" PRIu32
             ", \"wait\": %u}",
             fetcher->repository_id, wanted->object.group, object,
             wanted->first, wanted->count, wait_s);
    return gd_nbdkit_daemon_post(fetcher->socket, "/v1/slices", json,
                                 wait_s * 1000 + ANSWER_MS, reply, err);
}

/* ---- fetching ---- */

/* Waits for a while.  False: no daemon has answered for too long. */
static bool
may_ask_again(gd_nbdkit_fetcher *fetcher)
{
    const struct timespec pause = {.tv_nsec = PAUSE_MS * 1000 * 1000};
    unsigned long long now = gd_nbdkit_now_ms(), none = 0;
    if (!atomic_compare_exchange_strong(&fetcher->missing_ms, &none, now) &&
        now - none > PATIENCE_MS) {
        return false;
    }
    nanosleep(&pause, NULL);
    return true;
}

static gd_status
refuse(const gd_nbdkit_fetcher *fetcher, const char *why, gd_error *err)
{
    return gd_fail(err, GD_UNAVAILABLE,
                   "blocks that are in the object store cannot be read: "
                   "dedupd does not answer at %s (%s). Start it, or start "
                   "this server with --socket", fetcher->socket, why);
}

/* Returns the seconds that the daemon is requested to wait; 0: the reader has
 * waited long enough. */
static unsigned
seconds_left(const gd_object *object, unsigned long long began_ms)
{
    unsigned long long waited = gd_nbdkit_now_ms() - began_ms;
    if (object->patience_ms == 0) {
        return WAIT_S;
    }
    if (waited >= object->patience_ms) {
        return 0;
    }
    unsigned left = (unsigned)(object->patience_ms - waited + 999) / 1000;
    return left < WAIT_S ? left : WAIT_S;
}

static gd_status
bring(gd_nbdkit_fetcher *fetcher, const span *wanted, gd_error *err)
{
    unsigned long long began = gd_nbdkit_now_ms();
    unsigned wait_s;
    while ((wait_s = seconds_left(&wanted->object, began)) > 0) {
        gd_nbdkit_reply reply;
        gd_error why;
        gd_status s = ask(fetcher, wanted, wait_s, &reply, &why);
        if (s == GD_OK && reply.is_own) {
            atomic_store(&fetcher->missing_ms, 0);
            if (reply.code == OK) {
                return GD_OK;
            }
            if (reply.code != ON_THEIR_WAY) {
                return gd_fail(err, GD_UNAVAILABLE, "dedupd answered %d: %s",
                               reply.code, reply.reason);
            }
            continue;
        }
        if (s == GD_OK) {
            gd_fail(&why, GD_UNAVAILABLE, "it answered %d: %s", reply.code,
                    reply.reason);
        }
        if (!may_ask_again(fetcher)) {
            return refuse(fetcher, why.text, err);
        }
    }
    return gd_fail(err, GD_UNAVAILABLE, "dedupd did not bring slices within "
                   "%u ms", wanted->object.patience_ms);
}

static gd_status
fetch(void *arg, const gd_object *object, uint32_t first, uint32_t count,
      gd_error *err)
{
    gd_status s = GD_OK;
    while (s == GD_OK && count > 0) {
        span wanted = {*object, first, count < MAX_COUNT ? count : MAX_COUNT};
        s = bring(arg, &wanted, err);
        first += wanted.count;
        count -= wanted.count;
    }
    return s;
}

/* ---- announcing ---- */

static bool
is_told(const gd_nbdkit_fetcher *fetcher, const gd_object *object,
        uint32_t slice)
{
    for (size_t i = 0; i < TOLD; i++) {
        const span *told = &fetcher->told[i];
        if (told->count != 0 && told->first == slice &&
            memcmp(told->object.id, object->id, GD_ID_SIZE) == 0) {
            return true;
        }
    }
    return false;
}

/* Has slices sent that were not announced lately.  If there is no room, they are
 * fetched when they are read. */
static void
expect(void *arg, const gd_object *object, uint32_t first, uint32_t count)
{
    gd_nbdkit_fetcher *fetcher = arg;
    span *last = NULL;
    count = count < MAX_COUNT ? count : MAX_COUNT;
    pthread_mutex_lock(&fetcher->mutex);
    for (uint32_t slice = first; slice - first < count; slice++) {
        if (is_told(fetcher, object, slice)) {
            last = NULL;
            continue;
        }
        if (last == NULL) {
            if (fetcher->count == WAITING) {
                break;
            }
            last = &fetcher->waiting[(fetcher->first + fetcher->count) %
                                     WAITING];
            *last = (span){*object, slice, 0};
            fetcher->count++;
        }
        last->count++;
        fetcher->told[fetcher->next_told] = (span){*object, slice, 1};
        fetcher->next_told = (fetcher->next_told + 1) % TOLD;
    }
    pthread_cond_signal(&fetcher->more);
    pthread_mutex_unlock(&fetcher->mutex);
}

static void *
announce(void *arg)
{
    gd_nbdkit_fetcher *fetcher = arg;
    pthread_mutex_lock(&fetcher->mutex);
    while (!fetcher->stopping) {
        if (fetcher->count == 0) {
            pthread_cond_wait(&fetcher->more, &fetcher->mutex);
            continue;
        }
        span wanted = fetcher->waiting[fetcher->first];
        fetcher->first = (fetcher->first + 1) % WAITING;
        fetcher->count--;
        pthread_mutex_unlock(&fetcher->mutex);
        gd_nbdkit_reply reply;
        gd_error err;
        /* If this fails, the reader of the slices finds out. */
        (void)ask(fetcher, &wanted, 0, &reply, &err);
        pthread_mutex_lock(&fetcher->mutex);
    }
    pthread_mutex_unlock(&fetcher->mutex);
    return NULL;
}

/* ---- beginning and end ---- */

gd_status
gd_nbdkit_fetcher_start(const char *socket,
                        const uint8_t repository_id[GD_ID_SIZE],
                        gd_nbdkit_fetcher **out, gd_error *err)
{
    gd_nbdkit_fetcher *fetcher = calloc(1, sizeof *fetcher);
    if (fetcher == NULL) {
        return gd_fail(err, GD_NOMEM, "no memory to call dedupd");
    }
    fetcher->socket = socket;
    write_id(repository_id, fetcher->repository_id);
    pthread_mutex_init(&fetcher->mutex, NULL);
    pthread_cond_init(&fetcher->more, NULL);
    int rc = pthread_create(&fetcher->thread, NULL, announce, fetcher);
    if (rc != 0) {
        pthread_cond_destroy(&fetcher->more);
        pthread_mutex_destroy(&fetcher->mutex);
        free(fetcher);
        return gd_fail_errno(err, rc, "cannot start the thread that calls "
                                      "dedupd");
    }
    *out = fetcher;
    return GD_OK;
}

void
gd_nbdkit_fetcher_stop(gd_nbdkit_fetcher *fetcher)
{
    pthread_mutex_lock(&fetcher->mutex);
    fetcher->stopping = true;
    pthread_cond_signal(&fetcher->more);
    pthread_mutex_unlock(&fetcher->mutex);
    pthread_join(fetcher->thread, NULL);
    pthread_cond_destroy(&fetcher->more);
    pthread_mutex_destroy(&fetcher->mutex);
    free(fetcher);
}

gd_slice_source
gd_nbdkit_fetcher_source(gd_nbdkit_fetcher *fetcher)
{
    return (gd_slice_source){fetcher, fetch, expect};
}
