/* SPDX-License-Identifier: Apache-2.0 */
/*
 * diskmodel.c - see diskmodel.h.
 */
#include "benchmarks/diskmodel.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CACHED = 1, DIRTY = 2 };

typedef struct file {
    struct file *next;
    uint64_t id;
    uint8_t *pages; /* CACHED and DIRTY of each */
    uint64_t room;  /* pages */
} file;

struct dm_disk {
    pthread_mutex_t mutex;
    file *files;
    uint64_t head_file, head; /* where the last request ended, in bytes */
    uint64_t journal;
    dm_counts counts;
};

static void *
must(void *memory)
{
    if (memory == NULL) {
        fprintf(stderr, "no memory for the model of the disk\n");
        exit(1);
    }
    return memory;
}

dm_disk *
dm_open(void)
{
    dm_disk *disk = must(calloc(1, sizeof *disk));
    pthread_mutex_init(&disk->mutex, NULL);
    return disk;
}

void
dm_close(dm_disk *disk)
{
    while (disk->files != NULL) {
        file *f = disk->files;
        disk->files = f->next;
        free(f->pages);
        free(f);
    }
    pthread_mutex_destroy(&disk->mutex);
    free(disk);
}

/* With room for the pages below end. */
static file *
find(dm_disk *disk, uint64_t id, uint64_t end)
{
    file *f = disk->files;
    while (f != NULL && f->id != id) {
        f = f->next;
    }
    if (f == NULL) {
        f = must(calloc(1, sizeof *f));
        f->id = id;
        f->next = disk->files;
        disk->files = f;
    }
    if (f->room < end) {
        uint64_t room = f->room * 2 > end ? f->room * 2 : end;
        f->pages = must(realloc(f->pages, room));
        memset(f->pages + f->room, 0, room - f->room);
        f->room = room;
    }
    return f;
}

static void
request(dm_disk *disk, uint64_t id, uint64_t first, uint64_t end)
{
    uint64_t start = first * DM_PAGE;
    uint64_t way = start > disk->head ? start - disk->head
                                      : disk->head - start;
    disk->counts.requests++;
    disk->counts.bytes += (end - first) * DM_PAGE;
    if (id != disk->head_file || way > DM_NEAR) {
        disk->counts.far_seeks++;
    } else if (way != 0) {
        disk->counts.near_seeks++;
    }
    disk->head_file = id;
    disk->head = end * DM_PAGE;
}

/* A request for each run of pages in [first, end) of which the bits are as
 * wanted; they become `then`. */
static void
request_runs(dm_disk *disk, file *f, uint64_t first, uint64_t end,
             uint8_t bits, uint8_t wanted, uint8_t then)
{
    for (uint64_t page = first; page < end;) {
        uint64_t start = page;
        while (page < end && (f->pages[page] & bits) == wanted) {
            f->pages[page++] = then;
        }
        if (page > start) {
            request(disk, f->id, start, page);
        } else {
            page++;
        }
    }
}

static uint64_t
pages_end(uint64_t offset, uint64_t length)
{
    return (offset + length + DM_PAGE - 1) / DM_PAGE;
}

void
dm_read(dm_disk *disk, uint64_t id, uint64_t offset, uint64_t length)
{
    uint64_t end = pages_end(offset, length);
    pthread_mutex_lock(&disk->mutex);
    request_runs(disk, find(disk, id, end), offset / DM_PAGE, end, CACHED, 0,
                 CACHED);
    pthread_mutex_unlock(&disk->mutex);
}

void
dm_write(dm_disk *disk, uint64_t id, uint64_t offset, uint64_t length)
{
    uint64_t first = offset / DM_PAGE, end = pages_end(offset, length);
    pthread_mutex_lock(&disk->mutex);
    file *f = find(disk, id, end);
    memset(f->pages + first, CACHED | DIRTY, end - first);
    pthread_mutex_unlock(&disk->mutex);
}

/* REQUIRES: the mutex. */
static void
flush(dm_disk *disk, file *f, uint64_t first, uint64_t end)
{
    end = end < f->room ? end : f->room;
    request_runs(disk, f, first, end, DIRTY, DIRTY, CACHED);
}

void
dm_flush(dm_disk *disk, uint64_t id, uint64_t offset, uint64_t length)
{
    pthread_mutex_lock(&disk->mutex);
    flush(disk, find(disk, id, 0), offset / DM_PAGE, pages_end(offset, length));
    pthread_mutex_unlock(&disk->mutex);
}

void
dm_sync(dm_disk *disk, uint64_t id)
{
    pthread_mutex_lock(&disk->mutex);
    flush(disk, find(disk, id, 0), 0, UINT64_MAX);
    request(disk, 0, disk->journal, disk->journal + 1);
    disk->journal++;
    pthread_mutex_unlock(&disk->mutex);
}

void
dm_cut(dm_disk *disk, uint64_t id, uint64_t length)
{
    uint64_t first = pages_end(length, 0);
    pthread_mutex_lock(&disk->mutex);
    file *f = find(disk, id, 0);
    if (first < f->room) {
        memset(f->pages + first, 0, f->room - first);
    }
    pthread_mutex_unlock(&disk->mutex);
}

dm_counts
dm_get_counts(dm_disk *disk)
{
    pthread_mutex_lock(&disk->mutex);
    dm_counts counts = disk->counts;
    pthread_mutex_unlock(&disk->mutex);
    return counts;
}
