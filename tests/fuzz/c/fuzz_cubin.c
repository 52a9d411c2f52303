/* Cubins of both layouts. */
#include "prove.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) { return prove("sm_90a", "scaled_sum", data, bytes); }
