/* The self-test's inputs: one call that a kernel takes, made of its manifest's vector and what its predicate asks for. */
#include "vector.h"

#include <math.h>
#include <stdlib.h>

/* ---- what a predicate asks for ---- */

/* Calls `visit` for each leaf that must hold. */
static void each_leaf(const expr *pred, vector *v, void (*visit)(vector *, const expr *)) {
  if (pred->head != P_AND) {
    visit(v, pred);
    return;
  }
  for (uint32_t i = 0; i < pred->count; i++) each_leaf(&pred->items[i], v, visit);
}

/* The limits of the dim or scalar that an expression is; NULL for any other expression. */
static limits *limits_of(vector *v, const expr *e) {
  if (e->head != X_DIM && e->head != X_ARG) return NULL;
  int32_t dim = e->head == X_DIM ? e->index : v->op->bound_dim[e->index];
  return dim >= 0 ? &v->dim_limits[dim] : &v->arg_limits[e->index];
}

static void at_least(limits *l, int64_t n) { l->least = n > l->least ? n : l->least; }
static void at_most(limits *l, int64_t n) { l->most = n < l->most ? n : l->most; }

static void take_comparison(vector *v, expr_head head, const expr *a, const expr *b) {
  limits *l = limits_of(v, a);
  if (l == NULL || b->head != X_INTEGER) return;
  if (head == P_EQ || head == P_GE) at_least(l, b->integer);
  if (head == P_GT) at_least(l, b->integer + 1);
  if (head == P_EQ || head == P_LE) at_most(l, b->integer);
  if (head == P_LT) at_most(l, b->integer - 1);
}

static void take_multiple(vector *v, const expr *e, int64_t multiple) {
  limits *l = limits_of(v, e);
  if (l != NULL && multiple > l->multiple) l->multiple = multiple;
}

static void take_params(vector *v) {
  for (uint32_t i = 0; i < v->kernel->param_count; i++) {
    const kernel_param *p = &v->kernel->params[i];
    if (p->kind == PARAM_DROPPED) take_comparison(v, P_EQ, &p->value, &(expr){.head = X_INTEGER, .integer = p->equals});
    else if (p->has_value && p->has_divisible_by) take_multiple(v, &p->value, p->divisible_by);
  }
}

static void take_leaf(vector *v, const expr *leaf) {
  if (leaf->head >= P_EQ && leaf->head <= P_GE) take_comparison(v, leaf->head, &leaf->items[0], &leaf->items[1]);
  if (leaf->head == P_DIVISIBLE) take_multiple(v, &leaf->items[0], leaf->integer);
  if (leaf->head == P_DTYPE) v->dtypes[leaf->index] = kiln_dtype_named(leaf->text);
  else if (leaf->head == P_ATTR) v->attrs[leaf->index] = leaf->attribute;
  else if (leaf->head == P_ABSENT) v->absent[leaf->index] = true;
}

static bool is_legal(const operand_dtype *d, kiln_dtype found) {
  for (uint32_t i = 0; i < d->count; i++)
    if (d->choices[i] == found) return true;
  return false;
}

/* Types that the predicate does not fix are the parameter's, those of the same variable, or the first legal one. */
static void complete_dtypes(vector *v) {
  const op_signature *sig = v->sig;
  for (uint32_t i = 0; i < v->kernel->param_count; i++) {
    const kernel_param *p = &v->kernel->params[i];
    if (p->tensor < 0 || v->dtypes[p->tensor] != 0) continue;
    kiln_dtype found = kiln_dtype_named(p->dtype);
    if (is_legal(&sig->tensors[p->tensor].dtype, found)) v->dtypes[p->tensor] = found;
  }
  for (uint32_t i = 0; i < sig->tensor_count; i++)
    for (uint32_t j = 0; j < sig->tensor_count && v->dtypes[i] == 0; j++) {
      const char *a = sig->tensors[i].dtype.var, *b = sig->tensors[j].dtype.var;
      if (a != NULL && b != NULL && strcmp(a, b) == 0) v->dtypes[i] = v->dtypes[j];
    }
  for (uint32_t i = 0; i < sig->tensor_count; i++)
    if (v->dtypes[i] == 0) v->dtypes[i] = sig->tensors[i].dtype.choices[0];
}

/* ---- extents ---- */

static int64_t within(const limits *l, int64_t n) {
  if (n < l->least) n = l->least;
  if (n > l->most) n = l->most;
  return l->multiple > 1 && n % l->multiple != 0 ? n + l->multiple - n % l->multiple : n;
}

static void set_dims(vector *v, int64_t filler) {
  const op_signature *sig = v->sig;
  for (uint32_t i = 0; i < sig->dim_count; i++) {
    v->dims[i] = filler;
    for (uint32_t j = 0; j < v->kernel->selftest_count && !v->small; j++)
      if (strcmp(v->kernel->selftest_shape[j].key, sig->dims[i]) == 0) v->dims[i] = v->kernel->selftest_shape[j].value;
    v->dims[i] = within(&v->dim_limits[i], v->dims[i]);
    v->known[i] = true;
  }
}

static number scalar_value(const vector *v, uint32_t i, int64_t filler) {
  const scalar_operand *o = &v->sig->scalars[i];
  bool real = o->dtype[0] == 'f';
  int32_t dim = v->op->bound_dim[i];
  double given = o->has_default ? o->default_value : o->has_minimum && o->minimum >= 1 ? o->minimum : real ? 1.0 : (double)filler;
  if (dim >= 0) given = (double)v->dims[dim];
  else if (o->dtype[0] == 'b') given = given != 0;
  else if (!real) given = (double)within(&v->arg_limits[i], (int64_t)given);
  return real ? (number){true, 0, given} : (number){false, (int64_t)given, 0};
}

static bool shape_tensor(vector *v, uint32_t i, const bound *b) {
  const tensor_operand *t = &v->sig->tensors[i];
  int64_t shape[KILN_MAX_RANK], all = 1;
  for (uint32_t axis = 0; axis < t->rank; axis++) {
    number n;
    if (kiln_evaluate(&t->shape[axis], b, v->args, &n,
                      NULL) != KILN_OK || n.real || n.integer < 0 || n.integer > 1 << 20) return false;
    shape[axis] = n.integer;
    all *= n.integer > 0 ? n.integer : 1;
    if (all > 1 << 26) return false;
  }
  v->tensors[i] = kiln_dense(NULL, v->dtypes[i], v->op->library->device.ordinal, (int32_t)t->rank, shape);
  v->bytes[i] = (size_t)all * (size_t)KILN_DTYPES[v->dtypes[i]].bytes;
  return true;
}

/* A view of no memory: dense, aligned, good for asking whether the kernel would take the call. */
static bool make_views(vector *v) {
  for (uint32_t i = 0; i < v->sig->tensor_count; i++) {
    view one;
    v->reads[i] = v->writes[i] = (view){0};
    if (v->absent[i]) continue;
    if (kiln_make_view(v->sig->name, v->sig->tensors[i].name, &v->tensors[i], &one, NULL) != KILN_OK) return false;
    one.at = i;
    if (v->sig->tensors[i].role != ROLE_OUT) v->reads[i] = one;
    one.at = i + v->sig->tensor_count;
    if (v->sig->tensors[i].role != ROLE_IN) v->writes[i] = one;
  }
  return true;
}

static bool fits(vector *v, int64_t filler, work *w) {
  bound shapes = {.sig = v->sig, .op = v->sig->name, .dims = v->dims, .known = v->known, .attrs = v->attrs}, *b;
  wanted asked = {.variant = v->kernel->variant, .fast = true};
  work before = *w;
  set_dims(v, filler);
  for (uint32_t i = 0; i < v->sig->scalar_count; i++) v->args[i] = scalar_value(v, i, filler);
  for (uint32_t i = 0; i < v->sig->tensor_count; i++)
    if (!shape_tensor(v, i, &shapes)) return false;
  bool good = make_views(v) && kiln_bind_views(v->op, v->reads, v->writes, v->args, v->attrs, w, &b, &v->why) == KILN_OK &&
              kiln_judge(v->op, v->candidate, b, v->reads, v->writes, v->args, &asked, w, NULL, &v->why) == KILN_OK;
  if (w->blocks == before.blocks) w->at = before.at;
  return good;
}

/* ---- the whole call ---- */

static bool make_room(vector *v, work *w) {
  uint32_t tensors = v->sig->tensor_count;
  v->dims = kiln_work_get(w, v->sig->dim_count, sizeof *v->dims);
  v->known = kiln_work_get(w, v->sig->dim_count, sizeof *v->known);
  v->dim_limits = kiln_work_get(w, v->sig->dim_count, sizeof *v->dim_limits);
  v->arg_limits = kiln_work_get(w, v->sig->scalar_count, sizeof *v->arg_limits);
  v->dtypes = kiln_work_get(w, tensors, sizeof *v->dtypes);
  v->absent = kiln_work_get(w, tensors, sizeof *v->absent);
  v->tensors = kiln_work_get(w, tensors, sizeof *v->tensors);
  v->bytes = kiln_work_get(w, tensors, sizeof *v->bytes);
  v->reads = kiln_work_get(w, tensors, sizeof *v->reads);
  v->writes = kiln_work_get(w, tensors, sizeof *v->writes);
  v->args = kiln_work_get(w, v->sig->scalar_count, sizeof *v->args);
  v->attrs = kiln_work_get(w, v->sig->attr_count, sizeof *v->attrs);
  for (uint32_t i = 0; v->dim_limits != NULL && i < v->sig->dim_count; i++) v->dim_limits[i] = (limits){0, INT64_MAX, 1};
  for (uint32_t i = 0; v->arg_limits != NULL && i < v->sig->scalar_count; i++) v->arg_limits[i] = (limits){INT64_MIN, INT64_MAX, 1};
  return v->dim_limits && v->arg_limits && v->attrs && v->args && v->writes && v->reads && v->bytes && v->tensors && v->absent &&
      v->dtypes && v->known && v->dims;
}

/* Attributes that the predicate leaves open are tried one choice after another, like digits of a number. */
static bool next_attrs(vector *v) {
  for (uint32_t i = 0; i < v->sig->attr_count; i++) {
    const attr_operand *a = &v->sig->attrs[i];
    if (v->digit[i] + 1u < a->count) {
      v->attrs[i] = a->choices[++v->digit[i]];
      return true;
    }
    v->digit[i] = 0;
    v->attrs[i] = a->choices[0];
  }
  return false;
}

static bool search(vector *v, work *w) {
  static const int64_t fillers[] = {4, 3, 8, 16, 64, 128, 256, 1, 2};
  enum { MOST = 256 };
  for (int tried = 0; tried < MOST; tried++) {
    for (int small = 0; small < 2; small++) /* the vector's own extents can be too big for operands of many dims */
      for (size_t i = 0; i < sizeof fillers / sizeof *fillers; i++) {
        v->small = small;
        if (fits(v, fillers[i], w)) return true;
      }
    if (!next_attrs(v)) return false;
  }
  return false;
}

kiln_code kiln_make_vector(candidate *c, work *w, vector *out, kiln_error *error) {
  *out = (vector){.candidate = c, .op = c->op, .sig = c->op->sig, .kernel = c->kernel};
  if (!make_room(out, w)) return kiln_work_failed(w, out->sig->name, error);
  for (uint32_t i = 0; i < out->sig->attr_count; i++) out->attrs[i] = out->sig->attrs[i].fallback;
  each_leaf(&c->kernel->when, out, take_leaf);
  take_params(out);
  complete_dtypes(out);
  if (search(out, w)) return KILN_OK;
  return kiln_fail(error, KILN_INTERNAL, "no call could be made of its vector (%.1500s)", out->why.message);
}

/* ---- contents ---- */

static uint64_t next_random(uint64_t *state) {
  uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
  return z ^ z >> 31;
}

static void put_real(void *at, kiln_dtype dtype, float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (dtype == KILN_F64) memcpy(at, &(double){x}, 8);
  else if (dtype == KILN_F32) memcpy(at, &x, 4);
  else if (dtype == KILN_BF16) memcpy(at, &(uint16_t){(uint16_t)(bits >> 16)}, 2);
  else if (bits << 1 == 0) memset(at, 0, 2);
  else memcpy(at, &(uint16_t){(uint16_t)((bits >> 16 & 0x8000) | ((bits >> 23 & 0xff) - 112) << 10 | (bits >> 13 & 0x3ff))}, 2);
}

/* Small powers and halves that every type holds; indices that are `index`; codes below 2 in every FP8 type. */
static void put_element(void *at, kiln_dtype dtype, int64_t index, uint64_t r) {
  float real = (float)((int)(r % 255) - 127) / 64.0f;
  uint8_t byte = (uint8_t)(r >> 8);
  switch (dtype) {
    case KILN_F64: case KILN_F32: case KILN_F16: case KILN_BF16: put_real(at, dtype, real); return;
    case KILN_F8E4M3: case KILN_F8E5M2: *(uint8_t *)at = byte & 0xbb; return;
    case KILN_BOOL: *(uint8_t *)at = byte & 1; return;
    case KILN_I8: *(int8_t *)at = (int8_t)((int)(byte & 15) - 8); return;
    case KILN_I16: memcpy(at, &(int16_t){(int16_t)index}, 2); return;
    case KILN_I32: case KILN_U32: memcpy(at, &(int32_t){(int32_t)index}, 4); return;
    case KILN_I64: memcpy(at, &(int64_t){(int64_t)index}, 8); return;
    default: *(uint8_t *)at = byte; return;
  }
}

/* What indices select from: the fewest rows of a table, an operand of rows that are not the op's; without one, the least extent. */
static int64_t index_limit(const vector *v) {
  int64_t tables = INT64_MAX, any = INT64_C(1) << 20;
  for (uint32_t d = 0; d < v->sig->dim_count; d++)
    if (v->dims[d] > 0 && v->dims[d] < any) any = v->dims[d];
  for (uint32_t i = 0; i < v->sig->tensor_count; i++) {
    const tensor_operand *t = &v->sig->tensors[i];
    if (v->absent[i] || t->rank < 2 || (t->shape[0].head == X_DIM && strcmp(t->shape[0].name, v->sig->rows) == 0)) continue;
    if (v->tensors[i].shape[0] > 0 && v->tensors[i].shape[0] < tables) tables = v->tensors[i].shape[0];
  }
  return tables < INT64_MAX ? tables : any;
}

/* Indices follow each other, from 1: rows that an op writes must not be shared. */
void kiln_fill_vector(const vector *v, uint32_t i, void *host) {
  size_t size = (size_t)KILN_DTYPES[v->dtypes[i]].bytes;
  uint64_t state = (uint64_t)v->kernel->selftest_seed * 1000003 + i;
  uint64_t limit = (uint64_t)index_limit(v);
  for (size_t at = 0; at < v->bytes[i]; at += size)
    put_element((char *)host + at, v->dtypes[i], (int64_t)((at / size + 1) % limit), next_random(&state));
}

double kiln_element(const void *at, kiln_dtype dtype) {
  uint16_t half = 0;
  uint32_t bits;
  float single;
  double real;
  switch (dtype) {
    case KILN_F64: memcpy(&real, at, 8); return real;
    case KILN_F32: memcpy(&single, at, 4); return (double)single;
    case KILN_BF16: memcpy(&half, at, 2); bits = (uint32_t)half << 16; memcpy(&single, &bits, 4); return (double)single;
    case KILN_F16: {
      memcpy(&half, at, 2);
      int exponent = half >> 10 & 31, fraction = half & 0x3ff;
      if (exponent == 31) return fraction ? NAN : half & 0x8000 ? -INFINITY : INFINITY;
      real = (exponent ? 1024 + fraction : fraction) / 16777216.0 * (double)(1 << (exponent ? exponent - 1 : 0));
      return half & 0x8000 ? -real : real;
    }
    default: return 0;
  }
}
