/* SPDX-License-Identifier: Apache-2.0 */
/*
 * directmap.c - a disk by Dmdedup's own rules, for dmdedup.py to measure.
 *
 *     directmap REPOSITORY ID BLOCK SLOTS SEGMENT DIGEST
 *         BACKEND DIRECTORY CAPACITY CACHE EVERY SECONDS OPERATIONS
 *
 * There is no journal and no recipe.  Two stores in DIRECTORY, each with room for
 * CAPACITY keys, are all the metadata:
 *
 *     sparse   the first 8 bytes of a block's fingerprint -> its address (kv.h)
 *     linear   a block's number on the disk -> its address (linearmap.h)
 *
 * They share CACHE bytes of memory.  A write looks its blocks up in the first,
 * stores those that are new in the groups of the repository, and puts their
 * numbers into the second.  A sync point after every EVERY writes, and at the
 * end, makes new blocks durable, and then both stores.  EVERY 0: at the end
 * only.  As a fingerprint's first 8 bytes decide, this is no way to store what
 * anybody needs.  Nothing is counted, so nothing can be freed.
 *
 * OPERATIONS is a file of what traces.py calls operations.  A block's content is
 * its id, repeated.  They are done for SECONDS at most.  Prints JSON: "seconds",
 * with those of the last sync point; "operations"; "bytes" of these; "new",
 * blocks that were stored; "points", sync points; "memory", bytes that the
 * stores have reserved; "hashing", the bytes per second at which blocks were
 * made and fingerprinted, or 0.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "benchmarks/papers/linearmap.h"
#include "benchmarks/program.h"
#include "engine/base/coding.h"
#include "engine/read/address_reader.h"
#include "engine/write/packer.h"

enum { ID_SIZE = 16, HEAD_SIZE = 16, MAX_COUNT = 256, SLOT_BITS = 15 };
enum { READ, WRITE, CHECK };

typedef struct disk {
    gd_repo *repo;
    gd_packer *packer;
    gd_address_reader *reader;
    gd_hasher *hasher;
    gd_kv *sparse;
    linear_map *linear;
    uint32_t block;
    uint64_t every, since; /* writes for a sync point, and since the last one */
    uint64_t operations, bytes, new, points;
    uint64_t hashed; /* bytes, and the seconds for them */
    double hashing;
    bool unsynced;         /* new blocks that nobody can read yet */
    uint8_t *data;         /* MAX_COUNT blocks */
} disk;

static gd_error err;

static void
need(gd_status s)
{
    if (s != GD_OK) {
        give_up(err.text);
    }
}

static void
fill(uint8_t *out, const uint8_t *id, size_t size)
{
    for (size_t at = 0; at < size; at += ID_SIZE) {
        memcpy(out + at, id, ID_SIZE);
    }
}

static void
sync_blocks(disk *d)
{
    if (d->unsynced) {
        need(gd_packer_sync(d->packer, &err));
        d->unsynced = false;
    }
}

static void
sync_point(disk *d)
{
    sync_blocks(d);
    need(gd_kv_commit(d->sparse, &err));
    need(linear_map_commit(d->linear, &err));
    d->since = 0;
    d->points++;
}

/* ---- writing ---- */

static void
fingerprint_all(disk *d, const uint8_t *ids, size_t count, gd_fingerprint *fps)
{
    gd_hash_input inputs[MAX_COUNT];
    double start = seconds(CLOCK_MONOTONIC);
    for (size_t i = 0; i < count; i++) {
        fill(d->data + i * d->block, ids + i * ID_SIZE, d->block);
        inputs[i] = (gd_hash_input){d->data + i * d->block, d->block, &fps[i]};
    }
    need(gd_hasher_compute_many(d->hasher, &gd_global_scope, inputs, count,
                                &err));
    d->hashing += seconds(CLOCK_MONOTONIC) - start;
    d->hashed += (uint64_t)count * d->block;
}

/* The address of a block that the sparse store does not know: it may have come
 * twice in one write. */
static gd_address
store(disk *d, const uint8_t *data, const gd_fingerprint *fp)
{
    gd_address address = gd_packer_find(d->packer, data, d->block, fp);
    if (address.group == 0) {
        need(gd_packer_add(d->packer, data, d->block, fp,
                           gd_checksum(data, d->block, 0), &address, &err));
        d->new++;
        d->unsynced = true;
    }
    return address;
}

static void
write_blocks(disk *d, uint64_t first, const uint8_t *ids, size_t count)
{
    gd_fingerprint fps[MAX_COUNT];
    gd_kv_pair known[MAX_COUNT];
    uint64_t keys[MAX_COUNT], values[MAX_COUNT];
    size_t added = 0;
    fingerprint_all(d, ids, count, fps);
    for (size_t i = 0; i < count; i++) {
        keys[i] = gd_get64(fps[i].bytes);
    }
    need(gd_kv_get_batch(d->sparse, keys, values, count, &err));
    for (size_t i = 0; i < count; i++) {
        if (values[i] == 0) {
            gd_address at = store(d, d->data + i * d->block, &fps[i]);
            values[i] = (uint64_t)at.group << SLOT_BITS | at.slot;
            known[added++] = (gd_kv_pair){keys[i], values[i]};
        }
    }
    if (added > 0) {
        need(gd_packer_flush(d->packer, &err));
        need(gd_kv_put_batch(d->sparse, known, added, &err));
    }
    need(linear_map_put(d->linear, first, values, count, &err));
}

/* ---- reading ---- */

static void
read_blocks(disk *d, uint64_t first, size_t count)
{
    uint64_t values[MAX_COUNT];
    sync_blocks(d); /* the reader sees nothing before */
    need(linear_map_get(d->linear, first, values, count, &err));
    for (size_t i = 0; i < count; i++) {
        uint8_t *out = d->data + i * d->block;
        gd_entry entry;
        const uint8_t *found;
        if (values[i] == 0) {
            memset(out, 0, d->block);
            continue;
        }
        need(gd_address_reader_read(
            d->reader,
            (gd_address){(uint32_t)(values[i] >> SLOT_BITS),
                         (uint32_t)(values[i] & ((1 << SLOT_BITS) - 1))},
            &entry, &found, &err));
        memcpy(out, found, d->block);
    }
}

static void
check_blocks(disk *d, uint64_t first, const uint8_t *ids, size_t count)
{
    uint8_t *wanted = d->data + (size_t)MAX_COUNT * d->block;
    read_blocks(d, first, count);
    for (size_t i = 0; i < count; i++) {
        fill(wanted, ids + i * ID_SIZE, d->block);
        if (memcmp(wanted, d->data + i * d->block, d->block) != 0) {
            fprintf(stderr, "directmap: block %" PRIu64 " is not what was "
                    "written\n", first + i);
            exit(1);
        }
    }
}

/* ---- operations ---- */

static void
operate(disk *d, uint32_t kind, uint64_t first, const uint8_t *ids,
        size_t count)
{
    for (size_t at = 0; at < count; at += MAX_COUNT) {
        size_t n = count - at < MAX_COUNT ? count - at : MAX_COUNT;
        const uint8_t *some = ids + at * ID_SIZE;
        if (kind == WRITE) {
            write_blocks(d, first + at, some, n);
        } else if (kind == READ) {
            read_blocks(d, first + at, n);
        } else {
            check_blocks(d, first + at, some, n);
        }
    }
    d->operations++;
    d->bytes += (uint64_t)count * d->block;
    if (kind == WRITE && ++d->since == d->every) {
        sync_point(d);
    }
}

static double
operate_all(disk *d, const uint8_t *ops, size_t size, double limit)
{
    double start = seconds(CLOCK_MONOTONIC);
    for (size_t at = 0;
         at < size && seconds(CLOCK_MONOTONIC) - start < limit;) {
        uint32_t count = gd_get32(ops + at + 8);
        operate(d, gd_get32(ops + at + 12), gd_get64(ops + at),
                ops + at + HEAD_SIZE, count);
        at += HEAD_SIZE + (size_t)count * ID_SIZE;
    }
    sync_point(d);
    return seconds(CLOCK_MONOTONIC) - start;
}

/* ---- opening ---- */

static void
open_stores(disk *d, char **argv)
{
    char path[4096];
    gd_kv_backend backend = 0;
    uint64_t capacity = strtoull(argv[3], NULL, 10);
    uint64_t cache = strtoull(argv[4], NULL, 10);
    while (strcmp(gd_kv_backend_name(backend), argv[1]) != 0) {
        if (++backend == GD_KV_BACKENDS) {
            fprintf(stderr, "directmap: there is no backend %s\n", argv[1]);
            exit(1);
        }
    }
    /* A sparse pair takes twice what a linear one does. */
    gd_kv_options sparse = {capacity, cache / 3 * 2};
    gd_kv_options linear = {capacity, cache / 3};
    snprintf(path, sizeof path, "%s/sparse", argv[2]);
    need(gd_kv_open(d->repo->env, backend, path, &sparse, &d->sparse, &err));
    snprintf(path, sizeof path, "%s/linear", argv[2]);
    need(linear_map_open(d->repo->env, backend, path, &linear, &d->linear,
                         &err));
}

static void
open_disk(disk *d, char **argv)
{
    gd_params params = {
        .block_size = (uint32_t)strtoul(argv[3], NULL, 10),
        .group_slots = (uint32_t)strtoul(argv[4], NULL, 10),
        .segment_size = (uint32_t)strtoul(argv[5], NULL, 10),
        .direct_io = true,
        .threads = 1,
        .lock_timeout_ms = 10000,
    };
    for (int i = 0; i < GD_ID_SIZE; i++) {
        sscanf(argv[2] + 2 * i, "%2hhx", &params.repository_id[i]);
    }
    snprintf(params.digest, sizeof params.digest, "%s", argv[6]);
    const gd_env *env = gd_env_posix();
    need(gd_repo_open(env, argv[1], &params, false, &d->repo, &err));
    need(gd_packer_open(d->repo, &gd_global_scope, &d->packer, &err));
    need(gd_address_reader_open(d->repo, &d->reader, &err));
    need(gd_hasher_open(env, d->repo->digest, &d->hasher, &err));
    d->block = params.block_size;
    d->data = gd_alloc(env, (size_t)(MAX_COUNT + 1) * d->block, &err);
    need(d->data == NULL ? GD_NOMEM : GD_OK);
}

static void
close_disk(disk *d)
{
    const gd_env *env = d->repo->env;
    linear_map_close(d->linear);
    gd_kv_close(d->sparse);
    env->release(env, d->data);
    gd_hasher_close(env, d->hasher);
    gd_address_reader_close(d->reader);
    gd_packer_close(d->packer);
    gd_repo_close(d->repo);
}

int
main(int argc, char **argv)
{
    if (argc != 14 || strlen(argv[2]) != (size_t)2 * GD_ID_SIZE) {
        fprintf(stderr, "usage: %s REPOSITORY ID BLOCK SLOTS SEGMENT DIGEST "
                "BACKEND DIRECTORY CAPACITY CACHE EVERY SECONDS OPERATIONS\n"
                "It is made to be called by dmdedup.py.\n", argv[0]);
        return 2;
    }
    disk d = {.every = strtoull(argv[11], NULL, 10)};
    size_t size;
    uint8_t *ops = load_file(argv[13], &size);
    open_disk(&d, argv);
    open_stores(&d, argv + 6);
    double seconds = operate_all(&d, ops, size, strtod(argv[12], NULL));
    gd_kv_stats stats;
    gd_kv_get_stats(d.sparse, &stats);
    printf("{\"seconds\": %.6f, \"hashing\": %.0f, \"operations\": %" PRIu64
           ", \"bytes\": %" PRIu64 ", \"new\": %" PRIu64 ", \"points\": "
           "%" PRIu64 ", \"memory\": %" PRIu64 "}\n", seconds,
           d.hashed > 0 ? (double)d.hashed / d.hashing : 0,
           d.operations, d.bytes, d.new, d.points,
           stats.memory + linear_map_memory(d.linear));
    close_disk(&d);
    free(ops);
    return 0;
}
