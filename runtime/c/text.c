/* Text as it may be shown, whatever is in it. */
#include <stdio.h>
#include <string.h>

#include "core.h"

size_t kiln_utf8_length(const uint8_t *c, const uint8_t *end) {
  if (*c < 0x80) return 1;
  size_t length = *c >= 0xC2 && *c <= 0xDF ? 2 : (*c & 0xF0) == 0xE0 ? 3 : *c >= 0xF0 && *c <= 0xF4 ? 4 : 0;
  if (length == 0 || (size_t)(end - c) < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((c[i] & 0xC0) != 0x80) return 0;
  }
  bool bad =
      (*c == 0xE0 && c[1] < 0xA0) || (*c == 0xED && c[1] > 0x9F) || (*c == 0xF0 && c[1] < 0x90) || (*c == 0xF4 && c[1] > 0x8F);
  return bad ? 0 : length;
}

static uint32_t code_point(const uint8_t *c, size_t length) {
  static const uint8_t masks[] = {0, 0x7F, 0x1F, 0x0F, 0x07};
  uint32_t value = c[0] & masks[length];
  for (size_t i = 1; i < length; ++i) value = value << 6 | (c[i] & 0x3F);
  return value;
}

/* One character as it is shown; a byte that is no UTF-8 is what Python makes of it in a file name. */
static int show(const uint8_t *c, size_t length, char out[16]) {
  static const char special[] = "\n\r\t\\'", letters[] = "nrt\\'";
  if (length == 0) return snprintf(out, 16, "\\udc%02x", *c);
  uint32_t value = code_point(c, length);
  const char *found = value == 0 || value > 0x7F ? NULL : strchr(special, (int)value);
  if (found != NULL) return snprintf(out, 16, "\\%c", letters[found - special]);
  if (value >= 0x20 && value < 0x7F) return snprintf(out, 16, "%c", (char)value);
  return snprintf(out, 16, value < 0x100 ? "\\x%02x" : value < 0x10000 ? "\\u%04x" : "\\U%08x", value);
}

size_t kiln_ascii(const char *text, size_t bytes, char *out, size_t room) {
  const uint8_t *at = (const uint8_t *)text, *end = at + bytes;
  size_t used = 0;
  char piece[16];
  while (at < end) {
    size_t length = kiln_utf8_length(at, end), shown = (size_t)show(at, length, piece);
    if (used + shown + 4 > room) {
      memcpy(out + used, "...", 3);
      used += 3;
      break;
    }
    memcpy(out + used, piece, shown);
    used += shown;
    at += length == 0 ? 1 : length;
  }
  out[used] = 0;
  return used;
}
