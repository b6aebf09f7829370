/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keyeddigest.c - see keyeddigest.h.
 */
#include "engine/format/keyeddigest.h"

#include <stdbool.h>

#include <openssl/core_names.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/params.h>

enum { NONCE_SIZE = 12 };

static bool
compute(EVP_MAC_CTX *context, const uint8_t *key, const void *data, size_t len,
        uint8_t *out)
{
    char cipher[] = "AES-256-GCM";
    uint8_t nonce[NONCE_SIZE] = {0};
    OSSL_PARAM params[] = {
        OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_CIPHER, cipher, 0),
        OSSL_PARAM_construct_octet_string(OSSL_MAC_PARAM_IV, nonce,
                                          sizeof nonce),
        OSSL_PARAM_construct_end(),
    };
    size_t used = 0;
    return context != NULL &&
           EVP_MAC_init(context, key, GD_KEYED_KEY_SIZE, params) == 1 &&
           EVP_MAC_update(context, data, len) == 1 &&
           EVP_MAC_final(context, out, &used, GD_KEYED_DIGEST_SIZE) == 1 &&
           used == GD_KEYED_DIGEST_SIZE;
}

gd_status
gd_keyed_digest(const uint8_t key[GD_KEYED_KEY_SIZE], const void *data,
                size_t len, uint8_t out[GD_KEYED_DIGEST_SIZE], gd_error *err)
{
    /* Errors must not stay in the thread's queue: fingerprint.c, fetch. */
    ERR_set_mark();
    EVP_MAC *mac = EVP_MAC_fetch(NULL, OSSL_MAC_NAME_GMAC, NULL);
    EVP_MAC_CTX *context = mac == NULL ? NULL : EVP_MAC_CTX_new(mac);
    bool good = compute(context, key, data, len, out);
    EVP_MAC_CTX_free(context);
    EVP_MAC_free(mac);
    ERR_pop_to_mark();
    return good ? GD_OK
                : gd_fail(err, GD_NOMEM,
                          "out of memory: OpenSSL cannot compute GMAC");
}
