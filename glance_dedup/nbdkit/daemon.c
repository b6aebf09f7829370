/* SPDX-License-Identifier: Apache-2.0 */
/*
 * daemon.c - see daemon.h.
 */
#include "nbdkit/daemon.h"

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "nbdkit/monotonic.h"

enum {
    REQUEST = 1024,
    ANSWER = 8192, /* more than any answer to a request of ours */
};

static gd_status
fail(int number, gd_error *err)
{
    return gd_fail(err, GD_UNAVAILABLE, "%s", strerror(number));
}

static gd_status
wait_for(int fd, short events, uint64_t deadline_ms, gd_error *err)
{
    for (;;) {
        uint64_t now = gd_nbdkit_now_ms();
        struct pollfd one = {.fd = fd, .events = events};
        if (now >= deadline_ms) {
            return gd_fail(err, GD_UNAVAILABLE, "it did not answer in time");
        }
        int rc = poll(&one, 1, (int)(deadline_ms - now));
        if (rc > 0) {
            return GD_OK;
        }
        if (rc < 0 && errno != EINTR) {
            return fail(errno, err);
        }
    }
}

/* A full queue of connections is EAGAIN, however long one waits. */
static gd_status
connect_to(const char *path, int *fd, gd_error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        return fail(ENAMETOOLONG, err);
    }
    strcpy(address.sun_path, path);
    *fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (*fd < 0) {
        return fail(errno, err);
    }
    if (connect(*fd, (struct sockaddr *)&address, sizeof address) < 0) {
        gd_status s = fail(errno, err);
        close(*fd);
        return s;
    }
    return GD_OK;
}

static gd_status
send_all(int fd, const char *text, size_t length, uint64_t deadline_ms,
         gd_error *err)
{
    gd_status s = GD_OK;
    while (s == GD_OK && length > 0) {
        ssize_t n = send(fd, text, length, MSG_NOSIGNAL);
        if (n >= 0) {
            text += n;
            length -= (size_t)n;
        } else if (errno == EAGAIN || errno == EINTR) {
            s = wait_for(fd, POLLOUT, deadline_ms, err);
        } else {
            s = fail(errno, err);
        }
    }
    return s;
}

/* Receives all that comes, as a string. */
static gd_status
receive_all(int fd, char text[ANSWER], uint64_t deadline_ms, gd_error *err)
{
    size_t received = 0;
    for (;;) {
        ssize_t n = recv(fd, text + received, ANSWER - 1 - received, 0);
        if (n > 0) {
            received += (size_t)n;
        } else if (n == 0) {
            /* Either the end, or there is no room for more. */
            break;
        } else if (errno != EAGAIN && errno != EINTR) {
            return fail(errno, err);
        } else {
            GD_TRY(wait_for(fd, POLLIN, deadline_ms, err));
        }
    }
    text[received] = '\0';
    return GD_OK;
}

/* Copies the sentence out of an error's JSON, as far as it is plain text. */
static void
copy_reason(const char *body, char reason[GD_NBDKIT_REASON])
{
    static const char mark[] = "\"message\":\"";
    const char *at = strstr(body, mark);
    size_t length = 0;
    if (at != NULL) {
        at += strlen(mark);
        for (; *at != '\0' && *at != '"' && length + 1 < GD_NBDKIT_REASON;
             at++) {
            if (*at == '\\' && at[1] != '\0') {
                at++;
            }
            reason[length++] = (unsigned char)*at < ' ' || *at == 0x7f ? '?'
                                                                      : *at;
        }
    }
    reason[length] = '\0';
}

static gd_status
parse(char *text, gd_nbdkit_reply *reply, gd_error *err)
{
    char *body = strstr(text, "\r\n\r\n");
    if (body == NULL || sscanf(text, "HTTP/1.1 %3d ", &reply->code) != 1) {
        return gd_fail(err, GD_UNAVAILABLE,
                       text[0] == '\0' ? "it does not admit this user, or ends"
                                       : "it does not speak HTTP");
    }
    *body = '\0';
    reply->is_own = strcasestr(text, "\r\ndedup-repository:") != NULL;
    copy_reason(body + 4, reply->reason);
    return GD_OK;
}

gd_status
gd_nbdkit_daemon_post(const char *socket, const char *path, const char *json,
                      unsigned timeout_ms, gd_nbdkit_reply *reply,
                      gd_error *err)
{
    char request[REQUEST], answer[ANSWER];
    uint64_t deadline = gd_nbdkit_now_ms() + timeout_ms;
    int fd = -1;
    int length = snprintf(request, sizeof request,
                          "POST %s HTTP/1.1\r\n"
                          "Host: localhost\r\n"
                          "User-Agent: glance-dedup\r\n"
                          "Connection: close\r\n"
                          "Content-Type: application/json\r\n"
                          "Content-Length: %zu\r\n"
                          "\r\n"
                          "%s", path, strlen(json), json);
    if (length < 0 || (size_t)length >= sizeof request) {
        return gd_fail(err, GD_INVALID, "the request to dedupd is too long");
    }
    GD_TRY(connect_to(socket, &fd, err));
    gd_status s = send_all(fd, request, (size_t)length, deadline, err);
    if (s == GD_OK) {
        s = receive_all(fd, answer, deadline, err);
    }
    close(fd);
    return s == GD_OK ? parse(answer, reply, err) : s;
}
