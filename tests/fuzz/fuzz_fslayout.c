/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_fslayout.c - disks with any partition tables and superblocks: the found
 * ranges are within the disk, in order, and take a bounded number of reads.
 *
 * Input: the disk's size in sectors (6), then pieces: the sector (2), the
 * place in it in units of 4 bytes (1), the length (1), the bytes.
 */
#include "engine/volume/fslayout.h"
#include "tests/fuzz/fuzz.h"

enum { MAX_SIZE = 4 << 20, SECTOR = 512, MAX_READ = 17 << 20 };

static uint8_t disk[MAX_SIZE];
static uint64_t size_of_disk, bytes_read;

static bool
read_disk(void *arg, uint8_t *out, size_t length, uint64_t offset)
{
    (void)arg;
    MUST(offset <= size_of_disk && length <= size_of_disk - offset);
    bytes_read += length;
    memset(out, 0, length);
    for (size_t i = 0; i < length && offset + i < MAX_SIZE; i++) {
        out[i] = disk[offset + i];
    }
    return true;
}

static void
require_rules(const gd_fslayout *found)
{
    uint64_t end = 0;
    MUST(found->count <= GD_FS_RANGES);
    for (size_t i = 0; i < found->count; i++) {
        const gd_range *r = &found->ranges[i];
        MUST(i == 0 || r->offset > end);
        MUST(r->length > 0 && r->length <= size_of_disk &&
             r->offset <= size_of_disk - r->length);
        MUST(gd_fslayout_next(found, r->offset) == r);
        end = r->offset + r->length;
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static gd_fslayout rare, copies;
    input in = {data, size};
    size_of_disk = take_number(&in, 6) % (UINT64_C(1) << 37) * SECTOR;
    memset(disk, 0, sizeof disk);
    while (in.left > 0) {
        size_t at = take16(&in) % (MAX_SIZE / SECTOR) * SECTOR;
        at += take8(&in) % (SECTOR / 4) * 4;
        size_t length = take8(&in);
        for (size_t i = 0; i < length && at + i < MAX_SIZE; i++) {
            disk[at + i] = take8(&in);
        }
    }
    bytes_read = 0;
    gd_fslayout_find(read_disk, NULL, size_of_disk, &rare, &copies);
    MUST(bytes_read <= MAX_READ);
    require_rules(&rare);
    require_rules(&copies);
    return 0;
}
