/* What a caller may say of scratch memory: a buffer of its own, how much the library's own has, and that a stream's is over. */
#include "scratch.h"

#include <sched.h>

static const size_t MOST_BYTES = (size_t)1 << 48; /* a kernel asks for fewer, and blocks are rounded up */

/* With the pool taken and its context current. */
static kiln_code set_buffer(kiln_library *library, scratch_pool *p, void *buffer, size_t bytes, kiln_error *error) {
  p->pinned = p->pinned || kiln_is_sealed(library);
  if (buffer == NULL)
    return p->capacity >= bytes && !p->callers ? KILN_OK : kiln_pool_grow(library, p, bytes ? bytes : 1, error);
  kiln_code code = kiln_pool_give_up(library, p, error);
  if (code != KILN_OK) return code;
  p->address = (uintptr_t)buffer;
  p->capacity = bytes;
  p->callers = true;
  return KILN_OK;
}

static kiln_code check_capture(kiln_library *library, kiln_stream stream, kiln_error *error) {
  bool capturing;
  kiln_code code = kiln_cuda_capturing(library, stream, &capturing, error);
  if (code != KILN_OK || !capturing) return code;
  return kiln_fail(error, KILN_UNAVAILABLE, "this stream is being captured; set its scratch before that.");
}

static kiln_code set_on_device(kiln_library *library, context *c, kiln_stream stream, bool zeroed, void *buffer, size_t bytes,
                               kiln_error *error) {
  kiln_code code = check_capture(library, stream, error);
  if (code != KILN_OK) return code;
  scratch_pool *p = kiln_pool_of_stream(library, c, stream, zeroed);
  if (p == NULL) code = kiln_pool_add(library, c, stream, zeroed, &p, error);
  if (code != KILN_OK) return code;
  code = set_buffer(library, p, buffer, bytes, error);
  kiln_pool_put_back(p);
  return code;
}

static kiln_code add_on_cpu(kiln_library *library, bool zeroed, size_t bytes, kiln_error *error) {
  scratch_pool *p = NULL;
  kiln_code code = kiln_pool_add(library, NULL, NULL, zeroed, &p, error);
  if (code != KILN_OK) return code;
  code = kiln_pool_grow(library, p, bytes ? bytes : 1, error);
  kiln_pool_put_back(p);
  return code;
}

/* A library that is there, and not only pretended. */
static kiln_code check_device(const kiln_library *library, kiln_error *error) {
  if (library == NULL) return kiln_fail(error, KILN_CONTRACT, "found no library, expected an open one.");
  kiln_code code = kiln_check_alive(library, error);
  if (code != KILN_OK || library->kind != DEVICE_PRETEND) return code;
  return kiln_fail(error, KILN_UNAVAILABLE, "%s device has no memory.", library->label);
}

static kiln_code set(kiln_library *library, kiln_stream stream, bool zeroed, void *buffer, size_t bytes, kiln_error *error) {
  context *c;
  bool pushed;
  kiln_code code = check_device(library, error);
  if (code != KILN_OK) return code;
  if ((uintptr_t)buffer % SCRATCH_ALIGN != 0)
    return kiln_fail(error, KILN_CONTRACT, "the scratch buffer is not aligned to %d bytes; pass one that is.", SCRATCH_ALIGN);
  if (bytes >= MOST_BYTES)
    return kiln_fail(error, KILN_CONTRACT, "found %zu bytes of scratch, expected fewer than 2^48.", bytes);
  if (library->kind == DEVICE_CPU) {
    if (stream == NULL && buffer == NULL) return add_on_cpu(library, zeroed, bytes, error);
    return kiln_fail(error, KILN_CONTRACT, "on the CPU, scratch has no stream or buffer; pass NULL.");
  }
  code = kiln_current_context(library, &c, error);
  if (code == KILN_OK) code = kiln_cuda_enter(library, c, &pushed, error);
  if (code != KILN_OK) return code;
  code = set_on_device(library, c, stream, zeroed, buffer, bytes, error);
  kiln_cuda_leave(library, pushed);
  return code;
}

kiln_code kiln_set_scratch(kiln_library *library, kiln_stream stream, void *buffer, size_t bytes, kiln_error *error) {
  return set(library, stream, false, buffer, bytes, error);
}

kiln_code kiln_set_zeroed_scratch(kiln_library *library, kiln_stream stream, void *buffer, size_t bytes, kiln_error *error) {
  return set(library, stream, true, buffer, bytes, error);
}

/* ---- release ---- */

static kiln_code empty_all(kiln_library *library, const context *c, kiln_stream stream, kiln_error *error) {
  kiln_code code = KILN_OK;
  for (scratch_pool *p = atomic_load_explicit(&library->scratch, memory_order_acquire); p != NULL; p = p->next) {
    if (library->kind == DEVICE_CUDA && (p->context != c || p->stream != stream)) continue;
    while (!kiln_pool_try_take(p)) sched_yield();
    kiln_code emptied = kiln_pool_empty(library, p, true, code == KILN_OK ? error : NULL);
    code = code != KILN_OK ? code : emptied;
    kiln_pool_put_back(p);
  }
  return code;
}

kiln_code kiln_release_scratch(kiln_library *library, kiln_stream stream, kiln_error *error) {
  context *c;
  bool pushed;
  kiln_code code = check_device(library, error);
  if (code != KILN_OK) return code;
  if (library->kind == DEVICE_CPU) {
    if (stream == NULL) return empty_all(library, NULL, NULL, error);
    return kiln_fail(error, KILN_CONTRACT, "on the CPU, scratch has no stream or buffer; pass NULL.");
  }
  code = kiln_current_context(library, &c, error);
  if (code == KILN_OK) code = kiln_cuda_enter(library, c, &pushed, error);
  if (code != KILN_OK) return code;
  code = check_capture(library, stream, error);
  if (code == KILN_OK) code = kiln_cuda_synchronize(library, stream, error);
  if (code == KILN_OK) code = empty_all(library, c, stream, error);
  kiln_cuda_leave(library, pushed);
  return code;
}

/* ---- counters ---- */

static uint64_t now(const _Atomic uint64_t *counter) {
  return atomic_load_explicit((_Atomic uint64_t *)counter, memory_order_relaxed);
}

void kiln_scratch_stats(const kiln_library *library, int32_t zeroed, kiln_scratch_counters *out) {
  const scratch_counts *c = &library->scratch_counts[zeroed != 0];
  *out = (kiln_scratch_counters){now(&c->blocks), now(&c->bytes), now(&c->hits), now(&c->growths), now(&c->fills)};
}
