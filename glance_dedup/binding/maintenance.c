/* SPDX-License-Identifier: Apache-2.0 */
/*
 * maintenance.c - glance_dedup._engine.Maintenance: the maintainer's lock, the
 * fence, intents, and the listings.
 *
 * See part.c, which orders its calls, for lifetimes and threads.  It holds the
 * maintainer lock until it is closed.  Without that lock it can list, announce
 * an intent, and rewrite groups (I4).
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/base/coding.h"
#include "engine/files/fence.h"
#include "engine/files/secondname.h"
#include "engine/files/spool.h"
#include "engine/files/spoolfile.h"
#include "engine/format/index.h"
#include "engine/maintenance/group_stats.h"

static PyObject *
maintenance_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"repository", NULL};
    const module_state *state = PyType_GetModuleState(type);
    PyObject *owner;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!", names,
                                     state->repository_type, &owner) ||
        !gd_py_enter_repository((repository_object *)owner)) {
        return NULL;
    }
    maintenance_object *self = gd_py_new_object(type);
    if (self == NULL) {
        gd_py_leave_repository((repository_object *)owner);
        return NULL;
    }
    Py_INCREF(owner);
    self->owner = (repository_object *)owner;
    self->lock_fd = self->image_lock_fd = -1;
    return (PyObject *)self;
}

static void
unlock_image(maintenance_object *self)
{
    if (self->image_lock_fd >= 0) {
        gd_locks_unlock_image(self->owner->repo->env, self->image_lock_fd);
        self->image_lock_fd = -1;
    }
}

/* REQUIRES: not closed, of this process, not busy. */
static void
close_maintenance(maintenance_object *self)
{
    gd_repo *repo = self->owner->repo;
    while (self->parts != NULL) {
        /* The part's last user may be gone before it is closed. */
        PyObject *part = (PyObject *)self->parts;
        Py_INCREF(part);
        gd_py_close_part(self->parts);
        Py_DECREF(part);
    }
    self->closed = 1;
    unlock_image(self);
    if (self->lock_fd >= 0) {
        gd_locks_withdraw_all(repo->locks);
        repo->env->close(repo->env, self->lock_fd); /* last: I4 */
        self->lock_fd = -1;
    }
    gd_py_leave_repository(self->owner);
}

static PyObject *
maintenance_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    maintenance_object *self = (maintenance_object *)object;
    if (!self->closed && gd_py_is_owner(self->owner)) {
        if (!gd_py_enter_maintenance(self, 0)) {
            return NULL;
        }
        close_maintenance(self);
        gd_py_leave_maintenance(self);
    }
    Py_RETURN_NONE;
}

static void
maintenance_dealloc(PyObject *object)
{
    maintenance_object *self = (maintenance_object *)object;
    if (self->owner != NULL) {
        if (!self->closed && gd_py_is_owner(self->owner)) {
            close_maintenance(self);
        }
        Py_DECREF((PyObject *)self->owner);
    }
    gd_py_free_object(object);
}

static gd_repo *
repo_of(PyObject *object)
{
    return ((maintenance_object *)object)->owner->repo;
}

static PyObject *
maintenance_lock(PyObject *object, PyObject *Py_UNUSED(unused))
{
    maintenance_object *self = (maintenance_object *)object;
    gd_repo *repo = repo_of(object);
    gd_py_call call;
    gd_status s = GD_OK;
    if (!gd_py_call_maintenance(object, 0, &call)) {
        return NULL;
    }
    if (self->lock_fd < 0) {
        s = gd_locks_lock_maintainer(repo->env, repo->root, &self->lock_fd,
                                     &call.err);
        if (s == GD_OK) {
            s = gd_second_name_finish_images(repo->env, repo->root,
                                             &repo->params,
                                             &call.err);
        }
        if (s != GD_OK && self->lock_fd >= 0) {
            /* A later call must settle the names before it returns true. */
            repo->env->close(repo->env, self->lock_fd);
            self->lock_fd = -1;
        }
    } else {
        s = gd_locks_revalidate_maintainer(repo->env, self->lock_fd,
                                           &call.err);
    }
    return gd_py_end_not_busy(&call, s);
}

/* ---- the locks of images ---- */

static PyObject *
maintenance_lock_image(PyObject *object, PyObject *args)
{
    maintenance_object *self = (maintenance_object *)object;
    gd_repo *repo = repo_of(object);
    const char *image_id;
    gd_py_call call;
    gd_status s;
    if (!PyArg_ParseTuple(args, "s", &image_id) ||
        !gd_py_call_maintenance(object, 1, &call)) {
        return NULL;
    }
    if (self->image_lock_fd >= 0) {
        s = gd_fail(&call.err, GD_INVALID, "another image is locked already");
    } else {
        s = gd_locks_lock_image(repo->env, repo->root, image_id, 0,
                                &self->image_lock_fd, &call.err);
    }
    return gd_py_end_not_busy(&call, s);
}

static PyObject *
maintenance_unlock_image(PyObject *object, PyObject *Py_UNUSED(unused))
{
    maintenance_object *self = (maintenance_object *)object;
    if (!gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    unlock_image(self);
    gd_py_leave_maintenance(self);
    Py_RETURN_NONE;
}

static PyObject *
maintenance_is_read(PyObject *object, PyObject *args)
{
    gd_repo *repo = repo_of(object);
    const char *image_id;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "s", &image_id) ||
        !gd_py_call_maintenance(object, 0, &call)) {
        return NULL;
    }
    bool read = gd_spool_is_read(repo->env, repo->root, image_id);
    return gd_py_end_bool(&call, GD_OK, read);
}

/* An image's file, as the catalog has it: inode, time of writing, and behind
 * them its transaction id. */
enum { FILE_INODE = 0, FILE_MODIFIED = 8, FILE_SIZE = 32 };

typedef struct known_file {
    const char *image_id; /* of objects that the caller keeps */
    const uint8_t *file;
    bool same;
} known_file;

/* Parses a pair of bytes objects.  Returns 0 with an exception set on error. */
static int
parse_known(PyObject *pair, known_file *known)
{
    PyObject *image_id, *file;
    if (!PyTuple_Check(pair)) {
        PyErr_SetString(PyExc_TypeError, "an image's id and file are needed");
        return 0;
    }
    if (!PyArg_ParseTuple(pair, "SS", &image_id, &file)) {
        return 0;
    }
    if (PyBytes_Size(file) != FILE_SIZE) {
        PyErr_Format(PyExc_ValueError, "an image's file has %d bytes",
                     (int)FILE_SIZE);
        return 0;
    }
    known->image_id = PyBytes_AsString(image_id);
    known->file = (const uint8_t *)PyBytes_AsString(file);
    return 1;
}

static PyObject *
maintenance_are_same(PyObject *object, PyObject *args)
{
    gd_repo *repo = repo_of(object);
    PyObject *pairs;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &pairs)) {
        return NULL;
    }
    Py_ssize_t count = PyTuple_Size(pairs);
    known_file *files = PyMem_Calloc((size_t)count + 1, sizeof *files);
    if (files == NULL) {
        return PyErr_NoMemory();
    }
    int ok = 1;
    for (Py_ssize_t i = 0; ok && i < count; i++) {
        ok = parse_known(PyTuple_GetItem(pairs, i), &files[i]);
    }
    if (!ok || !gd_py_call_maintenance(object, 0, &call)) {
        PyMem_Free(files);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        files[i].same = gd_spool_file_is_same(
            repo->env, repo->root, files[i].image_id,
            gd_get64(files[i].file + FILE_INODE),
            gd_get64(files[i].file + FILE_MODIFIED));
    }
    (void)gd_py_end(&call, GD_OK);
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        gd_py_set_item(&list, (size_t)i, PyBool_FromLong(files[i].same));
    }
    PyMem_Free(files);
    return list;
}

/* ---- the fence, and directories ---- */

enum { FENCE_SIZE = GD_ID_SIZE + 8 };

static PyObject *
maintenance_read_fence(PyObject *object, PyObject *Py_UNUSED(unused))
{
    gd_repo *repo = repo_of(object);
    gd_fence fence;
    bool found;
    gd_py_call call;
    if (!gd_py_call_maintenance(object, 0, &call) ||
        !gd_py_end(&call, gd_fence_read(repo->env, repo->root, &fence, &found,
                                        &call.err))) {
        return NULL;
    }
    if (!found) {
        Py_RETURN_NONE;
    }
    uint8_t payload[FENCE_SIZE];
    memcpy(payload, fence.catalog_id, GD_ID_SIZE);
    gd_put64(payload + GD_ID_SIZE, fence.sequence);
    return PyBytes_FromStringAndSize((const char *)payload, FENCE_SIZE);
}

static PyObject *
maintenance_write_fence(PyObject *object, PyObject *args)
{
    gd_repo *repo = repo_of(object);
    const char *payload;
    Py_ssize_t length;
    gd_fence fence;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "y#", &payload, &length)) {
        return NULL;
    }
    if (length != FENCE_SIZE) {
        return PyErr_Format(PyExc_ValueError,
                            "the fence's record: %d bytes are needed",
                            (int)FENCE_SIZE);
    }
    memcpy(fence.catalog_id, payload, GD_ID_SIZE);
    fence.sequence = gd_get64((const uint8_t *)payload + GD_ID_SIZE);
    if (!gd_py_call_maintenance(object, 1, &call)) {
        return NULL;
    }
    return gd_py_end_none(
        &call, gd_fence_write(repo->env, repo->root, &fence, &call.err));
}

static PyObject *
maintenance_sync(PyObject *object, PyObject *args)
{
    static const char *const directories[] = {
        GD_DIR_IMAGES, GD_DIR_SPOOL, GD_DIR_GROUPS, GD_DIR_QUARANTINE};
    gd_repo *repo = repo_of(object);
    const char *name, *directory = NULL;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "s", &name)) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof directories / sizeof directories[0]; i++) {
        if (strcmp(name, directories[i]) == 0) {
            directory = directories[i];
        }
    }
    if (directory == NULL) {
        gd_fail(&call.err, GD_INVALID,
                "no directory of a repository is called '%.40s'", name);
        return gd_py_raise(object, &call.err);
    }
    if (!gd_py_call_maintenance(object, 0, &call)) {
        return NULL;
    }
    return gd_py_end_none(
        &call, gd_sync_dir(repo->env, repo->root, directory, &call.err));
}

/* ---- the listings ---- */

static PyObject *
maintenance_spool(PyObject *object, PyObject *Py_UNUSED(unused))
{
    gd_repo *repo = repo_of(object);
    gd_spool_base *entries = NULL;
    size_t count = 0;
    gd_py_call call;
    if (!gd_py_call_maintenance(object, 0, &call) ||
        !gd_py_end(&call, gd_spool_file_list(repo->env, repo->root, &entries,
                                             &count, &call.err))) {
       return NULL;
   }
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        gd_py_set_item(&list, i, PyUnicode_FromString(entries[i].name));
    }
    repo->env->release(repo->env, entries);
    return list;
}

static PyObject *
maintenance_groups(PyObject *object, PyObject *Py_UNUSED(unused))
{
    gd_repo *repo = repo_of(object);
    uint32_t *numbers = NULL;
    size_t count = 0;
    gd_py_call call;
    if (!gd_py_call_maintenance(object, 0, &call) ||
        !gd_py_end(&call, gd_group_numbers(repo->env, repo->root, &numbers,
                                           &count, &call.err))) {
        return NULL;
    }
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        gd_py_set_item(&list, i, PyLong_FromUnsignedLong(numbers[i]));
    }
    repo->env->release(repo->env, numbers);
    return list;
}

/* Opens a group to read it; gd_group_close closes it. */
static gd_status
open_group(gd_repo *repo, uint32_t number, gd_group **group, gd_error *err)
{
    return gd_group_open(repo->env, repo->root, &repo->params, number, O_RDONLY,
                         group, err);
}

typedef struct group_facts {
    uint32_t slots;
    bool has_lists, is_cold;
    gd_object object; /* of a cold group */
    gd_scope scope;
    gd_published record; /* this one or the next, as asked */
    gd_usage used;
    struct stat st;
} group_facts;

static gd_status
read_facts(gd_repo *repo, uint32_t number, bool usage, group_facts *facts,
           gd_error *err)
{
    gd_group *group;
    gd_status s = open_group(repo, number, &group, err);
    if (s != GD_OK) {
        return s;
    }
    *facts = (group_facts){.slots = group->bounds.slots,
                           .has_lists = group->bounds.has_lists,
                           .is_cold = group->is_cold,
                           .object = group->object,
                           .scope = group->scope};
    s = usage ? gd_group_stats_add_usage(group, &facts->used, err)
              : gd_group_read_published(group, &facts->record, err);
    if (s == GD_OK) {
        s = gd_group_stat(group, &facts->st, err);
    }
    gd_group_close(group);
    return s;
}

/* Parses (group number), and reads its facts.  Returns 0 with an exception set
 * on error. */
static int
find_facts(PyObject *object, PyObject *args, bool usage, group_facts *facts)
{
    uint32_t number;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "O&", gd_py_to_u32, &number) ||
        !gd_py_call_maintenance(object, 0, &call)) {
        return 0;
    }
    return gd_py_end(&call, read_facts(repo_of(object), number, usage, facts,
                                       &call.err));
}

static PyObject *
maintenance_group_facts(PyObject *object, PyObject *args)
{
    group_facts facts;
    if (!find_facts(object, args, false, &facts)) {
        return NULL;
    }
    const gd_published *record = &facts.record;
    return Py_BuildValue(
        "{sIsNsNsy#sy#sIsKsIsKsKsBsBsNsIsKsKsL}", "slots", facts.slots,
        "has_lists", PyBool_FromLong(facts.has_lists), "is_cold",
        PyBool_FromLong(facts.is_cold), "object", facts.object.id,
        (Py_ssize_t)GD_ID_SIZE, "scope",
        facts.scope.id, (Py_ssize_t)GD_SCOPE_SIZE, "published", record->count,
        "generation", (unsigned long long)record->generation, "flags",
        record->flags, "sequence", (unsigned long long)record->sequence, "end",
        (unsigned long long)record->end, "codec", record->codec, "level",
        record->level, "similar", PyBool_FromLong(record->similar), "covered",
        record->covered, "size", (unsigned long long)facts.st.st_size,
        "allocated", (unsigned long long)facts.st.st_blocks * 512, "modified",
        (long long)facts.st.st_mtime);
}

static PyObject *
maintenance_group_space(PyObject *object, PyObject *args)
{
    group_facts facts;
    if (!find_facts(object, args, true, &facts)) {
        return NULL;
    }
    unsigned long long plain[GD_CODECS], stored[GD_CODECS];
    for (int i = 0; i < GD_CODECS; i++) {
        plain[i] = facts.used.plain[i];
        stored[i] = facts.used.stored[i];
    }
    return Py_BuildValue(
        "{sNs(KKK)s(KKK)sKsKsK}", "is_cold",
        PyBool_FromLong(facts.is_cold), "plain", plain[0], plain[1], plain[2],
        "stored", stored[0], stored[1], stored[2], "segments",
        (unsigned long long)facts.used.segments, "store",
        (unsigned long long)gd_fptable_data_start(facts.slots), "allocated",
        (unsigned long long)facts.st.st_blocks * 512);
}

enum { ENTRY_SIZE = 48 }; /* bytes that `entries` returns for a slot */

static void
pack_entry(const gd_entry *entry, uint8_t out[ENTRY_SIZE])
{
    memcpy(out, entry->fingerprint.bytes, GD_FINGERPRINT_SIZE);
    gd_put32(out + 32, entry->segment);
    gd_put32(out + 36, entry->plain_length);
    gd_put32(out + 40, entry->stored_length);
    gd_put32(out + GD_LISTED_STATE, entry->state);
    out[GD_LISTED_NODEDUP] = entry->nodedup;
}

static gd_status
read_entries(gd_repo *repo, uint32_t number, uint32_t first, uint32_t count,
             gd_entry *entries, gd_error *err)
{
    gd_group *group;
    gd_status s = open_group(repo, number, &group, err);
    if (s != GD_OK) {
        return s;
    }
    if (first > group->bounds.slots || count > group->bounds.slots - first) {
        s = gd_fail(err, GD_INVALID,
                    "%s has %u slots; %u from slot %u on were asked for",
                    group->name, group->bounds.slots, count, first);
    } else {
        s = gd_group_read_entries(group, first, count, entries, err);
    }
    gd_group_close(group);
    return s;
}

static PyObject *
maintenance_entries(PyObject *object, PyObject *args)
{
    gd_repo *repo = repo_of(object);
    uint32_t number, first, count;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "O&O&O&", gd_py_to_u32, &number, gd_py_to_u32,
                          &first, gd_py_to_u32, &count)) {
        return NULL;
    }
    if (count > GD_MAX_SLOTS) {
        gd_fail(&call.err, GD_INVALID, "no group has %u slots", count);
        return gd_py_raise(object, &call.err);
    }
    uint8_t *out;
    PyObject *result = gd_py_new_bytes((size_t)count * ENTRY_SIZE, &out);
    if (result == NULL || !gd_py_call_maintenance(object, 0, &call)) {
        Py_XDECREF(result);
        return NULL;
    }
    gd_entry *entries =
        gd_calloc(repo->env, count, sizeof *entries, &call.err);
    gd_status s =
        entries == NULL
            ? GD_NOMEM
            : read_entries(repo, number, first, count, entries, &call.err);
    for (uint32_t i = 0; s == GD_OK && i < count; i++) {
        pack_entry(&entries[i], out + (size_t)i * ENTRY_SIZE);
    }
    repo->env->release(repo->env, entries);
    if (!gd_py_end(&call, s)) {
        Py_CLEAR(result);
    }
    return result;
}

/* ---- intents ---- */

static PyObject *
maintenance_announce(PyObject *object, PyObject *args)
{
    uint32_t number;
    gd_py_call call;
    if (!gd_py_parse_group(object, args, &number) ||
        !gd_py_call_maintenance(object, 0, &call)) {
        return NULL;
    }
    return gd_py_end_not_busy(
        &call, gd_locks_announce(repo_of(object)->locks, number, &call.err));
}

static PyObject *
maintenance_withdraw(PyObject *object, PyObject *args)
{
    uint32_t number;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "O&", gd_py_to_u32, &number) ||
        !gd_py_call_maintenance(object, 0, &call)) {
        return NULL;
    }
    gd_locks_withdraw(repo_of(object)->locks, number);
    return gd_py_end_none(&call, GD_OK);
}

/* ---- the type ---- */

static PyMethodDef maintenance_methods[] = {
    {"lock", maintenance_lock, METH_NOARGS, NULL},
    {"close", maintenance_close, METH_NOARGS, NULL},
    {"lock_image", maintenance_lock_image, METH_VARARGS, NULL},
    {"unlock_image", maintenance_unlock_image, METH_NOARGS, NULL},
    {"is_read", maintenance_is_read, METH_VARARGS, NULL},
    {"are_same", maintenance_are_same, METH_VARARGS, NULL},
    {"read_fence", maintenance_read_fence, METH_NOARGS, NULL},
    {"write_fence", maintenance_write_fence, METH_VARARGS, NULL},
    {"sync", maintenance_sync, METH_VARARGS, NULL},
    {"spool", maintenance_spool, METH_NOARGS, NULL},
    {"open_entry", gd_py_open_entry, METH_VARARGS, NULL},
    {"open_recipe", gd_py_open_recipe, METH_VARARGS, NULL},
    {"groups", maintenance_groups, METH_NOARGS, NULL},
    {"group_facts", maintenance_group_facts, METH_VARARGS, NULL},
    {"group_space", maintenance_group_space, METH_VARARGS, NULL},
    {"entries", maintenance_entries, METH_VARARGS, NULL},
    {"announce", maintenance_announce, METH_VARARGS, NULL},
    {"withdraw", maintenance_withdraw, METH_VARARGS, NULL},
    {"enter_group", gd_py_enter_group, METH_VARARGS, NULL},
    {"begin_rewriting", gd_py_begin_rewriting, METH_VARARGS, NULL},
    {"begin_cooling", gd_py_begin_cooling, METH_VARARGS, NULL},
    {"note_codec", gd_py_note_codec, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const gd_py_type gd_py_maintenance_type = {
    .name = "glance_dedup._engine.Maintenance",
    .size = sizeof(maintenance_object),
    .make = maintenance_new,
    .dealloc = maintenance_dealloc,
    .methods = maintenance_methods,
};
