/* What is known of an op's calls: forms (which operands are given, and how), and the layouts that each has met. */
#include "native.h"

static PyObject *s_out, *s_stream;

int forms_init(void) {
  s_out = PyUnicode_InternFromString("out");
  s_stream = PyUnicode_InternFromString("stream");
  return s_out && s_stream;
}

static outcome gather(call *c, PyObject *name, PyObject *value) {
  if (name == s_out || name == s_stream) {
    *(name == s_out ? &c->out : &c->stream) = value == Py_None ? NULL : value;
    c->options++;
  } else {
    if (c->positional + c->named >= MAX_VALUES) return UNKNOWN;
    c->values[c->positional + c->named] = value;
    c->names[c->named++] = name;
  }
  return DONE;
}

static outcome begin(call *c, Py_ssize_t positional) {
  if (positional > MAX_VALUES) return UNKNOWN;
  c->positional = (int)positional, c->named = c->options = 0, c->out = c->stream = NULL;
  return DONE;
}

outcome call_gather(call *c, PyObject *args, PyObject *kwargs) {
  Py_ssize_t at = 0;
  PyObject *name, *value;
  if (begin(c, PyTuple_Size(args)) != DONE) return UNKNOWN;
  for (int i = 0; i < c->positional; i++) c->values[i] = PyTuple_GetItem(args, i);
  while (kwargs && PyDict_Next(kwargs, &at, &name, &value))
    if (gather(c, name, value) != DONE) return UNKNOWN;
  return DONE;
}

outcome call_gather_vector(call *c, PyObject *const *args, size_t count, PyObject *names) {
  Py_ssize_t named = names ? PyTuple_Size(names) : 0;
  if (begin(c, VECTOR_COUNT(count)) != DONE) return UNKNOWN;
  for (int i = 0; i < c->positional; i++) c->values[i] = args[i];
  for (Py_ssize_t i = 0; i < named; i++)
    if (gather(c, PyTuple_GetItem(names, i), args[c->positional + i]) != DONE) return UNKNOWN;
  return DONE;
}

int form_fits(const form *f, const call *c) {
  if (f->positional != c->positional || f->named != c->named) return 0;
  /* Names at calls are interned: others are a form of Python's. */
  for (int i = 0; i < f->named; i++)
    if (f->names[i] != c->names[i]) return 0;
  return 1;
}

static int read_number(const slot *s, PyObject *value, scalar *to) {
  if (s->is_bool) {
    to->i = value == Py_True;
    return value == Py_True || value == Py_False;
  }
  if (s->is_float) {
    if (Py_TYPE(value) != &PyFloat_Type) return 0;
    to->f = PyFloat_AsDouble(value);
    return to->f >= s->from && to->f <= s->to;
  }
  if (Py_TYPE(value) != &PyLong_Type) return 0;
  int overflow = 0;
  to->i = PyLong_AsLongLongAndOverflow(value, &overflow);
  return !overflow && to->i >= s->least && to->i <= s->most;
}

static outcome read_array(reading *r, PyObject *array) {
  if (r->arrays >= MAX_FLAT / 2) return UNKNOWN;
  r->flat[r->arrays] = array;
  return array_read(array, &r->key, &r->addresses[r->arrays++]);
}

static outcome read_outputs(reading *r, PyObject *out) {
  if (Py_TYPE(out) != &PyTuple_Type) return key_add(&r->key, 1) ? read_array(r, out) : UNKNOWN;
  Py_ssize_t count = PyTuple_Size(out);
  if (!key_add(&r->key, 2 + (uint64_t)count)) return UNKNOWN;
  for (Py_ssize_t i = 0; i < count; i++)
    if (read_array(r, PyTuple_GetItem(out, i)) != DONE) return UNKNOWN;
  return DONE;
}

static uint64_t bits_of(const scalar *s) {
  uint64_t bits;
  __builtin_memcpy(&bits, s->is_float ? (const void *)&s->f : (const void *)&s->i, 8);
  return bits;
}

outcome call_read(const form *f, const call *c, reading *r) {
  r->arrays = 0, r->key.count = r->key.held_count = 0;
  __builtin_memcpy(r->scalars, f->given, sizeof(scalar) * (size_t)f->scalars);
  for (int i = 0; i < f->values; i++) {
    const slot *s = &f->slots[i];
    if (s->kind == TENSOR) {
      if (read_array(r, c->values[i]) != DONE) return UNKNOWN;
    } else if (s->kind == CHOICE) {
      if (!key_add_object(&r->key, c->values[i])) return UNKNOWN;
    } else {
      scalar *to = &r->scalars[s->index];
      to->is_float = s->is_float;
      if (!read_number(s, c->values[i], to)) return UNKNOWN;
      if (s->shaping && !key_add(&r->key, bits_of(to))) return UNKNOWN;
    }
  }
  return c->out ? read_outputs(r, c->out) : key_add(&r->key, 0) ? DONE : UNKNOWN;
}

static int same_key(const entry *e, const key *k) {
  if (e->words != k->count) return 0;
  for (int i = 0; i < k->count; i++)
    if (e->key[i] != k->words[i]) return 0;
  return 1;
}

entry *form_find(const form *f, const key *k) {
  if (!f->size) return NULL;
  uint64_t hash = key_hash(k);
  for (size_t at = hash & (f->size - 1); f->table[at]; at = (at + 1) & (f->size - 1))
    if (f->table[at]->hash == hash && same_key(f->table[at], k)) return f->table[at];
  return NULL;
}

static void put(entry **table, size_t size, entry *e) {
  size_t at = e->hash & (size - 1);
  while (table[at]) at = (at + 1) & (size - 1);
  table[at] = e;
}

/* Letting go of entries may run anything, this form's end included: whoever calls this looks at no form afterwards. */
static void release_all(entry **table, size_t size) {
  for (size_t i = 0; i < size; i++)
    if (table[i]) entry_release(table[i]);
  PyMem_Free(table);
}

static int add(form *f, entry *e) {
  if (2 * (f->used + 1) > f->size) {
    size_t size = f->size ? 2 * f->size : 16;
    entry **table = PyMem_Calloc(size, sizeof *table);
    if (!table) return PyErr_NoMemory(), 0;
    for (size_t i = 0; i < f->size; i++)
      if (f->table[i]) put(table, size, f->table[i]);
    PyMem_Free(f->table);
    f->table = table, f->size = size;
  }
  put(f->table, f->size, e);
  f->used++;
  return 1;
}

int form_add(form *f, entry *e) {
  entry **old = NULL;
  size_t size = f->size;
  if (f->used >= MAX_ENTRIES) {
    old = f->table;
    f->table = NULL, f->size = f->used = 0;
  }
  int added = add(f, e);
  if (old) release_all(old, size);
  return added;
}

void form_release(form *f) {
  if (!f || --f->users) return;
  release_all(f->table, f->size);
  for (int i = 0; f->names && i < f->named; i++) Py_DecRef(f->names[i]);
  PyMem_Free(f->names);
  PyMem_Free(f->slots);
  PyMem_Free(f);
}

/* (role, index, is_bool, is_float, shaping, least, most) */
static int read_slot(slot *s, PyObject *row) {
  int64_t part[5];
  for (int i = 0; i < 5; i++)
    if (!read_int(row, i, &part[i])) return 0;
  if (part[0] < TENSOR || part[0] > CHOICE || part[1] < 0 || part[1] >= MAX_SCALARS) return wrong("a slot"), 0;
  *s = (slot){(role)part[0], (int)part[1], (int)part[2], (int)part[3], (int)part[4], 0, 0, 0, 0};
  if (!s->is_float) return read_int(row, 5, &s->least) && read_int(row, 6, &s->most);
  s->from = PyFloat_AsDouble(PyTuple_GetItem(row, 5));
  s->to = PyFloat_AsDouble(PyTuple_GetItem(row, 6));
  return !PyErr_Occurred();
}

static int read_given(form *f, PyObject *values) {
  Py_ssize_t count = PyTuple_Size(values);
  if (count < 0) return 0;
  if (count > MAX_SCALARS) return too_many();
  f->scalars = (int)count;
  for (int i = 0; i < count; i++) {
    PyObject *value = PyTuple_GetItem(values, i);
    f->given[i].is_float = Py_TYPE(value) == &PyFloat_Type;
    if (f->given[i].is_float) f->given[i].f = PyFloat_AsDouble(value);
    else f->given[i].i = PyLong_AsLongLong(value);
  }
  return !PyErr_Occurred();
}

static int read_form(form *f, PyObject *args) {
  int64_t positional;
  PyObject *names = PyTuple_GetItem(args, 1), *rows = PyTuple_GetItem(args, 2), *given = PyTuple_GetItem(args, 3);
  if (!given || !read_int(args, 0, &positional)) return 0;
  Py_ssize_t named = PyTuple_Size(names), values = PyTuple_Size(rows);
  if (named < 0 || values < 0) return 0;
  if (named > MAX_NAMES || values > MAX_VALUES) return too_many();
  if (positional < 0 || positional + named != values) return wrong("a form"), 0;
  f->positional = (int)positional, f->values = (int)values;
  f->names = PyMem_Calloc((size_t)named + 1, sizeof *f->names);
  f->slots = PyMem_Calloc((size_t)values + 1, sizeof *f->slots);
  if (!f->names || !f->slots) return PyErr_NoMemory(), 0;
  for (; f->named < named; f->named++) f->names[f->named] = KEEP(PyTuple_GetItem(names, f->named));
  if (!read_given(f, given)) return 0;
  for (int i = 0; i < values; i++) {
    if (!read_slot(&f->slots[i], PyTuple_GetItem(rows, i))) return 0;
    if (f->slots[i].kind == NUMBER && f->slots[i].index >= f->scalars) return wrong("a scalar's place"), 0;
  }
  return 1;
}

form *form_new(PyObject *args) {
  form *f = PyMem_Calloc(1, sizeof *f);
  if (!f) return PyErr_NoMemory(), NULL;
  f->users = 1;
  if (read_form(f, args)) return f;
  form_release(f);
  return NULL;
}
