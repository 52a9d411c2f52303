/* Arrays as words: what a decision depends on, and the address. A layout here is what kiln.runtime.shortcut takes for one. */
#include "native.h"

enum { MAX_TYPES = 16, NUMPY_FLAGS = 0x100 | 0x200 | 0x400 /* aligned, native byte order, writeable */ };

/* What numpy.ndarray.__array_struct__ points to (numpy.org/doc/stable/reference/arrays.interface.html). */
typedef struct {
  int two, rank;
  char kind;
  int item_size, flags;
  intptr_t *shape, *strides; /* in bytes */
  void *data;
  PyObject *description;
} numpy_array;

typedef struct {
  PyTypeObject *type;
  const dl_exchange *api; /* NULL: NumPy's */
} array_type;

static array_type types[MAX_TYPES];
static int type_count;
static PyObject *s_array_struct, *s_dtype;

int key_add(key *k, uint64_t word) {
  if (k->count >= MAX_KEY) return 0;
  k->words[k->count++] = word;
  return 1;
}

int key_add_object(key *k, PyObject *object) {
  if (k->held_count >= MAX_FLAT) return 0;
  k->held[k->held_count++] = object;
  return key_add(k, (uint64_t)(uintptr_t)object);
}

uint64_t key_hash(const key *k) {
  uint64_t h = (uint64_t)k->count;
  for (int i = 0; i < k->count; i++) {
    h = (h ^ k->words[i]) * UINT64_C(0x9E3779B97F4A7C15);
    h ^= h >> 29;
  }
  return h;
}

static const array_type *type_of(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  for (int i = 0; i < type_count; i++)
    if (types[i].type == type) return &types[i];
  return NULL;
}

/* torch's own word for it, which kiln.runtime.shortcut goes by: extents of 1 may have any stride. */
static int is_contiguous(const dl_tensor *t) {
  if (!t->strides) return 1;
  int64_t step = 1;
  for (int d = t->ndim - 1; d >= 0; d--) {
    if (t->shape[d] == 1) continue;
    if (t->strides[d] != step) return 0;
    step *= t->shape[d];
  }
  return 1;
}

static uint64_t alignment(uint64_t address) { return address & -address & 255; }

static outcome read_exchange(const dl_exchange *api, PyObject *object, key *k, uint64_t *address) {
  dl_tensor t;
  if (api->read(object, &t)) {
    PyErr_Clear();
    return UNKNOWN;
  }
  *address = (uint64_t)(uintptr_t)t.data + t.byte_offset;
  if (!*address || t.ndim < 0 || t.ndim > MAX_RANK) return UNKNOWN;
  int dense = is_contiguous(&t);
  uint64_t kind = t.code | (uint64_t)t.bits << 8 | (uint64_t)t.lanes << 16 | (uint64_t)t.ndim << 32 | (uint64_t)dense << 40;
  int fits = key_add(k, (uint64_t)(uintptr_t)api) && key_add(k, kind) &&
             key_add(k, (uint64_t)(uint32_t)t.device_type << 32 | (uint32_t)t.device_id) && key_add(k, alignment(*address));
  for (int d = 0; d < t.ndim; d++) {
    if (!t.shape[d]) return UNKNOWN;
    fits = fits && key_add(k, (uint64_t)t.shape[d]);
  }
  for (int d = 0; !dense && d < t.ndim; d++) fits = fits && key_add(k, (uint64_t)t.strides[d]);
  return fits ? DONE : UNKNOWN;
}

static outcome read_interface(const numpy_array *a, PyObject *dtype, key *k, uint64_t *address) {
  *address = (uint64_t)(uintptr_t)a->data;
  if (a->two != 2 || !*address || a->rank < 0 || a->rank > MAX_RANK) return UNKNOWN;
  int fits = key_add(k, 1) && key_add_object(k, dtype) &&
             key_add(k, (uint64_t)a->rank << 32 | (uint64_t)(a->flags & NUMPY_FLAGS)) && key_add(k, alignment(*address));
  for (int d = 0; d < a->rank; d++) {
    if (!a->shape[d]) return UNKNOWN;
    fits = fits && key_add(k, (uint64_t)a->shape[d]) && key_add(k, (uint64_t)a->strides[d]);
  }
  return fits ? DONE : UNKNOWN;
}

static outcome read_numpy(PyObject *object, key *k, uint64_t *address) {
  PyObject *capsule = PyObject_GetAttr(object, s_array_struct);
  PyObject *dtype = capsule ? PyObject_GetAttr(object, s_dtype) : NULL;
  const numpy_array *a = dtype ? PyCapsule_GetPointer(capsule, NULL) : NULL;
  outcome found = a ? read_interface(a, dtype, k, address) : UNKNOWN;
  if (!a) PyErr_Clear();
  Py_DecRef(dtype);
  Py_DecRef(capsule);
  return found;
}

outcome array_read(PyObject *object, key *k, uint64_t *address) {
  if (object == Py_None) {
    *address = 0;
    return key_add(k, 0) ? DONE : UNKNOWN;
  }
  const array_type *type = type_of(object);
  if (!type) return UNKNOWN;
  return type->api ? read_exchange(type->api, object, k, address) : read_numpy(object, k, address);
}

uint64_t array_address(PyObject *object) {
  key unused;
  unused.count = unused.held_count = 0;
  uint64_t address = 0;
  return array_read(object, &unused, &address) == DONE ? address : 0;
}

outcome array_stream(PyObject *object, int device, uint64_t *stream) {
  const array_type *type = type_of(object);
  void *found = NULL;
  if (!type || !type->api) return UNKNOWN;
  if (type->api->stream(DL_CUDA, device, &found)) {
    PyErr_Clear();
    return UNKNOWN;
  }
  *stream = (uint64_t)(uintptr_t)found;
  return DONE;
}

static int add_type(PyObject *type, const dl_exchange *api) {
  for (int i = 0; i < type_count; i++)
    if (types[i].type == (PyTypeObject *)type) return 1;
  if (type_count >= MAX_TYPES) return 0;
  types[type_count].api = api;
  types[type_count++].type = (PyTypeObject *)KEEP(type);
  return 1;
}

PyObject *register_exchange(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *type = PyTuple_GetItem(args, 0), *capsule = type ? PyTuple_GetItem(args, 1) : NULL;
  const dl_exchange *api = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
  if (!api) return NULL;
  while (api && api->major > DL_MAJOR) api = api->older;
  int known = api && api->major == DL_MAJOR && api->read && api->stream && add_type(type, api);
  return KEEP(known ? Py_True : Py_False);
}

PyObject *register_numpy(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *type = PyTuple_GetItem(args, 0);
  if (!type) return NULL;
  return KEEP(add_type(type, NULL) ? Py_True : Py_False);
}

int arrays_init(void) {
  s_array_struct = PyUnicode_InternFromString("__array_struct__");
  s_dtype = PyUnicode_InternFromString("dtype");
  return s_array_struct && s_dtype;
}
