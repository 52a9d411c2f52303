/* The self-test's parts: a call made up for a kernel. */
#ifndef KILN_VECTOR_H
#define KILN_VECTOR_H

#include "run.h"

/* What a number of the call must be, as far as the kernel's predicate and parameters say. */
typedef struct { int64_t least, most, multiple; } limits;

typedef struct {
  candidate *candidate;
  const kiln_op *op;
  const op_signature *sig;
  const manifest_kernel *kernel;
  int64_t *dims; bool *known;   /* per dim */
  limits *dim_limits, *arg_limits; /* per dim, per scalar */
  kiln_dtype *dtypes;           /* per tensor, as everything below but args and attrs */
  bool *absent;
  kiln_tensor *tensors;
  size_t *bytes;
  view *reads, *writes;
  number *args;
  attr_value *attrs;
  bool small;                   /* extents that the predicate leaves open are the filler, whatever the vector says */
  uint32_t digit[32];           /* per attribute: which choice is tried */
  kiln_error why;
} vector;

/* KILN_INTERNAL: no call that the kernel takes was found. */
kiln_code kiln_make_vector(candidate *c, work *w, vector *out, kiln_error *error);
/* The seeded contents of a tensor. */
void kiln_fill_vector(const vector *v, uint32_t i, void *host);
/* An element of a floating-point type as a number; 0 for every other type. */
double kiln_element(const void *at, kiln_dtype dtype);

#endif
