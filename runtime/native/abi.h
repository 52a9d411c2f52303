/* What the extension uses of CPython, declared here: a machine that builds it need not have Python.h.
 *
 * Everything is of the limited API of 3.11 (docs.python.org/3.11/c-api/stable.html), so one module serves every later CPython
 * that loads abi3 modules. Free-threaded builds before 3.15 load none. With KILN_PYTHON_H the real header stands in: the tests
 * compile it so, to prove that these declarations are its own. */
#ifndef KILN_NATIVE_ABI_H
#define KILN_NATIVE_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef KILN_PYTHON_H
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>
#else

typedef ptrdiff_t Py_ssize_t;
typedef struct _typeobject PyTypeObject;
typedef struct _object {
  Py_ssize_t ob_refcnt;
  PyTypeObject *ob_type;
} PyObject;
typedef struct _ts PyThreadState;

typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef int (*visitproc)(PyObject *, void *);
typedef int (*inquiry)(PyObject *);
typedef int (*traverseproc)(PyObject *, visitproc, void *);
typedef void (*freefunc)(void *);

typedef struct {
  const char *ml_name;
  PyCFunction ml_meth;
  int ml_flags;
  const char *ml_doc;
} PyMethodDef;
typedef struct {
  const char *name;
  int type;
  Py_ssize_t offset;
  int flags;
  const char *doc;
} PyMemberDef;
typedef struct {
  int slot;
  void *pfunc;
} PyType_Slot;
typedef struct {
  const char *name;
  int basicsize, itemsize;
  unsigned int flags;
  PyType_Slot *slots;
} PyType_Spec;
typedef struct {
  PyObject ob_base;
  PyObject *(*m_init)(void);
  Py_ssize_t m_index;
  PyObject *m_copy;
} PyModuleDef_Base;
typedef struct {
  PyModuleDef_Base m_base;
  const char *m_name, *m_doc;
  Py_ssize_t m_size;
  PyMethodDef *m_methods;
  void *m_slots;
  traverseproc m_traverse;
  inquiry m_clear;
  freefunc m_free;
} PyModuleDef;

enum { METH_VARARGS = 1, METH_NOARGS = 4, T_PYSSIZET = 19, READONLY = 1 };
enum { Py_TPFLAGS_BASETYPE = 1 << 10, Py_TPFLAGS_HAVE_GC = 1 << 14, Py_TPFLAGS_DEFAULT = 0 };
enum { Py_tp_call = 50, Py_tp_clear = 51, Py_tp_dealloc = 52, Py_tp_methods = 64, Py_tp_new = 65, Py_tp_traverse = 71, Py_tp_members = 72,
       Py_tp_free = 74 };

#define PyModuleDef_HEAD_INIT {{1, NULL}, NULL, 0, NULL}
#define PyMODINIT_FUNC __attribute__((visibility("default"))) PyObject *

extern PyObject _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct;
extern PyTypeObject PyFloat_Type, PyLong_Type, PyTuple_Type;
extern PyObject *PyExc_OverflowError, *PyExc_ValueError;
#define Py_None (&_Py_NoneStruct)
#define Py_True (&_Py_TrueStruct)
#define Py_False (&_Py_FalseStruct)
#define Py_TYPE(o) (((PyObject *)(o))->ob_type)

void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *);
PyObject *PyModule_Create2(PyModuleDef *, int);
#define PyModule_Create(def) PyModule_Create2(def, 3)
int PyModule_AddObjectRef(PyObject *, const char *, PyObject *);
PyObject *PyType_FromSpec(PyType_Spec *);
PyObject *PyType_GenericNew(PyTypeObject *, PyObject *, PyObject *);
void *PyType_GetSlot(PyTypeObject *, int);
void PyObject_GC_UnTrack(void *);

PyObject *PyObject_Call(PyObject *, PyObject *, PyObject *);
PyObject *PyObject_CallFunctionObjArgs(PyObject *, ...);
PyObject *PyObject_CallMethodObjArgs(PyObject *, PyObject *, ...);
PyObject *PyObject_GetAttr(PyObject *, PyObject *);
PyObject *PyUnicode_InternFromString(const char *);

PyObject *PyTuple_New(Py_ssize_t);
Py_ssize_t PyTuple_Size(PyObject *);
PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *);
PyObject *PyList_GetItem(PyObject *, Py_ssize_t);
int PyList_SetItem(PyObject *, Py_ssize_t, PyObject *);
int PyDict_Next(PyObject *, Py_ssize_t *, PyObject **, PyObject **);
Py_ssize_t PyDict_Size(PyObject *);
int PyBytes_AsStringAndSize(PyObject *, char **, Py_ssize_t *);
double PyFloat_AsDouble(PyObject *);
long long PyLong_AsLongLong(PyObject *);
long long PyLong_AsLongLongAndOverflow(PyObject *, int *);
unsigned long long PyLong_AsUnsignedLongLong(PyObject *);
PyObject *PyLong_FromLongLong(long long);
void *PyCapsule_GetPointer(PyObject *, const char *);
PyObject *PyDict_New(void);
int PyDict_SetItem(PyObject *, PyObject *, PyObject *);

PyObject *PyErr_NoMemory(void);
PyObject *PyErr_Occurred(void);
void PyErr_Clear(void);
void PyErr_SetString(PyObject *, const char *);
PyThreadState *PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState *);
void *PyMem_Malloc(size_t);
void *PyMem_Calloc(size_t, size_t);
void PyMem_Free(void *);

#endif

/* Calls without a tuple and a dict. The limited API has them from 3.12 on; 3.11 knows the same flag, lets no class inherit it, and
 * takes Py_tp_call instead. */
typedef PyObject *(*vector_call)(PyObject *, PyObject *const *args, size_t count, PyObject *names);
enum { TYPE_HAS_VECTOR_CALL = 1 << 11 };
#define VECTOR_COUNT(n) ((Py_ssize_t)((n) & ~((size_t)1 << (8 * sizeof(size_t) - 1))))

#endif
