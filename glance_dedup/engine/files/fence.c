/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fence.c - see fence.h.
 */
#include "engine/files/fence.h"

#include <string.h>

#include "engine/files/file.h"

/* The file's contents: two records, either of which may be invalid. */
typedef struct fence_file {
    int fd;
    bool valid[2];
    gd_fence records[2];
} fence_file;

static gd_status
read_records(const gd_env *env, fence_file *file, gd_error *err)
{
    for (int i = 0; i < 2; i++) {
        uint8_t raw[GD_FENCE_RECORD];
        gd_status s = gd_read_full(env, file->fd, raw, sizeof raw,
                                   (uint64_t)i * GD_FENCE_RECORD,
                                   GD_FILE_FENCE, err);
        if (s != GD_OK && s != GD_CORRUPT) {
            return s;
        }
        /* If the file ends before this record, the record does not exist. */
        file->valid[i] =
            s == GD_OK && gd_fence_record_decode(raw, &file->records[i]);
    }
    return GD_OK;
}

/* Reads the records as the last maintainer left them, perhaps on another host
 * (N13.1). */
static gd_status
read_file(const gd_env *env, int root, fence_file *file, gd_error *err)
{
    gd_status s = gd_file_open_fresh(env, root, GD_FILE_FENCE, &file->fd, err);
    if (s == GD_OK) {
        s = read_records(env, file, err);
        env->close(env, file->fd);
    }
    return s;
}

/* The index of the record that counts; -1 if there is none. */
static int
newest(const fence_file *file)
{
    if (file->valid[0] && file->valid[1]) {
        return file->records[1].sequence > file->records[0].sequence;
    }
    return file->valid[0] ? 0 : file->valid[1] ? 1 : -1;
}

gd_status
gd_fence_read(const gd_env *env, int root, gd_fence *fence, bool *found,
              gd_error *err)
{
    fence_file file;
    *found = false;
    gd_status s = read_file(env, root, &file, err);
    if (s == GD_NOTFOUND) {
        return GD_OK;
    }
    if (s == GD_OK && newest(&file) >= 0) {
        *fence = file.records[newest(&file)];
        *found = true;
    }
    return s;
}

static gd_status
write_record(const gd_env *env, const fence_file *file, const gd_fence *fence,
             gd_error *err)
{
    uint8_t raw[GD_FENCE_RECORD];
    gd_fence_record_encode(fence, raw);
    GD_TRY(gd_write_full(env, file->fd, raw, sizeof raw,
                         (fence->sequence & 1) * GD_FENCE_RECORD,
                         GD_FILE_FENCE, err));
    return gd_fsync(env, file->fd, GD_FILE_FENCE, err);
}

/* Writes a later sequence of the same catalog. */
static gd_status
advance(const gd_env *env, const fence_file *file, const gd_fence *fence,
        uint64_t before, gd_error *err)
{
    if (fence->sequence > before && ((fence->sequence - before) & 1) == 0) {
        /* The place for the new record holds the newest one, which a torn write
         * would destroy.  So first write a record in between to the other
         * place. */
        gd_fence between = *fence;
        between.sequence--;
        GD_TRY(write_record(env, file, &between, err));
    }
    return write_record(env, file, fence, err);
}

/* Writes another catalog's record.  Whatever a crash leaves of the old records,
 * the new catalog then seems to lie behind, or to be the wrong one, and is
 * rebuilt. */
static gd_status
replace(const gd_env *env, const fence_file *file, const gd_fence *fence,
        gd_error *err)
{
    static const uint8_t nothing[GD_FENCE_RECORD];
    GD_TRY(write_record(env, file, fence, err));
    GD_TRY(gd_write_full(env, file->fd, nothing, sizeof nothing,
                         (~fence->sequence & 1) * GD_FENCE_RECORD,
                         GD_FILE_FENCE, err));
    return gd_fsync(env, file->fd, GD_FILE_FENCE, err);
}

static gd_status
write_fence(const gd_env *env, int root, const fence_file *file,
            const gd_fence *fence, gd_error *err)
{
    int at = newest(file);
    if (at < 0) {
        /* So that no record is ever in a file whose name is not durable. */
        gd_status s = gd_sync_dir(env, root, ".", err);
        return s == GD_OK ? write_record(env, file, fence, err) : s;
    }
    const gd_fence *old = &file->records[at];
    if (memcmp(old->catalog_id, fence->catalog_id, GD_ID_SIZE) != 0) {
        return replace(env, file, fence, err);
    }
    if (fence->sequence < old->sequence) {
        return gd_fail(err, GD_INVALID,
                       "%s says %llu; it cannot go back to %llu",
                       GD_FILE_FENCE, (unsigned long long)old->sequence,
                       (unsigned long long)fence->sequence);
    }
    return advance(env, file, fence, old->sequence, err);
}

gd_status
gd_fence_write(const gd_env *env, int root, const gd_fence *fence,
               gd_error *err)
{
    fence_file file;
    int fd;
    GD_TRY(gd_file_open_or_create(env, root, GD_FILE_FENCE, &fd, err));
    gd_status s = read_file(env, root, &file, err);
    file.fd = fd;
    if (s == GD_OK) {
        s = write_fence(env, root, &file, fence, err);
    }
    env->close(env, fd);
    return s;
}
