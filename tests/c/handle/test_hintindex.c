/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_hintindex.c - the filter and the stores give the hints that were added;
 * stores keep them and the cursor; and whatever fails, is full or is damaged,
 * hints are lost and nothing else.
 */
#include "engine/handle/hintindex.h"

#include "engine/base/coding.h"
#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"

enum {
    ENTRIES = 1000,
    FILTER = GD_KV_BACKENDS, /* stands for it beside the backends */
    CACHE = 1 << 20,
};

static const uint8_t REPOSITORY[16] = "repository no. 1";

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
    x->options = (gd_kv_options){GD_KV_SPARSE, 4 * ENTRIES, CACHE};
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
take(void *arg, size_t i, gd_address hint)
{
    fixture *x = arg;
    CHECK(i + 1 >= x->order && i < ENTRIES);
    x->order = i + 1;
    if (x->found[i].group < hint.group) { /* the filter may have several */
        x->found[i] = hint;
    }
}

/* How many entries have a hint to their slot of the group. */
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

static void
test_hints(void)
{
    for (int kind = 0; kind <= FILTER; kind++) {
        fixture *x = setup(kind);
        CHECK_INT(count_found(x, 7, 5), 0);
        x->index->add(x->index, 7, 5, x->entries, ENTRIES);
        CHECK_INT(count_found(x, 7, 5), LIVE);
        x->index->add(x->index, 8, 0, x->entries, ENTRIES); /* again */
        CHECK_INT(count_found(x, 8, 0), LIVE);
        x->index->reject(x->index, &x->entries[0].fingerprint,
                         (gd_address){8, 0});
        CHECK(count_found(x, 8, 0) >= LIVE - 1);
        x->index->add(x->index, 9, 0, x->entries, 0);
        CHECK_INT(stats_of(x).dropped, 0);
        CHECK(stats_of(x).places >= ENTRIES);
        teardown(x);
    }
}

static void
test_kept(void)
{
    for (int kind = 0; kind <= FILTER; kind++) {
        fixture *x = setup(kind);
        bool kept = kind != GD_KV_INRAM;
        bool shared = kind == GD_KV_LMDB || kind == FILTER;
        CHECK(x->index->rebuild_lock(x->index));
        CHECK(!x->index->rebuild_lock(x->index));
        x->index->add(x->index, 1, 0, x->entries, ENTRIES);
        x->index->rebuild_set(x->index, 1, false);
        x->index->rebuild_unlock(x->index);
        close_index(x);
        CHECK_INT(open_index(x), GD_OK);
        CHECK_INT(count_found(x, 1, 0), kept ? LIVE : 0);
        CHECK(!stats_of(x).complete);
        CHECK(x->index->rebuild_lock(x->index));
        x->index->rebuild_set(x->index, 2, true);
        x->index->rebuild_unlock(x->index);
        close_index(x);
        CHECK_INT(open_index(x), GD_OK);
        /* What serves one process reads the last group again. */
        CHECK_INT(stats_of(x).rebuilt, shared ? 2 : kept ? 1 : 0);
        CHECK_INT(stats_of(x).complete, shared);
        CHECK(x->index->rebuild_lock(x->index));
        x->index->clear(x->index);
        x->index->rebuild_unlock(x->index);
        CHECK_INT(count_found(x, 1, 0), 0);
        CHECK_INT(stats_of(x).rebuilt, 0);
        CHECK(!stats_of(x).complete);
        x->index->add(x->index, 3, 0, x->entries, ENTRIES);
        CHECK_INT(count_found(x, 3, 0), LIVE);
        teardown(x);
    }
}

/* Values that are no addresses, and a cursor that is none. */
static void
test_wrong_values(void)
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

/* More than fit: hints are dropped, and counted. */
static void
test_full(void)
{
    fixture *x = setup(GD_KV_DTB);
    close_index(x);
    x->options.capacity = 10; /* one page has 255 places */
    CHECK_INT(open_index(x), GD_OK);
    x->index->add(x->index, 1, 0, x->entries, ENTRIES);
    unsigned found = count_found(x, 1, 0);
    CHECK(found >= 10 && found <= 255);
    CHECK_INT(stats_of(x).dropped, LIVE - found);
    teardown(x);
}

/* Each system call and allocation fails once. */
static void
test_faults(void)
{
    for (uint64_t n = 1;; n++) {
        fixture *x = setup(GD_KV_DTB);
        uint64_t before = fault_env_faults(&x->f);
        close_index(x);
        fault_env_fail(&x->f, n % 2 == 0 ? FAULT_ANY : FAULT_ALLOC, n / 2 + 1,
                       EIO, false);
        bool opened = open_index(x) == GD_OK;
        if (opened) {
            x->index->add(x->index, 1, 0, x->entries, ENTRIES);
            (void)count_found(x, 1, 0);
            if (x->index->rebuild_lock(x->index)) {
                x->index->rebuild_set(x->index, 1, true);
                x->index->rebuild_unlock(x->index);
            }
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

/* What is damaged while it is used is replaced. */
static void
test_damage_while_open(void)
{
    fixture *x = setup(GD_KV_DTB);
    x->index->add(x->index, 1, 0, x->entries, ENTRIES);
    fault_env_fail(&x->f, FAULT_PWRITEV, 1, EIO, true);
    CHECK(x->index->rebuild_lock(x->index));
    x->index->rebuild_set(x->index, 1, true); /* commits, and fails */
    x->index->rebuild_unlock(x->index);
    fault_env_heal(&x->f);
    CHECK_INT(count_found(x, 1, 0), 0);
    x->index->add(x->index, 1, 0, x->entries, ENTRIES); /* goes nowhere */
    CHECK_INT(count_found(x, 1, 0), 0);
    CHECK(stats_of(x).dropped > 0);
    CHECK(!stats_of(x).complete);
    /* Who goes on with the rebuild opens the store again. */
    CHECK(x->index->rebuild_lock(x->index));
    x->index->rebuild_unlock(x->index);
    x->index->add(x->index, 1, 0, x->entries, ENTRIES);
    CHECK_INT(count_found(x, 1, 0), LIVE);
    close_index(x);
    CHECK_INT(open_index(x), GD_OK);
    CHECK(!stats_of(x).complete);
    teardown(x);
}

int
main(int argc, char **argv)
{
    BEGIN(argc, argv);
    RUN(test_hints);
    RUN(test_kept);
    RUN(test_wrong_values);
    RUN(test_full);
    RUN(test_faults);
    RUN(test_damage_while_open);
    return REPORT();
}
