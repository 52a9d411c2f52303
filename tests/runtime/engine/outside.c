/* libkiln from the outside, on the CPU: outside TREE THREADS. Prints how many checks held; stops at the first that does not. */
#include <kiln.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned checks;
static kiln_error error;
#define CHECK(condition) ((condition) ? (void)__atomic_add_fetch(&checks, 1, __ATOMIC_RELAXED) : failed(#condition, __LINE__))
static void failed(const char *condition, int line) {
  fprintf(stderr, "outside.c:%d: %s (last error %d: %s)\n", line, condition, (int)error.code, error.message);
  exit(1);
}

enum { MOST_ROWS = 64, N = 320 };
typedef struct {
  float x[MOST_ROWS * N], residual[MOST_ROWS * N], weight[N], out[MOST_ROWS * N];
  kiln_tensor tx, tr, tw, ty;
} fixture;

static fixture *new_fixture(int64_t rows) {
  fixture *f = aligned_alloc(256, (sizeof *f + 255) / 256 * 256); /* each array at the same alignment, so that calls may be bound anew */
  CHECK(f != NULL);
  memset(f, 0, sizeof *f);
  for (int i = 0; i < MOST_ROWS * N; i++) f->x[i] = (float)(i % 251 - 125) / 64, f->residual[i] = (float)(i % 127) / 32;
  for (int i = 0; i < N; i++) f->weight[i] = (float)(i % 7) / 8;
  const int64_t shape[] = {rows, N}, width[] = {N};
  f->tx = kiln_dense(f->x, KILN_F32, KILN_CPU, 2, shape);
  f->tr = kiln_dense(f->residual, KILN_F32, KILN_CPU, 2, shape);
  f->tw = kiln_dense(f->weight, KILN_F32, KILN_CPU, 1, width);
  f->ty = kiln_dense(f->out, KILN_F32, KILN_CPU, 2, shape);
  return f;
}

/* residual += x, out = rms_norm(residual) */
static kiln_code add_norm(const kiln_library *library, fixture *f, const char *tier, kiln_error *told) {
  const kiln_argument arguments[] = {KILN_TENSOR("x", &f->tx), KILN_TENSOR("weight", &f->tw), KILN_TENSOR("residual", &f->tr),
                                     KILN_TENSOR("out", &f->ty)};
  const kiln_choice choice = {.tier = tier};
  const kiln_op *op = kiln_find(library, "fused_add_rms_norm_std", told);
  return op == NULL ? told->code : kiln_run(op, arguments, 4, &choice, NULL, told);
}

static void refusals_of_open(const char *tree) {
  kiln_library *library = NULL;
  CHECK(kiln_open(&(kiln_options){.root = "/no/such/folder"}, &library, &error) == KILN_UNAVAILABLE && library == NULL);
  CHECK(strstr(error.message, "/no/such/folder") != NULL && error.code == KILN_UNAVAILABLE);
  CHECK(kiln_open(&(kiln_options){.root = "/no/such/folder"}, &library, NULL) == KILN_UNAVAILABLE);
  CHECK(kiln_open(&(kiln_options){.root = tree, .device = "abacus"}, &library, &error) == KILN_CONTRACT && library == NULL);
  CHECK(kiln_open(&(kiln_options){.root = tree, .minimum_generation = INT64_MAX}, &library, &error) == KILN_INTEGRITY);
  const char *other = "sha256:0000000000000000000000000000000000000000000000000000000000000000";
  CHECK(kiln_open(&(kiln_options){.root = tree, .expect = other}, &library, &error) == KILN_INTEGRITY && library == NULL);
  kiln_close(NULL);
  kiln_call_free(NULL);
}

static void ops(const kiln_library *library) {
  uint32_t count = kiln_op_count(library);
  CHECK(count > 10 && kiln_op_at(library, count) == NULL);
  for (uint32_t i = 0; i < count; i++) {
    const char *name = kiln_op_name(kiln_op_at(library, i));
    CHECK(kiln_find(library, name, &error) == kiln_op_at(library, i));
    CHECK(i == 0 || strcmp(kiln_op_name(kiln_op_at(library, i - 1)), name) < 0);
  }
  CHECK(kiln_find(library, "rms_nrom", &error) == NULL && error.code == KILN_CONTRACT && strstr(error.message, "rms_norm") != NULL);
  char text[128], cut[9];
  size_t needed = 0;
  const kiln_op *norm = kiln_find(library, "rms_norm", &error);
  CHECK(kiln_op_signature(norm, text, sizeof text, &needed, &error) == KILN_OK && needed == strlen(text) + 1);
  CHECK(strcmp(text, "rms_norm(in x, in? weight, f32 eps, out out; gemma)") == 0);
  CHECK(kiln_op_signature(norm, cut, sizeof cut, &needed, &error) == KILN_OK && strcmp(cut, "rms_norm") == 0 && needed == strlen(text) + 1);
  CHECK(kiln_op_signature(norm, NULL, 0, NULL, &error) == KILN_OK);
  CHECK(kiln_op_signature(NULL, text, sizeof text, NULL, &error) == KILN_CONTRACT);
}

static void calls(kiln_library *library) {
  fixture *f = new_fixture(16), *g = new_fixture(16);
  const kiln_op *norm = kiln_find(library, "rms_norm", &error);
  kiln_argument a[] = {KILN_TENSOR("x", &f->tx), KILN_TENSOR("weight", &f->tw), KILN_NUMBER("eps", 1e-6), KILN_TENSOR("out", &f->ty)};
  kiln_output missing[2];
  size_t found = 0;
  CHECK(kiln_outputs(norm, a, 3, missing, 2, &found, &error) == KILN_OK && found == 1 && strcmp(missing[0].name, "out") == 0);
  CHECK(missing[0].tensor.shape[0] == 16 && missing[0].tensor.shape[1] == N && missing[0].tensor.strides[0] == N);
  CHECK(kiln_run(norm, a, 3, NULL, NULL, &error) == KILN_CONTRACT && strstr(error.message, "out") != NULL);
  CHECK(kiln_run(norm, a, 4, NULL, NULL, &error) == KILN_OK && f->out[1] != 0);
  CHECK(kiln_run(norm, a, 4, NULL, NULL, NULL) == KILN_OK);
  a[2] = KILN_NUMBER("eps", -1);
  CHECK(kiln_run(norm, a, 4, NULL, NULL, &error) == KILN_CONTRACT && strstr(error.message, "eps") != NULL);
  a[2] = KILN_INTEGER("epsilon", 1);
  CHECK(kiln_run(norm, a, 4, NULL, NULL, &error) == KILN_CONTRACT && strstr(error.message, "epsilon") != NULL);
  a[2] = KILN_NUMBER("eps", 1e-6);
  CHECK(kiln_run(norm, a, 4, &(kiln_choice){.variant = "none"}, NULL, &error) == KILN_SELECTION);

  char text[4096];
  size_t needed = 0;
  CHECK(kiln_explain(norm, a, 4, NULL, text, sizeof text, &needed, &error) == KILN_OK && needed == strlen(text) + 1);
  CHECK(strstr(text, ": runs\n") != NULL && text[needed - 2] == '\n');

  kiln_call *call = NULL;
  CHECK(kiln_bind(norm, a, 4, NULL, &call, &error) == KILN_OK && kiln_call_variant(call)[0] != 0);
  memcpy(g->out, f->out, sizeof g->out);
  memset(f->out, 0xff, sizeof f->out);
  CHECK(kiln_launch(call, NULL, &error) == KILN_OK && memcmp(f->out, g->out, 16 * N * sizeof(float)) == 0);
  memset(g->out, 0xff, sizeof g->out);
  CHECK(kiln_rebind(call, (kiln_argument[]){KILN_TENSOR("out", &g->ty)}, 1, &error) == KILN_OK);
  CHECK(kiln_launch(call, NULL, &error) == KILN_OK && memcmp(f->out, g->out, 16 * N * sizeof(float)) == 0);
  g->ty.shape[0] = 8;
  CHECK(kiln_rebind(call, (kiln_argument[]){KILN_TENSOR("out", &g->ty)}, 1, &error) != KILN_OK);
  kiln_call_free(call);

  f->tx.shape[0] = f->ty.shape[0] = 0;
  CHECK(kiln_run(norm, a, 4, NULL, NULL, &error) == KILN_OK);
  free(f);
  free(g);
}

typedef struct {
  const kiln_library *library;
  int64_t rows;
  const fixture *expected;
} job;

static void *launch_often(void *user) {
  const job *j = user;
  kiln_error told = {0};
  for (int i = 0; i < 20; i++) {
    fixture *f = new_fixture(j->rows);
    kiln_code code = add_norm(j->library, f, i % 2 ? "composite" : "fused", &told);
    if (code != KILN_OK) fprintf(stderr, "%s\n", told.message);
    CHECK(code == KILN_OK && memcmp(f->out, j->expected->out, (size_t)j->rows * N * sizeof(float)) == 0);
    CHECK(memcmp(f->residual, j->expected->residual, (size_t)j->rows * N * sizeof(float)) == 0);
    free(f);
  }
  return NULL;
}

/* Threads share a library; shapes, tiers and the first use of each kernel meet. */
static void threads(const char *tree, int count) {
  kiln_library *library = NULL, *alone = NULL;
  pthread_t thread[64];
  job jobs[64];
  CHECK(count > 0 && count <= 64);
  CHECK(kiln_open(&(kiln_options){.root = tree, .threads = 1}, &alone, &error) == KILN_OK);
  CHECK(kiln_open(&(kiln_options){.root = tree, .threads = 4}, &library, &error) == KILN_OK);
  for (int i = 0; i < count; i++) {
    fixture *expected = new_fixture(8 * (1 + i % 8));
    CHECK(add_norm(alone, expected, NULL, &error) == KILN_OK);
    jobs[i] = (job){library, 8 * (1 + i % 8), expected};
  }
  for (int i = 0; i < count; i++) CHECK(pthread_create(&thread[i], NULL, launch_often, &jobs[i]) == 0);
  for (int i = 0; i < count; i++) CHECK(pthread_join(thread[i], NULL) == 0);
  for (int i = 0; i < count; i++) free((void *)jobs[i].expected);
  kiln_close(library);
  kiln_close(alone);
}

static void count_runs(void *user, const char *op, const char *name, uint64_t runs, uint64_t declined) {
  if (strcmp(op, "silu") == 0 && name[0] != 0 && declined == 0) *(uint64_t *)user += runs;
}

/* A sealed library runs what was prepared, at any shape, and refuses what was not; a closed one refuses bound calls. */
static void sealed(const char *tree) {
  kiln_library *library = NULL;
  fixture *f = new_fixture(4);
  uint32_t loaded = 0;
  uint64_t runs = 0;
  CHECK(kiln_open(&(kiln_options){.root = tree}, &library, &error) == KILN_OK);
  CHECK(kiln_prepare(library, (const char *const[]){"silu"}, 1, &loaded, &error) == KILN_OK && loaded > 0);
  kiln_seal(library);
  const kiln_argument a[] = {KILN_TENSOR("x", &f->tx), KILN_TENSOR("out", &f->ty)};
  const kiln_op *silu = kiln_find(library, "silu", &error);
  for (f->tx.shape[0] = f->ty.shape[0] = 1; f->tx.shape[0] < 5; f->ty.shape[0] = ++f->tx.shape[0])
    CHECK(kiln_run(silu, a, 2, NULL, NULL, &error) == KILN_OK);
  CHECK(kiln_run(kiln_find(library, "gelu", &error), a, 2, NULL, NULL, &error) == KILN_UNAVAILABLE);
  CHECK(strstr(error.message, "gelu") != NULL);
  kiln_stats(library, count_runs, &runs);
  CHECK(runs == 4);
  kiln_call *call = NULL;
  CHECK(kiln_bind(silu, a, 2, NULL, &call, &error) == KILN_OK);
  CHECK(kiln_launch(call, NULL, &error) == KILN_OK);
  kiln_close(library);
  CHECK(kiln_launch(call, NULL, &error) == KILN_UNAVAILABLE);
  kiln_call_free(call);
  free(f);
}

int main(int argc, char **argv) {
  if (argc != 3) return fprintf(stderr, "outside TREE THREADS\n"), 2;
  kiln_library *library = NULL;
  CHECK(strcmp(kiln_version(), KILN_VERSION) == 0);
  refusals_of_open(argv[1]);
  CHECK(kiln_open(&(kiln_options){.root = argv[1]}, &library, &error) == KILN_OK);
  ops(library);
  calls(library);
  kiln_close(library);
  sealed(argv[1]);
  threads(argv[1], atoi(argv[2]));
  printf("%u checks held\n", checks);
  return 0;
}
