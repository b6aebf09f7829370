/* SPDX-License-Identifier: Apache-2.0 */
/*
 * indexhead.h - a file of the exact index: its head, and its frames, as pure
 * functions (format-derived.rst).
 *
 * A file is a head and frames.  A frame is so many items, which have one size
 * in a file, and their checksum.  Only the last frame may have fewer.  Shards
 * have packed frames instead (packedframe.h), which have one size each, but the
 * last one.
 */
#ifndef GD_INDEXHEAD_H
#define GD_INDEXHEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/format/names.h"

enum {
    GD_INDEX_HEAD = 512,   /* bytes of a head */
    GD_FRAME_MAX = 65536,  /* bytes of a frame, at most */
    GD_FRAME_CHECKSUM = 8, /* its last bytes */
    GD_CURSOR_SIZE = 8,    /* a group and how many of its slots */
    GD_INDEX_LARGE = 1,    /* a flag: the next merge splits the shard */
};

typedef struct gd_index_head {
    gd_index_id id;
    uint8_t catalog_id[GD_ID_SIZE];
    uint64_t items, seed;
    uint32_t flags;
    uint64_t length; /* of the file, if its frames are packed */
} gd_index_head;

/* Returns whether the file has packed frames. */
bool gd_index_head_is_packed(const gd_index_head *head);
/* Bytes of an item in a file of this kind. */
size_t gd_index_head_item_size(gd_index_kind kind);
/* Items of a frame that is not the last. */
size_t gd_index_head_frame_items(gd_index_kind kind);
uint64_t gd_index_head_frames(const gd_index_head *head);
/* The items in this frame.  REQUIRES: there is such a frame, not packed. */
size_t gd_index_head_items_in(const gd_index_head *head, uint64_t frame);
/* Returns where this frame begins; the file's length, if it is the number of
 * frames. */
uint64_t gd_index_head_frame_start(const gd_index_head *head, uint64_t frame);

void gd_index_head_encode(const gd_index_head *head,
                          uint8_t out[GD_INDEX_HEAD]);
/* GD_CORRUPT unless it is the head of the file with this name, of this catalog
 * (NULL: of any) and with this length; GD_VERSION for a newer major version. */
gd_status gd_index_head_decode(const uint8_t in[GD_INDEX_HEAD],
                               const gd_index_id *id,
                               const uint8_t catalog_id[GD_ID_SIZE],
                               uint64_t length, gd_index_head *head,
                               gd_error *err);

/* Writes the checksum behind the items. */
void gd_index_head_seal_frame(const gd_index_head *head, uint64_t frame,
                              uint8_t *items, size_t count);
/* GD_CORRUPT unless the checksum is right, and the items may be in such a file.
 * before: the last item of the frame before; NULL: it is not known, or there is
 * none. */
gd_status gd_index_head_require_frame(const gd_index_head *head,
                                      uint64_t frame,
                                      const uint8_t *items,
                                      const uint8_t *before,
                                      gd_error *err);
/* The same of a packed frame of this length; its items go into out, which has
 * room for GD_FRAME_MAX bytes. */
gd_status gd_index_head_unpack_frame(const gd_index_head *head, uint64_t frame,
                                     const uint8_t *packed, size_t length,
                                     const uint8_t *before, uint8_t *out,
                                     size_t *count, gd_error *err);

#endif
