/* The module, and how it reads what kiln.runtime hands over. */
#include "native.h"

PyObject *wrong(const char *what) {
  PyErr_SetString(PyExc_ValueError, what);
  return NULL;
}

int too_many(void) {
  PyErr_SetString(PyExc_OverflowError, "more than there is room for");
  return 0;
}

int read_int(PyObject *tuple, Py_ssize_t at, int64_t *to) {
  PyObject *item = PyTuple_GetItem(tuple, at);
  if (!item) return 0;
  *to = PyLong_AsLongLong(item);
  return *to != -1 || !PyErr_Occurred();
}

Py_ssize_t read_items(PyObject *tuple, Py_ssize_t at, size_t size, const void **items) {
  char *bytes;
  Py_ssize_t length;
  PyObject *item = PyTuple_GetItem(tuple, at);
  if (!item || PyBytes_AsStringAndSize(item, &bytes, &length)) return -1;
  if ((size_t)length % size) return wrong("the length of a table"), -1;
  *items = bytes;
  return length / (Py_ssize_t)size;
}

static PyMethodDef functions[] = {
    {"register_exchange", register_exchange, METH_VARARGS, "Read arrays of a type by its table of DLPack functions."},
    {"register_numpy", register_numpy, METH_VARARGS, "Read arrays of a type by their __array_struct__."},
    {NULL, NULL, 0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "native", "The short way of calls, in C.", -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native(void) {
  if (!arrays_init() || !forms_init() || !python_init() || !launch_init() || !caller_init() || !bound_init()) return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (!module || PyModule_AddObjectRef(module, "Launch", launch_type) || PyModule_AddObjectRef(module, "Caller", caller_type) ||
      PyModule_AddObjectRef(module, "Bound", bound_type)) {
    Py_DecRef(module);
    return NULL;
  }
  return module;
}
