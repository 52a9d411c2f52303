/* Runs a harness where there is no libFuzzer: `driver RUNS FILE...` tries each file as it is, then RUNS seeded mutations of them,
 * and says how many ran and which took longest. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "fuzz.h"

typedef struct { uint8_t *data; size_t bytes; } seed;

static uint64_t state = 88172645463325252u;
static size_t below(size_t limit) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return limit == 0 ? 0 : (size_t)(state % limit);
}

static seed read_seed(const char *path) {
  FILE *f = fopen(path, "rb");
  seed s = {malloc(1 << 24), 0};
  if (f == NULL || s.data == NULL) exit(2);
  s.bytes = fread(s.data, 1, 1 << 24, f);
  fclose(f);
  return s;
}

/* A few changes: a byte, a run of another seed, a piece less, a number of eight bytes. */
static size_t mutate(const seed *from, const seed *other, uint8_t *out) {
  size_t bytes = from->bytes;
  memcpy(out, from->data, bytes);
  for (size_t n = 1 + below(4); n > 0 && bytes > 8; --n) {
    size_t at = below(bytes - 8), length = 1 + below(24);
    switch (below(5)) {
      case 0: out[at] = (uint8_t)below(256); break;
      case 1: out[at] ^= (uint8_t)(1 << below(8)); break;
      case 2:
        if (length > bytes - at) length = bytes - at;
        memmove(out + at, out + at + length, bytes - at - length);
        bytes -= length;
        break;
      case 3:
        if (length < other->bytes && length < bytes - at) memcpy(out + at, other->data + below(other->bytes - length), length);
        break;
      default: memcpy(out + at, &(uint64_t){below(3) ? (uint64_t)1 << below(64) : bytes}, 8); break;
    }
  }
  return bytes;
}

/* Of CPU time: a machine that is busy with something else slows no input down. */
static double seconds(void) { return (double)clock() / CLOCKS_PER_SEC; }

int main(int argc, char **argv) {
  int count = argc - 2;
  if (count < 1) return fprintf(stderr, "usage: %s RUNS FILE...\n", argv[0]), 2;
  seed *seeds = calloc((size_t)count, sizeof *seeds);
  uint8_t *buffer = malloc(1 << 24);
  double slowest = 0;
  if (seeds == NULL || buffer == NULL) return 2;
  for (int i = 0; i < count; ++i) {
    seeds[i] = read_seed(argv[2 + i]);
    LLVMFuzzerTestOneInput(seeds[i].data, seeds[i].bytes);
  }
  long runs = strtol(argv[1], NULL, 10);
  for (long i = 0; i < runs; ++i) {
    size_t bytes = mutate(&seeds[below((size_t)count)], &seeds[below((size_t)count)], buffer);
    uint8_t *exact = malloc(bytes + !bytes); /* of its very size: an overrun is seen */
    double began = seconds();
    if (exact == NULL) return 2;
    memcpy(exact, buffer, bytes);
    LLVMFuzzerTestOneInput(exact, bytes);
    free(exact);
    if (seconds() - began > slowest) slowest = seconds() - began;
  }
  printf("%ld executions, the slowest took %.3f s\n", runs + count, slowest);
  for (int i = 0; i < count; ++i) free(seeds[i].data);
  free(seeds);
  free(buffer);
  return 0;
}
