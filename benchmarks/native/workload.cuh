// One layer on the device: random weights, tokens and routings, as the launchers take them.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "benchmarks/native/device.h"
#include "benchmarks/native/options.h"
#include "csrc/gemm/moe_mlp.h"
#include "csrc/kernels/permute.h"
#include "csrc/kernels/plan.h"

namespace jaxmoe::bench {

using bf16 = __nv_bfloat16;

// The finalizer of MurmurHash3.
__device__ inline uint32_t Hash(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return static_cast<uint32_t>(x);
}

// Box and Muller's transform of two hashes of the index.
__global__ void FillNormalKernel(bf16* out, size_t count, float scale, uint64_t seed) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += stride) {
    const uint64_t key = i * 2 + seed * 0x9E3779B97F4A7C15ULL;
    const float u1 = (Hash(key) + 1.0f) * 2.3283e-10f;  // in (0, 1)
    const float u2 = Hash(key + 1) * 2.3283e-10f;
    out[i] = __float2bfloat16(scale * sqrtf(-2 * __logf(u1)) * __cosf(6.2831853f * u2));
  }
}

// Never zeros: on those the card draws less power and runs faster.
inline void FillNormal(const DeviceArray<bf16>& out,
                       float scale,
                       uint64_t seed,
                       cudaStream_t stream) {
  FillNormalKernel<<<4096, 256, 0, stream>>>(out.get(), out.count(), scale, seed);
  BENCH_CHECK_CUDA(cudaGetLastError());
}

// Several sets of one layer's weights, so that none is in L2 when its turn comes again. With a
// single set, of the largest layer, the experts of one token fill L2 many times.
class WeightSets {
 public:
  WeightSets(const Model& model, WeightLayout layout, cudaStream_t stream)
      : model_(model), layout_(layout) {
    const size_t experts = model.num_experts;
    const size_t gate_up = experts * 2 * model.intermediate * model.hidden;
    const size_t down = experts * model.hidden * model.intermediate;
    size_t available = 0, total = 0;
    BENCH_CHECK_CUDA(cudaMemGetInfo(&available, &total));
    const size_t budget = std::min(kMaxBytes, available / 2);
    const size_t sets = std::clamp<size_t>(budget / ((gate_up + down) * sizeof(bf16)), 1, kMaxSets);
    for (size_t i = 0; i < sets; ++i) {
      // 1 / sqrt(contraction) keeps every intermediate of order one.
      FillNormal(gate_up_.emplace_back(gate_up), 1.0f / std::sqrt(model.hidden), 2 * i + 1, stream);
      FillNormal(down_.emplace_back(down), 1.0f / std::sqrt(model.intermediate), 2 * i + 2, stream);
    }
  }

  const Model& model() const { return model_; }
  WeightLayout layout() const { return layout_; }
  int size() const { return static_cast<int>(gate_up_.size()); }
  const bf16* gate_up(int turn) const { return gate_up_[turn % size()].get(); }
  const bf16* down(int turn) const { return down_[turn % size()].get(); }

 private:
  static constexpr size_t kMaxSets = 8;
  static constexpr size_t kMaxBytes = size_t{32} << 30;

  Model model_;
  WeightLayout layout_;
  std::vector<DeviceArray<bf16>> gate_up_;  // [E, 2 I, H], or [E, H, 2 I] in layout kn
  std::vector<DeviceArray<bf16>> down_;     // [E, H, I], or [E, I, H]
};

// Appends the K distinct experts of each token: the largest of Gumbel noise on log-probabilities.
inline void DrawRouting(
    const Model& model, int num_tokens, Skew skew, std::mt19937* random, std::vector<int>* ids) {
  std::vector<int> rank(model.num_experts);
  std::iota(rank.begin(), rank.end(), 0);
  std::shuffle(rank.begin(), rank.end(), *random);
  std::vector<double> log_p(model.num_experts, 0.0);
  if (skew == Skew::kZipf) {
    for (int i = 0; i < model.num_experts; ++i) log_p[rank[i]] = -std::log(i + 1.0);
  }
  std::vector<std::pair<double, int>> noisy(model.num_experts);
  for (int t = 0; t < num_tokens; ++t) {
    for (int e = 0; e < model.num_experts; ++e) {
      const double u = ((*random)() + 1.0) / 4294967298.0;
      noisy[e] = {-(log_p[e] - std::log(-std::log(u))), e};
    }
    std::partial_sort(noisy.begin(), noisy.begin() + model.top_k, noisy.end());
    for (int k = 0; k < model.top_k; ++k) {
      ids->push_back(skew == Skew::kOneExpert ? k : noisy[k].second);
    }
  }
}

// Activations and routings of a number of tokens. A `turn` picks a routing and a set of weights.
class Workload {
 public:
  static constexpr int kRoutings = 8;

  Workload(const WeightSets& weights, int num_tokens, Skew skew, cudaStream_t stream)
      : weights_(weights),
        model_(weights.model()),
        num_tokens_(num_tokens),
        num_rows_(num_tokens * model_.top_k),
        stream_(stream),
        at_(num_rows_, model_.num_experts),
        index_stride_(RoundUp(at_.size, 4)),
        x_(size_t(num_tokens) * model_.hidden),
        y_(x_.count()),
        act_(size_t(num_rows_) * model_.intermediate),
        rows_(size_t(num_rows_) * model_.hidden),
        expert_ids_(size_t(num_rows_) * kRoutings),
        routing_weights_(num_rows_),
        index_(index_stride_ * kRoutings) {
    FillNormal(x_, 1.0f, 77, stream);
    FillNormal(y_, 1.0f, 78, stream);
    std::mt19937 random(1234 + num_tokens + static_cast<int>(skew));
    std::vector<int> ids;
    for (int i = 0; i < kRoutings; ++i) DrawRouting(model_, num_tokens, skew, &random, &ids);
    const std::vector<float> mean(num_rows_, 1.0f / model_.top_k);
    BENCH_CHECK_CUDA(
        cudaMemcpy(expert_ids_.get(), ids.data(), expert_ids_.bytes(), cudaMemcpyHostToDevice));
    BENCH_CHECK_CUDA(cudaMemcpy(
        routing_weights_.get(), mean.data(), routing_weights_.bytes(), cudaMemcpyHostToDevice));
    for (int i = 0; i < kRoutings; ++i) Plan(i);
    BENCH_CHECK_CUDA(cudaStreamSynchronize(stream));
    group_starts_.resize(model_.num_experts + 1);
    for (int i = 0; i < kRoutings; ++i) {
      const size_t bytes = group_starts_.size() * sizeof(int);
      BENCH_CHECK_CUDA(
          cudaMemcpy(group_starts_.data(), GroupStarts(i), bytes, cudaMemcpyDeviceToHost));
      for (int e = 0; e < model_.num_experts; ++e) {
        experts_hit_ += (group_starts_[e + 1] > group_starts_[e]) / double{kRoutings};
      }
    }
    BENCH_CHECK_CUDA(cudaMemcpy(group_starts_.data(),
                                GroupStarts(0),
                                group_starts_.size() * sizeof(int),
                                cudaMemcpyDeviceToHost));
  }

  const WeightSets& weights() const { return weights_; }
  const Model& model() const { return model_; }
  int num_tokens() const { return num_tokens_; }
  int num_rows() const { return num_rows_; }
  double experts_hit() const { return experts_hit_; }                     // mean of the routings
  const std::vector<int>& group_starts() const { return group_starts_; }  // of turn 0, on the host
  const DeviceArray<bf16>& x() const { return x_; }
  const DeviceArray<bf16>& act() const { return act_; }
  const DeviceArray<bf16>& rows() const { return rows_; }
  const int* GroupStarts(int turn) const { return Index(turn) + at_.expert_offsets; }
  const int* RowToToken(int turn) const { return Index(turn) + at_.row_to_token; }

  // Fills rows() with the tokens in the expert order of turn 0, for a gemm1 that does not gather.
  void PermuteTokens() const {
    PermuteParams permute{};
    permute.x = x_.get();
    permute.slot_to_row = Index(0) + at_.slot_to_row;
    permute.rows = rows_.get();
    permute.num_tokens = num_tokens_;
    permute.top_k = model_.top_k;
    permute.num_rows = num_rows_;
    permute.row_bytes = model_.hidden * sizeof(bf16);
    BENCH_CHECK_CUDA(LaunchPermute(permute, stream_));
  }

  // x() gathered, or rows(), by gate and up into act().
  MoeGemmProblem GateUp(bool gather, int turn, int* tile_counter) const {
    MoeGemmProblem gemm = Problem(turn, tile_counter);
    gemm.x = gather ? x_.get() : rows_.get();
    gemm.x_rows = gather ? num_tokens_ : num_rows_;
    gemm.row_index = RowToToken(turn);
    gemm.w = weights_.gate_up(turn);
    gemm.out = act_.get();
    gemm.k = model_.hidden;
    gemm.n = 2 * model_.intermediate;
    gemm.gated = true;
    gemm.activation = Swiglu();
    return gemm;
  }

  // act() by down into rows().
  MoeGemmProblem Down(int turn, int* tile_counter) const {
    MoeGemmProblem gemm = Problem(turn, tile_counter);
    gemm.x = act_.get();
    gemm.x_rows = num_rows_;
    gemm.w = weights_.down(turn);
    gemm.out = rows_.get();
    gemm.k = model_.intermediate;
    gemm.n = model_.hidden;
    return gemm;
  }

  // The whole layer; its result is the residual of the next, as in the layer benchmark.
  MoeMlpParams Layer(const TileConfig& tile, const TileConfig& down, int turn) const {
    MoeMlpParams layer;
    layer.x = x_.get();
    layer.expert_ids = ExpertIds(turn);
    layer.weights = routing_weights_.get();
    layer.gate_up = Weights(weights_.gate_up(turn), tile);
    layer.down = Weights(weights_.down(turn), down);  // LaunchMoeMlp drops `gather`
    layer.residual = y_.get();
    layer.y = y_.get();
    layer.rows = rows_.get();
    layer.act = act_.get();
    layer.index = Index(turn);
    layer.num_tokens = num_tokens_;
    layer.top_k = model_.top_k;
    layer.hidden = model_.hidden;
    layer.intermediate = model_.intermediate;
    layer.num_experts = model_.num_experts;
    layer.num_local_experts = model_.num_experts;
    layer.activation = Swiglu();
    return layer;
  }

 private:
  static ActivationParams Swiglu() {
    ActivationParams activation;
    activation.kind = ActivationParams::kSigmoid;
    activation.c1 = 1.0f;
    activation.limit = INFINITY;
    return activation;
  }

  MlpWeights Weights(const bf16* values, const TileConfig& tile) const {
    MlpWeights weights;
    weights.values = values;
    weights.count = model_.num_experts;
    weights.layout = weights_.layout();
    weights.tile = tile;
    return weights;
  }

  int* Index(int turn) const { return index_.get() + index_stride_ * (turn % kRoutings); }
  const int* ExpertIds(int turn) const {
    return expert_ids_.get() + static_cast<size_t>(num_rows_) * (turn % kRoutings);
  }

  void Plan(int turn) const {
    PlanParams plan{};
    int* index = Index(turn);
    plan.expert_ids = ExpertIds(turn);
    plan.expert_offsets = index + at_.expert_offsets;
    plan.row_to_token = index + at_.row_to_token;
    plan.slot_to_row = index + at_.slot_to_row;
    plan.scratch = index + at_.plan_scratch;
    plan.batch = 1;
    plan.num_tokens = num_tokens_;
    plan.top_k = model_.top_k;
    plan.num_experts = model_.num_experts;
    plan.num_local_experts = model_.num_experts;
    plan.zero_counters = index;
    plan.num_zero_counters = MlpIndex::kCounters;
    BENCH_CHECK_CUDA(LaunchPlan(plan, stream_));
  }

  // What both products share.
  MoeGemmProblem Problem(int turn, int* tile_counter) const {
    MoeGemmProblem gemm;
    gemm.layout = weights_.layout();
    gemm.group_starts = GroupStarts(turn);
    gemm.tile_counter = tile_counter;
    gemm.num_weights = model_.num_experts;
    gemm.num_groups = model_.num_experts;
    gemm.groups_per_batch = model_.num_experts;
    gemm.rows_per_batch = num_rows_;
    gemm.pdl = OverlapsPrevious(num_rows_, model_.num_experts);  // as in the layer
    return gemm;
  }

  const WeightSets& weights_;
  const Model& model_;
  int num_tokens_;
  int num_rows_;
  cudaStream_t stream_;
  MlpIndex at_;
  int64_t index_stride_;
  DeviceArray<bf16> x_;                 // [T, H]
  DeviceArray<bf16> y_;                 // [T, H]
  DeviceArray<bf16> act_;               // [R, I]
  DeviceArray<bf16> rows_;              // [R, H]
  DeviceArray<int> expert_ids_;         // [kRoutings, T, K]
  DeviceArray<float> routing_weights_;  // [T, K]
  DeviceArray<int> index_;              // [kRoutings, index_stride_]
  std::vector<int> group_starts_;
  double experts_hit_ = 0.0;
};

}  // namespace jaxmoe::bench
