/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slices.c - see slices.h.
 */
#include "engine/files/slices.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum {
    FETCHES = 3, /* slices may be evicted between fetch and read */
    /* <directory>/<object id>/<slice> */
    NAME = NAME_MAX + 1 + 2 * GD_ID_SIZE + 1 + 8 + 1,
};

typedef struct counters {
    atomic_ullong reads, misses;
} counters;

/* A directory with slices.  It may be removed and made again, so it is not held
 * open. */
typedef struct place {
    int parent;
    char directory[NAME_MAX + 1];
} place;

struct gd_slices {
    const gd_env *env;
    place places[2]; /* on the disk, and in memory */
    size_t place_count;
    gd_slice_source source;
    counters *counters; /* readers only read the rest */
};

static gd_status
open_place(gd_slices *slices, const char *path, gd_error *err)
{
    place *opened = &slices->places[slices->place_count];
    char parent[PATH_MAX];
    const char *slash = strrchr(path, '/');
    const char *name = slash == NULL ? path : slash + 1;
    /* The root is its own parent. */
    size_t length = slash == NULL ? 0 : slash == path ? 1
                                                      : (size_t)(slash - path);
    if (*name == '\0' || strlen(name) > NAME_MAX || length >= PATH_MAX) {
        return gd_fail(err, GD_INVALID, "%s names no directory of slices",
                       path);
    }
    memcpy(parent, path, length);
    parent[length] = '\0';
    memcpy(opened->directory, name, strlen(name) + 1);
    gd_status s = gd_open(slices->env, AT_FDCWD, length > 0 ? parent : ".",
                          O_RDONLY | O_DIRECTORY, 0, &opened->parent, err);
    slices->place_count += s == GD_OK;
    return s;
}

gd_status
gd_slices_open(const gd_env *env, const char *directory, const char *memory,
               const gd_slice_source *source, gd_slices **out, gd_error *err)
{
    struct {
        gd_slices slices; /* first: its address is released */
        counters counters;
    } *made = gd_calloc(env, 1, sizeof *made, err);
    if (made == NULL) {
        return GD_NOMEM;
    }
    gd_slices *slices = &made->slices;
    slices->counters = &made->counters;
    slices->env = env;
    slices->source = *source;
    gd_status s = open_place(slices, directory, err);
    if (s == GD_OK && memory != NULL) {
        s = open_place(slices, memory, err);
    }
    if (s != GD_OK) {
        gd_slices_close(slices);
        return s;
    }
    *out = slices;
    return GD_OK;
}

void
gd_slices_close(gd_slices *slices)
{
    if (slices != NULL) {
        const gd_env *env = slices->env;
        for (size_t i = 0; i < slices->place_count; i++) {
            env->close(env, slices->places[i].parent);
        }
        env->release(env, slices);
    }
}

gd_slice_counts
gd_slices_get_counts(const gd_slices *slices)
{
    return (gd_slice_counts){atomic_load(&slices->counters->reads),
                             atomic_load(&slices->counters->misses)};
}

static void
name_slice(const place *in, const gd_object *object, uint32_t slice,
           char name[NAME])
{
    char id[2 * GD_ID_SIZE + 1];
    for (size_t i = 0; i < GD_ID_SIZE; i++) {
        snprintf(id + 2 * i, 3, "%02x", (unsigned)object->id[i]);
    }
    snprintf(name, NAME, "%s/%s/%08" PRIx32, in->directory, id, slice);
}

static uint64_t
slice_size(const gd_object *object, uint32_t slice)
{
    uint64_t left = object->length - (uint64_t)slice * GD_SLICE;
    return left < GD_SLICE ? left : GD_SLICE;
}

/* GD_NOTFOUND, with a message: there is no such file, or not a whole one.  A
 * crash of the machine may leave a part.  What is there is removed, to be
 * fetched again. */
static gd_status
take_away(const gd_env *env, const place *from, const char *name, gd_error *err)
{
    (void)env->unlinkat(env, from->parent, name);
    return gd_fail(err, GD_NOTFOUND, "the slice %s is not whole", name);
}

/* Returns whether it is the file that fails, and not this machine now. */
static bool
is_bad(gd_status s, const gd_error *err)
{
    return s == GD_CORRUPT ||
           (s == GD_IO &&
            (err->sys_errno == EIO || err->sys_errno == EILSEQ ||
             err->sys_errno == EBADMSG || err->sys_errno == EUCLEAN ||
             err->sys_errno == ENODATA || err->sys_errno == ELOOP ||
             err->sys_errno == ENXIO));
}

static gd_status
read_file(const gd_env *env, const place *in, const gd_object *object,
          uint32_t slice, uint8_t *out, size_t length, uint64_t offset,
          gd_error *err)
{
    char name[NAME];
    struct stat st;
    int fd;
    name_slice(in, object, slice, name);
    gd_status s = gd_open(env, in->parent, name, O_RDONLY, 0, &fd, err);
    if (s != GD_OK) {
        return is_bad(s, err) ? take_away(env, in, name, err) : s;
    }
    int rc = env->fstat(env, fd, &st);
    if (rc < 0) {
        s = gd_fail_errno(err, -rc, "cannot stat the slice %s", name);
    } else if (!S_ISREG(st.st_mode) ||
               (uint64_t)st.st_size != slice_size(object, slice)) {
        s = gd_fail(err, GD_CORRUPT, "the slice %s is not whole", name);
    } else {
        s = gd_read_full(env, fd, out, length, offset, name, err);
    }
    env->close(env, fd);
    return is_bad(s, err) ? take_away(env, in, name, err) : s;
}

/* GD_NOTFOUND: neither on the disk nor in memory. */
static gd_status
read_anywhere(const gd_slices *slices, const gd_object *object, uint32_t slice,
              uint8_t *out, size_t length, uint64_t offset, gd_error *err)
{
    gd_status s = GD_NOTFOUND;
    for (size_t i = 0; s == GD_NOTFOUND && i < slices->place_count; i++) {
        s = read_file(slices->env, &slices->places[i], object, slice, out,
                      length, offset, err);
    }
    return s;
}

/* Reads from one slice, of which `behind` more will be needed. */
static gd_status
read_slice(const gd_slices *slices, const gd_object *object, uint32_t slice,
           uint32_t behind, uint8_t *out, size_t length, uint64_t offset,
           gd_error *err)
{
    gd_status s = GD_NOTFOUND;
    atomic_fetch_add(&slices->counters->reads, 1);
    for (int fetches = 0;; fetches++) {
        s = read_anywhere(slices, object, slice, out, length, offset, err);
        if (s != GD_NOTFOUND || fetches == FETCHES) {
            break;
        }
        if (fetches == 0) {
            atomic_fetch_add(&slices->counters->misses, 1);
        }
        s = slices->source.fetch(slices->source.arg, object, slice, behind + 1,
                                 err);
        if (s != GD_OK) {
            return s;
        }
    }
    return s;
}

/* Errors here come from this host or the object store, not from the block that
 * is to be read.  So none of them is damage. */
static gd_status
say_unavailable(gd_status s, uint32_t slice, const gd_error *why,
                const char *name, gd_error *err)
{
    if (s == GD_NOTFOUND) {
        return gd_fail(err, GD_UNAVAILABLE,
                       "%s: slice %" PRIu32 " of its object is gone as soon as "
                       "it is fetched: the cache is too small, or its disk "
                       "fails", name, slice);
    }
    if (s != GD_OK && err != NULL) {
        *err = *why;
    }
    if (s == GD_IO || s == GD_DENIED) {
        s = gd_fail(err, GD_UNAVAILABLE, "%s: slice %" PRIu32 " of its object "
                    "cannot be read on this host: %s", name, slice, why->text);
    }
    return s;
}

gd_status
gd_slices_read(const gd_slices *slices, const gd_object *object, void *out,
               size_t length, uint64_t offset, const char *name, gd_error *err)
{
    uint8_t *at = out;
    if (offset > object->length || length > object->length - offset) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: its object has %" PRIu64 " bytes, and a segment "
                       "would lie at %" PRIu64, name, object->length, offset);
    }
    while (length > 0) {
        uint32_t slice = (uint32_t)(offset / GD_SLICE);
        uint32_t last = (uint32_t)((offset + length - 1) / GD_SLICE);
        uint64_t from = offset % GD_SLICE;
        size_t here = length < GD_SLICE - from ? length
                                               : (size_t)(GD_SLICE - from);
        gd_error why;
        GD_TRY(say_unavailable(
            read_slice(slices, object, slice, last - slice, at, here, from,
                       &why), slice, &why, name, err));
        at += here;
        offset += here;
        length -= here;
    }
    return GD_OK;
}

static bool
is_there(const gd_slices *slices, const gd_object *object, uint32_t slice)
{
    bool found = false;
    for (size_t i = 0; !found && i < slices->place_count; i++) {
        char name[NAME];
        struct stat st;
        name_slice(&slices->places[i], object, slice, name);
        found = slices->env->fstatat(slices->env, slices->places[i].parent,
                                     name, &st) == 0;
    }
    return found;
}

void
gd_slices_expect(const gd_slices *slices, const gd_object *object,
                 uint64_t offset, uint64_t length)
{
    if (length == 0 || offset >= object->length) {
        return;
    }
    uint64_t left = object->length - offset;
    uint64_t last = offset + (length < left ? length : left) - 1;
    uint32_t slice = (uint32_t)(offset / GD_SLICE);
    uint32_t end = (uint32_t)(last / GD_SLICE) + 1;
    while (slice < end) {
        uint32_t first = slice;
        while (slice < end && !is_there(slices, object, slice)) {
            slice++;
        }
        if (slice > first) {
            slices->source.expect(slices->source.arg, object, first,
                                  slice - first);
        }
        slice++;
    }
}

void
gd_slices_forget(const gd_slices *slices, const gd_object *object,
                 uint64_t offset, uint64_t length)
{
    for (uint64_t slice = offset / GD_SLICE;
         length > 0 && slice <= (offset + length - 1) / GD_SLICE; slice++) {
        for (size_t i = 0; i < slices->place_count; i++) {
            const place *from = &slices->places[i];
            char name[NAME];
            name_slice(from, object, (uint32_t)slice, name);
            (void)slices->env->unlinkat(slices->env, from->parent, name);
        }
    }
}
