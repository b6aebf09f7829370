/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_fence.c - the fence: its bytes, the record that counts, that it never
 * goes back, and that no crash during a write loses it.
 */
#include "engine/files/fence.h"

#include "engine/base/coding.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { RECORD = 512 };

static scratch x;

static gd_fence
record(char catalog, uint64_t sequence)
{
    gd_fence fence = {.sequence = sequence};
    memset(fence.catalog_id, catalog, GD_ID_SIZE);
    return fence;
}

static gd_status
put(char catalog, uint64_t sequence)
{
    gd_fence fence = record(catalog, sequence);
    return gd_fence_write(x.env, x.root, &fence, &x.err);
}

/* Returns the fence's sequence, if it is of this catalog; -1 if there is
 * none. */
static int64_t
get(char catalog)
{
    gd_fence fence, wanted = record(catalog, 0);
    bool found;
    CHECK_INT(gd_fence_read(x.env, x.root, &fence, &found, &x.err), GD_OK);
    if (!found) {
        return -1;
    }
    CHECK(memcmp(fence.catalog_id, wanted.catalog_id, GD_ID_SIZE) == 0);
    return (int64_t)fence.sequence;
}

/* The bytes are those of format-derived.rst. */
TEST(test_bytes)
{
    uint8_t raw[2 * RECORD];
    char hex[17];
    struct stat st;
    scratch_init(&x);
    CHECK_INT(put('a', 0x1122334455667788), GD_OK);
    CHECK_INT(put('b', 0x0102030405060708 + 1), GD_OK);
    REQUIRE(scratch_size(&x, GD_FILE_FENCE) == 2 * RECORD);
    scratch_read(&x, GD_FILE_FENCE, raw, sizeof raw, 0);
    for (int i = 0; i < 8; i++) {
        uint64_t sum = gd_checksum(raw + RECORD, 504, 0);
        snprintf(hex + 2 * i, 3, "%02x", (unsigned)(sum >> 8 * i & 0xff));
    }
    const golden pieces[] = {
        {RECORD, "474446454e434500"},
        {RECORD + 8, "62626262626262626262626262626262"},
        {RECORD + 24, "0907060504030201"},
        {RECORD + 504, hex},
    };
    CHECK(GOLDEN_MATCHES(raw, sizeof raw, pieces));
    CHECK_INT(fstatat(x.root, GD_FILE_FENCE, &st, 0), 0);
    CHECK_INT(st.st_mode & 0777, 0600);
    CHECK_INT(scratch_destroy(&x), 0);
}

TEST(test_newest_counts)
{
    scratch_init(&x);
    CHECK_INT(get('a'), -1);
    for (uint64_t i = 0; i < 5; i++) {
        CHECK_INT(put('a', i), GD_OK);
        CHECK_INT(get('a'), i);
    }
    CHECK_INT(put('a', 4), GD_OK);
    CHECK_INT(get('a'), 4);
    /* If one record is damaged, the other counts; if both are, none. */
    scratch_flip(&x, GD_FILE_FENCE, 30, 1);
    CHECK_INT(get('a'), 3);
    scratch_flip(&x, GD_FILE_FENCE, RECORD + 504, 1);
    CHECK_INT(get('a'), -1);
    CHECK_INT(put('a', 1), GD_OK);
    CHECK_INT(get('a'), 1);
    scratch_truncate(&x, GD_FILE_FENCE, 700);
    CHECK_INT(get('a'), -1);
    CHECK_INT(put('a', 2), GD_OK);
    CHECK_INT(get('a'), 2);
    scratch_truncate(&x, GD_FILE_FENCE, 0);
    CHECK_INT(get('a'), -1);
    CHECK_INT(scratch_destroy(&x), 0);
}

TEST(test_never_goes_back)
{
    scratch_init(&x);
    CHECK_INT(put('a', 8), GD_OK);
    CHECK_INT(put('a', 7), GD_INVALID);
    CHECK_CONTAINS(x.err.text, "fence says 8");
    CHECK_INT(put('a', 6), GD_INVALID);
    CHECK_INT(get('a'), 8);
    /* Another catalog begins with any sequence, in either place. */
    for (uint64_t i = 1; i < 5; i++) {
        char catalog = (char)('a' + i);
        CHECK_INT(put(catalog, 5 - i), GD_OK);
        CHECK_INT(get(catalog), 5 - i);
    }
    CHECK_INT(put('z', 100), GD_OK);
    CHECK_INT(get('z'), 100);
    CHECK_INT(scratch_destroy(&x), 0);
}

/* Each write is durable before the next step: the directory first, so that a
 * crash does not remove a file with a record. */
TEST(test_order)
{
    char trace[256];
    scratch_init(&x);
    fault_env_start_trace(&x.f);
    CHECK_INT(put('a', 1), GD_OK);
    fault_env_trace(&x.f, trace, sizeof trace);
    CHECK(strcmp(trace, "fsync pwritev fsync") == 0);
    fault_env_start_trace(&x.f);
    CHECK_INT(put('a', 2), GD_OK);
    fault_env_trace(&x.f, trace, sizeof trace);
    CHECK(strcmp(trace, "pwritev fsync") == 0);
    fault_env_start_trace(&x.f);
    CHECK_INT(put('a', 2), GD_OK); /* N2.2: even if they look equal */
    fault_env_trace(&x.f, trace, sizeof trace);
    CHECK(strcmp(trace, "pwritev fsync") == 0);
    fault_env_start_trace(&x.f);
    CHECK_INT(put('b', 1), GD_OK);
    fault_env_trace(&x.f, trace, sizeof trace);
    CHECK(strcmp(trace, "pwritev fsync pwritev fsync") == 0);
    CHECK_INT(scratch_destroy(&x), 0);
}

/* Restores the bytes from before the call, but for the first `torn` bytes that
 * a crash in its nth write left. */
static void
tear(uint64_t nth, char catalog, uint64_t sequence, uint64_t offset)
{
    uint8_t before[2 * RECORD], torn[RECORD / 2];
    scratch_read(&x, GD_FILE_FENCE, before, sizeof before, 0);
    fault_env_fail(&x.f, FAULT_PWRITEV, nth, EIO, true);
    CHECK_INT(put(catalog, sequence), GD_IO);
    fault_env_heal(&x.f);
    memset(torn, 0xee, sizeof torn);
    scratch_write(&x, GD_FILE_FENCE, torn, sizeof torn, offset);
}

/* A torn write never leaves a lower sequence, even if a sequence is skipped,
 * which would overwrite the newest record. */
TEST(test_torn)
{
    scratch_init(&x);
    CHECK_INT(put('a', 10), GD_OK);
    CHECK_INT(put('a', 11), GD_OK);
    tear(1, 'a', 12, 0);
    CHECK_INT(get('a'), 11);
    CHECK_INT(put('a', 12), GD_OK);
    tear(1, 'a', 14, RECORD); /* 13, in between */
    CHECK_INT(get('a'), 12);
    tear(2, 'a', 14, 0);
    CHECK_INT(get('a'), 13);
    CHECK_INT(put('a', 14), GD_OK);
    CHECK_INT(get('a'), 14);
    CHECK_INT(scratch_destroy(&x), 0);
}

/* The newest record is overwritten only if the one in between is durable. */
TEST(test_between_fails)
{
    static const fault_call calls[] = {FAULT_PWRITEV, FAULT_FSYNC};
    char trace[256];
    for (int i = 0; i < 2; i++) {
        scratch_init(&x);
        CHECK_INT(put('a', 11), GD_OK);
        CHECK_INT(put('a', 12), GD_OK);
        fault_env_fail(&x.f, calls[i], 1, EIO, false);
        fault_env_start_trace(&x.f);
        CHECK_INT(put('a', 14), GD_IO);
        fault_env_trace(&x.f, trace, sizeof trace);
        CHECK(strcmp(trace, i == 0 ? "" : "pwritev") == 0);
        CHECK_INT(get('a'), i == 0 ? 12 : 13);
        CHECK_INT(scratch_destroy(&x), 0);
    }
}

/* Whatever fails, the fence has its old value or the new one; and a value that
 * is reported as written was fsynced. */
TEST(test_failures)
{
    for (uint64_t skip = 1; skip < 3; skip++) {
        for (uint64_t n = 1;; n++) {
            scratch_init(&x);
            CHECK_INT(put('a', 4), GD_OK);
            CHECK_INT(put('a', 5), GD_OK);
            fault_env_fail(&x.f, FAULT_ANY, n, EIO, false);
            uint64_t faults = fault_env_faults(&x.f);
            gd_status s = put('a', 5 + skip);
            bool hit = fault_env_faults(&x.f) > faults;
            fault_env_heal(&x.f);
            int64_t now = get('a');
            CHECK(now >= 5 && now <= (int64_t)(5 + skip));
            CHECK(s == GD_IO || now == (int64_t)(5 + skip));
            CHECK_INT(put('a', 5 + skip), GD_OK);
            CHECK_INT(get('a'), 5 + skip);
            CHECK_INT(scratch_destroy(&x), 0);
            if (!hit) {
                break;
            }
        }
    }
    scratch_init(&x);
    fault_env_fail(&x.f, FAULT_FSYNC, 2, EIO, false);
    CHECK_INT(put('a', 1), GD_IO);
    CHECK_CONTAINS(x.err.text, "fsync fence");
    gd_fence fence;
    bool found;
    CHECK_INT(put('a', 1), GD_OK);
    fault_env_fail(&x.f, FAULT_PREAD, 1, EIO, false);
    CHECK_INT(gd_fence_read(x.env, x.root, &fence, &found, &x.err), GD_IO);
    CHECK_INT(scratch_destroy(&x), 0);
}

/* I10: no link is followed, and only records are read. */
TEST(test_strange_files)
{
    gd_fence fence;
    bool found;
    uint8_t noise[2 * RECORD];
    scratch_init(&x);
    CHECK_INT(symlinkat("elsewhere", x.root, GD_FILE_FENCE), 0);
    CHECK_INT(gd_fence_read(x.env, x.root, &fence, &found, &x.err), GD_IO);
    CHECK_INT(put('a', 1), GD_IO);
    CHECK(!scratch_exists(&x, "elsewhere"));
    CHECK_INT(unlinkat(x.root, GD_FILE_FENCE, 0), 0);
    fill_random(noise, sizeof noise, 7);
    scratch_write(&x, GD_FILE_FENCE, noise, sizeof noise, 0);
    CHECK_INT(get('a'), -1);
    CHECK_INT(put('a', 1), GD_OK);
    CHECK_INT(get('a'), 1);
    CHECK_INT(scratch_destroy(&x), 0);
}
