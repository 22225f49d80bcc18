// The experts of a layer of one token, and the sum of their rows from those of slices.
#pragma once

#include "csrc/gemm/sm90/scales.cuh"
#include "csrc/kernels/local_expert.cuh"

namespace jaxmoe {

// The experts of a token: lane k has choice k.
class TokenExperts {
 public:
  __device__ __forceinline__ TokenExperts(const PlanParams& plan, int lane) {
    if (lane < plan.top_k) expert_ = LocalExpert(plan, __ldcg(plan.expert_ids + lane));
    first_ = __ffs(__match_any_sync(kAll, expert_)) - 1;
    used_ = __ballot_sync(kAll, expert_ != kPlanNoExpert && first_ == lane);
  }

  // Experts without repetition, and the choice that names the i-th of them first.
  __device__ __forceinline__ int count() const { return __popc(used_); }
  __device__ __forceinline__ int Choice(int i) const {
    unsigned rest = used_;
    for (; i > 0; --i) rest &= rest - 1;
    return __ffs(rest) - 1;
  }
  // Of choice k: its expert, or kPlanNoExpert, and the first choice of that.
  __device__ __forceinline__ int Expert(int k) const { return __shfl_sync(kAll, expert_, k); }
  __device__ __forceinline__ int First(int k) const { return __shfl_sync(kAll, first_, k); }

 private:
  static constexpr unsigned kAll = 0xffffffffu;

  int expert_ = kPlanNoExpert;
  int first_;
  unsigned used_;
};

// Bias of a weight row, 0 where there is none.
template <class T>
__device__ __forceinline__ float SliceBias(const MoeGemmArgs& args, int weight, int row) {
  if (args.bias == nullptr) return 0.0f;
  const auto* bias = static_cast<const typename T::Weight*>(args.bias);
  return ptx::ToFloat(bias[static_cast<int64_t>(weight) * args.n + row]);
}

// What `of` gives for the four features of a piece.
template <class Of>
__device__ __forceinline__ float4 ForEach(const Of& of) {
  return make_float4(of(0), of(1), of(2), of(3));
}

inline constexpr int kSlicePieces = 8;  // of four features, which a block finalizes
inline constexpr int kSliceTerms = 32;  // threads that share a piece

// Adds up the slices of each expert's row, and the rows as kernels/finalize.cuh does. Threads of a
// piece are divided among the choices, those of a choice among the slices: the order is fixed.
template <class T>
__global__ void __launch_bounds__(kSlicePieces* kSliceTerms)
    SliceFinalizeKernel(const __grid_constant__ SliceArgs args) {
  using Out = typename T::Weight;
  __shared__ float4 sums[kSliceTerms][kSlicePieces];
  __shared__ bool here[kSliceTerms];
  const MoeGemmArgs& down = args.products[1];
  const int top_k = static_cast<int>(down.plan.top_k);
  const int piece = threadIdx.x % kSlicePieces;
  const int term = threadIdx.x / kSlicePieces;
  const int feature = 4 * (blockIdx.x * kSlicePieces + piece);
  const int log = 32 - __clz(top_k - 1);  // of the choices, rounded up to a power of two
  const int choice = term & ((1 << log) - 1);

  const TokenExperts experts(down.plan, threadIdx.x % 32);
  const int expert = experts.Expert(choice);
  const int first = experts.First(choice);
  const bool exists = choice < top_k && expert != kPlanNoExpert && feature < down.n;
  float4 scale{}, bias{};
  if (exists) {
    const int weight = expert % down.num_weights;
    scale = ForEach([&](int i) { return WeightScale<T>(down, weight, feature + i, 0); });
    bias = ForEach([&](int i) { return SliceBias<T>(down, weight, feature + i); });
  }
  GridDependencyWait();
  GridDependencyLaunch();
  float4 sum{};
  if (exists) {
    const float* const from = args.sums + static_cast<int64_t>(first) * down.n + feature;
    const int64_t pitch = static_cast<int64_t>(top_k) * down.n;
#pragma unroll 4
    for (int s = term >> log; s < args.slices; s += kSliceTerms >> log) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(from + s * pitch));
      sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
  }
  sums[term][piece] = sum;
  __syncthreads();
  if (term == choice) {  // the first of this choice: the row, rounded as it would be stored
    for (int other = term + (1 << log); other < kSliceTerms; other += 1 << log) {
      const float4 v = sums[other][piece];
      sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    const auto rounded = [](float v, float s, float b) { return ptx::ToFloat(Out(fmaf(v, s, b))); };
    sums[term][piece] = make_float4(rounded(sum.x, scale.x, bias.x),
                                    rounded(sum.y, scale.y, bias.y),
                                    rounded(sum.z, scale.z, bias.z),
                                    rounded(sum.w, scale.w, bias.w));
    if (piece == 0) here[term] = exists;
  }
  __syncthreads();
  if (term != 0 || feature >= down.n) return;
  float4 y{};
  for (int k = 0; k < top_k; ++k) {
    if (!here[k]) continue;  // whatever its weight is, NaN too
    const float weight = __ldcg(args.token.weights + k);
    const float4 v = sums[k][piece];
    y = make_float4(fmaf(weight, v.x, y.x),
                    fmaf(weight, v.y, y.y),
                    fmaf(weight, v.z, y.z),
                    fmaf(weight, v.w, y.w));
  }
  if (args.token.residual != nullptr) {
    const auto* residual = static_cast<const Out*>(args.token.residual) + feature;
    const float4 v = ForEach([&](int i) { return ptx::ToFloat(residual[i]); });
    y = make_float4(y.x + v.x, y.y + v.y, y.z + v.z, y.w + v.w);
  }
  const uint2 bits = make_uint2(ptx::Pack2<Out>(y.x, y.y), ptx::Pack2<Out>(y.z, y.w));
  *reinterpret_cast<uint2*>(static_cast<Out*>(args.token.y) + feature) = bits;
}

}  // namespace jaxmoe
