/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fingerprint.c - the functions of fingerprints: what the engine would compute,
 * and how far to rely on it.
 */
#include "binding/binding.h"

#include "engine/format/fingerprint.h"
#include "engine/format/keyeddigest.h"

/* fingerprint(name, data, scope): returns what the engine would compute for a
 * block of this scope. */
static PyObject *
engine_fingerprint(PyObject *module, PyObject *args)
{
    const char *name, *id = (const char *)gd_global_scope.id;
    Py_ssize_t id_length = GD_SCOPE_SIZE;
    gd_scope scope;
    Py_buffer view;
    gd_error err;
    gd_digest *digest = NULL;
    gd_hasher *hasher = NULL;
    gd_fingerprint fp;
    const gd_env *env = gd_env_posix();
    if (!PyArg_ParseTuple(args, "sy*|y#", &name, &view, &id, &id_length)) {
        return NULL;
    }
    if (!gd_py_copy_id("scope", id, id_length, scope.id)) {
        PyBuffer_Release(&view);
        return NULL;
    }
    gd_status s;
    Py_BEGIN_ALLOW_THREADS
    s = gd_digest_open(env, name, true, &digest, &err);
    if (s == GD_OK) {
        s = gd_hasher_open(env, digest, &hasher, &err);
    }
    if (s == GD_OK) {
        s = gd_hasher_compute(hasher, &scope, view.buf, (size_t)view.len, &fp,
                              &err);
        gd_hasher_close(env, hasher);
    }
    gd_digest_close(env, digest);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    if (s != GD_OK) {
        return gd_py_raise_in(PyModule_GetState(module), &err);
    }
    return PyBytes_FromStringAndSize((const char *)fp.bytes,
                                     GD_FINGERPRINT_SIZE);
}

/* keyed_digest(key, data): see keyeddigest.h. */
static PyObject *
engine_keyed_digest(PyObject *module, PyObject *args)
{
    const char *key;
    Py_ssize_t key_length;
    Py_buffer view;
    uint8_t digest[GD_KEYED_DIGEST_SIZE];
    gd_error err;
    if (!PyArg_ParseTuple(args, "y#y*", &key, &key_length, &view)) {
        return NULL;
    }
    if (key_length != GD_KEYED_KEY_SIZE) {
        PyBuffer_Release(&view);
        PyErr_Format(PyExc_ValueError, "a key has %d bytes, not %zd",
                     GD_KEYED_KEY_SIZE, key_length);
        return NULL;
    }
    gd_status s;
    Py_BEGIN_ALLOW_THREADS
    s = gd_keyed_digest((const uint8_t *)key, view.buf, (size_t)view.len,
                        digest, &err);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    if (s != GD_OK) {
        return gd_py_raise_in(PyModule_GetState(module), &err);
    }
    return PyBytes_FromStringAndSize((const char *)digest, sizeof digest);
}

/* is_cryptographic(name): whether comparison by hash may rely on it.  Raises
 * InvalidParameter for a digest that is not available. */
static PyObject *
engine_is_cryptographic(PyObject *module, PyObject *args)
{
    const char *name;
    gd_error err;
    gd_digest *digest;
    if (!PyArg_ParseTuple(args, "s", &name)) {
        return NULL;
    }
    if (gd_digest_open(gd_env_posix(), name, false, &digest, &err) != GD_OK) {
        return gd_py_raise_in(PyModule_GetState(module), &err);
    }
    int answer = gd_digest_is_cryptographic(digest);
    gd_digest_close(gd_env_posix(), digest);
    return PyBool_FromLong(answer);
}

PyMethodDef gd_py_fingerprint_functions[] = {
    {"fingerprint", engine_fingerprint, METH_VARARGS, NULL},
    {"keyed_digest", engine_keyed_digest, METH_VARARGS, NULL},
    {"is_cryptographic", engine_is_cryptographic, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
