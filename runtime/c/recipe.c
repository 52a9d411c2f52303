/* How the parameters of a launch are filled: what is constant for a call's shape, and what is patched in per call. */
#include <stdio.h>
#include "run.h"

/* Bytes of operands per thread below which starting it costs more than it saves; a test may set another. */
#ifndef KILN_MIN_WORK
#define KILN_MIN_WORK (1 << 17)
#endif

static bool is_byte(kiln_dtype t) { return KILN_DTYPES[t].code || t == KILN_U8 || t == KILN_I8 || t == KILN_BOOL; }

static kiln_code why_not_pointer(const kernel_param *p, const bound *b, sink *why) {
  if (p->tensor < 0) return KILN_OK;
  kiln_dtype found = b->dtypes[p->tensor];
  if (found != 0 && strcmp(KILN_DTYPES[found].name, p->dtype) != 0 && !(is_byte(found) && is_byte(kiln_dtype_named(p->dtype)))) {
    kiln_put(why, "reads %s as %s, found %s", p->operand, p->dtype, KILN_DTYPES[found].name);
    return KILN_SELECTION;
  }
  uintptr_t off = p->align > 1 ? b->pointers[p->tensor] % (uintptr_t)p->align : 0;
  if (off == 0) return KILN_OK;
  kiln_put(why, "needs %s aligned to %lld bytes, found it %d bytes off", p->operand, (long long)p->align, (int)off);
  return KILN_SELECTION;
}

static bool fits(const char *dtype, const number *n) {
  if (dtype[0] != 'i') return true;
  return !n->real && (dtype[1] == '6' || (n->integer >= INT32_MIN && n->integer <= INT32_MAX));
}

static kiln_code why_not_scalar(const kernel_param *p, const bound *b, const number *args, sink *why, kiln_error *error) {
  number n;
  kiln_code code = kiln_evaluate(&p->value, b, args, &n, error);
  if (code != KILN_OK) return code;
  double found = n.real ? n.value : (double)n.integer;
  if (p->kind == PARAM_DROPPED) {
    if (n.real ? found == (double)p->equals : n.integer == p->equals) return KILN_OK;
    kiln_put(why, "was compiled for %s = %lld, found ", p->name, (long long)p->equals);
  } else if (p->has_divisible_by && p->divisible_by > 1 && (n.real || n.integer % p->divisible_by != 0)) {
    kiln_put(why, "needs %s divisible by %lld, found ", p->name, (long long)p->divisible_by);
  } else if (!fits(p->dtype, &n)) {
    kiln_put(why, "passes %s as %s, but it is ", p->name, p->dtype);
  } else {
    return KILN_OK;
  }
  if (why != NULL) kiln_put_value(why, &n);
  return KILN_SELECTION;
}

kiln_code kiln_why_not_params(const candidate *c, const bound *b, const number *args, sink *why, kiln_error *error) {
  for (uint32_t i = 0; i < c->kernel->param_count; i++) {
    const kernel_param *p = &c->kernel->params[i];
    kiln_code code = KILN_OK;
    if (p->operand != NULL) code = why_not_pointer(p, b, why);
    if (code == KILN_OK && p->map != NULL) code = kiln_why_not_map(p, b, args, why, error);
    else if (p->has_value) code = why_not_scalar(p, b, args, why, error);
    if (code != KILN_OK) return code;
  }
  return KILN_OK;
}

/* ---- values in slots of eight bytes ---- */

/* The CPU is passed integers of 64 bits and doubles, a device the parameter's own type. */
static void store(uint64_t *slot, const char *dtype, bool cpu, const number *n) {
  double real = n->real ? n->value : (double)n->integer;
  *slot = 0;
  if (dtype[0] == 'i' && (cpu || dtype[1] == '6')) memcpy(slot, &n->integer, 8);
  else if (dtype[0] == 'i') memcpy(slot, &(int32_t){(int32_t)n->integer}, 4);
  else if (cpu || dtype[1] == '6') memcpy(slot, &real, 8);
  else memcpy(slot, &(float){(float)real}, 4);
}

kiln_code kiln_store_scalar(const launch *l, const scalar_patch *p, const number *numbers, uint64_t *slots, kiln_error *error) {
  number n;
  kiln_code code = kiln_evaluate(p->value, p->bound, numbers + p->args, &n, error);
  if (code != KILN_OK) return code;
  if (!fits(p->dtype, &n))
    return kiln_fail(error, KILN_CONTRACT, "%s.%s passes %s as %s, which cannot hold its value in this call.", p->bound->op,
                     l->candidate->variant, p->name, p->dtype);
  store(&slots[p->slot], p->dtype, l->candidate->op->library->kind == DEVICE_CPU, &n);
  return KILN_OK;
}

/* ---- a launch ---- */

typedef struct {
  candidate *c;
  const bound *b;
  const view *reads, *writes;
  const number *args;
  uint32_t args_at;
  uint32_t *scratch;         /* per scratch of the kernel: its place in the table */
  decision *d;
  launch *out;
  kiln_error *error;
} making;

static kiln_code grid(const making *m) {
  static const int64_t most[] = {INT32_MAX, 65535, 65535};
  const kiln_op *op = m->c->op;
  for (int axis = 0; axis < 3; axis++) {
    number n;
    kiln_code code = kiln_evaluate(&m->c->kernel->grid[axis], m->b, m->args, &n, m->error);
    if (code != KILN_OK) return code;
    if (n.real || n.integer < 0) {
      sink s = kiln_message(m->error);
      kiln_put(&s, "%s.%s: a grid extent of ", op->sig->name, m->c->variant);
      kiln_put_value(&s, &n);
      kiln_put(&s, "; expected an integer of 0 or more.");
      return kiln_fail_put(m->error, KILN_CONTRACT, &s);
    }
    if (op->library->kind == DEVICE_CUDA && n.integer > most[axis])
      return kiln_fail(m->error, KILN_CONTRACT, "%s.%s: grid axis %d would be %lld, a device takes %lld; split the call.",
                       op->sig->name, m->c->variant, axis, (long long)n.integer, (long long)most[axis]);
    m->out->grid[axis] = n.integer;
  }
  if (m->out->grid[0] != 0 && m->out->grid[1] != 0 && m->out->grid[2] != 0) return KILN_OK;
  char none[192];
  if (kiln_has_no_rows(m->b)) return kiln_refuse_unwritten(m->b, op->sig->rows, m->error);
  snprintf(none, sizeof none, "the grid of %s", m->c->variant);
  return kiln_refuse_unwritten(m->b, none, m->error);
}

/* A launch leaves zeroed scratch as the next one needs it: all of a call's share one block. */
static kiln_code scratch(making *m) {
  const manifest_kernel *k = m->c->kernel;
  size_t zeroed = 0;
  for (uint32_t i = 0; i < k->scratch_count; i++) {
    number n;
    kiln_code code = kiln_evaluate(&k->scratch[i].bytes, m->b, m->args, &n, m->error);
    if (code != KILN_OK) return code;
    if (n.real || n.integer < 0 || n.integer >= INT64_C(1) << 48) {
      sink s = kiln_message(m->error);
      kiln_put(&s, "%s.%s: scratch of ", m->c->op->sig->name, m->c->variant);
      kiln_put_value(&s, &n);
      kiln_put(&s, " bytes; expected 0 to 2^48.");
      return kiln_fail_put(m->error, KILN_CONTRACT, &s);
    }
    bool zero = k->scratch[i].zeroed;
    code = kiln_add_temp(m->d, m->c->op->sig->name, (size_t)n.integer, zero, zero ? &zeroed : &m->d->scratch, &m->scratch[i],
                         m->error);
    if (code != KILN_OK) return code;
  }
  if (zeroed > m->d->zeroed) m->d->zeroed = zeroed;
  return KILN_OK;
}

/* Over how many threads rows are split. */
static int64_t chunks(const making *m) {
  int64_t work = 0, most = m->c->op->library->threads, rows = m->out->grid[0];
  for (uint32_t i = 0; i < m->b->sig->tensor_count; i++) {
    const geometry *g = &m->b->geometry[i];
    if (g->given) work += kiln_geometry_rows(g) * kiln_geometry_width(g) * g->itemsize;
  }
  if (rows < most) most = rows;
  if (work / KILN_MIN_WORK < most) most = work / KILN_MIN_WORK;
  return most > 1 ? most : 1;
}

static bool is_pointer(const kernel_param *p) { return p->kind == PARAM_PTR || p->kind == PARAM_NULL; }

/* A device takes parameters as they come; the CPU takes pointers, then integers, then floats. */
static int group(const making *m, const kernel_param *p) {
  if (p->kind == PARAM_DROPPED) return -1;
  if (m->c->op->library->kind != DEVICE_CPU || is_pointer(p)) return 0;
  return p->dtype[0] == 'i' ? 1 : 2;
}

static kiln_code put_param(making *m, const kernel_param *p, uint32_t slot) {
  launch *l = m->out;
  if (p->kind == PARAM_NULL) return KILN_OK;
  if (p->kind == PARAM_PTR) {
    uint32_t at = p->tensor >= 0 ? 0 : m->scratch[p->scratch];
    if (p->tensor >= 0) {
      const view *v = p->writes ? &m->writes[p->tensor] : &m->reads[p->tensor];
      if (!v->given) return KILN_OK; /* an absent operand is a null pointer */
      at = v->at;
    }
    l->pointers[l->pointer_count++] = (pointer_patch){slot, at};
    return KILN_OK;
  }
  if (p->kind == PARAM_MAP) {
    const view *v = p->writes ? &m->writes[p->tensor] : &m->reads[p->tensor];
    if (!v->given) return KILN_OK; /* an output that is still missing: nothing is launched */
    map_patch *map = &l->maps[l->map_count++];
    map->slot = slot;
    map->at = v->at;
    return kiln_tile(p, m->b, m->args, map, m->error);
  }
  scalar_patch patch = {slot, &p->value, m->b, m->args_at, p->dtype, p->name};
  if (kiln_names_args(&p->value)) {
    l->scalars[l->scalar_count++] = patch;
    return KILN_OK;
  }
  patch.args = 0;
  return kiln_store_scalar(l, &patch, m->args, l->slots, m->error);
}

static kiln_code parameters(making *m) {
  const manifest_kernel *k = m->c->kernel;
  launch *l = m->out;
  for (int g = 0; g < 3; g++) {
    if (g == 1) l->ints = l->slot_count;
    if (g == 2) l->floats = l->slot_count;
    for (uint32_t i = 0; i < k->param_count; i++) {
      if (group(m, &k->params[i]) != g) continue;
      kiln_code code = put_param(m, &k->params[i], l->slot_count++);
      if (code != KILN_OK) return code;
    }
  }
  return KILN_OK;
}

static uint32_t count_maps(const manifest_kernel *k) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < k->param_count; i++) count += k->params[i].map != NULL;
  return count;
}

kiln_code kiln_make_launch(candidate *c, const bound *b, const view *reads, const view *writes, const number *args,
                           uint32_t args_at, decision *d, kiln_error *error) {
  const manifest_kernel *k = c->kernel;
  launch l = {.candidate = c};
  l.slots = kiln_work_get(&d->memory, k->param_count, sizeof *l.slots);
  l.pointers = kiln_work_get(&d->memory, k->param_count, sizeof *l.pointers);
  l.scalars = kiln_work_get(&d->memory, k->param_count, sizeof *l.scalars);
  l.maps = count_maps(k) ? kiln_work_get(&d->memory, count_maps(k), sizeof *l.maps) : NULL;
  uint32_t *places = kiln_work_get(&d->memory, k->scratch_count, sizeof *places);
  if (!l.slots || !l.pointers || !l.scalars || !places || (count_maps(k) && !l.maps))
    return kiln_work_failed(&d->memory, b->op, error);
  making m = {c, b, reads, writes, args, args_at, places, d, &l, error};
  kiln_code code = scratch(&m);
  if (code == KILN_OK) code = grid(&m);
  if (code == KILN_OK) code = parameters(&m);
  if (code != KILN_OK) return code;
  l.chunks = c->op->library->kind == DEVICE_CPU ? chunks(&m) : 1;
  launch *out = kiln_append(d, (void **)&d->launches, &d->launch_count, &d->launch_room, sizeof *out);
  if (out == NULL) return kiln_work_failed(&d->memory, b->op, error);
  *out = l;
  return KILN_OK;
}
