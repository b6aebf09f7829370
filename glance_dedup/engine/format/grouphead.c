/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grouphead.c - see grouphead.h.
 */
#include "engine/format/grouphead.h"

#include "engine/base/zero.h"
#include "engine/format/address.h"
#include "engine/format/fields.h"

enum {
    /* Of the byte with the level: */
    LEVEL = 0x7f,
    SIMILAR = 0x80,
};

#define HEAD_FIELDS(F)                                                        \
    F(NUMBER, 8, 2, major)                                                    \
    F(NUMBER, 10, 2, minor)                                                   \
    F(NUMBER, 12, 4, number)                                                  \
    F(BYTES, 16, 16, repository_id)                                           \
    F(BYTES, 32, 16, scope.id)                                                \
    F(NUMBER, 48, 4, bounds.slots)                                            \
    F(NUMBER, 52, 4, bounds.max_block)                                        \
    F(BYTES, 56, 16, digest)                                                  \
    F(BYTES, 72, 16, identity)                                                \
    F(BYTES, 88, 16, object_id)                                               \
    F(NUMBER, 504, 8, bounds.seed)
/* The fields of a recompression, at 32 to 39, are below. */
#define RECORD_FIELDS(F)                                                      \
    F(NUMBER, 0, 8, sequence)                                                 \
    F(NUMBER, 8, 8, generation)                                               \
    F(NUMBER, 16, 4, count)                                                   \
    F(NUMBER, 20, 4, flags)                                                   \
    F(NUMBER, 24, 8, end)

static const gd_sealed head_layout = {
    GD_GROUP_HEAD, "GDGROUP", GD_GROUP_COLD, "block group"};
static const gd_sealed record_layout = {.size = GD_PUBLISHED_RECORD};

void
gd_group_head_encode(gd_group_head *value, uint8_t out[GD_GROUP_HEAD])
{
    memcpy(out, head_layout.magic, 8);
    HEAD_FIELDS(GD_ENCODE)
    value->bounds.seed = gd_fields_seal(&head_layout, 0, out);
    value->bounds.has_lists = value->major >= GD_GROUP_LISTS;
}

void
gd_group_head_change(uint8_t raw[GD_GROUP_HEAD], uint16_t major,
                     const uint8_t object_id[GD_ID_SIZE], gd_group_head *value)
{
    const uint8_t *in = raw;
    HEAD_FIELDS(GD_DECODE)
    if (major != 0) {
        value->major = major;
        value->minor = 0;
        memcpy(value->object_id, object_id, GD_ID_SIZE);
    }
    gd_group_head_encode(value, raw);
}

gd_status
gd_group_head_decode(const uint8_t in[GD_GROUP_HEAD], const gd_params *params,
                     uint32_t number, const char *name, gd_group_head *value,
                     gd_error *err)
{
    GD_TRY(gd_fields_check(&head_layout, in, name, err));
    HEAD_FIELDS(GD_DECODE)
    value->bounds.has_lists = value->major >= GD_GROUP_LISTS;
    if (memcmp(value->repository_id, params->repository_id, GD_ID_SIZE) != 0) {
        return gd_fail(err, GD_CORRUPT,
                       "%s belongs to another repository (offset 16)", name);
    }
    if (value->number != number) {
        return gd_fail(err, GD_CORRUPT,
                       "%s holds group %08x (offset 12): it was put under "
                       "another's name", name, value->number);
    }
    if (value->bounds.slots < GD_SLOTS_MIN ||
        value->bounds.slots > GD_MAX_SLOTS || value->bounds.max_block == 0 ||
        value->bounds.max_block > params->block_size) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: impossible bounds in the header (offset 48)", name);
    }
    if (memcmp(value->digest, params->digest, GD_DIGEST_NAME) != 0) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: its fingerprints are by another digest than the "
                       "repository's, %s (offset 56)", name, params->digest);
    }
    if (value->major == GD_GROUP_COLD &&
        gd_is_zero(value->object_id, GD_ID_SIZE)) {
        return gd_fail(err, GD_CORRUPT, "%s is cold, and names no object "
                       "(offset 88)", name);
    }
    return GD_OK;
}

/* ---- published records ---- */

/* Programs that know only bytes 32 and 33 would take these for the codec of
 * every segment, and keep them when they append.  So a group that is covered in
 * part has its codec in bytes that they write as zeros. */
static void
encode_recompression(const gd_published *record, uint32_t slots,
                     uint8_t out[GD_PUBLISHED_RECORD])
{
    uint8_t level = (uint8_t)(record->level | (record->similar ? SIMILAR : 0));
    if (record->covered == slots) {
        out[32] = record->codec;
        out[33] = level;
    } else if (record->covered > 0) {
        out[34] = record->codec;
        out[35] = level;
        gd_put32(out + 36, record->covered);
    }
}

static void
decode_recompression(const uint8_t in[GD_PUBLISHED_RECORD], gd_published *record)
{
    bool all = in[32] != 0;
    record->codec = in[all ? 32 : 34];
    record->level = in[all ? 33 : 35] & LEVEL;
    record->similar = (in[all ? 33 : 35] & SIMILAR) != 0;
    record->covered = all ? record->count : gd_get32(in + 36);
    if (record->codec == 0 || record->covered > record->count) {
        record->codec = record->level = 0;
        record->similar = false;
        record->covered = 0;
    }
}

void
gd_published_encode(const gd_published *value, const gd_entry_bounds *bounds,
                    uint8_t out[GD_PUBLISHED_RECORD])
{
    memset(out, 0, GD_PUBLISHED_RECORD);
    RECORD_FIELDS(GD_ENCODE)
    encode_recompression(value, bounds->slots, out);
    gd_fields_seal(&record_layout, bounds->seed, out);
}

bool
gd_published_decode(const uint8_t in[GD_PUBLISHED_RECORD],
                    const gd_entry_bounds *bounds, gd_published *value)
{
    RECORD_FIELDS(GD_DECODE)
    decode_recompression(in, value);
    /* One of the highest sequences could not be superseded; none gets there by
     * counting. */
    return gd_fields_verify(&record_layout, bounds->seed, in) &&
           value->count <= bounds->slots && value->sequence >> 63 == 0;
}
