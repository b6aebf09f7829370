/* SPDX-License-Identifier: Apache-2.0 */
/*
 * address_reader.c - see address_reader.h.
 */
#include "engine/read/address_reader.h"

#include <string.h>

#include "engine/read/verify.h"

struct gd_address_reader {
    gd_repo *repo;
    gd_group *group; /* borrowed; NULL: none */
    gd_decoder decoder;
    uint32_t segment; /* the one whose bytes are decoded; 0: none */
    gd_segment_header header;
};

gd_status
gd_address_reader_open(gd_repo *repo, gd_address_reader **out, gd_error *err)
{
    const gd_env *env = repo->env;
    gd_address_reader *reader = gd_calloc(env, 1, sizeof *reader, err);
    if (reader == NULL) {
        return GD_NOMEM;
    }
    reader->repo = repo;
    gd_status s = gd_decoder_open(env, repo->digest, &reader->decoder, err);
    if (s != GD_OK) {
        gd_address_reader_close(reader);
        return s;
    }
    *out = reader;
    return GD_OK;
}

static void
return_group(gd_address_reader *reader)
{
    if (reader->group != NULL) {
        gd_fpcache_return_group(reader->repo->cache, reader->group);
        reader->group = NULL;
    }
    reader->segment = 0;
}

void
gd_address_reader_close(gd_address_reader *reader)
{
    if (reader == NULL) {
        return;
    }
    const gd_env *env = reader->repo->env;
    return_group(reader);
    gd_decoder_close(env, &reader->decoder);
    env->release(env, reader);
}

static gd_status
ensure_group(gd_address_reader *reader, uint32_t number, gd_error *err)
{
    if (reader->group != NULL && reader->group->number == number) {
        return GD_OK;
    }
    return_group(reader);
    return gd_fpcache_group(reader->repo->cache, number, true, &reader->group,
                            err);
}

static gd_status
ensure_segment(gd_address_reader *reader, const gd_entry *entry, uint32_t slot,
               gd_error *err)
{
    if (reader->segment == entry->segment) {
        return gd_group_match_segment(reader->group, entry, slot,
                                      &reader->header, err);
    }
    reader->segment = 0;
    const gd_decoder *own = &reader->decoder;
    GD_TRY(gd_group_read_segment(reader->group, entry, slot, own->coder,
                                 own->in, own->plain, &reader->header,
                                 err));
    reader->segment = entry->segment;
    return GD_OK;
}

static gd_status
verify(gd_address_reader *reader, const gd_entry *entry, uint32_t slot,
       gd_error *err)
{
    gd_verified block = {entry, slot, false};
    GD_TRY(gd_verify_blocks(reader->group, &reader->header,
                            reader->decoder.plain,
                            reader->decoder.hasher, &block, 1, err));
    if (!block.good) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: the block of slot %u, in the segment at offset "
                       "%u, does not match its checksum and fingerprint",
                       reader->group->name, slot, entry->segment);
    }
    return GD_OK;
}

const gd_group *
gd_address_reader_group(const gd_address_reader *reader)
{
    return reader->group;
}

gd_status
gd_address_reader_read(gd_address_reader *reader, gd_address address,
                       gd_entry *entry, const uint8_t **data, gd_error *err)
{
    memset(entry, 0, sizeof *entry);
    gd_status s = ensure_group(reader, address.group, err);
    if (s == GD_OK) {
        s = gd_group_read_entries(reader->group, address.slot, 1, entry, err);
    }
    /* A block marked as damaged is verified like any other: what prevented
     * reading it then may have passed. */
    if (s == GD_OK && entry->state != GD_ENTRY_LIVE &&
        entry->state != GD_ENTRY_DAMAGED) {
        s = gd_fail(err, GD_CORRUPT, "%s: slot %u (entry at offset %llu) "
                    "holds no live block", reader->group->name, address.slot,
                    (unsigned long long)gd_entry_offset(address.slot));
    }
    if (s == GD_OK) {
        s = ensure_segment(reader, entry, address.slot, err);
    }
    if (s == GD_OK) {
        s = verify(reader, entry, address.slot, err);
    }
    *data = reader->decoder.plain + entry->plain_offset;
    return s;
}

/* ---- reading back ---- */

static gd_status
copy_block(gd_address_reader *reader, gd_address address,
           const gd_fingerprint *fp, uint32_t length, uint8_t *out,
           gd_error *err)
{
    gd_entry entry;
    const uint8_t *data;
    GD_TRY(gd_address_reader_read(reader, address, &entry, &data, err));
    if (entry.plain_length != length ||
        !gd_fingerprint_equal(&entry.fingerprint, fp)) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: slot %u (entry at offset %llu) is not the block "
                       "that was stored there", reader->group->name,
                       address.slot,
                       (unsigned long long)gd_entry_offset(address.slot));
    }
    memcpy(out, data, length);
    return GD_OK;
}

gd_status
gd_address_reader_copy(gd_address_reader *reader, const gd_address *addresses,
                       const gd_fingerprint *fps, const uint32_t *lengths,
                       size_t count, uint8_t *out, gd_error *err)
{
    gd_status s = GD_OK;
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        s = copy_block(reader, addresses[i], &fps[i], lengths[i], out, err);
        out += lengths[i];
    }
    return_group(reader);
    return s;
}
