/* SPDX-License-Identifier: Apache-2.0 */
/*
 * params.h - what a repository is, fixed when it was created (repository.json),
 * and how this process uses it.
 */
#ifndef GD_PARAMS_H
#define GD_PARAMS_H

#include <stdint.h>

#include "engine/format/names.h"
#include "engine/format/segment.h"

enum {
    GD_FORMAT_MAJOR = 1, /* of recipes and new groups */
    GD_GROUP_LISTS = 2, /* of groups whose segments may have lists */
    GD_GROUP_COLD = 3,  /* of cold groups; and the last that is known */
    GD_SLOTS_MIN = 64,
    GD_DIGEST_NAME = 16, /* bytes of the digest's name in a group's header */
};

/* Choice whether new blocks are written beside the page cache. */
typedef enum gd_direct_io {
    GD_DIRECT_OFF,
    GD_DIRECT_ON,
    GD_DIRECT_AUTO, /* where that costs less (io_mode.h) */
} gd_direct_io;

typedef struct gd_params {
    uint8_t repository_id[GD_ID_SIZE];
    uint32_t block_size; /* bytes of a block, at most */
    uint32_t cut_minimum, cut_average; /* 0: all blocks have one size */
    uint32_t group_slots;
    uint32_t segment_size;
    char digest[GD_DIGEST_NAME];
    bool by_value; /* compare bytes, not only fingerprints (I5) */
    bool shared; /* other hosts may change files, which are therefore read
                  * beside the page cache (protocol.rst, N13.1) */
    /* Settings of this process: */
    gd_codec codec;
    int codec_level;
    bool adaptive_compression; /* compress less when processors are busy */
    gd_direct_io direct_io;
    unsigned threads;
    unsigned lock_timeout_ms;
    uint64_t reserve; /* bytes that storing leaves free (freespace.h) */
    /* Source of the bytes of cold groups (slices.h); NULL: none. */
    const struct gd_slices *slices;
} gd_params;

#endif
