/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disk_shadow.c - see disk_shadow.h.
 */
#include "tests/c/support/disk_shadow.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SECTOR = 512 };

static void
give_up(const char *what)
{
    perror(what);
    exit(2);
}

static void *
grown(void *memory, uint64_t from, uint64_t to)
{
    uint8_t *larger = realloc(memory, to);
    if (larger == NULL) {
        give_up("shadow");
    }
    memset(larger + from, 0, to - from);
    return larger;
}

static shadow_file *
find(shadow *s, int fd)
{
    struct stat st;
    if (fstat(fd, &st) != 0) {
        return NULL;
    }
    for (unsigned i = 0; i < s->count; i++) {
        if (s->files[i].inode == st.st_ino && s->files[i].device == st.st_dev) {
            return &s->files[i];
        }
    }
    return NULL;
}

/* Makes room for the content up to there. */
static void
reach(shadow_file *file, uint64_t end)
{
    uint64_t sectors = (end + SECTOR - 1) / SECTOR;
    if (sectors > file->sectors) {
        file->data = grown(file->data, file->sectors * SECTOR,
                           sectors * SECTOR);
        file->dirty = grown(file->dirty, file->sectors, sectors);
        file->sectors = sectors;
    }
}

static uint64_t
length_of(const shadow_file *file)
{
    struct stat st;
    if (fstat(file->fd, &st) != 0) {
        give_up("shadow");
    }
    return (uint64_t)st.st_size;
}

/* Copies sectors as they are now; behind the file's end are zeros. */
static void
copy_sectors(shadow_file *file, uint64_t first, uint64_t count)
{
    if (count == 0) {
        return; /* an empty file has no data */
    }
    uint8_t *to = file->data + first * SECTOR;
    uint64_t length = count * SECTOR, done = 0;
    while (done < length) {
        ssize_t n = pread(file->fd, to + done, length - done,
                          (off_t)(first * SECTOR + done));
        if (n < 0) {
            give_up("shadow");
        }
        if (n == 0) {
            memset(to + done, 0, length - done);
            return;
        }
        done += (uint64_t)n;
    }
}

void
shadow_opened(shadow *s, int fd, const char *path, int flags)
{
    struct stat st;
    char own[32];
    if (path[0] == '/' || (flags & O_ACCMODE) == O_RDONLY ||
        fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || find(s, fd) != NULL) {
        return;
    }
    if (s->count == SHADOW_FILES) {
        fprintf(stderr, "shadow: more than %d files\n", SHADOW_FILES);
        exit(2);
    }
    shadow_file *file = &s->files[s->count++];
    snprintf(own, sizeof own, "/proc/self/fd/%d", fd);
    *file = (shadow_file){.device = st.st_dev,
                          .inode = st.st_ino,
                          .fd = open(own, O_RDWR | O_CLOEXEC),
                          .length = (uint64_t)st.st_size};
    if (file->fd < 0) {
        give_up(path);
    }
    reach(file, file->length);
    copy_sectors(file, 0, file->sectors);
}

void
shadow_written(shadow *s, int fd, uint64_t offset, uint64_t length)
{
    shadow_file *file = find(s, fd);
    if (file == NULL || length == 0) {
        return;
    }
    reach(file, offset + length);
    memset(file->dirty + offset / SECTOR, 1,
           (offset + length - 1) / SECTOR - offset / SECTOR + 1);
}

void
shadow_punched(shadow *s, int fd, uint64_t offset, uint64_t length)
{
    shadow_file *file = find(s, fd);
    uint64_t end = offset + length;
    if (file == NULL) {
        return;
    }
    end = end < file->sectors * SECTOR ? end : file->sectors * SECTOR;
    if (offset < end) {
        memset(file->data + offset, 0, end - offset);
    }
}

void
shadow_synced(shadow *s, int fd, bool good)
{
    shadow_file *file = find(s, fd);
    if (file == NULL) {
        return;
    }
    for (uint64_t i = 0; good && i < file->sectors; i++) {
        uint64_t first = i;
        while (i < file->sectors && file->dirty[i]) {
            i++;
        }
        copy_sectors(file, first, i - first);
    }
    for (uint64_t i = 0; i < file->sectors; i++) {
        file->dirty[i] = 0;
    }
    if (good) {
        uint64_t length = length_of(file);
        reach(file, length);
        /* Truncated bytes do not come back when the file grows again. */
        memset(file->data + length, 0, file->sectors * SECTOR - length);
        file->length = length;
    }
}

static void
forget(shadow *s)
{
    for (unsigned i = 0; i < s->count; i++) {
        close(s->files[i].fd);
        free(s->files[i].data);
        free(s->files[i].dirty);
    }
    s->count = 0;
}

void
shadow_crash(shadow *s)
{
    for (unsigned i = 0; i < s->count; i++) {
        const shadow_file *file = &s->files[i];
        if (ftruncate(file->fd, 0) != 0 ||
            ftruncate(file->fd, (off_t)file->length) != 0 ||
            pwrite(file->fd, file->data, file->length, 0) !=
                (ssize_t)file->length) {
            give_up("shadow");
        }
    }
    forget(s);
}

void
shadow_free(shadow *s)
{
    forget(s);
    free(s);
}
