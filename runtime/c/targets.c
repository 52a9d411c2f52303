/* Which target a device may run, in which order; this CPU's features; element types. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core.h"

const struct kiln_dtype_row KILN_DTYPES[] = {
    [KILN_F64] = {"f64", 8, false},   [KILN_F32] = {"f32", 4, false},      [KILN_F16] = {"f16", 2, false},
    [KILN_BF16] = {"bf16", 2, false}, [KILN_F8E4M3] = {"f8e4m3", 1, true}, [KILN_F8E5M2] = {"f8e5m2", 1, true},
    [KILN_U8] = {"u8", 1, false},     [KILN_I8] = {"i8", 1, false},        [KILN_I16] = {"i16", 2, false},
    [KILN_I32] = {"i32", 4, false},   [KILN_U32] = {"u32", 4, false},      [KILN_I64] = {"i64", 8, false},
    [KILN_BOOL] = {"bool", 1, false},
};

kiln_dtype kiln_dtype_named(const char *name) {
  for (size_t i = 1; i < sizeof KILN_DTYPES / sizeof *KILN_DTYPES; ++i) {
    if (strcmp(KILN_DTYPES[i].name, name) == 0) return (kiln_dtype)i;
  }
  return (kiln_dtype)0;
}

/* ---- CUDA targets ---- */
typedef struct { int major, minor, suffix; } capability; /* suffix: 0 a, 1 f, 2 none, in the order of preference */

/* sm_<major><minor> with an optional a or f: sm_100a is 10, 0, a. */
static bool read_capability(const char *target, capability *out) {
  if (strncmp(target, "sm_", 3) != 0) return false;
  const char *c = target + 3;
  int digits = 0, number = 0;
  for (; *c >= '0' && *c <= '9' && digits <= 3; ++c, ++digits) number = 10 * number + (*c - '0');
  if (digits < 2 || digits > 3) return false;
  *out = (capability){number / 10, number % 10, *c == 'a' ? 0 : *c == 'f' ? 1 : 2};
  return c[*c == 'a' || *c == 'f'] == 0;
}

bool kiln_target_runs_on(const char *target, int major, int minor) {
  capability of;
  if (!read_capability(target, &of) || of.major != major) return false;
  return of.suffix == 0 ? of.minor == minor : of.minor <= minor;
}

bool kiln_target_has_maps(const char *target) {
  capability of;
  return read_capability(target, &of) && of.major >= 9;
}

int kiln_target_compare(const char *a, const char *b) {
  capability x, y;
  if (!read_capability(a, &x) || !read_capability(b, &y)) return strcmp(a, b);
  return x.minor != y.minor ? y.minor - x.minor : x.suffix - y.suffix;
}

bool kiln_target_named(const char *name) {
  capability unused;
  return read_capability(name, &unused) || kiln_isa_tiers(name) != NULL;
}

/* ---- CPU targets ---- */
static const char *const X86_TIERS[] = {"x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "x86-64-v4-vnni", "x86-64-v4-bf16",
                                        "x86-64-v4-amx", NULL};
static const char *const ARM_TIERS[] = {"neon", "dotprod", "i8mm", NULL};
static const char *const X86_BASELINE[] = {"fpu", "cx8", "cmov", "mmx", "fxsr", "sse", "sse2", NULL};
static const char *const ARM_BASELINE[] = {"fp", "asimd", NULL};

static const struct cpu_row { const char *target; const char *const *tiers, *const *baseline; } CPUS[] = {
  {"cpu-x86_64", X86_TIERS, X86_BASELINE},
  {"cpu-aarch64", ARM_TIERS, ARM_BASELINE},
};

static const struct cpu_row *cpu_row(const char *target) {
  for (size_t i = 0; i < sizeof CPUS / sizeof *CPUS; ++i) {
    if (strcmp(CPUS[i].target, target) == 0) return &CPUS[i];
  }
  return NULL;
}

const char *const *kiln_isa_tiers(const char *target) {
  const struct cpu_row *row = cpu_row(target);
  return row == NULL ? NULL : row->tiers;
}

int kiln_isa_rank(const char *target, const char *tier) {
  const char *const *tiers = kiln_isa_tiers(target);
  for (int i = 0; tiers != NULL && tiers[i] != NULL; ++i) {
    if (strcmp(tiers[i], tier) == 0) return i;
  }
  return -1;
}

const char *kiln_cpu_target(void) {
#if defined(__x86_64__)
  return "cpu-x86_64";
#elif defined(__aarch64__)
  return "cpu-aarch64";
#else
  return NULL;
#endif
}

/* ---- features: one spelling each, sorted ---- */
enum { MAX_KEY = 128 };
struct cpu_features { const char **keys; uint32_t count; };

/* Compilers and /proc/cpuinfo disagree on dots, underscores and a few names. */
static void feature_key(const char *name, size_t length, char key[MAX_KEY + 1]) {
  static const char *const same[][2] = {
    {"lzcnt", "abm"}, {"sse3", "pni"}, {"neon", "asimd"}, {"dotprod", "asimddp"}, {"fp16", "asimdhp"},
  };
  size_t used = 0;
  for (size_t i = 0; i < length && used < MAX_KEY; ++i) {
    if (name[i] != '_' && name[i] != '.') key[used++] = (char)(name[i] >= 'A' && name[i] <= 'Z' ? name[i] + 32 : name[i]);
  }
  key[used] = 0;
  for (size_t i = 0; i < sizeof same / sizeof *same; ++i) {
    if (strcmp(key, same[i][0]) == 0) strcpy(key, same[i][1]);
  }
}

static int compare_keys(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

static bool has_key(const cpu_features *set, const char *key) {
  return set->count != 0 && bsearch(&key, set->keys, set->count, sizeof *set->keys, compare_keys) != NULL;
}

static bool is_space(char c) { return c == ' ' || c == '\t'; }

/* The words of one line's value as a set. */
static bool read_words(kiln_arena *arena, const char *at, const char *end, cpu_features *out) {
  size_t words = 0;
  for (const char *c = at; c < end; ++c) words += !is_space(*c) && (c == at || is_space(c[-1]));
  *out = (cpu_features){kiln_arena_get(arena, words, sizeof *out->keys), 0};
  if (out->keys == NULL) return false;
  while (at < end) {
    const char *start = at;
    while (at < end && !is_space(*at)) ++at;
    char key[MAX_KEY + 1];
    feature_key(start, (size_t)(at - start), key);
    if (at > start && (out->keys[out->count++] = kiln_arena_text(arena, key, strlen(key))) == NULL) return false;
    while (at < end && is_space(*at)) ++at;
  }
  if (out->count != 0) qsort(out->keys, out->count, sizeof *out->keys, compare_keys);
  return true;
}

/* Where the value of a line of features starts; NULL for any other line. */
static const char *features_of_line(const char *line, const char *end) {
  static const char *const labels[] = {"flags", "Features"};
  const char *colon = memchr(line, ':', (size_t)(end - line));
  if (colon == NULL) return NULL;
  const char *start = line, *stop = colon;
  while (start < stop && is_space(*start)) ++start;
  while (stop > start && is_space(stop[-1])) --stop;
  for (size_t i = 0; i < sizeof labels / sizeof *labels; ++i) {
    if ((size_t)(stop - start) == strlen(labels[i]) && memcmp(start, labels[i], strlen(labels[i])) == 0) return colon + 1;
  }
  return NULL;
}

static void keep_common(cpu_features *all, const cpu_features *here) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < all->count; ++i) {
    if (has_key(here, all->keys[i])) all->keys[kept++] = all->keys[i];
  }
  all->count = kept;
}

kiln_code kiln_cpu_features_of(kiln_arena *arena, const char *text, size_t bytes, const cpu_features **out, kiln_error *error) {
  cpu_features *found = kiln_arena_get(arena, 1, sizeof *found);
  if (found == NULL) return kiln_no_memory(error);
  const char *last = NULL, *end = text + bytes;
  size_t last_length = 0;
  for (const char *line = text, *next; line < end; line = next) {
    const char *stop = memchr(line, '\n', (size_t)(end - line));
    next = stop == NULL ? (stop = end) : stop + 1;
    const char *value = features_of_line(line, stop);
    if (value == NULL) continue;
    size_t length = (size_t)(stop - value);
    if (last != NULL && length == last_length && memcmp(last, value, length) == 0) continue; /* most processors are alike */
    cpu_features here;
    if (!read_words(arena, value, stop, &here)) return kiln_no_memory(error);
    if (last == NULL) *found = here;
    else keep_common(found, &here);
    last = value, last_length = length;
  }
  *out = found;
  return KILN_OK;
}

/* What Linux made of CPUID and the OS state (or HWCAP): a feature whose registers it does not save is not listed. Where it can't be
 * read there are none, so that only baselines run. */
kiln_code kiln_cpu_features(kiln_arena *arena, const cpu_features **out, kiln_error *error) {
  enum { MOST = 8 << 20, STEP = 1 << 16 };
  char *text = NULL;
  size_t used = 0, room = 0;
  int fd = open("/proc/cpuinfo", O_RDONLY | O_CLOEXEC);
  for (ssize_t got = 1; fd >= 0 && got > 0 && used < MOST; used += got > 0 ? (size_t)got : 0) {
    if (room - used < STEP) {
      char *more = realloc(text, room + 4 * STEP);
      if (more == NULL) {
        free(text);
        close(fd);
        return kiln_no_memory(error);
      }
      text = more, room += 4 * STEP;
    }
    got = read(fd, text + used, STEP);
  }
  if (fd >= 0) close(fd);
  kiln_code code = kiln_cpu_features_of(arena, text == NULL ? "" : text, used, out, error);
  free(text);
  return code;
}

const char *kiln_cpu_lacks(const cpu_features *present, const char *target, const manifest_kernel *kernel) {
  const struct cpu_row *row = cpu_row(target);
  for (uint32_t i = 0; i < kernel->feature_count; ++i) {
    char key[MAX_KEY + 1];
    feature_key(kernel->features[i], strlen(kernel->features[i]), key);
    bool basic = false;
    for (const char *const *b = row == NULL ? NULL : row->baseline; b != NULL && *b != NULL; ++b)
      basic = basic || strcmp(*b, key) == 0;
    if (!basic && !has_key(present, key)) return kernel->features[i];
  }
  return NULL;
}

bool kiln_needs_tiles(const manifest_kernel *kernel) {
  bool needs = false;
  for (uint32_t i = 0; i < kernel->feature_count; ++i) {
    char key[MAX_KEY + 1];
    feature_key(kernel->features[i], strlen(kernel->features[i]), key);
    needs = needs || strcmp(key, "amxtile") == 0;
  }
  return needs;
}
