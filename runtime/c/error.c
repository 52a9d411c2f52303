/* The one way in which libkiln says what was wrong. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"

static const char ELLIPSIS[] = "\xe2\x80\xa6";

/* A message that did not fit ends with an ellipsis, and never within a character. */
static void cut(char *message, size_t room) {
  size_t end = room - sizeof ELLIPSIS;
  while (end > 0 && ((uint8_t)message[end] & 0xC0) == 0x80) --end;
  memcpy(message + end, ELLIPSIS, sizeof ELLIPSIS);
}

kiln_code kiln_fail(kiln_error *error, kiln_code code, const char *format, ...) {
  if (error == NULL) return code;
  error->code = code;
  error->driver = 0;
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(error->message, sizeof error->message, format, arguments);
  va_end(arguments);
  if (length < 0) error->message[0] = 0;
  if (length >= (int)sizeof error->message) cut(error->message, sizeof error->message);
  return code;
}
