/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_follow.c - an index gets all entries that others publish, reads as few
 * as possible twice, and misses none for ever, whatever fails, is lost or is
 * killed.
 */
#include "engine/repo/follow.h"

#include "engine/base/coding.h"
#include "engine/files/group.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum {
    SLOTS = 64,
    FILTER = GD_KV_BACKENDS, /* the filter, beside the backends */
    MANY = GD_OPEN_GROUPS + 100,
};

typedef struct fixture {
    scratch x;
    int kind;
    gd_repo *repo;   /* with the index */
    gd_repo *others; /* another host: it has none */
    gd_followed last;
} fixture;

static fixture t;

/* Ends the program if a step of a test's preparation fails. */
static void
must(bool done)
{
    if (!done) {
        fprintf(stderr, "%s\n", t.x.err.text);
        exit(2);
    }
}

static void
open_index(void)
{
    char path[256];
    gd_kv_options options = {1 << 16, 1 << 20};
    t.repo = scratch_repo(&t.x);
    snprintf(path, sizeof path, "%s/hints", t.x.dir);
    gd_status s =
        t.kind == FILTER
            ? gd_repo_attach_filter(t.repo, path, 1 << 20, &t.x.err)
            : gd_repo_attach_store(t.repo, (gd_kv_backend)t.kind, path,
                                   &options, &t.x.err);
    must(s == GD_OK);
}

static void
setup(int kind)
{
    memset(&t, 0, sizeof t);
    scratch_init(&t.x);
    t.kind = kind;
    t.others = scratch_repo(&t.x);
    open_index();
}

static void
teardown(void)
{
    gd_repo_close(t.repo);
    gd_repo_close(t.others);
    CHECK_INT(scratch_destroy(&t.x), 0);
}

/* ---- the other host ---- */

static uint32_t
make_group(void)
{
    uint32_t number;
    must(gd_group_create(gd_env_posix(), t.others->root, &t.x.params,
                         &gd_global_scope, t.others->locks, &number,
                         &t.x.err) == GD_OK);
    gd_locks_unlease(t.others->locks, number);
    return number;
}

static gd_fingerprint
fingerprint(uint32_t group, uint32_t slot)
{
    gd_fingerprint fp;
    uint64_t n = (uint64_t)group << 32 | slot;
    for (unsigned i = 0; i < GD_FINGERPRINT_SIZE; i += 8) {
        gd_put64(fp.bytes + i, gd_checksum(&n, sizeof n, i));
    }
    return fp;
}

static gd_group *
open_group(uint32_t number)
{
    gd_group *group;
    must(gd_group_open(gd_env_posix(), t.others->root, &t.x.params, number,
                       O_RDWR, &group, &t.x.err) == GD_OK);
    return group;
}

static void
set_record(uint32_t number, uint32_t count, uint32_t flags)
{
    gd_group *group = open_group(number);
    gd_published record;
    must(gd_group_read_published(group, &record, NULL) == GD_OK);
    record.sequence++;
    record.count = count;
    record.flags = flags;
    must(gd_group_write_published(group, &record, NULL) == GD_OK);
    gd_group_close(group);
}

/* Writes the entries of the group's slots [first, end). */
static void
write_slots(uint32_t number, uint32_t first, uint32_t end)
{
    gd_entry entries[SLOTS] = {0};
    gd_group *group = open_group(number);
    for (uint32_t i = first; i < end; i++) {
        entries[i - first] = (gd_entry){
            .fingerprint = fingerprint(number, i),
            .segment = (uint32_t)gd_fptable_data_start(SLOTS),
            .plain_length = 4096,
            .stored_length = 4096,
            .state = GD_ENTRY_LIVE,
        };
    }
    must(gd_group_write_entries(group, first, end - first, entries, NULL) ==
         GD_OK);
    gd_group_close(group);
}

static void
publish(uint32_t number, uint32_t first, uint32_t end)
{
    write_slots(number, first, end);
    set_record(number, end, 0);
}

/* ---- hints in the index ---- */

static void
note_hint(void *arg, size_t i, gd_address hint)
{
    (void)i;
    gd_address *wanted = arg;
    if (hint.group == wanted->group && hint.slot == wanted->slot) {
        *wanted = (gd_address){0, 0};
    }
}

/* Returns the number of the group's slots [first, end) that have their
 * hint. */
static uint32_t
count_known(uint32_t group, uint32_t first, uint32_t end)
{
    uint32_t known = 0;
    for (uint32_t slot = first; slot < end; slot++) {
        gd_fingerprint fp = fingerprint(group, slot);
        const gd_fingerprint *fps[1] = {&fp};
        gd_address wanted = {group, slot};
        gd_hintindex *index = t.repo->index;
        index->find(index, fps, 1, note_hint, &wanted);
        known += wanted.group == 0;
    }
    return known;
}

/* Follows until no entry is new; returns the number of entries read. */
static uint64_t
follow(void)
{
    uint64_t entries = 0;
    do {
        CHECK_INT(gd_follow(t.repo, 2, &t.last, &t.x.err), GD_OK);
        entries += t.last.entries;
    } while (t.last.more);
    return entries;
}

static gd_filter_stats
stats(void)
{
    gd_filter_stats found;
    t.repo->index->get_stats(t.repo->index, &found);
    return found;
}

/* Makes the next scan list the groups. */
static void
list_next(void)
{
    gd_position position;
    gd_hintindex *index = t.repo->index;
    CHECK(index->rebuild_lock(index));
    index->load(index, &position);
    index->save(index, &(gd_entry_range){0}, &position, &(gd_look){0});
    index->rebuild_unlock(index);
}

/* ---- tests ---- */

TEST(test_groups_that_grow)
{
    for (int kind = 0; kind <= FILTER; kind++) {
        setup(kind);
        CHECK_INT(follow(), 0);
        CHECK(stats().complete);
        uint32_t one = make_group();
        publish(one, 0, 10);
        CHECK_INT(follow(), 10);
        write_slots(one, 10, 30); /* not published (I1) */
        CHECK_INT(follow(), 0);
        CHECK_INT(count_known(one, 0, 30), 10);
        set_record(one, 25, 0);
        uint32_t two = make_group();
        publish(two, 0, SLOTS);
        CHECK_INT(follow(), 15 + SLOTS);
        publish(one, 25, SLOTS);
        CHECK_INT(follow(), SLOTS - 25);
        CHECK_INT(count_known(one, 0, SLOTS), SLOTS);
        CHECK_INT(count_known(two, 0, SLOTS), SLOTS);
        CHECK_INT(follow(), 0);
        CHECK_INT(stats().rebuilt, two);
        CHECK_INT(stats().look.behind, 0);
        teardown();
    }
}

/* Hints outlive the handle, if the index does. */
TEST(test_another_handle)
{
    for (int kind = 0; kind <= FILTER; kind++) {
        setup(kind);
        publish(make_group(), 0, SLOTS);
        publish(make_group(), 0, 20);
        CHECK_INT(follow(), SLOTS + 20);
        gd_repo_close(t.repo);
        open_index();
        publish(2, 20, 30);
        CHECK_INT(follow(), kind == GD_KV_INRAM ? SLOTS + 30 : 10);
        CHECK_INT(count_known(2, 0, 30), 30);
        CHECK_INT(count_known(1, 0, SLOTS), SLOTS);
        teardown();
    }
}

/* A scan that finds no change reads the groups that may grow, and one name. */
TEST_WITH(test_an_idle_look, setup(FILTER), teardown())
{
    for (int i = 0; i < 50; i++) {
        publish(make_group(), 0, SLOTS);
    }
    publish(make_group(), 0, 10);
    follow();
    uint64_t calls = fault_env_count(&t.x.f, FAULT_ANY);
    uint64_t lists = fault_env_count(&t.x.f, FAULT_LIST);
    follow();
    CHECK_INT(fault_env_count(&t.x.f, FAULT_LIST), lists);
    CHECK(fault_env_count(&t.x.f, FAULT_ANY) - calls <= 10);
    list_next();
    follow();
    CHECK_INT(fault_env_count(&t.x.f, FAULT_LIST), lists + 1);
}

/* However many calls it takes, all groups are listed once at the beginning,
 * and at the end for groups that were made meanwhile. */
TEST(test_filling)
{
    for (int kind = 0; kind <= FILTER; kind++) {
        setup(kind);
        uint32_t newest = 0;
        for (int i = 0; i < 20; i++) {
            newest = make_group();
            publish(newest, 0, SLOTS);
        }
        uint64_t lists = fault_env_count(&t.x.f, FAULT_LIST);
        CHECK_INT(gd_follow(t.repo, 2, &t.last, &t.x.err), GD_OK);
        CHECK(t.last.more && t.last.done == 2 && t.last.total == 20);
        newest = make_group();
        publish(newest, 0, 10);
        CHECK_INT(follow(), 18 * SLOTS + 10);
        CHECK(fault_env_count(&t.x.f, FAULT_LIST) <= lists + 3);
        CHECK_INT(count_known(newest, 0, 10), 10);
        CHECK(stats().complete);
        /* A handle that is closed in the middle leaves no lock. */
        gd_hintindex *index = t.repo->index;
        index->clear(index);
        CHECK_INT(gd_follow(t.repo, 2, &t.last, &t.x.err), GD_OK);
        CHECK(t.last.more);
        teardown();
    }
}

TEST_WITH(test_when_it_is_due, setup(FILTER), teardown())
{
    CHECK(!gd_follow_is_due(t.others, 0)); /* has no index */
    CHECK(gd_follow_is_due(t.repo, 100000));
    follow();
    CHECK(!gd_follow_is_due(t.repo, 100000));
    CHECK(gd_follow_is_due(t.repo, 0));
    gd_position position;
    gd_hintindex *index = t.repo->index;
    CHECK(index->rebuild_lock(index));
    index->load(index, &position);
    /* The time is from before a restart of the host. */
    index->save(index, &(gd_entry_range){0}, &position,
                &(gd_look){.ended_ns = INT64_MAX});
    index->rebuild_unlock(index);
    CHECK(gd_follow_is_due(t.repo, 100000));
}

/* Entries that this process published are in its index already. */
TEST(test_own_blocks)
{
    static uint8_t data[SLOTS * 3 * 4096];
    for (int kind = 0; kind <= FILTER; kind++) {
        setup(kind);
        follow();
        fill_random(data, sizeof data, 1);
        CHECK_INT(put_image(t.repo, "own", data, sizeof data, 1 << 20, NULL,
                            &t.x.err), GD_OK);
        CHECK_INT(put_image(t.repo, "more", data + 1, 4096 * 10, 1 << 20, NULL,
                            &t.x.err), GD_OK);
        CHECK_INT(follow(), 0);
        CHECK_INT(stats().rebuilt, 4);
        /* Others append behind, and in front. */
        publish(4, 10, 20);
        CHECK_INT(follow(), 10);
        /* Hints that were removed from the index are added again. */
        gd_hintindex *index = t.repo->index;
        CHECK(index->rebuild_lock(index));
        index->clear(index);
        index->rebuild_unlock(index);
        CHECK(!stats().complete);
        CHECK_INT(follow(), 3 * SLOTS + 20);
        teardown();
    }
}

TEST_WITH(test_poisoned_group, setup(FILTER), teardown())
{
    uint32_t number = make_group();
    publish(number, 0, 10);
    CHECK_INT(follow(), 10);
    write_slots(number, 10, 20);
    set_record(number, 15, GD_GROUP_POISONED);
    CHECK_INT(follow(), 5);
    uint64_t opened = fault_env_count(&t.x.f, FAULT_OPENAT);
    follow();
    CHECK_INT(fault_env_count(&t.x.f, FAULT_OPENAT), opened);
}

static void
remove_group(uint32_t number)
{
    char name[GD_NAME_SIZE];
    gd_names_group(number, name);
    must(unlinkat(t.x.root, name, 0) == 0);
}

TEST_WITH(test_removed_groups, setup(FILTER), teardown())
{
    for (int i = 0; i < 4; i++) {
        publish(make_group(), 0, 10);
    }
    CHECK_INT(follow(), 40);
    remove_group(2);
    CHECK_INT(follow(), 0);
    /* The newest group is lost by an accident: its number is used again. */
    remove_group(3);
    remove_group(4);
    list_next();
    CHECK_INT(follow(), 0);
    CHECK_INT(stats().rebuilt, 1);
    CHECK_INT(make_group(), 2);
    publish(2, 0, 20);
    CHECK_INT(follow(), 20);
    CHECK_INT(count_known(2, 0, 20), 20);
}

TEST_WITH(test_count_that_goes_back, setup(FILTER), teardown())
{
    publish(make_group(), 0, 40);
    CHECK_INT(follow(), 40);
    set_record(1, 20, 0);
    CHECK_INT(follow(), 20);
    CHECK_INT(follow(), 0);
    set_record(1, 30, 0);
    CHECK_INT(follow(), 10);
    /* Another group of the same number has as many. */
    remove_group(1);
    CHECK_INT(make_group(), 1);
    publish(1, 0, 30);
    CHECK_INT(follow(), 30);
    CHECK_INT(follow(), 0);
}

/* A group that cannot be read now is read when it can. */
TEST_WITH(test_damaged_group, setup(FILTER), teardown())
{
    char name[GD_NAME_SIZE];
    publish(make_group(), 0, 20);
    publish(make_group(), 0, 20);
    gd_names_group(1, name);
    int64_t size = scratch_size(&t.x, name);
    uint8_t *content = malloc((size_t)size);
    scratch_read(&t.x, name, content, (size_t)size, 0);
    scratch_flip(&t.x, name, 20, 1); /* the header */
    CHECK_INT(follow(), 20);
    CHECK(stats().complete);
    scratch_flip(&t.x, name, 20, 1);
    scratch_truncate(&t.x, name, 4200); /* in the middle of the entries */
    CHECK_INT(follow(), 0);
    scratch_truncate(&t.x, name, 0);
    CHECK_INT(follow(), 0);
    scratch_write(&t.x, name, content, (size_t)size, 0);
    CHECK_INT(follow(), 20);
    CHECK_INT(count_known(1, 0, 20), 20);
    free(content);
}

/* A file system may show a newer record than entries: missed entries are read
 * in the next scan. */
TEST(test_entries_older_than_their_record)
{
    for (int kind = 0; kind <= FILTER; kind++) {
        setup(kind);
        uint32_t one = make_group();
        publish(one, 0, 10);
        CHECK_INT(follow(), 10);
        write_slots(one, 10, 15);
        write_slots(one, 20, 40);
        set_record(one, 40, 0);
        CHECK_INT(follow(), 30);
        CHECK_INT(count_known(one, 10, 40), 25);
        CHECK_INT(follow(), 0);
        write_slots(one, 15, 20);
        CHECK_INT(follow(), 25);
        CHECK_INT(count_known(one, 0, 40), 40);
        CHECK_INT(follow(), 0);
        /* This also holds for a full group, and for many others that stay
         * full. */
        set_record(one, SLOTS, 0);
        for (int i = 0; i < 20; i++) {
            set_record(make_group(), SLOTS, 0);
        }
        CHECK_INT(follow(), 20 * SLOTS);
        CHECK_INT(follow(), 0);
        uint32_t last = make_group();
        publish(last, 0, SLOTS);
        CHECK_INT(follow(), SLOTS);
        CHECK_INT(count_known(last, 0, SLOTS), SLOTS);
        write_slots(one, 40, SLOTS);
        CHECK_INT(follow(), SLOTS - 40);
        CHECK_INT(count_known(one, 0, SLOTS), SLOTS);
        CHECK_INT(follow(), 0);
        teardown();
    }
}

/* More groups may grow than the list has room for. */
TEST_WITH(test_many_open_groups, setup(FILTER), teardown())
{
    for (int i = 0; i < MANY; i++) {
        publish(make_group(), 0, 2);
    }
    CHECK(follow() >= 2 * MANY);
    CHECK_INT(stats().rebuilt, MANY);
    publish(MANY, 2, 4); /* in the list, too */
    CHECK(follow() >= 2);
    CHECK_INT(count_known(MANY, 0, 4), 4);
    for (uint32_t number = 1; number <= MANY; number += 9) {
        publish(number, number == MANY ? 4 : 2, 6);
    }
    unsigned missing = 1, looks = 0;
    for (; missing > 0 && looks < 20; looks++) {
        uint64_t entries = follow();
        CHECK(entries <= 16 * 6 + 4 * MANY / 9 + 8);
        missing = 0;
        for (uint32_t number = 1; number <= MANY; number += 9) {
            missing += count_known(number, 0, 6) < 6;
        }
    }
    CHECK_INT(missing, 0);
    /* When there is room again, they are added to the list again. */
    for (uint32_t number = 500; number <= 800; number++) {
        remove_group(number);
    }
    for (int i = 0; i < 20; i++) {
        follow();
    }
    publish(3, 2, 4);
    publish(90, 2, 4);
    CHECK_INT(follow(), 4);
    CHECK_INT(follow(), 0);
}

TEST_WITH(test_two_at_once, setup(FILTER), teardown())
{
    publish(make_group(), 0, 20);
    gd_repo *second = t.repo;
    open_index(); /* of the same file */
    gd_hintindex *index = second->index;
    CHECK(index->rebuild_lock(index));
    CHECK_INT(follow(), 0);
    CHECK(!stats().complete && t.last.total == 0);
    index->rebuild_unlock(index);
    CHECK_INT(follow(), 20);
    CHECK_INT(gd_follow(second, 5, &t.last, &t.x.err), GD_OK);
    CHECK_INT(t.last.entries, 0);
    gd_repo_close(second);
}

/* All entries of the others are found in the end. */
static void
check_everything(void)
{
    follow();
    CHECK_INT(count_known(1, 0, SLOTS), SLOTS);
    CHECK_INT(count_known(2, 0, 30), 30);
    CHECK_INT(count_known(3, 0, 10), 10);
}

static void
prepare(int kind)
{
    setup(kind);
    publish(make_group(), 0, SLOTS);
    publish(make_group(), 0, 20);
    follow();
    publish(2, 20, 30);
    publish(make_group(), 0, 10);
    list_next();
}

/* Each call fails once, or from then on. */
TEST(test_faults)
{
    static const int errnos[] = {EIO, ENOENT, ESTALE, EMFILE};
    for (int kind = GD_KV_DTB; kind <= FILTER; kind++) {
        bool failed = true;
        for (uint64_t n = 0; failed; n++) {
            for (int call = FAULT_ALLOC; call <= FAULT_ANY; call++) {
                prepare(kind);
                fault_env_fail(&t.x.f, (fault_call)call, n / 2 + 1,
                               call == FAULT_ALLOC ? ENOMEM : errnos[n % 4],
                               n % 2 == 0);
                uint64_t before = fault_env_faults(&t.x.f);
                gd_status s = gd_follow(t.repo, 2, &t.last, &t.x.err);
                failed = fault_env_faults(&t.x.f) > before;
                CHECK(s == GD_OK || failed);
                fault_env_heal(&t.x.f);
                list_next();
                check_everything();
                teardown();
            }
        }
    }
}

/* A process is killed at its nth system call. */
static uint64_t calls_left;

static int
openat_or_die(const gd_env *env, int dir, const char *path, int flags,
              mode_t mode)
{
    if (calls_left-- == 0) {
        _exit(7);
    }
    return fault_table.openat(env, dir, path, flags, mode);
}

static int64_t
monotonic_or_die(const gd_env *env)
{
    if (calls_left-- == 0) {
        _exit(7);
    }
    return fault_table.monotonic_ns(env);
}

static void
follow_and_die(uint64_t nth)
{
    /* The child has a handle of its own: after a fork the parent's refuses. */
    open_index();
    calls_left = nth;
    t.x.f.env.openat = openat_or_die;
    t.x.f.env.monotonic_ns = monotonic_or_die;
    (void)gd_follow(t.repo, 1, &t.last, &t.x.err);
    (void)gd_follow(t.repo, 9, &t.last, &t.x.err);
    _exit(0);
}

TEST(test_kill)
{
    int status = 1;
    for (uint64_t nth = 0; status != 0; nth++) {
        prepare(FILTER);
        pid_t child = fork();
        if (child == 0) {
            follow_and_die(nth);
        }
        CHECK_INT(waitpid(child, &status, 0), child);
        CHECK(status == 0 || WEXITSTATUS(status) == 7);
        check_everything();
        teardown();
    }
}

/* A process that is killed while it saves leaves half a position. */
TEST(test_torn_position)
{
    char name[] = "hints";
    for (uint64_t at = 4096; at < 4096 + 6 * 8; at++) {
        prepare(FILTER);
        follow();
        scratch_flip(&t.x, name, at, 0x21);
        list_next();
        CHECK_INT(follow(), SLOTS + 40);
        check_everything();
        teardown();
    }
}
