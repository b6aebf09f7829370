/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sha256mb.c - see sha256mb.h.
 *
 * The library takes jobs one by one.  It works when all lanes are full, or when
 * a caller flushes it.  It wants a message in one piece, so a scope's id is
 * copied in front of a copy of the block.  That costs a thirtieth of hashing
 * the block.
 */
#include "engine/format/sha256mb.h"

#if defined(__x86_64__) && !defined(GD_WITHOUT_IPSEC_MB)
#if __has_include(<intel-ipsec-mb.h>)
#define HAS_IPSEC_MB
#endif
#endif

#ifdef HAS_IPSEC_MB

#include <dlfcn.h>
#include <intel-ipsec-mb.h>
#include <stdio.h>
#include <string.h>

struct gd_sha256mb {
    const gd_env *env;
    IMB_MGR *manager;
    __typeof__(&free_mb_mgr) free_manager;
    uint8_t *copies; /* of the inputs, each after its scope's id */
    size_t room;     /* bytes in copies */
};

/* Loads the library of the header's major version: in it, the manager's fields
 * that the header has stay where they are.  The library stays loaded, since a
 * process that has fingerprinted many blocks will do so again. */
static void *
load_library(void)
{
    char name[32];
    snprintf(name, sizeof name, "libIPSec_MB.so.%d", IMB_VERSION_NUM >> 16);
    return dlopen(name, RTLD_NOW | RTLD_LOCAL);
}

static bool
make_manager(gd_sha256mb *m, void *library)
{
    __typeof__(&imb_get_version) version = dlsym(library, "imb_get_version");
    __typeof__(&alloc_mb_mgr) allocate = dlsym(library, "alloc_mb_mgr");
    __typeof__(&init_mb_mgr_auto) init = dlsym(library, "init_mb_mgr_auto");
    IMB_ARCH arch;
    m->free_manager = dlsym(library, "free_mb_mgr");
    if (version == NULL || version() < IMB_VERSION_NUM || allocate == NULL ||
        init == NULL || m->free_manager == NULL) {
        return false;
    }
    m->manager = allocate(0);
    if (m->manager == NULL) {
        return false;
    }
    init(m->manager, &arch);
    return arch != IMB_ARCH_NONE &&
           (m->manager->features & IMB_FEATURE_SELF_TEST_PASS) != 0;
}

gd_sha256mb *
gd_sha256mb_open(const gd_env *env)
{
    gd_sha256mb *m = gd_calloc(env, 1, sizeof *m, NULL);
    if (m == NULL) {
        return NULL;
    }
    m->env = env;
    void *library = load_library();
    if (library == NULL || !make_manager(m, library)) {
        gd_sha256mb_close(m);
        return NULL;
    }
    return m;
}

void
gd_sha256mb_close(gd_sha256mb *m)
{
    if (m == NULL) {
        return;
    }
    if (m->manager != NULL) {
        m->free_manager(m->manager);
    }
    m->env->release(m->env, m->copies);
    m->env->release(m->env, m);
}

/* The total length of the inputs, with the scope's id in front of each.  False
 * if the library could not count the bytes of one. */
static bool
total_length(const gd_hash_input *inputs, size_t count, size_t before,
             size_t *total)
{
    *total = 0;
    for (size_t i = 0; i < count; i++) {
        if (inputs[i].length > GD_SHA256MB_MAX - before) {
            return false;
        }
        *total += before + inputs[i].length;
    }
    return true;
}

static bool
ensure_room(gd_sha256mb *m, size_t room)
{
    if (room > m->room) {
        m->env->release(m->env, m->copies);
        m->copies = gd_calloc(m->env, room, 1, NULL);
        m->room = m->copies == NULL ? 0 : room;
    }
    return room <= m->room;
}

static void
submit(IMB_MGR *manager, const uint8_t *data, size_t length,
       gd_fingerprint *out)
{
    IMB_JOB *job = IMB_GET_NEXT_JOB(manager);
    job->cipher_mode = IMB_CIPHER_NULL;
    job->cipher_direction = IMB_DIR_ENCRYPT;
    job->chain_order = IMB_ORDER_HASH_CIPHER;
    job->hash_alg = IMB_AUTH_SHA_256;
    job->src = data;
    job->hash_start_src_offset_in_bytes = 0;
    job->msg_len_to_hash_in_bytes = length;
    job->auth_tag_output = out->bytes;
    job->auth_tag_output_len_in_bytes = GD_FINGERPRINT_SIZE;
}

/* Takes finished jobs, beginning with the given one.  Returns how many
 * succeeded. */
static size_t
take_done(IMB_MGR *manager, IMB_JOB *done)
{
    size_t good = 0;
    for (; done != NULL; done = IMB_GET_COMPLETED_JOB(manager)) {
        good += done->status == IMB_STATUS_COMPLETED;
    }
    return good;
}

bool
gd_sha256mb_hash(gd_sha256mb *m, const gd_scope *scope,
                 const gd_hash_input *inputs, size_t count)
{
    IMB_MGR *manager = m->manager;
    size_t before = scope == NULL ? 0 : GD_SCOPE_SIZE;
    size_t total, good = 0;
    if (!total_length(inputs, count, before, &total) ||
        (scope != NULL && !ensure_room(m, total))) {
        return false;
    }
    uint8_t *copy = m->copies;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *data = inputs[i].data;
        size_t length = before + inputs[i].length;
        if (scope != NULL) {
            memcpy(copy, scope->id, GD_SCOPE_SIZE);
            memcpy(copy + GD_SCOPE_SIZE, data, inputs[i].length);
            data = copy;
            copy += length;
        }
        submit(manager, data, length, inputs[i].out);
        good += take_done(manager, IMB_SUBMIT_JOB(manager));
    }
    for (IMB_JOB *job; (job = IMB_FLUSH_JOB(manager)) != NULL;) {
        good += take_done(manager, job);
    }
    return good == count;
}

#else

gd_sha256mb *
gd_sha256mb_open(GD_UNUSED const gd_env *env)
{
    return NULL;
}

void
gd_sha256mb_close(GD_UNUSED gd_sha256mb *m)
{
}

bool
gd_sha256mb_hash(GD_UNUSED gd_sha256mb *m, GD_UNUSED const gd_scope *scope,
                 GD_UNUSED const gd_hash_input *inputs, GD_UNUSED size_t count)
{
    return false;
}

#endif
