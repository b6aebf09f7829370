/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_volume_threads.c - writers, readers, flushers, checkpoints, snapshots
 * and resizing of one volume, at once. Each sector has its number, its writer
 * and its version. The engine works with the table of the real machine: the
 * fault_env's mutex would hide races from the thread sanitizer.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "engine/base/coding.h"
#include "engine/read/image.h"
#include "engine/volume/volume.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum {
    SECTOR = 512,
    PART = 65536,
    WRITERS = 3,
    SLICE = 200,                /* sectors that one writer alone writes */
    KEPT = WRITERS * SLICE,     /* resizing keeps these */
    MIN_COUNT = KEPT + 20,
    MAX_COUNT = KEPT + 500,
    TURNS = 60 / SWEEP_STRIDE,  /* the minimum of each of the others */
    MAX_LENGTH = 150,
};

static scratch x;
static gd_repo *repo;
static gd_volume *volume;
static atomic_uint odd; /* results that must not occur */
static atomic_uint done; /* writers that have ended */
static atomic_uint checkpoints, snapshots, resizes;
/* The newest write of each sector that was acknowledged; 0: none. */
static atomic_uint_fast64_t acknowledged[KEPT];
static atomic_uint_fast64_t begun[KEPT]; /* of begun writes */

static void
expect(bool good, const char *what, const gd_error *err)
{
    if (!good) {
        fprintf(stderr, "%s: %s\n", what, err->text);
        atomic_fetch_add(&odd, 1);
    }
}

static void
make_sector(uint8_t *out, uint64_t sector, uint64_t version)
{
    memset(out, 0, SECTOR);
    if (version != 0) {
        fill_random(out, SECTOR, sector << 32 | version);
        gd_put64(out, sector);
        gd_put64(out + 8, version);
    }
}

/* Returns true for a whole sector, of this place, and of a version between
 * two. */
static bool
is_good(const uint8_t *got, uint64_t sector, uint64_t least, uint64_t most)
{
    uint8_t wanted[SECTOR];
    uint64_t version = gd_get64(got + 8);
    make_sector(wanted, sector, version);
    return memcmp(got, wanted, SECTOR) == 0 && version >= least &&
           version <= most;
}

static void
check_range(uint64_t first, uint64_t count)
{
    uint8_t data[MAX_LENGTH * SECTOR];
    uint64_t least[MAX_LENGTH];
    gd_error err = {0};
    for (uint64_t i = 0; i < count; i++) {
        least[i] = atomic_load(&acknowledged[first + i]);
    }
    expect(gd_volume_read(volume, data, count * SECTOR, first * SECTOR,
                          &err) == GD_OK, "read", &err);
    for (uint64_t i = 0; i < count; i++) {
        expect(is_good(data + i * SECTOR, first + i, least[i],
                       atomic_load(&begun[first + i])),
               "a sector is torn, old or of another place", &err);
    }
}

/* ---- the threads ---- */

static bool
others_want_more(void)
{
    return atomic_load(&checkpoints) < TURNS ||
           atomic_load(&snapshots) < TURNS || atomic_load(&resizes) < TURNS;
}

static void *
write_slice(void *arg)
{
    uint64_t me = (uint64_t)(uintptr_t)arg, seed = me + 1;
    uint8_t data[MAX_LENGTH * SECTOR];
    gd_error err = {0};
    for (uint64_t round = 1; round <= TURNS || others_want_more(); round++) {
        uint64_t at = next_random(&seed) % SLICE;
        uint64_t count = 1 + next_random(&seed) %
                                 (round % 8 == 0 ? MAX_LENGTH : 9);
        count = count < SLICE - at ? count : SLICE - at;
        uint64_t first = me * SLICE + at;
        for (uint64_t i = 0; i < count; i++) {
            make_sector(data + i * SECTOR, first + i, round);
            atomic_store(&begun[first + i], round);
        }
        expect(gd_volume_write(volume, data, count * SECTOR, first * SECTOR,
                               &err) == GD_OK, "write", &err);
        for (uint64_t i = 0; i < count; i++) {
            atomic_store(&acknowledged[first + i], round);
        }
        check_range(first, count);
    }
    atomic_fetch_add(&done, 1);
    return NULL;
}

static void *
read_all(void *arg)
{
    uint64_t seed = (uint64_t)(uintptr_t)arg + 100;
    while (atomic_load(&done) < WRITERS) {
        uint64_t first = next_random(&seed) % KEPT;
        uint64_t count = 1 + next_random(&seed) % MAX_LENGTH;
        check_range(first, count < KEPT - first ? count : KEPT - first);
    }
    return NULL;
}

static bool
skip_extent(void *arg, uint64_t offset, uint64_t length, bool zeros)
{
    (void)arg;
    (void)offset;
    (void)zeros;
    return length > 0;
}

static void *
flush_often(void *arg)
{
    gd_error err = {0};
    gd_volume_info info;
    (void)arg;
    while (atomic_load(&done) < WRITERS) {
        expect(gd_volume_flush(volume, &err) == GD_OK, "flush", &err);
        expect(gd_volume_extents(volume, (uint64_t)KEPT * SECTOR, 0,
                                 skip_extent, NULL, &err) == GD_OK,
               "extents", &err);
        gd_volume_get_info(volume, &info);
        (void)gd_volume_needs_checkpoint(volume);
    }
    return NULL;
}

static void *
checkpoint_often(void *arg)
{
    gd_error err = {0};
    (void)arg;
    while (atomic_load(&done) < WRITERS) {
        expect(gd_volume_checkpoint(volume, &err) == GD_OK, "checkpoint",
               &err);
        gd_volume_renew(volume);
        atomic_fetch_add(&checkpoints, 1);
    }
    return NULL;
}

/* A snapshot has the writes acknowledged before it, and none from after. */
static void
check_snapshot(const char *id, const uint64_t *least, gd_error *err)
{
    static uint8_t data[MAX_COUNT * SECTOR];
    gd_image *image;
    size_t got = 0;
    if (gd_image_open(repo, id, NULL, &image, err) != GD_OK) {
        expect(false, id, err);
        return;
    }
    expect(gd_image_read(image, data, sizeof data, 0, &got, err) == GD_OK, id,
           err);
    gd_image_close(image);
    for (uint64_t i = 0; i < KEPT; i++) {
        expect(is_good(data + i * SECTOR, i, least[i],
                       atomic_load(&begun[i])), "snapshot", err);
    }
}

static void *
snapshot_often(void *arg)
{
    gd_error err = {0};
    gd_recipe_header header;
    uint64_t least[KEPT];
    (void)arg;
    for (unsigned n = 0; atomic_load(&done) < WRITERS; n++) {
        char id[32];
        snprintf(id, sizeof id, "snapshot-%u", n);
        for (uint64_t i = 0; i < KEPT; i++) {
            least[i] = atomic_load(&acknowledged[i]);
        }
        expect(gd_volume_snapshot(volume, id, "", &header, &err) == GD_OK,
               "snapshot", &err);
        check_snapshot(id, least, &err);
        atomic_fetch_add(&snapshots, 1);
    }
    return NULL;
}

/* Sectors that are cut off and added again are zeros, even if they had
 * data. */
static void *
resize_often(void *arg)
{
    static uint8_t data[(MAX_COUNT - MIN_COUNT) * SECTOR], zeros[sizeof data];
    uint64_t seed = 9;
    gd_error err = {0};
    (void)arg;
    for (unsigned n = 0; atomic_load(&done) < WRITERS; n++) {
        uint64_t least = MIN_COUNT +
        next_random(&seed) % (MAX_COUNT - MIN_COUNT - 1);
        size_t rest = (size_t)(MAX_COUNT - least) * SECTOR;
        fill_random(data, rest, n);
        expect(gd_volume_write(volume, data, rest, least * SECTOR, &err) ==
                   GD_OK, "write", &err);
        if (n % 2 == 0) {
            expect(gd_volume_checkpoint(volume, &err) == GD_OK, "checkpoint",
                   &err);
        }
        expect(gd_volume_resize(volume, least * SECTOR, &err) == GD_OK,
               "shrink", &err);
        expect(gd_volume_write(volume, data, rest, least * SECTOR, &err) ==
                   GD_INVALID, "write behind the end", &err);
        expect(gd_volume_resize(volume, MAX_COUNT * SECTOR, &err) == GD_OK,
               "grow",
               &err);
        expect(gd_volume_read(volume, data, rest, least * SECTOR, &err) ==
                   GD_OK, "read", &err);
        expect(memcmp(data, zeros, rest) == 0, "old bytes", &err);
        atomic_fetch_add(&resizes, 1);
    }
    return NULL;
}

/* ---- the test ---- */

static void
setup(void)
{
    uint64_t stored;
    const gd_volume_plan plan = {.size = MAX_COUNT * SECTOR,
                                 .part_size = PART,
                                 .project = ""};
    scratch_init(&x);
    x.env = gd_env_posix();
    repo = scratch_repo(&x);
    CHECK_INT(gd_volume_create(repo, "disk", &plan, &stored, &x.err), GD_OK);
    CHECK_INT(gd_volume_open(repo, "disk", true, &volume, &x.err), GD_OK);
    for (size_t i = 0; i < KEPT; i++) {
        atomic_store(&acknowledged[i], 0);
        atomic_store(&begun[i], 0);
    }
    atomic_store(&odd, 0);
    atomic_store(&done, 0);
    atomic_store(&checkpoints, 0);
    atomic_store(&snapshots, 0);
    atomic_store(&resizes, 0);
}

TEST(test_all_at_once)
{
    static void *(*const others[])(void *) = {
        read_all,       read_all,     flush_often, flush_often,
        checkpoint_often, snapshot_often, resize_often};
    enum { OTHERS = sizeof others / sizeof *others };
    pthread_t threads[WRITERS + OTHERS];
    setup();
    for (uintptr_t i = 0; i < WRITERS + OTHERS; i++) {
        CHECK(pthread_create(&threads[i], NULL,
                             i < WRITERS ? write_slice : others[i - WRITERS],
                             (void *)i) == 0);
    }
    for (size_t i = 0; i < WRITERS + OTHERS; i++) {
        pthread_join(threads[i], NULL);
    }
    /* The next owner finds the same. */
    gd_volume_close(volume);
    CHECK_INT(gd_volume_open(repo, "disk", true, &volume, &x.err), GD_OK);
    for (uint64_t i = 0; i < KEPT; i += 100) {
        check_range(i, 100);
    }
    CHECK_INT(gd_volume_flush(volume, &x.err), GD_OK);
    gd_volume_close(volume);
    CHECK_INT(gd_volume_delete(repo, "disk", &x.err), GD_OK);
    CHECK_INT(atomic_load(&odd), 0);
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}
