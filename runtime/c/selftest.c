/* Runs the vector of every kernel on the machine at hand and compares the candidates of an op with each other. */
#define _GNU_SOURCE
#include "vector.h"

#include <math.h>
#include <stdlib.h>

typedef struct {
  kiln_library *library;
  kiln_selftest_fn *seen;
  void *user;
  uint32_t failures;
} testing;

/* One run's buffers: contents on the host, and what the kernel is given. */
typedef struct { void **host; uintptr_t *device; uint32_t count; } buffers;

static void tell(testing *t, const candidate *c, const char *against, const char *why) {
  t->failures += why != NULL;
  if (t->seen != NULL) t->seen(t->user, c->op->sig->name, c->variant, against, why);
}

/* ---- buffers ---- */

static void free_buffers(const kiln_library *library, buffers *b) {
  for (uint32_t i = 0; i < b->count; i++) {
    if (library->kind == DEVICE_CUDA && b->device[i] != 0) kiln_cuda_free_now(library, b->device[i], NULL);
    free(b->host[i]);
  }
}

static kiln_code one_buffer(const kiln_library *library, const vector *v, uint32_t i, buffers *b, kiln_error *error) {
  size_t bytes = v->bytes[i] ? v->bytes[i] : 1;
  if (posix_memalign(&b->host[i], SCRATCH_ALIGN, bytes) != 0) {
    b->host[i] = NULL;
    return kiln_fail(error, KILN_MEMORY, "the system has no memory left; free some.");
  }
  if (v->sig->tensors[i].role == ROLE_OUT) memset(b->host[i], 0xff, bytes);
  else kiln_fill_vector(v, i, b->host[i]);
  b->device[i] = library->kind == DEVICE_CUDA ? 0 : (uintptr_t)b->host[i];
  if (library->kind != DEVICE_CUDA) return KILN_OK;
  kiln_code code = kiln_cuda_allocate(library, bytes, NULL, &b->device[i], error);
  return code != KILN_OK ? code : kiln_cuda_copy(library, b->device[i], b->host[i], bytes, true, error);
}

static kiln_code make_buffers(const kiln_library *library, const vector *v, work *w, buffers *out, kiln_error *error) {
  uint32_t count = v->sig->tensor_count;
  out->count = 0;
  out->host = kiln_work_get(w, count, sizeof *out->host);
  out->device = kiln_work_get(w, count, sizeof *out->device);
  if (out->host == NULL || out->device == NULL) return kiln_work_failed(w, v->sig->name, error);
  out->count = count;
  for (uint32_t i = 0; i < count; i++) {
    kiln_code code = v->absent[i] ? KILN_OK : one_buffer(library, v, i, out, error);
    if (code != KILN_OK) return code;
  }
  return KILN_OK;
}

static kiln_code read_back(const kiln_library *library, const vector *v, buffers *b, kiln_error *error) {
  for (uint32_t i = 0; i < b->count && library->kind == DEVICE_CUDA; i++) {
    if (v->absent[i] || v->sig->tensors[i].role == ROLE_IN || v->bytes[i] == 0) continue;
    kiln_code code = kiln_cuda_copy(library, b->device[i], b->host[i], v->bytes[i], false, error);
    if (code != KILN_OK) return code;
  }
  return KILN_OK;
}

/* ---- one run ---- */

static kiln_code arguments(const vector *v, const buffers *b, work *w, argument_list *out, kiln_error *error) {
  operands o = {.args = v->args, .attrs = v->attrs};
  for (int side = 0; side < 2; side++) {
    o.tensors[side] = kiln_work_get(w, v->sig->tensor_count, sizeof *o.tensors[side]);
    if (o.tensors[side] == NULL) return kiln_work_failed(w, v->sig->name, error);
  }
  for (uint32_t i = 0; i < v->sig->tensor_count; i++) {
    operand_role role = v->sig->tensors[i].role;
    v->tensors[i].data = (void *)b->device[i];
    if (v->absent[i]) continue;
    if (role != ROLE_OUT) o.tensors[0][i] = &v->tensors[i];
    if (role != ROLE_IN) o.tensors[1][i] = &v->tensors[i];
  }
  return kiln_list_arguments(v->op, &o, w, out, error);
}

static kiln_code run_variant(const vector *v, const char *variant, work *w, buffers *out, kiln_error *error) {
  const kiln_library *library = v->op->library;
  argument_list list;
  kiln_choice choice = {.mode = "fast", .variant = variant};
  kiln_code code = make_buffers(library, v, w, out, error);
  if (code == KILN_OK) code = arguments(v, out, w, &list, error);
  if (code == KILN_OK) code = kiln_run(v->op, list.items, list.count, &choice, NULL, error);
  return code == KILN_OK ? read_back(library, v, out, error) : code;
}

/* ---- comparing ---- */

static bool is_real(kiln_dtype t) { return t == KILN_F64 || t == KILN_F32 || t == KILN_F16 || t == KILN_BF16; }

static bool is_output(const vector *v, uint32_t i) { return !v->absent[i] && v->sig->tensors[i].role != ROLE_IN; }

static bool all_finite(const vector *v, const buffers *b) {
  for (uint32_t i = 0; i < b->count; i++) {
    size_t size = (size_t)KILN_DTYPES[v->dtypes[i]].bytes;
    for (size_t at = 0; is_output(v, i) && is_real(v->dtypes[i]) && at < v->bytes[i]; at += size)
      if (!isfinite(kiln_element((char *)b->host[i] + at, v->dtypes[i]))) return false;
  }
  return true;
}

static bool same_bits(const vector *v, const buffers *a, const buffers *b) {
  for (uint32_t i = 0; i < a->count; i++)
    if (is_output(v, i) && memcmp(a->host[i], b->host[i], v->bytes[i]) != 0) return false;
  return true;
}

/* Square of the relative L2 distance of the outputs of floating-point type; every other output must be equal. Infinite if one is
 * not. */
static double distance(const vector *v, const buffers *a, const buffers *b) {
  double apart = 0, size = 0;
  for (uint32_t i = 0; i < a->count; i++) {
    size_t step = (size_t)KILN_DTYPES[v->dtypes[i]].bytes;
    if (!is_output(v, i)) continue;
    if (!is_real(v->dtypes[i]) && memcmp(a->host[i], b->host[i], v->bytes[i]) != 0) return INFINITY;
    for (size_t at = 0; at < v->bytes[i]; at += step) {
      double x = kiln_element((char *)a->host[i] + at, v->dtypes[i]), y = kiln_element((char *)b->host[i] + at, v->dtypes[i]);
      apart += (x - y) * (x - y);
      size += x * x;
    }
  }
  return apart / (size + 1e-60);
}

/* Both may be off by their own bound, in opposite directions. A plan keeps its op's contract. */
static double tolerance(const candidate *a, const candidate *b) {
  const numerics_contract *x = a->kernel != NULL ? &a->kernel->contract : &a->op->sig->contract;
  const numerics_contract *y = b->kernel != NULL ? &b->kernel->contract : &b->op->sig->contract;
  if (x->kind != CONTRACT_ENVELOPE && y->kind != CONTRACT_ENVELOPE) return 0;
  return x->rel_l2 + y->rel_l2;
}

/* ---- one kernel ---- */

static void compare(testing *t, const vector *v, const candidate *other, const buffers *first, work *w) {
  buffers b = {0};
  kiln_error why;
  double most = tolerance(v->candidate, other);
  kiln_code code = run_variant(v, other->variant, w, &b, &why);
  if (code != KILN_OK) tell(t, v->candidate, other->variant, why.message);
  else if (most == 0 && !same_bits(v, first, &b)) tell(t, v->candidate, other->variant, "their bits differ");
  else if (most > 0 && !(distance(v, first, &b) <= most * most)) tell(t, v->candidate, other->variant,
                                                                      "they differ by more than their envelope");
  else tell(t, v->candidate, other->variant, NULL);
  free_buffers(t->library, &b);
}

static void compare_all(testing *t, const vector *v, const buffers *first, work *w) {
  const wanted any = {.fast = true};
  bound *b;
  work before = *w;
  for (uint32_t i = 0; i < v->op->candidate_count; i++) {
    candidate *other = &v->op->candidates[i];
    if (other == v->candidate) continue;
    bool takes = kiln_bind_views(v->op, v->reads, v->writes, v->args, v->attrs, w, &b, NULL) == KILN_OK &&
                 kiln_judge(v->op, other, b, v->reads, v->writes, v->args, &any, w, NULL, NULL) == KILN_OK;
    if (takes) compare(t, v, other, first, w);
    if (w->blocks == before.blocks) w->at = before.at;
  }
}

static void test_alone(testing *t, const vector *v, work *w) {
  buffers first = {0}, second = {0};
  kiln_error why;
  kiln_code code = run_variant(v, v->kernel->variant, w, &first, &why);
  if (code == KILN_OK) code = run_variant(v, v->kernel->variant, w, &second, &why);
  if (code != KILN_OK) tell(t, v->candidate, NULL, why.message);
  else if (!same_bits(v, &first, &second)) tell(t, v->candidate, NULL, "two runs gave different bits");
  else if (!all_finite(v, &first)) tell(t, v->candidate, NULL, "an output is not finite");
  else tell(t, v->candidate, NULL, NULL);
  if (code == KILN_OK) compare_all(t, v, &first, w);
  free_buffers(t->library, &first);
  free_buffers(t->library, &second);
}

/* Whether an op is only half of another one, whose plan gives it operands that no one else could. */
static bool is_half(const kiln_op *op) {
  const manifest *m = &op->pack->manifest;
  for (uint32_t i = 0; i < m->plan_count; i++)
    for (uint32_t j = 0; strcmp(m->plans[i].tier, "primitive") == 0 && j < m->plans[i].step_count; j++)
      if (m->plans[i].steps[j].op == op->id) return true;
  return false;
}

/* Whether a candidate is a further entry of another's kernel, for calls of its own: `NAME.shapes` of `NAME`. */
static bool is_further(const candidate *c) {
  for (uint32_t i = 0; i < c->op->candidate_count; i++) {
    const candidate *other = &c->op->candidates[i];
    size_t n = strlen(other->variant);
    if (other->kernel == NULL || strncmp(c->variant, other->variant, n) != 0 || c->variant[n] != '.') continue;
    if (memcmp(other->kernel->sha256, c->kernel->sha256, sizeof c->kernel->sha256) == 0) return true;
  }
  return false;
}

static void test_kernel(testing *t, candidate *c) {
  _Alignas(16) char space[WORK_STACK];
  work w = {space, space + sizeof space, NULL, true, false};
  vector v;
  kiln_error why;
  if (kiln_make_vector(c, &w, &v, &why) == KILN_OK) test_alone(t, &v, &w);
  else tell(t, c, NULL, why.message);
  kiln_work_free(&w);
}

kiln_code kiln_selftest(kiln_library *library, kiln_selftest_fn *seen, void *user, uint32_t *failures, kiln_error *error) {
  if (library == NULL) return kiln_fail(error, KILN_CONTRACT, "found no library, expected an open one.");
  testing t = {library, seen, user, 0};
  context *c;
  bool pushed = false;
  kiln_code code = kiln_check_alive(library, error);
  if (code == KILN_OK && library->kind == DEVICE_PRETEND)
    code = kiln_fail(error, KILN_UNAVAILABLE, "%s device cannot run kernels; open the library for a real one.", library->label);
  if (code == KILN_OK) code = kiln_current_context(library, &c, error);
  if (code == KILN_OK && library->kind == DEVICE_CUDA) code = kiln_cuda_enter(library, c, &pushed, error);
  if (code != KILN_OK) return code;
  for (uint32_t i = 0; i < library->op_count; i++)
    for (uint32_t j = 0; j < library->ops[i]->candidate_count && !is_half(library->ops[i]); j++) {
      candidate *k = &library->ops[i]->candidates[j];
      char text[REFUSED_BYTES];
      bool runs = k->kernel != NULL && kiln_refused(k, text) == NULL && kiln_disabled_by(library, k) == NULL;
      if (runs && !is_further(k)) test_kernel(&t, k);
    }
  if (library->kind == DEVICE_CUDA) kiln_cuda_leave(library, pushed);
  if (failures != NULL) *failures = t.failures;
  return KILN_OK;
}
