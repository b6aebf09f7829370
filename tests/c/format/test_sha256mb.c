/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_sha256mb.c - SHA-256 of several blocks at once is right, reads only the
 * blocks, and reports when it is not done.
 */
#include "engine/format/sha256mb.h"

#include <sys/mman.h>

#include <openssl/evp.h>

#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"
#include "tests/c/support/scratch_repository.h"

enum { LANES = GD_SHA256MB_LANES, PAGE = 4096 };

#if defined(__x86_64__) && !defined(GD_WITHOUT_IPSEC_MB)
#if __has_include(<intel-ipsec-mb.h>)
#define EXPECTED
#endif
#endif

typedef struct fixture {
    fault_env f;
    gd_sha256mb *m;
    gd_hash_input inputs[LANES];
    gd_fingerprint got[LANES + 2]; /* only inputs' may be written */
} fixture;

static fixture t;

/* Returns false if there is nothing to test. */
static bool
setup(void)
{
    memset(&t, 0, sizeof t);
    fault_env_init(&t.f);
    t.m = gd_sha256mb_open(&t.f.env);
#ifdef EXPECTED
    CHECK(t.m != NULL);
#else
    CHECK(t.m == NULL);
#endif
    return t.m != NULL;
}

static void
teardown(void)
{
    gd_sha256mb_close(t.m);
    CHECK_INT(fault_env_leaks(&t.f), 0);
    fault_env_destroy(&t.f);
}

static void
ask(size_t i, const void *data, size_t length)
{
    t.inputs[i] = (gd_hash_input){data, length, &t.got[i + 1]};
}

static void
check_one(const gd_scope *scope, const gd_hash_input *input)
{
    uint8_t wanted[GD_FINGERPRINT_SIZE];
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    CHECK(EVP_DigestInit_ex(context, EVP_sha256(), NULL));
    if (scope != NULL) {
        CHECK(EVP_DigestUpdate(context, scope->id, GD_SCOPE_SIZE));
    }
    CHECK(EVP_DigestUpdate(context, input->data, input->length));
    CHECK(EVP_DigestFinal_ex(context, wanted, NULL));
    EVP_MD_CTX_free(context);
    CHECK(memcmp(input->out->bytes, wanted, sizeof wanted) == 0);
}

static void
check_all_of(const gd_scope *scope, size_t count)
{
    static const gd_fingerprint untouched;
    memset(t.got, 0, sizeof t.got);
    CHECK(gd_sha256mb_hash(t.m, scope, t.inputs, count));
    for (size_t i = 0; i < count; i++) {
        check_one(scope, &t.inputs[i]);
    }
    CHECK(gd_fingerprint_equal(&t.got[0], &untouched));
    CHECK(gd_fingerprint_equal(&t.got[count + 1], &untouched));
}

/* These are around the ends of the hash's own blocks of 64 bytes, and the
 * longest. */
static const size_t lengths[] = {
    1,    0,    3,    54,   55,   56,   57,    63,    64,   65,    4096,
    118,  119,  120,  121,  127,  128,  129,   4095,  4097, 1000,  40000,
    4080, 4079, 4081, 8192, 512,  1024, 32768, 65000, 20,   65517, 65518,
};
enum { LENGTHS = sizeof lengths / sizeof *lengths };

TEST(test_all_counts_and_lengths)
{
    static uint8_t data[2 * 65536];
    static const gd_scope scope = {{1, 2, 3, 0, 255}};
    fill_random(data, sizeof data, 7);
    bool here = setup();
    for (size_t first = 0; here && first < LENGTHS; first++) {
        for (size_t count = 1; count <= LANES; count++) {
            for (size_t i = 0; i < count; i++) {
                ask(i, data + first * 1789 + i * 13,
                    lengths[(first + i * 5) % LENGTHS]);
            }
            check_all_of(NULL, count);
            check_all_of(&scope, count);
        }
    }
    teardown();
}

/* The memory behind a block may be missing. */
TEST(test_nothing_beyond_a_block_is_read)
{
    uint8_t *pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(pages != MAP_FAILED);
    fill_random(pages, PAGE, 8);
    CHECK_INT(mprotect(pages + PAGE, PAGE, PROT_NONE), 0);
    if (setup()) {
        for (size_t i = 0; i < LANES; i++) {
            size_t length = i % 3 == 0 ? PAGE : 1 + i * 77;
            ask(i, pages + PAGE - length, length);
        }
        check_all_of(NULL, LANES);
        check_all_of(&gd_spares_scope, LANES);
    }
    teardown();
    munmap(pages, 2 * PAGE);
}

/* Later blocks get right digests after the refusal. */
TEST(test_too_long)
{
    static uint8_t data[GD_SHA256MB_MAX + 1];
    fill_random(data, sizeof data, 9);
    if (setup()) {
        for (size_t i = 0; i < LANES; i++) {
            ask(i, data, 100 + i);
        }
        ask(5, data, GD_SHA256MB_MAX);
        check_all_of(NULL, LANES);
        CHECK(!gd_sha256mb_hash(t.m, &gd_spares_scope, t.inputs, LANES));
        ask(5, data, GD_SHA256MB_MAX + 1);
        CHECK(!gd_sha256mb_hash(t.m, NULL, t.inputs, LANES));
        ask(5, data, SIZE_MAX);
        CHECK(!gd_sha256mb_hash(t.m, &gd_spares_scope, t.inputs, LANES));
        ask(5, data, GD_SHA256MB_MAX - GD_SCOPE_SIZE);
        check_all_of(&gd_spares_scope, LANES);
    }
    teardown();
}

TEST(test_out_of_memory)
{
    static uint8_t data[4096];
    if (setup()) {
        for (size_t i = 0; i < LANES; i++) {
            ask(i, data + i, 4000);
        }
        check_all_of(&gd_spares_scope, 2);
        fault_env_fail(&t.f, FAULT_ALLOC, 1, ENOMEM, false);
        CHECK(!gd_sha256mb_hash(t.m, &gd_spares_scope, t.inputs, LANES));
        check_all_of(&gd_spares_scope, LANES);
        fault_env_fail(&t.f, FAULT_ALLOC, 1, ENOMEM, false);
        CHECK(gd_sha256mb_open(&t.f.env) == NULL);
    }
    teardown();
}
