/* Readers of JSON values, built from small ones: a schema is a table of them, as in kiln.runtime.fields.
 *
 * A reader checks a value and writes what it means to `out`; with `out` NULL it only checks. The containers around it keep the
 * path, so that a refusal carries a JSON pointer. */
#ifndef KILN_FIELDS_H
#define KILN_FIELDS_H

#include "core.h"

typedef struct {
  const char *name;
  uint32_t index;
} path_step; /* a field: its name and the bytes of it; an item: NULL, its place */

typedef struct {
  kiln_arena *keep;    /* what the manifest consists of */
  kiln_arena *staging; /* what is needed until names are resolved */
  kiln_error *error;
  const char *where;   /* how messages call the document */
  path_step path[72];  /* documents nest 64 levels */
  int depth;
  kiln_code code;      /* of the first refusal */
} reading;

typedef struct reader reader;
typedef bool reader_fn(reading *r, const reader *how, const json_value *value, void *out);

struct reader {
  reader_fn *read;
  const void *rule;      /* text_rule, record or words of a choice */
  const reader *item;    /* of lists, maps, nullables */
  const reader *key;     /* of maps */
  size_t size, at;       /* bytes of an item; where a map's value stands in it */
  int64_t low, high;     /* bounds of an integer, of a count */
  bool staged;           /* items live only until names are resolved */
  bool optional;         /* a field that may be absent: its place stays as it is */
  bool partial;          /* an object all of whose fields may be absent */
  const char *expected;  /* what a refusal asks for */
};

/* One field of an object: a reader, and where in the struct its result goes. */
typedef struct { const char *name; reader how; size_t at; } field;
enum { DROPPED = -1 };
#define NOT_KEPT ((size_t)DROPPED)
typedef struct { const field *fields; size_t count; } record;
#define RECORD(table) {(table), sizeof(table) / sizeof *(table)}

/* One character of `first`, then any of `rest`, `least` and more; ranges as in a-z. `prefix` may stand before. */
typedef struct { const char *first, *rest, *prefix; size_t most; } text_rule;

reader_fn kiln_read_text, kiln_read_doc, kiln_read_digest, kiln_read_integer, kiln_read_number, kiln_read_flag, kiln_read_word,
  kiln_read_enum, kiln_read_dtype, kiln_read_alignment, kiln_read_record, kiln_read_list, kiln_read_fixed, kiln_read_map,
  kiln_read_nullable, kiln_read_any, kiln_read_expr, kiln_read_pred, kiln_read_attr_value;

/* Refuses a value; always false. */
bool kiln_mismatch(reading *r, const char *expected, const json_value *found);
bool kiln_mismatch_text(reading *r, const char *expected, const char *found);
bool kiln_missing_field(reading *r, const char *name);
bool kiln_out_of_memory(reading *r);
/* A step down the path; 0 if there is no room for it. */
bool kiln_step(reading *r, const char *name, uint32_t index);
static inline void kiln_step_back(reading *r) { --r->depth; }

const json_value *kiln_member(const json_value *object, const char *name); /* NULL: none of that name */
bool kiln_is_text(const json_value *value, const char *text);
/* Whether a text matches a rule whole. */
bool kiln_text_matches(const text_rule *rule, const char *text, size_t bytes);

#endif
