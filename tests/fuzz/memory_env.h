/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory_env.h - a table of system calls over files in memory.
 *
 * For fuzzing: a repository is made, used and thrown away thousands of times a
 * second, and the fuzzer can choose every byte of it. Mapped files are exactly
 * as long as their allocation, so that the address sanitizer detects an access
 * behind their end.
 *
 * It models: names that lead to inodes, links, renames, directories, symbolic
 * links (which are not followed), open files, OFD byte locks, holes,
 * descriptors that run out. It does not model: threads (one at a time), modes
 * and users (all is the caller's own), crashes of the machine.
 *
 * Random numbers and the clock are counters, so that a run can be repeated.
 */
#ifndef MEMORY_ENV_H
#define MEMORY_ENV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"

enum {
    MEMORY_FIRST_FD = 1 << 20, /* none of the real ones */
    MEMORY_FDS = 512,
    MEMORY_FILE_MAX = 64 << 20, /* bytes; longer is ENOSPC */
    MEMORY_PATH = 256,
};

typedef struct memory_node memory_node;
typedef struct memory_file memory_file;

typedef struct memory_env {
    gd_env env; /* first: a gd_env * is a memory_env * */
    memory_node *nodes;
    memory_file *files; /* MEMORY_FDS places */
    struct memory_name *names;
    size_t name_count, name_room;
    uint64_t next_inode;
    uint64_t random_state;
    int64_t clock;
    uint64_t space;      /* free on the file system */
    uint64_t calls;      /* that may fail, so far */
    uint64_t fail_at;    /* the number of the call that fails; 0: none */
    int fail_with;       /* errno; 0: from that call on the process is dead */
    int64_t allocations; /* outstanding */
    uint64_t allocated;  /* allocations so far */
    uint64_t alloc_fail_at;
    int64_t mappings;
    uint64_t bad_calls; /* with descriptors that are not open */
} memory_env;

/* Makes an empty root directory. */
void memory_env_init(memory_env *m);
void memory_env_destroy(memory_env *m);

/* The nth call from now fails with sys_errno, or (0) is the first that has no
 * effect any more, like all after it: the process was killed. */
void memory_env_fail(memory_env *m, uint64_t nth, int sys_errno);
/* The nth allocation from now fails. */
void memory_env_fail_alloc(memory_env *m, uint64_t nth);
/* Ends the failures; returns true if one happened. */
bool memory_env_heal(memory_env *m);

/* Returns the number of descriptors, mappings and allocations that are
 * outstanding, and of calls with a closed descriptor; prints them to stderr if
 * there are any. */
uint64_t memory_env_leaks(const memory_env *m);
/* Does the kernel's work at the end of a process. */
void memory_env_close_all(memory_env *m);

/* ---- files, by their whole path ---- */

void memory_mkdir(memory_env *m, const char *path);
/* Sets the file's content; the file is made if necessary. */
void memory_put(memory_env *m, const char *path, const void *data,
                size_t length);
/* Returns NULL if there is no file. The result is valid until the file is next
 * changed. */
uint8_t *memory_get(const memory_env *m, const char *path, size_t *length);
/* Works like unlink; returns false if there was no file. */
bool memory_remove(memory_env *m, const char *path);
void memory_symlink(memory_env *m, const char *path);
/* Returns the number of names below the directory that begin with prefix;
 * *first, unless NULL, is the first of them, as a whole path. */
size_t memory_count(const memory_env *m, const char *directory,
                    const char *prefix, char first[MEMORY_PATH]);
/* Returns the nth file (no directory), in the order of their names; false: no
 * more. */
bool memory_nth(const memory_env *m, size_t nth, char path[MEMORY_PATH]);

/* Copies every file and name, with no open file. */
void memory_copy(memory_env *to, const memory_env *from);

#endif
