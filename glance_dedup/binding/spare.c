/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spare.c - glance_dedup._engine: write_spares.
 */
#include "binding/binding.h"

#include "engine/base/coding.h"
#include "engine/format/address.h"
#include "engine/format/runs.h"
#include "engine/read/spare.h"

/* Converts packed addresses to C's form; free with PyMem_Free. */
static gd_address *
copy_addresses(const Py_buffer *view, size_t *count)
{
    if (view->len % 8 != 0) {
        PyErr_SetString(PyExc_ValueError, "addresses have 8 bytes each");
        return NULL;
    }
    *count = (size_t)view->len / 8;
    gd_address *addresses = PyMem_Calloc(*count + 1, sizeof *addresses);
    if (addresses == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < *count; i++) {
        uint64_t packed = gd_get64((const uint8_t *)view->buf + i * 8);
        if (packed >> GD_SLOT_BITS > GD_MAX_GROUP) {
            PyErr_SetString(PyExc_ValueError, "there is no such address");
            PyMem_Free(addresses);
            return NULL;
        }
        addresses[i] = gd_address_of(packed);
    }
    return addresses;
}

static PyObject *
engine_write_spares(PyObject *module, PyObject *args)
{
    const module_state *state = PyModule_GetState(module);
    PyObject *maintenance, *result = NULL;
    uint32_t number;
    Py_buffer view;
    size_t count = 0;
    uint64_t bytes = 0;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "O!O&y*", state->maintenance_type,
                          &maintenance, gd_py_to_u32, &number, &view)) {
        return NULL;
    }
    gd_address *addresses = copy_addresses(&view, &count);
    PyBuffer_Release(&view);
    if (addresses != NULL && gd_py_call_maintenance(maintenance, 1, &call)) {
        gd_repo *repo = ((maintenance_object *)maintenance)->owner->repo;
        gd_status s = gd_spare_write(repo, number, addresses, count, &bytes,
                                     &call.err);
        result = gd_py_end_number(&call, s, bytes);
    }
    PyMem_Free(addresses);
    return result;
}

PyMethodDef gd_py_spare_functions[] = {
    {"write_spares", engine_write_spares, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
