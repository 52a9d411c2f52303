/* An artifact's bytes, read and held against a kernel that some seeds have. */
#include <string.h>

#include "artifact.h"
#include "fuzz.h"

static void see(void *user, const char *sentence) {
  (void)user;
  EXPECT(strncmp(sentence, "Kernel '", 8) == 0);
}

static inline int prove(const char *target, const char *entry, const uint8_t *data, size_t bytes) {
  kernel_param params[] = {{.kind = PARAM_PTR, .name = "x", .dtype = "f32"}, {.kind = PARAM_SCALAR, .name = "n", .dtype = "i32"}};
  named_count counts[] = {{"registers", 8}, {"code_bytes", 1}};
  op_signature op = {.name = "op"};
  manifest_kernel kernel = {.variant = "v",
                            .entry = entry,
                            .params = params,
                            .param_count = 2,
                            .block = {128, 1, 1},
                            .cluster = {1, 1, 1},
                            .resources = counts,
                            .resource_count = 2,
                            .budget = counts,
                            .budget_count = 2};
  manifest m = {.target = target, .ops = &op, .op_count = 1, .kernels = &kernel, .kernel_count = 1};
  artifact a;
  kiln_error error = {.code = KILN_OK};
  kiln_arena *arena = kiln_arena_new();
  EXPECT(arena != NULL);
  kiln_code code = kiln_artifact_read(arena, target, (span){data, bytes}, &a, &error);
  EXPECT(code == KILN_OK || (code == KILN_INTEGRITY && error.code == code && error.message[0] != 0));
  if (code == KILN_OK) kiln_prove_all(&m, &kernel, &a, see, NULL);
  kiln_arena_free(arena);
  return 0;
}
