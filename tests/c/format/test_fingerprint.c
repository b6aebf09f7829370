/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_fingerprint.c - digests by name, against vectors made elsewhere.
 *
 * The vectors of "" and "abc" are the published ones of each digest; those of
 * the pattern were made with Python's hashlib and xxhash.
 */
#include "engine/format/fingerprint.h"

#include <openssl/err.h>

#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"
#include "tests/c/support/reference_xxh3.h"
#include "tests/c/support/scratch_repository.h"

enum { PATTERN = 4096 };

static void
fill_pattern(uint8_t data[PATTERN])
{
    for (unsigned i = 0; i < PATTERN; i++) {
        data[i] = (uint8_t)(i * 7 + i / 251);
    }
}

static void
to_hex(const gd_fingerprint *fp, char out[2 * GD_FINGERPRINT_SIZE + 1])
{
    for (unsigned i = 0; i < GD_FINGERPRINT_SIZE; i++) {
        sprintf(out + 2 * i, "%02x", fp->bytes[i]);
    }
}

static void
check_vector(gd_hasher *hasher, const void *data, size_t len,
             const char *wanted)
{
    gd_fingerprint fp;
    gd_error err;
    char hex[2 * GD_FINGERPRINT_SIZE + 1];
    char padded[2 * GD_FINGERPRINT_SIZE + 1];
    memset(&fp, 0xee, sizeof fp);
    CHECK_INT(gd_hasher_compute(hasher, &gd_global_scope, data, len, &fp,
                                &err), GD_OK);
    to_hex(&fp, hex);
    memset(padded, '0', sizeof padded - 1);
    padded[sizeof padded - 1] = '\0';
    memcpy(padded, wanted, strlen(wanted));
    CHECK_CONTAINS(hex, padded);
}

/* Hashes the id, and then the data, as if they were one. */
static void
check_scope(gd_hasher *hasher, const uint8_t *data)
{
    gd_scope scope;
    gd_fingerprint of_scope, of_all;
    memcpy(scope.id, data, GD_SCOPE_SIZE);
    for (size_t len = 0; len <= PATTERN - GD_SCOPE_SIZE; len += 111) {
        CHECK_INT(gd_hasher_compute(hasher, &scope, data + GD_SCOPE_SIZE, len,
                                    &of_scope, NULL), GD_OK);
        CHECK_INT(gd_hasher_compute(hasher, &gd_global_scope, data,
                                    GD_SCOPE_SIZE + len, &of_all, NULL),
                  GD_OK);
        CHECK(gd_fingerprint_equal(&of_scope, &of_all));
    }
}

/* Each vector is hashed twice and between others: a hasher starts again every
 * time. */
static void
check_digest(const char *name, bool cryptographic, const char *empty,
             const char *abc, const char *pattern)
{
    uint8_t data[PATTERN];
    fault_env f;
    gd_error err;
    gd_digest *digest = NULL;
    gd_hasher *hasher = NULL;
    fill_pattern(data);
    fault_env_init(&f);
    CHECK_INT(gd_digest_open(&f.env, name, true, &digest, &err), GD_OK);
    REQUIRE(digest != NULL);
    CHECK_INT(gd_hasher_open(&f.env, digest, &hasher, &err), GD_OK);
    REQUIRE(hasher != NULL);
    CHECK(gd_digest_is_cryptographic(digest) == cryptographic);
    for (int i = 0; i < 2; i++) {
        check_vector(hasher, data, PATTERN, pattern);
        check_vector(hasher, "", 0, empty);
        check_vector(hasher, "abc", 3, abc);
        check_scope(hasher, data);
    }
    gd_hasher_close(&f.env, hasher);
    gd_digest_close(&f.env, digest);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

TEST(test_sha256)
{
    const char *empty = "e3b0c44298fc1c149afbf4c8996fb924"
                        "27ae41e4649b934ca495991b7852b855";
    const char *abc = "ba7816bf8f01cfea414140de5dae2223"
                      "b00361a396177a9cb410ff61f20015ad";
    const char *pattern = "f9e18c560be5697b5376f69c47a1e309"
                          "23a7ae047c9a6f747fcba904c0657628";
    check_digest("sha256", true, empty, abc, pattern);
    check_digest("SHA2-256", true, empty, abc, pattern);
}

TEST(test_sha512_256)
{
    check_digest("sha512-256", true,
                 "c672b8d1ef56ed28ab87c3622c511406"
                 "9bdd3ad7b8f9737498d0c01ecef0967a",
                 "53048e2681941ef99b2e29b76b4c7dab"
                 "e4c2d0c634fc6d46e0e2f13107e7af23",
                 "eddf330e9254e0986826aa313ad8dafd"
                 "c98cd537d03e2097216c31e8578e1917");
}

TEST(test_blake2s256)
{
    check_digest("blake2s256", true,
                 "69217a3079908094e11121d042354a7c"
                 "1f55b6482ca1a51e1b250dfd1ed0eef9",
                 "508c5e8c327c14e2e1a72ba34eeb452f"
                 "37458b209ed63a294d999b4c86675982",
                 "5c70cbcc8782e625c4248062f8e8f22f"
                 "8b77fc785653b555c94f3fbe8e273e1f");
}

TEST(test_sha3_256)
{
    check_digest("sha3-256", true,
                 "a7ffc6f8bf1ed76651c14756a061d662"
                 "f580ff4de43b49fa82d80a4b80f8434a",
                 "3a985da74fe225b2045c172d6bd390bd"
                 "855f086e3e9d525b46bfe24511431532",
                 "c5dbc926012bcb0c45d2ddc743a1444d"
                 "b6bbecc3b9f861c993d7f8e76923e79a");
}

TEST(test_long_digest_is_cut)
{
    check_digest("sha512", true,
                 "cf83e1357eefb8bdf1542850d66d8007"
                 "d620e4050b5715dc83f4a921d36ce9ce",
                 "ddaf35a193617abacc417349ae204131"
                 "12e6fa4e89a97ea20a9eeee64b55d39a",
                 "5f0a6b22f6ede8ef6c8effa74eb2420d"
                 "3adbbf1bb39707ce51361769917f4036");
}

TEST(test_short_digest_is_padded)
{
    check_digest("sha1", false, "da39a3ee5e6b4b0d3255bfef95601890afd80709",
                 "a9993e364706816aba3e25717850c26c9cd0d89d",
                 "802ef0459e70257df1d8af2aeedc3f5b9e8d63aa");
}

TEST(test_xxh3)
{
    check_digest("xxh3-128", false, "99aa06d3014798d86001c324468d497f",
                 "06b05ab6733a618578af5f94892f3950",
                 "cde3f47d2ed204cd5a73a95c9a8b3549");
    check_digest("XXH3-128", false, "99aa06d3014798d86001c324468d497f",
                 "06b05ab6733a618578af5f94892f3950",
                 "cde3f47d2ed204cd5a73a95c9a8b3549");
}

TEST(test_weak)
{
    check_digest("weak-8", false, "e3", "ba", "f9");
}

TEST(test_xxh3_equals_the_reference)
{
    static uint8_t data[70000];
    gd_digest *digest;
    gd_hasher *hasher;
    const gd_env *env = gd_env_posix();
    fill_random(data, sizeof data, 4);
    REQUIRE(gd_digest_open(env, "xxh3-128", false, &digest, NULL) == GD_OK);
    REQUIRE(gd_hasher_open(env, digest, &hasher, NULL) == GD_OK);
    for (size_t length = 0; length <= sizeof data;
         length += length < 1100 ? 1 : 1 + length / 9) {
        gd_fingerprint fp, wanted = {{0}};
        reference_xxh3_128(data, length, wanted.bytes);
        CHECK_INT(gd_hasher_compute(hasher, &gd_global_scope, data, length,
                                    &fp, NULL), GD_OK);
        CHECK(gd_fingerprint_equal(&fp, &wanted));
    }
    gd_hasher_close(env, hasher);
    gd_digest_close(env, digest);
}

/* ---- many at once ---- */

enum { MANY = 70, MANY_DATA = 1 << 20 };

typedef struct many {
    fault_env f;
    gd_digest *digest;
    gd_hasher *hasher;
    uint8_t *data;
    uint64_t random;
    gd_hash_input inputs[MANY];
    gd_fingerprint got[MANY + 1];
} many;

static void
open_many(many *m, const char *digest)
{
    memset(m, 0, sizeof *m);
    fault_env_init(&m->f);
    m->data = malloc(MANY_DATA);
    REQUIRE(m->data != NULL);
    fill_random(m->data, MANY_DATA, 5);
    REQUIRE(gd_digest_open(&m->f.env, digest, true, &m->digest, NULL) ==
            GD_OK);
    REQUIRE(gd_hasher_open(&m->f.env, m->digest, &m->hasher, NULL) == GD_OK);
}

static void
close_many(many *m)
{
    gd_hasher_close(&m->f.env, m->hasher);
    gd_digest_close(&m->f.env, m->digest);
    CHECK_INT(fault_env_leaks(&m->f), 0);
    fault_env_destroy(&m->f);
    free(m->data);
}

/* Each digest is as if it were computed alone, and no byte behind the last is
 * written. */
static void
check_many(many *m, const gd_scope *scope, size_t count)
{
    gd_fingerprint one;
    memset(m->got, 0xee, sizeof m->got);
    CHECK_INT(gd_hasher_compute_many(m->hasher, scope, m->inputs, count, NULL),
              GD_OK);
    for (size_t i = 0; i < count; i++) {
        const gd_hash_input *input = &m->inputs[i];
        CHECK_INT(gd_hasher_compute(m->hasher, scope, input->data,
                                    input->length, &one, NULL), GD_OK);
        CHECK(gd_fingerprint_equal(input->out, &one));
    }
    CHECK_INT(m->got[count].bytes[0], 0xee);
}

/* shift: 0 for lengths of 1 to 65536; 16 for blocks of 4096 but the last. */
static void
check_counts(many *m, const gd_scope *scope, unsigned shift)
{
    for (size_t count = 0; count <= MANY; count++) {
        for (size_t i = 0; i < count; i++) {
            size_t at = next_random(&m->random) % (MANY_DATA - 65536);
            size_t length = (next_random(&m->random) % 65536 >> shift) + 1;
            if (shift > 0 && i + 1 < count) {
                length = 4096;
            }
            m->inputs[i] =
                (gd_hash_input){m->data + at, length, &m->got[i]};
        }
        check_many(m, scope, count);
    }
}

TEST(test_many)
{
    static const char *const names[] = {"sha256", "sha512-256", "xxh3-128",
                                        "weak-8"};
    static const gd_scope scope = {{9, 8, 7}};
    static many m;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        open_many(&m, names[i]);
        check_counts(&m, &gd_global_scope, 16);
        check_counts(&m, &scope, 16);
        if (i == 0) {
            check_counts(&m, &gd_global_scope, 0);
            check_counts(&m, &scope, 0);
        }
        close_many(&m);
    }
}

/* Each allocation fails once, even those that only save time. */
TEST(test_many_without_memory)
{
    static const gd_scope scope = {{9, 8, 7}};
    static many m;
    bool struck = true;
    for (uint64_t n = 1; struck; n++) {
        open_many(&m, "sha256");
        for (size_t i = 0; i < 20; i++) {
            m.inputs[i] = (gd_hash_input){m.data + i, 4096 + i, &m.got[i]};
        }
        fault_env_fail(&m.f, FAULT_ALLOC, n, ENOMEM, false);
        check_many(&m, &scope, 20);
        struck = fault_env_faults(&m.f) > 0;
        fault_env_heal(&m.f);
        close_many(&m);
    }
}

static void
check_refused(const char *name, const char *why)
{
    gd_digest *digest = (gd_digest *)&digest;
    gd_error err;
    CHECK_INT(gd_digest_open(gd_env_posix(), name, false, &digest, &err),
              GD_INVALID);
    CHECK(digest == NULL);
    CHECK_CONTAINS(err.text, why);
    CHECK_CONTAINS(err.text, "sha256"); /* an example of a right one */
}

TEST(test_refusals)
{
    check_refused("md5", "128 bits");
    check_refused("null", "0 bits");
    check_refused("shake128", "no length of its own");
    check_refused("shake256", "no length of its own");
    check_refused("sha257", "unknown digest \"sha257\"");
    check_refused("", "unknown digest \"\"");
    check_refused("xxh3-64", "unknown digest");
    check_refused("weak-8", "for tests only");
    check_refused("aes-128-cbc", "unknown digest");
    char name[5000];
    memset(name, '%', sizeof name);
    name[sizeof name - 1] = '\0';
    gd_digest *digest;
    CHECK_INT(gd_digest_open(gd_env_posix(), name, false, &digest, NULL),
              GD_INVALID);
}

/* Python's ssl module takes errors that it finds in the queue for its own. */
TEST(test_openssl_queue_stays_clean)
{
    gd_digest *digest;
    gd_error err;
    CHECK_INT(gd_digest_open(gd_env_posix(), "nonsense", false, &digest, &err),
              GD_INVALID);
    CHECK_INT(ERR_peek_error(), 0);
}

TEST(test_out_of_memory)
{
    fault_env f;
    gd_error err;
    gd_digest *digest;
    gd_hasher *hasher;
    fault_env_init(&f);
    fault_env_fail(&f, FAULT_ALLOC, 1, ENOMEM, false);
    CHECK_INT(gd_digest_open(&f.env, "sha256", false, &digest, &err),
              GD_NOMEM);
    CHECK_INT(gd_digest_open(&f.env, "sha256", false, &digest, &err), GD_OK);
    fault_env_fail(&f, FAULT_ALLOC, 1, ENOMEM, false);
    CHECK_INT(gd_hasher_open(&f.env, digest, &hasher, &err), GD_NOMEM);
    CHECK(hasher == NULL);
    gd_hasher_close(&f.env, NULL);
    gd_digest_close(&f.env, digest);
    gd_digest_close(&f.env, NULL);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

TEST(test_equality)
{
    gd_fingerprint a, b;
    memset(&a, 1, sizeof a);
    b = a;
    CHECK(gd_fingerprint_equal(&a, &b));
    for (unsigned i = 0; i < GD_FINGERPRINT_SIZE; i++) {
        b.bytes[i] ^= 0x40;
        CHECK(!gd_fingerprint_equal(&a, &b));
        b = a;
    }
}
