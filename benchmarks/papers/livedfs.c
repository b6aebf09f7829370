/* SPDX-License-Identifier: Apache-2.0 */
/*
 * livedfs.c - one step of an experiment: writes or reads an image, or a plain
 * file, and prints the cost.  livedfs.py calls it.
 *
 *     livedfs OPERATION KEY=VALUE...
 *
 *     write, read, halt-write   path= mib= seed=
 *     store, fetch, halt-store  path= id= block= slots= segment= digest=
 *                               filter= image= mib= seed= [stores=] [single=1]
 *                               [alone=1]
 *
 * The data are noise, made of the seed before the clock starts, so that what is
 * read can be compared.  It is one piece, so it takes no memory from what is
 * measured; only a number in each block of it changes from piece to piece.
 * halt-...: stores the data, then as much of the next seed without end, reports
 * it, and waits to be killed.
 *
 * All system calls are the engine's own, through a table of this file
 * (watched_env), which passes each to the model of a disk (diskmodel.h), and
 * makes the engine behave as if it were built otherwise:
 *
 * stores=DIRECTORY  the entries of each group lie in a file there instead of in
 *                   front of their data
 * single=1          a fingerprint store is not read as a whole: each entry by a
 *                   read of its own, and nothing ahead of it
 * alone=1           new blocks are not written many at a time, nor their entries:
 *                   each block is a write of its own, and so is the page with its
 *                   entry, and the disk has each before the next begins.  (What is
 *                   written of the page is what it has: the engine's own writing
 *                   of the entries comes at the sync point.)
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "benchmarks/diskmodel.h"
#include "benchmarks/program.h"
#include "engine/read/image.h"
#include "engine/repo/follow.h"
#include "engine/write/transaction.h"

enum {
    PIECE = 4 << 20,
    BLOCK = 4096,
    MAX_FD = 1024,
    FILTER_BYTES = 64 << 20,
    GROUPS_AT_ONCE = 64,
};

/* ---- the table ---- */

typedef struct open_file {
    uint64_t inode;  /* 0: not watched */
    bool group;
    int stores_fd;   /* where the group's entries are; -1: in its own file */
    uint64_t stores_inode;
} open_file;

typedef struct watched_env {
    gd_env env; /* first: what the engine has */
    const gd_env *real;
    dm_disk *disk;
    gd_params params;
    int stores; /* directory, or -1 */
    bool single, alone;
    pthread_mutex_t entry_mutex; /* writing entries, or their pages */
    open_file files[MAX_FD];
} watched_env;

static watched_env *
self(const gd_env *env)
{
    return (watched_env *)(uintptr_t)env;
}

static uint64_t
inode_of(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? st.st_ino : 0;
}

static open_file *
file_of(watched_env *w, int fd)
{
    return fd >= 0 && fd < MAX_FD ? &w->files[fd] : NULL;
}

static uint64_t
data_start(const watched_env *w)
{
    return gd_fptable_data_start(w->params.group_slots);
}

static int
open_stores(watched_env *w, const char *name, open_file *f)
{
    char path[GD_NAME_SIZE];
    snprintf(path, sizeof path, "%s", strrchr(name, '/') + 1);
    f->stores_fd = openat(w->stores, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (f->stores_fd < 0 ||
        posix_fallocate(f->stores_fd, 0, (off_t)data_start(w)) != 0) {
        return -EIO;
    }
    f->stores_inode = inode_of(f->stores_fd);
    return 0;
}

static int
watched_openat(const gd_env *env, int dir, const char *path, int flags,
               mode_t mode)
{
    watched_env *w = self(env);
    int fd = w->real->openat(w->real, dir, path, flags, mode);
    open_file *f = file_of(w, fd);
    if (f == NULL || path[0] == '/') { /* the filter is not on the disk */
        return fd;
    }
    *f = (open_file){.inode = inode_of(fd), .stores_fd = -1};
    f->group = f->inode != 0 && strncmp(path, "groups/", 7) == 0;
    int rc = f->group && w->stores >= 0 ? open_stores(w, path, f) : 0;
    if (rc < 0) {
        close(fd);
        return rc;
    }
    if (f->group && w->single) {
        posix_fadvise(f->stores_fd < 0 ? fd : f->stores_fd, 0, 0,
                      POSIX_FADV_RANDOM);
    }
    return fd;
}

static int
watched_close(const gd_env *env, int fd)
{
    watched_env *w = self(env);
    open_file *f = file_of(w, fd);
    if (f != NULL && f->inode != 0) {
        if (f->stores_fd >= 0) {
            close(f->stores_fd);
        }
        *f = (open_file){.stores_fd = -1};
    }
    return w->real->close(w->real, fd);
}

/* Returns whether this is of a group's entries; then *fd and *inode are of the
 * file that has them.  The engine never requests these and others at once. */
static bool
is_of_entries(const watched_env *w, const open_file *f, uint64_t offset,
              int *fd, uint64_t *inode)
{
    bool is = f->group && offset >= GD_STORE_START && offset < data_start(w);
    if (is && f->stores_fd >= 0) {
        *fd = f->stores_fd;
        *inode = f->stores_inode;
    }
    return is;
}

/* Each entry by a read of its own. */
static ssize_t
read_singly(watched_env *w, int fd, uint64_t inode, uint8_t *buf, size_t length,
            uint64_t offset)
{
    size_t done = 0;
    while (done < length) {
        uint64_t at = offset + done;
        size_t n = (at % GD_SECTOR / GD_ENTRY_SIZE + 1) * GD_ENTRY_SIZE -
                   at % GD_SECTOR;
        if (at % GD_SECTOR >= GD_ENTRIES_PER_SECTOR * GD_ENTRY_SIZE) {
            n = GD_SECTOR - at % GD_SECTOR; /* what a sector has left over */
        }
        n = n < length - done ? n : length - done;
        dm_read(w->disk, inode, at, n);
        ssize_t got = w->real->pread(w->real, fd, buf + done, n, at);
        if (got <= 0) {
            return done > 0 ? (ssize_t)done : got;
        }
        done += (size_t)got;
    }
    return (ssize_t)done;
}

static ssize_t
watched_pread(const gd_env *env, int fd, void *buf, size_t length,
              uint64_t offset)
{
    watched_env *w = self(env);
    open_file *f = file_of(w, fd);
    if (f == NULL || f->inode == 0) {
        return w->real->pread(w->real, fd, buf, length, offset);
    }
    uint64_t inode = f->inode;
    bool entries = is_of_entries(w, f, offset, &fd, &inode);
    if (entries && w->single) {
        return read_singly(w, fd, inode, buf, length, offset);
    }
    ssize_t n = w->real->pread(w->real, fd, buf, length, offset);
    if (n > 0) {
        dm_read(w->disk, inode, offset, (uint64_t)n);
    }
    return n;
}

static void
write_out(watched_env *w, int fd, uint64_t inode, uint64_t offset,
          uint64_t length)
{
    (void)sync_file_range(fd, (off_t)offset, (off_t)length,
                          SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                              SYNC_FILE_RANGE_WAIT_AFTER);
    dm_flush(w->disk, inode, offset, length);
}

/* The entry of the block at this offset of a group: of blocks that are stored as
 * they are, in whole segments. */
static uint64_t
entry_place(const watched_env *w, uint64_t offset)
{
    uint64_t segment = GD_SEGMENT_HEADER + w->params.segment_size;
    uint64_t at = offset - data_start(w);
    uint64_t slot = at / segment * (w->params.segment_size /
                                    w->params.block_size) +
                    at % segment / w->params.block_size;
    return gd_entry_offset(slot < w->params.group_slots
                               ? (uint32_t)slot
                               : w->params.group_slots - 1);
}

static ssize_t
write_entry_page(watched_env *w, const open_file *f, int fd, uint64_t offset)
{
    uint8_t page[DM_PAGE];
    uint64_t inode = f->inode, start = entry_place(w, offset) / DM_PAGE *
                                       DM_PAGE;
    (void)is_of_entries(w, f, start, &fd, &inode);
    pthread_mutex_lock(&w->entry_mutex);
    ssize_t n = w->real->pread(w->real, fd, page, sizeof page, start);
    struct iovec piece = {page, sizeof page};
    if (n == sizeof page) {
        n = w->real->pwritev(w->real, fd, &piece, 1, start);
    }
    pthread_mutex_unlock(&w->entry_mutex);
    if (n > 0) {
        dm_write(w->disk, inode, start, sizeof page);
        write_out(w, fd, inode, start, sizeof page);
    }
    return n;
}

/* The first block's worth of a write, and its entry; the engine requests
 * the rest again. */
static ssize_t
write_alone(watched_env *w, const open_file *f, int fd,
            const struct iovec *iov, uint64_t offset)
{
    struct iovec piece = iov[0];
    if (piece.iov_len > w->params.block_size) {
        piece.iov_len = w->params.block_size;
    }
    ssize_t n = w->real->pwritev(w->real, fd, &piece, 1, offset);
    if (n <= GD_SEGMENT_HEADER) { /* goes out with the block behind it */
        if (n > 0) {
            dm_write(w->disk, f->inode, offset, (uint64_t)n);
        }
        return n;
    }
    dm_write(w->disk, f->inode, offset, (uint64_t)n);
    write_out(w, fd, f->inode, offset, (uint64_t)n);
    ssize_t entry = write_entry_page(w, f, fd, offset);
    return entry < 0 ? entry : n;
}

static ssize_t
watched_pwritev(const gd_env *env, int fd, const struct iovec *iov, int count,
                uint64_t offset)
{
    watched_env *w = self(env);
    open_file *f = file_of(w, fd);
    if (f == NULL || f->inode == 0) {
        return w->real->pwritev(w->real, fd, iov, count, offset);
    }
    if (w->alone && f->group && offset >= data_start(w)) {
        return write_alone(w, f, fd, iov, offset);
    }
    uint64_t inode = f->inode;
    bool entries = is_of_entries(w, f, offset, &fd, &inode);
    if (entries) {
        pthread_mutex_lock(&w->entry_mutex);
    }
    ssize_t n = w->real->pwritev(w->real, fd, iov, count, offset);
    if (entries) {
        pthread_mutex_unlock(&w->entry_mutex);
    }
    if (n > 0) {
        dm_write(w->disk, inode, offset, (uint64_t)n);
    }
    return n;
}

/* The entries of a group are on the disk when the group is. */
static int
sync_stores(watched_env *w, const open_file *f)
{
    if (f == NULL || f->stores_fd < 0 || !f->group) {
        return 0;
    }
    dm_sync(w->disk, f->stores_inode);
    return w->real->fdatasync(w->real, f->stores_fd);
}

static int
watched_fdatasync(const gd_env *env, int fd)
{
    watched_env *w = self(env);
    open_file *f = file_of(w, fd);
    int rc = sync_stores(w, f);
    if (f != NULL) {
        dm_sync(w->disk, f->inode); /* of a directory: its journal */
    }
    return rc < 0 ? rc : w->real->fdatasync(w->real, fd);
}

static int
watched_fsync(const gd_env *env, int fd)
{
    watched_env *w = self(env);
    open_file *f = file_of(w, fd);
    int rc = sync_stores(w, f);
    if (f != NULL) {
        dm_sync(w->disk, f->inode);
    }
    return rc < 0 ? rc : w->real->fsync(w->real, fd);
}

static int
watched_ftruncate(const gd_env *env, int fd, uint64_t length)
{
    watched_env *w = self(env);
    open_file *f = file_of(w, fd);
    if (f != NULL && f->inode != 0) {
        dm_cut(w->disk, f->inode, length);
    }
    return w->real->ftruncate(w->real, fd, length);
}

static void
watched_start_writeback(const gd_env *env, int fd, uint64_t offset,
                        uint64_t length)
{
    watched_env *w = self(env);
    open_file *f = file_of(w, fd);
    if (f != NULL && f->inode != 0) {
        dm_flush(w->disk, f->inode, offset, length);
    }
    w->real->start_writeback(w->real, fd, offset, length);
}

static void
watched_start_readahead(const gd_env *env, int fd, uint64_t offset,
                        uint64_t length)
{
    watched_env *w = self(env);
    open_file *f = file_of(w, fd);
    uint64_t inode = f == NULL ? 0 : f->inode;
    if (inode == 0) {
        return;
    }
    /* A whole store is asked for from the group's first page on. */
    bool store = f->group && offset < data_start(w);
    if (store && w->single) {
        return;
    }
    if (store && f->stores_fd >= 0) {
        fd = f->stores_fd;
        inode = f->stores_inode;
    }
    dm_read(w->disk, inode, offset, length);
    w->real->start_readahead(w->real, fd, offset, length);
}

/* The table is the real one, except for the watched calls. */
static void
watch(watched_env *w)
{
    w->real = gd_env_posix();
    w->env = *w->real;
    w->env.openat = watched_openat;
    w->env.close = watched_close;
    w->env.pread = watched_pread;
    w->env.pwritev = watched_pwritev;
    w->env.fsync = watched_fsync;
    w->env.fdatasync = watched_fdatasync;
    w->env.ftruncate = watched_ftruncate;
    w->env.start_writeback = watched_start_writeback;
    w->env.start_readahead = watched_start_readahead;
    w->disk = dm_open();
    w->stores = -1;
    pthread_mutex_init(&w->entry_mutex, NULL);
}

/* ---- the data, and the clock ---- */

typedef struct step {
    watched_env *w;
    const char *path, *image, *filter;
    uint8_t *data; /* a piece */
    size_t length; /* of all */
    uint64_t seed;
    double wall, cpu, open; /* seconds; open: of the handle and its filter */
} step;

/* Noise (splitmix64), the same for the same seed. */
static void
make_data(step *x, uint64_t seed)
{
    uint64_t state = seed * UINT64_C(0xd1342543de82ef95);
    for (size_t at = 0; at < PIECE; at += 8) {
        uint64_t z = state += UINT64_C(0x9e3779b97f4a7c15);
        z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
        z ^= z >> 31;
        memcpy(x->data + at, &z, 8);
    }
}

/* The piece at an offset, until the next call.  Made within the time, so that
 * nothing is written back while the clock stands: 8 bytes of each block. */
static const uint8_t *
data_at(step *x, size_t offset)
{
    for (size_t at = 0; at < PIECE; at += BLOCK) {
        uint64_t number = (offset + at) / BLOCK;
        memcpy(x->data + at, &number, sizeof number);
    }
    return x->data;
}

static void
start_clock(step *x)
{
    x->wall -= seconds(CLOCK_MONOTONIC);
    x->cpu -= seconds(CLOCK_PROCESS_CPUTIME_ID);
}

static void
stop_clock(step *x)
{
    x->wall += seconds(CLOCK_MONOTONIC);
    x->cpu += seconds(CLOCK_PROCESS_CPUTIME_ID);
}

static gd_status
compare(step *x, const uint8_t *found, size_t length, size_t offset,
        gd_error *err)
{
    return memcmp(found, data_at(x, offset), length) == 0
               ? GD_OK
               : gd_fail(err, GD_CORRUPT, "%s: what was read at %zu is not what "
                         "was written", x->path, offset);
}

static size_t
piece_at(const step *x, size_t offset)
{
    return x->length - offset < PIECE ? x->length - offset : PIECE;
}

/* ---- a plain file ---- */

static gd_status
write_pieces(step *x, int fd, gd_error *err)
{
    gd_status s = GD_OK;
    for (size_t at = 0; s == GD_OK && at < x->length; at += PIECE) {
        s = gd_write_full(&x->w->env, fd, data_at(x, at), piece_at(x, at), at,
                          x->path, err);
    }
    return s;
}

/* Durable, as an image in the store is: with its name. */
static gd_status
write_file(step *x, gd_error *err)
{
    const gd_env *env = &x->w->env;
    int fd;
    start_clock(x);
    gd_status s = gd_open(env, AT_FDCWD, x->path, O_RDWR | O_CREAT | O_TRUNC,
                          0600, &fd, err);
    if (s == GD_OK) {
        s = write_pieces(x, fd, err);
        if (s == GD_OK && env->fsync(env, fd) < 0) {
            s = gd_fail(err, GD_IO, "cannot fsync %s", x->path);
        }
        env->close(env, fd);
    }
    s = s == GD_OK ? gd_sync_dir(env, AT_FDCWD, ".", err) : s;
    stop_clock(x);
    return s;
}

static gd_status
read_file(step *x, gd_error *err)
{
    const gd_env *env = &x->w->env;
    uint8_t *found = gd_alloc(env, PIECE, err);
    int fd = -1;
    gd_status s = found == NULL ? GD_NOMEM
                                : gd_open(env, AT_FDCWD, x->path, O_RDONLY, 0,
                                          &fd, err);
    for (size_t at = 0; s == GD_OK && at < x->length; at += PIECE) {
        start_clock(x);
        s = gd_read_full(env, fd, found, piece_at(x, at), at, x->path, err);
        stop_clock(x);
        s = s == GD_OK ? compare(x, found, piece_at(x, at), at, err) : s;
    }
    if (fd >= 0) {
        env->close(env, fd);
    }
    env->release(env, found);
    return s;
}

/* ---- an image ---- */

static gd_status
open_repository(step *x, gd_repo **repo, gd_error *err)
{
    gd_followed followed = {.more = true};
    double start = seconds(CLOCK_MONOTONIC);
    gd_status s = gd_repo_open(&x->w->env, x->path, &x->w->params, false, repo,
                               err);
    if (s == GD_OK && x->filter != NULL) {
        s = gd_repo_attach_filter(*repo, x->filter, FILTER_BYTES, err);
    }
    while (s == GD_OK && x->filter != NULL && followed.more) {
        s = gd_follow(*repo, GROUPS_AT_ONCE, &followed, err);
    }
    x->open = seconds(CLOCK_MONOTONIC) - start;
    return s;
}

static gd_status
write_image(step *x, gd_transaction *transaction, gd_error *err)
{
    gd_status s = GD_OK;
    for (size_t at = 0; s == GD_OK && at < x->length; at += PIECE) {
        s = gd_transaction_write(transaction, data_at(x, at), piece_at(x, at),
                                 err);
    }
    return s;
}

static gd_status
store_image(step *x, gd_repo *repo, const char *image, bool commit,
            gd_error *err)
{
    gd_transaction *transaction;
    gd_recipe_header header = {0};
    bool linked;
    start_clock(x);
    gd_status s = gd_transaction_begin(repo, image, "", &gd_global_scope,
                                       &transaction, err);
    if (s == GD_OK) {
        s = write_image(x, transaction, err);
        if (s == GD_OK && !commit) {
            return s; /* the transaction is never ended: the power is cut */
        }
        if (s == GD_OK) {
            s = gd_transaction_commit(transaction, &header, &linked, err);
        }
        gd_transaction_end(transaction);
    }
    stop_clock(x);
    return s;
}

static gd_status
fetch_image(step *x, gd_repo *repo, gd_error *err)
{
    const gd_env *env = &x->w->env;
    uint8_t *found = gd_alloc(env, PIECE, err);
    gd_image *image = NULL;
    start_clock(x);
    gd_status s = found == NULL ? GD_NOMEM
                                : gd_image_open(repo, x->image, NULL, &image,
                                                err);
    stop_clock(x);
    for (size_t at = 0, n; s == GD_OK && at < x->length; at += PIECE) {
        start_clock(x);
        s = gd_image_read(image, found, piece_at(x, at), at, &n, err);
        stop_clock(x);
        s = s == GD_OK ? compare(x, found, piece_at(x, at), at, err) : s;
    }
    if (image != NULL) {
        gd_image_close(image);
    }
    env->release(env, found);
    return s;
}

/* ---- the steps ---- */

static gd_status
with_repository(step *x, bool fetch, gd_error *err)
{
    gd_repo *repo = NULL;
    gd_status s = open_repository(x, &repo, err);
    if (s == GD_OK) {
        s = fetch ? fetch_image(x, repo, err)
                  : store_image(x, repo, x->image, true, err);
    }
    if (repo != NULL) {
        gd_repo_close(repo);
    }
    return s;
}

static _Noreturn void
wait_for_the_end(void)
{
    printf("under way\n");
    fflush(stdout);
    for (;;) {
        pause();
    }
}

static gd_status
halt_write(step *x, gd_error *err)
{
    char next[4096];
    int fd;
    gd_status s = write_file(x, err);
    snprintf(next, sizeof next, "%s-next", x->path);
    make_data(x, x->seed + 1);
    if (s == GD_OK) {
        s = gd_open(&x->w->env, AT_FDCWD, next, O_RDWR | O_CREAT, 0600, &fd,
                    err);
    }
    if (s == GD_OK) {
        s = write_pieces(x, fd, err);
    }
    if (s == GD_OK) {
        wait_for_the_end();
    }
    return s;
}

static gd_status
halt_store(step *x, gd_error *err)
{
    char next[GD_NAME_SIZE];
    gd_repo *repo;
    gd_status s = open_repository(x, &repo, err);
    if (s == GD_OK) {
        s = store_image(x, repo, x->image, true, err);
    }
    snprintf(next, sizeof next, "%s-next", x->image);
    make_data(x, x->seed + 1);
    if (s == GD_OK) {
        s = store_image(x, repo, next, false, err);
    }
    if (s == GD_OK) {
        wait_for_the_end();
    }
    return s;
}

static gd_status
run(step *x, const char *operation, gd_error *err)
{
    if (strcmp(operation, "write") == 0) {
        return write_file(x, err);
    }
    if (strcmp(operation, "read") == 0) {
        return read_file(x, err);
    }
    if (strcmp(operation, "halt-write") == 0) {
        return halt_write(x, err);
    }
    if (strcmp(operation, "store") == 0) {
        return with_repository(x, false, err);
    }
    if (strcmp(operation, "fetch") == 0) {
        return with_repository(x, true, err);
    }
    if (strcmp(operation, "halt-store") == 0) {
        return halt_store(x, err);
    }
    return gd_fail(err, GD_INVALID, "no operation is called %s", operation);
}

/* The value of KEY=VALUE among the arguments, or NULL. */
static const char *
argument(char **argv, const char *key)
{
    size_t length = strlen(key);
    for (; *argv != NULL; argv++) {
        if (strncmp(*argv, key, length) == 0 && (*argv)[length] == '=') {
            return *argv + length + 1;
        }
    }
    return NULL;
}

static unsigned long
number(char **argv, const char *key)
{
    const char *value = argument(argv, key);
    return value == NULL ? 0 : strtoul(value, NULL, 10);
}

static void
parse(char **argv, step *x)
{
    watched_env *w = x->w;
    const char *id = argument(argv, "id"), *stores = argument(argv, "stores");
    const char *digest = argument(argv, "digest");
    w->params.block_size = (uint32_t)number(argv, "block");
    w->params.group_slots = (uint32_t)number(argv, "slots");
    w->params.segment_size = (uint32_t)number(argv, "segment");
    w->params.lock_timeout_ms = 10000;
    for (int i = 0; id != NULL && i < GD_ID_SIZE; i++) {
        sscanf(id + 2 * i, "%2hhx", &w->params.repository_id[i]);
    }
    snprintf(w->params.digest, sizeof w->params.digest, "%s",
             digest == NULL ? "" : digest);
    cpu_set_t processors;
    if (sched_getaffinity(0, sizeof processors, &processors) == 0) {
        w->params.threads = (unsigned)CPU_COUNT(&processors);
    }
    w->single = number(argv, "single") != 0;
    w->alone = number(argv, "alone") != 0;
    if (stores != NULL) {
        w->stores = open(stores, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    }
    x->path = argument(argv, "path");
    x->image = argument(argv, "image");
    x->filter = argument(argv, "filter");
    x->seed = number(argv, "seed");
    x->length = number(argv, "mib") << 20;
}

int
main(int argc, char **argv)
{
    static watched_env w;
    step x = {.w = &w};
    gd_error err;
    watch(&w);
    if (argc > 2) {
        parse(argv + 2, &x);
    }
    if (x.path == NULL || x.length == 0 ||
        (x.data = malloc(PIECE)) == NULL) {
        fprintf(stderr, "usage: %s OPERATION KEY=VALUE...\n"
                "It is made to be called by livedfs.py.\n", argv[0]);
        return 2;
    }
    make_data(&x, x.seed);
    if (run(&x, argv[1], &err) != GD_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    dm_counts counts = dm_get_counts(w.disk);
    printf("{\"wall\": %.6f, \"cpu\": %.6f, \"open\": %.6f, "
           "\"requests\": %" PRIu64 ", \"near\": %" PRIu64 ", "
           "\"far\": %" PRIu64 ", \"bytes\": %" PRIu64 "}\n",
           x.wall, x.cpu, x.open, counts.requests, counts.near_seeks,
           counts.far_seeks, counts.bytes);
    dm_close(w.disk);
    free(x.data);
    return 0;
}
