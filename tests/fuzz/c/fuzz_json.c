/* Strict JSON: accepted, or refused as a schema error with a message. */
#include "fuzz.h"
#include "internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  json_value value;
  kiln_error error = {.code = KILN_OK};
  kiln_arena *arena = kiln_arena_new();
  EXPECT(arena != NULL);
  kiln_code code = kiln_json_parse(arena, "X.json", data, bytes, &value, &error);
  EXPECT(code == KILN_OK || (code == KILN_SCHEMA && error.code == code && error.message[0] != 0));
  kiln_arena_free(arena);
  return 0;
}
