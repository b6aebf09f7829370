/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_group.c - a block group's file of any content: header, published
 * records, entries, the store made of them, and every segment that a live entry
 * names.
 *
 * Input: flags (1: checksums are made right; 2: the file ends with the input),
 * the first 72 bytes of the header, the first 32 of each record, the number of
 * entries (1), these, and the bytes from D on.  So an input is short.
 */
#include "engine/base/coding.h"
#include "engine/files/blockgroup.h"
#include "engine/format/address.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/memory_env.h"
#include "tests/fuzz/remake.h"

enum { FILE_MAX = 1 << 16, GROUP = 1 };

static const gd_params params = {
    .repository_id = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
    .block_size = 4096,
    .group_slots = 64,
    .segment_size = 65536,
    .digest = "sha256",
};

/* The length of the file. */
static size_t
lay_out(input *in, uint8_t *file)
{
    uint8_t flags = take8(in);
    memset(file, 0, FILE_MAX);
    take_bytes(in, file, 72);
    take_bytes(in, file + 512, 32);
    take_bytes(in, file + 1024, 32);
    uint32_t entries = take8(in);
    for (uint32_t i = 0; i < entries && in->left > 0; i++) {
        take_bytes(in, file + gd_entry_offset(i), GD_ENTRY_SIZE);
    }
    uint32_t slots = gd_get32(file + 48);
    size_t start = slots <= GD_MAX_SLOTS ? (size_t)gd_data_start(slots) : 8192;
    size_t room = start < FILE_MAX ? FILE_MAX - start : 0;
    size_t had = room == 0 ? 0
                           : take_bytes(in, file + start,
                                        in->left < room ? in->left : room);
    size_t length = (flags & 2) != 0 && start + had < FILE_MAX ? start + had
                                                               : FILE_MAX;
    if ((flags & 1) != 0) {
        remake_group(file, length);
    }
    return length;
}

static void
read_segments(const gd_group *group, const gd_entry *entries)
{
    static uint8_t in[GD_SEGMENT_HEADER + GD_SEGMENT_MAX];
    static uint8_t plain[GD_SEGMENT_MAX];
    gd_coder *coder;
    gd_error err;
    unsigned tried = 0;
    MUST(gd_coder_open(group->env, &coder, &err) == GD_OK);
    for (uint32_t i = 0; i < group->bounds.slots && tried < 16; i++) {
        const gd_entry *entry = &entries[i];
        gd_segment_header header;
        if (entry->state != GD_ENTRY_LIVE &&
            entry->state != GD_ENTRY_DAMAGED) {
            continue;
        }
        tried++;
        gd_status s = gd_group_read_segment(group, entry, i, coder, in, plain,
                                            &header, &err);
        MUST(s == GD_OK || (s == GD_CORRUPT && err.text[0] != '\0'));
        if (s == GD_OK) {
            MUST(entry->plain_offset + entry->plain_length <=
                 header.plain_length);
            (void)gd_segment_intact(in, &header, group->bounds.seed);
        }
    }
    gd_coder_close(group->env, coder);
}

static void
look_at(gd_group *group)
{
    gd_published record;
    gd_fpstore *store;
    gd_error err;
    uint32_t slots = group->bounds.slots;
    MUST(slots >= GD_SLOTS_MIN && slots <= GD_MAX_SLOTS);
    MUST(group->bounds.max_block >= 1 &&
         group->bounds.max_block <= params.block_size);
    gd_entry *entries = calloc(slots, sizeof *entries);
    MUST(entries != NULL);
    gd_status s = gd_group_read_published(group, &record, &err);
    MUST(s == GD_OK || s == GD_CORRUPT);
    if (s == GD_OK) {
        MUST(record.count <= slots);
        s = gd_group_load_store(group, &record, &store, &err);
        MUST(s == GD_OK || s == GD_CORRUPT);
        if (s == GD_OK) {
            gd_fpstore_free(group->env, store);
        }
    }
    if (gd_group_read_entries(group, 0, slots, entries, &err) == GD_OK) {
        read_segments(group, entries);
    }
    MUST(gd_group_read_entries(group, slots, 1, entries, &err) == GD_CORRUPT);
    MUST(gd_group_read_entries(group, 1, UINT32_MAX, entries, &err) ==
         GD_CORRUPT);
    free(entries);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t file[FILE_MAX];
    memory_env m;
    gd_group *group;
    gd_error err = {.text = ""};
    input in = {data, size};
    size_t length = lay_out(&in, file);
    memory_env_init(&m);
    memory_mkdir(&m, "/groups");
    memory_put(&m, "/groups/00000001", file, length);
    gd_status s = gd_group_open(&m.env, AT_FDCWD, &params, GROUP, O_RDONLY,
                                &group, &err);
    MUST(s == GD_OK || s == GD_CORRUPT || s == GD_VERSION);
    if (s == GD_OK) {
        look_at(group);
        gd_group_close(group);
    } else {
        MUST(strstr(err.text, "groups/00000001") != NULL);
    }
    MUST(memory_env_leaks(&m) == 0);
    memory_env_destroy(&m);
    return 0;
}
