/* A tree as an archive: refused, or looked through to the end. A checksum would stop nearly every mutation, so it is set right
 * first. */
#include <stdio.h>
#include <string.h>

#include "fuzz.h"
#include "internal.h"

static void see(void *user, const char *file, const char *why) {
  (void)user;
  EXPECT(file[0] != 0 && why[0] != 0);
}

static void set_sums(uint8_t *data, size_t bytes) {
  for (size_t at = 0; at + 512 <= bytes; at += 512) {
    unsigned sum = 8 * ' ';
    if (memcmp(data + at + 257, "ustar", 5) != 0) continue;
    for (size_t i = 0; i < 512; ++i) sum += i < 148 || i >= 156 ? data[at + i] : 0;
    snprintf((char *)data + at + 148, 8, "%06o", sum);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  uint8_t *copy = malloc(bytes + 1);
  kiln_tree *tree;
  uint32_t count = 0;
  kiln_error error = {.code = KILN_OK};
  EXPECT(copy != NULL);
  memcpy(copy, data, bytes);
  set_sums(copy, bytes);
  kiln_code code = kiln_tree_embedded(copy, bytes, &tree, &error);
  EXPECT(code == KILN_OK || (code == KILN_INTEGRITY && error.code == code && error.message[0] != 0));
  if (code == KILN_OK) EXPECT(kiln_tree_verify(tree, NULL, see, NULL, &count, &error) == KILN_OK);
  kiln_tree_close(tree);
  free(copy);
  return 0;
}
