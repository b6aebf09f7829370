/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_group.c - a block group's file of any content: header, published
 * records, entries, the table made of them, and every segment that a live
 * entry names. The segments of a cold group are in an object.
 *
 * Input: flags (1: checksums are corrected; 2: the file ends with the input;
 * 4: the header has 32 bytes more, and the file ends at D), the first bytes of
 * the header, 72 or 104, the first 32 of each record, the number of entries
 * (1), these, and the bytes from D on, in the file or in the object. So an
 * input is short.
 */
#include "engine/base/coding.h"
#include "engine/files/group.h"
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

/* The object of a group, as the object store has it. */
typedef struct bucket {
    memory_env *m;
    const uint8_t *object; /* FILE_MAX bytes */
    size_t length;
    bool is_cut; /* else it has the group's length */
} bucket;

/* Fetches slices; if the object is short, only the first one is there. */
static gd_status
fetch(void *arg, const gd_object *object, uint32_t first, uint32_t count,
      gd_error *err)
{
    const bucket *from = arg;
    char path[MEMORY_PATH];
    MUST(count > 0 && count <= 1 + GD_SEGMENT_MAX / GD_SLICE + 1);
    if (first > 0 || count > 1 || object->length > FILE_MAX) {
        return gd_fail(err, GD_UNAVAILABLE, "there is no such slice");
    }
    int at = snprintf(path, sizeof path, "/cache/slices/");
    for (int i = 0; i < GD_ID_SIZE; i++) {
        at += snprintf(path + at, sizeof path - (size_t)at, "%02x",
                       object->id[i]);
    }
    memory_mkdir(from->m, path);
    snprintf(path + at, sizeof path - (size_t)at, "/%08x", first);
    memory_put(from->m, path, from->object,
               from->is_cut ? from->length : object->length);
    return GD_OK;
}

static void
expect(void *arg, const gd_object *object, uint32_t first, uint32_t count)
{
    (void)arg;
    (void)object;
    (void)first;
    MUST(count > 0);
}

/* Makes the object. *end is the length of the group's file. */
static size_t
lay_out(input *in, uint8_t *file, size_t *end)
{
    uint8_t flags = take8(in);
    memset(file, 0, FILE_MAX);
    take_bytes(in, file, (flags & 4) != 0 ? 104 : 72);
    take_bytes(in, file + 512, 32);
    take_bytes(in, file + 1024, 32);
    uint32_t entries = take8(in);
    for (uint32_t i = 0; i < entries && in->left > 0; i++) {
        take_bytes(in, file + gd_entry_offset(i), GD_ENTRY_SIZE);
    }
    uint32_t slots = gd_get32(file + 48);
    size_t start = slots <= GD_MAX_SLOTS ?
    (size_t)gd_fptable_data_start(slots) : 8192;
    size_t room = start < FILE_MAX ? FILE_MAX - start : 0;
    size_t had = room == 0 ? 0
                           : take_bytes(in, file + start,
                                        in->left < room ? in->left : room);
    size_t length = (flags & 2) != 0 && start + had < FILE_MAX ? start + had
                                                               : FILE_MAX;
    if ((flags & 1) != 0) {
        remake_group(file, length);
    }
    *end = (flags & 4) != 0 && start < length ? start : length;
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
        MUST(s == GD_OK || ((s == GD_CORRUPT || (group->is_cold &&
                                                 s == GD_UNAVAILABLE)) &&
                            err.text[0] != '\0'));
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
    gd_fptable *store;
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
        s = gd_group_load_table(group, &record, &store, &err);
        MUST(s == GD_OK || s == GD_CORRUPT);
        if (s == GD_OK) {
            gd_fptable_free(group->env, store);
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
    size_t end;
    bucket from = {.m = &m, .object = file, .is_cut = size > 0 &&
                   (data[0] & 2) != 0};
    gd_slice_source source = {&from, fetch, expect};
    gd_params with_slices = params;
    gd_slices *slices;
    from.length = lay_out(&in, file, &end);
    memory_env_init(&m);
    memory_mkdir(&m, "/groups");
    memory_mkdir(&m, "/cache");
    memory_mkdir(&m, "/cache/slices");
    memory_put(&m, "/groups/00000001", file, end);
    MUST(gd_slices_open(&m.env, "/cache/slices", NULL, &source, &slices,
                        &err) == GD_OK);
    with_slices.slices = slices;
    gd_status s = gd_group_open(&m.env, AT_FDCWD, &with_slices, GROUP,
                                O_RDONLY, &group, &err);
    MUST(s == GD_OK || s == GD_CORRUPT || s == GD_VERSION);
    if (s == GD_OK) {
        look_at(group);
        gd_group_close(group);
    } else {
        MUST(strstr(err.text, "groups/00000001") != NULL);
    }
    gd_slices_close(slices);
    MUST(memory_env_leaks(&m) == 0);
    memory_env_destroy(&m);
    return 0;
}
