/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_hintindex.c - the filter and the kv stores give the hints that were
 * added; stores keep them and the cursor; and if any call fails, or a store is
 * full or damaged, only hints are lost.
 */
#include "engine/repo/hintindex.h"

#include "engine/base/coding.h"
#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"

enum {
    ENTRIES = 1000,
    FILTER = GD_KV_BACKENDS, /* the filter, beside the backends */
    CACHE = 1 << 20,
};

static const uint8_t REPOSITORY[16] = "repository no 1";

typedef struct fixture {
    fault_env f;
    char *dir;
    char path[256];
    int kind; /* a backend, or FILTER */
    gd_kv_options options;
    gd_filter *filter;
    gd_hintindex *index;
    gd_entry entries[ENTRIES];
    gd_address found[ENTRIES]; /* by search; group 0: no hint */
    size_t order;              /* of the last one taken, plus one */
    gd_error err;
} fixture;

static gd_status
open_index(fixture *x)
{
    const gd_env *env = &x->f.env;
    if (x->kind != FILTER) {
        return gd_hintindex_of_store(env, (gd_kv_backend)x->kind, x->path,
                                     &x->options, &x->index, &x->err);
    }
    gd_status s = gd_filter_open(env, x->path, REPOSITORY, CACHE, &x->filter,
                                 &x->err);
    if (s == GD_OK) {
        s = gd_hintindex_of_filter(env, x->filter, &x->index, &x->err);
    }
    return s;
}

static void
close_index(fixture *x)
{
    if (x->index != NULL) {
        x->index->close(x->index);
    }
    gd_filter_close(&x->f.env, x->filter);
    x->index = NULL;
    x->filter = NULL;
}

static fixture *
setup(int kind)
{
    fixture *x = calloc(1, sizeof *x);
    fault_env_init(&x->f);
    x->dir = check_mkdir_shm();
    snprintf(x->path, sizeof x->path, "%s/store", x->dir);
    x->kind = kind;
    x->options = (gd_kv_options){4 * ENTRIES, CACHE};
    for (uint64_t n = 0; n < ENTRIES; n++) {
        x->entries[n].state = n % 10 == 9 ? GD_ENTRY_FREED : GD_ENTRY_LIVE;
        for (unsigned i = 0; i < GD_FINGERPRINT_SIZE; i += 8) {
            gd_put64(x->entries[n].fingerprint.bytes + i,
                     gd_checksum(&n, sizeof n, i));
        }
    }
    if (!CHECK_INT(open_index(x), GD_OK)) {
        fprintf(stderr, "%s\n", x->err.text);
        exit(1);
    }
    return x;
}

static void
teardown(fixture *x)
{
    close_index(x);
    CHECK_INT(fault_env_leaks(&x->f), 0);
    fault_env_destroy(&x->f);
    check_rmdir(x->dir);
    free(x);
}

static void
add(fixture *x, uint32_t group, uint32_t first)
{
    x->index->add(x->index,
                  &(gd_entry_range){group, first, ENTRIES, x->entries});
}

static void
take(void *arg, size_t i, gd_address hint)
{
    fixture *x = arg;
    CHECK(i + 1 >= x->order && i < ENTRIES);
    x->order = i + 1;
    if (x->found[i].group < hint.group) { /* the filter may have several */
        x->found[i] = hint;
    }
}

/* Returns the number of entries with a hint to their slot of the group. */
static unsigned
count_found(fixture *x, uint32_t group, uint32_t first)
{
    const gd_fingerprint *fps[ENTRIES];
    for (size_t i = 0; i < ENTRIES; i++) {
        fps[i] = &x->entries[i].fingerprint;
    }
    memset(x->found, 0, sizeof x->found);
    x->order = 0;
    x->index->find(x->index, fps, ENTRIES, take, x);
    unsigned found = 0;
    for (uint32_t i = 0; i < ENTRIES; i++) {
        found += x->found[i].group == group && x->found[i].slot == first + i;
        CHECK(x->found[i].group == 0 || x->entries[i].state == GD_ENTRY_LIVE);
    }
    return found;
}

static gd_filter_stats
stats_of(fixture *x)
{
    gd_filter_stats stats;
    x->index->get_stats(x->index, &stats);
    return stats;
}

enum { LIVE = ENTRIES / 10 * 9 };

/* Saves as the owner of the lock; returns false if another handle is. */
static bool
save_with(fixture *x, const gd_entry_range *last, uint32_t newest,
          bool complete)
{
    gd_position position;
    if (!x->index->rebuild_lock(x->index)) {
        return false;
    }
    x->index->load(x->index, &position);
    position.newest = newest;
    position.complete = complete;
    x->index->save(x->index, last, &position, &(gd_look){.ended_ns = 77});
    x->index->rebuild_unlock(x->index);
    return true;
}

static bool
save(fixture *x, uint32_t newest, bool complete)
{
    return save_with(x, &(gd_entry_range){0}, newest, complete);
}

TEST(test_hints)
{
    for (int kind = 0; kind <= FILTER; kind++) {
        fixture *x = setup(kind);
        CHECK_INT(count_found(x, 7, 5), 0);
        add(x, 7, 5);
        CHECK_INT(count_found(x, 7, 5), LIVE);
        add(x, 8, 0); /* again */
        CHECK_INT(count_found(x, 8, 0), LIVE);
        x->index->reject(x->index, &x->entries[0].fingerprint,
                         (gd_address){8, 0});
        CHECK(count_found(x, 8, 0) >= LIVE - 1);
        x->index->add(x->index, &(gd_entry_range){.group = 9});
        CHECK_INT(stats_of(x).dropped, 0);
        CHECK(stats_of(x).places >= ENTRIES);
        teardown(x);
    }
}

TEST(test_kept)
{
    for (int kind = 0; kind <= FILTER; kind++) {
        fixture *x = setup(kind);
        bool kept = kind != GD_KV_INRAM;
        CHECK(x->index->rebuild_lock(x->index));
        CHECK(!x->index->rebuild_lock(x->index));
        add(x, 1, 0);
        x->index->rebuild_unlock(x->index);
        CHECK(save(x, 1, false));
        close_index(x);
        CHECK_INT(open_index(x), GD_OK);
        CHECK_INT(count_found(x, 1, 0), kept ? LIVE : 0);
        CHECK(!stats_of(x).complete);
        CHECK(save(x, 2, true));
        CHECK_INT(stats_of(x).look.ended_ns, 77);
        close_index(x);
        CHECK_INT(open_index(x), GD_OK);
        CHECK_INT(stats_of(x).rebuilt, kept ? 2 : 0);
        CHECK_INT(stats_of(x).complete, kept);
        /* An index of a single process has not scanned yet. */
        bool shared = kind == GD_KV_LMDB || kind == FILTER;
        CHECK_INT(stats_of(x).look.ended_ns, shared ? 77 : 0);
        CHECK(x->index->rebuild_lock(x->index));
        x->index->clear(x->index);
        x->index->rebuild_unlock(x->index);
        CHECK_INT(count_found(x, 1, 0), 0);
        CHECK_INT(stats_of(x).rebuilt, 0);
        CHECK(!stats_of(x).complete);
        add(x, 3, 0);
        CHECK_INT(count_found(x, 3, 0), LIVE);
        teardown(x);
    }
}

/* These values are no addresses, and the cursor is invalid. */
TEST(test_wrong_values)
{
    for (int kind = GD_KV_DTB; kind < GD_KV_BACKENDS; kind++) {
        fixture *x = setup(kind);
        close_index(x);
        gd_kv *kv;
        REQUIRE(gd_kv_open(&x->f.env, (gd_kv_backend)kind, x->path,
                           &x->options, &kv, &x->err) == GD_OK);
        gd_kv_pair pairs[ENTRIES];
        for (unsigned i = 0; i < ENTRIES; i++) {
            pairs[i] = (gd_kv_pair){
                gd_get64(x->entries[i].fingerprint.bytes),
                i % 2 == 0 ? UINT64_MAX - i : i}; /* too large; group 0 */
        }
        pairs[0] = (gd_kv_pair){UINT64_MAX, UINT64_MAX};
        CHECK_INT(gd_kv_put_batch(kv, pairs, ENTRIES, &x->err), GD_OK);
        CHECK_INT(gd_kv_commit(kv, &x->err), GD_OK);
        gd_kv_close(kv);
        CHECK_INT(open_index(x), GD_OK);
        CHECK_INT(stats_of(x).rebuilt, 0);
        CHECK(!stats_of(x).complete);
        count_found(x, 1, 0);
        for (unsigned i = 0; i < ENTRIES; i++) {
            CHECK_INT(x->found[i].group, 0);
        }
        teardown(x);
    }
}

/* If more hints are added than fit, some are dropped, and counted. */
TEST(test_full)
{
    fixture *x = setup(GD_KV_DTB);
    close_index(x);
    x->options.capacity = 10; /* one page has 255 places */
    CHECK_INT(open_index(x), GD_OK);
    add(x, 1, 0);
    unsigned found = count_found(x, 1, 0);
    CHECK(found >= 10 && found <= 255);
    CHECK_INT(stats_of(x).dropped, LIVE - found);
    teardown(x);
}

/* Each system call and allocation fails once. */
TEST(test_faults)
{
    for (uint64_t n = 1;; n++) {
        fixture *x = setup(GD_KV_DTB);
        uint64_t before = fault_env_faults(&x->f);
        close_index(x);
        fault_env_fail(&x->f, n % 2 == 0 ? FAULT_ANY : FAULT_ALLOC, n / 2 + 1,
                       EIO, false);
        bool opened = open_index(x) == GD_OK;
        if (opened) {
            add(x, 1, 0);
            (void)count_found(x, 1, 0);
            (void)save(x, 1, true);
        }
        close_index(x);
        bool failed = fault_env_faults(&x->f) > before;
        fault_env_heal(&x->f);
        CHECK(opened || failed);
        CHECK_INT(open_index(x), GD_OK);
        CHECK(stats_of(x).rebuilt <= 1);
        if (!failed) {
            CHECK_INT(count_found(x, 1, 0), LIVE);
        }
        teardown(x);
        if (!failed && n > 60) {
            return;
        }
    }
}

/* Hints that are saved with a position are found, and kept with it. */
TEST(test_saved_with_the_position)
{
    for (int kind = 0; kind <= FILTER; kind++) {
        fixture *x = setup(kind);
        const gd_entry_range last = {4, 6, ENTRIES, x->entries};
        CHECK(save_with(x, &last, 4, true));
        CHECK_INT(count_found(x, 4, 6), LIVE);
        close_index(x);
        CHECK_INT(open_index(x), GD_OK);
        CHECK_INT(count_found(x, 4, 6), kind == GD_KV_INRAM ? 0 : LIVE);
        CHECK_INT(stats_of(x).rebuilt, kind == GD_KV_INRAM ? 0 : 4);
        teardown(x);
    }
}

/* Whenever a commit breaks off, a position that is there has its hints. */
TEST(test_order_of_a_commit)
{
    bool failed = true;
    for (uint64_t n = 1; failed; n += 3) {
        fixture *x = setup(GD_KV_DTB);
        close_index(x);
        x->options.capacity = 256 * ENTRIES; /* so pages are written singly */
        x->options.cache = 16 * CACHE;
        CHECK_INT(open_index(x), GD_OK);
        const gd_entry_range last = {1, 0, ENTRIES, x->entries};
        fault_env_fail(&x->f, FAULT_PWRITEV, n, EIO, true);
        uint64_t before = fault_env_faults(&x->f);
        CHECK(save_with(x, &last, 1, true));
        failed = fault_env_faults(&x->f) > before;
        close_index(x);
        fault_env_heal(&x->f);
        CHECK_INT(open_index(x), GD_OK);
        CHECK(!stats_of(x).complete || count_found(x, 1, 0) == LIVE);
        CHECK(failed || stats_of(x).complete);
        teardown(x);
    }
}

/* The store became empty between the load and the save. */
TEST(test_emptied_during_a_look)
{
    for (int kind = 0; kind < GD_KV_BACKENDS; kind++) {
        fixture *x = setup(kind);
        gd_position position;
        CHECK(save(x, 7, true));
        CHECK(x->index->rebuild_lock(x->index));
        x->index->load(x->index, &position);
        CHECK_INT(position.newest, 7);
        x->index->clear(x->index); /* as after damage */
        x->index->save(x->index, &(gd_entry_range){0}, &position,
                       &(gd_look){0});
        x->index->rebuild_unlock(x->index);
        CHECK_INT(stats_of(x).rebuilt, 0);
        CHECK(!stats_of(x).complete);
        teardown(x);
    }
}

/* A store that is damaged while in use is replaced. */
TEST(test_damage_while_open)
{
    fixture *x = setup(GD_KV_DTB);
    add(x, 1, 0);
    fault_env_fail(&x->f, FAULT_PWRITEV, 1, EIO, true);
    CHECK(save(x, 1, true)); /* commits, and fails */
    fault_env_heal(&x->f);
    CHECK_INT(count_found(x, 1, 0), 0);
    add(x, 1, 0); /* has no effect */
    CHECK_INT(count_found(x, 1, 0), 0);
    CHECK(stats_of(x).dropped > 0);
    CHECK(!stats_of(x).complete);
    /* The process that continues the rebuild opens the store again. */
    CHECK(x->index->rebuild_lock(x->index));
    x->index->rebuild_unlock(x->index);
    add(x, 1, 0);
    CHECK_INT(count_found(x, 1, 0), LIVE);
    close_index(x);
    CHECK_INT(open_index(x), GD_OK);
    CHECK(!stats_of(x).complete);
    teardown(x);
}
