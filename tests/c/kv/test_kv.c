/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_kv.c - operations of every backend: random batches against an array,
 * opening again, full stores, wrong arguments, other processes, foreign or
 * damaged files, and missing libraries.
 */
#include "engine/kv/kv.h"

#include <spawn.h>
#include <sys/stat.h>

#include "engine/base/coding.h"
#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"

enum {
    KEYS = 3000,
    BATCH = 300,
    ROUNDS = 400,
    CACHE = 8 * 4096, /* DTB must evict pages */
    PATH = 512,
};

extern char **environ;

typedef struct fixture {
    fault_env f;
    char *dir;
    char path[PATH];
    gd_kv_backend backend;
    gd_kv_options options;
    gd_kv *kv;
    uint64_t model[KEYS]; /* by key number: the value, or 0 */
    uint64_t random;
    gd_error err;
} fixture;

static uint64_t
draw(fixture *x, uint64_t below)
{
    x->random++;
    return gd_checksum(&x->random, sizeof x->random, 7) % below;
}

/* The extreme values are keys, too. */
static uint64_t
key_of(uint64_t n)
{
    return n == 0 ? 0 : n == 1 ? UINT64_MAX : gd_checksum(&n, sizeof n, 1);
}

static gd_status
open_store(fixture *x)
{
    return gd_kv_open(&x->f.env, x->backend, x->path, &x->options, &x->kv,
                      &x->err);
}

static void
close_store(fixture *x)
{
    gd_kv_close(x->kv);
    x->kv = NULL;
}

static void
setup(fixture *x, gd_kv_backend backend, uint64_t capacity)
{
    memset(x, 0, sizeof *x);
    fault_env_init(&x->f);
    x->dir = check_mkdir();
    snprintf(x->path, sizeof x->path, "%s/store", x->dir);
    x->backend = backend;
    x->options = (gd_kv_options){capacity, CACHE};
    if (!CHECK_INT(open_store(x), GD_OK)) {
        fprintf(stderr, "%s: %s\n", gd_kv_backend_name(backend), x->err.text);
        exit(1);
    }
}

static void
teardown(fixture *x)
{
    close_store(x);
    CHECK_INT(fault_env_leaks(&x->f), 0);
    fault_env_destroy(&x->f);
    check_rmdir(x->dir);
}

/* ---- against the model ---- */

static void
put_some(fixture *x)
{
    gd_kv_pair pairs[BATCH];
    size_t count = 1 + draw(x, BATCH);
    for (size_t i = 0; i < count; i++) {
        uint64_t n = draw(x, KEYS);
        x->model[n] = 1 + draw(x, UINT64_C(1) << 40);
        pairs[i] = (gd_kv_pair){key_of(n), x->model[n]};
    }
    CHECK_INT(gd_kv_put_batch(x->kv, pairs, count, &x->err), GD_OK);
}

static bool
get_range(fixture *x, uint64_t first, size_t count)
{
    uint64_t keys[BATCH] = {0}, values[BATCH];
    for (size_t i = 0; i < count; i++) {
        keys[i] = key_of(first + i);
    }
    bool good =
        CHECK_INT(gd_kv_get_batch(x->kv, keys, values, count, &x->err), GD_OK);
    for (size_t i = 0; good && i < count; i++) {
        good = CHECK_INT(values[i], x->model[first + i]);
    }
    return good;
}

static void
get_all(fixture *x)
{
    for (uint64_t first = 0; first < KEYS; first += BATCH) {
        get_range(x, first, BATCH);
    }
}

static void
reopen(fixture *x)
{
    CHECK_INT(gd_kv_commit(x->kv, &x->err), GD_OK);
    close_store(x);
    if (x->backend == GD_KV_INRAM) {
        memset(x->model, 0, sizeof x->model);
    }
    if (!CHECK_INT(open_store(x), GD_OK)) {
        fprintf(stderr, "%s\n", x->err.text);
        exit(1);
    }
}

static void
run_model(gd_kv_backend backend)
{
    fixture *x = malloc(sizeof *x);
    setup(x, backend, KEYS);
    for (unsigned round = 0; round < ROUNDS; round++) {
        switch (draw(x, 16)) {
        case 0:
            reopen(x);
            break;
        case 1:
            CHECK_INT(gd_kv_commit(x->kv, &x->err), GD_OK);
            break;
        case 2: case 3: case 4: case 5:
            get_range(x, draw(x, KEYS - BATCH), 1 + draw(x, BATCH));
            break;
        default:
            put_some(x);
        }
    }
    get_all(x);
    reopen(x);
    get_all(x);
    CHECK_INT(gd_kv_put_batch(x->kv, NULL, 0, &x->err), GD_OK);
    CHECK_INT(gd_kv_get_batch(x->kv, NULL, NULL, 0, &x->err), GD_OK);
    teardown(x);
    free(x);
}

TEST(test_model)
{
    for (gd_kv_backend b = 0; b < GD_KV_BACKENDS; b++) {
        run_model(b);
    }
}

/* ---- single keys ---- */

static void
put_one(fixture *x, uint64_t n, uint64_t value)
{
    gd_kv_pair pair = {key_of(n), value};
    CHECK_INT(gd_kv_put_batch(x->kv, &pair, 1, &x->err), GD_OK);
}

static uint64_t
get_one(fixture *x, uint64_t n)
{
    uint64_t key = key_of(n), value = 0;
    CHECK_INT(gd_kv_get_batch(x->kv, &key, &value, 1, &x->err), GD_OK);
    return value;
}

/* The table has few places: probes wrap around its end. */
TEST(test_small)
{
    enum { STEPS = 3000, MAX_COUNT = 9 };
    for (gd_kv_backend b = 0; b < GD_KV_BACKENDS; b++) {
        fixture *x = malloc(sizeof *x);
        setup(x, b, MAX_COUNT);
        for (unsigned step = 0; step < STEPS; step++) {
            uint64_t n = draw(x, MAX_COUNT);
            if (step % 50 == 0) {
                reopen(x); /* with another hash */
            }
            x->model[n] = 1 + step;
            put_one(x, n, x->model[n]);
            get_range(x, 0, MAX_COUNT);
        }
        teardown(x);
        free(x);
    }
}

/* ---- full ---- */

TEST(test_full)
{
    enum { CAPACITY = 1000, PUT = 5000 };
    for (gd_kv_backend b = 0; b < GD_KV_BACKENDS; b++) {
        fixture *x = malloc(sizeof *x);
        setup(x, b, CAPACITY);
        for (uint64_t n = 0; n < PUT; n++) {
            put_one(x, n, n + 1);
        }
        uint64_t found = 0;
        for (uint64_t n = 0; n < PUT; n++) {
            uint64_t value = get_one(x, n);
            CHECK(value == n + 1 || (value == 0 && n >= CAPACITY));
            found += value != 0;
        }
        gd_kv_stats stats;
        gd_kv_get_stats(x->kv, &stats);
        CHECK_INT(stats.puts, PUT);
        CHECK_INT(stats.gets, PUT);
        CHECK_INT(stats.found, found);
        CHECK_INT(stats.dropped, PUT - found);
        CHECK((found < PUT) == (b != GD_KV_LEVELDB));
        put_one(x, 10, 77); /* its keys can be changed */
        CHECK_INT(get_one(x, 10), 77);
        teardown(x);
        free(x);
    }
}

/* ---- arguments ---- */

TEST(test_arguments)
{
    for (gd_kv_backend b = 0; b < GD_KV_BACKENDS; b++) {
        fixture *x = malloc(sizeof *x);
        setup(x, b, 10);
        gd_kv_pair nothing = {1, 0};
        CHECK_INT(gd_kv_put_batch(x->kv, &nothing, 1, &x->err), GD_INVALID);
        close_store(x);
        x->options.capacity = 0;
        CHECK_INT(open_store(x), GD_INVALID);
        CHECK(x->kv == NULL);
        x->options.capacity = GD_KV_MAX_CAPACITY + 1;
        CHECK_INT(open_store(x), GD_INVALID);
        teardown(x);
        free(x);
    }
}

/* ---- other processes ---- */

/* Waits for a byte, then opens the store, and puts a key if it can. */
static int
other_process(fixture *x, int start)
{
    char byte;
    if (read(start, &byte, 1) != 1) {
        return 99;
    }
    gd_status s = open_store(x);
    if (s == GD_OK && get_one(x, 1) != 11) {
        return 98;
    }
    if (s == GD_OK) {
        put_one(x, 2, 22);
        s = gd_kv_commit(x->kv, &x->err);
    }
    return (int)s;
}

/* After the commit, pairs behind others are durable, too. Only DTB commits the
 * pairs before on its own. */
TEST(test_put_behind)
{
    for (gd_kv_backend b = 0; b < GD_KV_BACKENDS; b++) {
        fixture *x = malloc(sizeof *x);
        static const uint64_t syncs[GD_KV_BACKENDS] = {0, 2, 1, 1};
        gd_kv_stats before, after;
        setup(x, b, KEYS);
        const gd_kv_pair behind[] = {{key_of(2), 22}, {key_of(1), 12}};
        gd_kv_get_stats(x->kv, &before);
        put_one(x, 1, 11);
        CHECK_INT(gd_kv_put_behind(x->kv, behind, 2, &x->err), GD_OK);
        CHECK_INT(get_one(x, 1), 12);
        CHECK_INT(get_one(x, 2), 22);
        CHECK_INT(gd_kv_commit(x->kv, &x->err), GD_OK);
        gd_kv_get_stats(x->kv, &after);
        CHECK_INT(after.syncs - before.syncs, syncs[b]);
        CHECK_INT(after.puts - before.puts, 3);
        close_store(x);
        CHECK_INT(open_store(x), GD_OK);
        CHECK_INT(get_one(x, 1), b == GD_KV_INRAM ? 0 : 12);
        CHECK_INT(get_one(x, 2), b == GD_KV_INRAM ? 0 : 22);
        teardown(x);
        free(x);
    }
}

TEST(test_two_processes)
{
    for (gd_kv_backend b = GD_KV_DTB; b < GD_KV_BACKENDS; b++) {
        fixture *x = malloc(sizeof *x);
        int start[2], status;
        setup(x, b, KEYS);
        close_store(x);
        CHECK_INT(pipe(start), 0);
        pid_t child = fork();
        if (child == 0) {
            _exit(other_process(x, start[0]));
        }
        CHECK_INT(open_store(x), GD_OK);
        put_one(x, 1, 11);
        CHECK_INT(gd_kv_commit(x->kv, &x->err), GD_OK);
        CHECK_INT(write(start[1], "x", 1), 1);
        CHECK_INT(waitpid(child, &status, 0), child);
        CHECK(WIFEXITED(status));
        CHECK_INT(WEXITSTATUS(status), b == GD_KV_LMDB ? GD_OK : GD_BUSY);
        CHECK_INT(get_one(x, 2), b == GD_KV_LMDB ? 22 : 0);
        close(start[0]);
        close(start[1]);
        teardown(x);
        free(x);
    }
}

TEST(test_twice_in_one_process)
{
    for (gd_kv_backend b = GD_KV_DTB; b < GD_KV_BACKENDS; b++) {
        fixture *x = malloc(sizeof *x);
        setup(x, b, KEYS);
        gd_kv *other;
        CHECK_INT(gd_kv_open(&x->f.env, b, x->path, &x->options, &other,
                             &x->err), GD_BUSY);
        CHECK(other == NULL);
        put_one(x, 1, 11);
        CHECK_INT(gd_kv_commit(x->kv, &x->err), GD_OK);
        close_store(x);
        CHECK_INT(open_store(x), GD_OK);
        CHECK_INT(get_one(x, 1), 11);
        teardown(x);
        free(x);
    }
}

/* ---- files at the path ---- */

/* Returns the name of the file that is to be damaged. */
static void
main_file(const fixture *x, char *out)
{
    snprintf(out, PATH + 16, "%s%s", x->path,
             x->backend == GD_KV_LEVELDB ? "/CURRENT" : "");
}

static void
write_file(const char *path, const void *data, size_t length)
{
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL && fwrite(data, 1, length, file) == length);
    fclose(file);
}

TEST(test_random_files)
{
    for (gd_kv_backend b = GD_KV_DTB; b < GD_KV_BACKENDS; b++) {
        fixture *x = malloc(sizeof *x);
        static uint64_t noise[3 * 4096 / 8];
        setup(x, b, KEYS);
        for (size_t length = 0; length <= sizeof noise; length += 4096) {
            char path[PATH + 16];
            put_one(x, 1, 11);
            CHECK_INT(gd_kv_commit(x->kv, &x->err), GD_OK);
            close_store(x);
            main_file(x, path);
            for (size_t i = 0; i < length / 8; i++) {
                noise[i] = draw(x, UINT64_MAX);
            }
            write_file(path, noise, length);
            gd_status s = open_store(x);
            if (s != GD_OK) { /* it can be removed, and made again */
                CHECK(x->err.text[0] != '\0');
                CHECK_INT(gd_kv_remove(&x->f.env, b, x->path, &x->err), GD_OK);
                REQUIRE(open_store(x) == GD_OK);
            }
            uint64_t value = get_one(x, 1);
            CHECK(value == 0 || value == 11);
        }
        teardown(x);
        free(x);
    }
}

TEST(test_cut_files)
{
    for (gd_kv_backend b = GD_KV_DTB; b <= GD_KV_LMDB; b++) {
        fixture *x = malloc(sizeof *x);
        struct stat st;
        setup(x, b, KEYS);
        for (uint64_t n = 0; n < KEYS; n++) {
            put_one(x, n, n + 1);
        }
        CHECK_INT(gd_kv_commit(x->kv, &x->err), GD_OK);
        close_store(x);
        CHECK_INT(stat(x->path, &st), 0);
        CHECK_INT(truncate(x->path, st.st_size / 2), 0);
        REQUIRE(CHECK_INT(open_store(x), GD_OK));
        for (uint64_t n = 0; n < KEYS; n++) {
            uint64_t value = get_one(x, n);
            CHECK(value == 0 || value == n + 1);
        }
        teardown(x);
        free(x);
    }
}

TEST(test_files_of_others)
{
    for (gd_kv_backend b = GD_KV_DTB; b < GD_KV_BACKENDS; b++) {
        fixture *x = malloc(sizeof *x);
        setup(x, b, KEYS);
        close_store(x);
        CHECK_INT(chmod(x->path, 0777), 0);
        CHECK_INT(open_store(x), GD_DENIED);
        CHECK_CONTAINS(x->err.text, "remove it");
        CHECK_INT(gd_kv_remove(&x->f.env, b, x->path, &x->err), GD_OK);
        CHECK_INT(gd_kv_remove(&x->f.env, b, x->path, &x->err), GD_OK);
        CHECK(access(x->path, F_OK) != 0);
        CHECK_INT(symlink("/dev/null", x->path), 0);
        CHECK(open_store(x) != GD_OK);
        CHECK_INT(unlink(x->path), 0);
        CHECK_INT(mkfifo(x->path, 0600), 0);
        CHECK(open_store(x) != GD_OK);
        CHECK_INT(unlink(x->path), 0);
        snprintf(x->path, sizeof x->path, "%s/missing/store", x->dir);
        CHECK(open_store(x) != GD_OK);
        CHECK(x->err.text[0] != '\0');
        teardown(x);
        free(x);
    }
}

/* ---- libraries ---- */

/* This runs in a process whose libraries are no libraries. */
static void
test_without_libraries(void)
{
    gd_kv_options options = {1, 0};
    gd_kv *kv;
    gd_error err;
    CHECK_INT(gd_kv_open(gd_env_posix(), GD_KV_LMDB, "/nowhere/store",
                         &options, &kv, &err), GD_NOTFOUND);
    CHECK_CONTAINS(err.text, "liblmdb0");
    CHECK_INT(gd_kv_open(gd_env_posix(), GD_KV_LEVELDB, "/nowhere/store",
                         &options, &kv, &err), GD_NOTFOUND);
    CHECK_CONTAINS(err.text, "libleveldb1d");
}

TEST(test_missing_libraries)
{
    static const char *const NAMES[] = {
        "liblmdb.so.0", "liblmdb.so", "libleveldb.so.1d", "libleveldb.so.1",
        "libleveldb.so",
    };
    char *dir = check_mkdir(), path[PATH];
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, NAMES[i]);
        write_file(path, "nothing", 7);
    }
    char *arguments[] = {"test_kv", "test_without_libraries", NULL};
    pid_t child;
    int status;
    setenv("LD_LIBRARY_PATH", dir, 1);
    CHECK_INT(posix_spawn(&child, "/proc/self/exe", NULL, NULL, arguments,
                          environ), 0);
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    unsetenv("LD_LIBRARY_PATH");
    check_rmdir(dir);
}

int
main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "test_without_libraries") == 0) {
        test_without_libraries();
        return check_failures > 0;
    }
    return check_main(argc, argv);
}
