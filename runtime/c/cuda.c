/* Running kernels on an NVIDIA device through its driver: contexts, modules, launches, stream-ordered memory.
 *
 * Everything that can be known to fail is refused by name before the driver sees it: a launch error can poison the context. */
#include "driver.h"
#include "run.h"

#include <stdlib.h>

#define CALL(driver, name, error, ...) kiln_driver_check(driver, "cu" #name, (driver)->name(__VA_ARGS__), error)

enum { DEFAULT_SHARED = 48 << 10, CUDA_12_4 = 12040 };

/* ---- the device ---- */

static kiln_code initialize(const cuda_driver *driver, kiln_error *error) {
  kiln_error why;
  CUresult status = driver->Init(0);
  kiln_code code = kiln_driver_check(driver, "cuInit", status, &why);
  if (code == KILN_OK) return code;
  if (status == CUDA_ERROR_STUB_LIBRARY || status == CUDA_ERROR_NO_DEVICE)
    return kiln_fail(error, KILN_UNAVAILABLE, "CUDA cannot be used here: %.1500s", why.message);
  return kiln_driver_check(driver, "cuInit", status, error);
}

static kiln_code find_device(cuda_driver *driver, int32_t ordinal, kiln_error *error) {
  int count;
  kiln_code code = CALL(driver, DeviceGetCount, error, &count);
  if (code != KILN_OK) return code;
  if (ordinal < 0 || ordinal >= count)
    return kiln_fail(error, KILN_UNAVAILABLE, "found %d CUDA devices, expected one with ordinal %d.", count, ordinal);
  return CALL(driver, DeviceGet, error, &driver->device, ordinal);
}

static kiln_code describe(kiln_library *library, kiln_error *error) {
  cuda_driver *driver = library->driver;
  int shared = 0;
  struct { int attribute; int *out; } asked[] = {{ATTRIBUTE_MAJOR, &library->device.major},
                                                 {ATTRIBUTE_MINOR, &library->device.minor},
                                                 {ATTRIBUTE_MULTIPROCESSOR_COUNT, &library->device.units},
                                                 {ATTRIBUTE_INTEGRATED, &library->device.unified_memory},
                                                 {ATTRIBUTE_SHARED_OPTIN, &shared}};
  for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
    kiln_code code = CALL(driver, DeviceGetAttribute, error, asked[i].out, asked[i].attribute, driver->device);
    if (code != KILN_OK) return code;
  }
  library->shared_limit = shared;
  return CALL(driver, DriverGetVersion, error, &driver->version);
}

kiln_code kiln_cuda_open(kiln_library *library, int32_t ordinal, const char *driver_path, kiln_error *error) {
  kiln_code code = kiln_driver_open(driver_path, &library->driver, error);
  if (code == KILN_OK) code = initialize(library->driver, error);
  if (code == KILN_OK) code = find_device(library->driver, ordinal, error);
  if (code == KILN_OK) code = describe(library, error);
  if (code != KILN_OK) return code;
  library->device.ordinal = ordinal;
  sink s = {library->label, sizeof library->label, 0};
  kiln_put(&s, "cuda:%d (compute capability %d.%d)", ordinal, library->device.major, library->device.minor);
  return KILN_OK;
}

static kiln_code check_assembler(const kiln_library *library, const char *version, kiln_error *error) {
  int have = library->driver->version;
  if (version == NULL || version[0] < '0' || version[0] > '9' || strtol(version, NULL, 10) <= have / 1000) return KILN_OK;
  return kiln_fail(error, KILN_TARGET, "the tree was assembled by ptxas %s, the driver supports CUDA %d.%d; update the driver.",
                   version, have / 1000, have % 1000 / 10);
}

kiln_code kiln_cuda_check_toolchain(const kiln_library *library, const manifest *m, kiln_error *error) {
  kiln_code code = check_assembler(library, m->ptxas, error);
  for (uint32_t i = 0; i < m->kernel_count && code == KILN_OK; i++) code = check_assembler(library, m->kernels[i].ptxas, error);
  return code;
}

/* ---- contexts ---- */

static context *known_context(const kiln_library *library, const void *handle, bool primary) {
  context *c = atomic_load_explicit(&((kiln_library *)library)->contexts, memory_order_acquire);
  while (c != NULL && (primary ? !c->primary : c->handle != handle)) c = c->next;
  return c;
}

static kiln_code primary_context(kiln_library *library, context **out, kiln_error *error) {
  CUcontext handle;
  *out = known_context(library, NULL, true);
  if (*out != NULL) return KILN_OK;
  pthread_mutex_lock(&library->lock);
  kiln_code code = KILN_OK;
  *out = known_context(library, NULL, true);
  if (*out == NULL) {
    code = CALL(library->driver, PrimaryCtxRetain, error, &handle, library->driver->device);
    if (code == KILN_OK) {
      code = kiln_new_context(library, handle, true, out, error);
      if (code != KILN_OK) library->driver->PrimaryCtxRelease(library->driver->device);
    }
  }
  pthread_mutex_unlock(&library->lock);
  return code;
}

/* The context that is current, if it is one of the library's device; else the device's primary one. */
kiln_code kiln_current_context(kiln_library *library, context **out, kiln_error *error) {
  if (library->kind != DEVICE_CUDA) {
    *out = atomic_load_explicit(&library->contexts, memory_order_acquire);
    return KILN_OK;
  }
  CUcontext current = NULL;
  CUdevice device;
  kiln_code code = CALL(library->driver, CtxGetCurrent, error, &current);
  if (code != KILN_OK) return code;
  *out = current != NULL ? known_context(library, current, false) : NULL;
  if (*out != NULL) return KILN_OK;
  code = primary_context(library, out, error);
  if (code != KILN_OK || current == NULL || (*out)->handle == current) return code;
  code = CALL(library->driver, CtxGetDevice, error, &device);
  if (code != KILN_OK || device != library->driver->device) return code;
  pthread_mutex_lock(&library->lock);
  *out = known_context(library, current, false);
  if (*out == NULL) code = kiln_new_context(library, current, false, out, error);
  pthread_mutex_unlock(&library->lock);
  return code;
}

kiln_code kiln_cuda_enter(const kiln_library *library, const context *c, bool *pushed, kiln_error *error) {
  CUcontext current;
  *pushed = false;
  kiln_code code = CALL(library->driver, CtxGetCurrent, error, &current);
  if (code != KILN_OK || current == c->handle) return code;
  code = CALL(library->driver, CtxPushCurrent, error, c->handle);
  *pushed = code == KILN_OK;
  return code;
}

void kiln_cuda_leave(const kiln_library *library, bool pushed) {
  CUcontext popped;
  if (pushed) library->driver->CtxPopCurrent(&popped);
}

void kiln_cuda_close(kiln_library *library, bool forked) {
  bool retained = known_context(library, NULL, true) != NULL;
  kiln_close_contexts(library, forked);
  if (retained && !forked) library->driver->PrimaryCtxRelease(library->driver->device);
  kiln_driver_close(library->driver);
  library->driver = NULL;
}

/* ---- modules ---- */

kiln_code kiln_cuda_load(const kiln_library *library, const uint8_t *data, void **module, kiln_error *error) {
  CUmodule loaded;
  kiln_code code = CALL(library->driver, ModuleLoadData, error, &loaded, data);
  if (code == KILN_OK) *module = loaded;
  return code;
}

static int64_t static_shared(const manifest_kernel *k) {
  for (uint32_t i = 0; i < k->resource_count; i++)
    if (strcmp(k->resources[i].key, "static_shared") == 0) return k->resources[i].value;
  return 0;
}

kiln_code kiln_cuda_function(const kiln_library *library, const manifest_kernel *k, void *module, void **function,
                             kiln_error *error) {
  const cuda_driver *driver = library->driver;
  CUfunction found;
  kiln_code code = CALL(driver, ModuleGetFunction, error, &found, module, k->entry);
  if (code == KILN_OK && k->shared_bytes + static_shared(k) > DEFAULT_SHARED)
    code = CALL(driver, FuncSetAttribute, error, found, FUNCTION_MAX_DYNAMIC_SHARED, (int)k->shared_bytes);
  /* Lazy loading would otherwise do it inside the first launch, which may be under capture. */
  if (code == KILN_OK && driver->FuncLoad != NULL && driver->version >= CUDA_12_4) code = CALL(driver, FuncLoad, error, found);
  if (code == KILN_OK) *function = found;
  return code;
}

void kiln_cuda_unload(const kiln_library *library, void *module) { library->driver->ModuleUnload(module); }

/* ---- launches ---- */

typedef struct { CUlaunchConfig config; CUlaunchAttribute attributes[3]; } launch_config;

size_t kiln_cuda_config_bytes(void) { return sizeof(launch_config); }

void kiln_cuda_configure(const manifest_kernel *k, const int64_t grid[3], void *config) {
  launch_config *c = config;
  CUlaunchAttribute *a = c->attributes;
  for (int i = 0; i < 3; i++) {
    c->config.grid[i] = (unsigned int)grid[i];
    c->config.block[i] = (unsigned int)k->block[i];
  }
  c->config.shared_bytes = (unsigned int)k->shared_bytes;
  c->config.attributes = c->attributes;
  if (k->cluster[0] != 1 || k->cluster[1] != 1 || k->cluster[2] != 1) {
    a->id = LAUNCH_CLUSTER;
    a->value.cluster.x = (unsigned int)k->cluster[0];
    a->value.cluster.y = (unsigned int)k->cluster[1];
    a++->value.cluster.z = (unsigned int)k->cluster[2];
  }
  if (k->pdl) {
    a->id = LAUNCH_PROGRAMMATIC_SERIALIZATION;
    a++->value.flag = 1;
  }
  if (k->cooperative) {
    a->id = LAUNCH_COOPERATIVE;
    a++->value.flag = 1;
  }
  c->config.attribute_count = (unsigned int)(a - c->attributes);
}

static kiln_code launch_failed(const kiln_library *library, const candidate *k, CUresult status, kiln_error *error) {
  char what[320];
  sink s = {what, sizeof what, 0};
  kiln_put(&s, "%s.%s: cuLaunchKernelEx", k->op->sig->name, k->variant);
  return kiln_driver_check(library->driver, what, status, error);
}

kiln_code kiln_cuda_launch(const kiln_library *library, const context *c, const prepared *launches, uint32_t count,
                           kiln_stream stream, kiln_error *error) {
  bool pushed;
  kiln_code code = kiln_cuda_enter(library, c, &pushed, error);
  for (uint32_t i = 0; i < count && code == KILN_OK; i++) {
    const prepared *p = &launches[i];
    launch_config *config = p->config;
    if (config->config.grid[0] == 0 || config->config.grid[1] == 0 || config->config.grid[2] == 0) continue;
    config->config.stream = stream;
    CUresult status = library->driver->LaunchKernelEx(&config->config, p->function, p->params, NULL);
    if (status != 0) code = launch_failed(library, p->launch->candidate, status, error);
  }
  kiln_cuda_leave(library, pushed);
  return code;
}

/* ---- memory and streams ---- */

kiln_code kiln_cuda_capturing(const kiln_library *library, kiln_stream stream, bool *capturing, kiln_error *error) {
  int status = 0;
  CUresult result = library->driver->StreamIsCapturing(stream, &status);
  *capturing = status != 0 || result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  return *capturing ? KILN_OK : kiln_driver_check(library->driver, "cuStreamIsCapturing", result, error);
}

kiln_code kiln_cuda_allocate(const kiln_library *library, size_t bytes, kiln_stream stream, uintptr_t *out, kiln_error *error) {
  CUdeviceptr address;
  kiln_code code = CALL(library->driver, MemAllocAsync, error, &address, bytes, stream);
  if (code == KILN_OK) *out = (uintptr_t)address;
  return code;
}

kiln_code kiln_cuda_free(const kiln_library *library, uintptr_t address, kiln_stream stream, kiln_error *error) {
  return CALL(library->driver, MemFreeAsync, error, address, stream);
}

kiln_code kiln_cuda_free_now(const kiln_library *library, uintptr_t address, kiln_error *error) {
  return CALL(library->driver, MemFree, error, address);
}

kiln_code kiln_cuda_fill(const kiln_library *library, uintptr_t address, uint8_t value, size_t bytes, kiln_stream stream,
                         kiln_error *error) {
  return CALL(library->driver, MemsetD8Async, error, address, value, bytes, stream);
}

kiln_code kiln_cuda_synchronize(const kiln_library *library, kiln_stream stream, kiln_error *error) {
  return CALL(library->driver, StreamSynchronize, error, stream);
}

kiln_code kiln_cuda_copy(const kiln_library *library, uintptr_t device, void *host, size_t bytes, bool to_device,
                         kiln_error *error) {
  if (to_device) return CALL(library->driver, MemcpyHtoD, error, device, host, bytes);
  return CALL(library->driver, MemcpyDtoH, error, host, device, bytes);
}
