/* Scratch: one growing block per stream of a context on CUDA, a few blocks for the calls that run at once on the CPU.
 *
 * A block is never freed while a graph may use it: once its stream was captured, or the library sealed, growing retires it.
 * Launches that use one stream's block take turns, so that no other call's kernels come between those of a plan. */
#define _GNU_SOURCE
#include "run.h"

#include <sched.h>
#include <stdlib.h>

typedef struct retired { struct retired *next; uintptr_t address; } retired;

struct scratch_pool {
  scratch_pool *next;
  context *context;
  kiln_stream stream;
  _Atomic bool busy;        /* everything below belongs to who set it */
  uintptr_t address;
  size_t capacity;
  bool callers;             /* a buffer of the caller's: never grown, never freed */
  bool pinned;              /* a graph may use it */
  retired *retired;
};

enum { GRAIN = 2 << 20 };

static bool try_take(scratch_pool *p) { return !atomic_exchange_explicit(&p->busy, true, memory_order_acquire); }
static void put_back(scratch_pool *p) { atomic_store_explicit(&p->busy, false, memory_order_release); }

static bool is_sealed(const kiln_library *library) { return atomic_load_explicit(&library->sealed, memory_order_acquire); }

/* ---- memory of the device ---- */

static kiln_code allocate(kiln_library *library, size_t bytes, kiln_stream stream, uintptr_t *out, kiln_error *error) {
  if (library->kind == DEVICE_CUDA) return kiln_cuda_allocate(library, bytes, stream, out, error);
  void *got = NULL;
  if (posix_memalign(&got, SCRATCH_ALIGN, bytes) != 0)
    return kiln_fail(error, KILN_MEMORY, "the system has no %zu bytes of memory left for scratch; free some.", bytes);
  *out = (uintptr_t)got;
  return KILN_OK;
}

static kiln_code give_up(kiln_library *library, scratch_pool *p, kiln_error *error) {
  if (p->address == 0 || p->callers) return KILN_OK;
  if (library->kind != DEVICE_CUDA) {
    free((void *)p->address);
    return KILN_OK;
  }
  if (!p->pinned) {
    uintptr_t old = p->address;
    /* The driver may report an earlier error after it did what it was asked: what was given back once is not given back again. */
    p->address = 0;
    p->capacity = 0;
    return kiln_cuda_free(library, old, p->stream, error);
  }
  retired *r = malloc(sizeof *r);
  if (r == NULL) return kiln_fail(error, KILN_MEMORY, "the system has no memory left; free some.");
  *r = (retired){p->retired, p->address};
  p->retired = r;
  return KILN_OK;
}

/* With the pool taken and its context current. */
static kiln_code grow(kiln_library *library, scratch_pool *p, size_t bytes, kiln_error *error) {
  uintptr_t address;
  size_t size = library->kind == DEVICE_CUDA ? (bytes + GRAIN - 1) / GRAIN * GRAIN : bytes;
  kiln_code code = allocate(library, size, p->stream, &address, error);
  if (code != KILN_OK) return code;
  code = give_up(library, p, error);
  if (code != KILN_OK) {
    if (library->kind == DEVICE_CUDA) kiln_cuda_free(library, address, p->stream, NULL);
    else free((void *)address);
    return code;
  }
  p->address = address;
  p->capacity = size;
  p->callers = p->pinned = false;
  return KILN_OK;
}

/* ---- pools ---- */

static kiln_code new_pool(kiln_library *library, context *c, kiln_stream stream, scratch_pool **out, kiln_error *error) {
  scratch_pool *p = calloc(1, sizeof *p);
  if (p == NULL) return kiln_fail(error, KILN_MEMORY, "the system has no memory left; free some.");
  p->context = c;
  p->stream = stream;
  atomic_store(&p->busy, true);
  pthread_mutex_lock(&library->lock);
  p->next = atomic_load_explicit(&library->scratch, memory_order_relaxed);
  atomic_store_explicit(&library->scratch, p, memory_order_release);
  pthread_mutex_unlock(&library->lock);
  *out = p;
  return KILN_OK;
}

/* The pool of a stream, taken; NULL if there is none. */
static scratch_pool *stream_pool(kiln_library *library, const context *c, kiln_stream stream) {
  scratch_pool *p = atomic_load_explicit(&library->scratch, memory_order_acquire);
  while (p != NULL && (p->context != c || p->stream != stream)) p = p->next;
  while (p != NULL && !try_take(p)) sched_yield();
  return p;
}

/* A free block of the CPU that is big enough, else any free one; NULL if all are in use. */
static scratch_pool *cpu_pool_block(kiln_library *library, size_t bytes) {
  scratch_pool *found = NULL;
  for (scratch_pool *p = atomic_load_explicit(&library->scratch, memory_order_acquire); p != NULL; p = p->next) {
    if (!try_take(p)) continue;
    if (p->capacity >= bytes) {
      if (found != NULL) put_back(found);
      return p;
    }
    if (found != NULL) put_back(p);
    else found = p;
  }
  return found;
}

static kiln_code find_pool(kiln_library *library, context *c, kiln_stream stream, size_t bytes, scratch_pool **out,
                           kiln_error *error) {
  *out = library->kind == DEVICE_CUDA ? stream_pool(library, c, stream) : cpu_pool_block(library, bytes);
  if (*out != NULL) return KILN_OK;
  if (is_sealed(library)) return KILN_UNAVAILABLE;
  return new_pool(library, c, stream, out, error);
}

/* ---- taking and giving back ---- */

static kiln_code refuse(const kiln_op *op, const char *why, size_t need, size_t have, kiln_error *error) {
  return kiln_fail(error, KILN_UNAVAILABLE,
                   "%s: scratch growth %s: need %zu have %zu bytes; give the stream more with kiln_set_scratch.",
                   op->sig->name, why, need, have);
}

static kiln_code make_fit(const kiln_op *op, scratch_pool *p, size_t bytes, bool capturing, kiln_error *error) {
  if (p->capacity >= bytes) return KILN_OK;
  if (p->callers) return refuse(op, "of the caller's buffer", bytes, p->capacity, error);
  if (is_sealed(op->library)) return refuse(op, "of a sealed library", bytes, p->capacity, error);
  if (capturing) return refuse(op, "during graph capture", bytes, p->capacity, error);
  return grow(op->library, p, bytes, error);
}

static kiln_code poison(kiln_library *library, uintptr_t address, size_t bytes, kiln_stream stream, bool capturing,
                        kiln_error *error) {
  if (!library->poison || capturing) return KILN_OK;
  if (library->kind == DEVICE_CUDA) return kiln_cuda_fill(library, address, bytes, stream, error);
  memset((void *)address, 0xff, bytes);
  return KILN_OK;
}

/* A graph may use what a captured stream uses. A sealed library asks nothing and pins every block it uses. */
static kiln_code take_pool(const kiln_op *op, context *c, kiln_stream stream, size_t bytes, scratch_lease *out, kiln_error *error) {
  kiln_library *library = op->library;
  bool capturing = false, asks = library->kind == DEVICE_CUDA && (!is_sealed(library) || library->poison);
  kiln_code code = asks ? kiln_cuda_capturing(library, stream, &capturing, error) : KILN_OK;
  if (code != KILN_OK) return code;
  scratch_pool *p = NULL;
  code = find_pool(library, c, stream, bytes, &p, error);
  if (code == KILN_UNAVAILABLE) return refuse(op, "of a sealed library", bytes, 0, error);
  if (code != KILN_OK) return code;
  code = make_fit(op, p, bytes, capturing, error);
  if (code == KILN_OK) code = poison(library, p->address, bytes, stream, capturing, error);
  if (code != KILN_OK) {
    put_back(p);
    return code;
  }
  p->pinned = p->pinned || capturing || is_sealed(library);
  *out = (scratch_lease){p, p->address};
  return KILN_OK;
}

static kiln_code take_fresh(const kiln_op *op, kiln_stream stream, size_t bytes, scratch_lease *out, kiln_error *error) {
  kiln_library *library = op->library;
  bool capturing = false;
  *out = (scratch_lease){NULL, 0};
  if (is_sealed(library)) return refuse(op, "of a sealed library without a pool", bytes, 0, error);
  kiln_code code = library->kind == DEVICE_CUDA && library->poison ? kiln_cuda_capturing(library, stream, &capturing,
                                                                                         error) : KILN_OK;
  if (code == KILN_OK) code = allocate(library, bytes, stream, &out->address, error);
  if (code == KILN_OK) code = poison(library, out->address, bytes, stream, capturing, error);
  return code;
}

static kiln_code free_fresh(kiln_library *library, kiln_stream stream, uintptr_t address, kiln_error *error) {
  if (address == 0) return KILN_OK;
  if (library->kind == DEVICE_CUDA) return kiln_cuda_free(library, address, stream, error);
  free((void *)address);
  return KILN_OK;
}

kiln_code kiln_scratch_take(const kiln_op *op, context *c, kiln_stream stream, size_t bytes, scratch_lease *out,
                            kiln_error *error) {
  kiln_library *library = op->library;
  bool pushed = false, cuda = library->kind == DEVICE_CUDA;
  kiln_code code = cuda ? kiln_cuda_enter(library, c, &pushed, error) : KILN_OK;
  if (code != KILN_OK) return code;
  if (!library->per_call) {
    code = take_pool(op, c, stream, bytes, out, error);
  } else {
    code = take_fresh(op, stream, bytes, out, error);
    if (code != KILN_OK) free_fresh(library, stream, out->address, NULL);
  }
  if (cuda) kiln_cuda_leave(library, pushed);
  return code;
}

kiln_code kiln_scratch_give(const kiln_op *op, context *c, kiln_stream stream, scratch_lease *lease, kiln_error *error) {
  kiln_library *library = op->library;
  if (lease->pool != NULL) {
    put_back(lease->pool);
    return KILN_OK;
  }
  bool pushed = false, cuda = library->kind == DEVICE_CUDA;
  kiln_code code = cuda ? kiln_cuda_enter(library, c, &pushed, error) : KILN_OK;
  if (code == KILN_OK) code = free_fresh(library, stream, lease->address, error);
  if (cuda) kiln_cuda_leave(library, pushed);
  return code;
}

/* ---- what a caller sets ---- */

static kiln_code set_buffer(kiln_library *library, scratch_pool *p, void *buffer, size_t bytes, kiln_error *error) {
  p->pinned = p->pinned || is_sealed(library);
  if (buffer == NULL) return p->capacity >= bytes && !p->callers ? KILN_OK : grow(library, p, bytes ? bytes : 1, error);
  kiln_code code = give_up(library, p, error);
  if (code != KILN_OK) return code;
  p->address = (uintptr_t)buffer;
  p->capacity = bytes;
  p->callers = true;
  return KILN_OK;
}

static kiln_code set_on_device(kiln_library *library, context *c, kiln_stream stream, void *buffer, size_t bytes,
                               kiln_error *error) {
  bool capturing;
  kiln_code code = kiln_cuda_capturing(library, stream, &capturing, error);
  if (code != KILN_OK) return code;
  if (capturing) return kiln_fail(error, KILN_UNAVAILABLE, "this stream is being captured; set its scratch before that.");
  scratch_pool *p = stream_pool(library, c, stream);
  if (p == NULL) code = new_pool(library, c, stream, &p, error);
  if (code != KILN_OK) return code;
  code = set_buffer(library, p, buffer, bytes, error);
  put_back(p);
  return code;
}

kiln_code kiln_set_scratch(kiln_library *library, kiln_stream stream, void *buffer, size_t bytes, kiln_error *error) {
  context *c;
  bool pushed;
  if (library == NULL) return kiln_fail(error, KILN_CONTRACT, "found no library, expected an open one.");
  kiln_code code = kiln_check_alive(library, error);
  if (code != KILN_OK) return code;
  if (library->kind == DEVICE_PRETEND) return kiln_fail(error, KILN_UNAVAILABLE, "%s device has no memory.", library->label);
  if ((uintptr_t)buffer % SCRATCH_ALIGN != 0)
    return kiln_fail(error, KILN_CONTRACT, "the scratch buffer is not aligned to %d bytes; pass one that is.", SCRATCH_ALIGN);
  if (library->kind == DEVICE_CPU) {
    scratch_pool *p = NULL;
    if (stream != NULL || buffer != NULL) return kiln_fail(error, KILN_CONTRACT,
                                                           "on the CPU, scratch has no stream or buffer; pass NULL.");
    code = new_pool(library, NULL, NULL, &p, error);
    if (code != KILN_OK) return code;
    code = grow(library, p, bytes ? bytes : 1, error);
    put_back(p);
    return code;
  }
  code = kiln_current_context(library, &c, error);
  if (code == KILN_OK) code = kiln_cuda_enter(library, c, &pushed, error);
  if (code != KILN_OK) return code;
  code = set_on_device(library, c, stream, buffer, bytes, error);
  kiln_cuda_leave(library, pushed);
  return code;
}

/* ---- the end ---- */

static void free_pool(kiln_library *library, scratch_pool *p, bool forked) {
  bool pushed = false, cuda = library->kind == DEVICE_CUDA;
  bool reachable = !cuda || (!forked && kiln_cuda_enter(library, p->context, &pushed, NULL) == KILN_OK);
  while (p->retired != NULL) {
    retired *r = p->retired;
    p->retired = r->next;
    if (reachable) kiln_cuda_free_now(library, r->address, NULL);
    free(r);
  }
  if (p->address != 0 && !p->callers) {
    if (!cuda) free((void *)p->address);
    else if (reachable) kiln_cuda_free_now(library, p->address, NULL);
  }
  if (cuda && reachable) kiln_cuda_leave(library, pushed);
}

void kiln_scratch_close(kiln_library *library, bool forked) {
  scratch_pool *p = atomic_load(&library->scratch);
  atomic_store(&library->scratch, NULL);
  while (p != NULL) {
    scratch_pool *next = p->next;
    free_pool(library, p, forked);
    free(p);
    p = next;
  }
}
