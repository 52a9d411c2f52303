/* Calls: kiln_outputs, kiln_run, kiln_explain, kiln_prepare. */
#include "run.h"

#include <stdlib.h>

/* ---- from arguments to a checked request ---- */

static bool is_sealed(const kiln_library *library) { return atomic_load_explicit(&library->sealed, memory_order_acquire); }

kiln_code kiln_start(const kiln_op *op, const kiln_argument *arguments, size_t count, const kiln_choice *choice, request *out,
                     kiln_error *error) {
  out->w = (work){out->space, out->space + sizeof out->space, NULL, false, false};
  if (op == NULL || (arguments == NULL && count != 0))
    return kiln_fail(error, KILN_CONTRACT, "found no op or no arguments; pass an op of an open library and its arguments.");
  kiln_code code = kiln_check_alive(op->library, error);
  if (code != KILN_OK) return code;
  out->w.grow = !is_sealed(op->library);
  code = kiln_wanted(op, choice, &out->asked, error);
  return code != KILN_OK ? code : kiln_sort_arguments(op, arguments, count, &out->w, &out->given, error);
}

static kiln_code missing_output(const kiln_op *op, const bound *b, kiln_error *error) {
  for (uint32_t i = 0; i < op->sig->tensor_count; i++)
    if (b->missing[i])
      return kiln_fail(error, KILN_CONTRACT,
                       "%s: the output %s is missing; pass a tensor for it (kiln_outputs tells of what shape).",
                       op->sig->name, op->sig->tensors[i].name);
  return KILN_OK;
}

kiln_code kiln_check_request(const kiln_op *op, const request *r, kiln_stream stream, kiln_error *error) {
  if (op->library->kind == DEVICE_CPU && stream != NULL)
    return kiln_fail(error, KILN_CONTRACT, "%s: found a stream on the CPU, expected NULL.", op->sig->name);
  return kiln_check_addresses(op, &r->given, error);
}

/* ---- kiln_outputs ---- */

static void describe_output(const kiln_op *op, const bound *b, uint32_t i, kiln_output *out) {
  const tensor_operand *t = &op->sig->tensors[i];
  const geometry *g = &b->geometry[i];
  int64_t shape[KILN_MAX_RANK];
  int32_t rank = 0;
  uint32_t axis = 0;
  /* Rows have the leading dims of the input that gives the op's rows. */
  if (b->lead_rank >= 0 && t->rank >= 1 && t->rank <= 2 && t->shape[0].head == X_DIM && strcmp(t->shape[0].name,
                                                                                               op->sig->rows) == 0 &&
      b->lead_rank + (int32_t)t->rank - 1 <= KILN_MAX_RANK) {
    for (; rank < b->lead_rank; rank++) shape[rank] = b->lead[rank];
    axis = 1;
  }
  for (; axis < t->rank; axis++) shape[rank++] = g->shape[axis];
  *out = (kiln_output){t->name, kiln_dense(NULL, b->dtypes[i], op->library->device.ordinal, rank, shape)};
}

static kiln_code list_outputs(const kiln_op *op, request *r, kiln_output *outputs, size_t most, size_t *found, kiln_error *error) {
  bound *b;
  kiln_code code = kiln_bind_views(op, r->given.reads, r->given.writes, r->given.args, r->given.attrs, &r->w, &b, error);
  if (code != KILN_OK) return code;
  for (uint32_t i = 0; i < op->sig->tensor_count; i++) {
    if (!b->missing[i]) continue;
    if (*found < most) describe_output(op, b, i, &outputs[*found]);
    ++*found;
  }
  return KILN_OK;
}

kiln_code kiln_outputs(const kiln_op *op, const kiln_argument *arguments, size_t count, kiln_output *outputs, size_t most,
                       size_t *found, kiln_error *error) {
  request r;
  size_t all = 0;
  kiln_code code = kiln_start(op, arguments, count, NULL, &r, error);
  if (code == KILN_OK) code = list_outputs(op, &r, outputs, outputs != NULL ? most : 0, &all, error);
  kiln_work_free(&r.w);
  if (found != NULL) *found = all;
  return code;
}

/* ---- kiln_run ---- */

static kiln_code run_tree(const kiln_op *op, request *r, kiln_stream stream, kiln_error *error) {
  decision local = {0};
  const decision *d;
  prepared_call p;
  context *c;
  void *held;
  kiln_code code = kiln_decide(op, &r->given, &r->asked, &r->w, &local, &d, &held, error);
  if (code == KILN_OK) code = missing_output(op, d->bound, error);
  if (code == KILN_OK && d->candidate != NULL) {
    code = kiln_current_context(op->library, &c, error);
    if (code == KILN_OK) code = kiln_prepare_call(op, d, &r->given, c, stream, &r->w, &p, error);
    if (code == KILN_OK) code = kiln_go(&p, stream, error);
  }
  kiln_sealed_done(held);
  kiln_work_free(&local.memory);
  return code;
}

static kiln_code run_any(const kiln_op *op, const provider_list *list, request *r, kiln_stream stream, kiln_error *error) {
  argument_list arguments;
  bound *b;
  kiln_code code = kiln_bind_views(op, r->given.reads, r->given.writes, r->given.args, r->given.attrs, &r->w, &b, error);
  if (code == KILN_OK) code = missing_output(op, b, error);
  if (code != KILN_OK || b->empty) return code;
  code = kiln_list_arguments(op, &r->given, &r->w, &arguments, error);
  if (code == KILN_OK) code = kiln_run_providers(op, list, false, &arguments, &r->asked, stream, error);
  if (code != KILN_DECLINED) return code;
  code = run_tree(op, r, stream, error);
  if (code != KILN_SELECTION) return code;
  kiln_error below;
  code = kiln_run_providers(op, list, true, &arguments, &r->asked, stream, &below);
  if (code == KILN_DECLINED) return KILN_SELECTION;
  if (error != NULL) *error = code == KILN_OK ? (kiln_error){0} : below;
  return code;
}

kiln_code kiln_run(const kiln_op *op, const kiln_argument *arguments, size_t count, const kiln_choice *choice,
                   kiln_stream stream, kiln_error *error) {
  request r;
  kiln_code code = kiln_start(op, arguments, count, choice, &r, error);
  if (code == KILN_OK) code = kiln_check_request(op, &r, stream, error);
  if (code == KILN_OK) {
    const provider_list *list = atomic_load_explicit(&((kiln_op *)op)->providers, memory_order_acquire);
    code = list == NULL ? run_tree(op, &r, stream, error) : run_any(op, list, &r, stream, error);
  }
  kiln_work_free(&r.w);
  return code;
}

/* ---- kiln_explain ---- */

static kiln_code explain_tree(const kiln_op *op, request *r, const bound *b, bool *ran, sink *s, kiln_error *error) {
  const operands *o = &r->given;
  for (uint32_t i = 0; i < op->candidate_count; i++) {
    candidate *c = kiln_candidate_at(op, &r->asked, i);
    char text[2048];
    sink why = {text, sizeof text, 0};
    kiln_code code = kiln_judge(op, c, b, o->reads, o->writes, o->args, &r->asked, &r->w, &why, error);
    if (code != KILN_OK && code != KILN_SELECTION) return code;
    kiln_put(s, c->isa != NULL ? "  %s (%s, %s): " : "  %s (%s): ", c->variant, c->tier, c->isa);
    kiln_put(s, "%s\n", code == KILN_SELECTION ? text : *ran ? "could run" : "runs");
    *ran = *ran || code == KILN_OK;
  }
  return KILN_OK;
}

static kiln_code explain(const kiln_op *op, request *r, sink *s, kiln_error *error) {
  bound *b;
  bool ran = false;
  const provider_list *list = atomic_load_explicit(&((kiln_op *)op)->providers, memory_order_acquire);
  kiln_code code = kiln_bind_views(op, r->given.reads, r->given.writes, r->given.args, r->given.attrs, &r->w, &b, error);
  if (code != KILN_OK) return code;
  kiln_put(s, "%s on %s:\n", op->sig->name, op->library->label);
  if (list != NULL) kiln_explain_providers(list, op->library, false, &r->asked, &ran, s);
  code = explain_tree(op, r, b, &ran, s, error);
  if (list != NULL) kiln_explain_providers(list, op->library, true, &r->asked, &ran, s);
  if (list == NULL && op->candidate_count == 0) kiln_put(s, "  no candidates\n");
  return code;
}

kiln_code kiln_explain(const kiln_op *op, const kiln_argument *arguments, size_t count, const kiln_choice *choice, char *text,
                       size_t size, size_t *needed, kiln_error *error) {
  request r;
  sink s = {text, text != NULL ? size : 0, 0};
  kiln_code code = kiln_start(op, arguments, count, choice, &r, error);
  r.w.grow = true; /* telling is no launch: it may take memory of a sealed library, too */
  if (code == KILN_OK) code = explain(op, &r, &s, error);
  kiln_work_free(&r.w);
  if (needed != NULL) *needed = s.used + 1;
  return code;
}

/* ---- kiln_prepare, kiln_seal ---- */

typedef struct { context *context; bool **seen; uint32_t loaded; kiln_error *error; } preparation;

static kiln_code prepare_op(preparation *p, const kiln_op *op) {
  bool *seen = &p->seen[op->pack - op->library->packs][op->id];
  if (*seen) return KILN_OK;
  *seen = true;
  for (uint32_t i = 0; i < op->candidate_count; i++) {
    const candidate *c = &op->candidates[i];
    void *function;
    char text[REFUSED_BYTES];
    kiln_code code = KILN_OK;
    for (uint32_t j = 0; c->plan != NULL && j < c->plan->step_count && code == KILN_OK; j++)
      code = prepare_op(p, kiln_callee(op, &c->plan->steps[j]));
    if (c->kernel != NULL && kiln_refused(c, text) == NULL) {
      code = kiln_load_kernel(p->context, c, NULL, &function, p->error);
      p->loaded += code == KILN_OK;
    }
    if (code != KILN_OK) return code;
  }
  return KILN_OK;
}

static kiln_code prepare_all(kiln_library *library, const char *const *names, size_t count, preparation *p) {
  kiln_code code = KILN_OK;
  for (uint32_t i = 0; names == NULL && i < library->op_count && code == KILN_OK; i++) code = prepare_op(p, library->ops[i]);
  for (size_t i = 0; names != NULL && i < count && code == KILN_OK; i++) {
    const kiln_op *op = kiln_find(library, names[i], p->error);
    code = op != NULL ? prepare_op(p, op) : KILN_CONTRACT;
  }
  return code;
}

static bool **new_seen(const kiln_library *library) {
  size_t ops = 0;
  for (uint32_t i = 0; i < library->pack_count; i++) ops += library->packs[i].manifest.op_count;
  bool **seen = calloc(1, library->pack_count * sizeof *seen + ops);
  bool *at = (bool *)(seen + library->pack_count);
  for (uint32_t i = 0; seen != NULL && i < library->pack_count; i++) {
    seen[i] = at;
    at += library->packs[i].manifest.op_count;
  }
  return seen;
}

kiln_code kiln_prepare(kiln_library *library, const char *const *names, size_t count, uint32_t *loaded, kiln_error *error) {
  if (library == NULL) return kiln_fail(error, KILN_CONTRACT, "found no library, expected an open one.");
  preparation p = {.error = error};
  kiln_code code = kiln_check_alive(library, error);
  if (code == KILN_OK && library->kind == DEVICE_PRETEND)
    code = kiln_fail(error, KILN_UNAVAILABLE, "%s device cannot run kernels; open the library for a real one.", library->label);
  if (code == KILN_OK) code = kiln_current_context(library, &p.context, error);
  if (code != KILN_OK) return code;
  p.seen = new_seen(library);
  if (p.seen == NULL) return kiln_fail(error, KILN_MEMORY, "the system has no memory left; free some.");
  code = prepare_all(library, names, count, &p);
  free((void *)p.seen);
  if (loaded != NULL) *loaded = p.loaded;
  return code;
}

void kiln_seal(kiln_library *library) {
  if (library->pool != NULL) kiln_pool_start(library->pool);
  pthread_mutex_lock(&library->lock);
  if (atomic_load(&library->sealed_table) == NULL) atomic_store(&library->sealed_table, kiln_sealed_new());
  pthread_mutex_unlock(&library->lock);
  atomic_store_explicit(&library->sealed, true, memory_order_release);
}

/* ---- kiln_stats ---- */

static void provider_stats(const kiln_op *op, kiln_stats_fn *seen, void *user) {
  const provider_list *list = atomic_load_explicit(&((kiln_op *)op)->providers, memory_order_acquire);
  for (uint32_t i = 0; list != NULL && i < list->count; i++) {
    uint64_t runs = atomic_load_explicit(&list->items[i]->runs, memory_order_relaxed);
    uint64_t declined = atomic_load_explicit(&list->items[i]->declined, memory_order_relaxed);
    if (runs || declined) seen(user, op->sig->name, list->items[i]->name, runs, declined);
  }
}

void kiln_stats(const kiln_library *library, kiln_stats_fn *seen, void *user) {
  for (uint32_t i = 0; i < library->pack_count; i++)
    for (uint32_t j = 0; j < library->packs[i].manifest.op_count; j++) {
      const kiln_op *op = &library->packs[i].ops[j];
      provider_stats(op, seen, user);
      for (uint32_t k = 0; k < op->candidate_count; k++) {
        uint64_t runs = atomic_load_explicit(&op->candidates[k].runs, memory_order_relaxed);
        if (runs) seen(user, op->sig->name, op->candidates[k].variant, runs, 0);
      }
    }
}
