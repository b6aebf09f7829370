/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scratch_repository.h - a repository that a test makes, spoils and throws
 * away.
 *
 * It lies on the host's tmpfs, where there is one.  All that the engine does
 * in it goes through the scratch's own fault_env.  What cannot be had in
 * setting it up ends the program: then nothing can be tested.
 */
#ifndef SCRATCH_REPOSITORY_H
#define SCRATCH_REPOSITORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/format/params.h"
#include "engine/repo/repo.h"
#include "engine/write/transaction.h"
#include "tests/c/support/fault_env.h"

/* Sanitizers are slow: sweeps then try every so manyth case only. All are tried
 * by the plain programs, with --long. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SWEEP_STRIDE = 5 };
#else
enum { SWEEP_STRIDE = 1 };
#endif

/* Has the nth call of its kind fail once while it works, and checks the outcome.
 * Returns whether there was such a call. */
typedef bool (*failing_call)(fault_call call, uint64_t n);
/* Lets each system call fail in turn, and then each allocation; or every so
 * manyth. */
void sweep_faults(failing_call fail_one, uint64_t stride);

typedef struct scratch {
    fault_env f;
    const gd_env *env; /* its table */
    char *dir;
    int root; /* the directory, opened past the table */
    gd_params params;
    gd_error err;
} scratch;

/* Makes the directories and the lock files.  The parameters: blocks of 4096,
 * groups of 64 slots, segments of 64 KiB, sha256 by hash, lz4, no threads, and
 * 50 ms for a lock. */
void scratch_init(scratch *x);
/* Removes everything; what fault_env_leaks says. */
uint64_t scratch_destroy(scratch *x);

/* A handle with the parameters as they are now. */
gd_repo *scratch_repo(scratch *x);
/* The same with a filter, if it can be had, in the scratch directory. */
gd_repo *scratch_repo_filter(scratch *x);
gd_status scratch_try_repo(scratch *x, bool filter, gd_repo **repo);

/* ---- files, all named from the scratch directory ---- */

bool scratch_exists(const scratch *x, const char *name);
/* -1 if there is none. */
int64_t scratch_size(const scratch *x, const char *name);
void scratch_write(const scratch *x, const char *name, const void *data,
                   size_t length, uint64_t offset);
void scratch_read(const scratch *x, const char *name, void *data,
                  size_t length, uint64_t offset);
void scratch_truncate(const scratch *x, const char *name, uint64_t length);
/* Drops all locks of this process, as a server does that does not hear of its
 * host: nobody is told. */
void scratch_drop_locks(void);
/* The byte at offset becomes another, by exclusive or. */
void scratch_flip(const scratch *x, const char *name, uint64_t offset,
                  uint8_t with);
/* How many names of the directory begin with prefix; *first, unless NULL, is
 * one of them, with the directory before it. */
unsigned scratch_count(const scratch *x, const char *directory,
                       const char *prefix, char first[GD_NAME_SIZE]);

/* Checks the calls that were traced (fault_env.h), and says which they were. */
void scratch_check_trace(scratch *x, const char *wanted);

/* ---- bytes ---- */

/* What is known of a structure; all bytes between the pieces are zeros. */
typedef struct golden {
    size_t offset;
    const char *hex;
} golden;
/* Says where they differ, if they do. */
bool golden_matches(const uint8_t *bytes, size_t length, const golden *pieces,
                    size_t count);
#define GOLDEN_MATCHES(bytes, length, pieces)                                 \
    golden_matches((bytes), (length), (pieces), sizeof(pieces) /              \
                                                    sizeof((pieces)[0]))

/* The same bytes for the same seed. */
void fill_random(uint8_t *out, size_t length, uint64_t seed);
/* The next number of a generator whose state is anything. */
uint64_t next_random(uint64_t *state);
/* An image of blocks: zeros, texts that compress, noise, and repetitions of
 * some of `kinds` different contents; its last block is cut to fit. */
void fill_image(uint8_t *out, size_t length, size_t block, unsigned kinds,
                uint64_t seed);

/* ---- images ---- */

/* begin, write in pieces, commit, end. */
gd_status put_image(gd_repo *repo, const char *image_id, const uint8_t *data,
                    size_t length, size_t piece, gd_recipe_header *header,
                    gd_error *err);
/* To be closed by the caller; the test ends here if it cannot be opened. */
struct gd_image *require_image(gd_repo *repo, const char *image_id);
/* open, read, close.  *equal: whether the bytes are exactly these. */
gd_status get_image(gd_repo *repo, const char *image_id, const uint8_t *data,
                    size_t length, bool *equal, gd_error *err);

#endif
