/* A document as a manifest and as an index; of a good manifest every index must lie in its table. */
#include "fuzz.h"
#include "internal.h"

static void check_kernel(const manifest *m, const manifest_kernel *k) {
  EXPECT(k->op < m->op_count);
  for (uint32_t i = 0; i < k->param_count; ++i) {
    const kernel_param *p = &k->params[i];
    EXPECT(p->tensor < (int32_t)m->ops[k->op].tensor_count && p->scratch < (int32_t)k->scratch_count);
    EXPECT(p->kind != PARAM_PTR || (p->tensor >= 0) != (p->scratch >= 0));
  }
}

static void check_plan(const manifest *m, const manifest_plan *p) {
  EXPECT(p->op < m->op_count);
  for (uint32_t i = 0; i < p->step_count; ++i) {
    EXPECT(p->steps[i].op < m->op_count && p->steps[i].op != p->op);
    for (uint32_t k = 0; k < m->ops[p->steps[i].op].tensor_count; ++k) {
      const step_bind *b = &p->steps[i].bind[k];
      EXPECT(b->kind == BIND_NOTHING || b->index < (b->kind == BIND_TEMP ? p->temp_count : m->ops[p->op].tensor_count));
    }
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  manifest m;
  tree_index index;
  kiln_error error = {.code = KILN_OK};
  kiln_arena *arena = kiln_arena_new();
  EXPECT(arena != NULL);
  kiln_code code = kiln_parse_manifest(arena, "MANIFEST.json", NULL, data, bytes, &m, &error);
  EXPECT(code == KILN_OK || (code == KILN_SCHEMA && error.code == code && error.message[0] != 0));
  for (uint32_t i = 0; code == KILN_OK && i < m.kernel_count; ++i) check_kernel(&m, &m.kernels[i]);
  for (uint32_t i = 0; code == KILN_OK && i < m.plan_count; ++i) check_plan(&m, &m.plans[i]);
  code = kiln_parse_index(arena, "INDEX.json", data, bytes, &index, &error);
  EXPECT(code == KILN_OK || (code == KILN_SCHEMA && error.code == code));
  kiln_arena_free(arena);
  return 0;
}
