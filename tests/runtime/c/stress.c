/* Eight threads on one library of the CPU: runs, bound calls, explanations, providers and names to disable come and go at once; every
 * result must be the one that a single thread gets. Then the same on a library that was sealed before it met any shape. Built with a
 * sanitizer by the tests; arguments: tree, rounds. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kiln.h"

enum { THREADS = 8, MOST_ROWS = 40, WIDTH = 96 };

static kiln_library *library;
static int rounds, sealed;
static uint16_t input[MOST_ROWS * WIDTH], weight[WIDTH], expected[MOST_ROWS * WIDTH]; /* bf16 */

static void fail(const char *what, const kiln_error *error) {
  fprintf(stderr, "%s: %s\n", what, error->message);
  exit(1);
}

static kiln_code declines(void *user, const kiln_op *op, const kiln_argument *arguments, size_t count, kiln_stream stream, kiln_error *error) {
  (void)user, (void)op, (void)arguments, (void)count, (void)stream, (void)error;
  return KILN_DECLINED;
}

static void norm(int64_t rows, uint16_t *residual, uint16_t *out, int bound) {
  kiln_error error = {0};
  kiln_tensor x = kiln_dense(input, KILN_BF16, KILN_CPU, 2, (int64_t[]){rows, WIDTH});
  kiln_tensor w = kiln_dense(weight, KILN_BF16, KILN_CPU, 1, (int64_t[]){WIDTH});
  kiln_tensor r = kiln_dense(residual, KILN_BF16, KILN_CPU, 2, (int64_t[]){rows, WIDTH});
  kiln_tensor y = kiln_dense(out, KILN_BF16, KILN_CPU, 2, (int64_t[]){rows, WIDTH});
  kiln_argument arguments[] = {KILN_TENSOR("x", &x), KILN_TENSOR("weight", &w), KILN_TENSOR("residual", &r), KILN_NUMBER("eps", 1e-6),
                               KILN_TENSOR("out", &y)};
  const kiln_op *op = kiln_find(library, "fused_add_rms_norm", &error);
  kiln_choice composite = {.tier = "composite"};
  kiln_call *call;
  if (op == NULL) fail("find", &error);
  if (!bound) {
    if (kiln_run(op, arguments, 5, rows % 3 ? NULL : &composite, NULL, &error) != KILN_OK) fail("run", &error);
    return;
  }
  if (kiln_bind(op, arguments, 5, NULL, &call, &error) != KILN_OK) fail("bind", &error);
  if (kiln_launch(call, NULL, &error) != KILN_OK) fail("launch", &error);
  kiln_call_free(call);
}

static void seen(void *user, const char *op, const char *name, uint64_t runs, uint64_t declined) {
  (void)op, (void)name;
  *(uint64_t *)user += runs + declined;
}

static void meddle(int thread, int round) {
  kiln_error error = {0};
  char name[32], text[4096];
  uint64_t count = 0;
  kiln_provider provider = {.name = name, .priority = 1 + thread, .run = declines};
  snprintf(name, sizeof name, "p%d.%d", thread, round);
  if (round % 16 == 0 && kiln_register_provider(library, "fused_add_rms_norm", &provider, &error) != KILN_OK) fail("register", &error);
  if (round % 8 == 1 && kiln_disable(library, name, round % 16 == 1, &error) != KILN_OK) fail("disable", &error);
  if (round % 8 == 2) kiln_stats(library, seen, &count);
  if (round % 8 == 3 && kiln_explain(kiln_find(library, "rms_norm", &error), NULL, 0, NULL, text, sizeof text, NULL, &error) == KILN_OK)
    fail("explain took a call without operands", &error);
  if (round % 8 == 4 && thread == 0 && kiln_prepare(library, (const char *[]){"layer_norm"}, 1, NULL, &error) != KILN_OK)
    fail("prepare", &error);
}

static void *thread(void *argument) {
  int me = (int)(long)argument;
  uint16_t *residual = malloc(sizeof input), *out = malloc(sizeof input);
  for (int i = 0; i < rounds; i++) {
    int64_t rows = 1 + (me * 7 + i) % MOST_ROWS;
    memset(residual, 0, sizeof input);
    memset(out, 0xff, sizeof input);
    norm(rows, residual, out, i % 2);
    if (memcmp(out, expected, (size_t)rows * WIDTH * sizeof *out) != 0) {
      fprintf(stderr, "thread %d, round %d: other bits\n", me, i);
      exit(1);
    }
    if (!sealed) meddle(me, i);
  }
  free(residual);
  free(out);
  return NULL;
}

static void open_tree(const char *tree) {
  kiln_error error = {0};
  if (kiln_open(&(kiln_options){.root = tree, .threads = 4, .disable = ""}, &library, &error) != KILN_OK) fail("open", &error);
}

static int run_threads(void) {
  pthread_t threads[THREADS];
  for (long i = 0; i < THREADS; i++)
    if (pthread_create(&threads[i], NULL, thread, (void *)i) != 0) return 3;
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  return 0;
}

static void seal(void) {
  kiln_error error = {0};
  if (kiln_prepare(library, NULL, 0, NULL, &error) != KILN_OK) fail("prepare", &error);
  for (int i = 0; i < THREADS; i++)
    if (kiln_set_scratch(library, NULL, NULL, 1 << 20, &error) != KILN_OK) fail("set_scratch", &error);
  kiln_seal(library);
  sealed = 1;
}

int main(int count, char **arguments) {
  static uint16_t residual[MOST_ROWS * WIDTH];
  if (count != 3) return 2;
  rounds = atoi(arguments[2]);
  for (int i = 0; i < MOST_ROWS * WIDTH; i++) input[i] = (uint16_t)(0x3f00 + i * 7919 % 509 + i % 2 * 0x8000);
  for (int i = 0; i < WIDTH; i++) weight[i] = (uint16_t)(0x3e80 + i);
  open_tree(arguments[1]);
  norm(MOST_ROWS, residual, expected, 0);
  if (run_threads() != 0) return 3;
  kiln_seal(library);
  norm(MOST_ROWS - 1, memset(residual, 0, sizeof residual), expected, 1);
  kiln_close(library);
  open_tree(arguments[1]);
  seal();
  if (run_threads() != 0) return 3;
  kiln_close(library);
  puts("fine");
  return 0;
}
