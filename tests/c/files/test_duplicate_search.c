/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_duplicate_search.c - merging runs into shards: the result is that of the
 * simplest possible implementation, in the order of merging.rst; no
 * fault, no crash and no other host loses a pair.
 */
#include "engine/files/duplicate_search.h"

#include "engine/base/coding.h"
#include "engine/format/index.h"
#include "engine/format/packedframe.h"
#include "engine/format/pairs.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { R = GD_INDEX_RECORD, MAX_COUNT = 4096, GROUPS = 6 };

static const uint8_t CATALOG[GD_ID_SIZE] = "a catalog's id";
static const gd_split_limits NEVER = {UINT64_MAX, UINT64_MAX};

static scratch x;
static gd_shards *shards;

/* ---- records and pairs, as plain arrays ---- */

typedef struct bag {
    gd_item items[MAX_COUNT];
    size_t count;
} bag;

static int
compare_items(const void *a, const void *b)
{
    const gd_item *p = a, *q = b;
    if (p->key != q->key) {
        return p->key < q->key ? -1 : 1;
    }
    return p->address < q->address ? -1 : p->address > q->address;
}

static void
sort_once(bag *b)
{
    size_t used = 0;
    qsort(b->items, b->count, sizeof *b->items, compare_items);
    for (size_t i = 0; i < b->count; i++) {
        if (used == 0 ||
            compare_items(&b->items[i], &b->items[used - 1]) != 0) {
            b->items[used++] = b->items[i];
        }
    }
    b->count = used;
}

static void
put(bag *b, uint64_t key, uint64_t address)
{
    b->items[b->count++] = (gd_item){key, address};
}

static bool
has(const bag *b, gd_item item)
{
    for (size_t i = 0; i < b->count; i++) {
        if (compare_items(&b->items[i], &item) == 0) {
            return true;
        }
    }
    return false;
}

/* Few keys, all over the range; groups from 1 on, of which GROUPS exist. */
static void
fill(bag *b, size_t count, uint64_t keys, uint64_t *seed)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t key = next_random(seed) % keys *
                       (UINT64_C(0xffffffffffffffff) / keys);
        uint64_t group = 1 + next_random(seed) % (GROUPS + 1);
        put(b, key, group << GD_SLOT_BITS | next_random(seed) % 40);
    }
    sort_once(b);
}

/* Computes the expected shards and pairs, by the words of merging.rst. */
static void
expect(const bag *all, const bag *gone, bag *kept, bag *pairs)
{
    bag sorted = *all;
    sort_once(&sorted);
    kept->count = 0;
    for (size_t i = 0; i < sorted.count; i++) {
        gd_item item = sorted.items[i];
        if (has(gone, item) || item.address >> GD_SLOT_BITS > GROUPS) {
            continue;
        }
        size_t count = kept->count;
        if (count > 0 && kept->items[count - 1].key == item.key) {
            put(pairs, item.address, kept->items[count - 1].address);
        } else {
            put(kept, item.key, item.address);
        }
    }
    sort_once(pairs);
}

/* ---- the index ---- */

static void
begin(void)
{
    char name[GD_NAME_SIZE];
    scratch_init(&x);
    for (uint32_t i = 1; i <= GROUPS; i++) {
        gd_names_group(i, name);
        scratch_write(&x, name, "", 0, 0);
    }
    CHECK_INT(gd_shards_open(x.env, x.root, 0, CATALOG, &shards, &x.err),
              GD_OK);
    CHECK_INT(gd_shards_lock(shards, &x.err), GD_OK);
    CHECK_INT(gd_shards_fill(shards, &x.err), GD_OK);
    gd_shards_unlock(shards);
}

static void
end(void)
{
    gd_shards_close(shards);
    CHECK_INT(scratch_destroy(&x), 0);
}

static void
add(gd_index_kind kind, const bag *b)
{
    static uint8_t records[MAX_COUNT * R];
    for (size_t i = 0; i < b->count; i++) {
        gd_index_put_record(records + i * R, b->items[i].key,
                            b->items[i].address);
    }
    CHECK_INT(gd_shards_lock(shards, &x.err), GD_OK);
    CHECK_INT(gd_shards_add(shards, kind, records, b->count, &x.err), GD_OK);
    gd_shards_unlock(shards);
}

static gd_status
merge_one(uint32_t bits, uint32_t shard, gd_split_limits limits,
          gd_search_result *result)
{
    gd_duplicate_search *search;
    bool more = true;
    uint64_t bytes;
    *result = (gd_search_result){.records = 0};
    gd_status s =
        gd_duplicate_search_begin(shards, bits, shard, limits, &search, &x.err);
    if (s != GD_OK || search == NULL) {
        return s;
    }
    while (s == GD_OK && more) {
        s = gd_duplicate_search_step(search, 100, &more, &bytes, &x.err);
    }
    if (s == GD_OK) {
        s = gd_duplicate_search_finish(search, result, &x.err);
    }
    gd_duplicate_search_end(search);
    return s;
}

static gd_status
merge_all(gd_split_limits limits)
{
    gd_index_list list;
    gd_index_id *current;
    size_t count;
    bool complete;
    gd_search_result result;
    gd_status s = gd_shards_list(shards, &list, &x.err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_shards_current(shards, &list, &current, &count, &complete, &x.err);
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        do {
            s = merge_one(current[i].bits, current[i].shard, limits, &result);
        } while (s == GD_OK && result.more);
    }
    x.env->release(x.env, current);
    x.env->release(x.env, list.files);
    return s;
}

static void
read_into(const gd_index_id *id, bag *b)
{
    gd_index_reader *reader;
    const uint8_t *items;
    size_t count = 1;
    REQUIRE(gd_shards_read(shards, id, &reader, &x.err) == GD_OK);
    while (count > 0 && CHECK_INT(gd_index_reader_next(reader, &items, &count,
                                                       &x.err), GD_OK)) {
          for (size_t i = 0; i < count; i++) {
              if (id->kind == GD_INDEX_PAIRS) {
                  put(b, gd_get64(items + 16 * i),
                      gd_get64(items + 16 * i + 8));
              } else {
                  put(b, gd_index_key(items + i * R),
                      gd_index_address(items + i * R));
              }
          }
      }
    gd_index_reader_close(reader);
}

/* Reads all records of the shards that count, and all pairs; returns the
 * number of files of runs, shards and others. */
static size_t
read_all(bag *kept, bag *pairs, bool *complete, size_t *shard_count)
{
    gd_index_list list;
    gd_index_id *current;
    kept->count = 0;
    CHECK_INT(gd_shards_list(shards, &list, &x.err), GD_OK);
    CHECK_INT(gd_shards_current(shards, &list, &current, shard_count, complete,
                                &x.err), GD_OK);
    for (size_t i = 0; i < *shard_count; i++) {
        read_into(&current[i], kept);
    }
    for (size_t i = 0; i < list.count; i++) {
        if (list.files[i].kind == GD_INDEX_PAIRS) {
            read_into(&list.files[i], pairs);
        }
    }
    sort_once(pairs);
    size_t files = list.count;
    x.env->release(x.env, current);
    x.env->release(x.env, list.files);
    return files;
}

static void
check_bags(const bag *got, const bag *wanted)
{
    CHECK_INT(got->count, wanted->count);
    CHECK(got->count == wanted->count &&
          memcmp(got->items, wanted->items,
                 got->count * sizeof *got->items) == 0);
}

/* ---- merging ---- */

static bag all, gone, kept, pairs, got_kept, got_pairs, run;

TEST(test_like_the_model)
{
    for (uint64_t round = 1; round <= 40; round++) {
        uint64_t seed = round;
        bool complete;
        size_t count;
        begin();
        all.count = gone.count = pairs.count = got_pairs.count = 0;
        for (int pass = 0; pass < 3; pass++) {
            for (uint64_t i = next_random(&seed) % 3 + 1; i > 0; i--) {
                run.count = 0;
                fill(&run, next_random(&seed) % 200, 1 + round * 4, &seed);
                add(GD_INDEX_RUN, &run);
                for (size_t k = 0; k < run.count; k++) {
                    all.items[all.count++] = run.items[k];
                }
            }
            gone.count = 0;
            for (size_t k = 0; k < all.count && round % 2 == 0; k += 5) {
                gone.items[gone.count++] = all.items[k];
            }
            sort_once(&gone);
            add(GD_INDEX_GONE, &gone);
            expect(&all, &gone, &kept, &pairs);
            all = kept; /* the next pass begins with these */
            CHECK_INT(merge_all((gd_split_limits){UINT64_MAX, 20}), GD_OK);
            read_all(&got_kept, &got_pairs, &complete, &count);
            CHECK(complete);
            check_bags(&got_kept, &kept);
            check_bags(&got_pairs, &pairs);
        }
        end();
    }
}

/* Pairs first, then the shard, then the removals; each name durable. */
TEST(test_order)
{
    gd_search_result result;
    begin();
    run.count = 0;
    put(&run, 7, 1 << 15);
    put(&run, 7, 2 << 15);
    add(GD_INDEX_RUN, &run);
    fault_env_start_trace(&x.f);
    CHECK_INT(merge_one(0, 0, NEVER, &result), GD_OK);
    scratch_check_trace(&x, "pwritev fsync linkat unlinkat fsync "
                            "pwritev fsync linkat unlinkat fsync unlinkat");
    CHECK(result.records == 1 && result.pairs == 1 && !result.more);
    /* There are no records to merge, or there is no such shard. */
    CHECK_INT(merge_one(0, 0, NEVER, &result), GD_OK);
    CHECK_INT(result.records, 0);
    CHECK_INT(merge_one(1, 1, NEVER, &result), GD_NOTFOUND);
    CHECK_INT(merge_one(17, 1, NEVER, &result), GD_INVALID);
    CHECK_INT(merge_one(3, 8, NEVER, &result), GD_INVALID);
    end();
}

/* Runs that a crash left, or that are read again, make no pairs. */
TEST(test_record_with_the_same_address)
{
    bool complete;
    size_t count;
    begin();
    got_pairs.count = run.count = 0;
    put(&run, 7, 1 << 15);
    put(&run, 9, 2 << 15);
    for (int i = 0; i < 3; i++) {
        add(GD_INDEX_RUN, &run);
        add(GD_INDEX_RUN, &run);
        CHECK_INT(merge_all(NEVER), GD_OK);
    }
    read_all(&got_kept, &got_pairs, &complete, &count);
    check_bags(&got_kept, &run);
    CHECK_INT(got_pairs.count, 0);
    end();
}

TEST(test_two_at_once)
{
    gd_duplicate_search *one, *two;
    gd_shards *other;
    gd_search_result result;
    bool more;
    uint64_t bytes;
    begin();
    run.count = 0;
    put(&run, 7, 1 << 15);
    add(GD_INDEX_RUN, &run);
    CHECK_INT(gd_shards_open(x.env, x.root, 0, CATALOG, &other, &x.err),
              GD_OK);
    CHECK_INT(gd_duplicate_search_begin(shards, 0, 0, NEVER, &one, &x.err),
              GD_OK);
    CHECK_INT(gd_duplicate_search_begin(other, 0, 0, NEVER, &two, &x.err),
              GD_BUSY);
    /* Runs may come meanwhile. */
    put(&run, 8, 1 << 15);
    add(GD_INDEX_RUN, &run);
    CHECK_INT(gd_duplicate_search_finish(one, &result, &x.err), GD_INVALID);
    CHECK_INT(gd_duplicate_search_step(one, 100, &more, &bytes, &x.err), GD_OK);
    CHECK_INT(gd_duplicate_search_finish(one, &result, &x.err), GD_OK);
    gd_duplicate_search_end(one);
    CHECK_INT(result.records, 1);
    CHECK_INT(merge_one(0, 0, NEVER, &result), GD_OK);
    CHECK_INT(result.records, 2);
    gd_shards_close(other);
    end();
}

/* A split needs the lock of the runs; until it can be had, merges go on. */
TEST(test_split)
{
    gd_search_result result;
    uint64_t seed = 3;
    bool complete;
    size_t count;
    begin();
    run.count = got_pairs.count = pairs.count = gone.count = 0;
    fill(&run, 100, 1000, &seed);
    expect(&run, &gone, &kept, &pairs);
    add(GD_INDEX_RUN, &run);
    CHECK_INT(merge_one(0, 0, (gd_split_limits){UINT64_MAX, 5}, &result),
              GD_OK);
    CHECK(!result.split);
    run = kept;
    run.count = 1;
    add(GD_INDEX_RUN, &run);
    CHECK_INT(gd_shards_lock(shards, &x.err), GD_OK);
    CHECK_INT(merge_one(0, 0, (gd_split_limits){UINT64_MAX, 5}, &result),
              GD_OK);
    CHECK(!result.split);
    gd_shards_unlock(shards);
    add(GD_INDEX_RUN, &run);
    CHECK_INT(merge_one(0, 0, NEVER, &result), GD_OK);
    CHECK(result.split);
    CHECK_INT(read_all(&got_kept, &got_pairs, &complete, &count), 3);
    CHECK(complete && count == 2);
    check_bags(&got_kept, &kept);
    check_bags(&got_pairs, &pairs);
    end();
}

/* ---- the shards that count ---- */

static void
write_shard(uint32_t bits, uint32_t shard, uint64_t generation)
{
    const gd_index_id id = {GD_INDEX_SHARD, bits, shard, generation};
    CHECK_INT(gd_shards_write(shards, &id, NULL, 0, &x.err), GD_OK);
}

static void
check_current(const char *wanted, bool whole)
{
    char text[400] = "";
    gd_index_list list;
    gd_index_id *current;
    size_t count;
    bool complete;
    CHECK_INT(gd_shards_list(shards, &list, &x.err), GD_OK);
    CHECK_INT(gd_shards_current(shards, &list, &current, &count, &complete,
                                &x.err), GD_OK);
    for (size_t i = 0; i < count; i++) {
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%u-%u.%u ",
                 current[i].bits, current[i].shard,
                 (unsigned)current[i].number);
    }
    if (!CHECK(strcmp(text, wanted) == 0)) {
        fprintf(stderr, "%s, not %s\n", text, wanted);
    }
    CHECK_INT(complete, whole);
    x.env->release(x.env, current);
    x.env->release(x.env, list.files);
}

/* ---- several hosts ---- */

static int listings, blind_every;

typedef struct visitor {
    void (*visit)(void *arg, const char *name);
    void *arg;
} visitor;

static void
visit_others(void *arg, const char *name)
{
    const visitor *v = arg;
    if (strncmp(name, "shard-", 6) != 0) {
        v->visit(v->arg, name);
    }
}

/* Another host makes a shard's next generation meanwhile, and removes the last
 * one: this listing has neither. */
static int
list_amid_merges(const gd_env *env, int dir, const char *path,
                 void (*visit)(void *arg, const char *name), void *arg)
{
    visitor v = {visit, arg};
    return listings++ % blind_every == 0
               ? fault_table.list(env, dir, path, visit_others, &v)
               : fault_table.list(env, dir, path, visit, arg);
}

TEST(test_listing_while_others_merge)
{
    gd_index_list list;
    begin();
    x.f.env.list = list_amid_merges;
    listings = 0;
    blind_every = 100;
    check_current("0-0.1 ", true);
    CHECK_INT(listings, 3);
    /* The listing is never the same twice. */
    listings = 0;
    blind_every = 2;
    CHECK_INT(gd_shards_list(shards, &list, &x.err), GD_BUSY);
    CHECK(list.files == NULL && list.count == 0);
    x.f.env.list = fault_table.list;
    end();
}

/* The server has dropped this process's lock: any lock can be taken again. */
static int
lock_nothing(const gd_env *env, int fd, uint64_t byte, short type)
{
    (void)env, (void)fd, (void)byte, (void)type;
    return 0;
}

/* Others continue from the shard twice, each time without the run that sorts
 * behind all others. */
static void
go_on_without_the_last_run(void)
{
    enum { AS_MANY_AS_A_MERGE_TAKES = 63 };
    gd_search_result result;
    for (uint64_t pass = 1; pass <= 2; pass++) {
        for (uint64_t n = 1; n <= AS_MANY_AS_A_MERGE_TAKES; n++) {
            uint8_t record[R];
            const gd_index_id id = {GD_INDEX_RUN, 0, 0, n};
            gd_index_put_record(record, 100 * pass + n, 1 << 15 | n);
            CHECK_INT(gd_shards_write(shards, &id, record, 1, &x.err), GD_OK);
            put(&all, 100 * pass + n, 1 << 15 | n);
        }
        CHECK_INT(merge_one(0, 0, NEVER, &result), GD_OK);
        CHECK(result.more);
    }
}

static int
link_after_others(const gd_env *env, int dir, const char *old,
                  const char *name)
{
    if (strncmp(name, "index/shard-", 12) == 0) {
        x.f.env.linkat = fault_table.linkat;
        go_on_without_the_last_run();
    }
    return fault_table.linkat(env, dir, old, name);
}

/* Its generation is no longer the highest, and no other host has merged the
 * last run. The second time, it has checked just before. */
TEST(test_two_at_once_without_locks)
{
    const gd_index_id last = {GD_INDEX_RUN, 0, 0, UINT64_MAX};
    for (int at_the_link = 0; at_the_link < 2; at_the_link++) {
        gd_duplicate_search *late;
        gd_search_result result;
        uint8_t record[R];
        bool more, complete;
        uint64_t bytes;
        size_t count;
        begin();
        all.count = gone.count = pairs.count = got_pairs.count = 0;
        put(&all, 7, 3 << 15);
        gd_index_put_record(record, 7, 3 << 15);
        CHECK_INT(gd_shards_write(shards, &last, record, 1, &x.err), GD_OK);
        CHECK_INT(gd_duplicate_search_begin(shards, 0, 0, NEVER, &late, &x.err),
                  GD_OK);
        CHECK_INT(gd_duplicate_search_step(late, 100, &more, &bytes, &x.err),
                  GD_OK);
        x.f.env.lock = lock_nothing;
        if (at_the_link) {
            x.f.env.linkat = link_after_others;
        } else {
            go_on_without_the_last_run();
        }
        CHECK_INT(gd_duplicate_search_finish(late, &result, &x.err),
                  GD_NOTFOUND);
        gd_duplicate_search_end(late);
        /* If it noticed in time, it has made no file. */
        CHECK_INT(scratch_count(&x, GD_DIR_INDEX, "shard-", NULL),
                  1 + at_the_link);
        CHECK_INT(merge_all(NEVER), GD_OK);
        expect(&all, &gone, &kept, &pairs);
        read_all(&got_kept, &got_pairs, &complete, &count);
        check_bags(&got_kept, &kept);
        check_bags(&got_pairs, &pairs);
        end();
    }
}

/* The checksums are right, but not the order. */
TEST(test_unsorted)
{
    static const gd_index_kind kinds[] = {GD_INDEX_SHARD, GD_INDEX_RUN,
                                          GD_INDEX_GONE};
    for (size_t k = 0; k < 3; k++) {
        gd_search_result result;
        uint8_t records[2 * R];
        begin();
        run.count = 0;
        put(&run, 7, 1 << 15);
        add(GD_INDEX_RUN, &run);
        const gd_index_id id = {kinds[k], 0, 0, 2};
        gd_index_put_record(records, 9, 1 << 15);
        gd_index_put_record(records + R, 8, 1 << 15);
        CHECK_INT(gd_shards_write(shards, &id, records, 2, &x.err), GD_OK);
        CHECK_INT(gd_shards_verify(shards, &id, &x.err), GD_CORRUPT);
        CHECK_INT(merge_one(0, 0, NEVER, &result), GD_CORRUPT);
        end();
    }
}

TEST(test_catalog_of_the_cursors)
{
    static const uint8_t later_id[GD_ID_SIZE] = "a later catalog";
    const gd_index_id first = {GD_INDEX_CURSORS, 0, 0, 5};
    const gd_index_id second = {GD_INDEX_CURSORS, 0, 0, 6};
    gd_shards *other, *later;
    char name[GD_NAME_SIZE];
    begin();
    CHECK_INT(gd_shards_open(x.env, x.root, 0, NULL, &other, &x.err),
              GD_NOTFOUND);
    CHECK_INT(gd_shards_write(shards, &first, NULL, 0, &x.err), GD_OK);
    CHECK_INT(gd_shards_open(x.env, x.root, 0, NULL, &other, &x.err), GD_OK);
    CHECK_INT(gd_shards_verify(other, &first, &x.err), GD_OK);
    gd_shards_close(other);
    CHECK_INT(gd_shards_open(x.env, x.root, 0, later_id, &later, &x.err),
              GD_OK);
    CHECK_INT(gd_shards_write(later, &second, NULL, 0, &x.err), GD_OK);
    gd_shards_close(later);
    CHECK_INT(gd_shards_open(x.env, x.root, 0, NULL, &other, &x.err), GD_OK);
    CHECK_INT(gd_shards_verify(other, &second, &x.err), GD_OK);
    CHECK_INT(gd_shards_verify(other, &first, &x.err), GD_CORRUPT);
    gd_shards_close(other);
    gd_names_index(&second, name);
    scratch_truncate(&x, name, 100);
    CHECK_INT(gd_shards_open(x.env, x.root, 0, NULL, &other, &x.err),
              GD_CORRUPT);
    end();
}

TEST(test_which_shards_count)
{
    gd_index_list list;
    uint64_t next;
    begin();
    check_current("0-0.1 ", true);
    write_shard(1, 0, 2); /* the half of a split, alone */
    check_current("0-0.1 ", true);
    CHECK_INT(gd_shards_list(shards, &list, &x.err), GD_OK);
    CHECK_INT(gd_shards_next(&list, 0, 0, &next, &x.err), GD_OK);
    CHECK_INT(next, 3);
    CHECK_INT(gd_shards_next(&list, 1, 1, &next, &x.err), GD_OK);
    CHECK_INT(next, 1);
    x.env->release(x.env, list.files);
    write_shard(0, 0, 3);
    write_shard(1, 1, 4); /* half of the next split: the first's is too old */
    check_current("0-0.3 ", true);
    write_shard(1, 0, 4);
    check_current("1-0.4 1-1.4 ", true);
    /* A process that lost its locks tries to make a file that exists. */
    const gd_index_id late = {GD_INDEX_SHARD, 0, 0, 3};
    CHECK_INT(gd_shards_write(shards, &late, NULL, 0, &x.err), GD_EXISTS);
    write_shard(0, 0, 4);
    check_current("1-0.4 1-1.4 ", true);
    write_shard(2, 0, 5);
    write_shard(2, 1, 7);
    check_current("2-0.5 2-1.7 1-1.4 ", true);
    CHECK_INT(gd_shards_tidy(shards, &x.err), GD_INVALID);
    CHECK_INT(gd_shards_lock(shards, &x.err), GD_OK);
    CHECK_INT(gd_shards_tidy(shards, &x.err), GD_OK);
    CHECK_INT(scratch_count(&x, GD_DIR_INDEX, "shard-", NULL), 3);
    const gd_index_id lost = {GD_INDEX_SHARD, 2, 0, 5};
    CHECK_INT(gd_shards_remove(shards, &lost, &x.err), GD_OK);
    check_current("2-1.7 1-1.4 ", false);
    CHECK_INT(gd_shards_fill(shards, &x.err), GD_OK);
    check_current("2-0.1 2-1.7 1-1.4 ", true);
    /* No generation comes after the last. */
    write_shard(2, 0, UINT32_MAX);
    CHECK_INT(gd_shards_list(shards, &list, &x.err), GD_OK);
    CHECK_INT(gd_shards_next(&list, 2, 0, &next, &x.err), GD_CORRUPT);
    x.env->release(x.env, list.files);
    end();
}

TEST(test_dead_makers)
{
    gd_index_writer *writer;
    const gd_index_id id = {GD_INDEX_RUN, 0, 0, 5};
    begin();
    scratch_write(&x, "index/new-00-0000.0000000000000009", "x", 1, 0);
    CHECK_INT(gd_shards_create(shards, &id, &writer, &x.err), GD_OK);
    CHECK_INT(gd_shards_lock(shards, &x.err), GD_OK);
    CHECK_INT(gd_shards_tidy(shards, &x.err), GD_OK);
    CHECK_INT(scratch_count(&x, GD_DIR_INDEX, "new-", NULL), 1);
    /* A writer that was taken for dead notices it when it needs the name. */
    char name[GD_NAME_SIZE];
    CHECK_INT(scratch_count(&x, GD_DIR_INDEX, "new-", name), 1);
    CHECK_INT(unlinkat(x.root, name, 0), 0);
    CHECK_INT(gd_index_writer_seal(writer, 0, &x.err), GD_OK);
    CHECK_INT(gd_index_writer_publish(writer, &x.err), GD_BUSY);
    gd_index_writer_discard(writer);
    end();
}

TEST(test_find)
{
    uint64_t seed = 8, address;
    begin();
    run.count = pairs.count = gone.count = 0;
    fill(&run, 3000, 100000, &seed);
    expect(&run, &gone, &kept, &pairs);
    for (int pass = 0; pass < 3; pass++) {
        add(GD_INDEX_RUN, &run);
        CHECK_INT(merge_all((gd_split_limits){UINT64_MAX, 1}), GD_OK);
        for (size_t i = 0; i < kept.count; i += 7) {
            CHECK_INT(gd_shards_find(shards, kept.items[i].key, &address,
                                     &x.err), GD_OK);
            CHECK_INT(address, kept.items[i].address);
            CHECK_INT(gd_shards_find(shards, kept.items[i].key + 1, &address,
                                     &x.err), GD_OK);
            CHECK_INT(address, 0);
        }
    }
    end();
}

/* Returns the one shard that counts. */
static void
find_current(gd_index_id *id)
{
    gd_index_list list;
    gd_index_id *current;
    size_t count;
    bool complete;
    REQUIRE(gd_shards_list(shards, &list, &x.err) == GD_OK);
    REQUIRE(gd_shards_current(shards, &list, &current, &count, &complete,
                              &x.err) == GD_OK);
    REQUIRE(CHECK_INT(count, 1));
    *id = current[0];
    x.env->release(x.env, current);
    x.env->release(x.env, list.files);
}

/* Searching finds the records of both frames of a shard. It detects a damaged
 * byte, and a frame in the place of the other one. */
TEST(test_several_frames)
{
    enum { FRAME = GD_PACKED_FRAME, STEP = 97 };
    static uint8_t bytes[2 * FRAME];
    char name[GD_NAME_SIZE];
    uint64_t address;
    gd_search_result result;
    gd_index_id id = {.kind = GD_INDEX_PAIRS};
    begin();
    all.count = 0;
    for (uint64_t i = 0; i < MAX_COUNT; i++) {
        put(&all, i * (UINT64_MAX / MAX_COUNT), 1 << GD_SLOT_BITS | i);
    }
    add(GD_INDEX_RUN, &all);
    CHECK_INT(merge_one(0, 0, NEVER, &result), GD_OK);
    CHECK_INT(result.records, MAX_COUNT);
    CHECK_INT(scratch_count(&x, GD_DIR_INDEX, "shard-", name), 1);
    find_current(&id);
    CHECK_INT(gd_shards_verify(shards, &id, &x.err), GD_OK);
    int64_t size = scratch_size(&x, name);
    CHECK(size > GD_INDEX_HEAD + FRAME && size < GD_INDEX_HEAD + 2 * FRAME);
    for (size_t i = 0; i < MAX_COUNT; i += i + STEP < MAX_COUNT ? STEP : 1) {
        CHECK_INT(gd_shards_find(shards, all.items[i].key, &address, &x.err),
                  GD_OK);
        CHECK_INT(address, all.items[i].address);
    }
    size_t last = (size_t)size - GD_INDEX_HEAD - FRAME;
    scratch_read(&x, name, bytes, FRAME + last, GD_INDEX_HEAD);
    for (size_t at = 0; at < FRAME + last; at += STEP) {
        scratch_flip(&x, name, GD_INDEX_HEAD + at, 0x20);
        CHECK_INT(gd_shards_verify(shards, &id, &x.err), GD_CORRUPT);
        scratch_flip(&x, name, GD_INDEX_HEAD + at, 0x20);
    }
    /* The last frame's bytes are all right, but they are the first's. */
    scratch_write(&x, name, bytes + FRAME, last, GD_INDEX_HEAD);
    CHECK_INT(gd_shards_find(shards, 0, &address, &x.err), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "checksum of frame 0");
    end();
}

/* Any damaged byte of any file, and any wrong length, is detected. */
TEST(test_damage)
{
    char name[GD_NAME_SIZE];
    gd_search_result result;
    static const char *const kinds[] = {"shard-", "run-"};
    begin();
    run.count = 0;
    put(&run, 7, 1 << 15);
    put(&run, 9, 1 << 15);
    add(GD_INDEX_RUN, &run);
    CHECK_INT(merge_one(0, 0, NEVER, &result), GD_OK);
    add(GD_INDEX_RUN, &run);
    for (size_t k = 0; k < 2; k++) {
        CHECK_INT(scratch_count(&x, GD_DIR_INDEX, kinds[k], name), 1);
        int64_t size = scratch_size(&x, name);
        for (int64_t at = 0; at < size; at += 1 + (at > 70 && at < 500) * 9) {
            scratch_flip(&x, name, (uint64_t)at, 0x20);
            gd_status s = merge_one(0, 0, NEVER, &result);
            CHECK(s == GD_CORRUPT || ((at == 8 || at == 9) &&
                                      s == GD_VERSION));
            scratch_flip(&x, name, (uint64_t)at, 0x20);
        }
        uint8_t bytes[1000];
        scratch_read(&x, name, bytes, (size_t)size, 0);
        for (int64_t length = 0; length < size; length += 13) {
            scratch_truncate(&x, name, (uint64_t)length);
            CHECK_INT(merge_one(0, 0, NEVER, &result), GD_CORRUPT);
        }
        scratch_truncate(&x, name, (uint64_t)size + 1);
        CHECK_INT(merge_one(0, 0, NEVER, &result), GD_CORRUPT);
        scratch_truncate(&x, name, (uint64_t)size);
        scratch_write(&x, name, bytes, (size_t)size, 0);
    }
    CHECK_INT(merge_one(0, 0, NEVER, &result), GD_OK);
    CHECK_INT(scratch_count(&x, GD_DIR_INDEX, "", NULL), 1);
    end();
}

/* ---- faults and crashes ---- */

static void
prepare_fault(void)
{
    uint64_t seed = 11;
    begin();
    run.count = pairs.count = got_pairs.count = gone.count = 0;
    fill(&run, 60, 20, &seed);
    all = run;
    add(GD_INDEX_RUN, &run);
    CHECK_INT(merge_all((gd_split_limits){UINT64_MAX, 1}), GD_OK);
    expect(&all, &gone, &kept, &pairs);
    run.count = 0;
    fill(&run, 60, 20, &seed);
    add(GD_INDEX_RUN, &run);
    all = kept;
    for (size_t i = 0; i < run.count; i++) {
        all.items[all.count++] = run.items[i];
    }
    expect(&all, &gone, &kept, &pairs);
}

/* Everything fails from the nth call on, as if the process were killed there;
 * then the machine crashes, too. Pairs that were found until then may be
 * applied before the repeated merge, or not. */
TEST(test_killed_at_each_call)
{
    bool died = true;
    for (uint64_t n = 1; died; n++) {
        bool complete;
        size_t count;
        prepare_fault(); /* the merge that follows splits the shard */
        fault_env_start_shadow(&x.f);
        fault_env_fail(&x.f, FAULT_ANY, n, EIO, true);
        (void)merge_all(NEVER);
        died = fault_env_faults(&x.f) > 0;
        fault_env_heal(&x.f);
        fault_env_crash(&x.f);
        CHECK_INT(gd_shards_lock(shards, &x.err), GD_OK);
        CHECK_INT(gd_shards_tidy(shards, &x.err), GD_OK);
        gd_shards_unlock(shards);
        if (n % 2 == 0) {
            char name[GD_NAME_SIZE];
            read_all(&got_kept, &got_pairs, &complete, &count);
            while (scratch_count(&x, GD_DIR_INDEX, "pairs-", name) > 0) {
                CHECK_INT(unlinkat(x.root, name, 0), 0);
            }
        }
        CHECK_INT(merge_all(NEVER), GD_OK);
        read_all(&got_kept, &got_pairs, &complete, &count);
        CHECK(complete);
        check_bags(&got_kept, &kept);
        check_bags(&got_pairs, &pairs);
        CHECK_INT(scratch_count(&x, GD_DIR_INDEX, "new-", NULL), 0);
        end();
    }
}

TEST(test_faults)
{
    static const int errors[] = {EIO, ENOSPC, EINTR, EMFILE, ENOMEM};
    for (fault_call call = 0; call < FAULT_CALLS; call++) {
        bool failed = call != FAULT_ANY;
        for (uint64_t n = 1; failed; n++) {
            bool complete;
            size_t count;
            prepare_fault();
            fault_env_fail(&x.f, call, n, errors[n % 5], false);
            gd_status s = merge_all(NEVER);
            failed = fault_env_faults(&x.f) > 0;
            CHECK(failed || s == GD_OK);
            CHECK(s == GD_OK || s == GD_IO || s == GD_NOSPACE ||
                  s == GD_NOMEM || s == GD_BUSY);
            fault_env_heal(&x.f);
            CHECK_INT(merge_all(NEVER), GD_OK);
            read_all(&got_kept, &got_pairs, &complete, &count);
            CHECK(complete);
            check_bags(&got_kept, &kept);
            check_bags(&got_pairs, &pairs);
            end();
        }
    }
}
