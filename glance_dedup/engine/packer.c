/*
 * packer.c - see packer.h.
 *
 * Segments wait in an array until a flush.  All but the last are closed; the
 * last may be open, and if a flush leaves it open its bytes move to the carry
 * buffer, since the caller's go.
 */
#include "packer.h"

#include <string.h>

#include "appender.h"
#include "coding.h"

enum {
    SYNC_BYTES = 256 << 20,
    PACK_BYTES = 4 << 20, /* plain bytes that wait before they are written */
    COMPARES = 8,          /* of one block against its namesakes */
};

/* A thread's own. */
typedef struct pack_worker {
    gd_coder *coder;
    uint8_t *gather; /* segment_size bytes */
} pack_worker;

struct gd_packer {
    gd_repo *repo;
    gd_appender *appender; /* NULL until the first new block */
    gd_groupmap shared;    /* groups whose shared lock we took, how often */
    gd_fpstore *own;       /* what we added to the group now open */
    uint64_t new_bytes, stored_bytes;

    gd_new_segment *segments;
    size_t segment_count, segment_room;
    bool last_is_open;
    struct iovec *pieces; /* of all waiting segments, in order */
    size_t piece_count, piece_room;
    uint8_t *packed; /* segment_size bytes for each waiting segment */
    uint8_t *carry;  /* segment_size bytes: of the open segment */
    uint8_t *read_in, *read_plain; /* for comparing by value */

    pack_worker *workers;
    unsigned worker_count;
    gd_job job;
    atomic_int failed; /* a gd_status that a worker met */
};

static gd_status
open_workers(gd_packer *packer, gd_error *err)
{
    gd_repo *repo = packer->repo;
    const gd_env *env = repo->env;
    packer->worker_count = gd_pool_threads(repo->pool) + 1;
    packer->workers =
        gd_calloc(env, packer->worker_count, sizeof *packer->workers, err);
    if (packer->workers == NULL) {
        return GD_NOMEM;
    }
    gd_status s = GD_OK;
    for (unsigned i = 0; s == GD_OK && i < packer->worker_count; i++) {
        pack_worker *worker = &packer->workers[i];
        s = gd_coder_open(env, &worker->coder, err);
        if (s == GD_OK) {
            worker->gather = gd_calloc(env, repo->params.segment_size, 1, err);
            s = worker->gather == NULL ? GD_NOMEM : GD_OK;
        }
    }
    return s;
}

static gd_status
open_buffers(gd_packer *packer, size_t blocks, gd_error *err)
{
    const gd_env *env = packer->repo->env;
    const gd_params *params = &packer->repo->params;
    packer->segment_room = PACK_BYTES / params->segment_size + 2;
    packer->piece_room = blocks + 1;
    packer->segments =
        gd_calloc(env, packer->segment_room, sizeof *packer->segments, err);
    packer->pieces =
        gd_calloc(env, packer->piece_room, sizeof *packer->pieces, err);
    packer->carry = gd_calloc(env, params->segment_size, 1, err);
    if (packer->segments == NULL || packer->pieces == NULL ||
        packer->carry == NULL) {
        return GD_NOMEM;
    }
    if (params->codec != GD_CODEC_NONE) {
        packer->packed =
            gd_calloc(env, packer->segment_room, params->segment_size, err);
        if (packer->packed == NULL) {
            return GD_NOMEM;
        }
    }
    if (params->by_value) {
        packer->read_in =
            gd_calloc(env, GD_SEGMENT_HEADER + GD_SEGMENT_MAX, 1, err);
        packer->read_plain = gd_calloc(env, GD_SEGMENT_MAX, 1, err);
        if (packer->read_in == NULL || packer->read_plain == NULL) {
            return GD_NOMEM;
        }
    }
    return gd_fpstore_new(env, GD_MAX_SLOTS, &packer->own, err);
}

gd_status
gd_packer_open(gd_repo *repo, size_t blocks, gd_packer **out, gd_error *err)
{
    gd_packer *packer = gd_calloc(repo->env, 1, sizeof *packer, err);
    if (packer == NULL) {
        return GD_NOMEM;
    }
    packer->repo = repo;
    gd_groupmap_init(&packer->shared, repo->env);
    gd_status s = open_workers(packer, err);
    if (s == GD_OK) {
        s = open_buffers(packer, blocks, err);
    }
    if (s != GD_OK) {
        gd_packer_close(packer);
        return s;
    }
    *out = packer;
    return GD_OK;
}

void
gd_packer_close(gd_packer *packer)
{
    gd_repo *repo = packer->repo;
    const gd_env *env = repo->env;
    if (packer->appender != NULL) {
        gd_appender_close(packer->appender);
    }
    for (size_t i = 0; i < packer->shared.places; i++) {
        const gd_groupmap_item *item = &packer->shared.items[i];
        for (uint32_t n = 0; n < item->count; n++) {
            gd_locks_unshare(repo->locks, item->group);
        }
    }
    gd_groupmap_free(&packer->shared);
    for (unsigned i = 0; packer->workers != NULL && i < packer->worker_count;
         i++) {
        gd_coder_close(env, packer->workers[i].coder);
        env->release(env, packer->workers[i].gather);
    }
    if (packer->own != NULL) {
        gd_fpstore_free(env, packer->own);
    }
    env->release(env, packer->workers);
    env->release(env, packer->segments);
    env->release(env, packer->pieces);
    env->release(env, packer->packed);
    env->release(env, packer->carry);
    env->release(env, packer->read_in);
    env->release(env, packer->read_plain);
    env->release(env, packer);
}

uint64_t
gd_packer_new_bytes(const gd_packer *packer)
{
    return packer->new_bytes;
}

uint64_t
gd_packer_stored_bytes(const gd_packer *packer)
{
    return packer->stored_bytes;
}

/* ---- the pool's part ---- */

static void
gather_pieces(const gd_new_segment *segment, uint8_t *out)
{
    for (int i = 0; i < segment->piece_count; i++) {
        memcpy(out, segment->pieces[i].iov_base, segment->pieces[i].iov_len);
        out += segment->pieces[i].iov_len;
    }
}

/* Blocks lie in the pieces one behind the other; none crosses pieces. */
static void
fill_in_checksums(gd_packer *packer, const gd_new_segment *segment)
{
    uint32_t slot = segment->header.first_slot;
    for (int i = 0; i < segment->piece_count; i++) {
        const uint8_t *block = segment->pieces[i].iov_base;
        const uint8_t *end = block + segment->pieces[i].iov_len;
        while (block < end) {
            gd_entry *entry = gd_appender_entry(packer->appender, slot++);
            entry->checksum = gd_checksum(block, entry->plain_length, 0);
            block += entry->plain_length;
        }
    }
}

static gd_status
compress_segment(gd_packer *packer, size_t task, pack_worker *worker)
{
    const gd_params *params = &packer->repo->params;
    gd_new_segment *segment = &packer->segments[task];
    const uint8_t *plain = segment->pieces[0].iov_base;
    uint8_t *out = packer->packed + task * params->segment_size;
    size_t stored;
    if (segment->piece_count > 1) {
        gather_pieces(segment, worker->gather);
        plain = worker->gather;
    }
    gd_status s = gd_segment_compress(worker->coder, params->codec,
                                      params->codec_level, plain,
                                      segment->header.plain_length, out,
                                      &stored, NULL);
    if (s == GD_OK && stored > 0) {
        segment->header.codec = params->codec;
        segment->header.stored_length = (uint32_t)stored;
        segment->pieces[0] = (struct iovec){out, stored};
        segment->piece_count = 1;
    }
    return s;
}

static void
pack_segment(void *arg, size_t task, unsigned index)
{
    gd_packer *packer = arg;
    gd_new_segment *segment = &packer->segments[task];
    fill_in_checksums(packer, segment);
    segment->header.codec = GD_CODEC_NONE;
    segment->header.stored_length = segment->header.plain_length;
    if (packer->repo->params.codec != GD_CODEC_NONE) {
        gd_status s = compress_segment(packer, task, &packer->workers[index]);
        if (s != GD_OK) {
            atomic_store(&packer->failed, (int)s);
            return;
        }
    }
    gd_segment_header_encode(
        &segment->header, gd_appender_group(packer->appender)->bounds.seed,
        segment->pieces, segment->piece_count, segment->encoded);
}

/* ---- flushing ---- */

/* Moves the open segment, the last, to the front and its bytes to the carry
 * buffer.  Its first piece may lie there already. */
static void
carry_open_segment(gd_packer *packer)
{
    gd_new_segment segment = packer->segments[packer->segment_count - 1];
    uint8_t *out = packer->carry;
    for (int i = 0; i < segment.piece_count; i++) {
        const struct iovec *piece = &segment.pieces[i];
        if (piece->iov_base != out) {
            memcpy(out, piece->iov_base, piece->iov_len);
        }
        out += piece->iov_len;
    }
    packer->pieces[0] =
        (struct iovec){packer->carry, segment.header.plain_length};
    segment.pieces = packer->pieces;
    segment.piece_count = 1;
    packer->segments[0] = segment;
    packer->segment_count = 1;
    packer->piece_count = 1;
}

static gd_status
write_segments(gd_packer *packer, size_t count, gd_error *err)
{
    uint64_t written;
    atomic_store(&packer->failed, GD_OK);
    packer->job = (gd_job){.run = pack_segment, .arg = packer, .tasks = count};
    gd_pool_submit(packer->repo->pool, &packer->job);
    gd_pool_wait(packer->repo->pool, &packer->job);
    gd_status s = (gd_status)atomic_load(&packer->failed);
    if (s != GD_OK) {
        return gd_fail(err, s, "a segment could not be compressed");
    }
    s = gd_appender_append(packer->appender, packer->segments, count, &written,
                           err);
    packer->stored_bytes += written;
    return s;
}

gd_status
gd_packer_flush(gd_packer *packer, gd_error *err)
{
    size_t closed = packer->segment_count - packer->last_is_open;
    gd_status s = GD_OK;
    if (closed > 0) {
        s = write_segments(packer, closed, err);
    }
    if (packer->last_is_open) {
        carry_open_segment(packer);
    } else {
        packer->segment_count = 0;
        packer->piece_count = 0;
    }
    if (s == GD_OK && packer->appender != NULL &&
        gd_appender_unsynced(packer->appender) >= SYNC_BYTES) {
        s = gd_packer_sync(packer, err);
    }
    return s;
}

gd_status
gd_packer_sync(gd_packer *packer, gd_error *err)
{
    if (packer->appender == NULL) {
        return GD_OK;
    }
    gd_status s = GD_OK;
    packer->last_is_open = false;
    if (packer->segment_count > 0) {
        s = write_segments(packer, packer->segment_count, err);
    }
    packer->segment_count = 0;
    packer->piece_count = 0;
    return s == GD_OK ? gd_appender_sync(packer->appender, err) : s;
}

/* ---- adding ---- */

/* Makes sure that there is an appender with room for a slot. */
static gd_status
need_appender(gd_packer *packer, gd_error *err)
{
    if (packer->appender != NULL) {
        if (gd_appender_room(packer->appender) > 0) {
            return GD_OK;
        }
        gd_status s = gd_packer_sync(packer, err);
        if (s != GD_OK) {
            return s;
        }
        gd_appender_close(packer->appender);
        packer->appender = NULL;
    }
    gd_status s = gd_appender_open(packer->repo, &packer->appender, err);
    if (s != GD_OK) {
        packer->appender = NULL;
        return s;
    }
    uint32_t group = gd_appender_group(packer->appender)->number;
    uint32_t *taken = gd_groupmap_at(&packer->shared, group, err);
    if (taken == NULL) {
        gd_locks_unshare(packer->repo->locks, group);
        return GD_NOMEM;
    }
    ++*taken;
    gd_fpstore_clear(packer->own, group);
    return GD_OK;
}

/* The open segment, if the block fits in; otherwise a new one. */
static gd_status
need_segment(gd_packer *packer, uint32_t length, gd_new_segment **segment,
             gd_error *err)
{
    if (packer->last_is_open) {
        *segment = &packer->segments[packer->segment_count - 1];
        if ((*segment)->header.plain_length + length <=
            packer->repo->params.segment_size) {
            return GD_OK;
        }
        packer->last_is_open = false;
    }
    if (packer->segment_count == packer->segment_room) {
        gd_status s = gd_packer_flush(packer, err);
        if (s != GD_OK) {
            return s;
        }
    }
    *segment = &packer->segments[packer->segment_count++];
    memset(*segment, 0, sizeof **segment);
    (*segment)->pieces = &packer->pieces[packer->piece_count];
    packer->last_is_open = true;
    return GD_OK;
}

static void
add_piece(gd_packer *packer, gd_new_segment *segment, const uint8_t *data,
          uint32_t length)
{
    if (segment->piece_count > 0) {
        struct iovec *last = &segment->pieces[segment->piece_count - 1];
        if ((const uint8_t *)last->iov_base + last->iov_len == data &&
            last->iov_base != packer->carry) {
            last->iov_len += length;
            return;
        }
    }
    segment->pieces[segment->piece_count++] =
        (struct iovec){(void *)data, length};
    packer->piece_count++;
}

gd_status
gd_packer_add(gd_packer *packer, const uint8_t *data, uint32_t length,
              const gd_fingerprint *fp, gd_address *address, gd_error *err)
{
    gd_new_segment *segment;
    gd_status s = need_appender(packer, err);
    if (s == GD_OK) {
        s = need_segment(packer, length, &segment, err);
    }
    if (s == GD_OK) {
        s = gd_appender_take_slot(packer->appender, fp, length,
                                  segment->header.plain_length, &address->slot,
                                  err);
    }
    if (s != GD_OK) {
        return s;
    }
    address->group = gd_appender_group(packer->appender)->number;
    if (segment->header.blocks++ == 0) {
        segment->header.first_slot = address->slot;
    }
    add_piece(packer, segment, data, length);
    segment->header.plain_length += length;
    packer->new_bytes += length;
    gd_fpstore_add(packer->own, address->slot, fp);
    return GD_OK;
}

/* ---- finding our own ---- */

/* The plain bytes of a block that waits in memory; NULL if it does not. */
static const uint8_t *
waiting_block(gd_packer *packer, uint32_t slot)
{
    for (size_t i = 0; i < packer->segment_count; i++) {
        const gd_new_segment *segment = &packer->segments[i];
        uint32_t first = segment->header.first_slot;
        if (slot < first || slot - first >= segment->header.blocks) {
            continue;
        }
        uint64_t at = gd_appender_entry(packer->appender, slot)->plain_offset;
        for (int k = 0; k < segment->piece_count; k++) {
            if (at < segment->pieces[k].iov_len) {
                return (const uint8_t *)segment->pieces[k].iov_base + at;
            }
            at -= segment->pieces[k].iov_len;
        }
    }
    return NULL;
}

static bool
equals_own(gd_packer *packer, uint32_t slot, const uint8_t *data,
           uint32_t length)
{
    gd_segment_header header;
    gd_entry entry;
    const gd_group *group = gd_appender_group(packer->appender);
    const gd_entry *unsynced = gd_appender_entry(packer->appender, slot);
    if (unsynced != NULL) {
        entry = *unsynced;
    } else if (gd_group_read_entries(group, slot, 1, &entry, NULL) != GD_OK ||
               entry.state != GD_ENTRY_LIVE) {
        return false;
    }
    if (entry.plain_length != length) {
        return false;
    }
    atomic_fetch_add(&packer->repo->counters.compares, 1);
    if (unsynced != NULL && entry.segment == 0) {
        const uint8_t *waiting = waiting_block(packer, slot);
        return waiting != NULL && memcmp(waiting, data, length) == 0;
    }
    return gd_group_read_segment(group, &entry, slot,
                                 packer->workers[0].coder, packer->read_in,
                                 packer->read_plain, &header, NULL) == GD_OK &&
           memcmp(packer->read_plain + entry.plain_offset, data, length) == 0;
}

gd_address
gd_packer_find(gd_packer *packer, const uint8_t *data, uint32_t length,
               const gd_fingerprint *fp)
{
    uint32_t probe = 0, slot;
    if (packer->appender == NULL) {
        return (gd_address){0, 0};
    }
    for (int tries = 0; tries < COMPARES &&
                        gd_fpstore_find(packer->own, fp, &probe, &slot);
         tries++) {
        if (!packer->repo->params.by_value ||
            equals_own(packer, slot, data, length)) {
            return (gd_address){packer->own->group, slot};
        }
    }
    return (gd_address){0, 0};
}
