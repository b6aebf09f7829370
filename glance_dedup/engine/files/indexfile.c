/* SPDX-License-Identifier: Apache-2.0 */
/*
 * indexfile.c - see indexfile.h.
 */
#include "engine/files/indexfile.h"

#include <errno.h>
#include <string.h>

#include "engine/files/file.h"
#include "engine/format/index.h"
#include "engine/format/packedframe.h"

enum {
    TRIES = 100,
    AHEAD = 1 << 20, /* bytes to request from the kernel, and to have written
                      * back */
};

struct gd_index_writer {
    const gd_env *env;
    int root, fd;
    gd_index_head head;
    char name[GD_NAME_SIZE]; /* of kind GD_INDEX_NEW */
    bool named;              /* the file has its own name */
    size_t used;             /* items in the frame */
    uint64_t frames;         /* written */
    uint8_t frame[GD_FRAME_MAX];
    gd_frame_shape shape;    /* of the frame, if it is to be packed: */
    uint8_t packed[GD_PACKED_FRAME];
};

struct gd_index_reader {
    const gd_env *env;
    int fd;
    gd_index_head head;
    char name[GD_NAME_SIZE];
    uint64_t next;             /* the frame that read_next reads */
    uint64_t seen;             /* items that it has read */
    bool has_last;             /* the last item of the frame before it: */
    uint8_t last[GD_FRAME_CHECKSUM * 2];
    uint8_t frame[GD_FRAME_MAX];
    uint8_t packed[GD_PACKED_FRAME];
};

/* ---- writing ---- */

/* Locks the new file.  *taken: its name still leads to it.  Between creating
 * and locking somebody may have taken its maker for dead. */
static gd_status
take(const gd_index_writer *writer, bool *taken, gd_error *err)
{
    *taken = false;
    int rc = writer->env->lock(writer->env, writer->fd, 0, F_WRLCK);
    if (rc == -EAGAIN) {
        return GD_OK;
    }
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot lock %s", writer->name)
                  : gd_find_same(writer->env, writer->fd, writer->root,
                                 writer->name, taken, err);
}

static gd_status
create_once(gd_index_writer *writer, bool *taken, gd_error *err)
{
    const gd_env *env = writer->env;
    gd_index_id id = {.kind = GD_INDEX_NEW};
    *taken = false;
    gd_status s = gd_random(env, &id.number, sizeof id.number, err);
    if (s == GD_OK) {
        gd_names_index(&id, writer->name);
        s = gd_file_create(env, writer->root, writer->name, O_RDWR,
                           &writer->fd, err);
    }
    if (s != GD_OK) {
        return s == GD_EXISTS ? GD_OK : s;
    }
    s = take(writer, taken, err);
    if (s != GD_OK || !*taken) {
        if (s != GD_OK) {
            (void)env->unlinkat(env, writer->root, writer->name);
        }
        env->close(env, writer->fd);
        writer->fd = -1;
    }
    return s;
}

gd_status
gd_index_writer_create(const gd_env *env, int root, const gd_index_id *id,
                       const uint8_t catalog_id[GD_ID_SIZE],
                       gd_index_writer **writer, gd_error *err)
{
    *writer = NULL;
    gd_index_writer *made = gd_calloc(env, 1, sizeof *made, err);
    if (made == NULL) {
        return GD_NOMEM;
    }
    made->env = env;
    made->root = root;
    made->fd = -1;
    made->head.id = *id;
    made->head.length = GD_INDEX_HEAD;
    memcpy(made->head.catalog_id, catalog_id, GD_ID_SIZE);
    gd_status s =
        gd_random(env, &made->head.seed, sizeof made->head.seed, err);
    bool taken = false;
    for (int i = 0; s == GD_OK && !taken && i < TRIES; i++) {
        s = create_once(made, &taken, err);
    }
    if (s == GD_OK && !taken) {
        s = gd_fail(err, GD_BUSY, "no new file of the index could be had in "
                    "%d tries", TRIES);
    }
    if (s != GD_OK) {
        env->release(env, made);
        return s;
    }
    *writer = made;
    return GD_OK;
}

/* Writes the bytes of the next frame. */
static gd_status
write_bytes(gd_index_writer *writer, const uint8_t *bytes, size_t length,
            uint64_t at, gd_error *err)
{
    GD_TRY(gd_write_full(writer->env, writer->fd, bytes, length, at,
                         writer->name, err));
    if (at / AHEAD != (at + length) / AHEAD) {
        /* So that the sync at the end finds little left to do. */
        writer->env->start_writeback(writer->env, writer->fd,
                                     at / AHEAD * AHEAD, AHEAD);
    }
    writer->frames++;
    writer->used = 0;
    return GD_OK;
}

static gd_status
write_frame(gd_index_writer *writer, gd_error *err)
{
    size_t size = gd_index_head_item_size(writer->head.id.kind);
    size_t length = writer->used * size + GD_FRAME_CHECKSUM;
    uint64_t full = gd_index_head_frame_items(writer->head.id.kind) * size +
                    GD_FRAME_CHECKSUM;
    uint64_t at = GD_INDEX_HEAD + writer->frames * full;
    gd_index_head_seal_frame(&writer->head, writer->frames, writer->frame,
                             writer->used);
    return write_bytes(writer, writer->frame, length, at, err);
}

static gd_status
write_packed(gd_index_writer *writer, bool is_last, gd_error *err)
{
    size_t length = gd_packedframe_pack(&writer->shape, writer->frame,
                                        writer->head.seed + writer->frames,
                                        !is_last,
                                        writer->packed);
    uint64_t at = writer->head.length;
    writer->head.length += length;
    writer->shape = (gd_frame_shape){0};
    return write_bytes(writer, writer->packed, length, at, err);
}

static gd_status
append_packed(gd_index_writer *writer, const uint8_t *record, gd_error *err)
{
    if (!gd_frame_shape_add(&writer->shape, record)) {
        GD_TRY(write_packed(writer, false, err));
        (void)gd_frame_shape_add(&writer->shape, record); /* one always fits */
    }
    memcpy(writer->frame + writer->used * GD_INDEX_RECORD, record,
           GD_INDEX_RECORD);
    writer->used++;
    writer->head.items++;
    return GD_OK;
}

static gd_status
append_plain(gd_index_writer *writer, const uint8_t *items, size_t count,
             gd_error *err)
{
    size_t size = gd_index_head_item_size(writer->head.id.kind);
    size_t most = gd_index_head_frame_items(writer->head.id.kind);
    while (count > 0) {
        size_t some = most - writer->used < count ? most - writer->used
                                                  : count;
        memcpy(writer->frame + writer->used * size, items, some * size);
        writer->used += some;
        writer->head.items += some;
        items += some * size;
        count -= some;
        if (writer->used == most) {
            GD_TRY(write_frame(writer, err));
        }
    }
    return GD_OK;
}

gd_status
gd_index_writer_append(gd_index_writer *writer, const uint8_t *items,
                       size_t count,
                       gd_error *err)
{
    if (!gd_index_head_is_packed(&writer->head)) {
        return append_plain(writer, items, count, err);
    }
    for (size_t i = 0; i < count; i++) {
        GD_TRY(append_packed(writer, items + i * GD_INDEX_RECORD, err));
    }
    return GD_OK;
}

static gd_status
write_last(gd_index_writer *writer, gd_error *err)
{
    if (writer->used == 0) {
        return GD_OK;
    }
    return gd_index_head_is_packed(&writer->head) ?
    write_packed(writer, true, err)
                                             : write_frame(writer, err);
}

gd_status
gd_index_writer_seal(gd_index_writer *writer, uint32_t flags, gd_error *err)
{
    uint8_t head[GD_INDEX_HEAD];
    GD_TRY(write_last(writer, err));
    writer->head.flags = flags;
    gd_index_head_encode(&writer->head, head);
    GD_TRY(gd_write_full(writer->env, writer->fd, head, sizeof head, 0,
                         writer->name, err));
    return gd_fsync(writer->env, writer->fd, writer->name, err);
}

gd_status
gd_index_writer_publish(gd_index_writer *writer, gd_error *err)
{
    const gd_env *env = writer->env;
    char name[GD_NAME_SIZE];
    gd_names_index(&writer->head.id, name);
    int rc = env->linkat(env, writer->root, writer->name, name);
    if (rc == -EEXIST &&
        gd_same_file(env, writer->fd, writer->root, name)) {
        rc = 0; /* a network file system repeated the request */
    }
    if (rc == -ENOENT) {
        return gd_fail(err, GD_BUSY, "%s is gone: another process took its "
                       "maker for dead", writer->name);
    }
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot link %s", name);
    }
    writer->named = true;
    /* Left behind, it is a second name that the next clean-up removes. */
    (void)env->unlinkat(env, writer->root, writer->name);
    return GD_OK;
}

uint64_t
gd_index_writer_written(const gd_index_writer *writer)
{
    return writer->head.items;
}

void
gd_index_writer_discard(gd_index_writer *writer)
{
    if (writer == NULL) {
        return;
    }
    const gd_env *env = writer->env;
    if (!writer->named) {
        (void)env->unlinkat(env, writer->root, writer->name);
    }
    env->close(env, writer->fd);
    env->release(env, writer);
}

gd_status
gd_indexfile_remove_dead(const gd_env *env, int root, const gd_index_id *id,
                         gd_error *err)
{
    char name[GD_NAME_SIZE];
    int fd;
    gd_names_index(id, name);
    gd_status s = gd_file_open(env, root, name, O_RDWR, &fd, err);
    if (s != GD_OK) {
        return s == GD_NOTFOUND ? GD_OK : s;
    }
    int rc = env->lock(env, fd, 0, F_WRLCK);
    if (rc == 0) {
        rc = env->unlinkat(env, root, name);
    }
    env->close(env, fd);
    return rc == 0 || rc == -EAGAIN || rc == -ENOENT
               ? GD_OK
               : gd_fail_errno(err, -rc, "cannot remove %s", name);
}

/* ---- reading ---- */

static gd_status
read_head(gd_index_reader *reader, const gd_index_id *id,
          const uint8_t catalog_id[GD_ID_SIZE], gd_error *err)
{
    uint8_t raw[GD_INDEX_HEAD];
    struct stat st;
    int rc = reader->env->fstat(reader->env, reader->fd, &st);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot stat %s", reader->name);
    }
    GD_TRY(gd_read_full(reader->env, reader->fd, raw, sizeof raw, 0,
                        reader->name, err));
    return gd_index_head_decode(raw, id, catalog_id,
                                (uint64_t)st.st_size,
                                &reader->head, err);
}

gd_status
gd_index_reader_open(const gd_env *env, int root, const gd_index_id *id,
                     const uint8_t catalog_id[GD_ID_SIZE],
                     gd_index_reader **reader,
                     gd_error *err)
{
    *reader = NULL;
    gd_index_reader *made = gd_calloc(env, 1, sizeof *made, err);
    if (made == NULL) {
        return GD_NOMEM;
    }
    made->env = env;
    gd_names_index(id, made->name);
    gd_status s = gd_file_open_fresh(env, root, made->name, &made->fd, err);
    if (s != GD_OK) {
        env->release(env, made);
        return s;
    }
    s = read_head(made, id, catalog_id, err);
    if (s != GD_OK) {
        gd_index_reader_close(made);
        return s;
    }
    *reader = made;
    return GD_OK;
}

const gd_index_head *
gd_index_reader_head(const gd_index_reader *reader)
{
    return &reader->head;
}

/* Of a packed one the items are unpacked, so that readers see only plain
 * ones. */
static gd_status
read_frame(gd_index_reader *reader, uint64_t frame, const uint8_t *before,
           const uint8_t **items, size_t *count, gd_error *err)
{
    const gd_index_head *head = &reader->head;
    uint64_t start = gd_index_head_frame_start(head, frame);
    size_t length =
    (size_t)(gd_index_head_frame_start(head, frame + 1) - start);
    bool packed = gd_index_head_is_packed(head);
    gd_status s = gd_read_full(reader->env, reader->fd,
                               packed ? reader->packed : reader->frame, length,
                               start, reader->name, err);
    *items = reader->frame;
    *count = 0;
    if (s == GD_OK && packed) {
        s = gd_index_head_unpack_frame(head, frame, reader->packed, length,
                                       before, reader->frame, count, err);
    } else if (s == GD_OK) {
        s = gd_index_head_require_frame(head, frame, reader->frame, before,
                                        err);
        *count = gd_index_head_items_in(head, frame);
    }
    if (s != GD_OK) {
        *count = 0;
    }
    return s;
}

gd_status
gd_index_reader_frame(gd_index_reader *reader, uint64_t frame,
                      const uint8_t **items, size_t *count, gd_error *err)
{
    if (frame >= gd_index_head_frames(&reader->head)) {
        return gd_fail(err, GD_INVALID, "%s has no frame %llu", reader->name,
                       (unsigned long long)frame);
    }
    return read_frame(reader, frame, NULL, items, count, err);
}

gd_status
gd_index_reader_next(gd_index_reader *reader, const uint8_t **items,
                     size_t *count, gd_error *err)
{
    *count = 0;
    if (reader->next == gd_index_head_frames(&reader->head)) {
        return reader->seen == reader->head.items
                   ? GD_OK
                   : gd_fail(err, GD_CORRUPT, "%s has %llu items instead of "
                             "%llu", reader->name,
                             (unsigned long long)reader->seen,
                             (unsigned long long)reader->head.items);
    }
    uint64_t start = gd_index_head_frame_start(&reader->head, reader->next);
    if (reader->next == 0 || start / AHEAD != (start - 1) / AHEAD) {
        reader->env->start_readahead(reader->env, reader->fd, start,
                                     2 * AHEAD);
    }
    gd_status s =
        read_frame(reader, reader->next, reader->has_last ? reader->last : NULL,
                   items, count, err);
    if (s == GD_OK) {
        size_t size = gd_index_head_item_size(reader->head.id.kind);
        memcpy(reader->last, *items + (*count - 1) * size, size);
        reader->has_last = true;
        reader->seen += *count;
        reader->next++;
    }
    return s;
}

void
gd_index_reader_close(gd_index_reader *reader)
{
    if (reader != NULL) {
        reader->env->close(reader->env, reader->fd);
        reader->env->release(reader->env, reader);
    }
}

gd_status
gd_indexfile_verify(const gd_env *env, int root, const gd_index_id *id,
                    const uint8_t catalog_id[GD_ID_SIZE], gd_error *err)
{
    gd_index_reader *reader;
    const uint8_t *items;
    size_t count = 1;
    gd_status s = gd_index_reader_open(env, root, id, catalog_id, &reader,
                                       err);
    while (s == GD_OK && count > 0) {
        s = gd_index_reader_next(reader, &items, &count, err);
    }
    gd_index_reader_close(reader);
    return s;
}
