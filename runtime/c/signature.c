/* How an op is called, as text: what generated launchers compare with what they were written for. */
#include "run.h"

static void put_operand(sink *s, const op_signature *sig, uint32_t tensor, uint32_t scalar, bool is_tensor) {
  static const char *const ROLES[] = {[ROLE_IN] = "in", [ROLE_INOUT] = "inout", [ROLE_OUT] = "out"};
  const tensor_operand *t = &sig->tensors[tensor];
  if (is_tensor) kiln_put(s, "%s%s %s", ROLES[t->role], t->optional ? "?" : "", t->name);
  else kiln_put(s, "%s %s", sig->scalars[scalar].dtype, sig->scalars[scalar].name);
}

kiln_code kiln_op_signature(const kiln_op *op, char *text, size_t size, size_t *needed, kiln_error *error) {
  if (op == NULL) return kiln_fail(error, KILN_CONTRACT, "kiln_op_signature: found no op; pass one of kiln_find.");
  const op_signature *sig = op->sig;
  sink s = {text, size, 0};
  kiln_put(&s, "%s(", sig->name);
  for (uint32_t i = 0, tensors = 0, scalars = 0; i < sig->operand_count; i++) {
    kiln_put(&s, "%s", i ? ", " : "");
    put_operand(&s, sig, tensors, scalars, sig->is_tensor[i]);
    if (sig->is_tensor[i]) tensors++;
    else scalars++;
  }
  for (uint32_t i = 0; i < sig->attr_count; i++) kiln_put(&s, "%s%s", i ? ", " : "; ", sig->attrs[i].name);
  kiln_put(&s, ")");
  if (needed != NULL) *needed = s.used + 1;
  return KILN_OK;
}
