/* a * b + c rounded once. */
#if defined(__FMA__) || defined(__aarch64__)
KILN_INLINE vf vf_fma(vf a, vf b, vf c) { return __builtin_elementwise_fma(a, b, c); }
#else
/* Without the instruction: the product is exact in f64, and so is the sum's rounding to f32, except where the f64 sum lies on (or in the
   subnormal range between) f32 ties: those lanes, one vector in millions, are rounded to odd first. */
typedef double vd __attribute__((vector_size(128)));
typedef int64_t vq __attribute__((vector_size(128)));
KILN_COLD void fma_odd(vf *to, const vf *a, const vf *b, const vf *c)
{
  for (int i = 0; i < 16; ++i) {
    const double product = (double)(*a)[i] * (double)(*b)[i], addend = (double)(*c)[i], total = product + addend;
    const double other = total - product, error = (product - (total - other)) + (addend - other);
    double odd = total;
    int64_t bits;
    __builtin_memcpy(&bits, &total, 8);
    if (total - total == 0.0 && error != 0.0 && !(bits & 1)) bits += (error > 0.0) == (total > 0.0) ? 1 : -1;
    __builtin_memcpy(&odd, &bits, 8);
    (*to)[i] = (float)odd;
  }
}
/* Once in a file, for it is long: faster than in each place, and half the code. */
KILN_SHARED void fma_into(vf *to, const vf *pa, const vf *pb, const vf *pc)
{
  const vf a = *pa, b = *pb, c = *pc;
  const vd total = __builtin_convertvector(a, vd) * __builtin_convertvector(b, vd) + __builtin_convertvector(c, vd);
  const wi halves = (wi)total;
  const vi low = __builtin_shufflevector(halves, halves, KILN_EVEN), high = __builtin_shufflevector(halves, halves, KILN_ODD) & 0x7fffffff;
  const vi tie = (low & 0x1fffffff) == 0x10000000;
  const vi tiny = (high < 0x38100000) & (high > 0);
  const vi doubtful = tie | tiny;
  vf result = __builtin_convertvector(total, vf);
  if (__builtin_expect(__builtin_reduce_or(doubtful) != 0, 0)) fma_odd(&result, pa, pb, pc);
  *to = result;
}
KILN_INLINE vf vf_fma(vf a, vf b, vf c)
{
  vf result;
  fma_into(&result, &a, &b, &c);
  return result;
}
#endif

#if defined(__FMA__) || defined(__aarch64__)
KILN_INLINE wf wf_fma(wf a, wf b, wf c) { return __builtin_elementwise_fma(a, b, c); }
#else
KILN_INLINE wf wf_fma(wf a, wf b, wf c)
{
  return wf_join(vf_fma(wf_first(a), wf_first(b), wf_first(c)), vf_fma(wf_second(a), wf_second(b), wf_second(c)));
}
#endif

KILN_INLINE float f_fma(float a, float b, float c) { return vf_fma(vf_all(a), vf_all(b), vf_all(c))[0]; }
