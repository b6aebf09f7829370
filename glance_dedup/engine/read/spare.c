/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spare.c - see spare.h.
 */
#include "engine/read/spare.h"

#include <errno.h>
#include <string.h>

#include "engine/base/coding.h"
#include "engine/files/file.h"
#include "engine/files/group.h"
#include "engine/files/spool.h"
#include "engine/read/address_reader.h"
#include "engine/read/verify.h"
#include "engine/repo/spareindex.h"

/* ---- reading ---- */

/* The block that is looked for. */
typedef struct sought {
    gd_repo *repo;
    const gd_scope *scope;
    const gd_fingerprint *fp;
    uint32_t length;
    uint64_t checksum;
    uint8_t *out;
} sought;

/* Reads the block of an open file's slot.  *found only if it verifies
 * completely (I7). */
static gd_status
read_slot(const sought *what, const gd_group *group, uint32_t slot,
          gd_decoder *decoder, bool *found, gd_error *err)
{
    gd_entry entry;
    gd_fingerprint fp;
    gd_segment_header header;
    gd_status s = gd_group_read_entries(group, slot, 1, &entry, err);
    if (s != GD_OK || entry.state != GD_ENTRY_LIVE ||
        entry.plain_length != what->length) {
        return s;
    }
    s = gd_group_read_segment(group, &entry, slot, decoder->coder, decoder->in,
                              decoder->plain, &header, err);
    if (s != GD_OK) {
        return s;
    }
    const uint8_t *block = decoder->plain + entry.plain_offset;
    if (gd_checksum(block, what->length, 0) != what->checksum) {
        return GD_OK;
    }
    s = gd_hasher_compute(decoder->hasher, what->scope, block, what->length,
                          &fp, err);
    *found = s == GD_OK && gd_fingerprint_equal(&fp, what->fp);
    if (*found) {
        memcpy(what->out, block, what->length);
    }
    return s;
}

static gd_status
read_copy(void *arg, uint32_t number, uint32_t slot, bool *found,
          gd_error *err)
{
    const sought *what = arg;
    gd_repo *repo = what->repo;
    const gd_env *env = repo->env;
    char name[GD_NAME_SIZE];
    gd_group *group;
    gd_decoder decoder = {0};
    gd_names_spares(number, name);
    GD_TRY(gd_group_open_as(env, repo->root, &repo->params, number,
                            name, O_RDONLY, &group, err));
    gd_status s = gd_decoder_open(env, repo->digest, &decoder, err);
    if (s == GD_OK) {
        s = read_slot(what, group, slot, &decoder, found, err);
    }
    gd_decoder_close(env, &decoder);
    gd_group_close(group);
    return s;
}

gd_status
gd_spare_read(gd_repo *repo, const gd_scope *scope, const gd_fingerprint *fp,
              uint32_t length, uint64_t checksum, uint8_t *out, bool *found,
              gd_error *err)
{
    sought what = {repo, scope, fp, length, checksum, out};
    *found = false;
    if (!gd_digest_is_cryptographic(repo->digest)) {
        return GD_OK; /* this may be another block with the same fingerprint */
    }
    return gd_spare_index_find(repo->spares, fp, read_copy, &what, found, err);
}

/* ---- writing ---- */

/* A spare file being written. */
typedef struct writing {
    gd_repo *repo;
    gd_spool_writer file;
    gd_group *group;
    gd_address_reader *reader;
    gd_coder *coder;
    gd_entry *entries;
    uint32_t count; /* blocks so far */
    uint8_t *plain, *packed; /* for the segment being filled */
    gd_segment_header header;
    uint8_t *copy; /* a block from the old file */
    uint64_t end;
} writing;

static gd_status
write_segment(writing *w, gd_error *err)
{
    const gd_group *group = w->group;
    gd_segment_header *header = &w->header;
    uint8_t encoded[GD_SEGMENT_HEADER];
    size_t stored;
    if (header->blocks == 0) {
        return GD_OK;
    }
    GD_TRY(gd_repo_require_room(
        w->repo, GD_SEGMENT_HEADER + (uint64_t)header->plain_length, err));
    GD_TRY(gd_codec_compress(w->coder, GD_CODEC_LZ4, 0, w->plain,
                             header->plain_length, w->packed, &stored, err));
    header->codec = stored > 0 ? GD_CODEC_LZ4 : GD_CODEC_NONE;
    header->stored_length =
        stored > 0 ? (uint32_t)stored : header->plain_length;
    struct iovec pieces[] = {
        {encoded, sizeof encoded},
        {stored > 0 ? w->packed : w->plain, header->stored_length}};
    gd_segment_header_encode(header, group->bounds.seed, &pieces[1], 1,
                             encoded);
    for (uint32_t i = 0; i < header->blocks; i++) {
        gd_entry *entry = &w->entries[header->first_slot + i];
        entry->segment = (uint32_t)w->end;
        entry->codec = (uint8_t)header->codec;
        entry->stored_length = header->stored_length;
    }
    gd_status s = gd_writev_full(group->env, group->fd, pieces, 2, w->end,
                                 group->name, err);
    w->end += GD_SEGMENT_HEADER + header->stored_length;
    *header = (gd_segment_header){.first_slot = w->count};
    return s;
}

static gd_status
add_block(writing *w, const gd_entry *block, const uint8_t *data,
          gd_error *err)
{
    uint32_t length = block->plain_length;
    if (w->header.plain_length + length > w->repo->params.segment_size) {
        GD_TRY(write_segment(w, err));
    }
    memcpy(w->plain + w->header.plain_length, data, length);
    w->entries[w->count++] =
        (gd_entry){.fingerprint = block->fingerprint,
                   .checksum = block->checksum,
                   .plain_offset = w->header.plain_length,
                   .plain_length = length,
                   .state = GD_ENTRY_LIVE};
    w->header.blocks++;
    w->header.plain_length += length;
    return GD_OK;
}

/* Reads the block at an address or, if that fails, its existing copy.
 * Otherwise a damaged block would lose its copy when the file is rewritten. */
static gd_status
copy_block(writing *w, gd_address address, gd_error *err)
{
    gd_entry entry;
    const uint8_t *data;
    bool found = false;
    gd_status s = gd_address_reader_read(w->reader, address, &entry, &data,
                                         err);
    if ((s == GD_CORRUPT || s == GD_IO) &&
        (entry.state == GD_ENTRY_LIVE || entry.state == GD_ENTRY_DAMAGED) &&
        entry.plain_length >= 1 &&
        entry.plain_length <= w->repo->params.block_size &&
        gd_spare_read(w->repo, &gd_address_reader_group(w->reader)->scope,
                      &entry.fingerprint, entry.plain_length, entry.checksum,
                      w->copy, &found, NULL) == GD_OK &&
        found) {
        data = w->copy;
        s = GD_OK;
    }
    return s == GD_OK ? add_block(w, &entry, data, err) : s;
}

static gd_status
open_writing(writing *w, uint32_t number, size_t count, gd_error *err)
{
    const gd_env *env = w->repo->env;
    gd_params params = w->repo->params;
    params.group_slots =
        count < GD_SLOTS_MIN ? GD_SLOTS_MIN : (uint32_t)count;
    w->entries = gd_calloc(env, count, sizeof *w->entries, err);
    w->plain = gd_calloc(env, params.segment_size, 1, err);
    w->packed = gd_calloc(env, params.segment_size, 1, err);
    w->copy = gd_calloc(env, params.block_size, 1, err);
    if (w->entries == NULL || w->plain == NULL || w->packed == NULL ||
        w->copy == NULL) {
        return GD_NOMEM;
    }
    gd_status s = gd_coder_open(env, &w->coder, err);
    if (s == GD_OK) {
        s = gd_address_reader_open(w->repo, &w->reader, err);
    }
    if (s == GD_OK) {
        s = gd_repo_require_room(w->repo,
                                 gd_fptable_data_start(params.group_slots),
                                 err);
    }
    if (s == GD_OK) {
        s = gd_spool_create(env, w->repo->root, GD_SPOOL_GROUP, &w->file, err);
    }
    if (s == GD_OK) {
        s = gd_group_write_new(env, w->file.fd, w->file.name, &params,
                               &gd_spares_scope, number, err);
    }
    if (s == GD_OK) {
        s = gd_group_open_as(env, w->repo->root, &params, number, w->file.name,
                             O_RDWR, &w->group, err);
    }
    w->end = gd_fptable_data_start(params.group_slots);
    return s;
}

static void
close_writing(writing *w)
{
    const gd_env *env = w->repo->env;
    gd_group_close(w->group);
    gd_address_reader_close(w->reader);
    gd_coder_close(env, w->coder);
    env->release(env, w->entries);
    env->release(env, w->plain);
    env->release(env, w->packed);
    env->release(env, w->copy);
    gd_spool_discard(env, w->repo->root, &w->file);
}

static gd_status
write_blocks(writing *w, const gd_address *addresses, size_t count,
             gd_error *err)
{
    for (size_t i = 0; i < count; i++) {
        GD_TRY(copy_block(w, addresses[i], err));
    }
    GD_TRY(write_segment(w, err));
    GD_TRY(gd_group_write_entries(w->group, 0, w->count, w->entries, err));
    const gd_published record = {
        .sequence = 1, .count = w->count, .end = w->end};
    GD_TRY(gd_group_write_published(w->group, &record, err));
    return gd_fsync(w->repo->env, w->group->fd, w->file.name, err);
}

static gd_status
give_name(writing *w, uint32_t number, gd_error *err)
{
    const gd_env *env = w->repo->env;
    char name[GD_NAME_SIZE];
    gd_names_spares(number, name);
    GD_TRY(gd_file_create_directory(env, w->repo->root, GD_DIR_SPARES, err));
    int rc = env->renameat(env, w->repo->root, w->file.name, name);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot rename %s to %s", w->file.name,
                             name);
    }
    gd_spool_close(env, &w->file); /* its spool name is gone */
    return gd_sync_dir(env, w->repo->root, GD_DIR_SPARES, err);
}

static gd_status
remove_spares(gd_repo *repo, uint32_t number, gd_error *err)
{
    const gd_env *env = repo->env;
    char name[GD_NAME_SIZE];
    gd_names_spares(number, name);
    int rc = env->unlinkat(env, repo->root, name);
    if (rc == -ENOENT) {
        return GD_OK;
    }
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot unlink %s", name)
                  : gd_sync_dir(env, repo->root, GD_DIR_SPARES, err);
}

gd_status
gd_spare_write(gd_repo *repo, uint32_t number, const gd_address *addresses,
               size_t count, uint64_t *bytes, gd_error *err)
{
    writing w = {.repo = repo, .file = {.fd = -1}};
    *bytes = 0;
    if (number == 0 || number > GD_MAX_GROUP || count > GD_MAX_SLOTS) {
        return gd_fail(err, GD_INVALID,
                       "spare copies: group %08x, %zu blocks: a group's "
                       "number, and at most %d blocks, are needed",
                       (unsigned)number, count, GD_MAX_SLOTS);
    }
    if (count == 0) {
        return remove_spares(repo, number, err);
    }
    if (!gd_digest_is_cryptographic(repo->digest)) {
        return gd_fail(err, GD_INVALID,
                       "spare copies need fingerprints of which no two blocks "
                       "can be made that have the same; with %s nothing could "
                       "tell a copy from another block", repo->params.digest);
    }
    gd_status s = open_writing(&w, number, count, err);
    if (s == GD_OK) {
        s = write_blocks(&w, addresses, count, err);
    }
    if (s == GD_OK) {
        s = give_name(&w, number, err);
    }
    if (s == GD_OK) {
        *bytes = w.end;
    }
    close_writing(&w);
    return s;
}
