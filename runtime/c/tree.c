/* Reading a tree without trusting it: no link is followed, nothing but a regular file is opened, bytes are read once; what is
 * returned is what was hashed. Every path starts at the root's descriptor, so that a later rename cannot redirect it. */
#define _POSIX_C_SOURCE 200809L
#include "tree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* cuModuleLoadData takes no length: bytes end with zeros that belong to the buffer. */
enum { TAIL = 64, STEP = 1 << 20, NO_FOLDER = -1 };

struct kiln_tree {
  int root;          /* NO_FOLDER for an archive */
  kiln_arena *arena; /* label, entries */
  const char *label;
  archive archive;
};

static const char *reason(int number, char text[128]) {
  static const struct { int number; const char *words;
  } known[] = {
      {ENOENT, "missing"},        {EACCES, "not readable by this user"}, {ENOTDIR, "no folder"}, {EISDIR, "a folder"},
      {ELOOP, "a symbolic link"},
  };
  for (size_t i = 0; i < sizeof known / sizeof *known; ++i) {
    if (known[i].number == number) return known[i].words;
  }
  if (strerror_r(number, text, 128) != 0) snprintf(text, 128, "error %d", number);
  return text;
}

/* ---- opening ---- */
static kiln_tree *new_tree(const char *label) {
  kiln_arena *arena = kiln_arena_new();
  kiln_tree *tree = arena == NULL ? NULL : kiln_arena_get(arena, 1, sizeof *tree);
  if (tree != NULL) {
    tree->root = NO_FOLDER;
    tree->arena = arena;
    tree->label = kiln_arena_text(arena, label, strlen(label));
  }
  if (tree != NULL && tree->label != NULL) return tree;
  kiln_arena_free(arena);
  return NULL;
}

kiln_code kiln_tree_open(const char *path, kiln_tree **out, kiln_error *error) {
  char text[128];
  *out = NULL;
  kiln_tree *tree = new_tree(path);
  if (tree == NULL) return kiln_no_memory(error);
  tree->root = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (tree->root >= 0) {
    *out = tree;
    return KILN_OK;
  }
  int number = errno;
  kiln_tree_close(tree);
  return kiln_fail(error, number == ENOMEM ? KILN_MEMORY : KILN_UNAVAILABLE,
                   "'%s': %s; expected the folder of a built tree. Run kiln build, or pass its path.", path, reason(number, text));
}

kiln_code kiln_tree_embedded(const void *data, size_t bytes, kiln_tree **out, kiln_error *error) {
  *out = NULL;
  kiln_tree *tree = new_tree("the embedded tree");
  if (tree == NULL) return kiln_no_memory(error);
  kiln_code code = kiln_archive_read(tree->arena, data, bytes, &tree->archive, error);
  if (code == KILN_OK) *out = tree;
  else kiln_tree_close(tree);
  return code;
}

const char *kiln_tree_label(const kiln_tree *tree) { return tree->label; }

void kiln_tree_close(kiln_tree *tree) {
  if (tree == NULL) return;
  if (tree->root >= 0) close(tree->root);
  kiln_arena_free(tree->arena); /* the tree itself is in it */
}

/* ---- places ---- */
typedef struct { kiln_tree *tree; const char *folder, *name; kiln_error *error; } place; /* folder: NULL for the root */

static bool is_plain(const char *name) {
  return name[0] != 0 && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && strchr(name, '/') == NULL;
}

static kiln_code refuse(const place *at, const char *why, const char *expected) {
  return kiln_fail(at->error, KILN_INTEGRITY, "%s/%s%s%s: %s; expected %s. Rebuild the tree.", at->tree->label,
                   at->folder == NULL ? "" : at->folder, at->folder == NULL ? "" : "/", at->name, why, expected);
}

/* A descriptor of a folder of the root, or a copy of the root's own. */
static kiln_code open_folder(kiln_tree *tree, const char *folder, int *fd, kiln_error *error) {
  char text[128];
  const place at = {tree, NULL, folder == NULL ? "." : folder, error};
  if (folder != NULL && !is_plain(folder)) return refuse(&at, "no plain name", "a folder of the tree");
  *fd = openat(tree->root, at.name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | (folder == NULL ? 0 : O_NOFOLLOW));
  return *fd >= 0 ? KILN_OK : refuse(&at, reason(errno, text), "a folder that is no link");
}

kiln_code kiln_tree_has_folder(kiln_tree *tree, const char *folder, kiln_error *error) {
  if (tree->root >= 0) {
    int fd = NO_FOLDER;
    kiln_code code = open_folder(tree, folder, &fd, error);
    if (code == KILN_OK) close(fd);
    return code;
  }
  size_t length = strlen(folder);
  for (uint32_t i = 0; i < tree->archive.count; ++i) {
    const archive_entry *e = &tree->archive.entries[i];
    if (strncmp(e->path, folder, length) == 0 && (e->path[length] == '/' || (e->path[length] == 0 && e->folder))) return KILN_OK;
  }
  return refuse(&(place){tree, NULL, folder, error}, "missing", "a folder that is no link");
}

/* ---- reading ---- */
typedef struct { uint8_t *data; size_t used, room; } buffer;

/* Room for `room` bytes and the tail. */
static bool grow(buffer *b, size_t room) {
  uint8_t *more = room > SIZE_MAX - TAIL ? NULL : realloc(b->data, room + TAIL);
  if (more == NULL) return false;
  b->data = more, b->room = room;
  return true;
}

static kiln_code too_big(const place *at, uint64_t found, size_t most) {
  char why[64], expected[64];
  snprintf(why, sizeof why, "found %" PRIu64 " bytes", found);
  snprintf(expected, sizeof expected, "at most %zu", most);
  return refuse(at, why, expected);
}

/* Everything behind a descriptor: one byte more than allowed is asked for, to see that there is none. */
static kiln_code read_all(const place *at, int fd, size_t most, buffer *b) {
  char text[128];
  struct stat status;
  if (fstat(fd, &status) != 0) return refuse(at, reason(errno, text), "a regular file");
  if (!S_ISREG(status.st_mode)) return refuse(at, "not a regular file", "one");
  if ((uint64_t)status.st_size > most) return too_big(at, (uint64_t)status.st_size, most);
  if (!grow(b, (size_t)status.st_size + 1)) return kiln_no_memory(at->error);
  for (;;) {
    size_t wanted = b->room - b->used < STEP ? b->room - b->used : STEP;
    ssize_t got = read(fd, b->data + b->used, wanted);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return refuse(at, reason(errno, text), "a file that can be read");
    if (got == 0) break;
    b->used += (size_t)got;
    if (b->used > most) return too_big(at, b->used, most);
    size_t next = b->room < most / 2 ? 2 * b->room : most + 1;
    if (b->used == b->room && !grow(b, next)) return kiln_no_memory(at->error);
  }
  memset(b->data + b->used, 0, TAIL);
  return KILN_OK;
}

static kiln_code read_file(const place *at, size_t most, buffer *b) {
  char text[128];
  int folder = NO_FOLDER;
  kiln_code code = open_folder(at->tree, at->folder, &folder, at->error);
  if (code != KILN_OK) return code;
  int fd = openat(folder, at->name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
  int number = errno;
  close(folder);
  if (fd < 0) return refuse(at, reason(number, text), "a regular file");
  code = read_all(at, fd, most, b);
  close(fd);
  return code;
}

static kiln_code read_entry(const place *at, size_t most, buffer *b) {
  char path[1024];
  int length = snprintf(path, sizeof path, "%s%s%s", at->folder == NULL ? "" : at->folder, at->folder == NULL ? "" : "/", at->name);
  const archive_entry *found = length < (int)sizeof path ? kiln_archive_find(&at->tree->archive, path) : NULL;
  if (found == NULL) return refuse(at, "missing", "a regular file");
  if (found->folder) return refuse(at, "a folder", "a regular file");
  if (found->bytes > most) return too_big(at, found->bytes, most);
  if (!grow(b, found->bytes)) return kiln_no_memory(at->error);
  if (found->bytes != 0) memcpy(b->data, found->data, found->bytes);
  memset(b->data + found->bytes, 0, TAIL);
  b->used = found->bytes;
  return KILN_OK;
}

kiln_code kiln_tree_read(kiln_tree *tree, const char *target, const char *name, size_t most, const uint8_t **data, size_t *bytes,
                         kiln_error *error) {
  const place at = {tree, target, name, error};
  buffer b = {0};
  *data = NULL, *bytes = 0;
  if (!is_plain(name)) return refuse(&at, "no plain name", "a file of the tree");
  kiln_code code = tree->root >= 0 ? read_file(&at, most, &b) : read_entry(&at, most, &b);
  if (code != KILN_OK) {
    free(b.data);
    return code;
  }
  *data = b.data, *bytes = b.used;
  return KILN_OK;
}

kiln_code kiln_tree_read_exact(kiln_tree *tree, const char *target, const char *name, size_t size, const uint8_t sha256[32],
                               const uint8_t **data, kiln_error *error) {
  const place at = {tree, target, name, error};
  uint8_t digest[32];
  char why[128], found[65], expected[96], wanted[65];
  size_t bytes;
  kiln_code code = kiln_tree_read(tree, target, name, size, data, &bytes, error);
  if (code != KILN_OK) return code;
  kiln_sha256(*data, bytes, digest);
  if (bytes == size && memcmp(digest, sha256, sizeof digest) == 0) return KILN_OK;
  kiln_tree_release(tree, *data);
  *data = NULL;
  if (bytes != size) {
    snprintf(why, sizeof why, "found %zu bytes", bytes);
    snprintf(expected, sizeof expected, "%zu", size);
    return refuse(&at, why, expected);
  }
  kiln_hex(digest, sizeof digest, found);
  kiln_hex(sha256, sizeof digest, wanted);
  snprintf(why, sizeof why, "found sha256 %s", found);
  return refuse(&at, why, wanted);
}

void kiln_tree_release(kiln_tree *tree, const uint8_t *data) {
  (void)tree;
  free((void *)(uintptr_t)data);
}

/* ---- listings ---- */
static kiln_code list_folder(int fd, const char *label, entry_seen *seen, void *user, kiln_error *error) {
  char text[128];
  kiln_code code = KILN_OK;
  DIR *entries = fdopendir(fd);
  if (entries == NULL) {
    int number = errno;
    close(fd);
    return kiln_fail(error, KILN_UNAVAILABLE, "'%s': %s; expected a folder that can be listed.", label, reason(number, text));
  }
  for (struct dirent *e; code == KILN_OK && (errno = 0, e = readdir(entries)) != NULL;) {
    struct stat status;
    if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
    if (fstatat(fd, e->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) continue; /* gone since */
      break;
    }
    entry_kind kind = S_ISREG(status.st_mode) ? ENTRY_FILE : S_ISDIR(status.st_mode) ? ENTRY_FOLDER : ENTRY_OTHER;
    code = seen(user, e->d_name, kind, (uint64_t)status.st_size);
  }
  if (code == KILN_OK && errno != 0)
    code = kiln_fail(error, KILN_UNAVAILABLE, "'%s': %s; expected a folder that can be listed.", label, reason(errno, text));
  closedir(entries);
  return code;
}

/* A folder that has no entry of its own is seen at the first of its files: they stand together. */
static bool is_first_of_folder(const archive *a, uint32_t i, size_t length) {
  if (kiln_archive_folder(a, &a->entries[i]) != NULL) return false;
  return i == 0 || strncmp(a->entries[i - 1].path, a->entries[i].path, length + 1) != 0;
}

static kiln_code list_archive(const archive *a, const char *folder, entry_seen *seen, void *user) {
  kiln_code code = KILN_OK;
  for (uint32_t i = 0; code == KILN_OK && i < a->count; ++i) {
    const archive_entry *e = &a->entries[i];
    const char *slash = strchr(e->path, '/');
    size_t length = slash == NULL ? 0 : (size_t)(slash - e->path);
    entry_kind kind = e->folder ? ENTRY_FOLDER : ENTRY_FILE;
    if (folder != NULL) {
      bool inside = slash != NULL && strlen(folder) == length && memcmp(e->path, folder, length) == 0;
      if (inside) code = seen(user, slash + 1, kind, e->bytes);
    } else if (slash == NULL) {
      code = seen(user, e->path, kind, e->bytes);
    } else if (is_first_of_folder(a, i, length)) {
      char name[1024] = "";
      memcpy(name, e->path, length);
      code = seen(user, name, ENTRY_FOLDER, 0);
    }
  }
  return code;
}

kiln_code kiln_tree_list(kiln_tree *tree, const char *folder, entry_seen *seen, void *user, kiln_error *error) {
  if (tree->root < 0) return list_archive(&tree->archive, folder, seen, user);
  int fd = NO_FOLDER;
  kiln_code code = open_folder(tree, folder, &fd, error);
  return code != KILN_OK ? code : list_folder(fd, folder == NULL ? tree->label : folder, seen, user, error);
}
