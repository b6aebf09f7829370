/* SPDX-License-Identifier: Apache-2.0 */
/*
 * module.c - glance_dedup._engine: the module, which puts together what all
 * other files of the binding define.
 *
 * The binding converts arguments to C.  It releases the GIL around everything
 * that computes, waits or does I/O, and turns a gd_error into the exception of
 * its class.  image_repository.py, openimages.py and openvolumes.py document the
 * API for images and volumes; maintainer_role.py and the daemon's tasks use the
 * rest.
 */
#include "binding/binding.h"

static int
add_types(PyObject *module, module_state *state)
{
    const struct {
        const gd_py_type *type;
        PyTypeObject **place; /* NULL: C makes no such objects */
    } types[] = {
        {&gd_py_repository_type, &state->repository_type},
        {&gd_py_transaction_type, &state->transaction_type},
        {&gd_py_image_type, &state->image_type},
        {&gd_py_volume_type, &state->volume_type},
        {&gd_py_block_reader_type, &state->block_reader_type},
        {&gd_py_maintenance_type, &state->maintenance_type},
        {&gd_py_recipe_type, &state->recipe_type},
        {&gd_py_group_type, &state->group_type},
        {&gd_py_rewriting_type, &state->rewriting_type},
        {&gd_py_merge_type, NULL},
        {&gd_py_relocation_type, NULL},
        {&gd_py_estimate_type, NULL},
        {&gd_py_index_type, NULL},
    };
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        PyTypeObject *type = gd_py_add_type(module, types[i].type);
        if (type == NULL) {
            return -1;
        }
        if (types[i].place != NULL) {
            *types[i].place = type;
        } else {
            Py_DECREF((PyObject *)type); /* the module has its own reference */
        }
    }
    return 0;
}

static int
add_functions(PyObject *module)
{
    PyMethodDef *const functions[] = {
        gd_py_fingerprint_functions, gd_py_run_functions,
        gd_py_scrub_functions,       gd_py_spare_functions,
        gd_py_duplicates_functions,  gd_py_rewriting_functions,
        gd_py_repository_functions,  gd_py_batch_functions,
        gd_py_deflate_functions,
    };
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        if (PyModule_AddFunctions(module, functions[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
module_exec(PyObject *module)
{
    module_state *state = PyModule_GetState(module);
    state->exceptions = PyImport_ImportModule("glance_dedup.base.exceptions");
    if (state->exceptions == NULL || add_types(module, state) < 0) {
        return -1;
    }
    return add_functions(module);
}

static int
module_clear(PyObject *module)
{
    module_state *state = PyModule_GetState(module);
    Py_CLEAR(state->exceptions);
    Py_CLEAR(state->repository_type);
    Py_CLEAR(state->transaction_type);
    Py_CLEAR(state->image_type);
    Py_CLEAR(state->volume_type);
    Py_CLEAR(state->block_reader_type);
    Py_CLEAR(state->maintenance_type);
    Py_CLEAR(state->recipe_type);
    Py_CLEAR(state->group_type);
    Py_CLEAR(state->rewriting_type);
    return 0;
}

/* after_fork(): disowns, in the child, everything opened before. */
static PyObject *
engine_after_fork(PyObject *module, PyObject *Py_UNUSED(unused))
{
    module_state *state = PyModule_GetState(module);
    state->forks++;
    Py_RETURN_NONE;
}

static PyMethodDef module_functions[] = {
    {"after_fork", engine_after_fork, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "glance_dedup._engine",
    .m_size = sizeof(module_state),
    .m_methods = module_functions,
    .m_slots = module_slots,
    .m_clear = module_clear,
};

PyMODINIT_FUNC
PyInit__engine(void)
{
    return PyModuleDef_Init(&module_definition);
}
