/* What a call of one shape does, and the table that remembers it: read without a lock, written under the library's. */
#include "run.h"

#include <stdlib.h>

/* ---- a decision's parts ---- */

void *kiln_append(decision *d, void **items, uint32_t *count, uint32_t *room, size_t size) {
  if (*count == *room) {
    uint32_t more = *room ? 2 * *room : 4;
    char *grown = kiln_work_get(&d->memory, more, size);
    if (grown == NULL) return NULL;
    if (*count) memcpy(grown, *items, *count * size);
    *items = grown;
    *room = more;
  }
  return (char *)*items + (*count)++ * size;
}

kiln_code kiln_add_temp(decision *d, const char *op, size_t bytes, bool zeroed, size_t *end, uint32_t *at, kiln_error *error) {
  temp_place *place = kiln_append(d, (void **)&d->temps, &d->temp_count, &d->temp_room, sizeof *place);
  if (place == NULL) return kiln_work_failed(&d->memory, op, error);
  *at = d->operands + d->temp_count - 1;
  *place = (temp_place){*end, zeroed};
  size_t rounded = (bytes + SCRATCH_ALIGN - 1) / SCRATCH_ALIGN * SCRATCH_ALIGN;
  *end += rounded ? rounded : SCRATCH_ALIGN;
  if (*end < SIZE_MAX / 4) return KILN_OK;
  return kiln_fail(error, KILN_CONTRACT, "%s: this call needs more scratch than there are addresses; split it.", op);
}

typedef struct { wanted asked; work *w; decision *d; kiln_error *error; } building;

static kiln_code build(building *m, const kiln_op *op, const view *reads, const view *writes, const number *args, uint32_t args_at,
                       const attr_value *attrs, const bound **out_bound, candidate **out);

static kiln_code add_frame(building *m, const plan_step *step, const op_signature *sig, const bound *b, uint32_t from,
                           uint32_t *to) {
  frame *f = kiln_append(m->d, (void **)&m->d->frames, &m->d->frame_count, &m->d->frame_room, sizeof *f);
  if (f == NULL) return kiln_work_failed(&m->d->memory, b->op, m->error);
  *to = m->d->numbers;
  *f = (frame){step, sig, b, from, *to};
  m->d->numbers += sig->scalar_count;
  return KILN_OK;
}

static kiln_code build_step(building *m, const kiln_op *op, plan_frame *f, const plan_step *step, const number *args,
                            uint32_t args_at) {
  step_call s;
  uint32_t to = 0;
  const bound *b;
  candidate *c;
  kiln_code code = kiln_plan_step(op, f, step, args, m->w, &s, m->error);
  if (code == KILN_OK) code = add_frame(m, step, s.callee->sig, f->bound, args_at, &to);
  if (code == KILN_OK) code = build(m, s.callee, s.reads, s.writes, s.args, to, step->attrs, &b, &c);
  return code;
}

static kiln_code build_plan(building *m, const kiln_op *op, const manifest_plan *plan, const bound *b, const view *reads,
                            const view *writes, const number *args, uint32_t args_at) {
  plan_frame f;
  decision *d = m->d;
  kiln_code code = kiln_plan_frame(op, plan, b, reads, writes, args, d->operands + d->temp_count, m->w, &f, m->error);
  uint32_t at;
  for (uint32_t i = 0; i < plan->temp_count && code == KILN_OK; i++)
    code = kiln_add_temp(d, op->sig->name, f.temp_bytes[i], false, &d->scratch, &at, m->error);
  wanted before = m->asked;
  m->asked = (wanted){.isa = before.isa, .fast = before.fast};
  for (uint32_t i = 0; i < plan->step_count && code == KILN_OK; i++) code = build_step(m, op, &f, &plan->steps[i], args, args_at);
  m->asked = before;
  return code;
}

static uint32_t most_aligned(const expr *pred, uint32_t tensor) {
  uint32_t most = pred->head == P_ALIGNED && pred->index == (int32_t)tensor ? (uint32_t)pred->integer : 1;
  for (uint32_t i = 0; i < pred->count; i++) {
    uint32_t inner = pred->head >= P_TRUE ? most_aligned(&pred->items[i], tensor) : 1;
    most = inner > most ? inner : most;
  }
  return most;
}

/* What a candidate needs of its operands' addresses: another one must keep it. */
static void need_alignment(decision *d, const candidate *c, const view *reads, const view *writes) {
  const expr *when = c->kernel != NULL ? &c->kernel->when : &c->plan->when;
  for (uint32_t i = 0; i < c->op->sig->tensor_count; i++) {
    uint32_t need = most_aligned(when, i);
    for (uint32_t j = 0; c->kernel != NULL && j < c->kernel->param_count; j++) {
      const kernel_param *p = &c->kernel->params[j];
      if (p->tensor == (int32_t)i && p->align > need) need = (uint32_t)p->align;
    }
    for (int side = 0; side < 2; side++) {
      const view *v = side ? &writes[i] : &reads[i];
      if (v->given && v->at < d->operands && d->aligns[v->at] < need) d->aligns[v->at] = need;
    }
  }
}

static kiln_code build(building *m, const kiln_op *op, const view *reads, const view *writes, const number *args, uint32_t args_at,
                       const attr_value *attrs, const bound **out_bound, candidate **out) {
  bound *b;
  candidate *c;
  decision *d = m->d;
  *out = NULL;
  kiln_code code = kiln_bind_views(op, reads, writes, args, attrs, &d->memory, &b, m->error);
  if (code != KILN_OK) return code;
  *out_bound = b;
  if (b->empty) return KILN_OK;
  code = kiln_choose(op, b, reads, writes, args, &m->asked, m->w, &c, m->error);
  if (code != KILN_OK) return code;
  candidate **counted = kiln_append(d, (void **)&d->counted, &d->counted_count, &d->counted_room, sizeof(candidate *));
  if (counted == NULL) return kiln_work_failed(&d->memory, op->sig->name, m->error);
  *out = *counted = c;
  need_alignment(d, c, reads, writes);
  code = kiln_overlap_pairs(op, b, reads, writes, c, d, m->error);
  if (code != KILN_OK) return code;
  if (c->kernel != NULL) return kiln_make_launch(c, b, reads, writes, args, args_at, d, m->error);
  return build_plan(m, op, c->plan, b, reads, writes, args, args_at);
}

kiln_code kiln_decide_anew(const kiln_op *op, const operands *o, const wanted *asked, work *w, decision *d, kiln_error *error) {
  const op_signature *sig = op->sig;
  attr_value *attrs = kiln_work_get(&d->memory, sig->attr_count, sizeof *attrs);
  if (attrs == NULL) return kiln_work_failed(&d->memory, sig->name, error);
  if (sig->attr_count) memcpy(attrs, o->attrs, sig->attr_count * sizeof *attrs);
  d->operands = 2 * sig->tensor_count;
  d->aligns = kiln_work_get(&d->memory, d->operands, sizeof *d->aligns);
  if (d->aligns == NULL) return kiln_work_failed(&d->memory, sig->name, error);
  d->numbers = sig->scalar_count;
  building m = {*asked, w, d, error};
  return build(&m, op, o->reads, o->writes, o->args, 0, attrs, &d->bound, &d->candidate);
}

/* ---- the key of a decision ---- */

static uint64_t *put_view(uint64_t *key, const view *v) {
  if (!v->given) {
    *key++ = 0;
    return key;
  }
  uint64_t alignment = v->pointer & -v->pointer & 255;
  *key++ = 1 | (uint64_t)v->readonly << 1 | (uint64_t)v->dtype << 8 | (uint64_t)v->rank << 16 | alignment << 24 |
           (uint64_t)(uint32_t)v->device << 32;
  for (int32_t i = 0; i < v->rank; i++) {
    *key++ = (uint64_t)v->shape[i];
    *key++ = (uint64_t)v->strides[i];
  }
  return key;
}

/* Texts are the manifest's own: one pointer each. */
static uint64_t attr_key(const attr_value *a) {
  return a->kind == JSON_TEXT ? (uint64_t)(uintptr_t)a->text : (uint64_t)a->integer << 2 | a->kind;
}

/* Everything that a decision depends on. NULL: no memory. */
static uint64_t *make_key(const kiln_op *op, const operands *o, const wanted *asked, work *w, uint32_t *words) {
  const op_signature *sig = op->sig;
  size_t most = 1 + sig->attr_count + sig->scalar_count + (size_t)sig->tensor_count * 2 * (1 + 2 * KILN_MAX_RANK);
  uint64_t *key = kiln_work_get(w, most, sizeof *key), *at = key;
  if (key == NULL) return NULL;
  *at++ = (uint64_t)atomic_load_explicit(&op->library->version, memory_order_acquire) << 1 | asked->fast;
  for (uint32_t i = 0; i < sig->attr_count; i++)
    *at++ = attr_key(&o->attrs[i]);
  for (uint32_t i = 0; i < sig->scalar_count; i++) {
    if (!op->shaping[i]) continue;
    memcpy(at++, o->args[i].real ? (const void *)&o->args[i].value : (const void *)&o->args[i].integer, 8);
  }
  for (uint32_t i = 0; i < sig->tensor_count; i++) at = put_view(put_view(at, &o->reads[i]), &o->writes[i]);
  *words = (uint32_t)(at - key);
  w->at = (char *)at + (16 - ((uintptr_t)at & 15)) % 16; /* what was not needed is given back */
  return key;
}

static uint64_t hash_of(const uint64_t *key, uint32_t words) {
  uint64_t h = UINT64_C(0x9e3779b97f4a7c15);
  for (uint32_t i = 0; i < words; i++) {
    h = (h ^ key[i]) * UINT64_C(0xff51afd7ed558ccd);
    h ^= h >> 32;
  }
  return h;
}

/* ---- the table ---- */

bool kiln_is_key(const decision *d, uint64_t hash, const uint64_t *key, uint32_t words) {
  return d->hash == hash && d->key_words == words && memcmp(d->key, key, words * sizeof *key) == 0;
}

/* The decision of a key, or NULL and where it would be. */
static decision *look_up(decision *_Atomic *table, uint64_t hash, const uint64_t *key, uint32_t words, uint32_t *slot) {
  for (uint32_t i = (uint32_t)hash % DECISIONS;; i = (i + 1) % DECISIONS) {
    decision *found = atomic_load_explicit(&table[i], memory_order_acquire);
    *slot = i;
    if (found == NULL || kiln_is_key(found, hash, key, words)) return found;
  }
}

static void free_decision(decision *d) {
  if (d != NULL) kiln_work_free(&d->memory);
  free(d);
}

void kiln_free_decisions(kiln_op *op) {
  decision *_Atomic *table = atomic_load(&op->decisions);
  for (uint32_t i = 0; table != NULL && i < DECISIONS; i++) free_decision(atomic_load(&table[i]));
  free((void *)table);
  atomic_store(&op->decisions, NULL);
}

/* Publishes a decision, unless another thread was first or the table is full. True: it is the table's now. */
static bool publish(kiln_op *op, decision **d) {
  decision *_Atomic *table = atomic_load_explicit(&op->decisions, memory_order_relaxed);
  if (table == NULL) {
    table = calloc(DECISIONS, sizeof *table);
    if (table == NULL) return false;
    atomic_store_explicit(&op->decisions, table, memory_order_release);
  }
  uint32_t slot;
  decision *found = look_up(table, (*d)->hash, (*d)->key, (*d)->key_words, &slot);
  if (found != NULL) {
    free_decision(*d);
    *d = found;
    return true;
  }
  op->decision_count++;
  atomic_store_explicit(&table[slot], *d, memory_order_release);
  return true;
}

static bool has_room(kiln_op *op) {
  pthread_mutex_lock(&op->library->lock);
  bool room = op->decision_count < DECISIONS / 4 * 3;
  pthread_mutex_unlock(&op->library->lock);
  return room;
}

/* On the heap, for the table. */
static kiln_code remember(kiln_op *op, const operands *o, const wanted *asked, uint64_t hash, const uint64_t *key, uint32_t words,
                          work *w, const decision **out, kiln_error *error) {
  decision *d = calloc(1, sizeof *d);
  if (d == NULL) return kiln_fail(error, KILN_MEMORY, "%s: the system has no memory left; free some.", op->sig->name);
  d->memory.grow = true;
  d->hash = hash;
  d->key_words = words;
  d->key = kiln_work_get(&d->memory, words, sizeof *d->key);
  kiln_code code = d->key != NULL ? KILN_OK : kiln_work_failed(&d->memory, op->sig->name, error);
  if (code == KILN_OK) {
    memcpy(d->key, key, words * sizeof *key);
    code = kiln_decide_anew(op, o, asked, w, d, error);
  }
  if (code == KILN_OK) {
    pthread_mutex_lock(&op->library->lock);
    bool kept = publish(op, &d);
    pthread_mutex_unlock(&op->library->lock);
    if (!kept) code = kiln_fail(error, KILN_MEMORY, "%s: the system has no memory left; free some.", op->sig->name);
  }
  if (code != KILN_OK) free_decision(d);
  else *out = d;
  return code;
}

kiln_code kiln_decide(const kiln_op *op, const operands *o, const wanted *asked, work *w, decision *local, const decision **out,
                      void **held, kiln_error *error) {
  *held = NULL;
  bool sealed = atomic_load_explicit(&op->library->sealed, memory_order_acquire);
  uint32_t words, slot;
  if (asked->tier == NULL && asked->variant == NULL && asked->isa == NULL) {
    uint64_t *key = make_key(op, o, asked, w, &words);
    if (key == NULL) return kiln_work_failed(w, op->sig->name, error);
    uint64_t hash = hash_of(key, words);
    decision *_Atomic *table = atomic_load_explicit(&op->decisions, memory_order_acquire);
    const decision *found = table != NULL ? look_up(table, hash, key, words, &slot) : NULL;
    if (found != NULL) {
      *out = found;
      return KILN_OK;
    }
    if (!sealed && has_room((kiln_op *)op)) return remember((kiln_op *)op, o, asked, hash, key, words, w, out, error);
    sealed_table *kept = atomic_load_explicit(&op->library->sealed_table, memory_order_acquire);
    if (kept != NULL) *out = kiln_sealed_decide(kept, op, o, asked, hash, key, words, w, held);
    if (*held != NULL) return KILN_OK;
  }
  /* Half of what is left of the caller's stack is the decision's. */
  char *middle = w->at + (w->end - w->at) / 2 / 16 * 16;
  local->memory = (work){w->at, middle, NULL, !sealed, false};
  w->at = middle;
  *out = local;
  return kiln_decide_anew(op, o, asked, w, local, error);
}

/* ---- scalars that decide ---- */

static bool kernel_shapes(const manifest_kernel *k, uint32_t scalar) {
  bool found = kiln_names_arg(&k->when, scalar);
  for (int i = 0; i < 3; i++) found = found || kiln_names_arg(&k->grid[i], scalar);
  for (uint32_t i = 0; i < k->scratch_count; i++) found = found || kiln_names_arg(&k->scratch[i].bytes, scalar);
  for (uint32_t i = 0; i < k->param_count; i++) {
    const kernel_param *p = &k->params[i];
    bool promised = p->kind == PARAM_DROPPED || (p->has_divisible_by && p->divisible_by > 1);
    found = found || (promised && p->has_value && kiln_names_arg(&p->value, scalar));
    for (uint32_t j = 0; p->map != NULL && j < p->map->rank; j++) found = found || kiln_names_arg(&p->map->shape[j], scalar);
    for (uint32_t j = 0; p->map != NULL && j < p->map->stride_count; j++)
      found = found || kiln_names_arg(&p->map->strides[j], scalar);
  }
  return found;
}

static bool plan_shapes(const kiln_op *op, const manifest_plan *plan, uint32_t scalar) {
  bool found = kiln_names_arg(&plan->when, scalar);
  for (uint32_t i = 0; i < plan->temp_count; i++)
    for (uint32_t j = 0; j < plan->temps[i].rank; j++) found = found || kiln_names_arg(&plan->temps[i].shape[j], scalar);
  for (uint32_t i = 0; i < plan->step_count; i++) {
    kiln_op *callee = &op->pack->ops[plan->steps[i].op];
    kiln_find_shaping(callee);
    for (uint32_t j = 0; j < callee->sig->scalar_count; j++)
      found = found || (callee->shaping[j] && plan->steps[i].has_arg[j] && kiln_names_arg(&plan->steps[i].args[j], scalar));
  }
  return found;
}

static bool scalar_shapes(const kiln_op *op, uint32_t scalar) {
  const op_signature *sig = op->sig;
  bool found = op->bound_dim[scalar] >= 0;
  for (uint32_t i = 0; i < sig->constraint_count; i++) found = found || kiln_names_arg(&sig->constraints[i].when, scalar);
  for (uint32_t i = 0; i < sig->tensor_count; i++)
    for (uint32_t j = 0; j < sig->tensors[i].rank; j++) found = found || kiln_names_arg(&sig->tensors[i].shape[j], scalar);
  for (uint32_t i = 0; i < op->candidate_count; i++) {
    const candidate *c = &op->candidates[i];
    found = found || (c->kernel != NULL ? kernel_shapes(c->kernel, scalar) : plan_shapes(op, c->plan, scalar));
  }
  return found;
}

void kiln_find_shaping(kiln_op *op) {
  if (op->shaping_known) return;
  op->shaping_known = true;
  for (uint32_t i = 0; i < op->sig->scalar_count; i++) op->shaping[i] = scalar_shapes(op, i);
}
