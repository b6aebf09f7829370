/* SPDX-License-Identifier: Apache-2.0 */
/*
 * conversion.c - glance_dedup._engine.Transaction: the plain bytes and the table
 * of an image that is to be kept as its disk.
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/base/coding.h"
#include "engine/maintenance/recipeexchange.h"
#include "engine/write/transaction.h"

enum {
    DERIVED_RECORD = 32, /* '<QQIIQ': length, plain, its length, encoder,
                          * checksum */
    ENCODER_RECORD = 6, /* '6B', in the order of the structure */
};

/* begin_table(disk size, format, proven, encoders) */
PyObject *
gd_py_begin_table(PyObject *object, PyObject *args)
{
    opened_object *self = (opened_object *)object;
    gd_recipe_disk disk = {.size = 0};
    unsigned long long size;
    unsigned char format;
    int proven;
    Py_buffer encoders;
    gd_py_call call;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "Kbpy*", &size, &format, &proven, &encoders)) {
        return NULL;
    }
    size_t count = (size_t)encoders.len / ENCODER_RECORD;
    if (encoders.len % ENCODER_RECORD != 0 || count > GD_RECIPE_ENCODERS) {
        PyErr_SetString(PyExc_ValueError, "these are no encoders");
    } else if (gd_py_call_opened(object, &call)) {
        disk.size = size;
        disk.format = format;
        disk.flags = proven ? GD_RECIPE_PROVEN : 0;
        disk.encoders = (uint16_t)count;
        for (size_t i = 0; i < count; i++) {
            memcpy(&disk.encoder[i],
                   (const uint8_t *)encoders.buf + i * ENCODER_RECORD,
                   ENCODER_RECORD);
        }
        gd_status s = gd_transaction_begin_table(self->handle, &disk,
                                                 &call.err);
        result = gd_py_end_none(&call, s);
    }
    PyBuffer_Release(&encoders);
    return result;
}

static void
unpack_derived(const uint8_t *in, gd_extent *extent)
{
    *extent = (gd_extent){.kind = GD_EXTENT_DERIVED,
                          .length = gd_get64(in),
                          .plain = gd_get64(in + 8),
                          .plain_length = gd_get32(in + 16),
                          .encoder = gd_get16(in + 20),
                          .reserved = gd_get16(in + 22),
                          .digest = gd_get64(in + 24)};
}

static gd_status
add_derived(gd_transaction *transaction, const uint8_t *in, size_t count,
            gd_error *err)
{
    gd_extent extents[GD_EXTENTS_PER_PAGE];
    while (count > 0) {
        size_t here = count < GD_EXTENTS_PER_PAGE ? count : GD_EXTENTS_PER_PAGE;
        for (size_t i = 0; i < here; i++) {
            unpack_derived(in + i * DERIVED_RECORD, &extents[i]);
        }
        GD_TRY(gd_transaction_add_derived(transaction, extents, here, err));
        in += here * DERIVED_RECORD;
        count -= here;
    }
    return GD_OK;
}

/* add_derived(records) */
PyObject *
gd_py_add_derived(PyObject *object, PyObject *args)
{
    opened_object *self = (opened_object *)object;
    Py_buffer view;
    gd_py_call call;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*", &view)) {
        return NULL;
    }
    if (view.len % DERIVED_RECORD != 0) {
        PyErr_SetString(PyExc_ValueError, "a derived extent has 32 bytes");
    } else if (gd_py_call_opened(object, &call)) {
        gd_status s = add_derived(self->handle, view.buf,
                                  (size_t)view.len / DERIVED_RECORD, &call.err);
        result = gd_py_end_none(&call, s);
    }
    PyBuffer_Release(&view);
    return result;
}

/* copy_table(image): of the same handle, or the engine refuses */
PyObject *
gd_py_copy_table(PyObject *object, PyObject *args)
{
    opened_object *self = (opened_object *)object;
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    opened_object *source;
    gd_py_call call;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "O!", state->image_type, &source) ||
        !gd_py_enter_opened(source)) {
        return NULL;
    }
    if (gd_py_call_opened(object, &call)) {
        gd_status s = gd_transaction_copy_table(self->handle, source->handle,
                                                &call.err);
        result = gd_py_end_none(&call, s);
    }
    gd_py_leave_opened(source);
    return result;
}

/* finish() -> the new recipe's header */
PyObject *
gd_py_finish_conversion(PyObject *object, PyObject *Py_UNUSED(unused))
{
    opened_object *self = (opened_object *)object;
    gd_recipe_header header;
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_status s = gd_transaction_finish(self->handle, &header, &call.err);
    return gd_py_end(&call, s) ? gd_py_whole_header_dict(&header) : NULL;
}

/* exchange() -> whether the image has the new recipe now */
PyObject *
gd_py_exchange_conversion(PyObject *object, PyObject *Py_UNUSED(unused))
{
    opened_object *self = (opened_object *)object;
    bool done = false;
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    const gd_spool_writer *spool;
    gd_status s = gd_transaction_require_finished(self->handle, &spool,
                                                  &call.err);
    if (s == GD_OK) {
        s = gd_recipe_exchange(self->owner->repo,
                               gd_transaction_old(self->handle), spool, &done,
                               &call.err);
    }
    return gd_py_end_bool(&call, s, done);
}
