/* RMS norm of two rows on the CPU: quick TREE */
#include <kiln.h>
#include <stdio.h>

int main(int argc, char **argv) {
  float x[2][4] = {{1, 2, 3, 4}, {-1, 0, 0, 1}}, weight[4] = {1, 1, 1, 2}, out[2][4];
  const int64_t rows[] = {2, 4}, width[] = {4};
  kiln_tensor tx = kiln_dense(x, KILN_F32, KILN_CPU, 2, rows), tw = kiln_dense(weight, KILN_F32, KILN_CPU, 1, width);
  kiln_tensor ty = kiln_dense(out, KILN_F32, KILN_CPU, 2, rows);
  const kiln_argument arguments[] = {KILN_TENSOR("x", &tx), KILN_TENSOR("weight", &tw), KILN_NUMBER("eps", 1e-6), KILN_TENSOR("out", &ty)};

  const kiln_options options = {.root = argc > 1 ? argv[1] : "aot_artifacts", .device = "cpu"};
  kiln_library *library = NULL;
  kiln_error error = {0};
  kiln_code code = kiln_open(&options, &library, &error);
  const kiln_op *norm = code == KILN_OK ? kiln_find(library, "rms_norm", &error) : NULL;
  if (norm == NULL || kiln_run(norm, arguments, 4, NULL, NULL, &error) != KILN_OK) {
    fprintf(stderr, "quick: %s\n", error.message);
    kiln_close(library);
    return 1;
  }
  for (int m = 0; m < 2; m++) printf("%g %g %g %g\n", out[m][0], out[m][1], out[m][2], out[m][3]);
  kiln_close(library);
  return 0;
}
