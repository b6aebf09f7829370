/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volumehead.h - the head of a volume's journal: the volume's whole state
 * (format-volumes.rst).
 */
#ifndef GD_VOLUMEHEAD_H
#define GD_VOLUMEHEAD_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/format/fingerprint.h"
#include "engine/format/names.h"

enum {
    GD_VOLUME_HEAD = 4096, /* bytes of a head without its marks */
    GD_VOLUME_SECTOR = 512, /* a volume's size is a multiple of it */
    GD_VOLUME_MARK = 16,
};
#define GD_VOLUME_MAX_SIZE (UINT64_C(1) << 46)

typedef enum gd_volume_state {
    GD_VOLUME_MAKING = 1,
    GD_VOLUME_READY = 2,
    GD_VOLUME_DELETING = 3,
} gd_volume_state;

/* Counts of the volume's whole life; all but flushes, checkpoints and
 * prefetches in bytes. */
typedef struct gd_volume_counters {
    uint64_t read;
    uint64_t written;
    uint64_t zeroed;      /* trimmed or zeroed */
    uint64_t flushes;
    uint64_t checkpoints;
    uint64_t unique;      /* stored by checkpoints as new blocks, */
    uint64_t duplicate;   /* found to be stored already, */
    uint64_t zero;        /* found to be zeros */
    uint64_t overwritten; /* written again before a checkpoint */
    uint64_t skipped;     /* stored without a look-up, because of a hint */
    uint64_t prefetches;  /* fingerprint stores that were prefetched */
    uint64_t prefetched;  /* found to be duplicates in such stores */
} gd_volume_counters;

typedef struct gd_volume_mark {
    uint64_t part;
    uint64_t edition;
} gd_volume_mark;

typedef struct gd_volume_head {
    uint32_t journal; /* its number */
    uint32_t needed;  /* the first journal that is still needed (V8) */
    uint64_t before;  /* where the records of the journal before this end, */
    uint64_t before_durable; /* and up to where they were durable then (V11) */
    uint8_t repository_id[GD_ID_SIZE];
    uint8_t volume_id[GD_ID_SIZE];
    gd_scope scope;
    uint64_t seed; /* of the records */
    uint64_t size;
    uint64_t base_size;
    uint64_t part_size;
    gd_volume_state state;
    uint64_t created; /* seconds since the epoch */
    uint32_t marks;   /* how many follow */
    uint64_t marks_checksum;
    char project[GD_PROJECT_MAX + 1];
    char source[GD_IMAGE_ID_MAX + 1]; /* cloned from; "": from none */
    gd_volume_counters counters;
} gd_volume_head;

/* Returns where the records begin. */
static inline uint64_t
gd_volume_head_records_start(uint32_t marks)
{
    uint64_t bytes = (uint64_t)marks * GD_VOLUME_MARK;
    return GD_VOLUME_HEAD + (bytes + 4095) / 4096 * 4096;
}

/* Returns how many parts the volume has. */
static inline uint64_t
gd_volume_head_parts(const gd_volume_head *head)
{
    return (head->size + head->part_size - 1) / head->part_size;
}

bool gd_volume_head_size_allowed(uint64_t size);
bool gd_volume_head_part_size_allowed(uint64_t size);

void gd_volume_head_encode(const gd_volume_head *head,
                           uint8_t out[GD_VOLUME_HEAD]);
/* GD_CORRUPT naming the file, GD_VERSION for a newer major version. */
gd_status gd_volume_head_decode(const uint8_t in[GD_VOLUME_HEAD],
                                const char *file, gd_volume_head *head,
                                gd_error *err);

void gd_volume_marks_encode(const gd_volume_mark *marks, uint32_t count,
                            uint8_t *out);
/* Marks must be sorted, of parts within the size, with editions from 1. */
gd_status gd_volume_marks_decode(const uint8_t *in, const gd_volume_head *head,
                                 const char *file, gd_volume_mark *marks,
                                 gd_error *err);

#endif
