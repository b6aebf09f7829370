/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scratch_repository.h - a repository that a test makes, spoils and throws
 * away.
 *
 * It lies on the host's tmpfs, where there is one. All the engine's calls in
 * it go through the scratch's own fault_env. If a step of its setup fails, the
 * program ends: then no test is possible.
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

/* Sanitizers are slow: sweeps then try only one of so many cases. The plain
 * programs try all, with --long. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SWEEP_STRIDE = 5 };
#else
enum { SWEEP_STRIDE = 1 };
#endif

/* Has the nth call of its kind fail once while it works, and checks the
 * outcome. Returns true if there was such a call. */
typedef bool (*failing_call)(fault_call call, uint64_t n);
/* Lets each system call fail in turn, and then each allocation; or one of so
 * many. */
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
/* Removes everything; returns the result of fault_env_leaks. */
uint64_t scratch_destroy(scratch *x);

/* Opens a handle with the current parameters. */
gd_repo *scratch_repo(scratch *x);
/* Does the same with a filter, if possible, in the scratch directory. */
gd_repo *scratch_repo_filter(scratch *x);
gd_status scratch_try_repo(scratch *x, bool filter, gd_repo **repo);

/* ---- files, all named from the scratch directory ---- */

bool scratch_exists(const scratch *x, const char *name);
/* Returns -1 if there is no file. */
int64_t scratch_size(const scratch *x, const char *name);
void scratch_write(const scratch *x, const char *name, const void *data,
                   size_t length, uint64_t offset);
void scratch_read(const scratch *x, const char *name, void *data,
                  size_t length, uint64_t offset);
void scratch_truncate(const scratch *x, const char *name, uint64_t length);
/* Drops all locks of this process, as a server does that gets no messages of
 * its host: no process is notified. */
void scratch_drop_locks(void);
/* Changes the byte at offset by exclusive or. */
void scratch_flip(const scratch *x, const char *name, uint64_t offset,
                  uint8_t with);
/* Returns the number of names of the directory that begin with prefix; *first,
 * unless NULL, is one of them, with the directory before it. */
unsigned scratch_count(const scratch *x, const char *directory,
                       const char *prefix, char first[GD_NAME_SIZE]);

/* Checks the calls that were traced (fault_env.h), and prints them on
 * failure. */
void scratch_check_trace(scratch *x, const char *wanted);

/* ---- bytes ---- */

/* The known bytes of a structure; all bytes between the pieces are zeros. */
typedef struct golden {
    size_t offset;
    const char *hex;
} golden;
/* Prints where they differ, if they do. */
bool golden_matches(const uint8_t *bytes, size_t length, const golden *pieces,
                    size_t count);
#define GOLDEN_MATCHES(bytes, length, pieces)                                 \
    golden_matches((bytes), (length), (pieces), sizeof(pieces) /              \
                                                    sizeof((pieces)[0]))

/* Fills in the same bytes for the same seed. */
void fill_random(uint8_t *out, size_t length, uint64_t seed);
/* Returns the next number of a generator whose state is any number. */
uint64_t next_random(uint64_t *state);
/* Fills in an image of blocks: zeros, texts that compress, noise, and
 * repetitions of some of `kinds` different contents; its last block is cut to
 * fit. */
void fill_image(uint8_t *out, size_t length, size_t block, unsigned kinds,
                uint64_t seed);

/* ---- images ---- */

/* Begins, writes in pieces, commits and ends. */
gd_status put_image(gd_repo *repo, const char *image_id, const uint8_t *data,
                    size_t length, size_t piece, gd_recipe_header *header,
                    gd_error *err);
/* Opens an image for the caller to close; a failure ends the test. */
struct gd_image *require_image(gd_repo *repo, const char *image_id);
/* Opens, reads and closes. *equal: true if the bytes are exactly these. */
gd_status get_image(gd_repo *repo, const char *image_id, const uint8_t *data,
                    size_t length, bool *equal, gd_error *err);

#endif
