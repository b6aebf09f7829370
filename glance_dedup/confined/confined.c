/* SPDX-License-Identifier: Apache-2.0 */
/*
 * confined.c - the program that parses files of disk formats and inflates their
 * clusters, in place of processes that have something to lose.
 *
 * It has two pipes, 0 and 1, and fixed memory. Before it gets the first byte of
 * an image, it installs a filter: the kernel then kills it at any system call but
 * read, write and exit. So code that an image has taken over can only send other
 * frames than it should, about this very image. Its parent takes them for claims.
 *
 * A frame has a kind (4), zeros (4) and two numbers, a and b (8 each), all
 * little-endian, and then perhaps bytes:
 *
 *     1 HELLO    a VERSION; the first frame: the program is confined now
 *     2 READ     a offset in the file, b length; the parent answers with these
 *                bytes alone
 *     3 PIECE    a offset on the disk, b length; then place (8), kind, room,
 *                least and most plain bytes (4 each)
 *     4 END      a format, b size of the disk
 *     5 REFUSED  a length of the reason, which follows
 *     6 PLAIN    a length of the stream, b length of the plain bytes, which
 *                follow; both are 0 if the stream is damaged
 *
 * The parent sends the size of the file (8), and answers READ. After END or
 * REFUSED it may send streams: kind, room, least and most plain bytes (4 each)
 * and the room's bytes. The program answers each with PLAIN. It ends with its
 * input.
 */
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <zlib.h>

#include "engine/base/coding.h"
#include "engine/disk/diskformat.h"

enum { HELLO = 1, READ, PIECE, END, REFUSED, PLAIN };

enum {
    VERSION = 1,
    FRAME = 24,
    STRETCH = 24, /* of a piece, behind its frame */
    STREAM = 16,  /* in front of a stream */
    MAX_STREAM = 2 * GD_DISK_MAX_CLUSTER,
    ARENA = 64 << 10, /* inflating takes 7 KiB and a window of 32 */
    MEMORY = 64 << 20,
};

static uint8_t stream[MAX_STREAM], plain[GD_DISK_MAX_CLUSTER], arena[ARENA];
static uint8_t unsent[64 << 10]; /* a write for each piece would be slow */
static size_t arena_used, unsent_length;

/* The C library's exit makes another call. */
static _Noreturn void
leave(int status)
{
    for (;;) {
        syscall(SYS_exit, status);
    }
}

/* A pipe that is closed amid a frame, or fails, ends the program. */
static void
write_all(const uint8_t *bytes, size_t length)
{
    while (length > 0) {
        ssize_t n = write(1, bytes, length);
        if (n <= 0) {
            leave(1);
        }
        bytes += n;
        length -= (size_t)n;
    }
}

static void
send_unsent(void)
{
    write_all(unsent, unsent_length);
    unsent_length = 0;
}

static void
send_bytes(const uint8_t *bytes, size_t length)
{
    if (length > sizeof unsent - unsent_length) {
        send_unsent();
    }
    if (length > sizeof unsent) {
        write_all(bytes, length);
    } else {
        memcpy(unsent + unsent_length, bytes, length);
        unsent_length += length;
    }
}

static void
receive(uint8_t *bytes, size_t length)
{
    send_unsent();
    while (length > 0) {
        ssize_t n = read(0, bytes, length);
        if (n <= 0) {
            leave(n == 0 ? 0 : 1);
        }
        bytes += n;
        length -= (size_t)n;
    }
}

static void
send_frame(uint32_t kind, uint64_t a, uint64_t b)
{
    uint8_t frame[FRAME] = {0};
    gd_put32(frame, kind);
    gd_put64(frame + 8, a);
    gd_put64(frame + 16, b);
    send_bytes(frame, FRAME);
}

static gd_status
read_file(void *arg, uint8_t *out, size_t length, uint64_t offset,
          gd_error *err)
{
    (void)arg;
    (void)err;
    send_frame(READ, offset, length);
    receive(out, length);
    return GD_OK;
}

static gd_status
take_piece(void *arg, const gd_disk_piece *piece, gd_error *err)
{
    uint8_t stretch[STRETCH];
    (void)arg;
    (void)err;
    gd_put64(stretch, piece->place);
    gd_put32(stretch + 8, piece->kind);
    gd_put32(stretch + 12, piece->room);
    gd_put32(stretch + 16, piece->min_plain);
    gd_put32(stretch + 20, piece->max_plain);
    send_frame(PIECE, piece->offset, piece->length);
    send_bytes(stretch, STRETCH);
    return GD_OK;
}

/* zlib's own allocation would be a system call. */
static voidpf
take_memory(voidpf arg, uInt items, uInt size)
{
    size_t length = ((size_t)items * size + 15) / 16 * 16;
    (void)arg;
    if (length > ARENA - arena_used) {
        return Z_NULL;
    }
    arena_used += length;
    return arena + arena_used - length;
}

static void
give_memory(voidpf arg, voidpf memory)
{
    (void)arg;
    (void)memory;
}

static void
inflate_stream(const uint8_t *head)
{
    uint32_t kind = gd_get32(head), room = gd_get32(head + 4);
    uint32_t least = gd_get32(head + 8), most = gd_get32(head + 12);
    if (room > MAX_STREAM || most > GD_DISK_MAX_CLUSTER) {
        leave(1); /* the parent checked them */
    }
    receive(stream, room);
    z_stream z = {.zalloc = take_memory, .zfree = give_memory,
                  .next_in = stream, .avail_in = room,
                  .next_out = plain, .avail_out = most};
    arena_used = 0;
    int bits = kind == GD_DISK_ZLIB ? MAX_WBITS : -MAX_WBITS;
    bool whole = inflateInit2(&z, bits) == Z_OK &&
                 inflate(&z, Z_FINISH) == Z_STREAM_END && z.total_out >= least;
    send_frame(PLAIN, whole ? z.total_in : 0, whole ? z.total_out : 0);
    send_bytes(plain, whole ? z.total_out : 0);
}

static void
limit(int resource, rlim_t most)
{
    struct rlimit l = {most, most};
    if (setrlimit((__rlimit_resource_t)resource, &l) != 0) {
        exit(2);
    }
}

#define LOAD(field) \
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
/* Runs the next instruction only if the value is this one, or another. */
#define IF(value) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 1)
#define UNLESS(value) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 1, 0)
#define RETURN(action) BPF_STMT(BPF_RET | BPF_K, action)

/* Not the strict mode, which the kernel refuses where a filter is in place
 * already, as below systemd or in a container. */
static void
allow_only_read_write_exit(void)
{
    struct sock_filter rules[] = {
#ifdef __x86_64__ /* elsewhere a process has one set of numbers only */
        LOAD(arch),
        UNLESS(AUDIT_ARCH_X86_64), RETURN(SECCOMP_RET_KILL_PROCESS),
#endif
        LOAD(nr),
        IF(SYS_read), RETURN(SECCOMP_RET_ALLOW),
        IF(SYS_write), RETURN(SECCOMP_RET_ALLOW),
        IF(SYS_exit), RETURN(SECCOMP_RET_ALLOW),
        RETURN(SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog filter = {sizeof rules / sizeof rules[0], rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) {
        exit(2);
    }
}

static void
confine(const char *seconds)
{
    limit(RLIMIT_AS, MEMORY);
    limit(RLIMIT_CPU, strtoul(seconds, NULL, 10));
    limit(RLIMIT_NOFILE, 0);
    limit(RLIMIT_NPROC, 0);
    limit(RLIMIT_CORE, 0);
    allow_only_read_write_exit();
}

int
main(int argc, char **argv)
{
    uint8_t head[STREAM];
    gd_disk_format format;
    uint64_t disk;
    gd_error err;
    if (argc != 2) {
        exit(2);
    }
    confine(argv[1]); /* seconds of processor time */
    send_frame(HELLO, VERSION, 0);
    receive(head, 8);
    gd_disk_file file = {read_file, NULL, gd_get64(head), take_piece, NULL};
    if (gd_diskformat_map(&file, &format, &disk, &err) == GD_OK) {
        send_frame(END, format, disk);
    } else {
        send_frame(REFUSED, strlen(err.text), 0);
        send_bytes((const uint8_t *)err.text, strlen(err.text));
    }
    for (;;) {
        receive(head, STREAM);
        inflate_stream(head);
    }
}
