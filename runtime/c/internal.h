/* What the parts of libkiln share: errors, memory that lives as long as a library, the manifest as structs. Nothing here is public. */
#ifndef KILN_INTERNAL_H
#define KILN_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "kiln.h"

/* ---- errors (error.c) ---- */
/* Writes the message and returns `code`; `error` may be NULL. */
kiln_code kiln_fail(kiln_error *error, kiln_code code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* ---- memory (arena.c): freed as a whole; allocations are zeroed ---- */
typedef struct kiln_arena kiln_arena;
kiln_arena *kiln_arena_new(void);                                        /* NULL: no memory */
void *kiln_arena_get(kiln_arena *arena, size_t count, size_t size);      /* NULL: no memory, no arena, or count * size overflows */
const char *kiln_arena_text(kiln_arena *arena, const char *text, size_t bytes); /* a copy with a zero behind it */
void kiln_arena_free(kiln_arena *arena);                                 /* NULL is fine */

/* ---- digests (sha256.c) ---- */
void kiln_sha256(const void *data, size_t bytes, uint8_t digest[32]);
void kiln_hex(const uint8_t *bytes, size_t count, char *text); /* 2 * count characters and a zero */

/* ---- strict JSON (json.c): the same documents as kiln.runtime.strictjson, refused for the same reasons ---- */
typedef enum { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_INTEGER, JSON_FLOAT, JSON_TEXT, JSON_LIST, JSON_OBJECT } json_kind;
typedef struct json_value {
  json_kind kind;
  uint32_t count;           /* items of a list, members of an object, bytes of a text */
  union {
    int64_t integer;
    double number;
    const char *text;       /* UTF-8, zero behind it; no text of a valid manifest holds a zero */
    struct json_value *items;   /* of a list */
    struct json_member *members; /* of an object, in document order */
  } u;
} json_value;
/* `bytes` of the name. */
typedef struct json_member { const char *name; uint32_t bytes; json_value value; } json_member;
kiln_code kiln_json_parse(kiln_arena *arena, const char *where, const uint8_t *data, size_t bytes, json_value *out, kiln_error *error);

/* ---- expressions and predicates: one tree (expr.c) ---- */
typedef enum {
  X_INTEGER, X_FLOAT,                                     /* value */
  X_DIM, X_STRIDE, X_COLSTRIDE, X_ARG, X_ATTR_VALUE,      /* name */
  X_ADD, X_SUB, X_MUL, X_FLOORDIV, X_CDIV, X_MOD, X_MIN, X_MAX, X_ROUNDUP, X_NEXT_POW2, /* items */
  P_TRUE, P_AND, P_OR, P_NOT,                             /* items */
  P_EQ, P_NE, P_LT, P_LE, P_GT, P_GE,                     /* items: two expressions */
  P_DIVISIBLE,                                            /* items[0], integer */
  P_DTYPE,                                                /* name, text */
  P_ALIGNED,                                              /* name, integer */
  P_ATTR,                                                 /* name, attribute */
  P_ABSENT, P_PRESENT                                     /* name */
} expr_head;
typedef struct { json_kind kind; int64_t integer; const char *text; } attr_value; /* JSON_FALSE/TRUE, JSON_INTEGER or JSON_TEXT */
typedef struct expr {
  expr_head head;
  uint32_t count;            /* items */
  struct expr *items;
  const char *name;          /* of a dim, operand, scalar or attribute: the manifest's interned pointer */
  int32_t index;             /* of `name` among the op's dims, tensors, scalars or attributes; see op_signature */
  int64_t integer;
  double number;
  const char *text;
  attr_value attribute;
} expr;

/* ---- a manifest (manifest.c), as kiln.runtime.entities has it ---- */
typedef enum { ROLE_IN, ROLE_INOUT, ROLE_OUT } operand_role;
typedef enum { LAYOUT_ROWS, LAYOUT_DENSE, LAYOUT_STRIDED, LAYOUT_NVFP4 } operand_layout;
typedef struct {
  const char *var;          /* NULL for one fixed type */
  kiln_dtype choices[16];   /* the fixed type is choices[0] */
  uint32_t count;
} operand_dtype;
typedef struct {
  const char *name;
  operand_role role;
  operand_dtype dtype;
  expr *shape;
  uint32_t rank;
  operand_layout layout;
  bool optional;
} tensor_operand;
typedef struct {
  const char *name;
  const char *dtype;        /* "i32", "i64", "f32", "f64" or "bool" */
  bool has_default, has_minimum, positive;
  double default_value, minimum;
} scalar_operand;
typedef struct { const char *name; attr_value *choices; uint32_t count; attr_value fallback; } attr_operand;
typedef enum { CONTRACT_EXACT, CONTRACT_EXACT_ON_TARGET, CONTRACT_ENVELOPE } contract_kind;
typedef struct { contract_kind kind; double rel_l2, max_eps; } numerics_contract;
typedef struct { expr when; const char *sentence; } constraint;
typedef struct {
  const char *name, *family, *doc;
  bool recipe;
  const char *rows, *width;                       /* dims */
  tensor_operand *tensors; uint32_t tensor_count; /* in declared order */
  scalar_operand *scalars; uint32_t scalar_count;
  bool *is_tensor; uint32_t operand_count;        /* declared order of both kinds */
  attr_operand *attrs; uint32_t attr_count;
  uint32_t *returns; uint32_t return_count;       /* tensor indices */
  constraint *constraints; uint32_t constraint_count;
  const char **dims; uint32_t dim_count;          /* every dim that shapes name, then rows and width; X_DIM's index points here */
  numerics_contract contract;
} op_signature;

typedef enum { PARAM_PTR, PARAM_SCALAR, PARAM_NULL, PARAM_DROPPED, PARAM_MAP } param_kind;
/* How the copy engine (TMA) walks an operand; outermost dimension first, the innermost stride is 1. Words are the driver's numbers. */
typedef struct {
  expr *shape; uint32_t rank;
  expr *strides; uint32_t stride_count;
  int64_t *box; uint32_t box_count;
  int swizzle, interleave, l2, fill;
} tensor_map;
enum { MAP_BYTES = 128, MAP_ALIGN = 64, MAP_RANK = 5 }; /* of a map, as a parameter and in memory; most dimensions */
typedef struct {
  param_kind kind;
  const char *name, *dtype, *operand;
  int32_t tensor, scratch;  /* what operand means: an index, the other is -1 */
  bool writes;
  int64_t align, divisible_by, equals; /* 0 where absent */
  bool has_divisible_by, has_value;
  expr value;
  const tensor_map *map;    /* of PARAM_MAP */
} kernel_param;
typedef struct { const char *name; expr bytes; int64_t align; bool zeroed; } kernel_scratch;
typedef struct { const char *key; int64_t value; } named_count;

typedef struct {
  uint32_t op;              /* index into manifest.ops */
  const char *variant, *tier, *mode, *entry, *file;
  int64_t bytes;
  uint8_t sha256[32];
  const char *ptxas;        /* version, NULL if none */
  kernel_param *params; uint32_t param_count;
  expr grid[3];
  int64_t block[3], cluster[3], shared_bytes;
  bool pdl, cooperative;
  kernel_scratch *scratch; uint32_t scratch_count;
  expr when;
  int64_t priority;
  const char *isa_tier;     /* NULL on CUDA */
  const char **features; uint32_t feature_count;
  named_count *resources; uint32_t resource_count;
  named_count *budget; uint32_t budget_count;
  numerics_contract contract;
  int64_t selftest_seed;
  named_count *selftest_shape; uint32_t selftest_count;
} manifest_kernel;

typedef struct { const char *name; int32_t like; bool like_temp; kiln_dtype dtype; expr *shape; uint32_t rank; } plan_temp;
/* What a step binds an operand to. */
typedef struct { enum { BIND_NOTHING, BIND_TENSOR, BIND_TEMP } kind; uint32_t index; } step_bind;
typedef struct {
  uint32_t op;
  step_bind *bind;          /* per tensor of the op */
  bool *has_arg; expr *args; /* per scalar of the op */
  attr_value *attrs;        /* per attribute of the op, defaults filled in */
} plan_step;
typedef struct {
  uint32_t op;
  const char *variant, *tier, *mode;
  expr when;
  int64_t priority;
  plan_temp *temps; uint32_t temp_count;
  plan_step *steps; uint32_t step_count;
} manifest_plan;

typedef struct { const char *name; int64_t bytes; uint8_t sha256[32]; } manifest_source;
typedef struct {
  const char *target;
  const char *ptxas;
  op_signature *ops; uint32_t op_count;        /* sorted by name */
  manifest_kernel *kernels; uint32_t kernel_count;
  manifest_plan *plans; uint32_t plan_count;
  manifest_source *sources; uint32_t source_count;
} manifest;
typedef struct { const char *target, *manifest; int64_t bytes; uint8_t sha256[32]; } index_entry;
typedef struct { int64_t generation; index_entry *targets; uint32_t target_count; } tree_index;

kiln_code kiln_parse_index(kiln_arena *arena, const char *where, const uint8_t *data, size_t bytes, tree_index *out, kiln_error *error);
/* Everything kiln.runtime.manifest.parse_manifest refuses is refused, consistency faults too. */
kiln_code kiln_parse_manifest(kiln_arena *arena, const char *where, const char *target, const uint8_t *data, size_t bytes, manifest *out,
                              kiln_error *error);

/* ---- trees (tree.c): a folder, or a ustar archive in memory ---- */
typedef struct kiln_tree kiln_tree;
kiln_code kiln_tree_open(const char *path, kiln_tree **out, kiln_error *error);
kiln_code kiln_tree_embedded(const void *archive, size_t bytes, kiln_tree **out, kiln_error *error);
/* The bytes of <target>/<name>, or of <name> at the root where target is NULL: a regular file of at most `most` bytes, read once,
 * no link followed. `*data` is freed with kiln_tree_release. */
kiln_code kiln_tree_read(kiln_tree *tree, const char *target, const char *name, size_t most, const uint8_t **data, size_t *bytes,
                         kiln_error *error);
/* The same, of exactly this size and digest. */
kiln_code kiln_tree_read_exact(kiln_tree *tree, const char *target, const char *name, size_t size, const uint8_t sha256[32],
                               const uint8_t **data, kiln_error *error);
void kiln_tree_release(kiln_tree *tree, const uint8_t *data);
const char *kiln_tree_label(const kiln_tree *tree);
void kiln_tree_close(kiln_tree *tree);
/* Every fault of a tree as kiln.runtime.verify finds them (integrity, extra and missing files, launch proofs); `found` is called for
 * each with a file and a sentence. KILN_OK: the tree could be looked at; *count faults. */
typedef void kiln_fault_seen(void *user, const char *file, const char *why);
kiln_code kiln_tree_verify(kiln_tree *tree, const char *expect, kiln_fault_seen *found, void *user, uint32_t *count, kiln_error *error);

/* ---- launch proof (proof.c): the bytes of an artifact must be what the manifest's kernel promises ---- */
kiln_code kiln_prove(const manifest *m, const manifest_kernel *kernel, const uint8_t *data, size_t bytes, kiln_error *error);

/* ---- targets (targets.c) ---- */
bool kiln_target_runs_on(const char *target, int major, int minor);
bool kiln_target_has_maps(const char *target); /* of tensors: sm_90 and later */
/* Orders two legal targets of one device: negative if `a` is better. */
int kiln_target_compare(const char *a, const char *b);
int kiln_isa_rank(const char *target, const char *tier); /* -1: unknown */
/* This CPU's features as /proc/cpuinfo lists them; `kiln_cpu_lacks` gives the first feature that is missing, or NULL. */
typedef struct cpu_features cpu_features;
kiln_code kiln_cpu_features(kiln_arena *arena, const cpu_features **out, kiln_error *error);
const char *kiln_cpu_lacks(const cpu_features *present, const char *target, const manifest_kernel *kernel);
bool kiln_needs_tiles(const manifest_kernel *kernel); /* whether its features are those of AMX */
const char *kiln_cpu_target(void); /* "cpu-x86_64", "cpu-aarch64" or NULL */

extern const struct kiln_dtype_row { const char *name; int bytes; bool code; } KILN_DTYPES[]; /* indexed by kiln_dtype */
kiln_dtype kiln_dtype_named(const char *name); /* 0: unknown */

#endif
