/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_features.c - features are set durably, while no program that does not
 * know them is running (N15), and unknown ones are refused.
 */
#include "engine/files/features.h"

#include <fcntl.h>

#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define FEATURE_BYTE(known) ((UINT64_C(1) << 35) + (known))

enum { TIMEOUT_MS = 50 };

static const char *const names[GD_FEATURE_COUNT] = {
    "volumes", "listed-segments", "cold", "nodedup", "disks"};

static scratch x;
static gd_locks *locks;
static int raw; /* an open file of another program */

static void
setup(void)
{
    scratch_init(&x);
    CHECK_INT(gd_locks_open(x.env, x.root, &locks, &x.err), GD_OK);
    raw = openat(x.root, GD_FILE_GROUP_LOCKS, O_RDWR | O_CLOEXEC);
    CHECK(raw >= 0);
}

static void
teardown(void)
{
    close(raw);
    gd_locks_close(locks);
    CHECK_INT(scratch_destroy(&x), 0);
}

static int
raw_lock(unsigned known, short type)
{
    return gd_env_posix()->lock(gd_env_posix(), raw, FEATURE_BYTE(known), type);
}

/* Returns true if no program that knows so many features, or fewer, may open
 * the repository. */
static bool
is_excluded(unsigned known)
{
    bool excluded = true;
    for (unsigned i = 0; i <= known; i++) {
        if (raw_lock(i, F_RDLCK) >= 0) {
            raw_lock(i, F_UNLCK);
            excluded = false;
        }
    }
    return excluded;
}

static bool
is_free(void)
{
    bool free_all = true;
    for (unsigned i = 0; i <= GD_FEATURE_COUNT; i++) {
        free_all &= raw_lock(i, F_WRLCK) >= 0;
        raw_lock(i, F_UNLCK);
    }
    return free_all;
}

static gd_status
set(gd_feature feature)
{
    return gd_features_set(x.env, x.root, locks, feature, TIMEOUT_MS, &x.err);
}

/* Bit f: feature f. */
static gd_status
read_all(uint32_t *found)
{
    *found = 0;
    for (unsigned i = 0; i < GD_FEATURE_COUNT; i++) {
        if (gd_features_is_set(x.env, x.root, (gd_feature)i)) {
            *found |= UINT32_C(1) << i;
        }
    }
    return gd_features_require_known(x.env, x.root, &x.err);
}

static const char *
path_of(const char *name)
{
    static char path[64];
    snprintf(path, sizeof path, "features/%s", name);
    return path;
}

/* The names and numbers are part of the format. */
TEST(test_names)
{
    gd_feature feature;
    for (unsigned i = 0; i < GD_FEATURE_COUNT; i++) {
        CHECK_INT(gd_features_parse(names[i], &feature, &x.err), GD_OK);
        CHECK_INT(feature, i);
    }
    for (const char *const *name =
             (const char *const[]){"", "Volumes", "volumes ", "col", NULL};
         *name != NULL; name++) {
        CHECK_INT(gd_features_parse(*name, &feature, &x.err), GD_INVALID);
    }
    CHECK_CONTAINS(x.err.text, "there is no feature 'col'");
}

TEST_WITH(test_set, setup(), teardown())
{
    uint32_t found;
    CHECK_INT(read_all(&found), GD_OK);
    CHECK_INT(found, 0);
    for (unsigned i = 0; i < GD_FEATURE_COUNT; i++) {
        CHECK(!gd_features_is_set(x.env, x.root, (gd_feature)i));
        CHECK_INT(set((gd_feature)i), GD_OK);
        CHECK(gd_features_is_set(x.env, x.root, (gd_feature)i));
        CHECK_INT(scratch_size(&x, path_of(names[i])), 0);
        CHECK_INT(read_all(&found), GD_OK);
        CHECK_INT(found, (2 << i) - 1);
        CHECK(is_free());
    }
}

/* N15.1: this also holds if the process that made the file was killed before
 * the sync. */
TEST_WITH(test_each_call_syncs, setup(), teardown())
{
    fault_env_fail(&x.f, FAULT_FSYNC, 1, EIO, false);
    CHECK_INT(set(GD_FEATURE_COLD), GD_IO);
    CHECK_CONTAINS(x.err.text, "features");
    CHECK(is_free());
    CHECK(gd_features_is_set(x.env, x.root, GD_FEATURE_COLD));
    fault_env_start_trace(&x.f);
    CHECK_INT(set(GD_FEATURE_COLD), GD_OK);
    scratch_check_trace(&x, "fsync");
    fault_env_fail(&x.f, FAULT_FSYNC, 1, EIO, false);
    CHECK_INT(set(GD_FEATURE_COLD), GD_IO);
}

/* A handle syncs once for each feature. */
TEST_WITH(test_a_handle, setup(), teardown())
{
    gd_repo *repo = scratch_repo(&x);
    fault_env_fail(&x.f, FAULT_FSYNC, 1, EIO, false);
    CHECK_INT(gd_repo_use_feature(repo, GD_FEATURE_COLD, &x.err), GD_IO);
    uint64_t before = fault_env_count(&x.f, FAULT_FSYNC);
    CHECK_INT(gd_repo_use_feature(repo, GD_FEATURE_COLD, &x.err), GD_OK);
    CHECK_INT(fault_env_count(&x.f, FAULT_FSYNC), before + 1);
    before = fault_env_count(&x.f, FAULT_ANY);
    CHECK_INT(gd_repo_use_feature(repo, GD_FEATURE_COLD, &x.err), GD_OK);
    CHECK_INT(fault_env_count(&x.f, FAULT_ANY), before);
    CHECK_INT(gd_repo_use_feature(repo, GD_FEATURE_VOLUMES, &x.err), GD_OK);
    CHECK(scratch_exists(&x, "features/volumes"));
    gd_repo_close(repo);
}

static bool excluded_at_sync;

static int
look_and_sync(const gd_env *env, int fd)
{
    excluded_at_sync = is_excluded(GD_FEATURE_LISTED_SEGMENTS);
    CHECK(raw_lock(GD_FEATURE_LISTED_SEGMENTS + 1, F_RDLCK) >= 0);
    CHECK(scratch_exists(&x, "features/listed-segments"));
    return fault_table.fsync(env, fd);
}

/* N15.2: older programs are out until the file is durable; this one's peers,
 * and newer ones, stay in. */
TEST_WITH(test_older_programs_are_out, setup(), teardown())
{
    CHECK_INT(gd_locks_lock_features_shared(locks, GD_FEATURE_COUNT, &x.err),
              GD_OK);
    x.f.env.fsync = look_and_sync;
    CHECK_INT(set(GD_FEATURE_LISTED_SEGMENTS), GD_OK);
    CHECK(excluded_at_sync);
    raw_lock(GD_FEATURE_LISTED_SEGMENTS + 1, F_UNLCK);
    CHECK(raw_lock(GD_FEATURE_LISTED_SEGMENTS, F_WRLCK) >= 0);
    /* The feature is set already, so all programs that have it open know
     * it. */
    CHECK_INT(set(GD_FEATURE_LISTED_SEGMENTS), GD_OK);
    CHECK(!gd_features_is_set(x.env, x.root, GD_FEATURE_VOLUMES));
}

TEST_WITH(test_an_older_program_is_open, setup(), teardown())
{
    for (unsigned known = 0; known <= GD_FEATURE_COLD; known++) {
        CHECK(raw_lock(known, F_RDLCK) >= 0);
        CHECK_INT(set(GD_FEATURE_COLD), GD_BUSY);
        CHECK_CONTAINS(x.err.text, "a program that does not know the feature "
                       "'cold' has the repository open");
        CHECK_INT(scratch_count(&x, "features", "", NULL), 0);
        raw_lock(known, F_UNLCK);
        CHECK(is_free());
    }
    CHECK(raw_lock(1, F_RDLCK) >= 0);
    CHECK_INT(set(GD_FEATURE_VOLUMES), GD_OK); /* that program knows volumes */
}

static unsigned sleeps;

static void
sleep_and_let_go(const gd_env *env, unsigned ms)
{
    (void)env;
    (void)ms;
    if (++sleeps == 3) {
        raw_lock(0, F_UNLCK);
    }
}

TEST_WITH(test_an_older_program_is_waited_for, setup(), teardown())
{
    sleeps = 0;
    x.f.env.sleep_ms = sleep_and_let_go;
    CHECK(raw_lock(0, F_RDLCK) >= 0);
    CHECK_INT(set(GD_FEATURE_VOLUMES), GD_OK);
    CHECK_INT(sleeps, 3);
    CHECK(is_free());
}

static unsigned makes_it_at; /* a number of sleeps */

static void
sleep_and_make(const gd_env *env, unsigned ms)
{
    (void)env;
    (void)ms;
    if (++sleeps == makes_it_at) {
        scratch_write(&x, "features/cold", "", 0, 0);
    }
}

/* Another program that knows the feature is setting it, and takes long to make
 * its name durable.  It excludes older programs. */
TEST_WITH(test_another_program_sets_it, setup(), teardown())
{
    enum { LAST = TIMEOUT_MS / 5 };
    x.f.env.sleep_ms = sleep_and_make;
    for (unsigned known = 0; known <= GD_FEATURE_COLD; known++) {
        CHECK(raw_lock(known, F_WRLCK) >= 0);
    }
    for (makes_it_at = 1; makes_it_at <= LAST; makes_it_at += LAST - 1) {
        sleeps = 0;
        fault_env_start_trace(&x.f);
        CHECK_INT(set(GD_FEATURE_COLD), GD_OK);
        scratch_check_trace(&x, "fsync");
        CHECK_INT(sleeps, makes_it_at);
        CHECK(unlinkat(x.root, "features/cold", 0) == 0);
    }
    makes_it_at = 0;
    CHECK_INT(set(GD_FEATURE_COLD), GD_BUSY);
}

/* ---- the contents of features/ ---- */

static void
check_unknown(const char *name, const char *shown)
{
    uint32_t found;
    gd_repo *repo;
    char words[128];
    setup();
    CHECK_INT(set(GD_FEATURE_COLD), GD_OK);
    scratch_write(&x, path_of(name), "", 0, 0);
    snprintf(words, sizeof words, "the repository uses the feature '%s", shown);
    CHECK_INT(read_all(&found), GD_VERSION);
    CHECK_CONTAINS(x.err.text, words);
    fault_env_start_trace(&x.f);
    CHECK_INT(scratch_try_repo(&x, false, &repo), GD_VERSION);
    CHECK_CONTAINS(x.err.text, words);
    scratch_check_trace(&x, ""); /* no file changes */
    CHECK(is_free());
    teardown();
}

TEST(test_unknown_features)
{
    check_unknown("of-the-future", "of-the-future'");
    check_unknown("Volumes", "Volumes'");
    check_unknown(".hidden", ".hidden'");
    check_unknown("volumes.new", "volumes.new'");
    check_unknown("%s%n\n\x7f", "%s%n");
    check_unknown("a-name-that-is-longer-than-the-room",
                  "a-name-that-is-longer-than-the-room'");
}

/* A newer program sets a feature just before. */
static int
set_and_lock(const gd_env *env, int fd, uint64_t byte, short type)
{
    if (byte == FEATURE_BYTE(GD_FEATURE_COUNT)) {
        scratch_write(&x, "features/of-the-future", "", 0, 0);
    }
    return fault_table.lock(env, fd, byte, type);
}

/* N15.3: the features are read when the handle has its byte. */
TEST_WITH(test_a_feature_that_is_set_meanwhile, setup(), teardown())
{
    gd_repo *repo;
    x.f.env.lock = set_and_lock;
    CHECK_INT(scratch_try_repo(&x, false, &repo), GD_VERSION);
    CHECK_CONTAINS(x.err.text, "'of-the-future'");
}

/* A name counts, whatever kind of file has it: the feature was set, and is not
 * removed. */
TEST_WITH(test_names_of_other_things, setup(), teardown())
{
    uint32_t found;
    CHECK_INT(mkdirat(x.root, "features/cold", 0700), 0);
    CHECK_INT(symlinkat("/elsewhere", x.root, "features/volumes"), 0);
    CHECK_INT(mkfifoat(x.root, "features/listed-segments", 0600), 0);
    CHECK_INT(mkdirat(x.root, "features/nodedup", 0), 0);
    CHECK_INT(symlinkat("disks", x.root, "features/disks"), 0);
    CHECK_INT(read_all(&found), GD_OK);
    CHECK_INT(found, 31);
    for (unsigned i = 0; i < GD_FEATURE_COUNT; i++) {
        CHECK(gd_features_is_set(x.env, x.root, (gd_feature)i));
        CHECK_INT(set((gd_feature)i), GD_OK);
    }
}

/* The status is never GD_NOTFOUND, which means a missing image to callers. */
TEST_WITH(test_no_directory, setup(), teardown())
{
    uint32_t found;
    gd_repo *repo;
    CHECK_INT(unlinkat(x.root, "features", AT_REMOVEDIR), 0);
    CHECK_INT(read_all(&found), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "the directory features is missing");
    CHECK_INT(scratch_try_repo(&x, false, &repo), GD_CORRUPT);
    CHECK_INT(set(GD_FEATURE_VOLUMES), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "the directory features is missing");
    CHECK(is_free());
    CHECK_INT(symlinkat("images", x.root, "features"), 0);
    CHECK(scratch_try_repo(&x, false, &repo) != GD_OK);
    CHECK_INT(scratch_count(&x, "images", "", NULL), 0);
}

/* ---- failures ---- */

static bool
fail_one_set(fault_call call, uint64_t n)
{
    uint32_t found;
    setup();
    uint64_t before = fault_env_faults(&x.f);
    fault_env_fail(&x.f, call, n, call == FAULT_ALLOC ? ENOMEM : EIO, false);
    gd_status s = set(GD_FEATURE_COLD);
    bool failed = fault_env_faults(&x.f) > before;
    fault_env_heal(&x.f);
    CHECK(s == GD_OK || s == GD_IO || s == GD_NOMEM);
    CHECK(s != GD_OK || gd_features_is_set(x.env, x.root, GD_FEATURE_COLD));
    CHECK(is_free());
    CHECK_INT(set(GD_FEATURE_COLD), GD_OK);
    CHECK_INT(read_all(&found), GD_OK);
    CHECK_INT(found, 1 << GD_FEATURE_COLD);
    teardown();
    return failed;
}

static bool
fail_one_read(fault_call call, uint64_t n)
{
    setup();
    CHECK_INT(set(GD_FEATURE_LISTED_SEGMENTS), GD_OK);
    uint64_t before = fault_env_faults(&x.f);
    fault_env_fail(&x.f, call, n, call == FAULT_ALLOC ? ENOMEM : EIO, false);
    gd_status s = gd_features_require_known(x.env, x.root, &x.err);
    bool failed = fault_env_faults(&x.f) > before;
    CHECK_INT(s, !failed ? GD_OK : call == FAULT_ALLOC ? GD_NOMEM : GD_IO);
    teardown();
    return failed;
}

TEST(test_failures)
{
    sweep_faults(fail_one_set, 1);
    sweep_faults(fail_one_read, 1);
}
