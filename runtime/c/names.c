/* Where names stand. Lists that a document bounds to a few dozen are walked; ops and dims may be many and are searched. */
#include <stdlib.h>
#include <string.h>

#include "schema.h"

static int compare_op(const void *key, const void *op) { return strcmp(key, ((const raw_op *)op)->op.name); }

int32_t kiln_op_index(const raw_manifest *raw, const char *name) {
  if (raw->op_count == 0) return -1;
  const raw_op *found = bsearch(name, raw->ops, raw->op_count, sizeof *raw->ops, compare_op);
  return found == NULL ? -1 : (int32_t)(found - raw->ops);
}

int32_t kiln_tensor_index(const op_signature *op, const char *name) {
  for (uint32_t i = 0; i < op->tensor_count; ++i) {
    if (strcmp(op->tensors[i].name, name) == 0) return (int32_t)i;
  }
  return -1;
}

int32_t kiln_scalar_index(const op_signature *op, const char *name) {
  for (uint32_t i = 0; i < op->scalar_count; ++i) {
    if (strcmp(op->scalars[i].name, name) == 0) return (int32_t)i;
  }
  return -1;
}

int32_t kiln_attr_index(const op_signature *op, const char *name) {
  for (uint32_t i = 0; i < op->attr_count; ++i) {
    if (strcmp(op->attrs[i].name, name) == 0) return (int32_t)i;
  }
  return -1;
}

static int compare_dim(const void *key, const void *dim) { return strcmp(key, ((const named_index *)dim)->name); }

int32_t kiln_dim_index(const raw_op *op, const char *name) {
  if (op->dim_count == 0) return -1;
  const named_index *found = bsearch(name, op->dims, op->dim_count, sizeof *op->dims, compare_dim);
  return found == NULL ? -1 : (int32_t)found->index;
}

/* What follows a prefix; NULL if the name doesn't start with it. */
static const char *behind(const char *name, const char *prefix) {
  size_t length = strlen(prefix);
  return strncmp(name, prefix, length) == 0 ? name + length : NULL;
}

int32_t kiln_temp_index(const raw_plan *plan, const char *name) {
  const char *temp = behind(name, "temp:");
  for (uint32_t i = plan->temp_count; temp != NULL && i-- > 0;) {
    if (strcmp(plan->temps[i].temp.name, temp) == 0) return (int32_t)i;
  }
  return -1;
}

int32_t kiln_scratch_index(const manifest_kernel *k, const char *name) {
  const char *scratch = behind(name, "scratch:");
  for (uint32_t i = k->scratch_count; scratch != NULL && i-- > 0;) {
    if (strcmp(k->scratch[i].name, scratch) == 0) return (int32_t)i;
  }
  return -1;
}
