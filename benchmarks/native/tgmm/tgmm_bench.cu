// Checks and times weight gradients on one GPU, without JAX, beside a dense product of cuBLAS.
//
//   tgmm_bench [--check] [--models a,b] [--tokens 1024,4096] [--clusters 1,2] [--f32]
//
// --check: small products of every kind, all elements. A burst is a pause, one untimed call and n
// timed ones between two events; a time is the median of the bursts, a call. dW1 is [H, 2 I], dW2
// [I, H], as in the layer. dense: one product of as many flops, [K, R] by [R, N].
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "benchmarks/native/tgmm/check.cuh"

namespace jaxmoe::bench {
namespace {

constexpr double kBytesPerUs = 4.3e6;
constexpr double kFlopsPerUs = 780e6;
constexpr int kRounds = 5;

constexpr Model kModels[] = {{"qwen3-30b-a3b", 2048, 768, 128, 8},
                             {"mixtral-8x7b", 4096, 14336, 8, 2},
                             {"gpt-oss-120b", 2880, 2880, 128, 4},
                             {"deepseek-v3", 7168, 2048, 256, 8}};

struct Arguments {
  bool check = false;
  bool f32 = false;
  std::string models = "qwen3-30b-a3b,mixtral-8x7b";
  std::vector<int> tokens = {1024, 4096, 16384};
  std::vector<int> clusters = {1, 2};
};

std::vector<int> Integers(const char* text) {
  std::vector<int> values;
  for (const char* at = text; at != nullptr && *at != 0;) {
    values.push_back(std::atoi(at));
    at = std::strchr(at, ',');
    if (at != nullptr) ++at;
  }
  return values;
}

Arguments Parse(int argc, char** argv) {
  Arguments a;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const bool last = i + 1 == argc;
    if (flag == "--check") {
      a.check = true;
    } else if (flag == "--f32") {
      a.f32 = true;
    } else if (flag == "--models" && !last) {
      a.models = argv[++i];
    } else if (flag == "--tokens" && !last) {
      a.tokens = Integers(argv[++i]);
    } else if (flag == "--clusters" && !last) {
      a.clusters = Integers(argv[++i]);
    } else {
      Die(__FILE__, __LINE__, flag.c_str(), "unknown, or its value is missing");
    }
  }
  return a;
}

template <class Call>
double MedianUs(Call call, double guess_us, cudaStream_t stream) {
  cudaEvent_t begin, end;
  BENCH_CHECK_CUDA(cudaEventCreate(&begin));
  BENCH_CHECK_CUDA(cudaEventCreate(&end));
  const int calls = std::clamp(static_cast<int>(25e3 / guess_us), 1, 256);
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    BENCH_CHECK_CUDA(cudaStreamSynchronize(stream));
    usleep(40000);
    call();
    BENCH_CHECK_CUDA(cudaEventRecord(begin, stream));
    for (int i = 0; i < calls; ++i) call();
    BENCH_CHECK_CUDA(cudaEventRecord(end, stream));
    BENCH_CHECK_CUDA(cudaStreamSynchronize(stream));
    float ms = 0;
    BENCH_CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms * 1000.0 / calls);
  }
  BENCH_CHECK_CUDA(cudaEventDestroy(begin));
  BENCH_CHECK_CUDA(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// cublasGemmEx, found at run time: the benchmark builds and runs without the library.
class Cublas {
 public:
  explicit Cublas(cudaStream_t stream) {
    for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
      if (library_ == nullptr) library_ = dlopen(name, RTLD_NOW);
    }
    if (library_ == nullptr) return;
    Find<int (*)(void**)>("cublasCreate_v2")(&handle_);
    Find<int (*)(void*, cudaStream_t)>("cublasSetStream_v2")(handle_, stream);
    gemm_ = Find<Gemm>("cublasGemmEx");
  }

  bool found() const { return gemm_ != nullptr; }

  // dw = x^T dy, row-major: column-major its transpose.
  void Run(const bf16* x, const bf16* dy, bf16* dw, int rows, int k, int n) const {
    constexpr int kPlain = 0, kTransposed = 1, kBf16 = 14, kCompute32F = 68, kDefault = -1;
    const float one = 1.0f, zero = 0.0f;
    const int status = gemm_(handle_,
                             kPlain,
                             kTransposed,
                             n,
                             k,
                             rows,
                             &one,
                             dy,
                             kBf16,
                             n,
                             x,
                             kBf16,
                             k,
                             &zero,
                             dw,
                             kBf16,
                             n,
                             kCompute32F,
                             kDefault);
    if (status != 0) Die(__FILE__, __LINE__, "cublasGemmEx", std::to_string(status).c_str());
  }

 private:
  using Gemm = int (*)(void*,
                       int,
                       int,
                       int,
                       int,
                       int,
                       const void*,
                       const void*,
                       int,
                       int,
                       const void*,
                       int,
                       int,
                       const void*,
                       void*,
                       int,
                       int,
                       int,
                       int);

  template <class Function>
  Function Find(const char* name) const {
    return reinterpret_cast<Function>(dlsym(library_, name));
  }

  void* library_ = nullptr;
  void* handle_ = nullptr;
  Gemm gemm_ = nullptr;
};

// One gradient of a layer: weights [k, n] of E experts.
struct Product {
  const char* name;
  int k;
  int n;
};

class Bench {
 public:
  Bench(const Arguments& arguments, cudaStream_t stream)
      : arguments_(arguments), stream_(stream), cublas_(stream), counters_(65536) {}

  bool Run(const Model& model, int tokens) {
    std::mt19937 random(1234 + tokens);
    std::vector<int> ids;
    DrawRouting(model, tokens, Skew::kUniform, &random, &ids);
    std::vector<int> starts(model.num_experts + 1, 0);
    for (int id : ids) ++starts[id + 1];
    for (int e = 0; e < model.num_experts; ++e) starts[e + 1] += starts[e];
    std::vector<int> sizes;
    for (int e = 0; e < model.num_experts; ++e) sizes.push_back(starts[e + 1] - starts[e]);
    const auto starts_d = ToDevice(starts), sizes_d = ToDevice(sizes);
    bool right = true;
    const int h = model.hidden, i = model.intermediate;
    for (const Product& product :
         {Product{"dW1", h, 2 * i}, Product{"dW1 nk", 2 * i, h}, Product{"dW2", i, h}}) {
      right = Measure(model, tokens, product, starts_d, sizes_d) && right;
    }
    return right;
  }

 private:
  bool Measure(const Model& model,
               int tokens,
               const Product& product,
               const DeviceArray<int>& starts,
               const DeviceArray<int>& sizes) {
    const int rows = tokens * model.top_k;
    const DeviceArray<bf16> x(static_cast<size_t>(rows) * product.k);
    const DeviceArray<bf16> dy(static_cast<size_t>(rows) * product.n);
    const size_t elements = static_cast<size_t>(model.num_experts) * product.k * product.n;
    const DeviceArray<uint8_t> dw(elements * (arguments_.f32 ? 4 : 2));
    FillNormal(x, 1.0f, 1, stream_);
    FillNormal(dy, 1.0f, 2, stream_);
    const double flops = 2.0 * rows * product.k * product.n;
    const double bytes = double(dw.bytes()) + x.bytes() + dy.bytes();
    const double floor_us = std::max(bytes / kBytesPerUs, flops / kFlopsPerUs);

    TgmmProblem p;
    p.x = x.get();
    p.dy = dy.get();
    p.dw = dw.get();
    p.out_f32 = arguments_.f32;
    p.group_starts = starts.get();
    p.num_weights = model.num_experts;
    p.num_groups = model.num_experts;
    p.groups_per_batch = model.num_experts;
    p.rows_per_batch = rows;
    p.k = product.k;
    p.n = product.n;
    bool right = true;
    for (int cluster : arguments_.clusters) {
      TgmmConfig config;
      config.cluster = cluster;
      const auto launch = [&] {
        p.tile_counter = NextCounter();
        BENCH_CHECK_LAUNCH(LaunchTgmm(p, config, stream_));
      };
      BENCH_CHECK_CUDA(cudaMemsetAsync(dw.get(), 0x7f, dw.bytes(), stream_));
      launch();
      const TgmmReference r{x.get(),
                            dy.get(),
                            dw.get(),
                            nullptr,
                            starts.get(),
                            sizes.get(),
                            model.num_experts,
                            model.num_experts,
                            product.k,
                            product.n};
      const int64_t stride = std::max<int64_t>(1, elements / 20011) | 1;
      const TgmmErrors e = arguments_.f32 ? CompareWithReference<bf16, float>(r, stride, stream_)
                                          : CompareWithReference<bf16, bf16>(r, stride, stream_);
      const bool ok = e.worst <= 1.0 && e.not_finite == 0 && e.not_zero == 0;
      right = right && ok;
      const double us = MedianUs(launch, floor_us, stream_);
      std::printf(
          "%-14s %6d %-14s cluster %d %9.1f us %7.1f TFLOP/s %5.2f TB/s %5.1f%% of floor%s\n",
          model.name,
          tokens,
          product.name,
          cluster,
          us,
          flops / us * 1e-6,
          bytes / us * 1e-6,
          100.0 * floor_us / us,
          ok ? "" : "  WRONG");
    }
    if (cublas_.found()) {
      const auto dense = [&] {
        cublas_.Run(
            x.get(), dy.get(), reinterpret_cast<bf16*>(dw.get()), rows, product.k, product.n);
      };
      const double us = MedianUs(dense, flops / kFlopsPerUs, stream_);
      std::printf("%-14s %6d %-14s cuBLAS    %9.1f us %7.1f TFLOP/s\n",
                  model.name,
                  tokens,
                  "dense",
                  us,
                  flops / us * 1e-6);
    }
    return right;
  }

  // A zero int for each launch, cleared when all were used.
  int* NextCounter() {
    if (next_ == 0) {
      BENCH_CHECK_CUDA(cudaMemsetAsync(counters_.get(), 0, counters_.bytes(), stream_));
    }
    int* counter = counters_.get() + next_;
    next_ = (next_ + 1) % counters_.count();
    return counter;
  }

  const Arguments& arguments_;
  cudaStream_t stream_;
  const Cublas cublas_;
  DeviceArray<int> counters_;
  size_t next_ = 0;
};

}  // namespace
}  // namespace jaxmoe::bench

int main(int argc, char** argv) {
  using namespace jaxmoe::bench;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a line as soon as it is measured
  const Arguments arguments = Parse(argc, argv);
  cudaStream_t stream;
  BENCH_CHECK_CUDA(cudaStreamCreate(&stream));
  if (arguments.check) return CheckTgmm(stream) ? 0 : 1;
  bool right = true;
  Bench bench(arguments, stream);
  for (const Model& model : kModels) {
    if (("," + arguments.models + ",").find("," + std::string(model.name) + ",") ==
        std::string::npos) {
      continue;
    }
    for (int tokens : arguments.tokens) right = bench.Run(model, tokens) && right;
  }
  return right ? 0 : 1;
}
