/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.c - glance_dedup._engine: verify_slots.
 */
#include "binding/binding.h"

#include "engine/base/coding.h"
#include "engine/maintenance/scrub.h"

/* Returns the slots with this verdict, 32 bits each. */
static PyObject *
slots_with(const uint8_t *verdicts, uint32_t first, uint32_t count,
           gd_verdict wanted)
{
    size_t used = 0;
    uint8_t *out;
    for (uint32_t i = 0; i < count; i++) {
        used += verdicts[i] == wanted;
    }
    PyObject *slots = gd_py_new_bytes(4 * used, &out);
    for (uint32_t i = 0; slots != NULL && i < count; i++) {
        if (verdicts[i] == wanted) {
            gd_put32(out, first + i);
            out += 4;
        }
    }
    return slots;
}

static PyObject *
engine_verify_slots(PyObject *module, PyObject *args)
{
    const module_state *state = PyModule_GetState(module);
    PyObject *repository;
    uint32_t number, first, count;
    int hashed = 1;
    unsigned long long begin = 0, end = UINT64_MAX;
    gd_scrub_result found;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "O!O&O&O&|pKK", state->repository_type, &repository,
                          gd_py_to_u32, &number, gd_py_to_u32, &first,
                          gd_py_to_u32, &count, &hashed, &begin, &end) ||
        !gd_py_call_repository(repository, &call)) {
        return NULL;
    }
    const gd_env *env = gd_env_posix();
    gd_repo *repo = ((repository_object *)repository)->repo;
    if (!gd_py_end(&call, gd_scrub(repo, number, first, count, hashed != 0,
                                   (gd_scrub_extent){begin, end}, &found,
                                   &call.err))) {
        return NULL;
    }
    PyObject *result = Py_BuildValue(
        "(KNNN)", (unsigned long long)found.bytes,
        slots_with(found.verdicts, first, count, GD_VERDICT_DAMAGED),
        slots_with(found.verdicts, first, count, GD_VERDICT_INVALID),
        slots_with(found.verdicts, first, count, GD_VERDICT_WORN));
    env->release(env, found.verdicts);
    return result;
}

PyMethodDef gd_py_scrub_functions[] = {
    {"verify_slots", engine_verify_slots, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
