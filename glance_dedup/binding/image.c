/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image.c - glance_dedup._engine.Image: an image open for reading.
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/exchange/wire.h"
#include "engine/read/reader.h"

typedef struct image_object {
    PyObject_HEAD
    repository_object *owner; /* entered while image is set */
    gd_image *image;
    Py_ssize_t users; /* calls in progress */
    int closed;
} image_object;

PyObject *
gd_py_open_image(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    const char *image_id;
    const uint8_t *upload;
    uint8_t upload_id[GD_ID_SIZE];
    gd_error err;
    gd_status s;
    if (!gd_py_parse_image(args, &image_id, upload_id, &upload) ||
        !gd_py_enter_repository(self)) {
        return NULL;
    }
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    image_object *result = gd_py_new_object(state->image_type);
    if (result == NULL) {
        gd_py_leave_repository(self);
        return NULL;
    }
    Py_INCREF(object);
    result->owner = self;
    Py_BEGIN_ALLOW_THREADS
    s = gd_image_open(self->repo, image_id, upload, &result->image, &err);
    Py_END_ALLOW_THREADS
    if (s != GD_OK) {
        result->image = NULL;
        gd_py_leave_repository(self);
        gd_py_raise(object, &err);
        Py_DECREF(result);
        return NULL;
    }
    return (PyObject *)result;
}

static void
close_when_unused(image_object *self)
{
    if (self->closed && self->users == 0 && self->image != NULL &&
        gd_py_check_process(self->owner, NULL) == GD_OK) {
        gd_image_close(self->image);
        self->image = NULL;
        gd_py_leave_repository(self->owner);
    }
}

static int
enter_image(image_object *self)
{
    gd_error err;
    if (self->closed || self->image == NULL) {
        gd_fail(&err, GD_CLOSED, "the image is closed");
    } else if (gd_py_check_process(self->owner, &err) == GD_OK) {
        self->users++;
        return 1;
    }
    gd_py_raise((PyObject *)self, &err);
    return 0;
}

static void
leave_image(image_object *self)
{
    self->users--;
    close_when_unused(self);
}

int
gd_py_enter_image(PyObject *object, gd_image **image)
{
    image_object *self = (image_object *)object;
    int entered = enter_image(self);
    *image = self->image;
    return entered;
}

void
gd_py_leave_image(PyObject *object)
{
    leave_image((image_object *)object);
}

static PyObject *
image_readinto(PyObject *object, PyObject *args)
{
    image_object *self = (image_object *)object;
    Py_buffer view;
    unsigned long long offset;
    size_t done = 0;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "w*K", &view, &offset)) {
        return NULL;
    }
    if (!enter_image(self)) {
        PyBuffer_Release(&view);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_image_read(self->image, view.buf, (size_t)view.len, offset, &done,
                      &err);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    leave_image(self);
    return s == GD_OK ? PyLong_FromSize_t(done) : gd_py_raise(object, &err);
}

/* read(length, offset): returns fewer bytes than asked for only at the end. */
static PyObject *
image_read(PyObject *object, PyObject *args)
{
    image_object *self = (image_object *)object;
    unsigned long long length, offset;
    size_t done = 0;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "KK", &length, &offset) ||
        !enter_image(self)) {
        return NULL;
    }
    uint64_t size = gd_image_header(self->image)->size;
    uint64_t rest = offset < size ? size - offset : 0;
    PyObject *result = PyBytes_FromStringAndSize(
        NULL, (Py_ssize_t)(length < rest ? length : rest));
    if (result == NULL) {
        leave_image(self);
        return NULL;
    }
    /* Nobody else has seen the bytes object yet. */
    uint8_t *out = (uint8_t *)PyBytes_AsString(result);
    size_t room = (size_t)PyBytes_Size(result);
    Py_BEGIN_ALLOW_THREADS
    s = gd_image_read(self->image, out, room, offset, &done, &err);
    Py_END_ALLOW_THREADS
    leave_image(self);
    if (s != GD_OK) {
        Py_DECREF(result);
        return gd_py_raise(object, &err);
    }
    return result;
}

static PyObject *
extents_list(const gd_recipe_page *page)
{
    PyObject *list = PyList_New((Py_ssize_t)page->count);
    for (uint32_t i = 0; list != NULL && i < page->count; i++) {
        const gd_extent *e = &page->extents[i];
        PyObject *item = Py_BuildValue(
            "(KKsIII)", (unsigned long long)e->offset,
            (unsigned long long)e->length,
            e->kind == GD_EXTENT_ZEROS ? "zeros" : "blocks", e->group, e->slot,
            e->blocks);
        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* Returns page `number` of the extents, from 0; an empty list behind the last
 * page. */
static PyObject *
image_extents(PyObject *object, PyObject *args)
{
    image_object *self = (image_object *)object;
    unsigned long long number;
    gd_recipe_page page;
    gd_error err;
    gd_status s = GD_OK;
    if (!PyArg_ParseTuple(args, "K", &number) || !enter_image(self)) {
        return NULL;
    }
    page.count = 0;
    if (number < gd_image_pages(self->image)) {
        Py_BEGIN_ALLOW_THREADS
        s = gd_image_extents(self->image, number + 1, &page, &err);
        Py_END_ALLOW_THREADS
    }
    leave_image(self);
    return s == GD_OK ? extents_list(&page) : gd_py_raise(object, &err);
}

/* describe(page): counts from 0; returns b'' behind the last page. */
static PyObject *
image_describe(PyObject *object, PyObject *args)
{
    image_object *self = (image_object *)object;
    unsigned long long number;
    uint8_t *bytes = NULL;
    size_t length = 0;
    gd_error err;
    gd_status s = GD_OK;
    if (!PyArg_ParseTuple(args, "K", &number) || !enter_image(self)) {
        return NULL;
    }
    const gd_env *env = self->owner->repo->env;
    if (number < gd_image_pages(self->image)) {
        Py_BEGIN_ALLOW_THREADS
        s = gd_image_describe(self->image, number + 1, &bytes, &length, &err);
        Py_END_ALLOW_THREADS
    }
    PyObject *result =
        s == GD_OK ? PyBytes_FromStringAndSize((const char *)bytes,
                                               (Py_ssize_t)length)
                   : gd_py_raise(object, &err);
    env->release(env, bytes);
    leave_image(self);
    return result;
}

/* Converts a list of pairs to ranges; free with PyMem_Free. */
static gd_range *
parse_ranges(PyObject *list, size_t *count)
{
    Py_ssize_t n = PyList_Size(list);
    gd_range *ranges = PyMem_Calloc((size_t)n + 1, sizeof *ranges);
    if (ranges == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *pair = PySequence_Tuple(PyList_GetItem(list, i));
        unsigned long long offset, length;
        int good = pair != NULL &&
                   PyArg_ParseTuple(pair, "KK", &offset, &length);
        Py_XDECREF(pair);
        if (!good) {
            PyMem_Free(ranges);
            return NULL;
        }
        ranges[i] = (gd_range){offset, length};
    }
    *count = (size_t)n;
    return ranges;
}

static PyObject *
frames_list(const gd_frames *frames)
{
    PyObject *list = PyList_New((Py_ssize_t)frames->count);
    size_t start = 0;
    for (size_t i = 0; list != NULL && i < frames->count; i++) {
        PyObject *frame = PyBytes_FromStringAndSize(
            (const char *)frames->bytes + start,
            (Py_ssize_t)(frames->ends[i] - start));
        if (frame == NULL || PyList_SetItem(list, (Py_ssize_t)i, frame) < 0) {
            Py_CLEAR(list);
        }
        start = frames->ends[i];
    }
    return list;
}

/* frames(ranges) -> (frames, end); ranges: a list of pairs (offset, length) */
static PyObject *
image_frames(PyObject *object, PyObject *args)
{
    image_object *self = (image_object *)object;
    PyObject *list;
    size_t count = 0;
    gd_frames frames = {0};
    uint64_t end = 0;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list)) {
        return NULL;
    }
    gd_range *ranges = parse_ranges(list, &count);
    if (ranges == NULL) {
        return NULL;
    }
    if (!enter_image(self)) {
        PyMem_Free(ranges);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_image_frames(self->image, ranges, count, &frames, &end, &err);
    Py_END_ALLOW_THREADS
    PyObject *result = s == GD_OK
                           ? Py_BuildValue("(NK)", frames_list(&frames),
                                           (unsigned long long)end)
                           : gd_py_raise(object, &err);
    gd_frames_free(&frames);
    PyMem_Free(ranges);
    leave_image(self);
    return result;
}

static PyObject *
image_header(PyObject *object, PyObject *unused)
{
    (void)unused;
    image_object *self = (image_object *)object;
    if (!enter_image(self)) {
        return NULL;
    }
    PyObject *result = gd_py_header_dict(gd_image_header(self->image));
    leave_image(self);
    return result;
}

static PyObject *
image_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    image_object *self = (image_object *)object;
    self->closed = 1;
    close_when_unused(self);
    Py_RETURN_NONE;
}

static void
image_dealloc(PyObject *object)
{
    image_object *self = (image_object *)object;
    self->closed = 1;
    if (self->owner != NULL) {
        close_when_unused(self);
    }
    Py_XDECREF((PyObject *)self->owner);
    gd_py_free_object(object);
}

static PyMethodDef image_methods[] = {
    {"readinto", image_readinto, METH_VARARGS, NULL},
    {"read", image_read, METH_VARARGS, NULL},
    {"describe", image_describe, METH_VARARGS, NULL},
    {"frames", image_frames, METH_VARARGS, NULL},
    {"extents", image_extents, METH_VARARGS, NULL},
    {"header", image_header, METH_NOARGS, NULL},
    {"close", image_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot image_slots[] = {
    {Py_tp_dealloc, image_dealloc},
    {Py_tp_methods, image_methods},
    {0, NULL},
};

PyType_Spec gd_py_image_spec = {
    .name = "glance_dedup._engine.Image",
    .basicsize = sizeof(image_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = image_slots,
};
