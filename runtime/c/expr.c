/* The two closed languages of a manifest, expressions and predicates, from JSON lists with a known head. Nothing is evaluated here.
 */
#include <string.h>

#include "fields.h"

enum { MAX_LEVELS = 32, MAX_NODES = 4096 };

typedef struct { reading *r; uint32_t nodes; } budget;

/* What follows a head. */
typedef enum { NAME, TWO_EXPRS, ONE_EXPR, PREDS, ONE_PRED, EXPR_INTEGER, NAME_TEXT, NAME_ALIGN, NAME_VALUE } form;

typedef struct { const char *word; expr_head head; form form; } head_row;

static const head_row EXPR_HEADS[] = {
  {"dim", X_DIM, NAME},           {"stride", X_STRIDE, NAME}, {"colstride", X_COLSTRIDE, NAME}, {"arg", X_ARG, NAME},
  {"attr", X_ATTR_VALUE, NAME},   {"add", X_ADD, TWO_EXPRS},  {"sub", X_SUB, TWO_EXPRS},        {"mul", X_MUL, TWO_EXPRS},
  {"floordiv", X_FLOORDIV, TWO_EXPRS}, {"cdiv", X_CDIV, TWO_EXPRS}, {"mod", X_MOD, TWO_EXPRS},  {"min", X_MIN, TWO_EXPRS},
  {"max", X_MAX, TWO_EXPRS},      {"roundup", X_ROUNDUP, TWO_EXPRS}, {"next_pow2", X_NEXT_POW2, ONE_EXPR}, {NULL, X_INTEGER, NAME},
};
static const head_row PRED_HEADS[] = {
  {"and", P_AND, PREDS}, {"or", P_OR, PREDS}, {"not", P_NOT, ONE_PRED}, {"eq", P_EQ, TWO_EXPRS}, {"ne", P_NE, TWO_EXPRS},
  {"lt", P_LT, TWO_EXPRS}, {"le", P_LE, TWO_EXPRS}, {"gt", P_GT, TWO_EXPRS}, {"ge", P_GE, TWO_EXPRS},
  {"divisible", P_DIVISIBLE, EXPR_INTEGER}, {"dtype", P_DTYPE, NAME_TEXT}, {"aligned", P_ALIGNED, NAME_ALIGN},
  {"attr", P_ATTR, NAME_VALUE}, {"absent", P_ABSENT, NAME}, {"present", P_PRESENT, NAME}, {NULL, P_TRUE, NAME},
};

/* Operands that stand behind the head of each form; PREDS takes any number. */
static const uint32_t OPERANDS[] = {[NAME] = 1,         [TWO_EXPRS] = 2, [ONE_EXPR] = 1,   [ONE_PRED] = 1,
                                    [EXPR_INTEGER] = 2, [NAME_TEXT] = 2, [NAME_ALIGN] = 2, [NAME_VALUE] = 2};

static bool spend(budget *b, int level, const json_value *value) {
  ++b->nodes;
  if (level > MAX_LEVELS) return kiln_mismatch(b->r, "an expression of at most 32 levels", value);
  return b->nodes <= MAX_NODES || kiln_mismatch(b->r, "an expression of at most 4096 nodes", value);
}

static const head_row *find_head(budget *b, const head_row *rows, const json_value *value, const char *expected) {
  if (value->kind != JSON_LIST || value->count == 0 || value->u.items[0].kind != JSON_TEXT) {
    kiln_mismatch(b->r, expected, value);
    return NULL;
  }
  const json_value *word = &value->u.items[0];
  for (; rows->word != NULL; ++rows) {
    if (kiln_is_text(word, rows->word)) return rows;
  }
  kiln_mismatch(
      b->r,
      rows->head == P_TRUE ? "a predicate head: and, or, not, eq and so on" : "an expression head: dim, stride, add and so on",
      word);
  return NULL;
}

/* The text stays where the document has it until names are resolved. */
static bool read_name(budget *b, const json_value *value, const char **out) {
  if (value->kind != JSON_TEXT || value->count == 0 || strlen(value->u.text) != value->count)
    return kiln_mismatch(b->r, "one name after the head", value);
  *out = value->u.text;
  return true;
}

static bool read_dtype_name(budget *b, const json_value *value, const char **out) {
  if (!read_name(b, value, out)) return false;
  kiln_dtype known = kiln_dtype_named(*out);
  *out = known ? KILN_DTYPES[known].name : kiln_arena_text(b->r->keep, *out, value->count);
  return *out != NULL || kiln_out_of_memory(b->r);
}

static bool parse(budget *b, const json_value *value, int level, bool predicate, expr *out);

static bool parse_items(budget *b, const json_value *list, uint32_t count, int level, bool predicates, expr *out) {
  if (count > MAX_NODES) return kiln_mismatch(b->r, "an expression of at most 4096 nodes", list);
  out->count = count;
  out->items = kiln_arena_get(b->r->keep, count, sizeof *out->items);
  if (out->items == NULL) return kiln_out_of_memory(b->r);
  for (uint32_t i = 0; i < count; ++i) {
    if (!parse(b, &list->u.items[1 + i], level + 1, predicates, &out->items[i])) return false;
  }
  return true;
}

static bool parse_tail(budget *b, form what, const json_value *list, int level, expr *out) {
  const json_value *first = &list->u.items[1], *second = list->count > 2 ? &list->u.items[2] : NULL;
  switch (what) {
    case NAME: return read_name(b, first, &out->name);
    case TWO_EXPRS: return parse_items(b, list, 2, level, false, out);
    case ONE_EXPR: return parse_items(b, list, 1, level, false, out);
    case PREDS: return parse_items(b, list, list->count - 1, level, true, out);
    case ONE_PRED: return parse_items(b, list, 1, level, true, out);
    case EXPR_INTEGER:
      if (second->kind != JSON_INTEGER || second->u.integer < 1) return kiln_mismatch(b->r, "a positive integer", second);
      out->integer = second->u.integer;
      return parse_items(b, list, 1, level, false, out);
    case NAME_TEXT: return read_name(b, first, &out->name) && read_dtype_name(b, second, &out->text);
    case NAME_ALIGN: return read_name(b, first, &out->name) && kiln_read_alignment(b->r, NULL, second, &out->integer);
    case NAME_VALUE: return read_name(b, first, &out->name) && kiln_read_attr_value(b->r, NULL, second, &out->attribute);
  }
  return false;
}

static bool parse_list(budget *b, const json_value *value, int level, bool predicate, expr *out) {
  const char *expected = predicate ? "true or a predicate list" : "a number or an expression list";
  const head_row *row = find_head(b, predicate ? PRED_HEADS : EXPR_HEADS, value, expected);
  if (row == NULL) return false;
  out->head = row->head;
  if (row->form != PREDS && value->count - 1 != OPERANDS[row->form])
    return kiln_mismatch(b->r, row->form == NAME ? "one name after the head" : "as many operands as the head takes", value);
  return parse_tail(b, row->form, value, level, out);
}

/* Recursion is bounded by MAX_LEVELS. */
static bool parse(budget *b, const json_value *value, int level, bool predicate, expr *out) {
  *out = (expr){.index = -1}; /* an entry that is like another starts as its copy */
  if (!spend(b, level, value)) return false;
  if (predicate && value->kind == JSON_TRUE) {
    out->head = P_TRUE;
  } else if (!predicate && value->kind == JSON_INTEGER) {
    out->head = X_INTEGER;
    out->integer = value->u.integer;
  } else if (!predicate && value->kind == JSON_FLOAT) {
    out->head = X_FLOAT;
    out->number = value->u.number;
  } else {
    return parse_list(b, value, level, predicate, out);
  }
  return true;
}

static bool read_tree(reading *r, const json_value *value, bool predicate, void *out) {
  budget b = {.r = r};
  expr unused = {.count = 0};
  return parse(&b, value, 0, predicate, out == NULL ? &unused : out);
}

bool kiln_read_expr(reading *r, const reader *how, const json_value *value, void *out) {
  (void)how;
  return read_tree(r, value, false, out);
}

bool kiln_read_pred(reading *r, const reader *how, const json_value *value, void *out) {
  (void)how;
  return read_tree(r, value, true, out);
}

bool kiln_read_attr_value(reading *r, const reader *how, const json_value *value, void *out) {
  (void)how;
  bool plain = value->kind == JSON_TRUE || value->kind == JSON_FALSE || value->kind == JSON_INTEGER;
  bool text = value->kind == JSON_TEXT && strlen(value->u.text) == value->count;
  if (!plain && !text) return kiln_mismatch(r, "true, false, an integer or a string without NUL", value);
  attr_value made = {.kind = value->kind, .integer = value->kind == JSON_INTEGER ? value->u.integer : value->kind == JSON_TRUE};
  if (text && (made.text = kiln_arena_text(r->keep, value->u.text, value->count)) == NULL) return kiln_out_of_memory(r);
  if (out != NULL) memcpy(out, &made, sizeof made);
  return true;
}
