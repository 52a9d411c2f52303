/* What artifacts say of themselves: cubins and shared objects, read from bytes that nothing is believed of. */
#ifndef KILN_ARTIFACT_H
#define KILN_ARTIFACT_H

#include "core.h"

/* ---- containers (elf.c): little-endian ELF64 ---- */
enum {
  SHT_SYMTAB = 2,
  SHT_STRTAB = 3,
  SHT_DYNAMIC = 6,
  SHT_NOBITS = 8,
  SHT_DYNSYM = 11,
  SHN_LORESERVE = 0xFF00,
  ELF_MAX_NAME = 4096
};

typedef struct {
  const char *name;
  uint32_t kind, link;
  uint64_t flags, address, offset, size, entsize; /* within the file unless kind is SHT_NOBITS */
} elf_section;
typedef struct { uint32_t kind, flags; uint64_t offset, address, filesz; } elf_segment;
typedef struct { const char *name; uint8_t binding, kind, other; uint16_t section; uint64_t value, size; } elf_symbol;
typedef struct { const uint8_t *data; size_t bytes; } span;

typedef struct {
  kiln_arena *arena;
  kiln_error *error;
  kiln_code code; /* of the first refusal */
  span file;
  uint8_t osabi, abi_version;
  uint16_t kind, machine;
  uint32_t version, flags;
  elf_section *sections; uint32_t section_count;
  elf_segment *segments; uint32_t segment_count;
  uint32_t *by_name; /* section indices in the order of their names, which are unique */
} elf;

/* The container of `data`, which must outlive it. False, with e->code set: no whole, self-consistent ELF64 file of at most 64 MiB.
 */
bool kiln_elf_read(elf *e, span file);
/* The section named `prefix` and `name` together. */
const elf_section *kiln_elf_find(const elf *e, const char *prefix, const char *name);
span kiln_elf_body(const elf *e, const elf_section *section); /* empty for SHT_NOBITS */
bool kiln_elf_symbols(elf *e, const elf_section *table, const elf_symbol **out, uint32_t *count);
/* The text that ends with a zero at an offset of a table. */
bool kiln_elf_text(elf *e, span table, uint64_t offset, const char *what, const char **out);
/* Notes a refusal, which the reader's end makes a sentence; always false. */
bool kiln_elf_refuse(elf *e, const char *format, ...) __attribute__((format(printf, 2, 3)));
bool kiln_elf_no_memory(elf *e);

static inline uint16_t kiln_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static inline uint32_t kiln_u32(const uint8_t *p) { return (uint32_t)kiln_u16(p) | (uint32_t)kiln_u16(p + 2) << 16; }
static inline uint64_t kiln_u64(const uint8_t *p) { return (uint64_t)kiln_u32(p) | (uint64_t)kiln_u32(p + 4) << 32; }

/* ---- cubins (cubin.c) ---- */
typedef struct { uint32_t ordinal, offset, size; } cubin_param;
typedef struct { bool given; uint32_t n[3]; } cubin_shape;
typedef struct {
  const char *name;
  cubin_param *params; uint32_t param_count; /* by ordinal, gapless from 0 */
  uint32_t param_base;          /* where their block begins in its constant bank: what an offset's alignment counts from */
  cubin_shape reqntid, cluster; /* the block, and the cluster, that a launch must have */
  uint32_t registers, stack;    /* per thread; bytes */
  uint64_t static_shared;       /* bytes a block, without the 1024 that the system takes from sm_90 on */
  uint64_t code_bytes;
} cubin_kernel;
typedef struct {
  char arch[16]; /* "sm_90a" */
  uint32_t sm;
  cubin_kernel *kernels; uint32_t kernel_count; /* by name */
} cubin;

/* ---- shared objects (object.c) ---- */
typedef struct { const char *name; uint64_t bytes; } object_export;
typedef struct {
  const char *machine; /* "x86_64" or "aarch64" */
  object_export *exports; uint32_t export_count; /* functions, by name */
  const char **undefined; uint32_t undefined_count; /* by name */
  const char **needed; uint32_t needed_count;
  bool has_init, exec_stack;
} shared_object;

/* False, with e->code set, for anything but a whole and sound one. */
bool kiln_cubin_read(elf *e, span file, cubin *out);
bool kiln_object_read(elf *e, span file, shared_object *out);

/* ---- launch proofs (proof.c) ---- */
typedef struct { bool is_cubin; cubin cubin; shared_object object; } artifact;
kiln_code kiln_artifact_read(kiln_arena *arena, const char *target, span file, artifact *out, kiln_error *error);
typedef void proof_fault(void *user, const char *sentence);
/* Tells every way in which a kernel of the manifest is not what its artifact is. */
void kiln_prove_all(const manifest *m, const manifest_kernel *kernel, const artifact *a, proof_fault *told, void *user);

#endif
