/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volumehead.c - see volumehead.h.
 */
#include "engine/format/volumehead.h"

#include <string.h>

#include "engine/base/coding.h"

#define HEAD_MAGIC "GDVOLJ\0" /* with its final zero: 8 bytes */

enum {
    MAJOR = 1,
    MINOR = 0,
    CHECKED = GD_VOLUME_HEAD - 8, /* bytes under the checksum */
    AT_PROJECT = 136,
    AT_SOURCE = 264,
    AT_COUNTERS = 392,
    COUNTERS = 12, /* the rest of the 16 are zeros */
    LOG_LEAST_PART = 16,
    LOG_MOST_PART = 40,
};

/* ---- the head ---- */

static void
encode_counters(const gd_volume_counters *c, uint8_t *out)
{
    const uint64_t values[COUNTERS] = {
        c->read,    c->written,    c->zeroed,    c->flushes,
        c->checkpoints, c->unique, c->duplicate, c->zero,
        c->overwritten, c->skipped, c->prefetches, c->prefetched};
    for (int i = 0; i < COUNTERS; i++) {
        gd_put64(out + 8 * i, values[i]);
    }
}

static void
decode_counters(const uint8_t *in, gd_volume_counters *c)
{
    uint64_t *const values[COUNTERS] = {
        &c->read,    &c->written,    &c->zeroed,    &c->flushes,
        &c->checkpoints, &c->unique, &c->duplicate, &c->zero,
        &c->overwritten, &c->skipped, &c->prefetches, &c->prefetched};
    for (int i = 0; i < COUNTERS; i++) {
        *values[i] = gd_get64(in + 8 * i);
    }
}

void
gd_volume_head_encode(const gd_volume_head *head, uint8_t out[GD_VOLUME_HEAD])
{
    size_t project = strlen(head->project);
    memset(out, 0, GD_VOLUME_HEAD);
    memcpy(out, HEAD_MAGIC, 8);
    gd_put16(out + 8, MAJOR);
    gd_put16(out + 10, MINOR);
    gd_put32(out + 12, head->journal);
    memcpy(out + 16, head->repository_id, GD_ID_SIZE);
    memcpy(out + 32, head->volume_id, GD_ID_SIZE);
    memcpy(out + 48, head->scope.id, GD_ID_SIZE);
    gd_put64(out + 64, head->seed);
    gd_put64(out + 72, head->size);
    gd_put64(out + 80, head->base_size);
    gd_put64(out + 88, head->part_size);
    gd_put32(out + 96, head->state);
    gd_put32(out + 100, head->needed);
    gd_put64(out + 104, head->before);
    gd_put64(out + 112, head->created);
    gd_put32(out + 120, head->marks);
    gd_put32(out + 124, (uint32_t)project);
    gd_put64(out + 128, head->marks_checksum);
    memcpy(out + AT_PROJECT, head->project, project);
    memcpy(out + AT_SOURCE, head->source, strlen(head->source));
    encode_counters(&head->counters, out + AT_COUNTERS);
    gd_put64(out + CHECKED, gd_checksum(out, CHECKED, 0));
}

bool
gd_volume_size_allowed(uint64_t size)
{
    return size >= GD_VOLUME_SECTOR && size <= GD_VOLUME_MAX_SIZE &&
           size % GD_VOLUME_SECTOR == 0;
}

bool
gd_volume_part_size_allowed(uint64_t size)
{
    return size >= UINT64_C(1) << LOG_LEAST_PART &&
           size <= UINT64_C(1) << LOG_MOST_PART && (size & (size - 1)) == 0;
}

static bool
in_bounds(const gd_volume_head *head)
{
    static const uint8_t zeros[GD_ID_SIZE];
    return head->journal >= 1 && head->needed >= 1 &&
           head->needed <= head->journal &&
           memcmp(head->volume_id, zeros, GD_ID_SIZE) != 0 &&
           gd_volume_size_allowed(head->size) &&
           gd_volume_part_size_allowed(head->part_size) &&
           head->base_size <= head->size && head->state >= GD_VOLUME_MAKING &&
           head->state <= GD_VOLUME_DELETING &&
           head->marks <= gd_volume_parts(head);
}

gd_status
gd_volume_head_decode(const uint8_t in[GD_VOLUME_HEAD], const char *file,
                      gd_volume_head *head, gd_error *err)
{
    memset(head, 0, sizeof *head);
    if (memcmp(in, HEAD_MAGIC, 8) != 0) {
        return gd_fail(err, GD_CORRUPT, "%s is not a volume's journal", file);
    }
    if (gd_get16(in + 8) > MAJOR) {
        return gd_fail(err, GD_VERSION,
                       "%s has version %u, this program knows %d", file,
                       (unsigned)gd_get16(in + 8), MAJOR);
    }
    head->journal = gd_get32(in + 12);
    memcpy(head->repository_id, in + 16, GD_ID_SIZE);
    memcpy(head->volume_id, in + 32, GD_ID_SIZE);
    memcpy(head->scope.id, in + 48, GD_ID_SIZE);
    head->seed = gd_get64(in + 64);
    head->size = gd_get64(in + 72);
    head->base_size = gd_get64(in + 80);
    head->part_size = gd_get64(in + 88);
    head->state = (gd_volume_state)gd_get32(in + 96);
    head->needed = gd_get32(in + 100);
    head->before = gd_get64(in + 104);
    head->created = gd_get64(in + 112);
    head->marks = gd_get32(in + 120);
    uint32_t project = gd_get32(in + 124);
    head->marks_checksum = gd_get64(in + 128);
    decode_counters(in + AT_COUNTERS, &head->counters);
    if (gd_get64(in + CHECKED) != gd_checksum(in, CHECKED, 0) ||
        project > GD_PROJECT_MAX || !in_bounds(head)) {
        return gd_fail(err, GD_CORRUPT, "%s: the head is damaged", file);
    }
    memcpy(head->project, in + AT_PROJECT, project);
    memcpy(head->source, in + AT_SOURCE, GD_IMAGE_ID_MAX);
    char name[GD_NAME_SIZE];
    return head->source[0] == '\0' ||
                   gd_image_name(head->source, name, NULL) == GD_OK
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
        if (marks[i].part >= gd_volume_parts(head) || marks[i].edition == 0 ||
            (i > 0 && marks[i].part <= marks[i - 1].part)) {
            return gd_fail(err, GD_CORRUPT,
                           "%s: mark %u is out of bounds or out of order",
                           file, (unsigned)i);
        }
    }
    return GD_OK;
}
