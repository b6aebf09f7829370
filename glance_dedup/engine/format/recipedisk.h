/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recipedisk.h - what the header page of a recipe of version 2 says of the
 * image's disk, and of the encoders that make the file from plain bytes
 * (format.rst, "Recipes of images with a disk").
 */
#ifndef GD_RECIPEDISK_H
#define GD_RECIPEDISK_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/deflate/deflate.h"

enum {
    GD_RECIPE_ENCODERS = 15, /* at most, numbered from 1; 0 copies */
    GD_RECIPE_REST_ALIGN = 2 << 20, /* the rest begins at a multiple of this */
    GD_RECIPE_PROVEN = 1, /* a flag: the disk may be shown (F5) */
    GD_RECIPE_ZLIB = 1, /* an encoder's id */
    /* Bytes of the file that one derived extent has at most. */
    GD_DERIVED_MAX = 2 * GD_DEFLATE_MAX_PLAIN,
};

/* An encoder's parameters, as the header has them. */
typedef struct gd_recipe_encoder {
    uint8_t id, level, window_bits, memory_level, strategy, header;
    uint16_t reserved;
} gd_recipe_encoder;

typedef struct gd_recipe_disk {
    uint64_t plain_size; /* bytes of all extents */
    uint64_t size;       /* of the disk; 0: there is none, and all else is 0 */
    uint64_t derived;    /* extents of the table */
    uint64_t derived_bytes; /* bytes of the file by encoders other than 0 */
    uint8_t format;
    uint8_t flags;
    uint16_t encoders;
    gd_recipe_encoder encoder[GD_RECIPE_ENCODERS]; /* number 1 is at 0 */
} gd_recipe_disk;

/* Both take the whole header page. */
void gd_recipe_disk_encode(const gd_recipe_disk *disk, uint8_t *page);
void gd_recipe_disk_decode(const uint8_t *page, gd_recipe_disk *disk);
/* Returns whether each field is possible for a file of this size. */
bool gd_recipe_disk_is_valid(const gd_recipe_disk *disk, uint64_t size);
/* Fills in an encoder's parameters.  REQUIRES: the disk is valid, and number is
 * from 1 to disk->encoders. */
void gd_recipe_disk_params(const gd_recipe_disk *disk, unsigned number,
                           gd_deflate_params *params);

#endif
