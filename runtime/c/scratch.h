/* What the two halves of scratch memory share: calls that take it (scratch.c), and callers who say where it comes from
 * (scratch_set.c). */
#ifndef KILN_SCRATCH_H
#define KILN_SCRATCH_H

#include "run.h"

typedef struct retired { struct retired *next; uintptr_t address; size_t bytes; } retired;

struct scratch_pool {
  scratch_pool *next;
  context *context;
  kiln_stream stream;
  bool zeroed;              /* all zeros between launches; else its bytes are arbitrary */
  _Atomic bool busy;        /* everything below belongs to who set it */
  uintptr_t address;
  size_t capacity;
  bool callers;             /* a buffer of the caller's: never grown, never freed */
  bool pinned;              /* a graph may use it */
  retired *retired;
};

static inline bool kiln_is_sealed(const kiln_library *library) {
  return atomic_load_explicit(&library->sealed, memory_order_acquire);
}
bool kiln_pool_try_take(scratch_pool *p);
void kiln_pool_put_back(scratch_pool *p);
/* The pool of a stream, taken; NULL if there is none. */
scratch_pool *kiln_pool_of_stream(kiln_library *library, const context *c, kiln_stream stream, bool zeroed);
/* Another one, taken. */
kiln_code kiln_pool_add(kiln_library *library, context *c, kiln_stream stream, bool zeroed, scratch_pool **out, kiln_error *error);
/* With the pool taken and its context current: a larger block, or none. */
kiln_code kiln_pool_grow(kiln_library *library, scratch_pool *p, size_t bytes, kiln_error *error);
kiln_code kiln_pool_give_up(kiln_library *library, scratch_pool *p, kiln_error *error);
/* Frees everything, at once and whatever the driver says; without `reachable` only what the system gave. */
kiln_code kiln_pool_empty(kiln_library *library, scratch_pool *p, bool reachable, kiln_error *error);

#endif
