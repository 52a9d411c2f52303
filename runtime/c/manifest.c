/* INDEX.json and MANIFEST.json: strict JSON, read by the tables of schema.c, refused as kiln.runtime.manifest refuses them. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "schema.h"

enum { ABI = 1 };

static kiln_code refuse_version(kiln_error *error, const char *where, int64_t found, bool index) {
  return kiln_fail(error, KILN_SCHEMA, "%s: schema %" PRId64 ", this version reads %s; use a Kiln of the same age as the tree.",
                   where, found, index ? "1" : "1 and 2");
}

/* The document at `data` through `how`; its schema's number is told first: another one may differ in everything else. */
static kiln_code read_document(reading *r, const reader *how, const uint8_t *data, size_t bytes, void *out) {
  json_value value = {0};
  kiln_code code = kiln_json_parse(r->staging, r->where, data, bytes, &value, r->error);
  if (code != KILN_OK) return code;
  const json_value *schema = value.kind == JSON_OBJECT ? kiln_member(&value, "schema") : NULL;
  bool index = how == &KILN_INDEX_READER;
  if (schema != NULL && schema->kind == JSON_INTEGER && (schema->u.integer < 1 || schema->u.integer > (index ? 1 : KILN_SCHEMAS)))
    return refuse_version(r->error, r->where, schema->u.integer, index);
  how->read(r, how, &value, out);
  return r->code;
}

static kiln_code check_index(reading *r, const tree_index *index) {
  for (uint32_t i = 0; i < index->target_count; ++i) {
    const index_entry *e = &index->targets[i];
    char expected[64];
    snprintf(expected, sizeof expected, "%s/MANIFEST.json", e->target);
    if (strcmp(e->manifest, expected) != 0)
      return kiln_fail(r->error, KILN_SCHEMA, "%s at /targets/%s: found '%s', expected %s.", r->where, e->target, e->manifest,
                       expected);
  }
  return KILN_OK;
}

kiln_code kiln_parse_index(kiln_arena *arena, const char *where, const uint8_t *data, size_t bytes, tree_index *out,
                           kiln_error *error) {
  if (bytes > KILN_MAX_INDEX)
    return kiln_fail(error, KILN_SCHEMA, "%s: found %zu bytes, expected at most %d; rebuild the tree.", where, bytes,
                     KILN_MAX_INDEX);
  reading r = {.keep = arena, .staging = kiln_arena_new(), .error = error, .where = where};
  if (r.staging == NULL) return kiln_no_memory(error);
  *out = (tree_index){0};
  kiln_code code = read_document(&r, &KILN_INDEX_READER, data, bytes, out);
  if (code == KILN_OK) code = check_index(&r, out);
  kiln_arena_free(r.staging);
  return code;
}

/* ---- what signatures are completed with ---- */
static int compare_ops(const void *a, const void *b) { return strcmp(((const raw_op *)a)->op.name, ((const raw_op *)b)->op.name); }

static bool split_operands(reading *r, raw_op *raw) {
  op_signature *op = &raw->op;
  op->is_tensor = kiln_arena_get(r->keep, raw->operand_count, sizeof *op->is_tensor);
  op->tensors = kiln_arena_get(r->keep, raw->operand_count, sizeof *op->tensors);
  op->scalars = kiln_arena_get(r->keep, raw->operand_count, sizeof *op->scalars);
  if (op->is_tensor == NULL || op->tensors == NULL || op->scalars == NULL) return kiln_out_of_memory(r);
  op->operand_count = raw->operand_count;
  for (uint32_t i = 0; i < raw->operand_count; ++i) {
    op->is_tensor[i] = raw->operands[i].is_tensor;
    if (op->is_tensor[i]) op->tensors[op->tensor_count++] = raw->operands[i].tensor;
    else op->scalars[op->scalar_count++] = raw->operands[i].scalar;
  }
  return true;
}

/* Every mention of a dim in an expression, `place` counting on; with `out` NULL they are only counted. */
static void mentions(const expr *e, named_index *out, uint32_t *place) {
  if (e->head == X_DIM) {
    if (out != NULL) out[*place] = (named_index){e->name, *place};
    ++*place;
  }
  for (uint32_t i = 0; i < e->count; ++i) mentions(&e->items[i], out, place);
}

static uint32_t all_mentions(const op_signature *op, named_index *out) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < op->tensor_count; ++i) {
    for (uint32_t k = 0; k < op->tensors[i].rank; ++k) mentions(&op->tensors[i].shape[k], out, &count);
  }
  const char *last[] = {op->rows, op->width};
  for (int i = 0; i < 2; ++i, ++count) {
    if (out != NULL) out[count] = (named_index){last[i], count};
  }
  return count;
}

static int by_place(const void *a, const void *b) {
  const named_index *x = a, *y = b;
  return (x->index > y->index) - (x->index < y->index);
}

static int by_name(const void *a, const void *b) {
  int order = strcmp(((const named_index *)a)->name, ((const named_index *)b)->name);
  return order != 0 ? order : by_place(a, b);
}

/* The dims of an op in the order in which they are first mentioned, rows and width last; and sorted by name, to search. */
static bool collect_dims(reading *r, raw_op *raw) {
  uint32_t count = all_mentions(&raw->op, NULL), kept = 0;
  named_index *all = kiln_arena_get(r->staging, count, sizeof *all);
  if (all == NULL) return kiln_out_of_memory(r);
  all_mentions(&raw->op, all);
  qsort(all, count, sizeof *all, by_name);
  for (uint32_t i = 0; i < count; ++i) {
    if (i == 0 || strcmp(all[i].name, all[kept - 1].name) != 0) all[kept++] = all[i];
  }
  qsort(all, kept, sizeof *all, by_place);
  raw->op.dims = kiln_arena_get(r->keep, kept, sizeof *raw->op.dims);
  if (raw->op.dims == NULL) return kiln_out_of_memory(r);
  for (uint32_t i = 0; i < kept; ++i) {
    all[i].index = i;
    raw->op.dims[i] = kiln_arena_text(r->keep, all[i].name, strlen(all[i].name));
    if (raw->op.dims[i] == NULL) return kiln_out_of_memory(r);
  }
  qsort(all, kept, sizeof *all, by_name);
  raw->op.dim_count = raw->dim_count = kept;
  raw->dims = all;
  return true;
}

static bool complete_ops(reading *r, raw_manifest *raw) {
  if (raw->op_count != 0) qsort(raw->ops, raw->op_count, sizeof *raw->ops, compare_ops);
  for (uint32_t i = 0; i < raw->op_count; ++i) {
    if (!split_operands(r, &raw->ops[i]) || !collect_dims(r, &raw->ops[i])) return false;
  }
  return true;
}

/* The places of what an op returns, once its names are known to be right. */
static bool resolve_returns(reading *r, raw_manifest *raw) {
  for (uint32_t i = 0; i < raw->op_count; ++i) {
    op_signature *op = &raw->ops[i].op;
    op->return_count = raw->ops[i].return_count;
    op->returns = kiln_arena_get(r->keep, op->return_count, sizeof *op->returns);
    if (op->returns == NULL) return kiln_out_of_memory(r);
    for (uint32_t k = 0; k < op->return_count; ++k) op->returns[k] = (uint32_t)kiln_tensor_index(op, raw->ops[i].returns[k]);
  }
  return true;
}

static kiln_code read_manifest(reading *r, const char *target, const uint8_t *data, size_t bytes, manifest *out) {
  raw_manifest raw = {0};
  kiln_code code = read_document(r, &KILN_MANIFEST_READER, data, bytes, &raw);
  if (code != KILN_OK) return code;
  if (target != NULL && strcmp(raw.target, target) != 0)
    return kiln_fail(r->error, KILN_SCHEMA, "%s: written for target %s, expected %s; the folders were mixed up.", r->where,
                     raw.target, target);
  if (raw.abi != ABI)
    return kiln_fail(r->error, KILN_SCHEMA, "%s: launch ABI %" PRId64 ", this version drives %d; use the matching Kiln.", r->where,
                     raw.abi, ABI);
  if (!complete_ops(r, &raw) || kiln_check_consistency(r, &raw) != KILN_OK || !resolve_returns(r, &raw)) return r->code;
  return kiln_resolve(r, &raw, out);
}

kiln_code kiln_parse_manifest(kiln_arena *arena, const char *where, const char *target, const uint8_t *data, size_t bytes,
                              manifest *out, kiln_error *error) {
  reading r = {.keep = arena, .staging = kiln_arena_new(), .error = error, .where = where};
  if (r.staging == NULL) return kiln_no_memory(error);
  *out = (manifest){0};
  kiln_code code = read_manifest(&r, target, data, bytes, out);
  kiln_arena_free(r.staging);
  return code;
}
