/* From what was read to what is run with: names become indices, and point to the one copy that the op has. */
#include <stdlib.h>
#include <string.h>

#include "schema.h"

static void *keep(reading *r, size_t count, size_t size) {
  void *out = kiln_arena_get(r->keep, count, size);
  if (out == NULL) kiln_out_of_memory(r);
  return out;
}

/* ---- expressions; recursion is bounded by their levels ---- */
static void intern_name(const op_signature *op, expr *e) {
  switch (e->head) {
    case X_DIM: e->name = op->dims[e->index]; break;
    case X_ARG: e->name = op->scalars[e->index].name; break;
    case X_ATTR_VALUE:
    case P_ATTR: e->name = op->attrs[e->index].name; break;
    case X_STRIDE:
    case X_COLSTRIDE:
    case P_DTYPE:
    case P_ALIGNED:
    case P_ABSENT:
    case P_PRESENT: e->name = op->tensors[e->index].name; break;
    default: break;
  }
}

static void intern(const op_signature *op, expr *e) {
  intern_name(op, e);
  for (uint32_t i = 0; i < e->count; ++i) intern(op, &e->items[i]);
}

static void intern_op(op_signature *op) {
  for (uint32_t i = 0; i < op->constraint_count; ++i) intern(op, &op->constraints[i].when);
  for (uint32_t i = 0; i < op->tensor_count; ++i) {
    for (uint32_t k = 0; k < op->tensors[i].rank; ++k) intern(op, &op->tensors[i].shape[k]);
  }
}

/* ---- kernels ---- */
static void resolve_tree(const op_signature *op, expr *e, const expr *of_base) {
  if (of_base != NULL && kiln_same_items(e, of_base)) intern_name(op, e);
  else intern(op, e);
}

static void resolve_kernel(const raw_manifest *raw, const raw_kernel *from, manifest_kernel *k) {
  const manifest_kernel *base = from->base == NULL ? NULL : &from->base->kernel;
  *k = from->kernel;
  k->op = (uint32_t)kiln_op_index(raw, from->op);
  const op_signature *op = &raw->ops[k->op].op;
  resolve_tree(op, &k->when, base == NULL ? NULL : &base->when);
  for (int i = 0; i < 3; ++i) resolve_tree(op, &k->grid[i], base == NULL ? NULL : &base->grid[i]);
  if (kiln_same_params(from)) return;
  for (uint32_t i = 0; i < k->scratch_count && !kiln_same_scratch(from); ++i) intern(op, &k->scratch[i].bytes);
  for (uint32_t i = 0; i < k->param_count; ++i) {
    kernel_param *p = &k->params[i];
    if (p->has_value) resolve_tree(op, &p->value, kiln_base_value(from, i));
    for (uint32_t j = 0; p->map != NULL && j < p->map->rank; ++j) intern(op, &p->map->shape[j]);
    for (uint32_t j = 0; p->map != NULL && j < p->map->stride_count; ++j) intern(op, &p->map->strides[j]);
    if (p->tensor >= 0) p->operand = op->tensors[p->tensor].name;
  }
}

/* ---- plans ---- */
static step_bind resolve_bind(const op_signature *op, const raw_plan *plan, const char *to) {
  if (to == NULL) return (step_bind){.kind = BIND_NOTHING};
  int32_t temp = kiln_temp_index(plan, to);
  if (temp >= 0) return (step_bind){BIND_TEMP, (uint32_t)temp};
  return (step_bind){BIND_TENSOR, (uint32_t)kiln_tensor_index(op, to)};
}

static bool resolve_step(reading *r, const raw_manifest *raw, const raw_plan *plan, const raw_step *from, plan_step *step) {
  const op_signature *op = &raw->ops[plan->plan.op].op;
  step->op = (uint32_t)kiln_op_index(raw, from->op);
  const op_signature *callee = &raw->ops[step->op].op;
  step->bind = keep(r, callee->tensor_count, sizeof *step->bind);
  step->has_arg = keep(r, callee->scalar_count, sizeof *step->has_arg);
  step->args = keep(r, callee->scalar_count, sizeof *step->args);
  step->attrs = keep(r, callee->attr_count, sizeof *step->attrs);
  if (r->code != KILN_OK) return false;
  for (uint32_t i = 0; i < from->bind_count; ++i)
    step->bind[kiln_tensor_index(callee, from->bind[i].name)] = resolve_bind(op, plan, from->bind[i].to);
  for (uint32_t i = 0; i < from->arg_count; ++i) {
    int32_t scalar = kiln_scalar_index(callee, from->args[i].name);
    step->has_arg[scalar] = true;
    step->args[scalar] = from->args[i].value;
    intern(op, &step->args[scalar]);
  }
  for (uint32_t i = 0; i < callee->attr_count; ++i) step->attrs[i] = callee->attrs[i].fallback;
  for (uint32_t i = 0; i < from->attr_count; ++i) step->attrs[kiln_attr_index(callee, from->attrs[i].name)] = from->attrs[i].value;
  return true;
}

static void resolve_temp(const op_signature *op, const raw_plan *plan, const raw_temp *from, plan_temp *temp) {
  *temp = from->temp;
  temp->like = -1;
  for (uint32_t i = 0; i < temp->rank; ++i) intern(op, &temp->shape[i]);
  if (from->like == NULL) return;
  int32_t other = kiln_temp_index(plan, from->like);
  temp->like_temp = other >= 0;
  temp->like = other >= 0 ? other : kiln_tensor_index(op, from->like);
}

static bool resolve_plan(reading *r, const raw_manifest *raw, raw_plan *from, manifest_plan *plan) {
  from->plan.op = (uint32_t)kiln_op_index(raw, from->op);
  *plan = from->plan;
  const op_signature *op = &raw->ops[plan->op].op;
  plan->temp_count = from->temp_count;
  plan->step_count = from->step_count;
  plan->temps = keep(r, from->temp_count, sizeof *plan->temps);
  plan->steps = keep(r, from->step_count, sizeof *plan->steps);
  if (r->code != KILN_OK) return false;
  intern(op, &plan->when);
  for (uint32_t i = 0; i < from->temp_count; ++i) resolve_temp(op, from, &from->temps[i], &plan->temps[i]);
  for (uint32_t i = 0; i < from->step_count; ++i) {
    if (!resolve_step(r, raw, from, &from->steps[i], &plan->steps[i])) return false;
  }
  return true;
}

/* ---- the whole ---- */
kiln_code kiln_resolve(reading *r, raw_manifest *raw, manifest *out) {
  *out = (manifest){.target = raw->target, .ptxas = raw->ptxas, .sources = raw->sources, .source_count = raw->source_count};
  out->op_count = raw->op_count;
  out->kernel_count = raw->kernel_count;
  out->plan_count = raw->plan_count;
  out->ops = keep(r, raw->op_count, sizeof *out->ops);
  out->kernels = keep(r, raw->kernel_count, sizeof *out->kernels);
  out->plans = keep(r, raw->plan_count, sizeof *out->plans);
  if (r->code != KILN_OK) return r->code;
  for (uint32_t i = 0; i < raw->op_count; ++i) {
    intern_op(&raw->ops[i].op);
    out->ops[i] = raw->ops[i].op;
  }
  for (uint32_t i = 0; i < raw->kernel_count; ++i) resolve_kernel(raw, &raw->kernels[i], &out->kernels[i]);
  for (uint32_t i = 0; i < raw->plan_count; ++i) {
    if (!resolve_plan(r, raw, &raw->plans[i], &out->plans[i])) return r->code;
  }
  return KILN_OK;
}
