/* Bound calls: a launch that is complete, and what is counted and returned. */
#include "native.h"

typedef struct {
  PyObject base;
  vector_call vector;
  launch *run; /* NULL: launches are Python's */
  uint64_t stream;
  PyObject *count, *device, *refuse, *outputs;
} bound;

PyObject *bound_type;

/* The stream that a launch names: NULL for none. UNKNOWN: there is more, which is for Python to refuse. */
static outcome named_stream(const call *c, PyObject **stream) {
  *stream = c->stream;
  if (c->positional) *stream = c->values[0] == Py_None ? NULL : c->values[0];
  return c->named || c->out || c->positional + c->options > 1 ? UNKNOWN : DONE;
}

static outcome launched(bound *self, uint64_t stream) {
  int64_t status = 0;
  launch *run = KEEP(self->run); /* Another thread may bring other arrays meanwhile. */
  outcome done = launch_run(run, NULL, NULL, stream, &status);
  if (done == DONE && status) done = wants_context(run, status) ? UNKNOWN : refused(self->refuse, status);
  Py_DecRef((PyObject *)run);
  return done == DONE && !count_up(self->count) ? FAILED : done;
}

static outcome try(bound *self, PyObject *named) {
  uint64_t stream = self->stream;
  if (!self->run || is_gone(self->device)) return UNKNOWN;
  if (named && (!is_cuda(self->run) || stream_of(self->device, named, &stream) != DONE)) return UNKNOWN;
  return launched(self, stream);
}

static PyObject *bound_call(PyObject *object, PyObject *args, PyObject *kwargs) {
  call c;
  PyObject *named;
  outcome done = call_gather(&c, args, kwargs) == DONE ? named_stream(&c, &named) : UNKNOWN;
  if (done == DONE) done = try((bound *)object, named);
  if (done == UNKNOWN) return python_way(object, slow_way, args, kwargs);
  return done == DONE ? KEEP(((bound *)object)->outputs) : NULL;
}

static PyObject *bound_vector_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names) {
  call c;
  PyObject *named;
  outcome done = call_gather_vector(&c, args, count, names) == DONE ? named_stream(&c, &named) : UNKNOWN;
  if (done == DONE) done = try((bound *)object, named);
  if (done == UNKNOWN) return python_way_vector(object, slow_way, args, count, names);
  return done == DONE ? KEEP(((bound *)object)->outputs) : NULL;
}

static PyObject *bound_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  (void)args, (void)kwargs;
  bound *self = (bound *)PyType_GenericNew(type, NULL, NULL);
  if (self) self->vector = bound_vector_call;
  return (PyObject *)self;
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
static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(bound, vector), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_new, (void *)bound_new},           {Py_tp_dealloc, (void *)bound_free},
                              {Py_tp_traverse, (void *)bound_traverse}, {Py_tp_clear, (void *)bound_clear},
                              {Py_tp_call, (void *)bound_call},         {Py_tp_methods, methods},
                              {Py_tp_members, members},                 {0, NULL}};
static PyType_Spec spec = {"kiln.runtime.native.Bound", sizeof(bound), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | TYPE_HAS_VECTOR_CALL, slots};

int bound_init(void) { return (bound_type = PyType_FromSpec(&spec)) != NULL; }
