/* The readers that any schema needs. */
#include "fields.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- refusals ---- */
typedef struct { char text[768]; size_t used; } line;

static void add(line *l, const char *text, size_t bytes) {
  size_t room = sizeof l->text - 1 - l->used;
  if (bytes > room) bytes = room;
  memcpy(l->text + l->used, text, bytes);
  l->used += bytes;
  l->text[l->used] = 0;
}

/* Where the value stood, as a JSON pointer that can be printed. */
static void add_pointer(line *l, const reading *r) {
  enum { SHOWN = 200 };
  char shown[SHOWN];
  for (int i = 0; i < r->depth; ++i) {
    const char *name = r->path[i].name;
    if (name == NULL) snprintf(shown, sizeof shown, "%" PRIu32, r->path[i].index);
    else kiln_ascii(name, r->path[i].index, shown, sizeof shown);
    add(l, "/", 1);
    for (const char *c = shown; *c; ++c) {
      if (*c == '~' || *c == '/') add(l, *c == '~' ? "~0" : "~1", 2);
      else add(l, c, 1);
    }
  }
  if (r->depth == 0) add(l, "/", 1);
}

/* Cut: it may be huge or hostile. */
static void add_shown_text(line *l, const char *text, size_t bytes) {
  enum { SHOWN = 76 };
  char shown[SHOWN + 16];
  add(l, "'", 1);
  add(l, shown, kiln_ascii(text, bytes, shown, SHOWN));
  add(l, "'", 1);
}

static void add_shown(line *l, const json_value *v) {
  char text[64] = "";
  switch (v->kind) {
    case JSON_NULL: strcpy(text, "None"); break;
    case JSON_FALSE: strcpy(text, "False"); break;
    case JSON_TRUE: strcpy(text, "True"); break;
    case JSON_INTEGER: snprintf(text, sizeof text, "%" PRId64, v->u.integer); break;
    case JSON_FLOAT: snprintf(text, sizeof text, "%.17g", v->u.number); break;
    case JSON_TEXT: add_shown_text(l, v->u.text, v->count); return;
    case JSON_LIST: snprintf(text, sizeof text, "a list of %" PRIu32 " values", v->count); break;
    case JSON_OBJECT: snprintf(text, sizeof text, "an object of %" PRIu32 " keys", v->count); break;
  }
  add(l, text, strlen(text));
}

static bool refuse(reading *r, const char *expected, const line *found) {
  if (r->code != KILN_OK) return false;
  line pointer = {.used = 0};
  add_pointer(&pointer, r);
  r->code = kiln_fail(r->error, KILN_SCHEMA, "%s at %s: found %s, expected %s.", r->where, pointer.text, found->text, expected);
  return false;
}

bool kiln_mismatch(reading *r, const char *expected, const json_value *found) {
  line shown = {.used = 0};
  add_shown(&shown, found);
  return refuse(r, expected, &shown);
}

bool kiln_mismatch_text(reading *r, const char *expected, const char *found) {
  line shown = {.used = 0};
  add(&shown, found, strlen(found));
  return refuse(r, expected, &shown);
}

bool kiln_out_of_memory(reading *r) {
  if (r->code == KILN_OK) r->code = kiln_no_memory(r->error);
  return false;
}

bool kiln_step(reading *r, const char *name, uint32_t index) {
  if (r->depth == (int)(sizeof r->path / sizeof *r->path)) return kiln_mismatch_text(r, "fewer levels", "a deeply nested value");
  r->path[r->depth++] = (path_step){name, index};
  return true;
}

/* ---- plain values ---- */
static bool in_class(const char *class, char c) {
  for (; *class; ++class) {
    if (class[1] == '-' && class[2] != 0) {
      if (c >= class[0] && c <= class[2]) return true;
      class += 2;
    } else if (c == *class) {
      return true;
    }
  }
  return false;
}

bool kiln_text_matches(const text_rule *rule, const char *text, size_t bytes) {
  if (bytes > rule->most) return false;
  size_t prefix = rule->prefix == NULL ? 0 : strlen(rule->prefix);
  if (prefix != 0 && bytes > prefix && memcmp(text, rule->prefix, prefix) == 0) text += prefix, bytes -= prefix;
  if (bytes == 0 || !in_class(rule->first, *text)) return false;
  for (size_t i = 1; i < bytes; ++i) {
    if (!in_class(rule->rest, text[i])) return false;
  }
  return true;
}

static bool keep_text(reading *r, const json_value *value, void *out) {
  if (out == NULL) return true;
  const char *copy = kiln_arena_text(r->keep, value->u.text, value->count);
  if (copy == NULL) return kiln_out_of_memory(r);
  memcpy(out, &copy, sizeof copy);
  return true;
}

bool kiln_read_text(reading *r, const reader *how, const json_value *value, void *out) {
  if (value->kind != JSON_TEXT || !kiln_text_matches(how->rule, value->u.text, value->count))
    return kiln_mismatch(r, how->expected, value);
  return keep_text(r, value, out);
}

/* Any text of at most 65536 characters. */
bool kiln_read_doc(reading *r, const reader *how, const json_value *value, void *out) {
  (void)how;
  size_t characters = 0;
  for (uint32_t i = 0; value->kind == JSON_TEXT && i < value->count; ++i) characters += ((uint8_t)value->u.text[i] & 0xC0) != 0x80;
  if (value->kind != JSON_TEXT || characters > 1 << 16 || strlen(value->u.text) != value->count)
    return kiln_mismatch(r, "text", value);
  return keep_text(r, value, out);
}

bool kiln_read_digest(reading *r, const reader *how, const json_value *value, void *out) {
  (void)how;
  static const char digits[] = "0123456789abcdef";
  uint8_t digest[32] = {0};
  bool good = value->kind == JSON_TEXT && value->count == 64;
  for (int i = 0; good && i < 64; ++i) {
    const char *digit = memchr(digits, value->u.text[i], 16);
    good = digit != NULL;
    if (good) digest[i / 2] = (uint8_t)(digest[i / 2] << 4 | (digit - digits));
  }
  if (!good) return kiln_mismatch(r, "a SHA-256 digest of 64 lower-case hex digits", value);
  if (out != NULL) memcpy(out, digest, sizeof digest);
  return true;
}

bool kiln_read_integer(reading *r, const reader *how, const json_value *value, void *out) {
  if (value->kind != JSON_INTEGER || value->u.integer < how->low || value->u.integer > how->high) {
    char expected[80];
    snprintf(expected, sizeof expected, "an integer from %" PRId64 " to %" PRId64, how->low, how->high);
    return kiln_mismatch(r, expected, value);
  }
  if (out != NULL) memcpy(out, &value->u.integer, sizeof value->u.integer);
  return true;
}

bool kiln_read_number(reading *r, const reader *how, const json_value *value, void *out) {
  (void)how;
  if (value->kind != JSON_INTEGER && value->kind != JSON_FLOAT) return kiln_mismatch(r, "a number", value);
  double number = value->kind == JSON_INTEGER ? (double)value->u.integer : value->u.number;
  if (out != NULL) memcpy(out, &number, sizeof number);
  return true;
}

bool kiln_read_flag(reading *r, const reader *how, const json_value *value, void *out) {
  (void)how;
  if (value->kind != JSON_TRUE && value->kind != JSON_FALSE) return kiln_mismatch(r, "true or false", value);
  if (out != NULL) *(bool *)out = value->kind == JSON_TRUE;
  return true;
}

bool kiln_read_any(reading *r, const reader *how, const json_value *value, void *out) {
  (void)r, (void)how, (void)value, (void)out;
  return true;
}

/* ---- choices ---- */
bool kiln_is_text(const json_value *value, const char *text) {
  return value->kind == JSON_TEXT && value->count == strlen(text) && memcmp(value->u.text, text, value->count) == 0;
}

static bool refuse_choice(reading *r, const char *const *words, const json_value *value) {
  line listed = {.used = 0};
  if (words[1] != NULL) add(&listed, "one of ", 7);
  for (int i = 0; words[i] != NULL; ++i) {
    if (i > 0) add(&listed, ", ", 2);
    add(&listed, "'", 1);
    add(&listed, words[i], strlen(words[i]));
    add(&listed, "'", 1);
  }
  return kiln_mismatch(r, listed.text, value);
}

static int chosen(const char *const *words, const json_value *value) {
  for (int i = 0; words[i] != NULL; ++i) {
    if (kiln_is_text(value, words[i])) return i;
  }
  return -1;
}

/* One of some words, kept as that word. */
bool kiln_read_word(reading *r, const reader *how, const json_value *value, void *out) {
  const char *const *words = how->rule;
  int found = chosen(words, value);
  if (found < 0) return refuse_choice(r, words, value);
  if (out != NULL) memcpy(out, &words[found], sizeof words[found]);
  return true;
}

/* One of some words, kept as its position: an enum. */
bool kiln_read_enum(reading *r, const reader *how, const json_value *value, void *out) {
  int found = chosen(how->rule, value);
  if (found < 0) return refuse_choice(r, how->rule, value);
  if (out != NULL) memcpy(out, &found, sizeof found);
  return true;
}

bool kiln_read_dtype(reading *r, const reader *how, const json_value *value, void *out) {
  (void)how;
  kiln_dtype found = value->kind == JSON_TEXT && strlen(value->u.text) == value->count ? kiln_dtype_named(value->u.text) : 0;
  if (found == 0) return kiln_mismatch(r, "one of the element types f64, f32, f16, bf16 and so on", value);
  if (out != NULL) memcpy(out, &found, sizeof found);
  return true;
}

bool kiln_read_alignment(reading *r, const reader *how, const json_value *value, void *out) {
  (void)how;
  int64_t n = value->kind == JSON_INTEGER ? value->u.integer : 0;
  if (n < 1 || n > 256 || (n & (n - 1)) != 0) return kiln_mismatch(r, "an alignment: a power of two up to 256", value);
  if (out != NULL) memcpy(out, &n, sizeof n);
  return true;
}

/* ---- containers ---- */
const json_value *kiln_member(const json_value *object, const char *name) {
  for (uint32_t i = 0; i < object->count; ++i) {
    const json_member *m = &object->u.members[i];
    if (strcmp(m->name, name) == 0 && m->bytes == strlen(name)) return &m->value;
  }
  return NULL;
}

static int field_named(const record *fields, const json_member *m) {
  for (size_t i = 0; i < fields->count; ++i) {
    if (strcmp(fields->fields[i].name, m->name) == 0 && m->bytes == strlen(m->name)) return (int)i;
  }
  return -1;
}

bool kiln_missing_field(reading *r, const char *name) {
  line text = {.used = 0};
  add(&text, "the field '", 11);
  add(&text, name, strlen(name));
  add(&text, "'", 1);
  return kiln_mismatch_text(r, text.text, "'an object without it'");
}

/* The first unknown field by name, else the first missing one. */
static bool refuse_fields(reading *r, const record *fields, const json_value *value) {
  const char *worst = NULL;
  for (uint32_t i = 0; i < value->count; ++i) {
    const json_member *m = &value->u.members[i];
    if (field_named(fields, m) < 0 && (worst == NULL || strcmp(m->name, worst) < 0)) worst = m->name;
  }
  if (worst != NULL) {
    line text = {.used = 0};
    text.used = (size_t)snprintf(text.text, sizeof text.text, "'unknown field %.80s'", worst);
    return kiln_mismatch_text(r, "only the fields of this version's schema", text.text);
  }
  for (size_t i = 0; i < fields->count; ++i) {
    const char *name = fields->fields[i].name;
    bool missing = !fields->fields[i].how.optional && kiln_member(value, name) == NULL;
    if (missing && (worst == NULL || strcmp(name, worst) < 0)) worst = name;
  }
  return kiln_missing_field(r, worst);
}

/* An object with exactly the fields of a table, but for those that may be absent. */
bool kiln_read_record(reading *r, const reader *how, const json_value *value, void *out) {
  enum { MOST_FIELDS = 32 };
  const record *fields = how->rule;
  const json_value *found[MOST_FIELDS] = {NULL};
  if (value->kind != JSON_OBJECT) return kiln_mismatch(r, "an object", value);
  for (uint32_t i = 0; i < value->count; ++i) {
    int place = field_named(fields, &value->u.members[i]);
    if (place < 0) return refuse_fields(r, fields, value);
    found[place] = &value->u.members[i].value;
  }
  for (size_t i = 0; i < fields->count; ++i) {
    if (found[i] == NULL && !how->partial && !fields->fields[i].how.optional) return refuse_fields(r, fields, value);
  }
  for (size_t i = 0; i < fields->count; ++i) {
    const field *f = &fields->fields[i];
    if (found[i] == NULL) continue;
    void *place = out == NULL || f->at == NOT_KEPT ? NULL : (char *)out + f->at;
    if (!kiln_step(r, f->name, (uint32_t)strlen(f->name)) || !f->how.read(r, &f->how, found[i], place)) return false;
    kiln_step_back(r);
  }
  return true;
}

static bool check_count(reading *r, const reader *how, const json_value *value) {
  if (value->kind != JSON_LIST) return kiln_mismatch(r, "a list", value);
  if (value->count >= how->low && value->count <= how->high) return true;
  char expected[80];
  snprintf(expected, sizeof expected, "a list of %" PRId64 " to %" PRId64 " values", how->low, how->high);
  return kiln_mismatch(r, expected, value);
}

static bool read_items(reading *r, const reader *how, const json_value *value, char *items) {
  for (uint32_t i = 0; i < value->count; ++i) {
    void *place = items == NULL ? NULL : items + i * how->size;
    if (!kiln_step(r, NULL, i) || !how->item->read(r, how->item, &value->u.items[i], place)) return false;
    kiln_step_back(r);
  }
  return true;
}

/* A count of items goes right behind the pointer to them. */
static bool keep_items(reading *r, const reader *how, uint32_t count, void *out, char **items) {
  *items = NULL;
  if (out == NULL) return true;
  if (count != 0) {
    *items = kiln_arena_get(how->staged ? r->staging : r->keep, count, how->size);
    if (*items == NULL) return kiln_out_of_memory(r);
  }
  memcpy(out, items, sizeof *items);
  memcpy((char *)out + sizeof *items, &count, sizeof count);
  return true;
}

/* A list of `low` to `high` items: a pointer, then a uint32_t. */
bool kiln_read_list(reading *r, const reader *how, const json_value *value, void *out) {
  char *items;
  return check_count(r, how, value) && keep_items(r, how, value->count, out, &items) && read_items(r, how, value, items);
}

/* A list of a fixed count: an array in the struct itself. */
bool kiln_read_fixed(reading *r, const reader *how, const json_value *value, void *out) {
  return check_count(r, how, value) && read_items(r, how, value, out);
}

/* An object of at most `high` fields: a pointer to structs that start with the name and hold the value at `at`, then a uint32_t. */
bool kiln_read_map(reading *r, const reader *how, const json_value *value, void *out) {
  char *items;
  if (value->kind != JSON_OBJECT) return kiln_mismatch(r, "an object", value);
  if (value->count > how->high) {
    char expected[80];
    snprintf(expected, sizeof expected, "an object of at most %" PRId64 " fields", how->high);
    return kiln_mismatch(r, expected, value);
  }
  if (!keep_items(r, how, value->count, out, &items)) return false;
  for (uint32_t i = 0; i < value->count; ++i) {
    const json_member *m = &value->u.members[i];
    const json_value name = {.kind = JSON_TEXT, .count = m->bytes, .u.text = m->name};
    char *place = items == NULL ? NULL : items + i * how->size;
    if (!kiln_step(r, m->name, m->bytes) || !how->item->read(r, how->item, &m->value, place == NULL ? NULL : place + how->at) ||
        !how->key->read(r, how->key, &name, place))
      return false;
    kiln_step_back(r);
  }
  return true;
}

/* null leaves the place as it is: zero. */
bool kiln_read_nullable(reading *r, const reader *how, const json_value *value, void *out) {
  return value->kind == JSON_NULL || how->item->read(r, how->item, value, out);
}
