/*
 * _enginetransaction.c - glance_dedup._engine.Transaction: an image on its way
 * in, as bytes or as blocks found by their fingerprints.
 *
 * Lifetimes: a Transaction keeps its Repository alive, and the handle open
 * until it ends.  Threads: several may use one; its lock lets one in at a
 * time.  In a forked child it refuses, and leaves the parent's alone.
 */
#include "_engine.h"

#include <string.h>

#include "engine/coding.h"
#include "engine/runs.h"
#include "engine/transaction.h"

typedef struct transaction_object {
    PyObject_HEAD
    repository_object *owner; /* entered for as long as transaction is set */
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

/* Every use of the transaction stands between enter and leave, of which enter
 * may wait: REQUIRES the GIL released.  A forked child does not take the lock:
 * another thread may have had it at the time of the fork. */
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
        return; /* a forked child leaves the parent's alone */
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
transaction_commit(PyObject *object, PyObject *unused)
{
    (void)unused;
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
    if (linked) {
        end_transaction(self);
    }
    if (entered) {
        leave_transaction(self);
    }
    return s == GD_OK ? gd_py_header_dict(&header) : gd_py_raise(object, &err);
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

/* Packed arrays of blocks, as C has them. */
typedef struct block_list {
    size_t count;
    gd_fingerprint *fps;
    uint32_t *lengths;
    gd_address *addresses;
} block_list;

static void
free_blocks(block_list *list)
{
    PyMem_Free(list->fps);
    PyMem_Free(list->lengths);
    PyMem_Free(list->addresses);
}

/* addresses may be NULL: then there is only room for them. */
static int
copy_blocks(const Py_buffer *fps, const Py_buffer *lengths,
            const Py_buffer *addresses, block_list *list)
{
    size_t count = (size_t)lengths->len / 4;
    memset(list, 0, sizeof *list);
    if ((size_t)fps->len != count * GD_FINGERPRINT_SIZE ||
        (size_t)lengths->len != count * 4 ||
        (addresses != NULL && (size_t)addresses->len != count * 8)) {
        PyErr_SetString(PyExc_ValueError,
                        "fingerprints of 32 bytes, lengths of 4 and addresses "
                        "of 8 are needed, as many of each");
        return 0;
    }
    list->count = count;
    list->fps = PyMem_Calloc(count + 1, sizeof *list->fps);
    list->lengths = PyMem_Calloc(count + 1, sizeof *list->lengths);
    list->addresses = PyMem_Calloc(count + 1, sizeof *list->addresses);
    if (list->fps == NULL || list->lengths == NULL ||
        list->addresses == NULL) {
        free_blocks(list);
        PyErr_NoMemory();
        return 0;
    }
    memcpy(list->fps, fps->buf, (size_t)fps->len);
    for (size_t i = 0; i < count; i++) {
        list->lengths[i] = gd_get32((const uint8_t *)lengths->buf + i * 4);
        if (addresses != NULL) {
            uint64_t packed =
                gd_get64((const uint8_t *)addresses->buf + i * 8);
            uint64_t group = packed >> GD_SLOT_BITS;
            /* One that is too large is none that was ever found. */
            list->addresses[i] = (gd_address){
                group > GD_MAX_GROUP ? 0 : (uint32_t)group,
                (uint32_t)(packed & (GD_MAX_SLOTS - 1))};
        }
    }
    return 1;
}

static PyObject *
pack_addresses(const block_list *list)
{
    PyObject *result =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(list->count * 8));
    if (result != NULL) {
        uint8_t *out = (uint8_t *)PyBytes_AsString(result);
        for (size_t i = 0; i < list->count; i++) {
            gd_put64(out + i * 8,
                     (uint64_t)list->addresses[i].group << GD_SLOT_BITS |
                         list->addresses[i].slot);
        }
    }
    return result;
}

/* find(fingerprints, lengths) -> addresses */
static PyObject *
transaction_find(PyObject *object, PyObject *args)
{
    transaction_object *self = (transaction_object *)object;
    Py_buffer fps, lengths;
    block_list list;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "y*y*", &fps, &lengths)) {
        return NULL;
    }
    int copied = copy_blocks(&fps, &lengths, NULL, &list);
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
        s == GD_OK ? pack_addresses(&list) : gd_py_raise(object, &err);
    free_blocks(&list);
    return result;
}

/* As they come packed; NULL, and an error, if they are not of so many bytes. */
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

/* write_blocks(data, lengths) */
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
    PyBuffer_Release(&packed);
    if (lengths == NULL) {
        PyBuffer_Release(&data);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = enter_transaction(self, &err);
    if (s == GD_OK) {
        s = gd_transaction_write_blocks(self->transaction, data.buf, lengths,
                                        count, &err);
        leave_transaction(self);
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(lengths);
    PyBuffer_Release(&data);
    return gd_py_none(object, s, &err);
}

/* add(fingerprints, lengths, addresses) */
static PyObject *
transaction_add(PyObject *object, PyObject *args)
{
    transaction_object *self = (transaction_object *)object;
    Py_buffer fps, lengths, addresses;
    block_list list;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "y*y*y*", &fps, &lengths, &addresses)) {
        return NULL;
    }
    int copied = copy_blocks(&fps, &lengths, &addresses, &list);
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
    free_blocks(&list);
    return gd_py_none(object, s, &err);
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
    {"add_zeros", transaction_add_zeros, METH_VARARGS, NULL},
    {"keep", transaction_keep, METH_NOARGS, NULL},
    {"commit", transaction_commit, METH_NOARGS, NULL},
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
