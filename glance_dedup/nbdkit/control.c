/* SPDX-License-Identifier: Apache-2.0 */
/*
 * control.c - see control.h.
 */
#include "nbdkit/control.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "engine/volume/volumenames.h"
#include "nbdkit/monotonic.h"

enum {
    MAX_CLIENTS = 16,
    PATIENCE_MS = 5000, /* for a request, and for an answer */
    PAUSE_MS = 100,     /* when the process lacks descriptors or threads */
};

struct gd_nbdkit_control {
    gd_nbdkit_served served;
    int directory; /* the volume's */
    int listener;
    int stop;      /* an eventfd, readable from the stop on */
    bool bound;
    uid_t user;
    bool shared;   /* the group may connect, too */
    gid_t group;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t fewer; /* clients */
    unsigned clients;     /* guarded by mutex, as is stopping */
    bool stopping;
};

typedef struct client {
    gd_nbdkit_control *control;
    int fd;
} client;

/* ---- one client ---- */

/* Waits for the socket until the deadline.  False: it passed, or the server
 * stops. */
static bool
wait_for(const client *c, short events, uint64_t deadline_ms)
{
    for (;;) {
        uint64_t now = gd_nbdkit_now_ms();
        struct pollfd fds[2] = {{.fd = c->fd, .events = events},
                                {.fd = c->control->stop, .events = POLLIN}};
        if (now >= deadline_ms) {
            return false;
        }
        int rc = poll(fds, 2, (int)(deadline_ms - now));
        if (rc < 0 && errno != EINTR) {
            return false;
        }
        if (rc > 0) {
            return fds[1].revents == 0;
        }
    }
}

/* Receives up to the line feed; *length is without it.  False: the peer went,
 * was too slow, or sent too much. */
static bool
receive_line(const client *c, char line[GD_NBDKIT_LINE], size_t *length)
{
    uint64_t deadline = gd_nbdkit_now_ms() + PATIENCE_MS;
    size_t received = 0;
    while (received < GD_NBDKIT_LINE && wait_for(c, POLLIN, deadline)) {
        ssize_t n = recv(c->fd, line + received, GD_NBDKIT_LINE - received, 0);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            continue;
        }
        if (n <= 0) {
            return false;
        }
        const char *end = memchr(line + received, '\n', (size_t)n);
        received += (size_t)n;
        if (end != NULL) {
            *length = (size_t)(end - line);
            return *length + 1 == received;
        }
    }
    return false;
}

static void
send_answer(const client *c, const gd_nbdkit_answer *answer)
{
    uint64_t deadline = gd_nbdkit_now_ms() + PATIENCE_MS;
    size_t sent = 0;
    while (sent < answer->length) {
        ssize_t n = send(c->fd, answer->text + sent, answer->length - sent,
                         MSG_NOSIGNAL);
        if (n >= 0) {
            sent += (size_t)n;
        } else if ((errno != EAGAIN && errno != EINTR) ||
                   !wait_for(c, POLLOUT, deadline)) {
            return;
        }
    }
}

static void *
serve_client(void *arg)
{
    client *c = arg;
    gd_nbdkit_control *control = c->control;
    char line[GD_NBDKIT_LINE];
    size_t length;
    gd_nbdkit_answer answer;
    if (receive_line(c, line, &length)) {
        gd_nbdkit_request_run(&control->served, line, length, &answer);
    } else {
        gd_nbdkit_request_refuse("a request is one line, sent at once",
                                 &answer);
    }
    send_answer(c, &answer);
    close(c->fd);
    free(c);
    pthread_mutex_lock(&control->mutex);
    control->clients--;
    pthread_cond_broadcast(&control->fewer);
    pthread_mutex_unlock(&control->mutex);
    return NULL;
}

/* ---- clients ---- */

/* Returns whether the group's id is among the peer's groups. */
static bool
is_in_group(int fd, const struct ucred *peer, gid_t group)
{
    socklen_t bytes = 0;
    bool found = peer->gid == group;
    if (found || getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, NULL, &bytes) == 0 ||
        errno != ERANGE) {
        return found;
    }
    gid_t *groups = malloc(bytes);
    if (groups != NULL &&
        getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, groups, &bytes) == 0) {
        for (size_t i = 0; i < bytes / sizeof groups[0]; i++) {
            found = found || groups[i] == group;
        }
    }
    free(groups);
    return found;
}

static bool
may_connect(const gd_nbdkit_control *control, int fd)
{
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) < 0) {
        return false;
    }
    return peer.uid == 0 || peer.uid == control->user ||
           (control->shared && is_in_group(fd, &peer, control->group));
}

/* Gives the descriptor to a thread of its own; false: there is none. */
static bool
start_client(gd_nbdkit_control *control, int fd)
{
    client *c = malloc(sizeof *c);
    pthread_attr_t detached;
    pthread_t thread;
    if (c == NULL) {
        return false;
    }
    *c = (client){.control = control, .fd = fd};
    pthread_mutex_lock(&control->mutex);
    control->clients++;
    pthread_mutex_unlock(&control->mutex);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    bool started = pthread_create(&thread, &detached, serve_client, c) == 0;
    pthread_attr_destroy(&detached);
    if (!started) {
        pthread_mutex_lock(&control->mutex);
        control->clients--;
        pthread_mutex_unlock(&control->mutex);
        free(c);
    }
    return started;
}

/* Waits until another client may come.  False: the server stops. */
static bool
wait_for_place(gd_nbdkit_control *control)
{
    pthread_mutex_lock(&control->mutex);
    while (control->clients >= MAX_CLIENTS && !control->stopping) {
        pthread_cond_wait(&control->fewer, &control->mutex);
    }
    bool go_on = !control->stopping;
    pthread_mutex_unlock(&control->mutex);
    return go_on;
}

static void *
accept_clients(void *arg)
{
    gd_nbdkit_control *control = arg;
    while (wait_for_place(control)) {
        struct pollfd fds[2] = {{.fd = control->listener, .events = POLLIN},
                                {.fd = control->stop, .events = POLLIN}};
        if (poll(fds, 2, -1) < 0 || fds[0].revents == 0) {
            continue;
        }
        int fd = accept4(control->listener, NULL, NULL,
                         SOCK_CLOEXEC | SOCK_NONBLOCK);
        bool lacking = fd < 0 && errno != EAGAIN && errno != ECONNABORTED;
        if (fd >= 0 && !may_connect(control, fd)) {
            close(fd);
        } else if (fd >= 0 && !start_client(control, fd)) {
            close(fd);
            lacking = true;
        }
        if (lacking) {
            poll(&fds[1], 1, PAUSE_MS);
        }
    }
    return NULL;
}

/* ---- the socket ---- */

static gd_status
find_users(gd_nbdkit_control *control, const gd_repo *repo, gd_error *err)
{
    struct stat st;
    if (fstat(repo->root, &st) < 0) {
        return gd_fail_errno(err, errno,
                             "cannot stat the repository's directory");
    }
    control->user = geteuid();
    control->group = st.st_gid;
    control->shared = (st.st_mode & S_IWGRP) != 0;
    return GD_OK;
}

/* Binds by the directory's descriptor: the volume's path may be longer than an
 * address has room for. */
static gd_status
listen_in(gd_nbdkit_control *control, const char *path, gd_error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path,
             "/proc/self/fd/%d/" GD_VOLUME_CONTROL, control->directory);
    if (unlinkat(control->directory, GD_VOLUME_CONTROL, 0) < 0 &&
        errno != ENOENT) {
        return gd_fail_errno(err, errno, "cannot remove %s", path);
    }
    /* The file gets the mode of the socket, less what the umask takes. */
    if (fchmod(control->listener, 0600) < 0 ||
        bind(control->listener, (struct sockaddr *)&address,
             sizeof address) < 0) {
        return gd_fail_errno(err, errno, "cannot make %s", path);
    }
    control->bound = true;
    mode_t mode = control->shared ? 0660 : 0600;
    if (fchmodat(control->directory, GD_VOLUME_CONTROL, mode, 0) < 0 ||
        listen(control->listener, MAX_CLIENTS) < 0) {
        return gd_fail_errno(err, errno, "cannot listen at %s", path);
    }
    return GD_OK;
}

static gd_status
start(gd_nbdkit_control *control, gd_error *err)
{
    const gd_repo *repo = control->served.repo;
    const char *name = control->served.settings->volume;
    char directory[GD_NAME_SIZE], path[GD_NAME_SIZE];
    gd_volume_directory(name, directory);
    gd_volume_file_name(name, GD_VOLUME_CONTROL, path);
    GD_TRY(find_users(control, repo, err));
    control->directory = openat(repo->root, directory,
                                O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    control->stop = eventfd(0, EFD_CLOEXEC);
    control->listener =
        socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (control->directory < 0 || control->stop < 0 || control->listener < 0) {
        return gd_fail_errno(err, errno, "cannot serve %s", path);
    }
    GD_TRY(listen_in(control, path, err));
    int rc = pthread_create(&control->thread, NULL, accept_clients, control);
    return rc == 0 ? GD_OK
                   : gd_fail_errno(err, rc, "cannot start the thread for %s",
                                   path);
}

static void
close_open(int fd)
{
    if (fd >= 0) {
        close(fd);
    }
}

static void
release(gd_nbdkit_control *control)
{
    if (control->bound) {
        unlinkat(control->directory, GD_VOLUME_CONTROL, 0);
    }
    close_open(control->listener);
    close_open(control->stop);
    close_open(control->directory);
    pthread_cond_destroy(&control->fewer);
    pthread_mutex_destroy(&control->mutex);
    free(control);
}

gd_status
gd_nbdkit_control_start(const gd_nbdkit_served *served,
                        gd_nbdkit_control **out, gd_error *err)
{
    gd_nbdkit_control *control = calloc(1, sizeof *control);
    if (control == NULL) {
        return gd_fail(err, GD_NOMEM, "no memory to serve the volume");
    }
    control->served = *served;
    control->directory = control->listener = control->stop = -1;
    pthread_mutex_init(&control->mutex, NULL);
    pthread_cond_init(&control->fewer, NULL);
    gd_status s = start(control, err);
    if (s != GD_OK) {
        release(control);
        return s;
    }
    *out = control;
    return GD_OK;
}

void
gd_nbdkit_control_stop(gd_nbdkit_control *control)
{
    uint64_t one = 1;
    /* An eventfd takes a first write in any case. */
    (void)!write(control->stop, &one, sizeof one);
    pthread_mutex_lock(&control->mutex);
    control->stopping = true;
    pthread_cond_broadcast(&control->fewer);
    pthread_mutex_unlock(&control->mutex);
    pthread_join(control->thread, NULL);
    pthread_mutex_lock(&control->mutex);
    while (control->clients > 0) {
        pthread_cond_wait(&control->fewer, &control->mutex);
    }
    pthread_mutex_unlock(&control->mutex);
    release(control);
}
