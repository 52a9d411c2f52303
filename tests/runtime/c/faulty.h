/* Put in front of every file of the core (-include): its allocations, opens and reads go through faulty.c, where one in turn fails.
 */
#ifndef FAULTY_H
#define FAULTY_H

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

void *test_malloc(size_t bytes);
void *test_calloc(size_t count, size_t bytes);
void *test_realloc(void *old, size_t bytes);
void test_release(void *old);
int test_open(const char *path, int flags);
int test_openat(int folder, const char *path, int flags);
ssize_t test_read(int fd, void *data, size_t bytes);
int test_fstat(int fd, struct stat *out);
int test_fstatat(int fd, const char *path, struct stat *out, int flags);
DIR *test_fdopendir(int fd);

#define malloc test_malloc
#define calloc test_calloc
#define realloc test_realloc
#define free test_release
#define open(path, flags) test_open(path, flags)
#define openat(folder, path, flags) test_openat(folder, path, flags)
#define read test_read
#define fstat(fd, out) test_fstat(fd, out)
#define fstatat test_fstatat
#define fdopendir test_fdopendir

#endif
