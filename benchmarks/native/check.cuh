// Sampled rows of a grouped product against a naive float32 kernel.
#pragma once

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "benchmarks/native/workload.cuh"

namespace jaxmoe::bench {

// Rounding the result to bf16 costs about 1.7e-3; one wrong row of those sampled far more.
inline constexpr double kMaxRelativeError = 3e-3;

// out[r, f] = dot(x[r or row_index[r]], w[e, f]), gated: silu(gate) * up. E groups, K contraction.
struct Product {
  const bf16* x;         // [*, K]
  const int* row_index;  // [R] or null
  const bf16* w;         // [E, N, K] or [E, K, N]; N = n_out, gated 2 n_out
  const bf16* out;       // [R, n_out]
  const int* starts;     // [E + 1]
  int num_groups;
  int k;
  int n_out;
  bool gated;
  bool kn;
};

struct SquaredSums {
  double error;
  double reference;
};

// The sum over a warp of x[i] * w[i * stride].
__device__ inline float WarpDot(const bf16* x, const bf16* w, int k, size_t stride) {
  float sum = 0;
  for (int i = threadIdx.x % 32; i < k; i += 32) {
    sum += __bfloat162float(x[i]) * __bfloat162float(w[i * stride]);
  }
  for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  return sum;
}

// One warp an output at a time.
__global__ void CheckRowsKernel(Product p, const int* rows, int num_rows, SquaredSums* sums) {
  const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int num_warps = gridDim.x * blockDim.x / 32;
  const size_t n = p.gated ? 2 * p.n_out : p.n_out;
  const size_t feature_stride = p.kn ? 1 : p.k;
  const size_t k_stride = p.kn ? n : 1;
  double error = 0, reference = 0;
  for (int64_t t = warp; t < static_cast<int64_t>(num_rows) * p.n_out; t += num_warps) {
    const int r = rows[t / p.n_out], f = t % p.n_out;
    int e = 0;
    while (e < p.num_groups && p.starts[e + 1] <= r) e++;
    if (e >= p.num_groups) continue;
    const bf16* x = p.x + static_cast<size_t>(p.row_index != nullptr ? p.row_index[r] : r) * p.k;
    const bf16* w = p.w + e * n * p.k;
    float y = WarpDot(x, w + f * feature_stride, p.k, k_stride);
    if (p.gated) {
      y = y / (1 + expf(-y)) * WarpDot(x, w + (p.n_out + f) * feature_stride, p.k, k_stride);
    }
    const float difference = __bfloat162float(p.out[static_cast<size_t>(r) * p.n_out + f]) - y;
    error += static_cast<double>(difference) * difference;
    reference += static_cast<double>(y) * y;
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&sums->error, error);
    atomicAdd(&sums->reference, reference);
  }
}

// First, middle and last rows of up to 8 groups, and those on both sides of the first tile's end.
inline std::vector<int> SampleRows(const std::vector<int>& starts, int token_tile) {
  constexpr size_t kMaxGroups = 8;
  std::vector<int> groups;
  for (size_t e = 0; e + 1 < starts.size(); ++e) {
    if (starts[e + 1] > starts[e]) groups.push_back(static_cast<int>(e));
  }
  const size_t count = std::min(kMaxGroups, groups.size());
  std::set<int> rows;
  for (size_t i = 0; i < count; ++i) {
    const int group = groups[count == 1 ? 0 : i * (groups.size() - 1) / (count - 1)];
    const int first = starts[group], end = starts[group + 1];
    rows.insert({first, first + (end - first) / 3, (first + end) / 2, end - 1});
    rows.insert(std::min(first + token_tile - 1, end - 1));
    rows.insert(std::min(first + token_tile, end - 1));
  }
  return {rows.begin(), rows.end()};
}

// |out - reference| / |reference| over the sampled rows, in the Frobenius norm.
inline double RelativeError(const Product& product,
                            const std::vector<int>& sampled,
                            cudaStream_t stream) {
  DeviceArray<int> rows(sampled.size());
  DeviceArray<SquaredSums> sums(1);
  BENCH_CHECK_CUDA(cudaMemcpy(rows.get(), sampled.data(), rows.bytes(), cudaMemcpyHostToDevice));
  BENCH_CHECK_CUDA(cudaMemset(sums.get(), 0, sums.bytes()));
  CheckRowsKernel<<<2048, 256, 0, stream>>>(
      product, rows.get(), static_cast<int>(sampled.size()), sums.get());
  BENCH_CHECK_CUDA(cudaGetLastError());
  BENCH_CHECK_CUDA(cudaStreamSynchronize(stream));
  SquaredSums host;
  BENCH_CHECK_CUDA(cudaMemcpy(&host, sums.get(), sizeof(host), cudaMemcpyDeviceToHost));
  return std::sqrt(host.error / host.reference);
}

// Of act() after the gate-up product of turn 0. Tokens by index: rows() may hold results by now.
inline double GateUpError(const Workload& load, int token_tile, cudaStream_t stream) {
  const Model& model = load.model();
  const Product product{load.x().get(),
                        load.RowToToken(0),
                        load.weights().gate_up(0),
                        load.act().get(),
                        load.GroupStarts(0),
                        model.num_experts,
                        model.hidden,
                        model.intermediate,
                        /*gated=*/true,
                        load.weights().layout() == WeightLayout::kKN};
  return RelativeError(product, SampleRows(load.group_starts(), token_tile), stream);
}

// Of rows() after the down product of turn 0.
inline double DownError(const Workload& load, int token_tile, cudaStream_t stream) {
  const Model& model = load.model();
  const Product product{load.act().get(),
                        nullptr,
                        load.weights().down(0),
                        load.rows().get(),
                        load.GroupStarts(0),
                        model.num_experts,
                        model.intermediate,
                        model.hidden,
                        /*gated=*/false,
                        load.weights().layout() == WeightLayout::kKN};
  return RelativeError(product, SampleRows(load.group_starts(), token_tile), stream);
}

}  // namespace jaxmoe::bench
