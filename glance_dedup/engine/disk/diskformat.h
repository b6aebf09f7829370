/* SPDX-License-Identifier: Apache-2.0 */
/*
 * diskformat.h - finds out which format a file has, and maps its disk.
 */
#ifndef GD_DISKFORMAT_H
#define GD_DISKFORMAT_H

#include "engine/disk/diskmap.h"

/* The values are those of recipes. */
typedef enum gd_disk_format {
    GD_DISK_RAW = 0, /* the file is its disk, or its format is none of these */
    GD_DISK_QCOW2 = 1,
    GD_DISK_VMDK = 2,
    GD_DISK_VHD = 3,
    GD_DISK_VHDX = 4,
    GD_DISK_VDI = 5,
} gd_disk_format;

/* Gives the whole disk to file->take, piece by piece. *format is set if the
 * beginning of the file could be read, also when the file is refused. Of a raw
 * file nothing is given. */
gd_status gd_diskformat_map(const gd_disk_file *file, gd_disk_format *format,
                            uint64_t *size, gd_error *err);
/* As QEMU calls it. */
const char *gd_diskformat_name(gd_disk_format format);

#endif
