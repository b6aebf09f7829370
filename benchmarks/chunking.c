/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chunking.c - the rate at which the engine cuts, and does nothing else.
 *
 *     chunking FILE MINIMUM AVERAGE MAXIMUM ROUNDS
 *
 * reads FILE into memory, and prints for each round the seconds of processor
 * time that it takes to cut it, and those of memcpy of the same bytes.  MINIMUM
 * and AVERAGE are 0 for fixed blocks.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "benchmarks/program.h"
#include "engine/format/chunker.h"

enum { PIECE = 4 << 20 };

static size_t
cut_all(const gd_chunker *chunker, const uint8_t *data, size_t length)
{
    size_t blocks = 0;
    for (size_t at = 0; at < length; blocks++) {
        at += chunker->next(chunker, data + at, length - at, 0, true);
    }
    return blocks;
}

static void
copy_all(const uint8_t *data, size_t length)
{
    static uint8_t to[PIECE];
    for (size_t at = 0; at < length; at += PIECE) {
        size_t left = length - at;
        memcpy(to, data + at, left < PIECE ? left : PIECE);
        __asm__ volatile("" : : "r"(to) : "memory"); /* it is not left out */
    }
}

int
main(int argc, char **argv)
{
    gd_chunker chunker;
    gd_error err;
    size_t length;
    if (argc != 6) {
        give_up("FILE MINIMUM AVERAGE MAXIMUM ROUNDS");
    }
    size_t minimum = strtoul(argv[2], NULL, 10);
    size_t average = strtoul(argv[3], NULL, 10);
    size_t maximum = strtoul(argv[4], NULL, 10);
    gd_status s =
        average == 0
            ? gd_chunker_fixed(&chunker, maximum, &err)
            : gd_chunker_gear(&chunker, minimum, average, maximum, &err);
    if (s != GD_OK) {
        give_up(err.text);
    }
    const uint8_t *data = load_file(argv[1], &length);
    for (int round = atoi(argv[5]); round > 0; round--) {
        double start = seconds(CLOCK_PROCESS_CPUTIME_ID);
        size_t blocks = cut_all(&chunker, data, length);
        double middle = seconds(CLOCK_PROCESS_CPUTIME_ID);
        copy_all(data, length);
        printf("%zu %.9f %.9f\n", blocks, middle - start,
               seconds(CLOCK_PROCESS_CPUTIME_ID) - middle);
    }
    return 0;
}
