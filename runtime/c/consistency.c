/* Whether the parts of a manifest agree: every name declared, nothing twice, every access in role; as kiln.runtime.consistency. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "schema.h"

/* A fault of one op, kernel or plan: "<document>: <subject>: <sentence>". */
typedef struct { reading *r; char subject[400]; } checker;

static bool fault(checker *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool fault(checker *c, const char *format, ...) {
  char sentence[1400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(sentence, sizeof sentence, format, arguments);
  va_end(arguments);
  c->r->code = kiln_fail(c->r->error, KILN_SCHEMA, "%s: %s%s", c->r->where, c->subject, sentence);
  return false;
}

/* ---- identity ---- */
typedef struct { const char *op, *variant; } identity;

static int compare_identity(const void *a, const void *b) {
  const identity *x = a, *y = b;
  int order = strcmp(x->op, y->op);
  return order != 0 ? order : strcmp(x->variant, y->variant);
}

static int compare_file(const void *a, const void *b) {
  return strcmp((*(const raw_kernel *const *)a)->kernel.file, (*(const raw_kernel *const *)b)->kernel.file);
}

static int compare_name_to_file(const void *name, const void *kernel) {
  return strcmp(name, (*(const raw_kernel *const *)kernel)->kernel.file);
}

static bool check_variants(checker *c, const raw_manifest *m) {
  size_t count = (size_t)m->kernel_count + m->plan_count;
  identity *all = kiln_arena_get(c->r->staging, count, sizeof *all);
  if (all == NULL) return kiln_out_of_memory(c->r);
  for (uint32_t i = 0; i < m->kernel_count; ++i) all[i] = (identity){m->kernels[i].op, m->kernels[i].kernel.variant};
  for (uint32_t i = 0; i < m->plan_count; ++i) all[m->kernel_count + i] = (identity){m->plans[i].op, m->plans[i].plan.variant};
  bool sorted = true;
  for (uint32_t i = 1; i < m->kernel_count; ++i) sorted = sorted && compare_identity(&all[i - 1], &all[i]) <= 0;
  qsort(all, count, sizeof *all, compare_identity);
  for (size_t i = 1; i < count; ++i) {
    if (compare_identity(&all[i - 1], &all[i]) == 0)
      return fault(c, "%s.%s is declared twice; expected each variant once.", all[i].op, all[i].variant);
  }
  return sorted || fault(c, "the kernels are not sorted by op and variant; rebuild the tree.");
}

static bool check_files(checker *c, const raw_manifest *m) {
  const raw_kernel **owners = kiln_arena_get(c->r->staging, m->kernel_count, sizeof *owners);
  if (owners == NULL) return kiln_out_of_memory(c->r);
  for (uint32_t i = 0; i < m->kernel_count; ++i) owners[i] = &m->kernels[i];
  qsort(owners, m->kernel_count, sizeof *owners, compare_file);
  for (uint32_t i = 1; i < m->kernel_count; ++i) {
    const manifest_kernel *a = &owners[i - 1]->kernel, *b = &owners[i]->kernel;
    if (strcmp(a->file, b->file) == 0 && (a->bytes != b->bytes || memcmp(a->sha256, b->sha256, sizeof a->sha256) != 0))
      return fault(c, "%s has two sizes or digests; expected one.", a->file);
  }
  for (uint32_t i = 0; i < m->source_count; ++i) {
    if (bsearch(m->sources[i].name, owners, m->kernel_count, sizeof *owners, compare_name_to_file) != NULL)
      return fault(c, "%s is both an artifact and a source; expected one of them.", m->sources[i].name);
  }
  return true;
}

/* ---- circles: a walk over the ops' plans; an op that is still open when it is met again closes one ---- */
typedef struct { uint32_t op, plan, step; } place;
enum { NEW, OPEN, DONE };
typedef struct {
  checker *c;
  const raw_manifest *m;
  const uint32_t *first, *plans; /* plans of op i: plans[first[i]] up to plans[first[i + 1]] */
  uint8_t *state;
  place *path;
} circle_walk;

static bool refuse_circle(const circle_walk *w, uint32_t from, uint32_t length) {
  char names[1000] = "";
  size_t used = 0;
  for (uint32_t i = from; i < length && used < sizeof names; ++i)
    used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i > from ? ", " : "", w->m->ops[w->path[i].op].op.name);
  return fault(w->c, "the plans of %s call each other in a circle.", names);
}

/* The next op that a place's plans call, -1 at their end. Ops that are not declared are told later. */
static int32_t next_call(const circle_walk *w, place *at) {
  for (; at->plan < w->first[at->op + 1]; ++at->plan, at->step = 0) {
    const raw_plan *plan = &w->m->plans[w->plans[at->plan]];
    while (at->step < plan->step_count) {
      int32_t op = kiln_op_index(w->m, plan->steps[at->step++].op);
      if (op >= 0) return op;
    }
  }
  return -1;
}

static bool walk_from(circle_walk *w, uint32_t start) {
  uint32_t length = 0;
  w->path[length++] = (place){start, w->first[start], 0};
  w->state[start] = OPEN;
  while (length > 0) {
    int32_t op = next_call(w, &w->path[length - 1]);
    if (op < 0) {
      w->state[w->path[--length].op] = DONE;
    } else if (w->state[op] == OPEN) {
      uint32_t from = 0;
      while (w->path[from].op != (uint32_t)op) ++from;
      return refuse_circle(w, from, length);
    } else if (w->state[op] == NEW) {
      w->state[op] = OPEN;
      w->path[length++] = (place){(uint32_t)op, w->first[op], 0};
    }
  }
  return true;
}

static bool check_circles(checker *c, const raw_manifest *m) {
  uint32_t *first = kiln_arena_get(c->r->staging, (size_t)m->op_count + 2, sizeof *first);
  uint32_t *plans = kiln_arena_get(c->r->staging, m->plan_count, sizeof *plans);
  circle_walk w = {c, m, first, plans, kiln_arena_get(c->r->staging, m->op_count, 1),
                   kiln_arena_get(c->r->staging, m->op_count, sizeof(place))};
  if (first == NULL || plans == NULL || w.state == NULL || w.path == NULL) return kiln_out_of_memory(c->r);
  for (uint32_t i = 0; i < m->plan_count; ++i) { /* counting sort by op; counts stand two places on */
    int32_t op = kiln_op_index(m, m->plans[i].op);
    if (op >= 0) ++first[op + 2];
  }
  for (uint32_t i = 2; i < m->op_count + 2; ++i) first[i] += first[i - 1];
  for (uint32_t i = 0; i < m->plan_count; ++i) {
    int32_t op = kiln_op_index(m, m->plans[i].op);
    if (op >= 0) plans[first[op + 1]++] = i;
  }
  for (uint32_t i = 0; i < m->op_count; ++i) {
    if (w.state[i] == NEW && !walk_from(&w, i)) return false;
  }
  return true;
}

/* ---- names in expressions ---- */
typedef struct { const char *kind; int32_t index; } lookup;

static lookup look_up(const raw_op *op, const expr *e) {
  switch (e->head) {
    case X_DIM: return (lookup){"dim", kiln_dim_index(op, e->name)};
    case X_ARG: return (lookup){"arg", kiln_scalar_index(&op->op, e->name)};
    case X_ATTR_VALUE:
    case P_ATTR: return (lookup){"attr", kiln_attr_index(&op->op, e->name)};
    case X_STRIDE:
    case X_COLSTRIDE:
    case P_DTYPE:
    case P_ALIGNED:
    case P_ABSENT:
    case P_PRESENT: return (lookup){"operand", kiln_tensor_index(&op->op, e->name)};
    default: return (lookup){NULL, 0};
  }
}

static bool check_name(checker *c, const raw_op *op, expr *e, const char *where, const char *which) {
  lookup found = look_up(op, e);
  if (found.index < 0) return fault(c, "%s%s names '%.200s', which is no %s of the op.", where, which, e->name, found.kind);
  if (found.kind != NULL) e->index = found.index;
  return true;
}

/* Checks the names of a tree against the op and notes their places. Recursion is bounded by the levels of an expression. */
static bool check_names(checker *c, const raw_op *op, expr *e, const char *where, const char *which) {
  if (!check_name(c, op, e, where, which)) return false;
  for (uint32_t i = 0; i < e->count; ++i) {
    if (!check_names(c, op, &e->items[i], where, which)) return false;
  }
  return true;
}

/* ---- signatures ---- */
static bool is_reserved(const char *name) {
  static const char *const words[] = {"out", "stream", "mode", "tier", "variant", "isa"};
  for (size_t i = 0; i < sizeof words / sizeof *words; ++i) {
    if (strcmp(words[i], name) == 0) return true;
  }
  return false;
}

static bool check_declared_names(checker *c, const raw_op *op) {
  const char *names[64 + 32];
  uint32_t count = 0;
  for (uint32_t i = 0; i < op->operand_count; ++i)
    names[count++] = op->operands[i].is_tensor ? op->operands[i].tensor.name : op->operands[i].scalar.name;
  for (uint32_t i = 0; i < op->op.attr_count; ++i) names[count++] = op->op.attrs[i].name;
  for (uint32_t i = 0; i < count; ++i) {
    bool twice = false;
    for (uint32_t k = 0; k < i; ++k) twice = twice || strcmp(names[i], names[k]) == 0;
    int32_t tensor = kiln_tensor_index(&op->op, names[i]);
    bool output = strcmp(names[i], "out") == 0 && tensor >= 0 && op->op.tensors[tensor].role == ROLE_OUT;
    if (twice || (is_reserved(names[i]) && !output))
      return fault(c, "%s is declared twice or reserved for the call itself; rename it.", names[i]);
  }
  return true;
}

static bool check_returns(checker *c, const raw_op *op) {
  uint32_t written = 0;
  bool good = true;
  for (uint32_t i = 0; i < op->op.tensor_count; ++i) written += op->op.tensors[i].role != ROLE_IN;
  for (uint32_t i = 0; i < op->return_count; ++i) {
    int32_t tensor = kiln_tensor_index(&op->op, op->returns[i]);
    good = good && tensor >= 0 && op->op.tensors[tensor].role != ROLE_IN;
    for (uint32_t k = 0; k < i; ++k) good = good && strcmp(op->returns[i], op->returns[k]) != 0;
  }
  return (good && op->return_count == written) ||
         fault(c, "returns %s and so on, expected each written operand once.", op->returns[0]);
}

static bool same_attr(const attr_value *a, const attr_value *b) {
  return a->kind == b->kind && (a->kind == JSON_TEXT ? strcmp(a->text, b->text) == 0 : a->integer == b->integer);
}

static bool check_defaults(checker *c, const raw_op *op) {
  for (uint32_t i = 0; i < op->op.attr_count; ++i) {
    const attr_operand *a = &op->op.attrs[i];
    bool found = false;
    for (uint32_t k = 0; k < a->count; ++k) found = found || same_attr(&a->choices[k], &a->fallback);
    if (!found) return fault(c, "attribute %s: its default is not one of its choices.", a->name);
  }
  return true;
}

static bool check_signature(checker *c, raw_op *op) {
  if (!check_declared_names(c, op) || !check_returns(c, op) || !check_defaults(c, op)) return false;
  for (uint32_t i = 0; i < op->op.constraint_count; ++i) {
    if (!check_names(c, op, &op->op.constraints[i].when, "a constraint", "")) return false;
  }
  for (uint32_t i = 0; i < op->op.tensor_count; ++i) {
    tensor_operand *t = &op->op.tensors[i];
    for (uint32_t k = 0; k < t->rank; ++k) {
      if (!check_names(c, op, &t->shape[k], "the shape of ", t->name)) return false;
    }
  }
  return true;
}

/* ---- kernels ---- */
static bool check_tree(checker *c, const raw_op *op, expr *e, const expr *of_base, const char *where, const char *which) {
  if (of_base != NULL && kiln_same_items(e, of_base)) return check_name(c, op, e, where, which);
  return check_names(c, op, e, where, which);
}

static bool check_trees(checker *c, const raw_op *op, raw_kernel *raw) {
  manifest_kernel *k = &raw->kernel;
  const manifest_kernel *base = raw->base == NULL ? NULL : &raw->base->kernel;
  if (!check_tree(c, op, &k->when, base == NULL ? NULL : &base->when, "when", "")) return false;
  for (int i = 0; i < 3; ++i) {
    if (!check_tree(c, op, &k->grid[i], base == NULL ? NULL : &base->grid[i], "grid", "")) return false;
  }
  return true;
}

/* Rules of the driver that a tensor map breaks, whatever the call. */
static bool check_map(checker *c, const kernel_param *p, const tensor_map *m, const char *target) {
  enum { NONE, BY_32 = 2, SWIZZLE_32B = 1 };
  const struct kiln_dtype_row *type = &KILN_DTYPES[kiln_dtype_named(p->dtype)];
  int64_t inner = m->box[m->box_count - 1] * type->bytes, widest = INT64_C(16) << m->swizzle;
  if (!kiln_target_has_maps(target))
    return fault(c, "param %s is a tensor map, which %s has not; expected sm_90 or later.", p->name, target);
  if (m->rank != m->stride_count + 1 || m->rank != m->box_count)
    return fault(c, "param %s has %" PRIu32 " extents, %" PRIu32 " strides and a box of %" PRIu32
                    "; expected a stride less, the innermost being 1.", p->name, m->rank, m->stride_count, m->box_count);
  if (m->interleave != NONE && m->rank < 3)
    return fault(c, "param %s is interleaved and has %" PRIu32 " dimensions; expected 3 and more.", p->name, m->rank);
  if (m->interleave == BY_32 && m->swizzle != SWIZZLE_32B)
    return fault(c, "param %s is interleaved by 32 bytes with another swizzle; expected 32b.", p->name);
  if (m->interleave == NONE && inner % 16 != 0)
    return fault(c, "param %s copies rows of %" PRId64 " bytes; expected a multiple of 16.", p->name, inner);
  if (m->interleave == NONE && m->swizzle != NONE && inner > widest)
    return fault(c, "param %s copies rows of %" PRId64 " bytes, which its swizzle does not hold; expected no more than %" PRId64 ".",
                 p->name, inner, widest);
  if (m->fill != NONE && (type->code || (p->dtype[0] != 'f' && p->dtype[0] != 'b') || type->bytes < 2))
    return fault(c, "param %s fills %s with NaN; expected a type that the copy engine knows as one.", p->name, p->dtype);
  return true;
}

static bool check_pointer(checker *c, const raw_op *op, const manifest_kernel *k, kernel_param *p) {
  static const char *const roles[] = {"in", "inout", "out"};
  if ((p->scratch = kiln_scratch_index(k, p->operand)) >= 0) return true;
  if ((p->tensor = kiln_tensor_index(&op->op, p->operand)) < 0)
    return fault(c, "param %s points to '%s', which is no tensor or scratch of the op.", p->name, p->operand);
  operand_role role = op->op.tensors[p->tensor].role;
  if ((role == ROLE_OUT && !p->writes) || (role == ROLE_IN && p->writes))
    return fault(c, "param %s is a %s of the %s operand %s; expected the access to fit the role.", p->name,
                 p->writes ? "write" : "read", roles[role], p->operand);
  return true;
}

static bool check_params(checker *c, const raw_op *op, raw_kernel *raw, const char *target) {
  manifest_kernel *k = &raw->kernel;
  if (kiln_same_params(raw)) return true;
  for (uint32_t i = 0; i < k->scratch_count && !kiln_same_scratch(raw); ++i) {
    if (!check_names(c, op, &k->scratch[i].bytes, "scratch ", k->scratch[i].name)) return false;
  }
  for (uint32_t i = 0; i < k->param_count; ++i) {
    kernel_param *p = &k->params[i];
    if (p->has_value && !check_tree(c, op, &p->value, kiln_base_value(raw, i), "param ", p->name)) return false;
    for (uint32_t j = 0; p->map != NULL && j < p->map->rank; ++j)
      if (!check_names(c, op, &p->map->shape[j], "param ", p->name)) return false;
    for (uint32_t j = 0; p->map != NULL && j < p->map->stride_count; ++j)
      if (!check_names(c, op, &p->map->strides[j], "param ", p->name)) return false;
  }
  for (uint32_t i = 0; i < k->param_count; ++i) {
    kernel_param *p = &k->params[i];
    if (p->map != NULL && !check_map(c, p, p->map, target)) return false;
    if (p->operand != NULL && !check_pointer(c, op, k, p)) return false;
  }
  return true;
}

static bool check_isa(checker *c, const manifest_kernel *k, const char *target) {
  bool cpu = strncmp(target, "cpu-", 4) == 0;
  if (cpu != (k->isa_tier != NULL))
    return fault(c, "isa is %s for target %s; expected it on CPU targets alone.", cpu ? "missing" : "given", target);
  return k->isa_tier == NULL || kiln_isa_rank(target, k->isa_tier) >= 0 ||
         fault(c, "isa tier '%s', expected one of those of %s.", k->isa_tier, target);
}

/* ---- plans ---- */
static bool is_bound_to(const raw_op *op, const raw_plan *plan, const char *name) {
  return kiln_tensor_index(&op->op, name) >= 0 || kiln_temp_index(plan, name) >= 0;
}

static bool check_binds(checker *c, const raw_op *op, const raw_plan *plan, const raw_step *step, uint32_t number,
                        const raw_op *callee) {
  bool complete = step->bind_count == callee->op.tensor_count;
  for (uint32_t i = 0; i < step->bind_count; ++i) complete = complete && kiln_tensor_index(&callee->op, step->bind[i].name) >= 0;
  if (!complete) return fault(c, "step %" PRIu32 " binds other names; expected the tensors of %s.", number, step->op);
  for (uint32_t i = 0; i < step->bind_count; ++i) {
    const named_bind *b = &step->bind[i];
    const tensor_operand *into = &callee->op.tensors[kiln_tensor_index(&callee->op, b->name)];
    if (b->to == NULL) {
      if (into->role == ROLE_OUT || !into->optional)
        return fault(c, "step %" PRIu32 " binds %s to nothing, but %s needs it.", number, b->name, step->op);
      continue;
    }
    if (!is_bound_to(op, plan, b->to))
      return fault(c, "step %" PRIu32 " binds '%s', which is no operand or temp of the plan.", number, b->to);
    int32_t tensor = kiln_tensor_index(&op->op, b->to);
    if (into->role != ROLE_IN && tensor >= 0 && op->op.tensors[tensor].role == ROLE_IN)
      return fault(c, "step %" PRIu32 " writes %s, which is an input of the plan.", number, b->to);
  }
  return true;
}

static bool check_given(checker *c, const raw_step *step, uint32_t number, const raw_op *callee) {
  const char *stray = NULL;
  for (uint32_t i = 0; i < step->arg_count; ++i) {
    if (kiln_scalar_index(&callee->op, step->args[i].name) < 0) stray = step->args[i].name;
  }
  for (uint32_t i = 0; i < step->attr_count; ++i) {
    if (kiln_attr_index(&callee->op, step->attrs[i].name) < 0) stray = step->attrs[i].name;
  }
  return stray == NULL || fault(c, "step %" PRIu32 " gives '%s', which %s does not take.", number, stray, step->op);
}

static bool check_step(checker *c, const raw_manifest *m, const raw_op *op, const raw_plan *plan, uint32_t number) {
  raw_step *step = &plan->steps[number];
  int32_t index = kiln_op_index(m, step->op);
  if (index < 0 || strcmp(step->op, plan->op) == 0)
    return fault(c, "step %" PRIu32 " calls '%s'; expected another op of this manifest.", number, step->op);
  const raw_op *callee = &m->ops[index];
  char where[32];
  snprintf(where, sizeof where, "step %" PRIu32, number);
  if (!check_binds(c, op, plan, step, number, callee) || !check_given(c, step, number, callee)) return false;
  for (uint32_t i = 0; i < step->arg_count; ++i) {
    if (!check_names(c, op, &step->args[i].value, where, "")) return false;
  }
  return true;
}

static bool check_temps(checker *c, const raw_op *op, const raw_plan *plan) {
  for (uint32_t i = 0; i < plan->temp_count; ++i) {
    raw_temp *t = &plan->temps[i];
    if (t->like != NULL && !is_bound_to(op, plan, t->like))
      return fault(c, "temp %s is like '%s', which is no operand of the op.", t->temp.name, t->like);
    for (uint32_t k = 0; k < t->temp.rank; ++k) {
      if (!check_names(c, op, &t->temp.shape[k], "temp ", t->temp.name)) return false;
    }
  }
  return true;
}

static bool check_plan(checker *c, const raw_manifest *m, const raw_op *op, raw_plan *plan) {
  if (!check_names(c, op, &plan->plan.when, "when", "") || !check_temps(c, op, plan)) return false;
  for (uint32_t i = 0; i < plan->step_count; ++i) {
    if (!check_step(c, m, op, plan, i)) return false;
  }
  return true;
}

/* ---- the whole ---- */
static const raw_op *declared(checker *c, const raw_manifest *m, const char *kind, const char *op, const char *variant) {
  snprintf(c->subject, sizeof c->subject, "%s %s.%s: ", kind, op, variant);
  int32_t index = kiln_op_index(m, op);
  if (index < 0) fault(c, "its op is not declared; expected one of the manifest's ops.");
  return index < 0 ? NULL : &m->ops[index];
}

static bool check_all(checker *c, raw_manifest *m) {
  if (!check_variants(c, m) || !check_files(c, m) || !check_circles(c, m)) return false;
  for (uint32_t i = 0; i < m->op_count; ++i) {
    snprintf(c->subject, sizeof c->subject, "op %s: ", m->ops[i].op.name);
    if (!check_signature(c, &m->ops[i])) return false;
  }
  for (uint32_t i = 0; i < m->kernel_count; ++i) {
    manifest_kernel *k = &m->kernels[i].kernel;
    const raw_op *op = declared(c, m, "kernel", m->kernels[i].op, k->variant);
    if (op == NULL || !check_trees(c, op, &m->kernels[i]) || !check_params(c, op, &m->kernels[i], m->target) || !check_isa(c, k, m->target)) return false;
  }
  for (uint32_t i = 0; i < m->plan_count; ++i) {
    const raw_op *op = declared(c, m, "plan", m->plans[i].op, m->plans[i].plan.variant);
    if (op == NULL || !check_plan(c, m, op, &m->plans[i])) return false;
  }
  return true;
}

kiln_code kiln_check_consistency(reading *r, raw_manifest *raw) {
  checker c = {.r = r};
  check_all(&c, raw);
  return r->code;
}
