/* DLPack 1.x as memory, and the table of functions that a type offers as `__dlpack_c_exchange_api__` (DLPack 1.2). */
#ifndef KILN_NATIVE_DLPACK_H
#define KILN_NATIVE_DLPACK_H

#include <stddef.h>
#include <stdint.h>

enum { DL_CPU = 1, DL_CUDA = 2, DL_MAJOR = 1 };

typedef struct {
  void *data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides; /* strides in elements */
  uint64_t byte_offset;
} dl_tensor;

typedef struct dl_exchange {
  uint32_t major, minor;
  struct dl_exchange *older;
  void *allocate, *export_owned, *import_owned;
  int (*read)(void *object, dl_tensor *); /* 0, or -1 with an exception; may be NULL */
  int (*stream)(int32_t device_type, int32_t device_id, void **);
} dl_exchange;

_Static_assert(sizeof(dl_tensor) == 48 && offsetof(dl_tensor, byte_offset) == 40, "DLTensor");
_Static_assert(sizeof(dl_exchange) == 56 && offsetof(dl_exchange, read) == 40, "DLPackExchangeAPI");

#endif
