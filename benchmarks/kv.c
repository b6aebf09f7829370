/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv.c - the rates of one metadata backend.
 *
 *     kv BACKEND PATH KEYS CACHE_BYTES BATCH COMMIT
 *
 * puts KEYS keys in random order, BATCH at a time, with a commit after every
 * COMMIT keys (0: only at the end), closes the store and, unless it is in memory
 * alone, opens it again; then looks up as many keys of it in random order, and
 * as many that are absent.  Prints the seconds of putting, finding and not finding, by the clock
 * and then of processor time; the bytes of memory of its own, and of files
 * mapped, by which the process grew; and the calls of the backend to the disk:
 * reads, bytes read, writes, bytes written and syncs.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "benchmarks/program.h"
#include "engine/base/coding.h"
#include "engine/kv/kv.h"

enum { MAX_COUNT = 65536 }; /* keys in a batch */

static gd_error err;

static void
require(gd_status s)
{
    if (s != GD_OK) {
        give_up(err.text);
    }
}

static uint64_t
key_of(uint64_t n)
{
    return gd_checksum(&n, sizeof n, 1);
}

/* Seconds of the clock, and of processor time of all threads. */
typedef struct spent {
    double wall, cpu;
} spent;

static spent
since(spent start)
{
    return (spent){seconds(CLOCK_MONOTONIC) - start.wall,
                   seconds(CLOCK_PROCESS_CPUTIME_ID) - start.cpu};
}

/* Bytes of the process's memory: "RssAnon" or "RssFile". */
static uint64_t
resident(const char *what)
{
    char line[256];
    unsigned long long kib = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, what, strlen(what)) == 0) {
            sscanf(line + strlen(what), ": %llu", &kib);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return kib * 1024;
}

static void
put_all(gd_kv *kv, uint64_t keys, size_t batch, uint64_t commit)
{
    static gd_kv_pair pairs[MAX_COUNT];
    uint64_t pending = 0;
    for (uint64_t at = 0; at < keys; at += batch) {
        size_t n = keys - at < batch ? (size_t)(keys - at) : batch;
        for (size_t i = 0; i < n; i++) {
            pairs[i] = (gd_kv_pair){key_of(at + i), at + i + 1};
        }
        require(gd_kv_put_batch(kv, pairs, n, &err));
        pending += n;
        if (commit != 0 && pending >= commit) {
            require(gd_kv_commit(kv, &err));
            pending = 0;
        }
    }
    require(gd_kv_commit(kv, &err));
}

/* Looks up numbers from first on, in random order; returns how many are
 * there. */
static uint64_t
get_all(gd_kv *kv, uint64_t first, uint64_t keys, size_t batch)
{
    static uint64_t wanted[MAX_COUNT], values[MAX_COUNT];
    uint64_t found = 0;
    for (uint64_t at = 0; at < keys; at += batch) {
        size_t n = keys - at < batch ? (size_t)(keys - at) : batch;
        for (size_t i = 0; i < n; i++) {
            uint64_t draw = at + i;
            draw = gd_checksum(&draw, sizeof draw, 2);
            wanted[i] = key_of(first + draw % keys);
        }
        require(gd_kv_get_batch(kv, wanted, values, n, &err));
        for (size_t i = 0; i < n; i++) {
            found += values[i] != 0;
        }
    }
    return found;
}

static gd_kv_backend
backend_of(const char *name)
{
    gd_kv_backend b = 0;
    while (b < GD_KV_BACKENDS && strcmp(gd_kv_backend_name(b), name) != 0) {
        b++;
    }
    if (b == GD_KV_BACKENDS) {
        fprintf(stderr, "kv: there is no backend %s\n", name);
        exit(1);
    }
    return b;
}

int
main(int argc, char **argv)
{
    if (argc != 7) {
        give_up("BACKEND PATH KEYS CACHE_BYTES BATCH COMMIT");
    }
    gd_kv_backend backend = backend_of(argv[1]);
    gd_kv_options options = {
        .capacity = strtoull(argv[3], NULL, 10),
        .cache = strtoull(argv[4], NULL, 10),
    };
    uint64_t keys = options.capacity, commit = strtoull(argv[6], NULL, 10);
    size_t batch = strtoul(argv[5], NULL, 10);
    batch = batch > 0 && batch < MAX_COUNT ? batch : MAX_COUNT;
    const gd_env *env = gd_env_posix();
    gd_kv *kv;
    gd_kv_stats put, stats;
    uint64_t own = resident("RssAnon"), mapped = resident("RssFile");
    spent start = since((spent){0, 0}), to_put, to_hit, to_miss;
    require(gd_kv_open(env, backend, argv[2], &options, &kv, &err));
    put_all(kv, keys, batch, commit);
    to_put = since(start);
    gd_kv_get_stats(kv, &put);
    if (backend != GD_KV_INRAM) {
        gd_kv_close(kv);
        require(gd_kv_open(env, backend, argv[2], &options, &kv, &err));
    }
    start = since((spent){0, 0});
    if (get_all(kv, 0, keys, batch) + put.dropped < keys) {
        give_up("keys are missing");
    }
    to_hit = since(start);
    start = since((spent){0, 0});
    (void)get_all(kv, keys, keys, batch);
    to_miss = since(start);
    gd_kv_get_stats(kv, &stats);
    printf("%.6f %.6f %.6f %.6f %.6f %.6f %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64
           " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n",
           to_put.wall, to_hit.wall, to_miss.wall, to_put.cpu, to_hit.cpu,
           to_miss.cpu, resident("RssAnon") - own, resident("RssFile") - mapped,
           stats.reads, stats.bytes_read,
           put.writes, put.bytes_written, put.syncs);
    gd_kv_close(kv);
    return 0;
}
