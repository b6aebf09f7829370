/* SPDX-License-Identifier: Apache-2.0 */
/*
 * late_locks.c - a library to be preloaded: a thread that had to wait for a
 * shared lock goes on a second later, and one that has got an exclusive lock
 * holds it for longer, so that others wait.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

static int (*real_rdlock)(pthread_rwlock_t *);
static int (*real_timedwrlock)(pthread_rwlock_t *, const struct timespec *);

__attribute__((constructor)) static void
find_functions(void)
{
    *(void **)&real_rdlock = dlsym(RTLD_NEXT, "pthread_rwlock_rdlock");
    *(void **)&real_timedwrlock =
        dlsym(RTLD_NEXT, "pthread_rwlock_timedwrlock");
}

int
pthread_rwlock_rdlock(pthread_rwlock_t *lock)
{
    if (pthread_rwlock_tryrdlock(lock) == 0) {
        return 0;
    }
    int rc = real_rdlock(lock);
    nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
    return rc;
}

int
pthread_rwlock_timedwrlock(pthread_rwlock_t *lock,
                           const struct timespec *until)
{
    int rc = real_timedwrlock(lock, until);
    if (rc == 0) {
        nanosleep(&(struct timespec){.tv_nsec = 300 * 1000 * 1000}, NULL);
    }
    return rc;
}
