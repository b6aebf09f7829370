/* SPDX-License-Identifier: Apache-2.0 */
/*
 * directio.c - see directio.h.
 */
#include "engine/write/directio.h"

#include <fcntl.h>
#include <string.h>

enum {
    PAGE = 4096, /* for memory and file alike: every disk accepts it */
    ROOM = 2 << 20,
};

struct gd_directio {
    const gd_env *env;
    const gd_group *group;
    int fd;
    void *memory;
    uint8_t *room;  /* in the buffer, page-aligned: bytes from start on */
    size_t used;    /* of room */
    uint64_t start; /* in the file, page-aligned */
};

/* The group's lock on its file is of the other open file (gd_group_hold). */
static bool
hold(const gd_directio *direct)
{
    return direct->env->lock(direct->env, direct->fd, GD_BYTE_LESSEE,
                             F_RDLCK) == 0;
}

gd_directio *
gd_directio_open(const gd_env *env, int root, const gd_group *group)
{
    gd_directio *direct = gd_calloc(env, 1, sizeof *direct, NULL);
    if (direct == NULL) {
        return NULL;
    }
    direct->env = env;
    direct->group = group;
    direct->memory = gd_alloc(env, ROOM + PAGE, NULL);
    direct->fd = direct->memory == NULL
                     ? -1
                     : gd_group_open_direct(group, root, O_RDWR);
    if (direct->fd < 0 || !hold(direct)) {
        gd_directio_close(direct);
        return NULL;
    }
    direct->room = (uint8_t *)direct->memory + PAGE -
                   (uintptr_t)direct->memory % PAGE;
    return direct;
}

void
gd_directio_close(gd_directio *direct)
{
    if (direct != NULL) {
        const gd_env *env = direct->env;
        if (direct->fd >= 0) {
            env->close(env, direct->fd);
        }
        env->release(env, direct->memory);
        env->release(env, direct);
    }
}

/* Makes room begin with the bytes before offset in its page. */
static bool
go_to(gd_directio *direct, uint64_t offset)
{
    if (direct->start + direct->used == offset) {
        return true;
    }
    direct->used = offset % PAGE;
    direct->start = offset - direct->used;
    return gd_group_read_file(direct->group, direct->room, direct->used,
                              direct->start, NULL) == GD_OK;
}

/* Writes all of room; keeps the last page if it is not full. */
static bool
write_room(gd_directio *direct)
{
    size_t rest = direct->used % PAGE;
    size_t full = direct->used - rest;
    size_t length = rest > 0 ? full + PAGE : full;
    memset(direct->room + direct->used, 0, length - direct->used);
    if (gd_write_full(direct->env, direct->fd, direct->room, length,
                      direct->start, direct->group->name, NULL) != GD_OK) {
        return false;
    }
    memmove(direct->room, direct->room + full, rest);
    direct->start += full;
    direct->used = rest;
    return true;
}

static bool
put(gd_directio *direct, const uint8_t *data, size_t length)
{
    while (length > 0) {
        size_t n = ROOM - direct->used;
        if (n > length) {
            n = length;
        }
        memcpy(direct->room + direct->used, data, n);
        direct->used += n;
        data += n;
        length -= n;
        if (direct->used == ROOM && !write_room(direct)) {
            return false;
        }
    }
    return true;
}

bool
gd_directio_write(gd_directio *direct, const struct iovec *pieces, size_t count,
                  uint64_t offset)
{
    bool good = go_to(direct, offset);
    for (size_t i = 0; good && i < count; i++) {
        good = put(direct, pieces[i].iov_base, pieces[i].iov_len);
    }
    return good && (direct->used == 0 || write_room(direct));
}
