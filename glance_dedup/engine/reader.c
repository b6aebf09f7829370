/*
 * reader.c - see reader.h.
 */
#include "reader.h"

#include <stdlib.h>
#include <string.h>

#include "coding.h"
#include "spool.h"

enum {
    WINDOW = 4 << 20,   /* bytes planned at once */
    READ_ONCE = 1 << 20, /* bytes of neighbouring segments in one read */
    READ_GAP = 32768,   /* bytes skipped over rather than seeked over */
};

struct gd_image {
    gd_repo *repo;
    gd_recipe recipe;
};

/* A stretch of one block that is wanted. */
typedef struct want {
    gd_group *group;
    gd_entry entry;
    uint32_t slot;
    uint32_t from; /* in the block */
    uint32_t length;
    uint8_t *out;
} want;

/* What one read uses. */
typedef struct reading {
    gd_image *image;
    gd_coder *coder;
    want *wants;
    size_t want_count, want_room;
    gd_entry *entries; /* of one extent */
    gd_group **groups; /* lent, one for each extent */
    size_t group_count, group_room;
    uint8_t *in;    /* READ_ONCE + one segment */
    uint8_t *plain; /* one segment */
    bool fresh;     /* look group files up again: see read_window */
} reading;

/* ---- opening ---- */

gd_status
gd_image_open(gd_repo *repo, const char *image_id, const uint8_t *upload_id,
              gd_image **out, gd_error *err)
{
    int fd;
    char name[GD_NAME_SIZE];
    gd_status s = gd_repo_check_owner(repo, err);
    if (s == GD_OK) {
        s = gd_image_name(image_id, name, err);
    }
    if (s == GD_OK) {
        s = gd_spool_open_image(repo->env, repo->root, image_id, &fd, err);
    }
    if (s != GD_OK) {
        return s;
    }
    gd_image *image = gd_calloc(repo->env, 1, sizeof *image, err);
    s = image == NULL ? GD_NOMEM
                      : gd_recipe_open(repo->env, fd, name, &repo->params,
                                       image_id, &image->recipe, err);
    if (s == GD_OK && upload_id != NULL &&
        memcmp(image->recipe.header.upload_id, upload_id, GD_ID_SIZE) != 0) {
        s = gd_fail(err, GD_NOTFOUND,
                    "image %s is of another upload than the one named",
                    image_id);
    }
    if (s != GD_OK) {
        repo->env->close(repo->env, fd);
        repo->env->release(repo->env, image);
        return s;
    }
    image->repo = repo;
    *out = image;
    return GD_OK;
}

void
gd_image_close(gd_image *image)
{
    const gd_env *env = image->repo->env;
    env->close(env, image->recipe.fd);
    env->release(env, image);
}

const gd_recipe_header *
gd_image_header(const gd_image *image)
{
    return &image->recipe.header;
}

uint64_t
gd_image_pages(const gd_image *image)
{
    return (image->recipe.header.extents + GD_EXTENTS_PER_PAGE - 1) /
           GD_EXTENTS_PER_PAGE;
}

gd_status
gd_image_extents(gd_image *image, uint64_t number, gd_recipe_page *page,
                 gd_error *err)
{
    gd_status s = gd_repo_check_owner(image->repo, err);
    return s == GD_OK ? gd_recipe_read_page(&image->recipe, number, page, err)
                      : s;
}

/* ---- planning ---- */

static void
return_groups(reading *r)
{
    for (size_t i = 0; i < r->group_count; i++) {
        gd_fpcache_return_group(r->image->repo->cache, r->groups[i]);
    }
    r->group_count = 0;
    r->want_count = 0;
}

/* Makes room for one more in an array; the array may move. */
static gd_status
grow(const gd_env *env, void **array, size_t *room, size_t used, size_t size,
     gd_error *err)
{
    if (used < *room) {
        return GD_OK;
    }
    size_t larger = *room == 0 ? 64 : *room * 2;
    void *moved = gd_calloc(env, larger, size, err);
    if (moved == NULL) {
        return GD_NOMEM;
    }
    if (used > 0) {
        memcpy(moved, *array, used * size);
    }
    env->release(env, *array);
    *array = moved;
    *room = larger;
    return GD_OK;
}

static gd_status
lend_group(reading *r, uint32_t number, gd_group **group, gd_error *err)
{
    gd_repo *repo = r->image->repo;
    if (r->group_count > 0 &&
        r->groups[r->group_count - 1]->number == number) {
        *group = r->groups[r->group_count - 1];
        return GD_OK;
    }
    gd_status s = grow(repo->env, (void **)&r->groups, &r->group_room,
                       r->group_count, sizeof *r->groups, err);
    if (s == GD_OK) {
        s = gd_fpcache_group(repo->cache, number, r->fresh, group, err);
    }
    if (s == GD_NOTFOUND) {
        s = gd_fail(err, GD_CORRUPT, "%s names groups/%08x, which is missing",
                    r->image->recipe.name, (unsigned)number);
    }
    if (s == GD_OK) {
        r->groups[r->group_count++] = *group;
    }
    return s;
}

/* Reads the entries of an extent and verifies that they are those that the
 * recipe was committed with. */
static gd_status
read_extent_entries(reading *r, const gd_extent *extent, gd_group *group,
                    gd_error *err)
{
    const char *recipe = r->image->recipe.name;
    gd_status s = gd_group_read_entries(group, extent->slot, extent->blocks,
                                        r->entries, err);
    if (s != GD_OK) {
        return s;
    }
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    uint64_t length = 0;
    for (uint32_t i = 0; i < extent->blocks; i++) {
        const gd_entry *entry = &r->entries[i];
        if (entry->state != GD_ENTRY_LIVE) {
            return gd_fail(
                err, GD_CORRUPT,
                "%s: the entry of slot %u at offset %llu %s, and %s needs it",
                group->name, extent->slot + i,
                (unsigned long long)gd_entry_offset(extent->slot + i),
                entry->state == GD_ENTRY_DAMAGED ? "is marked damaged"
                : entry->state == GD_ENTRY_INVALID
                    ? "does not verify"
                    : "holds no block",
                recipe);
        }
        XXH3_64bits_update(&state, entry->fingerprint.bytes,
                           GD_FINGERPRINT_SIZE);
        length += entry->plain_length;
    }
    if (XXH3_64bits_digest(&state) != extent->digest ||
        length != extent->length) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: slots %u to %u (offset %llu) do not hold the "
                       "blocks that %s was committed with", group->name,
                       extent->slot, extent->slot + extent->blocks - 1,
                       (unsigned long long)gd_entry_offset(extent->slot),
                       recipe);
    }
    return GD_OK;
}

/* Adds what [from, to) of the extent needs; out is where from goes. */
static gd_status
plan_blocks(reading *r, const gd_extent *extent, uint64_t from, uint64_t to,
            uint8_t *out, gd_error *err)
{
    gd_group *group;
    gd_status s = lend_group(r, extent->group, &group, err);
    if (s == GD_OK) {
        s = read_extent_entries(r, extent, group, err);
    }
    uint64_t start = 0; /* of the block, in the extent */
    for (uint32_t i = 0; s == GD_OK && i < extent->blocks && start < to; i++) {
        const gd_entry *entry = &r->entries[i];
        uint64_t end = start + entry->plain_length;
        if (end > from) {
            uint64_t a = from > start ? from : start;
            uint64_t b = to < end ? to : end;
            s = grow(r->image->repo->env, (void **)&r->wants, &r->want_room,
                     r->want_count, sizeof *r->wants, err);
            if (s == GD_OK) {
                r->wants[r->want_count++] = (want){
                    .group = group,
                    .entry = *entry,
                    .slot = extent->slot + i,
                    .from = (uint32_t)(a - start),
                    .length = (uint32_t)(b - a),
                    .out = out + (a - from),
                };
            }
        }
        start = end;
    }
    return s;
}

static gd_status
plan_window(reading *r, uint8_t *out, size_t length, uint64_t offset,
            gd_error *err)
{
    gd_recipe_page page;
    uint32_t at;
    const gd_recipe *recipe = &r->image->recipe;
    gd_status s = gd_recipe_seek(recipe, offset, &page, &at, err);
    while (s == GD_OK && length > 0) {
        if (at == page.count) {
            uint64_t expected = offset;
            s = gd_recipe_read_page(recipe, page.number + 1, &page, err);
            if (s == GD_OK && page.extents[0].offset != expected) {
                s = gd_fail(err, GD_CORRUPT,
                            "%s: the page at offset %llu does not continue "
                            "the one before it", recipe->name,
                            (unsigned long long)page.number * GD_RECIPE_PAGE);
            }
            at = 0;
            continue;
        }
        const gd_extent *extent = &page.extents[at++];
        uint64_t from = offset - extent->offset;
        uint64_t here = extent->length - from;
        if (here > length) {
            here = length;
        }
        if (extent->kind == GD_EXTENT_ZEROS) {
            memset(out, 0, here);
        } else {
            s = plan_blocks(r, extent, from, from + here, out, err);
        }
        out += here;
        offset += here;
        length -= here;
    }
    return s;
}

/* ---- reading in disk order ---- */

static int
disk_order(const void *a, const void *b)
{
    const want *x = a, *y = b;
    if (x->group->number != y->group->number) {
        return x->group->number < y->group->number ? -1 : 1;
    }
    if (x->entry.segment != y->entry.segment) {
        return x->entry.segment < y->entry.segment ? -1 : 1;
    }
    return x->slot < y->slot ? -1 : x->slot > y->slot;
}

static uint64_t
segment_end(const want *w)
{
    return (uint64_t)w->entry.segment + GD_SEGMENT_HEADER +
           w->entry.stored_length;
}

/* How many wants, from the first, fit into one read. */
static size_t
count_neighbours(const want *wants, size_t count)
{
    size_t n = 1;
    uint64_t end = segment_end(wants);
    while (n < count && wants[n].group == wants->group) {
        uint64_t next_end = segment_end(&wants[n]);
        if (wants[n].entry.segment > end + READ_GAP ||
            next_end - wants->entry.segment > READ_ONCE) {
            break;
        }
        end = next_end > end ? next_end : end;
        n++;
    }
    return n;
}

static gd_status
hand_out(reading *r, const want *w, const gd_segment_header *header,
         const uint8_t *plain, gd_error *err)
{
    const gd_entry *entry = &w->entry;
    gd_status s = gd_group_match_segment(w->group, entry, w->slot, header, err);
    if (s != GD_OK) {
        return s;
    }
    const uint8_t *block = plain + entry->plain_offset;
    if (gd_checksum(block, entry->plain_length, 0) != entry->checksum) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: the block of slot %u, in the segment at offset "
                       "%u, is not what its checksum says; %s needs it",
                       w->group->name, w->slot, entry->segment,
                       r->image->recipe.name);
    }
    memcpy(w->out, block + w->from, w->length);
    return GD_OK;
}

/* All wants of one segment; in is its header. */
static gd_status
serve_segment(reading *r, const want *wants, size_t count, const uint8_t *in,
              gd_error *err)
{
    gd_segment_header header;
    const gd_group *group = wants->group;
    uint64_t offset = wants->entry.segment;
    gd_status s = gd_segment_header_decode(in, &header, group->name, offset,
                                           err);
    if (s == GD_OK) {
        /* Before decoding: the lengths are those that were read. */
        s = gd_group_match_segment(group, &wants->entry, wants->slot, &header,
                                   err);
    }
    const uint8_t *plain = in + GD_SEGMENT_HEADER;
    if (s == GD_OK && header.codec != GD_CODEC_NONE) {
        s = gd_segment_decode(r->coder, &header, plain, r->plain, group->name,
                              offset, err);
        plain = r->plain;
    }
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        s = hand_out(r, &wants[i], &header, plain, err);
    }
    return s;
}

static gd_status
serve_neighbours(reading *r, const want *wants, size_t count, gd_error *err)
{
    const gd_group *group = wants->group;
    uint64_t start = wants->entry.segment, end = segment_end(wants);
    for (size_t i = 1; i < count; i++) {
        end = segment_end(&wants[i]) > end ? segment_end(&wants[i]) : end;
    }
    gd_status s = gd_read_full(group->env, group->fd, r->in,
                               (size_t)(end - start), start, group->name, err);
    for (size_t i = 0; s == GD_OK && i < count;) {
        size_t n = 1;
        while (i + n < count &&
               wants[i + n].entry.segment == wants[i].entry.segment) {
            n++;
        }
        s = serve_segment(r, wants + i, n,
                          r->in + (wants[i].entry.segment - start), err);
        i += n;
    }
    return s;
}

static void
read_ahead(const want *wants, size_t count)
{
    for (size_t i = 0; i < count;) {
        size_t n = count_neighbours(wants + i, count - i);
        const gd_group *group = wants[i].group;
        group->env->start_readahead(
            group->env, group->fd, wants[i].entry.segment,
            segment_end(&wants[i + n - 1]) - wants[i].entry.segment);
        i += n;
    }
}

static gd_status
serve_wants(reading *r, gd_error *err)
{
    gd_status s = GD_OK;
    qsort(r->wants, r->want_count, sizeof *r->wants, disk_order);
    read_ahead(r->wants, r->want_count);
    for (size_t i = 0; s == GD_OK && i < r->want_count;) {
        size_t n = count_neighbours(r->wants + i, r->want_count - i);
        s = serve_neighbours(r, r->wants + i, n, err);
        i += n;
    }
    return s;
}

static gd_status
try_window(reading *r, uint8_t *out, size_t length, uint64_t offset,
           gd_error *err)
{
    gd_status s = plan_window(r, out, length, offset, err);
    if (s == GD_OK && r->want_count > 0) {
        s = serve_wants(r, err);
    }
    return_groups(r);
    return s;
}

/* A cached file may have been replaced by the group's rewriting, and lack what
 * was appended since: so what looks like damage is looked at once more, by
 * name. */
static gd_status
read_window(reading *r, uint8_t *out, size_t length, uint64_t offset,
            gd_error *err)
{
    r->fresh = false;
    gd_status s = try_window(r, out, length, offset, err);
    if (s == GD_CORRUPT) {
        r->fresh = true;
        s = try_window(r, out, length, offset, err);
    }
    return s;
}

static gd_status
open_reading(reading *r, gd_image *image, gd_error *err)
{
    const gd_env *env = image->repo->env;
    r->image = image;
    r->entries = gd_calloc(env, GD_EXTENT_BLOCKS, sizeof *r->entries, err);
    r->in = gd_calloc(env, READ_ONCE + GD_SEGMENT_HEADER + GD_SEGMENT_MAX, 1,
                      err);
    r->plain = gd_calloc(env, GD_SEGMENT_MAX, 1, err);
    if (r->entries == NULL || r->in == NULL || r->plain == NULL) {
        return GD_NOMEM;
    }
    return gd_coder_open(env, &r->coder, err);
}

static void
close_reading(reading *r)
{
    const gd_env *env = r->image->repo->env;
    gd_coder_close(env, r->coder);
    env->release(env, r->wants);
    env->release(env, r->groups);
    env->release(env, r->entries);
    env->release(env, r->in);
    env->release(env, r->plain);
}

gd_status
gd_image_read(gd_image *image, uint8_t *out, size_t length, uint64_t offset,
              size_t *done, gd_error *err)
{
    uint64_t size = image->recipe.header.size;
    *done = 0;
    gd_status s = gd_repo_check_owner(image->repo, err);
    if (s != GD_OK || offset >= size || length == 0) {
        return s;
    }
    if (length > size - offset) {
        length = (size_t)(size - offset);
    }
    reading r = {0};
    s = open_reading(&r, image, err);
    while (s == GD_OK && *done < length) {
        size_t here = length - *done < WINDOW ? length - *done : WINDOW;
        s = read_window(&r, out + *done, here, offset + *done, err);
        *done += here;
    }
    close_reading(&r);
    if (s == GD_OK) {
        atomic_fetch_add(&image->repo->counters.bytes_read, length);
    }
    return s;
}
