/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory_env.c - see memory_env.h.
 */
#include "tests/fuzz/memory_env.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/memory_large.h"
#include "tests/fuzz/memory_nodes.h"

/* One lock byte of one open file. */
typedef struct memory_lock {
    uint64_t byte;
    short type;
} memory_lock;

struct memory_file {
    memory_node *node; /* NULL: a free place */
    char path[MEMORY_PATH]; /* of a directory */
    bool writable;
    memory_lock *locks;
    size_t lock_count;
};

static memory_env *
self(const gd_env *env)
{
    return (memory_env *)(uintptr_t)env;
}

/* Returns 0, or the -errno that the call has to fail with. */
static int
enter(memory_env *m)
{
    m->calls++;
    if (m->fail_at == 0 || m->calls < m->fail_at) {
        return 0;
    }
    if (m->fail_with == 0) {
        return -EIO;
    }
    return m->calls == m->fail_at ? -m->fail_with : 0;
}

/* ---- paths and descriptors ---- */

static memory_file *
file_of(memory_env *m, int fd)
{
    int at = fd - MEMORY_FIRST_FD;
    if (at < 0 || at >= MEMORY_FDS || m->files[at].node == NULL) {
        m->bad_calls++;
        return NULL;
    }
    return &m->files[at];
}

/* Makes the whole path of a name. If a name is no string of a path, the engine
 * has a bug. */
static int
resolve(memory_env *m, int dir, const char *path, char out[MEMORY_PATH])
{
    const char *base = "";
    if (path[0] != '/' && dir != AT_FDCWD) {
        memory_file *file = file_of(m, dir);
        if (file == NULL) {
            return -EBADF;
        }
        base = file->path;
    }
    bool itself = strcmp(path, ".") == 0;
    int n = snprintf(out, MEMORY_PATH, "%s%s%s", base,
                     itself || path[0] == '/' ? "" : "/", itself ? "" : path);
    return n < MEMORY_PATH ? 0 : -ENAMETOOLONG;
}

/* Returns true if its parent directory exists. */
static bool
has_parent(const memory_env *m, const char *path)
{
    char parent[MEMORY_PATH];
    snprintf(parent, sizeof parent, "%s", path);
    char *slash = strrchr(parent, '/');
    if (slash == NULL || slash == parent) {
        return true;
    }
    *slash = '\0';
    const memory_node *node = find_node(m, parent);
    return node != NULL && S_ISDIR(node->mode);
}

static int
memory_openat(const gd_env *env, int dir, const char *name, int flags,
              mode_t mode)
{
    memory_env *m = self(env);
    char path[MEMORY_PATH];
    int rc = enter(m);
    if (rc == 0) {
        rc = resolve(m, dir, name, path);
    }
    if (rc != 0) {
        return rc;
    }
    size_t at = 0;
    while (at < MEMORY_FDS && m->files[at].node != NULL) {
        at++;
    }
    if (at == MEMORY_FDS) {
        return -EMFILE;
    }
    memory_node *node = find_node(m, path);
    if (node == NULL) {
        if ((flags & O_CREAT) == 0 || !has_parent(m, path)) {
            return -ENOENT;
        }
        node = new_node(m, S_IFREG | (mode & 07777));
        add_name(m, path, node);
    } else if ((flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL)) {
        return -EEXIST;
    }
    if (S_ISLNK(node->mode)) {
        return -ELOOP;
    }
    bool writable = (flags & O_ACCMODE) != O_RDONLY;
    if (S_ISDIR(node->mode) ? writable : (flags & O_DIRECTORY) != 0) {
        return writable ? -EISDIR : -ENOTDIR;
    }
    if ((flags & O_TRUNC) != 0) {
        (void)set_length(node, 0);
    }
    memory_file *file = &m->files[at];
    *file = (memory_file){.node = node, .writable = writable};
    snprintf(file->path, MEMORY_PATH, "%s", path);
    node->opens++;
    return MEMORY_FIRST_FD + (int)at;
}

static void
close_file(memory_env *m, memory_file *file)
{
    memory_node *node = file->node;
    free(file->locks);
    *file = (memory_file){0};
    node->opens--;
    release_unused(m, node);
}

/* A dead process's files are closed by memory_env_close_all: until then its
 * locks stay. */
static int
memory_close(const gd_env *env, int fd)
{
    memory_env *m = self(env);
    memory_file *file = file_of(m, fd);
    if (file == NULL) {
        return -EBADF;
    }
    close_file(m, file);
    return 0;
}

static int
open_file(memory_env *m, int fd, memory_file **file)
{
    int rc = enter(m);
    *file = rc == 0 ? file_of(m, fd) : NULL;
    return rc != 0 ? rc : *file == NULL ? -EBADF : 0;
}

static ssize_t
memory_pread(const gd_env *env, int fd, void *buf, size_t len,
             uint64_t offset)
{
    memory_file *file;
    int rc = open_file(self(env), fd, &file);
    if (rc != 0) {
        return rc;
    }
    const memory_node *node = file->node;
    if (S_ISDIR(node->mode)) {
        return -EISDIR;
    }
    if (offset > INT64_MAX) {
        return -EINVAL;
    }
    if (offset >= node->length) {
        return 0;
    }
    size_t here = node->length - offset < len ? node->length - offset : len;
    memcpy(buf, node->data + offset, here);
    return (ssize_t)here;
}

static ssize_t
memory_pwritev(const gd_env *env, int fd, const struct iovec *iov, int count,
               uint64_t offset)
{
    memory_file *file;
    int rc = open_file(self(env), fd, &file);
    if (rc != 0) {
        return rc;
    }
    if (!file->writable) {
        return -EBADF;
    }
    uint64_t total = 0;
    for (int i = 0; i < count; i++) {
        total += iov[i].iov_len;
    }
    memory_node *node = file->node;
    if (offset > MEMORY_FILE_MAX ||
        (offset + total > node->length &&
         !set_length(node, offset + total))) {
        return -ENOSPC;
    }
    for (int i = 0; i < count; i++) {
        memcpy(node->data + offset, iov[i].iov_base, iov[i].iov_len);
        offset += iov[i].iov_len;
    }
    return (ssize_t)total;
}

static int
memory_fsync(const gd_env *env, int fd)
{
    memory_file *file;
    return open_file(self(env), fd, &file);
}

static int
memory_ftruncate(const gd_env *env, int fd, uint64_t length)
{
    memory_file *file;
    int rc = open_file(self(env), fd, &file);
    if (rc != 0) {
        return rc;
    }
    return !file->writable ? -EBADF
           : set_length(file->node, length) ? 0 : -ENOSPC;
}

static int
memory_fallocate(const gd_env *env, int fd, uint64_t offset, uint64_t length)
{
    memory_file *file;
    int rc = open_file(self(env), fd, &file);
    if (rc != 0) {
        return rc;
    }
    if (offset > MEMORY_FILE_MAX || length > MEMORY_FILE_MAX) {
        return -ENOSPC;
    }
    return offset + length <= file->node->length ||
                   set_length(file->node, offset + length)
               ? 0
               : -ENOSPC;
}

static int
memory_punch(const gd_env *env, int fd, uint64_t offset, uint64_t length)
{
    memory_file *file;
    int rc = open_file(self(env), fd, &file);
    if (rc != 0) {
        return rc;
    }
    memory_node *node = file->node;
    if (offset < node->length) {
        uint64_t left = node->length - offset;
        memset(node->data + offset, 0, left < length ? left : length);
        node->holes += left < length ? left : length;
    }
    return 0;
}

static int
memory_linkat(const gd_env *env, int dir, const char *from, const char *to)
{
    memory_env *m = self(env);
    char old[MEMORY_PATH], new[MEMORY_PATH];
    int rc = enter(m);
    if (rc == 0) {
        rc = resolve(m, dir, from, old);
    }
    if (rc == 0) {
        rc = resolve(m, dir, to, new);
    }
    if (rc != 0) {
        return rc;
    }
    memory_node *node = find_node(m, old);
    if (node == NULL || !has_parent(m, new)) {
        return -ENOENT;
    }
    if (S_ISDIR(node->mode)) {
        return -EPERM;
    }
    if (find_node(m, new) != NULL) {
        return -EEXIST;
    }
    add_name(m, new, node);
    return 0;
}

static int
memory_renameat(const gd_env *env, int dir, const char *from, const char *to)
{
    memory_env *m = self(env);
    char old[MEMORY_PATH], new[MEMORY_PATH];
    int rc = enter(m);
    if (rc == 0) {
        rc = resolve(m, dir, from, old);
    }
    if (rc == 0) {
        rc = resolve(m, dir, to, new);
    }
    if (rc != 0) {
        return rc;
    }
    memory_node *node = find_node(m, old), *there = find_node(m, new);
    if (node == NULL || !has_parent(m, new)) {
        return -ENOENT;
    }
    if (node == there) {
        return 0; /* two names of one file: nothing happens */
    }
    if (there != NULL) {
        if (S_ISDIR(there->mode)) {
            return -EISDIR;
        }
        remove_name(m, new);
    }
    add_name(m, new, node);
    remove_name(m, old);
    return 0;
}

static int
memory_unlinkat(const gd_env *env, int dir, const char *name)
{
    memory_env *m = self(env);
    char path[MEMORY_PATH];
    int rc = enter(m);
    if (rc == 0) {
        rc = resolve(m, dir, name, path);
    }
    if (rc != 0) {
        return rc;
    }
    const memory_node *node = find_node(m, path);
    if (node == NULL) {
        return -ENOENT;
    }
    if (S_ISDIR(node->mode)) {
        return -EISDIR;
    }
    remove_name(m, path);
    return 0;
}

static int
memory_rmdirat(const gd_env *env, int dir, const char *name)
{
    memory_env *m = self(env);
    char path[MEMORY_PATH];
    int rc = enter(m);
    if (rc == 0) {
        rc = resolve(m, dir, name, path);
    }
    if (rc != 0) {
        return rc;
    }
    const memory_node *node = find_node(m, path);
    if (node == NULL) {
        return -ENOENT;
    }
    if (!S_ISDIR(node->mode)) {
        return -ENOTDIR;
    }
    if (memory_count(m, path, "", NULL) > 0) {
        return -ENOTEMPTY;
    }
    remove_name(m, path);
    return 0;
}

static int
memory_mkdirat(const gd_env *env, int dir, const char *name, mode_t mode)
{
    memory_env *m = self(env);
    char path[MEMORY_PATH];
    int rc = enter(m);
    if (rc == 0) {
        rc = resolve(m, dir, name, path);
    }
    if (rc != 0) {
        return rc;
    }
    if (find_node(m, path) != NULL) {
        return -EEXIST;
    }
    if (!has_parent(m, path)) {
        return -ENOENT;
    }
    add_name(m, path, new_node(m, S_IFDIR | (mode & 07777)));
    return 0;
}

static int
memory_fchmod(const gd_env *env, int fd, mode_t mode)
{
    memory_file *file;
    int rc = open_file(self(env), fd, &file);
    if (rc == 0) {
        file->node->mode = (file->node->mode & S_IFMT) | (mode & 07777);
    }
    return rc;
}

/* There are no caches here. */
static int
memory_renew(const gd_env *env, int dir, const char *path)
{
    (void)dir, (void)path;
    return enter(self(env));
}

static int
memory_is_shared(GD_UNUSED const gd_env *env, GD_UNUSED int dir)
{
    return 0;
}

static int
memory_free_space(const gd_env *env, int fd, gd_space *space)
{
    memory_env *m = self(env);
    memory_file *file;
    int rc = open_file(m, fd, &file);
    if (rc == 0) {
        *space = (gd_space){.free = m->space, .total = UINT64_C(1) << 40};
    }
    return rc;
}

static void
fill_stat(const memory_node *node, struct stat *st)
{
    memset(st, 0, sizeof *st);
    st->st_dev = 1;
    st->st_ino = node->inode;
    st->st_mode = node->mode;
    st->st_nlink = node->links;
    st->st_size = (off_t)node->length;
    st->st_blksize = PAGE;
    uint64_t holes = node->holes < node->length ? node->holes : node->length;
    st->st_blocks = (blkcnt_t)((node->length - holes + 511) / 512);
}

static int
memory_fstat(const gd_env *env, int fd, struct stat *st)
{
    memory_file *file;
    int rc = open_file(self(env), fd, &file);
    if (rc == 0) {
        fill_stat(file->node, st);
    }
    return rc;
}

static int
memory_fstatat(const gd_env *env, int dir, const char *name, struct stat *st)
{
    memory_env *m = self(env);
    char path[MEMORY_PATH];
    int rc = enter(m);
    if (rc == 0) {
        rc = resolve(m, dir, name, path);
    }
    if (rc != 0) {
        return rc;
    }
    const memory_node *node = find_node(m, path);
    if (node == NULL) {
        return -ENOENT;
    }
    fill_stat(node, st);
    return 0;
}

/* ---- locks ---- */

static memory_lock *
find_lock(const memory_file *file, uint64_t byte)
{
    for (size_t i = 0; i < file->lock_count; i++) {
        if (file->locks[i].byte == byte) {
            return &file->locks[i];
        }
    }
    return NULL;
}

static bool
is_refused(const memory_env *m, const memory_file *file, uint64_t byte,
           short type)
{
    for (size_t i = 0; i < MEMORY_FDS; i++) {
        const memory_file *other = &m->files[i];
        if (other->node == file->node && other != file) {
            const memory_lock *lock = find_lock(other, byte);
            if (lock != NULL && (type == F_WRLCK || lock->type == F_WRLCK)) {
                return true;
            }
        }
    }
    return false;
}

static int
memory_lock_byte(const gd_env *env, int fd, uint64_t byte, short type)
{
    memory_env *m = self(env);
    memory_file *file;
    int rc = open_file(m, fd, &file);
    if (rc != 0) {
        return rc;
    }
    if (byte > INT64_MAX) {
        return -EINVAL;
    }
    memory_lock *lock = find_lock(file, byte);
    if (type == F_UNLCK) {
        if (lock != NULL) {
            *lock = file->locks[--file->lock_count];
        }
        return 0;
    }
    if (type == F_WRLCK && !file->writable) {
        return -EBADF;
    }
    if (is_refused(m, file, byte, type)) {
        return -EAGAIN;
    }
    if (lock == NULL) {
        size_t count = file->lock_count + 1;
        file->locks = require(realloc(file->locks, count * sizeof *lock));
        lock = &file->locks[file->lock_count++];
        lock->byte = byte;
    }
    lock->type = type;
    return 0;
}

static int
memory_is_locked(const gd_env *env, int fd, uint64_t byte)
{
    memory_env *m = self(env);
    memory_file *file;
    int rc = open_file(m, fd, &file);
    return rc != 0 ? rc : is_refused(m, file, byte, F_WRLCK);
}

static int
memory_list(const gd_env *env, int dir, const char *name,
            void (*visit)(void *arg, const char *name), void *arg)
{
    memory_env *m = self(env);
    char path[MEMORY_PATH];
    int rc = enter(m);
    if (rc == 0) {
        rc = resolve(m, dir, name, path);
    }
    if (rc != 0) {
        return rc;
    }
    const memory_node *node = find_node(m, path);
    if (node == NULL || !S_ISDIR(node->mode)) {
        return node == NULL ? -ENOENT : -ENOTDIR;
    }
    size_t length = strlen(path);
    for (size_t i = 0; i < m->name_count; i++) {
        const char *other = m->names[i].path;
        if (strncmp(other, path, length) == 0 && other[length] == '/' &&
            strchr(other + length + 1, '/') == NULL) {
            visit(arg, other + length + 1);
        }
    }
    return 0;
}

/* ---- advice, mappings, and the machine ---- */

static void
memory_advice(const gd_env *env, int fd, uint64_t offset, uint64_t length)
{
    (void)file_of(self(env), fd);
    (void)offset;
    (void)length;
}

static void *
memory_mmap(const gd_env *env, int fd, size_t length)
{
    memory_env *m = self(env);
    memory_file *file;
    if (open_file(m, fd, &file) != 0 || length != file->node->length) {
        return NULL; /* only mappings of the whole are modelled */
    }
    if (file->node->mappings++ == 0) {
        set_room(file->node, length); /* exactly this length */
    }
    m->mappings++;
    return file->node->data;
}

static void
memory_use_large_pages(const gd_env *env, void *address, size_t length)
{
    (void)env;
    (void)address;
    (void)length;
}

static int
memory_munmap(const gd_env *env, void *address, size_t length)
{
    memory_env *m = self(env);
    for (memory_node *node = m->nodes; node != NULL; node = node->next) {
        if (node->mappings > 0 && node->data == address &&
            node->length == length) {
            node->mappings--;
            m->mappings--;
            release_unused(m, node);
            return 0;
        }
    }
    m->bad_calls++;
    return -EINVAL;
}

static int
memory_random(const gd_env *env, void *buf, size_t len)
{
    memory_env *m = self(env);
    uint8_t *out = buf;
    int rc = enter(m);
    for (size_t i = 0; rc == 0 && i < len; i++) {
        uint64_t z = (m->random_state += UINT64_C(0x9e3779b97f4a7c15));
        z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
        out[i] = (uint8_t)(z >> 32);
    }
    return rc;
}

static pid_t
memory_getpid(const gd_env *env)
{
    (void)env;
    return 1000;
}

static uint64_t
memory_descriptor_limit(const gd_env *env)
{
    (void)env;
    return 1024;
}

static uid_t
memory_geteuid(const gd_env *env)
{
    (void)env;
    return 0; /* as fill_stat has it */
}

static int64_t
memory_now(const gd_env *env)
{
    return self(env)->clock++;
}

/* No thread waits for a processor here. */
static int64_t
memory_any_ns(const gd_env *env)
{
    return self(env)->clock++;
}

static void
memory_sleep_ms(const gd_env *env, unsigned ms)
{
    self(env)->clock += ms / 1000;
}

/* ---- memory ---- */

static void *
memory_alloc(const gd_env *env, size_t size, bool zeroed)
{
    memory_env *m = self(env);
    if (++m->allocated == m->alloc_fail_at) {
        return NULL;
    }
    void *memory = size >= MEMORY_LARGE ? memory_large_alloc(size)
                   : zeroed             ? calloc(1, size)
                                        : malloc(size);
    if (memory != NULL && zeroed && size >= MEMORY_LARGE) {
        memory_large_clear(memory, size);
    }
    m->allocations += memory != NULL;
    return memory;
}

static void
memory_release(const gd_env *env, void *memory)
{
    self(env)->allocations -= memory != NULL;
    memory_large_release(memory);
}

/* ---- the environment itself ---- */

/* A call that is new in env.h would be missing here. */
_Static_assert(sizeof(gd_env) == 39 * sizeof(void (*)(void)),
               "memory_env_init fills the whole table");

void
memory_env_init(memory_env *m)
{
    memset(m, 0, sizeof *m);
    m->env.openat = memory_openat;
    m->env.close = memory_close;
    m->env.pread = memory_pread;
    m->env.pwritev = memory_pwritev;
    m->env.fsync = memory_fsync;
    m->env.fdatasync = memory_fsync;
    m->env.ftruncate = memory_ftruncate;
    m->env.fallocate = memory_fallocate;
    m->env.punch = memory_punch;
    m->env.linkat = memory_linkat;
    m->env.renameat = memory_renameat;
    m->env.unlinkat = memory_unlinkat;
    m->env.rmdirat = memory_rmdirat;
    m->env.mkdirat = memory_mkdirat;
    m->env.fchmod = memory_fchmod;
    m->env.fstat = memory_fstat;
    m->env.fstatat = memory_fstatat;
    m->env.renew = memory_renew;
    m->env.is_shared = memory_is_shared;
    m->env.free_space = memory_free_space;
    m->env.lock = memory_lock_byte;
    m->env.is_locked = memory_is_locked;
    m->env.list = memory_list;
    m->env.start_writeback = memory_advice;
    m->env.start_readahead = memory_advice;
    m->env.drop_cache = memory_advice;
    m->env.mmap_shared = memory_mmap;
    m->env.use_large_pages = memory_use_large_pages;
    m->env.munmap = memory_munmap;
    m->env.random = memory_random;
    m->env.descriptor_limit = memory_descriptor_limit;
    m->env.getpid = memory_getpid;
    m->env.geteuid = memory_geteuid;
    m->env.now = memory_now;
    m->env.monotonic_ns = memory_any_ns;
    m->env.thread_ns = memory_any_ns;
    m->env.sleep_ms = memory_sleep_ms;
    m->env.alloc = memory_alloc;
    m->env.release = memory_release;
    m->files = require(calloc(MEMORY_FDS, sizeof *m->files));
    m->clock = 1700000000;
    m->space = UINT64_C(1) << 39;
}

void
memory_env_close_all(memory_env *m)
{
    for (size_t i = 0; i < MEMORY_FDS; i++) {
        if (m->files[i].node != NULL) {
            close_file(m, &m->files[i]);
        }
    }
}

void
memory_env_destroy(memory_env *m)
{
    memory_env_close_all(m);
    for (size_t i = 0; i < m->name_count; i++) {
        m->names[i].node->links = 0;
    }
    while (m->nodes != NULL) {
        memory_node *node = m->nodes;
        m->nodes = node->next;
        free(node->data);
        free(node);
    }
    free(m->names);
    free(m->files);
}

void
memory_env_fail(memory_env *m, uint64_t nth, int sys_errno)
{
    m->fail_at = m->calls + nth;
    m->fail_with = sys_errno;
}

void
memory_env_fail_alloc(memory_env *m, uint64_t nth)
{
    m->alloc_fail_at = m->allocated + nth;
}

bool
memory_env_heal(memory_env *m)
{
    bool failed =
        (m->fail_at != 0 && m->calls >= m->fail_at) ||
        (m->alloc_fail_at != 0 && m->allocated >= m->alloc_fail_at);
    m->fail_at = 0;
    m->alloc_fail_at = 0;
    return failed;
}

uint64_t
memory_env_leaks(const memory_env *m)
{
    int64_t open = 0;
    for (size_t i = 0; i < MEMORY_FDS; i++) {
        open += m->files[i].node != NULL;
    }
    if (open != 0 || m->mappings != 0 || m->allocations != 0 ||
        m->bad_calls != 0) {
        fprintf(stderr,
                "left over: %lld descriptors, %lld mappings, %lld "
                "allocations; %llu calls with what was not open\n",
                (long long)open, (long long)m->mappings,
                (long long)m->allocations, (unsigned long long)m->bad_calls);
    }
    return (uint64_t)llabs(open) + (uint64_t)llabs(m->mappings) +
           (uint64_t)llabs(m->allocations) + m->bad_calls;
}

/* ---- files, by their whole path ---- */

static memory_node *
make_node(memory_env *m, const char *path, mode_t mode)
{
    memory_node *node = find_node(m, path);
    if (node == NULL) {
        node = new_node(m, mode);
        add_name(m, path, node);
    }
    return node;
}

void
memory_mkdir(memory_env *m, const char *path)
{
    (void)make_node(m, path, S_IFDIR | 0700);
}

void
memory_symlink(memory_env *m, const char *path)
{
    (void)memory_remove(m, path);
    (void)make_node(m, path, S_IFLNK | 0777);
}

void
memory_put(memory_env *m, const char *path, const void *data, size_t length)
{
    memory_node *node = make_node(m, path, S_IFREG | 0600);
    (void)set_length(node, 0);
    (void)set_length(node, length);
    if (length > 0) {
        memcpy(node->data, data, length);
    }
}

uint8_t *
memory_get(const memory_env *m, const char *path, size_t *length)
{
    memory_node *node = find_node(m, path);
    if (node == NULL) {
        return NULL;
    }
    if (node->data == NULL) {
        set_room(node, ALIGNMENT);
    }
    *length = node->length;
    return node->data;
}

bool
memory_remove(memory_env *m, const char *path)
{
    if (find_node(m, path) == NULL) {
        return false;
    }
    remove_name(m, path);
    return true;
}

size_t
memory_count(const memory_env *m, const char *directory, const char *prefix,
             char first[MEMORY_PATH])
{
    char start[MEMORY_PATH];
    size_t count = 0;
    snprintf(start, sizeof start, "%s/%s", directory, prefix);
    for (size_t i = 0; i < m->name_count; i++) {
        if (strncmp(m->names[i].path, start, strlen(start)) == 0) {
            if (count == 0 && first != NULL) {
                snprintf(first, MEMORY_PATH, "%s", m->names[i].path);
            }
            count++;
        }
    }
    return count;
}

bool
memory_nth(const memory_env *m, size_t nth, char path[MEMORY_PATH])
{
    for (size_t i = 0; i < m->name_count; i++) {
        if (!S_ISDIR(m->names[i].node->mode) && nth-- == 0) {
            memcpy(path, m->names[i].path, MEMORY_PATH);
            return true;
        }
    }
    return false;
}

void
memory_copy(memory_env *to, const memory_env *from)
{
    memory_env_init(to);
    to->next_inode = from->next_inode;
    to->random_state = from->random_state;
    to->clock = from->clock;
    for (size_t i = 0; i < from->name_count; i++) {
        const memory_node *node = from->names[i].node;
        memory_node *copy = NULL;
        for (size_t k = 0; k < i && copy == NULL; k++) {
            if (from->names[k].node == node) {
                copy = to->names[k].node; /* both are in the same order */
            }
        }
        if (copy == NULL) {
            copy = new_node(to, node->mode);
            copy->inode = node->inode;
            (void)set_length(copy, node->length);
            if (node->length > 0) {
                memcpy(copy->data, node->data, node->length);
            }
        }
        add_name(to, from->names[i].path, copy);
    }
}
