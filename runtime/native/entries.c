/* The answer to calls of one layout. */
#include "native.h"

void entry_release(entry *e) {
  if (--e->users) return;
  DROP(e->held);
  DROP(e->run);
  DROP(e->makers);
  DROP(e->count);
  DROP(e->device);
  DROP(e->refuse);
  PyMem_Free(e->key);
  PyMem_Free(e->overlaps);
  PyMem_Free(e);
}

int entry_traverse(const entry *e, visitproc visit, void *arg) {
  PyObject *const objects[] = {e->held, (PyObject *)e->run, e->makers, e->count, e->device, e->refuse};
  for (size_t i = 0; i < sizeof objects / sizeof *objects; i++) {
    int stop = objects[i] ? visit(objects[i], arg) : 0;
    if (stop) return stop;
  }
  return 0;
}

static int copy_key(entry *e, const reading *r) {
  const key *k = &r->key;
  e->key = PyMem_Malloc(sizeof(uint64_t) * (size_t)(k->count + 1));
  e->held = PyTuple_New(k->held_count);
  if (!e->key || !e->held) return e->key ? 0 : (PyErr_NoMemory(), 0);
  __builtin_memcpy(e->key, k->words, sizeof(uint64_t) * (size_t)k->count);
  for (int i = 0; i < k->held_count; i++) PyTuple_SetItem(e->held, i, KEEP(k->held[i]));
  e->words = k->count, e->hash = key_hash(k), e->arrays = r->arrays;
  return 1;
}

static int read_overlaps(entry *e, PyObject *program) {
  const void *items;
  Py_ssize_t count = read_items(program, 6, 5 * sizeof(int64_t), &items);
  if (count < 0) return 0;
  const int64_t *n = items;
  e->overlaps = PyMem_Calloc((size_t)count + 1, sizeof *e->overlaps);
  if (!e->overlaps) return PyErr_NoMemory(), 0;
  for (; e->overlap_count < count; e->overlap_count++, n += 5) {
    if (n[0] < 0 || n[0] >= e->arrays || n[1] < 0 || n[1] >= e->arrays) return wrong("an overlap"), 0;
    e->overlaps[e->overlap_count] = (overlap){(int)n[0], (int)n[1], (uint64_t)n[2], (uint64_t)n[3], (int)n[4]};
  }
  return 1;
}

static int read_results(entry *e, PyObject *program) {
  const void *items;
  Py_ssize_t count = read_items(program, 7, sizeof(int32_t), &items), made = PyTuple_Size(e->makers);
  if (count < 0 || made < 0) return 0;
  if (count > MAX_FLAT || e->arrays + 1 + made > MAX_FLAT) return too_many();
  if (!count) return wrong("no result"), 0;
  e->result_count = (int)count;
  for (int i = 0; i < count; i++) {
    e->results[i] = ((const int32_t *)items)[i];
    if (e->results[i] < 0 || e->results[i] > e->arrays + made) return wrong("a result"), 0;
  }
  return 1;
}

static int read_program(entry *e, PyObject *program) {
  if (PyTuple_Size(program) != 11) return PyErr_Occurred() ? 0 : (wrong("a program"), 0);
  e->run = (launch *)KEEP(PyTuple_GetItem(program, 0));
  if ((PyObject *)Py_TYPE((PyObject *)e->run) != launch_type) return wrong("a launch"), 0;
  e->makers = KEEP(PyTuple_GetItem(program, 1));
  e->count = KEEP(PyTuple_GetItem(program, 8));
  e->device = KEEP(PyTuple_GetItem(program, 9));
  e->refuse = KEEP(PyTuple_GetItem(program, 10));
  int64_t part[4];
  for (int i = 0; i < 4; i++)
    if (!read_int(program, 2 + i, &part[i])) return 0;
  if (part[1] < 0 || part[1] >= e->arrays) return wrong("an example"), 0;
  e->by_stream = (int)part[0], e->example = (int)part[1], e->current = (int)part[2], e->ordinal = (int)part[3];
  return read_overlaps(e, program) && read_results(e, program);
}

entry *entry_new(const reading *r, PyObject *program) {
  entry *e = PyMem_Calloc(1, sizeof *e);
  if (!e) return PyErr_NoMemory(), NULL;
  e->users = 1;
  if (copy_key(e, r) && (program == Py_None || read_program(e, program))) return e;
  entry_release(e);
  return NULL;
}
