/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deflate.c - the encoder's speed beside zlib's; see deflate.py.
 *
 * Both deflate each cluster in turns, in one thread, so that what else the
 * machine does hits both. The time is the thread's own.
 */
#include <string.h>
#include <zlib.h>

#include "benchmarks/program.h"
#include "engine/deflate/deflate.h"

enum { MAX_ROOM = 2 * GD_DEFLATE_MAX_PLAIN };

typedef struct sums {
    double zlib, ours, *ratios;
    uint64_t plain, stream;
    size_t clusters;
} sums;

static uint8_t by_zlib[MAX_ROOM], by_us[MAX_ROOM];

static int
ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void
measure(z_stream *z, gd_deflate *encoder, uint8_t *plain, size_t length,
        sums *to)
{
    double start = seconds(CLOCK_THREAD_CPUTIME_ID);
    z->next_in = plain;
    z->avail_in = (uInt)length;
    z->next_out = by_zlib;
    z->avail_out = MAX_ROOM;
    if (deflateReset(z) != Z_OK || deflate(z, Z_FINISH) != Z_STREAM_END) {
        give_up("zlib failed");
    }
    double middle = seconds(CLOCK_THREAD_CPUTIME_ID);
    size_t used = gd_deflate_encode(encoder, plain, length, by_us, MAX_ROOM);
    double end = seconds(CLOCK_THREAD_CPUTIME_ID);
    if (used != z->total_out || memcmp(by_zlib, by_us, used) != 0) {
        give_up("the bytes are not zlib's");
    }
    to->zlib += middle - start;
    to->ours += end - middle;
    to->ratios[to->clusters++] = (middle - start) / (end - middle);
    to->plain += length;
    to->stream += used;
}

static bool
is_zero(const uint8_t *plain, size_t length)
{
    return plain[0] == 0 && memcmp(plain, plain + 1, length - 1) == 0;
}

int
main(int argc, char **argv)
{
    if (argc < 6) {
        give_up("LEVEL WINDOW MEMORY CLUSTER_KIB FILE...");
    }
    gd_deflate_params params = {(uint8_t)atoi(argv[1]), (uint8_t)atoi(argv[2]),
                                (uint8_t)atoi(argv[3]), 0, false};
    size_t cluster = (size_t)atoi(argv[4]) * 1024, length;
    gd_deflate *encoder;
    gd_error err;
    z_stream z = {0};
    if (cluster == 0 || cluster > GD_DEFLATE_MAX_PLAIN ||
        gd_deflate_open(gd_env_posix(), &params, &encoder, &err) != GD_OK ||
        deflateInit2(&z, params.level, Z_DEFLATED, -params.window_bits,
                     params.memory_level, 0) != Z_OK) {
        give_up("there are no such parameters");
    }
    sums sum = {0};
    for (int i = 5; i < argc; i++) {
        uint8_t *plain = load_file(argv[i], &length);
        sum.ratios = realloc(sum.ratios, (sum.clusters + length / cluster + 1) *
                                             sizeof *sum.ratios);
        for (size_t at = 0; at + cluster <= length; at += cluster) {
            if (!is_zero(plain + at, cluster)) {
                measure(&z, encoder, plain + at, cluster, &sum);
            }
        }
        free(plain);
    }
    if (sum.clusters == 0) {
        give_up("no cluster has data");
    }
    qsort(sum.ratios, sum.clusters, sizeof *sum.ratios, ascending);
    printf("%zu clusters, %.1f %% left: zlib %.1f MB/s, equal bytes %.1f MB/s; "
           "%.2f times (median of clusters %.2f)\n", sum.clusters,
           100.0 * (double)sum.stream / (double)sum.plain,
           (double)sum.plain / 1e6 / sum.zlib,
           (double)sum.plain / 1e6 / sum.ours, sum.zlib / sum.ours,
           sum.ratios[sum.clusters / 2]);
    return 0;
}
