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

/* 32 elements, held as the 16 at even places, then the 16 at odd places: bf16 needs no shuffle to get there, and adding the halves is the
   first level of the pair tree. */
typedef float wf __attribute__((vector_size(128)));
typedef int32_t wi __attribute__((vector_size(128)));
typedef uint32_t wu __attribute__((vector_size(128)));

#define KILN_EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define KILN_ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define KILN_FIRST 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define KILN_SECOND 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31

KILN_INLINE int32_t f_bits(float x) { int32_t b; __builtin_memcpy(&b, &x, 4); return b; }
KILN_INLINE float i_float(int32_t b) { float x; __builtin_memcpy(&x, &b, 4); return x; }
KILN_INLINE float f_abs(float x) { return i_float(f_bits(x) & 0x7fffffff); }
KILN_INLINE float f_maximum(float a, float b) { return b != b ? b : b > a ? b : a; }
KILN_INLINE float f_minimum(float a, float b) { return b != b ? b : b < a ? b : a; }
KILN_INLINE float f_maxnum(float a, float b) { return b != b ? a : a > b ? a : b; }
KILN_INLINE float f_minnum(float a, float b) { return b != b ? a : a < b ? a : b; }
/* A number of the call; NaN gets the payload that f*_round_bf16_clean may meet: none of its lower bits set. */
KILN_INLINE float f_argument(double x) { return x != x ? __builtin_nanf("") : (float)x; }
KILN_INLINE vi8 vi8_all(int32_t x) { return x + (vi8){0}; }

/* Integer arithmetic wraps around. maximum and minimum are NaN where an operand is; a number beats NaN in maxnum and minnum. Where b is
   a constant, each of the four is one instruction. */
#define KILN_ARITHMETIC(F, I, U)                                                                   \
  KILN_INLINE F F##_all(float x) { return x - (F){0}; }                                            \
  KILN_INLINE I I##_all(int32_t x) { return x + (I){0}; }                                          \
  KILN_INLINE I I##_add(I a, I b) { return (I)((U)a + (U)b); }                                     \
  KILN_INLINE I I##_sub(I a, I b) { return (I)((U)a - (U)b); }                                     \
  KILN_INLINE I I##_mul(I a, I b) { return (I)((U)a * (U)b); }                                     \
  KILN_INLINE I I##_shl(I a, I b) { return (I)((U)a << (U)b); }                                    \
  KILN_INLINE I I##_select(I mask, I a, I b) { return (mask & a) | (~mask & b); }                  \
  KILN_INLINE I I##_max(I a, I b) { return I##_select(a > b, a, b); }                              \
  KILN_INLINE F F##_select(I mask, F a, F b) { return (F)I##_select(mask, (I)a, (I)b); }           \
  KILN_INLINE F F##_abs(F x) { return (F)((I)x & 0x7fffffff); }                                    \
  KILN_INLINE F F##_maximum(F a, F b) { return F##_select(b != b, b, F##_select(b > a, b, a)); }   \
  KILN_INLINE F F##_minimum(F a, F b) { return F##_select(b != b, b, F##_select(b < a, b, a)); }   \
  KILN_INLINE F F##_maxnum(F a, F b) { return F##_select(b != b, a, F##_select(a > b, a, b)); }    \
  KILN_INLINE F F##_minnum(F a, F b) { return F##_select(b != b, a, F##_select(a < b, a, b)); }    \
  /* The larger of x and a number that is none yet: NaN in x is passed over. */                    \
  KILN_INLINE F F##_max_into(F x, F top) { return F##_select(x > top, x, top); }                   \
  /* bf16 is held as the f32 of the same value: the upper half of its bits. */                     \
  KILN_INLINE F F##_round_bf16_clean(F x)                                                          \
  {                                                                                                \
    return (F)(((U)x + 0x7fff + (((U)x >> 16) & 1)) & 0xffff0000);                                 \
  }                                                                                                \
  KILN_INLINE F F##_round_bf16(F x)                                                                \
  {                                                                                                \
    return F##_select(x == x, F##_round_bf16_clean(x), (F)(((U)x & 0xffff0000) | 0x00400000));     \
  }
KILN_ARITHMETIC(vf, vi, vu)
KILN_ARITHMETIC(wf, wi, wu)

KILN_INLINE vf wf_first(wf x) { return __builtin_shufflevector(x, x, KILN_FIRST); }
KILN_INLINE vf wf_second(wf x) { return __builtin_shufflevector(x, x, KILN_SECOND); }
KILN_INLINE wf wf_join(vf a, vf b) { return __builtin_shufflevector(a, b, KILN_FIRST, KILN_SECOND); }
KILN_INLINE vi wi_first(wi x) { return __builtin_shufflevector(x, x, KILN_FIRST); }
KILN_INLINE vi wi_second(wi x) { return __builtin_shufflevector(x, x, KILN_SECOND); }
KILN_INLINE wi wi_join(vi a, vi b) { return __builtin_shufflevector(a, b, KILN_FIRST, KILN_SECOND); }

/* The first k elements of x, `other` behind them. */
KILN_INLINE vf vf_keep(vf x, int64_t k, float other)
{
  return k >= 16 ? x : vf_select((vi){KILN_FIRST} < vi_all((int32_t)k), x, vf_all(other));
}
KILN_INLINE wf wf_keep(wf x, int64_t k, float other)
{
  return k >= 32 ? x : wf_select((wi){KILN_EVEN, KILN_ODD} < wi_all((int32_t)k), x, wf_all(other));
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
KILN_INLINE vf bf16_load(const uint16_t *p, int64_t k) { return (vf)(__builtin_convertvector(u16_load(p, k), vu) << 16); }
KILN_INLINE void bf16_store(uint16_t *p, vf v, int64_t k) { u16_store(p, __builtin_convertvector((vi)v >> 16, vh), k); }

/* The same of 32 elements, k of them in memory; beyond them are zeros. */
KILN_INLINE wf bf16_load2(const uint16_t *p, int64_t k)
{
  vu v = {0};
  if (k >= 32) {
    __builtin_memcpy(&v, p, sizeof v);
  } else {
    uint16_t part[32] = {0};
    if (k & 16) __builtin_memcpy(part, p, 32);
    KILN_PART(part + (k & 16), p + (k & 16), k);
    __builtin_memcpy(&v, part, sizeof v);
  }
  return wf_join((vf)(v << 16), (vf)(v & 0xffff0000));
}
KILN_INLINE void bf16_store2(uint16_t *p, wf x, int64_t k)
{
  const vu v = (vu)wf_first(x) >> 16 | ((vu)wf_second(x) & 0xffff0000);
  if (k >= 32) {
    __builtin_memcpy(p, &v, sizeof v);
  } else {
    uint16_t part[32];
    __builtin_memcpy(part, &v, sizeof v);
    if (k & 16) __builtin_memcpy(p, part, 32);
    KILN_PART(p + (k & 16), part + (k & 16), k);
  }
}
KILN_INLINE wf f32_load2(const float *p, int64_t k)
{
  const vf a = f32_load(p, k), b = k > 16 ? f32_load(p + 16, k - 16) : (vf){0};
  return wf_join(__builtin_shufflevector(a, b, KILN_EVEN), __builtin_shufflevector(a, b, KILN_ODD));
}
KILN_INLINE void f32_store2(float *p, wf x, int64_t k)
{
  const wf v = __builtin_shufflevector(x, x, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                       13, 29, 14, 30, 15, 31);
  f32_store(p, wf_first(v), k);
  if (k > 16) f32_store(p + 16, wf_second(v), k - 16);
}
KILN_INLINE void u8_store2(uint8_t *p, wi x, int64_t k)
{
  const vh pairs = __builtin_convertvector((wi_first(x) & 255) | wi_second(x) << 8, vh);
  if (k >= 32) {
    __builtin_memcpy(p, &pairs, sizeof pairs);
  } else {
    uint8_t part[32];
    __builtin_memcpy(part, &pairs, sizeof pairs);
    if (k & 16) __builtin_memcpy(p, part, 16);
    KILN_PART(p + (k & 16), part + (k & 16), k);
  }
}
/* Buffers hold vectors as they are. */
KILN_INLINE wf kept_load2(const float *p) { wf v; __builtin_memcpy(&v, p, sizeof v); return v; }
KILN_INLINE void kept_store2(float *p, wf v) { __builtin_memcpy(p, &v, sizeof v); }
KILN_INLINE vf kept_load(const float *p) { vf v; __builtin_memcpy(&v, p, sizeof v); return v; }
KILN_INLINE void kept_store(float *p, vf v) { __builtin_memcpy(p, &v, sizeof v); }

/* An even and an odd 16-lane half of two neighbours make one level of the pair tree. */
KILN_INLINE vf vf_even(vf a, vf b) { return __builtin_shufflevector(a, b, KILN_EVEN); }
KILN_INLINE vf vf_odd(vf a, vf b) { return __builtin_shufflevector(a, b, KILN_ODD); }
KILN_INLINE vf pair_add(vf a, vf b) { return vf_even(a, b) + vf_odd(a, b); }
KILN_INLINE vf pair_max(vf a, vf b) { return vf_max_into(vf_even(a, b), vf_odd(a, b)); }
KILN_INLINE vf wf_pair_add(wf x) { return wf_first(x) + wf_second(x); }
KILN_INLINE vf wf_pair_max(wf x) { return vf_max_into(wf_first(x), wf_second(x)); }
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
