/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deflate.c - the functions of the encoder: does it make the bytes of a stream?
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/base/coding.h"
#include "engine/deflate/golden.h"
#include "engine/deflate/paramsearch.h"

enum { MAX_SAMPLES = 8 };

/* Takes the plain bytes and the stream of a sample.  Returns 0 with an exception
 * set on error; otherwise the caller releases both. */
static int
take_sample(PyObject *pair, Py_buffer views[2], gd_paramsearch_sample *sample)
{
    if (!PyArg_ParseTuple(pair, "y*y*", &views[0], &views[1])) {
        return 0;
    }
    if (views[0].len > GD_DEFLATE_MAX_PLAIN) {
        PyBuffer_Release(&views[0]);
        PyBuffer_Release(&views[1]);
        PyErr_SetString(PyExc_ValueError, "a stream has at most 2 MiB");
        return 0;
    }
    *sample = (gd_paramsearch_sample){views[0].buf, views[1].buf,
                                      (size_t)views[0].len,
                                      (size_t)views[1].len};
    return 1;
}

/* find_deflate(samples, has_header) */
static PyObject *
engine_find_deflate(PyObject *module, PyObject *args)
{
    PyObject *list;
    int has_header;
    Py_buffer views[MAX_SAMPLES][2];
    gd_paramsearch_sample samples[MAX_SAMPLES];
    gd_deflate_params params;
    bool found = false;
    gd_error err;
    gd_status s = GD_OK;
    if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &list, &has_header)) {
        return NULL;
    }
    Py_ssize_t count = PyList_Size(list), taken = 0;
    if (count < 1 || count > MAX_SAMPLES) {
        return PyErr_Format(PyExc_ValueError, "1 to 8 samples, not %zd", count);
    }
    while (taken < count && take_sample(PyList_GetItem(list, taken),
                                        views[taken], &samples[taken])) {
        taken++;
    }
    if (taken == count) {
        Py_BEGIN_ALLOW_THREADS
        s = gd_paramsearch_run(gd_env_posix(), samples, (size_t)count,
                               has_header != 0, &params, &found, &err);
        Py_END_ALLOW_THREADS
    }
    for (Py_ssize_t i = 0; i < taken; i++) {
        PyBuffer_Release(&views[i][0]);
        PyBuffer_Release(&views[i][1]);
    }
    if (taken < count) {
        return NULL;
    }
    if (s != GD_OK) {
        return gd_py_raise_in(PyModule_GetState(module), &err);
    }
    if (!found) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(iiiii)", params.level, params.window_bits,
                         params.memory_level, params.strategy,
                         params.has_header);
}

static gd_status
compare(const gd_deflate_params *params, const gd_paramsearch_sample *sample,
        bool *equal, gd_error *err)
{
    const gd_env *env = gd_env_posix();
    gd_deflate *encoder = NULL;
    size_t room = sample->stream_length + GD_DEFLATE_SLACK;
    uint8_t *out = gd_alloc(env, room, err);
    gd_status s = out == NULL ? GD_NOMEM
                              : gd_deflate_open(env, params, &encoder, err);
    if (s == GD_OK) {
        size_t length = gd_deflate_encode(encoder, sample->plain,
                                          sample->plain_length, out, room);
        *equal = length > 0 && length == sample->stream_length &&
                 memcmp(out, sample->stream, length) == 0;
        gd_deflate_close(env, encoder);
    }
    env->release(env, out);
    return s;
}

/* deflates_to(params, (plain, stream)): the checksum of an equal stream */
static PyObject *
engine_deflates_to(PyObject *module, PyObject *args)
{
    PyObject *pair;
    gd_deflate_params params;
    unsigned char has_header;
    gd_paramsearch_sample sample;
    Py_buffer views[2];
    bool equal = false;
    uint64_t checksum = 0;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "(bbbbb)O!", &params.level,
                          &params.window_bits, &params.memory_level,
                          &params.strategy, &has_header, &PyTuple_Type,
                          &pair) ||
        !take_sample(pair, views, &sample)) {
        return NULL;
    }
    params.has_header = has_header != 0;
    Py_BEGIN_ALLOW_THREADS
    s = compare(&params, &sample, &equal, &err);
    if (equal) {
        checksum = gd_checksum(sample.stream, sample.stream_length, 0);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&views[0]);
    PyBuffer_Release(&views[1]);
    if (s != GD_OK) {
        return gd_py_raise_in(PyModule_GetState(module), &err);
    }
    if (!equal) {
        Py_RETURN_NONE;
    }
    return PyLong_FromUnsignedLongLong(checksum);
}

/* require_golden() */
static PyObject *
engine_require_golden(PyObject *module, PyObject *Py_UNUSED(unused))
{
    gd_error err;
    if (gd_golden_compare(gd_env_posix(), &err) != GD_OK) {
        return gd_py_raise_in(PyModule_GetState(module), &err);
    }
    Py_RETURN_NONE;
}

PyMethodDef gd_py_deflate_functions[] = {
    {"find_deflate", engine_find_deflate, METH_VARARGS, NULL},
    {"deflates_to", engine_deflates_to, METH_VARARGS, NULL},
    {"require_golden", engine_require_golden, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
