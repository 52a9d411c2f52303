/* What a generated header calls: a library whose ops are the command line's name=signature, and calls that print
 * what they are given. */
#include <stdlib.h>
#include "kiln_ops.h"
#define SAY(...) printf(__VA_ARGS__)
static int op_count;
static char **op_list;
const kiln_op *kiln_find(const kiln_library *library, const char *name, kiln_error *error) {
  (void)library, (void)error;
  for (int i = 0; i < op_count; i++)
    if (strncmp(op_list[i], name, strlen(name)) == 0 && op_list[i][strlen(name)] == '=') return (const kiln_op *)&op_list[i];
  return NULL;
}
kiln_code kiln_op_signature(const kiln_op *op, char *text, size_t size, size_t *needed, kiln_error *error) {
  (void)error;
  *needed = (size_t)snprintf(text, size, "%s", strchr(*(char *const *)op, '=') + 1) + 1;
  return KILN_OK;
}
static void show(const kiln_argument *a, size_t count) {
  static const char *const kinds[] = {"?", "tensor", "number", "integer", "bool", "text", "written"};
  for (size_t i = 0; i < count; i++)
    SAY("%s %s %d %g %lld %s\n", a[i].name, kinds[a[i].kind], a[i].tensor ? (int)a[i].tensor->rank : -1, a[i].number,
        (long long)a[i].integer, a[i].text ? a[i].text : "-");
}
kiln_code kiln_run(const kiln_op *op, const kiln_argument *arguments, size_t count, const kiln_choice *choice, kiln_stream stream,
                   kiln_error *error) {
  (void)choice, (void)error;
  SAY("run %.3s %d\n", *(char *const *)op, stream != NULL);
  show(arguments, count);
  return KILN_OK;
}
kiln_code kiln_bind(const kiln_op *op, const kiln_argument *arguments, size_t count, const kiln_choice *choice, kiln_call **call,
                    kiln_error *error) {
  (void)arguments, (void)count, (void)error;
  SAY("bind %.3s %s\n", *(char *const *)op, choice ? choice->mode : "-");
  *call = NULL;
  return KILN_OK;
}
int main(int argc, char **argv) {
  kiln_error error;
  kiln_ops ops;
  kiln_tensor t[4];
  kiln_call *call;
  op_count = argc - 1, op_list = argv + 1;
  for (int i = 0; i < 4; i++) memset(&t[i], 0, sizeof t[i]), t[i].rank = i;
  if (kiln_ops_find(NULL, &ops, &error)) return SAY("%d %s\n", (int)error.code, error.message), 0;
  if (kiln_run_mix(&ops, &t[0], &t[1], &t[2], 0.5, KILN_DEFAULT_MIX_K, KILN_DEFAULT_MIX_BIG, KILN_DEFAULT_MIX_FLAG, &t[3],
                   KILN_DEFAULT_MIX_GEMMA, KILN_DEFAULT_MIX_GROUP, KILN_ATTR_MIX_KIND_A_B_, NULL, &call, &error))
    return 1;
  kiln_choice fast = {"fast", NULL, NULL, NULL};
  if (kiln_bind_count(&ops, &t[0], &t[1], &fast, &call, &error)) SAY("%d %s\n", (int)error.code, error.message);
  return kiln_run_mix(&ops, NULL, NULL, NULL, 0, 0, 0, false, NULL, false, 0, (kiln_attr_mix_kind)9, NULL, NULL, NULL);
}
