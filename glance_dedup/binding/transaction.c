/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transaction.c - glance_dedup._engine.Transaction: an image that is being
 * stored, as bytes or as blocks found by their fingerprints.
 *
 * Lifetimes: a Transaction keeps its Repository alive, and the handle open
 * until it ends.  Threads: several may use one; its lock admits one at a time.
 * In a forked child it refuses, and leaves the parent's transaction alone.
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/base/coding.h"
#include "engine/format/runs.h"
#include "engine/write/transaction.h"

typedef struct transaction_object {
    PyObject_HEAD
    repository_object *owner; /* entered while transaction is set */
    gd_transaction *transaction;
    PyThread_type_lock lock; /* one thread in the transaction at a time */
} transaction_object;

PyObject *
gd_py_begin(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    const char *image_id, *project;
    const char *id = (const char *)gd_global_scope.id;
    Py_ssize_t id_length = GD_SCOPE_SIZE;
    gd_scope scope;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "ss|y#", &image_id, &project, &id,
                          &id_length) ||
        !gd_py_copy_id("scope", id, id_length, scope.id) ||
        !gd_py_enter_repository(self)) {
        return NULL;
    }
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    transaction_object *result = gd_py_new_object(state->transaction_type);
    if (result == NULL) {
        gd_py_leave_repository(self);
        return NULL;
    }
    Py_INCREF(object);
    result->owner = self;
    result->lock = PyThread_allocate_lock();
    if (result->lock == NULL) {
        s = gd_fail(&err, GD_NOMEM, "no memory for a lock");
    } else {
        Py_BEGIN_ALLOW_THREADS
        s = gd_transaction_begin(self->repo, image_id, project, &scope,
                                 &result->transaction, &err);
        Py_END_ALLOW_THREADS
    }
    if (s != GD_OK) {
        result->transaction = NULL;
        gd_py_leave_repository(self);
        gd_py_raise(object, &err);
        Py_DECREF(result);
        return NULL;
    }
    return (PyObject *)result;
}

/* REQUIRES: the lock, or the GIL. */
static gd_status
check_open(const transaction_object *self, gd_error *err)
{
    return self->transaction != NULL
               ? GD_OK
               : gd_fail(err, GD_CLOSED, "the transaction has ended");
}

/* Every use of the transaction must lie between enter and leave.  Enter may
 * wait, so it REQUIRES the GIL released.  A forked child does not take the
 * lock: another thread may have held it at the time of the fork. */
static gd_status
enter_transaction(transaction_object *self, gd_error *err)
{
    gd_status s = gd_py_check_process(self->owner, err);
    if (s != GD_OK) {
        return s;
    }
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    s = check_open(self, err);
    if (s != GD_OK) {
        PyThread_release_lock(self->lock);
    }
    return s;
}

static void
leave_transaction(transaction_object *self)
{
    PyThread_release_lock(self->lock);
}

/* REQUIRES: the GIL, and the lock or the last reference. */
static void
end_transaction(transaction_object *self)
{
    gd_transaction *transaction = self->transaction;
    if (transaction == NULL ||
        gd_py_check_process(self->owner, NULL) != GD_OK) {
        return; /* a forked child leaves the parent's transaction alone */
    }
    self->transaction = NULL;
    Py_BEGIN_ALLOW_THREADS
    gd_transaction_end(transaction);
    Py_END_ALLOW_THREADS
    gd_py_leave_repository(self->owner);
}

static PyObject *
transaction_write(PyObject *object, PyObject *data)
{
    transaction_object *self = (transaction_object *)object;
    Py_buffer view;
    gd_error err;
    gd_status s;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = enter_transaction(self, &err);
    if (s == GD_OK) {
        s = gd_transaction_write(self->transaction, view.buf,
                                 (size_t)view.len, &err);
        leave_transaction(self);
    }
    Py_END_ALLOW_THREADS
    Py_ssize_t length = view.len;
    PyBuffer_Release(&view);
    return s == GD_OK ? PyLong_FromSsize_t(length) : gd_py_raise(object, &err);
}

static PyObject *
transaction_set_hash(PyObject *object, PyObject *args)
{
    transaction_object *self = (transaction_object *)object;
    const char *name;
    Py_buffer value;
    gd_error err;
    if (!PyArg_ParseTuple(args, "sy*", &name, &value)) {
        return NULL;
    }
    gd_status s;
    Py_BEGIN_ALLOW_THREADS
    s = enter_transaction(self, &err);
    if (s == GD_OK) {
        s = gd_transaction_set_hash(self->transaction, name, value.buf,
                                    (size_t)value.len, &err);
        leave_transaction(self);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&value);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    Py_RETURN_NONE;
}

/* The result of a commit.  It is what the commit was told of the image, or the
 * image, opened while the transaction still holds its groups' shared locks.  So
 * nobody can delete it in between (I12). */
static PyObject *
commit(PyObject *object, bool open)
{
    transaction_object *self = (transaction_object *)object;
    gd_recipe_header header;
    gd_error err;
    gd_status s;
    bool entered, linked = false;
    Py_BEGIN_ALLOW_THREADS
    s = enter_transaction(self, &err);
    entered = s == GD_OK;
    if (entered) {
        s = gd_transaction_commit(self->transaction, &header, &linked, &err);
    }
    Py_END_ALLOW_THREADS
    PyObject *result =
        s != GD_OK ? gd_py_raise(object, &err)
        : open     ? PyObject_CallMethod((PyObject *)self->owner, "open_image",
                                         "s", header.image_id)
                   : gd_py_header_dict(&header);
    if (linked) {
        end_transaction(self);
    }
    if (entered) {
        leave_transaction(self);
    }
    return result;
}

static PyObject *
transaction_commit(PyObject *object, PyObject *unused)
{
    (void)unused;
    return commit(object, false);
}

static PyObject *
transaction_commit_open(PyObject *object, PyObject *unused)
{
    (void)unused;
    return commit(object, true);
}

static PyObject *
transaction_abort(PyObject *object, PyObject *unused)
{
    (void)unused;
    transaction_object *self = (transaction_object *)object;
    gd_status s;
    Py_BEGIN_ALLOW_THREADS
    s = enter_transaction(self, NULL);
    Py_END_ALLOW_THREADS
    if (s == GD_OK) {
        end_transaction(self);
        leave_transaction(self);
    }
    Py_RETURN_NONE;
}

/* ---- blocks by their fingerprints ---- */

/* find(fingerprints, lengths) -> addresses */
static PyObject *
transaction_find(PyObject *object, PyObject *args)
{
    transaction_object *self = (transaction_object *)object;
    Py_buffer fps, lengths;
    gd_py_blocks list;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "y*y*", &fps, &lengths)) {
        return NULL;
    }
    int copied = gd_py_copy_blocks(&fps, &lengths, NULL, &list);
    PyBuffer_Release(&fps);
    PyBuffer_Release(&lengths);
    if (!copied) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = enter_transaction(self, &err);
    if (s == GD_OK) {
        s = gd_transaction_find(self->transaction, list.fps, list.lengths,
                                list.count, list.addresses, &err);
        leave_transaction(self);
    }
    Py_END_ALLOW_THREADS
    PyObject *result =
        s == GD_OK ? gd_py_pack_addresses(list.addresses, list.count)
                   : gd_py_raise(object, &err);
    gd_py_free_blocks(&list);
    return result;
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
    transaction_object *self = (transaction_object *)object;
    Py_buffer data, packed;
    gd_error err;
    gd_status s = GD_OK;
    if (!PyArg_ParseTuple(args, "y*y*", &data, &packed)) {
        return NULL;
    }
    uint32_t *lengths = copy_lengths(&packed, data.len);
    size_t count = (size_t)packed.len / 4;
    gd_address *addresses = PyMem_Calloc(count + 1, sizeof *addresses);
    PyBuffer_Release(&packed);
    if (lengths == NULL || addresses == NULL) {
        PyMem_Free(lengths);
        PyMem_Free(addresses);
        PyBuffer_Release(&data);
        return PyErr_Occurred() != NULL ? NULL : PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    s = enter_transaction(self, &err);
    if (s == GD_OK) {
        s = gd_transaction_write_blocks(self->transaction, data.buf, lengths,
                                        count, addresses, &err);
        leave_transaction(self);
    }
    Py_END_ALLOW_THREADS
    PyObject *result = s == GD_OK ? gd_py_pack_addresses(addresses, count)
                                  : gd_py_raise(object, &err);
    PyMem_Free(lengths);
    PyMem_Free(addresses);
    PyBuffer_Release(&data);
    return result;
}

/* add(fingerprints, lengths, addresses) */
static PyObject *
transaction_add(PyObject *object, PyObject *args)
{
    transaction_object *self = (transaction_object *)object;
    Py_buffer fps, lengths, addresses;
    gd_py_blocks list;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "y*y*y*", &fps, &lengths, &addresses)) {
        return NULL;
    }
    int copied = gd_py_copy_blocks(&fps, &lengths, &addresses, &list);
    PyBuffer_Release(&fps);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&addresses);
    if (!copied) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = enter_transaction(self, &err);
    if (s == GD_OK) {
        s = gd_transaction_add(self->transaction, list.fps, list.lengths,
                               list.addresses, list.count, &err);
        leave_transaction(self);
    }
    Py_END_ALLOW_THREADS
    gd_py_free_blocks(&list);
    return gd_py_none(object, s, &err);
}

/* add_runs(image, from, to) -> bytes stored.  Image and transaction are of one
 * handle, or the engine refuses. */
static PyObject *
transaction_add_runs(PyObject *object, PyObject *args)
{
    transaction_object *self = (transaction_object *)object;
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    PyObject *source;
    unsigned long long from, to;
    uint64_t stored = 0;
    gd_image *image;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "O!KK", state->image_type, &source, &from,
                          &to) ||
        !gd_py_enter_image(source, &image)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = enter_transaction(self, &err);
    if (s == GD_OK) {
        s = gd_transaction_add_runs(self->transaction, image, from, to,
                                    &stored, &err);
        leave_transaction(self);
    }
    Py_END_ALLOW_THREADS
    gd_py_leave_image(source);
    return s == GD_OK ? PyLong_FromUnsignedLongLong(stored)
                      : gd_py_raise(object, &err);
}

static PyObject *
transaction_add_zeros(PyObject *object, PyObject *args)
{
    transaction_object *self = (transaction_object *)object;
    unsigned long long length;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "K", &length)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = enter_transaction(self, &err);
    if (s == GD_OK) {
        s = gd_transaction_add_zeros(self->transaction, length, &err);
        leave_transaction(self);
    }
    Py_END_ALLOW_THREADS
    return gd_py_none(object, s, &err);
}

static PyObject *
transaction_keep(PyObject *object, PyObject *unused)
{
    (void)unused;
    transaction_object *self = (transaction_object *)object;
    gd_error err;
    gd_status s;
    Py_BEGIN_ALLOW_THREADS
    s = enter_transaction(self, &err);
    if (s == GD_OK) {
        s = gd_transaction_keep(self->transaction, &err);
        leave_transaction(self);
    }
    Py_END_ALLOW_THREADS
    return gd_py_none(object, s, &err);
}

static PyObject *
transaction_upload_id(PyObject *object, void *unused)
{
    (void)unused;
    transaction_object *self = (transaction_object *)object;
    gd_error err;
    if (check_open(self, &err) != GD_OK) {
        return gd_py_raise(object, &err);
    }
    return PyBytes_FromStringAndSize(
        (const char *)gd_transaction_upload_id(self->transaction), GD_ID_SIZE);
}

static void
transaction_dealloc(PyObject *object)
{
    transaction_object *self = (transaction_object *)object;
    if (self->owner != NULL) {
        end_transaction(self);
    }
    if (self->lock != NULL) {
        PyThread_free_lock(self->lock);
    }
    Py_XDECREF((PyObject *)self->owner);
    gd_py_free_object(object);
}

static PyMethodDef transaction_methods[] = {
    {"write", transaction_write, METH_O, NULL},
    {"find", transaction_find, METH_VARARGS, NULL},
    {"add", transaction_add, METH_VARARGS, NULL},
    {"write_blocks", transaction_write_blocks, METH_VARARGS, NULL},
    {"add_runs", transaction_add_runs, METH_VARARGS, NULL},
    {"add_zeros", transaction_add_zeros, METH_VARARGS, NULL},
    {"keep", transaction_keep, METH_NOARGS, NULL},
    {"set_hash", transaction_set_hash, METH_VARARGS, NULL},
    {"commit", transaction_commit, METH_NOARGS, NULL},
    {"commit_open", transaction_commit_open, METH_NOARGS, NULL},
    {"abort", transaction_abort, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef transaction_attributes[] = {
    {"upload_id", transaction_upload_id, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot transaction_slots[] = {
    {Py_tp_dealloc, transaction_dealloc},
    {Py_tp_methods, transaction_methods},
    {Py_tp_getset, transaction_attributes},
    {0, NULL},
};

PyType_Spec gd_py_transaction_spec = {
    .name = "glance_dedup._engine.Transaction",
    .basicsize = sizeof(transaction_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = transaction_slots,
};
