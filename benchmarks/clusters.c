/* SPDX-License-Identifier: Apache-2.0 */
/*
 * clusters.c - how many compressed clusters of files come out equal when they
 * are deflated again; see clusters.py.
 */
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "benchmarks/program.h"
#include "engine/base/coding.h"
#include "engine/deflate/inflate.h"
#include "engine/deflate/paramsearch.h"
#include "engine/disk/diskformat.h"

enum {
    MAX_ROOM = 2 * GD_DISK_MAX_CLUSTER,
    SAMPLES = 8,
    CANDIDATES = 256,
    MIN_STREAM = 1000,
    MAX_SEARCHES = 3,
};

typedef struct stream {
    uint64_t place;
    uint32_t room, min_plain, max_plain;
    uint32_t length, plain_length; /* 0: it is damaged */
    bool has_header;
} stream;

/* Bytes of the disk in a file, by the kind of their pieces. */
typedef struct sums {
    uint64_t plain, compressed, zstd, zeros;
    uint64_t file_bytes; /* of all streams */
    size_t count, room;
    stream *streams;
} sums;

/* Result of one encoder. */
typedef struct outcome {
    size_t clusters;
    uint64_t plain, file_bytes;
    double seconds;
} outcome;

static uint8_t in[MAX_ROOM], plain[GD_DISK_MAX_CLUSTER], out[MAX_ROOM];
static int fd;

static void
load(uint8_t *to, size_t length, uint64_t offset)
{
    if (pread(fd, to, length, (off_t)offset) != (ssize_t)length) {
        give_up("a file cannot be read");
    }
}

static gd_status
read_file(void *arg, uint8_t *to, size_t length, uint64_t offset, gd_error *err)
{
    (void)arg;
    (void)err;
    load(to, length, offset);
    return GD_OK;
}

static gd_status
take_piece(void *arg, const gd_disk_piece *p, gd_error *err)
{
    sums *to = arg;
    (void)err;
    *(p->kind < GD_DISK_PLAIN     ? &to->zeros
      : p->kind == GD_DISK_PLAIN  ? &to->plain
      : p->kind == GD_DISK_ZSTD   ? &to->zstd
                                  : &to->compressed) += p->length;
    if (p->kind != GD_DISK_DEFLATED && p->kind != GD_DISK_ZLIB) {
        return GD_OK;
    }
    if (to->count == to->room) {
        to->room = 2 * to->room + 1000;
        to->streams = realloc(to->streams, to->room * sizeof *to->streams);
    }
    to->streams[to->count++] =
        (stream){p->place,  p->room, p->min_plain, p->max_plain, 0, 0,
                 p->kind == GD_DISK_ZLIB};
    return GD_OK;
}

/* Fills in and plain. */
static void
inflate_stream(stream *s)
{
    gd_inflate_result result;
    gd_error err;
    if (s->room > sizeof in) {
        return;
    }
    load(in, s->room, s->place);
    if (gd_inflate(s->has_header, in, s->room, plain, s->max_plain, &result,
                   &err) != GD_OK) {
        give_up(err.text);
    }
    if (result.complete && result.written >= s->min_plain) {
        s->length = (uint32_t)result.read;
        s->plain_length = (uint32_t)result.written;
    }
}

static uint8_t *
copy_of(const uint8_t *from, size_t length)
{
    uint8_t *copy = malloc(length);
    if (copy == NULL) {
        give_up("no memory");
    }
    return memcpy(copy, from, length);
}

/* Keeps the samples sorted by their streams' lengths. */
static size_t
insert(gd_paramsearch_sample *samples, size_t count, const stream *s)
{
    size_t at = count;
    while (at > 0 && samples[at - 1].stream_length > s->length) {
        at--;
    }
    if (at == SAMPLES) {
        return count;
    }
    memmove(samples + at + 1, samples + at,
            (SAMPLES - at) * sizeof samples[0]); /* there is one more */
    samples[at] = (gd_paramsearch_sample){
        copy_of(plain, s->plain_length), copy_of(in, s->length),
        s->plain_length, s->length};
    return count < SAMPLES ? count + 1 : count;
}

/* Searches on the smallest of the streams from `from` on. */
static bool
find_params(sums *of, size_t from, size_t most, gd_deflate_params *params)
{
    gd_paramsearch_sample samples[SAMPLES + 1];
    size_t count = 0;
    bool found = false;
    gd_error err;
    for (size_t i = from; i < of->count && i - from < most; i++) {
        inflate_stream(&of->streams[i]);
        if (of->streams[i].length >= (most == 1 ? 1 : MIN_STREAM)) {
            count = insert(samples, count, &of->streams[i]);
        }
    }
    if (count > 0 &&
        gd_paramsearch_run(gd_env_posix(), samples, count,
                           of->streams[from].has_header, params, &found,
                           &err) != GD_OK) {
        give_up(err.text);
    }
    return found;
}

static size_t
by_zlib(const gd_deflate_params *p, size_t length)
{
    z_stream z = {.next_in = plain, .avail_in = (uInt)length,
                  .next_out = out, .avail_out = MAX_ROOM};
    if (deflateInit2(&z, p->level, Z_DEFLATED,
                     p->has_header ? p->window_bits : -p->window_bits,
                     p->memory_level, p->strategy) != Z_OK ||
        deflate(&z, Z_FINISH) != Z_STREAM_END || deflateEnd(&z) != Z_OK) {
        give_up("zlib failed");
    }
    return z.total_out;
}

/* Returns whether the bytes are equal, and adds to the outcome. */
static bool
compare(const stream *s, const gd_deflate_params *p, gd_deflate *encoder,
        outcome *to)
{
    double start = seconds(CLOCK_THREAD_CPUTIME_ID);
    size_t length = encoder == NULL
                        ? by_zlib(p, s->plain_length)
                        : gd_deflate_encode(encoder, plain, s->plain_length,
                                            out, MAX_ROOM);
    to->seconds += seconds(CLOCK_THREAD_CPUTIME_ID) - start;
    if (length != s->length || memcmp(in, out, length) != 0) {
        return false;
    }
    to->clusters++;
    to->plain += s->plain_length;
    to->file_bytes += s->length;
    return true;
}

static gd_deflate *
open_encoder(const gd_deflate_params *p)
{
    gd_deflate *encoder;
    gd_error err;
    if (gd_deflate_open(gd_env_posix(), p, &encoder, &err) != GD_OK) {
        give_up(err.text);
    }
    return encoder;
}

static void
print_outcome(const char *name, const outcome *o, const sums *of)
{
    printf("  %-5s %zu of %zu clusters equal (%.2f %%), %.1f of %.1f MB of "
           "streams; %.1f MB/s of plain bytes\n",
           name, o->clusters, of->count,
           100.0 * (double)o->clusters / (double)of->count,
           (double)o->file_bytes / 1e6, (double)of->file_bytes / 1e6,
           o->seconds > 0 ? (double)of->compressed / 1e6 / o->seconds : 0);
}

/* Deflates all streams by both encoders. */
static void
measure(sums *of, gd_deflate_params params)
{
    outcome zlib = {0}, ours = {0};
    gd_deflate *encoder = open_encoder(&params);
    size_t damaged = 0;
    int searches = 1;
    for (size_t i = 0; i < of->count; i++) {
        stream *s = &of->streams[i];
        inflate_stream(s);
        if (s->length == 0) {
            damaged++;
            continue;
        }
        of->file_bytes += s->length;
        compare(s, &params, NULL, &zlib);
        if (!compare(s, &params, encoder, &ours) && searches < MAX_SEARCHES) {
            searches++;
            gd_deflate_params other;
            if (find_params(of, i, 1, &other)) {
                printf("  from stream %zu on: level %d, window %d, memory "
                       "level %d, strategy %d\n", i, other.level,
                       other.window_bits, other.memory_level, other.strategy);
                gd_deflate_close(gd_env_posix(), encoder);
                params = other;
                encoder = open_encoder(&params);
                i--; /* it is compared again */
                of->file_bytes -= s->length;
            }
        }
    }
    print_outcome("zlib", &zlib, of);
    print_outcome("ours", &ours, of);
    if (damaged > 0) {
        printf("  %zu streams are damaged\n", damaged);
    }
    gd_deflate_close(gd_env_posix(), encoder);
}

static void
measure_file(const char *path)
{
    struct stat st;
    sums of = {0};
    gd_error err;
    gd_disk_format format;
    uint64_t size;
    gd_deflate_params params;
    fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &st) != 0) {
        give_up(path);
    }
    gd_disk_file file = {read_file, NULL, (uint64_t)st.st_size, take_piece,
                         &of};
    if (gd_diskformat_map(&file, &format, &size, &err) != GD_OK) {
        printf("%s: %s\n", path, err.text);
        close(fd);
        return;
    }
    printf("%s: %s, %.1f MB; disk of %.1f MB: plain %.1f, deflated %.1f, zstd "
           "%.1f, zeros %.1f\n", path, gd_diskformat_name(format),
           (double)file.size / 1e6, (double)size / 1e6,
           (double)of.plain / 1e6, (double)of.compressed / 1e6,
           (double)of.zstd / 1e6, (double)of.zeros / 1e6);
    if (of.count > 0 && find_params(&of, 0, CANDIDATES, &params)) {
        printf("  level %d, window %d, memory level %d, strategy %d\n",
               params.level, params.window_bits, params.memory_level,
               params.strategy);
        measure(&of, params);
    } else if (of.count > 0) {
        printf("  0 of %zu clusters: no parameters of zlib give the first "
               "ones\n", of.count);
    }
    free(of.streams);
    close(fd);
}

int
main(int argc, char **argv)
{
    if (argc < 2) {
        give_up("FILE...");
    }
    for (int i = 1; i < argc; i++) {
        measure_file(argv[i]);
    }
    return 0;
}
