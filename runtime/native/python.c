/* What a call needs of Python: its own way for all that is not known here, the device's state, streams, counters, errors. */
#include "native.h"

PyObject *slow_way, *first_way;
static PyObject *s_gone, *s_stream;

int python_init(void) {
  slow_way = PyUnicode_InternFromString("_slow");
  first_way = PyUnicode_InternFromString("_first");
  s_gone = PyUnicode_InternFromString("gone");
  s_stream = PyUnicode_InternFromString("stream");
  return slow_way && first_way && s_gone && s_stream;
}

PyObject *python_way(PyObject *self, PyObject *name, PyObject *args, PyObject *kwargs) {
  PyObject *way = PyObject_GetAttr(self, name);
  PyObject *result = way ? PyObject_Call(way, args, kwargs) : NULL;
  Py_DecRef(way);
  return result;
}

PyObject *python_way_vector(PyObject *self, PyObject *name, PyObject *const *args, size_t count, PyObject *names) {
  Py_ssize_t positional = VECTOR_COUNT(count), named = names ? PyTuple_Size(names) : 0;
  PyObject *tuple = PyTuple_New(positional), *kwargs = tuple ? PyDict_New() : NULL, *result = NULL;
  for (Py_ssize_t i = 0; tuple && i < positional; i++) PyTuple_SetItem(tuple, i, KEEP(args[i]));
  int given = kwargs != NULL;
  for (Py_ssize_t i = 0; given && i < named; i++) given = !PyDict_SetItem(kwargs, PyTuple_GetItem(names, i), args[positional + i]);
  if (given) result = python_way(self, name, tuple, kwargs);
  Py_DecRef(kwargs);
  Py_DecRef(tuple);
  return result;
}

int is_gone(PyObject *device) {
  PyObject *gone = PyObject_GetAttr(device, s_gone);
  int found = gone != Py_False;
  if (!gone) PyErr_Clear();
  Py_DecRef(gone);
  return found;
}

outcome stream_of(PyObject *device, PyObject *stream, uint64_t *handle) {
  PyObject *number = NULL;
  if (Py_TYPE(stream) == &PyLong_Type) number = KEEP(stream);
  else number = PyObject_CallMethodObjArgs(device, s_stream, stream, Py_None, NULL);
  if (number) *handle = PyLong_AsUnsignedLongLong(number);
  Py_DecRef(number);
  if (!PyErr_Occurred()) return DONE;
  PyErr_Clear(); /* Python says it again, in its words. */
  return UNKNOWN;
}

int count_up(PyObject *list) {
  PyObject *old = PyList_GetItem(list, 0);
  if (!old) return 0;
  long long count = PyLong_AsLongLong(old);
  if (count == -1 && PyErr_Occurred()) return 0;
  PyObject *now = PyLong_FromLongLong(count + 1);
  return now && !PyList_SetItem(list, 0, now);
}

outcome refused(PyObject *refuse, int64_t status) {
  Py_IncRef(refuse);
  PyObject *code = PyLong_FromLongLong(status);
  PyObject *nothing = code ? PyObject_CallFunctionObjArgs(refuse, code, NULL) : NULL;
  if (nothing) wrong("a status that is an error");
  Py_DecRef(refuse);
  Py_DecRef(nothing);
  Py_DecRef(code);
  return FAILED;
}
