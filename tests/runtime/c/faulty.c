/* Allocations and system calls that fail when they are told to; what is allocated and not given back is counted. */
#include "faulty.h"

#include <errno.h>

/* Here the real ones are called. */
#undef malloc
#undef calloc
#undef realloc
#undef free
#undef open
#undef openat
#undef read
#undef fstat
#undef fstatat
#undef fdopendir

int test_fail_alloc = -1, test_fail_call = -1; /* how many succeed before one fails; -1: none */
int test_fail_errno = EIO;
long test_live; /* allocations that were not given back */

static int is_turn(int *left) {
  if (*left < 0) return 0;
  return (*left)-- == 0;
}

static void *count(void *made) {
  test_live += made != NULL;
  return made;
}

void *test_malloc(size_t bytes) { return is_turn(&test_fail_alloc) ? NULL : count(malloc(bytes)); }
void *test_calloc(size_t n, size_t bytes) { return is_turn(&test_fail_alloc) ? NULL : count(calloc(n, bytes)); }

void *test_realloc(void *old, size_t bytes) {
  if (is_turn(&test_fail_alloc)) return NULL;
  void *made = realloc(old, bytes);
  test_live += old == NULL && made != NULL;
  return made;
}

void test_release(void *old) {
  test_live -= old != NULL;
  free(old);
}

static int fails(void) {
  if (!is_turn(&test_fail_call)) return 0;
  errno = test_fail_errno;
  return 1;
}

int test_open(const char *path, int flags) { return fails() ? -1 : open(path, flags); }
int test_openat(int folder, const char *path, int flags) { return fails() ? -1 : openat(folder, path, flags); }
ssize_t test_read(int fd, void *data, size_t bytes) { return fails() ? -1 : read(fd, data, bytes); }
int test_fstat(int fd, struct stat *out) { return fails() ? -1 : fstat(fd, out); }
int test_fstatat(int fd, const char *path, struct stat *out, int flags) { return fails() ? -1 : fstatat(fd, path, out, flags); }
DIR *test_fdopendir(int fd) { return fails() ? NULL : fdopendir(fd); }
