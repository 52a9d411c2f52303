/* A small pool of threads: a job's rows are split into chunks, which the workers and the thread that waits take in turn. */
#define _GNU_SOURCE
#include "run.h"

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct job {
  struct job *next;
  cpu_entry *entry;
  uint64_t *slots;
  uint32_t ints, floats;
  int64_t total, chunks, taken, done;
  int64_t code;             /* the least that is not 0: the first faulty row, whatever the number of threads */
} job;

struct cpu_pool {
  pthread_mutex_t lock;
  pthread_cond_t work, done;
  job *first;               /* jobs with chunks that nobody took */
  bool stop;
  int32_t wanted, started;
  pthread_t threads[];
};

int32_t kiln_cpu_count(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  long count = sysconf(_SC_NPROCESSORS_ONLN);
  return count > 0 && count < INT32_MAX ? (int32_t)count : 1;
}

static int64_t run_chunk(const job *j, int64_t i) {
  int64_t whole = j->total / j->chunks, rest = j->total % j->chunks; /* total * i / chunks, without its overflow */
  int64_t begin = whole * i + rest * i / j->chunks, end = whole * (i + 1) + rest * (i + 1) / j->chunks;
  return j->entry((void *const *)(void *)j->slots, (const int64_t *)(void *)(j->slots + j->ints),
                  (const double *)(void *)(j->slots + j->floats), begin, end);
}

/* Takes one chunk of a job; called and returns with the lock held. */
static void take_chunk(cpu_pool *pool, job *j) {
  int64_t i = j->taken++;
  if (j->taken == j->chunks) {
    job **at = &pool->first;
    while (*at != j) at = &(*at)->next;
    *at = j->next;
  }
  pthread_mutex_unlock(&pool->lock);
  int64_t code = run_chunk(j, i);
  pthread_mutex_lock(&pool->lock);
  if (code != 0 && (j->code == 0 || code < j->code)) j->code = code;
  if (++j->done == j->chunks) pthread_cond_broadcast(&pool->done);
}

static void *worker(void *argument) {
  cpu_pool *pool = argument;
  pthread_mutex_lock(&pool->lock);
  while (!pool->stop) {
    if (pool->first != NULL) take_chunk(pool, pool->first);
    else pthread_cond_wait(&pool->work, &pool->lock);
  }
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

cpu_pool *kiln_pool_new(int32_t threads) {
  cpu_pool *pool = calloc(1, sizeof *pool + (size_t)threads * sizeof *pool->threads);
  if (pool == NULL) return NULL;
  pool->wanted = threads - 1;
  if (pthread_mutex_init(&pool->lock, NULL) != 0) goto no_lock;
  if (pthread_cond_init(&pool->work, NULL) != 0) goto no_work;
  if (pthread_cond_init(&pool->done, NULL) != 0) goto no_done;
  return pool;
no_done:
  pthread_cond_destroy(&pool->work);
no_work:
  pthread_mutex_destroy(&pool->lock);
no_lock:
  free(pool);
  return NULL;
}

/* Kernels keep blocks of their operands on the stack, up to 550 KiB; a C library may give threads less. */
enum { STACK = 2 << 20 };

/* With the lock held. Fewer threads than wanted are no error: whoever waits for a job works on it, too. */
static void start(cpu_pool *pool) {
  sigset_t all, before;
  pthread_attr_t attributes;
  if (pool->started == pool->wanted || pthread_attr_init(&attributes) != 0) return;
  pthread_attr_setstacksize(&attributes, STACK); /* left as it is where this is refused */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the caller's threads */
  while (pool->started < pool->wanted && pthread_create(&pool->threads[pool->started], &attributes, worker, pool) == 0) pool->started++;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  pool->wanted = pool->started;
}

void kiln_pool_start(cpu_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  start(pool);
  pthread_mutex_unlock(&pool->lock);
}

void kiln_pool_free(cpu_pool *pool, bool forked) {
  if (pool == NULL) return;
  if (!forked) {
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->started; i++) pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
  }
  free(pool);
}

int64_t kiln_pool_run(cpu_pool *pool, cpu_entry *entry, uint64_t *slots, uint32_t ints, uint32_t floats, int64_t total,
                      int64_t chunks) {
  job j = {NULL, entry, slots, ints, floats, total, chunks, 0, 0, 0};
  if (chunks == 1) return run_chunk(&j, 0);
  pthread_mutex_lock(&pool->lock);
  start(pool);
  job **last = &pool->first;
  while (*last != NULL) last = &(*last)->next;
  *last = &j;
  pthread_cond_broadcast(&pool->work);
  while (j.taken < j.chunks) take_chunk(pool, &j);
  while (j.done < j.chunks) pthread_cond_wait(&pool->done, &pool->lock);
  pthread_mutex_unlock(&pool->lock);
  return j.code;
}
