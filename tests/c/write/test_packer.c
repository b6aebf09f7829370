/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_packer.c - new blocks on their way into segments: whatever their
 * lengths, and whenever they are flushed or synced, each is found at its
 * address; and a transaction finds its own blocks before they are published.
 */
#include "engine/write/packer.h"

#include "engine/base/coding.h"
#include "engine/files/group.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { BLOCKS = 600, ROOM = 64 /* blocks between two flushes */ };

typedef struct fixture {
    scratch x;
    gd_repo *repo;
    gd_packer *packer;
    gd_hasher *hasher;
    /* The added blocks. */
    uint32_t count;
    uint64_t seeds[BLOCKS];
    uint32_t lengths[BLOCKS];
    gd_address addresses[BLOCKS];
    uint8_t *buffers; /* the data since the last flush */
    uint32_t waiting;
} fixture;

static void
open_all(fixture *t)
{
    t->repo = scratch_repo(&t->x);
    CHECK_INT(gd_packer_open(t->repo, &gd_global_scope, &t->packer, &t->x.err),
              GD_OK);
    CHECK_INT(gd_hasher_open(t->x.env, t->repo->digest, &t->hasher,
                             &t->x.err),
              GD_OK);
    t->buffers = malloc((size_t)ROOM * t->x.params.block_size);
    t->count = t->waiting = 0;
}

static void
close_all(fixture *t)
{
    free(t->buffers);
    gd_hasher_close(t->x.env, t->hasher);
    gd_packer_close(t->packer);
    gd_repo_close(t->repo);
}

/* Fills in text and noise, so that some segments pay and some do not. */
static void
content(uint64_t seed, uint8_t *out, uint32_t length)
{
    if (seed % 5 < 3) {
        memset(out, (int)seed, length);
        memcpy(out, &seed, length < 8 ? length : 8);
    } else {
        fill_random(out, length, seed);
    }
}

static gd_status
add(fixture *t, uint64_t seed, uint32_t length)
{
    gd_fingerprint fp;
    uint8_t *data = t->buffers + t->waiting * t->x.params.block_size;
    content(seed, data, length);
    CHECK_INT(gd_hasher_compute(t->hasher, &gd_global_scope, data, length, &fp,
                                NULL), GD_OK);
    gd_address *address = &t->addresses[t->count];
    gd_status s = gd_packer_add(t->packer, data, length, &fp,
                                gd_checksum(data, length, 0), address,
                                &t->x.err);
    if (s == GD_OK) {
        t->seeds[t->count] = seed;
        t->lengths[t->count++] = length;
        t->waiting++;
    }
    return s;
}

/* The packer may not read the data any more: it is overwritten. */
static void
forget_data(fixture *t)
{
    memset(t->buffers, 0xdd, (size_t)ROOM * t->x.params.block_size);
    t->waiting = 0;
}

static void
flush(fixture *t)
{
    CHECK_INT(gd_packer_flush(t->packer, &t->x.err), GD_OK);
    forget_data(t);
}

static void
sync_all(fixture *t)
{
    CHECK_INT(gd_packer_sync(t->packer, &t->x.err), GD_OK);
    forget_data(t);
}

static gd_address
find(fixture *t, uint64_t seed, uint32_t length)
{
    static uint8_t data[65536];
    gd_fingerprint fp;
    content(seed, data, length);
    CHECK_INT(gd_hasher_compute(t->hasher, &gd_global_scope, data, length, &fp,
                                NULL), GD_OK);
    return gd_packer_find(t->packer, data, length, &fp);
}

/* Reads all blocks by their addresses. */
static void
check_stored(fixture *t)
{
    static uint8_t in[GD_SEGMENT_HEADER + GD_SEGMENT_MAX];
    static uint8_t plain[GD_SEGMENT_MAX], wanted[65536];
    gd_coder *coder;
    REQUIRE(gd_coder_open(t->x.env, &coder, NULL) == GD_OK);
    for (uint32_t i = 0; i < t->count; i++) {
        gd_group *group;
        gd_entry entry;
        gd_segment_header header;
        gd_address at = t->addresses[i];
        REQUIRE(gd_group_open(t->x.env, t->x.root, &t->x.params, at.group,
                              O_RDONLY, &group, &t->x.err) == GD_OK);
        CHECK_INT(gd_group_read_entries(group, at.slot, 1, &entry, &t->x.err),
                  GD_OK);
        content(t->seeds[i], wanted, t->lengths[i]);
        if (CHECK_INT(entry.state, GD_ENTRY_LIVE) &&
            CHECK_INT(entry.plain_length, t->lengths[i]) &&
            CHECK_INT(gd_group_read_segment(group, &entry, at.slot, coder, in,
                                            plain, &header, &t->x.err),
                      GD_OK)) {
            CHECK(gd_segment_intact(in, &header, group->bounds.seed));
            CHECK(header.plain_length <= t->x.params.segment_size);
            CHECK(memcmp(plain + entry.plain_offset, wanted,
                         t->lengths[i]) == 0);
            CHECK(gd_checksum(wanted, t->lengths[i], 0) == entry.checksum);
        }
        gd_group_close(group);
    }
    gd_coder_close(t->x.env, coder);
}

/* Returns the bytes behind the fingerprint tables of all groups. */
static uint64_t
stored_bytes(fixture *t)
{
    uint64_t bytes = 0;
    char name[GD_NAME_SIZE];
    for (uint32_t n = 1;; n++) {
        gd_names_group(n, name);
        if (!scratch_exists(&t->x, name)) {
            return bytes;
        }
        bytes += (uint64_t)scratch_size(&t->x, name) -
                 gd_fptable_data_start(t->x.params.group_slots);
    }
}

/* ---- random blocks ---- */

static void
run_random(uint32_t block, uint32_t segment, gd_codec codec, unsigned threads,
           uint64_t seed)
{
    fixture t;
    uint64_t new_bytes = 0;
    scratch_init(&t.x);
    t.x.params.block_size = block;
    t.x.params.segment_size = segment;
    t.x.params.codec = codec;
    t.x.params.threads = threads;
    open_all(&t);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        uint64_t dice = next_random(&seed);
        uint32_t length =
            dice % 4 == 0 ? 1 + (uint32_t)(dice >> 8) % block : block;
        if (!CHECK_INT(add(&t, i + 1, length), GD_OK)) {
            fprintf(stderr, "%s\n", t.x.err.text);
            break;
        }
        new_bytes += length;
        if (t.waiting == ROOM || dice % 16 == 1) {
            flush(&t);
        } else if (dice % 64 == 2) {
            sync_all(&t);
        }
    }
    sync_all(&t);
    sync_all(&t); /* again, without new blocks */
    uint64_t counted, stored;
    gd_packer_count(t.packer, &counted, &stored);
    CHECK_INT(counted, new_bytes);
    CHECK_INT(stored, stored_bytes(&t));
    check_stored(&t);
    close_all(&t);
    CHECK_INT(scratch_destroy(&t.x), 0);
}

TEST(test_random_blocks)
{
    static const uint32_t sizes[][2] = {
        {512, 512}, {512, 4096}, {4096, 65536}, {4096, 4096}, {16384, 65536}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int codec = GD_CODEC_NONE; codec <= GD_CODEC_ZSTD; codec++) {
            run_random(sizes[i][0], sizes[i][1], (gd_codec)codec, i % 3, i);
        }
    }
}

/* The data is in one piece, or just behind the carried bytes. */
TEST(test_neighbouring_data)
{
    fixture t;
    gd_fingerprint fp = {{1}};
    scratch_init(&t.x);
    t.x.params.codec = GD_CODEC_NONE;
    open_all(&t);
    for (uint32_t i = 0; i < ROOM - 1; i++) {
        CHECK_INT(add(&t, i, 4096), GD_OK); /* contiguous in the buffer */
    }
    flush(&t);
    CHECK_INT(add(&t, 99, 4096), GD_OK);
    sync_all(&t);
    check_stored(&t);
    CHECK_INT(gd_packer_find(t.packer, t.buffers, 1, &fp).group, 0);
    close_all(&t);
    CHECK_INT(scratch_destroy(&t.x), 0);
}

/* ---- a transaction's own blocks ---- */

static void
check_found(fixture *t)
{
    uint32_t group = t->addresses[t->count - 1].group;
    for (uint32_t i = 0; i < t->count; i++) {
        gd_address found = find(t, t->seeds[i], t->lengths[i]);
        /* Only blocks in the group now open are found. */
        if (t->addresses[i].group == group) {
            CHECK_INT(found.group, group);
            CHECK_INT(found.slot, t->addresses[i].slot);
        } else {
            CHECK_INT(found.group, 0);
        }
    }
    CHECK_INT(find(t, 100000, 512).group, 0);
}

/* The blocks are waiting, carried, appended or synced; they are found by hash,
 * and by value with a digest of 8 bits, where most fingerprints are equal. */
TEST(test_find)
{
    for (int by_value = 0; by_value < 3; by_value++) {
        fixture t;
        scratch_init(&t.x);
        t.x.params.block_size = 512;
        t.x.params.segment_size = 4096;
        t.x.params.by_value = by_value > 0;
        strcpy(t.x.params.digest, by_value == 2 ? "weak-8" : "sha256");
        open_all(&t);
        CHECK_INT(find(&t, 1, 512).group, 0);
        for (uint32_t i = 0; i < 150; i++) {
            CHECK_INT(add(&t, i, i % 7 == 0 ? 100 + i : 512), GD_OK);
            check_found(&t);
            if (i % 11 == 5) {
                flush(&t);
                check_found(&t);
            }
            if (i % 50 == 49) {
                sync_all(&t);
                check_found(&t);
            }
        }
        sync_all(&t);
        check_stored(&t);
        close_all(&t);
        CHECK_INT(scratch_destroy(&t.x), 0);
    }
}

/* Returns the length of a start of a block that has the whole one's
 * fingerprint. */
static uint32_t
shorter_namesake(fixture *t, uint64_t seed, uint32_t length)
{
    uint8_t data[512];
    gd_fingerprint whole, part;
    content(seed, data, length);
    CHECK_INT(gd_hasher_compute(t->hasher, &gd_global_scope, data, length,
                                &whole, NULL), GD_OK);
    do {
        CHECK_INT(gd_hasher_compute(t->hasher, &gd_global_scope, data,
                                    --length, &part, NULL), GD_OK);
    } while (length > 1 && !gd_fingerprint_equal(&whole, &part));
    CHECK(length > 1);
    return length;
}

TEST(test_length_counts)
{
    fixture t;
    scratch_init(&t.x);
    t.x.params.by_value = true;
    strcpy(t.x.params.digest, "weak-8");
    open_all(&t);
    uint32_t shorter = shorter_namesake(&t, 8, 512);
    CHECK_INT(add(&t, 8, 512), GD_OK); /* noise */
    for (int i = 0; i < 3; i++) {
        CHECK_INT(find(&t, 8, 512).group, 1);
        CHECK_INT(find(&t, 8, shorter).group, 0);
        CHECK_INT(find(&t, 8, 512).group, 1);
        if (i == 0) {
            flush(&t);
        } else {
            sync_all(&t);
        }
    }
    close_all(&t);
    CHECK_INT(scratch_destroy(&t.x), 0);
}

/* By value, a stored block that is damaged is not equal to any block. */
static void
check_damage(uint64_t at, uint32_t group)
{
    fixture t;
    scratch_init(&t.x);
    t.x.params.by_value = true;
    open_all(&t);
    CHECK_INT(add(&t, 3, 4096), GD_OK); /* noise */
    flush(&t);
    sync_all(&t);
    scratch_flip(&t.x, "groups/00000001", at, 1);
    CHECK_INT(find(&t, 3, 4096).group, group);
    close_all(&t);
    CHECK_INT(scratch_destroy(&t.x), 0);
}

TEST(test_damaged_blocks_are_not_found)
{
    check_damage(8192 + 32 + 77, 0);
    check_damage(8192, 0); /* the segment's magic */
    check_damage(gd_entry_offset(0), 0);
    check_damage(gd_entry_offset(1), 1); /* a neighbour's */
}

/* ---- compression under pressure ---- */

/* Returns the entry of block number i. */
static gd_entry
stored_entry(fixture *t, uint32_t i)
{
    gd_group *group;
    gd_entry entry = {0};
    gd_address at = t->addresses[i];
    if (CHECK_INT(gd_group_open(t->x.env, t->x.root, &t->x.params, at.group,
                                O_RDONLY, &group, &t->x.err), GD_OK)) {
        CHECK_INT(gd_group_read_entries(group, at.slot, 1, &entry, &t->x.err),
                  GD_OK);
        gd_group_close(group);
    }
    return entry;
}

static void
open_with_codec(fixture *t, gd_codec codec, int level, uint32_t segment)
{
    scratch_init(&t->x);
    t->x.params.codec = codec;
    t->x.params.codec_level = level;
    t->x.params.segment_size = segment;
}

/* Adds so many blocks of noise, or text. */
static void
add_blocks(fixture *t, uint32_t count, bool noise)
{
    for (uint32_t i = 0; i < count; i++) {
        CHECK_INT(add(t, 5 * (uint64_t)t->count + (noise ? 3 : 1), 4096),
                  GD_OK);
        if (t->waiting == ROOM) {
            flush(t);
        }
    }
}

TEST(test_noise_and_text)
{
    enum { NOISE = 205 }; /* the last one is tried: the maximum is lost */
    for (int codec = GD_CODEC_LZ4; codec <= GD_CODEC_ZSTD; codec++) {
        fixture t;
        uint32_t raw = 0;
        open_with_codec(&t, (gd_codec)codec, 0, 4096);
        open_all(&t);
        add_blocks(&t, 50, false);
        add_blocks(&t, NOISE, true);
        add_blocks(&t, 200, false);
        sync_all(&t);
        for (uint32_t i = 0; i < t.count; i++) {
            int wanted = i >= 50 && i < 50 + NOISE + raw ? GD_CODEC_NONE : codec;
            int found = stored_entry(&t, i).codec;
            if (i >= 50 + NOISE && raw < 7 && found == GD_CODEC_NONE) {
                raw++;
            } else {
                CHECK_INT(found, wanted);
            }
        }
        CHECK_INT(raw, 7);
        check_stored(&t);
        close_all(&t);
        CHECK_INT(scratch_destroy(&t.x), 0);
    }
}

/* A segment that a quick try found to pay is compressed as well as others. */
TEST(test_level_after_noise)
{
    static uint8_t plain[65536], out[65536], quick_out[65536];
    fixture t;
    gd_coder *coder;
    size_t quick, slow;
    uint64_t dice = 1;
    gd_fingerprint fp = {{1}};
    gd_address address;
    for (size_t i = 0; i < sizeof plain; i += 4) {
        uint64_t word = next_random(&dice) % 600;
        memcpy(plain + i, &word, 4);
    }
    open_with_codec(&t, GD_CODEC_ZSTD, 19, 65536);
    t.x.params.block_size = 65536;
    open_all(&t);
    REQUIRE(gd_coder_open(t.x.env, &coder, NULL) == GD_OK);
    CHECK_INT(gd_codec_compress(coder, GD_CODEC_ZSTD, 0, plain,
                                sizeof plain, quick_out, &quick, NULL),
              GD_OK);
    CHECK_INT(gd_codec_compress(coder, GD_CODEC_ZSTD, 19, plain,
                                sizeof plain, out, &slow, NULL), GD_OK);
    CHECK(slow > 0 && slow < quick);
    for (int i = 0; i < 3; i++) {
        CHECK_INT(add(&t, 3, 65536), GD_OK); /* noise */
    }
    CHECK_INT(gd_packer_add(t.packer, plain, sizeof plain, &fp,
                            gd_checksum(plain, sizeof plain, 0), &address,
                            &t.x.err), GD_OK);
    sync_all(&t);
    t.addresses[t.count] = address;
    CHECK_INT(stored_entry(&t, t.count).stored_length, slow);
    gd_coder_close(t.x.env, coder);
    close_all(&t);
    CHECK_INT(scratch_destroy(&t.x), 0);
}

/* Clocks of a machine on which each thread gets one processor in `crowd`. */
static struct {
    int64_t worked, asked;
    int crowd;
} machine;

static int64_t
crowded_thread_ns(const gd_env *env)
{
    (void)env;
    machine.asked++;
    return machine.worked += 1000;
}

static int64_t
crowded_monotonic_ns(const gd_env *env)
{
    (void)env;
    machine.asked++;
    return machine.worked * machine.crowd / 2; /* two steps each time */
}

/* Returns how many of the 256 blocks after the first bundle were stored
 * uncompressed. */
static uint32_t
store_in_crowd(int crowd, bool yields, gd_codec codec)
{
    enum { FIRST_BUNDLE = ROOM - 1 }; /* the last one is still open */
    fixture t;
    uint32_t raw = 0;
    open_with_codec(&t, codec, 0, 4096);
    t.x.params.adaptive_compression = yields;
    t.x.f.env.monotonic_ns = crowded_monotonic_ns;
    t.x.f.env.thread_ns = crowded_thread_ns;
    open_all(&t);
    memset(&machine, 0, sizeof machine);
    machine.crowd = crowd;
    add_blocks(&t, FIRST_BUNDLE + 256, false);
    sync_all(&t);
    for (uint32_t i = FIRST_BUNDLE; i < t.count; i++) {
        raw += stored_entry(&t, i).codec == GD_CODEC_NONE;
    }
    CHECK_INT(atomic_load(&t.repo->counters.yielded_segments),
              codec == GD_CODEC_NONE ? 0 : raw);
    check_stored(&t);
    close_all(&t);
    CHECK_INT(scratch_destroy(&t.x), 0);
    return raw;
}

TEST(test_crowds)
{
    CHECK_INT(store_in_crowd(1, true, GD_CODEC_LZ4), 0);
    CHECK_INT(store_in_crowd(3, true, GD_CODEC_LZ4), 0);
    uint32_t some = store_in_crowd(6, true, GD_CODEC_ZSTD);
    CHECK(some >= 64 && some <= 192);
    CHECK_INT(store_in_crowd(20, true, GD_CODEC_LZ4), 256);
    /* One segment in sixteen was timed, with four readings of clocks. */
    CHECK(machine.asked > 0 && machine.asked <= 4 * (320 / 16 + 6));
    CHECK_INT(store_in_crowd(20, false, GD_CODEC_LZ4), 0);
    CHECK_INT(machine.asked, 0);
    CHECK_INT(store_in_crowd(20, true, GD_CODEC_NONE), 256);
    CHECK_INT(machine.asked, 0);
}

/* ---- giving up ---- */

TEST(test_close_without_sync)
{
    fixture t;
    scratch_init(&t.x);
    open_all(&t);
    for (uint32_t i = 0; i < 70; i++) {
        CHECK_INT(add(&t, i, 4096), GD_OK);
        if (t.waiting == ROOM) {
            flush(&t);
        }
    }
    CHECK_INT(t.addresses[69].group, 2);
    close_all(&t);
    CHECK_INT(scratch_size(&t.x, "groups/00000002"), 8192);
    open_all(&t);
    /* Group 1 was full, so it was synced; group 2 is like a new one. */
    CHECK_INT(add(&t, 1, 4096), GD_OK);
    CHECK_INT(t.addresses[0].group, 2);
    CHECK_INT(t.addresses[0].slot, 0);
    /* The shared lock is held to the end, and no longer. */
    const gd_env *env = gd_env_posix();
    int raw = openat(t.x.root, GD_FILE_GROUP_LOCKS, O_RDWR | O_CLOEXEC);
    const uint64_t share = (UINT64_C(1) << 32) + 2;
    sync_all(&t);
    CHECK_INT(env->lock(env, raw, share, F_WRLCK), -EAGAIN);
    CHECK_INT(env->lock(env, raw, share - 1, F_WRLCK), 0);
    close_all(&t);
    CHECK_INT(env->lock(env, raw, share, F_WRLCK), 0);
    close(raw);
    CHECK_INT(scratch_destroy(&t.x), 0);
}

TEST(test_failures)
{
    fixture t;
    gd_packer *packer;
    scratch_init(&t.x);
    t.x.params.by_value = true;
    t.x.params.threads = 1;
    gd_repo *repo = scratch_repo(&t.x);
    gd_status s = GD_NOMEM;
    for (uint64_t n = 1; s != GD_OK; n++) {
        int64_t before = t.x.f.allocations;
        fault_env_fail(&t.x.f, FAULT_ALLOC, n, ENOMEM, false);
        s = gd_packer_open(repo, &gd_global_scope, &packer, &t.x.err);
        CHECK(s == GD_OK || s == GD_NOMEM);
        CHECK(s == GD_OK || t.x.f.allocations == before);
    }
    fault_env_heal(&t.x.f);
    gd_packer_close(packer);
    gd_repo_close(repo);
    open_all(&t);
    for (uint32_t i = 0; i < 20; i++) {
        CHECK_INT(add(&t, i, 4096), GD_OK);
    }
    fault_env_fail(&t.x.f, FAULT_PWRITEV, 1, ENOSPC, false);
    /* The pool writes it, meanwhile or when the test waits for it. */
    CHECK_INT(gd_packer_flush(t.packer, &t.x.err), GD_OK);
    CHECK_INT(gd_packer_sync(t.packer, &t.x.err), GD_NOSPACE);
    CHECK_CONTAINS(t.x.err.text, "groups/00000001");
    CHECK_INT(gd_packer_sync(t.packer, &t.x.err), GD_NOSPACE);
    close_all(&t);
    CHECK_INT(scratch_size(&t.x, "groups/00000001"), 8192);
    open_all(&t);
    CHECK_INT(add(&t, 7, 4096), GD_OK);
    sync_all(&t);
    CHECK_INT(t.addresses[0].slot, 0);
    check_stored(&t);
    close_all(&t);
    CHECK_INT(scratch_destroy(&t.x), 0);
}

/* Another scope uses another group; blocks that were added before are
 * synced. */
TEST(test_scopes)
{
    fixture t;
    const gd_scope scopes[] = {gd_global_scope, {{1}}, {{2}}};
    uint32_t groups[3] = {0};
    scratch_init(&t.x);
    open_all(&t);
    for (uint64_t i = 0; i < 12; i++) {
        const gd_scope *scope = &scopes[i % 3];
        gd_group *group;
        gd_published record;
        CHECK_INT(gd_packer_set_scope(t.packer, scope, &t.x.err), GD_OK);
        CHECK_INT(add(&t, i, 512), GD_OK);
        uint32_t number = t.addresses[i].group;
        CHECK(groups[i % 3] == 0 || groups[i % 3] == number);
        groups[i % 3] = number;
        REQUIRE(gd_group_open(t.x.env, t.x.root, &t.x.params, number, O_RDONLY,
                              &group, &t.x.err) == GD_OK);
        CHECK(gd_scope_equal(&group->scope, scope));
        CHECK_INT(gd_group_read_published(group, &record, &t.x.err), GD_OK);
        CHECK_INT(record.count, i / 3); /* all before this one */
        gd_group_close(group);
        /* Setting the same scope again changes nothing. */
        CHECK_INT(gd_packer_set_scope(t.packer, scope, &t.x.err), GD_OK);
    }
    CHECK(groups[0] != groups[1] && groups[1] != groups[2] &&
          groups[0] != groups[2]);
    sync_all(&t);
    check_stored(&t);
    close_all(&t);
    CHECK_INT(scratch_destroy(&t.x), 0);
}
