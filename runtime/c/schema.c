/* The schemas as tables: one per kind of object, in the order in which kiln.runtime.schema reads their fields. */
#include "schema.h"

#include <stddef.h>
#include <string.h>

enum { MAX_KERNELS = 20000, MAX_OPS = 4096, NEAR = 256 };

/* ---- words ---- */
static const text_rule IDENT_RULE = {"A-Za-z_", "A-Za-z0-9_", NULL, KILN_MAX_NAME};
static const text_rule OP_RULE = {"a-z", "a-z0-9_", NULL, KILN_MAX_NAME};
static const text_rule VARIANT_RULE = {"a-z0-9_", "a-z0-9_.+-", NULL, 255};
static const text_rule FILE_RULE = {"a-z0-9_+", "a-z0-9_.+-", NULL, 255};
static const text_rule SYMBOL_RULE = {"A-Za-z_$", "A-Za-z0-9_$.", NULL, 512};
static const text_rule WORD_RULE = {"!-~", "!-~", NULL, KILN_MAX_NAME};
static const text_rule VERSION_RULE = {" -~", " -~", NULL, 255};
static const text_rule SCRATCH_NAME_RULE = {"A-Za-z_", "A-Za-z0-9_", "scratch:", 255};
static const text_rule TEMP_NAME_RULE = {"A-Za-z_", "A-Za-z0-9_", "temp:", 255};

#define TEXT(name, what) {.read = kiln_read_text, .rule = &(name), .expected = (what)}
#define IDENT TEXT(IDENT_RULE, "an identifier")
#define OP_NAME TEXT(OP_RULE, "a snake_case op name")
#define VARIANT TEXT(VARIANT_RULE, "a variant name of lower-case letters, digits and _ . + -")
#define WORD TEXT(WORD_RULE, "a printable word")
#define VERSION TEXT(VERSION_RULE, "a version")
#define DOC {.read = kiln_read_doc}
#define DIGEST {.read = kiln_read_digest}
#define FILE_NAME {.read = read_file_name}
#define TARGET {.read = read_target}
#define INTEGER(from, to) {.read = kiln_read_integer, .low = (from), .high = (to)}
#define COUNT INTEGER(0, INT64_MAX)
#define PRIORITY INTEGER(INT32_MIN, INT32_MAX)
#define FLAG {.read = kiln_read_flag}
#define NUMBER {.read = kiln_read_number}
#define ANY {.read = kiln_read_any}
#define DTYPE {.read = kiln_read_dtype}
#define ALIGNMENT {.read = kiln_read_alignment}
#define EXPR {.read = kiln_read_expr}
#define PRED {.read = kiln_read_pred}
#define ATTR_VALUE {.read = kiln_read_attr_value}
#define WORD_OF(words) {.read = kiln_read_word, .rule = (words)}
#define ENUM_OF(words) {.read = kiln_read_enum, .rule = (words)}
#define OBJECT(table) {.read = kiln_read_record, .rule = &(table)}
#define LIST(of, type, least, most) {.read = kiln_read_list, .item = &(of), .size = sizeof(type), .low = (least), .high = (most)}
#define STAGED_LIST(of, type, least, most) \
  {.read = kiln_read_list, .item = &(of), .size = sizeof(type), .low = (least), .high = (most), .staged = true}
#define THREE(of, type) {.read = kiln_read_fixed, .item = &(of), .size = sizeof(type), .low = 3, .high = 3}
#define MAP(names, of, type, value, most) \
  {.read = kiln_read_map, .key = &(names), .item = &(of), .size = sizeof(type), .at = offsetof(type, value), .high = (most)}
#define STAGED_MAP(names, of, type, value, most)                                                                              \
  {                                                                                                                           \
    .read = kiln_read_map, .key = &(names), .item = &(of), .size = sizeof(type), .at = offsetof(type, value), .high = (most), \
    .staged = true                                                                                                            \
  }

static const char *const LAYOUTS[] = {"rows", "dense", "strided", "nvfp4_128x4", NULL};
static const char *const ROLES[] = {"in", "inout", "out", NULL};
static const char *const CONTRACTS[] = {"exact", "exact_on_target", "envelope", NULL};
static const char *const OP_KINDS[] = {"op", "recipe", NULL};
static const char *const SCALAR_TYPES[] = {"i32", "i64", "f32", "f64", "bool", NULL};
static const char *const PASSED_TYPES[] = {"i32", "i64", "f32", "f64", NULL};
static const char *const POINTER_TYPE[] = {"ptr", NULL};
static const char *const KERNEL_TIERS[] = {"fused", "fast", "generated", "primitive", NULL};
static const char *const PLAN_TIERS[] = {"composite", "primitive", NULL};
static const char *const MODES[] = {"exact", "fast", NULL};
static const char *const ACCESSES[] = {"read", "write", NULL};
static const char *const LAUNCH_FLAGS[] = {"pdl", "cooperative", NULL};
static const char *const OPERAND_KINDS[] = {"tensor", "scalar", NULL};
static const char *const PARAM_KINDS[] = {"ptr", "scalar", "null", "dropped", "tensor_map", NULL};
static const char *const SWIZZLES[] = {"none", "32b", "64b", "128b", NULL};
static const char *const INTERLEAVES[] = {"none", "16b", "32b", NULL};
static const char *const PROMOTIONS[] = {"none", "64b", "128b", "256b", NULL};
static const char *const FILLS[] = {"zeros", "nan", NULL};

/* ---- readers of more than one value ---- */

/* A word of two: false for the first, true for the second. */
static bool read_second(reading *r, const reader *how, const json_value *value, void *out) {
  int found;
  if (!kiln_read_enum(r, how, value, &found)) return false;
  if (out != NULL) *(bool *)out = found == 1;
  return true;
}

static bool read_true(reading *r, const reader *how, const json_value *value, void *out) {
  if (value->kind != JSON_TRUE) return kiln_mismatch(r, "true, or no such field", value);
  return kiln_read_flag(r, how, value, out);
}

/* A name that is one plain file on every file system: no path, no link trick, no case clash, no device name. */
static bool read_file_name(reading *r, const reader *how, const json_value *value, void *out) {
  static const char *const devices[] = {"con", "prn", "aux", "nul", NULL};
  static const reader plain = TEXT(FILE_RULE, "a plain lower-case file name of letters, digits and _ . + -");
  (void)how;
  if (!kiln_read_text(r, &plain, value, out)) return false;
  const char *name = value->u.text;
  size_t stem = strcspn(name, ".");
  bool device = stem == 4 && (memcmp(name, "com", 3) == 0 || memcmp(name, "lpt", 3) == 0) && name[3] >= '0' && name[3] <= '9';
  for (int i = 0; devices[i] != NULL; ++i) device = device || (stem == 3 && memcmp(name, devices[i], 3) == 0);
  if (!device && strstr(name, "..") == NULL && name[value->count - 1] != '.') return true;
  return kiln_mismatch(r, "a file name that is legal on every system", value);
}

static bool read_target(reading *r, const reader *how, const json_value *value, void *out) {
  static const reader word = WORD;
  (void)how;
  if (value->kind != JSON_TEXT || strlen(value->u.text) != value->count || !kiln_target_named(value->u.text))
    return kiln_mismatch(r, "a target such as sm_90a or cpu-x86_64", value);
  return kiln_read_text(r, &word, value, out);
}

static const reader WORD_READER = WORD, VERSION_READER = VERSION, IDENT_READER = IDENT, DTYPE_READER = DTYPE, EXPR_READER = EXPR;
static const reader COUNT_READER = COUNT, FLAG_READER = FLAG, ATTR_VALUE_READER = ATTR_VALUE, ANY_READER = ANY,
                    OP_NAME_READER = OP_NAME;
static const reader TARGET_READER = TARGET, FILE_NAME_READER = FILE_NAME;

/* A toolchain is a map of versions; that of ptxas bounds the drivers that can load the result. */
static bool read_toolchain(reading *r, const reader *how, const json_value *value, void *out) {
  static const reader versions = {.read = kiln_read_map, .key = &WORD_READER, .item = &VERSION_READER, .high = 64};
  (void)how;
  if (!kiln_read_map(r, &versions, value, NULL)) return false;
  const json_value *ptxas = kiln_member(value, "ptxas");
  if (out != NULL) memset(out, 0, sizeof(const char *)); /* that of the kernel which this one is like */
  return ptxas == NULL || kiln_read_text(r, &VERSION_READER, ptxas, out);
}

/* ---- signatures ---- */
static bool read_dtype_choices(reading *r, const reader *how, const json_value *value, void *out) {
  static const reader list = {.read = kiln_read_fixed, .item = &DTYPE_READER, .size = sizeof(kiln_dtype), .low = 1, .high = 16};
  operand_dtype *dtype = out;
  (void)how;
  if (!kiln_read_fixed(r, &list, value, dtype->choices)) return false;
  dtype->count = value->count;
  return true;
}

static const field DTYPE_VAR_FIELDS[] = {{"var", IDENT, offsetof(operand_dtype, var)},
                                         {"choices", {.read = read_dtype_choices}, 0}};
static const record DTYPE_VAR = RECORD(DTYPE_VAR_FIELDS);

static bool read_operand_dtype(reading *r, const reader *how, const json_value *value, void *out) {
  static const reader variable = OBJECT(DTYPE_VAR);
  operand_dtype *dtype = out;
  (void)how;
  if (value->kind == JSON_OBJECT) return kiln_read_record(r, &variable, value, dtype);
  dtype->count = 1;
  return kiln_read_dtype(r, &DTYPE_READER, value, &dtype->choices[0]);
}

static bool read_default(reading *r, const reader *how, const json_value *value, void *out) {
  scalar_operand *scalar = out;
  scalar->has_default = value->kind != JSON_NULL;
  return value->kind == JSON_NULL || kiln_read_number(r, how, value, &scalar->default_value);
}

static bool read_minimum(reading *r, const reader *how, const json_value *value, void *out) {
  scalar_operand *scalar = out;
  scalar->has_minimum = value->kind != JSON_NULL;
  return value->kind == JSON_NULL || kiln_read_number(r, how, value, &scalar->minimum);
}

static const field TENSOR_FIELDS[] = {
  {"kind", ANY, NOT_KEPT},
  {"name", IDENT, offsetof(tensor_operand, name)},
  {"role", ENUM_OF(ROLES), offsetof(tensor_operand, role)},
  {"dtype", {.read = read_operand_dtype}, offsetof(tensor_operand, dtype)},
  {"shape", LIST(EXPR_READER, expr, 0, KILN_MAX_RANK), offsetof(tensor_operand, shape)},
  {"layout", ENUM_OF(LAYOUTS), offsetof(tensor_operand, layout)},
  {"optional", FLAG, offsetof(tensor_operand, optional)},
  {"doc", DOC, NOT_KEPT},
};
static const field SCALAR_FIELDS[] = {
  {"kind", ANY, NOT_KEPT},
  {"name", IDENT, offsetof(scalar_operand, name)},
  {"dtype", WORD_OF(SCALAR_TYPES), offsetof(scalar_operand, dtype)},
  {"default", {.read = read_default}, 0},
  {"minimum", {.read = read_minimum}, 0},
  {"positive", FLAG, offsetof(scalar_operand, positive)},
  {"doc", DOC, NOT_KEPT},
};
static const record TENSOR = RECORD(TENSOR_FIELDS), SCALAR = RECORD(SCALAR_FIELDS);

/* Which of the words its field `kind` is; -1: refused. */
static int read_kind(reading *r, const char *const *kinds, const json_value *value) {
  const reader one_of = ENUM_OF(kinds);
  int kind = -1;
  const json_value *tag = value->kind == JSON_OBJECT ? kiln_member(value, "kind") : NULL;
  if (tag == NULL) kiln_mismatch(r, "an object with the field 'kind'", value);
  else if (kiln_step(r, "kind", 4) && kiln_read_enum(r, &one_of, tag, &kind)) kiln_step_back(r);
  return kind;
}

static bool read_operand(reading *r, const reader *how, const json_value *value, void *out) {
  static const reader tensor = OBJECT(TENSOR), scalar = OBJECT(SCALAR);
  raw_operand *operand = out;
  (void)how;
  int kind = read_kind(r, OPERAND_KINDS, value);
  operand->is_tensor = kind == 0;
  return kind == 0 ? kiln_read_record(r, &tensor, value, &operand->tensor)
                   : kind == 1 && kiln_read_record(r, &scalar, value, &operand->scalar);
}

static const field ATTR_FIELDS[] = {
  {"name", IDENT, offsetof(attr_operand, name)},
  {"choices", LIST(ATTR_VALUE_READER, attr_value, 1, 64), offsetof(attr_operand, choices)},
  {"default", ATTR_VALUE, offsetof(attr_operand, fallback)},
  {"doc", DOC, NOT_KEPT},
};
static const field CONTRACT_FIELDS[] = {
  {"kind", ENUM_OF(CONTRACTS), offsetof(numerics_contract, kind)},
  {"rel_l2", NUMBER, offsetof(numerics_contract, rel_l2)},
  {"max_eps", NUMBER, offsetof(numerics_contract, max_eps)},
};
static const record ATTR = RECORD(ATTR_FIELDS), CONTRACT = RECORD(CONTRACT_FIELDS);

static bool read_constraint(reading *r, const reader *how, const json_value *value, void *out) {
  constraint *made = out;
  (void)how;
  if (value->kind != JSON_LIST || value->count != 2) return kiln_mismatch(r, "a predicate and a sentence", value);
  return kiln_read_pred(r, NULL, &value->u.items[0], &made->when) && kiln_read_doc(r, NULL, &value->u.items[1], &made->sentence);
}

static const reader OPERAND_READER = {.read = read_operand}, ATTR_READER = OBJECT(ATTR),
                    CONSTRAINT_READER = {.read = read_constraint};

static const field SIGNATURE_FIELDS[] = {
  {"family", WORD, offsetof(op_signature, family)},
  {"kind", {.read = read_second, .rule = OP_KINDS}, offsetof(op_signature, recipe)},
  {"rows", IDENT, offsetof(op_signature, rows)},
  {"width", IDENT, offsetof(op_signature, width)},
  {"operands", STAGED_LIST(OPERAND_READER, raw_operand, 1, 64), offsetof(raw_op, operands)},
  {"returns", STAGED_LIST(IDENT_READER, const char *, 1, 64), offsetof(raw_op, returns)},
  {"attrs", LIST(ATTR_READER, attr_operand, 0, 32), offsetof(op_signature, attrs)},
  {"constraints", LIST(CONSTRAINT_READER, constraint, 0, 64), offsetof(op_signature, constraints)},
  {"contract", OBJECT(CONTRACT), offsetof(op_signature, contract)},
  {"doc", DOC, offsetof(op_signature, doc)},
};
static const record SIGNATURE = RECORD(SIGNATURE_FIELDS);

/* ---- kernels ---- */

/* The type of what a pointer points to, by name. */
static bool read_dtype_word(reading *r, const reader *how, const json_value *value, void *out) {
  kiln_dtype found;
  if (!kiln_read_dtype(r, how, value, &found)) return false;
  memcpy(out, &KILN_DTYPES[found].name, sizeof(const char *));
  return true;
}

static const field POINTER_FIELDS[] = {
  {"kind", ANY, NOT_KEPT},
  {"name", IDENT, offsetof(kernel_param, name)},
  {"dtype", {.read = read_dtype_word}, offsetof(kernel_param, dtype)},
  {"operand", TEXT(SCRATCH_NAME_RULE, "an operand or scratch:NAME"), offsetof(kernel_param, operand)},
  {"access", {.read = read_second, .rule = ACCESSES}, offsetof(kernel_param, writes)},
  {"align", ALIGNMENT, offsetof(kernel_param, align)},
};
static const field PASSED_FIELDS[] = {
  {"kind", ANY, NOT_KEPT},
  {"name", IDENT, offsetof(kernel_param, name)},
  {"dtype", WORD_OF(PASSED_TYPES), offsetof(kernel_param, dtype)},
  {"value", EXPR, offsetof(kernel_param, value)},
  {"divisible_by", INTEGER(1, 1 << 16), offsetof(kernel_param, divisible_by)},
};
static const field NULL_FIELDS[] = {
  {"kind", ANY, NOT_KEPT},
  {"name", IDENT, offsetof(kernel_param, name)},
  {"dtype", WORD_OF(POINTER_TYPE), offsetof(kernel_param, dtype)},
};
static const field DROPPED_FIELDS[] = {
  {"kind", ANY, NOT_KEPT},
  {"name", IDENT, offsetof(kernel_param, name)},
  {"dtype", WORD_OF(PASSED_TYPES), offsetof(kernel_param, dtype)},
  {"value", EXPR, offsetof(kernel_param, value)},
  {"equals", INTEGER(INT32_MIN, INT32_MAX), offsetof(kernel_param, equals)},
};
static const reader BOX_READER = INTEGER(1, 256);
static const field TENSOR_MAP_FIELDS[] = {
  {"shape", LIST(EXPR_READER, expr, 1, MAP_RANK), offsetof(tensor_map, shape)},
  {"strides", LIST(EXPR_READER, expr, 0, MAP_RANK - 1), offsetof(tensor_map, strides)},
  {"box", LIST(BOX_READER, int64_t, 1, MAP_RANK), offsetof(tensor_map, box)},
  {"swizzle", ENUM_OF(SWIZZLES), offsetof(tensor_map, swizzle)},
  {"interleave", ENUM_OF(INTERLEAVES), offsetof(tensor_map, interleave)},
  {"l2", ENUM_OF(PROMOTIONS), offsetof(tensor_map, l2)},
  {"fill", ENUM_OF(FILLS), offsetof(tensor_map, fill)},
};
static const record TENSOR_MAP = RECORD(TENSOR_MAP_FIELDS);

static bool read_map(reading *r, const reader *how, const json_value *value, void *out) {
  static const reader fields = OBJECT(TENSOR_MAP);
  kernel_param *param = out;
  (void)how;
  tensor_map *map = kiln_arena_get(r->keep, 1, sizeof *map);
  if (map == NULL) return kiln_out_of_memory(r);
  if (!kiln_read_record(r, &fields, value, map)) return false;
  param->map = map;
  param->align = map->interleave == 2 ? 32 : 16; /* the driver's own rule */
  return true;
}

static const field MAPPED_FIELDS[] = {
  {"kind", ANY, NOT_KEPT},
  {"name", IDENT, offsetof(kernel_param, name)},
  {"dtype", {.read = read_dtype_word}, offsetof(kernel_param, dtype)},
  {"operand", IDENT, offsetof(kernel_param, operand)},
  {"access", {.read = read_second, .rule = ACCESSES}, offsetof(kernel_param, writes)},
  {"map", {.read = read_map}, 0},
};
static const record PARAMS[] = {
  [PARAM_PTR] = RECORD(POINTER_FIELDS), [PARAM_SCALAR] = RECORD(PASSED_FIELDS),
  [PARAM_NULL] = RECORD(NULL_FIELDS), [PARAM_DROPPED] = RECORD(DROPPED_FIELDS), [PARAM_MAP] = RECORD(MAPPED_FIELDS),
};

/* Their fields without kind and name, which stand first. */
#define CHANGES_OF(table) {(table) + 2, sizeof(table) / sizeof *(table) - 2}
static const record CHANGES[] = {
  [PARAM_PTR] = CHANGES_OF(POINTER_FIELDS), [PARAM_SCALAR] = CHANGES_OF(PASSED_FIELDS),
  [PARAM_NULL] = CHANGES_OF(NULL_FIELDS), [PARAM_DROPPED] = CHANGES_OF(DROPPED_FIELDS),
};

static bool read_param(reading *r, const reader *how, const json_value *value, void *out) {
  kernel_param *param = out;
  (void)how;
  int kind = read_kind(r, PARAM_KINDS, value);
  if (kind < 0) return false;
  const reader fields = OBJECT(PARAMS[kind]);
  param->kind = (param_kind)kind;
  param->tensor = param->scratch = -1;
  param->has_value = kind == PARAM_SCALAR || kind == PARAM_DROPPED;
  param->has_divisible_by = kind == PARAM_SCALAR;
  return kiln_read_record(r, &fields, value, param);
}

static bool read_launch(reading *r, const reader *how, const json_value *value, void *out) {
  static const reader names = WORD_OF(LAUNCH_FLAGS);
  static const reader flags = {.read = kiln_read_map, .key = &names, .item = &FLAG_READER, .high = 8};
  manifest_kernel *kernel = out;
  (void)how;
  if (!kiln_read_map(r, &flags, value, NULL)) return false;
  const json_value *pdl = kiln_member(value, "pdl"), *cooperative = kiln_member(value, "cooperative");
  kernel->pdl = pdl != NULL && pdl->kind == JSON_TRUE;
  kernel->cooperative = cooperative != NULL && cooperative->kind == JSON_TRUE;
  return true;
}

static const field SCRATCH_FIELDS[] = {
  {"name", IDENT, offsetof(kernel_scratch, name)},
  {"bytes", EXPR, offsetof(kernel_scratch, bytes)},
  {"align", ALIGNMENT, offsetof(kernel_scratch, align)},
  {"zeroed", {.read = read_true, .optional = true}, offsetof(kernel_scratch, zeroed)},
};
static const field ISA_FIELDS[] = { /* of the kernel itself */
  {"tier", WORD, offsetof(manifest_kernel, isa_tier)},
  {"features", LIST(WORD_READER, const char *, 0, 64), offsetof(manifest_kernel, features)},
};
static const field SELFTEST_FIELDS[] = {
  {"seed", COUNT, offsetof(manifest_kernel, selftest_seed)},
  {"shape", MAP(IDENT_READER, COUNT_READER, named_count, value, 16), offsetof(manifest_kernel, selftest_shape)},
};
static const record SCRATCH = RECORD(SCRATCH_FIELDS), ISA = RECORD(ISA_FIELDS), SELFTEST = RECORD(SELFTEST_FIELDS);
static const field NUMERICS_FIELDS[] = {
  {"contract", OBJECT(CONTRACT), offsetof(manifest_kernel, contract)},
  {"selftest", OBJECT(SELFTEST), 0},
};
static const record NUMERICS = RECORD(NUMERICS_FIELDS);
static const reader PARAM_READER = {.read = read_param}, SCRATCH_READER = OBJECT(SCRATCH);
static const reader BLOCK_READER = INTEGER(1, 1024), CLUSTER_READER = INTEGER(1, 16);

/* Starts an entry as a copy of the kernel it is like, a variant of its op among the NEAR entries before it: their parts are shared.
 * See kiln.runtime.like. */
static bool read_like(reading *r, const reader *how, const json_value *value, void *out) {
  raw_kernel *entry = out;
  const char *op = entry->op;
  uint32_t place = r->path[r->depth - 2].index;
  (void)how;
  for (uint32_t back = 1; back <= place && back <= NEAR; ++back) {
    const raw_kernel *base = entry - back;
    if (!kiln_is_text(value, base->kernel.variant) || strcmp(op, base->op) != 0) continue;
    *entry = *base;
    entry->op = op, entry->base = base;
    return true;
  }
  return kiln_mismatch(r, "a variant of the same op among the 256 entries before", value);
}

/* A parameter of the base with other fields, by name. */
static bool read_change(reading *r, const json_member *m, kernel_param *params, uint32_t count) {
  const json_value name = {.kind = JSON_TEXT, .count = m->bytes, .u.text = m->name};
  uint32_t place = 0;
  while (place < count && !kiln_is_text(&name, params[place].name)) ++place;
  if (place == count) return kiln_mismatch(r, "a parameter of the kernel that it is like", &name);
  const reader fields = {.read = kiln_read_record, .rule = &CHANGES[params[place].kind], .partial = true};
  return kiln_read_record(r, &fields, &m->value, &params[place]);
}

/* A list, or of an entry that is like another an object of those parameters that differ. */
static bool read_params(reading *r, const reader *how, const json_value *value, void *out) {
  enum { MOST = 64 };
  static const reader list = LIST(PARAM_READER, kernel_param, 0, 512);
  raw_kernel *entry = (raw_kernel *)((char *)out - offsetof(raw_kernel, kernel.params));
  (void)how;
  if (value->kind != JSON_OBJECT || entry->base == NULL) return kiln_read_list(r, &list, value, out);
  uint32_t count = entry->kernel.param_count;
  if (count > MOST) return kiln_mismatch(r, "a list: the kernel that it is like has more than 64 parameters", value);
  for (uint32_t i = 0; i < count; ++i) {
    if (entry->kernel.params[i].kind == PARAM_MAP) return kiln_mismatch(r, "a list: the kernel that it is like has tensor maps", value);
  }
  kernel_param *params = kiln_arena_get(r->keep, count == 0 ? 1 : count, sizeof *params);
  if (params == NULL) return kiln_out_of_memory(r);
  if (count != 0) memcpy(params, entry->kernel.params, count * sizeof *params);
  entry->kernel.params = params;
  for (uint32_t i = 0; i < value->count; ++i) {
    const json_member *m = &value->u.members[i];
    if (!kiln_step(r, m->name, m->bytes) || !read_change(r, m, params, count)) return false;
    kiln_step_back(r);
  }
  return true;
}

static bool read_isa(reading *r, const reader *how, const json_value *value, void *out) {
  static const reader isa = OBJECT(ISA);
  manifest_kernel *kernel = out;
  (void)how;
  kernel->isa_tier = NULL, kernel->features = NULL, kernel->feature_count = 0;
  return value->kind == JSON_NULL || kiln_read_record(r, &isa, value, out);
}

static const field KERNEL_FIELDS[] = {
  {"op", OP_NAME, offsetof(raw_kernel, op)},
  {"like", {.read = read_like, .optional = true}, 0},
  {"variant", VARIANT, offsetof(manifest_kernel, variant)},
  {"tier", WORD_OF(KERNEL_TIERS), offsetof(manifest_kernel, tier)},
  {"mode", WORD_OF(MODES), offsetof(manifest_kernel, mode)},
  {"entry", TEXT(SYMBOL_RULE, "a symbol name"), offsetof(manifest_kernel, entry)},
  {"file", FILE_NAME, offsetof(manifest_kernel, file)},
  {"stored_as", {.read = read_file_name, .optional = true}, offsetof(manifest_kernel, file)},
  {"bytes", INTEGER(1, KILN_MAX_ARTIFACT), offsetof(manifest_kernel, bytes)},
  {"sha256", DIGEST, offsetof(manifest_kernel, sha256)},
  {"inputs_digest", DIGEST, NOT_KEPT},
  {"toolchain", {.read = read_toolchain}, offsetof(manifest_kernel, ptxas)},
  {"params", {.read = read_params}, offsetof(manifest_kernel, params)},
  {"grid", THREE(EXPR_READER, expr), offsetof(manifest_kernel, grid)},
  {"block", THREE(BLOCK_READER, int64_t), offsetof(manifest_kernel, block)},
  {"cluster", THREE(CLUSTER_READER, int64_t), offsetof(manifest_kernel, cluster)},
  {"shared_bytes", INTEGER(0, 1 << 20), offsetof(manifest_kernel, shared_bytes)},
  {"launch", {.read = read_launch}, 0},
  {"scratch", LIST(SCRATCH_READER, kernel_scratch, 0, 16), offsetof(manifest_kernel, scratch)},
  {"when", PRED, offsetof(manifest_kernel, when)},
  {"priority", PRIORITY, offsetof(manifest_kernel, priority)},
  {"isa", {.read = read_isa}, 0},
  {"resources", MAP(IDENT_READER, COUNT_READER, named_count, value, 32), offsetof(manifest_kernel, resources)},
  {"budget", MAP(IDENT_READER, COUNT_READER, named_count, value, 32), offsetof(manifest_kernel, budget)},
  {"numerics", OBJECT(NUMERICS), 0},
  {"specialization", {.read = kiln_read_map, .key = &WORD_READER, .item = &ANY_READER, .high = 128}, NOT_KEPT},
};
static const record KERNEL = RECORD(KERNEL_FIELDS);

/* An entry: whole, or what differs from the kernel that it is like. A list of parameters names scratch, so that both are given. */
static bool read_kernel(reading *r, const reader *how, const json_value *value, void *out) {
  static const reader whole = OBJECT(KERNEL), part = {.read = kiln_read_record, .rule = &KERNEL, .partial = true};
  (void)how;
  if (value->kind != JSON_OBJECT || kiln_member(value, "like") == NULL) return kiln_read_record(r, &whole, value, out);
  const json_value *params = kiln_member(value, "params"), *scratch = kiln_member(value, "scratch");
  if (kiln_member(value, "op") == NULL) return kiln_missing_field(r, "op");
  if (params == NULL && scratch != NULL) return kiln_missing_field(r, "params");
  if (params != NULL && params->kind != JSON_OBJECT && scratch == NULL) return kiln_missing_field(r, "scratch");
  if (kiln_member(value, "variant") == NULL) return kiln_missing_field(r, "variant");
  return kiln_read_record(r, &part, value, out);
}

/* ---- plans ---- */
static const field LIKE_FIELDS[] = {{"like", WORD, offsetof(raw_temp, like)}};
static const record LIKE = RECORD(LIKE_FIELDS);

static bool read_temp_dtype(reading *r, const reader *how, const json_value *value, void *out) {
  static const reader like = OBJECT(LIKE);
  raw_temp *temp = out;
  temp->temp.like = -1;
  return value->kind == JSON_OBJECT ? kiln_read_record(r, &like, value, temp) : kiln_read_dtype(r, how, value, &temp->temp.dtype);
}

static const field TEMP_FIELDS[] = {
  {"name", IDENT, offsetof(plan_temp, name)},
  {"dtype", {.read = read_temp_dtype}, 0},
  {"shape", LIST(EXPR_READER, expr, 0, KILN_MAX_RANK), offsetof(plan_temp, shape)},
};
static const reader TEMP_NAME = TEXT(TEMP_NAME_RULE, "an operand or temp:NAME");
static const reader BIND_READER = {.read = kiln_read_nullable, .item = &TEMP_NAME};
static const field STEP_FIELDS[] = {
  {"op", OP_NAME, offsetof(raw_step, op)},
  {"bind", STAGED_MAP(IDENT_READER, BIND_READER, named_bind, to, 64), offsetof(raw_step, bind)},
  {"args", STAGED_MAP(IDENT_READER, EXPR_READER, named_expr, value, 64), offsetof(raw_step, args)},
  {"attrs", STAGED_MAP(IDENT_READER, ATTR_VALUE_READER, named_attr, value, 32), offsetof(raw_step, attrs)},
};
static const record TEMP = RECORD(TEMP_FIELDS), STEP = RECORD(STEP_FIELDS);
static const reader TEMP_READER = OBJECT(TEMP), STEP_READER = OBJECT(STEP);

static const field PLAN_FIELDS[] = {
  {"op", OP_NAME, offsetof(raw_plan, op)},
  {"variant", VARIANT, offsetof(manifest_plan, variant)},
  {"tier", WORD_OF(PLAN_TIERS), offsetof(manifest_plan, tier)},
  {"mode", WORD_OF(MODES), offsetof(manifest_plan, mode)},
  {"when", PRED, offsetof(manifest_plan, when)},
  {"priority", PRIORITY, offsetof(manifest_plan, priority)},
  {"temps", STAGED_LIST(TEMP_READER, raw_temp, 0, 64), offsetof(raw_plan, temps)},
  {"steps", STAGED_LIST(STEP_READER, raw_step, 1, 64), offsetof(raw_plan, steps)},
};
static const record PLAN = RECORD(PLAN_FIELDS);

/* ---- documents ---- */
static const field SOURCE_FIELDS[] = {
  {"bytes", INTEGER(0, KILN_MAX_ARTIFACT), offsetof(manifest_source, bytes)},
  {"sha256", DIGEST, offsetof(manifest_source, sha256)},
};
static const record SOURCE = RECORD(SOURCE_FIELDS);
static const reader SIGNATURE_READER = OBJECT(SIGNATURE), KERNEL_READER = {.read = read_kernel}, PLAN_READER = OBJECT(PLAN);
static const reader SOURCE_READER = OBJECT(SOURCE);

static const field MANIFEST_FIELDS[] = {
    {"schema", INTEGER(1, KILN_SCHEMAS), NOT_KEPT},
    {"abi", COUNT, offsetof(raw_manifest, abi)},
    {"target", TARGET, offsetof(raw_manifest, target)},
    {"toolchain", {.read = read_toolchain}, offsetof(raw_manifest, ptxas)},
    {"ops", STAGED_MAP(OP_NAME_READER, SIGNATURE_READER, raw_op, op, MAX_OPS), offsetof(raw_manifest, ops)},
    {"kernels", STAGED_LIST(KERNEL_READER, raw_kernel, 1, MAX_KERNELS), offsetof(raw_manifest, kernels)},
    {"recipes", STAGED_LIST(PLAN_READER, raw_plan, 0, MAX_KERNELS), offsetof(raw_manifest, plans)},
    {"sources",
     {.read = kiln_read_map,
      .key = &FILE_NAME_READER,
      .item = &SOURCE_READER,
      .size = sizeof(manifest_source),
      .high = MAX_KERNELS},
     offsetof(raw_manifest, sources)},
};
static const record MANIFEST = RECORD(MANIFEST_FIELDS);
const reader KILN_MANIFEST_READER = OBJECT(MANIFEST);

static const field ENTRY_FIELDS[] = {
  {"manifest", WORD, offsetof(index_entry, manifest)},
  {"bytes", INTEGER(1, KILN_MAX_JSON), offsetof(index_entry, bytes)},
  {"sha256", DIGEST, offsetof(index_entry, sha256)},
};
static const record ENTRY = RECORD(ENTRY_FIELDS);
static const reader ENTRY_READER = OBJECT(ENTRY);
static const field INDEX_FIELDS[] = {
  {"schema", INTEGER(1, 1), NOT_KEPT},
  {"generation", COUNT, offsetof(tree_index, generation)},
  {"targets", {.read = kiln_read_map, .key = &TARGET_READER, .item = &ENTRY_READER, .size = sizeof(index_entry), .high = 64},
   offsetof(tree_index, targets)},
};
static const record INDEX = RECORD(INDEX_FIELDS);
const reader KILN_INDEX_READER = OBJECT(INDEX);
