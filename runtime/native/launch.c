/* One launch with everything of its call's shape fixed: addresses and scalars are all that is put in. */
#include "native.h"

typedef struct {
  unsigned int grid[3], block[3], shared_bytes;
  void *stream;
  void *attributes;
  unsigned int attribute_count;
} driver_config;
enum { ATTRIBUTE = 72 /* bytes of the driver's CUlaunchAttribute */ };
_Static_assert(sizeof(driver_config) == 56 && offsetof(driver_config, stream) == 32, "the driver's CUlaunchConfig");

typedef int (*driver_launch)(const driver_config *, void *function, void **parameters, void **extra);
typedef int64_t (*cpu_entry)(const void *pointers, const void *integers, const void *floats, int64_t begin, int64_t end);

typedef struct {
  int32_t at, from;
} address_patch;
typedef struct {
  int32_t at, from, format; /* i 32 bits, q 64, f float, d double */
} scalar_patch;

struct launch {
  PyObject base;
  uint64_t code;     /* the driver's cuLaunchKernelEx, or a kernel of the CPU */
  uint64_t function; /* the driver's handle */
  driver_config config;
  int parameters, integers, floats; /* the latter two: where they start, on the CPU */
  int64_t rows; /* of the CPU's work; -1 for the driver */
  int address_count, scalar_count;
  address_patch addresses[MAX_PARAMS];
  scalar_patch scalars[MAX_PARAMS];
  uint64_t template[MAX_PARAMS];
  uint64_t attributes[4 * ATTRIBUTE / 8];
};

PyObject *launch_type;

int is_cuda(const launch *l) { return l->rows < 0; }

static void copy(void *to, const void *from, size_t bytes) { __builtin_memcpy(to, from, bytes); }

static int write_scalar(uint64_t *to, const scalar *s, int format) {
  if (format == 'i' || format == 'q') {
    int32_t narrow = (int32_t)s->i;
    if (s->is_float || (format == 'i' && narrow != s->i)) return 0;
    *to = format == 'i' ? (uint32_t)narrow : (uint64_t)s->i;
    return 1;
  }
  double value = s->is_float ? s->f : (double)s->i;
  float narrow = (float)value;
  /* An integer that a double does not hold, or a double that would become infinite. */
  if (!s->is_float && (s->i > (INT64_C(1) << 53) || s->i < -(INT64_C(1) << 53))) return 0;
  if (format == 'f' && __builtin_isinf(narrow) && !__builtin_isinf(value)) return 0;
  *to = 0;
  copy(to, format == 'f' ? (void *)&narrow : (void *)&value, format == 'f' ? 4 : 8);
  return 1;
}

static int64_t on_driver(const launch *l, uint64_t *values, uint64_t stream) {
  void *table[MAX_PARAMS + 1];
  for (int i = 0; i < l->parameters; i++) table[i] = &values[i];
  table[l->parameters] = NULL; /* for stand-ins of the driver, which do not know how many there are */
  driver_config config = l->config;
  config.stream = (void *)(uintptr_t)stream;
  config.attributes = (void *)(uintptr_t)l->attributes;
  return ((driver_launch)(uintptr_t)l->code)(&config, (void *)(uintptr_t)l->function, table, NULL);
}

static int64_t on_cpu(const launch *l, const uint64_t *values) {
  return ((cpu_entry)(uintptr_t)l->code)(values, values + l->integers, values + l->floats, 0, l->rows);
}

outcome launch_run(const launch *l, const uint64_t *addresses, const scalar *scalars, uint64_t stream, int64_t *status) {
  uint64_t values[MAX_PARAMS + 1];
  copy(values, l->template, sizeof(uint64_t) * (size_t)l->parameters);
  for (int i = 0; i < l->address_count; i++) values[l->addresses[i].at] = addresses[l->addresses[i].from];
  for (int i = 0; i < l->scalar_count; i++)
    if (!write_scalar(&values[l->scalars[i].at], &scalars[l->scalars[i].from], l->scalars[i].format)) return UNKNOWN;
  /* The driver waits where its queue is full, perhaps for a host function that needs the GIL. */
  PyThreadState *thread = PyEval_SaveThread();
  *status = is_cuda(l) ? on_driver(l, values, stream) : on_cpu(l, values);
  PyEval_RestoreThread(thread);
  return DONE;
}

int wants_context(const launch *l, int64_t status) {
  return is_cuda(l) && (status == 201 || status == 400 || status == 709);
}

static int read_config(launch *l, PyObject *args) {
  const void *config, *attributes;
  Py_ssize_t bytes = read_items(args, 2, 1, &config), count = bytes < 0 ? -1 : read_items(args, 3, ATTRIBUTE, &attributes);
  if (count < 0) return 0;
  if (count > 4) return too_many();
  if (bytes != sizeof l->config.grid + sizeof l->config.block + sizeof l->config.shared_bytes) return wrong("a launch configuration"), 0;
  copy(&l->config, config, (size_t)bytes);
  copy(l->attributes, attributes, (size_t)count * ATTRIBUTE);
  l->config.attribute_count = (unsigned int)count;
  return 1;
}

static int read_parameters(launch *l, PyObject *args) {
  const void *template, *addresses, *scalars;
  Py_ssize_t count = read_items(args, 4, 8, &template);
  Py_ssize_t a = count < 0 ? -1 : read_items(args, 5, sizeof *l->addresses, &addresses);
  Py_ssize_t s = a < 0 ? -1 : read_items(args, 6, sizeof *l->scalars, &scalars);
  if (s < 0) return 0;
  if (count > MAX_PARAMS || a > MAX_PARAMS || s > MAX_PARAMS) return too_many();
  copy(l->template, template, (size_t)count * 8);
  copy(l->addresses, addresses, (size_t)a * sizeof *l->addresses);
  copy(l->scalars, scalars, (size_t)s * sizeof *l->scalars);
  l->parameters = (int)count, l->address_count = (int)a, l->scalar_count = (int)s;
  for (int i = 0; i < l->address_count; i++)
    if ((uint32_t)l->addresses[i].at >= (uint32_t)count || (uint32_t)l->addresses[i].from >= MAX_FLAT) return wrong("an address"), 0;
  for (int i = 0; i < l->scalar_count; i++)
    if ((uint32_t)l->scalars[i].at >= (uint32_t)count || (uint32_t)l->scalars[i].from >= MAX_SCALARS) return wrong("a scalar"), 0;
  return 1;
}

static int read_cpu(launch *l, PyObject *args) {
  int64_t integers, floats;
  if (!read_int(args, 7, &integers) || !read_int(args, 8, &floats) || !read_int(args, 9, &l->rows)) return 0;
  if (integers < 0 || integers > floats || floats > l->parameters) return wrong("where parameters start"), 0;
  l->integers = (int)integers, l->floats = (int)floats;
  return 1;
}

/* Launch(code, function, config, attributes, template, addresses, scalars, integers, floats, rows) */
static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  (void)kwargs;
  int64_t code, function;
  if (!read_int(args, 0, &code) || !read_int(args, 1, &function)) return NULL;
  if (!code) return wrong("the code of a launch");
  launch *l = (launch *)PyType_GenericNew(type, NULL, NULL);
  if (!l) return NULL;
  l->code = (uint64_t)code, l->function = (uint64_t)function;
  if (read_config(l, args) && read_parameters(l, args) && read_cpu(l, args)) return (PyObject *)l;
  Py_DecRef((PyObject *)l);
  return NULL;
}

static void launch_free(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DecRef((PyObject *)type);
}

static PyType_Slot slots[] = {{Py_tp_new, (void *)launch_new}, {Py_tp_dealloc, (void *)launch_free}, {0, NULL}};
static PyType_Spec spec = {"kiln.runtime.native.Launch", sizeof(launch), 0, Py_TPFLAGS_DEFAULT, slots};

int launch_init(void) { return (launch_type = PyType_FromSpec(&spec)) != NULL; }
