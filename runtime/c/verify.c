/* Verification of a whole tree, without a compiler or a device: integrity of every file, and every launch proof; as
 * kiln.runtime.verify. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "artifact.h"
#include "tree.h"

static const char INDEX[] = "INDEX.json", MANIFEST[] = "MANIFEST.json", EVIDENCE[] = "EVIDENCE.json", STAGING[] = ".staging-",
                  SIGNATURE[] = "INDEX.json.sig";

typedef struct fault { struct fault *next; const char *file, *why; } fault;

typedef struct {
  kiln_tree *tree;
  kiln_arena *arena; /* faults, index and manifests */
  fault *faults;
  uint32_t count;
  tree_index index;
  kiln_error *error;
  kiln_code code; /* of what kept the tree from being looked at */
} verifier;

/* ---- faults ---- */
static kiln_code give_up(verifier *v, kiln_code code) {
  if (v->code == KILN_OK) v->code = code;
  return code;
}

static void add_fault(verifier *v, const char *folder, const char *name, const char *why) {
  char file[1400];
  snprintf(file, sizeof file, "%s%s%s", folder == NULL ? "" : folder, folder == NULL ? "" : "/", name);
  fault *made = kiln_arena_get(v->arena, 1, sizeof *made);
  if (made == NULL) {
    give_up(v, kiln_no_memory(v->error));
    return;
  }
  *made = (fault){v->faults, kiln_arena_text(v->arena, file, strlen(file)), kiln_arena_text(v->arena, why, strlen(why))};
  if (made->file == NULL || made->why == NULL) {
    give_up(v, kiln_no_memory(v->error));
    return;
  }
  v->faults = made;
  ++v->count;
}

/* A refusal of a file is a fault of it; no memory is none. False where the refusal was of neither kind. */
static bool note(verifier *v, const char *folder, const char *name, const kiln_error *found) {
  if (found->code == KILN_INTEGRITY || found->code == KILN_SCHEMA) {
    add_fault(v, folder, name, found->message);
    return true;
  }
  give_up(v, kiln_fail(v->error, found->code, "%s", found->message));
  return false;
}

static int compare_faults(const void *a, const void *b) {
  const fault *x = *(const fault *const *)a, *y = *(const fault *const *)b;
  int order = strcmp(x->file, y->file);
  return order != 0 ? order : strcmp(x->why, y->why);
}

/* Each fault once, by file. */
static kiln_code report(verifier *v, kiln_fault_seen *found, void *user, uint32_t *count) {
  uint32_t n = 0;
  const fault **sorted = kiln_arena_get(v->arena, v->count, sizeof *sorted);
  if (sorted == NULL) return kiln_no_memory(v->error);
  for (const fault *f = v->faults; f != NULL; f = f->next) sorted[n++] = f;
  if (n != 0) qsort(sorted, n, sizeof *sorted, compare_faults);
  for (uint32_t i = 0; i < n; ++i) {
    if (i > 0 && compare_faults(&sorted[i - 1], &sorted[i]) == 0) continue;
    ++*count;
    if (found != NULL) found(user, sorted[i]->file, sorted[i]->why);
  }
  return KILN_OK;
}

/* ---- INDEX.json ---- */
static bool digest_matches(const uint8_t *data, size_t bytes, const char *expect) {
  uint8_t digest[32];
  char text[65];
  if (strncmp(expect, "sha256:", 7) == 0) expect += 7;
  kiln_sha256(data, bytes, digest);
  kiln_hex(digest, sizeof digest, text);
  return strcmp(text, expect) == 0;
}

static int compare_entries(const void *a, const void *b) {
  return strcmp((*(const index_entry *const *)a)->target, (*(const index_entry *const *)b)->target);
}

/* The one form in which Kiln writes an index: sorted, two spaces a level, one newline at the end. NULL: no memory. */
static const char *canonical(verifier *v) {
  enum { HEAD = 128, ENTRY = 512 };
  const tree_index *x = &v->index;
  const index_entry *sorted[64];
  size_t room = HEAD + (size_t)ENTRY * x->target_count, used;
  char *out = kiln_arena_get(v->arena, room, 1), digest[65];
  if (out == NULL) return NULL;
  if (x->target_count == 0) {
    snprintf(out, room, "{\"generation\": %" PRId64 ", \"schema\": 1, \"targets\": {}}\n", x->generation);
    return out;
  }
  for (uint32_t i = 0; i < x->target_count; ++i) sorted[i] = &x->targets[i];
  qsort(sorted, x->target_count, sizeof *sorted, compare_entries);
  used = (size_t)snprintf(out, room, "{\n  \"generation\": %" PRId64 ",\n  \"schema\": 1,\n  \"targets\": {\n", x->generation);
  for (uint32_t i = 0; i < x->target_count; ++i) {
    kiln_hex(sorted[i]->sha256, 32, digest);
    used += (size_t)snprintf(out + used, room - used,
                             "    \"%s\": {\n      \"bytes\": %" PRId64
                             ",\n      \"manifest\": \"%s\",\n      \"sha256\": \"%s\"\n    }%s\n",
                             sorted[i]->target, sorted[i]->bytes, sorted[i]->manifest, digest, i + 1 < x->target_count ? "," : "");
  }
  snprintf(out + used, room - used, "  }\n}\n");
  return out;
}

/* Whether there is an index to go on with. */
static bool read_index(verifier *v, const char *expect) {
  kiln_error error = {.code = KILN_OK};
  const uint8_t *data;
  size_t bytes;
  bool good = kiln_tree_read(v->tree, NULL, INDEX, KILN_MAX_INDEX, &data, &bytes, &error) == KILN_OK;
  if (good && expect != NULL && !digest_matches(data, bytes, expect)) {
    kiln_fail(&error, KILN_INTEGRITY, "%s: found another sha256, expected %.80s. Rebuild or restore the tree.", INDEX, expect);
    good = false;
  }
  good = good && kiln_parse_index(v->arena, INDEX, data, bytes, &v->index, &error) == KILN_OK;
  if (!good) {
    note(v, NULL, INDEX, &error);
  } else {
    const char *text = canonical(v);
    if (text == NULL) give_up(v, kiln_no_memory(v->error));
    else if (strlen(text) != bytes || memcmp(text, data, bytes) != 0)
      add_fault(v, NULL, INDEX, "The document isn't in canonical form; build the tree again.");
  }
  kiln_tree_release(v->tree, data);
  return good;
}

/* ---- what lies around ---- */
static bool is_target(const verifier *v, const char *name) {
  for (uint32_t i = 0; i < v->index.target_count; ++i) {
    if (strcmp(v->index.targets[i].target, name) == 0) return true;
  }
  return false;
}

static void add_extra(verifier *v, const char *folder, const char *name, const char *why) {
  char shown[1200];
  bool plain = true;
  for (const char *c = name; *c; ++c) plain = plain && *c >= 0x20 && *c < 0x7F;
  if (!plain) kiln_ascii(name, strlen(name), shown, sizeof shown);
  add_fault(v, folder, plain ? name : shown, why);
}

/* Whose signature it is was checked where a key was given; here it is only known to be one by its size. */
static void see_signature(verifier *v) {
  enum { BYTES = 64 };
  kiln_error error = {.code = KILN_OK};
  const uint8_t *data;
  size_t bytes;
  if (kiln_tree_read(v->tree, NULL, SIGNATURE, BYTES, &data, &bytes, &error) != KILN_OK) {
    note(v, NULL, SIGNATURE, &error);
    return;
  }
  kiln_tree_release(v->tree, data);
  if (bytes == BYTES) return;
  snprintf(error.message, sizeof error.message, "Found %zu bytes, expected %d; sign it.", bytes, BYTES);
  add_fault(v, NULL, SIGNATURE, error.message);
}

static kiln_code see_root(void *user, const char *name, entry_kind kind, uint64_t bytes) {
  verifier *v = user;
  bool mark = strcmp(name, "__init__.py") == 0 || strcmp(name, "py.typed") == 0;
  if (strcmp(name, SIGNATURE) == 0) {
    see_signature(v);
    return v->code;
  }
  if (strcmp(name, INDEX) == 0 || is_target(v, name)) return v->code;
  if (strcmp(name, "__pycache__") == 0 && kind == ENTRY_FOLDER) return v->code;
  if (mark && kind == ENTRY_FILE && bytes == 0) return v->code;
  if (strncmp(name, STAGING, sizeof STAGING - 1) == 0)
    add_fault(v, NULL, name, "This was left by a build that runs or was killed; the next build removes it.");
  else add_extra(v, NULL, name, "Not accounted for by INDEX.json; remove it.");
  return v->code;
}

/* ---- one target ---- */
typedef struct {
  const char *name;
  int64_t bytes;
  const uint8_t *sha256;
  const manifest_kernel **kernels;
  uint32_t kernel_count;
} target_file;
typedef struct { verifier *v; const char *target; manifest m; target_file *files; uint32_t file_count; } target_walk;

static int compare_kernels(const void *a, const void *b) {
  const manifest_kernel *x = *(const manifest_kernel *const *)a, *y = *(const manifest_kernel *const *)b;
  int order = strcmp(x->file, y->file);
  return order != 0 ? order : (x > y) - (x < y);
}

static int compare_files(const void *a, const void *b) {
  return strcmp(((const target_file *)a)->name, ((const target_file *)b)->name);
}

/* Every file that the manifest accounts for, by name, with the kernels in it. */
static bool collect_files(target_walk *w) {
  const manifest *m = &w->m;
  const manifest_kernel **kernels = kiln_arena_get(w->v->arena, m->kernel_count, sizeof *kernels);
  w->files = kiln_arena_get(w->v->arena, (size_t)m->kernel_count + m->source_count, sizeof *w->files);
  if (kernels == NULL || w->files == NULL) {
    give_up(w->v, kiln_no_memory(w->v->error));
    return false;
  }
  for (uint32_t i = 0; i < m->kernel_count; ++i) kernels[i] = &m->kernels[i];
  if (m->kernel_count != 0) qsort(kernels, m->kernel_count, sizeof *kernels, compare_kernels);
  for (uint32_t i = 0; i < m->kernel_count; ++i) {
    bool same = i > 0 && strcmp(kernels[i]->file, kernels[i - 1]->file) == 0;
    if (!same) w->files[w->file_count++] = (target_file){kernels[i]->file, kernels[i]->bytes, kernels[i]->sha256, &kernels[i], 0};
    ++w->files[w->file_count - 1].kernel_count;
  }
  for (uint32_t i = 0; i < m->source_count; ++i)
    w->files[w->file_count++] = (target_file){m->sources[i].name, m->sources[i].bytes, m->sources[i].sha256, NULL, 0};
  if (w->file_count != 0) qsort(w->files, w->file_count, sizeof *w->files, compare_files);
  return true;
}

static kiln_code see_target(void *user, const char *name, entry_kind kind, uint64_t bytes) {
  target_walk *w = user;
  const target_file key = {.name = name};
  (void)bytes;
  bool known = strcmp(name, MANIFEST) == 0 || strcmp(name, EVIDENCE) == 0 ||
               (w->file_count != 0 && bsearch(&key, w->files, w->file_count, sizeof *w->files, compare_files) != NULL);
  if (!known) add_extra(w->v, w->target, name, "Not accounted for by the manifest; remove it.");
  else if (strcmp(name, EVIDENCE) == 0 && kind != ENTRY_FILE)
    add_fault(w->v, w->target, EVIDENCE, "Not a regular file; expected one, or none.");
  return w->v->code;
}

typedef struct { target_walk *walk; const char *file; } proof_place;

static void see_proof(void *user, const char *sentence) {
  proof_place *at = user;
  add_fault(at->walk->v, at->walk->target, at->file, sentence);
}

static kiln_code prove_file(target_walk *w, const target_file *f, span data, kiln_error *error) {
  artifact a;
  proof_place at = {w, f->name};
  kiln_arena *arena = kiln_arena_new();
  if (arena == NULL) return kiln_no_memory(error);
  kiln_code code = kiln_artifact_read(arena, w->target, data, &a, error);
  for (uint32_t i = 0; code == KILN_OK && i < f->kernel_count; ++i) kiln_prove_all(&w->m, f->kernels[i], &a, see_proof, &at);
  kiln_arena_free(arena);
  return code;
}

static bool verify_file(target_walk *w, const target_file *f) {
  kiln_error error = {.code = KILN_OK};
  const uint8_t *data;
  kiln_code code = kiln_tree_read_exact(w->v->tree, w->target, f->name, (size_t)f->bytes, f->sha256, &data, &error);
  if (code == KILN_OK && f->kernel_count != 0) code = prove_file(w, f, (span){data, (size_t)f->bytes}, &error);
  kiln_tree_release(w->v->tree, data);
  if (code != KILN_OK && !note(w->v, w->target, f->name, &error)) return false;
  return w->v->code == KILN_OK;
}

static bool read_target_manifest(target_walk *w, const index_entry *entry) {
  kiln_error error = {.code = KILN_OK};
  const uint8_t *data;
  kiln_code code = kiln_tree_read_exact(w->v->tree, w->target, MANIFEST, (size_t)entry->bytes, entry->sha256, &data, &error);
  if (code == KILN_OK) code = kiln_parse_manifest(w->v->arena, MANIFEST, w->target, data, (size_t)entry->bytes, &w->m, &error);
  kiln_tree_release(w->v->tree, data);
  if (code != KILN_OK) note(w->v, w->target, MANIFEST, &error);
  return code == KILN_OK;
}

static void verify_target(verifier *v, const index_entry *entry) {
  target_walk w = {.v = v, .target = entry->target};
  kiln_error error = {.code = KILN_OK};
  if (kiln_tree_has_folder(v->tree, entry->target, &error) != KILN_OK) {
    note(v, NULL, entry->target, &error);
    return;
  }
  if (!read_target_manifest(&w, entry) || !collect_files(&w)) return;
  kiln_code code = kiln_tree_list(v->tree, entry->target, see_target, &w, v->error);
  if (code != KILN_OK) give_up(v, code);
  for (uint32_t i = 0; v->code == KILN_OK && i < w.file_count && verify_file(&w, &w.files[i]); ++i) {}
}

kiln_code kiln_tree_verify(kiln_tree *tree, const char *expect, kiln_fault_seen *found, void *user, uint32_t *count,
                           kiln_error *error) {
  verifier v = {.tree = tree, .arena = kiln_arena_new(), .error = error};
  *count = 0;
  if (v.arena == NULL) return kiln_no_memory(error);
  if (read_index(&v, expect)) {
    kiln_code code = kiln_tree_list(tree, NULL, see_root, &v, error);
    if (code != KILN_OK) give_up(&v, code);
    for (uint32_t i = 0; v.code == KILN_OK && i < v.index.target_count; ++i) verify_target(&v, &v.index.targets[i]);
  }
  kiln_code code = v.code != KILN_OK ? v.code : report(&v, found, user, count);
  kiln_arena_free(v.arena);
  return code;
}
