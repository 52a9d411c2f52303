/* Bound calls: everything of a call but the launch, kept to be launched again and again. */
#include "run.h"

#include <stdlib.h>

struct kiln_call {
  kiln_library *library;
  const kiln_op *op;
  decision decision;
  work memory;               /* of everything below */
  prepared_call prepared;
  operands given;
  kiln_tensor *tensors;      /* copies: a caller's may be gone when a provider is given them */
  wanted asked;
  const provider_list *providers;
  argument_list arguments;
  kiln_error *refused;       /* why the tree cannot serve this call, where a provider may */
};

/* ---- binding ---- */

static const char *copy_text(work *w, const char *text, bool *fine) {
  if (text == NULL) return NULL;
  size_t bytes = strlen(text) + 1;
  char *copy = kiln_work_get(w, bytes, 1);
  *fine = *fine && copy != NULL;
  return copy != NULL ? memcpy(copy, text, bytes) : NULL;
}

static void *copied(work *w, const void *from, size_t count, size_t size, bool *fine) {
  void *copy = kiln_work_get(w, count, size);
  *fine = *fine && copy != NULL;
  return copy != NULL && count ? memcpy(copy, from, count * size) : copy;
}

static void copy_tensors(kiln_call *call, const operands *from, bool *fine) {
  uint32_t count = call->op->sig->tensor_count;
  call->tensors = kiln_work_get(&call->memory, 2 * (size_t)count, sizeof *call->tensors);
  for (int side = 0; side < 2; side++) {
    call->given.tensors[side] = kiln_work_get(&call->memory, count, sizeof *call->given.tensors[side]);
    *fine = *fine && call->tensors != NULL && call->given.tensors[side] != NULL;
    for (uint32_t i = 0; *fine && i < count; i++) {
      const kiln_tensor *t = from->tensors[side][i];
      kiln_tensor *own = &call->tensors[side * count + i];
      if (t == NULL) continue;
      *own = *t;
      call->given.tensors[side][i] = side && from->tensors[0][i] == t ? call->given.tensors[0][i] : own;
    }
  }
}

static kiln_code keep(kiln_call *call, const request *r, kiln_error *error) {
  const op_signature *sig = call->op->sig;
  work *w = &call->memory;
  bool fine = true;
  call->given.reads = copied(w, r->given.reads, sig->tensor_count, sizeof(view), &fine);
  call->given.writes = copied(w, r->given.writes, sig->tensor_count, sizeof(view), &fine);
  call->given.args = copied(w, r->given.args, sig->scalar_count, sizeof(number), &fine);
  call->given.attrs = copied(w, r->given.attrs, sig->attr_count, sizeof(attr_value), &fine);
  call->asked.tier = copy_text(w, r->asked.tier, &fine);
  call->asked.variant = copy_text(w, r->asked.variant, &fine);
  call->asked.isa = copy_text(w, r->asked.isa, &fine);
  call->asked.fast = r->asked.fast;
  copy_tensors(call, &r->given, &fine);
  return fine ? KILN_OK : kiln_work_failed(w, sig->name, error);
}

static kiln_code bind_providers(kiln_call *call, kiln_error *error) {
  call->providers = atomic_load_explicit(&((kiln_op *)call->op)->providers, memory_order_acquire);
  if (call->providers == NULL) return KILN_OK;
  call->refused = kiln_work_get(&call->memory, 1, sizeof *call->refused);
  if (call->refused == NULL) return kiln_work_failed(&call->memory, call->op->sig->name, error);
  return kiln_list_arguments(call->op, &call->given, &call->memory, &call->arguments, error);
}

static kiln_code check_missing(const kiln_call *call, kiln_error *error) {
  for (uint32_t i = 0; i < call->op->sig->tensor_count; i++)
    if (call->op->sig->tensors[i].role == ROLE_OUT && !call->op->sig->tensors[i].optional && !call->given.writes[i].given)
      return kiln_fail(error, KILN_CONTRACT,
                       "%s: the output %s is missing; pass a tensor for it (kiln_outputs tells of what shape).",
                       call->op->sig->name, call->op->sig->tensors[i].name);
  return KILN_OK;
}

static kiln_code bind(kiln_call *call, request *r, kiln_error *error) {
  context *c;
  kiln_code code = keep(call, r, error);
  if (code == KILN_OK) code = check_missing(call, error);
  if (code == KILN_OK) code = bind_providers(call, error);
  if (code == KILN_OK) code = kiln_decide_anew(call->op, &call->given, &call->asked, &r->w, &call->decision, error);
  if (code == KILN_SELECTION && call->providers != NULL) {
    call->decision.candidate = NULL;
    if (error != NULL) *call->refused = *error;
    else kiln_fail(call->refused, code, "%s: no candidate may run this call.", call->op->sig->name);
    return KILN_OK;
  }
  if (code != KILN_OK || call->decision.candidate == NULL) return code;
  code = kiln_current_context(call->library, &c, error);
  if (code == KILN_OK)
    code = kiln_prepare_call(call->op, &call->decision, &call->given, c, NULL, &call->memory, &call->prepared, error);
  return code;
}

kiln_code kiln_bind(const kiln_op *op, const kiln_argument *arguments, size_t count, const kiln_choice *choice, kiln_call **out,
                    kiln_error *error) {
  request r;
  kiln_error own;
  if (error == NULL) error = &own;
  if (out == NULL) return kiln_fail(error, KILN_CONTRACT, "found no place for the call; pass one.");
  *out = NULL;
  kiln_code code = kiln_start(op, arguments, count, choice, &r, error);
  if (code == KILN_OK) code = kiln_check_request(op, &r, NULL, error);
  kiln_call *call = code == KILN_OK ? calloc(1, sizeof *call) : NULL;
  if (code == KILN_OK && call == NULL) code = kiln_fail(error, KILN_MEMORY, "the system has no memory left; free some.");
  if (call != NULL) {
    r.w.grow = true; /* binding is no launch: it may take memory of a sealed library, too */
    call->library = op->library;
    call->op = op;
    call->memory.grow = call->decision.memory.grow = true;
    atomic_fetch_add_explicit(&op->library->references, 1, memory_order_relaxed);
    code = bind(call, &r, error);
    if (code != KILN_OK) kiln_call_free(call);
    else *out = call;
  }
  kiln_work_free(&r.w);
  return code;
}

void kiln_call_free(kiln_call *call) {
  if (call == NULL) return;
  kiln_work_free(&call->decision.memory);
  kiln_work_free(&call->memory);
  kiln_release(call->library);
  free(call);
}

const char *kiln_call_variant(const kiln_call *call) {
  return call->decision.candidate != NULL ? call->decision.candidate->variant : "";
}

size_t kiln_scratch_bytes(const kiln_call *call) { return call->decision.scratch; }

size_t kiln_zeroed_bytes(const kiln_call *call) { return call->decision.zeroed; }

/* ---- launching ---- */

static kiln_code launch_provided(kiln_call *call, kiln_stream stream, kiln_error *error) {
  kiln_code code = kiln_run_providers(call->op, call->providers, false, &call->arguments, &call->asked, stream, error);
  if (code != KILN_DECLINED) return code;
  if (call->decision.candidate != NULL) return kiln_go(&call->prepared, stream, error);
  code = kiln_run_providers(call->op, call->providers, true, &call->arguments, &call->asked, stream, error);
  if (code == KILN_DECLINED) return kiln_fail(error, KILN_SELECTION, "%s", call->refused->message);
  return code;
}

static kiln_code no_call(kiln_error *error) { return kiln_fail(error, KILN_CONTRACT, "found no call, expected a bound one."); }

kiln_code kiln_launch(kiln_call *call, kiln_stream stream, kiln_error *error) {
  if (call == NULL) return no_call(error);
  kiln_code code = kiln_check_alive(call->library, error);
  if (code != KILN_OK) return code;
  if (stream != NULL && call->library->kind == DEVICE_CPU)
    return kiln_fail(error, KILN_CONTRACT, "%s: found a stream on the CPU, expected NULL.", call->op->sig->name);
  if (call->decision.bound != NULL && call->decision.bound->empty) return KILN_OK;
  if (call->providers != NULL) return launch_provided(call, stream, error);
  return kiln_go(&call->prepared, stream, error);
}

/* ---- other addresses and values ---- */

static kiln_code not_the_same(const kiln_call *call, const char *name, const char *what, kiln_error *error) {
  return kiln_fail(error, KILN_CONTRACT, "%s: %s has another %s than was bound; bind again.", call->op->sig->name, name, what);
}

static kiln_code same_but_address(const kiln_call *call, const char *name, const view *old, const view *now, kiln_error *error) {
  size_t extents = (size_t)old->rank * sizeof *old->shape;
  if (!old->given) return not_the_same(call, name, "presence", error);
  if (old->rank != now->rank || memcmp(old->shape, now->shape, extents) != 0) return not_the_same(call, name, "shape", error);
  if (memcmp(old->strides, now->strides, extents) != 0) return not_the_same(call, name, "strides", error);
  if (old->dtype != now->dtype) return not_the_same(call, name, "element type", error);
  if (old->device != now->device) return not_the_same(call, name, "device", error);
  if (now->pointer == 0 && old->pointer != 0)
    return kiln_fail(error, KILN_CONTRACT, "%s: %s has a null address; pass a tensor with memory.", call->op->sig->name, name);
  uint32_t need = call->decision.candidate != NULL ? call->decision.aligns[old->at] : 1;
  if (need <= 1 || now->pointer % need == 0) return KILN_OK;
  return kiln_fail(error, KILN_CONTRACT, "%s: %s is not aligned to %u bytes, which %s needs; bind again.", call->op->sig->name,
                   name, need, call->decision.candidate->variant);
}

/* Where the changes of one kiln_rebind are gathered before any of them is made. */
typedef struct { view *reads, *writes; number *args; } changes;

static kiln_code change_tensor(kiln_call *call, changes *to, uint32_t i, const kiln_argument *a, kiln_error *error) {
  const tensor_operand *t = &call->op->sig->tensors[i];
  view now;
  if ((a->kind != KILN_KIND_TENSOR && a->kind != KILN_KIND_WRITTEN) || a->tensor == NULL)
    return kiln_fail(error, KILN_CONTRACT, "%s: %s: expected a tensor.", call->op->sig->name, t->name);
  kiln_code code = kiln_make_view(call->op->sig->name, t->name, a->tensor, &now, error);
  if (code != KILN_OK) return code;
  bool written = t->role == ROLE_OUT || a->kind == KILN_KIND_WRITTEN;
  bool in_place = !written && t->role == ROLE_INOUT && call->given.tensors[0][i] == call->given.tensors[1][i];
  for (int side = 0; side < 2; side++) {
    if (side != written && !in_place) continue;
    view *v = side ? &to->writes[i] : &to->reads[i];
    code = same_but_address(call, t->name, v, &now, error);
    if (code != KILN_OK) return code;
    if (side && now.readonly) return kiln_fail(error, KILN_CONTRACT, "%s: %s is written but its tensor is read-only; pass a copy.",
                                               call->op->sig->name, t->name);
    v->pointer = now.pointer;
  }
  return KILN_OK;
}

static kiln_code change_scalar(kiln_call *call, changes *to, uint32_t i, const kiln_argument *a, kiln_error *error) {
  if (call->op->shaping[i]) return not_the_same(call, call->op->sig->scalars[i].name, "value, on which the choice depends,", error);
  return kiln_cast_scalar(call->op->sig->name, &call->op->sig->scalars[i], a, &to->args[i], error);
}

static kiln_code change(kiln_call *call, changes *to, const kiln_argument *a, kiln_error *error) {
  const op_signature *sig = call->op->sig;
  for (uint32_t i = 0; a->name != NULL && i < sig->tensor_count; i++)
    if (strcmp(sig->tensors[i].name, a->name) == 0) return change_tensor(call, to, i, a, error);
  for (uint32_t i = 0; a->name != NULL && i < sig->scalar_count; i++)
    if (strcmp(sig->scalars[i].name, a->name) == 0) return change_scalar(call, to, i, a, error);
  return kiln_fail(error, KILN_CONTRACT, "%s has no operand '%.100s' that can be changed; bind again.", sig->name,
                   a->name ? a->name : "");
}

static kiln_code new_table(const kiln_call *call, const changes *to, work *w, uintptr_t **out, kiln_error *error) {
  const decision *d = &call->decision;
  uint32_t tensors = call->op->sig->tensor_count;
  uintptr_t *table = kiln_work_get(w, d->operands + d->temp_count, sizeof *table);
  if (table == NULL) return kiln_work_failed(w, call->op->sig->name, error);
  for (uint32_t i = 0; i < tensors; i++) {
    table[i] = to->reads[i].pointer;
    table[tensors + i] = to->writes[i].pointer;
  }
  *out = table;
  return kiln_check_overlaps(d, table, error);
}

static void commit_arguments(kiln_call *call) {
  const op_signature *sig = call->op->sig;
  for (uint32_t i = 0; i < sig->tensor_count; i++)
    for (int side = 0; side < 2; side++)
      if (call->given.tensors[side][i] != NULL) {
        const view *v = side ? &call->given.writes[i] : &call->given.reads[i];
        ((kiln_tensor *)call->given.tensors[side][i])->data = (void *)v->pointer;
      }
  for (size_t i = 0; i < call->arguments.count; i++)
    for (uint32_t j = 0; j < sig->scalar_count; j++)
      if (strcmp(call->arguments.items[i].name, sig->scalars[j].name) == 0) {
        call->arguments.items[i].number = call->given.args[j].value;
        call->arguments.items[i].integer = call->given.args[j].integer;
      }
}

static kiln_code fill(kiln_call *call, const number *args, const uintptr_t *table, kiln_error *error) {
  memcpy(call->prepared.numbers, args, call->op->sig->scalar_count * sizeof *args);
  memcpy(call->prepared.table, table, call->decision.operands * sizeof *table);
  kiln_code code = kiln_fill_numbers(&call->prepared, error);
  return code == KILN_OK ? kiln_fill_pointers(&call->prepared, error) : code;
}

/* What is checked is made: numbers and tensor maps first, since only they can fail, with the old ones put back if they do. */
static kiln_code commit(kiln_call *call, const changes *to, const uintptr_t *table, work *w, kiln_error *error) {
  const op_signature *sig = call->op->sig;
  kiln_code code = call->decision.candidate != NULL ? fill(call, to->args, table, error) : KILN_OK;
  if (code != KILN_OK) {
    const changes old = {call->given.reads, call->given.writes, call->given.args};
    uintptr_t *before;
    if (new_table(call, &old, w, &before, NULL) == KILN_OK) fill(call, old.args, before, NULL);
    return code;
  }
  memcpy(call->given.reads, to->reads, sig->tensor_count * sizeof *to->reads);
  memcpy(call->given.writes, to->writes, sig->tensor_count * sizeof *to->writes);
  if (sig->scalar_count) memcpy(call->given.args, to->args, sig->scalar_count * sizeof *to->args);
  commit_arguments(call);
  return KILN_OK;
}

kiln_code kiln_rebind(kiln_call *call, const kiln_argument *changed, size_t count, kiln_error *error) {
  _Alignas(16) char space[WORK_STACK];
  work w = {space, space + sizeof space, NULL, false, false};
  if (call == NULL || (changed == NULL && count != 0)) return no_call(error);
  const op_signature *sig = call->op->sig;
  bool fine = true;
  uintptr_t *table = NULL;
  kiln_code code = kiln_check_alive(call->library, error);
  if (code != KILN_OK) return code;
  changes to = {copied(&w, call->given.reads, sig->tensor_count, sizeof(view), &fine),
                copied(&w, call->given.writes, sig->tensor_count, sizeof(view), &fine),
                copied(&w, call->given.args, sig->scalar_count, sizeof(number), &fine)};
  if (!fine) return kiln_work_failed(&w, sig->name, error);
  for (size_t i = 0; i < count && code == KILN_OK; i++) code = change(call, &to, &changed[i], error);
  if (code == KILN_OK) code = new_table(call, &to, &w, &table, error);
  return code == KILN_OK ? commit(call, &to, table, &w, error) : code;
}
