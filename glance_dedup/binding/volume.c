/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volume.c - glance_dedup._engine.Volume: a volume that this process owns; and
 * what a Repository does with volumes by their names.
 *
 * Lifetimes: a Volume keeps its Repository alive, and the handle open until it
 * is closed.  Threads: any number at once; close takes effect when the last
 * call is done.  In a forked child it refuses, and leaves the volume and its
 * lock to the parent.
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/volume/volume.h"

enum { MOST_EXTENTS = 1024 }; /* that one call returns */

typedef struct volume_object {
    PyObject_HEAD
    repository_object *owner; /* entered while volume is set */
    gd_volume *volume;
    Py_ssize_t users; /* calls in progress */
    int closed;
} volume_object;

/* ---- results ---- */

static const char *
state_name(gd_volume_state state)
{
    return state == GD_VOLUME_READY    ? "ready"
           : state == GD_VOLUME_MAKING ? "making"
                                       : "deleting";
}

static PyObject *
counters_dict(const gd_volume_counters *c)
{
    return Py_BuildValue(
        "{sKsKsKsKsKsKsKsKsK}", "read", (unsigned long long)c->read, "written",
        (unsigned long long)c->written, "zeroed",
        (unsigned long long)c->zeroed, "flushes",
        (unsigned long long)c->flushes, "checkpoints",
        (unsigned long long)c->checkpoints, "unique",
        (unsigned long long)c->unique, "duplicate",
        (unsigned long long)c->duplicate, "zero", (unsigned long long)c->zero,
        "overwritten", (unsigned long long)c->overwritten);
}

static PyObject *
head_dict(const gd_volume_head *head)
{
    /* The project's name is whatever the file has, and may not be UTF-8. */
    PyObject *project = PyUnicode_DecodeUTF8(
        head->project, (Py_ssize_t)strlen(head->project), "replace");
    return Py_BuildValue(
        "{sy#sssKsKsKsNsssy#sKsN}", "volume_id", head->volume_id,
        (Py_ssize_t)GD_ID_SIZE, "state", state_name(head->state), "size",
        (unsigned long long)head->size, "base_size",
        (unsigned long long)head->base_size, "part_size",
        (unsigned long long)head->part_size, "project", project, "source",
        head->source, "scope", head->scope.id, (Py_ssize_t)GD_SCOPE_SIZE,
        "created", (unsigned long long)head->created, "counters",
        counters_dict(&head->counters));
}

/* Adds an item, whose reference it takes.  Clears the dict on error. */
static void
add_item(PyObject **dict, const char *name, PyObject *item)
{
    if (*dict != NULL &&
        (item == NULL || PyDict_SetItemString(*dict, name, item) < 0)) {
        Py_CLEAR(*dict);
    }
    Py_XDECREF(item);
}

/* ---- volumes by their names: methods of a Repository ---- */

/* Makes the volume of a plan that lacks the base. */
static PyObject *
create(repository_object *self, const char *name, gd_volume_plan *plan,
       PyObject *base)
{
    uint64_t stored = 0;
    gd_error err;
    gd_status s;
    if (base != NULL && !gd_py_enter_image(base, &plan->base)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_volume_create(self->repo, name, plan, &stored, &err);
    Py_END_ALLOW_THREADS
    if (base != NULL) {
        gd_py_leave_image(base);
    }
    return s == GD_OK ? PyLong_FromUnsignedLongLong(stored)
                      : gd_py_raise((PyObject *)self, &err);
}

/* create_volume(name, size, project, scope, image or None, part size = 0) ->
 * bytes of the image that were stored again */
PyObject *
gd_py_create_volume(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    const char *name, *id;
    Py_ssize_t id_length;
    PyObject *base;
    unsigned long long size, part_size = 0;
    gd_volume_plan plan = {0};
    if (!PyArg_ParseTuple(args, "sKsy#O|K", &name, &size, &plan.project, &id,
                          &id_length, &base, &part_size) ||
        !gd_py_copy_id("scope", id, id_length, plan.scope.id)) {
        return NULL;
    }
    plan.size = size;
    plan.part_size = part_size;
    base = base == Py_None ? NULL : base;
    if (base != NULL && Py_TYPE(base) != state->image_type) {
        PyErr_SetString(PyExc_TypeError, "an Image, or None, is needed");
        return NULL;
    }
    if (!gd_py_enter_repository(self)) {
        return NULL;
    }
    PyObject *result = create(self, name, &plan, base);
    gd_py_leave_repository(self);
    return result;
}

PyObject *
gd_py_open_volume(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    const char *name;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "s", &name) || !gd_py_enter_repository(self)) {
        return NULL;
    }
    volume_object *result = gd_py_new_object(state->volume_type);
    if (result == NULL) {
        gd_py_leave_repository(self);
        return NULL;
    }
    Py_INCREF(object);
    result->owner = self;
    Py_BEGIN_ALLOW_THREADS
    s = gd_volume_open(self->repo, name, &result->volume, &err);
    Py_END_ALLOW_THREADS
    if (s != GD_OK) {
        result->volume = NULL;
        gd_py_leave_repository(self);
        gd_py_raise(object, &err);
        Py_DECREF(result);
        return NULL;
    }
    return (PyObject *)result;
}

PyObject *
gd_py_look_at_volume(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    const char *name;
    gd_volume_head head;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "s", &name) || !gd_py_enter_repository(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_volume_look(self->repo, name, &head, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_repository(self);
    return s == GD_OK ? head_dict(&head) : gd_py_raise(object, &err);
}

static PyObject *
end_volume(PyObject *object, PyObject *args,
           gd_status (*end)(gd_repo *, const char *, gd_error *))
{
    repository_object *self = (repository_object *)object;
    const char *name;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "s", &name) || !gd_py_enter_repository(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = end(self->repo, name, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_repository(self);
    return gd_py_none(object, s, &err);
}

PyObject *
gd_py_delete_volume(PyObject *object, PyObject *args)
{
    return end_volume(object, args, gd_volume_delete);
}

PyObject *
gd_py_finish_volume(PyObject *object, PyObject *args)
{
    return end_volume(object, args, gd_volume_finish);
}

/* ---- use ---- */

static void
close_when_unused(volume_object *self)
{
    gd_volume *volume = self->volume;
    if (self->closed && self->users == 0 && volume != NULL &&
        gd_py_is_owner(self->owner)) {
        self->volume = NULL;
        Py_BEGIN_ALLOW_THREADS
        gd_volume_close(volume);
        Py_END_ALLOW_THREADS
        gd_py_leave_repository(self->owner);
    }
}

/* Every use of the volume must lie between enter and leave.  Enter returns 0
 * with an exception set if it is closed, or belongs to another process. */
static int
enter_volume(volume_object *self)
{
    gd_error err;
    if (self->closed || self->volume == NULL) {
        gd_fail(&err, GD_CLOSED, "the volume is closed");
    } else if (gd_py_check_process(self->owner, &err) == GD_OK) {
        self->users++;
        return 1;
    }
    gd_py_raise((PyObject *)self, &err);
    return 0;
}

static void
leave_volume(volume_object *self)
{
    self->users--;
    close_when_unused(self);
}

/* ---- bytes ---- */

static PyObject *
volume_readinto(PyObject *object, PyObject *args)
{
    volume_object *self = (volume_object *)object;
    Py_buffer view;
    unsigned long long offset;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "w*K", &view, &offset)) {
        return NULL;
    }
    if (!enter_volume(self)) {
        PyBuffer_Release(&view);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_volume_read(self->volume, view.buf, (size_t)view.len, offset, &err);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    leave_volume(self);
    return gd_py_none(object, s, &err);
}

/* read(length, offset).  REQUIRES: memory for the length; the volume's size
 * does not bound what is asked for. */
static PyObject *
volume_read(PyObject *object, PyObject *args)
{
    volume_object *self = (volume_object *)object;
    Py_ssize_t length;
    unsigned long long offset;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "nK", &length, &offset)) {
        return NULL;
    }
    if (length < 0) {
        PyErr_SetString(PyExc_ValueError, "the length is negative");
        return NULL;
    }
    PyObject *result = PyBytes_FromStringAndSize(NULL, length);
    if (result == NULL || !enter_volume(self)) {
        Py_XDECREF(result);
        return NULL;
    }
    /* Nobody else has seen the bytes object yet. */
    uint8_t *out = (uint8_t *)PyBytes_AsString(result);
    Py_BEGIN_ALLOW_THREADS
    s = gd_volume_read(self->volume, out, (size_t)length, offset, &err);
    Py_END_ALLOW_THREADS
    leave_volume(self);
    if (s != GD_OK) {
        Py_DECREF(result);
        return gd_py_raise(object, &err);
    }
    return result;
}

/* write(data, offset).  Another thread may change a buffer that is not bytes
 * while it is written, and then the record would have another checksum than its
 * bytes.  So such a buffer is copied first. */
static PyObject *
volume_write(PyObject *object, PyObject *args)
{
    volume_object *self = (volume_object *)object;
    PyObject *buffer;
    unsigned long long offset;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "OK", &buffer, &offset)) {
        return NULL;
    }
    if (!PyObject_CheckBuffer(buffer)) {
        PyErr_SetString(PyExc_TypeError, "bytes, or a buffer, are needed");
        return NULL;
    }
    PyObject *data = PyBytes_FromObject(buffer); /* bytes stay as they are */
    if (data == NULL || !enter_volume(self)) {
        Py_XDECREF(data);
        return NULL;
    }
    const uint8_t *bytes = (const uint8_t *)PyBytes_AsString(data);
    size_t length = (size_t)PyBytes_Size(data);
    Py_BEGIN_ALLOW_THREADS
    s = gd_volume_write(self->volume, bytes, length, offset, &err);
    Py_END_ALLOW_THREADS
    leave_volume(self);
    Py_DECREF(data);
    return gd_py_none(object, s, &err);
}

static PyObject *
volume_zero(PyObject *object, PyObject *args)
{
    volume_object *self = (volume_object *)object;
    unsigned long long length, offset;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "KK", &length, &offset) ||
        !enter_volume(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_volume_zero(self->volume, length, offset, &err);
    Py_END_ALLOW_THREADS
    leave_volume(self);
    return gd_py_none(object, s, &err);
}

/* ---- extents ---- */

typedef struct volume_extent {
    uint64_t offset, length;
    bool zeros;
} volume_extent;

typedef struct extent_list {
    size_t count;
    volume_extent extents[MOST_EXTENTS];
} extent_list;

/* Runs without the GIL. */
static bool
note_extent(void *arg, uint64_t offset, uint64_t length, bool zeros)
{
    extent_list *list = arg;
    volume_extent *last =
        list->count == 0 ? NULL : &list->extents[list->count - 1];
    if (last != NULL && last->zeros == zeros) {
        last->length += length;
        return true;
    }
    if (list->count == MOST_EXTENTS) {
        return false;
    }
    list->extents[list->count++] = (volume_extent){offset, length, zeros};
    return true;
}

static PyObject *
build_extents(const extent_list *list)
{
    PyObject *result = PyList_New((Py_ssize_t)list->count);
    for (size_t i = 0; result != NULL && i < list->count; i++) {
        const volume_extent *e = &list->extents[i];
        PyObject *item = Py_BuildValue(
            "(KKN)", (unsigned long long)e->offset,
            (unsigned long long)e->length, PyBool_FromLong(e->zeros));
        if (item == NULL || PyList_SetItem(result, (Py_ssize_t)i, item) < 0) {
            Py_CLEAR(result);
        }
    }
    return result;
}

/* extents(length, offset) -> the first of the range's extents, joined */
static PyObject *
volume_extents(PyObject *object, PyObject *args)
{
    volume_object *self = (volume_object *)object;
    unsigned long long length, offset;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "KK", &length, &offset)) {
        return NULL;
    }
    extent_list *list = PyMem_Calloc(1, sizeof *list);
    if (list == NULL) {
        return PyErr_NoMemory();
    }
    if (!enter_volume(self)) {
        PyMem_Free(list);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_volume_extents(self->volume, length, offset, note_extent, list,
                          &err);
    Py_END_ALLOW_THREADS
    leave_volume(self);
    PyObject *result =
        s == GD_OK ? build_extents(list) : gd_py_raise(object, &err);
    PyMem_Free(list);
    return result;
}

/* ---- the whole volume ---- */

static PyObject *
volume_flush(PyObject *object, PyObject *unused)
{
    (void)unused;
    volume_object *self = (volume_object *)object;
    gd_error err;
    gd_status s;
    if (!enter_volume(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_volume_flush(self->volume, &err);
    Py_END_ALLOW_THREADS
    leave_volume(self);
    return gd_py_none(object, s, &err);
}

static PyObject *
volume_checkpoint(PyObject *object, PyObject *unused)
{
    (void)unused;
    volume_object *self = (volume_object *)object;
    gd_error err;
    gd_status s;
    if (!enter_volume(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_volume_checkpoint(self->volume, &err);
    Py_END_ALLOW_THREADS
    leave_volume(self);
    return gd_py_none(object, s, &err);
}

static PyObject *
volume_needs_checkpoint(PyObject *object, PyObject *unused)
{
    (void)unused;
    volume_object *self = (volume_object *)object;
    bool due;
    if (!enter_volume(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    due = gd_volume_needs_checkpoint(self->volume);
    Py_END_ALLOW_THREADS
    leave_volume(self);
    return PyBool_FromLong(due);
}

static PyObject *
volume_renew(PyObject *object, PyObject *unused)
{
    (void)unused;
    volume_object *self = (volume_object *)object;
    if (!enter_volume(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    gd_volume_renew(self->volume);
    Py_END_ALLOW_THREADS
    leave_volume(self);
    Py_RETURN_NONE;
}

static PyObject *
volume_snapshot(PyObject *object, PyObject *args)
{
    volume_object *self = (volume_object *)object;
    const char *image_id, *project;
    gd_recipe_header header;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "ss", &image_id, &project) ||
        !enter_volume(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_volume_snapshot(self->volume, image_id, project, &header, &err);
    Py_END_ALLOW_THREADS
    leave_volume(self);
    return s == GD_OK ? gd_py_header_dict(&header) : gd_py_raise(object, &err);
}

static PyObject *
volume_resize(PyObject *object, PyObject *args)
{
    volume_object *self = (volume_object *)object;
    unsigned long long size;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "K", &size) || !enter_volume(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_volume_resize(self->volume, size, &err);
    Py_END_ALLOW_THREADS
    leave_volume(self);
    return gd_py_none(object, s, &err);
}

static PyObject *
volume_info(PyObject *object, PyObject *unused)
{
    (void)unused;
    volume_object *self = (volume_object *)object;
    gd_volume_info info;
    if (!enter_volume(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    gd_volume_get_info(self->volume, &info);
    Py_END_ALLOW_THREADS
    leave_volume(self);
    PyObject *result = head_dict(&info.head);
    add_item(&result, "journal_bytes",
             PyLong_FromUnsignedLongLong(info.journal_bytes));
    add_item(&result, "journal_records",
             PyLong_FromUnsignedLongLong(info.journal_records));
    add_item(&result, "broken",
             PyUnicode_DecodeUTF8(info.broken,
                                  (Py_ssize_t)strlen(info.broken), "replace"));
    return result;
}

static PyObject *
volume_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    volume_object *self = (volume_object *)object;
    self->closed = 1;
    close_when_unused(self);
    Py_RETURN_NONE;
}

static void
volume_dealloc(PyObject *object)
{
    volume_object *self = (volume_object *)object;
    self->closed = 1;
    if (self->owner != NULL) {
        close_when_unused(self);
    }
    Py_XDECREF((PyObject *)self->owner);
    gd_py_free_object(object);
}

static PyMethodDef volume_methods[] = {
    {"readinto", volume_readinto, METH_VARARGS, NULL},
    {"read", volume_read, METH_VARARGS, NULL},
    {"write", volume_write, METH_VARARGS, NULL},
    {"zero", volume_zero, METH_VARARGS, NULL},
    {"flush", volume_flush, METH_NOARGS, NULL},
    {"extents", volume_extents, METH_VARARGS, NULL},
    {"checkpoint", volume_checkpoint, METH_NOARGS, NULL},
    {"needs_checkpoint", volume_needs_checkpoint, METH_NOARGS, NULL},
    {"renew", volume_renew, METH_NOARGS, NULL},
    {"snapshot", volume_snapshot, METH_VARARGS, NULL},
    {"resize", volume_resize, METH_VARARGS, NULL},
    {"info", volume_info, METH_NOARGS, NULL},
    {"close", volume_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot volume_slots[] = {
    {Py_tp_dealloc, volume_dealloc},
    {Py_tp_methods, volume_methods},
    {0, NULL},
};

PyType_Spec gd_py_volume_spec = {
    .name = "glance_dedup._engine.Volume",
    .basicsize = sizeof(volume_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = volume_slots,
};
