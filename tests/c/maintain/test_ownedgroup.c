/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ownedgroup.c - a group that the maintainer has to itself: who is kept
 * out, what freeing leaves, in which order it reaches the disk, what is
 * punched and above all what is not, damage, and removal.
 */
#include "engine/maintain/ownedgroup.h"

#include "engine/base/coding.h"
#include "engine/maintain/grouprewrite.h"
#include "engine/read/reader.h"
#include "engine/write/appender.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum {
    BLOCK = 4096,
    SLOTS = 64,
    PER_SEGMENT = 16,
    LENGTH = SLOTS * BLOCK,
    STORED = PER_SEGMENT * BLOCK, /* noise does not compress */
    WHOLE = GD_SEGMENT_HEADER + STORED,
};

#define GROUP_1 "groups/00000001"
#define FREE_ORDER "fdatasync pwritev fdatasync pwritev fdatasync"

typedef struct fixture {
    scratch x;
    gd_repo *repo;
    uint8_t *one, *two; /* images: group 1, full; group 2 */
    uint8_t *before;    /* group 1's file */
    size_t size;
    gd_owned_group *owned;
} fixture;

static void
read_file(fixture *t, uint8_t **out, size_t *size)
{
    *size = (size_t)scratch_size(&t->x, GROUP_1);
    *out = malloc(*size);
    scratch_read(&t->x, GROUP_1, *out, *size, 0);
}

static void
setup(fixture *t)
{
    scratch_init(&t->x);
    t->repo = scratch_repo_filter(&t->x);
    t->one = malloc(LENGTH);
    t->two = malloc(LENGTH);
    t->owned = NULL;
    fill_random(t->one, LENGTH, 1);
    fill_random(t->two, LENGTH, 2);
    CHECK_INT(put_image(t->repo, "one", t->one, LENGTH, LENGTH, NULL,
                        &t->x.err), GD_OK);
    CHECK_INT(put_image(t->repo, "two", t->two, LENGTH / 2, LENGTH, NULL,
                        &t->x.err), GD_OK);
    read_file(t, &t->before, &t->size);
}

static void
teardown(fixture *t)
{
    gd_repo_close(t->repo);
    free(t->one);
    free(t->two);
    free(t->before);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

static gd_status
enter(fixture *t, uint32_t number)
{
    return gd_owned_group_open(t->repo, number, &t->owned, &t->x.err);
}

static gd_status
free_slots(fixture *t, uint32_t first, uint32_t count, uint32_t *freed)
{
    uint32_t slots[SLOTS];
    for (uint32_t i = 0; i < count; i++) {
        slots[i] = first + i;
    }
    return gd_owned_group_free(t->owned, slots, count, freed, &t->x.err);
}

/* The same where it must succeed. */
static void
need_freed(fixture *t, uint32_t first, uint32_t count)
{
    uint32_t freed;
    CHECK_INT(free_slots(t, first, count, &freed), GD_OK);
    CHECK_INT(freed, count);
}

static uint64_t
punch(fixture *t)
{
    uint64_t bytes = 0;
    CHECK_INT(gd_owned_group_punch(t->owned, &bytes, &t->x.err), GD_OK);
    return bytes;
}

static void
read_group(fixture *t, gd_published *record, gd_entry *entries)
{
    gd_group *group;
    CHECK_INT(gd_group_open(t->x.env, t->x.root, &t->x.params, 1, O_RDONLY,
                            &group, &t->x.err), GD_OK);
    CHECK_INT(gd_group_read_published(group, record, &t->x.err), GD_OK);
    CHECK_INT(gd_group_read_entries(group, 0, SLOTS, entries, &t->x.err),
              GD_OK);
    gd_group_close(group);
}

static gd_published
record_of(fixture *t)
{
    gd_published record;
    gd_entry entries[SLOTS];
    read_group(t, &record, entries);
    return record;
}

static unsigned
count_state(fixture *t, gd_entry_state state)
{
    gd_published record;
    gd_entry entries[SLOTS];
    unsigned count = 0;
    read_group(t, &record, entries);
    for (int i = 0; i < SLOTS; i++) {
        count += entries[i].state == state;
    }
    return count;
}

static uint64_t
segment_offset(uint32_t number)
{
    return gd_data_start(SLOTS) + (uint64_t)number * WHOLE;
}

/* Whether the file's bytes are what they were. */
static bool
is_untouched(fixture *t, uint64_t from, uint64_t to)
{
    uint8_t *now;
    size_t size;
    read_file(t, &now, &size);
    bool same = size >= to && t->size >= to &&
                memcmp(now + from, t->before + from, to - from) == 0;
    free(now);
    return same;
}

static bool
is_image(fixture *t, const char *image_id, const uint8_t *data, size_t length)
{
    bool equal;
    return get_image(t->repo, image_id, data, length, &equal, &t->x.err) ==
               GD_OK &&
           equal;
}

static void
check_trace(fixture *t, const char *wanted)
{
    char trace[512];
    fault_env_trace(&t->x.f, trace, sizeof trace);
    if (!CHECK(strcmp(trace, wanted) == 0)) {
        fprintf(stderr, "it was: %s\n", trace);
    }
}

/* ---- entering ---- */

static void
test_entering(void)
{
    fixture t;
    gd_locks *other;
    setup(&t);
    CHECK_INT(gd_locks_open(t.x.env, t.x.root, &other, &t.x.err), GD_OK);
    CHECK_INT(gd_locks_lease(other, 1, NULL), GD_OK);
    CHECK_INT(enter(&t, 1), GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, "00000001 is being appended to");
    gd_locks_unlease(other, 1);
    CHECK_INT(gd_locks_share(other, 1, NULL), GD_OK);
    CHECK_INT(enter(&t, 1), GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, "names blocks of group 00000001");
    CHECK_INT(gd_locks_lease(other, 1, NULL), GD_OK); /* it was given back */
    gd_locks_unlease(other, 1);
    gd_locks_unshare(other, 1);
    CHECK_INT(gd_locks_share(t.repo->locks, 1, NULL), GD_OK);
    CHECK_INT(enter(&t, 1), GD_BUSY); /* a transaction of our own */
    gd_locks_unshare(t.repo->locks, 1);
    CHECK_INT(enter(&t, 1), GD_OK);
    CHECK_INT(gd_locks_lease(other, 1, NULL), GD_BUSY);
    CHECK_INT(gd_locks_share(other, 1, NULL), GD_BUSY);
    CHECK_INT(gd_locks_share(t.repo->locks, 1, NULL), GD_BUSY);
    CHECK(is_image(&t, "one", t.one, LENGTH)); /* readers go on */
    gd_owned_group_close(t.owned);
    CHECK_INT(gd_locks_share(other, 1, NULL), GD_OK);
    CHECK_INT(gd_locks_lease(other, 1, NULL), GD_OK);
    CHECK_INT(enter(&t, 77), GD_NOTFOUND);
    CHECK_INT(gd_locks_lease(other, 77, NULL), GD_OK);
    CHECK_INT(gd_locks_exclude(other, 77, NULL), GD_OK);
    gd_locks_close(other);
    teardown(&t);
}

static int replaced_root; /* of the group that is to be replaced; -1: none */

static int
replace_and_lock(const gd_env *env, int fd, uint64_t byte, short type)
{
    (void)env;
    if (replaced_root >= 0 && type == F_WRLCK && byte > UINT32_MAX) {
        CHECK_INT(renameat(replaced_root, "spool/copy", replaced_root, GROUP_1),
                  0);
        replaced_root = -1;
    }
    return gd_env_posix()->lock(gd_env_posix(), fd, byte, type);
}

static uint64_t unlocked[2];
static size_t unlocks;
static int (*real_lock)(const gd_env *env, int fd, uint64_t byte, short type);

static int
note_unlock(const gd_env *env, int fd, uint64_t byte, short type)
{
    if (type == F_UNLCK && unlocks < 2) {
        unlocked[unlocks++] = byte;
    }
    return real_lock(env, fd, byte, type);
}

/* The lease last: whoever has it next may exclude others at once, and in one
 * process both would be the same lock. */
static void
test_leaving(void)
{
    fixture t;
    setup(&t);
    CHECK_INT(enter(&t, 1), GD_OK);
    real_lock = t.x.f.env.lock;
    t.x.f.env.lock = note_unlock;
    unlocks = 0;
    gd_owned_group_close(t.owned);
    t.x.f.env.lock = real_lock;
    CHECK_INT(unlocks, 2);
    CHECK_INT(unlocked[0], (UINT64_C(1) << 32) + 1);
    CHECK_INT(unlocked[1], 1);
    teardown(&t);
}

/* What was read before the locks were held may be of a file that is gone, and
 * what was published since would be lost (I4). */
static void
test_replaced_before_the_lock(void)
{
    fixture t;
    struct stat st;
    setup(&t);
    int fd = openat(t.x.root, "spool/copy", O_WRONLY | O_CREAT, 0600);
    REQUIRE(fd >= 0 &&
            pwrite(fd, t.before, t.size, 0) == (ssize_t)t.size);
    close(fd);
    replaced_root = t.x.root;
    t.x.f.env.lock = replace_and_lock;
    CHECK_INT(enter(&t, 1), GD_OK);
    CHECK_INT(replaced_root, -1);
    CHECK_INT(fstatat(t.x.root, GROUP_1, &st, 0), 0);
    CHECK_INT(t.owned->leased->group->inode, st.st_ino);
    gd_owned_group_close(t.owned);
    teardown(&t);
}

/* Every call of it fails once: nothing stays locked, nor open. */
static void
test_entering_fails(void)
{
    fixture t;
    setup(&t);
    for (int kind = 0; kind < 2; kind++) {
        fault_call call = kind == 0 ? FAULT_ANY : FAULT_ALLOC;
        for (uint64_t n = 1;; n++) {
            uint64_t faults = fault_env_faults(&t.x.f);
            fault_env_fail(&t.x.f, call, n, EIO, false);
            gd_status s = enter(&t, 1);
            bool hit = fault_env_faults(&t.x.f) > faults;
            fault_env_heal(&t.x.f);
            if (s == GD_OK) {
                gd_owned_group_close(t.owned);
            }
            CHECK_INT(enter(&t, 1), GD_OK);
            gd_owned_group_close(t.owned);
            if (!hit) {
                CHECK_INT(s, GD_OK);
                break;
            }
        }
    }
    teardown(&t);
}

/* ---- freeing ---- */

static void
test_free(void)
{
    fixture t;
    uint32_t freed;
    gd_published record;
    gd_entry entries[SLOTS];
    static const gd_fingerprint zeros;
    setup(&t);
    gd_published old = record_of(&t);
    CHECK_INT(enter(&t, 1), GD_OK);
    need_freed(&t, 10, 20);
    read_group(&t, &record, entries);
    CHECK(record.generation != old.generation);
    CHECK_INT(record.sequence, old.sequence + 1);
    CHECK(record.count == old.count && record.end == old.end &&
          record.flags == old.flags);
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK_INT(entries[i].state,
                  i >= 10 && i < 30 ? GD_ENTRY_FREED : GD_ENTRY_LIVE);
    }
    /* It keeps nothing else. */
    CHECK(gd_fingerprint_equal(&entries[10].fingerprint, &zeros));
    CHECK(entries[10].segment == 0 && entries[10].checksum == 0 &&
          entries[10].plain_length == 0 && entries[10].stored_length == 0);
    /* What is free is not freed again, nor anything written for it. */
    fault_env_start_trace(&t.x.f);
    CHECK_INT(free_slots(&t, 10, 20, &freed), GD_OK);
    CHECK_INT(freed, 0);
    check_trace(&t, "");
    CHECK_INT(free_slots(&t, 5, 10, &freed), GD_OK);
    CHECK_INT(freed, 5);
    gd_owned_group_close(t.owned);
    CHECK(!is_image(&t, "one", t.one, LENGTH));
    CHECK(is_image(&t, "two", t.two, LENGTH / 2));
    /* Stored again, it comes whole. */
    CHECK_INT(put_image(t.repo, "again", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK(is_image(&t, "again", t.one, LENGTH));
    teardown(&t);
}

static void
test_only_published_slots(void)
{
    fixture t;
    uint32_t freed;
    setup(&t);
    CHECK_INT(enter(&t, 2), GD_OK);
    CHECK_INT(t.owned->leased->published.count, SLOTS / 2);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(free_slots(&t, 0, SLOTS / 2 + 1, &freed), GD_INVALID);
    CHECK_CONTAINS(t.x.err.text, "slot 32 of groups/00000002");
    static const uint32_t far[] = {0, UINT32_MAX};
    CHECK_INT(gd_owned_group_free(t.owned, far, 2, &freed, &t.x.err),
              GD_INVALID);
    check_trace(&t, "");
    CHECK_INT(free_slots(&t, 0, SLOTS / 2, &freed), GD_OK);
    gd_owned_group_close(t.owned);
    teardown(&t);
}

/* The generation is durable before any entry changes, entries before any hole;
 * see ownedgroup.h for what each wrong order would cost. */
static void
test_order(void)
{
    fixture t;
    uint32_t freed;
    uint64_t bytes;
    setup(&t);
    gd_published old = record_of(&t);
    CHECK_INT(enter(&t, 1), GD_OK);
    fault_env_start_trace(&t.x.f);
    need_freed(&t, 0, 16);
    check_trace(&t, FREE_ORDER);
    (void)punch(&t);
    check_trace(&t, FREE_ORDER " punch");
    gd_owned_group_close(t.owned);
    for (uint64_t n = 1; n <= 5; n++) {
        fault_call call = n % 2 == 1 ? FAULT_FDATASYNC : FAULT_PWRITEV;
        unsigned live = count_state(&t, GD_ENTRY_LIVE);
        uint64_t generation = record_of(&t).generation;
        CHECK_INT(enter(&t, 1), GD_OK);
        fault_env_fail(&t.x.f, call, (n + 1) / 2, EIO, false);
        fault_env_start_trace(&t.x.f);
        CHECK_INT(free_slots(&t, 16 + (uint32_t)n, 1, &freed), GD_IO);
        CHECK_INT(freed, 0);
        CHECK_INT(count_state(&t, GD_ENTRY_LIVE), live - (n == 5));
        CHECK((record_of(&t).generation != generation) == (n > 2));
        /* Then nothing may be punched on the strength of it. */
        CHECK_INT(gd_owned_group_punch(t.owned, &bytes, &t.x.err), GD_CLOSED);
        CHECK_INT(free_slots(&t, 20, 1, &freed), GD_CLOSED);
        gd_owned_group_close(t.owned);
    }
    CHECK_INT(record_of(&t).sequence, old.sequence + 4);
    teardown(&t);
}

/* The handle of another process has a fingerprint store cached.  Whatever
 * becomes of the collector while it frees, that store is not believed as soon
 * as an entry is free (N7.2). */
static void
test_cached_stores(void)
{
    for (uint64_t n = 1; n <= 6; n++) {
        fixture t;
        gd_fpstore *store;
        bool cold;
        uint32_t freed;
        setup(&t);
        gd_repo *other = scratch_repo_filter(&t.x);
        CHECK_INT(gd_fpcache_store(other->cache, 1, &store, &cold, &t.x.err),
                  GD_OK);
        gd_fpcache_return_store(other->cache, store);
        CHECK_INT(gd_fpcache_store(t.repo->cache, 1, &store, &cold, &t.x.err),
                  GD_OK);
        gd_fpcache_return_store(t.repo->cache, store);
        CHECK_INT(enter(&t, 1), GD_OK);
        fault_env_fail(&t.x.f, n % 2 == 1 ? FAULT_FDATASYNC : FAULT_PWRITEV,
                       (n + 1) / 2, EIO, false);
        CHECK_INT(free_slots(&t, 0, 16, &freed), n == 6 ? GD_OK : GD_IO);
        fault_env_heal(&t.x.f);
        gd_owned_group_close(t.owned);
        bool changed = count_state(&t, GD_ENTRY_FREED) > 0;
        gd_repo *handles[] = {other, t.repo};
        for (int i = 0; i < 2; i++) {
            CHECK_INT(gd_fpcache_store(handles[i]->cache, 1, &store, &cold,
                                       &t.x.err), GD_OK);
            CHECK(cold || !changed);
            gd_fpcache_return_store(handles[i]->cache, store);
        }
        CHECK_INT(put_image(other, "again", t.one, LENGTH, LENGTH, NULL,
                            &t.x.err), GD_OK);
        CHECK(is_image(&t, "again", t.one, LENGTH));
        gd_repo_close(other);
        teardown(&t);
    }
}

/* A generation that another host saw, and that a crash, or the failed fdatasync
 * itself, then took away, is not given to what is freed after that. */
static void
test_generation_that_is_lost(void)
{
    enum { RECORDS = 1024 };
    fixture t;
    gd_fpstore *store;
    bool cold;
    uint32_t freed;
    uint8_t records[RECORDS];
    setup(&t);
    gd_repo *other = scratch_repo_filter(&t.x);
    scratch_read(&t.x, GROUP_1, records, RECORDS, 512);
    CHECK_INT(enter(&t, 1), GD_OK);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 2, EIO, false);
    CHECK_INT(free_slots(&t, 0, 16, &freed), GD_IO);
    gd_owned_group_close(t.owned);
    CHECK_INT(gd_fpcache_store(other->cache, 1, &store, &cold, &t.x.err),
              GD_OK);
    gd_fpcache_return_store(other->cache, store);
    scratch_write(&t.x, GROUP_1, records, RECORDS, 512);
    CHECK_INT(enter(&t, 1), GD_OK);
    need_freed(&t, 0, 16);
    gd_owned_group_close(t.owned);
    CHECK_INT(gd_fpcache_store(other->cache, 1, &store, &cold, &t.x.err),
              GD_OK);
    CHECK(cold);
    gd_fpcache_return_store(other->cache, store);
    CHECK_INT(put_image(other, "again", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK(is_image(&t, "again", t.one, LENGTH));
    gd_repo_close(other);
    teardown(&t);
}

/* A sync that failed leaves entries that no upload will come to, since the group
 * is poisoned: they are the collector's (I8). */
static void
test_tail_of_a_poisoned_group(void)
{
    fixture t;
    setup(&t);
    uint8_t *three = malloc(LENGTH);
    fill_random(three, LENGTH, 3);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 1, EIO, false);
    CHECK_INT(put_image(t.repo, "three", three, LENGTH / 4, LENGTH, NULL,
                        &t.x.err), GD_IO);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(enter(&t, 2), GD_OK);
    /* Written again, and synced by itself, before it is published. */
    check_trace(&t, "pwritev fdatasync pwritev");
    CHECK_INT(t.owned->leased->published.count, SLOTS / 2 + SLOTS / 4);
    CHECK_INT(t.owned->leased->published.flags, GD_GROUP_POISONED);
    need_freed(&t, SLOTS / 2, SLOTS / 4);
    CHECK(punch(&t) > 0);
    gd_owned_group_close(t.owned);
    CHECK_INT(enter(&t, 2), GD_OK);
    uint64_t bytes;
    CHECK_INT(gd_owned_group_rewrite(t.owned, NULL, 0, &bytes, &t.x.err),
              GD_OK);
    gd_owned_group_close(t.owned);
    CHECK(is_image(&t, "two", t.two, LENGTH / 2));
    free(three);
    teardown(&t);
}

/* What an earlier collector freed may not be on the disk, if its fdatasync
 * failed: the entries are written again before anything is punched. */
static void
test_freed_by_another(void)
{
    fixture t;
    uint32_t freed;
    uint64_t bytes;
    setup(&t);
    CHECK_INT(enter(&t, 1), GD_OK);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 3, EIO, false);
    CHECK_INT(free_slots(&t, 0, 20, &freed), GD_IO);
    gd_owned_group_close(t.owned);
    CHECK_INT(enter(&t, 1), GD_OK);
    fault_env_start_trace(&t.x.f);
    CHECK(punch(&t) > 0);
    check_trace(&t, "pwritev fdatasync punch");
    (void)punch(&t);
    check_trace(&t, "pwritev fdatasync punch");
    gd_owned_group_close(t.owned);
    CHECK_INT(enter(&t, 1), GD_OK);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 1, EIO, false);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(gd_owned_group_punch(t.owned, &bytes, &t.x.err), GD_IO);
    check_trace(&t, "pwritev");
    CHECK_INT(gd_owned_group_punch(t.owned, &bytes, &t.x.err), GD_CLOSED);
    gd_owned_group_close(t.owned);
    teardown(&t);
}

/* ---- punching ---- */

static void
test_punch(void)
{
    fixture t;
    setup(&t);
    CHECK_INT(enter(&t, 1), GD_OK);
    CHECK_INT(punch(&t), 0);
    need_freed(&t, 16, 16); /* the second segment, and */
    need_freed(&t, 40, 1);  /* one of the third */
    CHECK_INT(punch(&t), STORED - BLOCK); /* whole blocks within */
    CHECK_INT(punch(&t), 0);
    CHECK(is_untouched(&t, segment_offset(0), segment_offset(1)));
    CHECK(is_untouched(&t, segment_offset(2), segment_offset(4)));
    CHECK(!is_untouched(&t, segment_offset(1), segment_offset(2)));
    CHECK_INT(scratch_size(&t.x, GROUP_1), t.size);
    need_freed(&t, 0, 16);
    need_freed(&t, 32, 8);
    need_freed(&t, 41, 7);
    /* Neighbours join, with what was left between them. */
    CHECK_INT(punch(&t), 2 * STORED + BLOCK);
    CHECK(is_untouched(&t, segment_offset(3), segment_offset(4)));
    need_freed(&t, 48, 16);
    CHECK(punch(&t) > 0);
    gd_owned_group_close(t.owned);
    CHECK_INT(record_of(&t).count, SLOTS);
    CHECK_INT(count_state(&t, GD_ENTRY_FREED), SLOTS);
    teardown(&t);
}

/* The published record as a crash may leave it: of an older sync point. */
static void
set_record(fixture *t, uint32_t count, uint64_t end)
{
    gd_group *group;
    CHECK_INT(gd_group_open(t->x.env, t->x.root, &t->x.params, 1, O_RDWR,
                            &group, &t->x.err), GD_OK);
    gd_published record = {.sequence = 9, .count = count, .end = end};
    CHECK_INT(gd_group_write_published(group, &record, &t->x.err), GD_OK);
    gd_group_close(group);
}

/* A committed recipe may name entries beyond the published count (N7.3); and
 * who comes next will look for them behind the published end. */
static void
test_tail_is_kept(void)
{
    for (int below = 0; below < 2; below++) {
        fixture t;
        setup(&t);
        set_record(&t, 48, segment_offset(below ? 4 : 3));
        CHECK_INT(enter(&t, 1), GD_OK);
        need_freed(&t, 0, 48);
        CHECK(punch(&t) > 0);
        CHECK(is_untouched(&t, segment_offset(3), segment_offset(4)));
        gd_owned_group_close(t.owned);
        CHECK_INT(count_state(&t, GD_ENTRY_LIVE), 16);
        teardown(&t);
    }
    /* No entry names the bytes behind the end: not ours to judge. */
    fixture t;
    setup(&t);
    set_record(&t, 64, segment_offset(2));
    CHECK_INT(enter(&t, 1), GD_OK);
    need_freed(&t, 0, 64);
    CHECK(punch(&t) > 0);
    CHECK(is_untouched(&t, segment_offset(2), segment_offset(4)));
    gd_owned_group_close(t.owned);
    /* Neither record is valid: nothing is known to be published. */
    scratch_flip(&t.x, GROUP_1, 512, 1);
    scratch_flip(&t.x, GROUP_1, 1024, 1);
    CHECK_INT(enter(&t, 1), GD_OK);
    CHECK_INT(t.owned->leased->published.count, 0);
    uint32_t freed;
    CHECK_INT(free_slots(&t, 0, 1, &freed), GD_INVALID);
    CHECK_INT(punch(&t), 0);
    gd_owned_group_close(t.owned);
    teardown(&t);
}

static void
test_invalid_entries(void)
{
    fixture t;
    setup(&t);
    scratch_flip(&t.x, GROUP_1, gd_entry_offset(17) + 3, 1);
    CHECK_INT(enter(&t, 1), GD_OK);
    need_freed(&t, 0, 16);
    /* Nobody knows which bytes it names: so none is given back. */
    fault_env_start_trace(&t.x.f);
    CHECK_INT(punch(&t), 0);
    check_trace(&t, "");
    CHECK(is_untouched(&t, segment_offset(0), segment_offset(4)));
    CHECK_INT(count_state(&t, GD_ENTRY_INVALID), 1); /* nor was it changed */
    need_freed(&t, 17, 1); /* no recipe names it */
    CHECK(punch(&t) > 0);
    CHECK(is_untouched(&t, segment_offset(1), segment_offset(4)));
    gd_owned_group_close(t.owned);
    teardown(&t);
}

static void
test_punch_fails(void)
{
    fixture t;
    uint64_t bytes;
    setup(&t);
    CHECK_INT(enter(&t, 1), GD_OK);
    need_freed(&t, 0, 16);
    fault_env_fail(&t.x.f, FAULT_PUNCH, 1, EOPNOTSUPP, false);
    CHECK_INT(punch(&t), 0); /* it comes back by rewriting */
    fault_env_fail(&t.x.f, FAULT_PUNCH, 1, EIO, false);
    CHECK_INT(gd_owned_group_punch(t.owned, &bytes, &t.x.err), GD_IO);
    CHECK_CONTAINS(t.x.err.text, GROUP_1);
    fault_env_fail(&t.x.f, FAULT_PUNCH, 1, EINTR, false);
    CHECK(punch(&t) > 0);
    gd_owned_group_close(t.owned);
    teardown(&t);
}

/* ---- what rewriting would keep ---- */

static void
check_live_bytes(fixture *t, uint64_t bytes, uint64_t kept)
{
    uint64_t got_bytes, got_kept;
    CHECK_INT(gd_owned_group_live_bytes(t->owned, &got_bytes, &got_kept,
                                        &t->x.err), GD_OK);
    CHECK_INT(got_bytes, bytes);
    CHECK_INT(got_kept, kept);
}

static void
test_live_bytes(void)
{
    fixture t;
    setup(&t);
    CHECK_INT(enter(&t, 1), GD_OK);
    check_live_bytes(&t, 4 * WHOLE, 4 * WHOLE);
    need_freed(&t, 16, 4); /* at a segment's start, */
    check_live_bytes(&t, 4 * WHOLE, 4 * WHOLE - 4 * BLOCK);
    need_freed(&t, 24, 1); /* within, */
    check_live_bytes(&t, 4 * WHOLE, 4 * WHOLE - 5 * BLOCK);
    need_freed(&t, 10, 6); /* at its end, next to the other one */
    check_live_bytes(&t, 4 * WHOLE, 4 * WHOLE - 11 * BLOCK);
    need_freed(&t, 32, 16);
    check_live_bytes(&t, 3 * WHOLE, 3 * WHOLE - 11 * BLOCK);
    need_freed(&t, 49, 15);
    check_live_bytes(&t, 3 * WHOLE, 3 * WHOLE - 26 * BLOCK);
    need_freed(&t, 48, 1);
    need_freed(&t, 0, 10);
    need_freed(&t, 20, 4);
    need_freed(&t, 25, 7);
    check_live_bytes(&t, 0, 0);
    gd_owned_group_close(t.owned);
    teardown(&t);
}

/* ---- damage ---- */

static void
test_mark_damaged(void)
{
    static const uint32_t slots[] = {17, 3, 20, 4};
    fixture t;
    gd_quarantine_name *names;
    size_t count;
    uint8_t *saved = malloc(WHOLE);
    setup(&t);
    gd_published old = record_of(&t);
    CHECK_INT(enter(&t, 1), GD_OK);
    need_freed(&t, 4, 1);
    fault_env_start_trace(&t.x.f);
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FSYNC);
    CHECK_INT(gd_owned_group_mark_damaged(t.owned, slots, 4, &names, &count,
                                          &t.x.err), GD_OK);
    check_trace(&t, "pwritev fsync pwritev fsync " FREE_ORDER);
    /* Each file, and their directory. */
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FSYNC) - syncs, 3);
    REQUIRE(count == 2);
    for (uint32_t i = 0; i < 2; i++) {
        char wanted[64];
        uint64_t offset = segment_offset(1 - i);
        snprintf(wanted, sizeof wanted, "quarantine/00000001-%u-",
                 (unsigned)offset);
        CHECK(strncmp(names[i], wanted, strlen(wanted)) == 0);
        CHECK_INT(scratch_size(&t.x, names[i]), WHOLE);
        scratch_read(&t.x, names[i], saved, WHOLE, 0);
        CHECK(memcmp(saved, t.before + offset, WHOLE) == 0);
    }
    t.x.env->release(t.x.env, names);
    gd_published record;
    gd_entry entries[SLOTS];
    read_group(&t, &record, entries);
    CHECK(record.generation != old.generation);
    CHECK_INT(count_state(&t, GD_ENTRY_DAMAGED), 3);
    CHECK_INT(entries[4].state, GD_ENTRY_FREED);
    CHECK_INT(entries[3].segment, segment_offset(0)); /* keeps its fields */
    CHECK_INT(entries[3].plain_length, BLOCK);
    /* Once more: nothing to do. */
    fault_env_start_trace(&t.x.f);
    CHECK_INT(gd_owned_group_mark_damaged(t.owned, slots, 4, &names, &count,
                                          &t.x.err), GD_OK);
    CHECK_INT(count, 0);
    t.x.env->release(t.x.env, names);
    check_trace(&t, "");
    /* Its bytes stay, as long as it is damaged. */
    need_freed(&t, 0, 3);
    need_freed(&t, 5, 11);
    (void)punch(&t);
    CHECK(is_untouched(&t, segment_offset(0), segment_offset(4)));
    need_freed(&t, 3, 1);
    CHECK(punch(&t) > 0);
    CHECK(is_untouched(&t, segment_offset(1), segment_offset(4)));
    static const uint32_t far[] = {SLOTS};
    CHECK_INT(gd_owned_group_mark_damaged(t.owned, far, 1, &names, &count,
                                          &t.x.err), GD_INVALID);
    t.x.env->release(t.x.env, names);
    gd_owned_group_close(t.owned);
    /* No look-up returns them. */
    CHECK_INT(put_image(t.repo, "again", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK(is_image(&t, "again", t.one, LENGTH));
    free(saved);
    teardown(&t);
}

/* Nothing is marked before the copies and their directory are durable. */
static void
test_marking_without_a_copy(void)
{
    static const uint32_t slots[] = {17, 3};
    for (uint64_t n = 1; n <= 3; n++) {
        fixture t;
        gd_quarantine_name *names = NULL;
        size_t count;
        setup(&t);
        CHECK_INT(enter(&t, 1), GD_OK);
        fault_env_fail(&t.x.f, FAULT_FSYNC, n, EIO, false);
        CHECK_INT(gd_owned_group_mark_damaged(t.owned, slots, 2, &names, &count,
                                       &t.x.err), GD_IO);
        CHECK_CONTAINS(t.x.err.text, "quarantine");
        CHECK_INT(count_state(&t, GD_ENTRY_DAMAGED), 0);
        t.x.env->release(t.x.env, names);
        gd_owned_group_close(t.owned);
        teardown(&t);
    }
}

/* What cannot be read is zeros in the quarantine; the rest is there. */
static void
test_salvage(void)
{
    static const uint32_t slot = 50;
    fixture t;
    gd_quarantine_name *names;
    size_t count;
    uint8_t *saved = malloc(WHOLE);
    setup(&t);
    CHECK_INT(enter(&t, 1), GD_OK);
    scratch_truncate(&t.x, GROUP_1, segment_offset(3) + 5000);
    CHECK_INT(gd_owned_group_mark_damaged(t.owned, &slot, 1, &names, &count,
                                          &t.x.err), GD_OK);
    REQUIRE(count == 1 && scratch_size(&t.x, names[0]) == WHOLE);
    scratch_read(&t.x, names[0], saved, WHOLE, 0);
    CHECK(memcmp(saved, t.before + segment_offset(3), 4608) == 0);
    for (size_t i = 5000; i < WHOLE; i++) {
        if (!CHECK_INT(saved[i], 0)) {
            break;
        }
    }
    t.x.env->release(t.x.env, names);
    gd_owned_group_close(t.owned);
    free(saved);
    teardown(&t);
}

/* ---- removal ---- */

static bool
unlink_group(fixture *t)
{
    bool removed;
    CHECK_INT(gd_owned_group_unlink(t->owned, &removed, &t->x.err), GD_OK);
    return removed;
}

static void
test_unlink(void)
{
    fixture t;
    static const uint32_t slot = 0;
    gd_quarantine_name *names;
    size_t count;
    uint64_t bytes;
    setup(&t);
    CHECK(is_image(&t, "one", t.one, LENGTH));
    int64_t open = t.x.f.descriptors;
    CHECK_INT(enter(&t, 1), GD_OK);
    CHECK(!unlink_group(&t));
    need_freed(&t, 1, 63);
    CHECK(!unlink_group(&t)); /* one lives */
    CHECK_INT(gd_owned_group_mark_damaged(t.owned, &slot, 1, &names, &count,
                                          &t.x.err), GD_OK);
    t.x.env->release(t.x.env, names);
    CHECK(!unlink_group(&t)); /* damaged */
    need_freed(&t, 0, 1);
    fault_env_start_trace(&t.x.f);
    CHECK(unlink_group(&t));
    /* Others may have it open: so its space is given back besides. */
    check_trace(&t, "unlinkat fsync punch");
    CHECK(!scratch_exists(&t.x, GROUP_1));
    CHECK_INT(gd_owned_group_punch(t.owned, &bytes, &t.x.err), GD_CLOSED);
    gd_owned_group_close(t.owned);
    CHECK_INT(t.x.f.descriptors, open - 1); /* this handle's, too */
    CHECK_INT(enter(&t, 1), GD_NOTFOUND);
    /* The highest-numbered one stays, however empty. */
    CHECK_INT(enter(&t, 2), GD_OK);
    need_freed(&t, 0, 32);
    CHECK(!unlink_group(&t));
    gd_owned_group_close(t.owned);
    CHECK(scratch_exists(&t.x, "groups/00000002"));
    /* Storing goes on, though this handle had the group open, and full. */
    CHECK_INT(put_image(t.repo, "again", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK(is_image(&t, "again", t.one, LENGTH));
    CHECK(!scratch_exists(&t.x, GROUP_1));
    teardown(&t);
}

static void
test_unlink_is_refused(void)
{
    fixture t;
    bool removed;
    setup(&t);
    CHECK_INT(enter(&t, 1), GD_OK);
    need_freed(&t, 0, 64);
    gd_owned_group_close(t.owned);
    set_record(&t, 63, segment_offset(4)); /* a crash took the last one back */
    CHECK_INT(enter(&t, 1), GD_OK);
    CHECK(!unlink_group(&t));
    gd_owned_group_close(t.owned);
    set_record(&t, 64, segment_offset(4));
    scratch_flip(&t.x, GROUP_1, gd_entry_offset(9) + 3, 1);
    CHECK_INT(enter(&t, 1), GD_OK);
    CHECK(!unlink_group(&t)); /* who knows what it was */
    need_freed(&t, 9, 1);
    fault_env_fail(&t.x.f, FAULT_UNLINKAT, 1, EIO, false);
    CHECK_INT(gd_owned_group_unlink(t.owned, &removed, &t.x.err), GD_IO);
    CHECK(!removed && scratch_exists(&t.x, GROUP_1));
    fault_env_fail(&t.x.f, FAULT_FSYNC, 1, EIO, false);
    CHECK_INT(gd_owned_group_unlink(t.owned, &removed, &t.x.err), GD_IO);
    CHECK(removed);
    gd_owned_group_close(t.owned);
    teardown(&t);
}

static int (*real_list)(const gd_env *, int, const char *,
                        void (*)(void *, const char *), void *);
static scratch *racing;

/* After the listing others make three groups, and remove all but the last. */
static int
list_and_overtake(const gd_env *env, int dir, const char *path,
                  void (*visit)(void *, const char *), void *arg)
{
    int rc = real_list(env, dir, path, visit, arg);
    if (racing != NULL) {
        scratch_write(racing, "groups/00000005", "x", 1, 0);
        racing = NULL;
    }
    return rc;
}

/* A number is never used again, also by one who was slow to take it. */
static void
test_numbers_are_not_used_again(void)
{
    fixture t;
    uint32_t number;
    setup(&t);
    real_list = t.x.f.env.list;
    t.x.f.env.list = list_and_overtake;
    racing = &t.x;
    CHECK_INT(gd_group_create(t.x.env, t.x.root, &t.x.params, &gd_global_scope,
                              t.repo->locks, &number, &t.x.err), GD_OK);
    CHECK_INT(number, 6);
    CHECK(!scratch_exists(&t.x, "groups/00000003"));
    gd_locks *other;
    CHECK_INT(gd_locks_open(t.x.env, t.x.root, &other, &t.x.err), GD_OK);
    CHECK_INT(gd_locks_lease(other, 3, NULL), GD_OK);
    CHECK_INT(gd_locks_lease(other, 6, NULL), GD_BUSY);
    gd_locks_close(other);
    gd_locks_unlease(t.repo->locks, 6);
    teardown(&t);
}

/* ---- every call fails once ---- */

/* What a collection of group 1 does where half of its image is still named. */
static gd_status
collect(fixture *t)
{
    uint32_t freed;
    uint64_t bytes;
    bool removed;
    gd_status s = enter(t, 1);
    if (s != GD_OK) {
        return s;
    }
    s = free_slots(t, 0, SLOTS / 2, &freed);
    if (s == GD_OK) {
        s = gd_owned_group_punch(t->owned, &bytes, &t->x.err);
    }
    if (s == GD_OK) {
        s = gd_owned_group_unlink(t->owned, &removed, &t->x.err);
    }
    gd_owned_group_close(t->owned);
    return s;
}

static void
test_faults(void)
{
    for (int kind = 0; kind < 2; kind++) {
        fault_call call = kind == 0 ? FAULT_ANY : FAULT_ALLOC;
        for (uint64_t n = 1;; n += SWEEP_STRIDE) {
            fixture t;
            setup(&t);
            const uint8_t *half = t.one + LENGTH / 2;
            CHECK_INT(put_image(t.repo, "half", half, LENGTH / 2, LENGTH,
                                NULL, &t.x.err), GD_OK);
            uint64_t faults = fault_env_faults(&t.x.f);
            fault_env_fail(&t.x.f, call, n, EIO, false);
            gd_status s = collect(&t);
            bool hit = fault_env_faults(&t.x.f) > faults;
            fault_env_heal(&t.x.f);
            CHECK(is_image(&t, "half", half, LENGTH / 2));
            CHECK_INT(collect(&t), GD_OK);
            CHECK_INT(count_state(&t, GD_ENTRY_FREED), SLOTS / 2);
            CHECK(is_image(&t, "half", half, LENGTH / 2));
            CHECK_INT(put_image(t.repo, "again", t.one, LENGTH, LENGTH, NULL,
                                &t.x.err), GD_OK);
            CHECK(is_image(&t, "again", t.one, LENGTH));
            teardown(&t);
            if (!hit) {
                CHECK_INT(s, GD_OK);
                break;
            }
        }
    }
}

int
main(int argc, char **argv)
{
    BEGIN(argc, argv);
    RUN(test_entering);
    RUN(test_leaving);
    RUN(test_replaced_before_the_lock);
    RUN(test_entering_fails);
    RUN(test_free);
    RUN(test_only_published_slots);
    RUN(test_order);
    RUN(test_cached_stores);
    RUN(test_generation_that_is_lost);
    RUN(test_tail_of_a_poisoned_group);
    RUN(test_freed_by_another);
    RUN(test_punch);
    RUN(test_tail_is_kept);
    RUN(test_invalid_entries);
    RUN(test_punch_fails);
    RUN(test_live_bytes);
    RUN(test_mark_damaged);
    RUN(test_marking_without_a_copy);
    RUN(test_salvage);
    RUN(test_unlink);
    RUN(test_unlink_is_refused);
    RUN(test_numbers_are_not_used_again);
    RUN(test_faults);
    return REPORT();
}
