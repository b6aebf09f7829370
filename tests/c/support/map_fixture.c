/* SPDX-License-Identifier: Apache-2.0 */
/*
 * map_fixture.c - see map_fixture.h.
 */
#include "tests/c/support/map_fixture.h"

#include "tests/c/support/check.h"

map_fixture mapped;

static gd_status
read_file(void *arg, uint8_t *out, size_t length, uint64_t offset,
          gd_error *err)
{
    (void)arg;
    mapped.bytes_read += length;
    if (!CHECK(offset <= mapped.size && length <= mapped.size - offset) ||
        mapped.unreadable) {
        return gd_fail(err, GD_IO, "the file cannot be read");
    }
    memset(out, 0, length);
    if (offset < MAP_FILE) {
        uint64_t here = MAP_FILE - offset;
        memcpy(out, mapped.bytes + offset,
               here < length ? (size_t)here : length);
    }
    return GD_OK;
}

static gd_status
take_piece(void *arg, const gd_disk_piece *piece, gd_error *err)
{
    (void)arg;
    (void)err;
    if (mapped.count < MAP_PIECES) {
        mapped.pieces[mapped.count] = *piece;
    }
    mapped.count++;
    return GD_OK;
}

void
map_begin(uint64_t size)
{
    memset(&mapped, 0, sizeof mapped);
    mapped.size = size;
}

void
map_put_be(uint64_t at, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        mapped.bytes[at + i] = (uint8_t)(value >> 8 * (bytes - 1 - i));
    }
}

void
map_put_le(uint64_t at, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        mapped.bytes[at + i] = (uint8_t)(value >> 8 * i);
    }
}

/* The pieces are the disk, in order, and lie within the file. */
static void
check_pieces(bool whole)
{
    uint64_t end = 0;
    for (size_t i = 0; i < mapped.count && i < MAP_PIECES; i++) {
        const gd_disk_piece *p = &mapped.pieces[i];
        uint64_t bytes = p->kind >= GD_DISK_DEFLATED ? p->room
                         : p->kind == GD_DISK_PLAIN  ? p->length
                                                     : 0;
        CHECK(p->offset == end && p->length > 0);
        CHECK(p->place <= mapped.size && bytes <= mapped.size - p->place);
        CHECK(p->min_plain <= p->max_plain &&
              p->max_plain <= GD_DISK_MAX_CLUSTER);
        end += p->length;
    }
    CHECK(!whole || mapped.count > MAP_PIECES || end == mapped.disk_size);
}

gd_status
map_run(void)
{
    gd_disk_file file = {read_file, NULL, mapped.size, take_piece, NULL};
    mapped.count = mapped.bytes_read = 0;
    mapped.err.text[0] = '\0';
    gd_status status = gd_diskformat_map(&file, &mapped.format,
                                         &mapped.disk_size, &mapped.err);
    check_pieces(status == GD_OK && mapped.format != GD_DISK_RAW);
    CHECK(mapped.bytes_read <= mapped.size + (64 << 10));
    return status;
}

void
map_check_refused(const char *words, const char *file, int line)
{
    gd_status status = map_run();
    check_ints(status, GD_INVALID, file, line, words);
    if (status != GD_OK) {
        check_text(mapped.err.text, words, file, line);
    }
}

void
map_check_piece(size_t number, gd_disk_piece_kind kind, uint64_t length,
                uint64_t place, const char *file, int line)
{
    const gd_disk_piece *p = &mapped.pieces[number];
    if (check_note(number < mapped.count, file, line, "there is such a piece")) {
        check_ints(p->kind, kind, file, line, "the kind");
        check_ints((int64_t)p->length, (int64_t)length, file, line, "length");
        check_ints((int64_t)p->place, (int64_t)place, file, line, "place");
    }
}
