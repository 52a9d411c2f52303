/* A stand-in for libcuda on which every kernel is found and no launch does anything. */
#define cuModuleGetFunction of_known_kernels
#define cuLaunchKernelEx recorded
#include "../c/fake_cuda.c"
#undef cuModuleGetFunction
#undef cuLaunchKernelEx

API int cuMemAlloc_v2(unsigned long long *out, size_t bytes);
API int cuMemAlloc_v2(unsigned long long *out, size_t bytes) {
  void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
  *out = (uintptr_t)memory;
  return memory == NULL ? 2 : 0;
}
API int cuCtxSetCurrent(void *context);
API int cuCtxSetCurrent(void *context) { return context == NULL; }
API int cuModuleGetFunction(void **out, void *module, const char *name);
API int cuModuleGetFunction(void **out, void *module, const char *name) {
  *out = module;
  return name[0] == 0;
}
API int cuLaunchKernelEx(const void *launch, void *kernel, void **params, void **extra);
API int cuLaunchKernelEx(const void *launch, void *kernel, void **params, void **extra) {
  return launch == NULL || kernel == NULL || params == NULL || extra != NULL;
}
