/* The CUDA driver, opened at run time, and what its error codes mean for a user. */
#include "driver.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static const struct { CUresult code; const char *hint; } HINTS[] = {
    {1, "a value is out of range"},
    {2, "the device is out of memory; free some"},
    {3, "CUDA was initialized before this process was forked; start workers with spawn"},
    {4, "the process is shutting down"},
    {100, "no NVIDIA device; check nvidia-smi"},
    {101, "no such device; check the ordinal"},
    {200, "the driver does not understand the cubin; update the driver"},
    {201, "the context is gone; open the tree again"},
    {209, "the cubin is for another architecture; build this device's target"},
    {222, "the driver is older than the toolchain; update it"},
    {400, "a handle belongs to another context; check the stream"},
    {500, "the cubin has no such entry; rebuild the tree"},
    {700, "a kernel accessed memory it may not; the context is lost, restart the process"},
    {709, "the context was destroyed; open the tree again"},
    {716, "a kernel was given a misaligned address; the context is lost, restart the process"},
    {719, "a kernel failed; the context is lost, restart the process"},
    {803, "the driver and its kernel module do not match; reboot or reinstall the driver"},
    {900, "this is not allowed while a stream is being captured; prepare and seal the library first"},
};

kiln_code kiln_driver_check(const cuda_driver *driver, const char *what, CUresult status, kiln_error *error) {
  if (status == 0) return KILN_OK;
  const char *name = NULL, *hint = "see the CUDA driver's documentation of this code";
  if (driver->GetErrorName == NULL || driver->GetErrorName(status, &name) != 0 || name == NULL) name = "(no name)";
  for (size_t i = 0; i < sizeof HINTS / sizeof *HINTS; i++)
    if (HINTS[i].code == status) hint = HINTS[i].hint;
  kiln_fail(error, KILN_DRIVER, "%s returned %d %s: %s. An earlier asynchronous call may be the cause.", what, status, name, hint);
  if (error != NULL) error->driver = status;
  return KILN_DRIVER;
}

static kiln_code find_symbols(cuda_driver *driver, const char *path, kiln_error *error) {
  const char *missing = NULL;
  void *found;
#define X(name, symbol, needed, parameters)              \
  found = dlsym(driver->handle, symbol);                 \
  memcpy(&driver->name, &found, sizeof found);           \
  if (found == NULL && (needed) && missing == NULL) missing = symbol;
  DRIVER_FUNCTIONS(X)
#undef X
  if (missing == NULL) return KILN_OK;
  return kiln_fail(error, KILN_UNAVAILABLE, "%s has no %s; expected the driver of CUDA 12 or later. Update the driver.", path,
                   missing);
}

kiln_code kiln_driver_open(const char *path, cuda_driver **out, kiln_error *error) {
  path = path != NULL ? path : "libcuda.so.1";
  cuda_driver *driver = calloc(1, sizeof *driver);
  if (driver == NULL) return kiln_fail(error, KILN_MEMORY, "the system has no memory left; free some.");
  driver->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  kiln_code code = KILN_OK;
  if (driver->handle == NULL) {
    const char *why = dlerror();
    code = kiln_fail(error, KILN_UNAVAILABLE, "no CUDA driver on this machine (%s); install one, or use the CPU.",
                     why ? why : path);
  } else {
    code = find_symbols(driver, path, error);
  }
  if (code != KILN_OK) kiln_driver_close(driver);
  else *out = driver;
  return code;
}

void kiln_driver_close(cuda_driver *driver) {
  if (driver == NULL) return;
  if (driver->handle != NULL) dlclose(driver->handle);
  free(driver);
}
