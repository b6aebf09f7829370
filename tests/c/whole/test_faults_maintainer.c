/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_faults_maintainer.c - the maintainer's tasks, under faults: see
 * fault_tasks.h for the faults, and the requirements.
 *
 * There is no catalog here: a task frees only blocks that no image of the test
 * names.
 */
#include "tests/c/support/fault_tasks.h"

#include "engine/base/coding.h"
#include "engine/files/fence.h"
#include "engine/files/spoolfile.h"
#include "engine/format/pairs.h"
#include "engine/format/runs.h"
#include "engine/maintenance/blockcopy.h"
#include "engine/maintenance/grouprewrite.h"
#include "engine/maintenance/merge.h"
#include "engine/maintenance/scrub.h"
#include "engine/read/spare.h"
#include "tests/c/support/check.h"

enum { GROUPS = 3 }; /* that KEPT and OLD lie in */

static int
by_number(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;
    return *x < *y ? -1 : *x > *y;
}

/* ---- accounting ---- */

/* N5.2: reads the runs that the catalog would get. */
static gd_status
count_entry(world *w, gd_spool_file *entry)
{
    gd_run *runs;
    size_t count;
    if (!entry->complete) {
        return GD_OK;
    }
    uint64_t blocks;
    gd_status s = gd_spool_file_measure(entry, &blocks, &w->x.err);
    if (s == GD_OK) {
        s = gd_spool_file_runs(entry, 0,
                               gd_recipe_pages(entry->recipe.header.extents),
                               &runs, &count, &w->x.err);
    }
    if (s == GD_OK) {
        w->x.env->release(w->x.env, runs);
    }
    return s;
}

/* Does N4 and N5 for one spool file. */
static gd_status
settle_entry(world *w, gd_spool_file *entry)
{
    bool live;
    gd_fence fence = {.catalog_id = {1}, .sequence = ++w->count};
    gd_status s = gd_spool_file_live(entry, &live, &w->x.err);
    for (int byte = 0; s == GD_OK && !live && byte < 2; byte++) {
        s = gd_spool_file_lock(entry, byte, &w->x.err);
        if (s == GD_OK) {
            s = gd_spool_file_live(entry, &live, &w->x.err);
        }
    }
    if (s == GD_BUSY) {
        return GD_OK; /* it stays (N4.2) */
    }
    if (s == GD_OK) {
        s = gd_sync_dir(w->x.env, w->x.root, GD_DIR_IMAGES, &w->x.err);
    }
    if (s == GD_OK) {
        s = count_entry(w, entry);
    }
    if (s == GD_OK) {
        s = gd_fence_write(w->x.env, w->x.root, &fence, &w->x.err);
    }
    return s == GD_OK ? gd_spool_file_unlink(entry, &w->x.err) : s;
}

static gd_status
account(world *w)
{
    gd_spool_base *entries;
    size_t count;
    gd_status s = gd_spool_file_list(w->x.env, w->x.root, &entries, &count,
                                     &w->x.err);
    if (s != GD_OK) {
        return s;
    }
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        gd_spool_file entry;
        s = gd_spool_file_open(w->x.env, w->x.root, &w->x.params,
                               entries[i].name, &entry, &w->x.err);
        if (s == GD_OK) {
            s = settle_entry(w, &entry);
            gd_spool_file_close(&entry);
        }
    }
    w->x.env->release(w->x.env, entries);
    return s;
}

static void
delete_old(world *w)
{
    require_ok(w, delete_image(w, OLD), "delete");
}

static gd_status
mark_lost(world *w)
{
    gd_spool_file entry;
    char name[GD_NAME_SIZE];
    w->states[OLD] = IMAGE_MAYBE;
    gd_status s = gd_spool_file_open_image(w->x.env, w->x.root, &w->x.params,
                                           image_id_of(OLD), &entry,
                                           &w->x.err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_spool_file_set_aside(&entry, name, &w->x.err);
    if (s == GD_OK) {
        s = gd_spool_file_delete(&entry, &w->x.err);
    }
    gd_spool_file_close(&entry);
    return s;
}

static gd_status
write_fence(world *w)
{
    gd_status s = GD_OK;
    for (uint64_t n = 1; s == GD_OK && n <= 6; n++) {
        gd_fence read;
        bool found;
        gd_fence fence = {.catalog_id = {1}, .sequence = w->count + n * n};
        s = gd_fence_write(w->x.env, w->x.root, &fence, &w->x.err);
        if (s == GD_OK) {
            s = gd_fence_read(w->x.env, w->x.root, &read, &found, &w->x.err);
            CHECK(s != GD_OK || (found && read.sequence == fence.sequence));
        }
    }
    w->count += 40; /* the sequence of a catalog never goes back */
    return s;
}

/* ---- groups ---- */

/* Deletes OLD; numbers are its blocks that KEPT does not have. */
static void
find_dead(world *w)
{
    uint64_t kept[FAULT_BLOCKS + 1];
    size_t count = image_blocks(w, KEPT, kept);
    size_t old = image_blocks(w, OLD, w->numbers);
    qsort(kept, count, sizeof *kept, by_number);
    for (size_t i = 0; i < old; i++) {
        if (bsearch(&w->numbers[i], kept, count, sizeof *kept, by_number) ==
            NULL) {
            w->numbers[w->count++] = w->numbers[i];
        }
    }
    delete_old(w);
}

static size_t
dead_slots(const world *w, uint32_t group, uint32_t slots[FAULT_BLOCKS + 1])
{
    size_t count = 0;
    for (size_t i = 0; i < w->count; i++) {
        if (w->numbers[i] >> GD_SLOT_BITS == group) {
            slots[count++] = (uint32_t)w->numbers[i] & (GD_MAX_SLOTS - 1);
        }
    }
    return count;
}

typedef gd_status at_work(world *w, gd_owned_group *owned);

/* Works in each of the groups that the blocks need. */
static gd_status
in_each_group(world *w, at_work *work)
{
    gd_status s = GD_OK;
    for (uint32_t number = 1; s == GD_OK && number <= GROUPS; number++) {
        gd_owned_group *owned;
        s = gd_owned_group_open(w->repo, number, &owned, &w->x.err);
        if (s == GD_NOTFOUND) {
            s = GD_OK; /* removed before */
            continue;
        }
        if (s == GD_OK) {
            s = work(w, owned);
            gd_owned_group_close(owned);
        }
    }
    return s;
}

static gd_status
free_in(world *w, gd_owned_group *owned)
{
    uint32_t slots[FAULT_BLOCKS + 1], freed;
    size_t count = dead_slots(w, owned->leased->group->number, slots);
    return gd_owned_group_free(owned, slots, count, &freed, &w->x.err);
}

static gd_status
collect_in(world *w, gd_owned_group *owned)
{
    uint64_t bytes, live, kept;
    gd_status s = free_in(w, owned);
    if (s == GD_OK) {
        s = gd_owned_group_live_bytes(owned, &live, &kept, &w->x.err);
    }
    return s == GD_OK ? gd_owned_group_punch(owned, &bytes, &w->x.err) : s;
}

static gd_status
collect(world *w)
{
    return in_each_group(w, collect_in);
}

static gd_status
mark_in(world *w, gd_owned_group *owned)
{
    uint32_t slots[FAULT_BLOCKS + 1];
    gd_quarantine_name *names;
    size_t name_count;
    size_t count = dead_slots(w, owned->leased->group->number, slots);
    if (count == 0) {
        return GD_OK;
    }
    gd_status s = gd_owned_group_mark_damaged(owned, slots, count, &names,
                                              &name_count, &w->x.err);
    w->x.env->release(w->x.env, names);
    return s;
}

static gd_status
mark_damaged(world *w)
{
    return in_each_group(w, mark_in);
}

static gd_status
rewrite_in(world *w, gd_owned_group *owned)
{
    static const gd_packing packing = {.codec = GD_CODEC_ZSTD, .level = 1};
    uint64_t bytes;
    return gd_group_rewrite_owned(owned, owned->leased->group->number == 1
                                  ? &packing : NULL, &bytes, &w->x.err);
}

static gd_status
rewrite(world *w)
{
    return in_each_group(w, rewrite_in);
}

/* Has only the lease until the exchange; skips unsealed groups. */
static gd_status
recompress_group(world *w, uint32_t number)
{
    static const gd_packing packing = {.codec = GD_CODEC_ZSTD, .level = 1};
    static const gd_packing noted = {.codec = GD_CODEC_ZSTD, .level = 2};
    gd_leased_group *leased;
    gd_owned_group *owned = NULL;
    gd_group_rewrite *r;
    bool done = false;
    uint64_t cost;
    gd_status s = gd_leased_group_open(w->repo, number, &leased, &w->x.err);
    if (s != GD_OK) {
        return s == GD_BUSY || s == GD_NOTFOUND ? GD_OK : s;
    }
    s = gd_group_rewrite_open(leased, &packing, false, &r, &w->x.err);
    if (s == GD_OK) {
        while (s == GD_OK && !done) {
            s = gd_group_rewrite_step(r, &done, &cost, &w->x.err);
        }
        if (s == GD_OK) {
            s = gd_owned_group_lock(leased, &owned, &w->x.err);
        }
        if (s == GD_OK) {
            s = gd_group_rewrite_exchange(r, owned, &w->x.err);
        }
        gd_group_rewrite_close(r);
    }
    if (s == GD_OK) {
        s = gd_leased_group_note_codec(leased, &noted, &w->x.err);
    }
    if (owned != NULL) {
        gd_owned_group_close(owned);
    } else {
        gd_leased_group_close(leased);
    }
    return s;
}

static gd_status
recompress(world *w)
{
    gd_status s = GD_OK;
    for (uint32_t number = 1; s == GD_OK && number <= GROUPS; number++) {
        s = recompress_group(w, number);
    }
    return s;
}

static void
free_dead(world *w)
{
    find_dead(w);
    require_ok(w, in_each_group(w, free_in), "free");
}

static gd_status
unlink_in(world *w, gd_owned_group *owned)
{
    bool removed;
    return gd_owned_group_unlink(owned, &removed, &w->x.err);
}

static gd_status
unlink_groups(world *w)
{
    return in_each_group(w, unlink_in);
}

/* Group 1 has only OLD's blocks then. */
static void
empty_group(world *w)
{
    uint32_t slots[64], freed;
    gd_owned_group *owned;
    require_ok(w, delete_image(w, KEPT), "delete");
    require_ok(w, delete_image(w, OLD), "delete");
    require_ok(w, gd_owned_group_open(w->repo, 1, &owned, &w->x.err), "enter");
    for (uint32_t i = 0; i < 64; i++) {
        slots[i] = i;
    }
    require_ok(w, gd_owned_group_free(owned, slots,
                                      owned->leased->published.count, &freed,
                                      &w->x.err), "free");
    gd_owned_group_close(owned);
}

/* ---- merging ---- */

/* Stores TWIN with KEPT's blocks once more, to be merged to them. */
static void
store_twin(world *w)
{
    gd_repo *usual = w->repo;
    w->repo = scratch_repo(&w->x); /* without hints no duplicate is found */
    require_ok(w, store_image(w, TWIN), "store");
    gd_repo_close(w->repo);
    w->repo = usual;
}

static int
by_old(const void *a, const void *b)
{
    uint64_t x = gd_get64(a), y = gd_get64(b);
    return x < y ? -1 : x > y;
}

static size_t
map_twin(world *w, uint8_t *pairs)
{
    uint64_t kept[FAULT_BLOCKS + 1], twin[FAULT_BLOCKS + 1];
    size_t count = image_blocks(w, KEPT, kept), used = 0;
    CHECK_INT(image_blocks(w, TWIN, twin), count);
    for (size_t i = 0; i < count; i++) {
        if (kept[i] != twin[i]) {
            gd_put64(pairs + GD_PAIR_SIZE * used, twin[i]);
            gd_put64(pairs + GD_PAIR_SIZE * used++ + 8, kept[i]);
        }
    }
    qsort(pairs, used, GD_PAIR_SIZE, by_old);
    size_t unique = 0; /* an image may name a block twice */
    for (size_t i = 0; i < used; i++) {
        if (i == 0 || by_old(pairs + GD_PAIR_SIZE * (unique - 1),
                             pairs + GD_PAIR_SIZE * i) != 0) {
            memmove(pairs + GD_PAIR_SIZE * unique++, pairs + GD_PAIR_SIZE * i,
                    GD_PAIR_SIZE);
        }
    }
    return unique;
}

static uint8_t twin_pairs[GD_PAIR_SIZE * (FAULT_BLOCKS + 1)];

static void
prepare_merge(world *w)
{
    store_twin(w);
    w->count = map_twin(w, twin_pairs);
}

static gd_status
merge(world *w)
{
    gd_merge *merge;
    bool done = false;
    gd_status s = gd_merge_open(w->repo, image_id_of(TWIN),
                                (gd_mapping){twin_pairs, w->count}, &merge,
                                &w->x.err);
    if (s != GD_OK) {
        return s;
    }
    if (gd_merge_recipe(merge) != NULL) {
        s = gd_merge_exchange(merge, &done, &w->x.err);
    }
    gd_merge_close(merge);
    return s;
}

static void
find_blocks(world *w)
{
    w->count = image_blocks(w, OLD, w->numbers);
}

static gd_status
relocate(world *w)
{
    gd_block_copy *copy;
    const uint8_t *pairs;
    size_t count;
    uint8_t addresses[GD_ADDRESS_SIZE * (FAULT_BLOCKS + 1)];
    for (size_t i = 0; i < w->count; i++) {
        gd_put64(addresses + GD_ADDRESS_SIZE * i, w->numbers[i]);
    }
    gd_status s = gd_block_copy_open(w->repo, &copy, &w->x.err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_block_copy_add(copy, addresses, w->count, &w->x.err);
    if (s == GD_OK) {
        s = gd_block_copy_finish(copy, &pairs, &count, &w->x.err);
    }
    gd_block_copy_close(copy);
    return s;
}

/* ---- scrubbing, spare copies ---- */

static gd_status
scrub(world *w)
{
    gd_scrub_result found;
    gd_status s = gd_scrub(w->repo, 1, 0, 64, true, GD_SCRUB_ALL, &found,
                           &w->x.err);
    for (int i = 0; s == GD_OK && i < 64; i++) {
        /* No fault of the system counts as damage of another block. */
        CHECK(found.verdicts[i] <= GD_VERDICT_INVALID);
    }
    if (s == GD_OK) {
        w->x.env->release(w->x.env, found.verdicts);
    }
    return s;
}

static gd_status
write_spares(world *w)
{
    gd_address addresses[FAULT_BLOCKS + 1];
    uint64_t bytes;
    size_t count = w->count < 64 ? w->count : 64;
    for (size_t i = 0; i < count; i++) {
        addresses[i] = (gd_address){
            (uint32_t)(w->numbers[i] >> GD_SLOT_BITS),
            (uint32_t)w->numbers[i] & (GD_MAX_SLOTS - 1)};
    }
    return gd_spare_write(w->repo, 1, addresses, count, &bytes, &w->x.err);
}

/* A block of OLD can only be read from its spare copy. */
static void
spoil_block(world *w)
{
    find_blocks(w);
    require_ok(w, write_spares(w), "write spare copies");
    gd_group *group;
    gd_entry entry;
    char name[GD_NAME_SIZE];
    uint32_t number = (uint32_t)(w->numbers[0] >> GD_SLOT_BITS);
    require_ok(w, gd_group_open(w->x.env, w->x.root, &w->x.params, number,
                                O_RDONLY, &group, &w->x.err), "open");
    require_ok(w, gd_group_read_entries(group,
                                        (uint32_t)w->numbers[0] &
                                            (GD_MAX_SLOTS - 1),
                                        1, &entry, &w->x.err), "read");
    gd_group_close(group);
    gd_names_group(number, name);
    scratch_flip(&w->x, name, entry.segment + GD_SEGMENT_HEADER +
                                  entry.stored_length - 1, 0xff);
    gd_repo_close(w->repo);
    w->repo = scratch_repo_filter(&w->x);
}

static gd_status
read_spare(world *w)
{
    return fetch_image(w, OLD);
}

/* ---- arithmetic that takes memory ---- */

static gd_status
sort_and_pair(world *w)
{
    uint8_t records[GD_INDEX_RECORD * FAULT_BLOCKS];
    uint8_t pairs[GD_PAIR_SIZE * FAULT_BLOCKS], out[sizeof pairs];
    size_t count = FAULT_BLOCKS, out_count;
    fill_random(records, sizeof records, 1);
    fill_random(pairs, sizeof pairs, 2);
    for (size_t i = 0; i < 2 * FAULT_BLOCKS; i++) {
        memset(pairs + 8 * i + 4, 0, 4); /* addresses are small numbers */
    }
    gd_status s = gd_index_sort(w->x.env, records, count, &w->x.err);
    if (s == GD_OK) {
        s = gd_pairs_sort(w->x.env, pairs, &count, &w->x.err);
    }
    if (s == GD_OK) {
        s = gd_pairs_addresses(w->x.env, (gd_pairs){pairs, count}, out,
                               &out_count, &w->x.err);
    }
    return s;
}

/* ---- the table ---- */

static const fault_task TASKS[] = {
    {.name = "account", .setup = delete_old, .work = account},
    {.name = "mark-lost", .work = mark_lost, .again = GD_NOTFOUND},
    {.name = "fence", .work = write_fence},
    {.name = "collect", .setup = find_dead, .work = collect},
    {.name = "mark-damaged", .setup = find_dead, .work = mark_damaged},
    {.name = "unlink-group", .setup = empty_group, .work = unlink_groups},
    {.name = "rewrite", .setup = free_dead, .work = rewrite},
    {.name = "recompress", .setup = free_dead, .work = recompress},
    {.name = "merge", .setup = prepare_merge, .work = merge},
    {.name = "merge-by-value", .setup = prepare_merge, .work = merge,
     .by_value = true},
    {.name = "relocate", .setup = find_blocks, .work = relocate},
    {.name = "scrub", .work = scrub},
    {.name = "write-spares", .setup = find_blocks, .work = write_spares},
    /* If the copy cannot be read, the damage is reported. */
    {.name = "read-spare", .setup = spoil_block, .work = read_spare,
     .also = GD_CORRUPT},
    {.name = "sort-and-pair", .work = sort_and_pair},
};

TEST(test_faults)
{
    CHECK_INT(run_fault_tasks(TASKS, sizeof TASKS / sizeof TASKS[0]), 0);
}
