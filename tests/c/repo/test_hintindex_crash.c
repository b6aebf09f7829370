/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_hintindex_crash.c - a process that is killed while it saves a position
 * leaves the hints that belong to the position, whichever store it uses.
 *
 * LMDB and LevelDB make their system calls themselves. So this program puts
 * its own functions before the C library's: before each call that changes or
 * syncs a file, it copies the files that a killed process would leave.
 */
#include "engine/repo/hintindex.h"

#include <dirent.h>
#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "engine/base/coding.h"
#include "tests/c/support/check.h"

enum { ENTRIES = 1000, MAX_COPIES = 400, PATH = 256 };

static char *dir;       /* has the store, and the copies */
static bool watching;
static bool copying;
static unsigned copies; /* store-0, store-1, ... */
static unsigned syncs;

/* ---- copies ---- */

static void
copy_file(const char *from, const char *to)
{
    static char buffer[1 << 16];
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    size_t n;
    REQUIRE(in != NULL && out != NULL && chmod(to, 0600) == 0);
    while ((n = fread(buffer, 1, sizeof buffer, in)) > 0) {
        REQUIRE(fwrite(buffer, 1, n, out) == n);
    }
    fclose(in);
    fclose(out);
}

/* LevelDB's store is a directory; copies all its files but the lock. */
static void
copy_directory(const char *from, const char *to)
{
    char here[2 * PATH], there[2 * PATH];
    DIR *list = opendir(from);
    REQUIRE(list != NULL && mkdir(to, 0700) == 0);
    for (struct dirent *entry; (entry = readdir(list)) != NULL;) {
        if (entry->d_name[0] != '.' && strcmp(entry->d_name, "LOCK") != 0) {
            snprintf(here, sizeof here, "%s/%s", from, entry->d_name);
            snprintf(there, sizeof there, "%s/%s", to, entry->d_name);
            copy_file(here, there);
        }
    }
    closedir(list);
}

static void
copy_store(void)
{
    char from[PATH], to[PATH];
    struct stat st;
    if (!watching || copying) {
        return;
    }
    copying = true;
    REQUIRE(copies < MAX_COPIES);
    snprintf(from, sizeof from, "%s/store", dir);
    snprintf(to, sizeof to, "%s/store-%u", dir, copies++);
    REQUIRE(stat(from, &st) == 0);
    (S_ISDIR(st.st_mode) ? copy_directory : copy_file)(from, to);
    copying = false;
}

/* ---- the calls ---- */

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t
pwrite(int fd, const void *data, size_t length, off_t offset)
{
    copy_store();
    return NEXT(pwrite)(fd, data, length, offset);
}

ssize_t
pwritev(int fd, const struct iovec *parts, int count, off_t offset)
{
    copy_store();
    return NEXT(pwritev)(fd, parts, count, offset);
}

ssize_t
write(int fd, const void *data, size_t length)
{
    copy_store();
    return NEXT(write)(fd, data, length);
}

ssize_t
writev(int fd, const struct iovec *parts, int count)
{
    copy_store();
    return NEXT(writev)(fd, parts, count);
}

int
fdatasync(int fd)
{
    copy_store();
    syncs += watching;
    return NEXT(fdatasync)(fd);
}

/* ---- the test ---- */

static gd_entry entries[ENTRIES];
static unsigned found;

static void
take(void *arg, size_t i, gd_address hint)
{
    (void)arg;
    found += hint.group == 1 && hint.slot == i;
}

static gd_hintindex *
open_index(gd_kv_backend backend, const char *path)
{
    static const gd_kv_options options = {4 * ENTRIES, 1 << 20};
    gd_hintindex *index;
    gd_error err;
    if (!CHECK_INT(gd_hintindex_of_store(gd_env_posix(), backend, path,
                                         &options, &index, &err), GD_OK)) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
    return index;
}

static void
save(gd_hintindex *index)
{
    gd_position position;
    const gd_entry_range last = {1, 0, ENTRIES, entries};
    CHECK(index->rebuild_lock(index));
    index->load(index, &position);
    position.newest = 1;
    position.complete = true;
    index->save(index, &last, &position, &(gd_look){0});
    index->rebuild_unlock(index);
}

/* Returns true if the copy has the position, and so all hints. */
static bool
check_copy(gd_kv_backend backend, unsigned number)
{
    char path[PATH];
    const gd_fingerprint *fps[ENTRIES];
    gd_filter_stats stats;
    snprintf(path, sizeof path, "%s/store-%u", dir, number);
    gd_hintindex *index = open_index(backend, path);
    index->get_stats(index, &stats);
    for (unsigned i = 0; i < ENTRIES; i++) {
        fps[i] = &entries[i].fingerprint;
    }
    found = 0;
    index->find(index, fps, ENTRIES, take, NULL);
    index->close(index);
    CHECK(!stats.complete || found == ENTRIES);
    return stats.complete;
}

TEST(test_killed)
{
    for (gd_kv_backend b = GD_KV_DTB; b < GD_KV_BACKENDS; b++) {
        char path[PATH];
        unsigned complete = 0;
        dir = check_mkdir_shm();
        snprintf(path, sizeof path, "%s/store", dir);
        copies = syncs = 0;
        for (uint64_t n = 0; n < ENTRIES; n++) {
            entries[n].state = GD_ENTRY_LIVE;
            gd_put64(entries[n].fingerprint.bytes,
                     gd_checksum(&n, sizeof n, b));
        }
        gd_hintindex *index = open_index(b, path);
        watching = true;
        save(index);
        copy_store();
        watching = false;
        for (unsigned i = 0; i < copies; i++) {
            complete += check_copy(b, i);
        }
        CHECK(copies > 2 && complete > 0 && complete < copies);
        if (b == GD_KV_LMDB) { /* one commit */
            CHECK_INT(syncs, 1);
        }
        index->close(index);
        check_rmdir(dir);
    }
}
