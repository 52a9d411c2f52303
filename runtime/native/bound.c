/* Bound calls: a launch that is complete, and what is counted and returned. */
#include "native.h"

typedef struct {
  PyObject base;
  launch *run; /* NULL: launches are Python's */
  uint64_t stream;
  PyObject *count, *device, *refuse, *outputs;
} bound;

PyObject *bound_type;
static PyObject *s_slow, *s_stream;

static PyObject *python(PyObject *self, PyObject *args, PyObject *kwargs) {
  PyObject *way = PyObject_GetAttr(self, s_slow);
  PyObject *result = way ? PyObject_Call(way, args, kwargs) : NULL;
  Py_DecRef(way);
  return result;
}

/* The stream that a launch names, or NULL; FAILED for arguments that only Python knows what to say of. */
static outcome named_stream(PyObject *args, PyObject *kwargs, PyObject **stream) {
  Py_ssize_t positional = PyTuple_Size(args), named = kwargs ? PyDict_Size(kwargs) : 0, at = 0;
  PyObject *name = s_stream;
  *stream = NULL;
  if (positional + named > 1) return UNKNOWN;
  if (positional) *stream = PyTuple_GetItem(args, 0);
  if (named) PyDict_Next(kwargs, &at, &name, stream);
  if (*stream == Py_None) *stream = NULL;
  return name == s_stream ? DONE : UNKNOWN;
}

static outcome refused(bound *self, int64_t status) {
  PyObject *code = PyLong_FromLongLong(status), *refuse = KEEP(self->refuse);
  PyObject *nothing = code ? PyObject_CallFunctionObjArgs(refuse, code, NULL) : NULL;
  if (nothing) wrong("a status that is an error");
  Py_DecRef(nothing);
  Py_DecRef(refuse);
  Py_DecRef(code);
  return FAILED;
}

static outcome launched(bound *self, uint64_t stream) {
  int64_t status = 0;
  launch *run = KEEP(self->run); /* Another thread may bring other arrays meanwhile. */
  outcome done = launch_run(run, NULL, NULL, stream, &status);
  if (done == DONE && status) done = wants_context(run, status) ? UNKNOWN : refused(self, status);
  Py_DecRef((PyObject *)run);
  return done;
}

static PyObject *bound_call(PyObject *object, PyObject *args, PyObject *kwargs) {
  bound *self = (bound *)object;
  PyObject *named;
  uint64_t stream = self->stream;
  if (!self->run || named_stream(args, kwargs, &named) != DONE || is_gone(self->device)) return python(object, args, kwargs);
  if (named && (!is_cuda(self->run) || stream_of(self->device, named, &stream) != DONE)) return python(object, args, kwargs);
  outcome done = launched(self, stream);
  if (done == UNKNOWN) return python(object, args, kwargs);
  return done == DONE && count_up(self->count) ? KEEP(self->outputs) : NULL;
}

static int bound_clear(PyObject *object) {
  bound *self = (bound *)object;
  DROP(self->run);
  DROP(self->count);
  DROP(self->device);
  DROP(self->refuse);
  DROP(self->outputs);
  return 0;
}

/* arm(launch, stream, count, device, refuse, outputs) */
static PyObject *arm(PyObject *object, PyObject *args) {
  bound *self = (bound *)object;
  int64_t stream;
  if (PyTuple_Size(args) != 6) return wrong("what a bound call runs");
  if (!read_int(args, 1, &stream)) return NULL;
  PyObject *run = PyTuple_GetItem(args, 0);
  if ((PyObject *)Py_TYPE(run) != launch_type) return wrong("a launch");
  bound_clear(object);
  self->run = (launch *)KEEP(run);
  self->stream = (uint64_t)stream;
  self->count = KEEP(PyTuple_GetItem(args, 2));
  self->device = KEEP(PyTuple_GetItem(args, 3));
  self->refuse = KEEP(PyTuple_GetItem(args, 4));
  self->outputs = KEEP(PyTuple_GetItem(args, 5));
  return KEEP(Py_None);
}

static int bound_traverse(PyObject *object, visitproc visit, void *arg) {
  const bound *self = (bound *)object;
  PyObject *const objects[] = {(PyObject *)Py_TYPE(object), (PyObject *)self->run, self->count,
                               self->device,                self->refuse,          self->outputs};
  int stop = 0;
  for (size_t i = 0; !stop && i < sizeof objects / sizeof *objects; i++) stop = objects[i] ? visit(objects[i], arg) : 0;
  return stop;
}

static void bound_free(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  bound_clear(object);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DecRef((PyObject *)type);
}

static PyMethodDef methods[] = {{"_arm", arm, METH_VARARGS, "Launch this from now on."}, {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_new, (void *)PyType_GenericNew}, {Py_tp_dealloc, (void *)bound_free},
                              {Py_tp_traverse, (void *)bound_traverse}, {Py_tp_clear, (void *)bound_clear},
                              {Py_tp_call, (void *)bound_call},       {Py_tp_methods, methods},
                              {0, NULL}};
static PyType_Spec spec = {"kiln.runtime.native.Bound", sizeof(bound), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

int bound_init(void) {
  s_slow = PyUnicode_InternFromString("_slow");
  s_stream = PyUnicode_InternFromString("stream");
  return s_slow && s_stream && (bound_type = PyType_FromSpec(&spec));
}
