/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz.h - helpers of all fuzz targets: parsing an input, and ending the
 * program on a violation.
 *
 * A target is one file, fuzz_<name>.c, that defines LLVMFuzzerTestOneInput,
 * and perhaps LLVMFuzzerInitialize. tests/fuzz/test_fuzz.py builds and runs
 * all of them, with the corpus of that name, and describes how to reproduce a
 * failure.
 */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Ends the program, so that the fuzzer keeps the input. */
#define MUST(condition)                                                       \
    do {                                                                      \
        if (!(condition)) {                                                   \
            fprintf(stderr, "%s:%d: must be: %s\n", __FILE__, __LINE__,       \
                    #condition);                                              \
            abort();                                                          \
        }                                                                     \
    } while (0)

/* The rest of an input. Behind its end there are zeros. */
typedef struct input {
    const uint8_t *at;
    size_t left;
} input;

static inline uint64_t
take_number(input *in, size_t bytes)
{
    uint64_t value = 0;
    for (size_t i = 0; i < bytes && in->left > 0; i++) {
        value |= (uint64_t)*in->at++ << (8 * i);
        in->left--;
    }
    return value;
}

static inline uint8_t
take8(input *in)
{
    return (uint8_t)take_number(in, 1);
}

static inline uint16_t
take16(input *in)
{
    return (uint16_t)take_number(in, 2);
}

static inline uint32_t
take32(input *in)
{
    return (uint32_t)take_number(in, 4);
}

static inline uint64_t
take64(input *in)
{
    return take_number(in, 8);
}

/* Fills all of out, missing bytes with zeros. */
static inline size_t
take_bytes(input *in, void *out, size_t length)
{
    size_t here = in->left < length ? in->left : length;
    memset(out, 0, length);
    if (here > 0) {
        memcpy(out, in->at, here);
    }
    in->at += here;
    in->left -= here;
    return here;
}

#endif
