/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tailrecovery.c - see tailrecovery.h.
 */
#include "engine/write/tailrecovery.h"

#include "engine/read/verify.h"

/* Entries of consecutive slots that name one segment. */
typedef struct part {
    uint32_t first; /* in the tail */
    uint32_t count;
} part;

typedef struct renewal {
    gd_repo *repo;
    const gd_group *group;
    uint32_t base; /* the slot of the first entry */
    gd_entry *entries;
    part *parts;
    uint32_t part_count;
    gd_decoder *decoders; /* by worker; each is opened at its first task */
    pthread_mutex_t mutex;
    gd_error failure; /* the first one; guarded by mutex */
    atomic_bool failed;
} renewal;

/* ---- one segment ---- */

/* header is NULL if the segment cannot be read.  *any: whether one block
 * verifies. */
static gd_status
verify_entries(const gd_group *group, gd_entry *entries, uint32_t count,
               uint32_t first_slot, const gd_segment_header *header,
               const gd_decoder *own, bool *any, gd_error *err)
{
    gd_verified blocks[GD_VERIFIED_AT_ONCE];
    *any = false;
    for (uint32_t i = 0, n; i < count; i += n) {
        n = count - i;
        n = n < GD_VERIFIED_AT_ONCE ? n : GD_VERIFIED_AT_ONCE;
        for (uint32_t k = 0; k < n; k++) {
            blocks[k] = (gd_verified){&entries[i + k], first_slot + i + k,
                                      false};
        }
        if (header != NULL) {
            GD_TRY(gd_verify_blocks(group, header, own->plain, own->hasher,
                                    blocks, n, err));
        }
        for (uint32_t k = 0; k < n; k++) {
            entries[i + k].state =
                blocks[k].good ? GD_ENTRY_LIVE : GD_ENTRY_DAMAGED;
            *any |= blocks[k].good;
        }
    }
    return GD_OK;
}

/* A torn segment does not match its header's checksum.  Once the blocks that it
 * spoiled are freed, this would look like damage.  So the present bytes get
 * their checksum.  Only bytes that no block needs change (format.rst,
 * "Segments"), so a crash in between does no harm. */
static void
mend_checksum(uint8_t *in, const gd_segment_header *header, uint64_t seed)
{
    const struct iovec stored = {in + GD_SEGMENT_HEADER,
                                 header->stored_length};
    if (!gd_segment_intact(in, header, seed)) {
        gd_segment_header_encode(header, seed, &stored, 1, in);
    }
}

/* Writes the same bytes again, so that the coming fdatasync makes them
 * durable.  A block that does not verify becomes damaged, and look-ups no
 * longer return it.  Its neighbours stay.  Its entry keeps its contents, since
 * a recipe may name it, and what prevents reading it may pass. */
static gd_status
renew_part(renewal *x, const part *one, gd_decoder *own, gd_error *err)
{
    const gd_group *group = x->group;
    gd_entry *entries = x->entries + one->first;
    uint32_t slot = x->base + one->first;
    gd_segment_header header;
    bool any;
    gd_status s = gd_group_read_segment(group, entries, slot, own->coder,
                                        own->in, own->plain, &header, err);
    if (s != GD_OK && s != GD_CORRUPT) {
        return s;
    }
    s = verify_entries(group, entries, one->count, slot,
                       s == GD_OK ? &header : NULL, own, &any, err);
    if (s != GD_OK || !any) {
        return s;
    }
    mend_checksum(own->in, &header, group->bounds.seed);
    return gd_write_full(group->env, group->fd, own->in,
                         GD_SEGMENT_HEADER + (size_t)header.stored_length,
                         entries->segment, group->name, err);
}

/* ---- all of them ---- */

static void
run_part(void *arg, size_t task, unsigned worker)
{
    renewal *x = arg;
    gd_decoder *own = &x->decoders[worker];
    gd_error err;
    if (atomic_load(&x->failed)) {
        return; /* perhaps while this thread's decoder was opened */
    }
    gd_status s = own->coder != NULL ? GD_OK
                                     : gd_decoder_open(x->repo->env,
                                                       x->repo->digest, own,
                                                       &err);
    if (s == GD_OK) {
        s = renew_part(x, &x->parts[task], own, &err);
    }
    if (s != GD_OK) {
        pthread_mutex_lock(&x->mutex);
        if (!atomic_load(&x->failed)) {
            x->failure = err;
            atomic_store(&x->failed, true);
        }
        pthread_mutex_unlock(&x->mutex);
    }
}

/* Finds the segments, starts reading them from the disk, and voids the gaps. */
static void
divide(renewal *x, uint32_t count)
{
    gd_entry *entries = x->entries;
    for (uint32_t i = 0; i < count;) {
        uint32_t n = 1;
        if (entries[i].state == GD_ENTRY_EMPTY) {
            entries[i].state = GD_ENTRY_VOID;
        }
        if (entries[i].state == GD_ENTRY_LIVE) {
            while (i + n < count && entries[i + n].state == GD_ENTRY_LIVE &&
                   entries[i + n].segment == entries[i].segment) {
                n++;
            }
            x->parts[x->part_count++] = (part){i, n};
            x->group->env->start_readahead(
                x->group->env, x->group->fd, entries[i].segment,
                GD_SEGMENT_HEADER + (uint64_t)entries[i].stored_length);
        }
        i += n;
    }
}

static gd_status
renew(renewal *x, uint32_t count, gd_error *err)
{
    gd_job job = {.run = run_part, .arg = x};
    divide(x, count);
    job.tasks = x->part_count;
    gd_pool_submit(x->repo->pool, &job);
    gd_pool_wait(x->repo->pool, &job);
    if (atomic_load(&x->failed)) {
        if (err != NULL) {
            *err = x->failure;
        }
        return x->failure.status;
    }
    /* Invalid entries stay as they are, so that nothing is lost if the fault
     * was temporary. */
    return gd_group_write_except(x->group, x->base, count, x->entries,
                                 GD_ENTRY_INVALID, err);
}

gd_status
gd_tailrecovery_run(gd_repo *repo, const gd_group *group, uint32_t base,
                    gd_entry *entries, uint32_t count, gd_error *err)
{
    const gd_env *env = repo->env;
    unsigned workers = gd_pool_threads(repo->pool) + 1;
    renewal x = {.repo = repo, .group = group, .base = base,
                 .entries = entries};
    x.parts = gd_calloc(env, count, sizeof *x.parts, err);
    x.decoders = gd_calloc(env, workers, sizeof *x.decoders, err);
    gd_status s = GD_NOMEM;
    if (x.parts != NULL && x.decoders != NULL) {
        pthread_mutex_init(&x.mutex, NULL);
        s = renew(&x, count, err);
        pthread_mutex_destroy(&x.mutex);
        for (unsigned i = 0; i < workers; i++) {
            gd_decoder_close(env, &x.decoders[i]);
        }
    }
    env->release(env, x.decoders);
    env->release(env, x.parts);
    return s;
}
