// The weight-gradient kernel: roles of the warps, the k loop, the launch of one variant.
//
//   dw[i][k, n] (+)= sum over the rows t of weight i of x[t, k] * dy[t, n]
//
// Rows t are the contraction: both operands lie in shared memory as in global memory, a row of t
// after the other, which is wgmma's MN-major. Persistent CTAs of 384 threads: warp 0 schedules, one
// thread of warp 1 loads, and two warpgroups multiply. A k loop may be four steps long, so the
// epilogue counts: the first consumer warpgroup is a few steps ahead of the second, and the tensor
// cores always have one of them.
//
// Shared memory: 192 KB of stages, 32 KB for the sums on their way out. Bytes that bind: dw once,
// and 384 columns of both operands for each row and tile from L2, 256 in pairs of CTAs.
#pragma once

#include "csrc/weight_grad/epilogue.cuh"
#include "csrc/weight_grad/producer.cuh"

namespace jaxmoe {

// One warpgroup's k loop over a tile: 64 rows of M.
template <class T>
class TgmmMainloop {
 public:
  using Sums = float[T::kAccumulators];

  __device__ TgmmMainloop(const TgmmStorage<T>& smem, int consumer, int thread)
      : smem_(smem), consumer_(consumer), thread_(thread) {}

  // Tells `ahead` when it is kLead steps in, as the first of the warpgroups.
  __device__ __forceinline__ void Run(int steps,
                                      StepRows<T> rows,
                                      uint64_t* ahead,
                                      PipelineState<T::kStages>& stage,
                                      Sums& sums) const {
    int step = 0;
    while (step < steps) {
      // Full steps, each stage handed back when the next has been issued.
      int slices = T::kSlices;
      int previous = -1;
      for (; step < steps; ++step) {
        ptx::BarrierWait(smem_.full(stage.index), stage.parity);
        slices = (rows.count() + T::kSliceRows - 1) / T::kSliceRows;
        if (slices < T::kSlices) break;
        ptx::FenceAccumulator(sums);
        cute::warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < T::kSlices; ++i) Issue(stage.index, i, step > 0 || i > 0, sums);
        cute::warpgroup_commit_batch();
        ptx::FenceAccumulator(sums);
        if (step + 1 == T::kLead) Tell(ahead);
        cute::warpgroup_wait<1>();
        if (previous >= 0) ReleaseStage(smem_, previous, thread_ % 32);
        previous = stage.index;
        stage.Advance();
        rows.Advance();
      }
      cute::warpgroup_wait<0>();
      ptx::FenceAccumulator(sums);
      if (previous >= 0) ReleaseStage(smem_, previous, thread_ % 32);
      if (step == steps) break;

      // The last step of a group: only slices with rows, others cost as much.
#pragma unroll 1
      for (int i = T::kSlices - slices; i < T::kSlices; ++i) {
        ptx::FenceAccumulator(sums);
        cute::warpgroup_arrive();
        Issue(stage.index, i, true, sums);
        cute::warpgroup_commit_batch();
        ptx::FenceAccumulator(sums);
      }
      cute::warpgroup_wait<0>();
      ptx::FenceAccumulator(sums);
      ReleaseStage(smem_, stage.index, thread_ % 32);
      stage.Advance();
      rows.Advance();
      ++step;
      if (step == T::kLead) Tell(ahead);
    }
    if (steps < T::kLead) Tell(ahead);
  }

 private:
  static constexpr cute::SM90::GMMA::Major kMN = cute::SM90::GMMA::Major::MN;
  static constexpr int kSliceBytes = T::kSliceRows * T::kBoxColumns * 2;

  __device__ __forceinline__ void Issue(int stage, int slice, bool accumulate, Sums& sums) const {
    const uint32_t m = ptx::SmemAddress(smem_.m_side(stage)) + consumer_ * T::kBoxBytes;
    const uint32_t n = ptx::SmemAddress(smem_.n_side(stage));
    ptx::Wgmma<typename T::Element, T::kN, kMN, kMN>(
        ptx::Swizzle128Descriptor<T::kBoxBytes>(m + slice * kSliceBytes),
        ptx::Swizzle128Descriptor<T::kBoxBytes>(n + slice * kSliceBytes),
        sums,
        accumulate);
  }

  __device__ __forceinline__ void Tell(uint64_t* ahead) const {
    if (consumer_ == 0 && thread_ == 0) ptx::BarrierArrive(ahead);
  }

  const TgmmStorage<T>& smem_;
  const int consumer_;
  const int thread_;
};

template <class T>
__device__ __forceinline__ void RunTgmmConsumer(const TgmmArgs& args,
                                                const TgmmStorage<T>& smem,
                                                int consumer) {
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const TgmmMainloop<T> mainloop(smem, consumer, thread);
  PipelineState<T::kStages> stage;
  ForEachTile(smem, lane, [&](const TileInfo& info, const auto& slot) {
    const int steps = StepsOfTile<T>(info);
    float sums[T::kAccumulators];
#pragma unroll
    for (int i = 0; i < T::kAccumulators; ++i) sums[i] = 0.0f;
    if (T::kLead > 0 && consumer == 1) ptx::BarrierWait(smem.ahead(slot.index()), slot.parity());
    mainloop.Run(steps, StepRows<T>(args, info), smem.ahead(slot.index()), stage, sums);
    slot.Release();
    if (args.accumulate && steps == 0) return;
    TgmmEpilogue<T>(args, smem, info, consumer, thread).Run(sums);
  });
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    TgmmKernel(const __grid_constant__ TgmmArgs args) {
  extern __shared__ uint8_t raw_smem[];
  const TgmmStorage<T> smem(raw_smem);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

  if (warp == 0 && lane == 0) {
    for (int s = 0; s < T::kStages; ++s) {
      ptx::BarrierInit(smem.full(s), 1);
      ptx::BarrierInit(smem.empty(s), 4 * T::kConsumers * T::kMulticast);
    }
    for (int s = 0; s < T::kRing; ++s) {
      ptx::BarrierInit(smem.ring_full(s), 1);
      // The loading thread, and the warps of the consumers.
      ptx::BarrierInit(smem.ring_empty(s), T::kCluster * (1 + 4 * T::kConsumers));
      ptx::BarrierInit(smem.ahead(s), 1);
    }
    ptx::BarrierInitFence();
  }
  if constexpr (T::kCluster > 1) {
    ptx::ClusterSyncInit();
  } else {
    __syncthreads();
  }
  GridDependencyWait();
  GridDependencyLaunch();

  // Each role is one branch, or ptxas ignores setmaxnreg.
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    if (warp == 0) {
      if (T::kCluster == 1 || ptx::ClusterRank() == 0) RunTgmmScheduler<T>(args, smem, lane);
    } else if (warp == 1 && lane == 0) {
      RunTgmmLoader<T>(args, smem);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    RunTgmmConsumer<T>(args, smem, warp / 4 - 1);
  }
  // Others still write to this CTA's shared memory, or arrive at its barriers.
  if constexpr (T::kCluster > 1) ptx::ClusterSync();
}

}  // namespace jaxmoe
