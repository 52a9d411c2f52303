// A small engine: add + RMS norm, SiLU gate and fp8 codes of 16 tokens, from a verified tree, on a CPU or a GPU.
//   engine [cpu|cuda|cuda:N] [TREE]
#include <dlfcn.h>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include "kiln_ops.h"
#if __has_include(<kiln_embedded_tree.h>)
#include <kiln_embedded_tree.h>
#else
static const size_t kiln_embedded_tree_size = 0, *const kiln_embedded_tree = nullptr;
#endif
static void need(bool fine, const char *what) {
  if (!fine) std::fprintf(stderr, "engine: %s\n", what), std::exit(1);
}
struct Device {  // its memory, which an engine has anyway; CUDA's driver without the toolkit
  int ordinal, handle = 0;
  void *driver = ordinal < 0 ? nullptr : dlopen("libcuda.so.1", RTLD_NOW), *context = nullptr;
  template <class... A> void cu(const char *name, A... arguments) {
    auto call = driver ? reinterpret_cast<int (*)(A...)>(dlsym(driver, name)) : nullptr;
    need(call && call(arguments...) == 0, name);
  }
  explicit Device(int n) : ordinal(n) {
    if (n < 0) return;
    cu("cuInit", 0u), cu("cuDeviceGet", &handle, n), cu("cuDevicePrimaryCtxRetain", &context, handle), cu("cuCtxSetCurrent", context);
  }
  template <class T> kiln_tensor put(const std::vector<T> &host, kiln_dtype dtype, const std::vector<int64_t> &shape) {
    const size_t bytes = host.size() * sizeof(T);
    void *data = ordinal < 0 ? std::aligned_alloc(256, (bytes + 255) / 256 * 256) : nullptr;
    if (ordinal < 0) need(data, "out of memory"), std::memcpy(data, host.data(), bytes);
    else cu("cuMemAlloc_v2", &data, bytes), cu("cuMemcpyHtoD_v2", data, host.data(), bytes);
    return kiln_dense(data, dtype, ordinal < 0 ? KILN_CPU : ordinal, int32_t(shape.size()), shape.data());
  }
  template <class T> std::vector<T> get(const kiln_tensor &t) {  // waits for what was launched
    std::vector<T> host(t.shape[0] * t.strides[0]);
    if (ordinal < 0) std::memcpy(host.data(), t.data, host.size() * sizeof(T));
    else cu("cuMemcpyDtoH_v2", host.data(), t.data, host.size() * sizeof(T));
    return host;
  }
};
static float wide(uint16_t x) { uint32_t b = uint32_t(x) << 16; float f; return std::memcpy(&f, &b, 4), f; }
static uint16_t bf16(float f) { uint32_t b; return std::memcpy(&b, &f, 4), uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16); }
static float e4m3(int c) { return (c & 128 ? -1 : 1) * (c & 120 ? std::ldexp(8 + (c & 7), (c >> 3 & 15) - 10) : std::ldexp(c & 7, -9)); }

int main(int argc, char **argv) {
  const char *name = argc > 1 ? argv[1] : "cpu";
  kiln_root root{};
  if (argc > 2) root.path = argv[2];
  else root.archive = kiln_embedded_tree, root.archive_bytes = kiln_embedded_tree_size;
  root.expect = KILN_OPS_TREE;  // the tree of kiln_ops.h and no other
  kiln_options options{};
  options.roots = &root, options.root_count = 1, options.device = name;
  kiln_error error{};
  kiln_library *library;
  kiln_ops ops;
  auto check = [&](kiln_code code) { need(code == KILN_OK, error.message); };
  check(kiln_open(&options, &library, &error)), check(kiln_ops_find(library, &ops, &error));

  Device device(std::strncmp(name, "cuda", 4) != 0 ? -1 : name[4] == ':' ? std::atoi(name + 5) : 0);
  const int M = 16, N = 5120;
  const double eps = 1e-6, scale = 0.25;
  std::vector<uint16_t> x(M * N), r(M * N), w(N);
  for (int i = 0; i < M * N; i++) x[i] = bf16(std::sin(0.37f * i)), r[i] = bf16(2 * std::cos(0.11f * i)), w[i % N] = bf16(0.01f * (i % 13));
  auto rows = [&](const std::vector<uint16_t> &v) { return device.put(v, KILN_BF16, {M, N}); };
  kiln_tensor X = rows(x), R = rows(r), W = device.put(w, KILN_BF16, {N}), S = rows(x), Y = rows(x), A = rows(x);
  kiln_tensor Q = device.put(std::vector<uint8_t>(M * N), KILN_U8, {M, N});
  kiln_call *calls[3];
  check(kiln_bind_fused_add_rms_norm(&ops, &X, &W, &R, &S, eps, &Y, nullptr, &calls[0], &error));
  check(kiln_bind_silu_mul(&ops, &Y, &S, &A, nullptr, &calls[1], &error));
  check(kiln_bind_quant_fp8_static(&ops, &A, scale, &Q, nullptr, &calls[2], &error));
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 1000; i++) for (kiln_call *call : calls) check(kiln_launch(call, nullptr, &error));
  const auto q = device.get<uint8_t>(Q);
  const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - start;
  const auto s = device.get<uint16_t>(S), y = device.get<uint16_t>(Y), a = device.get<uint16_t>(A);
  int wrong = 0;
  for (int m = 0; m < M * N; m += N) {
    std::vector<float> sums(8192);  // Kiln's order of a sum: neighbours, then neighbours of those, to the root
    for (int i = 0; i < N; i++) sums[i] = wide(s[m + i]) * wide(s[m + i]);
    for (int n = 4096; n > 0; n /= 2) for (int k = 0; k < n; k++) sums[k] = sums[2 * k] + sums[2 * k + 1];
    const float inverse = 1.0f / std::sqrt(sums[0] / float(N) + float(eps));
    for (int i = m; i < m + N; i++) {
      const double g = wide(y[i]), gated = g / (1 + std::exp(-g)) * wide(s[i]), act = wide(a[i]);
      wrong += s[i] != bf16(wide(x[i]) + wide(r[i])) || y[i] != bf16(wide(s[i]) * inverse * (wide(w[i - m]) + 1.0f));
      wrong += std::fabs(act - gated) > std::fabs(gated) / 128 || std::fabs(e4m3(q[i]) * scale - act) > std::fabs(act) / 16 + scale / 1024;
    }
  }
  std::printf("%s: norm %g %g %g, fp8 %d %d %d, %d wrong\n", name, wide(y[0]), wide(y[1]), wide(y[2]), q[0], q[1], q[2], wrong);
  kiln_argument given[KILN_ARGUMENTS_SILU_MUL];
  const size_t count = kiln_arguments_silu_mul(given, &Y, &S, &A);
  char why[8192];
  check(kiln_explain(ops.op[KILN_OP_SILU_MUL], given, count, nullptr, why, sizeof why, nullptr, &error));
  std::printf("%s%.2f us a launch\n", why, spent.count() / 3000);
  for (kiln_call *call : calls) std::printf("ran %s\n", kiln_call_variant(call)), kiln_call_free(call);
  return kiln_close(library), wrong != 0;
}
