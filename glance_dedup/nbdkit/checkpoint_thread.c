/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checkpoint_thread.c - see checkpoint_thread.h.
 */
#include "nbdkit/checkpoint_thread.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "engine/repo/follow.h"
#include "nbdkit/log.h"
#include "nbdkit/monotonic.h"

enum {
    LOOK_MS = 1000,
    IDLE_MS = 5000,
    MAX_AGE_MS = 5 * 60 * 1000, /* of records that are not stored, when idle */
    SPACE_MS = 60 * 1000, /* without a write: the journal's space is given up */
    RENEW_MS = 30 * 1000,
    FOLLOW_MS = 5000,
    FIRST_PAUSE_MS = 2000, /* after a failure; each next is twice as long */
    MAX_PAUSE_MS = 60 * 1000,
    INDEX_SLOTS = 1 << 19, /* read into the index at a time */
};

/* Work that may fail, and is tried again. */
typedef struct attempt {
    const char *what; /* for the log */
    uint64_t not_before_ms;
    uint64_t pause_ms; /* 0: it did not fail */
} attempt;

struct gd_nbdkit_checkpointer {
    gd_repo *repo;
    gd_volume *volume;
    const gd_nbdkit_settings *settings;
    gd_nbdkit_handshakes *handshakes;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t awake;
    bool called, stopping; /* guarded by mutex */
    atomic_ullong written_ms;
    atomic_bool due;
    /* The thread's own: */
    attempt checkpoint, index;
    bool warned; /* see report_unmarked */
    uint64_t dirty_ms; /* since when the journal has had records; 0: not */
    uint64_t renew_ms;
    uint64_t follow_ms; /* when to scan the groups; see look */
};

static void
note_result(attempt *a, gd_status s, const gd_error *err)
{
    if (s == GD_OK) {
        if (a->pause_ms != 0) {
            gd_nbdkit_log("%s works again", a->what);
        }
        a->pause_ms = 0;
        return;
    }
    gd_nbdkit_log("%s failed, and is tried again: %s", a->what,
                  err->text);
    a->pause_ms = a->pause_ms == 0 ? FIRST_PAUSE_MS : 2 * a->pause_ms;
    if (a->pause_ms > MAX_PAUSE_MS) {
        a->pause_ms = MAX_PAUSE_MS;
    }
    a->not_before_ms = gd_nbdkit_now_ms() + a->pause_ms;
}

static gd_status
open_index(gd_repo *repo, const gd_nbdkit_settings *settings, gd_error *err)
{
    if (settings->index == GD_KV_BACKENDS) {
        return gd_repo_attach_filter(repo, settings->index_path,
                                     settings->index_bytes, err);
    }
    gd_kv_options options = {settings->index_keys,
                             settings->index_bytes};
    return gd_repo_attach_store(repo, settings->index, settings->index_path,
                                &options, err);
}

/* Opens the index, and reads into it some of the groups that it lacks, if no
 * other process of the host has done so.  Returns whether there are more. */
static bool
follow(gd_nbdkit_checkpointer *keeper)
{
    gd_repo *repo = keeper->repo;
    const gd_nbdkit_settings *settings = keeper->settings;
    gd_status s = GD_OK;
    gd_error err;
    gd_followed followed = {.more = false};
    if (repo->index == NULL) {
        s = open_index(repo, settings, &err);
    }
    if (s == GD_OK && gd_follow_is_due(repo, FOLLOW_MS)) {
        unsigned groups = INDEX_SLOTS / settings->params.group_slots;
        s = gd_follow(repo, groups > 64 ? 64 : groups, &followed, &err);
    }
    note_result(&keeper->index, s, &err);
    return followed.more;
}

/* Returns whether a checkpoint is to be made now: one that is due, or, while
 * nobody writes, one that is worth its cost, or of records that are old.  The
 * last write may be later than `now`.  A write is noted before its records are
 * there, so they are looked for first: the time of the last write is then that of
 * these records, or a later one. */
static bool
wants_checkpoint(gd_nbdkit_checkpointer *keeper, uint64_t now)
{
    gd_volume_info info;
    if (gd_volume_needs_checkpoint(keeper->volume)) {
        return true;
    }
    gd_volume_get_info(keeper->volume, &info);
    if (info.journal_records == 0) {
        keeper->dirty_ms = 0;
        return false;
    }
    if (keeper->dirty_ms == 0) {
        keeper->dirty_ms = now;
    }
    bool worth = now >= keeper->dirty_ms + MAX_AGE_MS ||
                 gd_volume_is_worth_checkpoint(keeper->volume);
    return worth && now >= atomic_load(&keeper->written_ms) + IDLE_MS;
}

static bool
is_read_only(const gd_nbdkit_checkpointer *keeper)
{
    gd_volume_info info;
    gd_volume_get_info(keeper->volume, &info);
    return info.is_read_only;
}

/* Reports once if a checkpoint, of any thread, could not mark blocks.  When the
 * older program is closed, the next one sets the feature, for ever. */
static void
report_unmarked(gd_nbdkit_checkpointer *keeper)
{
    if (!keeper->warned &&
        atomic_load(&keeper->repo->counters.unmarked) > 0) {
        keeper->warned = true;
        gd_nbdkit_log("volume %s: blocks that were to stay copies were stored "
                      "as ordinary ones, since an older program has the "
                      "repository open: stop the older programs on all hosts",
                      keeper->settings->volume);
    }
}

static void
make_checkpoint(gd_nbdkit_checkpointer *keeper)
{
    gd_error err;
    bool was_read_only = is_read_only(keeper);
    keeper->dirty_ms = 0;
    note_result(&keeper->checkpoint,
                gd_volume_checkpoint(keeper->volume, &err), &err);
    if (was_read_only && !is_read_only(keeper)) {
        gd_nbdkit_log("volume %s can be written to again, by clients "
                      "that connect from now on",
                      keeper->settings->volume);
    }
}

/* Does the work that is due; returns the milliseconds until the next round.  The
 * index comes first: the first checkpoint, of what another owner has left, may
 * be large, and would find no duplicates without it. */
static unsigned
look(gd_nbdkit_checkpointer *keeper)
{
    uint64_t now = gd_nbdkit_now_ms();
    bool more = false;
    atomic_store(&keeper->due, false);
    gd_nbdkit_handshakes_sweep(keeper->handshakes, now);
    if (keeper->settings->index_path != NULL && now >= keeper->follow_ms &&
        now >= keeper->index.not_before_ms) {
        more = follow(keeper);
        keeper->follow_ms = more ? now : now + FOLLOW_MS;
    }
    if (now >= keeper->checkpoint.not_before_ms &&
        wants_checkpoint(keeper, now)) {
        make_checkpoint(keeper);
    }
    report_unmarked(keeper);
    if (now >= atomic_load(&keeper->written_ms) + SPACE_MS) {
        (void)gd_volume_give_up_space(keeper->volume); /* until the next write */
    }
    if (now >= keeper->renew_ms) {
        gd_volume_renew(keeper->volume);
        keeper->renew_ms = now + RENEW_MS;
    }
    return more ? 1 : LOOK_MS;
}

/* Waits for a call, or so long.  False: the thread is to end. */
static bool
wait_for_call(gd_nbdkit_checkpointer *keeper, unsigned ms)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)(ms / 1000);
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    int rc = 0;
    pthread_mutex_lock(&keeper->mutex);
    while (!keeper->called && !keeper->stopping && rc == 0) {
        rc = pthread_cond_timedwait(&keeper->awake, &keeper->mutex, &until);
    }
    keeper->called = false;
    bool go_on = !keeper->stopping;
    pthread_mutex_unlock(&keeper->mutex);
    return go_on;
}

static void *
run(void *arg)
{
    gd_nbdkit_checkpointer *keeper = arg;
    while (wait_for_call(keeper, look(keeper))) {
    }
    return NULL;
}

gd_status
gd_nbdkit_checkpointer_start(gd_repo *repo, gd_volume *volume,
                             const gd_nbdkit_settings *settings,
                             gd_nbdkit_handshakes *handshakes,
                             gd_nbdkit_checkpointer **out, gd_error *err)
{
    gd_nbdkit_checkpointer *keeper = calloc(1, sizeof *keeper);
    if (keeper == NULL) {
        return gd_fail(err, GD_NOMEM, "no memory to serve the volume");
    }
    keeper->repo = repo;
    keeper->volume = volume;
    keeper->settings = settings;
    keeper->handshakes = handshakes;
    keeper->checkpoint.what = "the checkpoint";
    keeper->index.what = "opening the index, without which duplicates are "
                         "missed,";
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&keeper->awake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&keeper->mutex, NULL);
    if (is_read_only(keeper)) {
        gd_nbdkit_log("volume %s is served read-only, since the disk is "
                      "full: make room on it, and let clients connect "
                      "again", settings->volume);
    }
    int rc = pthread_create(&keeper->thread, NULL, run, keeper);
    if (rc != 0) {
        pthread_cond_destroy(&keeper->awake);
        pthread_mutex_destroy(&keeper->mutex);
        free(keeper);
        return gd_fail_errno(err, rc, "cannot start the keeper's thread");
    }
    *out = keeper;
    return GD_OK;
}

static void
call(gd_nbdkit_checkpointer *keeper, bool *flag)
{
    pthread_mutex_lock(&keeper->mutex);
    *flag = true;
    pthread_cond_signal(&keeper->awake);
    pthread_mutex_unlock(&keeper->mutex);
}

void
gd_nbdkit_checkpointer_writes(gd_nbdkit_checkpointer *keeper)
{
    atomic_store(&keeper->written_ms, gd_nbdkit_now_ms());
}

void
gd_nbdkit_checkpointer_wrote(gd_nbdkit_checkpointer *keeper)
{
    gd_nbdkit_checkpointer_writes(keeper);
    /* One of the writers calls, until the thread has looked. */
    if (!atomic_load(&keeper->due) &&
        gd_volume_needs_checkpoint(keeper->volume) &&
        !atomic_exchange(&keeper->due, true)) {
        call(keeper, &keeper->called);
    }
}

void
gd_nbdkit_checkpointer_stop(gd_nbdkit_checkpointer *keeper)
{
    gd_error err;
    call(keeper, &keeper->stopping);
    pthread_join(keeper->thread, NULL);
    if (gd_volume_final_checkpoint(keeper->volume, &err) != GD_OK) {
        gd_nbdkit_log("the last checkpoint failed; the journal keeps "
                      "what was written: %s",
                      err.text);
    }
    report_unmarked(keeper);
    pthread_cond_destroy(&keeper->awake);
    pthread_mutex_destroy(&keeper->mutex);
    free(keeper);
}
