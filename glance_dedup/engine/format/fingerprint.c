/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fingerprint.c - digests by name, and hashers that reuse their context.  See
 * fingerprint.h.
 *
 * A hasher's OpenSSL context is made once.  Before each block it is initialised
 * again with the digest that it already holds, which allocates nothing.
 * Copying a prepared context instead is no faster.  A multibuffer is made when
 * many blocks are first hashed at once.
 */
#include "engine/format/fingerprint.h"

#include <string.h>
#include <strings.h>

#include <openssl/err.h>
#include <openssl/evp.h>

#include "engine/base/coding.h"
#include "engine/format/sha256mb.h"

const gd_scope gd_global_scope = {{0}};
const gd_scope gd_spares_scope = {{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
                                   0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
                                   0xff, 0xff}};

enum {
    MIN_DIGEST = 20, /* bytes: 160 bits */
    XXH3_DIGEST = sizeof(XXH128_canonical_t),
    /* Number of blocks for which hashing in lanes takes as long as hashing one
     * after the other. */
    FEW = 5,
};

typedef enum digest_kind {
    KIND_OPENSSL,
    KIND_XXH3,
    KIND_WEAK, /* the first byte of the OpenSSL digest (SHA-256) */
} digest_kind;

struct gd_digest {
    digest_kind kind;
    EVP_MD *md; /* NULL for KIND_XXH3 */
    bool is_sha256;
};

struct gd_hasher {
    const gd_env *env;
    const gd_digest *digest;
    EVP_MD_CTX *context; /* NULL for KIND_XXH3 */
    gd_sha256mb *sha256mb; /* NULL if it was not needed, or could not be made */
    bool sha256mb_tried;
};

#define EXAMPLES "sha256, sha512-256, blake2s256 or sha3-256"

/* NULL if OpenSSL has no such digest.  Removes what OpenSSL adds about that to
 * the thread's error queue: other users of the queue (Python's ssl) would take
 * it for their own error. */
static EVP_MD *
fetch(const char *name)
{
    ERR_set_mark();
    EVP_MD *md = EVP_MD_fetch(NULL, name, NULL);
    ERR_pop_to_mark();
    return md;
}

static gd_status
require_openssl(const EVP_MD *md, const char *name, gd_error *err)
{
    if (md == NULL) {
        return gd_fail(err, GD_INVALID,
                       "unknown digest \"%s\"; use one of OpenSSL's of 160 "
                       "bits or more, such as " EXAMPLES ", or xxh3-128",
                       name);
    }
    if ((EVP_MD_get_flags(md) & EVP_MD_FLAG_XOF) != 0) {
        return gd_fail(err, GD_INVALID,
                       "the digest \"%s\" has no length of its own; use "
                       EXAMPLES,
                       name);
    }
    int size = EVP_MD_get_size(md);
    if (size < MIN_DIGEST || size > EVP_MAX_MD_SIZE) {
        return gd_fail(err, GD_INVALID,
                       "the digest \"%s\" has %d bits, fewer than the 160 "
                       "needed; use " EXAMPLES,
                       name, size > 0 ? size * 8 : 0);
    }
    return GD_OK;
}

static gd_status
choose(gd_digest *digest, const char *name, bool allow_weak, gd_error *err)
{
    if (strcasecmp(name, "xxh3-128") == 0) {
        digest->kind = KIND_XXH3;
        return GD_OK;
    }
    if (strcasecmp(name, "weak-8") == 0) {
        if (!allow_weak) {
            return gd_fail(err, GD_INVALID,
                           "the digest \"weak-8\" is for tests only; use "
                           EXAMPLES);
        }
        digest->kind = KIND_WEAK;
        name = "sha256";
    }
    digest->md = fetch(name);
    return require_openssl(digest->md, name, err);
}

gd_status
gd_digest_open(const gd_env *env, const char *name, bool allow_weak,
               gd_digest **digest, gd_error *err)
{
    *digest = NULL;
    gd_digest *d = gd_calloc(env, 1, sizeof *d, err);
    if (d == NULL) {
        return GD_NOMEM;
    }
    d->kind = KIND_OPENSSL;
    gd_status s = choose(d, name, allow_weak, err);
    if (s != GD_OK) {
        gd_digest_close(env, d);
        return s;
    }
    d->is_sha256 = d->kind == KIND_OPENSSL && EVP_MD_is_a(d->md, "SHA256");
    *digest = d;
    return GD_OK;
}

void
gd_digest_close(const gd_env *env, gd_digest *digest)
{
    if (digest != NULL) {
        EVP_MD_free(digest->md);
        env->release(env, digest);
    }
}

bool
gd_digest_is_cryptographic(const gd_digest *digest)
{
    /* Anyone can make two blocks with the same SHA-1 (Stevens et al., CRYPTO
     * 2017), and get one stored where the other was meant. */
    return digest->kind == KIND_OPENSSL && !EVP_MD_is_a(digest->md, "SHA1") &&
           !EVP_MD_is_a(digest->md, "MD5-SHA1");
}

gd_status
gd_hasher_open(const gd_env *env, const gd_digest *digest, gd_hasher **hasher,
               gd_error *err)
{
    *hasher = NULL;
    gd_hasher *h = gd_calloc(env, 1, sizeof *h, err);
    if (h == NULL) {
        return GD_NOMEM;
    }
    h->env = env;
    h->digest = digest;
    if (digest->md != NULL) {
        h->context = EVP_MD_CTX_new();
        if (h->context == NULL) {
            gd_hasher_close(env, h);
            return gd_fail(err, GD_NOMEM,
                           "out of memory: OpenSSL cannot make a context");
        }
    }
    *hasher = h;
    return GD_OK;
}

void
gd_hasher_close(const gd_env *env, gd_hasher *hasher)
{
    if (hasher != NULL) {
        gd_sha256mb_close(hasher->sha256mb);
        EVP_MD_CTX_free(hasher->context);
        env->release(env, hasher);
    }
}

/* scope is hashed before the data; NULL: none.  Bytes of out beyond *len do not
 * change. */
static gd_status
compute_openssl(gd_hasher *hasher, const gd_scope *scope, const void *data,
                size_t len, uint8_t out[EVP_MAX_MD_SIZE], unsigned *out_len,
                gd_error *err)
{
    EVP_MD_CTX *context = hasher->context;
    ERR_set_mark();
    bool good = EVP_DigestInit_ex2(context, hasher->digest->md, NULL) &&
                (scope == NULL ||
                 EVP_DigestUpdate(context, scope->id, GD_SCOPE_SIZE)) &&
                EVP_DigestUpdate(context, data, len) &&
                EVP_DigestFinal_ex(context, out, out_len);
    ERR_pop_to_mark();
    if (!good) {
        /* Of the causes that OpenSSL knows, only this one can affect a digest
         * that was fetched and needs no parameters. */
        return gd_fail(err, GD_NOMEM,
                       "out of memory: OpenSSL cannot compute %s",
                       EVP_MD_get0_name(hasher->digest->md));
    }
    return GD_OK;
}

/* Without a scope, makes one call, which is faster than a stream. */
static void
compute_xxh3(const gd_scope *scope, const void *data, size_t len,
             uint8_t out[XXH3_DIGEST])
{
    XXH128_hash_t hash;
    XXH128_canonical_t canonical;
    if (scope == NULL) {
        hash = XXH3_128bits(data, len);
    } else {
        XXH3_state_t state;
        XXH3_INITSTATE(&state);
        XXH3_128bits_reset(&state);
        XXH3_128bits_update(&state, scope->id, GD_SCOPE_SIZE);
        XXH3_128bits_update(&state, data, len);
        hash = XXH3_128bits_digest(&state);
    }
    XXH128_canonicalFromHash(&canonical, hash);
    memcpy(out, canonical.digest, XXH3_DIGEST);
}

gd_status
gd_hasher_compute(gd_hasher *hasher, const gd_scope *scope, const void *data,
                  size_t len, gd_fingerprint *out, gd_error *err)
{
    uint8_t full[EVP_MAX_MD_SIZE];
    unsigned used = XXH3_DIGEST;
    if (gd_scope_equal(scope, &gd_global_scope)) {
        scope = NULL;
    }
    if (hasher->digest->kind == KIND_XXH3) {
        compute_xxh3(scope, data, len, full);
    } else {
        gd_status s =
            compute_openssl(hasher, scope, data, len, full, &used, err);
        if (s != GD_OK) {
            return s;
        }
    }
    if (hasher->digest->kind == KIND_WEAK) {
        used = 1;
    }
    if (used > GD_FINGERPRINT_SIZE) {
        used = GD_FINGERPRINT_SIZE;
    }
    memcpy(out->bytes, full, used);
    memset(out->bytes + used, 0, GD_FINGERPRINT_SIZE - used);
    return GD_OK;
}

/* ---- many blocks ---- */

static bool
has_sha256mb(gd_hasher *hasher)
{
    if (hasher->digest->is_sha256 && !hasher->sha256mb_tried) {
        hasher->sha256mb_tried = true;
        hasher->sha256mb = gd_sha256mb_open(hasher->env);
    }
    return hasher->sha256mb != NULL;
}

static gd_status
compute_each(gd_hasher *hasher, const gd_scope *scope,
             const gd_hash_input *inputs, size_t count, gd_error *err)
{
    for (size_t i = 0; i < count; i++) {
        GD_TRY(gd_hasher_compute(hasher, scope, inputs[i].data,
                                 inputs[i].length, inputs[i].out, err));
    }
    return GD_OK;
}

gd_status
gd_hasher_compute_many(gd_hasher *hasher, const gd_scope *scope,
                       const gd_hash_input *inputs, size_t count,
                       gd_error *err)
{
    const gd_scope *before =
        gd_scope_equal(scope, &gd_global_scope) ? NULL : scope;
    gd_status s = GD_OK;
    for (size_t i = 0, n; s == GD_OK && i < count; i += n) {
        n = count - i;
        n = n < GD_SHA256MB_LANES ? n : GD_SHA256MB_LANES;
        if (n <= FEW || !has_sha256mb(hasher) ||
            !gd_sha256mb_hash(hasher->sha256mb, before, inputs + i,
                              n)) {
            s = compute_each(hasher, scope, inputs + i, n, err);
        }
    }
    return s;
}
