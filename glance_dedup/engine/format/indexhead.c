/* SPDX-License-Identifier: Apache-2.0 */
/*
 * indexhead.c - see indexhead.h.
 */
#include "engine/format/indexhead.h"

#include "engine/format/address.h"
#include "engine/format/fields.h"
#include "engine/format/index.h"
#include "engine/format/packedframe.h"
#include "engine/format/pairs.h"

#define HEAD_FIELDS(F)                                                        \
    F(NUMBER, 12, 4, id.kind)                                                 \
    F(BYTES, 16, 16, catalog_id)                                              \
    F(NUMBER, 32, 8, id.number)                                               \
    F(NUMBER, 40, 4, id.bits)                                                 \
    F(NUMBER, 44, 4, id.shard)                                                \
    F(NUMBER, 48, 8, items)                                                   \
    F(NUMBER, 56, 8, seed)                                                    \
    F(NUMBER, 64, 4, flags)                                                   \
    F(NUMBER, 72, 8, length)

static const gd_sealed layout = {
    GD_INDEX_HEAD, "GDINDEX", 1, "file of the index"};

enum {
    ITEMS_BYTES = GD_FRAME_MAX - GD_FRAME_CHECKSUM,
};
_Static_assert(GD_PACKED_ITEMS * GD_INDEX_RECORD <= GD_FRAME_MAX,
               "the records of a packed frame fit in the place of a frame");

static bool
has_records(gd_index_kind kind)
{
    return kind == GD_INDEX_SHARD || kind == GD_INDEX_RUN ||
           kind == GD_INDEX_GONE;
}

size_t
gd_index_head_item_size(gd_index_kind kind)
{
    return has_records(kind)         ? GD_INDEX_RECORD
           : kind == GD_INDEX_PAIRS ? GD_PAIR_SIZE
                                    : GD_CURSOR_SIZE;
}

size_t
gd_index_head_frame_items(gd_index_kind kind)
{
    return ITEMS_BYTES / gd_index_head_item_size(kind);
}

bool
gd_index_head_is_packed(const gd_index_head *head)
{
    return head->id.kind == GD_INDEX_SHARD;
}

uint64_t
gd_index_head_frames(const gd_index_head *head)
{
    if (gd_index_head_is_packed(head)) {
        uint64_t bytes = head->length - GD_INDEX_HEAD;
        return bytes / GD_PACKED_FRAME + (bytes % GD_PACKED_FRAME != 0);
    }
    uint64_t most = gd_index_head_frame_items(head->id.kind);
    return head->items / most + (head->items % most != 0);
}

size_t
gd_index_head_items_in(const gd_index_head *head, uint64_t frame)
{
    uint64_t most = gd_index_head_frame_items(head->id.kind);
    uint64_t left = head->items - frame * most;
    return (size_t)(left < most ? left : most);
}

uint64_t
gd_index_head_frame_start(const gd_index_head *head, uint64_t frame)
{
    if (gd_index_head_is_packed(head)) {
        return frame < gd_index_head_frames(head)
                   ? GD_INDEX_HEAD + frame * GD_PACKED_FRAME
                   : head->length;
    }
    uint64_t most = gd_index_head_frame_items(head->id.kind);
    uint64_t items = frame * most < head->items ? frame * most : head->items;
    return GD_INDEX_HEAD + items * gd_index_head_item_size(head->id.kind) +
           frame * GD_FRAME_CHECKSUM;
}

void
gd_index_head_encode(const gd_index_head *head, uint8_t out[GD_INDEX_HEAD])
{
    gd_index_head written = *head, *value = &written;
    if (!gd_index_head_is_packed(head)) {
        written.length = 0;
    }
    gd_fields_begin(&layout, out);
    HEAD_FIELDS(GD_ENCODE)
    gd_fields_seal(&layout, 0, out);
}

/* Returns whether the head describes a file of this length. */
static bool
has_length(const gd_index_head *head, uint64_t length)
{
    /* More items than this cannot lie in any file, and overflow nothing. */
    const uint64_t most = UINT64_C(1) << 48;
    if (head->items > most) {
        return false;
    }
    if (!gd_index_head_is_packed(head)) {
        return gd_index_head_frame_start(head, gd_index_head_frames(head)) ==
               length;
    }
    if (head->length != length || length < GD_INDEX_HEAD) {
        return false;
    }
    uint64_t frames = gd_index_head_frames(head);
    return frames <= head->items && head->items <= frames * GD_PACKED_ITEMS;
}

gd_status
gd_index_head_decode(const uint8_t in[GD_INDEX_HEAD], const gd_index_id *id,
                     const uint8_t catalog_id[GD_ID_SIZE], uint64_t length,
                     gd_index_head *value, gd_error *err)
{
    char name[GD_NAME_SIZE];
    gd_names_index(id, name);
    GD_TRY(gd_fields_check(&layout, in, name, err));
    HEAD_FIELDS(GD_DECODE)
    if (value->id.kind != id->kind || value->id.number != id->number ||
        value->id.bits != id->bits || value->id.shard != id->shard) {
        return gd_fail(err, GD_CORRUPT, "%s had another name", name);
    }
    if (catalog_id != NULL &&
        memcmp(value->catalog_id, catalog_id, GD_ID_SIZE) != 0) {
        return gd_fail(err, GD_CORRUPT, "%s is of another catalog", name);
    }
    if (!has_length(value, length)) {
        return gd_fail(err, GD_CORRUPT,
                       "%s has %llu bytes, which is not the length of %llu "
                       "items", name, (unsigned long long)length,
                       (unsigned long long)value->items);
    }
    return GD_OK;
}

/* ---- frames ---- */

void
gd_index_head_seal_frame(const gd_index_head *head, uint64_t frame,
                         uint8_t *items,
                         size_t count)
{
    size_t length = count * gd_index_head_item_size(head->id.kind);
    gd_put64(items + length, gd_checksum(items, length, head->seed + frame));
}

/* Returns whether a record may follow `before`, unless that is NULL, in this
 * file. */
static bool
good_record(const gd_index_head *head, const uint8_t *record,
            const uint8_t *before)
{
    uint64_t key = gd_index_key(record), address = gd_index_address(record);
    if (!gd_address_is_valid(address) ||
        gd_index_shard(key, head->id.bits) != head->id.shard) {
        return false;
    }
    if (before == NULL || gd_index_key(before) < key) {
        return true;
    }
    return gd_index_key(before) == key && head->id.kind != GD_INDEX_SHARD &&
           gd_index_address(before) < address;
}

static bool
good_cursor(const uint8_t *cursor, const uint8_t *before)
{
    uint32_t group = gd_get32(cursor);
    return group >= 1 && group <= GD_MAX_GROUP &&
           gd_get32(cursor + 4) <= GD_MAX_SLOTS &&
           (before == NULL || gd_get32(before) < group);
}

static bool
good_item(const gd_index_head *head, const uint8_t *item,
          const uint8_t *before)
{
    if (has_records(head->id.kind)) {
        return good_record(head, item, before);
    }
    return head->id.kind == GD_INDEX_PAIRS
               ? gd_address_is_valid(gd_get64(item)) &&
                     gd_address_is_valid(gd_get64(item + 8)) &&
                     gd_get64(item) != gd_get64(item + 8)
               : good_cursor(item, before);
}

/* before: the last item of the frame before, or NULL. */
static gd_status
require_items(const gd_index_head *head, uint64_t frame, const uint8_t *items,
              size_t count, const uint8_t *before, gd_error *err)
{
    size_t size = gd_index_head_item_size(head->id.kind);
    char name[GD_NAME_SIZE];
    for (size_t i = 0; i < count; i++) {
        if (!good_item(head, items + i * size, before)) {
            gd_names_index(&head->id, name);
            return gd_fail(err, GD_CORRUPT,
                           "item %zu of frame %llu of %s cannot be there", i,
                           (unsigned long long)frame, name);
        }
        before = items + i * size;
    }
    return GD_OK;
}

static gd_status
fail_checksum(const gd_index_head *head, uint64_t frame, gd_error *err)
{
    char name[GD_NAME_SIZE];
    gd_names_index(&head->id, name);
    return gd_fail(err, GD_CORRUPT,
                   "the checksum of frame %llu of %s is wrong",
                   (unsigned long long)frame, name);
}

gd_status
gd_index_head_require_frame(const gd_index_head *head, uint64_t frame,
                            const uint8_t *items, const uint8_t *before,
                            gd_error *err)
{
    size_t size = gd_index_head_item_size(head->id.kind);
    size_t count = gd_index_head_items_in(head, frame), length = count * size;
    return gd_get64(items + length) !=
                   gd_checksum(items, length, head->seed + frame)
               ? fail_checksum(head, frame, err)
               : require_items(head, frame, items, count, before, err);
}

gd_status
gd_index_head_unpack_frame(const gd_index_head *head, uint64_t frame,
                           const uint8_t *packed, size_t length,
                           const uint8_t *before, uint8_t *out, size_t *count,
                           gd_error *err)
{
    return !gd_packedframe_unpack(packed, length, head->seed + frame, out,
                                  count)
               ? fail_checksum(head, frame, err)
               : require_items(head, frame, out, *count, before, err);
}
