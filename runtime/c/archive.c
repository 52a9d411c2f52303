/* A tree as a tar archive in memory: ustar, or GNU with its long names. Anything else in it than files and folders is refused. */
#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>
#include <string.h>

#include "tree.h"

enum { BLOCK = 512, MAX_PATH = 1024 };
enum {
  NAME_AT = 0,
  NAME_ROOM = 100,
  SIZE_AT = 124,
  SIZE_ROOM = 12,
  SUM_AT = 148,
  SUM_ROOM = 8,
  TYPE_AT = 156,
  MAGIC_AT = 257,
  PREFIX_AT = 345,
  PREFIX_ROOM = 155
};
static const char USTAR[8] = {'u', 's', 't', 'a', 'r', 0, '0', '0'}, GNU[8] = {'u', 's', 't', 'a', 'r', ' ', ' ', 0};

typedef struct {
  kiln_arena *arena;
  kiln_error *error;
  const uint8_t *data;
  size_t bytes, at;
  char longer[MAX_PATH]; /* the name that a GNU archive gives to the next entry; empty if none */
  kiln_code code;
} tar_reader;

static bool refuse(tar_reader *t, const char *why) {
  if (t->code == KILN_OK)
    t->code = kiln_fail(t->error, KILN_INTEGRITY, "The embedded tree at byte %zu: %s; make the archive again with cmake -E tar.",
                        t->at, why);
  return false;
}

/* Octal digits, then spaces or zeros up to the end of the field. */
static bool octal(const uint8_t *field, size_t room, uint64_t *out) {
  size_t i = 0;
  uint64_t value = 0;
  while (i < room && field[i] == ' ') ++i;
  size_t first = i;
  for (; i < room && field[i] >= '0' && field[i] <= '7'; ++i) value = value << 3 | (uint64_t)(field[i] - '0');
  if (i == first) return false;
  for (; i < room; ++i) {
    if (field[i] != ' ' && field[i] != 0) return false;
  }
  *out = value;
  return true;
}

static bool is_zero(const uint8_t *data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    if (data[i] != 0) return false;
  }
  return true;
}

static bool check_header(tar_reader *t, const uint8_t *header, uint64_t *size) {
  uint64_t told, sum = SUM_ROOM * ' ';
  for (int i = 0; i < BLOCK; ++i) sum += i < SUM_AT || i >= SUM_AT + SUM_ROOM ? header[i] : 0;
  if (!octal(header + SUM_AT, SUM_ROOM, &told) || told != sum) return refuse(t, "a header's checksum is wrong");
  if (memcmp(header + MAGIC_AT, USTAR, 8) != 0 && memcmp(header + MAGIC_AT, GNU, 8) != 0)
    return refuse(t, "no ustar or GNU header");
  if (!octal(header + SIZE_AT, SIZE_ROOM, size)) return refuse(t, "a size that is no octal number");
  return *size <= t->bytes - t->at - BLOCK || refuse(t, "an entry goes on behind the end of the archive");
}

/* The path of an entry, from its header or from the long name before it. */
static bool read_path(tar_reader *t, const uint8_t *header, char path[MAX_PATH]) {
  if (t->longer[0] != 0) {
    memcpy(path, t->longer, MAX_PATH);
    t->longer[0] = 0;
    return true;
  }
  size_t used = 0, prefix = memcmp(header + MAGIC_AT, USTAR, 8) == 0 ? strnlen((const char *)header + PREFIX_AT, PREFIX_ROOM) : 0;
  memcpy(path, header + PREFIX_AT, prefix);
  if (prefix != 0) path[prefix] = '/', used = prefix + 1;
  size_t name = strnlen((const char *)header + NAME_AT, NAME_ROOM);
  memcpy(path + used, header + NAME_AT, name);
  path[used + name] = 0;
  return true;
}

/* "./a/b/" is "a/b", "." is "". False unless what is left is at most FOLDER/NAME of plain names. */
static bool simplify(char path[MAX_PATH]) {
  char *start = strcmp(path, ".") == 0 ? path + 1 : strncmp(path, "./", 2) == 0 ? path + 2 : path;
  size_t length = strlen(start);
  if (length > 0 && start[length - 1] == '/') --length;
  memmove(path, start, length);
  path[length] = 0;
  int parts = 0;
  for (const char *part = path; length != 0;) {
    size_t size = strcspn(part, "/");
    bool dots = (size == 1 && part[0] == '.') || (size == 2 && part[0] == '.' && part[1] == '.');
    if (size == 0 || dots || ++parts > 2) return false;
    if (part[size] == 0) break;
    part += size + 1;
  }
  return true;
}

static bool read_long_name(tar_reader *t, const uint8_t *body, size_t size) {
  if (size < 2 || size > MAX_PATH || body[size - 1] != 0 || strlen((const char *)body) != size - 1)
    return refuse(t, "a long name without an end");
  memcpy(t->longer, body, size);
  return true;
}

static bool add_entry(tar_reader *t, const uint8_t *header, size_t size, archive *out) {
  char path[MAX_PATH];
  bool folder = header[TYPE_AT] == '5';
  if (!read_path(t, header, path)) return false;
  if (!simplify(path)) return refuse(t, "a path that is no name in the tree or in a folder of it");
  if (path[0] == 0) return folder || refuse(t, "a file without a name"); /* the root itself */
  archive_entry *entry = &out->entries[out->count++];
  *entry = (archive_entry){kiln_arena_text(t->arena, path, strlen(path)), header + BLOCK, size, folder};
  if (entry->path == NULL) t->code = kiln_no_memory(t->error);
  return entry->path != NULL && (!folder || size == 0 || refuse(t, "a folder with bytes"));
}

static bool read_entry(tar_reader *t, archive *out) {
  const uint8_t *header = t->data + t->at;
  uint64_t size;
  if (!check_header(t, header, &size)) return false;
  switch (header[TYPE_AT]) {
    case 'L':
      if (!read_long_name(t, header + BLOCK, (size_t)size)) return false;
      break;
    case 0:
    case '0':
    case '5':
      if (!add_entry(t, header, (size_t)size, out)) return false;
      break;
    default: return refuse(t, "an entry that is no file or folder (use --format=gnutar)");
  }
  size_t padded = ((size_t)size + BLOCK - 1) / BLOCK * BLOCK;
  if (padded > t->bytes - t->at - BLOCK) return refuse(t, "an entry goes on behind the end of the archive");
  t->at += BLOCK + padded;
  return true;
}

static bool read_entries(tar_reader *t, archive *out) {
  while (t->bytes - t->at >= 2 * BLOCK) {
    if (is_zero(t->data + t->at, BLOCK)) {
      if (t->longer[0] != 0) return refuse(t, "a long name without an entry");
      return is_zero(t->data + t->at, t->bytes - t->at) || refuse(t, "bytes behind the end mark");
    }
    if (!read_entry(t, out)) return false;
  }
  return refuse(t, "no end mark");
}

static int compare_paths(const void *a, const void *b) {
  return strcmp(((const archive_entry *)a)->path, ((const archive_entry *)b)->path);
}

const archive_entry *kiln_archive_find(const archive *a, const char *path) {
  archive_entry key = {.path = path};
  return a->count == 0 ? NULL : bsearch(&key, a->entries, a->count, sizeof *a->entries, compare_paths);
}

const archive_entry *kiln_archive_folder(const archive *a, const archive_entry *entry) {
  char folder[MAX_PATH] = "";
  const char *slash = strchr(entry->path, '/');
  if (slash == NULL) return NULL;
  memcpy(folder, entry->path, (size_t)(slash - entry->path));
  return kiln_archive_find(a, folder);
}

/* Each path once, and no file that others lie in. */
static bool check_paths(tar_reader *t, const archive *a) {
  for (uint32_t i = 0; i < a->count; ++i) {
    const archive_entry *folder = kiln_archive_folder(a, &a->entries[i]);
    if (i > 0 && compare_paths(&a->entries[i - 1], &a->entries[i]) == 0) return refuse(t, "two entries of one path");
    if (folder != NULL && !folder->folder) return refuse(t, "a file in whose place a folder is needed");
  }
  return true;
}

kiln_code kiln_archive_read(kiln_arena *arena, const uint8_t *data, size_t bytes, archive *out, kiln_error *error) {
  tar_reader t = {.arena = arena, .error = error, .data = data, .bytes = bytes};
  *out = (archive){kiln_arena_get(arena, bytes / BLOCK, sizeof *out->entries), 0}; /* each has a header at least */
  if (out->entries == NULL) return kiln_no_memory(error);
  if (!read_entries(&t, out)) return t.code;
  if (out->count != 0) qsort(out->entries, out->count, sizeof *out->entries, compare_paths);
  check_paths(&t, out);
  return t.code;
}
