/* f16 is held as the f32 of the same value. Where the machine converts it does; elsewhere the integer steps give the same bits. */
#if defined(__F16C__) || defined(__aarch64__)
typedef _Float16 vx __attribute__((vector_size(32)));
KILN_INLINE vf f16_widen(vh h) { return __builtin_convertvector((vx)h, vf); }
KILN_INLINE vh f16_narrow(vf x) { return (vh)__builtin_convertvector(x, vx); }
#else
KILN_INLINE vf f16_widen(vh h)
{
  const vu bits = __builtin_convertvector(h, vu);
  const vu magnitude = (bits & 0x7fff) << 13;
  const vf scaled = (vf)magnitude * 0x1p112f; /* rebiases the exponent, and makes subnormals normal */
  const vf value = vf_select((vi)magnitude >= 0x0f800000, (vf)(magnitude | 0x7f800000), scaled);
  return (vf)((vu)value | (bits & 0x8000) << 16);
}
KILN_INLINE vh f16_narrow(vf x)
{
  const vi bits = (vi)x, magnitude = bits & 0x7fffffff;
  const vi normal = ((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - (112 << 10);
  const vi subnormal = (vi)((vf)magnitude + 0.5f) - 0x3f000000; /* 0.5 has an ulp of 2**-24, the step of subnormals */
  const vi finite = vi_select(magnitude < 0x38800000, subnormal, normal);
  const vi special = vi_select(magnitude > 0x7f800000, vi_all(0x7e00), vi_all(0x7c00));
  const vi code = vi_select(magnitude < 0x477ff000, finite, special);
  return __builtin_convertvector((code | ((bits >> 16) & 0x8000)) << 16 >> 16, vh);
}
#endif

KILN_INLINE vf f16_load(const uint16_t *p, int64_t k) { return f16_widen(u16_load(p, k)); }

KILN_INLINE void f16_store(uint16_t *p, vf v, int64_t k) { u16_store(p, f16_narrow(v), k); }

KILN_INLINE vf vf_round_f16(vf x) { return f16_widen(f16_narrow(x)); }
