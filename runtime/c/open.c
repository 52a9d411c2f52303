/* Opening trees for a device: indices and manifests are verified now, artifacts when they are first used. */
#define _GNU_SOURCE
#include "run.h"

#include <limits.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_INDEX = 1 << 20, MAX_MANIFEST = 16 << 20, SIGNATURE = 64 };

const char *kiln_version(void) { return KILN_VERSION; }

static kiln_code no_memory(kiln_error *error) { return kiln_fail(error, KILN_MEMORY, "the system has no memory left; free some."); }

/* ---- the index ---- */

static kiln_code check_digest(const char *label, const char *expect, const uint8_t *data, size_t bytes, kiln_error *error) {
  uint8_t digest[32];
  char found[65];
  if (strncmp(expect, "sha256:", 7) != 0 || strlen(expect) != 7 + 64)
    return kiln_fail(error, KILN_CONTRACT, "found expect='%.200s', expected sha256: and 64 hex digits.", expect);
  kiln_sha256(data, bytes, digest);
  kiln_hex(digest, sizeof digest, found);
  for (int i = 0; i < 64; i++) {
    char c = expect[7 + i];
    if (found[i] != (c >= 'A' && c <= 'F' ? c - 'A' + 'a' : c))
      return kiln_fail(error, KILN_INTEGRITY, "%s/INDEX.json: found sha256 %s, expected %s. Rebuild or restore the tree.", label,
                       found, expect + 7);
  }
  return KILN_OK;
}

static bool is_signed(const kiln_root *root, const uint8_t *data, size_t bytes, const uint8_t *signature) {
  if (root->ed25519 == NULL) return kiln_ed25519_verify(root->public_key, data, bytes, signature);
  return root->ed25519(root->ed25519_user, data, bytes, signature, root->public_key) == 1;
}

static kiln_code check_signature(kiln_tree *tree, const kiln_root *root, const uint8_t *data, size_t bytes, kiln_error *error) {
  const uint8_t *signature;
  size_t length;
  kiln_code code = kiln_tree_read(tree, NULL, "INDEX.json.sig", SIGNATURE, &signature, &length, error);
  if (code != KILN_OK) return code;
  bool good = length == SIGNATURE && is_signed(root, data, bytes, signature);
  kiln_tree_release(tree, signature);
  if (good) return KILN_OK;
  return kiln_fail(error, KILN_INTEGRITY,
                   "%s/INDEX.json.sig: not this key's signature of INDEX.json; get the tree from its publisher.",
                   kiln_tree_label(tree));
}

static kiln_code check_index(kiln_tree *tree, const kiln_root *root, const uint8_t *data, size_t bytes, kiln_error *error) {
  kiln_code code = KILN_OK;
  if (root->expect != NULL) code = check_digest(kiln_tree_label(tree), root->expect, data, bytes, error);
  if (code == KILN_OK && root->public_key != NULL) code = check_signature(tree, root, data, bytes, error);
  return code;
}

static kiln_code read_index(kiln_arena *arena, kiln_tree *tree, const kiln_root *root, tree_index *out, kiln_error *error) {
  const uint8_t *data;
  size_t bytes;
  char where[PATH_MAX];
  sink s = {where, sizeof where, 0};
  kiln_put(&s, "%s/INDEX.json", kiln_tree_label(tree));
  kiln_code code = kiln_tree_read(tree, NULL, "INDEX.json", MAX_INDEX, &data, &bytes, error);
  if (code != KILN_OK) return code;
  code = check_index(tree, root, data, bytes, error);
  if (code == KILN_OK) code = kiln_parse_index(arena, where, data, bytes, out, error);
  kiln_tree_release(tree, data);
  if (code != KILN_OK || out->generation >= root->minimum_generation) return code;
  return kiln_fail(error, KILN_INTEGRITY, "%s: generation %lld, expected at least %lld; the tree was rolled back.", where,
                   (long long)out->generation, (long long)root->minimum_generation);
}

static kiln_code open_tree(const kiln_root *root, kiln_tree **out, kiln_error *error) {
  if ((root->path == NULL) == (root->archive == NULL))
    return kiln_fail(error, KILN_CONTRACT, "found %s of path and archive in a root, expected one.", root->path ? "both" : "none");
  if (root->ed25519 != NULL && root->public_key == NULL)
    return kiln_fail(error, KILN_CONTRACT, "found a verifier without a public key in a root; give the key that signed the tree.");
  if (root->path != NULL) return kiln_tree_open(root->path, out, error);
  return kiln_tree_embedded(root->archive, root->archive_bytes, out, error);
}

/* ---- manifests ---- */

static bool is_legal(const kiln_library *library, const char *target) {
  if (library->kind == DEVICE_PRETEND) return strcmp(target, library->pretended) == 0;
  if (library->kind == DEVICE_CPU) return strcmp(target, kiln_cpu_target()) == 0;
  return strncmp(target, "sm_", 3) == 0 && kiln_target_runs_on(target, library->device.major, library->device.minor);
}

/* The best of the legal targets after `last` in the order of preference; NULL: no more. */
static const index_entry *next_target(const kiln_library *library, const tree_index *index, const index_entry *last) {
  const index_entry *best = NULL;
  for (uint32_t i = 0; i < index->target_count; i++) {
    const index_entry *e = &index->targets[i];
    if (!is_legal(library, e->target) || (last != NULL && kiln_target_compare(e->target, last->target) <= 0)) continue;
    if (best == NULL || kiln_target_compare(e->target, best->target) < 0) best = e;
  }
  return best;
}

static kiln_code read_manifest(kiln_library *library, kiln_tree *tree, const index_entry *e, pack *out, kiln_error *error) {
  const uint8_t *data;
  char where[PATH_MAX];
  sink s = {where, sizeof where, 0};
  kiln_put(&s, "%s/%s", kiln_tree_label(tree), e->manifest);
  out->tree = tree;
  kiln_code code = kiln_tree_read_exact(tree, e->target, "MANIFEST.json", (size_t)e->bytes, e->sha256, &data, error);
  if (code != KILN_OK) return code;
  code = kiln_parse_manifest(library->arena, where, e->target, data, (size_t)e->bytes, &out->manifest, error);
  kiln_tree_release(tree, data);
  if (code == KILN_OK && library->kind == DEVICE_CUDA) code = kiln_cuda_check_toolchain(library, &out->manifest, error);
  return code;
}

static kiln_code add_pack(kiln_library *library, kiln_tree *tree, const index_entry *e, kiln_error *error) {
  pack *more = realloc(library->packs, (library->pack_count + 1) * sizeof *more);
  if (more == NULL) return no_memory(error);
  library->packs = more;
  more[library->pack_count] = (pack){.first_kernel = library->kernel_count};
  kiln_code code = read_manifest(library, tree, e, &more[library->pack_count], error);
  if (code == KILN_OK) library->kernel_count += more[library->pack_count++].manifest.kernel_count;
  return code;
}

static kiln_code add_root(kiln_library *library, const kiln_root *root, sink *holds, kiln_error *error) {
  kiln_tree **more = realloc(library->trees, (library->tree_count + 1) * sizeof *more), *tree;
  if (more == NULL) return no_memory(error);
  library->trees = more;
  kiln_code code = open_tree(root, &tree, error);
  if (code != KILN_OK) return code;
  more[library->tree_count++] = tree;
  tree_index index;
  code = read_index(library->arena, tree, root, &index, error);
  if (code != KILN_OK) return code;
  for (uint32_t i = 0; i < index.target_count; i++) kiln_put(holds, "%s%s", holds->used ? ", " : "", index.targets[i].target);
  for (const index_entry *e = next_target(library, &index, NULL); e != NULL && code == KILN_OK; e = next_target(library, &index, e))
    code = add_pack(library, tree, e, error);
  return code;
}

static kiln_code add_roots(kiln_library *library, const kiln_options *o, kiln_error *error) {
  char text[1024];
  sink holds = {text, sizeof text, 0};
  text[0] = 0;
  kiln_root first = {o->root, NULL, 0, o->expect, o->public_key, o->minimum_generation, o->ed25519, o->ed25519_user};
  if (o->root == NULL && o->root_count == 0)
    return kiln_fail(error, KILN_UNAVAILABLE, "no tree was given; pass the folder of a built tree as root.");
  if (o->root == NULL && (o->expect != NULL || o->public_key != NULL || o->minimum_generation != 0 || o->ed25519 != NULL))
    return kiln_fail(error, KILN_CONTRACT,
                     "expect, public_key, minimum_generation or ed25519 belong to a root that was not given; set those of roots.");
  kiln_code code = o->root != NULL ? add_root(library, &first, &holds, error) : KILN_OK;
  for (size_t i = 0; i < o->root_count && code == KILN_OK; i++) code = add_root(library, &o->roots[i], &holds, error);
  if (code != KILN_OK || library->pack_count > 0) return code;
  return kiln_fail(error, KILN_TARGET, "the tree has nothing that %s may run; it holds %s. Build that device's target.",
                   library->label, text[0] ? text : "no target at all");
}

/* ---- the device ---- */

static kiln_code open_cpu(kiln_library *library, kiln_error *error) {
  const char *target = kiln_cpu_target();
  if (target == NULL) return kiln_fail(error, KILN_TARGET, "this CPU is neither x86_64 nor aarch64; run on one of these.");
  library->kind = DEVICE_CPU;
  library->device = (kiln_device){KILN_CPU, 0, 0, library->threads, 1};
  sink s = {library->label, sizeof library->label, 0};
  kiln_put(&s, "this CPU (%s)", target);
  library->pool = kiln_pool_new(library->threads);
  if (library->pool == NULL) return no_memory(error);
  return kiln_cpu_features(library->arena, &library->features, error);
}

static kiln_code open_pretended(kiln_library *library, const char *target, kiln_error *error) {
  library->kind = DEVICE_PRETEND;
  library->pretended = kiln_arena_text(library->arena, target, strlen(target));
  library->device.ordinal = strncmp(target, "cpu-", 4) == 0 ? KILN_CPU : 0;
  sink s = {library->label, sizeof library->label, 0};
  kiln_put(&s, "a pretended %s", target);
  return library->pretended != NULL ? KILN_OK : no_memory(error);
}

/* "cuda" or "cuda:N": the ordinal, or -1. */
static int32_t cuda_ordinal(const char *device) {
  if (strcmp(device, "cuda") == 0) return 0;
  if (strncmp(device, "cuda:", 5) != 0 || device[5] == 0) return -1;
  int32_t ordinal = 0;
  for (const char *c = device + 5; *c; c++) {
    if (*c < '0' || *c > '9') return -1;
    ordinal = ordinal > INT32_MAX / 10 - 1 ? ordinal : 10 * ordinal + (*c - '0');
  }
  return ordinal;
}

static kiln_code open_device(kiln_library *library, const kiln_options *o, kiln_error *error) {
  const char *device = o->device != NULL ? o->device : "cpu";
  int32_t ordinal = cuda_ordinal(device);
  if (strcmp(device, "cpu") == 0) return open_cpu(library, error);
  if (strncmp(device, "sm_", 3) == 0 || strncmp(device, "cpu-", 4) == 0) return open_pretended(library, device, error);
  if (ordinal < 0)
    return kiln_fail(error, KILN_CONTRACT, "found device='%.200s', expected cpu, cuda, cuda:N or a target name such as sm_90a.",
                     device);
  library->kind = DEVICE_CUDA;
  return kiln_cuda_open(library, ordinal, o->driver_path, error);
}

/* ---- the whole ---- */

/* A page that the kernel empties in a forked child; where it cannot, process ids are compared. */
static void watch_forks(kiln_library *library) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  library->process = (int64_t)getpid();
#ifdef MADV_WIPEONFORK
  unsigned char *alive = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (alive == MAP_FAILED) return;
  if (madvise(alive, page, MADV_WIPEONFORK) != 0) {
    munmap(alive, page);
    return;
  }
  *alive = 1;
  library->alive = alive;
#endif
}

static kiln_code new_library(const kiln_options *o, kiln_library **out, kiln_error *error) {
  if (o->threads < 0) return kiln_fail(error, KILN_CONTRACT, "found threads=%d, expected 1 or more, or 0 for all.", o->threads);
  kiln_library *library = calloc(1, sizeof *library);
  if (library == NULL) return no_memory(error);
  if (pthread_mutex_init(&library->lock, NULL) != 0) {
    free(library);
    return no_memory(error);
  }
  library->threads = o->threads ? o->threads : kiln_cpu_count();
  library->poison = o->poison_scratch != 0;
  library->per_call = o->scratch_per_call != 0;
  atomic_store(&library->references, 1);
  watch_forks(library);
  library->arena = kiln_arena_new();
  *out = library;
  return library->arena != NULL ? KILN_OK : no_memory(error);
}

static kiln_code disable_list(kiln_library *library, const char *list, kiln_error *error) {
  while (list != NULL && *list) {
    size_t length = strcspn(list, ",");
    const char *start = list, *end = list + length;
    while (start < end && (*start == ' ' || *start == '\t')) start++;
    while (end > start && (end[-1] == ' ' || end[-1] == '\t')) end--;
    kiln_code code = end > start ? kiln_add_disabled(library, start, (size_t)(end - start), true, error) : KILN_OK;
    if (code != KILN_OK) return code;
    list += length + (list[length] == ',');
  }
  return KILN_OK;
}

kiln_code kiln_open(const kiln_options *options, kiln_library **out, kiln_error *error) {
  kiln_library *library = NULL;
  if (out == NULL || options == NULL)
    return kiln_fail(error, KILN_CONTRACT, "found no options or no place for the library; pass both.");
  *out = NULL;
  kiln_code code = new_library(options, &library, error);
  if (code == KILN_OK) code = open_device(library, options, error);
  if (code == KILN_OK) code = add_roots(library, options, error);
  if (code == KILN_OK) code = kiln_make_ops(library, error);
  if (code == KILN_OK) code = disable_list(library, options->disable != NULL ? options->disable : getenv("KILN_DISABLE"), error);
  context *cpu;
  if (code == KILN_OK && library->kind == DEVICE_CPU) code = kiln_new_context(library, NULL, true, &cpu, error);
  if (code != KILN_OK) kiln_close(library);
  else *out = library;
  return code;
}

kiln_code kiln_verify(const kiln_root *root, kiln_fault_fn *seen, void *user, uint32_t *faults, kiln_error *error) {
  kiln_tree *tree;
  uint32_t count = 0;
  if (root == NULL) return kiln_fail(error, KILN_CONTRACT, "found no root, expected a tree to verify.");
  kiln_arena *arena = kiln_arena_new();
  if (arena == NULL) return no_memory(error);
  kiln_code code = open_tree(root, &tree, error);
  if (code == KILN_OK) {
    tree_index index;
    /* What the tree must be is told first; a tree that is another one is no fault to list. */
    bool pinned = root->expect != NULL || root->public_key != NULL || root->minimum_generation != 0;
    if (pinned) code = read_index(arena, tree, root, &index, error);
    if (code == KILN_OK) code = kiln_tree_verify(tree, root->expect, seen, user, &count, error);
    kiln_tree_close(tree);
  }
  kiln_arena_free(arena);
  if (faults != NULL) *faults = count;
  return code;
}
