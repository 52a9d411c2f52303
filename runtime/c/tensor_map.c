/* Tensor maps that the host makes: what a call must keep, and how they are made; as
 * kiln.runtime.tensor_map and kiln.runtime.cuda_maps.
 *
 * Every rule of the driver is checked before the driver sees a call. Making one is arithmetic on 128 bytes. */
#include "driver.h"
#include "run.h"

/* A map may let the copy engine touch so many bytes behind the address (CU_TENSOR_MAP_ALLOC_CLASS_LARGE). Drivers up to that version
 * always do, so that the bit is cleared for tensors of fewer bytes, as CUTLASS and Triton do; later ones look at the allocation. */
enum { SMALL = 128 << 10, SMALL_FIXED_IN = 13010, SMALL_BIT = 21 };
static const int64_t MAX_EXTENT = INT64_C(1) << 32, MAX_PITCH = INT64_C(1) << 40;

/* The driver's CUtensorMapDataType; bytes are bytes to it. */
static const int ELEMENTS[] = {
  [KILN_U8] = 0, [KILN_I8] = 0, [KILN_BOOL] = 0, [KILN_F8E4M3] = 0, [KILN_F8E5M2] = 0, [KILN_I16] = 1, [KILN_U32] = 2,
  [KILN_I32] = 3, [KILN_I64] = 5, [KILN_F16] = 6, [KILN_F32] = 7, [KILN_F64] = 8, [KILN_BF16] = 9,
};

static int64_t bytes_of(const kernel_param *p) { return KILN_DTYPES[kiln_dtype_named(p->dtype)].bytes; }

/* ---- calls ---- */
static kiln_code why_not_extent(const kernel_param *p, const expr *e, const bound *b, const number *args, sink *why,
                                kiln_error *error) {
  number n;
  kiln_code code = kiln_evaluate(e, b, args, &n, error);
  if (code != KILN_OK || (!n.real && n.integer >= 1 && n.integer <= MAX_EXTENT)) return code;
  kiln_put(why, "maps %s with an extent of ", p->operand);
  if (why != NULL) kiln_put_value(why, &n);
  kiln_put(why, ", expected 1 to %lld", (long long)MAX_EXTENT);
  return KILN_SELECTION;
}

static kiln_code why_not_stride(const kernel_param *p, const expr *e, const bound *b, const number *args, sink *why,
                                kiln_error *error) {
  number n;
  int64_t size = bytes_of(p), unit = p->align > size ? p->align / size : 1, most = MAX_PITCH / size;
  kiln_code code = kiln_evaluate(e, b, args, &n, error);
  if (code != KILN_OK || (!n.real && n.integer >= 0 && n.integer < most && n.integer % unit == 0)) return code;
  kiln_put(why, "maps %s with a stride of ", p->operand);
  if (why != NULL) kiln_put_value(why, &n);
  kiln_put(why, ", expected a multiple of %lld below %lld", (long long)unit, (long long)most);
  return KILN_SELECTION;
}

kiln_code kiln_why_not_map(const kernel_param *p, const bound *b, const number *args, sink *why, kiln_error *error) {
  kiln_code code = KILN_OK;
  if (b->dtypes[p->tensor] == 0) {
    kiln_put(why, "needs %s present", p->operand);
    return KILN_SELECTION;
  }
  for (uint32_t i = 0; i < p->map->rank && code == KILN_OK; i++) code = why_not_extent(p, &p->map->shape[i], b, args, why, error);
  for (uint32_t i = 0; i < p->map->stride_count && code == KILN_OK; i++)
    code = why_not_stride(p, &p->map->strides[i], b, args, why, error);
  return code;
}

/* Whether fewer than SMALL bytes lie from the first to the last element. */
static bool is_small(const map_patch *m, uint64_t size) {
  uint64_t last = 0;
  for (uint32_t i = 0; i < m->rank; i++) {
    uint64_t part;
    if (__builtin_mul_overflow(m->extents[i] - 1, i == 0 ? size : m->pitches[i - 1], &part) || part >= SMALL) return false;
    last += part;
  }
  return last + 1 < SMALL;
}

kiln_code kiln_tile(const kernel_param *p, const bound *b, const number *args, map_patch *out, kiln_error *error) {
  const tensor_map *m = p->map;
  number n;
  uint64_t size = (uint64_t)bytes_of(p);
  out->element = ELEMENTS[kiln_dtype_named(p->dtype)];
  out->rank = m->rank;
  out->map = m;
  for (uint32_t i = 0; i < m->rank; i++) {
    kiln_code code = kiln_evaluate(&m->shape[m->rank - 1 - i], b, args, &n, error);
    if (code != KILN_OK) return code;
    out->extents[i] = (uint64_t)n.integer;
    out->box[i] = (uint32_t)m->box[m->rank - 1 - i];
  }
  for (uint32_t i = 0; i + 1 < m->rank; i++) {
    kiln_code code = kiln_evaluate(&m->strides[m->rank - 2 - i], b, args, &n, error);
    if (code != KILN_OK) return code;
    out->pitches[i] = (uint64_t)n.integer * size;
  }
  out->small = is_small(out, size);
  return KILN_OK;
}

/* ---- the driver ---- */
bool kiln_cuda_makes_maps(const kiln_library *library) { return library->driver->TensorMapEncodeTiled != NULL; }

static CUresult encode(const cuda_driver *driver, const map_patch *m, uintptr_t address, void *out) {
  static const uint32_t steps[MAP_RANK] = {1, 1, 1, 1, 1};
  const tensor_map *how = m->map;
  return driver->TensorMapEncodeTiled(out, m->element, m->rank, address, m->extents, m->pitches, m->box, steps, how->interleave,
                                      how->swizzle, how->l2, how->fill);
}

kiln_code kiln_cuda_encode(const kiln_library *library, const context *c, const candidate *k, const map_patch *m,
                           uintptr_t address, void *out, kiln_error *error) {
  const cuda_driver *driver = library->driver;
  CUresult status = encode(driver, m, address, out);
  if (status == CUDA_ERROR_INVALID_CONTEXT) { /* none is current in this thread */
    bool pushed;
    kiln_code code = kiln_cuda_enter(library, c, &pushed, error);
    if (code == KILN_OK) status = encode(driver, m, address, out);
    kiln_cuda_leave(library, pushed);
    if (code != KILN_OK) return code;
  }
  if (status != 0) {
    char what[320];
    sink s = {what, sizeof what, 0};
    kiln_put(&s, "%s.%s: cuTensorMapEncodeTiled", k->op->sig->name, k->variant);
    return kiln_driver_check(driver, what, status, error);
  }
  if (m->small && driver->version <= SMALL_FIXED_IN) {
    uint64_t word;
    memcpy(&word, (char *)out + 8, sizeof word);
    word &= ~(UINT64_C(1) << SMALL_BIT);
    memcpy((char *)out + 8, &word, sizeof word);
  }
  return KILN_OK;
}
