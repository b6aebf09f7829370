/* SPDX-License-Identifier: Apache-2.0 */
/*
 * repository.h - a repository in memory, for targets that need a whole one.
 */
#ifndef REPOSITORY_H
#define REPOSITORY_H

#include "engine/format/params.h"
#include "engine/repo/repo.h"
#include "engine/write/transaction.h"
#include "tests/fuzz/memory_env.h"

#define REPOSITORY_PATH "/repo"
#define FILTER_PATH "/filter"

typedef struct repository {
    memory_env m;
    const gd_env *env; /* its table */
    gd_params params;
    gd_repo *repo; /* NULL: not open */
    gd_error err;
} repository;

/* Makes directories and lock files, and opens no handle. The parameters:
 * blocks of 512, groups of 64 slots, segments of 2 KiB, sha256 by hash, lz4,
 * no threads. */
void repository_init(repository *r);
/* Copies the files into another environment. */
void repository_copy(repository *to, const repository *from);
/* Ends the program if any resource is left over. */
void repository_destroy(repository *r);

/* Opens a handle; the filter only if there is room for it. */
gd_status repository_open(repository *r, bool filter);
void repository_close(repository *r);

/* Begins, writes in pieces, commits and ends. *linked, unless NULL: true if
 * the image may exist now, whatever is returned. */
gd_status repository_put(repository *r, const char *image_id,
                         const gd_scope *scope, const uint8_t *data,
                         size_t length, size_t piece, bool *linked);
/* The results of a read. */
typedef enum read_result {
    READ_EQUAL,   /* exactly these bytes */
    READ_ABSENT,  /* there is no such image */
    READ_FAILED,  /* an error that has words; they are in r->err */
    READ_DIFFERS, /* other bytes */
} read_result;
read_result repository_read(repository *r, const char *image_id,
                            const uint8_t *data, size_t length);

/* Fills in blocks that repeat, compress, are zeros, or none of these. */
void repository_fill(uint8_t *out, size_t length, size_t block,
                     unsigned kinds, uint64_t seed);

#endif
