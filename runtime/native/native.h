/* What the parts of the extension share. The GIL protects all of it; it is let go only while a kernel is queued or runs. */
#ifndef KILN_NATIVE_H
#define KILN_NATIVE_H

#include "abi.h"
#include "dlpack.h"

enum {
  MAX_VALUES = 32, /* what a call gives, out= aside */
  MAX_FLAT = 48,   /* arrays given, none, arrays made */
  MAX_SCALARS = 16,
  MAX_RANK = 8,
  MAX_KEY = 512, /* words */
  MAX_PARAMS = 64,
  MAX_NAMES = 32,
  MAX_FORMS = 64,
  MAX_ENTRIES = 4096
};

/* A call in C is one of these; all but DONE leave no exception. */
typedef enum { FAILED = -1, UNKNOWN = 0, DONE = 1 } outcome;

/* ---- arrays.c ---- */
typedef struct {
  uint64_t words[MAX_KEY];
  int count;
  PyObject *held[MAX_FLAT]; /* objects whose addresses are among the words: whoever keeps the words keeps them */
  int held_count;
} key;

int key_add(key *, uint64_t word);
int key_add_object(key *, PyObject *); /* the object lives as long as the call's arguments */
uint64_t key_hash(const key *);

/* Adds an array's layout; its address is 0 only where it is None. UNKNOWN: not of a type that is registered, without elements or
 * memory, or its own framework does not tell. */
outcome array_read(PyObject *, key *, uint64_t *address);
uint64_t array_address(PyObject *); /* 0 where array_read would not do */
/* The stream that work on arrays like this is queued on now. */
outcome array_stream(PyObject *, int device, uint64_t *stream);
PyObject *register_exchange(PyObject *, PyObject *args); /* (type, capsule) -> bool */
PyObject *register_numpy(PyObject *, PyObject *args);    /* (type,) */
int arrays_init(void);

/* ---- launch.c ---- */
typedef struct {
  int is_float;
  int64_t i;
  double f;
} scalar;
typedef struct launch launch;
extern PyObject *launch_type;

int launch_init(void);
int is_cuda(const launch *);
/* Queues the kernel, or runs it. UNKNOWN: a scalar does not fit its parameter. `status` is the driver's, or the entry's. */
outcome launch_run(const launch *, const uint64_t *addresses, const scalar *, uint64_t stream, int64_t *status);
/* Whether a launch that failed so queued nothing, for want of its context: it is made again by Python, which has one. */
int wants_context(const launch *, int64_t status);

/* ---- forms.c ---- */
typedef struct {
  int written, other;
  uint64_t a_bytes, b_bytes;
  int same;
} overlap;

typedef struct {
  int users;
  uint64_t hash;
  int words;
  uint64_t *key;
  PyObject *held; /* a tuple */
  launch *run;    /* NULL: the call is Python's */
  PyObject *makers, *count, *device, *refuse;
  overlap *overlaps;
  int overlap_count;
  int result_count, results[MAX_FLAT];
  int by_stream;        /* makers take a stream as well */
  int example;          /* which array they and the stream go by */
  int current, ordinal; /* whether calls that name no stream take the array's current one, of this device */
  int arrays;           /* how many are given */
} entry;

typedef enum { TENSOR, NUMBER, CHOICE } role;
typedef struct {
  role kind;
  int index, is_bool, is_float, shaping;
  int64_t least, most;
  double from, to;
} slot;

typedef struct form {
  int users, positional, named, values, scalars;
  PyObject **names;
  slot *slots;
  scalar given[MAX_SCALARS];
  entry **table;
  size_t size, used;
} form;

/* Everything that is known of a call before its entry is looked up. */
typedef struct {
  PyObject *flat[MAX_FLAT];
  uint64_t addresses[MAX_FLAT];
  int arrays;
  scalar scalars[MAX_SCALARS];
  key key;
} reading;

/* What a caller wrote. */
typedef struct {
  PyObject *values[MAX_VALUES];
  PyObject *names[MAX_NAMES];
  int positional, named;
  PyObject *out, *stream; /* NULL where not given, or None */
  int options;            /* how many of these two are given, None included */
} call;

outcome call_gather(call *, PyObject *args, PyObject *kwargs);
outcome call_gather_vector(call *, PyObject *const *args, size_t count, PyObject *names);
outcome call_read(const form *, const call *, reading *);
form *form_new(PyObject *args); /* (positional, names, slots, scalars) */
void form_release(form *);
int form_fits(const form *, const call *);
entry *form_find(const form *, const key *);
int form_add(form *, entry *);
/* An entry for what was read; `program` is None or (launch, makers, by_stream, example, current, ordinal, overlaps, results,
 * count, device, refuse). */
entry *entry_new(const reading *, PyObject *program);
void entry_release(entry *);
int entry_traverse(const entry *, visitproc, void *);
int forms_init(void);

/* ---- python.c: what a call needs of Python ---- */
int python_init(void);
/* The Python function of this name, of the object, with the same arguments. */
PyObject *python_way(PyObject *self, PyObject *name, PyObject *args, PyObject *kwargs);
PyObject *python_way_vector(PyObject *self, PyObject *name, PyObject *const *args, size_t count, PyObject *names);
extern PyObject *slow_way, *first_way; /* names */
/* Whether the device has a true `gone`. */
int is_gone(PyObject *device);
/* The handle of a stream that the caller names. */
outcome stream_of(PyObject *device, PyObject *stream, uint64_t *handle);
int count_up(PyObject *list);
/* Raises what a status means. */
outcome refused(PyObject *refuse, int64_t status);

/* ---- caller.c, bound.c ---- */
extern PyObject *caller_type, *bound_type;
int caller_init(void);
int bound_init(void);

/* ---- reading what Python hands over ---- */
int read_int(PyObject *tuple, Py_ssize_t at, int64_t *);
/* The items of a bytes object in a tuple, which must be a multiple of `size` long; their number, or -1. */
Py_ssize_t read_items(PyObject *tuple, Py_ssize_t at, size_t size, const void **);
PyObject *wrong(const char *what); /* sets a ValueError; these arguments are made by kiln.runtime alone */
int too_many(void);                /* sets an OverflowError: such calls stay Python's; 0 */

#define KEEP(object) (Py_IncRef((PyObject *)(object)), (object))
#define DROP(place)                      \
  do {                                   \
    PyObject *dropped = (PyObject *)(place); \
    (place) = NULL;                      \
    Py_DecRef(dropped);                  \
  } while (0)

#endif
