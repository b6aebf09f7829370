/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify.c - see verify.h.
 */
#include "engine/read/verify.h"

#include "engine/base/coding.h"

gd_status
gd_decoder_open(const gd_env *env, const gd_digest *digest,
                gd_decoder *decoder, gd_error *err)
{
    GD_TRY(gd_coder_open(env, &decoder->coder, err));
    if (digest != NULL) {
        GD_TRY(gd_hasher_open(env, digest, &decoder->hasher, err));
    }
    decoder->in = gd_alloc(env, GD_SEGMENT_HEADER + GD_SEGMENT_MAX, err);
    decoder->plain = gd_alloc(env, GD_SEGMENT_MAX, err);
    return decoder->in == NULL || decoder->plain == NULL ? GD_NOMEM : GD_OK;
}

void
gd_decoder_close(const gd_env *env, gd_decoder *decoder)
{
    gd_coder_close(env, decoder->coder);
    gd_hasher_close(env, decoder->hasher);
    env->release(env, decoder->in);
    env->release(env, decoder->plain);
}

gd_status
gd_verify_blocks(const gd_group *group, const gd_segment_header *header,
                 const uint8_t *plain, gd_hasher *hasher, gd_verified *blocks,
                 size_t count, gd_error *err)
{
    gd_hash_input inputs[GD_VERIFIED_AT_ONCE];
    gd_fingerprint fingerprints[GD_VERIFIED_AT_ONCE];
    size_t asked = 0, answered = 0;
    for (size_t i = 0; i < count; i++) {
        const gd_entry *entry = blocks[i].entry;
        const uint8_t *data = plain + entry->plain_offset;
        blocks[i].good =
            gd_group_match_segment(group, entry, blocks[i].slot, header,
                                   NULL) == GD_OK &&
            gd_checksum(data, entry->plain_length, 0) == entry->checksum;
        if (blocks[i].good && hasher != NULL) {
            inputs[asked] = (gd_hash_input){data, entry->plain_length,
                                            &fingerprints[asked]};
            asked++;
        }
    }
    if (asked != 0) {
        GD_TRY(gd_hasher_compute_many(hasher, &group->scope, inputs, asked,
                                      err));
    }
    for (size_t i = 0; answered < asked; i++) {
        if (blocks[i].good) {
            blocks[i].good =
                gd_fingerprint_equal(&fingerprints[answered++],
                                     &blocks[i].entry->fingerprint);
        }
    }
    return GD_OK;
}
