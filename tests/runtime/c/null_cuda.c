/* A driver that only returns, and what a launch costs on it: all of that is libkiln's. */
#define _POSIX_C_SOURCE 200809L
#include <stddef.h>
#include <time.h>

#define API __attribute__((visibility("default")))
#define NOTHING(name, ...) \
  API int name(__VA_ARGS__) { return 0; }

static char context;
static __thread void *current;

API int cuDriverGetVersion(int *out) { *out = 13000; return 0; }
API int cuDeviceGetCount(int *out) { *out = 1; return 0; }
API int cuDeviceGet(int *out, int ordinal) { *out = ordinal; return 0; }
API int cuDeviceGetAttribute(int *out, int attribute, int device) {
  (void)device;
  *out = attribute == 75 ? 9 : attribute == 76 ? 0 : 232448;
  return 0;
}
API int cuDevicePrimaryCtxRetain(void **out, int device) { (void)device; *out = &context; return 0; }
API int cuCtxGetCurrent(void **out) { *out = current; return 0; }
API int cuCtxGetDevice(int *out) { *out = 0; return 0; }
API int cuCtxPushCurrent_v2(void *c) { current = c; return 0; }
API int cuCtxPopCurrent_v2(void **out) { *out = current; current = NULL; return 0; }
API int cuModuleLoadData(void **out, const void *image) { (void)image; *out = &context; return 0; }
API int cuModuleGetFunction(void **out, void *module, const char *name) { (void)module, (void)name; *out = &context; return 0; }
API int cuMemAllocAsync(unsigned long long *out, size_t bytes, void *stream) { (void)bytes, (void)stream; *out = 1 << 20; return 0; }
API int cuStreamIsCapturing(void *stream, int *out) { (void)stream; *out = 0; return 0; }
NOTHING(cuInit, unsigned int flags __attribute__((unused)))
NOTHING(cuDevicePrimaryCtxRelease_v2, int device __attribute__((unused)))
NOTHING(cuStreamSynchronize, void *stream __attribute__((unused)))
NOTHING(cuModuleUnload, void *module __attribute__((unused)))
NOTHING(cuFuncSetAttribute, void *f __attribute__((unused)), int a __attribute__((unused)), int v __attribute__((unused)))
NOTHING(cuMemFreeAsync, unsigned long long a __attribute__((unused)), void *s __attribute__((unused)))
NOTHING(cuMemFree_v2, unsigned long long a __attribute__((unused)))
NOTHING(cuMemsetD8Async, unsigned long long a __attribute__((unused)), unsigned char v __attribute__((unused)), size_t n __attribute__((unused)), void *s __attribute__((unused)))
NOTHING(cuMemcpyHtoD_v2, unsigned long long a __attribute__((unused)), const void *f __attribute__((unused)), size_t n __attribute__((unused)))
NOTHING(cuMemcpyDtoH_v2, void *t __attribute__((unused)), unsigned long long a __attribute__((unused)), size_t n __attribute__((unused)))
NOTHING(cuTensorMapEncodeTiled, void *m __attribute__((unused)), int t __attribute__((unused)), unsigned r __attribute__((unused)), unsigned long long a __attribute__((unused)), const void *e __attribute__((unused)), const void *p __attribute__((unused)), const void *b __attribute__((unused)), const void *s __attribute__((unused)), int i __attribute__((unused)), int w __attribute__((unused)), int l __attribute__((unused)), int f __attribute__((unused)))
NOTHING(cuLaunchKernelEx, const void *c __attribute__((unused)), void *f __attribute__((unused)), void **p __attribute__((unused)), void **e __attribute__((unused)))

/* Nanoseconds of this thread's CPU time per launch of a bound call. */
API double null_launch_cost(int (*launch)(void *, void *, void *), void *call, int count) {
  struct timespec from, to;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &from);
  for (int i = 0; i < count; i++)
    if (launch(call, (void *)0x51, NULL) != 0) return -1;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &to);
  return ((double)(to.tv_sec - from.tv_sec) * 1e9 + (double)(to.tv_nsec - from.tv_nsec)) / count;
}
