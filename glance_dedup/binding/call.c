/* SPDX-License-Identifier: Apache-2.0 */
/*
 * call.c - a method's call of the engine.  It runs without the GIL, while the
 * object is entered.
 */
#include "binding/binding.h"

void
gd_py_begin_call(gd_py_call *call, PyObject *object, void (*leave)(PyObject *))
{
    call->object = object;
    call->leave = leave;
    call->thread = PyEval_SaveThread();
}

static void
leave_call(PyObject *object)
{
    gd_py_leave_repository((repository_object *)object);
}

int
gd_py_call_repository(PyObject *object, gd_py_call *call)
{
    if (!gd_py_enter_repository((repository_object *)object)) {
        return 0;
    }
    gd_py_begin_call(call, object, leave_call);
    return 1;
}

static void
end_call(gd_py_call *call)
{
    PyEval_RestoreThread(call->thread);
    call->leave(call->object);
}

int
gd_py_end(gd_py_call *call, gd_status s)
{
    end_call(call);
    if (s != GD_OK) {
        gd_py_raise(call->object, &call->err);
    }
    return s == GD_OK;
}

PyObject *
gd_py_end_none(gd_py_call *call, gd_status s)
{
    return gd_py_end(call, s) ? Py_NewRef(Py_None) : NULL;
}

PyObject *
gd_py_end_bool(gd_py_call *call, gd_status s, bool answer)
{
    return gd_py_end(call, s) ? PyBool_FromLong(answer) : NULL;
}

PyObject *
gd_py_end_number(gd_py_call *call, gd_status s, uint64_t number)
{
    return gd_py_end(call, s) ? PyLong_FromUnsignedLongLong(number) : NULL;
}

PyObject *
gd_py_end_bytes(gd_py_call *call, gd_status s, const void *data, size_t length)
{
    return gd_py_end(call, s)
               ? PyBytes_FromStringAndSize(data, (Py_ssize_t)length)
               : NULL;
}

PyObject *
gd_py_end_two(gd_py_call *call, gd_status s, uint64_t first, uint64_t second)
{
    return gd_py_end(call, s)
               ? Py_BuildValue("(KK)", (unsigned long long)first,
                               (unsigned long long)second)
               : NULL;
}

PyObject *
gd_py_end_not_busy(gd_py_call *call, gd_status s)
{
    return gd_py_end_bool(call, s == GD_BUSY ? GD_OK : s, s != GD_BUSY);
}
