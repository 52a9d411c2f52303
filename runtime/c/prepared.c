/* A launch laid out: addresses and numbers in place, functions loaded; and letting it go. */
#include "run.h"

#include <unistd.h>

bool kiln_is_forked(const kiln_library *library) {
  return library->alive != NULL ? *library->alive == 0 : (int64_t)getpid() != library->process;
}

kiln_code kiln_check_alive(const kiln_library *library, kiln_error *error) {
  if (atomic_load_explicit(&library->closed, memory_order_acquire))
    return kiln_fail(error, KILN_UNAVAILABLE, "this library was closed; open the tree again.");
  if (!kiln_is_forked(library)) return KILN_OK;
  return kiln_fail(error, KILN_UNAVAILABLE, "this library was opened before the process was forked; open the tree in the child.");
}

/* ---- laying out ---- */

kiln_code kiln_fill_numbers(prepared_call *p, kiln_error *error) {
  const decision *d = p->decision;
  for (uint32_t i = 0; i < d->frame_count; i++) {
    const frame *f = &d->frames[i];
    kiln_code code = kiln_step_args(f->bound->op, f->step, f->sig, f->bound, p->numbers + f->from, p->numbers + f->to, error);
    if (code != KILN_OK) return code;
  }
  for (uint32_t i = 0; i < d->launch_count; i++)
    for (uint32_t j = 0; j < d->launches[i].scalar_count; j++) {
      kiln_code code = kiln_store_scalar(&d->launches[i], &d->launches[i].scalars[j], p->numbers, p->launches[i].slots, error);
      if (code != KILN_OK) return code;
    }
  return KILN_OK;
}

/* Brings a launch's tensor maps to the addresses of the call's table. */
static kiln_code fill_maps(const prepared_call *p, const prepared *to, kiln_error *error) {
  const decision *d = p->decision;
  for (uint32_t i = 0; i < to->launch->map_count; i++) {
    const map_patch *m = &to->launch->maps[i];
    uintptr_t address = p->table[m->at], made_for = to->slots[m->slot];
    /* Before scratch is taken, temporaries have no address. */
    if (made_for == address || (m->at >= d->operands && p->scratch == 0)) continue;
    to->slots[m->slot] = 0;
    kiln_code code = kiln_cuda_encode(p->op->library, p->context, to->launch->candidate, m, address, to->params[m->slot], error);
    if (code != KILN_OK) return code;
    to->slots[m->slot] = address;
  }
  return KILN_OK;
}

kiln_code kiln_fill_pointers(prepared_call *p, kiln_error *error) {
  const decision *d = p->decision;
  for (uint32_t i = 0; i < d->temp_count; i++)
    p->table[d->operands + i] = (d->temps[i].zeroed ? p->zeroed : p->scratch) + d->temps[i].offset;
  for (uint32_t i = 0; i < d->launch_count; i++) {
    for (uint32_t j = 0; j < d->launches[i].pointer_count; j++)
      p->launches[i].slots[d->launches[i].pointers[j].slot] = p->table[d->launches[i].pointers[j].at];
    kiln_code code = fill_maps(p, &p->launches[i], error);
    if (code != KILN_OK) return code;
  }
  return KILN_OK;
}

/* Memory of its maps, in place of their slots. */
static bool place_maps(const launch *l, prepared *to, work *w) {
  if (l->map_count == 0) return true;
  char *memory = kiln_work_get(w, l->map_count * (size_t)MAP_BYTES + MAP_ALIGN, 1);
  if (memory == NULL) return false;
  memory += (MAP_ALIGN - (uintptr_t)memory % MAP_ALIGN) % MAP_ALIGN;
  for (uint32_t i = 0; i < l->map_count; i++) to->params[l->maps[i].slot] = memory + i * (size_t)MAP_BYTES;
  return true;
}

static kiln_code lay_out(prepared_call *p, uint32_t i, kiln_stream stream, work *w, kiln_error *error) {
  const launch *l = &p->decision->launches[i];
  prepared *out = &p->launches[i];
  *out = (prepared){.decision = p->decision, .launch = l};
  kiln_code code = kiln_load_kernel(p->context, l->candidate, stream, &out->function, error);
  if (code != KILN_OK) return code;
  bool cuda = p->op->library->kind == DEVICE_CUDA;
  out->slots = kiln_work_get(w, l->slot_count, sizeof *out->slots);
  out->params = cuda ? kiln_work_get(w, l->slot_count, sizeof *out->params) : NULL;
  out->config = cuda ? kiln_work_get(w, 1, kiln_cuda_config_bytes()) : NULL;
  if (!out->slots || (cuda && (!out->params || !out->config))) return kiln_work_failed(w, p->op->sig->name, error);
  if (l->slot_count) memcpy(out->slots, l->slots, l->slot_count * sizeof *l->slots);
  if (!cuda) return KILN_OK;
  for (uint32_t j = 0; j < l->slot_count; j++) out->params[j] = &out->slots[j];
  if (!place_maps(l, out, w)) return kiln_work_failed(w, p->op->sig->name, error);
  kiln_cuda_configure(l->candidate->kernel, l->grid, out->config);
  return KILN_OK;
}

kiln_code kiln_prepare_call(const kiln_op *op, const decision *d, const operands *o, context *c, kiln_stream stream, work *w,
                            prepared_call *out, kiln_error *error) {
  uint32_t tensors = op->sig->tensor_count;
  *out = (prepared_call){.op = op, .decision = d, .context = c};
  if (op->library->kind == DEVICE_PRETEND)
    return kiln_fail(error, KILN_UNAVAILABLE, "%s device cannot run kernels; open the library for a real one.", op->library->label);
  out->table = kiln_work_get(w, d->operands + d->temp_count, sizeof *out->table);
  out->numbers = kiln_work_get(w, d->numbers, sizeof *out->numbers);
  out->launches = kiln_work_get(w, d->launch_count, sizeof *out->launches);
  if (!out->table || !out->numbers || !out->launches) return kiln_work_failed(w, op->sig->name, error);
  for (uint32_t i = 0; i < tensors; i++) {
    out->table[i] = o->reads[i].pointer;
    out->table[tensors + i] = o->writes[i].pointer;
  }
  if (op->sig->scalar_count) memcpy(out->numbers, o->args, op->sig->scalar_count * sizeof *o->args);
  kiln_code code = kiln_check_overlaps(d, out->table, error);
  for (uint32_t i = 0; i < d->launch_count && code == KILN_OK; i++) code = lay_out(out, i, stream, w, error);
  if (code == KILN_OK) code = kiln_fill_numbers(out, error);
  if (code == KILN_OK) code = kiln_fill_pointers(out, error);
  return code;
}

/* ---- letting go ---- */

static kiln_code run_all(prepared_call *p, kiln_stream stream, kiln_error *error) {
  kiln_library *library = p->op->library;
  if (library->kind == DEVICE_CUDA)
    return kiln_cuda_launch(library, p->context, p->launches, p->decision->launch_count, stream, error);
  for (uint32_t i = 0; i < p->decision->launch_count; i++) {
    kiln_code code = kiln_cpu_launch(library, &p->launches[i], error);
    if (code != KILN_OK) return code;
  }
  return KILN_OK;
}

static kiln_code run_with_scratch(prepared_call *p, kiln_stream stream, kiln_error *error) {
  scratch_lease lease;
  const decision *d = p->decision;
  kiln_code code = kiln_scratch_take(p->op, p->context, stream, d->scratch, d->zeroed, &lease, error);
  if (code != KILN_OK) return code;
  if (p->scratch != lease.scratch.address || p->zeroed != lease.zeroed.address) {
    p->scratch = lease.scratch.address;
    p->zeroed = lease.zeroed.address;
    code = kiln_fill_pointers(p, error);
  }
  if (code == KILN_OK) code = run_all(p, stream, error);
  kiln_code given = kiln_scratch_give(p->op, p->context, stream, &lease, code == KILN_OK ? error : NULL);
  return code != KILN_OK ? code : given;
}

kiln_code kiln_go(prepared_call *p, kiln_stream stream, kiln_error *error) {
  const decision *d = p->decision;
  kiln_code code = d->scratch || d->zeroed ? run_with_scratch(p, stream, error) : run_all(p, stream, error);
  if (code != KILN_OK) return code;
  for (uint32_t i = 0; i < d->counted_count; i++) atomic_fetch_add_explicit(&d->counted[i]->runs, 1, memory_order_relaxed);
  return KILN_OK;
}
