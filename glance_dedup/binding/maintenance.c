/* SPDX-License-Identifier: Apache-2.0 */
/*
 * maintenance.c - glance_dedup._engine.Maintenance: the maintainer's lock, the
 * fence, intents, and the listings.
 *
 * See part.c, which orders its calls, for lifetimes and threads.  It holds the
 * maintainer lock until it is closed.
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/base/coding.h"
#include "engine/files/fence.h"
#include "engine/files/spool.h"
#include "engine/files/spoolentry.h"
#include "engine/maintain/usage.h"

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
        gd_image_unlock(self->owner->repo->env, self->image_lock_fd);
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
maintenance_close(PyObject *object, PyObject *unused)
{
    (void)unused;
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

static PyObject *
maintenance_lock(PyObject *object, PyObject *unused)
{
    (void)unused;
    maintenance_object *self = (maintenance_object *)object;
    gd_error err;
    gd_status s = GD_OK;
    if (!gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    gd_repo *repo = self->owner->repo;
    if (self->lock_fd < 0) {
        Py_BEGIN_ALLOW_THREADS
        s = gd_maintainer_lock(repo->env, repo->root, &self->lock_fd, &err);
        Py_END_ALLOW_THREADS
    }
    gd_py_leave_maintenance(self);
    return gd_py_not_busy(object, s, &err);
}

/* ---- the locks of images ---- */

static PyObject *
maintenance_lock_image(PyObject *object, PyObject *args)
{
    maintenance_object *self = (maintenance_object *)object;
    const char *image_id;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "s", &image_id) ||
        !gd_py_enter_maintenance(self, 1)) {
        return NULL;
    }
    gd_repo *repo = self->owner->repo;
    if (self->image_lock_fd >= 0) {
        s = gd_fail(&err, GD_INVALID, "another image is locked already");
    } else {
        Py_BEGIN_ALLOW_THREADS
        s = gd_image_lock(repo->env, repo->root, image_id, 0,
                          &self->image_lock_fd, &err);
        Py_END_ALLOW_THREADS
    }
    gd_py_leave_maintenance(self);
    return gd_py_not_busy(object, s, &err);
}

static PyObject *
maintenance_unlock_image(PyObject *object, PyObject *unused)
{
    (void)unused;
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
    maintenance_object *self = (maintenance_object *)object;
    const char *image_id;
    bool read;
    if (!PyArg_ParseTuple(args, "s", &image_id) ||
        !gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    gd_repo *repo = self->owner->repo;
    Py_BEGIN_ALLOW_THREADS
    read = gd_spool_is_read(repo->env, repo->root, image_id);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    return PyBool_FromLong(read);
}

/* ---- the fence, and directories ---- */

enum { FENCE_SIZE = GD_ID_SIZE + 8 };

static PyObject *
maintenance_read_fence(PyObject *object, PyObject *unused)
{
    (void)unused;
    maintenance_object *self = (maintenance_object *)object;
    gd_fence fence;
    bool found;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    gd_repo *repo = self->owner->repo;
    Py_BEGIN_ALLOW_THREADS
    s = gd_fence_read(repo->env, repo->root, &fence, &found, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
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
    maintenance_object *self = (maintenance_object *)object;
    const char *payload;
    Py_ssize_t length;
    gd_fence fence;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "y#", &payload, &length)) {
        return NULL;
    }
    if (length != FENCE_SIZE) {
        return PyErr_Format(PyExc_ValueError,
                            "the fence's record: %d bytes are needed",
                            (int)FENCE_SIZE);
    }
    if (!gd_py_enter_maintenance(self, 1)) {
        return NULL;
    }
    memcpy(fence.catalog_id, payload, GD_ID_SIZE);
    fence.sequence = gd_get64((const uint8_t *)payload + GD_ID_SIZE);
    gd_repo *repo = self->owner->repo;
    Py_BEGIN_ALLOW_THREADS
    s = gd_fence_write(repo->env, repo->root, &fence, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    return gd_py_none(object, s, &err);
}

static PyObject *
maintenance_sync(PyObject *object, PyObject *args)
{
    static const char *const directories[] = {
        GD_DIR_IMAGES, GD_DIR_SPOOL, GD_DIR_GROUPS, GD_DIR_QUARANTINE};
    maintenance_object *self = (maintenance_object *)object;
    const char *name, *directory = NULL;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "s", &name)) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof directories / sizeof directories[0]; i++) {
        if (strcmp(name, directories[i]) == 0) {
            directory = directories[i];
        }
    }
    if (directory == NULL) {
        gd_fail(&err, GD_INVALID, "no directory of a repository is called "
                                  "'%.40s'", name);
        return gd_py_raise(object, &err);
    }
    if (!gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    gd_repo *repo = self->owner->repo;
    Py_BEGIN_ALLOW_THREADS
    s = gd_sync_dir(repo->env, repo->root, directory, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    return gd_py_none(object, s, &err);
}

/* ---- the listings ---- */

static PyObject *
maintenance_spool(PyObject *object, PyObject *unused)
{
    (void)unused;
    maintenance_object *self = (maintenance_object *)object;
    gd_spool_base *entries = NULL;
    size_t count = 0;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    gd_repo *repo = self->owner->repo;
    Py_BEGIN_ALLOW_THREADS
    s = gd_spool_entry_list(repo->env, repo->root, &entries, &count, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *item = PyUnicode_FromString(entries[i].name);
        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) {
            Py_CLEAR(list);
        }
    }
    repo->env->release(repo->env, entries);
    return list;
}

static PyObject *
maintenance_groups(PyObject *object, PyObject *unused)
{
    (void)unused;
    maintenance_object *self = (maintenance_object *)object;
    uint32_t *numbers = NULL;
    size_t count = 0;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    gd_repo *repo = self->owner->repo;
    Py_BEGIN_ALLOW_THREADS
    s = gd_repo_list_groups(repo, &numbers, &count, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *item = PyLong_FromUnsignedLong(numbers[i]);
        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) {
            Py_CLEAR(list);
        }
    }
    repo->env->release(repo->env, numbers);
    return list;
}

static gd_status
read_facts(gd_repo *repo, uint32_t number, uint32_t *slots, gd_scope *scope,
           gd_published *record, struct stat *st, gd_error *err)
{
    gd_group *group;
    gd_status s = gd_group_open(repo->env, repo->root, &repo->params, number,
                                O_RDONLY, &group, err);
    if (s != GD_OK) {
        return s;
    }
    *slots = group->bounds.slots;
    *scope = group->scope;
    s = gd_group_read_published(group, record, err);
    if (s == GD_OK) {
        int rc = repo->env->fstat(repo->env, group->fd, st);
        s = rc < 0 ? gd_fail_errno(err, -rc, "cannot stat %s", group->name)
                   : GD_OK;
    }
    gd_group_close(group);
    return s;
}

static PyObject *
maintenance_group_facts(PyObject *object, PyObject *args)
{
    maintenance_object *self = (maintenance_object *)object;
    uint32_t number;
    uint32_t slots = 0;
    gd_scope scope;
    gd_published record;
    struct stat st;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "O&", gd_py_to_u32, &number) ||
        !gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    gd_repo *repo = self->owner->repo;
    Py_BEGIN_ALLOW_THREADS
    s = read_facts(repo, number, &slots, &scope, &record, &st, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    return Py_BuildValue(
        "{sIsy#sIsKsIsKsKsBsBsKsK}", "slots", slots, "scope", scope.id,
        (Py_ssize_t)GD_SCOPE_SIZE, "published", record.count,
        "generation", (unsigned long long)record.generation, "flags",
        record.flags, "sequence", (unsigned long long)record.sequence, "end",
        (unsigned long long)record.end, "codec", record.codec, "level",
        record.level, "size",
        (unsigned long long)st.st_size, "allocated",
        (unsigned long long)st.st_blocks * 512);
}

static gd_status
read_space(gd_repo *repo, uint32_t number, gd_usage *used,
           uint64_t *store, struct stat *st, gd_error *err)
{
    gd_group *group;
    gd_status s = gd_group_open(repo->env, repo->root, &repo->params, number,
                                O_RDONLY, &group, err);
    if (s != GD_OK) {
        return s;
    }
    *store = gd_data_start(group->bounds.slots);
    s = gd_usage_add_group(group, used, err);
    if (s == GD_OK) {
        int rc = repo->env->fstat(repo->env, group->fd, st);
        s = rc < 0 ? gd_fail_errno(err, -rc, "cannot stat %s", group->name)
                   : GD_OK;
    }
    gd_group_close(group);
    return s;
}

static PyObject *
maintenance_group_space(PyObject *object, PyObject *args)
{
    maintenance_object *self = (maintenance_object *)object;
    uint32_t number;
    gd_usage used = {.segments = 0};
    uint64_t store = 0;
    struct stat st;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "O&", gd_py_to_u32, &number) ||
        !gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    gd_repo *repo = self->owner->repo;
    Py_BEGIN_ALLOW_THREADS
    s = read_space(repo, number, &used, &store, &st, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    unsigned long long plain[GD_CODECS], stored[GD_CODECS];
    for (int i = 0; i < GD_CODECS; i++) {
        plain[i] = used.plain[i];
        stored[i] = used.stored[i];
    }
    return Py_BuildValue(
        "{s(KKK)s(KKK)sKsKsK}", "plain", plain[0], plain[1], plain[2],
        "stored", stored[0], stored[1], stored[2], "segments",
        (unsigned long long)used.segments, "store", (unsigned long long)store,
        "allocated", (unsigned long long)st.st_blocks * 512);
}

enum { ENTRY_SIZE = 48 }; /* bytes that `entries` returns for a slot */

static void
pack_entry(const gd_entry *entry, uint8_t out[ENTRY_SIZE])
{
    memcpy(out, entry->fingerprint.bytes, GD_FINGERPRINT_SIZE);
    gd_put32(out + 32, entry->segment);
    gd_put32(out + 36, entry->plain_length);
    gd_put32(out + 40, entry->stored_length);
    gd_put32(out + 44, entry->state);
}

static gd_status
read_entries(gd_repo *repo, uint32_t number, uint32_t first, uint32_t count,
             gd_entry *entries, gd_error *err)
{
    gd_group *group;
    gd_status s = gd_group_open(repo->env, repo->root, &repo->params, number,
                                O_RDONLY, &group, err);
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
    maintenance_object *self = (maintenance_object *)object;
    uint32_t number, first, count;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "O&O&O&", gd_py_to_u32, &number, gd_py_to_u32,
                          &first, gd_py_to_u32, &count)) {
        return NULL;
    }
    if (count > GD_MAX_SLOTS) {
        gd_fail(&err, GD_INVALID, "no group has %u slots", count);
        return gd_py_raise(object, &err);
    }
    PyObject *result =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count * ENTRY_SIZE);
    if (result == NULL || !gd_py_enter_maintenance(self, 0)) {
        Py_XDECREF(result);
        return NULL;
    }
    /* Nobody else has seen the bytes object yet. */
    uint8_t *out = (uint8_t *)PyBytes_AsString(result);
    gd_repo *repo = self->owner->repo;
    Py_BEGIN_ALLOW_THREADS
    gd_entry *entries = gd_calloc(repo->env, count, sizeof *entries, &err);
    s = entries == NULL
            ? GD_NOMEM
            : read_entries(repo, number, first, count, entries, &err);
    for (uint32_t i = 0; s == GD_OK && i < count; i++) {
        pack_entry(&entries[i], out + (size_t)i * ENTRY_SIZE);
    }
    repo->env->release(repo->env, entries);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        Py_DECREF(result);
        return gd_py_raise(object, &err);
    }
    return result;
}

/* ---- intents ---- */

static PyObject *
maintenance_announce(PyObject *object, PyObject *args)
{
    maintenance_object *self = (maintenance_object *)object;
    uint32_t number;
    gd_error err;
    gd_status s;
    if (!gd_py_parse_group(object, args, &number) ||
        !gd_py_enter_maintenance(self, 1)) {
        return NULL;
    }
    gd_repo *repo = self->owner->repo;
    Py_BEGIN_ALLOW_THREADS
    s = gd_locks_announce(repo->locks, number, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    return gd_py_not_busy(object, s, &err);
}

static PyObject *
maintenance_withdraw(PyObject *object, PyObject *args)
{
    maintenance_object *self = (maintenance_object *)object;
    uint32_t number;
    if (!PyArg_ParseTuple(args, "O&", gd_py_to_u32, &number) ||
        !gd_py_enter_maintenance(self, 1)) {
        return NULL;
    }
    gd_repo *repo = self->owner->repo;
    Py_BEGIN_ALLOW_THREADS
    gd_locks_withdraw(repo->locks, number);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    Py_RETURN_NONE;
}

/* ---- the type ---- */

static PyMethodDef maintenance_methods[] = {
    {"lock", maintenance_lock, METH_NOARGS, NULL},
    {"close", maintenance_close, METH_NOARGS, NULL},
    {"lock_image", maintenance_lock_image, METH_VARARGS, NULL},
    {"unlock_image", maintenance_unlock_image, METH_NOARGS, NULL},
    {"is_read", maintenance_is_read, METH_VARARGS, NULL},
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
    {NULL, NULL, 0, NULL},
};

static PyType_Slot maintenance_slots[] = {
    {Py_tp_new, maintenance_new},
    {Py_tp_dealloc, maintenance_dealloc},
    {Py_tp_methods, maintenance_methods},
    {0, NULL},
};

PyType_Spec gd_py_maintenance_spec = {
    .name = "glance_dedup._engine.Maintenance",
    .basicsize = sizeof(maintenance_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = maintenance_slots,
};
