/* A bounded reader of little-endian ELF64 files, as kiln.runtime.elf: every offset, size, index and name is checked before it is
 * used, and bytes that no table accounts for are refused, so that a cut or extended file never passes as whole. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "artifact.h"

enum { MAX_SECTIONS = 8192, MAX_SEGMENTS = 64, MAX_SYMBOLS = 65536 };
enum { HEADER_SIZE = 64, SECTION_SIZE = 64, SEGMENT_SIZE = 56, SYMBOL_SIZE = 24 };

bool kiln_elf_refuse(elf *e, const char *format, ...) {
  char why[700];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(why, sizeof why, format, arguments);
  va_end(arguments);
  if (e->code == KILN_OK)
    e->code =
        kiln_fail(e->error, KILN_INTEGRITY, "%s; the file is damaged or not what its name says: build it again or restore it", why);
  return false;
}

bool kiln_elf_no_memory(elf *e) {
  if (e->code == KILN_OK) e->code = kiln_no_memory(e->error);
  return false;
}

/* Whether a range lies in the file. */
static bool fits(const elf *e, uint64_t offset, uint64_t size) { return offset <= e->file.bytes && size <= e->file.bytes - offset; }

bool kiln_elf_text(elf *e, span table, uint64_t offset, const char *what, const char **out) {
  size_t left = offset < table.bytes ? table.bytes - (size_t)offset : 0;
  size_t most = left < ELF_MAX_NAME + 1 ? left : ELF_MAX_NAME + 1;
  const uint8_t *start = most == 0 ? NULL : table.data + offset, *end = most == 0 ? NULL : memchr(start, 0, most);
  if (end == NULL)
    return kiln_elf_refuse(e, "a %s at byte %" PRIu64 " does not end within %d bytes and its table of %zu bytes", what, offset,
                           ELF_MAX_NAME, table.bytes);
  for (const uint8_t *c = start; c < end; ++c) {
    if (*c >= 0x80) return kiln_elf_refuse(e, "a %s is not ASCII", what);
  }
  *out = (const char *)start;
  return true;
}

/* ---- tables ---- */
static bool read_segments(elf *e, uint64_t offset, uint32_t count, uint32_t entry) {
  if (count > MAX_SEGMENTS || (count != 0 && entry != SEGMENT_SIZE))
    return kiln_elf_refuse(e, "%" PRIu32 " program headers of %" PRIu32 " bytes: expected at most %d of %d", count, entry,
                           MAX_SEGMENTS, SEGMENT_SIZE);
  if (!fits(e, offset, (uint64_t)count * SEGMENT_SIZE))
    return kiln_elf_refuse(e, "the program headers end behind the file, at byte %" PRIu64 " and more", offset);
  e->segments = kiln_arena_get(e->arena, count, sizeof *e->segments);
  if (e->segments == NULL) return kiln_elf_no_memory(e);
  for (uint32_t i = 0; i < count; ++i) {
    const uint8_t *row = e->file.data + offset + (size_t)i * SEGMENT_SIZE;
    elf_segment s = {kiln_u32(row), kiln_u32(row + 4), kiln_u64(row + 8), kiln_u64(row + 16), kiln_u64(row + 32)};
    if (!fits(e, s.offset, s.filesz)) return kiln_elf_refuse(e, "a segment ends behind the file at %zu", e->file.bytes);
    e->segments[e->segment_count++] = s;
  }
  return true;
}

static bool check_rows(elf *e, const uint8_t *rows, uint32_t count, uint32_t names) {
  for (uint32_t i = 0; i < count; ++i) {
    const uint8_t *row = rows + (size_t)i * SECTION_SIZE;
    if (kiln_u32(row + 4) != SHT_NOBITS && !fits(e, kiln_u64(row + 24), kiln_u64(row + 32)))
      return kiln_elf_refuse(e, "section %" PRIu32 " ends at byte %" PRIu64 "+%" PRIu64 ", the file at %zu", i, kiln_u64(row + 24),
                             kiln_u64(row + 32), e->file.bytes);
  }
  return (names < count && kiln_u32(rows + (size_t)names * SECTION_SIZE + 4) == SHT_STRTAB) ||
         kiln_elf_refuse(e, "section %" PRIu32 " should hold the section names, but is no string table among %" PRIu32 " sections",
                         names, count);
}

static bool read_sections(elf *e, uint64_t offset, uint32_t count, uint32_t entry, uint32_t names) {
  if (count == 0 || count > MAX_SECTIONS || entry != SECTION_SIZE)
    return kiln_elf_refuse(e, "%" PRIu32 " sections of %" PRIu32 " bytes a row: expected 1 to %d of %d", count, entry, MAX_SECTIONS,
                           SECTION_SIZE);
  if (!fits(e, offset, (uint64_t)count * SECTION_SIZE))
    return kiln_elf_refuse(e, "the section table ends behind the file, at byte %" PRIu64 " and more", offset);
  const uint8_t *rows = e->file.data + offset;
  if (!check_rows(e, rows, count, names)) return false;
  const uint8_t *name_row = rows + (size_t)names * SECTION_SIZE;
  span table = {e->file.data + kiln_u64(name_row + 24), (size_t)kiln_u64(name_row + 32)};
  e->sections = kiln_arena_get(e->arena, count, sizeof *e->sections);
  if (e->sections == NULL) return kiln_elf_no_memory(e);
  for (uint32_t i = 0; i < count; ++i) {
    const uint8_t *row = rows + (size_t)i * SECTION_SIZE;
    elf_section *s = &e->sections[e->section_count++];
    *s = (elf_section){NULL, kiln_u32(row + 4), kiln_u32(row + 40), kiln_u64(row + 8), kiln_u64(row + 16), kiln_u64(row + 24),
                       kiln_u64(row + 32), kiln_u64(row + 56)};
    if (!kiln_elf_text(e, table, kiln_u32(row), "section name", &s->name)) return false;
  }
  return true;
}

/* ---- cover: parts may not share bytes, and the file ends with its last part ---- */
typedef struct { uint64_t start, size; const char *what; bool may_share; } part;

static int compare_parts(const void *a, const void *b) {
  const part *x = a, *y = b;
  if (x->start != y->start) return x->start < y->start ? -1 : 1;
  return (x->size > y->size) - (x->size < y->size);
}

static bool starts_with(const char *text, const char *prefix) { return strncmp(text, prefix, strlen(prefix)) == 0; }

/* From sm_100 on ptxas lays `.nv.merc.debug_str` over `.debug_str`, and so on; code may not be shared. */
static bool may_share(const char *name) {
  const char *twin = starts_with(name, ".nv.merc") ? name + strlen(".nv.merc") : name;
  return strstr(name, "debug") != NULL || starts_with(twin, ".nv.constant") || starts_with(twin, ".nv.global");
}

static bool check_cover(elf *e, part sections, part segments) {
  part *parts = kiln_arena_get(e->arena, (size_t)e->section_count + 3, sizeof *parts);
  if (parts == NULL) return kiln_elf_no_memory(e);
  uint32_t count = 0;
  parts[count++] = (part){0, HEADER_SIZE, "the ELF header", false};
  if (sections.size != 0) parts[count++] = sections;
  if (segments.size != 0) parts[count++] = segments;
  for (uint32_t i = 0; i < e->section_count; ++i) {
    const elf_section *s = &e->sections[i];
    if (s->kind != SHT_NOBITS && s->size != 0 && s->kind != 0)
      parts[count++] = (part){s->offset, s->size, s->name, may_share(s->name)};
  }
  qsort(parts, count, sizeof *parts, compare_parts);
  part owner = {0, 0, "", false};
  for (uint32_t i = 0; i < count; ++i) {
    uint64_t reached = owner.start + owner.size;
    if (parts[i].start < reached && !(owner.may_share && parts[i].may_share))
      return kiln_elf_refuse(e, "%.200s at byte %" PRIu64 " overlaps %.200s, which ends at %" PRIu64, parts[i].what, parts[i].start,
                             owner.what, reached);
    if (parts[i].start + parts[i].size > reached) owner = parts[i];
  }
  return owner.start + owner.size == e->file.bytes ||
         kiln_elf_refuse(e, "the file has %zu bytes, but its last part, %.200s, ends at %" PRIu64, e->file.bytes, owner.what,
                         owner.start + owner.size);
}

/* ---- names: merge sort, for qsort has no place for the sections ---- */
static int compare_names(const elf *e, uint32_t a, uint32_t b) { return strcmp(e->sections[a].name, e->sections[b].name); }

static void merge(const elf *e, const uint32_t *from, uint32_t *to, uint32_t low, uint32_t middle, uint32_t high) {
  uint32_t a = low, b = middle;
  for (uint32_t i = low; i < high; ++i) {
    bool left = a < middle && (b >= high || compare_names(e, from[a], from[b]) <= 0);
    to[i] = left ? from[a++] : from[b++];
  }
}

static bool sort_names(elf *e) {
  uint32_t n = e->section_count;
  uint32_t *order = kiln_arena_get(e->arena, n, sizeof *order), *other = kiln_arena_get(e->arena, n, sizeof *other);
  if (order == NULL || other == NULL) return kiln_elf_no_memory(e);
  for (uint32_t i = 0; i < n; ++i) order[i] = i;
  for (uint32_t width = 1; width < n; width *= 2) {
    for (uint32_t low = 0; low < n; low += 2 * width) {
      uint32_t middle = low + width < n ? low + width : n, high = low + 2 * width < n ? low + 2 * width : n;
      merge(e, order, other, low, middle, high);
    }
    uint32_t *swap = order;
    order = other, other = swap;
  }
  for (uint32_t i = 1; i < n; ++i) {
    if (compare_names(e, order[i - 1], order[i]) == 0)
      return kiln_elf_refuse(e, "two sections are named '%.200s'", e->sections[order[i]].name);
  }
  e->by_name = order;
  return true;
}

const elf_section *kiln_elf_find(const elf *e, const char *prefix, const char *name) {
  size_t length = strlen(prefix);
  uint32_t low = 0, high = e->section_count;
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    const elf_section *s = &e->sections[e->by_name[middle]];
    int order = strncmp(s->name, prefix, length);
    if (order == 0) order = strcmp(s->name + length, name);
    if (order == 0) return s;
    if (order < 0) low = middle + 1;
    else high = middle;
  }
  return NULL;
}

span kiln_elf_body(const elf *e, const elf_section *section) {
  return section->kind == SHT_NOBITS ? (span){e->file.data, 0} : (span){e->file.data + section->offset, (size_t)section->size};
}

/* ---- the whole ---- */
bool kiln_elf_read(elf *e, span file) {
  e->file = file;
  const uint8_t *h = file.data;
  if (file.bytes > KILN_MAX_ARTIFACT)
    return kiln_elf_refuse(e, "the file has %zu bytes, the limit is %d", file.bytes, KILN_MAX_ARTIFACT);
  if (file.bytes < 4 || memcmp(h, "\x7f" "ELF", 4) != 0) return kiln_elf_refuse(e, "the file does not start with the ELF magic");
  if (file.bytes < HEADER_SIZE)
    return kiln_elf_refuse(e, "the file has %zu bytes, an ELF header alone has %d", file.bytes, HEADER_SIZE);
  if (h[4] != 2 || h[5] != 1 || h[6] != 1 || kiln_u16(h + 52) != HEADER_SIZE)
    return kiln_elf_refuse(e, "class %d, byte order %d, version %d, header size %d: expected 2, 1, 1, 64", h[4], h[5], h[6],
                           kiln_u16(h + 52));
  e->osabi = h[7], e->abi_version = h[8];
  e->kind = kiln_u16(h + 16), e->machine = kiln_u16(h + 18);
  e->version = kiln_u32(h + 20), e->flags = kiln_u32(h + 48);
  uint64_t phoff = kiln_u64(h + 32), shoff = kiln_u64(h + 40);
  uint16_t phentsize = kiln_u16(h + 54), phnum = kiln_u16(h + 56), shentsize = kiln_u16(h + 58), shnum = kiln_u16(h + 60);
  return read_segments(e, phoff, phnum, phentsize) && read_sections(e, shoff, shnum, shentsize, kiln_u16(h + 62)) &&
         check_cover(e, (part){shoff, (uint64_t)shnum * SECTION_SIZE, "a table of headers", false},
                     (part){phoff, (uint64_t)phnum * SEGMENT_SIZE, "a table of headers", false}) &&
         sort_names(e);
}

/* ---- symbols ---- */
bool kiln_elf_symbols(elf *e, const elf_section *table, const elf_symbol **out, uint32_t *count) {
  span body = kiln_elf_body(e, table);
  if (table->entsize != SYMBOL_SIZE || body.bytes % SYMBOL_SIZE != 0)
    return kiln_elf_refuse(e, "symbol table '%.200s' has %zu bytes in entries of %" PRIu64 ", expected %d", table->name, body.bytes,
                           table->entsize, SYMBOL_SIZE);
  if (body.bytes > (size_t)MAX_SYMBOLS * SYMBOL_SIZE)
    return kiln_elf_refuse(e, "symbol table '%.200s' has %zu symbols, the limit is %d", table->name, body.bytes / SYMBOL_SIZE,
                           MAX_SYMBOLS);
  if (table->link >= e->section_count || e->sections[table->link].kind != SHT_STRTAB)
    return kiln_elf_refuse(e, "symbol table '%.200s' names section %" PRIu32 " as its strings, which is no string table",
                           table->name, table->link);
  span strings = kiln_elf_body(e, &e->sections[table->link]);
  uint32_t n = (uint32_t)(body.bytes / SYMBOL_SIZE);
  elf_symbol *symbols = kiln_arena_get(e->arena, n, sizeof *symbols);
  if (symbols == NULL) return kiln_elf_no_memory(e);
  for (uint32_t i = 0; i < n; ++i) {
    const uint8_t *row = body.data + (size_t)i * SYMBOL_SIZE;
    uint16_t section = kiln_u16(row + 6);
    symbols[i] = (elf_symbol){NULL, (uint8_t)(row[4] >> 4), row[4] & 15, row[5], section, kiln_u64(row + 8), kiln_u64(row + 16)};
    if (section >= e->section_count && section < SHN_LORESERVE)
      return kiln_elf_refuse(e, "a symbol of '%.200s' lies in section %d, but there are %" PRIu32, table->name, section,
                             e->section_count);
    if (!kiln_elf_text(e, strings, kiln_u32(row), "symbol name", &symbols[i].name)) return false;
  }
  *out = symbols, *count = n;
  return true;
}
