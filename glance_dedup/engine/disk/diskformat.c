/* SPDX-License-Identifier: Apache-2.0 */
/*
 * diskformat.c - see diskformat.h.
 */
#include "engine/disk/diskformat.h"

#include <string.h>

#include "engine/disk/qcow2.h"
#include "engine/disk/vdi.h"
#include "engine/disk/vhd.h"
#include "engine/disk/vhdx.h"
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
    [GD_DISK_VHD] = {"vpc", "conectix", 0, 8, gd_vhd_map},
    [GD_DISK_VHDX] = {"vhdx", "vhdxfile", 0, 8, gd_vhdx_map},
    [GD_DISK_VDI] = {"vdi", "\x7f\x10\xda\xbe", 64, 4, gd_vdi_map},
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

static gd_status
map_as(gd_diskmap *map, gd_disk_format *format, gd_error *err)
{
    if (*format != GD_DISK_RAW) {
        return formats[*format].map(map, err);
    }
    bool found;
    gd_status status = gd_vhd_map_fixed(map, &found, err);
    *format = found ? GD_DISK_VHD : GD_DISK_RAW;
    return status;
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
    GD_TRY(map_as(&map, format, err));
    *size = *format == GD_DISK_RAW ? file->size : map.size;
    return gd_diskmap_end(&map, err);
}

const char *
gd_diskformat_name(gd_disk_format format)
{
    return formats[format].name;
}
