/* SPDX-License-Identifier: Apache-2.0 */
/*
 * batch.c - glance_dedup._engine: the functions of batch backups on what the
 * ranks send each other.
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/format/requests.h"

enum { MAX_WAYS = 1 << 20 };

/* Returns how many whole items the buffer holds; otherwise sets an exception
 * and returns 0. */
static int
count_items(const Py_buffer *view, size_t size, const char *what,
            size_t *count)
{
    *count = (size_t)view->len / size;
    if ((size_t)view->len % size != 0) {
        PyErr_Format(PyExc_ValueError, "%s has %zu bytes", what, size);
        return 0;
    }
    return 1;
}

/* requests_of(scanned, requester) -> records */
static PyObject *
engine_requests_of(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer scanned;
    unsigned long long requester;
    size_t count, used;
    uint8_t *out = NULL;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*K", &scanned, &requester)) {
        return NULL;
    }
    if (count_items(&scanned, GD_SCANNED_SIZE, "a scanned block", &count)) {
        out = PyMem_Malloc(count * GD_INDEX_RECORD + 1);
        if (out == NULL) {
            PyErr_NoMemory();
        }
    }
    if (out != NULL) {
        used = gd_requests_make(scanned.buf, count, requester, out);
        result = PyBytes_FromStringAndSize(
            (const char *)out, (Py_ssize_t)(used * GD_INDEX_RECORD));
    }
    PyMem_Free(out);
    PyBuffer_Release(&scanned);
    return result;
}

static PyObject *
list_of_parts(const uint8_t *records, const size_t *counts, size_t ways)
{
    PyObject *list = PyList_New((Py_ssize_t)ways);
    for (size_t i = 0; list != NULL && i < ways; i++) {
        size_t length = counts[i] * GD_INDEX_RECORD;
        gd_py_set_item(&list, i,
                       PyBytes_FromStringAndSize((const char *)records,
                                                 (Py_ssize_t)length));
        records += length;
    }
    return list;
}

static PyObject *
split(const Py_buffer *records, uint64_t parts, uint64_t first, size_t ways)
{
    size_t count;
    PyObject *result = NULL;
    if (!count_items(records, GD_INDEX_RECORD, "a record", &count)) {
        return NULL;
    }
    size_t *counts = PyMem_Calloc(ways, sizeof *counts);
    uint8_t *out = PyMem_Malloc((size_t)records->len + 1);
    if (counts == NULL || out == NULL) {
        PyErr_NoMemory();
    } else if (gd_requests_split(records->buf, count, parts, first, ways,
                                 counts, out)) {
         result = list_of_parts(out, counts, ways);
     } else {
         PyErr_SetString(PyExc_ValueError, "a record is of another part");
     }
    PyMem_Free(out);
    PyMem_Free(counts);
    return result;
}

/* split_records(records, parts, first, ways) -> list of records */
static PyObject *
engine_split_records(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer records;
    unsigned long long parts, first;
    uint32_t ways;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*KKO&", &records, &parts, &first,
                          gd_py_to_u32, &ways)) {
        return NULL;
    }
    if (ways == 0 || ways > MAX_WAYS || ways > parts ||
        first > parts - ways) {
        PyErr_SetString(PyExc_ValueError, "there are no such parts");
    } else {
        result = split(&records, parts, first, ways);
    }
    PyBuffer_Release(&records);
    return result;
}

gd_item *
gd_py_sorted_items(const Py_buffer *records, size_t *count, gd_item **room)
{
    *room = NULL;
    if (!count_items(records, GD_INDEX_RECORD, "a record", count)) {
        return NULL;
    }
    gd_item *items = PyMem_Calloc(*count + 1, 2 * sizeof *items);
    if (items == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    const uint8_t *at = records->buf;
    for (size_t i = 0; i < *count; i++, at += GD_INDEX_RECORD) {
        items[i] = (gd_item){gd_index_key(at), gd_index_address(at)};
    }
    *room = items;
    return gd_index_sort_items(items, items + *count, *count);
}

PyObject *
gd_py_answers(const gd_item *requests, const uint64_t *addresses, size_t count,
              const uint32_t *unread)
{
    uint8_t *answers = PyMem_Malloc(count * 2 * GD_INDEX_RECORD + 1);
    if (answers == NULL) {
        return PyErr_NoMemory();
    }
    uint8_t *waiting = answers + count * GD_INDEX_RECORD;
    size_t waits =
        gd_requests_answer(requests, addresses, count, answers, waiting);
    PyObject *result = Py_BuildValue(
        unread == NULL ? "(y#y#)" : "(y#y#I)", (const char *)answers,
        (Py_ssize_t)(count * GD_INDEX_RECORD), (const char *)waiting,
        (Py_ssize_t)(waits * GD_INDEX_RECORD),
        unread == NULL ? 0U : (unsigned)*unread);
    PyMem_Free(answers);
    return result;
}

/* answer_requests(requests) -> answers, waiting requests; without an index */
static PyObject *
engine_answer_requests(PyObject *Py_UNUSED(module), PyObject *requests)
{
    Py_buffer view;
    gd_item *room;
    size_t count;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(requests, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    const gd_item *items = gd_py_sorted_items(&view, &count, &room);
    PyBuffer_Release(&view);
    if (items != NULL) {
        uint64_t *nowhere = PyMem_Calloc(count + 1, sizeof *nowhere);
        result = nowhere == NULL
                     ? PyErr_NoMemory()
                     : gd_py_answers(items, nowhere, count, NULL);
        PyMem_Free(nowhere);
    }
    PyMem_Free(room);
    return result;
}

/* resolve_requests(requests, references) -> answers, other requests */
static PyObject *
engine_resolve_requests(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer requests, references;
    gd_item *request_room = NULL, *reference_room = NULL;
    size_t count, reference_count;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*", &requests, &references)) {
        return NULL;
    }
    const gd_item *wanted =
        gd_py_sorted_items(&requests, &count, &request_room);
    const gd_item *known =
        wanted == NULL ? NULL
                       : gd_py_sorted_items(&references, &reference_count,
                                            &reference_room);
    uint8_t *out =
        known == NULL ? NULL : PyMem_Malloc(count * 2 * GD_INDEX_RECORD + 1);
    if (out != NULL) {
        uint8_t *left = out + count * GD_INDEX_RECORD;
        size_t answered = gd_requests_resolve(wanted, count, known,
                                              reference_count, out, left);
        result = Py_BuildValue(
            "(y#y#)", (const char *)out,
            (Py_ssize_t)(answered * GD_INDEX_RECORD), (const char *)left,
            (Py_ssize_t)((count - answered) * GD_INDEX_RECORD));
    } else if (known != NULL) {
        PyErr_NoMemory();
    }
    PyMem_Free(out);
    PyMem_Free(request_room);
    PyMem_Free(reference_room);
    PyBuffer_Release(&references);
    PyBuffer_Release(&requests);
    return result;
}

/* fill_answers(answers, first, places) */
static PyObject *
engine_fill_answers(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer answers, places;
    unsigned long long first;
    size_t count;
    int filled = 0;
    if (!PyArg_ParseTuple(args, "y*Kw*", &answers, &first, &places)) {
        return NULL;
    }
    if (count_items(&answers, GD_INDEX_RECORD, "an answer", &count)) {
        filled = gd_requests_fill_answers(answers.buf, count, first,
                                          places.buf,
                                          (size_t)places.len / 8);
        if (!filled) {
            PyErr_SetString(PyExc_ValueError, "an answer has no place");
        }
    }
    PyBuffer_Release(&places);
    PyBuffer_Release(&answers);
    if (!filled) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyMethodDef gd_py_batch_functions[] = {
    {"requests_of", engine_requests_of, METH_VARARGS, NULL},
    {"split_records", engine_split_records, METH_VARARGS, NULL},
    {"answer_requests", engine_answer_requests, METH_O, NULL},
    {"resolve_requests", engine_resolve_requests, METH_VARARGS, NULL},
    {"fill_answers", engine_fill_answers, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
