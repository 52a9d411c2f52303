/* SHA-512 as FIPS 180-4 has it, in pieces. */
#include "sha512.h"

#include <string.h>

static const uint64_t K[80] = {
  0x428a2f98d728ae22, 0x7137449123ef65cd, 0xb5c0fbcfec4d3b2f, 0xe9b5dba58189dbbc, 0x3956c25bf348b538,
  0x59f111f1b605d019, 0x923f82a4af194f9b, 0xab1c5ed5da6d8118, 0xd807aa98a3030242, 0x12835b0145706fbe,
  0x243185be4ee4b28c, 0x550c7dc3d5ffb4e2, 0x72be5d74f27b896f, 0x80deb1fe3b1696b1, 0x9bdc06a725c71235,
  0xc19bf174cf692694, 0xe49b69c19ef14ad2, 0xefbe4786384f25e3, 0x0fc19dc68b8cd5b5, 0x240ca1cc77ac9c65,
  0x2de92c6f592b0275, 0x4a7484aa6ea6e483, 0x5cb0a9dcbd41fbd4, 0x76f988da831153b5, 0x983e5152ee66dfab,
  0xa831c66d2db43210, 0xb00327c898fb213f, 0xbf597fc7beef0ee4, 0xc6e00bf33da88fc2, 0xd5a79147930aa725,
  0x06ca6351e003826f, 0x142929670a0e6e70, 0x27b70a8546d22ffc, 0x2e1b21385c26c926, 0x4d2c6dfc5ac42aed,
  0x53380d139d95b3df, 0x650a73548baf63de, 0x766a0abb3c77b2a8, 0x81c2c92e47edaee6, 0x92722c851482353b,
  0xa2bfe8a14cf10364, 0xa81a664bbc423001, 0xc24b8b70d0f89791, 0xc76c51a30654be30, 0xd192e819d6ef5218,
  0xd69906245565a910, 0xf40e35855771202a, 0x106aa07032bbd1b8, 0x19a4c116b8d2d0c8, 0x1e376c085141ab53,
  0x2748774cdf8eeb99, 0x34b0bcb5e19b48a8, 0x391c0cb3c5c95a63, 0x4ed8aa4ae3418acb, 0x5b9cca4f7763e373,
  0x682e6ff3d6b2b8a3, 0x748f82ee5defb2fc, 0x78a5636f43172f60, 0x84c87814a1f0ab72, 0x8cc702081a6439ec,
  0x90befffa23631e28, 0xa4506cebde82bde9, 0xbef9a3f7b2c67915, 0xc67178f2e372532b, 0xca273eceea26619c,
  0xd186b8c721c0c207, 0xeada7dd6cde0eb1e, 0xf57d4f7fee6ed178, 0x06f067aa72176fba, 0x0a637dc5a2c898a6,
  0x113f9804bef90dae, 0x1b710b35131c471b, 0x28db77f523047d84, 0x32caab7b40c72493, 0x3c9ebe0a15c9bebc,
  0x431d67c49c100d4c, 0x4cc5d4becb3e42b6, 0x597f299cfc657e2a, 0x5fcb6fab3ad6faec, 0x6c44198c4a475817,
};

static inline uint64_t rotr(uint64_t x, int by) { return x >> by | x << (64 - by); }

static uint64_t load_be(const uint8_t *p) {
  uint64_t x = 0;
  for (int i = 0; i < 8; ++i) x = x << 8 | p[i];
  return x;
}

static void store_be(uint8_t *p, uint64_t x) {
  for (int i = 0; i < 8; ++i) p[i] = (uint8_t)(x >> (56 - 8 * i));
}

static void compress(uint64_t state[8], const uint8_t block[128]) {
  uint64_t w[80], s[8];
  for (int t = 0; t < 16; ++t) w[t] = load_be(block + 8 * t);
  for (int t = 16; t < 80; ++t) {
    uint64_t s0 = rotr(w[t - 15], 1) ^ rotr(w[t - 15], 8) ^ w[t - 15] >> 7;
    uint64_t s1 = rotr(w[t - 2], 19) ^ rotr(w[t - 2], 61) ^ w[t - 2] >> 6;
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  memcpy(s, state, sizeof s);
  for (int t = 0; t < 80; ++t) {
    uint64_t t1 = s[7] + (rotr(s[4], 14) ^ rotr(s[4], 18) ^ rotr(s[4], 41)) + ((s[4] & s[5]) ^ (~s[4] & s[6])) + K[t] + w[t];
    uint64_t t2 = (rotr(s[0], 28) ^ rotr(s[0], 34) ^ rotr(s[0], 39)) + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
    memmove(s + 1, s, 7 * sizeof *s);
    s[4] += t1;
    s[0] = t1 + t2;
  }
  for (int i = 0; i < 8; ++i) state[i] += s[i];
}

void kiln_sha512_start(sha512 *h) {
  static const uint64_t initial[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                      0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
  memcpy(h->state, initial, sizeof initial);
  h->bytes = 0;
}

void kiln_sha512_add(sha512 *h, const void *data, size_t bytes) {
  const uint8_t *at = data;
  while (bytes > 0) {
    size_t used = h->bytes % 128, more = 128 - used < bytes ? 128 - used : bytes;
    memcpy(h->block + used, at, more);
    h->bytes += more, at += more, bytes -= more;
    if (used + more == 128) compress(h->state, h->block);
  }
}

void kiln_sha512_end(sha512 *h, uint8_t digest[64]) {
  static const uint8_t padding[128] = {0x80};
  uint8_t length[16] = {0};
  store_be(length, h->bytes >> 61);
  store_be(length + 8, h->bytes << 3);
  kiln_sha512_add(h, padding, 1 + (size_t)(239 - h->bytes % 128) % 128);
  kiln_sha512_add(h, length, sizeof length);
  for (int i = 0; i < 8; ++i) store_be(digest + 8 * i, h->state[i]);
}
