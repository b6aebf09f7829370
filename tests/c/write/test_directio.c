/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_directio.c - appending beside the page cache: the file has the same
 * bytes as it would have otherwise, wherever an append begins and ends, and
 * whatever fails (I1, I2, I4).
 */
#include "engine/write/directio.h"

#include "engine/base/coding.h"
#include "engine/write/appender.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define FILE_NAME "groups/00000001"

enum { PAGE = 4096, ROOM = 2 << 20, MAX_SIZE = 24 << 20, PIECES = 20 };

typedef struct fixture {
    fault_env f;
    char *dir;
    int root;
    gd_group group;
    uint8_t *wanted; /* the file's expected bytes */
    uint64_t end;    /* their end */
    gd_directio *direct;
} fixture;

static ssize_t (*any_pwritev)(const gd_env *env, int fd,
                              const struct iovec *iov, int count,
                              uint64_t offset);
static unsigned direct_writes;

static int (*any_openat)(const gd_env *env, int dir, const char *path,
                         int flags, mode_t mode);
static bool refuses; /* direct opens fail */
static bool is_direct[FAULT_FDS];

/* Refuses unaligned writes, as file systems do; one in memory accepts them. */
static ssize_t
strict_pwritev(const gd_env *env, int fd, const struct iovec *iov, int count,
               uint64_t offset)
{
    uint64_t odd = offset;
    for (int i = 0; i < count; i++) {
        odd |= (uintptr_t)iov[i].iov_base | iov[i].iov_len;
    }
    direct_writes += is_direct[fd];
    return is_direct[fd] && odd % PAGE != 0
               ? -EINVAL
               : any_pwritev(env, fd, iov, count, offset);
}

/* If the file system does not support such files, an ordinary one replaces
 * it. */
static int
strict_openat(const gd_env *env, int dir, const char *path, int flags,
              mode_t mode)
{
    bool direct = (flags & O_DIRECT) != 0;
    if (direct && refuses) {
        return -EINVAL;
    }
    int fd = any_openat(env, dir, path, flags, mode);
    if (fd == -EINVAL && direct) {
        fd = any_openat(env, dir, path, flags & ~O_DIRECT, mode);
    }
    if (fd >= 0) {
        is_direct[fd] = direct;
    }
    return fd;
}

static void
be_strict(fault_env *f)
{
    refuses = false;
    any_openat = f->env.openat;
    f->env.openat = strict_openat;
    any_pwritev = f->env.pwritev;
    f->env.pwritev = strict_pwritev;
}

/* Makes a file that has `before` random bytes. */
static void
setup(fixture *t, uint64_t before)
{
    memset(t, 0, sizeof *t);
    fault_env_init(&t->f);
    be_strict(&t->f);
    t->dir = check_mkdir();
    t->root = open(t->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (t->root < 0 || mkdirat(t->root, "groups", 0700) != 0) {
        perror(t->dir);
        exit(2);
    }
    t->wanted = calloc(1, MAX_SIZE);
    fill_random(t->wanted, before, 1);
    t->end = before;
    const gd_env *env = &t->f.env;
    struct stat st;
    t->group = (gd_group){.env = env, .number = 1, .name = FILE_NAME};
    t->group.fd = env->openat(env, t->root, FILE_NAME,
                              O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    t->group.content = t->group.fd;
    if (pwrite(t->group.fd, t->wanted, before, 0) != (ssize_t)before ||
        fstat(t->group.fd, &st) != 0) {
        perror(FILE_NAME);
        exit(2);
    }
    t->group.inode = st.st_ino;
}

static void
teardown(fixture *t)
{
    gd_directio_close(t->direct);
    t->f.env.close(&t->f.env, t->group.fd);
    CHECK_INT(fault_env_leaks(&t->f), 0);
    fault_env_destroy(&t->f);
    close(t->root);
    check_rmdir(t->dir);
    free(t->wanted);
}

static bool
open_direct(fixture *t)
{
    t->direct = gd_directio_open(&t->f.env, t->root, &t->group);
    return t->direct != NULL;
}

/* Appends so many bytes, in up to so many pieces of any size. */
static bool
append(fixture *t, size_t length, int most, uint64_t *random)
{
    struct iovec pieces[PIECES];
    int count = 0;
    uint8_t *data = t->wanted + t->end;
    fill_random(data, length, next_random(random));
    for (size_t at = 0; at < length; count++) {
        size_t n = length - at;
        if (count + 1 < most) {
            n = (size_t)(next_random(random) % (n + 1)); /* may be 0 */
        }
        pieces[count] = (struct iovec){data + at, n};
        at += n;
    }
    bool good = gd_directio_write(t->direct, pieces, (size_t)count, t->end);
    t->end += good ? length : 0;
    return good;
}

/* Returns true if reading through the page cache shows the written bytes, and
 * zeros up to the end of the page. */
static bool
is_right(fixture *t)
{
    uint64_t length = (t->end + PAGE - 1) / PAGE * PAGE;
    uint8_t *got = malloc(length + 1);
    memset(t->wanted + t->end, 0, length - t->end);
    bool good = CHECK_INT(pread(t->group.fd, got, length + 1, 0), length) &&
                CHECK(memcmp(got, t->wanted, length) == 0);
    free(got);
    return good;
}

TEST(test_many_appends)
{
    uint64_t random = 7;
    for (int round = 0; round < 12; round++) {
        fixture t;
        setup(&t, next_random(&random) % (5 * PAGE));
        REQUIRE(open_direct(&t));
        for (int i = 0; i < 60 && t.end < MAX_SIZE - 4 * (uint64_t)ROOM; i++) {
            size_t most = i % 10 == 9 ? 3 * ROOM : 3 * PAGE;
            size_t length = 1 + (size_t)(next_random(&random) % most);
            REQUIRE(append(&t, length, PIECES, &random));
            REQUIRE(is_right(&t));
        }
        teardown(&t);
    }
}

TEST(test_whole_pages)
{
    static const size_t before[] = {0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE};
    static const size_t lengths[] = {1,        PAGE - 1, PAGE,     PAGE + 1,
                                     ROOM - 1, ROOM,     ROOM + 1, 2 * ROOM,
                                     PAGE};
    uint64_t random = 8;
    for (size_t i = 0; i < sizeof before / sizeof before[0]; i++) {
        fixture t;
        setup(&t, before[i]);
        REQUIRE(open_direct(&t));
        for (size_t k = 0; k < sizeof lengths / sizeof lengths[0]; k++) {
            REQUIRE(append(&t, lengths[k], 1, &random));
            REQUIRE(is_right(&t));
            /* The pieces end at the next page, and where its room ends. */
            REQUIRE(append(&t, PAGE - t.end % PAGE, 2, &random));
            REQUIRE(is_right(&t));
        }
        teardown(&t);
    }
}

/* Another program wrote in between, the usual way. */
TEST(test_goes_where_it_is_told)
{
    fixture t;
    uint64_t random = 9;
    setup(&t, 100);
    REQUIRE(open_direct(&t));
    CHECK(append(&t, 5000, 3, &random));
    fill_random(t.wanted + t.end, 3000, 10);
    CHECK_INT(pwrite(t.group.fd, t.wanted + t.end, 3000, (off_t)t.end), 3000);
    t.end += 3000;
    CHECK(append(&t, 5000, 3, &random));
    is_right(&t);
    teardown(&t);
}

TEST(test_what_cannot_be_opened)
{
    static const fault_call calls[] = {FAULT_OPENAT, FAULT_FSTAT, FAULT_ALLOC};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        for (uint64_t nth = 1; nth <= (calls[i] == FAULT_ALLOC ? 2 : 1);
             nth++) {
            fixture t;
            setup(&t, 100);
            fault_env_fail(&t.f, calls[i], nth, ENOMEM, false);
            CHECK(!open_direct(&t));
            CHECK_INT(fault_env_faults(&t.f), 1);
            teardown(&t);
        }
    }
}

/* The lock is of its own: the group's other open file has another. */
TEST(test_holds_a_lock_on_the_file)
{
    fixture t;
    setup(&t, 100);
    const gd_env *env = gd_env_posix();
    CHECK_INT(env->is_locked(env, t.group.fd, GD_BYTE_LESSEE), 0);
    CHECK(open_direct(&t));
    CHECK_INT(env->is_locked(env, t.group.fd, GD_BYTE_LESSEE), 1);
    gd_directio_close(t.direct);
    CHECK_INT(env->is_locked(env, t.group.fd, GD_BYTE_LESSEE), 0);
    fault_env_fail(&t.f, FAULT_LOCK, 1, EIO, false);
    CHECK(!open_direct(&t));
    teardown(&t);
}

TEST(test_another_file_under_the_name)
{
    fixture t;
    setup(&t, 100);
    CHECK_INT(renameat(t.root, FILE_NAME, t.root, "elsewhere"), 0);
    CHECK(!open_direct(&t));
    close(openat(t.root, FILE_NAME, O_CREAT | O_WRONLY, 0600));
    CHECK(!open_direct(&t));
    CHECK_INT(unlinkat(t.root, FILE_NAME, 0), 0);
    CHECK_INT(symlinkat("../elsewhere", t.root, FILE_NAME), 0);
    CHECK(!open_direct(&t));
    CHECK_INT(unlinkat(t.root, FILE_NAME, 0), 0);
    CHECK_INT(renameat(t.root, "elsewhere", t.root, FILE_NAME), 0);
    CHECK(open_direct(&t));
    teardown(&t);
}

/* Earlier bytes are left unchanged, whatever fails. */
TEST(test_what_cannot_be_written)
{
    enum { HEAD, FIRST, LATER, SHORT, CASES };
    for (int i = 0; i < CASES; i++) {
        fixture t;
        uint64_t random = 11;
        setup(&t, 5000);
        REQUIRE(open_direct(&t));
        if (i == SHORT) {
            fault_env_shorten(&t.f, 700);
        } else {
            fault_env_fail(&t.f, i == HEAD ? FAULT_PREAD : FAULT_PWRITEV,
                           i == LATER ? 2 : 1, EIO, false);
        }
        CHECK(!append(&t, ROOM + PAGE, 4, &random));
        CHECK(i == SHORT || fault_env_faults(&t.f) == 1);
        fault_env_heal(&t.f);
        uint8_t got[5000];
        CHECK_INT(pread(t.group.fd, got, sizeof got, 0), sizeof got);
        CHECK(memcmp(got, t.wanted, sizeof got) == 0);
        teardown(&t);
    }
}

TEST(test_interrupted)
{
    fixture t;
    uint64_t random = 12;
    setup(&t, 5000);
    REQUIRE(open_direct(&t));
    fault_env_interrupt(&t.f, 2);
    CHECK(append(&t, 2 * ROOM, 4, &random));
    fault_env_heal(&t.f);
    is_right(&t);
    teardown(&t);
}

/* ---- by a writer ---- */

enum { BLOCK = 512 };

typedef struct writer {
    scratch x;
    gd_repo *repo;
    gd_appender *appender;
    uint8_t *wanted; /* from the first append's offset on */
    uint64_t start, length;
} writer;

static void
open_writer(writer *t)
{
    memset(t, 0, sizeof *t);
    scratch_init(&t->x);
    be_strict(&t->x.f);
    t->x.params.block_size = BLOCK;
    t->x.params.segment_size = 4096;
    t->x.params.direct_io = GD_DIRECT_ON;
    t->repo = scratch_repo(&t->x);
    t->wanted = calloc(1, MAX_SIZE);
}

static void
enter_group(writer *t)
{
    if (gd_appender_open(t->repo, &gd_global_scope, NULL, &t->appender,
                         &t->x.err) != GD_OK) {
        fprintf(stderr, "%s\n", t->x.err.text);
        exit(2);
    }
}

static void
leave_group(writer *t)
{
    gd_appender_close(t->appender);
    gd_locks_unlock_shared(t->repo->locks, 1);
}

static void
close_writer(writer *t)
{
    gd_repo_close(t->repo);
    free(t->wanted);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

/* Appends one block as a segment. */
static gd_status
append_block(writer *t, uint64_t seed)
{
    uint8_t block[BLOCK];
    gd_fingerprint fp = {{0}};
    uint32_t slot;
    fill_random(block, sizeof block, seed);
    memcpy(&fp, block, sizeof fp);
    gd_status s = gd_appender_take_slot(t->appender, &fp,
                                        gd_checksum(block, BLOCK, 0), BLOCK,
                                        0, &slot, &t->x.err);
    if (s != GD_OK) {
        return s;
    }
    struct iovec piece = {block, BLOCK};
    gd_new_segment segment = {
        .header = {.first_slot = slot, .blocks = 1, .plain_length = BLOCK,
                   .stored_length = BLOCK},
        .pieces = &piece,
        .piece_count = 1,
    };
    gd_segment_header_encode(&segment.header,
                             gd_appender_group(t->appender)->bounds.seed,
                             &piece, 1, segment.encoded);
    uint8_t *to = t->wanted + t->length;
    memcpy(to, segment.encoded, GD_SEGMENT_HEADER);
    memcpy(to + GD_SEGMENT_HEADER, block, BLOCK);
    t->length += GD_SEGMENT_HEADER + BLOCK;
    uint64_t written;
    return gd_appender_append(t->appender, &segment, 1, &written, &t->x.err);
}

static void
check_file(writer *t)
{
    uint8_t *got = malloc(t->length);
    CHECK_INT(scratch_size(&t->x, FILE_NAME), t->start + t->length);
    scratch_read(&t->x, FILE_NAME, got, t->length, t->start);
    CHECK(memcmp(got, t->wanted, t->length) == 0);
    free(got);
}

/* Stores a block, and then, under a fault beside the page cache, some more;
 * the last one is given up. */
static void
store_under(fault_call call, uint64_t nth, int sys_errno, size_t shorten)
{
    writer t;
    open_writer(&t);
    enter_group(&t);
    t.start = (uint64_t)scratch_size(&t.x, FILE_NAME);
    CHECK_INT(append_block(&t, 1), GD_OK);
    CHECK_INT(gd_appender_sync(t.appender, &t.x.err), GD_OK);
    leave_group(&t);
    check_file(&t);
    refuses = call == FAULT_OPENAT;
    enter_group(&t);
    fault_env_fail(&t.x.f, call, nth, sys_errno, false);
    fault_env_shorten(&t.x.f, shorten);
    CHECK_INT(append_block(&t, 2), GD_OK);
    CHECK_INT(append_block(&t, 3), GD_OK);
    CHECK_INT(fault_env_faults(&t.x.f), shorten == 0 && !refuses);
    fault_env_heal(&t.x.f);
    /* A failed way is not tried again. */
    unsigned before = direct_writes;
    CHECK_INT(gd_appender_sync(t.appender, &t.x.err), GD_OK);
    CHECK_INT(append_block(&t, 4), GD_OK);
    CHECK_INT(gd_appender_sync(t.appender, &t.x.err), GD_OK);
    uint64_t kept = t.length;
    CHECK_INT(append_block(&t, 5), GD_OK);
    CHECK_INT(direct_writes, before);
    t.length = kept;
    leave_group(&t);
    check_file(&t);
    close_writer(&t);
}

TEST(test_a_writer_falls_back)
{
    store_under(FAULT_PREAD, 1, EIO, 0);
    store_under(FAULT_PWRITEV, 1, EINVAL, 0);
    store_under(FAULT_PWRITEV, 1, ENOSPC, 0);
    store_under(FAULT_PWRITEV, 2, EIO, 0);
    store_under(FAULT_OPENAT, 1, EINVAL, 0);
    store_under(FAULT_PWRITEV, 1000, EIO, 100);
}

TEST(test_a_writer_cuts_the_file_to_its_end)
{
    for (int synced = 0; synced < 2; synced++) {
        writer t;
        open_writer(&t);
        enter_group(&t);
        t.start = (uint64_t)scratch_size(&t.x, FILE_NAME);
        CHECK_INT(append_block(&t, 1), GD_OK);
        CHECK_INT(scratch_size(&t.x, FILE_NAME), t.start + PAGE);
        if (synced) {
            CHECK_INT(gd_appender_sync(t.appender, &t.x.err), GD_OK);
        } else {
            t.length = 0;
        }
        leave_group(&t);
        check_file(&t);
        close_writer(&t);
    }
}

/* Entries may be on the disk: the file is not cut; and errors are reported. */
TEST(test_a_poisoned_group_is_not_cut)
{
    writer t;
    open_writer(&t);
    enter_group(&t);
    t.start = (uint64_t)scratch_size(&t.x, FILE_NAME);
    CHECK_INT(append_block(&t, 1), GD_OK);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 1, EIO, false);
    CHECK_INT(gd_appender_sync(t.appender, &t.x.err), GD_IO);
    int64_t size = scratch_size(&t.x, FILE_NAME);
    leave_group(&t);
    CHECK_INT(scratch_size(&t.x, FILE_NAME), size);
    close_writer(&t);
    /* An append that fails in both ways is an error. */
    open_writer(&t);
    enter_group(&t);
    t.start = (uint64_t)scratch_size(&t.x, FILE_NAME);
    fault_env_fail(&t.x.f, FAULT_PWRITEV, 1, ENOSPC, true);
    CHECK_INT(append_block(&t, 1), GD_NOSPACE);
    fault_env_heal(&t.x.f);
    t.length = 0;
    leave_group(&t);
    CHECK_INT(scratch_size(&t.x, FILE_NAME), t.start);
    close_writer(&t);
}

/* A writer was killed: its zeros stay, and the next one continues behind
 * them. */
TEST(test_behind_a_writer_that_was_killed)
{
    writer t;
    open_writer(&t);
    enter_group(&t);
    t.start = (uint64_t)scratch_size(&t.x, FILE_NAME);
    CHECK_INT(append_block(&t, 1), GD_OK);
    CHECK_INT(gd_appender_sync(t.appender, &t.x.err), GD_OK);
    leave_group(&t);
    t.length += 1000;
    scratch_truncate(&t.x, FILE_NAME, t.start + t.length);
    enter_group(&t);
    CHECK_INT(append_block(&t, 2), GD_OK);
    CHECK_INT(gd_appender_sync(t.appender, &t.x.err), GD_OK);
    leave_group(&t);
    check_file(&t);
    close_writer(&t);
}

/* With a free choice, each interval may go another way. */
TEST(test_the_way_changes_at_sync_points)
{
    writer t;
    open_writer(&t);
    t.repo->params.direct_io = GD_DIRECT_AUTO;
    t.repo->ways = (gd_ways){.cost = {2, 1}};
    enter_group(&t);
    t.start = (uint64_t)scratch_size(&t.x, FILE_NAME);
    for (unsigned i = 0; i < 12; i++) {
        bool beside = i % 3 != 1;
        bool next = (i + 1) % 3 != 1;
        unsigned before = direct_writes;
        CHECK_INT(append_block(&t, 2 * i), GD_OK);
        CHECK_INT(append_block(&t, 2 * i + 1), GD_OK);
        CHECK_INT(direct_writes - before, beside ? 2 : 0);
        t.repo->ways.cost[GD_IO_MODE_BESIDE] = next ? 1 : 3;
        CHECK_INT(gd_appender_sync(t.appender, &t.x.err), GD_OK);
        uint8_t got[2 * BLOCK];
        scratch_read(&t.x, FILE_NAME, got, sizeof got,
                     t.start + t.length - sizeof got);
        CHECK(memcmp(got, t.wanted + t.length - sizeof got, sizeof got) == 0);
    }
    leave_group(&t);
    check_file(&t);
    close_writer(&t);
}

/* A failed way is not tried again soon, whichever group is next. */
TEST(test_a_failure_is_remembered)
{
    for (int opens = 0; opens < 2; opens++) {
        writer t;
        open_writer(&t);
        t.repo->params.direct_io = GD_DIRECT_AUTO;
        t.repo->ways = (gd_ways){.cost = {2, 1}};
        refuses = opens;
        enter_group(&t);
        t.start = (uint64_t)scratch_size(&t.x, FILE_NAME);
        fault_env_fail(&t.x.f, FAULT_PWRITEV, 1, EINVAL, false);
        if (opens) {
            fault_env_heal(&t.x.f);
        }
        CHECK_INT(append_block(&t, 1), GD_OK);
        CHECK_INT(gd_appender_sync(t.appender, &t.x.err), GD_OK);
        leave_group(&t);
        fault_env_heal(&t.x.f);
        refuses = false;
        unsigned before = direct_writes;
        enter_group(&t);
        CHECK_INT(append_block(&t, 2), GD_OK);
        CHECK_INT(gd_appender_sync(t.appender, &t.x.err), GD_OK);
        leave_group(&t);
        CHECK_INT(direct_writes, before);
        check_file(&t);
        close_writer(&t);
    }
}
