/* Linked in front of what libkiln asks of the system: counts what is alive, and fails the n-th request. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/types.h>

#define API __attribute__((visibility("default")))

static _Atomic long requests, fail_at = -1, live;
static int fail_errno;

API void fault_at(long nth, int error_number) {
  requests = 0;
  fail_errno = error_number;
  fail_at = nth;
}
API long fault_requests(void) { return requests; }
API long fault_live(void) { return live; }

static bool fails(void) {
  if (requests++ != fail_at) return false;
  errno = fail_errno;
  return true;
}

static void *counted(void *p) {
  live += p != NULL;
  return p;
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
int __real_posix_memalign(void **out, size_t alignment, size_t size);
void __real_free(void *p);
ssize_t __real_read(int fd, void *buffer, size_t size);
ssize_t __real_write(int fd, const void *buffer, size_t size);
int __real_openat(int folder, const char *path, int flags, ...);
int __real_open(const char *path, int flags, ...);
int __real_memfd_create(const char *name, unsigned int flags);
void *__real_dlopen(const char *path, int mode);

void *__wrap_malloc(size_t size) { return fails() ? NULL : counted(__real_malloc(size)); }
void *__wrap_calloc(size_t count, size_t size) { return fails() ? NULL : counted(__real_calloc(count, size)); }
void *__wrap_realloc(void *old, size_t size) {
  if (fails()) return NULL;
  void *p = __real_realloc(old, size);
  live += p != NULL && old == NULL;
  return p;
}
int __wrap_posix_memalign(void **out, size_t alignment, size_t size) {
  if (fails()) return ENOMEM;
  int code = __real_posix_memalign(out, alignment, size);
  live += code == 0;
  return code;
}
void __wrap_free(void *p) {
  live -= p != NULL;
  __real_free(p);
}
ssize_t __wrap_read(int fd, void *buffer, size_t size) { return fails() ? -1 : __real_read(fd, buffer, size); }
ssize_t __wrap_write(int fd, const void *buffer, size_t size) { return fails() ? -1 : __real_write(fd, buffer, size); }
int __wrap_openat(int folder, const char *path, int flags, ...) { return fails() ? -1 : __real_openat(folder, path, flags); }
int __wrap_open(const char *path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  int mode = va_arg(list, int);
  va_end(list);
  return fails() ? -1 : __real_open(path, flags, mode);
}
int __wrap_memfd_create(const char *name, unsigned int flags) { return fails() ? -1 : __real_memfd_create(name, flags); }
void *__wrap_dlopen(const char *path, int mode) { return fails() ? NULL : __real_dlopen(path, mode); }
