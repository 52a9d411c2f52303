/* Working memory: bytes handed out in order and freed as a whole. It begins on a call's stack; only where `grow` says so does it
 * take more from the system, so that a sealed library never allocates. */
#include "run.h"

#include <stdlib.h>

struct work_block { work_block *next; _Alignas(16) char bytes[]; };

static bool add_block(work *w, size_t bytes) {
  size_t size = bytes > 2048 ? bytes : 2048;
  work_block *block = malloc(sizeof *block + size);
  if (block == NULL) {
    w->heap = true;
    return false;
  }
  block->next = w->blocks;
  w->blocks = block;
  w->at = block->bytes;
  w->end = block->bytes + size;
  return true;
}

void *kiln_work_get(work *w, size_t count, size_t size) {
  size_t bytes;
  if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX / 2) return NULL;
  bytes = (bytes + 15) & ~(size_t)15;
  if (bytes == 0) bytes = 16;
  if (w->at == NULL || bytes > (size_t)(w->end - w->at)) {
    if (!w->grow || !add_block(w, bytes)) return NULL;
  }
  void *got = w->at;
  w->at += bytes;
  return memset(got, 0, bytes);
}

kiln_code kiln_work_failed(const work *w, const char *op, kiln_error *error) {
  if (w->heap || w->grow) return kiln_fail(error, KILN_MEMORY, "%s: the system has no memory left; free some.", op);
  return kiln_fail(error, KILN_UNAVAILABLE,
                   "%s: this call needs more working memory than a sealed library may take; run or bind it once before sealing.",
                       op);
}

void kiln_work_free(work *w) {
  while (w->blocks != NULL) {
    work_block *next = w->blocks->next;
    free(w->blocks);
    w->blocks = next;
  }
  w->at = w->end = NULL;
}
