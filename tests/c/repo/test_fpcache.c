/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_fpcache.c - open groups and loaded tables: lent, cached within bounds,
 * closed when they are out of date, and never freed while in use.
 */
#include "engine/repo/fpcache.h"

#include "engine/base/coding.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { KEPT = 64 }; /* open groups */

typedef struct fixture {
    scratch x;
    gd_locks *locks;
    gd_fpcache *cache;
    uint32_t made; /* groups */
} fixture;

static void
make_groups(fixture *t, uint32_t count)
{
    while (t->made < count) {
        CHECK_INT(gd_group_create(t->x.env, t->x.root, &t->x.params,
                                  &gd_global_scope, t->locks, &t->made,
                                  &t->x.err), GD_OK);
    }
}

static void
setup(fixture *t, uint32_t groups)
{
    memset(t, 0, sizeof *t);
    scratch_init(&t->x);
    CHECK_INT(gd_locks_open(t->x.env, t->x.root, &t->locks, &t->x.err), GD_OK);
    CHECK_INT(gd_fpcache_open(t->x.env, t->x.root, &t->x.params, KEPT,
                              &t->cache, &t->x.err),
              GD_OK);
    make_groups(t, groups);
}

static void
teardown(fixture *t)
{
    gd_fpcache_close(t->cache);
    gd_locks_close(t->locks);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

static gd_group *
lend(fixture *t, uint32_t number, bool fresh)
{
    gd_group *group = NULL;
    CHECK_INT(gd_fpcache_group(t->cache, number, fresh, &group, &t->x.err),
              GD_OK);
    CHECK_INT(group->number, number);
    return group;
}

/* Publishes so many live entries, with fingerprints of the group's own. */
static void
publish(fixture *t, uint32_t number, uint64_t sequence, uint64_t generation,
        uint32_t count)
{
    static gd_entry entries[64];
    gd_group *group;
    REQUIRE(gd_group_open(gd_env_posix(), t->x.root, &t->x.params, number,
                          O_RDWR, &group, NULL) == GD_OK);
    for (uint32_t slot = 0; slot < count; slot++) {
        entries[slot] = (gd_entry){.segment = 8192,
                                   .plain_length = 1,
                                   .stored_length = 1,
                                   .state = GD_ENTRY_LIVE};
        fill_random(entries[slot].fingerprint.bytes, GD_FINGERPRINT_SIZE,
                    number * 64 + slot);
    }
    const gd_published record = {.sequence = sequence,
                                 .generation = generation,
                                 .count = count,
                                 .end = 8192};
    CHECK(count == 0 ||
          gd_group_write_entries(group, 0, count, entries, NULL) == GD_OK);
    CHECK_INT(gd_group_write_published(group, &record, NULL), GD_OK);
    gd_group_close(group);
}

static gd_fptable *
lend_store(fixture *t, uint32_t number, bool cold_wanted)
{
    gd_fptable *store = NULL;
    bool cold = !cold_wanted;
    CHECK_INT(gd_fpcache_store(t->cache, number, &store, &cold, &t->x.err),
              GD_OK);
    CHECK_INT(cold, cold_wanted);
    CHECK_INT(store->group, number);
    return store;
}

static fixture t;

/* ---- groups ---- */

TEST_WITH(test_lent_to_several, setup(&t, 2), teardown(&t))
{
    uint64_t opened = fault_env_count(&t.x.f, FAULT_OPENAT);
    gd_group *a = lend(&t, 1, false), *b = lend(&t, 1, false);
    gd_group *c = lend(&t, 2, false);
    CHECK(a == b && b != c);
    gd_fpcache_return_group(t.cache, a);
    gd_fpcache_return_group(t.cache, b);
    gd_fpcache_return_group(t.cache, c);
    CHECK(lend(&t, 1, false) == a);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_OPENAT), opened + 2);
    gd_fpcache_return_group(t.cache, a);
}

/* On a shared file system a fresh group is not lent to readers, which would
 * read beside the page cache, nor to another fresh request. */
TEST_WITH(test_n13_2_a_fresh_group_is_not_kept, setup(&t, 1), teardown(&t))
{
    t.x.params.shared = true;
    t.x.f.shared = true;
    int64_t before = t.x.f.descriptors;
    gd_group *one = lend(&t, 1, true), *two = lend(&t, 1, true);
    gd_group *cached = lend(&t, 1, false);
    CHECK(one != two && cached != one && cached != two);
    CHECK(lend(&t, 1, false) == cached);
    CHECK(t.x.f.direct[one->content] && t.x.f.direct[two->content]);
    CHECK(!t.x.f.direct[cached->content]);
    gd_fpcache_return_group(t.cache, one);
    gd_fpcache_return_group(t.cache, two);
    gd_fpcache_return_group(t.cache, cached);
    gd_fpcache_return_group(t.cache, cached);
    CHECK_INT(t.x.f.descriptors, before + 1);
}

/* N7.2: an open file may show its old content, so a fresh one is opened, by a
 * name that is looked up again. Users of the old one keep it. */
TEST_WITH(test_fresh_is_opened_again, setup(&t, 1), teardown(&t))
{
    gd_group *old = lend(&t, 1, false);
    int64_t before = t.x.f.descriptors;
    uint64_t opened = fault_env_count(&t.x.f, FAULT_OPENAT);
    uint64_t asked = fault_env_count(&t.x.f, FAULT_RENEW);
    gd_group *new = lend(&t, 1, true);
    CHECK(new != old);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_OPENAT), opened + 1);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_RENEW), asked + 1);
    CHECK(lend(&t, 1, false) == new);
    gd_fpcache_return_group(t.cache, new);
    gd_fpcache_return_group(t.cache, new);
    CHECK_INT(t.x.f.descriptors, before + 1);
    gd_fpcache_return_group(t.cache, old); /* its last user */
    CHECK_INT(t.x.f.descriptors, before);
    fault_env_fail(&t.x.f, FAULT_RENEW, 1, EIO, false);
    CHECK_INT(gd_fpcache_group(t.cache, 1, true, &new, &t.x.err), GD_IO);
    CHECK(new == NULL);
    CHECK_CONTAINS(t.x.err.text, "groups/00000001");
}

TEST(test_bounded_descriptors)
{
    enum { GROUPS = KEPT + 10 };
    fixture t;
    gd_group *groups[GROUPS + 1];
    setup(&t, GROUPS);
    int64_t before = t.x.f.descriptors;
    for (int round = 0; round < 2; round++) {
        for (uint32_t n = 1; n <= GROUPS; n++) {
            gd_fpcache_return_group(t.cache, lend(&t, n, false));
        }
        CHECK_INT(t.x.f.descriptors, before + KEPT);
    }
    /* The last used group is cached; the first one is not. */
    uint64_t opened = fault_env_count(&t.x.f, FAULT_OPENAT);
    gd_fpcache_return_group(t.cache, lend(&t, GROUPS, false));
    gd_fpcache_return_group(t.cache, lend(&t, 11, false));
    CHECK_INT(fault_env_count(&t.x.f, FAULT_OPENAT), opened);
    gd_fpcache_return_group(t.cache, lend(&t, 1, false));
    CHECK_INT(fault_env_count(&t.x.f, FAULT_OPENAT), opened + 1);
    /* All are lent at once: more than are cached, and none is closed in
     * use. */
    for (uint32_t n = 1; n <= GROUPS; n++) {
        groups[n] = lend(&t, n, false);
    }
    CHECK_INT(t.x.f.descriptors, before + GROUPS);
    for (uint32_t n = 1; n <= GROUPS; n++) {
        gd_published record;
        CHECK_INT(gd_group_read_published(groups[n], &record, &t.x.err),
                  GD_OK);
        gd_fpcache_return_group(t.cache, groups[n]);
    }
    CHECK_INT(t.x.f.descriptors, before + KEPT);
    teardown(&t);
}

/* The file was replaced by its group's rewriting. */
TEST_WITH(test_fresh, setup(&t, 1), teardown(&t))
{
    uint8_t bytes[8192];
    gd_group *old = lend(&t, 1, false);
    scratch_read(&t.x, "groups/00000001", bytes, sizeof bytes, 0);
    scratch_write(&t.x, "spool/new", bytes, sizeof bytes, 0);
    CHECK_INT(renameat(t.x.root, "spool/new", t.x.root, "groups/00000001"), 0);
    CHECK(lend(&t, 1, false) == old);
    gd_group *new = lend(&t, 1, true);
    CHECK(new != old);
    CHECK(lend(&t, 1, false) == new);
    gd_published record;
    CHECK_INT(gd_group_read_published(old, &record, &t.x.err), GD_OK);
    gd_fpcache_return_group(t.cache, old);
    gd_fpcache_return_group(t.cache, old);
    gd_fpcache_return_group(t.cache, new);
    gd_fpcache_return_group(t.cache, new);
    /* The file is unlinked: the open one is still usable, but not fresh. */
    CHECK_INT(unlinkat(t.x.root, "groups/00000001", 0), 0);
    CHECK(lend(&t, 1, false) == new);
    gd_fpcache_return_group(t.cache, new);
    gd_group *none;
    CHECK_INT(gd_fpcache_group(t.cache, 1, true, &none, &t.x.err),
              GD_NOTFOUND);
    CHECK_INT(gd_fpcache_group(t.cache, 1, false, &none, &t.x.err),
              GD_NOTFOUND);
}

static void
remove_group(uint32_t number)
{
    char name[GD_NAME_SIZE];
    gd_names_group(number, name);
    CHECK_INT(unlinkat(t.x.root, name, 0), 0);
}

/* Each call examines some groups, and several calls all of them.  A lent group
 * stays open, but is not lent again. */
TEST_WITH(test_removed, setup(&t, 150), teardown(&t))
{
    enum { MANY = 150 };
    gd_fpcache_close(t.cache);
    REQUIRE(gd_fpcache_open(t.x.env, t.x.root, &t.x.params, MANY, &t.cache,
                            &t.x.err) == GD_OK);
    int64_t before = t.x.f.descriptors;
    for (uint32_t n = 1; n <= MANY; n++) {
        gd_fpcache_return_group(t.cache, lend(&t, n, false));
    }
    gd_group *lent = lend(&t, 7, false);
    for (uint32_t n = 1; n <= MANY; n += 2) {
        remove_group(n);
    }
    uint64_t stats = fault_env_count(&t.x.f, FAULT_FSTAT);
    gd_fpcache_drop_some_removed(t.cache);
    CHECK(fault_env_count(&t.x.f, FAULT_FSTAT) - stats <= 64);
    CHECK(t.x.f.descriptors < before + MANY);
    CHECK(t.x.f.descriptors > before + MANY / 2 + 1);
    for (int i = 0; i < 4; i++) {
        gd_fpcache_drop_some_removed(t.cache);
    }
    CHECK_INT(t.x.f.descriptors, before + MANY / 2 + 1);
    gd_group *none;
    CHECK_INT(gd_fpcache_group(t.cache, 7, false, &none, &t.x.err),
              GD_NOTFOUND);
    gd_fpcache_return_group(t.cache, lent);
    CHECK_INT(t.x.f.descriptors, before + MANY / 2);
    remove_group(2);
    remove_group(MANY);
    gd_fpcache_drop_removed(t.cache);
    CHECK_INT(t.x.f.descriptors, before + MANY / 2 - 2);
}

/* Callers that come all the time cause a check every five seconds. */
TEST_WITH(test_removed_in_turn, setup(&t, 2), teardown(&t))
{
    const int64_t second = 1000000000;
    t.x.f.monotonic_ns = 7 * second;
    gd_fpcache_close(t.cache);
    REQUIRE(gd_fpcache_open(t.x.env, t.x.root, &t.x.params, 2, &t.cache,
                            &t.x.err) == GD_OK);
    int64_t before = t.x.f.descriptors;
    for (uint32_t n = 1; n <= 2; n++) {
        gd_fpcache_return_group(t.cache, lend(&t, n, false));
    }
    remove_group(1);
    t.x.f.monotonic_ns += 5 * second - 1;
    gd_fpcache_drop_removed_in_turn(t.cache);
    CHECK_INT(t.x.f.descriptors, before + 2);
    t.x.f.monotonic_ns++;
    gd_fpcache_drop_removed_in_turn(t.cache);
    CHECK_INT(t.x.f.descriptors, before + 1);
    remove_group(2);
    t.x.f.monotonic_ns += 5 * second - 1;
    gd_fpcache_drop_removed_in_turn(t.cache);
    CHECK_INT(t.x.f.descriptors, before + 1);
    t.x.f.monotonic_ns++;
    gd_fpcache_drop_removed_in_turn(t.cache);
    CHECK_INT(t.x.f.descriptors, before);
}

/* ---- tables ---- */

TEST_WITH(test_store_is_kept, setup(&t, 1), teardown(&t))
{
    publish(&t, 1, 1, 0, 10);
    gd_fptable *a = lend_store(&t, 1, true);
    gd_fptable *b = lend_store(&t, 1, false);
    CHECK(a == b);
    CHECK_INT(a->count, 10);
    gd_fpcache_return_store(t.cache, a);
    gd_fpcache_return_store(t.cache, b);
    CHECK(lend_store(&t, 1, false) == a);
    gd_fpcache_return_store(t.cache, a);
}

/* N7.2: more entries were published, or a published one has changed. */
TEST_WITH(test_store_out_of_date, setup(&t, 1), teardown(&t))
{
    publish(&t, 1, 1, 0, 10);
    gd_fptable *a = lend_store(&t, 1, true);
    publish(&t, 1, 2, 0, 11);
    gd_fptable *b = lend_store(&t, 1, true);
    CHECK_INT(a->count, 10); /* users of the old one keep it */
    CHECK_INT(b->count, 11);
    publish(&t, 1, 3, 1, 11);
    gd_fptable *c = lend_store(&t, 1, true);
    CHECK_INT(c->generation, 1);
    gd_fpcache_return_store(t.cache, a);
    gd_fpcache_return_store(t.cache, b);
    gd_fpcache_return_store(t.cache, c);
    publish(&t, 1, 4, 0, 11); /* an older copy of the group came back */
    c = lend_store(&t, 1, true);
    CHECK_INT(c->generation, 0);
    gd_fpcache_return_store(t.cache, c);
}

/* All files have one inode number: file systems reuse numbers. */
static int
stat_alike(const gd_env *env, int fd, struct stat *st)
{
    (void)env;
    int rc = fstat(fd, st);
    st->st_ino = 77;
    return rc < 0 ? -errno : 0;
}

static int
stat_name_alike(const gd_env *env, int dir, const char *path, struct stat *st)
{
    (void)env;
    int rc = fstatat(dir, path, st, AT_SYMLINK_NOFOLLOW);
    st->st_ino = 77;
    return rc < 0 ? -errno : 0;
}

/* Removes the identity, as in groups of older programs. */
static void
remove_identity(fixture *t, const char *name)
{
    uint8_t header[512];
    scratch_read(&t->x, name, header, sizeof header, 0);
    memset(header + 72, 0, 16);
    gd_put64(header + 504, gd_checksum(header, 504, 0));
    scratch_write(&t->x, name, header, sizeof header, 0);
}

/* The cached table is of a group that was lost since; its number was given to
 * another. Sequence, generation and count are the same. */
TEST(test_number_used_again)
{
    for (int known = 0; known < 2; known++) {
        fixture t;
        setup(&t, 1);
        if (known) { /* by its identity alone, or else by its inode alone */
            t.x.f.env.fstat = stat_alike;
            t.x.f.env.fstatat = stat_name_alike;
        } else {
            remove_identity(&t, "groups/00000001");
        }
        publish(&t, 1, 1, 0, 10);
        gd_fptable *store = lend_store(&t, 1, true);
        gd_fpcache_return_store(t.cache, store);
        gd_group *old = known ? NULL : lend(&t, 1, false);
        gd_locks_unlease(t.locks, 1);
        CHECK_INT(unlinkat(t.x.root, "groups/00000001", 0), 0);
        gd_fpcache_drop_removed(t.cache);
        t.made = 0;
        make_groups(&t, 1);
        if (!known) {
            remove_identity(&t, "groups/00000001");
        }
        publish(&t, 1, 1, 0, 10);
        store = lend_store(&t, 1, true);
        gd_fpcache_return_store(t.cache, store);
        store = lend_store(&t, 1, false);
        gd_fpcache_return_store(t.cache, store);
        if (old != NULL) {
            gd_fpcache_return_group(t.cache, old);
        }
        teardown(&t);
    }
}

/* The same file has its earlier content again. */
TEST_WITH(test_rolled_back, setup(&t, 1), teardown(&t))
{
    publish(&t, 1, 2, 0, 10);
    gd_fpcache_return_store(t.cache, lend_store(&t, 1, true));
    scratch_truncate(&t.x, "groups/00000001", 512);
    scratch_truncate(&t.x, "groups/00000001", 8192);
    publish(&t, 1, 1, 0, 7);
    gd_fptable *store = lend_store(&t, 1, true);
    CHECK_INT(store->count, 7);
    gd_fpcache_return_store(t.cache, store);
    publish(&t, 1, 3, 0, 7); /* another record, not another count */
    gd_fpcache_return_store(t.cache, lend_store(&t, 1, true));
}

TEST(test_bounded_stores)
{
    enum { GROUPS = GD_CACHED_STORES + 4 };
    fixture t;
    gd_fptable *stores[GROUPS + 1];
    setup(&t, GROUPS);
    for (uint32_t n = 1; n <= GROUPS; n++) {
        publish(&t, n, 1, 0, n);
    }
    for (uint32_t n = 1; n <= GROUPS; n++) {
        gd_fpcache_return_store(t.cache, lend_store(&t, n, true));
    }
    for (uint32_t n = 5; n <= GROUPS; n++) {
        gd_fpcache_return_store(t.cache, lend_store(&t, n, false));
    }
    gd_fpcache_return_store(t.cache, lend_store(&t, 1, true));
    gd_fpcache_return_store(t.cache, lend_store(&t, 6, false));
    gd_fpcache_return_store(t.cache, lend_store(&t, 5, true)); /* was oldest */
    for (uint32_t n = 1; n <= GROUPS; n++) {
        bool cold;
        CHECK_INT(gd_fpcache_store(t.cache, n, &stores[n], &cold, &t.x.err),
                  GD_OK);
    }
    for (uint32_t n = 1; n <= GROUPS; n++) {
        gd_fingerprint fp;
        uint32_t probe = 0, slot = 99;
        CHECK_INT(stores[n]->count, n);
        fill_random(fp.bytes, sizeof fp.bytes, n * 64 + n - 1);
        CHECK(gd_fptable_find(stores[n], &fp, &probe, &slot));
        CHECK_INT(slot, n - 1);
        gd_fpcache_return_store(t.cache, stores[n]);
    }
    teardown(&t);
}

TEST_WITH(test_failures, setup(&t, 2), teardown(&t))
{
    gd_group *group;
    gd_fptable *store;
    bool cold;
    publish(&t, 2, 1, 0, 20);
    for (int call = 0; call < FAULT_CALLS; call++) {
        for (uint64_t n = 1; n <= 4; n++) {
            uint64_t faults = fault_env_faults(&t.x.f);
            int error = call == FAULT_ALLOC ? ENOMEM : EIO;
            fault_env_fail(&t.x.f, (fault_call)call, n, error, false);
            gd_status s =
                gd_fpcache_store(t.cache, 2, &store, &cold, &t.x.err);
            bool struck = fault_env_faults(&t.x.f) > faults;
            fault_env_heal(&t.x.f);
            if (s == GD_OK) {
                CHECK_INT(store->count, 20);
                gd_fpcache_return_store(t.cache, store);
            } else {
                CHECK(struck);
                CHECK_INT(s, call == FAULT_ALLOC ? GD_NOMEM : GD_IO);
            }
            gd_fpcache_close(t.cache); /* everything cold again */
            REQUIRE(gd_fpcache_open(t.x.env, t.x.root, &t.x.params, KEPT,
                                    &t.cache, &t.x.err) == GD_OK);
        }
    }
    CHECK_INT(gd_fpcache_group(t.cache, 3, false, &group, &t.x.err),
              GD_NOTFOUND);
    CHECK_INT(gd_fpcache_store(t.cache, 3, &store, &cold, &t.x.err),
              GD_NOTFOUND);
    scratch_truncate(&t.x, "groups/00000002", 5000);
    CHECK_INT(gd_fpcache_store(t.cache, 2, &store, &cold, &t.x.err),
              GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, "groups/00000002");
}
