/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sharedfs.c - a file system that hosts share, to test their requirements:
 * one host's client, as sharedfs.h describes it.
 *
 *     sharedfs BACKING MOUNTPOINT VERSIONS [OPTION=VALUE...]
 *
 * VERSIONS is a file beside BACKING, the same for all clients.  The options
 * are those of `choices` below.  It runs until it is killed or unmounted.
 *
 * The kernel sends no unlocking when a file with OFD locks is closed: its
 * request FLUSH, at each close, names the process as the owner, and only
 * RELEASE, when the file's last descriptor is gone, says that the open file is.
 * RELEASE comes a little after close() has returned.  So locks belong here to
 * the open file's own descriptor, and fall when that is closed.
 */
#define FUSE_USE_VERSION 312
#include "tests/sharedfs/sharedfs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse_lowlevel.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { GAP_US = 20000 };

/* An open file. */
typedef struct file {
    node *node;
    int fd;
    unsigned held; /* held_now() when it first took a lock */
    blocks *read;  /* NULL: none are kept */
} file;

static options chosen = {.attributes = 3, .names = 30};
static struct fuse_session *session;
static atomic_uint drops; /* of this client's locks, by the server */

/* ---- helpers ---- */

unsigned
held_now(void)
{
    return atomic_load(&drops) + 1;
}

bool
is_lost(unsigned held)
{
    return chosen.lost == LOST_ERROR && held != 0 && held != held_now();
}

static node *
node_at(fuse_ino_t ino)
{
    return ino == FUSE_ROOT_ID ? &root : (node *)(uintptr_t)ino;
}

static fuse_ino_t
ino_of(const node *n)
{
    return n == &root ? FUSE_ROOT_ID : (fuse_ino_t)(uintptr_t)n;
}

static file *
file_of(const struct fuse_file_info *fi)
{
    return (file *)(uintptr_t)fi->fh;
}

/* Returns a path by which the file of an O_PATH descriptor can be opened,
 * linked and so on. */
static const char *
path_of(const node *n, char path[64])
{
    snprintf(path, 64, "/proc/self/fd/%d", n->fd);
    return path;
}

static void
reply(fuse_req_t req, int rc)
{
    fuse_reply_err(req, rc < 0 ? errno : 0);
}

/* ---- attributes ---- */

/* Returns whether another client has removed the file's last name. */
static bool
is_gone(const struct stat *st, const node *n)
{
    return st->st_nlink == 0 && !n->removed_here;
}

/* Reads the attributes from the server.  Returns 0, or an error's number. */
static int
ask(node *n)
{
    uint64_t version = version_of(n);
    struct stat st;
    if (fstatat(n->fd, "", &st, AT_EMPTY_PATH) < 0) {
        return errno;
    }
    if (chosen.unlinked != UNLINKED_KEPT && is_gone(&st, n)) {
        return chosen.unlinked == UNLINKED_STALE ? ESTALE : ENOENT;
    }
    n->attr = st;
    n->seen = version;
    n->asked = seconds();
    return 0;
}

/* Returns the attributes for the kernel.  It notices changes by the time of
 * writing, so each change needs another time, however quickly they follow. */
static struct stat
told(node *n)
{
    struct stat st = n->attr;
    if (S_ISREG(st.st_mode)) {
        off_t end = dirty_end(n);
        st.st_size = end > st.st_size ? end : st.st_size;
        st.st_mtim.tv_nsec = (long)(n->seen % 1000000000);
    }
    return st;
}

static double
lifetime(const node *n)
{
    double left = chosen.attributes - (seconds() - n->asked);
    return left > 0 ? left : 0;
}

static void
do_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    (void)fi;
    node *n = node_at(ino);
    int error = ask(n);
    if (error != 0) {
        fuse_reply_err(req, error);
        return;
    }
    struct stat st = told(n);
    fuse_reply_attr(req, &st, chosen.attributes);
}

static int
change(node *n, const struct stat *to, int what)
{
    char path[64];
    path_of(n, path);
    int error = dirty_flush(n);
    if (error != 0) {
        return error;
    }
    if ((what & FUSE_SET_ATTR_MODE) != 0 && chmod(path, to->st_mode) < 0) {
        return errno;
    }
    if ((what & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID)) != 0 &&
        chown(path, what & FUSE_SET_ATTR_UID ? to->st_uid : (uid_t)-1,
              what & FUSE_SET_ATTR_GID ? to->st_gid : (gid_t)-1) < 0) {
        return errno;
    }
    if ((what & FUSE_SET_ATTR_SIZE) != 0 && truncate(path, to->st_size) < 0) {
        return errno;
    }
    return 0;
}

static void
do_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *to, int what,
           struct fuse_file_info *fi)
{
    node *n = node_at(ino);
    if (fi != NULL && is_lost(file_of(fi)->held)) {
        fuse_reply_err(req, EIO);
        return;
    }
    int error = change(n, to, what);
    dirty_count(n);
    version_bump(n, &n->seen);
    if (error != 0) {
        fuse_reply_err(req, error);
        return;
    }
    do_getattr(req, ino, fi);
}

/* ---- names ---- */

static void
fill_entry(struct fuse_entry_param *entry, node *n)
{
    *entry = (struct fuse_entry_param){
        .ino = ino_of(n), .attr = told(n), .attr_timeout = lifetime(n)};
}

/* Looks a name up on the server.  Returns 0, or an error's number. */
static int
look_up(node *dir, const char *text, node **child)
{
    struct stat st;
    int fd = openat(dir->fd, text, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        return errno;
    }
    if (fstat(fd, &st) < 0) {
        int error = errno;
        close(fd);
        return error;
    }
    *child = node_of(fd, &st);
    if (*child == NULL) {
        return ENOMEM;
    }
    int error = (*child)->asked == 0 ? ask(*child) : 0;
    if (error != 0) {
        node_forget(*child, 1);
    }
    return error;
}

static void
do_lookup(fuse_req_t req, fuse_ino_t parent, const char *text)
{
    node *dir = node_at(parent), *child = NULL;
    struct fuse_entry_param entry;
    int known = name_recall(dir, text, chosen.names, &child);
    int error = known == 0 ? ENOENT : 0;
    if (known < 0) {
        error = look_up(dir, text, &child);
        if (error == 0 || error == ENOENT) {
            name_remember(dir, text, error == 0 ? child : NULL);
        }
    }
    if (error != 0) {
        fuse_reply_err(req, error);
        return;
    }
    fill_entry(&entry, child);
    fuse_reply_entry(req, &entry);
}

static void
do_forget(fuse_req_t req, fuse_ino_t ino, uint64_t lookups)
{
    node_forget(node_at(ino), lookups);
    fuse_reply_none(req);
}

/* Notes that this client has changed a name. */
static void
changed(node *dir, const char *text)
{
    version_bump(dir, &dir->names_seen);
    name_forget(dir, text);
}

static void
reply_new(fuse_req_t req, node *dir, const char *text)
{
    node *child;
    struct fuse_entry_param entry;
    changed(dir, text);
    int error = look_up(dir, text, &child);
    if (error != 0) {
        fuse_reply_err(req, error);
        return;
    }
    name_remember(dir, text, child);
    (void)ask(child);
    fill_entry(&entry, child);
    fuse_reply_entry(req, &entry);
}

static void
do_mkdir(fuse_req_t req, fuse_ino_t parent, const char *text, mode_t mode)
{
    node *dir = node_at(parent);
    if (mkdirat(dir->fd, text, mode) < 0) {
        int error = errno;
        name_forget(dir, text);
        fuse_reply_err(req, error);
        return;
    }
    reply_new(req, dir, text);
}

/* Makes a socket: other hosts see its name, but cannot connect to it. */
static void
do_mknod(fuse_req_t req, fuse_ino_t parent, const char *text, mode_t mode,
         dev_t device)
{
    (void)device;
    node *dir = node_at(parent);
    int error = !S_ISSOCK(mode)                             ? EPERM
                : mknodat(dir->fd, text, mode, (dev_t)0) < 0 ? errno
                                                            : 0;
    if (error != 0) {
        name_forget(dir, text);
        fuse_reply_err(req, error);
        return;
    }
    reply_new(req, dir, text);
}

/* Notes the removal, so that it does not seem to be another client's. */
static void
note_removal(node *dir, const char *text)
{
    node *child;
    if (look_up(dir, text, &child) == 0) {
        child->removed_here = true;
        node_forget(child, 1);
    }
}

static void
remove_name(fuse_req_t req, fuse_ino_t parent, const char *text, int flags)
{
    node *dir = node_at(parent);
    note_removal(dir, text);
    int error = unlinkat(dir->fd, text, flags) < 0 ? errno : 0;
    changed(dir, text); /* before the kernel may ask for the name */
    fuse_reply_err(req, error);
}

static void
do_unlink(fuse_req_t req, fuse_ino_t parent, const char *text)
{
    remove_name(req, parent, text, 0);
}

static void
do_rmdir(fuse_req_t req, fuse_ino_t parent, const char *text)
{
    remove_name(req, parent, text, AT_REMOVEDIR);
}

static void
do_rename(fuse_req_t req, fuse_ino_t from, const char *old, fuse_ino_t to,
          const char *new, unsigned flags)
{
    node *source = node_at(from), *target = node_at(to);
    if (flags != 0) {
        fuse_reply_err(req, EINVAL);
        return;
    }
    note_removal(target, new);
    if (chosen.rename == RENAME_WITH_GAP &&
        unlinkat(target->fd, new, 0) == 0) {
        changed(target, new);
        usleep(GAP_US);
    }
    int error = renameat(source->fd, old, target->fd, new) < 0 ? errno : 0;
    changed(source, old); /* before the kernel may ask for the names */
    changed(target, new);
    fuse_reply_err(req, error);
}

static int
link_over(node *dir, const char *from, const char *text)
{
    char between[300];
    snprintf(between, sizeof between, "%.250s.new", text);
    int rc = linkat(AT_FDCWD, from, dir->fd, between, AT_SYMLINK_FOLLOW);
    return rc < 0 ? rc : renameat(dir->fd, between, dir->fd, text);
}

static void
do_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t parent, const char *text)
{
    char path[64];
    node *dir = node_at(parent);
    path_of(node_at(ino), path);
    int rc = linkat(AT_FDCWD, path, dir->fd, text, AT_SYMLINK_FOLLOW);
    if (rc < 0 && errno == EEXIST && chosen.link == LINK_REPLACES) {
        rc = link_over(dir, path, text);
    }
    if (rc < 0) {
        int error = errno;
        name_forget(dir, text);
        fuse_reply_err(req, error);
        return;
    }
    reply_new(req, dir, text);
}

/* ---- opening and closing ---- */

static int
open_server(const node *n, int flags)
{
    char path[64];
    flags &= ~(O_APPEND | O_CREAT | O_EXCL | O_NOFOLLOW | O_DIRECT | O_TRUNC);
    if ((flags & O_ACCMODE) == O_WRONLY) {
        flags = (flags & ~O_ACCMODE) | O_RDWR;
    }
    return open(path_of(n, path), flags | O_CLOEXEC);
}

/* Shares the blocks of the node's other open files; a file with direct I/O has
 * blocks of its own. */
static void
keep_blocks(file *f, bool direct)
{
    node *n = f->node;
    if (direct) {
        f->read = blocks_open();
        return;
    }
    pthread_mutex_lock(&n->mutex);
    if (n->read == NULL) {
        n->read = blocks_open();
    } else {
        blocks_share(n->read);
    }
    f->read = n->read;
    pthread_mutex_unlock(&n->mutex);
}

static void
forget_blocks(const file *f)
{
    node *n = f->node;
    pthread_mutex_lock(&n->mutex);
    if (f->read != NULL && blocks_close(f->read) && n->read == f->read) {
        n->read = NULL;
    }
    pthread_mutex_unlock(&n->mutex);
}

/* Takes the descriptor over. */
static int
make_file(node *n, int fd, struct fuse_file_info *fi)
{
    file *f = malloc(sizeof *f);
    if (f == NULL) {
        close(fd);
        return ENOMEM;
    }
    *f = (file){.node = n, .fd = fd};
    if (chosen.pages == PAGES_STAY) {
        keep_blocks(f, (fi->flags & O_DIRECT) != 0);
    }
    fi->fh = (uintptr_t)f;
    return 0;
}

/* Close-to-open: checks whether the kernel's pages are still the server's. */
static int
revalidate(node *n, bool *same)
{
    uint64_t before = n->seen;
    *same = true;
    if (chosen.open == OPEN_TRUSTS_CACHE) {
        return 0;
    }
    struct stat st;
    if (fstatat(n->fd, "", &st, AT_EMPTY_PATH) < 0) {
        return errno;
    }
    if (is_gone(&st, n)) {
        name_forget_all(n);
        return ESTALE; /* has the kernel look the name up again */
    }
    int error = ask(n);
    *same = n->seen == before;
    if (!*same) {
        fuse_lowlevel_notify_inval_inode(session, ino_of(n), -1, 0);
    }
    return error;
}

static void
do_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    bool same;
    node *n = node_at(ino);
    int error = revalidate(n, &same);
    if (error == 0 && chosen.direct == DIRECT_REFUSED &&
        (fi->flags & O_DIRECT) != 0) {
        error = EINVAL;
    }
    if (error == 0) {
        int fd = open_server(n, fi->flags);
        error = fd < 0 ? errno : make_file(n, fd, fi);
    }
    if (error != 0) {
        fuse_reply_err(req, error);
        return;
    }
    fi->keep_cache = same;
    fi->direct_io = chosen.maps == MAPS_REFUSED;
    fuse_reply_open(req, fi);
}

static void
do_create(fuse_req_t req, fuse_ino_t parent, const char *text, mode_t mode,
          struct fuse_file_info *fi)
{
    node *dir = node_at(parent), *child;
    struct fuse_entry_param entry;
    int made = openat(dir->fd, text,
                      (fi->flags & O_EXCL) | O_CREAT | O_RDWR | O_NOFOLLOW |
                          O_CLOEXEC, mode);
    int error = made < 0 ? errno : 0;
    changed(dir, text);
    if (error == 0) {
        error = look_up(dir, text, &child);
    }
    if (error != 0) {
        if (made >= 0) {
            close(made);
        }
        fuse_reply_err(req, error);
        return;
    }
    name_remember(dir, text, child);
    (void)ask(child);
    error = make_file(child, made, fi);
    if (error != 0) {
        node_forget(child, 1);
        fuse_reply_err(req, error);
        return;
    }
    fill_entry(&entry, child);
    fi->direct_io = chosen.maps == MAPS_REFUSED;
    fuse_reply_create(req, &entry, fi);
}

static void
do_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    (void)fi;
    fuse_reply_err(req, dirty_flush(node_at(ino)));
}

static void
do_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    file *f = file_of(fi);
    int error = dirty_flush(node_at(ino));
    close(f->fd); /* and its locks fall */
    forget_blocks(f);
    free(f);
    fuse_reply_err(req, error);
}

/* ---- data ---- */

static void
do_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
        struct fuse_file_info *fi)
{
    node *n = node_at(ino);
    int error = chosen.unlinked != UNLINKED_KEPT ? ask(n) : 0;
    error = is_lost(file_of(fi)->held) ? EIO : error;
    char *data = error == 0 ? malloc(size) : NULL;
    if (data == NULL) {
        fuse_reply_err(req, error == 0 ? ENOMEM : error);
        return;
    }
    file *f = file_of(fi);
    ssize_t got = f->read == NULL
                      ? dirty_read(n, f->fd, data, size, offset)
                      : blocks_read(f->read, n, f->fd, data, size, offset);
    if (got < 0) {
        fuse_reply_err(req, EIO);
    } else {
        fuse_reply_buf(req, data, (size_t)got);
    }
    free(data);
}

static void
do_write(fuse_req_t req, fuse_ino_t ino, const char *data, size_t size,
         off_t offset, struct fuse_file_info *fi)
{
    node *n = node_at(ino);
    int error;
    if (is_lost(file_of(fi)->held)) {
        error = EIO;
    } else if ((fi->flags & O_DIRECT) != 0) {
        error = dirty_flush(n);
        if (error == 0 && pwrite(file_of(fi)->fd, data, size, offset) !=
                              (ssize_t)size) {
            error = EIO;
        }
        dirty_count(n);
        version_bump(n, &n->seen);
    } else {
        error = dirty_write(n, file_of(fi)->held, data, size, offset);
    }
    if (error != 0) {
        fuse_reply_err(req, error);
    } else {
        fuse_reply_write(req, size);
    }
}

static void
do_fsync(fuse_req_t req, fuse_ino_t ino, int datasync,
         struct fuse_file_info *fi)
{
    (void)datasync, (void)fi;
    fuse_reply_err(req, chosen.fsync == FSYNC_NOTHING
                            ? 0
                            : dirty_flush(node_at(ino)));
}

static void
do_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t offset,
             off_t length, struct fuse_file_info *fi)
{
    node *n = node_at(ino);
    int error = dirty_flush(n);
    error = is_lost(file_of(fi)->held) ? EIO : error;
    if (error == 0 && mode != 0 && chosen.punch == PUNCH_UNSUPPORTED) {
        error = EOPNOTSUPP;
    }
    if (error == 0 && fallocate(file_of(fi)->fd, mode, offset, length) < 0) {
        error = errno;
    }
    dirty_count(n);
    version_bump(n, &n->seen);
    fuse_reply_err(req, error);
}

static void
do_lseek(fuse_req_t req, fuse_ino_t ino, off_t offset, int whence,
         struct fuse_file_info *fi)
{
    int error = dirty_flush(node_at(ino));
    off_t found = error == 0 ? lseek(file_of(fi)->fd, offset, whence) : -1;
    if (found < 0) {
        fuse_reply_err(req, error == 0 ? errno : error);
    } else {
        fuse_reply_lseek(req, found);
    }
}

static void
do_statfs(fuse_req_t req, fuse_ino_t ino)
{
    struct statvfs space;
    (void)ino;
    if (fstatvfs(root.fd, &space) < 0) {
        reply(req, -1);
    } else {
        fuse_reply_statfs(req, &space);
    }
}

/* ---- directories ---- */

static void
do_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    node *n = node_at(ino);
    if (chosen.open == OPEN_ASKS) {
        names_expire(n);
    }
    int fd = openat(n->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    if (stream == NULL) {
        reply(req, -1);
        return;
    }
    fi->fh = (uintptr_t)stream;
    fuse_reply_open(req, fi);
}

static void
do_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
           struct fuse_file_info *fi)
{
    (void)ino;
    DIR *stream = (DIR *)(uintptr_t)fi->fh;
    char *data = malloc(size);
    size_t used = 0;
    if (data == NULL) {
        fuse_reply_err(req, ENOMEM);
        return;
    }
    if (offset == 0) {
        rewinddir(stream);
    } else {
        seekdir(stream, offset);
    }
    for (;;) {
        const struct dirent *found = readdir(stream);
        if (found == NULL) {
            break;
        }
        struct stat st = {.st_ino = found->d_ino,
                          .st_mode = (mode_t)DTTOIF(found->d_type)};
        size_t length = fuse_add_direntry(req, data + used, size - used,
                                          found->d_name, &st, telldir(stream));
        if (length > size - used) {
            break;
        }
        used += length;
    }
    fuse_reply_buf(req, data, used);
    free(data);
}

static void
do_releasedir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    (void)ino;
    closedir((DIR *)(uintptr_t)fi->fh);
    fuse_reply_err(req, 0);
}

/* Does nothing: names reach the server at once. */
static void
do_fsyncdir(fuse_req_t req, fuse_ino_t ino, int datasync,
            struct fuse_file_info *fi)
{
    (void)ino, (void)datasync, (void)fi;
    fuse_reply_err(req, 0);
}

/* ---- locks ---- */

static void
do_getlk(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi,
         struct flock *lock)
{
    (void)ino;
    lock->l_pid = 0;
    if (fcntl(file_of(fi)->fd, F_OFD_GETLK, lock) < 0) {
        reply(req, -1);
    } else {
        fuse_reply_lock(req, lock);
    }
}

/* Returns whether a fault answers the lock. */
static bool
lock_fails(fuse_req_t req)
{
    if (chosen.locks == LOCKS_REFUSED) {
        fuse_reply_err(req, ENOLCK);
    } else if (chosen.locks == LOCKS_IGNORED) {
        fuse_reply_err(req, 0);
    }
    return chosen.locks == LOCKS_REFUSED || chosen.locks == LOCKS_IGNORED;
}

static void
do_setlk(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi,
         struct flock *lock, int wait)
{
    (void)ino;
    file *f = file_of(fi);
    lock->l_pid = 0;
    if (f->held == 0 && lock->l_type != F_UNLCK) {
        f->held = held_now();
    }
    if (!lock_fails(req)) {
        reply(req, fcntl(f->fd, wait ? F_OFD_SETLKW : F_OFD_SETLK, lock));
    }
}

static void
do_flock(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi, int what)
{
    (void)ino;
    if (!lock_fails(req)) {
        reply(req, flock(file_of(fi)->fd, what));
    }
}

/* Drops all locks of this host at SIGUSR1, as a server does for a host that
 * has been silent for long.  The host only notices by the option `lost`. */
static void
drop_locks(int number)
{
    enum { MAX_COUNT = 1 << 14 };
    (void)number;
    atomic_fetch_add(&drops, 1);
    for (int fd = 0; fd < MAX_COUNT; fd++) {
        struct flock all = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
        (void)fcntl(fd, F_OFD_SETLK, &all);
    }
}

/* ---- starting ---- */

static void
do_init(void *data, struct fuse_conn_info *conn)
{
    (void)data;
    conn->want &= ~(unsigned)(FUSE_CAP_ATOMIC_O_TRUNC |
                              FUSE_CAP_WRITEBACK_CACHE);
    if (chosen.locks == LOCKS_LOCAL) {
        conn->want &= ~(unsigned)(FUSE_CAP_POSIX_LOCKS | FUSE_CAP_FLOCK_LOCKS);
    }
    conn->max_write = 1 << 20;
}

static const struct fuse_lowlevel_ops operations = {
    .init = do_init,
    .lookup = do_lookup,
    .forget = do_forget,
    .getattr = do_getattr,
    .setattr = do_setattr,
    .mkdir = do_mkdir,
    .mknod = do_mknod,
    .unlink = do_unlink,
    .rmdir = do_rmdir,
    .rename = do_rename,
    .link = do_link,
    .open = do_open,
    .create = do_create,
    .read = do_read,
    .write = do_write,
    .flush = do_flush,
    .release = do_release,
    .fsync = do_fsync,
    .opendir = do_opendir,
    .readdir = do_readdir,
    .releasedir = do_releasedir,
    .fsyncdir = do_fsyncdir,
    .statfs = do_statfs,
    .getlk = do_getlk,
    .setlk = do_setlk,
    .flock = do_flock,
    .fallocate = do_fallocate,
    .lseek = do_lseek,
};

/* Returns the index of a word, or ends the program. */
static int
choose(const char *option, const char *value, const char *const *words)
{
    for (int i = 0; words[i] != NULL; i++) {
        if (strcmp(words[i], value) == 0) {
            return i;
        }
    }
    fprintf(stderr, "sharedfs: %s cannot be '%s'\n", option, value);
    exit(2);
}

#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void
take_option(const char *text)
{
    char option[32] = "";
    const char *value = strchr(text, '=');
    if (value != NULL && (size_t)(value - text) < sizeof option) {
        memcpy(option, text, (size_t)(value++ - text));
    }
    if (strcmp(option, "locks") == 0) {
        chosen.locks = choose(option, value, WORDS("shared", "refused",
                                                   "local", "ignored"));
    } else if (strcmp(option, "link") == 0) {
        chosen.link = choose(option, value, WORDS("exclusive", "replaces"));
    } else if (strcmp(option, "rename") == 0) {
        chosen.rename = choose(option, value, WORDS("atomic", "gap"));
    } else if (strcmp(option, "fsync") == 0) {
        chosen.fsync = choose(option, value, WORDS("writes", "nothing"));
    } else if (strcmp(option, "open") == 0) {
        chosen.open = choose(option, value, WORDS("asks", "trusts"));
    } else if (strcmp(option, "unlinked") == 0) {
        chosen.unlinked = choose(option, value, WORDS("kept", "stale", "missing"));
    } else if (strcmp(option, "punch") == 0) {
        chosen.punch = choose(option, value, WORDS("works", "unsupported"));
    } else if (strcmp(option, "pages") == 0) {
        chosen.pages = choose(option, value, WORDS("follow", "stay"));
    } else if (strcmp(option, "maps") == 0) {
        chosen.maps = choose(option, value, WORDS("work", "refused"));
    } else if (strcmp(option, "direct") == 0) {
        chosen.direct = choose(option, value, WORDS("works", "refused"));
    } else if (strcmp(option, "lost") == 0) {
        chosen.lost = choose(option, value, WORDS("silent", "error"));
    } else if (strcmp(option, "attributes") == 0) {
        chosen.attributes = strtod(value, NULL);
    } else if (strcmp(option, "names") == 0) {
        chosen.names = strtod(value, NULL);
    } else {
        fprintf(stderr, "sharedfs: there is no option '%s'\n", text);
        exit(2);
    }
}

static int
open_root(const char *backing)
{
    struct stat st;
    root.fd = open(backing, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root.fd < 0 || fstat(root.fd, &st) < 0) {
        return -1;
    }
    root.dev = st.st_dev;
    root.ino = st.st_ino;
    root.lookups = 1;
    root.memory = root.server = -1;
    pthread_mutex_init(&root.mutex, NULL);
    return ask(&root) == 0 ? 0 : -1;
}

static int
serve(const char *mountpoint)
{
    char *words[] = {"sharedfs", "-o",
                     "allow_other,default_permissions,fsname=sharedfs"};
    struct fuse_args args = FUSE_ARGS_INIT(3, words);
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    session = fuse_session_new(&args, &operations, sizeof operations, NULL);
    if (session == NULL || fuse_session_mount(session, mountpoint) != 0) {
        return 1;
    }
    fuse_loop_cfg_set_max_threads(config, 64);
    int rc = fuse_session_loop_mt(session, config);
    fuse_session_unmount(session);
    return rc;
}

int
main(int argc, char **argv)
{
    struct rlimit files = {1 << 19, 1 << 19};
    if (argc < 4) {
        fprintf(stderr, "usage: sharedfs BACKING MOUNTPOINT VERSIONS "
                        "[OPTION=VALUE...]\n");
        return 2;
    }
    for (int i = 4; i < argc; i++) {
        take_option(argv[i]);
    }
    umask(0);
    (void)setrlimit(RLIMIT_NOFILE, &files);
    (void)signal(SIGUSR1, drop_locks);
    if (versions_open(argv[3]) < 0 || open_root(argv[1]) < 0) {
        perror("sharedfs");
        return 1;
    }
    return serve(argv[2]);
}
