/* Which operands may share memory, and the check of the others at each call. */
#include "run.h"

static bool same_rows(const tensor_operand *w, const tensor_operand *o) {
  if (o->role != ROLE_IN || w->layout != LAYOUT_ROWS || o->layout != LAYOUT_ROWS || w->rank != o->rank) return false;
  for (uint32_t i = 0; i < w->rank; i++)
    if (!kiln_expr_equal(&w->shape[i], &o->shape[i])) return false;
  return true;
}

static bool same_geometry(const geometry *a, const geometry *b) {
  bool steps = a->row == b->row && a->col == b->col && a->itemsize == b->itemsize;
  return steps && a->rank == b->rank && memcmp(a->shape, b->shape, a->rank * sizeof *a->shape) == 0;
}

/* Whether `written` may be the buffer of `read`: no step reads the one after another has written the other. */
static bool safe_in_plan(const kiln_op *op, const manifest_plan *plan, uint32_t written, uint32_t read) {
  int64_t first_write = plan->step_count, last_read = -1;
  for (uint32_t i = 0; i < plan->step_count; i++) {
    const op_signature *callee = kiln_callee(op, &plan->steps[i])->sig;
    for (uint32_t j = 0; j < callee->tensor_count; j++) {
      const step_bind *b = &plan->steps[i].bind[j];
      if (b->kind != BIND_TENSOR) continue;
      if (b->index == written && callee->tensors[j].role != ROLE_IN && i < first_write) first_write = i;
      if (b->index == read && callee->tensors[j].role != ROLE_OUT) last_read = i;
    }
  }
  return last_read <= first_write;
}

static bool may_be_one(const kiln_op *op, const bound *b, uint32_t i, uint32_t j, const candidate *c) {
  const tensor_operand *w = &op->sig->tensors[i], *o = &op->sig->tensors[j];
  bool alike = b->dtypes[i] == b->dtypes[j] && same_geometry(&b->geometry[i], &b->geometry[j]);
  if (c == NULL || !alike || !same_rows(w, o)) return false;
  if (c->kernel != NULL) return strcmp(c->tier, "generated") == 0 || strcmp(c->tier, "fused") == 0;
  return safe_in_plan(op, c->plan, i, j);
}

static bool add(const kiln_op *op, const bound *b, uint32_t i, uint32_t j, const view *written, const view *other, bool fine,
                decision *d) {
  if (written->at >= d->operands || other->at >= d->operands) return true; /* temporaries lie apart from all else */
  overlap *o = kiln_append(d, (void **)&d->overlaps, &d->overlap_count, &d->overlap_room, sizeof *o);
  if (o == NULL) return false;
  const geometry *g = &b->geometry[i], *h = &b->geometry[j];
  *o = (overlap){op->sig->name, written->at, other->at, kiln_geometry_extent(g), kiln_geometry_extent(h), *g, *h, fine,
                 {op->sig->tensors[i].name, op->sig->tensors[j].name}};
  return true;
}

kiln_code kiln_overlap_pairs(const kiln_op *op, const bound *b, const view *reads, const view *writes, const candidate *c,
                             decision *d,
                             kiln_error *error) {
  bool fine = true;
  for (uint32_t i = 0; i < op->sig->tensor_count; i++) {
    if (!writes[i].given || !b->geometry[i].given) continue;
    for (uint32_t j = 0; j < op->sig->tensor_count; j++) {
      if (!b->geometry[j].given) continue;
      if (reads[j].given) fine = fine && add(op, b, i, j, &writes[i], &reads[j], i == j || may_be_one(op, b, i, j, c), d);
      if (j > i && writes[j].given) fine = fine && add(op, b, i, j, &writes[i], &writes[j], false, d);
    }
  }
  return fine ? KILN_OK : kiln_work_failed(&d->memory, op->sig->name, error);
}

/* Whether two column ranges of one wider buffer lie between each other's rows. */
static bool interleaved(uintptr_t p, const geometry *a, uintptr_t q, const geometry *b) {
  if (a->row != b->row || a->col != 1 || b->col != 1 || a->itemsize != b->itemsize || a->row <= 0) return false;
  int64_t bytes = (int64_t)(q - p);
  if (bytes % a->itemsize != 0) return false;
  int64_t gap = bytes / a->itemsize % a->row;
  if (gap < 0) gap += a->row;
  return gap >= kiln_geometry_width(a) && a->row - gap >= kiln_geometry_width(b);
}

kiln_code kiln_check_overlaps(const decision *d, const uintptr_t *table, kiln_error *error) {
  for (uint32_t i = 0; i < d->overlap_count; i++) {
    const overlap *o = &d->overlaps[i];
    uintptr_t p = table[o->written], q = table[o->other];
    bool apart = p >= q + (uintptr_t)o->b_bytes || q >= p + (uintptr_t)o->a_bytes;
    if (apart || (p == q && o->same_is_fine) || interleaved(p, &o->a, q, &o->b)) continue;
    return kiln_fail(error, KILN_CONTRACT,
                     "%s: the memory of %s, which is written, overlaps that of %s; expected separate buffers%s. Pass another "
                     "tensor.",
                     o->op, o->names[0], o->names[1], o->same_is_fine ? " or exactly the same one" : "");
  }
  return KILN_OK;
}
