/* Which candidate runs a call: a fixed order, a reason for every one that is passed over, and no silent fallback. */
#include "run.h"

kiln_code kiln_wanted(const kiln_op *op, const kiln_choice *choice, wanted *out, kiln_error *error) {
  *out = (wanted){0};
  if (choice == NULL) return KILN_OK;
  const char *mode = choice->mode != NULL ? choice->mode : "exact";
  out->tier = choice->tier;
  out->variant = choice->variant;
  out->isa = choice->isa;
  out->fast = strcmp(mode, "fast") == 0;
  if (out->fast || strcmp(mode, "exact") == 0) return KILN_OK;
  return kiln_fail(error, KILN_CONTRACT, "%s: found mode='%s', expected 'exact' or 'fast'.", op->sig->name, mode);
}

candidate *kiln_candidate_at(const kiln_op *op, const wanted *asked, uint32_t i) {
  return asked->fast ? op->fast[i] : &op->candidates[i];
}

/* ---- what is forbidden ---- */

static bool is_dotted(const char *name, const char *op, const char *variant) {
  size_t length = strlen(op);
  return strncmp(name, op, length) == 0 && name[length] == '.' && strcmp(name + length + 1, variant) == 0;
}

const char *kiln_disabled_by(const kiln_library *library, const candidate *c) {
  const name_list *list = atomic_load_explicit(&library->disabled, memory_order_acquire);
  const char *op = c->op->sig->name;
  for (uint32_t i = 0; list != NULL && i < list->count; i++) {
    const char *name = list->names[i];
    if (strcmp(name, op) == 0 || strcmp(name, c->variant) == 0 || strcmp(name, c->tier) == 0 || is_dotted(name, op, c->variant) ||
        (c->isa != NULL && strcmp(name, c->isa) == 0))
      return name;
  }
  return NULL;
}

bool kiln_is_disabled(const kiln_library *library, const char *name) {
  const name_list *list = atomic_load_explicit(&library->disabled, memory_order_acquire);
  for (uint32_t i = 0; list != NULL && i < list->count; i++)
    if (strcmp(list->names[i], name) == 0) return true;
  return false;
}

/* ---- one candidate ---- */

/* Why a candidate is out before any operand is looked at. */
static kiln_code passed_over(const kiln_op *op, const candidate *c, const wanted *asked, sink *why) {
  const char *disabled, *refused;
  char text[REFUSED_BYTES];
  if (strcmp(c->mode, "fast") == 0 && !asked->fast) kiln_put(why, "of the fast mode, which is asked for with mode=\"fast\"");
  else if (asked->tier != NULL && strcmp(c->tier, asked->tier) != 0) kiln_put(why, "tier %s was asked for", asked->tier);
  else if (asked->variant != NULL && strcmp(c->variant, asked->variant) != 0) kiln_put(why, "variant %s was asked for",
                                                                                       asked->variant);
  else if (asked->isa != NULL && c->kernel != NULL && (c->isa == NULL || strcmp(c->isa, asked->isa) != 0))
    kiln_put(why, "ISA tier %s was asked for", asked->isa);
  else if ((disabled = kiln_disabled_by(op->library, c)) != NULL) kiln_put(why, "disabled by KILN_DISABLE=%s", disabled);
  else if ((refused = kiln_refused(c, text)) != NULL) kiln_put(why, "%s", refused);
  else return KILN_OK;
  return KILN_SELECTION;
}

/* Whether every step of a plan could run. */
static kiln_code check_plan(const kiln_op *op, const candidate *c, const bound *b, const view *reads, const view *writes,
                            const number *args, const wanted *asked, work *w, kiln_error *error) {
  plan_frame f;
  wanted inner = {.isa = asked->isa, .fast = asked->fast};
  kiln_code code = kiln_plan_frame(op, c->plan, b, reads, writes, args, 0, w, &f, error);
  for (uint32_t i = 0; i < c->plan->step_count && code == KILN_OK; i++) {
    step_call s;
    bound *inside;
    candidate *found;
    code = kiln_plan_step(op, &f, &c->plan->steps[i], args, w, &s, error);
    if (code == KILN_OK) code = kiln_bind_views(s.callee, s.reads, s.writes, s.args, c->plan->steps[i].attrs, w, &inside, error);
    if (code == KILN_OK && !inside->empty) code = kiln_choose(s.callee, inside, s.reads, s.writes, s.args, &inner, w, &found,
                                                              error);
  }
  return code;
}

kiln_code kiln_judge(const kiln_op *op, candidate *c, const bound *b, const view *reads, const view *writes, const number *args,
                     const wanted *asked, work *w, sink *why, kiln_error *error) {
  kiln_code code = passed_over(op, c, asked, why);
  if (code != KILN_OK) return code;
  const expr *when = c->kernel != NULL ? &c->kernel->when : &c->plan->when;
  code = kiln_why_not(when, b, args, why, error);
  if (code != KILN_OK) return code;
  if (c->kernel != NULL) return kiln_why_not_params(c, b, args, why, error);
  kiln_error inner;
  work before = *w;
  code = check_plan(op, c, b, reads, writes, args, asked, w, &inner);
  if (w->blocks == before.blocks) w->at = before.at;
  if (code == KILN_OK) return KILN_OK;
  if (code == KILN_UNAVAILABLE || code == KILN_MEMORY) return kiln_fail(error, code, "%s", inner.message);
  kiln_put(why, "%s", inner.message);
  return KILN_SELECTION;
}

/* ---- all of them ---- */

/* FNV-1a: reasons are told apart by it. */
static uint64_t digest(const char *text) {
  uint64_t found = 0xcbf29ce484222325u;
  for (; *text; text++) found = (found ^ (unsigned char)*text) * 0x100000001b3u;
  return found;
}

static uint32_t count_of(const uint64_t *marks, uint32_t from, uint32_t to, uint64_t mark) {
  uint32_t found = 0;
  for (uint32_t i = from; i < to; i++) found += marks[i] == mark;
  return found;
}

/* Every different reason once, with the first candidate that has it. */
static kiln_code nothing_runs(const kiln_op *op, const bound *b, const view *reads, const view *writes, const number *args,
                              const wanted *asked, work *w, kiln_error *error) {
  enum { REASONS = 12 };
  const char *name = op->sig->name;
  uint32_t count = op->candidate_count, listed = 0, rest = 0;
  if (count == 0)
    return kiln_fail(error, KILN_SELECTION, "%s: this target has no kernel or plan for it; build one, or use another device.",
                     name);
  if (error == NULL) return KILN_SELECTION;
  uint64_t *marks = kiln_work_get(w, count, sizeof *marks);
  if (marks == NULL) return kiln_work_failed(w, name, error);
  for (uint32_t i = 0; i < count; i++) {
    kiln_error inner = {0};
    sink why = kiln_message(&inner);
    kiln_judge(op, kiln_candidate_at(op, asked, i), b, reads, writes, args, asked, w, &why, NULL);
    marks[i] = digest(inner.message);
  }
  sink m = kiln_message(error);
  kiln_put(&m, "%s: none of %u candidates may run this call on %s (", name, count, op->library->label);
  for (uint32_t i = 0; i < count; i++) {
    if (count_of(marks, 0, i, marks[i])) continue;
    uint32_t more = count_of(marks, i + 1, count, marks[i]);
    if (listed++ >= REASONS) {
      rest += 1 + more;
      continue;
    }
    candidate *c = kiln_candidate_at(op, asked, i);
    kiln_put(&m, "%s%s: ", i ? "; " : "", c->variant);
    kiln_judge(op, c, b, reads, writes, args, asked, w, &m, NULL);
    if (more) kiln_put(&m, " (and %u more)", more);
  }
  if (rest) kiln_put(&m, "; and %u more", rest);
  kiln_put(&m, "). Change the operands, or build a variant that takes them; kiln show %s lists the calls that are served.", name);
  return kiln_fail_put(error, KILN_SELECTION, &m);
}

kiln_code kiln_choose(const kiln_op *op, const bound *b, const view *reads, const view *writes, const number *args,
                      const wanted *asked,
                      work *w, candidate **out, kiln_error *error) {
  for (uint32_t i = 0; i < op->candidate_count; i++) {
    candidate *c = kiln_candidate_at(op, asked, i);
    kiln_code code = kiln_judge(op, c, b, reads, writes, args, asked, w, NULL, error);
    if (code == KILN_SELECTION) continue;
    *out = c;
    return code;
  }
  return nothing_runs(op, b, reads, writes, args, asked, w, error);
}
