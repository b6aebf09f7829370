/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_reader.c - a repository with some hostile bytes: each way to read it
 * gives the right bytes or an error with words; all other operations end in an
 * error at most.
 *
 * Input: flags (1: checksums are corrected, so that wrong bytes may be read),
 * the number of changes (1), these (5 bytes, and the bytes that each writes),
 * then the operations (2 bytes each).
 */
#include "engine/base/coding.h"
#include "engine/exchange/wire.h"
#include "engine/files/fence.h"
#include "engine/files/image_delete.h"
#include "engine/files/spool.h"
#include "engine/files/spoolfile.h"
#include "engine/format/runs.h"
#include "engine/maintenance/blockcopy.h"
#include "engine/maintenance/grouprewrite.h"
#include "engine/maintenance/merge.h"
#include "engine/maintenance/ownedgroup.h"
#include "engine/maintenance/placeholder.h"
#include "engine/maintenance/scrub.h"
#include "engine/read/image.h"
#include "engine/read/spare.h"
#include "engine/repo/follow.h"
#include "engine/repo/segcache.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/remake.h"
#include "tests/fuzz/repository.h"

enum {
    IMAGES = 4,
    DELETED = 3, /* an image that is deleted already */
    LENGTH = 60 * 512 + 77,
    CHANGES = 12,
    DONE = 24,
    SLOTS = 64,
};

static const char *const names[IMAGES] = {"a", "b", "c", "d"};
static uint8_t contents[IMAGES][LENGTH];
static repository original;
static const gd_packing similar = {
    .codec = GD_CODEC_ZSTD, .level = 1, .similar = true};

/* ---- the repository before the changes ---- */

static void
damage_and_free(repository *r)
{
    static const uint32_t freed[] = {40, 41, 42}, damaged[] = {3};
    gd_owned_group *owned;
    gd_quarantine_name *quarantined;
    gd_address spare[20];
    size_t count;
    uint32_t n;
    uint64_t bytes;
    for (uint32_t i = 0; i < 20; i++) {
        spare[i] = (gd_address){1, i};
    }
    MUST(gd_spare_write(r->repo, 1, spare, 20, &bytes, &r->err) == GD_OK);
    MUST(gd_owned_group_open(r->repo, 2, &owned, &r->err) == GD_OK);
    MUST(gd_owned_group_free(owned, freed, 3, &n, &r->err) == GD_OK);
    MUST(gd_owned_group_punch(owned, &bytes, &r->err) == GD_OK);
    /* The remaining slots are in lists. */
    MUST(gd_group_rewrite_owned(owned, &similar, &bytes, &r->err) == GD_OK);
    gd_owned_group_close(owned);
    MUST(gd_owned_group_open(r->repo, 1, &owned, &r->err) == GD_OK);
    MUST(gd_owned_group_mark_damaged(owned, damaged, 1, &quarantined, &count,
                                     &r->err) == GD_OK);
    r->env->release(r->env, quarantined);
    gd_owned_group_close(owned);
}

int
LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    repository *r = &original;
    gd_fence fence = {.sequence = 7};
    repository_init(r);
    MUST(repository_open(r, true) == GD_OK);
    for (unsigned i = 0; i < IMAGES; i++) {
        repository_fill(contents[i], LENGTH, 512, 90, i + 1);
        r->repo->params.codec = (gd_codec)(i % 3);
        MUST(repository_put(r, names[i], &gd_global_scope, contents[i],
                            LENGTH, 9999, NULL) == GD_OK);
    }
    damage_and_free(r);
    MUST(gd_image_delete(r->env, r->repo->root, &r->params, names[DELETED],
                         NULL, &r->err) == GD_OK);
    MUST(gd_fence_write(r->env, r->repo->root, &fence, &r->err) == GD_OK);
    repository_close(r);
    /* Slots were freed though an image names them: that image is damaged. */
    MUST(repository_open(r, false) == GD_OK);
    MUST(repository_read(r, names[0], contents[0], LENGTH) == READ_EQUAL);
    repository_close(r);
    return 0;
}

/* ---- changes ---- */

static void
change(repository *r, input *in)
{
    static uint8_t copy[1 << 18];
    size_t length, other_length;
    char path[MEMORY_PATH], other[MEMORY_PATH];
    bool found = memory_nth(&r->m, take8(in) % 24, path);
    uint8_t how = take8(in);
    uint32_t where = (uint32_t)take_number(in, 3);
    if (!found) {
        return;
    }
    uint8_t *data = memory_get(&r->m, path, &length);
    size_t at = length == 0 ? 0 : where % length;
    switch (how % 8) {
    case 0:
    case 1: /* bytes of the input */
        take_bytes(in, copy, how / 8 % 32);
        for (size_t i = 0; i < how / 8 % 32U && at + i < length; i++) {
            data[at + i] = copy[i];
        }
        break;
    case 2:
        if (length > 0) {
            data[at] ^= (uint8_t)(1 << how / 8 % 8);
        }
        break;
    case 3: /* cut, or longer */
        memcpy(copy, data, length);
        memset(copy + length, 0, sizeof copy - length);
        memory_put(&r->m, path, copy, how < 128 ? at : length + at % 9000);
        break;
    case 4: /* zeros */
        for (size_t i = 0; i < (size_t)how * 16 && at + i < length; i++) {
            data[at + i] = 0;
        }
        break;
    case 5: /* another file's content */
    case 6:
        if (memory_nth(&r->m, where % 24, other)) {
            const uint8_t *from = memory_get(&r->m, other, &other_length);
            memcpy(copy, from, other_length);
            memory_put(&r->m, path, copy, other_length);
        }
        break;
    default:
        if ((how & 16) != 0) {
            memory_symlink(&r->m, path);
        } else {
            (void)memory_remove(&r->m, path);
        }
    }
}

static void
remake_all(repository *r)
{
    char path[MEMORY_PATH];
    size_t length;
    for (size_t i = 0; memory_nth(&r->m, i, path); i++) {
        uint8_t *data = memory_get(&r->m, path, &length);
        remake_any(data, length);
    }
}

/* ---- operations ---- */

typedef struct session {
    repository r;
    bool forged; /* wrong bytes may have right checksums */
    uint8_t what;
} session;

static void
must_have_words(const session *x, gd_status s)
{
    MUST(s == GD_OK || s == GD_BUSY ||
         (x->r.err.status == s && x->r.err.text[0] != '\0'));
}

static void
read_whole(session *x, unsigned image)
{
    read_result result =
        repository_read(&x->r, names[image], contents[image], LENGTH);
    MUST(x->forged || result != READ_DIFFERS);
}

static void
read_parts(session *x, unsigned image)
{
    static uint8_t out[LENGTH + 1];
    gd_image *open;
    size_t done;
    gd_status s =
        gd_image_open(x->r.repo, names[image], NULL, &open, &x->r.err);
    must_have_words(x, s);
    if (s != GD_OK) {
        return;
    }
    uint64_t next = 0;
    for (size_t i = 0; i < 9; i++) {
        uint64_t offset = (i * 7919 + x->what * 131U) % (LENGTH + 99);
        size_t length = 1 + (i * 5557U) % 4000;
        if (i % 3 != 0) {
            offset = next; /* sequential reads request data ahead, too */
        }
        next = offset + length;
        s = gd_image_read(open, out, length, offset, &done, &x->r.err);
        must_have_words(x, s);
        MUST(s != GD_OK || done <= length);
        if (s == GD_OK && !x->forged && offset < LENGTH) {
            size_t left = LENGTH - (size_t)offset;
            MUST(done == (left < length ? left : length));
            MUST(memcmp(out, contents[image] + offset, done) == 0);
        }
    }
    gd_image_close(open);
}

static void
describe(session *x, unsigned image)
{
    gd_image *open;
    gd_frames frames;
    gd_status s =
        gd_image_open(x->r.repo, names[image], NULL, &open, &x->r.err);
    if (s != GD_OK) {
        return;
    }
    uint64_t size = gd_image_header(open)->size;
    for (uint64_t i = 1; i <= gd_image_pages(open); i++) {
        uint8_t *out;
        size_t length;
        s = gd_wire_describe(open, i, &out, &length, &x->r.err);
        must_have_words(x, s);
        x->r.env->release(x->r.env, s == GD_OK ? out : NULL);
    }
    gd_range ranges[2] = {{0, size / 2 / 512 * 512}, {size / 2 / 512 * 512, 0}};
    ranges[1].length = size - ranges[1].offset;
    uint64_t end;
    s = gd_wire_frames(open, ranges, 2, &frames, &end, &x->r.err);
    must_have_words(x, s);
    gd_frames_free(&frames);
    gd_image_close(open);
}

static void
store(session *x, unsigned image)
{
    /* Its blocks are found in their groups, or stored again. */
    gd_status s =
        repository_put(&x->r, "again", &gd_global_scope, contents[image],
                       LENGTH, 4000, NULL);
    must_have_words(x, s);
    if (s == GD_OK) {
        read_result result =
            repository_read(&x->r, "again", contents[image], LENGTH);
        MUST(x->forged || result != READ_DIFFERS);
        s = gd_image_delete(x->r.env, x->r.repo->root, &x->r.params, "again",
                            NULL, &x->r.err);
        must_have_words(x, s);
    }
}

static void
count_names(session *x, gd_spool_file *entry)
{
    gd_run *runs;
    size_t count;
    bool live;
    must_have_words(x, gd_spool_file_live(entry, &live, &x->r.err));
    if (entry->complete) {
        uint64_t pages = gd_recipe_pages(entry->recipe.header.extents);
        uint64_t blocks;
        must_have_words(x, gd_spool_file_measure(entry, &blocks, &x->r.err));
        gd_status s = gd_spool_file_runs(entry, 0, pages, &runs, &count,
                                         &x->r.err);
        must_have_words(x, s);
        if (s == GD_OK) {
            x->r.env->release(x->r.env, runs);
        }
    }
    gd_spool_file_close(entry);
}

static void
judge_all(session *x)
{
    gd_spool_file entry;
    gd_spool_base *entries;
    size_t count;
    gd_fence fence;
    bool found;
    int root = x->r.repo->root;
    must_have_words(x, gd_fence_read(x->r.env, root, &fence, &found,
                                     &x->r.err));
    for (unsigned i = 0; i < IMAGES; i++) {
        if (gd_spool_file_open_image(x->r.env, root, &x->r.params, names[i],
                                     &entry, &x->r.err) == GD_OK) {
           count_names(x, &entry);
       }
    }
    gd_status s =
        gd_spool_file_list(x->r.env, root, &entries, &count, &x->r.err);
    must_have_words(x, s);
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        if (gd_spool_file_open(x->r.env, root, &x->r.params,
                               entries[i].name, &entry, &x->r.err) ==
            GD_OK) {
            count_names(x, &entry);
        }
    }
    if (s == GD_OK) {
        x->r.env->release(x->r.env, entries);
    }
}

static void
hold(session *x, uint32_t group)
{
    gd_owned_group *owned;
    uint64_t bytes, kept;
    bool removed;
    const gd_packing packing = {.codec = GD_CODEC_ZSTD,
                                .level = 1,
                                .similar = (x->what & 2) != 0};
    gd_status s = gd_owned_group_open(x->r.repo, group, &owned, &x->r.err);
    must_have_words(x, s);
    if (s != GD_OK) {
        return;
    }
    s = gd_owned_group_live_bytes(owned, &bytes, &kept, &x->r.err);
    must_have_words(x, s);
    MUST(s != GD_OK || kept <= bytes);
    must_have_words(x, gd_owned_group_punch(owned, &bytes, &x->r.err));
    must_have_words(x, gd_group_rewrite_owned(owned, (x->what & 1) != 0
                                                         ? &packing : NULL,
                                              &bytes, &x->r.err));
    must_have_words(x, (x->what & 4) != 0
                           ? gd_placeholder_leave(owned, &bytes,
                                                  &x->r.err)
                           : gd_owned_group_unlink(owned, &removed,
                                                   &x->r.err));
    gd_owned_group_close(owned);
}

static void
scrub(session *x, uint32_t group)
{
    gd_scrub_result result;
    gd_status s =
        gd_scrub(x->r.repo, group, 0, SLOTS, true, GD_SCRUB_ALL, &result,
                 &x->r.err);
    must_have_words(x, s);
    if (s == GD_OK) {
        x->r.env->release(x->r.env, result.verdicts);
    }
}

/* Makes copies elsewhere, and an image that uses them. */
static void
relocate(session *x, uint32_t group)
{
    gd_block_copy *copy;
    gd_merge *merge;
    uint8_t addresses[8 * SLOTS];
    const uint8_t *pairs;
    size_t count;
    bool done;
    for (uint32_t i = 0; i < SLOTS; i++) {
        gd_put64(addresses + 8 * i, (uint64_t)group << GD_SLOT_BITS | i);
    }
    gd_status s = gd_block_copy_open(x->r.repo, &copy, &x->r.err);
    MUST(s == GD_OK);
    s = gd_block_copy_add(copy, addresses, SLOTS, &x->r.err);
    must_have_words(x, s);
    if (s == GD_OK) {
        s = gd_block_copy_finish(copy, &pairs, &count, &x->r.err);
        must_have_words(x, s);
    }
    for (unsigned i = 0; s == GD_OK && i < IMAGES; i++) {
        if (gd_merge_open(x->r.repo, names[i], (gd_mapping){pairs, count},
                          &merge, &x->r.err) == GD_OK) {
            if (gd_merge_recipe(merge) != NULL) {
                must_have_words(x, gd_merge_exchange(merge, &done,
                                                     &x->r.err));
            }
            gd_merge_close(merge);
        }
    }
    gd_block_copy_close(copy);
}

static void
rebuild(session *x)
{
    gd_followed followed = {.more = true};
    for (int i = 0; i < 3 && x->r.repo->filter != NULL && followed.more; i++) {
        gd_status s = gd_follow(x->r.repo, 2, &followed, &x->r.err);
        must_have_words(x, s);
        followed.more = s == GD_OK && followed.more;
    }
}

static void
act(session *x, uint8_t what, uint8_t on)
{
    gd_address addresses[SLOTS];
    uint64_t bytes;
    uint32_t group = 1 + on % 5U;
    x->what = on;
    switch (what % 10) {
    case 0:
        read_parts(x, on % IMAGES);
        break;
    case 1:
        describe(x, on % IMAGES);
        break;
    case 2:
        store(x, on % IMAGES);
        break;
    case 3:
        judge_all(x);
        break;
    case 4:
        hold(x, group);
        break;
    case 5:
        scrub(x, group);
        break;
    case 6:
        relocate(x, group);
        break;
    case 7:
        for (uint32_t i = 0; i < SLOTS; i++) {
            addresses[i] = (gd_address){group, i};
        }
        must_have_words(x, gd_spare_write(x->r.repo, group, addresses,
                                          on % SLOTS, &bytes, &x->r.err));
        break;
    case 8:
        rebuild(x);
        break;
    default:
        must_have_words(x, gd_image_delete(x->r.env, x->r.repo->root,
                                           &x->r.params, names[on % IMAGES],
                                           NULL, &x->r.err));
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static session x;
    input in = {data, size};
    uint8_t flags = take8(&in);
    unsigned changes = take8(&in) % CHANGES;
    repository_copy(&x.r, &original);
    x.forged = (flags & 1) != 0;
    x.r.params.by_value = (flags & 2) != 0;
    for (unsigned i = 0; i < changes && in.left > 0; i++) {
        change(&x.r, &in);
    }
    if (x.forged) {
        remake_all(&x.r);
    }
    gd_status s = repository_open(&x.r, (flags & 4) == 0);
    must_have_words(&x, s);
    if (s == GD_OK) {
        gd_segcache_set_budget(x.r.repo->segcache, (flags & 8) << 12);
        for (unsigned i = 0; i < IMAGES; i++) {
            read_whole(&x, i);
        }
        for (unsigned i = 0; i < DONE && in.left > 0; i++) {
            uint8_t what = take8(&in);
            act(&x, what, take8(&in));
        }
        for (unsigned i = 0; i < IMAGES; i++) {
            read_whole(&x, i);
        }
    }
    repository_destroy(&x.r);
    return 0;
}
