/* What a CUDA binary says of itself, in both layouts in use; as kiln.runtime.cubin, without a driver or any NVIDIA tool. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "artifact.h"

enum { EM_CUDA = 190, ET_EXEC = 2, OLD_OSABI = 0x33, OLD_VERSION = 7, NEW_OSABI = 0x41, NEW_VERSION = 8 };
enum { STB_GLOBAL = 1, STT_FUNC = 2, STO_CUDA_ENTRY = 0x10, RESERVED_SHARED = 1024, MAX_SHARED = 1 << 20 };
/* Attributes of .nv.info and its like. */
enum {
  MAX_THREADS = 0x05,
  ACCELERATOR = 0x09,
  PARAM_CBANK = 0x0A,
  REQNTID = 0x10,
  FRAME_SIZE = 0x11,
  MIN_STACK = 0x12,
  KPARAM = 0x17,
  CBANK_SIZE = 0x19,
  REGCOUNT = 0x2F,
  CTA_PER_CLUSTER = 0x3D,
  KPARAM_V2 = 0x45
};
enum { NOTE_CUINFO = 1000, NOTE_TKINFO = 2000, NOTE_HEADER = 24, PARAM_RECORD = 12 };

/* ---- format/attribute/value records ---- */
typedef struct { const elf_section *section; span body; size_t at; } records;
typedef struct { uint8_t attr; uint32_t small; span payload; } record;

static records records_of(const elf *e, const elf_section *s) { return (records){s, kiln_elf_body(e, s), 0}; }

/* The next record; false at the end, and where the section is unsound. */
static bool next_record(elf *e, records *r, record *out) {
  size_t left = r->body.bytes - r->at;
  const uint8_t *p = r->body.data + r->at;
  if (left == 0) return false;
  if (left < 4) return kiln_elf_refuse(e, "section '%.200s' ends within the record at byte %zu", r->section->name, r->at);
  *out = (record){p[1], kiln_u16(p + 2), {p + 4, 0}};
  if (p[0] < 1 || p[0] > 4)
    return kiln_elf_refuse(e, "section '%.200s' has a record of format %d, expected 1 to 4", r->section->name, p[0]);
  if (p[0] == 4) out->payload.bytes = out->small;
  if (out->payload.bytes > left - 4)
    return kiln_elf_refuse(e, "a record of section '%.200s' has %" PRIu32 " bytes, %zu are left", r->section->name, out->small,
                           left - 4);
  r->at += 4 + out->payload.bytes;
  return true;
}

/* ---- notes ---- */

/* The description of the one note of a section; empty if there is no such section. */
static bool read_note(elf *e, const char *name, uint32_t kind, span *out) {
  static const uint8_t vendor[] = "NVIDIA Corp";
  *out = (span){NULL, 0};
  const elf_section *section = kiln_elf_find(e, name, "");
  if (section == NULL) return true;
  span body = kiln_elf_body(e, section);
  if (body.bytes < NOTE_HEADER) return kiln_elf_refuse(e, "note '%s' has %zu bytes, expected 24 and more", name, body.bytes);
  uint32_t namesz = kiln_u32(body.data), descsz = kiln_u32(body.data + 4), found = kiln_u32(body.data + 8);
  if (namesz != sizeof vendor || found != kind || memcmp(body.data + 12, vendor, sizeof vendor) != 0 ||
      descsz > body.bytes - NOTE_HEADER)
    return kiln_elf_refuse(
        e, "note '%s' has name size %" PRIu32 ", type %" PRIu32 ", %" PRIu32 " bytes in %zu: expected type %" PRIu32, name, namesz,
        found, descsz, body.bytes, kind);
  *out = (span){body.data + NOTE_HEADER, descsz};
  return true;
}

/* The release text and the option string that the assembler left of itself; empty where it left none. */
static bool tool_strings(elf *e, const char **release, const char **options) {
  span note;
  *release = *options = "";
  if (!read_note(e, ".note.nv.tkinfo", NOTE_TKINFO, &note)) return false;
  if (note.bytes == 0) return true;
  if (note.bytes < 24) return kiln_elf_refuse(e, "note '.note.nv.tkinfo' describes %zu bytes, expected 24 and more", note.bytes);
  span texts = {note.data + 24, note.bytes - 24};
  return kiln_elf_text(e, texts, kiln_u32(note.data + 12), "release string", release) &&
         kiln_elf_text(e, texts, kiln_u32(note.data + 20), "option string", options);
}

/* ---- architecture ---- */
static bool is_digit(char c) { return c >= '0' && c <= '9'; }
static bool is_word(char c) { return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

/* The first `-arch sm_<1 to 4 digits>[af]`, spelled with a space or an equals sign, that no digit or lower-case letter follows. */
static bool told_arch(const char *options, uint32_t *sm, char *suffix) {
  for (const char *at = options; (at = strstr(at, "-arch")) != NULL; ++at) {
    const char *c = at + 5;
    if ((*c != ' ' && *c != '=') || strncmp(c + 1, "sm_", 3) != 0) continue;
    int digits = 0;
    for (c += 4, *sm = 0; is_digit(*c) && digits < 4; ++c, ++digits) *sm = *sm * 10 + (uint32_t)(*c - '0');
    *suffix = *c == 'a' || *c == 'f' ? *c++ : 0;
    if (digits > 0 && !is_digit(*c) && !(*c >= 'a' && *c <= 'z')) return true;
  }
  return false;
}

/* Two places hold the suffix: a flag (the old layout, and 12.9 in the new one) or .nv.compat (13.x, which leaves the flag clear).
 * Neither knows `f`: that stands in the assembler's option string alone. */
static bool read_architecture(elf *e, bool old, cubin *out) {
  bool accelerated = (e->flags & (old ? 0x800 : 0x8)) != 0;
  out->sm = old ? e->flags & 0xFF : e->flags >> 8 & 0xFF;
  const elf_section *compat = kiln_elf_find(e, ".nv.compat", "");
  if (compat != NULL) {
    records all = records_of(e, compat);
    for (record r = {0}; next_record(e, &all, &r);) accelerated = accelerated || (r.attr == ACCELERATOR && (r.small & 0xFF) != 0);
    if (e->code != KILN_OK) return false;
  }
  const char *release, *options;
  uint32_t sm;
  char suffix[2] = {accelerated ? 'a' : 0, 0}, told[2] = {0, 0};
  if (!tool_strings(e, &release, &options)) return false;
  if (told_arch(options, &sm, told)) {
    if (sm != out->sm || (told[0] == 'a') != accelerated)
      return kiln_elf_refuse(e, "the header says sm_%" PRIu32 "%s, the assembler's options say sm_%" PRIu32 "%s", out->sm, suffix,
                             sm, told);
    suffix[0] = told[0];
  }
  snprintf(out->arch, sizeof out->arch, "sm_%" PRIu32 "%s", out->sm, suffix);
  return true;
}

/* "release 13.4" as 134; 0 if there is none. */
static uint32_t told_release(const char *text) {
  static const char word[] = "release ";
  for (const char *at = text; (at = strstr(at, word)) != NULL; ++at) {
    const char *c = at + sizeof word - 1;
    if (is_digit(c[0]) && is_digit(c[1]) && c[2] == '.' && is_digit(c[3]) && !is_word(c[4]))
      return (uint32_t)((c[0] - '0') * 100 + (c[1] - '0') * 10 + (c[3] - '0'));
  }
  return 0;
}

/* The CUDA version of the assembler: the ELF version in the old layout, a note (of 13.x) or its words (12.9) in the new. */
static bool check_toolkit(elf *e, bool old) {
  uint32_t code = e->version;
  if (!old && e->version != 1) return kiln_elf_refuse(e, "ELF version %" PRIu32 ", expected 1 in the new CUDA layout", e->version);
  if (!old && kiln_elf_find(e, ".note.nv.cuinfo", "") != NULL) {
    span note;
    if (!read_note(e, ".note.nv.cuinfo", NOTE_CUINFO, &note)) return false;
    if (note.bytes < 8) return kiln_elf_refuse(e, "note '.note.nv.cuinfo' describes %zu bytes, expected 8", note.bytes);
    code = kiln_u16(note.data + 4);
  } else if (!old) {
    const char *release, *options;
    if (!tool_strings(e, &release, &options)) return false;
    code = told_release(release);
  }
  return (code >= 100 && code < 1000) || kiln_elf_refuse(e, "toolkit version %" PRIu32 ", expected 100 (CUDA 10.0) to 999", code);
}

/* ---- what the file-wide .nv.info says of symbols ---- */
typedef struct { bool has[3]; uint32_t value[3]; } symbol_facts; /* by fact_of */

static int fact_of(uint8_t attr) { return attr == REGCOUNT ? 0 : attr == FRAME_SIZE ? 1 : attr == MIN_STACK ? 2 : -1; }

static bool read_facts(elf *e, uint32_t symbols, symbol_facts **out) {
  const elf_section *section = kiln_elf_find(e, ".nv.info", "");
  if (section == NULL) return kiln_elf_refuse(e, "there is no section '.nv.info', which holds register counts");
  symbol_facts *facts = *out = kiln_arena_get(e->arena, symbols, sizeof *facts);
  if (facts == NULL) return kiln_elf_no_memory(e);
  records all = records_of(e, section);
  for (record r = {0}; next_record(e, &all, &r);) {
    int fact = fact_of(r.attr);
    if (fact < 0) continue;
    if (r.payload.bytes != 8) return kiln_elf_refuse(e, "attribute %#x has %zu bytes, expected 8", r.attr, r.payload.bytes);
    uint32_t symbol = kiln_u32(r.payload.data), value = kiln_u32(r.payload.data + 4);
    if (symbol >= symbols)
      return kiln_elf_refuse(e, "attribute %#x is of symbol %" PRIu32 ", but there are %" PRIu32, r.attr, symbol, symbols);
    if (facts[symbol].has[fact] && facts[symbol].value[fact] != value)
      return kiln_elf_refuse(e, "attribute %#x of symbol %" PRIu32 " is given twice", r.attr, symbol);
    facts[symbol].has[fact] = true;
    facts[symbol].value[fact] = value;
  }
  return e->code == KILN_OK;
}

/* ---- one kernel ---- */
static int compare_params(const void *a, const void *b) {
  const cubin_param *x = a, *y = b;
  if (x->ordinal != y->ordinal) return x->ordinal < y->ordinal ? -1 : 1;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  return (x->size > y->size) - (x->size < y->size);
}

/* Parameters number 0, 1, 2… and follow each other within the block. */
static bool order_params(elf *e, cubin_kernel *k, uint32_t total) {
  if (k->param_count != 0) qsort(k->params, k->param_count, sizeof *k->params, compare_params);
  for (uint32_t i = 0; i < k->param_count; ++i) {
    if (k->params[i].ordinal != i)
      return kiln_elf_refuse(e, "kernel '%.200s' numbers its parameters not 0, 1, 2 and so on", k->name);
  }
  uint32_t end = 0;
  for (uint32_t i = 0; i < k->param_count; ++i) {
    const cubin_param *p = &k->params[i];
    if (p->offset < end || p->size == 0)
      return kiln_elf_refuse(e,
                             "kernel '%.200s': parameter %" PRIu32 " has %" PRIu32 " bytes at %" PRIu32 ", expected %" PRIu32 "+",
                             k->name, i, p->size, p->offset, end);
    end = p->offset + p->size;
  }
  return end == total ||
         kiln_elf_refuse(e, "kernel '%.200s': its parameters end at byte %" PRIu32 ", its parameter block at %" PRIu32, k->name,
                         end, total);
}

static bool read_param(elf *e, cubin_kernel *k, const record *r) {
  if (r->payload.bytes != PARAM_RECORD)
    return kiln_elf_refuse(e, "kernel '%.200s': a parameter record has %zu bytes, expected 12", k->name, r->payload.bytes);
  const uint8_t *p = r->payload.data;
  uint32_t size = r->attr == KPARAM ? kiln_u32(p + 8) >> 18 : kiln_u16(p + 8);
  k->params[k->param_count++] = (cubin_param){kiln_u16(p + 4), kiln_u16(p + 6), size};
  return true;
}

static bool read_base(elf *e, cubin_kernel *k, const record *r) {
  if (r->payload.bytes != 8)
    return kiln_elf_refuse(e, "kernel '%.200s': attribute %#x has %zu bytes, expected 8", k->name, r->attr, r->payload.bytes);
  k->param_base = kiln_u16(r->payload.data + 4);
  return true;
}

static bool read_shape(elf *e, const cubin_kernel *k, const record *r, cubin_shape *shape) {
  if (r->payload.bytes != 12)
    return kiln_elf_refuse(e, "kernel '%.200s': attribute %#x has %zu bytes, expected 12", k->name, r->attr, r->payload.bytes);
  const uint8_t *p = r->payload.data;
  cubin_shape found = {true, {kiln_u32(p), kiln_u32(p + 4), kiln_u32(p + 8)}};
  if (shape->given && memcmp(shape->n, found.n, sizeof found.n) != 0)
    return kiln_elf_refuse(e, "kernel '%.200s': attribute %#x is given twice", k->name, r->attr);
  *shape = found;
  return true;
}

static bool make_params(elf *e, const elf_section *info, cubin_kernel *k) {
  size_t count = 0;
  records all = records_of(e, info);
  for (record r = {0}; next_record(e, &all, &r);) count += r.attr == KPARAM || r.attr == KPARAM_V2;
  k->params = kiln_arena_get(e->arena, count, sizeof *k->params);
  return k->params != NULL || kiln_elf_no_memory(e);
}

static bool read_info(elf *e, const elf_section *info, cubin_kernel *k) {
  uint32_t param_bytes = 0;
  cubin_shape most = {0};
  if (!make_params(e, info, k)) return false;
  records all = records_of(e, info);
  for (record r = {0}; next_record(e, &all, &r);) {
    bool good = true;
    switch (r.attr) {
      case KPARAM:
      case KPARAM_V2: good = read_param(e, k, &r); break;
      case REQNTID: good = read_shape(e, k, &r, &k->reqntid); break;
      case MAX_THREADS: good = read_shape(e, k, &r, &most); break;
      case CTA_PER_CLUSTER: good = read_shape(e, k, &r, &k->cluster); break;
      case PARAM_CBANK: good = read_base(e, k, &r); break;
      case CBANK_SIZE: param_bytes = r.small; break;
      default: break;
    }
    if (!good) return false;
  }
  return e->code == KILN_OK && order_params(e, k, param_bytes);
}

static bool read_shared(elf *e, uint32_t sm, cubin_kernel *k) {
  const elf_section *section = kiln_elf_find(e, ".nv.shared.", k->name);
  uint64_t reserved = sm >= 90 ? RESERVED_SHARED : 0;
  if (section == NULL) return true;
  if (section->size < reserved || section->size > MAX_SHARED + reserved)
    return kiln_elf_refuse(e, "kernel '%.200s' has %" PRIu64 " bytes of shared memory, expected %" PRIu64 " to %" PRIu64, k->name,
                           section->size, reserved, MAX_SHARED + reserved);
  k->static_shared = section->size - reserved;
  return true;
}

static bool read_kernel(elf *e, uint32_t sm, const elf_symbol *symbol, const symbol_facts *facts, cubin_kernel *k) {
  k->name = symbol->name;
  const elf_section *text = symbol->section < SHN_LORESERVE ? &e->sections[symbol->section] : NULL;
  if (k->name[0] == 0 || text == NULL || text != kiln_elf_find(e, ".text.", k->name))
    return kiln_elf_refuse(e, "kernel '%.200s' has its code in '%.200s', expected '.text.%.200s'", k->name,
                           text == NULL ? "" : text->name, k->name);
  const elf_section *info = kiln_elf_find(e, ".nv.info.", k->name);
  if (info == NULL || !facts->has[0])
    return kiln_elf_refuse(e, "kernel '%.200s' has no register count or no section '.nv.info.%.200s'", k->name, k->name);
  k->registers = facts->value[0];
  k->stack = facts->value[1] > facts->value[2] ? facts->value[1] : facts->value[2];
  k->code_bytes = text->size;
  return read_info(e, info, k) && read_shared(e, sm, k);
}

/* ---- all kernels ---- */
typedef struct { const elf_symbol *symbol; uint32_t index; } entry;

static int compare_entries(const void *a, const void *b) {
  return strcmp(((const entry *)a)->symbol->name, ((const entry *)b)->symbol->name);
}

/* The entry points by name; two of one name are refused before any is read. */
static bool find_entries(elf *e, const elf_symbol *symbols, uint32_t count, entry **out, uint32_t *found) {
  entry *entries = kiln_arena_get(e->arena, count, sizeof *entries);
  uint32_t n = 0;
  if (entries == NULL) return kiln_elf_no_memory(e);
  for (uint32_t i = 0; i < count; ++i) {
    const elf_symbol *s = &symbols[i];
    if (s->binding == STB_GLOBAL && s->kind == STT_FUNC && (s->other & STO_CUDA_ENTRY) != 0) entries[n++] = (entry){s, i};
  }
  if (n != 0) qsort(entries, n, sizeof *entries, compare_entries);
  for (uint32_t i = 1; i < n; ++i) {
    if (compare_entries(&entries[i - 1], &entries[i]) == 0)
      return kiln_elf_refuse(e, "two kernels are named '%.200s'", entries[i].symbol->name);
  }
  *out = entries, *found = n;
  return true;
}

static bool read_kernels(elf *e, cubin *out) {
  const elf_section *table = kiln_elf_find(e, ".symtab", "");
  const elf_symbol *symbols = NULL;
  symbol_facts *facts = NULL;
  entry *entries = NULL;
  uint32_t count = 0, found = 0;
  if (table == NULL || table->kind != SHT_SYMTAB) return kiln_elf_refuse(e, "there is no symbol table, so no kernel can be found");
  if (!kiln_elf_symbols(e, table, &symbols, &count) || !read_facts(e, count, &facts) ||
      !find_entries(e, symbols, count, &entries, &found))
    return false;
  out->kernels = kiln_arena_get(e->arena, found, sizeof *out->kernels);
  if (out->kernels == NULL) return kiln_elf_no_memory(e);
  for (; out->kernel_count < found; ++out->kernel_count) {
    const entry *at = &entries[out->kernel_count];
    if (!read_kernel(e, out->sm, at->symbol, &facts[at->index], &out->kernels[out->kernel_count])) return false;
  }
  return true;
}

bool kiln_cubin_read(elf *e, span file, cubin *out) {
  *out = (cubin){.kernel_count = 0};
  if (!kiln_elf_read(e, file)) return false;
  if (e->machine != EM_CUDA) return kiln_elf_refuse(e, "machine %d, expected %d (CUDA)", e->machine, EM_CUDA);
  if (e->kind != ET_EXEC)
    return kiln_elf_refuse(e, "ELF type %d, expected %d: only linked cubins can be loaded, a relocatable one cannot", e->kind,
                           ET_EXEC);
  bool old = e->osabi == OLD_OSABI && e->abi_version == OLD_VERSION;
  if (!old && !(e->osabi == NEW_OSABI && e->abi_version == NEW_VERSION))
    return kiln_elf_refuse(e, "CUDA ABI %#x version %d, expected 0x33 version 7 or 0x41 version 8", e->osabi, e->abi_version);
  return read_architecture(e, old, out) && check_toolkit(e, old) && read_kernels(e, out);
}
