/* SPDX-License-Identifier: Apache-2.0 */
/*
 * diskwindow.c - see diskwindow.h.
 */
#include "engine/maintenance/diskwindow.h"

#include <errno.h>

enum {
    PAGE = 4096, /* for memory and file alike: every disk accepts it */
    ROOM = GD_WINDOW + GD_SEGMENT_MAX + 2 * PAGE,
};

gd_status
gd_disk_window_open(const gd_env *env, gd_disk_window *window, gd_error *err)
{
    window->memory = gd_alloc(env, ROOM + PAGE, err);
    if (window->memory == NULL) {
        return GD_NOMEM;
    }
    window->bytes = (uint8_t *)window->memory + PAGE -
                    (uintptr_t)window->memory % PAGE;
    window->length = 0;
    return GD_OK;
}

void
gd_disk_window_close(const gd_env *env, gd_disk_window *window)
{
    env->release(env, window->memory);
    window->memory = NULL;
}

/* Reads until the end of the range or of the file; false after an error. */
static bool
read_range(gd_disk_window *window, const gd_env *env, int fd, size_t length)
{
    while (window->length < length) {
        ssize_t n = env->pread(env, fd, window->bytes + window->length,
                               length - window->length,
                               window->start + window->length);
        if (n < 0 && n != -EINTR) {
            return false;
        }
        if (n > 0) {
            window->length += (size_t)n;
        }
        /* A direct read goes on only where a page begins, and stops before
         * that only at the end of the file. */
        if (n == 0 || window->length % PAGE != 0) {
            break;
        }
    }
    return true;
}

void
gd_disk_window_fill(gd_disk_window *window, const gd_group *group, int direct,
                    uint64_t start, uint64_t end)
{
    const gd_env *env = group->env;
    window->start = start & ~(uint64_t)(PAGE - 1);
    window->length = 0;
    uint64_t length =
        ((end + PAGE - 1) & ~(uint64_t)(PAGE - 1)) - window->start;
    bool fits = length <= ROOM;
    if (fits && direct >= 0 &&
        read_range(window, env, direct, (size_t)length)) {
        return;
    }
    window->length = 0;
    env->drop_cache(env, group->fd, window->start, length);
    if (fits && !read_range(window, env, group->fd, (size_t)length)) {
        window->length = 0;
    }
}
