/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blockreader.c - glance_dedup._engine.BlockReader: reads back, by their
 * addresses, blocks of an image that is being stored.
 *
 * A serial kind (opened.c).
 */
#include "binding/binding.h"

#include "engine/read/address_reader.h"

static void
close_reader(void *handle)
{
    gd_address_reader_close(handle);
}

static const opened_kind reader_kind = {"the block reader is closed",
                                        close_reader, true};

PyObject *
gd_py_open_block_reader(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    gd_address_reader *reader = NULL;
    gd_py_call call;
    opened_object *self = gd_py_begin_opening(object, state->block_reader_type,
                                              &reader_kind, &call);
    if (self == NULL) {
        return NULL;
    }
    gd_status s = gd_address_reader_open(self->owner->repo, &reader,
                                         &call.err);
    return gd_py_end_opening(self, s, reader, &call);
}

/* Sums up the blocks' lengths.  Returns 0 with an exception set if one is
 * longer than any block can be. */
static int
sum_lengths(const gd_py_blocks *list, size_t *sum)
{
    *sum = 0;
    for (size_t i = 0; i < list->count; i++) {
        if (list->lengths[i] > GD_SEGMENT_MAX) {
            PyErr_SetString(PyExc_ValueError, "no block is so long");
            return 0;
        }
        *sum += list->lengths[i];
    }
    return 1;
}

/* read(fingerprints, lengths, addresses) -> bytes */
static PyObject *
block_reader_read(PyObject *object, PyObject *args)
{
    opened_object *self = (opened_object *)object;
    gd_py_blocks list;
    size_t length;
    gd_py_call call;
    int done = 0;
    if (!gd_py_parse_blocks(args, &list)) {
        return NULL;
    }
    uint8_t *out;
    PyObject *result =
        sum_lengths(&list, &length) ? gd_py_new_bytes(length, &out) : NULL;
    if (result != NULL && gd_py_call_opened(object, &call)) {
        gd_status s = gd_address_reader_copy(self->handle, list.addresses,
                                             list.fps, list.lengths,
                                             list.count,
                                             out, &call.err);
        done = gd_py_end(&call, s);
    }
    gd_py_free_blocks(&list);
    if (!done) {
        Py_CLEAR(result);
    }
    return result;
}

static PyMethodDef block_reader_methods[] = {
    {"read", block_reader_read, METH_VARARGS, NULL},
    {"close", gd_py_opened_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const gd_py_type gd_py_block_reader_type = {
    .name = "glance_dedup._engine.BlockReader",
    .size = sizeof(opened_object),
    .dealloc = gd_py_opened_dealloc,
    .methods = block_reader_methods,
};
