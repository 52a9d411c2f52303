/* An op's calls. What is known goes from here to the driver; everything else is Python's, as if this were not here. */
#include "native.h"

typedef struct {
  PyObject base;
  vector_call vector;
  form *forms[MAX_FORMS];
  int count;
  int64_t forgotten; /* how often */
} caller;

PyObject *caller_type;

static int may_overlap(const entry *e, const uint64_t *addresses) {
  for (int i = 0; i < e->overlap_count; i++) {
    const overlap *o = &e->overlaps[i];
    uint64_t p = addresses[o->written], q = addresses[o->other];
    if (p < q + o->b_bytes && q < p + o->a_bytes && !(p == q && o->same)) return 1;
  }
  return 0;
}

static outcome find_stream(const entry *e, const call *c, const reading *r, uint64_t *stream) {
  *stream = 0;
  if (c->stream) return is_cuda(e->run) ? stream_of(e->device, c->stream, stream) : UNKNOWN;
  return e->current ? array_stream(r->flat[e->example], e->ordinal, stream) : DONE;
}

/* By the arrays' own framework: to torch, what DLPack's allocator makes is foreign memory, which its streams know nothing of. */
static outcome make_outputs(const entry *e, reading *r, uint64_t stream, int *made) {
  Py_ssize_t count = PyTuple_Size(e->makers);
  for (*made = 0; *made < count;) {
    PyObject *maker = PyTuple_GetItem(e->makers, *made), *example = r->flat[e->example];
    PyObject *handle = e->by_stream ? PyLong_FromLongLong((long long)stream) : NULL;
    if (e->by_stream && !handle) return FAILED;
    PyObject *array = PyObject_CallFunctionObjArgs(maker, example, handle, NULL);
    Py_DecRef(handle);
    if (!array) return FAILED;
    int at = r->arrays + 1 + (*made)++;
    r->flat[at] = array;
    r->addresses[at] = array_address(array);
    if (!r->addresses[at]) return UNKNOWN;
  }
  return DONE;
}

static PyObject *results(const entry *e, const reading *r) {
  if (e->result_count == 1) return KEEP(r->flat[e->results[0]]);
  PyObject *all = PyTuple_New(e->result_count);
  for (int i = 0; all && i < e->result_count; i++) PyTuple_SetItem(all, i, KEEP(r->flat[e->results[i]]));
  return all;
}

static outcome launched(const entry *e, const reading *r, uint64_t stream) {
  int64_t status = 0;
  outcome done = launch_run(e->run, r->addresses, r->scalars, stream, &status);
  if (done != DONE) return done;
  if (status) return wants_context(e->run, status) ? UNKNOWN : refused(e->refuse, status);
  return count_up(e->count) ? DONE : FAILED;
}

static outcome answer(const entry *e, const call *c, reading *r, PyObject **result) {
  uint64_t stream;
  int made = 0;
  if (is_gone(e->device) || may_overlap(e, r->addresses) || find_stream(e, c, r, &stream) != DONE) return UNKNOWN;
  r->flat[r->arrays] = Py_None;
  r->addresses[r->arrays] = 0;
  outcome done = make_outputs(e, r, stream, &made);
  if (done == DONE) done = (*result = results(e, r)) ? launched(e, r, stream) : FAILED;
  if (done != DONE) DROP(*result);
  for (int i = 0; i < made; i++) Py_DecRef(r->flat[r->arrays + 1 + i]);
  return done;
}

static form *form_of(const caller *self, const call *c) {
  for (int i = 0; i < self->count; i++)
    if (form_fits(self->forms[i], c)) return self->forms[i];
  return NULL;
}

/* The answer, or UNKNOWN and the Python function that has one. */
static outcome try(caller *self, const call *c, PyObject **result, PyObject **way) {
  reading r;
  form *f = form_of(self, c);
  if (!f) return UNKNOWN;
  /* Reading arrays, making them and launching may let other threads run, which may forget everything. */
  f->users++;
  outcome done = call_read(f, c, &r);
  entry *e = done == DONE ? form_find(f, &r.key) : NULL;
  if (e) e->users++;
  form_release(f);
  if (done == DONE && !e) *way = first_way;
  done = e && e->run ? answer(e, c, &r, result) : UNKNOWN;
  if (e) entry_release(e);
  return done;
}

static PyObject *caller_call(PyObject *self, PyObject *args, PyObject *kwargs) {
  call c;
  PyObject *result = NULL, *way = slow_way;
  if (call_gather(&c, args, kwargs) == DONE && try((caller *)self, &c, &result, &way) != UNKNOWN) return result;
  return python_way(self, way, args, kwargs);
}

static PyObject *caller_vector_call(PyObject *self, PyObject *const *args, size_t count, PyObject *names) {
  call c;
  PyObject *result = NULL, *way = slow_way;
  if (call_gather_vector(&c, args, count, names) == DONE && try((caller *)self, &c, &result, &way) != UNKNOWN) return result;
  return python_way_vector(self, way, args, count, names);
}

static PyObject *caller_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  caller *self = (caller *)PyType_GenericNew(type, args, kwargs);
  if (self) self->vector = caller_vector_call;
  return (PyObject *)self;
}

/* add_form(positional, names, slots, scalars) */
static PyObject *add_form(PyObject *object, PyObject *args) {
  caller *self = (caller *)object;
  if (self->count < MAX_FORMS) {
    form *f = form_new(args);
    if (!f) return NULL;
    self->forms[self->count++] = f;
  }
  return KEEP(Py_None);
}

static outcome add(form *f, const call *c, PyObject *program) {
  reading r;
  if (call_read(f, c, &r) != DONE) return UNKNOWN;
  entry *e = entry_new(&r, program);
  if (!e) return FAILED;
  /* Another thread may have made the same call meanwhile. */
  if (!form_find(f, &r.key) && form_add(f, e)) return DONE;
  entry_release(e);
  return PyErr_Occurred() ? FAILED : DONE;
}

/* add_entry(operands, named, program, forgotten): nothing where all was forgotten since the call began, which may have been
 * decided before that. */
static PyObject *add_entry(PyObject *object, PyObject *args) {
  caller *self = (caller *)object;
  call c;
  int64_t forgotten;
  PyObject *operands = PyTuple_GetItem(args, 0), *named = PyTuple_GetItem(args, 1), *program = PyTuple_GetItem(args, 2);
  if (!program || !read_int(args, 3, &forgotten)) return NULL;
  form *f = call_gather(&c, operands, named) == DONE && forgotten == self->forgotten ? form_of(self, &c) : NULL;
  if (!f) return KEEP(Py_None);
  f->users++;
  outcome added = add(f, &c, program);
  form_release(f);
  return added == FAILED ? NULL : KEEP(Py_None);
}

static int caller_clear(PyObject *object) {
  caller *self = (caller *)object;
  while (self->count) {
    form *f = self->forms[--self->count];
    form_release(f);
  }
  return 0;
}

/* forget() */
static PyObject *forget(PyObject *object, PyObject *none) {
  (void)none;
  ((caller *)object)->forgotten++;
  caller_clear(object);
  return KEEP(Py_None);
}

/* forgotten() -> how often */
static PyObject *times_forgotten(PyObject *object, PyObject *none) {
  (void)none;
  return PyLong_FromLongLong(((caller *)object)->forgotten);
}

static int caller_traverse(PyObject *object, visitproc visit, void *arg) {
  const caller *self = (caller *)object;
  int stop = visit((PyObject *)Py_TYPE(object), arg);
  for (int i = 0; !stop && i < self->count; i++) {
    const form *f = self->forms[i];
    for (size_t at = 0; !stop && at < f->size; at++)
      if (f->table[at]) stop = entry_traverse(f->table[at], visit, arg);
  }
  return stop;
}

static void caller_free(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  caller_clear(object);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DecRef((PyObject *)type);
}

static PyMethodDef methods[] = {{"_add_form", add_form, METH_VARARGS, "Know a form of calls from now on."},
                                {"_add_entry", add_entry, METH_VARARGS, "Know what calls like this one do."},
                                {"_forget", forget, METH_NOARGS, "Know nothing."},
                                {"_forgotten", times_forgotten, METH_NOARGS, "How often all was forgotten."},
                                {NULL, NULL, 0, NULL}};
static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(caller, vector), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_new, (void *)caller_new},           {Py_tp_dealloc, (void *)caller_free},
                              {Py_tp_traverse, (void *)caller_traverse}, {Py_tp_clear, (void *)caller_clear},
                              {Py_tp_call, (void *)caller_call},         {Py_tp_methods, methods},
                              {Py_tp_members, members},                  {0, NULL}};
static PyType_Spec spec = {"kiln.runtime.native.Caller", sizeof(caller), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | TYPE_HAS_VECTOR_CALL, slots};

int caller_init(void) { return (caller_type = PyType_FromSpec(&spec)) != NULL; }
