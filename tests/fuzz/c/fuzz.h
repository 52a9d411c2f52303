/* What a libFuzzer harness and the plain driver agree on. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* A code that the call may give back; anything else is a finding. */
#define EXPECT(condition)         \
  do {                            \
    if (!(condition)) abort();    \
  } while (0)
