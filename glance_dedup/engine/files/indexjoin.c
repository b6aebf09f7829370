/* SPDX-License-Identifier: Apache-2.0 */
/*
 * indexjoin.c - see indexjoin.h.
 */
#include "engine/files/indexjoin.h"

#include <string.h>

enum { MAX_SCANS = 4 }; /* at files that a merge takes away meanwhile */

/* Requests that may be in one file, and where its reader is. */
typedef struct join {
    const gd_item *requests; /* those not passed yet */
    uint64_t *addresses;
    size_t count;
    gd_index_reader *reader;
    uint64_t frame, frames; /* the next frame, of how many */
    const uint8_t *items;   /* of the frame before */
    size_t item_count;
} join;

/* ---- one file ---- */

static gd_status
read_frame(join *j, uint64_t frame, gd_error *err)
{
    j->frame = frame + 1;
    return gd_index_reader_frame(j->reader, frame, &j->items, &j->item_count,
                                 err);
}

static uint64_t
last_key(const join *j)
{
    return gd_index_key(j->items + (j->item_count - 1) * GD_INDEX_RECORD);
}

/* Reads the first frame, from j->frame on, that does not end before the key, or
 * the last one.  The steps double, so frames with no request between them are
 * skipped; where each frame has one, each is read once. */
static gd_status
seek(join *j, uint64_t key, gd_error *err)
{
    uint64_t low = j->frame, high = j->frames, step = 1;
    while (low < high) {
        uint64_t frame = low + step - 1 < high ? low + step - 1
                                               : low + (high - low) / 2;
        GD_TRY(read_frame(j, frame, err));
        if (last_key(j) < key) {
            low = frame + 1;
            step *= 2;
        } else if (frame == low) {
            return GD_OK;
        } else {
            high = frame;
            step = 1;
        }
    }
    return high < j->frames ? read_frame(j, high, err) : GD_OK;
}

/* Passes the requests that this frame can answer. */
static void
match(join *j)
{
    size_t at = 0;
    while (j->count > 0 && j->requests->key <= last_key(j)) {
        uint64_t key = j->requests->key;
        while (gd_index_key(j->items + at * GD_INDEX_RECORD) < key) {
            at++;
        }
        const uint8_t *record = j->items + at * GD_INDEX_RECORD;
        if (gd_index_key(record) == key) {
            *j->addresses = gd_index_address(record);
        }
        j->requests++;
        j->addresses++;
        j->count--;
    }
}

static gd_status
join_file(gd_shards *shards, const gd_index_id *id, join j, gd_error *err)
{
    gd_status s = gd_shards_read(shards, id, &j.reader, err);
    if (s != GD_OK) {
        return s;
    }
    j.frames = gd_index_head_frames(gd_index_reader_head(j.reader));
    while (s == GD_OK && j.count > 0 && j.frame < j.frames) {
        s = seek(&j, j.requests->key, err);
        if (s == GD_OK) {
            match(&j);
        }
    }
    gd_index_reader_close(j.reader);
    return s;
}

/* ---- all files ---- */

/* Returns how many of the sorted requests have lower keys. */
static size_t
count_below(const gd_item *requests, size_t count, uint64_t key)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (requests[middle].key < key) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* The requests with keys that the file may have. */
static join
requests_of(const gd_index_id *id, const gd_item *requests, size_t count,
            uint64_t *addresses)
{
    size_t from = 0, to = count;
    if (id->bits > 0) {
        unsigned shift = 64 - id->bits;
        uint64_t first = (uint64_t)id->shard << shift;
        from = count_below(requests, count, first);
        if (id->shard + UINT64_C(1) < UINT64_C(1) << id->bits) {
            to = count_below(requests, count,
                             first + (UINT64_C(1) << shift));
        }
    }
    return (join){.requests = requests + from,
                  .addresses = addresses + from,
                  .count = to - from};
}

/* *gone: a file was removed since it was listed. */
static gd_status
join_files(gd_shards *shards, const gd_index_id *ids, size_t count,
           const gd_item *requests, size_t request_count, uint64_t *addresses,
           uint32_t *unread, bool *gone, gd_error *err)
{
    for (size_t i = 0; i < count; i++) {
        join j = requests_of(&ids[i], requests, request_count, addresses);
        gd_status s = j.count == 0 ? GD_OK
                                   : join_file(shards, &ids[i], j, err);
        *gone |= s == GD_NOTFOUND;
        *unread += s == GD_CORRUPT || s == GD_VERSION || s == GD_IO;
        if (s == GD_NOMEM) {
            return s;
        }
    }
    return GD_OK;
}

/* Moves the runs to the front of a list; returns how many there are. */
static size_t
keep_runs(gd_index_list *list)
{
    size_t used = 0;
    for (size_t i = 0; i < list->count; i++) {
        if (list->files[i].kind == GD_INDEX_RUN) {
            list->files[used++] = list->files[i];
        }
    }
    return used;
}

static gd_status
join_once(gd_shards *shards, const gd_item *requests, size_t count,
          uint64_t *addresses, uint32_t *unread, bool *gone, gd_error *err)
{
    const gd_env *env = gd_shards_env(shards);
    gd_index_list list;
    gd_index_id *current = NULL;
    size_t shard_count;
    bool complete;
    *unread = 0;
    *gone = false;
    memset(addresses, 0, count * sizeof *addresses);
    GD_TRY(gd_shards_list(shards, &list, err));
    gd_status s = gd_shards_current(shards, &list, &current, &shard_count,
                                    &complete, err);
    if (s == GD_OK) {
        s = join_files(shards, list.files, keep_runs(&list), requests, count,
                       addresses, unread, gone, err);
    }
    if (s == GD_OK) {
        s = join_files(shards, current, shard_count, requests, count,
                       addresses, unread, gone, err);
    }
    env->release(env, current);
    env->release(env, list.files);
    return s;
}

gd_status
gd_indexjoin_shards(gd_shards *shards, const gd_item *requests, size_t count,
                    uint64_t *addresses, uint32_t *unread, gd_error *err)
{
    bool gone = true;
    gd_status s = GD_OK;
    for (int look = 0; s == GD_OK && gone && look < MAX_SCANS; look++) {
        s = join_once(shards, requests, count, addresses, unread, &gone, err);
    }
    *unread += gone;
    return s;
}
