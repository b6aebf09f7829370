/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault_env.c - see fault_env.h.
 */
#include "tests/c/support/fault_env.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_PIECES = 1024 }; /* Linux's IOV_MAX */

/* The table is const for the engine; the fields behind it are ours. */
static fault_env *
self(const gd_env *env)
{
    return (fault_env *)(uintptr_t)env;
}

/* REQUIRES: the mutex. */
static int
apply_rule(fault_env *f, fault_call call)
{
    const fault_rule *rule = &f->rules[call];
    uint64_t number = ++f->calls[call];
    bool due = rule->nth != 0 && (number == rule->nth ||
                                  (rule->forever && number > rule->nth));
    return due ? -rule->sys_errno : 0;
}

/* REQUIRES: the mutex. */
static void
note_call(fault_env *f, fault_call call)
{
    bool changes = call == FAULT_PWRITEV || call == FAULT_FSYNC ||
                   call == FAULT_FDATASYNC || call == FAULT_FTRUNCATE ||
                   call == FAULT_FALLOCATE || call == FAULT_PUNCH ||
                   call == FAULT_LINKAT || call == FAULT_RENAMEAT ||
                   call == FAULT_UNLINKAT || call == FAULT_RMDIRAT ||
                   call == FAULT_MKDIRAT || call == FAULT_FCHMOD;
    bool again = f->traced > 0 && f->trace[f->traced - 1] == call;
    if (f->tracing && changes && !again && f->traced < FAULT_TRACE) {
        f->trace[f->traced++] = call;
    }
}

/* Returns 0, or the -errno that the call has to fail with. */
static int
enter(fault_env *f, fault_call call)
{
    pthread_mutex_lock(&f->mutex);
    int rc = apply_rule(f, call);
    int any = call == FAULT_ALLOC ? 0 : apply_rule(f, FAULT_ANY);
    rc = rc != 0 ? rc : any;
    if (rc != 0) {
        f->faults++;
    } else {
        note_call(f, call);
    }
    pthread_mutex_unlock(&f->mutex);
    return rc;
}

/* Does the same for calls that a signal may interrupt. */
static int
enter_interruptible(fault_env *f, fault_call call)
{
    pthread_mutex_lock(&f->mutex);
    bool interrupted =
        f->interrupt != 0 && ++f->interruptible % f->interrupt == 0;
    pthread_mutex_unlock(&f->mutex);
    return interrupted ? -EINTR : enter(f, call);
}

static size_t
shortened(fault_env *f, size_t len)
{
    pthread_mutex_lock(&f->mutex);
    size_t most = f->shorten;
    pthread_mutex_unlock(&f->mutex);
    return most != 0 && len > most ? most : len;
}

static void
add(fault_env *f, int64_t *account, int change)
{
    pthread_mutex_lock(&f->mutex);
    *account += change;
    pthread_mutex_unlock(&f->mutex);
}

static int
fault_openat(const gd_env *env, int dir, const char *path, int flags,
             mode_t mode)
{
    fault_env *f = self(env);
    int rc = enter_interruptible(f, FAULT_OPENAT);
    if (rc != 0) {
        return rc;
    }
    bool direct = f->shared && (flags & O_DIRECT) != 0;
    flags = direct ? flags & ~O_DIRECT : flags;
    int fd = f->real->openat(f->real, dir, path, flags, mode);
    if (fd >= 0 && fd < FAULT_FDS) {
        pthread_mutex_lock(&f->mutex);
        f->open[fd] = true;
        f->direct[fd] = direct;
        f->descriptors++;
        if (f->shadow != NULL) {
            shadow_opened(f->shadow, fd, path, flags);
        }
        pthread_mutex_unlock(&f->mutex);
    }
    return fd;
}

/* Removes it from the list before it is closed: another thread may get the
 * number. */
static int
fault_close(const gd_env *env, int fd)
{
    fault_env *f = self(env);
    int fault = enter(f, FAULT_CLOSE);
    if (fd < FAULT_FDS) {
        pthread_mutex_lock(&f->mutex);
        if (fd >= 0 && f->open[fd]) {
            f->open[fd] = false;
            f->descriptors--;
        } else {
            f->bad_closes++;
        }
        pthread_mutex_unlock(&f->mutex);
    }
    int rc = f->real->close(f->real, fd);
    return fault != 0 ? fault : rc;
}

enum { PAGE = 4096 };

static ssize_t
fault_pread(const gd_env *env, int fd, void *buf, size_t len, uint64_t offset)
{
    fault_env *f = self(env);
    int rc = enter_interruptible(f, FAULT_PREAD);
    if (rc != 0) {
        return rc;
    }
    pthread_mutex_lock(&f->mutex);
    bool direct = fd < FAULT_FDS && f->direct[fd];
    uint64_t from = direct ? 0 : f->stale_from;
    pthread_mutex_unlock(&f->mutex);
    if (direct && (offset | len | (uintptr_t)buf) % PAGE != 0) {
        return -EINVAL;
    }
    ssize_t n = f->real->pread(f->real, fd, buf, shortened(f, len), offset);
    if (from != 0 && n > 0 && offset + (uint64_t)n > from) {
        uint64_t kept = from > offset ? from - offset : 0;
        memset((uint8_t *)buf + kept, 0, (size_t)n - kept);
    }
    return n;
}

/* Cuts a copy of the pieces down to most bytes; returns the number left. */
static int
cut_pieces(struct iovec *to, const struct iovec *from, int count, size_t most)
{
    int used = 0;
    while (used < count && most > 0) {
        to[used] = from[used];
        if (to[used].iov_len > most) {
            to[used].iov_len = most;
        }
        most -= to[used].iov_len;
        used++;
    }
    return used;
}

static void
note_written(fault_env *f, int fd, uint64_t offset, uint64_t length)
{
    pthread_mutex_lock(&f->mutex);
    if (f->shadow != NULL) {
        shadow_written(f->shadow, fd, offset, length);
    }
    pthread_mutex_unlock(&f->mutex);
}

/* rc is the result of a sync. */
static int
note_synced(fault_env *f, int fd, int rc)
{
    char own[32], path[512];
    ssize_t length = 0;
    pthread_mutex_lock(&f->mutex);
    if (f->shadow != NULL) {
        shadow_synced(f->shadow, fd, rc >= 0);
    }
    if (rc < 0) {
        snprintf(own, sizeof own, "/proc/self/fd/%d", fd);
        length = readlink(own, path, sizeof path - 1);
        path[length > 0 ? length : 0] = '\0';
        size_t most = sizeof f->failed_sync - 1;
        const char *from =
            length > (ssize_t)most ? path + (size_t)length - most : path;
        strcpy(f->failed_sync, from);
    }
    pthread_mutex_unlock(&f->mutex);
    return rc;
}

static ssize_t
fault_pwritev(const gd_env *env, int fd, const struct iovec *iov, int count,
              uint64_t offset)
{
    fault_env *f = self(env);
    struct iovec pieces[MAX_PIECES];
    int rc = enter_interruptible(f, FAULT_PWRITEV);
    if (rc != 0) {
        return rc;
    }
    if (count < 0 || count > MAX_PIECES) {
        return -EINVAL;
    }
    int used = cut_pieces(pieces, iov, count, shortened(f, SIZE_MAX));
    ssize_t written = f->real->pwritev(f->real, fd, pieces, used, offset);
    if (written > 0) {
        note_written(f, fd, offset, (uint64_t)written);
    }
    return written;
}

static int
fault_fsync(const gd_env *env, int fd)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_FSYNC);
    return note_synced(f, fd, rc != 0 ? rc : f->real->fsync(f->real, fd));
}

static int
fault_fdatasync(const gd_env *env, int fd)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_FDATASYNC);
    return note_synced(f, fd, rc != 0 ? rc : f->real->fdatasync(f->real, fd));
}

static int
fault_ftruncate(const gd_env *env, int fd, uint64_t length)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_FTRUNCATE);
    return rc != 0 ? rc : f->real->ftruncate(f->real, fd, length);
}

static int
fault_fallocate(const gd_env *env, int fd, uint64_t offset, uint64_t length)
{
    fault_env *f = self(env);
    int rc = enter_interruptible(f, FAULT_FALLOCATE);
    return rc != 0 ? rc : f->real->fallocate(f->real, fd, offset, length);
}

static int
fault_linkat(const gd_env *env, int dir, const char *from, const char *to)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_LINKAT);
    return rc != 0 ? rc : f->real->linkat(f->real, dir, from, to);
}

static int
fault_renameat(const gd_env *env, int dir, const char *from, const char *to)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_RENAMEAT);
    return rc != 0 ? rc : f->real->renameat(f->real, dir, from, to);
}

static int
fault_unlinkat(const gd_env *env, int dir, const char *path)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_UNLINKAT);
    return rc != 0 ? rc : f->real->unlinkat(f->real, dir, path);
}

static int
fault_rmdirat(const gd_env *env, int dir, const char *path)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_RMDIRAT);
    return rc != 0 ? rc : f->real->rmdirat(f->real, dir, path);
}

static int
fault_mkdirat(const gd_env *env, int dir, const char *path, mode_t mode)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_MKDIRAT);
    return rc != 0 ? rc : f->real->mkdirat(f->real, dir, path, mode);
}

static int
fault_punch(const gd_env *env, int fd, uint64_t offset, uint64_t length)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_PUNCH);
    if (rc == 0) {
        rc = f->real->punch(f->real, fd, offset, length);
    }
    if (rc == 0 && f->shadow != NULL) {
        pthread_mutex_lock(&f->mutex);
        shadow_punched(f->shadow, fd, offset, length);
        pthread_mutex_unlock(&f->mutex);
    }
    return rc;
}

static int
fault_fchmod(const gd_env *env, int fd, mode_t mode)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_FCHMOD);
    return rc != 0 ? rc : f->real->fchmod(f->real, fd, mode);
}

static int
fault_renew(const gd_env *env, int dir, const char *path)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_RENEW);
    return rc != 0 ? rc : f->real->renew(f->real, dir, path);
}

static int
fault_is_shared(const gd_env *env, int dir)
{
    fault_env *f = self(env);
    return f->shared ? 1 : f->real->is_shared(f->real, dir);
}

static int
fault_free_space(const gd_env *env, int fd, gd_space *space)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_FREE_SPACE);
    return rc != 0 ? rc : f->real->free_space(f->real, fd, space);
}

static int
fault_fstat(const gd_env *env, int fd, struct stat *st)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_FSTAT);
    return rc != 0 ? rc : f->real->fstat(f->real, fd, st);
}

static int
fault_fstatat(const gd_env *env, int dir, const char *path, struct stat *st)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_FSTATAT);
    return rc != 0 ? rc : f->real->fstatat(f->real, dir, path, st);
}

static int
fault_lock(const gd_env *env, int fd, uint64_t byte, short type)
{
    fault_env *f = self(env);
    int fault = enter(f, FAULT_LOCK);
    if (fault != 0 && type != F_UNLCK) {
        return fault;
    }
    int rc = f->real->lock(f->real, fd, byte, type);
    return fault != 0 ? fault : rc;
}

static int
fault_is_locked(const gd_env *env, int fd, uint64_t byte)
{
    fault_env *f = self(env);
    int fault = enter(f, FAULT_LOCK);
    return fault != 0 ? fault : f->real->is_locked(f->real, fd, byte);
}

static int
fault_list(const gd_env *env, int dir, const char *path,
           void (*visit)(void *arg, const char *name), void *arg)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_LIST);
    return rc != 0 ? rc : f->real->list(f->real, dir, path, visit, arg);
}

static void
fault_start_writeback(const gd_env *env, int fd, uint64_t offset,
                      uint64_t length)
{
    const gd_env *real = self(env)->real;
    real->start_writeback(real, fd, offset, length);
}

static void
fault_start_readahead(const gd_env *env, int fd, uint64_t offset,
                      uint64_t length)
{
    const gd_env *real = self(env)->real;
    real->start_readahead(real, fd, offset, length);
}

static void
fault_drop_cache(const gd_env *env, int fd, uint64_t offset, uint64_t length)
{
    const gd_env *real = self(env)->real;
    real->drop_cache(real, fd, offset, length);
}

static void *
fault_mmap_shared(const gd_env *env, int fd, size_t length)
{
    fault_env *f = self(env);
    if (enter(f, FAULT_MMAP) != 0) {
        return NULL;
    }
    void *address = f->real->mmap_shared(f->real, fd, length);
    if (address != NULL) {
        add(f, &f->mappings, 1);
    }
    return address;
}

static void
fault_use_large_pages(const gd_env *env, void *address, size_t length)
{
    const gd_env *real = self(env)->real;
    real->use_large_pages(real, address, length);
}

static int
fault_munmap(const gd_env *env, void *address, size_t length)
{
    fault_env *f = self(env);
    int fault = enter(f, FAULT_MUNMAP);
    int rc = f->real->munmap(f->real, address, length);
    if (rc == 0) {
        add(f, &f->mappings, -1);
    }
    return fault != 0 ? fault : rc;
}

static int
fault_random(const gd_env *env, void *buf, size_t len)
{
    fault_env *f = self(env);
    int rc = enter(f, FAULT_RANDOM);
    return rc != 0 ? rc : f->real->random(f->real, buf, len);
}

static pid_t
fault_getpid(const gd_env *env)
{
    const gd_env *real = self(env)->real;
    return real->getpid(real);
}

static uint64_t
fault_descriptor_limit(const gd_env *env)
{
    const gd_env *real = self(env)->real;
    return real->descriptor_limit(real);
}

static uid_t
fault_geteuid(const gd_env *env)
{
    const gd_env *real = self(env)->real;
    return real->geteuid(real);
}

static int64_t
fault_now(const gd_env *env)
{
    const gd_env *real = self(env)->real;
    return real->now(real);
}

static int64_t
fault_monotonic_ns(const gd_env *env)
{
    const gd_env *real = self(env)->real;
    int64_t stopped = self(env)->monotonic_ns;
    return stopped != 0 ? stopped : real->monotonic_ns(real);
}

static int64_t
fault_thread_ns(const gd_env *env)
{
    const gd_env *real = self(env)->real;
    return real->thread_ns(real);
}

static void
fault_sleep_ms(const gd_env *env, unsigned ms)
{
    const gd_env *real = self(env)->real;
    real->sleep_ms(real, ms);
}

static void *
fault_alloc(const gd_env *env, size_t size, bool zeroed)
{
    fault_env *f = self(env);
    if (enter(f, FAULT_ALLOC) != 0) {
        return NULL;
    }
    void *memory = f->real->alloc(f->real, size, zeroed);
    if (memory != NULL) {
        add(f, &f->allocations, 1);
    }
    return memory;
}

static void
fault_release(const gd_env *env, void *memory)
{
    fault_env *f = self(env);
    if (memory != NULL) {
        add(f, &f->allocations, -1);
    }
    f->real->release(f->real, memory);
}

int
fault_lying_renameat(const gd_env *env, int dir, const char *from,
                     const char *to)
{
    (void)fault_renameat(env, dir, from, to);
    return -EIO;
}

/* A call that is new in env.h would be forwarded to nowhere. */
_Static_assert(sizeof(gd_env) == 39 * sizeof(void (*)(void)),
               "fault_table has the whole table");

const gd_env fault_table = {
    .openat = fault_openat,
    .close = fault_close,
    .pread = fault_pread,
    .pwritev = fault_pwritev,
    .fsync = fault_fsync,
    .fdatasync = fault_fdatasync,
    .ftruncate = fault_ftruncate,
    .fallocate = fault_fallocate,
    .linkat = fault_linkat,
    .renameat = fault_renameat,
    .unlinkat = fault_unlinkat,
    .rmdirat = fault_rmdirat,
    .mkdirat = fault_mkdirat,
    .fchmod = fault_fchmod,
    .punch = fault_punch,
    .fstat = fault_fstat,
    .fstatat = fault_fstatat,
    .renew = fault_renew,
    .is_shared = fault_is_shared,
    .free_space = fault_free_space,
    .lock = fault_lock,
    .is_locked = fault_is_locked,
    .list = fault_list,
    .start_writeback = fault_start_writeback,
    .start_readahead = fault_start_readahead,
    .drop_cache = fault_drop_cache,
    .mmap_shared = fault_mmap_shared,
    .use_large_pages = fault_use_large_pages,
    .munmap = fault_munmap,
    .random = fault_random,
    .descriptor_limit = fault_descriptor_limit,
    .getpid = fault_getpid,
    .geteuid = fault_geteuid,
    .now = fault_now,
    .monotonic_ns = fault_monotonic_ns,
    .thread_ns = fault_thread_ns,
    .sleep_ms = fault_sleep_ms,
    .alloc = fault_alloc,
    .release = fault_release,
};

void
fault_env_init(fault_env *f)
{
    memset(f, 0, sizeof *f);
    f->real = gd_env_posix();
    pthread_mutex_init(&f->mutex, NULL);
    f->env = fault_table;
}

void
fault_env_destroy(fault_env *f)
{
    if (f->shadow != NULL) {
        shadow_free(f->shadow);
    }
    pthread_mutex_destroy(&f->mutex);
}

void
fault_env_fail(fault_env *f, fault_call call, uint64_t nth, int sys_errno,
               bool forever)
{
    pthread_mutex_lock(&f->mutex);
    f->rules[call] = (fault_rule){
        .nth = f->calls[call] + nth,
        .sys_errno = sys_errno,
        .forever = forever,
    };
    pthread_mutex_unlock(&f->mutex);
}

void
fault_env_shorten(fault_env *f, size_t most)
{
    pthread_mutex_lock(&f->mutex);
    f->shorten = most;
    pthread_mutex_unlock(&f->mutex);
}

void
fault_env_interrupt(fault_env *f, unsigned every)
{
    pthread_mutex_lock(&f->mutex);
    f->interrupt = every;
    f->interruptible = 0;
    pthread_mutex_unlock(&f->mutex);
}

void
fault_env_start_shadow(fault_env *f)
{
    f->shadow = calloc(1, sizeof *f->shadow);
    if (f->shadow == NULL) {
        abort();
    }
}

void
fault_env_crash(fault_env *f)
{
    pthread_mutex_lock(&f->mutex);
    shadow_crash(f->shadow);
    pthread_mutex_unlock(&f->mutex);
}

void
fault_env_start_trace(fault_env *f)
{
    pthread_mutex_lock(&f->mutex);
    f->tracing = true;
    f->traced = 0;
    pthread_mutex_unlock(&f->mutex);
}

void
fault_env_trace(fault_env *f, char *out, size_t room)
{
    pthread_mutex_lock(&f->mutex);
    size_t used = 0;
    out[0] = '\0';
    for (size_t i = 0; i < f->traced && used < room; i++) {
        used += (size_t)snprintf(out + used, room - used, "%s%s",
                                 i == 0 ? "" : " ",
                                 fault_call_name(f->trace[i]));
    }
    pthread_mutex_unlock(&f->mutex);
}

void
fault_env_heal(fault_env *f)
{
    pthread_mutex_lock(&f->mutex);
    memset(f->rules, 0, sizeof f->rules);
    f->shorten = 0;
    f->interrupt = 0;
    pthread_mutex_unlock(&f->mutex);
}

uint64_t
fault_env_count(fault_env *f, fault_call call)
{
    pthread_mutex_lock(&f->mutex);
    uint64_t count = f->calls[call];
    pthread_mutex_unlock(&f->mutex);
    return count;
}

uint64_t
fault_env_faults(fault_env *f)
{
    pthread_mutex_lock(&f->mutex);
    uint64_t count = f->faults;
    pthread_mutex_unlock(&f->mutex);
    return count;
}

static const char *const NAMES[FAULT_CALLS] = {
    [FAULT_OPENAT] = "openat",       [FAULT_CLOSE] = "close",
    [FAULT_PREAD] = "pread",         [FAULT_PWRITEV] = "pwritev",
    [FAULT_FSYNC] = "fsync",         [FAULT_FDATASYNC] = "fdatasync",
    [FAULT_FTRUNCATE] = "ftruncate", [FAULT_FALLOCATE] = "fallocate",
    [FAULT_LINKAT] = "linkat",       [FAULT_RENAMEAT] = "renameat",
    [FAULT_RMDIRAT] = "rmdirat",
    [FAULT_UNLINKAT] = "unlinkat",   [FAULT_FSTAT] = "fstat",
    [FAULT_MKDIRAT] = "mkdirat",     [FAULT_PUNCH] = "punch",
    [FAULT_FSTATAT] = "fstatat",     [FAULT_LOCK] = "lock",
    [FAULT_LIST] = "list",           [FAULT_MMAP] = "mmap",
    [FAULT_MUNMAP] = "munmap",       [FAULT_RANDOM] = "random",
    [FAULT_ALLOC] = "alloc",         [FAULT_ANY] = "any",
    [FAULT_FCHMOD] = "fchmod",       [FAULT_FREE_SPACE] = "free_space",
    [FAULT_RENEW] = "renew",
};

const char *
fault_call_name(fault_call call)
{
    return call < FAULT_CALLS ? NAMES[call] : "unknown";
}

fault_call
fault_call_by_name(const char *name)
{
    fault_call call = 0;
    while (call < FAULT_CALLS && strcmp(NAMES[call], name) != 0) {
        call++;
    }
    return call;
}

uint64_t
fault_env_leaks(fault_env *f)
{
    pthread_mutex_lock(&f->mutex);
    int64_t d = f->descriptors, m = f->mappings, a = f->allocations;
    uint64_t b = f->bad_closes;
    pthread_mutex_unlock(&f->mutex);
    if (d != 0 || m != 0 || a != 0 || b != 0) {
        fprintf(stderr,
                "left over: %" PRId64 " descriptors, %" PRId64
                " mappings, %" PRId64 " allocations; %" PRIu64
                " closes of what was not open\n",
                d, m, a, b);
    }
    /* A negative account means a double release: no better. */
    return (uint64_t)(d < 0 ? -d : d) + (uint64_t)(m < 0 ? -m : m) +
           (uint64_t)(a < 0 ? -a : a) + b;
}
