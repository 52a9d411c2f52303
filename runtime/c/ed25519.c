/* Verification of Ed25519 signatures as RFC 8032 has it, without the cofactor: [S]B - [k]A must encode to R.
 *
 * Of the rules in which verifiers differ ("Taming the many EdDSAs", Chalkias, Garillot and Nikolaenko 2020) it follows these:
 * S of L and more is refused, so that no signature can be turned into another one (SUF-CMA); a key of small order is refused, which
 * would fit a signature to several messages (strong binding; libsodium does, OpenSSL and the RFC do not); a key must be the one
 * encoding of its point; R is compared byte by byte, so that it must be too; the hash takes the bytes as they are. R of small order
 * and a key with a part of small order are fine where the equation itself holds, not where only eight times it does.
 *
 * The field is integers modulo p = 2^255 - 19 in five limbs of 51 bits; points are extended coordinates on -x^2 + y^2 = 1 + d x^2
 * y^2, whose one addition formula holds for every two points, equal ones and the neutral one included. */
#include "ed25519.h"

#include <string.h>

#include "sha512.h"

__extension__ typedef unsigned __int128 u128;

/* ---- the field; limbs of results of times() and decode stay below 2^52, which add() and subtract() count on ---- */
typedef struct { uint64_t v[5]; } fe;

static const uint64_t MASK = ((uint64_t)1 << 51) - 1;
static const fe ONE = {{1, 0, 0, 0, 0}};
static const fe D = {{0x34dca135978a3, 0x1a8283b156ebd, 0x5e7a26001c029, 0x739c663a03cbb, 0x52036cee2b6ff}};
static const fe TWO_D = {{0x69b9426b2f159, 0x35050762add7a, 0x3cf44c0038052, 0x6738cc7407977, 0x2406d9dc56dff}};
static const fe ROOT_OF_MINUS_ONE = {{0x61b274a0ea0b0, 0xd5a5fc8f189d, 0x7ef5e9cbd0c60, 0x78595a6804c9e, 0x2b8324804fc1d}};

static fe add(fe a, fe b) {
  for (int i = 0; i < 5; ++i) a.v[i] += b.v[i];
  return a;
}

/* a - b + 4p: no limb goes below zero. */
static fe subtract(fe a, fe b) {
  a.v[0] += 4 * (MASK - 18) - b.v[0];
  for (int i = 1; i < 5; ++i) a.v[i] += 4 * MASK - b.v[i];
  return a;
}

static fe times(fe a, fe b) {
  u128 sums[5] = {0};
  for (int i = 0; i < 5; ++i) {
    for (int k = 0; k < 5; ++k) sums[(i + k) % 5] += (u128)a.v[i] * (i + k < 5 ? b.v[k] : 19 * b.v[k]);
  }
  fe out;
  u128 carry = 0;
  for (int i = 0; i < 5; ++i) {
    carry += sums[i];
    out.v[i] = (uint64_t)carry & MASK;
    carry >>= 51;
  }
  carry = carry * 19 + out.v[0];
  out.v[0] = (uint64_t)carry & MASK;
  out.v[1] += (uint64_t)(carry >> 51);
  return out;
}

/* a to a power that starts with `ones` set bits and ends with those of `tail`, as p - 2 and (p - 5) / 8 do. */
static fe power(fe a, int ones, uint32_t tail, int tail_bits) {
  fe out = ONE;
  for (int i = 0; i < ones; ++i) out = times(times(out, out), a);
  for (int i = tail_bits - 1; i >= 0; --i) {
    out = times(out, out);
    if (tail >> i & 1) out = times(out, a);
  }
  return out;
}

static fe inverse(fe a) { return power(a, 250, 0x0B, 5); }       /* p - 2 = (2^250 - 1) * 2^5 + 11 */
static fe power_for_root(fe a) { return power(a, 250, 0x1, 2); } /* (p - 5) / 8 = (2^250 - 1) * 2^2 + 1 */

static uint64_t load_le(const uint8_t *p) {
  uint64_t x = 0;
  for (int i = 7; i >= 0; --i) x = x << 8 | p[i];
  return x;
}

/* The low 255 bits. */
static fe from_bytes(const uint8_t b[32]) {
  uint64_t w[4];
  for (int i = 0; i < 4; ++i) w[i] = load_le(b + 8 * i);
  return (fe){{w[0] & MASK, (w[0] >> 51 | w[1] << 13) & MASK, (w[1] >> 38 | w[2] << 26) & MASK, (w[2] >> 25 | w[3] << 39) & MASK,
               w[3] >> 12 & MASK}};
}

static void carry_over(fe *a) {
  for (int i = 0; i < 4; ++i) {
    a->v[i + 1] += a->v[i] >> 51;
    a->v[i] &= MASK;
  }
  a->v[0] += 19 * (a->v[4] >> 51);
  a->v[4] &= MASK;
}

/* The one number below p. */
static void to_bytes(fe a, uint8_t out[32]) {
  carry_over(&a);
  carry_over(&a);
  uint64_t over = (a.v[0] + 19) >> 51; /* 1 if a >= p */
  for (int i = 1; i < 5; ++i) over = (a.v[i] + over) >> 51;
  a.v[0] += 19 * over;
  for (int i = 0; i < 4; ++i) {
    a.v[i + 1] += a.v[i] >> 51;
    a.v[i] &= MASK;
  }
  a.v[4] &= MASK;
  const uint64_t w[4] = {a.v[0] | a.v[1] << 51, a.v[1] >> 13 | a.v[2] << 38, a.v[2] >> 26 | a.v[3] << 25,
                         a.v[3] >> 39 | a.v[4] << 12};
  for (int i = 0; i < 32; ++i) out[i] = (uint8_t)(w[i / 8] >> 8 * (i % 8));
}

static bool equal(fe a, fe b) {
  uint8_t x[32], y[32];
  to_bytes(a, x);
  to_bytes(b, y);
  return memcmp(x, y, sizeof x) == 0;
}

static bool is_zero(fe a) { return equal(a, (fe){{0}}); }

static bool is_odd(fe a) {
  uint8_t x[32];
  to_bytes(a, x);
  return x[0] & 1;
}

/* ---- points: x = X / Z, y = Y / Z, T = X Y / Z ---- */
typedef struct { fe x, y, z, t; } point;

static const point NEUTRAL = {.y = {{1, 0, 0, 0, 0}}, .z = {{1, 0, 0, 0, 0}}};
static const point BASE = {
  {{0x62d608f25d51a, 0x412a4b4f6592a, 0x75b7171a4b31d, 0x1ff60527118fe, 0x216936d3cd6e5}},
  {{0x6666666666658, 0x4cccccccccccc, 0x1999999999999, 0x3333333333333, 0x6666666666666}},
  {{1, 0, 0, 0, 0}},
  {{0x68ab3a5b7dda3, 0xeea2a5eadbb, 0x2af8df483c27e, 0x332b375274732, 0x67875f0fd78b7}},
};

static point sum(const point *p, const point *q) {
  fe a = times(subtract(p->y, p->x), subtract(q->y, q->x)), b = times(add(p->y, p->x), add(q->y, q->x));
  fe c = times(times(p->t, TWO_D), q->t), zz = times(p->z, q->z), d = add(zz, zz);
  fe e = subtract(b, a), f = subtract(d, c), g = add(d, c), h = add(b, a);
  return (point){times(e, f), times(g, h), times(f, g), times(e, h)};
}

static point negative(const point *p) {
  return (point){times(subtract((fe){{0}}, p->x), ONE), p->y, p->z, times(subtract((fe){{0}}, p->t), ONE)};
}

/* The point that 32 bytes encode; false if there is none, or if they are not its one encoding. */
static bool decode(const uint8_t bytes[32], point *out) {
  uint8_t again[32];
  fe y = from_bytes(bytes), yy = times(y, y), u = subtract(yy, ONE), v = add(times(yy, D), ONE);
  u = times(u, ONE), v = times(v, ONE);
  to_bytes(y, again);
  again[31] |= bytes[31] & 0x80;
  if (memcmp(again, bytes, sizeof again) != 0) return false;
  fe v3 = times(times(v, v), v), v7 = times(times(v3, v3), v);
  fe x = times(times(u, v3), power_for_root(times(u, v7))), vxx = times(v, times(x, x));
  if (!equal(vxx, u)) {
    if (!is_zero(add(vxx, u))) return false;
    x = times(x, ROOT_OF_MINUS_ONE);
  }
  bool odd = bytes[31] >> 7;
  if (odd && is_zero(x)) return false;
  if (is_odd(x) != odd) x = times(subtract((fe){{0}}, x), ONE);
  *out = (point){x, y, ONE, times(x, y)};
  return true;
}

static void encode(const point *p, uint8_t out[32]) {
  fe z = inverse(p->z);
  to_bytes(times(p->y, z), out);
  out[31] = (uint8_t)(out[31] | is_odd(times(p->x, z)) << 7);
}

static bool has_small_order(const point *p) {
  point eight = *p;
  for (int i = 0; i < 3; ++i) eight = sum(&eight, &eight);
  return is_zero(eight.x) && equal(eight.y, eight.z);
}

/* ---- scalars modulo L = 2^252 + 27742317777372353535851937790883648493 ---- */
typedef struct { uint64_t w[4]; } scalar;
static const scalar L = {{0x5812631a5cf5d3ed, 0x14def9dea2f79cd6, 0, 0x1000000000000000}};

static bool is_below_l(const scalar *s) {
  for (int i = 3; i >= 0; --i) {
    if (s->w[i] != L.w[i]) return s->w[i] < L.w[i];
  }
  return false;
}

static void subtract_l(scalar *s) {
  uint64_t borrow = 0;
  for (int i = 0; i < 4; ++i) {
    u128 difference = (u128)s->w[i] - L.w[i] - borrow;
    s->w[i] = (uint64_t)difference;
    borrow = (uint64_t)(difference >> 64) & 1;
  }
}

static scalar load_scalar(const uint8_t bytes[32]) {
  scalar s;
  for (int i = 0; i < 4; ++i) s.w[i] = load_le(bytes + 8 * i);
  return s;
}

/* 64 bytes modulo L, a bit at a time from the highest. */
static scalar reduce(const uint8_t bytes[64]) {
  scalar s = {{0}};
  for (int bit = 511; bit >= 0; --bit) {
    for (int i = 3; i > 0; --i) s.w[i] = s.w[i] << 1 | s.w[i - 1] >> 63;
    s.w[0] = s.w[0] << 1 | (bytes[bit / 8] >> bit % 8 & 1);
    if (!is_below_l(&s)) subtract_l(&s);
  }
  return s;
}

static int bit_of(const scalar *s, int bit) { return (int)(s->w[bit / 64] >> bit % 64 & 1); }

/* [a]p + [b]q */
static point combine(const scalar *a, const point *p, const scalar *b, const point *q) {
  const point both = sum(p, q), *const added[] = {NULL, p, q, &both};
  point out = NEUTRAL;
  for (int bit = 252; bit >= 0; --bit) {
    const point *more = added[bit_of(a, bit) | bit_of(b, bit) << 1];
    out = sum(&out, &out);
    if (more != NULL) out = sum(&out, more);
  }
  return out;
}

bool kiln_ed25519_verify(const uint8_t key[32], const void *message, size_t bytes, const uint8_t signature[64]) {
  point a;
  uint8_t digest[64], r[32];
  scalar s = load_scalar(signature + 32);
  if (!is_below_l(&s) || !decode(key, &a) || has_small_order(&a)) return false;
  sha512 h;
  kiln_sha512_start(&h);
  kiln_sha512_add(&h, signature, 32);
  kiln_sha512_add(&h, key, 32);
  kiln_sha512_add(&h, message, bytes);
  kiln_sha512_end(&h, digest);
  scalar k = reduce(digest);
  point minus_a = negative(&a), found = combine(&s, &BASE, &k, &minus_a);
  encode(&found, r);
  return memcmp(r, signature, sizeof r) == 0;
}
