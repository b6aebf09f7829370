/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_grouprewrite_stages.c - a group's rewriting in two stages: under the
 * lease alone, and the exchange.
 */
#include "engine/maintenance/grouprewrite.h"

#include <errno.h>

#include "engine/base/coding.h"
#include "engine/files/spool.h"
#include "engine/read/image.h"
#include "tests/c/support/check.h"
#include "tests/c/support/rewrite_fixture.h"

static gd_group_rewrite *
begin(rewrite_fixture *t, uint32_t number, int level)
{
    const gd_packing packing = {.codec = GD_CODEC_ZSTD, .level = level};
    gd_group_rewrite *r = NULL;
    t->owned = NULL;
    CHECK_INT(gd_leased_group_open(t->repo, number, &t->leased, &t->x.err),
              GD_OK);
    CHECK_INT(gd_group_rewrite_open(t->leased, &packing, false, &r, &t->x.err),
              GD_OK);
    return r;
}

static gd_status
exchange(rewrite_fixture *t, gd_group_rewrite *r)
{
    gd_status s = t->owned != NULL
                      ? GD_OK
                      : gd_owned_group_lock(t->leased, &t->owned,
                                            &t->x.err);
    return s == GD_OK ? gd_group_rewrite_exchange(r, t->owned, &t->x.err) : s;
}

static void
close_group(rewrite_fixture *t)
{
    if (t->owned != NULL) {
        gd_owned_group_close(t->owned);
    } else {
        gd_leased_group_close(t->leased);
    }
}

static uint64_t cost_of_all;

static void
go_through(rewrite_fixture *t, gd_group_rewrite *r)
{
    bool done = false;
    uint64_t cost;
    cost_of_all = 0;
    while (!done) {
        REQUIRE(gd_group_rewrite_step(r, &done, &cost, &t->x.err) == GD_OK);
        cost_of_all += cost;
    }
    CHECK(cost_of_all > 0);
    CHECK_INT(gd_group_rewrite_slots(r), SLOTS);
}

static void
end(rewrite_fixture *t, gd_group_rewrite *r)
{
    gd_group_rewrite_close(r);
    close_group(t);
    CHECK(is_spool_clean(t));
}

static rewrite_fixture t;

/* Uploads find the group's duplicates meanwhile, and delay the exchange as
 * long as they name them. */
TEST_WITH(test_two_stages, rewrite_setup(&t, true), rewrite_teardown(&t))
{
    gd_published old, record;
    gd_entry before[SLOTS], after[SLOTS];
    uint64_t sizes[2];
    (void)check_group_file(&t, 1, &old, before);
    gd_repo *other = scratch_repo_filter(&t.x);
    gd_group_rewrite *r = begin(&t, 1, 19);
    CHECK_INT(put_image(other, "again", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK_INT(atomic_load(&other->counters.hits), SLOTS);
    go_through(&t, r);
    CHECK_INT(gd_locks_lock_shared(other->locks, 1, &t.x.err), GD_OK);
    CHECK_INT(exchange(&t, r), GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, "a transaction names blocks of group");
    (void)check_group_file(&t, 1, &record, after);
    CHECK_INT(record.sequence, old.sequence);
    gd_locks_unlock_shared(other->locks, 1);
    CHECK_INT(gd_group_rewrite_sizes(r, &sizes[0], &sizes[1], &t.x.err), GD_OK);
    CHECK(sizes[1] <= sizes[0]);
    CHECK_INT(sizes[1] % 4096, 0);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(exchange(&t, r), GD_OK);
    scratch_check_trace(&t.x, "renameat fsync");
    CHECK_INT(gd_locks_lock_shared(other->locks, 1, &t.x.err), GD_BUSY);
    end(&t, r);
    CHECK_INT(check_group_file(&t, 1, &record, after), SLOTS);
    CHECK(record.generation != old.generation);
    /* The cost has the bytes read, and the bytes written. */
    CHECK_INT(cost_of_all,
              old.end + record.end - 2 * gd_fptable_data_start(SLOTS));
    CHECK_INT(record.flags, GD_GROUP_UNSETTLED);
    CHECK(record.codec == GD_CODEC_ZSTD && record.level == 19);
    CHECK(rewrite_is_image(&t, "again", t.one, LENGTH));
    CHECK_INT(put_image(other, "more", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK_INT(atomic_load(&other->counters.hits), 2 * SLOTS);
    gd_repo_close(other);
    /* Other processes' changes keep the codec. */
    own_group(&t, 1);
    free_group_slots(&t, 3, 1);
    require_rewritten(&t);
    gd_owned_group_close(t.owned);
    (void)check_group_file(&t, 1, &record, after);
    CHECK(record.codec == GD_CODEC_ZSTD && record.level == 19);
}

TEST_WITH(test_segments_are_joined, rewrite_setup(&t, true),
          rewrite_teardown(&t))
{
    gd_published record;
    gd_entry entries[SLOTS];
    CHECK_INT(rewrite_put(&t, "rest", t.two + LENGTH / 2, LENGTH / 2), GD_OK);
    gd_group_rewrite *r = begin(&t, 1, 0);
    go_through(&t, r);
    CHECK_INT(exchange(&t, r), GD_OK);
    end(&t, r);
    CHECK_INT(check_group_file(&t, 1, &record, entries), SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK_INT(entries[i].segment, entries[0].segment);
        CHECK_INT(entries[i].plain_offset, i * BLOCK);
    }
    CHECK(record.codec == GD_CODEC_ZSTD && record.level == 3);
    /* This also holds for a group that cannot be made smaller. */
    r = begin(&t, 2, 19);
    go_through(&t, r);
    uint64_t sizes[2];
    CHECK_INT(gd_group_rewrite_sizes(r, &sizes[0], &sizes[1], &t.x.err), GD_OK);
    CHECK_INT(sizes[0], sizes[1]);
    CHECK_INT(exchange(&t, r), GD_OK);
    end(&t, r);
    CHECK_INT(check_group_file(&t, 2, &record, entries), SLOTS);
    CHECK_INT(entries[0].codec, GD_CODEC_NONE);
    CHECK_INT(entries[SLOTS - 1].segment, entries[0].segment);
}

/* A segment that no codec made smaller is joined with similar ones only. */
TEST_WITH(test_raw_segments_stay_apart, rewrite_setup(&t, false),
          rewrite_teardown(&t))
{
    gd_published record;
    gd_entry entries[SLOTS];
    for (size_t at = LENGTH / 2; at < LENGTH; at++) {
        t.one[at] = (uint8_t)('a' + at % (7 + at / BLOCK));
    }
    memset(t.two, 7, LENGTH / 2); /* fills up the second group */
    CHECK_INT(rewrite_put(&t, "fill", t.two + LENGTH / 2, LENGTH / 2), GD_OK);
    CHECK_INT(rewrite_put(&t, "mixed", t.one, LENGTH), GD_OK);
    CHECK_INT(rewrite_put(&t, "mixed-2", t.one + LENGTH / 2, LENGTH / 2),
              GD_OK);
    uint8_t *rest = malloc(LENGTH);
    fill_random(rest, LENGTH, 9);
    CHECK_INT(rewrite_put(&t, "rest", rest, LENGTH), GD_OK);
    gd_group_rewrite *r = begin(&t, 3, 0);
    go_through(&t, r);
    CHECK_INT(exchange(&t, r), GD_OK);
    end(&t, r);
    CHECK_INT(check_group_file(&t, 3, &record, entries), SLOTS);
    CHECK_INT(entries[0].codec, GD_CODEC_ZSTD);
    CHECK_INT(entries[SLOTS / 2 - 1].segment, entries[0].segment);
    CHECK_INT(entries[SLOTS / 2].codec, GD_CODEC_NONE);
    CHECK_INT(entries[SLOTS - 1].segment, entries[SLOTS / 2].segment);
    CHECK(rewrite_is_image(&t, "mixed", t.one, LENGTH));
    CHECK(rewrite_is_image(&t, "rest", rest, LENGTH));
    free(rest);
}

TEST_WITH(test_only_what_is_sealed, rewrite_setup(&t, false),
          rewrite_teardown(&t))
{
    gd_published record;
    gd_entry entries[SLOTS];
    CHECK_INT(gd_leased_group_open(t.repo, 2, &t.leased, &t.x.err), GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, "groups/00000002 is not sealed");
    CHECK_INT(gd_leased_group_open(t.repo, 3, &t.leased, &t.x.err),
              GD_NOTFOUND);
    CHECK_INT(gd_locks_lease(t.repo->locks, 1, &t.x.err), GD_OK);
    CHECK_INT(gd_leased_group_open(t.repo, 1, &t.leased, &t.x.err), GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, "is being appended to");
    gd_locks_unlease(t.repo->locks, 1);
    (void)check_group_file(&t, 1, &record, entries);
    own_group(&t, 1);
    record.sequence++;
    record.flags = GD_GROUP_POISONED;
    CHECK_INT(gd_group_write_published(t.owned->leased->group, &record,
                                       &t.x.err), GD_OK);
    gd_owned_group_close(t.owned);
    CHECK_INT(gd_leased_group_open(t.repo, 1, &t.leased, &t.x.err), GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, "is not sealed");
    /* No lock of it is left. */
    own_group(&t, 1);
    gd_owned_group_close(t.owned);
}

/* Changes a group without its lease: kind 0 frees a slot, 1 writes a record, 2
 * puts another file in its place. */
static void
change_behind(rewrite_fixture *t, int kind)
{
    static const gd_entry freed = {.state = GD_ENTRY_FREED};
    gd_published record;
    gd_entry entries[SLOTS];
    gd_group *group;
    (void)check_group_file(t, 1, &record, entries);
    CHECK_INT(gd_group_open(t->x.env, t->x.root, &t->x.params, 1, O_RDWR,
                            &group, &t->x.err), GD_OK);
    if (kind == 0) {
        CHECK_INT(gd_group_write_entries(group, 7, 1, &freed, &t->x.err),
                  GD_OK);
    } else if (kind == 1) {
        record.sequence++;
        CHECK_INT(gd_group_write_published(group, &record, &t->x.err), GD_OK);
    } else {
        size_t size = (size_t)scratch_size(&t->x, GROUP_1);
        uint8_t *all = malloc(size);
        scratch_read(&t->x, GROUP_1, all, size, 0);
        CHECK_INT(unlinkat(t->x.root, GROUP_1, 0), 0);
        int fd = openat(t->x.root, GROUP_1, O_CREAT | O_WRONLY, 0600);
        CHECK_INT(pwrite(fd, all, size, 0), size);
        close(fd);
        free(all);
    }
    gd_group_close(group);
}

static int remembering = -1; /* an open file, whose start stays as it was
                              * for this process */
static uint8_t *remembered;

static ssize_t
read_remembered(const gd_env *env, int fd, void *buf, size_t len,
                uint64_t offset)
{
    (void)env;
    uint64_t end = gd_fptable_data_start(SLOTS);
    if (fd != remembering || offset >= end) {
        return pread(fd, buf, len, (off_t)offset);
    }
    len = len < end - offset ? len : (size_t)(end - offset);
    memcpy(buf, remembered + offset, len);
    return (ssize_t)len;
}

/* The file system asks the server only when a file is opened. */
TEST(test_changed_behind_what_is_remembered)
{
    for (int kind = 0; kind < 2; kind++) {
        rewrite_fixture t;
        rewrite_setup(&t, true);
        gd_group_rewrite *r = begin(&t, 1, 1);
        go_through(&t, r);
        size_t length = (size_t)gd_fptable_data_start(SLOTS);
        remembered = malloc(length);
        scratch_read(&t.x, GROUP_1, remembered, length, 0);
        remembering = t.leased->group->fd;
        t.x.f.env.pread = read_remembered;
        change_behind(&t, kind);
        CHECK_INT(exchange(&t, r), GD_CORRUPT);
        CHECK_CONTAINS(t.x.err.text, "had not its lease");
        end(&t, r);
        remembering = -1;
        free(remembered);
        rewrite_teardown(&t);
    }
}

TEST(test_changed_meanwhile)
{
    for (int kind = 0; kind < 3; kind++) {
        rewrite_fixture t;
        struct stat before, after;
        rewrite_setup(&t, true);
        gd_group_rewrite *r = begin(&t, 1, 1);
        go_through(&t, r);
        change_behind(&t, kind);
        CHECK_INT(fstatat(t.x.root, GROUP_1, &before, 0), 0);
        CHECK_INT(exchange(&t, r), kind == 2 ? GD_BUSY : GD_CORRUPT);
        CHECK_CONTAINS(t.x.err.text, kind == 2 ? "was replaced"
                                               : "had not its lease");
        /* The task tries again: the refusal stays, and the attempt leaves no
         * lock. */
        CHECK_INT(gd_locks_lock_shared(t.repo->locks, 1, &t.x.err), GD_OK);
        gd_locks_unlock_shared(t.repo->locks, 1);
        CHECK_INT(exchange(&t, r), kind == 2 ? GD_BUSY : GD_CORRUPT);
        end(&t, r);
        CHECK_INT(fstatat(t.x.root, GROUP_1, &after, 0), 0);
        CHECK(before.st_ino == after.st_ino);
        rewrite_teardown(&t);
    }
}

/* ---- lost locks, and waiting collectors ---- */

static gd_published left_behind; /* the maintainer's last record */

/* The server and the maintainer act while this process is cut off: its locks
 * fall, its spool file is taken for a dead process's (N6.2), and some blocks
 * of the group are freed. */
static void
collect_behind(rewrite_fixture *t, gd_repo *maintainer, bool excluded)
{
    char name[GD_NAME_SIZE] = "";
    gd_owned_group *owned;
    const uint32_t slots[] = {3, 4, 5};
    uint32_t freed;
    gd_locks_unlease(t->repo->locks, 1);
    if (excluded) {
        gd_locks_unlock_exclusive(t->repo->locks, 1);
    }
    if (scratch_count(&t->x, "spool", "G-", name) == 1) {
        CHECK_INT(unlinkat(t->x.root, name, 0), 0);
    }
    REQUIRE(gd_owned_group_open(maintainer, 1, &owned, &t->x.err) == GD_OK);
    CHECK_INT(gd_owned_group_free(owned, slots, 3, &freed, &t->x.err), GD_OK);
    CHECK_INT(freed, 3);
    left_behind = owned->leased->published;
    gd_owned_group_close(owned);
}

static rewrite_fixture *cut_off; /* its locks fall in the next hook */
static gd_repo *its_maintainer;

static int
rename_late(const gd_env *env, int dir, const char *from, const char *to)
{
    (void)env;
    if (cut_off != NULL) {
        collect_behind(cut_off, its_maintainer, true);
        cut_off = NULL;
    }
    return renameat(dir, from, dir, to) < 0 ? -errno : 0;
}

static int
sync_late(const gd_env *env, int fd)
{
    (void)env;
    struct stat st;
    if (cut_off != NULL && fstat(fd, &st) == 0 && S_ISDIR(st.st_mode)) {
        rewrite_fixture *t = cut_off;
        cut_off = NULL;
        collect_behind(t, its_maintainer, true);
    }
    return fsync(fd) < 0 ? -errno : 0;
}

/* The locks fall before the exchange (0), between the last check and the
 * rename (1), or after the rename (2). Whatever the process does then, the
 * maintainer's changes stay, and its generation, too: otherwise tables that
 * others cached before the blocks were freed would be used (N7.2). */
TEST(test_locks_are_lost)
{
    for (int moment = 0; moment < 3; moment++) {
        rewrite_fixture t;
        gd_published record;
        gd_entry entries[SLOTS];
        rewrite_setup(&t, true);
        its_maintainer = scratch_repo_filter(&t.x);
        gd_repo *maintainer = its_maintainer;
        gd_group_rewrite *r = begin(&t, 1, 1);
        go_through(&t, r);
        if (moment == 0) {
            collect_behind(&t, maintainer, false);
        } else {
            cut_off = &t;
            t.x.f.env.renameat =
                moment == 1 ? rename_late : t.x.f.env.renameat;
            t.x.f.env.fsync = moment == 2 ? sync_late : t.x.f.env.fsync;
        }
        CHECK_INT(exchange(&t, r), moment == 0   ? GD_CORRUPT
                                   : moment == 1 ? GD_IO
                                                 : GD_OK);
        if (moment == 1) {
            CHECK_CONTAINS(t.x.err.text, "lost its locks");
        }
        CHECK(cut_off == NULL);
        end(&t, r);
        CHECK_INT(check_group_file(&t, 1, &record, entries), SLOTS - 3);
        CHECK_INT(entries[4].state, GD_ENTRY_FREED);
        CHECK(record.generation == left_behind.generation &&
              record.sequence == left_behind.sequence);
        CHECK_INT(record.codec == GD_CODEC_ZSTD, moment == 2);
        gd_repo_close(maintainer);
        rewrite_teardown(&t);
    }
}

/* Another process has the lease, and has not changed the group yet. */
TEST_WITH(test_lease_is_lost, rewrite_setup(&t, true), rewrite_teardown(&t))
{
    struct stat before, after;
    gd_repo *other = scratch_repo_filter(&t.x);
    gd_group_rewrite *r = begin(&t, 1, 1);
    go_through(&t, r);
    gd_locks_unlease(t.repo->locks, 1);
    CHECK_INT(gd_locks_lease(other->locks, 1, &t.x.err), GD_OK);
    CHECK_INT(fstatat(t.x.root, GROUP_1, &before, 0), 0);
    CHECK_INT(exchange(&t, r), GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, "this one was cut off");
    CHECK_INT(fstatat(t.x.root, GROUP_1, &after, 0), 0);
    CHECK(before.st_ino == after.st_ino);
    /* The attempt left no lock. */
    CHECK_INT(gd_locks_lock_exclusive(other->locks, 1, &t.x.err), GD_OK);
    gd_locks_unlock_exclusive(other->locks, 1);
    end(&t, r);
    CHECK_INT(gd_locks_lease(t.repo->locks, 1, &t.x.err), GD_BUSY);
    gd_repo_close(other);
}

static int
no_free_space(const gd_env *env, int fd, gd_space *space)
{
    (void)env, (void)fd;
    *space = (gd_space){.free = 0, .total = UINT64_C(1) << 40};
    return 0;
}

/* A rewriting ends for the collector, and when the disk is full; then its
 * space comes back. */
TEST(test_makes_way)
{
    for (int full = 0; full < 2; full++) {
        rewrite_fixture t;
        bool done;
        uint64_t cost;
        rewrite_setup(&t, true);
        gd_repo *other = scratch_repo_filter(&t.x);
        gd_group_rewrite *r = begin(&t, 1, 1);
        CHECK_INT(gd_group_rewrite_require_room(r, &t.x.err), GD_OK);
        if (full) {
            t.repo->params.reserve = 4096;
            t.x.f.env.free_space = no_free_space;
        } else {
            CHECK_INT(gd_locks_announce(other->locks, 1, &t.x.err), GD_OK);
        }
        gd_status wanted = full ? GD_NOSPACE : GD_BUSY;
        CHECK_INT(gd_group_rewrite_require_room(r, &t.x.err), wanted);
        CHECK_INT(gd_group_rewrite_step(r, &done, &cost, &t.x.err), wanted);
        if (!full) {
            CHECK_CONTAINS(t.x.err.text, "is to be collected");
        }
        end(&t, r);
        CHECK_INT(gd_locks_lease(other->locks, 1, &t.x.err), GD_OK);
        gd_repo_close(other);
        rewrite_teardown(&t);
    }
}

/* The collector itself rewrites in spite of its own intent. */
TEST_WITH(test_the_collector_makes_no_way, rewrite_setup(&t, true),
          rewrite_teardown(&t))
{
    CHECK_INT(gd_locks_announce(t.repo->locks, 1, &t.x.err), GD_OK);
    own_group(&t, 1);
    free_group_slots(&t, 3, 1);
    require_rewritten(&t);
    gd_owned_group_close(t.owned);
}

/* Reads of the new file return other bytes than were verified. */
static ssize_t
read_wrongly(const gd_env *env, int fd, void *buf, size_t len, uint64_t offset)
{
    (void)env;
    struct stat st;
    ssize_t n = pread(fd, buf, len, (off_t)offset);
    char path[64], name[256] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    (void)!readlink(path, name, sizeof name - 1);
    if (n > 0 && fstat(fd, &st) == 0 && strstr(name, "/spool/G-") != NULL &&
        offset == gd_fptable_data_start(SLOTS)) {
        ((uint8_t *)buf)[n - 1] ^= 1;
    }
    return n;
}

TEST(test_read_back)
{
    for (int texts = 0; texts < 2; texts++) {
        rewrite_fixture t;
        bool done = false;
        uint64_t cost;
        rewrite_setup(&t, texts);
        t.x.f.env.pread = read_wrongly;
        gd_group_rewrite *r = begin(&t, 1, 1);
        gd_status s = GD_OK;
        while (s == GD_OK && !done) {
            s = gd_group_rewrite_step(r, &done, &cost, &t.x.err);
        }
        CHECK_INT(s, GD_CORRUPT);
        CHECK_CONTAINS(t.x.err.text, "spool/G-");
        end(&t, r);
        CHECK(rewrite_is_image(&t, "one", t.one, LENGTH));
        rewrite_teardown(&t);
    }
}

TEST_WITH(test_note_codec, rewrite_setup(&t, false), rewrite_teardown(&t))
{
    gd_published old, record;
    gd_entry before[SLOTS], after[SLOTS];
    (void)check_group_file(&t, 1, &old, before);
    gd_group_rewrite *r = begin(&t, 1, 0);
    go_through(&t, r);
    fault_env_start_trace(&t.x.f);
    const gd_packing packing = {.codec = GD_CODEC_ZSTD};
    CHECK_INT(gd_leased_group_note_codec(t.leased, &packing, &t.x.err),
              GD_OK);
    /* A torn write then falls back to the record before. */
    scratch_check_trace(&t.x, "fdatasync pwritev");
    end(&t, r);
    CHECK_INT(check_group_file(&t, 1, &record, after), SLOTS);
    CHECK_INT(record.sequence, old.sequence + 1);
    CHECK(record.codec == GD_CODEC_ZSTD && record.level == 3);
    CHECK(record.generation == old.generation && record.end == old.end);
}

static bool
fail_one(fault_call call, uint64_t n)
{
    static const gd_packing packing = {.codec = GD_CODEC_ZSTD,
                                       .level = 1};
    rewrite_fixture t;
    gd_published record;
    gd_entry entries[SLOTS];
    gd_group_rewrite *r;
    bool done = false;
    uint64_t cost;
    rewrite_setup(&t, call == FAULT_ALLOC);
    uint64_t faults = fault_env_faults(&t.x.f);
    fault_env_fail(&t.x.f, call, n, EIO, false);
    gd_status s =
        gd_leased_group_open(t.repo, 1, &t.leased, &t.x.err);
    if (s == GD_OK) {
        s = gd_group_rewrite_open(t.leased, &packing, false, &r, &t.x.err);
        while (s == GD_OK && !done) {
            s = gd_group_rewrite_step(r, &done, &cost, &t.x.err);
            if (s != GD_OK) {
                gd_group_rewrite_close(r);
            }
        }
        if (s == GD_OK) {
            s = exchange(&t, r);
            gd_group_rewrite_close(r);
        }
        close_group(&t);
    }
    bool hit = fault_env_faults(&t.x.f) > faults;
    fault_env_heal(&t.x.f);
    CHECK_INT(check_group_file(&t, 1, &record, entries), SLOTS);
    CHECK(s == GD_OK || is_spool_clean(&t) || call == FAULT_ANY);
    CHECK(rewrite_is_image(&t, "one", t.one, LENGTH));
    own_group(&t, 1);
    gd_owned_group_close(t.owned);
    rewrite_teardown(&t);
    CHECK(hit || s == GD_OK);
    return hit;
}

TEST(test_stages_with_faults)
{
    sweep_faults(fail_one, SWEEP_STRIDE);
}
