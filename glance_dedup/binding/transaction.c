/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transaction.c - glance_dedup._engine.Transaction: an image that is being
 * stored, as bytes or as blocks found by their fingerprints.
 *
 * A serial kind (opened.c).
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/base/coding.h"
#include "engine/write/transaction.h"

static void
end_transaction(void *handle)
{
    gd_transaction_end(handle);
}

static const opened_kind transaction_kind = {"the transaction has ended",
                                             end_transaction, true};

PyObject *
gd_py_begin(PyObject *object, PyObject *args)
{
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    const char *image_id, *project;
    const char *id = (const char *)gd_global_scope.id;
    Py_ssize_t id_length = GD_SCOPE_SIZE;
    gd_scope scope;
    gd_transaction *transaction = NULL;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "ss|y#", &image_id, &project, &id,
                          &id_length) ||
        !gd_py_copy_id("scope", id, id_length, scope.id)) {
        return NULL;
    }
    opened_object *self = gd_py_begin_opening(object, state->transaction_type,
                                              &transaction_kind, &call);
    if (self == NULL) {
        return NULL;
    }
    gd_status s = gd_transaction_begin(self->owner->repo, image_id, project,
                                       &scope, &transaction, &call.err);
    return gd_py_end_opening(self, s, transaction, &call);
}

PyObject *
gd_py_begin_conversion(PyObject *object, PyObject *args)
{
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    const char *image_id;
    gd_transaction *transaction = NULL;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "s", &image_id)) {
        return NULL;
    }
    opened_object *self = gd_py_begin_opening(object, state->transaction_type,
                                              &transaction_kind, &call);
    if (self == NULL) {
        return NULL;
    }
    gd_status s = gd_transaction_begin_conversion(self->owner->repo, image_id,
                                                  &transaction, &call.err);
    return gd_py_end_opening(self, s, transaction, &call);
}

static PyObject *
transaction_write(PyObject *object, PyObject *data)
{
    opened_object *self = (opened_object *)object;
    Py_buffer view;
    gd_py_call call;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    if (gd_py_call_opened(object, &call)) {
        gd_status s = gd_transaction_write(self->handle, view.buf,
                                           (size_t)view.len, &call.err);
        result = gd_py_end_number(&call, s, (uint64_t)view.len);
    }
    PyBuffer_Release(&view);
    return result;
}

static PyObject *
transaction_set_dedup(PyObject *object, PyObject *args)
{
    opened_object *self = (opened_object *)object;
    const char *name;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "s", &name)) {
        return NULL;
    }
    bool probe = strcmp(name, "probe") == 0;
    if (!probe && strcmp(name, "off") != 0) {
        PyErr_SetString(PyExc_ValueError, "'probe' or 'off' is needed");
        return NULL;
    }
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_transaction_set_lookup_mode(self->handle,
                                   probe ? GD_DEDUP_PROBE : GD_DEDUP_OFF);
    return gd_py_end_none(&call, GD_OK);
}

static PyObject *
transaction_set_hash(PyObject *object, PyObject *args)
{
    opened_object *self = (opened_object *)object;
    const char *name;
    Py_buffer value;
    gd_py_call call;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "sy*", &name, &value)) {
        return NULL;
    }
    if (gd_py_call_opened(object, &call)) {
        gd_status s = gd_transaction_set_hash(self->handle, name, value.buf,
                                              (size_t)value.len, &call.err);
        result = gd_py_end_none(&call, s);
    }
    PyBuffer_Release(&value);
    return result;
}

/* The result of a commit.  It has the facts that the commit got about the
 * image, or the image, opened while the transaction still holds its groups'
 * shared locks.  So nobody can delete it in between (I12). */
static PyObject *
commit(PyObject *object, bool open)
{
    opened_object *self = (opened_object *)object;
    gd_recipe_header header;
    gd_error err;
    gd_status s;
    bool linked = false;
    if (!gd_py_enter_opened(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_transaction_commit(self->handle, &header, &linked, &err);
    Py_END_ALLOW_THREADS
    PyObject *result =
        s != GD_OK ? gd_py_raise(object, &err)
        : open     ? PyObject_CallMethod((PyObject *)self->owner, "open_image",
                                         "s", header.image_id)
                   : gd_py_header_dict(&header);
    if (linked) {
        gd_py_close_opened(self);
    }
    gd_py_leave_opened(self);
    return result;
}

static PyObject *
transaction_commit(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return commit(object, false);
}

static PyObject *
transaction_commit_open(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return commit(object, true);
}

/* ---- blocks by their fingerprints ---- */

/* Runs one of the engine's look-ups, and frees the list. */
static PyObject *
find_blocks(PyObject *object, gd_py_blocks *list,
            gd_status (*find)(gd_transaction *, const gd_fingerprint *,
                              const uint32_t *, size_t, gd_address *,
                              gd_error *))
{
    opened_object *self = (opened_object *)object;
    gd_py_call call;
    PyObject *result = NULL;
    if (gd_py_call_opened(object, &call)) {
        gd_status s = find(self->handle, list->fps, list->lengths, list->count,
                           list->addresses, &call.err);
        if (gd_py_end(&call, s)) {
            result = gd_py_pack_addresses(list->addresses, list->count);
        }
    }
    gd_py_free_blocks(list);
    return result;
}

/* find(fingerprints, lengths) -> addresses */
static PyObject *
transaction_find(PyObject *object, PyObject *args)
{
    Py_buffer fps, lengths;
    gd_py_blocks list;
    if (!PyArg_ParseTuple(args, "y*y*", &fps, &lengths)) {
        return NULL;
    }
    int copied = gd_py_copy_blocks(&fps, &lengths, NULL, &list);
    PyBuffer_Release(&fps);
    PyBuffer_Release(&lengths);
    return copied ? find_blocks(object, &list, gd_transaction_find) : NULL;
}

/* find_at(fingerprints, lengths, addresses) -> addresses */
static PyObject *
transaction_find_at(PyObject *object, PyObject *args)
{
    gd_py_blocks list;
    return gd_py_parse_blocks(args, &list)
               ? find_blocks(object, &list, gd_transaction_find_at)
               : NULL;
}

/* Copies packed lengths.  Returns NULL with an exception set if their sum is
 * not this number of bytes. */
static uint32_t *
copy_lengths(const Py_buffer *packed, Py_ssize_t bytes)
{
    size_t count = (size_t)packed->len / 4;
    uint64_t sum = 0;
    uint32_t *lengths = PyMem_Calloc(count + 1, sizeof *lengths);
    if (lengths == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        lengths[i] = gd_get32((const uint8_t *)packed->buf + i * 4);
        sum += lengths[i];
    }
    if (packed->len % 4 != 0 || sum != (uint64_t)bytes) {
        PyErr_SetString(PyExc_ValueError,
                        "lengths of 4 bytes are needed, which together are "
                        "that of the data");
        PyMem_Free(lengths);
        return NULL;
    }
    return lengths;
}

/* write_blocks(data, lengths) -> addresses */
static PyObject *
transaction_write_blocks(PyObject *object, PyObject *args)
{
    opened_object *self = (opened_object *)object;
    Py_buffer data, packed;
    gd_py_call call;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*", &data, &packed)) {
        return NULL;
    }
    uint32_t *lengths = copy_lengths(&packed, data.len);
    size_t count = (size_t)packed.len / 4;
    gd_address *addresses = PyMem_Calloc(count + 1, sizeof *addresses);
    PyBuffer_Release(&packed);
    if (lengths != NULL && addresses == NULL) {
        PyErr_NoMemory();
    } else if (lengths != NULL && gd_py_call_opened(object, &call)) {
        gd_status s = gd_transaction_write_blocks(
            self->handle, data.buf, lengths, NULL, count, addresses,
            &call.err);
        if (gd_py_end(&call, s)) {
            result = gd_py_pack_addresses(addresses, count);
        }
    }
    PyMem_Free(lengths);
    PyMem_Free(addresses);
    PyBuffer_Release(&data);
    return result;
}

/* add(fingerprints, lengths, addresses) */
static PyObject *
transaction_add(PyObject *object, PyObject *args)
{
    opened_object *self = (opened_object *)object;
    gd_py_blocks list;
    gd_py_call call;
    PyObject *result = NULL;
    if (!gd_py_parse_blocks(args, &list)) {
        return NULL;
    }
    if (gd_py_call_opened(object, &call)) {
        gd_status s = gd_transaction_add(self->handle, list.fps, list.lengths,
                                         list.addresses, list.count, &call.err);
        result = gd_py_end_none(&call, s);
    }
    gd_py_free_blocks(&list);
    return result;
}

/* add_runs(image, from, to) -> bytes stored.  Image and transaction are of one
 * handle, or the engine refuses. */
static PyObject *
transaction_add_runs(PyObject *object, PyObject *args)
{
    opened_object *self = (opened_object *)object;
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    opened_object *source;
    unsigned long long from, to;
    uint64_t stored = 0;
    gd_py_call call;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "O!KK", state->image_type, &source, &from,
                          &to) ||
        !gd_py_enter_opened(source)) {
        return NULL;
    }
    if (gd_py_call_opened(object, &call)) {
        gd_status s = gd_transaction_add_runs(self->handle, source->handle,
                                              from, to, &stored, &call.err);
        result = gd_py_end_number(&call, s, stored);
    }
    gd_py_leave_opened(source);
    return result;
}

static PyObject *
append_zeros(PyObject *object, PyObject *args,
             gd_status (*append)(gd_transaction *, uint64_t, gd_error *))
{
    opened_object *self = (opened_object *)object;
    unsigned long long length;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "K", &length) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    return gd_py_end_none(&call, append(self->handle, length, &call.err));
}

static PyObject *
transaction_write_zeros(PyObject *object, PyObject *args)
{
    return append_zeros(object, args, gd_transaction_write_zeros);
}

static PyObject *
transaction_add_zeros(PyObject *object, PyObject *args)
{
    return append_zeros(object, args, gd_transaction_add_zeros);
}

/* keep() -> (new bytes, stored bytes) */
static PyObject *
transaction_keep(PyObject *object, PyObject *Py_UNUSED(unused))
{
    opened_object *self = (opened_object *)object;
    uint64_t new_bytes = 0, stored_bytes = 0;
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_status s = gd_transaction_sync(self->handle, &call.err);
    if (s == GD_OK) {
        gd_transaction_count(self->handle, &new_bytes, &stored_bytes);
    }
    return gd_py_end(&call, s)
               ? Py_BuildValue("(KK)", (unsigned long long)new_bytes,
                               (unsigned long long)stored_bytes)
               : NULL;
}

/* measure() -> stored bytes, found bytes */
static PyObject *
transaction_measure(PyObject *object, PyObject *Py_UNUSED(unused))
{
    opened_object *self = (opened_object *)object;
    uint64_t stored_bytes = 0, found_bytes = 0;
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_status s = gd_transaction_measure(self->handle, &stored_bytes,
                                         &found_bytes, &call.err);
    return gd_py_end_two(&call, s, stored_bytes, found_bytes);
}

/* kept_bytes() */
static PyObject *
transaction_kept_bytes(PyObject *object, PyObject *Py_UNUSED(unused))
{
    opened_object *self = (opened_object *)object;
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    return gd_py_end_number(&call, GD_OK,
                            gd_transaction_kept_bytes(self->handle));
}

/* credit(new bytes, stored bytes) */
static PyObject *
transaction_credit(PyObject *object, PyObject *args)
{
    opened_object *self = (opened_object *)object;
    unsigned long long new_bytes, stored_bytes;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "KK", &new_bytes, &stored_bytes) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_transaction_credit(self->handle, new_bytes, stored_bytes);
    return gd_py_end_none(&call, GD_OK);
}

static PyObject *
transaction_upload_id(PyObject *object, void *Py_UNUSED(unused))
{
    opened_object *self = (opened_object *)object;
    gd_error err;
    if (self->handle == NULL) {
        gd_fail(&err, GD_CLOSED, "%s", transaction_kind.closed_text);
        return gd_py_raise(object, &err);
    }
    return PyBytes_FromStringAndSize(
        (const char *)gd_transaction_upload_id(self->handle), GD_ID_SIZE);
}

static PyMethodDef transaction_methods[] = {
    {"write", transaction_write, METH_O, NULL},
    {"write_zeros", transaction_write_zeros, METH_VARARGS, NULL},
    {"find", transaction_find, METH_VARARGS, NULL},
    {"find_at", transaction_find_at, METH_VARARGS, NULL},
    {"add", transaction_add, METH_VARARGS, NULL},
    {"write_blocks", transaction_write_blocks, METH_VARARGS, NULL},
    {"add_runs", transaction_add_runs, METH_VARARGS, NULL},
    {"add_zeros", transaction_add_zeros, METH_VARARGS, NULL},
    {"keep", transaction_keep, METH_NOARGS, NULL},
    {"measure", transaction_measure, METH_NOARGS, NULL},
    {"kept_bytes", transaction_kept_bytes, METH_NOARGS, NULL},
    {"credit", transaction_credit, METH_VARARGS, NULL},
    {"set_dedup", transaction_set_dedup, METH_VARARGS, NULL},
    {"set_hash", transaction_set_hash, METH_VARARGS, NULL},
    {"begin_table", gd_py_begin_table, METH_VARARGS, NULL},
    {"add_derived", gd_py_add_derived, METH_VARARGS, NULL},
    {"copy_table", gd_py_copy_table, METH_VARARGS, NULL},
    {"finish", gd_py_finish_conversion, METH_NOARGS, NULL},
    {"open_finished", gd_py_open_finished, METH_NOARGS, NULL},
    {"exchange", gd_py_exchange_conversion, METH_NOARGS, NULL},
    {"commit", transaction_commit, METH_NOARGS, NULL},
    {"commit_open", transaction_commit_open, METH_NOARGS, NULL},
    {"abort", gd_py_opened_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef transaction_attributes[] = {
    {"upload_id", transaction_upload_id, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

const gd_py_type gd_py_transaction_type = {
    .name = "glance_dedup._engine.Transaction",
    .size = sizeof(opened_object),
    .dealloc = gd_py_opened_dealloc,
    .methods = transaction_methods,
    .attributes = transaction_attributes,
};
