/* SPDX-License-Identifier: Apache-2.0 */
/*
 * diskwindow.h - ranges of a group's file as the disk has them.
 *
 * The page cache hides changes of the disk below it.  So the file is read past
 * it, if the file system knows direct reads.  Otherwise the page cache is
 * advised to drop the range first.  It then keeps pages that are dirty or
 * mapped by somebody.
 *
 * One thread fills a window.  Then others may read what it has.
 */
#ifndef GD_DISKWINDOW_H
#define GD_DISKWINDOW_H

#include "engine/files/group.h"

enum { GD_WINDOW = 2 << 20 }; /* bytes that a window should have */

typedef struct gd_disk_window {
    void *memory;
    uint8_t *bytes; /* in memory, at a page's beginning */
    uint64_t start; /* where they begin in the file */
    size_t length;  /* 0: nothing could be read */
} gd_disk_window;

gd_status gd_disk_window_open(const gd_env *env, gd_disk_window *window,
                              gd_error *err);
void gd_disk_window_close(const gd_env *env, gd_disk_window *window);

/* Fills the window with all of the range that can be read; nothing if it is
 * larger than a window of GD_WINDOW and a segment.  direct is a file that
 * gd_group_open_direct opened, or -1. */
void gd_disk_window_fill(gd_disk_window *window, const gd_group *group,
                         int direct, uint64_t start, uint64_t end);

/* The bytes of a range of the file; NULL if the window lacks some. */
static inline const uint8_t *
gd_disk_window_at(const gd_disk_window *window, uint64_t offset, size_t length)
{
    return offset >= window->start && length <= window->length &&
                   offset - window->start <= window->length - length
               ? window->bytes + (offset - window->start)
               : NULL;
}

#endif
