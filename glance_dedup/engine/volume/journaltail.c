/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journaltail.c - see journaltail.h.
 */
#include "engine/volume/journaltail.h"

#include "engine/base/coding.h"

enum { WINDOW = 1 << 20 }; /* bytes read at once: more than the longest record */

/* A copy under way. */
typedef struct copier {
    const gd_journal *from;
    gd_journal *to;
    gd_journal_tail_visitor *visit;
    void *arg;
    uint8_t *window;
    uint64_t start; /* of the window, in the file */
    size_t length;  /* bytes in it */
    size_t done;    /* of them */
    gd_append batch[GD_JOURNAL_BATCH];
    size_t count;
} copier;

uint64_t
gd_journal_tail_length(const gd_journal_tail *tail)
{
    return tail->journal->end - tail->from;
}

static gd_status
append_batch(copier *c, gd_error *err)
{
    if (c->count == 0) {
        return GD_OK;
    }
    GD_TRY(gd_journal_append(c->to, c->batch, c->count, err));
    for (size_t i = 0; i < c->count; i++) {
        GD_TRY(c->visit(c->arg, c->to, &c->batch[i], err));
        gd_journal_accept(c->to, &c->batch[i]);
    }
    c->count = 0;
    return GD_OK;
}

/* Adds a record of bytes or zeros to the batch, as far as the volume goes: since
 * the journal was begun, it may have become smaller. */
static void
add_record(copier *c, gd_record record, const uint8_t *data)
{
    if (record.offset >= c->to->size) {
        return;
    }
    if (record.length > c->to->size - record.offset) {
        record.length = c->to->size - record.offset;
        record.checksum = record.kind == GD_RECORD_BYTES
                              ? gd_checksum(data, (size_t)record.length, 0)
                              : 0;
    }
    c->batch[c->count++] = (gd_append){.record = record, .data = data};
}

/* Takes the next record of the window.  *whole: whether all of it is there. */
static gd_status
take_record(copier *c, bool *whole, gd_error *err)
{
    const gd_journal *from = c->from;
    const uint8_t *raw = c->window + c->done;
    size_t rest = c->length - c->done;
    gd_record record;
    *whole = false;
    if (rest < GD_RECORD_HEAD) {
        return GD_OK;
    }
    bool valid = gd_record_decode(raw, from->seed, from->size, &record);
    if (valid && gd_record_size(&record) > rest) {
        return GD_OK;
    }
    const uint8_t *data = raw + GD_RECORD_HEAD;
    bool bytes = valid && record.kind == GD_RECORD_BYTES;
    if (!valid || (bytes && gd_checksum(data, (size_t)record.length, 0) !=
                                record.checksum)) {
        return gd_fail(err, GD_CORRUPT, "%s: there is no valid record at "
                       "offset %llu, where there was one", from->name,
                       (unsigned long long)(c->start + c->done));
    }
    if (bytes || record.kind == GD_RECORD_ZEROS) {
        add_record(c, record, data);
    }
    c->done += (size_t)gd_record_size(&record);
    *whole = true;
    return GD_OK;
}

static gd_status
copy_window(copier *c, gd_error *err)
{
    bool whole = true;
    while (whole && c->done < c->length) {
        GD_TRY(take_record(c, &whole, err));
        if (c->count == GD_JOURNAL_BATCH) {
            GD_TRY(append_batch(c, err));
        }
    }
    return append_batch(c, err);
}

static gd_status
copy_all(copier *c, uint64_t at, gd_error *err)
{
    while (at < c->from->end) {
        uint64_t rest = c->from->end - at;
        c->start = at;
        c->length = rest < WINDOW ? (size_t)rest : WINDOW;
        c->done = 0;
        GD_TRY(gd_read_full(c->from->env, c->from->fd, c->window, c->length,
                            at, c->from->name, err));
        GD_TRY(copy_window(c, err));
        if (c->done == 0) {
            return gd_fail(err, GD_CORRUPT, "%s: the record at offset %llu "
                           "goes beyond the end", c->from->name,
                           (unsigned long long)at);
        }
        at += c->done;
    }
    return GD_OK;
}

gd_status
gd_journal_tail_copy(const gd_journal_tail *tail, gd_journal *to,
                     gd_journal_tail_visitor *visit, void *arg, gd_error *err)
{
    const gd_env *env = to->env;
    if (gd_journal_tail_length(tail) == 0) {
        return GD_OK;
    }
    copier c = {.from = tail->journal,
                .to = to,
                .visit = visit,
                .arg = arg,
                .window = gd_alloc(env, WINDOW, err)};
    gd_status s =
        c.window == NULL ? GD_NOMEM : copy_all(&c, tail->from, err);
    env->release(env, c.window);
    return s;
}
