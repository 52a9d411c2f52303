/* What the files that read documents share with each other alone. */
#ifndef KILN_CORE_H
#define KILN_CORE_H

#include "internal.h"

enum { KILN_MAX_JSON = 16 << 20, KILN_MAX_INDEX = 1 << 20, KILN_MAX_ARTIFACT = 64 << 20, KILN_MAX_NAME = 128 };

static inline kiln_code kiln_no_memory(kiln_error *error) {
  return kiln_fail(error, KILN_MEMORY, "The system has no memory left; close something or give this process more.");
}

/* The double next to a decimal number of JSON's grammar (at most 64 characters), ties to even; false if it is infinite. The locale
 * and the rounding mode of the process play no part. */
bool kiln_decimal(const char *text, size_t length, double *out);

/* A text as Python's ascii() shows it, without the quotes around it: cut, with three dots at the end, to fewer than `room` (12 and
 * more) bytes and a zero. Returns its length. */
size_t kiln_ascii(const char *text, size_t bytes, char *out, size_t room);
/* The bytes of the UTF-8 character at `c`; 0 if it is none: a surrogate, overlong, over U+10FFFF. */
size_t kiln_utf8_length(const uint8_t *c, const uint8_t *end);

/* Whether a target's name is of a kind that there is: sm_90a, cpu-x86_64. */
bool kiln_target_named(const char *name);
/* ISA tiers of a CPU target, lowest first, with a NULL at the end; NULL for a target that has none. */
const char *const *kiln_isa_tiers(const char *target);
/* As kiln_cpu_features, of a text such as /proc/cpuinfo has: the features of every processor. */
kiln_code kiln_cpu_features_of(kiln_arena *arena, const char *text, size_t bytes, const cpu_features **out, kiln_error *error);

#endif
