// A small engine: add + RMS norm, SiLU gate and fp8 codes of 16 tokens, from a verified tree, on a CPU or a GPU.
//   engine [cpu|cuda|cuda:N] [TREE]
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <string>
#include <vector>

#include "kiln_ops.h"
#ifdef EMBEDDED
#include <kiln_embedded_tree.h>
#else
static const unsigned char *const kiln_embedded_tree = nullptr;
static const size_t kiln_embedded_tree_size = 0;
#endif

static void need(bool fine, const char *what) {
  if (!fine) std::fprintf(stderr, "engine: %s\n", what), std::exit(1);
}

// Memory of the device that the engine runs on; CUDA's driver needs no toolkit.
struct Device {
  int ordinal;
  void *driver = ordinal < 0 ? nullptr : dlopen("libcuda.so.1", RTLD_NOW);
  template <class... A> void cu(const char *name, A... arguments) {
    auto call = driver ? reinterpret_cast<int (*)(A...)>(dlsym(driver, name)) : nullptr;
    need(call && call(arguments...) == 0, name);
  }
  explicit Device(int n) : ordinal(n) {
    int handle = 0;
    void *context = nullptr;
    if (n < 0) return;
    cu("cuInit", 0u), cu("cuDeviceGet", &handle, n), cu("cuDevicePrimaryCtxRetain", &context, handle), cu("cuCtxSetCurrent", context);
  }
  void *put(const void *host, size_t bytes) {
    void *memory = nullptr;
    if (ordinal < 0) need((memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256)), "out of memory"), std::memcpy(memory, host, bytes);
    else cu("cuMemAlloc_v2", &memory, bytes), cu("cuMemcpyHtoD_v2", memory, host, bytes);
    return memory;
  }
  template <class T> std::vector<T> get(const kiln_tensor &t, size_t count) {
    std::vector<T> host(count);
    if (ordinal < 0) std::memcpy(host.data(), t.data, count * sizeof(T));
    else cu("cuMemcpyDtoH_v2", host.data(), t.data, count * sizeof(T));
    return host;
  }
  void wait() { if (ordinal >= 0) cu("cuCtxSynchronize"); }
};

static float wide(uint16_t x) { uint32_t b = uint32_t(x) << 16; float f; std::memcpy(&f, &b, 4); return f; }
static uint16_t bf16(float f) { uint32_t b; std::memcpy(&b, &f, 4); return uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16); }
static float e4m3(int c) { float m = c & 7, f = c & 0x78 ? std::ldexp(8 + m, (c >> 3 & 15) - 10) : std::ldexp(m, -9); return c & 0x80 ? -f : f; }

int main(int argc, char **argv) {
  const std::string name = argc > 1 ? argv[1] : "cpu";
  const int64_t M = 16, N = 5120, rows[] = {M, N};
  kiln_error error{};
  kiln_root root{};
  root.path = argc > 2 ? argv[2] : nullptr;
  if (!root.path) root.archive = kiln_embedded_tree, root.archive_bytes = kiln_embedded_tree_size;
  root.expect = KILN_OPS_TREE;  // the tree that kiln_ops.h was written for, and no other
  kiln_options options{};
  options.roots = &root, options.root_count = 1, options.device = name.c_str();
  kiln_library *library = nullptr;
  kiln_ops ops;
  auto check = [&](kiln_code code) { need(code == KILN_OK, error.message); };
  check(kiln_open(&options, &library, &error)), check(kiln_ops_find(library, &ops, &error));

  Device device(name == "cpu" ? -1 : name.size() > 5 ? std::atoi(name.c_str() + 5) : 0);
  std::vector<uint16_t> x(M * N), r(M * N), w(N), zeros(M * N);
  for (size_t i = 0; i < x.size(); i++) x[i] = bf16(std::sin(0.37f * float(i))), r[i] = bf16(2 * std::cos(0.11f * float(i)));
  for (size_t i = 0; i < w.size(); i++) w[i] = bf16(0.01f * float(i % 13));
  auto tensor = [&](const void *host, kiln_dtype dtype, int rank, const int64_t *shape, size_t bytes) {
    return kiln_dense(device.put(host, bytes), dtype, device.ordinal, rank, shape);
  };
  auto matrix = [&](const std::vector<uint16_t> &v) { return tensor(v.data(), KILN_BF16, 2, rows, v.size() * 2); };
  kiln_tensor X = matrix(x), R = matrix(r), S = matrix(zeros), Y = matrix(zeros), A = matrix(zeros);
  kiln_tensor W = tensor(w.data(), KILN_BF16, 1, &N, N * 2), Q = tensor(zeros.data(), KILN_U8, 2, rows, M * N);
  const double eps = 1e-6, scale = 0.25;
  kiln_call *calls[3];
  check(kiln_bind_fused_add_rms_norm(&ops, &X, &W, &R, &S, eps, &Y, nullptr, &calls[0], &error));
  check(kiln_bind_silu_mul(&ops, &Y, &S, &A, nullptr, &calls[1], &error));
  check(kiln_bind_quant_fp8_static(&ops, &A, scale, &Q, nullptr, &calls[2], &error));
  auto chain = [&] { for (kiln_call *call : calls) check(kiln_launch(call, nullptr, &error)); };
  chain(), device.wait();

  auto s = device.get<uint16_t>(S, M * N), y = device.get<uint16_t>(Y, M * N), a = device.get<uint16_t>(A, M * N);
  auto q = device.get<uint8_t>(Q, M * N);
  size_t wrong = 0;
  for (int64_t m = 0; m < M; m++) {
    std::vector<float> tree(8192);  // Kiln's order of a sum: neighbours, then neighbours of those
    for (int64_t i = 0; i < N; i++) tree[i] = wide(s[m * N + i]) * wide(s[m * N + i]);
    for (size_t n = 4096; n > 0; n /= 2) for (size_t i = 0; i < n; i++) tree[i] = tree[2 * i] + tree[2 * i + 1];
    const float inverse = 1.0f / std::sqrt(tree[0] / float(N) + float(eps));
    for (int64_t i = m * N; i < m * N + N; i++) {
      const double g = wide(y[i]), gated = g / (1 + std::exp(-g)) * wide(s[i]), code = e4m3(q[i]) * scale;
      wrong += s[i] != bf16(wide(x[i]) + wide(r[i]));                                        // to the bit
      wrong += y[i] != bf16(wide(s[i]) * inverse * (wide(w[i - m * N]) + 1.0f));             // to the bit
      wrong += std::fabs(wide(a[i]) - gated) > std::fabs(gated) / 128;                       // within a bf16 step
      wrong += std::fabs(code - wide(a[i])) > std::fabs(wide(a[i])) / 16 + scale / 1024;     // within half an fp8 step
    }
  }
  std::printf("%s: out[0] = %g %g %g %g, %zu of %lld values wrong\n", name.c_str(), wide(y[0]), wide(y[1]), wide(y[2]), wide(y[3]), wrong, (long long)(4 * M * N));
  kiln_argument call[KILN_ARGUMENTS_FUSED_ADD_RMS_NORM];
  char text[8192];
  kiln_arguments_fused_add_rms_norm(call, &X, &W, &R, &S, eps, &Y);
  check(kiln_explain(ops.op[KILN_OP_FUSED_ADD_RMS_NORM], call, KILN_ARGUMENTS_FUSED_ADD_RMS_NORM, nullptr, text, sizeof text, nullptr, &error));
  std::fputs(text, stdout);
  for (kiln_call *bound : calls) std::printf("ran %s\n", kiln_call_variant(bound));
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 1000; i++) chain();
  device.wait();
  std::printf("%.2f us a launch\n", std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / 3000);
  for (kiln_call *bound : calls) kiln_call_free(bound);
  kiln_close(library);
  return wrong != 0;
}
