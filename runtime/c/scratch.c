/* Scratch: one growing block per stream of a context on CUDA, a few blocks for the calls that run at once on the CPU; and the same
 * once more for scratch that is all zeros between launches.
 *
 * A block is never freed while a graph may use it: once its stream was captured, or the library sealed, growing retires it.
 * Launches that use one stream's block take turns, so that no other call's kernels come between those of a plan. A zeroed block is
 * filled with zeros when it is allocated and never again: each kernel leaves it so. */
#define _GNU_SOURCE
#include "scratch.h"

#include <sched.h>
#include <stdlib.h>

enum { GRAIN = 2 << 20, STREAM_PER_THREAD = 2 /* CU_STREAM_PER_THREAD */ };

bool kiln_pool_try_take(scratch_pool *p) { return !atomic_exchange_explicit(&p->busy, true, memory_order_acquire); }
void kiln_pool_put_back(scratch_pool *p) { atomic_store_explicit(&p->busy, false, memory_order_release); }

/* ---- counters ---- */

static void add_to(_Atomic uint64_t *counter, uint64_t n) { atomic_fetch_add_explicit(counter, n, memory_order_relaxed); }

static void count_block(kiln_library *library, bool zeroed, size_t bytes) {
  scratch_counts *counts = &library->scratch_counts[zeroed];
  add_to(&counts->blocks, 1);
  add_to(&counts->bytes, bytes);
  add_to(&counts->growths, 1);
}

static void discount_block(kiln_library *library, bool zeroed, size_t bytes) {
  scratch_counts *counts = &library->scratch_counts[zeroed];
  atomic_fetch_sub_explicit(&counts->blocks, 1, memory_order_relaxed);
  atomic_fetch_sub_explicit(&counts->bytes, bytes, memory_order_relaxed);
}

/* ---- memory of the device ---- */

/* `wait`: a graph that is captured on the stream may be replayed on one that knows nothing of this one's order. */
static kiln_code allocate_on_device(kiln_library *library, size_t bytes, kiln_stream stream, bool zeroed, bool wait, uintptr_t *out,
                                    kiln_error *error) {
  kiln_code code = kiln_cuda_allocate(library, bytes, stream, out, error);
  if (code != KILN_OK) return code;
  if (zeroed) code = kiln_cuda_fill(library, *out, 0, bytes, stream, error);
  if (code == KILN_OK && wait) code = kiln_cuda_synchronize(library, stream, error);
  if (code != KILN_OK) kiln_cuda_free(library, *out, stream, NULL);
  return code;
}

static kiln_code allocate(kiln_library *library, size_t bytes, kiln_stream stream, bool zeroed, bool wait, uintptr_t *out,
                          kiln_error *error) {
  void *got = NULL;
  if (library->kind == DEVICE_CUDA) {
    kiln_code code = allocate_on_device(library, bytes, stream, zeroed, wait, out, error);
    if (code != KILN_OK) return code;
  } else {
    if (posix_memalign(&got, SCRATCH_ALIGN, bytes) != 0)
      return kiln_fail(error, KILN_MEMORY, "the system has no %zu bytes of memory left for scratch; free some.", bytes);
    if (zeroed) memset(got, 0, bytes);
    *out = (uintptr_t)got;
  }
  count_block(library, zeroed, bytes);
  return KILN_OK;
}

static kiln_code free_block(kiln_library *library, kiln_stream stream, bool zeroed, uintptr_t address, size_t bytes,
                            kiln_error *error) {
  discount_block(library, zeroed, bytes);
  if (library->kind == DEVICE_CUDA) return kiln_cuda_free(library, address, stream, error);
  free((void *)address);
  return KILN_OK;
}

kiln_code kiln_pool_give_up(kiln_library *library, scratch_pool *p, kiln_error *error) {
  if (p->address == 0 || p->callers) return KILN_OK;
  if (library->kind != DEVICE_CUDA || !p->pinned) {
    retired old = {NULL, p->address, p->capacity};
    /* The driver may report an earlier error after it did what it was asked: what was given back once is not given back again. */
    p->address = 0;
    p->capacity = 0;
    return free_block(library, p->stream, p->zeroed, old.address, old.bytes, error);
  }
  retired *r = malloc(sizeof *r);
  if (r == NULL) return kiln_fail(error, KILN_MEMORY, "the system has no memory left; free some.");
  *r = (retired){p->retired, p->address, p->capacity};
  p->retired = r;
  return KILN_OK;
}

kiln_code kiln_pool_grow(kiln_library *library, scratch_pool *p, size_t bytes, kiln_error *error) {
  uintptr_t address;
  size_t size = library->kind == DEVICE_CUDA ? (bytes + GRAIN - 1) / GRAIN * GRAIN : bytes;
  kiln_code code = allocate(library, size, p->stream, p->zeroed, true, &address, error);
  if (code != KILN_OK) return code;
  code = kiln_pool_give_up(library, p, error);
  if (code != KILN_OK) {
    free_block(library, p->stream, p->zeroed, address, size, NULL);
    return code;
  }
  p->address = address;
  p->capacity = size;
  p->callers = p->pinned = false;
  return KILN_OK;
}

/* ---- pools ---- */

kiln_code kiln_pool_add(kiln_library *library, context *c, kiln_stream stream, bool zeroed, scratch_pool **out, kiln_error *error) {
  /* One handle, but another stream in each thread: its block would pass between streams that know nothing of each other's order. */
  if ((uintptr_t)stream == STREAM_PER_THREAD)
    return kiln_fail(error, KILN_UNAVAILABLE,
                     "found stream %d, which is another one in each thread; scratch is handed on along one stream: make one and "
                     "pass it.", STREAM_PER_THREAD);
  scratch_pool *p = calloc(1, sizeof *p);
  if (p == NULL) return kiln_fail(error, KILN_MEMORY, "the system has no memory left; free some.");
  p->context = c;
  p->stream = stream;
  p->zeroed = zeroed;
  atomic_store(&p->busy, true);
  pthread_mutex_lock(&library->lock);
  p->next = atomic_load_explicit(&library->scratch, memory_order_relaxed);
  atomic_store_explicit(&library->scratch, p, memory_order_release);
  pthread_mutex_unlock(&library->lock);
  *out = p;
  return KILN_OK;
}

scratch_pool *kiln_pool_of_stream(kiln_library *library, const context *c, kiln_stream stream, bool zeroed) {
  scratch_pool *p = atomic_load_explicit(&library->scratch, memory_order_acquire);
  while (p != NULL && (p->context != c || p->stream != stream || p->zeroed != zeroed)) p = p->next;
  while (p != NULL && !kiln_pool_try_take(p)) sched_yield();
  return p;
}

/* A free block of the CPU that is big enough, else any free one; NULL if all are in use. */
static scratch_pool *cpu_pool_block(kiln_library *library, size_t bytes, bool zeroed) {
  scratch_pool *found = NULL;
  for (scratch_pool *p = atomic_load_explicit(&library->scratch, memory_order_acquire); p != NULL; p = p->next) {
    if (p->zeroed != zeroed || !kiln_pool_try_take(p)) continue;
    if (p->capacity >= bytes) {
      if (found != NULL) kiln_pool_put_back(found);
      return p;
    }
    if (found != NULL) kiln_pool_put_back(p);
    else found = p;
  }
  return found;
}

/* ---- taking and giving back ---- */

/* What a launch asks for. */
typedef struct {
  const kiln_op *op;
  context *context;
  kiln_stream stream;
  size_t bytes;
  bool zeroed, capturing;
} request_for;

static kiln_code refuse(const request_for *r, const char *why, size_t have, kiln_error *error) {
  return kiln_fail(error, KILN_UNAVAILABLE, "%s: %s growth %s: need %zu have %zu bytes; give the stream more with %s.",
                   r->op->sig->name, r->zeroed ? "zeroed scratch" : "scratch", why, r->bytes, have,
                   r->zeroed ? "kiln_set_zeroed_scratch" : "kiln_set_scratch");
}

static kiln_code find_pool(const request_for *r, scratch_pool **out, kiln_error *error) {
  kiln_library *library = r->op->library;
  *out = library->kind == DEVICE_CUDA ? kiln_pool_of_stream(library, r->context, r->stream, r->zeroed)
                                      : cpu_pool_block(library, r->bytes, r->zeroed);
  if (*out != NULL) return KILN_OK;
  if (kiln_is_sealed(library)) return refuse(r, "of a sealed library", 0, error);
  return kiln_pool_add(library, r->context, r->stream, r->zeroed, out, error);
}

static kiln_code make_fit(const request_for *r, scratch_pool *p, kiln_error *error) {
  if (p->capacity >= r->bytes) {
    add_to(&r->op->library->scratch_counts[r->zeroed].hits, 1);
    return KILN_OK;
  }
  if (p->callers) return refuse(r, "of the caller's buffer", p->capacity, error);
  if (kiln_is_sealed(r->op->library)) return refuse(r, "of a sealed library", p->capacity, error);
  if (r->capturing) return refuse(r, "during graph capture", p->capacity, error);
  return kiln_pool_grow(r->op->library, p, r->bytes, error);
}

static kiln_code poison(const request_for *r, uintptr_t address, kiln_error *error) {
  kiln_library *library = r->op->library;
  if (!library->poison || r->capturing || r->zeroed) return KILN_OK;
  add_to(&library->scratch_counts[r->zeroed].fills, 1);
  if (library->kind == DEVICE_CUDA) return kiln_cuda_fill(library, address, 0xff, r->bytes, r->stream, error);
  memset((void *)address, 0xff, r->bytes);
  return KILN_OK;
}

/* A graph may use what a captured stream uses. A sealed library asks nothing and pins every block it uses. */
static kiln_code take_pool(const request_for *r, scratch_block *out, kiln_error *error) {
  scratch_pool *p = NULL;
  kiln_code code = find_pool(r, &p, error);
  if (code != KILN_OK) return code;
  code = make_fit(r, p, error);
  if (code == KILN_OK) code = poison(r, p->address, error);
  if (code != KILN_OK) {
    kiln_pool_put_back(p);
    return code;
  }
  p->pinned = p->pinned || r->capturing || kiln_is_sealed(r->op->library);
  *out = (scratch_block){p, p->address, p->capacity};
  return KILN_OK;
}

static kiln_code take_fresh(const request_for *r, scratch_block *out, kiln_error *error) {
  if (kiln_is_sealed(r->op->library)) return refuse(r, "of a sealed library without a pool", 0, error);
  scratch_block fresh = {NULL, 0, r->bytes};
  kiln_code code = allocate(r->op->library, r->bytes, r->stream, r->zeroed, false, &fresh.address, error);
  if (code != KILN_OK) return code;
  code = poison(r, fresh.address, error);
  if (code != KILN_OK) free_block(r->op->library, r->stream, r->zeroed, fresh.address, fresh.bytes, NULL);
  else *out = fresh;
  return code;
}

static kiln_code give(kiln_library *library, kiln_stream stream, bool zeroed, const scratch_block *block, kiln_error *error) {
  if (block->pool != NULL) kiln_pool_put_back(block->pool);
  else if (block->address != 0) return free_block(library, stream, zeroed, block->address, block->bytes, error);
  return KILN_OK;
}

/* Always in this order, so that launches that wait for each other's blocks do not wait forever. */
static kiln_code take_both(const kiln_op *op, context *c, kiln_stream stream, size_t scratch, size_t zeroed, scratch_lease *out,
                           kiln_error *error) {
  kiln_library *library = op->library;
  request_for r = {op, c, stream, scratch, false, false};
  bool asks = library->kind == DEVICE_CUDA && (!kiln_is_sealed(library) || library->poison);
  kiln_code (*take)(const request_for *, scratch_block *, kiln_error *) = library->per_call ? take_fresh : take_pool;
  kiln_code code = asks ? kiln_cuda_capturing(library, stream, &r.capturing, error) : KILN_OK;
  if (code == KILN_OK && scratch != 0) code = take(&r, &out->scratch, error);
  if (code != KILN_OK || zeroed == 0) return code;
  r.bytes = zeroed;
  r.zeroed = true;
  code = take(&r, &out->zeroed, error);
  if (code != KILN_OK) give(library, stream, false, &out->scratch, NULL);
  return code;
}

kiln_code kiln_scratch_take(const kiln_op *op, context *c, kiln_stream stream, size_t scratch, size_t zeroed, scratch_lease *out,
                            kiln_error *error) {
  kiln_library *library = op->library;
  bool pushed = false, cuda = library->kind == DEVICE_CUDA;
  *out = (scratch_lease){0};
  kiln_code code = cuda ? kiln_cuda_enter(library, c, &pushed, error) : KILN_OK;
  if (code != KILN_OK) return code;
  code = take_both(op, c, stream, scratch, zeroed, out, error);
  if (cuda) kiln_cuda_leave(library, pushed);
  return code;
}

kiln_code kiln_scratch_give(const kiln_op *op, context *c, kiln_stream stream, scratch_lease *lease, kiln_error *error) {
  kiln_library *library = op->library;
  bool pushed = false, cuda = library->kind == DEVICE_CUDA && library->per_call;
  kiln_code code = cuda ? kiln_cuda_enter(library, c, &pushed, error) : KILN_OK;
  if (code != KILN_OK) return code;
  code = give(library, stream, false, &lease->scratch, error);
  kiln_code other = give(library, stream, true, &lease->zeroed, code == KILN_OK ? error : NULL);
  if (cuda) kiln_cuda_leave(library, pushed);
  return code != KILN_OK ? code : other;
}

/* ---- the end ---- */

static kiln_code free_now(kiln_library *library, const scratch_pool *p, uintptr_t address, size_t bytes, bool reachable,
                          kiln_error *error) {
  discount_block(library, p->zeroed, bytes);
  if (library->kind == DEVICE_CUDA) return reachable ? kiln_cuda_free_now(library, address, error) : KILN_OK;
  free((void *)address);
  return KILN_OK;
}

kiln_code kiln_pool_empty(kiln_library *library, scratch_pool *p, bool reachable, kiln_error *error) {
  kiln_code code = KILN_OK;
  while (p->retired != NULL) {
    retired *r = p->retired;
    p->retired = r->next;
    kiln_code freed = free_now(library, p, r->address, r->bytes, reachable, code == KILN_OK ? error : NULL);
    code = code != KILN_OK ? code : freed;
    free(r);
  }
  if (p->address != 0 && !p->callers) {
    kiln_code freed = free_now(library, p, p->address, p->capacity, reachable, code == KILN_OK ? error : NULL);
    code = code != KILN_OK ? code : freed;
  }
  p->address = 0;
  p->capacity = 0;
  p->callers = p->pinned = false;
  return code;
}

static void close_pool(kiln_library *library, scratch_pool *p, bool forked) {
  bool pushed = false, cuda = library->kind == DEVICE_CUDA;
  bool reachable = !cuda || (!forked && kiln_cuda_enter(library, p->context, &pushed, NULL) == KILN_OK);
  kiln_pool_empty(library, p, reachable, NULL);
  if (cuda && reachable) kiln_cuda_leave(library, pushed);
}

void kiln_scratch_close(kiln_library *library, bool forked) {
  scratch_pool *p = atomic_load(&library->scratch);
  atomic_store(&library->scratch, NULL);
  while (p != NULL) {
    scratch_pool *next = p->next;
    close_pool(library, p, forked);
    free(p);
    p = next;
  }
}
