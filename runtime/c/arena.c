/* Memory that is given back as a whole: blocks in a list, each handed out from its start to its end. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* Under AddressSanitizer each piece has a block of its own and of its very size, so that an overrun is seen. */
#if !defined(ALONE) && defined(__SANITIZE_ADDRESS__)
#define ALONE 1
#elif !defined(ALONE) && defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ALONE 1
#endif
#endif
#ifndef ALONE
#define ALONE 0
#endif

enum { ALIGN = 16, FIRST_BLOCK = 4096, LARGEST_BLOCK = 1 << 20 };

typedef struct block {
  struct block *next;
  size_t used, room;
} block;

struct kiln_arena {
  block *blocks; /* the newest first: it is the one with room */
  size_t grow;
};

/* Bytes stand behind the header, aligned for every type. */
static const size_t HEADER = (sizeof(block) + ALIGN - 1) / ALIGN * ALIGN;

kiln_arena *kiln_arena_new(void) {
  kiln_arena *arena = calloc(1, sizeof *arena);
  if (arena != NULL) arena->grow = FIRST_BLOCK;
  return arena;
}

static block *add_block(kiln_arena *arena, size_t least) {
  size_t room = ALONE || least > arena->grow ? least : arena->grow;
  if (arena->grow < LARGEST_BLOCK) arena->grow *= 2;
  block *made = calloc(1, HEADER + room);
  if (made == NULL) return NULL;
  made->room = room;
  made->next = arena->blocks;
  arena->blocks = made;
  return made;
}

void *kiln_arena_get(kiln_arena *arena, size_t count, size_t size) {
  if (arena == NULL || (size != 0 && count > (SIZE_MAX / 2 - HEADER) / size)) return NULL;
  size_t bytes = ALONE ? count * size : (count * size + ALIGN - 1) / ALIGN * ALIGN;
  block *from = arena->blocks;
  if (ALONE || from == NULL || from->room - from->used < bytes) from = add_block(arena, bytes);
  if (from == NULL) return NULL;
  void *out = (char *)from + HEADER + from->used;
  from->used += bytes;
  return out;
}

const char *kiln_arena_text(kiln_arena *arena, const char *text, size_t bytes) {
  if (bytes == SIZE_MAX) return NULL;
  char *out = kiln_arena_get(arena, bytes + 1, 1);
  if (out != NULL && bytes != 0) memcpy(out, text, bytes);
  return out;
}

void kiln_arena_free(kiln_arena *arena) {
  if (arena == NULL) return;
  for (block *next, *at = arena->blocks; at != NULL; at = next) {
    next = at->next;
    free(at);
  }
  free(arena);
}
