/* From what a caller wrote to operands by position: names, defaults, scalar ranges, attributes, tensors. */
#include "run.h"

#include <math.h>

#define F32_MAX 3.4028234663852886e38

static const char *const KINDS[] = {"nothing", "tensor", "float", "int", "bool", "str", "tensor"};

static const char *kind_name(kiln_kind kind) {
  return kind >= KILN_KIND_TENSOR && kind <= KILN_KIND_WRITTEN ? KINDS[kind] : "thing of unknown kind";
}

/* ---- tensors ---- */

static kiln_code bad_tensor(const char *op, const char *name, const char *why, kiln_error *error) {
  return kiln_fail(error, KILN_CONTRACT, "%s: %s: %s", op, name, why);
}

/* What a kernel may index must be countable in 64 bits: elements, and bytes from the first to the last. */
static bool countable(const kiln_tensor *t) {
  int64_t elements = 1, span = 0, step;
  for (int32_t i = 0; i < t->rank; i++) {
    int64_t extent = t->shape[i] > 1 ? t->shape[i] : 1;
    if (__builtin_mul_overflow(elements, extent, &elements)) return false;
    if (__builtin_mul_overflow(extent, t->strides[i], &step) || __builtin_add_overflow(span, step, &span)) return false;
  }
  return elements < INT64_C(1) << 56 && span < INT64_C(1) << 56;
}

kiln_code kiln_make_view(const char *op, const char *name, const kiln_tensor *t, view *out, kiln_error *error) {
  if (t->rank < 0 || t->rank > KILN_MAX_RANK) return bad_tensor(op, name, "its rank is not 0 to 8; fill the kiln_tensor.", error);
  if (t->dtype < KILN_F64 || t->dtype > KILN_BOOL) return bad_tensor(op, name, "its dtype is none; fill the kiln_tensor.", error);
  *out = (view){.pointer = (uintptr_t)t->data, .dtype = t->dtype, .device = t->device, .rank = t->rank, .given = true,
                .readonly = t->readonly != 0};
  for (int32_t i = 0; i < t->rank; i++) {
    if (t->shape[i] < 0) return bad_tensor(op, name, "it has a negative extent; fill the kiln_tensor.", error);
    if (t->strides[i] < 0) return kiln_fail(error, KILN_CONTRACT, "%s: %s has a negative stride; pass a copy.", op, name);
    out->shape[i] = t->shape[i];
    out->strides[i] = t->strides[i];
  }
  if (!countable(t)) return bad_tensor(op, name, "it spans 2^56 elements or more; check its shape and strides.", error);
  return KILN_OK;
}

kiln_tensor kiln_dense(void *data, kiln_dtype dtype, int32_t device, int32_t rank, const int64_t *shape) {
  kiln_tensor t = {.data = data, .dtype = dtype, .device = device, .rank = rank};
  int64_t step = 1;
  for (int32_t i = (rank < KILN_MAX_RANK ? rank : KILN_MAX_RANK) - 1; i >= 0; i--) {
    t.shape[i] = shape[i];
    t.strides[i] = step;
    /* What overflows here is refused when the tensor is used. */
    if (__builtin_mul_overflow(step, shape[i] > 1 ? shape[i] : 1, &step)) step = INT64_MAX;
  }
  return t;
}

/* ---- scalars ---- */

static kiln_code wrong_kind(const char *op, const scalar_operand *o, const kiln_argument *given, kiln_error *error) {
  bool integral = o->dtype[0] == 'i', boolean = o->dtype[0] == 'b';
  const char *expected = integral ? "an integer" : boolean ? "True or False" : "a number";
  if (given == NULL) return kiln_fail(error, KILN_CONTRACT, "%s: %s is missing; pass %s.", op, o->name, expected);
  return kiln_fail(error, KILN_CONTRACT, "%s: %s is a %s, expected %s.", op, o->name, kind_name(given->kind), expected);
}

static kiln_code out_of_range(const char *op, const scalar_operand *o, const number *n, const char *expected, kiln_error *error) {
  sink m = kiln_message(error);
  kiln_put(&m, "%s: %s is ", op, o->name);
  kiln_put_value(&m, n);
  kiln_put(&m, "%s", expected);
  return kiln_fail_put(error, KILN_CONTRACT, &m);
}

static kiln_code check_minimum(const char *op, const scalar_operand *o, const number *n, kiln_error *error) {
  if (!o->has_minimum && !o->positive) return KILN_OK;
  double least = o->has_minimum ? o->minimum : 0.0, found = n->real ? n->value : (double)n->integer;
  if (o->positive ? found > least : found >= least) return KILN_OK;
  char bound[96];
  sink s = {bound, sizeof bound, 0};
  kiln_put(&s, o->positive ? ", expected more than " : ", expected ");
  kiln_put_number(&s, least);
  kiln_put(&s, o->positive ? "." : " or more.");
  return out_of_range(op, o, n, bound, error);
}

static kiln_code cast(const char *op, const scalar_operand *o, number *n, kiln_error *error) {
  if (strcmp(o->dtype, "i32") == 0 && (n->integer < INT32_MIN || n->integer > INT32_MAX))
    return out_of_range(op, o, n, ", expected an integer of 32 bits.", error);
  if (strcmp(o->dtype, "f32") == 0 && isfinite(n->value) && fabs(n->value) > F32_MAX)
    return out_of_range(op, o, n, ", which f32 cannot hold; expected a smaller magnitude.", error);
  return check_minimum(op, o, n, error);
}

kiln_code kiln_cast_scalar(const char *op, const scalar_operand *o, const kiln_argument *given, number *out, kiln_error *error) {
  bool real = o->dtype[0] == 'f';
  if (given == NULL) {
    if (!o->has_default) return wrong_kind(op, o, NULL, error);
    *out = real ? (number){true, 0, o->default_value} : (number){false, (int64_t)o->default_value, 0};
    return cast(op, o, out, error);
  }
  bool fits = given->kind == (o->dtype[0] == 'b' ? KILN_KIND_BOOL : KILN_KIND_INTEGER) || (real && given->kind == KILN_KIND_NUMBER);
  if (!fits) return wrong_kind(op, o, given, error);
  if (!real) *out = (number){false, given->integer, 0};
  else *out = (number){true, 0, given->kind == KILN_KIND_NUMBER ? given->number : (double)given->integer};
  return cast(op, o, out, error);
}

/* ---- attributes ---- */

static bool is_choice(const attr_value *legal, const kiln_argument *given) {
  switch (legal->kind) {
    case JSON_TEXT: return given->kind == KILN_KIND_TEXT && given->text != NULL && strcmp(given->text, legal->text) == 0;
    case JSON_INTEGER: return given->kind == KILN_KIND_INTEGER && given->integer == legal->integer;
    default: return given->kind == KILN_KIND_BOOL && (given->integer != 0) == (legal->kind == JSON_TRUE);
  }
}

static void put_given(sink *s, const kiln_argument *a) {
  if (a->kind == KILN_KIND_TEXT) kiln_put(s, "'%s'", a->text != NULL ? a->text : "");
  else if (a->kind == KILN_KIND_NUMBER) kiln_put_number(s, a->number);
  else if (a->kind == KILN_KIND_INTEGER) kiln_put(s, "%lld", (long long)a->integer);
  else if (a->kind == KILN_KIND_BOOL) kiln_put(s, "%s", a->integer ? "True" : "False");
  else kiln_put(s, "a tensor");
}

static kiln_code set_attr(const char *op, const attr_operand *a, const kiln_argument *given, attr_value *out, kiln_error *error) {
  for (uint32_t i = 0; i < a->count; i++)
    if (is_choice(&a->choices[i], given)) {
      *out = a->choices[i];
      return KILN_OK;
    }
  sink m = kiln_message(error);
  kiln_put(&m, "%s: found %s=", op, a->name);
  put_given(&m, given);
  kiln_put(&m, ", expected one of ");
  for (uint32_t i = 0; i < a->count; i++) {
    kiln_put(&m, "%s", i ? ", " : "");
    kiln_put_attr(&m, &a->choices[i]);
  }
  kiln_put(&m, ".");
  return kiln_fail_put(error, KILN_CONTRACT, &m);
}

/* ---- a call ---- */

typedef struct {
  const kiln_op *op;
  const kiln_argument **scalars;   /* per scalar */
  bool *attrs;                     /* per attribute: given */
  operands *out;
  kiln_error *error;
} sorting;

static kiln_code twice(const sorting *s, const char *name) {
  return kiln_fail(s->error, KILN_CONTRACT, "%s: %s is given twice; give it once.", s->op->sig->name, name);
}

static kiln_code unknown(const sorting *s, const char *name, work *w) {
  const op_signature *sig = s->op->sig;
  uint32_t count = 0;
  const char **known = kiln_work_get(w, sig->operand_count + sig->attr_count, sizeof *known);
  sink m = kiln_message(s->error);
  kiln_put(&m, "%s has no operand or attribute '%s'; ", sig->name, name);
  if (known != NULL) {
    for (uint32_t i = 0; i < sig->tensor_count; i++) known[count++] = sig->tensors[i].name;
    for (uint32_t i = 0; i < sig->scalar_count; i++) known[count++] = sig->scalars[i].name;
    for (uint32_t i = 0; i < sig->attr_count; i++) known[count++] = sig->attrs[i].name;
  }
  kiln_put_nearest(&m, name, known, count);
  return kiln_fail_put(s->error, KILN_CONTRACT, &m);
}

static kiln_code put_tensor(sorting *s, uint32_t i, const kiln_argument *a) {
  const tensor_operand *t = &s->op->sig->tensors[i];
  if (a->kind != KILN_KIND_TENSOR && a->kind != KILN_KIND_WRITTEN)
    return kiln_fail(s->error, KILN_CONTRACT, "%s: %s: found a %s, expected a tensor.", s->op->sig->name, t->name,
                     kind_name(a->kind));
  if (a->kind == KILN_KIND_WRITTEN && t->role == ROLE_IN)
    return kiln_fail(s->error, KILN_CONTRACT, "%s: %s is an input; pass it with KILN_TENSOR.", s->op->sig->name, t->name);
  bool written = t->role == ROLE_OUT || a->kind == KILN_KIND_WRITTEN;
  if (s->out->tensors[written][i] != NULL) return twice(s, t->name);
  if (a->tensor == NULL) return KILN_OK;
  s->out->tensors[written][i] = a->tensor;
  view *v = written ? &s->out->writes[i] : &s->out->reads[i];
  kiln_code code = kiln_make_view(s->op->sig->name, t->name, a->tensor, v, s->error);
  v->at = i + (written ? s->op->sig->tensor_count : 0);
  return code;
}

static kiln_code put_argument(sorting *s, const kiln_argument *a, work *w) {
  const op_signature *sig = s->op->sig;
  if (a->name == NULL) return kiln_fail(s->error, KILN_CONTRACT, "%s: an argument has no name; give each one.", sig->name);
  for (uint32_t i = 0; i < sig->tensor_count; i++)
    if (strcmp(sig->tensors[i].name, a->name) == 0) return put_tensor(s, i, a);
  for (uint32_t i = 0; i < sig->scalar_count; i++)
    if (strcmp(sig->scalars[i].name, a->name) == 0) {
      if (s->scalars[i] != NULL) return twice(s, a->name);
      s->scalars[i] = a;
      return KILN_OK;
    }
  for (uint32_t i = 0; i < sig->attr_count; i++)
    if (strcmp(sig->attrs[i].name, a->name) == 0) {
      if (s->attrs[i]) return twice(s, a->name);
      s->attrs[i] = true;
      return set_attr(sig->name, &sig->attrs[i], a, &s->out->attrs[i], s->error);
    }
  return unknown(s, a->name, w);
}

static bool make_room(sorting *s, work *w) {
  const op_signature *sig = s->op->sig;
  operands *o = s->out;
  o->reads = kiln_work_get(w, sig->tensor_count, sizeof *o->reads);
  o->writes = kiln_work_get(w, sig->tensor_count, sizeof *o->writes);
  o->args = kiln_work_get(w, sig->scalar_count, sizeof *o->args);
  o->attrs = kiln_work_get(w, sig->attr_count, sizeof *o->attrs);
  for (int side = 0; side < 2; side++) o->tensors[side] = kiln_work_get(w, sig->tensor_count, sizeof *o->tensors[side]);
  s->scalars = kiln_work_get(w, sig->scalar_count, sizeof *s->scalars);
  s->attrs = kiln_work_get(w, sig->attr_count, sizeof *s->attrs);
  return s->attrs && s->scalars && o->tensors[0] && o->tensors[1] && o->attrs && o->args && o->writes && o->reads;
}

static bool has_elements(const view *v) {
  for (int32_t i = 0; i < v->rank; i++)
    if (v->shape[i] == 0) return false;
  return true;
}

/* In/out operands are written in place unless another tensor was given for that. */
static kiln_code finish(sorting *s) {
  const op_signature *sig = s->op->sig;
  operands *o = s->out;
  for (uint32_t i = 0; i < sig->tensor_count; i++)
    if (sig->tensors[i].role == ROLE_INOUT && o->reads[i].given && !o->writes[i].given) {
      o->writes[i] = o->reads[i];
      o->writes[i].at = i + sig->tensor_count;
      o->tensors[1][i] = o->tensors[0][i];
    }
  for (uint32_t i = 0; i < sig->scalar_count; i++) {
    kiln_code code = kiln_cast_scalar(sig->name, &sig->scalars[i], s->scalars[i], &o->args[i], s->error);
    if (code != KILN_OK) return code;
  }
  return KILN_OK;
}

kiln_code kiln_sort_arguments(const kiln_op *op, const kiln_argument *arguments, size_t count, work *w, operands *out,
                              kiln_error *error) {
  sorting s = {op, NULL, NULL, out, error};
  if (!make_room(&s, w)) return kiln_work_failed(w, op->sig->name, error);
  for (uint32_t i = 0; i < op->sig->attr_count; i++) out->attrs[i] = op->sig->attrs[i].fallback;
  for (size_t i = 0; i < count; i++) {
    kiln_code code = put_argument(&s, &arguments[i], w);
    if (code != KILN_OK) return code;
  }
  return finish(&s);
}

kiln_code kiln_check_addresses(const kiln_op *op, const operands *o, kiln_error *error) {
  for (uint32_t i = 0; i < op->sig->tensor_count; i++)
    for (int side = 0; side < 2; side++) {
      const view *v = side ? &o->writes[i] : &o->reads[i];
      if (v->given && v->pointer == 0 && has_elements(v))
        return kiln_fail(error, KILN_CONTRACT, "%s: %s has a null address; pass a tensor with memory.", op->sig->name,
                         op->sig->tensors[i].name);
    }
  return KILN_OK;
}
