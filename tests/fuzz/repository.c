/* SPDX-License-Identifier: Apache-2.0 */
/*
 * repository.c - see repository.h.
 */
#include "tests/fuzz/repository.h"

#include "engine/files/spool.h"
#include "engine/read/image.h"
#include "tests/fuzz/fuzz.h"

void
repository_init(repository *r)
{
    static const char *const directories[] = {
        "", "/groups", "/images", "/spool", "/locks", "/quarantine",
        "/spares", "/volumes", "/features"};
    static const char *const files[] = {"/locks/groups", "/locks/images"};
    char path[MEMORY_PATH];
    memset(r, 0, sizeof *r);
    memory_env_init(&r->m);
    r->env = &r->m.env;
    for (size_t i = 0; i < sizeof directories / sizeof directories[0]; i++) {
        snprintf(path, sizeof path, REPOSITORY_PATH "%s", directories[i]);
        memory_mkdir(&r->m, path);
    }
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        snprintf(path, sizeof path, REPOSITORY_PATH "%s", files[i]);
        memory_put(&r->m, path, "", 0);
    }
    r->params = (gd_params){
        .block_size = 512,
        .group_slots = 64,
        .segment_size = 2048,
        .digest = "sha256",
        .codec = GD_CODEC_LZ4,
        .lock_timeout_ms = 20,
    };
    for (int i = 0; i < GD_ID_SIZE; i++) {
        r->params.repository_id[i] = (uint8_t)(i + 1);
    }
}

void
repository_copy(repository *to, const repository *from)
{
    memset(to, 0, sizeof *to);
    memory_copy(&to->m, &from->m);
    to->env = &to->m.env;
    to->params = from->params;
}

void
repository_destroy(repository *r)
{
    repository_close(r);
    MUST(memory_env_leaks(&r->m) == 0);
    memory_env_destroy(&r->m);
}

gd_status
repository_open(repository *r, bool filter)
{
    gd_error ignored; /* it works without a filter */
    gd_status s = gd_repo_open(r->env, REPOSITORY_PATH, &r->params, true,
                               &r->repo, &r->err);
    if (s != GD_OK) {
        r->repo = NULL;
    } else if (filter) {
        (void)gd_repo_attach_filter(r->repo, FILTER_PATH, GD_FILTER_MIN_BYTES,
                                    &ignored);
    }
    return s;
}

void
repository_close(repository *r)
{
    if (r->repo != NULL) {
        gd_repo_close(r->repo);
        r->repo = NULL;
    }
}

gd_status
repository_put(repository *r, const char *image_id, const gd_scope *scope,
               const uint8_t *data, size_t length, size_t piece, bool *linked)
{
    gd_transaction *transaction;
    gd_recipe_header header;
    bool own;
    linked = linked == NULL ? &own : linked;
    *linked = false;
    gd_status s = gd_transaction_begin(r->repo, image_id, "project",
                                       scope, &transaction,
                                       &r->err);
    if (s != GD_OK) {
        return s;
    }
    for (size_t at = 0; s == GD_OK && at < length; at += piece) {
        size_t here = length - at < piece ? length - at : piece;
        s = gd_transaction_write(transaction, data + at, here, &r->err);
    }
    if (s == GD_OK) {
        s = gd_transaction_commit(transaction, &header, linked, &r->err);
    }
    gd_transaction_end(transaction);
    return s;
}

read_result
repository_read(repository *r, const char *image_id, const uint8_t *data,
                size_t length)
{
    gd_image *image;
    size_t done = 0;
    r->err.text[0] = '\0';
    gd_status s = gd_image_open(r->repo, image_id, NULL, &image, &r->err);
    if (s == GD_NOTFOUND) {
        return READ_ABSENT;
    }
    if (s == GD_OK) {
        uint8_t *out = malloc(length + 1);
        MUST(out != NULL);
        s = gd_image_read(image, out, length + 1, 0, &done, &r->err);
        bool equal = done == length &&
                     gd_image_header(image)->size == length &&
                     (length == 0 || memcmp(out, data, length) == 0);
        free(out);
        gd_image_close(image);
        if (s == GD_OK) {
            return equal ? READ_EQUAL : READ_DIFFERS;
        }
    }
    MUST(r->err.status == s && r->err.text[0] != '\0');
    return READ_FAILED;
}

static uint64_t
next_random(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

void
repository_fill(uint8_t *out, size_t length, size_t block, unsigned kinds,
                uint64_t seed)
{
    for (size_t at = 0; at < length; at += block) {
        size_t here = length - at < block ? length - at : block;
        uint64_t choice = next_random(&seed) % 8;
        uint64_t kind = next_random(&seed) % kinds;
        memset(out + at, 0, here);
        for (size_t i = 0; choice > 0 && i < here; i += 8) {
            /* The block is noise, or a few repeated words, which compress. */
            uint64_t word = choice < 5 ? next_random(&kind)
                                       : (i % 64) * 257 + kind * 65537 + 1;
            memcpy(out + at + i, &word, here - i < 8 ? here - i : 8);
        }
    }
}
