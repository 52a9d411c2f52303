/* Messages: built in a caller's buffer, cut with an ellipsis where they do not fit. */
#include "run.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void kiln_put(sink *s, const char *format, ...) {
  if (s == NULL) return;
  va_list list;
  va_start(list, format);
  size_t room = s->used < s->size ? s->size - s->used : 0;
  int written = vsnprintf(room ? s->text + s->used : NULL, room, format, list);
  va_end(list);
  if (written > 0) s->used += (size_t)written;
}

/* Whatever the locale's decimal point is. */
static void with_point(char *text) {
  for (; *text; text++)
    if ((*text < '0' || *text > '9') && *text != '-' && *text != '+' && *text != 'e') *text = '.';
}

void kiln_put_number(sink *s, double value) {
  if (s == NULL) return;
  if (isnan(value) || isinf(value)) {
    kiln_put(s, "%s", isnan(value) ? "nan" : value < 0 ? "-inf" : "inf");
    return;
  }
  char text[64];
  int digits = 1;
  do {
    snprintf(text, sizeof text, "%.*e", digits - 1, value);
  } while (strtod(text, NULL) != value && ++digits <= 17);
  int exponent = atoi(strchr(text, 'e') + 1), decimals = digits - 1 - exponent;
  if (exponent >= -4 && exponent < 16) snprintf(text, sizeof text, "%.*f", decimals < 1 ? 1 : decimals, value);
  with_point(text);
  kiln_put(s, "%s", text);
}

void kiln_put_attr(sink *s, const attr_value *value) {
  if (value->kind == JSON_TEXT) kiln_put(s, "'%s'", value->text);
  else if (value->kind == JSON_INTEGER) kiln_put(s, "%lld", (long long)value->integer);
  else kiln_put(s, "%s", value->kind == JSON_TRUE ? "True" : "False");
}

sink kiln_message(kiln_error *error) {
  return (sink){error != NULL ? error->message : NULL, error != NULL ? sizeof error->message : 0, 0};
}

kiln_code kiln_fail_put(kiln_error *error, kiln_code code, const sink *s) {
  if (error == NULL) return code;
  error->code = code;
  error->driver = 0;
  if (s->used >= s->size) memcpy(error->message + s->size - 4, "...", 4);
  return code;
}

/* Edits (insertions, deletions, replacements) that turn one name into the other; names longer than a row are not compared. */
static uint32_t distance(const char *a, const char *b) {
  enum { ROW = 128 };
  size_t m = strlen(a), n = strlen(b);
  if (m >= ROW || n >= ROW) return UINT32_MAX;
  uint32_t row[ROW];
  for (uint32_t j = 0; j <= n; j++) row[j] = j;
  for (uint32_t i = 1; i <= m; i++) {
    uint32_t diagonal = row[0];
    row[0] = i;
    for (uint32_t j = 1; j <= n; j++) {
      uint32_t best = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      if (row[j] + 1 < best) best = row[j] + 1;
      if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
      row[j] = best;
    }
  }
  return row[n];
}

void kiln_put_nearest(sink *s, const char *name, const char *const *known, uint32_t count) {
  uint32_t best = UINT32_MAX, at = 0;
  for (uint32_t i = 0; i < count; i++) {
    uint32_t d = distance(name, known[i]);
    if (d < best) best = d, at = i;
  }
  size_t length = strlen(name);
  if (best != UINT32_MAX && 5 * (size_t)best <= 2 * (length + strlen(known[at])) / 2) {
    kiln_put(s, "did you mean %s?", known[at]);
    return;
  }
  kiln_put(s, "there is ");
  for (uint32_t i = 0; i < count && i < 20; i++) kiln_put(s, "%s%s", i ? ", " : "", known[i]);
  kiln_put(s, count > 20 ? " and more." : ".");
}
