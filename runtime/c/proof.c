/* The offline launch proof: what a manifest promises of an artifact, against what the artifact says of itself; as
 * kiln.runtime.proof. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "artifact.h"

enum { MAX_THREADS = 1024, REGISTER_FILE = 65536, REGISTER_UNIT = 256, SHOWN = 8, SENTENCE = 1500 };

/* Most shared memory that a block may ask for, static and dynamic together, by compute capability. */
static const struct { uint32_t sm; uint64_t bytes; } SHARED_LIMITS[] = {
  {80, 166912}, {86, 101376}, {87, 166912}, {89, 101376}, {90, 232448}, {100, 232448}, {103, 232448}, {110, 232448}, {120, 101376},
  {121, 101376},
};

typedef struct {
  const manifest *m;
  const manifest_kernel *kernel;
  proof_fault *told;
  void *user;
} proof;

static void tell(const proof *p, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void tell(const proof *p, const char *format, ...) {
  char fault[SENTENCE], sentence[SENTENCE + 1200];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(fault, sizeof fault, format, arguments);
  va_end(arguments);
  snprintf(sentence, sizeof sentence, "Kernel '%s' (%s.%s) %s; build %s again.", p->kernel->entry, p->m->ops[p->kernel->op].name,
           p->kernel->variant, fault, p->m->target);
  p->told(p->user, sentence);
}

/* ---- lists as they are shown: at most eight ---- */
typedef struct { char text[SENTENCE - 200]; size_t used; } shown;

static void show(shown *s, const char *name, bool quoted) {
  if (s->used + 16 + (quoted ? 2 : 0) > sizeof s->text) return;
  if (s->used != 0) memcpy(s->text + s->used, ", ", 2), s->used += 2;
  if (quoted) s->text[s->used++] = '\'';
  s->used += kiln_ascii(name, strlen(name), s->text + s->used, sizeof s->text - s->used - 1);
  if (quoted) s->text[s->used++] = '\'';
  s->text[s->used] = 0;
}

static void show_shape(char out[64], const cubin_shape *shape) {
  if (shape->given) snprintf(out, 64, "(%" PRIu32 ", %" PRIu32 ", %" PRIu32 ")", shape->n[0], shape->n[1], shape->n[2]);
  else strcpy(out, "None");
}

/* ---- counts ---- */
static const named_count *find_count(const named_count *counts, uint32_t n, const char *key) {
  for (uint32_t i = 0; i < n; ++i) {
    if (strcmp(counts[i].key, key) == 0) return &counts[i];
  }
  return NULL;
}

static const named_count *resource(const manifest_kernel *k, const char *key) {
  return find_count(k->resources, k->resource_count, key);
}

static void prove_measured(const proof *p, const char *name, uint64_t found) {
  const named_count *told = resource(p->kernel, name);
  if (told == NULL) tell(p, "has %" PRIu64 " %s in its file, the manifest says None", found, name);
  else if ((uint64_t)told->value != found)
    tell(p, "has %" PRIu64 " %s in its file, the manifest says %" PRId64, found, name, told->value);
}

/* The budget with the next name after `last`; NULL at the end. */
static const named_count *next_budget(const manifest_kernel *k, const char *last) {
  const named_count *next = NULL;
  for (uint32_t i = 0; i < k->budget_count; ++i) {
    const named_count *b = &k->budget[i];
    if (strcmp(b->key, last) > 0 && (next == NULL || strcmp(b->key, next->key) < 0)) next = b;
  }
  return next;
}

static void prove_budget(const proof *p) {
  for (const named_count *b = next_budget(p->kernel, ""); b != NULL; b = next_budget(p->kernel, b->key)) {
    const named_count *taken = resource(p->kernel, b->key);
    if (taken == NULL) tell(p, "has a budget for %s, but does not say how many it takes", b->key);
    else if (taken->value > b->value)
      tell(p, "takes %" PRId64 " %s, its budget is %" PRId64 "; use fewer or raise it", taken->value, b->key, b->value);
  }
}

/* ---- cubins ---- */
static uint32_t passed_bytes(const kernel_param *p) {
  if (p->kind == PARAM_MAP) return MAP_BYTES;
  bool four = p->kind == PARAM_SCALAR && (strcmp(p->dtype, "i32") == 0 || strcmp(p->dtype, "f32") == 0);
  return four ? 4 : 8;
}

static void prove_params(const proof *p, const cubin_kernel *found) {
  uint32_t passed = 0, end = 0;
  for (uint32_t i = 0; i < p->kernel->param_count; ++i) passed += p->kernel->params[i].kind != PARAM_DROPPED;
  if (passed != found->param_count) {
    tell(p, "takes %" PRIu32 " parameters in its file, the manifest passes %" PRIu32, found->param_count, passed);
    return;
  }
  const cubin_param *there = found->params;
  for (uint32_t i = 0; i < p->kernel->param_count; ++i) {
    const kernel_param *told = &p->kernel->params[i];
    if (told->kind == PARAM_DROPPED) continue;
    uint32_t size = passed_bytes(told), unit = told->kind == PARAM_MAP ? MAP_ALIGN : size;
    uint32_t offset = (found->param_base + end + unit - 1) / unit * unit - found->param_base;
    if (there->offset != offset || there->size != size)
      tell(p,
           "takes %" PRIu32 " bytes at offset %" PRIu32 " as parameter %" PRIu32
           " in its file, the manifest passes '%s' as %" PRIu32 " bytes at offset %" PRIu32,
           there->size, there->offset, there->ordinal, told->name, size, offset);
    end = offset + size;
    ++there;
  }
}

static bool same_shape(const cubin_shape *found, const int64_t told[3]) {
  return found->given && found->n[0] == told[0] && found->n[1] == told[1] && found->n[2] == told[2];
}

static void prove_shape(const proof *p, const cubin_kernel *found) {
  char shape[64];
  const int64_t *block = p->kernel->block, *cluster = p->kernel->cluster;
  if (!same_shape(&found->reqntid, block)) {
    show_shape(shape, &found->reqntid);
    tell(p, "requires the block %s in its file, the manifest launches (%" PRId64 ", %" PRId64 ", %" PRId64 ")", shape, block[0],
         block[1], block[2]);
  }
  if (found->cluster.given && !same_shape(&found->cluster, cluster)) {
    show_shape(shape, &found->cluster);
    tell(p, "requires the cluster %s in its file, the manifest launches (%" PRId64 ", %" PRId64 ", %" PRId64 ")", shape, cluster[0],
         cluster[1], cluster[2]);
  }
}

static void prove_registers(const proof *p, const cubin_kernel *found) {
  int64_t threads = p->kernel->block[0] * p->kernel->block[1] * p->kernel->block[2];
  if (threads <= 0 || threads > MAX_THREADS) {
    tell(p, "launches %" PRId64 " threads a block, the limit is %d", threads, MAX_THREADS);
    return;
  }
  uint64_t per_warp = ((uint64_t)found->registers * 32 + REGISTER_UNIT - 1) / REGISTER_UNIT * REGISTER_UNIT;
  uint64_t needed = (uint64_t)(threads + 31) / 32 * per_warp;
  if (needed > REGISTER_FILE)
    tell(p, "needs %" PRIu64 " registers a block (%" PRId64 " threads of %" PRIu32 "), the limit is %d", needed, threads,
         found->registers, REGISTER_FILE);
}

static void prove_shared(const proof *p, const cubin *c, const cubin_kernel *found) {
  uint64_t shared = (uint64_t)p->kernel->shared_bytes + found->static_shared, limit = 0;
  for (size_t i = 0; i < sizeof SHARED_LIMITS / sizeof *SHARED_LIMITS; ++i) {
    if (SHARED_LIMITS[i].sm == c->sm) limit = SHARED_LIMITS[i].bytes;
  }
  if (limit == 0) tell(p, "is for sm_%" PRIu32 ", whose shared memory limit is not known here", c->sm);
  else if (shared > limit)
    tell(p, "needs %" PRIu64 " bytes of shared memory a block, the limit of sm_%" PRIu32 " is %" PRIu64, shared, c->sm, limit);
}

static void prove_spills(const proof *p, const cubin_kernel *found) {
  static const char *const names[] = {"spill_stores", "spill_loads"};
  bool spills = false;
  for (size_t i = 0; i < 2; ++i) {
    const named_count *told = resource(p->kernel, names[i]);
    if (told == NULL) tell(p, "does not say how many %s its assembler reported", names[i]);
    spills = spills || (told != NULL && told->value != 0);
  }
  if (found->stack == 0 && spills) tell(p, "is said to spill registers, but its file has no stack to spill to");
}

static void prove_cubin(const proof *p, const cubin *c) {
  const cubin_kernel *found = NULL;
  shown names = {.used = 0};
  for (uint32_t i = 0; i < c->kernel_count; ++i) {
    if (i < SHOWN) show(&names, c->kernels[i].name, true);
    if (strcmp(c->kernels[i].name, p->kernel->entry) == 0) found = &c->kernels[i];
  }
  if (strcmp(c->arch, p->m->target) != 0) tell(p, "is built for %s, its target is %s", c->arch, p->m->target);
  if (c->kernel_count != 1 || found == NULL) tell(p, "must be the one kernel of its file, which holds [%s]", names.text);
  if (found == NULL) return;
  prove_params(p, found);
  prove_shape(p, found);
  prove_measured(p, "registers", found->registers);
  prove_measured(p, "stack", found->stack);
  prove_measured(p, "static_shared", found->static_shared);
  prove_measured(p, "code_bytes", found->code_bytes);
  prove_registers(p, found);
  prove_shared(p, c, found);
  prove_spills(p, found);
}

/* ---- shared objects ---- */
static void prove_names(const proof *p, const char *const *names, uint32_t count, const char *what) {
  shown list = {.used = 0};
  for (uint32_t i = 0; i < count && i < SHOWN; ++i) show(&list, names[i], false);
  if (count != 0) tell(p, "%s: %s", what, list.text);
}

static void prove_object(const proof *p, const shared_object *o) {
  const object_export *found = NULL;
  shown names = {.used = 0};
  for (uint32_t i = 0; i < o->export_count; ++i) {
    if (i < SHOWN) show(&names, o->exports[i].name, true);
    if (strcmp(o->exports[i].name, p->kernel->entry) == 0) found = &o->exports[i];
  }
  if (strncmp(p->m->target, "cpu-", 4) != 0 || strcmp(p->m->target + 4, o->machine) != 0)
    tell(p, "is built for %s, its target is %s", o->machine, p->m->target);
  if (found == NULL) tell(p, "is not among the functions of its file, which are [%s]", names.text);
  else prove_measured(p, "code_bytes", found->bytes);
  prove_names(p, o->needed, o->needed_count, "lies in a file that opens other libraries");
  prove_names(p, o->undefined, o->undefined_count, "lies in a file that takes symbols from its process");
  if (o->has_init) tell(p, "lies in a file that runs code when it is opened or closed");
  if (o->exec_stack) tell(p, "lies in a file that asks for memory both writable and executable");
}

/* ---- the whole ---- */
kiln_code kiln_artifact_read(kiln_arena *arena, const char *target, span file, artifact *out, kiln_error *error) {
  elf e = {.arena = arena, .error = error};
  out->is_cubin = strncmp(target, "sm_", 3) == 0;
  if (out->is_cubin) kiln_cubin_read(&e, file, &out->cubin);
  else kiln_object_read(&e, file, &out->object);
  return e.code;
}

void kiln_prove_all(const manifest *m, const manifest_kernel *kernel, const artifact *a, proof_fault *told, void *user) {
  const proof p = {m, kernel, told, user};
  if (a->is_cubin) prove_cubin(&p, &a->cubin);
  else prove_object(&p, &a->object);
  prove_budget(&p);
}

static void first_fault(void *user, const char *sentence) {
  kiln_error *first = user;
  if (first->code == KILN_OK) kiln_fail(first, KILN_INTEGRITY, "%s", sentence);
}

kiln_code kiln_prove(const manifest *m, const manifest_kernel *kernel, const uint8_t *data, size_t bytes, kiln_error *error) {
  artifact a;
  kiln_error first = {.code = KILN_OK};
  kiln_arena *arena = kiln_arena_new();
  if (arena == NULL) return kiln_no_memory(error);
  kiln_code code = kiln_artifact_read(arena, m->target, (span){data, bytes}, &a, error);
  if (code == KILN_OK) kiln_prove_all(m, kernel, &a, first_fault, &first);
  if (first.code != KILN_OK) code = kiln_fail(error, first.code, "%s", first.message);
  kiln_arena_free(arena);
  return code;
}
