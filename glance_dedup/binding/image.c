/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image.c - glance_dedup._engine.Image: an image open for reading.
 */
#include "binding/binding.h"

#include "engine/exchange/wire.h"
#include "engine/files/spool.h"
#include "engine/read/image.h"
#include "engine/write/transaction.h"

static void
close_image(void *handle)
{
    gd_image_close(handle);
}

static const opened_kind image_kind = {"the image is closed", close_image,
                                       false};

PyObject *
gd_py_open_image(PyObject *object, PyObject *args)
{
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    const char *image_id;
    const uint8_t *upload;
    uint8_t upload_id[GD_ID_SIZE];
    gd_image *image = NULL;
    gd_py_call call;
    if (!gd_py_parse_image(args, &image_id, upload_id, &upload)) {
        return NULL;
    }
    opened_object *self =
        gd_py_begin_opening(object, state->image_type, &image_kind, &call);
    if (self == NULL) {
        return NULL;
    }
    gd_status s = gd_image_open(self->owner->repo, image_id, upload, &image,
                                &call.err);
    return gd_py_end_opening(self, s, image, &call);
}

PyObject *
gd_py_open_finished(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    opened_object *transaction = (opened_object *)object;
    const gd_spool_writer *spool;
    gd_image *image = NULL;
    gd_py_call call;
    if (!gd_py_enter_opened(transaction)) {
        return NULL;
    }
    opened_object *self =
        gd_py_begin_opening((PyObject *)transaction->owner, state->image_type,
                            &image_kind, &call);
    PyObject *result = NULL;
    if (self != NULL) {
        gd_status s = gd_transaction_require_finished(transaction->handle,
                                                      &spool, &call.err);
        if (s == GD_OK) {
            s = gd_image_open_spooled(self->owner->repo, spool->name, &image,
                                      &call.err);
        }
        result = gd_py_end_opening(self, s, image, &call);
    }
    gd_py_leave_opened(transaction);
    return result;
}

static gd_image *
image_of(PyObject *object)
{
    return ((opened_object *)object)->handle;
}

static PyObject *
read_into(PyObject *object, PyObject *args,
          gd_status (*read)(gd_image *, uint8_t *, size_t, uint64_t, size_t *,
                            gd_error *))
{
    Py_buffer view;
    unsigned long long offset;
    size_t done = 0;
    gd_py_call call;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "w*K", &view, &offset)) {
        return NULL;
    }
    if (gd_py_call_opened(object, &call)) {
        gd_status s = read(image_of(object), view.buf, (size_t)view.len, offset,
                           &done, &call.err);
        result = gd_py_end_number(&call, s, done);
    }
    PyBuffer_Release(&view);
    return result;
}

static PyObject *
image_readinto(PyObject *object, PyObject *args)
{
    return read_into(object, args, gd_image_read);
}

static PyObject *
image_readinto_disk(PyObject *object, PyObject *args)
{
    return read_into(object, args, gd_image_read_disk);
}

/* read(length, offset): returns fewer bytes than asked for only at the end. */
static PyObject *
image_read(PyObject *object, PyObject *args)
{
    opened_object *self = (opened_object *)object;
    unsigned long long length, offset;
    size_t done = 0;
    uint8_t *out;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "KK", &length, &offset) ||
        !gd_py_enter_opened(self)) {
        return NULL;
    }
    uint64_t size = gd_image_header(self->handle)->size;
    uint64_t rest = offset < size ? size - offset : 0;
    rest = length < rest ? length : rest;
    PyObject *result = gd_py_new_bytes(rest, &out);
    gd_py_leave_opened(self);
    if (result == NULL || !gd_py_call_opened(object, &call)) {
        Py_XDECREF(result);
        return NULL;
    }
    gd_status s = gd_image_read(self->handle, out, rest, offset, &done,
                                &call.err);
    if (!gd_py_end(&call, s)) {
        Py_CLEAR(result);
    }
    return result;
}

/* is_zeros(length, offset): a range that lies in the image */
static PyObject *
image_is_zeros(PyObject *object, PyObject *args)
{
    unsigned long long length, offset;
    bool zeros = false;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "KK", &length, &offset) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_status s = gd_image_is_zeros(image_of(object),
                                    (gd_range){offset, length}, &zeros,
                                    &call.err);
    return gd_py_end(&call, s) ? PyBool_FromLong(zeros) : NULL;
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
        gd_py_set_item(&list, i, item);
    }
    return list;
}

/* Returns page `number` of the extents, from 0; an empty list behind the last
 * page. */
static PyObject *
image_extents(PyObject *object, PyObject *args)
{
    gd_image *image = image_of(object);
    unsigned long long number;
    gd_recipe_page page;
    gd_py_call call;
    gd_status s = GD_OK;
    if (!PyArg_ParseTuple(args, "K", &number) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    page.count = 0;
    if (number < gd_image_pages(image)) {
        s = gd_image_extents(image, number + 1, &page, &call.err);
    }
    return gd_py_end(&call, s) ? extents_list(&page) : NULL;
}

/* describe(page): counts from 0; returns b'' behind the last page. */
static PyObject *
image_describe(PyObject *object, PyObject *args)
{
    gd_image *image = image_of(object);
    const gd_env *env = gd_env_posix();
    unsigned long long number;
    uint8_t *bytes = NULL;
    size_t length = 0;
    gd_py_call call;
    gd_status s = GD_OK;
    if (!PyArg_ParseTuple(args, "K", &number) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    if (number < gd_image_pages(image)) {
        s = gd_wire_describe(image, number + 1, &bytes, &length, &call.err);
    }
    PyObject *result = gd_py_end_bytes(&call, s, bytes, length);
    env->release(env, bytes);
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
        gd_py_set_item(&list, i, frame);
        start = frames->ends[i];
    }
    return list;
}

/* frames(ranges) -> (frames, end); ranges: a list of pairs (offset, length) */
static PyObject *
image_frames(PyObject *object, PyObject *args)
{
    PyObject *list, *result = NULL;
    size_t count = 0;
    gd_frames frames = {0};
    uint64_t end = 0;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list)) {
        return NULL;
    }
    gd_range *ranges = parse_ranges(list, &count);
    if (ranges != NULL && gd_py_call_opened(object, &call)) {
        gd_status s = gd_wire_frames(image_of(object), ranges, count, &frames,
                                     &end, &call.err);
        if (gd_py_end(&call, s)) {
            result = Py_BuildValue("(NK)", frames_list(&frames),
                                   (unsigned long long)end);
        }
    }
    gd_frames_free(&frames);
    PyMem_Free(ranges);
    return result;
}

static PyObject *
image_header(PyObject *object, PyObject *Py_UNUSED(unused))
{
    opened_object *self = (opened_object *)object;
    if (!gd_py_enter_opened(self)) {
        return NULL;
    }
    PyObject *result = gd_py_header_dict(gd_image_header(self->handle));
    gd_py_leave_opened(self);
    return result;
}

/* disk() -> None, or the header's fields of the image's disk */
static PyObject *
image_disk(PyObject *object, PyObject *Py_UNUSED(unused))
{
    opened_object *self = (opened_object *)object;
    if (!gd_py_enter_opened(self)) {
        return NULL;
    }
    const gd_recipe_header *header = gd_image_header(self->handle);
    const gd_recipe_disk *d = &header->disk;
    PyObject *result =
        gd_recipe_has_disk(header)
            ? Py_BuildValue(
                  "{sKsKsKsKsIsN}", "plain_bytes",
                  (unsigned long long)d->plain_size, "size",
                  (unsigned long long)d->size, "derived",
                  (unsigned long long)d->derived, "derived_bytes",
                  (unsigned long long)d->derived_bytes, "format",
                  (unsigned)d->format, "is_proven",
                  PyBool_FromLong(d->flags & GD_RECIPE_PROVEN))
            : Py_NewRef(Py_None);
    gd_py_leave_opened(self);
    return result;
}

static PyMethodDef image_methods[] = {
    {"readinto", image_readinto, METH_VARARGS, NULL},
    {"readinto_disk", image_readinto_disk, METH_VARARGS, NULL},
    {"disk", image_disk, METH_NOARGS, NULL},
    {"read", image_read, METH_VARARGS, NULL},
    {"is_zeros", image_is_zeros, METH_VARARGS, NULL},
    {"describe", image_describe, METH_VARARGS, NULL},
    {"frames", image_frames, METH_VARARGS, NULL},
    {"extents", image_extents, METH_VARARGS, NULL},
    {"header", image_header, METH_NOARGS, NULL},
    {"close", gd_py_opened_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const gd_py_type gd_py_image_type = {
    .name = "glance_dedup._engine.Image",
    .size = sizeof(opened_object),
    .dealloc = gd_py_opened_dealloc,
    .methods = image_methods,
};
