/* SPDX-License-Identifier: Apache-2.0 */
/*
 * duplicates.c - glance_dedup._engine: the functions that merging uses, on
 * records of the exact index and on pairs of addresses.
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/format/fingerprint.h"
#include "engine/format/pairs.h"

typedef struct packed_item {
    size_t size;
    const char *name;
} packed_item;

static const packed_item address = {GD_ADDRESS_SIZE, "an address"};
static const packed_item pair = {GD_PAIR_SIZE, "a pair"};
static const packed_item replacement = {GD_REPLACEMENT_SIZE, "a replacement"};
static const packed_item record = {GD_INDEX_RECORD, "an index record"};

/* Returns whether the buffer holds whole items; otherwise sets an exception. */
static int
whole_items(const Py_buffer *view, const packed_item *item)
{
    if ((size_t)view->len % item->size != 0) {
        PyErr_Format(PyExc_ValueError, "%s has %zu bytes", item->name,
                     item->size);
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

/* A function's arguments, and its result. */
typedef struct packed_call {
    PyObject *module;
    Py_buffer given, other; /* other: of some functions only */
    uint8_t *out;           /* as much room as the given items take */
    gd_error err;
} packed_call;

static void
release_packed(packed_call *call)
{
    PyMem_Free(call->out);
    PyBuffer_Release(&call->other);
    PyBuffer_Release(&call->given);
}

/* Ends the call.  Returns the first `count` items of the result, or NULL with
 * an exception set unless s is GD_OK. */
static PyObject *
end_packed(packed_call *call, gd_status s, size_t count, size_t size)
{
    PyObject *result =
        s == GD_OK
            ? bytes_of(call->out, count, size)
            : gd_py_raise_in(PyModule_GetState(call->module), &call->err);
    release_packed(call);
    return result;
}

/* Makes room for the result, or ends the call and returns 0 with an exception
 * set. */
static int
make_room(packed_call *call)
{
    call->out = PyMem_Malloc((size_t)call->given.len + 1);
    if (call->out == NULL) {
        PyErr_NoMemory();
        release_packed(call);
    }
    return call->out != NULL;
}

/* Begins a call with items, and other items unless NULL.  Returns 0 with an
 * exception set on error. */
static int
begin_packed(packed_call *call, PyObject *module, PyObject *args,
             const packed_item *item, const packed_item *other)
{
    memset(call, 0, sizeof *call);
    call->module = module;
    if (!PyArg_ParseTuple(args, other == NULL ? "y*" : "y*y*", &call->given,
                          &call->other)) {
        return 0;
    }
    if (whole_items(&call->given, item) &&
        (other == NULL || whole_items(&call->other, other))) {
        return make_room(call);
    }
    release_packed(call);
    return 0;
}

static PyObject *
engine_pair_addresses(PyObject *module, PyObject *args)
{
    packed_call call;
    size_t count;
    if (!begin_packed(&call, module, args, &pair, NULL)) {
        return NULL;
    }
    gd_status s = gd_pairs_addresses(gd_env_posix(), pairs_of(&call.given),
                                     call.out, &count, &call.err);
    return end_packed(&call, s, count, GD_ADDRESS_SIZE);
}

static PyObject *
engine_pairs_are_of_group(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer pairs;
    uint32_t group;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*O&", &pairs, gd_py_to_u32, &group)) {
        return NULL;
    }
    if (whole_items(&pairs, &pair)) {
        result = PyBool_FromLong(
            gd_pairs_are_of_group(pairs_of(&pairs), group));
    }
    PyBuffer_Release(&pairs);
    return result;
}

static PyObject *
engine_pairs_sort(PyObject *module, PyObject *args)
{
    packed_call call;
    if (!begin_packed(&call, module, args, &pair, NULL)) {
        return NULL;
    }
    size_t count = (size_t)call.given.len / GD_PAIR_SIZE;
    memcpy(call.out, call.given.buf, (size_t)call.given.len);
    gd_status s = gd_pairs_sort(gd_env_posix(), call.out, &count, &call.err);
    return end_packed(&call, s, count, GD_PAIR_SIZE);
}

static PyObject *
engine_replacements_sort(PyObject *module, PyObject *args)
{
    packed_call call;
    if (!begin_packed(&call, module, args, &replacement, NULL)) {
        return NULL;
    }
    memcpy(call.out, call.given.buf, (size_t)call.given.len);
    size_t count = gd_pairs_sort_replacements(
        call.out, (size_t)call.given.len / GD_REPLACEMENT_SIZE);
    return end_packed(&call, GD_OK, count, GD_REPLACEMENT_SIZE);
}

static PyObject *
engine_pairs_without(PyObject *module, PyObject *args)
{
    packed_call call;
    if (!begin_packed(&call, module, args, &pair, &pair)) {
        return NULL;
    }
    size_t count = gd_pairs_subtract(pairs_of(&call.given),
                                     pairs_of(&call.other), call.out);
    return end_packed(&call, GD_OK, count, GD_PAIR_SIZE);
}

/* pick(items, size, first, addresses): takes a group's items, from slot `first`
 * on, and returns those of some addresses. */
static PyObject *
engine_pick(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer items, addresses;
    uint32_t size, first;
    uint8_t *out;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*O&O&y*", &items, gd_py_to_u32, &size,
                          gd_py_to_u32, &first, &addresses)) {
        return NULL;
    }
    size_t count = (size_t)addresses.len / GD_ADDRESS_SIZE;
    if (size >= 1 && size <= GD_LISTED_ENTRY &&
        whole_items(&addresses, &address) &&
        whole_items(&items, &(packed_item){size, "an item"})) {
        result = gd_py_new_bytes(count * size, &out);
    } else if (PyErr_Occurred() == NULL) {
        PyErr_SetString(PyExc_ValueError, "there are no such items");
    }
    for (size_t i = 0; result != NULL && i < count; i++) {
        const uint8_t *at = (const uint8_t *)addresses.buf;
        size_t slot =
            gd_get64(at + i * GD_ADDRESS_SIZE) & (GD_MAX_SLOTS - 1);
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
    if (!whole_items(&call->pairs, &pair)) {
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
engine_pairs_judge(PyObject *Py_UNUSED(module), PyObject *args)
{
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
engine_pairs_revise(PyObject *Py_UNUSED(module), PyObject *args)
{
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
engine_pairs_choose(PyObject *Py_UNUSED(module), PyObject *args)
{
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

/* ---- the exact index ---- */

/* Sorts the records in the call's result, and ends the call. */
static PyObject *
end_sorting(packed_call *call, size_t count)
{
    gd_status s;
    Py_BEGIN_ALLOW_THREADS
    s = gd_index_sort(gd_env_posix(), call->out, count, &call->err);
    Py_END_ALLOW_THREADS
    return end_packed(call, s, count, GD_INDEX_RECORD);
}

static PyObject *
engine_index_records(PyObject *module, PyObject *args)
{
    packed_call call = {.module = module};
    uint32_t number, first;
    if (!PyArg_ParseTuple(args, "y*O&O&", &call.given, gd_py_to_u32, &number,
                          gd_py_to_u32, &first)) {
        return NULL;
    }
    size_t count = (size_t)call.given.len / GD_LISTED_ENTRY;
    if (call.given.len % GD_LISTED_ENTRY != 0 || number < 1 ||
        number > GD_MAX_GROUP || first > GD_MAX_SLOTS ||
        count > GD_MAX_SLOTS - first) {
        PyErr_SetString(PyExc_ValueError, "these are no entries of a group");
        release_packed(&call);
        return NULL;
    }
    if (!make_room(&call)) {
        return NULL;
    }
    count = gd_index_records(call.given.buf, count, number, first, call.out);
    return end_packed(&call, GD_OK, count, GD_INDEX_RECORD);
}

static PyObject *
engine_index_sort(PyObject *module, PyObject *args)
{
    packed_call call;
    if (!begin_packed(&call, module, args, &record, NULL)) {
        return NULL;
    }
    memcpy(call.out, call.given.buf, (size_t)call.given.len);
    return end_sorting(&call, (size_t)call.given.len / GD_INDEX_RECORD);
}

PyMethodDef gd_py_duplicates_functions[] = {
    {"index_records", engine_index_records, METH_VARARGS, NULL},
    {"index_sort", engine_index_sort, METH_VARARGS, NULL},
    {"pair_addresses", engine_pair_addresses, METH_VARARGS, NULL},
    {"pick", engine_pick, METH_VARARGS, NULL},
    {"pairs_are_of_group", engine_pairs_are_of_group, METH_VARARGS, NULL},
    {"pairs_sort", engine_pairs_sort, METH_VARARGS, NULL},
    {"pairs_without", engine_pairs_without, METH_VARARGS, NULL},
    {"pairs_judge", engine_pairs_judge, METH_VARARGS, NULL},
    {"pairs_revise", engine_pairs_revise, METH_VARARGS, NULL},
    {"pairs_choose", engine_pairs_choose, METH_VARARGS, NULL},
    {"replacements_sort", engine_replacements_sort, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
