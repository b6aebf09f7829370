/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dirty.c - data that was written to a file, and is not on the server yet.
 *
 * The bytes are in memory, at their offsets; a list has the valid ranges.
 * Some of them reach the server early, in no order, as any client may write
 * back any data at any time: the rest after a host's death is not a prefix.
 */
#include "tests/sharedfs/sharedfs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PIECE = 1 << 16, EARLY = 4 /* one write in so many */,
       LONG = 1 << 20 };

struct range {
    range *next;
    off_t start, end;
};

static int
prepare(node *n)
{
    if (n->memory < 0) {
        n->memory = memfd_create("dirty", MFD_CLOEXEC);
    }
    if (n->server < 0) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", n->fd);
        n->server = open(path, O_RDWR | O_CLOEXEC);
    }
    return n->memory < 0 || n->server < 0 ? errno : 0;
}

/* Joins the ranges that the new one touches. */
static int
add_range(node *n, off_t start, off_t end)
{
    range **at = &n->dirty;
    while (*at != NULL && (*at)->end < start) {
        at = &(*at)->next;
    }
    while (*at != NULL && (*at)->start <= end) {
        range *met = *at;
        start = met->start < start ? met->start : start;
        end = met->end > end ? met->end : end;
        *at = met->next;
        free(met);
    }
    range *added = malloc(sizeof *added);
    if (added == NULL) {
        return ENOMEM;
    }
    *added = (range){.next = *at, .start = start, .end = end};
    *at = added;
    return 0;
}

static int
send_range(const node *n, const range *r)
{
    static __thread char piece[PIECE];
    for (off_t at = r->start; at < r->end;) {
        size_t length = r->end - at < PIECE ? (size_t)(r->end - at) : PIECE;
        ssize_t got = pread(n->memory, piece, length, at);
        if (got <= 0) {
            return EIO;
        }
        got = pwrite(n->server, piece, (size_t)got, at);
        if (got < 0) {
            return errno;
        }
        at += got;
    }
    return 0;
}

/* Sends some range; of a long one, all but its end. */
static int
send_early(node *n)
{
    static unsigned writes;
    unsigned number = __atomic_add_fetch(&writes, 1, __ATOMIC_RELAXED);
    if (number % EARLY != 0 || n->dirty == NULL) {
        return 0;
    }
    range **at = &n->dirty;
    if (number / EARLY % 2 == 1 && (*at)->next != NULL) {
        at = &(*at)->next;
    }
    range sent = **at;
    if (sent.end - sent.start > LONG) {
        sent.end -= LONG / 4;
        (*at)->start = sent.end;
    } else if (n->dirty->next != NULL) {
        range *whole = *at;
        *at = whole->next;
        free(whole);
    } else {
        return 0;
    }
    int error = send_range(n, &sent);
    version_bump(n, &n->seen);
    return error;
}

int
dirty_write(node *n, unsigned held, const char *data, size_t size,
            off_t offset)
{
    pthread_mutex_lock(&n->mutex);
    n->writes++;
    n->held = held;
    int error = prepare(n);
    if (error == 0 &&
        pwrite(n->memory, data, size, offset) != (ssize_t)size) {
        error = errno;
    }
    if (error == 0) {
        error = add_range(n, offset, offset + (off_t)size);
    }
    if (error == 0 && offset + (off_t)size > n->dirty_end) {
        n->dirty_end = offset + (off_t)size;
    }
    if (error == 0) {
        error = send_early(n);
    }
    pthread_mutex_unlock(&n->mutex);
    return error;
}

ssize_t
dirty_read(node *n, int server, char *data, size_t size, off_t offset)
{
    pthread_mutex_lock(&n->mutex);
    ssize_t got = pread(server, data, size, offset);
    if (got >= 0 && n->dirty_end > offset + got) {
        size_t all = n->dirty_end - offset < (off_t)size
                         ? (size_t)(n->dirty_end - offset)
                         : size;
        memset(data + got, 0, all - (size_t)got);
        got = (ssize_t)all;
    }
    for (const range *r = n->dirty; got >= 0 && r != NULL; r = r->next) {
        off_t start = r->start > offset ? r->start : offset;
        off_t end = r->end < offset + got ? r->end : offset + got;
        if (start < end &&
            pread(n->memory, data + (start - offset), (size_t)(end - start),
                  start) != end - start) {
            got = -1;
        }
    }
    pthread_mutex_unlock(&n->mutex);
    return got;
}

/* The server's answer to a write includes the size. */
static void
note_size(node *n)
{
    struct stat st;
    if (fstat(n->server, &st) == 0) {
        n->attr.st_size = st.st_size;
        n->attr.st_blocks = st.st_blocks;
    }
}

/* The next write opens them again: files that are only remembered take few
 * descriptors. */
static void
close_both(node *n)
{
    if (n->memory >= 0) {
        close(n->memory);
    }
    if (n->server >= 0) {
        close(n->server);
    }
    n->memory = n->server = -1;
}

static void
drop_ranges(node *n)
{
    while (n->dirty != NULL) {
        range *first = n->dirty;
        n->dirty = first->next;
        free(first);
    }
    n->dirty_end = 0;
}

int
dirty_flush(node *n)
{
    int error = 0;
    pthread_mutex_lock(&n->mutex);
    if (n->dirty != NULL && is_lost(n->held)) {
        error = EIO;
        drop_ranges(n);
        close_both(n);
        n->seen = 0; /* the kernel's pages are invalid now */
    }
    if (n->dirty != NULL) {
        for (range *r = n->dirty; error == 0 && r != NULL; r = r->next) {
            error = send_range(n, r);
        }
        drop_ranges(n);
        note_size(n);
        close_both(n);
        version_bump(n, &n->seen);
    }
    pthread_mutex_unlock(&n->mutex);
    return error;
}

void
dirty_count(node *n)
{
    pthread_mutex_lock(&n->mutex);
    n->writes++;
    pthread_mutex_unlock(&n->mutex);
}

uint64_t
dirty_writes(node *n)
{
    pthread_mutex_lock(&n->mutex);
    uint64_t writes = n->writes;
    pthread_mutex_unlock(&n->mutex);
    return writes;
}

off_t
dirty_end(node *n)
{
    pthread_mutex_lock(&n->mutex);
    off_t end = n->dirty_end;
    pthread_mutex_unlock(&n->mutex);
    return end;
}

void
dirty_free(node *n)
{
    drop_ranges(n);
    close_both(n);
}
