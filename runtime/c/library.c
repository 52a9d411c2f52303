/* The ops of a library, and giving everything back. */
#define _GNU_SOURCE
#include "run.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static kiln_code no_memory(kiln_error *error) { return kiln_fail(error, KILN_MEMORY, "the system has no memory left; free some."); }

/* ---- candidates ---- */

static const char *const TIERS[] = {"fast", "fused", "generated", "primitive", "composite"};
static const int32_t TIER_ORDER[] = {0, 1, 2, 2, 3};

static int32_t tier_order(const char *tier) {
  for (size_t i = 0; i < sizeof TIERS / sizeof *TIERS; i++)
    if (strcmp(tier, TIERS[i]) == 0) return TIER_ORDER[i];
  return 3;
}

static int by_order(const void *a, const void *b) {
  const candidate *x = a, *y = b;
  if (x->tier_order != y->tier_order) return x->tier_order < y->tier_order ? -1 : 1;
  if (x->isa_rank != y->isa_rank) return x->isa_rank > y->isa_rank ? -1 : 1;
  if (x->priority != y->priority) return x->priority > y->priority ? -1 : 1;
  return strcmp(x->variant, y->variant);
}

static int64_t shared_bytes(const manifest_kernel *k) {
  int64_t bytes = k->shared_bytes;
  for (uint32_t i = 0; i < k->resource_count; i++)
    if (strcmp(k->resources[i].key, "static_shared") == 0) bytes += k->resources[i].value;
  return bytes;
}

static bool takes_maps(const manifest_kernel *k) {
  for (uint32_t i = 0; i < k->param_count; i++)
    if (k->params[i].map != NULL) return true;
  return false;
}

/* Why this device cannot run a kernel at all; false: no memory. */
static bool refusal(kiln_library *library, const pack *p, const manifest_kernel *k, const char **out) {
  char text[256];
  sink s = {text, sizeof text, 0};
  if (library->kind == DEVICE_CPU) {
    const char *lacks = kiln_cpu_lacks(library->features, p->manifest.target, k);
    if (lacks != NULL) kiln_put(&s, "this CPU lacks %s", lacks);
  } else if (library->kind == DEVICE_CUDA && shared_bytes(k) > library->shared_limit) {
    kiln_put(&s, "needs %lld bytes of shared memory, the device allows %lld", (long long)shared_bytes(k),
             (long long)library->shared_limit);
  } else if (library->kind == DEVICE_CUDA && takes_maps(k) && !kiln_cuda_makes_maps(library)) {
    kiln_put(&s, "takes tensor maps, and libcuda has no cuTensorMapEncodeTiled; update the driver");
  }
  if (s.used == 0) return true;
  *out = kiln_arena_text(library->arena, text, strlen(text));
  return *out != NULL;
}

static bool kernel_candidate(kiln_op *op, uint32_t i, candidate *c) {
  const manifest_kernel *k = &op->pack->manifest.kernels[i];
  *c = (candidate){.op = op, .kernel = k, .variant = k->variant, .tier = k->tier, .mode = k->mode, .isa = k->isa_tier,
                   .priority = k->priority, .tier_order = tier_order(k->tier), .id = op->pack->first_kernel + i};
  if (k->isa_tier != NULL) c->isa_rank = kiln_isa_rank(op->pack->manifest.target, k->isa_tier);
  c->tiles = op->library->kind == DEVICE_CPU && kiln_needs_tiles(k);
  return refusal(op->library, op->pack, k, &c->refusal);
}

static void plan_candidate(kiln_op *op, uint32_t i, candidate *c) {
  const manifest_plan *p = &op->pack->manifest.plans[i];
  *c = (candidate){.op = op, .plan = p, .variant = p->variant, .tier = p->tier, .mode = p->mode, .priority = p->priority,
                   .tier_order = tier_order(p->tier)};
}

static bool candidates(kiln_op *op) {
  const manifest *m = &op->pack->manifest;
  uint32_t count = 0, fast = 0;
  for (uint32_t i = 0; i < m->kernel_count; i++) count += m->kernels[i].op == op->id;
  for (uint32_t i = 0; i < m->plan_count; i++) count += m->plans[i].op == op->id;
  op->candidates = kiln_arena_get(op->library->arena, count + 1, sizeof *op->candidates);
  op->fast = kiln_arena_get(op->library->arena, count + 1, sizeof *op->fast);
  if (op->candidates == NULL || op->fast == NULL) return false;
  for (uint32_t i = 0; i < m->kernel_count; i++)
    if (m->kernels[i].op == op->id && !kernel_candidate(op, i, &op->candidates[op->candidate_count++])) return false;
  for (uint32_t i = 0; i < m->plan_count; i++)
    if (m->plans[i].op == op->id) plan_candidate(op, i, &op->candidates[op->candidate_count++]);
  qsort(op->candidates, count, sizeof *op->candidates, by_order);
  for (int pass = 0; pass < 2; pass++)
    for (uint32_t i = 0; i < count; i++)
      if ((strcmp(op->candidates[i].mode, "fast") == 0) == (pass == 0)) op->fast[fast++] = &op->candidates[i];
  return true;
}

/* ---- what a signature says once and for all ---- */

static axis_rule rule_of(const expr *e) {
  if (e->head == X_DIM) return (axis_rule){e->index, 1};
  for (int i = 0; e->head == X_MUL && i < 2; i++) {
    const expr *factor = &e->items[i], *dim = &e->items[1 - i];
    if (factor->head == X_INTEGER && factor->integer > 0 && dim->head == X_DIM) return (axis_rule){dim->index, factor->integer};
  }
  return (axis_rule){-1, 1};
}

static bool names_dim(const expr *e, int32_t dim) {
  if (e->head == X_DIM) return e->index == dim;
  for (uint32_t i = 0; i < e->count; i++)
    if (names_dim(&e->items[i], dim)) return true;
  return false;
}

static bool is_upper_of(const char *dim, const char *name) {
  for (; *dim && *name; dim++, name++)
    if (*dim != (*name >= 'a' && *name <= 'z' ? *name - 'a' + 'A' : *name)) return false;
  return *dim == *name;
}

/* An integer scalar `k` binds the dim `K` where the shapes name it. */
static int32_t dim_of_scalar(const op_signature *sig, const scalar_operand *o) {
  for (uint32_t d = 0; d < sig->dim_count && o->dtype[0] == 'i'; d++) {
    if (!is_upper_of(sig->dims[d], o->name)) continue;
    for (uint32_t i = 0; i < sig->tensor_count; i++)
      for (uint32_t j = 0; j < sig->tensors[i].rank; j++)
        if (names_dim(&sig->tensors[i].shape[j], (int32_t)d)) return (int32_t)d;
  }
  return -1;
}

static bool rules(kiln_op *op) {
  const op_signature *sig = op->sig;
  kiln_arena *arena = op->library->arena;
  op->axes = kiln_arena_get(arena, (size_t)sig->tensor_count * KILN_MAX_RANK + 1, sizeof *op->axes);
  op->shaping = kiln_arena_get(arena, sig->scalar_count + 1, sizeof *op->shaping);
  op->bound_dim = kiln_arena_get(arena, sig->scalar_count + 1, sizeof *op->bound_dim);
  if (op->axes == NULL || op->shaping == NULL || op->bound_dim == NULL) return false;
  for (uint32_t i = 0; i < sig->tensor_count; i++)
    for (uint32_t j = 0; j < sig->tensors[i].rank; j++) op->axes[i * KILN_MAX_RANK + j] = rule_of(&sig->tensors[i].shape[j]);
  for (uint32_t i = 0; i < sig->scalar_count; i++) op->bound_dim[i] = dim_of_scalar(sig, &sig->scalars[i]);
  return true;
}

/* ---- all ops ---- */

/* A plan within a plan within a plan needs that much of a caller's stack. */
enum { MOST_DEPTH = 8 };

static uint32_t depth_of(pack *p, kiln_op *op) {
  if (op->depth != 0) return op->depth;
  op->depth = 1;
  for (uint32_t i = 0; i < op->candidate_count; i++) {
    candidate *c = &op->candidates[i];
    for (uint32_t j = 0; c->plan != NULL && j < c->plan->step_count; j++) {
      uint32_t below = 1 + depth_of(p, &p->ops[c->plan->steps[j].op]);
      if (below > MOST_DEPTH) c->refusal = "its plans nest too deep";
      else if (below > op->depth) op->depth = below;
    }
  }
  return op->depth;
}

static kiln_code make_pack(kiln_library *library, pack *p, kiln_error *error) {
  p->ops = kiln_arena_get(library->arena, p->manifest.op_count + 1, sizeof *p->ops);
  if (p->ops == NULL) return no_memory(error);
  for (uint32_t i = 0; i < p->manifest.op_count; i++) {
    kiln_op *op = &p->ops[i];
    op->library = library;
    op->pack = p;
    op->sig = &p->manifest.ops[i];
    op->id = i;
    if (!rules(op) || !candidates(op)) return no_memory(error);
  }
  for (uint32_t i = 0; i < p->manifest.op_count; i++) {
    kiln_find_shaping(&p->ops[i]);
    depth_of(p, &p->ops[i]);
  }
  return KILN_OK;
}

static int by_name(const void *a, const void *b) {
  const kiln_op *x = *(kiln_op *const *)a, *y = *(kiln_op *const *)b;
  int names = strcmp(x->sig->name, y->sig->name);
  return names != 0 ? names : x->pack < y->pack ? -1 : x->pack > y->pack;
}

kiln_code kiln_make_ops(kiln_library *library, kiln_error *error) {
  size_t all = 0;
  for (uint32_t i = 0; i < library->pack_count; i++) {
    kiln_code code = make_pack(library, &library->packs[i], error);
    if (code != KILN_OK) return code;
    all += library->packs[i].manifest.op_count;
  }
  library->ops = kiln_arena_get(library->arena, all + 1, sizeof(kiln_op *));
  if (library->ops == NULL) return no_memory(error);
  size_t count = 0;
  for (uint32_t i = 0; i < library->pack_count; i++)
    for (uint32_t j = 0; j < library->packs[i].manifest.op_count; j++) library->ops[count++] = &library->packs[i].ops[j];
  qsort((void *)library->ops, count, sizeof(kiln_op *), by_name);
  for (size_t i = 0; i < count; i++)
    if (i == 0 || strcmp(library->ops[i]->sig->name, library->ops[i - 1]->sig->name) != 0)
      library->ops[library->op_count++] = library->ops[i];
  return KILN_OK;
}

uint32_t kiln_op_count(const kiln_library *library) { return library->op_count; }

const kiln_op *kiln_op_at(const kiln_library *library, uint32_t id) { return id < library->op_count ? library->ops[id] : NULL; }

const char *kiln_op_name(const kiln_op *op) { return op->sig->name; }

static kiln_code no_op(const kiln_library *library, const char *name, kiln_error *error) {
  sink m = kiln_message(error);
  const char **names = calloc(library->op_count + 1, sizeof *names);
  kiln_put(&m, "this tree has no op '%.200s'; ", name);
  for (uint32_t i = 0; names != NULL && i < library->op_count; i++) names[i] = library->ops[i]->sig->name;
  if (names != NULL) kiln_put_nearest(&m, name, names, library->op_count);
  free(names);
  return kiln_fail_put(error, KILN_CONTRACT, &m);
}

const kiln_op *kiln_find(const kiln_library *library, const char *name, kiln_error *error) {
  if (library == NULL || name == NULL) {
    kiln_fail(error, KILN_CONTRACT, "found no library or no name, expected both.");
    return NULL;
  }
  uint32_t low = 0, high = library->op_count;
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    int order = strcmp(library->ops[middle]->sig->name, name);
    if (order == 0) return library->ops[middle];
    if (order < 0) low = middle + 1;
    else high = middle;
  }
  no_op(library, name, error);
  return NULL;
}

/* ---- what is disabled ---- */

static name_list *without(const name_list *old, const char *name, size_t bytes, bool disabled) {
  uint32_t most = (old != NULL ? old->count : 0) + 1;
  name_list *list = calloc(1, sizeof *list + most * sizeof *list->names + bytes + 1);
  if (list == NULL) return NULL;
  for (uint32_t i = 0; old != NULL && i < old->count; i++)
    if (strlen(old->names[i]) != bytes || memcmp(old->names[i], name, bytes) != 0) list->names[list->count++] = old->names[i];
  if (disabled) {
    char *copy = (char *)&list->names[most];
    memcpy(copy, name, bytes);
    list->names[list->count++] = copy;
  }
  return list;
}

kiln_code kiln_add_disabled(kiln_library *library, const char *name, size_t bytes, bool disabled, kiln_error *error) {
  pthread_mutex_lock(&library->lock);
  name_list *old = atomic_load_explicit(&library->disabled, memory_order_relaxed);
  name_list *list = without(old, name, bytes, disabled);
  if (list != NULL) {
    list->older = old; /* which holds names, and which a call may be reading */
    atomic_store_explicit(&library->disabled, list, memory_order_release);
    atomic_fetch_add_explicit(&library->version, 1, memory_order_release);
  }
  pthread_mutex_unlock(&library->lock);
  return list != NULL ? KILN_OK : no_memory(error);
}

kiln_code kiln_disable(kiln_library *library, const char *name, int32_t disabled, kiln_error *error) {
  if (library == NULL || name == NULL || name[0] == 0)
    return kiln_fail(error, KILN_CONTRACT, "found no library or no name, expected both.");
  kiln_code code = kiln_check_alive(library, error);
  return code != KILN_OK ? code : kiln_add_disabled(library, name, strlen(name), disabled != 0, error);
}

/* ---- the end ---- */

static void free_op(kiln_op *op) {
  kiln_free_decisions(op);
  kiln_free_providers(atomic_load(&op->providers));
}

void kiln_release(kiln_library *library) {
  if (atomic_fetch_sub_explicit(&library->references, 1, memory_order_acq_rel) != 1) return;
  for (uint32_t i = 0; i < library->pack_count; i++)
    for (uint32_t j = 0; library->packs[i].ops != NULL && j < library->packs[i].manifest.op_count; j++)
      free_op(&library->packs[i].ops[j]);
  name_list *list = atomic_load(&library->disabled);
  while (list != NULL) {
    name_list *older = list->older;
    free(list);
    list = older;
  }
  kiln_sealed_free(atomic_load(&library->sealed_table));
  if (!kiln_is_forked(library)) pthread_mutex_destroy(&library->lock);
  if (library->alive != NULL) munmap(library->alive, (size_t)sysconf(_SC_PAGESIZE));
  free(library->packs);
  free((void *)library->trees);
  kiln_arena_free(library->arena);
  free(library);
}

void kiln_close(kiln_library *library) {
  if (library == NULL || atomic_exchange(&library->closed, true)) return;
  bool forked = kiln_is_forked(library);
  kiln_pool_free(library->pool, forked);
  library->pool = NULL;
  kiln_scratch_close(library, forked);
  if (library->driver != NULL) kiln_cuda_close(library, forked);
  else kiln_close_contexts(library, forked);
  for (uint32_t i = 0; i < library->tree_count; i++) kiln_tree_close(library->trees[i]);
  kiln_release(library);
}
