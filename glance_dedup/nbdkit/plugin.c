/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plugin.c - nbdkit's plugin that serves one volume as a disk.
 *
 * nbdkit speaks the protocol, with TLS; this file maps its calls to those of
 * volume.h.  One process serves one volume, on any number of connections and
 * threads at once, so clients may open several connections: a flush on one
 * makes the writes on all of them durable.
 *
 * nbdkit may fork after the settings are complete.  A repository's handle
 * belongs to its process, so everything is opened after that.
 *
 * Errors: nbdkit sends EINVAL for an errno that the protocol does not have.
 * NBD_ENOSPC reaches the guest's hypervisor, which can stop the guest until
 * there is room.  A volume that takes no more writes (V3) answers them with
 * EIO; reads go on.
 */
#define NBDKIT_API_VERSION 2
#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL

#include <nbdkit-plugin.h>

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "engine/files/slices.h"
#include "engine/repo/segcache.h"
#include "engine/volume/volume.h"
#include "nbdkit/checkpoint_thread.h"
#include "nbdkit/clients.h"
#include "nbdkit/control.h"
#include "nbdkit/fetcher.h"
#include "nbdkit/handshakes.h"
#include "nbdkit/latency.h"
#include "nbdkit/log.h"
#include "nbdkit/monotonic.h"
#include "nbdkit/settings.h"
#include "nbdkit/shutdown.h"

enum {
    MAX_BYTES = 32 << 20,  /* of a request, as clients are informed */
    CACHE_PIECE = 1 << 20,  /* read at a time to fill caches */
    MAX_WAIT_SECONDS = 5,   /* for requests, when clients are disconnected */
    DRAIN_MS = 30 * 1000,   /* for the last requests, when the server ends */
};

static gd_nbdkit_settings settings;

/* The served volume, from before the first request to after the last.  Requests
 * hold the lock shared, and the end of the server holds it exclusively.  Those
 * that begin when it is coming would keep it from the lock. */
static pthread_rwlock_t lock =
    PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;
/* Of the connections whose requests have an effect; guarded by the lock. */
static atomic_uintptr_t generation = 1;
static atomic_bool ending;
static gd_nbdkit_fetcher *fetcher;
static gd_slices *slices; /* NULL: there can be no cold groups, or they cannot
                           * be read */
static gd_repo *repo;
static gd_volume *volume;
static gd_nbdkit_checkpointer *keeper;
static gd_nbdkit_control *control;
static gd_nbdkit_clients clients = {.mutex = PTHREAD_MUTEX_INITIALIZER};
static gd_nbdkit_latencies latencies;
static gd_nbdkit_handshakes handshakes = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* ---- errors ---- */

static int
errno_of(gd_status s)
{
    switch (s) {
    case GD_NOSPACE:
        return ENOSPC;
    case GD_NOMEM:
        return ENOMEM;
    case GD_INVALID:
        return EINVAL;
    default:
        return EIO;
    }
}

/* Return values of a callback. */
static int
result_of(gd_status s, const gd_error *err)
{
    if (s == GD_OK) {
        return 0;
    }
    gd_nbdkit_log("%s", err->text);
    nbdkit_set_error(errno_of(s));
    return -1;
}

/* ---- settings ---- */

static void
plugin_load(void)
{
    gd_nbdkit_settings_init(&settings);
}

static int
plugin_config(const char *key, const char *value)
{
    gd_error err;
    char *path = NULL;
    if (strcmp(key, "repository") == 0) {
        /* nbdkit changes its directory if it goes into the background. */
        path = nbdkit_realpath(value);
        if (path == NULL) {
            return -1;
        }
        value = path;
    }
    int rc = result_of(gd_nbdkit_settings_set(&settings, key, value, &err),
                       &err);
    free(path);
    return rc;
}

static int
plugin_config_complete(void)
{
    gd_error err;
    return result_of(gd_nbdkit_settings_check(&settings, &err), &err);
}

/* ---- beginning and end ---- */

static gd_status
open_slices(gd_error *err)
{
    char path[PATH_MAX];
    if (settings.dedupd_socket == NULL) {
        return GD_OK;
    }
    int length = snprintf(path, sizeof path, "%s/slices", settings.repository);
    if (length < 0 || (size_t)length >= sizeof path) {
        return gd_fail(err, GD_INVALID, "the repository's path is too long");
    }
    gd_status s =
        gd_nbdkit_fetcher_start(settings.dedupd_socket,
                                settings.params.repository_id, &fetcher, err);
    if (s == GD_OK) {
        gd_slice_source source = gd_nbdkit_fetcher_source(fetcher);
        s = gd_slices_open(gd_env_posix(), path, settings.slice_memory, &source,
                           &slices, err);
        settings.params.slices = slices;
    }
    return s;
}

static gd_status
disconnect_clients(uint64_t *count, gd_error *err)
{
    struct timespec until;
    gd_nbdkit_sockets sockets;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += MAX_WAIT_SECONDS;
    if (pthread_rwlock_timedwrlock(&lock, &until) != 0) {
        return gd_fail(err, GD_BUSY,
                       "clients stay connected: a request has not ended in "
                       "%d seconds. Try again", MAX_WAIT_SECONDS);
    }
    gd_status s = gd_nbdkit_clients_find(&sockets, err);
    if (s == GD_OK) {
        generation++;
    }
    gd_nbdkit_clients_release(&sockets, s == GD_OK);
    pthread_rwlock_unlock(&lock);
    *count = sockets.count;
    return s;
}

/* The commands need the socket, and the clients of NBD do not. */
static gd_status
start_control(gd_error *err)
{
    gd_status s = gd_nbdkit_control_start(
        &(gd_nbdkit_served){repo, volume, &clients, &settings, &latencies,
                            disconnect_clients},
        &control, err);
    if (s == GD_NOSPACE) {
        gd_nbdkit_log("commands cannot reach this server: %s. Make room "
                      "on the disk, and start it again", err->text);
        s = GD_OK;
    }
    return s;
}

static gd_status
open_volume(gd_error *err)
{
    GD_TRY(open_slices(err));
    GD_TRY(gd_repo_open(gd_env_posix(), settings.repository,
                        &settings.params, false, &repo, err));
    gd_segcache_set_budget(repo->segcache, settings.segment_cache);
    GD_TRY(gd_nbdkit_settings_compare(&settings, repo, err));
    GD_TRY(gd_volume_open(repo, settings.volume, !settings.no_dedup, &volume,
                          err));
    GD_TRY(gd_nbdkit_checkpointer_start(repo, volume, &settings, &handshakes,
                                        &keeper, err));
    return start_control(err);
}

static void
close_volume(void)
{
    if (control != NULL) {
        gd_nbdkit_control_stop(control);
    }
    if (keeper != NULL) {
        gd_nbdkit_checkpointer_stop(keeper);
    }
    if (volume != NULL) {
        gd_volume_close(volume);
    }
    if (repo != NULL) {
        gd_repo_close(repo);
    }
    gd_slices_close(slices);
    if (fetcher != NULL) {
        gd_nbdkit_fetcher_stop(fetcher);
    }
    fetcher = NULL;
    slices = NULL;
    control = NULL;
    keeper = NULL;
    volume = NULL;
    repo = NULL;
}

/* Waits for the requests that are being worked on.  Later ones wait for ever,
 * and are never answered: a client that is disconnected can connect again, but
 * an error would reach its guest. */
static void
end_volume(void)
{
    const struct timespec step = {.tv_nsec = 10 * 1000 * 1000};
    uint64_t deadline = gd_nbdkit_now_ms() + DRAIN_MS;
    atomic_store(&ending, true);
    while (pthread_rwlock_trywrlock(&lock) != 0) {
        if (gd_nbdkit_now_ms() > deadline) {
            gd_nbdkit_log("a request does not end, so there is no last "
                          "checkpoint; the journal keeps what was "
                          "written");
            return;
        }
        nanosleep(&step, NULL);
    }
    close_volume();
}

static int
plugin_after_fork(void)
{
    gd_error err;
    gd_status s = open_volume(&err);
    if (s == GD_OK) {
        s = gd_nbdkit_shutdown_watch(end_volume, &err);
    }
    if (s != GD_OK) {
        close_volume();
    }
    return result_of(s, &err);
}

/* nbdkit has no more clients. */
static void
plugin_cleanup(void)
{
    gd_nbdkit_shutdown_stop();
    close_volume();
}

static void
plugin_unload(void)
{
    gd_nbdkit_settings_release(&settings);
}

/* ---- connections ---- */

/* Only connections over TCP have a limit.  A process that may write to a Unix
 * socket may change the volume, too. */
static int
plugin_preconnect(int readonly)
{
    (void)readonly;
    struct sockaddr_storage peer;
    socklen_t length = sizeof peer;
    if (nbdkit_peer_name((struct sockaddr *)&peer, &length) != 0) {
        return -1;
    }
    if (peer.ss_family == AF_UNIX) {
        return 0;
    }
    if (gd_nbdkit_handshakes_begin(&handshakes, (struct sockaddr *)&peer,
                                   length, gd_nbdkit_now_ms()) != 0) {
        gd_nbdkit_log("a client is refused: %s", strerror(errno));
        return -1;
    }
    return 0;
}

static void *
plugin_open(int readonly)
{
    (void)readonly;
    gd_nbdkit_handshakes_end(&handshakes);
    const char *name = nbdkit_export_name();
    if (name == NULL) {
        return NULL;
    }
    if (name[0] != '\0' && strcmp(name, settings.volume) != 0) {
        gd_nbdkit_log("a client asked for the export '%.64s'; this "
                      "server has the volume %s",
                      name, settings.volume);
        return NULL;
    }
    if (!gd_nbdkit_clients_enter(&clients)) {
        gd_nbdkit_log("a client is refused: %d connections to the volume "
                      "%s are the most",
                      GD_NBDKIT_MAX_CLIENTS, settings.volume);
        return NULL;
    }
    return (void *)atomic_load(&generation);
}

static void
plugin_close(void *handle)
{
    (void)handle;
    gd_nbdkit_clients_leave(&clients);
}

static int
plugin_list_exports(int readonly, int is_tls, struct nbdkit_exports *exports)
{
    (void)readonly;
    (void)is_tls;
    return nbdkit_add_export(exports, settings.volume, NULL);
}

static const char *
plugin_default_export(int readonly, int is_tls)
{
    (void)readonly;
    (void)is_tls;
    return settings.volume;
}

/* Each use of the volume is between these two. */
static void
begin_request(void)
{
    while (atomic_load(&ending)) {
        pause();
    }
    pthread_rwlock_rdlock(&lock);
}

static int
end_request(gd_status s, const gd_error *err)
{
    pthread_rwlock_unlock(&lock);
    return result_of(s, err);
}

/* Begins a request of a connection.  False, after the connection was ended by
 * disconnect_clients: nobody gets the answer. */
static bool
begin_request_of(const void *handle)
{
    begin_request();
    bool is_connected = (uintptr_t)handle == atomic_load(&generation);
    if (!is_connected) {
        pthread_rwlock_unlock(&lock);
        nbdkit_set_error(ESHUTDOWN);
    }
    return is_connected;
}

static int64_t
plugin_get_size(void *handle)
{
    (void)handle;
    gd_volume_info info;
    begin_request();
    gd_volume_get_info(volume, &info);
    end_request(GD_OK, NULL);
    return (int64_t)info.head.size;
}

static int
plugin_block_size(void *handle, uint32_t *minimum, uint32_t *preferred,
                  uint32_t *maximum)
{
    (void)handle;
    *minimum = 1;
    *preferred = settings.params.block_size;
    *maximum = MAX_BYTES;
    return 0;
}

static int
yes(void *handle)
{
    (void)handle;
    return 1;
}

static int
no(void *handle)
{
    (void)handle;
    return 0;
}

/* A client keeps the value that it got when it connected. */
static int
is_writable(void *handle)
{
    (void)handle;
    gd_volume_info info;
    begin_request();
    gd_volume_get_info(volume, &info);
    end_request(GD_OK, NULL);
    return !info.is_read_only;
}

static int
plugin_can_fua(void *handle)
{
    (void)handle;
    return NBDKIT_FUA_NATIVE;
}

static int
plugin_can_cache(void *handle)
{
    (void)handle;
    return NBDKIT_CACHE_NATIVE;
}

/* ---- requests ---- */

/* Counts the time of a request, with its waits for locks and checkpoints. */
static int
count_time(gd_nbdkit_latency *latency, uint64_t began_ns, int result)
{
    gd_nbdkit_latency_add(latency, gd_nbdkit_now_ns() - began_ns);
    return result;
}

static int
plugin_pread(void *handle, void *buf, uint32_t count, uint64_t offset,
             uint32_t flags)
{
    (void)flags;
    gd_error err;
    uint64_t began_ns = gd_nbdkit_now_ns();
    if (!begin_request_of(handle)) {
        return -1;
    }
    gd_status s = gd_volume_read(volume, buf, count, offset, &err);
    return count_time(&latencies.reads, began_ns, end_request(s, &err));
}

/* Each request that changes bytes is between these two. */
static bool
begin_change(const void *handle)
{
    bool is_connected = begin_request_of(handle);
    if (is_connected) {
        gd_nbdkit_checkpointer_writes(keeper);
    }
    return is_connected;
}

static int
end_change(gd_status s, uint32_t flags, gd_error *err)
{
    if (s == GD_OK && (flags & NBDKIT_FLAG_FUA) != 0) {
        s = gd_volume_flush(volume, err);
    }
    gd_nbdkit_checkpointer_wrote(keeper);
    return end_request(s, err);
}

static int
plugin_pwrite(void *handle, const void *buf, uint32_t count, uint64_t offset,
              uint32_t flags)
{
    gd_error err;
    uint64_t began_ns = gd_nbdkit_now_ns();
    if (!begin_change(handle)) {
        return -1;
    }
    gd_status s = gd_volume_write(volume, buf, count, offset, &err);
    return count_time(&latencies.writes, began_ns,
                      end_change(s, flags, &err));
}

/* Serves trim, too.  It costs the same for any length, so it is fast; no space
 * is reserved for zeros that are to be no hole, as nothing is overwritten in
 * place here. */
static int
plugin_zero(void *handle, uint32_t count, uint64_t offset, uint32_t flags)
{
    gd_error err;
    if (!begin_change(handle)) {
        return -1;
    }
    gd_status s = gd_volume_zero(volume, count, offset, &err);
    return end_change(s, flags, &err);
}

static int
plugin_flush(void *handle, uint32_t flags)
{
    (void)flags;
    gd_error err;
    uint64_t began_ns = gd_nbdkit_now_ns();
    if (!begin_request_of(handle)) {
        return -1;
    }
    gd_status s = gd_volume_flush(volume, &err);
    return count_time(&latencies.flushes, began_ns, end_request(s, &err));
}

/* Reads the range, so that the caches have it.  The client is likely to write a
 * copy of it. */
static int
plugin_cache(void *handle, uint32_t count, uint64_t offset, uint32_t flags)
{
    (void)flags;
    gd_error err;
    gd_status s = GD_OK;
    if (!begin_request_of(handle)) {
        return -1;
    }
    uint32_t piece = count < CACHE_PIECE ? count : CACHE_PIECE;
    uint8_t *buffer = malloc(piece == 0 ? 1 : piece);
    if (buffer == NULL) {
        s = gd_fail(&err, GD_NOMEM, "no memory to read ahead");
    }
    while (s == GD_OK && count > 0) {
        piece = count < CACHE_PIECE ? count : CACHE_PIECE;
        s = gd_volume_read(volume, buffer, piece, offset, &err);
        if (s == GD_OK) {
            gd_volume_prefetch(volume, piece, offset);
        }
        count -= piece;
        offset += piece;
    }
    free(buffer);
    return end_request(s, &err);
}

typedef struct extents_visit {
    struct nbdkit_extents *extents;
    bool one;
    bool failed;
} extents_visit;

static bool
visit_extent(void *arg, uint64_t offset, uint64_t length, bool zeros)
{
    extents_visit *visit = arg;
    uint32_t type = zeros ? NBDKIT_EXTENT_HOLE | NBDKIT_EXTENT_ZERO : 0;
    visit->failed =
        nbdkit_add_extent(visit->extents, offset, length, type) < 0;
    return !visit->failed && !visit->one;
}

static int
plugin_extents(void *handle, uint32_t count, uint64_t offset, uint32_t flags,
               struct nbdkit_extents *extents)
{
    extents_visit visit = {.extents = extents,
                           .one = (flags & NBDKIT_FLAG_REQ_ONE) != 0};
    gd_error err;
    if (!begin_request_of(handle)) {
        return -1;
    }
    gd_status s = gd_volume_extents(volume, count, offset, visit_extent,
                                    &visit, &err);
    int rc = end_request(s, &err);
    return visit.failed ? -1 : rc;
}

static struct nbdkit_plugin plugin = {
    .name = "glance-dedup",
    .longname = "a volume of a glance-dedup repository",
    .description = "Serves a volume whose blocks are shared with images.\n"
                   "'glance-dedup volume serve' starts it.",
    .config_help = GD_NBDKIT_KEYS,
    .load = plugin_load,
    .unload = plugin_unload,
    .config = plugin_config,
    .config_complete = plugin_config_complete,
    .after_fork = plugin_after_fork,
    .cleanup = plugin_cleanup,
    .list_exports = plugin_list_exports,
    .default_export = plugin_default_export,
    .preconnect = plugin_preconnect,
    .open = plugin_open,
    .close = plugin_close,
    .get_size = plugin_get_size,
    .block_size = plugin_block_size,
    .is_rotational = no,
    .can_write = is_writable,
    .can_flush = is_writable,
    .can_trim = yes,
    .can_zero = yes,
    .can_fast_zero = yes,
    .can_extents = yes,
    .can_multi_conn = yes,
    .can_fua = plugin_can_fua,
    .can_cache = plugin_can_cache,
    .pread = plugin_pread,
    .pwrite = plugin_pwrite,
    .flush = plugin_flush,
    .trim = plugin_zero,
    .zero = plugin_zero,
    .extents = plugin_extents,
    .cache = plugin_cache,
};

NBDKIT_REGISTER_PLUGIN(plugin)
