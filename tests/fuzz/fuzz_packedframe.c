/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_packedframe.c - any bytes are a packed frame, which unpacks within its
 * buffers, or are refused; and the records of a frame, packed again, are the
 * same.
 *
 * Input: flags (1: the checksum is corrected; 2: the frame is filled up with
 * zeros to the size of one that is not the last), and its bytes.
 */
#include "engine/base/coding.h"
#include "engine/format/index.h"
#include "engine/format/indexhead.h"
#include "engine/format/packedframe.h"
#include "tests/fuzz/fuzz.h"

enum {
    SEED = 77,
    RIGHT = 1, /* flags */
    FILLED = 2,
    RECORDS = GD_PACKED_ITEMS * GD_INDEX_RECORD,
};

/* The records' numbers are at most those that determined the widths. */
static void
pack_again(const uint8_t *records, size_t count, bool padded)
{
    gd_frame_shape shape = {0};
    uint8_t *frame = malloc(GD_PACKED_FRAME), *back = malloc(RECORDS);
    size_t found;
    MUST(frame != NULL && back != NULL);
    for (size_t i = 0; i < count; i++) {
        MUST(gd_frame_shape_add(&shape, records + i * GD_INDEX_RECORD));
    }
    size_t length = gd_packedframe_pack(&shape, records, SEED, padded, frame);
    MUST(length <= GD_PACKED_FRAME);
    MUST(!padded || length == GD_PACKED_FRAME);
    MUST(gd_packedframe_unpack(frame, length, SEED, back, &found));
    MUST(found == count);
    MUST(memcmp(records, back, count * GD_INDEX_RECORD) == 0);
    MUST(!gd_packedframe_unpack(frame, length, SEED + 1, back, &found));
    MUST(!gd_packedframe_unpack(frame, length - 1, SEED, back, &found));
    free(frame);
    free(back);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    uint8_t flags = take8(&in);
    size_t length = in.left < GD_PACKED_FRAME ? in.left : GD_PACKED_FRAME;
    if ((flags & FILLED) != 0) {
        length = GD_PACKED_FRAME;
    }
    uint8_t *frame = malloc(length + 1), *records = malloc(RECORDS);
    MUST(frame != NULL && records != NULL);
    take_bytes(&in, frame, length);
    if ((flags & RIGHT) != 0 && length >= GD_FRAME_CHECKSUM) {
        gd_put64(frame + length - GD_FRAME_CHECKSUM,
                 gd_checksum(frame, length - GD_FRAME_CHECKSUM, SEED));
    }
    size_t count;
    if (gd_packedframe_unpack(frame, length, SEED, records, &count)) {
        MUST(count >= 1 && count <= GD_PACKED_ITEMS);
        pack_again(records, count, (flags & FILLED) != 0);
    }
    free(frame);
    free(records);
    return 0;
}
