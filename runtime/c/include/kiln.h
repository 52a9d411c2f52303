/* libkiln: runs verified trees of ahead-of-time compiled kernels. C11, no dependency; libcuda is opened at run time when a CUDA
 * device is asked for.
 *
 *   kiln_error error = {0};
 *   kiln_library *library;
 *   if (kiln_open(&(kiln_options){.root = "aot_artifacts", .device = "cpu"}, &library, &error)) die(error.message);
 *   const kiln_op *norm = kiln_find(library, "rms_norm", &error);
 *   kiln_argument arguments[] = {KILN_TENSOR("x", x), KILN_TENSOR("weight", w), KILN_NUMBER("eps", 1e-6), KILN_TENSOR("out", y)};
 *   kiln_run(norm, arguments, 4, NULL, NULL, &error);
 *   kiln_close(library);
 *
 * Every call returns KILN_OK or what kind of thing was wrong, with a sentence in the caller's kiln_error. No call ends the process,
 * prints, or changes global state. A library may be used by any number of threads; a kiln_call by one at a time. */
#ifndef KILN_H
#define KILN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KILN_VERSION "0.1.0"
#if defined(KILN_BUILD)
#define KILN_API __attribute__((visibility("default")))
#else
#define KILN_API
#endif

/* The kinds of error; the Python runtime's exceptions have the same meaning. */
typedef enum {
  KILN_OK = 0,
  KILN_CONTRACT,    /* a call breaks the op's contract: operands, shapes, types, strides, aliasing, ranges, indices */
  KILN_INTEGRITY,   /* a tree's bytes are not what its manifests say: nothing of the file was used */
  KILN_SCHEMA,      /* a document is not strict JSON, or not of a schema this version reads */
  KILN_TARGET,      /* the tree holds nothing legal for this device, driver or CPU */
  KILN_SELECTION,   /* no candidate may run this call; the message lists each with its reason */
  KILN_UNAVAILABLE, /* something needed is not there: a tree, a driver; or the library was sealed, closed or forked */
  KILN_DRIVER,      /* the CUDA driver refused; kiln_error.driver holds its CUresult */
  KILN_MEMORY,      /* the system has no memory left */
  KILN_DECLINED,    /* a provider of the caller's declines this call: the next candidate is tried */
  KILN_INTERNAL     /* an entry or a provider broke its own promise */
} kiln_code;

typedef struct {
  kiln_code code;
  int driver;         /* CUresult of KILN_DRIVER, else 0 */
  char message[2048]; /* what was found, what was expected, what to do; cut with an ellipsis if longer */
} kiln_error;

/* Element types; the values never change. KILN_F8E4M3 and KILN_F8E5M2 are bytes to operands of type u8. */
typedef enum {
  KILN_F64 = 1, KILN_F32, KILN_F16, KILN_BF16, KILN_F8E4M3, KILN_F8E5M2, KILN_U8, KILN_I8, KILN_I16, KILN_I32, KILN_U32, KILN_I64,
  KILN_BOOL
} kiln_dtype;

#define KILN_MAX_RANK 8
#define KILN_CPU (-1)

/* An array of the caller's. */
typedef struct {
  void *data;
  kiln_dtype dtype;
  int32_t device;                 /* KILN_CPU or a CUDA ordinal */
  int32_t rank;                   /* 0 .. KILN_MAX_RANK */
  int32_t readonly;               /* not 0: writing it is refused */
  int64_t shape[KILN_MAX_RANK];
  int64_t strides[KILN_MAX_RANK]; /* in elements */
} kiln_tensor;

typedef enum { KILN_KIND_TENSOR = 1, KILN_KIND_NUMBER, KILN_KIND_INTEGER, KILN_KIND_BOOL, KILN_KIND_TEXT } kiln_kind;

/* One named argument of a call: a tensor operand, a scalar, or an attribute. */
typedef struct {
  const char *name;
  kiln_kind kind;
  const kiln_tensor *tensor;
  double number;
  int64_t integer; /* also of KILN_KIND_BOOL */
  const char *text;
} kiln_argument;

typedef struct kiln_library kiln_library;
typedef struct kiln_op kiln_op;     /* belongs to its library */
typedef struct kiln_call kiln_call; /* one checked call, ready to run again and again */
typedef void *kiln_stream;          /* a CUstream, or NULL for the default stream; NULL on the CPU */

#ifdef __cplusplus
}
#endif

#endif
