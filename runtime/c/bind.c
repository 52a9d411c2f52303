/* From tensors to dimensions: checks a call against its op's signature and solves for every dim, stride and element type.
 *
 * Leading dims collapse to one: an operand declared [M, N] takes a tensor of any rank whose last extent is N and whose leading
 * extents can be walked with one stride. */
#include "run.h"

typedef struct {
  const kiln_op *op;
  const op_signature *sig;
  const view *reads, *writes;
  const number *args;
  bound *b;
  const char **source;     /* per dim: what gave it */
  kiln_error *error;
} binding;

#define REFUSE(n, ...) kiln_fail((n)->error, KILN_CONTRACT, __VA_ARGS__)

/* ---- words of messages ---- */

static void put_ints(sink *s, const int64_t *values, int32_t count) {
  kiln_put(s, "(");
  for (int32_t i = 0; i < count; i++) kiln_put(s, i ? ", %lld" : "%lld", (long long)values[i]);
  kiln_put(s, count == 1 ? ",)" : ")");
}

static const char *place(int32_t device, char text[24]) {
  sink s = {text, 24, 0};
  if (device == KILN_CPU) kiln_put(&s, "the CPU");
  else kiln_put(&s, "cuda:%d", device);
  return text;
}

static void put_choices(sink *s, const operand_dtype *d) {
  for (uint32_t i = 0; i < d->count; i++) kiln_put(s, "%s%s", i ? ", " : "", KILN_DTYPES[d->choices[i]].name);
}

/* ---- presence ---- */

static kiln_code check_place(const binding *n, const tensor_operand *t, const view *v) {
  char found[24], expected[24];
  if (v->device == n->op->library->device.ordinal) return KILN_OK;
  return REFUSE(n, "%s: %s is on %s, expected %s; move it, or open the library for its device.", n->sig->name, t->name,
                place(v->device, found), place(n->op->library->device.ordinal, expected));
}

static kiln_code presence(const binding *n) {
  for (uint32_t i = 0; i < n->sig->tensor_count; i++) {
    const tensor_operand *t = &n->sig->tensors[i];
    const view *r = &n->reads[i], *w = &n->writes[i];
    if (!r->given && t->role != ROLE_OUT && !t->optional)
      return REFUSE(n, "%s: the operand %s is missing; pass a tensor.", n->sig->name, t->name);
    for (int side = 0; side < 2; side++) {
      const view *v = side ? w : r;
      kiln_code code = v->given ? check_place(n, t, v) : KILN_OK;
      if (code != KILN_OK) return code;
    }
    if (w->given && w->readonly)
      return REFUSE(n, "%s: %s is written but its tensor is read-only; pass a copy.", n->sig->name, t->name);
  }
  return KILN_OK;
}

/* ---- element types ---- */

static bool same_var(const tensor_operand *a, const tensor_operand *b) {
  return a->dtype.var != NULL && b->dtype.var != NULL && strcmp(a->dtype.var, b->dtype.var) == 0;
}

static bool is_choice(const operand_dtype *d, kiln_dtype found) {
  for (uint32_t i = 0; i < d->count; i++)
    if (d->choices[i] == found) return true;
  return false;
}

/* The first tensor before `end` whose type is free and chosen; of the same variable as `like`, if that is given. */
static const tensor_operand *chosen_by(const binding *n, uint32_t end, const tensor_operand *like) {
  for (uint32_t i = 0; i < end; i++) {
    const tensor_operand *t = &n->sig->tensors[i];
    if (t->dtype.var != NULL && n->b->dtypes[i] != 0 && (like == NULL || same_var(t, like))) return t;
  }
  return NULL;
}

static kiln_code var_dtype(const binding *n, uint32_t i, kiln_dtype found) {
  const tensor_operand *t = &n->sig->tensors[i];
  if (!is_choice(&t->dtype, found)) {
    sink m = kiln_message(n->error);
    kiln_put(&m, "%s: %s is %s, expected one of ", n->sig->name, t->name, KILN_DTYPES[found].name);
    put_choices(&m, &t->dtype);
    kiln_put(&m, "; convert it.");
    return kiln_fail_put(n->error, KILN_CONTRACT, &m);
  }
  const tensor_operand *by = chosen_by(n, i + 1, t);
  kiln_dtype first = by != NULL ? n->b->dtypes[by - n->sig->tensors] : found;
  if (first != found)
    return REFUSE(n, "%s: %s is %s but %s is %s; make them the same type.", n->sig->name, t->name, KILN_DTYPES[found].name,
                  by->name, KILN_DTYPES[first].name);
  n->b->dtypes[i] = found;
  return KILN_OK;
}

static kiln_code operand_type(const binding *n, uint32_t i, kiln_dtype found) {
  const tensor_operand *t = &n->sig->tensors[i];
  if (t->dtype.var != NULL) return var_dtype(n, i, found);
  kiln_dtype fixed = t->dtype.choices[0];
  if (found != fixed && !(fixed == KILN_U8 && KILN_DTYPES[found].code))
    return REFUSE(n, "%s: %s is %s, expected %s; convert it.", n->sig->name, t->name, KILN_DTYPES[found].name,
                  KILN_DTYPES[fixed].name);
  n->b->dtypes[i] = fixed;
  return KILN_OK;
}

static kiln_code default_type(const binding *n, uint32_t i) {
  const tensor_operand *t = &n->sig->tensors[i];
  const tensor_operand *by = t->dtype.var != NULL ? chosen_by(n, n->sig->tensor_count, t) : NULL;
  if (by != NULL) n->b->dtypes[i] = n->b->dtypes[by - n->sig->tensors];
  else if (t->dtype.count == 1) n->b->dtypes[i] = t->dtype.choices[0];
  if (n->b->dtypes[i] != 0) return KILN_OK;
  /* Nothing says it: the result has the type of the first operand whose type is free, as a norm has. */
  by = chosen_by(n, n->sig->tensor_count, NULL);
  if (by != NULL && is_choice(&t->dtype, n->b->dtypes[by - n->sig->tensors])) {
    n->b->dtypes[i] = n->b->dtypes[by - n->sig->tensors];
    return KILN_OK;
  }
  sink m = kiln_message(n->error);
  kiln_put(&m, "%s: no operand fixes the type of %s; pass it with one of ", n->sig->name, t->name);
  put_choices(&m, &t->dtype);
  kiln_put(&m, ".");
  return kiln_fail_put(n->error, KILN_CONTRACT, &m);
}

static kiln_code types(const binding *n) {
  kiln_code code = KILN_OK;
  for (uint32_t i = 0; i < n->sig->tensor_count && code == KILN_OK; i++) {
    if (n->reads[i].given) code = operand_type(n, i, n->reads[i].dtype);
    if (n->writes[i].given && code == KILN_OK) code = operand_type(n, i, n->writes[i].dtype);
  }
  for (uint32_t i = 0; i < n->sig->tensor_count && code == KILN_OK; i++) {
    const tensor_operand *t = &n->sig->tensors[i];
    if (t->role == ROLE_OUT && !t->optional && n->b->dtypes[i] == 0) code = default_type(n, i);
  }
  return code;
}

/* ---- geometry ---- */

static bool is_rows(const binding *n, const expr *e) { return e->head == X_DIM && strcmp(e->name, n->sig->rows) == 0; }

/* Leading extents of the first input whose rows are the op's rows. */
static void find_lead(const binding *n) {
  n->b->lead_rank = -1;
  for (uint32_t i = 0; i < n->sig->tensor_count; i++) {
    const tensor_operand *t = &n->sig->tensors[i];
    const view *v = &n->reads[i];
    if (!v->given || t->rank < 2 || !is_rows(n, &t->shape[0])) continue;
    int32_t rank = v->rank - (int32_t)t->rank + 1;
    n->b->lead_rank = rank > 0 ? rank : 0;
    memcpy(n->b->lead, v->shape, (size_t)n->b->lead_rank * sizeof *v->shape);
    return;
  }
}

static int64_t product(const int64_t *shape, int32_t count) {
  int64_t all = 1;
  for (int32_t i = 0; i < count; i++) all *= shape[i];
  return all;
}

/* Whether a vector of rows was given with the leading dims of the others, and perhaps a last one of 1. */
static bool is_lead(const binding *n, const view *v) {
  int32_t lead = n->b->lead_rank;
  if (lead < 0 || (v->rank != lead && !(v->rank == lead + 1 && v->shape[lead] == 1))) return false;
  return memcmp(v->shape, n->b->lead, (size_t)lead * sizeof *v->shape) == 0;
}

static kiln_code canonical_shape(const binding *n, const tensor_operand *t, const view *v, geometry *g) {
  int32_t want = (int32_t)t->rank, have = v->rank;
  g->rank = t->rank;
  if (want == 2 && have == 1) {
    g->shape[0] = 1;
    g->shape[1] = v->shape[0];
  } else if (want >= 2 && have >= want) {
    int32_t cut = have - want + 1;
    g->shape[0] = product(v->shape, cut);
    memcpy(g->shape + 1, v->shape + cut, (size_t)(want - 1) * sizeof *v->shape);
  } else if (want < 2 && have == want) {
    memcpy(g->shape, v->shape, (size_t)want * sizeof *v->shape);
  } else if (want == 1 && is_rows(n, &t->shape[0]) && is_lead(n, v)) {
    g->shape[0] = product(v->shape, v->rank);
  } else {
    sink m = kiln_message(n->error);
    kiln_put(&m, "%s: %s has shape ", n->sig->name, t->name);
    put_ints(&m, v->shape, v->rank);
    kiln_put(&m, ", expected [");
    for (uint32_t i = 0; i < t->rank; i++) {
      kiln_put(&m, "%s", i ? ", " : "");
      kiln_render(&m, &t->shape[i]);
    }
    kiln_put(&m, "]; reshape it.");
    return kiln_fail_put(n->error, KILN_CONTRACT, &m);
  }
  return KILN_OK;
}

static kiln_code collapse(const binding *n, const tensor_operand *t, const view *v, int32_t count, int64_t dense, int64_t *out) {
  bool some = false;
  int64_t found = dense, expected = 0;
  *out = dense;
  for (int32_t i = 0; i < count; i++)
    if (v->shape[i] == 0) return KILN_OK;
  for (int32_t i = count - 1; i >= 0; i--) {
    if (v->shape[i] == 1) continue;
    if (some && v->strides[i] != expected) {
      sink m = kiln_message(n->error);
      kiln_put(&m, "%s: the leading dims of %s, shape ", n->sig->name, t->name);
      put_ints(&m, v->shape, count);
      kiln_put(&m, " with strides ");
      put_ints(&m, v->strides, count);
      kiln_put(&m, ", cannot be walked with one stride; pass a contiguous copy.");
      return kiln_fail_put(n->error, KILN_CONTRACT, &m);
    }
    if (!some) found = v->strides[i];
    some = true;
    expected = v->strides[i] * v->shape[i];
  }
  *out = found;
  return KILN_OK;
}

static kiln_code check_layout(const binding *n, const tensor_operand *t, const geometry *g) {
  int64_t rows = kiln_geometry_rows(g), width = kiln_geometry_width(g);
  if (t->layout == LAYOUT_STRIDED || rows == 0 || width == 0) return KILN_OK;
  if (g->col != 1)
    return REFUSE(n, "%s: the elements of a row of %s are %lld apart, expected 1; pass a contiguous copy.", n->sig->name, t->name,
                  (long long)g->col);
  if (t->layout != LAYOUT_ROWS && rows > 1 && g->row != width && g->rank > 1)
    return REFUSE(n, "%s: the rows of %s are %lld elements apart, expected %lld (dense); pass a contiguous copy.", n->sig->name,
                  t->name, (long long)g->row, (long long)width);
  return KILN_OK;
}

static bool same_shape(const view *v, const geometry *g) {
  return v->rank == (int32_t)g->rank && memcmp(v->shape, g->shape, g->rank * sizeof *g->shape) == 0;
}

static kiln_code one_geometry(const binding *n, const tensor_operand *t, const view *v, geometry *g) {
  *g = (geometry){.given = true, .itemsize = KILN_DTYPES[v->dtype].bytes};
  kiln_code code = canonical_shape(n, t, v, g);
  if (code != KILN_OK) return code;
  int32_t inner = v->rank > 0 && (t->rank >= 2 || same_shape(v, g)) ? 1 : 0, outer = v->rank - inner;
  if (t->rank == 1 && !inner) {
    /* [M] given with leading dims: its elements are what the others' rows are. */
    code = collapse(n, t, v, outer, 1, &g->col);
    g->row = g->col;
  } else {
    int64_t width = kiln_geometry_width(g);
    g->col = inner && v->shape[v->rank - 1] > 1 ? v->strides[v->rank - 1] : 1;
    code = collapse(n, t, v, outer, g->rank && width > 1 ? width : 1, &g->row);
    if (t->rank == 1) g->row = g->col;
  }
  return code != KILN_OK ? code : check_layout(n, t, g);
}

/* Whether elements share memory: one step of them is 0, or neither a row nor a column ends before the next one begins. */
static bool overlaps_itself(const geometry *g) {
  int64_t rows = kiln_geometry_rows(g), width = kiln_geometry_width(g);
  if (rows == 0 || width == 0) return false;
  if ((rows > 1 && g->row == 0) || (width > 1 && g->col == 0)) return true;
  bool by_rows = rows <= 1 || g->row > (width - 1) * g->col;
  bool by_columns = width <= 1 || g->col > (rows - 1) * g->row;
  return !by_rows && !by_columns;
}

static kiln_code other_layout(const binding *n, const tensor_operand *t, const geometry *g, const geometry *h) {
  sink m = kiln_message(n->error);
  kiln_put(&m, "%s: %s is read with shape ", n->sig->name, t->name);
  put_ints(&m, g->shape, (int32_t)g->rank);
  kiln_put(&m, ", strides (%lld, %lld) but written with ", (long long)g->row, (long long)g->col);
  put_ints(&m, h->shape, (int32_t)h->rank);
  kiln_put(&m, ", (%lld, %lld); expected the same layout.", (long long)h->row, (long long)h->col);
  return kiln_fail_put(n->error, KILN_CONTRACT, &m);
}

static bool alike(const geometry *g, const geometry *h) {
  return g->rank == h->rank && memcmp(g->shape, h->shape, g->rank * sizeof *g->shape) == 0 && g->row == h->row && g->col == h->col;
}

static kiln_code operand_geometry(const binding *n, uint32_t i) {
  const tensor_operand *t = &n->sig->tensors[i];
  const view *r = &n->reads[i], *w = &n->writes[i];
  geometry g = {0}, h = {0};
  kiln_code code = r->given ? one_geometry(n, t, r, &g) : KILN_OK;
  if (code == KILN_OK && w->given) code = one_geometry(n, t, w, &h);
  if (code != KILN_OK) return code;
  if (w->given && overlaps_itself(&h))
    return REFUSE(n, "%s: rows of the output %s overlap each other; pass a plain tensor.", n->sig->name, t->name);
  if (r->given && w->given && !alike(&g, &h)) return other_layout(n, t, &g, &h);
  n->b->geometry[i] = r->given ? g : h;
  /* Only alignment is asked of it, and what is promised of an operand is promised of both its sides. */
  n->b->pointers[i] = (r->given ? r->pointer : 0) | (w->given ? w->pointer : 0);
  return KILN_OK;
}

/* ---- dims ---- */

static kiln_code solve_axis(const binding *n, const tensor_operand *t, const geometry *g, uint32_t axis, const axis_rule *rule) {
  bound *b = n->b;
  int64_t found = g->shape[axis] / rule->factor;
  if (g->shape[axis] % rule->factor != 0) {
    sink m = kiln_message(n->error);
    kiln_put(&m, "%s: axis %u of %s has extent %lld, expected ", n->sig->name, axis, t->name, (long long)g->shape[axis]);
    kiln_render(&m, &t->shape[axis]);
    kiln_put(&m, ": a multiple of %lld.", (long long)rule->factor);
    return kiln_fail_put(n->error, KILN_CONTRACT, &m);
  }
  if (b->known[rule->dim] && b->dims[rule->dim] != found) {
    const char *dim = n->sig->dims[rule->dim];
    return REFUSE(n, "%s: %s has %s=%lld but %s gave %s=%lld; pass operands that agree.", n->sig->name, t->name, dim,
                  (long long)found, n->source[rule->dim], dim, (long long)b->dims[rule->dim]);
  }
  if (!b->known[rule->dim]) n->source[rule->dim] = t->name;
  b->known[rule->dim] = true;
  b->dims[rule->dim] = found;
  return KILN_OK;
}

static kiln_code solve_operand(const binding *n, uint32_t i) {
  const tensor_operand *t = &n->sig->tensors[i];
  for (uint32_t axis = 0; axis < t->rank; axis++) {
    const axis_rule *rule = &n->op->axes[i * KILN_MAX_RANK + axis];
    kiln_code code = rule->dim >= 0 ? solve_axis(n, t, &n->b->geometry[i], axis, rule) : KILN_OK;
    if (code != KILN_OK) return code;
  }
  return KILN_OK;
}

static kiln_code check_operand(const binding *n, uint32_t i) {
  const tensor_operand *t = &n->sig->tensors[i];
  for (uint32_t axis = 0; axis < t->rank; axis++) {
    number wanted;
    if (n->op->axes[i * KILN_MAX_RANK + axis].dim >= 0) continue;
    kiln_code code = kiln_evaluate(&t->shape[axis], n->b, n->args, &wanted, n->error);
    if (code != KILN_OK) return code;
    int64_t found = n->b->geometry[i].shape[axis];
    if (wanted.real ? wanted.value == (double)found : wanted.integer == found) continue;
    sink m = kiln_message(n->error);
    kiln_put(&m, "%s: axis %u of %s has extent %lld, expected ", n->sig->name, axis, t->name, (long long)found);
    kiln_render(&m, &t->shape[axis]);
    kiln_put(&m, " = ");
    kiln_put_value(&m, &wanted);
    kiln_put(&m, "; reshape it.");
    return kiln_fail_put(n->error, KILN_CONTRACT, &m);
  }
  return KILN_OK;
}

static kiln_code scalar_dims(const binding *n) {
  for (uint32_t i = 0; i < n->sig->scalar_count; i++) {
    int32_t dim = n->op->bound_dim[i];
    if (dim < 0) continue;
    const char *name = n->sig->scalars[i].name;
    if (n->args[i].integer < 0)
      return REFUSE(n, "%s: %s is %lld, expected an extent of 0 or more.", n->sig->name, name, (long long)n->args[i].integer);
    n->b->dims[dim] = n->args[i].integer;
    n->b->known[dim] = true;
    n->source[dim] = name;
  }
  return KILN_OK;
}

/* Inputs before outputs: an output is measured against what the inputs say. */
static kiln_code each_operand(const binding *n, kiln_code (*visit)(const binding *, uint32_t)) {
  for (int outputs = 0; outputs < 2; outputs++)
    for (uint32_t i = 0; i < n->sig->tensor_count; i++) {
      if ((n->sig->tensors[i].role == ROLE_OUT) != outputs || !n->b->geometry[i].given) continue;
      kiln_code code = visit(n, i);
      if (code != KILN_OK) return code;
    }
  return KILN_OK;
}

static kiln_code constraints(const binding *n) {
  for (uint32_t i = 0; i < n->sig->constraint_count; i++) {
    char why[512];
    sink s = {why, sizeof why, 0};
    const constraint *c = &n->sig->constraints[i];
    why[0] = 0;
    kiln_code code = kiln_why_not(&c->when, n->b, n->args, &s, n->error);
    if (code == KILN_SELECTION) return REFUSE(n, "%s: %s (%s).", n->sig->name, c->sentence, why);
    if (code != KILN_OK) return code;
  }
  return KILN_OK;
}

/* ---- outputs that the caller left out ---- */

static kiln_code output(const binding *n, uint32_t i) {
  const tensor_operand *t = &n->sig->tensors[i];
  geometry *g = &n->b->geometry[i];
  int64_t all = 1;
  bool fine = true;
  g->rank = t->rank;
  for (uint32_t axis = 0; axis < t->rank; axis++) {
    number extent;
    kiln_code code = kiln_evaluate(&t->shape[axis], n->b, n->args, &extent, n->error);
    if (code != KILN_OK) return code;
    g->shape[axis] = kiln_whole(&extent);
    fine = fine && g->shape[axis] >= 0 && g->shape[axis] < INT64_C(1) << 48;
    fine = fine && !__builtin_mul_overflow(all, g->shape[axis], &all) && all < INT64_C(1) << 48;
  }
  if (!fine) {
    sink m = kiln_message(n->error);
    kiln_put(&m, "%s: the output %s would have shape ", n->sig->name, t->name);
    put_ints(&m, g->shape, (int32_t)g->rank);
    kiln_put(&m, "; check the operands.");
    return kiln_fail_put(n->error, KILN_CONTRACT, &m);
  }
  g->row = t->rank > 1 ? g->shape[t->rank - 1] : 1;
  g->col = 1;
  g->itemsize = KILN_DTYPES[n->b->dtypes[i]].bytes;
  g->given = true;
  n->b->missing[i] = true;
  return KILN_OK;
}

static kiln_code outputs(const binding *n) {
  for (uint32_t i = 0; i < n->sig->tensor_count; i++) {
    const tensor_operand *t = &n->sig->tensors[i];
    if (t->role != ROLE_OUT || t->optional || n->writes[i].given) continue;
    kiln_code code = output(n, i);
    if (code != KILN_OK) return code;
  }
  return KILN_OK;
}

/* ---- all of it ---- */

static bool make_room(binding *n, const attr_value *attrs, work *w) {
  const op_signature *sig = n->sig;
  bound *b = n->b = kiln_work_get(w, 1, sizeof *b);
  if (b == NULL) return false;
  b->sig = sig;
  b->op = sig->name;
  b->attrs = attrs;
  b->dims = kiln_work_get(w, sig->dim_count, sizeof *b->dims);
  b->known = kiln_work_get(w, sig->dim_count, sizeof *b->known);
  b->geometry = kiln_work_get(w, sig->tensor_count, sizeof *b->geometry);
  b->dtypes = kiln_work_get(w, sig->tensor_count, sizeof *b->dtypes);
  b->pointers = kiln_work_get(w, sig->tensor_count, sizeof *b->pointers);
  b->missing = kiln_work_get(w, sig->tensor_count, sizeof *b->missing);
  n->source = kiln_work_get(w, sig->dim_count, sizeof *n->source);
  return b->dims && b->known && b->geometry && b->dtypes && b->pointers && b->missing && n->source;
}

static bool is_zero(const bound *b, const char *dim) {
  for (uint32_t i = 0; i < b->sig->dim_count; i++)
    if (strcmp(b->sig->dims[i], dim) == 0) return b->known[i] && b->dims[i] == 0;
  return false;
}

/* The first output that has elements, or tensor_count. */
static uint32_t with_elements(const bound *b) {
  uint32_t i = 0;
  for (; i < b->sig->tensor_count; i++) {
    const geometry *g = &b->geometry[i];
    bool found = b->sig->tensors[i].role == ROLE_OUT && g->given;
    for (uint32_t axis = 0; axis < g->rank; axis++) found = found && g->shape[axis] != 0;
    if (found) break;
  }
  return i;
}

kiln_code kiln_refuse_unwritten(const bound *b, const char *none, kiln_error *error) {
  uint32_t i = with_elements(b);
  if (i == b->sig->tensor_count) return KILN_OK;
  sink m = kiln_message(error);
  kiln_put(&m, "%s: %s is 0 and nothing would be computed, but the output %s has shape ", b->sig->name, none,
           b->sig->tensors[i].name);
  put_ints(&m, b->geometry[i].shape, (int32_t)b->geometry[i].rank);
  kiln_put(&m, "; leave the call out.");
  return kiln_fail_put(error, KILN_CONTRACT, &m);
}

bool kiln_has_no_rows(const bound *b) { return is_zero(b, b->sig->rows); }

/* No columns; or no rows, and no output that has elements all the same: a state after no tokens. */
static kiln_code decide_empty(bound *b, kiln_error *error) {
  if (kiln_has_no_rows(b)) {
    b->empty = with_elements(b) == b->sig->tensor_count;
    return KILN_OK;
  }
  b->empty = is_zero(b, b->sig->width);
  return b->empty ? kiln_refuse_unwritten(b, b->sig->width, error) : KILN_OK;
}

kiln_code kiln_bind_views(const kiln_op *op, const view *reads, const view *writes, const number *args, const attr_value *attrs,
                          work *w,
                          bound **out, kiln_error *error) {
  binding n = {op, op->sig, reads, writes, args, NULL, NULL, error};
  if (!make_room(&n, attrs, w)) return kiln_work_failed(w, op->sig->name, error);
  kiln_code code = presence(&n);
  if (code == KILN_OK) code = types(&n);
  if (code == KILN_OK) find_lead(&n);
  for (uint32_t i = 0; i < op->sig->tensor_count && code == KILN_OK; i++) code = operand_geometry(&n, i);
  if (code == KILN_OK) code = scalar_dims(&n);
  if (code == KILN_OK) code = each_operand(&n, solve_operand);
  if (code == KILN_OK) code = each_operand(&n, check_operand);
  if (code == KILN_OK) code = constraints(&n);
  if (code == KILN_OK) code = outputs(&n);
  if (code != KILN_OK) return code;
  *out = n.b;
  return decide_empty(n.b, error);
}

view kiln_flat_view(const view *v, const geometry *g) {
  view flat = *v;
  flat.rank = (int32_t)g->rank;
  memcpy(flat.shape, g->shape, sizeof flat.shape);
  if (g->rank == 0) return flat;
  flat.strides[g->rank - 1] = g->col;
  int64_t step = g->row;
  for (int32_t i = (int32_t)g->rank - 2; i >= 0; i--) {
    flat.strides[i] = step;
    step *= g->shape[i] > 1 ? g->shape[i] : 1;
  }
  return flat;
}
