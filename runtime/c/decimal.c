/* Decimal text to double, correctly rounded, in integers alone: strtod goes by the locale and by the rounding mode. */
#include <string.h>

#include "core.h"

/* 64 characters hold at most 62 digits; with an exponent that is neither infinite nor zero, both sides of the quotient stay below
 * 10^400, and one of them is shifted by as many bits as the other has. */
enum { WORDS = 96, LARGEST_TENS = 310, SMALLEST_TENS = -330, FAR = 100000 };

typedef struct { uint32_t words[WORDS]; int count; } big; /* the lowest word first; the highest is not 0 */

static void times(big *b, uint32_t by, uint32_t plus) {
  uint64_t carry = plus;
  for (int i = 0; i < b->count; ++i) {
    carry += (uint64_t)b->words[i] * by;
    b->words[i] = (uint32_t)carry;
    carry >>= 32;
  }
  if (carry != 0) b->words[b->count++] = (uint32_t)carry;
}

static int bits_of(const big *b) { return 32 * b->count - __builtin_clz(b->words[b->count - 1]); }

static void shift_left(big *b, int by) {
  int words = by / 32, bits = by % 32;
  memmove(b->words + words, b->words, (size_t)b->count * sizeof *b->words);
  memset(b->words, 0, (size_t)words * sizeof *b->words);
  b->count += words;
  if (bits != 0) times(b, (uint32_t)1 << bits, 0);
}

static int compare(const big *a, const big *b) {
  if (a->count != b->count) return a->count < b->count ? -1 : 1;
  for (int i = a->count - 1; i >= 0; --i) {
    if (a->words[i] != b->words[i]) return a->words[i] < b->words[i] ? -1 : 1;
  }
  return 0;
}

/* a -= b, where a >= b. */
static void subtract(big *a, const big *b) {
  int64_t borrow = 0;
  for (int i = 0; i < a->count; ++i) {
    int64_t word = (int64_t)a->words[i] - (i < b->count ? b->words[i] : 0) + borrow;
    a->words[i] = (uint32_t)word;
    borrow = word >> 32;
  }
  while (a->count > 0 && a->words[a->count - 1] == 0) --a->count;
}

typedef struct { big digits; int count, tens; } decimal; /* digits * 10^tens; `count` significant digits */

static decimal read_decimal(const char *c, const char *end) {
  decimal d = {.count = 0};
  bool fraction = false;
  for (; c < end && *c != 'e' && *c != 'E'; ++c) {
    if (*c == '.') {
      fraction = true;
      continue;
    }
    times(&d.digits, 10, (uint32_t)(*c - '0'));
    d.count += d.digits.count != 0;
    d.tens -= fraction;
  }
  if (c == end) return d;
  bool negative = *++c == '-';
  int tens = 0;
  for (c += *c == '-' || *c == '+'; c < end; ++c) tens = tens < FAR ? 10 * tens + (*c - '0') : FAR;
  d.tens += negative ? -tens : tens;
  return d;
}

/* The bits of quotient * 2^(exponent - 63), the highest bit of the quotient being set; `rest`: there is more behind it. */
static uint64_t round_bits(uint64_t quotient, int exponent, bool rest) {
  if (exponent > 1023) return (uint64_t)0x7FF << 52;
  int precision = exponent >= -1022 ? 53 : 53 + 1022 + exponent;
  if (precision < 0) return 0;
  uint64_t kept = precision == 0 ? 0 : quotient >> (64 - precision), behind = quotient << precision, half = (uint64_t)1 << 63;
  kept += behind > half || (behind == half && (rest || (kept & 1)));
  return exponent >= -1022 ? ((uint64_t)(exponent + 1022) << 52) + kept : kept;
}

static uint64_t quotient_bits(big *a, big *b) {
  int exponent = bits_of(a) - bits_of(b);
  shift_left(exponent > 0 ? b : a, exponent > 0 ? exponent : -exponent);
  if (compare(a, b) < 0) {
    shift_left(a, 1);
    --exponent;
  }
  uint64_t quotient = 0; /* a / b lies in [1, 2) */
  for (int i = 0; i < 64; ++i) {
    bool one = compare(a, b) >= 0;
    if (one) subtract(a, b);
    quotient = quotient << 1 | one;
    if (a->count != 0) shift_left(a, 1);
  }
  return round_bits(quotient, exponent, a->count != 0);
}

bool kiln_decimal(const char *text, size_t length, double *out) {
  bool negative = *text == '-';
  decimal d = read_decimal(text + negative, text + length);
  uint64_t bits = 0;
  if (d.count != 0 && d.count + d.tens > LARGEST_TENS) return false;
  if (d.count != 0 && d.count + d.tens >= SMALLEST_TENS) {
    big one = {.words = {1}, .count = 1};
    for (int i = d.tens; i > 0; --i) times(&d.digits, 10, 0);
    for (int i = d.tens; i < 0; ++i) times(&one, 10, 0);
    bits = quotient_bits(&d.digits, &one);
  }
  if (bits == (uint64_t)0x7FF << 52) return false;
  bits |= (uint64_t)negative << 63;
  memcpy(out, &bits, sizeof bits);
  return true;
}
