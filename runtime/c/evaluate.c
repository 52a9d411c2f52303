/* The two closed languages of a manifest, evaluated in a checked call: expressions and predicates. */
#include "run.h"

void kiln_put_value(sink *s, const number *n) {
  if (n->real) kiln_put_number(s, n->value);
  else kiln_put(s, "%lld", (long long)n->integer);
}

/* ---- as people write them ---- */

static const char *const HEADS[] = {
    [X_DIM] = "dim", [X_STRIDE] = "stride", [X_COLSTRIDE] = "colstride", [X_ARG] = "arg", [X_ATTR_VALUE] = "attr", [X_ADD] = "+",
    [X_SUB] = "-", [X_MUL] = "*", [X_FLOORDIV] = "//", [X_CDIV] = "cdiv", [X_MOD] = "%", [X_MIN] = "min", [X_MAX] = "max",
    [X_ROUNDUP] = "roundup", [X_NEXT_POW2] = "next_pow2", [P_TRUE] = "true", [P_AND] = "and", [P_OR] = "or", [P_NOT] = "not",
    [P_EQ] = "==", [P_NE] = "!=", [P_LT] = "<", [P_LE] = "<=", [P_GT] = ">", [P_GE] = ">=", [P_DIVISIBLE] = "divisible",
    [P_DTYPE] = "dtype", [P_ALIGNED] = "aligned", [P_ATTR] = "attr", [P_ABSENT] = "absent", [P_PRESENT] = "present"};

static void render_list(sink *s, const expr *e) {
  kiln_put(s, "%s(", HEADS[e->head]);
  if (e->name != NULL) kiln_put(s, "%s", e->name);
  for (uint32_t i = 0; i < e->count; i++) {
    if (i) kiln_put(s, ", ");
    kiln_render(s, &e->items[i]);
  }
  if (e->head == P_DIVISIBLE || e->head == P_ALIGNED) kiln_put(s, ", %lld", (long long)e->integer);
  if (e->head == P_DTYPE) kiln_put(s, ", %s", e->text);
  if (e->head == P_ATTR) {
    kiln_put(s, ", ");
    if (e->attribute.kind == JSON_TEXT) kiln_put(s, "%s", e->attribute.text);
    else kiln_put_attr(s, &e->attribute);
  }
  kiln_put(s, ")");
}

static void render_infix(sink *s, const expr *e, const char *open, const char *close) {
  kiln_put(s, "%s", open);
  kiln_render(s, &e->items[0]);
  kiln_put(s, " %s ", HEADS[e->head]);
  kiln_render(s, &e->items[1]);
  kiln_put(s, "%s", close);
}

void kiln_render(sink *s, const expr *e) {
  if (s == NULL) return;
  switch (e->head) {
    case X_INTEGER: kiln_put(s, "%lld", (long long)e->integer); return;
    case X_FLOAT: kiln_put_number(s, e->number); return;
    case X_DIM: case X_ARG: kiln_put(s, "%s", e->name); return;
    case X_ADD: case X_SUB: case X_MUL: case X_FLOORDIV: case X_MOD: render_infix(s, e, "(", ")"); return;
    case P_EQ: case P_NE: case P_LT: case P_LE: case P_GT: case P_GE: render_infix(s, e, "", ""); return;
    case P_TRUE: kiln_put(s, "true"); return;
    default: render_list(s, e);
  }
}

bool kiln_expr_equal(const expr *a, const expr *b) {
  if (a->head != b->head || a->count != b->count || a->integer != b->integer || !(a->number == b->number)) return false;
  if ((a->name == NULL) != (b->name == NULL) || (a->name != NULL && strcmp(a->name, b->name) != 0)) return false;
  for (uint32_t i = 0; i < a->count; i++)
    if (!kiln_expr_equal(&a->items[i], &b->items[i])) return false;
  return true;
}

bool kiln_names_args(const expr *e) {
  if (e->head == X_ARG) return true;
  for (uint32_t i = 0; i < e->count; i++)
    if (kiln_names_args(&e->items[i])) return true;
  return false;
}

bool kiln_names_arg(const expr *e, uint32_t scalar) {
  if (e->head == X_ARG) return e->index == (int32_t)scalar;
  for (uint32_t i = 0; i < e->count; i++)
    if (kiln_names_arg(&e->items[i], scalar)) return true;
  return false;
}

/* ---- geometry ---- */

int64_t kiln_geometry_rows(const geometry *g) {
  int64_t rows = 1;
  for (uint32_t i = 0; i + 1 < g->rank; i++) rows *= g->shape[i];
  return rows;
}

int64_t kiln_geometry_width(const geometry *g) { return g->rank ? g->shape[g->rank - 1] : 1; }

int64_t kiln_geometry_extent(const geometry *g) {
  int64_t rows = kiln_geometry_rows(g), width = kiln_geometry_width(g);
  if (rows == 0 || width == 0) return 0;
  return ((rows - 1) * g->row + (width - 1) * g->col + 1) * g->itemsize;
}

/* ---- expressions ---- */

typedef enum { FINE, UNKNOWN, ZERO, TOO_BIG } trouble;
typedef struct { const bound *b; const number *args; const char *name; } scope;

static int64_t floordiv(int64_t a, int64_t b) {
  int64_t q = a / b;
  return q - (a % b != 0 && (a < 0) != (b < 0));
}

static trouble divided(expr_head head, int64_t a, int64_t b, int64_t *out) {
  if (b == 0) return ZERO;
  if (a == INT64_MIN) return TOO_BIG; /* -a and a / -1 do not exist */
  if (head == X_MOD) {
    int64_t rest = a % b;
    *out = rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
    return FINE;
  }
  int64_t quotient = head == X_FLOORDIV ? floordiv(a, b) : -floordiv(-a, b);
  if (head == X_FLOORDIV || head == X_CDIV) *out = quotient;
  else if (__builtin_mul_overflow(quotient, b, out)) return TOO_BIG;
  return FINE;
}

static trouble integers(expr_head head, int64_t a, int64_t b, int64_t *out) {
  switch (head) {
    case X_ADD: return __builtin_add_overflow(a, b, out) ? TOO_BIG : FINE;
    case X_SUB: return __builtin_sub_overflow(a, b, out) ? TOO_BIG : FINE;
    case X_MUL: return __builtin_mul_overflow(a, b, out) ? TOO_BIG : FINE;
    case X_MIN: *out = a < b ? a : b; return FINE;
    case X_MAX: *out = a > b ? a : b; return FINE;
    default: return divided(head, a, b, out);
  }
}

/* libm is no part of what libkiln needs. Beyond 2^53 every double is an integer. */
static double floor_of(double x) {
  if (!(x > -9007199254740992.0 && x < 9007199254740992.0)) return x;
  double whole = (double)(int64_t)x;
  return whole > x ? whole - 1 : whole;
}

/* Python's rules for floats: floordiv and mod round towards minus infinity. */
static trouble reals(expr_head head, double a, double b, double *out) {
  bool divides = head == X_FLOORDIV || head == X_CDIV || head == X_MOD || head == X_ROUNDUP;
  if (divides && b == 0) return ZERO;
  switch (head) {
    case X_ADD: *out = a + b; break;
    case X_SUB: *out = a - b; break;
    case X_MUL: *out = a * b; break;
    case X_MIN: *out = b < a ? b : a; break;
    case X_MAX: *out = b > a ? b : a; break;
    case X_FLOORDIV: *out = floor_of(a / b); break;
    case X_CDIV: *out = -floor_of(-a / b); break;
    case X_MOD: *out = a - floor_of(a / b) * b; break;
    default: *out = -floor_of(-a / b) * b; break;
  }
  return FINE;
}

static trouble value(const expr *e, const scope *s, number *out);

static trouble binary(const expr *e, const scope *s, number *out) {
  number a, b;
  trouble t = value(&e->items[0], s, &a);
  if (t == FINE) t = value(&e->items[1], s, &b);
  if (t != FINE) return t;
  out->real = a.real || b.real;
  if (!out->real) return integers(e->head, a.integer, b.integer, &out->integer);
  return reals(e->head, a.real ? a.value : (double)a.integer, b.real ? b.value : (double)b.integer, &out->value);
}

static trouble next_pow2(const expr *e, const scope *s, number *out) {
  number a;
  trouble t = value(&e->items[0], s, &a);
  if (t != FINE) return t;
  if (a.real || a.integer > INT64_C(1) << 62) return TOO_BIG;
  int64_t power = 1;
  while (power < a.integer) power *= 2;
  *out = (number){false, power, 0};
  return FINE;
}

static trouble looked_up(bool known, int64_t found, number *out) {
  *out = (number){false, found, 0};
  return known ? FINE : UNKNOWN;
}

static trouble named(const expr *e, const scope *s, number *out) {
  const bound *b = s->b;
  int32_t i = e->index;
  ((scope *)s)->name = e->name;
  switch (e->head) {
    case X_DIM: return looked_up(b->known[i], b->dims[i], out);
    case X_STRIDE: return looked_up(b->geometry[i].given, b->geometry[i].row, out);
    case X_COLSTRIDE: return looked_up(b->geometry[i].given, b->geometry[i].col, out);
    case X_ARG: *out = s->args[i]; return FINE;
    default: {
      const attr_value *a = &b->attrs[i];
      return looked_up(a->kind != JSON_TEXT, a->kind == JSON_INTEGER ? a->integer : a->kind == JSON_TRUE, out);
    }
  }
}

static trouble value(const expr *e, const scope *s, number *out) {
  switch (e->head) {
    case X_INTEGER: *out = (number){false, e->integer, 0}; return FINE;
    case X_FLOAT: *out = (number){true, 0, e->number}; return FINE;
    case X_DIM: case X_STRIDE: case X_COLSTRIDE: case X_ARG: case X_ATTR_VALUE: return named(e, s, out);
    case X_NEXT_POW2: return next_pow2(e, s, out);
    default: return binary(e, s, out);
  }
}

kiln_code kiln_evaluate(const expr *e, const bound *b, const number *args, number *out, kiln_error *error) {
  scope s = {b, args, NULL};
  trouble t = value(e, &s, out);
  if (t == FINE) return KILN_OK;
  sink m = kiln_message(error);
  kiln_render(&m, e);
  if (t == UNKNOWN) kiln_put(&m, " needs '%s', which this call does not determine; pass the operand that does.", s.name);
  else if (t == ZERO) kiln_put(&m, " divides by zero in this call; check its dimensions.");
  else kiln_put(&m, " leaves the range of 64-bit integers in this call; check its dimensions.");
  return kiln_fail_put(error, KILN_CONTRACT, &m);
}

/* -1, which is no extent, where 64 bits cannot hold it. */
int64_t kiln_whole(const number *n) {
  if (!n->real) return n->integer;
  return kiln_fits(n) ? (int64_t)n->value : -1;
}

bool kiln_fits(const number *n) { return !n->real || (n->value >= -0x1p63 && n->value < 0x1p63); }

/* ---- predicates ---- */

static kiln_code no(sink *why, const expr *pred) {
  kiln_put(why, "needs ");
  kiln_render(why, pred);
  return KILN_SELECTION;
}

static bool compared(expr_head head, const number *a, const number *b) {
  if (!a->real && !b->real) {
    int64_t x = a->integer, y = b->integer;
    switch (head) {
      case P_EQ: return x == y;
      case P_NE: return x != y;
      case P_LT: return x < y;
      case P_LE: return x <= y;
      case P_GT: return x > y;
      default: return x >= y;
    }
  }
  double x = a->real ? a->value : (double)a->integer, y = b->real ? b->value : (double)b->integer;
  switch (head) {
    case P_EQ: return x == y;
    case P_NE: return x != y;
    case P_LT: return x < y;
    case P_LE: return x <= y;
    case P_GT: return x > y;
    default: return x >= y;
  }
}

static kiln_code comparison(const expr *pred, const bound *b, const number *args, sink *why, kiln_error *error) {
  number x, y;
  kiln_code code = kiln_evaluate(&pred->items[0], b, args, &x, error);
  if (code == KILN_OK) code = kiln_evaluate(&pred->items[1], b, args, &y, error);
  if (code != KILN_OK || compared(pred->head, &x, &y)) return code;
  no(why, pred);
  kiln_put(why, ", found ");
  kiln_put_value(why, &x);
  kiln_put(why, " and ");
  kiln_put_value(why, &y);
  return KILN_SELECTION;
}

static kiln_code divisible(const expr *pred, const bound *b, const number *args, sink *why, kiln_error *error) {
  number x;
  kiln_code code = kiln_evaluate(&pred->items[0], b, args, &x, error);
  if (code != KILN_OK) return code;
  double by = (double)pred->integer;
  if (x.real ? floor_of(x.value / by) * by == x.value : x.integer % pred->integer == 0) return KILN_OK;
  no(why, &pred->items[0]);
  kiln_put(why, " divisible by %lld, found ", (long long)pred->integer);
  kiln_put_value(why, &x);
  return KILN_SELECTION;
}

static bool attr_equal(const attr_value *a, const attr_value *b) {
  if (a->kind != b->kind) return false;
  return a->kind == JSON_INTEGER ? a->integer == b->integer : a->kind == JSON_TEXT ? strcmp(a->text, b->text) == 0 : true;
}

static kiln_code attribute(const expr *pred, const bound *b, sink *why) {
  const attr_value *found = &b->attrs[pred->index];
  if (attr_equal(found, &pred->attribute)) return KILN_OK;
  kiln_put(why, "needs %s=", pred->name);
  if (why != NULL) kiln_put_attr(why, &pred->attribute);
  kiln_put(why, ", found ");
  if (why != NULL) kiln_put_attr(why, found);
  return KILN_SELECTION;
}

static kiln_code dtype(const expr *pred, const bound *b, sink *why) {
  kiln_dtype found = b->dtypes[pred->index];
  if (found != 0 && strcmp(KILN_DTYPES[found].name, pred->text) == 0) return KILN_OK;
  kiln_put(why, "needs %s of %s, found %s", pred->name, pred->text, found ? KILN_DTYPES[found].name : "none");
  return KILN_SELECTION;
}

static kiln_code aligned(const expr *pred, const bound *b, sink *why) {
  uintptr_t rest = b->pointers[pred->index] % (uintptr_t)pred->integer;
  if (rest == 0) return KILN_OK;
  kiln_put(why, "needs %s aligned to %lld bytes, found it %d bytes off", pred->name, (long long)pred->integer, (int)rest);
  return KILN_SELECTION;
}

static kiln_code any_of(const expr *pred, const bound *b, const number *args, sink *why, kiln_error *error) {
  sink start = why != NULL ? *why : (sink){0};
  kiln_put(why, "none of: ");
  for (uint32_t i = 0; i < pred->count; i++) {
    if (i) kiln_put(why, "; ");
    kiln_code code = kiln_why_not(&pred->items[i], b, args, why, error);
    if (code == KILN_SELECTION) continue;
    if (why != NULL) *why = start;
    return code;
  }
  return KILN_SELECTION;
}

static kiln_code none_of(const expr *pred, const bound *b, const number *args, sink *why, kiln_error *error) {
  kiln_code code = kiln_why_not(&pred->items[0], b, args, NULL, error);
  if (code != KILN_OK) return code == KILN_SELECTION ? KILN_OK : code;
  kiln_render(why, &pred->items[0]);
  kiln_put(why, " holds");
  return KILN_SELECTION;
}

kiln_code kiln_why_not(const expr *pred, const bound *b, const number *args, sink *why, kiln_error *error) {
  switch (pred->head) {
    case P_TRUE: return KILN_OK;
    case P_AND:
      for (uint32_t i = 0; i < pred->count; i++) {
        kiln_code code = kiln_why_not(&pred->items[i], b, args, why, error);
        if (code != KILN_OK) return code;
      }
      return KILN_OK;
    case P_OR: return any_of(pred, b, args, why, error);
    case P_NOT: return none_of(pred, b, args, why, error);
    case P_DIVISIBLE: return divisible(pred, b, args, why, error);
    case P_ATTR: return attribute(pred, b, why);
    case P_DTYPE: return dtype(pred, b, why);
    case P_ALIGNED: return aligned(pred, b, why);
    case P_ABSENT: case P_PRESENT:
      if ((b->dtypes[pred->index] == 0) == (pred->head == P_ABSENT)) return KILN_OK;
      kiln_put(why, "needs %s %s", pred->name, pred->head == P_ABSENT ? "absent" : "present");
      return KILN_SELECTION;
    default: return comparison(pred, b, args, why, error);
  }
}
