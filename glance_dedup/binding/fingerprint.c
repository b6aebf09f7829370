/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fingerprint.c - the functions of fingerprints: what the engine would compute,
 * and how far to rely on it.
 */
#include "binding/binding.h"

#include "engine/format/fingerprint.h"

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

/* tree_digest(data): see gd_hasher_compute_tree; of SHA-256. */
static PyObject *
engine_tree_digest(PyObject *module, PyObject *data)
{
    const gd_env *env = gd_env_posix();
    Py_buffer view;
    gd_error err;
    gd_digest *digest = NULL;
    gd_hasher *hasher = NULL;
    gd_fingerprint fp;
    gd_status s;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_digest_open(env, "sha256", false, &digest, &err);
    if (s == GD_OK) {
        s = gd_hasher_open(env, digest, &hasher, &err);
    }
    if (s == GD_OK) {
        s = gd_hasher_compute_tree(hasher, env, view.buf, (size_t)view.len,
                                   &fp, &err);
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
    {"tree_digest", engine_tree_digest, METH_O, NULL},
    {"is_cryptographic", engine_is_cryptographic, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
