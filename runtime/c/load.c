/* Kernels of a context: a file is read once, verified and proved to match the manifest, then loaded. */
#include "run.h"

#include <dlfcn.h>
#include <stdlib.h>

kiln_code kiln_new_context(kiln_library *library, void *handle, bool primary, context **out, kiln_error *error) {
  context *c = calloc(1, sizeof *c);
  if (c != NULL) {
    c->functions = calloc(library->kernel_count + 1, sizeof *c->functions);
    c->modules = calloc(library->kernel_count + 1, sizeof *c->modules);
  }
  if (c == NULL || c->functions == NULL || c->modules == NULL) {
    if (c != NULL) free((void *)c->functions);
    if (c != NULL) free(c->modules);
    free(c);
    return kiln_fail(error, KILN_MEMORY, "the system has no memory left; free some.");
  }
  c->handle = handle;
  c->primary = primary;
  c->next = atomic_load_explicit(&library->contexts, memory_order_relaxed);
  atomic_store_explicit(&library->contexts, c, memory_order_release);
  *out = c;
  return KILN_OK;
}

static void unload(kiln_library *library, context *c) {
  bool pushed = false;
  if (library->kind == DEVICE_CUDA && kiln_cuda_enter(library, c, &pushed, NULL) != KILN_OK) return; /* its modules went with it */
  for (uint32_t i = 0; i < library->kernel_count; i++) {
    if (c->modules[i] == NULL) continue;
    if (library->kind == DEVICE_CUDA) kiln_cuda_unload(library, c->modules[i]);
    else dlclose(c->modules[i]);
  }
  if (library->kind == DEVICE_CUDA) kiln_cuda_leave(library, pushed);
}

void kiln_close_contexts(kiln_library *library, bool forked) {
  context *c = atomic_load(&library->contexts);
  atomic_store(&library->contexts, NULL);
  while (c != NULL) {
    context *next = c->next;
    if (!forked) unload(library, c);
    free((void *)c->functions);
    free(c->modules);
    free(c);
    c = next;
  }
}

/* ---- one kernel ---- */

/* The module of another kernel of the same file, if it is loaded. */
static void *loaded_module(const context *c, const candidate *k) {
  const pack *p = k->op->pack;
  for (uint32_t i = 0; i < p->manifest.kernel_count; i++)
    if (c->modules[p->first_kernel + i] != NULL && strcmp(p->manifest.kernels[i].file, k->kernel->file) == 0)
      return c->modules[p->first_kernel + i];
  return NULL;
}

static kiln_code load_module(context *c, const candidate *k, const uint8_t *data, void **module, kiln_error *error) {
  kiln_library *library = k->op->library;
  *module = loaded_module(c, k);
  if (*module != NULL) return KILN_OK;
  kiln_code code = library->kind == DEVICE_CUDA
                       ? kiln_cuda_load(library, data, module, error)
                       : kiln_load_object(data, (size_t)k->kernel->bytes, k->kernel->file, module, error);
  if (code == KILN_OK) c->modules[k->id] = *module;
  return code;
}

static kiln_code load_verified(context *c, const candidate *k, const uint8_t *data, void **function, kiln_error *error) {
  kiln_library *library = k->op->library;
  void *module;
  kiln_code code = load_module(c, k, data, &module, error);
  if (code != KILN_OK) return code;
  if (library->kind == DEVICE_CUDA) return kiln_cuda_function(library, k->kernel, module, function, error);
  return kiln_object_entry(module, k->kernel, function, error);
}

static kiln_code load(context *c, const candidate *k, void **function, kiln_error *error) {
  const pack *p = k->op->pack;
  const manifest_kernel *m = k->kernel;
  const uint8_t *data;
  bool pushed = false, cuda = k->op->library->kind == DEVICE_CUDA;
  kiln_code code = kiln_tree_read_exact(p->tree, p->manifest.target, m->file, (size_t)m->bytes, m->sha256, &data, error);
  if (code != KILN_OK) return code;
  kiln_error why;
  code = kiln_prove(&p->manifest, m, data, (size_t)m->bytes, &why);
  if (code == KILN_INTEGRITY)
    kiln_fail(error, code, "%s/%s/%s is not what %s.%s promises: %.1500s Rebuild the tree.", kiln_tree_label(p->tree),
              p->manifest.target, m->file, k->op->sig->name, m->variant, why.message);
  else if (code != KILN_OK)
    kiln_fail(error, code, "%s", why.message);
  if (code == KILN_OK && cuda) code = kiln_cuda_enter(k->op->library, c, &pushed, error);
  if (code == KILN_OK) code = load_verified(c, k, data, function, error);
  if (cuda) kiln_cuda_leave(k->op->library, pushed);
  kiln_tree_release(p->tree, data);
  return code;
}

/* A load inside a capture may break it, and what it queues would be captured. */
static kiln_code check_stream(const candidate *k, kiln_stream stream, kiln_error *error) {
  bool capturing = false;
  if (k->op->library->kind != DEVICE_CUDA) return KILN_OK;
  kiln_code code = kiln_cuda_capturing(k->op->library, stream, &capturing, error);
  if (code != KILN_OK || !capturing) return code;
  return kiln_fail(error, KILN_UNAVAILABLE, "%s.%s is not loaded and its stream is being captured; prepare it before capturing.",
                   k->op->sig->name, k->variant);
}

kiln_code kiln_load_kernel(context *c, const candidate *k, kiln_stream stream, void **function, kiln_error *error) {
  kiln_library *library = k->op->library;
  *function = atomic_load_explicit(&c->functions[k->id], memory_order_acquire);
  if (*function != NULL) return KILN_OK;
  if (atomic_load_explicit(&library->sealed, memory_order_acquire))
    return kiln_fail(error, KILN_UNAVAILABLE, "%s.%s is not loaded and the library is sealed; prepare it before sealing.",
                     k->op->sig->name, k->variant);
  kiln_code code = check_stream(k, stream, error);
  if (code != KILN_OK) return code;
  pthread_mutex_lock(&library->lock);
  *function = atomic_load_explicit(&c->functions[k->id], memory_order_relaxed);
  if (*function == NULL) code = load(c, k, function, error);
  if (code == KILN_OK) atomic_store_explicit(&c->functions[k->id], *function, memory_order_release);
  pthread_mutex_unlock(&library->lock);
  return code;
}
