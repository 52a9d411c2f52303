/* Strict JSON: the one reading on which every implementation agrees. Accepts what kiln.runtime.strictjson accepts. */
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "internal.h"

enum { MAX_VALUES = 2000000, MAX_DEPTH = 64, MAX_NUMBER = 64 };

/* Values and members of the containers that are still open lie on stacks; a container takes its own to the arena when it closes. */
typedef struct { void *data; size_t count, room, size; } stack;

typedef struct {
  kiln_arena *arena;
  kiln_error *error;
  const char *where;
  const uint8_t *start, *at, *end;
  stack values, members;
  int depth;
  kiln_code code; /* of the first thing that was wrong */
} parser;

static bool refuse(parser *p, const char *why) {
  if (p->code == KILN_OK) p->code = kiln_fail(p->error, KILN_SCHEMA, "%s: %s", p->where, why);
  return false;
}
static bool no_memory(parser *p) {
  if (p->code == KILN_OK) p->code = kiln_no_memory(p->error);
  return false;
}
static bool not_json(parser *p, const char *why) {
  if (p->code != KILN_OK) return false;
  size_t line = 1, column = 1;
  for (const uint8_t *c = p->start; c < p->at; ++c) {
    if (*c == '\n') ++line, column = 1;
    else if ((*c & 0xC0) != 0x80) ++column;
  }
  p->code = kiln_fail(p->error, KILN_SCHEMA, "%s: not JSON at line %zu, column %zu: %s.", p->where, line, column, why);
  return false;
}

static void *push(parser *p, stack *s) {
  if (s->count == s->room) {
    size_t room = s->room ? 2 * s->room : 64;
    void *data = realloc(s->data, room * s->size);
    if (data == NULL) {
      no_memory(p);
      return NULL;
    }
    s->data = data, s->room = room;
  }
  return (char *)s->data + s->size * s->count++;
}

/* The items above `base`, moved to the arena; NULL if there are none or no memory. */
static void *take(parser *p, stack *s, size_t base) {
  size_t count = s->count - base;
  if (count == 0) return NULL;
  void *out = kiln_arena_get(p->arena, count, s->size);
  if (out == NULL) no_memory(p);
  else memcpy(out, (char *)s->data + base * s->size, count * s->size);
  s->count = base;
  return out;
}

static void skip_space(parser *p) {
  while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\n')) ++p->at;
}
static int peek(const parser *p) { return p->at < p->end ? *p->at : -1; }
static bool accept(parser *p, const char *word) {
  size_t length = strlen(word);
  if ((size_t)(p->end - p->at) < length || memcmp(p->at, word, length) != 0) return false;
  p->at += length;
  return true;
}

/* ---- strings ---- */
static int hex_digit(int c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* The code unit after \u, or -1. */
static int32_t code_unit(parser *p) {
  int32_t value = 0;
  if (p->end - p->at < 4) return -1;
  for (int i = 0; i < 4; ++i) {
    int digit = hex_digit(*p->at++);
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

static char *put_utf8(char *out, int32_t c) {
  int tail = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
  static const int lead[] = {0, 0xC0, 0xE0, 0xF0};
  *out++ = (char)(lead[tail] | c >> 6 * tail);
  while (tail-- > 0) *out++ = (char)(0x80 | (c >> 6 * tail & 0x3F));
  return out;
}

static char *unicode_escape(parser *p, char *out) {
  int32_t c = code_unit(p);
  if (c >= 0xD800 && c < 0xDC00 && accept(p, "\\u")) {
    int32_t low = code_unit(p);
    if (low < 0) c = -1;
    else if (low >= 0xDC00 && low <= 0xDFFF) c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
  }
  if (c < 0) return not_json(p, "Invalid \\uXXXX escape"), NULL;
  if (c >= 0xD800 && c <= 0xDFFF) return refuse(p, "a string holds half of a surrogate pair; expected Unicode text."), NULL;
  return put_utf8(out, c);
}

static char *escape(parser *p, char *out) {
  static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
  int c = peek(p);
  if (c < 0) return not_json(p, "Unterminated string"), NULL;
  ++p->at;
  if (c == 'u') return unicode_escape(p, out);
  const char *found = strchr(from, c);
  if (c == 0 || found == NULL) return not_json(p, "Invalid \\escape"), NULL;
  *out++ = to[found - from];
  return out;
}

/* An upper bound of the text's bytes: what stands up to its closing quote. An escape is never shorter than what it means. */
static bool string_length(parser *p, size_t *bytes) {
  const uint8_t *c = p->at;
  for (; c < p->end && *c != '"'; ++c) {
    if (*c == '\\' && c + 1 < p->end) ++c;
  }
  if (c >= p->end) return not_json(p, "Unterminated string");
  *bytes = (size_t)(c - p->at);
  return true;
}

/* A string behind its opening quote. */
static bool parse_string(parser *p, const char **text, uint32_t *bytes) {
  size_t most = 0;
  if (!string_length(p, &most)) return false;
  char *start = kiln_arena_get(p->arena, most + 1, 1), *out = start;
  if (start == NULL) return no_memory(p);
  while (*p->at != '"') {
    if (*p->at < 0x20) return not_json(p, "Invalid control character");
    if (*p->at != '\\') {
      *out++ = (char)*p->at++;
      continue;
    }
    ++p->at;
    if ((out = escape(p, out)) == NULL) return false;
  }
  ++p->at;
  *text = start, *bytes = (uint32_t)(out - start);
  return true;
}

/* ---- numbers ---- */
static const uint8_t *digits(const uint8_t *c, const uint8_t *end) {
  while (c < end && *c >= '0' && *c <= '9') ++c;
  return c;
}

/* Where the number at `c` ends as JSON's grammar has it; NULL if none starts there. */
static const uint8_t *number_end(const uint8_t *c, const uint8_t *end, bool *whole) {
  if (c < end && *c == '-') ++c;
  const uint8_t *first = c;
  c = c < end && *c == '0' ? c + 1 : digits(c, end);
  if (c == first) return NULL;
  const uint8_t *integer = c, *more;
  if (end - c > 1 && *c == '.' && (more = digits(c + 1, end)) > c + 1) c = more;
  if (end - c > 1 && (*c == 'e' || *c == 'E')) {
    const uint8_t *e = c + 1 + (c[1] == '+' || c[1] == '-');
    if ((more = digits(e, end)) > e) c = more;
  }
  *whole = c == integer;
  return c;
}

static bool parse_integer(parser *p, const uint8_t *end, json_value *out) {
  bool negative = *p->at == '-';
  uint64_t limit = (uint64_t)INT64_MAX + negative, value = 0;
  for (const uint8_t *c = p->at + negative; c < end; ++c) {
    unsigned digit = (unsigned)(*c - '0');
    if (value > (limit - digit) / 10) {
      int shown = end - p->at < 24 ? (int)(end - p->at) : 24;
      p->code = kiln_fail(p->error, KILN_SCHEMA, "%s: the integer %.*s does not fit 64 bits; expected a smaller one.", p->where,
                          shown, (const char *)p->at);
      return false;
    }
    value = value * 10 + digit;
  }
  out->kind = JSON_INTEGER;
  out->u.integer = negative ? (int64_t)(0 - value) : (int64_t)value;
  return true;
}

static bool parse_number(parser *p, json_value *out) {
  bool whole;
  const uint8_t *end = number_end(p->at, p->end, &whole);
  if (end == NULL) return not_json(p, "Expecting value");
  if (whole) {
    if (!parse_integer(p, end, out)) return false;
  } else {
    size_t length = (size_t)(end - p->at);
    out->kind = JSON_FLOAT;
    if (length > MAX_NUMBER || !kiln_decimal((const char *)p->at, length, &out->u.number)) {
      p->code = kiln_fail(p->error, KILN_SCHEMA, "%s: the number %.*s is no finite double; expected a smaller one.", p->where,
                          length < 24 ? (int)length : 24, (const char *)p->at);
      return false;
    }
  }
  p->at = end;
  return true;
}

/* ---- containers ---- */
static bool parse_value(parser *p, json_value *out);

static bool enter(parser *p) {
  ++p->at;
  return ++p->depth <= MAX_DEPTH || refuse(p, "nested deeper than 64 levels.");
}

static bool parse_list(parser *p, json_value *out) {
  size_t base = p->values.count;
  if (!enter(p)) return false;
  skip_space(p);
  for (bool more = peek(p) != ']'; more;) {
    json_value item = {0}, *slot;
    if (!parse_value(p, &item) || (slot = push(p, &p->values)) == NULL) return false;
    *slot = item;
    skip_space(p);
    if (peek(p) != ',' && peek(p) != ']') return not_json(p, "Expecting ',' delimiter");
    more = *p->at == ',';
    p->at += more;
  }
  ++p->at, --p->depth;
  out->kind = JSON_LIST;
  out->count = (uint32_t)(p->values.count - base);
  out->u.items = take(p, &p->values, base);
  return p->code == KILN_OK;
}

static int by_name(const void *a, const void *b) {
  const json_member *x = *(const json_member *const *)a, *y = *(const json_member *const *)b;
  size_t most = x->bytes < y->bytes ? x->bytes : y->bytes;
  int order = memcmp(x->name, y->name, most);
  return order != 0 ? order : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static bool refuse_twice(parser *p, const json_member *twice) {
  p->code = kiln_fail(p->error, KILN_SCHEMA, "%s: the key '%.200s' stands twice in one object; expected each key once.", p->where,
                      twice->name);
  return false;
}

/* Few keys are compared in pairs, many are sorted: an object may have a million. */
static bool check_unique(parser *p, const json_member *members, size_t count) {
  enum { FEW = 24 };
  if (count <= FEW) {
    for (size_t i = 1; i < count; ++i) {
      for (size_t k = 0; k < i; ++k) {
        if (members[i].bytes == members[k].bytes && memcmp(members[i].name, members[k].name, members[k].bytes) == 0)
          return refuse_twice(p, &members[i]);
      }
    }
    return true;
  }
  const json_member **sorted = malloc(count * sizeof *sorted);
  if (sorted == NULL) return no_memory(p);
  for (size_t i = 0; i < count; ++i) sorted[i] = &members[i];
  qsort(sorted, count, sizeof *sorted, by_name);
  const json_member *twice = NULL;
  for (size_t i = 1; i < count && twice == NULL; ++i) {
    if (by_name(&sorted[i - 1], &sorted[i]) == 0) twice = sorted[i];
  }
  free(sorted);
  return twice == NULL || refuse_twice(p, twice);
}

static bool parse_member(parser *p, json_member *out) {
  skip_space(p);
  if (peek(p) != '"') return not_json(p, "Expecting property name enclosed in double quotes");
  ++p->at;
  if (!parse_string(p, &out->name, &out->bytes)) return false;
  skip_space(p);
  if (peek(p) != ':') return not_json(p, "Expecting ':' delimiter");
  ++p->at;
  return parse_value(p, &out->value);
}

static bool parse_object(parser *p, json_value *out) {
  size_t base = p->members.count;
  if (!enter(p)) return false;
  skip_space(p);
  for (bool more = peek(p) != '}'; more;) {
    json_member member = {0}, *slot;
    if (!parse_member(p, &member) || (slot = push(p, &p->members)) == NULL) return false;
    *slot = member;
    skip_space(p);
    if (peek(p) != ',' && peek(p) != '}') return not_json(p, "Expecting ',' delimiter");
    more = *p->at == ',';
    p->at += more;
  }
  ++p->at, --p->depth;
  out->kind = JSON_OBJECT;
  out->count = (uint32_t)(p->members.count - base);
  out->u.members = take(p, &p->members, base);
  return p->code == KILN_OK && check_unique(p, out->u.members, out->count);
}

/* Recursion is bounded by MAX_DEPTH. */
static bool parse_value(parser *p, json_value *out) {
  static const struct {
    const char *word;
    json_kind kind;
  } words[] = {{"null", JSON_NULL}, {"true", JSON_TRUE}, {"false", JSON_FALSE}};
  static const char *const constants[] = {"NaN", "Infinity", "-Infinity"};
  skip_space(p);
  switch (peek(p)) {
    case '{': return parse_object(p, out);
    case '[': return parse_list(p, out);
    case '"':
      ++p->at;
      out->kind = JSON_TEXT;
      return parse_string(p, &out->u.text, &out->count);
    default: break;
  }
  for (size_t i = 0; i < sizeof words / sizeof *words; ++i) {
    out->kind = words[i].kind;
    if (accept(p, words[i].word)) return true;
  }
  for (size_t i = 0; i < sizeof constants / sizeof *constants; ++i) {
    if (!accept(p, constants[i])) continue;
    p->code = kiln_fail(p->error, KILN_SCHEMA, "%s: %s is not a JSON number; expected a finite one.", p->where, constants[i]);
    return false;
  }
  return parse_number(p, out);
}

/* ---- what is looked at before any value is made ---- */

static bool check_bytes(parser *p, size_t bytes) {
  const uint8_t *data = p->start;
  if ((bytes >= 3 && memcmp(data, "\xEF\xBB\xBF", 3) == 0) ||
      (bytes >= 2 && (memcmp(data, "\xFF\xFE", 2) == 0 || memcmp(data, "\xFE\xFF", 2) == 0)))
    return refuse(p, "starts with a byte order mark; expected plain UTF-8.");
  if (bytes != 0 && memchr(data, 0, bytes) != NULL) return refuse(p, "holds a NUL byte; expected plain UTF-8 text.");
  if (bytes != 0 && memchr(data, '\r', bytes) != NULL)
    return refuse(p, "holds a carriage return; expected lines that end in a newline alone.");
  /* An upper bound on the values, taken before any of them is allocated. */
  size_t values = 1, length;
  for (const uint8_t *c = data; c < p->end; c += length) {
    if ((length = kiln_utf8_length(c, p->end)) == 0) {
      p->code =
          kiln_fail(p->error, KILN_SCHEMA, "%s: byte %zu is not UTF-8; expected plain UTF-8 text.", p->where, (size_t)(c - data));
      return false;
    }
    values += *c == ',' || *c == '[' || *c == '{';
  }
  if (values <= MAX_VALUES) return true;
  p->code = kiln_fail(p->error, KILN_SCHEMA, "%s: about %zu values; expected at most %d.", p->where, values, MAX_VALUES);
  return false;
}

static bool parse_document(parser *p, json_value *out) {
  if (!check_bytes(p, (size_t)(p->end - p->start)) || !parse_value(p, out)) return false;
  skip_space(p);
  return p->at == p->end || not_json(p, "Extra data");
}

kiln_code kiln_json_parse(kiln_arena *arena, const char *where, const uint8_t *data, size_t bytes, json_value *out,
                          kiln_error *error) {
  static const uint8_t nothing[1];
  if (data == NULL) data = nothing, bytes = 0;
  if (bytes > KILN_MAX_JSON)
    return kiln_fail(error, KILN_SCHEMA, "%s: found %zu bytes, expected at most %d; rebuild the tree.", where, bytes,
                     KILN_MAX_JSON);
  parser p = {.arena = arena, .error = error, .where = where, .start = data, .at = data, .end = data + bytes};
  p.values.size = sizeof(json_value);
  p.members.size = sizeof(json_member);
  parse_document(&p, out);
  free(p.values.data);
  free(p.members.data);
  return p.code;
}
