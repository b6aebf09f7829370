/* SPDX-License-Identifier: Apache-2.0 */
/*
 * runs.c - the arithmetic on runs: counting them, comparing them, and judging a
 * group's slots by their counts.
 */
#include "binding/binding.h"

#include "engine/format/index.h"
#include "engine/format/runs.h"
#include "engine/maintenance/group_stats.h"

/* Returns how many runs the buffer holds; -1 with an exception set on error. */
static Py_ssize_t
count_runs(const Py_buffer *view)
{
    if (view->len % GD_RUN_SIZE != 0) {
        PyErr_Format(PyExc_ValueError, "runs have %d bytes each",
                     (int)GD_RUN_SIZE);
        return -1;
    }
    return view->len / GD_RUN_SIZE;
}

static PyObject *
engine_add_runs(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer counts, runs;
    uint32_t group, chunk;
    int delta;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "w*O&O&y*i", &counts, gd_py_to_u32, &group,
                          gd_py_to_u32, &chunk, &runs, &delta)) {
        return NULL;
    }
    Py_ssize_t count = count_runs(&runs);
    if (count >= 0 && counts.len != GD_COUNTERS_SIZE) {
        PyErr_Format(PyExc_ValueError, "counts: %d bytes are needed",
                     (int)GD_COUNTERS_SIZE);
    } else if (count >= 0 && delta != 1 && delta != -1) {
        PyErr_Format(PyExc_ValueError, "delta is 1 or -1, not %d", delta);
    } else if (count >= 0 &&
               !gd_runs_add(counts.buf, group, chunk, runs.buf, (size_t)count,
                            delta)) {
        PyErr_Format(PyExc_ValueError,
                     "a count of group %u would go below zero", group);
    } else if (count >= 0) {
        result = Py_None;
        Py_INCREF(result);
    }
    PyBuffer_Release(&counts);
    PyBuffer_Release(&runs);
    return result;
}

static PyObject *
engine_shared_blocks(PyObject *module, PyObject *args)
{
    Py_buffer a, b;
    uint64_t shared = 0;
    PyObject *result = NULL;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "y*y*", &a, &b)) {
        return NULL;
    }
    Py_ssize_t a_count = count_runs(&a);
    Py_ssize_t b_count = a_count < 0 ? -1 : count_runs(&b);
    if (b_count >= 0) {
        Py_BEGIN_ALLOW_THREADS /* it sorts */
        s = gd_runs_shared(gd_env_posix(), a.buf, (size_t)a_count, b.buf,
                           (size_t)b_count, &shared, &err);
        Py_END_ALLOW_THREADS
        result = s == GD_OK
                     ? PyLong_FromUnsignedLongLong(shared)
                     : gd_py_raise_in(PyModule_GetState(module), &err);
    }
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
    return result;
}

static PyObject *
engine_names_any(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer runs, addresses;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*", &runs, &addresses)) {
        return NULL;
    }
    Py_ssize_t count = count_runs(&runs);
    if (count >= 0 && addresses.len % GD_ADDRESS_SIZE != 0) {
        PyErr_Format(PyExc_ValueError, "addresses have %d bytes each",
                     (int)GD_ADDRESS_SIZE);
    } else if (count >= 0) {
        result = PyBool_FromLong(gd_runs_name_any(
            runs.buf, (size_t)count, addresses.buf,
            (size_t)addresses.len / GD_ADDRESS_SIZE));
    }
    PyBuffer_Release(&runs);
    PyBuffer_Release(&addresses);
    return result;
}

static PyObject *
slots_judged(const Py_buffer *entries, const Py_buffer *counts,
             uint32_t published)
{
    size_t count = (size_t)counts->len / 4;
    gd_slot_use use;
    if (counts->len % 4 != 0 ||
        (size_t)entries->len != count * GD_LISTED_ENTRY) {
        PyErr_SetString(PyExc_ValueError,
                        "the entries and their counts differ in number");
        return NULL;
    }
    uint8_t *unused = PyMem_Malloc(4 * count + 1);
    if (unused == NULL) {
        return PyErr_NoMemory();
    }
    gd_group_stats_judge_slots(entries->buf, counts->buf, count, published,
                               &use, unused);
    PyObject *result = Py_BuildValue(
        "(NIIy#K)",
        use.is_lost ? PyLong_FromUnsignedLong(use.lost) : Py_NewRef(Py_None),
        use.in_use, use.freed, (const char *)unused,
        (Py_ssize_t)(4 * (size_t)use.unused),
        (unsigned long long)use.unused_bytes);
    PyMem_Free(unused);
    return result;
}

static PyObject *
engine_slots_judge(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer entries, counts;
    uint32_t published;
    if (!PyArg_ParseTuple(args, "y*y*O&", &entries, &counts, gd_py_to_u32,
                          &published)) {
        return NULL;
    }
    PyObject *result = slots_judged(&entries, &counts, published);
    PyBuffer_Release(&entries);
    PyBuffer_Release(&counts);
    return result;
}

PyMethodDef gd_py_run_functions[] = {
    {"add_runs", engine_add_runs, METH_VARARGS, NULL},
    {"shared_blocks", engine_shared_blocks, METH_VARARGS, NULL},
    {"names_any", engine_names_any, METH_VARARGS, NULL},
    {"slots_judge", engine_slots_judge, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
