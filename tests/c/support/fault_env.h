/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault_env.h - a table of system calls that counts them and can fail them.
 *
 * It forwards to the table of the real machine.  A test may request:
 *
 *   fault_env_fail(f, FAULT_FSYNC, 2, EIO, true)
 *       the second fsync from now on, and every later one, fails with EIO
 *   fault_env_fail(f, FAULT_ANY, n, ENOSPC, false)
 *       only the nth system call from now, whichever it is (not allocations)
 *   fault_env_fail(f, FAULT_ALLOC, 3, ENOMEM, false)
 *       the third allocation fails
 *   fault_env_shorten(f, 7)
 *       reads and writes move at most 7 bytes
 *   fault_env_interrupt(f, 2)
 *       every second call that may be interrupted returns -EINTR first
 *
 *   fault_env_start_shadow(f), and later fault_env_crash(f)
 *       the machine crashes: files lose unsynced bytes (disk_shadow.h)
 *
 * A failed call has no effect, but for three: close closes all the same (as
 * Linux does), a failed munmap unmaps, and a failed unlock unlocks.  A new
 * fault of one kind replaces the earlier one of that kind.  Calls that cannot
 * fail (getpid, now, sleep_ms, ...) are forwarded uncounted.
 *
 * It also keeps accounts: fault_env_leaks counts resources not given back.
 *
 * Safe for use by several threads.  A forked child has a copy of its own.
 */
#ifndef FAULT_ENV_H
#define FAULT_ENV_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "tests/c/support/disk_shadow.h"

typedef enum fault_call {
    FAULT_OPENAT,
    FAULT_CLOSE,
    FAULT_PREAD,
    FAULT_PWRITEV,
    FAULT_FSYNC,
    FAULT_FDATASYNC,
    FAULT_FTRUNCATE,
    FAULT_FALLOCATE,
    FAULT_LINKAT,
    FAULT_RENAMEAT,
    FAULT_UNLINKAT,
    FAULT_RMDIRAT,
    FAULT_MKDIRAT,
    FAULT_FCHMOD,
    FAULT_PUNCH,
    FAULT_FSTAT,
    FAULT_FSTATAT,
    FAULT_RENEW,
    FAULT_FREE_SPACE,
    FAULT_LOCK,
    FAULT_LIST,
    FAULT_MMAP,
    FAULT_MUNMAP,
    FAULT_RANDOM,
    FAULT_ALLOC,
    FAULT_ANY, /* every kind above but FAULT_ALLOC */
    FAULT_CALLS,
} fault_call;

enum {
    FAULT_FDS = 4096, /* descriptors above are not accounted for */
    FAULT_TRACE = 1024, /* calls */
};

/* Fails the calls number nth (and later ones too, if forever). */
typedef struct fault_rule {
    uint64_t nth; /* 0: no rule */
    int sys_errno;
    bool forever;
} fault_rule;

typedef struct fault_env {
    gd_env env; /* first: a gd_env * is a fault_env * */
    const gd_env *real;
    pthread_mutex_t mutex; /* guards all below */
    uint64_t calls[FAULT_CALLS];
    fault_rule rules[FAULT_CALLS];
    uint64_t faults;       /* calls failed so far */
    size_t shorten;        /* 0: not */
    unsigned interrupt;    /* 0: never */
    uint64_t interruptible;
    /* The file system reports that other hosts share it. Then open files
     * beside the page cache read only whole pages, even on a tmpfs, which
     * has no O_DIRECT; and of all others, the bytes from stale_from on are
     * zeros. */
    bool shared;
    uint64_t stale_from; /* 0: none */
    int64_t monotonic_ns; /* of a clock that stands still; 0: it goes on */
    bool direct[FAULT_FDS];
    bool tracing;
    fault_call trace[FAULT_TRACE];
    size_t traced;
    bool open[FAULT_FDS];
    int64_t descriptors;
    int64_t allocations;
    int64_t mappings;
    uint64_t bad_closes; /* of descriptors that were not open */
    shadow *shadow;      /* NULL: not kept */
    char failed_sync[64]; /* the end of the path of the last failure */
} fault_env;

/* The functions of each fault_env. A test's own function that replaces one of
 * them in env calls it, and the test puts it back. */
extern const gd_env fault_table;
/* A rename that succeeds and reports an error. */
int fault_lying_renameat(const gd_env *env, int dir, const char *from,
                         const char *to);

void fault_env_init(fault_env *f);
void fault_env_destroy(fault_env *f);

/* nth counts from now, starting with 1. */
void fault_env_fail(fault_env *f, fault_call call, uint64_t nth,
                    int sys_errno, bool forever);
void fault_env_shorten(fault_env *f, size_t most);
void fault_env_interrupt(fault_env *f, unsigned every);
/* Removes all of the above rules; counts and accounts stay. */
void fault_env_heal(fault_env *f);

/* Starts a new trace of each call that changes the disk and was not failed;
 * and returns the trace: names with spaces between, repeated ones only
 * once. */
void fault_env_start_trace(fault_env *f);
void fault_env_trace(fault_env *f, char *out, size_t room);

/* Tracks the disk's content from now on. */
void fault_env_start_shadow(fault_env *f);
/* REQUIRES: fault_env_start_shadow. The tracking starts again. */
void fault_env_crash(fault_env *f);

/* Returns the number of calls so far, failed ones too. */
uint64_t fault_env_count(fault_env *f, fault_call call);
/* Returns the number of calls that a rule failed. */
uint64_t fault_env_faults(fault_env *f);
/* Returns "fdatasync" and so on, for messages; and back (FAULT_CALLS: no such
 * call). */
const char *fault_call_name(fault_call call);
fault_call fault_call_by_name(const char *name);

/* Returns the number of descriptors, mappings and allocations that are
 * outstanding, and of closes of a closed descriptor. Prints a line to stderr
 * if there are any. */
uint64_t fault_env_leaks(fault_env *f);

#endif
