/* Functions of the caller's that serve ops: kept in one order, tried in it, and counted. */
#include "run.h"

#include <stdlib.h>

#define TREE "kiln"
enum { REFERENCE_PRIORITY = -1000, MOST = 64 };

/* ---- registration ---- */

static kiln_code check_provider(const kiln_op *op, const kiln_provider *p, kiln_error *error) {
  const char *name = op->sig->name;
  if (p->name == NULL || p->name[0] == 0 || p->run == NULL)
    return kiln_fail(error, KILN_CONTRACT, "%s: a provider needs a name and a function to run; give both.", name);
  if (strcmp(p->name, TREE) == 0)
    return kiln_fail(error, KILN_CONTRACT, "%s: the provider name %s is the tree's own; choose another.", name, TREE);
  if ((p->reference != 0) != (p->priority == REFERENCE_PRIORITY))
    return kiln_fail(error, KILN_CONTRACT,
                     "%s: provider %.100s has priority %d; expected %d for a reference, and for nothing else.", name,
                     p->name, p->priority, REFERENCE_PRIORITY);
  if (p->reference && !op->library->device.unified_memory)
    return kiln_fail(error, KILN_TARGET,
                     "%s: provider %.100s runs on the CPU, which cannot use the memory of %s; leave it out there.",
                     name, p->name, op->library->label);
  return KILN_OK;
}

/* 1, 0, or less: the predicate failed. */
static int serves(const kiln_op *op, const kiln_provider *p) {
  return p->supports == NULL ? 1 : p->supports(p->user, &op->library->device);
}

static int before(const char *name, int32_t priority, const provider *p) {
  return priority != p->given.priority ? priority > p->given.priority : strcmp(name, p->name) < 0;
}

static provider *new_provider(const kiln_provider *given, bool serving) {
  size_t length = strlen(given->name) + 1;
  provider *p = calloc(1, sizeof *p + length);
  if (p == NULL) return NULL;
  p->name = (char *)(p + 1);
  memcpy(p->name, given->name, length);
  p->given = *given;
  p->given.name = p->name;
  p->serves = serving;
  return p;
}

/* The old list with one more in its place. NULL: no memory. */
static provider_list *with(provider_list *old, provider *p) {
  uint32_t count = old != NULL ? old->count : 0, at = 0;
  provider_list *list = calloc(1, sizeof *list + (count + 1) * sizeof *list->items);
  if (list == NULL) return NULL;
  while (at < count && !before(p->name, p->given.priority, old->items[at])) at++;
  for (uint32_t i = 0; i < count; i++) list->items[i + (i >= at)] = old->items[i];
  list->items[at] = p;
  list->count = count + 1;
  list->older = old;
  while (list->above < list->count && !before(TREE, 0, list->items[list->above])) list->above++;
  return list;
}

static kiln_code add(kiln_op *op, provider *p, kiln_error *error) {
  provider_list *old = atomic_load_explicit(&op->providers, memory_order_relaxed);
  for (uint32_t i = 0; old != NULL && i < old->count; i++)
    if (strcmp(old->items[i]->name, p->name) == 0)
      return kiln_fail(error, KILN_CONTRACT, "%s: duplicate provider %.100s; register each once.", op->sig->name, p->name);
  if (old != NULL && old->count == MOST)
    return kiln_fail(error, KILN_CONTRACT, "%s has %d providers, expected at most that; leave one out.", op->sig->name, MOST);
  provider_list *list = with(old, p);
  if (list == NULL) return kiln_fail(error, KILN_MEMORY, "the system has no memory left; free some.");
  atomic_store_explicit(&op->providers, list, memory_order_release);
  return KILN_OK;
}

kiln_code kiln_register_provider(kiln_library *library, const char *name, const kiln_provider *given, kiln_error *error) {
  kiln_op *op = (kiln_op *)kiln_find(library, name, error);
  if (op == NULL) return KILN_CONTRACT;
  if (given == NULL) return kiln_fail(error, KILN_CONTRACT, "%s: found no provider, expected one.", name);
  kiln_code code = kiln_check_alive(library, error);
  if (code == KILN_OK && atomic_load_explicit(&library->sealed, memory_order_acquire))
    code = kiln_fail(error, KILN_UNAVAILABLE, "%s: the library is sealed; register providers before that.", name);
  if (code == KILN_OK && library->kind == DEVICE_PRETEND)
    code = kiln_fail(error, KILN_UNAVAILABLE, "%s device runs nothing; open the library for a real one.", library->label);
  if (code == KILN_OK) code = check_provider(op, given, error);
  int serving = code == KILN_OK ? serves(op, given) : 0;
  if (code == KILN_OK && serving < 0)
    code = kiln_fail(error, KILN_INTERNAL, "%s: the predicate of provider %.100s failed with %d.", name, given->name, serving);
  if (code != KILN_OK) return code;
  provider *p = new_provider(given, serving > 0);
  if (p == NULL) return kiln_fail(error, KILN_MEMORY, "the system has no memory left; free some.");
  pthread_mutex_lock(&library->lock);
  code = add(op, p, error);
  pthread_mutex_unlock(&library->lock);
  if (code != KILN_OK) free(p);
  return code;
}

void kiln_free_providers(provider_list *list) {
  for (uint32_t i = 0; list != NULL && i < list->count; i++) free(list->items[i]);
  while (list != NULL) {
    provider_list *older = list->older;
    free(list);
    list = older;
  }
}

/* ---- what a provider is given ---- */

static void list_tensors(const op_signature *sig, const operands *o, argument_list *out) {
  for (uint32_t i = 0; i < sig->tensor_count; i++) {
    const kiln_tensor *read = o->tensors[0][i], *written = o->tensors[1][i];
    const char *name = sig->tensors[i].name;
    if (read != NULL) out->items[out->count++] = KILN_TENSOR(name, read);
    if (written != NULL && written != read)
      out->items[out->count++] = sig->tensors[i].role == ROLE_OUT ? KILN_TENSOR(name, written) : KILN_WRITTEN(name, written);
  }
}

static kiln_argument listed_scalar(const scalar_operand *s, const number *n) {
  if (n->real) return KILN_NUMBER(s->name, n->value);
  return s->dtype[0] == 'b' ? KILN_BOOL(s->name, n->integer) : KILN_INTEGER(s->name, n->integer);
}

static kiln_argument listed_attr(const char *name, const attr_value *a) {
  if (a->kind == JSON_TEXT) return KILN_TEXT(name, a->text);
  return a->kind == JSON_INTEGER ? KILN_INTEGER(name, a->integer) : KILN_BOOL(name, a->kind == JSON_TRUE);
}

kiln_code kiln_list_arguments(const kiln_op *op, const operands *o, work *w, argument_list *out, kiln_error *error) {
  const op_signature *sig = op->sig;
  out->count = 0;
  out->items = kiln_work_get(w, 2 * (size_t)sig->tensor_count + sig->scalar_count + sig->attr_count, sizeof *out->items);
  if (out->items == NULL) return kiln_work_failed(w, sig->name, error);
  list_tensors(sig, o, out);
  for (uint32_t i = 0; i < sig->scalar_count; i++) out->items[out->count++] = listed_scalar(&sig->scalars[i], &o->args[i]);
  for (uint32_t i = 0; i < sig->attr_count; i++) out->items[out->count++] = listed_attr(sig->attrs[i].name, &o->attrs[i]);
  return KILN_OK;
}

/* ---- running ---- */

static kiln_code why_not(const provider *p, const kiln_library *library, const wanted *asked, sink *why) {
  if (asked->variant != NULL && strcmp(asked->variant, p->name) != 0) kiln_put(why, "variant %s was asked for", asked->variant);
  else if (asked->variant == NULL && asked->tier != NULL) kiln_put(why, "tier %s was asked for", asked->tier);
  else if (asked->variant == NULL && asked->isa != NULL) kiln_put(why, "ISA tier %s was asked for", asked->isa);
  else if (!p->serves) kiln_put(why, "its predicate does not hold on this device");
  else if (kiln_is_disabled(library, p->name)) kiln_put(why, "disabled by KILN_DISABLE=%s", p->name);
  else return KILN_OK;
  return KILN_SELECTION;
}

static kiln_code call(const kiln_op *op, provider *p, const argument_list *arguments, kiln_stream stream, kiln_error *error) {
  kiln_error own = {0};
  kiln_code code = p->given.run(p->given.user, op, arguments->items, arguments->count, stream, &own);
  if (code == KILN_DECLINED) atomic_fetch_add_explicit(&p->declined, 1, memory_order_relaxed);
  if (code == KILN_OK) atomic_fetch_add_explicit(&p->runs, 1, memory_order_relaxed);
  if (code == KILN_OK || code == KILN_DECLINED) return code;
  own.message[sizeof own.message - 1] = 0;
  bool known = code > KILN_OK && code <= KILN_INTERNAL;
  kiln_fail(error, known ? code : KILN_INTERNAL, "%s: provider %s: %.1800s", op->sig->name, p->name,
            own.message[0] ? own.message : "failed without a message.");
  if (error != NULL) error->driver = own.driver;
  return known ? code : KILN_INTERNAL;
}

kiln_code kiln_run_providers(const kiln_op *op, const provider_list *list, bool below, const argument_list *arguments,
                             const wanted *asked,
                             kiln_stream stream, kiln_error *error) {
  for (uint32_t i = below ? list->above : 0; i < (below ? list->count : list->above); i++) {
    if (why_not(list->items[i], op->library, asked, NULL) != KILN_OK) continue;
    kiln_code code = call(op, list->items[i], arguments, stream, error);
    if (code != KILN_DECLINED) return code;
  }
  return KILN_DECLINED;
}

void kiln_explain_providers(const provider_list *list, const kiln_library *library, bool below, const wanted *asked, bool *ran,
                            sink *s) {
  for (uint32_t i = below ? list->above : 0; i < (below ? list->count : list->above); i++) {
    char text[256];
    sink why = {text, sizeof text, 0};
    kiln_code code = why_not(list->items[i], library, asked, &why);
    kiln_put(s, "  %s (provider, %d): %s\n", list->items[i]->name, list->items[i]->given.priority,
             code != KILN_OK ? text : *ran ? "could run" : "runs, unless it declines");
    *ran = *ran || code == KILN_OK;
  }
}
