/*
 * rewrite.c - see rewrite.h.
 */
#include "rewrite.h"

#include <errno.h>
#include <string.h>

#include "fingerprint.h"
#include "spool.h"
#include "verify.h"

enum { FIXED_HEADER = 512 };

typedef struct rewriting {
    gd_held *held;
    const gd_codec *codec;
    int level;
    gd_spool_file file;
    gd_group target;   /* the new file, as a group */
    gd_entry *entries; /* the new ones; of live blocks, those copied so far */
    uint64_t end;      /* of the new file */
    gd_hasher *hasher;
    gd_coder *coder;
    uint8_t *in;     /* a segment as it is stored */
    uint8_t *plain;  /* its plain bytes */
    uint8_t *picked; /* those of them that go into a new one */
    uint8_t *packed; /* compressed */
} rewriting;

/* ---- preparing ---- */

static gd_status
check_entries(const gd_held *held, gd_error *err)
{
    for (uint32_t i = 0; i < held->group->bounds.slots; i++) {
        uint8_t state = held->entries[i].state;
        if (i >= held->published.count && state != GD_ENTRY_EMPTY) {
            return gd_fail(err, GD_BUSY, "%s has entries that are not "
                           "published, from slot %u on: they wait for the "
                           "next upload", held->group->name, i);
        }
        /* Only the old file has what may be read after all. */
        if (state == GD_ENTRY_INVALID || state == GD_ENTRY_DAMAGED) {
            return gd_fail(err, GD_CORRUPT, "%s: %s of slot %u (offset %llu) "
                           "is damaged", held->group->name,
                           state == GD_ENTRY_INVALID ? "the entry"
                                                     : "the block",
                           i, (unsigned long long)gd_entry_offset(i));
        }
    }
    return GD_OK;
}

static gd_status
open_buffers(rewriting *r, gd_error *err)
{
    gd_repo *repo = r->held->repo;
    gd_status s = gd_hasher_open(repo->env, repo->digest, &r->hasher, err);
    if (s == GD_OK) {
        s = gd_coder_open(repo->env, &r->coder, err);
    }
    if (s != GD_OK) {
        return s;
    }
    r->entries = gd_calloc(repo->env, r->held->group->bounds.slots,
                           sizeof *r->entries, err);
    r->in = gd_calloc(repo->env, GD_SEGMENT_HEADER + GD_SEGMENT_MAX, 1, err);
    r->plain = gd_calloc(repo->env, GD_SEGMENT_MAX, 1, err);
    r->picked = gd_calloc(repo->env, GD_SEGMENT_MAX, 1, err);
    r->packed = gd_calloc(repo->env, GD_SEGMENT_MAX, 1, err);
    return r->entries == NULL || r->in == NULL || r->plain == NULL ||
                   r->picked == NULL || r->packed == NULL
               ? GD_NOMEM
               : GD_OK;
}

static void
close_buffers(rewriting *r)
{
    const gd_env *env = r->held->repo->env;
    env->release(env, r->packed);
    env->release(env, r->picked);
    env->release(env, r->plain);
    env->release(env, r->in);
    env->release(env, r->entries);
    gd_coder_close(env, r->coder);
    if (r->hasher != NULL) {
        gd_hasher_close(env, r->hasher);
    }
}

/* The fixed header is the same, and with it the seed of all that follows. */
static gd_status
start_file(rewriting *r, gd_error *err)
{
    const gd_group *old = r->held->group;
    const gd_env *env = old->env;
    uint8_t header[FIXED_HEADER];
    r->target = *old;
    r->target.fd = r->file.fd;
    memcpy(r->target.name, r->file.name, sizeof r->target.name);
    r->end = gd_data_start(old->bounds.slots);
    gd_status s = gd_repo_check_room(r->held->repo, r->end, err);
    if (s == GD_OK) {
        s = gd_read_full(env, old->fd, header, sizeof header, 0, old->name,
                         err);
    }
    if (s == GD_OK) {
        s = gd_write_full(env, r->file.fd, header, sizeof header, 0,
                          r->file.name, err);
    }
    if (s != GD_OK) {
        return s;
    }
    int rc;
    do {
        rc = env->fallocate(env, r->file.fd, 0, r->end);
    } while (rc == -EINTR);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot write %s anew as %s",
                                  old->name, r->file.name)
                  : GD_OK;
}

/* ---- segments ---- */

/* Slots [first, end) that name one segment, which was read. */
typedef struct old_segment {
    gd_segment_header header;
    uint32_t offset;
    uint32_t first, end;
} old_segment;

static bool
is_of_segment(const rewriting *r, const old_segment *old, uint32_t slot)
{
    const gd_entry *entry = &r->held->entries[slot];
    return entry->state == GD_ENTRY_LIVE && entry->segment == old->offset;
}

static gd_status
verify_blocks(rewriting *r, const old_segment *old, gd_verified *blocks,
              size_t count, gd_error *err)
{
    const gd_group *group = r->held->group;
    gd_status s = gd_verify_blocks(group, &old->header, r->plain, r->hasher,
                                   blocks, count, err);
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        if (!blocks[i].good) {
            s = gd_fail(err, GD_CORRUPT, "%s: the block of slot %u, in the "
                        "segment at offset %u, is damaged", group->name,
                        blocks[i].slot, old->offset);
        }
    }
    return s;
}

/* *whole is cleared if not all of the segment's blocks are live. */
static gd_status
verify_segment(rewriting *r, const old_segment *old, bool *whole,
               gd_error *err)
{
    gd_verified blocks[GD_VERIFIED_AT_ONCE];
    size_t count = 0;
    for (uint32_t slot = old->first; slot < old->end; slot++) {
        if (!is_of_segment(r, old, slot)) {
            *whole = false;
            continue;
        }
        blocks[count++] =
            (gd_verified){&r->held->entries[slot], slot, false};
        if (count == GD_VERIFIED_AT_ONCE) {
            gd_status s = verify_blocks(r, old, blocks, count, err);
            if (s != GD_OK) {
                return s;
            }
            count = 0;
        }
    }
    return verify_blocks(r, old, blocks, count, err);
}

/* Reads the segment that the slot names, and verifies every live block of it.
 * *whole: all of its blocks live, and its checksum is right. */
static gd_status
read_segment(rewriting *r, uint32_t slot, old_segment *old, bool *whole,
             gd_error *err)
{
    const gd_group *group = r->held->group;
    const gd_entry *entry = &r->held->entries[slot];
    gd_status s = gd_group_read_segment(group, entry, slot, r->coder, r->in,
                                        r->plain, &old->header, err);
    if (s != GD_OK) {
        return s;
    }
    uint64_t end = (uint64_t)old->header.first_slot + old->header.blocks;
    uint32_t slots = group->bounds.slots;
    old->offset = entry->segment;
    old->first = slot;
    old->end = end < slots ? (uint32_t)end : slots;
    *whole = slot == old->header.first_slot && end == old->end &&
             gd_segment_intact(r->in, &old->header, group->bounds.seed);
    return verify_segment(r, old, whole, err);
}

static gd_status
append(rewriting *r, struct iovec *pieces, int count, uint64_t length,
       gd_error *err)
{
    if (r->end + length > UINT32_MAX) {
        return gd_fail(err, GD_NOSPACE, "%s would have more than 4 GiB",
                       r->held->group->name);
    }
    gd_status s = gd_repo_check_room(r->held->repo, length, err);
    return s == GD_OK
               ? gd_writev_full(r->target.env, r->target.fd, pieces, count,
                                r->end, r->target.name, err)
               : s;
}

static gd_status
copy_segment(rewriting *r, const old_segment *old, gd_error *err)
{
    struct iovec piece = {r->in, GD_SEGMENT_HEADER +
                                     (size_t)old->header.stored_length};
    uint64_t length = piece.iov_len;
    gd_status s = append(r, &piece, 1, length, err);
    for (uint32_t i = old->first; s == GD_OK && i < old->end; i++) {
        r->entries[i] = r->held->entries[i];
        r->entries[i].segment = (uint32_t)r->end;
    }
    r->end += length;
    return s;
}

/* The plain bytes in picked become a segment of these slots. */
static gd_status
write_segment(rewriting *r, uint32_t first, uint32_t count, uint32_t length,
              gd_codec codec, gd_error *err)
{
    uint8_t encoded[GD_SEGMENT_HEADER];
    size_t stored;
    gd_status s = gd_segment_compress(r->coder, codec, r->level, r->picked,
                                      length, r->packed, &stored, err);
    if (s != GD_OK) {
        return s;
    }
    gd_segment_header header = {
        .codec = stored == 0 ? GD_CODEC_NONE : codec,
        .blocks = count,
        .first_slot = first,
        .plain_length = length,
        .stored_length = stored == 0 ? length : (uint32_t)stored,
    };
    struct iovec pieces[2] = {
        {encoded, sizeof encoded},
        {stored == 0 ? r->picked : r->packed, header.stored_length}};
    gd_segment_header_encode(&header, r->target.bounds.seed, &pieces[1], 1,
                             encoded);
    uint64_t total = GD_SEGMENT_HEADER + (uint64_t)header.stored_length;
    s = append(r, pieces, 2, total, err);
    for (uint32_t i = first; s == GD_OK && i < first + count; i++) {
        r->entries[i].segment = (uint32_t)r->end;
        r->entries[i].stored_length = header.stored_length;
        r->entries[i].codec = (uint8_t)header.codec;
    }
    r->end += total;
    return s;
}

/* Its live blocks become new segments, one for each run of slots, since a
 * segment's blocks lie in consecutive ones. */
static gd_status
repack_segment(rewriting *r, const old_segment *old, gd_error *err)
{
    gd_codec codec = r->codec == NULL ? old->header.codec : *r->codec;
    gd_status s = GD_OK;
    for (uint32_t i = old->first; s == GD_OK && i < old->end;) {
        uint32_t n = 0, length = 0;
        while (i + n < old->end && is_of_segment(r, old, i + n)) {
            const gd_entry *entry = &r->held->entries[i + n];
            if (length + entry->plain_length > GD_SEGMENT_MAX) {
                break; /* entries that share bytes: not of our making */
            }
            memcpy(r->picked + length, r->plain + entry->plain_offset,
                   entry->plain_length);
            r->entries[i + n] = *entry;
            r->entries[i + n].plain_offset = length;
            length += entry->plain_length;
            n++;
        }
        if (n > 0) {
            s = write_segment(r, i, n, length, codec, err);
        } else {
            n = 1; /* a slot that is not of the segment */
        }
        i += n;
    }
    return s;
}

static gd_status
write_segments(rewriting *r, gd_error *err)
{
    const gd_held *held = r->held;
    gd_status s = GD_OK;
    for (uint32_t i = 0; s == GD_OK && i < held->published.count; i++) {
        old_segment old;
        bool whole;
        if (held->entries[i].state != GD_ENTRY_LIVE) {
            r->entries[i] = held->entries[i]; /* void, freed, damaged */
            continue;
        }
        if (r->entries[i].state == GD_ENTRY_LIVE) {
            continue; /* went with a segment before */
        }
        s = read_segment(r, i, &old, &whole, err);
        if (s == GD_OK) {
            s = whole && r->codec == NULL ? copy_segment(r, &old, err)
                                          : repack_segment(r, &old, err);
        }
    }
    return s;
}

/* ---- completing ---- */

static gd_status
write_entries(rewriting *r, gd_error *err)
{
    uint32_t count = r->held->published.count;
    gd_status s = GD_OK;
    for (uint32_t i = 0; s == GD_OK && i < count;) {
        uint32_t n = 0;
        /* An empty one is zeros, not an entry. */
        while (i + n < count && r->entries[i + n].state != GD_ENTRY_EMPTY) {
            n++;
        }
        if (n > 0) {
            s = gd_group_write_entries(&r->target, i, n, r->entries + i, err);
        }
        i += n + 1;
    }
    return s;
}

static gd_status
complete_file(rewriting *r, gd_published *record, gd_error *err)
{
    const gd_env *env = r->target.env;
    *record = r->held->published;
    record->flags |= GD_GROUP_UNSETTLED;
    record->end = r->end;
    gd_status s = gd_group_next_generation(env, record, err);
    if (s == GD_OK) {
        s = write_entries(r, err);
    }
    /* In both places: so that a torn write of the next one leaves one. */
    for (int i = 0; s == GD_OK && i < 2; i++) {
        record->sequence++;
        s = gd_group_write_published(&r->target, record, err);
    }
    if (s == GD_OK) {
        int rc = env->fsync(env, r->target.fd);
        s = rc < 0 ? gd_fail_errno(err, -rc, "cannot fsync %s",
                                   r->target.name)
                   : GD_OK;
    }
    return s;
}

/* The new file's name is durable.  If this is lost, the next one who enters the
 * group syncs the directory once more, for nothing. */
static void
mark_settled(gd_held *held)
{
    gd_published record = held->published;
    record.sequence++;
    record.flags &= ~(uint32_t)GD_GROUP_UNSETTLED;
    if (gd_group_write_published(held->group, &record, NULL) == GD_OK) {
        held->published = record;
    }
}

/* Puts the new file in the old one's place; from the rename on it is held's. */
static gd_status
exchange(rewriting *r, const gd_published *record, uint64_t inode,
         gd_error *err)
{
    gd_held *held = r->held;
    gd_repo *repo = held->repo;
    const gd_env *env = repo->env;
    gd_group *group = held->group;
    int rc = env->renameat(env, repo->root, r->file.name, group->name);
    if (rc < 0 && !gd_same_file(env, r->file.fd, repo->root, group->name)) {
        return gd_fail_errno(err, -rc, "cannot put %s in the place of %s",
                             r->file.name, group->name);
    }
    env->close(env, group->fd);
    group->fd = r->file.fd;
    group->inode = inode;
    r->file.fd = -1;
    env->release(env, held->entries);
    held->entries = r->entries;
    r->entries = NULL;
    held->published = *record;
    held->settled = true;
    gd_status s = gd_sync_dir(env, repo->root, GD_DIR_GROUPS, err);
    held->failed = s != GD_OK;
    if (s == GD_OK) {
        mark_settled(held);
    }
    return s;
}

/* Whichever of the two files a crash leaves under the name must be whole. */
static gd_status
sync_old(const gd_held *held, gd_error *err)
{
    const gd_group *group = held->group;
    int rc = group->env->fsync(group->env, group->fd);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot fsync %s", group->name)
                  : GD_OK;
}

static gd_status
rewrite(rewriting *r, uint64_t *bytes, gd_error *err)
{
    const gd_env *env = r->target.env;
    const gd_group *group = r->held->group;
    gd_published record;
    struct stat before, after;
    uint64_t start = gd_data_start(group->bounds.slots);
    if (r->held->published.end > start) {
        env->start_readahead(env, group->fd, start,
                             r->held->published.end - start);
    }
    gd_status s = start_file(r, err);
    if (s == GD_OK) {
        s = write_segments(r, err);
    }
    if (s == GD_OK) {
        s = complete_file(r, &record, err);
    }
    if (s != GD_OK) {
        return s;
    }
    int rc = env->fstat(env, group->fd, &before);
    if (rc >= 0) {
        rc = env->fstat(env, r->file.fd, &after);
    }
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot stat %s", r->file.name);
    }
    s = exchange(r, &record, after.st_ino, err);
    gd_fpcache_drop_removed(r->held->repo->cache);
    if (s == GD_OK && before.st_blocks > after.st_blocks) {
        *bytes = (uint64_t)(before.st_blocks - after.st_blocks) * 512;
    }
    return s;
}

gd_status
gd_held_rewrite(gd_held *held, const gd_codec *codec, int level,
                uint64_t *bytes, gd_error *err)
{
    gd_repo *repo = held->repo;
    rewriting r = {.held = held, .codec = codec, .level = level};
    *bytes = 0;
    gd_status s = gd_held_check(held, err);
    if (s == GD_OK) {
        s = check_entries(held, err);
    }
    if (s == GD_OK) {
        s = sync_old(held, err);
    }
    if (s == GD_OK) {
        s = gd_spool_create(repo->env, repo->root, GD_SPOOL_GROUP, &r.file,
                            err);
    }
    if (s != GD_OK) {
        return s;
    }
    r.target.env = repo->env;
    s = open_buffers(&r, err);
    if (s == GD_OK) {
        s = rewrite(&r, bytes, err);
    }
    close_buffers(&r);
    gd_spool_discard(repo->env, repo->root, &r.file); /* if it is still there */
    return s;
}
