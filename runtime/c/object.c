/* What a CPU artifact says of itself, as kiln.runtime.shared_object. The system's loader goes by the dynamic segment, so that is
 * what is read; the section table must agree with it. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "artifact.h"

enum {
  ET_DYN = 3,
  PT_LOAD = 1,
  PT_DYNAMIC = 2,
  PF_X = 1,
  PF_W = 2,
  STT_FUNC = 2,
  STT_GNU_IFUNC = 10,
  STB_LOCAL = 0,
  SHN_UNDEF = 0
};
#define PT_GNU_STACK 0x6474E551u
enum {
  DT_NEEDED = 1,
  DT_PLTRELSZ = 2,
  DT_STRTAB = 5,
  DT_SYMTAB = 6,
  DT_RELA = 7,
  DT_RELASZ = 8,
  DT_STRSZ = 10,
  DT_REL = 17,
  DT_JMPREL = 23,
  DT_AUXILIARY = 0x7FFFFFFD,
  DT_FILTER = 0x7FFFFFFF
};
enum { TAG_SIZE = 16, RELA_SIZE = 24 };

static const struct machine {
  uint16_t number;
  const char *name;
  uint32_t irelative;
} MACHINES[] = {{62, "x86_64", 37}, {183, "aarch64", 1032}};

/* The tags of the dynamic segment up to its end mark. */
typedef struct { const uint8_t *data; uint32_t count; } tag_list;
static uint64_t tag_at(const tag_list *t, uint32_t i) { return kiln_u64(t->data + (size_t)i * TAG_SIZE); }
static uint64_t value_at(const tag_list *t, uint32_t i) { return kiln_u64(t->data + (size_t)i * TAG_SIZE + 8); }

/* The last value of a tag: the one that counts. */
static bool last_value(const tag_list *t, uint64_t tag, uint64_t *out) {
  for (uint32_t i = t->count; i-- > 0;) {
    if (tag_at(t, i) == tag) return *out = value_at(t, i), true;
  }
  return false;
}

/* Where the bytes that will lie at an address stand in the file. */
static bool file_offset(elf *e, uint64_t address, uint64_t size, const char *what, uint64_t *out) {
  for (uint32_t i = 0; i < e->segment_count; ++i) {
    const elf_segment *s = &e->segments[i];
    if (s->kind != PT_LOAD || address < s->address) continue;
    uint64_t in = address - s->address;
    if (in <= s->filesz && size <= s->filesz - in) return *out = s->offset + in, true;
  }
  return kiln_elf_refuse(e, "%.200s at address %#" PRIx64 " (%" PRIu64 " bytes) lies in no loaded segment", what, address, size);
}

static bool read_tags(elf *e, tag_list *out) {
  const elf_segment *dynamic = NULL;
  uint32_t found = 0;
  for (uint32_t i = 0; i < e->segment_count; ++i) {
    if (e->segments[i].kind == PT_DYNAMIC) dynamic = &e->segments[i], ++found;
  }
  if (found != 1) return kiln_elf_refuse(e, "%" PRIu32 " dynamic segments, expected 1", found);
  const elf_section *section = kiln_elf_find(e, ".dynamic", "");
  if (section == NULL || section->kind != SHT_DYNAMIC || section->offset != dynamic->offset || section->size != dynamic->filesz ||
      section->address != dynamic->address)
    return kiln_elf_refuse(e, "the section '.dynamic' isn't the dynamic segment");
  uint64_t offset = 0;
  if (!file_offset(e, dynamic->address, dynamic->filesz, "the dynamic segment", &offset)) return false;
  if (offset != dynamic->offset) return kiln_elf_refuse(e, "the dynamic segment is loaded from elsewhere than it says");
  if (dynamic->filesz % TAG_SIZE != 0)
    return kiln_elf_refuse(e, "the dynamic segment has %" PRIu64 " bytes, expected a multiple of %d", dynamic->filesz, TAG_SIZE);
  *out = (tag_list){kiln_elf_body(e, section).data, 0};
  for (uint32_t most = (uint32_t)(dynamic->filesz / TAG_SIZE); out->count < most; ++out->count) {
    if (tag_at(out, out->count) == 0) return true;
  }
  return kiln_elf_refuse(e, "the dynamic segment has no end mark");
}

/* The tables that the sections show must be those that the system's loader will use. */
static bool check_agreement(elf *e, const tag_list *tags, const elf_section *table, const elf_section *strings) {
  const struct { uint64_t tag, want; const char *what;
  } told[] = {
      {DT_SYMTAB, table->address, "symbol table"},
      {DT_STRTAB, strings->address, "string table"},
      {DT_STRSZ, strings->size, "string table size"},
  };
  for (size_t i = 0; i < sizeof told / sizeof *told; ++i) {
    uint32_t given = 0;
    uint64_t value = 0;
    for (uint32_t k = 0; k < tags->count; ++k) {
      if (tag_at(tags, k) == told[i].tag) ++given, value = value_at(tags, k);
    }
    if (given != 1 || value != told[i].want)
      return kiln_elf_refuse(e, "the dynamic segment gives %s %" PRIu64 " (%" PRIu32 " times), the sections give %" PRIu64,
                             told[i].what, value, given, told[i].want);
  }
  const elf_section *both[] = {table, strings};
  for (int i = 0; i < 2; ++i) {
    uint64_t offset = 0;
    if (!file_offset(e, both[i]->address, both[i]->size, both[i]->name, &offset)) return false;
    if (offset != both[i]->offset)
      return kiln_elf_refuse(e, "section '%.200s' is loaded from elsewhere than it says", both[i]->name);
  }
  return true;
}

/* ---- symbols ---- */
static bool is_export(const elf_symbol *s) {
  int visibility = s->other & 3;
  return s->binding != STB_LOCAL && s->section != SHN_UNDEF && (visibility == 0 || visibility == 3);
}

static bool is_executable(const elf *e, uint64_t address) {
  for (uint32_t i = 0; i < e->segment_count; ++i) {
    const elf_segment *s = &e->segments[i];
    if (s->kind == PT_LOAD && (s->flags & PF_X) != 0 && s->address <= address && address - s->address < s->filesz) return true;
  }
  return false;
}

/* The order of Python's tuples: of two functions of one name the last one counts. */
static int compare_symbols(const void *a, const void *b) {
  const elf_symbol *x = *(const elf_symbol *const *)a, *y = *(const elf_symbol *const *)b;
  int order = strcmp(x->name, y->name);
  if (order != 0) return order;
  const uint64_t left[] = {x->binding, x->kind, x->other, x->section, x->value, x->size};
  const uint64_t right[] = {y->binding, y->kind, y->other, y->section, y->value, y->size};
  for (size_t i = 0; i < sizeof left / sizeof *left; ++i) {
    if (left[i] != right[i]) return left[i] < right[i] ? -1 : 1;
  }
  return 0;
}

static bool read_exports(elf *e, const elf_symbol *symbols, uint32_t count, shared_object *out) {
  const elf_symbol **functions = kiln_arena_get(e->arena, count, sizeof *functions);
  uint32_t n = 0;
  if (functions == NULL) return kiln_elf_no_memory(e);
  for (uint32_t i = 0; i < count; ++i) {
    if (!is_export(&symbols[i]) || symbols[i].kind != STT_FUNC) continue;
    if (!is_executable(e, symbols[i].value))
      return kiln_elf_refuse(e, "function '%.200s' at %#" PRIx64 " lies in no executable segment", symbols[i].name,
                             symbols[i].value);
    functions[n++] = &symbols[i];
  }
  if (n != 0) qsort(functions, n, sizeof *functions, compare_symbols);
  out->exports = kiln_arena_get(e->arena, n, sizeof *out->exports);
  if (out->exports == NULL) return kiln_elf_no_memory(e);
  for (uint32_t i = 0; i < n; ++i) {
    if (i + 1 < n && strcmp(functions[i]->name, functions[i + 1]->name) == 0) continue;
    out->exports[out->export_count++] = (object_export){functions[i]->name, functions[i]->size};
  }
  return true;
}

static int compare_texts(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

static bool read_undefined(elf *e, const elf_symbol *symbols, uint32_t count, shared_object *out) {
  out->undefined = kiln_arena_get(e->arena, count, sizeof *out->undefined);
  if (out->undefined == NULL) return kiln_elf_no_memory(e);
  for (uint32_t i = 0; i < count; ++i) {
    if (symbols[i].section == SHN_UNDEF) out->undefined[out->undefined_count++] = symbols[i].name;
  }
  if (out->undefined_count != 0) qsort(out->undefined, out->undefined_count, sizeof *out->undefined, compare_texts);
  return true;
}

/* Libraries that opening the file would open: needed, auxiliary, filter. */
static bool read_needed(elf *e, const tag_list *tags, span names, shared_object *out) {
  out->needed = kiln_arena_get(e->arena, tags->count, sizeof *out->needed);
  if (out->needed == NULL) return kiln_elf_no_memory(e);
  for (uint32_t i = 0; i < tags->count; ++i) {
    uint64_t tag = tag_at(tags, i);
    if (tag != DT_NEEDED && tag != DT_AUXILIARY && tag != DT_FILTER) continue;
    if (!kiln_elf_text(e, names, value_at(tags, i), "library name", &out->needed[out->needed_count])) return false;
    ++out->needed_count;
  }
  return true;
}

/* ---- code that runs when the file is opened or closed ---- */
static bool has_code_tags(const elf *e, const tag_list *tags) {
  static const char *const sections[] = {".init", ".fini", ".ctors", ".dtors", ".init_array", ".fini_array", ".preinit_array"};
  static const uint64_t code[] = {12, 13, 25, 26, 32}; /* init, fini, init_array, fini_array, preinit_array */
  uint64_t unused;
  for (size_t i = 0; i < sizeof code / sizeof *code; ++i) {
    if (last_value(tags, code[i], &unused)) return true;
  }
  for (uint32_t i = 0; i < e->section_count; ++i) {
    for (size_t k = 0; k < sizeof sections / sizeof *sections; ++k) {
      if (e->sections[i].size != 0 && strncmp(e->sections[i].name, sections[k], strlen(sections[k])) == 0) return true;
    }
  }
  return false;
}

/* Whether a relocation table calls functions of the file. */
static bool read_relocations(elf *e, const tag_list *tags, uint64_t start, uint64_t length, uint32_t irelative, bool *out) {
  uint64_t address = 0, size = 0, at = 0;
  if (!last_value(tags, length, &size) || size == 0 || !last_value(tags, start, &address)) return true;
  if (!file_offset(e, address, size, "a relocation table", &at)) return false;
  if (size % RELA_SIZE != 0)
    return kiln_elf_refuse(e, "a relocation table has %" PRIu64 " bytes, expected a multiple of %d", size, RELA_SIZE);
  for (const uint8_t *row = e->file.data + at, *end = row + size; row < end && !*out; row += RELA_SIZE)
    *out = (uint32_t)kiln_u64(row + 8) == irelative;
  return true;
}

static bool read_init(elf *e, const tag_list *tags, bool indirect, uint32_t irelative, bool *out) {
  static const uint64_t tables[][2] = {{DT_RELA, DT_RELASZ}, {DT_JMPREL, DT_PLTRELSZ}};
  uint64_t unused;
  *out = indirect || has_code_tags(e, tags);
  if (*out) return true;
  if (last_value(tags, DT_REL, &unused))
    return kiln_elf_refuse(e, "relocations without addends (DT_REL), expected DT_RELA on these machines");
  for (size_t i = 0; i < 2 && !*out; ++i) {
    if (!read_relocations(e, tags, tables[i][0], tables[i][1], irelative, out)) return false;
  }
  return true;
}

/* ---- the whole ---- */
static const struct machine *machine_of(const elf *e) {
  for (size_t i = 0; i < sizeof MACHINES / sizeof *MACHINES; ++i) {
    if (MACHINES[i].number == e->machine) return &MACHINES[i];
  }
  return NULL;
}

static bool read_tables(elf *e, const tag_list *tags, const struct machine *machine, shared_object *out) {
  const elf_section *table = kiln_elf_find(e, ".dynsym", "");
  if (table == NULL || table->kind != SHT_DYNSYM || table->link == 0 || table->link >= e->section_count)
    return kiln_elf_refuse(e, "there is no dynamic symbol table");
  const elf_section *strings = &e->sections[table->link];
  const elf_symbol *symbols = NULL;
  uint32_t count = 0;
  if (!check_agreement(e, tags, table, strings) || !kiln_elf_symbols(e, table, &symbols, &count)) return false;
  if (count != 0) ++symbols, --count; /* the first is no symbol */
  bool indirect = false;
  for (uint32_t i = 0; i < count; ++i) indirect = indirect || symbols[i].kind == STT_GNU_IFUNC;
  return read_exports(e, symbols, count, out) && read_undefined(e, symbols, count, out) &&
         read_needed(e, tags, kiln_elf_body(e, strings), out) && read_init(e, tags, indirect, machine->irelative, &out->has_init);
}

bool kiln_object_read(elf *e, span file, shared_object *out) {
  *out = (shared_object){.machine = NULL};
  if (!kiln_elf_read(e, file)) return false;
  const struct machine *machine = machine_of(e);
  if (machine == NULL) return kiln_elf_refuse(e, "machine %d, expected 62 (x86-64) or 183 (AArch64)", e->machine);
  if (e->kind != ET_DYN || e->version != 1 || (e->osabi != 0 && e->osabi != 3))
    return kiln_elf_refuse(e, "ELF type %d, version %" PRIu32 ", OS ABI %d: expected 3 (shared object), 1, 0 or 3", e->kind,
                           e->version, e->osabi);
  tag_list tags = {NULL, 0};
  if (!read_tags(e, &tags) || !read_tables(e, &tags, machine, out)) return false;
  out->machine = machine->name;
  for (uint32_t i = 0; i < e->segment_count; ++i) {
    const elf_segment *s = &e->segments[i];
    out->exec_stack = out->exec_stack || ((s->flags & PF_X) != 0 && (s->kind == PT_GNU_STACK || (s->flags & PF_W) != 0));
  }
  return true;
}
