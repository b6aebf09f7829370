/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_spool.c - storing and deleting an image: the steps of N7.1, N8, N9 and
 * N11, their order, and the files that are left when one of them fails.
 */
#include "engine/files/spool.h"

#include <signal.h>

#include "engine/files/image_delete.h"
#include "engine/files/locks.h"
#include "engine/format/recipe.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

/* ---- a table that records the calls, in front of the scratch's.
 *
 * It can also report a link that was made as failed, and run a function before
 * a call. ---- */

typedef struct watch {
    gd_env env;
    const gd_env *below;
    char record[1000];
    bool link_lies;              /* makes the link, and reports EIO */
    bool link_lies_with_eexist;  /* the same, as a repeated request does */
    void (*before_lock)(void);   /* once */
    void (*before_fstatat)(void);
} watch;

static watch w;
static scratch x;

static void
note(const char *what, const char *name)
{
    size_t used = strlen(w.record);
    snprintf(w.record + used, sizeof w.record - used, "%s%s %.7s",
             used == 0 ? "" : ", ", what, name);
}

/* Returns the name by which the descriptor was opened. */
static void
note_descriptor(const char *what, int fd)
{
    char link[64], path[512];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n < 0 ? 0 : n] = '\0';
    size_t root = strlen(x.dir);
    note(what, strlen(path) > root ? path + root + 1 : ".");
}

static int
watch_fsync(const gd_env *env, int fd)
{
    (void)env;
    note_descriptor("fsync", fd);
    return w.below->fsync(w.below, fd);
}

static int
watch_linkat(const gd_env *env, int dir, const char *from, const char *to)
{
    (void)env;
    note("link", to);
    int rc = w.below->linkat(w.below, dir, from, to);
    if (w.link_lies) {
        return -EIO;
    }
    return w.link_lies_with_eexist ? -EEXIST : rc;
}

static int
watch_unlinkat(const gd_env *env, int dir, const char *path)
{
    (void)env;
    note("unlink", path);
    return w.below->unlinkat(w.below, dir, path);
}

static int
watch_lock(const gd_env *env, int fd, uint64_t byte, short type)
{
    (void)env;
    void (*before)(void) = w.before_lock;
    w.before_lock = NULL;
    if (before != NULL) {
        before();
    }
    return w.below->lock(w.below, fd, byte, type);
}

static int
watch_fstatat(const gd_env *env, int dir, const char *path, struct stat *st)
{
    (void)env;
    void (*before)(void) = w.before_fstatat;
    w.before_fstatat = NULL;
    if (before != NULL) {
        before();
    }
    return w.below->fstatat(w.below, dir, path, st);
}

/* fault_env expects its own gd_env as an argument: the calls that the watch
 * leaves alone must pass it. */
#define FORWARDED(type, call, parameters, arguments)                          \
    static type through_##call parameters                                     \
    {                                                                         \
        (void)env;                                                            \
        return w.below->call arguments;                                       \
    }
FORWARDED(int, openat,
          (const gd_env *env, int dir, const char *path, int flags,
           mode_t mode),
          (w.below, dir, path, flags, mode))
FORWARDED(int, close, (const gd_env *env, int fd), (w.below, fd))
FORWARDED(ssize_t, pread,
          (const gd_env *env, int fd, void *buf, size_t len, uint64_t offset),
          (w.below, fd, buf, len, offset))
FORWARDED(ssize_t, pwritev,
          (const gd_env *env, int fd, const struct iovec *iov, int count,
           uint64_t offset),
          (w.below, fd, iov, count, offset))
FORWARDED(int, fstat, (const gd_env *env, int fd, struct stat *st),
          (w.below, fd, st))
FORWARDED(int, is_locked, (const gd_env *env, int fd, uint64_t byte),
          (w.below, fd, byte))
FORWARDED(int, renew,
          (const gd_env *env, int dir, const char *path),
          (w.below, dir, path))
FORWARDED(int, random, (const gd_env *env, void *buf, size_t len),
          (w.below, buf, len))
FORWARDED(void *, alloc, (const gd_env *env, size_t size, bool zeroed),
          (w.below, size, zeroed))
FORWARDED(void, release, (const gd_env *env, void *memory), (w.below, memory))
static void
through_sleep_ms(const gd_env *env, unsigned ms)
{
    (void)env, (void)ms; /* no test waits here */
}

static void
setup(void)
{
    scratch_init(&x);
    w = (watch){.env = *x.env, .below = x.env};
#define WATCHED(call) w.env.call = watch_##call
    WATCHED(fsync);
    WATCHED(linkat);
    WATCHED(unlinkat);
    WATCHED(lock);
    WATCHED(fstatat);
#undef WATCHED
#define THROUGH(call) w.env.call = through_##call
    THROUGH(openat);
    THROUGH(renew);
    THROUGH(close);
    THROUGH(pread);
    THROUGH(pwritev);
    THROUGH(fstat);
    THROUGH(is_locked);
    THROUGH(random);
    THROUGH(alloc);
    THROUGH(release);
    THROUGH(sleep_ms);
#undef THROUGH
}

static void
teardown(void)
{
    CHECK_INT(scratch_destroy(&x), 0);
}

/* ---- the tests' steps ---- */

static gd_status
create(const gd_env *env, gd_spool_writer *file)
{
    return gd_spool_create(env, x.root, GD_SPOOL_STORE, file, &x.err);
}

/* Makes a complete recipe, of so many zeros, in a new spool file. */
static gd_spool_writer
make_recipe(const char *image_id, uint64_t size)
{
    gd_spool_writer file = {.fd = -1};
    gd_recipe_writer *writer;
    gd_recipe_header header = {0};
    CHECK_INT(create(&w.env, &file), GD_OK);
    CHECK_INT(gd_recipe_writer_open(x.env, file.fd, file.name, file.id,
                                    &writer, &x.err),
              GD_OK);
    CHECK_INT(gd_recipe_add_zeros(writer, size, &x.err), GD_OK);
    memcpy(header.transaction_id, file.id, GD_ID_SIZE);
    memcpy(header.upload_id, file.id, GD_ID_SIZE);
    snprintf(header.image_id, sizeof header.image_id, "%s", image_id);
    CHECK_INT(gd_recipe_finish(writer, &x.params, &header, &x.err), GD_OK);
    gd_recipe_writer_close(writer);
    return file;
}

/* Takes the steps of a transaction with one image. */
static gd_status
commit(const gd_spool_writer *file, const char *image_id, bool *linked)
{
    w.record[0] = '\0';
    *linked = false;
    GD_TRY(gd_spool_sync_recipe(&w.env, file, image_id, &x.err));
    GD_TRY(gd_sync_dir(&w.env, x.root, GD_DIR_SPOOL, &x.err));
    GD_TRY(gd_spool_link(&w.env, x.root, file, image_id, linked, &x.err));
    return gd_sync_dir(&w.env, x.root, GD_DIR_IMAGES, &x.err);
}

/* Commits an image by another store operation, which has ended. */
static void
store(const char *image_id, uint64_t size, uint8_t upload_id[GD_ID_SIZE])
{
    bool linked;
    gd_spool_writer file = make_recipe(image_id, size);
    CHECK_INT(commit(&file, image_id, &linked), GD_OK);
    CHECK(linked);
    if (upload_id != NULL) {
        memcpy(upload_id, file.id, GD_ID_SIZE);
    }
    gd_spool_close(&w.env, &file);
}

static gd_status
delete_image(const char *image_id, const uint8_t *upload_id)
{
    w.record[0] = '\0';
    return gd_image_delete(&w.env, x.root, &x.params, image_id, upload_id,
                           &x.err);
}

/* Returns true if another open file holds the byte of the file. */
static bool
is_locked(const char *name, uint64_t byte)
{
    const gd_env *env = gd_env_posix();
    int fd = openat(x.root, name, O_RDWR | O_CLOEXEC);
    bool locked = env->lock(env, fd, byte, F_WRLCK) == -EAGAIN;
    close(fd);
    return locked;
}

static bool
is_same(const char *a, const char *b)
{
    struct stat one, two;
    return fstatat(x.root, a, &one, 0) == 0 &&
           fstatat(x.root, b, &two, 0) == 0 && one.st_ino == two.st_ino;
}

/* ---- creating ---- */

TEST_WITH(test_create, setup(), teardown())
{
    gd_spool_writer a, b;
    char name[GD_NAME_SIZE];
    CHECK_INT(create(&w.env, &a), GD_OK);
    CHECK_INT(create(&w.env, &b), GD_OK);
    CHECK(memcmp(a.id, b.id, GD_ID_SIZE) != 0);
    gd_names_spool(GD_SPOOL_STORE, a.id, name);
    CHECK(strcmp(name, a.name) == 0);
    CHECK_INT(scratch_size(&x, a.name), 0);
    struct stat st;
    CHECK_INT(fstatat(x.root, a.name, &st, 0), 0);
    CHECK_INT(st.st_mode & 0777, 0600);
    CHECK(is_locked(a.name, GD_BYTE_WRITER));
    CHECK(!is_locked(a.name, GD_BYTE_USERS));
    gd_spool_close(&w.env, &a);
    gd_spool_close(&w.env, &a); /* twice does no harm */
    CHECK(scratch_exists(&x, a.name));
    CHECK(!is_locked(a.name, GD_BYTE_WRITER));
    gd_spool_discard(&w.env, x.root, &b);
    gd_spool_discard(&w.env, x.root, &b);
    CHECK(!scratch_exists(&x, b.name));
    CHECK_INT(scratch_count(&x, "spool", "", NULL), 1);
}

static char seized[GD_NAME_SIZE];
static int seized_fd;

/* The maintainer takes the new file, not yet locked, for a dead writer's. */
static void
seize(void)
{
    const gd_env *env = gd_env_posix();
    scratch_count(&x, "spool", "T-", seized);
    seized_fd = openat(x.root, seized, O_RDWR | O_CLOEXEC);
    CHECK_INT(env->lock(env, seized_fd, GD_BYTE_WRITER, F_WRLCK), 0);
}

/* The maintainer does the same, and has finished before the lock is tried. */
static void
seize_and_unlink(void)
{
    scratch_count(&x, "spool", "T-", seized);
    CHECK_INT(unlinkat(x.root, seized, 0), 0);
}

/* N7.1 */
TEST_WITH(test_create_meets_the_maintainer, setup(), teardown())
{
    gd_spool_writer file;
    w.before_lock = seize;
    CHECK_INT(create(&w.env, &file), GD_OK);
    CHECK(strcmp(file.name, seized) != 0);
    CHECK(scratch_exists(&x, seized)); /* the maintainer's to unlink */
    close(seized_fd);
    CHECK_INT(unlinkat(x.root, seized, 0), 0);
    gd_spool_discard(&w.env, x.root, &file);
    w.before_lock = seize_and_unlink;
    CHECK_INT(create(&w.env, &file), GD_OK);
    CHECK(strcmp(file.name, seized) != 0);
    CHECK(scratch_exists(&x, file.name));
    gd_spool_discard(&w.env, x.root, &file);
}

TEST_WITH(test_create_fails, setup(), teardown())
{
    gd_spool_writer file;
    fault_env_fail(&x.f, FAULT_RANDOM, 1, EIO, false);
    CHECK_INT(create(x.env, &file), GD_IO);
    fault_env_fail(&x.f, FAULT_OPENAT, 1, ENOSPC, false);
    CHECK_INT(create(x.env, &file), GD_NOSPACE);
    fault_env_fail(&x.f, FAULT_LOCK, 1, ENOLCK, false);
    CHECK_INT(create(x.env, &file), GD_IO);
    CHECK_CONTAINS(x.err.text, "OFD");
    CHECK_INT(file.fd, -1);
    CHECK_INT(scratch_count(&x, "spool", "", NULL), 0);
    fault_env_fail(&x.f, FAULT_OPENAT, 1, EEXIST, false);
    CHECK_INT(create(x.env, &file), GD_OK);
    gd_spool_discard(x.env, x.root, &file);
    fault_env_fail(&x.f, FAULT_LOCK, 1, EAGAIN, true);
    CHECK_INT(create(x.env, &file), GD_BUSY);
}

/* N7.1: another host's maintainer unlinks the file, and the next call of this
 * host reports that it is missing. */
TEST_WITH(test_create_of_what_is_gone, setup(), teardown())
{
    static const fault_call calls[] = {FAULT_OPENAT, FAULT_FSTAT, FAULT_LOCK};
    gd_spool_writer file;
    static const int gone[] = {ENOENT, ESTALE};
    for (size_t i = 0; i < 2 * sizeof calls / sizeof *calls; i++) {
        fault_call call = calls[i / 2];
        fault_env_fail(&x.f, call, call == FAULT_FSTAT ? 2 : 1, gone[i % 2],
                       false);
        CHECK_INT(create(x.env, &file), GD_OK);
        CHECK_INT(scratch_count(&x, "spool", "", NULL), 1);
        gd_spool_discard(x.env, x.root, &file);
        fault_env_heal(&x.f);
    }
    fault_env_fail(&x.f, FAULT_OPENAT, 1, ENOENT, true);
    CHECK_INT(create(x.env, &file), GD_NOTFOUND); /* spool/ is missing */
    CHECK_CONTAINS(x.err.text, "spool/T-");
}

/* ---- committing ---- */

/* N8.2, N8.3: the calls have exactly this order. */
TEST(test_commit)
{
    bool linked = false;
    setup();
    gd_spool_writer file = make_recipe("a", 4096);
    CHECK_INT(commit(&file, "a", &linked), GD_OK);
    CHECK(linked);
    if (!CHECK(strcmp(w.record, "fsync spool/T, fsync spool, link images/, "
                                "fsync images") == 0)) {
        fprintf(stderr, "%s\n", w.record);
    }
    CHECK(is_same(file.name, "images/a"));
    CHECK(is_locked("images/a", GD_BYTE_WRITER));
    gd_spool_close(&w.env, &file);
    CHECK(scratch_exists(&x, file.name)); /* for the accounting */
    teardown();
}

TEST_WITH(test_commit_twice_on_one_id, setup(), teardown())
{
    bool linked;
    gd_spool_writer first = make_recipe("a", 4096);
    gd_spool_writer second = make_recipe("a", 8192);
    CHECK_INT(commit(&first, "a", &linked), GD_OK);
    CHECK_INT(commit(&second, "a", &linked), GD_EXISTS);
    CHECK(!linked);
    CHECK_CONTAINS(x.err.text, "image a ");
    CHECK(is_same(first.name, "images/a"));
    gd_spool_discard(&w.env, x.root, &second);
    CHECK(is_same(first.name, "images/a"));
    gd_spool_close(&w.env, &first);
}

TEST(test_commit_of_a_bad_id)
{
    bool linked = true;
    setup();
    gd_spool_writer file = make_recipe("a", 4096);
    CHECK_INT(commit(&file, "../a", &linked), GD_INVALID);
    CHECK(!linked);
    gd_spool_discard(&w.env, x.root, &file);
    teardown();
}

/* The file that the name leads to decides, not the call's result. */
TEST(test_link_made_but_reported_as_failed)
{
    bool linked = false;
    setup();
    gd_spool_writer file = make_recipe("a", 4096);
    w.link_lies = true;
    CHECK_INT(commit(&file, "a", &linked), GD_OK);
    CHECK(linked);
    CHECK_CONTAINS(w.record, "link images/, fsync images");
    gd_spool_close(&w.env, &file);
    w.link_lies = false;
    w.link_lies_with_eexist = true;
    file = make_recipe("b", 4096);
    CHECK_INT(commit(&file, "b", &linked), GD_OK);
    CHECK(linked);
    gd_spool_close(&w.env, &file);
    file = make_recipe("b", 4096); /* and now the link is another's */
    CHECK_INT(commit(&file, "b", &linked), GD_EXISTS);
    CHECK(!linked);
    gd_spool_discard(&w.env, x.root, &file);
    w.link_lies = w.link_lies_with_eexist = false;
    teardown();
}

TEST(test_commit_fails)
{
    static const struct {
        fault_call call;
        uint64_t nth;
        int sys_errno;
        gd_status wanted;
        bool linked;
    } cases[] = {
        {FAULT_FSYNC, 1, EIO, GD_IO, false},
        {FAULT_FSYNC, 1, ENOSPC, GD_NOSPACE, false},
        {FAULT_FSYNC, 2, EIO, GD_IO, false},
        {FAULT_OPENAT, 1, EIO, GD_IO, false},
        {FAULT_LINKAT, 1, EIO, GD_IO, false},
        {FAULT_LINKAT, 1, EDQUOT, GD_NOSPACE, false},
        {FAULT_OPENAT, 2, EIO, GD_IO, true},
        {FAULT_FSYNC, 3, EIO, GD_IO, true},
    };
    setup();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bool linked = !cases[i].linked;
        gd_spool_writer file = make_recipe("a", 4096);
        fault_env_fail(&x.f, cases[i].call, cases[i].nth, cases[i].sys_errno,
                       false);
        CHECK_INT(commit(&file, "a", &linked), cases[i].wanted);
        CHECK_INT(linked, cases[i].linked);
        CHECK_INT(scratch_exists(&x, "images/a"), cases[i].linked);
        gd_spool_close(&w.env, &file);
        CHECK_INT(unlinkat(x.root, file.name, 0), 0);
        (void)unlinkat(x.root, "images/a", 0);
        fault_env_heal(&x.f);
    }
    teardown();
}

/* The name cannot be looked up either: the spool file must stay. */
TEST(test_commit_of_uncertain_outcome)
{
    bool linked = false;
    setup();
    gd_spool_writer file = make_recipe("a", 4096);
    fault_env_fail(&x.f, FAULT_LINKAT, 1, EIO, false);
    fault_env_fail(&x.f, FAULT_FSTATAT, 1, EIO, true);
    CHECK_INT(commit(&file, "a", &linked), GD_IO);
    CHECK(linked);
    fault_env_heal(&x.f);
    gd_spool_discard(&w.env, x.root, &file);
    /* The answer to a request that was repeated proves nothing either. */
    linked = false;
    file = make_recipe("a", 4096);
    w.link_lies_with_eexist = true;
    fault_env_fail(&x.f, FAULT_FSTATAT, 1, EIO, true);
    CHECK_INT(commit(&file, "a", &linked), GD_IO);
    CHECK(linked);
    fault_env_heal(&x.f);
    CHECK_INT(scratch_exists(&x, "images/a"), true);
    gd_spool_discard(&w.env, x.root, &file);
    teardown();
}

/* ---- opening ---- */

TEST(test_is_read)
{
    const gd_env *env = gd_env_posix();
    setup();
    store("a", 4096, NULL);
    CHECK(!gd_spool_is_read(&w.env, x.root, "a"));
    int fd = openat(x.root, "images/a", O_RDWR | O_CLOEXEC);
    CHECK_INT(env->lock(env, fd, GD_BYTE_WRITER, F_WRLCK), 0);
    CHECK(!gd_spool_is_read(&w.env, x.root, "a"));
    CHECK_INT(env->lock(env, fd, GD_BYTE_USERS, F_RDLCK), 0);
    CHECK(gd_spool_is_read(&w.env, x.root, "a"));
    /* There is no lock left, or this would be refused. */
    CHECK_INT(env->lock(env, fd, GD_BYTE_USERS, F_WRLCK), 0);
    CHECK(gd_spool_is_read(&w.env, x.root, "a"));
    close(fd);
    CHECK(!gd_spool_is_read(&w.env, x.root, "a"));
    CHECK(!gd_spool_is_read(&w.env, x.root, "nothing"));
    CHECK(!gd_spool_is_read(&w.env, x.root, "a/b"));
    CHECK_INT(symlinkat("a", x.root, "images/link"), 0);
    CHECK(!gd_spool_is_read(&w.env, x.root, "link"));
    /* If the lock cannot be read, the image may be in use. */
    fault_env_fail(&x.f, FAULT_LOCK, 1, ENOLCK, false);
    CHECK(gd_spool_is_read(&w.env, x.root, "a"));
    fault_env_fail(&x.f, FAULT_OPENAT, 1, EACCES, false);
    CHECK(gd_spool_is_read(&w.env, x.root, "a"));
    CHECK(!gd_spool_is_read(&w.env, x.root, "a"));
    teardown();
}

TEST_WITH(test_open, setup(), teardown())
{
    int fd, other;
    store("a", 4096, NULL);
    CHECK_INT(gd_spool_open_image(&w.env, x.root, &x.params, "a", &fd, &x.err), GD_OK);
    CHECK(is_locked("images/a", GD_BYTE_USERS));
    CHECK(!is_locked("images/a", GD_BYTE_WRITER));
    CHECK_INT(gd_spool_open_image(&w.env, x.root, &x.params, "a", &other, &x.err),
              GD_OK);
    w.env.close(&w.env, other);
    CHECK(is_locked("images/a", GD_BYTE_USERS));
    CHECK(gd_spool_is_read(&w.env, x.root, "a"));
    w.env.close(&w.env, fd);
    CHECK(!is_locked("images/a", GD_BYTE_USERS));
    CHECK_INT(gd_spool_open_image(&w.env, x.root, &x.params, "b", &fd, &x.err),
              GD_NOTFOUND);
    CHECK_CONTAINS(x.err.text, "no image b");
    CHECK_INT(gd_spool_open_image(&w.env, x.root, &x.params, "a/b", &fd, &x.err),
              GD_INVALID);
    CHECK_INT(symlinkat("a", x.root, "images/link"), 0);
    CHECK_INT(gd_spool_open_image(&w.env, x.root, &x.params, "link", &fd, &x.err), GD_IO);
    fault_env_fail(&x.f, FAULT_OPENAT, 1, EACCES, false);
    CHECK_INT(gd_spool_open_image(&w.env, x.root, &x.params, "a", &fd, &x.err),
              GD_DENIED);
    fault_env_fail(&x.f, FAULT_LOCK, 1, ENOLCK, false);
    CHECK_INT(gd_spool_open_image(&w.env, x.root, &x.params, "a", &fd, &x.err), GD_IO);
    fault_env_fail(&x.f, FAULT_LOCK, 1, EAGAIN, true);
    CHECK_INT(gd_spool_open_image(&w.env, x.root, &x.params, "a", &fd, &x.err), GD_BUSY);
}

static void
delete_meanwhile(void)
{
    CHECK_INT(gd_image_delete(x.env, x.root, &x.params, "a", NULL, &x.err),
              GD_OK);
}

static void
replace_meanwhile(void)
{
    delete_meanwhile();
    store("a", 8192, NULL);
}

/* N11: deleted, or deleted and stored again, between opening and locking, and
 * between locking and the look-up of the name. */
TEST_WITH(test_open_during_delete, setup(), teardown())
{
    gd_recipe recipe;
    for (int when = 0; when < 4; when++) {
        int fd;
        void (*happens)(void) =
            when / 2 == 0 ? delete_meanwhile : replace_meanwhile;
        store("a", 4096, NULL);
        if (when % 2 == 0) {
            w.before_lock = happens;
        } else {
            w.before_fstatat = happens;
        }
        gd_status s = gd_spool_open_image(&w.env, x.root, &x.params, "a", &fd, &x.err);
        if (when / 2 == 0) {
            CHECK_INT(s, GD_NOTFOUND);
        } else if (CHECK_INT(s, GD_OK)) {
            CHECK_INT(gd_recipe_open(x.env, fd, "images/a", &x.params, "a",
                                     &recipe, &x.err),
                      GD_OK);
            CHECK_INT(recipe.header.size, 8192); /* the new image */
            w.env.close(&w.env, fd);
            delete_meanwhile();
        }
    }
}

/* ---- deleting ---- */

/* N9.3 to N9.6 */
TEST_WITH(test_delete, setup(), teardown())
{
    char name[GD_NAME_SIZE];
    int fd;
    store("a", 4096, NULL);
    CHECK_INT(gd_spool_open_image(&w.env, x.root, &x.params, "a", &fd, &x.err), GD_OK);
    CHECK_INT(delete_image("a", NULL), GD_OK);
    if (!CHECK(strcmp(w.record, "link spool/D, fsync spool, unlink images/, "
                                "fsync images") == 0)) {
        fprintf(stderr, "%s\n", w.record);
    }
    CHECK(!scratch_exists(&x, "images/a"));
    CHECK_INT(scratch_count(&x, "spool", "T-", NULL), 1);
    CHECK_INT(scratch_count(&x, "spool", "D-", name), 1);
    /* The reader can read on, and is detected. */
    gd_recipe recipe;
    CHECK_INT(gd_recipe_open(x.env, fd, "images/a", &x.params, "a", &recipe,
                             &x.err),
              GD_OK);
    CHECK(is_locked(name, GD_BYTE_USERS));
    w.env.close(&w.env, fd);
    CHECK(!is_locked(name, GD_BYTE_USERS));
    CHECK_INT(delete_image("a", NULL), GD_NOTFOUND);
    CHECK_INT(delete_image("..", NULL), GD_INVALID);
    store("a", 100, NULL); /* the id is free again */
    CHECK_INT(delete_image("a", NULL), GD_OK);
    CHECK_INT(scratch_count(&x, "spool", "D-", NULL), 2);
}

TEST_WITH(test_delete_of_an_upload, setup(), teardown())
{
    uint8_t first[GD_ID_SIZE], second[GD_ID_SIZE];
    store("a", 4096, first);
    memcpy(second, first, GD_ID_SIZE);
    second[15] ^= 1;
    CHECK_INT(delete_image("a", second), GD_NOTFOUND);
    CHECK_CONTAINS(x.err.text, "another upload");
    CHECK(scratch_exists(&x, "images/a"));
    CHECK_INT(scratch_count(&x, "spool", "D-", NULL), 0);
    CHECK_INT(delete_image("a", first), GD_OK);
    CHECK_INT(delete_image("a", first), GD_NOTFOUND);
    store("a", 4096, second);
    CHECK_INT(delete_image("a", first), GD_NOTFOUND);
    /* A damaged recipe has no upload id; a delete without one removes it. */
    scratch_flip(&x, "images/a", 100, 1);
    CHECK_INT(delete_image("a", second), GD_CORRUPT);
    CHECK(scratch_exists(&x, "images/a"));
    CHECK_INT(delete_image("a", NULL), GD_OK);
}

/* Each of the steps fails: as long as images/ has the name the image is whole,
 * and another delete completes it; once linked, the spool file stays. */
TEST(test_delete_fails)
{
    static const struct {
        fault_call call;
        uint64_t nth;
        int sys_errno;
        gd_status wanted;
        bool gone;
        unsigned entries;
    } cases[] = {
        {FAULT_OPENAT, 1, EIO, GD_IO, false, 0},   /* the lock file */
        {FAULT_LOCK, 1, ENOLCK, GD_IO, false, 0},
        {FAULT_OPENAT, 2, EIO, GD_IO, false, 0},   /* the recipe */
        {FAULT_LOCK, 2, EIO, GD_IO, false, 0},
        {FAULT_RANDOM, 1, EIO, GD_IO, false, 0},
        {FAULT_LINKAT, 1, ENOSPC, GD_NOSPACE, false, 0},
        {FAULT_LINKAT, 1, EMLINK, GD_IO, false, 0},
        {FAULT_FSYNC, 1, EIO, GD_IO, false, 1},
        {FAULT_UNLINKAT, 1, EIO, GD_IO, false, 1},
        {FAULT_UNLINKAT, 1, EROFS, GD_DENIED, false, 1},
        {FAULT_FSYNC, 2, EIO, GD_IO, true, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setup();
        store("a", 4096, NULL);
        fault_env_fail(&x.f, cases[i].call, cases[i].nth, cases[i].sys_errno,
                       false);
        CHECK_INT(delete_image("a", NULL), cases[i].wanted);
        CHECK_INT(scratch_exists(&x, "images/a"), !cases[i].gone);
        CHECK_INT(scratch_count(&x, "spool", "D-", NULL), cases[i].entries);
        fault_env_heal(&x.f);
        CHECK_INT(delete_image("a", NULL),
                  cases[i].gone ? GD_NOTFOUND : GD_OK);
        CHECK(!scratch_exists(&x, "images/a"));
        teardown();
    }
}

TEST_WITH(test_delete_waits_for_the_image_lock, setup(), teardown())
{
    int lock;
    store("a", 4096, NULL);
    store("b", 4096, NULL);
    CHECK_INT(gd_locks_lock_image(x.env, x.root, "a", 0, &lock, &x.err),
              GD_OK);
    CHECK_INT(delete_image("a", NULL), GD_BUSY);
    CHECK(scratch_exists(&x, "images/a"));
    CHECK_INT(scratch_count(&x, "spool", "D-", NULL), 0);
    CHECK_INT(delete_image("b", NULL), GD_OK);
    gd_locks_unlock_image(x.env, lock);
    CHECK_INT(delete_image("a", NULL), GD_OK);
}

/* ---- deleting several ---- */

static const char several[][GD_IMAGE_ID_MAX + 1] = {"a", "b", "..", "gone",
                                                    "c"};

static gd_status
delete_several(void)
{
    w.record[0] = '\0';
    return gd_image_delete_several(&w.env, x.root, &x.params, several,
                                   sizeof several / sizeof *several, &x.err);
}

/* Each step is taken for all before the next one.  What another process has
 * locked is left, and so is what is not there. */
TEST_WITH(test_several_are_deleted, setup(), teardown())
{
    int lock;
    store("a", 4096, NULL);
    store("b", 4096, NULL);
    store("c", 4096, NULL);
    CHECK_INT(gd_locks_lock_image(x.env, x.root, "b", 0, &lock, &x.err),
              GD_OK);
    CHECK_INT(delete_several(), GD_OK);
    if (!CHECK(strcmp(w.record, "link spool/D, link spool/D, fsync spool, "
                                "unlink images/, unlink images/, "
                                "fsync images") == 0)) {
        fprintf(stderr, "%s\n", w.record);
    }
    CHECK(scratch_exists(&x, "images/b"));
    CHECK(!scratch_exists(&x, "images/a") && !scratch_exists(&x, "images/c"));
    CHECK_INT(scratch_count(&x, "spool", "D-", NULL), 2);
    CHECK_INT(delete_several(), GD_OK); /* there is none */
    CHECK(strcmp(w.record, "") == 0);
    gd_locks_unlock_image(x.env, lock);
    CHECK_INT(delete_several(), GD_OK);
    CHECK(!scratch_exists(&x, "images/b"));
    CHECK_INT(gd_locks_lock_image(x.env, x.root, "a", 0, &lock, &x.err),
              GD_OK); /* all locks were released */
    gd_locks_unlock_image(x.env, lock);
}

static int held_lock;

static void
unlock_held(const gd_env *env, unsigned ms)
{
    (void)env;
    (void)ms;
    if (held_lock >= 0) {
        gd_locks_unlock_image(x.env, held_lock);
        held_lock = -1;
    }
}

/* An image that another process has locked for a moment is deleted, too. */
TEST_WITH(test_locked_one_of_several, setup(), teardown())
{
    store("a", 4096, NULL);
    store("b", 4096, NULL);
    CHECK_INT(gd_locks_lock_image(x.env, x.root, "b", 0, &held_lock, &x.err),
              GD_OK);
    x.params.lock_timeout_ms = 10000;
    w.env.sleep_ms = unlock_held;
    CHECK_INT(delete_several(), GD_OK);
    CHECK_INT(held_lock, -1);
    CHECK_INT(scratch_count(&x, "images", "", NULL), 0);
}

/* An image that cannot be opened beside all others is deleted after them, or an
 * error is reported. */
TEST(test_one_of_several_is_not_opened)
{
    for (uint64_t nth = 1, faults = 1; faults > 0; nth++) {
        setup();
        store("a", 4096, NULL);
        store("b", 4096, NULL);
        store("c", 4096, NULL);
        uint64_t before = fault_env_faults(&x.f);
        fault_env_fail(&x.f, FAULT_OPENAT, nth, EMFILE, false);
        gd_status s = delete_several();
        faults = fault_env_faults(&x.f) - before;
        fault_env_heal(&x.f);
        CHECK(s != GD_OK || scratch_count(&x, "images", "", NULL) == 0);
        teardown();
    }
}

/* One that fails does not keep the others from being deleted; without a sync of
 * the spool, none is. */
TEST(test_deleting_several_fails)
{
    static const struct {
        fault_call call;
        uint64_t nth;
        unsigned gone;
    } cases[] = {
        {FAULT_LOCK, 1, 3},     {FAULT_LINKAT, 2, 2}, {FAULT_FSYNC, 1, 0},
        {FAULT_UNLINKAT, 1, 2}, {FAULT_FSYNC, 2, 3},  {FAULT_ALLOC, 1, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setup();
        store("a", 4096, NULL);
        store("b", 4096, NULL);
        store("c", 4096, NULL);
        fault_env_fail(&x.f, cases[i].call, cases[i].nth, EIO, false);
        gd_status s = delete_several();
        CHECK((s == GD_OK) == (cases[i].call == FAULT_LOCK));
        fault_env_heal(&x.f);
        CHECK_INT(scratch_count(&x, "images", "", NULL), 3 - cases[i].gone);
        CHECK_INT(delete_several(), GD_OK);
        CHECK_INT(scratch_count(&x, "images", "", NULL), 0);
        teardown();
    }
}

static int (*real_unlinkat)(const gd_env *env, int dir, const char *name);
static gd_status lock_at_unlink;

static int
unlink_and_look(const gd_env *env, int dir, const char *name)
{
    int lock;
    lock_at_unlink = gd_locks_lock_image(x.env, x.root, "a", 0, &lock, NULL);
    if (lock_at_unlink == GD_OK) {
        gd_locks_unlock_image(x.env, lock);
    }
    return real_unlinkat(env, dir, name);
}

/* N9.7: no merge may take the name before that. */
TEST_WITH(test_delete_keeps_the_image_lock, setup(), teardown())
{
    store("a", 4096, NULL);
    real_unlinkat = w.env.unlinkat;
    w.env.unlinkat = unlink_and_look;
    CHECK_INT(delete_image("a", NULL), GD_OK);
    CHECK_INT(lock_at_unlink, GD_BUSY);
}

/* ---- races ---- */

/* There are four processes: of those that commit one id, one succeeds; of
 * those that delete it, one. */
TEST_WITH(test_races, setup(), teardown())
{
    enum { PROCESSES = 4, ROUNDS = 40 };
    x.params.lock_timeout_ms = 10000;
    w.env.sleep_ms = gd_env_posix()->sleep_ms;
    for (int round = 0; round < ROUNDS; round++) {
        int go[2], committed = 0, deleted = 0;
        pid_t children[PROCESSES];
        REQUIRE(pipe(go) == 0);
        for (int i = 0; i < PROCESSES; i++) {
            children[i] = fork();
            if (children[i] == 0) {
                char byte;
                bool linked;
                gd_spool_writer file = make_recipe("a", 4096);
                close(go[1]);
                (void)!read(go[0], &byte, 1); /* until the parent closes it */
                gd_status c = commit(&file, "a", &linked);
                if (c != GD_OK) {
                    gd_spool_discard(&w.env, x.root, &file);
                }
                gd_status d = delete_image("a", NULL);
                bool odd = (c != GD_OK && c != GD_EXISTS) ||
                           (d != GD_OK && d != GD_NOTFOUND) ||
                           linked != (c == GD_OK);
                _exit(odd ? 255 : (c == GD_OK) + 2 * (d == GD_OK));
            }
        }
        close(go[0]);
        close(go[1]);
        for (int i = 0; i < PROCESSES; i++) {
            int status = 0;
            waitpid(children[i], &status, 0);
            REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) < 4);
            committed += WEXITSTATUS(status) & 1;
            deleted += WEXITSTATUS(status) >> 1;
        }
        CHECK(committed >= 1);
        CHECK_INT(deleted, committed);
        CHECK(!scratch_exists(&x, "images/a"));
    }
}
