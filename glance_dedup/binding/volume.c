/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volume.c - glance_dedup._engine.Volume: a volume that this process owns; and
 * what a Repository does with volumes by their names.
 *
 * A kind for any number of threads (opened.c).  In a forked child it leaves the
 * volume's lock, too, to the parent.
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/volume/volume.h"

enum { MAX_EXTENTS = 1024 }; /* that one call returns */

static void
close_volume(void *handle)
{
    gd_volume_close(handle);
}

static const opened_kind volume_kind = {"the volume is closed", close_volume,
                                        false};

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
        "{sKsKsKsKsKsKsKsKsKsKsKsK}", "read", (unsigned long long)c->read, "written",
        (unsigned long long)c->written, "zeroed",
        (unsigned long long)c->zeroed, "flushes",
        (unsigned long long)c->flushes, "checkpoints",
        (unsigned long long)c->checkpoints, "unique",
        (unsigned long long)c->unique, "duplicate",
        (unsigned long long)c->duplicate, "zero", (unsigned long long)c->zero,
        "overwritten", (unsigned long long)c->overwritten, "skipped",
        (unsigned long long)c->skipped, "prefetches",
        (unsigned long long)c->prefetches, "prefetched",
        (unsigned long long)c->prefetched);
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
       opened_object *base)
{
    uint64_t stored = 0;
    gd_error err;
    gd_status s;
    if (base != NULL && !gd_py_enter_opened(base)) {
        return NULL;
    }
    plan->base = base == NULL ? NULL : base->handle;
    Py_BEGIN_ALLOW_THREADS
    s = gd_volume_create(self->repo, name, plan, &stored, &err);
    Py_END_ALLOW_THREADS
    if (base != NULL) {
        gd_py_leave_opened(base);
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
    PyObject *result = create(self, name, &plan, (opened_object *)base);
    gd_py_leave_repository(self);
    return result;
}

PyObject *
gd_py_open_volume(PyObject *object, PyObject *args)
{
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    const char *name;
    gd_volume *volume = NULL;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "s", &name)) {
        return NULL;
    }
    opened_object *self =
        gd_py_begin_opening(object, state->volume_type, &volume_kind, &call);
    if (self == NULL) {
        return NULL;
    }
    gd_status s =
        gd_volume_open(self->owner->repo, name, true, &volume, &call.err);
    return gd_py_end_opening(self, s, volume, &call);
}

PyObject *
gd_py_look_at_volume(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    const char *name;
    gd_volume_head head;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "s", &name) ||
        !gd_py_call_repository(object, &call)) {
        return NULL;
    }
    gd_status s = gd_volume_read_head(self->repo, name, &head, &call.err);
    return gd_py_end(&call, s) ? head_dict(&head) : NULL;
}

static PyObject *
end_volume(PyObject *object, PyObject *args,
           gd_status (*end)(gd_repo *, const char *, gd_error *))
{
    repository_object *self = (repository_object *)object;
    const char *name;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "s", &name) ||
        !gd_py_call_repository(object, &call)) {
        return NULL;
    }
    return gd_py_end_none(&call, end(self->repo, name, &call.err));
}

PyObject *
gd_py_delete_volume(PyObject *object, PyObject *args)
{
    return end_volume(object, args, gd_volume_delete);
}

PyObject *
gd_py_discard_volume(PyObject *object, PyObject *args)
{
    return end_volume(object, args, gd_volume_delete_damaged);
}

PyObject *
gd_py_finish_volume(PyObject *object, PyObject *args)
{
    return end_volume(object, args, gd_volume_reap);
}

PyObject *
gd_py_rename_volume(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    const char *name, *new_name;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "ss", &name, &new_name) ||
        !gd_py_call_repository(object, &call)) {
        return NULL;
    }
    return gd_py_end_none(
        &call, gd_volume_rename(self->repo, name, new_name, &call.err));
}

/* roll_back_volume(name, image) -> bytes of the image that were stored again */
PyObject *
gd_py_roll_back_volume(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    const char *name;
    PyObject *image;
    uint64_t stored = 0;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "sO!", &name, state->image_type, &image) ||
        !gd_py_enter_opened((opened_object *)image)) {
        return NULL;
    }
    bool called = gd_py_call_repository(object, &call);
    gd_status s = !called ? GD_OK
                          : gd_volume_roll_back(
                                self->repo, name,
                                ((opened_object *)image)->handle, &stored,
                                &call.err);
    called = called && gd_py_end(&call, s);
    gd_py_leave_opened((opened_object *)image);
    return called ? PyLong_FromUnsignedLongLong(stored) : NULL;
}

/* ---- bytes ---- */

static gd_volume *
volume_of(PyObject *object)
{
    return ((opened_object *)object)->handle;
}

static PyObject *
volume_readinto(PyObject *object, PyObject *args)
{
    Py_buffer view;
    unsigned long long offset;
    gd_py_call call;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "w*K", &view, &offset)) {
        return NULL;
    }
    if (gd_py_call_opened(object, &call)) {
        gd_status s = gd_volume_read(volume_of(object), view.buf,
                                     (size_t)view.len, offset, &call.err);
        result = gd_py_end_none(&call, s);
    }
    PyBuffer_Release(&view);
    return result;
}

/* read(length, offset).  REQUIRES: memory for the length; the volume's size
 * does not bound the requested length. */
static PyObject *
volume_read(PyObject *object, PyObject *args)
{
    Py_ssize_t length;
    unsigned long long offset;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "nK", &length, &offset)) {
        return NULL;
    }
    if (length < 0) {
        PyErr_SetString(PyExc_ValueError, "the length is negative");
        return NULL;
    }
    PyObject *result = PyBytes_FromStringAndSize(NULL, length);
    /* Nobody else has seen the bytes object yet. */
    uint8_t *out = result == NULL ? NULL : (uint8_t *)PyBytes_AsString(result);
    if (result == NULL || !gd_py_call_opened(object, &call)) {
        Py_XDECREF(result);
        return NULL;
    }
    gd_status s = gd_volume_read(volume_of(object), out, (size_t)length, offset,
                                 &call.err);
    if (!gd_py_end(&call, s)) {
        Py_CLEAR(result);
    }
    return result;
}

/* write(data, offset).  Another thread may change a buffer that is not bytes
 * while it is written, and then the record would have another checksum than its
 * bytes.  So such a buffer is copied first. */
static PyObject *
volume_write(PyObject *object, PyObject *args)
{
    PyObject *buffer, *result = NULL;
    unsigned long long offset;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "OK", &buffer, &offset)) {
        return NULL;
    }
    if (!PyObject_CheckBuffer(buffer)) {
        PyErr_SetString(PyExc_TypeError, "bytes, or a buffer, are needed");
        return NULL;
    }
    PyObject *data = PyBytes_FromObject(buffer); /* bytes stay as they are */
    if (data == NULL) {
        return NULL;
    }
    const uint8_t *bytes = (const uint8_t *)PyBytes_AsString(data);
    size_t length = (size_t)PyBytes_Size(data);
    if (gd_py_call_opened(object, &call)) {
        gd_status s = gd_volume_write(volume_of(object), bytes, length, offset,
                                      &call.err);
        result = gd_py_end_none(&call, s);
    }
    Py_DECREF(data);
    return result;
}

static PyObject *
volume_zero(PyObject *object, PyObject *args)
{
    unsigned long long length, offset;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "KK", &length, &offset) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    return gd_py_end_none(
        &call, gd_volume_zero(volume_of(object), length, offset, &call.err));
}

/* ---- extents ---- */

typedef struct volume_extent {
    uint64_t offset, length;
    bool zeros;
} volume_extent;

typedef struct extent_list {
    size_t count;
    volume_extent extents[MAX_EXTENTS];
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
    if (list->count == MAX_EXTENTS) {
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
        gd_py_set_item(&result, i, item);
    }
    return result;
}

/* extents(length, offset) -> the first of the range's extents, joined */
static PyObject *
volume_extents(PyObject *object, PyObject *args)
{
    unsigned long long length, offset;
    gd_py_call call;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "KK", &length, &offset)) {
        return NULL;
    }
    extent_list *list = PyMem_Calloc(1, sizeof *list);
    if (list == NULL) {
        return PyErr_NoMemory();
    }
    if (gd_py_call_opened(object, &call)) {
        gd_status s = gd_volume_extents(volume_of(object), length, offset,
                                        note_extent, list, &call.err);
        result = gd_py_end(&call, s) ? build_extents(list) : NULL;
    }
    PyMem_Free(list);
    return result;
}

/* ---- the whole volume ---- */

static PyObject *
volume_flush(PyObject *object, PyObject *unused)
{
    (void)unused;
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    return gd_py_end_none(&call, gd_volume_flush(volume_of(object), &call.err));
}

static PyObject *
volume_checkpoint(PyObject *object, PyObject *unused)
{
    (void)unused;
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    return gd_py_end_none(&call,
                          gd_volume_checkpoint(volume_of(object), &call.err));
}

static PyObject *
volume_needs_checkpoint(PyObject *object, PyObject *unused)
{
    (void)unused;
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    return gd_py_end_bool(&call, GD_OK,
                          gd_volume_needs_checkpoint(volume_of(object)));
}

static PyObject *
volume_set_dedup(PyObject *object, PyObject *args)
{
    int dedup;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "p", &dedup) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_volume_set_dedup(volume_of(object), dedup != 0);
    return gd_py_end_none(&call, GD_OK);
}

/* prefetch(length, offset).  REQUIRES: the range lies within the volume. */
static PyObject *
volume_prefetch(PyObject *object, PyObject *args)
{
    unsigned long long length, offset;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "KK", &length, &offset) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_volume_prefetch(volume_of(object), length, offset);
    return gd_py_end_none(&call, GD_OK);
}

static PyObject *
volume_renew(PyObject *object, PyObject *unused)
{
    (void)unused;
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_volume_renew(volume_of(object));
    return gd_py_end_none(&call, GD_OK);
}

static PyObject *
volume_snapshot(PyObject *object, PyObject *args)
{
    const char *image_id, *project;
    gd_recipe_header header;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "ss", &image_id, &project) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_status s = gd_volume_snapshot(volume_of(object), image_id, project,
                                     &header, &call.err);
    return gd_py_end(&call, s) ? gd_py_header_dict(&header) : NULL;
}

static PyObject *
volume_resize(PyObject *object, PyObject *args)
{
    unsigned long long size;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "K", &size) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    return gd_py_end_none(&call,
                          gd_volume_resize(volume_of(object), size, &call.err));
}

static PyObject *
volume_info(PyObject *object, PyObject *unused)
{
    (void)unused;
    gd_volume_info info;
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_volume_get_info(volume_of(object), &info);
    gd_py_end(&call, GD_OK);
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

static PyMethodDef volume_methods[] = {
    {"readinto", volume_readinto, METH_VARARGS, NULL},
    {"read", volume_read, METH_VARARGS, NULL},
    {"write", volume_write, METH_VARARGS, NULL},
    {"zero", volume_zero, METH_VARARGS, NULL},
    {"flush", volume_flush, METH_NOARGS, NULL},
    {"extents", volume_extents, METH_VARARGS, NULL},
    {"checkpoint", volume_checkpoint, METH_NOARGS, NULL},
    {"needs_checkpoint", volume_needs_checkpoint, METH_NOARGS, NULL},
    {"set_dedup", volume_set_dedup, METH_VARARGS, NULL},
    {"prefetch", volume_prefetch, METH_VARARGS, NULL},
    {"renew", volume_renew, METH_NOARGS, NULL},
    {"snapshot", volume_snapshot, METH_VARARGS, NULL},
    {"resize", volume_resize, METH_VARARGS, NULL},
    {"info", volume_info, METH_NOARGS, NULL},
    {"close", gd_py_opened_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const gd_py_type gd_py_volume_type = {
    .name = "glance_dedup._engine.Volume",
    .size = sizeof(opened_object),
    .dealloc = gd_py_opened_dealloc,
    .methods = volume_methods,
};
