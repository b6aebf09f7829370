/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volumerecord.h - the records of a volume's journal (format-volumes.rst).
 */
#ifndef GD_VOLUMERECORD_H
#define GD_VOLUMERECORD_H

#include <stdbool.h>
#include <stdint.h>

enum {
    GD_RECORD_HEAD = 56,
    GD_RECORD_ALIGN = 8,
    GD_RECORD_DATA = 65536, /* bytes of data in one record, at most */
};

typedef enum gd_record_kind {
    GD_RECORD_BYTES = 1,
    GD_RECORD_ZEROS = 2,
    GD_RECORD_MARK = 3,
    GD_RECORD_STORED = 4, /* no earlier journal is needed any more */
} gd_record_kind;

typedef struct gd_record {
    gd_record_kind kind;
    uint64_t sequence;
    uint64_t offset;  /* in the volume; of a mark: the part; else 0 */
    uint64_t length;  /* bytes; of a mark: the edition; else 0 */
    uint64_t durable; /* up to where the journal was synced */
    uint64_t checksum; /* of the data */
} gd_record;

/* Returns the bytes that the record takes in the journal. */
static inline uint64_t
gd_record_size(const gd_record *record)
{
    uint64_t data = record->kind == GD_RECORD_BYTES ? record->length : 0;
    return GD_RECORD_HEAD + (data + GD_RECORD_ALIGN - 1) / GD_RECORD_ALIGN *
                                GD_RECORD_ALIGN;
}

/* Without the data.  seed is the journal's. */
void gd_record_encode(const gd_record *record, uint64_t seed,
                      uint8_t out[GD_RECORD_HEAD]);
/* False unless this is the head of a record of the journal with this seed, of a
 * volume of this size.  The data is not looked at. */
bool gd_record_decode(const uint8_t in[GD_RECORD_HEAD], uint64_t seed,
                      uint64_t size, gd_record *record);

#endif
