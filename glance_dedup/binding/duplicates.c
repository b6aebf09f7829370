/* SPDX-License-Identifier: Apache-2.0 */
/*
 * duplicates.c - glance_dedup._engine: the functions on pairs of addresses that
 * merging uses.
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/format/duplicates.h"
#include "engine/format/fingerprint.h"

/* Whether the buffer holds whole items; otherwise sets an exception. */
static int
whole_items(const Py_buffer *view, size_t size, const char *what)
{
    if ((size_t)view->len % size != 0) {
        PyErr_Format(PyExc_ValueError, "%s has %zu bytes", what, size);
        return 0;
    }
    return 1;
}

static gd_pairs
pairs_of(const Py_buffer *view)
{
    return (gd_pairs){view->buf, (size_t)view->len / GD_PAIR_SIZE};
}

static PyObject *
bytes_of(const uint8_t *data, size_t count, size_t size)
{
    return PyBytes_FromStringAndSize((const char *)data,
                                     (Py_ssize_t)(count * size));
}

static PyObject *
raise_in(PyObject *module, const gd_error *err)
{
    return gd_py_raise_in(PyModule_GetState(module), err);
}

static PyObject *
engine_pair_addresses(PyObject *module, PyObject *args)
{
    Py_buffer view;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*", &view)) {
        return NULL;
    }
    if (whole_items(&view, GD_PAIR_SIZE, "a pair")) {
        uint8_t *out = PyMem_Malloc((size_t)view.len + 1);
        if (out == NULL) {
            PyErr_NoMemory();
        } else {
            size_t count;
            gd_error err;
            gd_status status = gd_pairs_addresses(
                gd_env_posix(), pairs_of(&view), out, &count, &err);
            result = status == GD_OK ? bytes_of(out, count, GD_ADDRESS_SIZE)
                                     : raise_in(module, &err);
        }
        PyMem_Free(out);
    }
    PyBuffer_Release(&view);
    return result;
}

static PyObject *
engine_pairs_sort(PyObject *module, PyObject *args)
{
    Py_buffer view;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*", &view)) {
        return NULL;
    }
    if (whole_items(&view, GD_PAIR_SIZE, "a pair")) {
        uint8_t *out = PyMem_Malloc((size_t)view.len + 1);
        if (out == NULL) {
            PyErr_NoMemory();
        } else {
            size_t count = (size_t)view.len / GD_PAIR_SIZE;
            gd_error err;
            memcpy(out, view.buf, (size_t)view.len);
            result = gd_pairs_sort(gd_env_posix(), out, &count, &err) == GD_OK
                         ? bytes_of(out, count, GD_PAIR_SIZE)
                         : raise_in(module, &err);
        }
        PyMem_Free(out);
    }
    PyBuffer_Release(&view);
    return result;
}

static PyObject *
engine_replacements_sort(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer view;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*", &view)) {
        return NULL;
    }
    if (whole_items(&view, GD_REPLACEMENT_SIZE, "a replacement")) {
        uint8_t *out = PyMem_Malloc((size_t)view.len + 1);
        if (out == NULL) {
            PyErr_NoMemory();
        } else {
            memcpy(out, view.buf, (size_t)view.len);
            result = bytes_of(
                out,
                gd_replacements_sort(
                    out, (size_t)view.len / GD_REPLACEMENT_SIZE),
                GD_REPLACEMENT_SIZE);
        }
        PyMem_Free(out);
    }
    PyBuffer_Release(&view);
    return result;
}

static PyObject *
engine_pairs_without(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer a, b;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*", &a, &b)) {
        return NULL;
    }
    if (whole_items(&a, GD_PAIR_SIZE, "a pair") &&
        whole_items(&b, GD_PAIR_SIZE, "a pair")) {
        uint8_t *out = PyMem_Malloc((size_t)a.len + 1);
        if (out == NULL) {
            PyErr_NoMemory();
        } else {
            result = bytes_of(
                out, gd_pairs_without(pairs_of(&a), pairs_of(&b), out),
                GD_PAIR_SIZE);
        }
        PyMem_Free(out);
    }
    PyBuffer_Release(&b);
    PyBuffer_Release(&a);
    return result;
}

static PyObject *
engine_pairs_named(PyObject *module, PyObject *args)
{
    Py_buffer pairs, view;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*", &pairs, &view)) {
        return NULL;
    }
    if (whole_items(&pairs, GD_PAIR_SIZE, "a pair") &&
        whole_items(&view, GD_INDEX_RECORD, "an index record")) {
        gd_records records = {view.buf,
                              (size_t)view.len / GD_INDEX_RECORD};
        size_t count;
        uint8_t *out = PyMem_Malloc((size_t)pairs.len + 1);
        if (out == NULL) {
            PyErr_NoMemory();
        } else {
            gd_error err;
            gd_status status =
                gd_pairs_named(gd_env_posix(), pairs_of(&pairs), records, out,
                               &count, &err);
            result = status == GD_OK ? bytes_of(out, count, GD_PAIR_SIZE)
                                     : raise_in(module, &err);
        }
        PyMem_Free(out);
    }
    PyBuffer_Release(&view);
    PyBuffer_Release(&pairs);
    return result;
}

/* pick(items, size, first, addresses): takes a group's items, from slot `first`
 * on, and returns those of some addresses. */
static PyObject *
engine_pick(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer items, addresses;
    uint32_t size, first;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*O&O&y*", &items, gd_py_to_u32, &size,
                          gd_py_to_u32, &first, &addresses)) {
        return NULL;
    }
    size_t count = (size_t)addresses.len / GD_ADDRESS_SIZE;
    if (size >= 1 && size <= GD_LISTED_ENTRY &&
        whole_items(&addresses, GD_ADDRESS_SIZE, "an address") &&
        whole_items(&items, size, "an item")) {
        result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * size));
    } else if (PyErr_Occurred() == NULL) {
        PyErr_SetString(PyExc_ValueError, "there are no such items");
    }
    /* Nobody else has seen the bytes object yet. */
    char *out = result == NULL ? NULL : PyBytes_AsString(result);
    for (size_t i = 0; result != NULL && i < count; i++) {
        const uint8_t *address =
            (const uint8_t *)addresses.buf + i * GD_ADDRESS_SIZE;
        size_t slot = gd_get64(address) & (GD_MAX_SLOTS - 1);
        if (slot < first || slot - first >= (size_t)items.len / size) {
            PyErr_SetString(PyExc_ValueError, "a slot is not in the listing");
            Py_CLEAR(result);
        } else {
            memcpy(out + i * size,
                   (const char *)items.buf + (slot - first) * size, size);
        }
    }
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&items);
    return result;
}

/* The arguments and results of a function on pairs and their blocks. */
typedef struct pair_call {
    Py_buffer pairs, addresses, entries, counts;
    gd_blocks blocks;
    uint8_t *first, *second; /* room for the results */
} pair_call;

static int
begin_pair_call(pair_call *call, PyObject *args, int counted)
{
    memset(call, 0, sizeof *call);
    if (!PyArg_ParseTuple(args, counted ? "y*y*y*y*" : "y*y*y*", &call->pairs,
                          &call->addresses, &call->entries, &call->counts)) {
        return 0;
    }
    size_t count = (size_t)call->addresses.len / GD_ADDRESS_SIZE;
    call->blocks = (gd_blocks){call->addresses.buf, call->entries.buf,
                               call->counts.buf, count};
    if (!whole_items(&call->pairs, GD_PAIR_SIZE, "a pair")) {
        return 0;
    }
    if ((size_t)call->addresses.len % GD_ADDRESS_SIZE != 0 ||
        (size_t)call->entries.len != count * GD_LISTED_ENTRY ||
        (counted && (size_t)call->counts.len != count * 4)) {
        PyErr_SetString(PyExc_ValueError,
                        "the addresses and what is known of them differ in "
                        "number");
        return 0;
    }
    /* At most two replacements result from each pair. */
    size_t room = (size_t)call->pairs.len * 4 + 1;
    call->first = PyMem_Malloc(room);
    call->second = PyMem_Malloc(room);
    if (call->first == NULL || call->second == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    return 1;
}

static void
end_pair_call(pair_call *call)
{
    PyMem_Free(call->first);
    PyMem_Free(call->second);
    PyBuffer_Release(&call->counts);
    PyBuffer_Release(&call->entries);
    PyBuffer_Release(&call->addresses);
    PyBuffer_Release(&call->pairs);
}

static PyObject *
missing_block(void)
{
    PyErr_SetString(PyExc_ValueError,
                    "a pair names a block of which nothing is known");
    return NULL;
}

static PyObject *
two_results(const pair_call *call, size_t first, size_t second,
            size_t second_size)
{
    return Py_BuildValue(
        "(y#y#)", (const char *)call->first,
        (Py_ssize_t)(first * GD_PAIR_SIZE), (const char *)call->second,
        (Py_ssize_t)(second * second_size));
}

static PyObject *
engine_pairs_judge(PyObject *module, PyObject *args)
{
    (void)module;
    pair_call call;
    size_t equal, stale;
    PyObject *result = NULL;
    if (begin_pair_call(&call, args, 0)) {
        result = gd_pairs_judge(pairs_of(&call.pairs), &call.blocks,
                                call.first, &equal, call.second, &stale)
                     ? two_results(&call, equal, stale, GD_PAIR_SIZE)
                     : missing_block();
    }
    end_pair_call(&call);
    return result;
}

static PyObject *
engine_pairs_revise(PyObject *module, PyObject *args)
{
    (void)module;
    pair_call call;
    size_t gone, records;
    PyObject *result = NULL;
    if (begin_pair_call(&call, args, 0)) {
        result = gd_pairs_revise(pairs_of(&call.pairs), &call.blocks,
                                 call.first, &gone, call.second, &records)
                     ? two_results(&call, gone, records, GD_INDEX_RECORD)
                     : missing_block();
    }
    end_pair_call(&call);
    return result;
}

static PyObject *
engine_pairs_choose(PyObject *module, PyObject *args)
{
    (void)module;
    pair_call call;
    size_t count;
    PyObject *result = NULL;
    if (begin_pair_call(&call, args, 1)) {
        result = gd_pairs_choose(pairs_of(&call.pairs), &call.blocks,
                                 call.first, &count)
                     ? bytes_of(call.first, count, GD_REPLACEMENT_SIZE)
                     : missing_block();
    }
    end_pair_call(&call);
    return result;
}

PyMethodDef gd_py_duplicates_functions[] = {
    {"pair_addresses", engine_pair_addresses, METH_VARARGS, NULL},
    {"pick", engine_pick, METH_VARARGS, NULL},
    {"pairs_sort", engine_pairs_sort, METH_VARARGS, NULL},
    {"pairs_without", engine_pairs_without, METH_VARARGS, NULL},
    {"pairs_named", engine_pairs_named, METH_VARARGS, NULL},
    {"pairs_judge", engine_pairs_judge, METH_VARARGS, NULL},
    {"pairs_revise", engine_pairs_revise, METH_VARARGS, NULL},
    {"pairs_choose", engine_pairs_choose, METH_VARARGS, NULL},
    {"replacements_sort", engine_replacements_sort, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
