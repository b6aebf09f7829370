/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_disk.c - files of disk formats with any bytes: the pieces are the disk, in
 * order, each lies within the file, and a map takes a bounded number of reads
 * and pieces.
 *
 * Input: the file's size in units of 512 bytes (4) and bytes beyond (1), then
 * patches: the place in units of 4 bytes (3), the length (1), how often the
 * bytes are repeated (1), the bytes.
 */
#include "engine/disk/diskformat.h"
#include "tests/fuzz/fuzz.h"

enum { MEMORY = 4 << 20, UNIT = 512 };

static uint8_t bytes[MEMORY];
static size_t used; /* behind it, all bytes are zeros */
static uint64_t file_size, bytes_read, pieces, end;

static gd_status
read_file(void *arg, uint8_t *out, size_t length, uint64_t offset,
          gd_error *err)
{
    (void)arg;
    (void)err;
    MUST(offset <= file_size && length <= file_size - offset);
    bytes_read += length;
    memset(out, 0, length);
    if (offset < used) {
        uint64_t here = used - offset;
        memcpy(out, bytes + offset, here < length ? (size_t)here : length);
    }
    return GD_OK;
}

static gd_status
take_piece(void *arg, const gd_disk_piece *p, gd_error *err)
{
    uint64_t length = p->kind >= GD_DISK_DEFLATED ? p->room
                      : p->kind == GD_DISK_PLAIN  ? p->length
                                                  : 0;
    (void)arg;
    (void)err;
    MUST(p->offset == end && p->length > 0 && p->length <= GD_DISK_MAX_SIZE);
    MUST(p->place <= file_size && length <= file_size - p->place);
    MUST(p->min_plain <= p->max_plain && p->max_plain <= GD_DISK_MAX_CLUSTER);
    MUST(p->kind < GD_DISK_DEFLATED ||
         (length > 0 && p->length <= p->max_plain));
    end += p->length;
    pieces++;
    return GD_OK;
}

static void
patch(input *in)
{
    size_t at = take_number(in, 3) % (MEMORY / 4) * 4;
    size_t length = take8(in);
    uint32_t times = take8(in) + 1u;
    uint8_t from[256];
    take_bytes(in, from, length);
    for (uint32_t i = 0; i < times && at + length <= MEMORY; i++) {
        memcpy(bytes + at, from, length);
        at += length;
    }
    used = at > used ? at : used;
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    gd_disk_format format;
    uint64_t disk;
    gd_error err;
    file_size = (uint64_t)take32(&in) * UNIT;
    file_size += take8(&in);
    bytes_read = pieces = end = 0;
    memset(bytes, 0, used);
    used = 0;
    while (in.left > 0) {
        patch(&in);
    }
    gd_disk_file file = {read_file, NULL, file_size, take_piece, NULL};
    gd_status status = gd_diskformat_map(&file, &format, &disk, &err);
    MUST(status == GD_OK || status == GD_INVALID);
    MUST(status != GD_OK || format == GD_DISK_RAW || end == disk);
    MUST(bytes_read <= file_size + (64 << 10));
    MUST(pieces <= file_size / 256 + 1024);
    return 0;
}
