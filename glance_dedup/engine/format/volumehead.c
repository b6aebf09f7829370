/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volumehead.c - see volumehead.h.
 */
#include "engine/format/volumehead.h"

#include "engine/format/fields.h"

enum {
    LOG_MIN_PART = 16,
    LOG_MAX_PART = 40,
};

/* ---- the head ---- */

#define HEAD_FIELDS(F)                                                        \
    F(NUMBER, 12, 4, journal)                                                 \
    F(BYTES, 16, 16, repository_id)                                           \
    F(BYTES, 32, 16, volume_id)                                               \
    F(BYTES, 48, 16, scope.id)                                                \
    F(NUMBER, 64, 8, seed)                                                    \
    F(NUMBER, 72, 8, size)                                                    \
    F(NUMBER, 80, 8, base_size)                                               \
    F(NUMBER, 88, 8, part_size)                                               \
    F(NUMBER, 96, 4, state)                                                   \
    F(NUMBER, 100, 4, needed)                                                 \
    F(NUMBER, 104, 8, before)                                                 \
    F(NUMBER, 112, 8, created)                                                \
    F(NUMBER, 120, 4, marks)                                                  \
    F(NUMBER, 128, 8, marks_checksum)                                         \
    F(TEXT, 136, 128, project)                                                \
    F(LENGTH, 124, 4, project)                                                \
    F(TEXT, 264, 128, source)                                                 \
    F(NUMBER, 392, 8, counters.read)                                          \
    F(NUMBER, 400, 8, counters.written)                                       \
    F(NUMBER, 408, 8, counters.zeroed)                                        \
    F(NUMBER, 416, 8, counters.flushes)                                       \
    F(NUMBER, 424, 8, counters.checkpoints)                                   \
    F(NUMBER, 432, 8, counters.unique)                                        \
    F(NUMBER, 440, 8, counters.duplicate)                                     \
    F(NUMBER, 448, 8, counters.zero)                                          \
    F(NUMBER, 456, 8, counters.overwritten)                                   \
    F(NUMBER, 464, 8, counters.skipped)                                       \
    F(NUMBER, 472, 8, counters.prefetches)                                    \
    F(NUMBER, 480, 8, counters.prefetched)                                    \
    F(NUMBER, 520, 8, before_durable)

static const gd_sealed layout = {
    GD_VOLUME_HEAD, "GDVOLJ\0", 1, "volume's journal"};

void
gd_volume_head_encode(const gd_volume_head *value, uint8_t out[GD_VOLUME_HEAD])
{
    gd_fields_begin(&layout, out);
    HEAD_FIELDS(GD_ENCODE)
    gd_fields_seal(&layout, 0, out);
}

bool
gd_volume_head_size_allowed(uint64_t size)
{
    return size >= GD_VOLUME_SECTOR && size <= GD_VOLUME_MAX_SIZE &&
           size % GD_VOLUME_SECTOR == 0;
}

bool
gd_volume_head_part_size_allowed(uint64_t size)
{
    return size >= UINT64_C(1) << LOG_MIN_PART &&
           size <= UINT64_C(1) << LOG_MAX_PART && (size & (size - 1)) == 0;
}

static bool
in_bounds(const gd_volume_head *head)
{
    static const uint8_t zeros[GD_ID_SIZE];
    return head->journal >= 1 && head->needed >= 1 &&
           head->needed <= head->journal &&
           head->before_durable <= head->before &&
           memcmp(head->volume_id, zeros, GD_ID_SIZE) != 0 &&
           gd_volume_head_size_allowed(head->size) &&
           gd_volume_head_part_size_allowed(head->part_size) &&
           head->base_size <= head->size && head->state >= GD_VOLUME_MAKING &&
           head->state <= GD_VOLUME_DELETING &&
           head->marks <= gd_volume_head_parts(head);
}

gd_status
gd_volume_head_decode(const uint8_t in[GD_VOLUME_HEAD], const char *file,
                      gd_volume_head *value, gd_error *err)
{
    memset(value, 0, sizeof *value);
    GD_TRY(gd_fields_check(&layout, in, file, err));
    bool good = true;
    HEAD_FIELDS(GD_DECODE)
    if (!good || !in_bounds(value)) {
        return gd_fail(err, GD_CORRUPT, "%s: the head is damaged", file);
    }
    if (value->before_durable == 0) {
        value->before_durable = value->before; /* of a time when it always was */
    }
    char name[GD_NAME_SIZE];
    return value->source[0] == '\0' ||
                   gd_names_image(value->source, name, NULL) == GD_OK
               ? GD_OK
               : gd_fail(err, GD_CORRUPT, "%s: the id of the image that the "
                         "volume was cloned from is damaged", file);
}

/* ---- marks ---- */

void
gd_volume_marks_encode(const gd_volume_mark *marks, uint32_t count,
                       uint8_t *out)
{
    for (uint32_t i = 0; i < count; i++) {
        gd_put64(out + (size_t)i * GD_VOLUME_MARK, marks[i].part);
        gd_put64(out + (size_t)i * GD_VOLUME_MARK + 8, marks[i].edition);
    }
}

gd_status
gd_volume_marks_decode(const uint8_t *in, const gd_volume_head *head,
                       const char *file, gd_volume_mark *marks, gd_error *err)
{
    size_t bytes = (size_t)head->marks * GD_VOLUME_MARK;
    if (gd_checksum(in, bytes, head->seed) != head->marks_checksum) {
        return gd_fail(err, GD_CORRUPT, "%s: the marks behind the head are "
                       "damaged", file);
    }
    for (uint32_t i = 0; i < head->marks; i++) {
        marks[i].part = gd_get64(in + (size_t)i * GD_VOLUME_MARK);
        marks[i].edition = gd_get64(in + (size_t)i * GD_VOLUME_MARK + 8);
        if (marks[i].part >= gd_volume_head_parts(head) ||
            marks[i].edition == 0 ||
            (i > 0 && marks[i].part <= marks[i - 1].part)) {
            return gd_fail(err, GD_CORRUPT,
                           "%s: mark %u is out of bounds or out of order",
                           file, (unsigned)i);
        }
    }
    return GD_OK;
}
