/* Shared objects of both machines. */
#include "prove.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) { return prove("cpu-x86_64", "doubled", data, bytes); }
