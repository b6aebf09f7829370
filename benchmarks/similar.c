/* SPDX-License-Identifier: Apache-2.0 */
/*
 * similar.c - the gain of compressing similar blocks together.
 *
 *     similar LEVEL SEGMENT_KIB FILE...
 *
 * cuts the FILEs into blocks of 4 KiB, leaves out zeros and earlier blocks,
 * and divides the rest into groups of 32,768 blocks.  It compresses each group
 * with zstd at this LEVEL, in segments of this size, once in the order of the
 * blocks and once in the order that the engine finds; within a segment they lie
 * in their own order.  For both it prints
 *
 * - the bytes in segments, with their headers and lists, in percent of the
 *   plain bytes;
 * - the rate of compressing, by processor time;
 * - how often a reader of all blocks decodes a segment, on average.  It keeps
 *   64 MiB of decoded segments, and drops the least recently used.
 *
 * At the end it prints the rates of finding the features and the order.
 * similar.py builds and runs it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "benchmarks/program.h"
#include "engine/base/zero.h"
#include "engine/format/segment.h"
#include "engine/format/similar.h"

enum {
    BLOCK = 4096,
    GROUP = 32768,
    CACHED = 64 << 20,
    SEEN = 1 << 26, /* hashes of blocks that came before */
};

typedef struct sums {
    uint64_t stored, decoded;
    double seconds;
} sums;

typedef struct work {
    gd_coder *coder;
    int level;
    uint32_t per_segment; /* blocks */
    uint8_t *blocks;
    uint32_t count; /* blocks of the group under way */
    gd_similar_features features[GROUP];
    uint32_t order[GROUP], segment_of[GROUP], used[GROUP];
    uint64_t plain, segments;
    double finding, ordering;
    sums stored, similar;
} work;

static int
ascending(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* Returns whether the block is new and not zeros. */
static bool
is_new(const uint8_t *block)
{
    static uint64_t *seen;
    if (seen == NULL && (seen = calloc(SEEN, sizeof *seen)) == NULL) {
        give_up("no memory");
    }
    if (gd_is_zero(block, BLOCK)) {
        return false;
    }
    uint64_t hash = XXH3_64bits(block, BLOCK) | 1;
    for (uint64_t at = hash >> 38;; at = (at + 1) % SEEN) {
        if (seen[at] == 0) {
            seen[at] = hash;
            return true;
        }
        if (seen[at] == hash) {
            return false;
        }
    }
}

static void
compress_group(work *w, sums *to)
{
    static uint8_t plain[GD_SEGMENT_MAX], out[GD_SEGMENT_MAX];
    gd_error err;
    double start = seconds(CLOCK_PROCESS_CPUTIME_ID);
    for (uint32_t i = 0; i < w->count; i += w->per_segment) {
        size_t used = 0, stored;
        uint32_t end = i + w->per_segment;
        end = end < w->count ? end : w->count;
        qsort(w->order + i, end - i, sizeof *w->order, ascending);
        for (uint32_t k = i; k < end; k++) {
            memcpy(plain + used, w->blocks + (size_t)w->order[k] * BLOCK,
                   BLOCK);
            used += BLOCK;
            w->segment_of[w->order[k]] = i / w->per_segment;
        }
        if (gd_codec_compress(w->coder, GD_CODEC_ZSTD, w->level, plain, used,
                              out, &stored, &err) != GD_OK) {
            give_up(err.text);
        }
        to->stored += GD_SEGMENT_HEADER + (stored == 0 ? used : stored);
        to->stored += to == &w->similar ? GD_LISTED_SLOT * (end - i) : 0;
    }
    to->seconds += seconds(CLOCK_PROCESS_CPUTIME_ID) - start;
}

/* Reads all blocks in their order. */
static void
count_decoded(work *w, sums *to)
{
    uint32_t segments = (w->count + w->per_segment - 1) / w->per_segment;
    uint32_t room = CACHED / (w->per_segment * BLOCK), held = 0;
    memset(w->used, 0, sizeof w->used); /* 0: not in the cache */
    for (uint32_t i = 0; i < w->count; i++) {
        uint32_t wanted = w->segment_of[i], oldest = UINT32_MAX;
        if (w->used[wanted] == 0) {
            to->decoded++;
            for (uint32_t s = 0; held == room && s < segments; s++) {
                if (w->used[s] != 0 && (oldest == UINT32_MAX ||
                                        w->used[s] < w->used[oldest])) {
                    oldest = s;
                }
            }
            if (oldest != UINT32_MAX) {
                w->used[oldest] = 0;
            } else {
                held++;
            }
        }
        w->used[wanted] = i + 1;
    }
}

static void
end_group(work *w)
{
    gd_error err;
    w->plain += (uint64_t)w->count * BLOCK;
    w->segments += (w->count + w->per_segment - 1) / w->per_segment;
    for (uint32_t i = 0; i < w->count; i++) {
        w->order[i] = i;
    }
    compress_group(w, &w->stored);
    count_decoded(w, &w->stored);
    double start = seconds(CLOCK_PROCESS_CPUTIME_ID);
    for (uint32_t i = 0; i < w->count; i++) {
        gd_similar_features_of(w->blocks + (size_t)i * BLOCK, BLOCK, &w->features[i]);
    }
    double found = seconds(CLOCK_PROCESS_CPUTIME_ID);
    if (gd_similar_order(gd_env_posix(), w->features, w->count, w->order,
                         &err) != GD_OK) {
        give_up(err.text);
    }
    w->finding += found - start;
    w->ordering += seconds(CLOCK_PROCESS_CPUTIME_ID) - found;
    compress_group(w, &w->similar);
    count_decoded(w, &w->similar);
    w->count = 0;
}

static void
add_file(work *w, const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        give_up("a file cannot be opened");
    }
    uint8_t *block = w->blocks + (size_t)w->count * BLOCK;
    while (fread(block, BLOCK, 1, file) == 1) {
        if (is_new(block) && ++w->count == GROUP) {
            end_group(w);
        }
        block = w->blocks + (size_t)w->count * BLOCK;
    }
    fclose(file);
}

static void
print_order(const char *name, const work *w, const sums *of)
{
    printf("%s: %.2f %% of the plain bytes, %.0f MB/s, %.2f segments decoded "
           "for each\n", name, 100.0 * (double)of->stored / (double)w->plain,
           (double)w->plain / 1e6 / of->seconds,
           (double)of->decoded / (double)w->segments);
}

int
main(int argc, char **argv)
{
    static work w;
    gd_error err;
    if (argc < 4) {
        give_up("LEVEL SEGMENT_KIB FILE...");
    }
    w.level = atoi(argv[1]);
    w.per_segment = (uint32_t)atoi(argv[2]) * 1024 / BLOCK;
    w.blocks = malloc((size_t)GROUP * BLOCK);
    if (w.per_segment < 1 || w.per_segment > GD_SEGMENT_MAX / BLOCK ||
        w.blocks == NULL ||
        gd_codec_require_level(GD_CODEC_ZSTD, w.level, &err) != GD_OK ||
        gd_coder_open(gd_env_posix(), &w.coder, &err) != GD_OK) {
        give_up("no such level or size, or no memory");
    }
    for (int i = 3; i < argc; i++) {
        add_file(&w, argv[i]);
    }
    end_group(&w);
    printf("%.1f MB of blocks\n", (double)w.plain / 1e6);
    print_order("stored", &w, &w.stored);
    print_order("similar", &w, &w.similar);
    printf("features: %.0f MB/s; order: %.0f MB/s\n",
           (double)w.plain / 1e6 / w.finding,
           (double)w.plain / 1e6 / w.ordering);
    return 0;
}
