/* A stand-in for libcuda: one or more devices whose memory is the host's. It records every call, launches nothing, and fails any call it
 * is told to. One thread at a time tells; any thread may call. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

typedef struct { unsigned int id; char pad[4]; union { char bytes[64]; unsigned int words[16]; } value; } attribute;
typedef struct {
  unsigned int grid[3], block[3], shared_bytes;
  void *stream;
  attribute *attributes;
  unsigned int attribute_count;
} config;

enum { CALLS = 1 << 16, LAUNCHES = 1 << 12, KERNELS = 1 << 10, PARAMS = 64, CONTEXTS = 8, DEPTH = 64, MAPS = 4, MAP = 128 };

/* What is known of a kernel before it is loaded: the image that holds it, its entry, a letter for each parameter that it takes, M for
 * a tensor map. */
typedef struct { const void *image; size_t bytes; char entry[256], params[PARAMS + 1]; } kernel;
typedef struct fake_launch {
  int kernel;
  unsigned int grid[3], block[3], shared_bytes, attribute_count, attributes[4][4];
  void *stream, *context;
  int params;
  uint64_t values[PARAMS]; /* of a tensor map: which of `maps` it is */
  uint8_t maps[MAPS][MAP];
} fake_launch;
typedef struct module { const void *image; int live; } module;
typedef struct function { int kernel; } function;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *calls[CALLS];
static long call_count, fail_at = -1;
static int fail_code, major_ = 9, minor_ = 0, version = 13000, devices = 1, integrated, capturing, slow;
static char fail_name[64];
static kernel kernels[KERNELS];
static function functions[KERNELS];
static int kernel_count;
static fake_launch launches[LAUNCHES];
static long launch_count;
static long live_memory, live_modules, retained, filled;
static char contexts[CONTEXTS];
static __thread void *stack[DEPTH];
static __thread int depth;

static int enter(const char *name) {
  pthread_mutex_lock(&lock);
  long at = call_count++;
  if (at < CALLS) calls[at] = name;
  int code = at == fail_at || (fail_name[0] && strcmp(fail_name, name) == 0) ? fail_code : 0;
  pthread_mutex_unlock(&lock);
  return code;
}
#define ENTER(name)                  \
  do {                               \
    int code_ = enter(name);         \
    if (code_ != 0) return code_;    \
  } while (0)

/* ---- what a test says and asks ---- */

API void fake_reset(void) {
  call_count = launch_count = filled = 0;
  fail_at = -1;
  fail_code = capturing = integrated = slow = 0;
  fail_name[0] = 0;
  major_ = 9, minor_ = 0, version = 13000, devices = 1;
}
API void fake_device(int major, int minor, int driver, int count, int unified) {
  major_ = major, minor_ = minor, version = driver, devices = count, integrated = unified;
}
API void fake_fail(long nth, int code) { fail_at = nth, fail_code = code; }
API void fake_fail_named(const char *name, int code) {
  snprintf(fail_name, sizeof fail_name, "%s", name);
  fail_code = code;
}
API void fake_capture(int on) { capturing = on; }
API void fake_slow(int on) { slow = on; } /* launches let other threads run */
API void fake_forget_kernels(void) { kernel_count = 0; }
API void fake_kernel(const void *image, size_t bytes, const char *entry, const char *params) {
  kernel *k = &kernels[kernel_count];
  *k = (kernel){image, bytes, "", ""};
  snprintf(k->entry, sizeof k->entry, "%s", entry);
  snprintf(k->params, sizeof k->params, "%s", params);
  functions[kernel_count].kernel = kernel_count;
  kernel_count++;
}
API long fake_calls(void) { return call_count; }
API const char *fake_call(long i) { return calls[i]; }
API long fake_launches(void) { return launch_count; }
API const fake_launch *fake_launched(long i) { return &launches[i]; }
API long fake_live(int what) { return what == 0 ? live_memory : what == 1 ? live_modules : what == 2 ? retained : filled; }
API int fake_depth(void) { return depth; }
API void fake_push(int context) { stack[depth++] = &contexts[context]; }
API void fake_pop(void) { depth--; }
API void *fake_context(int context) { return &contexts[context]; }

/* ---- the driver ---- */

API int cuInit(unsigned int flags) { (void)flags; ENTER("cuInit"); return 0; }
API int cuDriverGetVersion(int *out) { ENTER("cuDriverGetVersion"); *out = version; return 0; }
API int cuGetErrorName(int code, const char **out) {
  *out = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 900 ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : "CUDA_ERROR_OF_A_TEST";
  return 0;
}
API int cuDeviceGetCount(int *out) { ENTER("cuDeviceGetCount"); *out = devices; return 0; }
API int cuDeviceGet(int *out, int ordinal) { ENTER("cuDeviceGet"); *out = ordinal; return 0; }
API int cuDeviceGetAttribute(int *out, int attribute, int device) {
  (void)device;
  ENTER("cuDeviceGetAttribute");
  *out = attribute == 75 ? major_ : attribute == 76 ? minor_ : attribute == 97 ? 232448 : attribute == 16 ? 132 : attribute == 18 ? integrated : -1;
  return 0;
}
API int cuDevicePrimaryCtxRetain(void **out, int device) {
  ENTER("cuDevicePrimaryCtxRetain");
  retained++;
  *out = &contexts[device];
  return 0;
}
API int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; ENTER("cuDevicePrimaryCtxRelease_v2"); retained--; return 0; }
API int cuCtxGetCurrent(void **out) { ENTER("cuCtxGetCurrent"); *out = depth ? stack[depth - 1] : NULL; return 0; }
API int cuCtxGetDevice(int *out) {
  ENTER("cuCtxGetDevice");
  /* Contexts of an even number belong to device 0, others to device 1. */
  *out = depth ? (int)(((char *)stack[depth - 1] - contexts) % 2) : -1;
  return depth ? 0 : 201;
}
API int cuCtxPushCurrent_v2(void *context) { ENTER("cuCtxPushCurrent_v2"); stack[depth++] = context; return 0; }
API int cuCtxPopCurrent_v2(void **out) {
  int code = enter("cuCtxPopCurrent_v2"); /* popped even if it reports an earlier error, as the driver does */
  *out = stack[--depth];
  return code;
}
API int cuModuleLoadData(void **out, const void *image) {
  ENTER("cuModuleLoadData");
  module *m = calloc(1, sizeof *m);
  for (int i = 0; i < kernel_count && m->image == NULL; i++)
    if (memcmp(image, kernels[i].image, 64) == 0 && memcmp(image, kernels[i].image, kernels[i].bytes) == 0) m->image = kernels[i].image;
  pthread_mutex_lock(&lock);
  live_modules++;
  pthread_mutex_unlock(&lock);
  *out = m;
  return 0;
}
API int cuModuleUnload(void *m) {
  free(m); /* even if it fails: the module is gone */
  pthread_mutex_lock(&lock);
  live_modules--;
  pthread_mutex_unlock(&lock);
  ENTER("cuModuleUnload");
  return 0;
}
API int cuModuleGetFunction(void **out, void *m, const char *entry) {
  ENTER("cuModuleGetFunction");
  for (int i = 0; i < kernel_count; i++)
    if (kernels[i].image == ((module *)m)->image && strcmp(kernels[i].entry, entry) == 0) {
      *out = &functions[i];
      return 0;
    }
  return 500;
}
API int cuFuncSetAttribute(void *f, int attribute, int value) { (void)f, (void)attribute, (void)value; ENTER("cuFuncSetAttribute"); return 0; }
API int cuFuncLoad(void *f) { (void)f; ENTER("cuFuncLoad"); return 0; }
API int cuMemAllocAsync(unsigned long long *out, size_t bytes, void *stream) {
  (void)stream;
  ENTER("cuMemAllocAsync");
  void *got = NULL;
  if (posix_memalign(&got, 512, bytes ? bytes : 1) != 0) return 2;
  pthread_mutex_lock(&lock);
  live_memory++;
  pthread_mutex_unlock(&lock);
  *out = (uintptr_t)got;
  return 0;
}
static int give_back(unsigned long long address, const char *name) {
  free((void *)(uintptr_t)address);
  pthread_mutex_lock(&lock);
  live_memory--;
  pthread_mutex_unlock(&lock);
  return enter(name);
}
API int cuMemFreeAsync(unsigned long long address, void *stream) { (void)stream; return give_back(address, "cuMemFreeAsync"); }
API int cuMemFree_v2(unsigned long long address) { return give_back(address, "cuMemFree_v2"); }
API int cuMemsetD8Async(unsigned long long address, unsigned char value, size_t bytes, void *stream) {
  (void)stream;
  ENTER("cuMemsetD8Async");
  memset((void *)(uintptr_t)address, value, bytes);
  filled += (long)bytes;
  return 0;
}
API int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes) { ENTER("cuMemcpyHtoD_v2"); memcpy((void *)(uintptr_t)to, from, bytes); return 0; }
API int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes) { ENTER("cuMemcpyDtoH_v2"); memcpy(to, (void *)(uintptr_t)from, bytes); return 0; }
API int cuStreamSynchronize(void *stream) { (void)stream; ENTER("cuStreamSynchronize"); return 0; }
API int cuStreamIsCapturing(void *stream, int *out) { (void)stream; ENTER("cuStreamIsCapturing"); *out = capturing; return 0; }
/* Which of its own rules a tensor map breaks, by the documentation of cuTensorMapEncodeTiled; 0: none. */
static int broken_rule(const void *map, int type, uint32_t rank, uint64_t address, const uint64_t *extents, const uint64_t *pitches,
                       const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
  static const uint32_t sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  uint64_t unit = interleave == 2 ? 32 : 16;
  if ((uintptr_t)map % 64 != 0 || type < 0 || type > 12) return 1;
  if (rank < 1 || rank > 5 || (interleave != 0 && rank < 3)) return 2;
  if (address == 0 || address % unit != 0) return 3;
  if (interleave < 0 || interleave > 2 || swizzle < 0 || swizzle > 3 || promotion < 0 || promotion > 3) return 4;
  if (fill < 0 || fill > 1 || (fill == 1 && type < 6)) return 5;
  if (interleave == 2 && swizzle != 1) return 6;
  for (uint32_t i = 0; i < rank; i++) {
    if (extents[i] < 1 || extents[i] > UINT64_C(1) << 32 || box[i] < 1 || box[i] > 256 || steps[i] < 1 || steps[i] > 8) return 7;
    if (i + 1 < rank && (pitches[i] % unit != 0 || pitches[i] >= UINT64_C(1) << 40)) return 8;
  }
  uint32_t inner = box[0] * sizes[type];
  if (interleave == 0 && (inner % 16 != 0 || (swizzle != 0 && inner > 16u << swizzle))) return 9;
  return 0;
}
static int last_rule;
API int fake_broken_rule(void) { return last_rule; } /* of the last tensor map */
/* A map is what it was made of; its second word is all ones, so that what is cleared in it shows. */
API int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, uint64_t address, const uint64_t *extents,
                               const uint64_t *pitches, const uint32_t *box, const uint32_t *steps, int interleave, int swizzle,
                               int promotion, int fill) {
  ENTER("cuTensorMapEncodeTiled");
  last_rule = broken_rule(map, type, rank, address, extents, pitches, box, steps, interleave, swizzle, promotion, fill);
  if (last_rule != 0) return 1;
  uint64_t words[16] = {(uint64_t)type | (uint64_t)rank << 8 | (uint64_t)interleave << 16 | (uint64_t)swizzle << 24 |
                            (uint64_t)promotion << 32 | (uint64_t)fill << 40, UINT64_MAX, address};
  for (uint32_t i = 0; i < rank; i++) {
    words[3 + i] = extents[i];
    if (i + 1 < rank) words[8 + i] = pitches[i];
    ((uint32_t *)(words + 12))[i] = box[i];
    ((uint8_t *)words)[116 + i] = (uint8_t)steps[i];
  }
  memcpy(map, words, MAP);
  return 0;
}
API int cuLaunchKernelEx(const config *c, void *f, void **params, void **extra) {
  (void)extra;
  ENTER("cuLaunchKernelEx");
  pthread_mutex_lock(&lock);
  fake_launch *l = &launches[launch_count++ % LAUNCHES];
  pthread_mutex_unlock(&lock);
  *l = (fake_launch){.kernel = ((function *)f)->kernel, .shared_bytes = c->shared_bytes, .stream = c->stream,
                     .context = depth ? stack[depth - 1] : NULL, .attribute_count = c->attribute_count};
  memcpy(l->grid, c->grid, sizeof l->grid);
  memcpy(l->block, c->block, sizeof l->block);
  for (unsigned int i = 0; i < c->attribute_count && i < 4; i++) {
    l->attributes[i][0] = c->attributes[i].id;
    memcpy(&l->attributes[i][1], c->attributes[i].value.words, 3 * sizeof(unsigned int));
  }
  const char *kinds = kernels[l->kernel].params;
  uint64_t maps = 0;
  for (; kinds[l->params] != 0; l->params++) {
    const void *value = params[l->params];
    if (kinds[l->params] != 'M') {
      memcpy(&l->values[l->params], value, sizeof l->values[l->params]);
      continue;
    }
    memcpy(l->maps[maps], value, MAP);
    l->values[l->params] = maps++;
  }
  if (slow) usleep(50);
  return 0;
}
