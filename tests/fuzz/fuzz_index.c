/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_index.c - a directory with any files of the exact index: reading,
 * looking up and merging never read out of bounds; a merge's files are valid,
 * and merging them again finds nothing new.
 *
 * Input: the number of files (1); for each: kind (1), bits (1), shard (1),
 * number (1), its irregularities, and a flag for a shard with so many records
 * that these take several frames (1), items (1), their bytes, and the number
 * of bytes that are cut off (1). Then the key to look up (8).
 */
#include "engine/base/coding.h"
#include "engine/files/duplicate_search.h"
#include "engine/format/index.h"
#include "engine/format/packedframe.h"
#include "engine/format/pairs.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/memory_env.h"

enum {
    FILES = 6,
    ITEMS = 24,
    STRANGE = 15, /* of the irregularities' byte */
    MANY = 32,
    LARGE = 128,
    EACH = 400, /* records for each item of a shard that has many */
    FRAMES = 4, /* which take at most so many frames */
    FILE_MAX = GD_INDEX_HEAD + FRAMES * GD_PACKED_FRAME,
};

static const uint8_t CATALOG[GD_ID_SIZE] = "a catalog's id";

/* Makes items that may be right: few fingerprints, and groups from 0 to 3. */
static void
take_item(input *in, gd_index_kind kind, const gd_index_id *id, uint8_t *out)
{
    uint64_t a = take8(in), b = take8(in);
    if (kind == GD_INDEX_PAIRS) {
        gd_put64(out, a << 13);
        gd_put64(out + 8, b << 13);
    } else if (kind == GD_INDEX_CURSORS) {
        gd_put32(out, (uint32_t)a);
        gd_put32(out + 4, (uint32_t)b << 8);
    } else {
        uint64_t key = a << 40;
        if (id->bits > 0) {
            key |= (uint64_t)id->shard << (64 - id->bits);
        }
        gd_index_put_record(out, key, b << 10);
    }
}

/* Places records behind the one that the input has, a step apart. */
static void
multiply(const gd_index_id *id, uint8_t *records, gd_index_head *head)
{
    uint64_t count = head->items * EACH;
    uint64_t key = head->items == 0 ? 0 : gd_index_key(records);
    uint64_t address = head->items == 0 ? 0 : gd_index_address(records);
    uint64_t step = (UINT64_MAX >> id->bits) / (count + 1);
    for (uint64_t i = 0; i < count; i++) {
        gd_index_put_record(records + i * GD_INDEX_RECORD, key + i * step,
                            address + i % 1000);
    }
    head->items = count;
}

/* Writes packed frames of the items. If the file is to be strange, a byte of
 * the head of one of its frames is changed, and the checksum is right. */
static void
pack_items(input *in, gd_index_head *head, bool strange,
           const uint8_t *records, uint8_t *data)
{
    uint8_t spoiled = strange ? take8(in) % FRAMES : FRAMES;
    uint64_t done = 0;
    head->length = GD_INDEX_HEAD;
    for (uint64_t frame = 0; done < head->items; frame++) {
        uint8_t *out = data + head->length;
        const uint8_t *from = records + done * GD_INDEX_RECORD;
        gd_frame_shape shape = {0};
        while (done < head->items &&
               gd_frame_shape_add(&shape, records + done * GD_INDEX_RECORD)) {
            done++;
        }
        MUST(shape.count > 0 && frame < FRAMES);
        size_t length = gd_packedframe_pack(&shape, from, head->seed + frame,
                                            done < head->items, out);
        if (frame == spoiled) {
            out[take8(in) % 16] ^= take8(in);
            gd_put64(out + length - GD_FRAME_CHECKSUM,
                     gd_checksum(out, length - GD_FRAME_CHECKSUM,
                                 head->seed + frame));
        }
        head->length += length;
    }
}

static void
make_file(memory_env *m, input *in)
{
    static uint8_t data[FILE_MAX];
    static uint8_t records[ITEMS * EACH * GD_INDEX_RECORD];
    char name[GD_NAME_SIZE], path[MEMORY_PATH];
    gd_index_head head = {.id = {.kind = 1 + take8(in) % 5}, .seed = 7};
    head.id.bits = take8(in) % 4;
    head.id.shard = take8(in) % (1u << head.id.bits);
    head.id.number = take8(in);
    memcpy(head.catalog_id, CATALOG, GD_ID_SIZE);
    uint8_t strange = take8(in);
    head.items = take8(in) % ITEMS;
    head.flags = (strange & LARGE) != 0 ? GD_INDEX_LARGE : 0;
    size_t size = gd_index_head_item_size(head.id.kind);
    for (uint64_t i = 0; i < head.items; i++) {
        take_item(in, head.id.kind, &head.id, records + i * size);
    }
    if (head.id.kind == GD_INDEX_SHARD) {
        if ((strange & MANY) != 0) {
            multiply(&head.id, records, &head);
        }
        pack_items(in, &head, (strange & STRANGE) == 1, records, data);
    } else {
        memcpy(data + GD_INDEX_HEAD, records, head.items * size);
        gd_index_head_seal_frame(&head, (strange & STRANGE) == 1,
                                 data + GD_INDEX_HEAD, head.items);
    }
    size_t length = (size_t)gd_index_head_frame_start(&head,
                                                      gd_index_head_frames(
                                                          &head));
    gd_names_index(&head.id, name);
    switch (strange & STRANGE) {
    case 2:
        head.items = take64(in);
        break;
    case 3:
        head.id.number++;
        break;
    case 4:
        head.catalog_id[3]++;
        break;
    case 5:
        head.id.bits = take8(in);
        break;
    default:
        break;
    }
    gd_index_head_encode(&head, data);
    if ((strange & STRANGE) == 6) {
        take_bytes(in, data + take8(in), 9);
    }
    uint8_t cut = take8(in);
    snprintf(path, sizeof path, "/r/%s", name);
    memory_put(m, path, data, cut > 200 && length >= cut ? length - cut
                                                          : length);
}

static gd_status
merge(gd_shards *shards, const gd_index_id *id, gd_search_result *result,
      gd_error *err)
{
    gd_duplicate_search *search;
    bool more = true;
    uint64_t bytes;
    *result = (gd_search_result){.records = 0};
    gd_status s = gd_duplicate_search_begin(shards, id->bits, id->shard,
                                            (gd_split_limits){UINT64_MAX, 5},
                                            &search, err);
    if (s != GD_OK || search == NULL) {
        return s;
    }
    while (s == GD_OK && more) {
        s = gd_duplicate_search_step(search, 3, &more, &bytes, err);
    }
    if (s == GD_OK) {
        s = gd_duplicate_search_finish(search, result, err);
    }
    gd_duplicate_search_end(search);
    return s;
}

/* Merges all shards that count; returns true if all could be merged. */
static bool
merge_all(gd_shards *shards, const gd_env *env, uint64_t *pairs)
{
    gd_index_list list;
    gd_index_id *current;
    size_t count;
    bool complete, good = true;
    gd_error err;
    *pairs = 0;
    MUST(gd_shards_list(shards, &list, &err) == GD_OK);
    MUST(gd_shards_current(shards, &list, &current, &count, &complete, &err) ==
         GD_OK);
    for (size_t i = 0; i < count; i++) {
        gd_search_result result;
        gd_status s = merge(shards, &current[i], &result, &err);
        MUST(s == GD_OK || s == GD_CORRUPT || s == GD_VERSION);
        good = good && s == GD_OK;
        *pairs += result.pairs;
    }
    env->release(env, current);
    env->release(env, list.files);
    return good;
}

static void
verify_current(gd_shards *shards, const gd_env *env, bool merged)
{
    gd_index_list list;
    gd_index_id *current;
    size_t count;
    bool complete;
    gd_error err;
    MUST(gd_shards_list(shards, &list, &err) == GD_OK);
    for (size_t i = 0; i < list.count; i++) {
        if (list.files[i].kind != GD_INDEX_NEW) {
            (void)gd_shards_verify(shards, &list.files[i], &err);
        }
    }
    MUST(gd_shards_current(shards, &list, &current, &count, &complete, &err) ==
         GD_OK);
    for (size_t i = 0; i < count && merged && complete; i++) {
        gd_status s = gd_shards_verify(shards, &current[i], &err);
        MUST(s == GD_OK || s == GD_CORRUPT || s == GD_VERSION);
    }
    env->release(env, current);
    env->release(env, list.files);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    memory_env m;
    gd_shards *shards;
    gd_error err;
    uint64_t pairs, again, address;
    memory_env_init(&m);
    memory_mkdir(&m, "/r");
    memory_mkdir(&m, "/r/groups");
    memory_mkdir(&m, "/r/locks");
    memory_mkdir(&m, "/r/index");
    memory_put(&m, "/r/groups/00000001", "", 0);
    memory_put(&m, "/r/groups/00000003", "", 0);
    for (unsigned files = take8(&in) % FILES; files > 0; files--) {
        make_file(&m, &in);
    }
    int root = m.env.openat(&m.env, AT_FDCWD, "/r", O_RDONLY | O_DIRECTORY, 0);
    MUST(gd_shards_open(&m.env, root, 0, CATALOG, &shards, &err) == GD_OK);
    verify_current(shards, &m.env, false);
    (void)gd_shards_find(shards, take64(&in), &address, &err);
    bool merged = merge_all(shards, &m.env, &pairs);
    verify_current(shards, &m.env, merged);
    /* A split may make shards count that have runs of their own. */
    bool left = memory_count(&m, "/r/index", "run-", NULL) > 0;
    if (merged && !left && merge_all(shards, &m.env, &again)) {
        MUST(again == 0);
    }
    MUST(gd_shards_lock(shards, &err) == GD_OK);
    MUST(gd_shards_tidy(shards, &err) == GD_OK);
    gd_shards_close(shards);
    m.env.close(&m.env, root);
    MUST(memory_env_leaks(&m) == 0);
    memory_env_destroy(&m);
    return 0;
}
