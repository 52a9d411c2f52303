/* Running kernels on this CPU: shared objects from verified memory. */
#define _GNU_SOURCE
#include "run.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MFD_EXEC
#define MFD_EXEC 0x10U
#endif

static kiln_code open_object(const char *path, const char *name, void **handle, kiln_error *error) {
  *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (*handle != NULL) return KILN_OK;
  const char *why = dlerror();
  return kiln_fail(error, KILN_INTEGRITY, "%s: the dynamic linker refused it (%s); rebuild the tree.", name,
                   why != NULL ? why : "");
}

static bool write_all(int fd, const uint8_t *data, size_t bytes) {
  while (bytes > 0) {
    ssize_t written = write(fd, data, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    data += written;
    bytes -= (size_t)written;
  }
  return true;
}

/* The dynamic linker takes an object loaded before under the same path text for this one, and descriptors are reused: the number
 * of the file's inode, which lives as long as the object is mapped, is spelled in components that mean nothing. */
static bool unique_path(int fd, char *path, size_t size) {
  struct stat status;
  if (fstat(fd, &status) != 0) return false;
  sink s = {path, size, 0};
  kiln_put(&s, "/proc/./self/fd/");
  for (uint64_t bits = status.st_ino; bits != 0; bits >>= 1) kiln_put(&s, bits & 1 ? "./" : "/");
  kiln_put(&s, "%d", fd);
  return s.used < size;
}

static int memory_file(const char *name) {
  char label[200];
  snprintf(label, sizeof label, "%s", name);
  int fd = memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_EXEC);
  /* Kernels before 6.3 do not know the flag; later ones may be configured to need it. */
  return fd >= 0 ? fd : memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

/* KILN_DECLINED: this system has no memory files. */
static kiln_code load_from_memory(const uint8_t *data, size_t bytes, const char *name, void **handle, kiln_error *error) {
  char path[256];
  int fd = memory_file(name);
  if (fd < 0) return KILN_DECLINED;
  kiln_code code = KILN_DECLINED;
  if (write_all(fd, data, bytes) && fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) == 0 &&
      unique_path(fd, path, sizeof path))
    code = open_object(path, name, handle, error);
  close(fd);
  return code;
}

static kiln_code no_place(const char *name, kiln_error *error) {
  return kiln_fail(error, KILN_UNAVAILABLE,
                   "%s: this system has no memory files and no writable temporary folder; provide one of them.", name);
}

static kiln_code load_from_folder(const uint8_t *data, size_t bytes, const char *name, void **handle, kiln_error *error) {
  char folder[512], path[1024];
  const char *base = getenv("TMPDIR");
  snprintf(folder, sizeof folder, "%s/kiln-XXXXXX", base != NULL && base[0] ? base : "/tmp");
  if (mkdtemp(folder) == NULL) return no_place(name, error);
  snprintf(path, sizeof path, "%s/%s", folder, name);
  kiln_code code = KILN_OK;
  int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0 || !write_all(fd, data, bytes)) code = no_place(name, error);
  if (fd >= 0 && close(fd) != 0 && code == KILN_OK) code = no_place(name, error);
  if (code == KILN_OK) code = open_object(path, name, handle, error);
  if (fd >= 0) unlink(path);
  rmdir(folder);
  return code;
}

/* An object may bring a check of its arithmetic. */
static kiln_code checked(void *handle, const char *name, kiln_error *error) {
  int64_t (*check)(void);
  void *found = dlsym(handle, "kiln_check");
  if (found == NULL) return KILN_OK;
  memcpy(&check, &found, sizeof check);
  int64_t code = check();
  if (code == 0) return KILN_OK;
  return kiln_fail(error, KILN_INTEGRITY,
                   "%s: its arithmetic is not what it was built for (check %lld fails); rebuild the tree, or run on another CPU.",
                   name, (long long)code);
}

kiln_code kiln_load_object(const uint8_t *data, size_t bytes, const char *name, void **handle, kiln_error *error) {
  kiln_code code = load_from_memory(data, bytes, name, handle, error);
  if (code == KILN_DECLINED) code = load_from_folder(data, bytes, name, handle, error);
  if (code != KILN_OK) return code;
  code = checked(*handle, name, error);
  if (code != KILN_OK) dlclose(*handle); /* nobody else knows of it */
  return code;
}

kiln_code kiln_object_entry(void *handle, const manifest_kernel *k, void **function, kiln_error *error) {
  *function = dlsym(handle, k->entry);
  if (*function != NULL) return KILN_OK;
  return kiln_fail(error, KILN_INTEGRITY, "%s has no entry %s; rebuild the tree.", k->file, k->entry);
}

kiln_code kiln_cpu_launch(kiln_library *library, const prepared *p, kiln_error *error) {
  const launch *l = p->launch;
  cpu_entry *entry;
  memcpy(&entry, &p->function, sizeof entry);
  if (l->grid[0] == 0) return KILN_OK;
  int64_t code = kiln_pool_run(library->pool, entry, p->slots, l->ints, l->floats, l->grid[0], l->chunks);
  if (code == 0) return KILN_OK;
  const char *op = l->candidate->op->sig->name;
  if (code < 0)
    return kiln_fail(error, KILN_INTERNAL, "%s.%s: its entry returned %lld; expected 0 or a row. Rebuild the tree.", op,
                     l->candidate->variant, (long long)code);
  return kiln_fail(error, KILN_CONTRACT,
                   "%s: row %lld holds an index that is out of range; pass indices inside the array they select from.", op,
                   (long long)(code - 1));
}
