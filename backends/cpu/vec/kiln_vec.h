/* Sixteen lanes at a time, in vector extensions alone: clang makes SSE2, AVX2, AVX-512 or NEON of it, with the same bits. */
#include <stdint.h>

#define KILN_INLINE static inline __attribute__((always_inline, unused))
#define KILN_COLD static __attribute__((noinline, cold, unused))

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef uint8_t vb __attribute__((vector_size(16)));
typedef int32_t vi8 __attribute__((vector_size(32)));
typedef uint8_t vb8 __attribute__((vector_size(8)));

#define KILN_EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define KILN_ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31

KILN_INLINE vf vf_all(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
KILN_INLINE vi vi_all(int32_t x) { return (vi){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
KILN_INLINE vi8 vi8_all(int32_t x) { return (vi8){x, x, x, x, x, x, x, x}; }
KILN_INLINE int32_t f_bits(float x) { int32_t b; __builtin_memcpy(&b, &x, 4); return b; }
KILN_INLINE float i_float(int32_t b) { float x; __builtin_memcpy(&x, &b, 4); return x; }

/* Integer arithmetic wraps around. */
KILN_INLINE vi vi_add(vi a, vi b) { return (vi)((vu)a + (vu)b); }
KILN_INLINE vi vi_sub(vi a, vi b) { return (vi)((vu)a - (vu)b); }
KILN_INLINE vi vi_mul(vi a, vi b) { return (vi)((vu)a * (vu)b); }
KILN_INLINE vi vi_shl(vi a, vi b) { return (vi)((vu)a << (vu)b); }
KILN_INLINE vi vi_select(vi mask, vi a, vi b) { return (mask & a) | (~mask & b); }
KILN_INLINE vi vi_max(vi a, vi b) { return vi_select(a > b, a, b); }
KILN_INLINE vf vf_select(vi mask, vf a, vf b) { return (vf)vi_select(mask, (vi)a, (vi)b); }

/* maximum and minimum are NaN where an operand is; a number beats NaN in maxnum and minnum. One instruction where b is a constant. */
KILN_INLINE vf vf_maximum(vf a, vf b) { return vf_select(b != b, b, vf_select(b > a, b, a)); }
KILN_INLINE vf vf_minimum(vf a, vf b) { return vf_select(b != b, b, vf_select(b < a, b, a)); }
KILN_INLINE vf vf_maxnum(vf a, vf b) { return vf_select(b != b, a, vf_select(a > b, a, b)); }
KILN_INLINE vf vf_minnum(vf a, vf b) { return vf_select(b != b, a, vf_select(a < b, a, b)); }
KILN_INLINE float f_maximum(float a, float b) { return b != b ? b : b > a ? b : a; }
KILN_INLINE float f_minimum(float a, float b) { return b != b ? b : b < a ? b : a; }
KILN_INLINE float f_maxnum(float a, float b) { return b != b ? a : a > b ? a : b; }
KILN_INLINE float f_minnum(float a, float b) { return b != b ? a : a < b ? a : b; }
KILN_INLINE vf vf_abs(vf x) { return (vf)((vi)x & 0x7fffffff); }
KILN_INLINE float f_abs(float x) { return i_float(f_bits(x) & 0x7fffffff); }

/* Lanes [0, k) of x, `other` behind them. */
KILN_INLINE vf vf_keep(vf x, int64_t k, float other)
{
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return k >= 16 ? x : vf_select(lane < vi_all((int32_t)k), x, vf_all(other));
}

/* k elements of memory, 0 behind them; k is 16 in main loops and 1..15 at the end of a row: nothing beyond k is touched. */
#define KILN_PART(to, from, k)                                                                     \
  do {                                                                                             \
    if ((k) & 8) __builtin_memcpy((to), (from), 8 * sizeof *(to));                                 \
    if ((k) & 4) __builtin_memcpy((to) + ((k) & 8), (from) + ((k) & 8), 4 * sizeof *(to));         \
    if ((k) & 2) __builtin_memcpy((to) + ((k) & 12), (from) + ((k) & 12), 2 * sizeof *(to));       \
    if ((k) & 1) (to)[(k) & 14] = (from)[(k) & 14];                                                \
  } while (0)
#define KILN_MEMORY(NAME, VECTOR, ELEMENT)                                                         \
  KILN_INLINE VECTOR NAME##_load(const ELEMENT *p, int64_t k)                                      \
  {                                                                                                \
    VECTOR v = {0};                                                                                \
    if (k >= 16) {                                                                                 \
      __builtin_memcpy(&v, p, sizeof v);                                                           \
    } else {                                                                                       \
      ELEMENT part[16] = {0};                                                                      \
      KILN_PART(part, p, k);                                                                       \
      __builtin_memcpy(&v, part, sizeof v);                                                        \
    }                                                                                              \
    return v;                                                                                      \
  }                                                                                                \
  KILN_INLINE void NAME##_store(ELEMENT *p, VECTOR v, int64_t k)                                   \
  {                                                                                                \
    if (k >= 16) {                                                                                 \
      __builtin_memcpy(p, &v, sizeof v);                                                           \
    } else {                                                                                       \
      ELEMENT part[16];                                                                            \
      __builtin_memcpy(part, &v, sizeof v);                                                        \
      KILN_PART(p, part, k);                                                                       \
    }                                                                                              \
  }
KILN_MEMORY(f32, vf, float)
KILN_MEMORY(i32, vi, int32_t)
KILN_MEMORY(u16, vh, uint16_t)
KILN_MEMORY(vb, vb, uint8_t)

/* Bytes are held in 32-bit lanes. */
KILN_INLINE vi u8_load(const uint8_t *p, int64_t k) { return __builtin_convertvector(vb_load(p, k), vi); }
KILN_INLINE void u8_store(uint8_t *p, vi v, int64_t k) { vb_store(p, __builtin_convertvector(v, vb), k); }

/* bf16 is held as the f32 of the same value: the upper half of its bits. */
KILN_INLINE vf bf16_load(const uint16_t *p, int64_t k) { return (vf)(__builtin_convertvector(u16_load(p, k), vu) << 16); }
KILN_INLINE void bf16_store(uint16_t *p, vf v, int64_t k) { u16_store(p, __builtin_convertvector((vi)v >> 16, vh), k); }
KILN_INLINE vf bf16_round(vf x)
{
  const vu bits = (vu)x;
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
  return vf_select(x == x, (vf)rounded, (vf)((bits & 0xffff0000) | 0x00400000));
}

/* An even and an odd 16-lane half of two neighbours make one level of the pair tree. */
KILN_INLINE vf vf_even(vf a, vf b) { return __builtin_shufflevector(a, b, KILN_EVEN); }
KILN_INLINE vf vf_odd(vf a, vf b) { return __builtin_shufflevector(a, b, KILN_ODD); }
KILN_INLINE vf pair_add(vf a, vf b) { return vf_even(a, b) + vf_odd(a, b); }
KILN_INLINE vf pair_max(vf a, vf b) { const vf e = vf_even(a, b), o = vf_odd(a, b); return vf_select(e > o, e, o); }
KILN_INLINE vi8 vi_pick0(vi x) { return __builtin_shufflevector(x, x, 0, 2, 4, 6, 8, 10, 12, 14); }
KILN_INLINE vi8 vi_pick1(vi x) { return __builtin_shufflevector(x, x, 1, 3, 5, 7, 9, 11, 13, 15); }

/* The first k of 8 packed bytes (k is 8 in main loops). */
KILN_INLINE void u8x8_store(uint8_t *p, vi8 v, int64_t k)
{
  const vb8 bytes = __builtin_convertvector(v, vb8);
  uint8_t part[8];
  if (k >= 8) {
    __builtin_memcpy(p, &bytes, 8);
    return;
  }
  __builtin_memcpy(part, &bytes, 8);
  KILN_PART(p, part, k);
}

/* 2, 4, 8 or 16 vectors V(j), V(j + 1), … folded to one by F: lane i then holds the root of vector j + i. */
#define KILN_FOLD2(F, V, j) F(V(j), V((j) + 1))
#define KILN_FOLD4(F, V, j) F(KILN_FOLD2(F, V, j), KILN_FOLD2(F, V, (j) + 2))
#define KILN_FOLD8(F, V, j) F(KILN_FOLD4(F, V, j), KILN_FOLD4(F, V, (j) + 4))
#define KILN_FOLD16(F, V, j) F(KILN_FOLD8(F, V, j), KILN_FOLD8(F, V, (j) + 8))

/* The pair tree of a row: level[b] is a finished subtree of 2**b vectors where bit b of the number of vectors so far is set. */
#define KILN_LEVELS 48
KILN_INLINE void tree_push(vf *level, uint64_t blocks, vf v)
{
  for (; blocks & 1; blocks >>= 1) v = pair_add(*level++, v);
  *level = v;
}

/* The root, when `rest` (level 0) holds what is left behind the finished subtrees. The last +0 makes the bits independent of padding. */
KILN_INLINE float tree_root(const vf *level, uint64_t vectors, vf rest, int has_rest)
{
  const vf zero = {0};
  if (!has_rest && vectors) {
    const int lowest = __builtin_ctzll(vectors);
    level += lowest;
    rest = *level;
    vectors = (vectors >> lowest) ^ 1;
  }
  for (; vectors; vectors >>= 1, ++level) rest = vectors & 1 ? pair_add(*level, rest) : pair_add(rest, zero);
  for (int i = 0; i < 4; ++i) rest = pair_add(rest, zero);
  return rest[0] + 0.0f;
}

KILN_INLINE float lanes_max(vf v)
{
  const vf low = vf_all(-__builtin_inff());
  for (int i = 0; i < 4; ++i) v = pair_max(v, low);
  return v[0];
}

KILN_INLINE void row_copy(void *to, const void *from, int64_t bytes)
{
  const uint8_t *p = from;
  uint8_t *q = to;
  int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) i32_store((int32_t *)(void *)(q + i), i32_load((const int32_t *)(const void *)(p + i), 16), 16);
  for (; i + 16 <= bytes; i += 16) vb_store(q + i, vb_load(p + i, 16), 16);
  if (i < bytes) vb_store(q + i, vb_load(p + i, bytes - i), bytes - i);
}
