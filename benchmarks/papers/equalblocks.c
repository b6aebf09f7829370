/* SPDX-License-Identifier: Apache-2.0 */
/*
 * equalblocks.c - counts the equal blocks of images, exactly, for equalblocks.py.
 *
 *     equalblocks SPOOL_DIRECTORY (IMAGE BASE)...
 *
 * For each block size it writes a fingerprint (XXH3, 128 bits) for every block
 * that is not all zeros, to one of 64 files by the fingerprint's first bits; then
 * sorts each of these in memory, and counts how often each fingerprint is there.
 * So the memory needed is a 64th of what is written, and that is 16 bytes a
 * block: altogether about a sixteenth of the images' bytes that are not zeros.
 *
 * For blocks of 4 KiB there is a second kind of fingerprint, of the block and its
 * offset; and each image is compared with its BASE ("-": it has none) at the same
 * offset.  What an image's last piece lacks is filled up with zeros.
 *
 * Prints JSON:
 *   bytes   of all images
 *   blocks  by size: "zeros", blocks of zeros; "counts", the distribution of
 *           references: [blocks, references] of those which are used once, twice,
 *           3 to 4 times, 5 to 8, and so on
 *   places  "counts" of blocks of 4 KiB that count as equal at one offset only
 *   base, equal, other   blocks of 4 KiB, not zeros: of images without a base;
 *           of the others, those that equal the base's, and those that do not
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/coding.h"
#include "engine/base/env.h"
#include "engine/base/zero.h"

enum {
    WINDOW = 1 << 20, /* read at once: a whole number of blocks of any size */
    PLACES_SIZE = 4096,
    PARTITIONS = 64,
    BUFFERED = 4096, /* fingerprints */
    BUCKETS = 40,
};

static const uint32_t sizes[] = {512,  1024,  2048,  4096,   8192,
                                 16384, 32768, 65536, WINDOW};
enum { SIZES = sizeof sizes / sizeof sizes[0], STREAMS = SIZES + 1 };

typedef struct fingerprint {
    uint64_t high, low;
} fingerprint;

typedef struct partition {
    fingerprint *waiting;
    size_t waiting_count;
    uint64_t written;
} partition;

typedef struct counts {
    uint64_t blocks[BUCKETS], references[BUCKETS];
} counts;

typedef struct analysis {
    const char *spool;
    partition partitions[STREAMS][PARTITIONS]; /* the last: with offsets */
    uint64_t zeros[SIZES];
    uint64_t bytes, base, equal, other;
    uint8_t *window, *base_window;
} analysis;

static _Noreturn void
give_up(const char *what)
{
    fprintf(stderr, "equalblocks: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* ---- spooling fingerprints ---- */

static void
spool_name(const analysis *x, size_t stream, unsigned part, char name[4096])
{
    snprintf(name, 4096, "%s/%zu-%u", x->spool, stream, part);
}

static void
write_out(const analysis *x, size_t stream, unsigned part, partition *p)
{
    char name[4096];
    spool_name(x, stream, part, name);
    /* Not kept open: there are more of them than descriptors. */
    FILE *file = fopen(name, "ab");
    if (file == NULL ||
        fwrite(p->waiting, sizeof *p->waiting, p->waiting_count, file) !=
            p->waiting_count ||
        fclose(file) != 0) {
        give_up(name);
    }
    p->written += p->waiting_count;
    p->waiting_count = 0;
}

static void
add(analysis *x, size_t stream, fingerprint fp)
{
    unsigned part = (unsigned)(fp.high >> 58);
    partition *p = &x->partitions[stream][part];
    if (p->waiting == NULL &&
        (p->waiting = malloc(BUFFERED * sizeof *p->waiting)) == NULL) {
        give_up("memory");
    }
    p->waiting[p->waiting_count++] = fp;
    if (p->waiting_count == BUFFERED) {
        write_out(x, stream, part, p);
    }
}

/* ---- reading ---- */

static fingerprint
fingerprint_of(const void *data, size_t length)
{
    XXH128_hash_t hash = XXH3_128bits(data, length);
    return (fingerprint){hash.high64, hash.low64};
}

static fingerprint
with_offset(fingerprint fp, uint64_t offset)
{
    uint64_t both[] = {fp.high, fp.low, offset};
    return fingerprint_of(both, sizeof both);
}

static void
take_blocks(analysis *x, size_t stream, uint64_t offset, size_t length)
{
    uint32_t size = sizes[stream];
    for (size_t at = 0; at < length; at += size) {
        if (gd_is_zero(x->window + at, size)) {
            x->zeros[stream]++;
            continue;
        }
        fingerprint fp = fingerprint_of(x->window + at, size);
        add(x, stream, fp);
        if (size == PLACES_SIZE) {
            add(x, SIZES, with_offset(fp, offset + at));
        }
    }
}

static void
compare_with_base(analysis *x, bool has_base, size_t length)
{
    for (size_t at = 0; at < length; at += PLACES_SIZE) {
        if (gd_is_zero(x->window + at, PLACES_SIZE)) {
            continue;
        }
        if (!has_base) {
            x->base++;
        } else if (memcmp(x->window + at, x->base_window + at, PLACES_SIZE) ==
                   0) {
            x->equal++;
        } else {
            x->other++;
        }
    }
}

/* Fills the window, with zeros behind the file's end.  The bytes that there
 * were. */
static size_t
read_window(int fd, const char *path, uint64_t offset, uint8_t *window)
{
    size_t done = 0;
    while (done < WINDOW) {
        ssize_t n = pread(fd, window + done, WINDOW - done,
                          (off_t)(offset + done));
        if (n < 0 && errno != EINTR) {
            give_up(path);
        }
        if (n == 0) {
            break;
        }
        done += n > 0 ? (size_t)n : 0;
    }
    memset(window + done, 0, WINDOW - done);
    return done;
}

static int
open_image(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        give_up(path);
    }
    return fd;
}

static void
take_image(analysis *x, const char *path, const char *base)
{
    int fd = open_image(path);
    int base_fd = strcmp(base, "-") == 0 ? -1 : open_image(base);
    struct stat st;
    if (fstat(fd, &st) != 0) {
        give_up(path);
    }
    x->bytes += (uint64_t)st.st_size;
    size_t length;
    for (uint64_t at = 0;
         (length = read_window(fd, path, at, x->window)) > 0; at += WINDOW) {
        if (base_fd >= 0) {
            (void)read_window(base_fd, base, at, x->base_window);
        }
        for (size_t stream = 0; stream < SIZES; stream++) {
            take_blocks(x, stream, at, length);
        }
        compare_with_base(x, base_fd >= 0, length);
    }
    close(fd);
    if (base_fd >= 0) {
        close(base_fd);
    }
}

/* ---- counting ---- */

static int
ascending(const void *one, const void *other)
{
    const fingerprint *a = one, *b = other;
    return a->high != b->high ? (a->high < b->high ? -1 : 1)
           : a->low != b->low ? (a->low < b->low ? -1 : 1)
                              : 0;
}

/* 1, 2, 3 to 4, 5 to 8, ... */
static unsigned
bucket_of(uint64_t references)
{
    return references == 1 ? 0 : 64 - (unsigned)__builtin_clzll(references - 1);
}

static void
count_sorted(const fingerprint *fps, size_t count, counts *found)
{
    for (size_t first = 0, end; first < count; first = end) {
        for (end = first + 1;
             end < count && ascending(&fps[first], &fps[end]) == 0; end++) {
        }
        unsigned bucket = bucket_of(end - first);
        found->blocks[bucket]++;
        found->references[bucket] += end - first;
    }
}

static void
count_partition(const analysis *x, size_t stream, unsigned part,
                const partition *p, counts *found)
{
    char name[4096];
    fingerprint *fps = malloc((p->written + p->waiting_count + 1) *
                              sizeof *fps);
    if (fps == NULL) {
        give_up("memory");
    }
    if (p->written > 0) {
        spool_name(x, stream, part, name);
        FILE *file = fopen(name, "rb");
        if (file == NULL ||
            fread(fps, sizeof *fps, p->written, file) != p->written) {
            give_up(name);
        }
        fclose(file);
        unlink(name);
    }
    if (p->waiting_count > 0) {
        memcpy(fps + p->written, p->waiting, p->waiting_count * sizeof *fps);
    }
    qsort(fps, p->written + p->waiting_count, sizeof *fps, ascending);
    count_sorted(fps, p->written + p->waiting_count, found);
    free(fps);
}

static void
print_counts(analysis *x, size_t stream)
{
    counts found = {0};
    unsigned used = 0;
    for (unsigned part = 0; part < PARTITIONS; part++) {
        partition *p = &x->partitions[stream][part];
        count_partition(x, stream, part, p, &found);
        free(p->waiting);
    }
    for (unsigned i = 0; i < BUCKETS; i++) {
        used = found.blocks[i] > 0 ? i + 1 : used;
    }
    printf("\"counts\": [");
    for (unsigned i = 0; i < used; i++) {
        printf("%s[%" PRIu64 ", %" PRIu64 "]", i == 0 ? "" : ", ",
               found.blocks[i], found.references[i]);
    }
    printf("]");
}

int
main(int argc, char **argv)
{
    static analysis x;
    if (argc < 4 || argc % 2 != 0) {
        fprintf(stderr, "usage: %s SPOOL_DIRECTORY (IMAGE BASE)...\n"
                "It is made to be called by equalblocks.py.\n", argv[0]);
        return 2;
    }
    x.spool = argv[1];
    x.window = malloc(WINDOW);
    x.base_window = malloc(WINDOW);
    if (x.window == NULL || x.base_window == NULL) {
        give_up("memory");
    }
    for (int i = 2; i < argc; i += 2) {
        fprintf(stderr, "image %d of %d\n", i / 2, (argc - 2) / 2);
        take_image(&x, argv[i], argv[i + 1]);
    }
    printf("{\"bytes\": %" PRIu64 ", \"base\": %" PRIu64 ", \"equal\": %" PRIu64
           ", \"other\": %" PRIu64 ", \"blocks\": {",
           x.bytes, x.base, x.equal, x.other);
    for (size_t stream = 0; stream < SIZES; stream++) {
        fprintf(stderr, "counting blocks of %u\n", sizes[stream]);
        printf("%s\"%u\": {\"zeros\": %" PRIu64 ", ", stream == 0 ? "" : ", ",
               sizes[stream], x.zeros[stream]);
        print_counts(&x, stream);
        printf("}");
    }
    printf("}, \"places\": {");
    print_counts(&x, SIZES);
    printf("}}\n");
    free(x.window);
    free(x.base_window);
    return 0;
}
