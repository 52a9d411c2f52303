/* The part of the CUDA driver's interface that libkiln calls: its own declarations, with the driver's binary layout. */
#ifndef KILN_DRIVER_H
#define KILN_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "internal.h"

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef unsigned long long CUdeviceptr;

enum {
  CUDA_ERROR_DEINITIALIZED = 4,
  CUDA_ERROR_STUB_LIBRARY = 34,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
  ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  ATTRIBUTE_INTEGRATED = 18,
  ATTRIBUTE_MAJOR = 75,
  ATTRIBUTE_MINOR = 76,
  ATTRIBUTE_SHARED_OPTIN = 97,
  FUNCTION_MAX_DYNAMIC_SHARED = 8,
  LAUNCH_COOPERATIVE = 2,
  LAUNCH_CLUSTER = 4,
  LAUNCH_PROGRAMMATIC_SERIALIZATION = 6
};

typedef struct {
  unsigned int id;
  char pad[4];
  union {
    char pad[64];
    int flag;
    struct { unsigned int x, y, z; } cluster;
  } value;
} CUlaunchAttribute;

typedef struct {
  unsigned int grid[3], block[3], shared_bytes;
  CUstream stream;
  CUlaunchAttribute *attributes;
  unsigned int attribute_count;
} CUlaunchConfig;

_Static_assert(sizeof(CUlaunchAttribute) == 72 && offsetof(CUlaunchAttribute, value) == 8, "the driver's CUlaunchAttribute");
_Static_assert(sizeof(CUlaunchConfig) == 56 && offsetof(CUlaunchConfig, stream) == 32, "the driver's CUlaunchConfig");

/* name, symbol, whether it must be there, parameters */
#define DRIVER_FUNCTIONS(X)                                                                                                   \
  X(Init, "cuInit", 1, (unsigned int))                                                                                        \
  X(DriverGetVersion, "cuDriverGetVersion", 1, (int *))                                                                       \
  X(GetErrorName, "cuGetErrorName", 0, (CUresult, const char **))                                                             \
  X(DeviceGetCount, "cuDeviceGetCount", 1, (int *))                                                                           \
  X(DeviceGet, "cuDeviceGet", 1, (CUdevice *, int))                                                                           \
  X(DeviceGetAttribute, "cuDeviceGetAttribute", 1, (int *, int, CUdevice))                                                    \
  X(PrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 1, (CUcontext *, CUdevice))                                                 \
  X(PrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", 1, (CUdevice))                                                         \
  X(CtxGetCurrent, "cuCtxGetCurrent", 1, (CUcontext *))                                                                       \
  X(CtxGetDevice, "cuCtxGetDevice", 1, (CUdevice *))                                                                          \
  X(CtxPushCurrent, "cuCtxPushCurrent_v2", 1, (CUcontext))                                                                    \
  X(CtxPopCurrent, "cuCtxPopCurrent_v2", 1, (CUcontext *))                                                                    \
  X(ModuleLoadData, "cuModuleLoadData", 1, (CUmodule *, const void *))                                                        \
  X(ModuleUnload, "cuModuleUnload", 1, (CUmodule))                                                                            \
  X(ModuleGetFunction, "cuModuleGetFunction", 1, (CUfunction *, CUmodule, const char *))                                      \
  X(FuncSetAttribute, "cuFuncSetAttribute", 1, (CUfunction, int, int))                                                        \
  X(FuncLoad, "cuFuncLoad", 0, (CUfunction))                                                                                  \
  X(MemAllocAsync, "cuMemAllocAsync", 1, (CUdeviceptr *, size_t, CUstream))                                                   \
  X(MemFreeAsync, "cuMemFreeAsync", 1, (CUdeviceptr, CUstream))                                                               \
  X(MemFree, "cuMemFree_v2", 1, (CUdeviceptr))                                                                                \
  X(MemsetD8Async, "cuMemsetD8Async", 1, (CUdeviceptr, unsigned char, size_t, CUstream))                                      \
  X(MemcpyHtoD, "cuMemcpyHtoD_v2", 1, (CUdeviceptr, const void *, size_t))                                                    \
  X(MemcpyDtoH, "cuMemcpyDtoH_v2", 1, (void *, CUdeviceptr, size_t))                                                          \
  X(StreamSynchronize, "cuStreamSynchronize", 1, (CUstream))                                                                  \
  X(TensorMapEncodeTiled, "cuTensorMapEncodeTiled", 0,                                                                        \
    (void *, int, uint32_t, CUdeviceptr, const uint64_t *, const uint64_t *, const uint32_t *, const uint32_t *, int, int,    \
     int, int))                                                                                                               \
  X(StreamIsCapturing, "cuStreamIsCapturing", 1, (CUstream, int *))                                                           \
  X(LaunchKernelEx, "cuLaunchKernelEx", 1, (const CUlaunchConfig *, CUfunction, void **, void **))

typedef struct cuda_driver {
  void *handle;
#define X(name, symbol, needed, parameters) CUresult (*name) parameters;
  DRIVER_FUNCTIONS(X)
#undef X
  CUdevice device;
  int version;
} cuda_driver;

kiln_code kiln_driver_open(const char *path, cuda_driver **out, kiln_error *error);
void kiln_driver_close(cuda_driver *driver);
/* KILN_OK for success, else KILN_DRIVER and what the code means for a user. */
kiln_code kiln_driver_check(const cuda_driver *driver, const char *what, CUresult status, kiln_error *error);

#endif
