/* A manifest as it is read: the structs of a manifest, and the names in them that are not resolved yet. */
#ifndef KILN_SCHEMA_H
#define KILN_SCHEMA_H

#include "fields.h"

enum { KILN_SCHEMAS = 2 }; /* of manifests: 2 has kernels that are `like` another or `stored_as` it */

typedef struct { const char *name; expr value; } named_expr;
typedef struct { const char *name; attr_value value; } named_attr;
typedef struct { const char *name, *to; } named_bind; /* NULL: bound to nothing */
typedef struct { const char *name; uint32_t index; } named_index;

typedef struct { bool is_tensor; tensor_operand tensor; scalar_operand scalar; } raw_operand;
typedef struct {
  op_signature op; /* first: a map's item starts with its name */
  raw_operand *operands; uint32_t operand_count;
  const char **returns; uint32_t return_count;
  named_index *dims; uint32_t dim_count; /* sorted by name */
} raw_op;
typedef struct raw_kernel raw_kernel;
struct raw_kernel {
  manifest_kernel kernel;
  const char *op;
  const raw_kernel *base; /* the one that it is like, whose parts it shares; NULL: none */
};
typedef struct { plan_temp temp; const char *like; } raw_temp;
typedef struct {
  const char *op;
  named_bind *bind; uint32_t bind_count;
  named_expr *args; uint32_t arg_count;
  named_attr *attrs; uint32_t attr_count;
} raw_step;
typedef struct {
  manifest_plan plan;
  const char *op;
  raw_temp *temps; uint32_t temp_count;
  raw_step *steps; uint32_t step_count;
} raw_plan;
typedef struct {
  int64_t abi;
  const char *target, *ptxas;
  raw_op *ops; uint32_t op_count;
  raw_kernel *kernels; uint32_t kernel_count;
  raw_plan *plans; uint32_t plan_count;
  manifest_source *sources; uint32_t source_count;
} raw_manifest;

/* What a kernel shares with the one it is like was checked and resolved there: a list costs once, however many share it. */
static inline bool kiln_same_items(const expr *a, const expr *b) { return a->count != 0 && a->items == b->items; }
static inline bool kiln_same_scratch(const raw_kernel *k) { return k->base != NULL && k->kernel.scratch == k->base->kernel.scratch; }
static inline bool kiln_same_params(const raw_kernel *k) {
  return kiln_same_scratch(k) && k->kernel.params == k->base->kernel.params;
}
/* The value in the base's place of a parameter, NULL if there is none. */
static inline const expr *kiln_base_value(const raw_kernel *k, uint32_t param) {
  return k->base != NULL && param < k->base->kernel.param_count ? &k->base->kernel.params[param].value : NULL;
}

extern const reader KILN_INDEX_READER;    /* of a tree_index */
extern const reader KILN_MANIFEST_READER; /* of a raw_manifest */

/* Refuses parts that contradict each other (consistency.c), resolves every name to an index and fills `out` (resolve.c). */
kiln_code kiln_check_consistency(reading *r, raw_manifest *raw);
kiln_code kiln_resolve(reading *r, raw_manifest *raw, manifest *out);

/* Positions of names; -1: none. Where a temp or scratch has a name twice, the last one is meant. */
int32_t kiln_op_index(const raw_manifest *raw, const char *name);
int32_t kiln_tensor_index(const op_signature *op, const char *name);
int32_t kiln_scalar_index(const op_signature *op, const char *name);
int32_t kiln_attr_index(const op_signature *op, const char *name);
int32_t kiln_dim_index(const raw_op *op, const char *name);
int32_t kiln_temp_index(const raw_plan *plan, const char *name);       /* "temp:NAME" */
int32_t kiln_scratch_index(const manifest_kernel *k, const char *name); /* "scratch:NAME" */

#endif
