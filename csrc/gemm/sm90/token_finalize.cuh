// Finalize inside the down product of one token.
//
// A token alone has at most a row of each of its experts. A cluster has as many CTAs as the token
// has choices, all with the same weight tile, each of another expert; they hand their rows, rounded
// as they would be stored, to the first one, which adds them up as kernels/finalize.cuh does: the
// same bits, without a launch behind the product and a trip to L2.
#pragma once

#include "csrc/gemm/sm90/epilogue.cuh"
#include "csrc/kernels/slot_plan.cuh"

namespace jaxmoe {

// Of other kernels.
struct NoFinalize {
  template <class Args>
  __device__ __forceinline__ NoFinalize(const Args& args, int lane) {}
  template <class Args, class Storage>
  __device__ __forceinline__ void Run(const Args& args, const Storage& smem, int thread) const {}
};

// A consumer warp's part of the sum; lane k has choice k.
template <class T>
class TokenFinalize {
 public:
  // Reads the plan and the weights of choices, which were written before the launch before.
  __device__ __forceinline__ TokenFinalize(const FinalizedArgs& args, int lane) {
    if (ptx::ClusterRank() != 0) return;
    row_ = SlotPlan(args.plan, lane).row();
    if (lane < args.plan.top_k) weight_ = __ldcg(args.token.weights + lane);
  }

  // Adds up in the first CTA of the cluster: two features a thread, k = 0 first, residual last.
  __device__ __forceinline__ void Run(const FinalizedArgs& args,
                                      const SharedStorage<T>& smem,
                                      int thread) const {
    constexpr int kThreads = T::kWeightTile / 2;
    if (ptx::ClusterRank() != 0 || thread >= kThreads) return;
    const int first = blockIdx.x / ptx::ClusterSize() * T::kWeightTile;
    const int features = min(args.n_out - first, T::kWeightTile);
    const int rows = __popc(__ballot_sync(kAll, row_ >= 0));
    if (thread == 0) ptx::BarrierArriveExpectTx(smem.partial_full(), 2 * rows * features);
    const bool exists = 2 * thread < features;
    const int64_t at = (first + 2 * thread) / 2;
    const OutType<T> out{args.scales.half};
    uint32_t residual = 0;  // read early, added last
    if (args.token.residual != nullptr && exists) {
      residual = __ldcg(static_cast<const uint32_t*>(args.token.residual) + at);
    }
    GridDependencyWait();  // before y is written
    ptx::BarrierWait(smem.partial_full(), 0);
    float2 sum = make_float2(0.0f, 0.0f);
    for (int k = 0; k < args.plan.top_k; ++k) {
      const int row = __shfl_sync(kAll, row_, k);
      const float weight = __shfl_sync(kAll, weight_, k);
      if (row < 0) continue;  // whatever its weight is, NaN too
      const float2 v =
          out.Unpack2(*reinterpret_cast<const uint32_t*>(smem.finalized_row(row) + 4 * thread));
      sum = make_float2(fmaf(weight, v.x, sum.x), fmaf(weight, v.y, sum.y));
    }
    if (args.token.residual != nullptr) {
      const float2 v = out.Unpack2(residual);
      sum = make_float2(sum.x + v.x, sum.y + v.y);
    }
    if (exists) static_cast<uint32_t*>(args.token.y)[at] = out.Pack2(sum.x, sum.y);
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;

  int row_ = -1;
  float weight_ = 0.0f;
};

}  // namespace jaxmoe
