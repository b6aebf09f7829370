/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scan.c - see scan.h.
 */
#include "engine/write/scan.h"

#include <string.h>

#include "engine/base/coding.h"
#include "engine/base/zero.h"
#include "engine/format/fingerprint.h"
#include "engine/write/hashing.h"

/* Returns where the blocks of the data lie; those of zeros have no data. */
static size_t
cut(const gd_chunker *chunker, const uint8_t *data, size_t length,
    gd_block *blocks)
{
    size_t count = 0;
    for (size_t at = 0; at < length; count++) {
        size_t n = chunker->next(chunker, data + at, length - at, 0, true);
        blocks[count] = (gd_block){
            .data = gd_is_zero(data + at, n) ? NULL : data + at,
            .length = (uint32_t)n,
        };
        at += n;
    }
    return count;
}

static gd_status
fingerprint(gd_repo *repo, const gd_scope *scope, gd_block *blocks,
            size_t count, gd_error *err)
{
    gd_hashing *hashing;
    gd_status s = gd_hashing_open(repo, scope, &hashing, err);
    if (s == GD_OK) {
        s = gd_hashing_run(hashing, NULL, blocks, count, false, err);
        gd_hashing_close(hashing);
    }
    return s;
}

/* Lengths of all blocks, and the others than zeros at the front. */
static size_t
pack(uint8_t *scanned, gd_block *blocks, size_t count)
{
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        gd_put32(scanned + i * GD_SCANNED_SIZE + GD_FINGERPRINT_SIZE,
                 blocks[i].length);
        if (blocks[i].data != NULL) {
            scanned[i * GD_SCANNED_SIZE] = 1; /* it gets a fingerprint */
            blocks[used++] = blocks[i];
        }
    }
    return used;
}

static void
put_fingerprints(uint8_t *scanned, size_t count, const gd_block *blocks)
{
    for (size_t i = 0; i < count; i++) {
        uint8_t *fp = scanned + i * GD_SCANNED_SIZE;
        if (*fp != 0) {
            memcpy(fp, (blocks++)->fingerprint.bytes, GD_FINGERPRINT_SIZE);
        }
    }
}

gd_status
gd_scan(gd_repo *repo, const gd_scope *scope, const uint8_t *data,
        size_t length, uint8_t **scanned, size_t *count, gd_error *err)
{
    const gd_env *env = repo->env;
    *scanned = NULL;
    *count = 0;
    gd_status s = gd_repo_require_owner(repo, err);
    if (s != GD_OK || repo->params.by_value) {
        return s != GD_OK ? s
                          : gd_fail(err, GD_INVALID, "this repository compares "
                                    "blocks by value, so that fingerprints "
                                    "alone cannot find them");
    }
    size_t shortest = repo->chunker.minimum > 0 ? repo->chunker.minimum
                                                : repo->chunker.max_length;
    size_t most = length / shortest + 1;
    gd_block *blocks = gd_calloc(env, most, sizeof *blocks, err);
    uint8_t *out = blocks == NULL
                       ? NULL
                       : gd_calloc(env, most, GD_SCANNED_SIZE, err);
    if (out == NULL) {
        env->release(env, blocks);
        return GD_NOMEM;
    }
    *count = cut(&repo->chunker, data, length, blocks);
    s = fingerprint(repo, scope, blocks, pack(out, blocks, *count), err);
    if (s == GD_OK) {
        put_fingerprints(out, *count, blocks);
        *scanned = out;
    } else {
        env->release(env, out);
    }
    env->release(env, blocks);
    return s;
}
