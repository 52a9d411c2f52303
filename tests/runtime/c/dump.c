/* A manifest as text, a line for each part, every name through its index: what tests compare with the Python reader's result. */
#define _POSIX_C_SOURCE 200809L
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

static const char *const HEADS[] = {
    "",     "",    "dim", "stride", "colstride", "arg",       "attr",  "add",     "sub",  "mul",    "floordiv",
    "cdiv", "mod", "min", "max",    "roundup",   "next_pow2", "true",  "and",     "or",   "not",    "eq",
    "ne",   "lt",  "le",  "gt",     "ge",        "divisible", "dtype", "aligned", "attr", "absent", "present",
};

static void dump_value(FILE *f, const attr_value *v) {
  if (v->kind == JSON_TEXT) fprintf(f, "'%s'", v->text);
  else if (v->kind == JSON_INTEGER) fprintf(f, "%" PRId64, v->integer);
  else fputs(v->kind == JSON_TRUE ? "true" : "false", f);
}

static const char *name_of(const op_signature *op, const expr *e) {
  switch (e->head) {
    case X_DIM: return op->dims[e->index];
    case X_ARG: return op->scalars[e->index].name;
    case X_ATTR_VALUE:
    case P_ATTR: return op->attrs[e->index].name;
    case X_STRIDE:
    case X_COLSTRIDE:
    case P_DTYPE:
    case P_ALIGNED:
    case P_ABSENT:
    case P_PRESENT: return op->tensors[e->index].name;
    default: return NULL;
  }
}

static void dump_expr(FILE *f, const op_signature *op, const expr *e) {
  if (e->head == X_INTEGER) fprintf(f, " %" PRId64, e->integer);
  else if (e->head == X_FLOAT) fprintf(f, " %.17g", e->number);
  else if (e->head == P_TRUE) fputs(" true", f);
  if (e->head == X_INTEGER || e->head == X_FLOAT || e->head == P_TRUE) return;
  fprintf(f, " (%s", HEADS[e->head]);
  const char *name = name_of(op, e);
  if (name != NULL) fprintf(f, " %s%s", name, name == e->name ? "" : " is not the interned name");
  for (uint32_t i = 0; i < e->count; ++i) dump_expr(f, op, &e->items[i]);
  if (e->head == P_DIVISIBLE || e->head == P_ALIGNED) fprintf(f, " %" PRId64, e->integer);
  if (e->head == P_DTYPE) fprintf(f, " %s", e->text);
  if (e->head == P_ATTR) fputs(" ", f), dump_value(f, &e->attribute);
  fputs(")", f);
}

static void dump_shape(FILE *f, const op_signature *op, const expr *shape, uint32_t rank) {
  fputs(" shape", f);
  for (uint32_t i = 0; i < rank; ++i) dump_expr(f, op, &shape[i]);
}

static void dump_contract(FILE *f, const numerics_contract *c) {
  static const char *const kinds[] = {"exact", "exact_on_target", "envelope"};
  fprintf(f, "  contract %s %.17g %.17g\n", kinds[c->kind], c->rel_l2, c->max_eps);
}

static void dump_hex(FILE *f, const uint8_t digest[32]) {
  char text[65];
  kiln_hex(digest, 32, text);
  fprintf(f, " %s", text);
}

static void dump_tensor(FILE *f, const op_signature *op, const tensor_operand *t) {
  static const char *const roles[] = {"in", "inout", "out"}, *const layouts[] = {"rows", "dense", "strided", "nvfp4_128x4"};
  fprintf(f, "  tensor %s %s %s optional=%d dtype %s", t->name, roles[t->role], layouts[t->layout], t->optional,
          t->dtype.var == NULL ? "-" : t->dtype.var);
  for (uint32_t i = 0; i < t->dtype.count; ++i) fprintf(f, " %s", KILN_DTYPES[t->dtype.choices[i]].name);
  dump_shape(f, op, t->shape, t->rank);
  fputs("\n", f);
}

static void dump_scalar(FILE *f, const scalar_operand *s) {
  fprintf(f, "  scalar %s %s positive=%d", s->name, s->dtype, s->positive);
  if (s->has_default) fprintf(f, " default %.17g", s->default_value);
  if (s->has_minimum) fprintf(f, " minimum %.17g", s->minimum);
  fputs("\n", f);
}

static void dump_op(FILE *f, const op_signature *op) {
  fprintf(f, "op %s %s recipe=%d rows %s width %s\n  doc %s\n", op->name, op->family, op->recipe, op->rows, op->width, op->doc);
  for (uint32_t i = 0, tensor = 0, scalar = 0; i < op->operand_count; ++i) {
    if (op->is_tensor[i]) dump_tensor(f, op, &op->tensors[tensor++]);
    else dump_scalar(f, &op->scalars[scalar++]);
  }
  for (uint32_t i = 0; i < op->attr_count; ++i) {
    fprintf(f, "  attr %s default ", op->attrs[i].name);
    dump_value(f, &op->attrs[i].fallback);
    for (uint32_t k = 0; k < op->attrs[i].count; ++k) fputs(" ", f), dump_value(f, &op->attrs[i].choices[k]);
    fputs("\n", f);
  }
  for (uint32_t i = 0; i < op->return_count; ++i) fprintf(f, "  returns %s\n", op->tensors[op->returns[i]].name);
  for (uint32_t i = 0; i < op->constraint_count; ++i) {
    fputs("  constraint", f);
    dump_expr(f, op, &op->constraints[i].when);
    fprintf(f, " %s\n", op->constraints[i].sentence);
  }
  fputs("  dims", f);
  for (uint32_t i = 0; i < op->dim_count; ++i) fprintf(f, " %s", op->dims[i]);
  fputs("\n", f);
  dump_contract(f, &op->contract);
}

static void dump_param(FILE *f, const op_signature *op, const manifest_kernel *k, const kernel_param *p) {
  static const char *const kinds[] = {"ptr", "scalar", "null", "dropped", "tensor_map"};
  fprintf(f, "  param %s %s %s", kinds[p->kind], p->name, p->dtype);
  if (p->kind == PARAM_PTR) {
    if (p->tensor >= 0) fprintf(f, " %s", op->tensors[p->tensor].name);
    if (p->scratch >= 0) fprintf(f, " scratch:%s", k->scratch[p->scratch].name);
    fprintf(f, " (%s) %s %" PRId64, p->operand, p->writes ? "write" : "read", p->align);
  }
  if (p->map != NULL) {
    const tensor_map *m = p->map;
    fprintf(f, " %s (%s) %s shape", op->tensors[p->tensor].name, p->operand, p->writes ? "write" : "read");
    for (uint32_t i = 0; i < m->rank; ++i) dump_expr(f, op, &m->shape[i]);
    fputs(" strides", f);
    for (uint32_t i = 0; i < m->stride_count; ++i) dump_expr(f, op, &m->strides[i]);
    fputs(" box", f);
    for (uint32_t i = 0; i < m->box_count; ++i) fprintf(f, " %" PRId64, m->box[i]);
    fprintf(f, " how %d %d %d %d", m->swizzle, m->interleave, m->l2, m->fill);
  }
  if (p->has_value) dump_expr(f, op, &p->value);
  if (p->has_divisible_by) fprintf(f, " divisible_by %" PRId64, p->divisible_by);
  if (p->kind == PARAM_DROPPED) fprintf(f, " equals %" PRId64, p->equals);
  fputs("\n", f);
}

static void dump_counts(FILE *f, const char *what, const named_count *counts, uint32_t count) {
  fprintf(f, "  %s", what);
  for (uint32_t i = 0; i < count; ++i) fprintf(f, " %s=%" PRId64, counts[i].key, counts[i].value);
  fputs("\n", f);
}

static void dump_three(FILE *f, const char *what, const int64_t n[3]) {
  fprintf(f, " %s %" PRId64 " %" PRId64 " %" PRId64, what, n[0], n[1], n[2]);
}

static void dump_kernel(FILE *f, const manifest *m, const manifest_kernel *k) {
  const op_signature *op = &m->ops[k->op];
  fprintf(f, "kernel %s.%s %s %s %s %s %" PRId64, op->name, k->variant, k->tier, k->mode, k->entry, k->file, k->bytes);
  dump_hex(f, k->sha256);
  fprintf(f, " ptxas %s\n ", k->ptxas == NULL ? "-" : k->ptxas);
  dump_three(f, "block", k->block);
  dump_three(f, "cluster", k->cluster);
  fprintf(f, " shared %" PRId64 " pdl=%d cooperative=%d priority %" PRId64 "\n  grid", k->shared_bytes, k->pdl, k->cooperative,
          k->priority);
  for (int i = 0; i < 3; ++i) dump_expr(f, op, &k->grid[i]);
  fputs(" when", f);
  dump_expr(f, op, &k->when);
  fputs("\n", f);
  for (uint32_t i = 0; i < k->param_count; ++i) dump_param(f, op, k, &k->params[i]);
  for (uint32_t i = 0; i < k->scratch_count; ++i) {
    fprintf(f, "  scratch %s %" PRId64 "%s", k->scratch[i].name, k->scratch[i].align, k->scratch[i].zeroed ? " zeroed" : "");
    dump_expr(f, op, &k->scratch[i].bytes);
    fputs("\n", f);
  }
  fprintf(f, "  isa %s", k->isa_tier == NULL ? "-" : k->isa_tier);
  for (uint32_t i = 0; i < k->feature_count; ++i) fprintf(f, " %s", k->features[i]);
  fputs("\n", f);
  dump_counts(f, "resources", k->resources, k->resource_count);
  dump_counts(f, "budget", k->budget, k->budget_count);
  dump_contract(f, &k->contract);
  fprintf(f, "  seed %" PRId64 "\n", k->selftest_seed);
  dump_counts(f, "selftest", k->selftest_shape, k->selftest_count);
}

static void dump_bound(FILE *f, const op_signature *op, const manifest_plan *p, bool temp, uint32_t index) {
  fprintf(f, "%s%s", temp ? "temp:" : "", temp ? p->temps[index].name : op->tensors[index].name);
}

static void dump_step(FILE *f, const manifest *m, const manifest_plan *p, const plan_step *s) {
  const op_signature *op = &m->ops[p->op], *callee = &m->ops[s->op];
  fprintf(f, "  step %s", callee->name);
  for (uint32_t i = 0; i < callee->tensor_count; ++i) {
    fprintf(f, " %s=", callee->tensors[i].name);
    if (s->bind[i].kind == BIND_NOTHING) fputs("-", f);
    else dump_bound(f, op, p, s->bind[i].kind == BIND_TEMP, s->bind[i].index);
  }
  for (uint32_t i = 0; i < callee->scalar_count; ++i) {
    if (!s->has_arg[i]) continue;
    fprintf(f, " %s=", callee->scalars[i].name);
    dump_expr(f, op, &s->args[i]);
  }
  for (uint32_t i = 0; i < callee->attr_count; ++i) {
    fprintf(f, " %s=", callee->attrs[i].name);
    dump_value(f, &s->attrs[i]);
  }
  fputs("\n", f);
}

static void dump_plan(FILE *f, const manifest *m, const manifest_plan *p) {
  const op_signature *op = &m->ops[p->op];
  fprintf(f, "plan %s.%s %s %s priority %" PRId64 " when", op->name, p->variant, p->tier, p->mode, p->priority);
  dump_expr(f, op, &p->when);
  fputs("\n", f);
  for (uint32_t i = 0; i < p->temp_count; ++i) {
    const plan_temp *t = &p->temps[i];
    fprintf(f, "  temp %s ", t->name);
    if (t->like >= 0) fputs("like ", f), dump_bound(f, op, p, t->like_temp, (uint32_t)t->like);
    else fputs(KILN_DTYPES[t->dtype].name, f);
    dump_shape(f, op, t->shape, t->rank);
    fputs("\n", f);
  }
  for (uint32_t i = 0; i < p->step_count; ++i) dump_step(f, m, p, &p->steps[i]);
}

/* Freed with test_free. */
char *test_dump(const manifest *m) {
  char *text = NULL;
  size_t bytes = 0;
  FILE *f = open_memstream(&text, &bytes);
  if (f == NULL) return NULL;
  fprintf(f, "target %s ptxas %s\n", m->target, m->ptxas == NULL ? "-" : m->ptxas);
  for (uint32_t i = 0; i < m->op_count; ++i) dump_op(f, &m->ops[i]);
  for (uint32_t i = 0; i < m->kernel_count; ++i) dump_kernel(f, m, &m->kernels[i]);
  for (uint32_t i = 0; i < m->plan_count; ++i) dump_plan(f, m, &m->plans[i]);
  for (uint32_t i = 0; i < m->source_count; ++i) {
    fprintf(f, "source %s %" PRId64, m->sources[i].name, m->sources[i].bytes);
    dump_hex(f, m->sources[i].sha256);
    fputs("\n", f);
  }
  fclose(f);
  return text;
}

char *test_dump_index(const tree_index *x) {
  char *text = NULL;
  size_t bytes = 0;
  FILE *f = open_memstream(&text, &bytes);
  if (f == NULL) return NULL;
  fprintf(f, "generation %" PRId64 "\n", x->generation);
  for (uint32_t i = 0; i < x->target_count; ++i) {
    fprintf(f, "%s %s %" PRId64, x->targets[i].target, x->targets[i].manifest, x->targets[i].bytes);
    dump_hex(f, x->targets[i].sha256);
    fputs("\n", f);
  }
  fclose(f);
  return text;
}

#undef free /* of these texts, which the C library made, whatever faulty.h says */
void test_free(char *text) { free(text); }

/* Every fault of one kernel's artifact, a line each, as kiln_tree_verify gathers them; the reader's refusal if there is one. */
#include "artifact.h"

static void add_line(void *user, const char *sentence) { fprintf(user, "%s\n", sentence); }

char *test_prove(const manifest *m, uint32_t kernel, const uint8_t *data, size_t bytes) {
  char *text = NULL;
  size_t length = 0;
  artifact a;
  kiln_error error = {.code = KILN_OK};
  FILE *f = open_memstream(&text, &length);
  kiln_arena *arena = kiln_arena_new();
  if (f == NULL || arena == NULL) return NULL;
  if (kiln_artifact_read(arena, m->target, (span){data, bytes}, &a, &error) != KILN_OK) fprintf(f, "%s\n", error.message);
  else kiln_prove_all(m, &m->kernels[kernel], &a, add_line, f);
  kiln_arena_free(arena);
  fclose(f);
  return text;
}

/* The artifact readers alone. */
kiln_code test_read_artifact(const char *target, const uint8_t *data, size_t bytes, kiln_error *error) {
  artifact a;
  kiln_arena *arena = kiln_arena_new();
  kiln_code code = kiln_artifact_read(arena, target, (span){data, bytes}, &a, error);
  kiln_arena_free(arena);
  return code;
}

/* Bytes of structs that callers bring or walk. */
size_t test_sizes(int which) {
  const size_t sizes[] = {sizeof(manifest), sizeof(tree_index), sizeof(manifest_kernel), offsetof(manifest, kernels),
                          offsetof(manifest_kernel, features), offsetof(manifest_kernel, feature_count)};
  return sizes[which];
}
