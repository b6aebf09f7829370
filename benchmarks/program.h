/* SPDX-License-Identifier: Apache-2.0 */
/*
 * program.h - a clock, a reader of files, and the end on an error, for the
 * benchmarks' programs in C.
 */
#ifndef BENCHMARKS_PROGRAM_H
#define BENCHMARKS_PROGRAM_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static inline _Noreturn void
give_up(const char *what)
{
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, what);
    exit(1);
}

static inline double
seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Reads a whole file.  The caller frees it. */
static inline uint8_t *
load_file(const char *path, size_t *length)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        give_up(path);
    }
    *length = (size_t)ftell(file);
    rewind(file);
    uint8_t *data = malloc(*length + 1);
    if (data == NULL || fread(data, 1, *length, file) != *length) {
        give_up(path);
    }
    fclose(file);
    return data;
}

#endif
