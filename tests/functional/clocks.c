/* SPDX-License-Identifier: Apache-2.0 */
/*
 * clocks.c - preloaded: clocks that a test sets while a process runs.
 *
 * The file that GLANCE_DEDUP_TEST_CLOCK names has two numbers of 64 bits: the
 * seconds by which the time of day is off, and the seconds at which the
 * monotonic clock stands still, or 0 if it runs.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *setting;

__attribute__((constructor)) static void
map_setting(void)
{
    const char *path = getenv("GLANCE_DEDUP_TEST_CLOCK");
    int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        void *map =
            mmap(NULL, 2 * sizeof *setting, PROT_READ, MAP_SHARED, fd, 0);
        setting = map == MAP_FAILED ? NULL : map;
        close(fd);
    }
}

int
clock_gettime(clockid_t clock, struct timespec *result)
{
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) {
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT,
                                                            "clock_gettime");
    }
    int rc = real(clock, result);
    if (rc != 0 || setting == NULL) {
        return rc;
    }
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) {
        result->tv_sec += setting[0];
    } else if (clock == CLOCK_MONOTONIC && setting[1] != 0) {
        *result = (struct timespec){.tv_sec = setting[1]};
    }
    return rc;
}

time_t
time(time_t *result)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result != NULL) {
        *result = now.tv_sec;
    }
    return now.tv_sec;
}

int
gettimeofday(struct timeval *restrict result, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    result->tv_sec = now.tv_sec;
    result->tv_usec = now.tv_nsec / 1000;
    return 0;
}
