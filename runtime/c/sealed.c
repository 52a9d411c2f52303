/* Decisions of shapes that a sealed library meets: a table of fixed size, all of whose memory is taken when the library is sealed.
 * Deciding rms_norm took 1.5 us beside 0.35 us for the rest of kiln_run, a plan of two ops 3.9 us (on a driver that does nothing).
 *
 * A slot's `users` counts the calls that use its decision; who finds 0 may set -1, and the slot is its own until it sets another
 * number. So no call waits, and none takes a lock; two that meet a shape at once may each decide it. */
#include "run.h"

#include <stdlib.h>

/* A test may set other numbers. */
#ifndef KILN_SEALED_SETS
#define KILN_SEALED_SETS 64
#endif
enum { WAYS = 4, SPACE = 16 << 10 }; /* plans of two ops take up to 9 KiB */

typedef struct {
  _Atomic int32_t users;
  const kiln_op *op;      /* NULL: empty */
  decision decision;
  _Alignas(16) char space[SPACE];
} slot;

struct sealed_table {
  _Atomic uint32_t next;  /* where the next search for a victim starts */
  slot slots[KILN_SEALED_SETS][WAYS];
};

sealed_table *kiln_sealed_new(void) {
  sealed_table *table = malloc(sizeof *table);
  /* Written now, so that no launch waits for the system to find the pages. */
  return table != NULL ? memset(table, 0, sizeof *table) : NULL;
}

void kiln_sealed_free(sealed_table *table) { free(table); }

static bool pin(slot *s) {
  int32_t users = atomic_load_explicit(&s->users, memory_order_relaxed);
  while (users >= 0)
    if (atomic_compare_exchange_weak_explicit(&s->users, &users, users + 1, memory_order_acquire, memory_order_relaxed)) return true;
  return false;
}

static void unpin(slot *s) { atomic_fetch_sub_explicit(&s->users, 1, memory_order_release); }

static slot *claim(sealed_table *table, slot *ways) {
  uint32_t start = atomic_fetch_add_explicit(&table->next, 1, memory_order_relaxed);
  for (uint32_t i = 0; i < WAYS; i++) {
    slot *s = &ways[(start + i) % WAYS];
    int32_t idle = 0;
    if (atomic_compare_exchange_strong_explicit(&s->users, &idle, -1, memory_order_acquire, memory_order_relaxed)) return s;
  }
  return NULL;
}

static kiln_code decide_into(slot *s, const kiln_op *op, const operands *o, const wanted *asked, uint64_t hash,
                             const uint64_t *key, uint32_t words, work *w) {
  decision *d = &s->decision;
  *d = (decision){.hash = hash, .key_words = words, .memory = {s->space, s->space + sizeof s->space, NULL, false, false}};
  s->op = NULL;
  kiln_error error; /* told again by the caller's own attempt */
  char *mark = w->at;
  d->key = kiln_work_get(&d->memory, words, sizeof *d->key);
  if (d->key == NULL) return KILN_UNAVAILABLE;
  memcpy(d->key, key, words * sizeof *key);
  kiln_code code = kiln_decide_anew(op, o, asked, w, d, &error);
  w->at = mark;
  if (code == KILN_OK) s->op = op;
  return code;
}

const decision *kiln_sealed_decide(sealed_table *table, const kiln_op *op, const operands *o, const wanted *asked, uint64_t hash,
                                   const uint64_t *key, uint32_t words, work *w, void **held) {
  slot *ways = table->slots[(hash >> 32 ^ hash ^ (uintptr_t)op >> 4) % KILN_SEALED_SETS];
  for (uint32_t i = 0; i < WAYS; i++) {
    slot *s = &ways[i];
    if (!pin(s)) continue;
    if (s->op == op && kiln_is_key(&s->decision, hash, key, words)) {
      *held = s;
      return &s->decision;
    }
    unpin(s);
  }
  slot *s = claim(table, ways);
  if (s == NULL) return NULL;
  bool good = decide_into(s, op, o, asked, hash, key, words, w) == KILN_OK;
  atomic_store_explicit(&s->users, good ? 1 : 0, memory_order_release);
  *held = good ? s : NULL;
  return good ? &s->decision : NULL;
}

void kiln_sealed_done(void *held) {
  if (held != NULL) unpin(held);
}
