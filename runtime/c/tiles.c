/* Linux's permission to use the tiles of AMX. Their state is large, so that Linux (5.16 and later) has each process ask before an
 * instruction may touch it; without, the first one ends the process with SIGILL. Threads and forked children inherit what was granted. It
 * cannot be given back, and raises the least size of signal stacks: a library asks when a call, or preparing, first comes to a kernel that
 * needs them. Asking again costs a system call and changes nothing. */
#define _DEFAULT_SOURCE
#define _POSIX_C_SOURCE 200809L
#include "run.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* 0, or the number of the error. */
static int ask(void) {
#if defined(__x86_64__)
  enum { REQ_XCOMP_PERM = 0x1023, XTILE_DATA = 18 };
  return syscall(SYS_arch_prctl, REQ_XCOMP_PERM, XTILE_DATA) == 0 ? 0 : errno;
#else
  return ENOSYS;
#endif
}

const char *kiln_refused(const candidate *c, char text[REFUSED_BYTES]) {
  if (c->refusal != NULL || !c->tiles) return c->refusal;
  int number = ask();
  if (number == 0) return NULL;
  char why[128];
  if (strerror_r(number, why, sizeof why) != 0) snprintf(why, sizeof why, "error %d", number);
  snprintf(text, REFUSED_BYTES, "Linux does not let this process use AMX tiles (arch_prctl: %s)", why);
  return text;
}
