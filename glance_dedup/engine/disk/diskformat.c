/* SPDX-License-Identifier: Apache-2.0 */
/*
 * diskformat.c - see diskformat.h.
 */
#include "engine/disk/diskformat.h"

#include <string.h>

#include "engine/disk/qcow2.h"
#include "engine/disk/vmdk.h"

enum { HEAD = 512 };

static const struct {
    const char *name, *magic;
    uint16_t offset, length;
    gd_status (*map)(gd_diskmap *map, gd_error *err);
} formats[] = {
    [GD_DISK_RAW] = {"raw", "", 0, 0, NULL},
    [GD_DISK_QCOW2] = {"qcow2", "QFI\xfb", 0, 4, gd_qcow2_map},
    [GD_DISK_VMDK] = {"vmdk", "KDMV", 0, 4, gd_vmdk_map},
};

enum { FORMATS = sizeof formats / sizeof formats[0] };

static gd_disk_format
format_of(const uint8_t *head)
{
    for (int i = 1; i < FORMATS; i++) {
        if (memcmp(head + formats[i].offset, formats[i].magic,
                   formats[i].length) == 0) {
            return (gd_disk_format)i;
        }
    }
    return GD_DISK_RAW;
}

gd_status
gd_diskformat_map(const gd_disk_file *file, gd_disk_format *format,
                  uint64_t *size, gd_error *err)
{
    uint8_t head[HEAD];
    gd_diskmap map;
    *format = GD_DISK_RAW;
    *size = file->size;
    if (file->size < HEAD) {
        return GD_OK;
    }
    gd_diskmap_begin(&map, file);
    GD_TRY(gd_diskmap_get(&map, head, HEAD, 0, "its beginning", err));
    *format = format_of(head);
    if (*format == GD_DISK_RAW) {
        return GD_OK;
    }
    GD_TRY(formats[*format].map(&map, err));
    *size = map.size;
    return gd_diskmap_end(&map, err);
}

const char *
gd_diskformat_name(gd_disk_format format)
{
    return formats[format].name;
}
