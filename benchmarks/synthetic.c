/* SPDX-License-Identifier: Apache-2.0 */
/*
 * synthetic.c - fills a repository with groups and recipes, as fast as the
 * disk takes fingerprint stores.
 *
 * Block i of the repository is the number i + 1, as 8 bytes, over and over.
 * With data, it is stored so, and its fingerprint is its digest.  Without, its
 * fingerprint is the digest of the 8 bytes alone, and where its segment would
 * lie the group's file has a hole: everything but a block can be read.
 *
 * Group k has blocks k * slots to (k + 1) * slots - 1; the images divide the
 * blocks among them, in order.  Nothing is synced before the end, nor locked:
 * nobody else may use the repository meanwhile.
 *
 * All bytes are the engine's own: this file only chooses the data to write.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/coding.h"
#include "engine/files/file.h"
#include "engine/files/group.h"
#include "engine/format/recipe.h"

typedef struct filler {
    gd_env env; /* the machine's, without its syncs */
    int root;
    gd_params params;
    uint64_t blocks, images;
    bool data;
    gd_hasher *hasher;
    gd_entry *entries; /* of the group that is written */
    uint8_t *plain;    /* a segment with its header */
    uint64_t image;    /* the one that is written, from 0 */
    int recipe_fd;
    gd_recipe_writer *recipe; /* NULL between images */
    gd_recipe_header header;
    uint64_t image_end; /* the first block behind it */
} filler;

static int
no_sync(const gd_env *env, int fd)
{
    (void)env;
    (void)fd;
    return 0;
}

/* ---- images ---- */

static gd_status
open_image(filler *x, gd_error *err)
{
    char name[GD_NAME_SIZE];
    x->header = (gd_recipe_header){.created = (uint64_t)x->env.now(&x->env)};
    /* i / images of all blocks, without overflow for any disk's number. */
    x->image_end = (uint64_t)((unsigned __int128)x->blocks * (x->image + 1) /
                              x->images);
    snprintf(x->header.image_id, sizeof x->header.image_id, "synthetic-%llu",
             (unsigned long long)x->image);
    if (x->env.random(&x->env, x->header.transaction_id, GD_ID_SIZE) < 0) {
        return gd_fail(err, GD_IO, "no random bytes");
    }
    memcpy(x->header.upload_id, x->header.transaction_id, GD_ID_SIZE);
    gd_status s = gd_names_image(x->header.image_id, name, err);
    if (s == GD_OK) {
        s = gd_file_create(&x->env, x->root, name, O_RDWR, &x->recipe_fd, err);
    }
    return s == GD_OK
               ? gd_recipe_writer_open(&x->env, x->recipe_fd, name,
                                       x->header.transaction_id, &x->recipe,
                                       err)
               : s;
}

static gd_status
finish_image(filler *x, gd_error *err)
{
    uint64_t size = gd_recipe_length(x->recipe);
    x->header.new_bytes = size;
    x->header.stored_bytes = size + size / x->params.segment_size *
                                        GD_SEGMENT_HEADER;
    gd_status s = gd_recipe_finish(x->recipe, &x->params, &x->header, err);
    gd_recipe_writer_close(x->recipe);
    x->env.close(&x->env, x->recipe_fd);
    x->recipe = NULL;
    x->image++;
    return s;
}

/* Block i becomes the next of the image that it belongs to. */
static gd_status
add_to_image(filler *x, uint64_t i, gd_address address,
             const gd_fingerprint *fp, gd_error *err)
{
    gd_status s = x->recipe == NULL ? open_image(x, err) : GD_OK;
    if (s == GD_OK) {
        s = gd_recipe_add_block(x->recipe, address, fp, x->params.block_size,
                                err);
    }
    return s == GD_OK && i + 1 == x->image_end ? finish_image(x, err) : s;
}

/* ---- groups ---- */

/* The entry of block i, whose segment begins at the slot first, and with data
 * the block's place in x->plain. */
static gd_status
make_entry(filler *x, uint64_t i, uint32_t slot, uint32_t first,
           uint32_t segment_blocks, uint64_t offset, gd_error *err)
{
    uint32_t size = x->params.block_size;
    uint8_t *block = x->plain + GD_SEGMENT_HEADER + (slot - first) * size;
    gd_entry *entry = &x->entries[slot];
    for (uint32_t at = 0; at < (x->data ? size : 8); at += 8) {
        gd_put64(block + at, i + 1);
    }
    *entry = (gd_entry){
        .segment = (uint32_t)offset,
        .plain_offset = (slot - first) * size,
        .plain_length = size,
        .stored_length = segment_blocks * size,
        .codec = GD_CODEC_NONE,
        .state = GD_ENTRY_LIVE,
        .checksum = x->data ? gd_checksum(block, size, 0) : i,
    };
    return gd_hasher_compute(x->hasher, &gd_global_scope, block,
                             x->data ? size : 8, &entry->fingerprint, err);
}

static gd_status
write_segment(filler *x, const gd_group *group, uint32_t first,
              uint32_t count, uint64_t offset, gd_error *err)
{
    uint32_t length = count * x->params.block_size;
    gd_segment_header header = {
        .codec = GD_CODEC_NONE,
        .blocks = count,
        .first_slot = first,
        .plain_length = length,
        .stored_length = length,
    };
    struct iovec stored = {x->plain + GD_SEGMENT_HEADER, length};
    gd_segment_header_encode(&header, group->bounds.seed, &stored, 1,
                             x->plain);
    return gd_write_full(&x->env, group->fd, x->plain,
                         GD_SEGMENT_HEADER + length, offset, group->name, err);
}

/* Blocks [base, base + count) as the slots of a group; *end: its length. */
static gd_status
write_blocks(filler *x, const gd_group *group, uint64_t base, uint32_t count,
             uint64_t *end, gd_error *err)
{
    uint32_t whole = x->params.segment_size / x->params.block_size;
    gd_status s = GD_OK;
    *end = gd_fptable_data_start(group->bounds.slots);
    for (uint32_t first = 0; s == GD_OK && first < count; first += whole) {
        uint32_t here = count - first < whole ? count - first : whole;
        for (uint32_t i = first; s == GD_OK && i < first + here; i++) {
            s = make_entry(x, base + i, i, first, here, *end, err);
            if (s == GD_OK && x->images > 0) {
                s = add_to_image(x, base + i, (gd_address){group->number, i},
                                 &x->entries[i].fingerprint, err);
            }
        }
        if (s == GD_OK && x->data) {
            s = write_segment(x, group, first, here, *end, err);
        }
        *end += GD_SEGMENT_HEADER + (uint64_t)here * x->params.block_size;
    }
    return s;
}

static gd_status
fill_group(filler *x, const gd_group *group, uint64_t base, uint32_t count,
           gd_error *err)
{
    gd_published record = {.sequence = 1, .count = count};
    gd_status s = write_blocks(x, group, base, count, &record.end, err);
    if (s == GD_OK && x->env.ftruncate(&x->env, group->fd, record.end) < 0) {
        s = gd_fail(err, GD_IO, "cannot make %s longer", group->name);
    }
    if (s == GD_OK) {
        s = gd_group_write_entries(group, 0, count, x->entries, err);
    }
    return s == GD_OK ? gd_group_write_published(group, &record, err) : s;
}

static gd_status
make_group(filler *x, uint32_t number, uint64_t base, uint32_t count,
           gd_error *err)
{
    char name[GD_NAME_SIZE];
    int fd;
    gd_group *group;
    gd_names_group(number, name);
    gd_status s = gd_file_create(&x->env, x->root, name, O_RDWR, &fd, err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_group_write_new(&x->env, fd, name, &x->params, &gd_global_scope,
                           number, err);
    x->env.close(&x->env, fd);
    if (s == GD_OK) {
        s = gd_group_open(&x->env, x->root, &x->params, number, O_RDWR, &group,
                          err);
    }
    if (s == GD_OK) {
        s = fill_group(x, group, base, count, err);
        gd_group_close(group);
    }
    return s;
}

/* ---- the whole ---- */

static gd_status
fill(filler *x, gd_error *err)
{
    uint32_t slots = x->params.group_slots, number = 1;
    gd_digest *digest;
    gd_status s = gd_digest_open(&x->env, x->params.digest, false, &digest,
                                 err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_hasher_open(&x->env, digest, &x->hasher, err);
    x->entries = gd_calloc(&x->env, slots, sizeof *x->entries, err);
    x->plain = gd_calloc(&x->env, GD_SEGMENT_HEADER + GD_SEGMENT_MAX, 1, err);
    if (x->entries == NULL || x->plain == NULL) {
        s = GD_NOMEM;
    }
    for (uint64_t i = 0; s == GD_OK && i < x->blocks; i += slots) {
        uint64_t left = x->blocks - i;
        s = make_group(x, number++, i, left < slots ? (uint32_t)left : slots,
                       err);
        printf("%llu\n", (unsigned long long)(left < slots ? x->blocks
                                                           : i + slots));
        fflush(stdout);
    }
    gd_hasher_close(&x->env, x->hasher);
    gd_digest_close(&x->env, digest);
    x->env.release(&x->env, x->entries);
    x->env.release(&x->env, x->plain);
    return s == GD_OK && syncfs(x->root) != 0
               ? gd_fail(err, GD_IO, "cannot sync the file system")
               : s;
}

static void
parse_id(const char *digits, uint8_t id[GD_ID_SIZE])
{
    for (int i = 0; i < GD_ID_SIZE; i++) {
        unsigned byte = 0;
        sscanf(digits + 2 * i, "%2x", &byte);
        id[i] = (uint8_t)byte;
    }
}

int
main(int argc, char **argv)
{
    if (argc != 10 || strlen(argv[2]) != 2 * GD_ID_SIZE) {
        fprintf(stderr, "usage: %s DIRECTORY REPOSITORY_ID BLOCK_SIZE "
                "GROUP_SLOTS SEGMENT_SIZE DIGEST BLOCKS IMAGES DATA\n"
                "It is made to be called by synthetic.py.\n", argv[0]);
        return 2;
    }
    filler x = {
        .env = *gd_env_posix(),
        .root = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC),
        .params.block_size = (uint32_t)strtoul(argv[3], NULL, 10),
        .params.group_slots = (uint32_t)strtoul(argv[4], NULL, 10),
        .params.segment_size = (uint32_t)strtoul(argv[5], NULL, 10),
        .blocks = strtoull(argv[7], NULL, 10),
        .images = strtoull(argv[8], NULL, 10),
        .data = strcmp(argv[9], "1") == 0,
    };
    x.env.fsync = no_sync;
    x.env.fdatasync = no_sync;
    parse_id(argv[2], x.params.repository_id);
    snprintf(x.params.digest, sizeof x.params.digest, "%s", argv[6]);
    if (x.root < 0) {
        perror(argv[1]);
        return 1;
    }
    gd_error err;
    if (fill(&x, &err) != GD_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    return 0;
}
