/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compare.c - see compare.h.
 */
#include "engine/read/compare.h"

#include <string.h>

#include "engine/read/verify.h"

enum {
    WINDOW = 64,        /* entries read together */
    PATIENCE_MS = 5000, /* for a cold block's slices */
};

struct gd_compare {
    gd_repo *repo;
    gd_group *group; /* borrowed; NULL: none */
    gd_entry entries[WINDOW];
    uint32_t first, count; /* slots in entries, of that group */
    /* The last segment read, of any group; 0: none. */
    uint32_t segment_group, segment;
    gd_segment_header header;
    gd_decoder decoder;
    const uint8_t *plain; /* its plain bytes, in one of the decoder's buffers */
    bool unavailable; /* the object store did not give a cold block: it is asked
                       * no more */
};

gd_status
gd_compare_open(gd_repo *repo, gd_compare **out, gd_error *err)
{
    const gd_env *env = repo->env;
    gd_compare *compare = gd_calloc(env, 1, sizeof *compare, err);
    if (compare == NULL) {
        return GD_NOMEM;
    }
    compare->repo = repo;
    gd_status s = gd_decoder_open(env, NULL, &compare->decoder, err);
    if (s != GD_OK) {
        gd_compare_close(compare);
        return s;
    }
    *out = compare;
    return GD_OK;
}

static void
return_group(gd_compare *compare)
{
    if (compare->group != NULL) {
        gd_fpcache_return_group(compare->repo->cache, compare->group);
        compare->group = NULL;
    }
    compare->count = 0;
}

void
gd_compare_close(gd_compare *compare)
{
    if (compare != NULL) {
        const gd_env *env = compare->repo->env;
        return_group(compare);
        gd_decoder_close(env, &compare->decoder);
        env->release(env, compare);
    }
}

/* ---- segments ---- */

/* Segments stored uncompressed are not copied.  No checksum is verified: if the
 * bytes are equal, they are right. */
static gd_status
decode_segment(gd_compare *compare, const gd_group *group, uint32_t offset)
{
    const uint8_t *behind = compare->decoder.in + GD_SEGMENT_HEADER;
    if (compare->header.codec == GD_CODEC_NONE) {
        compare->plain = behind + gd_segment_list_size(&compare->header);
        return GD_OK;
    }
    compare->plain = compare->decoder.plain;
    return gd_segment_decode(compare->decoder.coder, &compare->header, behind,
                             compare->decoder.plain, group->name, offset, NULL);
}

/* An upload must not wait long for an object store that does not answer, since
 * it goes on without the hit (I6). */
static gd_status
read_stored(gd_compare *compare, const gd_group *group, const gd_entry *entry,
            uint32_t slot)
{
    if (group->is_cold && compare->unavailable) {
        return GD_UNAVAILABLE;
    }
    gd_status s = gd_group_read_stored(group, PATIENCE_MS, entry, slot,
                                       compare->decoder.in, &compare->header,
                                       NULL);
    compare->unavailable |= s == GD_UNAVAILABLE;
    return s;
}

static gd_status
ensure_segment(gd_compare *compare, const gd_group *group,
               const gd_entry *entry,
               uint32_t slot)
{
    if (compare->segment_group == group->number &&
        compare->segment == entry->segment) {
        return gd_group_match_segment(group, entry, slot, &compare->header,
                                      NULL);
    }
    compare->segment_group = 0;
    GD_TRY(read_stored(compare, group, entry, slot));
    GD_TRY(decode_segment(compare, group, entry->segment));
    compare->segment_group = group->number;
    compare->segment = entry->segment;
    return GD_OK;
}

bool
gd_compare_entry(gd_compare *compare, const gd_group *group,
                 const gd_entry *entry, uint32_t slot, const uint8_t *data)
{
    atomic_fetch_add(&compare->repo->counters.compares, 1);
    return ensure_segment(compare, group, entry, slot) == GD_OK &&
           memcmp(compare->plain + entry->plain_offset, data,
                  entry->plain_length) == 0;
}

/* ---- entries ---- */

static gd_status
ensure_group(gd_compare *compare, uint32_t number)
{
    if (compare->group != NULL && compare->group->number == number) {
        return GD_OK;
    }
    return_group(compare);
    return gd_fpcache_group(compare->repo->cache, number, false,
                            &compare->group, NULL);
}

/* The kept entry of this slot, if it is of such a block; else NULL. */
static const gd_entry *
kept_entry(const gd_compare *compare, uint32_t slot, const gd_fingerprint *fp,
           uint32_t length)
{
    if (slot < compare->first || slot - compare->first >= compare->count) {
        return NULL;
    }
    const gd_entry *entry = &compare->entries[slot - compare->first];
    return entry->state == GD_ENTRY_LIVE && entry->plain_length == length &&
                   gd_fingerprint_equal(&entry->fingerprint, fp)
               ? entry
               : NULL;
}

/* Reads entries from this slot on, since its neighbours are asked for next. */
static gd_status
read_entries(gd_compare *compare, uint32_t slot)
{
    uint32_t slots = compare->group->bounds.slots;
    uint32_t rest = slot < slots ? slots - slot : 0;
    uint32_t count = rest < WINDOW ? rest : WINDOW;
    compare->count = 0;
    GD_TRY(gd_group_read_entries(compare->group, slot, count,
                                 compare->entries, NULL));
    compare->first = slot;
    compare->count = count;
    return GD_OK;
}

bool
gd_compare_block(gd_compare *compare, gd_address address,
                 const gd_fingerprint *fp, const uint8_t *data,
                 uint32_t length)
{
    if (ensure_group(compare, address.group) != GD_OK) {
        return false;
    }
    const gd_entry *entry = kept_entry(compare, address.slot, fp, length);
    /* A wrong entry may have been read before it was published, so read it
     * again. */
    if (entry == NULL && read_entries(compare, address.slot) == GD_OK) {
        entry = kept_entry(compare, address.slot, fp, length);
    }
    return entry != NULL && gd_compare_entry(compare, compare->group, entry,
                                             address.slot, data);
}
