/* Composite plans: an op as several calls of others, with temporaries between them. */
#include "run.h"

const kiln_op *kiln_callee(const kiln_op *op, const plan_step *step) { return &op->pack->ops[step->op]; }

/* ---- temporaries ---- */

static kiln_code shape_temp(const kiln_op *op, const plan_temp *t, const bound *b, const number *args, view *v, size_t *bytes,
                            kiln_error *error) {
  int64_t step = 1;
  bool fine = true;
  for (int32_t i = (int32_t)t->rank - 1; i >= 0; i--) {
    number n;
    kiln_code code = kiln_evaluate(&t->shape[i], b, args, &n, error);
    if (code != KILN_OK) return code;
    v->shape[i] = kiln_whole(&n);
    v->strides[i] = step;
    fine = fine && v->shape[i] >= 0 && !__builtin_mul_overflow(step, v->shape[i] > 1 ? v->shape[i] : 1, &step);
  }
  if (!fine || step >= INT64_C(1) << 44)
    return kiln_fail(error, KILN_CONTRACT, "%s: the temporary %s would be too big; check the operands.", op->sig->name, t->name);
  v->rank = (int32_t)t->rank;
  v->given = true;
  v->device = op->library->device.ordinal;
  *bytes = (size_t)step * (size_t)KILN_DTYPES[v->dtype].bytes;
  for (int32_t i = 0; i < v->rank; i++)
    if (v->shape[i] == 0) *bytes = 0;
  return KILN_OK;
}

static kiln_dtype temp_dtype(const plan_frame *f, const plan_temp *t) {
  if (t->like_temp) return f->temps[t->like].dtype;
  return t->like >= 0 ? f->bound->dtypes[t->like] : t->dtype;
}

static kiln_code temps(const kiln_op *op, const manifest_plan *plan, plan_frame *f, const number *args, uint32_t first_temp,
                       kiln_error *error) {
  for (uint32_t i = 0; i < plan->temp_count; i++) {
    view *v = &f->temps[i];
    v->dtype = temp_dtype(f, &plan->temps[i]);
    v->at = first_temp + i;
    if (v->dtype == 0)
      return kiln_fail(error, KILN_CONTRACT, "%s: the temporary %s is like an operand that is absent.", op->sig->name,
                       plan->temps[i].name);
    kiln_code code = shape_temp(op, &plan->temps[i], f->bound, args, v, &f->temp_bytes[i], error);
    if (code != KILN_OK) return code;
  }
  return KILN_OK;
}

/* ---- operands ---- */

/* An output still to be allocated has a type and a geometry, but no address yet. */
static view side(const kiln_op *op, const bound *b, const view *given, uint32_t i, bool written) {
  view v = *given;
  if (!given->given)
    v = (view){.dtype = b->dtypes[i], .device = op->library->device.ordinal, .given = true,
               .at = i + (written ? op->sig->tensor_count : 0)};
  return kiln_flat_view(&v, &b->geometry[i]);
}

static void flatten(const kiln_op *op, const view *reads, const view *writes, plan_frame *f) {
  for (uint32_t i = 0; i < op->sig->tensor_count; i++) {
    operand_role role = op->sig->tensors[i].role;
    if (!f->bound->geometry[i].given) continue;
    if (role != ROLE_OUT) f->flat[0][i] = side(op, f->bound, &reads[i], i, false);
    if (role != ROLE_IN) f->flat[1][i] = side(op, f->bound, &writes[i], i, true);
  }
}

kiln_code kiln_plan_frame(const kiln_op *op, const manifest_plan *plan, const bound *b, const view *reads, const view *writes,
                          const number *args, uint32_t first_temp, work *w, plan_frame *out, kiln_error *error) {
  *out = (plan_frame){.bound = b};
  uint32_t tensors = op->sig->tensor_count;
  out->temps = kiln_work_get(w, plan->temp_count, sizeof *out->temps);
  out->temp_bytes = kiln_work_get(w, plan->temp_count, sizeof *out->temp_bytes);
  for (int i = 0; i < 2; i++) out->flat[i] = kiln_work_get(w, tensors, sizeof *out->flat[i]);
  out->written[0] = kiln_work_get(w, tensors, sizeof(bool));
  out->written[1] = kiln_work_get(w, plan->temp_count, sizeof(bool));
  if (!out->temps || !out->temp_bytes || !out->flat[0] || !out->flat[1] || !out->written[0] || !out->written[1])
    return kiln_work_failed(w, op->sig->name, error);
  flatten(op, reads, writes, out);
  return temps(op, plan, out, args, first_temp, error);
}

/* ---- steps ---- */

/* The side of an operand that a step sees: what was written, in place or not, is what later steps read. */
static view seen(const plan_frame *f, const step_bind *b, bool written) {
  if (b->kind == BIND_NOTHING) return (view){0};
  if (b->kind == BIND_TEMP) return f->temps[b->index];
  const view *write = &f->flat[1][b->index];
  return written && write->given ? *write : f->flat[0][b->index];
}

static void step_views(plan_frame *f, const plan_step *step, const op_signature *callee, step_call *out) {
  for (uint32_t i = 0; i < callee->tensor_count; i++) {
    const step_bind *b = &step->bind[i];
    operand_role role = callee->tensors[i].role;
    bool was_written = b->kind == BIND_TENSOR && f->written[0][b->index];
    if (role != ROLE_OUT) out->reads[i] = seen(f, b, was_written);
    if (role != ROLE_IN) out->writes[i] = seen(f, b, true);
  }
  for (uint32_t i = 0; i < callee->tensor_count; i++) {
    const step_bind *b = &step->bind[i];
    if (callee->tensors[i].role != ROLE_IN && b->kind != BIND_NOTHING) f->written[b->kind == BIND_TEMP][b->index] = true;
  }
}

kiln_code kiln_step_args(const char *op, const plan_step *step, const op_signature *callee, const bound *b, const number *args,
                         number *out, kiln_error *error) {
  for (uint32_t i = 0; i < callee->scalar_count; i++) {
    const scalar_operand *o = &callee->scalars[i];
    number n = {true, 0, o->default_value};
    if (step->has_arg[i]) {
      kiln_code code = kiln_evaluate(&step->args[i], b, args, &n, error);
      if (code != KILN_OK) return code;
    } else if (!o->has_default) {
      return kiln_fail(error, KILN_CONTRACT, "%s: a step calls %s without its scalar %s; rebuild the tree.", op, callee->name,
                       o->name);
    }
    bool real = o->dtype[0] == 'f';
    if (real) out[i] = (number){true, 0, n.real ? n.value : (double)n.integer};
    else if (kiln_fits(&n)) out[i] = (number){false, kiln_whole(&n), 0};
    else return kiln_fail(error, KILN_CONTRACT, "a step passes %s as %s, which cannot hold its value; rebuild the tree.", o->name, o->dtype);
  }
  return KILN_OK;
}

kiln_code kiln_plan_step(const kiln_op *op, plan_frame *f, const plan_step *step, const number *args, work *w, step_call *out,
                         kiln_error *error) {
  out->callee = kiln_callee(op, step);
  const op_signature *sig = out->callee->sig;
  out->reads = kiln_work_get(w, sig->tensor_count, sizeof *out->reads);
  out->writes = kiln_work_get(w, sig->tensor_count, sizeof *out->writes);
  out->args = kiln_work_get(w, sig->scalar_count, sizeof *out->args);
  if (!out->reads || !out->writes || !out->args) return kiln_work_failed(w, op->sig->name, error);
  step_views(f, step, sig, out);
  return kiln_step_args(op->sig->name, step, sig, f->bound, args, out->args, error);
}
